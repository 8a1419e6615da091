//! The brokers of the cluster as the clients of one listener see them, and who leads what.

use kafka::messages::BrokerId;
use kafka::{GroupId, StrBytes};

use super::Ctx;
use super::message::{address, text};
use crate::coordinator::{self, OFFSETS_TOPIC};
use crate::topics::Topic;

/// A broker, by the address of the listener that the question came through.
pub(super) struct Node {
    pub id: BrokerId,
    pub host: StrBytes,
    pub port: i32,
}

/// Every broker that is alive and has such a listener; this one in any case.
pub(super) fn nodes(ctx: &Ctx) -> Vec<Node> {
    let mut nodes = vec![myself(ctx)];
    if let Some(cluster) = &ctx.broker.cluster {
        let view = cluster.views.now();
        let others = view.brokers.iter().filter(|(id, _)| **id != me(ctx).0);
        nodes.extend(
            others.filter_map(|(id, broker)| {
                node_at(*id, broker.listeners.get(&*ctx.connection.listener.name)?)
            }),
        );
        nodes.sort_by_key(|node| node.id.0);
    }
    nodes
}

/// Where requests go that change the cluster. Every broker takes them, so without a controller it is this one.
pub(super) fn controller(ctx: &Ctx) -> BrokerId {
    let elected = ctx.broker.cluster.as_ref().and_then(|cluster| cluster.views.now().controller);
    elected.map_or_else(|| me(ctx), BrokerId)
}

/// The broker to ask for a partition, and its epoch.
pub(super) fn leader(ctx: &Ctx, topic: &Topic, index: i32) -> Option<(BrokerId, i32)> {
    match &ctx.broker.cluster {
        Some(cluster) => {
            let (owner, epoch) = cluster.views.now().leader(topic.id, index)?;
            Some((BrokerId(owner), epoch))
        }
        None => {
            let partition = ctx.broker.partition(topic.name.as_str(), index)?;
            (partition.topic_id == topic.id).then_some((me(ctx), partition.epoch.0))
        }
    }
}

/// The brokers that hold a partition's data: its owner, or whoever is to own it.
pub(super) fn replicas(ctx: &Ctx, topic: &Topic, index: i32) -> Vec<BrokerId> {
    match &ctx.broker.cluster {
        Some(cluster) => {
            let view = cluster.views.now();
            view.partition(topic.id, index).and_then(|p| p.owner).map(BrokerId).into_iter().collect()
        }
        None => vec![me(ctx)],
    }
}

/// The coordinator of a group; `None` while nobody is.
pub(super) fn coordinator_of(ctx: &Ctx, group: &str) -> Option<Node> {
    if ctx.broker.cluster.is_none() {
        return Some(myself(ctx));
    }
    let topic = ctx.broker.topics.by_name(OFFSETS_TOPIC)?;
    let group = GroupId::new(group);
    let index = coordinator::partition_of(&group, topic.partitions.max(1) as usize);
    let (owner, _) = leader(ctx, &topic, index as i32)?;
    nodes(ctx).into_iter().find(|node| node.id == owner)
}

pub(super) fn me(ctx: &Ctx) -> BrokerId {
    BrokerId(ctx.broker.identity.broker_id.0)
}

fn myself(ctx: &Ctx) -> Node {
    let (host, port) = address(ctx);
    Node { id: me(ctx), host, port }
}

fn node_at(id: i32, address: &str) -> Option<Node> {
    let (host, port) = address.rsplit_once(':')?;
    Some(Node { id: BrokerId(id), host: text(host), port: port.parse().ok()? })
}
