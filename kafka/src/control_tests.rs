//! Markers as bytes: every marker survives, damaged ones are refused, and the layout is fixed.
//! The bytes are part of every log on disk, so a change here needs a new version.

use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use uuid::Uuid;

use super::*;

fn marker() -> impl Strategy<Value = Marker> {
    let cut = || {
        (".{0,20}", ".{0,10}", any::<i32>(), option::of(0..i64::MAX)).prop_map(
            |(group, lane, coordinator_epoch, previous)| LaneCut {
                group,
                lane,
                coordinator_epoch,
                previous: previous.map(Offset),
            },
        )
    };
    let mirror = (
        (any::<u128>(), any::<u128>(), any::<i32>(), any::<i64>(), any::<i64>()),
        (
            vec((any::<i32>(), any::<i64>()), 0..6),
            any::<u64>(),
            any::<u32>(),
            option::of(vec(".{0,9}", 0..4)),
        ),
    )
        .prop_map(
            |((origin, incarnation, epoch, first, next), (batches, byte_len, last_crc, extractors))| {
                Marker::Mirror(MirrorMarker {
                    origin: RegionId(Uuid::from_u128(origin)),
                    incarnation: TopicId(Uuid::from_u128(incarnation)),
                    origin_epoch: LeaderEpoch(epoch),
                    first: Offset(first),
                    next: Offset(next),
                    batches: batches.into_iter().map(|(delta, base)| (delta, Offset(base))).collect(),
                    byte_len,
                    last_crc,
                    extractors,
                })
            },
        );
    prop_oneof![
        mirror,
        cut().prop_map(Marker::LaneActivate),
        cut().prop_map(Marker::LaneDeactivate),
        (".{0,10}", any::<i32>())
            .prop_map(|(lane, coordinator_epoch)| Marker::LanePurge(LanePurge { lane, coordinator_epoch })),
        vec(".{0,9}", 0..4).prop_map(Marker::Extractors),
    ]
}

proptest! {
    #[test]
    fn every_marker_survives_the_log(marker in marker(), base in 0..i64::MAX / 2, epoch: i32) {
        let batch = marker_batch(&marker, Offset(base), LeaderEpoch(epoch));
        let read = Batch::split_all(batch.bytes, true).unwrap();
        prop_assert_eq!(read.len(), 1);
        let header = read[0].header;
        prop_assert!(header.is_control());
        prop_assert_eq!((header.base_offset, header.leader_epoch), (Offset(base), LeaderEpoch(epoch)));
        prop_assert_eq!((header.producer_id.0, header.max_timestamp.0, header.record_count), (-1, -1, 1));
        prop_assert_eq!(parse_marker(&read[0]), Ok(Some(marker)));
    }

    #[test]
    fn damaged_markers_never_panic(marker in marker(), cuts in vec((any::<usize>(), any::<u8>()), 1..4)) {
        let batch = marker_batch(&marker, Offset(0), LeaderEpoch(0));
        let mut bytes = batch.bytes.to_vec();
        for (at, byte) in cuts {
            let at = crate::batch::HEADER_LEN + at % (bytes.len() - crate::batch::HEADER_LEN);
            bytes[at] = byte;
        }
        let _ = parse_marker(&Batch { header: batch.header, bytes: bytes.into() });
    }
}

fn control_batch(key: &[u8], value: &[u8]) -> Batch {
    let mut builder = BatchBuilder::new(Offset(0), TimestampMs(5), Codec::None);
    builder.attributes(Attributes::CONTROL);
    builder.push(0, 0, Some(key), Some(value), &[]);
    builder.build()
}

#[test]
fn markers_of_kafka_and_data_are_not_ours() {
    assert_eq!(parse_marker(&control_batch(&[0, 0, 0, 1], &[0, 0, 0, 0, 0, 0])), Ok(None), "COMMIT");
    assert_eq!(parse_marker(&control_batch(&[0, 0, 0, 200], b"")), Ok(None), "a later type");
    let mut data = BatchBuilder::new(Offset(0), TimestampMs(5), Codec::Zstd);
    data.push(0, 0, Some(&[0, 0, 0, 100]), None, &[]);
    assert_eq!(parse_marker(&data.build()), Ok(None));
}

#[test]
fn a_marker_of_a_newer_version_is_refused_not_guessed() {
    assert!(parse_marker(&control_batch(&[0, 0, 0, 104], &[0, 1, 0, 0, 0, 0])).is_err());
    assert!(parse_marker(&control_batch(&[0, 1, 0, 104], &[0, 0, 0, 0, 0, 0])).is_err());
    assert!(parse_marker(&control_batch(&[0, 0, 0, 104], &[0, 0, 0, 0, 0, 0])).is_ok());
    assert!(parse_marker(&control_batch(&[0], b"")).is_err());
}

/// The layout is on disk for ever: this test is its picture.
#[test]
fn the_bytes_of_a_mirror_marker_are_fixed() {
    let marker = Marker::Mirror(MirrorMarker {
        origin: RegionId(Uuid::from_u128(1)),
        incarnation: TopicId(Uuid::from_u128(2)),
        origin_epoch: LeaderEpoch(3),
        first: Offset(4),
        next: Offset(5),
        batches: vec![(1, Offset(4))],
        byte_len: 6,
        last_crc: 7,
        extractors: Some(vec!["x".to_owned()]),
    });
    let batch = marker_batch(&marker, Offset(0), LeaderEpoch(0));
    let section = batch.records();
    let record = Records::new(&section, 1).next().unwrap().unwrap();
    assert_eq!(record.key, Some(&[0, 0, 0, 100][..]));
    let mut expected = vec![0, 0];
    expected.extend(1u128.to_be_bytes());
    expected.extend(2u128.to_be_bytes());
    expected.extend(3u32.to_be_bytes());
    expected.extend(4u64.to_be_bytes());
    expected.extend(5u64.to_be_bytes());
    expected.extend(6u64.to_be_bytes());
    expected.extend(7u32.to_be_bytes());
    expected.extend([0, 0, 0, 1, 0, 0, 0, 1]);
    expected.extend(4u64.to_be_bytes());
    expected.extend([0, 0, 0, 1, 0, 0, 0, 1, b'x']);
    assert_eq!(record.value, Some(&expected[..]));
}
