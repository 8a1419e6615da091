//! The clients that make load: Apache Kafka's own performance tools, and `clients/rdkafka/perf.c` on librdkafka. A
//! run is one process with a deadline; it returns what the client itself measured.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::{peer, tools};

/// A run that takes longer is stopped and fails.
const RUN_LIMIT: Duration = Duration::from_secs(300);
const MEGABYTE: f64 = 1e6;

/// Which client makes the load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Client {
    Java,
    Librdkafka,
}

/// What is sent.
#[derive(Clone, Debug)]
pub struct Load {
    pub topic: String,
    pub records: u64,
    pub record_bytes: u64,
    pub codec: &'static str,
    /// Of a thousand records, how many carry a lane's header, and over how many lanes (librdkafka only).
    pub lane_per_mille: u32,
    pub lanes: u32,
}

/// Latencies in microseconds.
#[derive(Clone, Copy, Debug)]
pub struct Latency {
    pub p50: f64,
    pub p99: f64,
    pub p999: f64,
}

impl Client {
    pub const ALL: [Client; 2] = [Client::Java, Client::Librdkafka];

    pub fn name(self) -> &'static str {
        match self {
            Client::Java => "java",
            Client::Librdkafka => "librdkafka",
        }
    }
}

impl Load {
    /// Records without a lane.
    pub fn plain(topic: &str, records: u64, record_bytes: u64, codec: &'static str) -> Load {
        Load { topic: topic.to_owned(), records, record_bytes, codec, lane_per_mille: 0, lanes: 0 }
    }

    /// Payload in bytes.
    pub fn bytes(&self) -> f64 {
        (self.records * self.record_bytes) as f64
    }
}

/// Sends the whole load with acks=all; megabytes of payload per second.
pub fn produce(client: Client, bootstrap: &str, load: &Load) -> Result<f64> {
    match client {
        Client::Java => {
            let printed = run(&mut java_producer(bootstrap, load)?)?;
            let line =
                printed.lines().rev().find(|line| line.contains("records sent")).context("no summary")?;
            Ok(number_before(line, " records/sec")? * load.record_bytes as f64 / MEGABYTE)
        }
        Client::Librdkafka => {
            let records = load.records.to_string();
            let bytes = load.record_bytes.to_string();
            let (lanes, per_mille) = (load.lanes.max(1).to_string(), load.lane_per_mille.to_string());
            let arguments =
                ["produce", bootstrap, &load.topic, &records, &bytes, load.codec, "all", &lanes, &per_mille];
            let answer = rdkafka(&arguments)?;
            Ok(load.bytes() / answer["seconds"].as_f64().context("no seconds")? / MEGABYTE)
        }
    }
}

/// Reads `load.records` records from the beginning; megabytes of payload per second.
pub fn consume(client: Client, bootstrap: &str, load: &Load) -> Result<f64> {
    match client {
        Client::Java => {
            let mut command = peer::tool("org.apache.kafka.tools.ConsumerPerformance")?;
            command.args(["--bootstrap-server", bootstrap, "--topic", &load.topic, "--hide-header"]);
            command.args(["--timeout", "30000", "--num-records", &load.records.to_string()]);
            let printed = run(&mut command)?;
            let line = printed.lines().rev().find(|line| line.contains(", ")).context("no summary")?;
            let columns: Vec<&str> = line.split(", ").collect();
            ensure!(columns.len() == 10, "not ten columns: {line}");
            let (read, records): (f64, f64) = (columns[9].trim().parse()?, columns[4].trim().parse()?);
            ensure!(records >= load.records as f64, "read {records} of {} records", load.records);
            Ok(read * load.record_bytes as f64 / MEGABYTE)
        }
        Client::Librdkafka => {
            read_with(&["consume", bootstrap, &load.topic, &load.records.to_string()], load)
        }
    }
}

/// As [`consume`] with librdkafka, as the only member of a group.
pub fn consume_in_group(bootstrap: &str, load: &Load, group: &str) -> Result<f64> {
    read_with(&["consume", bootstrap, &load.topic, &load.records.to_string(), group], load)
}

/// As [`consume`] with librdkafka while the load is still being made: megabytes per second of the whole wait, the
/// time to the first record too.
pub fn consume_along(bootstrap: &str, load: &Load) -> Result<f64> {
    let answer = rdkafka(&["consume", bootstrap, &load.topic, &load.records.to_string()])?;
    Ok(load.bytes() / answer["seconds"].as_f64().context("no seconds")? / MEGABYTE)
}

fn read_with(arguments: &[&str], load: &Load) -> Result<f64> {
    let answer = rdkafka(arguments)?;
    let time = |name: &str| answer[name].as_f64().context("no seconds");
    // From the first record on: connecting and joining are not throughput.
    Ok(load.bytes() / (time("seconds")? - time("first")?) / MEGABYTE)
}

