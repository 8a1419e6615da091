//! The shared log with its threads, over remote stores in memory.

use std::io::IoSlice;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::*;
use crate::remote::{Block, Flaky, LifeLog, Memory, Remote, RemoteFaults};
use crate::{Reader, SegmentStore, StorePath, Writer};

fn path(text: &str) -> StorePath {
    StorePath::parse(text).unwrap()
}

fn life(epoch: u64) -> Life {
    Life { broker: 1, epoch }
}

/// Everything happens soon.
pub(crate) fn small() -> Options {
    Options {
        block_bytes: 32 << 10,
        pending_bytes_max: 256 << 10,
        log_bytes_target: 64 << 10,
        log_bytes_max: 256 << 10,
        object_bytes: 16 << 10,
        ended_bytes_min: 1 << 10,
        merge_below_bytes: 4 << 10,
        inline_bytes_max: 1 << 10,
        handed_bytes_max: 4 << 10,
        manifest_bytes_max: 8 << 10,
        put_inline_bytes_max: 8 << 10,
        writers: 2,
        retry_after_max: Duration::from_millis(20),
        give_up_after: Duration::from_secs(60),
        wait_max: Duration::from_secs(60),
        ..Options::default()
    }
}

fn append(writer: &Arc<dyn Writer>, bytes: &[u8]) -> u64 {
    writer.append(&[IoSlice::new(bytes)]).unwrap()
}

fn read(reader: &Arc<dyn Reader>) -> Vec<u8> {
    reader.read_at(0, usize::MAX).unwrap().to_vec()
}

/// Waits for what the threads do.
fn until(what: &str, is_so: impl Fn() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < Duration::from_secs(60), "waited for {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn content(len: usize, salt: usize) -> Vec<u8> {
    (0..len).map(|i| ((i * 7 + salt) % 251) as u8).collect()
}

#[test]
fn one_flush_makes_two_thousand_files_durable() {
    let store = Shared::open(Arc::new(Memory::new()), life(1), Options::default()).unwrap();
    let writers: Vec<Arc<dyn Writer>> =
        (0..2_000).map(|n| store.create(&path(&format!("t/p-{n}/0.log"))).unwrap()).collect();
    writers.iter().for_each(|writer| assert_eq!(append(writer, b"a batch of records"), 18));
    let before = store.stats().flushes;
    let points: Vec<_> = writers.iter().map(|writer| writer.sync_begin().unwrap()).collect();
    for (writer, point) in writers.iter().zip(points) {
        // What comes later waits for another flush, and whoever waits for this one does not.
        append(writer, b"more");
        assert_eq!(writer.sync_end(point), Ok(()));
    }
    assert_eq!(store.stats().flushes, before + 1);
}

#[test]
fn data_leaves_the_log_and_memory_and_is_read_from_objects() {
    let remote = Memory::new();
    let store = Shared::open(Arc::new(remote.clone()), life(1), small()).unwrap();
    let files: Vec<(Arc<dyn Writer>, StorePath)> = (0..3)
        .map(|n| path(&format!("t/p-{n}/0.log")))
        .map(|file| (store.create(&file).unwrap(), file))
        .collect();
    let total = 2_000_000;
    let expected: Vec<Vec<u8>> = (0..3).map(|n| content(total, n)).collect();
    for at in (0..total).step_by(5_000) {
        for ((writer, _), expected) in files.iter().zip(&expected) {
            append(writer, &expected[at..at + 5_000]);
        }
        if at % 50_000 == 0 {
            files.iter().for_each(|(writer, _)| assert!(writer.sync().is_ok()));
        }
    }
    for ((writer, file), expected) in files.iter().zip(&expected) {
        writer.seal().unwrap();
        assert!(read(&writer.reader()) == *expected);
        let part = store.open(file).unwrap().read_at(999_990, 500_000).unwrap();
        assert!(part == expected[999_990..1_499_990]);
    }
    until("the log to become short", || store.stats().log_bytes < 200 << 10);
    let stats = store.stats();
    assert!(stats.objects_written >= 100, "{stats:?}");
    assert!(stats.memory_bytes <= stats.log_bytes, "{stats:?}");
    drop(files);
    until("the tails to be gone", || store.stats().memory_bytes < 32 << 10);
    store.delete(&path("t")).unwrap();
    until("the objects to be gone", || store.stats().garbage == 0);
    until("the objects to be deleted", || remote.list(&path("data/t")).unwrap().is_empty());
}

