//! Which APIs and versions the broker answers, and which header each has.
//!
//! Only what works is listed. The one exception is Produce 0 to 2: advertised, as Kafka itself does,
//! because older librdkafka compresses only then, and answered UNSUPPORTED_VERSION.

use kafka_protocol::messages::ApiKey;

/// One API and its versions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ApiRange {
    pub key: i16,
    pub name: &'static str,
    pub min: i16,
    pub max: i16,
}

/// First of the private keys (mirror), which only the internal listener takes.
pub const PRIVATE_KEY_MIN: i16 = 10_000;

pub const PRODUCE: i16 = 0;
pub const FETCH: i16 = 1;
pub const API_VERSIONS: i16 = 18;

const fn range(key: i16, name: &'static str, min: i16, max: i16) -> ApiRange {
    ApiRange { key, name, min, max }
}

/// What ApiVersions tells every client, by ascending key.
pub const ADVERTISED: &[ApiRange] = &[
    range(PRODUCE, "Produce", 0, 12),
    range(FETCH, "Fetch", 4, 12),
    // 11 has the layout of 10 and one more kind of offset, of tiered storage; the message crate stops at 10.
    range(2, "ListOffsets", 1, 10),
    range(3, "Metadata", 0, 13),
    range(8, "OffsetCommit", 2, 9),
    range(9, "OffsetFetch", 1, 9),
    range(10, "FindCoordinator", 0, 6),
    range(11, "JoinGroup", 0, 9),
    range(12, "Heartbeat", 0, 4),
    range(13, "LeaveGroup", 0, 5),
    range(14, "SyncGroup", 0, 5),
    range(15, "DescribeGroups", 0, 6),
    range(16, "ListGroups", 0, 5),
    range(API_VERSIONS, "ApiVersions", 0, 4),
    range(19, "CreateTopics", 2, 7),
    range(20, "DeleteTopics", 1, 6),
    range(21, "DeleteRecords", 0, 2),
    range(22, "InitProducerId", 0, 5),
    range(23, "OffsetForLeaderEpoch", 2, 4),
    range(32, "DescribeConfigs", 1, 4),
    range(33, "AlterConfigs", 0, 2),
    range(35, "DescribeLogDirs", 1, 4),
    range(37, "CreatePartitions", 0, 3),
    range(42, "DeleteGroups", 0, 2),
    range(44, "IncrementalAlterConfigs", 0, 1),
    range(47, "OffsetDelete", 0, 0),
    range(60, "DescribeCluster", 0, 2),
    range(74, "ListConfigResources", 0, 1),
    range(75, "DescribeTopicPartitions", 0, 0),
];

/// The advertised range of a key.
pub fn advertised(key: i16) -> Option<&'static ApiRange> {
    ADVERTISED.binary_search_by_key(&key, |range| range.key).ok().map(|at| &ADVERTISED[at])
}

pub fn is_supported(key: i16, version: i16) -> bool {
    advertised(key).is_some_and(|range| (range.min..=range.max).contains(&version))
}

/// 1 or 2. Unknown and private keys have header v1.
pub fn request_header_version(key: i16, version: i16) -> i16 {
    ApiKey::try_from(key).map_or(1, |api| api.request_header_version(version).max(1))
}

/// 0 or 1. ApiVersions always has 0: a client reads that answer before it knows anything.
pub fn response_header_version(key: i16, version: i16) -> i16 {
    ApiKey::try_from(key).map_or(0, |api| api.response_header_version(version))
}

/// Whether this version uses compact lengths and tagged fields (KIP-482).
pub fn is_flexible(key: i16, version: i16) -> bool {
    request_header_version(key, version) >= 2
}

/// Name for logs and metrics.
pub fn name(key: i16) -> &'static str {
    match key {
        10_000 => "MirrorTopics",
        10_001 => "MirrorFetch",
        10_002 => "MirrorAppend",
        10_003 => "MirrorVectors",
        10_004 => "MirrorReport",
        10_005 => "MirrorNotes",
        10_006 => "MirrorLinks",
        _ => advertised(key).map_or("Unknown", |range| range.name),
    }
}
