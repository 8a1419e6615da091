//! Our own Produce and Fetch codecs against the `kafka-protocol` crate's messages as an independent judge,
//! and against arbitrary bytes. Also: the API table against that crate's, frames, and hostile counts.

#![allow(clippy::unwrap_used)] // helpers of tests, too

use bytes::{Bytes, BytesMut};
use kafka::fetch::{self, FetchRequest, FetchResponse, FetchedPartition, FetchedTopic, Piece};
use kafka::produce::{self, ProduceRequest, ProduceResponse, ProducedPartition, ProducedTopic, RecordError};
use kafka::{
    BrokerId, ErrorCode, LeaderEpoch, Offset, ProducerId, StrBytes, TimestampMs, api, cold, frame, messages,
};
use kafka_protocol::messages::ApiKey;
use kafka_protocol::protocol::{Decodable, Encodable};
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;

#[macro_use]
#[path = "../../fuzz/cold_requests.rs"]
mod cold_requests;

fn text() -> impl Strategy<Value = StrBytes> {
    "[a-zé.]{0,20}".prop_map(StrBytes::from_string)
}

fn bytes() -> impl Strategy<Value = Bytes> {
    vec(any::<u8>(), 0..300).prop_map(Bytes::from)
}

fn encoded(message: &impl Encodable, version: i16) -> Bytes {
    let mut out = BytesMut::new();
    message.encode(&mut out, version).unwrap();
    out.freeze()
}

fn produce_request() -> impl Strategy<Value = messages::ProduceRequest> {
    use messages::produce_request::{PartitionProduceData, TopicProduceData};
    let partition = (any::<i32>(), option::of(bytes()))
        .prop_map(|(index, records)| PartitionProduceData::default().with_index(index).with_records(records));
    let topic = (text(), vec(partition, 0..4)).prop_map(|(name, partitions)| {
        TopicProduceData::default().with_name(name.into()).with_partition_data(partitions)
    });
    (option::of(text()), any::<i16>(), any::<i32>(), vec(topic, 0..4)).prop_map(
        |(id, acks, timeout, topics)| {
            messages::ProduceRequest::default()
                .with_transactional_id(id.map(Into::into))
                .with_acks(acks)
                .with_timeout_ms(timeout)
                .with_topic_data(topics)
        },
    )
}

fn fetch_request(version: i16) -> impl Strategy<Value = messages::FetchRequest> {
    use messages::fetch_request::{FetchPartition, FetchTopic, ForgottenTopic};
    let partition = (any::<i32>(), any::<i32>(), any::<i64>(), any::<i32>()).prop_map(
        move |(index, epoch, offset, max)| {
            let mut partition = FetchPartition::default()
                .with_partition(index)
                .with_fetch_offset(offset)
                .with_partition_max_bytes(max);
            partition.current_leader_epoch = if version >= 9 { epoch } else { -1 };
            partition.last_fetched_epoch = if version >= 12 { epoch } else { -1 };
            partition.log_start_offset = if version >= 5 { offset } else { -1 };
            partition
        },
    );
    let topic = (text(), vec(partition, 0..4)).prop_map(|(name, partitions)| {
        FetchTopic::default().with_topic(name.into()).with_partitions(partitions)
    });
    let forgotten = (text(), vec(any::<i32>(), 0..4)).prop_map(|(name, partitions)| {
        ForgottenTopic::default().with_topic(name.into()).with_partitions(partitions)
    });
    (any::<[i32; 5]>(), any::<i8>(), vec(topic, 0..4), vec(forgotten, 0..3), text()).prop_map(
        move |([wait, min, max, session, epoch], isolation, topics, forgotten, rack)| {
            let mut request = messages::FetchRequest::default()
                .with_max_wait_ms(wait)
                .with_min_bytes(min)
                .with_max_bytes(max)
                .with_isolation_level(isolation)
                .with_topics(topics);
            if version >= 7 {
                request = request
                    .with_session_id(session)
                    .with_session_epoch(epoch)
                    .with_forgotten_topics_data(forgotten);
            }
            if version >= 11 {
                request.rack_id = rack;
            }
            request
        },
    )
}

