//! What every segment store and every metadata store must do, whatever it stands on.
//!
//! Two lists of cases, run against each implementation by the tests below. Faulty stores run them with
//! their faults off, and again with faults on through callers that try again.

use std::io::IoSlice;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::meta::{self, MetaFaults};
use crate::{
    Change, Disk, Entry, Faults, Flaky, Memory, MetaError, MetaStore, Reader, SegmentStore, StoreError,
    StorePath, Version, Volatile, Writer,
};

fn path(text: &str) -> StorePath {
    StorePath::parse(text).unwrap()
}

fn append(writer: &Arc<dyn Writer>, bytes: &[u8]) -> u64 {
    writer.append(&[IoSlice::new(bytes)]).unwrap()
}

fn read(reader: &Arc<dyn Reader>) -> Vec<u8> {
    reader.read_at(0, 1 << 30).unwrap().to_vec()
}

fn error<T>(result: Result<T, StoreError>) -> StoreError {
    match result {
        Ok(_) => panic!("this had to fail"),
        Err(error) => error,
    }
}

mod segment {
    use super::*;

    pub(super) fn what_is_appended_is_read_at_once_and_in_order(store: &dyn SegmentStore) {
        let file = path("t/p-0/00.log");
        let writer = store.create(&file).unwrap();
        let reader = writer.reader();
        assert!(reader.is_empty());
        assert_eq!(append(&writer, b"one"), 3);
        let end =
            writer.append(&[IoSlice::new(b""), IoSlice::new(b"tw"), IoSlice::new(b"o"), IoSlice::new(b"")]);
        assert_eq!(end, Ok(6));
        assert_eq!(writer.append(&[]), Ok(6));
        assert_eq!(read(&reader), b"onetwo");
        assert_eq!(read(&store.open(&file).unwrap()), b"onetwo");
        assert_eq!(writer.sync(), Ok(6));
        assert_eq!(read(&reader), b"onetwo");
        append(&writer, b"three");
        assert_eq!(reader.len(), 11);
        assert_eq!(&reader.read_at(4, 5).unwrap()[..], b"wothr");
        assert_eq!(writer.sync(), Ok(11));
        assert_eq!(writer.sync(), Ok(11));
    }

    pub(super) fn a_read_stops_at_the_end(store: &dyn SegmentStore) {
        let writer = store.create(&path("a")).unwrap();
        append(&writer, b"0123456789");
        let reader = writer.reader();
        assert_eq!(&reader.read_at(7, 100).unwrap()[..], b"789");
        assert_eq!(&reader.read_at(10, 1).unwrap()[..], b"");
        assert_eq!(&reader.read_at(1_000, 1).unwrap()[..], b"");
        assert_eq!(&reader.read_at(3, 0).unwrap()[..], b"");
    }

    pub(super) fn large_and_many_parts_are_written_whole(store: &dyn SegmentStore) {
        let writer = store.create(&path("large")).unwrap();
        let expected: Vec<u8> = (0..700_000_u32).map(|i| (i % 251) as u8).collect();
        let parts: Vec<IoSlice<'_>> = expected.chunks(300).map(IoSlice::new).collect();
        assert_eq!(writer.append(&parts), Ok(expected.len() as u64));
        assert_eq!(append(&writer, &expected), 2 * expected.len() as u64);
        let found = read(&writer.reader());
        assert!(found[..expected.len()] == expected[..] && found[expected.len()..] == expected[..]);
        let across = writer.reader().read_at(65_530, 70_000).unwrap();
        assert!(across[..] == expected[65_530..135_530]);
    }

    pub(super) fn the_local_file_holds_what_the_reader_sees(store: &dyn SegmentStore) {
        let writer = store.create(&path("f")).unwrap();
        append(&writer, b"bytes");
        writer.sync().unwrap();
        if let Some(file) = writer.reader().file() {
            let mut found = [0; 5];
            std::os::unix::fs::FileExt::read_exact_at(&*file, &mut found, 0).unwrap();
            assert_eq!(&found, b"bytes");
        }
    }

    pub(super) fn create_refuses_what_exists(store: &dyn SegmentStore) {
        let writer = store.create(&path("d/x")).unwrap();
        append(&writer, b"kept");
        assert_eq!(error(store.create(&path("d/x"))), StoreError::AlreadyExists);
        store.put(&path("d/y"), b"kept").unwrap();
        assert_eq!(error(store.create(&path("d/y"))), StoreError::AlreadyExists);
        assert_eq!(read(&writer.reader()), b"kept");
    }

