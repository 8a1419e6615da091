//! The messages that are not on the hot path: decoded and encoded by the `kafka-protocol` crate.
//!
//! That crate allocates for every count it reads, before it knows whether the elements are there. So
//! messages are read through `Bounded`, which refuses impossible counts. Record payloads never pass
//! through that crate's record types (they lose header order and repeats).

use bytes::{Buf, Bytes, BytesMut, TryGetError};
use kafka_protocol::protocol::buf::ByteBuf;
use kafka_protocol::protocol::{Decodable, Encodable};

use crate::limits::COLD_MESSAGE_BYTES_MAX;
use crate::primitive::DecodeError;

/// Why a message of ours cannot be written in a version: a bug of the caller, reported, never a panic.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("version {version} cannot carry this message: {reason}")]
pub struct EncodeError {
    pub version: i16,
    pub reason: String,
}

/// Decodes a whole request; trailing bytes are an error.
pub fn decode<M: Decodable>(version: i16, body: Bytes) -> Result<M, DecodeError> {
    if body.len() > COLD_MESSAGE_BYTES_MAX {
        return Err(DecodeError::Length(body.len() as i64));
    }
    decode_any_size(version, body)
}

/// Like [`decode`], for a message whose size the caller has bounded (an answer of a server).
pub fn decode_any_size<M: Decodable>(version: i16, body: Bytes) -> Result<M, DecodeError> {
    // First pass: an int32 that could not be a count reads as one more than fits, so that a count
    // runs out of bytes and anything else only has a wrong value. Where nothing was replaced the
    // result is right; else the counts are now known to be possible and the second pass is plain.
    let mut bounded = Bounded { bytes: body.clone(), run: 0, value: 0, replaced: false };
    let message = M::decode(&mut bounded, version).map_err(|_| DecodeError::Malformed)?;
    if !bounded.bytes.is_empty() {
        return Err(DecodeError::Trailing(bounded.bytes.len()));
    }
    if !bounded.replaced {
        return Ok(message);
    }
    M::decode(&mut { body }, version).map_err(|_| DecodeError::Malformed)
}

/// Appends a message.
pub fn encode<M: Encodable>(message: &M, version: i16, out: &mut BytesMut) -> Result<(), EncodeError> {
    message.encode(out, version).map_err(|error| EncodeError { version, reason: error.to_string() })
}

/// A message as bytes.
pub fn encoded<M: Encodable>(message: &M, version: i16) -> Result<Bytes, EncodeError> {
    let mut out = BytesMut::new();
    encode(message, version, &mut out)?;
    Ok(out.freeze())
}

struct Bounded {
    bytes: Bytes,
    /// How many bytes of an unfinished varint have been read one by one, and their value. Single bytes
    /// that are no varint (booleans) can only make the value larger.
    run: u32,
    value: u64,
    replaced: bool,
}

/// Numbers up to this are never taken for an impossible count: what they make a decoder allocate is
/// small, and tags and ids near the end of a message may be larger than the bytes left.
const ALWAYS_POSSIBLE: usize = 1024;

impl Bounded {
    fn possible(&self, number: u64) -> bool {
        number <= (self.bytes.len() as u64 + 1).max(ALWAYS_POSSIBLE as u64)
    }
}

impl Buf for Bounded {
    fn remaining(&self) -> usize {
        self.bytes.len()
    }

    fn chunk(&self) -> &[u8] {
        &self.bytes
    }

    fn advance(&mut self, count: usize) {
        self.run = 0;
        self.value = 0;
        self.bytes.advance(count);
    }

    fn try_get_u8(&mut self) -> Result<u8, TryGetError> {
        let byte = self.bytes.try_get_u8()?;
        self.value |= u64::from(byte & 0x7f) << (7 * self.run);
        self.run += 1;
        let unfinished = byte >= 0x80;
        if (unfinished && self.run >= 5) || (!unfinished && !self.possible(self.value)) {
            return Err(TryGetError { requested: usize::MAX, available: self.bytes.len() });
        }
        if !unfinished {
            self.run = 0;
            self.value = 0;
        }
        Ok(byte)
    }

    fn try_get_i32(&mut self) -> Result<i32, TryGetError> {
        self.run = 0;
        self.value = 0;
        let number = self.bytes.try_get_i32()?;
        if number > 0 && !self.possible(number as u64) {
            self.replaced = true;
            return Ok(self.bytes.len() as i32 + 1);
        }
        Ok(number)
    }
}

impl ByteBuf for Bounded {
    fn peek_bytes(&mut self, range: std::ops::Range<usize>) -> Bytes {
        self.bytes.slice(range)
    }

    fn get_bytes(&mut self, size: usize) -> Bytes {
        self.run = 0;
        self.value = 0;
        self.bytes.split_to(size)
    }
}
