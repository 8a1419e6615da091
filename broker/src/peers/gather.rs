//! Questions to all brokers at once, and whether the answers speak for every partition.
//!
//! Partitions move while brokers are asked. An answer names what its broker owned; what nobody named is
//! asked for again, so that nothing is left out without a word.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use control::{PeerClient, peers as said};
use futures_util::future::join_all;
use kafka::{TopicId, TopicName};
use tonic::{Response, Status};

use super::{CALL_MAX, Markers, Peers};
use crate::topics::Topic;

/// Partitions that nobody has answered for.
#[derive(Debug, thiserror::Error)]
pub enum Incomplete {
    #[error("broker {0} does not answer ({1}); try again")]
    Broker(i32, String),
    #[error("partition {0}-{1} is being taken over; try again")]
    Partition(TopicName, i32),
}

/// What somebody answered for.
pub type Covered = BTreeSet<(TopicId, i32)>;

impl Peers {
    /// Calls every other broker that is alive.
    pub async fn everybody<T, F>(&self, call: impl Fn(PeerClient) -> F) -> Vec<(i32, Result<T, Status>)>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        self.everybody_within(CALL_MAX, call).await
    }

    async fn everybody_within<T, F>(
        &self,
        patience: Duration,
        call: impl Fn(PeerClient) -> F,
    ) -> Vec<(i32, Result<T, Status>)>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        let asked = self.others().into_iter();
        let asked = asked.map(|(broker, _)| (broker, self.ask_within(patience, broker, &call)));
        join_all(asked.map(|(broker, asked)| async move { (broker, asked.await) })).await
    }

    /// The markers of all logs, `here` among them; false if some could not be asked.
    pub async fn all_markers(&self, here: Vec<Markers>) -> (Vec<Markers>, bool) {
        let topics = self.topics_with_lanes();
        let mut all = here;
        if topics.is_empty() {
            return (all, true);
        }
        let asked = self.others().into_iter();
        let asked = asked.map(|(broker, _)| async move { (broker, self.list_markers(broker).await) });
        let mut whole = true;
        for (broker, listed) in join_all(asked).await {
            match listed {
                Ok(mut listed) => all.append(&mut listed),
                Err(error) => {
                    tracing::debug!(broker, %error, "the markers of a broker are asked for again");
                    whole = false;
                }
            }
        }
        let covered = all.iter().map(|(place, _)| (place.topic_id, place.index.0)).collect();
        (all, whole && self.missing(&topics, &covered).is_none())
    }

    /// The first partition of `topics` that is not covered.
    pub fn missing(&self, topics: &[Arc<Topic>], covered: &Covered) -> Option<Incomplete> {
        topics.iter().find_map(|topic| {
            let missing = (0..topic.partitions).find(|index| !covered.contains(&(topic.id, *index)))?;
            Some(Incomplete::Partition(topic.name.clone(), missing))
        })
    }
}

impl Peers {
    /// Every other broker and its lane-routers have followed a change of a lane.
    pub async fn follow_lane(
        &self,
        lane: &str,
        created_ms: i64,
        deleting: bool,
    ) -> Result<Vec<said::LaneRouter>, Incomplete> {
        let request = said::FollowLaneRequest { lane: lane.to_owned(), created_ms, deleting };
        let asked = self.everybody_within(CHANGE_MAX, |mut peer| {
            let request = request.clone();
            async move { peer.follow_lane(request).await }
        });
        Ok(all(asked.await)?.into_iter().flat_map(|answer| answer.routers).collect())
    }

    pub async fn lane_groups(&self, lane: &str) -> Result<Vec<said::LaneGroup>, Incomplete> {
        let request = said::LaneGroupsRequest { lane: lane.to_owned() };
        let asked = self.everybody(|mut peer| {
            let request = request.clone();
            async move { peer.lane_groups(request).await }
        });
        Ok(all(asked.await)?.into_iter().flat_map(|answer| answer.groups).collect())
    }

    pub async fn lane_holdings(
        &self,
        request: &said::LaneHoldingsRequest,
    ) -> Result<Vec<said::LaneHoldingsResponse>, Incomplete> {
        let asked = self.everybody_within(CHANGE_MAX, |mut peer| {
            let request = request.clone();
            async move { peer.lane_holdings(request).await }
        });
        all(asked.await)
    }

    pub async fn end_lane(
        &self,
        request: &said::EndLaneRequest,
    ) -> Result<Vec<said::EndLaneResponse>, Incomplete> {
        let asked = self.everybody_within(CHANGE_MAX, |mut peer| {
            let request = request.clone();
            async move { peer.end_lane(request).await }
        });
        all(asked.await)
    }

    pub async fn examine(
        &self,
        request: &said::ExamineRequest,
    ) -> Result<Vec<said::ExamineResponse>, Incomplete> {
        let asked = self.everybody(|mut peer| {
            let request = request.clone();
            async move { peer.examine(request).await }
        });
        all(asked.await)
    }
}

/// How long a call may take that waits for lane-routers or for cuts.
const CHANGE_MAX: Duration = Duration::from_secs(25);

/// All answers, or the first broker that gave none.
fn all<T>(answers: Vec<(i32, Result<T, Status>)>) -> Result<Vec<T>, Incomplete> {
    let each = answers.into_iter().map(|(broker, answer)| {
        answer.map_err(|status| Incomplete::Broker(broker, status.message().to_owned()))
    });
    each.collect()
}
