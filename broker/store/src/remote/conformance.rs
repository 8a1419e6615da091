//! What every remote store must do, whatever it stands on: one list of cases, run against each
//! implementation, and the twins that show that the cases can fail.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::{BLOCK_BYTES_MAX, Block, Flaky, Life, LifeLog, Memory, Remote, RemoteFaults};
use crate::{Entry, StoreError, StorePath};

/// A store of its own for one case, and what a case does behind its back.
pub(crate) struct Subject {
    pub(crate) remote: Arc<dyn Remote>,
    /// Removes the block of this number, or as little as possible that holds it, as damage would.
    pub(crate) lose_block: Box<dyn Fn(Life, u64)>,
    /// Entries that one request of it lists or deletes at most.
    pub(crate) page: usize,
}

const LIFE: Life = Life { broker: 3, epoch: 7 };

fn path(text: &str) -> StorePath {
    StorePath::parse(text).unwrap()
}

pub(crate) fn block(life: Life, seq: u64, lowest: u64) -> Block {
    // Sizes differ, so that blocks that got mixed up do not fit.
    let payload = format!("block {seq} of {life} ").repeat(1 + seq as usize % 5);
    Block { life, seq, lowest, payload: Bytes::from(payload) }
}

pub(crate) fn ended(remote: &dyn Remote, life: Life) -> Result<Vec<Block>, StoreError> {
    let mut visited = Vec::new();
    remote.end(life, &mut |block| {
        visited.push(block);
        Ok(())
    })?;
    Ok(visited)
}

pub(crate) fn seqs(blocks: &[Block]) -> Vec<u64> {
    blocks.iter().map(|block| block.seq).collect()
}

fn error<T>(result: Result<T, StoreError>) -> StoreError {
    match result {
        Ok(_) => panic!("this had to fail"),
        Err(error) => error,
    }
}

/// A log of so many blocks that need all before them.
pub(crate) fn filled(remote: &dyn Remote, life: Life, count: u64) -> Arc<dyn LifeLog> {
    let log = remote.begin(life).unwrap();
    for seq in 0..count {
        log.append(&block(life, seq, 0)).unwrap();
    }
    log
}

fn what_was_appended_is_visited_in_order(subject: &Subject) {
    let remote = &*subject.remote;
    let log = remote.begin(LIFE).unwrap();
    let mut expected: Vec<Block> = (0..12).map(|seq| block(LIFE, seq, 0)).collect();
    expected.push(Block { life: LIFE, seq: 12, lowest: 0, payload: Bytes::new() });
    let large: Vec<u8> = (0..3_000_000_u32).map(|i| (i % 251) as u8).collect();
    expected.push(Block { life: LIFE, seq: 13, lowest: 0, payload: Bytes::from(large) });
    expected.push(block(LIFE, 14, 0));
    for block in &expected {
        log.append(block).unwrap();
    }
    assert!(ended(remote, LIFE).unwrap() == expected);
    assert!(ended(remote, LIFE).unwrap() == expected, "the second time as the first");
}

fn the_largest_block_is_taken(subject: &Subject) {
    let remote = &*subject.remote;
    let log = remote.begin(LIFE).unwrap();
    let largest = Block { life: LIFE, seq: 0, lowest: 0, payload: Bytes::from(vec![9; BLOCK_BYTES_MAX]) };
    while let Err(error) = log.append(&largest) {
        assert!(error.is_retryable(), "{error}");
    }
    assert!(ended(remote, LIFE).unwrap() == [largest]);
}

fn after_the_end_nothing_is_acknowledged(subject: &Subject) {
    let remote = &*subject.remote;
    let log = filled(remote, LIFE, 3);
    assert_eq!(seqs(&ended(remote, LIFE).unwrap()), [0, 1, 2]);
    for _ in 0..3 {
        assert_eq!(log.append(&block(LIFE, 3, 0)), Err(StoreError::Fenced));
    }
    assert_eq!(error(remote.begin(LIFE)), StoreError::Fenced);
    assert_eq!(seqs(&ended(remote, LIFE).unwrap()), [0, 1, 2]);
    assert_eq!(log.append(&block(LIFE, 3, 0)), Err(StoreError::Fenced));
}

