//! Topic: a topic of a cluster is made, grown and configured as the object says, by Kafka's own requests. A topic that the
//! object does not own (another object has its name) is left alone; records go only where spec.deletionPolicy says Delete.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use kafka::messages::create_partitions_request::{CreatePartitionsRequest, CreatePartitionsTopic};
use kafka::messages::create_topics_request::{CreatableTopic, CreatableTopicConfig, CreateTopicsRequest};
use kafka::messages::delete_topics_request::{DeleteTopicState, DeleteTopicsRequest};
use kafka::messages::describe_configs_request::{DescribeConfigsRequest, DescribeConfigsResource};
use kafka::messages::incremental_alter_configs_request::{
    AlterConfigsResource, AlterableConfig, IncrementalAlterConfigsRequest,
};
use kafka::messages::metadata_request::{MetadataRequest, MetadataRequestTopic};
use kafka::{ErrorCode, StrBytes};
use kafka_client::{ClientError, Connection};
use kube::ResourceExt as _;
use kube::api::ListParams;
use kube::runtime::events::EventType;

use crate::conditions::{Status, Verdict, after};
use crate::context::{Context, is_paused};
use crate::controller::{Again, Reconciled, Wakes, primary, run, secondary};
use crate::crd::{BrokerCluster, BrokerPool, DeletionPolicy, Topic, TopicStatus};
use crate::failure::Failure;
use crate::region::Region;

/// Starts the controller.
pub fn start(cx: &Arc<Context>) {
    let topics = primary::<Topic>(cx);
    let known = topics.store.clone();
    cx.topics.get_or_init(|| topics.store.clone());
    // Topics of a cluster that has just become ready need not wait for their turn.
    let wakes: Vec<Wakes<Topic>> =
        vec![secondary::<BrokerCluster, Topic>(cx, "clusters of topics", None, move |cluster| {
            let of_it = known.state().into_iter().filter(|topic| {
                topic.namespace() == cluster.namespace()
                    && topic.spec.cluster_ref.name == cluster.name_any()
                    && !is_ready(topic)
            });
            of_it.map(|topic| kube::runtime::reflector::ObjectRef::from_obj(&*topic)).collect()
        })];
    cx.service.spawn_child(run(cx.clone(), "topics", topics, wakes, reconcile));
}

fn is_ready(topic: &Topic) -> bool {
    topic.status.as_ref().is_some_and(|status| crate::conditions::is_true(&status.conditions, "Ready"))
}

fn reconcile(cx: Arc<Context>, topic: Arc<Topic>) -> BoxFuture<'static, Reconciled> {
    async move {
        if is_paused(&*topic) {
            return Ok(Again(LOOK));
        }
        if topic.metadata.deletion_timestamp.is_some() {
            return end(&cx, &topic).await;
        }
        cx.finalizer(&*topic, FINALIZER, topic.spec.deletion_policy == DeletionPolicy::Delete).await?;
        let mut status = topic.status.clone().unwrap_or_default();
        let verdicts = match bring(&cx, &topic, &mut status).await {
            Ok(verdicts) => verdicts,
            Err(Failure::DataPlane(text)) => vec![Verdict::no("Ready", "ClusterNotReady", text)],
            Err(other) => return Err(other),
        };
        tell(&cx, &topic, &verdicts).await;
        let settled =
            verdicts.iter().any(|verdict| verdict.type_ == "Ready" && verdict.status == Status::True);
        status.observed_generation = topic.metadata.generation;
        status.conditions = after(&status.conditions, &verdicts, topic.metadata.generation);
        cx.status(&*topic, topic.status.as_ref(), &status).await?;
        Ok(Again(if settled { pause(&cx) } else { SOON }))
    }
    .boxed()
}

/// Until a topic at rest is looked at again: where there are thousands, so many in a second and no more.
fn pause(cx: &Context) -> Duration {
    let count = cx.topics.get().map_or(0, |topics| topics.len());
    LOOK.max(Duration::from_secs(count as u64 / LOOKS_PER_SECOND))
}

