//! One connection: frames out, answers back in order, many requests under way at once.
//!
//! Owns the socket in one task (a write half and a read half); handles are cheap clones. A request
//! that gets no answer in time closes the connection, because the answers behind it could not come
//! either. When the last handle is gone the connection closes.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use chassis::tls::ClientTls;
use kafka::frame::{self, RequestHeader};
use kafka::messages::{ApiVersionsRequest, ApiVersionsResponse};
use kafka::{ErrorCode, StrBytes, api, cold};
use kafka_protocol::protocol::Request;
use rustls_pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use crate::endpoint::Endpoint;
use crate::error::ClientError;

/// How to reach a broker.
#[derive(Clone)]
pub struct ConnectOptions {
    pub client_id: String,
    pub security: Security,
    /// For TCP, TLS and version negotiation together.
    pub connect_timeout: Duration,
    /// From sending a request to its answer.
    pub request_timeout: Duration,
    /// Largest answer that is read.
    pub frame_bytes_max: usize,
    /// Read from the socket at once under TLS, whose library by itself reads 4 KiB: for connections that
    /// carry much. 0 for none of it.
    pub tls_read_bytes: usize,
}

#[derive(Clone, Default)]
pub enum Security {
    #[default]
    Plain,
    /// `server_name` replaces the host of the address in the check of the server's certificate.
    Tls { config: Arc<ClientTls>, server_name: Option<String> },
}

impl Default for ConnectOptions {
    fn default() -> Self {
        ConnectOptions {
            client_id: "sealane".to_owned(),
            security: Security::Plain,
            connect_timeout: Duration::from_secs(10),
            request_timeout: Duration::from_secs(40),
            frame_bytes_max: kafka::limits::REQUEST_BYTES_MAX,
            tls_read_bytes: 0,
        }
    }
}

/// A handle on a connection.
#[derive(Clone)]
pub struct Connection {
    shared: Arc<Shared>,
    outgoing: mpsc::Sender<Outgoing>,
}

struct Shared {
    endpoint: Endpoint,
    request_timeout: Duration,
    ranges: OnceLock<HashMap<i16, (i16, i16)>>,
    closed: AtomicBool,
    reason: OnceLock<String>,
    /// An answer did not come in time: nothing behind it can be trusted to come either.
    give_up: Notify,
}

struct Outgoing {
    api_key: i16,
    api_version: i16,
    body: Vec<Bytes>,
    answer: Option<oneshot::Sender<Bytes>>,
}

/// An answer that is on its way. The connection stays open while it is awaited.
pub struct Answer {
    api_key: i16,
    receiver: oneshot::Receiver<Bytes>,
    connection: Connection,
}

/// Requests whose answers are outstanding; more wait for room.
const IN_FLIGHT_MAX: usize = 256;
/// Pieces below this are gathered into one write.
const GATHER_BYTES: usize = 16 * 1024;

impl Connection {
    /// Connects, and asks which versions the broker speaks.
    pub async fn connect(endpoint: &Endpoint, options: &ConnectOptions) -> Result<Connection, ClientError> {
        let connecting = async {
            let connection = Connection::open(endpoint, options).await?;
            connection.negotiate().await?;
            Ok(connection)
        };
        match timeout(options.connect_timeout, connecting).await {
            Ok(result) => result,
            Err(_) => Err(connect_error(endpoint, "it took too long")),
        }
    }

    async fn open(endpoint: &Endpoint, options: &ConnectOptions) -> Result<Connection, ClientError> {
        let tcp = TcpStream::connect((endpoint.host.as_str(), endpoint.port))
            .await
            .map_err(|error| connect_error(endpoint, error))?;
        tcp.set_nodelay(true).map_err(|error| connect_error(endpoint, error))?;
        match &options.security {
            Security::Plain => Ok(Connection::start_on(tcp, endpoint, options)),
            Security::Tls { config, server_name } => {
                let name = server_name.as_deref().unwrap_or(&endpoint.host).to_owned();
                let name = ServerName::try_from(name).map_err(|error| connect_error(endpoint, error))?;
                // It takes no capacity of 0; a read into more room than it has goes past it.
                let tcp = BufReader::with_capacity(options.tls_read_bytes.max(1), tcp);
                let tls = TlsConnector::from(config.current()).connect(name, tcp).await;
                let tls = tls.map_err(|error| connect_error(endpoint, format!("TLS: {error}")))?;
                Ok(Connection::start_on(tls, endpoint, options))
            }
        }
    }

