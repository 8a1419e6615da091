//! Markers: the control batches of ours, by which the log decides (mirror positions, lane ownership).
//!
//! A marker is a batch of one record with the control bit, no producer and timestamp -1. Clients step
//! over it as over any control batch. All numbers are big-endian; a value begins with its version.
//!
//! ```text
//! key:         version i16 = 0 | type i16 (100 mirror, 101 lane activate, 102 lane deactivate,
//!              103 lane purge, 104 extractors)
//! text:        length i32 | UTF-8          list of texts: count i32 (-1: none) | texts
//! mirror:      version i16 = 0 | origin region 16 | incarnation 16 | origin epoch i32 | first i64
//!              | next i64 | byte length u64 | CRC of the last batch u32
//!              | batch count i32 | batches: (local offset delta i32, origin base offset i64)
//!              | extractors: list of texts
//! lane cut:    version i16 = 0 | group text | lane text | coordinator epoch i32
//!              | offset of the previous marker i64 (-1: none)
//! lane purge:  version i16 = 0 | lane text | coordinator epoch i32
//! extractors:  version i16 = 0 | list of texts
//! ```

use bytes::{BufMut, Bytes, BytesMut};

use crate::batch::{Attributes, Batch, BatchError, Codec};
use crate::names::{RegionId, TopicId};
use crate::offset::{LeaderEpoch, Offset, TimestampMs};
use crate::primitive::{DecodeError, Reader};
use crate::record::{self, BatchBuilder, Records};

/// A control batch of ours.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Marker {
    Mirror(MirrorMarker),
    LaneActivate(LaneCut),
    LaneDeactivate(LaneCut),
    LanePurge(LanePurge),
    /// The extractor list that holds from here on.
    Extractors(Vec<String>),
}

/// What one mirrored append covers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MirrorMarker {
    pub origin: RegionId,
    pub incarnation: TopicId,
    pub origin_epoch: LeaderEpoch,
    /// First origin offset covered.
    pub first: Offset,
    /// Origin offset after the last one covered.
    pub next: Offset,
    /// Per batch: local offset from the marker's own, and the batch's base offset at the origin.
    pub batches: Vec<(i32, Offset)>,
    /// Bytes of the covered batches together.
    pub byte_len: u64,
    /// CRC of the last covered batch as it was at the origin.
    pub last_crc: u32,
    /// Set where the unit holds lane records: the list they were judged by.
    pub extractors: Option<Vec<String>>,
}

/// From this offset on a lane's group owns, or no longer owns, the lane's records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaneCut {
    pub group: String,
    pub lane: String,
    pub coordinator_epoch: i32,
    /// Offset of the previous marker of (group, lane) that the coordinator knew.
    pub previous: Option<Offset>,
}

/// Everything of the lane below this offset is hidden from a later lane of the same name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LanePurge {
    pub lane: String,
    pub coordinator_epoch: i32,
}

const MIRROR: i16 = 100;
const LANE_ACTIVATE: i16 = 101;
const LANE_DEACTIVATE: i16 = 102;
const LANE_PURGE: i16 = 103;
const EXTRACTORS: i16 = 104;
const SKIP: i16 = 105;
const KEY_VERSION: i16 = 0;
const VALUE_VERSION: i16 = 0;

/// The batch of a marker at `base`, under `epoch`.
pub fn marker_batch(marker: &Marker, base: Offset, epoch: LeaderEpoch) -> Batch {
    control_batch(base, 0, epoch, marker.kind(), &marker.encode())
}

/// A control batch over `[from, to)` that says nothing: the answer to a reader from whom everything
/// there is hidden. It is never in a log, and covers at most what one batch can; `from < to`.
///
/// Its record has the last offset, because some clients go on after the last record, not the batch.
pub fn skip_batch(from: Offset, to: Offset, epoch: LeaderEpoch) -> Batch {
    let last = (to.0 - from.0 - 1).clamp(0, i64::from(i32::MAX)) as i32;
    control_batch(from, last, epoch, SKIP, &VALUE_VERSION.to_be_bytes())
}

fn control_batch(base: Offset, delta: i32, epoch: LeaderEpoch, kind: i16, value: &[u8]) -> Batch {
    let mut key = [0; 4];
    key[..2].copy_from_slice(&KEY_VERSION.to_be_bytes());
    key[2..].copy_from_slice(&kind.to_be_bytes());
    let mut builder = BatchBuilder::new(base, TimestampMs::NONE, Codec::None);
    builder.attributes(Attributes::CONTROL).leader_epoch(epoch);
    builder.push(delta, 0, Some(&key), Some(value), &[]);
    builder.build()
}

/// The marker in a batch; `None` if the batch is data or a control batch of Kafka's or of a later type.
/// A marker of ours that cannot be read, or of a newer version, is an error: to go on would be to guess.
pub fn parse_marker(batch: &Batch) -> Result<Option<Marker>, BatchError> {
    if !batch.header.is_control() || batch.header.record_count != 1 {
        return Ok(None);
    }
    let section = record::unpack(batch)?;
    let record = Records::new(&section, 1).next().ok_or(BAD)??;
    let Some(&[v0, v1, k0, k1]) = record.key.and_then(|key| key.first_chunk::<4>()) else { return Err(BAD) };
    let kind = i16::from_be_bytes([k0, k1]);
    if !(MIRROR..=EXTRACTORS).contains(&kind) {
        return Ok(None);
    }
    if i16::from_be_bytes([v0, v1]) != KEY_VERSION {
        return Err(NEWER);
    }
    let value = Bytes::copy_from_slice(record.value.ok_or(BAD)?);
    let mut reader = Reader::new(value, false);
    if reader.i16().map_err(bad)? != VALUE_VERSION {
        return Err(NEWER);
    }
    let marker = Marker::decode(kind, &mut reader).map_err(bad)?;
    reader.finish().map_err(bad)?;
    Ok(Some(marker))
}

