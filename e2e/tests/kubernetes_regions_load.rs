//! Two real clusters, linked as the document says, with a load in each: the wire between them is cut and healed, then every
//! process of one is killed at one moment and it comes back. What was acknowledged is in both, once.

#![cfg(feature = "kubernetes")]

use std::collections::BTreeSet;

use anyhow::{Result, ensure};
use e2e::clients::{Library, Record};
use e2e::kubernetes::{Load, Region, blocks, follow, wait_for, with_two};

#[test]
fn a_cut_wire_and_a_lost_region_cost_no_acknowledged_record_of_a_load_in_each() -> Result<()> {
    with_two(|east, west| {
        follow(&blocks("sh link"), &[("EAST", east.kubeconfig()), ("WEST", west.kubeconfig())])?;
        let servers = [format!("{}:30192", east.address()), format!("{}:30292", west.address())];
        let topics = ["of-east", "of-west"];
        for ((region, name), topic) in [(east, "east"), (west, "west")].into_iter().zip(topics) {
            region.kubectl().apply(&format!(
                "apiVersion: sealane.io/v1alpha1\nkind: Topic\nmetadata: {{name: {topic}, namespace: {name}}}\n\
                 spec: {{clusterRef: {{name: {name}}}, partitions: 3}}\n"
            ))?;
            region.kubectl().wait_condition(name, &format!("topic.sealane.io/{topic}"), "Ready", "True")?;
        }
        let [of_east, of_west] = [0, 1].map(|n| Load::start(&servers[n], topics[n]));
        let (of_east, of_west) = (of_east?, of_west?);
        let both_go_on = || of_east.until_more(300).and_then(|()| of_west.until_more(300));
        both_go_on()?;

        east.cut()?;
        link_is(west, "False")?;
        of_west.until_more(300)?;
        east.heal()?;
        link_is(west, "True")?;
        both_go_on()?;

        east.lose()?;
        link_is(west, "False")?;
        of_west.until_more(300)?;
        east.bring_back()?;
        link_is(west, "True")?;
        east.kubectl().wait_condition("east", "mirrorlink/west", "Ready", "True")?;
        both_go_on()?;

        // East's clients reached nobody while it was away.
        let written = [of_east.judge_after_silence()?, of_west.judge()?];
        for (topic, written) in topics.into_iter().zip(written) {
            for server in &servers {
                has_each_once(server, topic, written)?;
            }
        }
        println!("{written:?} records of east and west, each once in both");
        east.judge_logs()?;
        west.judge_logs()
    })
}

/// As west tells it.
fn link_is(west: &Region, ready: &str) -> Result<()> {
    west.kubectl().wait_condition("west", "mirrorlink/east", "Ready", ready).map(drop)
}

fn has_each_once(server: &str, topic: &str, written: usize) -> Result<()> {
    wait_for(&format!("every record of {topic} at {server}"), || {
        let records = Library::Confluent.read_to_end(server, topic, &[])?.0;
        let once: BTreeSet<String> = records.iter().map(Record::text).collect();
        ensure!(
            once.len() == written && records.len() == written,
            "{} are there, {} different, of {written}",
            records.len(),
            once.len()
        );
        Ok(Some(()))
    })
}
