//! Moving data out of the log: into objects of its own, or, what is too little for that, to its end.
//!
//! Pure ([`Core::next_job`]); a few threads do what was decided (`work.rs`) and report back. An object
//! is complete before any frame names it, and is deleted only when a durable frame says that nothing
//! needs it, so it does not matter where a broker dies, nor whether it knows that it is dead.

use std::sync::Arc;

use bytes::Bytes;

use super::core::{Core, Garbage};
use super::frame::{FileState, Tail};
use super::packs::PackWrite;
use super::tree::{self, Chunk, DirNo, FileNo, ObjectId, Piece};
use crate::{Life, StorePath};

#[derive(Clone, Debug)]
pub(super) enum Job {
    Write(Write),
    Pack(PackWrite),
    /// Pins that are needed no more.
    Unpin(Vec<(Life, StorePath)>),
    Delete(Vec<Garbage>),
    Collect(Collect),
}

/// An object to be written, from the log or from smaller objects.
#[derive(Clone, Debug)]
pub(super) struct Write {
    pub file: FileNo,
    pub path: StorePath,
    pub chunk: Chunk,
    /// The file's count of cuts; after another one the object is of no use.
    cuts: u32,
    pub source: Source,
}

#[derive(Clone, Debug)]
pub(super) enum Source {
    Log(Vec<Bytes>),
    /// Each with the place and the length of what is wanted of it.
    Objects(Vec<(StorePath, u64, u64)>),
}

/// Looks for objects of a directory that are nobody's.
#[derive(Clone, Debug)]
pub(super) struct Collect {
    pub dir: StorePath,
    pub of: Orphans,
}

#[derive(Clone, Debug)]
pub(super) enum Orphans {
    /// Those of lives that have ended, if the directory does not name them.
    Ended(Vec<Life>),
    /// Those of former owners of a directory that is deleted, as this block says.
    Deleted(u64),
}

impl Job {
    /// Whether it removes what nobody needs.
    pub fn is_chore(&self) -> bool {
        matches!(self, Job::Unpin(_) | Job::Delete(_) | Job::Collect(_))
    }

    /// For what is said of it.
    pub fn named(&self) -> String {
        match self {
            Job::Write(write) => format!("writing {}", write.path),
            Job::Pack(pack) => format!("writing {}", pack.path),
            Job::Unpin(_) => "removing pins".to_owned(),
            Job::Delete(batch) => match batch.first() {
                Some(garbage) => format!("removing {}", garbage.path),
                None => "removing nothing".to_owned(),
            },
            Job::Collect(collect) => format!("looking for what is nobody's in {}", collect.dir),
        }
    }

    /// Whether the log becomes no shorter without it.
    pub fn is_needed(&self) -> bool {
        matches!(self, Job::Pack(_) | Job::Write(Write { source: Source::Log(_), .. }))
    }
}

impl Core {
    /// True if a call of [`Core::next_job`] is likely to find one.
    pub fn has_work(&self) -> bool {
        !self.ready.is_empty()
            || (!self.merges.is_empty() && self.merging < MERGES_AT_ONCE)
            || (!self.has_chore && self.has_chores())
            || self.is_over(self.tree.lowest().unwrap_or(u64::MAX))
    }

    fn has_chores(&self) -> bool {
        self.is_time_to_unpin()
            || self.orphans.front().is_some_and(|collect| self.is_time_for(collect))
            || self.garbage.front().is_some_and(|garbage| garbage.after < self.ring.durable())
    }

    pub fn next_job(&mut self) -> Option<Job> {
        self.alive().ok()?;
        if let Some(job) = self.advance() {
            return Some(job);
        }
        while let Some(file) = self.ready.pop_front() {
            if let Some(job) = self.job_for(file) {
                return Some(Job::Write(job));
            }
        }
        if let Some(job) = self.next_merge() {
            return Some(Job::Write(job));
        }
        if self.has_chore {
            return None;
        }
        let chore = self.next_chore();
        self.has_chore = chore.is_some();
        chore
    }

    /// Removing what nobody needs. One at a time: a store that refuses it keeps nobody from writing.
    fn next_chore(&mut self) -> Option<Job> {
        if let Some(pins) = self.unpin_job() {
            return Some(Job::Unpin(pins));
        }
        self.delete_job().or_else(|| {
            let is_time = self.orphans.front().is_some_and(|collect| self.is_time_for(collect));
            if is_time { self.orphans.pop_front().map(Job::Collect) } else { None }
        })
    }

