//! What statuses say of a cluster and its pools, from what was seen. `kubectl get` is read by people: each line is true at
//! the moment at which it was written, and a broker is named by the id that it reports itself.

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use kube::runtime::events::EventType;

use super::Seen;
use super::pods;
use super::roll::{Decision, safety};
use crate::conditions::{Status, Verdict, after};
use crate::context::Context;
use crate::crd::{BrokerCluster, BrokerCounts, BrokerPool, BrokerPoolStatus, PoolBroker};
use crate::failure::Failure;
use crate::names::{CLUSTER, COMPONENT, POOL};
use crate::region::Region;

/// Says of a pool how it stands; true while it is on its way. `known` is whether its StatefulSet is as it was read.
pub async fn pool(
    cx: &Context,
    region: &Region,
    pool: &BrokerPool,
    seen: &Seen,
    known: bool,
    decision: &Decision,
) -> Result<bool, Failure> {
    let name = pool.name_any();
    let (pods, brokers) = (&seen.pods, &seen.brokers);
    let mut own: Vec<Pod> =
        pods.iter().filter(|pod| pod.labels().get(POOL) == Some(&name)).cloned().collect();
    own.sort_by_key(|pod| pod.name_any());
    let of = |pod: &Pod| brokers.iter().find(|broker| broker.pod == pod.name_any());
    let emptied = decision.emptied.get(&name).filter(|emptied| !emptied.is_empty());
    let mut status = pool.status.clone().unwrap_or_default();
    status.observed_generation = pool.metadata.generation;
    status.replicas = count(own.len());
    status.ready_replicas = count(own.iter().filter(|pod| pods::is_ready(pod)).count());
    status.selector = format!("{CLUSTER}={},{COMPONENT}=broker,{POOL}={name}", region.names.cluster);
    status.brokers = own
        .iter()
        .map(|pod| {
            let answer = of(pod).and_then(|broker| broker.answer.as_ref());
            PoolBroker {
                pod: pod.name_any(),
                id: answer.map(|answer| answer.id),
                node: pod.spec.as_ref().and_then(|spec| spec.node_name.clone()),
                ready: pods::is_ready(pod),
                draining: answer.is_some_and(|answer| answer.draining.contains(&answer.id)),
            }
        })
        .collect();
    let wanted = pool.spec.replicas;
    let settled = known
        && emptied.is_none()
        && (status.replicas, status.ready_replicas) == (wanted, wanted)
        // What waits for a person is not on its way.
        && own.iter().all(|pod| of(pod).is_some_and(|broker| (!broker.outdated || decision.waits) && !broker.going));
    let text = format!("{} of {wanted} brokers are ready", status.ready_replicas);
    let verdicts = match (settled, pods::trouble(&own, &seen.said)) {
        (true, _) => [Verdict::yes("Ready", "Serving", text), Verdict::no("Progressing", "Settled", "")],
        (false, Some((reason, why))) => {
            [Verdict::no("Ready", reason, why), Verdict::yes("Progressing", reason, text)]
        }
        (false, None) => {
            let own = decision.plan.iter().find(|line| line.contains(&format!(" {name}")));
            let text = own.cloned().unwrap_or(text);
            [Verdict::no("Ready", "Updating", text.clone()), Verdict::yes("Progressing", "Updating", text)]
        }
    };
    status.conditions = after(&status.conditions, &verdicts, pool.metadata.generation);
    cx.status::<BrokerPool, BrokerPoolStatus>(pool, pool.status.as_ref(), &status).await?;
    Ok(!settled)
}

pub fn counts(pools: &[BrokerPool], pods: &[Pod]) -> BrokerCounts {
    let ready = count(pods.iter().filter(|pod| pods::is_ready(pod)).count());
    let total = pools.iter().map(|pool| pool.spec.replicas).sum();
    BrokerCounts { ready, total, summary: format!("{ready}/{total}") }
}

/// Of a cluster: whether it is on its way, whether its data are safe, whether it is ready.
pub fn verdicts(
    pools: &[BrokerPool],
    counts: &BrokerCounts,
    seen: &Seen,
    progressing: bool,
    plan: &[String],
) -> Vec<Verdict> {
    let brief = format!("{} brokers are ready", counts.summary);
    let way = plan.first().cloned().unwrap_or_else(|| brief.clone());
    let mut verdicts = vec![match progressing {
        true => Verdict::yes("Progressing", "Updating", way.clone()),
        false if !plan.is_empty() => Verdict::yes("Progressing", WAITING, way.clone()),
        false => Verdict::no("Progressing", "Settled", ""),
    }];
    verdicts.push(match safety(&seen.brokers) {
        (Some(true), reason, text) => Verdict::yes("DataSafe", reason, text),
        (Some(false), reason, text) => Verdict::no("DataSafe", reason, text),
        (None, reason, text) => Verdict::unknown("DataSafe", reason, text),
    });
    verdicts.push(if pools.is_empty() {
        Verdict::no("Ready", "NoPool", "no BrokerPool names this cluster in spec.clusterRef")
    } else if let Some((reason, text)) = pods::trouble(&seen.pods, &seen.said) {
        Verdict::no("Ready", reason, text)
    } else if counts.total > 0 && counts.ready >= counts.total && !progressing {
        Verdict::yes("Ready", "Serving", brief)
    } else {
        Verdict::no("Ready", if progressing { "Updating" } else { "Starting" }, way)
    });
    verdicts
}

/// An Event when the reason of Ready changes, and one for each step of a plan that is new.
pub async fn events(cx: &Context, cluster: &BrokerCluster, verdicts: &[Verdict], plan: &[String]) {
    let before = cluster.status.clone().unwrap_or_default();
    for line in plan.iter().filter(|line| !before.plan.contains(line)) {
        // Events of one action are one, with the words of the first.
        let action: String = line.chars().take(ACTION_CHARS_MAX).collect();
        cx.event(cluster, EventType::Normal, "Plan", &action, line.clone()).await;
    }
    let Some(ready) = verdicts.iter().find(|verdict| verdict.type_ == "Ready") else { return };
    let was = before.conditions.iter().find(|was| was.type_ == "Ready");
    if was.is_some_and(|was| was.reason == ready.reason) {
        return;
    }
    let kind = if ready.status == Status::True { EventType::Normal } else { EventType::Warning };
    cx.event(cluster, kind, ready.reason, "Reconcile", ready.message.clone()).await;
}

fn count(length: usize) -> i32 {
    i32::try_from(length).unwrap_or(i32::MAX)
}

/// Of a plan that a person must approve, or carry out.
pub const WAITING: &str = "WaitsForPerson";
const ACTION_CHARS_MAX: usize = 128;
