//! Topic changes on a whole broker over memory stores: what a failed or repeated change leaves behind.
//! The stores fail on purpose; no socket is opened.

use broker_store::meta::Memory as MemoryMeta;
use broker_store::{Faults, Flaky, Memory, MetaStore, SegmentStore};
use kafka::{BrokerId, ClusterId, LeaderEpoch, RegionId, RegionName};

use super::*;
use crate::broker::{Identity, Parts};
use crate::config::Config;
use crate::configs::{Overrides, TopicDefaults};
use crate::partition::Flusher;
use crate::topics::{ConfigOp, TopicRegistry};

type Store = Arc<Flaky<Memory>>;

async fn broker() -> (Arc<Broker>, Store) {
    let store = Arc::new(Flaky::new(Memory::new(), 1, Faults::default()));
    let meta: Arc<dyn MetaStore> = Arc::new(MemoryMeta::default());
    let topics = TopicRegistry::load(meta.clone(), TopicDefaults::default(), 1).await.unwrap();
    (over(meta, store.clone(), topics), store)
}

/// The next life of a broker, on the same stores.
fn restarted(broker: &Broker, topics: TopicRegistry) -> Arc<Broker> {
    broker.release_partitions();
    over(broker.meta.clone(), broker.store.clone(), topics)
}

fn over(meta: Arc<dyn MetaStore>, store: Arc<dyn SegmentStore>, topics: TopicRegistry) -> Arc<Broker> {
    let identity = Identity {
        broker_id: BrokerId(1),
        cluster_id: ClusterId::new("test"),
        region: RegionName::parse("east").unwrap(),
        region_id: RegionId(uuid::Uuid::from_u128(1)),
        epoch: LeaderEpoch(0),
    };
    Broker::new(Parts {
        config: Config::default(),
        identity,
        meta,
        store,
        flusher: Flusher::start(1, Duration::from_millis(5), 1 << 20).unwrap(),
        service: chassis::ServiceHandle::standalone("broker"),
        listeners: Vec::new(),
        topics: Arc::new(topics),
        lane_exists: Arc::new(|_| false),
        cluster: None,
    })
}

fn new(name: &str, partitions: i32) -> NewTopic {
    NewTopic { name: name.to_owned(), partitions, overrides: Overrides::new() }
}

#[tokio::test]
async fn a_topic_that_cannot_be_served_is_taken_back_and_can_be_made_later() {
    let (broker, store) = broker().await;
    store.set_full(true);
    let error = broker.create_topic(&new("t", 2)).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::KafkaStorageError);
    assert!(broker.topics.by_name("t").is_none());
    store.set_full(false);
    broker.create_topic(&new("t", 2)).await.unwrap();
    assert_eq!(broker.topic_partitions("t").unwrap().len(), 2);
}

#[tokio::test]
async fn partitions_that_did_not_fit_are_served_once_there_is_room() {
    let (broker, store) = broker().await;
    broker.create_topic(&new("t", 1)).await.unwrap();
    store.set_full(true);
    assert!(broker.grow_topic("t", 3).await.is_err());
    assert!(broker.partition("t", 0).is_some(), "what was served is served");
    store.set_full(false);
    let mending = broker.clone();
    let task = tokio::spawn(async move { mending.mend().await });
    let served = async {
        while broker.topic_partitions("t").is_none_or(|partitions| partitions.len() < 3) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), served).await.unwrap();
    task.abort();
}

#[tokio::test]
async fn a_topic_made_again_at_once_meets_nothing_of_its_predecessor() {
    let (broker, _) = broker().await;
    let first = broker.create_topic(&new("t", 1)).await.unwrap();
    let old = broker.partition("t", 0).unwrap();
    let (deleted, made) = tokio::join!(broker.delete_topic("t"), async {
        loop {
            match broker.create_topic(&new("t", 2)).await {
                Err(error) if error.code() == ErrorCode::TopicAlreadyExists => tokio::task::yield_now().await,
                other => break other,
            }
        }
    });
    assert_eq!(deleted.unwrap().id, first.id);
    let second = made.unwrap();
    let partitions = broker.topic_partitions("t").unwrap();
    assert_eq!(partitions.len(), 2);
    assert!(
        partitions.iter().all(|partition| partition.topic_id == second.id && !Arc::ptr_eq(partition, &old))
    );
}

#[tokio::test]
async fn lanes_are_in_the_log_before_the_setting_holds_and_new_partitions_have_them() {
    let (broker, _) = broker().await;
    broker.create_topic(&new("t", 1)).await.unwrap();
    let lanes =
        |value: &str| ConfigChange::Each(vec![("sealane.lanes".to_owned(), ConfigOp::Set(value.to_owned()))]);
    let has_list = |index| {
        let partition = broker.partition("t", index).unwrap();
        partition.with_fold(|fold| !fold.lanes.extractors().is_empty())
    };
    assert!(!has_list(0));
    assert!(broker.alter_topic("t", &lanes("true")).await.unwrap().settings.lanes);
    broker.grow_topic("t", 2).await.unwrap();
    assert!(has_list(0) && has_list(1));
    broker.alter_topic("t", &lanes("false")).await.unwrap();
    assert!(!has_list(0) && !has_list(1));
}

fn set(key: &str, value: &str) -> ConfigChange {
    ConfigChange::Each(vec![(key.to_owned(), ConfigOp::Set(value.to_owned()))])
}

