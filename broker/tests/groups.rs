//! One broker on loopback, asked in the raw protocol: what clients and tools see of groups.

#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::time::Duration;

use broker::config::{ListenerConfig, Storage};
use broker::{Config, service};
use bytes::Bytes;
use chassis::ServiceHandle;
use kafka::ErrorCode;
use kafka::StrBytes;
use kafka::messages::create_topics_request::CreatableTopic;
use kafka::messages::join_group_request::JoinGroupRequestProtocol;
use kafka::messages::leave_group_request::MemberIdentity;
use kafka::messages::offset_commit_request::{OffsetCommitRequestPartition, OffsetCommitRequestTopic};
use kafka::messages::offset_delete_request::{OffsetDeleteRequestPartition, OffsetDeleteRequestTopic};
use kafka::messages::offset_fetch_request::{
    OffsetFetchRequestGroup, OffsetFetchRequestTopic, OffsetFetchRequestTopics,
};
use kafka::messages::sync_group_request::SyncGroupRequestAssignment;
use kafka::messages::{
    CreateTopicsRequest, DeleteGroupsRequest, DeleteTopicsRequest, DescribeGroupsRequest,
    FindCoordinatorRequest, HeartbeatRequest, JoinGroupRequest, JoinGroupResponse, LeaveGroupRequest,
    ListGroupsRequest, MetadataRequest, OffsetCommitRequest, OffsetDeleteRequest, OffsetFetchRequest,
    SyncGroupRequest, SyncGroupResponse,
};
use kafka_client::{ConnectOptions, Connection, Endpoint};

struct Server {
    handle: ServiceHandle,
    endpoint: Endpoint,
}

impl Server {
    async fn start(storage: Storage, dir: &Path) -> Server {
        let listener = ListenerConfig { bind: "127.0.0.1:0".to_owned(), ..ListenerConfig::default() };
        let config = Config {
            data_dir: dir.to_owned(),
            storage,
            listeners: vec![listener],
            control_bind: "127.0.0.1:0".to_owned(),
            http_bind: String::new(),
            ..Config::default()
        };
        let handle = ServiceHandle::standalone("broker");
        let running = service::start(config, handle.clone()).await.unwrap();
        let address = running.addresses[0];
        Server { handle, endpoint: Endpoint::new(address.ip().to_string(), address.port()) }
    }

    async fn stop(self) {
        self.handle.drain(Duration::from_secs(20)).await.unwrap();
    }

    async fn connect(&self) -> Client {
        Client(Connection::connect(&self.endpoint, &ConnectOptions::default()).await.unwrap())
    }
}

#[derive(Clone)]
struct Client(Connection);

/// A member as its client remembers it.
#[derive(Clone)]
struct Member {
    id: StrBytes,
    instance: Option<StrBytes>,
    generation: i32,
}

impl Client {
    async fn create_topic(&self, name: &str) {
        let topic = CreatableTopic::default().with_name(text(name).into()).with_num_partitions(2);
        let topic = topic.with_replication_factor(1);
        let request = CreateTopicsRequest::default().with_topics(vec![topic]).with_timeout_ms(10_000);
        let answer = self.0.call(&request).await.unwrap();
        assert_eq!(answer.topics[0].error_code, 0, "{answer:?}");
    }

    async fn find_coordinator(&self) {
        let request = FindCoordinatorRequest::default().with_coordinator_keys(vec![text("g")]);
        let answer = self.0.call_at(4, &request).await.unwrap();
        assert_eq!(answer.coordinators[0].error_code, 0, "{answer:?}");
    }

    async fn join(
        &self,
        version: i16,
        member: Option<&StrBytes>,
        instance: Option<&str>,
    ) -> JoinGroupResponse {
        let protocol =
            JoinGroupRequestProtocol::default().with_name(text("range")).with_metadata(subscription());
        let mut request = JoinGroupRequest::default()
            .with_group_id(text("g").into())
            .with_session_timeout_ms(10_000)
            .with_member_id(member.cloned().unwrap_or_default())
            .with_protocol_type(text("consumer"))
            .with_protocols(vec![protocol]);
        if version >= 1 {
            request = request.with_rebalance_timeout_ms(20_000);
        }
        if version >= 5 {
            request = request.with_group_instance_id(instance.map(text));
        }
        self.0.call_at(version, &request).await.unwrap()
    }

