//! What lanes do when the group coordinator asks or tells.
//!
//! Views are in the registry before the answer to a member is, and a lane's members get their
//! assignment only when every partition of it is activated, durably.

use std::collections::BTreeSet;

use broker_core::group::{Departure, MemberId};
use control::peers as said;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use kafka::{ErrorCode, GroupId, PartitionIndex, TopicName};
use lane_core::name::split_group;

use super::views::Member;
use super::{Lanes, Role, Telling};
use crate::api::{LANE_ROUTER_NAME, Principal};
use crate::coordinator::{Assignment, AssignmentObserver, CommittedAt, OffsetsToFetch, ShardId};
use crate::partition::Partition;
use crate::peers::words;

impl AssignmentObserver for Lanes {
    /// A name with the suffix of a lane is that lane's, and only the lane-router speaks for it.
    fn admits(&self, group: &GroupId, principal: &Principal) -> Result<(), ErrorCode> {
        let router = matches!(principal, Principal::Certificate(name) if &**name == LANE_ROUTER_NAME);
        let suffixed = split_group(group.as_str()).is_some();
        match self.role(group) {
            Role::Lane { .. } if router => Ok(()),
            Role::Lane { .. } => Err(ErrorCode::InvalidGroupId),
            // The lane is gone, or going.
            Role::Baseline if router && suffixed => Err(ErrorCode::GroupAuthorizationFailed),
            Role::Baseline => Ok(()),
        }
    }

    fn begins(&self, shard: ShardId) {
        self.cuts.begins(shard);
        let Some(together) = &self.together else { return };
        together.publisher.begins(shard);
        if let Some(life) = self.views.life() {
            together.begun.lock().insert(shard, life);
            let _ = self.views.begin_telling(telling(shard, life, true));
        }
    }

    fn loaded(&self, shard: ShardId) {
        self.cuts.loaded(shard);
        let Some(together) = &self.together else { return };
        together.publisher.loaded(shard);
        let life = together.begun.lock().get(&shard).copied();
        if let Some(life) = life {
            let _ = self.views.end_telling(telling(shard, life, true));
            self.wake_all();
        }
    }

    fn ended(&self, shard: ShardId) {
        self.cuts.ended(shard);
        let Some(together) = &self.together else { return };
        together.publisher.ended(shard);
        together.begun.lock().remove(&shard);
    }

    fn assigned(&self, assignment: Assignment) -> BoxFuture<'static, Result<(), ErrorCode>> {
        let Assignment { shard, group, members, .. } = &assignment;
        let role = self.role(group);
        let clean = !self.unclean.lock().remove(group) && !assignment.loaded;
        let as_members: Vec<Member<'_>> = members
            .iter()
            .map(|m| Member {
                client_id: &m.client_id,
                principal: match &role {
                    // After a start members have not shown theirs yet, but only one speaks for lanes.
                    Role::Lane { .. } => Some(Principal::Certificate(LANE_ROUTER_NAME.into())),
                    Role::Baseline => m.principal.clone(),
                },
                host: &m.host,
                partitions: &m.partitions,
            })
            .collect();
        let told = self.tell(*shard, group, &role, &as_members);
        let held: BTreeSet<_> = members.iter().flat_map(|m| m.partitions.iter().cloned()).collect();
        held.iter().for_each(|(topic, index)| self.wake(topic, *index));
        match role {
            Role::Baseline => told,
            Role::Lane { base, lane } => {
                let cut = self.cuts.assign(*shard, (&base, &lane), held, clean);
                async move { futures_util::try_join!(told, cut).map(|_| ()) }.boxed()
            }
        }
    }

    fn departed(&self, group: &GroupId, _member: &MemberId, how: Departure) {
        // Left: it said so. Replaced: another process has its place already.
        if how == Departure::Expired {
            self.unclean.lock().insert(group.clone());
        }
    }

    fn offsets_to_fetch(&self, group: &GroupId, committed: Vec<CommittedAt>) -> OffsetsToFetch {
        self.round(group, committed)
    }

    /// A lane's group stands somewhere from its first assignment on: an idle one has no lag, and says so.
    fn begun(&self, group: &GroupId) -> Vec<(TopicName, PartitionIndex)> {
        match self.role(group) {
            Role::Lane { base, lane } => self.cuts.held_by(&base, &lane),
            Role::Baseline => Vec::new(),
        }
    }

    /// What waits for a lane must not be read by chance because its position was forgotten.
    fn keeps_offset(&self, group: &GroupId, topic: &TopicName, partition: PartitionIndex) -> bool {
        let Some((base, lane)) = split_group(group.as_str()) else { return false };
        let Some(partition) = (self.owned.find)(topic, partition) else {
            return self.cuts.may_own(&base, &lane, topic, partition);
        };
        let rules = partition.with_fold(|fold| fold.lanes.rules());
        rules.group_lane(&base, &lane).is_some_and(|known| !known.intervals.is_empty())
    }

    fn may_delete(&self, group: &GroupId) -> Result<(), ErrorCode> {
        let Some((base, lane)) = split_group(group.as_str()) else { return Ok(()) };
        let open = |partition: &Partition| {
            let rules = partition.with_fold(|fold| fold.lanes.rules());
            rules.group_lane(&base, &lane).is_some_and(|known| known.open().is_some())
        };
        let elsewhere = self.together.is_some() && self.cuts.may_be_open(&base, &lane);
        if elsewhere || (self.owned.all)().iter().any(|p| open(p)) {
            return Err(ErrorCode::NonEmptyGroup);
        }
        Ok(())
    }
}

impl Lanes {
    /// The registry here knows at once; ready when every other broker's does too.
    fn tell(
        &self,
        shard: ShardId,
        group: &GroupId,
        role: &Role,
        members: &[Member<'_>],
    ) -> BoxFuture<'static, Result<(), ErrorCode>> {
        let view = role.view(group);
        let Some(together) = &self.together else {
            self.views.replace(group, &view, members);
            return std::future::ready(Ok(())).boxed();
        };
        let life = together.begun.lock().get(&shard).copied();
        if let Some(life) = life {
            let _ = self.views.tell_group(telling(shard, life, true), group, &view, members);
        }
        let (base, lane) = match role {
            Role::Baseline => (String::new(), String::new()),
            Role::Lane { base, lane } => (base.to_string(), lane.to_string()),
        };
        let member = |m: &Member<'_>| said::GroupMember {
            client_id: m.client_id.to_owned(),
            host: m.host.to_owned(),
            principal: words::said_principal(m.principal.as_ref()),
            topics: words::shares(m.partitions),
        };
        let members = members.iter().map(member).collect();
        let words = said::GroupViews { group: group.to_string(), base, lane, members };
        together.publisher.tell(shard, group, words).boxed()
    }
}

/// What this broker tells itself.
fn telling(shard: ShardId, life: u64, whole: bool) -> Telling {
    Telling { life, shard: shard.index, epoch: shard.epoch, whole, first: true, last: true }
}
