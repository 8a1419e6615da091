//! Lanes of a region of many brokers, from outside of the cluster: through a LaneRouter whose ports are ports of the node, one
//! for each broker in each lane. Brokers come, are restarted and are killed under it, and each record reaches its own side.

#![cfg(feature = "kubernetes")]

use std::collections::BTreeSet;

use anyhow::{Result, ensure};
use e2e::clients::{Library, Record, Running};
use e2e::kubernetes::{Many, Region, grouped, lane, lane_router, wait_for, with_report};

const TOPIC: &str = "apiVersion: sealane.io/v1alpha1\nkind: Topic\nmetadata: {name: laned, namespace: sealane}\n\
                     spec: {clusterRef: {name: east}, partitions: 6, lanes: {enabled: true}}\n";

#[test]
fn a_lane_of_many_brokers_is_entered_from_outside_and_whatever_brokers_do_each_record_reaches_its_side()
-> Result<()> {
    let many = Many::rise(Region::with_node()?)?;
    with_report(&many.region, || {
        let kubectl = many.kubectl();
        many.patch(r#"{"spec":{"lanes":{"default":true,"portFirst":31110}}}"#)?;
        kubectl.wait_condition("sealane", "brokercluster/east", "Progressing", "True")?;
        many.ready()?;
        kubectl.apply(TOPIC)?;
        kubectl.wait_condition("sealane", "topic.sealane.io/laned", "Ready", "True")?;
        let how = "type: NodePort, port: 31093, brokerPortStep: 100, insecure: true";
        kubectl.apply(&lane_router("nodes", how))?;
        kubectl.apply(&lane("boe-cart", "BOE"))?;
        kubectl.wait_condition("sealane", "lanerouter/nodes", "Ready", "True")?;
        let (outside, cart) = (many.bootstrap(), kubectl.lane_outside("boe-cart")?);
        each_broker_has_a_port_in_the_lane(&many, 3)?;

        let baseline = grouped(Library::Confluent, &outside, "laned", "shop")?;
        let in_lane = grouped(Library::Java, &cart, "laned", "shop")?;
        kubectl.wait_condition("sealane", "lane/boe-cart", "Ready", "True")?;
        let mut sides = Sides { outside, cart, sent: 0, baseline, in_lane };
        sides.both_get_their_own()?;

        many.scale(4)?;
        kubectl.wait_condition("sealane", "brokerpool/east", "Ready", "True")?;
        many.everybody_owns_something()?;
        each_broker_has_a_port_in_the_lane(&many, 4)?;
        sides.both_get_their_own()?;

        kubectl.run(&["delete", "pod", "-n", "sealane", "east-1", "--grace-period=0", "--force"])?;
        sides.both_get_their_own()?;
        many.ready()?;
        sides.both_get_their_own()?;
        println!("{} records, each to its own side and to nobody else", sides.sent);
        many.region.judge_logs()
    })
}

/// The router's own Service has it, by the broker's id.
fn each_broker_has_a_port_in_the_lane(many: &Many, brokers: usize) -> Result<()> {
    let ids: BTreeSet<i64> = many.named_as_they_say(brokers)?.into_values().collect();
    wait_for("a port of the lane for each broker", || {
        let service = many.kubectl().object("sealane", "service/nodes-lane-router")?;
        let ports = service["spec"]["ports"].as_array().cloned().unwrap_or_default();
        let ports: BTreeSet<i64> = ports.iter().filter_map(|port| port["nodePort"].as_i64()).collect();
        let wanted: BTreeSet<i64> = ids.iter().map(|id| 31110 + id * 100).collect();
        ensure!(wanted.is_subset(&ports), "ports {ports:?}, of brokers {ids:?}");
        Ok(Some(()))
    })
}

/// Two consumers of one group, one in the lane, and what is sent to them.
struct Sides {
    outside: String,
    cart: String,
    sent: usize,
    baseline: Running,
    in_lane: Running,
}

impl Sides {
    /// Twelve records of the lane, half of them by a workload that does not name it, and as many of nobody's, over all
    /// partitions; each side gets all of its own and nothing of the other's.
    fn both_get_their_own(&mut self) -> Result<()> {
        let (mut at_baseline, mut in_lane) = (Vec::new(), Vec::new());
        for number in self.sent..self.sent + 12 {
            let record = |side: &str| {
                let text = format!("{side} {number}");
                Record { value: Some(text.into()), ..Record::default() }.partition((number % 6) as i32)
            };
            at_baseline.push(record("plain"));
            match number % 4 < 2 {
                true => at_baseline.push(record("cart").header("x-lane", "boe-cart")),
                false => in_lane.push(record("cart")),
            }
        }
        for (server, records) in [(&self.outside, at_baseline), (&self.cart, in_lane)] {
            Library::Confluent.produce_all(server, "laned", &records, &[])?;
        }
        self.sent += 12;
        for (side, reader) in [("plain", &self.baseline), ("cart", &self.in_lane)] {
            let wanted: BTreeSet<String> = (0..self.sent).map(|number| format!("{side} {number}")).collect();
            wait_for(&format!("all records of {side}"), || {
                let texts: BTreeSet<String> = reader.records().iter().map(Record::text).collect();
                let missing: Vec<&String> = wanted.difference(&texts).collect();
                ensure!(missing.is_empty(), "missing are {missing:?}; {}", reader.complaints());
                ensure!(texts == wanted, "{side} got {:?} too", texts.difference(&wanted));
                Ok(Some(()))
            })?;
        }
        Ok(())
    }
}