fn produce_response() -> impl Strategy<Value = ProduceResponse> {
    let record_error = (any::<i32>(), option::of(".{0,9}"))
        .prop_map(|(batch_index, message)| RecordError { batch_index, message });
    let partition = (
        (any::<i32>(), 0i16..50, any::<i64>(), any::<i64>(), any::<i64>()),
        vec(record_error, 0..3),
        option::of(".{0,9}"),
        option::of((any::<i32>(), any::<i32>())),
    )
        .prop_map(|((index, error, base, time, start), record_errors, error_message, leader)| {
            ProducedPartition {
                index,
                error: ErrorCode::from_code(error).unwrap_or(ErrorCode::None),
                base_offset: Offset(base),
                log_append_time: TimestampMs(time),
                log_start: Offset(start),
                record_errors,
                error_message,
                current_leader: leader.map(|(id, epoch)| (BrokerId(id), LeaderEpoch(epoch))),
            }
        });
    let topic =
        (text(), vec(partition, 0..4)).prop_map(|(name, partitions)| ProducedTopic { name, partitions });
    let endpoint = (any::<i32>(), "[a-z]{0,9}", any::<i32>(), option::of("[a-z]{0,9}")).prop_map(
        |(node, host, port, rack)| produce::NodeEndpoint { node: BrokerId(node), host, port, rack },
    );
    (vec(topic, 0..4), any::<i32>(), vec(endpoint, 0..3)).prop_map(|(topics, throttle_time_ms, endpoints)| {
        ProduceResponse { topics, throttle_time_ms, endpoints }
    })
}

fn fetch_response() -> impl Strategy<Value = FetchResponse<Bytes>> {
    let aborted = (any::<i64>(), any::<i64>()).prop_map(|(producer, first)| fetch::AbortedTransaction {
        producer_id: ProducerId(producer),
        first_offset: Offset(first),
    });
    let partition = (
        (any::<i32>(), any::<i64>(), any::<i64>(), any::<i64>()),
        option::of(vec(aborted, 0..3)),
        option::of((0..9i32, 0..9i64)),
        option::of((0..9i32, 0..9i32)),
        vec(bytes(), 0..3),
    )
        .prop_map(|((index, high, stable, start), aborted, diverging, leader, records)| {
            FetchedPartition {
                index,
                error: ErrorCode::None,
                high_watermark: Offset(high),
                last_stable: Offset(stable),
                log_start: Offset(start),
                aborted,
                diverging_epoch: diverging.map(|(epoch, end)| (LeaderEpoch(epoch), Offset(end))),
                current_leader: leader.map(|(id, epoch)| (BrokerId(id), LeaderEpoch(epoch))),
                records,
            }
        });
    let topic =
        (text(), vec(partition, 0..4)).prop_map(|(name, partitions)| FetchedTopic { name, partitions });
    (any::<i32>(), any::<i32>(), vec(topic, 0..4)).prop_map(|(throttle_time_ms, session_id, topics)| {
        FetchResponse { throttle_time_ms, error: ErrorCode::None, session_id, topics }
    })
}

fn join(pieces: Vec<Piece<Bytes>>) -> Bytes {
    let mut out = BytesMut::new();
    for piece in pieces {
        match piece {
            Piece::Bytes(bytes) | Piece::Records(bytes) => out.extend_from_slice(&bytes),
        }
    }
    out.freeze()
}

fn same_produce_request(ours: &ProduceRequest, theirs: &messages::ProduceRequest) {
    assert_eq!(ours.transactional_id, theirs.transactional_id.clone().map(|id| id.0));
    assert_eq!((ours.acks, ours.timeout_ms), (theirs.acks, theirs.timeout_ms));
    let ours: Vec<_> = ours
        .topics
        .iter()
        .map(|t| {
            (t.name.clone(), t.partitions.iter().map(|p| (p.index, p.records.clone())).collect::<Vec<_>>())
        })
        .collect();
    let theirs: Vec<_> = theirs
        .topic_data
        .iter()
        .map(|t| {
            (
                t.name.0.clone(),
                t.partition_data.iter().map(|p| (p.index, p.records.clone())).collect::<Vec<_>>(),
            )
        })
        .collect();
    assert_eq!(ours, theirs);
}

