//! The metadata store on real etcd: the conformance suite on one member and on three, members that die,
//! connections that break, history that is thrown away, leases that are not renewed.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use e2e::relay::Relay;
use e2e::stores::etcd as server;
use futures_util::future::join_all;

use super::*;
use crate::Change;
use crate::conformance::{metadata_cases, shared_metadata_cases};

/// Much longer than anything here lasts on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

fn open(server: &server::Etcd, prefix: &str) -> Etcd {
    Etcd::open(EtcdConfig::new(server.endpoints(), prefix)).unwrap()
}

fn fresh(server: &server::Etcd) -> impl Fn() -> Arc<dyn MetaStore> {
    let count = AtomicU32::new(0);
    let endpoints = server.endpoints();
    move || {
        let prefix = format!("/sealane/c{}", count.fetch_add(1, Ordering::Relaxed));
        Arc::new(Etcd::open(EtcdConfig::new(endpoints.clone(), &prefix)).unwrap())
    }
}

/// A connection to the first member that can be cut.
fn relayed(server: &server::Etcd, prefix: &str) -> (Etcd, Relay) {
    let address = server.endpoints()[0].trim_start_matches("http://").parse().unwrap();
    let relay = Relay::tcp(address).unwrap();
    let endpoint = format!("http://{}", relay.address);
    (Etcd::open(EtcdConfig::new(vec![endpoint], prefix)).unwrap(), relay)
}

async fn within<T>(work: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, work).await.expect("this takes no minute")
}

#[tokio::test]
async fn etcd_of_one_member_is_a_metadata_store() {
    let server = server::Etcd::start(1).unwrap();
    metadata_cases(fresh(&server)).await;
    shared_metadata_cases(fresh(&server)).await;
}

#[tokio::test]
async fn etcd_of_three_members_is_a_metadata_store() {
    let server = server::Etcd::start(3).unwrap();
    metadata_cases(fresh(&server)).await;
    shared_metadata_cases(fresh(&server)).await;
}

#[tokio::test]
async fn etcd_is_spoken_to_over_tls_with_a_certificate_of_ones_own() {
    let dir = tempfile::tempdir().unwrap();
    let authority = e2e::stores::CertificateDir::open(&dir.path().join("right")).unwrap();
    let files = authority.leaf("etcd", &["127.0.0.1"]).unwrap();
    let server = server::Etcd::start_tls(&files).unwrap();
    let stranger = e2e::stores::CertificateDir::open(&dir.path().join("other")).unwrap();
    let own = std::fs::read(&authority.leaf("broker", &["127.0.0.1"]).unwrap().cert).unwrap();
    let foreign = std::fs::read(&stranger.leaf("broker", &["127.0.0.1"]).unwrap().cert).unwrap();
    let ca = std::fs::read(files.ca.unwrap()).unwrap();
    let open = |ca: &[u8], identity: Option<&Vec<u8>>| {
        let identity = identity.map(|pem| (pem.clone(), pem.clone()));
        let tls = Some(EtcdTls { ca: ca.to_vec(), identity });
        Etcd::open(EtcdConfig { tls, ..EtcdConfig::new(server.endpoints(), "/a") }).unwrap()
    };
    let etcd = open(&ca, Some(&own));
    etcd.put_if("key", b"value".to_vec(), None).await.unwrap();
    assert_eq!(etcd.get("key").await.unwrap().map(|(value, _)| value), Some(b"value".to_vec()));
    let lease = etcd.lease(Duration::from_secs(5)).await.unwrap();
    etcd.put_leased("leased", b"x".to_vec(), None, &lease).await.unwrap();
    let (no_identity, another) = (open(&ca, None), open(&ca, Some(&foreign)));
    let wrong_authority = open(&std::fs::read(dir.path().join("other/ca.crt")).unwrap(), Some(&own));
    for refused in [no_identity, another, wrong_authority] {
        let text = within(refused.get("key")).await.unwrap_err().to_string();
        assert!(text.contains("https://127.0.0.1:") && !text.contains('\n'), "{text}");
    }
    let without = EtcdConfig::new(server.endpoints(), "/a");
    let text = Etcd::open(without).map(drop).unwrap_err().to_string();
    assert!(text.contains("certificate of its authority"), "{text}");
}

