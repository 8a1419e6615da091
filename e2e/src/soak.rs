//! A cluster that stays up while one run after the other hurts it by seed, under load, and holds what is in the log
//! against what was promised.
//!
//! A run has a topic of its own with two loads on it: an idempotent kcat, and writers of ours that remember every
//! offset; a consumer reads along. Two faults strike (`soak/faults.rs`), at times over each other. Then everything is
//! healed, brought to rest, read and judged: each acknowledged record once and where it was promised, order kept, no
//! offset that anyone saw given to another record. Runs are rows of `docs/benchmarks/cluster-soak.tsv`
//! (`soak/table.rs`).

mod faults;
mod table;

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

pub use faults::Fault;
pub use table::{Row, Table, build, percentile};

use crate::cluster::{Along, Cluster, Directory, Lines, Store, Writers, judge_lines, read};
use crate::dice::Dice;
use crate::process::is_error;
use crate::stores::front::FrontFaults;
use faults::Struck;

const BROKERS: u16 = 3;
const PARTITIONS: i32 = 6;
/// kcat's lines each second.
const LINES_PER_SECOND: u64 = 300;
/// librdkafka waits up to ten seconds before it tries a broker again that was gone; runs are short.
const SETTINGS: &[&str] = &["reconnect.backoff.max.ms=500", "topic.metadata.refresh.fast.interval.ms=100"];
/// So many seeds in a row have the same brokers.
const BLOCK: u64 = 10;
/// What a log must say when the store alone stopped a zombie.
const ENDED_BY_STORE: &str = "another broker ended this life";
/// What a broker says, as an error, when its store is silent for long.
pub const GIVEN_UP: &str = "the store took no block for too long: this life is given up";

/// What stops zombies here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fence {
    Store,
    /// Nothing, for the twin of a test.
    Nothing,
}

/// A cluster under soak.
pub struct Soak {
    store: String,
    cluster: Cluster,
    /// The brokers look neither at their leases nor at who owns what now: only the store stops a zombie.
    is_unchecked: bool,
    lease_ms: u32,
    fence: Fence,
}

/// One run while it lasts.
struct Run<'a> {
    cluster: &'a mut Cluster,
    topic: String,
    dice: Dice,
    writers: &'a Writers,
    /// Brokers that are dead or stopped.
    away: BTreeSet<u16>,
    row: Row,
}

/// Whether the brokers of this seed's run look at their leases: every other block of seeds.
pub fn is_unchecked(seed: u64) -> bool {
    (seed / BLOCK).is_multiple_of(2)
}

impl Soak {
    /// A cluster for runs of seeds like this one.
    pub fn start(store: &str, seed: u64) -> Result<Soak> {
        Soak::with(store, seed, Fence::Store)
    }

    /// The same without anything that stops a zombie: S3 writes over what is there, and on HDFS a writer makes the
    /// directory anew that its heirs took away.
    pub fn without_fence(store: &str, seed: u64) -> Result<Soak> {
        Soak::with(store, seed, Fence::Nothing)
    }

    fn with(store: &str, seed: u64, fence: Fence) -> Result<Soak> {
        let mut cluster = Cluster::prepare(Store::named(store)?)?;
        cluster.put_front_before_store(seed)?;
        if let (Some(front), Fence::Nothing) = (&cluster.front, fence) {
            front.set_faults(FrontFaults { is_careless: true, ..FrontFaults::default() });
        }
        let (store, is_unchecked) = (store.to_owned(), is_unchecked(seed));
        let mut soak = Soak { store, cluster, is_unchecked, lease_ms: 0, fence };
        soak.start_brokers()?;
        Ok(soak)
    }

    fn start_brokers(&mut self) -> Result<()> {
        // The default, and what the documents call tuned.
        self.lease_ms = if self.is_unchecked { 2_000 } else { 3_000 };
        self.cluster.set("lease_ms", &self.lease_ms.to_string());
        let off = match (self.is_unchecked, self.fence) {
            (true, Fence::Nothing) => "lease-check,store-fence",
            (true, Fence::Store) => "lease-check",
            (false, _) => "",
        };
        self.cluster.set_environment("SEALANE_TEST_OFF", off);
        self.cluster.spawn_all(BROKERS)?;
        self.cluster.until_alive(0, usize::from(BROKERS))
    }

