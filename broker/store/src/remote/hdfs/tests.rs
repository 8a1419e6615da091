//! HDFS against a real NameNode and real DataNodes: the conformance suite, daemons that die, hang and come
//! back, and what each half of the fence is good for.

use std::sync::atomic::AtomicBool;

use e2e::stores::hdfs as server;

use super::*;
use crate::remote::conformance::{
    SetAtEnd, Subject, block, cases, ended, faulty_cases, filled, judge, race, seqs,
};

const LIFE: Life = Life { broker: 3, epoch: 7 };
/// Much longer than anything here lasts on a busy machine.
const PATIENCE: Duration = Duration::from_secs(180);

fn config(server: &server::Hdfs, root: &str) -> HdfsConfig {
    HdfsConfig { user: "sealane".to_owned(), ..HdfsConfig::new(&server.url(), root) }
}

fn open(server: &server::Hdfs, root: &str) -> Hdfs {
    Hdfs::open(config(server, root)).unwrap()
}

/// Stores with a root of their own each; a file of a log takes no more from so many bytes on.
fn fresh(server: &server::Hdfs, name: &'static str) -> impl Fn(u64) -> Subject + Sync {
    let count = AtomicU64::new(0);
    let config = config(server, "");
    move |file_bytes| {
        let root = format!("/clusters/{name}{}", count.fetch_add(1, Ordering::SeqCst));
        let hdfs = Hdfs::open(HdfsConfig { root, file_bytes, ..config.clone() }).unwrap();
        let behind = hdfs.clone();
        // Where each block has a file of its own.
        let lose_block = move |life, seq: u64| {
            let lose = |fs: Arc<Fs>| async move { fs.remove(&format!("{}/{seq:010}", fs.live(life))).await };
            behind.run("lose", Duration::ZERO, lose).unwrap();
        };
        Subject { remote: Arc::new(hdfs), lose_block: Box::new(lose_block), page: server::PAGE }
    }
}

#[test]
fn hdfs_is_a_remote_store() {
    let server = server::Hdfs::start(3).unwrap();
    let make = fresh(&server, "case");
    // Some blocks to a file; a file is made in the time of many flushes.
    cases(4, |is_losing| make(if is_losing { 1 } else { 300 }));
    faulty_cases(|| make(4_096), 0..3);
    for round in 0..5 {
        // In ordinary files.
        let (acknowledged, visited) = race(&open(&server, "/ordinary"), Life { broker: 1, epoch: round }, 2);
        judge(&acknowledged, &visited).unwrap();
    }
    what_is_wrong_is_named_in_one_line(&server);
    safe_mode_is_named_and_waited_for(&server);
    what_was_half_written_long_ago_is_swept_up(&server);
    a_rename_alone_is_no_fence(&server);
    the_recovery_of_leases_alone_is_no_fence(&server);
}

fn what_is_wrong_is_named_in_one_line(server: &server::Hdfs) {
    let nobody =
        HdfsConfig { request_timeout: Duration::from_secs(2), ..HdfsConfig::new("hdfs://127.0.0.1:1", "/x") };
    let outcome = Hdfs::open(nobody).unwrap().begin(LIFE).map(drop);
    let Err(StoreError::Io(text)) = outcome else { panic!("{outcome:?}") };
    assert!(text.starts_with("hdfs://127.0.0.1:1/x: ") && !text.contains('\n'), "{text}");
    let too_large = HdfsConfig { file_bytes: 1 << 40, ..config(server, "/x") };
    assert!(Hdfs::open(too_large).map(drop).unwrap_err().to_string().contains("file_bytes"));
    assert!(Hdfs::open(HdfsConfig::new("gopher://x", "/x")).map(drop).is_err());
    // A port of the same machine that speaks something else.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let silent = HdfsConfig {
        request_timeout: Duration::from_millis(500),
        ..HdfsConfig::new(&format!("hdfs://{}", listener.local_addr().unwrap()), "/x")
    };
    let text = Hdfs::open(silent).unwrap().list(&StorePath::root()).unwrap_err().to_string();
    assert!(text.contains("/x: list") && text.contains("no answer within 500ms"), "{text}");
}

