//! Handlers of cold messages against a whole broker on the memory store: meanings as in Kafka, in every
//! advertised version.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use chassis::ServiceHandle;
use kafka::batch::Codec;
use kafka::frame::RequestHeader;
use kafka::messages::create_topics_request::{
    CreatableReplicaAssignment, CreatableTopic, CreatableTopicConfig,
};
use kafka::messages::describe_configs_request::DescribeConfigsResource;
use kafka::messages::incremental_alter_configs_request::{AlterConfigsResource, AlterableConfig};
use kafka::messages::list_offsets_request::{ListOffsetsPartition, ListOffsetsTopic};
use kafka::messages::metadata_request::MetadataRequestTopic;
use kafka::messages::produce_request::{PartitionProduceData, TopicProduceData};
use kafka::messages::*;
use kafka::{ADVERTISED, BatchBuilder, ErrorCode, Offset, StrBytes, TimestampMs, cold};
use kafka_protocol::protocol::{Decodable, Request};

use super::*;
use crate::config::{Config, ListenerConfig, Storage};

struct Harness {
    ctx: Ctx,
    service: ServiceHandle,
}

impl Harness {
    async fn start() -> Harness {
        let config = Config {
            storage: Storage::Memory,
            listeners: vec![ListenerConfig { bind: "127.0.0.1:0".to_owned(), ..ListenerConfig::default() }],
            control_bind: "127.0.0.1:0".to_owned(),
            http_bind: String::new(),
            num_partitions: 2,
            ..Config::default()
        };
        let service = ServiceHandle::standalone("broker");
        let running = crate::service::start(config, service.clone()).await.unwrap();
        let connection = ConnectionInfo {
            id: 1,
            listener: running.broker.listeners[0].clone(),
            principal: Principal::Anonymous,
            peer: "127.0.0.1:1".parse().unwrap(),
        };
        Harness { ctx: Ctx { broker: running.broker, connection: Arc::new(connection) }, service }
    }

    async fn stop(self) {
        drop(self.ctx);
        self.service.drain(std::time::Duration::from_secs(10)).await.unwrap();
    }

    async fn raw(&self, key: i16, version: i16, body: Bytes) -> Bytes {
        let header = RequestHeader { api_key: key, api_version: version, correlation_id: 7, client_id: None };
        let body = match start(&self.ctx, &header, body) {
            Answer::Ready(body) => body,
            Answer::Later(later) | Answer::Overlap(later) => later.await,
            Answer::Nothing => panic!("{key} version {version}: nothing"),
            Answer::Close(reason) => panic!("{key} version {version}: {reason}"),
        };
        let mut bytes = BytesMut::new();
        for piece in body.0 {
            match piece {
                Piece::Bytes(piece) | Piece::Records(RecordPiece::Memory(piece)) => {
                    bytes.extend_from_slice(&piece)
                }
                Piece::Records(RecordPiece::File(slice)) => bytes.extend_from_slice(&slice.bytes().unwrap()),
            }
        }
        bytes.freeze()
    }

    async fn ask<R: Request>(&self, version: i16, request: &R) -> R::Response {
        let answer = self.raw(R::KEY, version, cold::encoded(request, version).unwrap()).await;
        read(version, answer)
    }

    async fn create(&self, topic: CreatableTopic) -> i16 {
        let request = CreateTopicsRequest::default().with_topics(vec![topic]);
        self.ask(7, &request).await.topics[0].error_code
    }

    async fn produce(&self, topic: &str, index: i32, batch: Bytes) -> i64 {
        let partition = PartitionProduceData::default().with_index(index).with_records(Some(batch));
        let topic = TopicProduceData::default().with_name(name(topic)).with_partition_data(vec![partition]);
        let request =
            ProduceRequest::default().with_acks(-1).with_timeout_ms(1000).with_topic_data(vec![topic]);
        let answer = self.ask(9, &request).await;
        let partition = &answer.responses[0].partition_responses[0];
        assert_eq!(partition.error_code, 0);
        partition.base_offset
    }