    fn is_time_for(&self, collect: &Collect) -> bool {
        match collect.of {
            Orphans::Ended(_) => true,
            Orphans::Deleted(after) => after < self.ring.durable(),
        }
    }

    /// Takes up what a job has come to. Objects are left alone once the life is lost: whether their
    /// frames are durable is for the heirs to see.
    pub fn end_write(&mut self, write: &Write, is_written: bool) {
        if let Source::Objects(_) = write.source {
            self.merging -= 1;
        }
        if is_written {
            self.stats.objects_written += 1;
            self.stats.objects_written_bytes += write.chunk.len;
        }
        if let Some(ghost) = self.ghosts.get_mut(&write.file) {
            ghost.live.is_busy = false;
        }
        if self.lost().is_some() {
            return;
        }
        let Some(file) = self.tree.files.get_mut(&write.file) else { return self.discard(write) };
        file.live.is_busy = false;
        if !is_written || file.live.cuts != write.cuts {
            return self.discard(write);
        }
        let dir = file.dir;
        #[cfg(test)]
        if self.twin == super::sim::Twin::ChunkBeforeObject {
            return;
        }
        self.log(tree::CHUNK_FRAME_BYTES, |payload| payload.chunk(dir, write.file, &write.chunk));
        self.consider(write.file);
    }

    /// What was to be put together from objects is so later.
    pub fn consider_again(&mut self, write: &Write) {
        if matches!(write.source, Source::Objects(_)) && self.tree.files.contains_key(&write.file) {
            self.consider(write.file);
        }
    }

    /// Nobody will ever name this object.
    fn discard(&mut self, write: &Write) {
        let (file, object, path) = (write.file, write.chunk.object, write.path.clone());
        self.garbage.push_front(Garbage { after: 0, file, object, path, is_chunk: false });
    }

    pub fn is_over(&self, needs: u64) -> bool {
        self.ring.bytes_from(needs) > self.log_bytes_target()
            || self.ring.next().saturating_sub(needs) > self.options.log_blocks_target
    }

    /// The log is longer than it should be: the directories that need its oldest blocks are said again
    /// at its end, after their large tails have become objects, and smaller ones packs.
    fn advance(&mut self) -> Option<Job> {
        let is_busy = |file: &FileNo| self.tree.files[file].live.is_busy;
        let over = self.tree.by_needs().take_while(|(needs, _)| self.is_over(*needs));
        let idle = over.filter(|(_, dir)| !self.tree.dirs[dir].names.values().any(is_busy));
        let mut small = None;
        for (needs, dir) in idle.take(ADVANCE_MAX).collect::<Vec<_>>() {
            let files = self.tree.dirs[&dir].names.values();
            let tails: Vec<(u64, FileNo)> = files.map(|file| (self.durable_tail(*file), *file)).collect();
            let total: u64 = tails.iter().map(|(len, _)| *len).sum();
            let largest = tails.iter().max().filter(|_| !self.tree.dirs[&dir].is_released);
            match largest {
                Some((len, file)) if *len >= self.options.merge_below_bytes => {
                    return self.write_job(*file).map(Job::Write);
                }
                Some((len, file)) if *len >= self.options.pack_bytes_min => {
                    let is_inline = total <= self.options.inline_bytes_max;
                    small.get_or_insert((needs, dir, *file, is_inline));
                }
                Some((_, file)) if total > self.options.inline_bytes_max => {
                    return self.write_job(*file).map(Job::Write);
                }
                _ => self.say_again(dir, needs),
            }
        }
        let (needs, dir, file, is_inline) = small?;
        if let Some(pack) = self.next_pack() {
            return Some(Job::Pack(pack));
        }
        // One that is on its way may be enough.
        if self.packing > 0 {
            return None;
        }
        if is_inline {
            self.say_again(dir, needs);
            return None;
        }
        self.write_job(file).map(Job::Write)
    }

    /// Bytes of a file that are in the log and durable.
    pub fn durable_tail(&self, file: FileNo) -> u64 {
        let pieces = self.durable_pieces(file);
        pieces.map(|piece| u64::from(piece.len)).sum()
    }

    fn durable_pieces(&self, file: FileNo) -> impl Iterator<Item = &Piece> {
        let durable = self.ring.durable();
        self.tree.files[&file].pieces.iter().take_while(move |piece| piece.seq < durable)
    }

