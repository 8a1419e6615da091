//! A link between a region of many brokers (etcd and S3, two mirrors) and one of a single broker, on a real node: brokers of
//! the large region are restarted under load and its mirrors too, and the other region has each record once.

#![cfg(feature = "kubernetes")]

use std::collections::BTreeSet;
use std::fs;

use anyhow::{Context, Result, ensure};
use e2e::clients::{Library, Record};
use e2e::kubernetes::{Kubectl, Load, Many, Region, manifests, wait_for, with_report};

#[test]
fn a_region_of_many_brokers_is_mirrored_under_load_while_its_brokers_and_mirrors_begin_anew() -> Result<()> {
    let many = Many::rise(Region::with_node()?)?;
    with_report(&many.region, || {
        let kubectl = many.kubectl();
        many.patch(r#"{"spec":{"mirror":{"replicas":2}}}"#)?;
        // Region west of the example, which joins this region in place of the example's own.
        let west = fs::read_to_string(manifests().join("examples/two-regions/west.yaml"))?;
        let west = west.replace("namespace: east, name: west", "namespace: sealane, name: west");
        // A topic has lanes in both regions or in none.
        kubectl.apply(&west.replace("lanes: {default: true}", "lanes: {default: false}"))?;
        kubectl.apply(
            "apiVersion: sealane.io/v1alpha1\nkind: LinkGrant\nmetadata: {name: west, namespace: sealane}\n\
             spec: {clusterRef: {name: east}, peer: west, namespaces: [west]}\n---\n\
             apiVersion: sealane.io/v1alpha1\nkind: MirrorLink\nmetadata: {name: west, namespace: sealane}\n\
             spec: {clusterRef: {name: east}, peer: west, rpo: {maxLagSeconds: 600}}\n",
        )?;
        let linked = || {
            let east = kubectl.wait_condition("sealane", "mirrorlink/west", "Ready", "True").map(drop);
            let both = east
                .and_then(|()| kubectl.wait_condition("west", "mirrorlink/east", "Ready", "True").map(drop));
            both.with_context(|| format!("the brokers say:\n{}", said(kubectl)))
        };
        linked()?;
        let load = Load::start(&many.bootstrap(), "orders")?;
        load.until_more(500)?;

        many.patch(r#"{"spec":{"config":{"connections_max":"2000"}}}"#)?;
        kubectl.wait_condition("sealane", "brokercluster/east", "Progressing", "True")?;
        many.ready()?;
        load.until_more(300)?;
        let mirrors = "app.kubernetes.io/component=mirror";
        kubectl.run(&["delete", "pods", "-n", "sealane", "-l", mirrors, "--grace-period=0", "--force"])?;
        load.until_more(300)?;
        many.scale(4)?;
        kubectl.wait_condition("sealane", "brokerpool/east", "Ready", "True")?;
        many.scale(3)?;
        kubectl.wait_condition("sealane", "brokerpool/east", "Ready", "True")?;
        many.ready()?;
        load.until_more(300)?;
        linked()?;
        let written = load.judge()?;

        let west = format!("{}:30292", many.region.address());
        let there = has_each_once(&west, written)?;
        println!("{there} records in each region, each once");
        back_again(&west, &many.bootstrap(), written)?;
        many.region.judge_logs()
    })
}

/// Of every partition what the brokers have heard: what a status sums up.
fn said(kubectl: &Kubectl) -> String {
    let mut text = String::new();
    for (namespace, cluster, pod) in [("sealane", "east", "east-0"), ("west", "west", "west-0")] {
        match kubectl.mirror_status(namespace, cluster, pod) {
            Ok(status) => {
                for link in status.links {
                    text += &format!("{cluster}: {} is {:?} {}\n", link.peer, link.state(), link.reason);
                    for at in &link.partitions {
                        text += &format!(
                            "  {} {} out: {} {:?} {} next {} lag {:?} {:?}\n",
                            at.topic,
                            at.partition,
                            at.outgoing,
                            at.state(),
                            at.reason,
                            at.next_offset,
                            at.lag_records,
                            at.lag_ms
                        );
                    }
                }
            }
            Err(error) => text += &format!("{cluster}: {error:#}\n"),
        }
    }
    text
}

fn texts(server: &str) -> Result<Vec<String>> {
    Ok(Library::Confluent.read_to_end(server, "orders", &[])?.0.iter().map(Record::text).collect())
}

fn has_each_once(server: &str, written: usize) -> Result<usize> {
    wait_for("every record in the other region", || {
        let texts = texts(server)?;
        let once: BTreeSet<&String> = texts.iter().collect();
        ensure!(once.len() >= written, "{} of {written} are there", once.len());
        ensure!(
            texts.len() == written,
            "{} are there, {} of them twice",
            texts.len(),
            texts.len() - once.len()
        );
        Ok(Some(texts.len()))
    })
}

/// What the small region has of its own comes to the large one, and nothing comes back to where it was made.
fn back_again(west: &str, east: &str, written: usize) -> Result<()> {
    let own: Vec<Record> = (0..100).map(|number| Record::numbered("west ", number)).collect();
    Library::Java.produce_all(west, "orders", &own, &[])?;
    for server in [east, west] {
        has_each_once(server, written + own.len()).with_context(|| format!("at {server}"))?;
    }
    Ok(())
}
