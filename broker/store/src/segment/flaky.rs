//! A store that fails on purpose, by seed, around any other store.
//!
//! Owns the faults: errors, delays, a full disk, a failing sync, and a crash that loses what was not
//! synced and tears what was being written. Invariant: what a successful `sync` covered, and what `put`
//! returned for, survives every fault, as the contract of the trait says.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::IoSlice;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;

use super::{Entry, Reader, SegmentStore, Writer};
use crate::dice::Dice;
use crate::{StoreError, StorePath};

/// How often things go wrong by themselves. The default is never.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Faults {
    /// Calls in a thousand that fail without having done anything.
    pub error_per_mille: u32,
    /// Calls of `put` and `delete` in a thousand that fail after they were done.
    pub late_error_per_mille: u32,
    /// Syncs in a thousand that fail, each ending its writer.
    pub sync_error_per_mille: u32,
    /// Calls in a thousand that are late, by up to `delay_max`.
    pub delay_per_mille: u32,
    pub delay_max: Duration,
    /// After a crash a file may end in a part of what was not synced, or in zeros or garbage instead of
    /// it. Otherwise it ends where it was last synced.
    pub is_torn_at_crash: bool,
}

/// A faulty view of `S`. Clones share it. Drop all writers made before [`Flaky::crash`] or not: they
/// are dead after it.
#[derive(Clone, Debug)]
pub struct Flaky<S> {
    inner: S,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    dice: Dice,
    faults: Mutex<Faults>,
    is_full: AtomicBool,
    syncs_to_fail: AtomicU32,
    /// Changes that the store still makes before it dies.
    changes_left: AtomicU64,
    crashes: AtomicU64,
    /// Files with bytes that a crash would lose.
    at_risk: Mutex<BTreeMap<StorePath, Extent>>,
}

#[derive(Clone, Copy, Debug)]
struct Extent {
    durable: u64,
    end: u64,
}

impl<S: SegmentStore> Flaky<S> {
    pub fn new(inner: S, seed: u64, faults: Faults) -> Flaky<S> {
        let shared = Shared {
            dice: Dice::new(seed),
            faults: Mutex::new(faults),
            is_full: AtomicBool::new(false),
            syncs_to_fail: AtomicU32::new(0),
            changes_left: AtomicU64::new(u64::MAX),
            crashes: AtomicU64::new(0),
            at_risk: Mutex::default(),
        };
        Flaky { inner, shared: Arc::new(shared) }
    }

    pub fn set_faults(&self, faults: Faults) {
        *self.shared.faults.lock() = faults;
    }

    /// While full, whatever needs space is [`StoreError::Full`].
    pub fn set_full(&self, is_full: bool) {
        self.shared.is_full.store(is_full, Ordering::SeqCst);
    }

    /// The next sync of any writer fails, and its writer with it.
    pub fn fail_next_sync(&self) {
        self.shared.syncs_to_fail.fetch_add(1, Ordering::SeqCst);
    }

    /// The process that uses the store dies after so many more changes, perhaps in the middle of the
    /// last one: then every change fails. Reads go on, so that a test can look around.
    pub fn die_after(&self, changes: u64) {
        self.shared.changes_left.store(changes, Ordering::SeqCst);
    }

    pub fn is_dead(&self) -> bool {
        self.shared.changes_left.load(Ordering::SeqCst) == 0
    }

    /// Nothing goes wrong any more: no faults, space again, no sync that is still to fail, not dead.
    pub fn heal(&self) {
        self.die_after(u64::MAX);
        self.set_faults(Faults::default());
        self.set_full(false);
        self.shared.syncs_to_fail.store(0, Ordering::SeqCst);
    }

