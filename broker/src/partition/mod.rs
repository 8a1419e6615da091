//! A partition: its state, the only way to append to it, and what readers may see.
//!
//! One short lock guards the state; nothing waits inside it. Appends go to the store's write buffer
//! under the lock, in order; the flusher makes them durable and moves the high watermark. Consumers
//! and the mirror see durable records only, so an offset that anyone has seen is never given to
//! another record (`durability = "os"` trusts the page cache, as Apache Kafka does).

mod append;
mod checkpoint;
mod compact;
#[cfg(test)]
mod crash_tests;
mod flush;
mod full;
mod open;
mod read;
mod special;
#[cfg(test)]
mod tests;
mod time;
mod trim;
mod wait;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use broker_core::Fold;
use broker_store::{SegmentStore, StoreError, StorePath, Writer};
use bytes::Bytes;
use kafka::{LeaderEpoch, Offset, PartitionIndex, TopicId, TopicName};
use lane_core::Extractors;
use parking_lot::{Mutex, RwLock};
use tokio::sync::watch;

use crate::log::{ActiveSegment, OpenFiles, SealedSegment};

pub use append::{Append, AppendError, Appended, MirrorUnit, UnitError, UnitOutcome};
pub use checkpoint::Checkpoints;
pub use flush::Flusher;
pub use full::FullDisk;
pub use open::{OpenPartition, directory};
pub use read::{OriginRead, ReadError, ReadOutcome, ReadUpTo, Slice};
pub use special::Special;
pub use time::Found;
pub use wait::{DurableError, Progress, Waiter};

/// When an append counts as durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Durability {
    /// The store says so: fdatasync returned.
    Sync,
    /// It is in the page cache. For comparison with Apache Kafka, and for people who want it.
    Os,
}

/// The settings of a topic as its partitions need them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    pub segment_bytes: u32,
    pub segment_ms: i64,
    pub index_interval_bytes: u32,
    pub max_message_bytes: usize,
    pub retention_bytes: Option<u64>,
    pub retention_ms: Option<i64>,
    /// `message.timestamp.type=LogAppendTime`.
    pub log_append_time: bool,
    pub timestamp_before_max_ms: i64,
    pub timestamp_after_max_ms: i64,
    /// `sealane.lanes`.
    pub lanes: bool,
    /// `sealane.lanes.extractors`: the list that the log is given when lanes are on.
    pub lane_extractors: Arc<Extractors>,
    /// `sealane.lanes.reference`: without lanes, a lane's consumers read all of it.
    pub lane_reference: bool,
    /// `None`: as the kind of store wants them.
    pub checkpoints: Option<Checkpoints>,
}

impl Default for Settings {
    /// Apache Kafka's defaults.
    fn default() -> Settings {
        Settings {
            segment_bytes: 1 << 30,
            segment_ms: 7 * 24 * 3600 * 1000,
            index_interval_bytes: 4096,
            max_message_bytes: kafka::limits::BATCH_BYTES_MAX,
            retention_bytes: None,
            retention_ms: Some(7 * 24 * 3600 * 1000),
            log_append_time: false,
            timestamp_before_max_ms: i64::MAX,
            timestamp_after_max_ms: 3_600_000,
            lanes: false,
            lane_extractors: Arc::new(Extractors::standard()),
            lane_reference: false,
            checkpoints: None,
        }
    }
}

/// The bounds of a partition's log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Watermarks {
    pub log_start: Offset,
    /// Below it everything is durable and may be read.
    pub high_watermark: Offset,
    pub log_end: Offset,
}

/// One partition of a topic, owned by this broker.
pub struct Partition {
    /// For the flusher's queue, which must not keep a deleted partition alive.
    me: std::sync::Weak<Partition>,
    pub topic: TopicName,
    pub topic_id: TopicId,
    pub index: PartitionIndex,
    pub epoch: LeaderEpoch,
    dir: StorePath,
    store: Arc<dyn SegmentStore>,
    durability: Durability,
    flusher: Arc<Flusher>,
    open_files: Arc<OpenFiles>,
    settings: RwLock<Arc<Settings>>,
    state: Mutex<State>,
    /// Held while a flush runs, so that there is one at a time.
    flushing: Mutex<()>,
    progress: watch::Sender<Progress>,
    waiters: Mutex<Vec<std::sync::Weak<Waiter>>>,
    opened: Instant,
    /// Written and read since it was opened.
    used_bytes: AtomicU64,
}

