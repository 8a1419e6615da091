//! The shared log in a simulated cluster: brokers die, zombies go on, directories move, by seed.
//!
//! Production code without threads: every flush and every object is a step of its own, so anything can
//! happen between any two. A model knows what was acknowledged and in which order everything else was
//! written; whoever takes a directory over must find what was acknowledged and a prefix of the rest.

use std::collections::BTreeMap;
use std::io::IoSlice;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use bytes::Bytes;

use super::jobs::Job;
use super::{Inheritance, Inner, Options, Shared, leftovers};
use crate::dice::Dice;
use crate::remote::{Block, Memory};
use crate::{Entry, Life, LifeLog, Reader, Remote, SegmentStore, StoreError, StorePath, Writer};

/// A mechanism that is switched off, so that the simulation must fail.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Twin {
    #[default]
    None,
    /// The remote store refuses nobody.
    FenceOff,
    /// A frame names an object, and the tail is dropped, before the object is there.
    ChunkBeforeObject,
    /// Blocks are given up though directories need them.
    LogCutTooEarly,
    /// Objects are deleted before it is on record who owns them.
    ConfirmedTooEarly,
    /// Nobody is told that packs are needed.
    NothingPinned,
    /// A record that has a manifest does not say who left it.
    ManifestAlone,
}

/// The way from one broker to the store. It loses requests and answers, and in the end it is cut.
#[derive(Clone)]
struct Line {
    remote: Memory,
    dice: Arc<Dice>,
    per_mille: u32,
    calls_left: Arc<AtomicU64>,
    name: Life,
}

/// With `SEALANE_SIM_TRACE` a run tells what happens in it.
fn trace(text: impl FnOnce() -> String) {
    static IS_ON: LazyLock<bool> = LazyLock::new(|| std::env::var_os("SEALANE_SIM_TRACE").is_some());
    if *IS_ON {
        println!("{}", text());
    }
}

impl Line {
    fn call<T>(&self, deed: impl FnOnce() -> Result<T, StoreError>) -> Result<T, StoreError> {
        let lost = || Err(StoreError::Io("lost on the way".to_owned()));
        match self.calls_left.load(Ordering::Relaxed) {
            0 => return lost(),
            u64::MAX => {}
            left => self.calls_left.store(left - 1, Ordering::Relaxed),
        }
        // The last request of a broker that dies arrives or does not.
        let is_last = self.is_cut();
        if (is_last && self.dice.hits(500)) || self.dice.hits(self.per_mille) {
            return lost();
        }
        let done = deed();
        if (is_last || self.dice.hits(self.per_mille)) && done.is_ok() { lost() } else { done }
    }

    fn is_cut(&self) -> bool {
        self.calls_left.load(Ordering::Relaxed) == 0
    }
}

impl Remote for Line {
    fn put(&self, name: &StorePath, bytes: Bytes) -> Result<(), StoreError> {
        trace(|| format!("{} put {name}", self.name));
        self.call(|| self.remote.put(name, bytes))
    }
    fn get(&self, name: &StorePath, pos: u64, len: usize) -> Result<Bytes, StoreError> {
        // A reader has no second attempt here, so reads only fail for good.
        if self.is_cut() { Err(StoreError::Io("cut".to_owned())) } else { self.remote.get(name, pos, len) }
    }
    fn list(&self, dir: &StorePath) -> Result<Vec<Entry>, StoreError> {
        self.call(|| self.remote.list(dir))
    }
    fn delete(&self, name: &StorePath) -> Result<(), StoreError> {
        trace(|| format!("{} delete {name}", self.name));
        self.call(|| self.remote.delete(name))
    }
    fn begin(&self, life: Life) -> Result<Arc<dyn LifeLog>, StoreError> {
        let log = self.remote.begin(life)?;
        Ok(Arc::new(LineLog { line: self.clone(), log }))
    }
    fn fence(&self, life: Life) -> Result<(), StoreError> {
        self.call(|| self.remote.fence(life))
    }
    fn end(
        &self,
        life: Life,
        visit: &mut dyn FnMut(Block) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        self.call(|| self.remote.end(life, visit))
    }
    fn forget(&self, life: Life) -> Result<(), StoreError> {
        self.call(|| self.remote.forget(life))
    }
    fn lives(&self) -> Result<Vec<Life>, StoreError> {
        self.remote.lives()
    }
}

struct LineLog {
    line: Line,
    log: Arc<dyn LifeLog>,
}

impl LifeLog for LineLog {
    fn append(&self, block: &Block) -> Result<(), StoreError> {
        self.line.call(|| self.log.append(block))
    }
}

