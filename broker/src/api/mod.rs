//! What each request means. One file per group of APIs; this one holds what they share: who asks, how
//! an answer is given, and which handler takes which key.
//!
//! A handler *starts* in the order of the requests of its connection, on the connection's task: what
//! it appends, it appends there. What it has to wait for, it returns as a future.

mod configs;
mod fetch;
mod groups;
mod init_producer_id;
mod list_offsets;
mod log_dirs;
mod message;
mod metadata;
pub mod mirror;
mod nodes;
mod offsets;
mod produce;
mod topics;
mod versions;

use std::net::SocketAddr;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use futures_util::future::BoxFuture;
use kafka::api;
use kafka::fetch::RecordBytes;
use kafka::frame::RequestHeader;
use kafka_protocol::protocol::Encodable;
use lane_core::Lane;
use lane_core::name::forwarded_lane;

use crate::broker::Broker;
use crate::partition::Slice;
use crate::server::ListenerInfo;

/// Who a connection belongs to.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Principal {
    Anonymous,
    /// Common name of the client certificate, whose chain the listener has checked.
    Certificate(Arc<str>),
}

/// One connection, as handlers see it.
pub struct ConnectionInfo {
    pub id: u64,
    pub listener: Arc<ListenerInfo>,
    pub principal: Principal,
    pub peer: SocketAddr,
}

/// What a handler gets.
#[derive(Clone)]
pub struct Ctx {
    pub broker: Arc<Broker>,
    pub connection: Arc<ConnectionInfo>,
}

