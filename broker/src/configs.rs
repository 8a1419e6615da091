//! Settings of topics: every key that Apache Kafka 4.4 knows and `sealane.lanes`, with type, default,
//! bounds and meaning; and the read-only view of the broker's own settings.
//!
//! Owns what a key may be set to. A value that would have no effect here although its name promises one
//! is refused with a sentence, never stored in silence. Sources and synonyms answer as Kafka's do.

mod broker_keys;
mod topic_keys;

use std::collections::BTreeMap;
use std::sync::Arc;

use lane_core::Extractors;

use crate::partition::{Checkpoints, Settings};

pub use broker_keys::{BrokerKey, BrokerValues, broker_keys};
pub use topic_keys::TOPIC_KEYS;

/// Values that were set for one topic, by key.
pub type Overrides = BTreeMap<String, String>;

/// Turns lanes on for a topic.
pub const LANES: &str = "sealane.lanes";
/// Which headers name the lane of a record of a topic.
pub const LANE_EXTRACTORS: &str = "sealane.lanes.extractors";
/// Lets consumers in lanes read a topic without lanes.
pub const LANE_REFERENCE: &str = "sealane.lanes.reference";

/// How a value is written, with Kafka's code for it (DescribeConfigs).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Boolean = 1,
    String = 2,
    Int = 3,
    Short = 4,
    Long = 5,
    Double = 6,
    List = 7,
    Password = 9,
}

/// What a value must fulfil beyond its kind.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rule {
    Any,
    /// Inclusive.
    Range(i64, i64),
    Ratio,
    OneOf(&'static [&'static str]),
    /// A list of lane extractors.
    Extractors,
    /// Kafka takes other values; here they would promise what is not there.
    Only(&'static str, &'static str),
}

/// One key of a topic.
#[derive(Clone, Copy, Debug)]
pub struct TopicKey {
    pub name: &'static str,
    pub kind: Kind,
    pub default: &'static str,
    pub rule: Rule,
    /// The broker's settings that stand behind it in Kafka: name and default, the first set one counts.
    pub synonyms: &'static [(&'static str, Option<&'static str>)],
    /// Listed only where it is set.
    pub hidden: bool,
    pub doc: &'static str,
}

/// Where a value comes from, with Kafka's code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    Topic = 1,
    StaticBroker = 4,
    Default = 5,
}

/// Another name under which a value is or could be set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Synonym {
    pub name: String,
    pub value: String,
    pub source: Source,
}

/// Why a setting is refused: shown to people as it is.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    #[error("Unknown topic config name: {0}")]
    Unknown(String),
    #[error("Null value not supported for topic configs: {0}")]
    Null(String),
    #[error("Invalid value {value} for configuration {key}: {reason}")]
    Invalid { key: String, value: String, reason: String },
    #[error("{key}={value} is not supported: {reason}")]
    Unsupported { key: String, value: String, reason: &'static str },
    #[error("Can't {op} to key {key} because its type is not LIST.")]
    NotList { op: &'static str, key: String },
}

/// The key of that name.
pub fn topic_key(name: &str) -> Option<&'static TopicKey> {
    TOPIC_KEYS.iter().find(|key| key.name == name)
}

/// Whether a topic may have this setting.
pub fn check(name: &str, value: &str) -> Result<(), ConfigError> {
    topic_key(name).ok_or_else(|| ConfigError::Unknown(name.to_owned()))?.check(value)
}

pub fn check_all(overrides: &Overrides) -> Result<(), ConfigError> {
    overrides.iter().try_for_each(|(name, value)| check(name, value))
}