    fn say_again(&mut self, dir: DirNo, needs: u64) {
        let durable = self.ring.durable();
        let directory = &self.tree.dirs[&dir];
        let pieces = directory.names.values().flat_map(|file| &self.tree.files[file].pieces);
        let still = pieces.map(|piece| piece.seq).filter(|seq| *seq >= durable).min();
        if still.unwrap_or(u64::MAX).min(self.ring.next()) <= needs {
            return;
        }
        let files = self.state_of(dir, true);
        let (path, is_released) = (directory.path.clone(), directory.is_released);
        let before = self.ring.written();
        self.say_dir(dir, &path, is_released, &files);
        self.stats.said_again += 1;
        self.stats.said_again_bytes += self.ring.written() - before;
    }

    /// A directory as its frame will say it: what is durable is said, the rest stays where it is unless
    /// that may not be, too.
    pub fn state_of(&self, dir: DirNo, may_refer: bool) -> Vec<FileState> {
        let durable = if may_refer { self.ring.durable() } else { u64::MAX };
        let state = |(name, file): (&Arc<str>, &FileNo)| {
            let found = &self.tree.files[file];
            let here: Vec<Bytes> = found
                .pieces
                .iter()
                .take_while(|piece| piece.seq < durable)
                .map(|piece| self.ring.bytes(piece))
                .collect();
            let there = found.pieces.iter().skip(here.len()).map(|piece| Tail::There(*piece));
            let said = if here.is_empty() { None } else { Some(Tail::Here(here.clone())) };
            FileState {
                file: *file,
                name: name.to_string(),
                chunks: found.chunks.clone(),
                tail: said.into_iter().chain(there).collect(),
            }
        };
        self.tree.dirs[&dir].names.iter().map(state).collect()
    }

    /// The same without its bytes, for a frame that the blocks with them stay for.
    pub fn state_in_place(&self, dir: DirNo) -> Vec<FileState> {
        let state = |(name, file): (&Arc<str>, &FileNo)| {
            let found = &self.tree.files[file];
            let tail = found.pieces.iter().map(|piece| Tail::There(*piece)).collect();
            FileState { file: *file, name: name.to_string(), chunks: found.chunks.clone(), tail }
        };
        self.tree.dirs[&dir].names.iter().map(state).collect()
    }

    fn job_for(&mut self, file: FileNo) -> Option<Write> {
        let found = self.tree.files.get_mut(&file)?;
        found.live.is_queued = false;
        let (dir, is_busy) = (found.dir, found.live.is_busy);
        // While it is released, who releases it says what becomes an object.
        if is_busy || !self.is_writable(dir) {
            return None;
        }
        let found = &self.tree.files[&file];
        let is_ended = found.live.writer == 0 || found.live.is_sealed;
        let tail = found.tail_len();
        let is_large = tail >= self.options.object_bytes;
        let is_enough = is_large || (is_ended && tail >= self.options.ended_bytes_min);
        if !is_enough {
            return self.merge_job(file, is_ended);
        }
        let durable = self.durable_tail(file);
        if durable >= self.options.object_bytes || (is_ended && durable == tail) {
            return self.write_job(file);
        }
        self.live(file).is_queued = true;
        self.unready.push(file);
        None
    }

    /// The durable front of a file's tail becomes an object.
    pub fn write_job(&mut self, file: FileNo) -> Option<Write> {
        let (len, parts) = self.front_of_tail(file);
        let from = self.tree.files[&file].chunk_end();
        if len == 0 { None } else { self.begin_write(file, from, len, Source::Log(parts)) }
    }

    /// The durable front of a file's tail, as much as goes into one object.
    pub fn front_of_tail(&self, file: FileNo) -> (u64, Vec<Bytes>) {
        let mut len = 0;
        let mut parts = Vec::new();
        for piece in self.durable_pieces(file) {
            if len >= 2 * self.options.object_bytes {
                break;
            }
            parts.push(self.ring.bytes(piece));
            len += u64::from(piece.len);
        }
        (len, parts)
    }

    fn next_merge(&mut self) -> Option<Write> {
        while self.merging < MERGES_AT_ONCE
            && let Some(file) = self.merges.pop_front()
        {
            if let Some(job) = self.job_for(file) {
                return Some(job);
            }
        }
        None
    }

