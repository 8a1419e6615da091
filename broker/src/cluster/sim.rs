//! The cluster in virtual time: production code from the controller to the shared log, on stores in memory
//! that fail, brokers that die, are cut off, come back, and partitions that are moved, by seed.
//!
//! One thread. Logs and flushes are stepped by hand, and time passes when nobody has anything to do, so
//! that a seed of minutes takes milliseconds. Left out of it are sockets, and threads.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use broker_store::meta::{self, MetaFaults};
use broker_store::remote::{self, RemoteFaults};
use broker_store::shared::Options;
use broker_store::{Dice, MetaStore, Remote, SegmentStore, StorePath, segment};
use chassis::ServiceHandle;
use futures_util::FutureExt;
use kafka::batch::Codec;
use kafka::record::{Records, unpack};
use kafka::{Batch, BatchBuilder, Offset, ProducerEpoch, ProducerId};
use lane_core::Extractors;

use super::{Cluster, ClusterStores, Joining};
use crate::broker::{Broker, Parts};
use crate::clock;
use crate::config::{ClusterConfig, Config};
use crate::configs::{Overrides, TopicDefaults};
use crate::partition::{Append, AppendError, Checkpoints, Flusher, Partition, ReadUpTo};
use crate::topics::{NewTopic, TopicRegistry};

const BROKERS: u64 = 3;
const PARTITIONS: usize = 4;
const TOPIC: &str = "orders";
/// What happens in one run, before everything is mended.
const STEPS: usize = 80;
/// Until everything must work again after that, each at least a tenth of a second.
const MENDING_MAX: usize = 3_000;

/// CPU seconds of seeds in the ordinary run; `SEALANE_CLUSTER_SEEDS` (`from..to`) runs these instead.
const ORDINARY: Duration = Duration::from_secs(15);

/// Seeds that found something (decision 0007); a slow machine might not come to them.
const FOUND: [u64; 2] = [84, 401];

#[test]
fn whatever_befalls_the_brokers_of_a_cluster_what_was_acknowledged_is_there_once() {
    let mut total = Stake::default();
    for seed in FOUND.into_iter().chain(Seeds::chosen()) {
        match run(seed, true) {
            Ok(stake) => total.add(&stake),
            Err(what) => panic!("seed {seed}: {what}"),
        }
    }
    println!("{total:?}");
    assert!(total.acknowledged > 0 && total.again > 0 && total.moved > 0, "{total:?}");
    assert!(total.refused > 0 && total.killed > 0 && total.forgotten > 0, "{total:?}");
}

#[test]
fn twin_without_the_fence_of_the_store_a_former_owner_takes_records_away() {
    let failed = (0..300).find_map(|seed| run(seed, false).err().map(|what| (seed, what)));
    let (seed, what) = failed.expect("without the fence something is lost or repeated");
    println!("seed {seed}: {what}");
}

/// Seeds for a number of seconds, or those that were asked for.
enum Seeds {
    Until { next: u64, end: Instant },
    Range(std::ops::Range<u64>),
}

impl Seeds {
    fn chosen() -> Seeds {
        match std::env::var("SEALANE_CLUSTER_SEEDS") {
            Ok(asked) => {
                let (from, to) = asked.split_once("..").expect("SEALANE_CLUSTER_SEEDS is FROM..TO");
                Seeds::Range(from.parse().unwrap()..to.parse().unwrap())
            }
            Err(_) => Seeds::Until { next: 0, end: Instant::now() + ORDINARY },
        }
    }
}

impl Iterator for Seeds {
    type Item = u64;

    fn next(&mut self) -> Option<u64> {
        match self {
            Seeds::Range(range) => range.next(),
            Seeds::Until { next, end } => {
                let is_over = Instant::now() >= *end;
                *next += 1;
                (!is_over).then_some(*next - 1)
            }
        }
    }
}

