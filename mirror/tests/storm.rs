//! Both regions write while the line between them fails and everything restarts, by seed.
//!
//! A relay carries the UDP datagrams of the link: it delays, drops and goes dark. Brokers keep their
//! data on disk and restart, mirrors restart. Afterwards an independent reader of both logs must find
//! the same records, once, in each origin's order, and both logs at rest.

#![allow(clippy::unwrap_used)]

mod regions;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use broker::config::Storage;
use mirror::LinkConfig;
use regions::{Region, by_origin, eventually, stop};
use tokio::net::UdpSocket;

const PARTITIONS: i32 = 3;

struct Dice(u64);

impl Dice {
    fn roll(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }
}

/// Forwards datagrams to `target` and their answers back.
struct Relay {
    address: SocketAddr,
    dark: Arc<AtomicBool>,
    dropped: Arc<AtomicU64>,
}

impl Relay {
    async fn start(target: SocketAddr, seed: u64) -> Relay {
        let front = Arc::new(UdpSocket::bind("127.0.0.1:0").await.unwrap());
        let relay =
            Relay { address: front.local_addr().unwrap(), dark: Arc::default(), dropped: Arc::default() };
        let (dark, dropped) = (relay.dark.clone(), relay.dropped.clone());
        tokio::spawn(async move {
            let mut dice = Dice(seed | 1);
            let mut backs: HashMap<SocketAddr, Arc<UdpSocket>> = HashMap::new();
            let mut datagram = vec![0; 65_536];
            while let Ok((len, from)) = front.recv_from(&mut datagram).await {
                let back = match backs.get(&from) {
                    Some(back) => back.clone(),
                    None => {
                        let back = Arc::new(UdpSocket::bind("127.0.0.1:0").await.unwrap());
                        back.connect(target).await.unwrap();
                        backs.insert(from, back.clone());
                        let (back, front, dark) = (back.clone(), front.clone(), dark.clone());
                        tokio::spawn(async move {
                            let mut answer = vec![0; 65_536];
                            loop {
                                // The other end may be down for a while.
                                let Ok(len) = back.recv(&mut answer).await else { continue };
                                if !dark.load(Ordering::Relaxed) {
                                    let _ = front.send_to(&answer[..len], from).await;
                                }
                            }
                        });
                        backs[&from].clone()
                    }
                };
                if dark.load(Ordering::Relaxed) || dice.roll(100) < 2 {
                    dropped.fetch_add(1, Ordering::Relaxed);
                } else {
                    let _ = back.send(&datagram[..len]).await;
                }
            }
        });
        relay
    }
}

/// Produces until told to stop; a value counts once its produce was answered.
async fn write(region: &Region, letter: char, stop: Arc<AtomicBool>, acknowledged: Arc<AtomicU64>) {
    let mut n = 0;
    while !stop.load(Ordering::Relaxed) {
        let Ok(client) = region.try_client().await else {
            tokio::time::sleep(Duration::from_millis(50)).await;
            continue;
        };
        while !stop.load(Ordering::Relaxed) {
            let value = format!("{letter}{n:06}");
            // A value that was not answered is not tried again: it is there once, or not at all.
            n += 1;
            if !client.offer("t", n % PARTITIONS, &value).await {
                break;
            }
            acknowledged.fetch_add(1, Ordering::Relaxed);
            tokio::time::sleep(Duration::from_millis(3)).await;
        }
    }
}

async fn storm(seed: u64) {
    let base = tempfile::tempdir().unwrap();
    let mut dice = Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let (mut east, mut west) =
        (Region::new(base.path(), "east", Storage::Disk), Region::new(base.path(), "west", Storage::Disk));
    east.start_broker().await;
    west.start_broker().await;
    let relay = Relay::start(SocketAddr::from(([127, 0, 0, 1], west.udp)), seed).await;
    let to_west = LinkConfig { address: Some(relay.address.to_string()), ..east.link_to(&west) };
    let to_east = LinkConfig { address: None, ..west.link_to(&east) };
    east.start_mirror(vec![to_west.clone()]).await;
    west.start_mirror(vec![to_east.clone()]).await;
    east.client().await.create("t", PARTITIONS, &[]).await;
    assert!(eventually(async || west.client().await.log_end("t", 2).await >= 0).await, "seed {seed}");

    let (over, acknowledged) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let writers = [(&east, 'e'), (&west, 'w')].map(|(region, letter)| {
        let (handle, over, acknowledged) = (region.handle(), over.clone(), acknowledged.clone());
        tokio::spawn(async move { write(&handle, letter, over, acknowledged).await })
    });
    for _ in 0..8 {
        tokio::time::sleep(Duration::from_millis(200 + dice.roll(800))).await;
        match dice.roll(5) {
            0 => {
                relay.dark.store(true, Ordering::Relaxed);
                tokio::time::sleep(Duration::from_millis(500 + dice.roll(2500))).await;
                relay.dark.store(false, Ordering::Relaxed);
            }
            1 => {
                east.stop_mirror().await;
                east.start_mirror(vec![to_west.clone()]).await;
            }
            2 => {
                west.stop_mirror().await;
                west.start_mirror(vec![to_east.clone()]).await;
            }
            3 => {
                east.stop_broker().await;
                east.start_broker().await;
            }
            _ => {
                west.stop_broker().await;
                west.start_broker().await;
            }
        }
    }
    over.store(true, Ordering::Relaxed);
    for writer in writers {
        writer.await.unwrap();
    }
    let stake = (acknowledged.load(Ordering::Relaxed), relay.dropped.load(Ordering::Relaxed));
    assert!(stake.0 > 100 && stake.1 > 0, "seed {seed}: nothing was at stake: {stake:?}");
    converge(&east, &west, seed, stake.0).await;
    stop([east, west]).await;
}

async fn converge(east: &Region, west: &Region, seed: u64, acknowledged: u64) {
    let (e, w) = (east.client().await, west.client().await);
    let mut last = (Vec::new(), Vec::new());
    let equal = eventually(async || {
        last = (Vec::new(), Vec::new());
        for partition in 0..PARTITIONS {
            last.0.push(by_origin(&e.values("t", partition).await));
            last.1.push(by_origin(&w.values("t", partition).await));
        }
        last.0 == last.1
    });
    assert!(equal.await, "seed {seed}: {:?}\n{:?}", west.link("east"), last);
    let values: Vec<&String> = last.0.iter().flat_map(|origins| origins.values().flatten()).collect();
    let unique: std::collections::BTreeSet<_> = values.iter().collect();
    assert_eq!(unique.len(), values.len(), "seed {seed}: a record is there twice");
    assert!(
        values.len() as u64 >= acknowledged,
        "seed {seed}: {acknowledged} acknowledged, {}",
        values.len()
    );
    for origins in &last.0 {
        for values in origins.values() {
            assert!(values.is_sorted(), "seed {seed}: an origin's order is lost");
        }
    }
    let mut ends = Vec::new();
    for partition in 0..PARTITIONS {
        ends.push((e.log_end("t", partition).await, w.log_end("t", partition).await));
    }
    tokio::time::sleep(Duration::from_secs(2)).await;
    for (partition, end) in (0..PARTITIONS).zip(ends) {
        let now = (e.log_end("t", partition).await, w.log_end("t", partition).await);
        assert_eq!(now, end, "seed {seed}: logs grow at rest");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn both_regions_converge_after_any_weather() {
    let seeds = match std::env::var("SEALANE_SEED") {
        Ok(seed) => vec![seed.parse().unwrap()],
        Err(_) => vec![1, 2],
    };
    for seed in seeds {
        println!("seed {seed}");
        storm(seed).await;
    }
}
