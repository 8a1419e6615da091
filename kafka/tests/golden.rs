//! The codec gate: bodies that Apache Kafka's Java client encoded (`tests/golden`, one file per message) must be
//! decoded and encoded again to the same bytes. Covers the cold messages of the `kafka-protocol` crate, so that a
//! new version of it cannot change what we say, and our own codec for Produce and Fetch.

#![allow(clippy::unwrap_used)] // helpers of tests, too

use std::collections::BTreeSet;
use std::fs;
use std::ops::RangeInclusive;
use std::path::Path;

use bytes::{Bytes, BytesMut};
use kafka::ErrorCode;
use kafka::api::ADVERTISED;
use kafka::cold;
use kafka::fetch::{self, FetchRequest, FetchResponse};
use kafka::offset::{BrokerId, LeaderEpoch, Offset, ProducerId, TimestampMs};
use kafka::produce::{self, ProduceRequest, ProduceResponse};
use kafka_protocol::messages::{self, ApiKey};
use kafka_protocol::protocol::{Decodable, Encodable, Message, StrBytes};
use serde_json::{Value, json};

/// One golden body; `fields` is the same message as the Java client prints it, for Produce and Fetch.
struct Golden {
    key: i16,
    is_request: bool,
    version: i16,
    variant: String,
    body: Bytes,
    fields: Value,
}

impl Golden {
    fn name(&self) -> String {
        let kind = if self.is_request { "request" } else { "response" };
        format!("{} {kind} version {} ({})", self.key, self.version, self.variant)
    }
}

#[test]
fn cold_messages_are_encoded_as_the_java_client_encodes_them() {
    let mut tried = BTreeSet::new();
    let mut wrong = Vec::new();
    for golden in all() {
        match through_the_crate(&golden) {
            Outcome::Same => drop(tried.insert((golden.key, golden.is_request, golden.version))),
            Outcome::VersionUnknown => {}
            Outcome::Wrong(reason) => wrong.push(format!("{}: {reason}", golden.name())),
        }
    }
    assert!(wrong.is_empty(), "{} beside {} right ones:\n{}", wrong.len(), tried.len(), wrong.join("\n"));
    for range in ADVERTISED.iter().filter(|range| range.key > 1) {
        for version in range.min..=range.max {
            for is_request in [true, false] {
                let untried = format!("{} {version}: advertised, but not tried", range.name);
                assert!(tried.contains(&(range.key, is_request, version)), "{untried}");
            }
        }
    }
}

#[test]
fn produce_requests_are_understood_as_the_java_client_means_them() {
    for golden in hot(0, true, produce::VERSION_MIN..=produce::VERSION_MAX) {
        let request = ProduceRequest::decode(golden.version, golden.body.clone()).unwrap();
        let partition = |partition: &produce::ProducePartition| {
            with_records(json!({"index": partition.index}), partition.records.as_ref().map(Bytes::len))
        };
        let topic = |topic: &produce::ProduceTopic| {
            json!({"name": text(&topic.name), "partitionData":
                topic.partitions.iter().map(partition).collect::<Value>()})
        };
        let understood = json!({
            "transactionalId": request.transactional_id.as_ref().map(text),
            "acks": request.acks,
            "timeoutMs": request.timeout_ms,
            "topicData": request.topics.iter().map(topic).collect::<Value>(),
        });
        assert_eq!(understood, golden.fields, "{}", golden.name());
    }
}

#[test]
fn produce_responses_are_encoded_as_the_java_client_encodes_them() {
    for golden in hot(0, false, produce::VERSION_MIN..=produce::VERSION_MAX) {
        let fields = &golden.fields;
        let response = ProduceResponse {
            topics: each(&fields["responses"], |topic| produce::ProducedTopic {
                name: name(&topic["name"]),
                partitions: each(&topic["partitionResponses"], produced),
            }),
            throttle_time_ms: int(&fields["throttleTimeMs"]),
            endpoints: each(&fields["nodeEndpoints"], |node| produce::NodeEndpoint {
                node: BrokerId(int(&node["nodeId"])),
                host: node["host"].as_str().unwrap().to_owned(),
                port: int(&node["port"]),
                rack: node["rack"].as_str().map(str::to_owned),
            }),
        };
        let mut body = BytesMut::new();
        response.encode(golden.version, &mut body);
        assert_eq!(hex(&body), hex(&golden.body), "{}", golden.name());
    }
}

