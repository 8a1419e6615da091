//! Committed offsets: OffsetCommit, OffsetFetch, OffsetDelete.
//!
//! Decides what a request must bring and maps between topics of a message and partitions of the
//! coordinator. A commit is answered when it is durable.

use std::collections::HashMap;

use broker_core::group::{InstanceId, MemberId};
use broker_core::offsets_log::CommittedOffset;
use bytes::Bytes;
use futures_util::future::join_all;
use kafka::cold::decode;
use kafka::frame::RequestHeader;
use kafka::messages::offset_commit_request::OffsetCommitRequestPartition;
use kafka::messages::offset_commit_response::{OffsetCommitResponsePartition, OffsetCommitResponseTopic};
use kafka::messages::offset_delete_response::{OffsetDeleteResponsePartition, OffsetDeleteResponseTopic};
use kafka::messages::offset_fetch_response::{
    OffsetFetchResponseGroup, OffsetFetchResponsePartition, OffsetFetchResponsePartitions,
    OffsetFetchResponseTopic, OffsetFetchResponseTopics,
};
use kafka::messages::{
    self, OffsetCommitRequest, OffsetCommitResponse, OffsetDeleteRequest, OffsetDeleteResponse,
    OffsetFetchRequest, OffsetFetchResponse,
};
use kafka::{ErrorCode, LeaderEpoch, Offset, PartitionIndex, StrBytes, TimestampMs, TopicName};

use super::groups::{changed_group, group_id, text};
use super::{Answer, Body, Ctx};
use crate::clock;
use crate::coordinator::{self, Message, Sender, TopicPartition};

/// Partitions by topic, in the order of a request.
type ByTopic = Vec<(messages::TopicName, Vec<i32>)>;

pub fn commit(ctx: &Ctx, header: &RequestHeader, body: Bytes) -> Answer {
    let version = header.api_version;
    let request: OffsetCommitRequest = match decode(version, body) {
        Ok(request) => request,
        Err(error) => return Answer::malformed(header, error),
    };
    let asked: ByTopic = request
        .topics
        .iter()
        .map(|t| (t.name.clone(), t.partitions.iter().map(|p| p.partition_index).collect()))
        .collect();
    let group = match changed_group(ctx, &request.group_id) {
        Ok(group) => group,
        Err(error) => return Answer::message(&commit_response(asked, &HashMap::new(), error), version),
    };
    let (offsets, refused) = committed(ctx, &request);
    let sender = Sender {
        member: MemberId::parse(&request.member_id),
        instance: request.group_instance_id.as_deref().map(InstanceId::new),
        generation: request.generation_id_or_member_epoch,
    };
    let ctx = ctx.clone();
    Answer::Later(Box::pin(async move {
        let outcome = async {
            // With nothing left to commit there is nothing to ask either, as in Kafka.
            if offsets.is_empty() && !asked.is_empty() {
                return Ok(());
            }
            coordinator::ensure(&ctx.broker).await?;
            let ask = |reply| Message::Commit { group: group.clone(), sender, offsets, reply };
            ctx.broker.coordinator.ask(&group, ask).await?
        };
        let code = match outcome.await {
            Ok(()) => ErrorCode::None,
            // A group that is not there has its own code only since version 9.
            Err(ErrorCode::GroupIdNotFound) if version < 9 => ErrorCode::IllegalGeneration,
            Err(error) => error,
        };
        Body::message(&commit_response(asked, &refused, code), version)
    }))
}

type Refused = HashMap<(messages::TopicName, i32), ErrorCode>;

