//! What the other brokers of a cluster ask of this one. Answers for what is here, never for others.

use control::peers as said;
use control::peers::cut_response::Outcome;
use control::peers::end_lane_request::Step;
use control::peers::tell_views_response::Outcome as Taken;
use kafka::{GroupId, PartitionIndex};
use lane_core::{Cut, CutAnswer, CutKind, CutRefused};
use tonic::{Request, Response, Status};

use super::directory::{LaneObject, LaneSettings};
use super::{BROKER, Calls, allow, status};
use crate::lanes::{Role, Telling, ToldGroup, ToldMember, Untold};
use crate::peers::words;

#[tonic::async_trait]
impl said::Peers for Calls {
    async fn tell_views(
        &self,
        request: Request<said::TellViewsRequest>,
    ) -> Result<Response<said::TellViewsResponse>, Status> {
        allow(&request, &[BROKER])?;
        let request = request.into_inner();
        let telling = Telling {
            life: request.life,
            shard: usize::try_from(request.shard).map_err(|_| Status::invalid_argument("no shard"))?,
            epoch: request.epoch,
            whole: request.whole,
            first: request.first,
            last: request.last,
        };
        let groups = request.groups.iter().map(told_group).collect::<Result<Vec<_>, Status>>()?;
        let outcome = match self.broker.lanes.take_views(telling, &groups) {
            Ok(()) => Taken::Taken,
            Err(Untold::OtherLife) => Taken::OtherLife,
            Err(Untold::OldEpoch) => Taken::OldEpoch,
        };
        Ok(Response::new(said::TellViewsResponse { outcome: outcome.into() }))
    }

    async fn cut(&self, request: Request<said::CutRequest>) -> Result<Response<said::CutResponse>, Status> {
        allow(&request, &[BROKER])?;
        let request = request.into_inner();
        let place = words::place(request.partition)?;
        let kind = if request.activate { CutKind::Activate } else { CutKind::Deactivate };
        let cut = Cut {
            group: GroupId::new(&request.group),
            lane: words::lane(&request.lane)?,
            coordinator_epoch: request.coordinator_epoch,
            previous: words::offset(request.previous),
        };
        // Goes on when the coordinator has gone: a marker that was appended is awaited all the same.
        let mut answer = said::CutResponse { offset: -1, ..said::CutResponse::default() };
        match self.broker.lanes.cut(&place, kind, &cut).await {
            CutAnswer::Failed => answer.set_outcome(Outcome::Failed),
            CutAnswer::Done(at) => {
                answer.set_outcome(Outcome::Done);
                answer.offset = at.0;
            }
            CutAnswer::Refused(CutRefused::Moved { last, open }) => {
                answer.set_outcome(Outcome::Moved);
                answer.offset = words::number(last);
                answer.open = open;
            }
            CutAnswer::Refused(CutRefused::Fenced { known, .. }) => {
                answer.set_outcome(Outcome::Fenced);
                answer.known_epoch = known;
            }
        }
        Ok(Response::new(answer))
    }

    async fn list_markers(
        &self,
        request: Request<said::ListMarkersRequest>,
    ) -> Result<Response<said::ListMarkersResponse>, Status> {
        allow(&request, &[BROKER])?;
        let marker = |marker: crate::peers::Marker| said::GroupMarker {
            group: marker.group.to_string(),
            lane: marker.lane.to_string(),
            last: marker.last.0,
            open: marker.open,
            intervals: marker.intervals,
        };
        let listed = self.broker.lanes.markers().into_iter().map(|(place, markers)| said::PartitionMarkers {
            partition: Some(words::said_place(&place)),
            markers: markers.into_iter().map(marker).collect(),
        });
        Ok(Response::new(said::ListMarkersResponse { partitions: listed.collect() }))
    }

