//! Segments as files of a local directory: the embedded default.
//!
//! Owns durability on a disk: one vectored write per append, fdatasync, fsync of directories, atomic
//! replacement. Leaves out what the bytes mean. Invariant: a position reported durable was covered by
//! an fdatasync that succeeded, and a failed one is never tried again.

use std::collections::HashSet;
use std::fs::{self, File, OpenOptions};
use std::io::{self, IoSlice, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use parking_lot::Mutex;
use rustix::buffer::spare_capacity;

use super::live::{Gate, Live};
use super::{Entry, Reader, SegmentStore, Writer};
use crate::data_dir::{DataDir, TEMP_NAME, TOPICS_NAME, make_dirs, sync_dir};
use crate::{StoreError, StorePath};

/// A store in a directory that no other process holds. Clones share it.
///
/// ```text
/// <dir>/LOCK      flock, holds the owner's process id
/// <dir>/FORMAT    version of all that follows
/// <dir>/topics/   the files of the store
/// <dir>/tmp/      half-written and half-deleted files; emptied at every start
/// ```
#[derive(Clone, Debug)]
pub struct Disk {
    root: Arc<Root>,
}

#[derive(Debug)]
struct Root {
    _dir: DataDir,
    files: PathBuf,
    temp: PathBuf,
    temp_next: AtomicU64,
    /// Directories that are known to be durable.
    dirs: Mutex<HashSet<PathBuf>>,
    live: Live,
}

impl Disk {
    /// Locks `dir` (created if needed) and clears what a crash left half-done.
    pub fn open(dir: impl AsRef<Path>) -> Result<Disk, StoreError> {
        let dir = DataDir::open(dir.as_ref())?;
        let files = dir.root().join(TOPICS_NAME);
        let temp = dir.root().join(TEMP_NAME);
        if temp.exists() {
            fs::remove_dir_all(&temp).map_err(|e| StoreError::from_io(&e, "clear", &temp))?;
        }
        for path in [&files, &temp] {
            make_dirs(path).map_err(|e| StoreError::from_io(&e, "create directory", path))?;
        }
        let dirs = Mutex::new(HashSet::from([files.clone()]));
        let root = Root { _dir: dir, files, temp, temp_next: AtomicU64::new(0), dirs, live: Live::default() };
        Ok(Disk { root: Arc::new(root) })
    }

    fn writer(&self, path: &StorePath, file: File, end: u64) -> Arc<dyn Writer> {
        let gate = Gate::new(end, 0);
        self.root.live.admit(path, &gate);
        Arc::new(DiskWriter { root: self.root.clone(), path: path.clone(), file: Arc::new(file), gate })
    }
}

impl SegmentStore for Disk {
    fn create(&self, path: &StorePath) -> Result<Arc<dyn Writer>, StoreError> {
        let full = self.root.full(path);
        let dir = self.root.dir_of(&full)?;
        let open = OpenOptions::new().read(true).write(true).create_new(true).open(&full);
        let file = open.map_err(|e| StoreError::from_io(&e, "create", &full))?;
        if let Err(e) = sync_dir(dir) {
            let _ = fs::remove_file(&full);
            return Err(StoreError::from_io(&e, "sync directory of", &full));
        }
        Ok(self.writer(path, file, 0))
    }

    fn resume(&self, path: &StorePath, len: u64) -> Result<Arc<dyn Writer>, StoreError> {
        let full = self.root.full(path);
        let fail = |e: io::Error| StoreError::from_io(&e, "resume", &full);
        let file = OpenOptions::new().read(true).write(true).open(&full).map_err(fail)?;
        // An older writer must be silent before the cut, not after it.
        self.root.live.retire(path);
        let found = file.metadata().map_err(fail)?.len();
        if found < len {
            return Err(StoreError::Corrupt(format!("{path} has {found} bytes, expected at least {len}")));
        }
        if found > len {
            file.set_len(len).and_then(|()| file.sync_all()).map_err(fail)?;
        }
        Ok(self.writer(path, file, len))
    }

    fn open(&self, path: &StorePath) -> Result<Arc<dyn Reader>, StoreError> {
        let full = self.root.full(path);
        let fail = |e: io::Error| StoreError::from_io(&e, "open", &full);
        let file = File::open(&full).map_err(fail)?;
        let metadata = file.metadata().map_err(fail)?;
        if metadata.is_dir() {
            return Err(StoreError::NotFound);
        }
        let len = match self.root.live.gate(path) {
            Some(gate) => Length::Live(gate),
            None => Length::Fixed(metadata.len()),
        };
        Ok(Arc::new(DiskReader { file: Arc::new(file), len }))
    }

    fn put(&self, path: &StorePath, bytes: &[u8]) -> Result<(), StoreError> {
        let full = self.root.full(path);
        let dir = self.root.dir_of(&full)?;
        self.root.live.retire(path);
        let temp = self.root.temp_path();
        let write = || -> io::Result<()> {
            let mut file = OpenOptions::new().write(true).create_new(true).open(&temp)?;
            file.write_all(bytes)?;
            file.sync_all()?;
            fs::rename(&temp, &full)?;
            sync_dir(dir)
        };
        write().map_err(|e| {
            let _ = fs::remove_file(&temp);
            StoreError::from_io(&e, "put", &full)
        })
    }

    fn list(&self, dir: &StorePath) -> Result<Vec<Entry>, StoreError> {
        let full = self.root.full(dir);
        let fail = |e: io::Error| StoreError::from_io(&e, "list", &full);
        let entries = match fs::read_dir(&full) {
            Ok(entries) => entries,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(e) => return Err(fail(e)),
        };
        let mut list = Vec::new();
        for entry in entries {
            let entry = entry.map_err(fail)?;
            let metadata = match entry.metadata() {
                Ok(metadata) => metadata,
                // Deleted since it was listed.
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                Err(e) => return Err(fail(e)),
            };
            // A name that is not text is not ours.
            let Ok(name) = entry.file_name().into_string() else { continue };
            let is_dir = metadata.is_dir();
            list.push(Entry { name, len: if is_dir { 0 } else { metadata.len() }, is_dir });
        }
        list.sort();
        Ok(list)
    }

    fn delete(&self, path: &StorePath) -> Result<(), StoreError> {
        let full = self.root.full(path);
        let fail = |e: io::Error| StoreError::from_io(&e, "delete", &full);
        let is_dir = match fs::symlink_metadata(&full) {
            Ok(metadata) => metadata.is_dir(),
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(e) => return Err(fail(e)),
        };
        if path.is_root() {
            return Err(StoreError::Io("the root of a store cannot be deleted".to_owned()));
        }
        self.root.live.forget(path);
        let parent = full.parent().expect("a path below the root has a parent");
        if !is_dir {
            return fs::remove_file(&full).and_then(|()| sync_dir(parent)).map_err(fail);
        }
        // Renamed away first: a crash leaves all of the directory or none of it.
        let temp = self.root.temp_path();
        self.root.dirs.lock().retain(|dir| !dir.starts_with(&full));
        fs::rename(&full, &temp).and_then(|()| sync_dir(parent)).map_err(fail)?;
        if let Err(error) = fs::remove_dir_all(&temp) {
            tracing::warn!(path = %temp.display(), %error, "deleted files take space until the next start");
        }
        Ok(())
    }

    fn fence(&self, dir: &StorePath, epoch: u64) -> Result<(), StoreError> {
        self.root.live.fence(dir, epoch)
    }
}

impl Root {
    fn full(&self, path: &StorePath) -> PathBuf {
        self.files.join(path.as_str())
    }

    fn temp_path(&self) -> PathBuf {
        self.temp.join(self.temp_next.fetch_add(1, Ordering::Relaxed).to_string())
    }

    /// The parent of a file, made durable first.
    fn dir_of<'a>(&self, full: &'a Path) -> Result<&'a Path, StoreError> {
        let dir = full.parent().expect("a file of the store has a parent");
        self.make_dir(dir).map_err(|e| StoreError::from_io(&e, "create directory", dir))?;
        Ok(dir)
    }

    /// A directory that exists may still not be durable (made just before a crash), so the first use
    /// in a process syncs its parent in any case. Not under the lock: many are made at once, and two
    /// that make the same one both sync.
    fn make_dir(&self, dir: &Path) -> io::Result<()> {
        if self.dirs.lock().contains(dir) {
            return Ok(());
        }
        let parent = dir.parent().expect("the root directory is always known");
        self.make_dir(parent)?;
        match fs::create_dir(dir) {
            Ok(()) => {}
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists && dir.is_dir() => {}
            Err(e) => return Err(e),
        }
        sync_dir(parent)?;
        self.dirs.lock().insert(dir.to_owned());
        Ok(())
    }
}