/// Nothing is changed, and nothing is lost: the same again succeeds when it is over.
fn safe_mode_is_named_and_waited_for(server: &server::Hdfs) {
    let impatient = HdfsConfig { append_deadline: Duration::from_secs(1), ..config(server, "/safe") };
    let hdfs = Hdfs::open(impatient).unwrap();
    let log = filled(&hdfs, LIFE, 2);
    let name = StorePath::parse("t/p-0/x").unwrap();
    server.set_safe_mode(true).unwrap();
    let other = Life { broker: 4, epoch: 1 };
    let refused = [
        log.append(&block(LIFE, 2, 0)),
        hdfs.put(&name, Bytes::from_static(b"x")),
        hdfs.begin(other).map(drop),
        hdfs.fence(other),
    ];
    for outcome in refused {
        let error = outcome.unwrap_err();
        let text = error.to_string();
        assert!(text.contains("the NameNode is in safe mode; waiting for it to leave it"), "{text}");
        assert!(
            text.starts_with("hdfs://127.0.0.1:") && !text.contains('\n') && error.is_retryable(),
            "{text}"
        );
    }
    server.set_safe_mode(false).unwrap();
    append_at_last(&*log, &block(LIFE, 2, 0));
    hdfs.put(&name, Bytes::from_static(b"x")).unwrap();
    assert_eq!(seqs(&ended_at_last(&hdfs, LIFE)), [0, 1, 2]);
}

fn what_was_half_written_long_ago_is_swept_up(server: &server::Hdfs) {
    let hdfs = open(server, "/sweep");
    let old = SystemTime::now() - Duration::from_secs(48 * 60 * 60);
    let old = old.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_millis() as u64;
    let make = |fs: Arc<Fs>| async move {
        for (name, time) in [("old", Some(old)), ("new", None)] {
            let path = format!("{}/tmp/{name}", fs.config.root);
            let client = fs.client();
            Box::pin(client.create(&path, WriteOptions::default()).await.unwrap().close()).await.unwrap();
            if let Some(time) = time {
                client.set_times(&path, time, time).await.unwrap();
            }
        }
        Ok(())
    };
    hdfs.run("make", Duration::ZERO, make).unwrap();
    hdfs.begin(LIFE).unwrap();
    let left = |fs: Arc<Fs>| async move { fs.entries(&format!("{}/tmp", fs.config.root)).await };
    let left: Vec<String> =
        hdfs.run("left", Duration::ZERO, left).unwrap().into_iter().map(|entry| entry.name).collect();
    assert_eq!(left, ["new"]);
}

/// A file that is open when its directory is renamed takes more, for as long as its lease lasts.
fn a_rename_alone_is_no_fence(server: &server::Hdfs) {
    let hdfs = open(server, "/renamed");
    let log = filled(&hdfs, LIFE, 3);
    let rename = |fs: Arc<Fs>| async move {
        fs.make_dir(&fs.ended(LIFE)).await?;
        fs.make_dir(parent(&fs.dead(LIFE))).await?;
        Ok(fs.rename(&fs.live(LIFE), &fs.dead(LIFE)).await?)
    };
    hdfs.run("rename", Duration::ZERO, rename).unwrap();
    assert_eq!(log.append(&block(LIFE, 3, 0)), Ok(()), "a writer goes on after the rename");
    assert_eq!(seqs(&ended(&hdfs, LIFE).unwrap()), [0, 1, 2, 3]);
    assert_eq!(log.append(&block(LIFE, 4, 0)), Err(StoreError::Fenced));
}

/// A writer whose file is closed under it goes on in the next one, for as long as it may make one.
fn the_recovery_of_leases_alone_is_no_fence(server: &server::Hdfs) {
    let hdfs = open(server, "/recovered");
    let log = filled(&hdfs, LIFE, 3);
    let recover = |fs: Arc<Fs>| async move {
        let path = format!("{}/{:010}", fs.live(LIFE), 0);
        Ok(fs.recover(&path, Duration::from_secs(30)).await?)
    };
    hdfs.run("recover", Duration::from_secs(30), recover).unwrap();
    assert_eq!(log.append(&block(LIFE, 3, 0)), Ok(()), "a writer goes on after the recovery");
    assert_eq!(seqs(&ended(&hdfs, LIFE).unwrap()), [0, 1, 2, 3]);
    assert_eq!(log.append(&block(LIFE, 4, 0)), Err(StoreError::Fenced));
}

