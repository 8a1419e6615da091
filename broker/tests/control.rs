//! The control service of a broker on loopback: who may call, and what a lane-router's session is told.

#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::time::Duration;

use broker::config::{ListenerConfig, Storage};
use broker::{Config, service};
use chassis::ServiceHandle;
use chassis::certs::CertificateDir;
use chassis::tls::TlsFiles;
use control::{TlsPaths, v1};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Code;

fn config(control_bind: &str) -> Config {
    Config {
        storage: Storage::Memory,
        listeners: vec![ListenerConfig { bind: "127.0.0.1:0".to_owned(), ..ListenerConfig::default() }],
        control_bind: control_bind.to_owned(),
        http_bind: String::new(),
        lane_port_first: 40_000,
        lane_port_count: 2,
        lane_host: "lanes.example".to_owned(),
        ..Config::default()
    }
}

fn free_address() -> String {
    format!("127.0.0.1:{}", test_ports::free_port().unwrap())
}

async fn client_of(address: &str, files: &TlsFiles) -> control::Client {
    let ca = files.ca.as_deref().unwrap();
    let tls = TlsPaths { ca, cert: &files.cert, key: &files.key };
    control::connect(address, Some(tls)).await.unwrap()
}

fn create(name: &str) -> v1::CreateLaneRequest {
    v1::CreateLaneRequest { name: name.to_owned(), class: 0, ..Default::default() }
}

async fn secure_broker(dir: &Path) -> (String, CertificateDir, ServiceHandle) {
    let certificates = CertificateDir::open(dir).unwrap();
    let address = free_address();
    let tls = Some(certificates.leaf("sealane-broker", &["127.0.0.1"]).unwrap());
    let handle = ServiceHandle::standalone("broker");
    service::start(Config { control_tls: tls, ..config(&address) }, handle.clone()).await.unwrap();
    (address, certificates, handle)
}

#[tokio::test(flavor = "multi_thread")]
async fn with_tls_a_callers_certificate_decides_what_it_may_call() {
    let dir = tempfile::tempdir().unwrap();
    let (address, certificates, handle) = secure_broker(dir.path()).await;
    let leaf = |name: &str| certificates.leaf(name, &[]).unwrap();

    let mut person = client_of(&address, &leaf("sealane-control")).await;
    let made = person.create_lane(create("boe-a")).await.unwrap().into_inner().lane.unwrap();
    assert_eq!(made.address, "lanes.example:40000");

    let mut router = client_of(&address, &leaf("sealane-lane-router")).await;
    assert_eq!(router.list_lanes(v1::ListLanesRequest {}).await.unwrap().into_inner().lanes.len(), 1);
    assert_eq!(router.create_lane(create("boe-b")).await.unwrap_err().code(), Code::PermissionDenied);

    let mut mirror = client_of(&address, &leaf("sealane-mirror")).await;
    let refused = mirror.list_lanes(v1::ListLanesRequest {}).await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied);
    assert!(refused.message().contains("sealane-mirror"), "{}", refused.message());
    handle.drain(Duration::from_secs(10)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn with_tls_plain_and_foreign_callers_get_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (address, certificates, handle) = secure_broker(dir.path()).await;
    if let Ok(mut plain) = control::connect(&address, None).await {
        plain.list_lanes(v1::ListLanesRequest {}).await.unwrap_err();
    }
    let elsewhere = tempfile::tempdir().unwrap();
    let mut foreign = CertificateDir::open(elsewhere.path()).unwrap().leaf("sealane-control", &[]).unwrap();
    foreign.ca = certificates.leaf("sealane-control", &[]).unwrap().ca;
    let tls = TlsPaths { ca: foreign.ca.as_deref().unwrap(), cert: &foreign.cert, key: &foreign.key };
    if let Ok(mut foreign) = control::connect(&address, Some(tls)).await {
        foreign.list_lanes(v1::ListLanesRequest {}).await.unwrap_err();
    }
    handle.drain(Duration::from_secs(10)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn plain_text_that_other_machines_could_reach_is_refused_at_the_start() {
    let started = service::start(config("0.0.0.0:0"), ServiceHandle::standalone("broker")).await;
    let said = started.err().unwrap().to_string();
    assert!(said.contains("is not a loopback address, so the control service needs [control_tls]"), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lane_router_is_told_every_set_and_creation_waits_for_its_word() {
    let address = free_address();
    let handle = ServiceHandle::standalone("broker");
    service::start(config(&address), handle.clone()).await.unwrap();
    let mut router = control::connect(&address, None).await.unwrap();
    let (reports, stream) = mpsc::channel(4);
    let report = |generation, failures| v1::LaneRouterReport {
        address: "127.0.0.1:9093".to_owned(),
        generation,
        failures,
    };
    reports.send(report(0, Vec::new())).await.unwrap();
    let mut sets = router.watch_lanes(ReceiverStream::new(stream)).await.unwrap().into_inner();
    let first = sets.message().await.unwrap().unwrap();
    assert!(first.lanes.is_empty() && first.generation > 0);

    let mut person = control::connect(&address, None).await.unwrap();
    let creating = tokio::spawn(async move {
        let made = person.create_lane(create("boe-a")).await.map(|made| made.into_inner());
        let failed = person.create_lane(create("boe-b")).await;
        (made, failed, person)
    });
    let set = sets.message().await.unwrap().unwrap();
    assert_eq!(set.lanes[0].name, "boe-a");
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(!creating.is_finished(), "the router has not said that it serves the lane");
    reports.send(report(set.generation, Vec::new())).await.unwrap();
    let set = sets.message().await.unwrap().unwrap();
    assert_eq!(set.lanes.len(), 2);
    let failure = v1::LaneFailure { lane: "boe-b".to_owned(), reason: "address in use".to_owned() };
    reports.send(report(set.generation, vec![failure])).await.unwrap();

    let (made, failed, mut person) = creating.await.unwrap();
    assert!(made.unwrap().warnings.is_empty());
    assert!(failed.unwrap_err().message().contains("cannot serve lane boe-b: address in use"));
    let lanes = person.list_lanes(v1::ListLanesRequest {}).await.unwrap().into_inner().lanes;
    assert_eq!(lanes.iter().map(|lane| lane.name.as_str()).collect::<Vec<_>>(), ["boe-a"]);
    // The port that could not be served is not given out while another is left.
    drop((reports, sets));
    let next = person.create_lane(create("boe-c")).await;
    assert_eq!(next.unwrap().into_inner().lane.unwrap().port, 40_001);
    handle.drain(Duration::from_secs(10)).await.unwrap();
}