    pub(super) fn what_is_absent_is_not_found(store: &dyn SegmentStore) {
        store.put(&path("dir/file"), b"x").unwrap();
        assert_eq!(error(store.open(&path("nothing"))), StoreError::NotFound);
        assert_eq!(error(store.open(&path("dir"))), StoreError::NotFound);
        assert_eq!(error(store.open(&path("dir/nothing"))), StoreError::NotFound);
        assert_eq!(error(store.resume(&path("nothing"), 0)), StoreError::NotFound);
        assert_eq!(store.list(&path("nothing")), Ok(Vec::new()));
        assert_eq!(store.delete(&path("nothing")), Ok(()));
        assert_eq!(store.delete(&path("no/thing")), Ok(()));
    }

    pub(super) fn put_replaces_the_whole_file(store: &dyn SegmentStore) {
        let file = path("s/x.state");
        store.put(&file, b"a long first content").unwrap();
        let old = store.open(&file).unwrap();
        store.put(&file, b"short").unwrap();
        assert_eq!(read(&store.open(&file).unwrap()), b"short");
        assert_eq!(read(&old), b"a long first content");
        store.put(&file, b"").unwrap();
        assert!(store.open(&file).unwrap().is_empty());
        assert_eq!(store.list(&path("s")).unwrap().len(), 1, "no temporary file is left or shown");
    }

    pub(super) fn resume_cuts_and_goes_on(store: &dyn SegmentStore) {
        let file = path("r/0.log");
        let writer = store.create(&file).unwrap();
        append(&writer, b"good and torn");
        writer.sync().unwrap();
        drop(writer);
        let writer = store.resume(&file, 4).unwrap();
        assert_eq!(writer.reader().len(), 4);
        assert_eq!(append(&writer, b"!"), 5);
        assert_eq!(writer.sync(), Ok(5));
        drop(writer);
        assert_eq!(read(&store.open(&file).unwrap()), b"good!");
        assert!(matches!(error(store.resume(&file, 6)), StoreError::Corrupt(_)));
        let writer = store.resume(&file, 0).unwrap();
        assert_eq!(writer.sync(), Ok(0));
        assert_eq!(append(&writer, b"new"), 3);
        assert_eq!(read(&store.open(&file).unwrap()), b"new");
    }

    pub(super) fn resume_cuts_anywhere(store: &dyn SegmentStore) {
        let content: Vec<u8> = (0..200_000_u32).map(|i| i as u8).collect();
        let file = path("cut");
        store.put(&file, &content).unwrap();
        for len in [200_000, 131_073, 131_072, 131_071, 65_536, 1, 0] {
            let writer = store.resume(&file, len).unwrap();
            assert!(read(&writer.reader()) == content[..len as usize], "{len}");
            append(&writer, b"z");
            assert_eq!(&writer.reader().read_at(len, 9).unwrap()[..], b"z");
        }
    }

    pub(super) fn an_older_writer_of_the_same_file_is_fenced(store: &dyn SegmentStore) {
        let file = path("w");
        let older = store.create(&file).unwrap();
        append(&older, b"12345");
        let newer = store.resume(&file, 3).unwrap();
        assert_eq!(older.append(&[IoSlice::new(b"zombie")]), Err(StoreError::Fenced));
        assert_eq!(older.sync(), Err(StoreError::Fenced));
        assert_eq!(older.seal(), Err(StoreError::Fenced));
        drop(older);
        append(&newer, b"x");
        assert_eq!(newer.sync(), Ok(4));
        assert_eq!(read(&store.open(&file).unwrap()), b"123x");
    }

    pub(super) fn a_sealed_writer_takes_no_more(store: &dyn SegmentStore) {
        let file = path("sealed");
        let writer = store.create(&file).unwrap();
        append(&writer, b"all");
        assert_eq!(writer.seal(), Ok(()));
        assert_eq!(writer.seal(), Ok(()));
        assert_eq!(writer.append(&[IoSlice::new(b"more")]), Err(StoreError::Sealed));
        assert_eq!(writer.sync(), Ok(3));
        assert_eq!(read(&writer.reader()), b"all");
        drop(writer);
        assert_eq!(read(&store.open(&file).unwrap()), b"all");
    }

