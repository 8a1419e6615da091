//! The content of an embedded metadata store: what is where, at which version.
//!
//! Pure. Both embedded stores decide with it; one of them also writes a log.

use std::collections::BTreeMap;
use std::ops::Bound;

use super::{Change, Item, MetaError, Version};

#[derive(Debug, Default)]
pub(super) struct Table {
    items: BTreeMap<String, (Vec<u8>, Version)>,
    version: Version,
}

impl Table {
    pub(super) fn version(&self) -> Version {
        self.version
    }

    pub(super) fn get(&self, key: &str) -> Option<(Vec<u8>, Version)> {
        self.items.get(key).cloned()
    }

    pub(super) fn list(&self, prefix: &str) -> Vec<Item> {
        let range = (Bound::Included(prefix), Bound::Unbounded);
        let below = self.items.range::<str, _>(range).take_while(|(key, _)| key.starts_with(prefix));
        let item = |(key, (value, version)): (&String, &(Vec<u8>, Version))| Item {
            key: key.clone(),
            value: value.clone(),
            version: *version,
        };
        below.map(item).collect()
    }

    /// The change that a guarded write would make; nothing is changed yet.
    pub(super) fn put_if(
        &self,
        key: &str,
        value: Vec<u8>,
        expected: Option<Version>,
    ) -> Result<Change, MetaError> {
        self.guard(key, expected)?;
        Ok(Change::Put(Item { key: key.to_owned(), value, version: self.next() }))
    }

    /// Itself, if the key `guard` has this version.
    pub(super) fn guarded(&self, (guard, version): (&str, Version)) -> Result<&Table, MetaError> {
        self.guard(guard, Some(version)).map(|()| self).map_err(|_| MetaError::GuardGone)
    }

    pub(super) fn delete_if(&self, key: &str, expected: Version) -> Result<Change, MetaError> {
        self.guard(key, Some(expected))?;
        Ok(Change::Deleted { key: key.to_owned(), version: self.next() })
    }

    pub(super) fn apply(&mut self, change: &Change) {
        match change {
            Change::Put(Item { key, value, version }) => {
                self.items.insert(key.clone(), (value.clone(), *version));
                self.version = self.version.max(*version);
            }
            Change::Deleted { key, version } => {
                self.items.remove(key);
                self.version = self.version.max(*version);
            }
            Change::Resync => {}
        }
    }

    /// The version counter of a store whose deleted keys are no longer known.
    pub(super) fn advance(&mut self, version: Version) {
        self.version = self.version.max(version);
    }

    fn guard(&self, key: &str, expected: Option<Version>) -> Result<(), MetaError> {
        let current = self.items.get(key).map(|(_, version)| *version);
        if current == expected { Ok(()) } else { Err(MetaError::Conflict { current }) }
    }

    fn next(&self) -> Version {
        Version(self.version.0 + 1)
    }
}
