//! Every client of the list produces and consumes, unmodified: codecs, headers, big records, time lookups, ends.
//! With `SEALANE_E2E_TARGET=kafka` the same scenarios run against Apache Kafka, which is how they were made.

use std::collections::BTreeMap;
use std::io::Write;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use e2e::clients::{Library, Record};
use e2e::server::Server;
use e2e::wire::{BatchHead, Conn, FetchPlan, batch, batches};
use e2e::{dump, logread, tools};

const PARTITIONS: i32 = 3;

/// Codecs that every client reads, and those that kafkajs cannot.
const CODECS: [(&str, &[&str]); 2] = [("common", &["none", "gzip", "snappy"]), ("modern", &["lz4", "zstd"])];

#[test]
fn what_any_client_writes_with_any_codec_every_client_reads() -> Result<()> {
    let mut server = Server::start_several()?;
    let mut total = 0;
    for (topic, codecs) in CODECS {
        Conn::open(server.bootstrap())?.create_topic(topic, PARTITIONS, &[])?;
        let able = |library: &Library| codecs.iter().all(|codec| library.codecs().contains(codec));
        let libraries: Vec<Library> = Library::ALL.into_iter().filter(able).collect();
        let written = written_by(&libraries, &server, topic, codecs)?;
        total += written.len();
        for library in libraries {
            for isolation in ["read_uncommitted", "read_committed"] {
                let options = ["--isolation", isolation];
                let read = library.consume(&server.bootstrap(), topic, written.len(), &options)?;
                same_as_written(library, &written, &read)?;
            }
        }
    }
    if !Server::is_kafka()
        && let Some(data) = server.stop_and_data()?
    {
        let log = logread::read(&data, None)?;
        let ours = log.records.iter().filter(|logged| CODECS.iter().any(|(topic, _)| *topic == logged.topic));
        ensure!(ours.count() == total, "the log holds another number of records than {total}");
    }
    Ok(())
}

fn written_by(
    libraries: &[Library],
    server: &Server,
    topic: &str,
    codecs: &[&str],
) -> Result<BTreeMap<(i32, i64), Record>> {
    let mut written = BTreeMap::new();
    for library in libraries {
        for codec in codecs {
            let prefix = format!("{}-{codec}-", library.name());
            let records: Vec<Record> =
                (0..12).map(|n| Record::numbered(&prefix, n).partition(n as i32 % PARTITIONS)).collect();
            let options = ["--codec", codec, "--linger", "20"];
            let places = library.produce_all(&server.bootstrap(), topic, &records, &options)?;
            for (place, record) in places.into_iter().zip(records) {
                ensure!(written.insert(place, record).is_none(), "two records at {place:?}");
            }
        }
    }
    Ok(written)
}

fn same_as_written(library: Library, written: &BTreeMap<(i32, i64), Record>, read: &[Record]) -> Result<()> {
    let mut last = BTreeMap::new();
    ensure!(read.len() == written.len(), "{}: {} of {}", library.name(), read.len(), written.len());
    for record in read {
        let (partition, offset) = (record.partition.context("partition")?, record.offset.context("offset")?);
        let sent = written.get(&(partition, offset)).context("a record that nobody wrote there")?;
        ensure!(sent.content() == record.content(), "{}: {sent:?} became {record:?}", library.name());
        let before = last.insert(partition, offset);
        ensure!(before < Some(offset), "{}: partition {partition} out of order", library.name());
    }
    Ok(())
}

/// The records of regression case C07: null, empty and absent stay three things; headers are a list.
fn odd_records() -> Vec<Record> {
    let list: [(&str, Option<&[u8]>); 6] = [
        ("b", Some(b"1")),
        ("a", None),
        ("a", Some(b"")),
        ("a", Some(b"2")),
        ("b", Some(b"1")),
        ("é", Some(b"\xff\x00")),
    ];
    let headers: Vec<(String, Option<Vec<u8>>)> =
        list.iter().map(|(name, value)| (name.to_string(), value.map(<[u8]>::to_vec))).collect();
    let many = (0..300).map(|n| (format!("h{n}"), Some(n.to_string().into_bytes()))).collect();
    let value = Some(b"v".to_vec());
    let record = |key: Option<&[u8]>, value: Option<Vec<u8>>, headers| Record {
        partition: Some(0),
        timestamp: Some(1_700_000_000_123),
        key: key.map(<[u8]>::to_vec),
        value,
        headers,
        ..Record::default()
    };
    vec![
        record(None, value.clone(), headers),
        record(Some(b""), value.clone(), vec![]),
        record(Some(b"k"), None, vec![]),
        record(Some(b"k"), Some(vec![]), vec![]),
        record(Some(b"k"), value, many),
    ]
}