    pub(super) fn list_shows_files_and_directories_by_name(store: &dyn SegmentStore) {
        store.put(&path("t1/p-0/b.log"), b"12").unwrap();
        store.put(&path("t1/p-0/a.log"), b"1").unwrap();
        store.put(&path("t1/p-10/a.log"), b"").unwrap();
        store.put(&path("t1/p-1/a.log"), b"").unwrap();
        store.put(&path("t1.x/file"), b"").unwrap();
        store.put(&path("t1-x"), b"abc").unwrap();
        let entry = |name: &str, len, is_dir| Entry { name: name.to_owned(), len, is_dir };
        let root = store.list(&StorePath::root()).unwrap();
        assert_eq!(root, [entry("t1", 0, true), entry("t1-x", 3, false), entry("t1.x", 0, true)]);
        let dirs = store.list(&path("t1")).unwrap();
        assert_eq!(dirs, [entry("p-0", 0, true), entry("p-1", 0, true), entry("p-10", 0, true)]);
        let files = store.list(&path("t1/p-0")).unwrap();
        assert_eq!(files, [entry("a.log", 1, false), entry("b.log", 2, false)]);
        let writer = store.resume(&path("t1/p-0/a.log"), 1).unwrap();
        append(&writer, b"23");
        assert_eq!(store.list(&path("t1/p-0")).unwrap()[0].len, 3, "unsynced bytes count");
    }

    pub(super) fn delete_removes_a_file_or_a_whole_directory(store: &dyn SegmentStore) {
        for file in ["d/p-0/a", "d/p-0/b", "d/p-0/c/deep", "d/p-00/a", "d/p-1/a"] {
            store.put(&path(file), b"x").unwrap();
        }
        let reader = store.open(&path("d/p-0/a")).unwrap();
        store.delete(&path("d/p-0/a")).unwrap();
        assert_eq!(error(store.open(&path("d/p-0/a"))), StoreError::NotFound);
        assert_eq!(read(&reader), b"x", "an open reader goes on");
        store.delete(&path("d/p-0")).unwrap();
        let names: Vec<String> =
            store.list(&path("d")).unwrap().into_iter().map(|entry| entry.name).collect();
        assert_eq!(names, ["p-00", "p-1"]);
        store.create(&path("d/p-0/a")).unwrap();
        assert_eq!(store.list(&path("d/p-0")).unwrap().len(), 1, "only what was made since");
        assert!(store.delete(&StorePath::root()).is_err());
        store.delete(&path("d")).unwrap();
        assert_eq!(store.list(&StorePath::root()).unwrap(), []);
    }

    pub(super) fn a_deleted_file_has_no_writer_and_no_past(store: &dyn SegmentStore) {
        let file = path("g/p/a");
        let writer = store.create(&file).unwrap();
        append(&writer, b"gone");
        store.delete(&path("g")).unwrap();
        assert_eq!(writer.append(&[IoSlice::new(b"zombie")]), Err(StoreError::Fenced));
        assert_eq!(writer.sync(), Err(StoreError::Fenced));
        store.put(&file, b"other").unwrap();
        assert_eq!(read(&store.open(&file).unwrap()), b"other");
        store.delete(&file).unwrap();
        let newer = store.create(&file).unwrap();
        append(&newer, b"new");
        drop(writer);
        assert_eq!(read(&store.open(&file).unwrap()), b"new");
        assert_eq!(store.open(&file).unwrap().len(), 3);
    }

    pub(super) fn a_fence_ends_the_writers_below_it(store: &dyn SegmentStore) {
        let inside = store.create(&path("f/p-1/a")).unwrap();
        let outside = store.create(&path("f/p-10/a")).unwrap();
        let beside = store.create(&path("f/p-1.x")).unwrap();
        store.fence(&path("f/p-1"), 5).unwrap();
        assert_eq!(inside.append(&[IoSlice::new(b"x")]), Err(StoreError::Fenced));
        assert_eq!(inside.sync(), Err(StoreError::Fenced));
        append(&outside, b"x");
        append(&beside, b"x");
        assert_eq!(store.fence(&path("f/p-1"), 4), Err(StoreError::Fenced));
        let later = store.create(&path("f/p-1/b")).unwrap();
        append(&later, b"x");
        store.fence(&path("f/p-1"), 5).unwrap();
        assert_eq!(later.sync(), Err(StoreError::Fenced));
        store.fence(&StorePath::root(), 1).unwrap();
        assert_eq!(outside.sync(), Err(StoreError::Fenced));
        store.delete(&path("f/p-1")).unwrap();
        store.fence(&path("f/p-1"), 1).unwrap();
    }

