//! Primitive types of Kafka's own messages, read from `Bytes` without copying, written to `BytesMut`.
//!
//! Owns the bounds: no length or count is believed before the bytes behind it are there. Classic and
//! flexible (KIP-482) encodings differ only in how lengths are written, so one reader serves both.
//! Our own formats use `wire.rs`.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use kafka_protocol::protocol::StrBytes;

use crate::limits::ARRAY_LEN_MAX;

/// Why bytes are not the message they should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    #[error("the message ends too early")]
    Truncated,
    #[error("a length or a count of the message is impossible: {0}")]
    Length(i64),
    #[error("a text of the message is not UTF-8")]
    Text,
    #[error("a field that may not be null is null")]
    Null,
    #[error("version {0} of this message is not known here")]
    Version(i16),
    #[error("the message has {0} bytes too many")]
    Trailing(usize),
    #[error("the message cannot be decoded")]
    Malformed,
}

/// A cursor over one message.
#[derive(Debug)]
pub struct Reader {
    bytes: Bytes,
    flexible: bool,
}

impl Reader {
    pub fn new(bytes: Bytes, flexible: bool) -> Reader {
        Reader { bytes, flexible }
    }

    /// What has not been read yet.
    pub fn into_rest(self) -> Bytes {
        self.bytes
    }

    pub fn i8(&mut self) -> Result<i8, DecodeError> {
        self.bytes.try_get_i8().map_err(|_| DecodeError::Truncated)
    }

    pub fn i16(&mut self) -> Result<i16, DecodeError> {
        self.bytes.try_get_i16().map_err(|_| DecodeError::Truncated)
    }

    pub fn i32(&mut self) -> Result<i32, DecodeError> {
        self.bytes.try_get_i32().map_err(|_| DecodeError::Truncated)
    }

    pub fn u32(&mut self) -> Result<u32, DecodeError> {
        self.bytes.try_get_u32().map_err(|_| DecodeError::Truncated)
    }

    pub fn i64(&mut self) -> Result<i64, DecodeError> {
        self.bytes.try_get_i64().map_err(|_| DecodeError::Truncated)
    }

    pub fn uuid(&mut self) -> Result<uuid::Uuid, DecodeError> {
        let bytes = self.take(16)?;
        uuid::Uuid::from_slice(&bytes).map_err(|_| DecodeError::Truncated)
    }

