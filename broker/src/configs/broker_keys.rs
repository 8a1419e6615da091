//! The broker's settings under Kafka's names, for tools that look them up. All of them are read-only
//! here: they come from the broker's configuration file.

use super::{Kind, Source, TOPIC_KEYS, TopicDefaults};

/// One setting of the broker as DescribeConfigs shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BrokerKey {
    pub name: String,
    /// `None` for a secret, or where nothing is set.
    pub value: Option<String>,
    pub kind: Kind,
    pub source: Source,
    pub sensitive: bool,
    pub doc: &'static str,
}

/// What the running broker knows about itself.
#[derive(Clone, Debug, Default)]
pub struct BrokerValues {
    pub broker_id: i32,
    pub listeners: String,
    pub advertised_listeners: String,
    pub data_dir: String,
    pub num_partitions: i32,
    pub auto_create_topics: bool,
    pub request_bytes_max: usize,
    pub connections_max: usize,
    pub connections_idle_ms: i64,
    pub offsets_retention_minutes: i64,
    pub offsets_partitions: i32,
    pub group_session_timeout_min_ms: i32,
    pub group_session_timeout_max_ms: i32,
    pub group_initial_rebalance_delay_ms: i32,
    /// Where the control service of this region listens, if there is one.
    pub control_address: Option<String>,
    /// The region's name.
    pub region: String,
    pub durability: &'static str,
}

/// All settings of the broker, by name.
pub fn broker_keys(values: &BrokerValues, defaults: &TopicDefaults) -> Vec<BrokerKey> {
    let mut keys = own(values);
    keys.extend(of_groups(values));
    keys.extend(fixed());
    keys.extend(topic_defaults(defaults));
    keys.sort_by(|a, b| a.name.cmp(&b.name));
    keys.dedup_by(|later, first| later.name == first.name);
    keys
}

fn set(name: &str, kind: Kind, value: impl ToString, doc: &'static str) -> BrokerKey {
    let (name, value) = (name.to_owned(), Some(value.to_string()));
    BrokerKey { name, value, kind, source: Source::StaticBroker, sensitive: false, doc }
}

fn own(values: &BrokerValues) -> Vec<BrokerKey> {
    let mut keys = vec![
        set("node.id", Kind::Int, values.broker_id, "Number of this broker."),
        set("broker.id", Kind::Int, values.broker_id, "Number of this broker."),
        set("listeners", Kind::List, &values.listeners, "Addresses this broker listens on."),
        set("advertised.listeners", Kind::List, &values.advertised_listeners, "Addresses clients are told."),
        set("log.dirs", Kind::List, &values.data_dir, "Directory of the segment store."),
        set(
            "num.partitions",
            Kind::Int,
            values.num_partitions,
            "Partitions of a topic that names no number.",
        ),
        set(
            "auto.create.topics.enable",
            Kind::Boolean,
            values.auto_create_topics,
            "Whether a client's metadata request may create a topic.",
        ),
        set("socket.request.max.bytes", Kind::Int, values.request_bytes_max, "Largest request accepted."),
        set("max.connections", Kind::Int, values.connections_max, "Most connections at one time."),
        set(
            "connections.max.idle.ms",
            Kind::Long,
            values.connections_idle_ms,
            "Idle connections are closed after this time.",
        ),
        set("sealane.region", Kind::String, &values.region, "Name of this region."),
        set(
            "sealane.durability",
            Kind::String,
            values.durability,
            "When a record counts as durable: sync or os.",
        ),
    ];
    if let Some(address) = &values.control_address {
        keys.push(set(
            CONTROL_ADDRESS,
            Kind::String,
            address,
            "Where the control service of this region listens.",
        ));
    }
    keys
}

fn of_groups(values: &BrokerValues) -> Vec<BrokerKey> {
    vec![
        set(
            "offsets.retention.minutes",
            Kind::Int,
            values.offsets_retention_minutes,
            "Offsets of a group without members are kept so long.",
        ),
        set(
            "offsets.topic.num.partitions",
            Kind::Int,
            values.offsets_partitions,
            "Partitions of the topic that holds committed offsets.",
        ),
        set(
            "group.min.session.timeout.ms",
            Kind::Int,
            values.group_session_timeout_min_ms,
            "Shortest session timeout a consumer may ask for.",
        ),
        set(
            "group.max.session.timeout.ms",
            Kind::Int,
            values.group_session_timeout_max_ms,
            "Longest session timeout a consumer may ask for.",
        ),
        set(
            "group.initial.rebalance.delay.ms",
            Kind::Int,
            values.group_initial_rebalance_delay_ms,
            "How long a new group waits for more members.",
        ),
    ]
}

/// Settings that are what they are.
fn fixed() -> Vec<BrokerKey> {
    const FIXED: &[(&str, Kind, Option<&str>, &str)] = &[
        ("default.replication.factor", Kind::Int, Some("1"), "Copies are the segment store's business."),
        ("process.roles", Kind::List, Some("broker,controller"), "Roles of this process."),
        ("delete.topic.enable", Kind::Boolean, Some("true"), "Topics can be deleted."),
        ("auto.leader.rebalance.enable", Kind::Boolean, Some("false"), "There are no leaders to balance."),
        (
            "offsets.topic.replication.factor",
            Kind::Short,
            Some("1"),
            "Copies are the segment store's business.",
        ),
        (
            "transaction.state.log.replication.factor",
            Kind::Short,
            Some("1"),
            "Copies are the store's business.",
        ),
        ("transaction.state.log.min.isr", Kind::Int, Some("1"), "Copies are the segment store's business."),
        ("log.cleaner.enable", Kind::Boolean, Some("true"), "The offsets topic is compacted."),
        ("log.retention.check.interval.ms", Kind::Long, Some("300000"), "How often retention is applied."),
        ("ssl.key.password", Kind::Password, None, "Password of the private key."),
        ("ssl.keystore.password", Kind::Password, None, "Password of the key store."),
        ("ssl.truststore.password", Kind::Password, None, "Password of the trust store."),
    ];
    let key = |(name, kind, value, doc): &(&str, Kind, Option<&str>, &'static str)| BrokerKey {
        name: (*name).to_owned(),
        value: value.map(str::to_owned),
        kind: *kind,
        source: Source::Default,
        sensitive: *kind == Kind::Password,
        doc,
    };
    FIXED.iter().map(key).collect()
}

/// The broker-wide names of topic settings.
fn topic_defaults(defaults: &TopicDefaults) -> Vec<BrokerKey> {
    let mut keys = Vec::new();
    for key in TOPIC_KEYS {
        let (value, source) = defaults.broker_value(key);
        for (at, (name, default)) in key.synonyms.iter().enumerate() {
            let holds = at == 0 && source == Source::StaticBroker;
            keys.push(BrokerKey {
                name: (*name).to_owned(),
                value: if holds { Some(value.to_owned()) } else { default.map(str::to_owned) },
                // Kafka keeps the coarse units as int32.
                kind: if name.ends_with("hours") || name.ends_with("minutes") { Kind::Int } else { key.kind },
                source: if holds { source } else { Source::Default },
                sensitive: false,
                doc: key.doc,
            });
        }
    }
    keys
}

/// How the command line finds the control service through a Kafka address.
pub const CONTROL_ADDRESS: &str = "sealane.control.address";
