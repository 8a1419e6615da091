//! Lanes inside a batch: what it holds, the batch without its hidden records, the batch stamped.
//!
//! A batch that loses records keeps base offset, last offset delta, codec, timestamps and producer
//! fields, so that a client moves on by exactly the batch it asked for. What is hidden whole becomes an
//! empty data batch: never one with the control bit, which some clients cannot read without a record.

use std::borrow::Cow;

use kafka::batch::Attributes;
use kafka::record::{BatchBuilder, Headers, Record, Records, unpack};
use kafka::{Batch, BatchError, BatchHeader, Offset, ProducerEpoch, ProducerId};

use crate::extract::{Extractors, LaneVerdict, Refusal};
use crate::name::Lane;
use crate::summary::{LaneSummary, RecordLane};

/// What one walk over the headers of a batch found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Classified {
    pub summary: LaneSummary,
    /// Index of each record that may not be appended, and why; the first [`REFUSED_MAX`] of them.
    pub refused: Vec<(i32, Refusal)>,
    /// Records whose value is no lane name.
    pub unknown: u64,
    /// Records whose extractors named different lanes, and the first won.
    pub disagreed: u64,
}

/// Most refused records that an answer names.
pub const REFUSED_MAX: usize = 100;

/// Unpacks `batch` once and reads its header keys.
pub fn classify(batch: &Batch, extractors: &Extractors) -> Result<Classified, BatchError> {
    let section = unpack(batch)?;
    let mut found = Classified::default();
    for (index, record) in Records::new(&section, batch.header.record_count).enumerate() {
        let record = record?;
        if record.header_count() == 0 {
            found.summary.add(&RecordLane::Baseline);
            continue;
        }
        let verdict = extractors.lane_of(checked(record.headers())?);
        found.disagreed += u64::from(verdict.disagreed);
        match verdict.lane {
            LaneVerdict::Baseline => found.summary.add(&RecordLane::Baseline),
            LaneVerdict::Lane(lane) => found.summary.add(&RecordLane::Lane(lane)),
            LaneVerdict::Unknown => {
                found.unknown += 1;
                found.summary.add(&RecordLane::Unnamed);
            }
            LaneVerdict::Refused(why) => {
                found.summary.add(&RecordLane::Refused);
                if found.refused.len() < REFUSED_MAX {
                    found.refused.push((index as i32, why));
                }
            }
        }
    }
    Ok(found)
}

/// `batch` with only the records whose lane passes `keep`; the batch itself if all do.
pub fn filter(
    batch: &Batch,
    extractors: &Extractors,
    mut keep: impl FnMut(&RecordLane) -> bool,
) -> Result<Batch, BatchError> {
    let section = unpack(batch)?;
    let mut builder = BatchBuilder::like(&batch.header);
    for record in Records::new(&section, batch.header.record_count) {
        let record = record?;
        if keep(&record_lane(&record, extractors)?) {
            builder.push_raw(&record);
        }
    }
    if builder.record_count() == batch.header.record_count {
        return Ok(batch.clone());
    }
    if builder.is_empty() { Ok(emptied(&batch.header)) } else { Ok(builder.build()) }
}

/// How many records of `batch` at or above `from` pass `keep`.
pub fn count(
    batch: &Batch,
    extractors: &Extractors,
    from: Offset,
    keep: impl FnMut(&RecordLane) -> bool,
) -> Result<u64, BatchError> {
    let kept = offsets(batch, extractors, keep)?;
    Ok(kept.iter().filter(|at| **at >= from).count() as u64)
}

/// Offsets of the records of `batch` that pass `keep`, ascending.
pub fn offsets(
    batch: &Batch,
    extractors: &Extractors,
    mut keep: impl FnMut(&RecordLane) -> bool,
) -> Result<Vec<Offset>, BatchError> {
    let section = unpack(batch)?;
    let mut kept = Vec::new();
    for record in Records::new(&section, batch.header.record_count) {
        let record = record?;
        if keep(&record_lane(&record, extractors)?) {
            kept.push(batch.header.base_offset.plus(i64::from(record.offset_delta)));
        }
    }
    Ok(kept)
}

