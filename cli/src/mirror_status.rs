//! `sealane mirror status`: every link with its lag, and what was skipped, lost, refused or left out.
//!
//! What is not known is shown as unknown, never as 0.

use control::v1;
use serde::Serialize;

use crate::args::MirrorStatus;
use crate::output::{Table, bytes, known, non_negative, show};
use crate::region::Region;

#[derive(Serialize)]
struct Status {
    report_age_ms: Option<i64>,
    links: Vec<Link>,
    notes: Vec<Note>,
}

#[derive(Serialize)]
struct Link {
    peer: String,
    peer_region_id: String,
    address: String,
    state: &'static str,
    reason: String,
    rtt_us: Option<u64>,
    sent_bytes: u64,
    received_bytes: u64,
    partitions: Vec<Partition>,
}

#[derive(Serialize)]
struct Partition {
    topic: String,
    partition: i32,
    direction: &'static str,
    state: &'static str,
    reason: String,
    next_offset: i64,
    lag_records: Option<u64>,
    lag_bytes: Option<u64>,
    lag_ms: Option<u64>,
}

#[derive(Serialize)]
struct Note {
    peer: String,
    kind: String,
    topic: String,
    partition: i32,
    from_offset: i64,
    /// `null`: all from there on.
    to_offset: Option<i64>,
    /// `null`: it has no moment, but is so now.
    at_ms: Option<i64>,
    text: String,
}

pub async fn run(args: MirrorStatus) -> anyhow::Result<()> {
    let mut control = Region::new(&args.server)?.control().await?;
    let answer = control.mirror_status(v1::MirrorStatusRequest {}).await?.into_inner();
    let status = Status {
        report_age_ms: non_negative(answer.report_age_ms),
        links: answer.links.into_iter().map(link).collect(),
        notes: answer.notes.into_iter().map(note).collect(),
    };
    show(args.output.output, &status, || description(&status, args.all))?;
    Ok(())
}

fn link(link: v1::Link) -> Link {
    Link {
        state: state(link.state()),
        peer: link.peer,
        peer_region_id: link.peer_region_id,
        address: link.address,
        reason: link.reason,
        rtt_us: link.rtt_us,
        sent_bytes: link.sent_bytes,
        received_bytes: link.received_bytes,
        partitions: link.partitions.into_iter().map(partition).collect(),
    }
}

fn partition(partition: v1::LinkPartition) -> Partition {
    Partition {
        state: state(partition.state()),
        direction: if partition.outgoing { "out" } else { "in" },
        topic: partition.topic,
        partition: partition.partition,
        reason: partition.reason,
        next_offset: partition.next_offset,
        lag_records: partition.lag_records,
        lag_bytes: partition.lag_bytes,
        lag_ms: partition.lag_ms,
    }
}

fn note(note: v1::LinkNote) -> Note {
    Note {
        peer: note.peer,
        kind: note.kind,
        topic: note.topic,
        partition: note.partition,
        from_offset: note.from_offset,
        to_offset: non_negative(note.to_offset),
        at_ms: non_negative(note.at_ms),
        text: note.text,
    }
}

fn state(state: v1::LinkState) -> &'static str {
    match state {
        v1::LinkState::Unspecified => "unknown",
        v1::LinkState::Connecting => "connecting",
        v1::LinkState::Active => "active",
        v1::LinkState::Lagging => "lagging",
        v1::LinkState::Paused => "paused",
        v1::LinkState::Faulted => "faulted",
    }
}

fn description(status: &Status, all: bool) -> String {
    let mut out = String::new();
    match status.report_age_ms {
        None => return "no mirror has reported; is one running for this region?\n".to_owned(),
        Some(age) if age > STALE_MS => {
            out.push_str(&format!(
                "the mirror has not reported for {} s; what follows is old\n\n",
                age / 1000
            ));
        }
        Some(_) => {}
    }
    let mut links = Table::new(&["PEER", "STATE", "ADDRESS", "RTT", "SENT", "RECEIVED", "REASON"]);
    let mut partitions = Table::new(&[
        "PEER",
        "DIRECTION",
        "TOPIC",
        "PARTITION",
        "STATE",
        "NEXT",
        "LAG RECORDS",
        "LAG BYTES",
        "LAG MS",
        "REASON",
    ]);
    for link in &status.links {
        links.row([
            link.peer.clone(),
            link.state.to_owned(),
            link.address.clone(),
            link.rtt_us.map_or("unknown".to_owned(), |us| format!("{:.1} ms", us as f64 / 1000.0)),
            bytes(link.sent_bytes),
            bytes(link.received_bytes),
            link.reason.clone(),
        ]);
        let at_rest = |p: &&Partition| p.lag_records == Some(0) && p.state == "active";
        for p in link.partitions.iter().filter(|p| all || !at_rest(p)) {
            partitions.row([
                link.peer.clone(),
                p.direction.to_owned(),
                p.topic.clone(),
                p.partition.to_string(),
                p.state.to_owned(),
                p.next_offset.to_string(),
                known(p.lag_records),
                known(p.lag_bytes),
                known(p.lag_ms),
                p.reason.clone(),
            ]);
        }
    }
    out.push_str(&if links.is_empty() { "no links\n".to_owned() } else { links.text() });
    for table in [partitions, notes_table(status)] {
        if !table.is_empty() {
            out.push('\n');
            out.push_str(&table.text());
        }
    }
    out
}

fn notes_table(status: &Status) -> Table {
    let mut notes = Table::new(&["PEER", "NOTE", "TOPIC", "PARTITION", "FROM", "TO", "TEXT"]);
    for note in &status.notes {
        notes.row([
            note.peer.clone(),
            note.kind.clone(),
            note.topic.clone(),
            non_negative(note.partition.into()).map_or("all".to_owned(), |index| index.to_string()),
            note.from_offset.to_string(),
            note.to_offset.map_or("-".to_owned(), |offset| offset.to_string()),
            note.text.clone(),
        ]);
    }
    notes
}

/// A mirror reports every second or so.
const STALE_MS: i64 = 10_000;
