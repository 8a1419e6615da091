//! Frames over QUIC: this file and its folder alone know quinn.
//!
//! A session is one connection: a control stream and a fixed set of data streams each way, all
//! uni-directional and as long-lived as the connection. Both ends show certificates; nothing is
//! resumed and nothing is sent in 0-RTT, so every connection checks the peer's chain anew. Each wait
//! on the transport has a deadline, and a session ends with one line that says why.

mod congestion;

use std::any::Any;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use bytes::{Bytes, BytesMut};
use chassis::tls::{Authorities, ClientAuth, ClientTls, PeerIdentity, ServerTls, TlsError, TlsFiles};
use kafka::private::Congestion;
use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use quinn::{AckFrequencyConfig, ConnectionError, Endpoint, EndpointConfig, TransportConfig, VarInt};
use rustls_pki_types::CertificateDer;
use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::lookup_host;
use tokio::sync::{Notify, mpsc};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tracing::info;
use x509_parser::prelude::{FromDer, X509Certificate};

use congestion::Choice;

use crate::link::{
    CONTROL_BYTES_MAX, Frame, LinkErrorCode, Packer, UNIT_FRAME_BYTES_MAX, UnitFrame, take_body,
};

/// What both ends of a link speak.
pub const ALPN: &[u8] = b"sealane-link";
/// Data streams that a sender opens if the peer allows so many.
pub const DATA_STREAMS: usize = 16;
/// The common name that a mirror's certificate carries.
pub const COMMON_NAME: &str = "sealane-mirror";

/// The UDP endpoint of a mirror: dials and accepts.
pub struct Net {
    endpoint: Endpoint,
    server: Arc<ServerTls>,
    client: Arc<ClientTls>,
    options: NetOptions,
}

/// How the transport behaves.
#[derive(Clone, Debug)]
pub struct NetOptions {
    pub streams_max: u32,
    pub receive_window: u64,
}

#[derive(Debug, thiserror::Error)]
pub enum NetError {
    #[error("UDP address {address} cannot be used: {source}")]
    Bind { address: SocketAddr, source: std::io::Error },
    #[error(transparent)]
    Tls(#[from] TlsError),
    #[error("certificates do not fit QUIC: {0}")]
    Quic(String),
    #[error("{address}: {reason}")]
    Peer { address: String, reason: String },
}

/// A connection attempt of a peer.
pub struct Incoming {
    incoming: quinn::Incoming,
    config: Arc<quinn::ServerConfig>,
    congestion: Choice,
}

/// What comes from a session.
#[derive(Debug)]
pub enum NetEvent {
    Frame(Frame),
    Unit(UnitFrame),
    /// The peer sent what is no frame.
    Garbage(String),
    /// The connection is over; the text says why.
    Closed(String),
}

/// One connection to a peer. Dropping it closes the connection.
pub struct Session {
    connection: quinn::Connection,
    pub dialled: bool,
    control: mpsc::Sender<Bytes>,
    data: Vec<mpsc::Sender<UnitFrame>>,
    events: mpsc::Receiver<NetEvent>,
    room: Arc<Notify>,
    traffic: Arc<Traffic>,
    congestion: Choice,
    tasks: JoinSet<()>,
    /// When the peer's certificate ends.
    pub expires_in: Option<Duration>,
    /// The peer's certificate and what came with it.
    chain: Vec<CertificateDer<'static>>,
}

#[derive(Default)]
struct Traffic {
    sent: AtomicU64,
    received: AtomicU64,
}

impl Net {
    /// Binds the address; must be called inside a tokio runtime.
    pub fn bind(address: SocketAddr, tls: &TlsFiles, options: &NetOptions) -> Result<Net, NetError> {
        let server = ServerTls::server(tls, ClientAuth::Required, &[ALPN])?;
        let client = ClientTls::client(tls, &[ALPN])?;
        // Of no connection: each has its own, see `accept`.
        let config = server_config(&server, transport(options, Choice::default()))?;
        let socket = socket(address).map_err(|source| NetError::Bind { address, source })?;
        let runtime = Arc::new(quinn::TokioRuntime);
        let endpoint = Endpoint::new(EndpointConfig::default(), Some(config), socket, runtime)
            .map_err(|source| NetError::Bind { address, source })?;
        Ok(Net { endpoint, server, client, options: options.clone() })
    }