    async fn list_offset(&self, version: i16, topic: &str, timestamp: i64) -> (i16, i64, i64) {
        let partition = ListOffsetsPartition::default().with_partition_index(0).with_timestamp(timestamp);
        let topic = ListOffsetsTopic::default().with_name(name(topic)).with_partitions(vec![partition]);
        let request = ListOffsetsRequest::default().with_replica_id(BrokerId(-1)).with_topics(vec![topic]);
        let answer = self.ask(version, &request).await;
        let partition = &answer.topics[0].partitions[0];
        (partition.error_code, partition.offset, partition.timestamp)
    }
}

fn read<M: Decodable>(version: i16, mut bytes: Bytes) -> M {
    let message = M::decode(&mut bytes, version).unwrap();
    assert!(bytes.is_empty(), "bytes follow the answer");
    message
}

fn string(text: &str) -> StrBytes {
    StrBytes::from_string(text.to_owned())
}

fn name(text: &str) -> TopicName {
    TopicName(string(text))
}

fn topic(text: &str, partitions: i32) -> CreatableTopic {
    CreatableTopic::default()
        .with_name(name(text))
        .with_num_partitions(partitions)
        .with_replication_factor(-1)
}

fn metadata_of(names: Option<&[&str]>, create: bool) -> MetadataRequest {
    let topic = |text: &&str| MetadataRequestTopic::default().with_name(Some(name(text)));
    MetadataRequest::default()
        .with_topics(names.map(|names| names.iter().map(topic).collect()))
        .with_allow_auto_topic_creation(create)
}

fn names(answer: &MetadataResponse) -> Vec<(String, i16)> {
    let topic =
        |t: &metadata_response::MetadataResponseTopic| (t.name.clone().unwrap().to_string(), t.error_code);
    answer.topics.iter().map(topic).collect()
}

/// C01.
#[tokio::test]
async fn negotiation_works_for_clients_from_the_future() {
    let harness = Harness::start().await;
    let future: ApiVersionsResponse = read(0, harness.raw(18, 99, Bytes::from_static(&[0])).await);
    assert_eq!(future.error_code, ErrorCode::UnsupportedVersion.code());
    assert_eq!(future.api_keys.len(), ADVERTISED.len());
    for version in 0..=4 {
        let mut request = ApiVersionsRequest::default();
        if version >= 3 {
            request.client_software_name = string("test");
            request.client_software_version = string("1");
        }
        let answer = harness.ask(version, &request).await;
        assert_eq!(answer.error_code, 0);
        assert_eq!(answer.api_keys.iter().find(|range| range.api_key == 18).unwrap().max_version, 4);
    }
    let unnamed = harness.ask(3, &ApiVersionsRequest::default()).await;
    assert_eq!(unnamed.error_code, ErrorCode::InvalidRequest.code());
    harness.stop().await;
}

/// C02.
#[tokio::test]
async fn null_empty_and_named_topics_are_three_things() {
    let harness = Harness::start().await;
    for text in ["a", "b"] {
        assert_eq!(harness.create(topic(text, 1)).await, 0);
    }
    let both = vec![("a".to_owned(), 0), ("b".to_owned(), 0)];
    assert_eq!(names(&harness.ask(0, &metadata_of(Some(&[]), true)).await), both);
    for version in 1..=13 {
        assert_eq!(names(&harness.ask(version, &metadata_of(None, true)).await), both, "version {version}");
        let none = harness.ask(version, &metadata_of(Some(&[]), true)).await;
        assert_eq!((none.topics.len(), none.brokers.len(), none.controller_id.0), (0, 1, 1));
        assert_eq!(none.cluster_id.is_some(), version >= 2);
    }
    let some = harness.ask(13, &metadata_of(Some(&["a", "nope"]), false)).await;
    assert_eq!(names(&some), [("a".to_owned(), 0), ("nope".to_owned(), 3)]);
    assert!(harness.ctx.broker.topics.by_name("nope").is_none());
    harness.stop().await;
}

