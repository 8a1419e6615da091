//! The living state of a shared log: the tree, the blocks, who may write, and what is to be done.
//!
//! Pure: no threads, no clock, no store. Whatever changes a file is written as a frame and applied to
//! the tree as an heir would apply it. All positions are seen by readers at once; what is durable is a
//! matter of the ring. Invariant: a file has at most one writer that is not fenced.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::fmt;
use std::io::IoSlice;

use bytes::Bytes;

use super::Options;
use super::frame::{self, Payload};
use super::jobs::Collect;
use super::packs::Pack;
use super::ring::Ring;
use super::tree::{DirNo, Effects, File, FileNo, ObjectId, Piece, Tree};
use crate::remote::Block;
use crate::{Life, StoreError, StorePath};

/// Why a life can no longer write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Lost {
    /// Somebody has ended it; its partitions are another's.
    Fenced,
    /// The store took no block for as long as [`Options::give_up_after`]; its last refusal.
    GaveUp(String),
    /// This process closed it.
    Closed,
}

impl fmt::Display for Lost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Lost::Fenced => write!(f, "another broker has ended this life"),
            Lost::GaveUp(error) => write!(f, "the store took no block for too long: {error}"),
            Lost::Closed => write!(f, "closed"),
        }
    }
}

/// Counters and sizes, for metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    pub flushes: u64,
    pub flushed_bytes: u64,
    /// Attempts to write a block that failed.
    pub flush_failures: u64,
    /// Bytes that wait for their flush.
    pub pending_bytes: u64,
    /// Bytes that an heir would have to read.
    pub log_bytes: u64,
    pub log_blocks: u64,
    /// Bytes of the log in memory.
    pub memory_bytes: u64,
    pub objects_written: u64,
    pub objects_written_bytes: u64,
    /// Objects with the tails of many files, among those written.
    pub packs_written: u64,
    pub objects_deleted: u64,
    /// Objects that are to be deleted.
    pub garbage: u64,
    /// Directories whose state was said again.
    pub said_again: u64,
    pub said_again_bytes: u64,
    /// Appends that had to wait for room.
    pub waits: u64,
    pub cache_hits: u64,
    pub cache_misses: u64,
    pub cache_bytes: u64,
}

/// What is known of a file beyond the log.
#[derive(Debug, Default)]
pub(super) struct Live {
    /// The number of the writer that may append; 0 for none.
    pub writer: u64,
    pub is_sealed: bool,
    /// Writers and readers that may still ask for its bytes.
    pub handles: u32,
    /// One more than the block of its last frame.
    pub last: u64,
    pub cuts: u32,
    /// An object of it is being written.
    pub is_busy: bool,
    pub is_queued: bool,
}

/// What is known of a directory beyond the log.
#[derive(Debug, Default)]
pub(super) struct DirLive {
    /// It is being handed over: nothing may be written any more.
    pub is_releasing: bool,
    /// Others had it before, and may have left objects.
    pub is_adopted: bool,
    /// Bytes of its latest frame.
    pub said_bytes: u64,
}

/// A directory of which it is not on record yet that this broker owns it. Objects that another heir
/// may need are not deleted.
#[derive(Debug, Default)]
pub(super) struct Unconfirmed {
    /// Own objects from this number on are nobody else's.
    pub own_from: u64,
    pub garbage: Vec<Garbage>,
    /// Lives that have ended and may have left objects that nobody names.
    pub ended: Vec<Life>,
}

/// An object that no file needs once block `after` is durable and nobody reads `file` any more.
#[derive(Clone, Debug)]
pub(super) struct Garbage {
    pub after: u64,
    pub file: FileNo,
    pub object: ObjectId,
    pub path: StorePath,
    /// It is one chunk of a pack; the object goes with the last one.
    pub is_chunk: bool,
}

/// Where the bytes that a reader wants are.
#[derive(Debug)]
pub(super) enum Found {
    /// All of them.
    Tail(Vec<Bytes>),
    /// The first of them: `len` from `pos` of an object on, which has bytes of the file up to `end`.
    Object { object: ObjectId, path: StorePath, pos: u64, len: usize, end: u64, is_pack: bool },
}