fn a_life_that_never_began_can_be_ended(subject: &Subject) {
    let remote = &*subject.remote;
    assert_eq!(ended(remote, LIFE).unwrap(), []);
    assert_eq!(error(remote.begin(LIFE)), StoreError::Fenced);
    assert_eq!(ended(remote, LIFE).unwrap(), []);
    assert_eq!(remote.lives().unwrap(), []);
}

fn a_life_that_began_and_wrote_nothing_can_be_ended(subject: &Subject) {
    let remote = &*subject.remote;
    let log = remote.begin(LIFE).unwrap();
    assert_eq!(remote.lives().unwrap(), []);
    assert_eq!(ended(remote, LIFE).unwrap(), []);
    assert_eq!(log.append(&block(LIFE, 0, 0)), Err(StoreError::Fenced));
    assert_eq!(error(remote.begin(LIFE)), StoreError::Fenced);
}

fn a_life_begins_once(subject: &Subject) {
    let remote = &*subject.remote;
    // An answer was lost, and the request sent again.
    drop(remote.begin(LIFE).unwrap());
    let log = remote.begin(LIFE).unwrap();
    log.append(&block(LIFE, 0, 0)).unwrap();
    assert_eq!(error(remote.begin(LIFE)), StoreError::AlreadyExists);
    log.append(&block(LIFE, 1, 0)).unwrap();
    assert_eq!(seqs(&ended(remote, LIFE).unwrap()), [0, 1]);
}

fn lives_are_apart(subject: &Subject) {
    let remote = &*subject.remote;
    let (same_broker, same_digits) = (Life { broker: 3, epoch: 71 }, Life { broker: 37, epoch: 7 });
    let largest = Life { broker: 0, epoch: u64::MAX };
    let all = [largest, LIFE, same_broker, same_digits];
    let logs: Vec<_> = all.iter().map(|life| filled(remote, *life, 2)).collect();
    assert_eq!(remote.lives().unwrap(), all);
    assert_eq!(ended(remote, LIFE).unwrap(), [block(LIFE, 0, 0), block(LIFE, 1, 0)]);
    for (life, log) in all.iter().zip(&logs) {
        let outcome = log.append(&block(*life, 2, 0));
        assert_eq!(outcome, if *life == LIFE { Err(StoreError::Fenced) } else { Ok(()) });
    }
    remote.forget(LIFE).unwrap();
    assert_eq!(remote.lives().unwrap(), [largest, same_broker, same_digits]);
    assert_eq!(seqs(&ended(remote, largest).unwrap()), [0, 1, 2]);
}

fn the_same_block_again_is_the_same_block(subject: &Subject) {
    let remote = &*subject.remote;
    let log = remote.begin(LIFE).unwrap();
    for seq in 0..3 {
        for _ in 0..3 {
            log.append(&block(LIFE, seq, seq.saturating_sub(1))).unwrap();
        }
    }
    assert_eq!(ended(remote, LIFE).unwrap(), [block(LIFE, 1, 0), block(LIFE, 2, 1)]);
}

fn what_was_given_up_is_not_visited(subject: &Subject) {
    let remote = &*subject.remote;
    let log = remote.begin(LIFE).unwrap();
    for seq in 0..40_u64 {
        log.append(&block(LIFE, seq, seq / 10 * 10)).unwrap();
    }
    let expected: Vec<u64> = (30..40).collect();
    assert_eq!(seqs(&ended(remote, LIFE).unwrap()), expected);
    assert_eq!(log.append(&block(LIFE, 40, 40)), Err(StoreError::Fenced));
    assert_eq!(seqs(&ended(remote, LIFE).unwrap()), expected, "a refused block gives nothing up");
    let alone = Life { broker: 4, epoch: 1 };
    let log = filled(remote, alone, 5);
    log.append(&block(alone, 5, 5)).unwrap();
    assert_eq!(ended(remote, alone).unwrap(), [block(alone, 5, 5)]);
}

