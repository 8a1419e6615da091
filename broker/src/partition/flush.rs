//! Making appends durable: group commit, segment rolls, and what to do when a sync fails.
//!
//! A few threads of the process take partitions from one queue and sync them; one sync serves every
//! append that came before it. A partition is in the queue at most once, so the queue is as long as
//! there are partitions. What nobody waits for is flushed at an interval.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use broker_store::{StoreError, SyncPoint, Writer};
use bytes::Bytes;
use kafka::{Offset, TimestampMs};
use parking_lot::{Condvar, Mutex};
use tokio::sync::Notify;

use super::{Condition, Durability, FullDisk, Partition, Position, Queued, Roll, State};
use crate::log::recovery::{content_of, delete_batches, delete_segment};
use crate::log::segment::SealedFacts;
use crate::log::{ActiveSegment, SealedSegment, SegmentFiles};

/// Segments that may wait for their sync; one more roll waits for the oldest itself.
const ROLLS_MAX: usize = 4;

/// Partitions that wait for the same flush of a store that has one for all.
const FLUSHED_TOGETHER_MAX: usize = 4096;

/// Producers silent for longer are left out of a snapshot (Kafka's `producer.id.expiration.ms`).
pub const PRODUCER_EXPIRATION_MS: i64 = 24 * 3600 * 1000;

/// The threads that sync, and their queue.
pub struct Flusher {
    queue: Mutex<Queue>,
    ready: Condvar,
    unsynced_bytes: AtomicU64,
    unsynced_bytes_max: u64,
    shrunk: Notify,
    disk: FullDisk,
}

#[derive(Default)]
struct Queue {
    now: VecDeque<Weak<Partition>>,
    lazy: Vec<Weak<Partition>>,
    stopped: bool,
}

impl Flusher {
    /// Starts `threads` syncing threads and one that looks after the interval. They end with `stop`.
    pub fn start(
        threads: usize,
        interval: Duration,
        unsynced_bytes_max: u64,
    ) -> std::io::Result<Arc<Flusher>> {
        let flusher = Flusher::without_threads(unsynced_bytes_max);
        for n in 0..threads.max(1) {
            let flusher = flusher.clone();
            std::thread::Builder::new().name(format!("flush-{n}")).spawn(move || flusher.work())?;
        }
        let ticking = flusher.clone();
        std::thread::Builder::new().name("flush-tick".into()).spawn(move || ticking.tick(interval))?;
        Ok(flusher)
    }

    /// What is queued is flushed by whoever calls [`Self::step`].
    pub(crate) fn without_threads(unsynced_bytes_max: u64) -> Arc<Flusher> {
        Arc::new(Flusher {
            queue: Mutex::default(),
            ready: Condvar::new(),
            unsynced_bytes: AtomicU64::new(0),
            unsynced_bytes_max,
            shrunk: Notify::new(),
            disk: FullDisk::default(),
        })
    }

    /// Flushes whatever is queued.
    #[cfg(test)]
    pub(crate) fn step(&self) {
        loop {
            let next = {
                let mut queue = self.queue.lock();
                let lazy = std::mem::take(&mut queue.lazy);
                queue.now.extend(lazy);
                queue.now.pop_front()
            };
            match next {
                Some(next) => self.flush_one(&next),
                None => return,
            }
        }
    }

    /// Ends the threads; what is queued is not flushed any more.
    pub fn stop(&self) {
        self.queue.lock().stopped = true;
        self.ready.notify_all();
    }

    /// Whether the disk that all partitions share is full.
    pub fn disk(&self) -> &FullDisk {
        &self.disk
    }

    /// Bytes in memory that are not durable yet.
    pub fn unsynced_bytes(&self) -> u64 {
        self.unsynced_bytes.load(Ordering::Relaxed)
    }

    /// Waits while more bytes wait for a sync than may be held in memory.
    pub async fn room(&self) {
        while self.unsynced_bytes() > self.unsynced_bytes_max {
            let shrunk = self.shrunk.notified();
            if self.unsynced_bytes() <= self.unsynced_bytes_max {
                return;
            }
            shrunk.await;
        }
    }

