//! Calls about the cluster: who owns what, a wish to move a partition, a broker that shall be empty.

use std::collections::BTreeMap;

use control::v1;
use tonic::Status;

use super::Calls;
use crate::cluster::{Cluster, Wish};

impl Calls {
    pub(super) fn cluster_status(&self) -> v1::ClusterStatusResponse {
        let identity = &self.broker.identity;
        let mut answer = v1::ClusterStatusResponse {
            cluster_id: identity.cluster_id.as_str().to_owned(),
            controller: identity.broker_id.0,
            answering: identity.broker_id.0,
            ..v1::ClusterStatusResponse::default()
        };
        let Some(cluster) = &self.broker.cluster else {
            answer.brokers.push(self.alone());
            return answer;
        };
        let view = cluster.views.now();
        // For clients: the listener that they use here too.
        let shown = self.broker.listeners.iter().find(|listener| !listener.internal && !listener.raw);
        let address_of = |listeners: &BTreeMap<String, String>| {
            let named = shown.and_then(|shown| listeners.get(&shown.name));
            named.or_else(|| listeners.values().next()).cloned().unwrap_or_default()
        };
        answer.controller = view.controller.unwrap_or(-1);
        answer.draining = view.draining.iter().copied().collect();
        for (id, broker) in &view.brokers {
            let roles: Vec<String> =
                broker.roles.iter().map(|role| format!("{role:?}").to_lowercase()).collect();
            answer.brokers.push(v1::BrokerStatus {
                id: *id,
                address: address_of(&broker.listeners),
                roles: roles.join(","),
                draining: view.draining.contains(id),
                life: broker.life,
                log: (*id == cluster.me).then(|| self.log()).flatten(),
                ..v1::BrokerStatus::default()
            });
        }
        for assigned in view.assignments.values() {
            for (index, partition) in (0..).zip(&assigned.object.partitions) {
                let owner = answer.brokers.iter_mut().find(|broker| partition.owner == Some(broker.id));
                match owner {
                    Some(owner) => {
                        owner.partitions += 1;
                        owner.taking_over += u32::from(!partition.taken);
                    }
                    None => answer.unowned += 1,
                }
                if let Some(to) = partition.moving_to {
                    answer.moving.push(v1::PartitionStatus {
                        topic: assigned.object.topic.clone(),
                        partition: index,
                        owner: partition.owner.unwrap_or(-1),
                        moving_to: to,
                        epoch: partition.epoch,
                    });
                }
            }
        }
        answer
    }

    pub(super) async fn move_partition(&self, request: v1::MovePartitionRequest) -> Result<(), Status> {
        let cluster = self.cluster()?;
        let unknown = || Status::not_found(format!("there is no topic {}", request.topic));
        let topic = self.broker.topics.by_name(&request.topic).ok_or_else(unknown)?;
        let (index, to) = (request.partition, request.to);
        match cluster.wish(&*self.broker.meta, &topic, index, to).await {
            Ok(Wish::Noted) => Ok(()),
            Ok(Wish::NoPartition) => Err(Status::not_found(format!(
                "topic {} has no partition {index}, only 0 to {}",
                topic.name,
                topic.partitions - 1
            ))),
            Ok(Wish::NoBroker) => Err(Status::failed_precondition(format!("broker {to} is not alive"))),
            Ok(Wish::NotTaken) => Err(Status::failed_precondition(
                "the partition is being taken over just now; try again when it is served",
            )),
            Err(error) => Err(Status::unavailable(format!("metadata store: {error}"))),
        }
    }

    pub(super) async fn drain_broker(&self, request: v1::DrainBrokerRequest) -> Result<(), Status> {
        let cluster = self.cluster()?;
        let known = cluster.views.now().brokers.contains_key(&request.broker);
        if request.drain && !known {
            return Err(Status::failed_precondition(format!("broker {} is not alive", request.broker)));
        }
        let drained = cluster.drain(&*self.broker.meta, request.broker, request.drain).await;
        drained.map_err(|error| Status::unavailable(format!("metadata store: {error}")))
    }

    fn cluster(&self) -> Result<&Cluster, Status> {
        let alone = || Status::failed_precondition("this broker is alone: it has no cluster");
        self.broker.cluster.as_deref().ok_or_else(alone)
    }

    fn alone(&self) -> v1::BrokerStatus {
        let address = self.broker.listeners.iter().find(|listener| !listener.internal);
        v1::BrokerStatus {
            id: self.broker.identity.broker_id.0,
            address: address
                .map(|l| format!("{}:{}", l.advertised_host, l.advertised_port))
                .unwrap_or_default(),
            roles: "broker,coordinator,controller".to_owned(),
            life: self.broker.identity.epoch.0.max(0) as u64 + 1,
            partitions: self.broker.all_partitions().len() as u32,
            ..v1::BrokerStatus::default()
        }
    }

    fn log(&self) -> Option<v1::LogStatus> {
        let stats = self.broker.cluster.as_ref()?.log_stats()?;
        Some(v1::LogStatus {
            bytes: stats.log_bytes,
            memory_bytes: stats.memory_bytes,
            flushes: stats.flushes,
            objects: stats.objects_written,
        })
    }
}
