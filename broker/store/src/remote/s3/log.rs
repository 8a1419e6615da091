//! The logs of lives on S3: one object for each block, one write at a time, and a fence that ends them.
//!
//! ```text
//! <prefix>/wal/<broker>-<epoch>/<block number, 20 digits>     a block (`block.rs`), or a fence:
//!
//! fence   "SLF1" | crc u32 | broker i32 | epoch u64 | number u64 | kind u8       kind 1: ended, 2: forgotten
//! ```
//! Big-endian; the CRC-32C covers everything behind it. A fence is shorter than any block, so a listing
//! tells them apart. Whoever ends a life creates a fence at the number after its highest block; the writer
//! creates its next block under that same name, so one of the two is refused. Where the writer is the faster one,
//! a second fence goes further ahead, as a wall; the one directly behind a block is the end. A write that was stopped for
//! minutes may land again under a number that was given up: what lies below `lowest` of the highest block
//! is ignored, and the highest block and the fence are never removed. To forget a life replaces its highest
//! block by a second fence and removes what is below.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use bytes::{BufMut, Bytes, BytesMut};
use futures_util::future::try_join_all;
use object_store::path::Path;
use parking_lot::Mutex;

use super::{Bucket, Created, LIST_BYTES, S3};
use crate::StoreError;
use crate::remote::block::HEADER_LEN;
use crate::remote::{BLOCK_BYTES_MAX, Block, Life, LifeLog, missing_block, not_ended};

const FENCE_MAGIC: &[u8; 4] = b"SLF1";
const FENCE_LEN: usize = 4 + 4 + 4 + 8 + 8 + 1;
const ENDED: u8 = 1;
const FORGOTTEN: u8 = 2;
/// Blocks that are read at once, and their bytes: small ones cost a round trip each.
const READ_AHEAD: u64 = 32;
const READ_AHEAD_BYTES: u64 = 32 << 20;
/// How far ahead of a writer a wall is put, for a start: about as many blocks as are written meanwhile.
const WALL_DISTANCE: u64 = 16;
/// Each attempt lists and finds the writer at least one block further, and it does not pass the wall.
const FENCE_ATTEMPTS_MAX: u32 = 1_000;

const _: () = assert!(FENCE_LEN < HEADER_LEN, "a fence is told from a block by its size");

pub(super) fn begin(s3: &S3, life: Life) -> Result<Arc<dyn LifeLog>, StoreError> {
    let found = s3
        .run(&format!("begin life {life}"), LIST_BYTES, |bucket| async move { bucket.numbers(life).await })?;
    if found.fence().is_some() {
        return Err(StoreError::Fenced);
    }
    if !found.sizes.is_empty() {
        return Err(StoreError::AlreadyExists);
    }
    let state = Mutex::new(State { next: 0, lowest: 0, is_fenced: false });
    Ok(Arc::new(S3Log { s3: s3.clone(), life, state, trimming: Arc::default() }))
}

pub(super) fn fence(s3: &S3, life: Life) -> Result<(), StoreError> {
    fenced(s3, &format!("fence life {life}"), life).map(drop)
}

fn fenced(s3: &S3, doing: &str, life: Life) -> Result<(Fence, Numbers), StoreError> {
    s3.run(doing, LIST_BYTES, |bucket| async move { bucket.fence(life).await })
}

pub(super) fn end(
    s3: &S3,
    life: Life,
    visit: &mut dyn FnMut(Block) -> Result<(), StoreError>,
) -> Result<(), StoreError> {
    let doing = format!("end life {life}");
    let (Fence { number, kind: ENDED }, found) = fenced(s3, &doing, life)? else { return Ok(()) };
    let Some(highest) = number.checked_sub(1) else { return Ok(()) };
    let last = s3.run(&doing, BLOCK_BYTES_MAX, |bucket| async move { bucket.block(life, highest).await })?;
    let mut next = last.lowest;
    while next < highest {
        let (until, bytes) = found.batch(next, highest);
        let blocks = s3.run(&doing, bytes, |bucket| async move {
            try_join_all((next..until).map(|number| bucket.block(life, number))).await
        })?;
        blocks.into_iter().try_for_each(&mut *visit)?;
        next = until;
    }
    visit(last)
}

pub(super) fn forget(s3: &S3, life: Life) -> Result<(), StoreError> {
    s3.run(&format!("forget life {life}"), LIST_BYTES, |bucket| async move {
        let found = bucket.numbers(life).await?;
        let fence = bucket.final_fence(life, &found).await?.ok_or_else(|| not_ended(life))?;
        let lowest_fence = match (fence.kind, fence.number.checked_sub(1)) {
            (ENDED, Some(highest)) => {
                let body = encode_fence(life, Fence { number: highest, kind: FORGOTTEN });
                bucket.replace(&bucket.log_object(life, highest)?, body).await?;
                highest
            }
            _ => fence.number,
        };
        let below = found.sizes.range(..lowest_fence).map(|(number, _)| bucket.log_object(life, *number));
        bucket.delete_all(below.collect::<Result<_, _>>()?).await
    })
}

