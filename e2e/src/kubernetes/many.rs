//! A cluster of many brokers in a region, on etcd and S3: made, asked, and judged by what its pods did.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::{Kubectl, Region, Stores, Story, condition, manifests, wait_for, with_report};
use crate::process::binary;

/// BrokerCluster and BrokerPool `east` with three brokers and Topic `orders` with six partitions, in namespace `sealane`.
pub struct Many {
    pub region: Region,
    pub stores: Stores,
}

impl Many {
    /// Installs the operator and waits until the brokers serve. Nodes that are to have brokers have joined already.
    pub fn rise(region: Region) -> Result<Many> {
        Many::rise_on(region, Stores::start()?)
    }

    pub fn rise_on(region: Region, stores: Stores) -> Result<Many> {
        Many::rise_of(region, stores, &binary()?)
    }

    /// Operator and brokers are of this build.
    pub fn rise_of(region: Region, stores: Stores, program: &Path) -> Result<Many> {
        let many = Many { region, stores };
        with_report(&many.region, || {
            many.region.run_operator_of(program)?;
            let kubectl = many.kubectl();
            kubectl.apply(&many.objects()?)?;
            many.ready()?;
            kubectl.wait_condition("sealane", "topic.sealane.io/orders", "Ready", "True").map(drop)
        })?;
        Ok(many)
    }

    /// The namespace of the example, with the operator let in, and what is in it.
    fn objects(&self) -> Result<String> {
        let example = fs::read_to_string(manifests().join("examples/one-region.yaml"))?;
        let (place, _) =
            example.split_once("apiVersion: sealane.io").context("the example has its place first")?;
        Ok(format!(
            "{place}{}---\napiVersion: sealane.io/v1alpha1\nkind: BrokerCluster\nmetadata: {{name: east, namespace: sealane}}\n\
             spec:\n  region: east\n{}  config: {{cluster.lease_ms: \"3000\"}}\n  listeners:\n  \
             - {{name: plain, port: 9092}}\n  \
             - {{name: outside, port: 9192, type: NodePort, nodePort: 30092, insecure: true}}\n---\n\
             apiVersion: sealane.io/v1alpha1\nkind: BrokerPool\nmetadata: {{name: east, namespace: sealane}}\n\
             spec: {{clusterRef: {{name: east}}, replicas: 3}}\n---\n\
             apiVersion: sealane.io/v1alpha1\nkind: Topic\nmetadata: {{name: orders, namespace: sealane}}\n\
             spec: {{clusterRef: {{name: east}}, partitions: 6}}\n",
            self.stores.secrets("sealane"),
            self.stores.spec()
        ))
    }

    pub fn kubectl(&self) -> &Kubectl {
        self.region.kubectl()
    }

    /// For clients outside.
    pub fn bootstrap(&self) -> String {
        format!("{}:30092", self.region.address())
    }

    pub fn ready(&self) -> Result<()> {
        self.kubectl().wait_condition("sealane", "brokercluster/east", "Ready", "True")?;
        self.kubectl().wait_condition("sealane", "brokercluster/east", "DataSafe", "True").map(drop)
    }

    pub fn patch(&self, change: &str) -> Result<()> {
        let patch = ["patch", "-n", "sealane", "brokercluster/east", "--type=merge", "-p", change];
        self.kubectl().run(&patch).map(drop)
    }