    /// The machine loses power and comes back: every writer is dead, every file is back to what was
    /// synced (and perhaps something torn after it).
    pub fn crash(&self) -> Result<(), StoreError> {
        let mut at_risk = self.shared.at_risk.lock();
        self.shared.crashes.fetch_add(1, Ordering::SeqCst);
        let is_torn = self.shared.faults.lock().is_torn_at_crash;
        for (path, extent) in std::mem::take(&mut *at_risk) {
            match self.lose(&path, extent, is_torn) {
                Ok(()) | Err(StoreError::NotFound) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn lose(&self, path: &StorePath, extent: Extent, is_torn: bool) -> Result<(), StoreError> {
        let dice = &self.shared.dice;
        let unsynced = extent.end - extent.durable;
        let kept = if is_torn { dice.up_to(unsynced) } else { 0 };
        let writer = self.inner.resume(path, extent.durable + kept)?;
        let torn = if is_torn { dice.up_to(unsynced - kept) as usize } else { 0 };
        match dice.up_to(2) {
            0 => {}
            1 => drop(writer.append(&[IoSlice::new(&vec![0; torn])])?),
            _ => {
                let garbage: Vec<u8> = (0..torn).map(|_| dice.next() as u8).collect();
                writer.append(&[IoSlice::new(&garbage)])?;
            }
        }
        writer.sync().map(|_| ())
    }

    fn writer(&self, path: &StorePath, inner: Arc<dyn Writer>, extent: Extent) -> Arc<dyn Writer> {
        self.shared.at_risk.lock().insert(path.clone(), extent);
        Arc::new(FlakyWriter {
            inner,
            path: path.clone(),
            life: self.shared.crashes.load(Ordering::SeqCst),
            shared: self.shared.clone(),
            broken: Mutex::new(None),
        })
    }
}

impl<S: SegmentStore> SegmentStore for Flaky<S> {
    fn create(&self, path: &StorePath) -> Result<Arc<dyn Writer>, StoreError> {
        self.shared.disturb("create", path)?;
        self.shared.check_space()?;
        self.shared.live_on("create", path)?;
        Ok(self.writer(path, self.inner.create(path)?, Extent { durable: 0, end: 0 }))
    }

    fn resume(&self, path: &StorePath, len: u64) -> Result<Arc<dyn Writer>, StoreError> {
        self.shared.disturb("resume", path)?;
        self.shared.live_on("resume", path)?;
        let inner = self.inner.resume(path, len)?;
        let durable = self.shared.at_risk.lock().get(path).map_or(len, |extent| extent.durable.min(len));
        Ok(self.writer(path, inner, Extent { durable, end: len }))
    }

    fn open(&self, path: &StorePath) -> Result<Arc<dyn Reader>, StoreError> {
        self.shared.disturb("open", path)?;
        let reader =
            FlakyReader { inner: self.inner.open(path)?, path: path.clone(), shared: self.shared.clone() };
        Ok(Arc::new(reader))
    }

    fn put(&self, path: &StorePath, bytes: &[u8]) -> Result<(), StoreError> {
        self.shared.disturb("put", path)?;
        self.shared.check_space()?;
        self.shared.change("put", path, || {
            self.inner.put(path, bytes)?;
            self.shared.at_risk.lock().remove(path);
            Ok(())
        })
    }

    fn list(&self, dir: &StorePath) -> Result<Vec<Entry>, StoreError> {
        self.shared.disturb("list", dir)?;
        self.inner.list(dir)
    }

    fn delete(&self, path: &StorePath) -> Result<(), StoreError> {
        self.shared.disturb("delete", path)?;
        self.shared.change("delete", path, || {
            self.inner.delete(path)?;
            self.shared.at_risk.lock().retain(|file, _| !file.is_within(path));
            Ok(())
        })
    }

    fn fence(&self, dir: &StorePath, epoch: u64) -> Result<(), StoreError> {
        self.shared.disturb("fence", dir)?;
        self.inner.fence(dir, epoch)
    }
}

impl Shared {
    fn disturb(&self, doing: &str, path: &StorePath) -> Result<(), StoreError> {
        let faults = *self.faults.lock();
        if self.dice.hits(faults.delay_per_mille) {
            let longest = u64::try_from(faults.delay_max.as_micros()).unwrap_or(u64::MAX);
            std::thread::sleep(Duration::from_micros(self.dice.up_to(longest)));
        }
        self.fail_sometimes(faults.error_per_mille, doing, path)
    }

    fn disturb_late(&self, doing: &str, path: &StorePath) -> Result<(), StoreError> {
        let per_mille = self.faults.lock().late_error_per_mille;
        self.fail_sometimes(per_mille, doing, path)
    }

    fn fail_sometimes(&self, per_mille: u32, doing: &str, path: &StorePath) -> Result<(), StoreError> {
        if self.dice.hits(per_mille) {
            Err(StoreError::Io(format!("{doing} {path}: injected")))
        } else {
            Ok(())
        }
    }

    /// Counts a change; the one after the last fails.
    fn live_on(&self, doing: &str, path: &StorePath) -> Result<(), StoreError> {
        let take = |left: u64| if left == u64::MAX { Some(left) } else { left.checked_sub(1) };
        match self.changes_left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, take) {
            Ok(_) => Ok(()),
            Err(_) => Err(StoreError::Io(format!("{doing} {path}: dead"))),
        }
    }

    /// A change that is atomic: whoever dies in it has made it or not.
    fn change(
        &self,
        doing: &str,
        path: &StorePath,
        change: impl Fn() -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        let was_dead = self.changes_left.load(Ordering::SeqCst) == 0;
        self.live_on(doing, path)?;
        let dies_now = !was_dead && self.changes_left.load(Ordering::SeqCst) == 0;
        if !dies_now || self.dice.hits(500) {
            change()?;
        }
        match dies_now {
            true => Err(StoreError::Io(format!("{doing} {path}: dies"))),
            false => self.disturb_late(doing, path),
        }
    }

    fn check_space(&self) -> Result<(), StoreError> {
        if self.is_full.load(Ordering::SeqCst) { Err(StoreError::Full) } else { Ok(()) }
    }

    fn is_sync_to_fail(&self) -> bool {
        let take = |count: u32| count.checked_sub(1);
        self.syncs_to_fail.fetch_update(Ordering::SeqCst, Ordering::SeqCst, take).is_ok()
            || self.dice.hits(self.faults.lock().sync_error_per_mille)
    }
}

struct FlakyWriter {
    inner: Arc<dyn Writer>,
    path: StorePath,
    /// The count of crashes when this writer was made: after one more it is dead.
    life: u64,
    shared: Arc<Shared>,
    broken: Mutex<Option<StoreError>>,
}

impl FlakyWriter {
    fn check(&self) -> Result<(), StoreError> {
        if self.life != self.shared.crashes.load(Ordering::SeqCst) {
            return Err(StoreError::Fenced);
        }
        self.broken.lock().clone().map_or(Ok(()), Err)
    }
}

impl Writer for FlakyWriter {
    fn append(&self, parts: &[IoSlice<'_>]) -> Result<u64, StoreError> {
        self.check()?;
        self.shared.disturb("append to", &self.path)?;
        self.shared.check_space()?;
        // Under the lock, so that a crash sees either none of it or all of it.
        let mut at_risk = self.shared.at_risk.lock();
        self.check()?;
        self.shared.live_on("append to", &self.path)?;
        let end = self.inner.append(parts)?;
        if let Some(extent) = at_risk.get_mut(&self.path) {
            extent.end = end;
        }
        Ok(end)
    }

    fn sync(&self) -> Result<u64, StoreError> {
        self.check()?;
        // A delay and no plain error: the first failure of a sync is final.
        let _ = self.shared.disturb("sync", &self.path);
        if self.shared.is_sync_to_fail() || self.shared.live_on("sync", &self.path).is_err() {
            let durable = self.shared.at_risk.lock().get(&self.path).map_or(0, |extent| extent.durable);
            let mut broken = self.broken.lock();
            return Err(broken.get_or_insert(StoreError::SyncFailed { durable }).clone());
        }
        let durable = self.inner.sync()?;
        let mut at_risk = self.shared.at_risk.lock();
        self.check()?;
        if let Some(extent) = at_risk.get_mut(&self.path) {
            extent.durable = extent.durable.max(durable);
        }
        Ok(durable)
    }

    fn seal(&self) -> Result<(), StoreError> {
        self.sync()?;
        self.inner.seal()
    }

    fn reader(&self) -> Arc<dyn Reader> {
        let inner = self.inner.reader();
        Arc::new(FlakyReader { inner, path: self.path.clone(), shared: self.shared.clone() })
    }
}

struct FlakyReader {
    inner: Arc<dyn Reader>,
    path: StorePath,
    shared: Arc<Shared>,
}

impl Reader for FlakyReader {
    fn read_at(&self, pos: u64, len: usize) -> Result<Bytes, StoreError> {
        self.shared.disturb("read", &self.path)?;
        self.inner.read_at(pos, len)
    }

    fn len(&self) -> u64 {
        self.inner.len()
    }

    fn file(&self) -> Option<Arc<File>> {
        self.inner.file()
    }
}
