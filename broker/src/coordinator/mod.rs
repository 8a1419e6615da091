//! The group coordinator: consumer groups (classic protocol) and committed offsets.
//!
//! Groups are spread over the partitions of `__consumer_offsets` as in Apache Kafka; each partition
//! has a shard, a task that owns its groups. This file is the handle: it finds the shard and asks.
//! Invariant: what a shard has answered is in the log, so a restart changes nothing for members.

mod config;
mod journal;
mod load;
mod message;
mod observer;
mod requests;
mod shard;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use broker_core::group::MemberId;
use futures_util::future::BoxFuture;
use kafka::{ErrorCode, GroupId, TimestampMs, TopicName};
use parking_lot::RwLock;
use tokio::sync::{mpsc, oneshot, watch};
use tokio_util::sync::CancellationToken;

pub use config::GroupConfig;
pub use message::{Description, Listed, MemberDescription, Message, Sender, TopicPartition};
pub use observer::{Assignment, AssignmentObserver, CommittedAt, OffsetsToFetch, ShardId};
use shard::{ShardState, Surroundings};

use crate::broker::Broker;
use crate::metrics::GroupMetrics;
use crate::partition::Partition;
use crate::topics::{NewTopic, TopicError};

/// Segment size of `__consumer_offsets`. Only sealed segments are compacted, and all is read at a
/// start: Kafka's 100 MiB would make both slow for nothing.
const SEGMENT_BYTES: &str = "16777216";

/// The topic that groups and offsets live in.
pub const OFFSETS_TOPIC: &str = "__consumer_offsets";

/// Tombstones outlive what they delete by Kafka's `delete.retention.ms`, for tools that read along.
const TOMBSTONES_KEPT_MS: i64 = 24 * 3600 * 1000;

/// Handle of all shards.
pub struct Coordinator {
    config: GroupConfig,
    around: Surroundings,
    stop: CancellationToken,
    shards: RwLock<Shards>,
    /// Held while `__consumer_offsets` is made.
    making: tokio::sync::Mutex<()>,
}

/// The shards of the partitions that are here.
#[derive(Default)]
struct Shards {
    /// Partitions of `__consumer_offsets`; `None` while it does not exist.
    count: Option<usize>,
    here: BTreeMap<usize, Arc<Shard>>,
}

struct Shard {
    inbox: mpsc::Sender<Message>,
    state: watch::Receiver<ShardState>,
    partition: Weak<Partition>,
    stop: CancellationToken,
}

/// How a request set out.
enum Sent {
    Now,
    /// The inbox was full.
    Waiting(mpsc::Sender<Message>, Box<Message>),
    Refused(ErrorCode),
}

impl Coordinator {
    /// A coordinator without shards: it has no groups until [`Coordinator::serve`].
    pub fn new(
        config: GroupConfig,
        observer: Arc<dyn AssignmentObserver>,
        topic_exists: Arc<dyn Fn(&TopicName) -> bool + Send + Sync>,
        metrics: GroupMetrics,
        stop: CancellationToken,
    ) -> Coordinator {
        let around = Surroundings {
            rules: config.rules(),
            offsets_retention: config.offsets_retention,
            retention_check_interval: config.retention_check_interval,
            observer,
            topic_exists,
            metrics,
        };
        Coordinator { config, around, stop, shards: RwLock::default(), making: tokio::sync::Mutex::default() }
    }

    pub fn config(&self) -> &GroupConfig {
        &self.config
    }

    pub fn observer(&self) -> &dyn AssignmentObserver {
        &*self.around.observer
    }

    /// Starts a shard for each of these partitions of `__consumer_offsets` that has none yet. The topic
    /// has `count` and never grows.
    pub fn serve(&self, count: usize, partitions: Vec<Arc<Partition>>) {
        let mut shards = self.shards.write();
        shards.count = Some(count);
        for partition in partitions {
            let index = partition.index.0.max(0) as usize;
            let same = |shard: &Arc<Shard>| shard.partition.ptr_eq(&Arc::downgrade(&partition));
            if shards.here.get(&index).is_some_and(same) {
                continue;
            }
            let (inbox, receiver) = mpsc::channel(shard::INBOX_MAX);
            let (state, follow) = watch::channel(ShardState::Loading);
            let (weak, stop) = (Arc::downgrade(&partition), self.stop.child_token());
            let id = ShardId { index, count, epoch: partition.epoch.0 };
            tokio::spawn(shard::run(id, partition, self.around.clone(), receiver, state, stop.clone()));
            let shard = Arc::new(Shard { inbox, state: follow, partition: weak, stop });
            if let Some(former) = shards.here.insert(index, shard) {
                former.stop.cancel();
            }
        }
    }

