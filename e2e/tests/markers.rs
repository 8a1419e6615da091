//! A topic full of markers (lane cuts and mirror units between the records, and at the end) reads clean from every
//! client, to a lag of 0; and Kafka's dump-log reads every segment and index of it.

use std::collections::BTreeSet;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use e2e::clients::{Library, Record};
use e2e::lanes::{self, HEADER, until, wait_state};
use e2e::process::{Local, Plan};
use e2e::wire::{BatchHead, Conn, batch};
use e2e::{dump, logread, peer, tools};

const TOPIC: &str = "t";
const LANE: &str = "boe-cart";
const PARTITIONS: i32 = 2;
const ROUNDS: usize = 4;
/// Clients whose position goes over what is no record.
const POSITIONED: [Library; 2] = [Library::KafkaPython, Library::Aiokafka];
const ISOLATIONS: [&str; 2] = ["read_uncommitted", "read_committed"];
const GROUPS: &str = "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand";

/// Ids of what was written.
#[derive(Default)]
struct Written {
    base: BTreeSet<String>,
    lane: BTreeSet<String>,
}

impl Written {
    fn all(&self) -> BTreeSet<String> {
        &self.base | &self.lane
    }

    /// One batch to each partition of a region.
    fn add(&mut self, local: &Local, region: usize, prefix: &str, lane: Option<&str>) -> Result<()> {
        let mut conn = Conn::open(local.bootstrap(region))?;
        for partition in 0..PARTITIONS {
            let records: Vec<Record> = (0..2)
                .map(|n| {
                    let record = Record::numbered(&format!("{prefix}-{partition}-"), n);
                    if let Some(lane) = lane { record.header(HEADER, lane) } else { record }
                })
                .collect();
            let ids = if lane.is_some() { &mut self.lane } else { &mut self.base };
            ids.extend(records.iter().map(Record::text));
            ensure!(conn.produce(TOPIC, partition, &batch(&records, BatchHead::default()))?.0 == 0);
        }
        Ok(())
    }
}

/// Two regions that write in turns while a lane comes and goes in the first; its last cut ends the log there.
fn marked() -> Result<(Local, Written)> {
    let local = Plan::two().start()?;
    Conn::open(local.bootstrap(0))?.create_topic(TOPIC, PARTITIONS, &[("sealane.lanes", "true")])?;
    until("the topic in the other region", || {
        Ok(Conn::open(local.bootstrap(1))?.list_offset(TOPIC, PARTITIONS - 1, -1)?.0 == 0)
    })?;
    let lane = lanes::create(&local, LANE)?;
    let mut written = Written::default();
    for round in 0..ROUNDS {
        written.add(&local, 0, &format!("east-{round}"), None)?;
        written.add(&local, 1, &format!("west-{round}"), None)?;
        let options = ["--group", "visitor", "--commit", "--count", "4", "--seconds", "110"];
        let mut visitor = Library::FranzGo.start("consume", &lane, TOPIC, &options)?;
        wait_state(&local, LANE, "active")?;
        written.add(&local, 0, &format!("lane-{round}"), Some(LANE))?;
        for region in 0..2 {
            // Outside of any group one sees the baseline's records.
            until("the baseline's records in both regions", || {
                let count = Conn::open(local.bootstrap(region))?.count_records(TOPIC, PARTITIONS)?;
                Ok(count == written.base.len() as u64)
            })?;
        }
        visitor.wait_end(e2e::clients::PATIENCE)?;
        wait_state(&local, LANE, "closed")?;
    }
    // Lane records fall to the baseline where their group has nobody in the lane.
    Library::FranzGo.consume(&local.bootstrap(1), TOPIC, written.all().len(), &["--group", "arrived"])?;
    Ok((local, written))
}

fn texts(records: &[Record]) -> BTreeSet<String> {
    records.iter().map(Record::text).collect()
}

fn same(who: &str, read: &[Record], wanted: &BTreeSet<String>) -> Result<()> {
    ensure!(read.len() == wanted.len() && texts(read) == *wanted, "{who} read {:?}", texts(read));
    Ok(())
}

