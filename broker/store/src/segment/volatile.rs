//! A disk that forgets: bytes reach the file only when they are synced.
//!
//! For tests with real processes: kill -9 keeps the page cache, so a broker on [`Disk`] would keep
//! bytes that it never synced. Here they live in the memory of the process and die with it (or with the
//! writer). A full disk shows at `sync`, hence as [`StoreError::SyncFailed`].

use std::collections::HashMap;
use std::fs::File;
use std::io::IoSlice;
use std::path::Path;
use std::sync::{Arc, Weak};

use bytes::{Bytes, BytesMut};
use parking_lot::Mutex;

use super::{Disk, Entry, Reader, SegmentStore, Writer};
use crate::{StoreError, StorePath};

/// A store like [`Disk`], in the same format. Clones share it.
#[derive(Clone, Debug)]
pub struct Volatile {
    disk: Disk,
    writers: Arc<Mutex<HashMap<StorePath, Weak<Unsynced>>>>,
}

/// Beyond this a writer syncs by itself: early durability is allowed, unbounded memory is not.
const UNSYNCED_BYTES_MAX: usize = 64 * 1024 * 1024;

impl Volatile {
    pub fn open(dir: impl AsRef<Path>) -> Result<Volatile, StoreError> {
        Ok(Volatile { disk: Disk::open(dir)?, writers: Arc::default() })
    }

    fn writer(&self, path: &StorePath, disk: Arc<dyn Writer>, base: u64, bytes: Vec<u8>) -> Arc<dyn Writer> {
        let unsynced = Arc::new(Unsynced { tail: Mutex::new(Tail { base, bytes, broken: false }) });
        let mut writers = self.writers.lock();
        writers.retain(|_, writer| writer.strong_count() > 0);
        writers.insert(path.clone(), Arc::downgrade(&unsynced));
        Arc::new(VolatileWriter { disk, unsynced, syncing: Mutex::new(()) })
    }

    fn unsynced(&self, path: &StorePath) -> Option<Arc<Unsynced>> {
        self.writers.lock().get(path)?.upgrade()
    }
}

impl SegmentStore for Volatile {
    fn create(&self, path: &StorePath) -> Result<Arc<dyn Writer>, StoreError> {
        Ok(self.writer(path, self.disk.create(path)?, 0, Vec::new()))
    }

    fn resume(&self, path: &StorePath, len: u64) -> Result<Arc<dyn Writer>, StoreError> {
        // What an older writer of this process has not synced is still part of the file.
        let Some(older) = self.unsynced(path) else {
            return Ok(self.writer(path, self.disk.resume(path, len)?, len, Vec::new()));
        };
        let tail = older.tail.lock();
        if tail.end() < len {
            return Err(StoreError::Corrupt(format!(
                "{path} has {} bytes, expected at least {len}",
                tail.end()
            )));
        }
        let base = tail.base.min(len);
        let disk = self.disk.resume(path, base)?;
        let bytes = tail.bytes[..(len - base) as usize].to_vec();
        drop(tail);
        Ok(self.writer(path, disk, base, bytes))
    }

    fn open(&self, path: &StorePath) -> Result<Arc<dyn Reader>, StoreError> {
        let disk = self.disk.open(path)?;
        match self.unsynced(path) {
            Some(unsynced) => Ok(Arc::new(VolatileReader { disk, unsynced: Some(unsynced) })),
            None => Ok(Arc::new(VolatileReader { disk, unsynced: None })),
        }
    }

    fn put(&self, path: &StorePath, bytes: &[u8]) -> Result<(), StoreError> {
        self.writers.lock().remove(path);
        self.disk.put(path, bytes)
    }

    fn list(&self, dir: &StorePath) -> Result<Vec<Entry>, StoreError> {
        let mut entries = self.disk.list(dir)?;
        for entry in entries.iter_mut().filter(|entry| !entry.is_dir) {
            let unsynced = dir.join(&entry.name).ok().and_then(|path| self.unsynced(&path));
            if let Some(unsynced) = unsynced {
                entry.len = unsynced.tail.lock().end();
            }
        }
        Ok(entries)
    }