    /// Brings the brokers to what this seed wants: all of them die at once where that differs.
    fn suit(&mut self, seed: u64) -> Result<()> {
        if is_unchecked(seed) != self.is_unchecked {
            (0..BROKERS).try_for_each(|broker| self.cluster.kill(broker))?;
            self.is_unchecked = !self.is_unchecked;
            self.start_brokers()?;
        }
        Ok(())
    }

    /// One run. After an error the cluster is in no state to go on with.
    pub fn run(&mut self, seed: u64) -> Result<Row> {
        self.suit(seed)?;
        let mark = self.cluster.mark_logs();
        let row = self.hurt_and_judge(seed);
        let log = self.cluster.log_since(&mark);
        if std::env::var_os("SEALANE_SOAK_KEEP").is_some() {
            println!("logs: {}", self.kept_logs(seed, &log));
        }
        let row = row.and_then(|mut row| {
            row.ended_by_store = log.matches(ENDED_BY_STORE).count() as u64;
            let is_fault_of_store = ["s3-", "-node"].iter().any(|word| row.faults.contains(word));
            let is_expected = |line: &str| is_fault_of_store && line.contains(GIVEN_UP);
            if let Some(line) = log.lines().find(|line| is_error(line) && !is_expected(line)) {
                bail!("an ERROR in a log: {line}");
            }
            ensure!(row.acknowledged > 0, "nothing was at stake");
            ensure!(
                !self.is_unchecked || row.zombies == 0 || row.ended_by_store > 0,
                "a zombie was not ended by the store"
            );
            Ok(row)
        });
        row.with_context(|| format!("{} seed {seed}; logs: {}", self.store, self.kept_logs(seed, &log)))
    }

    fn kept_file(&self, seed: u64, what: &str) -> PathBuf {
        std::env::temp_dir().join(format!("sealane-soak-{}-{seed}.{what}", self.store))
    }

    /// Where the logs of a failed run are kept.
    fn kept_logs(&self, seed: u64, log: &str) -> String {
        let file = self.kept_file(seed, "log");
        match fs::write(&file, log) {
            Ok(()) => file.display().to_string(),
            Err(error) => format!("lost, {}: {error}", file.display()),
        }
    }

    fn hurt_and_judge(&mut self, seed: u64) -> Result<Row> {
        self.load(seed, |run| run.two_faults())
    }

    /// One owner hangs until others own what it had, and wakes up; an error where it was believed.
    pub fn zombie(&mut self, seed: u64) -> Result<Row> {
        self.load(seed, |run| {
            let struck = run.strike(Fault::Zombie)?;
            run.settle(vec![struck])
        })
    }

    /// Load on a topic of its own, something that happens to it, and the judgement.
    fn load(&mut self, seed: u64, happens: impl FnOnce(&mut Run<'_>) -> Result<()>) -> Result<Row> {
        let begin = Instant::now();
        let topic = format!("soak-{seed}");
        let first = self.cluster.address(0);
        crate::wire::Conn::open(&first)?.create_topic(&topic, PARTITIONS, &[])?;
        let lines = Lines::with(&self.cluster, &topic, LINES_PER_SECOND, SETTINGS)?;
        let along = Along::start(&self.cluster, &topic)?;
        let writers = Writers::start(&self.cluster.addresses(), &topic, PARTITIONS, seed);
        let all: Vec<usize> = (0..PARTITIONS as usize).collect();
        writers.until_first_after(&all, begin)?;
        let row = Row::new(&self.store, seed, self.is_unchecked, self.lease_ms);
        let mut run = Run {
            cluster: &mut self.cluster,
            topic: topic.clone(),
            dice: Dice::new(seed.wrapping_mul(7_919) + 17),
            writers: &writers,
            away: BTreeSet::new(),
            row,
        };
        happens(&mut run)?;
        let mut row = run.row;
        self.cluster.until_alive(0, usize::from(BROKERS))?;
        writers.until_first_after(&all, Instant::now())?;
        let promises = writers.finish()?;
        row.lines = lines.finish()?;
        row.acknowledged = promises.acknowledged() + row.lines;
        row.refusals += promises.refusals;
        row.sent_again = promises.sent_again;
        let found = read(&self.cluster, &topic)?;
        if std::env::var_os("SEALANE_SOAK_KEEP").is_some() {
            let lines = found.iter().map(|((partition, offset), value)| {
                format!("{partition} {offset} {}\n", &value[..value.len().min(20)])
            });
            fs::write(self.kept_file(seed, "found"), lines.collect::<String>())?;
            let said = self.cluster.dir().join(format!("kcat-{topic}.log"));
            fs::copy(said, self.kept_file(seed, "kcat"))?;
        }
        promises.judge(&found)?;
        judge_lines(&found, row.lines)?;
        row.read_along = along.judge(&found)? as u64;
        let error = crate::wire::Conn::open(&first)?.delete_topic(&topic)?;
        ensure!(error == 0, "DeleteTopics answers error {error}");
        row.seconds = begin.elapsed().as_secs_f64();
        Ok(row)
    }
}

impl Run<'_> {
    fn two_faults(&mut self) -> Result<()> {
        let first = self.draw(None);
        let second = self.draw(Some(first));
        let may_overlap = first.class() != second.class() || first.class() == 0;
        let is_overlapping = may_overlap && self.dice.below(3) == 0;
        self.pause(200, 700);
        let mut struck = vec![self.strike(first)?];
        if is_overlapping {
            self.row.faults.push('&');
            self.pause(0, 800);
        } else {
            self.settle(struck)?;
            self.row.faults.push(' ');
            self.pause(200, 700);
            struck = Vec::new();
        }
        struck.push(self.strike(second)?);
        self.settle(struck)
    }