#[test]
fn what_was_put_later_is_durable_with_what_came_after_it() {
    let remote = Memory::new();
    let store = Shared::open(Arc::new(remote.clone()), life(1), small()).unwrap();
    let (dir, other) = (path("t/p-0"), path("t/p-1"));
    let writer = store.create(&dir.join("0.log").unwrap()).unwrap();
    let behind = store.create(&other.join("0.log").unwrap()).unwrap();
    append(&writer, b"a batch");
    let flushes = store.stats().flushes;
    store.put_later(&dir.join("0.checkpoint").unwrap(), b"of the batch").unwrap();
    assert_eq!(store.stats().flushes, flushes, "nobody waits for it");
    let gone = store.put_later(&path("t/gone/0.checkpoint"), b"too late");
    assert_eq!(gone, Err(StoreError::NotFound), "it would bring a directory back");
    append(&behind, b"another");
    behind.sync().unwrap();
    drop(store);
    let heir = Shared::open(Arc::new(remote), life(2), small()).unwrap();
    let inherited = Inheritance { dir: dir.clone(), lives: vec![life(1)], manifest: None };
    heir.adopt(&[inherited]).unwrap();
    let found = |name: &str| read(&heir.open(&dir.join(name).unwrap()).unwrap());
    assert_eq!(found("0.log"), b"a batch");
    assert_eq!(found("0.checkpoint"), b"of the batch");
}

#[test]
fn an_heir_finds_everything_that_was_synced() {
    let remote = Memory::new();
    let store = Shared::open(Arc::new(remote.clone()), life(1), small()).unwrap();
    let mut inherited = Vec::new();
    let mut expected = Vec::new();
    for n in 0..20 {
        let dir = path(&format!("t/p-{n}"));
        let writer = store.create(&dir.join("0.log").unwrap()).unwrap();
        let bytes = content(n * 3_000, n);
        bytes.chunks(700).for_each(|part| assert!(append(&writer, part) > 0));
        writer.sync().unwrap();
        store.put(&dir.join("0.state").unwrap(), &bytes[..n * 10]).unwrap();
        inherited.push(Inheritance { dir, lives: vec![life(1)], manifest: None });
        expected.push(bytes);
    }
    // Two heirs share them; the dead one does not know.
    let heirs: Vec<Arc<Shared>> =
        (2..4).map(|epoch| Shared::open(Arc::new(remote.clone()), life(epoch), small()).unwrap()).collect();
    for (n, one) in inherited.iter().enumerate() {
        let heir = &heirs[n % 2];
        assert_eq!(heir.adopt(std::slice::from_ref(one)), Ok(vec![Inherited::Life(life(1))]));
        heir.confirm(std::slice::from_ref(&one.dir));
        assert!(heir.adopt(std::slice::from_ref(one)).is_err(), "it is here already");
        let log = one.dir.join("0.log").unwrap();
        assert!(read(&heir.open(&log).unwrap()) == expected[n], "{n}");
        let writer = heir.resume(&log, expected[n].len() as u64).unwrap();
        append(&writer, b"and more");
        assert_eq!(writer.sync(), Ok(expected[n].len() as u64 + 8));
        assert_eq!(read(&heir.open(&one.dir.join("0.state").unwrap()).unwrap()), expected[n][..n * 10]);
    }
    let is_told = Arc::new(AtomicBool::new(false));
    let tell = is_told.clone();
    store.on_lost(move |lost| tell.store(*lost == Lost::Fenced, Ordering::SeqCst));
    assert!(store.put(&path("t/p-0/0.state"), b"zombie").is_err());
    assert_eq!(store.lost(), Some(Lost::Fenced));
    until("the zombie to be told", || is_told.load(Ordering::SeqCst));
    assert_eq!(store.create(&path("t/p-0/1.log")).err(), Some(StoreError::Fenced));
    heirs[0].forget(life(1)).unwrap();
    assert!(!remote.lives().unwrap().contains(&life(1)));
}

