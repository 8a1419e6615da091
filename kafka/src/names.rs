//! Names and identities, parsed once: after that the type is the proof.
//!
//! Owns the rules of Kafka's topic names and of our region names. Lane names live in `lane-core`.

use std::fmt;
use std::sync::Arc;

use uuid::Uuid;

/// A legal topic name: 1 to 249 characters of `[a-zA-Z0-9._-]`, not `.` or `..`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TopicName(Arc<str>);

/// A group id as the broker stores it; any text, possibly empty (Kafka allows it for commits).
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupId(Arc<str>);

/// Short name of a region: 1 to 63 characters of `[a-z0-9-]`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RegionName(Arc<str>);

/// Identity of a cluster as clients see it (Metadata, DescribeCluster).
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ClusterId(Arc<str>);

/// Identity of a region, for ever.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RegionId(pub Uuid);

/// Identity of one incarnation of a topic (KIP-516): new when the topic is recreated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TopicId(pub Uuid);

/// Why a text is not a name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    #[error("a topic name has 1 to 249 characters, this one has {0}")]
    TopicLength(usize),
    #[error("topic name {0:?} may hold only letters, digits, '.', '_' and '-', and may not be '.' or '..'")]
    TopicCharacter(String),
    #[error("region name {0:?} must be 1 to 63 characters of a-z, 0-9 and '-'")]
    Region(String),
}

impl TopicName {
    pub const MAX_LEN: usize = 249;

    pub fn parse(text: &str) -> Result<TopicName, NameError> {
        if text.is_empty() || text.len() > Self::MAX_LEN {
            return Err(NameError::TopicLength(text.chars().count()));
        }
        let legal = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
        if text == "." || text == ".." || !text.chars().all(legal) {
            return Err(NameError::TopicCharacter(text.to_owned()));
        }
        Ok(TopicName(text.into()))
    }

    /// Internal topics are written by the broker alone.
    pub fn is_internal(&self) -> bool {
        matches!(self.as_str(), "__consumer_offsets" | "__transaction_state")
    }
}

impl GroupId {
    pub fn new(text: &str) -> GroupId {
        GroupId(text.into())
    }
}

impl RegionName {
    pub fn parse(text: &str) -> Result<RegionName, NameError> {
        let legal = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        if text.is_empty() || text.len() > 63 || !text.chars().all(legal) {
            return Err(NameError::Region(text.to_owned()));
        }
        Ok(RegionName(text.into()))
    }
}

impl ClusterId {
    pub fn new(text: &str) -> ClusterId {
        ClusterId(text.into())
    }
}

macro_rules! text {
    ($($name:ident),*) => {$(
        impl $name {
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    )*};
}

text!(TopicName, GroupId, RegionName, ClusterId);

impl std::borrow::Borrow<str> for TopicName {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl std::borrow::Borrow<str> for GroupId {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for RegionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for TopicId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn topic_names_follow_kafka() {
        for good in ["t", "a.b_c-D9", &"x".repeat(249)] {
            assert!(TopicName::parse(good).is_ok(), "{good}");
        }
        for bad in ["", ".", "..", "a b", "a/b", "é", &"x".repeat(250)] {
            assert!(TopicName::parse(bad).is_err(), "{bad}");
        }
    }
}