impl TopicKey {
    pub fn check(&self, value: &str) -> Result<(), ConfigError> {
        let invalid = |reason: &str| {
            Err(ConfigError::Invalid {
                key: self.name.to_owned(),
                value: value.to_owned(),
                reason: reason.to_owned(),
            })
        };
        let trimmed = value.trim();
        match self.kind {
            Kind::Boolean if !matches!(trimmed.to_ascii_lowercase().as_str(), "true" | "false") => {
                return invalid("Expected value to be either true or false");
            }
            Kind::Int if trimmed.parse::<i32>().is_err() => return invalid("Not a number of type INT"),
            Kind::Long if trimmed.parse::<i64>().is_err() => return invalid("Not a number of type LONG"),
            Kind::Double if trimmed.parse::<f64>().is_err() => return invalid("Not a number of type DOUBLE"),
            _ => {}
        }
        match self.rule {
            Rule::Range(min, _) if trimmed.parse::<i64>().is_ok_and(|number| number < min) => {
                invalid(&format!("Value must be at least {min}"))
            }
            Rule::Range(_, max) if trimmed.parse::<i64>().is_ok_and(|number| number > max) => {
                invalid(&format!("Value must be no more than {max}"))
            }
            Rule::Ratio if !trimmed.parse::<f64>().is_ok_and(|ratio| (0.0..=1.0).contains(&ratio)) => {
                invalid("Value must be between 0 and 1")
            }
            Rule::OneOf(words) if !words.contains(&trimmed) => {
                invalid(&format!("String must be one of: {}", words.join(", ")))
            }
            Rule::Extractors => match Extractors::parse_list(trimmed) {
                Ok(_) => Ok(()),
                Err(error) => invalid(&error.to_string()),
            },
            Rule::Only(word, reason) if trimmed.to_ascii_lowercase() != word => {
                Err(ConfigError::Unsupported { key: self.name.to_owned(), value: value.to_owned(), reason })
            }
            _ => Ok(()),
        }
    }
}

/// The settings that hold where a topic sets nothing: Kafka's, or the broker's own.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TopicDefaults(Overrides, Option<Checkpoints>);

impl TopicDefaults {
    /// `values` are topic keys set for the whole broker.
    pub fn new(values: Overrides) -> Result<TopicDefaults, ConfigError> {
        check_all(&values)?;
        Ok(TopicDefaults(values, None))
    }

    /// Tests have little to write.
    #[cfg(test)]
    pub fn with_checkpoints(self, checkpoints: Checkpoints) -> TopicDefaults {
        TopicDefaults(self.0, Some(checkpoints))
    }