#[test]
fn what_is_left_of_dead_brokers_and_deleted_topics_is_found_and_removed() {
    let remote = Memory::new();
    let open = |epoch| Shared::open(Arc::new(remote.clone()), life(epoch), small()).unwrap();
    let (zombie, living) = (open(1), open(2));
    for (store, topic) in [(&zombie, "gone"), (&living, "kept")] {
        store.put(&path(&format!("{topic}/t-0/0.log")), &content(20_000, 1)).unwrap();
    }
    assert_eq!(leftovers::lives(&remote), Ok(vec![life(1), life(2)]));
    assert!(living.forget(life(2)).is_err(), "its own");
    // Nobody has ended it: it had nothing that anybody wanted.
    living.forget(life(1)).unwrap();
    living.forget(life(1)).unwrap();
    assert_eq!(leftovers::lives(&remote), Ok(vec![life(2)]));
    assert_eq!(zombie.put(&path("gone/t-0/x"), b"x"), Err(StoreError::Fenced));
    assert_eq!(Shared::open(Arc::new(remote.clone()), life(1), small()).err(), Some(StoreError::Fenced));
    let never = Life { broker: 9, epoch: 9 };
    leftovers::forget(&remote, never).unwrap();
    assert_eq!(remote.begin(never).err(), Some(StoreError::Fenced));

    let orphans = leftovers::orphans(&remote, &leftovers::data(), &|topic| topic == "kept").unwrap();
    assert_eq!(orphans, [path("data/gone")]);
    orphans.iter().for_each(|orphan| remote.delete(orphan).unwrap());
    assert_eq!(leftovers::orphans(&remote, &leftovers::data(), &|topic| topic == "kept"), Ok(Vec::new()));
    assert!(read(&living.open(&path("kept/t-0/0.log")).unwrap()) == content(20_000, 1));
}

#[test]
fn a_directory_is_handed_over_and_comes_back() {
    let remote = Memory::new();
    let open = |epoch| Shared::open(Arc::new(remote.clone()), life(epoch), small()).unwrap();
    let (one, other) = (open(1), open(2));
    let dir = path("t/p-0");
    let log = dir.join("0.log").unwrap();
    let mut expected = content(50_000, 1);
    let writer = one.create(&log).unwrap();
    append(&writer, &expected);
    let (mut from, mut to) = (&one, &other);
    for round in 0..4 {
        let writer = from.resume(&log, expected.len() as u64).unwrap();
        append(&writer, b"not synced");
        expected.extend_from_slice(b"not synced");
        let manifest = from.release(&[std::slice::from_ref(&dir)]).unwrap().pop();
        assert_eq!(writer.sync(), Err(StoreError::Fenced));
        assert_eq!(from.open(&log).err(), Some(StoreError::NotFound));
        assert_eq!(from.put(&dir.join("x").unwrap(), b""), Err(StoreError::Fenced));
        let all = [Inheritance { dir: dir.clone(), lives: Vec::new(), manifest }];
        assert_eq!(to.adopt(&all), Ok(vec![Inherited::Manifest]), "round {round}");
        to.confirm(std::slice::from_ref(&dir));
        from.disown(&dir).unwrap();
        assert!(read(&to.open(&log).unwrap()) == expected);
        std::mem::swap(&mut from, &mut to);
    }
    let manifest = one.release(&[std::slice::from_ref(&dir)]).unwrap().pop();
    let elsewhere = [Inheritance { dir: path("t/p-1"), lives: vec![], manifest }];
    assert!(matches!(other.adopt(&elsewhere), Err(StoreError::Corrupt(_))), "another's manifest");
    let new = [Inheritance { dir: path("t/p-2"), lives: vec![], manifest: None }];
    assert_eq!(other.adopt(&new), Ok(vec![Inherited::Nothing]));
    let lost = [Inheritance { dir: path("t/p-3"), lives: vec![life(77)], manifest: None }];
    let error = other.adopt(&lost).unwrap_err().to_string();
    assert!(error.contains("1-77 have nothing of t/p-3"), "{error}");
}

#[test]
fn a_release_of_which_an_object_fails_can_be_tried_again() {
    let remote = Flaky::new(Memory::new(), 1, RemoteFaults::default());
    // Without threads: a failure is told at once.
    let options = Options { stepped: true, ..small() };
    let from = Shared::open(Arc::new(remote.clone()), life(1), options).unwrap();
    let dirs: Vec<StorePath> = (0..3).map(|at| path(&format!("t/p-{at}"))).collect();
    let writers: Vec<_> = dirs.iter().map(|dir| from.create(&dir.join("0.log").unwrap()).unwrap()).collect();
    for writer in &writers {
        append(writer, &content(6_000, 1));
        writer.sync().unwrap();
    }
    remote.set_down(true);
    assert!(from.release(&[&dirs]).is_err(), "no object can be written");
    remote.set_down(false);
    from.release(&[&dirs]).unwrap();
}

