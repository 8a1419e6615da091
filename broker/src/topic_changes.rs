//! Changes of topics as the whole broker sees them: metadata first, then the partitions behind it.
//!
//! One change at a time, so that a topic that is deleted and made again at once never meets its
//! predecessor's partitions. A change that returned is in force for the next request.

use std::sync::Arc;
use std::time::Duration;

use kafka::ErrorCode;
use lane_core::Extractors;
use tokio::time::Instant;

use crate::broker::{Broker, OpenError};
use crate::cluster::Cluster;
use crate::lanes::{SwitchError, switch_lanes};
use crate::peers::Incomplete;
use crate::topics::{ConfigChange, NewTopic, Topic, TopicError};

/// Between two looks for partitions that are not served.
const MEND_INTERVAL: Duration = Duration::from_secs(5);

/// How long a partition that is on record as served may take to be so.
const SERVED_WITHIN: Duration = Duration::from_secs(1);

/// Why a change did not come to pass.
#[derive(Debug, thiserror::Error)]
pub enum ChangeError {
    #[error(transparent)]
    Topic(#[from] TopicError),
    #[error("{0}")]
    Open(#[from] OpenError),
    #[error("{0}")]
    Lanes(#[from] SwitchError),
    #[error("the topic is changed, but not in force everywhere yet: {0}")]
    Owners(#[from] Incomplete),
}

impl ChangeError {
    pub fn code(&self) -> ErrorCode {
        match self {
            ChangeError::Topic(error) => error.code(),
            ChangeError::Open(_) => ErrorCode::KafkaStorageError,
            ChangeError::Lanes(error) => error.code(),
            ChangeError::Owners(_) => ErrorCode::RequestTimedOut,
        }
    }
}

impl Broker {
    /// Makes a topic and serves its partitions.
    pub async fn create_topic(self: &Arc<Self>, new: &NewTopic) -> Result<Arc<Topic>, ChangeError> {
        let one = self.topics.one_change().await;
        if let Some(cluster) = &self.cluster {
            let topic = self.topics.create(new).await?;
            drop(one);
            self.assigned(cluster, &topic).await;
            self.judge_new(&topic).await?;
            return Ok(topic);
        }
        let topic = self.topics.create(new).await?;
        if let Err(error) = self.serve_topic(&topic).await {
            // Taken back, so that the client may try again. Where even that fails, `mend` goes on.
            if self.topics.delete(&new.name).await.is_ok() {
                let _ = self.delete_partitions(&topic.name, topic.id).await;
            }
            return Err(error);
        }
        Ok(topic)
    }

    /// Deletes a topic: its partitions are closed at once, its files removed, its groups' offsets
    /// forgotten. Files that cannot be removed now go at the next start.
    pub async fn delete_topic(self: &Arc<Self>, name: &str) -> Result<Arc<Topic>, ChangeError> {
        let _one = self.topics.one_change().await;
        let topic = self.topics.delete(name).await?;
        if self.cluster.is_some() {
            // Every owner sees it and removes what it has.
            return Ok(topic);
        }
        if let Err(error) = self.delete_partitions(&topic.name, topic.id).await {
            tracing::warn!(topic = %topic.name, id = %topic.id, %error, "files of a deleted topic stay until the next start");
        }
        self.coordinator.topic_deleted(&topic.name).await;
        Ok(topic)
    }

    /// Gives a topic more partitions; `partitions` is the new total.
    pub async fn grow_topic(
        self: &Arc<Self>,
        name: &str,
        partitions: i32,
    ) -> Result<Arc<Topic>, ChangeError> {
        let one = self.topics.one_change().await;
        let topic = self.topics.grow(name, partitions).await?;
        if let Some(cluster) = &self.cluster {
            drop(one);
            self.assigned(cluster, &topic).await;
            self.judge_new(&topic).await?;
            return Ok(topic);
        }
        self.serve_topic(&topic).await?;
        Ok(topic)
    }

    /// Waits until the partitions of a topic are served, as far as this broker can know.
    async fn assigned(&self, cluster: &Cluster, topic: &Topic) {
        if !cluster.assigned(topic).await {
            return;
        }
        let view = cluster.views.now();
        let is_missing = |index: &i32| {
            let owner = view.leader(topic.id, *index).map(|(owner, _)| owner);
            owner == Some(cluster.me) && self.partition(topic.name.as_str(), *index).is_none()
        };
        // Between a record and its partition's being found there is a moment.
        let end = Instant::now() + SERVED_WITHIN;
        while (0..topic.partitions).any(|index| is_missing(&index)) && Instant::now() < end {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    /// Changes the settings of a topic, from the next append on.
    pub async fn alter_topic(
        self: &Arc<Self>,
        name: &str,
        change: &ConfigChange,
    ) -> Result<Arc<Topic>, ChangeError> {
        let _one = self.topics.one_change().await;
        // Lanes first: where the log refuses to turn them off, nothing changes; and what the log says
        // early is judged again when the change is tried again.
        let planned = self.topics.check_alter(name, change)?;
        if self.cluster.is_some() {
            return self.alter_everywhere(&planned, change).await;
        }
        self.settle_lanes(&planned).await?;
        let topic = self.topics.alter(name, change).await?;
        self.set_topic_settings(&topic.name, &topic.settings);
        Ok(topic)
    }

    /// Serves what metadata says and what could not be served when it was asked for (a full disk):
    /// for the life of the service, so that no restart is needed.
    pub async fn mend(self: &Arc<Self>) {
        let mut all = true;
        loop {
            for topic in self.topics.all() {
                let served =
                    self.topic_partitions(topic.name.as_str()).map_or(0, |partitions| partitions.len());
                if all || served < topic.partitions as usize {
                    self.mend_topic(topic.name.as_str()).await;
                } else if topic.opened < topic.partitions {
                    self.note_opened(&topic).await;
                }
            }
            all = false;
            tokio::time::sleep(MEND_INTERVAL).await;
        }
    }

    /// Not on the way of CreateTopics: a topic whose files vanish in its first seconds is not missed.
    async fn note_opened(&self, topic: &Topic) {
        if let Err(error) = self.topics.note_opened(topic.name.as_str(), topic.partitions).await {
            tracing::debug!(topic = %topic.name, %error, "that the topic was served is noted later");
        }
    }

    async fn mend_topic(self: &Arc<Self>, name: &str) {
        let _one = self.topics.one_change().await;
        let Some(topic) = self.topics.by_name(name) else { return };
        if let Err(error) = self.serve_topic(&topic).await {
            tracing::warn!(topic = name, %error, "a topic is not served as its settings say; it is tried again");
        }
    }

    async fn serve_topic(self: &Arc<Self>, topic: &Topic) -> Result<(), ChangeError> {
        self.open_partitions(&topic.name, topic.id, topic.partitions, &topic.settings).await?;
        self.settle_lanes(topic).await
    }

    /// Makes every partition of a topic judge records as its setting says. Does nothing where they do.
    pub async fn settle_lanes(&self, topic: &Topic) -> Result<(), ChangeError> {
        let partitions = self.topic_partitions(topic.name.as_str());
        let none = Extractors::none();
        let extractors = if topic.settings.lanes { &*topic.settings.lane_extractors } else { &none };
        if switch_lanes(partitions.as_deref().unwrap_or_default(), extractors).await? {
            self.lanes.lanes_switched();
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "topic_changes_tests.rs"]
mod tests;
