//! Every private message is read as it was written, and no bytes make a reader panic.

use proptest::prelude::*;
use uuid::Uuid;

use super::*;
use crate::error::ErrorCode;
use crate::names::{RegionId, RegionName, TopicId, TopicName};
use crate::offset::{LeaderEpoch, Offset, PartitionIndex, TimestampMs};

fn topic() -> impl Strategy<Value = TopicName> {
    "[a-z0-9_-]{1,12}".prop_map(|t| TopicName::parse(&t).expect("a legal name"))
}

fn uuid() -> impl Strategy<Value = Uuid> {
    any::<u128>().prop_map(Uuid::from_u128)
}

fn offset() -> impl Strategy<Value = Offset> {
    (-1i64..i64::MAX).prop_map(Offset)
}

fn blob() -> impl Strategy<Value = Bytes> {
    proptest::collection::vec(any::<u8>(), 0..64).prop_map(Bytes::from)
}

fn claim() -> impl Strategy<Value = Claim> {
    (any::<i32>(), offset(), any::<u32>()).prop_map(|(epoch, base, crc)| Claim {
        epoch: LeaderEpoch(epoch),
        base,
        crc,
    })
}

fn topic_info() -> impl Strategy<Value = TopicInfo> {
    let configs = proptest::collection::vec((".{0,9}", ".{0,9}"), 0..4);
    (topic(), uuid(), any::<i32>(), any::<bool>(), configs, any::<i64>()).prop_map(
        |(name, id, partitions, lanes, configs, at)| TopicInfo {
            name,
            id: TopicId(id),
            partitions,
            lanes,
            configs,
            changed_at: TimestampMs(at),
        },
    )
}

fn vector() -> impl Strategy<Value = PartitionVector> {
    let origins = proptest::collection::vec(
        (uuid(), uuid(), offset(), claim()).prop_map(|(region, id, next, last)| OriginPosition {
            region: RegionId(region),
            incarnation: TopicId(id),
            next,
            last,
        }),
        0..4,
    );
    (uuid(), offset(), offset(), origins).prop_map(|(id, log_start, durable, origins)| PartitionVector {
        error: ErrorCode::None,
        id: TopicId(id),
        log_start,
        durable,
        origins,
    })
}

fn fetch_from() -> impl Strategy<Value = FetchFrom> {
    let claim = proptest::option::of(claim());
    (topic(), any::<i32>(), uuid(), offset(), any::<u32>(), claim, offset()).prop_map(
        |(topic, partition, id, from, bytes_max, claim, known_end)| FetchFrom {
            topic,
            partition: PartitionIndex(partition),
            id: TopicId(id),
            from,
            bytes_max,
            claim,
            known_end,
        },
    )
}

fn fetch_outcome() -> impl Strategy<Value = FetchOutcome> {
    prop_oneof![
        (blob(), offset(), offset(), offset(), extractors()).prop_map(
            |(batches, next, end, log_start, extractors)| {
                let rewritten = vec![next, end];
                let read = OriginRead { batches, next, end, log_start, extractors, rewritten };
                FetchOutcome::Read(read)
            }
        ),
        ".{0,9}".prop_map(|reason| FetchOutcome::Truncated { reason }),
        proptest::option::of(uuid().prop_map(TopicId)).prop_map(|now| FetchOutcome::Incarnation { now }),
        ".{0,9}".prop_map(|reason| FetchOutcome::Failed { code: ErrorCode::KafkaStorageError, reason }),
    ]
}

fn extractors() -> impl Strategy<Value = Option<Vec<String>>> {
    proptest::option::of(proptest::collection::vec(".{0,9}", 0..3))
}

fn unit() -> impl Strategy<Value = Unit> {
    (topic(), any::<i32>(), uuid(), uuid(), uuid(), offset(), extractors(), blob()).prop_map(
        |(topic, partition, id, origin, incarnation, first, extractors, batches)| Unit {
            topic,
            partition: PartitionIndex(partition),
            id: TopicId(id),
            origin: RegionId(origin),
            incarnation: TopicId(incarnation),
            first,
            last_rewritten: extractors.is_some(),
            extractors,
            batches,
        },
    )
}

fn append_outcome() -> impl Strategy<Value = AppendOutcome> {
    prop_oneof![
        offset().prop_map(|next| AppendOutcome::Applied { next }),
        offset().prop_map(|next| AppendOutcome::Duplicate { next }),
        offset().prop_map(|next| AppendOutcome::Gap { next }),
        offset().prop_map(|next| AppendOutcome::Overlap { next }),
        ".{0,9}".prop_map(|reason| AppendOutcome::Faulted { reason }),
        ".{0,9}".prop_map(|reason| AppendOutcome::Failed { code: ErrorCode::UnknownTopicId, reason }),
    ]
}

fn partition_report() -> impl Strategy<Value = PartitionReport> {
    let lag = || proptest::option::of(any::<u64>());
    (topic(), any::<i32>(), any::<bool>(), ".{0,9}", offset(), lag(), lag(), lag()).prop_map(
        |(topic, partition, out, reason, next, lag_records, lag_bytes, lag_ms)| PartitionReport {
            topic,
            partition: PartitionIndex(partition),
            direction: if out { Direction::Out } else { Direction::In },
            state: LinkState::Lagging,
            reason,
            next,
            lag_records,
            lag_bytes,
            lag_ms,
        },
    )
}

