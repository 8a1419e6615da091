//! Produce: decoded without copying record bytes, encoded by hand.
//!
//! Layout from Apache Kafka's ProduceRequest and ProduceResponse, versions 0 to 12 (topic names, not
//! ids). Versions 0 to 2 are decoded only so that they can be refused in their own layout.

use bytes::{Bytes, BytesMut};
use kafka_protocol::protocol::StrBytes;

use crate::error::ErrorCode;
use crate::offset::{BrokerId, LeaderEpoch, Offset, TimestampMs};
use crate::primitive::{DecodeError, Reader, Writer};

/// Lowest version whose batches are accepted.
pub const VERSION_MIN: i16 = 3;
pub const VERSION_MAX: i16 = 12;
/// Lowest version in which a batch may be packed with zstd (KIP-110).
pub const ZSTD_VERSION_MIN: i16 = 7;

const FLEXIBLE: i16 = 9;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProduceRequest {
    pub transactional_id: Option<StrBytes>,
    /// 0: no answer, 1: in the write buffer, -1: durable.
    pub acks: i16,
    pub timeout_ms: i32,
    pub topics: Vec<ProduceTopic>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProduceTopic {
    pub name: StrBytes,
    pub partitions: Vec<ProducePartition>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProducePartition {
    pub index: i32,
    /// A slice of the request frame.
    pub records: Option<Bytes>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProduceResponse {
    pub topics: Vec<ProducedTopic>,
    pub throttle_time_ms: i32,
    /// KIP-951: addresses of the leaders named in `current_leader`; written from version 10.
    pub endpoints: Vec<NodeEndpoint>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProducedTopic {
    pub name: StrBytes,
    pub partitions: Vec<ProducedPartition>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProducedPartition {
    pub index: i32,
    pub error: ErrorCode,
    /// -1 on error.
    pub base_offset: Offset,
    /// -1 unless the topic stamps log append time.
    pub log_append_time: TimestampMs,
    /// -1 on error; written from version 5.
    pub log_start: Offset,
    /// Which records were refused; written from version 8.
    pub record_errors: Vec<RecordError>,
    /// Written from version 8.
    pub error_message: Option<String>,
    /// Hint for NOT_LEADER_OR_FOLLOWER; written from version 10.
    pub current_leader: Option<(BrokerId, LeaderEpoch)>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordError {
    pub batch_index: i32,
    pub message: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeEndpoint {
    pub node: BrokerId,
    pub host: String,
    pub port: i32,
    pub rack: Option<String>,
}

impl ProduceRequest {
    /// Decodes versions 0 to 12.
    pub fn decode(version: i16, body: Bytes) -> Result<ProduceRequest, DecodeError> {
        if !(0..=VERSION_MAX).contains(&version) {
            return Err(DecodeError::Version(version));
        }
        let mut r = Reader::new(body, version >= FLEXIBLE);
        let transactional_id = if version >= 3 { r.nullable_string()? } else { None };
        let acks = r.i16()?;
        let timeout_ms = r.i32()?;
        let count = r.count(2)?;
        let mut topics = Vec::with_capacity(count);
        for _ in 0..count {
            topics.push(ProduceTopic::decode(&mut r)?);
        }
        r.skip_tags()?;
        r.finish()?;
        Ok(ProduceRequest { transactional_id, acks, timeout_ms, topics })
    }
}

impl ProduceTopic {
    fn decode(r: &mut Reader) -> Result<ProduceTopic, DecodeError> {
        let name = r.string()?;
        let count = r.count(5)?;
        let mut partitions = Vec::with_capacity(count);
        for _ in 0..count {
            let index = r.i32()?;
            let records = r.nullable_bytes()?;
            r.skip_tags()?;
            partitions.push(ProducePartition { index, records });
        }
        r.skip_tags()?;
        Ok(ProduceTopic { name, partitions })
    }
}

impl ProducedPartition {
    /// The answer for a partition on which nothing was written.
    pub fn failed(index: i32, error: ErrorCode, error_message: Option<String>) -> ProducedPartition {
        ProducedPartition {
            index,
            error,
            base_offset: Offset(-1),
            log_append_time: TimestampMs::NONE,
            log_start: Offset(-1),
            record_errors: Vec::new(),
            error_message,
            current_leader: None,
        }
    }
}

impl ProduceResponse {
    /// Appends the body in versions 0 to 12.
    pub fn encode(&self, version: i16, out: &mut BytesMut) {
        let mut w = Writer { out, flexible: version >= FLEXIBLE };
        w.count(self.topics.len());
        for topic in &self.topics {
            w.string(&topic.name);
            w.count(topic.partitions.len());
            for partition in &topic.partitions {
                partition.encode(version, &mut w);
            }
            w.no_tags();
        }
        if version >= 1 {
            w.i32(self.throttle_time_ms);
        }
        if version >= 10 && !self.endpoints.is_empty() {
            put_endpoints(&mut w, &self.endpoints);
        } else {
            w.no_tags();
        }
    }
}

impl ProducedPartition {
    fn encode(&self, version: i16, w: &mut Writer<'_>) {
        w.i32(self.index);
        w.i16(self.error.code());
        w.i64(self.base_offset.0);
        if version >= 2 {
            w.i64(self.log_append_time.0);
        }
        if version >= 5 {
            w.i64(self.log_start.0);
        }
        if version >= 8 {
            w.count(self.record_errors.len());
            for error in &self.record_errors {
                w.i32(error.batch_index);
                w.nullable_string(error.message.as_deref());
                w.no_tags();
            }
            w.nullable_string(self.error_message.as_deref());
        }
        match self.current_leader {
            Some(leader) if version >= 10 => {
                w.varint(1);
                put_leader(w, 0, leader);
            }
            _ => w.no_tags(),
        }
    }
}

/// Tagged field `tag`: leader id and epoch, itself without tags.
pub(crate) fn put_leader(w: &mut Writer<'_>, tag: u32, (leader, epoch): (BrokerId, LeaderEpoch)) {
    w.varint(tag);
    w.varint(9);
    w.i32(leader.0);
    w.i32(epoch.0);
    w.varint(0);
}

/// One tagged field 0 with the endpoints.
fn put_endpoints(w: &mut Writer<'_>, endpoints: &[NodeEndpoint]) {
    let mut field = BytesMut::new();
    let mut inner = Writer { out: &mut field, flexible: true };
    inner.count(endpoints.len());
    for endpoint in endpoints {
        inner.i32(endpoint.node.0);
        inner.string(&endpoint.host);
        inner.i32(endpoint.port);
        inner.nullable_string(endpoint.rack.as_deref());
        inner.no_tags();
    }
    w.varint(1);
    w.varint(0);
    w.varint(field.len() as u32);
    w.out.extend_from_slice(&field);
}
