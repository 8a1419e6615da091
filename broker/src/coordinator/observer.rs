//! Who else must know which member reads which partition: the lanes.
//!
//! The coordinator asks before it answers and tells what happened; deciding about lanes stays with
//! the implementation. What is given here is complete: a new assignment replaces the old one.

use broker_core::group::{Departure, MemberId, consumer_protocol};
use broker_core::offsets_log::{GroupMetadata, MemberMetadata};
use futures_util::future::BoxFuture;
use kafka::{ErrorCode, GroupId, Offset, PartitionIndex, TopicName};

use crate::api::Principal;

/// A partition of `__consumer_offsets` as one coordinator has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ShardId {
    pub index: usize,
    /// How many there are.
    pub count: usize,
    /// Of the partition: rises with every coordinator of it.
    pub epoch: i32,
}

/// Everything that one generation of a group assigns.
#[derive(Clone, Debug, PartialEq)]
pub struct Assignment {
    pub shard: ShardId,
    pub group: GroupId,
    pub generation: i32,
    /// Found in the log at a start of the coordinator, not just made by a leader.
    pub loaded: bool,
    /// Empty when the last member has gone.
    pub members: Vec<AssignedMember>,
}

/// One member's share.
#[derive(Clone, Debug, PartialEq)]
pub struct AssignedMember {
    pub member: MemberId,
    pub client_id: String,
    /// As in DescribeGroups: `/` and the address.
    pub host: String,
    /// `None` after a start, until the member has been heard of.
    pub principal: Option<Principal>,
    /// Empty for groups that are no consumer groups.
    pub partitions: Vec<(TopicName, PartitionIndex)>,
}

/// A partition, and what is committed for it.
pub type CommittedAt = (TopicName, PartitionIndex, Option<Offset>);

/// Where a group goes on.
pub type OffsetsToFetch = BoxFuture<'static, Result<Vec<Option<Offset>>, ErrorCode>>;

/// Follows the assignments of all groups.
pub trait AssignmentObserver: Send + Sync {
    /// Whether this principal may be a member of the group. Asked on every JoinGroup.
    fn admits(&self, group: &GroupId, principal: &Principal) -> Result<(), ErrorCode>;

    /// This broker coordinates the groups of a shard from now on; those in its log follow.
    fn begins(&self, _shard: ShardId) {}

    /// All groups in the shard's log have been told.
    fn loaded(&self, _shard: ShardId) {}

    /// It coordinates them no longer.
    fn ended(&self, _shard: ShardId) {}

    /// A generation's assignment is in the log. Members learn of it when the future is ready; an
    /// error sends them back to JoinGroup.
    fn assigned(&self, assignment: Assignment) -> BoxFuture<'static, Result<(), ErrorCode>>;

    /// A member is gone; its share is others' with the next [`AssignmentObserver::assigned`].
    fn departed(&self, group: &GroupId, member: &MemberId, how: Departure);

    /// What OffsetFetch answers where these are committed, in their order; an error for all if that
    /// cannot be known now.
    fn offsets_to_fetch(&self, group: &GroupId, committed: Vec<CommittedAt>) -> OffsetsToFetch;

    /// Partitions where the group has a place to begin at though it has committed nothing.
    fn begun(&self, group: &GroupId) -> Vec<(TopicName, PartitionIndex)>;

    /// Whether the offset may not expire, whatever its age.
    fn keeps_offset(&self, group: &GroupId, topic: &TopicName, partition: PartitionIndex) -> bool;

    /// Whether DeleteGroups may remove the group.
    fn may_delete(&self, group: &GroupId) -> Result<(), ErrorCode>;
}

impl Assignment {
    pub(super) fn of(
        shard: ShardId,
        group: &GroupId,
        metadata: &GroupMetadata,
        loaded: bool,
        principal: impl Fn(&MemberId) -> Option<Principal>,
    ) -> Assignment {
        let consumers = metadata.protocol_type == consumer_protocol::CONSUMER;
        let assigned = |member: &MemberMetadata| AssignedMember {
            member: member.member_id.clone(),
            client_id: member.client_id.clone(),
            host: member.client_host.clone(),
            principal: principal(&member.member_id),
            partitions: if consumers { partitions(member) } else { Vec::new() },
        };
        let members = metadata.members.iter().map(assigned).collect();
        Assignment { shard, group: group.clone(), generation: metadata.generation, loaded, members }
    }
}

/// An assignment that does not parse holds nothing: the broker never hands its bytes to a reader.
fn partitions(member: &MemberMetadata) -> Vec<(TopicName, PartitionIndex)> {
    let topics = consumer_protocol::assigned_partitions(member.assignment.clone()).unwrap_or_default();
    let mut all = Vec::new();
    for (topic, partitions) in topics {
        if let Ok(topic) = TopicName::parse(&topic) {
            all.extend(partitions.into_iter().map(|p| (topic.clone(), PartitionIndex(p))));
        }
    }
    all
}
