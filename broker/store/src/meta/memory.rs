//! Metadata in memory: for tests and for a broker that keeps nothing.

use std::sync::Arc;
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
    watchers: Watchers,
}

impl Memory {
    pub fn new() -> Memory {
        Memory::default()
    }

    fn write(&self, decide: impl FnOnce(&Table) -> Result<Change, MetaError>) -> Result<Version, MetaError> {
        let mut table = self.inner.table.lock();
        let change = decide(&table)?;
        table.apply(&change);
        // Under the lock, so that watchers hear of changes in order.
        self.inner.watchers.tell(&change);
        Ok(table.version())
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
        Box::pin(async move { Ok(Lease::new()) })
    }

    fn version(&self) -> Answer<'_, Version> {
        Box::pin(async move { Ok(self.inner.table.lock().version()) })
    }
}
