//! A metadata store that fails on purpose, by seed, around any other.
//!
//! Owns the faults: errors before and after the deed, delays, lost watches, lost leases. Invariant: a
//! write that was reported done is done, exactly once.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::watch::WatchHandle;
use super::{Answer, Item, Lease, MetaError, MetaStore, Version, Watch, WeakLease};
use crate::dice::Dice;

/// How often things go wrong by themselves. The default is never.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MetaFaults {
    /// Calls in a thousand that fail without having done anything.
    pub error_per_mille: u32,
    /// Writes in a thousand that fail after they were done.
    pub late_error_per_mille: u32,
    /// Calls in a thousand that are late, by up to `delay_max`.
    pub delay_per_mille: u32,
    pub delay_max: Duration,
    /// Writes in a thousand after which every watcher has to list again.
    pub resync_per_mille: u32,
}

/// A faulty view of `M`. Clones share it.
#[derive(Clone, Debug)]
pub struct Flaky<M> {
    inner: M,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    dice: Dice,
    faults: Mutex<MetaFaults>,
    watches: Mutex<Vec<WatchHandle>>,
    leases: Mutex<Vec<WeakLease>>,
}

impl<M: MetaStore> Flaky<M> {
    pub fn new(inner: M, seed: u64, faults: MetaFaults) -> Flaky<M> {
        let shared = Shared {
            dice: Dice::new(seed),
            faults: Mutex::new(faults),
            watches: Mutex::default(),
            leases: Mutex::default(),
        };
        Flaky { inner, shared: Arc::new(shared) }
    }

    pub fn set_faults(&self, faults: MetaFaults) {
        *self.shared.faults.lock() = faults;
    }

    /// Every watcher loses its changes and is told to list again.
    pub fn lose_watches(&self) {
        self.shared.watches.lock().retain(WatchHandle::overflow);
    }

    /// Every lease given out so far is taken away.
    pub fn lose_leases(&self) {
        let leases = std::mem::take(&mut *self.shared.leases.lock());
        leases.iter().filter_map(WeakLease::upgrade).for_each(|lease| lease.end());
    }

    async fn disturb(&self) -> Result<(), MetaError> {
        let faults = *self.shared.faults.lock();
        if self.shared.dice.hits(faults.delay_per_mille) {
            let longest = u64::try_from(faults.delay_max.as_micros()).unwrap_or(u64::MAX);
            tokio::time::sleep(Duration::from_micros(self.shared.dice.up_to(longest))).await;
        }
        self.fail_sometimes(faults.error_per_mille)
    }

    /// After a write that was done.
    fn disturb_late(&self) -> Result<(), MetaError> {
        let faults = *self.shared.faults.lock();
        if self.shared.dice.hits(faults.resync_per_mille) {
            self.lose_watches();
        }
        self.fail_sometimes(faults.late_error_per_mille)
    }

    fn fail_sometimes(&self, per_mille: u32) -> Result<(), MetaError> {
        if self.shared.dice.hits(per_mille) {
            Err(MetaError::Unavailable("injected".to_owned()))
        } else {
            Ok(())
        }
    }
}

impl<M: MetaStore> MetaStore for Flaky<M> {
    fn get<'a>(&'a self, key: &'a str) -> Answer<'a, Option<(Vec<u8>, Version)>> {
        Box::pin(async move {
            self.disturb().await?;
            self.inner.get(key).await
        })
    }

    fn put_if<'a>(&'a self, key: &'a str, value: Vec<u8>, expected: Option<Version>) -> Answer<'a, Version> {
        Box::pin(async move {
            self.disturb().await?;
            let version = self.inner.put_if(key, value, expected).await?;
            self.disturb_late().map(|()| version)
        })
    }

    fn delete_if<'a>(&'a self, key: &'a str, expected: Version) -> Answer<'a, ()> {
        Box::pin(async move {
            self.disturb().await?;
            self.inner.delete_if(key, expected).await?;
            self.disturb_late()
        })
    }

    fn list<'a>(&'a self, prefix: &'a str) -> Answer<'a, Vec<Item>> {
        Box::pin(async move {
            self.disturb().await?;
            self.inner.list(prefix).await
        })
    }

    fn watch<'a>(&'a self, prefix: &'a str) -> Answer<'a, Watch> {
        Box::pin(async move {
            self.disturb().await?;
            let watch = self.inner.watch(prefix).await?;
            self.shared.watches.lock().push(watch.handle());
            Ok(watch)
        })
    }

    fn lease(&self, ttl: Duration) -> Answer<'_, Lease> {
        Box::pin(async move {
            self.disturb().await?;
            let lease = self.inner.lease(ttl).await?;
            let mut leases = self.shared.leases.lock();
            leases.retain(|lease| lease.upgrade().is_some_and(|lease| lease.is_held()));
            leases.push(lease.downgrade());
            Ok(lease)
        })
    }

    fn put_leased<'a>(
        &'a self,
        key: &'a str,
        value: Vec<u8>,
        expected: Option<Version>,
        lease: &'a Lease,
    ) -> Answer<'a, Version> {
        Box::pin(async move {
            self.disturb().await?;
            let version = self.inner.put_leased(key, value, expected, lease).await?;
            self.disturb_late().map(|()| version)
        })
    }

    fn put_guarded<'a>(
        &'a self,
        key: &'a str,
        value: Vec<u8>,
        expected: Option<Version>,
        guard: (&'a str, Version),
    ) -> Answer<'a, Version> {
        Box::pin(async move {
            self.disturb().await?;
            let version = self.inner.put_guarded(key, value, expected, guard).await?;
            self.disturb_late().map(|()| version)
        })
    }

    fn version(&self) -> Answer<'_, Version> {
        Box::pin(async move {
            self.disturb().await?;
            self.inner.version().await
        })
    }
}
