//! The own region: who it is, which topics and which policies of links it has now, and the clock of this
//! process.

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use kafka::private::{LinkPolicy, LinksAnswer, TopicInfo};
use kafka::{RegionId, RegionName, TopicName};
use kafka_client::Cluster;
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::link::Now;
use crate::local::{Local, LocalError};

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
}

/// Takes over what brokers say of the policies. Of two it believes the one that knows more: an old
/// policy must not come back because another broker is slow to hear.
#[derive(Clone)]
pub struct PolicyBook {
    /// The generation that was taken over last.
    taken: Arc<Mutex<u64>>,
    policies: watch::Sender<Policies>,
}

impl PolicyBook {
    /// What to ask a broker for: what is later than this.
    pub fn since(&self) -> u64 {
        *self.taken.lock()
    }

    pub fn learn(&self, answer: LinksAnswer) {
        let mut taken = self.taken.lock();
        if let Some(links) = answer.links
            && answer.generation > *taken
        {
            *taken = answer.generation;
            self.policies.send_replace(Policies { stored: Arc::new(links.into_iter().collect()) });
        }
    }

    /// A broker that is alone may have been put back to an older day, and counts anew.
    fn begin_anew(&self) {
        *self.taken.lock() = 0;
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

/// Waits for the region's brokers, then follows them until `stop`. `None` when stopped before.
pub async fn learn(cluster: Cluster, stop: CancellationToken) -> Option<(Followed, Follower)> {
    let mut said = String::new();
    loop {
        match Follower::first(&cluster).await {
            Ok((followed, follower)) => {
                let topics = followed.topics.borrow().clone();
                info!(region = %topics.name, id = %topics.region, "mirror of this region");
                return Some((followed, follower));
            }
            Err(error) => {
                let text = error.to_string();
                if text != said {
                    warn!("waiting for the region's brokers: {text}");
                    said = text;
                }
            }
        }
        stop.run_until_cancelled(tokio::time::sleep(RETRY)).await?;
    }
}

/// Asks one broker for changes, again and again; another when that one is gone.
pub struct Follower {
    cluster: Cluster,
    local: Option<Local>,
    /// As the broker that is asked counts them.
    generation: u64,
    topics: watch::Sender<Topics>,
    pub policies: PolicyBook,
}

impl Follower {
    async fn first(cluster: &Cluster) -> Result<(Followed, Follower), LocalError> {
        let local = Local::on(cluster.any().await?);
        let (mine, links) = (local.topics(0).await?, local.links(0).await?);
        let by_name = by_name(mine.topics.unwrap_or_default());
        let (topics, topics_out) =
            watch::channel(Topics { region: mine.region, name: mine.region_name, by_name });
        // Generation 0 is none, so this answer names all there are.
        let stored = links.links.unwrap_or_default().into_iter().collect();
        let (policies, policies_out) = watch::channel(Policies { stored: Arc::new(stored) });
        let followed = Followed { topics: topics_out, policies: policies_out };
        let policies = PolicyBook { taken: Arc::new(Mutex::new(links.generation)), policies };
        let (cluster, generation) = (cluster.clone(), mine.generation);
        Ok((followed, Follower { cluster, local: Some(local), generation, topics, policies }))
    }

    pub async fn run(mut self, stop: CancellationToken) {
        while stop.run_until_cancelled(tokio::time::sleep(POLL)).await.is_some() {
            let looked = timeout(LOOK_WITHIN, self.look()).await;
            if !matches!(looked, Ok(Ok(()))) {
                // The links notice dead brokers themselves and say so; this only tries again.
                self.local = None;
                if stop.run_until_cancelled(tokio::time::sleep(RETRY)).await.is_none() {
                    return;
                }
            }
        }
    }

    async fn look(&mut self) -> Result<(), LocalError> {
        let local = match self.local.clone().filter(|local| !local.is_closed()) {
            Some(local) => local,
            None => {
                let brokers = self.cluster.brokers().await?;
                if brokers.len() == 1 {
                    self.policies.begin_anew();
                }
                // Each counts by itself.
                self.generation = 0;
                self.local.insert(Local::on(self.cluster.any().await?)).clone()
            }
        };
        // A policy that was set before a topic was made is asked for after it and told before it, so that
        // what is to stay at home is never offered.
        let mine = local.topics(self.generation).await?;
        let links = local.links(self.policies.since()).await?;
        self.generation = mine.generation;
        self.policies.learn(links);
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
/// A broker that has not answered by then is left for another.
const LOOK_WITHIN: Duration = Duration::from_secs(10);