struct Broker {
    shared: Shared,
    line: Line,
    life: Life,
    writers: BTreeMap<StorePath, Arc<dyn Writer>>,
    /// A block and a job that are on their way.
    block: Option<Block>,
    job: Option<Job>,
    is_dead: bool,
    is_ended: bool,
}

impl Broker {
    fn inner(&self) -> &Inner {
        &self.shared.inner
    }

    /// The block on its way arrives, or not.
    fn finish_block(&mut self) {
        let Some(block) = self.block.take() else { return };
        match self.inner().log.append(&block) {
            Ok(()) => self.inner().end_flush(&block, Ok(())),
            Err(StoreError::Fenced) => self.inner().end_flush(&block, Err(super::Lost::Fenced)),
            Err(_) => self.inner().core.lock().ring.not_flushed(),
        }
    }

    fn finish_job(&mut self, is_patient: bool) {
        let Some(job) = self.job.take() else { return };
        let outcome = self.inner().do_work(&job);
        match outcome {
            Err(error) if error.is_retryable() && is_patient => self.job = Some(job),
            outcome => self.inner().end_work(job, outcome),
        }
    }
}

type Files = BTreeMap<String, Vec<u8>>;

#[derive(Clone, Debug)]
enum Op {
    Append(String, Vec<u8>),
    /// Also what creates a file: an empty one.
    Put(String, Vec<u8>),
    Cut(String, usize),
    Delete(String),
    DeleteAll,
}

fn apply(files: &mut Files, op: &Op) {
    match op {
        Op::Append(name, bytes) => files.get_mut(name).unwrap().extend_from_slice(bytes),
        Op::Put(name, bytes) => drop(files.insert(name.clone(), bytes.clone())),
        Op::Cut(name, len) => files.get_mut(name).unwrap().truncate(*len),
        Op::Delete(name) => drop(files.remove(name)),
        Op::DeleteAll => files.clear(),
    }
}

/// A directory as it must be, and what is on record of it.
struct Dir {
    path: StorePath,
    acked: Files,
    /// What was written since, in order, with the number of each.
    ops: Vec<(u64, Op)>,
    now: Files,
    /// The latest op of each file.
    last: BTreeMap<String, u64>,
    owner: Option<usize>,
    lives: Vec<Life>,
    manifest: Option<Bytes>,
}

impl Dir {
    fn new(path: &str) -> Dir {
        Dir {
            path: StorePath::parse(path).unwrap(),
            acked: Files::new(),
            ops: Vec::new(),
            now: Files::new(),
            last: BTreeMap::new(),
            owner: None,
            lives: Vec::new(),
            manifest: None,
        }
    }
}

struct Kept {
    broker: usize,
    dir: StorePath,
    reader: Arc<dyn Reader>,
    bytes: Vec<u8>,
}

struct World {
    seed: u64,
    dice: Arc<Dice>,
    twin: Twin,
    remote: Memory,
    brokers: Vec<Broker>,
    dirs: Vec<Dir>,
    /// Readers of files that are gone, and what they must go on reading while their broker owns the directory.
    kept: Vec<Kept>,
    ops: u64,
    topics: u64,
    report: Report,
}

#[derive(Debug, Default)]
struct Report {
    crashes: u64,
    zombies: u64,
    refusals: u64,
    adoptions: u64,
    releases: u64,
    objects: u64,
    deleted: u64,
    lost_ops: u64,
    packs: u64,
    forgotten: u64,
}

type Check<T> = Result<T, String>;

/// Every second seed has tails that seldom become objects of their own, and packs instead.
fn options(seed: u64) -> Options {
    let options = Options {
        block_bytes: 700,
        pending_bytes_max: 5_000,
        log_bytes_target: 1_500,
        log_blocks_target: 30,
        log_bytes_max: 8_000,
        object_bytes: 300,
        ended_bytes_min: 80,
        merge_below_bytes: 200,
        inline_bytes_max: 150,
        handed_bytes_max: 200,
        manifest_bytes_max: 300,
        put_inline_bytes_max: 250,
        pack_bytes_min: 12,
        read_ahead_bytes_max: 1 << 10,
        retry_after_max: Duration::ZERO,
        ..Options::default()
    };
    match seed % 2 {
        0 => options,
        _ => Options {
            log_bytes_target: 300,
            ended_bytes_min: 400,
            merge_below_bytes: 1_000,
            inline_bytes_max: 40,
            handed_bytes_max: 60,
            manifest_bytes_max: 100,
            object_bytes: 200,
            ..options
        },
    }
}

const NAMES: &[&str] = &["0.log", "1.log", "0.state", "1.state", "c/deep"];

