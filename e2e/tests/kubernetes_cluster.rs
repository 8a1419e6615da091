//! Clusters of many brokers on a real node, on etcd and S3: they rise, serve clients outside, are restarted and scaled under
//! load, and lose nothing. What `kubectl get` shows meanwhile is recorded whole and judged.

#![cfg(feature = "kubernetes")]

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, ensure};
use e2e::kubernetes::{Kubectl, Load, Region, Stores, Story, condition, manifests, wait_for, with_report};
use e2e::process::binary;
use serde_json::Value;

/// The namespace of the example, with the operator let in, and three brokers in it.
fn objects(stores: &Stores) -> Result<String> {
    let example = std::fs::read_to_string(manifests().join("examples/one-region.yaml"))?;
    let (place, _) =
        example.split_once("apiVersion: sealane.io").context("the example has its place first")?;
    Ok(format!(
        "{place}{}---\napiVersion: sealane.io/v1alpha1\nkind: BrokerCluster\nmetadata: {{name: east, namespace: sealane}}\n\
         spec:\n  region: east\n{}  config: {{cluster.lease_ms: \"3000\"}}\n  listeners:\n  - {{name: plain, port: 9092}}\n  \
         - {{name: outside, port: 9192, type: NodePort, nodePort: 30092, insecure: true}}\n---\n\
         apiVersion: sealane.io/v1alpha1\nkind: BrokerPool\nmetadata: {{name: east, namespace: sealane}}\n\
         spec: {{clusterRef: {{name: east}}, replicas: 3}}\n---\n\
         apiVersion: sealane.io/v1alpha1\nkind: Topic\nmetadata: {{name: orders, namespace: sealane}}\n\
         spec: {{clusterRef: {{name: east}}, partitions: 6}}\n",
        Stores::secret("sealane"),
        stores.spec()
    ))
}

/// A region with three brokers that serve.
fn risen() -> Result<(Region, Stores)> {
    let region = Region::with_node()?;
    let stores = Stores::start()?;
    with_report(&region, || {
        region.give_image(&binary()?, "0.1.0")?;
        let kubectl = region.kubectl();
        kubectl.run(&["apply", "-k", &manifests().join("install").display().to_string()])?;
        kubectl.apply(&objects(&stores)?)?;
        ready(kubectl)?;
        kubectl.wait_condition("sealane", "topic.sealane.io/orders", "Ready", "True").map(drop)
    })?;
    Ok((region, stores))
}

fn ready(kubectl: &Kubectl) -> Result<()> {
    kubectl.wait_condition("sealane", "brokercluster/east", "Ready", "True")?;
    kubectl.wait_condition("sealane", "brokercluster/east", "DataSafe", "True").map(drop)
}

/// Broker ids by pod, as the pool's status names them.
fn ids(pool: &Value) -> BTreeMap<String, i64> {
    let brokers = pool["status"]["brokers"].as_array().into_iter().flatten();
    brokers.filter_map(|broker| Some((broker["pod"].as_str()?.to_owned(), broker["id"].as_i64()?))).collect()
}

/// Each broker of the pool is named by an id, and these are the brokers that the cluster itself has, none kept empty.
fn named_as_they_say(kubectl: &Kubectl, count: usize) -> Result<BTreeMap<String, i64>> {
    wait_for("every broker by its id", || {
        let named = ids(&kubectl.object("sealane", "brokerpool/east")?);
        let mut said = BTreeMap::new();
        for pod in named.keys() {
            let status = kubectl.cluster_status("sealane", "east", pod)?;
            said.insert(pod.clone(), i64::from(status.answering));
            ensure!(status.brokers.len() == count && status.draining.is_empty(), "{status:?}");
        }
        ensure!(named.len() == count && said == named, "named {named:?}, they say {said:?}");
        Ok(Some(named))
    })
}

fn is_ready(pod: &Value) -> bool {
    pod["metadata"]["deletionTimestamp"].is_null()
        && condition(pod, "Ready").is_some_and(|ready| ready["status"] == "True")
}