/// Sends at a fixed rate with acks=all and no linger while a consumer reads along: time from when a record was due
/// to its acknowledgement, and to its arrival.
pub fn latency(bootstrap: &str, load: &Load, per_second: u64) -> Result<(Latency, Latency)> {
    let (records, bytes) = (load.records.to_string(), load.record_bytes.to_string());
    let answer = rdkafka(&["latency", bootstrap, &load.topic, &records, &bytes, &per_second.to_string()])?;
    let read = |name: &str| -> Result<Latency> {
        let field = |percentile: &str| answer[name][percentile].as_f64().context("no percentile");
        Ok(Latency { p50: field("p50")?, p99: field("p99")?, p999: field("p999")? })
    };
    Ok((read("ack_us")?, read("arrival_us")?))
}

fn java_producer(bootstrap: &str, load: &Load) -> Result<Command> {
    let mut command = peer::tool("org.apache.kafka.tools.ProducerPerformance")?;
    command.args(["--bootstrap-server", bootstrap, "--topic", &load.topic, "--throughput", "-1"]);
    command.args(["--num-records", &load.records.to_string()]);
    command.args(["--record-size", &load.record_bytes.to_string(), "--reporting-interval", "1000000"]);
    command.args(["--command-property", "acks=all", &format!("compression.type={}", load.codec)]);
    Ok(command)
}

fn rdkafka(arguments: &[&str]) -> Result<Value> {
    let mut command = Command::new(rdkafka_program()?);
    Ok(serde_json::from_str(&run(command.args(arguments))?)?)
}

/// The load generator on librdkafka, built once on each machine.
pub fn rdkafka_program() -> Result<PathBuf> {
    let source = tools::client_files().join("rdkafka/perf.c");
    let home = tools::installed("rdkafka", &[&source], |home| {
        let build = |home: &std::path::Path| {
            let mut cc = Command::new("cc");
            cc.args(["-O2", "-o"]).arg(home.join("perf")).arg(&source).args(["-lrdkafka", "-lpthread"]);
            cc.output().is_ok_and(|output| output.status.success())
        };
        if !build(home) {
            tools::system_package("librdkafka-dev")?;
            ensure!(build(home), "cc cannot build {} against librdkafka", source.display());
        }
        Ok(())
    })?;
    Ok(home.join("perf"))
}

/// Runs a client to its end, at most [`RUN_LIMIT`]; its standard output.
fn run(command: &mut Command) -> Result<String> {
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let end = Instant::now() + RUN_LIMIT;
    // Their output is a few lines, so the pipes do not fill while nobody reads.
    while child.try_wait()?.is_none() {
        if Instant::now() > end {
            child.kill()?;
            child.wait()?;
            bail!("{:?} takes longer than {RUN_LIMIT:?}", command.get_args().collect::<Vec<_>>());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let output = child.wait_with_output()?;
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(
        output.status.success(),
        "{:?} ended with {}:\n{printed}{}",
        command.get_args().collect::<Vec<_>>(),
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(printed)
}

fn number_before(line: &str, unit: &str) -> Result<f64> {
    let head = line.split(unit).next().context("an empty line")?;
    let word = head.rsplit([' ', '(']).next().context("no number")?;
    word.parse().with_context(|| format!("no number before {unit:?} in {line:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_summary_of_the_producer_tool_is_read() {
        let line = "30000 records sent, 7178.750897 records/sec (7.01 MB/sec), 1359.09 ms avg latency";
        assert_eq!(number_before(line, " records/sec").unwrap(), 7178.750897);
        assert_eq!(number_before(line, " MB/sec").unwrap(), 7.01);
    }

    #[test]
    fn both_clients_load_a_real_kafka_and_say_how_fast() {
        let peer = peer::Peer::start(&[]).unwrap();
        for client in Client::ALL {
            let topic = client.name();
            crate::wire::Conn::open(peer.address()).unwrap().create_topic(topic, 2, &[]).unwrap();
            let load = Load::plain(topic, 2000, 100, "zstd");
            assert!(produce(client, &peer.bootstrap(), &load).unwrap() > 0.0);
            assert!(consume(client, &peer.bootstrap(), &load).unwrap() > 0.0);
        }
        let load = Load { lane_per_mille: 500, lanes: 3, ..Load::plain("java", 1000, 100, "none") };
        produce(Client::Librdkafka, &peer.bootstrap(), &load).unwrap();
        consume_in_group(&peer.bootstrap(), &load, "group").unwrap();
        let (ack, arrival) = latency(&peer.bootstrap(), &Load::plain("java", 300, 100, "none"), 500).unwrap();
        assert!(ack.p50 > 0.0 && ack.p50 <= ack.p99 && arrival.p50 <= arrival.p999);
    }
}