    async fn sync(&self, member: &Member, assigned: &[(&StrBytes, i32)]) -> SyncGroupResponse {
        let assignments = assigned.iter().map(|(id, partition)| {
            SyncGroupRequestAssignment::default()
                .with_member_id((*id).clone())
                .with_assignment(assignment(*partition))
        });
        let request = SyncGroupRequest::default()
            .with_group_id(text("g").into())
            .with_member_id(member.id.clone())
            .with_group_instance_id(member.instance.clone())
            .with_generation_id(member.generation)
            .with_protocol_type(Some(text("consumer")))
            .with_protocol_name(Some(text("range")))
            .with_assignments(assignments.collect());
        self.0.call_at(5, &request).await.unwrap()
    }

    async fn heartbeat(&self, member: &Member) -> i16 {
        let request = HeartbeatRequest::default()
            .with_group_id(text("g").into())
            .with_member_id(member.id.clone())
            .with_group_instance_id(member.instance.clone())
            .with_generation_id(member.generation);
        self.0.call_at(4, &request).await.unwrap().error_code
    }

    /// Code of the one partition.
    async fn commit(
        &self,
        version: i16,
        group: &str,
        member: Option<&Member>,
        topic: &str,
        offset: i64,
    ) -> i16 {
        let partition = OffsetCommitRequestPartition::default()
            .with_committed_offset(offset)
            .with_committed_metadata((offset % 2 == 0).then(|| text("note")));
        let topic = OffsetCommitRequestTopic::default()
            .with_name(text(topic).into())
            .with_partitions(vec![partition]);
        let mut request =
            OffsetCommitRequest::default().with_group_id(text(group).into()).with_topics(vec![topic]);
        if let Some(member) = member {
            request = request
                .with_member_id(member.id.clone())
                .with_group_instance_id(member.instance.clone())
                .with_generation_id_or_member_epoch(member.generation);
        }
        self.0.call_at(version, &request).await.unwrap().topics[0].partitions[0].error_code
    }

    /// Offset and metadata of partition 0.
    async fn committed(&self, group: &str, topic: &str) -> (i64, String) {
        let topic =
            OffsetFetchRequestTopics::default().with_name(text(topic).into()).with_partition_indexes(vec![0]);
        let group = OffsetFetchRequestGroup::default()
            .with_group_id(text(group).into())
            .with_topics(Some(vec![topic]));
        let request = OffsetFetchRequest::default().with_groups(vec![group]);
        let answer = self.0.call_at(8, &request).await.unwrap();
        let partition = &answer.groups[0].topics[0].partitions[0];
        assert_eq!((answer.groups[0].error_code, partition.error_code), (0, 0));
        (partition.committed_offset, partition.metadata.as_deref().unwrap_or("null").to_owned())
    }

    async fn listed(&self) -> Vec<(String, String)> {
        let answer = self.0.call_at(5, &ListGroupsRequest::default()).await.unwrap();
        assert_eq!(answer.error_code, 0);
        let mut listed: Vec<_> =
            answer.groups.iter().map(|g| (g.group_id.to_string(), g.group_state.to_string())).collect();
        listed.sort();
        listed
    }

    async fn described(&self, version: i16, group: &str) -> (i16, String, usize) {
        let request = DescribeGroupsRequest::default().with_groups(vec![text(group).into()]);
        let answer = self.0.call_at(version, &request).await.unwrap();
        let group = &answer.groups[0];
        (group.error_code, group.group_state.to_string(), group.members.len())
    }

    async fn delete_group(&self, group: &str) -> i16 {
        let request = DeleteGroupsRequest::default().with_groups_names(vec![text(group).into()]);
        self.0.call(&request).await.unwrap().results[0].error_code
    }

    /// Top-level code and the code of partition 0.
    async fn delete_offset(&self, group: &str, topic: &str) -> (i16, Option<i16>) {
        let partition = OffsetDeleteRequestPartition::default().with_partition_index(0);
        let topic = OffsetDeleteRequestTopic::default()
            .with_name(text(topic).into())
            .with_partitions(vec![partition]);
        let request =
            OffsetDeleteRequest::default().with_group_id(text(group).into()).with_topics(vec![topic]);
        let answer = self.0.call(&request).await.unwrap();
        (answer.error_code, answer.topics.first().map(|t| t.partitions[0].error_code))
    }

