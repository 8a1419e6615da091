//! Packs: objects that hold the tails of many files, for brokers with many busy partitions.
//!
//! A pack belongs to the life that wrote it, as its log does. While that life lasts it counts the chunks of
//! its packs that are still needed, and deletes a pack with the last of them; chunks that have gone to another
//! broker are never given up by it. Whoever takes directories over that have chunks in packs of other lives
//! *pins* these lives before it gets on record, and unpins them when no durable frame of its own names such a
//! chunk any more: in the background the chunks are put together in objects of their own. When a life is
//! forgotten its packs go, unless it is pinned (`leftovers.rs`).

use std::collections::BTreeSet;

use bytes::Bytes;

use super::core::{Core, Garbage};
use super::tree::{self, Chunk, FileNo, ObjectId, PACKS};
use crate::{Life, StoreError, StorePath};

/// A pack of this life.
#[derive(Debug)]
pub(super) struct Pack {
    /// Chunks that are still needed.
    chunks: u32,
    /// Another broker has chunks of it.
    is_held: bool,
}

/// A pack to be written.
#[derive(Clone, Debug)]
pub(super) struct PackWrite {
    object: ObjectId,
    pub path: StorePath,
    parts: Vec<Part>,
    pub bytes: Vec<Bytes>,
}

#[derive(Clone, Debug)]
struct Part {
    file: FileNo,
    chunk: Chunk,
    /// The file's count of cuts; after another one the chunk is of no use.
    cuts: u32,
}

/// Where a pin is: it says that the second life has chunks in packs of the first.
pub(super) fn pin_path(of: Life, by: Life, number: u64) -> Result<StorePath, StoreError> {
    let text = format!("{PINS}/{of}/{by}.{number}");
    StorePath::parse(&text).map_err(|error| StoreError::Io(error.to_string()))
}

/// Who made the pin of this name.
pub(super) fn pinned_by(name: &str) -> Option<Life> {
    Life::parse(name.split_once('.')?.0)
}

pub(super) const PINS: &str = "pins";
/// Packs that are on their way at once.
const PACKS_AT_ONCE: usize = 2;
/// Directories that are looked at for one pack.
const DIRS_MAX: usize = 8_192;

impl Core {
    /// The tails that have been in the log for longest, one after the other, as one object.
    pub fn next_pack(&mut self) -> Option<PackWrite> {
        if self.packing >= PACKS_AT_ONCE {
            return None;
        }
        let (mut chosen, mut total) = (Vec::new(), 0);
        for (_, dir) in self.tree.by_needs().take(DIRS_MAX) {
            if total >= self.options.object_bytes {
                break;
            }
            if !self.is_writable(dir) {
                continue;
            }
            for file in self.tree.dirs[&dir].names.values() {
                let len = if self.tree.files[file].live.is_busy { 0 } else { self.durable_tail(*file) };
                if len >= self.options.pack_bytes_min && len < self.options.merge_below_bytes {
                    chosen.push(*file);
                    total += len;
                }
            }
        }
        if total < self.options.object_bytes / 2 || chosen.len() < 2 {
            return None;
        }
        Some(self.begin_pack(&chosen)).filter(|pack| pack.parts.len() >= 2)
    }

    fn begin_pack(&mut self, files: &[FileNo]) -> PackWrite {
        let object = ObjectId { life: self.life, number: self.number() };
        let path = tree::pack_path(object).expect("lives and numbers are legal names");
        let (mut parts, mut bytes, mut at) = (Vec::new(), Vec::new(), 0);
        for file in files {
            let (len, pieces) = self.front_of_tail(*file);
            let found = &self.tree.files[file];
            let chunk = Chunk { from: found.chunk_end(), len, object, at: Some(at) };
            parts.push(Part { file: *file, chunk, cuts: found.live.cuts });
            bytes.extend(pieces);
            at += len;
            self.live(*file).is_busy = true;
        }
        self.packing += 1;
        PackWrite { object, path, parts, bytes }
    }

