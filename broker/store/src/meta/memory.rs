//! Metadata in memory: for tests and for a broker that keeps nothing.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use super::table::Table;
use super::watch::Watchers;
use super::{Answer, Change, Item, Lease, MetaError, MetaStore, Version, Watch, check_key, check_value};

/// A metadata store in memory. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Memory {
    inner: Arc<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    table: Mutex<Table>,
    /// Keys that go with a lease, by its id.
    leased: Mutex<HashMap<i64, HashSet<String>>>,
    leases: AtomicI64,
    watchers: Watchers,
}

impl Memory {
    pub fn new() -> Memory {
        Memory::default()
    }

    fn write(&self, decide: impl FnOnce(&Table) -> Result<Change, MetaError>) -> Result<Version, MetaError> {
        self.inner.write(decide)
    }
}

impl Inner {
    fn write(&self, decide: impl FnOnce(&Table) -> Result<Change, MetaError>) -> Result<Version, MetaError> {
        let mut table = self.table.lock();
        let change = decide(&table)?;
        table.apply(&change);
        // Under the lock, so that watchers hear of changes in order.
        self.watchers.tell(&change);
        Ok(table.version())
    }

    /// Removes the keys of a lease that has ended.
    fn expire(&self, lease: i64) {
        for key in self.leased.lock().remove(&lease).unwrap_or_default() {
            let _ = self.write(|table| {
                let version = table.get(&key).map(|(_, version)| version).unwrap_or_default();
                table.delete_if(&key, version)
            });
        }
    }
}

impl MetaStore for Memory {
    fn get<'a>(&'a self, key: &'a str) -> Answer<'a, Option<(Vec<u8>, Version)>> {
        Box::pin(async move {
            check_key(key)?;
            Ok(self.inner.table.lock().get(key))
        })
    }

    fn put_if<'a>(&'a self, key: &'a str, value: Vec<u8>, expected: Option<Version>) -> Answer<'a, Version> {
        Box::pin(async move {
            check_key(key)?;
            check_value(&value)?;
            self.write(|table| table.put_if(key, value, expected))
        })
    }

    fn delete_if<'a>(&'a self, key: &'a str, expected: Version) -> Answer<'a, ()> {
        Box::pin(async move {
            check_key(key)?;
            self.write(|table| table.delete_if(key, expected)).map(|_| ())
        })
    }

    fn list<'a>(&'a self, prefix: &'a str) -> Answer<'a, Vec<Item>> {
        Box::pin(async move { Ok(self.inner.table.lock().list(prefix)) })
    }

    fn watch<'a>(&'a self, prefix: &'a str) -> Answer<'a, Watch> {
        Box::pin(async move { Ok(self.inner.watchers.add(prefix)) })
    }

    fn lease(&self, _ttl: Duration) -> Answer<'_, Lease> {
        Box::pin(async move {
            let id = self.inner.leases.fetch_add(1, Ordering::Relaxed);
            self.inner.leased.lock().insert(id, HashSet::new());
            let store = Arc::downgrade(&self.inner);
            Ok(Lease::new(id, move || {
                if let Some(store) = store.upgrade() {
                    store.expire(id);
                }
            }))
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
            check_key(key)?;
            check_value(&value)?;
            let mut leased = self.inner.leased.lock();
            let keys = leased.get_mut(&lease.id()).filter(|_| lease.is_held()).ok_or(MetaError::GuardGone)?;
            let version = self.write(|table| table.put_if(key, value, expected))?;
            keys.insert(key.to_owned());
            Ok(version)
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
            check_key(key)?;
            check_value(&value)?;
            self.write(|table| table.guarded(guard)?.put_if(key, value, expected))
        })
    }

    fn version(&self) -> Answer<'_, Version> {
        Box::pin(async move { Ok(self.inner.table.lock().version()) })
    }
}