#[test]
fn header_lists_nulls_and_empties_survive_under_every_codec() -> Result<()> {
    let mut server = Server::start_several()?;
    Conn::open(server.bootstrap())?.create_topic("t", 1, &[])?;
    let mut sent = Vec::new();
    for codec in ["none", "gzip", "snappy", "lz4", "zstd"] {
        Library::Confluent.produce_all(&server.bootstrap(), "t", &odd_records(), &["--codec", codec])?;
        sent.extend(odd_records());
    }
    for library in [Library::Confluent, Library::KafkaPython, Library::Aiokafka, Library::FranzGo] {
        let read = library.consume(&server.bootstrap(), "t", sent.len(), &[])?;
        for (one, other) in sent.iter().zip(&read) {
            ensure!(one.content() == other.content(), "{}: {one:?} became {other:?}", library.name());
            ensure!(one.timestamp == other.timestamp, "{}: timestamp changed", library.name());
        }
    }
    if !Server::is_kafka()
        && let Some(data) = server.stop_and_data()?
    {
        let log = logread::read(&data, Some("t"))?;
        for (one, other) in sent.iter().zip(&log.records) {
            ensure!(one.content() == other.record.content(), "the log: {one:?} became {:?}", other.record);
        }
    }
    Ok(())
}

#[test]
fn a_record_larger_than_every_fetch_limit_is_still_read() -> Result<()> {
    let server = Server::start()?;
    let mut raw = Conn::open(server.bootstrap())?;
    raw.create_topic("big", 2, &[])?;
    let big: Vec<u8> = (0..400_000u32).map(|n| b'a' + (n * 7 % 26) as u8).collect();
    for partition in ["0", "1"] {
        kcat(&server, &["-P", "-t", "big", "-p", partition], &big)?;
    }
    let plan = FetchPlan { max_bytes: 1, partition_max_bytes: 1, ..FetchPlan::now("big", &[(0, 0), (1, 0)]) };
    let answer = raw.fetch(plan)?;
    let whole: Vec<_> = answer.iter().filter(|(_, part)| !batches(&part.records).is_empty()).collect();
    ensure!(!whole.is_empty(), "no partition advances");
    ensure!(batches(&whole[0].1.records) == vec![(0, 0, 1, 0)], "not one whole batch");
    ensure!(whole[0].1.records.len() > big.len(), "the batch is cut");
    let options =
        ["-C", "-t", "big", "-p", "0", "-o", "beginning", "-e", "-q", "-X", "fetch.message.max.bytes=1024"];
    let printed = kcat(&server, &options, b"")?;
    ensure!(printed.trim_end().len() == big.len(), "kcat printed {} bytes", printed.len());
    Ok(())
}

#[test]
fn kcat_of_debian_produces_and_consumes() -> Result<()> {
    let server = Server::start()?;
    let lines: String = (0..1_000).map(|n| format!("k{n}:line {n}\n")).collect();
    kcat(&server, &["-P", "-t", "kcat", "-K:", "-z", "snappy", "-H", "a=1", "-H", "a=2"], lines.as_bytes())?;
    let options = ["-C", "-t", "kcat", "-o", "beginning", "-e", "-q", "-f", "%k:%s|%h\n"];
    let printed = kcat(&server, &options, b"")?;
    let wanted: String = (0..1_000).map(|n| format!("k{n}:line {n}|a=1,a=2\n")).collect();
    ensure!(printed == wanted, "kcat printed something else:\n{}", &printed[..printed.len().min(300)]);
    let listed = kcat(&server, &["-L", "-J"], b"")?;
    ensure!(listed.contains("\"topic\":\"kcat\""), "{listed}");
    Ok(())
}

