//! CreateTopics, DeleteTopics, CreatePartitions: each topic of a request stands or falls alone.
//!
//! Replication factors are taken as they come (-1, or any number from 1): how many copies there are is
//! the segment store's business. When an answer leaves, the next request sees the change.

use std::collections::HashSet;
use std::sync::Arc;

use bytes::Bytes;
use kafka::frame::RequestHeader;
use kafka::messages::create_partitions_request::CreatePartitionsTopic;
use kafka::messages::create_partitions_response::CreatePartitionsTopicResult;
use kafka::messages::create_topics_request::CreatableTopic;
use kafka::messages::create_topics_response::{CreatableTopicConfigs, CreatableTopicResult};
use kafka::messages::delete_topics_request::DeleteTopicState;
use kafka::messages::delete_topics_response::DeletableTopicResult;
use kafka::messages::{
    CreatePartitionsRequest, CreatePartitionsResponse, CreateTopicsRequest, CreateTopicsResponse,
    DeleteTopicsRequest, DeleteTopicsResponse,
};
use kafka::{BrokerId, ErrorCode, TopicId};

use super::message::{self, Refusal, text};
use super::{Answer, Body, Ctx};
use crate::broker::Broker;
use crate::configs::{ConfigError, Overrides, TOPIC_KEYS};
use crate::topic_changes::ChangeError;
use crate::topics::{NewTopic, Topic, TopicError};

pub fn create(ctx: &Ctx, header: &RequestHeader, body: Bytes) -> Answer {
    let request: CreateTopicsRequest = match message::read(header, body) {
        Ok(request) => request,
        Err(answer) => return answer,
    };
    let (broker, version) = (ctx.broker.clone(), header.api_version);
    Answer::Later(Box::pin(async move {
        let mut results = Vec::with_capacity(request.topics.len());
        for (topic, alone) in named_once(&request.topics, |topic| topic.name.as_str()) {
            let outcome = match alone {
                Ok(()) => create_one(&broker, topic, request.validate_only).await,
                Err(repeated) => Err(repeated),
            };
            results.push(create_result(&broker, &topic.name, outcome, version));
        }
        Body::message(&CreateTopicsResponse::default().with_topics(results), version)
    }))
}

async fn create_one(
    broker: &Arc<Broker>,
    topic: &CreatableTopic,
    only_check: bool,
) -> Result<Arc<Topic>, Refusal> {
    let partitions = partition_count(broker, topic)?;
    let mut overrides = Overrides::new();
    for config in &topic.configs {
        let value = config.value.as_ref().ok_or_else(|| {
            let null = ConfigError::Null(config.name.to_string());
            (ErrorCode::InvalidConfig, null.to_string())
        })?;
        overrides.insert(config.name.to_string(), value.to_string());
    }
    let new = NewTopic { name: topic.name.to_string(), partitions, overrides };
    if only_check {
        return broker
            .topics
            .check_new(&new)
            .map(Arc::new)
            .map_err(|error| (error.code(), error.to_string()));
    }
    broker.create_topic(&new).await.map_err(refusal)
}

/// -1, a number, or what a manual assignment spells out.
fn partition_count(broker: &Broker, topic: &CreatableTopic) -> Result<i32, Refusal> {
    if topic.assignments.is_empty() {
        if topic.replication_factor == 0 || topic.replication_factor < -1 {
            let reason = "Replication factor must be larger than 0, or -1 to use the default value.";
            return Err((ErrorCode::InvalidReplicationFactor, reason.to_owned()));
        }
        return Ok(topic.num_partitions);
    }
    let wrong = |error: ErrorCode, reason: &str| Err((error, reason.to_owned()));
    if topic.num_partitions != -1 || topic.replication_factor != -1 {
        let reason = "A manual partition assignment was specified, but numPartitions and replicationFactor were not both -1.";
        return wrong(ErrorCode::InvalidRequest, reason);
    }
    let mut indexes: Vec<i32> =
        topic.assignments.iter().map(|assignment| assignment.partition_index).collect();
    indexes.sort_unstable();
    if indexes.iter().enumerate().any(|(at, index)| at as i32 != *index) {
        let reason = "partitions should be a consecutive 0-based integer sequence";
        return wrong(ErrorCode::InvalidReplicaAssignment, reason);
    }
    for assignment in &topic.assignments {
        check_replicas(broker, assignment.broker_ids.iter().map(|id| BrokerId(id.0)))?;
    }
    Ok(topic.assignments.len() as i32)
}

