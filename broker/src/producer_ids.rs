//! Producer ids (KIP-98): numbers that were never given out before.
//!
//! Taken from the metadata store in blocks, so that a crash wastes some and repeats none.

use std::sync::Arc;

use broker_store::{MetaError, MetaStore};
use tokio::sync::Mutex;

/// Gives out producer ids.
pub struct ProducerIds {
    store: Arc<dyn MetaStore>,
    block: Mutex<std::ops::Range<i64>>,
}

const KEY: &str = "producer-ids";
/// Ids taken from the store at one time.
const BLOCK: i64 = 1000;
/// How often a block is tried for before the client is told to try again.
const TRIES: usize = 5;

impl ProducerIds {
    pub fn new(store: Arc<dyn MetaStore>) -> ProducerIds {
        ProducerIds { store, block: Mutex::new(0..0) }
    }

    /// An id that nobody has.
    pub async fn next(&self) -> Result<i64, MetaError> {
        let mut block = self.block.lock().await;
        if let Some(id) = block.next() {
            return Ok(id);
        }
        *block = self.take_block().await?;
        block.next().ok_or_else(|| MetaError::Corrupt(format!("{KEY}: no ids are left")))
    }

    async fn take_block(&self) -> Result<std::ops::Range<i64>, MetaError> {
        let mut last = None;
        for _ in 0..TRIES {
            let found = self.store.get(KEY).await?;
            let (first, version) = match &found {
                Some((value, version)) => (parse(value)?, Some(*version)),
                None => (0, None),
            };
            let next = first
                .checked_add(BLOCK)
                .ok_or_else(|| MetaError::Corrupt(format!("{KEY}: no ids are left")))?;
            // A write that may or may not have happened wastes its block: the next try reads first.
            match self.store.put_if(KEY, next.to_string().into_bytes(), version).await {
                Ok(_) => return Ok(first..next),
                Err(error @ (MetaError::Conflict { .. } | MetaError::Unavailable(_))) => last = Some(error),
                Err(error) => return Err(error),
            }
        }
        Err(last.unwrap_or_else(|| MetaError::Unavailable("no block of producer ids".to_owned())))
    }
}

fn parse(value: &[u8]) -> Result<i64, MetaError> {
    let number = std::str::from_utf8(value).ok().and_then(|text| text.parse().ok());
    number
        .filter(|first| *first >= 0)
        .ok_or_else(|| MetaError::Corrupt(format!("object {KEY} holds no number")))
}

#[cfg(test)]
mod tests {
    use broker_store::meta::Memory;

    use super::*;

    #[tokio::test]
    async fn ids_never_repeat_over_restarts() {
        let store: Arc<dyn MetaStore> = Arc::new(Memory::default());
        let mut seen = std::collections::HashSet::new();
        for _ in 0..3 {
            let ids = ProducerIds::new(store.clone());
            for _ in 0..1500 {
                assert!(seen.insert(ids.next().await.unwrap()));
            }
        }
    }
}
