//! A router with TLS towards clients, rustls clients, and a broker that reports in which lane they are.

use std::path::Path;

use chassis::certs::CertificateDir;
use chassis::tls::TlsFiles;
use kafka::messages::{MetadataRequest, MetadataResponse};
use kafka::{cold, frame};
use rustls::pki_types::ServerName;
use test_ports::Ports;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::mpsc::UnboundedReceiver;
use tokio_rustls::TlsConnector;

use super::*;
use crate::session::tests::{ask, broker};

const DOMAIN: &str = "lanes.test";
/// No lane's name, though it is in the server's certificate.
const PLAIN_HOST: &str = "router.test";

struct Secured {
    router: Arc<Router>,
    client_ids: UnboundedReceiver<String>,
    certificates: CertificateDir,
    ca: std::path::PathBuf,
    shared: u16,
    /// A broker's port is so many above another: all of them lie in one block that is ours alone.
    ports: Ports,
}

type Client = tokio_rustls::client::TlsStream<TcpStream>;

fn config(dir: &Path) -> (Config, CertificateDir) {
    let certificates = CertificateDir::open(&dir.join("clients")).unwrap();
    let wildcard = format!("*.{DOMAIN}");
    let server = certificates.leaf("router", &["127.0.0.1", PLAIN_HOST, &wildcard]).unwrap();
    let config = Config {
        tls: server.clone(),
        client_tls: Some(server),
        client_auth: ClientAuth::Optional,
        lane_domain: DOMAIN.to_owned(),
        ..Config::default()
    };
    (config, certificates)
}

fn free_port() -> u16 {
    test_ports::free_port().unwrap()
}

