//! The fold of a partition's log: everything the log says that is more than its records.
//!
//! Applied batch by batch, at recovery exactly as at append, so that a restart cannot differ from
//! having been there. A snapshot is this fold at an offset (storage: `<base>.state`), checksummed:
//! it is part of the log, because retention removes what it was computed from.
//!
//! ```text
//! "SLST" | version i16 | end offset i64 | payload length u32 | payload | CRC-32C u32 (of all before)
//! payload: log start i64, epochs, producers, vector, lane fold
//! ```

use std::collections::BTreeMap;

use kafka::control::MirrorMarker;
use kafka::{BatchHeader, LeaderEpoch, Offset, RegionId, TimestampMs, TopicId};
use lane_core::{LaneFold, LaneMarker, LaneSummary};
use uuid::Uuid;

use crate::epochs::Epochs;
use crate::producer::Producers;

/// Where records came from: one incarnation of a topic in one region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Origin {
    pub region: RegionId,
    pub incarnation: TopicId,
}

/// What this log holds of one origin: all of it below `next`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OriginPosition {
    /// The next origin offset to apply.
    pub next: Offset,
    /// Origin epoch of the last unit.
    pub epoch: LeaderEpoch,
    /// Origin base offset and CRC of the last batch applied, to recognise a truncated source.
    pub last_base: Offset,
    pub last_crc: u32,
    /// Local offset after the last unit.
    pub local_next: Offset,
}

/// The state of a partition at `end`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Fold {
    /// The next offset: everything below is in this fold, nothing at or above is.
    pub end: Offset,
    pub log_start: Offset,
    pub epochs: Epochs,
    pub producers: Producers,
    pub vector: BTreeMap<Origin, OriginPosition>,
    pub lanes: LaneFold,
}

/// What a batch is to the fold.
#[derive(Clone, Copy, Debug)]
pub enum Content<'a> {
    /// Records of clients, or a control batch of Kafka's own.
    Records,
    /// Records on a topic with lanes, and what their headers say.
    Lanes(&'a LaneSummary),
    Mirror(&'a MirrorMarker),
    Lane(&'a LaneMarker),
}

/// Why bytes are not a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FoldError {
    #[error("snapshot ends early")]
    Truncated,
    #[error("snapshot has a wrong checksum")]
    Checksum,
    #[error("snapshot has format {found}, this build knows up to {known}")]
    Version { found: i16, known: i16 },
    #[error("snapshot contradicts itself: {0}")]
    Content(&'static str),
}

const MAGIC: &[u8; 4] = b"SLST";
const VERSION: i16 = 1;
const HEAD: usize = 18;

impl Fold {
    /// Takes in a batch that lies at its final offsets.
    ///
    /// Records inside a mirror unit are noted by the unit's marker; their batches count here only for
    /// the end offset, the local epoch and their lanes.
    pub fn apply(&mut self, header: &BatchHeader, content: Content<'_>) {
        debug_assert!(header.base_offset >= self.end, "batches arrive in offset order");
        self.epochs.apply(header.leader_epoch, header.base_offset);
        match content {
            Content::Records => self.producers.apply(header),
            Content::Lanes(summary) => {
                self.producers.apply(header);
                self.lanes.note_batch(summary, header.base_offset);
            }
            Content::Mirror(marker) => self.apply_mirror(marker, header),
            Content::Lane(marker) => self.lanes.apply(marker, header.base_offset),
        }
        self.end = header.next_offset();
    }

    fn apply_mirror(&mut self, m: &MirrorMarker, header: &BatchHeader) {
        let origin = Origin { region: m.origin, incarnation: m.incarnation };
        let last_base = m.batches.last().map_or(m.next, |(_, base)| *base);
        let position = OriginPosition {
            next: m.next,
            epoch: m.origin_epoch,
            last_base,
            last_crc: m.last_crc,
            local_next: header.next_offset(),
        };
        self.vector.insert(origin, position);
    }

    /// Moves the log start forward and drops what only the removed part needed.
    pub fn trim(&mut self, log_start: Offset) {
        if log_start > self.log_start {
            self.log_start = log_start;
            self.epochs.trim(log_start);
            self.lanes.trim(log_start);
        }
    }

    /// The snapshot bytes. Producers silent since before `oldest_producer` are dropped first.
    pub fn encode(&mut self, oldest_producer: TimestampMs) -> Vec<u8> {
        self.producers.expire(oldest_producer);
        let mut payload = Vec::with_capacity(256);
        payload.extend_from_slice(&self.log_start.0.to_be_bytes());
        self.epochs.encode(&mut payload);
        self.producers.encode(&mut payload);
        self.encode_vector(&mut payload);
        self.lanes.encode(&mut payload);

        let mut out = Vec::with_capacity(HEAD + payload.len() + 4);
        out.extend_from_slice(MAGIC);
        out.extend_from_slice(&VERSION.to_be_bytes());
        out.extend_from_slice(&self.end.0.to_be_bytes());
        out.extend_from_slice(&(payload.len() as u32).to_be_bytes());
        out.extend_from_slice(&payload);
        let crc = crc32c::crc32c(&out);
        out.extend_from_slice(&crc.to_be_bytes());
        out
    }

    pub fn decode(bytes: &[u8]) -> Result<Fold, FoldError> {
        if bytes.len() < HEAD + 4 || &bytes[..4] != MAGIC {
            return Err(FoldError::Truncated);
        }
        let (body, crc) = bytes.split_at(bytes.len() - 4);
        if crc32c::crc32c(body).to_be_bytes() != crc {
            return Err(FoldError::Checksum);
        }
        let mut input = Decoder { rest: &body[4..] };
        let found = input.i16()?;
        if found != VERSION {
            return Err(FoldError::Version { found, known: VERSION });
        }
        let end = Offset(input.i64()?);
        if input.u32()? as usize != input.rest.len() {
            return Err(FoldError::Truncated);
        }
        let log_start = Offset(input.i64()?);
        let epochs = Epochs::decode(&mut input)?;
        let producers = Producers::decode(&mut input)?;
        let vector = Self::decode_vector(&mut input)?;
        let lanes = LaneFold::decode(&mut input.rest)
            .map_err(|_| FoldError::Content("lane intervals do not parse"))?;
        Ok(Fold { end, log_start, epochs, producers, vector, lanes })
    }

    fn encode_vector(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&(self.vector.len() as u32).to_be_bytes());
        for (origin, p) in &self.vector {
            out.extend_from_slice(origin.region.0.as_bytes());
            out.extend_from_slice(origin.incarnation.0.as_bytes());
            out.extend_from_slice(&p.next.0.to_be_bytes());
            out.extend_from_slice(&p.epoch.0.to_be_bytes());
            out.extend_from_slice(&p.last_base.0.to_be_bytes());
            out.extend_from_slice(&p.last_crc.to_be_bytes());
            out.extend_from_slice(&p.local_next.0.to_be_bytes());
        }
    }

    fn decode_vector(input: &mut Decoder<'_>) -> Result<BTreeMap<Origin, OriginPosition>, FoldError> {
        let mut vector = BTreeMap::new();
        for _ in 0..input.u32()? {
            let origin = Origin { region: RegionId(input.uuid()?), incarnation: TopicId(input.uuid()?) };
            let position = OriginPosition {
                next: Offset(input.i64()?),
                epoch: LeaderEpoch(input.i32()?),
                last_base: Offset(input.i64()?),
                last_crc: input.u32()?,
                local_next: Offset(input.i64()?),
            };
            vector.insert(origin, position);
        }
        Ok(vector)
    }
}

/// Reads big-endian fields off the front of a slice.
pub(crate) struct Decoder<'a> {
    rest: &'a [u8],
}

