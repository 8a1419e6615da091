//! What nobody needs any more: logs of lives that are over, manifests, objects of deleted topics.
//!
//! The controller looks now and then. Everything is judged by what the metadata store says when it is
//! asked, not by the view, so that a former controller does no harm either: a life that is not registered
//! gets on no record any more, so one that is on none afterwards is needed by nobody.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use broker_store::shared::leftovers;
use broker_store::{Item, Life, MetaError, MetaStore, Remote, StoreError, StorePath};
use kafka::TopicId;
use tokio::time::MissedTickBehavior;
use uuid::Uuid;

use super::manifest::{self, LeftUnder};
use super::objects::{ASSIGNMENTS, AssignmentObject, BROKERS, BrokerObject, IDS, IdObject};
use crate::topics::TopicRegistry;
use crate::waiting;

/// The looks of one controller.
pub struct Janitor {
    meta: Arc<dyn MetaStore>,
    remote: Arc<dyn Remote>,
    topics: Arc<TopicRegistry>,
    /// The latest lives of brokers that are not registered, and how often they were seen so: such a life may
    /// be about to begin.
    absent: HashMap<Life, u32>,
    /// Under which epochs the manifests were left that the last look found.
    left: HashMap<StorePath, LeftUnder>,
}

/// What one look removed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Swept {
    pub lives: usize,
    pub manifests: usize,
    pub topics: usize,
}

/// Looks after which a broker that is not there is not taken to be about to begin.
const ABSENT_MIN: u32 = 5;

type Assignments = BTreeMap<TopicId, AssignmentObject>;

impl Janitor {
    pub fn new(meta: Arc<dyn MetaStore>, remote: Arc<dyn Remote>, topics: Arc<TopicRegistry>) -> Janitor {
        Janitor { meta, remote, topics, absent: HashMap::new(), left: HashMap::new() }
    }

    /// Looks once. What fails is left for the next time.
    pub async fn look(&mut self) -> Result<Swept, MetaError> {
        let remote = self.remote.clone();
        let lives = blocking(move || leftovers::lives(&*remote)).await?;
        let over = self.over(lives).await?;
        // Read after the registrations.
        let assignments = self.assignments().await?;
        let records = assignments.values().flat_map(|object| &object.partitions);
        let needed: HashSet<String> = records.flat_map(|record| record.lives.clone()).collect();
        let mut swept = Swept::default();
        for life in over.into_iter().filter(|life| !needed.contains(&life.to_string())) {
            let remote = self.remote.clone();
            // Packs that others still need are removed later.
            match blocking(move || leftovers::forget(&*remote, life)).await {
                Ok(true) => {}
                Ok(false) => continue,
                // Keeps nothing else from being removed.
                Err(error) => {
                    tracing::warn!(%life, %error, "the log of a life that is over cannot be removed yet");
                    continue;
                }
            }
            tracing::info!(%life, "the log of a life that is over was removed");
            self.absent.remove(&life);
            swept.lives += 1;
        }
        swept.manifests = self.manifests(&assignments).await?;
        for topic in self.topics.deleted().await? {
            // While a record is there, the controller has not deleted it yet.
            if self.topics.by_id(topic).is_none() && !assignments.contains_key(&topic) {
                remove_objects(&self.remote, &self.topics, topic).await?;
                swept.topics += 1;
            }
        }
        Ok(swept)
    }