    pub fn local_addr(&self) -> std::io::Result<SocketAddr> {
        self.endpoint.local_addr()
    }

    /// The settings that follow the certificate files.
    pub fn tls(&self) -> (&Arc<ServerTls>, &Arc<ClientTls>) {
        (&self.server, &self.client)
    }

    /// Connects to a peer: handshake and streams. It must be of the authorities of `tls`, where that is given.
    pub async fn dial(
        &self,
        address: &str,
        server_name: Option<&str>,
        tls: Option<&ClientTls>,
    ) -> Result<Session, NetError> {
        let fail = |reason: String| NetError::Peer { address: address.to_owned(), reason };
        let remote = lookup_host(address)
            .await
            .map_err(|error| fail(format!("cannot be resolved: {error}")))?
            .next()
            .ok_or_else(|| fail("has no address".to_owned()))?;
        let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
        let name = server_name.unwrap_or(host.trim_matches(['[', ']']));
        let mut tls = (*tls.unwrap_or(&self.client).current()).clone();
        tls.resumption = rustls::client::Resumption::disabled();
        tls.enable_early_data = false;
        let tls = QuicClientConfig::try_from(tls).map_err(|error| NetError::Quic(error.to_string()))?;
        let mut config = quinn::ClientConfig::new(Arc::new(tls));
        let congestion = Choice::default();
        config.transport_config(transport(&self.options, congestion.clone()));
        let connecting =
            self.endpoint.connect_with(config, remote, name).map_err(|error| fail(error.to_string()))?;
        let connection = timeout(HANDSHAKE, connecting)
            .await
            .map_err(|_| fail(format!("no answer within {} s", HANDSHAKE.as_secs())))?
            .map_err(|error| fail(explain(&error)))?;
        Session::start(connection, congestion, true).await.map_err(fail)
    }

    /// The next connection attempt; `None` when the endpoint is closed.
    pub async fn accept(&self) -> Option<Result<Incoming, NetError>> {
        let incoming = self.endpoint.accept().await?;
        // Taken anew each time, so that renewed certificates are shown at once.
        let congestion = Choice::default();
        let config = server_config(&self.server, transport(&self.options, congestion.clone()));
        Some(config.map(|config| Incoming { incoming, config: Arc::new(config), congestion }))
    }

    /// Closes all connections and waits a moment for the peers to hear of it.
    pub async fn close(&self) {
        self.endpoint.close(code(LinkErrorCode::Stopping), b"the mirror stops");
        let _ = timeout(CLOSE_WAIT, self.endpoint.wait_idle()).await;
    }
}

impl Incoming {
    pub fn address(&self) -> SocketAddr {
        self.incoming.remote_address()
    }