#[test]
fn offsets_for_times_are_searched_inside_batches() -> Result<()> {
    let server = Server::start()?;
    let mut raw = Conn::open(server.bootstrap())?;
    for codec in ["none", "gzip"] {
        raw.create_topic(codec, 1, &[("message.timestamp.type", "CreateTime"), ("retention.ms", "-1")])?;
        let records: Vec<Record> = [1000, 3000, 2000]
            .into_iter()
            .enumerate()
            .map(|(n, time)| Record { timestamp: Some(time), ..Record::numbered("v", n).partition(0) })
            .collect();
        let options = ["--linger", "1000", "--codec", codec];
        Library::KafkaPython.produce_all(&server.bootstrap(), codec, &records, &options)?;
        let found = batches(&raw.fetch(FetchPlan::now(codec, &[(0, 0)]))?[0].1.records);
        ensure!(found.len() == 1, "{codec}: not one batch: {found:?}");
        for (time, wanted) in [(0, 0), (1500, 1), (2500, 1), (3000, 1), (3001, -1)] {
            let (error, timestamp, offset) = raw.list_offset(codec, 0, time)?;
            ensure!(error == 0 && offset == wanted, "{codec}, time {time}: offset {offset}, error {error}");
            ensure!(offset >= 0 || timestamp == -1, "{codec}, time {time}: timestamp {timestamp}");
        }
        let times = Library::KafkaPython.start(
            "times",
            &server.bootstrap(),
            codec,
            &["--times", "0,1500,2500,3000,3001"],
        );
        let mut times = times?;
        times.wait_end(e2e::clients::PATIENCE)?;
        let offsets: Vec<Option<i64>> = times.lines().iter().map(|line| line["o"].as_i64()).collect();
        ensure!(offsets == [Some(0), Some(1), Some(1), Some(1), None], "kafka-python: {offsets:?}");
    }
    // After a trim no answer lies below the log start.
    delete_records(&server, "none", 1)?;
    for time in [0, 1500] {
        ensure!(raw.list_offset("none", 0, time)?.2 == 1, "an answer below the log start");
    }
    Ok(())
}

fn delete_records(server: &Server, topic: &str, offset: i64) -> Result<()> {
    let mut file = tempfile::NamedTempFile::new()?;
    write!(
        file,
        "{{\"partitions\":[{{\"topic\":\"{topic}\",\"partition\":0,\"offset\":{offset}}}],\"version\":1}}"
    )?;
    let path = file.path().to_string_lossy().into_owned();
    server.run_tool("org.apache.kafka.tools.DeleteRecordsCommand", &["--offset-json-file", &path])?;
    Ok(())
}

#[test]
fn every_client_reaches_the_high_watermark() -> Result<()> {
    let server = Server::start()?;
    let mut raw = Conn::open(server.bootstrap())?;
    raw.create_topic("t", 1, &[])?;
    for n in 0..20 {
        let record = Record::numbered("v", n);
        ensure!(raw.produce("t", 0, &batch(&[record], BatchHead::default()))? == (0, n as i64));
    }
    for library in Library::ALL {
        let group = format!("end-{}", library.name());
        let options = ["--group", &group, "--commit", "--isolation", "read_committed"];
        let (records, ends) = library.read_to_end(&server.bootstrap(), "t", &options)?;
        ensure!(records.len() == 20, "{}: {} records", library.name(), records.len());
        ensure!(ends == [(0, 20, 20)], "{}: {ends:?}", library.name());
    }
    Ok(())
}

#[test]
fn the_console_and_verifiable_tools_of_kafka_work() -> Result<()> {
    let mut server = Server::start_several()?;
    let lines: String = (0..200).map(|n| format!("k{n}\tv{n}\n")).collect();
    let mut producer = server.tool(
        "org.apache.kafka.tools.ConsoleProducer",
        &["--topic", "console", "--reader-property", "parse.key=true", "--compression-codec", "zstd"],
    )?;
    fed(&mut producer, lines.as_bytes())?;
    let printed = server.run_tool(
        "org.apache.kafka.tools.consumer.ConsoleConsumer",
        &[
            "--topic",
            "console",
            "--from-beginning",
            "--max-messages",
            "200",
            "--formatter-property",
            "print.key=true",
        ],
    )?;
    ensure!(printed == lines, "the console consumer printed {} bytes of {}", printed.len(), lines.len());

    let verified = server.run_tool(
        "org.apache.kafka.tools.VerifiableProducer",
        &["--topic", "verifiable", "--max-messages", "500", "--acks", "-1"],
    )?;
    ensure!(verified.matches("producer_send_success").count() == 500, "{verified}");
    let consumed = server.run_tool(
        "org.apache.kafka.tools.VerifiableConsumer",
        &[
            "--topic",
            "verifiable",
            "--group-id",
            "verify",
            "--max-messages",
            "500",
            "--reset-policy",
            "earliest",
        ],
    )?;
    ensure!(consumed.contains("offsets_committed"), "{consumed}");
    server.stop_and_data()?.map_or(Ok(()), |data| dump::judge(&data).map(drop))
}