impl World {
    fn new(seed: u64, twin: Twin) -> World {
        let remote = Memory::new();
        remote.set_fence(twin != Twin::FenceOff);
        World {
            seed,
            dice: Arc::new(Dice::new(seed)),
            twin,
            remote,
            brokers: Vec::new(),
            dirs: (0..4).map(|n| Dir::new(&format!("topic-0/t-{n}"))).collect(),
            kept: Vec::new(),
            ops: 0,
            topics: 0,
            report: Report::default(),
        }
    }

    fn run(mut self, steps: usize) -> Check<Report> {
        for _ in 0..2 {
            self.start_broker();
        }
        for _ in 0..steps {
            self.step()?;
        }
        self.end()?;
        Ok(self.report)
    }

    fn step(&mut self) -> Check<()> {
        self.assign(&[])?;
        if self.chance(100) {
            self.forget_lives()?;
        }
        match self.dice.up_to(99) {
            0..=1 => self.crash()?,
            2..=3 => self.make_zombie()?,
            4..=8 => self.hand_over()?,
            9..=22 => self.background(),
            23..=30 => self.read()?,
            31..=36 => self.act_as_zombie()?,
            _ => self.act()?,
        }
        self.bury()
    }

    fn chance(&self, per_mille: u32) -> bool {
        self.dice.hits(per_mille)
    }

    fn pick(&self, count: usize) -> usize {
        self.dice.up_to(count as u64 - 1) as usize
    }

    fn start_broker(&mut self) -> usize {
        let life = Life { broker: self.pick(3) as i32, epoch: self.brokers.len() as u64 + 1 };
        let line = Line {
            name: life,
            remote: self.remote.clone(),
            dice: self.dice.clone(),
            per_mille: 60,
            calls_left: Arc::new(AtomicU64::new(u64::MAX)),
        };
        let inner = Inner::open(Arc::new(line.clone()), life, options(self.seed), true).unwrap();
        inner.core.lock().twin = self.twin;
        let shared = Shared { inner };
        let (writers, block, job) = (BTreeMap::new(), None, None);
        self.brokers.push(Broker {
            shared,
            line,
            life,
            writers,
            block,
            job,
            is_dead: false,
            is_ended: false,
        });
        self.brokers.len() - 1
    }

    /// Brokers that are neither dead nor ended; there are always two.
    fn alive(&mut self) -> Vec<usize> {
        loop {
            let is_alive = |broker: &Broker| !broker.is_dead && !broker.is_ended;
            let alive: Vec<usize> = (0..self.brokers.len()).filter(|b| is_alive(&self.brokers[*b])).collect();
            if alive.len() >= 2 {
                return alive;
            }
            self.start_broker();
        }
    }

    /// Whoever could not reach the store, or was told that its life is over, is dead.
    fn bury(&mut self) -> Check<()> {
        for index in 0..self.brokers.len() {
            let broker = &mut self.brokers[index];
            if broker.is_dead || (broker.shared.lost().is_none() && !broker.line.is_cut()) {
                continue;
            }
            if broker.shared.lost() == Some(super::Lost::Fenced) && !broker.is_ended {
                return Err(format!("life {} was refused and nobody has ended it", broker.life));
            }
            let stats = broker.shared.stats();
            self.report.objects += stats.objects_written;
            self.report.deleted += stats.objects_deleted;
            self.report.packs += stats.packs_written;
            broker.is_dead = true;
            broker.writers.clear();
            broker.block = None;
            broker.job = None;
            self.kept.retain(|kept| kept.broker != index);
            for dir in &mut self.dirs {
                dir.owner = dir.owner.filter(|owner| *owner != index);
            }
        }
        Ok(())
    }

    /// Gives every directory without an owner to somebody, but for one.
    fn assign(&mut self, but: &[usize]) -> Check<()> {
        let is_orphan = |dir: &usize| self.dirs[*dir].owner.is_none() && !but.contains(dir);
        let orphans: Vec<usize> = (0..self.dirs.len()).filter(is_orphan).collect();
        if orphans.is_empty() {
            return Ok(());
        }
        // Several heirs share them.
        let mut shares: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for dir in orphans {
            shares.entry(self.heir_of(dir)).or_default().push(dir);
        }
        for (heir, dirs) in shares {
            if self.chance(100) {
                let racer = self.heir_of(dirs[0]);
                self.lose_race(racer, &dirs[..1]);
            }
            if self.chance(50) {
                self.brokers[heir].line.calls_left.store(self.dice.up_to(6), Ordering::Relaxed);
            }
            if self.adopt(heir, &dirs) {
                self.take_possession(heir, &dirs)?;
            }
        }
        Ok(())
    }

    /// Somebody who has never had it by what is on record: nobody ends itself.
    fn heir_of(&mut self, dir: usize) -> usize {
        let alive = self.alive();
        let heir = alive[self.pick(alive.len())];
        if self.dirs[dir].lives.contains(&self.brokers[heir].life) { self.start_broker() } else { heir }
    }