pub(super) fn lives(s3: &S3) -> Result<Vec<Life>, StoreError> {
    s3.run("list lives", LIST_BYTES, |bucket| async move {
        let dir = bucket.path("wal")?;
        let mut lives = Vec::new();
        for (path, size) in bucket.all_below(&dir).await? {
            let name = path.as_ref().strip_prefix(dir.as_ref()).unwrap_or_default();
            let life = name.trim_start_matches('/').split('/').next().and_then(Life::parse);
            lives.extend(life.filter(|_| is_block(size)));
        }
        lives.sort_unstable();
        lives.dedup();
        Ok(lives)
    })
}

/// The numbers of a life's objects with their sizes.
#[derive(Debug)]
pub(super) struct Numbers {
    pub(super) sizes: BTreeMap<u64, u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Fence {
    number: u64,
    kind: u8,
}

impl Numbers {
    /// The lowest fence: the one that the writer met.
    fn fence(&self) -> Option<u64> {
        self.sizes.iter().find(|(_, size)| !is_block(**size)).map(|(number, _)| *number)
    }

    /// How far to read at once from a number on, and about how many bytes that is.
    fn batch(&self, next: u64, end: u64) -> (u64, usize) {
        let (mut until, mut bytes) = (next, 0);
        while until < end && until < next + READ_AHEAD && bytes < READ_AHEAD_BYTES {
            // One that was not listed is missing, or was too late for the listing.
            bytes += self.sizes.get(&until).copied().unwrap_or(BLOCK_BYTES_MAX as u64);
            until += 1;
        }
        (until, bytes as usize)
    }

    /// The number after the highest block.
    fn next(&self) -> u64 {
        self.sizes.iter().rfind(|(_, size)| is_block(**size)).map_or(0, |(number, _)| number + 1)
    }
}

/// By its size: a fence is shorter.
fn is_block(size: u64) -> bool {
    size >= HEADER_LEN as u64
}

impl Bucket {
    pub(super) fn log_object(&self, life: Life, number: u64) -> Result<Path, StoreError> {
        self.path(&format!("wal/{life}/{number:020}"))
    }

    pub(super) async fn numbers(&self, life: Life) -> Result<Numbers, StoreError> {
        let dir = self.path(&format!("wal/{life}"))?;
        let number = |path: &Path| {
            let name = path.as_ref().strip_prefix(dir.as_ref())?.strip_prefix('/')?;
            name.parse::<u64>().ok().filter(|number| name == format!("{number:020}"))
        };
        let found = self.all_below(&dir).await?;
        let sizes = found.iter().filter_map(|(path, size)| Some((number(path)?, *size))).collect();
        Ok(Numbers { sizes })
    }

    /// Sees to it that a fence stands directly behind the highest block.
    async fn fence(&self, life: Life) -> Result<(Fence, Numbers), StoreError> {
        let mut has_wall = false;
        for attempt in 0..FENCE_ATTEMPTS_MAX {
            let found = self.numbers(life).await?;
            if let Some(fence) = self.final_fence(life, &found).await? {
                return Ok((fence, found));
            }
            let next = found.next();
            if let Some(fence) = self.claim(life, next).await? {
                return Ok((fence, found));
            }
            // The writer was first, with its next block, and may be so again and again: a fence further on is
            // where it stops at the latest. What is free before that fence is no gap until this is done.
            if !has_wall {
                has_wall = self.wall(life, next + (WALL_DISTANCE << attempt.min(20))).await?;
            }
        }
        Err(StoreError::Io(self.named(&format!("end life {life}: its writer cannot be overtaken"))))
    }

    /// The fence that ends a life, if there is one. A wall that stands far ahead of the writer does not.
    async fn final_fence(&self, life: Life, found: &Numbers) -> Result<Option<Fence>, StoreError> {
        let Some(number) = found.fence() else { return Ok(None) };
        let above = found.sizes.range(number..).find(|(_, size)| is_block(**size));
        if let Some((above, _)) = above {
            let what = format!("block {above} of life {life} lies above the fence at {number}");
            return Err(StoreError::Corrupt(format!("{what}: the store does not keep create-if-absent")));
        }
        let fence = self.read_fence(life, number).await?;
        Ok(Some(fence).filter(|fence| found.next() == number || fence.kind == FORGOTTEN))
    }

    /// Puts a fence far ahead, unless a block is there already.
    pub(super) async fn wall(&self, life: Life, number: u64) -> Result<bool, StoreError> {
        Ok(self.claim(life, number).await?.is_some())
    }

    /// The fence that stands under a number, this one or another; none if a block was first.
    async fn claim(&self, life: Life, number: u64) -> Result<Option<Fence>, StoreError> {
        let fence = Fence { number, kind: ENDED };
        match self.create(&self.log_object(life, number)?, encode_fence(life, fence)).await? {
            Created::Own => Ok(Some(fence)),
            Created::Other(found) if is_block(found.len() as u64) => Ok(None),
            Created::Other(found) => decode_fence(life, number, &found).map(Some),
        }
    }

