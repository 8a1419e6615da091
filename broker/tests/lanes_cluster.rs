//! Lanes in a cluster of several brokers, in one process: consumers of a lane come, go, die and come back while
//! partitions and coordinators move and brokers begin new lives. Each record is processed by exactly one side,
//! a record of a PPE lane is shown by no broker outside of it, and what was produced while the lane was
//! deployed is the lane's.
//!
//! The twins run the same in a process whose view filter or comparison of cuts is off, and must fail.

#![allow(clippy::unwrap_used)]

// Each file of tests needs a part of it.
#[allow(dead_code)]
#[path = "cluster_support/mod.rs"]
mod support;

#[path = "lanes_support/mod.rs"]
mod lanes;

use std::collections::BTreeSet;

use control::v1;
use kafka_client::{Cluster, ConnectOptions, Endpoint};
use lanes::{Producers, Reader, Watch};
use support::{Nodes, eventually};

const TOPIC: &str = "orders";
const PARTITIONS: i32 = 3;
const LEAKED: &str = "a record of a PPE lane was shown outside of it";
const WRONG_SIDE: &str = "was processed by (baseline, lane, PPE lane)";
const STRAYED: &str = "records that were produced while the lane was deployed were not processed by it";

async fn create_lane(nodes: &Nodes, at: usize, name: &str) {
    let request = v1::CreateLaneRequest { name: name.to_owned(), class: 0, ..Default::default() };
    nodes.control(at).await.create_lane(request).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_record_is_processed_by_one_side_whatever_moves() {
    let mut nodes = Nodes::start_with_internal(3).await;
    nodes.create_topic_with(TOPIC, PARTITIONS, &[("sealane.lanes", "true")]).await;
    create_lane(&nodes, 0, "boe-a").await;
    create_lane(&nodes, 1, "ppe-x").await;
    let watch = Watch::start(&nodes, TOPIC, PARTITIONS);
    let baseline = Reader::start(&nodes, "base", "g", None, TOPIC, PARTITIONS);
    baseline.until_assigned().await;
    let producers = Producers::start(&nodes, TOPIC, PARTITIONS).await;
    producers.until_more(30).await;

    let mut by_lane: BTreeSet<String> = BTreeSet::new();
    for round in 0..6 {
        let lane = Reader::start(&nodes, "cart", "g@boe-a", Some("boe-a"), TOPIC, PARTITIONS);
        lane.until_assigned().await;
        producers.lane_is_deployed(true);
        producers.until_more(30).await;
        disturb(&mut nodes, round).await;
        watch.looks_at(&nodes);
        producers.until_more(60).await;
        watch.check();
        producers.lane_is_deployed(false);
        by_lane.extend(lane.end(round % 3 != 2).await);
        producers.until_more(30).await;
    }
    let sent = producers.stop().await;
    let lane = Reader::start(&nodes, "cart", "g@boe-a", Some("boe-a"), TOPIC, PARTITIONS);
    let ppe = Reader::start(&nodes, "svc", "g@ppe-x", Some("ppe-x"), TOPIC, PARTITIONS);
    for reader in [&lane, &ppe, &baseline] {
        reader.until_caught_up().await;
    }
    by_lane.extend(lane.end(true).await);
    let by_ppe = ppe.end(true).await;
    let by_base = baseline.end(true).await;
    let looks = watch.stop().await;
    sent.check(&by_base, &by_lane, &by_ppe);
    println!("{looks} looks at raw fetches of every broker");
    nodes.stop().await;
}

/// Ports of lanes and of brokers in them, where nothing else is given out.
const ROUTER_STEP: u16 = 2_000;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn through_a_lane_router_each_record_is_processed_by_one_side_whatever_moves() {
    let mut nodes = Nodes::start_with_internal(0).await;
    nodes.lane_port = 15_000 + (std::process::id() % 190) as u16 * 10;
    for _ in 0..3 {
        nodes.add().await;
    }
    nodes.create_topic_with(TOPIC, PARTITIONS, &[("sealane.lanes", "true")]).await;
    let router = nodes.start_lane_router(ROUTER_STEP).await;
    let mut control = nodes.control(1).await;
    eventually("the router is known", async || {
        let request = v1::ClusterInfoRequest {};
        let mut known = 0;
        for at in 0..nodes.len() {
            known += nodes.control(at).await.cluster_info(request).await.unwrap().into_inner().lane_routers;
        }
        known == 1
    })
    .await;
    let request = v1::CreateLaneRequest { name: "boe-a".to_owned(), class: 0, ..Default::default() };
    let made = control.create_lane(request).await.unwrap().into_inner();
    assert_eq!(made.warnings, Vec::<String>::new());
    let port = u16::try_from(made.lane.unwrap().port).unwrap();
    let through = || {
        let options = ConnectOptions { client_id: "cart".to_owned(), ..ConnectOptions::default() };
        let client = Cluster::new(vec![Endpoint::new("127.0.0.1", port)], options);
        Reader::start_on(client, "g", true, TOPIC, PARTITIONS)
    };
    create_lane(&nodes, 2, "ppe-x").await;
    let watch = Watch::start(&nodes, TOPIC, PARTITIONS);
    let baseline = Reader::start(&nodes, "base", "g", None, TOPIC, PARTITIONS);
    baseline.until_assigned().await;
    let producers = Producers::start(&nodes, TOPIC, PARTITIONS).await;
    producers.until_more(30).await;
    let mut by_lane: BTreeSet<String> = BTreeSet::new();
    for round in 0..4 {
        let lane = through();
        lane.until_assigned().await;
        producers.lane_is_deployed(true);
        producers.until_more(30).await;
        disturb(&mut nodes, round).await;
        watch.looks_at(&nodes);
        producers.until_more(60).await;
        producers.lane_is_deployed(false);
        by_lane.extend(lane.end(true).await);
        producers.until_more(30).await;
    }
    let sent = producers.stop().await;
    let lane = through();
    let ppe = Reader::start(&nodes, "svc", "g@ppe-x", Some("ppe-x"), TOPIC, PARTITIONS);
    for reader in [&lane, &ppe, &baseline] {
        reader.until_caught_up().await;
    }
    by_lane.extend(lane.end(true).await);
    let by_ppe = ppe.end(true).await;
    let by_base = baseline.end(true).await;
    watch.stop().await;
    sent.check(&by_base, &by_lane, &by_ppe);
    router.drain(std::time::Duration::from_secs(30)).await.unwrap();
    nodes.stop().await;
}

/// One thing that happens to a cluster.
async fn disturb(nodes: &mut Nodes, round: usize) {
    let leaders = nodes.leaders(0, TOPIC).await;
    let owner = leaders.first().and_then(|id| nodes.at(*id)).unwrap_or(0);
    match round {
        // The owner of a partition, or the coordinator of the lane's group, loses its life.
        0 => nodes.lose_lease(owner).await,
        1 => {
            let id = lanes::coordinator_of(nodes, "g@boe-a").await;
            nodes.lose_lease(nodes.at(id).unwrap()).await;
        }
        4 => {
            let id = lanes::coordinator_of(nodes, "g@boe-a").await;
            nodes.kill(nodes.at(id).unwrap()).await;
            nodes.add().await;
        }
        2 => {
            let to = (0..nodes.len()).map(|at| nodes.id(at)).find(|id| !leaders[..1].contains(id)).unwrap();
            let request = v1::MovePartitionRequest { topic: TOPIC.to_owned(), partition: 0, to };
            // Who has just lost its life is not alive for a moment, and what is being taken over is not moved.
            let noted = async || nodes.control(0).await.move_partition(request.clone()).await.is_ok();
            eventually("the wish is noted", noted).await;
            eventually("it has moved", async || nodes.leaders(0, TOPIC).await.first() == Some(&to)).await;
        }
        // One goes and another comes.
        3 => {
            nodes.stop_one(owner).await;
            nodes.add().await;
        }
        _ => {
            nodes.kill(owner).await;
            nodes.add().await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_lane_holds_and_its_end_are_told_by_any_broker_for_all() {
    let nodes = Nodes::start_with_internal(3).await;
    nodes.create_topic_with(TOPIC, PARTITIONS, &[("sealane.lanes", "true")]).await;
    assert_eq!(BTreeSet::from_iter(nodes.leaders(0, TOPIC).await).len(), 3, "every broker owns one");
    create_lane(&nodes, 0, "ppe-x").await;
    let twice = v1::CreateLaneRequest { name: "ppe-x".to_owned(), class: 0, ..Default::default() };
    let refused = nodes.control(1).await.create_lane(twice).await.unwrap_err();
    assert_eq!(refused.code(), tonic::Code::AlreadyExists);
    let ppe = Reader::start(&nodes, "svc", "g@ppe-x", Some("ppe-x"), TOPIC, PARTITIONS);
    ppe.until_assigned().await;
    let producers = Producers::start(&nodes, TOPIC, PARTITIONS).await;
    producers.until_more(30).await;
    let sent = producers.stop().await;
    ppe.until_caught_up().await;

    let records = sent.of_lane("ppe-x") as i64;
    for at in 0..3 {
        let request = v1::LaneStatusRequest { name: "ppe-x".to_owned() };
        let told = nodes.control(at).await.lane_status(request).await.unwrap().into_inner();
        let active = v1::lane_group_partition::State::Active;
        assert_eq!(told.groups.iter().filter(|group| group.state() == active).count(), 3, "{told:?}");
        assert_eq!(told.partitions.iter().map(|partition| partition.records).sum::<i64>(), records);
        let doctor = nodes.control(at).await.lane_doctor(v1::LaneDoctorRequest {}).await.unwrap();
        assert_eq!(doctor.into_inner().topics, 1);
    }
    println!("{records} records of the PPE lane were told of by each broker");
    assert_eq!(ppe.end(true).await.len() as i64, records);
    let request = v1::DeleteLaneRequest { name: "ppe-x".to_owned() };
    let hidden = nodes.control(2).await.delete_lane(request).await.unwrap().into_inner().hidden_records;
    assert_eq!(hidden, records);
    // A later lane of the name begins with nothing.
    create_lane(&nodes, 1, "ppe-x").await;
    let ppe = Reader::start(&nodes, "svc", "g@ppe-x", Some("ppe-x"), TOPIC, PARTITIONS);
    ppe.until_caught_up().await;
    assert_eq!(ppe.end(true).await, BTreeSet::new());
    nodes.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lanes_are_switched_in_every_log_or_in_none() {
    let nodes = Nodes::start_with_internal(3).await;
    nodes.create_topic(TOPIC, PARTITIONS).await;
    for (at, value) in [(1, "true"), (2, "false"), (0, "true")] {
        assert_eq!(nodes.alter_topic(at, TOPIC, "sealane.lanes", value).await, 0, "{value}");
    }
    let watch = Watch::start(&nodes, TOPIC, PARTITIONS);
    create_lane(&nodes, 2, "ppe-x").await;
    let producers = Producers::start(&nodes, TOPIC, PARTITIONS).await;
    producers.until_more(30).await;
    // A log with records of a PPE lane keeps its lanes, and so do the others.
    let held = kafka::ErrorCode::PolicyViolation.code();
    assert_eq!(nodes.alter_topic(1, TOPIC, "sealane.lanes", "false").await, held);
    for round in 0..3 {
        nodes.lose_lease(round).await;
        producers.until_more(30).await;
    }
    let records = producers.stop().await.of_lane("ppe-x");
    let looks = watch.stop().await;
    println!("{records} records of a PPE lane, {looks} looks at raw fetches of every broker");
    assert!(records > 0, "something was at stake");
    nodes.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_assignment_waits_for_a_broker_that_is_alive_and_cannot_be_told() {
    let nodes = Nodes::start(2).await;
    nodes.create_topic_with(TOPIC, PARTITIONS, &[("sealane.lanes", "true")]).await;
    nodes.pretend_broker(true).await;
    let reader = Reader::start(&nodes, "base", "g", None, TOPIC, PARTITIONS);
    reader.until_put_off().await;
    assert!(!reader.is_assigned(), "not while somebody may take it for a reader without a group");
    nodes.pretend_broker(false).await;
    reader.until_assigned().await;
    reader.end(true).await;
    nodes.stop().await;
}

const EACH: &str = "each_record_is_processed_by_one_side_whatever_moves";

#[test]
fn twin_without_the_view_filter_a_ppe_record_is_shown_outside() {
    let told = lanes::twin(EACH, "view-filter", "");
    assert!(told.contains(LEAKED), "{told}");
}

#[test]
fn twin_without_comparing_cuts_a_deployed_lane_loses_records_to_the_baseline() {
    let told = lanes::twin(EACH, "compare-and-append", "stale-cut");
    assert!(told.contains(STRAYED), "{told}");
}

#[test]
fn twin_without_waiting_for_every_broker_a_member_is_taken_for_a_stranger() {
    let told = lanes::twin(EACH, "view-acks", "late-views");
    assert!(told.contains(WRONG_SIDE), "{told}");
}

#[test]
fn twin_where_a_new_life_believes_what_the_last_one_knew_a_member_is_taken_for_a_stranger() {
    let told = lanes::twin(EACH, "view-lives", "late-views");
    assert!(told.contains(WRONG_SIDE), "{told}");
}

/// With cuts compared and views acknowledged, a coordinator of before and brokers that hear late change nothing.
#[test]
fn old_cuts_and_late_views_change_nothing() {
    lanes::run_again(EACH, "", "stale-cut,late-views").unwrap();
}