/// Trap 9.
#[tokio::test]
async fn a_topic_is_created_only_if_setting_request_and_name_agree() {
    let harness = Harness::start().await;
    let answer = harness.ask(12, &metadata_of(Some(&["new", "bad name"]), true)).await;
    assert_eq!(names(&answer), [("new".to_owned(), 0), ("bad name".to_owned(), 17)]);
    assert_eq!(answer.topics[0].partitions.len(), 2);
    assert!(answer.topics[0].partitions.iter().all(|p| p.leader_id.0 == 1 && p.error_code == 0));
    assert!(!answer.topics[0].topic_id.is_nil());
    // Before version 4 a request cannot say no.
    assert_eq!(names(&harness.ask(1, &metadata_of(Some(&["old"]), true)).await), [("old".to_owned(), 0)]);
    let internal = harness.ask(12, &metadata_of(Some(&["__transaction_state"]), true)).await;
    assert_eq!(internal.topics[0].error_code, 3);
    harness.stop().await;
}

/// Trap 6.
#[tokio::test]
async fn topics_are_found_and_deleted_by_id_and_a_recreated_one_has_another() {
    let harness = Harness::start().await;
    assert_eq!(harness.create(topic("t", 3)).await, 0);
    let id = harness.ctx.broker.topics.by_name("t").unwrap().id.0;
    let by_id = |id| {
        let topic = MetadataRequestTopic::default().with_topic_id(id).with_name(None);
        MetadataRequest::default().with_topics(Some(vec![topic]))
    };
    assert_eq!(names(&harness.ask(12, &by_id(id)).await), [("t".to_owned(), 0)]);
    let delete = |id| {
        let state = delete_topics_request::DeleteTopicState::default().with_topic_id(id);
        DeleteTopicsRequest::default().with_topics(vec![state])
    };
    let deleted = harness.ask(6, &delete(id)).await;
    assert_eq!(deleted.responses[0].error_code, 0);
    assert_eq!(deleted.responses[0].name, Some(name("t")));
    assert!(harness.ctx.broker.partition("t", 0).is_none());
    assert_eq!(harness.ask(6, &delete(id)).await.responses[0].error_code, ErrorCode::UnknownTopicId.code());
    assert_eq!(harness.ask(12, &by_id(id)).await.topics[0].error_code, ErrorCode::UnknownTopicId.code());
    assert_eq!(harness.create(topic("t", 1)).await, 0);
    assert_ne!(harness.ctx.broker.topics.by_name("t").unwrap().id.0, id);
    for version in 1..=5 {
        let request = DeleteTopicsRequest::default().with_topic_names(vec![name("nope")]);
        assert_eq!(harness.ask(version, &request).await.responses[0].error_code, 3);
    }
    harness.stop().await;
}

#[tokio::test]
async fn topics_are_created_as_asked_in_every_version_and_refused_with_kafkas_codes() {
    let harness = Harness::start().await;
    for version in 2..=7 {
        let text = format!("v{version}");
        let config =
            CreatableTopicConfig::default().with_name(string("retention.ms")).with_value(Some(string("5")));
        let wanted = topic(&text, 3).with_replication_factor(3).with_configs(vec![config]);
        let request = CreateTopicsRequest::default().with_topics(vec![wanted]);
        let answer = harness.ask(version, &request).await;
        assert_eq!(answer.topics[0].error_code, 0);
        if version >= 5 {
            let configs = answer.topics[0].configs.as_ref().unwrap();
            let retention = configs.iter().find(|config| config.name.as_str() == "retention.ms").unwrap();
            assert_eq!((retention.value.as_deref(), retention.config_source), (Some("5"), 1));
            assert_eq!((answer.topics[0].num_partitions, answer.topics[0].replication_factor), (3, 1));
        }
        assert_eq!(harness.ctx.broker.topic_partitions(&text).unwrap().len(), 3);
    }
    let config = |key: &str, value: &str| {
        let config = CreatableTopicConfig::default().with_name(string(key)).with_value(Some(string(value)));
        topic("x", 1).with_configs(vec![config])
    };
    let assigned = |index, broker| {
        let replicas = CreatableReplicaAssignment::default();
        let replicas = replicas.with_partition_index(index).with_broker_ids(vec![BrokerId(broker)]);
        topic("x", -1).with_assignments(vec![replicas])
    };
    for (wanted, code) in [
        (topic("v2", 1), ErrorCode::TopicAlreadyExists),
        (topic("a b", 1), ErrorCode::InvalidTopicException),
        (topic("x", 0), ErrorCode::InvalidPartitions),
        (topic("x", 1).with_replication_factor(0), ErrorCode::InvalidReplicationFactor),
        (config("no.such.key", "1"), ErrorCode::InvalidConfig),
        (config("cleanup.policy", "compact"), ErrorCode::InvalidConfig),
        (assigned(1, 1), ErrorCode::InvalidReplicaAssignment),
        (assigned(0, 9), ErrorCode::InvalidReplicaAssignment),
        (assigned(0, 1).with_num_partitions(1), ErrorCode::InvalidRequest),
    ] {
        assert_eq!(harness.create(wanted.clone()).await, code.code(), "{wanted:?}");
    }
    let twice = CreateTopicsRequest::default().with_topics(vec![topic("y", 1), topic("y", 1)]);
    let twice = harness.ask(7, &twice).await;
    assert_eq!(twice.topics.len(), 1);
    assert_eq!(twice.topics[0].error_code, ErrorCode::InvalidRequest.code());
    let checked = CreateTopicsRequest::default().with_topics(vec![topic("z", 1)]).with_validate_only(true);
    assert_eq!(harness.ask(7, &checked).await.topics[0].error_code, 0);
    assert!(harness.ctx.broker.topics.by_name("z").is_none());
    harness.stop().await;
}

