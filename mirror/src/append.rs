//! Appending what a peer sends: each unit goes to the owner of its partition, in the order of its arrival.
//!
//! Several requests are under way to each owner; a slow one keeps nobody else waiting. A unit that its
//! owner does not take is reported, never tried again here: the link wants the partition anew from the
//! vectors, and the apply rule refuses what was sent behind it.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt, StreamExt};
use kafka::private::{self, AppendAnswer, AppendOutcome, AppendRequest, MIRROR_APPEND, Unit};
use kafka::{BrokerId, ErrorCode, TopicName};
use kafka_client::Connection;
use tokio::sync::mpsc;

use crate::link::{Append, Appended, Sub};
use crate::local::{LocalError, read};
use crate::owners::Owners;
use crate::sink::SinkEvent;

/// Bytes of units in one request; a single unit may be larger.
const REQUEST_BYTES: usize = 4 << 20;
const UNITS_MAX: usize = 1_000;
/// Requests under way to one owner.
const REQUESTS_MAX: usize = 4;

/// Appends units in the order given, and reports what became of each. All that waits here is bounded by
/// the credit that the peer was given.
pub async fn append_task(
    owners: Arc<Owners>,
    units: mpsc::Receiver<Box<Append>>,
    events: mpsc::Sender<SinkEvent>,
) {
    let appender = Appender {
        owners,
        arrived: VecDeque::new(),
        lanes: HashMap::new(),
        looking: None,
        under_way: FuturesUnordered::new(),
    };
    if let Err(error) = appender.run(units, &events).await {
        let _ = events.send(SinkEvent::Failed(error)).await;
    }
}

struct Appender {
    owners: Arc<Owners>,
    /// Whose owner is not known yet: nothing behind it goes on, so that order is kept.
    arrived: VecDeque<Append>,
    lanes: HashMap<BrokerId, Lane>,
    looking: Option<BoxFuture<'static, Result<(), LocalError>>>,
    under_way: FuturesUnordered<BoxFuture<'static, Done>>,
}

/// What goes to one owner.
#[derive(Default)]
struct Lane {
    waiting: VecDeque<Append>,
    requests: usize,
}

/// A unit without its bytes.
struct Head {
    sub: Sub,
    charge: u64,
    topic: TopicName,
}

struct Done {
    broker: BrokerId,
    heads: Vec<Head>,
    answer: Result<AppendAnswer, LocalError>,
}

impl Appender {
    async fn run(
        mut self,
        mut units: mpsc::Receiver<Box<Append>>,
        events: &mpsc::Sender<SinkEvent>,
    ) -> Result<(), LocalError> {
        loop {
            while let Some(Some(unit)) = units.recv().now_or_never() {
                self.arrived.push_back(*unit);
            }
            let mut appended = self.place();
            appended.extend(self.start_requests().await);
            if !appended.is_empty() && events.send(SinkEvent::Appended(appended)).await.is_err() {
                return Ok(());
            }
            let appended = tokio::select! {
                biased;
                Some(done) = self.under_way.next(), if !self.under_way.is_empty() => self.finish(done)?,
                looked = async { self.looking.as_mut().expect("checked").await }, if self.looking.is_some() => {
                    self.looking = None;
                    looked?;
                    continue;
                }
                unit = units.recv() => match unit {
                    Some(unit) => {
                        self.arrived.push_back(*unit);
                        continue;
                    }
                    None => return Ok(()),
                },
            };
            if events.send(SinkEvent::Appended(appended)).await.is_err() {
                return Ok(());
            }
        }
    }