#[test]
fn directories_that_are_released_together_go_to_several_heirs_with_few_objects() {
    let remote = Memory::new();
    let open = |epoch| Shared::open(Arc::new(remote.clone()), life(epoch), small()).unwrap();
    let (from, one, other) = (open(1), open(2), open(3));
    let dirs: Vec<StorePath> = (0..8).map(|at| path(&format!("t/p-{at}"))).collect();
    let log = |dir: &StorePath| dir.join("0.log").unwrap();
    // One tail is too large by itself, all together are too large as well.
    let contents: Vec<Vec<u8>> = (0..8).map(|at| content(if at == 3 { 6_000 } else { 1_500 }, at)).collect();
    let writers: Vec<_> = dirs.iter().map(|dir| from.create(&log(dir)).unwrap()).collect();
    for (writer, bytes) in writers.iter().zip(&contents) {
        append(writer, bytes);
    }
    let before = from.stats().objects_written;
    let manifests = from.release(&[&dirs[..5], &dirs[5..]]).unwrap();
    let written = from.stats().objects_written - before;
    assert!((2..5).contains(&written), "{written} objects of 8 tails");
    let of = |at: usize| Some(manifests[usize::from(at >= 5)].clone());
    for (heir, parity) in [(&one, 0), (&other, 1)] {
        let mine: Vec<usize> = (0..8).filter(|at| at % 2 == parity).collect();
        let all: Vec<Inheritance> = mine
            .iter()
            .map(|at| Inheritance { dir: dirs[*at].clone(), lives: Vec::new(), manifest: of(*at) })
            .collect();
        heir.adopt(&all).unwrap();
        for at in mine {
            heir.confirm(std::slice::from_ref(&dirs[at]));
            from.disown(&dirs[at]).unwrap();
            assert!(read(&heir.open(&log(&dirs[at])).unwrap()) == contents[at], "directory {at}");
        }
    }
    assert_eq!(from.release(&[&[path("t/p-99")]]).err(), Some(StoreError::NotFound));
}

#[test]
fn a_take_over_that_is_made_again_goes_by_what_the_sources_say() {
    let remote = Memory::new();
    let open = |epoch| Shared::open(Arc::new(remote.clone()), life(epoch), small()).unwrap();
    let (one, heir) = (open(1), open(2));
    let dir = path("t/p-0");
    let (log, state) = (dir.join("0.log").unwrap(), dir.join("0.state").unwrap());
    let expected = content(20_000, 1);
    append(&one.create(&log).unwrap(), &expected);
    one.put(&state, &expected).unwrap();
    until("all to be in objects", || one.stats().objects_written > 0);
    let all = [Inheritance { dir: dir.clone(), lives: vec![life(1)], manifest: None }];
    for _ in 0..3 {
        heir.adopt(&all).unwrap();
        assert!(read(&heir.open(&log).unwrap()) == expected);
        let writer = heir.resume(&log, 7).unwrap();
        heir.put(&state, b"other").unwrap();
        heir.adopt(&all).unwrap();
        assert_eq!(writer.append(&[IoSlice::new(b"x")]), Err(StoreError::Fenced));
        assert!(read(&heir.open(&state).unwrap()) == expected);
        heir.delete(&log).unwrap();
        heir.disown(&dir).unwrap();
        assert_eq!(heir.list(&dir), Ok(Vec::new()));
    }
    heir.adopt(&all).unwrap();
    heir.confirm(std::slice::from_ref(&dir));
    assert!(read(&heir.open(&log).unwrap()) == expected);
    heir.delete(&dir).unwrap();
    until("the objects to be deleted", || remote.list(&path("data/t/p-0")).unwrap().is_empty());
}

#[test]
fn a_store_that_takes_nothing_makes_appends_wait_and_then_the_life_is_given_up() {
    let remote = Flaky::new(Memory::new(), 1, RemoteFaults::default());
    let options = Options {
        pending_bytes_max: 10_000,
        wait_max: Duration::from_millis(30),
        give_up_after: Duration::from_millis(300),
        ..small()
    };
    let store = Shared::open(Arc::new(remote.clone()), life(1), options).unwrap();
    let writer = store.create(&path("t/p/0.log")).unwrap();
    remote.set_down(true);
    append(&writer, &[1; 11_000]);
    let refused = writer.append(&[IoSlice::new(b"no room")]).unwrap_err();
    assert!(refused.is_retryable() && refused.to_string().contains("of 10000 bytes wait"), "{refused}");
    assert_eq!(writer.sync(), Err(StoreError::Fenced));
    assert!(matches!(store.lost(), Some(Lost::GaveUp(_))));
    assert!(store.stats().flush_failures > 1);
}

