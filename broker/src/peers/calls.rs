//! What coordinators ask of owners, and tell every broker.

use control::peers as said;
use control::peers::cut_response::Outcome;
use control::peers::tell_views_response::Outcome as Taken;
use kafka::{ErrorCode, GroupId, Offset, PartitionIndex, TopicName};
use lane_core::{Ask, CutAnswer, CutKind, CutRefused, Lane};
use tonic::Status;

use super::{Peers, words};
use crate::lanes::Place;

/// The last marker of one group in one lane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Marker {
    pub group: GroupId,
    pub lane: Lane,
    pub last: Offset,
    pub open: bool,
    /// An interval, open or closed, is above the log start.
    pub intervals: bool,
}

/// All of them of one partition.
pub type Markers = (Place, Vec<Marker>);

/// Views for another broker.
pub struct Tell {
    pub life: u64,
    pub shard: usize,
    pub epoch: i32,
    pub whole: bool,
    pub groups: Vec<said::GroupViews>,
}

/// What became of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Told {
    Taken,
    OtherLife,
    /// Another coordinator has the shard.
    OldEpoch,
}

/// What a broker says of one committed offset.
pub type Rounded = Option<Option<Offset>>;

/// Shares of members that one message holds.
const SHARES_PER_MESSAGE: usize = 20_000;

impl Peers {
    /// Tells a broker who reads what, in as many messages as it takes.
    pub async fn tell_views(&self, broker: i32, tell: Tell) -> Result<Told, Status> {
        let mut parts = split(tell.groups);
        if parts.is_empty() {
            parts.push(Vec::new());
        }
        let last = parts.len() - 1;
        for (at, groups) in parts.into_iter().enumerate() {
            let request = said::TellViewsRequest {
                life: tell.life,
                shard: i32::try_from(tell.shard).unwrap_or(i32::MAX),
                epoch: tell.epoch,
                whole: tell.whole,
                first: at == 0,
                last: at == last,
                groups,
            };
            let answer = self.ask(broker, |mut peer| async move { peer.tell_views(request).await }).await?;
            match answer.outcome() {
                Taken::Taken => {}
                Taken::OtherLife => return Ok(Told::OtherLife),
                Taken::OldEpoch => return Ok(Told::OldEpoch),
            }
        }
        Ok(Told::Taken)
    }

    /// Asks the owner of the partition for a cut.
    pub async fn cut(&self, ask: &Ask<Place>) -> CutAnswer {
        let Some(owner) = self.owner(ask.partition.topic_id, ask.partition.index) else {
            return CutAnswer::Failed;
        };
        if self.is_me(owner) {
            // It is being opened.
            return CutAnswer::Failed;
        }
        let request = said::CutRequest {
            partition: Some(words::said_place(&ask.partition)),
            activate: ask.kind == CutKind::Activate,
            group: ask.cut.group.to_string(),
            lane: ask.cut.lane.to_string(),
            coordinator_epoch: ask.cut.coordinator_epoch,
            previous: words::number(ask.cut.previous),
        };
        let answered = self.ask(owner, |mut peer| async move { peer.cut(request).await }).await;
        match answered {
            Ok(answer) => match answer.outcome() {
                Outcome::Failed => CutAnswer::Failed,
                Outcome::Done => CutAnswer::Done(Offset(answer.offset)),
                Outcome::Moved => CutAnswer::Refused(CutRefused::Moved {
                    last: words::offset(answer.offset),
                    open: answer.open,
                }),
                Outcome::Fenced => CutAnswer::Refused(CutRefused::Fenced {
                    asked: ask.cut.coordinator_epoch,
                    known: answer.known_epoch,
                }),
            },
            Err(error) => {
                tracing::debug!(owner, topic = %ask.partition.topic, %error, "a lane cut is asked for again");
                CutAnswer::Failed
            }
        }
    }

    /// The markers of what a broker owns.
    pub async fn list_markers(&self, broker: i32) -> Result<Vec<Markers>, Status> {
        let request = said::ListMarkersRequest {};
        let answer = self.ask(broker, |mut peer| async move { peer.list_markers(request).await }).await?;
        let marker = |marker: said::GroupMarker| {
            Ok(Marker {
                lane: words::lane(&marker.lane)?,
                group: GroupId::new(&marker.group),
                last: Offset(marker.last),
                open: marker.open,
                intervals: marker.intervals,
            })
        };
        let listed = |listed: said::PartitionMarkers| {
            let markers = listed.markers.into_iter().map(marker).collect::<Result<Vec<_>, Status>>()?;
            Ok((words::place(listed.partition)?, markers))
        };
        answer.partitions.into_iter().map(listed).collect()
    }

    /// What a broker says of committed offsets; `None` of those that are not its own.
    pub async fn round_offsets(
        &self,
        broker: i32,
        group: &GroupId,
        role: Option<(&GroupId, &Lane)>,
        asked: &[(TopicName, PartitionIndex, Option<Offset>)],
    ) -> Result<Vec<Rounded>, Status> {
        let at =
            |(topic, partition, offset): &(TopicName, PartitionIndex, Option<Offset>)| said::CommittedAt {
                topic: topic.to_string(),
                partition: partition.0,
                offset: words::number(*offset),
            };
        let request = said::RoundOffsetsRequest {
            group: group.to_string(),
            base: role.map(|(base, _)| base.to_string()).unwrap_or_default(),
            lane: role.map(|(_, lane)| lane.to_string()).unwrap_or_default(),
            offsets: asked.iter().map(at).collect(),
        };
        let answer = self.ask(broker, |mut peer| async move { peer.round_offsets(request).await }).await?;
        if answer.offsets.len() != asked.len() {
            return Err(Status::internal(format!("broker {broker} answers something else than was asked")));
        }
        let rounded = |rounded: said::RoundedOffset| match rounded.elsewhere {
            true => None,
            false => Some(words::offset(rounded.offset)),
        };
        Ok(answer.offsets.into_iter().map(rounded).collect())
    }
}

/// An error that clients take for "try again in a moment".
pub const TRY_AGAIN: ErrorCode = ErrorCode::CoordinatorLoadInProgress;

fn split(groups: Vec<said::GroupViews>) -> Vec<Vec<said::GroupViews>> {
    let mut parts = Vec::new();
    let (mut part, mut held) = (Vec::new(), 0);
    for group in groups {
        let shares = group.members.iter().flat_map(|member| &member.topics);
        held += 1 + shares.map(|share| 1 + share.partitions.len()).sum::<usize>();
        part.push(group);
        if held >= SHARES_PER_MESSAGE {
            parts.push(std::mem::take(&mut part));
            held = 0;
        }
    }
    if !part.is_empty() {
        parts.push(part);
    }
    parts
}
