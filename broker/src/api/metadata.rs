//! Who is where: Metadata, DescribeCluster, DescribeTopicPartitions (KIP-966), FindCoordinator.
//!
//! Every address is that of the listener the question came through. Metadata creates a topic only if
//! the broker's setting, the request and the topic's being named agree.

use std::sync::Arc;

use bytes::Bytes;
use kafka::frame::RequestHeader;
use kafka::messages::describe_cluster_response::DescribeClusterBroker;
use kafka::messages::describe_topic_partitions_response::{
    Cursor, DescribeTopicPartitionsResponsePartition, DescribeTopicPartitionsResponseTopic,
};
use kafka::messages::find_coordinator_response::Coordinator;
use kafka::messages::metadata_request::MetadataRequestTopic;
use kafka::messages::metadata_response::{
    MetadataResponseBroker, MetadataResponsePartition, MetadataResponseTopic,
};
use kafka::messages::{
    BrokerId, DescribeClusterRequest, DescribeClusterResponse, DescribeTopicPartitionsRequest,
    DescribeTopicPartitionsResponse, FindCoordinatorRequest, FindCoordinatorResponse, MetadataRequest,
    MetadataResponse,
};
use kafka::{ErrorCode, StrBytes, TopicId, TopicName};

use super::message::{self, CLUSTER_OPERATIONS, OPERATIONS_UNASKED, TOPIC_OPERATIONS, text};
use super::nodes::{Node, controller, coordinator_of, leader, nodes, replicas};
use super::{Answer, Body, Ctx};
use crate::topics::{NewTopic, Topic};

pub fn metadata(ctx: &Ctx, header: &RequestHeader, body: Bytes) -> Answer {
    let version = header.api_version;
    let mut request: MetadataRequest = match message::read(header, body) {
        Ok(request) => request,
        Err(answer) => return answer,
    };
    let ask_operations = request.include_topic_authorized_operations;
    // An empty list means "all" in version 0 alone; later, null does (C02).
    let named = match request.topics.take() {
        Some(topics) if version > 0 || !topics.is_empty() => topics,
        _ => {
            let topics = ctx.broker.topics.all();
            let topics = topics.iter().map(|topic| describe(ctx, topic, ask_operations)).collect();
            return Answer::message(&metadata_response(ctx, topics, version, &request), version);
        }
    };
    let may_create = request.allow_auto_topic_creation
        && ctx.broker.config.auto_create_topics
        && !ctx.connection.listener.raw;
    let mut topics = Vec::with_capacity(named.len());
    let mut missing = Vec::new();
    for asked in &named {
        let found = look_up(ctx, asked, version, ask_operations);
        if may_create && found.error_code == ErrorCode::UnknownTopicOrPartition.code() && asked.name.is_some()
        {
            missing.push(topics.len());
        }
        topics.push(found);
    }
    if missing.is_empty() {
        return Answer::message(&metadata_response(ctx, topics, version, &request), version);
    }
    let ctx = ctx.clone();
    Answer::Later(Box::pin(async move {
        for at in missing {
            let name = topics[at].name.clone().unwrap_or_default();
            topics[at] = create(&ctx, &name, ask_operations).await;
        }
        Body::message(&metadata_response(&ctx, topics, version, &request), version)
    }))
}

fn metadata_response(
    ctx: &Ctx,
    topics: Vec<MetadataResponseTopic>,
    version: i16,
    request: &MetadataRequest,
) -> MetadataResponse {
    let identity = &ctx.broker.identity;
    let broker = |node: Node| {
        MetadataResponseBroker::default().with_node_id(node.id).with_host(node.host).with_port(node.port)
    };
    let mut response = MetadataResponse::default()
        .with_brokers(nodes(ctx).into_iter().map(broker).collect())
        .with_cluster_id(Some(text(identity.cluster_id.as_str())))
        .with_controller_id(controller(ctx))
        .with_topics(topics);
    if (8..=10).contains(&version) && request.include_cluster_authorized_operations {
        response.cluster_authorized_operations = CLUSTER_OPERATIONS;
    }
    response
}

