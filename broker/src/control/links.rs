//! What the mirror of this region said last about its links, for `mirror status`.
//!
//! Reports are soft state: after a start there is none until the mirror reports, and their age is
//! part of the answer, so that old news is never shown as new.

use std::time::Instant;

use control::v1;
use kafka::private::{Direction, LinkReport, LinkState, Note, NoteKind, PartitionReport};
use parking_lot::Mutex;

/// The last report of this region's mirror.
#[derive(Default)]
pub struct LinkBoard(Mutex<Option<(Instant, Vec<LinkReport>)>>);

impl LinkBoard {
    /// Replaces the last report.
    pub fn put(&self, links: Vec<LinkReport>) {
        *self.0.lock() = Some((Instant::now(), links));
    }

    /// The answer to MirrorStatus.
    pub fn message(&self, notes: &[Note]) -> v1::MirrorStatusResponse {
        let board = self.0.lock();
        let (age, links) = match &*board {
            None => (-1, Vec::new()),
            Some((at, links)) => {
                let age = i64::try_from(at.elapsed().as_millis()).unwrap_or(i64::MAX);
                (age, links.iter().map(link).collect())
            }
        };
        let shown = notes.iter().filter(|note| note.kind != NoteKind::Linked);
        v1::MirrorStatusResponse { links, notes: shown.map(note_message).collect(), report_age_ms: age }
    }
}

fn link(report: &LinkReport) -> v1::Link {
    v1::Link {
        peer: report.peer.clone(),
        peer_region_id: report.region.map(|id| id.to_string()).unwrap_or_default(),
        address: report.address.clone(),
        state: state(report.state).into(),
        reason: report.reason.clone(),
        rtt_us: report.rtt_us,
        sent_bytes: report.sent_bytes,
        received_bytes: report.received_bytes,
        partitions: report.partitions.iter().map(partition).collect(),
    }
}

fn partition(report: &PartitionReport) -> v1::LinkPartition {
    v1::LinkPartition {
        topic: report.topic.to_string(),
        partition: report.partition.0,
        outgoing: report.direction == Direction::Out,
        state: state(report.state).into(),
        reason: report.reason.clone(),
        next_offset: report.next.0,
        lag_records: report.lag_records,
        lag_bytes: report.lag_bytes,
        lag_ms: report.lag_ms,
    }
}

fn note_message(note: &Note) -> v1::LinkNote {
    let kind = match note.kind {
        NoteKind::Linked => "linked",
        NoteKind::Skip => "skip",
        NoteKind::Gap => "gap",
        NoteKind::Quarantine => "quarantine",
        NoteKind::Reset => "reset",
        NoteKind::Drift => "drift",
    };
    v1::LinkNote {
        peer: note.peer.clone(),
        kind: kind.to_owned(),
        topic: note.topic.to_string(),
        partition: note.partition.0,
        from_offset: note.from.0,
        to_offset: note.to.0,
        at_ms: note.at.0,
        text: note.text.clone(),
    }
}

fn state(state: LinkState) -> v1::LinkState {
    match state {
        LinkState::Connecting => v1::LinkState::Connecting,
        LinkState::Active => v1::LinkState::Active,
        LinkState::Lagging => v1::LinkState::Lagging,
        LinkState::Paused => v1::LinkState::Paused,
        LinkState::Faulted => v1::LinkState::Faulted,
    }
}
