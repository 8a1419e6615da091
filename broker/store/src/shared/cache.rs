//! What was read from objects, for a while: blocks of equal size, the least used one goes first.
//!
//! One budget for the whole store. Several who want the same bytes wait for one request. Who reads on
//! where it stopped gets more with each request, up to a limit; so reading ahead needs no thread.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Duration;

use bytes::Bytes;
use parking_lot::{Condvar, Mutex};

use super::tree::ObjectId;
use super::{Options, core::Stats};
use crate::{Remote, StoreError, StorePath};

/// What is asked for at least, and kept as one.
const BLOCK_BYTES: usize = 256 << 10;
const ATTEMPTS: u32 = 5;

#[derive(Debug)]
pub(super) struct Cache {
    state: Mutex<State>,
    arrived: Condvar,
    bytes_max: usize,
    ahead_max: usize,
    /// Between the first two attempts.
    pause: Duration,
}

type Key = (ObjectId, u64);

#[derive(Debug, Default)]
struct State {
    blocks: HashMap<Key, (Bytes, u64)>,
    /// By the tick of the latest use.
    used: BTreeMap<u64, Key>,
    on_their_way: HashSet<Key>,
    tick: u64,
    bytes: usize,
    hits: u64,
    misses: u64,
}

/// A range of an object, for somebody who may read on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wanted<'a> {
    pub object: ObjectId,
    pub path: &'a StorePath,
    pub pos: u64,
    pub len: usize,
    /// Bytes of the object that may be read; more than it has where that is not known.
    pub object_len: u64,
    /// Bytes beyond the range that the reader is likely to want next.
    pub ahead: usize,
}

impl Cache {
    pub fn new(options: &Options) -> Cache {
        Cache {
            state: Mutex::default(),
            arrived: Condvar::new(),
            bytes_max: options.cache_bytes,
            ahead_max: options.read_ahead_bytes_max,
            // A simulation has no time to wait.
            pause: if options.stepped { Duration::ZERO } else { options.retry_after_max / 50 },
        }
    }

    /// How far to read ahead, for a reader that has read `in_order` bytes one after the other.
    pub fn ahead(&self, in_order: u64) -> usize {
        usize::try_from(in_order).unwrap_or(usize::MAX).min(self.ahead_max)
    }

    /// Bytes from the beginning of the range: all of it, or up to the end of a block.
    pub fn read(&self, remote: &dyn Remote, wanted: Wanted<'_>) -> Result<Bytes, StoreError> {
        let index = wanted.pos / BLOCK_BYTES as u64;
        let key = (wanted.object, index);
        let mut state = self.state.lock();
        loop {
            if let Some(block) = state.find(key) {
                state.hits += 1;
                return part(&block, wanted, index);
            }
            if state.on_their_way.insert(key) {
                break;
            }
            self.arrived.wait(&mut state);
        }
        state.misses += 1;
        drop(state);
        let fetched = self.fetch(remote, wanted, index);
        let mut state = self.state.lock();
        state.on_their_way.remove(&key);
        self.arrived.notify_all();
        let blocks = fetched?;
        let first = blocks.first().cloned().unwrap_or_default();
        for (index, block) in (index..).zip(blocks) {
            state.keep((wanted.object, index), block, self.bytes_max);
        }
        drop(state);
        part(&first, wanted, index)
    }

    /// One request for the block and what is likely to be wanted next.
    fn fetch(&self, remote: &dyn Remote, wanted: Wanted<'_>, index: u64) -> Result<Vec<Bytes>, StoreError> {
        let from = index * BLOCK_BYTES as u64;
        let end = (wanted.pos + wanted.len as u64 + wanted.ahead as u64).next_multiple_of(BLOCK_BYTES as u64);
        let most = (self.ahead_max.max(BLOCK_BYTES) as u64).next_multiple_of(BLOCK_BYTES as u64);
        let len = (end.min(wanted.object_len) - from).min(most) as usize;
        let bytes = self.get(remote, wanted.path, from, len)?;
        let (needed, found) = (len.min((wanted.pos - from) as usize + wanted.len), bytes.len());
        if found < needed {
            let what = format!("{}: {found} of {needed} bytes from {from} on", wanted.path);
            return Err(StoreError::Corrupt(what));
        }
        if found <= BLOCK_BYTES {
            return Ok(vec![bytes]);
        }
        // Copies, so that each can go on its own.
        Ok(bytes.chunks(BLOCK_BYTES).map(Bytes::copy_from_slice).collect())
    }

    /// A request that failed is made again a few times: whoever reads has nothing else to try.
    fn get(&self, remote: &dyn Remote, path: &StorePath, pos: u64, len: usize) -> Result<Bytes, StoreError> {
        let mut pause = self.pause;
        for _ in 1..ATTEMPTS {
            match remote.get(path, pos, len) {
                Err(error) if error.is_retryable() => {
                    std::thread::sleep(pause);
                    pause *= 2;
                }
                outcome => return outcome,
            }
        }
        remote.get(path, pos, len)
    }

