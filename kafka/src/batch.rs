//! Record batches v2 (KIP-98) as bytes: the 61-byte header, its checks, and restamping.
//!
//! Owns the view of a batch as one slice of bytes that travels unchanged; what is inside the
//! records is `record.rs`. Only base offset, leader epoch and (for LogAppendTime) the timestamp
//! fields are ever overwritten.
//!
//! ```text
//!  0        8        12          16    17   21         23                27
//!  | base   | batch  | leader    | mag | crc | attri-  | last offset     | base timestamp ...
//!  | offset | length | epoch     | ic  |     | butes   | delta           |
//!  27: base timestamp i64, 35: max timestamp i64, 43: producer id i64, 51: producer epoch i16,
//!  53: base sequence i32, 57: record count i32, 61: records. The CRC-32C covers 21 to the end.
//! ```

use bytes::{Bytes, BytesMut};

use crate::offset::{LeaderEpoch, Offset, ProducerEpoch, ProducerId, TimestampMs};

/// Bytes of a batch before its first record.
pub const HEADER_LEN: usize = 61;
/// Bytes before the part that `batch_length` counts.
pub const LENGTH_PREFIX: usize = 12;
/// First byte that the CRC covers.
pub const CRC_START: usize = 21;

/// The codec of a batch: the lowest three attribute bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Codec {
    None,
    Gzip,
    Snappy,
    Lz4,
    Zstd,
}

/// The attribute bits of a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Attributes(pub i16);

/// A decoded batch header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchHeader {
    pub base_offset: Offset,
    /// Bytes after the first 12.
    pub batch_length: i32,
    pub leader_epoch: LeaderEpoch,
    pub crc: u32,
    pub attributes: Attributes,
    pub last_offset_delta: i32,
    pub base_timestamp: TimestampMs,
    pub max_timestamp: TimestampMs,
    pub producer_id: ProducerId,
    pub producer_epoch: ProducerEpoch,
    pub base_sequence: i32,
    pub record_count: i32,
}

/// One whole batch: `bytes.len() == header.total_len()`.
#[derive(Clone, Debug)]
pub struct Batch {
    pub header: BatchHeader,
    pub bytes: Bytes,
}

