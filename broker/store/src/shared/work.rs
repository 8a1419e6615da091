//! Doing what was decided in `jobs.rs`: a few threads that write, read and delete objects.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use bytes::{Bytes, BytesMut};

use super::Inner;
use super::core::Garbage;
use super::jobs::{Collect, Job, Source};
use super::log::PAUSE_AFTER_FAILURE;
use super::tree::{self, Chunk, FileNo, ObjectId};
use crate::{StoreError, StorePath};

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
        if job.is_chore() {
            core.has_chore = false;
        }
        match job {
            Job::Write(write) => {
                core.end_write(&write, outcome.is_ok());
                if matches!(outcome, Err(error) if error.is_retryable()) {
                    core.consider_again(&write);
                }
            }
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
            let until = if job.is_needed() { None } else { Some(Instant::now()) };
            let outcome = self.work_until(&job, until);
            if outcome.is_err() {
                // Before it is ended, so that it does not come again at once.
                std::thread::sleep(PAUSE_AFTER_FAILURE);
            }
            self.end_work(job, outcome);
        }
    }

    /// Tries again, the same bytes under the same name, while that may help: until then, or as long as this life
    /// lasts. Of many failures in a row the first is told aloud.
    pub(super) fn work_until(&self, job: &Job, until: Option<Instant>) -> Result<(), StoreError> {
        let is_told = if job.is_chore() { &self.is_chore_failure_told } else { &self.is_write_failure_told };
        loop {
            let error = match self.do_work(job) {
                Ok(()) => {
                    is_told.store(false, Ordering::Relaxed);
                    return Ok(());
                }
                Err(error) => error,
            };
            let (life, what) = (self.life, job.named());
            if !error.is_retryable() {
                tracing::warn!(%life, %error, "{what} in vain; what it is about stays where it is");
                return Err(error);
            }
            match is_told.swap(true, Ordering::Relaxed) {
                false => tracing::warn!(%life, %error, "{what} in vain; it is tried again"),
                true => tracing::debug!(%life, %error, "{what} in vain; it is tried again"),
            }
            let is_late = until.is_some_and(|until| Instant::now() >= until);
            if self.is_stepped || is_late || self.core.lock().lost().is_some() {
                return Err(error);
            }
            std::thread::sleep(PAUSE_AFTER_FAILURE);
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
        let until = Instant::now() + self.options.give_up_after;
        // Without threads there is no time: attempts are counted.
        let mut attempts_left = self.options.give_up_after.as_millis() / PAUSE_AFTER_FAILURE.as_millis();
        loop {
            self.core.lock().alive()?;
            let error = match self.remote.put(path, bytes.clone()) {
                Err(error) if error.is_retryable() => error,
                outcome => return outcome,
            };
            let is_over = if self.is_stepped { attempts_left == 0 } else { Instant::now() >= until };
            if is_over {
                return Err(error);
            }
            attempts_left = attempts_left.saturating_sub(1);
            if !self.is_stepped {
                std::thread::sleep(PAUSE_AFTER_FAILURE);
            }
        }
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
