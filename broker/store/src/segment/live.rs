//! Which writers are alive, and what each may still do.
//!
//! Shared by the stores of one process. Invariants: a path has at most one writer that is not fenced;
//! once a writer has ended, it never accepts another byte and never reports a new durable position.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::{Mutex, MutexGuard};

use crate::{StoreError, StorePath};

/// The end of one file and the state of its writer.
#[derive(Debug)]
pub(crate) struct Gate {
    state: Mutex<State>,
    end: AtomicU64,
    durable: AtomicU64,
    /// Held for a whole sync. The kernel reports a failed write-back once per open file: without
    /// this, a second sync could succeed between the failure and its being noted.
    syncing: Mutex<()>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Open,
    Sealed,
    Fenced,
    Broken,
}

/// The right to move the end of the file; appends wait for each other here.
#[derive(Debug)]
pub(crate) struct Tail<'a> {
    gate: &'a Gate,
    state: MutexGuard<'a, State>,
}

impl Gate {
    /// `durable` is what is known, not what is likely.
    pub(crate) fn new(end: u64, durable: u64) -> Arc<Gate> {
        Arc::new(Gate {
            state: Mutex::new(State::Open),
            end: AtomicU64::new(end),
            durable: AtomicU64::new(durable),
            syncing: Mutex::new(()),
        })
    }

    pub(crate) fn end(&self) -> u64 {
        self.end.load(Ordering::Acquire)
    }

    pub(crate) fn durable(&self) -> u64 {
        self.durable.load(Ordering::Acquire)
    }

    pub(crate) fn tail(&self) -> Result<Tail<'_>, StoreError> {
        let state = self.state.lock();
        match *state {
            State::Open => Ok(Tail { gate: self, state }),
            State::Sealed => Err(StoreError::Sealed),
            State::Fenced => Err(StoreError::Fenced),
            State::Broken => Err(self.broken()),
        }
    }

    /// Runs `sync` on what was appended so far, unless that is durable already. Appends go on meanwhile.
    pub(crate) fn sync<E>(&self, sync: impl FnOnce(u64) -> Result<(), E>) -> Result<u64, StoreError> {
        let _turn = self.syncing.lock();
        let end = self.end_if_alive()?;
        if self.durable() >= end {
            return Ok(end);
        }
        let outcome = sync(end);
        let mut state = self.state.lock();
        if outcome.is_err() {
            *state = State::Broken;
            return Err(self.broken());
        }
        if *state == State::Fenced {
            return Err(StoreError::Fenced);
        }
        self.durable.store(end, Ordering::Release);
        Ok(end)
    }

    /// Ends the writer; what it has appended since its last sync must be durable.
    pub(crate) fn seal(&self) -> Result<(), StoreError> {
        let mut state = self.state.lock();
        match *state {
            State::Open | State::Sealed if self.durable() == self.end() => {
                *state = State::Sealed;
                Ok(())
            }
            State::Open | State::Sealed => Err(StoreError::Io("appended to while being sealed".to_owned())),
            State::Fenced => Err(StoreError::Fenced),
            State::Broken => Err(self.broken()),
        }
    }

    fn end_if_alive(&self) -> Result<u64, StoreError> {
        match *self.state.lock() {
            State::Open | State::Sealed => Ok(self.end()),
            State::Fenced => Err(StoreError::Fenced),
            State::Broken => Err(self.broken()),
        }
    }

    fn fence(&self) {
        *self.state.lock() = State::Fenced;
    }

    fn broken(&self) -> StoreError {
        StoreError::SyncFailed { durable: self.durable() }
    }
}

impl Tail<'_> {
    pub(crate) fn end(&self) -> u64 {
        self.gate.end()
    }

    pub(crate) fn advance(&self, end: u64) {
        self.gate.end.store(end, Ordering::Release);
    }

    /// A failed append could not be undone: nothing may follow what it left behind.
    pub(crate) fn break_off(mut self) -> StoreError {
        *self.state = State::Broken;
        self.gate.broken()
    }
}

/// The living writers of a store by path, and the epochs that directories were fenced with.
#[derive(Debug, Default)]
pub(crate) struct Live {
    writers: Mutex<BTreeMap<StorePath, Weak<Gate>>>,
    fences: Mutex<BTreeMap<StorePath, u64>>,
}

impl Live {
    /// Enters a new writer and fences an older one of the same path.
    pub(crate) fn admit(&self, path: &StorePath, gate: &Arc<Gate>) {
        let older = self.writers.lock().insert(path.clone(), Arc::downgrade(gate));
        if let Some(older) = older.and_then(|weak| weak.upgrade()) {
            older.fence();
        }
    }

