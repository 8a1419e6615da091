//! A member of a classic consumer group: join, heartbeat, commit, leave (KIP-62, KIP-394).
//!
//! Owns the membership; what is read is the caller's. Offers the `range` assignor, and assigns for all
//! members when it is the leader.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::bail;
use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use kafka::ErrorCode;
use kafka::messages::consumer_protocol_assignment::TopicPartition;
use kafka::messages::join_group_request::JoinGroupRequestProtocol;
use kafka::messages::leave_group_request::MemberIdentity;
use kafka::messages::offset_commit_request::{OffsetCommitRequestPartition, OffsetCommitRequestTopic};
use kafka::messages::offset_fetch_request::{
    OffsetFetchRequestGroup, OffsetFetchRequestTopic, OffsetFetchRequestTopics,
};
use kafka::messages::sync_group_request::SyncGroupRequestAssignment;
use kafka::messages::{
    ConsumerProtocolAssignment, ConsumerProtocolSubscription, GroupId, HeartbeatRequest, JoinGroupRequest,
    JoinGroupResponse, LeaveGroupRequest, OffsetCommitRequest, OffsetFetchRequest, SyncGroupRequest,
};
use kafka_client::{ClientError, Connection};
use kafka_protocol::protocol::{Decodable as _, Encodable as _};
use tokio::time::sleep;

use super::assignor::{self, Subscriptions};
use super::partition_error;
use crate::region::{Region, text};

pub struct Member {
    group: String,
    topic: String,
    id: String,
    generation: i32,
    last_beat: Instant,
}

/// What a heartbeat found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Beat {
    Steady,
    /// Commit, then join again.
    Rebalance,
    /// The membership is over, and the partitions may be another's: join anew.
    Expelled,
}

impl Member {
    pub fn new(group: &str, topic: &str) -> Member {
        Member {
            group: group.to_owned(),
            topic: topic.to_owned(),
            id: String::new(),
            generation: -1,
            last_beat: Instant::now(),
        }
    }

    /// Joins, and returns the partitions that this member is to read.
    pub async fn join(&mut self, region: &Region) -> anyhow::Result<Vec<i32>> {
        let started = Instant::now();
        loop {
            match self.try_join(region).await {
                Ok(partitions) => {
                    self.last_beat = Instant::now();
                    return Ok(partitions);
                }
                Err(error) if started.elapsed() > JOIN_TIMEOUT => return Err(error),
                Err(error) => match error.downcast_ref::<ClientError>() {
                    Some(client) if client.code() == Some(ErrorCode::UnknownMemberId) => self.id.clear(),
                    Some(client) if client.is_retriable() || is_rebalance(client) => sleep(RETRY_PAUSE).await,
                    _ => return Err(error),
                },
            }
        }
    }

    async fn try_join(&mut self, region: &Region) -> anyhow::Result<Vec<i32>> {
        let coordinator = region.kafka.coordinator(&self.group).await?;
        let joined = self.join_group(&coordinator).await?;
        self.id = joined.member_id.to_string();
        self.generation = joined.generation_id;
        let assignments = match joined.leader == joined.member_id {
            true => assign(region, &joined).await?,
            false => Vec::new(),
        };
        let request = SyncGroupRequest::default()
            .with_group_id(self.group_id())
            .with_generation_id(self.generation)
            .with_member_id(text(&self.id))
            .with_protocol_type(Some(text(PROTOCOL_TYPE)))
            .with_protocol_name(Some(text(RANGE)))
            .with_assignments(assignments);
        let answer = coordinator.call(&request).await?;
        self.check(answer.error_code)?;
        partitions_of(&answer.assignment, &self.topic)
    }

    async fn join_group(&self, coordinator: &Connection) -> anyhow::Result<JoinGroupResponse> {
        let subscription =
            ConsumerProtocolSubscription::default().with_topics(vec![text(&self.topic)]).with_user_data(None);
        let mut metadata = BytesMut::new();
        metadata.put_i16(0);
        subscription.encode(&mut metadata, 0)?;
        let protocol =
            JoinGroupRequestProtocol::default().with_name(text(RANGE)).with_metadata(metadata.freeze());
        let mut request = JoinGroupRequest::default()
            .with_group_id(self.group_id())
            .with_session_timeout_ms(SESSION_TIMEOUT_MS)
            .with_rebalance_timeout_ms(REBALANCE_TIMEOUT_MS)
            .with_member_id(text(&self.id))
            .with_protocol_type(text(PROTOCOL_TYPE))
            .with_protocols(vec![protocol]);
        let mut answer = coordinator.call(&request).await?;
        if ErrorCode::from_code(answer.error_code) == Some(ErrorCode::MemberIdRequired) {
            request.member_id = answer.member_id.clone();
            answer = coordinator.call(&request).await?;
        }
        self.check(answer.error_code)?;
        Ok(answer)
    }