    fn adopt(&mut self, heir: usize, dirs: &[usize]) -> bool {
        let by_logs = dirs.iter().map(|dir| &self.dirs[*dir]).filter(|dir| dir.manifest.is_none());
        let lives: Vec<Life> = by_logs.flat_map(|dir| &dir.lives).copied().collect();
        for index in 0..self.brokers.len() {
            if lives.contains(&self.brokers[index].life) {
                self.end_life(index);
            }
        }
        let inherit = |dir: &usize| {
            let Dir { path, lives, manifest, .. } = &self.dirs[*dir];
            Inheritance { dir: path.clone(), lives: lives.clone(), manifest: manifest.clone() }
        };
        let all: Vec<Inheritance> = dirs.iter().map(inherit).collect();
        self.brokers[heir].finish_block();
        trace(|| format!("{} adopts {all:?}", self.brokers[heir].life));
        match self.brokers[heir].shared.adopt(&all) {
            Ok(_) => {
                self.report.adoptions += dirs.len() as u64;
                true
            }
            // A directory may be deleted, and then it is new to whoever comes next.
            Err(StoreError::Corrupt(error)) if error.contains("have nothing of") => {
                let is_theirs = |dir: &&usize| error.contains(self.dirs[**dir].path.as_str());
                let dir = *dirs.iter().find(is_theirs).unwrap();
                let may_be_deleted = self.dirs[dir].ops.iter().any(|(_, op)| matches!(op, Op::DeleteAll));
                assert!(may_be_deleted, "{error}");
                self.renew(dir);
                false
            }
            Err(StoreError::Corrupt(error)) => panic!("{error}"),
            Err(_) => false,
        }
    }

    /// Removes what is left of lives that are over and that no record names, as the controller does.
    fn forget_lives(&mut self) -> Check<()> {
        for broker in &self.brokers {
            let is_over = broker.is_dead || broker.is_ended;
            if is_over && !self.dirs.iter().any(|dir| dir.lives.contains(&broker.life)) {
                let lives = leftovers::lives(&self.remote).map_err(|error| error.to_string())?;
                if lives.contains(&broker.life) {
                    trace(|| format!("{} is forgotten", broker.life));
                    leftovers::forget(&self.remote, broker.life).map_err(|error| error.to_string())?;
                    self.report.forgotten += 1;
                }
            }
        }
        Ok(())
    }

    fn end_life(&mut self, broker: usize) {
        self.brokers[broker].is_ended = true;
        self.kept.retain(|kept| kept.broker != broker);
        for dir in &mut self.dirs {
            dir.owner = dir.owner.filter(|owner| *owner != broker);
        }
    }

    /// The path of a directory that was deleted is not used again.
    fn renew(&mut self, dir: usize) {
        self.topics += 1;
        self.dirs[dir] = Dir::new(&format!("topic-{}/t-{dir}", self.topics));
    }

    /// The heir is on record: what it has must be right.
    fn take_possession(&mut self, heir: usize, dirs: &[usize]) -> Check<()> {
        for dir in dirs {
            self.inherit(heir, *dir)?;
            let dir = &mut self.dirs[*dir];
            dir.owner = Some(heir);
            dir.lives = vec![self.brokers[heir].life];
            dir.manifest = None;
        }
        let paths: Vec<StorePath> = dirs.iter().map(|dir| self.dirs[*dir].path.clone()).collect();
        trace(|| format!("{} confirms {paths:?}", self.brokers[heir].life));
        self.brokers[heir].shared.confirm(&paths);
        Ok(())
    }

    /// An heir that takes over, begins to work, and finds another one on record.
    fn lose_race(&mut self, heir: usize, dirs: &[usize]) {
        if !self.adopt(heir, dirs) {
            return;
        }
        if self.twin == Twin::ConfirmedTooEarly {
            let paths: Vec<StorePath> = dirs.iter().map(|dir| self.dirs[*dir].path.clone()).collect();
            self.brokers[heir].shared.confirm(&paths);
        }
        for dir in dirs {
            let path = self.dirs[*dir].path.clone();
            let shared = &self.brokers[heir].shared;
            for entry in shared.list(&path).unwrap() {
                let file = path.join(&entry.name).unwrap();
                let _ = match self.dice.up_to(2) {
                    0 => shared.delete(&file),
                    1 if !entry.is_dir => shared.resume(&file, entry.len / 2).map(|_| ()),
                    _ => shared.put(&file, b"of no consequence"),
                };
            }
        }
        for _ in 0..self.dice.up_to(12) {
            self.work(heir);
        }
        for dir in dirs {
            let path = self.dirs[*dir].path.clone();
            let _ = self.brokers[heir].shared.disown(&path);
        }
        for _ in 0..self.dice.up_to(12) {
            self.work(heir);
        }
    }