impl<'a> Decoder<'a> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], FoldError> {
        let (head, rest) = self.rest.split_first_chunk::<N>().ok_or(FoldError::Truncated)?;
        self.rest = rest;
        Ok(*head)
    }

    pub(crate) fn u8(&mut self) -> Result<u8, FoldError> {
        Ok(self.take::<1>()?[0])
    }

    pub(crate) fn i16(&mut self) -> Result<i16, FoldError> {
        Ok(i16::from_be_bytes(self.take()?))
    }

    pub(crate) fn u32(&mut self) -> Result<u32, FoldError> {
        Ok(u32::from_be_bytes(self.take()?))
    }

    pub(crate) fn i32(&mut self) -> Result<i32, FoldError> {
        Ok(i32::from_be_bytes(self.take()?))
    }

    pub(crate) fn i64(&mut self) -> Result<i64, FoldError> {
        Ok(i64::from_be_bytes(self.take()?))
    }

    fn uuid(&mut self) -> Result<Uuid, FoldError> {
        Ok(Uuid::from_bytes(self.take()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kafka::batch::Attributes;
    use kafka::{ProducerEpoch, ProducerId};

    fn header(offset: i64, pid: i64, sequence: i32) -> BatchHeader {
        BatchHeader {
            base_offset: Offset(offset),
            batch_length: 49,
            leader_epoch: LeaderEpoch(2),
            crc: 0,
            attributes: Attributes(0),
            last_offset_delta: 0,
            base_timestamp: TimestampMs(5),
            max_timestamp: TimestampMs(5),
            producer_id: ProducerId(pid),
            producer_epoch: ProducerEpoch(if pid < 0 { -1 } else { 0 }),
            base_sequence: sequence,
            record_count: 1,
        }
    }

    fn folded() -> Fold {
        let mut fold = Fold::default();
        fold.apply(&header(0, 9, 0), Content::Records);
        fold.apply(&header(1, 9, 1), Content::Records);
        let marker = MirrorMarker {
            origin: RegionId(Uuid::from_u128(1)),
            incarnation: TopicId(Uuid::from_u128(2)),
            origin_epoch: LeaderEpoch(3),
            first: Offset(0),
            next: Offset(7),
            batches: vec![(1, Offset(6))],
            byte_len: 80,
            last_crc: 77,
            extractors: None,
        };
        fold.apply(&header(2, -1, -1), Content::Mirror(&marker));
        let list = LaneMarker::Extractors(lane_core::Extractors::standard());
        fold.apply(&header(3, -1, -1), Content::Lane(&list));
        fold
    }

    #[test]
    fn a_snapshot_says_exactly_what_the_log_said() {
        let mut fold = folded();
        let bytes = fold.encode(TimestampMs(0));
        assert_eq!(Fold::decode(&bytes), Ok(fold));
    }

    #[test]
    fn every_damaged_byte_of_a_snapshot_is_noticed() {
        let bytes = folded().encode(TimestampMs(0));
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 0x40;
            assert!(Fold::decode(&damaged).is_err(), "byte {at}");
            assert!(Fold::decode(&bytes[..at]).is_err(), "cut at {at}");
        }
    }

    #[test]
    fn silent_producers_expire_only_when_a_snapshot_is_written() {
        let mut fold = folded();
        assert_eq!(fold.producers.len(), 1);
        let bytes = fold.encode(TimestampMs(6));
        assert!(Fold::decode(&bytes).is_ok_and(|f| f.producers.is_empty()));
    }
}