impl Secured {
    async fn start(dir: &Path, change: impl FnOnce(&mut Config)) -> Secured {
        let (mut config, certificates) = config(dir);
        change(&mut config);
        let ca = config.client_tls.as_ref().unwrap().ca.clone().unwrap();
        let (upstream, client_ids) = broker(&dir.join("broker")).await;
        let ports = Ports::take().unwrap();
        let listener = TcpListener::bind(("127.0.0.1", ports.base)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let service = ServiceHandle::standalone("lane-router");
        let mut router = Router::new(config, &service, address).unwrap();
        let of_router = Arc::get_mut(&mut router).unwrap();
        of_router.upstream = upstream.with(of_router.brokers.clone());
        let accepting = router.clone();
        tokio::spawn(async move {
            let purpose = Purpose { lane: None, base: address.port(), broker: None };
            accepting.accept(listener, purpose, CancellationToken::new()).await
        });
        Secured { router, client_ids, certificates, ca, shared: address.port(), ports }
    }

    async fn serve(&self, lanes: &[(&str, u16)]) {
        let lane = |(name, port): &(&str, u16)| v1::Lane {
            name: (*name).to_owned(),
            port: u32::from(*port),
            ..v1::Lane::default()
        };
        self.router.serve_set(&v1::LaneSet { generation: 1, lanes: lanes.iter().map(lane).collect() }).await;
    }

    async fn connect(&self, port: u16, host: &str, identity: Option<&TlsFiles>) -> std::io::Result<Client> {
        let tls = match identity {
            Some(files) => ClientTls::client(files, &[]),
            None => ClientTls::anonymous(&self.ca, &[]),
        };
        let name = ServerName::try_from(host.to_owned()).unwrap();
        let stream = TcpStream::connect(("127.0.0.1", port)).await?;
        TlsConnector::from(tls.unwrap().current()).connect(name, stream).await
    }

    /// The client id by which the broker hears of a client; `None`: it is cut off.
    async fn forwarded(&mut self, mut client: Client, client_id: &str) -> Option<String> {
        ask(&mut client, 1, 4, 1, client_id, &[0; 20]).await;
        let mut byte = [0];
        let heard = tokio::select! {
            heard = self.client_ids.recv() => heard,
            read = client.read(&mut byte) => match read {
                Ok(0) | Err(_) => None,
                Ok(_) => self.client_ids.recv().await,
            },
        };
        heard.map(|id| id.split('#').next().unwrap().to_owned())
    }
}

#[tokio::test]
async fn the_lane_is_in_the_certificate_else_in_the_host_name_else_in_the_port_else_in_the_client_id() {
    let dir = tempfile::tempdir().unwrap();
    let mut secured = Secured::start(dir.path(), |_| {}).await;
    let ports = [free_port(), free_port(), free_port(), free_port()];
    let lanes = ["boe-a", "boe-b", "boe-c", "ppe-x"];
    let set: Vec<(&str, u16)> = lanes.into_iter().zip(ports).collect();
    secured.serve(&set).await;
    assert!(secured.router.failures.lock().is_empty(), "a port was taken meanwhile");
    let (shared, of_c) = (secured.shared, ports[2]);
    let leaf = |name: &str, more: &[&str]| secured.certificates.leaf(name, more).unwrap();
    let of_a = leaf("boe-a.lanes.test", &[]);
    let of_two = leaf("two.test", &["boe-a.lanes.test", "ppe-x.lanes.test"]);
    let of_nobody = leaf("workload.test", &[]);
    let of_unknown = leaf("boe-z.lanes.test", &[]);
    let sni_b = "boe-b.lanes.test";
    let cases = [
        (Some(&of_a), sni_b, of_c, "me", Some("me@boe-a")),
        (Some(&of_a), PLAIN_HOST, shared, "me@boe-c", Some("me@boe-c@boe-a")),
        (Some(&of_nobody), sni_b, of_c, "me", Some("me@boe-b")),
        (None, sni_b, shared, "me", Some("me@boe-b")),
        (None, "ppe-x.lanes.test", shared, "me", Some("me@ppe-x")),
        (None, PLAIN_HOST, of_c, "me", Some("me@boe-c")),
        (None, PLAIN_HOST, shared, "me@boe-c", Some("me@boe-c")),
        // A certificate of two lanes, and what says which.
        (Some(&of_two), "ppe-x.lanes.test", shared, "me", Some("me@ppe-x")),
        (Some(&of_two), PLAIN_HOST, shared, "me@boe-a", Some("me@boe-a")),
        (Some(&of_two), sni_b, shared, "me", None),
        (Some(&of_two), PLAIN_HOST, of_c, "me", None),
        (Some(&of_two), PLAIN_HOST, shared, "me@boe-c", None),
        // Without a lane nobody gets anywhere.
        (Some(&of_nobody), PLAIN_HOST, shared, "me", None),
        (Some(&of_unknown), PLAIN_HOST, of_c, "me", None),
        (None, "boe-z.lanes.test", of_c, "me", None),
        (None, PLAIN_HOST, shared, "me@ppe-x", None),
    ];
    for (identity, host, port, client_id, right) in cases {
        let client = secured.connect(port, host, identity).await.unwrap();
        let heard = secured.forwarded(client, client_id).await;
        let named = identity.map(|files| files.cert.clone());
        assert_eq!(heard.as_deref(), right, "{named:?} {host} {port} {client_id}");
    }
}

#[tokio::test]
async fn clients_are_told_the_host_name_that_keeps_them_in_their_lane_and_cut_off_when_it_goes() {
    let dir = tempfile::tempdir().unwrap();
    let mut secured = Secured::start(dir.path(), |_| {}).await;
    secured.serve(&[("boe-a", 0), ("boe-b", 0)]).await;
    let told = async |client: &mut Client| {
        ask(client, 3, 1, 1, "me", &cold::encoded(&MetadataRequest::default(), 1).unwrap()).await;
        let length = client.read_u32().await? as usize;
        let mut answer = vec![0; length];
        client.read_exact(&mut answer).await?;
        let mut answer = bytes::Bytes::from(answer);
        frame::parse_response_header(&mut answer, 3, 1).unwrap();
        let told: MetadataResponse = cold::decode_any_size(1, answer).unwrap();
        Ok::<_, std::io::Error>((told.brokers[0].host.to_string(), told.brokers[0].port))
    };
    let port = i32::from(secured.shared);
    let mut of_b = secured.connect(secured.shared, "boe-b.lanes.test", None).await.unwrap();
    assert_eq!(told(&mut of_b).await.unwrap(), ("boe-b.lanes.test".to_owned(), port));
    let identity = secured.certificates.leaf("boe-a.lanes.test", &[]).unwrap();
    let mut of_a = secured.connect(secured.shared, PLAIN_HOST, Some(&identity)).await.unwrap();
    assert_eq!(told(&mut of_a).await.unwrap(), ("127.0.0.1".to_owned(), port));

    secured.serve(&[("boe-b", 0)]).await;
    assert!(matches!(of_a.read(&mut [0]).await, Ok(0) | Err(_)), "its lane has gone");
    assert!(told(&mut of_b).await.is_ok());
    secured.client_ids.close();
}

#[tokio::test]
async fn each_broker_of_a_cluster_is_reached_at_a_port_of_its_own_in_every_lane() {
    let dir = tempfile::tempdir().unwrap();
    let mut secured = Secured::start(dir.path(), |config| config.broker_port_step = 7).await;
    let (other, mut ids_of_other) = broker(&dir.path().join("broker")).await;
    let address = |upstream: &Upstream| upstream.bootstrap()[0].to_string();
    let known = [(1, address(&secured.router.upstream)), (4, address(&other))];
    secured.router.brokers.replace(known.into());
    let lane_port = secured.ports.base + 1;
    secured.serve(&[("boe-a", lane_port)]).await;
    secured.router.lead_to_brokers().await;
    let failures: Vec<_> =
        secured.router.leading.lock().values().filter_map(|leading| leading.failure.clone()).collect();
    assert!(failures.is_empty(), "a port was taken meanwhile: {failures:?}");
    for (base, client_id, forwarded) in
        [(lane_port, "me", "me@boe-a"), (secured.shared, "it@boe-a", "it@boe-a")]
    {
        let mut to_first = secured.connect(base + 7, PLAIN_HOST, None).await.unwrap();
        ask(&mut to_first, 1, 4, 1, client_id, &[0; 20]).await;
        let heard = secured.client_ids.recv().await.unwrap();
        assert_eq!(heard.split('#').next(), Some(forwarded));
        let mut to_other = secured.connect(base + 28, PLAIN_HOST, None).await.unwrap();
        ask(&mut to_other, 1, 4, 1, client_id, &[0; 20]).await;
        let heard = ids_of_other.recv().await.unwrap();
        assert_eq!(heard.split('#').next(), Some(forwarded));
        assert!(secured.client_ids.try_recv().is_err(), "it went to one broker alone");
    }
    // A broker that goes takes its listeners along, and a lane its own.
    secured.router.brokers.replace([(4, address(&other))].into());
    secured.serve(&[]).await;
    secured.router.lead_to_brokers().await;
    let left: Vec<_> = secured.router.leading.lock().keys().cloned().collect();
    assert_eq!(left, [(None, 4)]);
}

#[tokio::test]
async fn who_shows_no_certificate_a_foreign_one_or_no_tls_is_refused_and_the_others_go_on() {
    let dir = tempfile::tempdir().unwrap();
    let mut secured = Secured::start(dir.path(), |config| config.client_auth = ClientAuth::Required).await;
    secured.serve(&[("boe-a", 0)]).await;
    let own = secured.certificates.leaf("boe-a.lanes.test", &[]).unwrap();
    let foreign = CertificateDir::open(&dir.path().join("foreign")).unwrap();
    let foreign = TlsFiles { ca: own.ca.clone(), ..foreign.leaf("boe-a.lanes.test", &[]).unwrap() };
    for identity in [None, Some(&foreign)] {
        // In TLS 1.3 the client hears of it with its first read.
        if let Ok(client) = secured.connect(secured.shared, PLAIN_HOST, identity).await {
            assert_eq!(secured.forwarded(client, "me").await, None);
        }
    }
    let mut plain = TcpStream::connect(("127.0.0.1", secured.shared)).await.unwrap();
    plain.write_all(b"\0\0\0\x0c\0\x12\0\0\0\0\0\x07\xff\xff").await.unwrap();
    let mut alert = Vec::new();
    let _ = plain.read_to_end(&mut alert).await;
    assert!(alert.first().is_none_or(|kind| *kind == 21), "an alert at most: {alert:?}");
    let client = secured.connect(secured.shared, PLAIN_HOST, Some(&own)).await.unwrap();
    assert_eq!(secured.forwarded(client, "me").await.as_deref(), Some("me@boe-a"));
}

#[tokio::test]
async fn what_only_tls_can_show_is_not_asked_of_plain_clients() {
    let dir = tempfile::tempdir().unwrap();
    let address = "127.0.0.1:1".parse().unwrap();
    let refusal = |config: Config| {
        let service = ServiceHandle::standalone("lane-router");
        Router::new(config, &service, address).err().expect("refused").to_string()
    };
    let plain = Config { client_tls: None, ..config(dir.path()).0 };
    let by_domain = refusal(Config { client_auth: ClientAuth::None, ..plain.clone() });
    assert!(by_domain.starts_with("lane_domain needs [client_tls]"), "{by_domain}");
    let by_auth = refusal(Config { lane_domain: String::new(), ..plain });
    assert!(by_auth.starts_with("client_auth needs [client_tls]"), "{by_auth}");
    let mut unchecked = config(dir.path()).0;
    unchecked.client_tls.as_mut().unwrap().ca = None;
    let unchecked = refusal(unchecked);
    assert!(unchecked.starts_with("client_tls: client certificates cannot be checked"), "{unchecked}");
}