    pub(super) fn many_threads_append_sync_and_read(store: &dyn SegmentStore) {
        let writer = store.create(&path("busy")).unwrap();
        std::thread::scope(|scope| {
            for thread in 0..3_u8 {
                let writer = &writer;
                scope.spawn(move || {
                    for _ in 0..60 {
                        let end = append(writer, &[thread; 100]);
                        assert!(writer.sync().unwrap() >= end);
                    }
                });
            }
            scope.spawn(|| {
                let reader = writer.reader();
                let mut seen = 0;
                while seen < 3 * 60 * 100 {
                    let found = read(&reader);
                    assert!(found.len() >= seen && found.len().is_multiple_of(100));
                    assert!(found.chunks(100).all(|chunk| chunk.iter().all(|byte| *byte == chunk[0])));
                    seen = found.len();
                }
            });
        });
        assert_eq!(writer.sync(), Ok(18_000));
    }

    macro_rules! all_of {
        ($($case:ident),* $(,)?) => {
            pub(super) const ALL: &[(&str, fn(&dyn SegmentStore))] = &[$((stringify!($case), $case)),*];
        };
    }

    all_of!(
        what_is_appended_is_read_at_once_and_in_order,
        a_read_stops_at_the_end,
        large_and_many_parts_are_written_whole,
        the_local_file_holds_what_the_reader_sees,
        create_refuses_what_exists,
        what_is_absent_is_not_found,
        put_replaces_the_whole_file,
        resume_cuts_and_goes_on,
        resume_cuts_anywhere,
        an_older_writer_of_the_same_file_is_fenced,
        a_sealed_writer_takes_no_more,
        list_shows_files_and_directories_by_name,
        delete_removes_a_file_or_a_whole_directory,
        a_deleted_file_has_no_writer_and_no_past,
        a_fence_ends_the_writers_below_it,
        many_threads_append_sync_and_read,
    );
}

/// Runs every case on a fresh store.
fn segment_cases(make: impl Fn() -> Box<dyn SegmentStore>) {
    for (name, case) in segment::ALL {
        println!("case {name}");
        case(&*make());
    }
}

/// A store together with the directory that it needs.
struct Kept<S> {
    store: S,
    _dir: tempfile::TempDir,
}

impl<S: SegmentStore> SegmentStore for Kept<S> {
    fn create(&self, path: &StorePath) -> Result<Arc<dyn Writer>, StoreError> {
        self.store.create(path)
    }
    fn resume(&self, path: &StorePath, len: u64) -> Result<Arc<dyn Writer>, StoreError> {
        self.store.resume(path, len)
    }
    fn open(&self, path: &StorePath) -> Result<Arc<dyn Reader>, StoreError> {
        self.store.open(path)
    }
    fn put(&self, path: &StorePath, bytes: &[u8]) -> Result<(), StoreError> {
        self.store.put(path, bytes)
    }
    fn list(&self, dir: &StorePath) -> Result<Vec<Entry>, StoreError> {
        self.store.list(dir)
    }
    fn delete(&self, path: &StorePath) -> Result<(), StoreError> {
        self.store.delete(path)
    }
    fn fence(&self, dir: &StorePath, epoch: u64) -> Result<(), StoreError> {
        self.store.fence(dir, epoch)
    }
}

fn disk() -> Kept<Disk> {
    let dir = tempfile::tempdir().unwrap();
    Kept { store: Disk::open(dir.path()).unwrap(), _dir: dir }
}

fn volatile() -> Kept<Volatile> {
    let dir = tempfile::tempdir().unwrap();
    Kept { store: Volatile::open(dir.path()).unwrap(), _dir: dir }
}

fn late() -> Faults {
    Faults { delay_per_mille: 300, delay_max: Duration::from_micros(200), ..Faults::default() }
}

#[test]
fn memory_is_a_segment_store() {
    segment_cases(|| Box::new(Memory::new()));
}

#[test]
fn disk_is_a_segment_store() {
    segment_cases(|| Box::new(disk()));
}

#[test]
fn volatile_is_a_segment_store() {
    segment_cases(|| Box::new(volatile()));
}

#[test]
fn flaky_memory_is_a_segment_store() {
    segment_cases(|| Box::new(Flaky::new(Memory::new(), 1, late())));
}

#[test]
fn flaky_disk_is_a_segment_store() {
    segment_cases(|| Box::new(Flaky::new(disk(), 2, late())));
}

#[test]
fn flaky_volatile_is_a_segment_store() {
    segment_cases(|| Box::new(Flaky::new(volatile(), 3, late())));
}

#[test]
fn a_boxed_store_is_a_segment_store() {
    segment_cases(|| Box::new(Arc::new(Memory::new()) as Arc<dyn SegmentStore>));
}

fn shared(remote: impl crate::Remote + 'static) -> Arc<dyn SegmentStore> {
    let life = crate::Life { broker: 1, epoch: 1 };
    crate::shared::Shared::open(Arc::new(remote), life, crate::shared::small()).unwrap()
}

