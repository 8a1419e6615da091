//! Units of a peer, and what became of them. Invariant: the apply rule is [`Verdict::of`] everywhere.

use bytes::{BufMut, Bytes, BytesMut};

use super::Message;
use super::fields::{
    put_error, put_extractors, take_error, take_extractors, take_offset, take_partition, take_topic,
    take_topic_id,
};
use crate::error::ErrorCode;
use crate::names::{RegionId, TopicId, TopicName};
use crate::offset::{Offset, PartitionIndex};
use crate::wire::{Reader, WireError, Writer};

/// Units to append, each to its own partition or in order to the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AppendRequest {
    pub units: Vec<Unit>,
}

/// A run of batches of one origin and all that one append holds. `first` must be what the
/// partition's vector says; offsets from `first` on that no batch holds are covered ranges.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unit {
    pub topic: TopicName,
    pub partition: PartitionIndex,
    /// The local incarnation that this is meant for.
    pub id: TopicId,
    pub origin: RegionId,
    pub incarnation: TopicId,
    pub first: Offset,
    /// The extractors that lane records in here were judged by; `None` without lane records.
    pub extractors: Option<Vec<String>>,
    /// The last batch is not as the origin holds it, so its CRC proves nothing later.
    pub last_rewritten: bool,
    /// One batch at least.
    pub batches: Bytes,
}

/// One outcome for each unit, in order; given when what it says is durable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AppendAnswer {
    pub error: ErrorCode,
    pub outcomes: Vec<AppendOutcome>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AppendOutcome {
    Applied {
        next: Offset,
    },
    /// Wholly below `next`.
    Duplicate {
        next: Offset,
    },
    /// Begins above `next`.
    Gap {
        next: Offset,
    },
    /// Begins below `next` and ends above it: fenced, nothing was applied.
    Overlap {
        next: Offset,
    },
    /// Neither applied nor refused for its position: an operator decides.
    Faulted {
        reason: String,
    },
    /// Not now (owner moved, disk full, topic of another incarnation); the code says what to do.
    Failed {
        code: ErrorCode,
        reason: String,
    },
}

/// What the apply rule says to a unit that covers origin offsets `first..next`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Apply,
    Duplicate,
    Gap,
    /// Overlaps what is held: never to be cut to fit, the histories may differ.
    Fence,
}

impl Verdict {
    /// The apply rule. `held` is the receiver's vector entry of the same origin and incarnation, 0
    /// when there is none. Equal or wholly below, and nothing in between: "less or equal" is not
    /// "seen".
    pub fn of(held: Offset, first: Offset, next: Offset) -> Verdict {
        if first >= next {
            Verdict::Fence
        } else if first == held {
            Verdict::Apply
        } else if next <= held {
            Verdict::Duplicate
        } else if first > held {
            Verdict::Gap
        } else {
            Verdict::Fence
        }
    }
}

impl Message for AppendRequest {
    fn write(&self, out: &mut BytesMut) {
        out.array(&self.units, |o, unit| unit.write(o));
    }

    fn read(from: &mut Reader) -> Result<Self, WireError> {
        Ok(AppendRequest { units: from.array("units", Unit::read)? })
    }
}

impl AppendRequest {
    /// The bytes of [`Message::encode`] in pieces, the batches among them not copied.
    pub fn pieces(&self) -> Vec<Bytes> {
        let mut pieces = Vec::with_capacity(2 * self.units.len() + 1);
        let mut head = BytesMut::new();
        head.array(&self.units, |head, unit| {
            unit.write_head(head);
            head.put_u32(u32::try_from(unit.batches.len()).expect("a field is far below 4 GiB"));
            pieces.extend([head.split().freeze(), unit.batches.clone()]);
        });
        pieces.push(head.freeze());
        pieces
    }
}

impl Unit {
    /// All but the batches, which are its last field.
    fn write_head(&self, out: &mut BytesMut) {
        out.text(self.topic.as_str());
        out.put_i32(self.partition.0);
        out.uuid(self.id.0);
        out.uuid(self.origin.0);
        out.uuid(self.incarnation.0);
        out.put_i64(self.first.0);
        put_extractors(out, self.extractors.as_ref());
        out.flag(self.last_rewritten);
    }
}

impl Message for Unit {
    fn write(&self, out: &mut BytesMut) {
        self.write_head(out);
        out.bytes(&self.batches);
    }

    fn read(from: &mut Reader) -> Result<Self, WireError> {
        Ok(Unit {
            topic: take_topic(from)?,
            partition: take_partition(from)?,
            id: take_topic_id(from)?,
            origin: RegionId(from.uuid("origin")?),
            incarnation: TopicId(from.uuid("incarnation")?),
            first: take_offset(from, "first")?,
            extractors: take_extractors(from)?,
            last_rewritten: from.flag("last rewritten")?,
            batches: from.bytes("batches")?,
        })
    }
}

impl Message for AppendAnswer {
    fn write(&self, out: &mut BytesMut) {
        put_error(out, self.error);
        out.array(&self.outcomes, |o, outcome| outcome.write(o));
    }

    fn read(from: &mut Reader) -> Result<Self, WireError> {
        let error = take_error(from)?;
        Ok(AppendAnswer { error, outcomes: from.array("outcomes", AppendOutcome::read)? })
    }
}

impl Message for AppendOutcome {
    fn write(&self, out: &mut BytesMut) {
        let (tag, next) = match self {
            AppendOutcome::Applied { next } => (0, next),
            AppendOutcome::Duplicate { next } => (1, next),
            AppendOutcome::Gap { next } => (2, next),
            AppendOutcome::Overlap { next } => (5, next),
            AppendOutcome::Faulted { reason } => {
                out.put_u8(3);
                return out.text(reason);
            }
            AppendOutcome::Failed { code, reason } => {
                out.put_u8(4);
                put_error(out, *code);
                return out.text(reason);
            }
        };
        out.put_u8(tag);
        out.put_i64(next.0);
    }

    fn read(from: &mut Reader) -> Result<Self, WireError> {
        Ok(match from.u8("append outcome")? {
            0 => AppendOutcome::Applied { next: take_offset(from, "next")? },
            1 => AppendOutcome::Duplicate { next: take_offset(from, "next")? },
            2 => AppendOutcome::Gap { next: take_offset(from, "next")? },
            3 => AppendOutcome::Faulted { reason: from.text("reason")? },
            4 => AppendOutcome::Failed { code: take_error(from)?, reason: from.text("reason")? },
            5 => AppendOutcome::Overlap { next: take_offset(from, "next")? },
            _ => return Err(WireError::Value("append outcome")),
        })
    }
}
