//! Idempotent producers of one partition (KIP-98): which batch is next, which is a repeat.
//!
//! Keeps the last five batches per producer, as Kafka does, because a client has at most five
//! requests in flight. Validation happens before an append only; replay of the log never refuses.

use std::collections::{HashMap, VecDeque};

use kafka::{BatchHeader, ErrorCode, Offset, ProducerEpoch, ProducerId, TimestampMs};

use crate::fold::{Decoder, FoldError};

/// Batches remembered per producer.
pub const BATCHES_KEPT: usize = 5;
/// Producers remembered per partition; beyond it the longest silent one goes.
pub const PRODUCERS_MAX: usize = 20_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Appended {
    first_sequence: i32,
    last_sequence: i32,
    base_offset: Offset,
    last_offset: Offset,
    timestamp: TimestampMs,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Producer {
    epoch: ProducerEpoch,
    batches: VecDeque<Appended>,
    last_offset: Offset,
    last_timestamp: TimestampMs,
}

/// All producers that have written to one partition lately.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Producers {
    by_id: HashMap<ProducerId, Producer>,
}

/// What to do with a batch of an idempotent producer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sequence {
    Append,
    /// Stored already: answer with these, once they are durable.
    Duplicate {
        base_offset: Offset,
        last_offset: Offset,
        timestamp: TimestampMs,
    },
    Refuse(ErrorCode),
}

impl Producers {
    /// Judges a batch before it is appended.
    pub fn check(&self, header: &BatchHeader) -> Sequence {
        if header.producer_id == ProducerId::NONE {
            return Sequence::Append;
        }
        if header.producer_id.0 < 0 || header.producer_epoch.0 < 0 || header.base_sequence < 0 {
            return Sequence::Refuse(ErrorCode::InvalidRecord);
        }
        // KIP-360: a producer that is not known may begin anywhere, its older state has expired.
        let Some(producer) = self.by_id.get(&header.producer_id) else { return Sequence::Append };
        if header.producer_epoch < producer.epoch {
            return Sequence::Refuse(ErrorCode::InvalidProducerEpoch);
        }
        if header.producer_epoch > producer.epoch {
            return match header.base_sequence {
                0 => Sequence::Append,
                _ => Sequence::Refuse(ErrorCode::OutOfOrderSequenceNumber),
            };
        }
        let last_sequence = last_sequence(header);
        let same =
            |b: &&Appended| b.first_sequence == header.base_sequence && b.last_sequence == last_sequence;
        if let Some(b) = producer.batches.iter().find(same) {
            return Sequence::Duplicate {
                base_offset: b.base_offset,
                last_offset: b.last_offset,
                timestamp: b.timestamp,
            };
        }
        match producer.batches.back() {
            Some(b) if next_sequence(b.last_sequence) != header.base_sequence => {
                Sequence::Refuse(ErrorCode::OutOfOrderSequenceNumber)
            }
            _ => Sequence::Append,
        }
    }

    /// Notes a batch that is in the log at its final offsets.
    pub fn apply(&mut self, header: &BatchHeader) {
        if header.producer_id.0 < 0 || header.is_control() {
            return;
        }
        self.make_room(header.producer_id);
        let producer = self.by_id.entry(header.producer_id).or_insert_with(|| Producer {
            epoch: header.producer_epoch,
            batches: VecDeque::with_capacity(BATCHES_KEPT),
            last_offset: header.last_offset(),
            last_timestamp: header.max_timestamp,
        });
        if producer.epoch != header.producer_epoch {
            producer.epoch = header.producer_epoch;
            producer.batches.clear();
        }
        if producer.batches.len() == BATCHES_KEPT {
            producer.batches.pop_front();
        }
        producer.batches.push_back(Appended {
            first_sequence: header.base_sequence,
            last_sequence: last_sequence(header),
            base_offset: header.base_offset,
            last_offset: header.last_offset(),
            timestamp: header.max_timestamp,
        });
        producer.last_offset = header.last_offset();
        producer.last_timestamp = header.max_timestamp;
    }

    /// Forgets producers that have been silent since before `oldest`; done when a snapshot is written.
    pub fn expire(&mut self, oldest: TimestampMs) {
        self.by_id.retain(|_, p| p.last_timestamp >= oldest);
    }

    /// Whether a batch is of a producer that is not known and says that it has written here before: its state
    /// has expired, or what it wrote before is not here.
    pub fn is_of_a_stranger(&self, header: &BatchHeader) -> bool {
        header.producer_id.0 >= 0 && header.base_sequence > 0 && !self.by_id.contains_key(&header.producer_id)
    }

    pub fn len(&self) -> usize {
        self.by_id.len()
    }

    pub fn is_empty(&self) -> bool {
        self.by_id.is_empty()
    }

