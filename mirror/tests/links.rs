//! Links between regions in one process: real brokers, real UDP, real TLS.

#![allow(clippy::unwrap_used)]

mod regions;

use std::time::Duration;

use broker::config::Storage;
use chassis::certs::CertificateDir;
use chassis::tls::TlsFiles;
use control::v1::SetLinkRequest;
use kafka::batch::{Attributes, Codec};
use kafka::private::{Direction, LinkState, NoteKind};
use kafka::record::BatchBuilder;
use kafka::{Offset, ProducerEpoch, ProducerId, TimestampMs};
use mirror::LinkConfig;
use regions::{Region, by_origin, copy, eventually, link, now, numbered, same_in_both, stop, two};

#[tokio::test(flavor = "multi_thread")]
async fn both_regions_converge_and_their_logs_rest() {
    let base = tempfile::tempdir().unwrap();
    let (mut east, mut west) = two(base.path(), Storage::Memory).await;
    let (e, w) = (east.client().await, west.client().await);
    e.create("t", 1, &[]).await;
    e.produce_all("t", 0, numbered("e", 0..10)).await;
    assert_eq!(w.wait_for("t", 0, 10).await, numbered("e", 0..10));
    w.produce_all("t", 0, numbered("w", 0..10)).await;
    same_in_both(&e, &w, 20).await;

    // At rest: neither log moves while nobody produces, whoever restarts.
    let ends = (e.log_end("t", 0).await, w.log_end("t", 0).await);
    tokio::time::sleep(Duration::from_secs(3)).await;
    west.stop_mirror().await;
    west.start_mirror(vec![west.link_to(&east)]).await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!((e.log_end("t", 0).await, w.log_end("t", 0).await), ends, "logs grow at rest");
    let active = eventually(async || {
        let (state, _, partitions) = west.link("east");
        let done =
            |p: &kafka::private::PartitionReport| p.lag_records == Some(0) && p.state == LinkState::Active;
        state == LinkState::Active && partitions.len() == 2 && partitions.iter().all(done)
    });
    assert!(active.await, "{:?}", west.link("east"));

    // Cut, produce on both sides, heal.
    east.stop_mirror().await;
    e.produce_all("t", 0, numbered("e", 10..15)).await;
    w.produce_all("t", 0, numbered("w", 10..15)).await;
    let unknown = eventually(async || {
        let (state, _, partitions) = west.link("east");
        state == LinkState::Connecting && partitions.iter().all(|p| p.lag_records.is_none())
    });
    assert!(unknown.await, "lag of a silent peer is not known: {:?}", west.link("east"));
    east.start_mirror(vec![east.link_to(&west)]).await;
    same_in_both(&e, &w, 30).await;
    stop([east, west]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_partition_of_a_wide_topic_crosses() {
    // Far more control frames at once than one turn of a session handles.
    const WIDE: i32 = 400;
    let base = tempfile::tempdir().unwrap();
    let (mut east, west) = two(base.path(), Storage::Memory).await;
    east.client().await.create("t", WIDE, &[]).await;
    for round in 0..3 {
        let all = eventually(async || {
            [east.link("west"), west.link("east")].iter().all(|(.., partitions)| {
                partitions.iter().filter(|p| p.lag_records == Some(0)).count() == 2 * WIDE as usize
            })
        });
        assert!(all.await, "round {round}: {:?} {:?}", east.link("west"), west.link("east"));
        east.stop_mirror().await;
        east.start_mirror(vec![east.link_to(&west)]).await;
    }
    stop([east, west]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn brokers_and_mirrors_may_restart_at_any_time() {
    let base = tempfile::tempdir().unwrap();
    let (mut east, mut west) = two(base.path(), Storage::Disk).await;
    east.client().await.create("t", 1, &[]).await;
    for round in 0..4 {
        let from = round * 5;
        east.client().await.produce_all("t", 0, numbered("e", from..from + 5)).await;
        match round {
            0 => {
                east.stop_broker().await;
                east.start_broker().await;
            }
            1 => {
                west.stop_broker().await;
                west.start_broker().await;
            }
            2 => {
                west.stop_mirror().await;
                west.start_mirror(vec![west.link_to(&east)]).await;
            }
            _ => {}
        }
        if west.client().await.log_end("t", 0).await >= 0 {
            west.client().await.produce_all("t", 0, numbered("w", from..from + 5)).await;
        } else {
            west.client().await.wait_for("t", 0, 1).await;
            west.client().await.produce_all("t", 0, numbered("w", from..from + 5)).await;
        }
    }
    same_in_both(&east.client().await, &west.client().await, 40).await;
    stop([east, west]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn records_of_a_recreated_topic_arrive_once_and_the_reset_is_shown() {
    let base = tempfile::tempdir().unwrap();
    let (mut east, west) = two(base.path(), Storage::Memory).await;
    let (e, w) = (east.client().await, west.client().await);
    e.create("t", 1, &[]).await;
    e.produce_all("t", 0, numbered("a", 0..10)).await;
    w.wait_for("t", 0, 10).await;

    // While the link is down, with fewer records than before.
    east.stop_mirror().await;
    e.delete("t").await;
    e.create("t", 1, &[]).await;
    e.produce_all("t", 0, numbered("b", 0..3)).await;
    east.start_mirror(vec![east.link_to(&west)]).await;
    let values = w.wait_for("t", 0, 13).await;
    assert_eq!(values[10..], numbered("b", 0..3));

    // While the link runs, with more records than before.
    e.delete("t").await;
    e.create("t", 1, &[]).await;
    e.produce_all("t", 0, numbered("c", 0..12)).await;
    let values = w.wait_for("t", 0, 25).await;
    assert_eq!(values[13..], numbered("c", 0..12));
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(w.values("t", 0).await.len(), 25, "nothing comes twice");
    assert_eq!(e.values("t", 0).await, numbered("c", 0..12), "the old copy does not come back");

    let resets: Vec<_> = west.notes().await.into_iter().filter(|n| n.kind == NoteKind::Reset).collect();
    assert_eq!(resets.len(), 2, "{resets:?}");
    assert!(resets.iter().all(|n| n.topic.as_str() == "t" && n.partition.0 == 0), "{resets:?}");
    let metrics = west.metrics();
    assert!(metrics.contains("sealane_mirror_resets_total{peer=\"east\"} 2"), "{metrics}");
    stop([east, west]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_topic_deleted_here_is_not_brought_back_until_it_is_made_again() {
    let base = tempfile::tempdir().unwrap();
    let (east, west) = two(base.path(), Storage::Memory).await;
    let (e, w) = (east.client().await, west.client().await);
    e.create("t", 1, &[]).await;
    e.produce_all("t", 0, numbered("e", 0..5)).await;
    w.wait_for("t", 0, 5).await;
    w.delete("t").await;
    let held = eventually(async || {
        let (_, _, partitions) = west.link("east");
        partitions.iter().any(|p| p.state == LinkState::Paused && p.reason.contains("deleted in this region"))
    });
    assert!(held.await, "{:?}", west.link("east"));
    e.produce_all("t", 0, numbered("e", 5..8)).await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(w.log_end("t", 0).await, -1, "the link brought a deleted topic back");
    assert_eq!(e.values("t", 0).await.len(), 8, "deletion does not cross");
    w.create("t", 1, &[]).await;
    assert_eq!(w.wait_for("t", 0, 8).await, numbered("e", 0..8));
    stop([east, west]).await;
}

async fn many_topics(streams_max: u32) {
    let base = tempfile::tempdir().unwrap();
    let mut east = Region::new(base.path(), "east", Storage::Memory);
    let mut west = Region::new(base.path(), "west", Storage::Memory);
    west.streams_max = streams_max;
    east.start_broker().await;
    west.start_broker().await;
    link(&mut east, &mut west).await;
    let (e, w) = (east.client().await, west.client().await);
    let names: Vec<String> = (0..150).map(|n| format!("topic-{n}")).collect();
    for name in &names {
        e.create(name, 1, &[]).await;
        e.produce(name, 0, "first").await;
    }
    for name in &names {
        e.produce(name, 0, "second").await;
    }
    for name in &names {
        assert_eq!(w.wait_for(name, 0, 2).await, ["first", "second"], "{name}");
    }
    for n in 0..50 {
        let name = format!("short-{n}");
        e.create(&name, 1, &[]).await;
        e.delete(&name).await;
    }
    e.produce("topic-7", 0, "third").await;
    assert_eq!(w.wait_for("topic-7", 0, 3).await, ["first", "second", "third"]);
    stop([east, west]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hundred_and_fifty_topics_share_a_few_streams() {
    many_topics(32).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_peer_that_allows_eight_streams_gets_everything_too() {
    many_topics(8).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_link_of_a_region_with_itself_is_refused() {
    let base = tempfile::tempdir().unwrap();
    let mut east = Region::new(base.path(), "east", Storage::Memory);
    east.start_broker().await;
    let mut itself = east.link_to(&east);
    itself.peer = "west".to_owned();
    east.start_mirror(vec![itself]).await;
    let refused = eventually(async || {
        let (state, reason, _) = east.link("west");
        state == LinkState::Faulted && reason.contains("both ends of this link are region east")
    });
    assert!(refused.await, "{:?}", east.link("west"));
    east.stop_mirror().await;
    east.stop_broker().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_peer_with_a_foreign_certificate_is_refused_with_one_clear_line() {
    let base = tempfile::tempdir().unwrap();
    let mut east = Region::new(base.path(), "east", Storage::Memory);
    let mut west = Region::new(base.path(), "west", Storage::Memory);
    east.start_broker().await;
    west.start_broker().await;
    east.start_mirror(vec![east.link_to(&west)]).await;
    let foreign = CertificateDir::open(&base.path().join("foreign")).unwrap();
    let mut config = west.mirror_config(vec![west.link_to(&east)]);
    config.link_tls = Some(foreign.leaf("sealane-mirror", &["127.0.0.1"]).unwrap());
    west.start_mirror_as(config).await;
    for (region, peer) in [(&east, "west"), (&west, "east")] {
        let refused = eventually(async || region.link(peer).1.contains("certificate"));
        assert!(refused.await, "{:?}", region.link(peer));
        let (state, reason, _) = region.link(peer);
        assert_eq!(state, LinkState::Connecting);
        assert_eq!(reason.lines().count(), 1, "{reason}");
    }
    stop([east, west]).await;
}

/// West has joined east and north, each with an authority of its own. Somebody of east's says that it is north; `bound` is
/// whether west's links name the authorities of their peers. What west says of north in the end.
async fn somebody_of_east_says_that_it_is_north(bound: bool) -> (LinkState, String) {
    let base = tempfile::tempdir().unwrap();
    let authority = |name: &str| base.path().join(name);
    let leaf = |of: &str, ca: &std::path::Path| {
        let dir = CertificateDir::open(&authority(of)).unwrap();
        let files = dir.leaf("sealane-mirror", &["127.0.0.1"]).unwrap();
        Some(TlsFiles { ca: Some(ca.to_owned()), ..files })
    };
    let of = |name: &str| {
        CertificateDir::open(&authority(name)).unwrap();
        authority(name).join("ca.crt")
    };
    let all = base.path().join("all.crt");
    let both: Vec<String> =
        ["of-east", "of-north"].iter().map(|name| std::fs::read_to_string(of(name)).unwrap()).collect();
    std::fs::write(&all, both.concat()).unwrap();
    let mut west = Region::new(base.path(), "west", Storage::Memory);
    let mut liar = Region::new(base.path(), "north", Storage::Memory);
    west.start_broker().await;
    liar.start_broker().await;
    let link = |peer: &str| LinkConfig {
        peer: peer.to_owned(),
        ca: bound.then(|| of(&format!("of-{peer}"))),
        ..LinkConfig::default()
    };
    let mut config = west.mirror_config(vec![link("east"), link("north")]);
    config.link_tls = leaf("of-west", &all);
    west.start_mirror_as(config).await;
    let mut config = liar.mirror_config(vec![liar.link_to(&west)]);
    config.link_tls = leaf("of-east", &of("of-west"));
    liar.start_mirror_as(config).await;
    let decided = eventually(async || {
        let (state, reason, _) = liar.link("west");
        state == LinkState::Active || reason.contains("no authority of region north")
    });
    assert!(decided.await, "{:?}", liar.link("west"));
    let (state, reason, _) = liar.link("west");
    stop([west, liar]).await;
    (state, reason)
}

#[tokio::test(flavor = "multi_thread")]
async fn one_joined_region_does_not_pass_for_another() {
    let (state, reason) = somebody_of_east_says_that_it_is_north(true).await;
    assert_eq!(state, LinkState::Faulted, "{reason}");
}

#[tokio::test(flavor = "multi_thread")]
async fn twin_where_no_link_names_its_authorities_it_does() {
    let (state, reason) = somebody_of_east_says_that_it_is_north(false).await;
    assert_eq!(state, LinkState::Active, "{reason}");
}

#[tokio::test(flavor = "multi_thread")]
async fn only_a_mirror_may_be_at_the_other_end() {
    let base = tempfile::tempdir().unwrap();
    let mut east = Region::new(base.path(), "east", Storage::Memory);
    let mut west = Region::new(base.path(), "west", Storage::Memory);
    east.start_broker().await;
    west.start_broker().await;
    east.start_mirror(vec![east.link_to(&west)]).await;
    let mut config = west.mirror_config(vec![west.link_to(&east)]);
    let certificates = CertificateDir::open(&base.path().join("certs")).unwrap();
    config.link_tls = Some(certificates.leaf("sealane-lane-router", &["127.0.0.1"]).unwrap());
    west.start_mirror_as(config).await;
    let refused = eventually(async || east.link("west").1.contains("is for \"sealane-lane-router\""));
    assert!(refused.await, "{:?}", east.link("west"));
    stop([east, west]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn three_regions_in_a_mesh_hold_the_same_records_and_relay_none() {
    let base = tempfile::tempdir().unwrap();
    let region = |name| Region::new(base.path(), name, Storage::Memory);
    let mut all = [region("east"), region("west"), region("north")];
    for region in &mut all {
        region.start_broker().await;
    }
    for i in 0..3 {
        let links = (0..3).filter(|j| *j != i).map(|j| all[i].link_to(&all[j])).collect();
        all[i].start_mirror(links).await;
    }
    all[0].client().await.create("t", 1, &[]).await;
    for region in &all {
        let client = region.client().await;
        assert!(eventually(async || client.log_end("t", 0).await >= 0).await);
        client.produce_all("t", 0, numbered(&region.name[..1], 0..10)).await;
    }
    let mut first = None;
    for region in &all {
        let values = by_origin(&region.client().await.wait_for("t", 0, 30).await);
        assert_eq!(*first.get_or_insert(values.clone()), values);
        assert_eq!(values.values().map(Vec::len).collect::<Vec<_>>(), [10, 10, 10]);
    }
    tokio::time::sleep(Duration::from_secs(2)).await;
    for mut region in all {
        assert_eq!(region.client().await.values("t", 0).await.len(), 30, "a record came twice");
        region.stop_mirror().await;
        region.stop_broker().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn records_of_ppe_lanes_stay_at_home_unless_the_link_names_them() {
    let base = tempfile::tempdir().unwrap();
    let (east, mut west) = two(base.path(), Storage::Memory).await;
    let e = east.client().await;
    e.create("t", 1, &[("sealane.lanes", "true")]).await;
    let mixed = |names: &[&str]| {
        let mut builder = BatchBuilder::new(Offset(0), now(), Codec::None);
        for (n, name) in names.iter().enumerate() {
            let lane = [("x-lane", Some(name.as_bytes()))];
            let headers = if name.is_empty() { &[][..] } else { &lane[..] };
            builder.push(n as i32, 0, None, Some(format!("{n}-{name}").as_bytes()), headers);
        }
        builder.build()
    };
    e.produce_batch("t", 0, mixed(&["ppe-x", "ppe-x"])).await;
    e.produce_batch("t", 0, mixed(&["", "boe-a", "ppe-x", ""])).await;
    let crossed = [(0, "0-".to_owned()), (1, "1-boe-a".to_owned()), (3, "3-".to_owned())];
    assert!(eventually(async || west.raw_values("t") == crossed).await, "{:?}", west.raw_values("t"));
    // The last batch was rewritten on its way: that proves nothing, and is no fault, after a restart.
    west.stop_mirror().await;
    west.start_mirror(vec![west.link_to(&east)]).await;
    e.produce_batch("t", 0, mixed(&["ppe-x"])).await;
    e.produce_batch("t", 0, mixed(&["boe-b"])).await;
    assert!(eventually(async || west.raw_values("t").len() == 4).await, "{:?}", west.link("east"));
    e.produce_batch("t", 0, mixed(&["ppe-x"])).await;
    let caught_up = eventually(async || {
        let partitions = west.link("east").2;
        partitions.len() == 2 && partitions.iter().all(|p| p.lag_records == Some(0))
    });
    assert!(caught_up.await, "what may not cross is no lag: {:?}", west.link("east"));

    // The same with PPE named by the link.
    let mut north = Region::new(base.path(), "north", Storage::Memory);
    north.start_broker().await;
    let mut east = east;
    east.stop_mirror().await;
    east.set_link("north", SetLinkRequest { ppe_lanes: Some(true), ..SetLinkRequest::default() }).await;
    east.start_mirror(vec![east.link_to(&north)]).await;
    north.start_mirror(vec![north.link_to(&east)]).await;
    assert!(eventually(async || north.raw_values("t").len() == 9).await, "{:?}", north.raw_values("t"));
    north.stop_mirror().await;
    north.stop_broker().await;
    stop([east, west]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_retention_took_before_it_was_sent_is_noted_as_a_gap() {
    let base = tempfile::tempdir().unwrap();
    let (mut east, west) = two(base.path(), Storage::Memory).await;
    let (e, w) = (east.client().await, west.client().await);
    e.create("t", 1, &[]).await;
    e.produce_all("t", 0, numbered("e", 0..10)).await;
    w.wait_for("t", 0, 10).await;
    east.stop_mirror().await;
    e.produce_all("t", 0, numbered("e", 10..15)).await;
    e.delete_records("t", 0, 13).await;
    east.start_mirror(vec![east.link_to(&west)]).await;
    assert_eq!(w.wait_for("t", 0, 12).await[10..], numbered("e", 13..15));
    let gaps = |notes: Vec<kafka::private::Note>| -> Vec<(i64, i64)> {
        let gaps = notes.into_iter().filter(|note| note.kind == NoteKind::Gap);
        gaps.map(|note| (note.from.0, note.to.0)).collect()
    };
    assert_eq!(gaps(west.notes().await), [(10, 13)]);
    stop([east, west]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_source_that_lost_its_end_is_a_fault_and_not_continued() {
    let base = tempfile::tempdir().unwrap();
    let (mut east, west) = two(base.path(), Storage::Disk).await;
    let w = west.client().await;
    east.client().await.create("t", 1, &[]).await;
    east.client().await.produce_all("t", 0, numbered("e", 0..5)).await;
    w.wait_for("t", 0, 5).await;
    east.stop_mirror().await;
    east.stop_broker().await;
    let old = base.path().join("old");
    copy(east.dir(), &old);
    east.start_broker().await;
    east.start_mirror(vec![east.link_to(&west)]).await;
    east.client().await.produce_all("t", 0, numbered("lost", 0..5)).await;
    w.wait_for("t", 0, 10).await;

    // The disk of yesterday comes back, and other records take the offsets.
    east.stop_mirror().await;
    east.stop_broker().await;
    std::fs::remove_dir_all(east.dir()).unwrap();
    copy(&old, east.dir());
    east.start_broker().await;
    east.client().await.produce_all("t", 0, numbered("other", 0..9)).await;
    east.start_mirror(vec![east.link_to(&west)]).await;
    for (region, peer, direction) in [(&west, "east", Direction::In), (&east, "west", Direction::Out)] {
        let faulted = eventually(async || {
            let (_, _, partitions) = region.link(peer);
            let fault = |p: &kafka::private::PartitionReport| {
                p.direction == direction
                    && p.state == LinkState::Faulted
                    && p.reason.contains("source truncated")
            };
            partitions.iter().any(fault)
        });
        assert!(faulted.await, "{:?}", region.link(peer));
    }
    assert_eq!(w.values("t", 0).await.len(), 10, "nothing goes under offsets that were used before");
    assert!(
        west.notes().await.iter().any(|n| n.kind == NoteKind::Reset && n.text.contains("source truncated"))
    );
    // The other direction goes on.
    w.produce("t", 0, "w0").await;
    let there = eventually(async || east.client().await.values("t", 0).await.contains(&"w0".to_owned()));
    assert!(there.await);
    stop([east, west]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn records_are_the_same_bytes_on_the_other_side() {
    let base = tempfile::tempdir().unwrap();
    let (east, west) = two(base.path(), Storage::Memory).await;
    let (e, w) = (east.client().await, west.client().await);
    e.create("t", 1, &[]).await;
    let many: Vec<String> = (0..300).map(|n| format!("h{n}")).collect();
    let many: Vec<(&str, Option<&[u8]>)> = many.iter().map(|key| (key.as_str(), Some(&b"v"[..]))).collect();
    let odd: &[(&str, Option<&[u8]>)] = &[
        ("b", Some(b"1")),
        ("a", None),
        ("a", Some(b"")),
        ("a", Some(b"2")),
        ("b", Some(b"1")),
        ("é", Some(b"\xff\x00")),
    ];
    for (n, codec) in
        [Codec::None, Codec::Gzip, Codec::Snappy, Codec::Lz4, Codec::Zstd].into_iter().enumerate()
    {
        let mut builder = BatchBuilder::new(Offset(0), TimestampMs(1_700_000_000_000 + n as i64), codec);
        builder.push(0, 0, None, Some(b"value"), odd);
        builder.push(1, 5, Some(b""), Some(b""), &[]);
        builder.push(2, 7, Some(b"key"), None, &many);
        e.produce_batch("t", 0, builder.build()).await;
    }
    w.wait_for("t", 0, 15).await;
    let strip = |seen: Vec<regions::Seen>| -> Vec<regions::Seen> {
        seen.into_iter().map(|record| regions::Seen { offset: 0, ..record }).collect()
    };
    let (here, there) = (e.read("t", 0).await.unwrap().0, w.read("t", 0).await.unwrap().0);
    assert_eq!(strip(there), strip(here));
    stop([east, west]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_remote_fences_a_local_producer() {
    let base = tempfile::tempdir().unwrap();
    let (east, west) = two(base.path(), Storage::Memory).await;
    let (e, w) = (east.client().await, west.client().await);
    e.create("t", 1, &[]).await;
    let idempotent = |value: &str, epoch: i16, sequence: i32| {
        let mut builder = BatchBuilder::new(Offset(0), now(), Codec::None);
        builder.push(0, 0, None, Some(value.as_bytes()), &[]);
        builder.producer(ProducerId(7), ProducerEpoch(epoch), sequence);
        builder.build()
    };
    for n in 0..3 {
        e.produce_batch("t", 0, idempotent(&format!("e{n}"), 9, n)).await;
    }
    w.wait_for("t", 0, 3).await;
    // The same producer id, an older epoch: no trace of the remote one.
    for n in 0..3 {
        assert_eq!(w.try_produce("t", 0, idempotent(&format!("w{n}"), 2, n)).await.unwrap(), 0);
    }
    let mut batches = Vec::new();
    let there = eventually(async || {
        let (records, _) = e.fetch("t", 0, 0).await.unwrap();
        batches = kafka::Batch::split_all(records, true).unwrap();
        batches.len() == 6
    });
    assert!(there.await, "{batches:?}");
    let (own, copied): (Vec<_>, Vec<_>) = batches.iter().partition(|b| b.header.producer_id.0 == 7);
    assert_eq!((own.len(), copied.len()), (3, 3));
    for batch in copied {
        assert_eq!(batch.header.base_sequence, -1);
        assert_eq!(batch.header.attributes.0 & Attributes::TRANSACTIONAL, 0);
    }
    stop([east, west]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn topics_follow_with_configuration_and_partitions() {
    let base = tempfile::tempdir().unwrap();
    let (east, west) = two(base.path(), Storage::Memory).await;
    let (e, w) = (east.client().await, west.client().await);
    e.create("t", 2, &[("retention.ms", "86400000")]).await;
    e.produce("t", 1, "one").await;
    let there = eventually(async || w.values("t", 1).await.len() == 1);
    assert!(there.await, "{:?} {:?}", west.link("east"), east.link("west"));
    let retention = async || w.config("t", "retention.ms").await;
    assert_eq!(retention().await, "86400000");
    e.grow("t", 4).await;
    e.produce("t", 3, "three").await;
    w.wait_for("t", 3, 1).await;
    w.produce("t", 2, "back").await;
    e.wait_for("t", 2, 1).await;
    e.set_config("t", "retention.ms", "172800000").await;
    assert!(eventually(async || retention().await == "172800000").await, "{}", retention().await);
    assert!(west.notes().await.iter().any(|n| n.kind == NoteKind::Drift));
    stop([east, west]).await;
}
