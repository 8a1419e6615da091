//! Records in batches: headers are a list, null and empty differ, and no bytes make the reader panic.
//! Case: nisshi-io/nisshi#715 (C07).

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::batch::Codec;

const CODECS: [Codec; 5] = [Codec::None, Codec::Gzip, Codec::Snappy, Codec::Lz4, Codec::Zstd];

type OwnedHeaders = Vec<(String, Option<Vec<u8>>)>;
type Owned = (i64, Option<Vec<u8>>, Option<Vec<u8>>, OwnedHeaders);

fn build(codec: Codec, records: &[Owned]) -> Batch {
    let mut builder = BatchBuilder::new(Offset(7), TimestampMs(1_000), codec);
    for (at, (delta, key, value, headers)) in records.iter().enumerate() {
        let headers: Vec<_> = headers.iter().map(|(key, value)| (key.as_str(), value.as_deref())).collect();
        builder.push(at as i32, *delta, key.as_deref(), value.as_deref(), &headers);
    }
    builder.build()
}

fn read(batch: &Batch) -> Vec<Owned> {
    let section = unpack(batch).unwrap();
    Records::new(&section, batch.header.record_count)
        .map(|record| {
            let record = record.unwrap();
            let headers = record.headers().map(|header| {
                let header = header.unwrap();
                (header.key.to_owned(), header.value.map(<[u8]>::to_vec))
            });
            (
                record.timestamp_delta,
                record.key.map(<[u8]>::to_vec),
                record.value.map(<[u8]>::to_vec),
                headers.collect(),
            )
        })
        .collect()
}

/// C07.
#[test]
fn headers_are_a_list_and_null_empty_and_absent_stay_apart_under_every_codec() {
    let header = |key: &str, value: Option<&[u8]>| (key.to_owned(), value.map(<[u8]>::to_vec));
    let many = (0..300).map(|n| header(&format!("h{n}"), Some(b"x"))).collect();
    let odd = vec![
        header("b", Some(b"1")),
        header("a", None),
        header("a", Some(b"")),
        header("a", Some(b"2")),
        header("b", Some(b"1")),
        header("é", Some(b"\xff\x00")),
        header("", Some(b"")),
    ];
    let records = vec![
        (0, None, Some(b"v".to_vec()), odd),
        (-5, Some(vec![]), Some(vec![]), vec![]),
        (9, Some(b"k".to_vec()), None, many),
    ];
    for codec in CODECS {
        let batch = build(codec, &records);
        assert_eq!(read(&batch), records, "{codec:?}");
        assert_eq!(check_records(&batch), Ok(()));
        assert_eq!(batch.header.max_timestamp, TimestampMs(1_009));
        assert_eq!(batch.header.last_offset(), Offset(9));
        let again = Batch::split_all(batch.bytes.clone(), true).unwrap();
        assert_eq!(again.len(), 1);
        assert_eq!(again[0].header, batch.header);
    }
}

#[test]
fn a_batch_that_keeps_some_records_keeps_offsets_times_and_producer() {
    let records: Vec<Owned> = (0..5).map(|n| (n * 10, None, Some(vec![n as u8]), vec![])).collect();
    let mut original = BatchBuilder::new(Offset(100), TimestampMs(50), Codec::Lz4);
    original.producer(ProducerId(9), ProducerEpoch(1), 33).leader_epoch(LeaderEpoch(4));
    for (at, (delta, key, value, _)) in records.iter().enumerate() {
        original.push(at as i32, *delta, key.as_deref(), value.as_deref(), &[]);
    }
    let original = original.build();
    let section = unpack(&original).unwrap();
    let mut kept = BatchBuilder::like(&original.header);
    for record in Records::new(&section, 5).map(Result::unwrap).filter(|record| record.offset_delta % 2 == 1)
    {
        kept.push_raw(&record);
    }
    let kept = kept.build();
    assert_eq!(kept.check_crc(), Ok(()));
    assert_eq!(check_records(&kept), Ok(()));
    assert_eq!(read(&kept), vec![records[1].clone(), records[3].clone()]);
    let same = |header: &BatchHeader| {
        (
            header.base_offset,
            header.last_offset_delta,
            header.base_timestamp,
            header.producer_id,
            header.attributes,
        )
    };
    assert_eq!(same(&kept.header), same(&original.header));
    assert_eq!(kept.header.max_timestamp, TimestampMs(80));
    assert_eq!(kept.header.record_count, 2);
}

#[test]
fn wrong_record_counts_and_lengths_are_named() {
    let batch = build(Codec::None, &[(0, None, None, vec![]), (0, None, None, vec![])]);
    let section = batch.records();
    let errors = |count, section: &[u8]| Records::new(section, count).filter(Result::is_err).count();
    assert_eq!(errors(2, &section), 0);
    assert_eq!(errors(1, &section), 1, "bytes after the last record");
    assert_eq!(errors(3, &section), 1, "fewer records than counted");
    assert_eq!(errors(2, &section[..section.len() - 1]), 1);
    let mut disordered = BatchBuilder::new(Offset(0), TimestampMs(0), Codec::None);
    disordered.push(1, 0, None, None, &[]);
    disordered.push(0, 0, None, None, &[]);
    assert!(check_records(&disordered.build()).is_err());
}

fn owned() -> impl Strategy<Value = Owned> {
    let bytes = || proptest::option::of(vec(any::<u8>(), 0..20));
    let header = ("[a-zé]{0,5}", bytes());
    ((-1_000_000i64..1_000_000), bytes(), bytes(), vec(header, 0..5))
}

proptest! {
    #[test]
    fn records_survive_build_and_read(records in vec(owned(), 1..20), codec in 0usize..5) {
        let batch = build(CODECS[codec], &records);
        prop_assert_eq!(read(&batch), records);
        prop_assert_eq!(check_records(&batch), Ok(()));
        prop_assert_eq!(batch.check_crc(), Ok(()));
    }

    #[test]
    fn arbitrary_record_bytes_never_panic(section: Vec<u8>, count in -1i32..50) {
        for record in Records::new(&section, count).flatten() {
            record.headers().for_each(drop);
        }
    }

    #[test]
    fn one_changed_byte_of_a_plain_batch_never_panics(records in vec(owned(), 1..5), at: usize, byte: u8) {
        let batch = build(Codec::None, &records);
        let mut bytes = batch.bytes.to_vec();
        let at = at % bytes.len();
        bytes[at] = byte;
        for batch in Batch::split_all(bytes.into(), false).into_iter().flatten() {
            let _ = check_records(&batch);
        }
    }
}
