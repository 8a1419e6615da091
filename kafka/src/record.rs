//! Records inside a batch: reading them in place, and building batches.
//!
//! Headers are a list: order, repeats, null and empty values survive (the reason for a parser of our
//! own). Nothing here copies a record to read it.
//!
//! ```text
//! record:  length varint | attributes i8 | timestamp delta varlong | offset delta varint
//!          | key length varint (-1: null) | key | value length varint (-1: null) | value
//!          | header count varint | headers
//! header:  key length varint | key (UTF-8) | value length varint (-1: null) | value
//! ```
//! All varints are zigzag (KIP-98).

use bytes::{Bytes, BytesMut};

use crate::batch::{Attributes, Batch, BatchError, BatchHeader, Codec};
use crate::compress;
use crate::limits::{BATCH_UNPACKED_BYTES_MAX, HEADERS_PER_RECORD_MAX, RECORDS_PER_BATCH_MAX};
use crate::offset::{LeaderEpoch, Offset, ProducerEpoch, ProducerId, TimestampMs};

/// One header of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header<'a> {
    pub key: &'a str,
    pub value: Option<&'a [u8]>,
}

/// One record, in place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record<'a> {
    pub offset_delta: i32,
    pub timestamp_delta: i64,
    pub key: Option<&'a [u8]>,
    pub value: Option<&'a [u8]>,
    /// The record as stored, its length included.
    pub raw: &'a [u8],
    header_count: usize,
    headers: &'a [u8],
}

/// Iterator over an unpacked records section. Ends after the first error.
#[derive(Clone, Debug)]
pub struct Records<'a> {
    rest: &'a [u8],
    left: i32,
}

impl<'a> Record<'a> {
    /// The headers in order. Ends after the first error.
    pub fn headers(&self) -> Headers<'a> {
        Headers { rest: self.headers, left: self.header_count }
    }

    pub fn header_count(&self) -> usize {
        self.header_count
    }

    /// `body` is the record without its length; `raw` with it.
    fn parse(raw: &'a [u8], body: &'a [u8]) -> Result<Record<'a>, BatchError> {
        let mut cursor = Cursor(body);
        cursor.take(1)?; // attributes: none is defined
        let timestamp_delta = cursor.varlong()?;
        let offset_delta = cursor.varint()?;
        let key = cursor.nullable_bytes()?;
        let value = cursor.nullable_bytes()?;
        let header_count = cursor.varint()?;
        let header_count = usize::try_from(header_count)
            .ok()
            .filter(|n| *n <= HEADERS_PER_RECORD_MAX && *n <= cursor.0.len())
            .ok_or(BatchError::Records("a header count is impossible"))?;
        if header_count == 0 && !cursor.0.is_empty() {
            return Err(BatchError::Records("a record is longer than its fields"));
        }
        Ok(Record { offset_delta, timestamp_delta, key, value, raw, header_count, headers: cursor.0 })
    }
}

/// Iterator over the headers of a record.
#[derive(Clone, Debug)]
pub struct Headers<'a> {
    rest: &'a [u8],
    left: usize,
}

impl<'a> Iterator for Headers<'a> {
    type Item = Result<Header<'a>, BatchError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.left == 0 {
            return None;
        }
        self.left -= 1;
        let mut cursor = Cursor(self.rest);
        let header = cursor.header();
        self.rest = cursor.0;
        let header = match header {
            Ok(_) if self.left == 0 && !self.rest.is_empty() => {
                Err(BatchError::Records("a record is longer than its fields"))
            }
            other => other,
        };
        if header.is_err() {
            self.left = 0;
        }
        Some(header)
    }
}

impl<'a> Records<'a> {
    /// Over `section`, which must hold exactly `record_count` records.
    pub fn new(section: &'a [u8], record_count: i32) -> Records<'a> {
        Records { rest: section, left: record_count }
    }

    fn parse_next(&mut self) -> Result<Record<'a>, BatchError> {
        let mut cursor = Cursor(self.rest);
        let len =
            usize::try_from(cursor.varint()?).map_err(|_| BatchError::Records("a length is negative"))?;
        let body = cursor.take(len)?;
        let raw = &self.rest[..self.rest.len() - cursor.0.len()];
        self.rest = cursor.0;
        Record::parse(raw, body)
    }
}

impl<'a> Iterator for Records<'a> {
    type Item = Result<Record<'a>, BatchError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.left <= 0 {
            let trailing = self.left == 0 && !self.rest.is_empty();
            self.left = -1;
            return trailing.then_some(Err(BatchError::Records("bytes follow the last record")));
        }
        self.left -= 1;
        let record = self.parse_next();
        if record.is_err() {
            self.left = -1;
        }
        Some(record)
    }
}

