//! Where a group goes on: what it committed, taken over what it cannot see. The owner of the partition
//! knows; in a cluster each owner is asked once for all that is its own.

use std::collections::BTreeMap;

use futures_util::FutureExt;
use futures_util::future::join_all;
use kafka::{GroupId, Offset, PartitionIndex, TopicName};

use super::{Lanes, Reading, Role, is_plain, show};
use crate::coordinator::{CommittedAt, OffsetsToFetch};
use crate::partition::Partition;
use crate::peers::{Peers, TRY_AGAIN};

impl Lanes {
    /// What the group cannot see is not its lag: the offset goes up to the next that it may see. A
    /// lane's group that has committed nothing begins at the log start: its view shows only what it
    /// owns, so nothing is replayed and nothing that waited is missed. `None`: the partition is not here.
    pub fn round_here(
        &self,
        group: &GroupId,
        role: &Role,
        topic: &TopicName,
        index: PartitionIndex,
        committed: Option<Offset>,
    ) -> Option<Option<Offset>> {
        let partition = (self.owned.find)(topic, index)?;
        let reading = reading_of(group, role, &partition);
        let log_start = partition.watermarks().log_start;
        let from = match (role, committed) {
            (Role::Lane { .. }, None) if reading != Reading::Plain => log_start,
            (_, Some(at)) if at >= log_start => at,
            _ => return Some(committed),
        };
        let rounded = show::round_up(&partition, &reading, from);
        Some(Some(rounded.map_or(from, |to| to.max(from))))
    }

    pub(super) fn round(&self, group: &GroupId, committed: Vec<CommittedAt>) -> OffsetsToFetch {
        let role = self.role(group);
        let here = |(topic, index, at): &CommittedAt| self.round_here(group, &role, topic, *index, *at);
        let found: Vec<Option<Option<Offset>>> = committed.iter().map(here).collect();
        let peers = self.together.as_ref().map(|together| together.peers.clone());
        let group = group.clone();
        async move {
            match peers {
                Some(peers) if found.iter().any(Option::is_none) => {
                    elsewhere(&peers, &group, &role, committed, found).await
                }
                _ => {
                    let each = found.into_iter().zip(committed);
                    Ok(each.map(|(found, (_, _, at))| found.unwrap_or(at)).collect())
                }
            }
        }
        .boxed()
    }
}

/// Asks the owners of what is not here.
async fn elsewhere(
    peers: &Peers,
    group: &GroupId,
    role: &Role,
    committed: Vec<CommittedAt>,
    mut found: Vec<Option<Option<Offset>>>,
) -> Result<Vec<Option<Offset>>, kafka::ErrorCode> {
    let mut by_owner: BTreeMap<i32, Vec<usize>> = BTreeMap::new();
    for (at, (topic, index, _)) in committed.iter().enumerate().filter(|(at, _)| found[*at].is_none()) {
        let owner = peers.topic(topic).and_then(|topic| peers.owner(topic.id, *index));
        if let Some(owner) = owner.filter(|owner| !peers.is_me(*owner)) {
            by_owner.entry(owner).or_default().push(at);
        }
    }
    let spoken_for = match role {
        Role::Baseline => None,
        Role::Lane { base, lane } => Some((base, lane)),
    };
    let asked = by_owner.into_iter().map(|(owner, places)| {
        let offsets: Vec<CommittedAt> = places.iter().map(|at| committed[*at].clone()).collect();
        async move { (places, peers.round_offsets(owner, group, spoken_for, &offsets).await) }
    });
    for (places, answer) in join_all(asked).await {
        match answer {
            Ok(rounded) => places.into_iter().zip(rounded).for_each(|(at, rounded)| found[at] = rounded),
            Err(error) => tracing::debug!(%group, %error, "offsets are answered as they were committed"),
        }
    }
    let answer = |(found, (topic, _, at)): (Option<Option<Offset>>, CommittedAt)| match (found, at) {
        (Some(rounded), _) => Ok(rounded),
        // To read again what is hidden costs time only.
        (None, Some(at)) => Ok(Some(at)),
        // "Nothing committed" would let the client choose where a lane's group begins.
        (None, None) if spoken_for.is_some() && peers.topic(&topic).is_some() => Err(TRY_AGAIN),
        (None, None) => Ok(None),
    };
    found.into_iter().zip(committed).map(answer).collect()
}

fn reading_of(group: &GroupId, role: &Role, partition: &Partition) -> Reading {
    match is_plain(partition, *role != Role::Baseline) {
        true => Reading::Plain,
        false => Reading::View(role.view(group)),
    }
}