    async fn round_offsets(
        &self,
        request: Request<said::RoundOffsetsRequest>,
    ) -> Result<Response<said::RoundOffsetsResponse>, Status> {
        allow(&request, &[BROKER])?;
        let request = request.into_inner();
        let role = match request.lane.as_str() {
            "" => Role::Baseline,
            lane => Role::Lane { base: GroupId::new(&request.base), lane: words::lane(lane)? },
        };
        let (group, lanes) = (GroupId::new(&request.group), &self.broker.lanes);
        let round = |at: &said::CommittedAt| {
            let (topic, index) = (words::topic(&at.topic)?, PartitionIndex(at.partition));
            let rounded = lanes.round_here(&group, &role, &topic, index, words::offset(at.offset));
            Ok(said::RoundedOffset { elsewhere: rounded.is_none(), offset: words::number(rounded.flatten()) })
        };
        let offsets =
            self.broker.may_wait(|| request.offsets.iter().map(round).collect::<Result<_, Status>>());
        Ok(Response::new(said::RoundOffsetsResponse { offsets: offsets? }))
    }

    async fn judge_topic(
        &self,
        request: Request<said::JudgeTopicRequest>,
    ) -> Result<Response<said::JudgeTopicResponse>, Status> {
        allow(&request, &[BROKER])?;
        self.broker.judge_topic(request.get_ref()).await.map(Response::new)
    }

    async fn follow_lane(
        &self,
        request: Request<said::FollowLaneRequest>,
    ) -> Result<Response<said::FollowLaneResponse>, Status> {
        allow(&request, &[BROKER])?;
        let request = request.into_inner();
        let object = LaneObject {
            name: request.lane,
            port: 0,
            created_ms: request.created_ms,
            deleting: request.deleting,
            settings: LaneSettings::default(),
        };
        let routers = self.directory.followed(&object).await.map_err(status)?.into_iter();
        let routers = routers.map(|router| said::LaneRouter {
            address: router.address,
            late: router.late,
            failure: router.failure.unwrap_or_default(),
        });
        Ok(Response::new(said::FollowLaneResponse { routers: routers.collect() }))
    }

    async fn lane_groups(
        &self,
        request: Request<said::LaneGroupsRequest>,
    ) -> Result<Response<said::LaneGroupsResponse>, Status> {
        allow(&request, &[BROKER])?;
        let lane = words::lane(&request.get_ref().lane)?;
        let groups = self.lane_groups_here(&lane).await?;
        Ok(Response::new(said::LaneGroupsResponse { groups }))
    }

    async fn lane_holdings(
        &self,
        request: Request<said::LaneHoldingsRequest>,
    ) -> Result<Response<said::LaneHoldingsResponse>, Status> {
        allow(&request, &[BROKER])?;
        self.holdings_here(request.get_ref()).await.map(Response::new)
    }

    async fn end_lane(
        &self,
        request: Request<said::EndLaneRequest>,
    ) -> Result<Response<said::EndLaneResponse>, Status> {
        allow(&request, &[BROKER])?;
        let request = request.into_inner();
        let step = Step::try_from(request.step).map_err(|_| Status::invalid_argument("no such step"))?;
        self.end_here(&words::lane(&request.lane)?, step).await.map(Response::new)
    }

    async fn examine(
        &self,
        request: Request<said::ExamineRequest>,
    ) -> Result<Response<said::ExamineResponse>, Status> {
        allow(&request, &[BROKER])?;
        let topics = request.get_ref().topics.iter().map(|topic| words::topic(topic));
        self.examine_here(&topics.collect::<Result<_, _>>()?).await.map(Response::new)
    }
}

fn told_group(said: &said::GroupViews) -> Result<ToldGroup, Status> {
    let member = |member: &said::GroupMember| {
        Ok(ToldMember {
            client_id: member.client_id.clone(),
            host: member.host.clone(),
            principal: words::principal(member.principal.as_ref()),
            partitions: words::partitions(&member.topics)?,
        })
    };
    Ok(ToldGroup {
        group: GroupId::new(&said.group),
        view: words::view(&said.group, &said.base, &said.lane)?,
        members: said.members.iter().map(member).collect::<Result<_, Status>>()?,
    })
}
