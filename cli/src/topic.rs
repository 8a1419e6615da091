//! `sealane topic`: create, list, describe, alter, delete.
//! Kafka's own requests, so that any other tool can do the same.

use std::collections::BTreeMap;

use anyhow::bail;
use kafka::messages::create_partitions_request::{CreatePartitionsRequest, CreatePartitionsTopic};
use kafka::messages::create_topics_request::{CreatableTopic, CreatableTopicConfig, CreateTopicsRequest};
use kafka::messages::delete_topics_request::{DeleteTopicState, DeleteTopicsRequest};
use kafka::messages::incremental_alter_configs_request::{
    AlterConfigsResource, AlterableConfig, IncrementalAlterConfigsRequest,
};
use kafka_client::ClientError;
use serde::Serialize;

use crate::args::{Named, Topic, TopicAlter, TopicCreate, TopicDescribe, TopicList};
use crate::output::{Table, show};
use crate::region::{Config, EARLIEST, LATEST, Region, TOPIC_RESOURCE, text};

pub async fn run(command: Topic) -> anyhow::Result<()> {
    match command {
        Topic::Create(args) => create(args).await,
        Topic::List(args) => list(args).await,
        Topic::Describe(args) => describe(args).await,
        Topic::Alter(args) => alter(args).await,
        Topic::Delete(args) => delete(args).await,
    }
}

#[derive(Serialize)]
struct Created {
    topic: String,
    id: String,
    partitions: i32,
}

async fn create(args: TopicCreate) -> anyhow::Result<()> {
    let region = Region::new(&args.server)?;
    let config = |(key, value): &(String, String)| {
        CreatableTopicConfig::default().with_name(text(key)).with_value(Some(text(value)))
    };
    let topic = CreatableTopic::default()
        .with_name(text(&args.name).into())
        .with_num_partitions(args.partitions.unwrap_or(-1))
        .with_replication_factor(-1)
        .with_configs(args.config.iter().map(config).collect());
    let request = CreateTopicsRequest::default().with_topics(vec![topic]).with_timeout_ms(TIMEOUT_MS);
    let answer = region.kafka.controller().await?.call(&request).await?;
    for result in answer.topics {
        let message = result.error_message.as_ref().map(ToString::to_string);
        ClientError::check(|| format!("topic {}", args.name), result.error_code, message)?;
        let created = Created {
            topic: args.name.clone(),
            id: result.topic_id.to_string(),
            partitions: result.num_partitions,
        };
        let partitions = plural(created.partitions, "partition");
        show(args.output.output, &created, || format!("topic {} created, {partitions}\n", args.name))?;
    }
    Ok(())
}

#[derive(Serialize)]
struct Listed {
    name: String,
    id: String,
    partitions: usize,
    internal: bool,
}

async fn list(args: TopicList) -> anyhow::Result<()> {
    let region = Region::new(&args.server)?;
    let topics = region.kafka.topics().await?.into_iter().filter(|topic| args.internal || !topic.is_internal);
    let topics: Vec<Listed> = topics
        .map(|topic| Listed {
            name: topic.name,
            id: topic.id.to_string(),
            partitions: topic.partitions.len(),
            internal: topic.is_internal,
        })
        .collect();
    show(args.output.output, &topics, || {
        let mut table = Table::new(&["TOPIC", "PARTITIONS", "ID"]);
        for topic in &topics {
            table.row([topic.name.clone(), topic.partitions.to_string(), topic.id.clone()]);
        }
        if table.is_empty() { "no topics\n".to_owned() } else { table.text() }
    })?;
    Ok(())
}

#[derive(Serialize)]
struct Described {
    name: String,
    id: String,
    partitions: Vec<Partition>,
    configs: Vec<Config>,
}

#[derive(Serialize)]
struct Partition {
    index: i32,
    leader: i32,
    leader_epoch: i32,
    log_start: i64,
    log_end: i64,
}

async fn describe(args: TopicDescribe) -> anyhow::Result<()> {
    let region = Region::new(&args.server)?;
    let topic = region.kafka.topic(&args.name, false).await?;
    let indexes: Vec<i32> = topic.partitions.iter().map(|partition| partition.index).collect();
    let starts = region.offsets(&args.name, &indexes, EARLIEST).await?;
    let ends = region.offsets(&args.name, &indexes, LATEST).await?;
    let configs = region.configs(TOPIC_RESOURCE, Some(&args.name), None).await?;
    let at = |offsets: &BTreeMap<i32, i64>, index| offsets.get(&index).copied().unwrap_or(-1);
    let partition = |partition: &kafka_client::PartitionMetadata| Partition {
        index: partition.index,
        leader: partition.leader.0,
        leader_epoch: partition.leader_epoch.0,
        log_start: at(&starts, partition.index),
        log_end: at(&ends, partition.index),
    };
    let described = Described {
        name: topic.name.clone(),
        id: topic.id.to_string(),
        partitions: topic.partitions.iter().map(partition).collect(),
        configs,
    };
    show(args.output.output, &described, || description(&described, args.all))?;
    Ok(())
}

