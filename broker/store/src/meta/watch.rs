//! Watchers of a metadata store: bounded queues of changes.
//!
//! A watcher that does not keep up loses its queue and is told to list again; it never slows a writer.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use tokio::sync::Notify;

use super::Change;

/// The changes below a prefix since the watch began.
#[derive(Debug)]
pub struct Watch {
    queue: Arc<Queue>,
    /// What fills the queue, where that is a task of this watch alone.
    #[cfg(feature = "cluster")]
    _task: Option<Task>,
}

/// A task that ends with this.
#[cfg(feature = "cluster")]
#[derive(Debug)]
struct Task(tokio::task::JoinHandle<()>);

#[cfg(feature = "cluster")]
impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}

#[derive(Debug)]
struct Queue {
    prefix: String,
    changes: Mutex<Changes>,
    arrived: Notify,
}

#[derive(Debug, Default)]
struct Changes {
    waiting: VecDeque<Change>,
    closed: bool,
}

/// Changes that wait for one watcher at most.
pub(super) const WATCH_QUEUE_MAX: usize = 1024;

impl Watch {
    /// The next change, or `None` when the store is gone. Safe to cancel.
    pub async fn next(&mut self) -> Option<Change> {
        loop {
            let arrived = self.queue.arrived.notified();
            {
                let mut changes = self.queue.changes.lock();
                if let Some(change) = changes.waiting.pop_front() {
                    return Some(change);
                }
                if changes.closed {
                    return None;
                }
            }
            arrived.await;
        }
    }

    pub(super) fn handle(&self) -> WatchHandle {
        WatchHandle { queue: Arc::downgrade(&self.queue) }
    }

    #[cfg(feature = "cluster")]
    pub(super) fn owning(self, task: tokio::task::JoinHandle<()>) -> Watch {
        Watch { _task: Some(Task(task)), ..self }
    }

    /// The latest change that waits.
    #[cfg(test)]
    pub(crate) fn latest(&self) -> Option<Change> {
        self.queue.changes.lock().waiting.back().cloned()
    }

    /// The next change if there is one now.
    pub fn try_next(&mut self) -> Option<Change> {
        self.queue.changes.lock().waiting.pop_front()
    }
}

/// The other side of a watch that somebody holds.
#[derive(Debug)]
pub(super) struct WatchHandle {
    queue: Weak<Queue>,
}

impl WatchHandle {
    /// As if the watcher had been too slow. False if it is gone.
    pub(super) fn overflow(&self) -> bool {
        self.queue.upgrade().map(|queue| queue.overflow(&mut queue.changes.lock())).is_some()
    }
}

/// All watchers of one store.
#[derive(Debug, Default)]
pub(super) struct Watchers {
    queues: Mutex<Vec<Weak<Queue>>>,
}

impl Watchers {
    pub(super) fn add(&self, prefix: &str) -> Watch {
        let queue =
            Arc::new(Queue { prefix: prefix.to_owned(), changes: Mutex::default(), arrived: Notify::new() });
        let mut queues = self.queues.lock();
        queues.retain(|queue| queue.strong_count() > 0);
        queues.push(Arc::downgrade(&queue));
        Watch {
            queue,
            #[cfg(feature = "cluster")]
            _task: None,
        }
    }

    /// Called in the order of versions.
    pub(super) fn tell(&self, change: &Change) {
        let key = match change {
            Change::Put(item) => &item.key,
            Change::Deleted { key, .. } => key,
            Change::Resync => return,
        };
        for queue in self.queues.lock().iter().filter_map(Weak::upgrade) {
            if key.starts_with(&queue.prefix) {
                queue.push(change.clone());
            }
        }
    }
}

impl Drop for Watchers {
    fn drop(&mut self) {
        for queue in self.queues.lock().iter().filter_map(Weak::upgrade) {
            queue.changes.lock().closed = true;
            queue.arrived.notify_one();
        }
    }
}

impl Queue {
    fn push(&self, change: Change) {
        let mut changes = self.changes.lock();
        if changes.waiting.len() >= WATCH_QUEUE_MAX {
            self.overflow(&mut changes);
        } else {
            changes.waiting.push_back(change);
            self.arrived.notify_one();
        }
    }

    fn overflow(&self, changes: &mut Changes) {
        changes.waiting.clear();
        changes.waiting.push_back(Change::Resync);
        self.arrived.notify_one();
    }
}