fn a_block_that_is_missing_is_damage(subject: &Subject) {
    let remote = &*subject.remote;
    let log = filled(remote, LIFE, 6);
    log.append(&block(LIFE, 6, 2)).unwrap();
    (subject.lose_block)(LIFE, 4);
    let outcome = ended(remote, LIFE);
    assert!(matches!(&outcome, Err(StoreError::Corrupt(_))), "{outcome:?}");
    assert_eq!(log.append(&block(LIFE, 7, 2)), Err(StoreError::Fenced), "it has ended nevertheless");
}

fn a_block_that_is_not_needed_may_be_missing(subject: &Subject) {
    let remote = &*subject.remote;
    let log = filled(remote, LIFE, 3);
    log.append(&block(LIFE, 3, 3)).unwrap();
    (subject.lose_block)(LIFE, 1);
    assert_eq!(seqs(&ended(remote, LIFE).unwrap()), [3]);
}

fn a_visitor_may_stop(subject: &Subject) {
    let remote = &*subject.remote;
    let log = filled(remote, LIFE, 5);
    let mut count = 0;
    let outcome = remote.end(LIFE, &mut |_| {
        count += 1;
        if count == 2 { Err(StoreError::Corrupt("seen enough".to_owned())) } else { Ok(()) }
    });
    assert_eq!((outcome, count), (Err(StoreError::Corrupt("seen enough".to_owned())), 2));
    assert_eq!(log.append(&block(LIFE, 5, 0)), Err(StoreError::Fenced));
    assert_eq!(ended(remote, LIFE).unwrap().len(), 5);
}

fn only_what_has_ended_is_forgotten(subject: &Subject) {
    let remote = &*subject.remote;
    let log = filled(remote, LIFE, 3);
    assert!(remote.forget(LIFE).is_err());
    log.append(&block(LIFE, 3, 0)).unwrap();
    assert_eq!(remote.lives().unwrap(), [LIFE]);
    assert_eq!(ended(remote, LIFE).unwrap().len(), 4);
    for _ in 0..2 {
        remote.forget(LIFE).unwrap();
        assert_eq!(remote.lives().unwrap(), []);
        assert_eq!(ended(remote, LIFE).unwrap(), []);
        assert_eq!(log.append(&block(LIFE, 4, 0)), Err(StoreError::Fenced));
        assert_eq!(error(remote.begin(LIFE)), StoreError::Fenced);
    }
    let never = Life { broker: 9, epoch: 9 };
    assert_eq!(ended(remote, never).unwrap(), []);
    remote.forget(never).unwrap();
    assert_eq!(error(remote.begin(never)), StoreError::Fenced);
}

fn a_life_is_fenced_without_being_read(subject: &Subject) {
    let remote = &*subject.remote;
    let log = filled(remote, LIFE, 4);
    (subject.lose_block)(LIFE, 1);
    for _ in 0..2 {
        assert_eq!(remote.fence(LIFE), Ok(()), "damage is nothing to it");
        assert_eq!(log.append(&block(LIFE, 4, 0)), Err(StoreError::Fenced));
    }
    assert!(matches!(ended(remote, LIFE), Err(StoreError::Corrupt(_))));
    remote.forget(LIFE).unwrap();
    assert_eq!(remote.lives(), Ok(Vec::new()));
    let never = Life { broker: 9, epoch: 9 };
    assert_eq!(remote.fence(never), Ok(()));
    assert_eq!(error(remote.begin(never)), StoreError::Fenced);
    remote.forget(never).unwrap();
    let other = Life { broker: 3, epoch: 8 };
    filled(remote, other, 2);
    assert_eq!(remote.fence(other), Ok(()));
    assert_eq!(seqs(&ended(remote, other).unwrap()), [0, 1], "it is read as ever");
}

