//! A part of the metadata store, followed: what is below a prefix, as of the last look.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use broker_store::{Change, Item, MetaError, MetaStore, Watch};

/// Between two tries to read a store that does not answer.
const RETRY: Duration = Duration::from_millis(200);

/// Everything below a prefix, and the means to hear of changes.
pub struct Follow {
    meta: Arc<dyn MetaStore>,
    prefix: &'static str,
    watch: Watch,
    items: BTreeMap<String, Item>,
    /// The watch has missed something.
    stale: bool,
}

impl Follow {
    /// Reads what is there. Nothing that is written afterwards is missed.
    pub async fn start(meta: Arc<dyn MetaStore>, prefix: &'static str) -> Result<Follow, MetaError> {
        let watch = meta.watch(prefix).await?;
        let items = listed(&*meta, prefix).await?;
        Ok(Follow { meta, prefix, watch, items, stale: false })
    }

    /// By key.
    pub fn items(&self) -> &BTreeMap<String, Item> {
        &self.items
    }

    /// Waits until something has changed. False when the store is gone for good. Safe to cancel.
    pub async fn changed(&mut self) -> bool {
        loop {
            if self.stale {
                match listed(&*self.meta, self.prefix).await {
                    Ok(items) => {
                        self.items = items;
                        self.stale = false;
                        return true;
                    }
                    Err(error) => {
                        tracing::warn!(prefix = self.prefix, %error, "the metadata store cannot be read; trying again");
                        tokio::time::sleep(RETRY).await;
                        continue;
                    }
                }
            }
            let Some(change) = self.watch.next().await else { return false };
            let mut any = self.apply(change);
            while let Some(change) = self.watch.try_next() {
                any |= self.apply(change);
            }
            if any {
                return true;
            }
        }
    }

    /// Whether anything is different now.
    fn apply(&mut self, change: Change) -> bool {
        match change {
            Change::Put(item) => {
                let known = self.items.get(&item.key).map(|known| known.version);
                if known.is_some_and(|known| known >= item.version) {
                    return false;
                }
                self.items.insert(item.key.clone(), item);
                true
            }
            Change::Deleted { key, version } => {
                let older = self.items.get(&key).is_some_and(|known| known.version < version);
                older && self.items.remove(&key).is_some()
            }
            Change::Resync => {
                self.stale = true;
                false
            }
        }
    }
}

async fn listed(meta: &dyn MetaStore, prefix: &str) -> Result<BTreeMap<String, Item>, MetaError> {
    Ok(meta.list(prefix).await?.into_iter().map(|item| (item.key.clone(), item)).collect())
}

#[cfg(test)]
mod tests {
    use broker_store::meta;

    use super::*;

    #[tokio::test]
    async fn what_is_written_before_and_after_the_start_is_followed_even_over_lost_watches() {
        let store = Arc::new(meta::Flaky::new(meta::Memory::new(), 1, meta::MetaFaults::default()));
        let old = store.put_if("a/1", b"1".to_vec(), None).await.unwrap();
        store.put_if("b/1", b"x".to_vec(), None).await.unwrap();
        let mut follow = Follow::start(store.clone(), "a/").await.unwrap();
        assert_eq!(follow.items().len(), 1);
        store.put_if("a/1", b"2".to_vec(), Some(old)).await.unwrap();
        let two = store.put_if("a/2", b"x".to_vec(), None).await.unwrap();
        assert!(follow.changed().await);
        while follow.items().len() < 2 {
            assert!(follow.changed().await);
        }
        assert_eq!(follow.items()["a/1"].value, b"2");
        store.delete_if("a/2", two).await.unwrap();
        store.lose_watches();
        assert!(follow.changed().await);
        assert_eq!(follow.items().len(), 1);
    }
}
