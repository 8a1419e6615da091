//! The lane calls that need groups and logs: what a lane holds, hiding what it leaves, name clashes.

use std::collections::{BTreeMap, HashMap, HashSet};

use broker_core::group::Leaver;
use control::peers as said;
use control::peers::end_lane_request::Step;
use control::v1;
use kafka::{ErrorCode, GroupId, Offset, PartitionIndex, TopicName};
use lane_core::Lane;
use tonic::Status;

use super::Calls;
use crate::coordinator::{MemberDescription, Message};
use crate::lanes::Place;
use crate::peers::{Incomplete, words};

type Holdings = (Vec<v1::LaneGroupPartition>, Vec<v1::LanePartition>);
type Committed = HashMap<(GroupId, TopicName, PartitionIndex), Offset>;

impl Calls {
    /// Groups named `something@lane` would become the lane's: a lane of that name is refused.
    pub(super) async fn refuse_collision(&self, lane: &Lane) -> Result<(), Status> {
        let groups = self.all_groups(lane).await?;
        match groups.first() {
            None => Ok(()),
            Some(found) => Err(Status::failed_precondition(format!(
                "lane {lane} cannot be made: group {} exists, and would be taken for one of the lane's; \
                 choose another name, or delete the group",
                found.group
            ))),
        }
    }

    /// What groups and partitions hold of a lane.
    pub(super) async fn holdings(&self, lane: &Lane) -> Result<Holdings, Status> {
        let groups = self.all_groups(lane).await?;
        let mut held: HashSet<(String, String, i32)> = HashSet::new();
        for group in &groups {
            let base = lane.unsuffixed(&group.group).unwrap_or_default();
            for share in &group.held {
                held.extend(share.partitions.iter().map(|p| (base.to_owned(), share.topic.clone(), *p)));
            }
        }
        let request = said::LaneHoldingsRequest { lane: lane.to_string(), groups };
        let here = self.holdings_here(&request).await?;
        let mut all = vec![here];
        if let Some(peers) = &self.broker.peers {
            all.extend(peers.lane_holdings(&request).await.map_err(incomplete)?);
            self.all_covered(all.iter().flat_map(|held| &held.owned))?;
        }
        // One that moved while it was asked for is named twice.
        let (mut groups, mut partitions) = (BTreeMap::new(), BTreeMap::new());
        for held in all {
            groups.extend(
                held.groups.into_iter().map(|g| ((g.group.clone(), g.topic.clone(), g.partition), g)),
            );
            partitions.extend(held.partitions.into_iter().map(|p| ((p.topic.clone(), p.partition), p)));
        }
        let group = |g: said::GroupHolding| v1::LaneGroupPartition {
            state: state(
                held.contains(&(g.group.clone(), g.topic.clone(), g.partition)),
                g.activated >= 0 && g.deactivated < 0,
            )
            .into(),
            group: g.group,
            topic: g.topic,
            partition: g.partition,
            activated_offset: g.activated,
            deactivated_offset: g.deactivated,
            waiting_records: g.waiting,
            committed_offset: g.committed,
        };
        let partition = |p: said::PartitionHolding| v1::LanePartition {
            topic: p.topic,
            partition: p.partition,
            records: p.records,
        };
        Ok((groups.into_values().map(group).collect(), partitions.into_values().map(partition).collect()))
    }

    /// Ends a lane in every log; the number of PPE records that nobody will see, -1 if not known.
    pub(super) async fn hide(&self, lane: &Lane) -> Result<i64, Status> {
        self.end_everywhere(lane, Step::Close).await?;
        let purged = self.end_everywhere(lane, Step::Purge).await?;
        if self.broker.peers.is_some() {
            self.all_covered(purged.iter().flat_map(|purged| &purged.owned))?;
        }
        self.end_everywhere(lane, Step::Forget).await?;
        let hidden = purged.iter().map(|purged| u64::try_from(purged.hidden_records).ok());
        Ok(count(hidden.sum()))
    }

    async fn end_everywhere(&self, lane: &Lane, step: Step) -> Result<Vec<said::EndLaneResponse>, Status> {
        let request = said::EndLaneRequest { lane: lane.to_string(), step: step.into() };
        let mut all = vec![self.end_here(lane, step).await?];
        if let Some(peers) = &self.broker.peers {
            all.extend(peers.end_lane(&request).await.map_err(incomplete)?);
        }
        Ok(all)
    }

