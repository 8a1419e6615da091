//! Fetch: the request decoded, the response encoded around record bytes that the caller sends itself.
//!
//! Layout from Apache Kafka's FetchRequest and FetchResponse, versions 4 to 12 (topic names, not ids).
//! The response is a list of pieces: bytes of ours, and between them the caller's records (`R`: bytes,
//! or a range of a file for `sendfile`), whose length alone is needed here.

use bytes::{Bytes, BytesMut};
use kafka_protocol::protocol::StrBytes;

use crate::error::ErrorCode;
use crate::offset::{BrokerId, LeaderEpoch, Offset, ProducerId};
use crate::primitive::{DecodeError, Reader, Writer};
use crate::produce::put_leader;

pub const VERSION_MIN: i16 = 4;
pub const VERSION_MAX: i16 = 12;

const FLEXIBLE: i16 = 12;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FetchRequest {
    /// -1 for a consumer.
    pub replica_id: i32,
    pub max_wait_ms: i32,
    pub min_bytes: i32,
    pub max_bytes: i32,
    /// 0: read uncommitted, 1: read committed.
    pub isolation_level: i8,
    /// 0 before version 7.
    pub session_id: i32,
    /// -1 (no session) before version 7.
    pub session_epoch: i32,
    pub topics: Vec<FetchTopic>,
    pub forgotten: Vec<ForgottenTopic>,
    pub rack_id: StrBytes,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FetchTopic {
    pub name: StrBytes,
    pub partitions: Vec<FetchPartition>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FetchPartition {
    pub index: i32,
    /// -1: not checked.
    pub current_leader_epoch: LeaderEpoch,
    pub fetch_offset: Offset,
    /// -1 before version 12.
    pub last_fetched_epoch: LeaderEpoch,
    /// Of a follower; -1 for a consumer.
    pub log_start: Offset,
    pub max_bytes: i32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForgottenTopic {
    pub name: StrBytes,
    pub partitions: Vec<i32>,
}

/// Record bytes of known length that the caller can put on the wire.
pub trait RecordBytes {
    fn byte_len(&self) -> usize;
}

/// One stretch of a response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece<R> {
    Bytes(Bytes),
    Records(R),
}

#[derive(Clone, Debug)]
pub struct FetchResponse<R> {
    pub throttle_time_ms: i32,
    /// Written from version 7.
    pub error: ErrorCode,
    /// Written from version 7; 0: no session.
    pub session_id: i32,
    pub topics: Vec<FetchedTopic<R>>,
}

#[derive(Clone, Debug)]
pub struct FetchedTopic<R> {
    pub name: StrBytes,
    pub partitions: Vec<FetchedPartition<R>>,
}

#[derive(Clone, Debug)]
pub struct FetchedPartition<R> {
    pub index: i32,
    pub error: ErrorCode,
    pub high_watermark: Offset,
    pub last_stable: Offset,
    /// Written from version 5.
    pub log_start: Offset,
    /// `None` (null on the wire) unless the request is read_committed.
    pub aborted: Option<Vec<AbortedTransaction>>,
    /// Written from version 12: the end of the epoch at which the client's log diverges.
    pub diverging_epoch: Option<(LeaderEpoch, Offset)>,
    /// Hint for NOT_LEADER_OR_FOLLOWER and FENCED_LEADER_EPOCH; written from version 12.
    pub current_leader: Option<(BrokerId, LeaderEpoch)>,
    /// In order; together one run of whole batches.
    pub records: Vec<R>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AbortedTransaction {
    pub producer_id: ProducerId,
    pub first_offset: Offset,
}

impl FetchRequest {
    /// Decodes versions 4 to 12.
    pub fn decode(version: i16, body: Bytes) -> Result<FetchRequest, DecodeError> {
        if !(VERSION_MIN..=VERSION_MAX).contains(&version) {
            return Err(DecodeError::Version(version));
        }
        let mut r = Reader::new(body, version >= FLEXIBLE);
        let mut request = FetchRequest {
            replica_id: r.i32()?,
            max_wait_ms: r.i32()?,
            min_bytes: r.i32()?,
            max_bytes: r.i32()?,
            isolation_level: r.i8()?,
            session_id: if version >= 7 { r.i32()? } else { 0 },
            session_epoch: if version >= 7 { r.i32()? } else { -1 },
            topics: Vec::new(),
            forgotten: Vec::new(),
            rack_id: StrBytes::new(),
        };
        for _ in 0..r.count(2)? {
            request.topics.push(FetchTopic::decode(version, &mut r)?);
        }
        if version >= 7 {
            for _ in 0..r.count(2)? {
                request.forgotten.push(ForgottenTopic::decode(&mut r)?);
            }
        }
        if version >= 11 {
            request.rack_id = r.string()?;
        }
        r.skip_tags()?;
        r.finish()?;
        Ok(request)
    }
}

impl FetchTopic {
    fn decode(version: i16, r: &mut Reader) -> Result<FetchTopic, DecodeError> {
        let name = r.string()?;
        let count = r.count(16)?;
        let mut partitions = Vec::with_capacity(count);
        for _ in 0..count {
            partitions.push(FetchPartition {
                index: r.i32()?,
                current_leader_epoch: LeaderEpoch(if version >= 9 { r.i32()? } else { -1 }),
                fetch_offset: Offset(r.i64()?),
                last_fetched_epoch: LeaderEpoch(if version >= 12 { r.i32()? } else { -1 }),
                log_start: Offset(if version >= 5 { r.i64()? } else { -1 }),
                max_bytes: r.i32()?,
            });
            r.skip_tags()?;
        }
        r.skip_tags()?;
        Ok(FetchTopic { name, partitions })
    }
}

impl ForgottenTopic {
    fn decode(r: &mut Reader) -> Result<ForgottenTopic, DecodeError> {
        let name = r.string()?;
        let count = r.count(4)?;
        let mut partitions = Vec::with_capacity(count);
        for _ in 0..count {
            partitions.push(r.i32()?);
        }
        r.skip_tags()?;
        Ok(ForgottenTopic { name, partitions })
    }
}

impl<R> FetchedPartition<R> {
    /// The answer for a partition that gives no records; offsets are -1 as in Kafka.
    pub fn failed(index: i32, error: ErrorCode) -> FetchedPartition<R> {
        FetchedPartition {
            index,
            error,
            high_watermark: Offset(-1),
            last_stable: Offset(-1),
            log_start: Offset(-1),
            aborted: None,
            diverging_epoch: None,
            current_leader: None,
            records: Vec::new(),
        }
    }
}

impl<R: RecordBytes> FetchResponse<R> {
    /// The body in versions 4 to 12. `head` holds what goes before it (frame length and header); the
    /// first piece begins with it.
    pub fn encode(self, version: i16, mut head: BytesMut) -> Vec<Piece<R>> {
        let flexible = version >= FLEXIBLE;
        let mut pieces = Vec::new();
        let mut w = Writer { out: &mut head, flexible };
        w.i32(self.throttle_time_ms);
        if version >= 7 {
            w.i16(self.error.code());
            w.i32(self.session_id);
        }
        w.count(self.topics.len());
        for topic in self.topics {
            let mut w = Writer { out: &mut head, flexible };
            w.string(&topic.name);
            w.count(topic.partitions.len());
            for partition in topic.partitions {
                partition.encode(version, &mut head, &mut pieces);
            }
            Writer { out: &mut head, flexible }.no_tags();
        }
        Writer { out: &mut head, flexible }.no_tags();
        if !head.is_empty() {
            pieces.push(Piece::Bytes(head.freeze()));
        }
        pieces
    }
}

impl<R: RecordBytes> FetchedPartition<R> {
    fn encode(self, version: i16, out: &mut BytesMut, pieces: &mut Vec<Piece<R>>) {
        let mut w = Writer { out, flexible: version >= FLEXIBLE };
        w.i32(self.index);
        w.i16(self.error.code());
        w.i64(self.high_watermark.0);
        w.i64(self.last_stable.0);
        if version >= 5 {
            w.i64(self.log_start.0);
        }
        w.nullable_count(self.aborted.as_ref().map(Vec::len));
        for aborted in self.aborted.iter().flatten() {
            w.i64(aborted.producer_id.0);
            w.i64(aborted.first_offset.0);
            w.no_tags();
        }
        if version >= 11 {
            w.i32(-1); // preferred read replica: none
        }
        w.bytes_len(self.records.iter().map(RecordBytes::byte_len).sum());
        for records in self.records {
            if !w.out.is_empty() {
                pieces.push(Piece::Bytes(w.out.split().freeze()));
            }
            pieces.push(Piece::Records(records));
        }
        if version < FLEXIBLE {
            return;
        }
        w.varint(u32::from(self.diverging_epoch.is_some()) + u32::from(self.current_leader.is_some()));
        if let Some((epoch, end)) = self.diverging_epoch {
            w.varint(0);
            w.varint(13);
            w.i32(epoch.0);
            w.i64(end.0);
            w.varint(0);
        }
        if let Some(leader) = self.current_leader {
            put_leader(&mut w, 1, leader);
        }
    }
}

impl<R: RecordBytes> Piece<R> {
    pub fn byte_len(&self) -> usize {
        match self {
            Piece::Bytes(bytes) => bytes.len(),
            Piece::Records(records) => records.byte_len(),
        }
    }
}

impl RecordBytes for Bytes {
    fn byte_len(&self) -> usize {
        self.len()
    }
}