#[tokio::test]
async fn partitions_are_added_never_taken() {
    let harness = Harness::start().await;
    harness.create(topic("t", 2)).await;
    let grow = |count| {
        let topic = create_partitions_request::CreatePartitionsTopic::default()
            .with_name(name("t"))
            .with_count(count);
        CreatePartitionsRequest::default().with_topics(vec![topic.with_assignments(None)])
    };
    for (version, count) in [(0, 3), (1, 4), (2, 5), (3, 6)] {
        assert_eq!(harness.ask(version, &grow(count)).await.results[0].error_code, 0);
        assert_eq!(harness.ctx.broker.topic_partitions("t").unwrap().len(), count as usize);
    }
    for count in [6, 5, 0] {
        let refused = harness.ask(3, &grow(count)).await;
        assert_eq!(refused.results[0].error_code, ErrorCode::InvalidPartitions.code());
    }
    harness.stop().await;
}

fn described(kind: i8, resource: &str, keys: Option<&[&str]>) -> DescribeConfigsRequest {
    let resource = DescribeConfigsResource::default()
        .with_resource_type(kind)
        .with_resource_name(string(resource))
        .with_configuration_keys(keys.map(|keys| keys.iter().map(|key| string(key)).collect()));
    DescribeConfigsRequest::default().with_resources(vec![resource]).with_include_synonyms(true)
}

/// C33, trap 17.
#[tokio::test]
async fn settings_are_described_with_source_and_synonyms() {
    let harness = Harness::start().await;
    let set = CreatableTopicConfig::default().with_name(string("retention.ms"));
    let set = set.with_value(Some(string("604800000")));
    harness.create(topic("t", 1).with_configs(vec![set])).await;
    for version in 1..=4 {
        let answer = harness.ask(version, &described(2, "t", None)).await;
        let configs = &answer.results[0].configs;
        assert!(configs.len() > 30);
        let retention = configs.iter().find(|config| config.name.as_str() == "retention.ms").unwrap();
        assert_eq!((retention.value.as_deref(), retention.config_source), (Some("604800000"), 1));
        assert_eq!(retention.synonyms.len(), 2);
        let other = configs.iter().find(|config| config.name.as_str() == "segment.bytes").unwrap();
        assert_eq!((other.config_source, other.synonyms[0].name.as_str()), (5, "log.segment.bytes"));
        let broker = harness.ask(version, &described(4, "1", None)).await;
        let has = |key: &str| broker.results[0].configs.iter().any(|config| config.name.as_str() == key);
        for key in [
            "num.partitions",
            "default.replication.factor",
            "auto.create.topics.enable",
            "log.retention.ms",
            "log.retention.hours",
            "log.retention.bytes",
            "min.insync.replicas",
            "sealane.control.address",
        ] {
            assert!(has(key), "{key}");
        }
        let secret =
            broker.results[0].configs.iter().find(|c| c.name.as_str() == "ssl.key.password").unwrap();
        assert!(secret.is_sensitive && secret.value.is_none());
    }
    let two = harness.ask(4, &described(2, "t", Some(&["retention.ms", "nope"]))).await;
    assert_eq!(two.results[0].configs.len(), 1);
    assert_eq!(harness.ask(4, &described(2, "nope", None)).await.results[0].error_code, 3);
    assert_eq!(harness.ask(4, &described(4, "9", None)).await.results[0].error_code, 42);
    assert_eq!(harness.ask(4, &described(4, "", None)).await.results[0].configs.len(), 0);
    harness.stop().await;
}