    fn start_on<S>(stream: S, endpoint: &Endpoint, options: &ConnectOptions) -> Connection
    where
        S: AsyncRead + AsyncWrite + Send + 'static,
    {
        let shared = Arc::new(Shared {
            endpoint: endpoint.clone(),
            request_timeout: options.request_timeout,
            ranges: OnceLock::new(),
            closed: AtomicBool::new(false),
            reason: OnceLock::new(),
            give_up: Notify::new(),
        });
        let (outgoing, requests) = mpsc::channel(IN_FLIGHT_MAX);
        let (read, write) = tokio::io::split(stream);
        let (waiting, answers) = mpsc::channel(IN_FLIGHT_MAX);
        let client_id = StrBytes::from_string(options.client_id.clone());
        let frame_bytes_max = options.frame_bytes_max;
        let task = shared.clone();
        tokio::spawn(async move {
            let reason = tokio::select! {
                reason = write_requests(write, requests, waiting, client_id) => reason,
                reason = read_answers(read, answers, frame_bytes_max) => reason,
                () = task.give_up.notified() => "an answer did not come in time, or is not waited for".to_owned(),
            };
            let _ = task.reason.set(reason);
            task.closed.store(true, Ordering::Release);
        });
        Connection { shared, outgoing }
    }

    async fn negotiate(&self) -> Result<(), ClientError> {
        let request = ApiVersionsRequest::default()
            .with_client_software_name(StrBytes::from_static_str("sealane"))
            .with_client_software_version(StrBytes::from_static_str(env!("CARGO_PKG_VERSION")));
        let body = cold::encoded(&request, 3)?;
        let mut version = 3;
        let mut answer = self.send(api::API_VERSIONS, version, body).await?;
        if answer.first_chunk::<2>() == Some(&ErrorCode::UnsupportedVersion.code().to_be_bytes()) {
            version = 0;
            answer = self.send(api::API_VERSIONS, version, Bytes::new()).await?;
        }
        let answer: ApiVersionsResponse = cold::decode_any_size(version, answer)?;
        ClientError::check(|| "ApiVersions".to_owned(), answer.error_code, None)?;
        let ranges =
            answer.api_keys.iter().map(|range| (range.api_key, (range.min_version, range.max_version)));
        let _ = self.shared.ranges.set(ranges.collect());
        Ok(())
    }

    pub fn endpoint(&self) -> &Endpoint {
        &self.shared.endpoint
    }

    /// Whether both are handles on one connection.
    pub fn is_same(&self, other: &Connection) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }

    /// Ends the connection for all who hold it, and with it what is under way.
    pub fn abandon(&self) {
        self.shared.give_up.notify_one();
    }

    pub fn is_closed(&self) -> bool {
        self.shared.closed.load(Ordering::Acquire)
    }

    /// What the broker offers of an API, as it said when the connection began.
    pub fn offered(&self, api_key: i16) -> Option<(i16, i16)> {
        self.shared.ranges.get().and_then(|ranges| ranges.get(&api_key).copied())
    }

    /// The highest version from `min` to `max` that the broker offers too.
    pub fn version(&self, api_key: i16, min: i16, max: i16) -> Result<i16, ClientError> {
        let common = self.offered(api_key).map(|(low, high)| (low.max(min), high.min(max)));
        match common {
            Some((low, high)) if low <= high => Ok(high),
            _ => Err(ClientError::Unsupported {
                endpoint: self.shared.endpoint.clone(),
                api: api::name(api_key),
                min,
                max,
            }),
        }
    }

    /// The highest version of `R` up to `max` that both sides know.
    pub fn version_of<R: Request>(&self, max: i16) -> Result<i16, ClientError> {
        self.version(R::KEY, R::VERSIONS.min, R::VERSIONS.max.min(max))
    }

    /// Sends a request and waits for its answer; both are bodies without header.
    pub async fn send(&self, api_key: i16, api_version: i16, body: Bytes) -> Result<Bytes, ClientError> {
        self.start(api_key, api_version, vec![body]).await?.received().await
    }

    /// Sends a request; the answer can be awaited later. Requests go out in the order of these calls.
    pub async fn start(
        &self,
        api_key: i16,
        api_version: i16,
        body: Vec<Bytes>,
    ) -> Result<Answer, ClientError> {
        let (answer, receiver) = oneshot::channel();
        let outgoing = Outgoing { api_key, api_version, body, answer: Some(answer) };
        self.outgoing.send(outgoing).await.map_err(|_| self.closed())?;
        Ok(Answer { api_key, receiver, connection: self.clone() })
    }

    /// Sends a request that the broker does not answer (Produce with `acks=0`).
    pub async fn send_unanswered(
        &self,
        api_key: i16,
        api_version: i16,
        body: Vec<Bytes>,
    ) -> Result<(), ClientError> {
        let outgoing = Outgoing { api_key, api_version, body, answer: None };
        self.outgoing.send(outgoing).await.map_err(|_| self.closed())
    }

    /// One request of the `kafka-protocol` crate in the highest version both sides know. A request that
    /// depends on its version is better made with [`Self::version_of`] and [`Self::call_at`].
    pub async fn call<R: Request>(&self, request: &R) -> Result<R::Response, ClientError> {
        self.call_at(self.version_of::<R>(i16::MAX)?, request).await
    }

    pub async fn call_at<R: Request>(&self, version: i16, request: &R) -> Result<R::Response, ClientError> {
        let answer = self.send(R::KEY, version, cold::encoded(request, version)?).await?;
        Ok(cold::decode_any_size(version, answer)?)
    }

    fn closed(&self) -> ClientError {
        let reason = self.shared.reason.get().cloned().unwrap_or_else(|| "it was closed".to_owned());
        ClientError::Closed { endpoint: self.shared.endpoint.clone(), reason }
    }
}

