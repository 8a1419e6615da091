//! A session between a client and a broker that answers late, over real sockets and TLS.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::BufMut;
use chassis::certs::CertificateDir;
use chassis::tls::{ClientAuth, ClientTls, ServerTls};
use kafka::cold;
use kafka::messages::metadata_response::MetadataResponseBroker;
use kafka::messages::{MetadataRequest, MetadataResponse};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;

use super::*;

const FETCH_BYTES: usize = 300_000;

/// A broker that answers each request after a while: Metadata with an inner address, anything else with
/// many bytes. Reports the client ids that it was sent.
pub(crate) async fn broker(dir: &std::path::Path) -> (Upstream, mpsc::UnboundedReceiver<String>) {
    let certificates = CertificateDir::open(dir).unwrap();
    let server = certificates.leaf("sealane-broker", &["127.0.0.1"]).unwrap();
    let client = certificates.leaf("sealane-lane-router", &[]).unwrap();
    let tls = ServerTls::server(&server, ClientAuth::Required, &[]).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let (seen, client_ids) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let stream = TlsAcceptor::from(tls.current()).accept(stream).await.unwrap();
            tokio::spawn(answer_all(stream, seen.clone()));
        }
    });
    let upstream =
        Upstream::new(&address, None, ClientTls::client(&client, &[]).unwrap(), Arc::new(Brokers::new(0)));
    let upstream = upstream.unwrap();
    (upstream, client_ids)
}

fn metadata() -> MetadataResponse {
    let inner =
        MetadataResponseBroker::default().with_host(StrBytes::from_static_str("inner")).with_port(9097);
    MetadataResponse::default().with_brokers(vec![inner])
}

async fn answer_all(mut stream: impl AsyncRead + AsyncWrite + Unpin, seen: mpsc::UnboundedSender<String>) {
    while let Ok(length) = stream.read_u32().await {
        let mut frame = vec![0; length as usize];
        stream.read_exact(&mut frame).await.unwrap();
        let mut frame = Bytes::from(frame);
        let header = frame::parse_request_header(&mut frame).unwrap();
        seen.send(header.client_id.as_deref().unwrap_or("").to_owned()).unwrap();
        tokio::time::sleep(Duration::from_millis(20)).await;
        if header.api_key == api::PRODUCE {
            continue; // with acks=0
        }
        let body = match header.api_key {
            3 => cold::encoded(&metadata(), header.api_version).unwrap(),
            _ => Bytes::from(vec![7; FETCH_BYTES]),
        };
        if stream.write_all(&answer_frame(&header, &body)).await.is_err() {
            return;
        }
        stream.flush().await.unwrap();
    }
}

async fn connect(
    upstream: Upstream,
    entry: Entry,
) -> (TcpStream, tokio::task::JoinHandle<Result<(), SessionError>>) {
    let directory = Arc::new(Directory::default());
    directory.replace(&BTreeMap::from([("boe-a".to_owned(), 0), ("boe-b".to_owned(), 0)]));
    let session = Session {
        entry,
        directory,
        upstream,
        host: "router".to_owned(),
        port: 7,
        brokers: Arc::new(Brokers::new(0)),
        shown: Vec::new(),
        unique: "10.0.0.1".to_owned(),
        request_bytes_max: 1 << 20,
        stop: CancellationToken::new(),
    };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    let (accepted, _) = listener.accept().await.unwrap();
    let (reader, writer) = accepted.into_split();
    (client, tokio::spawn(session.run(reader, writer)))
}

fn shared() -> Entry {
    Entry::ClientId { permitted: Vec::new() }
}

pub(crate) async fn ask(
    client: &mut (impl AsyncWrite + Unpin),
    key: i16,
    version: i16,
    id: i32,
    client_id: &str,
    body: &[u8],
) {
    let client_id = Some(StrBytes::from_string(client_id.to_owned()));
    let header = RequestHeader { api_key: key, api_version: version, correlation_id: id, client_id };
    write_request(client, &header, body).await.unwrap();
    client.flush().await.unwrap();
}

async fn answered(client: &mut TcpStream) -> (i32, usize) {
    let length = client.read_u32().await.unwrap() as usize;
    let mut frame = vec![0; length];
    client.read_exact(&mut frame).await.unwrap();
    (i32::from_be_bytes(frame[..4].try_into().unwrap()), length)
}

/// A produce with acks=0, which nobody answers.
fn silent_produce() -> Vec<u8> {
    let mut body = BytesMut::new();
    body.put_i16(-1); // no transaction
    body.put_i16(0);
    body.put_i32(1000);
    body.put_i32(0);
    body.to_vec()
}

#[tokio::test]
async fn answers_leave_in_the_order_of_the_requests_that_have_one() {
    let dir = tempfile::tempdir().unwrap();
    let (upstream, mut client_ids) = broker(dir.path()).await;
    let lane = Lane::parse("boe-a").unwrap();
    let (mut client, session) = connect(upstream, Entry::Lane(lane)).await;
    let metadata = cold::encoded(&MetadataRequest::default(), 1).unwrap();
    ask(&mut client, 1, 4, 1, "me", &[0; 20]).await;
    ask(&mut client, 0, 3, 2, "me", &silent_produce()).await;
    ask(&mut client, 3, 1, 3, "me", &metadata).await;
    ask(&mut client, 1, 4, 4, "me", &[0; 100_000]).await;
    let mut order = Vec::new();
    for _ in 0..3 {
        order.push(answered(&mut client).await);
    }
    assert_eq!(order.iter().map(|o| o.0).collect::<Vec<_>>(), [1, 3, 4]);
    assert_eq!((order[0].1, order[2].1), (FETCH_BYTES + 4, FETCH_BYTES + 4));
    for _ in 0..4 {
        assert_eq!(client_ids.recv().await.unwrap(), "me@boe-a#10.0.0.1");
    }
    drop(client);
    assert!(session.await.unwrap().is_ok());
}

#[tokio::test]
async fn the_shared_port_finds_the_lane_in_the_client_id_and_keeps_the_connection_in_it() {
    let dir = tempfile::tempdir().unwrap();
    let (upstream, mut client_ids) = broker(dir.path()).await;
    let (mut client, session) = connect(upstream.clone(), shared()).await;
    ask(&mut client, 1, 4, 1, "me@boe-a", &[0; 20]).await;
    assert_eq!(answered(&mut client).await.0, 1);
    assert_eq!(client_ids.recv().await.unwrap(), "me@boe-a#10.0.0.1");
    ask(&mut client, 1, 4, 2, "me@boe-b", &[0; 20]).await;
    assert!(matches!(session.await.unwrap(), Err(SessionError::Refused(_))));
    for stranger in ["me", "me@boe-z", "me@ppe-a"] {
        let (mut client, session) = connect(upstream.clone(), shared()).await;
        ask(&mut client, 1, 4, 1, stranger, &[0; 20]).await;
        assert!(matches!(session.await.unwrap(), Err(SessionError::Lane(_))), "{stranger}");
    }
    assert!(client_ids.try_recv().is_err(), "nothing of a stranger reaches the broker");
    let permitted = vec![Lane::parse("boe-b").unwrap(), Lane::parse("boe-c").unwrap()];
    let (mut client, session) = connect(upstream, Entry::ClientId { permitted }).await;
    ask(&mut client, 1, 4, 1, "me@boe-a", &[0; 20]).await;
    assert!(matches!(session.await.unwrap(), Err(SessionError::Entry(_))), "its certificate is for others");
}