    pub fn count(&self, stats: &mut Stats) {
        let state = self.state.lock();
        stats.cache_hits = state.hits;
        stats.cache_misses = state.misses;
        stats.cache_bytes = state.bytes as u64;
    }
}

fn part(block: &Bytes, wanted: Wanted<'_>, index: u64) -> Result<Bytes, StoreError> {
    let start = (wanted.pos - index * BLOCK_BYTES as u64) as usize;
    if start >= block.len() {
        return Err(StoreError::Corrupt(format!("{} ends before {}", wanted.path, wanted.pos)));
    }
    Ok(block.slice(start..block.len().min(start + wanted.len)))
}

impl State {
    fn find(&mut self, key: Key) -> Option<Bytes> {
        self.tick += 1;
        let (block, used) = self.blocks.get_mut(&key)?;
        self.used.remove(used);
        *used = self.tick;
        self.used.insert(self.tick, key);
        Some(block.clone())
    }

    fn keep(&mut self, key: Key, block: Bytes, bytes_max: usize) {
        self.tick += 1;
        self.bytes += block.len();
        if let Some((older, used)) = self.blocks.insert(key, (block, self.tick)) {
            self.bytes -= older.len();
            self.used.remove(&used);
        }
        self.used.insert(self.tick, key);
        while self.bytes > bytes_max
            && let Some((_, key)) = self.used.pop_first()
        {
            self.bytes -= self.blocks.remove(&key).map_or(0, |(block, _)| block.len());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Life;
    use crate::remote::Memory;

    fn object(number: u64) -> (ObjectId, StorePath) {
        let object = ObjectId { life: Life { broker: 1, epoch: 1 }, number };
        (object, StorePath::parse(&format!("data/o.1-1.{number}")).unwrap())
    }

    fn small(cache_bytes: usize) -> Cache {
        Cache::new(&Options { cache_bytes, read_ahead_bytes_max: 1 << 20, ..Options::default() })
    }

    /// Reads all of an object in steps, and returns the bytes and the number of requests.
    fn read_all(cache: &Cache, remote: &Memory, number: u64, len: usize, step: usize) -> (Vec<u8>, u64) {
        let (object, path) = object(number);
        let mut stats = Stats::default();
        cache.count(&mut stats);
        let before = stats.cache_misses;
        let mut found = Vec::new();
        while found.len() < len {
            let pos = found.len() as u64;
            let step = step.min(len - found.len());
            let ahead = cache.ahead(pos);
            let wanted = Wanted { object, path: &path, pos, len: step, object_len: len as u64, ahead };
            found.extend_from_slice(&cache.read(remote, wanted).unwrap());
        }
        cache.count(&mut stats);
        (found, stats.cache_misses - before)
    }

    #[test]
    fn what_is_read_in_order_comes_in_few_requests_and_then_from_memory() {
        let remote = Memory::new();
        let content: Vec<u8> = (0..3_000_000_u32).map(|i| (i % 251) as u8).collect();
        remote.put(&object(1).1, content.clone().into()).unwrap();
        let cache = small(8 << 20);
        let (found, requests) = read_all(&cache, &remote, 1, content.len(), 10_000);
        assert!(found == content);
        assert!(requests <= 6, "{requests}");
        let (found, requests) = read_all(&cache, &remote, 1, content.len(), 7_777);
        assert!(found == content);
        assert_eq!(requests, 0);
    }

    #[test]
    fn the_budget_is_kept_and_the_least_used_block_goes_first() {
        let remote = Memory::new();
        let cache = small(2 * BLOCK_BYTES);
        for number in 1..=3 {
            remote.put(&object(number).1, vec![number as u8; BLOCK_BYTES].into()).unwrap();
        }
        let read = |number| read_all(&cache, &remote, number, BLOCK_BYTES, BLOCK_BYTES).1;
        assert_eq!((read(1), read(2), read(1), read(3), read(1), read(2)), (1, 1, 0, 1, 0, 1));
        let mut stats = Stats::default();
        cache.count(&mut stats);
        assert_eq!(stats.cache_bytes, 2 * BLOCK_BYTES as u64);
    }

    #[test]
    fn an_object_that_is_too_short_or_absent_is_an_error_and_no_wait() {
        let remote = Memory::new();
        let (id, path) = object(1);
        let wanted = Wanted { object: id, path: &path, pos: 0, len: 10, object_len: 10, ahead: 0 };
        let cache = small(1 << 20);
        assert_eq!(cache.read(&remote, wanted), Err(StoreError::NotFound));
        remote.put(&path, Bytes::from_static(b"short")).unwrap();
        assert!(matches!(cache.read(&remote, wanted), Err(StoreError::Corrupt(_))));
    }
}