    /// Handshake, streams, and who it is.
    pub async fn finish(self) -> Result<Session, String> {
        let connecting = self.incoming.accept_with(self.config).map_err(|error| explain(&error))?;
        let connection = timeout(HANDSHAKE, connecting)
            .await
            .map_err(|_| format!("the handshake took longer than {} s", HANDSHAKE.as_secs()))?
            .map_err(|error| explain(&error))?;
        Session::start(connection, self.congestion, false).await
    }
}

impl Session {
    async fn start(
        connection: quinn::Connection,
        congestion: Choice,
        dialled: bool,
    ) -> Result<Session, String> {
        let chain = peer_chain(&connection);
        let certificate = chain.first().cloned();
        let identity = certificate.as_ref().and_then(PeerIdentity::of);
        let name = identity.and_then(|identity| identity.common_name).unwrap_or_default();
        if name != COMMON_NAME {
            let reason = format!("the peer's certificate is for {name:?}, a mirror's is for {COMMON_NAME:?}");
            connection.close(code(LinkErrorCode::WrongPeer), reason.as_bytes());
            return Err(reason);
        }
        let control = timeout(OPEN, connection.open_uni())
            .await
            .map_err(|_| "the peer allows no stream".to_owned())?
            .map_err(|error| explain(&error))?;
        control.set_priority(CONTROL_PRIORITY).map_err(|_| "the control stream closed".to_owned())?;
        let mut streams = Vec::new();
        while streams.len() < DATA_STREAMS {
            // What the peer allows is known since the handshake: these open at once or not at all.
            match timeout(OPEN_MORE, connection.open_uni()).await {
                Ok(stream) => streams.push(stream.map_err(|error| explain(&error))?),
                Err(_) => break,
            }
        }
        if streams.is_empty() {
            return Err("the peer allows one stream only, a link needs two".to_owned());
        }
        let (events, receiver) = mpsc::channel(EVENTS_MAX);
        let (room, traffic) = (Arc::new(Notify::new()), Arc::new(Traffic::default()));
        let mut tasks = JoinSet::new();
        let (control_out, frames) = mpsc::channel(CONTROL_QUEUE);
        tasks.spawn(write_control(control, frames, events.clone()));
        let mut data = Vec::new();
        for stream in streams {
            let (out, units) = mpsc::channel(DATA_QUEUE);
            tasks.spawn(write_data(stream, units, room.clone(), traffic.clone(), events.clone()));
            data.push(out);
        }
        tasks.spawn(accept_streams(connection.clone(), traffic.clone(), events));
        let expires_in = certificate.as_ref().and_then(expires_in);
        let events = receiver;
        Ok(Session {
            connection,
            dialled,
            control: control_out,
            data,
            events,
            room,
            traffic,
            congestion,
            tasks,
            expires_in,
            chain,
        })
    }

    /// Whether one of these authorities has signed the peer's certificate; else why not.
    pub fn is_of(&self, authorities: &Authorities) -> Result<(), String> {
        authorities.vouch(&self.chain)
    }

    pub fn streams(&self) -> usize {
        self.data.len()
    }

    pub fn address(&self) -> SocketAddr {
        self.connection.remote_address()
    }

    pub fn rtt(&self) -> Duration {
        self.connection.rtt()
    }

    /// Bytes of unit frames on the wire, sent and received.
    pub fn traffic(&self) -> (u64, u64) {
        (self.traffic.sent.load(Ordering::Relaxed), self.traffic.received.load(Ordering::Relaxed))
    }

    /// What decides how fast this side sends, from the next packet on.
    pub fn set_congestion(&self, congestion: Congestion) {
        self.congestion.set(congestion);
    }

    /// The next event. Cancel safe.
    pub async fn next(&mut self) -> NetEvent {
        self.events.recv().await.unwrap_or_else(|| NetEvent::Closed("the connection ended".to_owned()))
    }

    /// An event that is there already.
    pub fn try_next(&mut self) -> Option<NetEvent> {
        self.events.try_recv().ok()
    }

    /// Sends control frames. False when the peer has not read the earlier ones for too long.
    pub fn send_control(&self, frames: Bytes) -> bool {
        self.control.try_send(frames).is_ok()
    }

    /// Sends the unit that `take` gives, if the stream has room.
    pub fn send_unit(&self, stream: usize, take: impl FnOnce() -> Option<UnitFrame>) -> bool {
        let Ok(permit) = self.data[stream].try_reserve() else { return false };
        match take() {
            Some(unit) => {
                permit.send(unit);
                true
            }
            None => false,
        }
    }

    /// Notified when a data stream that was full has room again.
    pub fn room(&self) -> Arc<Notify> {
        self.room.clone()
    }