    /// Fences the writer of a path, if there is one. When this returns, its last append is over.
    pub(crate) fn retire(&self, path: &StorePath) {
        let writer = self.writers.lock().remove(path);
        if let Some(gate) = writer.and_then(|weak| weak.upgrade()) {
            gate.fence();
        }
    }

    /// The writer is dropped; its successor, if there is one, stays.
    pub(crate) fn release(&self, path: &StorePath, gate: &Arc<Gate>) {
        let mut writers = self.writers.lock();
        if writers.get(path).is_some_and(|weak| std::ptr::eq(weak.as_ptr(), Arc::as_ptr(gate))) {
            writers.remove(path);
        }
    }

    pub(crate) fn gate(&self, path: &StorePath) -> Option<Arc<Gate>> {
        self.writers.lock().get(path)?.upgrade()
    }

    pub(crate) fn fence(&self, dir: &StorePath, epoch: u64) -> Result<(), StoreError> {
        let mut fences = self.fences.lock();
        let highest = fences.entry(dir.clone()).or_insert(epoch);
        if *highest > epoch {
            return Err(StoreError::Fenced);
        }
        *highest = epoch;
        drop(fences);
        self.fence_within(dir);
        Ok(())
    }

    /// The path is going away: ends its writers and forgets its fences.
    pub(crate) fn forget(&self, path: &StorePath) {
        let mut writers = self.writers.lock();
        for path in within(&writers, path) {
            if let Some(gate) = writers.remove(&path).and_then(|weak| weak.upgrade()) {
                gate.fence();
            }
        }
        drop(writers);
        let mut fences = self.fences.lock();
        for path in within(&fences, path) {
            fences.remove(&path);
        }
    }

    fn fence_within(&self, path: &StorePath) {
        let writers = self.writers.lock();
        for gate in within(&writers, path).iter().filter_map(|path| writers.get(path)?.upgrade()) {
            gate.fence();
        }
    }
}

/// The keys at and below a path. Between "a" and "a/" other names may sort ("a-1"), so the path itself
/// is looked up alone.
fn within<T>(map: &BTreeMap<StorePath, T>, path: &StorePath) -> Vec<StorePath> {
    let below = if path.is_root() { String::new() } else { format!("{path}/") };
    let range = (Bound::Included(below.as_str()), Bound::Unbounded);
    let children = map.range::<str, _>(range).map(|(p, _)| p).take_while(|p| p.as_str().starts_with(&below));
    map.get_key_value(path).map(|(p, _)| p).into_iter().chain(children).cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_sync_is_never_believed_again() {
        let gate = Gate::new(0, 0);
        gate.tail().unwrap().advance(10);
        assert_eq!(gate.sync(|_| Ok::<(), ()>(())), Ok(10));
        gate.tail().unwrap().advance(20);
        let failed = StoreError::SyncFailed { durable: 10 };
        assert_eq!(gate.sync(|_| Err(())), Err(failed.clone()));
        assert_eq!(
            gate.sync(|_| -> Result<(), ()> { panic!("a second fdatasync would succeed") }),
            Err(failed.clone())
        );
        assert_eq!(gate.tail().err(), Some(failed.clone()));
        assert_eq!(gate.seal(), Err(failed));
        assert_eq!((gate.durable(), gate.end()), (10, 20));
    }

    #[test]
    fn what_is_appended_during_a_sync_is_not_covered_by_it() {
        let gate = Gate::new(0, 0);
        gate.tail().unwrap().advance(10);
        let synced = gate.sync(|end| {
            assert_eq!(end, 10);
            gate.tail().unwrap().advance(20);
            Ok::<(), ()>(())
        });
        assert_eq!(synced, Ok(10));
        assert_eq!(gate.durable(), 10);
        assert!(gate.seal().is_err(), "the last bytes are not durable");
        assert_eq!(gate.sync(|_| Ok::<(), ()>(())), Ok(20));
        assert_eq!(gate.seal(), Ok(()));
    }

    #[test]
    fn a_sync_that_was_overtaken_by_a_fence_reports_nothing_durable() {
        let gate = Gate::new(0, 0);
        gate.tail().unwrap().advance(10);
        let synced = gate.sync(|_| {
            gate.fence();
            Ok::<(), ()>(())
        });
        assert_eq!(synced, Err(StoreError::Fenced));
        assert_eq!(gate.durable(), 0);
    }

    #[test]
    fn a_synced_file_is_not_synced_again() {
        let gate = Gate::new(7, 0);
        let mut syncs = 0;
        for _ in 0..3 {
            gate.sync(|_| {
                syncs += 1;
                Ok::<(), ()>(())
            })
            .unwrap();
        }
        assert_eq!(syncs, 1, "what a resumed file holds is not known to be durable");
    }
}
