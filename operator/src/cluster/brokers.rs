//! What is seen of a cluster's brokers: their pods, and what each says of itself and of the cluster when it is asked at its
//! own address. Addresses come from EndpointSlices, as for every other call.

use std::collections::BTreeMap;
use std::time::Duration;

use control::v1;
use futures_util::future::join_all;
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use tokio::time::timeout;

use super::pods;
use super::roll::{Answer, Broker, Held, Pool};
use crate::context::Context;
use crate::crd::BrokerPool;
use crate::failure::Failure;
use crate::names::{EMPTIED, POOL};
use crate::region::Region;

/// Asks every broker that has an address, all at a time.
pub async fn ask(cx: &Context, region: &Region) -> Result<BTreeMap<String, Answer>, Failure> {
    let reach = match region.reach_now(cx).await {
        Ok(reach) => reach,
        // Not made yet: there is nobody to ask either.
        Err(Failure::DataPlane(_)) => return Ok(BTreeMap::new()),
        Err(other) => return Err(other),
    };
    let asked = reach.brokers.iter().map(async |broker| {
        let (pod, address) = (broker.pod.clone()?, &broker.control);
        let said = async {
            let mut client = cx.data_plane.control(address, &reach.identity).await.ok()?;
            client.cluster_status(v1::ClusterStatusRequest {}).await.ok()
        };
        let said = timeout(PATIENCE, said).await.ok().flatten();
        if said.is_none() {
            // Its next life may have this address.
            cx.data_plane.forget(address);
        }
        Some((pod, answer_of(said?.into_inner())))
    });
    Ok(join_all(asked).await.into_iter().flatten().collect())
}

fn answer_of(said: v1::ClusterStatusResponse) -> Answer {
    let held =
        |broker: &v1::BrokerStatus| Held { partitions: broker.partitions, taking_over: broker.taking_over };
    Answer {
        id: said.answering,
        brokers: said.brokers.iter().map(|broker| (broker.id, held(broker))).collect(),
        unowned: said.unowned,
        moving: u32::try_from(said.moving.len()).unwrap_or(u32::MAX),
        draining: said.draining.into_iter().collect(),
    }
}

/// The pods of these pools, with what their brokers said.
pub fn seen(
    pods: &[Pod],
    sets: &BTreeMap<String, StatefulSet>,
    answers: &BTreeMap<String, Answer>,
) -> Vec<Broker> {
    let mut brokers: Vec<Broker> = pods
        .iter()
        .filter_map(|pod| {
            let (name, pool) = (pod.name_any(), pod.labels().get(POOL)?.clone());
            let wanted = sets.get(&pool).and_then(revision);
            let runs = pod.labels().get(REVISION);
            Some(Broker {
                uid: pod.uid().unwrap_or_default(),
                ready: pods::is_ready(pod),
                going: pod.metadata.deletion_timestamp.is_some(),
                overdue: is_overdue(pod),
                outdated: wanted.is_some_and(|wanted| runs != Some(&wanted)),
                answer: answers.get(&name).cloned(),
                pod: name,
                pool,
            })
        })
        .collect();
    brokers.sort_by(|a, b| a.pod.cmp(&b.pod));
    brokers
}

/// The time that a pod has to end is in its deletion's.
fn is_overdue(pod: &Pod) -> bool {
    let end = pod.metadata.deletion_timestamp.as_ref();
    end.is_some_and(|end| jiff::Timestamp::now().as_second() > end.0.as_second() + OVERDUE_SECONDS)
}

/// What the pods of a StatefulSet shall run; none while it has not been looked at since its last change.
pub fn revision(set: &StatefulSet) -> Option<String> {
    let status = set.status.as_ref()?;
    let current = set.metadata.generation == status.observed_generation;
    status.update_revision.clone().filter(|_| current)
}

/// A pool as the plan sees it.
pub fn pool(pool: &BrokerPool, set: Option<&StatefulSet>) -> Pool {
    let remembered = set.and_then(|set| set.annotations().get(EMPTIED).cloned()).unwrap_or_default();
    Pool {
        name: pool.name_any(),
        wanted: pool.spec.replicas.max(0),
        current: set.and_then(|set| set.spec.as_ref()?.replicas),
        emptied: remembered
            .split(',')
            .filter_map(|entry| entry.split_once('='))
            .filter_map(|(pod, id)| Some((pod.to_owned(), id.parse().ok()?)))
            .collect(),
    }
}

/// As [`pool`] reads it.
pub fn remembered(emptied: &BTreeMap<String, i32>) -> String {
    emptied.iter().map(|(pod, id)| format!("{pod}={id}")).collect::<Vec<_>>().join(",")
}

const OVERDUE_SECONDS: i64 = 5;
const REVISION: &str = "controller-revision-hash";
/// Who is silent for longer does not answer.
const PATIENCE: Duration = Duration::from_secs(3);