fn several_heirs_see_the_same(subject: &Subject) {
    for round in 0..3 {
        let life = Life { broker: 5, epoch: round };
        let (acknowledged, visited) = race(&*subject.remote, life, 3);
        judge(&acknowledged, &visited).unwrap();
        let seen: Vec<Vec<u64>> = visited.iter().map(|blocks| seqs(blocks)).collect();
        assert!(visited.iter().all(|blocks| *blocks == visited[0]), "{seen:?}");
    }
}

fn a_writer_that_races_with_the_end_loses_nothing(subject: &Subject) {
    for round in 0..5 {
        let life = Life { broker: 6, epoch: round };
        let (acknowledged, visited) = race(&*subject.remote, life, 1);
        judge(&acknowledged, &visited).unwrap();
    }
}

/// One writer appends as fast as it can, `heirs` end its life meanwhile. What was acknowledged to the
/// writer, and what each heir visited.
pub(crate) fn race(remote: &dyn Remote, life: Life, heirs: usize) -> (Vec<Block>, Vec<Vec<Block>>) {
    let log = begun_at_last(remote, life);
    let acknowledged = parking_lot::Mutex::new(Vec::new());
    let has_ended = AtomicBool::new(false);
    let visited = std::thread::scope(|scope| {
        // Set when a heir fails too, or the writer would go on for ever.
        let _set = SetAtEnd(&has_ended);
        scope.spawn(|| write(&*log, life, &acknowledged, &has_ended));
        while acknowledged.lock().len() < 5 {
            std::thread::yield_now();
        }
        let heirs: Vec<_> = (0..heirs).map(|_| scope.spawn(|| ended_at_last(remote, life))).collect();
        heirs.into_iter().map(|heir| heir.join().unwrap()).collect()
    });
    (acknowledged.into_inner(), visited)
}

pub(crate) struct SetAtEnd<'a>(pub(crate) &'a AtomicBool);

impl Drop for SetAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

fn begun_at_last(remote: &dyn Remote, life: Life) -> Arc<dyn LifeLog> {
    loop {
        match remote.begin(life) {
            Ok(log) => return log,
            Err(error) => assert!(error.is_retryable(), "{error}"),
        }
    }
}

fn ended_at_last(remote: &dyn Remote, life: Life) -> Vec<Block> {
    loop {
        match ended(remote, life) {
            Ok(blocks) => return blocks,
            Err(error) => assert!(error.is_retryable(), "{error}"),
        }
    }
}

/// Appends until it is fenced, or for a while after that should have happened.
fn write(
    log: &dyn LifeLog,
    life: Life,
    acknowledged: &parking_lot::Mutex<Vec<Block>>,
    has_ended: &AtomicBool,
) {
    let (mut seq, mut late) = (0, 0);
    while late < 20 {
        late += usize::from(has_ended.load(Ordering::SeqCst));
        let next = block(life, seq, 0);
        match log.append(&next) {
            Ok(()) => {
                acknowledged.lock().push(next);
                seq += 1;
            }
            Err(StoreError::Fenced) => return,
            Err(error) => assert!(error.is_retryable(), "{error}"),
        }
    }
}

pub(crate) fn judge(acknowledged: &[Block], visited: &[Vec<Block>]) -> Result<(), String> {
    for blocks in visited {
        if seqs(blocks) != (0..blocks.len() as u64).collect::<Vec<u64>>() {
            return Err(format!("visited with gaps: {:?}", seqs(blocks)));
        }
        if !blocks.starts_with(acknowledged) {
            return Err(format!("{} acknowledged, {} visited", acknowledged.len(), blocks.len()));
        }
    }
    Ok(())
}

