//! What the handlers of cold messages share: reading a request, texts, addresses, refusals.

use std::collections::HashSet;
use std::hash::Hash;

use bytes::Bytes;
use kafka::frame::RequestHeader;
use kafka::{ErrorCode, StrBytes, cold};
use kafka_protocol::protocol::Decodable;

use super::{Answer, Ctx};

/// Every operation on a topic, a cluster: there are no access rules (AclOperation bits, as in Kafka).
pub(super) const TOPIC_OPERATIONS: i32 = 0b1101_1111_1000;
pub(super) const CLUSTER_OPERATIONS: i32 = 0b1_1111_1010_0000;
/// The operations were not asked for.
pub(super) const OPERATIONS_UNASKED: i32 = i32::MIN;

/// Why one part of a request is refused: code and sentence.
pub(super) type Refusal = (ErrorCode, String);

/// The request, or the answer to one that cannot be read.
pub(super) fn read<M: Decodable>(header: &RequestHeader, body: Bytes) -> Result<M, Answer> {
    cold::decode(header.api_version, body).map_err(|error| Answer::malformed(header, error))
}

pub(super) fn text(text: impl Into<String>) -> StrBytes {
    StrBytes::from_string(text.into())
}

/// What stands more than once.
pub(super) fn repeated<T: Eq + Hash + Clone>(all: impl Iterator<Item = T>) -> HashSet<T> {
    let mut seen = HashSet::new();
    all.filter(|one| !seen.insert(one.clone())).collect()
}

/// The broker's address on the listener of this connection.
pub(super) fn address(ctx: &Ctx) -> (StrBytes, i32) {
    let listener = &ctx.connection.listener;
    (text(listener.advertised_host.as_str()), i32::from(listener.advertised_port))
}

/// The epoch that a client believes in, against the partition's. -1: it believes nothing.
pub(super) fn check_epoch(asked: i32, current: kafka::LeaderEpoch) -> Result<(), ErrorCode> {
    match asked {
        -1 => Ok(()),
        asked if asked < current.0 => Err(ErrorCode::FencedLeaderEpoch),
        asked if asked > current.0 => Err(ErrorCode::UnknownLeaderEpoch),
        _ => Ok(()),
    }
}
