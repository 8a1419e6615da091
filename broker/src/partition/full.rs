//! Whether the disk is full: noted where a write was refused, until somebody finds that there is room.

use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::Notify;

/// One per broker: its partitions share a disk.
#[derive(Debug, Default)]
pub struct FullDisk {
    full: AtomicBool,
    noted: Notify,
}

impl FullDisk {
    pub fn is_full(&self) -> bool {
        self.full.load(Ordering::Relaxed)
    }

    /// A write was refused for want of room.
    pub fn note(&self) {
        if !self.full.swap(true, Ordering::Relaxed) {
            self.noted.notify_one();
        }
    }

    /// Completes when the disk was found full, also if that was before the call.
    pub async fn noted(&self) {
        self.noted.notified().await;
    }

    pub fn has_room(&self) {
        self.full.store(false, Ordering::Relaxed);
    }
}