fn an_object_is_written_once(subject: &Subject) {
    let remote = &*subject.remote;
    let name = path("t/p-0/00.log");
    remote.put(&name, Bytes::from_static(b"first")).unwrap();
    remote.put(&name, Bytes::from_static(b"first")).unwrap();
    assert_eq!(remote.put(&name, Bytes::from_static(b"other")), Err(StoreError::AlreadyExists));
    assert_eq!(remote.put(&name, Bytes::from_static(b"firs")), Err(StoreError::AlreadyExists));
    assert_eq!(&remote.get(&name, 0, 100).unwrap()[..], b"first");
    remote.delete(&name).unwrap();
    remote.put(&name, Bytes::from_static(b"other")).unwrap();
    assert_eq!(&remote.get(&name, 0, 100).unwrap()[..], b"other");
}

fn of_several_writers_of_an_object_one_wins(subject: &Subject) {
    for round in 0..5 {
        one_wins(&*subject.remote, &path(&format!("race/{round}")));
    }
}

fn one_wins(remote: &dyn Remote, name: &StorePath) {
    let won: Vec<u8> = std::thread::scope(|scope| {
        let put = |writer| scope.spawn(move || put_at_last(remote, name, Bytes::from(vec![writer; 50])));
        let writers: Vec<_> = (0..6_u8).map(|writer| (writer, put(writer))).collect();
        let outcomes = writers.into_iter().map(|(writer, put)| (writer, put.join().unwrap()));
        outcomes.filter(|(_, has_won)| *has_won).map(|(writer, _)| writer).collect()
    });
    assert_eq!(won.len(), 1, "{won:?}");
    let found = loop {
        match remote.get(name, 0, 100) {
            Ok(found) => break found,
            Err(error) => assert!(error.is_retryable(), "{error}"),
        }
    };
    assert_eq!(found, vec![won[0]; 50]);
}

fn put_at_last(remote: &dyn Remote, name: &StorePath, bytes: Bytes) -> bool {
    loop {
        match remote.put(name, bytes.clone()) {
            Ok(()) => return true,
            Err(StoreError::AlreadyExists) => return false,
            Err(error) => assert!(error.is_retryable(), "{error}"),
        }
    }
}

fn a_range_stops_at_the_end(subject: &Subject) {
    let remote = &*subject.remote;
    let name = path("o");
    remote.put(&name, Bytes::from_static(b"0123456789")).unwrap();
    let read = |pos, len| remote.get(&name, pos, len).unwrap().to_vec();
    assert_eq!(read(0, 10), b"0123456789");
    assert_eq!(read(3, 4), b"3456");
    assert_eq!(read(7, 100), b"789");
    assert_eq!(read(7, usize::MAX), b"789");
    assert_eq!(read(9, 1), b"9");
    assert_eq!(read(10, 1), b"");
    assert_eq!(read(1_000_000, 1), b"");
    assert_eq!(read(u64::MAX, usize::MAX), b"");
    assert_eq!(read(3, 0), b"");
    assert_eq!(read(30, 0), b"");
    remote.put(&path("empty"), Bytes::new()).unwrap();
    assert_eq!(remote.get(&path("empty"), 0, 10), Ok(Bytes::new()));
    assert_eq!(remote.get(&path("empty"), 5, 10), Ok(Bytes::new()));
    let large: Vec<u8> = (0..9_000_000_u32).map(|i| (i % 241) as u8).collect();
    remote.put(&path("large"), Bytes::from(large.clone())).unwrap();
    assert!(remote.get(&path("large"), 4_000_001, 3_000_000).unwrap() == large[4_000_001..7_000_001]);
    assert!(remote.get(&path("large"), 0, large.len()).unwrap() == large);
}

