//! The topic registry over a metadata store in memory: names, ids, settings, and who wins a race.
//! What partitions do with a change is tested in `topic_changes_tests.rs`.

use broker_store::meta::Memory;

use super::*;

async fn registry(store: &Arc<dyn MetaStore>) -> TopicRegistry {
    TopicRegistry::load(store.clone(), TopicDefaults::default(), 3).await.unwrap()
}

fn memory() -> Arc<dyn MetaStore> {
    Arc::new(Memory::default())
}

fn new(name: &str, partitions: i32) -> NewTopic {
    NewTopic { name: name.to_owned(), partitions, overrides: Overrides::new() }
}

fn set(key: &str, value: &str) -> ConfigChange {
    ConfigChange::Each(vec![(key.to_owned(), ConfigOp::Set(value.to_owned()))])
}

#[tokio::test]
async fn topics_and_their_changes_are_found_again_after_a_restart() {
    let store = memory();
    let topics = registry(&store).await;
    let mut changes = topics.changes();
    topics.create(&new("a", -1)).await.unwrap();
    topics.create(&new("b", 1)).await.unwrap();
    topics.grow("b", 4).await.unwrap();
    let altered = topics.alter("a", &set("retention.ms", "5")).await.unwrap();
    assert_eq!(altered.settings.retention_ms, Some(5));
    topics.create(&new("gone", 1)).await.unwrap();
    topics.delete("gone").await.unwrap();
    assert_eq!(*changes.borrow_and_update(), 6);
    let again = registry(&store).await;
    assert_eq!(again.all(), topics.all());
    let counts: Vec<_> = again.all().iter().map(|topic| (topic.name.to_string(), topic.partitions)).collect();
    assert_eq!(counts, [("a".to_owned(), 3), ("b".to_owned(), 4)]);
    assert_eq!(again.by_id(altered.id).unwrap().name.as_str(), "a");
}

/// Trap 6.
#[tokio::test]
async fn a_recreated_topic_has_a_new_id_and_the_old_one_is_unknown() {
    let topics = registry(&memory()).await;
    let first = topics.create(&new("t", 1)).await.unwrap();
    topics.delete("t").await.unwrap();
    let second = topics.create(&new("t", 1)).await.unwrap();
    assert_ne!(first.id, second.id);
    assert!(topics.by_id(first.id).is_none());
    assert_eq!(topics.by_id(second.id).unwrap(), second);
}

#[tokio::test]
async fn refusals_have_kafkas_codes() {
    let topics = registry(&memory()).await;
    topics.create(&new("a.b", 2)).await.unwrap();
    let code = |error: Result<_, TopicError>| error.map(|_: Arc<Topic>| ()).unwrap_err().code();
    assert_eq!(code(topics.create(&new("a.b", 1)).await), ErrorCode::TopicAlreadyExists);
    assert_eq!(code(topics.create(&new("a_b", 1)).await), ErrorCode::InvalidTopicException);
    assert_eq!(code(topics.create(&new("a/b", 1)).await), ErrorCode::InvalidTopicException);
    assert_eq!(code(topics.create(&new("c", 0)).await), ErrorCode::InvalidPartitions);
    assert_eq!(code(topics.create(&new("c", 10_001)).await), ErrorCode::InvalidPartitions);
    assert_eq!(code(topics.create(&new("__consumer_offsets", 1)).await), ErrorCode::PolicyViolation);
    assert_eq!(code(topics.grow("a.b", 2).await), ErrorCode::InvalidPartitions);
    assert_eq!(code(topics.grow("a.b", 1).await), ErrorCode::InvalidPartitions);
    assert_eq!(code(topics.grow("c", 1).await), ErrorCode::UnknownTopicOrPartition);
    assert_eq!(code(topics.delete("c").await), ErrorCode::UnknownTopicOrPartition);
    assert_eq!(code(topics.alter("a.b", &set("no.such", "1")).await), ErrorCode::InvalidConfig);
    assert_eq!(code(topics.alter("a.b", &set("cleanup.policy", "compact")).await), ErrorCode::InvalidConfig);
    assert_eq!(topics.by_name("a.b").unwrap().overrides, Overrides::new());
}

#[tokio::test]
async fn settings_change_one_by_one_or_all_at_once() {
    let topics = registry(&memory()).await;
    topics.create(&new("t", 1)).await.unwrap();
    topics.alter("t", &set("retention.ms", "5")).await.unwrap();
    let list = "leader.replication.throttled.replicas".to_owned();
    let each = |op| ConfigChange::Each(vec![(list.clone(), op)]);
    topics.alter("t", &each(ConfigOp::Append("0:1,1:1".to_owned()))).await.unwrap();
    topics.alter("t", &each(ConfigOp::Append("1:1,2:1".to_owned()))).await.unwrap();
    let topic = topics.alter("t", &each(ConfigOp::Subtract("0:1".to_owned()))).await.unwrap();
    assert_eq!(topic.overrides[&list], "1:1,2:1");
    assert_eq!(topic.overrides["retention.ms"], "5");
    let append = ConfigChange::Each(vec![("retention.ms".to_owned(), ConfigOp::Append("1".to_owned()))]);
    assert!(topics.alter("t", &append).await.is_err());
    let replaced = ConfigChange::Replace([("sealane.lanes".to_owned(), "true".to_owned())].into());
    let topic = topics.alter("t", &replaced).await.unwrap();
    assert!(topic.settings.lanes);
    assert_eq!(topic.overrides.len(), 1);
    let deleted = ConfigChange::Each(vec![("sealane.lanes".to_owned(), ConfigOp::Delete)]);
    assert!(!topics.alter("t", &deleted).await.unwrap().settings.lanes);
}

#[tokio::test]
async fn internal_topics_are_made_once_and_by_the_broker_alone() {
    let topics = registry(&memory()).await;
    let first = topics.ensure_internal(&new("__consumer_offsets", 50)).await.unwrap();
    assert_eq!(topics.ensure_internal(&new("__consumer_offsets", 7)).await.unwrap(), first);
    assert!(topics.delete("__consumer_offsets").await.is_err());
    assert!(topics.grow("__consumer_offsets", 60).await.is_err());
}

#[tokio::test]
async fn pages_go_on_where_the_last_one_ended() {
    let topics = registry(&memory()).await;
    for name in ["a", "b", "c"] {
        topics.create(&new(name, 1)).await.unwrap();
    }
    let names = |from, limit| topics.page(from, limit).iter().map(|t| t.name.to_string()).collect::<Vec<_>>();
    assert_eq!(names("", 2), ["a", "b"]);
    assert_eq!(names("b", 9), ["b", "c"]);
    assert_eq!(names("bb", 9), ["c"]);
}