/// A topic that was asked for by name, or by id from version 12 on.
fn look_up(
    ctx: &Ctx,
    asked: &MetadataRequestTopic,
    version: i16,
    ask_operations: bool,
) -> MetadataResponseTopic {
    let absent = |error: ErrorCode| {
        MetadataResponseTopic::default().with_error_code(error.code()).with_name(asked.name.clone())
    };
    let Some(name) = &asked.name else {
        if version < 12 {
            return absent(ErrorCode::InvalidRequest).with_name(Some(StrBytes::new().into()));
        }
        return match ctx.broker.topics.by_id(TopicId(asked.topic_id)) {
            Some(topic) => describe(ctx, &topic, ask_operations),
            None => absent(ErrorCode::UnknownTopicId).with_topic_id(asked.topic_id),
        };
    };
    match ctx.broker.topics.by_name(name) {
        Some(topic) => describe(ctx, &topic, ask_operations),
        None if TopicName::parse(name).is_err() => absent(ErrorCode::InvalidTopicException),
        None => absent(ErrorCode::UnknownTopicOrPartition),
    }
}

async fn create(ctx: &Ctx, name: &str, ask_operations: bool) -> MetadataResponseTopic {
    let new = NewTopic { name: name.to_owned(), partitions: -1, ..NewTopic::default() };
    let made = match ctx.broker.create_topic(&new).await {
        Ok(topic) => Ok(topic),
        // Somebody else was faster.
        Err(error) if error.code() == ErrorCode::TopicAlreadyExists => {
            ctx.broker.topics.by_name(name).ok_or(error)
        }
        Err(error) => Err(error),
    };
    match made {
        Ok(topic) => describe(ctx, &topic, ask_operations),
        Err(error) => {
            tracing::debug!(topic = name, %error, "a topic was not created on request of a client");
            let code = match error.code() {
                // An internal topic: it is there when its owner needs it.
                ErrorCode::PolicyViolation => ErrorCode::UnknownTopicOrPartition,
                code => code,
            };
            MetadataResponseTopic::default().with_error_code(code.code()).with_name(Some(text(name).into()))
        }
    }
}

fn describe(ctx: &Ctx, topic: &Topic, ask_operations: bool) -> MetadataResponseTopic {
    let partition = |index: i32| {
        let led = Led::of(ctx, topic, index);
        MetadataResponsePartition::default()
            .with_error_code(led.error.code())
            .with_partition_index(index)
            .with_leader_id(led.leader)
            .with_leader_epoch(led.epoch)
            .with_offline_replicas(if led.epoch >= 0 { Vec::new() } else { led.replicas.clone() })
            .with_isr_nodes(led.replicas.clone())
            .with_replica_nodes(led.replicas)
    };
    MetadataResponseTopic::default()
        .with_name(Some(text(topic.name.as_str()).into()))
        .with_topic_id(topic.id.0)
        .with_is_internal(topic.is_internal())
        .with_partitions((0..topic.partitions).map(partition).collect())
        .with_topic_authorized_operations(if ask_operations { TOPIC_OPERATIONS } else { OPERATIONS_UNASKED })
}

/// Who leads a partition.
struct Led {
    leader: BrokerId,
    /// -1: nobody leads it.
    epoch: i32,
    error: ErrorCode,
    replicas: Vec<BrokerId>,
}

impl Led {
    fn of(ctx: &Ctx, topic: &Topic, index: i32) -> Led {
        let replicas = replicas(ctx, topic, index);
        match leader(ctx, topic, index) {
            Some((leader, epoch)) => Led { leader, epoch, error: ErrorCode::None, replicas },
            None => Led { leader: BrokerId(-1), epoch: -1, error: ErrorCode::LeaderNotAvailable, replicas },
        }
    }
}

/// KIP-919: which kind of endpoint the client believes to talk to.
const ENDPOINT_BROKERS: i8 = 1;
const ENDPOINT_CONTROLLERS: i8 = 2;