/// What was at stake.
#[derive(Debug, Default)]
struct Stake {
    runs: u64,
    acknowledged: u64,
    /// Batches that were sent more than once.
    again: u64,
    /// Owners that changed.
    moved: u64,
    /// Blocks that the store refused to former owners.
    refused: u64,
    killed: u64,
    /// Lives whose logs were removed.
    forgotten: u64,
}

impl Stake {
    fn add(&mut self, other: &Stake) {
        self.runs += 1;
        self.acknowledged += other.acknowledged;
        self.again += other.again;
        self.moved += other.moved;
        self.refused += other.refused;
        self.killed += other.killed;
        self.forgotten += other.forgotten;
    }
}

fn run(seed: u64, fence: bool) -> Result<Stake, String> {
    if std::env::var_os("SEALANE_SIM_LOG").is_some() {
        let log =
            tracing_subscriber::fmt().with_max_level(tracing::Level::DEBUG).without_time().with_ansi(false);
        let _ = log.try_init();
        tracing::info!(seed, "a run begins");
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build();
    let runtime = runtime.map_err(|error| error.to_string())?;
    runtime.block_on(async {
        let mut world = World::new(seed, fence).await;
        for _ in 0..STEPS {
            world.step().await?;
        }
        world.mend().await?;
        world.judge().await
    })
}

type Meta = meta::Flaky<meta::Memory>;

struct Node {
    name: String,
    broker: Arc<Broker>,
    cluster: Arc<Cluster>,
    meta: Meta,
    remote: remote::Flaky<remote::Memory>,
    service: ServiceHandle,
    /// It hears nothing of the metadata store, and does not know that its lease is gone.
    is_deaf: bool,
}

struct Writer {
    sequence: i32,
    /// Sent, and not known to be there.
    pending: Option<String>,
    acknowledged: Vec<(String, Offset)>,
}

struct World {
    dice: Dice,
    meta: meta::Memory,
    remote: remote::Memory,
    nodes: Vec<Node>,
    /// Identities without a process.
    down: Vec<String>,
    writers: Vec<Writer>,
    stake: Stake,
    owners: BTreeMap<usize, i32>,
}

impl World {
    async fn new(seed: u64, fence: bool) -> World {
        let remote = remote::Memory::new();
        remote.set_fence(fence);
        let writer = || Writer { sequence: 0, pending: None, acknowledged: Vec::new() };
        let mut world = World {
            dice: Dice::new(seed),
            meta: meta::Memory::new(),
            remote,
            nodes: Vec::new(),
            down: Vec::new(),
            writers: (0..PARTITIONS).map(|_| writer()).collect(),
            stake: Stake::default(),
            owners: BTreeMap::new(),
        };
        for n in 0..BROKERS {
            world.start(format!("node-{n}")).await;
        }
        let new =
            NewTopic { name: TOPIC.to_owned(), partitions: PARTITIONS as i32, overrides: small_segments() };
        world.nodes[0].broker.create_topic(&new).await.expect("nothing fails yet");
        world
    }

    async fn start(&mut self, name: String) {
        let meta = meta::Flaky::new(self.meta.clone(), self.dice.next(), MetaFaults::default());
        let remote = remote::Flaky::new(self.remote.clone(), self.dice.next(), RemoteFaults::default());
        let cluster = ClusterConfig { identity: name.clone(), sweep_ms: 5_000, ..ClusterConfig::default() };
        let config = Config { listeners: Vec::new(), cluster: Some(cluster), ..Config::default() };
        let stores = ClusterStores { meta: Arc::new(meta.clone()), remote: Arc::new(remote.clone()) };
        let mut joining =
            Joining::prepare(&config, stores, &Default::default()).await.expect("nothing fails yet");
        joining.options = small();
        let often = Checkpoints { after: 600, at_close: 200, bytes_per_byte: 1 };
        let defaults =
            TopicDefaults::new(Overrides::default()).expect("there are none").with_checkpoints(often);
        let topics =
            TopicRegistry::load(Arc::new(meta.clone()), defaults, 1).await.expect("nothing fails yet");
        let store: Arc<dyn SegmentStore> = Arc::new(segment::Memory::new());
        let (cluster, service) = (joining.cluster.clone(), ServiceHandle::standalone("broker"));
        let broker = Broker::new(Parts {
            config,
            identity: joining.identity.clone(),
            meta: Arc::new(meta.clone()),
            store,
            flusher: Flusher::without_threads(1 << 30),
            service: service.clone(),
            listeners: Vec::new(),
            topics: Arc::new(topics),
            lane_exists: Arc::new(|_| false),
            cluster: Some(cluster.clone()),
        });
        joining.join(&broker).await;
        self.nodes.push(Node { name, broker, cluster, meta, remote, service, is_deaf: false });
    }

    fn one(&self) -> usize {
        self.dice.up_to(self.nodes.len() as u64 - 1) as usize
    }

    async fn step(&mut self) -> Result<(), String> {
        match self.dice.up_to(39) {
            0 | 1 => {
                let at = self.one();
                self.nodes[at].meta.lose_leases();
            }
            2 | 3 => self.deafen().await,
            4 | 5 => self.hear_again(),
            6 | 7 => self.kill().await,
            8 => self.stop().await,
            9..=12 => self.restart().await,
            13..=16 => self.wish().await,
            17 => {
                let (at, broker) = (self.one(), self.dice.up_to(BROKERS) as i32);
                let drain = self.dice.hits(500);
                let node = &self.nodes[at];
                let _ = node.cluster.drain(&node.meta, broker, drain).await;
            }
            18 => {
                let at = self.one();
                self.nodes[at].meta.lose_watches();
            }
            19 | 20 => self.disturb(),
            21 | 22 => self.calm(),
            _ => {}
        }
        for _ in 0..4 {
            self.pump();
            for partition in 0..PARTITIONS {
                self.produce(partition).await?;
            }
            self.pump();
            tokio::time::sleep(Duration::from_millis(self.dice.up_to(100))).await;
        }
        self.note_owners();
        Ok(())
    }

    /// Flushes, and a piece of what goes on in the background, here and there.
    fn pump(&self) {
        for node in &self.nodes {
            if self.dice.hits(800) {
                node.broker.flusher.step();
            }
            if let Some(log) = node.cluster.log.read().upgrade() {
                log.step();
            }
        }
    }

    fn disturb(&mut self) {
        let at = self.one();
        let node = &self.nodes[at];
        if !node.is_deaf {
            let (error_per_mille, late_error_per_mille) = (100, 100);
            let delay = Duration::from_millis(500);
            node.meta.set_faults(MetaFaults {
                error_per_mille,
                late_error_per_mille,
                delay_per_mille: 200,
                delay_max: delay,
                resync_per_mille: 50,
            });
        }
        node.remote.set_faults(RemoteFaults {
            error_per_mille: 100,
            late_error_per_mille: 100,
            repeat_per_mille: 100,
            ..RemoteFaults::default()
        });
    }

    fn calm(&mut self) {
        for node in &self.nodes {
            node.remote.set_faults(RemoteFaults::default());
            if !node.is_deaf {
                node.meta.set_faults(MetaFaults::default());
            }
        }
    }

    /// The node is cut off from the metadata store, and its leases run out there.
    async fn deafen(&mut self) {
        let at = self.one();
        let node = &mut self.nodes[at];
        node.is_deaf = true;
        node.meta.set_faults(MetaFaults { error_per_mille: 1000, ..MetaFaults::default() });
        node.meta.lose_watches();
        let id = node.broker.identity.broker_id.0;
        self.expire(id).await;
    }

    async fn expire(&self, broker: i32) {
        let office = self.meta.get("controller").await.expect("memory");
        let mut keys = vec![format!("brokers/{broker}")];
        if office.is_some_and(|(value, _)| value == broker.to_string().into_bytes()) {
            keys.push("controller".to_owned());
        }
        for key in keys {
            if let Some((_, version)) = self.meta.get(&key).await.expect("memory") {
                self.meta.delete_if(&key, version).await.expect("nobody else does");
            }
        }
    }

    fn hear_again(&mut self) {
        for node in self.nodes.iter_mut().filter(|node| node.is_deaf) {
            node.is_deaf = false;
            node.meta.set_faults(MetaFaults::default());
            node.meta.lose_leases();
        }
    }

    async fn kill(&mut self) {
        if self.nodes.len() > 1 {
            let at = self.one();
            let node = self.nodes.remove(at);
            node.remote.set_down(true);
            node.meta.set_faults(MetaFaults { error_per_mille: 1000, ..MetaFaults::default() });
            let _ = node.service.drain(Duration::ZERO).await;
            self.expire(node.broker.identity.broker_id.0).await;
            self.down.push(node.name);
            self.stake.killed += 1;
        }
    }

    async fn stop(&mut self) {
        if self.nodes.len() > 1 {
            let at = self.one();
            let node = self.nodes.remove(at);
            let _ = node.service.drain(Duration::from_secs(20)).await;
            self.down.push(node.name);
        }
    }

    async fn restart(&mut self) {
        if let Some(name) = self.down.pop() {
            self.start(name).await;
        }
    }

    async fn wish(&mut self) {
        let (index, to) = (self.dice.up_to(PARTITIONS as u64 - 1) as i32, self.dice.up_to(BROKERS) as i32);
        let node = &self.nodes[self.one()];
        if let Some(topic) = node.broker.topics.by_name(TOPIC) {
            let _ = node.cluster.wish(&node.meta, &topic, index, to).await;
        }
    }

    fn note_owners(&mut self) {
        let view = self.nodes[0].cluster.views.now();
        let Some(topic) = self.nodes[0].broker.topics.by_name(TOPIC) else { return };
        for index in 0..PARTITIONS {
            if let Some((owner, _)) = view.leader(topic.id, index as i32)
                && self.owners.insert(index, owner).is_some_and(|before| before != owner)
            {
                self.stake.moved += 1;
            }
        }
    }

    /// As some node says; it may be wrong.
    fn owner(&self, index: usize) -> Option<Arc<Partition>> {
        let asked = &self.nodes[self.one()];
        let topic = asked.broker.topics.by_name(TOPIC)?;
        let (leader, _) = asked.cluster.views.now().leader(topic.id, index as i32)?;
        let named = |node: &&Node| node.broker.identity.broker_id.0 == leader;
        self.nodes.iter().find(named)?.broker.partition(TOPIC, index as i32)
    }

    /// What the record says, whatever anybody believes.
    async fn record(&self, index: usize) -> Option<super::PartitionObject> {
        let topic = self.nodes[0].broker.topics.by_name(TOPIC)?;
        let (value, _) = self.meta.get(&super::objects::assignment_key(topic.id)).await.expect("memory")?;
        let object: super::AssignmentObject = serde_json::from_slice(&value).expect("it was written");
        object.partitions.get(index).cloned()
    }

    async fn is_owner(&self, partition: &Partition) -> bool {
        let record = self.record(partition.index.0 as usize).await;
        record.is_some_and(|record| record.epoch == partition.epoch.0)
    }

    /// The partition where its record says that it is served.
    async fn served(&self, index: usize) -> Option<Arc<Partition>> {
        let record = self.record(index).await.filter(|record| record.taken)?;
        let named = |node: &&Node| Some(node.broker.identity.broker_id.0) == record.owner;
        let partition = self.nodes.iter().find(named)?.broker.partition(TOPIC, index as i32)?;
        (partition.epoch.0 == record.epoch).then_some(partition)
    }

    /// One attempt of the partition's idempotent producer.
    async fn produce(&mut self, index: usize) -> Result<(), String> {
        let Some(partition) = self.owner(index) else { return Ok(()) };
        let dice = self.dice.next();
        let writer = &mut self.writers[index];
        let is_new = writer.pending.is_none();
        let sequence = writer.sequence;
        // Some are large, so that the log moves on.
        let filler = "x".repeat(if dice.is_multiple_of(4) { 900 } else { 10 });
        let value = writer.pending.get_or_insert_with(|| format!("{index}-{sequence}-{filler}")).clone();
        self.stake.again += u64::from(!is_new);
        let mut builder = BatchBuilder::new(Offset::ZERO, clock::now(), Codec::None);
        builder.producer(ProducerId(index as i64), ProducerEpoch(0), sequence);
        builder.push(0, 0, None, Some(value.as_bytes()), &[]);
        let batch = builder.build();
        let judged_by = Arc::new(Extractors::none());
        let append = Append { batch: &batch, lanes: None, judged_by, now: clock::now(), urgent: true };
        match partition.append(append) {
            Ok(appended) => {
                if dice.is_multiple_of(3) {
                    self.pump();
                } else if let Some(owner) = self.nodes.iter().find(|node| {
                    node.broker
                        .partition(TOPIC, index as i32)
                        .is_some_and(|here| Arc::ptr_eq(&here, &partition))
                }) {
                    owner.broker.flusher.step();
                }
                let durable = partition.wait_durable(appended.last_offset.plus(1)).now_or_never();
                let writer = &mut self.writers[index];
                if let Some(Ok(())) = durable {
                    writer.acknowledged.push((value, appended.base_offset));
                    writer.pending = None;
                    writer.sequence += 1;
                    self.stake.acknowledged += 1;
                }
                Ok(())
            }
            // Whoever is cut off and does not know it knows no better: `is_overdue`, a clock's business,
            // keeps it from answering.
            Err(AppendError::Refused(code)) if self.is_owner(&partition).await => Err(format!(
                "{TOPIC}-{index}: {value:.12} was refused for good: {code:?}, by {:?} under epoch {}",
                partition.watermarks(),
                partition.epoch
            )),
            Err(_) => Ok(()),
        }
    }

    /// Nothing fails any more; returns when everything is served and every producer is through.
    async fn mend(&mut self) -> Result<(), String> {
        while !self.down.is_empty() {
            self.restart().await;
        }
        self.hear_again();
        self.calm();
        for broker in 0..=BROKERS as i32 {
            self.nodes[0]
                .cluster
                .drain(&self.meta, broker, false)
                .await
                .map_err(|error| error.to_string())?;
        }
        for _ in 0..MENDING_MAX {
            self.pump();
            for index in 0..PARTITIONS {
                if self.writers[index].pending.is_some() {
                    self.produce(index).await?;
                }
            }
            let mut is_served = true;
            for index in 0..PARTITIONS {
                is_served &= self.served(index).await.is_some();
            }
            let is_through = self.writers.iter().all(|writer| writer.pending.is_none());
            if is_served && is_through && self.is_tidy().await {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        let pending = self.writers.iter().filter(|writer| writer.pending.is_some()).count();
        let records = self.meta.list(super::objects::ASSIGNMENTS).await.map_err(|error| error.to_string())?;
        let records: Vec<_> = records.iter().map(|item| String::from_utf8_lossy(&item.value)).collect();
        Err(format!(
            "not everything heals: {pending} producers wait, lives {:?}, manifests {:?}, records {records:?}",
            self.remote.lives().map_err(|error| error.to_string())?,
            self.manifests()
        ))
    }

    fn manifests(&self) -> Vec<String> {
        let Some(topic) = self.nodes[0].broker.topics.by_name(TOPIC) else { return Vec::new() };
        let dir = StorePath::parse(&format!("manifests/{}", topic.id.0)).expect("a legal name");
        self.remote.list(&dir).expect("memory").into_iter().map(|entry| entry.name).collect()
    }

    /// Only the logs of the living are there, and no manifest.
    async fn is_tidy(&mut self) -> bool {
        let lives = self.remote.lives().expect("memory").len();
        lives <= self.nodes.len() && self.manifests().is_empty()
    }

    async fn judge(&mut self) -> Result<Stake, String> {
        for index in 0..PARTITIONS {
            let partition = self.served(index).await.ok_or("it was served just now")?;
            let values = read_all(&partition)?;
            let mut seen = BTreeMap::new();
            for (offset, value) in &values {
                if let Some(before) = seen.insert(value.clone(), *offset) {
                    return Err(format!(
                        "{TOPIC}-{index}: {value:.12} is there twice, at {before} and {offset}"
                    ));
                }
            }
            let by_offset: BTreeMap<Offset, &String> = values.iter().map(|(o, v)| (*o, v)).collect();
            for (value, offset) in &self.writers[index].acknowledged {
                match by_offset.get(offset) {
                    Some(there) if *there == value => {}
                    other => {
                        let other = other.map(|there| there.chars().take(12).collect::<String>());
                        return Err(format!(
                            "{TOPIC}-{index}: {value:.12} was acknowledged at {offset}, there is {other:?}"
                        ));
                    }
                }
            }
        }
        let mut stake = std::mem::take(&mut self.stake);
        stake.refused = self.remote.refusals();
        let ids = self.meta.list(super::objects::IDS).await.map_err(|error| error.to_string())?;
        let lives = ids.iter().filter_map(|id| serde_json::from_slice::<super::IdObject>(&id.value).ok());
        let begun: u64 = lives.map(|id| id.lives).sum();
        stake.forgotten = begun - self.remote.lives().map_err(|error| error.to_string())?.len() as u64;
        for node in self.nodes.drain(..) {
            let _ = node.service.drain(Duration::ZERO).await;
        }
        Ok(stake)
    }
}

fn read_all(partition: &Arc<Partition>) -> Result<Vec<(Offset, String)>, String> {
    let (mut values, mut from) = (Vec::new(), partition.watermarks().log_start);
    loop {
        let read = partition.read(from, 1 << 20, true, ReadUpTo::HighWatermark);
        let read = read.map_err(|error| error.to_string())?;
        let Some(slice) = read.slice else { return Ok(values) };
        let bytes = slice.reader.read_at(slice.position, slice.len).map_err(|error| error.to_string())?;
        for batch in Batch::split_all(bytes, true).map_err(|error| error.to_string())? {
            let section = unpack(&batch).map_err(|error| error.to_string())?;
            for record in Records::new(&section, batch.header.record_count) {
                let record = record.map_err(|error| error.to_string())?;
                let offset = Offset(batch.header.base_offset.0 + i64::from(record.offset_delta));
                let value = record.value.ok_or("a record without a value")?;
                values.push((offset, String::from_utf8_lossy(value).into_owned()));
            }
        }
        from = read.next;
    }
}

/// Several segments, objects and moves of the log's front in every run.
fn small() -> Options {
    Options {
        block_bytes: 8 << 10,
        pending_bytes_max: 64 << 10,
        log_bytes_target: 16 << 10,
        log_bytes_max: 64 << 10,
        object_bytes: 4 << 10,
        ended_bytes_min: 512,
        merge_below_bytes: 2 << 10,
        inline_bytes_max: 512,
        handed_bytes_max: 1 << 10,
        manifest_bytes_max: 2 << 10,
        put_inline_bytes_max: 4 << 10,
        cache_bytes: 256 << 10,
        stepped: true,
        ..Options::default()
    }
}

fn small_segments() -> Overrides {
    let mut overrides = Overrides::default();
    overrides.insert("internal.segment.bytes".to_owned(), "16384".to_owned());
    overrides
}