    pub fn end_pack(&mut self, pack: &PackWrite, is_written: bool) {
        self.packing -= 1;
        for part in &pack.parts {
            if let Some(ghost) = self.ghosts.get_mut(&part.file) {
                ghost.live.is_busy = false;
            }
            if let Some(file) = self.tree.files.get_mut(&part.file) {
                file.live.is_busy = false;
            }
        }
        if is_written {
            self.stats.objects_written += 1;
            self.stats.packs_written += 1;
            self.stats.objects_written_bytes += pack.parts.iter().map(|part| part.chunk.len).sum::<u64>();
        }
        if self.lost().is_some() {
            return;
        }
        let garbage = |is_chunk| Garbage {
            after: 0,
            file: FileNo(0),
            object: pack.object,
            path: pack.path.clone(),
            is_chunk,
        };
        if !is_written {
            // It may be there nevertheless.
            self.garbage.push_front(garbage(false));
            return;
        }
        self.packs.insert(pack.object.number, Pack { chunks: pack.parts.len() as u32, is_held: false });
        for Part { file, chunk, cuts } in &pack.parts {
            let found = self.tree.files.get(file).filter(|found| found.live.cuts == *cuts);
            let Some(dir) = found.map(|found| found.dir) else {
                self.garbage.push_front(garbage(true));
                continue;
            };
            self.log(tree::CHUNK_FRAME_BYTES, |payload| payload.chunk(dir, *file, chunk));
            self.consider(*file);
        }
    }

    /// A chunk of an own pack is needed no more. True with the last one, if nobody else has one.
    pub fn drop_chunk(&mut self, object: ObjectId) -> bool {
        let Some(pack) = self.packs.get_mut(&object.number) else { return false };
        match pack.chunks.checked_sub(1) {
            Some(left) => pack.chunks = left,
            // Counted twice: then it is not known what is needed.
            None => pack.is_held = true,
        }
        if pack.chunks > 0 || pack.is_held {
            return false;
        }
        self.packs.remove(&object.number);
        true
    }

    /// Another broker has a chunk of this pack.
    pub fn hold_pack(&mut self, object: ObjectId) {
        if let Some(pack) = self.packs.get_mut(&object.number) {
            pack.is_held = true;
        }
    }

    /// A chunk in a pack of another life.
    pub fn is_foreign(&self, chunk: &Chunk) -> bool {
        chunk.at.is_some() && chunk.object.life != self.life
    }

    /// Something of other lives' packs was given up with this block.
    pub fn may_unpin(&mut self, seq: u64) {
        self.unpin_after = Some(self.unpin_after.map_or(seq, |after| after.max(seq)));
    }

    pub fn is_time_to_unpin(&self) -> bool {
        !self.pins.is_empty() && self.unpin_after.is_some_and(|after| after < self.ring.durable())
    }

    /// The pins of lives that nothing here is of any more.
    pub fn unpin_job(&mut self) -> Option<Vec<(Life, StorePath)>> {
        if !self.is_time_to_unpin() {
            return None;
        }
        self.unpin_after = None;
        let files = self.tree.files.values().chain(self.ghosts.values());
        let foreign = files.flat_map(|file| &file.chunks).filter(|chunk| self.is_foreign(chunk));
        let named: BTreeSet<Life> = foreign.map(|chunk| chunk.object.life).collect();
        let gone: Vec<(Life, StorePath)> =
            self.pins.extract_if(.., |(life, _)| !named.contains(life)).collect();
        if gone.is_empty() { None } else { Some(gone) }
    }
}

/// Where the packs of a life are.
pub(super) fn packs_of(life: Life) -> Result<StorePath, StoreError> {
    let text = format!("{PACKS}/{life}");
    StorePath::parse(&text).map_err(|error| StoreError::Io(error.to_string()))
}

/// Where its pins are.
pub(super) fn pins_of(life: Life) -> Result<StorePath, StoreError> {
    let text = format!("{PINS}/{life}");
    StorePath::parse(&text).map_err(|error| StoreError::Io(error.to_string()))
}