    /// Committed offsets of partitions that have one.
    pub async fn committed(&self, region: &Region, partitions: &[i32]) -> anyhow::Result<BTreeMap<i32, i64>> {
        let coordinator = region.kafka.coordinator(&self.group).await?;
        let version = coordinator.version_of::<OffsetFetchRequest>(9)?;
        let mut request = OffsetFetchRequest::default();
        let (name, indexes) = (text(&self.topic).into(), partitions.to_vec());
        if version >= 8 {
            let topic = OffsetFetchRequestTopics::default().with_name(name).with_partition_indexes(indexes);
            let group = OffsetFetchRequestGroup::default()
                .with_group_id(self.group_id())
                .with_member_epoch(-1)
                .with_topics(Some(vec![topic]));
            request.groups = vec![group];
        } else {
            let topic = OffsetFetchRequestTopic::default().with_name(name).with_partition_indexes(indexes);
            request.group_id = self.group_id();
            request.topics = Some(vec![topic]);
        }
        let answer = coordinator.call_at(version, &request).await?;
        self.check(answer.error_code)?;
        let mut committed = BTreeMap::new();
        let old = answer.topics.into_iter().flat_map(|topic| topic.partitions);
        for part in old {
            partition_error(&self.topic, part.partition_index, part.error_code)?;
            committed.insert(part.partition_index, part.committed_offset);
        }
        for group in answer.groups {
            self.check(group.error_code)?;
            for part in group.topics.into_iter().flat_map(|topic| topic.partitions) {
                partition_error(&self.topic, part.partition_index, part.error_code)?;
                committed.insert(part.partition_index, part.committed_offset);
            }
        }
        committed.retain(|_, offset| *offset >= 0);
        Ok(committed)
    }

    /// Tells the coordinator that this member lives, when it is time to.
    pub async fn beat(&mut self, region: &Region) -> anyhow::Result<Beat> {
        if self.last_beat.elapsed() < HEARTBEAT_INTERVAL {
            return Ok(Beat::Steady);
        }
        self.last_beat = Instant::now();
        let request = HeartbeatRequest::default()
            .with_group_id(self.group_id())
            .with_generation_id(self.generation)
            .with_member_id(text(&self.id));
        let beaten = async {
            let coordinator = region.kafka.coordinator(&self.group).await?;
            self.check(coordinator.call(&request).await?.error_code)
        };
        let Err(error) = beaten.await else { return Ok(Beat::Steady) };
        match error.code() {
            Some(ErrorCode::RebalanceInProgress) => Ok(Beat::Rebalance),
            Some(ErrorCode::UnknownMemberId) => {
                self.id.clear();
                Ok(Beat::Expelled)
            }
            Some(ErrorCode::IllegalGeneration) => Ok(Beat::Expelled),
            // The next beat finds the coordinator anew; the session bounds how long that may take.
            _ if error.is_retriable() => Ok(Beat::Steady),
            _ => Err(error.into()),
        }
    }

    pub async fn commit(&self, region: &Region, positions: &BTreeMap<i32, i64>) -> Result<(), ClientError> {
        let coordinator = region.kafka.coordinator(&self.group).await?;
        let version = coordinator.version_of::<OffsetCommitRequest>(9)?;
        let part = |(partition, offset): (&i32, &i64)| {
            OffsetCommitRequestPartition::default()
                .with_partition_index(*partition)
                .with_committed_offset(*offset)
                .with_committed_leader_epoch(-1)
        };
        let topic = OffsetCommitRequestTopic::default()
            .with_name(text(&self.topic).into())
            .with_partitions(positions.iter().map(part).collect());
        let request = OffsetCommitRequest::default()
            .with_group_id(self.group_id())
            .with_generation_id_or_member_epoch(self.generation)
            .with_member_id(text(&self.id))
            .with_topics(vec![topic]);
        let answer = coordinator.call_at(version, &request).await?;
        for part in answer.topics.into_iter().flat_map(|topic| topic.partitions) {
            partition_error(&self.topic, part.partition_index, part.error_code)?;
        }
        Ok(())
    }

