//! The lane calls that need groups and logs: what a lane holds, hiding what it leaves, name clashes.

use std::collections::HashMap;

use broker_core::group::Leaver;
use control::v1;
use kafka::{ErrorCode, GroupId, Offset, PartitionIndex, TopicName};
use lane_core::Lane;
use tonic::Status;

use super::Calls;
use crate::coordinator::{MemberDescription, Message};

type Holdings = (Vec<v1::LaneGroupPartition>, Vec<v1::LanePartition>);
type Committed = HashMap<(GroupId, TopicName, PartitionIndex), Offset>;

impl Calls {
    /// Groups named `something@lane` would become the lane's: a lane of that name is refused.
    pub(super) async fn refuse_collision(&self, lane: &Lane) -> Result<(), Status> {
        let groups = self.groups_of(lane).await?;
        match groups.first() {
            None => Ok(()),
            Some(group) => Err(Status::failed_precondition(format!(
                "lane {lane} cannot be made: group {group} exists, and would be taken for one of the lane's; \
                 choose another name, or delete the group"
            ))),
        }
    }

    /// What groups and partitions hold of a lane.
    pub(super) async fn holdings(&self, lane: &Lane) -> Result<Holdings, Status> {
        let committed = self.committed(lane).await?;
        let (lanes, lane) = (self.broker.lanes.clone(), lane.clone());
        let report = tokio::task::spawn_blocking(move || {
            lanes.report(&lane, |group, topic, partition| {
                committed.get(&(group.clone(), topic.clone(), partition)).copied()
            })
        });
        let report = report.await.map_err(|_| Status::internal("the logs could not be looked at"))?;
        let groups = report.groups.into_iter().map(|status| v1::LaneGroupPartition {
            state: state(status.held, status.activated.is_some() && status.deactivated.is_none()).into(),
            group: status.group.to_string(),
            topic: status.topic.to_string(),
            partition: status.partition.0,
            activated_offset: offset(status.activated),
            deactivated_offset: offset(status.deactivated),
            waiting_records: count(status.waiting),
            committed_offset: offset(status.committed),
        });
        let partitions = report.partitions.into_iter().map(|held| v1::LanePartition {
            topic: held.topic.to_string(),
            partition: held.partition.0,
            records: count(held.records),
        });
        Ok((groups.collect(), partitions.collect()))
    }

    /// Ends a lane in every log; the number of PPE records that nobody will see, -1 if not known.
    pub(super) async fn hide(&self, lane: &Lane) -> Result<i64, Status> {
        let ended = self.broker.lanes.end(lane).await;
        let hidden = ended.map_err(|error| Status::unavailable(error.to_string()))?;
        self.remove_groups(lane).await?;
        Ok(count(hidden))
    }

    /// The lane's groups go with it: their members have lost their way here, and what they committed
    /// would make a later lane of the same name look like a collision.
    async fn remove_groups(&self, lane: &Lane) -> Result<(), Status> {
        let coordinator = &self.broker.coordinator;
        for group in self.groups_of(lane).await? {
            let describe = |reply| Message::Describe { group: group.clone(), reply };
            let found = coordinator.ask(&group, describe).await.and_then(|found| found);
            let members = found.map(|group| group.members).unwrap_or_default();
            let leaver = |m: MemberDescription| Leaver { member: Some(m.member), instance: m.instance };
            let leavers: Vec<Leaver> = members.into_iter().map(leaver).collect();
            let leave = |reply| Message::Leave { group: group.clone(), leavers, reply };
            coordinator.ask(&group, leave).await.and_then(|left| left).map_err(not_ready)?;
            let delete = |reply| Message::DeleteGroup { group: group.clone(), reply };
            let code = coordinator.ask(&group, delete).await.map_err(not_ready)?;
            if !matches!(code, ErrorCode::None | ErrorCode::GroupIdNotFound) {
                return Err(Status::unavailable(format!(
                    "group {group} cannot be removed yet ({code:?}); try again"
                )));
            }
        }
        Ok(())
    }

    async fn committed(&self, lane: &Lane) -> Result<Committed, Status> {
        let mut committed = HashMap::new();
        for group in self.groups_of(lane).await? {
            let ask = |reply| Message::FetchOffsets { group: group.clone(), wanted: None, reply };
            let found = self.broker.coordinator.ask(&group, ask).await.and_then(|found| found);
            for ((topic, partition), offset) in found.map_err(not_ready)? {
                if let Some(offset) = offset {
                    committed.insert((group.clone(), topic, partition), offset.offset);
                }
            }
        }
        Ok(committed)
    }

    /// Groups of this lane, by their names on the broker.
    async fn groups_of(&self, lane: &Lane) -> Result<Vec<GroupId>, Status> {
        let all = self.broker.coordinator.list().await.map_err(not_ready)?;
        let groups = all.into_iter().map(|listed| listed.group);
        Ok(groups.filter(|group| lane.unsuffixed(group.as_str()).is_some()).collect())
    }
}

fn state(held: bool, open: bool) -> v1::lane_group_partition::State {
    match (open, held) {
        (true, true) => v1::lane_group_partition::State::Active,
        (true, false) => v1::lane_group_partition::State::Grace,
        (false, _) => v1::lane_group_partition::State::Closed,
    }
}

pub(super) fn not_ready(code: ErrorCode) -> Status {
    Status::unavailable(format!("the broker does not know all groups yet ({code:?}); try again in a moment"))
}

fn offset(offset: Option<Offset>) -> i64 {
    offset.map_or(-1, |offset| offset.0)
}

fn count(count: Option<u64>) -> i64 {
    count.map_or(-1, |count| i64::try_from(count).unwrap_or(i64::MAX))
}