async fn bring(cx: &Context, topic: &Topic, status: &mut TopicStatus) -> Result<Vec<Verdict>, Failure> {
    let refused = |type_, reason, text: String| {
        Ok(vec![Verdict::no(type_, reason, text.clone()), Verdict::no("Ready", reason, text)])
    };
    let namespace = topic.namespace().unwrap_or_default();
    let name = topic.topic_name();
    status.topic_name = Some(name.clone());
    let Some(region) = Region::find(cx, &namespace, &topic.spec.cluster_ref.name).await? else {
        return refused(
            "Synced",
            "ClusterNotFound",
            format!("there is no BrokerCluster {}", topic.spec.cluster_ref.name),
        );
    };
    if let Some(other) = earlier(cx, topic) {
        let text = format!("Topic {other} has the topic {name} already");
        return Ok(vec![
            Verdict::yes("Conflict", "Claimed", text.clone()),
            Verdict::no("Synced", "Conflict", text.clone()),
            Verdict::no("Ready", "Conflict", text),
        ]);
    }
    let connection = region.kafka(cx).await?;
    match hold(&connection, topic, &name, status).await {
        Ok(()) => Ok(vec![
            Verdict::no("Conflict", "None", ""),
            Verdict::yes("Synced", "Synced", ""),
            Verdict::yes("Ready", "Synced", ""),
        ]),
        Err(ClientError::Refused { code, message, what })
            if !ErrorCode::from_code(code).is_some_and(kafka_client::is_retriable) =>
        {
            let text = message.unwrap_or_else(|| format!("{what}: error {code}"));
            refused("Synced", "Refused", text)
        }
        Err(error) => Err(Failure::DataPlane(error.to_string())),
    }
}

/// Brings the topic to what the object says.
async fn hold(
    connection: &Connection,
    topic: &Topic,
    name: &str,
    status: &mut TopicStatus,
) -> Result<(), ClientError> {
    let mut found = look(connection, name).await?;
    if found.is_none() {
        create(connection, topic, name).await?;
        found = look(connection, name).await?;
    }
    let Some((id, partitions)) = found else {
        let message = Some("the topic was made and is not seen yet".to_owned());
        let code = ErrorCode::UnknownTopicOrPartition.code();
        return Err(ClientError::Refused { what: format!("topic {name}"), code, message });
    };
    if partitions < topic.spec.partitions {
        grow(connection, name, topic.spec.partitions).await?;
    }
    let (wanted, present) = (configs(topic), described(connection, name).await?);
    let set: Vec<(&String, Option<&String>)> = wanted
        .iter()
        .filter(|(key, value)| present.get(*key) != Some(*value))
        .map(|(key, value)| (key, Some(value)))
        .collect();
    // What the object does not say has its default.
    let unset = present.keys().filter(|key| !wanted.contains_key(*key)).map(|key| (key, None));
    let changes: Vec<(&String, Option<&String>)> = set.into_iter().chain(unset).collect();
    if !changes.is_empty() {
        alter(connection, name, &changes).await?;
    }
    status.topic_id = Some(id);
    status.partitions = Some(partitions.max(topic.spec.partitions));
    Ok(())
}

fn configs(topic: &Topic) -> BTreeMap<String, String> {
    let mut configs = topic.spec.config.clone();
    configs.extend(topic.spec.lanes.as_ref().map(|lanes| (LANES.to_owned(), lanes.enabled.to_string())));
    configs
}

/// Id and number of partitions.
async fn look(connection: &Connection, name: &str) -> Result<Option<(String, i32)>, ClientError> {
    let asked = MetadataRequestTopic::default().with_name(Some(text(name).into()));
    let request =
        MetadataRequest::default().with_topics(Some(vec![asked])).with_allow_auto_topic_creation(false);
    let answer = connection.call(&request).await?;
    let Some(topic) = answer.topics.into_iter().next() else { return Ok(None) };
    if topic.error_code == ErrorCode::UnknownTopicOrPartition.code() {
        return Ok(None);
    }
    ClientError::check(|| format!("topic {name}"), topic.error_code, None)?;
    let partitions = i32::try_from(topic.partitions.len()).unwrap_or(i32::MAX);
    Ok(Some((topic.topic_id.to_string(), partitions)))
}