/// Reads as a group's member with every client; the names of the groups.
fn read_in_groups(region: usize, bootstrap: &str, written: &Written) -> Result<Vec<String>> {
    let wanted = written.all();
    let mut groups = Vec::new();
    for library in Library::ALL {
        for isolation in ISOLATIONS {
            // It commits behind its own long polls, a quarter of a second for each record: once is enough.
            if library == Library::Sarama && isolation != ISOLATIONS[region] {
                continue;
            }
            let group = format!("{}-{isolation}", library.name());
            let options = ["--group", &group, "--commit", "--isolation", isolation];
            if POSITIONED.contains(&library) {
                let (read, ends) = library.read_to_end(bootstrap, TOPIC, &options)?;
                same(&group, &read, &wanted)?;
                let at_end = ends.iter().all(|(_, position, high)| position == high);
                ensure!(ends.len() == PARTITIONS as usize && at_end, "{group} ends at {ends:?}");
            } else {
                // They speak of the last record alone; the group's lag tells the rest.
                same(&group, &library.consume(bootstrap, TOPIC, wanted.len(), &options)?, &wanted)?;
            }
            groups.push(group);
        }
    }
    let mut java = peer::tool("org.apache.kafka.tools.consumer.ConsoleConsumer")?;
    java.args(["--bootstrap-server", bootstrap, "--topic", TOPIC, "--group", "java", "--from-beginning"]);
    java.args(["--max-messages", &wanted.len().to_string()]);
    java.args(["--command-property", "isolation.level=read_committed"]);
    let printed = peer::run(&mut java)?;
    let printed: BTreeSet<String> = printed.lines().map(str::to_owned).collect();
    ensure!(printed == wanted, "the Java client read {printed:?}");
    groups.push("java".to_owned());
    Ok(groups)
}

/// Reads outside of any group to the end.
fn read_alone(bootstrap: &str, written: &Written) -> Result<()> {
    for library in [Library::Confluent, Library::KafkaPython, Library::Aiokafka] {
        for isolation in ISOLATIONS {
            let (read, ends) = library.read_to_end(bootstrap, TOPIC, &["--isolation", isolation])?;
            same(library.name(), &read, &written.base)?;
            let at_end = ends.iter().all(|(_, position, high)| position == high);
            ensure!(
                at_end || !POSITIONED.contains(&library),
                "{} {isolation} ends at {ends:?}",
                library.name()
            );
        }
    }
    for isolation in ISOLATIONS {
        let mut kcat = Command::new(tools::kcat()?);
        kcat.args(["-b", bootstrap, "-C", "-t", TOPIC, "-o", "beginning", "-e", "-q"]);
        let printed = peer::run(kcat.args(["-X", &format!("isolation.level={isolation}")]))?;
        let printed: BTreeSet<String> = printed.lines().map(str::to_owned).collect();
        ensure!(printed == written.base, "kcat {isolation} read {printed:?}");
    }
    Ok(())
}

/// The lag of each of these groups is 0 on every partition, by `kafka-consumer-groups`.
fn ensure_no_lag(bootstrap: &str, groups: &[String]) -> Result<()> {
    let mut tool = peer::tool(GROUPS)?;
    tool.args(["--bootstrap-server", bootstrap, "--describe", "--all-groups"]);
    let described = peer::run(&mut tool)?;
    for group in groups {
        let rows: Vec<Vec<&str>> = described
            .lines()
            .map(|line| line.split_whitespace().collect::<Vec<_>>())
            .filter(|row| row.first() == Some(&group.as_str()))
            .collect();
        let no_lag = rows.iter().all(|row| row.get(5) == Some(&"0"));
        ensure!(rows.len() == PARTITIONS as usize && no_lag, "{group}: {rows:?}\n{described}");
    }
    Ok(())
}

#[test]
fn a_topic_full_of_markers_reads_clean_and_without_lag_from_every_client() -> Result<()> {
    let (mut local, written) = marked()?;
    for region in 0..2 {
        let bootstrap = local.bootstrap(region);
        let groups =
            read_in_groups(region, &bootstrap, &written).with_context(|| format!("region {region}"))?;
        read_alone(&bootstrap, &written).with_context(|| format!("region {region}"))?;
        ensure_no_lag(&bootstrap, &groups)?;
    }
    ensure!(local.stop()?.success(), "it does not stop cleanly");
    let logs = [
        logread::read(&local.region_dir(0), Some(TOPIC))?,
        logread::read(&local.region_dir(1), Some(TOPIC))?,
    ];
    let cuts = logs[0].markers(TOPIC, "activate") + logs[0].markers(TOPIC, "deactivate");
    let units = logs[0].markers(TOPIC, "mirror") + logs[1].markers(TOPIC, "mirror");
    let last = logs[0].records.iter().map(|logged| logged.offset).max();
    let end = logs[0].partitions.iter().map(|partition| partition.end).max();
    println!("at stake: {} records, {cuts} lane cuts, {units} mirror units", written.all().len());
    ensure!(cuts >= 2 * ROUNDS as u64 && units > 0, "nothing was at stake");
    ensure!(end > last.map(|last| last + 1), "the log does not end in a marker");
    let dumped = dump::judge(&local.data_dir())?;
    for marker in ["UNKNOWN(100)", "UNKNOWN(101)", "UNKNOWN(102)"] {
        ensure!(dumped.contains(marker), "dump-log shows no {marker}");
    }
    Ok(())
}
