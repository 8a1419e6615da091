//! What lanes do when the group coordinator asks or tells.
//!
//! Views are in the registry before the answer to a member is, and a lane's members get their
//! assignment only when every partition of it is activated, durably.

use std::collections::BTreeSet;

use broker_core::group::{Departure, MemberId};
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use kafka::{ErrorCode, GroupId, Offset, PartitionIndex, TopicName};
use lane_core::name::split_group;

use super::views::Member;
use super::{Lanes, Reading, Role, is_plain, show};
use crate::api::{LANE_ROUTER_NAME, Principal};
use crate::coordinator::{Assignment, AssignmentObserver};
use crate::partition::Partition;

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

    fn assigned(&self, assignment: Assignment) -> BoxFuture<'static, Result<(), ErrorCode>> {
        let Assignment { group, members, .. } = &assignment;
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
        self.views.replace(group, &role.view(group), &as_members);
        let held: BTreeSet<_> = members.iter().flat_map(|m| m.partitions.iter().cloned()).collect();
        for (topic, index) in &held {
            if let Some(partition) = (self.owned.find)(topic, *index) {
                partition.wake_waiters();
            }
        }
        match role {
            Role::Baseline => std::future::ready(Ok(())).boxed(),
            Role::Lane { base, lane } => self.cuts.assign(&base, &lane, held, clean).boxed(),
        }
    }

    fn departed(&self, group: &GroupId, _member: &MemberId, how: Departure) {
        // Left: it said so. Replaced: another process has its place already.
        if how == Departure::Expired {
            self.unclean.lock().insert(group.clone());
        }
    }

    /// What the group cannot see is not its lag: the offset goes up to the next that it may see. A
    /// lane's group that has committed nothing begins at the log start: its view shows only what it
    /// owns, so nothing is replayed and nothing that waited is missed.
    fn offset_to_fetch(
        &self,
        group: &GroupId,
        topic: &TopicName,
        partition: PartitionIndex,
        committed: Option<Offset>,
    ) -> Option<Offset> {
        let Some(partition) = (self.owned.find)(topic, partition) else { return committed };
        let role = self.role(group);
        let reading = reading_of(group, &role, &partition);
        let log_start = partition.watermarks().log_start;
        let from = match (&role, committed) {
            (Role::Lane { .. }, None) if reading != Reading::Plain => log_start,
            (_, Some(at)) if at >= log_start => at,
            _ => return committed,
        };
        let rounded = show::round_up(&partition, &reading, from);
        Some(rounded.map_or(from, |to| to.max(from)))
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
        let Some(partition) = (self.owned.find)(topic, partition) else { return false };
        let rules = partition.with_fold(|fold| fold.lanes.rules());
        rules.group_lane(&base, &lane).is_some_and(|known| !known.intervals.is_empty())
    }

    fn may_delete(&self, group: &GroupId) -> Result<(), ErrorCode> {
        let Some((base, lane)) = split_group(group.as_str()) else { return Ok(()) };
        let open = |partition: &Partition| {
            let rules = partition.with_fold(|fold| fold.lanes.rules());
            rules.group_lane(&base, &lane).is_some_and(|known| known.open().is_some())
        };
        if (self.owned.all)().iter().any(|p| open(p)) { Err(ErrorCode::NonEmptyGroup) } else { Ok(()) }
    }
}

fn reading_of(group: &GroupId, role: &Role, partition: &Partition) -> Reading {
    match is_plain(partition, *role != Role::Baseline) {
        true => Reading::Plain,
        false => Reading::View(role.view(group)),
    }
}