/// The records section of a batch, unpacked. Free of copies for a batch that is not packed.
pub fn unpack(batch: &Batch) -> Result<Bytes, BatchError> {
    match batch.header.attributes.codec()? {
        Codec::None => Ok(batch.records()),
        codec => compress::unpack(codec, &batch.bytes[crate::batch::HEADER_LEN..], BATCH_UNPACKED_BYTES_MAX),
    }
}

/// Walks every record and header of a batch: counts, lengths, rising offset deltas within the header's.
pub fn check_records(batch: &Batch) -> Result<(), BatchError> {
    let count = batch.header.record_count;
    if count as usize > RECORDS_PER_BATCH_MAX {
        return Err(BatchError::Records("a record count is impossible"));
    }
    let section = unpack(batch)?;
    let mut previous = -1;
    for record in Records::new(&section, count) {
        let record = record?;
        if record.offset_delta <= previous || record.offset_delta > batch.header.last_offset_delta {
            return Err(BatchError::Records("offset deltas do not rise within the batch"));
        }
        previous = record.offset_delta;
        for header in record.headers() {
            header?;
        }
    }
    Ok(())
}

/// Builds one batch, record by record.
#[derive(Debug)]
pub struct BatchBuilder {
    header: BatchHeader,
    codec: Codec,
    records: BytesMut,
    last_offset_delta: Option<i32>,
    max_timestamp_delta: Option<i64>,
}

impl BatchBuilder {
    pub fn new(base_offset: Offset, base_timestamp: TimestampMs, codec: Codec) -> BatchBuilder {
        let header = BatchHeader {
            base_offset,
            batch_length: 0,
            leader_epoch: LeaderEpoch::NONE,
            crc: 0,
            attributes: Attributes(codec_bits(codec)),
            last_offset_delta: 0,
            base_timestamp,
            max_timestamp: base_timestamp,
            producer_id: ProducerId::NONE,
            producer_epoch: ProducerEpoch(-1),
            base_sequence: -1,
            record_count: 0,
        };
        BatchBuilder {
            header,
            codec,
            records: BytesMut::new(),
            last_offset_delta: None,
            max_timestamp_delta: None,
        }
    }

    /// For a batch that keeps some records of `original`: same offsets, codec, producer and timestamps.
    /// Records are pushed as they are (`push_raw`). An unknown codec becomes none.
    pub fn like(original: &BatchHeader) -> BatchBuilder {
        let codec = original.attributes.codec().unwrap_or(Codec::None);
        let attributes = Attributes((original.attributes.0 & !7) | codec_bits(codec));
        let mut builder = BatchBuilder::new(original.base_offset, original.base_timestamp, codec);
        builder.header = BatchHeader { attributes, record_count: 0, ..*original };
        builder.last_offset_delta = Some(original.last_offset_delta);
        builder
    }

    pub fn push(
        &mut self,
        offset_delta: i32,
        timestamp_delta: i64,
        key: Option<&[u8]>,
        value: Option<&[u8]>,
        headers: &[(&str, Option<&[u8]>)],
    ) {
        let mut body = BytesMut::with_capacity(
            32 + key.map_or(0, <[u8]>::len) + value.map_or(0, <[u8]>::len) + headers.len() * 32,
        );
        body.extend_from_slice(&[0]);
        put_varlong(&mut body, timestamp_delta);
        put_varlong(&mut body, i64::from(offset_delta));
        put_nullable(&mut body, key);
        put_nullable(&mut body, value);
        put_varlong(&mut body, headers.len() as i64);
        for (key, value) in headers {
            put_nullable(&mut body, Some(key.as_bytes()));
            put_nullable(&mut body, *value);
        }
        put_varlong(&mut self.records, body.len() as i64);
        self.records.extend_from_slice(&body);
        self.count(offset_delta, timestamp_delta);
    }

    /// Adds a record exactly as it is stored; its deltas must hold against this batch's bases.
    pub fn push_raw(&mut self, record: &Record<'_>) {
        self.records.extend_from_slice(record.raw);
        self.count(record.offset_delta, record.timestamp_delta);
    }

    pub fn producer(&mut self, id: ProducerId, epoch: ProducerEpoch, base_sequence: i32) -> &mut Self {
        self.header.producer_id = id;
        self.header.producer_epoch = epoch;
        self.header.base_sequence = base_sequence;
        self
    }

    pub fn leader_epoch(&mut self, epoch: LeaderEpoch) -> &mut Self {
        self.header.leader_epoch = epoch;
        self
    }

    /// Adds attribute bits (`Attributes::CONTROL` ...); the codec's bits are kept.
    pub fn attributes(&mut self, bits: i16) -> &mut Self {
        self.header.attributes.0 |= bits & !7;
        self
    }

