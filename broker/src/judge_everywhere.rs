//! Lanes of a topic in a cluster: what its setting says becomes a marker in each of its logs, by the owner.
//!
//! The setting comes first, so that an owner that takes a partition over knows what to append; where lanes
//! are to be turned off, owners are asked before that whether their logs allow it. An owner brings its logs
//! up to the setting whenever it looks; a change is answered when every log follows it.

use std::sync::Arc;
use std::time::Duration;

use control::peers as said;
use kafka::Offset;
use lane_core::Extractors;
use tokio::time::Instant;
use tonic::Status;

use crate::broker::Broker;
use crate::lanes::{SwitchError, switch_one};
use crate::partition::Partition;
use crate::peers::{Covered, Incomplete, Peers, words};
use crate::topic_changes::ChangeError;
use crate::topics::{ConfigChange, Topic};

/// How long a change waits for owners.
const OWNERS_WITHIN: Duration = Duration::from_secs(10);
/// Between two rounds.
const AGAIN: Duration = Duration::from_millis(100);

impl Broker {
    /// A new topic, or new partitions: their owners append what the setting says before they serve.
    pub(crate) async fn judge_new(&self, topic: &Topic) -> Result<(), ChangeError> {
        match topic.settings.lanes {
            true => self.judge_everywhere(topic, false).await,
            false => Ok(()),
        }
    }

    pub(crate) async fn alter_everywhere(
        &self,
        planned: &Topic,
        change: &ConfigChange,
    ) -> Result<Arc<Topic>, ChangeError> {
        let name = planned.name.as_str();
        let before = self.topics.by_name(name);
        let lanes_before = before.as_ref().is_some_and(|topic| topic.settings.lanes);
        if lanes_before && !planned.settings.lanes {
            self.judge_everywhere(planned, true).await?;
        }
        let topic = self.topics.alter(name, change).await?;
        if !lanes_before && !topic.settings.lanes {
            return Ok(topic);
        }
        match self.judge_everywhere(&topic, false).await {
            Ok(()) => Ok(topic),
            // A record of a PPE lane came in between.
            Err(error @ ChangeError::Lanes(_)) => {
                if let Some(before) = before {
                    let back = ConfigChange::Replace(before.overrides.clone());
                    if let Err(error) = self.topics.alter(name, &back).await {
                        tracing::warn!(topic = name, %error, "a setting that its logs refuse stays");
                    }
                }
                Err(error)
            }
            Err(error) => Err(error),
        }
    }

    /// Until every partition judges as the topic's setting says (or may, with `only_check`).
    async fn judge_everywhere(&self, topic: &Topic, only_check: bool) -> Result<(), ChangeError> {
        let Some(peers) = &self.peers else { return Ok(()) };
        let request = said::JudgeTopicRequest {
            topic: topic.name.to_string(),
            topic_id: topic.id.0.to_string(),
            extractors: extractors_of(topic).texts().to_vec(),
            only_check,
        };
        let until = Instant::now() + OWNERS_WITHIN;
        loop {
            let (covered, silent) = self.judge_once(peers, topic, &request).await?;
            let topics = [Arc::new(topic.clone())];
            let missing = match silent {
                Some(silent) => silent,
                None => match peers.missing(&topics, &covered) {
                    None => return Ok(()),
                    Some(missing) => missing,
                },
            };
            if Instant::now() >= until {
                return Err(missing.into());
            }
            tokio::time::sleep(AGAIN).await;
        }
    }

    async fn judge_once(
        &self,
        peers: &Peers,
        topic: &Topic,
        request: &said::JudgeTopicRequest,
    ) -> Result<(Covered, Option<Incomplete>), ChangeError> {
        let mut covered = Covered::new();
        let mut silent = None;
        let others = peers.everybody(|mut peer| {
            let request = request.clone();
            async move { peer.judge_topic(request).await }
        });
        let (here, others) = tokio::join!(self.judge_topic(request), others);
        let all = [(self.identity.broker_id.0, here)].into_iter().chain(others);
        for (broker, answer) in all {
            match answer {
                Ok(answer) if !answer.held.is_empty() => return Err(SwitchError::Held(answer.held).into()),
                Ok(answer) => covered.extend(answer.partitions.iter().map(|index| (topic.id, *index))),
                Err(error) => silent = Some(Incomplete::Broker(broker, error.message().to_owned())),
            }
        }
        Ok((covered, silent))
    }