#[test]
fn shared_log_is_a_segment_store() {
    segment_cases(|| Box::new(shared(crate::remote::Memory::new())));
}

#[test]
fn shared_log_on_a_faulty_remote_store_is_a_segment_store() {
    let faults = crate::remote::RemoteFaults {
        error_per_mille: 50,
        late_error_per_mille: 50,
        repeat_per_mille: 50,
        ..Default::default()
    };
    segment_cases(|| {
        let remote = crate::remote::Memory::new();
        Box::new(shared(crate::remote::Flaky::new(remote, 1, faults)))
    });
}

/// What only a faulty store can show, on each of the others.
fn faulty_cases(make: impl Fn() -> Box<dyn SegmentStore>) {
    a_full_disk_loses_nothing_and_recovers(Arc::from(make()));
    a_failed_sync_ends_the_writer_for_good(Arc::from(make()));
    errors_never_leave_half_of_an_append(Arc::from(make()));
}

fn a_full_disk_loses_nothing_and_recovers(inner: Arc<dyn SegmentStore>) {
    let store = Flaky::new(inner, 4, Faults::default());
    let writer = store.create(&path("a")).unwrap();
    append(&writer, b"before");
    store.set_full(true);
    assert_eq!(writer.append(&[IoSlice::new(b"lost")]), Err(StoreError::Full));
    assert_eq!(error(store.create(&path("b"))), StoreError::Full);
    assert_eq!(store.put(&path("c"), b"x"), Err(StoreError::Full));
    assert_eq!(writer.sync(), Ok(6));
    store.set_full(false);
    append(&writer, b" after");
    assert_eq!(writer.sync(), Ok(12));
    assert_eq!(read(&store.open(&path("a")).unwrap()), b"before after");
    store.create(&path("b")).unwrap();
}

fn a_failed_sync_ends_the_writer_for_good(inner: Arc<dyn SegmentStore>) {
    let store = Flaky::new(inner, 5, Faults::default());
    let writer = store.create(&path("a")).unwrap();
    append(&writer, b"safe");
    writer.sync().unwrap();
    append(&writer, b" doubtful");
    store.fail_next_sync();
    let failed = StoreError::SyncFailed { durable: 4 };
    for _ in 0..3 {
        assert_eq!(writer.sync(), Err(failed.clone()), "never tried again");
        assert_eq!(writer.append(&[IoSlice::new(b"x")]), Err(failed.clone()));
        assert_eq!(writer.seal(), Err(failed.clone()));
    }
    assert!(failed.ends_writer() && !failed.is_retryable());
    // What the layer above does: cut the old file, write the rest again from memory into a new one.
    store.resume(&path("a"), 4).unwrap().seal().unwrap();
    let next = store.create(&path("b")).unwrap();
    append(&next, b" doubtful");
    assert_eq!(next.sync(), Ok(9));
    store.crash().unwrap();
    assert_eq!(read(&store.open(&path("a")).unwrap()), b"safe");
    assert_eq!(read(&store.open(&path("b")).unwrap()), b" doubtful");
}

fn errors_never_leave_half_of_an_append(inner: Arc<dyn SegmentStore>) {
    let store = Flaky::new(inner, 6, Faults::default());
    let writer = store.create(&path("a")).unwrap();
    store.set_faults(Faults { error_per_mille: 300, ..Faults::default() });
    let mut expected = Vec::new();
    let mut failures = 0;
    for i in 0..200_u8 {
        match writer.append(&[IoSlice::new(&[i]), IoSlice::new(&[i; 9])]) {
            Ok(end) => {
                expected.extend_from_slice(&[i; 10]);
                assert_eq!(end, expected.len() as u64);
            }
            Err(error) => {
                assert!(error.is_retryable());
                failures += 1;
            }
        }
    }
    assert!(failures > 20 && expected.len() > 1_000);
    store.set_faults(Faults::default());
    assert_eq!(read(&writer.reader()), expected);
}

#[test]
fn faults_on_memory_keep_the_contract() {
    faulty_cases(|| Box::new(Memory::new()));
}

#[test]
fn faults_on_disk_keep_the_contract() {
    faulty_cases(|| Box::new(disk()));
}

#[test]
fn faults_on_volatile_keep_the_contract() {
    faulty_cases(|| Box::new(volatile()));
}