/// Why bytes are not a batch.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BatchError {
    #[error("batch ends after {have} bytes, {need} are needed")]
    Truncated { have: usize, need: usize },
    #[error("batch length {0} is impossible")]
    Length(i32),
    #[error("batch has magic {0}; only 2 is accepted")]
    Magic(i8),
    #[error("batch CRC is {computed:#010x}, its header says {stored:#010x}")]
    Crc { stored: u32, computed: u32 },
    #[error("batch header contradicts itself: {0}")]
    Header(&'static str),
    #[error("compression codec {0} is unknown")]
    Codec(i16),
    #[error("records do not fit their batch: {0}")]
    Records(&'static str),
    #[error("batch unpacks to more than {0} bytes")]
    Unpacked(usize),
}

impl Attributes {
    pub const TRANSACTIONAL: i16 = 0x10;
    pub const CONTROL: i16 = 0x20;
    pub const LOG_APPEND_TIME: i16 = 0x08;
    pub const DELETE_HORIZON: i16 = 0x40;

    pub fn codec(self) -> Result<Codec, BatchError> {
        Ok(match self.0 & 7 {
            0 => Codec::None,
            1 => Codec::Gzip,
            2 => Codec::Snappy,
            3 => Codec::Lz4,
            4 => Codec::Zstd,
            other => return Err(BatchError::Codec(other)),
        })
    }

    pub fn is_control(self) -> bool {
        self.0 & Self::CONTROL != 0
    }

    pub fn is_transactional(self) -> bool {
        self.0 & Self::TRANSACTIONAL != 0
    }

    pub fn is_log_append_time(self) -> bool {
        self.0 & Self::LOG_APPEND_TIME != 0
    }
}

impl BatchHeader {
    /// Reads the first 61 bytes; checks magic and that lengths and counts are possible, not the CRC.
    pub fn parse(bytes: &[u8]) -> Result<BatchHeader, BatchError> {
        let Some(h) = bytes.first_chunk::<HEADER_LEN>() else {
            // The magic says more to a person than "too short" when an old format was sent.
            if bytes.len() > 16 && bytes[16] != 2 {
                return Err(BatchError::Magic(bytes[16] as i8));
            }
            return Err(BatchError::Truncated { have: bytes.len(), need: HEADER_LEN });
        };
        if h[16] != 2 {
            return Err(BatchError::Magic(h[16] as i8));
        }
        let header = BatchHeader {
            base_offset: Offset(i64_at(h, 0)),
            batch_length: i32_at(h, 8),
            leader_epoch: LeaderEpoch(i32_at(h, 12)),
            crc: i32_at(h, 17) as u32,
            attributes: Attributes(i16_at(h, 21)),
            last_offset_delta: i32_at(h, 23),
            base_timestamp: TimestampMs(i64_at(h, 27)),
            max_timestamp: TimestampMs(i64_at(h, 35)),
            producer_id: ProducerId(i64_at(h, 43)),
            producer_epoch: ProducerEpoch(i16_at(h, 51)),
            base_sequence: i32_at(h, 53),
            record_count: i32_at(h, 57),
        };
        if header.batch_length < (HEADER_LEN - LENGTH_PREFIX) as i32 {
            return Err(BatchError::Length(header.batch_length));
        }
        if header.last_offset_delta < 0 || header.record_count < 0 || header.base_offset.0 < 0 {
            return Err(BatchError::Header("a count or an offset is negative"));
        }
        if header.base_offset.0.checked_add(i64::from(header.last_offset_delta) + 1).is_none() {
            return Err(BatchError::Header("its last offset is beyond the largest offset"));
        }
        Ok(header)
    }

    /// The 61 bytes of this header.
    pub fn encode(&self) -> [u8; HEADER_LEN] {
        let mut h = [0; HEADER_LEN];
        h[0..8].copy_from_slice(&self.base_offset.0.to_be_bytes());
        h[8..12].copy_from_slice(&self.batch_length.to_be_bytes());
        h[12..16].copy_from_slice(&self.leader_epoch.0.to_be_bytes());
        h[16] = 2;
        h[17..21].copy_from_slice(&self.crc.to_be_bytes());
        h[21..23].copy_from_slice(&self.attributes.0.to_be_bytes());
        h[23..27].copy_from_slice(&self.last_offset_delta.to_be_bytes());
        h[27..35].copy_from_slice(&self.base_timestamp.0.to_be_bytes());
        h[35..43].copy_from_slice(&self.max_timestamp.0.to_be_bytes());
        h[43..51].copy_from_slice(&self.producer_id.0.to_be_bytes());
        h[51..53].copy_from_slice(&self.producer_epoch.0.to_be_bytes());
        h[53..57].copy_from_slice(&self.base_sequence.to_be_bytes());
        h[57..61].copy_from_slice(&self.record_count.to_be_bytes());
        h
    }

    /// Bytes of the whole batch, header included.
    pub fn total_len(&self) -> usize {
        self.batch_length as usize + LENGTH_PREFIX
    }

    pub fn last_offset(&self) -> Offset {
        self.base_offset.plus(i64::from(self.last_offset_delta))
    }

    /// The offset after this batch.
    pub fn next_offset(&self) -> Offset {
        self.last_offset().plus(1)
    }

    pub fn is_control(&self) -> bool {
        self.attributes.is_control()
    }

    /// CRC-32C over the header part from the attributes on, and the records.
    pub fn compute_crc(&self, records: &[u8]) -> u32 {
        crc32c::crc32c_append(crc32c::crc32c(&self.encode()[CRC_START..]), records)
    }
}

impl Batch {
    /// Takes the first batch off `bytes`; checks header and length, and the CRC if asked.
    pub fn split_first(bytes: &mut Bytes, check_crc: bool) -> Result<Batch, BatchError> {
        let header = BatchHeader::parse(bytes)?;
        if bytes.len() < header.total_len() {
            return Err(BatchError::Truncated { have: bytes.len(), need: header.total_len() });
        }
        let batch = Batch { header, bytes: bytes.split_to(header.total_len()) };
        if check_crc {
            batch.check_crc()?;
        }
        Ok(batch)
    }

    /// All batches of `bytes`; an error names the first that is wrong.
    pub fn split_all(mut bytes: Bytes, check_crc: bool) -> Result<Vec<Batch>, BatchError> {
        let mut batches = Vec::new();
        while !bytes.is_empty() {
            batches.push(Batch::split_first(&mut bytes, check_crc)?);
        }
        Ok(batches)
    }

    pub fn check_crc(&self) -> Result<(), BatchError> {
        let computed = crc32c::crc32c(&self.bytes[CRC_START..]);
        if computed != self.header.crc {
            return Err(BatchError::Crc { stored: self.header.crc, computed });
        }
        Ok(())
    }

    /// The records as stored: compressed by the header's codec.
    pub fn records(&self) -> Bytes {
        self.bytes.slice(HEADER_LEN..)
    }

    /// The same batch under another base offset and leader epoch; the CRC does not cover either.
    pub fn restamped(&self, base_offset: Offset, leader_epoch: LeaderEpoch) -> Batch {
        let header = BatchHeader { base_offset, leader_epoch, ..self.header };
        header.with_records(&self.bytes[HEADER_LEN..])
    }
}

impl BatchHeader {
    /// Joins this header and `records` into a batch. `crc` and `batch_length` are taken as they are.
    pub fn with_records(self, records: &[u8]) -> Batch {
        let mut bytes = BytesMut::with_capacity(HEADER_LEN + records.len());
        bytes.extend_from_slice(&self.encode());
        bytes.extend_from_slice(records);
        Batch { header: self, bytes: bytes.freeze() }
    }

    /// Joins this header and `records`, with length and CRC computed here.
    pub fn seal(mut self, records: &[u8]) -> Batch {
        self.batch_length = (HEADER_LEN - LENGTH_PREFIX + records.len()) as i32;
        self.crc = self.compute_crc(records);
        self.with_records(records)
    }
}

fn i64_at(h: &[u8; HEADER_LEN], at: usize) -> i64 {
    i64::from_be_bytes(std::array::from_fn(|i| h[at + i]))
}

fn i32_at(h: &[u8; HEADER_LEN], at: usize) -> i32 {
    i32::from_be_bytes(std::array::from_fn(|i| h[at + i]))
}

fn i16_at(h: &[u8; HEADER_LEN], at: usize) -> i16 {
    i16::from_be_bytes(std::array::from_fn(|i| h[at + i]))
}
