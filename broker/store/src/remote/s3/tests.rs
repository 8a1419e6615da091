//! S3 against a real server: the conformance suite, faults on the way, restarts, damage, and what is said
//! when something is wrong.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use e2e::stores::front::{Front, FrontFaults};
use e2e::stores::s3 as server;

use super::*;
use crate::remote::conformance::{Subject, block, cases, ended, faulty_cases, filled, judge, race, seqs};
use crate::remote::{Flaky, RemoteFaults};

const LIFE: Life = Life { broker: 3, epoch: 7 };

fn config(endpoint: &str, prefix: &str) -> S3Config {
    let credentials = S3Credentials {
        access_key_id: server::S3::ACCESS_KEY_ID.to_owned(),
        secret_access_key: server::S3::SECRET_ACCESS_KEY.to_owned(),
    };
    S3Config { credentials: Some(credentials), ..S3Config::new(endpoint, server::S3::BUCKET, prefix) }
}

fn subject(s3: S3) -> Subject {
    let behind = s3.clone();
    let lose_block = move |life, seq| {
        let lose =
            |bucket: Arc<Bucket>| async move { bucket.delete_one(&bucket.log_object(life, seq)?).await };
        behind.run("lose", 0, lose).unwrap();
    };
    Subject { remote: Arc::new(s3), lose_block: Box::new(lose_block), page: 1_000 }
}

/// Stores with a bucket of their own each: a listing of gofakes3 walks all that is in one.
fn fresh(server: &server::S3) -> impl Fn() -> Subject + Sync {
    let count = AtomicU64::new(0);
    move || {
        let bucket = format!("cluster-{}", count.fetch_add(1, Ordering::SeqCst));
        server.make_bucket(&bucket).unwrap();
        let config = S3Config { bucket, ..config(&server.endpoint(), "clusters/c") };
        subject(S3::open(config).unwrap())
    }
}

fn address(server: &server::S3) -> SocketAddr {
    server.endpoint().trim_start_matches("http://").parse().unwrap()
}

#[test]
fn s3_is_a_remote_store() {
    let server = server::S3::start().unwrap();
    let make = fresh(&server);
    cases(2, |_| make());
}

#[test]
fn faults_on_s3_lose_nothing() {
    let server = server::S3::start().unwrap();
    faulty_cases(fresh(&server), 0..5);
}

/// The server refuses, breaks, hangs and loses answers: the client's own retries meet their own writes.
#[test]
fn faults_on_the_way_to_s3_lose_nothing() {
    let server = server::S3::start().unwrap();
    for seed in 0..4 {
        println!("seed {seed}");
        let faults = FrontFaults {
            slow_down: 100,
            broken: 50,
            lost: 100,
            hang_first: 20,
            hang: Duration::from_millis(1_500),
            ..FrontFaults::default()
        };
        let front = Front::start(address(&server), seed, faults).unwrap();
        let patient = S3Config {
            request_timeout: Duration::from_secs(1),
            retry_for: Duration::from_millis(200),
            ..config(&front.endpoint(), &format!("seed{seed}"))
        };
        let remote = S3::open(patient).unwrap();
        for round in 0..3 {
            let life = Life { broker: 1, epoch: round };
            let (acknowledged, visited) = race(&remote, life, 2);
            judge(&acknowledged, &visited).unwrap();
        }
        assert!(front.harmed() > 20, "{}", front.harmed());
    }
}

#[test]
fn a_store_that_refuses_for_a_moment_is_asked_again_within_the_call() {
    let server = server::S3::start().unwrap();
    let faults = FrontFaults { slow_down: 600, broken: 200, ..FrontFaults::default() };
    let front = Front::start(address(&server), 1, faults).unwrap();
    let config = S3Config { retry_for: Duration::from_secs(60), ..config(&front.endpoint(), "p") };
    let log = filled(&S3::open(config.clone()).unwrap(), LIFE, 10);
    assert!(front.harmed() > 10);
    front.set_faults(FrontFaults { slow_down: 1_000, ..FrontFaults::default() });
    let impatient = S3Config { retry_for: Duration::from_millis(300), ..config };
    let refused = S3::open(impatient).unwrap().list(&StorePath::root());
    let Err(StoreError::Io(text)) = refused else { panic!("{refused:?}") };
    assert!(text.contains("503") && text.contains("s3://sealane at http://"), "{text}");
    front.set_faults(FrontFaults::default());
    log.append(&block(LIFE, 10, 0)).unwrap();
}

