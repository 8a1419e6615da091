//! What other brokers tell and ask of lanes, answered from what is here.

use kafka::{GroupId, PartitionIndex, TopicName};
use lane_core::{Cut, CutAnswer, CutKind, View};

use super::{Lanes, Member, Place, Telling, Untold};
use crate::api::Principal;
use crate::peers::Markers;

/// A group as another broker tells it.
pub struct ToldGroup {
    pub group: GroupId,
    pub view: View,
    pub members: Vec<ToldMember>,
}

pub struct ToldMember {
    pub client_id: String,
    pub host: String,
    pub principal: Option<Principal>,
    pub partitions: Vec<(TopicName, PartitionIndex)>,
}

impl Lanes {
    /// Takes in what a coordinator tells of a shard of groups.
    pub fn take_views(&self, telling: Telling, groups: &[ToldGroup]) -> Result<(), Untold> {
        self.views.begin_telling(telling)?;
        for told in groups {
            let members = told.members.iter().map(|m| Member {
                client_id: &m.client_id,
                principal: m.principal.clone(),
                host: &m.host,
                partitions: &m.partitions,
            });
            let members: Vec<Member<'_>> = members.collect();
            self.views.tell_group(telling, &told.group, &told.view, &members)?;
            let held = told.members.iter().flat_map(|member| &member.partitions);
            held.for_each(|(topic, index)| self.wake(topic, *index));
        }
        self.views.end_telling(telling)?;
        if telling.whole && telling.last {
            self.wake_all();
        }
        Ok(())
    }

    pub(super) fn wake(&self, topic: &TopicName, index: PartitionIndex) {
        if let Some(partition) = (self.owned.find)(topic, index) {
            partition.wake_waiters();
        }
    }

    /// A cut that a coordinator asks for; ready when it is durable.
    pub async fn cut(&self, place: &Place, kind: CutKind, cut: &Cut) -> CutAnswer {
        self.cuts.cut_here(place, kind, cut).await
    }

    /// The last markers in the logs that are here.
    pub fn markers(&self) -> Vec<Markers> {
        self.cuts.markers_here()
    }
}