fn what_is_absent_is_not_found(subject: &Subject) {
    let remote = &*subject.remote;
    remote.put(&path("dir/file"), Bytes::from_static(b"x")).unwrap();
    for absent in ["nothing", "dir", "dir/nothing", "dir/fil", "di", "no/thing"] {
        assert_eq!(error(remote.get(&path(absent), 0, 1)), StoreError::NotFound, "{absent}");
        assert_eq!(error(remote.get(&path(absent), 5, 0)), StoreError::NotFound, "{absent}");
    }
    assert_eq!(remote.list(&path("nothing")), Ok(Vec::new()));
    assert_eq!(remote.list(&path("di")), Ok(Vec::new()));
    assert_eq!(remote.delete(&path("nothing")), Ok(()));
    assert_eq!(remote.delete(&path("no/thing")), Ok(()));
    assert_eq!(remote.delete(&path("di")), Ok(()));
    assert_eq!(remote.get(&path("dir/file"), 0, 9), Ok(Bytes::from_static(b"x")));
}

fn list_shows_objects_and_directories_by_name(subject: &Subject) {
    let remote = &*subject.remote;
    // Logs of lives are no objects.
    filled(remote, LIFE, 1);
    ended(remote, Life { broker: 8, epoch: 1 }).unwrap();
    assert_eq!(remote.list(&StorePath::root()), Ok(Vec::new()));
    for (name, bytes) in [
        ("t1/p-0/b", "12"),
        ("t1/p-0/a", "1"),
        ("t1/p-10/a", ""),
        ("t1/p-1/a", ""),
        ("t1.x/f", ""),
        ("t1-x", "abc"),
    ] {
        remote.put(&path(name), Bytes::from_static(bytes.as_bytes())).unwrap();
    }
    let entry = |name: &str, len, is_dir| Entry { name: name.to_owned(), len, is_dir };
    let root = remote.list(&StorePath::root()).unwrap();
    assert_eq!(root, [entry("t1", 0, true), entry("t1-x", 3, false), entry("t1.x", 0, true)]);
    let dirs = remote.list(&path("t1")).unwrap();
    assert_eq!(dirs, [entry("p-0", 0, true), entry("p-1", 0, true), entry("p-10", 0, true)]);
    let files = remote.list(&path("t1/p-0")).unwrap();
    assert_eq!(files, [entry("a", 1, false), entry("b", 2, false)]);
    assert_eq!(remote.lives().unwrap(), [LIFE], "objects are no lives");
}

fn names_with_odd_characters_are_kept(subject: &Subject) {
    let remote = &*subject.remote;
    let names = ["a b", "a%20b", "a+b", "a:b", "a#b?c=d&e", "ä€", "[x]{y}", "a~b", "@timestamp", "%"];
    for name in names {
        remote.put(&path("odd").join(name).unwrap(), Bytes::copy_from_slice(name.as_bytes())).unwrap();
    }
    for name in names {
        let found = remote.get(&path("odd").join(name).unwrap(), 0, 100).unwrap();
        assert_eq!(&found[..], name.as_bytes());
    }
    let mut sorted = names.to_vec();
    sorted.sort_unstable();
    let listed: Vec<String> =
        remote.list(&path("odd")).unwrap().into_iter().map(|entry| entry.name).collect();
    assert_eq!(listed, sorted);
    remote.delete(&path("odd/a%20b")).unwrap();
    assert_eq!(remote.list(&path("odd")).unwrap().len(), names.len() - 1);
    assert!(remote.get(&path("odd/a b"), 0, 100).is_ok());
}

/// What is in a directory, without directories that are shown though their last object is gone.
fn with_content(remote: &dyn Remote, dir: &str) -> Vec<String> {
    let has_content =
        |entry: &Entry| !entry.is_dir || !with_content(remote, &format!("{dir}/{}", entry.name)).is_empty();
    let entries = remote.list(&path(dir)).unwrap();
    entries.into_iter().filter(has_content).map(|entry| entry.name).collect()
}

