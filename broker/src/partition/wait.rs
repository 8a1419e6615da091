//! Waiting for a partition to move: for durability after a produce, for data in a long poll.
//!
//! A produce waits on a watch of the high watermark. A fetch over many partitions registers one
//! waiter with each; a waiter that is gone costs nothing and is swept out when others register.

use std::sync::{Arc, Weak};

use kafka::Offset;
use tokio::sync::Notify;

use super::{Condition, Partition, State};

/// What a partition tells those who wait.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Progress {
    pub visible: Offset,
    pub synced: Offset,
    pub condition: Condition,
}

/// Why an append will not be confirmed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DurableError {
    #[error("the partition was closed")]
    Closed,
    #[error("the partition is faulted: {0}")]
    Faulted(String),
}

/// A parked fetch: woken when any of its partitions moves.
#[derive(Debug, Default)]
pub struct Waiter {
    notify: Notify,
}

impl Waiter {
    pub fn new() -> Arc<Waiter> {
        Arc::new(Waiter::default())
    }

    /// Completes after the next wake-up, also one that came before this call.
    pub async fn woken(&self) {
        self.notify.notified().await;
    }

    pub fn wake(&self) {
        self.notify.notify_one();
    }
}

/// Beyond this many registered waiters the dead ones are swept out on each registration.
const WAITERS_SWEEP: usize = 16;

impl Partition {
    /// Waits until everything below `upto` may be acknowledged with `acks=all`.
    pub async fn wait_durable(&self, upto: Offset) -> Result<(), DurableError> {
        self.wait_for(|p| p.visible >= upto).await
    }

    /// Waits until the store has confirmed everything below `upto`, whatever the durability setting.
    pub async fn wait_synced(&self, upto: Offset) -> Result<(), DurableError> {
        self.wait_for(|p| p.synced >= upto).await
    }

    async fn wait_for(&self, reached: impl Fn(&Progress) -> bool) -> Result<(), DurableError> {
        let mut progress = self.progress.subscribe();
        let stopped = |p: &Progress| p.condition != Condition::Serving;
        match progress.wait_for(|p| reached(p) || stopped(p)).await {
            Ok(p) if reached(&p) => Ok(()),
            Ok(p) => Err(match &p.condition {
                Condition::Faulted(reason) => DurableError::Faulted(reason.clone()),
                _ => DurableError::Closed,
            }),
            Err(_) => Err(DurableError::Closed),
        }
    }

    /// The high watermark as it moves, for tasks that follow the partition.
    pub fn follow(&self) -> tokio::sync::watch::Receiver<Progress> {
        self.progress.subscribe()
    }

    /// Registers a parked fetch. Look at the partition again after this, not before.
    pub fn register(&self, waiter: &Arc<Waiter>) {
        let mut waiters = self.waiters.lock();
        if waiters.len() >= WAITERS_SWEEP {
            waiters.retain(|w| w.strong_count() > 0);
        }
        waiters.push(Arc::downgrade(waiter));
    }

    /// Tells everybody what the state now says.
    pub(super) fn publish(&self, state: &State) {
        self.progress.send_if_modified(|p| {
            let moved = p.visible != state.visible.offset
                || p.synced != state.synced.offset
                || p.condition != state.condition;
            if moved {
                p.visible = state.visible.offset;
                p.synced = state.synced.offset;
                if p.condition != state.condition {
                    p.condition = state.condition.clone();
                }
            }
            moved
        });
        self.wake_waiters();
    }

    /// Makes parked fetches look again, for reasons other than new data.
    pub fn wake_waiters(&self) {
        let mut waiters = self.waiters.lock();
        if waiters.is_empty() {
            return;
        }
        for waiter in waiters.drain(..).filter_map(|w: Weak<Waiter>| w.upgrade()) {
            waiter.wake();
        }
    }
}