async fn create(connection: &Connection, topic: &Topic, name: &str) -> Result<(), ClientError> {
    let configs = configs(topic).into_iter().map(|(key, value)| {
        CreatableTopicConfig::default().with_name(text(&key)).with_value(Some(text(&value)))
    });
    let wanted = CreatableTopic::default()
        .with_name(text(name).into())
        .with_num_partitions(topic.spec.partitions)
        .with_replication_factor(-1)
        .with_configs(configs.collect());
    let request = CreateTopicsRequest::default().with_topics(vec![wanted]).with_timeout_ms(TIMEOUT_MS);
    for result in connection.call(&request).await?.topics {
        if result.error_code != ErrorCode::TopicAlreadyExists.code() {
            let message = result.error_message.as_ref().map(ToString::to_string);
            ClientError::check(|| format!("topic {name}"), result.error_code, message)?;
        }
    }
    Ok(())
}

async fn grow(connection: &Connection, name: &str, count: i32) -> Result<(), ClientError> {
    let topic = CreatePartitionsTopic::default()
        .with_name(text(name).into())
        .with_count(count)
        .with_assignments(None);
    let request = CreatePartitionsRequest::default().with_topics(vec![topic]).with_timeout_ms(TIMEOUT_MS);
    for result in connection.call(&request).await?.results {
        let message = result.error_message.as_ref().map(ToString::to_string);
        ClientError::check(|| format!("topic {name}"), result.error_code, message)?;
    }
    Ok(())
}

/// What is configured of the topic itself, without what it takes from the broker.
async fn described(connection: &Connection, name: &str) -> Result<BTreeMap<String, String>, ClientError> {
    let resource = DescribeConfigsResource::default()
        .with_resource_type(TOPIC)
        .with_resource_name(text(name))
        .with_configuration_keys(None);
    let request = DescribeConfigsRequest::default().with_resources(vec![resource]);
    let mut configs = BTreeMap::new();
    for result in connection.call(&request).await?.results {
        let message = result.error_message.as_ref().map(ToString::to_string);
        ClientError::check(|| format!("topic {name}"), result.error_code, message)?;
        for config in result.configs.into_iter().filter(|config| config.config_source == OF_THE_TOPIC) {
            configs.insert(
                config.name.to_string(),
                config.value.map(|value| value.to_string()).unwrap_or_default(),
            );
        }
    }
    Ok(configs)
}

async fn alter(
    connection: &Connection,
    name: &str,
    changes: &[(&String, Option<&String>)],
) -> Result<(), ClientError> {
    let configs = changes.iter().map(|(key, value)| {
        AlterableConfig::default()
            .with_name(text(key))
            .with_config_operation(if value.is_some() { SET } else { DELETE })
            .with_value(value.map(|value| text(value)))
    });
    let resource = AlterConfigsResource::default()
        .with_resource_type(TOPIC)
        .with_resource_name(text(name))
        .with_configs(configs.collect());
    let request = IncrementalAlterConfigsRequest::default().with_resources(vec![resource]);
    for result in connection.call(&request).await?.responses {
        let message = result.error_message.as_ref().map(ToString::to_string);
        ClientError::check(|| format!("topic {name}"), result.error_code, message)?;
    }
    Ok(())
}

/// Lets the object go, and the topic with it where that is what it says.
async fn end(cx: &Context, topic: &Topic) -> Reconciled {
    let namespace = topic.namespace().unwrap_or_default();
    let ours = topic.finalizers().iter().any(|finalizer| finalizer == FINALIZER);
    let region = Region::find_now(cx, &namespace, &topic.spec.cluster_ref.name).await?;
    // With a cluster that is gone, or going, there is nothing to wait for.
    if let Some(region) = region
        && ours
        && topic.spec.deletion_policy == DeletionPolicy::Delete
        && earlier(cx, topic).is_none()
    {
        match remove(cx, &region, topic).await {
            Ok(()) => {}
            Err(Failure::DataPlane(why)) if has_brokers(cx, &region).await? => {
                let text = format!("the topic is not deleted yet: {why}");
                let mut status = topic.status.clone().unwrap_or_default();
                let verdicts = [Verdict::no("Ready", "DeletionWaits", text)];
                status.conditions = after(&status.conditions, &verdicts, topic.metadata.generation);
                cx.status(topic, topic.status.as_ref(), &status).await?;
                return Ok(Again(SOON));
            }
            // Nobody is there to delete it, and nobody may come: the object is not held for that.
            Err(Failure::DataPlane(_)) => {
                let note = "the cluster has no broker: its object goes, the topic stays".to_owned();
                cx.event(topic, EventType::Warning, "TopicLeft", "Delete", note).await;
            }
            Err(other) => return Err(other),
        }
    }
    cx.finalizer(topic, FINALIZER, false).await?;
    Ok(Again(LOOK))
}

