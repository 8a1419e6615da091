//! The requests of the comparison, in order. `$v` in a text becomes the request's version, `<name>` a value that an
//! earlier answer named, `field@4..` a field of version 4 and up. Each step is asked in every version that both brokers advertise, unless it says less.
//! Leaves comparing to `main.rs`.

use std::ops::RangeInclusive;

use serde_json::{Value, json};

/// One request and what is kept of its answer.
pub struct Step {
    pub name: &'static str,
    pub api: &'static str,
    pub versions: RangeInclusive<i64>,
    /// The member of the request that carries its content: `body`, `raw` or `produce`.
    pub content: (&'static str, Value),
    /// Which connection it goes over.
    pub on: &'static str,
    /// Values of the answer (JSON pointers) that get a name.
    pub names: Vec<(&'static str, &'static str)>,
}

const ANY: RangeInclusive<i64> = 0..=i64::MAX;
const ZERO_ID: &str = "AAAAAAAAAAAAAAAAAAAAAA";
const UNKNOWN_ID: &str = "ASNFZ4mrze8AAAAAAAAABA";

fn step(name: &'static str, api: &'static str, body: Value) -> Step {
    Step { name, api, versions: ANY, content: ("body", body), on: "", names: Vec::new() }
}

impl Step {
    fn versions(mut self, versions: RangeInclusive<i64>) -> Step {
        self.versions = versions;
        self
    }

    fn on(mut self, connection: &'static str) -> Step {
        self.on = connection;
        self
    }