/// Everything behind the lock.
struct State {
    fold: Fold,
    sealed: Vec<Arc<SealedSegment>>,
    active: ActiveSegment,
    /// Segments that were sealed and are not yet known to be durable, oldest first.
    rolls: VecDeque<Roll>,
    /// Base of the newest segment whose snapshot is durable. Only what lies below it may be deleted or
    /// rewritten: above it, recovery needs every batch.
    snapshot: Offset,
    /// Up to where the durable mark on disk says that the store has confirmed.
    marked: Offset,
    /// Up to where readers see, and where that is.
    visible: Position,
    /// Up to where the store has confirmed; equals `visible` unless durability is `Os`.
    synced: Position,
    /// Copies of what is not synced yet, to write it again should a sync fail. Empty under `Os`.
    unsynced: VecDeque<Unsynced>,
    condition: Condition,
    /// In the flusher's queue.
    queued: Queued,
    hints: read::Hints,
}

/// A log position with its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Position {
    offset: Offset,
    segment: Offset,
    bytes: u64,
}

impl State {
    /// The sealed segments that recovery does not need, because a later snapshot says what they say.
    fn finished(&self) -> &[Arc<SealedSegment>] {
        let count = self.sealed.partition_point(|segment| segment.next <= self.snapshot);
        &self.sealed[..count]
    }
}

/// A segment change that the flusher has to make durable.
#[derive(Clone)]
struct Roll {
    writer: Arc<dyn Writer>,
    segment: Arc<SealedSegment>,
    next_base: Offset,
    /// The fold at `next_base`, encoded.
    state: Bytes,
    /// There is one of the segment, which nobody needs once the snapshot is there.
    has_checkpoint: bool,
}

struct Unsynced {
    base: Offset,
    next: Offset,
    parts: [Bytes; 2],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Queued {
    No,
    /// Waits for the flush interval.
    Lazy,
    Now,
}

/// Whether the partition takes requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Condition {
    Serving,
    /// The store failed in a way that only a person or a restart can mend.
    Faulted(String),
    /// Deleted, or released at shutdown.
    Closed,
}

impl Partition {
    pub fn settings(&self) -> Arc<Settings> {
        self.settings.read().clone()
    }

    /// Takes effect for the next append.
    pub fn set_settings(&self, settings: Settings) {
        *self.settings.write() = Arc::new(settings);
    }

    pub fn watermarks(&self) -> Watermarks {
        let state = self.state.lock();
        Watermarks {
            log_start: state.fold.log_start,
            high_watermark: state.visible.offset,
            log_end: state.fold.end,
        }
    }

    pub fn condition(&self) -> Condition {
        self.state.lock().condition.clone()
    }

    /// Looks at the fold under the lock; keep it short. The fold is of the log end, not of what is
    /// durable.
    pub fn with_fold<T>(&self, look: impl FnOnce(&Fold) -> T) -> T {
        look(&self.state.lock().fold)
    }

    /// Bytes of all segments.
    pub fn size_bytes(&self) -> u64 {
        let state = self.state.lock();
        state.sealed.iter().map(|s| s.size).sum::<u64>() + state.active.content.size
    }

    /// Bytes written and read since it was opened.
    pub fn used_bytes(&self) -> u64 {
        self.used_bytes.load(Ordering::Relaxed)
    }

    fn used(&self, bytes: u64) {
        self.used_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub fn directory(&self) -> &StorePath {
        &self.dir
    }

    pub fn store(&self) -> &Arc<dyn SegmentStore> {
        &self.store
    }

    /// Ends the partition: appends and reads are refused from here on, whoever waits is told.
    pub fn close(&self) {
        let mut state = self.state.lock();
        state.condition = Condition::Closed;
        self.forget_unsynced(&mut state, Offset(i64::MAX));
        self.publish(&state);
    }

    /// Closes and removes every file.
    pub fn delete(&self) -> Result<(), StoreError> {
        self.close();
        let _one_at_a_time = self.flushing.lock();
        self.store.delete(&self.dir)
    }
}

impl std::fmt::Display for Partition {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}-{}", self.topic, self.index)
    }
}

impl std::fmt::Debug for Partition {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Partition({self})")
    }
}