    /// The last offset delta, where it is beyond the last record pushed.
    pub fn last_offset_delta(&mut self, delta: i32) -> &mut Self {
        self.last_offset_delta = Some(delta);
        self
    }

    pub fn is_empty(&self) -> bool {
        self.header.record_count == 0
    }

    pub fn record_count(&self) -> i32 {
        self.header.record_count
    }

    /// Bytes of the records so far, before packing.
    pub fn plain_len(&self) -> usize {
        self.records.len()
    }

    pub fn build(mut self) -> Batch {
        if let Some(delta) = self.last_offset_delta {
            self.header.last_offset_delta = delta;
        }
        match self.max_timestamp_delta {
            // With LogAppendTime the maximum is the append time, whatever the records say.
            Some(delta) if !self.header.attributes.is_log_append_time() => {
                self.header.max_timestamp = TimestampMs(self.header.base_timestamp.0.saturating_add(delta));
            }
            _ => {}
        }
        match self.codec {
            Codec::None => self.header.seal(&self.records),
            codec => self.header.seal(&compress::pack(codec, &self.records)),
        }
    }

    fn count(&mut self, offset_delta: i32, timestamp_delta: i64) {
        self.header.record_count += 1;
        self.header.last_offset_delta = self.header.last_offset_delta.max(offset_delta);
        let max = self.max_timestamp_delta.unwrap_or(i64::MIN);
        self.max_timestamp_delta = Some(max.max(timestamp_delta));
    }
}

/// The attribute bits of a codec.
pub fn codec_bits(codec: Codec) -> i16 {
    match codec {
        Codec::None => 0,
        Codec::Gzip => 1,
        Codec::Snappy => 2,
        Codec::Lz4 => 3,
        Codec::Zstd => 4,
    }
}

fn put_nullable(out: &mut BytesMut, bytes: Option<&[u8]>) {
    match bytes {
        Some(bytes) => {
            put_varlong(out, bytes.len() as i64);
            out.extend_from_slice(bytes);
        }
        None => put_varlong(out, -1),
    }
}

/// Zigzag; a varint is the same encoding of a smaller number.
fn put_varlong(out: &mut BytesMut, value: i64) {
    let mut zigzag = ((value << 1) ^ (value >> 63)) as u64;
    while zigzag >= 0x80 {
        out.extend_from_slice(&[zigzag as u8 | 0x80]);
        zigzag >>= 7;
    }
    out.extend_from_slice(&[zigzag as u8]);
}

struct Cursor<'a>(&'a [u8]);

impl<'a> Cursor<'a> {
    fn take(&mut self, len: usize) -> Result<&'a [u8], BatchError> {
        let (taken, rest) =
            self.0.split_at_checked(len).ok_or(BatchError::Records("a record ends beyond its batch"))?;
        self.0 = rest;
        Ok(taken)
    }

    fn unsigned(&mut self, bits: u32) -> Result<u64, BatchError> {
        const WRONG: BatchError = BatchError::Records("a varint is too long");
        let mut value = 0u64;
        for (at, byte) in self.0.iter().enumerate() {
            let shift = 7 * at as u32;
            let part = u64::from(byte & 0x7f);
            if shift >= bits || (part << shift) >> shift != part || (bits == 32 && (part << shift) >> 32 != 0)
            {
                return Err(WRONG);
            }
            value |= part << shift;
            if byte & 0x80 == 0 {
                self.0 = &self.0[at + 1..];
                return Ok(value);
            }
        }
        Err(BatchError::Records("a record ends beyond its batch"))
    }

    fn varint(&mut self) -> Result<i32, BatchError> {
        let zigzag = self.unsigned(32)? as u32;
        Ok((zigzag >> 1) as i32 ^ -((zigzag & 1) as i32))
    }

    fn varlong(&mut self) -> Result<i64, BatchError> {
        let zigzag = self.unsigned(64)?;
        Ok((zigzag >> 1) as i64 ^ -((zigzag & 1) as i64))
    }

    fn nullable_bytes(&mut self) -> Result<Option<&'a [u8]>, BatchError> {
        match self.varint()? {
            -1 => Ok(None),
            len => {
                let len = usize::try_from(len).map_err(|_| BatchError::Records("a length is negative"))?;
                self.take(len).map(Some)
            }
        }
    }

    fn header(&mut self) -> Result<Header<'a>, BatchError> {
        let key = self.nullable_bytes()?.ok_or(BatchError::Records("a header key is null"))?;
        let key = std::str::from_utf8(key).map_err(|_| BatchError::Records("a header key is not UTF-8"))?;
        Ok(Header { key, value: self.nullable_bytes()? })
    }
}

#[cfg(test)]
#[path = "record_tests.rs"]
mod tests;
