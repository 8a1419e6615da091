//! The seam under the shared log: what an object store or a distributed file system must be able to do.
//!
//! Two things are kept remotely. *Objects* are written once and read in ranges: data that has left the
//! log. *Life logs* are sequences of numbered blocks with one writer each: a broker's write-ahead log
//! from its registration to its end. Whoever takes over from a broker ends its log first ([`Remote::end`]),
//! and from then on the store itself refuses the old writer: no clock is asked. Everything blocks; an
//! implementation that is asynchronous inside runs a runtime of its own.

mod block;
#[cfg(test)]
mod conformance;
mod flaky;
#[cfg(feature = "cluster")]
mod hdfs;
mod memory;
#[cfg(feature = "cluster")]
mod names;
#[cfg(feature = "cluster")]
mod s3;
#[cfg(feature = "cluster")]
mod worker;

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;

pub use block::{BLOCK_BYTES_MAX, Block, BlockError};
pub use flaky::{Flaky, RemoteFaults};
#[cfg(feature = "cluster")]
pub use hdfs::{Hdfs, HdfsConfig, Kerberos};
pub use memory::Memory;
#[cfg(feature = "cluster")]
pub use s3::{S3, S3Config, S3Credentials};

use crate::{Entry, StoreError, StorePath};

/// One life of one broker: from its registration to its end. Never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Life {
    pub broker: i32,
    /// Counted by the metadata store.
    pub epoch: u64,
}

/// An object store or a distributed file system, shared by all brokers of a cluster.
pub trait Remote: Send + Sync {
    /// Writes an object that did not exist; durable when it returns. [`StoreError::AlreadyExists`] if
    /// there is another one of this name, never because the own write was answered late: one with the
    /// same bytes counts as one's own, so a `put` that failed is simply tried again.
    fn put(&self, name: &StorePath, bytes: Bytes) -> Result<(), StoreError>;

    /// Up to `len` bytes of an object from `pos` on; fewer at its end, none beyond it.
    fn get(&self, name: &StorePath, pos: u64, len: usize) -> Result<Bytes, StoreError>;

    /// The entries of a directory by name; none if it does not exist. A directory whose last object is gone
    /// may be shown for a while.
    fn list(&self, dir: &StorePath) -> Result<Vec<Entry>, StoreError>;

    /// Removes an object, or everything below a directory (not in one step). What does not exist is no error.
    fn delete(&self, name: &StorePath) -> Result<(), StoreError>;

    /// Begins the log of a life that has none; the caller is its only writer. [`StoreError::Fenced`] if
    /// somebody ended this life already, also one that never began. May be tried again until the first
    /// `append`; [`StoreError::AlreadyExists`] once there are blocks.
    fn begin(&self, life: Life) -> Result<Arc<dyn LifeLog>, StoreError>;

    /// Ends a life: once this has returned, no writer of it can have another block acknowledged. May be
    /// called by several, and again, and for a life that never began.
    fn fence(&self, life: Life) -> Result<(), StoreError>;

    /// Ends a life ([`Remote::fence`]) and hands its blocks, from the lowest one still needed, in order and
    /// without a gap, to `visit`. Every block whose `append` ever returned `Ok` is visited, or was trimmed.
    /// A block whose `append` did not return may be visited too. An error of `visit` ends the reading.
    fn end(
        &self,
        life: Life,
        visit: &mut dyn FnMut(Block) -> Result<(), StoreError>,
    ) -> Result<(), StoreError>;

    /// Removes the blocks of a life that has ended; what refuses its writer stays. To end it again
    /// visits nothing from then on.
    fn forget(&self, life: Life) -> Result<(), StoreError>;

    /// The lives that have blocks.
    fn lives(&self) -> Result<Vec<Life>, StoreError>;
}

/// The end of one life's log. One `append` at a time.
pub trait LifeLog: Send + Sync {
    /// Appends a block, numbered from 0 without a gap; durable when it returns. The block says which is
    /// the lowest number still needed; lower ones may be removed from then on, in the background.
    ///
    /// [`StoreError::Fenced`]: somebody has ended this life, and the block was not acknowledged to anyone.
    /// [`StoreError::Io`] and [`StoreError::Full`]: the block may or may not be durable; the caller tries
    /// the *same* block again until it succeeds or gives the life up. Every call ends within a deadline
    /// of the implementation.
    fn append(&self, block: &Block) -> Result<(), StoreError>;
}

impl fmt::Display for Life {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.broker, self.epoch)
    }
}

impl Life {
    /// The inverse of `Display`.
    pub fn parse(text: &str) -> Option<Life> {
        let (broker, epoch) = text.split_once('-')?;
        Some(Life { broker: broker.parse().ok()?, epoch: epoch.parse().ok()? })
    }
}

impl<R: Remote + ?Sized> Remote for Arc<R> {
    fn put(&self, name: &StorePath, bytes: Bytes) -> Result<(), StoreError> {
        (**self).put(name, bytes)
    }

    fn get(&self, name: &StorePath, pos: u64, len: usize) -> Result<Bytes, StoreError> {
        (**self).get(name, pos, len)
    }

    fn list(&self, dir: &StorePath) -> Result<Vec<Entry>, StoreError> {
        (**self).list(dir)
    }

    fn delete(&self, name: &StorePath) -> Result<(), StoreError> {
        (**self).delete(name)
    }

    fn begin(&self, life: Life) -> Result<Arc<dyn LifeLog>, StoreError> {
        (**self).begin(life)
    }

    fn fence(&self, life: Life) -> Result<(), StoreError> {
        (**self).fence(life)
    }

    fn end(
        &self,
        life: Life,
        visit: &mut dyn FnMut(Block) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        (**self).end(life, visit)
    }

    fn forget(&self, life: Life) -> Result<(), StoreError> {
        (**self).forget(life)
    }

    fn lives(&self) -> Result<Vec<Life>, StoreError> {
        (**self).lives()
    }
}

fn refuse_root(name: &StorePath) -> Result<(), StoreError> {
    match name.is_root() {
        true => Err(StoreError::Io("the root of a store cannot be deleted".to_owned())),
        false => Ok(()),
    }
}

fn not_ended(life: Life) -> StoreError {
    StoreError::Io(format!("life {life} has not ended: its blocks are not removed"))
}

fn missing_block(life: Life, seq: u64) -> StoreError {
    StoreError::Corrupt(format!("block {seq} of life {life} is missing"))
}
