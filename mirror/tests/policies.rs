//! What crosses a link is what its policy says, from the moment it says so, and nothing is lost by a change
//! of mind: real brokers, real UDP, policies set through the control service.

#![allow(clippy::unwrap_used)]

mod regions;

use std::time::Duration;

use broker::config::Storage;
use control::v1::{PatternList, SetLinkRequest};
use kafka::private::{LinkState, NoteKind, PartitionReport};
use regions::{Client, Region, eventually, link, numbered, same_in_both, stop, two};

fn paused(paused: bool) -> SetLinkRequest {
    SetLinkRequest { paused: Some(paused), ..SetLinkRequest::default() }
}

fn exclude(patterns: &[&str]) -> SetLinkRequest {
    let patterns = patterns.iter().map(|pattern| (*pattern).to_owned()).collect();
    SetLinkRequest { exclude: Some(PatternList { patterns }), ..SetLinkRequest::default() }
}

fn rate(bytes: u64) -> SetLinkRequest {
    SetLinkRequest { rate_bytes_max: Some(bytes), ..SetLinkRequest::default() }
}

fn deletions(cross: bool) -> SetLinkRequest {
    SetLinkRequest { deletions: Some(cross), ..SetLinkRequest::default() }
}

async fn wait_state(region: &Region, peer: &str, state: LinkState, says: &str) {
    let so = eventually(async || {
        let (now, reason, _) = region.link(peer);
        now == state && reason.contains(says)
    });
    assert!(so.await, "{}: {:?}", region.name, region.link(peer));
}

async fn wait_gone(client: &Client, topic: &str) {
    assert!(eventually(async || client.log_end(topic, 0).await < 0).await, "{topic} is still there");
}

