//! The codec gate: bodies that Apache Kafka's Java client encoded (`tests/golden`, one file per message) must be
//! decoded and encoded again to the same bytes. Covers the cold messages of the `kafka-protocol` crate, so that a
//! new version of it cannot change what we say, and our own codec for Produce and Fetch.

use std::fs;
use std::path::Path;

use bytes::{Bytes, BytesMut};
use kafka_protocol::messages::{self, ApiKey};
use kafka_protocol::protocol::{Decodable, Encodable, Message};

/// One golden body.
struct Golden {
    key: i16,
    is_request: bool,
    version: i16,
    variant: String,
    body: Bytes,
}

impl Golden {
    fn name(&self) -> String {
        let kind = if self.is_request { "request" } else { "response" };
        format!("{} {kind} version {} ({})", self.key, self.version, self.variant)
    }
}

#[test]
fn cold_messages_are_encoded_as_the_java_client_encodes_them() {
    let mut tried = 0;
    let mut wrong = Vec::new();
    for golden in all() {
        match through_the_crate(&golden) {
            Outcome::Same => tried += 1,
            Outcome::VersionUnknown => {}
            Outcome::Wrong(reason) => wrong.push(format!("{}: {reason}", golden.name())),
        }
    }
    assert!(tried > 1000, "only {tried} bodies were tried");
    assert!(wrong.is_empty(), "{} beside {tried} right ones:\n{}", wrong.len(), wrong.join("\n"));
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
    let mut body = golden.body.clone();
    let message = match M::decode(&mut body, golden.version) {
        Ok(_) if !body.is_empty() => return Outcome::Wrong(format!("{} bytes were left", body.len())),
        Ok(message) => message,
        Err(error) => return Outcome::Wrong(error.to_string()),
    };
    let mut again = BytesMut::new();
    match message.encode(&mut again, golden.version) {
        Ok(()) if again == golden.body => Outcome::Same,
        Ok(()) => Outcome::Wrong(format!("encoded as\n{}\nnot\n{}", hex(&again), hex(&golden.body))),
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