    /// Lets what is queued on the control stream leave, then closes.
    pub async fn close(mut self, why: LinkErrorCode, text: &str) {
        let (gone, _) = mpsc::channel(1);
        drop(std::mem::replace(&mut self.control, gone));
        // The control writer finishes its stream and waits for the peer to have it; the connection
        // may be dead already, so not for long.
        let _ = timeout(CLOSE_WAIT, async {
            while let Some(event) = self.events.recv().await {
                if matches!(event, NetEvent::Closed(_)) {
                    break;
                }
            }
        })
        .await;
        self.connection.close(code(why), text.as_bytes());
        self.tasks.abort_all();
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // A no-op when it was closed with a reason before.
        self.connection.close(code(LinkErrorCode::Stopping), b"");
    }
}

async fn write_control(
    mut stream: quinn::SendStream,
    mut frames: mpsc::Receiver<Bytes>,
    events: mpsc::Sender<NetEvent>,
) {
    let work = async {
        put(&mut stream, Bytes::from_static(&[TAG_CONTROL])).await?;
        while let Some(bytes) = frames.recv().await {
            put(&mut stream, bytes).await?;
        }
        let _ = stream.finish();
        let _ = stream.stopped().await;
        Ok::<(), String>(())
    };
    let end = work.await.err().unwrap_or_else(|| "it was closed here".to_owned());
    let _ = events.send(NetEvent::Closed(end)).await;
}

async fn write_data(
    mut stream: quinn::SendStream,
    mut units: mpsc::Receiver<UnitFrame>,
    room: Arc<Notify>,
    traffic: Arc<Traffic>,
    events: mpsc::Sender<NetEvent>,
) {
    let work = async {
        put(&mut stream, Bytes::from_static(&[TAG_DATA])).await?;
        let mut packer = Packer::default();
        while let Some(unit) = units.recv().await {
            room.notify_one();
            let (head, payload) = unit.encode(&mut packer);
            let len = (head.len() + payload.len()) as u64;
            put(&mut stream, head).await?;
            put(&mut stream, payload).await?;
            traffic.sent.fetch_add(len, Ordering::Relaxed);
        }
        Ok::<(), String>(())
    };
    if let Err(reason) = work.await {
        let _ = events.send(NetEvent::Closed(reason)).await;
    }
}

async fn put(stream: &mut quinn::SendStream, bytes: Bytes) -> Result<(), String> {
    match timeout(WRITE_STALL, stream.write_chunk(bytes)).await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(quinn::WriteError::ConnectionLost(error))) => Err(explain(&error)),
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err(format!("the peer took no data for {} s", WRITE_STALL.as_secs())),
    }
}

async fn accept_streams(
    connection: quinn::Connection,
    traffic: Arc<Traffic>,
    events: mpsc::Sender<NetEvent>,
) {
    let mut readers = JoinSet::new();
    let has_control = Arc::new(AtomicBool::new(false));
    // Each in its own task: the tag of one stream may come after the data of the next.
    let end = loop {
        match connection.accept_uni().await {
            Ok(stream) => {
                readers.spawn(read_stream(stream, has_control.clone(), traffic.clone(), events.clone()));
            }
            Err(error) => break explain(&error),
        }
    };
    let _ = events.send(NetEvent::Closed(end)).await;
}

async fn read_stream(
    mut stream: quinn::RecvStream,
    has_control: Arc<AtomicBool>,
    traffic: Arc<Traffic>,
    events: mpsc::Sender<NetEvent>,
) {
    let mut tag = [0];
    let garbage = match (timeout(HANDSHAKE, stream.read_exact(&mut tag)).await, tag[0]) {
        (Ok(Ok(())), TAG_CONTROL) if !has_control.swap(true, Ordering::Relaxed) => {
            return read_control(stream, events).await;
        }
        (Ok(Ok(())), TAG_DATA) => return read_data(stream, traffic, events).await,
        (Ok(Ok(())), TAG_CONTROL) => "the peer opened a second control stream".to_owned(),
        (Ok(Ok(())), other) => format!("the peer opened a stream of kind {other}"),
        // The connection's own end is reported by `accept_streams`.
        (Ok(Err(_)), _) => return,
        (Err(_), _) => "the peer opened a stream and said nothing on it".to_owned(),
    };
    let _ = events.send(NetEvent::Garbage(garbage)).await;
}

