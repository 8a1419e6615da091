//! When a checkpoint of the active segment is written, so that an opening has little to read.
//!
//! On a remote store it goes into the same log as the appends, behind them: whoever finds it finds them.
//! Elsewhere it is written when the sync that covers it has returned. Never under the partition's lock. A
//! failure costs time at the next opening and nothing else.

use broker_store::StorePath;
use bytes::Bytes;

use super::{Condition, Partition, State};
use crate::log::checkpoint;
use crate::log::segment::Checkpointed;

/// How much is appended between two checkpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Checkpoints {
    pub after: u64,
    /// Before a close, when the next opening is near.
    pub at_close: u64,
    /// At least so many bytes for each byte of the last checkpoint.
    pub bytes_per_byte: u64,
}

impl Checkpoints {
    const ON_DISK: Checkpoints = Checkpoints { after: 64 << 20, at_close: 1 << 20, bytes_per_byte: 64 };
    /// An opening is a failover: somebody waits for it.
    const ON_REMOTE: Checkpoints = Checkpoints { after: 1 << 20, at_close: 4 << 10, bytes_per_byte: 64 };

    fn times(&self, last: &Checkpointed) -> u64 {
        last.bytes.saturating_mul(self.bytes_per_byte)
    }
}

/// A larger one is not written. The segment has very many special batches or producers, and an opening reads
/// it from its last smaller checkpoint on.
const CHECKPOINT_BYTES_MAX: usize = 512 << 10;

/// A checkpoint that is to be written.
pub(super) struct Due {
    path: StorePath,
    bytes: Bytes,
}

impl Partition {
    fn checkpoints(&self) -> Checkpoints {
        let by_store = if self.store.is_remote() { Checkpoints::ON_REMOTE } else { Checkpoints::ON_DISK };
        self.settings().checkpoints.unwrap_or(by_store)
    }

    /// The checkpoint of what is appended by now, if it is time for one.
    pub(super) fn due_checkpoint(&self, state: &mut State) -> Option<Due> {
        let limits = self.checkpoints();
        self.checkpoint_after(state, limits.after.max(limits.times(&state.active.checkpointed)))
    }

    fn checkpoint_after(&self, state: &mut State, appended: u64) -> Option<Due> {
        let State { fold, active, snapshot, .. } = &mut *state;
        let size = active.content.size;
        // Recovery begins at the newest snapshot, and the checkpoint of another segment is of no use.
        let is_wanted = *snapshot == active.base && !active.files.is_rewritten();
        let new = size - active.checkpointed.position;
        if !is_wanted || new < appended.max(1) || crate::switches::state_off() {
            return None;
        }
        let bytes = checkpoint::encode(fold, &active.content);
        // Also where it is too large: it is not made again before it has become much larger.
        active.checkpointed = Checkpointed { position: size, bytes: bytes.len() as u64 };
        (bytes.len() <= CHECKPOINT_BYTES_MAX).then(|| Due { path: active.files.checkpoint(), bytes })
    }

    pub(super) fn write_checkpoint(&self, due: &Due) {
        if let Err(error) = self.store.put_later(&due.path, &due.bytes) {
            tracing::debug!(partition = %self, %error, "a checkpoint is not written");
        }
    }

    /// The last one, when everything is flushed.
    pub(super) fn checkpoint_at_close(&self) {
        let _one_at_a_time = self.flushing.lock();
        let due = {
            let mut state = self.state.lock();
            let is_flushed = state.synced.offset == state.fold.end && state.rolls.is_empty();
            if state.condition != Condition::Serving || !is_flushed {
                return;
            }
            let after = self.checkpoints().at_close.max(state.active.checkpointed.bytes);
            self.checkpoint_after(&mut state, after)
        };
        due.iter().for_each(|due| self.write_checkpoint(due));
    }
}
