//! Random work on a store that crashes at any point: what survives is what the contract says.
//!
//! A model holds what must be there. After each crash every file is compared with it, recovered as a
//! log would be (cut where it stops being what was written), and the work goes on.

use std::collections::BTreeMap;
use std::fs;
use std::io::IoSlice;
use std::path::Path;
use std::sync::Arc;

use proptest::prelude::*;

use crate::data_dir::tests::unlocked;
use crate::meta::{self, MetaStore};
use crate::{Disk, Faults, Flaky, Memory, MetaError, SegmentStore, StorePath, Version, Volatile, Writer};

#[derive(Clone, Debug)]
enum Step {
    Append { log: u8, len: usize },
    Sync { log: u8 },
    Put { file: u8, len: usize },
    DeleteLog { log: u8 },
    DeleteAll,
    Reopen { log: u8 },
    Crash,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let log = 0..3_u8;
    let step = prop_oneof![
        8 => (log.clone(), 0..5_000_usize).prop_map(|(log, len)| Step::Append { log, len }),
        4 => log.clone().prop_map(|log| Step::Sync { log }),
        3 => (log.clone(), 0..5_000_usize).prop_map(|(file, len)| Step::Put { file, len }),
        1 => log.clone().prop_map(|log| Step::DeleteLog { log }),
        1 => Just(Step::DeleteAll),
        1 => log.prop_map(|log| Step::Reopen { log }),
        2 => Just(Step::Crash),
    ];
    prop::collection::vec(step, 1..60)
}

/// A log as it must be: the first `durable` bytes for certain, the rest perhaps.
#[derive(Default)]
struct ModelLog {
    bytes: Vec<u8>,
    durable: usize,
}

/// A store that can lose its memory.
trait Crashing {
    fn store(&self) -> Arc<dyn SegmentStore>;
    fn crash(&mut self);
}

struct Model {
    logs: BTreeMap<StorePath, ModelLog>,
    writers: BTreeMap<StorePath, Arc<dyn Writer>>,
    /// More than one content: a put failed, and either may be there.
    files: BTreeMap<StorePath, Vec<Vec<u8>>>,
    counter: u8,
    crashes: usize,
    lost_bytes: usize,
}

impl Model {
    fn new() -> Model {
        Model {
            logs: BTreeMap::new(),
            writers: BTreeMap::new(),
            files: BTreeMap::new(),
            counter: 0,
            crashes: 0,
            lost_bytes: 0,
        }
    }

    fn run(mut self, crashing: &mut dyn Crashing, steps: &[Step]) -> Model {
        for step in steps {
            match step {
                Step::Crash => {
                    self.writers.clear();
                    crashing.crash();
                    self.crashes += 1;
                    self.recover(&*crashing.store());
                }
                step => self.step(&*crashing.store(), step),
            }
        }
        self.writers.clear();
        crashing.crash();
        self.recover(&*crashing.store());
        self
    }

    fn step(&mut self, store: &dyn SegmentStore, step: &Step) {
        match step {
            Step::Append { log, len } => {
                let content = self.content(*len);
                let path = log_path(*log);
                let Some(writer) = self.writer(store, &path) else { return };
                let (front, back) = content.split_at(len / 3);
                if let Ok(end) = writer.append(&[IoSlice::new(front), IoSlice::new(back)]) {
                    let log = self.logs.get_mut(&path).unwrap();
                    log.bytes.extend_from_slice(&content);
                    assert_eq!(end, log.bytes.len() as u64);
                    assert_eq!(
                        writer.reader().read_at(0, usize::MAX).map_or(log.bytes.clone(), Vec::from),
                        log.bytes
                    );
                }
            }
            Step::Sync { log } => {
                let path = log_path(*log);
                let Some(writer) = self.writer(store, &path) else { return };
                match writer.sync() {
                    Ok(durable) => self.logs.get_mut(&path).unwrap().durable = durable as usize,
                    Err(error) => {
                        assert!(error.ends_writer());
                        self.writers.remove(&path);
                    }
                }
            }
            Step::Put { file, len } => {
                let content = self.content(*len);
                let path = file_path(*file);
                let done = store.put(&path, &content).is_ok();
                let contents = self.files.entry(path).or_default();
                if done {
                    contents.clear();
                } else if contents.is_empty() {
                    return; // Either the file does not exist or it is new; nothing is promised.
                }
                contents.push(content);
            }
            Step::DeleteLog { log } => {
                let path = log_path(*log);
                // Deleting what is gone is no error, so a caller tries until it is done.
                while store.delete(&path).is_err() {}
                self.writers.remove(&path);
                self.logs.remove(&path);
            }
            Step::DeleteAll => {
                while store.delete(&StorePath::parse("t").unwrap()).is_err() {}
                self.writers.clear();
                self.logs.clear();
            }
            Step::Reopen { log } => {
                let path = log_path(*log);
                let Some(log) = self.logs.get(&path) else { return };
                if let Ok(writer) = store.resume(&path, log.bytes.len() as u64) {
                    self.writers.insert(path, writer);
                }
            }
            Step::Crash => unreachable!("handled by the caller"),
        }
    }