    /// Hands units to the lanes of their owners; what became of those that nobody owns.
    fn place(&mut self) -> Vec<Appended> {
        let mut failed = Vec::new();
        while let Some(front) = self.arrived.front() {
            let place = (front.unit.topic.clone(), front.unit.partition);
            match self.owners.seat(&place) {
                None => {
                    if self.looking.is_none() {
                        let topics: BTreeSet<TopicName> =
                            self.arrived.iter().map(|append| append.unit.topic.clone()).collect();
                        let owners = self.owners.clone();
                        self.looking = Some(Box::pin(async move { owners.look(topics).await }));
                    }
                    break;
                }
                Some(Ok(seat)) => {
                    let unit = self.arrived.pop_front().expect("just seen");
                    self.lanes.entry(seat.broker).or_default().waiting.push_back(unit);
                }
                Some(Err(reason)) => {
                    let unit = self.arrived.pop_front().expect("just seen");
                    self.owners.forget(&place.0);
                    failed.push(not_now(unit.sub, unit.charge, reason));
                }
            }
        }
        failed
    }

    /// What became of units whose owner is not connected any more.
    async fn start_requests(&mut self) -> Vec<Appended> {
        let mut failed = Vec::new();
        self.lanes.retain(|_, lane| lane.requests > 0 || !lane.waiting.is_empty());
        for (broker, lane) in &mut self.lanes {
            while lane.requests < REQUESTS_MAX && !lane.waiting.is_empty() {
                let batch = lane.take();
                let heads: Vec<Head> = batch.iter().map(Head::of).collect();
                let Some(connection) = self.owners.connection(*broker) else {
                    for head in heads {
                        self.owners.forget(&head.topic);
                        failed.push(not_now(head.sub, head.charge, "its owner is gone".to_owned()));
                    }
                    continue;
                };
                lane.requests += 1;
                let request = start(*broker, connection, heads, batch).await;
                self.under_way.push(request);
            }
        }
        failed
    }

    fn finish(&mut self, done: Done) -> Result<Vec<Appended>, LocalError> {
        if let Some(lane) = self.lanes.get_mut(&done.broker) {
            lane.requests -= 1;
        }
        let outcomes = match done.answer {
            Ok(answer) => answer.outcomes,
            Err(error) if error.is_of_one_broker() => {
                let failed = |head: Head| {
                    self.owners.forget(&head.topic);
                    not_now(head.sub, head.charge, error.to_string())
                };
                return Ok(done.heads.into_iter().map(failed).collect());
            }
            Err(error) => return Err(error),
        };
        let appended = done.heads.into_iter().zip(outcomes).map(|(head, outcome)| {
            if matches!(outcome, AppendOutcome::Failed { .. }) {
                self.owners.forget(&head.topic);
            }
            Appended { sub: head.sub, charge: head.charge, outcome }
        });
        Ok(appended.collect())
    }
}

impl Lane {
    /// As many units as one request takes.
    fn take(&mut self) -> Vec<Append> {
        let (mut batch, mut bytes) = (Vec::new(), 0);
        while bytes < REQUEST_BYTES && batch.len() < UNITS_MAX {
            let Some(append) = self.waiting.pop_front() else { break };
            bytes += append.unit.batches.len();
            batch.push(append);
        }
        batch
    }
}

impl Head {
    fn of(append: &Append) -> Head {
        Head { sub: append.sub, charge: append.charge, topic: append.unit.topic.clone() }
    }
}

/// Sends a request, so that the next one to the same owner comes after it, and gives what waits for its
/// answer.
async fn start(
    broker: BrokerId,
    connection: Connection,
    heads: Vec<Head>,
    batch: Vec<Append>,
) -> BoxFuture<'static, Done> {
    let units: Vec<Unit> = batch.into_iter().map(|append| append.unit).collect();
    // Without a copy of the batches.
    let pieces = AppendRequest { units }.pieces();
    let started = connection.start(MIRROR_APPEND, private::VERSION, pieces).await;
    Box::pin(async move {
        let answer = match started {
            Ok(answer) => read(MIRROR_APPEND, answer).await,
            Err(error) => Err(error.into()),
        };
        Done { broker, heads, answer }
    })
}

fn not_now(sub: Sub, charge: u64, reason: String) -> Appended {
    Appended { sub, charge, outcome: AppendOutcome::Failed { code: ErrorCode::NotLeaderOrFollower, reason } }
}