fn delete_removes_an_object_or_all_below_a_directory(subject: &Subject) {
    let remote = &*subject.remote;
    for name in ["d/p-0/a", "d/p-0/b", "d/p-0/c/deep", "d/p-00/a", "d/p-1/a"] {
        remote.put(&path(name), Bytes::from_static(b"x")).unwrap();
    }
    remote.delete(&path("d/p-0/a")).unwrap();
    assert_eq!(error(remote.get(&path("d/p-0/a"), 0, 1)), StoreError::NotFound);
    remote.delete(&path("d/p-0")).unwrap();
    assert_eq!(with_content(remote, "d"), ["p-00", "p-1"]);
    remote.put(&path("d/p-0/a"), Bytes::from_static(b"y")).unwrap();
    assert_eq!(with_content(remote, "d/p-0"), ["a"], "only what was made since");
    let log = filled(remote, LIFE, 1);
    assert!(remote.delete(&StorePath::root()).is_err());
    remote.delete(&path("d")).unwrap();
    assert_eq!(with_content(remote, "d"), [""; 0]);
    log.append(&block(LIFE, 1, 0)).unwrap();
    assert_eq!(seqs(&ended(remote, LIFE).unwrap()), [0, 1]);
}

fn a_directory_of_many_objects_is_listed_and_removed_whole(subject: &Subject) {
    let count = subject.page + 50;
    let remote = &*subject.remote;
    let name = |i: usize| path(&format!("many/{i:020}"));
    std::thread::scope(|scope| {
        for part in 0..8 {
            scope.spawn(move || {
                for i in (part..count).step_by(8) {
                    remote.put(&name(i), Bytes::from_static(b"x")).unwrap();
                }
            });
        }
    });
    let listed = remote.list(&path("many")).unwrap();
    assert_eq!(listed.len(), count);
    assert!(listed.iter().enumerate().all(|(i, entry)| entry.name == format!("{i:020}")));
    remote.delete(&path("many")).unwrap();
    assert_eq!(with_content(remote, "many"), [""; 0]);
}

macro_rules! all_of {
    ($($case:ident),* $(,)?) => {
        const ALL: &[(&str, fn(&Subject))] = &[$((stringify!($case), $case)),*];
    };
}

all_of!(
    what_was_appended_is_visited_in_order,
    the_largest_block_is_taken,
    after_the_end_nothing_is_acknowledged,
    a_life_that_never_began_can_be_ended,
    a_life_that_began_and_wrote_nothing_can_be_ended,
    a_life_begins_once,
    lives_are_apart,
    the_same_block_again_is_the_same_block,
    what_was_given_up_is_not_visited,
    a_block_that_is_missing_is_damage,
    a_block_that_is_not_needed_may_be_missing,
    a_visitor_may_stop,
    only_what_has_ended_is_forgotten,
    a_life_is_fenced_without_being_read,
    several_heirs_see_the_same,
    a_writer_that_races_with_the_end_loses_nothing,
    an_object_is_written_once,
    of_several_writers_of_an_object_one_wins,
    a_range_stops_at_the_end,
    what_is_absent_is_not_found,
    list_shows_objects_and_directories_by_name,
    names_with_odd_characters_are_kept,
    delete_removes_an_object_or_all_below_a_directory,
    a_directory_of_many_objects_is_listed_and_removed_whole,
);

/// Runs every case on a fresh store of its own, so many at once: a store of discs answers late and has time.
/// `make` is told whether the case removes single blocks.
pub(crate) fn cases(at_once: usize, make: impl Fn(bool) -> Subject + Sync) {
    let next = AtomicUsize::new(0);
    let run = || {
        while let Some((name, case)) = ALL.get(next.fetch_add(1, Ordering::SeqCst)) {
            let began = Instant::now();
            case(&make(LOSING.contains(name)));
            println!("{:.1} s for {name}", began.elapsed().as_secs_f64());
        }
    };
    std::thread::scope(|scope| (0..at_once).for_each(|_| drop(scope.spawn(run))));
}

