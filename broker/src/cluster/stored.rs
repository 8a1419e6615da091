//! What the metadata store says at this moment, where the view may be behind it.

use std::collections::BTreeMap;

use broker_store::{MetaError, MetaStore};

use super::objects::{AssignmentObject, BROKERS, BrokerObject, assignment_key};
use crate::coordinator::OFFSETS_TOPIC;
use crate::topics::{TopicError, TopicRegistry};

/// The epoch of each partition of `__consumer_offsets`; none while there is no such topic.
pub async fn shard_epochs(
    meta: &dyn MetaStore,
    topics: &TopicRegistry,
) -> Result<BTreeMap<usize, i32>, MetaError> {
    let topic = topics.read(OFFSETS_TOPIC).await.map_err(|error| match error {
        TopicError::Store(error) => error,
        damaged => MetaError::Corrupt(damaged.to_string()),
    })?;
    let Some(topic) = topic else { return Ok(BTreeMap::new()) };
    let key = assignment_key(topic.id);
    let object = match meta.get(&key).await? {
        None => AssignmentObject::default(),
        Some((value, _)) => serde_json::from_slice(&value)
            .map_err(|error| MetaError::Corrupt(format!("object {key}: {error}")))?,
    };
    let epoch = |index: usize| object.partitions.get(index).map_or(-1, |partition| partition.epoch);
    Ok((0..usize::try_from(topic.partitions).unwrap_or(0)).map(|index| (index, epoch(index))).collect())
}

/// Brokers that are alive, and the lives that they lead.
pub async fn stored_brokers(meta: &dyn MetaStore) -> Result<Vec<(i32, u64)>, MetaError> {
    let items = meta.list(BROKERS).await?;
    let broker = |item: &broker_store::Item| {
        let id = item.key.strip_prefix(BROKERS)?.parse().ok()?;
        Some((id, serde_json::from_slice::<BrokerObject>(&item.value).ok()?.life))
    };
    Ok(items.iter().filter_map(broker).collect())
}