    /// Small chunks in a row become one object: of a file without a writer, where there are very many, or
    /// where they are in packs of another life.
    fn merge_job(&mut self, file: FileNo, is_ended: bool) -> Option<Write> {
        let found = &self.tree.files[&file];
        let may_unpin = !self.pins.is_empty() && !self.unconfirmed.contains_key(&found.dir_path);
        let run_min = if is_ended { MERGE_MIN } else { MERGE_OPEN_MIN };
        if found.chunks.len() < run_min && !may_unpin {
            return None;
        }
        let is_small = |chunk: &Chunk| chunk.at.is_some() || chunk.len < self.options.merge_below_bytes;
        let is_worth = |run: &[Chunk]| {
            run.len() >= run_min || (may_unpin && run.iter().any(|chunk| self.is_foreign(chunk)))
        };
        let run = found.chunks.chunk_by(|a, b| is_small(a) && is_small(b)).find(|run| is_worth(run))?;
        if self.merging >= MERGES_AT_ONCE {
            self.live(file).is_queued = true;
            self.merges.push_back(file);
            return None;
        }
        let from = run[0].from;
        let mut sources = Vec::new();
        let mut len = 0;
        for chunk in
            run.iter().take_while(|chunk| chunk.end() - from <= MERGE_MAX * self.options.object_bytes)
        {
            let path = chunk.path(&found.dir_path, &found.name).ok()?;
            sources.push((path, chunk.at.unwrap_or(0), chunk.len));
            len += chunk.len;
        }
        if sources.is_empty() {
            return None;
        }
        let write = self.begin_write(file, from, len, Source::Objects(sources))?;
        self.merging += 1;
        Some(write)
    }

    fn begin_write(&mut self, file: FileNo, from: u64, len: u64, source: Source) -> Option<Write> {
        let object = ObjectId { life: self.life, number: self.number() };
        let found = &self.tree.files[&file];
        let path = tree::object_path(&found.dir_path, &found.name, object).ok()?;
        let live = self.live(file);
        live.is_busy = true;
        let chunk = Chunk { from, len, object, at: None };
        let write = Write { file, path, chunk, cuts: live.cuts, source };
        #[cfg(test)]
        if self.twin == super::sim::Twin::ChunkBeforeObject {
            let dir = self.tree.files[&file].dir;
            self.log(tree::CHUNK_FRAME_BYTES, |payload| payload.chunk(dir, file, &write.chunk));
        }
        Some(write)
    }

    fn delete_job(&mut self) -> Option<Job> {
        let mut batch = Vec::new();
        while batch.len() < DELETE_MAX
            && let Some(garbage) = self.garbage.pop_front_if(|garbage| garbage.after < self.ring.durable())
        {
            if self.ghosts.contains_key(&garbage.file) {
                self.ghost_garbage.entry(garbage.file).or_default().push(garbage);
            } else if !garbage.is_chunk || self.drop_chunk(garbage.object) {
                batch.push(garbage);
            }
        }
        if batch.is_empty() { None } else { Some(Job::Delete(batch)) }
    }

    /// Whether an object is nobody's. What a directory that is this broker's does not name, no later owner
    /// will name; of one that is elsewhere nothing is known.
    pub fn is_orphan(&self, collect: &Collect, object: ObjectId) -> bool {
        let here = self.tree.dir_at(&collect.dir);
        let lives = match &collect.of {
            // There are no later owners.
            Orphans::Deleted(_) => return here.is_none() && object.life != self.life,
            Orphans::Ended(lives) => lives,
        };
        let Some((_, directory)) = here.filter(|_| !self.unconfirmed.contains_key(&collect.dir)) else {
            return false;
        };
        if !lives.contains(&object.life) {
            return false;
        }
        let files = directory.names.values().map(|file| &self.tree.files[file]);
        let is_named = files.flat_map(|file| &file.chunks).any(|chunk| chunk.object == object);
        // Or it was, and the frame that says otherwise is not durable, or somebody still reads it.
        let waiting = self.garbage.iter().chain(self.ghost_garbage.values().flatten());
        !is_named && !waiting.into_iter().any(|garbage| garbage.object == object)
    }
}

/// Directories that are looked at in one go.
const ADVANCE_MAX: usize = 64;
const DELETE_MAX: usize = 32;
/// Fewer small chunks in a row are left as they are.
const MERGE_MIN: usize = 4;
/// The same for a file that is being written; each of them makes its directory's frame longer.
const MERGE_OPEN_MIN: usize = 128;
const MERGES_AT_ONCE: usize = 2;
/// What small objects become is at most so many times as large as others.
const MERGE_MAX: u64 = 4;