#[test]
fn a_store_that_recovers_in_time_has_lost_nothing() {
    let remote = Flaky::new(Memory::new(), 1, RemoteFaults::default());
    let store = Shared::open(Arc::new(remote.clone()), life(1), small()).unwrap();
    let writer = store.create(&path("t/p/0.log")).unwrap();
    remote.set_down(true);
    append(&writer, b"written meanwhile");
    std::thread::scope(|scope| {
        let sync = scope.spawn(|| writer.sync());
        until("a failure", || store.stats().flush_failures > 2);
        remote.set_down(false);
        assert_eq!(sync.join().unwrap(), Ok(17));
    });
    assert_eq!(store.lost(), None);
}

#[test]
fn an_append_larger_than_a_block_is_taken() {
    let store = Shared::open(Arc::new(Memory::new()), life(1), Options::default()).unwrap();
    let writer = store.create(&path("t/p/0.log")).unwrap();
    let bytes = content(10_000_000, 5);
    let (front, back) = bytes.split_at(3_333_333);
    assert_eq!(writer.append(&[IoSlice::new(front), IoSlice::new(back)]), Ok(10_000_000));
    assert_eq!(writer.sync(), Ok(10_000_000));
    assert!(read(&writer.reader()) == bytes);
    let whole = path("t/p/1.log");
    store.put(&whole, &bytes).unwrap();
    assert!(read(&store.open(&whole).unwrap()) == bytes);
    store.put(&whole, b"small").unwrap();
    assert_eq!(read(&store.open(&whole).unwrap()), b"small");
}

#[test]
fn small_objects_of_a_file_without_a_writer_become_one() {
    let remote = Memory::new();
    let options = Options { object_bytes: 2 << 10, ..small() };
    let store = Shared::open(Arc::new(remote.clone()), life(1), options).unwrap();
    let file = path("t/p/0.log");
    let writer = store.create(&file).unwrap();
    let expected = content(60_000, 3);
    for part in expected.chunks(3_000) {
        append(&writer, part);
        writer.sync().unwrap();
        let written = store.stats().objects_written;
        until("an object", || {
            store.stats().memory_bytes < 2 << 10 || store.stats().objects_written > written
        });
    }
    let count = || remote.list(&path("data/t/p")).unwrap().len();
    drop(writer);
    store.put(&path("t/p/other"), b"a flush").unwrap();
    until("fewer objects", || {
        store.put(&path("t/p/other"), b"a flush").unwrap();
        count() < 18
    });
    assert!(read(&store.open(&file).unwrap()) == expected);
}

#[test]
fn closing_makes_everything_durable() {
    let remote = Memory::new();
    let store = Shared::open(Arc::new(remote.clone()), life(1), Options::default()).unwrap();
    let dir = path("t/p");
    let writer = store.create(&dir.join("0.log").unwrap()).unwrap();
    append(&writer, b"not synced");
    store.close().unwrap();
    assert_eq!(store.lost(), Some(Lost::Closed));
    assert_eq!(writer.append(&[IoSlice::new(b"x")]), Err(StoreError::Fenced));
    let heir = Shared::open(Arc::new(remote), life(2), Options::default()).unwrap();
    heir.adopt(&[Inheritance { dir: dir.clone(), lives: vec![life(1)], manifest: None }]).unwrap();
    assert_eq!(read(&heir.open(&dir.join("0.log").unwrap()).unwrap()), b"not synced");
}