/// The replicas that a person names for a partition: there is one broker.
fn check_replicas(broker: &Broker, ids: impl ExactSizeIterator<Item = BrokerId>) -> Result<(), Refusal> {
    let me = broker.identity.broker_id;
    let count = ids.len();
    let mut others = ids.filter(|id| *id != me);
    if let Some(other) = others.next() {
        let reason = format!(
            "The manual partition assignment includes broker {other}, but no such broker is registered."
        );
        return Err((ErrorCode::InvalidReplicaAssignment, reason));
    }
    match count {
        1 => Ok(()),
        0 => Err((
            ErrorCode::InvalidReplicaAssignment,
            "The manual partition assignment includes an empty replica list.".to_owned(),
        )),
        _ => Err((
            ErrorCode::InvalidReplicaAssignment,
            format!("The manual partition assignment includes the broker {me} more than once."),
        )),
    }
}

fn create_result(
    broker: &Broker,
    name: &str,
    outcome: Result<Arc<Topic>, Refusal>,
    version: i16,
) -> CreatableTopicResult {
    let result = CreatableTopicResult::default().with_name(text(name).into());
    let topic = match outcome {
        Ok(topic) => topic,
        Err((error, reason)) => {
            return result
                .with_error_code(error.code())
                .with_error_message(Some(text(reason)))
                .with_num_partitions(-1)
                .with_replication_factor(-1)
                .with_configs(Some(Vec::new()));
        }
    };
    let config = |key: &'static crate::configs::TopicKey| {
        let (value, source) = broker.topics.defaults().value(key, &topic.overrides);
        CreatableTopicConfigs::default()
            .with_name(text(key.name))
            .with_value(Some(text(value)))
            .with_config_source(source as i8)
    };
    let shown = |key: &&crate::configs::TopicKey| !key.hidden || topic.overrides.contains_key(key.name);
    let mut result =
        result.with_topic_id(topic.id.0).with_num_partitions(topic.partitions).with_replication_factor(1);
    result.error_message = None;
    if version >= 5 {
        result.configs = Some(TOPIC_KEYS.iter().filter(shown).map(config).collect());
    }
    result
}

pub fn delete(ctx: &Ctx, header: &RequestHeader, body: Bytes) -> Answer {
    let request: DeleteTopicsRequest = match message::read(header, body) {
        Ok(request) => request,
        Err(answer) => return answer,
    };
    let (broker, version) = (ctx.broker.clone(), header.api_version);
    let by_name =
        request.topic_names.iter().map(|name| DeleteTopicState::default().with_name(Some(name.clone())));
    let topics: Vec<DeleteTopicState> = by_name.chain(request.topics.iter().cloned()).collect();
    Answer::Later(Box::pin(async move {
        let mut responses = Vec::with_capacity(topics.len());
        for asked in topics {
            responses.push(delete_one(&broker, asked).await);
        }
        let mut response = DeleteTopicsResponse::default().with_responses(responses);
        for result in &mut response.responses {
            // Names may be null from version 6 on, when a topic was named by an unknown id.
            if version < 6 {
                result.name.get_or_insert_default();
            }
        }
        Body::message(&response, version)
    }))
}