/// What a call says that must fail, retryably, in one line that names the place.
fn said<T>(outcome: Result<T, StoreError>) -> String {
    match outcome.map(drop) {
        Err(StoreError::Io(text)) if text.starts_with("s3://") && !text.contains('\n') => text,
        other => panic!("{other:?}"),
    }
}

/// What every kind of call says.
fn all_say(config: S3Config, expected: &str) {
    let quick = S3Config { retry_for: Duration::from_millis(100), ..config };
    let (place, s3) = (format!("s3://{} at {}: ", quick.bucket, quick.endpoint), S3::open(quick).unwrap());
    let name = StorePath::parse("x").unwrap();
    let outcomes = [
        said(s3.begin(LIFE)),
        said(s3.put(&name, Bytes::from_static(b"x"))),
        said(s3.get(&name, 0, 1)),
        said(s3.list(&name)),
        said(s3.delete(&name)),
        said(s3.fence(LIFE)),
        said(s3.lives()),
    ];
    for text in outcomes {
        assert!(text.starts_with(&place) && text.contains(expected), "{text:?} without {expected:?}");
    }
}

#[test]
fn what_is_wrong_is_named_in_one_line() {
    let mut server = server::S3::start().unwrap();
    let right = config(&server.endpoint(), "p");
    all_say(S3Config { bucket: "nowhere".to_owned(), ..right.clone() }, "no such bucket: create it");
    let front = Front::start(address(&server), 1, FrontFaults::default()).unwrap();
    let through = S3Config { endpoint: front.endpoint(), ..right.clone() };
    for (faults, expected) in [
        (FrontFaults { denied: 1_000, ..FrontFaults::default() }, "denied: check the credentials"),
        (FrontFaults { broken: 1_000, ..FrontFaults::default() }, "500"),
        (FrontFaults { slow_down: 1_000, ..FrontFaults::default() }, "503"),
    ] {
        front.set_faults(faults);
        all_say(through.clone(), expected);
    }
    let elsewhere = |endpoint: &str| S3Config { endpoint: endpoint.to_owned(), ..right.clone() };
    all_say(elsewhere("http://no-such-host.invalid:9000"), "cannot be reached: check the endpoint");
    // It speaks no TLS.
    all_say(
        elsewhere(&server.endpoint().replace("http:", "https:")),
        "cannot be reached: check the endpoint",
    );
    server.daemon().kill().unwrap();
    all_say(right, "cannot be reached: check the endpoint");
    assert!(!format!("{:?}", config("http://x", "p")).contains("testtest"), "secrets are not shown");
}

/// Speaks TLS in front of a server that does not, one request for each connection.
fn tls_front(server: SocketAddr, files: &e2e::stores::TlsFiles) -> String {
    use std::io::{Read, Write};

    use rustls::pki_types::pem::PemObject;
    use rustls::pki_types::{CertificateDer, PrivateKeyDer};
    let chain: Vec<_> = CertificateDer::pem_file_iter(&files.cert).unwrap().map(Result::unwrap).collect();
    let key = PrivateKeyDer::from_pem_file(&files.key).unwrap();
    let _ = rustls::crypto::ring::default_provider().install_default();
    let config = rustls::ServerConfig::builder().with_no_client_auth().with_single_cert(chain, key).unwrap();
    let (config, plain) = (Arc::new(config), Front::start(server, 1, FrontFaults::default()).unwrap());
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("https://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        // All of it, so that it lives as long as this thread.
        let plain = &plain;
        for stream in listener.incoming().flatten() {
            let connection = rustls::ServerConnection::new(config.clone()).unwrap();
            let mut near = rustls::StreamOwned::new(connection, stream);
            let mut far = std::net::TcpStream::connect(plain.address).unwrap();
            std::thread::spawn(move || {
                // The front answers when the request is whole, and closes.
                let mut buffer = vec![0; 64 << 10];
                far.set_read_timeout(Some(Duration::from_millis(20)))?;
                near.sock.set_read_timeout(Some(Duration::from_millis(20)))?;
                loop {
                    for is_request in [true, false] {
                        let read = if is_request { near.read(&mut buffer) } else { far.read(&mut buffer) };
                        match read {
                            Ok(0) => return near.flush(),
                            Ok(len) if is_request => far.write_all(&buffer[..len])?,
                            Ok(len) => near.write_all(&buffer[..len])?,
                            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                            Err(error) => return Err(error),
                        }
                    }
                }
            });
        }
    });
    endpoint
}