/// What can be committed, and why the rest cannot.
fn committed(ctx: &Ctx, request: &OffsetCommitRequest) -> (Vec<(TopicPartition, CommittedOffset)>, Refused) {
    let now = clock::now();
    let metadata_max = ctx.broker.coordinator.config().offset_metadata_bytes_max;
    let expires_at = (request.retention_time_ms >= 0)
        .then(|| TimestampMs(now.0.saturating_add(request.retention_time_ms)));
    let mut offsets = Vec::new();
    let mut refused = Refused::new();
    for topic in &request.topics {
        let name = TopicName::parse(&topic.name.0).ok();
        for partition in &topic.partitions {
            let index = partition.partition_index;
            let known = name.as_ref().filter(|n| ctx.broker.topics.has_partition(n.as_str(), index));
            let too_long = partition.committed_metadata.as_ref().is_some_and(|m| m.len() > metadata_max);
            match known {
                None => {
                    refused.insert((topic.name.clone(), index), ErrorCode::UnknownTopicOrPartition);
                }
                Some(_) if too_long => {
                    refused.insert((topic.name.clone(), index), ErrorCode::OffsetMetadataTooLarge);
                }
                Some(name) => {
                    let topic = ctx.broker.topics.by_name(name.as_str()).map(|topic| topic.id);
                    let offset = CommittedOffset { topic, ..offset_of(partition, now, expires_at) };
                    offsets.push(((name.clone(), PartitionIndex(index)), offset));
                }
            }
        }
    }
    (offsets, refused)
}

fn offset_of(
    partition: &OffsetCommitRequestPartition,
    now: TimestampMs,
    expires_at: Option<TimestampMs>,
) -> CommittedOffset {
    CommittedOffset {
        offset: Offset(partition.committed_offset),
        leader_epoch: LeaderEpoch(partition.committed_leader_epoch.max(-1)),
        metadata: partition.committed_metadata.as_deref().unwrap_or_default().to_owned(),
        committed_at: now,
        expires_at,
        topic: None,
    }
}

fn commit_response(asked: ByTopic, refused: &Refused, code: ErrorCode) -> OffsetCommitResponse {
    let topics = asked.into_iter().map(|(name, partitions)| {
        let partition = |index: i32| {
            let code = refused.get(&(name.clone(), index)).copied().unwrap_or(code);
            OffsetCommitResponsePartition::default().with_partition_index(index).with_error_code(code.code())
        };
        let partitions = partitions.into_iter().map(partition).collect();
        OffsetCommitResponseTopic::default().with_name(name.clone()).with_partitions(partitions)
    });
    OffsetCommitResponse::default().with_topics(topics.collect())
}

pub fn fetch(ctx: &Ctx, header: &RequestHeader, body: Bytes) -> Answer {
    let version = header.api_version;
    let request: OffsetFetchRequest = match decode(version, body) {
        Ok(request) => request,
        Err(error) => return Answer::malformed(header, error),
    };
    let ctx = ctx.clone();
    Answer::Later(Box::pin(async move {
        let response = match version {
            0..8 => {
                let topics = request.topics.map(|topics| {
                    topics.into_iter().map(|t| (t.name, t.partition_indexes)).collect::<ByTopic>()
                });
                let found = fetch_one(&ctx, &request.group_id.0, topics.clone()).await;
                one_group(found, topics.unwrap_or_default(), version)
            }
            _ => {
                let fetches = request.groups.into_iter().map(|group| async {
                    let topics = group.topics.map(|topics| {
                        topics.into_iter().map(|t| (t.name, t.partition_indexes)).collect::<ByTopic>()
                    });
                    let found = fetch_one(&ctx, &group.group_id.0, topics).await;
                    among_groups(group.group_id, found)
                });
                OffsetFetchResponse::default().with_groups(join_all(fetches.collect::<Vec<_>>()).await)
            }
        };
        Body::message(&response, version)
    }))
}

/// One partition's answer.
struct Found {
    partition: i32,
    offset: i64,
    epoch: i32,
    metadata: String,
}

type FoundTopics = Vec<(messages::TopicName, Vec<Found>)>;