    pub(super) async fn end_here(&self, lane: &Lane, step: Step) -> Result<said::EndLaneResponse, Status> {
        let failed = |error: crate::lanes::EndError| Status::unavailable(error.to_string());
        let mut answer = said::EndLaneResponse::default();
        match step {
            Step::Close => self.broker.lanes.close(lane).await.map_err(failed)?,
            Step::Purge => {
                answer.owned = self.owned_here();
                answer.hidden_records = count(self.broker.lanes.purge(lane).await.map_err(failed)?);
            }
            Step::Forget => self.remove_groups(lane).await?,
        }
        Ok(answer)
    }

    fn owned_here(&self) -> Vec<said::TopicPartition> {
        self.broker.all_partitions().iter().map(|p| words::said_place(&Place::of(p))).collect()
    }

    /// Every partition of a topic with lanes is named.
    fn all_covered<'a>(&self, owned: impl Iterator<Item = &'a said::TopicPartition>) -> Result<(), Status> {
        let Some(peers) = &self.broker.peers else { return Ok(()) };
        let covered = owned.filter_map(|p| Some((words::topic_id(&p.topic_id).ok()?, p.partition))).collect();
        peers.missing(&peers.topics_with_lanes(), &covered).map_or(Ok(()), |missing| Err(incomplete(missing)))
    }

    pub(super) async fn holdings_here(
        &self,
        request: &said::LaneHoldingsRequest,
    ) -> Result<said::LaneHoldingsResponse, Status> {
        let lane = words::lane(&request.lane)?;
        let mut committed: Committed = HashMap::new();
        for group in &request.groups {
            for at in &group.committed {
                let key =
                    (GroupId::new(&group.group), words::topic(&at.topic)?, PartitionIndex(at.partition));
                committed.insert(key, Offset(at.offset));
            }
        }
        let owned = self.owned_here();
        let lanes = self.broker.lanes.clone();
        let report = tokio::task::spawn_blocking(move || {
            lanes.report(&lane, |group, topic, partition| {
                committed.get(&(group.clone(), topic.clone(), partition)).copied()
            })
        });
        let report = report.await.map_err(|_| Status::internal("the logs could not be looked at"))?;
        let groups = report.groups.into_iter().map(|status| said::GroupHolding {
            group: status.group.to_string(),
            topic: status.topic.to_string(),
            partition: status.partition.0,
            activated: words::number(status.activated),
            deactivated: words::number(status.deactivated),
            committed: words::number(status.committed),
            waiting: count(status.waiting),
        });
        let partitions = report.partitions.into_iter().map(|held| said::PartitionHolding {
            topic: held.topic.to_string(),
            partition: held.partition.0,
            records: count(held.records),
        });
        Ok(said::LaneHoldingsResponse { owned, groups: groups.collect(), partitions: partitions.collect() })
    }

    /// The lane's groups go with it: their members have lost their way here, and what they committed
    /// would make a later lane of the same name look like a collision.
    async fn remove_groups(&self, lane: &Lane) -> Result<(), Status> {
        let coordinator = &self.broker.coordinator;
        for group in self.groups_here(lane).await? {
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

    /// Groups of this lane, with what they committed and hold.
    async fn all_groups(&self, lane: &Lane) -> Result<Vec<said::LaneGroup>, Status> {
        let mut groups = self.lane_groups_here(lane).await?;
        if let Some(peers) = &self.broker.peers {
            groups.extend(peers.lane_groups(lane.as_str()).await.map_err(incomplete)?);
        }
        Ok(groups)
    }

    pub(super) async fn lane_groups_here(&self, lane: &Lane) -> Result<Vec<said::LaneGroup>, Status> {
        let mut groups = Vec::new();
        for group in self.groups_here(lane).await? {
            let ask = |reply| Message::FetchOffsets { group: group.clone(), wanted: None, reply };
            let found = self.broker.coordinator.ask(&group, ask).await.and_then(|found| found);
            let committed = found.map_err(not_ready)?.into_iter().filter_map(|((topic, partition), at)| {
                let offset = at?.offset.0;
                Some(said::CommittedAt { topic: topic.to_string(), partition: partition.0, offset })
            });
            let base = GroupId::new(lane.unsuffixed(group.as_str()).unwrap_or_default());
            let held = self.broker.lanes.held_by(&base, lane);
            groups.push(said::LaneGroup {
                group: group.to_string(),
                committed: committed.collect(),
                held: words::shares(&held),
            });
        }
        Ok(groups)
    }

    /// By their names on the broker.
    async fn groups_here(&self, lane: &Lane) -> Result<Vec<GroupId>, Status> {
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

pub(super) fn incomplete(error: Incomplete) -> Status {
    Status::unavailable(error.to_string())
}

fn count(count: Option<u64>) -> i64 {
    count.map_or(-1, |count| i64::try_from(count).unwrap_or(i64::MAX))
}
