//! The own region: who it is, which topics and which policies of links it has now, and the clock of this
//! process.

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use kafka::private::{LinkPolicy, LinksAnswer, TopicInfo};
use kafka::{RegionId, RegionName, TopicName};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::link::Now;
use crate::local::{Local, LocalError, Target};

/// The topics of the region at one moment. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Topics {
    pub region: RegionId,
    pub name: RegionName,
    by_name: Arc<BTreeMap<TopicName, TopicInfo>>,
}

impl Topics {
    pub fn by_name(&self, name: &TopicName) -> Option<&TopicInfo> {
        self.by_name.get(name)
    }

    pub fn iter(&self) -> impl Iterator<Item = &TopicInfo> {
        self.by_name.values()
    }
}

/// The policies of the region's links at one moment. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Policies {
    stored: Arc<BTreeMap<RegionName, LinkPolicy>>,
}

impl Policies {
    /// The policy of the link to `peer`; the default where the region keeps none.
    pub fn of(&self, peer: &RegionName) -> LinkPolicy {
        self.stored.get(peer).cloned().unwrap_or_default()
    }

    fn learned(answer: LinksAnswer) -> Option<Policies> {
        Some(Policies { stored: Arc::new(answer.links?.into_iter().collect()) })
    }
}

/// What is followed of the own region.
#[derive(Clone)]
pub struct Followed {
    pub topics: watch::Receiver<Topics>,
    pub policies: watch::Receiver<Policies>,
}

/// Milliseconds since this process first asked.
pub fn now() -> Now {
    static START: LazyLock<Instant> = LazyLock::new(Instant::now);
    Now(u64::try_from(START.elapsed().as_millis()).unwrap_or(u64::MAX))
}

/// Waits for the region's broker, then follows it until `stop`. `None` when stopped before.
pub async fn learn(target: Target, stop: CancellationToken) -> Option<(Followed, Follower)> {
    let mut said = String::new();
    loop {
        match Follower::first(&target).await {
            Ok((followed, follower)) => {
                let topics = followed.topics.borrow().clone();
                info!(region = %topics.name, id = %topics.region, "mirror of this region");
                return Some((followed, follower));
            }
            Err(error) => {
                let text = error.to_string();
                if text != said {
                    warn!("waiting for the region's broker: {text}");
                    said = text;
                }
            }
        }
        stop.run_until_cancelled(tokio::time::sleep(RETRY)).await?;
    }
}

/// Asks for changes, again and again.
pub struct Follower {
    target: Target,
    local: Option<Local>,
    /// Of topics, and of policies.
    generations: (u64, u64),
    topics: watch::Sender<Topics>,
    policies: watch::Sender<Policies>,
}

impl Follower {
    async fn first(target: &Target) -> Result<(Followed, Follower), LocalError> {
        let local = Local::connect(target).await?;
        let (mine, links) = (local.topics(0).await?, local.links(0).await?);
        let generations = (mine.generation, links.generation);
        let by_name = by_name(mine.topics.unwrap_or_default());
        let (topics, topics_out) =
            watch::channel(Topics { region: mine.region, name: mine.region_name, by_name });
        // Generation 0 is none, so this answer names all there are.
        let stored = links.links.unwrap_or_default().into_iter().collect();
        let (policies, policies_out) = watch::channel(Policies { stored: Arc::new(stored) });
        let followed = Followed { topics: topics_out, policies: policies_out };
        let target = target.clone();
        Ok((followed, Follower { target, local: Some(local), generations, topics, policies }))
    }

    pub async fn run(mut self, stop: CancellationToken) {
        while stop.run_until_cancelled(tokio::time::sleep(POLL)).await.is_some() {
            if self.look().await.is_err() {
                // The links notice a dead broker themselves and say so; this only tries again.
                self.local = None;
                if stop.run_until_cancelled(tokio::time::sleep(RETRY)).await.is_none() {
                    return;
                }
            }
        }
    }

    async fn look(&mut self) -> Result<(), LocalError> {
        let local = match &self.local {
            Some(local) => local.clone(),
            None => self.local.insert(Local::connect(&self.target).await?).clone(),
        };
        // A policy that was set before a topic was made is asked for after it and told before it, so that
        // what is to stay at home is never offered.
        let mine = local.topics(self.generations.0).await?;
        let links = local.links(self.generations.1).await?;
        self.generations = (mine.generation, links.generation);
        if let Some(policies) = Policies::learned(links) {
            self.policies.send_replace(policies);
        }
        if let Some(list) = mine.topics {
            let topics = Topics { region: mine.region, name: mine.region_name, by_name: by_name(list) };
            self.topics.send_replace(topics);
        }
        Ok(())
    }
}

fn by_name(topics: Vec<TopicInfo>) -> Arc<BTreeMap<TopicName, TopicInfo>> {
    Arc::new(topics.into_iter().map(|topic| (topic.name.clone(), topic)).collect())
}

const POLL: Duration = Duration::from_millis(250);
const RETRY: Duration = Duration::from_secs(1);
