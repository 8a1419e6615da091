//! Making the log durable: one thread, one block on its way, every partition served by the same flush.
//!
//! A block that the store refuses is tried again, the same bytes, until it is durable, somebody else has
//! ended the life, or the life is given up. In the last two cases nothing that was not durable was ever
//! acknowledged, and nothing will be: everything is fenced.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::MutexGuard;

use super::Inner;
use super::core::{Core, Lost};
use crate::StoreError;
use crate::remote::Block;

/// Starts the thread; it ends when the life is lost or closed.
pub(super) fn start(inner: &Arc<Inner>) -> Result<(), StoreError> {
    let inner = inner.clone();
    let thread = std::thread::Builder::new().name("shared-log".into());
    let started = thread.spawn(move || inner.flush_until_lost());
    started.map(|_| ()).map_err(|error| StoreError::Io(format!("starting a thread: {error}")))
}

impl Inner {
    fn flush_until_lost(&self) {
        loop {
            let mut core = self.core.lock();
            let block = loop {
                if core.lost().is_some() {
                    return;
                }
                let due = if core.is_flush_due() { core.take_block() } else { None };
                match due {
                    Some(block) => break block,
                    None => self.flush.wait(&mut core),
                }
            };
            drop(core);
            let outcome = self.append_until_decided(&block);
            self.end_flush(&block, outcome);
        }
    }

    fn append_until_decided(&self, block: &Block) -> Result<(), Lost> {
        let began = Instant::now();
        let mut pause = self.options.retry_after_max / 20;
        loop {
            let error = match self.log.append(block) {
                Ok(()) => return Ok(()),
                Err(StoreError::Fenced) => return Err(Lost::Fenced),
                Err(error) => error,
            };
            let mut core = self.core.lock();
            core.stats.flush_failures += 1;
            if let Some(lost) = core.lost() {
                return Err(lost.clone());
            }
            drop(core);
            let left = self.options.give_up_after.saturating_sub(began.elapsed());
            if left.is_zero() {
                return Err(Lost::GaveUp(error.to_string()));
            }
            let (life, block, left_s) = (self.life, block.seq, left.as_secs_f32());
            tracing::warn!(%life, block, %error, left_s, "the store takes no block of the log; trying again");
            std::thread::sleep(pause.min(left));
            pause = (pause * 2).min(self.options.retry_after_max);
        }
    }

    /// Tells the outcome of a flush to whoever waits for it.
    pub(super) fn end_flush(&self, block: &Block, outcome: Result<(), Lost>) {
        match outcome {
            Ok(()) => {
                let mut core = self.core.lock();
                core.flushed(block.payload.len());
                let has_work = core.has_work();
                drop(core);
                self.durable.notify_all();
                if has_work {
                    self.work.notify_one();
                }
            }
            Err(lost) => self.lose(lost),
        }
    }

    /// One flush by hand, if there is something to flush.
    pub(super) fn flush_once(&self) -> Result<(), StoreError> {
        let Some(block) = self.core.lock().take_block() else { return Ok(()) };
        let outcome = self.log.append(&block);
        match outcome {
            Ok(()) => self.end_flush(&block, Ok(())),
            Err(StoreError::Fenced) => self.end_flush(&block, Err(Lost::Fenced)),
            Err(_) => self.core.lock().ring.not_flushed(),
        }
        outcome
    }

    /// Waits until a block is durable.
    pub(super) fn wait_for(&self, core: &mut MutexGuard<'_, Core>, seq: u64) -> Result<(), StoreError> {
        core.want(seq);
        self.flush.notify_one();
        let mut attempts = 0;
        while core.ring.durable() <= seq {
            core.alive()?;
            if self.is_stepped {
                attempts += 1;
                let outcome = MutexGuard::unlocked(core, || self.flush_once());
                if attempts > STEPPED_ATTEMPTS_MAX {
                    core.lose(Lost::GaveUp(format!("{outcome:?}")));
                }
            } else {
                self.durable.wait(core);
            }
        }
        Ok(())
    }

    pub(super) fn flush_all(&self) -> Result<(), StoreError> {
        let mut core = self.core.lock();
        match core.ring.last_written() {
            Some(seq) => self.wait_for(&mut core, seq),
            None => Ok(()),
        }
    }

    /// Waits until an append has room. The flusher and the writers need no lock of the caller's.
    pub(super) fn wait_for_room(&self, core: &mut MutexGuard<'_, Core>) -> Result<(), StoreError> {
        if core.has_room() {
            return Ok(());
        }
        let until = Instant::now() + self.options.wait_max;
        core.stats.waits += 1;
        core.waiting += 1;
        if core.waiting == 1 {
            let stats = core.stats();
            let (pending, log) = (stats.pending_bytes, stats.log_bytes);
            tracing::info!(life = %self.life, pending, log, "appends wait for the store");
        }
        let waited = self.wait_until_room(core, until);
        core.waiting -= 1;
        waited
    }

    fn wait_until_room(&self, core: &mut MutexGuard<'_, Core>, until: Instant) -> Result<(), StoreError> {
        let mut attempts = 0;
        while !core.has_room() {
            core.alive()?;
            self.flush.notify_one();
            self.work.notify_one();
            let is_late = match self.is_stepped {
                true => {
                    attempts += 1;
                    MutexGuard::unlocked(core, || self.step());
                    attempts > STEPPED_ATTEMPTS_MAX
                }
                false => self.durable.wait_until(core, until).timed_out(),
            };
            if is_late && !core.has_room() {
                let (pending, log) = (core.ring.pending_bytes(), core.ring.log_bytes());
                let (pending_max, log_max) = (self.options.pending_bytes_max, core.log_bytes_max());
                return Err(StoreError::Io(format!(
                    "the store is behind: {pending} of {pending_max} bytes wait for a flush, the log has {log} of {log_max}"
                )));
            }
        }
        Ok(())
    }

    pub(super) fn step(&self) {
        // What fails is tried again by whoever needs it.
        let _ = self.flush_once();
        if let Some(job) = self.begin_work() {
            let outcome = self.do_work(&job);
            self.end_work(job, outcome);
        }
    }

    /// From now on nothing is written by this life.
    pub(super) fn lose(&self, lost: Lost) {
        let is_news = self.core.lock().lose(lost.clone());
        self.flush.notify_all();
        self.durable.notify_all();
        self.work.notify_all();
        self.done.notify_all();
        if !is_news {
            return;
        }
        match &lost {
            Lost::Closed => {}
            Lost::Fenced => {
                tracing::warn!(life = %self.life, "another broker ended this life: it writes no more")
            }
            Lost::GaveUp(error) => {
                tracing::error!(life = %self.life, %error, "the store took no block for too long: this life is given up")
            }
        }
        self.tell_lost(&lost);
    }

    pub(super) fn tell_lost(&self, lost: &Lost) {
        let tell = std::mem::take(&mut *self.on_lost.lock());
        tell.into_iter().for_each(|tell| tell(lost));
    }
}

/// Without threads there is no time either: attempts are counted instead.
const STEPPED_ATTEMPTS_MAX: u32 = 60;

/// How long a writer of objects rests after a failure.
pub(super) const PAUSE_AFTER_FAILURE: Duration = Duration::from_millis(200);
