//! The segment store, its writers and its readers, over the living state.
//!
//! Calls decide under the one lock of the state and wait, where they must, for the flush; no call of the
//! remote store happens under that lock, and no handle is dropped under it.

use std::fs::File;
use std::io::IoSlice;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::{Bytes, BytesMut};

use super::cache::Wanted;
use super::core::Found;
use super::tree::FileNo;
use super::{Inner, Shared};
use crate::segment::SyncPoint;
use crate::{Entry, Reader, SegmentStore, StoreError, StorePath, Writer};

impl SegmentStore for Shared {
    fn create(&self, path: &StorePath) -> Result<Arc<dyn Writer>, StoreError> {
        let mut core = self.inner.core.lock();
        let (file, writer, seq) = core.create(path)?;
        self.inner.wait_for(&mut core, seq)?;
        drop(core);
        Ok(Arc::new(LogWriter { inner: self.inner.clone(), file, writer }))
    }

    fn resume(&self, path: &StorePath, len: u64) -> Result<Arc<dyn Writer>, StoreError> {
        let (file, writer) = self.inner.core.lock().resume(path, len)?;
        Ok(Arc::new(LogWriter { inner: self.inner.clone(), file, writer }))
    }

    fn open(&self, path: &StorePath) -> Result<Arc<dyn Reader>, StoreError> {
        let mut core = self.inner.core.lock();
        let file = core.file_at(path).ok_or(StoreError::NotFound)?;
        core.add_handle(file);
        drop(core);
        Ok(Arc::new(LogReader::new(&self.inner, file)))
    }

    fn put(&self, path: &StorePath, bytes: &[u8]) -> Result<(), StoreError> {
        if bytes.len() > self.inner.options.put_inline_bytes_max {
            return self.inner.put_large(path, bytes);
        }
        let mut core = self.inner.core.lock();
        self.inner.wait_for_room(&mut core)?;
        let seq = core.put(path, &[], bytes)?;
        self.inner.wait_for(&mut core, seq)
    }

    fn put_later(&self, path: &StorePath, bytes: &[u8]) -> Result<(), StoreError> {
        let mut core = self.inner.core.lock();
        // Its directory may have gone meanwhile, and must not come back by this.
        if core.tree.dir_at(&super::tree::owner_of(path).0).is_none() {
            return Err(StoreError::NotFound);
        }
        if !core.has_room() || bytes.len() > self.inner.options.put_inline_bytes_max {
            return Err(StoreError::Io(format!("{path}: the log has no room for it now")));
        }
        core.put(path, &[], bytes).map(drop)
    }

    fn list(&self, dir: &StorePath) -> Result<Vec<Entry>, StoreError> {
        Ok(self.inner.core.lock().list(dir))
    }

    fn delete(&self, path: &StorePath) -> Result<(), StoreError> {
        let mut core = self.inner.core.lock();
        core.alive()?;
        // What somebody else has just removed is to be durable, too.
        match core.delete(path)?.or(core.ring.last_written()) {
            Some(seq) => self.inner.wait_for(&mut core, seq),
            None => Ok(()),
        }
    }

    fn fence(&self, dir: &StorePath, epoch: u64) -> Result<(), StoreError> {
        self.inner.core.lock().fence(dir, epoch)
    }

    fn is_remote(&self) -> bool {
        true
    }
}

struct LogWriter {
    inner: Arc<Inner>,
    file: FileNo,
    writer: u64,
}