#[test]
fn a_server_with_a_certificate_of_an_authority_of_ones_own_is_trusted_when_told_so() {
    let server = server::S3::start().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let authority = e2e::stores::CertificateDir::open(dir.path()).unwrap();
    let files = authority.leaf("s3", &["127.0.0.1"]).unwrap();
    let endpoint = tls_front(address(&server), &files);
    let ca = std::fs::read(files.ca.unwrap()).unwrap();
    let trusting = S3::open(S3Config { ca, ..config(&endpoint, "p") }).unwrap();
    let log = filled(&trusting, LIFE, 3);
    trusting.put(&StorePath::parse("x").unwrap(), Bytes::from(vec![7; 300_000])).unwrap();
    assert_eq!(trusting.get(&StorePath::parse("x").unwrap(), 200_000, 9).unwrap(), vec![7; 9]);
    assert_eq!(seqs(&ended(&trusting, LIFE).unwrap()), [0, 1, 2]);
    assert_eq!(log.append(&block(LIFE, 3, 0)), Err(StoreError::Fenced));
    all_say(config(&endpoint, "p"), "certificate");
    let bad =
        S3::open(S3Config { ca: b"-----BEGIN CERTIFICATE-----\nno\n".to_vec(), ..config(&endpoint, "p") });
    let text = bad.map(drop).unwrap_err().to_string();
    assert!(text.contains("the authority's certificate"), "{text}");
}

/// Answers every request with this.
fn something_else(answer: &'static str) -> String {
    use std::io::{Read, Write};
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let _ = stream.read(&mut [0; 4_096]);
            let _ = stream.write_all(answer.as_bytes());
        }
    });
    endpoint
}

#[test]
fn what_is_no_s3_server_is_not_taken_for_one() {
    let page =
        "HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello";
    let moved = "HTTP/1.1 301 Moved Permanently\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
    for (answer, expected) in [
        (page, "invalid list response"),
        (moved, "incorrectly configured region"),
        ("220 mail.example ESMTP\r\n", "invalid HTTP version"),
    ] {
        let quick =
            S3Config { retry_for: Duration::from_millis(100), ..config(&something_else(answer), "p") };
        let s3 = S3::open(quick).unwrap();
        for text in [said(s3.begin(LIFE)), said(s3.lives()), said(s3.fence(LIFE))] {
            assert!(text.contains(expected), "{text:?} without {expected:?}");
        }
    }
}

#[test]
fn a_server_that_hangs_ends_no_call_late_and_loses_nothing() {
    let mut server = server::S3::start().unwrap();
    let quick = S3Config {
        request_timeout: Duration::from_millis(300),
        retry_for: Duration::from_millis(300),
        ..config(&server.endpoint(), "p")
    };
    let remote = S3::open(quick).unwrap();
    let log = filled(&remote, LIFE, 2);
    server.daemon().pause().unwrap();
    let outcome = log.append(&block(LIFE, 2, 0));
    assert!(
        matches!(&outcome, Err(StoreError::Io(text)) if text.contains("no answer within")),
        "{outcome:?}"
    );
    server.daemon().resume().unwrap();
    while let Err(error) = log.append(&block(LIFE, 2, 0)) {
        assert!(error.is_retryable(), "{error}");
    }
    log.append(&block(LIFE, 3, 0)).unwrap();
    assert_eq!(seqs(&ended(&remote, LIFE).unwrap()), [0, 1, 2, 3]);
}