#[test]
fn tails_of_many_files_go_into_few_objects_that_outlive_their_writer_while_they_are_needed() {
    let remote = Memory::new();
    let options = || Options { pack_bytes_min: 256, ..small() };
    let open = |epoch| Shared::open(Arc::new(remote.clone()), life(epoch), options()).unwrap();
    let store = open(1);
    let dirs: Vec<StorePath> = (0..100).map(|n| path(&format!("t/p-{n}"))).collect();
    let logs: Vec<StorePath> = dirs.iter().map(|dir| dir.join("0.log").unwrap()).collect();
    let writers: Vec<_> = logs.iter().map(|log| store.create(log).unwrap()).collect();
    let expected: Vec<Vec<u8>> = (0..100).map(|n| content(10_000, n)).collect();
    for at in (0..10_000).step_by(500) {
        for (writer, bytes) in writers.iter().zip(&expected) {
            append(writer, &bytes[at..at + 500]);
        }
        writers.iter().for_each(|writer| assert!(writer.sync().is_ok()));
    }
    until("packs", || store.stats().packs_written > 20);
    let stats = store.stats();
    assert!(stats.objects_written < 200, "{stats:?}");
    logs.iter().zip(&expected).for_each(|(log, bytes)| assert!(read(&store.open(log).unwrap()) == *bytes));

    let packs = || remote.list(&path("packs/1-1")).unwrap().len();
    let heirs = [open(2), open(3)];
    for (n, dir) in dirs.iter().enumerate() {
        let one = Inheritance { dir: dir.clone(), lives: vec![life(1)], manifest: None };
        heirs[n % 2].adopt(&[one]).unwrap();
    }
    assert!(!leftovers::forget(&remote, life(1)).unwrap(), "the heirs need its packs");
    assert!(packs() > 0);
    assert_eq!(leftovers::lives(&remote), Ok(vec![life(1), life(2), life(3)]));
    dirs.iter().enumerate().for_each(|(n, dir)| heirs[n % 2].confirm(std::slice::from_ref(dir)));
    until("the heirs to need them no more", || {
        heirs.iter().for_each(|heir| heir.put(&path("own/x/flush"), b"x").unwrap());
        leftovers::forget(&remote, life(1)).unwrap()
    });
    assert_eq!(packs(), 0);
    assert_eq!(leftovers::lives(&remote), Ok(vec![life(2), life(3)]));
    for (n, (log, bytes)) in logs.iter().zip(&expected).enumerate() {
        assert!(read(&heirs[n % 2].open(log).unwrap()) == *bytes, "{n}");
    }
    // The last chunk takes its pack along.
    heirs.iter().for_each(|heir| heir.delete(&path("t")).unwrap());
    until("all to be gone", || {
        heirs.iter().for_each(|heir| heir.put(&path("own/x/flush"), b"x").unwrap());
        remote.list(&path("data/t")).unwrap().is_empty()
            && [2, 3].iter().all(|n| remote.list(&path(&format!("packs/1-{n}"))).unwrap().is_empty())
    });
}

/// A store whose credentials lack the right to remove.
#[derive(Debug)]
struct KeepsAll(Memory);

impl Remote for KeepsAll {
    fn put(&self, name: &StorePath, bytes: Bytes) -> Result<(), StoreError> {
        self.0.put(name, bytes)
    }
    fn get(&self, name: &StorePath, pos: u64, len: usize) -> Result<Bytes, StoreError> {
        self.0.get(name, pos, len)
    }
    fn list(&self, dir: &StorePath) -> Result<Vec<crate::Entry>, StoreError> {
        self.0.list(dir)
    }
    fn delete(&self, name: &StorePath) -> Result<(), StoreError> {
        Err(StoreError::Io(format!("{name}: denied")))
    }
    fn begin(&self, life: Life) -> Result<Arc<dyn LifeLog>, StoreError> {
        self.0.begin(life)
    }
    fn fence(&self, life: Life) -> Result<(), StoreError> {
        self.0.fence(life)
    }
    fn end(
        &self,
        life: Life,
        visit: &mut dyn FnMut(Block) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        self.0.end(life, visit)
    }
    fn forget(&self, life: Life) -> Result<(), StoreError> {
        self.0.forget(life)
    }
    fn lives(&self) -> Result<Vec<Life>, StoreError> {
        self.0.lives()
    }
}

#[test]
fn a_store_that_lets_nothing_be_removed_takes_all_that_is_written() {
    let store = Shared::open(Arc::new(KeepsAll(Memory::new())), life(1), small()).unwrap();
    // More than the writers could have in their hands, and far more than the log may hold.
    for n in 0..60 {
        let dir = path(&format!("t/p-{n}"));
        let writer = store.create(&dir.join("0.log").unwrap()).unwrap();
        let before = store.stats().objects_written;
        for part in content(100_000, n).chunks(10_000) {
            append(&writer, part);
        }
        writer.sync().unwrap();
        until("objects", || store.stats().objects_written >= before + 2);
        drop(writer);
        store.delete(&dir).unwrap();
    }
    let stats = store.stats();
    assert!(stats.garbage > 64 && stats.objects_deleted == 0, "{stats:?}");
}