    pub(super) fn unsynced_grew(&self, bytes: u64) {
        self.unsynced_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn unsynced_shrank(&self, bytes: u64) {
        self.unsynced_bytes.fetch_sub(bytes, Ordering::Relaxed);
        self.shrunk.notify_waiters();
    }

    pub(super) fn queue_now(&self, partition: &Partition) {
        self.queue.lock().now.push_back(partition.me.clone());
        self.ready.notify_one();
    }

    pub(super) fn queue_lazily(&self, partition: &Partition) {
        self.queue.lock().lazy.push(partition.me.clone());
    }

    fn work(&self) {
        loop {
            let mut queue = self.queue.lock();
            let next = loop {
                if queue.stopped {
                    return;
                }
                match queue.now.pop_front() {
                    Some(next) => break next,
                    None => self.ready.wait(&mut queue),
                }
            };
            drop(queue);
            self.flush_one(&next);
        }
    }

    fn flush_one(&self, next: &Weak<Partition>) {
        if let Some(partition) = next.upgrade() {
            match partition.begin_flush() {
                None => partition.flush(),
                Some(begun) => self.flush_together(partition, begun),
            }
        }
    }

    /// One flush of the store makes many partitions durable: it is asked for all that are queued before
    /// it is waited for.
    fn flush_together(&self, first: Arc<Partition>, begun: BegunFlush) {
        let mut all = vec![(first, begun)];
        let mut others = Vec::new();
        {
            let mut queue = self.queue.lock();
            let count = queue.now.len().min(FLUSHED_TOGETHER_MAX);
            others.extend(queue.now.drain(..count).filter_map(|next| next.upgrade()));
        }
        for partition in others {
            match partition.begin_flush() {
                Some(begun) => all.push((partition, begun)),
                None => partition.flush(),
            }
        }
        all.into_iter().for_each(|(partition, begun)| partition.end_flush(begun));
    }

    fn tick(&self, interval: Duration) {
        let mut queue = self.queue.lock();
        while !queue.stopped {
            if queue.lazy.is_empty() {
                drop(queue);
                std::thread::sleep(interval);
                queue = self.queue.lock();
                continue;
            }
            let lazy = std::mem::take(&mut queue.lazy);
            queue.now.extend(lazy);
            self.ready.notify_all();
            drop(queue);
            std::thread::sleep(interval);
            queue = self.queue.lock();
        }
    }
}

/// A flush of a partition that the store has been asked for.
struct BegunFlush {
    writer: Arc<dyn Writer>,
    point: SyncPoint,
    /// Up to where the partition is durable when it is done.
    target: Position,
}

impl Partition {
    /// Asks the store for a flush if one serves many partitions, and if nothing else has to be done first.
    fn begin_flush(&self) -> Option<BegunFlush> {
        let mut state = self.state.lock();
        if state.condition != Condition::Serving || !state.rolls.is_empty() {
            return None;
        }
        let (writer, target) = (state.active.writer.clone(), state.end_position());
        let point = writer.sync_begin()?;
        state.queued = Queued::No;
        let checkpoint = self.due_checkpoint(&mut state);
        drop(state);
        // Behind the appends that it covers, in the log that they share.
        checkpoint.iter().for_each(|due| self.write_checkpoint(due));
        Some(BegunFlush { writer, point, target })
    }

    fn end_flush(&self, begun: BegunFlush) {
        let _one_at_a_time = self.flushing.lock();
        let ended = begun.writer.sync_end(begun.point);
        let mut state = self.state.lock();
        if !Arc::ptr_eq(&state.active.writer, &begun.writer) {
            // It has rolled meanwhile, and the roll was queued.
            return;
        }
        match ended {
            Ok(()) => self.synced_to(&mut state, begun.target),
            Err(error) => {
                drop(state);
                self.flush_failed(error);
            }
        }
    }

    /// Makes everything durable that is appended by now. Errors end in the partition's condition.
    pub fn flush(&self) {
        let _one_at_a_time = self.flushing.lock();
        let (rolls, writer, target, checkpoint) = {
            let mut state = self.state.lock();
            state.queued = Queued::No;
            if state.condition != Condition::Serving {
                return;
            }
            let target = state.end_position();
            if state.synced.offset == target.offset && state.rolls.is_empty() {
                return;
            }
            let rolls: Vec<Roll> = state.rolls.iter().cloned().collect();
            let checkpoint = self.due_checkpoint(&mut state);
            (rolls, state.active.writer.clone(), target, checkpoint)
        };
        for roll in &rolls {
            match self.finish_roll(roll) {
                Ok(()) => {}
                Err(error) if error.is_retryable() => return self.flush_later(&error),
                Err(error) => return self.flush_failed(error),
            }
            let mut state = self.state.lock();
            state.rolls.pop_front();
            state.snapshot = state.snapshot.max(roll.next_base);
            let at = Position { offset: roll.next_base, segment: roll.next_base, bytes: 0 };
            self.synced_to(&mut state, at);
        }
        match writer.sync() {
            Ok(_) => {
                self.synced_to(&mut self.state.lock(), target);
                checkpoint.iter().for_each(|due| self.write_checkpoint(due));
            }
            Err(error) => self.flush_failed(error),
        }
    }