#[test]
fn a_log_goes_on_after_the_server_was_killed() {
    let mut server = server::S3::start().unwrap();
    let remote =
        S3::open(S3Config { retry_for: Duration::from_millis(200), ..config(&server.endpoint(), "p") })
            .unwrap();
    let log = filled(&remote, LIFE, 3);
    server.daemon().kill().unwrap();
    assert!(log.append(&block(LIFE, 3, 0)).unwrap_err().is_retryable());
    server.start_again().unwrap();
    while let Err(error) = log.append(&block(LIFE, 3, 0)) {
        assert!(error.is_retryable(), "{error}");
    }
    assert_eq!(seqs(&ended(&remote, LIFE).unwrap()), [0, 1, 2, 3]);
}

fn overwrite(s3: &S3, life: Life, number: u64, bytes: Bytes) {
    let replace =
        |bucket: Arc<Bucket>| async move { bucket.replace(&bucket.log_object(life, number)?, bytes).await };
    s3.run("overwrite", 0, replace).unwrap();
}

fn numbers(s3: &S3, life: Life) -> Vec<u64> {
    let found = s3.run("numbers", 0, |bucket| async move { bucket.numbers(life).await }).unwrap();
    found.sizes.into_keys().collect()
}

#[test]
fn a_write_that_lands_late_under_an_old_number_is_ignored() {
    let server = server::S3::start().unwrap();
    let s3 = S3::open(config(&server.endpoint(), "p")).unwrap();
    let log = filled(&s3, LIFE, 5);
    log.append(&block(LIFE, 5, 5)).unwrap();
    let end = std::time::Instant::now() + Duration::from_secs(60);
    while numbers(&s3, LIFE) != [5] {
        assert!(std::time::Instant::now() < end, "{:?}", numbers(&s3, LIFE));
        std::thread::sleep(Duration::from_millis(10));
    }
    overwrite(&s3, LIFE, 2, block(LIFE, 2, 0).encode());
    assert_eq!(seqs(&ended(&s3, LIFE).unwrap()), [5]);
    s3.forget(LIFE).unwrap();
    assert_eq!(numbers(&s3, LIFE), [5, 6], "what refuses the writer stays");
    overwrite(&s3, LIFE, 4, block(LIFE, 4, 0).encode());
    assert_eq!(ended(&s3, LIFE), Ok(Vec::new()));
    s3.forget(LIFE).unwrap();
    assert_eq!(numbers(&s3, LIFE), [5, 6]);
    assert_eq!(log.append(&block(LIFE, 6, 5)), Err(StoreError::Fenced));
}

/// An heir that chases a fast writer dies: what is free before its wall is still the writer's.
#[test]
fn a_wall_ahead_of_the_writer_is_not_the_end() {
    let server = server::S3::start().unwrap();
    let s3 = S3::open(config(&server.endpoint(), "p")).unwrap();
    let log = filled(&s3, LIFE, 4);
    let wall = |bucket: Arc<Bucket>| async move { bucket.wall(LIFE, 7).await };
    s3.run("wall", 0, wall).unwrap();
    log.append(&block(LIFE, 4, 2)).unwrap();
    assert!(s3.forget(LIFE).is_err(), "it has not ended");
    assert_eq!(seqs(&ended(&s3, LIFE).unwrap()), [2, 3, 4]);
    assert_eq!(log.append(&block(LIFE, 5, 2)), Err(StoreError::Fenced));
    s3.forget(LIFE).unwrap();
    assert_eq!(ended(&s3, LIFE), Ok(Vec::new()));
    let other = Life { broker: 4, epoch: 1 };
    let log = filled(&s3, other, 4);
    s3.run("wall", 0, move |bucket| async move { bucket.wall(other, 6).await }).unwrap();
    log.append(&block(other, 4, 0)).unwrap();
    log.append(&block(other, 5, 0)).unwrap();
    assert_eq!(log.append(&block(other, 6, 0)), Err(StoreError::Fenced), "no further than the wall");
    assert_eq!(ended(&s3, other).unwrap().len(), 6);
}

