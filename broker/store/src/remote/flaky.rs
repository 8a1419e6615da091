//! A remote store that fails on purpose, by seed, around any other.
//!
//! Owns the faults: errors before and after the deed, answers that get lost so that a request is sent
//! twice, delays, hangs that end. Waiting goes through a hook, so that virtual time can take its place.
//! Invariant: what a call reported done is done.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;

use super::{Block, Life, LifeLog, Remote};
use crate::dice::Dice;
use crate::{Entry, StoreError, StorePath};

/// How often things go wrong by themselves. The default is never.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RemoteFaults {
    /// Calls in a thousand that fail without having done anything.
    pub error_per_mille: u32,
    /// Calls in a thousand that fail after they were done.
    pub late_error_per_mille: u32,
    /// Calls of `put` and `append` in a thousand whose first answer is lost: the request is sent again
    /// and finds its own deed.
    pub repeat_per_mille: u32,
    /// Calls in a thousand that are late, by up to `delay_max`: before the deed or after it.
    pub delay_per_mille: u32,
    pub delay_max: Duration,
    /// Calls in a thousand that come to nothing for `hang`, and then fail, done or not.
    pub hang_per_mille: u32,
    pub hang: Duration,
}

/// A faulty view of `R`. Clones share it.
#[derive(Clone, Debug)]
pub struct Flaky<R> {
    inner: R,
    shared: Arc<Shared>,
}

struct Shared {
    dice: Dice,
    faults: Mutex<RemoteFaults>,
    is_down: AtomicBool,
    wait: Mutex<Arc<dyn Fn(Duration) + Send + Sync>>,
}

impl<R: Remote> Flaky<R> {
    pub fn new(inner: R, seed: u64, faults: RemoteFaults) -> Flaky<R> {
        let shared = Shared {
            dice: Dice::new(seed),
            faults: Mutex::new(faults),
            is_down: AtomicBool::new(false),
            wait: Mutex::new(Arc::new(std::thread::sleep)),
        };
        Flaky { inner, shared: Arc::new(shared) }
    }

    pub fn set_faults(&self, faults: RemoteFaults) {
        *self.shared.faults.lock() = faults;
    }

    /// While down, every call fails at once.
    pub fn set_down(&self, is_down: bool) {
        self.shared.is_down.store(is_down, Ordering::SeqCst);
    }

    /// What waits in place of the thread's sleep, for delays and hangs.
    pub fn set_wait(&self, wait: impl Fn(Duration) + Send + Sync + 'static) {
        *self.shared.wait.lock() = Arc::new(wait);
    }
}

impl Shared {
    /// `deed` with whatever befalls it; `may_repeat` where it must bear being done twice.
    fn disturb<T>(
        &self,
        doing: &str,
        may_repeat: bool,
        deed: &mut dyn FnMut() -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let faults = *self.faults.lock();
        let failed = || Err(StoreError::Io(format!("{doing}: injected")));
        if self.is_down.load(Ordering::SeqCst) || self.dice.hits(faults.error_per_mille) {
            return failed();
        }
        if self.dice.hits(faults.hang_per_mille) {
            return self.hang(faults.hang, deed).and_then(|()| failed());
        }
        let is_late = self.dice.hits(faults.delay_per_mille);
        let is_before = is_late && self.dice.hits(500);
        if is_before {
            self.delay(faults.delay_max);
        }
        let mut done = deed();
        if may_repeat && self.dice.hits(faults.repeat_per_mille) {
            done = deed();
        }
        if is_late && !is_before {
            self.delay(faults.delay_max);
        }
        if done.is_ok() && self.dice.hits(faults.late_error_per_mille) {
            return failed();
        }
        done
    }

    /// Waits, then or before does the deed or does not. Being fenced is not forgotten over it.
    fn hang<T>(
        &self,
        hang: Duration,
        deed: &mut dyn FnMut() -> Result<T, StoreError>,
    ) -> Result<(), StoreError> {
        let when = self.dice.up_to(2);
        if when == 0 {
            deed()?;
        }
        self.wait(hang);
        if when == 1 {
            deed()?;
        }
        Ok(())
    }

    fn delay(&self, longest: Duration) {
        let longest = u64::try_from(longest.as_micros()).unwrap_or(u64::MAX);
        self.wait(Duration::from_micros(self.dice.up_to(longest)));
    }

    fn wait(&self, time: Duration) {
        let wait = self.wait.lock().clone();
        wait(time);
    }
}

impl<R: Remote> Remote for Flaky<R> {
    fn put(&self, name: &StorePath, bytes: Bytes) -> Result<(), StoreError> {
        self.shared.disturb(&format!("put {name}"), true, &mut || self.inner.put(name, bytes.clone()))
    }

    fn get(&self, name: &StorePath, pos: u64, len: usize) -> Result<Bytes, StoreError> {
        self.shared.disturb(&format!("get {name}"), false, &mut || self.inner.get(name, pos, len))
    }

    fn list(&self, dir: &StorePath) -> Result<Vec<Entry>, StoreError> {
        self.shared.disturb(&format!("list {dir}"), false, &mut || self.inner.list(dir))
    }

    fn delete(&self, name: &StorePath) -> Result<(), StoreError> {
        self.shared.disturb(&format!("delete {name}"), true, &mut || self.inner.delete(name))
    }

    fn begin(&self, life: Life) -> Result<Arc<dyn LifeLog>, StoreError> {
        let inner =
            self.shared.disturb(&format!("begin life {life}"), true, &mut || self.inner.begin(life))?;
        Ok(Arc::new(FlakyLog { inner, shared: self.shared.clone(), life }))
    }

    fn fence(&self, life: Life) -> Result<(), StoreError> {
        self.shared.disturb(&format!("fence life {life}"), true, &mut || self.inner.fence(life))
    }

    fn end(
        &self,
        life: Life,
        visit: &mut dyn FnMut(Block) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        self.shared.disturb(&format!("end life {life}"), false, &mut || self.inner.end(life, visit))
    }

    fn forget(&self, life: Life) -> Result<(), StoreError> {
        self.shared.disturb(&format!("forget life {life}"), true, &mut || self.inner.forget(life))
    }

    fn lives(&self) -> Result<Vec<Life>, StoreError> {
        self.shared.disturb("list lives", false, &mut || self.inner.lives())
    }
}

struct FlakyLog {
    inner: Arc<dyn LifeLog>,
    shared: Arc<Shared>,
    life: Life,
}

impl LifeLog for FlakyLog {
    fn append(&self, block: &Block) -> Result<(), StoreError> {
        let doing = format!("append block {} of life {}", block.seq, self.life);
        self.shared.disturb(&doing, true, &mut || self.inner.append(block))
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared")
            .field("dice", &self.dice)
            .field("faults", &self.faults)
            .finish_non_exhaustive()
    }
}