    /// Gives the partitions up at once, rather than when the session ends.
    pub async fn leave(&self, region: &Region) -> Result<(), ClientError> {
        if self.id.is_empty() {
            return Ok(());
        }
        let coordinator = region.kafka.coordinator(&self.group).await?;
        let version = coordinator.version_of::<LeaveGroupRequest>(5)?;
        let mut request = LeaveGroupRequest::default().with_group_id(self.group_id());
        if version >= 3 {
            request.members = vec![MemberIdentity::default().with_member_id(text(&self.id))];
        } else {
            request.member_id = text(&self.id);
        }
        let answer = coordinator.call_at(version, &request).await?;
        match ErrorCode::from_code(answer.error_code) {
            // Gone already.
            Some(ErrorCode::UnknownMemberId) => Ok(()),
            _ => self.check(answer.error_code),
        }
    }

    fn group_id(&self) -> GroupId {
        GroupId(text(&self.group))
    }

    fn check(&self, code: i16) -> Result<(), ClientError> {
        ClientError::check(|| format!("group {}", self.group), code, None)
    }
}

/// The group has changed, or changes: joining again is the answer.
pub fn is_rebalance(error: &ClientError) -> bool {
    use ErrorCode::{IllegalGeneration, RebalanceInProgress, UnknownMemberId};
    matches!(error.code(), Some(RebalanceInProgress | IllegalGeneration | UnknownMemberId))
}

/// The leader's part: shares every topic that any member reads.
async fn assign(
    region: &Region,
    joined: &JoinGroupResponse,
) -> anyhow::Result<Vec<SyncGroupRequestAssignment>> {
    let mut subscriptions = Subscriptions::new();
    for member in &joined.members {
        let mut bytes = member.metadata.clone();
        if bytes.len() < 2 {
            bail!("group member {} sent a subscription that cannot be read", member.member_id);
        }
        let version = bytes.get_i16().clamp(0, 3);
        let subscription = ConsumerProtocolSubscription::decode(&mut bytes, version)?;
        let topics = subscription.topics.iter().map(ToString::to_string).collect();
        subscriptions.insert(member.member_id.to_string(), topics);
    }
    let mut counts = BTreeMap::new();
    for topic in subscriptions.values().flatten() {
        if !counts.contains_key(topic)
            && let Ok(metadata) = region.kafka.topic(topic, false).await
        {
            counts.insert(topic.clone(), metadata.partitions.len() as i32);
        }
    }
    let mut assignments = Vec::new();
    for (member, topics) in assignor::range(&subscriptions, &counts) {
        let topics = topics.iter().map(|(topic, partitions)| {
            TopicPartition::default().with_topic(text(topic).into()).with_partitions(partitions.clone())
        });
        let assignment = ConsumerProtocolAssignment::default().with_assigned_partitions(topics.collect());
        let mut bytes = BytesMut::new();
        bytes.put_i16(0);
        assignment.encode(&mut bytes, 0)?;
        let of_member = SyncGroupRequestAssignment::default().with_member_id(text(&member));
        assignments.push(of_member.with_assignment(bytes.freeze()));
    }
    Ok(assignments)
}

/// This topic's partitions in an assignment.
fn partitions_of(assignment: &Bytes, topic: &str) -> anyhow::Result<Vec<i32>> {
    let mut bytes = assignment.clone();
    if bytes.len() < 2 {
        return Ok(Vec::new());
    }
    let version = bytes.get_i16().clamp(0, 3);
    let assignment = ConsumerProtocolAssignment::decode(&mut bytes, version)?;
    let ours = assignment.assigned_partitions.into_iter().filter(|assigned| assigned.topic.as_str() == topic);
    Ok(ours.flat_map(|assigned| assigned.partitions).collect())
}

const PROTOCOL_TYPE: &str = "consumer";
const RANGE: &str = "range";
const SESSION_TIMEOUT_MS: i32 = 10_000;
/// Below the client's request timeout: JoinGroup waits as long.
const REBALANCE_TIMEOUT_MS: i32 = 30_000;
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(2);
const JOIN_TIMEOUT: Duration = Duration::from_secs(60);
const RETRY_PAUSE: Duration = Duration::from_millis(200);