#[test]
fn a_store_that_lets_two_writers_win_is_found_out() {
    let server = server::S3::start().unwrap();
    let s3 = S3::open(config(&server.endpoint(), "p")).unwrap();
    filled(&s3, LIFE, 2);
    assert_eq!(ended(&s3, LIFE).unwrap().len(), 2);
    overwrite(&s3, LIFE, 3, block(LIFE, 3, 0).encode());
    let outcome = ended(&s3, LIFE);
    assert!(
        matches!(&outcome, Err(StoreError::Corrupt(text)) if text.contains("create-if-absent")),
        "{outcome:?}"
    );
}

#[test]
fn a_damaged_block_is_damage() {
    let server = server::S3::start().unwrap();
    let s3 = S3::open(config(&server.endpoint(), "p")).unwrap();
    filled(&s3, LIFE, 4);
    let mut bytes = block(LIFE, 1, 0).encode().to_vec();
    *bytes.last_mut().unwrap() ^= 1;
    overwrite(&s3, LIFE, 1, Bytes::from(bytes));
    let outcome = ended(&s3, LIFE);
    assert!(
        matches!(&outcome, Err(StoreError::Corrupt(text)) if text.contains("block 1 of life 3-7")),
        "{outcome:?}"
    );
}

#[test]
fn clusters_in_one_bucket_do_not_see_each_other() {
    let server = server::S3::start().unwrap();
    let open = |prefix: &str| S3::open(config(&server.endpoint(), prefix)).unwrap();
    let (one, other, none) = (open("a/b"), open("a/bc"), open(""));
    filled(&one, LIFE, 2);
    let name = StorePath::parse("x").unwrap();
    one.put(&name, Bytes::from_static(b"1")).unwrap();
    assert_eq!(other.lives(), Ok(vec![]));
    assert_eq!(other.get(&name, 0, 1), Err(StoreError::NotFound));
    assert_eq!(ended(&other, LIFE), Ok(vec![]));
    filled(&none, LIFE, 1);
    none.put(&name, Bytes::from_static(b"0")).unwrap();
    assert_eq!(one.get(&name, 0, 9), Ok(Bytes::from_static(b"1")));
    assert_eq!(ended(&one, LIFE).unwrap().len(), 2);
}

/// Reads what there is and puts no fence.
struct Unfenced(S3);

impl Remote for Unfenced {
    fn put(&self, name: &StorePath, bytes: Bytes) -> Result<(), StoreError> {
        self.0.put(name, bytes)
    }
    fn get(&self, name: &StorePath, pos: u64, len: usize) -> Result<Bytes, StoreError> {
        self.0.get(name, pos, len)
    }
    fn list(&self, dir: &StorePath) -> Result<Vec<Entry>, StoreError> {
        self.0.list(dir)
    }
    fn delete(&self, name: &StorePath) -> Result<(), StoreError> {
        self.0.delete(name)
    }
    fn begin(&self, life: Life) -> Result<Arc<dyn LifeLog>, StoreError> {
        self.0.begin(life)
    }
    fn fence(&self, _: Life) -> Result<(), StoreError> {
        Ok(())
    }
    fn end(
        &self,
        life: Life,
        visit: &mut dyn FnMut(Block) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        for number in numbers(&self.0, life) {
            visit(self.0.run("read", 0, |bucket| async move { bucket.block(life, number).await })?)?;
        }
        Ok(())
    }
    fn forget(&self, life: Life) -> Result<(), StoreError> {
        self.0.forget(life)
    }
    fn lives(&self) -> Result<Vec<Life>, StoreError> {
        self.0.lives()
    }
}

#[test]
fn without_a_fence_the_race_is_lost() {
    let server = server::S3::start().unwrap();
    let unfenced = Unfenced(S3::open(config(&server.endpoint(), "p")).unwrap());
    for round in 0..3 {
        let (acknowledged, visited) = race(&unfenced, Life { broker: 1, epoch: round }, 1);
        judge(&acknowledged, &visited).unwrap_err();
    }
    let flaky = Flaky::new(unfenced, 1, RemoteFaults::default());
    let (acknowledged, visited) = race(&flaky, Life { broker: 2, epoch: 1 }, 2);
    judge(&acknowledged, &visited).unwrap_err();
}
