//! The own region: who it is, which topics it has now, and the clock of this process.

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use kafka::private::TopicInfo;
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

/// Milliseconds since this process first asked.
pub fn now() -> Now {
    static START: LazyLock<Instant> = LazyLock::new(Instant::now);
    Now(u64::try_from(START.elapsed().as_millis()).unwrap_or(u64::MAX))
}

/// Waits for the region's broker, then follows its topics until `stop`. `None` when stopped before.
pub async fn learn(target: Target, stop: CancellationToken) -> Option<(watch::Receiver<Topics>, Follower)> {
    let mut said = String::new();
    loop {
        match first(&target).await {
            Ok((local, topics, generation)) => {
                info!(region = %topics.name, id = %topics.region, "mirror of this region");
                let (sender, receiver) = watch::channel(topics);
                return Some((receiver, Follower { target, local: Some(local), generation, sender }));
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

async fn first(target: &Target) -> Result<(Local, Topics, u64), LocalError> {
    let local = Local::connect(target).await?;
    let answer = local.topics(0).await?;
    let by_name = by_name(answer.topics.unwrap_or_default());
    let topics = Topics { region: answer.region, name: answer.region_name, by_name };
    Ok((local, topics, answer.generation))
}

fn by_name(topics: Vec<TopicInfo>) -> Arc<BTreeMap<TopicName, TopicInfo>> {
    Arc::new(topics.into_iter().map(|topic| (topic.name.clone(), topic)).collect())
}

/// Asks for changes of the topics, again and again.
pub struct Follower {
    target: Target,
    local: Option<Local>,
    generation: u64,
    sender: watch::Sender<Topics>,
}

impl Follower {
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
        let answer = local.topics(self.generation).await?;
        self.generation = answer.generation;
        if let Some(list) = answer.topics {
            let topics = Topics { region: answer.region, name: answer.region_name, by_name: by_name(list) };
            self.sender.send_replace(topics);
        }
        Ok(())
    }
}

const POLL: Duration = Duration::from_millis(250);
const RETRY: Duration = Duration::from_secs(1);