#[test]
fn fetch_requests_are_understood_as_the_java_client_means_them() {
    for golden in hot(1, true, fetch::VERSION_MIN..=fetch::VERSION_MAX) {
        let request = FetchRequest::decode(golden.version, golden.body.clone()).unwrap();
        let partition = |partition: &fetch::FetchPartition| {
            json!({"partition": partition.index, "currentLeaderEpoch": partition.current_leader_epoch.0,
                "fetchOffset": partition.fetch_offset.0, "lastFetchedEpoch": partition.last_fetched_epoch.0,
                "logStartOffset": partition.log_start.0, "partitionMaxBytes": partition.max_bytes})
        };
        let topic = |topic: &fetch::FetchTopic| {
            json!({"topic": text(&topic.name), "partitions":
                topic.partitions.iter().map(partition).collect::<Value>()})
        };
        let forgotten = |topic: &fetch::ForgottenTopic| json!({"topic": text(&topic.name), "partitions": topic.partitions});
        let understood = json!({
            "replicaId": request.replica_id, "maxWaitMs": request.max_wait_ms, "minBytes": request.min_bytes,
            "maxBytes": request.max_bytes, "isolationLevel": request.isolation_level,
            "sessionId": request.session_id, "sessionEpoch": request.session_epoch,
            "topics": request.topics.iter().map(topic).collect::<Value>(),
            "forgottenTopicsData": request.forgotten.iter().map(forgotten).collect::<Value>(),
            "rackId": text(&request.rack_id),
        });
        let mut fields = golden.fields.clone();
        // A tagged field for followers: skipped.
        fields.as_object_mut().unwrap().remove("clusterId");
        assert_covers(&understood, &fields, &golden.name());
    }
}

#[test]
fn fetch_responses_are_encoded_as_the_java_client_encodes_them() {
    let records = the_golden_batch();
    for golden in hot(1, false, fetch::VERSION_MIN..=fetch::VERSION_MAX) {
        let fields = &golden.fields;
        let response = FetchResponse {
            throttle_time_ms: int(&fields["throttleTimeMs"]),
            error: error(&fields["errorCode"]),
            session_id: int(&fields["sessionId"]),
            topics: each(&fields["responses"], |topic| fetch::FetchedTopic {
                name: name(&topic["topic"]),
                partitions: each(&topic["partitions"], |partition| fetched(partition, &records)),
            }),
        };
        let mut body = Vec::new();
        for piece in response.encode(golden.version, BytesMut::new()) {
            match piece {
                fetch::Piece::Bytes(bytes) | fetch::Piece::Records(bytes) => body.extend_from_slice(&bytes),
            }
        }
        assert_eq!(hex(&body), hex(&golden.body), "{}", golden.name());
    }
}

fn produced(fields: &Value) -> produce::ProducedPartition {
    produce::ProducedPartition {
        index: int(&fields["index"]),
        error: error(&fields["errorCode"]),
        base_offset: Offset(long(&fields["baseOffset"])),
        log_append_time: TimestampMs(long(&fields["logAppendTimeMs"])),
        log_start: Offset(long(&fields["logStartOffset"])),
        record_errors: each(&fields["recordErrors"], |error| produce::RecordError {
            batch_index: int(&error["batchIndex"]),
            message: error["batchIndexErrorMessage"].as_str().map(str::to_owned),
        }),
        error_message: fields["errorMessage"].as_str().map(str::to_owned),
        current_leader: leader(&fields["currentLeader"]),
    }
}

fn fetched(fields: &Value, records: &Bytes) -> fetch::FetchedPartition<Bytes> {
    let diverging = &fields["divergingEpoch"];
    let has_records = fields["recordsSizeInBytes"] != json!(0);
    fetch::FetchedPartition {
        index: int(&fields["partitionIndex"]),
        error: error(&fields["errorCode"]),
        high_watermark: Offset(long(&fields["highWatermark"])),
        last_stable: Offset(long(&fields["lastStableOffset"])),
        log_start: Offset(long(&fields["logStartOffset"])),
        aborted: fields["abortedTransactions"].as_array().map(|_| {
            each(&fields["abortedTransactions"], |aborted| fetch::AbortedTransaction {
                producer_id: ProducerId(long(&aborted["producerId"])),
                first_offset: Offset(long(&aborted["firstOffset"])),
            })
        }),
        diverging_epoch: diverging
            .is_object()
            .then(|| (LeaderEpoch(int(&diverging["epoch"])), Offset(long(&diverging["endOffset"])))),
        current_leader: leader(&fields["currentLeader"]),
        records: if has_records { vec![records.clone()] } else { Vec::new() },
    }
}

/// The batch that every golden body with records carries: cut out of a Produce request of one.
fn the_golden_batch() -> Bytes {
    let golden = hot(0, true, 12..=12).into_iter().find(|golden| golden.variant == "full").unwrap();
    let request = ProduceRequest::decode(12, golden.body).unwrap();
    request.topics[0].partitions[0].records.clone().unwrap()
}