    /// The old segment to its end, then its indexes, then the snapshot that relies on both.
    fn finish_roll(&self, roll: &Roll) -> Result<(), StoreError> {
        roll.writer.seal()?;
        roll.segment.write_live_indexes(&*self.store)?;
        if crate::switches::state_off() {
            return Ok(());
        }
        self.store.put(&SegmentFiles::new(&self.dir, roll.next_base, 0).state(), &roll.state)?;
        if roll.has_checkpoint
            && let Err(error) = self.store.delete(&roll.segment.files.checkpoint())
        {
            // It goes with its segment.
            tracing::debug!(partition = %self, %error, "a checkpoint of a sealed segment stays");
        }
        Ok(())
    }

    /// A file beside the segment could not be written (the disk is full): nothing is lost or in doubt,
    /// and nothing above the roll becomes visible until it is there.
    fn flush_later(&self, error: &StoreError) {
        if *error == StoreError::Full {
            self.flusher.disk.note();
        }
        let mut state = self.state.lock();
        tracing::debug!(partition = %self, %error, "a segment cannot be finished yet");
        if state.condition == Condition::Serving && state.queued == Queued::No {
            state.queued = Queued::Lazy;
            self.flusher.queue_lazily(self);
        }
    }

    fn synced_to(&self, state: &mut State, at: Position) {
        if at.offset > state.synced.offset {
            state.synced = at;
        }
        self.forget_unsynced(state, at.offset);
        if self.durability == Durability::Sync && at.offset > state.visible.offset {
            state.visible = at;
        }
        self.publish(state);
    }

    /// Drops the copies of what is durable below `synced`.
    pub(super) fn forget_unsynced(&self, state: &mut State, synced: Offset) {
        let mut bytes = 0;
        while state.unsynced.front().is_some_and(|u| u.next <= synced) {
            if let Some(u) = state.unsynced.pop_front() {
                bytes += u.parts.iter().map(Bytes::len).sum::<usize>() as u64;
            }
        }
        if bytes > 0 {
            self.flusher.unsynced_shrank(bytes);
        }
    }

    /// Seals the active segment and begins the next one. The caller holds the lock.
    pub(super) fn roll(&self, state: &mut State, now: TimestampMs) -> Result<(), super::AppendError> {
        use super::AppendError;
        let base = state.fold.end;
        let files = SegmentFiles::new(&self.dir, base, 0);
        let writer = match self.store.create(&files.log()) {
            Ok(writer) => writer,
            Err(StoreError::Full) => {
                self.flusher.disk.note();
                return Err(AppendError::Full);
            }
            Err(error) => return Err(AppendError::Store(error)),
        };
        let old = std::mem::replace(&mut state.active, ActiveSegment::new(files, base, writer));
        let segment = self.sealed_from(old.base, base, old.content, old.reader, now);
        state.sealed.push(segment.clone());
        let oldest_producer = TimestampMs(now.0.saturating_sub(PRODUCER_EXPIRATION_MS));
        let encoded = Bytes::from(state.fold.encode(oldest_producer));
        let has_checkpoint = old.checkpointed.position > 0;
        let roll = Roll { writer: old.writer, segment, next_base: base, state: encoded, has_checkpoint };
        state.rolls.push_back(roll);
        if state.rolls.len() > ROLLS_MAX
            && let Some(oldest) = state.rolls.front().cloned()
        {
            self.finish_roll(&oldest).map_err(AppendError::Store)?;
        }
        if state.queued == Queued::No {
            state.queued = Queued::Now;
            self.flusher.queue_now(self);
        }
        Ok(())
    }

    fn sealed_from(
        &self,
        base: Offset,
        next: Offset,
        mut content: crate::log::SegmentContent,
        reader: Arc<dyn broker_store::Reader>,
        now: TimestampMs,
    ) -> Arc<SealedSegment> {
        content.index.finish();
        let facts = SealedFacts {
            base,
            next,
            size: content.size,
            generation: 0,
            max_timestamp: content.index.max_timestamp(),
            written: now,
        };
        Arc::new(SealedSegment::new(&self.dir, facts, &self.open_files).with_live(reader, content))
    }

