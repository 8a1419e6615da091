//! What a person should know of consumers whose lanes cannot work: those that no group speaks for, and those
//! that cannot be told apart.

use std::collections::{BTreeMap, BTreeSet};

use control::{peers as said, v1};
use kafka::{GroupId, TopicName};
use tonic::Status;

use super::Calls;
use super::lanes::{incomplete, not_ready};
use crate::coordinator::Message;

/// The type of groups whose members have partitions, and so views.
const CONSUMER: &str = "consumer";

impl Calls {
    pub(super) async fn examine(&self) -> Result<v1::LaneDoctorResponse, Status> {
        let mut topics = self.broker.lanes.topics();
        if let Some(peers) = &self.broker.peers {
            topics.extend(peers.topics_with_lanes().iter().map(|topic| topic.name.clone()));
        }
        let request = said::ExamineRequest { topics: topics.iter().map(|topic| topic.to_string()).collect() };
        let mut all = vec![self.examine_here(&topics).await?];
        if let Some(peers) = &self.broker.peers {
            all.extend(peers.examine(&request).await.map_err(incomplete)?);
        }
        let (mut bypassing, mut groupless) = (BTreeMap::new(), BTreeSet::new());
        for found in all {
            bypassing.extend(found.bypassing.into_iter().map(|b| ((b.group, b.topic), b.partitions)));
            groupless.extend(found.groupless.into_iter().map(|reader| (reader.client_id, reader.topic)));
        }
        let bypassing = bypassing.into_iter();
        let groupless = groupless.into_iter();
        // Every broker is told all views.
        let alike = |alike: crate::lanes::Alike| v1::LikeNamedGroups {
            client_id: alike.client_id,
            topic: alike.topic.to_string(),
            group: alike.groups.0.to_string(),
            other_group: alike.groups.1.to_string(),
            same_host: alike.same_host,
            stops: alike.stops,
        };
        Ok(v1::LaneDoctorResponse {
            topics: topics.len() as u32,
            bypassing: bypassing
                .map(|((group, topic), partitions)| v1::BypassingGroup { group, topic, partitions })
                .collect(),
            groupless: groupless.map(|(client_id, topic)| v1::GrouplessReader { client_id, topic }).collect(),
            alike: self.broker.lanes.alike(&topics).into_iter().map(alike).collect(),
        })
    }

    /// What the groups and the readers of this broker show.
    pub(super) async fn examine_here(
        &self,
        topics: &BTreeSet<TopicName>,
    ) -> Result<said::ExamineResponse, Status> {
        let mut bypassing = Vec::new();
        for listed in self.broker.coordinator.list().await.map_err(not_ready)? {
            if listed.protocol_type == CONSUMER {
                continue;
            }
            let group = listed.group.to_string();
            let row = |(topic, partitions): (TopicName, u32)| said::BypassingGroup {
                group: group.clone(),
                topic: topic.to_string(),
                partitions,
            };
            bypassing.extend(self.committed_on(&listed.group, topics).await?.into_iter().map(row));
        }
        let reader = |(client_id, topic): (String, TopicName)| said::GrouplessReader {
            client_id,
            topic: topic.to_string(),
        };
        let groupless = self.broker.lanes.without_group().into_iter().map(reader).collect();
        Ok(said::ExamineResponse { bypassing, groupless })
    }

    /// On how many partitions of each of `topics` the group has committed.
    async fn committed_on(
        &self,
        group: &GroupId,
        topics: &BTreeSet<TopicName>,
    ) -> Result<BTreeMap<TopicName, u32>, Status> {
        let ask = |reply| Message::FetchOffsets { group: group.clone(), wanted: None, reply };
        let found = self.broker.coordinator.ask(group, ask).await.and_then(|found| found);
        let mut counts = BTreeMap::new();
        for ((topic, _), offset) in found.map_err(not_ready)? {
            if offset.is_some() && topics.contains(&topic) {
                *counts.entry(topic).or_default() += 1;
            }
        }
        Ok(counts)
    }
}