/// The lane of one record.
pub fn record_lane(record: &Record<'_>, extractors: &Extractors) -> Result<RecordLane, BatchError> {
    if record.header_count() == 0 {
        return Ok(RecordLane::Baseline);
    }
    Ok(extractors.record_lane(checked(record.headers())?))
}

/// An empty data batch in the place of a batch that is hidden whole.
pub fn emptied(header: &BatchHeader) -> Batch {
    let attributes = header.attributes.0 & !(Attributes::CONTROL | CODEC_BITS);
    BatchHeader { attributes: Attributes(attributes), record_count: 0, ..*header }.seal(&[])
}

/// An empty data batch over `[from, to)`, for any number of hidden batches at once. `like` gives the
/// leader epoch and the timestamps. Covers at most what one batch can; `from < to`.
pub fn emptied_range(from: Offset, to: Offset, like: &BatchHeader) -> Batch {
    let delta = (to.0 - from.0 - 1).clamp(0, i64::from(i32::MAX));
    BatchHeader {
        base_offset: from,
        last_offset_delta: delta as i32,
        attributes: Attributes(like.attributes.0 & Attributes::LOG_APPEND_TIME),
        producer_id: ProducerId::NONE,
        producer_epoch: ProducerEpoch(-1),
        base_sequence: -1,
        record_count: 0,
        ..*like
    }
    .seal(&[])
}

/// Why a batch cannot go into a lane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StampError {
    Batch(BatchError),
    /// Index of each record that is refused, and why; the first [`REFUSED_MAX`].
    Records(Vec<(i32, StampRefusal)>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StampRefusal {
    #[error("its headers name another lane than the connection's")]
    OtherLane,
    #[error("its lane header is no lane name")]
    NoLaneName,
    #[error(transparent)]
    Headers(Refusal),
}

/// Puts every record of `batch` into `lane`: those that name no lane get a header more, as the first of
/// `extractors` reads it; they may not be none. `None` if the batch can stay as it is. A record of any
/// other lane refuses the batch.
pub fn stamp(batch: &Batch, lane: &Lane, extractors: &Extractors) -> Result<Option<Batch>, StampError> {
    let section = unpack(batch).map_err(StampError::Batch)?;
    let mut builder = BatchBuilder::like(&batch.header);
    let mut refused = Vec::new();
    let mut stamped = false;
    for (index, record) in Records::new(&section, batch.header.record_count).enumerate() {
        let record = record.map_err(StampError::Batch)?;
        let mut headers = checked(record.headers()).map_err(StampError::Batch)?;
        match place(&headers, lane, extractors) {
            Place::In => builder.push_raw(&record),
            Place::Stamp(name, value) => {
                stamped = true;
                headers.push((name, Some(&value)));
                let (offset, timestamp) = (record.offset_delta, record.timestamp_delta);
                builder.push(offset, timestamp, record.key, record.value, &headers);
            }
            Place::Refused(why) if refused.len() < REFUSED_MAX => refused.push((index as i32, why)),
            Place::Refused(_) => {}
        }
    }
    if !refused.is_empty() {
        return Err(StampError::Records(refused));
    }
    Ok(stamped.then(|| builder.build()))
}

enum Place<'a> {
    In,
    /// The lane's header, to come last.
    Stamp(&'a str, Cow<'a, [u8]>),
    Refused(StampRefusal),
}

type HeaderPair<'a> = (&'a str, Option<&'a [u8]>);

fn place<'a>(headers: &[HeaderPair<'a>], lane: &'a Lane, extractors: &'a Extractors) -> Place<'a> {
    let judge = |verdict: LaneVerdict| match verdict {
        LaneVerdict::Lane(named) if named == *lane => Ok(()),
        LaneVerdict::Lane(_) | LaneVerdict::Baseline => Err(StampRefusal::OtherLane),
        LaneVerdict::Unknown => Err(StampRefusal::NoLaneName),
        LaneVerdict::Refused(why) => Err(StampRefusal::Headers(why)),
    };
    let verdict = extractors.lane_of(headers.iter().copied()).lane;
    if verdict != LaneVerdict::Baseline {
        return judge(verdict).map_or_else(Place::Refused, |()| Place::In);
    }
    let Some((name, value)) = extractors.stamp(headers, lane) else {
        return Place::Refused(StampRefusal::OtherLane);
    };
    // Another header may say "baseline" aloud, which is another lane than a PPE one.
    let stamped = headers.iter().copied().chain([(name, Some(&*value))]);
    match judge(extractors.lane_of(stamped).lane) {
        Ok(()) => Place::Stamp(name, value),
        Err(why) => Place::Refused(why),
    }
}

