//! DescribeConfigs, AlterConfigs, IncrementalAlterConfigs (KIP-339), ListConfigResources (KIP-1142).
//!
//! Topic settings can be changed; the broker's own come from its configuration file and are shown
//! only. Unknown keys are left out of a description and named in a refusal.

use std::collections::HashSet;

use bytes::Bytes;
use kafka::frame::RequestHeader;
use kafka::messages::alter_configs_request::{AlterConfigsResource, AlterableConfig};
use kafka::messages::describe_configs_request::DescribeConfigsResource;
use kafka::messages::describe_configs_response::{
    DescribeConfigsResourceResult, DescribeConfigsResult, DescribeConfigsSynonym,
};
use kafka::messages::incremental_alter_configs_request::AlterConfigsResource as IncrementalResource;
use kafka::messages::list_config_resources_response::ConfigResource;
use kafka::messages::{
    AlterConfigsRequest, AlterConfigsResponse, DescribeConfigsRequest, DescribeConfigsResponse,
    IncrementalAlterConfigsRequest, IncrementalAlterConfigsResponse, ListConfigResourcesRequest,
    ListConfigResourcesResponse, alter_configs_response, incremental_alter_configs_response,
};
use kafka::{ErrorCode, StrBytes, TopicName};

use super::message::{self, Refusal, text};
use super::{Answer, Body, Ctx};
use crate::broker::Broker;
use crate::configs::{
    BrokerKey, BrokerValues, ConfigError, Overrides, Source, TOPIC_KEYS, TopicKey, broker_keys,
};
use crate::partition::Durability;
use crate::topics::{ConfigChange, ConfigOp, Topic};

const TOPIC: i8 = 2;
const BROKER: i8 = 4;
/// Topics, brokers, their loggers, client metrics, groups: what ListConfigResources may be asked for.
const RESOURCE_KINDS: [i8; 5] = [TOPIC, BROKER, 8, 16, 32];

pub fn describe(ctx: &Ctx, header: &RequestHeader, body: Bytes) -> Answer {
    let request: DescribeConfigsRequest = match message::read(header, body) {
        Ok(request) => request,
        Err(answer) => return answer,
    };
    let result = |resource: &DescribeConfigsResource| {
        let result = DescribeConfigsResult::default()
            .with_resource_type(resource.resource_type)
            .with_resource_name(resource.resource_name.clone());
        match describe_one(ctx, resource, &request) {
            Ok(configs) => result.with_configs(configs),
            Err((error, reason)) => {
                result.with_error_code(error.code()).with_error_message(Some(text(reason)))
            }
        }
    };
    let results = request.resources.iter().map(result).collect();
    Answer::message(&DescribeConfigsResponse::default().with_results(results), header.api_version)
}

fn describe_one(
    ctx: &Ctx,
    resource: &DescribeConfigsResource,
    request: &DescribeConfigsRequest,
) -> Result<Vec<DescribeConfigsResourceResult>, Refusal> {
    // Kafka takes an empty list of keys as null: all of them.
    let keys = resource.configuration_keys.as_ref().filter(|keys| !keys.is_empty());
    let asked = |name: &str| keys.is_none_or(|keys| keys.iter().any(|key| key.as_str() == name));
    match resource.resource_type {
        TOPIC => {
            let topic = topic_of(ctx, &resource.resource_name)?;
            let shown = |key: &&TopicKey| !key.hidden || topic.overrides.contains_key(key.name);
            let keys = TOPIC_KEYS.iter().filter(shown).filter(|key| asked(key.name));
            Ok(keys.map(|key| topic_entry(ctx, &topic, key, request)).collect())
        }
        BROKER => {
            if !is_this_broker(ctx, &resource.resource_name)? {
                return Ok(Vec::new());
            }
            let keys = broker_keys(&broker_values(ctx), ctx.broker.topics.defaults());
            Ok(keys
                .into_iter()
                .filter(|key| asked(&key.name))
                .map(|key| broker_entry(key, request))
                .collect())
        }
        other => Err((ErrorCode::InvalidRequest, format!("Unsupported resource type: {other}"))),
    }
}

