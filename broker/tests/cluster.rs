//! Several brokers as one cluster, in one process, on a metadata store and a remote store in memory: who
//! owns what, and that nothing acknowledged is lost or repeated when that changes.

#![allow(clippy::unwrap_used)]

// Each file of tests needs a part of it.
#[allow(dead_code)]
#[path = "cluster_support/mod.rs"]
mod support;

use std::collections::BTreeSet;
use std::time::Duration;

use kafka::ErrorCode;
use kafka::messages::{DescribeClusterRequest, MetadataRequest};
use support::{Load, Nodes, eventually};

const TOPIC: &str = "orders";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn partitions_are_spread_and_every_broker_names_the_same_leaders() {
    let nodes = Nodes::start(3).await;
    nodes.create_topic(TOPIC, 9).await;
    let leaders = nodes.leaders(0, TOPIC).await;
    assert_eq!(leaders.len(), 9);
    for broker in 1..=3 {
        assert_eq!(leaders.iter().filter(|leader| **leader == broker).count(), 3, "{leaders:?}");
    }
    for at in 1..3 {
        eventually("all agree", async || nodes.leaders(at, TOPIC).await == leaders).await;
    }
    let answer = nodes.connect(1).await.call(&DescribeClusterRequest::default()).await.unwrap();
    assert_eq!(answer.brokers.len(), 3);
    let brokers = nodes.connect(2).await.call(&MetadataRequest::default()).await.unwrap().brokers;
    let ports: BTreeSet<i32> = brokers.iter().map(|broker| broker.port).collect();
    assert_eq!(ports.len(), 3, "each by its own address");
    nodes.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leases_that_are_lost_again_and_again_lose_and_repeat_nothing() {
    let nodes = Nodes::start(3).await;
    nodes.create_topic(TOPIC, 6).await;
    let load = Load::start(&nodes, TOPIC, 6).await;
    for round in 0..9 {
        load.until_more(60).await;
        nodes.lose_lease(round % 3).await;
    }
    load.until_more(60).await;
    let sent = load.stop().await;
    println!("{} acknowledged, {} sent again, over 9 lost leases", sent.acknowledged(), sent.again);
    assert!(sent.acknowledged() > 0 && sent.again > 0, "something was at stake");
    eventually("logs of lives that are over are removed", async || nodes.lives() <= 3).await;
    nodes.check(TOPIC, &sent).await.unwrap();
    nodes.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_owner_that_does_not_know_that_it_is_dead_gets_nothing_acknowledged() {
    let (refused, outcome) = zombies(true).await;
    println!("the store refused {refused} blocks of zombies");
    assert!(refused > 0, "a zombie wrote");
    outcome.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn twin_without_the_fence_of_the_store_zombies_lose_records() {
    let (_, outcome) = zombies(false).await;
    let error = outcome.expect_err("the fence is what keeps the other test green");
    println!("without the fence: {error}");
}

/// Leases vanish from the store, and their holders are not told for a while.
async fn zombies(fence: bool) -> (u64, Result<(), String>) {
    let nodes = Nodes::start(3).await;
    nodes.remote.set_fence(fence);
    nodes.create_topic(TOPIC, 6).await;
    let load = Load::start(&nodes, TOPIC, 6).await;
    for round in 0..6 {
        load.until_more(60).await;
        nodes.deafen(round % 3).await;
        nodes.forget_lease(round % 3).await;
        nodes.until_moved(TOPIC, round % 3).await;
        // The zombie serves those who have not heard.
        load.until_more(30).await;
        nodes.hear_again(round % 3).await;
        nodes.lose_lease(round % 3).await;
        nodes.until_alive(round % 3).await;
    }
    load.until_more(60).await;
    let sent = load.stop().await;
    println!("fence {fence}: {} acknowledged, {} sent again", sent.acknowledged(), sent.again);
    assert!(sent.acknowledged() > 0, "something was at stake");
    let outcome = nodes.check(TOPIC, &sent).await;
    let refused = nodes.remote.refusals();
    if fence {
        nodes.stop().await;
    }
    (refused, outcome)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broker_that_joins_takes_its_share_and_one_that_stops_gives_it_back() {
    let mut nodes = Nodes::start(2).await;
    nodes.create_topic(TOPIC, 8).await;
    let load = Load::start(&nodes, TOPIC, 8).await;
    load.until_more(100).await;
    nodes.add().await;
    eventually("the newcomer has its share", async || {
        let leaders = nodes.leaders(0, TOPIC).await;
        leaders.iter().filter(|leader| **leader == 3).count() >= 2
    })
    .await;
    load.until_more(100).await;
    nodes.stop_one(0).await;
    eventually("nothing is left to the one that stopped", async || {
        nodes.leaders(1, TOPIC).await.iter().all(|leader| *leader == 2 || *leader == 3)
    })
    .await;
    load.until_more(100).await;
    let sent = load.stop().await;
    eventually("manifests that were read are removed", async || nodes.objects("manifests") == 0).await;
    eventually("nothing is left of the broker that stopped", async || nodes.lives() <= 2).await;
    nodes.check(TOPIC, &sent).await.unwrap();
    nodes.stop().await;
}

/// What a producer had written first was lost with its owner. librdkafka believes that it is stored when a later
/// batch is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_batch_is_not_taken_before_the_first_when_the_owner_has_changed() {
    let nodes = Nodes::start(2).await;
    nodes.create_topic(TOPIC, 1).await;
    for at in 0..2 {
        nodes.lose_lease(at).await;
        nodes.until_alive(at).await;
    }
    eventually("it is served again", async || nodes.produce(TOPIC, 7, 0).await == Ok(0)).await;
    assert_eq!(nodes.produce(TOPIC, 8, 1).await, Err(ErrorCode::OutOfOrderSequenceNumber.code()));
    assert_eq!(nodes.produce(TOPIC, 8, 0).await, Ok(1));
    assert_eq!(nodes.produce(TOPIC, 8, 1).await, Ok(2));
    nodes.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn committed_offsets_and_the_coordinator_move_together() {
    let nodes = Nodes::start(3).await;
    nodes.create_topic(TOPIC, 1).await;
    for n in 0..12 {
        nodes.commit(&format!("group-{n}"), TOPIC, 100 + n).await;
    }
    for victim in 0..3 {
        nodes.lose_lease(victim).await;
        nodes.until_alive(victim).await;
        for n in 0..12 {
            assert_eq!(nodes.committed(&format!("group-{n}"), TOPIC).await, 100 + n);
        }
    }
    nodes.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deleted_topic_is_gone_everywhere_and_leaves_no_object() {
    let nodes = Nodes::start(3).await;
    nodes.create_topic(TOPIC, 6).await;
    let load = Load::start(&nodes, TOPIC, 6).await;
    load.until_more(50).await;
    load.stop().await;
    nodes.delete_topic(TOPIC).await;
    for at in 0..3 {
        eventually("nobody knows it", async || nodes.leaders(at, TOPIC).await.is_empty()).await;
    }
    eventually("no assignment is left", async || nodes.keys("assignments/").await == 0).await;
    eventually("no object is left", async || nodes.objects("data") + nodes.objects("manifests") == 0).await;
    nodes.create_topic(TOPIC, 2).await;
    let load = Load::start(&nodes, TOPIC, 2).await;
    load.until_more(20).await;
    let sent = load.stop().await;
    nodes.check(TOPIC, &sent).await.unwrap();
    nodes.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn everything_is_there_again_after_all_brokers_stopped() {
    let mut nodes = Nodes::start(2).await;
    nodes.create_topic(TOPIC, 4).await;
    let load = Load::start(&nodes, TOPIC, 4).await;
    load.until_more(200).await;
    let sent = load.stop().await;
    nodes.stop_one(0).await;
    nodes.stop_one(0).await;
    tokio::time::sleep(Duration::from_millis(10)).await;
    nodes.add().await;
    nodes.check(TOPIC, &sent).await.unwrap();
    nodes.stop().await;
}