/// Follows the pods through their story: how few were ready at any moment between two at which `from` were.
fn fewest_ready(told: &[(String, Value)], from: usize) -> usize {
    let mut now: BTreeMap<String, bool> = BTreeMap::new();
    let (mut fewest, mut whole) = (usize::MAX, false);
    for (type_, pod) in told {
        let labels = &pod["metadata"]["labels"];
        if labels["app.kubernetes.io/component"] != "broker" {
            continue;
        }
        let name = pod["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        now.insert(name, type_ != "DELETED" && is_ready(pod));
        let ready = now.values().filter(|ready| **ready).count();
        whole |= ready >= from;
        if whole {
            fewest = fewest.min(ready);
        }
    }
    fewest
}

/// Pods that began, by their identity.
fn lives(told: &[(String, Value)]) -> BTreeSet<String> {
    let brokers =
        told.iter().filter(|(_, pod)| pod["metadata"]["labels"]["app.kubernetes.io/component"] == "broker");
    brokers.filter_map(|(_, pod)| Some(pod["metadata"]["uid"].as_str()?.to_owned())).collect()
}

fn patch(kubectl: &Kubectl, change: &str) -> Result<()> {
    kubectl.run(&["patch", "-n", "sealane", "brokercluster/east", "--type=merge", "-p", change]).map(drop)
}

#[test]
fn three_brokers_are_restarted_and_scaled_under_load_and_lose_nothing() -> Result<()> {
    let (region, _stores) = risen()?;
    with_report(&region, || {
        let kubectl = region.kubectl();
        let bootstrap = format!("{}:30092", region.address());
        let first = named_as_they_say(kubectl, 3)?;
        let pods = Story::of(kubectl, "sealane", "pods")?;
        let (pools, clusters) =
            (Story::of(kubectl, "sealane", "bpool")?, Story::of(kubectl, "sealane", "bc")?);
        let load = Load::start(&bootstrap, "orders")?;
        load.until_more(500)?;

        patch(kubectl, r#"{"spec":{"config":{"connections_max":"2000"}}}"#)?;
        kubectl.wait_condition("sealane", "brokercluster/east", "Progressing", "True")?;
        ready(kubectl)?;
        ensure!(lives(&pods.told()?).len() == 6, "each pod began anew once: {:?}", lives(&pods.told()?));
        ensure!(fewest_ready(&pods.told()?, 3) == 2, "two were away at a time");
        ensure!(named_as_they_say(kubectl, 3)? == first, "a restarted broker is another one");
        load.until_more(500)?;

        kubectl.run(&["scale", "-n", "sealane", "brokerpool/east", "--replicas=5"])?;
        kubectl.wait_condition("sealane", "brokerpool/east", "Ready", "True")?;
        let five = named_as_they_say(kubectl, 5)?;
        everybody_owns_something(kubectl)?;
        load.until_more(500)?;

        kubectl.run(&["scale", "-n", "sealane", "brokerpool/east", "--replicas=3"])?;
        kubectl.wait_condition("sealane", "brokerpool/east", "Ready", "True")?;
        ready(kubectl)?;
        ensure!(named_as_they_say(kubectl, 3)? == first, "others than these were kept");
        load.until_more(500)?;

        were_emptied_first(&pools.told()?, &five)?;
        tells_the_truth(&clusters.told()?)?;
        let lines = load.judge()?;
        println!("{lines} records, each there once; plans: {:?}", plans(&clusters.told()?));
        each_step_is_an_event(kubectl, &five)?;
        region.judge_logs()
    })
}

/// What came to the newcomers: else their end would show nothing.
fn everybody_owns_something(kubectl: &Kubectl) -> Result<()> {
    wait_for("partitions on every broker", || {
        let status = kubectl.cluster_status("sealane", "east", "east-0")?;
        let idle = status.brokers.iter().find(|broker| broker.partitions == 0);
        ensure!(idle.is_none(), "one is idle: {idle:?}");
        Ok(Some(()))
    })
}

/// Both brokers that left were shown as draining, by their ids, the last first, and no other was.
fn were_emptied_first(pools: &[(String, Value)], five: &BTreeMap<String, i64>) -> Result<()> {
    let mut drained: Vec<i64> = Vec::new();
    for (_, pool) in pools {
        for broker in pool["status"]["brokers"].as_array().into_iter().flatten() {
            if let Some(id) =
                broker["id"].as_i64().filter(|id| broker["draining"] == true && !drained.contains(id))
            {
                drained.push(id);
            }
        }
    }
    let wanted: Vec<i64> = ["east-4", "east-3"].iter().filter_map(|pod| five.get(*pod).copied()).collect();
    ensure!(drained == wanted, "drained were {drained:?}, not {wanted:?}");
    Ok(())
}

/// Every line of a plan that was shown.
fn plans(clusters: &[(String, Value)]) -> BTreeSet<String> {
    let lines =
        clusters.iter().flat_map(|(_, cluster)| cluster["status"]["plan"].as_array().into_iter().flatten());
    lines.filter_map(|line| Some(line.as_str()?.to_owned())).collect()
}

/// Whenever a cluster was shown as ready, all of its brokers were and nothing was planned.
fn tells_the_truth(clusters: &[(String, Value)]) -> Result<()> {
    for (_, cluster) in clusters {
        let (status, plan) = (&cluster["status"], &cluster["status"]["plan"]);
        if condition(cluster, "Ready").is_some_and(|ready| ready["status"] == "True") {
            let brokers = &status["brokers"];
            ensure!(plan.is_null() && brokers["ready"].as_i64() >= brokers["total"].as_i64(), "{status}");
        }
    }
    let plans = plans(clusters);
    let said = [
        "pod east-2 is restarted now",
        "pod east-1 is to be restarted: pod east-2 is not ready",
        "pod east-4, broker",
        "pod east-3, broker",
    ];
    for wanted in said {
        ensure!(plans.iter().any(|line| line.contains(wanted)), "no plan said {wanted:?}: {plans:?}");
    }
    Ok(())
}

/// `kubectl describe` names every restart, and every broker that was emptied.
fn each_step_is_an_event(kubectl: &Kubectl, five: &BTreeMap<String, i64>) -> Result<()> {
    let described = kubectl.run(&["describe", "-n", "sealane", "brokercluster", "east"])?;
    let mut wanted: Vec<String> = (0..3).map(|place| format!("pod east-{place} begins anew")).collect();
    wanted.extend(
        ["east-3", "east-4"].iter().filter_map(|pod| Some(format!("broker {} gives away", five.get(*pod)?))),
    );
    for text in wanted {
        ensure!(described.contains(&text), "no Event says {text:?}:\n{described}");
    }
    Ok(())
}