    /// What was acknowledged is there, and of the rest a prefix.
    fn inherit(&mut self, heir: usize, index: usize) -> Check<()> {
        let found = self.read_all(heir, index)?;
        let dir = &mut self.dirs[index];
        let mut state = dir.acked.clone();
        let mut kept = 0;
        while state != found {
            let Some((_, op)) = dir.ops.get(kept) else {
                return Err(format!(
                    "{} holds {found:?}, acknowledged was {:?}, then {:?}",
                    dir.path, dir.acked, dir.ops
                ));
            };
            apply(&mut state, op);
            kept += 1;
        }
        self.report.lost_ops += (dir.ops.len() - kept) as u64;
        dir.ops.clear();
        dir.acked = state.clone();
        dir.now = state;
        dir.last.clear();
        Ok(())
    }

    fn read_all(&self, broker: usize, dir: usize) -> Check<Files> {
        let mut files = Files::new();
        let mut dirs = vec![(self.dirs[dir].path.clone(), String::new())];
        while let Some((path, prefix)) = dirs.pop() {
            let shared = &self.brokers[broker].shared;
            for entry in shared.list(&path).map_err(|error| error.to_string())? {
                let file = path.join(&entry.name).unwrap();
                if entry.is_dir {
                    dirs.push((file, format!("{prefix}{}/", entry.name)));
                    continue;
                }
                let read = |reader: Arc<dyn Reader>| reader.read_at(0, usize::MAX);
                let bytes = shared.open(&file).and_then(read).map_err(|error| format!("{file}: {error}"))?;
                if bytes.len() as u64 != entry.len {
                    return Err(format!("{file} has {} bytes, listed are {}", bytes.len(), entry.len));
                }
                files.insert(format!("{prefix}{}", entry.name), bytes.to_vec());
            }
        }
        Ok(files)
    }

    /// A broker dies, in the middle of what it does next.
    fn crash(&mut self) -> Check<()> {
        let alive = self.alive();
        let broker = alive[self.pick(alive.len())];
        let calls = self.dice.up_to(5);
        self.brokers[broker].line.calls_left.store(calls, Ordering::Relaxed);
        self.report.crashes += 1;
        Ok(())
    }

    /// A broker is taken for dead and is not.
    fn make_zombie(&mut self) -> Check<()> {
        let alive = self.alive();
        let broker = alive[self.pick(alive.len())];
        self.end_life(broker);
        self.report.zombies += 1;
        Ok(())
    }

    /// A zombie writes on, and must not be told that anything of it is durable once it was ended.
    fn act_as_zombie(&mut self) -> Check<()> {
        let zombies: Vec<usize> = (0..self.brokers.len())
            .filter(|b| self.brokers[*b].is_ended && !self.brokers[*b].is_dead)
            .collect();
        if zombies.is_empty() {
            return Ok(());
        }
        let zombie = zombies[self.pick(zombies.len())];
        if self.chance(600) {
            self.work(zombie);
            return Ok(());
        }
        let dirs: Vec<StorePath> = self.dirs.iter().map(|dir| dir.path.clone()).collect();
        let path = &dirs[self.pick(dirs.len())];
        // A directory that nobody has taken from it yet is still its own.
        let is_ended =
            self.dirs.iter().all(|d| d.path != *path || !d.lives.contains(&self.brokers[zombie].life));
        let broker = &mut self.brokers[zombie];
        broker.finish_block();
        let has_dir = broker.shared.list(path).is_ok_and(|entries| !entries.is_empty());
        let file = path.join(NAMES[self.dice.up_to(3) as usize]).unwrap();
        if !has_dir || !is_ended {
            return Ok(());
        }
        let outcome = match self.dice.up_to(2) {
            0 => broker.shared.put(&file, b"a zombie's"),
            1 if broker.shared.open(&file).is_ok() => broker.shared.delete(&file),
            _ => broker.shared.resume(&file, 0).and_then(|writer| {
                writer.append(&[IoSlice::new(b"a zombie's")])?;
                writer.sync().map(|_| ())
            }),
        };
        match outcome {
            Err(StoreError::Fenced) => self.report.refusals += 1,
            Err(StoreError::NotFound | StoreError::Io(_)) => {}
            Ok(()) => return Err(format!("a zombie's change of {file} was acknowledged")),
            Err(error) => return Err(error.to_string()),
        }
        Ok(())
    }