#[test]
fn a_dead_store_changes_nothing_until_it_is_healed() {
    let store = Flaky::new(Memory::new(), 9, Faults::default());
    let writer = store.create(&path("a")).unwrap();
    store.die_after(2);
    append(&writer, b"1");
    append(&writer, b"2");
    assert!(store.is_dead());
    assert!(writer.append(&[IoSlice::new(b"3")]).is_err());
    assert_eq!(writer.sync(), Err(StoreError::SyncFailed { durable: 0 }));
    assert!(store.put(&path("b"), b"x").is_err());
    assert!(store.delete(&path("a")).is_err());
    assert!(store.resume(&path("a"), 1).is_err());
    assert_eq!(read(&store.open(&path("a")).unwrap()), b"12");
    store.heal();
    store.put(&path("b"), b"x").unwrap();
    let writer = store.resume(&path("a"), 2).unwrap();
    assert_eq!(writer.sync(), Ok(2));
}

#[test]
fn the_same_seed_gives_the_same_faults() {
    let run = |seed| {
        let store = Flaky::new(Memory::new(), seed, Faults { error_per_mille: 500, ..Faults::default() });
        (0..64).map(|i| store.put(&path(&format!("{i}")), b"").is_ok()).collect::<Vec<bool>>()
    };
    assert_eq!(run(7), run(7));
    assert_ne!(run(7), run(8));
}

mod metadata {
    use super::*;

    pub(super) async fn a_write_needs_the_right_version(store: &dyn MetaStore) {
        assert_eq!(store.get("k").await, Ok(None));
        let first = store.put_if("k", b"1".to_vec(), None).await.unwrap();
        let current = Some(first);
        assert_eq!(store.put_if("k", b"x".to_vec(), None).await, Err(MetaError::Conflict { current }));
        assert_eq!(store.get("k").await, Ok(Some((b"1".to_vec(), first))));
        let second = store.put_if("k", b"2".to_vec(), current).await.unwrap();
        assert!(second > first);
        let current = Some(second);
        assert_eq!(store.put_if("k", b"x".to_vec(), Some(first)).await, Err(MetaError::Conflict { current }));
        assert_eq!(store.delete_if("k", first).await, Err(MetaError::Conflict { current }));
        assert_eq!(store.delete_if("k", second).await, Ok(()));
        let current = None;
        assert_eq!(store.delete_if("k", second).await, Err(MetaError::Conflict { current }));
        assert_eq!(store.put_if("k", vec![], Some(second)).await, Err(MetaError::Conflict { current }));
        let third = store.put_if("k", vec![], None).await.unwrap();
        assert!(third > second, "a version is never used twice");
        assert_eq!(store.version().await, Ok(third));
    }

    pub(super) async fn list_shows_a_prefix_in_order(store: &dyn MetaStore) {
        for key in ["topics/b", "topics/a", "topics", "topicsx", "a", "u"] {
            store.put_if(key, key.as_bytes().to_vec(), None).await.unwrap();
        }
        let keys = |items: Vec<crate::Item>| items.into_iter().map(|item| item.key).collect::<Vec<_>>();
        assert_eq!(keys(store.list("topics/").await.unwrap()), ["topics/a", "topics/b"]);
        assert_eq!(keys(store.list("topics").await.unwrap()), ["topics", "topics/a", "topics/b", "topicsx"]);
        assert_eq!(store.list("").await.unwrap().len(), 6);
        assert_eq!(store.list("zz").await.unwrap(), []);
    }

    pub(super) async fn a_watch_tells_every_later_change_in_order(store: &dyn MetaStore) {
        let before = store.put_if("w/a", b"0".to_vec(), None).await.unwrap();
        let mut watch = store.watch("w/").await.unwrap();
        let mut other = store.watch("none/").await.unwrap();
        let put = store.put_if("w/a", b"1".to_vec(), Some(before)).await.unwrap();
        store.put_if("v", b"".to_vec(), None).await.unwrap();
        store.delete_if("w/a", put).await.unwrap();
        match watch.next().await.unwrap() {
            Change::Put(item) => {
                assert_eq!((item.key.as_str(), &item.value[..], item.version), ("w/a", &b"1"[..], put))
            }
            change => panic!("{change:?}"),
        }
        let Some(Change::Deleted { key, version }) = watch.next().await else { panic!("a deletion was due") };
        assert_eq!(key, "w/a");
        assert!(version > put);
        assert_eq!(watch.try_next(), None);
        assert_eq!(other.try_next(), None);
        drop(watch);
        store.put_if("w/b", b"".to_vec(), None).await.unwrap();
    }