async fn fetch_one(ctx: &Ctx, id: &StrBytes, topics: Option<ByTopic>) -> Result<FoundTopics, ErrorCode> {
    let group = group_id(id)?;
    let coordinator = &ctx.broker.coordinator;
    let wanted: Option<Vec<TopicPartition>> = topics.as_ref().map(|topics| {
        let parsed = |(name, partitions): &(messages::TopicName, Vec<i32>)| {
            let name = TopicName::parse(&name.0).ok()?;
            Some(partitions.iter().map(move |p| (name.clone(), PartitionIndex(*p))).collect::<Vec<_>>())
        };
        topics.iter().filter_map(parsed).flatten().collect()
    });
    let mut known = match coordinator.is_serving() {
        true => {
            let ask = |reply| Message::FetchOffsets { group: group.clone(), wanted: wanted.clone(), reply };
            coordinator.ask(&group, ask).await??
        }
        // No group was ever here.
        false => wanted.unwrap_or_default().into_iter().map(|key| (key, None)).collect(),
    };
    // A topic that was made again has nothing of the one before, also where the offsets of that one are still kept.
    let is_of_another = |topic: &TopicName, found: &CommittedOffset| {
        ctx.broker.topics.by_name(topic.as_str()).is_some_and(|now| !found.is_of(now.id))
    };
    for ((topic, _), found) in &mut known {
        found.take_if(|found| is_of_another(topic, found));
    }
    if topics.is_none() {
        known.retain(|(_, found)| found.is_some());
        let begun = coordinator.observer().begun(&group).into_iter().map(|key| (key, None));
        let fresh: Vec<_> = begun.filter(|(key, _)| !known.iter().any(|(k, _)| k == key)).collect();
        known.extend(fresh);
        known.sort_by(|one, other| one.0.cmp(&other.0));
    }
    let asked = known.iter().map(|((topic, index), found)| {
        let at = found.as_ref().map(|committed| committed.offset);
        (topic.clone(), *index, at)
    });
    let offsets = coordinator.observer().offsets_to_fetch(&group, asked.collect()).await?;
    let mut by_partition = HashMap::new();
    let mut all: ByTopic = Vec::new();
    for (((topic, partition), committed), offset) in known.into_iter().zip(offsets) {
        let name = messages::TopicName::from(text(topic.as_str()));
        if topics.is_none() {
            match all.last_mut().filter(|(last, _)| *last == name) {
                Some((_, partitions)) => partitions.push(partition.0),
                None => all.push((name.clone(), vec![partition.0])),
            }
        }
        let found = found(partition, committed, offset);
        by_partition.insert((name, partition.0), found);
    }
    let answered = topics.unwrap_or(all).into_iter().map(|(name, partitions)| {
        let found = |p: i32| by_partition.remove(&(name.clone(), p)).unwrap_or_else(|| Found::nothing(p));
        let found: Vec<Found> = partitions.into_iter().map(found).collect();
        (name, found)
    });
    Ok(answered.collect())
}

/// What the group is told; a lane's group may have to begin elsewhere than it committed.
fn found(partition: PartitionIndex, committed: Option<CommittedOffset>, offset: Option<Offset>) -> Found {
    let Some(offset) = offset else { return Found::nothing(partition.0) };
    let (epoch, metadata) = match committed {
        Some(committed) if committed.offset == offset => (committed.leader_epoch, committed.metadata),
        // The epoch is of the record before the committed offset, not of this one.
        Some(committed) => (LeaderEpoch::NONE, committed.metadata),
        None => (LeaderEpoch::NONE, String::new()),
    };
    Found { partition: partition.0, offset: offset.0, epoch: epoch.0, metadata }
}

impl Found {
    fn nothing(partition: i32) -> Found {
        Found { partition, offset: -1, epoch: -1, metadata: String::new() }
    }
}

fn one_group(found: Result<FoundTopics, ErrorCode>, asked: ByTopic, version: i16) -> OffsetFetchResponse {
    let partition = |found: Found, error: ErrorCode| {
        OffsetFetchResponsePartition::default()
            .with_partition_index(found.partition)
            .with_committed_offset(found.offset)
            .with_committed_leader_epoch(found.epoch)
            .with_metadata(Some(StrBytes::from_string(found.metadata)))
            .with_error_code(error.code())
    };
    let topic = |name: messages::TopicName, partitions: Vec<OffsetFetchResponsePartition>| {
        OffsetFetchResponseTopic::default().with_name(name).with_partitions(partitions)
    };
    let response = OffsetFetchResponse::default();
    match found {
        Ok(topics) => {
            let topics = topics.into_iter().map(|(name, found)| {
                topic(name, found.into_iter().map(|f| partition(f, ErrorCode::None)).collect())
            });
            response.with_topics(topics.collect())
        }
        // Version 1 has no place for an error of the whole.
        Err(error) if version < 2 => {
            let topics = asked.into_iter().map(|(name, partitions)| {
                topic(name, partitions.into_iter().map(|p| partition(Found::nothing(p), error)).collect())
            });
            response.with_topics(topics.collect())
        }
        Err(error) => response.with_error_code(error.code()),
    }
}