/// From which offset on which list judges, in the first partition.
fn lists(broker: &Broker, upto: i64) -> Vec<String> {
    let rules = broker.partition("t", 0).unwrap().with_fold(|fold| fold.lanes.rules());
    (0..upto).map(|at| rules.extractors_at(kafka::Offset(at)).texts().join(",")).collect()
}

#[tokio::test]
async fn a_changed_list_of_extractors_is_in_the_log_and_judges_what_follows() {
    const KEY: &str = "sealane.lanes.extractors";
    let (broker, _) = broker().await;
    let overrides = [("sealane.lanes", "true"), (KEY, "x-lane")];
    let overrides = overrides.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
    broker.create_topic(&NewTopic { overrides, ..new("t", 2) }).await.unwrap();
    let changed = broker.alter_topic("t", &set(KEY, "x-tt-env, baggage/lane")).await.unwrap();
    assert_eq!(changed.overrides[KEY], "x-tt-env, baggage/lane");
    // The same list again, and one that is none, change nothing.
    broker.alter_topic("t", &set(KEY, "x-tt-env,baggage/lane")).await.unwrap();
    let refused = broker.alter_topic("t", &set(KEY, "x-tt-env,cookie/lane")).await.unwrap_err();
    assert_eq!(refused.code(), ErrorCode::InvalidConfig);
    assert!(refused.to_string().contains("\"cookie/lane\""), "{refused}");
    let said = ["x-lane", "x-tt-env,baggage/lane"];
    assert_eq!(lists(&broker, 2), said);
    assert_eq!(broker.partition("t", 1).unwrap().watermarks().log_end, kafka::Offset(2));

    // A start by the log alone; then one under other defaults, which the topic's own list outlives.
    let own = [("sealane.lanes.extractors", "tsf_laneId"), ("retention.ms", "-1")];
    let own = own.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
    let defaults = TopicDefaults::new(own).unwrap();
    let topics = TopicRegistry::load(broker.meta.clone(), defaults, 1).await.unwrap();
    let broker = restarted(&broker, topics);
    broker.recover().await.unwrap();
    assert_eq!(lists(&broker, 2), said);
    let topic = broker.topics.by_name("t").unwrap();
    broker.settle_lanes(&topic).await.unwrap();
    assert_eq!(broker.partition("t", 0).unwrap().watermarks().log_end, kafka::Offset(2));
    let unset = ConfigChange::Each(vec![(KEY.to_owned(), ConfigOp::Delete)]);
    broker.alter_topic("t", &unset).await.unwrap();
    assert_eq!(lists(&broker, 3), [said[0], said[1], "tsf_laneId"]);
}

#[tokio::test]
async fn a_start_under_another_default_list_appends_it() {
    let (broker, _) = broker().await;
    let overrides = [("sealane.lanes".to_owned(), "true".to_owned())].into();
    broker.create_topic(&NewTopic { overrides, ..new("t", 1) }).await.unwrap();
    let own = [("sealane.lanes.extractors".to_owned(), "x-tt-env".to_owned())].into();
    let defaults = TopicDefaults::new(own).unwrap();
    let topics = TopicRegistry::load(broker.meta.clone(), defaults, 1).await.unwrap();
    let broker = restarted(&broker, topics);
    broker.recover().await.unwrap();
    let mending = broker.clone();
    let task = tokio::spawn(async move { mending.mend().await });
    let settled = async {
        while broker.partition("t", 0).unwrap().watermarks().log_end < kafka::Offset(2) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), settled).await.unwrap();
    task.abort();
    assert_eq!(lists(&broker, 2), [lane_core::extract::STANDARD, "x-tt-env"]);
}

#[tokio::test]
async fn a_start_removes_what_is_left_of_deleted_topics_and_no_folder_that_only_looks_like_it() {
    let (broker, store) = broker().await;
    let [kept, deleted, unknown] = ["kept", "deleted", "unknown"].map(|name| new(name, 1));
    let kept = broker.create_topic(&kept).await.unwrap();
    let deleted = broker.create_topic(&deleted).await.unwrap();
    let unknown = broker.create_topic(&unknown).await.unwrap();
    // A crash between the end in the metadata and that of the files.
    broker.topics.delete("deleted").await.unwrap();
    // Metadata that lost its end.
    let (_, version) = broker.meta.get("topics/unknown").await.unwrap().unwrap();
    broker.meta.delete_if("topics/unknown", version).await.unwrap();

    let topics = TopicRegistry::load(broker.meta.clone(), TopicDefaults::default(), 1).await.unwrap();
    assert_eq!(topics.deleted().await.unwrap(), [deleted.id]);
    let again = restarted(&broker, topics);
    again.recover().await.unwrap();
    let mut folders: Vec<String> =
        store.list(&broker_store::StorePath::root()).unwrap().into_iter().map(|entry| entry.name).collect();
    folders.retain(|name| [&kept, &deleted, &unknown].iter().any(|topic| *name == topic.id.0.to_string()));
    folders.sort();
    let mut expected = [kept.id.0.to_string(), unknown.id.0.to_string()];
    expected.sort();
    assert_eq!(folders, expected);
    assert_eq!(again.topics.deleted().await.unwrap(), []);
}

#[tokio::test]
async fn a_deletion_leaves_no_trace_in_the_metadata() {
    let (broker, _) = broker().await;
    broker.create_topic(&new("t", 1)).await.unwrap();
    broker.delete_topic("t").await.unwrap();
    assert_eq!(broker.topics.deleted().await.unwrap(), []);
}
