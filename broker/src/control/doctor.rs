//! What a person should know of consumers whose lanes cannot work: those that no group speaks for, and those
//! that cannot be told apart.

use std::collections::{BTreeMap, BTreeSet};

use control::v1;
use kafka::{GroupId, TopicName};
use tonic::Status;

use super::Calls;
use super::lanes::not_ready;
use crate::coordinator::Message;

/// The type of groups whose members have partitions, and so views.
const CONSUMER: &str = "consumer";

impl Calls {
    pub(super) async fn examine(&self) -> Result<v1::LaneDoctorResponse, Status> {
        let lanes = &self.broker.lanes;
        let topics = lanes.topics();
        let mut bypassing = Vec::new();
        for listed in self.broker.coordinator.list().await.map_err(not_ready)? {
            if listed.protocol_type == CONSUMER {
                continue;
            }
            let group = listed.group.to_string();
            let row = |(topic, partitions): (TopicName, u32)| v1::BypassingGroup {
                group: group.clone(),
                topic: topic.to_string(),
                partitions,
            };
            bypassing.extend(self.committed_on(&listed.group, &topics).await?.into_iter().map(row));
        }
        bypassing.sort_by(|a, b| (&a.group, &a.topic).cmp(&(&b.group, &b.topic)));
        let reader = |(client_id, topic): (String, TopicName)| v1::GrouplessReader {
            client_id,
            topic: topic.to_string(),
        };
        let alike = |alike: crate::lanes::Alike| v1::LikeNamedGroups {
            client_id: alike.client_id,
            topic: alike.topic.to_string(),
            group: alike.groups.0.to_string(),
            other_group: alike.groups.1.to_string(),
            same_host: alike.same_host,
            stops: alike.stops,
        };
        let mut groupless: Vec<_> = lanes.without_group().into_iter().map(reader).collect();
        groupless.sort_by(|a, b| (&a.client_id, &a.topic).cmp(&(&b.client_id, &b.topic)));
        Ok(v1::LaneDoctorResponse {
            topics: topics.len() as u32,
            bypassing,
            groupless,
            alike: lanes.alike().into_iter().map(alike).collect(),
        })
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