#[tokio::test]
async fn clusters_on_one_etcd_do_not_see_each_other() {
    let server = server::Etcd::start(1).unwrap();
    let (one, other) = (open(&server, "/a"), open(&server, "/ab"));
    let mut watch = other.watch("").await.unwrap();
    one.put_if("k", b"1".to_vec(), None).await.unwrap();
    one.put_if("b/k", b"1".to_vec(), None).await.unwrap();
    assert_eq!(other.get("k").await, Ok(None));
    assert_eq!(other.list("").await, Ok(vec![]));
    other.put_if("k", b"2".to_vec(), None).await.unwrap();
    let change = within(watch.next()).await;
    assert!(matches!(&change, Some(Change::Put(item)) if item.value == b"2"), "{change:?}");
}

/// One writer raises the first and the last key in turn; between them lie more than fit a page. A list that
/// mixed two moments would show the last one ahead.
#[tokio::test]
async fn a_list_of_many_pages_is_of_one_moment() {
    let server = server::Etcd::start(1).unwrap();
    let store = open(&server, "/c");
    let keys: Vec<String> = (0..PAGE_ITEMS * 2 + 50).map(|i| format!("m{i:05}")).collect();
    join_all(keys.iter().map(|key| store.put_if(key, vec![0; 10], None))).await;
    let raise = async {
        let mut versions = [None, None];
        for round in 0..400_u32 {
            for (key, version) in ["a", "z"].iter().zip(&mut versions) {
                *version = Some(store.put_if(key, round.to_be_bytes().to_vec(), *version).await.unwrap());
            }
        }
    };
    let look = async {
        let mut seen = Vec::new();
        while seen.last() != Some(&399) {
            let items = store.list("").await.unwrap();
            let value = |key: &str| {
                let item = items.iter().find(|item| item.key == key);
                item.map_or(-1, |item| i64::from(u32::from_be_bytes(item.value[..].try_into().unwrap())))
            };
            let (first, last) = (value("a"), value("z"));
            assert!(first == last || first == last + 1, "{first} {last}");
            assert!(items.len() >= keys.len());
            seen.push(last);
        }
        seen.dedup();
        seen.len()
    };
    let ((), moments) = tokio::join!(raise, look);
    assert!(moments > 3, "{moments}");
}

#[tokio::test]
async fn no_etcd_is_named_in_one_line() {
    let config = |endpoint: &str| EtcdConfig::new(vec![endpoint.to_owned()], "/c");
    for wrong in ["127.0.0.1:2379", "https://127.0.0.1:2379", "http://a b"] {
        let Err(MetaError::Unavailable(text)) = Etcd::open(config(wrong)) else { panic!("{wrong}") };
        assert!(text.contains(wrong), "{text}");
    }
    let store = Etcd::open(config("http://127.0.0.1:1")).unwrap();
    let Err(MetaError::Unavailable(text)) = store.get("k").await else { panic!("there is none") };
    assert!(text.contains("no etcd answers: etcd at http://127.0.0.1:1") && !text.contains('\n'), "{text}");
    assert!(store.lease(Duration::from_secs(5)).await.is_err());
    assert!(store.watch("").await.is_err());
}

#[tokio::test]
async fn a_watch_goes_on_where_its_connection_broke() {
    let server = server::Etcd::start(1).unwrap();
    let (far, relay) = relayed(&server, "/c");
    let near = open(&server, "/c");
    let mut watch = far.watch("").await.unwrap();
    let mut version = Some(near.put_if("k", vec![0], None).await.unwrap());
    assert!(matches!(within(watch.next()).await, Some(Change::Put(item)) if item.value == [0]));
    relay.faults.cut(true);
    for i in 1..20 {
        version = Some(near.put_if("k", vec![i], version).await.unwrap());
    }
    relay.faults.cut(false);
    for i in 1..20 {
        let change = within(watch.next()).await;
        assert!(matches!(&change, Some(Change::Put(item)) if item.value == [i]), "{i}: {change:?}");
    }
}

#[tokio::test]
async fn a_watch_that_was_away_while_history_was_thrown_away_lists_again() {
    let server = server::Etcd::start(1).unwrap();
    let (far, relay) = relayed(&server, "/c");
    let near = open(&server, "/c");
    let mut watch = far.watch("").await.unwrap();
    let mut version = Some(near.put_if("k", vec![0], None).await.unwrap());
    assert!(matches!(within(watch.next()).await, Some(Change::Put(_))));
    relay.faults.cut(true);
    for i in 1..20 {
        version = Some(near.put_if("k", vec![i], version).await.unwrap());
    }
    server.compact().unwrap();
    relay.faults.cut(false);
    assert_eq!(within(watch.next()).await, Some(Change::Resync));
    assert_eq!(near.list("").await.unwrap()[0].value, [19]);
    near.put_if("k", vec![20], version).await.unwrap();
    let change = within(watch.next()).await;
    assert!(matches!(&change, Some(Change::Put(item)) if item.value == [20]), "{change:?}");
}