fn topic_of(ctx: &Ctx, name: &str) -> Result<std::sync::Arc<Topic>, Refusal> {
    if let Err(error) = TopicName::parse(name) {
        return Err((ErrorCode::InvalidTopicException, error.to_string()));
    }
    let unknown =
        || (ErrorCode::UnknownTopicOrPartition, "This server does not host this topic-partition.".to_owned());
    ctx.broker.topics.by_name(name).ok_or_else(unknown)
}

/// False for the empty name: the dynamic defaults of all brokers, of which there are none.
fn is_this_broker(ctx: &Ctx, name: &str) -> Result<bool, Refusal> {
    let id = ctx.broker.identity.broker_id.0;
    match name {
        "" => Ok(false),
        name if name.parse() == Ok(id) => Ok(true),
        other => Err((
            ErrorCode::InvalidRequest,
            format!("Unexpected broker id, expected {id} or empty string, but received {other}"),
        )),
    }
}

fn topic_entry(
    ctx: &Ctx,
    topic: &Topic,
    key: &TopicKey,
    request: &DescribeConfigsRequest,
) -> DescribeConfigsResourceResult {
    let defaults = ctx.broker.topics.defaults();
    let (value, source) = defaults.value(key, &topic.overrides);
    let mut entry = DescribeConfigsResourceResult::default()
        .with_name(text(key.name))
        .with_value(Some(text(value)))
        .with_config_source(source as i8)
        .with_config_type(key.kind as i8)
        .with_documentation(None);
    if request.include_synonyms {
        let synonyms = defaults.synonyms(key, &topic.overrides);
        entry.synonyms = synonyms.into_iter().map(|s| synonym(&s.name, Some(&s.value), s.source)).collect();
    }
    if request.include_documentation {
        entry.documentation = Some(text(key.doc));
    }
    entry
}

fn broker_entry(key: BrokerKey, request: &DescribeConfigsRequest) -> DescribeConfigsResourceResult {
    let value = key.value.as_deref().filter(|_| !key.sensitive);
    let mut entry = DescribeConfigsResourceResult::default()
        .with_name(text(key.name.as_str()))
        .with_value(value.map(text))
        .with_read_only(true)
        .with_config_source(key.source as i8)
        .with_is_sensitive(key.sensitive)
        .with_config_type(key.kind as i8)
        .with_documentation(None);
    if request.include_synonyms && value.is_some() {
        entry.synonyms = vec![synonym(&key.name, value, key.source)];
    }
    if request.include_documentation {
        entry.documentation = Some(text(key.doc));
    }
    entry
}

fn synonym(name: &str, value: Option<&str>, source: Source) -> DescribeConfigsSynonym {
    DescribeConfigsSynonym::default()
        .with_name(text(name))
        .with_value(value.map(text))
        .with_source(source as i8)
}

fn broker_values(ctx: &Ctx) -> BrokerValues {
    let broker: &Broker = &ctx.broker;
    let config = &broker.config;
    let public = || broker.listeners.iter().filter(|listener| !listener.internal);
    let binds = config.listeners.iter().filter(|listener| !listener.internal);
    let listed = |name: &str, address: &str| format!("{}://{address}", name.to_ascii_uppercase());
    let groups = broker.coordinator.config();
    BrokerValues {
        broker_id: broker.identity.broker_id.0,
        listeners: binds.map(|listener| listed(&listener.name, &listener.bind)).collect::<Vec<_>>().join(","),
        advertised_listeners: public()
            .map(|l| listed(&l.name, &format!("{}:{}", l.advertised_host, l.advertised_port)))
            .collect::<Vec<_>>()
            .join(","),
        data_dir: config.data_dir.display().to_string(),
        num_partitions: config.num_partitions,
        auto_create_topics: config.auto_create_topics,
        request_bytes_max: config.request_bytes_max as usize,
        connections_max: config.connections_max as usize,
        connections_idle_ms: config.connection_idle_ms as i64,
        offsets_retention_minutes: config.offsets_retention_minutes,
        offsets_partitions: config.offsets_partitions,
        group_session_timeout_min_ms: *groups.session_timeout_ms.start(),
        group_session_timeout_max_ms: *groups.session_timeout_ms.end(),
        group_initial_rebalance_delay_ms: config.group_initial_rebalance_delay_ms as i32,
        control_address: Some(control_address(config)).filter(|address| !address.is_empty()),
        region: broker.identity.region.to_string(),
        durability: match config.durability {
            Durability::Sync => "sync",
            Durability::Os => "os",
        },
    }
}