    fn writer(&mut self, store: &dyn SegmentStore, path: &StorePath) -> Option<Arc<dyn Writer>> {
        if let Some(writer) = self.writers.get(path) {
            return Some(writer.clone());
        }
        let writer = match self.logs.get(path) {
            None => store.create(path).ok()?,
            // After a failed sync: cut at what is known to be durable.
            Some(log) => store.resume(path, log.durable as u64).ok()?,
        };
        let log = self.logs.entry(path.clone()).or_default();
        log.bytes.truncate(log.durable);
        self.writers.insert(path.clone(), writer.clone());
        Some(writer)
    }

    fn recover(&mut self, store: &dyn SegmentStore) {
        let mut names = Vec::new();
        for entry in store.list(&StorePath::parse("t").unwrap()).unwrap() {
            names.push(StorePath::parse(&format!("t/{}", entry.name)).unwrap());
        }
        for (path, log) in &mut self.logs {
            assert!(names.contains(path), "{path} is durable since it was created");
            let found = store.open(path).unwrap().read_at(0, usize::MAX).unwrap();
            let intact = found.iter().zip(&log.bytes).take_while(|(found, written)| found == written).count();
            assert!(intact >= log.durable, "{path} kept {intact} of {} synced bytes", log.durable);
            self.lost_bytes += log.bytes.len() - intact;
            let writer = store.resume(path, intact as u64).unwrap();
            assert_eq!(writer.sync().unwrap(), intact as u64);
            log.bytes.truncate(intact);
            log.durable = intact;
            self.writers.insert(path.clone(), writer);
        }
        for name in names {
            // A log whose creation reported an error may be there or not.
            if !self.logs.contains_key(&name) {
                store.delete(&name).unwrap();
            }
        }
        for (path, contents) in self.files.iter_mut().filter(|(_, contents)| !contents.is_empty()) {
            let found = store.open(path).unwrap().read_at(0, usize::MAX).unwrap();
            assert!(contents.iter().any(|content| *content == found[..]), "{path} holds a mixture");
            *contents = vec![found.to_vec()];
        }
    }

    /// No two writes have the same bytes, nor zeros.
    fn content(&mut self, len: usize) -> Vec<u8> {
        self.counter = self.counter % 250 + 1;
        vec![self.counter; len]
    }
}

fn log_path(log: u8) -> StorePath {
    StorePath::parse(&format!("t/{log}.log")).unwrap()
}

fn file_path(file: u8) -> StorePath {
    StorePath::parse(&format!("s/{file}.state")).unwrap()
}

/// Loses what was not synced by being dropped.
struct Forgetful {
    dir: tempfile::TempDir,
    store: Option<Arc<Volatile>>,
}

impl Crashing for Forgetful {
    fn store(&self) -> Arc<dyn SegmentStore> {
        self.store.clone().unwrap()
    }

    fn crash(&mut self) {
        self.store = None;
        self.store = Some(Arc::new(unlocked(|| Volatile::open(self.dir.path())).unwrap()));
    }
}

struct Faulty<S> {
    store: Arc<Flaky<S>>,
    faults: Faults,
}

