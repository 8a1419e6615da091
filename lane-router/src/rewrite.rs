//! What becomes of each request and each answer of a lane's connection. Pure.
//!
//! One table says which APIs a lane's client may use, in which versions, and what has to be changed in
//! them. What is not in it is not advertised and not passed on.

use bytes::Bytes;
use kafka::messages::{
    ApiVersionsResponse, BrokerId, DeleteGroupsRequest, DeleteGroupsResponse, DescribeClusterResponse,
    DescribeGroupsRequest, DescribeGroupsResponse, FindCoordinatorRequest, FindCoordinatorResponse, GroupId,
    HeartbeatRequest, InitProducerIdRequest, JoinGroupRequest, LeaveGroupRequest, ListGroupsResponse,
    MetadataResponse, OffsetCommitRequest, OffsetDeleteRequest, OffsetFetchRequest, OffsetFetchResponse,
    SyncGroupRequest, TransactionalId,
};
use kafka::{ErrorCode, RequestHeader, StrBytes, api, cold};
use lane_core::Lane;

use crate::brokers::Ports;
use crate::produce;

/// What a connection is to its client.
#[derive(Clone, Copy, Debug)]
pub struct Place<'a> {
    pub lane: &'a Lane,
    /// The host that the client reached.
    pub host: &'a str,
    /// Where it reaches each broker.
    pub ports: Ports,
}

/// What becomes of a request.
#[derive(Debug)]
pub enum Request {
    /// Send this body on, and treat its answer so.
    Forward(Bytes, Plan),
    /// The connection ends, for this reason.
    Close(String),
}

/// What becomes of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plan {
    /// Its bytes go on.
    Pass,
    /// There is none: produce with acks=0.
    NoAnswer,
    /// It is decoded and changed.
    Rewrite,
    /// It is an ApiVersions, which may come before the lane is known.
    ApiVersions,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rule {
    Pass,
    Produce,
    ApiVersions,
    Metadata,
    DescribeCluster,
    FindCoordinator,
    OffsetCommit,
    OffsetFetch,
    JoinGroup,
    Heartbeat,
    LeaveGroup,
    SyncGroup,
    DescribeGroups,
    ListGroups,
    DeleteGroups,
    OffsetDelete,
    InitProducerId,
}

/// Key, highest version that is understood here, what is done.
const TABLE: &[(i16, i16, Rule)] = &[
    (0, 12, Rule::Produce),
    (1, 12, Rule::Pass), // Fetch
    (2, 10, Rule::Pass), // ListOffsets
    (3, 13, Rule::Metadata),
    (8, 9, Rule::OffsetCommit),
    (9, 9, Rule::OffsetFetch),
    (10, 6, Rule::FindCoordinator),
    (11, 9, Rule::JoinGroup),
    (12, 4, Rule::Heartbeat),
    (13, 5, Rule::LeaveGroup),
    (14, 5, Rule::SyncGroup),
    (15, 6, Rule::DescribeGroups),
    (16, 5, Rule::ListGroups),
    (18, 4, Rule::ApiVersions),
    (19, 7, Rule::Pass), // CreateTopics
    (20, 6, Rule::Pass), // DeleteTopics
    (21, 2, Rule::Pass), // DeleteRecords
    (22, 5, Rule::InitProducerId),
    (23, 4, Rule::Pass), // OffsetForLeaderEpoch
    (32, 4, Rule::Pass), // DescribeConfigs
    (37, 3, Rule::Pass), // CreatePartitions
    (42, 2, Rule::DeleteGroups),
    (47, 0, Rule::OffsetDelete),
    (60, 2, Rule::DescribeCluster),
    (75, 0, Rule::Pass), // DescribeTopicPartitions
];

fn rule(key: i16, version: i16) -> Option<Rule> {
    let (_, max, rule) = TABLE.iter().find(|(k, ..)| *k == key)?;
    let known = version <= *max && api::is_supported(key, version);
    // ApiVersions answers unknown versions itself.
    (known || *rule == Rule::ApiVersions).then_some(*rule)
}

/// A request of a connection in `place`. `body` is what follows the header.
pub fn request(place: Place<'_>, header: &RequestHeader, body: Bytes) -> Request {
    let version = header.api_version;
    let Some(rule) = rule(header.api_key, version) else {
        let name = api::name(header.api_key);
        return Request::Close(format!("{name} version {version} is not for lanes"));
    };
    match rewritten(place, rule, version, body) {
        Ok(request) => request,
        Err(error) => {
            Request::Close(format!("{} version {version} cannot be read: {error}", api::name(header.api_key)))
        }
    }
}