    pub(super) async fn a_slow_watcher_is_told_to_list_again(store: &dyn MetaStore) {
        let mut watch = store.watch("").await.unwrap();
        let mut version = None;
        for i in 0..1_100_u32 {
            version = Some(store.put_if("k", i.to_be_bytes().to_vec(), version).await.unwrap());
        }
        // Where changes come over a network, the last one takes a moment.
        let end = Instant::now() + Duration::from_secs(60);
        while !matches!(watch.latest(), Some(Change::Put(last)) if Some(last.version) == version) {
            assert!(Instant::now() < end, "the latest change comes");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let mut changes = Vec::new();
        while let Some(change) = watch.try_next() {
            changes.push(change);
        }
        assert!(changes.len() <= 1_024);
        assert_eq!(changes[0], Change::Resync);
        let Some(Change::Put(last)) = changes.last() else { panic!("the latest change is there") };
        assert_eq!(Some(last.version), version, "what follows a resync is complete");
    }

    pub(super) async fn one_of_two_writers_wins(store: &dyn MetaStore) {
        let start = store.put_if("n", b"0".to_vec(), None).await.unwrap();
        let writes = (0..8_u8).map(|i| store.put_if("n", vec![i], Some(start)));
        let outcomes = futures_util::future::join_all(writes).await;
        assert_eq!(outcomes.iter().filter(|outcome| outcome.is_ok()).count(), 1);
    }

    pub(super) async fn keys_and_values_are_bounded(store: &dyn MetaStore) {
        for bad in ["", "a\nb", &"x".repeat(1_025)] {
            assert!(matches!(store.put_if(bad, vec![], None).await, Err(MetaError::BadKey(_))));
            assert!(matches!(store.get(bad).await, Err(MetaError::BadKey(_))));
            assert!(matches!(store.delete_if(bad, Version(1)).await, Err(MetaError::BadKey(_))));
        }
        let over = vec![0; meta::VALUE_BYTES_MAX + 1];
        assert!(matches!(store.put_if("k", over, None).await, Err(MetaError::TooLarge(_))));
        store.put_if(&"x".repeat(1_024), vec![7; meta::VALUE_BYTES_MAX], None).await.unwrap();
    }

    pub(super) async fn a_lease_is_held_until_it_ends(store: &dyn MetaStore) {
        let lease = store.lease(Duration::from_millis(1)).await.unwrap();
        let other = store.lease(Duration::from_millis(1)).await.unwrap();
        assert!(lease.is_held());
        lease.end();
        assert!(!lease.is_held());
        lease.lost().await;
        assert!(other.is_held());
    }

    pub(super) async fn a_guarded_write_needs_its_guard(store: &dyn MetaStore) {
        let guard = store.put_if("guard", b"1".to_vec(), None).await.unwrap();
        let first = store.put_guarded("k", b"a".to_vec(), None, ("guard", guard)).await.unwrap();
        let again = store.put_guarded("k", b"b".to_vec(), None, ("guard", guard)).await;
        assert_eq!(again, Err(MetaError::Conflict { current: Some(first) }));
        store.delete_if("guard", guard).await.unwrap();
        let late = store.put_guarded("k", b"b".to_vec(), Some(first), ("guard", guard)).await;
        assert_eq!(late, Err(MetaError::GuardGone));
        let newer = store.put_if("guard", b"1".to_vec(), None).await.unwrap();
        assert_ne!(newer, guard);
        let late = store.put_guarded("k", b"b".to_vec(), Some(first), ("guard", guard)).await;
        assert_eq!(late, Err(MetaError::GuardGone), "a guard of the same name is another one");
        assert_eq!(store.get("k").await.unwrap(), Some((b"a".to_vec(), first)));
    }

    pub(super) async fn a_leased_key_goes_with_its_lease(store: &dyn MetaStore) {
        let lease = store.lease(Duration::from_secs(2)).await.unwrap();
        let mut watch = store.watch("live/").await.unwrap();
        let version = store.put_leased("live/1", b"x".to_vec(), None, &lease).await.unwrap();
        let taken = store.put_leased("live/1", b"y".to_vec(), None, &lease).await;
        assert_eq!(taken, Err(MetaError::Conflict { current: Some(version) }));
        store.put_if("live/2", b"stays".to_vec(), None).await.unwrap();
        assert!(matches!(watch.next().await, Some(Change::Put(item)) if item.key == "live/1"));
        assert!(matches!(watch.next().await, Some(Change::Put(item)) if item.key == "live/2"));
        // Dropped without a word, as by a process that dies.
        drop(lease);
        let gone = watch.next().await;
        assert!(matches!(&gone, Some(Change::Deleted { key, .. }) if key == "live/1"), "{gone:?}");
        assert_eq!(store.list("live/").await.unwrap().len(), 1);
        let late = store.put_guarded("k", b"b".to_vec(), None, ("live/1", version)).await;
        assert_eq!(late, Err(MetaError::GuardGone));
        let ended = store.lease(Duration::from_secs(2)).await.unwrap();
        ended.end();
        assert_eq!(store.put_leased("live/3", Vec::new(), None, &ended).await, Err(MetaError::GuardGone));
    }
}

/// What a store that several processes share does besides.
pub(crate) async fn shared_metadata_cases(make: impl Fn() -> Arc<dyn MetaStore>) {
    metadata::a_leased_key_goes_with_its_lease(&*make()).await;
}

/// Runs every case on a fresh store.
pub(crate) async fn metadata_cases(make: impl Fn() -> Arc<dyn MetaStore>) {
    metadata::a_write_needs_the_right_version(&*make()).await;
    metadata::list_shows_a_prefix_in_order(&*make()).await;
    metadata::a_watch_tells_every_later_change_in_order(&*make()).await;
    metadata::a_slow_watcher_is_told_to_list_again(&*make()).await;
    metadata::one_of_two_writers_wins(&*make()).await;
    metadata::keys_and_values_are_bounded(&*make()).await;
    metadata::a_lease_is_held_until_it_ends(&*make()).await;
    metadata::a_guarded_write_needs_its_guard(&*make()).await;
}

/// Metadata stores in directories that go away with this.
struct MetaFiles {
    dir: tempfile::TempDir,
    count: std::cell::Cell<u32>,
}

impl MetaFiles {
    fn new() -> MetaFiles {
        MetaFiles { dir: tempfile::tempdir().unwrap(), count: std::cell::Cell::new(0) }
    }

