//! One client connection: requests to the broker, answers back, in order.
//!
//! Two loops share a bounded queue of what is awaited: one reads requests, changes them and sends them
//! on; the other takes the broker's answers, which come in the order of the requests, changes those
//! that need it and passes the others through without holding them whole.

use std::sync::{Arc, OnceLock};

use bytes::{Buf, Bytes, BytesMut};
use kafka::frame::{self, FrameError};
use kafka::{RequestHeader, StrBytes, api};
use lane_core::Lane;
use lane_core::name::forwarded_client_id;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::brokers::Brokers;
use crate::directory::{Directory, Unknown};
use crate::entry::{self, Entry, EntryError};
use crate::rewrite::{self, Place, Plan, Request};
use crate::upstream::{Upstream, UpstreamError};

/// What a session needs.
pub struct Session {
    pub entry: Entry,
    pub directory: Arc<Directory>,
    pub upstream: Upstream,
    /// The host that the client reached, as it is told to clients.
    pub host: String,
    /// The port of the lane, or the shared one, from which those of brokers are counted.
    pub port: u16,
    pub brokers: Arc<Brokers>,
    /// Names in the client's certificate.
    pub shown: Vec<String>,
    /// Tells clients apart that call themselves the same.
    pub unique: String,
    pub request_bytes_max: usize,
    /// No more requests are taken; what is under way is answered.
    pub stop: CancellationToken,
}