struct DiskWriter {
    /// Keeps the directory locked as long as somebody can write in it.
    root: Arc<Root>,
    path: StorePath,
    file: Arc<File>,
    gate: Arc<Gate>,
}

impl Writer for DiskWriter {
    fn append(&self, parts: &[IoSlice<'_>]) -> Result<u64, StoreError> {
        let tail = self.gate.tail()?;
        let start = tail.end();
        match write_all_at(&self.file, parts, start) {
            Ok(end) => {
                tail.advance(end);
                Ok(end)
            }
            Err(error) => match self.file.set_len(start) {
                Ok(()) => Err(StoreError::from_io(&error, "append to", Path::new(self.path.as_str()))),
                Err(_) => Err(tail.break_off()),
            },
        }
    }

    fn sync(&self) -> Result<u64, StoreError> {
        self.gate.sync(|_| {
            self.file.sync_data().inspect_err(|error| {
                tracing::error!(path = %self.path, %error, "fdatasync failed: the file is given up");
            })
        })
    }

    fn seal(&self) -> Result<(), StoreError> {
        self.sync()?;
        self.gate.seal()
    }

    fn reader(&self) -> Arc<dyn Reader> {
        Arc::new(DiskReader { file: self.file.clone(), len: Length::Live(self.gate.clone()) })
    }
}

impl Drop for DiskWriter {
    fn drop(&mut self) {
        self.root.live.release(&self.path, &self.gate);
    }
}

pub(super) struct DiskReader {
    file: Arc<File>,
    len: Length,
}

enum Length {
    Fixed(u64),
    Live(Arc<Gate>),
}

impl Reader for DiskReader {
    fn read_at(&self, pos: u64, len: usize) -> Result<Bytes, StoreError> {
        let available = self.len().saturating_sub(pos);
        let len = available.min(len as u64) as usize;
        let mut bytes = Vec::with_capacity(len);
        while bytes.len() < len {
            let at = pos + bytes.len() as u64;
            match rustix::io::pread(&*self.file, spare_capacity(&mut bytes), at) {
                Ok(0) => {
                    return Err(StoreError::Corrupt(format!(
                        "the file ends at {at}, in the middle of a read"
                    )));
                }
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(StoreError::Io(format!("read at {at}: {e}"))),
            }
        }
        // The allocator may have given more room than asked for, and pread filled it.
        bytes.truncate(len);
        Ok(Bytes::from(bytes))
    }

    fn len(&self) -> u64 {
        match &self.len {
            Length::Fixed(len) => *len,
            Length::Live(gate) => gate.end(),
        }
    }

    fn file(&self) -> Option<Arc<File>> {
        Some(self.file.clone())
    }
}

/// Writes all parts at `pos` and returns the position after them. One system call, unless the kernel
/// takes less than it was given.
fn write_all_at(file: &File, mut parts: &[IoSlice<'_>], mut pos: u64) -> io::Result<u64> {
    while let Some((first, rest)) = parts.split_first() {
        if first.is_empty() {
            parts = rest;
            continue;
        }
        let mut written = match rustix::io::pwritev(file, parts, pos) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => written,
            Err(rustix::io::Errno::INTR) => continue,
            Err(e) => return Err(e.into()),
        };
        pos += written as u64;
        while let Some((first, rest)) = parts.split_first()
            && written >= first.len()
        {
            written -= first.len();
            parts = rest;
        }
        if written > 0 {
            let (first, rest) = parts.split_first().expect("bytes were written into a part");
            file.write_all_at(&first[written..], pos)?;
            pos += (first.len() - written) as u64;
            parts = rest;
        }
    }
    Ok(pos)
}
