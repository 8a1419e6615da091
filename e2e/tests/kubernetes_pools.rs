//! Pools of one cluster that come and go under load, on an etcd that speaks TLS: a deleted pool gives away what it owns
//! before its pods go, by the ids that its brokers report; and a twin whose operator asks nobody takes brokers away that
//! are needed.

#![cfg(feature = "kubernetes")]

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use e2e::kubernetes::{
    Load, Many, Region, Stores, Story, condition, fewest_ready, ids, lives, wait_for, with_report,
};
use e2e::stores::s3::S3;
use serde_json::Value;

#[test]
fn a_deleted_pool_is_emptied_first_and_a_twin_that_asks_nobody_takes_every_broker_away() -> Result<()> {
    let region = Region::with_node()?;
    let many = Many::rise_on(region, Stores::start_tls()?)?;
    with_report(&many.region, || {
        let kubectl = many.kubectl();
        let first = many.named_as_they_say(3)?;
        let load = Load::start(&many.bootstrap(), "orders")?;
        kubectl.apply(
            "apiVersion: sealane.io/v1alpha1\nkind: BrokerPool\nmetadata: {name: spare, namespace: sealane}\n\
             spec: {clusterRef: {name: east}, replicas: 2}\n",
        )?;
        kubectl.wait_condition("sealane", "brokerpool/spare", "Ready", "True")?;
        let all = many.named_as_they_say(5)?;
        let spare = ids(&kubectl.object("sealane", "brokerpool/spare")?);
        // Whoever took a pod's place for a broker's id would empty others.
        ensure!(spare.iter().all(|(pod, id)| !pod.ends_with(&format!("-{id}"))), "ids are places: {spare:?}");
        ensure!(first.iter().all(|(pod, id)| all.get(pod) == Some(id)), "{first:?} became {all:?}");
        many.everybody_owns_something()?;
        load.until_more(300)?;

        let (pods, pools) = (Story::of(kubectl, "sealane", "pods")?, Story::of(kubectl, "sealane", "bpool")?);
        kubectl.run(&["delete", "-n", "sealane", "brokerpool/spare", "--wait=false"])?;
        many.says("to be emptied and removed")?;
        kubectl.wait_gone("sealane", "brokerpool/spare")?;
        many.ready()?;
        ensure!(many.named_as_they_say(3)? == first, "others than these were kept");
        were_emptied(&pools.told()?, &spare.values().copied().collect())?;
        ensure!(fewest_ready(&pods.told()?, 3) >= 3, "one of those that stay was away");
        load.until_more(300)?;
        println!("{} records, each there once", load.judge()?);

        a_bucket_that_denies_is_told_and_healed_when_it_does_not(&many)?;
        the_twin_takes_every_broker_away(&many)?;
        many.region.judge_logs()
    })
}

/// Both were shown as draining by their ids, and nobody else was.
fn were_emptied(told: &[(String, Value)], wanted: &BTreeSet<i64>) -> Result<()> {
    let brokers =
        told.iter().flat_map(|(_, pool)| pool["status"]["brokers"].as_array().into_iter().flatten());
    let drained: BTreeSet<i64> = brokers
        .filter(|broker| broker["draining"] == true)
        .filter_map(|broker| broker["id"].as_i64())
        .collect();
    ensure!(drained == *wanted, "drained were {drained:?}, not {wanted:?}");
    Ok(())
}

/// Another cluster beside, whose store does not let it in; somebody makes the bucket. Its last pool has nobody to give to.
fn a_bucket_that_denies_is_told_and_healed_when_it_does_not(many: &Many) -> Result<()> {
    let kubectl = many.kubectl();
    let store = many.stores.spec().replace(&format!("bucket: {}", S3::BUCKET), "bucket: absent");
    kubectl.apply(&format!(
        "apiVersion: sealane.io/v1alpha1\nkind: BrokerCluster\nmetadata: {{name: poor, namespace: sealane}}\n\
         spec:\n  region: poor\n{store}  listeners: [{{name: plain, port: 9092}}]\n---\n\
         apiVersion: sealane.io/v1alpha1\nkind: BrokerPool\nmetadata: {{name: poor, namespace: sealane}}\n\
         spec: {{clusterRef: {{name: poor}}, replicas: 1}}\n"
    ))?;
    let said = kubectl.wait_reason("sealane", "brokercluster/poor", "BrokerWaits")?;
    ensure!(said.contains("poor-0") && said.contains("s3://absent"), "it does not name the bucket: {said}");
    many.stores.s3.make_bucket("absent")?;
    kubectl.wait_condition("sealane", "brokercluster/poor", "Ready", "True")?;
    kubectl.run(&["delete", "-n", "sealane", "brokerpool/poor", "--timeout=120s"])?;
    kubectl.run(&["delete", "-n", "sealane", "brokercluster/poor"])?;
    Ok(())
}

/// The same change of the spec, with the gate and without: one broker at a time, or all of them.
fn the_twin_takes_every_broker_away(many: &Many) -> Result<()> {
    let kubectl = many.kubectl();
    let mut fewest = Vec::new();
    for (off, connections) in [("", "2000"), ("restart-gate", "2001")] {
        let deployment = "deployment/sealane-operator";
        kubectl.run(&[
            "set",
            "env",
            "-n",
            "sealane-system",
            deployment,
            &format!("SEALANE_TEST_OFF={off}"),
        ])?;
        kubectl.run(&["rollout", "status", "-n", "sealane-system", deployment, "--timeout=240s"])?;
        many.ready()?;
        let pods = Story::of(kubectl, "sealane", "pods")?;
        let before = wait_for("the pods to be told", || {
            let lives = lives(&pods.told()?);
            Ok((lives.len() == 3).then_some(lives))
        })?;
        let clusters = Story::of(kubectl, "sealane", "bc")?;
        many.patch(&format!(r#"{{"spec":{{"config":{{"connections_max":"{connections}"}}}}}}"#))?;
        wait_for("every pod to begin anew", || {
            let now = lives(&pods.told()?);
            ensure!(now.len() == 2 * before.len(), "{} lives", now.len());
            Ok(Some(()))
        })?;
        many.ready()?;
        fewest.push(fewest_ready(&pods.told()?, 3));
        let lost = clusters.told()?.iter().any(|(_, cluster)| {
            condition(cluster, "DataSafe").is_some_and(|safe| safe["status"] == "Unknown")
        });
        println!("gate off: {off:?}; fewest brokers ready {fewest:?}; nobody answered for the data: {lost}");
    }
    let (with, without) = (fewest.first().context("both ran")?, fewest.last().context("both ran")?);
    ensure!(*with == 2, "with the gate {with} of three were left");
    ensure!(*without < 2, "without the gate {without} of three were left: it was not what kept them");
    Ok(())
}