pub(super) struct Core {
    pub life: Life,
    pub options: Options,
    pub tree: Tree<Live>,
    pub dirs: HashMap<DirNo, DirLive>,
    pub unconfirmed: HashMap<StorePath, Unconfirmed>,
    pub ring: Ring,
    /// Files that are gone from the tree and still read.
    pub ghosts: HashMap<FileNo, File<Live>>,
    /// Files that may be ready to become objects.
    pub ready: VecDeque<FileNo>,
    /// The same, after the next flush.
    pub unready: Vec<FileNo>,
    pub garbage: VecDeque<Garbage>,
    /// What waits for the last reader of a ghost.
    pub ghost_garbage: HashMap<FileNo, Vec<Garbage>>,
    pub merging: usize,
    /// Files with chunks that are to be put together when there is a place.
    pub merges: VecDeque<FileNo>,
    /// By their number.
    pub packs: HashMap<u64, Pack>,
    pub packing: usize,
    /// The lives that this one has pinned, and where.
    pub pins: BTreeSet<(Life, StorePath)>,
    pub unpin_after: Option<u64>,
    pub orphans: VecDeque<Collect>,
    /// Something that nobody needs is being removed.
    pub has_chore: bool,
    pub stats: Stats,
    /// Callers that wait for room.
    pub waiting: usize,
    pub fences: BTreeMap<StorePath, u64>,
    lost: Option<Lost>,
    /// Blocks below are waited for.
    wanted: u64,
    /// Of directories, files, writers and objects alike.
    last_number: u64,
    pub said_bytes: u64,
    #[cfg(test)]
    pub twin: super::sim::Twin,
}

impl Core {
    pub fn new(life: Life, options: Options) -> Core {
        Core {
            life,
            options,
            tree: Tree::default(),
            dirs: HashMap::new(),
            unconfirmed: HashMap::new(),
            ring: Ring::new(life),
            ghosts: HashMap::new(),
            ready: VecDeque::new(),
            unready: Vec::new(),
            garbage: VecDeque::new(),
            ghost_garbage: HashMap::new(),
            merging: 0,
            merges: VecDeque::new(),
            packs: HashMap::new(),
            packing: 0,
            pins: BTreeSet::new(),
            unpin_after: None,
            orphans: VecDeque::new(),
            has_chore: false,
            stats: Stats::default(),
            waiting: 0,
            fences: BTreeMap::new(),
            lost: None,
            wanted: 0,
            last_number: 0,
            said_bytes: 0,
            #[cfg(test)]
            twin: super::sim::Twin::default(),
        }
    }

    pub fn lost(&self) -> Option<&Lost> {
        self.lost.as_ref()
    }

    /// True if it was not lost before.
    pub fn lose(&mut self, lost: Lost) -> bool {
        let is_news = self.lost.is_none();
        self.lost.get_or_insert(lost);
        is_news
    }

    pub fn alive(&self) -> Result<(), StoreError> {
        if self.lost.is_some() { Err(StoreError::Fenced) } else { Ok(()) }
    }

    pub fn stats(&self) -> Stats {
        Stats {
            pending_bytes: self.ring.pending_bytes(),
            log_bytes: self.ring.log_bytes(),
            log_blocks: self.ring.log_blocks(),
            memory_bytes: self.ring.memory_bytes(),
            garbage: self.garbage.len() as u64,
            ..self.stats
        }
    }

    pub fn number(&mut self) -> u64 {
        self.last_number += 1;
        self.last_number
    }

    /// Whether appends may go on, or have to wait for flushes or for objects.
    pub fn has_room(&self) -> bool {
        self.ring.pending_bytes() < self.options.pending_bytes_max
            && self.ring.log_bytes() < self.log_bytes_max()
    }

    /// A log cannot be shorter than what all directories say of themselves.
    pub fn log_bytes_max(&self) -> u64 {
        self.options.log_bytes_max + 2 * self.said_bytes
    }

    pub fn log_bytes_target(&self) -> u64 {
        self.options.log_bytes_target + 2 * self.said_bytes
    }

    /// Asks for a block to be flushed.
    pub fn want(&mut self, seq: u64) {
        self.wanted = self.wanted.max(seq + 1);
    }

    pub fn is_flush_due(&self) -> bool {
        let target = self.log_bytes_target();
        let gain = || self.ring.log_bytes() - self.ring.bytes_from(self.lowest().unwrap_or(u64::MAX));
        self.wanted > self.ring.durable()
            || self.ring.has_closed()
            || self.waiting > 0
            || (self.ring.log_bytes() > target && gain() > target / 4)
    }