async fn delete_one(broker: &Arc<Broker>, asked: DeleteTopicState) -> DeletableTopicResult {
    let mut result =
        DeletableTopicResult::default().with_name(asked.name.clone()).with_topic_id(asked.topic_id);
    let refuse = |result: DeletableTopicResult, error: ErrorCode, reason: String| {
        result.with_error_code(error.code()).with_error_message(Some(text(reason)))
    };
    let name = match (&asked.name, asked.topic_id.is_nil()) {
        (Some(_), false) => {
            let reason = "Topic name and topic id can not both be specified.";
            return refuse(result, ErrorCode::InvalidRequest, reason.to_owned());
        }
        (None, true) => {
            let reason = "Neither topic name nor id were specified.";
            return refuse(result, ErrorCode::InvalidRequest, reason.to_owned());
        }
        (Some(name), true) => name.to_string(),
        (None, false) => match broker.topics.by_id(TopicId(asked.topic_id)) {
            Some(topic) => topic.name.to_string(),
            None => {
                let reason = "This server does not host this topic ID.";
                return refuse(result, ErrorCode::UnknownTopicId, reason.to_owned());
            }
        },
    };
    result.name = Some(text(name.as_str()).into());
    match broker.delete_topic(&name).await {
        Ok(topic) => result.with_topic_id(topic.id.0),
        Err(error) => refuse(result, error.code(), error.to_string()),
    }
}

pub fn create_partitions(ctx: &Ctx, header: &RequestHeader, body: Bytes) -> Answer {
    let request: CreatePartitionsRequest = match message::read(header, body) {
        Ok(request) => request,
        Err(answer) => return answer,
    };
    let (broker, version) = (ctx.broker.clone(), header.api_version);
    Answer::Later(Box::pin(async move {
        let mut results = Vec::with_capacity(request.topics.len());
        for (topic, alone) in named_once(&request.topics, |topic| topic.name.as_str()) {
            let outcome = match alone {
                Ok(()) => grow_one(&broker, topic, request.validate_only).await,
                Err(repeated) => Err(repeated),
            };
            let mut result = CreatePartitionsTopicResult::default().with_name(topic.name.clone());
            if let Err((error, reason)) = outcome {
                result = result.with_error_code(error.code()).with_error_message(Some(text(reason)));
            }
            results.push(result);
        }
        Body::message(&CreatePartitionsResponse::default().with_results(results), version)
    }))
}

async fn grow_one(
    broker: &Arc<Broker>,
    topic: &CreatePartitionsTopic,
    only_check: bool,
) -> Result<(), Refusal> {
    let planned = broker
        .topics
        .check_grow(&topic.name, topic.count)
        .map_err(|error| (error.code(), error.to_string()))?;
    if let Some(assignments) = &topic.assignments {
        let current = broker.topics.by_name(&topic.name).map_or(0, |topic| topic.partitions);
        if assignments.len() as i32 != planned.partitions - current {
            let reason = format!(
                "Attempted to add {} additional partition(s), but only {} assignment(s) were specified.",
                planned.partitions - current,
                assignments.len()
            );
            return Err((ErrorCode::InvalidReplicaAssignment, reason));
        }
        for assignment in assignments {
            check_replicas(broker, assignment.broker_ids.iter().map(|id| BrokerId(id.0)))?;
        }
    }
    if only_check {
        return Ok(());
    }
    broker.grow_topic(&topic.name, topic.count).await.map(|_| ()).map_err(refusal)
}

fn refusal(error: ChangeError) -> Refusal {
    if let ChangeError::Topic(TopicError::Store(store)) = &error {
        tracing::warn!(error = %store, "a topic was not changed");
    }
    (error.code(), error.to_string())
}

/// Each topic of a request once, and why it is refused if it stands there again.
fn named_once<'a, T>(
    topics: &'a [T],
    name: impl Fn(&'a T) -> &'a str,
) -> impl Iterator<Item = (&'a T, Result<(), Refusal>)> {
    let repeated = message::repeated(topics.iter().map(&name));
    let mut seen = HashSet::new();
    topics.iter().filter_map(move |topic| {
        let again = || Err((ErrorCode::InvalidRequest, "Duplicate topic name.".to_owned()));
        let name = name(topic);
        seen.insert(name).then(|| (topic, if repeated.contains(name) { again() } else { Ok(()) }))
    })
}