    /// Ends the shard of a partition that is no longer here: its groups are told to look elsewhere.
    pub fn stop_serving(&self, index: usize) {
        if let Some(shard) = self.shards.write().here.remove(&index) {
            shard.stop.cancel();
        }
    }

    /// Whether `__consumer_offsets` exists. Until then there are no groups.
    pub fn is_serving(&self) -> bool {
        self.shards.read().count.is_some()
    }

    fn all_shards(&self) -> Vec<Arc<Shard>> {
        self.shards.read().here.values().cloned().collect()
    }

    /// Waits until every shard has read its log (or could not).
    pub async fn loaded(&self) {
        for shard in self.all_shards() {
            let mut state = shard.state.clone();
            let _ = state.wait_for(|s| *s != ShardState::Loading).await;
        }
    }

    /// Waits until every shard has ended: everybody who waited is answered, writes are durable.
    pub async fn ended(&self) {
        for shard in self.all_shards() {
            let mut state = shard.state.clone();
            let _ = state.wait_for(|s| *s == ShardState::Ended).await;
        }
    }

    /// A new id for a member, as Kafka makes them: readable, and unique.
    pub fn fresh_member_id(&self, prefix: &str) -> MemberId {
        let id = format!("{prefix}-{}", uuid::Uuid::new_v4());
        MemberId::parse(&id).expect("it has more than a prefix")
    }

    /// Sends a request to the shard of `group`. It is in the shard's inbox when this returns, unless
    /// the inbox is full, so that requests of one connection arrive in order.
    pub fn ask<T: Send + 'static>(
        &self,
        group: &GroupId,
        message: impl FnOnce(oneshot::Sender<T>) -> Message,
    ) -> BoxFuture<'static, Result<T, ErrorCode>> {
        let (reply, answer) = oneshot::channel();
        let sent = match self.shard_of(group) {
            Ok(shard) => send(&shard, message(reply)),
            Err(error) => Sent::Refused(error),
        };
        Box::pin(answered(sent, answer))
    }

    /// Asks every shard; the answers in their order.
    pub async fn ask_all<T: Send + 'static>(
        &self,
        message: impl Fn(oneshot::Sender<T>) -> Message,
    ) -> Vec<Result<T, ErrorCode>> {
        let mut asked = Vec::new();
        for shard in self.all_shards() {
            let (reply, answer) = oneshot::channel();
            asked.push(answered(send(&shard, message(reply)), answer));
        }
        futures_util::future::join_all(asked).await
    }

    /// Every group; an error while any shard is loading, so that no list is short.
    pub async fn list(&self) -> Result<Vec<Listed>, ErrorCode> {
        let mut all = Vec::new();
        for listed in self.ask_all(|reply| Message::List { reply }).await {
            all.append(&mut listed??);
        }
        Ok(all)
    }

    /// Forgets all offsets on a topic that is gone. To be called before its name can be used again;
    /// a shard that is loading sees for itself that the topic is gone.
    pub async fn topic_deleted(&self, topic: &TopicName) {
        for outcome in self.ask_all(|reply| Message::TopicDeleted { topic: topic.clone(), reply }).await {
            match outcome {
                Ok(Ok(())) | Ok(Err(ErrorCode::CoordinatorLoadInProgress)) => {}
                Ok(Err(error)) | Err(error) => {
                    tracing::warn!(%topic, ?error, "offsets of the deleted topic stay until the next start");
                }
            }
        }
    }

    fn shard_of(&self, group: &GroupId) -> Result<Arc<Shard>, ErrorCode> {
        let shards = self.shards.read();
        let count = shards.count.ok_or(ErrorCode::CoordinatorNotAvailable)?;
        shards.here.get(&partition_of(group, count)).cloned().ok_or(ErrorCode::NotCoordinator)
    }
}