async fn read_control(stream: quinn::RecvStream, events: mpsc::Sender<NetEvent>) {
    let read = |body| Frame::read(body).map(NetEvent::Frame);
    read_frames(stream, CONTROL_BYTES_MAX, &events, None, read).await;
}

async fn read_data(stream: quinn::RecvStream, traffic: Arc<Traffic>, events: mpsc::Sender<NetEvent>) {
    let read = |body| UnitFrame::decode(body).map(NetEvent::Unit);
    read_frames(stream, UNIT_FRAME_BYTES_MAX, &events, Some(&traffic), read).await;
}

async fn read_frames(
    mut stream: quinn::RecvStream,
    bytes_max: usize,
    events: &mpsc::Sender<NetEvent>,
    traffic: Option<&Traffic>,
    read: impl Fn(Bytes) -> Result<NetEvent, kafka::wire::WireError>,
) {
    let mut buffer = BytesMut::new();
    // A chunk is what a packet brought: many are taken in one turn.
    let mut chunks = [const { Bytes::new() }; CHUNKS];
    loop {
        let event = match take_body(&mut buffer, bytes_max) {
            Ok(None) => match stream.read_chunks(&mut chunks).await {
                Ok(Some(count)) => {
                    let before = buffer.len();
                    for chunk in &mut chunks[..count] {
                        buffer.extend_from_slice(&std::mem::take(chunk));
                    }
                    if let Some(traffic) = traffic {
                        traffic.received.fetch_add((buffer.len() - before) as u64, Ordering::Relaxed);
                    }
                    if missing(&buffer) > PATIENT_BYTES {
                        tokio::time::sleep(PATIENCE).await;
                    }
                    continue;
                }
                // The connection's own end is reported by `accept_streams`.
                Ok(None) | Err(_) => return,
            },
            Ok(Some(body)) => read(body),
            Err(error) => Err(error),
        };
        let (event, over) = match event {
            Ok(event) => (event, false),
            Err(error) => (NetEvent::Garbage(format!("the peer sent what is no frame: {error}")), true),
        };
        if events.send(event).await.is_err() || over {
            return;
        }
    }
}

/// Bytes of the frame at the front that are still to come, as far as its length is known.
fn missing(buffer: &BytesMut) -> usize {
    let frame = buffer.first_chunk::<4>().map_or(0, |len| 4 + u32::from_be_bytes(*len) as usize);
    frame.saturating_sub(buffer.len())
}

fn peer_chain(connection: &quinn::Connection) -> Vec<CertificateDer<'static>> {
    let chain: Option<Box<dyn Any>> = connection.peer_identity();
    let chain = chain.and_then(|chain| chain.downcast::<Vec<CertificateDer<'static>>>().ok());
    chain.map(|chain| *chain).unwrap_or_default()
}

fn expires_in(certificate: &CertificateDer<'static>) -> Option<Duration> {
    let (_, parsed) = X509Certificate::from_der(certificate).ok()?;
    let last = u64::try_from(parsed.validity().not_after.timestamp()).ok()?;
    // The last second that a certificate names is still its own.
    let end = SystemTime::UNIX_EPOCH + Duration::from_secs(last.saturating_add(1));
    Some(end.duration_since(SystemTime::now()).unwrap_or(Duration::ZERO))
}

/// One line for a person.
fn explain(error: &ConnectionError) -> String {
    const CRYPTO: std::ops::Range<u64> = 0x100..0x200;
    match error {
        ConnectionError::TransportError(e) if CRYPTO.contains(&u64::from(e.code)) => {
            format!("the peer's certificate is refused: {}", e.reason)
        }
        ConnectionError::ConnectionClosed(e) if CRYPTO.contains(&u64::from(e.error_code)) => {
            let alert = u64::from(e.error_code) - CRYPTO.start;
            let reason = String::from_utf8_lossy(&e.reason);
            format!("the peer refuses this mirror's certificate (TLS alert {alert}): {reason}")
        }
        ConnectionError::ApplicationClosed(e) => {
            let reason = String::from_utf8_lossy(&e.reason);
            format!("the peer closed the connection: {reason}")
        }
        ConnectionError::TimedOut => "nothing was heard from the peer for too long".to_owned(),
        ConnectionError::LocallyClosed => "it was closed here".to_owned(),
        other => other.to_string(),
    }
}