fn among_groups(id: messages::GroupId, found: Result<FoundTopics, ErrorCode>) -> OffsetFetchResponseGroup {
    let group = OffsetFetchResponseGroup::default().with_group_id(id);
    let partition = |found: Found| {
        OffsetFetchResponsePartitions::default()
            .with_partition_index(found.partition)
            .with_committed_offset(found.offset)
            .with_committed_leader_epoch(found.epoch)
            .with_metadata(Some(StrBytes::from_string(found.metadata)))
    };
    match found {
        Ok(topics) => {
            let topics = topics.into_iter().map(|(name, found)| {
                let partitions = found.into_iter().map(partition).collect();
                OffsetFetchResponseTopics::default().with_name(name).with_partitions(partitions)
            });
            group.with_topics(topics.collect())
        }
        Err(error) => group.with_error_code(error.code()),
    }
}

pub fn delete(ctx: &Ctx, header: &RequestHeader, body: Bytes) -> Answer {
    let version = header.api_version;
    let request: OffsetDeleteRequest = match decode(version, body) {
        Ok(request) => request,
        Err(error) => return Answer::malformed(header, error),
    };
    let asked: ByTopic = request
        .topics
        .iter()
        .map(|t| (t.name.clone(), t.partitions.iter().map(|p| p.partition_index).collect()))
        .collect();
    let mut refused = Refused::new();
    let mut which = Vec::new();
    for (name, partitions) in &asked {
        let parsed = TopicName::parse(&name.0).ok();
        for index in partitions {
            match parsed.as_ref().filter(|n| ctx.broker.topics.has_partition(n.as_str(), *index)) {
                Some(parsed) => which.push((parsed.clone(), PartitionIndex(*index))),
                None => {
                    refused.insert((name.clone(), *index), ErrorCode::UnknownTopicOrPartition);
                }
            }
        }
    }
    let ctx = ctx.clone();
    Answer::Later(Box::pin(async move {
        let response = match delete_asked(&ctx, &request.group_id.0, which).await {
            Ok(codes) => {
                refused.extend(codes);
                delete_response(asked, &refused)
            }
            Err(error) => OffsetDeleteResponse::default().with_error_code(error.code()),
        };
        Body::message(&response, version)
    }))
}

async fn delete_asked(ctx: &Ctx, id: &StrBytes, which: Vec<TopicPartition>) -> Result<Refused, ErrorCode> {
    let group = changed_group(ctx, id)?;
    if !ctx.broker.coordinator.is_serving() {
        return Err(ErrorCode::GroupIdNotFound);
    }
    let ask = |reply| Message::DeleteOffsets { group: group.clone(), which, reply };
    let codes = ctx.broker.coordinator.ask(&group, ask).await??;
    let named = |((topic, partition), code): (TopicPartition, ErrorCode)| {
        ((messages::TopicName::from(text(topic.as_str())), partition.0), code)
    };
    Ok(codes.into_iter().map(named).collect())
}

fn delete_response(asked: ByTopic, codes: &Refused) -> OffsetDeleteResponse {
    let topics = asked.into_iter().map(|(name, partitions)| {
        let partition = |index: i32| {
            let code = codes.get(&(name.clone(), index)).copied().unwrap_or(ErrorCode::None);
            OffsetDeleteResponsePartition::default().with_partition_index(index).with_error_code(code.code())
        };
        let partitions = partitions.into_iter().map(partition).collect();
        OffsetDeleteResponseTopic::default().with_name(name.clone()).with_partitions(partitions)
    });
    OffsetDeleteResponse::default().with_topics(topics.collect())
}