/// Why a session ended.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    #[error(transparent)]
    Upstream(#[from] UpstreamError),
    #[error(transparent)]
    Frame(#[from] FrameError),
    #[error("{0}")]
    Refused(String),
    #[error(transparent)]
    Lane(#[from] Unknown),
    #[error(transparent)]
    Entry(#[from] EntryError),
    #[error("TLS handshake: {0}")]
    Handshake(String),
    #[error("the broker's answer to {api} version {version} cannot be read: {reason}")]
    Answer { api: &'static str, version: i16, reason: String },
    #[error("the broker closed the connection")]
    BrokerGone,
    #[error("{0}")]
    Io(#[from] std::io::Error),
}

/// An answer of the broker that the client waits for.
struct Awaited {
    api_key: i16,
    api_version: i16,
    correlation_id: i32,
    plan: Plan,
}

/// Requests under way on one connection; beyond this no more are read.
const PENDING_MAX: usize = 64;
/// Largest answer that is decoded here.
const ANSWER_BYTES_MAX: usize = kafka::limits::REQUEST_BYTES_MAX;
/// A request up to this size goes out in one piece with its header.
const ONE_PIECE_MAX: usize = 16 * 1024;
const READ_BYTES: usize = 64 * 1024;

impl Session {
    /// Serves the client until it goes, the broker goes, or the service stops.
    pub async fn run(
        self,
        from_client: impl AsyncRead + Unpin,
        to_client: impl AsyncWrite + Unpin,
    ) -> Result<(), SessionError> {
        let broker = self.upstream.connect().await?;
        let (from_broker, to_broker) = tokio::io::split(broker);
        let (pending, awaited) = mpsc::channel(PENDING_MAX);
        let lane = OnceLock::new();
        let requests = self.requests(from_client, to_broker, pending, &lane);
        let answers =
            self.answers(BufReader::with_capacity(READ_BYTES, from_broker), to_client, awaited, &lane);
        tokio::pin!(requests, answers);
        tokio::select! {
            // True: stopping, so what is under way is still answered.
            ended = &mut requests => if ended? { answers.await } else { Ok(()) },
            ended = &mut answers => ended,
        }
    }

    /// Reads requests until the client has gone (false) or the service stops (true).
    async fn requests(
        &self,
        mut client: impl AsyncRead + Unpin,
        mut broker: impl AsyncWrite + Unpin,
        pending: mpsc::Sender<Awaited>,
        lane: &OnceLock<Lane>,
    ) -> Result<bool, SessionError> {
        let mut buffer = BytesMut::with_capacity(READ_BYTES);
        loop {
            while let Some(frame) = frame::next_frame(&mut buffer, self.request_bytes_max)? {
                self.forward(frame, &mut broker, &pending, lane).await?;
            }
            broker.flush().await?;
            buffer.reserve(READ_BYTES);
            let read = tokio::select! {
                read = client.read_buf(&mut buffer) => read?,
                () = self.stop.cancelled() => return Ok(true),
            };
            if read == 0 {
                return Ok(false);
            }
        }
    }

    async fn forward(
        &self,
        mut frame: Bytes,
        broker: &mut (impl AsyncWrite + Unpin),
        pending: &mpsc::Sender<Awaited>,
        lane: &OnceLock<Lane>,
    ) -> Result<(), SessionError> {
        let mut header = frame::parse_request_header(&mut frame)?;
        self.enter(&mut header, lane)?;
        let request = match lane.get() {
            Some(lane) => rewrite::request(self.place(lane), &header, frame),
            None => Request::Forward(frame, Plan::ApiVersions),
        };
        let RequestHeader { api_key, api_version, correlation_id, .. } = header;
        match request {
            Request::Close(reason) => return Err(SessionError::Refused(reason)),
            Request::Forward(body, plan) => {
                if plan != Plan::NoAnswer {
                    let awaited = Awaited { api_key, api_version, correlation_id, plan };
                    pending.send(awaited).await.map_err(|_| SessionError::BrokerGone)?;
                }
                write_request(broker, &header, &body).await?;
            }
        }
        Ok(())
    }

    /// Finds the lane of the connection in its first request that needs one, and gives the client id
    /// the form by which the broker knows the lane. A connection stays in its lane.
    fn enter(&self, header: &mut RequestHeader, lane: &OnceLock<Lane>) -> Result<(), SessionError> {
        let client_id = header.client_id.as_deref().unwrap_or("");
        let (own, found) = match &self.entry {
            Entry::Lane(lane) => (client_id, lane.clone()),
            Entry::ClientId { permitted } => match self.directory.shared(client_id) {
                Ok((own, lane)) => {
                    entry::permits(permitted, &lane)?;
                    self.directory.admits(lane.as_str(), &self.shown)?;
                    (own, lane)
                }
                // An ApiVersions that is too new has no readable client id.
                Err(_) if header.api_key == api::API_VERSIONS && lane.get().is_none() => return Ok(()),
                Err(unknown) => return Err(unknown.into()),
            },
        };
        if *lane.get_or_init(|| found.clone()) != found {
            return Err(SessionError::Refused(format!("the connection changed its lane to {found}")));
        }
        let forwarded = forwarded_client_id(own, &found, &self.unique);
        header.client_id = Some(StrBytes::from_string(forwarded));
        Ok(())
    }

    fn place<'a>(&'a self, lane: &'a Lane) -> Place<'a> {
        Place { lane, host: &self.host, ports: self.brokers.ports(self.port) }
    }

    /// Sends the client what it waits for, in order, until nobody asks any more.
    async fn answers(
        &self,
        mut broker: impl AsyncRead + Unpin,
        mut client: impl AsyncWrite + Unpin,
        mut awaited: mpsc::Receiver<Awaited>,
        lane: &OnceLock<Lane>,
    ) -> Result<(), SessionError> {
        loop {
            let asked = tokio::select! {
                // A request is queued before it is sent, so its answer is never taken for an unasked one.
                biased;
                asked = awaited.recv() => asked,
                // Nothing is awaited: whatever the broker does now ends the connection.
                gone = broker_ends(&mut broker), if awaited.is_empty() => return gone,
            };
            let Some(asked) = asked else { return Ok(()) };
            let length = broker.read_i32().await.map_err(gone)?;
            let length = usize::try_from(length).map_err(|_| asked.unreadable("impossible length"))?;
            if asked.plan == Plan::Pass {
                client.write_i32(length as i32).await?;
                pass(&mut broker, &mut client, length).await?;
            } else {
                let frame = read_frame(&mut broker, length, &asked).await?;
                client.write_all(&self.rewritten(&asked, frame, lane)?).await?;
            }
            client.flush().await?;
        }
    }

    fn rewritten(
        &self,
        asked: &Awaited,
        mut frame: Bytes,
        lane: &OnceLock<Lane>,
    ) -> Result<Bytes, SessionError> {
        let (key, version) = (asked.api_key, asked.api_version);
        let correlation_id = frame::parse_response_header(&mut frame, key, version)
            .map_err(|error| asked.unreadable(&error.to_string()))?;
        if correlation_id != asked.correlation_id {
            return Err(asked.unreadable("it answers another request"));
        }
        let body = match (asked.plan, lane.get()) {
            (Plan::ApiVersions, _) => rewrite::api_versions(version, frame),
            (_, Some(lane)) => rewrite::answer(self.place(lane), key, version, frame),
            (_, None) => Err("it came before the lane was known".into()),
        };
        let body = body.map_err(|error| asked.unreadable(&error.to_string()))?;
        let header = RequestHeader { api_key: key, api_version: version, correlation_id, client_id: None };
        Ok(answer_frame(&header, &body))
    }
}

impl Awaited {
    fn unreadable(&self, reason: &str) -> SessionError {
        let (api, version) = (api::name(self.api_key), self.api_version);
        SessionError::Answer { api, version, reason: reason.to_owned() }
    }
}

async fn write_request(
    broker: &mut (impl AsyncWrite + Unpin),
    header: &RequestHeader,
    body: &[u8],
) -> Result<(), SessionError> {
    let mut head = BytesMut::with_capacity(256);
    head.extend_from_slice(&[0; 4]);
    frame::put_request_header(&mut head, header);
    let length = (head.len() - 4 + body.len()) as u32;
    head[..4].copy_from_slice(&length.to_be_bytes());
    if body.len() <= ONE_PIECE_MAX {
        head.extend_from_slice(body);
        broker.write_all(&head).await?;
    } else {
        broker.write_all(&head).await?;
        broker.write_all(body).await?;
    }
    Ok(())
}

fn answer_frame(header: &RequestHeader, body: &[u8]) -> Bytes {
    let mut frame = BytesMut::with_capacity(16 + body.len());
    frame.extend_from_slice(&[0; 4]);
    frame::put_response_header(&mut frame, header.api_key, header.api_version, header.correlation_id);
    frame.extend_from_slice(body);
    let length = (frame.len() - 4) as u32;
    frame[..4].copy_from_slice(&length.to_be_bytes());
    frame.freeze()
}

async fn read_frame(
    broker: &mut (impl AsyncRead + Unpin),
    length: usize,
    asked: &Awaited,
) -> Result<Bytes, SessionError> {
    if length > ANSWER_BYTES_MAX {
        return Err(asked.unreadable("it is too large"));
    }
    let mut frame = BytesMut::with_capacity(length.min(1 << 20));
    while frame.len() < length {
        let mut rest = (&mut *broker).take((length - frame.len()) as u64);
        if rest.read_buf(&mut frame).await? == 0 {
            return Err(SessionError::BrokerGone);
        }
    }
    Ok(frame.freeze())
}

/// Copies `length` bytes in pieces.
async fn pass(
    broker: &mut (impl AsyncRead + Unpin),
    client: &mut (impl AsyncWrite + Unpin),
    length: usize,
) -> Result<(), SessionError> {
    let mut left = length;
    let mut piece = BytesMut::with_capacity(READ_BYTES.min(length));
    while left > 0 {
        piece.reserve(READ_BYTES.min(left));
        if (&mut *broker).take(left as u64).read_buf(&mut piece).await? == 0 {
            return Err(SessionError::BrokerGone);
        }
        left -= piece.len();
        client.write_all_buf(&mut piece).await?;
        debug_assert!(!piece.has_remaining());
    }
    Ok(())
}

/// Completes when the broker closes, or says something that nobody asked for.
async fn broker_ends(broker: &mut (impl AsyncRead + Unpin)) -> Result<(), SessionError> {
    let mut byte = [0; 1];
    match broker.read(&mut byte).await? {
        0 => Err(SessionError::BrokerGone),
        _ => Err(SessionError::Refused("the broker sent an answer that nobody asked for".to_owned())),
    }
}

fn gone(error: std::io::Error) -> SessionError {
    match error.kind() {
        std::io::ErrorKind::UnexpectedEof => SessionError::BrokerGone,
        _ => SessionError::Io(error),
    }
}

#[cfg(test)]
#[path = "session_tests.rs"]
pub(crate) mod tests;
