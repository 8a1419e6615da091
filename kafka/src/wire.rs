//! Fields of our own formats: fixed-width big-endian integers, and byte strings under a u32 length.
//!
//! Used by the private API keys and by the frames of a link; Kafka's own messages are not here.
//! A reader never trusts a length: nothing is allocated before the bytes are known to be there.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use uuid::Uuid;

use crate::limits::ARRAY_LEN_MAX;

/// Why bytes are not the message they should be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    #[error("message ends inside the field {0}")]
    Truncated(&'static str),
    #[error("field {0} holds an impossible value")]
    Value(&'static str),
    #[error("field {0} is not UTF-8")]
    Text(&'static str),
    #[error("{0} bytes are left over after the message")]
    LeftOver(usize),
}

/// Takes fields off the front of a message.
#[derive(Debug)]
pub struct Reader {
    bytes: Bytes,
}

impl Reader {
    pub fn new(bytes: Bytes) -> Reader {
        Reader { bytes }
    }

    fn need(&self, len: usize, field: &'static str) -> Result<(), WireError> {
        if self.bytes.len() < len { Err(WireError::Truncated(field)) } else { Ok(()) }
    }

    pub fn u8(&mut self, field: &'static str) -> Result<u8, WireError> {
        self.need(1, field)?;
        Ok(self.bytes.get_u8())
    }

    pub fn flag(&mut self, field: &'static str) -> Result<bool, WireError> {
        match self.u8(field)? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(WireError::Value(field)),
        }
    }

    pub fn i16(&mut self, field: &'static str) -> Result<i16, WireError> {
        self.need(2, field)?;
        Ok(self.bytes.get_i16())
    }

    pub fn u32(&mut self, field: &'static str) -> Result<u32, WireError> {
        self.need(4, field)?;
        Ok(self.bytes.get_u32())
    }

    pub fn i32(&mut self, field: &'static str) -> Result<i32, WireError> {
        self.need(4, field)?;
        Ok(self.bytes.get_i32())
    }

    pub fn u64(&mut self, field: &'static str) -> Result<u64, WireError> {
        self.need(8, field)?;
        Ok(self.bytes.get_u64())
    }

    pub fn i64(&mut self, field: &'static str) -> Result<i64, WireError> {
        self.need(8, field)?;
        Ok(self.bytes.get_i64())
    }

    pub fn uuid(&mut self, field: &'static str) -> Result<Uuid, WireError> {
        self.need(16, field)?;
        let mut raw = [0; 16];
        self.bytes.copy_to_slice(&mut raw);
        Ok(Uuid::from_bytes(raw))
    }

    /// Bytes under a length; a slice of the message, not a copy.
    pub fn bytes(&mut self, field: &'static str) -> Result<Bytes, WireError> {
        let len = self.u32(field)? as usize;
        self.need(len, field)?;
        Ok(self.bytes.split_to(len))
    }

    pub fn text(&mut self, field: &'static str) -> Result<String, WireError> {
        let raw = self.bytes(field)?;
        std::str::from_utf8(&raw).map(str::to_owned).map_err(|_| WireError::Text(field))
    }

    /// A value that may be absent: one flag byte before it.
    pub fn option<T>(
        &mut self,
        field: &'static str,
        read: impl FnOnce(&mut Reader) -> Result<T, WireError>,
    ) -> Result<Option<T>, WireError> {
        if self.flag(field)? { read(self).map(Some) } else { Ok(None) }
    }

    /// An array under a u32 count. Grows as elements are read, so a lying count costs nothing.
    pub fn array<T>(
        &mut self,
        field: &'static str,
        mut read: impl FnMut(&mut Reader) -> Result<T, WireError>,
    ) -> Result<Vec<T>, WireError> {
        let count = self.u32(field)? as usize;
        if count > ARRAY_LEN_MAX {
            return Err(WireError::Value(field));
        }
        let mut all = Vec::new();
        for _ in 0..count {
            all.push(read(self)?);
        }
        Ok(all)
    }

    /// Ends the message: bytes left over are an error.
    pub fn end(self) -> Result<(), WireError> {
        if self.bytes.is_empty() { Ok(()) } else { Err(WireError::LeftOver(self.bytes.len())) }
    }

    /// All that is left, for a message that ends in raw bytes.
    pub fn rest(self) -> Bytes {
        self.bytes
    }
}

/// Appends fields; the mirror image of [`Reader`].
pub trait Writer {
    fn flag(&mut self, value: bool);
    fn uuid(&mut self, value: Uuid);
    fn bytes(&mut self, value: &[u8]);
    fn text(&mut self, value: &str) {
        self.bytes(value.as_bytes());
    }
    fn option<T>(&mut self, value: Option<&T>, write: impl FnOnce(&mut Self, &T));
    fn array<T>(&mut self, values: &[T], write: impl FnMut(&mut Self, &T));
}

impl Writer for BytesMut {
    fn flag(&mut self, value: bool) {
        self.put_u8(u8::from(value));
    }

    fn uuid(&mut self, value: Uuid) {
        self.put_slice(value.as_bytes());
    }

    fn bytes(&mut self, value: &[u8]) {
        self.put_u32(u32::try_from(value.len()).expect("a field is far below 4 GiB"));
        self.put_slice(value);
    }

    fn option<T>(&mut self, value: Option<&T>, write: impl FnOnce(&mut Self, &T)) {
        self.flag(value.is_some());
        if let Some(value) = value {
            write(self, value);
        }
    }

    fn array<T>(&mut self, values: &[T], mut write: impl FnMut(&mut Self, &T)) {
        assert!(values.len() <= ARRAY_LEN_MAX, "arrays are cut before they are written");
        self.put_u32(values.len() as u32);
        for value in values {
            write(self, value);
        }
    }
}