    /// A failed sync is never retried and never believed. Under `Sync` everything above the durable
    /// position is written again, from memory, at the same offsets, into a new segment; if that fails
    /// too, or nothing was kept, the partition is faulted.
    fn flush_failed(&self, error: StoreError) {
        let mut state = self.state.lock();
        if state.condition != Condition::Serving {
            return;
        }
        let mended = match self.durability {
            // Nothing of what is here may be written by this owner any more.
            _ if error == StoreError::Fenced => Err(StoreError::Fenced),
            Durability::Sync => self.write_again(&mut state),
            Durability::Os => Err(error.clone()),
        };
        match mended {
            Ok(()) => {
                tracing::warn!(partition = %self, %error, from = %state.visible.offset,
                    "sync failed; wrote everything above the durable offset again into a new segment");
                state.queued = Queued::Now;
                self.flusher.queue_now(self);
            }
            Err(second) => {
                // In a cluster the log of a broker's life is ended by whoever takes its partitions over.
                if second == StoreError::Fenced {
                    tracing::warn!(partition = %self, %error,
                        "the store takes no more writes of this owner; it does not serve the partition any more");
                } else {
                    tracing::error!(partition = %self, %error, %second,
                        "sync failed and the data could not be written again; the partition is offline until restart");
                }
                state.condition = Condition::Faulted(error.to_string());
                self.forget_unsynced(&mut state, Offset(i64::MAX));
                self.publish(&state);
            }
        }
    }

    fn write_again(&self, state: &mut State) -> Result<(), StoreError> {
        let from = state.visible;
        let covered = state.unsynced.front().is_none_or(|u| u.base <= from.offset);
        if !covered {
            return Err(StoreError::Io("the copies in memory do not reach the durable offset".into()));
        }
        // Files that hold nothing durable go; the one that holds the durable end is cut there.
        let doubtful: Vec<Offset> = state
            .sealed
            .iter()
            .map(|s| s.base)
            .chain([state.active.base])
            .filter(|base| *base >= from.offset)
            .collect();
        for base in &doubtful {
            match *base == state.snapshot {
                // It is of what is durable, and may be all that is left of it.
                true => delete_batches(&*self.store, &self.dir, *base)?,
                // A snapshot here is of a roll that is not finished: the log start is written into an
                // older one from now on, and a restart would read this.
                false => delete_segment(&*self.store, &self.dir, *base)?,
            }
        }
        state.sealed.retain(|s| s.base < from.offset);
        state.rolls.clear();
        if from.bytes > 0 {
            self.cut_at(state, from)?;
        }
        let files = SegmentFiles::new(&self.dir, from.offset, 0);
        let writer = self.store.create(&files.log())?;
        state.active = ActiveSegment::new(files, from.offset, writer);
        state.active.first_append = TimestampMs::NONE;
        state.visible = Position { offset: from.offset, segment: from.offset, bytes: 0 };
        state.synced = state.visible;
        state.hints.clear();
        let interval = self.settings().index_interval_bytes;
        for unsynced in &state.unsynced {
            let parts: Vec<IoSlice<'_>> = unsynced.parts.iter().map(|p| IoSlice::new(p)).collect();
            state.active.writer.append(&parts)?;
        }
        let reader = &*state.active.reader;
        let rules = state.fold.lanes.rules();
        let content = content_of(reader, from.offset, reader.len(), &rules, interval);
        state.active.content = content.map_err(|e| StoreError::Io(e.to_string()))?;
        Ok(())
    }

    /// Makes the segment that holds the durable end a sealed one that ends there.
    fn cut_at(&self, state: &mut State, at: Position) -> Result<(), StoreError> {
        // Beyond its durable end the old file is void for recovery too, because its successor begins
        // there; cutting it is for the eyes of other tools.
        let path = SegmentFiles::new(&self.dir, at.segment, 0).log();
        if let Err(error) = self.store.resume(&path, at.bytes) {
            tracing::debug!(%path, %error, "the void end of a segment stays in its file");
        }
        let reader = self.store.open(&path)?;
        let rules = state.fold.lanes.rules();
        let interval = self.settings().index_interval_bytes;
        let content = content_of(&*reader, at.segment, at.bytes, &rules, interval)
            .map_err(|e| StoreError::Io(e.to_string()))?;
        let now = content.index.max_timestamp();
        let segment = self.sealed_from(at.segment, at.offset, content, reader, now);
        segment.write_live_indexes(&*self.store)?;
        state.sealed.retain(|s| s.base < at.segment);
        state.sealed.push(segment);
        Ok(())
    }
}
