//! Moving data out of the log: into objects of its own, or, what is too little for that, to its end.
//!
//! Deciding is pure ([`Core::next_job`]); a few threads do what was decided and report back. An object
//! is complete before any frame names it, and is deleted only when a durable frame says that nothing
//! needs it, so it does not matter where a broker dies, nor whether it knows that it is dead.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};

use super::Inner;
use super::core::{Core, Garbage};
use super::frame::{FileState, Tail};
use super::log::PAUSE_AFTER_FAILURE;
use super::packs::PackWrite;
use super::tree::{self, Chunk, DirNo, FileNo, ObjectId, Piece};
use crate::{Life, StoreError, StorePath};

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
    source: Source,
}

#[derive(Clone, Debug)]
enum Source {
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

impl Core {
    /// True if a call of [`Core::next_job`] is likely to find one.
    pub fn has_work(&self) -> bool {
        !self.ready.is_empty()
            || (!self.merges.is_empty() && self.merging < MERGES_AT_ONCE)
            || self.is_time_to_unpin()
            || self.orphans.front().is_some_and(|collect| self.is_time_for(collect))
            || self.garbage.front().is_some_and(|garbage| garbage.after < self.ring.durable())
            || self.is_over(self.tree.lowest().unwrap_or(u64::MAX))
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

    fn job_for(&mut self, file: FileNo) -> Option<Write> {
        let found = self.tree.files.get_mut(&file)?;
        found.live.is_queued = false;
        if found.live.is_busy || self.tree.dirs[&found.dir].is_released {
            return None;
        }
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
    fn is_orphan(&self, collect: &Collect, object: ObjectId) -> bool {
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

impl Inner {
    pub(super) fn begin_work(&self) -> Option<Job> {
        self.core.lock().next_job()
    }

    /// One attempt.
    pub(super) fn do_work(&self, job: &Job) -> Result<(), StoreError> {
        match job {
            Job::Write(write) => self.remote.put(&write.path, self.gather(&write.source)?),
            Job::Pack(pack) => self.remote.put(&pack.path, joined(&pack.bytes)),
            Job::Unpin(pins) => pins.iter().try_for_each(|(_, pin)| self.remote.delete(pin)),
            Job::Delete(batch) => batch.iter().try_for_each(|garbage| self.remote.delete(&garbage.path)),
            Job::Collect(collect) => self.collect(collect),
        }
    }

    pub(super) fn end_work(&self, job: Job, outcome: Result<(), StoreError>) {
        let mut core = self.core.lock();
        match job {
            Job::Write(write) => core.end_write(&write, outcome.is_ok()),
            Job::Pack(pack) => core.end_pack(&pack, outcome.is_ok()),
            Job::Unpin(pins) if outcome.is_err() => {
                core.pins.extend(pins);
                core.may_unpin(0);
            }
            Job::Unpin(_) => {}
            Job::Delete(batch) if outcome.is_ok() => core.stats.objects_deleted += batch.len() as u64,
            // What was the last chunk of its pack is not counted again.
            Job::Delete(batch) => {
                core.garbage.extend(batch.into_iter().map(|garbage| Garbage { is_chunk: false, ..garbage }))
            }
            Job::Collect(collect) if outcome.is_err() => core.orphans.push_back(collect),
            Job::Collect(_) => {}
        }
        let (has_work, is_due) = (core.has_work(), core.is_flush_due());
        drop(core);
        self.done.notify_all();
        if has_work {
            self.work.notify_one();
        }
        if is_due {
            self.flush.notify_one();
        }
    }

    fn gather(&self, source: &Source) -> Result<Bytes, StoreError> {
        let objects = match source {
            Source::Log(parts) => return Ok(joined(parts)),
            Source::Objects(objects) => objects,
        };
        let mut bytes = BytesMut::new();
        for (path, pos, len) in objects {
            let part = self.remote.get(path, *pos, *len as usize)?;
            if part.len() as u64 != *len {
                return Err(StoreError::Corrupt(format!("{path} has no {len} bytes from {pos} on")));
            }
            bytes.extend_from_slice(&part);
        }
        Ok(bytes.freeze())
    }

    fn collect(&self, collect: &Collect) -> Result<(), StoreError> {
        let objects = StorePath::parse(&format!("data/{}", collect.dir));
        let objects = objects.map_err(|error| StoreError::Io(error.to_string()))?;
        for entry in self.remote.list(&objects)?.into_iter().filter(|entry| !entry.is_dir) {
            let Some(object) = tree::object_of(&entry.name) else { continue };
            let is_orphan = self.core.lock().is_orphan(collect, object);
            if let (true, Ok(path)) = (is_orphan, objects.join(&entry.name)) {
                self.remote.delete(&path)?;
                self.core.lock().stats.objects_deleted += 1;
            }
        }
        Ok(())
    }

    fn work_until_lost(&self) {
        loop {
            let mut core = self.core.lock();
            let job = loop {
                if core.lost().is_some() {
                    return;
                }
                let job = core.next_job();
                // What was said again is to be durable, or the log becomes no shorter.
                if core.is_flush_due() {
                    self.flush.notify_one();
                }
                match job {
                    Some(job) => break job,
                    None => self.work.wait(&mut core),
                }
            };
            // One wakes the next, so that no more of them are awake than there is work.
            let has_more = core.has_work();
            drop(core);
            if has_more {
                self.work.notify_one();
            }
            let outcome = self.work_until_done(&job);
            let has_failed = outcome.is_err();
            self.end_work(job, outcome);
            if has_failed {
                std::thread::sleep(PAUSE_AFTER_FAILURE);
            }
        }
    }

    /// Tries again, the same bytes under the same name, while that may help.
    pub(super) fn work_until_done(&self, job: &Job) -> Result<(), StoreError> {
        loop {
            match self.do_work(job) {
                Err(error) if error.is_retryable() && !self.is_stepped => {
                    if self.core.lock().lost().is_some() {
                        return Err(error);
                    }
                    tracing::debug!(life = %self.life, %error, "an object is tried again");
                    std::thread::sleep(PAUSE_AFTER_FAILURE);
                }
                Err(error) => {
                    tracing::warn!(life = %self.life, %error, "an object cannot be moved; it stays where it is");
                    return Err(error);
                }
                Ok(()) => return Ok(()),
            }
        }
    }

    /// A file that is put as a whole and too large for the log: its objects, then one frame.
    pub(super) fn put_large(&self, path: &StorePath, bytes: &[u8]) -> Result<(), StoreError> {
        let (dir, name) = tree::owner_of(path);
        let mut chunks: Vec<Chunk> = Vec::new();
        for part in bytes.chunks(2 * self.options.object_bytes as usize) {
            let object = ObjectId { life: self.life, number: self.core.lock().number() };
            let name = tree::object_path(&dir, name, object)?;
            let put = self.put_object(&name, Bytes::copy_from_slice(part));
            let from = chunks.last().map_or(0, Chunk::end);
            chunks.push(Chunk { from, len: part.len() as u64, object, at: None });
            if let Err(error) = put {
                self.discard_chunks(&dir, path.name(), &chunks);
                return Err(error);
            }
        }
        let mut core = self.core.lock();
        match core.put(path, &chunks, &[]) {
            Ok(seq) => self.wait_for(&mut core, seq),
            Err(error) => {
                drop(core);
                self.discard_chunks(&dir, name, &chunks);
                Err(error)
            }
        }
    }

    /// Tries for as long as a flush would be tried.
    pub(super) fn put_object(&self, path: &StorePath, bytes: Bytes) -> Result<(), StoreError> {
        let attempts = self.options.give_up_after.as_millis() / PAUSE_AFTER_FAILURE.as_millis() + 1;
        let mut last = Err(StoreError::Fenced);
        for _ in 0..attempts {
            self.core.lock().alive()?;
            last = self.remote.put(path, bytes.clone());
            match &last {
                Err(error) if error.is_retryable() && !self.is_stepped => {
                    std::thread::sleep(PAUSE_AFTER_FAILURE);
                }
                Err(error) if error.is_retryable() => {}
                _ => break,
            }
        }
        last
    }

    fn discard_chunks(&self, dir: &StorePath, name: &str, chunks: &[Chunk]) {
        let mut core = self.core.lock();
        for chunk in chunks {
            if let Ok(path) = tree::object_path(dir, name, chunk.object) {
                let file = FileNo(0);
                let object = chunk.object;
                core.garbage.push_front(Garbage { after: 0, file, object, path, is_chunk: false });
            }
        }
    }
}

fn joined(parts: &[Bytes]) -> Bytes {
    if let [part] = parts {
        return part.clone();
    }
    let mut bytes = BytesMut::with_capacity(parts.iter().map(Bytes::len).sum());
    parts.iter().for_each(|part| bytes.extend_from_slice(part));
    bytes.freeze()
}

/// Starts the threads; they end when the life is lost or closed.
pub(super) fn start(inner: &Arc<Inner>) -> Result<(), StoreError> {
    for n in 0..inner.options.writers.max(1) {
        let inner = inner.clone();
        let thread = std::thread::Builder::new().name(format!("shared-write-{n}"));
        let started = thread.spawn(move || inner.work_until_lost());
        started.map_err(|error| StoreError::Io(format!("starting a thread: {error}")))?;
    }
    Ok(())
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
