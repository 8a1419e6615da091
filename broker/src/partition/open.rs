//! Opening a partition: recovery of its log, and what a person is told about it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Instant;

use broker_store::{SegmentStore, StorePath};
use kafka::{LeaderEpoch, PartitionIndex, TimestampMs, TopicId, TopicName};
use parking_lot::{Mutex, RwLock};
use tokio::sync::watch;

use super::{Condition, Durability, Flusher, Partition, Position, Progress, Queued, Settings, State, read};
use crate::log::OpenFiles;
use crate::log::recovery::{self, RecoverError, RecoverOptions};

/// What a partition is opened with.
pub struct OpenPartition {
    pub topic: TopicName,
    pub topic_id: TopicId,
    pub index: PartitionIndex,
    pub epoch: LeaderEpoch,
    pub store: Arc<dyn SegmentStore>,
    pub durability: Durability,
    pub flusher: Arc<Flusher>,
    pub settings: Settings,
    pub now: TimestampMs,
    /// Where the open files of sealed segments are counted.
    pub open_files: Arc<OpenFiles>,
    /// It was served before, so its directory must be there.
    pub must_exist: bool,
}

/// `<topic id>/<topic>-<partition>`: the id keeps a deleted topic's files away from its successor's.
pub fn directory(topic_id: TopicId, topic: &TopicName, index: PartitionIndex) -> StorePath {
    StorePath::root()
        .join(&topic_id.0.to_string())
        .and_then(|dir| dir.join(&format!("{topic}-{index}")))
        .expect("topic ids and names are legal path components")
}

/// In a partition's directory it tells the next start that what is lost is lost.
const ACCEPT_LOSS: &str = "accept-loss";

/// A log that was served and is gone altogether is not begun anew by itself: its offsets were given out.
/// True if a person has accepted the loss.
fn check_exists(store: &dyn SegmentStore, dir: &StorePath) -> Result<bool, RecoverError> {
    let files = store.list(dir)?;
    if files.is_empty() {
        return Err(RecoverError::Faulted(format!(
            "its directory topics/{dir} was served before and is gone or empty: restore it, or delete the topic, \
             or create the file topics/{dir}/{ACCEPT_LOSS} to begin it anew without its records"
        )));
    }
    Ok(files.iter().any(|file| file.name == ACCEPT_LOSS))
}

impl OpenPartition {
    /// Blocks for the disk: call it on a blocking thread.
    pub fn open(self) -> Result<Arc<Partition>, RecoverError> {
        let dir = directory(self.topic_id, &self.topic, self.index);
        let options = RecoverOptions {
            index_interval: self.settings.index_interval_bytes,
            ignore_state: crate::switches::state_off(),
            now: self.now,
            open_files: self.open_files.clone(),
        };
        let accepted = self.must_exist && check_exists(&*self.store, &dir)?;
        let recovered = recovery::open(&*self.store, &dir, &options)?;
        if accepted {
            tracing::warn!(%dir, "the loss of this partition's records was accepted");
            self.store.delete(&dir.join(ACCEPT_LOSS).expect("a legal name"))?;
        }
        if let Some(cut) = &recovered.cut {
            tracing::warn!(file = %cut.file, position = cut.position, bytes = cut.bytes, reason = %cut.reason,
                "cut a damaged tail off the log; none of it was known to be on disk");
        }
        if recovered.active.content.size > 0 {
            // What a crash left in the page cache is shown to readers only once it is on disk.
            recovered.active.writer.sync()?;
        }
        let end = recovered.fold.end;
        // Recovery leaves no active segment without a snapshot.
        let snapshot = recovered.active.base;
        let visible =
            Position { offset: end, segment: recovered.active.base, bytes: recovered.active.content.size };
        let progress = Progress { visible: end, synced: end, condition: Condition::Serving };
        Ok(Arc::new_cyclic(|me| Partition {
            me: me.clone(),
            topic: self.topic,
            topic_id: self.topic_id,
            index: self.index,
            epoch: self.epoch,
            dir,
            store: self.store,
            durability: self.durability,
            flusher: self.flusher,
            open_files: self.open_files,
            settings: RwLock::new(Arc::new(self.settings)),
            state: Mutex::new(State {
                fold: recovered.fold,
                sealed: recovered.sealed,
                active: recovered.active,
                rolls: VecDeque::new(),
                snapshot,
                marked: recovered.mark,
                visible,
                synced: visible,
                unsynced: VecDeque::new(),
                condition: Condition::Serving,
                queued: Queued::No,
                hints: read::Hints::default(),
            }),
            flushing: Mutex::new(()),
            progress: watch::Sender::new(progress),
            waiters: Mutex::default(),
            opened: Instant::now(),
            used_bytes: AtomicU64::new(0),
        }))
    }
}