/// Our decoder fills a field that a version does not have with its default: then the Java client prints none.
fn assert_covers(ours: &Value, theirs: &Value, name: &str) {
    match (ours, theirs) {
        (Value::Object(ours), Value::Object(theirs)) => {
            assert!(theirs.keys().all(|key| ours.contains_key(key)), "{name}: {theirs:?}");
            for (key, value) in ours {
                let default = [json!(0), json!(-1), json!(""), json!([])].contains(value);
                match theirs.get(key) {
                    Some(theirs) => assert_covers(value, theirs, &format!("{name}: {key}")),
                    None => assert!(default, "{name}: {key} is {value}"),
                }
            }
        }
        (Value::Array(ours), Value::Array(theirs)) => {
            assert_eq!(ours.len(), theirs.len(), "{name}");
            ours.iter().zip(theirs).for_each(|(ours, theirs)| assert_covers(ours, theirs, name));
        }
        _ => assert_eq!(ours, theirs, "{name}"),
    }
}

fn hot(key: i16, is_request: bool, versions: RangeInclusive<i16>) -> Vec<Golden> {
    let mut hot = all();
    hot.retain(|golden| {
        golden.key == key && golden.is_request == is_request && versions.contains(&golden.version)
    });
    assert!(hot.len() > 1 || versions.clone().count() == 1, "no golden bytes for {key}");
    hot
}

fn with_records(mut fields: Value, size: Option<usize>) -> Value {
    match size {
        Some(size) => fields["recordsSizeInBytes"] = json!(size),
        None => fields["records"] = Value::Null,
    }
    fields
}

fn each<T>(elements: &Value, make: impl Fn(&Value) -> T) -> Vec<T> {
    elements.as_array().map_or_else(Vec::new, |elements| elements.iter().map(make).collect())
}

fn leader(fields: &Value) -> Option<(BrokerId, LeaderEpoch)> {
    fields.is_object().then(|| (BrokerId(int(&fields["leaderId"])), LeaderEpoch(int(&fields["leaderEpoch"]))))
}

fn error(code: &Value) -> ErrorCode {
    if code.is_null() {
        ErrorCode::None
    } else {
        ErrorCode::from_code(long(code).try_into().unwrap()).unwrap()
    }
}

fn int(value: &Value) -> i32 {
    long(value).try_into().unwrap()
}

/// 0 where the version has no such field.
fn long(value: &Value) -> i64 {
    value.as_i64().unwrap_or_default()
}

fn text(text: &StrBytes) -> String {
    text.as_str().to_owned()
}

fn name(value: &Value) -> StrBytes {
    StrBytes::from_string(value.as_str().unwrap().to_owned())
}

enum Outcome {
    Same,
    /// The crate does not know this version: nothing of it may be advertised.
    VersionUnknown,
    Wrong(String),
}

/// Decodes and encodes a body with the crate's message type of its key.
macro_rules! codec_of {
    ($golden:expr, $($key:ident $request:ident $response:ident),+ $(,)?) => {
        match ApiKey::try_from($golden.key) {
            $(Ok(ApiKey::$key) if $golden.is_request => again::<messages::$request>($golden),
            Ok(ApiKey::$key) => again::<messages::$response>($golden),)+
            other => panic!("{other:?} has golden bytes but no line in the table"),
        }
    };
}