/// `https://` before it says that the service speaks TLS.
fn control_address(config: &crate::config::Config) -> String {
    let told = !config.control_advertised.is_empty();
    let address = if told { &config.control_advertised } else { &config.control_bind };
    let scheme = if config.control_tls.is_some() { "https://" } else { "" };
    format!("{scheme}{address}")
}

/// AlterConfigs: a resource's settings are replaced by what is named.
pub fn alter(ctx: &Ctx, header: &RequestHeader, body: Bytes) -> Answer {
    let request: AlterConfigsRequest = match message::read(header, body) {
        Ok(request) => request,
        Err(answer) => return answer,
    };
    let (ctx, version) = (ctx.clone(), header.api_version);
    let asked = |resource: AlterConfigsResource| Asked {
        kind: resource.resource_type,
        change: replacement(&resource.configs),
        name: resource.resource_name,
    };
    let asked: Vec<Asked> = request.resources.into_iter().map(asked).collect();
    Answer::Later(Box::pin(async move {
        let told = change_each(&ctx, asked, request.validate_only).await.into_iter().map(|told| {
            alter_configs_response::AlterConfigsResourceResponse::default()
                .with_error_code(told.error)
                .with_error_message(told.reason)
                .with_resource_type(told.kind)
                .with_resource_name(told.name)
        });
        Body::message(&AlterConfigsResponse::default().with_responses(told.collect()), version)
    }))
}

/// IncrementalAlterConfigs: settings change one by one.
pub fn alter_incrementally(ctx: &Ctx, header: &RequestHeader, body: Bytes) -> Answer {
    let request: IncrementalAlterConfigsRequest = match message::read(header, body) {
        Ok(request) => request,
        Err(answer) => return answer,
    };
    let (ctx, version) = (ctx.clone(), header.api_version);
    let asked = |resource: IncrementalResource| Asked {
        kind: resource.resource_type,
        change: operations(resource.configs.iter().map(|c| (&c.name, c.config_operation, &c.value))),
        name: resource.resource_name,
    };
    let asked: Vec<Asked> = request.resources.into_iter().map(asked).collect();
    Answer::Later(Box::pin(async move {
        let told = change_each(&ctx, asked, request.validate_only).await.into_iter().map(|told| {
            incremental_alter_configs_response::AlterConfigsResourceResponse::default()
                .with_error_code(told.error)
                .with_error_message(told.reason)
                .with_resource_type(told.kind)
                .with_resource_name(told.name)
        });
        Body::message(&IncrementalAlterConfigsResponse::default().with_responses(told.collect()), version)
    }))
}

/// What a request wants of one resource, or why it cannot be had.
struct Asked {
    kind: i8,
    name: StrBytes,
    change: Result<ConfigChange, Refusal>,
}

/// What became of it.
struct Told {
    kind: i8,
    name: StrBytes,
    error: i16,
    reason: Option<StrBytes>,
}

async fn change_each(ctx: &Ctx, asked: Vec<Asked>, only_check: bool) -> Vec<Told> {
    let repeated = message::repeated(asked.iter().map(|asked| (asked.kind, asked.name.clone())));
    let mut all = Vec::with_capacity(asked.len());
    for Asked { kind, name, change } in asked {
        let outcome = match repeated.contains(&(kind, name.clone())) {
            true => Err((ErrorCode::InvalidRequest, "Each resource must appear at most once.".to_owned())),
            false => match change {
                Ok(change) => change_one(ctx, kind, &name, change, only_check).await,
                Err(refused) => Err(refused),
            },
        };
        let (error, reason) = match outcome {
            Ok(()) => (ErrorCode::None, None),
            Err((error, reason)) => (error, Some(text(reason))),
        };
        all.push(Told { kind, name, error: error.code(), reason });
    }
    all
}