fn rewritten(
    place: Place<'_>,
    rule: Rule,
    version: i16,
    body: Bytes,
) -> Result<Request, Box<dyn std::error::Error>> {
    let lane = place.lane;
    macro_rules! group_id {
        ($message:ty, $plan:expr) => {{
            let mut message: $message = cold::decode(version, body)?;
            suffix(lane, &mut message.group_id);
            Ok(Request::Forward(cold::encoded(&message, version)?, $plan))
        }};
    }
    match rule {
        Rule::Pass => Ok(Request::Forward(body, Plan::Pass)),
        Rule::ApiVersions => Ok(Request::Forward(body, Plan::ApiVersions)),
        Rule::Metadata | Rule::DescribeCluster | Rule::ListGroups => {
            Ok(Request::Forward(body, Plan::Rewrite))
        }
        Rule::Produce => Ok(produce::request(lane, version, body)?),
        Rule::OffsetCommit => group_id!(OffsetCommitRequest, Plan::Pass),
        Rule::JoinGroup => group_id!(JoinGroupRequest, Plan::Pass),
        Rule::Heartbeat => group_id!(HeartbeatRequest, Plan::Pass),
        Rule::LeaveGroup => group_id!(LeaveGroupRequest, Plan::Pass),
        Rule::SyncGroup => group_id!(SyncGroupRequest, Plan::Pass),
        Rule::OffsetDelete => group_id!(OffsetDeleteRequest, Plan::Pass),
        Rule::OffsetFetch => {
            let mut message: OffsetFetchRequest = cold::decode(version, body)?;
            if version < 8 {
                suffix(lane, &mut message.group_id);
            }
            message.groups.iter_mut().for_each(|g| suffix(lane, &mut g.group_id));
            Ok(Request::Forward(cold::encoded(&message, version)?, Plan::Rewrite))
        }
        Rule::FindCoordinator => {
            let mut message: FindCoordinatorRequest = cold::decode(version, body)?;
            if version < 4 {
                message.key = suffixed(lane, &message.key);
            }
            message.coordinator_keys.iter_mut().for_each(|key| *key = suffixed(lane, key));
            Ok(Request::Forward(cold::encoded(&message, version)?, Plan::Rewrite))
        }
        Rule::DescribeGroups => {
            let mut message: DescribeGroupsRequest = cold::decode(version, body)?;
            message.groups.iter_mut().for_each(|group| suffix(lane, group));
            Ok(Request::Forward(cold::encoded(&message, version)?, Plan::Rewrite))
        }
        Rule::DeleteGroups => {
            let mut message: DeleteGroupsRequest = cold::decode(version, body)?;
            message.groups_names.iter_mut().for_each(|group| suffix(lane, group));
            Ok(Request::Forward(cold::encoded(&message, version)?, Plan::Rewrite))
        }
        Rule::InitProducerId => {
            let mut message: InitProducerIdRequest = cold::decode(version, body)?;
            message.transactional_id =
                message.transactional_id.map(|id| TransactionalId(suffixed(lane, &id.0)));
            Ok(Request::Forward(cold::encoded(&message, version)?, Plan::Pass))
        }
    }
}

/// The body of an answer whose plan is [`Plan::Rewrite`].
pub fn answer(
    place: Place<'_>,
    key: i16,
    version: i16,
    body: Bytes,
) -> Result<Bytes, Box<dyn std::error::Error>> {
    let lane = place.lane;
    match rule(key, version) {
        Some(Rule::Produce) => produce::answer(place, version, body),
        Some(Rule::Metadata) => {
            let mut message: MetadataResponse = cold::decode_any_size(version, body)?;
            let place = place.among(message.brokers.len());
            message.brokers.iter_mut().for_each(|b| place.put(b.node_id, &mut b.host, &mut b.port));
            Ok(cold::encoded(&message, version)?)
        }
        Some(Rule::DescribeCluster) => {
            let mut message: DescribeClusterResponse = cold::decode_any_size(version, body)?;
            let place = place.among(message.brokers.len());
            message.brokers.iter_mut().for_each(|b| place.put(b.broker_id, &mut b.host, &mut b.port));
            Ok(cold::encoded(&message, version)?)
        }
        Some(Rule::FindCoordinator) => {
            let mut message: FindCoordinatorResponse = cold::decode_any_size(version, body)?;
            if version < 4 && message.error_code == ErrorCode::None.code() {
                place.put(message.node_id, &mut message.host, &mut message.port);
            }
            for found in &mut message.coordinators {
                unsuffix(lane, &mut found.key);
                if found.error_code == ErrorCode::None.code() {
                    place.put(found.node_id, &mut found.host, &mut found.port);
                }
            }
            Ok(cold::encoded(&message, version)?)
        }
        Some(Rule::OffsetFetch) => {
            let mut message: OffsetFetchResponse = cold::decode_any_size(version, body)?;
            message.groups.iter_mut().for_each(|g| unsuffix(lane, &mut g.group_id.0));
            Ok(cold::encoded(&message, version)?)
        }
        Some(Rule::DescribeGroups) => {
            let mut message: DescribeGroupsResponse = cold::decode_any_size(version, body)?;
            message.groups.iter_mut().for_each(|g| unsuffix(lane, &mut g.group_id.0));
            Ok(cold::encoded(&message, version)?)
        }
        Some(Rule::ListGroups) => {
            let mut message: ListGroupsResponse = cold::decode_any_size(version, body)?;
            message.groups.retain(|g| lane.unsuffixed(&g.group_id).is_some());
            message.groups.iter_mut().for_each(|g| unsuffix(lane, &mut g.group_id.0));
            Ok(cold::encoded(&message, version)?)
        }
        Some(Rule::DeleteGroups) => {
            let mut message: DeleteGroupsResponse = cold::decode_any_size(version, body)?;
            message.results.iter_mut().for_each(|g| unsuffix(lane, &mut g.group_id.0));
            Ok(cold::encoded(&message, version)?)
        }
        _ => Ok(body),
    }
}