/// The cases that remove single blocks.
const LOSING: &[&str] = &[
    "a_block_that_is_missing_is_damage",
    "a_block_that_is_not_needed_may_be_missing",
    "a_life_is_fenced_without_being_read",
];

/// Through a store that fails now and then, and loses answers: callers that try again, and a writer that
/// is ended meanwhile, lose nothing.
pub(crate) fn faulty_cases(make: impl Fn() -> Subject, seeds: std::ops::Range<u64>) {
    let faults = RemoteFaults {
        error_per_mille: 100,
        late_error_per_mille: 100,
        repeat_per_mille: 200,
        delay_per_mille: 100,
        delay_max: Duration::from_millis(2),
        hang_per_mille: 20,
        hang: Duration::from_millis(10),
    };
    for seed in seeds {
        println!("seed {seed}");
        let remote = Flaky::new(make().remote, seed, faults);
        let (acknowledged, visited) = race(&remote, LIFE, 2);
        judge(&acknowledged, &visited).unwrap();
        one_wins(&remote, &path("claim"));
    }
}

fn memory() -> (Memory, Subject) {
    let memory = Memory::new();
    let behind = memory.clone();
    let subject = Subject {
        remote: Arc::new(memory.clone()),
        lose_block: Box::new(move |life, seq| behind.lose_block(life, seq)),
        page: 1_000,
    };
    (memory, subject)
}

#[test]
fn memory_is_a_remote_store() {
    cases(1, |_| memory().1);
}

#[test]
fn flaky_memory_is_a_remote_store() {
    let faults = RemoteFaults {
        repeat_per_mille: 300,
        delay_per_mille: 100,
        delay_max: Duration::from_micros(200),
        ..RemoteFaults::default()
    };
    cases(1, |_| {
        let subject = memory().1;
        Subject { remote: Arc::new(Flaky::new(subject.remote, 1, faults)), ..subject }
    });
}

#[test]
fn faults_on_memory_lose_nothing() {
    faulty_cases(|| memory().1, 0..50);
}

#[test]
fn with_the_fence_off_the_race_is_lost() {
    let mut lost = 0;
    for round in 0..20 {
        let (memory, subject) = memory();
        memory.set_fence(false);
        let (acknowledged, visited) = race(&*subject.remote, Life { broker: 6, epoch: round }, 1);
        lost += usize::from(judge(&acknowledged, &visited).is_err());
    }
    assert_eq!(lost, 20, "a writer goes on after the end");
}

#[test]
fn a_store_that_is_down_says_so_and_comes_back() {
    let remote = Flaky::new(memory().1.remote, 2, RemoteFaults::default());
    let log = filled(&remote, LIFE, 1);
    remote.set_down(true);
    assert!(error(log.append(&block(LIFE, 1, 0))).is_retryable());
    assert!(error(remote.list(&path("a"))).is_retryable());
    assert!(error(ended(&remote, LIFE)).is_retryable());
    remote.set_down(false);
    log.append(&block(LIFE, 1, 0)).unwrap();
    assert_eq!(ended(&remote, LIFE).unwrap().len(), 2);
}

#[test]
fn the_same_seed_gives_the_same_faults_and_waits() {
    let run = |seed| {
        let faults = RemoteFaults {
            error_per_mille: 300,
            delay_per_mille: 500,
            delay_max: Duration::from_secs(1_000),
            ..RemoteFaults::default()
        };
        let remote = Flaky::new(memory().1.remote, seed, faults);
        let waits = Arc::new(parking_lot::Mutex::new(Vec::new()));
        let seen = waits.clone();
        remote.set_wait(move |time| seen.lock().push(time));
        let outcomes: Vec<bool> =
            (0..64).map(|i| remote.put(&path(&format!("{i}")), Bytes::new()).is_ok()).collect();
        let waits = waits.lock().clone();
        (outcomes, waits)
    };
    assert_eq!(run(7), run(7));
    assert_ne!(run(7), run(8));
}
