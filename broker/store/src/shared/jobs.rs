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
use super::tree::{self, Chunk, DirNo, FileNo, ObjectId, Piece};
use crate::{Life, StoreError, StorePath};

#[derive(Clone, Debug)]
pub(super) enum Job {
    Write(Write),
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
    Objects(Vec<(StorePath, u64)>),
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
            || self.orphans.front().is_some_and(|collect| self.is_time_for(collect))
            || self.garbage.front().is_some_and(|garbage| garbage.after < self.ring.durable())
            || self.is_over(self.tree.lowest().unwrap_or(u64::MAX))
    }

    pub fn next_job(&mut self) -> Option<Job> {
        self.alive().ok()?;
        if let Some(job) = self.advance() {
            return Some(Job::Write(job));
        }
        while let Some(file) = self.ready.pop_front() {
            if let Some(job) = self.job_for(file) {
                return Some(Job::Write(job));
            }
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
            self.is_merging = false;
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
        self.log(FRAME_BYTES, |payload| payload.chunk(dir, write.file, &write.chunk));
        self.consider(write.file);
    }

    /// Nobody will ever name this object.
    fn discard(&mut self, write: &Write) {
        let (file, object, path) = (write.file, write.chunk.object, write.path.clone());
        self.garbage.push_front(Garbage { after: 0, file, object, path });
    }

    pub fn is_over(&self, needs: u64) -> bool {
        self.ring.bytes_from(needs) > self.log_bytes_target()
    }

    /// The log is longer than it should be: the directories that need its oldest blocks are said again
    /// at its end, after their large tails have become objects.
    fn advance(&mut self) -> Option<Write> {
        let over = self.tree.by_needs().take_while(|(needs, _)| self.is_over(*needs)).take(ADVANCE_MAX);
        for (needs, dir) in over.collect::<Vec<_>>() {
            let files = self.tree.dirs[&dir].names.values();
            let tails: Vec<(u64, FileNo)> = files.map(|file| (self.durable_tail(*file), *file)).collect();
            if tails.iter().any(|(_, file)| self.tree.files[file].live.is_busy) {
                continue;
            }
            let total: u64 = tails.iter().map(|(len, _)| *len).sum();
            let largest = tails.iter().max().filter(|_| total > self.options.inline_bytes_max);
            match largest {
                Some((_, file)) if !self.tree.dirs[&dir].is_released => return self.write_job(*file),
                _ => self.say_again(dir, needs),
            }
        }
        None
    }

    /// Bytes of a file that are in the log and durable.
    fn durable_tail(&self, file: FileNo) -> u64 {
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
            return if is_ended { self.merge_job(file) } else { None };
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
        let mut len = 0;
        let mut parts = Vec::new();
        for piece in self.durable_pieces(file) {
            if len >= 2 * self.options.object_bytes {
                break;
            }
            parts.push(self.ring.bytes(piece));
            len += u64::from(piece.len);
        }
        let from = self.tree.files[&file].chunk_end();
        if len == 0 { None } else { self.begin_write(file, from, len, Source::Log(parts)) }
    }

    /// Small objects in a row become one.
    fn merge_job(&mut self, file: FileNo) -> Option<Write> {
        let found = &self.tree.files[&file];
        if self.is_merging || found.chunks.len() < MERGE_MIN {
            return None;
        }
        let is_small = |chunk: &Chunk| chunk.len < self.options.merge_below_bytes;
        let run =
            found.chunks.chunk_by(|a, b| is_small(a) && is_small(b)).find(|run| run.len() >= MERGE_MIN)?;
        let from = run[0].from;
        let mut sources = Vec::new();
        let mut len = 0;
        for chunk in
            run.iter().take_while(|chunk| chunk.end() - from <= MERGE_MAX * self.options.object_bytes)
        {
            let path = tree::object_path(&found.dir_path, &found.name, chunk.object).ok()?;
            sources.push((path, chunk.len));
            len += chunk.len;
        }
        if sources.len() < 2 {
            return None;
        }
        self.is_merging = true;
        self.begin_write(file, from, len, Source::Objects(sources))
    }

    fn begin_write(&mut self, file: FileNo, from: u64, len: u64, source: Source) -> Option<Write> {
        let object = ObjectId { life: self.life, number: self.number() };
        let found = &self.tree.files[&file];
        let path = tree::object_path(&found.dir_path, &found.name, object).ok()?;
        let live = self.live(file);
        live.is_busy = true;
        let write = Write { file, path, chunk: Chunk { from, len, object }, cuts: live.cuts, source };
        #[cfg(test)]
        if self.twin == super::sim::Twin::ChunkBeforeObject {
            let dir = self.tree.files[&file].dir;
            self.log(FRAME_BYTES, |payload| payload.chunk(dir, file, &write.chunk));
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
            } else {
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
            Job::Delete(batch) => batch.iter().try_for_each(|garbage| self.remote.delete(&garbage.path)),
            Job::Collect(collect) => self.collect(collect),
        }
    }

    pub(super) fn end_work(&self, job: Job, outcome: Result<(), StoreError>) {
        let mut core = self.core.lock();
        match job {
            Job::Write(write) => core.end_write(&write, outcome.is_ok()),
            Job::Delete(batch) if outcome.is_ok() => core.stats.objects_deleted += batch.len() as u64,
            Job::Delete(batch) => core.garbage.extend(batch),
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
        let mut bytes = BytesMut::new();
        match source {
            Source::Log(parts) if parts.len() == 1 => return Ok(parts[0].clone()),
            Source::Log(parts) => {
                bytes.reserve(parts.iter().map(Bytes::len).sum());
                parts.iter().for_each(|part| bytes.extend_from_slice(part));
            }
            Source::Objects(objects) => {
                for (path, len) in objects {
                    let part = self.remote.get(path, 0, *len as usize)?;
                    if part.len() as u64 != *len {
                        return Err(StoreError::Corrupt(format!("{path} is shorter than {len} bytes")));
                    }
                    bytes.extend_from_slice(&part);
                }
            }
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
            chunks.push(Chunk { from, len: part.len() as u64, object });
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
                core.garbage.push_front(Garbage { after: 0, file, object: chunk.object, path });
            }
        }
    }
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
/// Fewer small objects in a row are left as they are.
const MERGE_MIN: usize = 4;
/// What small objects become is at most so many times as large as others.
const MERGE_MAX: u64 = 4;
const FRAME_BYTES: usize = 64;