    fn draw(&mut self, before: Option<Fault>) -> Fault {
        let kinds = Fault::of_store(matches!(self.cluster.store, Store::S3(_)));
        let total: u64 = kinds.iter().map(|(_, weight)| weight).sum();
        let mut at = self.dice.below(total);
        for (fault, weight) in kinds {
            if at < *weight {
                return *fault;
            }
            at -= weight;
        }
        before.unwrap_or(Fault::Kill)
    }

    fn pause(&mut self, from_ms: u64, to_ms: u64) {
        std::thread::sleep(Duration::from_millis(self.dice.between(from_ms, to_ms)));
    }

    /// A broker that runs and answers.
    fn witness(&self) -> Result<u16> {
        (0..BROKERS).find(|broker| !self.away.contains(broker)).context("no broker is left")
    }

    /// By partition, the broker that owns it.
    fn owners(&self) -> Result<Vec<Option<u16>>> {
        let owners =
            Directory::new(self.cluster.addresses()).owners(&self.topic).context("no broker answers")?;
        let broker = |address: Option<String>| {
            let address = address?;
            (0..BROKERS).find(|broker| self.cluster.address(*broker) == address)
        };
        Ok(owners.into_iter().map(broker).collect())
    }

    /// A broker that owns something here, or the controller; and what it owns.
    fn victim(&mut self, is_controller: bool) -> Result<(u16, Vec<usize>)> {
        let end = Instant::now() + crate::clients::PATIENCE;
        loop {
            let owners = self.owners()?;
            let of = |broker: u16| -> Vec<usize> {
                (0..owners.len()).filter(|partition| owners[*partition] == Some(broker)).collect()
            };
            let mut there: Vec<u16> =
                (0..BROKERS).filter(|b| !self.away.contains(b) && !of(*b).is_empty()).collect();
            if is_controller {
                let controller = self.controller()?;
                there.retain(|broker| Some(*broker) == controller);
            }
            if !there.is_empty() {
                let victim = there[self.dice.below(there.len() as u64) as usize];
                return Ok((victim, of(victim)));
            }
            ensure!(Instant::now() < end, "no broker to strike owns anything");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn controller(&self) -> Result<Option<u16>> {
        let status = self.cluster.status(self.witness()?)?;
        let address = status["brokers"]
            .as_array()
            .into_iter()
            .flatten()
            .find(|broker| broker["id"] == status["controller"])
            .and_then(|broker| broker["address"].as_str());
        Ok((0..BROKERS).find(|broker| Some(self.cluster.address(*broker).as_str()) == address))
    }

    fn strike(&mut self, fault: Fault) -> Result<Struck> {
        faults::strike(self, fault)
    }

    /// Heals all of them before any is waited for: while one is there another may not go away.
    fn settle(&mut self, mut struck: Vec<Struck>) -> Result<()> {
        struck.iter_mut().try_for_each(|struck| faults::heal(self, struck))?;
        struck.iter().try_for_each(|struck| faults::settle(self, struck))
    }
}