/// The headers as pairs, or the first error among them.
fn checked(headers: Headers<'_>) -> Result<Vec<HeaderPair<'_>>, BatchError> {
    headers.map(|header| header.map(|h| (h.key, h.value))).collect()
}

const CODEC_BITS: i16 = 7;

#[cfg(test)]
mod tests {
    use kafka::batch::Codec;
    use kafka::{LeaderEpoch, TimestampMs};

    use super::*;

    fn lane(name: &str) -> Lane {
        Lane::parse(name).unwrap()
    }

    /// One record per entry; `None` has no lane header.
    fn batch(codec: Codec, lanes: &[Option<&str>]) -> Batch {
        let mut builder = BatchBuilder::new(Offset(100), TimestampMs(5_000), codec);
        builder.producer(ProducerId(7), ProducerEpoch(1), 40).leader_epoch(LeaderEpoch(3));
        for (i, lane) in lanes.iter().enumerate() {
            let value = format!("v{i}");
            let other = ("b", Some(&b"1"[..]));
            let headers = match lane {
                Some(lane) => vec![other, ("x-lane", Some(lane.as_bytes())), other],
                None => vec![other, ("a", None), other],
            };
            builder.push(i as i32, i as i64 * 10, None, Some(value.as_bytes()), &headers);
        }
        builder.build()
    }

    fn values(batch: &Batch) -> Vec<(i32, String, Vec<String>)> {
        let section = unpack(batch).unwrap();
        Records::new(&section, batch.header.record_count)
            .map(|r| {
                let r = r.unwrap();
                let headers = r.headers().map(|h| h.unwrap().key.to_owned()).collect();
                (r.offset_delta, String::from_utf8(r.value.unwrap().to_vec()).unwrap(), headers)
            })
            .collect()
    }

    const CODECS: [Codec; 5] = [Codec::None, Codec::Gzip, Codec::Snappy, Codec::Lz4, Codec::Zstd];

    #[test]
    fn a_batch_without_its_hidden_records_keeps_all_that_moves_a_client_on() {
        for codec in CODECS {
            let whole = batch(codec, &[None, Some("boe-a"), Some("ppe-x"), None, Some("boe-a")]);
            let kept = filter(&whole, &Extractors::standard(), |lane| *lane == RecordLane::Baseline).unwrap();
            kept.check_crc().unwrap();
            assert_eq!(values(&kept).iter().map(|v| v.0).collect::<Vec<_>>(), [0, 3]);
            assert_eq!(kept.header.base_offset, Offset(100));
            assert_eq!(kept.header.last_offset_delta, 4);
            assert_eq!(kept.header.attributes, whole.header.attributes);
            assert_eq!(kept.header.base_timestamp, whole.header.base_timestamp);
            assert_eq!(kept.header.base_sequence, 40);
            assert_eq!(
                (kept.header.producer_id, kept.header.producer_epoch),
                (ProducerId(7), ProducerEpoch(1))
            );
            assert_eq!(values(&kept)[1], values(&whole)[3], "a kept record is the same, headers in order");

            let all = filter(&whole, &Extractors::standard(), |_| true).unwrap();
            assert_eq!(all.bytes, whole.bytes);
        }
    }

    #[test]
    fn what_is_hidden_whole_is_an_empty_data_batch_over_the_range() {
        let whole = batch(Codec::Zstd, &[Some("ppe-x"), Some("ppe-x")]);
        let none = filter(&whole, &Extractors::standard(), |_| false).unwrap();
        none.check_crc().unwrap();
        assert_eq!((none.header.record_count, none.header.next_offset()), (0, Offset(102)));
        assert_eq!(none.header.attributes.codec(), Ok(Codec::None));
        assert_eq!(none.header.producer_id, ProducerId(7));
        let control = BatchHeader { attributes: Attributes(Attributes::CONTROL | 0x10), ..whole.header };
        assert_eq!(emptied(&control).header.attributes, Attributes(0x10));
        let range = emptied_range(Offset(5), Offset(50), &whole.header);
        range.check_crc().unwrap();
        assert_eq!((range.header.base_offset, range.header.next_offset()), (Offset(5), Offset(50)));
        assert_eq!(range.header.producer_id, ProducerId::NONE);
    }

    #[test]
    fn one_walk_finds_all_lanes_of_a_batch_and_never_goes_by_the_first() {
        let found = classify(
            &batch(Codec::Lz4, &[None, Some("boe-a"), Some("BOE"), Some("ppe-x")]),
            &Extractors::standard(),
        )
        .unwrap();
        assert!(found.summary.has_baseline() && found.summary.has_unnamed());
        assert_eq!(found.summary.lanes(), [lane("boe-a"), lane("ppe-x")]);
        assert_eq!((found.unknown, found.refused.len()), (1, 0));
        let plain = classify(&batch(Codec::None, &[None, None]), &Extractors::standard()).unwrap();
        assert_eq!(plain.summary, LaneSummary::plain());
    }

    #[test]
    fn stamping_puts_every_record_into_the_lane_or_refuses_the_batch() {
        for codec in CODECS {
            let whole = batch(codec, &[None, Some("boe-a"), None]);
            let stamped = stamp(&whole, &lane("boe-a"), &Extractors::standard()).unwrap().unwrap();
            stamped.check_crc().unwrap();
            assert_eq!(stamped.header.attributes, whole.header.attributes);
            assert_eq!(stamped.header.max_timestamp, whole.header.max_timestamp);
            assert_eq!(stamped.header.record_count, 3);
            let found = classify(&stamped, &Extractors::standard()).unwrap();
            assert_eq!(found.summary.lanes(), [lane("boe-a")]);
            assert!(!found.summary.has_baseline());
            assert_eq!(values(&stamped)[0].2, ["b", "a", "b", "x-lane"]);
        }
        let already = batch(Codec::None, &[Some("boe-a")]);
        assert_eq!(stamp(&already, &lane("boe-a"), &Extractors::standard()).unwrap().map(|b| b.bytes), None);
        let other = batch(Codec::None, &[None, Some("boe-b"), Some("A,B")]);
        let StampError::Records(refused) =
            stamp(&other, &lane("boe-a"), &Extractors::standard()).unwrap_err()
        else {
            panic!("records are named")
        };
        assert_eq!(refused, [(1, StampRefusal::OtherLane), (2, StampRefusal::NoLaneName)]);
    }

    #[test]
    fn a_record_is_stamped_as_the_list_of_the_topic_reads_it() {
        let list = Extractors::parse_list("x-tt-env,baggage/lane").unwrap();
        // By this list x-lane names nothing, so it is no other lane either.
        let whole = batch(Codec::Lz4, &[None, Some("boe-b")]);
        let stamped = stamp(&whole, &lane("boe-a"), &list).unwrap().unwrap();
        assert_eq!(classify(&stamped, &list).unwrap().summary.lanes(), [lane("boe-a")]);
        let headers: Vec<_> = values(&stamped).into_iter().map(|(_, _, headers)| headers).collect();
        assert_eq!(headers, [vec!["b", "a", "b", "x-tt-env"], vec!["b", "x-lane", "b", "x-tt-env"]]);
        let off = stamp(&whole, &lane("boe-a"), &Extractors::none()).unwrap_err();
        assert!(matches!(off, StampError::Records(refused) if refused.len() == 2));
    }

    #[test]
    fn counting_starts_inside_a_batch() {
        let whole = batch(Codec::None, &[Some("boe-a"), None, Some("boe-a"), Some("boe-a")]);
        let own = |lane: &RecordLane| matches!(lane, RecordLane::Lane(_));
        assert_eq!(count(&whole, &Extractors::standard(), Offset(100), own), Ok(3));
        assert_eq!(count(&whole, &Extractors::standard(), Offset(102), own), Ok(2));
    }
}