    async fn read_fence(&self, life: Life, number: u64) -> Result<Fence, StoreError> {
        let bytes = self.get(&self.log_object(life, number)?, 0, HEADER_LEN).await?;
        decode_fence(life, number, &bytes)
    }

    pub(super) async fn block(&self, life: Life, number: u64) -> Result<Block, StoreError> {
        let mut bytes = match self.get(&self.log_object(life, number)?, 0, usize::MAX).await {
            Err(StoreError::NotFound) => return Err(missing_block(life, number)),
            found => found?,
        };
        let damaged = |what: String| StoreError::Corrupt(format!("block {number} of life {life}: {what}"));
        let block = Block::decode(&mut bytes).map_err(|error| damaged(error.to_string()))?;
        if block.life != life || block.seq != number || !bytes.is_empty() {
            return Err(damaged("it holds something else".to_owned()));
        }
        Ok(block)
    }

    /// Appends a block under its number, which a fence may have taken.
    async fn append(&self, block: &Block) -> Result<(), StoreError> {
        let path = self.log_object(block.life, block.seq)?;
        match self.create(&path, block.encode()).await? {
            Created::Own => Ok(()),
            Created::Other(found) => {
                if decode_fence(block.life, block.seq, &found).is_err() {
                    let (life, number, bytes) = (block.life, block.seq, found.len());
                    tracing::error!(%life, number, bytes, "another writer has this life");
                }
                Err(StoreError::Fenced)
            }
        }
    }
}

fn encode_fence(life: Life, fence: Fence) -> Bytes {
    let mut bytes = BytesMut::with_capacity(FENCE_LEN);
    bytes.put_slice(FENCE_MAGIC);
    bytes.put_u32(0);
    bytes.put_i32(life.broker);
    bytes.put_u64(life.epoch);
    bytes.put_u64(fence.number);
    bytes.put_u8(fence.kind);
    let crc = crc32c::crc32c(&bytes[8..]);
    bytes[4..8].copy_from_slice(&crc.to_be_bytes());
    bytes.freeze()
}

fn decode_fence(life: Life, number: u64, bytes: &[u8]) -> Result<Fence, StoreError> {
    let kinds = [ENDED, FORGOTTEN].map(|kind| Fence { number, kind });
    let found = kinds.into_iter().find(|fence| encode_fence(life, *fence) == bytes);
    found.ok_or_else(|| StoreError::Corrupt(format!("object {number} of life {life} is no fence of ours")))
}

struct S3Log {
    s3: S3,
    life: Life,
    /// Held while a block is written: there is one at a time.
    state: Mutex<State>,
    trimming: Arc<Trimming>,
}

struct State {
    /// The number of the next new block.
    next: u64,
    lowest: u64,
    is_fenced: bool,
}

/// Removal of blocks that were given up, in the background, one request at a time.
#[derive(Default)]
struct Trimming {
    is_busy: AtomicBool,
    /// Everything below is gone.
    done: AtomicU64,
}

impl LifeLog for S3Log {
    fn append(&self, block: &Block) -> Result<(), StoreError> {
        let mut state = self.state.lock();
        assert_eq!(block.life, self.life, "a block of this life");
        assert!(block.seq == state.next || block.seq + 1 == state.next, "numbers without a gap");
        assert!(block.lowest >= state.lowest, "what was given up is not needed again");
        if state.is_fenced {
            return Err(StoreError::Fenced);
        }
        let doing = format!("append block {} of life {}", block.seq, self.life);
        let copy = block.clone();
        let work = |bucket: Arc<Bucket>| async move { bucket.append(&copy).await };
        let outcome = self.s3.run(&doing, block.payload.len(), work);
        match &outcome {
            Ok(()) => {
                state.next = block.seq + 1;
                state.lowest = block.lowest;
                self.trim(block.lowest);
            }
            Err(error) => state.is_fenced = *error == StoreError::Fenced,
        }
        outcome
    }
}

impl S3Log {
    fn trim(&self, lowest: u64) {
        let trimming = self.trimming.clone();
        if trimming.done.load(Ordering::Acquire) >= lowest || trimming.is_busy.swap(true, Ordering::AcqRel) {
            return;
        }
        let (bucket, life) = (self.s3.bucket.clone(), self.life);
        self.s3.worker.handle().spawn(async move {
            let numbers = trimming.done.load(Ordering::Acquire)..lowest;
            let paths = numbers.map(|number| bucket.log_object(life, number)).collect::<Result<_, _>>();
            let work = async { bucket.delete_all(paths?).await };
            match tokio::time::timeout(bucket.deadline(LIST_BYTES), work).await {
                Ok(Ok(())) => trimming.done.store(lowest, Ordering::Release),
                // The next block tries again.
                Ok(Err(error)) => tracing::debug!(%life, %error, "blocks that were given up stay a while"),
                Err(_) => tracing::debug!(%life, "blocks that were given up stay a while"),
            }
            trimming.is_busy.store(false, Ordering::Release);
        });
    }
}