fn note() -> impl Strategy<Value = Note> {
    (".{0,9}", topic(), any::<i32>(), uuid(), offset(), offset(), any::<i64>(), ".{0,9}").prop_map(
        |(peer, topic, partition, id, from, to, at, text)| Note {
            peer,
            kind: NoteKind::Gap,
            topic,
            partition: PartitionIndex(partition),
            incarnation: TopicId(id),
            from,
            to,
            at: TimestampMs(at),
            text,
        },
    )
}

fn survives<M: Message + PartialEq + std::fmt::Debug>(message: M) {
    let bytes = message.encode();
    assert_eq!(M::decode(bytes.clone()).as_ref(), Ok(&message));
    for cut in 0..bytes.len() {
        assert!(M::decode(bytes.slice(..cut)).is_err(), "a message cut at {cut} was accepted");
    }
}

#[test]
fn the_apply_rule_applies_what_begins_at_the_vector_and_nothing_else() {
    let verdict = |held, first, next| Verdict::of(Offset(held), Offset(first), Offset(next));
    assert_eq!(verdict(5, 5, 9), Verdict::Apply);
    assert_eq!(verdict(5, 0, 5), Verdict::Duplicate);
    assert_eq!(verdict(5, 6, 9), Verdict::Gap);
    assert_eq!(verdict(5, 4, 9), Verdict::Fence);
    assert_eq!(verdict(5, 4, 6), Verdict::Fence);
    assert_eq!(verdict(5, 5, 5), Verdict::Fence);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn topics_survive_the_wire(
        topics in proptest::option::of(proptest::collection::vec(topic_info(), 0..4)),
        (generation, region) in (any::<u64>(), uuid()),
    ) {
        survives(TopicsRequest { since: generation });
        let region_name = RegionName::parse("east-1").expect("a legal name");
        let (error, region) = (ErrorCode::None, RegionId(region));
        survives(TopicsAnswer { error, generation, region, region_name, topics });
    }

    #[test]
    fn vectors_survive_the_wire(
        partitions in proptest::collection::vec(vector(), 0..4),
        asked in proptest::collection::vec((topic(), any::<i32>().prop_map(PartitionIndex)), 0..4),
    ) {
        survives(VectorsRequest { partitions: asked });
        survives(VectorsAnswer { error: ErrorCode::None, partitions });
    }

    #[test]
    fn fetches_survive_the_wire(
        partitions in proptest::collection::vec(fetch_from(), 0..4),
        outcomes in proptest::collection::vec(fetch_outcome(), 0..4),
        (session, wait_ms, bytes_max, pass_boe, pass_ppe) in any::<(u64, u32, u32, bool, bool)>(),
    ) {
        survives(FetchRequest { session, wait_ms, bytes_max, pass_boe, pass_ppe, partitions });
        let partitions = outcomes
            .into_iter()
            .enumerate()
            .map(|(index, outcome)| Fetched { index: index as u32, outcome })
            .collect();
        survives(FetchAnswer { error: ErrorCode::None, partitions });
    }

    #[test]
    fn appends_survive_the_wire(
        units in proptest::collection::vec(unit(), 0..4),
        outcomes in proptest::collection::vec(append_outcome(), 0..4),
    ) {
        let request = AppendRequest { units };
        prop_assert_eq!(request.pieces().concat(), request.encode());
        survives(request);
        survives(AppendAnswer { error: ErrorCode::None, outcomes });
    }

    #[test]
    fn reports_and_notes_survive_the_wire(
        partitions in proptest::collection::vec(partition_report(), 0..4),
        notes in proptest::collection::vec(note(), 0..4),
        (region, list) in (proptest::option::of(uuid().prop_map(RegionId)), proptest::option::of(".{0,9}")),
    ) {
        survives(ReportRequest { links: vec![LinkReport {
            peer: "west".into(), region, address: "127.0.0.1:9096".into(), state: LinkState::Active,
            reason: String::new(), rtt_us: Some(7), sent_bytes: 1, received_bytes: 2, partitions,
        }] });
        survives(ReportAnswer { error: ErrorCode::None });
        survives(NotesRequest { add: notes.clone(), list });
        survives(NotesAnswer { error: ErrorCode::None, notes });
    }

    #[test]
    fn random_bytes_are_an_error_or_a_message_and_never_a_panic(
        bytes in proptest::collection::vec(any::<u8>(), 0..200),
    ) {
        let bytes = Bytes::from(bytes);
        let _ = TopicsAnswer::decode(bytes.clone());
        let _ = VectorsAnswer::decode(bytes.clone());
        let _ = FetchRequest::decode(bytes.clone());
        let _ = FetchAnswer::decode(bytes.clone());
        let _ = AppendRequest::decode(bytes.clone());
        let _ = AppendAnswer::decode(bytes.clone());
        let _ = ReportRequest::decode(bytes.clone());
        let _ = NotesRequest::decode(bytes);
    }
}
