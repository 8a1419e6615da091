//! What is here: the topics of this region, their settings and their log bounds.

use bytes::{BufMut, BytesMut};

use super::Message;
use super::fields::{put_error, take_error, take_topic, take_topic_id};
use crate::error::ErrorCode;
use crate::names::{RegionId, RegionName, TopicId, TopicName};
use crate::offset::TimestampMs;
use crate::wire::{Reader, WireError, Writer};

/// Asks for the topics of this region. `since` is the generation of an earlier answer, 0 for none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopicsRequest {
    pub since: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopicsAnswer {
    pub error: ErrorCode,
    /// Changes whenever the list does; never 0.
    pub generation: u64,
    pub region: RegionId,
    pub region_name: RegionName,
    /// `None`: as in the generation that was asked about. Internal topics are left out.
    pub topics: Option<Vec<TopicInfo>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopicInfo {
    pub name: TopicName,
    /// This incarnation of the topic in this region.
    pub id: TopicId,
    pub partitions: i32,
    pub lanes: bool,
    /// Overrides only, sorted by key.
    pub configs: Vec<(String, String)>,
    /// When the configuration was last changed, for the rule that resolves drift.
    pub changed_at: TimestampMs,
}

impl Message for TopicsRequest {
    fn write(&self, out: &mut BytesMut) {
        out.put_u64(self.since);
    }

    fn read(from: &mut Reader) -> Result<Self, WireError> {
        Ok(TopicsRequest { since: from.u64("since")? })
    }
}

impl Message for TopicsAnswer {
    fn write(&self, out: &mut BytesMut) {
        put_error(out, self.error);
        out.put_u64(self.generation);
        out.uuid(self.region.0);
        out.text(self.region_name.as_str());
        out.option(self.topics.as_ref(), |o, topics| o.array(topics, |o, t| t.write(o)));
    }

    fn read(from: &mut Reader) -> Result<Self, WireError> {
        Ok(TopicsAnswer {
            error: take_error(from)?,
            generation: from.u64("generation")?,
            region: RegionId(from.uuid("region")?),
            region_name: RegionName::parse(&from.text("region name")?)
                .map_err(|_| WireError::Value("region name"))?,
            topics: from.option("topics", |f| f.array("topics", TopicInfo::read))?,
        })
    }
}

impl Message for TopicInfo {
    fn write(&self, out: &mut BytesMut) {
        out.text(self.name.as_str());
        out.uuid(self.id.0);
        out.put_i32(self.partitions);
        out.flag(self.lanes);
        out.array(&self.configs, |o, (key, value)| {
            o.text(key);
            o.text(value);
        });
        out.put_i64(self.changed_at.0);
    }

    fn read(from: &mut Reader) -> Result<Self, WireError> {
        Ok(TopicInfo {
            name: take_topic(from)?,
            id: take_topic_id(from)?,
            partitions: from.i32("partitions")?,
            lanes: from.flag("lanes")?,
            configs: from.array("configs", |f| Ok((f.text("config key")?, f.text("config value")?)))?,
            changed_at: TimestampMs(from.i64("changed at")?),
        })
    }
}