fn code(why: LinkErrorCode) -> VarInt {
    VarInt::from_u32(why as u32)
}

fn server_config(tls: &ServerTls, transport: Arc<TransportConfig>) -> Result<quinn::ServerConfig, NetError> {
    let tls = QuicServerConfig::try_from(tls.current()).map_err(|error| NetError::Quic(error.to_string()))?;
    let mut config = quinn::ServerConfig::with_crypto(Arc::new(tls));
    config.transport_config(transport);
    Ok(config)
}

fn transport(options: &NetOptions, congestion: Choice) -> Arc<TransportConfig> {
    let mut config = TransportConfig::default();
    let var = |n: u64| VarInt::from_u64(n).unwrap_or(VarInt::MAX);
    // An acknowledgement costs both ends nearly what a packet of data does, and by default there is one
    // for every two.
    let mut acks = AckFrequencyConfig::default();
    acks.ack_eliciting_threshold(VarInt::from_u32(PACKETS_PER_ACK - 1));
    config
        .max_concurrent_uni_streams(VarInt::from_u32(options.streams_max))
        .max_concurrent_bidi_streams(VarInt::from_u32(0))
        .keep_alive_interval(Some(KEEP_ALIVE))
        .max_idle_timeout(Some(VarInt::from_u32(IDLE.as_millis() as u32).into()))
        // A stream with more than about 1,000 gaps kills the whole connection, so no larger.
        .stream_receive_window(var(STREAM_WINDOW))
        .receive_window(var(options.receive_window))
        .send_window(options.receive_window)
        .datagram_receive_buffer_size(None)
        .ack_frequency_config(Some(acks))
        .congestion_controller_factory(Arc::new(congestion));
    Arc::new(config)
}

fn socket(address: SocketAddr) -> std::io::Result<std::net::UdpSocket> {
    let socket = Socket::new(Domain::for_address(address), Type::DGRAM, Some(Protocol::UDP))?;
    // As far as the system allows; a smaller buffer costs speed, not safety.
    let _ = socket.set_recv_buffer_size(UDP_BUFFER);
    let _ = socket.set_send_buffer_size(UDP_BUFFER);
    socket.bind(&address.into())?;
    let (receive, send) = (socket.recv_buffer_size()?, socket.send_buffer_size()?);
    info!(%address, receive, send, "UDP socket bound; segmentation offload is used where the system has it");
    Ok(socket.into())
}

const TAG_CONTROL: u8 = 0;
const TAG_DATA: u8 = 1;
const CONTROL_PRIORITY: i32 = 10;
const HANDSHAKE: Duration = Duration::from_secs(10);
const OPEN: Duration = Duration::from_secs(5);
const OPEN_MORE: Duration = Duration::from_millis(100);
const WRITE_STALL: Duration = Duration::from_secs(30);
const CLOSE_WAIT: Duration = Duration::from_millis(500);
const KEEP_ALIVE: Duration = Duration::from_secs(5);
const IDLE: Duration = Duration::from_secs(20);
const STREAM_WINDOW: u64 = 2 << 20;
const UDP_BUFFER: usize = 4 << 20;
const CHUNKS: usize = 64;
/// A frame that lacks more than this lacks many packets, and each of them would wake its reader: it looks
/// again after a moment instead, far below what a stream's window holds.
const PATIENT_BYTES: usize = 32 * 1024;
const PATIENCE: Duration = Duration::from_millis(1);
/// Packets that a peer may receive before it must acknowledge.
const PACKETS_PER_ACK: u32 = 10;
const EVENTS_MAX: usize = 256;
const CONTROL_QUEUE: usize = 256;
const DATA_QUEUE: usize = 4;