/// An answer to ApiVersions with only what is understood here, in versions that are.
pub fn api_versions(version: i16, body: Bytes) -> Result<Bytes, Box<dyn std::error::Error>> {
    // An unknown version is answered with the layout of version 0 (KIP-511).
    let version = if api::is_supported(api::API_VERSIONS, version) { version } else { 0 };
    let mut message: ApiVersionsResponse = cold::decode_any_size(version, body)?;
    message.api_keys.retain_mut(|range| {
        let Some((_, max, _)) = TABLE.iter().find(|(key, ..)| *key == range.api_key) else { return false };
        range.max_version = range.max_version.min(*max);
        range.min_version <= range.max_version
    });
    Ok(cold::encoded(&message, version)?)
}

impl Place<'_> {
    /// Writes the address of a broker at this router over its own.
    pub fn put(&self, broker: BrokerId, host: &mut StrBytes, port: &mut i32) {
        *host = StrBytes::from_string(self.host.to_owned());
        *port = self.ports.of(broker.0);
    }

    /// The same, as an answer says that names so many brokers.
    fn among(self, brokers: usize) -> Self {
        let ports = if brokers > 1 { self.ports.of_cluster() } else { self.ports };
        Place { ports, ..self }
    }
}

pub fn suffixed(lane: &Lane, name: &str) -> StrBytes {
    StrBytes::from_string(lane.suffixed(name))
}

fn suffix(lane: &Lane, group: &mut GroupId) {
    group.0 = suffixed(lane, &group.0);
}

fn unsuffix(lane: &Lane, name: &mut StrBytes) {
    if let Some(short) = lane.unsuffixed(name) {
        *name = StrBytes::from_string(short.to_owned());
    }
}

#[cfg(test)]
mod tests {
    use kafka::messages::api_versions_response::ApiVersion;
    use kafka::messages::find_coordinator_response::Coordinator;
    use kafka::messages::list_groups_response::ListedGroup;
    use kafka::messages::metadata_response::MetadataResponseBroker;
    use kafka::messages::offset_fetch_request::OffsetFetchRequestGroup;

    use super::*;
    use crate::brokers::Brokers;

    fn lane() -> Lane {
        Lane::parse("boe-cart").unwrap()
    }