/// Makes `__consumer_offsets` when the first group comes, and serves it. Without groups a broker has
/// no such topic, as in Kafka.
pub async fn ensure(broker: &Arc<Broker>) -> Result<(), ErrorCode> {
    let coordinator = &broker.coordinator;
    if coordinator.is_serving() {
        return Ok(());
    }
    let _one = coordinator.making.lock().await;
    if coordinator.is_serving() {
        return Ok(());
    }
    let overrides = [
        ("retention.ms", "-1"),
        ("retention.bytes", "-1"),
        ("segment.bytes", SEGMENT_BYTES),
        (crate::configs::LANES, "false"),
    ];
    let new = NewTopic {
        name: OFFSETS_TOPIC.to_owned(),
        partitions: broker.config.offsets_partitions.max(1),
        overrides: overrides.map(|(key, value)| (key.to_owned(), value.to_owned())).into(),
    };
    let unavailable = |error: &dyn std::fmt::Display| {
        tracing::warn!(%error, "{OFFSETS_TOPIC} cannot be made; groups must wait");
        ErrorCode::CoordinatorNotAvailable
    };
    let made = match broker.topics.ensure_internal(&new).await {
        // Another broker was faster.
        Err(TopicError::Exists(_)) => broker.topics.by_name(OFFSETS_TOPIC).ok_or(TopicError::Unknown),
        made => made,
    };
    let topic = made.map_err(|e| unavailable(&e))?;
    if let Some(cluster) = &broker.cluster {
        cluster.assigned(&topic).await;
        return Ok(());
    }
    let opened = broker.open_partitions(&topic.name, topic.id, topic.partitions, &topic.settings);
    opened.await.map_err(|e| unavailable(&e))?;
    serve_existing(broker);
    // There is nothing to load; the first group need not come twice.
    coordinator.loaded().await;
    Ok(())
}

/// Serves `__consumer_offsets` if it is there: at a start, once partitions are open.
pub fn serve_existing(broker: &Broker) {
    if let Some(partitions) = broker.topic_partitions(OFFSETS_TOPIC) {
        broker.coordinator.serve(partitions.len(), partitions);
    }
}

/// Compacts what has been sealed of `__consumer_offsets`. Blocks for the disk.
pub fn compact(broker: &Broker) {
    let before = TimestampMs(crate::clock::now().0.saturating_sub(TOMBSTONES_KEPT_MS));
    for partition in broker.topic_partitions(OFFSETS_TOPIC).iter().flat_map(|p| p.iter()) {
        match partition.compact(before) {
            Ok(done) if done.segments_before == 0 => {}
            Ok(done) => tracing::info!(%partition, ?done, "compacted"),
            Err(error) => tracing::warn!(%partition, %error, "compaction failed and is tried again"),
        }
    }
}

/// The partition of `__consumer_offsets` that a group lives in, out of `count`.
pub fn partition_of(group: &GroupId, count: usize) -> usize {
    // Java's String.hashCode, its sign bit cleared, so that Kafka's tools look in the right place.
    let hash = group.as_str().encode_utf16().fold(0i32, |h, c| h.wrapping_mul(31).wrapping_add(i32::from(c)));
    (hash & i32::MAX) as usize % count.max(1)
}

fn send(shard: &Shard, message: Message) -> Sent {
    match shard.inbox.try_send(message) {
        Ok(()) => Sent::Now,
        Err(mpsc::error::TrySendError::Full(message)) => {
            Sent::Waiting(shard.inbox.clone(), Box::new(message))
        }
        Err(mpsc::error::TrySendError::Closed(_)) => Sent::Refused(ErrorCode::NotCoordinator),
    }
}

async fn answered<T>(sent: Sent, answer: oneshot::Receiver<T>) -> Result<T, ErrorCode> {
    match sent {
        Sent::Now => {}
        Sent::Waiting(inbox, message) => {
            inbox.send(*message).await.map_err(|_| ErrorCode::NotCoordinator)?;
        }
        Sent::Refused(error) => return Err(error),
    }
    answer.await.map_err(|_| ErrorCode::NotCoordinator)
}
