//! Segments in memory: for tests and for a broker that keeps nothing.
//!
//! "Durable" means nothing here beyond the process. Files are held in chunks, so that growing one
//! never copies what it holds.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::IoSlice;
use std::sync::Arc;

use bytes::Bytes;
use parking_lot::{Mutex, RwLock};

use super::live::{Gate, Live};
use super::{Entry, Reader, SegmentStore, Writer};
use crate::{StoreError, StorePath};

/// A store in memory. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Memory {
    root: Arc<Root>,
}

#[derive(Debug, Default)]
struct Root {
    files: Mutex<BTreeMap<StorePath, Arc<RwLock<Content>>>>,
    live: Live,
}

impl Memory {
    pub fn new() -> Memory {
        Memory::default()
    }

    fn writer(&self, path: &StorePath, content: Arc<RwLock<Content>>) -> Arc<dyn Writer> {
        let gate = Gate::new(content.read().len, 0);
        self.root.live.admit(path, &gate);
        Arc::new(MemoryWriter { root: self.root.clone(), path: path.clone(), content, gate })
    }

    fn find(&self, path: &StorePath) -> Result<Arc<RwLock<Content>>, StoreError> {
        self.root.files.lock().get(path).cloned().ok_or(StoreError::NotFound)
    }
}

impl SegmentStore for Memory {
    fn create(&self, path: &StorePath) -> Result<Arc<dyn Writer>, StoreError> {
        let content = Arc::new(RwLock::new(Content::default()));
        let mut files = self.root.files.lock();
        if files.contains_key(path) {
            return Err(StoreError::AlreadyExists);
        }
        files.insert(path.clone(), content.clone());
        drop(files);
        Ok(self.writer(path, content))
    }

    fn resume(&self, path: &StorePath, len: u64) -> Result<Arc<dyn Writer>, StoreError> {
        let content = self.find(path)?;
        let found = content.read().len;
        if found < len {
            return Err(StoreError::Corrupt(format!("{path} has {found} bytes, expected at least {len}")));
        }
        self.root.live.retire(path);
        content.write().truncate(len);
        Ok(self.writer(path, content))
    }

    fn open(&self, path: &StorePath) -> Result<Arc<dyn Reader>, StoreError> {
        Ok(Arc::new(MemoryReader { content: self.find(path)? }))
    }

    fn put(&self, path: &StorePath, bytes: &[u8]) -> Result<(), StoreError> {
        self.root.live.retire(path);
        let mut content = Content::default();
        content.append(bytes);
        self.root.files.lock().insert(path.clone(), Arc::new(RwLock::new(content)));
        Ok(())
    }

    fn list(&self, dir: &StorePath) -> Result<Vec<Entry>, StoreError> {
        let mut entries: Vec<Entry> = Vec::new();
        for (path, content) in self.root.files.lock().iter().filter(|(path, _)| path.is_within(dir)) {
            let rest = path.as_str()[dir.as_str().len()..].trim_start_matches('/');
            match rest.split_once('/') {
                // The files of one directory follow each other.
                Some((name, _)) if entries.last().is_some_and(|last| last.name == name) => {}
                Some((name, _)) => entries.push(Entry { name: name.to_owned(), len: 0, is_dir: true }),
                None if rest.is_empty() => {}
                None => {
                    entries.push(Entry { name: rest.to_owned(), len: content.read().len, is_dir: false });
                }
            }
        }
        entries.sort();
        Ok(entries)
    }

    fn delete(&self, path: &StorePath) -> Result<(), StoreError> {
        if path.is_root() {
            return Err(StoreError::Io("the root of a store cannot be deleted".to_owned()));
        }
        self.root.live.forget(path);
        self.root.files.lock().retain(|file, _| !file.is_within(path));
        Ok(())
    }

    fn fence(&self, dir: &StorePath, epoch: u64) -> Result<(), StoreError> {
        self.root.live.fence(dir, epoch)
    }
}

struct MemoryWriter {
    root: Arc<Root>,
    path: StorePath,
    content: Arc<RwLock<Content>>,
    gate: Arc<Gate>,
}

impl Writer for MemoryWriter {
    fn append(&self, parts: &[IoSlice<'_>]) -> Result<u64, StoreError> {
        let tail = self.gate.tail()?;
        let mut content = self.content.write();
        parts.iter().for_each(|part| content.append(part));
        tail.advance(content.len);
        Ok(content.len)
    }

    fn sync(&self) -> Result<u64, StoreError> {
        self.gate.sync(|_| Ok::<(), StoreError>(()))
    }

    fn seal(&self) -> Result<(), StoreError> {
        self.sync()?;
        self.gate.seal()
    }

    fn reader(&self) -> Arc<dyn Reader> {
        Arc::new(MemoryReader { content: self.content.clone() })
    }
}

impl Drop for MemoryWriter {
    fn drop(&mut self) {
        self.root.live.release(&self.path, &self.gate);
    }
}

struct MemoryReader {
    content: Arc<RwLock<Content>>,
}

impl Reader for MemoryReader {
    fn read_at(&self, pos: u64, len: usize) -> Result<Bytes, StoreError> {
        Ok(self.content.read().read(pos, len))
    }

    fn len(&self) -> u64 {
        self.content.read().len
    }

    fn file(&self) -> Option<Arc<File>> {
        None
    }
}

const CHUNK_BYTES: usize = 64 * 1024;

/// All chunks but the last hold exactly `CHUNK_BYTES`.
#[derive(Debug, Default)]
struct Content {
    chunks: Vec<Vec<u8>>,
    len: u64,
}

impl Content {
    fn append(&mut self, mut bytes: &[u8]) {
        self.len += bytes.len() as u64;
        while !bytes.is_empty() {
            if self.chunks.last().is_none_or(|chunk| chunk.len() == CHUNK_BYTES) {
                self.chunks.push(Vec::new());
            }
            let chunk = self.chunks.last_mut().expect("a chunk with room was just made sure of");
            let (now, later) = bytes.split_at(bytes.len().min(CHUNK_BYTES - chunk.len()));
            chunk.extend_from_slice(now);
            bytes = later;
        }
    }

    fn read(&self, pos: u64, len: usize) -> Bytes {
        let len = self.len.saturating_sub(pos).min(len as u64) as usize;
        let mut bytes = Vec::with_capacity(len);
        while bytes.len() < len {
            let at = pos as usize + bytes.len();
            let chunk = &self.chunks[at / CHUNK_BYTES][at % CHUNK_BYTES..];
            bytes.extend_from_slice(&chunk[..chunk.len().min(len - bytes.len())]);
        }
        Bytes::from(bytes)
    }

    fn truncate(&mut self, len: u64) {
        let len_usize = len as usize;
        self.chunks.truncate(len_usize.div_ceil(CHUNK_BYTES));
        if let Some(last) = self.chunks.last_mut() {
            last.truncate((len_usize - 1) % CHUNK_BYTES + 1);
        }
        self.len = len;
    }
}