fn same_fetch_request(ours: &FetchRequest, theirs: &messages::FetchRequest) {
    assert_eq!(
        (
            ours.max_wait_ms,
            ours.min_bytes,
            ours.max_bytes,
            ours.isolation_level,
            ours.session_id,
            ours.session_epoch
        ),
        (
            theirs.max_wait_ms,
            theirs.min_bytes,
            theirs.max_bytes,
            theirs.isolation_level,
            theirs.session_id,
            theirs.session_epoch
        )
    );
    assert_eq!(ours.rack_id, theirs.rack_id);
    assert_eq!(ours.topics.len(), theirs.topics.len());
    for (ours, theirs) in ours.topics.iter().zip(&theirs.topics) {
        assert_eq!(ours.name, theirs.topic.0);
        let ours: Vec<_> = ours
            .partitions
            .iter()
            .map(|p| {
                let epochs = (p.current_leader_epoch.0, p.last_fetched_epoch.0);
                (p.index, epochs, p.fetch_offset.0, p.log_start.0, p.max_bytes)
            })
            .collect();
        let theirs: Vec<_> = theirs
            .partitions
            .iter()
            .map(|p| {
                let epochs = (p.current_leader_epoch, p.last_fetched_epoch);
                (p.partition, epochs, p.fetch_offset, p.log_start_offset, p.partition_max_bytes)
            })
            .collect();
        assert_eq!(ours, theirs);
    }
    let ours: Vec<_> = ours.forgotten.iter().map(|t| (t.name.clone(), t.partitions.clone())).collect();
    let theirs: Vec<_> =
        theirs.forgotten_topics_data.iter().map(|t| (t.topic.0.clone(), t.partitions.clone())).collect();
    assert_eq!(ours, theirs);
}