    /// Directories go from one living broker to another, or back, or somebody dies over it.
    fn hand_over(&mut self) -> Check<()> {
        let index = self.pick(self.dirs.len());
        let Some(owner) = self.dirs[index].owner else { return Ok(()) };
        let mut indexes = vec![index];
        for other in 0..self.dirs.len() {
            if other != index && self.dirs[other].owner == Some(owner) && self.chance(300) {
                indexes.push(other);
            }
        }
        self.brokers[owner].finish_block();
        self.brokers[owner].finish_job(false);
        indexes.iter().for_each(|index| self.forget_writers(owner, *index));
        if !self.release(owner, &indexes) {
            return Ok(());
        }
        if self.chance(100) {
            // It dies, or is taken for dead, before the hand-over is on record.
            indexes.iter().for_each(|index| self.dirs[*index].manifest = None);
            self.brokers[owner].line.calls_left.store(0, Ordering::Relaxed);
            return self.bury();
        }
        let alive = self.alive();
        let heir = if self.chance(200) { owner } else { alive[self.pick(alive.len())] };
        if self.twin == Twin::ManifestAlone {
            // The record goes on to name whoever left the manifest.
            indexes.iter().for_each(|index| self.dirs[*index].lives.clear());
        }
        if heir == owner || self.chance(900) {
            if self.adopt(heir, &indexes) {
                self.take_possession(heir, &indexes)?;
                for index in indexes.into_iter().filter(|_| heir != owner) {
                    let _ = self.brokers[owner].shared.disown(&self.dirs[index].path);
                }
                return Ok(());
            }
        } else {
            self.brokers[heir].line.calls_left.store(0, Ordering::Relaxed);
            // Who left the manifest may die, too, and the controller may look before somebody takes over.
            if self.chance(500) {
                self.brokers[owner].line.calls_left.store(0, Ordering::Relaxed);
            }
            self.bury()?;
            self.assign(&indexes)?;
            return self.forget_lives();
        }
        self.bury()
    }

    /// Everything of these directories is durable afterwards, and read as before by whoever has them; nobody does.
    fn release(&mut self, owner: usize, indexes: &[usize]) -> bool {
        let paths: Vec<StorePath> = indexes.iter().map(|index| self.dirs[*index].path.clone()).collect();
        // One manifest for all, or two.
        let (some, others) = paths.split_at(self.pick(paths.len() + 1));
        let groups: Vec<&[StorePath]> =
            [some, others].into_iter().filter(|group| !group.is_empty()).collect();
        let Ok(manifests) = self.brokers[owner].shared.release(&groups) else { return false };
        trace(|| format!("{} released {paths:?}", self.brokers[owner].life));
        self.report.releases += 1;
        // Whoever lets go of a directory closes its readers: the next owner may delete what they read.
        self.kept.retain(|kept| kept.broker != owner || !paths.contains(&kept.dir));
        let sizes = groups.iter().map(|group| group.len());
        let of_each =
            manifests.iter().zip(sizes).flat_map(|(manifest, count)| std::iter::repeat_n(manifest, count));
        for (index, manifest) in indexes.iter().zip(of_each) {
            let upto = self.dirs[*index].ops.last().map_or(0, |(op, _)| *op);
            self.ack(owner, upto);
            let dir = &mut self.dirs[*index];
            dir.owner = None;
            dir.manifest = Some(manifest.clone());
        }
        true
    }

    fn forget_writers(&mut self, broker: usize, dir: usize) {
        let path = self.dirs[dir].path.clone();
        self.brokers[broker].writers.retain(|file, _| !file.is_within(&path));
    }

    fn background(&mut self) {
        let alive = self.alive();
        let broker = alive[self.pick(alive.len())];
        self.work(broker);
    }

    /// One step of flushing or of moving data, begun or finished.
    fn work(&mut self, index: usize) {
        let choice = self.dice.up_to(5);
        let is_patient = self.chance(800);
        let broker = &mut self.brokers[index];
        match choice {
            0 | 1 if broker.block.is_none() => {
                let taken = broker.inner().core.lock().take_block();
                broker.block = taken;
            }
            0 | 1 => broker.finish_block(),
            _ if broker.job.is_none() => broker.job = broker.inner().begin_work(),
            _ => broker.finish_job(is_patient),
        }
    }