fn replacement(configs: &[AlterableConfig]) -> Result<ConfigChange, Refusal> {
    let mut overrides = Overrides::new();
    for config in configs {
        let value = config.value.as_ref().ok_or_else(|| null(&config.name))?;
        if overrides.insert(config.name.to_string(), value.to_string()).is_some() {
            return Err(duplicate_key(&config.name));
        }
    }
    Ok(ConfigChange::Replace(overrides))
}

fn operations<'a>(
    configs: impl Iterator<Item = (&'a StrBytes, i8, &'a Option<StrBytes>)>,
) -> Result<ConfigChange, Refusal> {
    let mut operations = Vec::new();
    let mut names = HashSet::new();
    for (name, operation, value) in configs {
        if !names.insert(name.as_str()) {
            return Err(duplicate_key(name));
        }
        let value = || value.as_ref().map(|value| value.to_string()).ok_or_else(|| null(name));
        let operation = match operation {
            0 => ConfigOp::Set(value()?),
            1 => ConfigOp::Delete,
            2 => ConfigOp::Append(value()?),
            3 => ConfigOp::Subtract(value()?),
            other => return Err((ErrorCode::InvalidRequest, format!("Unknown config operation {other}"))),
        };
        operations.push((name.to_string(), operation));
    }
    Ok(ConfigChange::Each(operations))
}

async fn change_one(
    ctx: &Ctx,
    kind: i8,
    name: &str,
    change: ConfigChange,
    only_check: bool,
) -> Result<(), Refusal> {
    match kind {
        TOPIC => {
            topic_of(ctx, name)?;
            if only_check {
                let checked = ctx.broker.topics.check_alter(name, &change);
                return checked.map(|_| ()).map_err(|error| (error.code(), error.to_string()));
            }
            ctx.broker
                .alter_topic(name, &change)
                .await
                .map(|_| ())
                .map_err(|error| (error.code(), error.to_string()))
        }
        BROKER => {
            is_this_broker(ctx, name)?;
            let reason = "The settings of a broker come from its configuration file; change them there and restart it.";
            Err((ErrorCode::InvalidRequest, reason.to_owned()))
        }
        other => Err((ErrorCode::InvalidRequest, format!("Unsupported resource type: {other}"))),
    }
}

fn null(name: &str) -> Refusal {
    (ErrorCode::InvalidRequest, ConfigError::Null(name.to_owned()).to_string())
}

fn duplicate_key(name: &str) -> Refusal {
    (ErrorCode::InvalidRequest, format!("Error due to duplicate config keys : {name}"))
}

/// Version 0 knows client metrics alone, of which there are none.
pub fn list_resources(ctx: &Ctx, header: &RequestHeader, body: Bytes) -> Answer {
    let request: ListConfigResourcesRequest = match message::read(header, body) {
        Ok(request) => request,
        Err(answer) => return answer,
    };
    if header.api_version >= 1 && request.resource_types.iter().any(|kind| !RESOURCE_KINDS.contains(kind)) {
        let refused =
            ListConfigResourcesResponse::default().with_error_code(ErrorCode::UnsupportedVersion.code());
        return Answer::message(&refused, header.api_version);
    }
    let mut resources = Vec::new();
    let asked = |kind| {
        header.api_version >= 1
            && (request.resource_types.is_empty() || request.resource_types.contains(&kind))
    };
    let resource =
        |name: &str, kind| ConfigResource::default().with_resource_name(text(name)).with_resource_type(kind);
    if asked(TOPIC) {
        resources.extend(ctx.broker.topics.all().iter().map(|topic| resource(topic.name.as_str(), TOPIC)));
    }
    if asked(BROKER) {
        resources.push(resource(&ctx.broker.identity.broker_id.to_string(), BROKER));
    }
    let response = ListConfigResourcesResponse::default().with_config_resources(resources);
    Answer::message(&response, header.api_version)
}