    /// What the partitions of a topic that are here do, or may do.
    pub(crate) async fn judge_topic(
        &self,
        request: &said::JudgeTopicRequest,
    ) -> Result<said::JudgeTopicResponse, Status> {
        let id = words::topic_id(&request.topic_id)?;
        let wanted = Extractors::parse(&request.extractors)
            .map_err(|error| Status::invalid_argument(error.to_string()))?;
        let mut answer = said::JudgeTopicResponse::default();
        if !request.only_check {
            self.until_set(&request.topic, &wanted).await?;
        }
        let partitions = self.topic_partitions(&request.topic).unwrap_or_default();
        for partition in partitions.iter().filter(|partition| partition.topic_id == id) {
            if request.only_check {
                if wanted.is_empty() && partition.with_fold(|fold| fold.lanes.holds_ppe_or_intervals()) {
                    answer.held = partition.to_string();
                    return Ok(answer);
                }
            } else {
                match self.may_wait(|| switch_one(partition, &wanted)) {
                    Ok(None) => {}
                    Ok(Some(at)) => {
                        self.lanes.lanes_switched();
                        if partition.wait_durable(at.plus(1)).await.is_err() {
                            continue;
                        }
                    }
                    Err(SwitchError::Held(held)) => {
                        answer.held = held;
                        return Ok(answer);
                    }
                    Err(error) => {
                        tracing::debug!(%partition, %error, "the list of extractors is appended later");
                        continue;
                    }
                }
            }
            answer.partitions.push(partition.index.0);
        }
        Ok(answer)
    }

    /// Else what is appended here would be taken back at the next look at the setting.
    async fn until_set(&self, name: &str, wanted: &Extractors) -> Result<(), Status> {
        let mut changes = self.topics.changes();
        let set = || self.topics.by_name(name).is_some_and(|topic| *extractors_of(&topic) == *wanted);
        let heard = async {
            while !set() {
                if changes.changed().await.is_err() {
                    return;
                }
            }
        };
        let late = |_| Status::unavailable("the new setting is not heard of yet");
        tokio::time::timeout(crate::peers::CALL_MAX / 2, heard).await.map_err(late)
    }

    /// Makes a partition here judge as its topic's setting says, if it does not. What is in memory may be
    /// older than the log, so the store is asked before anything is appended.
    pub(crate) async fn judge_as_set(&self, partition: &Arc<Partition>) {
        let agrees = |topic: &Topic| {
            let wanted = extractors_of(topic);
            partition.with_fold(|fold| *fold.lanes.extractors() == *wanted)
        };
        let Some(known) = self.topics.by_id(partition.topic_id) else { return };
        if agrees(&known) {
            return;
        }
        // A log that is empty has not been judged otherwise; what comes later is heard of later.
        let stored = match partition.watermarks().log_end {
            Offset::ZERO => known,
            _ => match self.topics.read(known.name.as_str()).await {
                Ok(Some(stored)) if stored.id == partition.topic_id => stored,
                Ok(_) => return,
                Err(error) => {
                    tracing::debug!(%partition, %error, "whether it has lanes is looked at later");
                    return;
                }
            },
        };
        match self.may_wait(|| switch_one(partition, &extractors_of(&stored))) {
            Ok(None) => {}
            Ok(Some(at)) => {
                tracing::info!(%partition, offset = at.0, lanes = stored.settings.lanes, "lanes switched");
                self.lanes.lanes_switched();
            }
            Err(error) => tracing::warn!(%partition, %error, "the log does not follow the topic's setting"),
        }
    }
}

fn extractors_of(topic: &Topic) -> Arc<Extractors> {
    match topic.settings.lanes {
        true => topic.settings.lane_extractors.clone(),
        false => Arc::new(Extractors::none()),
    }
}