    fn read(&mut self) -> Check<()> {
        let index = self.pick(self.dirs.len());
        let Some(owner) = self.dirs[index].owner else { return Ok(()) };
        if self.brokers[owner].line.is_cut() {
            return Ok(());
        }
        let found = self.read_all(owner, index)?;
        if found != self.dirs[index].now {
            return Err(format!(
                "{} reads {found:?} instead of {:?}",
                self.dirs[index].path, self.dirs[index].now
            ));
        }
        for (name, bytes) in &self.dirs[index].now {
            let file = StorePath::parse(&format!("{}/{name}", self.dirs[index].path)).unwrap();
            let from = self.dice.up_to(bytes.len() as u64) as usize;
            let len = self.dice.up_to((bytes.len() - from) as u64) as usize;
            let part = self.brokers[owner].shared.open(&file).unwrap().read_at(from as u64, len);
            if part.as_deref() != Ok(&bytes[from..from + len]) {
                return Err(format!("{file} from {from}, {len} bytes: {part:?}"));
            }
        }
        while self.kept.len() > 5 {
            let Kept { reader, bytes, .. } = self.kept.swap_remove(self.dice.up_to(5) as usize);
            if reader.read_at(0, usize::MAX).as_deref() != Ok(&bytes[..]) {
                return Err(format!("a reader of a file that is gone does not find {bytes:?}"));
            }
        }
        Ok(())
    }

    /// Everything of a broker up to this op is durable.
    fn ack(&mut self, broker: usize, upto: u64) {
        trace(|| format!("{} acks {upto}", self.brokers[broker].life));
        for dir in self.dirs.iter_mut().filter(|dir| dir.owner == Some(broker)) {
            let count = dir.ops.partition_point(|(op, _)| *op <= upto);
            for (_, op) in dir.ops.drain(..count) {
                apply(&mut dir.acked, &op);
            }
        }
    }

    fn wrote(&mut self, dir: usize, op: Op) -> u64 {
        self.ops += 1;
        trace(|| {
            format!(
                "{:?} op {} on {}: {op:?}",
                self.dirs[dir].owner.map(|o| self.brokers[o].life.to_string()),
                self.ops,
                self.dirs[dir].path
            )
        });
        let dir = &mut self.dirs[dir];
        apply(&mut dir.now, &op);
        match &op {
            Op::Append(name, _) | Op::Put(name, _) | Op::Cut(name, _) | Op::Delete(name) => {
                dir.last.insert(name.clone(), self.ops);
            }
            Op::DeleteAll => {}
        }
        dir.ops.push((self.ops, op));
        self.ops
    }

    /// What a call that waits for the log has come to.
    fn waited(&mut self, owner: usize, dir: usize, op: Op, outcome: Result<(), StoreError>) -> Check<()> {
        match outcome {
            Ok(()) => {
                let op = self.wrote(dir, op);
                self.ack(owner, op);
            }
            // It may have been written, and then it is the last thing that was.
            Err(_) if self.brokers[owner].shared.lost().is_some() => drop(self.wrote(dir, op)),
            Err(error) if error.is_retryable() => {}
            Err(error) => return Err(format!("{op:?}: {error}")),
        }
        Ok(())
    }

    fn content(&self) -> Vec<u8> {
        let len = if self.chance(50) { self.dice.up_to(900) } else { self.dice.up_to(90) };
        let byte = self.ops as u8;
        (0..len).map(|i| byte.wrapping_add((i % 7) as u8)).collect()
    }

    /// An owner does something to one of its files.
    fn act(&mut self) -> Check<()> {
        let index = self.pick(self.dirs.len());
        let Some(owner) = self.dirs[index].owner else { return Ok(()) };
        let name = NAMES[self.pick(NAMES.len())].to_owned();
        let file = StorePath::parse(&format!("{}/{name}", self.dirs[index].path)).unwrap();
        if self.chance(800) {
            self.brokers[owner].finish_block();
        }
        let is_log = name.ends_with(".log");
        match self.dice.up_to(19) {
            0 => self.delete(owner, index, name, &file),
            1 if self.chance(200) => {
                self.brokers[owner].finish_block();
                let path = self.dirs[index].path.clone();
                let outcome = self.brokers[owner].shared.delete(&path);
                self.forget_writers(owner, index);
                let is_deleted = outcome.is_ok();
                self.waited(owner, index, Op::DeleteAll, outcome)?;
                if is_deleted {
                    self.renew(index);
                }
                Ok(())
            }
            2 => self.cut(owner, index, name, &file),
            3..=7 if is_log => self.sync(owner, index, &name, &file),
            _ if is_log => self.append(owner, index, name, &file),
            _ => {
                self.brokers[owner].finish_block();
                let reader = self.reader_to_keep(owner, index, &name, &file);
                let bytes = self.content();
                let outcome = self.brokers[owner].shared.put(&file, &bytes);
                self.kept.extend(reader.filter(|_| outcome.is_ok()));
                self.waited(owner, index, Op::Put(name, bytes), outcome)
            }
        }
    }

    fn reader_to_keep(&mut self, owner: usize, dir: usize, name: &str, file: &StorePath) -> Option<Kept> {
        let bytes = self.dirs[dir].now.get(name).filter(|_| self.chance(300))?.clone();
        let reader = self.brokers[owner].shared.open(file).ok()?;
        Some(Kept { broker: owner, dir: self.dirs[dir].path.clone(), reader, bytes })
    }

