//! Two real nodes under three brokers: one node is drained as a person drains it, then lost without a word, then back. Under
//! load; no acknowledged record is lost, and brokers come back on the node that is left.

#![cfg(feature = "kubernetes")]

use std::collections::BTreeSet;

use anyhow::{Result, ensure};
use e2e::kubernetes::{Load, Many, Region, Story, fewest_ready, wait_for, with_report};

/// Where the brokers are.
fn nodes(many: &Many) -> Result<BTreeSet<String>> {
    Ok(many.nodes()?.into_values().collect())
}

#[test]
fn a_node_is_drained_and_then_lost_under_load_and_no_record_with_it() -> Result<()> {
    let region = Region::start(true, &[("NODE_GRACE", "10s")])?;
    let first = format!("node{}", region.number());
    let (second, number) = region.join()?;
    // Not the operator too: what it does for the brokers is what is looked at.
    region.kubectl().run(&["taint", "node", &second, "test=brokers:NoSchedule"])?;
    let many = Many::rise(region)?;
    with_report(&many.region, || {
        let kubectl = many.kubectl();
        kubectl.run(&["taint", "node", &second, "test-"])?;
        let load = Load::start(&many.bootstrap(), "orders")?;
        let pods = Story::of(kubectl, "sealane", "pods")?;
        // Restarted, they spread over what there is.
        many.patch(r#"{"spec":{"config":{"connections_max":"2000"}}}"#)?;
        kubectl.wait_condition("sealane", "brokercluster/east", "Progressing", "True")?;
        many.ready()?;
        ensure!(nodes(&many)?.len() == 2, "all brokers are on {:?}", nodes(&many)?);
        let named = many.named_as_they_say(3)?;
        load.until_more(300)?;

        let drain =
            ["drain", second.as_str(), "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=240s"];
        kubectl.run(&drain)?;
        many.ready()?;
        ensure!(nodes(&many)? == BTreeSet::from([first.clone()]), "they are on {:?}", nodes(&many)?);
        ensure!(fewest_ready(&pods.told()?, 3) == 2, "two were away at a time");
        ensure!(many.named_as_they_say(3)? == named, "a broker that moved is another one");
        load.until_more(300)?;
        kubectl.run(&["uncordon", &second])?;
        many.patch(r#"{"spec":{"config":{"connections_max":"2001"}}}"#)?;
        kubectl.wait_condition("sealane", "brokercluster/east", "Progressing", "True")?;
        many.ready()?;
        ensure!(nodes(&many)?.len() == 2, "all brokers are on {:?}", nodes(&many)?);
        load.until_more(300)?;

        number.cable("down")?;
        kubectl.wait_condition("", &format!("node/{second}"), "Ready", "Unknown")?;
        load.until_more(300)?;
        wait_for("a pod to be struck off", || {
            let said = kubectl.run(&["describe", "-n", "sealane", "brokercluster", "east"])?;
            Ok(said.contains("BrokerStruckOff").then_some(()))
        })?;
        many.ready()?;
        ensure!(nodes(&many)? == BTreeSet::from([first]), "they are on {:?}", nodes(&many)?);
        ensure!(many.named_as_they_say(3)? == named, "a broker that moved is another one");
        load.until_more(300)?;

        number.cable("up")?;
        kubectl.wait_condition("", &format!("node/{second}"), "Ready", "True")?;
        load.until_more(1_000)?;
        many.ready()?;
        many.named_as_they_say(3)?;
        wait_for("the brokers to be three", || Ok((many.nodes()?.len() == 3).then_some(())))?;
        println!("{} records, each there once", load.judge()?);
        many.region.judge_logs()
    })
}