pub fn describe_cluster(ctx: &Ctx, header: &RequestHeader, body: Bytes) -> Answer {
    let request: DescribeClusterRequest = match message::read(header, body) {
        Ok(request) => request,
        Err(answer) => return answer,
    };
    let refused = |error: ErrorCode, reason: &str| {
        let response = DescribeClusterResponse::default()
            .with_error_code(error.code())
            .with_error_message(Some(text(reason)));
        Answer::message(&response, header.api_version)
    };
    match request.endpoint_type {
        ENDPOINT_BROKERS => {}
        ENDPOINT_CONTROLLERS => {
            let reason = "The request was sent to an endpoint of type BROKER, but we wanted an endpoint of type CONTROLLER";
            return refused(ErrorCode::MismatchedEndpointType, reason);
        }
        other => {
            return refused(
                ErrorCode::UnsupportedEndpointType,
                &format!("Unsupported endpoint type {other}"),
            );
        }
    }
    let broker = |node: Node| {
        DescribeClusterBroker::default().with_broker_id(node.id).with_host(node.host).with_port(node.port)
    };
    let mut response = DescribeClusterResponse::default()
        .with_cluster_id(text(ctx.broker.identity.cluster_id.as_str()))
        .with_controller_id(controller(ctx))
        .with_brokers(nodes(ctx).into_iter().map(broker).collect());
    if request.include_cluster_authorized_operations {
        response.cluster_authorized_operations = CLUSTER_OPERATIONS;
    }
    Answer::message(&response, header.api_version)
}

/// Most partitions of one answer (Kafka's `max.request.partition.size.limit`).
const DESCRIBED_PARTITIONS_MAX: usize = 2000;

pub fn describe_topic_partitions(ctx: &Ctx, header: &RequestHeader, body: Bytes) -> Answer {
    let request: DescribeTopicPartitionsRequest = match message::read(header, body) {
        Ok(request) => request,
        Err(answer) => return answer,
    };
    let (from, first_index) = match &request.cursor {
        Some(cursor) => (cursor.topic_name.to_string(), cursor.partition_index.max(0)),
        None => (String::new(), 0),
    };
    let limit = usize::try_from(request.response_partition_limit).unwrap_or(0);
    let mut room = limit.clamp(1, DESCRIBED_PARTITIONS_MAX);
    let mut response = DescribeTopicPartitionsResponse::default();
    for (name, topic) in asked_topics(ctx, &request, &from) {
        let first = if name == from { first_index } else { 0 };
        let Some(topic) = topic else {
            response.topics.push(undescribed(&name));
            continue;
        };
        let last = topic.partitions.min(first.saturating_add(room as i32));
        if room == 0 || last < topic.partitions {
            let cursor =
                Cursor::default().with_topic_name(text(&name).into()).with_partition_index(last.max(first));
            response.next_cursor = Some(cursor);
        }
        if room == 0 {
            break;
        }
        response.topics.push(described(ctx, &topic, first..last));
        room -= (last - first).max(0) as usize;
        if response.next_cursor.is_some() {
            break;
        }
    }
    Answer::message(&response, header.api_version)
}

/// The topics at or after `from`, by name; a named one that does not exist is `None`.
fn asked_topics(
    ctx: &Ctx,
    request: &DescribeTopicPartitionsRequest,
    from: &str,
) -> Vec<(String, Option<Arc<Topic>>)> {
    if request.topics.is_empty() {
        // One more than fits, so that the cursor can name what comes next.
        let topics = ctx.broker.topics.page(from, DESCRIBED_PARTITIONS_MAX + 1);
        return topics.into_iter().map(|topic| (topic.name.to_string(), Some(topic))).collect();
    }
    let mut names: Vec<String> = request.topics.iter().map(|topic| topic.name.to_string()).collect();
    names.sort();
    names.dedup();
    names.retain(|name| name.as_str() >= from);
    names.into_iter().map(|name| (name.clone(), ctx.broker.topics.by_name(&name))).collect()
}