    fn delete(&mut self, owner: usize, dir: usize, name: String, file: &StorePath) -> Check<()> {
        self.brokers[owner].finish_block();
        let reader = self.reader_to_keep(owner, dir, &name, file);
        let outcome = self.brokers[owner].shared.delete(file);
        self.kept.extend(reader.filter(|_| outcome.is_ok()));
        self.brokers[owner].writers.remove(file);
        self.waited(owner, dir, Op::Delete(name), outcome)
    }

    fn cut(&mut self, owner: usize, dir: usize, name: String, file: &StorePath) -> Check<()> {
        let Some(bytes) = self.dirs[dir].now.get(&name) else { return Ok(()) };
        let len = self.dice.up_to(bytes.len() as u64);
        match self.brokers[owner].shared.resume(file, len) {
            Ok(writer) => {
                self.brokers[owner].writers.insert(file.clone(), writer);
                // What changes nothing is not in the log.
                if len < bytes.len() as u64 {
                    self.wrote(dir, Op::Cut(name, len as usize));
                }
                Ok(())
            }
            Err(_) if self.brokers[owner].shared.lost().is_some() => Ok(()),
            Err(error) => Err(format!("cutting {file}: {error}")),
        }
    }

    fn append(&mut self, owner: usize, dir: usize, name: String, file: &StorePath) -> Check<()> {
        let broker = &mut self.brokers[owner];
        let writer = match (broker.writers.get(file).cloned(), self.dirs[dir].now.get(&name)) {
            (Some(writer), _) => Ok(writer),
            (None, Some(bytes)) => broker.shared.resume(file, bytes.len() as u64),
            (None, None) => {
                broker.finish_block();
                let created = broker.shared.create(file);
                let outcome = created.as_ref().map(|_| ()).map_err(Clone::clone);
                self.waited(owner, dir, Op::Put(name.clone(), Vec::new()), outcome)?;
                created
            }
        };
        let broker = &mut self.brokers[owner];
        let Ok(writer) = writer else { return Ok(()) };
        broker.writers.insert(file.clone(), writer.clone());
        let bytes = self.content();
        let (front, back) = bytes.split_at(bytes.len() / 3);
        match writer.append(&[IoSlice::new(front), IoSlice::new(back)]) {
            Ok(end) => {
                if !bytes.is_empty() {
                    self.wrote(dir, Op::Append(name.clone(), bytes));
                }
                let expected = self.dirs[dir].now[&name].len() as u64;
                if end == expected { Ok(()) } else { Err(format!("{file} ends at {end}, not {expected}")) }
            }
            Err(StoreError::Fenced) if self.brokers[owner].shared.lost().is_none() => {
                Err(format!("the only writer of {file} is fenced"))
            }
            Err(_) => Ok(()),
        }
    }

    fn sync(&mut self, owner: usize, dir: usize, name: &str, file: &StorePath) -> Check<()> {
        let broker = &mut self.brokers[owner];
        let Some(writer) = broker.writers.get(file).cloned() else { return Ok(()) };
        broker.finish_block();
        let outcome = if self.dice.hits(100) { writer.seal().map(|()| u64::MAX) } else { writer.sync() };
        if outcome == Ok(u64::MAX) || self.dice.hits(100) {
            self.brokers[owner].writers.remove(file);
        }
        let len = self.dirs[dir].now.get(name).map_or(0, Vec::len) as u64;
        match outcome {
            Ok(u64::MAX) => self.ack(owner, self.dirs[dir].last.get(name).copied().unwrap_or(0)),
            Ok(durable) if durable == len => {
                self.ack(owner, self.dirs[dir].last.get(name).copied().unwrap_or(0));
            }
            Ok(durable) => return Err(format!("{file} is durable up to {durable}, not {len}")),
            Err(_) if self.brokers[owner].shared.lost().is_some() => {}
            Err(error) => return Err(format!("syncing {file}: {error}")),
        }
        Ok(())
    }

    /// All brokers die, and a new one finds everything; then nothing is left that nobody needs.
    fn end(&mut self) -> Check<()> {
        for broker in &mut self.brokers {
            broker.line.calls_left.store(0, Ordering::Relaxed);
        }
        self.bury()?;
        let last = self.start_broker();
        self.brokers[last].line.per_mille = 0;
        let all: Vec<usize> = (0..self.dirs.len()).collect();
        // Once more for every directory that turns out to be deleted.
        if !(0..=all.len()).any(|_| self.adopt(last, &all)) {
            return Err("nobody can take over".to_owned());
        }
        self.take_possession(last, &all)
    }
}

#[path = "sim_tests.rs"]
mod tests;