/// Their reading of our bytes, and their own bytes for what they read.
fn judged<M: Encodable + Decodable>(ours: &Bytes, version: i16) -> M {
    let mut rest = ours.clone();
    let theirs = M::decode(&mut rest, version).unwrap();
    assert!(rest.is_empty());
    assert_eq!(encoded(&theirs, version), ours, "version {version}");
    theirs
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn produce_requests_are_read_as_the_judge_wrote_them(request in produce_request()) {
        for version in produce::VERSION_MIN..=produce::VERSION_MAX {
            let ours = ProduceRequest::decode(version, encoded(&request, version)).unwrap();
            same_produce_request(&ours, &request);
        }
    }

    #[test]
    fn fetch_requests_are_read_as_the_judge_wrote_them(
        (version, request) in (fetch::VERSION_MIN..=fetch::VERSION_MAX).prop_flat_map(|v| (Just(v), fetch_request(v)))
    ) {
        let ours = FetchRequest::decode(version, encoded(&request, version)).unwrap();
        same_fetch_request(&ours, &request);
    }

    #[test]
    fn produce_responses_are_read_by_the_judge(response in produce_response()) {
        for version in produce::VERSION_MIN..=produce::VERSION_MAX {
            let mut ours = BytesMut::new();
            response.encode(version, &mut ours);
            let theirs: messages::ProduceResponse = judged(&ours.freeze(), version);
            prop_assert_eq!(theirs.responses.len(), response.topics.len());
            for (theirs, ours) in theirs.responses.iter().zip(&response.topics) {
                prop_assert_eq!(&theirs.name.0, &ours.name);
                for (theirs, ours) in theirs.partition_responses.iter().zip(&ours.partitions) {
                    prop_assert_eq!((theirs.index, theirs.error_code), (ours.index, ours.error.code()));
                    prop_assert_eq!(theirs.base_offset, ours.base_offset.0);
                    prop_assert_eq!(theirs.log_append_time_ms, ours.log_append_time.0);
                    if version >= 8 {
                        prop_assert_eq!(theirs.error_message.as_deref(), ours.error_message.as_deref());
                        prop_assert_eq!(theirs.record_errors.len(), ours.record_errors.len());
                    }
                    if let (Some((id, epoch)), true) = (ours.current_leader, version >= 10) {
                        prop_assert_eq!(theirs.current_leader.leader_id.0, id.0);
                        prop_assert_eq!(theirs.current_leader.leader_epoch, epoch.0);
                    }
                }
            }
            if version >= 10 {
                prop_assert_eq!(theirs.node_endpoints.len(), response.endpoints.len());
            }
        }
    }

    #[test]
    fn fetch_responses_are_read_by_the_judge(response in fetch_response()) {
        for version in fetch::VERSION_MIN..=fetch::VERSION_MAX {
            let ours = join(response.clone().encode(version, BytesMut::new()));
            let theirs: messages::FetchResponse = judged(&ours, version);
            prop_assert_eq!(theirs.responses.len(), response.topics.len());
            for (theirs, ours) in theirs.responses.iter().zip(&response.topics) {
                for (theirs, ours) in theirs.partitions.iter().zip(&ours.partitions) {
                    let records: Vec<u8> = ours.records.concat();
                    prop_assert_eq!(theirs.records.as_deref(), Some(&records[..]));
                    prop_assert_eq!(theirs.aborted_transactions.is_none(), ours.aborted.is_none());
                    prop_assert_eq!(theirs.high_watermark, ours.high_watermark.0);
                    if let (Some((epoch, end)), true) = (ours.diverging_epoch, version >= 12) {
                        prop_assert_eq!((theirs.diverging_epoch.epoch, theirs.diverging_epoch.end_offset), (epoch.0, end.0));
                    }
                    if let (Some((id, epoch)), true) = (ours.current_leader, version >= 12) {
                        prop_assert_eq!((theirs.current_leader.leader_id.0, theirs.current_leader.leader_epoch), (id.0, epoch.0));
                    }
                }
            }
        }
    }

    #[test]
    fn arbitrary_bodies_never_panic(body: Vec<u8>) {
        let body = Bytes::from(body);
        for version in -1..=14 {
            let _ = ProduceRequest::decode(version, body.clone());
            let _ = FetchRequest::decode(version, body.clone());
        }
        decode_every_cold_request(&body);
    }

    #[test]
    fn cut_and_changed_requests_never_panic(request in produce_request(), at: usize, byte: u8) {
        for version in produce::VERSION_MIN..=produce::VERSION_MAX {
            let mut body = encoded(&request, version).to_vec();
            let at = at % body.len();
            let _ = ProduceRequest::decode(version, body[..at].to_vec().into());
            body[at] = byte;
            let _ = ProduceRequest::decode(version, body.into());
        }
    }

    #[test]
    fn arbitrary_frames_never_panic(stream: Vec<u8>, key in -1i16..100, version in -1i16..20) {
        let mut buffer = BytesMut::from(&stream[..]);
        let _ = frame::next_frame(&mut buffer, 1 << 20);
        let mut header = [key.to_be_bytes(), version.to_be_bytes()].concat();
        header.extend(stream);
        let _ = frame::parse_request_header(&mut Bytes::from(header));
    }
}

/// Every advertised cold request in every version.
macro_rules! decode_each {
    ($body:expr, $($key:literal $request:ident),+ $(,)?) => {
        for range in kafka::ADVERTISED {
            for version in range.min..=range.max {
                match range.key {
                    0 | 1 => {}
                    $($key => { let _ = cold::decode::<messages::$request>(version, $body.clone()); })+
                    other => panic!("advertised key {other} is not in this test"),
                }
            }
        }
    };
}

fn decode_every_cold_request(body: &Bytes) {
    with_cold_requests!(decode_each! { body, });
}

/// One small frame must not make the process allocate gigabytes: that would end it.
#[test]
fn impossible_counts_are_refused_by_every_request() {
    let classic = [&[0x7f, 0xff, 0xff, 0xff][..], &[0; 64]].concat();
    let compact = [&[0xff, 0xff, 0xff, 0xff, 0x0f][..], &[0; 64]].concat();
    for lead in 0..40 {
        for count in [&classic, &compact] {
            let body = Bytes::from([&vec![0; lead][..], count].concat());
            decode_every_cold_request(&body);
            for version in 0..=12 {
                let _ = ProduceRequest::decode(version, body.clone());
                let _ = FetchRequest::decode(version, body.clone());
            }
        }
    }
    // A boolean that is no boolean, before a count: the bound must not lose its place.
    let body = Bytes::from_static(&[0, 0x80, 0x80, 0x80, 0x80, 0x80, 0x0f, 0, 0, 0, 0]);
    decode_every_cold_request(&body);
    assert!(cold::decode::<messages::MetadataRequest>(1, classic.into()).is_err());
    assert!(cold::decode::<messages::MetadataRequest>(12, compact.into()).is_err());
}

