//! A region of three brokers linked to a region of one: owners change, brokers come and go, the mirror
//! restarts, and every record is on both sides once, in each origin's order.

#![allow(clippy::unwrap_used)]

mod regions;

use std::process::Command;
use std::time::Duration;

use broker::config::Storage;
use control::v1;
use kafka::private::{LinkState, NoteKind};
use mirror::LinkConfig;
use regions::nodes::{Load, Nodes, alone, certificate};
use regions::{Region, eventually, link};

const TOPIC: &str = "t";
const PARTITIONS: i32 = 6;

struct Two {
    /// The mirror of the region of several brokers.
    east: Region,
    west: Region,
    nodes: Nodes,
    _base: tempfile::TempDir,
}

impl Two {
    async fn start() -> Two {
        let base = tempfile::tempdir().unwrap();
        let nodes = Nodes::start("east", &certificate(base.path()), 3).await;
        let mut east = Region::new(base.path(), "east", Storage::Memory);
        let mut west = Region::new(base.path(), "west", Storage::Memory);
        east.brokers = nodes.internal();
        west.start_broker().await;
        // One side dials, so that no connection is replaced by another.
        east.start_mirror(vec![east.link_to(&west)]).await;
        west.start_mirror(vec![LinkConfig { address: None, ..west.link_to(&east) }]).await;
        let two = Two { east, west, nodes, _base: base };
        let client = regions::Client(two.nodes.client().any().await.unwrap());
        client.create(TOPIC, PARTITIONS, &[]).await;
        let crossed = eventually(async || two.west.client().await.log_end(TOPIC, PARTITIONS - 1).await >= 0);
        assert!(crossed.await, "{:?}", two.west.link("east"));
        two
    }

    async fn loads(&self) -> [Load; 2] {
        let (nodes, west) = (&self.nodes, &self.west);
        [
            Load::start(|| nodes.client(), TOPIC, PARTITIONS, "e").await,
            Load::start(|| alone(west), TOPIC, PARTITIONS, "w").await,
        ]
    }

    /// What is wrong; what was acknowledged in each region is on both sides, once and in order.
    async fn judge(&self, loads: [Load; 2]) -> Result<usize, String> {
        let [e, w] = loads;
        let written = [e.stop().await, w.stop().await];
        let mut total = 0;
        for partition in 0..PARTITIONS {
            let (from_east, from_west) = (&written[0][&partition], &written[1][&partition]);
            let count = from_east.len() + from_west.len();
            let (mut there, mut here) = (Vec::new(), Vec::new());
            let all = eventually(async || {
                here = self.nodes.values(TOPIC, partition).await;
                there = self.west.client().await.try_values(TOPIC, partition).await.unwrap();
                here.len() >= count && there.len() >= count
            });
            if !all.await {
                let counts = (here.len(), there.len());
                let (state, reason, partitions) = self.east.link("west");
                return Err(format!(
                    "partition {partition}: {counts:?} of {count} arrived; {state:?} {reason} {partitions:?}"
                ));
            }
            for values in [&here, &there] {
                for (letter, wanted) in [('e', from_east), ('w', from_west)] {
                    let found: Vec<_> = values.iter().filter(|value| value.starts_with(letter)).collect();
                    if !found.iter().copied().eq(wanted) {
                        let at = found.iter().zip(wanted).position(|(found, wanted)| *found != wanted);
                        return Err(format!(
                            "partition {partition}: of {} from {letter} there are {}; others from {at:?} on",
                            wanted.len(),
                            found.len()
                        ));
                    }
                }
            }
            total += count;
        }
        Ok(total)
    }

    async fn until_more(&self, loads: &[Load; 2], count: u64) {
        let aim = loads.each_ref().map(|load| load.count() + count);
        let more = eventually(async || (0..2).all(|at| loads[at].count() >= aim[at]));
        assert!(more.await, "producers are stuck: {:?}", loads.each_ref().map(Load::count));
    }

    async fn stop(mut self) {
        self.east.stop_mirror().await;
        self.west.stop_mirror().await;
        self.west.stop_broker().await;
        self.nodes.stop().await;
    }
}