    fn make(&self) -> meta::File {
        self.count.set(self.count.get() + 1);
        meta::File::open(self.dir.path().join(self.count.get().to_string())).unwrap()
    }
}

#[tokio::test]
async fn memory_is_a_metadata_store() {
    metadata_cases(|| Arc::new(meta::Memory::new())).await;
    shared_metadata_cases(|| Arc::new(meta::Memory::new())).await;
}

#[tokio::test]
async fn file_is_a_metadata_store() {
    let files = MetaFiles::new();
    metadata_cases(|| Arc::new(files.make())).await;
}

#[tokio::test]
async fn flaky_is_a_metadata_store() {
    let faults =
        MetaFaults { delay_per_mille: 20, delay_max: Duration::from_millis(1), ..MetaFaults::default() };
    metadata_cases(|| Arc::new(meta::Flaky::new(meta::Memory::new(), 1, faults))).await;
    shared_metadata_cases(|| Arc::new(meta::Flaky::new(meta::Memory::new(), 3, faults))).await;
    let files = MetaFiles::new();
    metadata_cases(|| Arc::new(meta::Flaky::new(files.make(), 2, faults))).await;
}

/// A counter that several callers raise over a store that fails before and after the deed: it ends at
/// the number of writes that took effect, as each caller finds out by reading.
#[tokio::test]
async fn a_caller_that_reads_before_it_tries_again_counts_right() {
    let faults = MetaFaults {
        error_per_mille: 200,
        late_error_per_mille: 200,
        resync_per_mille: 50,
        ..MetaFaults::default()
    };
    let files = MetaFiles::new();
    let store = meta::Flaky::new(files.make(), 3, faults);
    let raise = |name: u8| {
        let store = store.clone();
        async move {
            for round in 0..20_u8 {
                loop {
                    let Ok(found) = store.get("n").await else { continue };
                    let (mut names, version) =
                        found.map_or((Vec::new(), None), |(v, version)| (v, Some(version)));
                    if names.chunks(2).any(|done| done == [name, round]) {
                        break;
                    }
                    names.extend_from_slice(&[name, round]);
                    let _ = store.put_if("n", names, version).await;
                }
            }
        }
    };
    futures_util::future::join_all((0..4).map(raise)).await;
    store.set_faults(MetaFaults::default());
    let (names, _) = store.get("n").await.unwrap().unwrap();
    assert_eq!(names.len(), 2 * 4 * 20);
}

#[tokio::test]
async fn leases_and_watches_can_be_lost() {
    let store = meta::Flaky::new(meta::Memory::new(), 4, MetaFaults::default());
    let lease = store.lease(Duration::from_secs(1)).await.unwrap();
    let mut watch = store.watch("").await.unwrap();
    store.put_if("a", vec![], None).await.unwrap();
    store.lose_watches();
    store.lose_leases();
    lease.lost().await;
    assert_eq!(watch.next().await, Some(Change::Resync));
}
