//! A shard's writes to its partition of `__consumer_offsets`: appended at once, in order, and
//! completed in order when they are durable. Nothing is believed or answered before.

use std::collections::VecDeque;
use std::sync::Arc;

use broker_core::group::StoreToken;
use broker_core::offsets_log::{CommittedOffset, FormatError, GroupMetadata, Key};
use bytes::Bytes;
use kafka::batch::Codec;
use kafka::{BatchBuilder, ErrorCode, GroupId, Offset, TimestampMs};
use lane_core::Extractors;
use tokio::sync::{oneshot, watch};

use super::message::TopicPartition;
use crate::partition::{Append, AppendError, Condition, Partition, Progress};

/// Writes that may wait to be durable; beyond this the shard takes no requests.
pub const WRITES_MAX: usize = 10_000;

/// Records are split over batches of about this size.
const BATCH_BYTES: usize = 512 * 1024;

/// A key and its new value; no value is a tombstone.
pub type Entry = (Key, Option<Value>);

/// What goes under a key.
pub enum Value {
    Offset(CommittedOffset),
    Group(GroupMetadata),
}

/// What a write means once it is durable.
pub enum Then {
    Commit {
        group: GroupId,
        offsets: Vec<(TopicPartition, CommittedOffset)>,
        reply: oneshot::Sender<Result<(), ErrorCode>>,
    },
    Store {
        group: GroupId,
        token: StoreToken,
        metadata: GroupMetadata,
    },
    Forget(Forget),
    Left {
        codes: Vec<ErrorCode>,
        reply: oneshot::Sender<super::message::Left>,
    },
}

/// Offsets, and whole groups, that end with a write.
#[derive(Default)]
pub struct Forget {
    pub offsets: Vec<(GroupId, TopicPartition)>,
    pub groups: Vec<GroupId>,
    /// Told the outcome.
    pub tell: Option<Tell>,
}

pub enum Tell {
    Outcome(oneshot::Sender<Result<(), ErrorCode>>),
    Code(oneshot::Sender<ErrorCode>),
    Offsets(oneshot::Sender<super::message::OffsetsDeleted>, Vec<(TopicPartition, ErrorCode)>),
    Done(oneshot::Sender<()>),
}

/// A write that did not happen, and why.
pub struct Unwritten {
    pub code: ErrorCode,
    pub then: Then,
}

/// The write queue of one shard.
pub struct Journal {
    partition: Arc<Partition>,
    progress: watch::Receiver<Progress>,
    /// What judges lane headers on this topic: nothing.
    no_lanes: Arc<Extractors>,
    /// Each with the offset after it.
    writes: VecDeque<(Offset, Then)>,
}

impl Journal {
    pub fn new(partition: Arc<Partition>) -> Journal {
        let progress = partition.follow();
        Journal { partition, progress, no_lanes: Arc::new(Extractors::none()), writes: VecDeque::new() }
    }

    pub fn is_full(&self) -> bool {
        self.writes.len() >= WRITES_MAX
    }

    pub fn is_empty(&self) -> bool {
        self.writes.is_empty()
    }

    /// Appends `entries` and queues `then`. An error gives it back: it is not written, or not wholly,
    /// which a reader of the log cannot tell from a crash in between.
    pub fn write(&mut self, now: TimestampMs, entries: &[Entry], then: Then) -> Result<(), Box<Unwritten>> {
        match self.append_all(now, entries) {
            Ok(next) => {
                self.writes.push_back((next, then));
                Ok(())
            }
            Err(code) => Err(Box::new(Unwritten { code, then })),
        }
    }

    fn append_all(&self, now: TimestampMs, entries: &[Entry]) -> Result<Offset, ErrorCode> {
        // Everything is encoded first: a value that does not fit must not leave half of a request.
        let encoded = entries.iter().map(encode).collect::<Result<Vec<_>, _>>().map_err(|error| {
            tracing::warn!(%error, "a record of __consumer_offsets cannot be written");
            ErrorCode::UnknownServerError
        })?;
        // Nothing to write is done when what came before is durable.
        let mut next = self.partition.watermarks().log_end;
        let mut records = encoded.iter().peekable();
        while records.peek().is_some() {
            let mut builder = BatchBuilder::new(Offset::ZERO, now, Codec::None);
            while let Some((key, value)) = records.peek() {
                let len = key.len() + value.as_ref().map_or(0, Bytes::len);
                if !builder.is_empty() && builder.plain_len() + len > BATCH_BYTES {
                    break;
                }
                builder.push(builder.record_count(), 0, Some(key), value.as_deref(), &[]);
                records.next();
            }
            let batch = builder.build();
            let append =
                Append { batch: &batch, lanes: None, judged_by: self.no_lanes.clone(), now, urgent: true };
            next = self.partition.append(append).map_err(|error| refusal(&error))?.last_offset.plus(1);
        }
        Ok(next)
    }

    /// Ready when a queued write may have become durable or have failed; pending while there is none.
    pub async fn moved(&mut self) {
        if self.writes.is_empty() || self.progress.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Takes the next write that is durable, or that never will be.
    pub fn next_settled(&mut self) -> Option<(Then, Result<(), ErrorCode>)> {
        let (upto, _) = self.writes.front()?;
        let outcome = {
            let progress = self.progress.borrow_and_update();
            if progress.visible >= *upto {
                Ok(())
            } else if progress.condition == Condition::Serving {
                return None;
            } else {
                Err(ErrorCode::CoordinatorNotAvailable)
            }
        };
        self.writes.pop_front().map(|(_, then)| (then, outcome))
    }
}

/// The group's requests may be tried again later: space may come back, a restart may mend.
fn refusal(error: &AppendError) -> ErrorCode {
    if !matches!(error, AppendError::Full | AppendError::Closed) {
        tracing::warn!(%error, "a write to __consumer_offsets failed");
    }
    ErrorCode::CoordinatorNotAvailable
}

fn encode((key, value): &Entry) -> Result<(Bytes, Option<Bytes>), FormatError> {
    let value = match value {
        None => None,
        Some(Value::Offset(offset)) => Some(offset.encode()?),
        Some(Value::Group(metadata)) => Some(metadata.encode()?),
    };
    Ok((key.encode()?, value))
}
