//! The seam under the partition log: files that grow at their end.
//!
//! Owns the traits and their contract; the implementations are in the submodules. Everything blocks:
//! a disk answers in microseconds, and a remote store runs a runtime of its own behind this trait.

mod disk;
mod flaky;
mod live;
mod memory;
mod volatile;

use std::fs::File;
use std::io::IoSlice;
use std::sync::Arc;

use bytes::Bytes;

pub use disk::Disk;
pub use flaky::{Faults, Flaky};
pub use memory::Memory;
pub use volatile::Volatile;

use crate::{StoreError, StorePath};

/// A tree of append-only files with one writer each. Directories exist by holding files.
pub trait SegmentStore: Send + Sync {
    /// A new, empty file. [`StoreError::AlreadyExists`] if there is one. Its name is durable when
    /// this returns.
    fn create(&self, path: &StorePath) -> Result<Arc<dyn Writer>, StoreError>;

    /// Cuts an existing file at `len` and appends after it. An older writer of the same file is fenced.
    /// Nothing is known to be durable until the new writer's first `sync`.
    /// [`StoreError::Corrupt`] if the file is shorter than `len`.
    fn resume(&self, path: &StorePath, len: u64) -> Result<Arc<dyn Writer>, StoreError>;

    /// Reads a file, which may have a writer: then its appends are seen at once.
    fn open(&self, path: &StorePath) -> Result<Arc<dyn Reader>, StoreError>;

    /// Writes a whole file, or replaces it: atomic, and durable when this returns. After an error the
    /// file holds its old or its new content, never a mixture.
    fn put(&self, path: &StorePath, bytes: &[u8]) -> Result<(), StoreError>;

    /// As `put`, for what can be done without: where one flush serves many files this returns before it (what
    /// is written afterwards is durable only if this is, too), and is refused where it would have to wait.
    fn put_later(&self, path: &StorePath, bytes: &[u8]) -> Result<(), StoreError> {
        self.put(path, bytes)
    }

    /// The entries of a directory by name; none if it does not exist.
    fn list(&self, dir: &StorePath) -> Result<Vec<Entry>, StoreError>;

    /// Removes a file, or a directory with everything in it as one atomic step, durably. A path that
    /// does not exist is no error. Writers below it are fenced; open readers go on reading.
    fn delete(&self, path: &StorePath) -> Result<(), StoreError>;

    /// From now on every writer below `dir` that exists is [`StoreError::Fenced`].
    /// [`StoreError::Fenced`] if `dir` was fenced with a higher epoch before.
    fn fence(&self, dir: &StorePath, epoch: u64) -> Result<(), StoreError>;

    /// Whether calls that only append or read may wait for another machine.
    fn is_remote(&self) -> bool {
        false
    }
}

/// Where a file ended when a flush of the whole store was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SyncPoint(pub(crate) u64);

/// The end of one file. All methods take `&self`; appends are ordered by the caller's calls.
pub trait Writer: Send + Sync {
    /// Appends the parts as one and returns the new end. After any error nothing was appended, and the
    /// writer goes on as before unless [`StoreError::ends_writer`] says otherwise.
    fn append(&self, parts: &[IoSlice<'_>]) -> Result<u64, StoreError>;

    /// Makes everything durable that was appended before the call, and returns that position.
    /// Blocks for the disk. The first error is final: [`StoreError::SyncFailed`].
    fn sync(&self) -> Result<u64, StoreError>;

    /// Starts making durable what is appended by now, where one flush of the store serves many files:
    /// begin with all of them, then end each. `None` where files are synced one by one.
    fn sync_begin(&self) -> Option<SyncPoint> {
        None
    }

    /// Waits until what was appended before this point is durable; errors as of `sync`.
    fn sync_end(&self, _point: SyncPoint) -> Result<(), StoreError> {
        self.sync().map(|_| ())
    }

    /// Syncs and ends the writer.
    fn seal(&self) -> Result<(), StoreError>;

    /// Sees the appended bytes at once.
    fn reader(&self) -> Arc<dyn Reader>;
}

/// The bytes of one file. Cheap to hold, usable from many threads.
pub trait Reader: Send + Sync {
    /// The bytes from `pos` on: `len` of them, or fewer at the end of the file, none beyond it.
    fn read_at(&self, pos: u64, len: usize) -> Result<Bytes, StoreError>;

    /// The end of the file as far as this reader sees it.
    fn len(&self) -> u64;

    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The local file that holds the first [`Reader::len`] bytes, for `sendfile`.
    fn file(&self) -> Option<Arc<File>>;
}

/// One entry of a directory; `len` is 0 for a directory.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Entry {
    pub name: String,
    pub len: u64,
    pub is_dir: bool,
}

impl<S: SegmentStore + ?Sized> SegmentStore for Arc<S> {
    fn create(&self, path: &StorePath) -> Result<Arc<dyn Writer>, StoreError> {
        (**self).create(path)
    }

    fn resume(&self, path: &StorePath, len: u64) -> Result<Arc<dyn Writer>, StoreError> {
        (**self).resume(path, len)
    }

    fn open(&self, path: &StorePath) -> Result<Arc<dyn Reader>, StoreError> {
        (**self).open(path)
    }

    fn put(&self, path: &StorePath, bytes: &[u8]) -> Result<(), StoreError> {
        (**self).put(path, bytes)
    }

    fn put_later(&self, path: &StorePath, bytes: &[u8]) -> Result<(), StoreError> {
        (**self).put_later(path, bytes)
    }

    fn list(&self, dir: &StorePath) -> Result<Vec<Entry>, StoreError> {
        (**self).list(dir)
    }

    fn delete(&self, path: &StorePath) -> Result<(), StoreError> {
        (**self).delete(path)
    }

    fn fence(&self, dir: &StorePath, epoch: u64) -> Result<(), StoreError> {
        (**self).fence(dir, epoch)
    }

    fn is_remote(&self) -> bool {
        (**self).is_remote()
    }
}