    fn place(lane: &Lane) -> Place<'_> {
        Place { lane, host: "router", ports: Ports::alone(7000) }
    }

    fn header(api_key: i16, api_version: i16) -> RequestHeader {
        RequestHeader { api_key, api_version, correlation_id: 1, client_id: None }
    }

    fn text(text: &str) -> StrBytes {
        StrBytes::from_string(text.to_owned())
    }

    fn forwarded(request: Request) -> (Bytes, Plan) {
        match request {
            Request::Forward(body, plan) => (body, plan),
            other => panic!("not forwarded: {other:?}"),
        }
    }

    #[test]
    fn group_ids_are_renamed_in_every_version() {
        let lane = lane();
        for version in 0..=9 {
            let asked = JoinGroupRequest::default().with_group_id(GroupId(text("orders")));
            let body = cold::encoded(&asked, version).unwrap();
            let (body, plan) = forwarded(request(place(&lane), &header(11, version), body));
            let sent: JoinGroupRequest = cold::decode(version, body).unwrap();
            assert_eq!((&*sent.group_id.0, plan), ("orders@boe-cart", Plan::Pass));
        }
        for version in 1..=9 {
            let mut asked = OffsetFetchRequest::default();
            match version {
                8.. => {
                    asked.groups.push(OffsetFetchRequestGroup::default().with_group_id(GroupId(text("g"))))
                }
                _ => asked.group_id = GroupId(text("g")),
            }
            let body = cold::encoded(&asked, version).unwrap();
            let (body, _) = forwarded(request(place(&lane), &header(9, version), body));
            let sent: OffsetFetchRequest = cold::decode(version, body).unwrap();
            let named = sent.groups.first().map_or(sent.group_id.clone(), |g| g.group_id.clone());
            assert_eq!(&*named.0, "g@boe-cart");
        }
    }

    #[test]
    fn a_client_never_learns_another_address() {
        let lane = lane();
        let broker = MetadataResponseBroker::default().with_host(text("inner")).with_port(9097);
        for version in 0..=13 {
            let told = MetadataResponse::default().with_brokers(vec![broker.clone()]);
            let body = cold::encoded(&told, version).unwrap();
            let body = answer(place(&lane), 3, version, body).unwrap();
            let told: MetadataResponse = cold::decode_any_size(version, body).unwrap();
            assert_eq!((&*told.brokers[0].host, told.brokers[0].port), ("router", 7000));
        }
        let found = Coordinator::default().with_key(text("g@boe-cart")).with_host(text("inner"));
        let told = FindCoordinatorResponse::default().with_coordinators(vec![found]);
        let body = cold::encoded(&told, 4).unwrap();
        let body = answer(place(&lane), 10, 4, body).unwrap();
        let told: FindCoordinatorResponse = cold::decode_any_size(4, body).unwrap();
        let found = &told.coordinators[0];
        assert_eq!((&*found.key, &*found.host, found.port), ("g", "router", 7000));
    }

    #[test]
    fn each_broker_of_a_cluster_has_a_port_of_its_own() {
        let (lane, brokers) = (lane(), Brokers::new(1000));
        let place = || Place { lane: &lane, host: "router", ports: brokers.ports(7000) };
        let broker = |id: i32| {
            let broker = MetadataResponseBroker::default().with_node_id(BrokerId(id));
            broker.with_host(text("inner")).with_port(9097)
        };
        // The router need not have heard before its client does.
        let told = MetadataResponse::default().with_brokers(vec![broker(1), broker(3)]);
        let body = answer(place(), 3, 9, cold::encoded(&told, 9).unwrap()).unwrap();
        let told: MetadataResponse = cold::decode_any_size(9, body).unwrap();
        let ports: Vec<i32> = told.brokers.iter().map(|broker| broker.port).collect();
        assert_eq!(ports, [8000, 10_000]);
        brokers.replace([(1, String::new()), (3, String::new())].into());
        let told = FindCoordinatorResponse::default().with_node_id(BrokerId(3)).with_host(text("inner"));
        let body = answer(place(), 10, 3, cold::encoded(&told, 3).unwrap()).unwrap();
        let told: FindCoordinatorResponse = cold::decode_any_size(3, body).unwrap();
        assert_eq!((&*told.host, told.port), ("router", 10_000));
    }

    #[test]
    fn a_lane_lists_its_own_groups_only() {
        let lane = lane();
        let groups = ["orders", "orders@boe-cart", "x@other-boe-cart", "a@b@boe-cart"];
        let listed = groups.map(|g| ListedGroup::default().with_group_id(GroupId(text(g))));
        let body = cold::encoded(&ListGroupsResponse::default().with_groups(listed.to_vec()), 4).unwrap();
        let body = answer(place(&lane), 16, 4, body).unwrap();
        let told: ListGroupsResponse = cold::decode_any_size(4, body).unwrap();
        let names: Vec<&str> = told.groups.iter().map(|g| &**g.group_id).collect();
        assert_eq!(names, ["orders", "a@b"]);
    }

    #[test]
    fn what_is_not_understood_is_neither_told_nor_passed() {
        let lane = lane();
        let range = |key, max| ApiVersion::default().with_api_key(key).with_max_version(max);
        let told =
            ApiVersionsResponse::default().with_api_keys(vec![range(0, 13), range(44, 1), range(3, 13)]);
        for (asked, layout) in [(3, 3), (0, 0), (99, 0)] {
            let body = cold::encoded(&told, layout).unwrap();
            let body = api_versions(asked, body).unwrap();
            let clamped: ApiVersionsResponse = cold::decode_any_size(layout, body).unwrap();
            let ranges: Vec<_> = clamped.api_keys.iter().map(|r| (r.api_key, r.max_version)).collect();
            assert_eq!(ranges, [(0, 12), (3, 13)]);
        }
        for (key, version) in [(44, 0), (0, 13), (10_001, 0), (68, 0), (7, 0)] {
            let asked = request(place(&lane), &header(key, version), Bytes::new());
            assert!(matches!(asked, Request::Close(_)), "{key} {version}");
        }
    }
}