#[tokio::test]
async fn settings_are_altered_and_refusals_name_the_key() {
    let harness = Harness::start().await;
    harness.create(topic("t", 1)).await;
    let alter = |kind, resource: &str, key: &str, operation, value: Option<&str>| {
        let config = AlterableConfig::default()
            .with_name(string(key))
            .with_config_operation(operation)
            .with_value(value.map(string));
        let resource =
            AlterConfigsResource::default().with_resource_type(kind).with_resource_name(string(resource));
        IncrementalAlterConfigsRequest::default().with_resources(vec![resource.with_configs(vec![config])])
    };
    for (version, value) in [(0, "1"), (1, "2")] {
        let answer = harness.ask(version, &alter(2, "t", "retention.bytes", 0, Some(value))).await;
        assert_eq!(answer.responses[0].error_code, 0);
    }
    let partition = harness.ctx.broker.partition("t", 0).unwrap();
    assert_eq!(partition.settings().retention_bytes, Some(2));
    for (request, code, word) in [
        (alter(2, "t", "no.such", 0, Some("1")), 40, "no.such"),
        (alter(2, "t", "cleanup.policy", 0, Some("compact")), 40, "cleanup.policy"),
        (alter(2, "t", "retention.ms", 0, None), 42, "retention.ms"),
        (alter(2, "t", "retention.ms", 2, Some("1")), 40, "retention.ms"),
        (alter(2, "t", "retention.ms", 9, Some("1")), 42, "9"),
        (alter(2, "nope", "retention.ms", 0, Some("1")), 3, ""),
        (alter(4, "1", "num.partitions", 0, Some("1")), 42, "configuration file"),
    ] {
        let answer = &harness.ask(1, &request).await.responses[0];
        assert_eq!(answer.error_code, code, "{request:?}");
        assert!(answer.error_message.as_ref().unwrap().contains(word), "{answer:?}");
    }
    let config = alter_configs_request::AlterableConfig::default().with_name(string("sealane.lanes"));
    let resource = alter_configs_request::AlterConfigsResource::default()
        .with_resource_type(2)
        .with_resource_name(string("t"))
        .with_configs(vec![config.with_value(Some(string("true")))]);
    let replace = AlterConfigsRequest::default().with_resources(vec![resource]);
    for version in 0..=2 {
        assert_eq!(harness.ask(version, &replace).await.responses[0].error_code, 0);
    }
    let settings = partition.settings();
    assert_eq!((settings.retention_bytes, settings.lanes), (None, true));
    for (version, count) in [(0, 0), (1, 2)] {
        let listed = harness.ask(version, &ListConfigResourcesRequest::default()).await;
        assert_eq!(listed.config_resources.len(), count, "version {version}");
    }
    harness.stop().await;
}

fn batch(codec: Codec, timestamps: &[i64]) -> Bytes {
    let base = timestamps[0];
    let mut builder = BatchBuilder::new(Offset(0), TimestampMs(base), codec);
    for (at, timestamp) in timestamps.iter().enumerate() {
        builder.push(at as i32, timestamp - base, None, Some(b"value"), &[]);
    }
    builder.build().bytes
}