impl<S: SegmentStore + 'static> Crashing for Faulty<S> {
    fn store(&self) -> Arc<dyn SegmentStore> {
        self.store.clone()
    }

    fn crash(&mut self) {
        // The check after the crash is not to be disturbed; the work after it is.
        self.store.set_faults(Faults { is_torn_at_crash: true, ..Faults::default() });
        self.store.crash().unwrap();
    }
}

impl<S: SegmentStore + 'static> Faulty<S> {
    fn run(&mut self, steps: &[Step]) -> Model {
        let mut model = Model::new();
        for life in steps.split_inclusive(|step| matches!(step, Step::Crash)) {
            self.store.set_faults(self.faults);
            let work = life.strip_suffix(&[Step::Crash]).unwrap_or(life);
            model = model.run(self, work);
        }
        model
    }
}

impl PartialEq for Step {
    fn eq(&self, other: &Step) -> bool {
        std::mem::discriminant(self) == std::mem::discriminant(other)
    }
}

fn faults() -> Faults {
    Faults {
        error_per_mille: 50,
        late_error_per_mille: 50,
        sync_error_per_mille: 50,
        is_torn_at_crash: true,
        ..Faults::default()
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn volatile_keeps_what_was_synced(steps in steps()) {
        let dir = tempfile::tempdir().unwrap();
        let mut store = Forgetful { dir, store: None };
        store.crash();
        Model::new().run(&mut store, &steps);
    }

    #[test]
    fn flaky_disk_keeps_what_was_synced(steps in steps(), seed: u64) {
        let dir = tempfile::tempdir().unwrap();
        let inner = Disk::open(dir.path()).unwrap();
        Faulty { store: Arc::new(Flaky::new(inner, seed, faults())), faults: faults() }.run(&steps);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn flaky_memory_keeps_what_was_synced(steps in steps(), seed: u64) {
        Faulty { store: Arc::new(Flaky::new(Memory::new(), seed, faults())), faults: faults() }.run(&steps);
    }
}

/// The twin of the properties above: they would notice if crashes lost nothing.
#[test]
fn a_crash_does_lose_what_was_not_synced() {
    let steps = vec![
        Step::Append { log: 0, len: 1_000 },
        Step::Sync { log: 0 },
        Step::Append { log: 0, len: 1_000 },
        Step::Crash,
    ];
    let dir = tempfile::tempdir().unwrap();
    let mut store = Forgetful { dir, store: None };
    store.crash();
    let model = Model::new().run(&mut store, &steps);
    assert_eq!((model.lost_bytes, model.logs[&log_path(0)].bytes.len()), (1_000, 1_000));
}

#[test]
fn a_start_clears_what_a_crash_left_half_done() {
    let dir = tempfile::tempdir().unwrap();
    drop(Disk::open(dir.path()).unwrap());
    fs::create_dir_all(dir.path().join("tmp/7/p-0")).unwrap();
    fs::write(dir.path().join("tmp/7/p-0/x.log"), b"half-deleted").unwrap();
    fs::write(dir.path().join("tmp/8"), b"half-written").unwrap();
    let store = unlocked(|| Disk::open(dir.path())).unwrap();
    assert_eq!(fs::read_dir(dir.path().join("tmp")).unwrap().count(), 0);
    store.put(&file_path(0), b"x").unwrap();
}

#[test]
fn a_writer_keeps_the_directory_locked() {
    let dir = tempfile::tempdir().unwrap();
    let store = Disk::open(dir.path()).unwrap();
    let writer = store.create(&log_path(0)).unwrap();
    drop(store);
    assert!(Disk::open(dir.path()).is_err());
    drop(writer);
    unlocked(|| Disk::open(dir.path())).unwrap();
}

/// Writes `count` values and returns the log and the length before the last write.
async fn metadata_log(dir: &Path, count: u8) -> (Vec<u8>, usize) {
    let store = meta::File::open(dir).unwrap();
    let mut version = None;
    for i in 0..count {
        version = Some(store.put_if("counter", vec![i; 20], version).await.unwrap());
        store.put_if(&format!("key/{i}"), b"{\"a\":1}".to_vec(), None).await.unwrap();
        store.delete_if(&format!("key/{i}"), store.version().await.unwrap()).await.unwrap();
    }
    let before = fs::read(dir.join("meta.log")).unwrap().len();
    store.put_if("last", vec![9; 50], None).await.unwrap();
    (fs::read(dir.join("meta.log")).unwrap(), before)
}

#[tokio::test]
async fn metadata_survives_a_restart_with_its_versions() {
    let dir = tempfile::tempdir().unwrap();
    metadata_log(dir.path(), 5).await;
    let store = meta::File::open(dir.path()).unwrap();
    assert_eq!(store.version().await, Ok(Version(16)));
    assert_eq!(store.get("counter").await, Ok(Some((vec![4; 20], Version(13)))));
    assert_eq!(store.get("key/4").await, Ok(None));
    assert_eq!(store.list("").await.unwrap().len(), 2);
}

#[tokio::test]
async fn a_torn_metadata_write_is_cut_wherever_it_tore() {
    let dir = tempfile::tempdir().unwrap();
    let (log, before) = metadata_log(dir.path(), 3).await;
    let path = dir.path().join("meta.log");
    for cut in before..log.len() {
        for filler in [&[][..], &[0; 40], &[0xff; 40], b"{\"a\":1}"] {
            let mut torn = log[..cut].to_vec();
            torn.extend_from_slice(filler);
            fs::write(&path, &torn).unwrap();
            let store = meta::File::open(dir.path()).unwrap();
            assert_eq!(store.get("last").await, Ok(None), "cut at {cut}");
            assert_eq!(store.version().await, Ok(Version(9)));
            assert_eq!(fs::metadata(&path).unwrap().len(), before as u64);
            store.put_if("next", vec![1], None).await.unwrap();
            drop(store);
            let store = meta::File::open(dir.path()).unwrap();
            assert_eq!(store.get("next").await, Ok(Some((vec![1], Version(10)))));
        }
    }
}

#[tokio::test]
async fn damage_in_the_middle_of_the_metadata_log_is_an_error_and_never_a_cut() {
    let dir = tempfile::tempdir().unwrap();
    let (log, before) = metadata_log(dir.path(), 3).await;
    let path = dir.path().join("meta.log");
    for at in 0..before {
        for mask in [0x01, 0x80, 0xff] {
            let mut bad = log.clone();
            bad[at] ^= mask;
            fs::write(&path, &bad).unwrap();
            let error = meta::File::open(dir.path()).unwrap_err();
            assert!(matches!(error, MetaError::Corrupt(_)), "byte {at}: {error}");
            assert!(error.to_string().contains("meta.log"), "{error}");
            assert_eq!(fs::read(&path).unwrap(), bad, "the evidence stays");
        }
    }
}

#[tokio::test]
async fn the_metadata_log_is_rewritten_and_says_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("meta.log");
    let store = meta::File::open(dir.path()).unwrap();
    let kept = store.put_if("kept", b"value".to_vec(), None).await.unwrap();
    let mut version = None;
    let mut largest = 0;
    for i in 0..200_u32 {
        version = Some(store.put_if("k", vec![i as u8; 10_000], version).await.unwrap());
        largest = largest.max(fs::metadata(&path).unwrap().len());
    }
    assert!(largest < 300 * 1024, "bounded by rewriting: {largest}");
    drop(store);
    let store = meta::File::open(dir.path()).unwrap();
    assert_eq!(store.get("kept").await, Ok(Some((b"value".to_vec(), kept))));
    assert_eq!(store.get("k").await, Ok(Some((vec![199; 10_000], version.unwrap()))));
    assert_eq!(store.version().await, Ok(version.unwrap()));
}

#[tokio::test]
async fn a_rewrite_that_cannot_be_done_stops_no_write() {
    let dir = tempfile::tempdir().unwrap();
    let store = meta::File::open(dir.path()).unwrap();
    // A directory in its place: the new log cannot be written.
    fs::create_dir(dir.path().join("meta.log.new")).unwrap();
    let mut version = None;
    for i in 0..60_u8 {
        version = Some(store.put_if("k", vec![i; 10_000], version).await.unwrap());
    }
    drop(store);
    fs::remove_dir(dir.path().join("meta.log.new")).unwrap();
    let store = meta::File::open(dir.path()).unwrap();
    assert_eq!(store.get("k").await, Ok(Some((vec![59; 10_000], version.unwrap()))));
}