    fn delete(&self, path: &StorePath) -> Result<(), StoreError> {
        self.writers.lock().retain(|file, _| !file.is_within(path));
        self.disk.delete(path)
    }

    fn fence(&self, dir: &StorePath, epoch: u64) -> Result<(), StoreError> {
        self.disk.fence(dir, epoch)
    }
}

#[derive(Debug)]
struct Unsynced {
    tail: Mutex<Tail>,
}

/// `bytes` follow the `base` bytes that are in the file.
#[derive(Debug)]
struct Tail {
    base: u64,
    bytes: Vec<u8>,
    broken: bool,
}

impl Tail {
    fn end(&self) -> u64 {
        self.base + self.bytes.len() as u64
    }

    fn check(&self) -> Result<(), StoreError> {
        if self.broken { Err(StoreError::SyncFailed { durable: self.base }) } else { Ok(()) }
    }
}

struct VolatileWriter {
    disk: Arc<dyn Writer>,
    unsynced: Arc<Unsynced>,
    syncing: Mutex<()>,
}

impl Writer for VolatileWriter {
    fn append(&self, parts: &[IoSlice<'_>]) -> Result<u64, StoreError> {
        let mut tail = self.unsynced.tail.lock();
        tail.check()?;
        // Appends nothing, but tells whether this writer may still write.
        self.disk.append(&[])?;
        parts.iter().for_each(|part| tail.bytes.extend_from_slice(part));
        let end = tail.end();
        let is_over = tail.bytes.len() > UNSYNCED_BYTES_MAX;
        drop(tail);
        if is_over {
            self.sync()?;
        }
        Ok(end)
    }

    fn sync(&self) -> Result<u64, StoreError> {
        let _turn = self.syncing.lock();
        let bytes = {
            let tail = self.unsynced.tail.lock();
            tail.check()?;
            tail.bytes.clone()
        };
        let written = if bytes.is_empty() { Ok(0) } else { self.disk.append(&[IoSlice::new(&bytes)]) };
        let synced = written.and_then(|_| self.disk.sync());
        let mut tail = self.unsynced.tail.lock();
        match synced {
            Ok(durable) => {
                tail.bytes.drain(..bytes.len());
                tail.base = durable;
                Ok(durable)
            }
            Err(error @ (StoreError::Fenced | StoreError::Sealed)) => Err(error),
            Err(_) => {
                tail.broken = true;
                Err(StoreError::SyncFailed { durable: tail.base })
            }
        }
    }

    fn seal(&self) -> Result<(), StoreError> {
        self.sync()?;
        self.disk.seal()
    }

    fn reader(&self) -> Arc<dyn Reader> {
        Arc::new(VolatileReader { disk: self.disk.reader(), unsynced: Some(self.unsynced.clone()) })
    }
}

struct VolatileReader {
    disk: Arc<dyn Reader>,
    unsynced: Option<Arc<Unsynced>>,
}

impl Reader for VolatileReader {
    fn read_at(&self, pos: u64, len: usize) -> Result<Bytes, StoreError> {
        let Some(unsynced) = &self.unsynced else { return self.disk.read_at(pos, len) };
        let tail = unsynced.tail.lock();
        let len = tail.end().saturating_sub(pos).min(len as u64) as usize;
        let on_disk = tail.base.saturating_sub(pos).min(len as u64) as usize;
        let mut bytes = BytesMut::with_capacity(len);
        if on_disk > 0 {
            bytes.extend_from_slice(&self.disk.read_at(pos, on_disk)?);
        }
        if on_disk < len {
            let from = (pos + on_disk as u64 - tail.base) as usize;
            bytes.extend_from_slice(&tail.bytes[from..from + len - on_disk]);
        }
        Ok(bytes.freeze())
    }

    fn len(&self) -> u64 {
        match &self.unsynced {
            Some(unsynced) => unsynced.tail.lock().end(),
            None => self.disk.len(),
        }
    }

    fn file(&self) -> Option<Arc<File>> {
        None
    }
}