fn undescribed(name: &str) -> DescribeTopicPartitionsResponseTopic {
    let error = match TopicName::parse(name) {
        Ok(_) => ErrorCode::UnknownTopicOrPartition,
        Err(_) => ErrorCode::InvalidTopicException,
    };
    DescribeTopicPartitionsResponseTopic::default()
        .with_error_code(error.code())
        .with_name(Some(text(name).into()))
        .with_topic_authorized_operations(OPERATIONS_UNASKED)
}

fn described(
    ctx: &Ctx,
    topic: &Topic,
    indexes: std::ops::Range<i32>,
) -> DescribeTopicPartitionsResponseTopic {
    let partition = |index: i32| {
        let led = Led::of(ctx, topic, index);
        DescribeTopicPartitionsResponsePartition::default()
            .with_error_code(led.error.code())
            .with_partition_index(index)
            .with_leader_id(led.leader)
            .with_leader_epoch(led.epoch)
            .with_isr_nodes(led.replicas.clone())
            .with_replica_nodes(led.replicas)
            .with_eligible_leader_replicas(Some(Vec::new()))
            .with_last_known_elr(Some(Vec::new()))
    };
    DescribeTopicPartitionsResponseTopic::default()
        .with_name(Some(text(topic.name.as_str()).into()))
        .with_topic_id(topic.id.0)
        .with_is_internal(topic.is_internal())
        .with_partitions(indexes.map(partition).collect())
        .with_topic_authorized_operations(TOPIC_OPERATIONS)
}

const KEY_GROUP: i8 = 0;
const KEY_TRANSACTION: i8 = 1;

pub fn find_coordinator(ctx: &Ctx, header: &RequestHeader, body: Bytes) -> Answer {
    let version = header.api_version;
    let request: FindCoordinatorRequest = match message::read(header, body) {
        Ok(request) => request,
        Err(answer) => return answer,
    };
    let broker = ctx.broker.clone();
    let refused = match request.key_type {
        KEY_GROUP => None,
        KEY_TRANSACTION => {
            Some((ErrorCode::UnsupportedVersion, "transactions are not supported yet".to_owned()))
        }
        other => Some((ErrorCode::InvalidRequest, format!("coordinator key type {other} is not supported"))),
    };
    let ctx = ctx.clone();
    let find = move || {
        let found = |key: &str| match &refused {
            Some((error, reason)) => (None, *error, Some(text(reason.as_str()))),
            None => match coordinator_of(&ctx, key) {
                Some(node) => (Some(node), ErrorCode::None, None),
                None => (None, ErrorCode::CoordinatorNotAvailable, None),
            },
        };
        let nowhere = || Node { id: BrokerId(-1), host: StrBytes::new(), port: -1 };
        let mut response = FindCoordinatorResponse::default();
        if version >= 4 {
            let coordinator = |key: &StrBytes| {
                let (node, error, reason) = found(key);
                let node = node.unwrap_or_else(nowhere);
                Coordinator::default()
                    .with_key(key.clone())
                    .with_node_id(node.id)
                    .with_host(node.host)
                    .with_port(node.port)
                    .with_error_code(error.code())
                    .with_error_message(reason)
            };
            response.coordinators = request.coordinator_keys.iter().map(coordinator).collect();
        } else {
            let (node, error, reason) = found(&request.key);
            let node = node.unwrap_or_else(nowhere);
            response = response.with_node_id(node.id).with_host(node.host).with_port(node.port);
            response.error_code = error.code();
            response.error_message = reason.filter(|_| version >= 1);
        }
        Body::message(&response, version)
    };
    if broker.cluster.is_none() || broker.coordinator.is_serving() {
        return Answer::Ready(find());
    }
    // The first group of a cluster: its topic has to be made before it has a place.
    Answer::Later(Box::pin(async move {
        let _ = crate::coordinator::ensure(&broker).await;
        find()
    }))
}
