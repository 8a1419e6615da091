//! Clusters of many brokers on a real node, on etcd and S3: they rise, serve clients outside, are restarted and scaled under
//! load, and lose nothing. What `kubectl get` shows meanwhile is recorded whole and judged.

#![cfg(feature = "kubernetes")]

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Result, ensure};
use e2e::kubernetes::{
    Kubectl, Load, Many, Region, Story, condition, fewest_ready, lives, wait_for, with_report,
};
use serde_json::Value;

#[test]
fn three_brokers_are_restarted_and_scaled_under_load_and_lose_nothing() -> Result<()> {
    let many = Many::rise(Region::with_node()?)?;
    with_report(&many.region, || {
        let kubectl = many.kubectl();
        let first = many.named_as_they_say(3)?;
        let pods = Story::of(kubectl, "sealane", "pods")?;
        let (pools, clusters) =
            (Story::of(kubectl, "sealane", "bpool")?, Story::of(kubectl, "sealane", "bc")?);
        let load = Load::start(&many.bootstrap(), "orders")?;
        load.until_more(500)?;

        many.restart_each(&pods, &first)?;
        load.until_more(500)?;

        many.scale(5)?;
        kubectl.wait_condition("sealane", "brokerpool/east", "Ready", "True")?;
        let five = many.named_as_they_say(5)?;
        many.everybody_owns_something()?;
        load.until_more(500)?;

        many.scale(3)?;
        kubectl.wait_condition("sealane", "brokerpool/east", "Ready", "True")?;
        many.ready()?;
        ensure!(many.named_as_they_say(3)? == first, "others than these were kept");
        for pod in ["east-3", "east-4"] {
            kubectl.wait_gone("sealane", &format!("service/{pod}-outside"))?;
        }
        load.until_more(500)?;

        were_emptied_first(&pools.told()?, &five)?;
        tells_the_truth(&clusters.told()?)?;
        let lines = load.judge()?;
        println!("{lines} records, each there once; plans: {:?}", plans(&clusters.told()?));
        each_step_is_an_event(kubectl, &five)?;
        many.region.judge_logs()
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

#[test]
fn a_bad_image_stops_at_one_pod_and_a_store_that_is_away_stops_all_removals() -> Result<()> {
    let many = Many::rise(Region::with_node()?)?;
    with_report(&many.region, || {
        let kubectl = many.kubectl();
        let first = many.named_as_they_say(3)?;
        let pods = Story::of(kubectl, "sealane", "pods")?;
        let load = Load::start(&many.bootstrap(), "orders")?;
        load.until_more(300)?;

        many.patch(r#"{"spec":{"image":"localhost/sealane:none"}}"#)?;
        many.says("ImageUnavailable")?;
        many.says("pod east-1 is to be restarted: pod east-2 is not ready")?;
        load.until_more(300)?;
        ensure!(fewest_ready(&pods.told()?, 3) == 2, "a second pod followed the first");
        many.patch(r#"{"spec":{"image":"localhost/sealane:0.1.0"}}"#)?;
        many.ready()?;
        ensure!(
            lives(&pods.told()?).len() == 5,
            "others than that pod began anew: {:?}",
            lives(&pods.told()?)
        );

        // Nothing can be given away: nobody is removed, and the cluster says for what it waits.
        many.stores.cut_s3(true);
        many.scale(2)?;
        many.says("pod east-2 is not removed yet")?;
        many.stores.cut_s3(false);
        kubectl.wait_condition("sealane", "brokerpool/east", "Ready", "True")?;
        many.ready()?;
        let mut left = first;
        left.remove("east-2");
        ensure!(many.named_as_they_say(2)? == left, "others than these were kept");
        load.until_more(300)?;
        waits_for_leave(&many, &pods)?;
        load.until_more(300)?;
        println!("{} records, each there once", load.judge()?);
        many.region.judge_logs()
    })
}

/// With policy Plan nothing is restarted before a person has agreed to this very plan; brokers serve, and that is told.
fn waits_for_leave(many: &Many, pods: &Story) -> Result<()> {
    let kubectl = many.kubectl();
    let before = lives(&pods.told()?);
    many.patch(r#"{"spec":{"update":{"policy":"Plan"},"config":{"connections_max":"3000"}}}"#)?;
    many.says("pod east-0 is to be restarted: nobody has approved the plan")?;
    let progressing = kubectl.wait_condition("sealane", "brokercluster/east", "Progressing", "True")?;
    ensure!(progressing["reason"] == "WaitsForPerson", "{progressing}");
    many.ready()?;
    let cluster = kubectl.object("sealane", "brokercluster/east")?;
    let id = cluster["status"]["planId"].as_str().unwrap_or_default().to_owned();
    let approve = |id: &str| {
        let word = format!("sealane.io/approved={id}");
        kubectl.run(&["annotate", "-n", "sealane", "brokercluster/east", "--overwrite", &word])
    };
    // Leave for something else is none.
    approve("another")?;
    many.says("nobody has approved the plan")?;
    ensure!(lives(&pods.told()?) == before, "a pod began anew without leave");
    approve(&id)?;
    wait_for("both pods to begin anew", || {
        let now = lives(&pods.told()?).len();
        ensure!(now == before.len() + 2, "{now} lives, {} before", before.len());
        Ok(Some(()))
    })?;
    kubectl.wait_condition("sealane", "brokercluster/east", "Progressing", "False")?;
    many.patch(r#"{"spec":{"update":{"policy":"Auto"}}}"#)?;
    many.ready()
}
