//! When a checkpoint of the active segment is written, so that an opening has little to read.
//!
//! On a remote store it goes into the same log as the appends, behind them: whoever finds it finds them.
//! Elsewhere it is written when the sync that covers it has returned. A failure costs time at the next
//! opening and nothing else.

use broker_store::StorePath;
use bytes::Bytes;

use super::{Condition, Partition, State};
use crate::log::checkpoint;
use crate::log::segment::Checkpointed;

/// Bytes of the active segment after which a checkpoint is written.
pub const CHECKPOINT_BYTES: u64 = 64 << 20;

/// On a remote store an opening is a failover: somebody waits for it. Tests have little to write.
const REMOTE_BYTES: u64 = if cfg!(test) { 600 } else { 1 << 20 };

/// So many bytes are appended for each byte of a checkpoint.
const BYTES_PER_BYTE: u64 = if cfg!(test) { 1 } else { 64 };

/// The same at a close, when the next opening is near.
const CLOSE_BYTES: u64 = 1 << 20;
const CLOSE_BYTES_REMOTE: u64 = if cfg!(test) { 200 } else { 4 << 10 };

/// A checkpoint that is to be written.
pub(super) struct Due {
    path: StorePath,
    bytes: Bytes,
}

impl Partition {
    /// The checkpoint of what is appended by now, if it is time for one.
    pub(super) fn due_checkpoint(&self, state: &mut State) -> Option<Due> {
        let after = self.settings().checkpoint_bytes;
        let after = if self.store.is_remote() { after.min(REMOTE_BYTES) } else { after };
        self.checkpoint_after(state, after.max(state.active.checkpointed.bytes * BYTES_PER_BYTE))
    }

    fn checkpoint_after(&self, state: &mut State, bytes: u64) -> Option<Due> {
        let State { fold, active, snapshot, .. } = &mut *state;
        let size = active.content.size;
        // Recovery begins at the newest snapshot, and the checkpoint of another segment is of no use.
        let is_wanted = *snapshot == active.base && !active.files.is_rewritten();
        if !is_wanted || size - active.checkpointed.position < bytes.max(1) || crate::switches::state_off() {
            return None;
        }
        let bytes = checkpoint::encode(fold, &active.content);
        active.checkpointed = Checkpointed { position: size, bytes: bytes.len() as u64 };
        Some(Due { path: active.files.checkpoint(), bytes })
    }

    /// On a remote store: behind the appends. The caller holds the lock, so it is before those to come.
    pub(super) fn checkpoint_in_order(&self, state: &mut State) {
        if self.store.is_remote()
            && let Some(due) = self.due_checkpoint(state)
        {
            self.write_checkpoint(&due);
        }
    }

    pub(super) fn write_checkpoint(&self, due: &Due) {
        if let Err(error) = self.store.put_later(&due.path, &due.bytes) {
            tracing::debug!(partition = %self, %error, "a checkpoint is not written");
        }
    }

    /// The last one, when everything is flushed.
    pub(super) fn checkpoint_at_close(&self) {
        let _one_at_a_time = self.flushing.lock();
        let mut state = self.state.lock();
        let is_flushed = state.synced.offset == state.fold.end && state.rolls.is_empty();
        if state.condition != Condition::Serving || !is_flushed {
            return;
        }
        let after = if self.store.is_remote() { CLOSE_BYTES_REMOTE } else { CLOSE_BYTES };
        let due = self.checkpoint_after(&mut state, after);
        drop(state);
        due.iter().for_each(|due| self.write_checkpoint(due));
    }
}