/// How a request is answered. Answers leave a connection in the order of its requests.
pub enum Answer {
    Ready(Body),
    /// The connection's next request starts only when this one is done, as in Apache Kafka.
    Later(BoxFuture<'static, Body>),
    /// Later requests may start meanwhile: produce and fetch.
    Overlap(BoxFuture<'static, Body>),
    /// Nothing is sent: produce with acks=0.
    Nothing,
    /// The connection ends, for this reason.
    Close(String),
}

/// A response body in pieces, without frame length and header.
#[derive(Debug, Default)]
pub struct Body(pub Vec<Piece>);

pub type Piece = kafka::fetch::Piece<RecordPiece>;

/// Record bytes of an answer.
#[derive(Clone, Debug)]
pub enum RecordPiece {
    /// A range of a segment file: sent without being read, where the connection allows it.
    File(Slice),
    Memory(Bytes),
}

impl RecordBytes for RecordPiece {
    fn byte_len(&self) -> usize {
        match self {
            RecordPiece::File(slice) => slice.len,
            RecordPiece::Memory(bytes) => bytes.len(),
        }
    }
}

impl Body {
    pub fn bytes(bytes: Bytes) -> Body {
        Body(vec![Piece::Bytes(bytes)])
    }

    /// A message of the `kafka-protocol` crate.
    pub fn message<M: Encodable>(message: &M, version: i16) -> Body {
        match kafka::cold::encoded(message, version) {
            Ok(bytes) => Body::bytes(bytes),
            Err(error) => {
                tracing::error!(%error, "an answer cannot be written; the connection gets an empty one");
                Body::default()
            }
        }
    }

    pub fn len(&self) -> usize {
        self.0.iter().map(Piece::byte_len).sum()
    }
}

impl Answer {
    pub fn message<M: Encodable>(message: &M, version: i16) -> Answer {
        Answer::Ready(Body::message(message, version))
    }

    /// For a request whose body does not parse.
    pub fn malformed(header: &RequestHeader, error: impl std::fmt::Display) -> Answer {
        let (name, version) = (api::name(header.api_key), header.api_version);
        Answer::Close(format!("{name} version {version} cannot be read: {error}"))
    }
}

/// Starts a request.
pub fn start(ctx: &Ctx, header: &RequestHeader, body: Bytes) -> Answer {
    if let Some(refused) = refuse(ctx, header) {
        return refused;
    }
    match header.api_key {
        api::PRODUCE => produce::handle(ctx, header, body),
        api::FETCH => fetch::handle(ctx, header, body),
        key if kafka::private::KEYS.contains(&key) => mirror::handle(ctx, header, body),
        2 => list_offsets::list_offsets(ctx, header, body),
        3 => metadata::metadata(ctx, header, body),
        8 => offsets::commit(ctx, header, body),
        9 => offsets::fetch(ctx, header, body),
        10 => metadata::find_coordinator(ctx, header, body),
        11 => groups::join(ctx, header, body),
        12 => groups::heartbeat(ctx, header, body),
        13 => groups::leave(ctx, header, body),
        14 => groups::sync(ctx, header, body),
        15 => groups::describe(ctx, header, body),
        16 => groups::list(ctx, header, body),
        api::API_VERSIONS => versions::handle(ctx, header, body),
        19 => topics::create(ctx, header, body),
        20 => topics::delete(ctx, header, body),
        21 => list_offsets::delete_records(ctx, header, body),
        22 => init_producer_id::handle(ctx, header, body),
        23 => list_offsets::offset_for_leader_epoch(ctx, header, body),
        32 => configs::describe(ctx, header, body),
        33 => configs::alter(ctx, header, body),
        35 => log_dirs::handle(ctx, header, body),
        37 => topics::create_partitions(ctx, header, body),
        42 => groups::delete(ctx, header, body),
        44 => configs::alter_incrementally(ctx, header, body),
        47 => offsets::delete(ctx, header, body),
        60 => metadata::describe_cluster(ctx, header, body),
        74 => configs::list_resources(ctx, header, body),
        75 => metadata::describe_topic_partitions(ctx, header, body),
        _ => Answer::Close(format!("API key {} is not supported", header.api_key)),
    }
}

/// Requests that are not for this connection, or not in a version that is answered.
fn refuse(ctx: &Ctx, header: &RequestHeader) -> Option<Answer> {
    let key = header.api_key;
    if kafka::private::KEYS.contains(&key) {
        return match ctx.may_mirror() {
            true => None,
            false => Some(Answer::Close(format!("{} is not for this connection", api::name(key)))),
        };
    }
    if ctx.connection.listener.raw && !RAW_KEYS.contains(&key) {
        let name = api::name(key);
        return Some(Answer::Close(format!(
            "{name} is not for a raw listener, which only reads, without a group"
        )));
    }
    // ApiVersions answers unknown versions itself; old Produce is refused in its own words.
    if key == api::API_VERSIONS || key == api::PRODUCE || api::is_supported(key, header.api_version) {
        return None;
    }
    let name = api::name(key);
    Some(Answer::Close(match api::advertised(key) {
        Some(range) => format!(
            "{name} version {} is not supported, only {} to {}",
            header.api_version, range.min, range.max
        ),
        None => format!("API key {key} is not supported"),
    }))
}

/// What a raw listener offers: Fetch, ListOffsets, Metadata, ApiVersions, OffsetForLeaderEpoch,
/// DescribeConfigs, DescribeCluster, DescribeTopicPartitions; and Produce, which it refuses: without it
/// librdkafka takes the broker for one of the time before record batches. Groups are not there: what they
/// commit or are told is rounded to their own view, which is not the raw one.
pub const RAW_KEYS: [i16; 9] = [api::PRODUCE, api::FETCH, 2, 3, api::API_VERSIONS, 23, 32, 60, 75];

/// Common names of the internal services' certificates.
pub const MIRROR_NAME: &str = "sealane-mirror";
pub const LANE_ROUTER_NAME: &str = "sealane-lane-router";

impl Ctx {
    /// The private keys are for the mirror, on the internal listener.
    pub fn may_mirror(&self) -> bool {
        self.connection.is_internal(MIRROR_NAME)
    }

    /// The lane that the connection is in: only the lane-router's client ids name one.
    pub fn lane(&self, header: &RequestHeader) -> Option<Lane> {
        let client_id = header.client_id.as_deref().filter(|_| self.connection.is_lane_router())?;
        forwarded_lane(client_id)
    }
}

impl ConnectionInfo {
    /// Group and client id suffixes name lanes only when the lane-router wrote them.
    pub fn is_lane_router(&self) -> bool {
        self.is_internal(LANE_ROUTER_NAME)
    }

    fn is_internal(&self, name: &str) -> bool {
        self.listener.internal && matches!(&self.principal, Principal::Certificate(cn) if &**cn == name)
    }
}

/// The frame head of an answer: length, then response header.
pub fn frame_head(header: &RequestHeader, body_len: usize) -> BytesMut {
    let mut head = BytesMut::with_capacity(16);
    head.extend_from_slice(&[0; 4]);
    kafka::frame::put_response_header(&mut head, header.api_key, header.api_version, header.correlation_id);
    let len = (head.len() - 4 + body_len) as u32;
    head[..4].copy_from_slice(&len.to_be_bytes());
    head
}

#[cfg(test)]
mod cold_tests;
