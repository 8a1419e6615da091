//! Reading what originated here, from an origin offset on.

use bytes::{BufMut, Bytes, BytesMut};

use super::fields::{
    put_error, put_extractors, take_error, take_extractors, take_offset, take_partition, take_topic,
    take_topic_id,
};
use super::{Claim, Message};
use crate::error::ErrorCode;
use crate::names::{TopicId, TopicName};
use crate::offset::{Offset, PartitionIndex};
use crate::wire::{Reader, WireError, Writer};

/// Reads durable, committed batches that originated in this region.
///
/// Waits up to `wait_ms` until any partition has an answer worth giving. A later request of the
/// same `session` ends the wait of an earlier one at once; one without partitions does only that.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FetchRequest {
    pub session: u64,
    pub wait_ms: u32,
    /// Of the whole answer; the first batch of each partition is never held back by it alone.
    pub bytes_max: u32,
    /// Which lane records may leave; those that may not are covered ranges.
    pub pass_boe: bool,
    pub pass_ppe: bool,
    pub partitions: Vec<FetchFrom>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FetchFrom {
    pub topic: TopicName,
    pub partition: PartitionIndex,
    /// The incarnation that `from` belongs to.
    pub id: TopicId,
    pub from: Offset,
    pub bytes_max: u32,
    /// Checked against this log's history when given.
    pub claim: Option<Claim>,
    /// The end that the asker knows of; an answer is due when it has moved. -1 asks at once.
    pub known_end: Offset,
}

/// Partitions without news are left out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FetchAnswer {
    pub error: ErrorCode,
    pub partitions: Vec<Fetched>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fetched {
    /// Position in the request's list.
    pub index: u32,
    pub outcome: FetchOutcome,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FetchOutcome {
    Read(OriginRead),
    /// The claim or the position does not fit this log: it has lost what the peer holds.
    Truncated {
        reason: String,
    },
    /// The topic is another incarnation now, or gone.
    Incarnation {
        now: Option<TopicId>,
    },
    /// Not now; the code says what to do.
    Failed {
        code: ErrorCode,
        reason: String,
    },
}

/// What a partition had from an offset on. Offsets of `from..next` that no batch holds are covered
/// ranges: this region's markers, other regions' records, aborted or compacted ones.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OriginRead {
    pub batches: Bytes,
    /// All below was looked at.
    pub next: Offset,
    /// After the last record of this origin that the read met, or where it began if it met none; the
    /// end of the log where the read did not get there. Lag counts to here.
    pub end: Offset,
    /// Offsets below are gone (retention, DeleteRecords): below it a covered range is a loss.
    pub log_start: Offset,
    /// The extractor list in force over these batches, where they may hold lane records.
    pub extractors: Option<Vec<String>>,
    /// Base offsets of batches that were rewritten because records of them may not leave.
    pub rewritten: Vec<Offset>,
}

impl Message for FetchRequest {
    fn write(&self, out: &mut BytesMut) {
        out.put_u64(self.session);
        out.put_u32(self.wait_ms);
        out.put_u32(self.bytes_max);
        out.flag(self.pass_boe);
        out.flag(self.pass_ppe);
        out.array(&self.partitions, |o, p| p.write(o));
    }

    fn read(from: &mut Reader) -> Result<Self, WireError> {
        Ok(FetchRequest {
            session: from.u64("session")?,
            wait_ms: from.u32("wait")?,
            bytes_max: from.u32("bytes max")?,
            pass_boe: from.flag("pass boe")?,
            pass_ppe: from.flag("pass ppe")?,
            partitions: from.array("partitions", FetchFrom::read)?,
        })
    }
}

impl Message for FetchFrom {
    fn write(&self, out: &mut BytesMut) {
        out.text(self.topic.as_str());
        out.put_i32(self.partition.0);
        out.uuid(self.id.0);
        out.put_i64(self.from.0);
        out.put_u32(self.bytes_max);
        out.option(self.claim.as_ref(), |o, claim| claim.write(o));
        out.put_i64(self.known_end.0);
    }

    fn read(from: &mut Reader) -> Result<Self, WireError> {
        Ok(FetchFrom {
            topic: take_topic(from)?,
            partition: take_partition(from)?,
            id: take_topic_id(from)?,
            from: take_offset(from, "from")?,
            bytes_max: from.u32("bytes max")?,
            claim: from.option("claim", Claim::read)?,
            known_end: take_offset(from, "known end")?,
        })
    }
}

impl Message for FetchAnswer {
    fn write(&self, out: &mut BytesMut) {
        put_error(out, self.error);
        out.array(&self.partitions, |o, p| {
            o.put_u32(p.index);
            p.outcome.write(o);
        });
    }

    fn read(from: &mut Reader) -> Result<Self, WireError> {
        let error = take_error(from)?;
        let partitions = from.array("partitions", |f| {
            Ok(Fetched { index: f.u32("index")?, outcome: FetchOutcome::read(f)? })
        })?;
        Ok(FetchAnswer { error, partitions })
    }
}

impl Message for FetchOutcome {
    fn write(&self, out: &mut BytesMut) {
        match self {
            FetchOutcome::Read(read) => {
                out.put_u8(0);
                out.bytes(&read.batches);
                out.put_i64(read.next.0);
                out.put_i64(read.end.0);
                out.put_i64(read.log_start.0);
                put_extractors(out, read.extractors.as_ref());
                out.array(&read.rewritten, |o, base| o.put_i64(base.0));
            }
            FetchOutcome::Truncated { reason } => {
                out.put_u8(1);
                out.text(reason);
            }
            FetchOutcome::Incarnation { now } => {
                out.put_u8(2);
                out.option(now.as_ref(), |o, id| o.uuid(id.0));
            }
            FetchOutcome::Failed { code, reason } => {
                out.put_u8(3);
                put_error(out, *code);
                out.text(reason);
            }
        }
    }

    fn read(from: &mut Reader) -> Result<Self, WireError> {
        Ok(match from.u8("fetch outcome")? {
            0 => FetchOutcome::Read(OriginRead {
                batches: from.bytes("batches")?,
                next: take_offset(from, "next")?,
                end: take_offset(from, "end")?,
                log_start: take_offset(from, "log start")?,
                extractors: take_extractors(from)?,
                rewritten: from.array("rewritten", |f| take_offset(f, "rewritten"))?,
            }),
            1 => FetchOutcome::Truncated { reason: from.text("reason")? },
            2 => FetchOutcome::Incarnation { now: from.option("now", take_topic_id)? },
            3 => FetchOutcome::Failed { code: take_error(from)?, reason: from.text("reason")? },
            _ => return Err(WireError::Value("fetch outcome")),
        })
    }
}
