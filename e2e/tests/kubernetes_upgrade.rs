//! From the build of the last tag to this one, back, and forward again, under load on a real node: first the operator, which
//! restarts no broker, then the brokers one by one. Nothing that was acknowledged is lost, and no client is told of it.

#![cfg(feature = "kubernetes")]

use std::collections::BTreeSet;

use anyhow::{Result, ensure};
use e2e::kubernetes::{
    Load, Many, Region, Stores, Story, fewest_ready, former, lives, wait_for, with_report,
};
use e2e::process::binary;
use serde_json::Value;

const NEXT: &str = "localhost/sealane:next";

#[test]
fn brokers_of_the_last_tag_are_upgraded_and_rolled_back_under_load_and_nothing_is_lost() -> Result<()> {
    // Built before anything else runs.
    let former = former()?;
    println!("the former build is {}", former.display());
    let region = Region::with_node()?;
    let many = Many::rise_of(region, Stores::start()?, &former)?;
    with_report(&many.region, || {
        let kubectl = many.kubectl();
        let named = many.named_as_they_say(3)?;
        let pods = Story::of(kubectl, "sealane", "pods")?;
        let before = wait_for("the pods to be told", || {
            let lives = lives(&pods.told()?);
            Ok((lives.len() == 3).then_some(lives))
        })?;
        let load = Load::start(&many.bootstrap(), "orders")?;
        load.until_more(300)?;

        many.region.give_image(&binary()?, "next")?;
        the_operator_is_upgraded(&many)?;
        ensure!(lives(&pods.told()?) == before, "a new operator restarted a broker");
        let mut begun = before.len();
        for image in [NEXT, "localhost/sealane:0.1.0", NEXT] {
            many.patch(&format!(r#"{{"spec":{{"image":"{image}"}}}}"#))?;
            all_run(&many, image)?;
            many.ready()?;
            begun += 3;
            ensure!(lives(&pods.told()?).len() == begun, "to {image}: each pod begins anew once");
            ensure!(many.named_as_they_say(3)? == named, "a broker is another one under {image}");
            load.until_more(500)?;
        }
        ensure!(fewest_ready(&pods.told()?, 3) == 2, "two were away at a time");
        println!("{} records, each there once", load.judge()?);
        many.region.judge_logs()
    })
}

/// It works under its new image: a topic that it makes says so.
fn the_operator_is_upgraded(many: &Many) -> Result<()> {
    let (kubectl, deployment) = (many.kubectl(), "deployment/sealane-operator");
    kubectl.run(&["set", "image", "-n", "sealane-system", deployment, &format!("operator={NEXT}")])?;
    kubectl.run(&["rollout", "status", "-n", "sealane-system", deployment, "--timeout=240s"])?;
    kubectl.apply(
        "apiVersion: sealane.io/v1alpha1\nkind: Topic\nmetadata: {name: later, namespace: sealane}\n\
         spec: {clusterRef: {name: east}}\n",
    )?;
    kubectl.wait_condition("sealane", "topic.sealane.io/later", "Ready", "True").map(drop)
}

fn all_run(many: &Many, image: &str) -> Result<()> {
    wait_for(&format!("all brokers to run {image}"), || {
        let pods = many.kubectl().list("sealane", "pods")?;
        let images: Vec<&Value> = pods.iter().map(|pod| &pod["spec"]["containers"][0]["image"]).collect();
        let different: BTreeSet<String> = images.iter().map(|image| image.to_string()).collect();
        ensure!(images.len() == 3 && images.iter().all(|found| **found == *image), "they run {different:?}");
        Ok(Some(()))
    })
}