    /// Looks again and again.
    pub async fn run(mut self, every: Duration) -> Infallible {
        let mut look = tokio::time::interval(every);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            look.tick().await;
            if let Err(error) = self.look().await {
                tracing::debug!(%error, "what nobody needs any more is removed later");
            }
        }
    }

    /// Those whose broker leads another life by now, or has been away for long.
    async fn over(&mut self, lives: Vec<Life>) -> Result<Vec<Life>, MetaError> {
        let ids = self.meta.list(IDS).await?;
        let mut latest: HashMap<i32, u64> = HashMap::new();
        for id in ids.iter().filter_map(parsed::<IdObject>) {
            // A number that was claimed has an object of its own, with no lives.
            let known = latest.entry(id.broker).or_insert(0);
            *known = id.lives.max(*known);
        }
        let registered = self.meta.list(BROKERS).await?;
        let alive: BTreeSet<Life> = registered
            .iter()
            .filter_map(|item| {
                let broker = item.key.strip_prefix(BROKERS)?.parse().ok()?;
                Some(Life { broker, epoch: parsed::<BrokerObject>(item)?.life })
            })
            .collect();
        if alive.len() < registered.len() {
            return Err(MetaError::Corrupt("a registration of a broker".to_owned()));
        }
        self.absent.retain(|life, _| lives.contains(life) && !alive.contains(life));
        let mut over = Vec::new();
        for life in lives.into_iter().filter(|life| !alive.contains(life)) {
            let is_latest = latest.get(&life.broker).is_none_or(|latest| life.epoch >= *latest);
            let seen = self.absent.entry(life).or_insert(0);
            *seen += 1;
            if !is_latest || *seen >= ABSENT_MIN {
                over.push(life);
            }
        }
        Ok(over)
    }

    async fn assignments(&self) -> Result<Assignments, MetaError> {
        let mut assignments = Assignments::new();
        for item in self.meta.list(ASSIGNMENTS).await? {
            let damaged = || MetaError::Corrupt(format!("object {}", item.key));
            let id = item.key.strip_prefix(ASSIGNMENTS).and_then(|id| Uuid::parse_str(id).ok());
            let topic = TopicId(id.ok_or_else(damaged)?);
            assignments.insert(topic, parsed(&item).ok_or_else(damaged)?);
        }
        Ok(assignments)
    }

    /// Removes those of epochs that are over and that no record names.
    async fn manifests(&mut self, assignments: &Assignments) -> Result<usize, MetaError> {
        let (mut removed, mut found) = (0, HashMap::new());
        let remote = self.remote.clone();
        // One question where nothing is left of most topics.
        let there: HashSet<String> = blocking(move || {
            let all = StorePath::parse(manifest::ROOT).map_err(|error| StoreError::Io(error.to_string()))?;
            Ok(remote.list(&all)?.into_iter().map(|entry| entry.name).collect())
        })
        .await?;
        for (topic, object) in assignments.iter().filter(|(topic, _)| there.contains(&topic.0.to_string())) {
            let (remote, object, dir) = (self.remote.clone(), object.clone(), manifest::folder(*topic));
            let mut known = std::mem::take(&mut self.left);
            let swept = blocking(move || {
                let (mut removed, mut stay) = (0, Vec::new());
                for entry in remote.list(&dir)? {
                    let name = dir.join(&entry.name).map_err(|error| StoreError::Io(error.to_string()))?;
                    let left = match known.remove(&name) {
                        Some(left) => Ok(left),
                        None => manifest::read_head(&remote, &name),
                    };
                    match left {
                        Ok(left) if manifest::is_over(&object, name.as_str(), &left) => {
                            remote.delete(&name)?;
                            removed += 1;
                        }
                        Ok(left) => stay.push((name, left)),
                        // Its reader was quicker.
                        Err(StoreError::NotFound) => {}
                        Err(error) => {
                            tracing::debug!(%name, %error, "what this manifest is for cannot be read; it stays");
                        }
                    }
                }
                Ok((removed, stay, known))
            });
            let (count, stay, known) = swept.await?;
            removed += count;
            self.left = known;
            found.extend(stay);
        }
        self.left = found;
        Ok(removed)
    }
}

/// What a deleted topic left in the store. Owners that have not heard yet read nothing any more.
pub async fn remove_objects(
    remote: &Arc<dyn Remote>,
    topics: &TopicRegistry,
    topic: TopicId,
) -> Result<(), MetaError> {
    let remote = remote.clone();
    blocking(move || {
        for root in ["data", "manifests"] {
            let dir = StorePath::parse(&format!("{root}/{}", topic.0));
            remote.delete(&dir.map_err(|error| StoreError::Io(error.to_string()))?)?;
        }
        Ok(())
    })
    .await?;
    topics.files_gone(topic).await
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, StoreError> + Send + 'static,
) -> Result<T, MetaError> {
    let done = waiting::blocking(work).await;
    Ok(done.ok_or_else(|| MetaError::Unavailable("interrupted".to_owned()))??)
}

fn parsed<T: serde::de::DeserializeOwned>(item: &Item) -> Option<T> {
    serde_json::from_slice(&item.value).ok()
}