    /// Two static members in a stable generation, each on a connection of its own.
    async fn static_pair(&self, other: &Client) -> (Member, Member) {
        let first = self.join(9, None, Some("m1")).await;
        assert_eq!(first.error_code, 0, "{first:?}");
        let joining = other.clone();
        let second = tokio::spawn(async move { joining.join(9, None, Some("m2")).await });
        // m1 is told by its heartbeat, and joins again.
        let one = Member {
            id: first.member_id.clone(),
            instance: Some(text("m1")),
            generation: first.generation_id,
        };
        let rebalancing = ErrorCode::RebalanceInProgress.code();
        while self.heartbeat(&one).await != rebalancing {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let again = self.join(9, Some(&one.id), Some("m1")).await;
        let second = second.await.unwrap();
        assert_eq!((again.error_code, second.error_code), (0, 0));
        assert_eq!((again.leader.clone(), again.members.len()), (one.id.clone(), 2));
        let one = Member { generation: again.generation_id, ..one };
        let two =
            Member { id: second.member_id, instance: Some(text("m2")), generation: second.generation_id };
        let (follower, waiting) = (other.clone(), two.clone());
        let synced = tokio::spawn(async move { follower.sync(&waiting, &[]).await });
        let led = self.sync(&one, &[(&one.id, 0), (&two.id, 1)]).await;
        assert_eq!((led.error_code, led.assignment), (0, assignment(0)));
        assert_eq!(led.protocol_name.as_deref(), Some("range"));
        assert_eq!(synced.await.unwrap().assignment, assignment(1));
        (one, two)
    }
}

fn text(text: &str) -> StrBytes {
    StrBytes::from_string(text.to_owned())
}

fn subscription() -> Bytes {
    Bytes::from_static(b"\0\0\0\0\0\x01\0\x01t\xff\xff\xff\xff")
}

fn assignment(partition: i32) -> Bytes {
    let mut bytes = b"\0\0\0\0\0\x01\0\x01t\0\0\0\x01".to_vec();
    bytes.extend(partition.to_be_bytes());
    bytes.extend([0xff; 4]);
    bytes.into()
}

#[tokio::test(flavor = "multi_thread")]
async fn static_members_keep_their_partitions_through_restarts_and_fence_their_twins() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(Storage::Disk, dir.path()).await;
    let (one, two) = (server.connect().await, server.connect().await);
    one.create_topic("t").await;
    one.find_coordinator().await;
    let (m1, m2) = one.static_pair(&two).await;

    // m1 dies and comes back without its id: same partitions, no rebalance for m2.
    let again = one.join(9, None, Some("m1")).await;
    assert_eq!((again.error_code, again.generation_id), (0, m1.generation));
    assert!(again.skip_assignment, "the leader is told to keep the assignment");
    let m1_again = Member { id: again.member_id, ..m1.clone() };
    assert_eq!(one.sync(&m1_again, &[]).await.assignment, assignment(0));
    assert_eq!(two.heartbeat(&m2).await, 0);
    // Its former self is fenced.
    let fenced = ErrorCode::FencedInstanceId.code();
    assert_eq!(one.heartbeat(&m1).await, fenced);
    assert_eq!(one.commit(8, "g", Some(&m1), "t", 4).await, fenced);
    assert_eq!(one.commit(8, "g", Some(&m1_again), "t", 4).await, 0);

    // The broker restarts with both running.
    server.stop().await;
    let server = Server::start(Storage::Disk, dir.path()).await;
    let (one, two) = (server.connect().await, server.connect().await);
    assert_eq!((one.heartbeat(&m1_again).await, two.heartbeat(&m2).await), (0, 0));
    assert_eq!(two.sync(&m2, &[]).await.assignment, assignment(1));
    assert_eq!(one.heartbeat(&m1).await, fenced);
    assert_eq!(one.committed("g", "t").await, (4, "note".to_owned()));

    // A second live process of m1: the newer one works, the older one is fenced.
    let twin = two.join(7, None, Some("m1")).await;
    assert_eq!((twin.error_code, twin.generation_id), (0, m1.generation));
    let twin = Member { id: twin.member_id, ..m1_again.clone() };
    assert_eq!((one.heartbeat(&m1_again).await, two.heartbeat(&twin).await), (fenced, 0));