    pub fn take_block(&mut self) -> Option<Block> {
        let lowest = self.lowest();
        self.ring.take(lowest)
    }

    pub fn flushed(&mut self, bytes: usize) {
        self.ring.flushed();
        self.stats.flushes += 1;
        self.stats.flushed_bytes += bytes as u64;
        self.ready.extend(self.unready.drain(..));
    }

    pub fn lowest(&self) -> Option<u64> {
        #[cfg(test)]
        if self.twin == super::sim::Twin::LogCutTooEarly {
            return Some(self.ring.durable());
        }
        self.tree.lowest()
    }

    /// Writes a frame of about `bytes` bytes and applies it.
    pub fn log(&mut self, bytes: usize, write: impl FnOnce(&mut Payload)) -> u64 {
        let lowest = self.lowest();
        let (seq, at) = self.ring.write(bytes, self.options.block_bytes, lowest, write);
        let frame = frame::decode_at(self.ring.open_bytes(), at, seq).expect("a frame that was just written");
        let mut effects = Effects::default();
        self.tree.apply(seq, frame, &mut effects).expect("a frame that fits the tree it was made from");
        self.settle(seq, effects);
        seq
    }

    fn settle(&mut self, seq: u64, effects: Effects<Live>) {
        effects.held.into_iter().for_each(|seq| self.ring.hold(seq));
        effects.freed.into_iter().for_each(|seq| self.ring.free(seq));
        for (number, file) in effects.removed {
            if file.live.handles > 0 {
                self.ghosts.insert(number, file);
            } else {
                file.pieces.iter().for_each(|piece| self.ring.free(piece.seq));
            }
        }
        for (file, dir, name, chunk) in effects.objects {
            if self.is_foreign(&chunk) {
                self.may_unpin(seq);
                continue;
            }
            let Ok(path) = chunk.path(&dir, &name) else { continue };
            let (object, is_chunk) = (chunk.object, chunk.at.is_some());
            let garbage = Garbage { after: seq, file, object, path, is_chunk };
            match self.unconfirmed.get_mut(&dir) {
                Some(unconfirmed) => unconfirmed.garbage.push(garbage),
                None => self.garbage.push_back(garbage),
            }
        }
    }

    pub fn view(&self, file: FileNo) -> Option<&File<Live>> {
        self.tree.files.get(&file).or_else(|| self.ghosts.get(&file))
    }

    /// Appends to a file and returns its new end.
    pub fn append(&mut self, file: FileNo, writer: u64, parts: &[IoSlice<'_>]) -> Result<u64, StoreError> {
        let len: usize = parts.iter().map(|part| part.len()).sum();
        let found = self.written_by(file, writer)?;
        if found.live.is_sealed {
            return Err(StoreError::Sealed);
        }
        let (dir, mut end) = (found.dir, found.len);
        if len == 0 {
            return Ok(end);
        }
        if len <= APPEND_BYTES_MAX {
            return Ok(self.append_frame(dir, file, end, len, parts.iter().map(|part| &**part)));
        }
        for part in parts.iter().flat_map(|part| part.chunks(APPEND_BYTES_MAX)) {
            end = self.append_frame(dir, file, end, part.len(), [part].into_iter());
        }
        Ok(end)
    }

    fn append_frame<'a>(
        &mut self,
        dir: DirNo,
        file: FileNo,
        pos: u64,
        len: usize,
        parts: impl Iterator<Item = &'a [u8]>,
    ) -> u64 {
        // Looked up only where a block may be closed.
        let lowest = self.lowest();
        let mut at = 0;
        let (seq, _) = self.ring.write(len, self.options.block_bytes, lowest, |payload| {
            at = payload.append(dir, file, pos, parts);
        });
        self.ring.hold(seq);
        let piece = Piece { pos, len: len as u32, at, seq };
        let found = self.tree.append(file, piece).expect("an append at the end of its file");
        found.live.last = seq + 1;
        if found.tail_len() >= self.options.object_bytes && !found.live.is_queued {
            found.live.is_queued = true;
            self.ready.push_back(file);
        }
        pos + len as u64
    }

    /// What a sync of this writer has to wait for, and the position that is durable then.
    pub fn sync_of(&self, file: FileNo, writer: u64) -> Result<(Option<u64>, u64), StoreError> {
        let found = self.written_by(file, writer)?;
        let seq = found.live.last.checked_sub(1).filter(|seq| *seq >= self.ring.durable());
        Ok((seq, found.len))
    }