    fn naming(mut self, name: &'static str, pointer: &'static str) -> Step {
        self.names.push((name, pointer));
        self
    }
}

/// Every step, in order.
pub fn all() -> Vec<Step> {
    let parts = [
        versions(),
        topics(),
        bad_topics(),
        metadata(),
        produce(),
        list_offsets(),
        epochs(),
        delete_records(),
        partitions(),
        describe_configs(),
        alter_configs(),
        cluster(),
        producers(),
        offsets(),
        membership(),
        group_ends(),
        deletes(),
    ];
    parts.into_iter().flatten().collect()
}

fn versions() -> Vec<Step> {
    let software = |name: &str| {
        json!({"clientSoftwareName": name, "clientSoftwareVersion": "1",
        "clusterId": null, "nodeId": -1})
    };
    vec![
        step("versions", "API_VERSIONS", software("wire")),
        step("versions of a client without a name", "API_VERSIONS", software("")).versions(3..=4),
        Step {
            content: ("raw", json!("00")),
            ..step("versions in an unknown version", "API_VERSIONS", json!({})).versions(99..=99)
        },
        Step {
            content: ("raw", json!("00")),
            ..step("metadata in an unknown version", "METADATA", json!({})).versions(99..=99).on("closed")
        },
    ]
}

fn new_topic(name: &str, partitions: i32, replicas: i32, configs: &[(&str, &str)]) -> Value {
    let configs: Vec<Value> =
        configs.iter().map(|(name, value)| json!({"name": name, "value": value})).collect();
    json!({"name": name, "numPartitions": partitions, "replicationFactor": replicas, "assignments": [],
        "configs": configs})
}

fn create(topics: Vec<Value>) -> Value {
    json!({"topics": topics, "timeoutMs": 10000, "validateOnly": false})
}

fn topics() -> Vec<Step> {
    let only_checked = json!({"topics": [new_topic("checked", 2, 1, &[("retention.ms", "1000")])],
        "timeoutMs": 10000, "validateOnly": true});
    vec![
        step("create plain", "CREATE_TOPICS", create(vec![new_topic("plain", 1, 1, &[])])).versions(7..=7),
        step(
            "create wide with configs",
            "CREATE_TOPICS",
            create(vec![new_topic(
                "wide",
                3,
                1,
                &[
                    ("retention.ms", "604800000"),
                    ("max.message.bytes", "2000000"),
                    ("cleanup.policy", "delete"),
                ],
            )]),
        )
        .versions(7..=7),
        step("create in each version", "CREATE_TOPICS", create(vec![new_topic("made-$v", 2, 1, &[])])),
        step("create with defaults", "CREATE_TOPICS", create(vec![new_topic("default-$v", -1, -1, &[])]))
            .versions(4..=7),
        step("create, only checked", "CREATE_TOPICS", only_checked),
        step(
            "create with an assignment",
            "CREATE_TOPICS",
            create(vec![json!({"name": "assigned-$v", "numPartitions": -1, "replicationFactor": -1,
                "assignments": [{"partitionIndex": 0, "brokerIds": [1]}, {"partitionIndex": 1, "brokerIds": [1]}],
                "configs": []})]),
        ),
    ]
}

fn bad_topics() -> Vec<Step> {
    let long = "x".repeat(250);
    let assigned = |partitions: i32, index: i32, broker: i32| {
        json!({"name": "badly-assigned", "numPartitions": partitions, "replicationFactor": -1,
            "assignments": [{"partitionIndex": index, "brokerIds": [broker]}], "configs": []})
    };
    let one = |name, topic| step(name, "CREATE_TOPICS", create(vec![topic]));
    vec![
        one("create an existing topic", new_topic("plain", 1, 1, &[])),
        one("create a name with a blank", new_topic("bad name", 1, 1, &[])),
        one("create a name of two dots", new_topic("..", 1, 1, &[])),
        one("create an empty name", new_topic("", 1, 1, &[])),
        one("create a name that is too long", new_topic(&long, 1, 1, &[])),
        one("create without partitions", new_topic("none", 0, 1, &[])),
        one("create with three replicas", new_topic("three", 1, 3, &[])),
        one("create with no replica", new_topic("zero", 1, 0, &[])),
        one("create with an unknown config", new_topic("odd", 1, 1, &[("no.such.config", "1")])),
        one("create with a bad number", new_topic("odd", 1, 1, &[("retention.ms", "long")])),
        one("create with a number out of range", new_topic("odd", 1, 1, &[("max.message.bytes", "-5")])),
        one("create with a bad policy", new_topic("odd", 1, 1, &[("cleanup.policy", "burn")])),
        one("create with an unknown codec", new_topic("odd", 1, 1, &[("compression.type", "rar")])),
        one("create assigned to an unknown broker", assigned(-1, 0, 99)),
        one("create assigned from partition 1", assigned(-1, 1, 1)),
        one("create with count and assignment", assigned(2, 0, 1)),
        step(
            "create one name twice",
            "CREATE_TOPICS",
            create(vec![
                new_topic("twin", 1, 1, &[]),
                new_topic("twin", 2, 1, &[]),
                new_topic("single-$v", 1, 1, &[]),
            ]),
        ),
        step("create a name that collides", "CREATE_TOPICS", create(vec![new_topic("made_1.x", 1, 1, &[])]))
            .versions(7..=7),
        step("create a name that collided", "CREATE_TOPICS", create(vec![new_topic("made.1_x", 1, 1, &[])]))
            .versions(7..=7),
        step("create nothing", "CREATE_TOPICS", create(vec![])),
    ]
}

fn metadata() -> Vec<Step> {
    let ask = |topics: Value, create: bool| {
        json!({"topics": topics, "allowAutoTopicCreation@4..": create, "includeClusterAuthorizedOperations@8..10": false,
            "includeTopicAuthorizedOperations@8..": false})
    };
    let name = |name: &str| json!([{"name": name, "topicId": ZERO_ID}]);
    vec![
        step("metadata of all topics", "METADATA", ask(Value::Null, false)).versions(1..=13),
        step("metadata of no topic", "METADATA", ask(json!([]), false)),
        step("metadata by name", "METADATA", ask(name("wide"), false)),
        step("metadata of an unknown topic", "METADATA", ask(name("nowhere"), false)).versions(4..=13),
        step("metadata of a bad name", "METADATA", ask(name("bad name"), true)),
        step("metadata by id", "METADATA", ask(json!([{"name": null, "topicId": "<id(wide)>"}]), false))
            .versions(12..=13),
        step(
            "metadata of an unknown id",
            "METADATA",
            ask(json!([{"name": null, "topicId": UNKNOWN_ID}]), false),
        )
        .versions(12..=13),
        step(
            "metadata with operations",
            "METADATA",
            json!({"topics": name("plain"), "allowAutoTopicCreation@4..": false,
                "includeClusterAuthorizedOperations@8..10": true, "includeTopicAuthorizedOperations@8..": true}),
        )
        .versions(8..=13),
        step(
            "metadata of one name twice",
            "METADATA",
            ask(
                json!([{"name": "plain", "topicId": ZERO_ID}, {"name": "nowhere", "topicId": ZERO_ID}]),
                false,
            ),
        )
        .versions(4..=13),
    ]
}

fn produce() -> Vec<Step> {
    let send = |name, content| Step { content: ("produce", content), ..step(name, "PRODUCE", json!({})) };
    vec![
        send("produce ten", json!({"topic": "plain", "count": 10})).versions(12..=12),
        send("produce to the second partition", json!({"topic": "wide", "partition": 1, "count": 5}))
            .versions(12..=12),
        send(
            "produce later ones",
            json!({"topic": "plain", "count": 10, "timestamp": 1_700_000_100_000_i64}),
        )
        .versions(12..=12),
        send("produce in each version", json!({"topic": "made-7", "count": 2})).versions(3..=12),
        send("produce lz4", json!({"topic": "made-7", "count": 2, "codec": "lz4"})).versions(3..=12),
        send("produce zstd", json!({"topic": "made-7", "count": 2, "codec": "zstd"})).versions(7..=12),
        send("produce zstd too early", json!({"topic": "made-7", "count": 2, "codec": "zstd"}))
            .versions(3..=6),
        send("produce with acks 1", json!({"topic": "made-7", "count": 2, "acks": 1})).versions(9..=12),
        send("produce with acks 2", json!({"topic": "made-7", "count": 2, "acks": 2})).versions(9..=12),
        send("produce to an unknown topic", json!({"topic": "nowhere"})).versions(3..=12),
        send("produce to an unknown partition", json!({"topic": "plain", "partition": 7})).versions(3..=12),
        send("produce a bad crc", json!({"topic": "plain", "flip": 70})).versions(3..=12),
        send("produce magic 3", json!({"topic": "plain", "flip": 16})).versions(9..=12),
        send("produce too much", json!({"topic": "plain", "bytes": 1_100_000})).versions(9..=12),
        send("produce no record", json!({"topic": "plain", "count": 0})).versions(9..=12),
    ]
}

fn list_offsets() -> Vec<Step> {
    let ask = |name, topic: &str, partition: i32, epoch: i32, when: i64| {
        let partition = json!({"partitionIndex": partition, "currentLeaderEpoch": epoch, "timestamp": when});
        let body = json!({"replicaId": -1, "isolationLevel": 0, "timeoutMs": 1000,
            "topics": [{"name": topic, "partitions": [partition]}]});
        step(name, "LIST_OFFSETS", body)
    };
    vec![
        ask("list latest", "plain", 0, -1, -1),
        ask("list earliest", "plain", 0, -1, -2),
        ask("list the largest timestamp", "plain", 0, -1, -3).versions(7..=11),
        ask("list the largest timestamp, early", "plain", 0, -1, -3).versions(1..=6),
        ask("list earliest local", "plain", 0, -1, -4).versions(8..=11),
        ask("list latest tiered", "plain", 0, -1, -5).versions(9..=11),
        ask("list an unknown kind of offset", "plain", 0, -1, -9),
        ask("list before all", "plain", 0, -1, 1),
        ask("list in the middle", "plain", 0, -1, 1_700_000_003_500),
        ask("list between batches", "plain", 0, -1, 1_700_000_050_000),
        ask("list behind all", "plain", 0, -1, 1_800_000_000_000),
        ask("list an empty partition", "wide", 0, -1, 1_700_000_003_500),
        ask("list latest of an empty partition", "wide", 0, -1, -1),
        ask("list an unknown partition", "plain", 9, -1, -1),
        ask("list an unknown topic", "nowhere", 0, -1, -1),
        ask("list under a future epoch", "plain", 0, 999, -1).versions(4..=11),
        step(
            "list latest committed",
            "LIST_OFFSETS",
            json!({"replicaId": -1, "isolationLevel": 1, "timeoutMs": 1000, "topics": [{"name": "plain",
                "partitions": [{"partitionIndex": 0, "currentLeaderEpoch": -1, "timestamp": -1}]}]}),
        )
        .versions(2..=11),
    ]
}

fn epochs() -> Vec<Step> {
    let ask = |name, topic: &str, partition: i32, current: i32, epoch: i32| {
        let partition = json!({"partition": partition, "currentLeaderEpoch": current, "leaderEpoch": epoch});
        let body = json!({"replicaId": -2, "topics": [{"topic": topic, "partitions": [partition]}]});
        step(name, "OFFSET_FOR_LEADER_EPOCH", body)
    };
    vec![
        ask("end of epoch 0", "plain", 0, -1, 0),
        ask("end of a future epoch", "plain", 0, -1, 999),
        ask("end of no epoch", "plain", 0, -1, -1),
        ask("end of an epoch under a future one", "plain", 0, 999, 0),
        ask("end of an epoch of an unknown partition", "plain", 9, -1, 0),
        ask("end of an epoch of an unknown topic", "nowhere", 0, -1, 0),
    ]
}

fn delete_records() -> Vec<Step> {
    let ask = |name, topic: &str, partition: i32, offset: i64| {
        let body = json!({"timeoutMs": 5000, "topics": [{"name": topic,
            "partitions": [{"partitionIndex": partition, "offset": offset}]}]});
        step(name, "DELETE_RECORDS", body)
    };
    vec![
        ask("delete records below 5", "plain", 0, 5),
        ask("delete records below 3", "plain", 0, 3),
        ask("delete records behind the end", "plain", 0, 1000),
        ask("delete records below -5", "plain", 0, -5),
        ask("delete records of an unknown partition", "plain", 9, 5),
        ask("delete records of an unknown topic", "nowhere", 0, 5),
        ask("delete all records", "wide", 1, -1),
        step(
            "list earliest after deleting",
            "LIST_OFFSETS",
            json!({"replicaId": -1, "isolationLevel": 0, "timeoutMs": 1000, "topics": [{"name": "plain", "partitions":
                [{"partitionIndex": 0, "currentLeaderEpoch": -1, "timestamp": -2}]}]}),
        )
        .versions(7..=7),
    ]
}

fn partitions() -> Vec<Step> {
    let ask = |name, topic: &str, count: i32, assignments: Value, check: bool| {
        let topics = json!([{"name": topic, "count": count, "assignments": assignments}]);
        let body = json!({"topics": topics, "timeoutMs": 5000, "validateOnly": check});
        step(name, "CREATE_PARTITIONS", body)
    };
    vec![
        ask("grow", "made-4", 4, Value::Null, false).versions(0..=0),
        ask("grow to the same count", "made-4", 4, Value::Null, false),
        ask("grow to less", "made-4", 1, Value::Null, false),
        ask("grow to none", "made-4", 0, Value::Null, false),
        ask("grow an unknown topic", "nowhere", 4, Value::Null, false),
        ask("grow, only checked", "made-4", 9, Value::Null, true),
        ask("grow with an assignment", "made-5", 3, json!([{"brokerIds": [1]}]), false).versions(0..=0),
        ask("grow assigned to an unknown broker", "made-5", 4, json!([{"brokerIds": [99]}]), false),
        ask(
            "grow with too many assignments",
            "made-5",
            4,
            json!([{"brokerIds": [1]}, {"brokerIds": [1]}]),
            false,
        ),
        step(
            "grow one topic twice",
            "CREATE_PARTITIONS",
            json!({"topics": [{"name": "made-4", "count": 5, "assignments": null},
                {"name": "made-4", "count": 6, "assignments": null}], "timeoutMs": 5000, "validateOnly": false}),
        ),
        step(
            "metadata after growing",
            "METADATA",
            json!({"topics": [{"name": "made-4", "topicId": ZERO_ID}, {"name": "made-5", "topicId": ZERO_ID}],
                "allowAutoTopicCreation@4..": false, "includeClusterAuthorizedOperations@8..10": false,
                "includeTopicAuthorizedOperations@8..": false}),
        )
        .versions(12..=12),
    ]
}

fn described(kind: i32, name: &str, keys: Value, all: bool) -> Value {
    json!({"resources": [{"resourceType": kind, "resourceName": name, "configurationKeys": keys}],
        "includeSynonyms": all, "includeDocumentation": false})
}

fn describe_configs() -> Vec<Step> {
    let ask = |name, body| step(name, "DESCRIBE_CONFIGS", body);
    vec![
        ask("describe a topic", described(2, "plain", Value::Null, false)),
        ask("describe a topic with synonyms", described(2, "wide", Value::Null, true)),
        ask("describe two keys", described(2, "wide", json!(["retention.ms", "no.such.key"]), true)),
        ask("describe no keys", described(2, "wide", json!([]), false)),
        ask("describe an unknown topic", described(2, "nowhere", Value::Null, false)),
        ask("describe a topic of a bad name", described(2, "bad name", Value::Null, false)),
        ask("describe the broker", described(4, "1", Value::Null, false)),
        ask(
            "describe keys of the broker",
            described(
                4,
                "1",
                json!(["num.partitions", "auto.create.topics.enable", "log.retention.hours"]),
                true,
            ),
        ),
        ask("describe all brokers", described(4, "", Value::Null, false)),
        ask("describe an unknown broker", described(4, "99", Value::Null, false)),
        ask("describe a broker that is no number", described(4, "one", Value::Null, false)),
        ask("describe an unknown kind", described(77, "x", Value::Null, false)),
    ]
}

fn alter_configs() -> Vec<Step> {
    let changes = |kind: i32, name: &str, changes: Value| {
        json!({"resources": [{"resourceType": kind, "resourceName": name, "configs": changes}],
            "validateOnly": false})
    };
    let one = |name, topic: &str, key: &str, operation: i32, value: Value| {
        let change = json!([{"name": key, "configOperation": operation, "value": value}]);
        step(name, "INCREMENTAL_ALTER_CONFIGS", changes(2, topic, change))
    };
    let whole = |name, topic: &str, configs: Value| step(name, "ALTER_CONFIGS", changes(2, topic, configs));
    let look = |name| {
        step(
            name,
            "DESCRIBE_CONFIGS",
            described(2, "made-6", json!(["retention.ms", "cleanup.policy"]), true),
        )
        .versions(4..=4)
    };
    vec![
        one("set a config", "made-6", "retention.ms", 0, json!("3600000")),
        look("describe after setting"),
        one("set an unknown config", "made-6", "no.such.key", 0, json!("1")),
        one("set a bad value", "made-6", "retention.ms", 0, json!("long")),
        one("set null", "made-6", "retention.ms", 0, Value::Null),
        one("append to what is no list", "made-6", "retention.ms", 2, json!("1")),
        one("append what is there", "made-6", "cleanup.policy", 2, json!("delete")),
        one("subtract what is not there", "made-6", "cleanup.policy", 3, json!("compact")),
        one("an unknown operation", "made-6", "retention.ms", 9, json!("1")),
        one("set a config of an unknown topic", "nowhere", "retention.ms", 0, json!("1")),
        one("set a config of a bad name", "bad name", "retention.ms", 0, json!("1")),
        one("unset a config", "made-6", "retention.ms", 1, Value::Null),
        look("describe after unsetting"),
        step(
            "change one key twice",
            "INCREMENTAL_ALTER_CONFIGS",
            changes(
                2,
                "made-6",
                json!([{"name": "retention.ms", "configOperation": 0, "value": "1"},
                    {"name": "retention.ms", "configOperation": 0, "value": "2"}]),
            ),
        ),
        step(
            "change an unknown kind",
            "INCREMENTAL_ALTER_CONFIGS",
            changes(77, "x", json!([{"name": "a", "configOperation": 0, "value": "1"}])),
        ),
        step(
            "change an unknown broker",
            "INCREMENTAL_ALTER_CONFIGS",
            changes(4, "99", json!([{"name": "a", "configOperation": 0, "value": "1"}])),
        ),
        whole("replace configs", "made-6", json!([{"name": "retention.ms", "value": "7200000"}])),
        look("describe after replacing"),
        whole("replace with an unknown config", "made-6", json!([{"name": "no.such.key", "value": "1"}])),
        whole(
            "replace configs of an unknown topic",
            "nowhere",
            json!([{"name": "retention.ms", "value": "1"}]),
        ),
        whole("replace with nothing", "made-6", json!([])),
        look("describe after replacing with nothing"),
    ]
}

fn cluster() -> Vec<Step> {
    let ask = |name, kind: i32, operations: bool| {
        let body = json!({"includeClusterAuthorizedOperations": operations, "endpointType": kind,
            "includeFencedBrokers": false});
        step(name, "DESCRIBE_CLUSTER", body)
    };
    let dirs = |name, topics: Value| step(name, "DESCRIBE_LOG_DIRS", json!({"topics": topics}));
    let partitions = |name, topics: Value, limit: i32, cursor: Value| {
        let body = json!({"topics": topics, "responsePartitionLimit": limit, "cursor": cursor});
        step(name, "DESCRIBE_TOPIC_PARTITIONS", body)
    };
    let resources = |name, kinds: Value| {
        step(name, "LIST_CONFIG_RESOURCES", json!({"resourceTypes@1..": kinds})).versions(1..=1)
    };
    vec![
        ask("cluster", 1, false),
        ask("cluster with operations", 1, true),
        ask("cluster of controllers", 2, false).versions(1..=2),
        ask("cluster of an unknown kind", 9, false).versions(1..=2),
        dirs("directories of a topic", json!([{"topic": "wide", "partitions": [0, 1, 2]}])),
        dirs("directories of an unknown topic", json!([{"topic": "nowhere", "partitions": [0]}])),
        dirs("directories of no topic", json!([])),
        partitions("partitions of topics", json!([{"name": "nowhere"}, {"name": "wide"}]), 100, Value::Null),
        partitions("partitions, two at a time", json!([{"name": "plain"}, {"name": "wide"}]), 2, Value::Null),
        partitions(
            "partitions from a cursor on",
            json!([{"name": "plain"}, {"name": "wide"}]),
            100,
            json!({"topicName": "wide", "partitionIndex": 1}),
        ),
        resources("resources with configs", json!([])),
        resources("topics with configs", json!([2])),
        resources("brokers with configs", json!([4])),
        resources("resources of an unknown kind", json!([77])),
    ]
}

fn producers() -> Vec<Step> {
    let ask = |name, id: Value| {
        let body = json!({"transactionalId": id, "transactionTimeoutMs": 60000, "producerId": -1,
            "producerEpoch": -1, "enable2Pc": false, "keepPreparedTxn": false});
        step(name, "INIT_PRODUCER_ID", body)
    };
    let send = |name, sequence: i32, epoch: i32| Step {
        content: (
            "produce",
            json!({"topic": "default-7", "count": 2, "producerId": 77, "epoch": epoch, "sequence": sequence}),
        ),
        ..step(name, "PRODUCE", json!({})).versions(9..=9)
    };
    vec![
        ask("a producer id", Value::Null),
        ask("a producer id for an empty transactional id", json!("")),
        send("the first batch of a producer", 0, 0),
        send("its second batch", 2, 0),
        send("its first batch again", 0, 0),
        send("its second batch again", 2, 0),
        send("a batch behind a gap", 9, 0),
        send("a batch of a newer epoch", 0, 1),
        send("a newer epoch that does not begin at 0", 5, 2),
        send("a batch of the older epoch", 4, 0),
    ]
}

fn committed(group: &str, generation: i32, member: &str, topic: &str, offset: i64) -> Value {
    json!({"groupId": group, "generationIdOrMemberEpoch": generation, "memberId": member, "groupInstanceId": null,
        "retentionTimeMs": -1, "topics": [{"name@..9": topic, "topicId@10..": id(topic), "partitions":
            [{"partitionIndex": 0, "committedOffset": offset, "committedLeaderEpoch": -1,
                "committedMetadata": "note $v"}]}]})
}

fn fetched(group: &str, topic: Option<&str>) -> Value {
    let topics =
        topic.map(|topic| json!([{"name@..9": topic, "topicId@10..": id(topic), "partitionIndexes": [0]}]));
    json!({"groupId@..7": group, "topics@..7": topics, "requireStable": false,
        "groups@8..": [{"groupId": group, "memberId": null, "memberEpoch": -1, "topics": topics}]})
}

fn id(topic: &str) -> String {
    if topic == "nowhere" { UNKNOWN_ID.to_owned() } else { format!("<id({topic})>") }
}

fn offsets() -> Vec<Step> {
    let coordinator = |name, kind: i32, key: &str| {
        step(name, "FIND_COORDINATOR", json!({"key@..3": key, "keyType": kind, "coordinatorKeys@4..": [key]}))
    };
    vec![
        coordinator("find a group's coordinator", 0, "simple").versions(6..=6),
        // The first question makes the offsets topic: the real one says that it is not there yet.
        coordinator("find a coordinator", 0, "simple"),
        coordinator("find a coordinator of an unknown kind", 9, "simple").versions(1..=6),
        coordinator("find the coordinator of an empty name", 0, ""),
        step("commit without members", "OFFSET_COMMIT", committed("simple", -1, "", "plain", 7)),
        step("commit for an unknown topic", "OFFSET_COMMIT", committed("simple", -1, "", "nowhere", 7)),
        step("commit for an empty group", "OFFSET_COMMIT", committed("", -1, "", "plain", 7)),
        step("commit as an unknown member", "OFFSET_COMMIT", committed("simple", 5, "x", "plain", 7)),
        step("commit a negative offset", "OFFSET_COMMIT", committed("simple", -1, "", "plain", -7)),
        step("fetch a committed offset", "OFFSET_FETCH", fetched("simple", Some("plain"))),
        step("fetch all committed offsets", "OFFSET_FETCH", fetched("simple", None)).versions(2..=10),
        step("fetch offsets of an unknown group", "OFFSET_FETCH", fetched("nobody", Some("plain"))),
        step("fetch offsets of an empty group name", "OFFSET_FETCH", fetched("", Some("plain"))),
        step("fetch offsets of an unknown topic", "OFFSET_FETCH", fetched("simple", Some("nowhere"))),
        step("describe a group without members", "DESCRIBE_GROUPS", group_list("simple")),
        step("describe an unknown group", "DESCRIBE_GROUPS", group_list("nobody")),
        step("list groups", "LIST_GROUPS", json!({"statesFilter": [], "typesFilter": []})),
    ]
}

fn group_list(group: &str) -> Value {
    json!({"groups": [group], "includeAuthorizedOperations@3..": true})
}

fn joining(group: &str, member: &str, protocol: &str, timeout: i32) -> Value {
    json!({"groupId": group, "sessionTimeoutMs": timeout, "rebalanceTimeoutMs": 10000, "memberId": member,
        "groupInstanceId": null, "protocolType": protocol, "reason": "",
        "protocols": [{"name": "range", "metadata": "AAEAAAABAAVwbGFpbgAAAAA="}]})
}

fn membership() -> Vec<Step> {
    let beat = |name, generation: i32, member: &str| {
        let body = json!({"groupId": "team", "generationId": generation, "memberId": member, "groupInstanceId": null});
        step(name, "HEARTBEAT", body)
    };
    let sync = |name, generation: i32, member: &str| {
        let body = json!({"groupId": "team", "generationId": generation, "memberId": member, "groupInstanceId": null,
            "protocolType": "consumer", "protocolName": "range",
            "assignments": [{"memberId": member, "assignment": "AAEAAAABAAVwbGFpbgAAAAEAAAAAAAAAAA=="}]});
        step(name, "SYNC_GROUP", body)
    };
    let join = |name, body| step(name, "JOIN_GROUP", body);
    vec![
        join("join with an unknown member id", joining("team", "nobody", "consumer", 10000)),
        join("join an empty group name", joining("", "", "consumer", 10000)),
        join("join with a short session", joining("team", "", "consumer", 1)),
        join("join with a long session", joining("team", "", "consumer", 100_000_000)),
        join("join without an id", joining("team", "", "consumer", 10000))
            .versions(9..=9)
            .naming("me", "/ok/memberId"),
        join("join", joining("team", "<me>", "consumer", 10000)).versions(9..=9),
        join("join with another type", joining("team", "", "connect", 10000)).versions(3..=3),
        beat("heartbeat before sync", 1, "<me>").versions(4..=4),
        sync("sync with a wrong generation", 7, "<me>"),
        sync("sync as an unknown member", 1, "nobody"),
        sync("sync", 1, "<me>"),
        beat("heartbeat", 1, "<me>"),
        beat("heartbeat in a wrong generation", 9, "<me>"),
        beat("heartbeat as an unknown member", 1, "nobody"),
        step("commit as a member", "OFFSET_COMMIT", committed("team", 1, "<me>", "plain", 12)),
        step("commit in a wrong generation", "OFFSET_COMMIT", committed("team", 9, "<me>", "plain", 13)),
        step(
            "commit as no member of a group with members",
            "OFFSET_COMMIT",
            committed("team", -1, "", "plain", 14),
        ),
        step("describe a group", "DESCRIBE_GROUPS", group_list("team")),
        step("list stable groups", "LIST_GROUPS", json!({"statesFilter": ["Stable"], "typesFilter": []}))
            .versions(4..=5),
        step(
            "list groups of an unknown state",
            "LIST_GROUPS",
            json!({"statesFilter": ["Odd"], "typesFilter": []}),
        )
        .versions(4..=5),
        step("list classic groups", "LIST_GROUPS", json!({"statesFilter": [], "typesFilter": ["classic"]}))
            .versions(5..=5),
        step(
            "list groups of an unknown type",
            "LIST_GROUPS",
            json!({"statesFilter": [], "typesFilter": ["odd"]}),
        )
        .versions(5..=5),
    ]
}

fn group_ends() -> Vec<Step> {
    let delete = |name, group: &str| step(name, "DELETE_GROUPS", json!({"groupsNames": [group]}));
    let leave = |name, member: &str| {
        let body = json!({"groupId": "team", "memberId@..2": member,
            "members@3..": [{"memberId": member, "groupInstanceId": null, "reason": "done"}]});
        step(name, "LEAVE_GROUP", body)
    };
    let forget = |name, group: &str, topic: &str| {
        let topics = json!([{"name": topic, "partitions": [{"partitionIndex": 0}]}]);
        step(name, "OFFSET_DELETE", json!({"groupId": group, "topics": topics}))
    };
    vec![
        delete("delete a group with members", "team"),
        forget("forget an offset in use", "team", "plain"),
        leave("leave as an unknown member", "nobody"),
        leave("leave", "<me>").versions(5..=5),
        step("describe a group that was left", "DESCRIBE_GROUPS", group_list("team")),
        forget("forget an offset", "team", "plain"),
        forget("forget an offset of an unknown topic", "team", "nowhere"),
        forget("forget an offset of an unknown group", "nobody", "plain"),
        delete("delete a group", "simple").versions(2..=2),
        delete("delete an unknown group", "nobody"),
        delete("delete an empty group name", ""),
        step("fetch an offset of a deleted group", "OFFSET_FETCH", fetched("simple", Some("plain"))),
    ]
}

fn deletes() -> Vec<Step> {
    let by_name = |name, topic: &str| {
        let body = json!({"topics@6..": [{"name": topic, "topicId": ZERO_ID}], "topicNames@..5": [topic], "timeoutMs": 5000});
        step(name, "DELETE_TOPICS", body)
    };
    let by_id = |name, id: &str| {
        let body = json!({"topics": [{"name": null, "topicId": id}], "topicNames": [], "timeoutMs": 5000});
        step(name, "DELETE_TOPICS", body).versions(6..=6)
    };
    vec![
        by_name("delete a topic", "single-$v"),
        by_name("delete an unknown topic", "nowhere"),
        by_name("delete a bad name", "bad name"),
        by_id("delete by id", "<id(made-6)>"),
        by_id("delete an unknown id", UNKNOWN_ID),
        step(
            "delete by name and id",
            "DELETE_TOPICS",
            json!({"topics": [{"name": "plain", "topicId": "<id(plain)>"}], "topicNames": [], "timeoutMs": 5000}),
        )
        .versions(6..=6),
        step(
            "metadata of a deleted topic",
            "METADATA",
            json!({"topics": [{"name": "made-6", "topicId": ZERO_ID}], "allowAutoTopicCreation@4..": false,
                "includeClusterAuthorizedOperations@8..10": false, "includeTopicAuthorizedOperations@8..": false}),
        )
        .versions(12..=12),
    ]
}