/// The DataNode that is being written to; a machine that is busy takes its time until one is.
fn busiest(server: &server::Hdfs) -> usize {
    let end = Instant::now() + PATIENCE;
    loop {
        if let Some(node) = server.busiest() {
            return node;
        }
        assert!(Instant::now() < end, "no DataNode is written to");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Appends blocks until it is told to stop, then ends the life: what was acknowledged is there.
fn written_through(hdfs: &Hdfs, life: Life, harm: impl FnOnce()) {
    let log = hdfs.begin(life).unwrap();
    let stop = AtomicBool::new(false);
    let written = std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut seq = 0;
            while !stop.load(Ordering::SeqCst) {
                append_at_last(&*log, &block(life, seq, seq.saturating_sub(500)));
                seq += 1;
            }
            seq
        });
        // Also when something here panics, or the writer would go on for ever.
        let _set = SetAtEnd(&stop);
        std::thread::sleep(Duration::from_millis(500));
        harm();
        std::thread::sleep(Duration::from_millis(500));
        stop.store(true, Ordering::SeqCst);
        writer.join().unwrap()
    });
    let blocks = ended_at_last(hdfs, life);
    let expected: Vec<Block> =
        (written.saturating_sub(501)..written).map(|seq| block(life, seq, seq.saturating_sub(500))).collect();
    assert!(blocks == expected, "{:?} of {written}", seqs(&blocks));
    println!("{written} blocks in {} files", log_file_count(hdfs, life));
}

fn log_file_count(hdfs: &Hdfs, life: Life) -> usize {
    hdfs.run("count", Duration::ZERO, |fs| async move { fs.log_files(life).await }).unwrap().len()
}

fn append_at_last(log: &dyn LifeLog, block: &Block) {
    let end = Instant::now() + PATIENCE;
    while let Err(error) = log.append(block) {
        assert!(error.is_retryable() && Instant::now() < end, "{error}");
    }
}

fn ended_at_last(hdfs: &Hdfs, life: Life) -> Vec<Block> {
    let end = Instant::now() + PATIENCE;
    loop {
        match ended(hdfs, life) {
            Ok(blocks) => return blocks,
            Err(error) => assert!(error.is_retryable() && Instant::now() < end, "{error}"),
        }
    }
}

#[test]
fn a_log_goes_on_when_daemons_die_hang_and_come_back() {
    let mut server = server::Hdfs::start(3).unwrap();
    let hdfs = open(&server, "/faults");
    let life = |epoch| Life { broker: 1, epoch };
    for round in 0..2 {
        println!("a DataNode is killed");
        written_through(&hdfs, life(10 + round), || {
            let node = busiest(&server);
            server.data_node(node).kill().unwrap();
            std::thread::sleep(Duration::from_secs(3));
            server.data_node(node).start().unwrap();
            server.wait().unwrap();
        });
    }
    println!("a DataNode hangs");
    written_through(&hdfs, life(20), || {
        let node = busiest(&server);
        server.data_node(node).pause().unwrap();
        std::thread::sleep(Duration::from_secs(5));
        server.data_node(node).resume().unwrap();
        std::thread::sleep(Duration::from_secs(3));
    });
    println!("the NameNode is killed");
    written_through(&hdfs, life(30), || {
        server.name_node().kill().unwrap();
        server.name_node().start().unwrap();
        server.wait().unwrap();
    });
    println!("the NameNode hangs");
    written_through(&hdfs, life(40), || {
        server.name_node().pause().unwrap();
        std::thread::sleep(Duration::from_secs(4));
        server.name_node().resume().unwrap();
    });
}

/// The writer's DataNode dies with it, so to speak: an heir recovers what is left.
#[test]
fn a_life_is_ended_while_a_data_node_is_dead() {
    let mut server = server::Hdfs::start(3).unwrap();
    let hdfs = open(&server, "/heir");
    let log = filled(&hdfs, LIFE, 50);
    let node = busiest(&server);
    server.data_node(node).kill().unwrap();
    // Two heartbeats, so that the NameNode does not choose it to lead the recovery.
    std::thread::sleep(Duration::from_secs(3));
    let begin = Instant::now();
    assert_eq!(ended_at_last(&hdfs, LIFE).len(), 50);
    println!("ended after {:?}", begin.elapsed());
    assert_eq!(log.append(&block(LIFE, 50, 0)), Err(StoreError::Fenced));
}