impl Answer {
    /// Waits for the answer, for as long as the connection's request timeout.
    pub async fn received(self) -> Result<Bytes, ClientError> {
        let wait = self.connection.shared.request_timeout;
        match timeout(wait, self.receiver).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(_)) => Err(self.connection.closed()),
            Err(_) => {
                let shared = &self.connection.shared;
                shared.give_up.notify_one();
                let (endpoint, api) = (shared.endpoint.clone(), api::name(self.api_key));
                Err(ClientError::Timeout { endpoint, api, seconds: wait.as_secs() })
            }
        }
    }
}

struct Waiting {
    api_key: i16,
    api_version: i16,
    correlation_id: i32,
    answer: oneshot::Sender<Bytes>,
}

/// Runs until the handles are gone or the socket fails; says why.
async fn write_requests(
    mut socket: impl AsyncWrite + Unpin,
    mut requests: mpsc::Receiver<Outgoing>,
    waiting: mpsc::Sender<Waiting>,
    client_id: StrBytes,
) -> String {
    let mut correlation_id = 0i32;
    while let Some(request) = requests.recv().await {
        correlation_id = correlation_id.wrapping_add(1);
        let Outgoing { api_key, api_version, body, answer } = request;
        if let Some(answer) = answer
            && waiting.send(Waiting { api_key, api_version, correlation_id, answer }).await.is_err()
        {
            break;
        }
        let header =
            RequestHeader { api_key, api_version, correlation_id, client_id: Some(client_id.clone()) };
        if let Err(error) = write_frame(&mut socket, &header, &body).await {
            return error.to_string();
        }
    }
    "it is no longer used".to_owned()
}

async fn write_frame(
    socket: &mut (impl AsyncWrite + Unpin),
    header: &RequestHeader,
    body: &[Bytes],
) -> std::io::Result<()> {
    let mut gathered = BytesMut::with_capacity(256);
    gathered.put_i32(0);
    frame::put_request_header(&mut gathered, header);
    let len = gathered.len() - 4 + body.iter().map(Bytes::len).sum::<usize>();
    let len = i32::try_from(len).map_err(|_| std::io::Error::other("a request is too large"))?;
    gathered[..4].copy_from_slice(&len.to_be_bytes());
    for piece in body {
        if piece.len() < GATHER_BYTES {
            gathered.extend_from_slice(piece);
            continue;
        }
        socket.write_all(&gathered).await?;
        gathered.clear();
        socket.write_all(piece).await?;
    }
    socket.write_all(&gathered).await?;
    socket.flush().await
}

/// Runs until the peer closes, fails or answers what was not asked; says why.
async fn read_answers(
    mut socket: impl AsyncRead + Unpin,
    mut waiting: mpsc::Receiver<Waiting>,
    frame_bytes_max: usize,
) -> String {
    let mut buffer = BytesMut::with_capacity(8 * 1024);
    loop {
        match frame::next_frame(&mut buffer, frame_bytes_max) {
            Err(error) => return error.to_string(),
            Ok(Some(mut answer)) => {
                let Ok(request) = waiting.try_recv() else { return "an answer came unasked".to_owned() };
                match frame::parse_response_header(&mut answer, request.api_key, request.api_version) {
                    Ok(id) if id == request.correlation_id => {
                        // The caller may have given up waiting.
                        let _ = request.answer.send(answer);
                    }
                    Ok(_) => return "answers came in the wrong order".to_owned(),
                    Err(error) => return error.to_string(),
                }
                continue;
            }
            Ok(None) => {}
        }
        // The rest of a frame whose length is known is read into one allocation.
        if let Ok(Some(len)) = frame::frame_len(&buffer, frame_bytes_max) {
            buffer.reserve((len + 4).saturating_sub(buffer.len()));
        } else {
            buffer.reserve(8 * 1024);
        }
        match socket.read_buf(&mut buffer).await {
            Ok(0) => return "the other side closed it".to_owned(),
            Ok(_) => {}
            Err(error) => return error.to_string(),
        }
    }
}

fn connect_error(endpoint: &Endpoint, reason: impl std::fmt::Display) -> ClientError {
    ClientError::Connect { endpoint: endpoint.clone(), reason: reason.to_string() }
}

#[cfg(test)]
#[path = "connection_tests.rs"]
mod tests;