/// Waits until the link between two regions carries a topic both ways, and so both ends remember it.
async fn wait_linked(region: &Region, peer: &str, topic: &str) {
    let both = eventually(async || {
        let partitions = region.link(peer).2;
        let active = |p: &&PartitionReport| p.topic.as_str() == topic && p.state == LinkState::Active;
        partitions.iter().filter(active).count() == 2
    });
    assert!(both.await, "{}: {:?}", region.name, region.link(peer));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_paused_link_carries_nothing_and_goes_on_without_loss() {
    let base = tempfile::tempdir().unwrap();
    let (mut east, west) = two(base.path(), Storage::Disk).await;
    let w = west.client().await;
    east.client().await.create("t", 1, &[]).await;
    east.client().await.produce_all("t", 0, numbered("e", 0..5)).await;
    w.wait_for("t", 0, 5).await;
    w.produce_all("t", 0, numbered("w", 0..5)).await;
    same_in_both(&east.client().await, &w, 10).await;

    east.set_link("west", paused(true)).await;
    wait_state(&east, "west", LinkState::Paused, "--resume").await;
    wait_state(&west, "east", LinkState::Paused, "region east has paused this link").await;
    east.client().await.produce_all("t", 0, numbered("e", 5..10)).await;
    w.produce_all("t", 0, numbered("w", 5..10)).await;
    // The pause is the region's and not the process's: it outlives both.
    east.stop_mirror().await;
    east.stop_broker().await;
    east.start_broker().await;
    east.start_mirror(vec![east.link_to(&west)]).await;
    wait_state(&east, "west", LinkState::Paused, "--resume").await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    let e = east.client().await;
    assert_eq!((e.values("t", 0).await.len(), w.values("t", 0).await.len()), (15, 15), "something crossed");
    assert!(east.link("west").2.iter().all(|p| p.lag_records.is_none()), "lag is not known meanwhile");

    east.set_link("west", paused(false)).await;
    same_in_both(&e, &w, 20).await;
    wait_state(&east, "west", LinkState::Active, "").await;
    assert!(west.notes().await.iter().all(|note| note.kind == NoteKind::Linked), "{:?}", west.notes().await);
    stop([east, west]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_topic_that_a_policy_leaves_out_stays_at_home_and_is_listed_until_it_may_cross() {
    let base = tempfile::tempdir().unwrap();
    let (east, west) = two(base.path(), Storage::Memory).await;
    let (e, w) = (east.client().await, west.client().await);
    for topic in ["open", "secret.plan"] {
        e.create(topic, 1, &[]).await;
        e.produce(topic, 0, "e0").await;
        w.wait_for(topic, 0, 1).await;
    }
    w.produce("secret.plan", 0, "w0").await;
    e.wait_for("secret.plan", 0, 2).await;

    east.set_link("west", exclude(&["secret.*"])).await;
    // One that is made after the policy was set is never offered, not even for a moment.
    e.create("secret.new", 1, &[]).await;
    e.produce("secret.new", 0, "e0").await;
    for topic in ["open", "secret.plan"] {
        e.produce(topic, 0, "e1").await;
        w.produce(topic, 0, "w1").await;
    }
    e.wait_for("open", 0, 3).await;
    w.wait_for("open", 0, 3).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(w.log_end("secret.new", 0).await, -1, "a topic crossed that was left out");
    assert_eq!(e.values("secret.plan", 0).await, ["e0", "w0", "e1"]);
    assert_eq!(w.values("secret.plan", 0).await, ["e0", "w0", "w1"]);
    // Listed with its range: west's records are held below the offset after w0, which is 2 there, or 3
    // with the marker before e0.
    let entries = east.entries("filter").await;
    let whole: Vec<_> = entries.iter().filter(|(_, partition, ..)| *partition == -1).collect();
    let names: Vec<_> = whole.iter().map(|(topic, ..)| topic.as_str()).collect();
    assert_eq!(names, ["secret.new", "secret.plan"], "{entries:?}");
    let held: Vec<_> = entries.iter().filter(|(_, partition, ..)| *partition == 0).collect();
    assert!(matches!(held[..], [(topic, 0, 2..=3, -1)] if topic == "secret.plan"), "{entries:?}");
    // The other end offers what it may, and east says why it does not take it.
    let partitions = east.link("west").2;
    let left_out = partitions.iter().find(|p| p.topic.as_str() == "secret.plan");
    assert!(
        left_out.is_some_and(|p| p.state == LinkState::Paused && p.reason.contains("leaves this topic out"))
    );

    east.set_link("west", exclude(&[])).await;
    w.wait_for("secret.new", 0, 1).await;
    for client in [&e, &w] {
        let mut values = client.wait_for("secret.plan", 0, 4).await;
        values.sort();
        assert_eq!(values, ["e0", "e1", "w0", "w1"]);
    }
    assert_eq!(east.entries("filter").await, []);
    assert_eq!(west.entries("gap").await, []);
    stop([east, west]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rate_limit_holds_records_back_and_changes_without_a_new_connection() {
    let base = tempfile::tempdir().unwrap();
    let (east, west) = two(base.path(), Storage::Memory).await;
    let (e, w) = (east.client().await, west.client().await);
    e.create("t", 1, &[]).await;
    e.produce("t", 0, "e0").await;
    w.wait_for("t", 0, 1).await;
    // One unit overdraws it for an hour and more.
    east.set_link("west", rate(1)).await;
    let mut sent = 1;
    let held = eventually(async || {
        e.produce("t", 0, &format!("e{sent}")).await;
        sent += 1;
        let partitions = east.link("west").2;
        partitions.iter().any(|p| p.state == LinkState::Lagging && p.reason.contains("limit of 1 bytes"))
    });
    assert!(held.await, "{:?}", east.link("west"));
    assert!(w.values("t", 0).await.len() < sent, "nothing is held back");
    // The other direction is not limited.
    w.produce("t", 0, "w0").await;
    assert!(eventually(async || e.values("t", 0).await.contains(&"w0".to_owned())).await);

    // Both sides dial at the start, and the second connection may take the place of the first.
    let before = east.connections("west");
    east.set_link("west", rate(100 << 20)).await;
    w.wait_for("t", 0, sent + 1).await;
    assert_eq!(east.connections("west"), before, "a new connection was made");
    stop([east, west]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deletion_crosses_where_both_ends_say_so_and_a_topic_made_again_is_new() {
    let base = tempfile::tempdir().unwrap();
    let (mut east, west) = two(base.path(), Storage::Memory).await;
    let (e, w) = (east.client().await, west.client().await);
    for topic in ["a", "b"] {
        e.create(topic, 1, &[]).await;
        e.produce(topic, 0, "old").await;
        w.wait_for(topic, 0, 1).await;
        wait_linked(&east, "west", topic).await;
    }
    // One end alone does not decide over the other's records.
    east.set_link("west", deletions(true)).await;
    e.delete("a").await;
    let held = eventually(async || {
        let partitions = east.link("west").2;
        partitions.iter().any(|p| p.topic.as_str() == "a" && p.reason.contains("deleted in this region"))
    });
    assert!(held.await, "{:?}", east.link("west"));
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(w.values("a", 0).await, ["old"]);
    west.set_link("east", deletions(true)).await;
    wait_gone(&w, "a").await;

    // While the link is down.
    east.stop_mirror().await;
    e.delete("b").await;
    east.start_mirror(vec![east.link_to(&west)]).await;
    wait_gone(&w, "b").await;
    let crossed: Vec<_> = west.entries("deletion").await.into_iter().map(|(topic, ..)| topic).collect();
    assert_eq!(crossed, ["a", "b"]);
    assert_eq!(east.entries("deletion").await, [], "who deleted is not told of its own deletion");

    // Made again at either end: it crosses, and nothing deletes it.
    e.create("a", 1, &[]).await;
    e.produce("a", 0, "new").await;
    w.create("b", 1, &[]).await;
    w.produce("b", 0, "new").await;
    assert_eq!(w.wait_for("a", 0, 1).await, ["new"]);
    assert_eq!(e.wait_for("b", 0, 1).await, ["new"]);
    tokio::time::sleep(Duration::from_secs(1)).await;
    for client in [&e, &w] {
        for topic in ["a", "b"] {
            assert_eq!(client.values(topic, 0).await, ["new"], "{topic}");
        }
    }
    stop([east, west]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deletion_that_crossed_is_not_passed_on() {
    let base = tempfile::tempdir().unwrap();
    let (mut east, mut west) = (
        Region::new(base.path(), "east", Storage::Memory),
        Region::new(base.path(), "west", Storage::Memory),
    );
    let mut north = Region::new(base.path(), "north", Storage::Memory);
    for region in [&mut east, &mut west, &mut north] {
        region.start_broker().await;
    }
    east.start_mirror(vec![east.link_to(&west)]).await;
    west.start_mirror(vec![west.link_to(&east), west.link_to(&north)]).await;
    north.start_mirror(vec![north.link_to(&west)]).await;
    for (region, peer) in [(&east, "west"), (&west, "east"), (&west, "north"), (&north, "west")] {
        region.set_link(peer, deletions(true)).await;
    }
    let (e, w, n) = (east.client().await, west.client().await, north.client().await);
    e.create("t", 1, &[]).await;
    e.produce("t", 0, "e0").await;
    w.wait_for("t", 0, 1).await;
    // West's own record, which alone goes on to north.
    w.produce("t", 0, "w0").await;
    n.wait_for("t", 0, 1).await;
    wait_linked(&east, "west", "t").await;
    wait_linked(&west, "north", "t").await;
    e.delete("t").await;
    wait_gone(&w, "t").await;
    let held = eventually(async || {
        let partitions = west.link("north").2;
        partitions.iter().any(|p| p.reason.contains("deleted here because another region deleted it"))
    });
    assert!(held.await, "{:?}", west.link("north"));
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(n.values("t", 0).await, ["w0"], "north has no link to the region that deleted it");
    north.stop_mirror().await;
    north.stop_broker().await;
    stop([east, west]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_policy_that_is_there_before_the_mirror_holds_from_its_first_moment() {
    let base = tempfile::tempdir().unwrap();
    let mut east = Region::new(base.path(), "east", Storage::Memory);
    let mut west = Region::new(base.path(), "west", Storage::Memory);
    east.start_broker().await;
    west.start_broker().await;
    let (e, w) = (east.client().await, west.client().await);
    for topic in ["kept", "sent"] {
        e.create(topic, 1, &[]).await;
        e.produce(topic, 0, "e0").await;
    }
    east.set_link("west", exclude(&["kept"])).await;
    link(&mut east, &mut west).await;
    w.wait_for("sent", 0, 1).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(w.log_end("kept", 0).await, -1);
    stop([east, west]).await;
}