    pub fn seal(&mut self, file: FileNo, writer: u64, len: u64) -> Result<(), StoreError> {
        if self.written_by(file, writer)?.len != len {
            return Err(StoreError::Io("appended to while being sealed".to_owned()));
        }
        self.live(file).is_sealed = true;
        self.consider(file);
        Ok(())
    }

    pub fn add_handle(&mut self, file: FileNo) {
        match self.tree.files.get_mut(&file) {
            Some(found) => found.live.handles += 1,
            None => self.ghosts.get_mut(&file).into_iter().for_each(|ghost| ghost.live.handles += 1),
        }
    }

    pub fn drop_handle(&mut self, file: FileNo) {
        if let Some(found) = self.tree.files.get_mut(&file) {
            found.live.handles -= 1;
        } else if let Some(ghost) = self.ghosts.get_mut(&file) {
            ghost.live.handles -= 1;
            if ghost.live.handles == 0
                && let Some(ghost) = self.ghosts.remove(&file)
            {
                ghost.pieces.iter().for_each(|piece| self.ring.free(piece.seq));
                self.garbage.extend(self.ghost_garbage.remove(&file).unwrap_or_default());
                if ghost.chunks.iter().any(|chunk| self.is_foreign(chunk)) {
                    self.may_unpin(0);
                }
            }
        }
    }

    /// A writer is dropped: its file may become an object as it is.
    pub fn end_writer(&mut self, file: FileNo, writer: u64) {
        if self.written_by(file, writer).is_ok() {
            self.live(file).writer = 0;
            self.consider(file);
        }
        self.drop_handle(file);
    }

    pub fn read(&self, file: FileNo, pos: u64, len: usize) -> Result<Found, StoreError> {
        let found = self.view(file).ok_or(StoreError::NotFound)?;
        let end = found.len.min(pos.saturating_add(len as u64));
        if let Some(chunk) = found.chunk_at(pos).filter(|_| pos < end) {
            let len = (end.min(chunk.end()) - pos) as usize;
            let path = chunk.path(&found.dir_path, &found.name)?;
            let start = chunk.at.unwrap_or(0);
            let (pos, end) = (start + pos - chunk.from, start + chunk.len);
            return Ok(Found::Object {
                object: chunk.object,
                path,
                pos,
                len,
                end,
                is_pack: chunk.at.is_some(),
            });
        }
        let mut parts = Vec::new();
        for piece in found.pieces_at(pos).take_while(|piece| piece.pos < end) {
            let (from, to) = (pos.max(piece.pos), end.min(piece.end()));
            let part = Piece {
                pos: from,
                len: (to - from) as u32,
                at: piece.at + (from - piece.pos) as u32,
                seq: piece.seq,
            };
            parts.push(self.ring.bytes(&part));
        }
        Ok(Found::Tail(parts))
    }

    pub fn live(&mut self, file: FileNo) -> &mut Live {
        &mut self.tree.files.get_mut(&file).expect("a file that was just looked up").live
    }

    pub fn written_by(&self, file: FileNo, writer: u64) -> Result<&File<Live>, StoreError> {
        self.alive()?;
        self.tree.files.get(&file).filter(|found| found.live.writer == writer).ok_or(StoreError::Fenced)
    }

    pub fn is_writable(&self, dir: DirNo) -> bool {
        let is_releasing = self.dirs.get(&dir).is_some_and(|live| live.is_releasing);
        !is_releasing && !self.tree.dirs[&dir].is_released
    }

    pub fn admit(&mut self, file: FileNo) -> u64 {
        let writer = self.number();
        let live = self.live(file);
        live.writer = writer;
        live.is_sealed = false;
        live.handles += 1;
        writer
    }

    pub fn retire(&mut self, file: FileNo) {
        self.live(file).writer = 0;
        self.consider(file);
    }

    /// The file may be ready to become an object.
    pub fn consider(&mut self, file: FileNo) {
        let live = self.live(file);
        if !std::mem::replace(&mut live.is_queued, true) {
            self.ready.push_back(file);
        }
    }
}

/// An append is divided into frames of at most this, so that blocks stay within their limits.
const APPEND_BYTES_MAX: usize = 1 << 20;