async fn remove(cx: &Context, region: &Region, topic: &Topic) -> Result<(), Failure> {
    let connection = region.kafka(cx).await?;
    let deleted = delete(&connection, &topic.topic_name()).await;
    deleted.map_err(|error| Failure::DataPlane(error.to_string()))
}

/// Whether any pool of the cluster is to have a broker.
async fn has_brokers(cx: &Context, region: &Region) -> Result<bool, Failure> {
    let pools = cx.api::<BrokerPool>(&region.names.namespace).list(&ListParams::default()).await?;
    Ok(pools.items.iter().any(|pool| {
        pool.spec.cluster_ref.name == region.names.cluster
            && pool.metadata.deletion_timestamp.is_none()
            && pool.spec.replicas > 0
    }))
}

async fn delete(connection: &Connection, name: &str) -> Result<(), ClientError> {
    let version = connection.version_of::<DeleteTopicsRequest>(6)?;
    let named = kafka::messages::TopicName::from(text(name));
    let mut request = DeleteTopicsRequest::default().with_timeout_ms(TIMEOUT_MS);
    match version >= 6 {
        true => request.topics = vec![DeleteTopicState::default().with_name(Some(named))],
        false => request.topic_names = vec![named],
    }
    for result in connection.call_at(version, &request).await?.responses {
        if result.error_code != ErrorCode::UnknownTopicOrPartition.code() {
            let message = result.error_message.as_ref().map(ToString::to_string);
            ClientError::check(|| format!("topic {name}"), result.error_code, message)?;
        }
    }
    Ok(())
}

/// Another object that had this topic of this cluster first.
fn earlier(cx: &Context, topic: &Topic) -> Option<String> {
    // Of thousands, each is compared with each: by what differs most, and nothing is copied for it.
    let is_same = |other: &Topic| {
        other.named() == topic.named()
            && other.metadata.name != topic.metadata.name
            && other.metadata.namespace == topic.metadata.namespace
            && other.metadata.deletion_timestamp.is_none()
            && other.spec.cluster_ref == topic.spec.cluster_ref
            && rank(other) < rank(topic)
    };
    cx.topics.get()?.find(is_same).map(|other| other.name_any())
}

/// Who has it goes before who has it not, and the older one before the younger. Kubernetes knows seconds only.
fn rank(topic: &Topic) -> (bool, Option<jiff::Timestamp>, String) {
    let has = topic.status.as_ref().is_some_and(|status| status.topic_id.is_some());
    (!has, topic.creation_timestamp().map(|time| time.0), topic.name_any())
}

async fn tell(cx: &Context, topic: &Topic, verdicts: &[Verdict]) {
    let Some(ready) = verdicts.iter().find(|verdict| verdict.type_ == "Ready") else { return };
    let before =
        topic.status.as_ref().and_then(|status| status.conditions.iter().find(|was| was.type_ == "Ready"));
    if ready.status == Status::True || before.is_some_and(|was| was.reason == ready.reason) {
        return;
    }
    cx.event(topic, EventType::Warning, ready.reason, "Reconcile", ready.message.clone()).await;
}

fn text(text: &str) -> StrBytes {
    StrBytes::from_string(text.to_owned())
}

const FINALIZER: &str = "sealane.io/topic";
const LANES: &str = "sealane.lanes";
const LOOK: Duration = Duration::from_secs(60);
const SOON: Duration = Duration::from_secs(5);
const LOOKS_PER_SECOND: u64 = 20;
const TIMEOUT_MS: i32 = 30_000;
/// Kinds of resources and operations, and the source of a configuration, as Kafka numbers them.
const TOPIC: i8 = 2;
const SET: i8 = 0;
const DELETE: i8 = 1;
const OF_THE_TOPIC: i8 = 1;