impl Writer for LogWriter {
    fn append(&self, parts: &[IoSlice<'_>]) -> Result<u64, StoreError> {
        let mut core = self.inner.core.lock();
        self.inner.wait_for_room(&mut core)?;
        let end = core.append(self.file, self.writer, parts)?;
        let is_due = core.ring.has_closed();
        drop(core);
        if is_due {
            self.inner.flush.notify_one();
        }
        Ok(end)
    }

    fn sync(&self) -> Result<u64, StoreError> {
        let mut core = self.inner.core.lock();
        let (seq, len) = core.sync_of(self.file, self.writer)?;
        if let Some(seq) = seq {
            self.inner.wait_for(&mut core, seq)?;
            core.written_by(self.file, self.writer)?;
        }
        Ok(len)
    }

    fn sync_begin(&self) -> Option<SyncPoint> {
        let mut core = self.inner.core.lock();
        // What is wrong with the writer is said at the end.
        let Ok((Some(seq), _)) = core.sync_of(self.file, self.writer) else { return Some(SyncPoint(0)) };
        core.want(seq);
        drop(core);
        self.inner.flush.notify_one();
        Some(SyncPoint(seq + 1))
    }

    fn sync_end(&self, point: SyncPoint) -> Result<(), StoreError> {
        let mut core = self.inner.core.lock();
        core.written_by(self.file, self.writer)?;
        if let Some(seq) = point.0.checked_sub(1) {
            self.inner.wait_for(&mut core, seq)?;
            core.written_by(self.file, self.writer)?;
        }
        Ok(())
    }

    fn seal(&self) -> Result<(), StoreError> {
        let len = self.sync()?;
        self.inner.core.lock().seal(self.file, self.writer, len)?;
        self.inner.work.notify_one();
        Ok(())
    }

    fn reader(&self) -> Arc<dyn Reader> {
        self.inner.core.lock().add_handle(self.file);
        Arc::new(LogReader::new(&self.inner, self.file))
    }
}

impl Drop for LogWriter {
    fn drop(&mut self) {
        self.inner.core.lock().end_writer(self.file, self.writer);
    }
}

struct LogReader {
    inner: Arc<Inner>,
    file: FileNo,
    /// Where the latest read ended, and how much was read in order up to there.
    next: AtomicU64,
    in_order: AtomicU64,
}

impl LogReader {
    fn new(inner: &Arc<Inner>, file: FileNo) -> LogReader {
        LogReader { inner: inner.clone(), file, next: AtomicU64::new(0), in_order: AtomicU64::new(0) }
    }

    /// Counts how much is read one after the other; for reading ahead only, so races do no harm.
    fn follow(&self, pos: u64, len: u64) -> u64 {
        let is_next = self.next.swap(pos.saturating_add(len), Ordering::Relaxed) == pos;
        let before = if is_next { self.in_order.load(Ordering::Relaxed) } else { 0 };
        self.in_order.store(before.saturating_add(len), Ordering::Relaxed);
        before
    }

    fn object_part(&self, found: &Found, in_order: u64) -> Result<Bytes, StoreError> {
        let Found::Object { object, path, pos, len, end, is_pack } = found else { return Ok(Bytes::new()) };
        // What comes next in a pack is of another file.
        let ahead = if *is_pack { 0 } else { self.inner.cache.ahead(in_order) };
        let object_len = if *is_pack { u64::MAX } else { *end };
        let wanted = Wanted { object: *object, path, pos: *pos, len: *len, object_len, ahead };
        self.inner.cache.read(&*self.inner.remote, wanted)
    }
}

impl Reader for LogReader {
    fn read_at(&self, pos: u64, len: usize) -> Result<Bytes, StoreError> {
        let end = pos.saturating_add(len as u64);
        let mut at = pos;
        let mut parts = Vec::new();
        let mut lookups_left = LOOKUPS_MAX;
        while at < end {
            let found = self.inner.core.lock().read(self.file, at, (end - at) as usize)?;
            if let Found::Tail(tail) = found {
                parts.extend(tail);
                break;
            }
            let in_order = if parts.is_empty() { self.follow(pos, 0) } else { at - pos };
            match self.object_part(&found, in_order) {
                Ok(bytes) => {
                    at += bytes.len() as u64;
                    parts.push(bytes);
                }
                // Another object has taken its place, or the file was cut.
                Err(StoreError::NotFound) if lookups_left > 0 => lookups_left -= 1,
                Err(error) => return Err(error),
            }
        }
        let bytes = joined(parts);
        self.follow(pos, bytes.len() as u64);
        Ok(bytes)
    }

    fn len(&self) -> u64 {
        self.inner.core.lock().view(self.file).map_or(0, |file| file.len)
    }

    fn file(&self) -> Option<Arc<File>> {
        None
    }
}

impl Drop for LogReader {
    fn drop(&mut self) {
        self.inner.core.lock().drop_handle(self.file);
    }
}

/// An object may vanish under a reader so often before that is an error.
const LOOKUPS_MAX: u32 = 4;

fn joined(mut parts: Vec<Bytes>) -> Bytes {
    if parts.len() <= 1 {
        return parts.pop().unwrap_or_default();
    }
    let mut bytes = BytesMut::with_capacity(parts.iter().map(Bytes::len).sum());
    parts.iter().for_each(|part| bytes.extend_from_slice(part));
    bytes.freeze()
}