    /// The value that holds for a topic, and where it comes from.
    pub fn value<'a>(&'a self, key: &'a TopicKey, overrides: &'a Overrides) -> (&'a str, Source) {
        if let Some(value) = overrides.get(key.name) {
            return (value, Source::Topic);
        }
        match self.0.get(key.name) {
            Some(value) => (value, Source::StaticBroker),
            None => (key.default, Source::Default),
        }
    }

    /// All places where the value is or could be set, the one that holds first.
    pub fn synonyms(&self, key: &TopicKey, overrides: &Overrides) -> Vec<Synonym> {
        let mut synonyms = Vec::new();
        let mut add = |name: &str, value: &str, source| {
            synonyms.push(Synonym { name: name.to_owned(), value: value.to_owned(), source });
        };
        if let Some(value) = overrides.get(key.name) {
            add(key.name, value, Source::Topic);
        }
        if let Some(value) = self.0.get(key.name) {
            add(key.synonyms.first().map_or(key.name, |(name, _)| name), value, Source::StaticBroker);
        }
        for (name, default) in key.synonyms {
            if let Some(default) = default {
                add(name, default, Source::Default);
            }
        }
        synonyms
    }

    /// The default of one topic key for the whole broker.
    pub fn broker_value<'a>(&'a self, key: &'a TopicKey) -> (&'a str, Source) {
        self.0.get(key.name).map_or((key.default, Source::Default), |value| (value, Source::StaticBroker))
    }

    /// What the partitions of a topic need to know. Values were checked when they were set.
    pub fn settings(&self, overrides: &Overrides) -> Settings {
        let text = |name: &str| topic_key(name).map_or("", |key| self.value(key, overrides).0.trim());
        let number = |name: &str| text(name).parse::<i64>().unwrap_or_default();
        let limit = |name: &str| Some(number(name)).filter(|limit| *limit >= 0);
        let segment_bytes = match overrides.contains_key(topic_keys::INTERNAL_SEGMENT_BYTES) {
            true => number(topic_keys::INTERNAL_SEGMENT_BYTES),
            false => number("segment.bytes"),
        };
        Settings {
            segment_bytes: segment_bytes as u32,
            segment_ms: number("segment.ms"),
            index_interval_bytes: number("index.interval.bytes") as u32,
            max_message_bytes: number("max.message.bytes") as usize,
            retention_bytes: limit("retention.bytes").map(|bytes| bytes as u64),
            retention_ms: limit("retention.ms"),
            log_append_time: text("message.timestamp.type") == "LogAppendTime",
            timestamp_before_max_ms: number("message.timestamp.before.max.ms"),
            timestamp_after_max_ms: number("message.timestamp.after.max.ms"),
            lanes: text(LANES).eq_ignore_ascii_case("true"),
            lane_extractors: Arc::new(
                Extractors::parse_list(text(LANE_EXTRACTORS)).unwrap_or_else(|_| Extractors::standard()),
            ),
            lane_reference: text(LANE_REFERENCE).eq_ignore_ascii_case("true"),
            checkpoints: self.1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn overrides(pairs: &[(&str, &str)]) -> Overrides {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn every_default_passes_its_own_check_and_makes_kafkas_settings() {
        for key in TOPIC_KEYS {
            assert_eq!(key.check(key.default), Ok(()), "{}", key.name);
        }
        assert_eq!(TopicDefaults::default().settings(&Overrides::new()), Settings::default());
        assert!(TOPIC_KEYS.is_sorted_by_key(|key| key.name));
    }

    #[test]
    fn refusals_name_the_key_and_say_why() {
        assert_eq!(
            check("retention.mss", "1").unwrap_err().to_string(),
            "Unknown topic config name: retention.mss"
        );
        let number = check("retention.ms", "soon").unwrap_err().to_string();
        assert_eq!(number, "Invalid value soon for configuration retention.ms: Not a number of type LONG");
        for (key, value) in [
            ("retention.ms", "-2"),
            ("segment.bytes", "1024"),
            ("min.cleanable.dirty.ratio", "2"),
            ("message.timestamp.type", "Never"),
            ("sealane.lanes", "on"),
            ("sealane.lanes.extractors", "x-lane,cookie/lane"),
            ("sealane.lanes.extractors", ""),
            ("compression.type", "rot13"),
        ] {
            let error = check(key, value).unwrap_err().to_string();
            assert!(error.contains(key) && error.contains(value), "{error}");
        }
        let compact = check("cleanup.policy", "compact").unwrap_err().to_string();
        assert!(compact.starts_with("cleanup.policy=compact is not supported"), "{compact}");
        assert_eq!(check("cleanup.policy", "delete"), Ok(()));
        assert_eq!(check("sealane.lanes", "true"), Ok(()));
        assert_eq!(check("sealane.lanes.extractors", "x-tt-env, baggage/lane"), Ok(()));
        let list = check("sealane.lanes.extractors", "x-lane,cookie/lane").unwrap_err().to_string();
        assert!(list.contains("\"cookie/lane\"") && list.contains("baggage/KEY"), "{list}");
    }

    /// C33.
    #[test]
    fn a_value_equal_to_the_default_still_says_that_the_topic_set_it() {
        let defaults = TopicDefaults::default();
        let key = topic_key("retention.ms").unwrap();
        let set = overrides(&[("retention.ms", "604800000")]);
        assert_eq!(defaults.value(key, &set), ("604800000", Source::Topic));
        let names: Vec<_> = defaults.synonyms(key, &set).into_iter().map(|s| (s.name, s.source)).collect();
        let expected = [("retention.ms", Source::Topic), ("log.retention.hours", Source::Default)];
        assert_eq!(names, expected.map(|(name, source)| (name.to_owned(), source)));
        assert_eq!(defaults.value(key, &Overrides::new()), ("604800000", Source::Default));
        let broker = TopicDefaults::new(overrides(&[("retention.ms", "5")])).unwrap();
        assert_eq!(broker.value(key, &Overrides::new()), ("5", Source::StaticBroker));
        assert_eq!(broker.synonyms(key, &Overrides::new())[0].name, "log.retention.ms");
    }

    #[test]
    fn settings_follow_the_topic() {
        let set = overrides(&[
            ("retention.ms", "-1"),
            ("retention.bytes", "7"),
            ("internal.segment.bytes", "4096"),
            ("message.timestamp.type", "LogAppendTime"),
            ("sealane.lanes", "TRUE"),
            ("sealane.lanes.extractors", "x-tt-env,baggage/lane"),
        ]);
        assert_eq!(check_all(&set), Ok(()));
        let settings = TopicDefaults::default().settings(&set);
        assert_eq!((settings.retention_ms, settings.retention_bytes), (None, Some(7)));
        assert_eq!(settings.segment_bytes, 4096);
        assert!(settings.log_append_time && settings.lanes);
        assert_eq!(settings.lane_extractors.texts(), ["x-tt-env", "baggage/lane"]);
    }
}
