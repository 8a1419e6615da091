//! A remote store in memory: for tests, and the model that the real ones are compared with.
//!
//! Everything happens under one lock, so every call is one step. Clones share the content. The fence can
//! be switched off, for the twins of tests that must fail without it.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use parking_lot::Mutex;

use super::{Block, Life, LifeLog, Remote};
use crate::{Entry, StoreError, StorePath};

#[derive(Clone, Debug, Default)]
pub struct Memory {
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    objects: BTreeMap<StorePath, Bytes>,
    logs: BTreeMap<Life, Log>,
    is_fence_off: bool,
    /// Blocks of lives that had ended.
    refusals: u64,
}

/// What is known of one life; also of one that was ended and never began.
#[derive(Debug, Default)]
struct Log {
    blocks: BTreeMap<u64, Block>,
    /// The number of the next new block.
    next: u64,
    /// The lowest number that the latest block still needs.
    lowest: u64,
    has_ended: bool,
}

impl Memory {
    pub fn new() -> Memory {
        Memory::default()
    }

    /// While off, [`Remote::end`] reads as ever and keeps no writer from going on.
    pub fn set_fence(&self, is_on: bool) {
        self.state.lock().is_fence_off = !is_on;
    }

    /// Blocks that were refused because their life had ended.
    pub fn refusals(&self) -> u64 {
        self.state.lock().refusals
    }

    /// Removes one block behind everybody's back, as damage would.
    pub fn lose_block(&self, life: Life, seq: u64) {
        if let Some(log) = self.state.lock().logs.get_mut(&life) {
            log.blocks.remove(&seq);
        }
    }
}

impl Remote for Memory {
    fn put(&self, name: &StorePath, bytes: Bytes) -> Result<(), StoreError> {
        let mut state = self.state.lock();
        match state.objects.get(name) {
            // One's own write, tried again after an answer that was lost.
            Some(found) if *found == bytes => Ok(()),
            Some(_) => Err(StoreError::AlreadyExists),
            None => {
                state.objects.insert(name.clone(), bytes);
                Ok(())
            }
        }
    }

    fn get(&self, name: &StorePath, pos: u64, len: usize) -> Result<Bytes, StoreError> {
        let state = self.state.lock();
        let object = state.objects.get(name).ok_or(StoreError::NotFound)?;
        let start = usize::try_from(pos).unwrap_or(usize::MAX).min(object.len());
        Ok(object.slice(start..start.saturating_add(len).min(object.len())))
    }

    fn list(&self, dir: &StorePath) -> Result<Vec<Entry>, StoreError> {
        let mut entries: Vec<Entry> = Vec::new();
        for (path, object) in self.state.lock().objects.iter().filter(|(path, _)| path.is_within(dir)) {
            let rest = path.as_str()[dir.as_str().len()..].trim_start_matches('/');
            match rest.split_once('/') {
                Some((name, _)) => entries.push(Entry { name: name.to_owned(), len: 0, is_dir: true }),
                None if rest.is_empty() => {}
                None => {
                    entries.push(Entry { name: rest.to_owned(), len: object.len() as u64, is_dir: false });
                }
            }
        }
        entries.sort();
        entries.dedup();
        Ok(entries)
    }

    fn delete(&self, name: &StorePath) -> Result<(), StoreError> {
        super::refuse_root(name)?;
        self.state.lock().objects.retain(|path, _| !path.is_within(name));
        Ok(())
    }

    fn begin(&self, life: Life) -> Result<Arc<dyn LifeLog>, StoreError> {
        let mut state = self.state.lock();
        let log = state.logs.entry(life).or_default();
        if log.has_ended {
            return Err(StoreError::Fenced);
        }
        if log.next > 0 {
            return Err(StoreError::AlreadyExists);
        }
        Ok(Arc::new(MemoryLog { state: self.state.clone(), life }))
    }

    fn fence(&self, life: Life) -> Result<(), StoreError> {
        let mut state = self.state.lock();
        let is_fence_off = state.is_fence_off;
        state.logs.entry(life).or_default().has_ended |= !is_fence_off;
        Ok(())
    }

    fn end(
        &self,
        life: Life,
        visit: &mut dyn FnMut(Block) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        for block in self.state.lock().end(life)? {
            visit(block)?;
        }
        Ok(())
    }

    fn forget(&self, life: Life) -> Result<(), StoreError> {
        let mut state = self.state.lock();
        let is_fence_off = state.is_fence_off;
        let Some(log) = state.logs.get_mut(&life) else { return Err(super::not_ended(life)) };
        if !log.has_ended && !is_fence_off {
            return Err(super::not_ended(life));
        }
        log.blocks.clear();
        log.lowest = log.next;
        Ok(())
    }

    fn lives(&self) -> Result<Vec<Life>, StoreError> {
        let state = self.state.lock();
        Ok(state.logs.iter().filter(|(_, log)| !log.blocks.is_empty()).map(|(life, _)| *life).collect())
    }
}

impl State {
    fn end(&mut self, life: Life) -> Result<Vec<Block>, StoreError> {
        let is_fence_off = self.is_fence_off;
        let log = self.logs.entry(life).or_default();
        log.has_ended |= !is_fence_off;
        let block = |seq| {
            let found = log.blocks.get(&seq).cloned();
            found.ok_or_else(|| super::missing_block(life, seq))
        };
        (log.lowest..log.next).map(block).collect()
    }
}

struct MemoryLog {
    state: Arc<Mutex<State>>,
    life: Life,
}

impl LifeLog for MemoryLog {
    fn append(&self, block: &Block) -> Result<(), StoreError> {
        assert_eq!(block.life, self.life, "a block of this life");
        let mut state = self.state.lock();
        let log = state.logs.entry(self.life).or_default();
        if log.has_ended {
            state.refusals += 1;
            return Err(StoreError::Fenced);
        }
        if block.seq + 1 == log.next {
            // The latest block, tried again after an answer that was lost.
            assert_eq!(log.blocks.get(&block.seq), Some(block), "the same block again");
            return Ok(());
        }
        assert_eq!(block.seq, log.next, "numbers without a gap");
        assert!(block.lowest >= log.lowest, "what was given up is not needed again");
        log.next += 1;
        log.lowest = block.lowest;
        log.blocks.insert(block.seq, block.clone());
        log.blocks = log.blocks.split_off(&block.lowest);
        Ok(())
    }
}