    // An administrator removes m1 by its instance alone.
    let member = MemberIdentity::default().with_group_instance_id(Some(text("m1")));
    let request = LeaveGroupRequest::default().with_group_id(text("g").into()).with_members(vec![member]);
    let left = one.0.call(&request).await.unwrap();
    assert_eq!((left.error_code, left.members[0].error_code), (0, 0));
    assert_eq!(two.heartbeat(&m2).await, ErrorCode::RebalanceInProgress.code());
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn groups_without_members_are_shown_before_and_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let mut server = Server::start(Storage::Disk, dir.path()).await;
    let client = server.connect().await;
    assert_eq!(client.listed().await, []);
    assert_eq!(client.described(5, "g").await, (0, "Dead".to_owned(), 0));
    client.create_topic("t").await;
    let joined = client.join(0, None, None).await;
    let member = Member { id: joined.member_id, instance: None, generation: joined.generation_id };
    assert_eq!(joined.error_code, 0);
    assert_eq!(client.sync(&member, &[(&member.id, 0)]).await.error_code, 0);
    assert_eq!(client.commit(7, "g", Some(&member), "t", 5).await, 0);
    assert_eq!(client.described(6, "g").await, (0, "Stable".to_owned(), 1));
    let leaving =
        LeaveGroupRequest::default().with_group_id(text("g").into()).with_member_id(member.id.clone());
    assert_eq!(client.0.call_at(2, &leaving).await.unwrap().error_code, 0);
    assert_eq!(client.commit(2, "tool", None, "t", 6).await, 0);
    for round in 0..2 {
        let client = server.connect().await;
        let empty = |name: &str| (name.to_owned(), "Empty".to_owned());
        assert_eq!(client.listed().await, [empty("g"), empty("tool")], "round {round}");
        for group in ["g", "tool"] {
            assert_eq!(client.described(6, group).await, (0, "Empty".to_owned(), 0));
        }
        let missing = (ErrorCode::GroupIdNotFound.code(), "Dead".to_owned(), 0);
        assert_eq!(client.described(6, "nope").await, missing);
        assert_eq!(client.described(5, "nope").await, (0, "Dead".to_owned(), 0));
        assert_eq!(client.committed("g", "t").await, (5, String::new()));
        assert_eq!(client.committed("tool", "t").await, (6, "note".to_owned()));
        assert_eq!(client.committed("nope", "t").await, (-1, String::new()));
        server.stop().await;
        server = Server::start(Storage::Disk, dir.path()).await;
    }
    // Resetting offsets: allowed while the group is empty.
    let client = server.connect().await;
    assert_eq!(client.commit(9, "g", None, "t", 0).await, 0);
    assert_eq!(client.committed("g", "t").await, (0, "note".to_owned()));
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn deleting_follows_kafkas_rules() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(Storage::Memory, dir.path()).await;
    let client = server.connect().await;
    let not_found = ErrorCode::GroupIdNotFound.code();
    assert_eq!(client.delete_group("g").await, not_found);
    assert_eq!(client.delete_offset("g", "t").await.0, not_found);
    client.create_topic("t").await;
    client.create_topic("u").await;
    let joined = client.join(3, None, None).await;
    let member = Member { id: joined.member_id, instance: None, generation: joined.generation_id };
    client.sync(&member, &[(&member.id, 0)]).await;
    for topic in ["t", "u"] {
        assert_eq!(client.commit(8, "g", Some(&member), topic, 3).await, 0);
    }
    assert_eq!(client.delete_group("g").await, ErrorCode::NonEmptyGroup.code());
    let subscribed = ErrorCode::GroupSubscribedToTopic.code();
    assert_eq!(client.delete_offset("g", "t").await, (0, Some(subscribed)));
    assert_eq!(client.delete_offset("g", "u").await, (0, Some(0)), "no member reads it");
    let unknown = ErrorCode::UnknownTopicOrPartition.code();
    assert_eq!(client.delete_offset("g", "nope").await, (0, Some(unknown)));
    assert_eq!(client.committed("g", "u").await.0, -1);
    assert_eq!(client.committed("g", "t").await.0, 3);
    assert_eq!(client.commit(8, "g", None, "t", 1).await, ErrorCode::UnknownMemberId.code());