#[test]
fn kafka_dump_log_reads_every_segment_and_index() -> Result<()> {
    let mut server = Server::start()?;
    let mut raw = Conn::open(server.bootstrap())?;
    // Small segments and a dense index, so that there is much to read.
    raw.create_topic("t", 2, &[("segment.bytes", "1048576"), ("index.interval.bytes", "512")])?;
    let records: Vec<Record> = (0..6_000)
        .map(|n| Record {
            value: Some(vec![b'a' + (n % 26) as u8; 600]),
            ..Record::numbered("v", n).partition(n as i32 % 2)
        })
        .collect();
    for codec in ["none", "lz4"] {
        Library::Confluent.produce_all(&server.bootstrap(), "t", &records, &["--codec", codec])?;
    }
    let group = ["--group", "g", "--commit"];
    Library::KafkaPython.consume(&server.bootstrap(), "t", records.len(), &group)?;
    server.stop_and_data()?.map_or(Ok(()), |data| dump::judge(&data).map(drop))
}

const TOPICS: &str = "org.apache.kafka.tools.TopicCommand";
const CONFIGS: &str = "org.apache.kafka.tools.ConfigCommand";

#[test]
fn the_admin_tools_of_kafka_work() -> Result<()> {
    let server = Server::start_several()?;
    let create = ["--create", "--topic", "tool", "--partitions", "2", "--config", "retention.ms=3600000"];
    server.run_tool(TOPICS, &create)?;
    ensure!(server.run_tool(TOPICS, &["--list"])?.lines().any(|line| line == "tool"), "not listed");
    server.run_tool(TOPICS, &["--alter", "--topic", "tool", "--partitions", "3"])?;
    let described = server.run_tool(TOPICS, &["--describe", "--topic", "tool"])?;
    ensure!(
        described.contains("PartitionCount: 3") && described.contains("retention.ms=3600000"),
        "{described}"
    );
    let entity = ["--entity-type", "topics", "--entity-name", "tool"];
    let alter = [&["--alter", "--add-config", "max.message.bytes=12345"][..], &entity].concat();
    server.run_tool(CONFIGS, &alter)?;
    let configs = server.run_tool(CONFIGS, &[&["--describe"][..], &entity].concat())?;
    ensure!(
        configs.contains("max.message.bytes=12345") && configs.contains("retention.ms=3600000"),
        "{configs}"
    );
    let all = server.run_tool(CONFIGS, &[&["--describe", "--all"][..], &entity].concat())?;
    ensure!(all.contains("segment.bytes=") && all.contains("cleanup.policy="), "{all}");
    let records: Vec<Record> = (0..9).map(|n| Record::numbered("v", n).partition(n as i32 % 3)).collect();
    Library::Confluent.produce_all(&server.bootstrap(), "tool", &records, &[])?;
    let offsets = server.run_tool("org.apache.kafka.tools.GetOffsetShell", &["--topic", "tool"])?;
    ensure!(["tool:0:3", "tool:1:3", "tool:2:3"].iter().all(|line| offsets.contains(line)), "{offsets}");
    let dirs =
        server.run_tool("org.apache.kafka.tools.LogDirsCommand", &["--describe", "--topic-list", "tool"])?;
    ensure!(dirs.contains("tool-2"), "{dirs}");
    let versions = server.run_tool("org.apache.kafka.tools.BrokerApiVersionsCommand", &[])?;
    ensure!(versions.contains("Produce(0)") && versions.contains("Fetch(1)"), "{versions}");
    server.run_tool(TOPICS, &["--delete", "--topic", "tool"])?;
    ensure!(!server.run_tool(TOPICS, &["--list"])?.lines().any(|line| line == "tool"), "still listed");
    Ok(())
}

fn kcat(server: &Server, arguments: &[&str], input: &[u8]) -> Result<String> {
    let mut command = Command::new(tools::kcat()?);
    command.args(["-b", &server.bootstrap()]).args(arguments);
    fed(&mut command, input)
}

/// Runs a command with this standard input; what it printed.
fn fed(command: &mut Command, input: &[u8]) -> Result<String> {
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    child.stdin.take().context("stdin is piped")?.write_all(input)?;
    let output = child.wait_with_output()?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{:?} ended with {}: {errors}", command.get_program(), output.status);
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
