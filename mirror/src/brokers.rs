//! Every broker of the region hears what this mirror says of its links, so that each can show it, and is
//! asked for the policies, so that whoever changed one learns here that it is taken over.
//!
//! One task for each broker; a slow one keeps nobody else waiting.

use std::collections::HashMap;
use std::time::Duration;

use kafka::BrokerId;
use kafka::private::ReportRequest;
use kafka_client::Cluster;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;

use crate::local::{Local, LocalError};
use crate::region::PolicyBook;
use crate::status::Board;

/// What each broker is told and asked.
#[derive(Clone)]
pub struct Talk {
    pub cluster: Cluster,
    pub board: Board,
    pub policies: PolicyBook,
}

/// Talks to all brokers until `stop`.
pub async fn talk(talk: Talk, stop: CancellationToken) {
    let mut tasks = JoinSet::new();
    let mut running: HashMap<BrokerId, tokio::task::AbortHandle> = HashMap::new();
    loop {
        // The links notice dead brokers and say so; here it is only tried again.
        if let Ok(Ok(brokers)) = timeout(BROKERS_WITHIN, talk.cluster.brokers()).await {
            running.retain(|id, task| {
                let stays = brokers.iter().any(|(broker, _)| broker == id);
                if !stays {
                    task.abort();
                }
                stays
            });
            for (broker, _) in brokers {
                running.entry(broker).or_insert_with(|| tasks.spawn(talk.clone().to(broker)));
            }
        }
        while tasks.try_join_next().is_some() {}
        if stop.run_until_cancelled(tokio::time::sleep(BROKERS_EVERY)).await.is_none() {
            return;
        }
    }
}

impl Talk {
    async fn to(self, broker: BrokerId) {
        let mut reported: Option<Instant> = None;
        loop {
            let said = timeout(ANSWER_WITHIN, self.say(broker, &mut reported)).await;
            let wait = if matches!(said, Ok(Ok(()))) { POLL } else { RETRY };
            tokio::time::sleep(wait).await;
        }
    }

    async fn say(&self, broker: BrokerId, reported: &mut Option<Instant>) -> Result<(), LocalError> {
        let local = Local::on(self.cluster.broker(broker).await?);
        self.policies.learn(local.links(self.policies.since()).await?);
        if reported.is_none_or(|at| at.elapsed() >= REPORT_EVERY) {
            let mut links = self.board.links();
            for link in &mut links {
                link.partitions.truncate(REPORT_PARTITIONS_MAX);
            }
            local.report(&ReportRequest { links }).await?;
            *reported = Some(Instant::now());
        }
        Ok(())
    }
}

const BROKERS_EVERY: Duration = Duration::from_secs(1);
const BROKERS_WITHIN: Duration = Duration::from_secs(5);
const ANSWER_WITHIN: Duration = Duration::from_secs(10);
const POLL: Duration = Duration::from_millis(250);
const RETRY: Duration = Duration::from_secs(1);
const REPORT_EVERY: Duration = Duration::from_secs(1);
const REPORT_PARTITIONS_MAX: usize = 20_000;