    fn make_room(&mut self, for_id: ProducerId) {
        if self.by_id.len() < PRODUCERS_MAX || self.by_id.contains_key(&for_id) {
            return;
        }
        // A whole tenth goes at once, so that the scan is paid once in many appends.
        let mut ends: Vec<Offset> = self.by_id.values().map(|p| p.last_offset).collect();
        let (_, cut, _) = ends.select_nth_unstable(PRODUCERS_MAX / 10);
        let cut = *cut;
        self.by_id.retain(|_, p| p.last_offset > cut);
    }

    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&(self.by_id.len() as u32).to_be_bytes());
        let mut ids: Vec<_> = self.by_id.keys().copied().collect();
        ids.sort_unstable();
        for id in ids {
            let p = &self.by_id[&id];
            out.extend_from_slice(&id.0.to_be_bytes());
            out.extend_from_slice(&p.epoch.0.to_be_bytes());
            out.extend_from_slice(&p.last_offset.0.to_be_bytes());
            out.extend_from_slice(&p.last_timestamp.0.to_be_bytes());
            out.push(p.batches.len() as u8);
            for b in &p.batches {
                out.extend_from_slice(&b.first_sequence.to_be_bytes());
                out.extend_from_slice(&b.last_sequence.to_be_bytes());
                out.extend_from_slice(&b.base_offset.0.to_be_bytes());
                out.extend_from_slice(&b.last_offset.0.to_be_bytes());
                out.extend_from_slice(&b.timestamp.0.to_be_bytes());
            }
        }
    }

    pub(crate) fn decode(input: &mut Decoder<'_>) -> Result<Producers, FoldError> {
        let count = input.u32()?;
        let mut by_id = HashMap::new();
        for _ in 0..count {
            let id = ProducerId(input.i64()?);
            let epoch = ProducerEpoch(input.i16()?);
            let last_offset = Offset(input.i64()?);
            let last_timestamp = TimestampMs(input.i64()?);
            let mut batches = VecDeque::with_capacity(BATCHES_KEPT);
            for _ in 0..input.u8()? {
                batches.push_back(Appended {
                    first_sequence: input.i32()?,
                    last_sequence: input.i32()?,
                    base_offset: Offset(input.i64()?),
                    last_offset: Offset(input.i64()?),
                    timestamp: TimestampMs(input.i64()?),
                });
            }
            by_id.insert(id, Producer { epoch, batches, last_offset, last_timestamp });
        }
        Ok(Producers { by_id })
    }
}

/// Sequences run from 0 to `i32::MAX` and begin at 0 again.
fn last_sequence(header: &BatchHeader) -> i32 {
    let last = i64::from(header.base_sequence) + i64::from(header.last_offset_delta);
    (last % (i64::from(i32::MAX) + 1)) as i32
}

fn next_sequence(last: i32) -> i32 {
    last.checked_add(1).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kafka::LeaderEpoch;
    use kafka::batch::Attributes;

    fn batch(pid: i64, epoch: i16, sequence: i32, records: i32, offset: i64) -> BatchHeader {
        BatchHeader {
            base_offset: Offset(offset),
            batch_length: 49,
            leader_epoch: LeaderEpoch(0),
            crc: 0,
            attributes: Attributes(0),
            last_offset_delta: records - 1,
            base_timestamp: TimestampMs(1),
            max_timestamp: TimestampMs(1),
            producer_id: ProducerId(pid),
            producer_epoch: ProducerEpoch(epoch),
            base_sequence: sequence,
            record_count: records,
        }
    }

    #[test]
    fn the_last_five_batches_are_known_again_and_a_gap_is_refused() {
        // Case: redpanda-data/redpanda#3039.
        let mut producers = Producers::default();
        for i in 0..6 {
            let b = batch(7, 0, i, 1, i64::from(i));
            assert_eq!(producers.check(&b), Sequence::Append);
            producers.apply(&b);
        }
        for i in 1..6 {
            let repeat = producers.check(&batch(7, 0, i, 1, 99));
            assert!(
                matches!(repeat, Sequence::Duplicate { base_offset, .. } if base_offset == Offset(i64::from(i)))
            );
        }
        let refused = Sequence::Refuse(ErrorCode::OutOfOrderSequenceNumber);
        assert_eq!(producers.check(&batch(7, 0, 0, 1, 99)), refused);
        assert_eq!(producers.check(&batch(7, 0, 9, 1, 99)), refused);
        assert_eq!(producers.check(&batch(7, 0, 6, 1, 6)), Sequence::Append);
    }

    #[test]
    fn an_older_epoch_is_fenced_and_a_newer_one_begins_at_zero() {
        let mut producers = Producers::default();
        producers.apply(&batch(7, 3, 0, 1, 0));
        assert_eq!(producers.check(&batch(7, 2, 1, 1, 1)), Sequence::Refuse(ErrorCode::InvalidProducerEpoch));
        assert_eq!(
            producers.check(&batch(7, 4, 5, 1, 1)),
            Sequence::Refuse(ErrorCode::OutOfOrderSequenceNumber)
        );
        assert_eq!(producers.check(&batch(7, 4, 0, 1, 1)), Sequence::Append);
    }

    #[test]
    fn sequences_wrap_at_the_largest_int() {
        let mut producers = Producers::default();
        producers.apply(&batch(7, 0, i32::MAX - 1, 3, 0));
        assert_eq!(producers.check(&batch(7, 0, 1, 1, 3)), Sequence::Append);
    }

    #[test]
    fn a_producer_without_state_may_begin_anywhere() {
        assert_eq!(Producers::default().check(&batch(7, 0, 42, 1, 0)), Sequence::Append);
    }

    #[test]
    fn the_number_of_producers_is_bounded() {
        let mut producers = Producers::default();
        for pid in 0..(PRODUCERS_MAX as i64 + 10) {
            producers.apply(&batch(pid, 0, 0, 1, pid));
        }
        assert!(producers.len() <= PRODUCERS_MAX);
        assert_eq!(producers.check(&batch(PRODUCERS_MAX as i64 + 9, 0, 1, 1, 0)), Sequence::Append);
    }
}