fn description(topic: &Described, all: bool) -> String {
    let mut table = Table::new(&["PARTITION", "LEADER", "EPOCH", "LOG START", "LOG END"]);
    for partition in &topic.partitions {
        table.row([
            partition.index.to_string(),
            partition.leader.to_string(),
            partition.leader_epoch.to_string(),
            partition.log_start.to_string(),
            partition.log_end.to_string(),
        ]);
    }
    let mut out = format!("topic {}  id {}\n\n{}", topic.name, topic.id, table.text());
    let mut configs = Table::new(&["CONFIG", "VALUE", "SET"]);
    let lanes = topic.configs.iter().any(|c| c.name == LANES && c.value.as_deref() == Some("true"));
    // What names a record's lane is told where it matters.
    let told = |config: &&Config| all || !config.is_default || (lanes && config.name == LANE_EXTRACTORS);
    for config in topic.configs.iter().filter(told) {
        let set = if config.is_default { "default" } else { "here" };
        configs.row([config.name.clone(), config.value.clone().unwrap_or_default(), set.to_owned()]);
    }
    out.push_str(&match configs.is_empty() {
        true => "\nall configuration is at its default (--all shows it)\n".to_owned(),
        false => format!("\n{}", configs.text()),
    });
    out
}

async fn alter(args: TopicAlter) -> anyhow::Result<()> {
    if args.partitions.is_none() && args.config.is_empty() && args.unset.is_empty() {
        bail!("nothing to change: give --partitions, --config or --unset");
    }
    let region = Region::new(&args.server)?;
    // An unknown topic is refused before anything is changed.
    region.kafka.topic(&args.name, false).await?;
    if !args.config.is_empty() || !args.unset.is_empty() {
        alter_configs(&region, &args).await?;
    }
    if let Some(count) = args.partitions {
        grow(&region, &args.name, count).await?;
    }
    region.kafka.forget(&args.name);
    let configs = region.configs(TOPIC_RESOURCE, Some(&args.name), None).await?;
    show(args.output.output, &configs, || format!("topic {} changed\n", args.name))?;
    Ok(())
}

async fn alter_configs(region: &Region, args: &TopicAlter) -> anyhow::Result<()> {
    let set = args.config.iter().map(|(key, value)| {
        AlterableConfig::default()
            .with_name(text(key))
            .with_config_operation(SET)
            .with_value(Some(text(value)))
    });
    let unset = args.unset.iter().map(|key| {
        AlterableConfig::default().with_name(text(key)).with_config_operation(DELETE).with_value(None)
    });
    let resource = AlterConfigsResource::default()
        .with_resource_type(TOPIC_RESOURCE)
        .with_resource_name(text(&args.name))
        .with_configs(set.chain(unset).collect());
    let request = IncrementalAlterConfigsRequest::default().with_resources(vec![resource]);
    let answer = region.kafka.controller().await?.call(&request).await?;
    for result in answer.responses {
        let message = result.error_message.as_ref().map(ToString::to_string);
        ClientError::check(|| format!("topic {}", args.name), result.error_code, message)?;
    }
    Ok(())
}

async fn grow(region: &Region, name: &str, count: i32) -> anyhow::Result<()> {
    let topic = CreatePartitionsTopic::default()
        .with_name(text(name).into())
        .with_count(count)
        .with_assignments(None);
    let request = CreatePartitionsRequest::default().with_topics(vec![topic]).with_timeout_ms(TIMEOUT_MS);
    let answer = region.kafka.controller().await?.call(&request).await?;
    for result in answer.results {
        let message = result.error_message.as_ref().map(ToString::to_string);
        ClientError::check(|| format!("topic {name}"), result.error_code, message)?;
    }
    Ok(())
}

#[derive(Serialize)]
struct Deleted {
    topic: String,
}

async fn delete(args: Named) -> anyhow::Result<()> {
    let region = Region::new(&args.server)?;
    let connection = region.kafka.controller().await?;
    let version = connection.version_of::<DeleteTopicsRequest>(6)?;
    let name = kafka::messages::TopicName::from(text(&args.name));
    let mut request = DeleteTopicsRequest::default().with_timeout_ms(TIMEOUT_MS);
    if version >= 6 {
        request.topics = vec![DeleteTopicState::default().with_name(Some(name))];
    } else {
        request.topic_names = vec![name];
    }
    let answer = connection.call_at(version, &request).await?;
    for result in answer.responses {
        let message = result.error_message.as_ref().map(ToString::to_string);
        ClientError::check(|| format!("topic {}", args.name), result.error_code, message)?;
    }
    let deleted = Deleted { topic: args.name };
    show(args.output.output, &deleted, || format!("topic {} deleted\n", deleted.topic))?;
    Ok(())
}

/// `1 partition`, `2 partitions`.
pub fn plural(count: i32, thing: &str) -> String {
    if count == 1 { format!("1 {thing}") } else { format!("{count} {thing}s") }
}

const TIMEOUT_MS: i32 = 30_000;
const LANES: &str = "sealane.lanes";
const LANE_EXTRACTORS: &str = "sealane.lanes.extractors";
/// Operations of IncrementalAlterConfigs.
const SET: i8 = 0;
const DELETE: i8 = 1;