/// C06, trap 14.
#[tokio::test]
async fn offsets_are_looked_up_by_time_inside_batches() {
    let harness = Harness::start().await;
    for (text, codec) in [("plain", Codec::None), ("gzip", Codec::Gzip)] {
        harness.create(topic(text, 1)).await;
        assert_eq!(harness.list_offset(1, text, -1).await, (0, 0, -1));
        assert_eq!(harness.list_offset(7, text, -3).await, (0, -1, -1));
        harness.produce(text, 0, batch(codec, &[1000, 3000, 2000])).await;
        for version in 1..=10 {
            for (at, offset, timestamp) in [
                (0, 0, 1000),
                (1500, 1, 3000),
                (2500, 1, 3000),
                (3000, 1, 3000),
                (3001, -1, -1),
                (-1, 3, -1),
                (-2, 0, -1),
            ] {
                assert_eq!(harness.list_offset(version, text, at).await, (0, offset, timestamp), "{at}");
            }
            let max = harness.list_offset(version, text, -3).await;
            assert_eq!(max, if version >= 7 { (0, 1, 3000) } else { (35, -1, -1) });
        }
        let partition = delete_records_request::DeleteRecordsPartition::default().with_offset(1);
        let deleted = delete_records_request::DeleteRecordsTopic::default().with_name(name(text));
        let request =
            DeleteRecordsRequest::default().with_topics(vec![deleted.with_partitions(vec![partition])]);
        for version in 0..=2 {
            let answer = harness.ask(version, &request).await;
            assert_eq!(
                (answer.topics[0].partitions[0].error_code, answer.topics[0].partitions[0].low_watermark),
                (0, 1)
            );
        }
        assert_eq!(harness.list_offset(10, text, 0).await, (0, 1, 3000));
        assert_eq!(harness.list_offset(10, text, -2).await, (0, 1, -1));
    }
    assert_eq!(harness.list_offset(1, "nope", -1).await.0, 3);
    harness.stop().await;
}

/// Trap 7.
#[tokio::test]
async fn epochs_agree_and_older_or_newer_ones_are_refused() {
    let harness = Harness::start().await;
    harness.create(topic("t", 1)).await;
    harness.produce("t", 0, batch(Codec::None, &[5, 6])).await;
    let ask = |current, epoch| {
        let partition = offset_for_leader_epoch_request::OffsetForLeaderPartition::default()
            .with_current_leader_epoch(current)
            .with_leader_epoch(epoch);
        let topic = offset_for_leader_epoch_request::OffsetForLeaderTopic::default().with_topic(name("t"));
        OffsetForLeaderEpochRequest::default().with_topics(vec![topic.with_partitions(vec![partition])])
    };
    let epoch = harness.ctx.broker.partition("t", 0).unwrap().epoch.0;
    for version in 2..=4 {
        for (current, asked, expected) in [
            (-1, epoch, (0, epoch, 2)),
            (epoch, epoch, (0, epoch, 2)),
            (-1, epoch + 1, (0, -1, -1)),
            (epoch + 1, epoch, (ErrorCode::UnknownLeaderEpoch.code(), -1, -1)),
        ] {
            let answer = harness.ask(version, &ask(current, asked)).await;
            let partition = &answer.topics[0].partitions[0];
            assert_eq!((partition.error_code, partition.leader_epoch, partition.end_offset), expected);
        }
    }
    let metadata = harness.ask(13, &metadata_of(Some(&["t"]), false)).await;
    assert_eq!(metadata.topics[0].partitions[0].leader_epoch, epoch);
    harness.stop().await;
}

/// Trap 10.
#[tokio::test]
async fn whoever_asks_is_told_the_address_of_its_listener() {
    let harness = Harness::start().await;
    let port = i32::from(harness.ctx.connection.listener.advertised_port);
    for version in 0..=13 {
        let brokers = harness.ask(version, &metadata_of(Some(&[]), true)).await.brokers;
        assert_eq!((brokers[0].host.as_str(), brokers[0].port), ("127.0.0.1", port));
    }
    for version in 0..=2 {
        let answer = harness.ask(version, &DescribeClusterRequest::default()).await;
        assert_eq!((answer.error_code, answer.brokers[0].port, answer.controller_id.0), (0, port, 1));
    }
    let controllers = DescribeClusterRequest::default().with_endpoint_type(2);
    let refused = harness.ask(1, &controllers).await;
    assert_eq!(refused.error_code, ErrorCode::MismatchedEndpointType.code());
    for version in 0..=6 {
        let mut request = FindCoordinatorRequest::default();
        if version >= 4 {
            request.coordinator_keys = vec![string("g"), string("h")];
        } else {
            request.key = string("g");
        }
        let answer = harness.ask(version, &request).await;
        match version {
            0..=3 => assert_eq!((answer.error_code, answer.port), (0, port)),
            _ => {
                assert!(answer.coordinators.len() == 2 && answer.coordinators.iter().all(|c| c.port == port))
            }
        }
        if version >= 1 {
            let answer = harness.ask(version, &request.with_key_type(1)).await;
            let code = answer.coordinators.first().map_or(answer.error_code, |c| c.error_code);
            assert_eq!(code, ErrorCode::UnsupportedVersion.code());
        }
    }
    harness.stop().await;
}