#[test]
fn large_numbers_that_are_no_counts_pass_the_bound() {
    let request = messages::JoinGroupRequest::default()
        .with_group_id(StrBytes::from_static_str("g").into())
        .with_session_timeout_ms(i32::MAX)
        .with_rebalance_timeout_ms(i32::MAX)
        .with_protocol_type(StrBytes::from_static_str("consumer"));
    for version in 0..=9 {
        let mut request = request.clone();
        if version < 1 {
            request.rebalance_timeout_ms = -1;
        }
        let read: messages::JoinGroupRequest = cold::decode(version, encoded(&request, version)).unwrap();
        assert_eq!(read, request, "version {version}");
    }
}

#[test]
fn the_api_table_is_sorted_and_within_what_the_codecs_know() {
    assert!(kafka::ADVERTISED.is_sorted_by_key(|range| range.key));
    for range in kafka::ADVERTISED {
        let key = ApiKey::try_from(range.key).unwrap();
        let known = key.valid_versions();
        // Produce 0 to 2 are refused.
        let min = if range.key == 0 { 0 } else { known.min };
        assert!(range.min >= min && range.max <= known.max, "{} {}-{}", range.name, range.min, range.max);
        for version in range.min..=range.max {
            assert_eq!(api::is_flexible(range.key, version), key.request_header_version(version) == 2);
        }
    }
    for version in 0..=4 {
        assert_eq!(api::response_header_version(api::API_VERSIONS, version), 0);
    }
}

/// C01: the header of a version from the future is still answered by correlation id.
#[test]
fn an_api_versions_request_of_version_99_has_a_readable_header() {
    let mut frame = Bytes::from_static(&[0, 18, 0, 99, 0, 0, 0, 7, 0xff, 0xff, 0]);
    let header = frame::parse_request_header(&mut frame).unwrap();
    assert_eq!((header.api_key, header.api_version, header.correlation_id), (18, 99, 7));
}

#[test]
fn request_headers_survive_in_every_version() {
    for range in kafka::ADVERTISED {
        for version in range.min..=range.max {
            let header = kafka::RequestHeader {
                api_key: range.key,
                api_version: version,
                correlation_id: -5,
                client_id: Some(StrBytes::from_static_str("clé")),
            };
            let mut out = BytesMut::new();
            frame::put_request_header(&mut out, &header);
            out.extend_from_slice(b"body");
            let mut frame = out.freeze();
            assert_eq!(frame::parse_request_header(&mut frame).unwrap(), header);
            assert_eq!(&frame[..], b"body");
        }
    }
}

#[test]
fn frames_are_cut_one_by_one_and_bad_lengths_are_named() {
    let mut buffer = BytesMut::from(&[0, 0, 0, 2, 1, 2, 0, 0, 0, 0, 0, 0, 0, 9, 3][..]);
    assert_eq!(frame::next_frame(&mut buffer, 9).unwrap().as_deref(), Some(&[1, 2][..]));
    assert_eq!(frame::next_frame(&mut buffer, 9).unwrap().as_deref(), Some(&[][..]));
    assert_eq!(frame::next_frame(&mut buffer, 9), Ok(None));
    assert_eq!(frame::next_frame(&mut buffer, 8), Err(frame::FrameError::TooLarge { len: 9, max: 8 }));
    let mut negative = BytesMut::from(&[0xff; 4][..]);
    assert_eq!(frame::next_frame(&mut negative, 8), Err(frame::FrameError::Length(-1)));
    let mut tls = BytesMut::from(&[0x16, 3, 1, 2, 0][..]);
    assert_eq!(frame::next_frame(&mut tls, usize::MAX), Err(frame::FrameError::Tls));
}