fn through_the_crate(golden: &Golden) -> Outcome {
    codec_of!(
        golden,
        Produce ProduceRequest ProduceResponse,
        Fetch FetchRequest FetchResponse,
        ListOffsets ListOffsetsRequest ListOffsetsResponse,
        Metadata MetadataRequest MetadataResponse,
        OffsetCommit OffsetCommitRequest OffsetCommitResponse,
        OffsetFetch OffsetFetchRequest OffsetFetchResponse,
        FindCoordinator FindCoordinatorRequest FindCoordinatorResponse,
        JoinGroup JoinGroupRequest JoinGroupResponse,
        Heartbeat HeartbeatRequest HeartbeatResponse,
        LeaveGroup LeaveGroupRequest LeaveGroupResponse,
        SyncGroup SyncGroupRequest SyncGroupResponse,
        DescribeGroups DescribeGroupsRequest DescribeGroupsResponse,
        ListGroups ListGroupsRequest ListGroupsResponse,
        SaslHandshake SaslHandshakeRequest SaslHandshakeResponse,
        ApiVersions ApiVersionsRequest ApiVersionsResponse,
        CreateTopics CreateTopicsRequest CreateTopicsResponse,
        DeleteTopics DeleteTopicsRequest DeleteTopicsResponse,
        DeleteRecords DeleteRecordsRequest DeleteRecordsResponse,
        InitProducerId InitProducerIdRequest InitProducerIdResponse,
        OffsetForLeaderEpoch OffsetForLeaderEpochRequest OffsetForLeaderEpochResponse,
        AddPartitionsToTxn AddPartitionsToTxnRequest AddPartitionsToTxnResponse,
        AddOffsetsToTxn AddOffsetsToTxnRequest AddOffsetsToTxnResponse,
        EndTxn EndTxnRequest EndTxnResponse,
        TxnOffsetCommit TxnOffsetCommitRequest TxnOffsetCommitResponse,
        DescribeAcls DescribeAclsRequest DescribeAclsResponse,
        CreateAcls CreateAclsRequest CreateAclsResponse,
        DeleteAcls DeleteAclsRequest DeleteAclsResponse,
        DescribeConfigs DescribeConfigsRequest DescribeConfigsResponse,
        AlterConfigs AlterConfigsRequest AlterConfigsResponse,
        DescribeLogDirs DescribeLogDirsRequest DescribeLogDirsResponse,
        SaslAuthenticate SaslAuthenticateRequest SaslAuthenticateResponse,
        CreatePartitions CreatePartitionsRequest CreatePartitionsResponse,
        DeleteGroups DeleteGroupsRequest DeleteGroupsResponse,
        ElectLeaders ElectLeadersRequest ElectLeadersResponse,
        IncrementalAlterConfigs IncrementalAlterConfigsRequest IncrementalAlterConfigsResponse,
        AlterPartitionReassignments AlterPartitionReassignmentsRequest AlterPartitionReassignmentsResponse,
        ListPartitionReassignments ListPartitionReassignmentsRequest ListPartitionReassignmentsResponse,
        OffsetDelete OffsetDeleteRequest OffsetDeleteResponse,
        DescribeClientQuotas DescribeClientQuotasRequest DescribeClientQuotasResponse,
        AlterClientQuotas AlterClientQuotasRequest AlterClientQuotasResponse,
        DescribeUserScramCredentials DescribeUserScramCredentialsRequest DescribeUserScramCredentialsResponse,
        AlterUserScramCredentials AlterUserScramCredentialsRequest AlterUserScramCredentialsResponse,
        DescribeCluster DescribeClusterRequest DescribeClusterResponse,
        DescribeProducers DescribeProducersRequest DescribeProducersResponse,
        DescribeTransactions DescribeTransactionsRequest DescribeTransactionsResponse,
        ListTransactions ListTransactionsRequest ListTransactionsResponse,
        ConsumerGroupHeartbeat ConsumerGroupHeartbeatRequest ConsumerGroupHeartbeatResponse,
        ConsumerGroupDescribe ConsumerGroupDescribeRequest ConsumerGroupDescribeResponse,
        ListConfigResources ListConfigResourcesRequest ListConfigResourcesResponse,
        DescribeTopicPartitions DescribeTopicPartitionsRequest DescribeTopicPartitionsResponse,
    )
}

fn again<M: Decodable + Encodable + Message>(golden: &Golden) -> Outcome {
    if golden.version < M::VERSIONS.min || golden.version > M::VERSIONS.max {
        return Outcome::VersionUnknown;
    }
    let message: M = match cold::decode(golden.version, golden.body.clone()) {
        Ok(message) => message,
        Err(error) => return Outcome::Wrong(error.to_string()),
    };
    match cold::encoded(&message, golden.version) {
        Ok(again) if again == golden.body => Outcome::Same,
        Ok(again) => Outcome::Wrong(format!("encoded as\n{}\nnot\n{}", hex(&again), hex(&golden.body))),
        Err(error) => Outcome::Wrong(error.to_string()),
    }
}

fn all() -> Vec<Golden> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let mut all = Vec::new();
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        let Some(name) = name.strip_suffix(".tsv") else { continue };
        let key = name.split('-').next().unwrap().parse().unwrap();
        for line in fs::read_to_string(&path).unwrap().lines() {
            let mut columns = line.split('\t');
            all.push(Golden {
                key,
                is_request: name.ends_with(".request"),
                version: columns.next().unwrap().parse().unwrap(),
                variant: columns.next().unwrap().to_owned(),
                body: unhex(columns.next().unwrap()),
                fields: columns.next().map_or(Value::Null, |text| serde_json::from_str(text).unwrap()),
            });
        }
    }
    all.sort_by_key(|golden| (golden.key, !golden.is_request, golden.version));
    all
}

fn unhex(text: &str) -> Bytes {
    let pairs = text.as_bytes().chunks(2).map(|pair| std::str::from_utf8(pair).unwrap());
    pairs.map(|pair| u8::from_str_radix(pair, 16).unwrap()).collect()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