/// Lives end, brokers come and go, partitions are moved, the mirror restarts; under load on both sides.
/// `seconds`: two more mirrors carry the same records at the same time, and only the apply rule keeps them
/// apart.
async fn restless(rounds: usize, seconds: bool) -> Result<(), String> {
    let mut two = Two::start().await;
    let mut more = [two.east.second(), two.west.second()];
    if seconds {
        let [east, west] = &mut more;
        link(east, west).await;
    }
    let loads = two.loads().await;
    let (mut moved, before) = (0, two.nodes.epochs(TOPIC).await);
    for round in 0..rounds {
        two.until_more(&loads, 100).await;
        match round % 4 {
            0 => two.nodes.lose_lease(round / 4 % 3),
            1 => {
                two.nodes.stop_one(0).await;
                two.until_more(&loads, 100).await;
                two.nodes.add().await;
            }
            2 => {
                for partition in 0..PARTITIONS {
                    moved += usize::from(two.nodes.move_on(TOPIC, partition).await);
                }
            }
            _ => {
                let links = vec![two.east.link_to(&two.west)];
                two.east.stop_mirror().await;
                // Those that the mirror was told of first may be gone.
                two.east.brokers = two.nodes.internal();
                two.east.start_mirror(links).await;
            }
        }
    }
    two.until_more(&loads, 100).await;
    let sent = loads.each_ref().map(Load::count);
    let total = two.judge(loads).await?;
    let after = two.nodes.epochs(TOPIC).await;
    let lives: i32 = after.iter().zip(&before).map(|(after, before)| after - before).sum();
    println!("{total} records, {sent:?} by region; {lives} changes of owners, {moved} wished for");
    assert!(sent.iter().all(|sent| *sent > 0) && lives >= rounds as i32, "something was at stake");
    let notes = two.west.notes().await;
    assert!(notes.iter().all(|note| note.kind == NoteKind::Linked), "nothing was lost or reset: {notes:?}");
    for (region, peer) in [(&two.east, "west"), (&two.west, "east")] {
        let (_, _, partitions) = region.link(peer);
        assert!(partitions.iter().all(|p| p.state != LinkState::Faulted), "{partitions:?}");
    }
    for region in more.iter_mut().filter(|_| seconds) {
        region.stop_mirror().await;
    }
    two.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn every_record_is_in_both_regions_once_whoever_owns_its_partition() {
    restless(8, false).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn two_mirrors_of_a_cluster_apply_every_record_once() {
    restless(4, true).await.unwrap();
}

#[test]
fn twin_without_the_apply_rule_loses_or_repeats_records() {
    // A switch is read once in a process, so the twin has one of its own.
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "two_mirrors_of_a_cluster_apply_every_record_once", "--nocapture"])
        .env("SEALANE_TEST_OFF", "apply-rule")
        .output()
        .unwrap();
    let said =
        String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
    assert!(!output.status.success(), "the rule is off and nobody notices: {said}");
    let why = said.lines().find(|line| line.contains("partition ")).unwrap_or_else(|| panic!("{said}"));
    println!("failed as it must: {why}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_moved_partition_goes_on_in_the_same_session_and_is_not_taken_for_a_truncated_one() {
    let mut two = Two::start().await;
    let client = two.nodes.client();
    let west = two.west.client().await;
    let mut wanted = Vec::new();
    for round in 0..4 {
        let value = format!("e{round}");
        wanted.push(value.clone());
        let produced = eventually(async || {
            client.forget(TOPIC);
            let Ok((owner, _)) = client.leader(TOPIC, 0).await else { return false };
            regions::Client(owner).offer(TOPIC, 0, &value).await
        });
        assert!(produced.await);
        assert_eq!(west.wait_for(TOPIC, 0, wanted.len()).await, wanted);
        let owner = two.nodes.leaders(TOPIC).await[0];
        let moved = eventually(async || {
            two.nodes.move_on(TOPIC, 0).await || two.nodes.leaders(TOPIC).await[0] != owner
        });
        assert!(moved.await);
        assert!(eventually(async || two.nodes.leaders(TOPIC).await[0] != owner).await, "it moves");
    }
    let epochs = two.nodes.epochs(TOPIC).await;
    assert!(epochs[0] >= 4, "each move is an epoch: {epochs:?}");
    assert_eq!(two.east.connections("west"), 1, "the session went on");

    // A new session shows the claim of an epoch long gone.
    let links = vec![two.east.link_to(&two.west)];
    two.east.stop_mirror().await;
    two.east.start_mirror(links).await;
    let owner = eventually(async || {
        client.forget(TOPIC);
        let Ok((owner, _)) = client.leader(TOPIC, 0).await else { return false };
        regions::Client(owner).offer(TOPIC, 0, "e4").await
    });
    assert!(owner.await);
    wanted.push("e4".to_owned());
    assert_eq!(west.wait_for(TOPIC, 0, wanted.len()).await, wanted);
    // And the other way: what west sends is taken by the owner of the moment.
    west.produce(TOPIC, 0, "w0").await;
    let there = eventually(async || two.nodes.values(TOPIC, 0).await.contains(&"w0".to_owned()));
    assert!(there.await, "{:?}", two.east.link("west"));
    assert!(two.west.notes().await.iter().all(|note| note.kind == NoteKind::Linked));
    two.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_broker_shows_the_links_and_knows_when_a_policy_is_taken_over() {
    let two = Two::start().await;
    for at in 0..two.nodes.count() {
        let mut control = two.nodes.control(at).await;
        let shown = eventually(async || {
            let status = control.mirror_status(v1::MirrorStatusRequest {}).await.unwrap().into_inner();
            status.links.len() == 1 && status.links[0].partitions.len() == 2 * PARTITIONS as usize
        });
        assert!(shown.await, "broker {at} shows the link");
        let change = v1::SetLinkRequest {
            peer: "west".to_owned(),
            rate_bytes_max: Some(1_000_000 + at as u64),
            ..v1::SetLinkRequest::default()
        };
        let set = control.set_link(change).await.unwrap().into_inner();
        assert_eq!(set.warnings, Vec::<String>::new(), "broker {at} knows that the mirror has it");
        let paused = v1::SetLinkRequest {
            peer: "west".to_owned(),
            paused: Some(true),
            ..v1::SetLinkRequest::default()
        };
        let set = control.set_link(paused.clone()).await.unwrap().into_inner();
        assert_eq!(set.warnings, Vec::<String>::new());
        let is_paused = eventually(async || two.east.link("west").0 == LinkState::Paused);
        assert!(is_paused.await, "{:?}", two.east.link("west"));
        let resumed = v1::SetLinkRequest { paused: Some(false), ..paused };
        control.set_link(resumed).await.unwrap();
        let is_up = eventually(async || two.east.link("west").0 == LinkState::Active);
        assert!(is_up.await, "{:?}", two.east.link("west"));
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
    two.stop().await;
}