    let leaving =
        LeaveGroupRequest::default().with_group_id(text("g").into()).with_member_id(member.id.clone());
    assert_eq!(client.0.call_at(1, &leaving).await.unwrap().error_code, 0);
    assert_eq!(client.delete_offset("g", "t").await, (0, Some(0)));
    assert_eq!(client.delete_group("g").await, 0);
    assert_eq!(client.listed().await, []);
    assert_eq!(client.heartbeat(&member).await, ErrorCode::UnknownMemberId.code());
    // A commit with a generation needs the group; which code says so depends on the version.
    assert_eq!(client.commit(8, "g", Some(&member), "t", 1).await, ErrorCode::IllegalGeneration.code());
    assert_eq!(client.commit(9, "g", Some(&member), "t", 1).await, not_found);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn offsets_of_a_topic_die_with_it() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(Storage::Memory, dir.path()).await;
    let client = server.connect().await;
    client.create_topic("t").await;
    assert_eq!(client.commit(5, "g", None, "t", 10).await, 0);
    let request =
        DeleteTopicsRequest::default().with_topic_names(vec![text("t").into()]).with_timeout_ms(10_000);
    assert_eq!(client.0.call_at(4, &request).await.unwrap().responses[0].error_code, 0);
    let unknown = ErrorCode::UnknownTopicOrPartition.code();
    assert_eq!(client.commit(5, "g", None, "t", 11).await, unknown);
    client.create_topic("t").await;
    assert_eq!(client.committed("g", "t").await, (-1, String::new()));
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn all_versions_of_fetching_offsets_tell_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(Storage::Memory, dir.path()).await;
    let client = server.connect().await;
    client.create_topic("t").await;
    assert_eq!(client.commit(2, "g", None, "t", 7).await, 0);
    let wanted =
        || OffsetFetchRequestTopic::default().with_name(text("t").into()).with_partition_indexes(vec![0, 1]);
    for version in 1..8 {
        let request =
            OffsetFetchRequest::default().with_group_id(text("g").into()).with_topics(Some(vec![wanted()]));
        let answer = client.0.call_at(version, &request).await.unwrap();
        let offsets: Vec<i64> = answer.topics[0].partitions.iter().map(|p| p.committed_offset).collect();
        assert_eq!(offsets, [7, -1], "version {version}");
        assert!(answer.topics[0].partitions.iter().all(|p| p.metadata.as_deref() == Some("")));
    }
    // Null means everything there is, and an empty list nothing.
    for version in 2..8 {
        let all = OffsetFetchRequest::default().with_group_id(text("g").into()).with_topics(None);
        let answer = client.0.call_at(version, &all).await.unwrap();
        assert_eq!(answer.topics.len(), 1, "version {version}");
        assert_eq!(answer.topics[0].partitions.len(), 1);
        let none = all.with_topics(Some(Vec::new()));
        assert_eq!(client.0.call_at(version, &none).await.unwrap().topics, []);
    }
    for version in 8..10 {
        let groups = ["g", "nope"]
            .map(|g| OffsetFetchRequestGroup::default().with_group_id(text(g).into()).with_topics(None));
        let request = OffsetFetchRequest::default().with_groups(groups.to_vec());
        let answer = client.0.call_at(version, &request).await.unwrap();
        let counts: Vec<usize> = answer.groups.iter().map(|g| g.topics.len()).collect();
        assert_eq!(counts, [1, 0], "version {version}");
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn bad_requests_get_their_code_in_every_version() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(Storage::Memory, dir.path()).await;
    let client = server.connect().await;
    client.create_topic("t").await;
    for version in 0..10 {
        let nameless =
            JoinGroupRequest::default().with_session_timeout_ms(10_000).with_rebalance_timeout_ms(-1);
        let answer = client.0.call_at(version, &nameless).await.unwrap();
        assert_eq!(answer.error_code, ErrorCode::InvalidGroupId.code(), "version {version}");
        let hasty = nameless.with_group_id(text("g").into()).with_session_timeout_ms(10);
        let answer = client.0.call_at(version, &hasty).await.unwrap();
        assert_eq!(answer.error_code, ErrorCode::InvalidSessionTimeout.code(), "version {version}");
        let stranger = client.join(version, Some(&text("who")), None).await;
        assert_eq!(stranger.error_code, ErrorCode::UnknownMemberId.code(), "version {version}");
    }
    let required = client.join(4, None, None).await;
    assert_eq!(required.error_code, ErrorCode::MemberIdRequired.code());
    assert!(required.member_id.starts_with("sealane-"), "{required:?}");
    let long =
        OffsetCommitRequestPartition::default().with_committed_metadata(Some(text(&"x".repeat(5_000))));
    let topic = OffsetCommitRequestTopic::default().with_name(text("t").into()).with_partitions(vec![long]);
    let request = OffsetCommitRequest::default().with_group_id(text("h").into()).with_topics(vec![topic]);
    let answer = client.0.call_at(8, &request).await.unwrap();
    let code = answer.topics[0].partitions[0].error_code;
    assert_eq!(code, ErrorCode::OffsetMetadataTooLarge.code());
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_without_groups_has_no_topic_for_them() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(Storage::Memory, dir.path()).await;
    let client = server.connect().await;
    let topics = || async {
        let answer = client.0.call_at(12, &MetadataRequest::default().with_topics(None)).await.unwrap();
        answer
            .topics
            .into_iter()
            .map(|t| (t.name.unwrap_or_default().to_string(), t.is_internal))
            .collect::<Vec<_>>()
    };
    assert_eq!(client.committed("g", "t").await.0, -1);
    assert_eq!(topics().await, []);
    client.find_coordinator().await;
    client.join(4, None, None).await;
    assert_eq!(topics().await, [("__consumer_offsets".to_owned(), true)]);
    server.stop().await;
}