    /// An unsigned varint of at most 32 bits.
    pub fn varint(&mut self) -> Result<u32, DecodeError> {
        let mut value = 0u64;
        for shift in [0, 7, 14, 21, 28] {
            let byte = self.bytes.try_get_u8().map_err(|_| DecodeError::Truncated)?;
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return u32::try_from(value).map_err(|_| DecodeError::Length(value as i64));
            }
        }
        Err(DecodeError::Length(value as i64))
    }

    pub fn take(&mut self, len: usize) -> Result<Bytes, DecodeError> {
        if len > self.bytes.len() {
            return Err(DecodeError::Truncated);
        }
        Ok(self.bytes.split_to(len))
    }

    pub fn nullable_string(&mut self) -> Result<Option<StrBytes>, DecodeError> {
        let len = if self.flexible { i64::from(self.varint()?) - 1 } else { i64::from(self.i16()?) };
        let Some(bytes) = self.sized(len)? else { return Ok(None) };
        StrBytes::from_utf8(bytes).map(Some).map_err(|_| DecodeError::Text)
    }

    pub fn string(&mut self) -> Result<StrBytes, DecodeError> {
        self.nullable_string()?.ok_or(DecodeError::Null)
    }

    pub fn nullable_bytes(&mut self) -> Result<Option<Bytes>, DecodeError> {
        let len = self.long_len()?;
        self.sized(len)
    }

    /// The count of an array, `None` for null. `element_min` is the fewest bytes one element takes:
    /// a count that cannot fit in what is left is refused before anything is allocated for it.
    pub fn nullable_count(&mut self, element_min: usize) -> Result<Option<usize>, DecodeError> {
        let count = self.long_len()?;
        if count == -1 {
            return Ok(None);
        }
        let fits = usize::try_from(count)
            .is_ok_and(|n| n <= ARRAY_LEN_MAX && n.saturating_mul(element_min.max(1)) <= self.bytes.len());
        if fits { Ok(Some(count as usize)) } else { Err(DecodeError::Length(count)) }
    }

    pub fn count(&mut self, element_min: usize) -> Result<usize, DecodeError> {
        self.nullable_count(element_min)?.ok_or(DecodeError::Null)
    }

    /// Skips the tagged fields that end a structure in flexible versions; nothing otherwise.
    pub fn skip_tags(&mut self) -> Result<(), DecodeError> {
        if !self.flexible {
            return Ok(());
        }
        for _ in 0..self.varint()? {
            self.varint()?;
            let len = self.varint()? as usize;
            self.take(len)?;
        }
        Ok(())
    }

    /// The message must end here.
    pub fn finish(&self) -> Result<(), DecodeError> {
        if self.bytes.is_empty() { Ok(()) } else { Err(DecodeError::Trailing(self.bytes.len())) }
    }

    /// Length of bytes, or count of an array; -1: null.
    fn long_len(&mut self) -> Result<i64, DecodeError> {
        if self.flexible { Ok(i64::from(self.varint()?) - 1) } else { Ok(i64::from(self.i32()?)) }
    }

    fn sized(&mut self, len: i64) -> Result<Option<Bytes>, DecodeError> {
        match usize::try_from(len) {
            Ok(len) => self.take(len).map(Some),
            Err(_) if len == -1 => Ok(None),
            Err(_) => Err(DecodeError::Length(len)),
        }
    }
}

/// Appends primitive types to a buffer.
#[derive(Debug)]
pub struct Writer<'a> {
    pub out: &'a mut BytesMut,
    pub flexible: bool,
}

impl Writer<'_> {
    pub fn i16(&mut self, value: i16) {
        self.out.put_i16(value);
    }

    pub fn i32(&mut self, value: i32) {
        self.out.put_i32(value);
    }

    pub fn i64(&mut self, value: i64) {
        self.out.put_i64(value);
    }

    pub fn varint(&mut self, mut value: u32) {
        while value >= 0x80 {
            self.out.put_u8(value as u8 | 0x80);
            value >>= 7;
        }
        self.out.put_u8(value as u8);
    }

    pub fn nullable_string(&mut self, value: Option<&str>) {
        match value {
            // Kafka's texts have at most 32,767 bytes; a longer one of ours (an error message) is cut.
            Some(text) => {
                let text = cut(text, i16::MAX as usize);
                if self.flexible {
                    self.varint(text.len() as u32 + 1);
                } else {
                    self.i16(text.len() as i16);
                }
                self.out.put_slice(text.as_bytes());
            }
            None if self.flexible => self.varint(0),
            None => self.i16(-1),
        }
    }

    pub fn string(&mut self, value: &str) {
        self.nullable_string(Some(value));
    }

    /// The length before bytes that the caller writes or sends itself.
    pub fn bytes_len(&mut self, len: usize) {
        self.nullable_count(Some(len));
    }

    pub fn count(&mut self, count: usize) {
        self.nullable_count(Some(count));
    }

    pub fn nullable_count(&mut self, count: Option<usize>) {
        match (count, self.flexible) {
            (Some(n), true) => self.varint(n as u32 + 1),
            (Some(n), false) => self.i32(n as i32),
            (None, true) => self.varint(0),
            (None, false) => self.i32(-1),
        }
    }

    /// No tagged fields.
    pub fn no_tags(&mut self) {
        if self.flexible {
            self.varint(0);
        }
    }
}

fn cut(text: &str, max: usize) -> &str {
    if text.len() <= max {
        return text;
    }
    let end = (0..=max).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
    &text[..end]
}