#[tokio::test]
async fn producer_ids_are_new_each_time_and_transactions_are_refused() {
    let harness = Harness::start().await;
    let mut seen = std::collections::HashSet::new();
    for version in 0..=5 {
        let request = InitProducerIdRequest::default().with_transactional_id(None);
        let answer = harness.ask(version, &request).await;
        assert_eq!((answer.error_code, answer.producer_epoch), (0, 0));
        assert!(seen.insert(answer.producer_id.0));
        let request = request.with_transactional_id(Some(TransactionalId(string("tx"))));
        let refused = harness.ask(version, &request).await;
        assert_eq!((refused.error_code, refused.producer_id.0), (ErrorCode::UnsupportedVersion.code(), -1));
    }
    harness.stop().await;
}

#[tokio::test]
async fn descriptions_of_partitions_come_in_pages() {
    let harness = Harness::start().await;
    for text in ["a", "b", "c"] {
        harness.create(topic(text, 2)).await;
    }
    let mut request = DescribeTopicPartitionsRequest::default().with_response_partition_limit(3);
    let mut seen = Vec::new();
    let mut pages = 0;
    loop {
        let answer = harness.ask(0, &request).await;
        pages += 1;
        for topic in &answer.topics {
            let text = topic.name.clone().unwrap().to_string();
            seen.extend(topic.partitions.iter().map(|p| (text.clone(), p.partition_index)));
        }
        let Some(next) = answer.next_cursor else { break };
        request.cursor = Some(
            describe_topic_partitions_request::Cursor::default()
                .with_topic_name(next.topic_name)
                .with_partition_index(next.partition_index),
        );
        assert!(pages < 10);
    }
    let expected: Vec<_> =
        ["a", "b", "c"].iter().flat_map(|t| [(t.to_string(), 0), (t.to_string(), 1)]).collect();
    assert_eq!((seen, pages), (expected, 2));
    let asked = describe_topic_partitions_request::TopicRequest::default().with_name(name("nope"));
    let named =
        DescribeTopicPartitionsRequest::default().with_topics(vec![asked]).with_response_partition_limit(9);
    assert_eq!(harness.ask(0, &named).await.topics[0].error_code, 3);
    harness.stop().await;
}

#[tokio::test]
async fn log_directories_show_what_partitions_take() {
    let harness = Harness::start().await;
    harness.create(topic("t", 1)).await;
    harness.produce("t", 0, batch(Codec::None, &[5, 6])).await;
    for version in 1..=4 {
        let answer = harness.ask(version, &DescribeLogDirsRequest::default().with_topics(None)).await;
        let topics = &answer.results[0].topics;
        assert_eq!(topics.len(), 1);
        assert!(topics[0].partitions[0].partition_size > 61);
        assert_eq!(topics[0].partitions[0].offset_lag, 0);
    }
    harness.stop().await;
}

#[tokio::test]
async fn a_body_that_cannot_be_read_closes_the_connection_and_says_which() {
    let harness = Harness::start().await;
    for range in ADVERTISED {
        let version = range.max;
        let header =
            RequestHeader { api_key: range.key, api_version: version, correlation_id: 1, client_id: None };
        // Not a body of anything: a compact count far beyond its bytes.
        let body = Bytes::from_static(&[0xff, 0xff, 0xff, 0xff, 0x0f]);
        match start(&harness.ctx, &header, body) {
            Answer::Close(reason) => assert!(reason.contains(range.name), "{reason}"),
            _ => panic!("{} was answered", range.name),
        }
    }
    harness.stop().await;
}