    /// A setting that brokers must begin anew for: each does once, never two at a time, and comes back as who it was.
    pub fn restart_each(&self, pods: &Story, first: &BTreeMap<String, i64>) -> Result<()> {
        self.patch(r#"{"spec":{"config":{"connections_max":"2000"}}}"#)?;
        self.kubectl().wait_condition("sealane", "brokercluster/east", "Progressing", "True")?;
        self.ready()?;
        let told = pods.told()?;
        ensure!(lives(&told).len() == 2 * first.len(), "each pod began anew once: {:?}", lives(&told));
        ensure!(fewest_ready(&told, first.len()) == first.len() - 1, "two were away at a time");
        ensure!(self.named_as_they_say(first.len())? == *first, "a restarted broker is another one");
        Ok(())
    }

    pub fn scale(&self, replicas: usize) -> Result<()> {
        let replicas = format!("--replicas={replicas}");
        self.kubectl().run(&["scale", "-n", "sealane", "brokerpool/east", &replicas]).map(drop)
    }

    /// Each broker of the pools is named by an id, and these are the brokers that the cluster itself has, none kept empty. By
    /// pod.
    pub fn named_as_they_say(&self, count: usize) -> Result<BTreeMap<String, i64>> {
        wait_for("every broker by its id", || {
            let named: BTreeMap<String, i64> =
                self.kubectl().list("sealane", "brokerpools")?.iter().flat_map(ids).collect();
            let mut said = BTreeMap::new();
            for pod in named.keys() {
                let status = self.kubectl().cluster_status("sealane", "east", pod)?;
                said.insert(pod.clone(), i64::from(status.answering));
                ensure!(status.brokers.len() == count && status.draining.is_empty(), "{status:?}");
            }
            ensure!(named.len() == count && said == named, "named {named:?}, they say {said:?}");
            Ok(Some(named))
        })
    }

    /// Waits until something came to every broker: else the end of one would show nothing.
    pub fn everybody_owns_something(&self) -> Result<()> {
        wait_for("partitions on every broker", || {
            let status = self.kubectl().cluster_status("sealane", "east", "east-0")?;
            let idle = status.brokers.iter().find(|broker| broker.partitions == 0);
            ensure!(idle.is_none(), "one is idle: {idle:?}");
            Ok(Some(()))
        })
    }

    /// What the condition Ready of the cluster says must come to hold `text`.
    pub fn says(&self, text: &str) -> Result<()> {
        wait_for(&format!("the cluster to say {text:?}"), || {
            let cluster = self.kubectl().object("sealane", "brokercluster/east")?;
            let told =
                format!("{} {}", cluster["status"]["plan"], condition(&cluster, "Ready").unwrap_or_default());
            ensure!(told.contains(text), "it says {told}");
            Ok(Some(()))
        })
    }

    /// Nodes of the brokers, by pod.
    pub fn nodes(&self) -> Result<BTreeMap<String, String>> {
        let pods = self.kubectl().list("sealane", "pods")?;
        let node = |pod: &Value| Some((text(&pod["metadata"]["name"])?, text(&pod["spec"]["nodeName"])?));
        Ok(pods.iter().filter(|pod| is_broker(pod)).filter_map(node).collect())
    }
}

fn text(value: &Value) -> Option<String> {
    value.as_str().map(str::to_owned)
}

/// Broker ids by pod, as a pool's status names them.
pub fn ids(pool: &Value) -> BTreeMap<String, i64> {
    let brokers = pool["status"]["brokers"].as_array().into_iter().flatten();
    brokers.filter_map(|broker| Some((text(&broker["pod"])?, broker["id"].as_i64()?))).collect()
}

fn is_broker(pod: &Value) -> bool {
    pod["metadata"]["labels"]["app.kubernetes.io/component"] == "broker"
}

fn is_ready(pod: &Value) -> bool {
    pod["metadata"]["deletionTimestamp"].is_null()
        && condition(pod, "Ready").is_some_and(|ready| ready["status"] == "True")
}

/// Follows pods through their story: how few brokers were ready at any moment since so many were.
pub fn fewest_ready(told: &[(String, Value)], from: usize) -> usize {
    let mut now: BTreeMap<String, bool> = BTreeMap::new();
    let (mut fewest, mut whole) = (usize::MAX, false);
    for (type_, pod) in told.iter().filter(|(_, pod)| is_broker(pod)) {
        let name = text(&pod["metadata"]["name"]).unwrap_or_default();
        now.insert(name, type_ != "DELETED" && is_ready(pod));
        let ready = now.values().filter(|ready| **ready).count();
        whole |= ready >= from;
        if whole {
            fewest = fewest.min(ready);
        }
    }
    fewest
}

/// Pods of brokers that began, by their identity.
pub fn lives(told: &[(String, Value)]) -> BTreeSet<String> {
    told.iter()
        .filter(|(_, pod)| is_broker(pod))
        .filter_map(|(_, pod)| text(&pod["metadata"]["uid"]))
        .collect()
}