#[tokio::test]
async fn a_holder_knows_before_etcd_that_its_lease_is_over() {
    let server = server::Etcd::start(1).unwrap();
    let (far, relay) = relayed(&server, "/c");
    let near = open(&server, "/c");
    for round in 0..3_u8 {
        let lease = within(async {
            // The connection may still be the broken one.
            loop {
                if let Ok(lease) = far.lease(Duration::from_secs(2)).await {
                    return lease;
                }
            }
        });
        let lease = lease.await;
        let key = format!("live/{round}");
        let version = far.put_leased(&key, vec![], None, &lease).await.unwrap();
        let mut watch = near.watch("live/").await.unwrap();
        // Longer than the ttl: it is renewed.
        tokio::time::sleep(Duration::from_secs(3)).await;
        assert!(lease.is_held());
        relay.faults.cut(true);
        within(lease.lost()).await;
        assert!(!lease.is_held());
        let over = lease.until().unwrap();
        let gone = within(watch.next()).await;
        let seen = Instant::now();
        assert!(matches!(&gone, Some(Change::Deleted { key: found, .. }) if *found == key), "{gone:?}");
        assert!(over < seen, "the holder stopped before another could take over");
        let late = near.put_guarded("k", vec![], None, (&key, version)).await;
        assert_eq!(late, Err(MetaError::GuardGone));
        relay.faults.cut(false);
        let late = far.put_leased(&key, vec![], None, &lease).await;
        assert_eq!(late, Err(MetaError::GuardGone));
    }
}

#[tokio::test]
async fn a_lease_outlives_its_member() {
    let mut server = server::Etcd::start(3).unwrap();
    let store = open(&server, "/c");
    let lease = store.lease(Duration::from_secs(10)).await.unwrap();
    let version = store.put_leased("live/1", vec![], None, &lease).await.unwrap();
    for member in 0..3 {
        server.member(member).kill().unwrap();
        tokio::time::sleep(Duration::from_secs(4)).await;
        assert!(lease.is_held(), "member {member} is gone");
        server.start_again(member).unwrap();
    }
    tokio::time::sleep(Duration::from_secs(8)).await;
    assert!(lease.is_held());
    let found = within(async {
        loop {
            if let Ok(found) = store.get("live/1").await {
                return found;
            }
        }
    });
    assert_eq!(found.await, Some((vec![], version)));
}

/// A counter that several callers raise while members are killed, hang and come back, and a watcher that
/// sees it all: nothing that took effect is lost or done twice.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn members_that_die_and_hang_lose_no_write() {
    let mut server = server::Etcd::start(3).unwrap();
    let stores: Vec<Etcd> = (0..3).map(|_| open(&server, "/c")).collect();
    let mut watch = stores[0].watch("").await.unwrap();
    let callers: Vec<_> = stores
        .iter()
        .zip(0_u8..)
        .map(|(store, name)| tokio::spawn(raise(store.clone(), name, ROUNDS)))
        .collect();
    for member in [0, 1, 2] {
        tokio::time::sleep(Duration::from_millis(500)).await;
        server.member(member).kill().unwrap();
        tokio::time::sleep(Duration::from_millis(1_500)).await;
        server.start_again(member).unwrap();
        server.member(member).pause().unwrap();
        tokio::time::sleep(Duration::from_secs(5)).await;
        server.member(member).resume().unwrap();
    }
    for caller in callers {
        within(caller).await.unwrap();
    }
    let (names, version) = within(async {
        loop {
            if let Ok(found) = stores[1].get("n").await {
                return found.unwrap();
            }
        }
    })
    .await;
    assert_eq!(names.len(), 2 * 3 * usize::from(ROUNDS));
    let mut last = Vec::new();
    while last.len() < names.len() {
        match within(watch.next()).await {
            Some(Change::Put(item)) => {
                assert!(item.version <= version && item.value.starts_with(&last), "a change is missing");
                last = item.value;
            }
            change => panic!("{change:?}"),
        }
    }
}

const ROUNDS: u8 = 150;

async fn raise(store: Etcd, name: u8, rounds: u8) {
    for round in 0..rounds {
        loop {
            let Ok(found) = store.get("n").await else { continue };
            let (mut names, version) = found.map_or((Vec::new(), None), |(v, version)| (v, Some(version)));
            if names.chunks(2).any(|done| done == [name, round]) {
                break;
            }
            names.extend_from_slice(&[name, round]);
            let _ = store.put_if("n", names, version).await;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}
