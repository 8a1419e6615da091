//! The private API keys between a mirror and the brokers of its own region.
//!
//! Allowed on the internal listener to the mirror's principal alone. Owns the messages and their
//! bytes; who may send them and what they do is the broker's. All have version 0, a request header
//! v1 and a response header v0 (no tagged fields), and answers begin with a Kafka error code.
//!
//! Origin offsets are the offsets that a record has in the region where it was produced. Batches
//! travel here exactly as the origin's log holds them: its offsets, its leader epoch, its CRC.

mod append;
mod fetch;
mod fields;
mod links;
mod notes;
mod report;
#[cfg(test)]
mod tests;
mod topics;
mod vectors;

use bytes::{Bytes, BytesMut};

pub use append::{AppendAnswer, AppendOutcome, AppendRequest, Unit, Verdict};
pub use fetch::{FetchAnswer, FetchFrom, FetchOutcome, FetchRequest, Fetched, OriginRead};
pub use fields::{put_error, put_extractors, take_error, take_extractors, take_offset, take_topic};
pub use links::{
    Congestion, LinkPolicy, LinksAnswer, LinksRequest, PATTERNS_MAX, PatternError, TopicPattern,
};
pub use notes::{Note, NoteKind, NotesAnswer, NotesRequest};
pub use report::{Direction, LinkReport, LinkState, PartitionReport, ReportAnswer, ReportRequest};
pub use topics::{TopicInfo, TopicsAnswer, TopicsRequest};
pub use vectors::{Claim, OriginPosition, PartitionVector, VectorsAnswer, VectorsRequest};

use crate::wire::{Reader, WireError};

pub const MIRROR_TOPICS: i16 = 10000;
pub const MIRROR_FETCH: i16 = 10001;
pub const MIRROR_APPEND: i16 = 10002;
pub const MIRROR_VECTORS: i16 = 10003;
pub const MIRROR_REPORT: i16 = 10004;
pub const MIRROR_NOTES: i16 = 10005;
pub const MIRROR_LINKS: i16 = 10006;

/// Every private key, for the broker's dispatch.
pub const KEYS: std::ops::RangeInclusive<i16> = MIRROR_TOPICS..=MIRROR_LINKS;

/// The version of every private message so far.
pub const VERSION: i16 = 0;

/// A message of this module.
pub trait Message: Sized {
    fn write(&self, out: &mut BytesMut);
    fn read(from: &mut Reader) -> Result<Self, WireError>;

    fn encode(&self) -> Bytes {
        let mut out = BytesMut::new();
        self.write(&mut out);
        out.freeze()
    }

    /// The whole of `bytes` as one message.
    fn decode(bytes: Bytes) -> Result<Self, WireError> {
        let mut from = Reader::new(bytes);
        let message = Self::read(&mut from)?;
        from.end()?;
        Ok(message)
    }
}