const BAD: BatchError = BatchError::Records("a marker cannot be read");
const NEWER: BatchError = BatchError::Records("a marker has a newer version than this program knows");

fn bad(_: DecodeError) -> BatchError {
    BAD
}

impl Marker {
    fn kind(&self) -> i16 {
        match self {
            Marker::Mirror(_) => MIRROR,
            Marker::LaneActivate(_) => LANE_ACTIVATE,
            Marker::LaneDeactivate(_) => LANE_DEACTIVATE,
            Marker::LanePurge(_) => LANE_PURGE,
            Marker::Extractors(_) => EXTRACTORS,
        }
    }

    fn encode(&self) -> Bytes {
        let mut out = BytesMut::new();
        out.put_i16(VALUE_VERSION);
        match self {
            Marker::Mirror(mirror) => mirror.encode(&mut out),
            Marker::LaneActivate(cut) | Marker::LaneDeactivate(cut) => {
                put_text(&mut out, &cut.group);
                put_text(&mut out, &cut.lane);
                out.put_i32(cut.coordinator_epoch);
                out.put_i64(cut.previous.map_or(-1, |offset| offset.0));
            }
            Marker::LanePurge(purge) => {
                put_text(&mut out, &purge.lane);
                out.put_i32(purge.coordinator_epoch);
            }
            Marker::Extractors(list) => put_texts(&mut out, Some(list)),
        }
        out.freeze()
    }

    fn decode(kind: i16, r: &mut Reader) -> Result<Marker, DecodeError> {
        Ok(match kind {
            MIRROR => Marker::Mirror(MirrorMarker::decode(r)?),
            LANE_ACTIVATE => Marker::LaneActivate(LaneCut::decode(r)?),
            LANE_DEACTIVATE => Marker::LaneDeactivate(LaneCut::decode(r)?),
            LANE_PURGE => Marker::LanePurge(LanePurge { lane: text(r)?, coordinator_epoch: r.i32()? }),
            _ => Marker::Extractors(texts(r)?.ok_or(DecodeError::Null)?),
        })
    }
}

impl MirrorMarker {
    fn encode(&self, out: &mut BytesMut) {
        out.put_slice(self.origin.0.as_bytes());
        out.put_slice(self.incarnation.0.as_bytes());
        out.put_i32(self.origin_epoch.0);
        out.put_i64(self.first.0);
        out.put_i64(self.next.0);
        out.put_u64(self.byte_len);
        out.put_u32(self.last_crc);
        out.put_i32(self.batches.len() as i32);
        for (delta, base) in &self.batches {
            out.put_i32(*delta);
            out.put_i64(base.0);
        }
        put_texts(out, self.extractors.as_deref());
    }

    fn decode(r: &mut Reader) -> Result<MirrorMarker, DecodeError> {
        let mut marker = MirrorMarker {
            origin: RegionId(r.uuid()?),
            incarnation: TopicId(r.uuid()?),
            origin_epoch: LeaderEpoch(r.i32()?),
            first: Offset(r.i64()?),
            next: Offset(r.i64()?),
            byte_len: r.i64()? as u64,
            last_crc: r.u32()?,
            batches: Vec::new(),
            extractors: None,
        };
        let count = r.count(12)?;
        marker.batches.reserve_exact(count);
        for _ in 0..count {
            marker.batches.push((r.i32()?, Offset(r.i64()?)));
        }
        marker.extractors = texts(r)?;
        Ok(marker)
    }
}

impl LaneCut {
    fn decode(r: &mut Reader) -> Result<LaneCut, DecodeError> {
        let (group, lane) = (text(r)?, text(r)?);
        let coordinator_epoch = r.i32()?;
        let previous = Some(Offset(r.i64()?)).filter(|offset| offset.0 >= 0);
        Ok(LaneCut { group, lane, coordinator_epoch, previous })
    }
}

fn put_text(out: &mut BytesMut, text: &str) {
    out.put_i32(text.len() as i32);
    out.put_slice(text.as_bytes());
}

fn put_texts(out: &mut BytesMut, texts: Option<&[String]>) {
    out.put_i32(texts.map_or(-1, |texts| texts.len() as i32));
    for text in texts.unwrap_or_default() {
        put_text(out, text);
    }
}

fn text(r: &mut Reader) -> Result<String, DecodeError> {
    let bytes = r.nullable_bytes()?.ok_or(DecodeError::Null)?;
    String::from_utf8(bytes.into()).map_err(|_| DecodeError::Text)
}

fn texts(r: &mut Reader) -> Result<Option<Vec<String>>, DecodeError> {
    let Some(count) = r.nullable_count(4)? else { return Ok(None) };
    (0..count).map(|_| text(r)).collect::<Result<_, _>>().map(Some)
}

#[cfg(test)]
#[path = "control_tests.rs"]
mod tests;
