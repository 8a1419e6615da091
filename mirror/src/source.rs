//! Reading what originated here: one read at a time of each owner, over all its partitions that may be
//! read.
//!
//! Which partitions and how much is the link's decision (`Link::wishes`). A read that waits is ended
//! early by another request of the same session, so new wishes never wait for it. A partition that has
//! another owner than at its last read must show first that its log is the one that was read.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use kafka::private::{FetchAnswer, FetchFrom, FetchOutcome, FetchRequest, LinkPolicy, MIRROR_FETCH};
use kafka::{BrokerId, ErrorCode, Offset, TopicName};
use kafka_client::Connection;

use crate::link::{Sub, Wish};
use crate::local::{LocalError, read, start};
use crate::owners::{Owners, Seat};

/// How long a read waits at the broker when there is nothing; news ends it at once.
const WAIT_MS: u32 = 5_000;

/// The reading side of one link session.
pub struct Source {
    owners: Arc<Owners>,
    session: u64,
    pass_boe: bool,
    pass_ppe: bool,
    reads: HashMap<BrokerId, Reading>,
    running: FuturesUnordered<BoxFuture<'static, Event>>,
    is_looking: bool,
    /// Where each subscription was read last.
    seats: HashMap<Sub, Seat>,
}

/// A read that an owner has not answered yet.
struct Reading {
    subs: HashSet<Sub>,
    connection: Connection,
    /// It was told to end.
    is_woken: bool,
}

/// What a read found: for whom, from where, what.
pub type Found = Vec<(Sub, Offset, FetchOutcome)>;

/// What becomes of wishes that are not read now.
#[derive(Default)]
pub struct Begun {
    /// Nobody can be asked.
    pub failed: Found,
    /// They have moved, and are to be wished for again with proof.
    pub moved: Vec<Sub>,
}

enum Event {
    Looked(Result<(), LocalError>),
    Read { broker: BrokerId, asked: Vec<(Sub, Offset, TopicName)>, answer: Result<FetchAnswer, LocalError> },
    Woken,
}

impl Source {
    pub fn new(owners: Arc<Owners>, policy: &LinkPolicy) -> Source {
        let session = uuid::Uuid::new_v4().as_u64_pair().0;
        Source {
            owners,
            session,
            pass_boe: policy.boe_lanes,
            pass_ppe: policy.ppe_lanes,
            reads: HashMap::new(),
            running: FuturesUnordered::new(),
            is_looking: false,
            seats: HashMap::new(),
        }
    }

    /// Whether [`Self::next`] will come to something.
    pub fn is_busy(&self) -> bool {
        !self.running.is_empty()
    }

    /// Begins reads of owners that have none under way; one that waits is ended where there is more to ask
    /// of its owner. `bytes_max` is for all of them together.
    pub fn begin(&mut self, wishes: Vec<Wish>, bytes_max: u32) -> Begun {
        let mut begun = Begun::default();
        let mut groups: HashMap<BrokerId, (Connection, Vec<Wish>)> = HashMap::new();
        let mut unknown = BTreeSet::new();
        for wish in wishes {
            let place = (wish.from.topic.clone(), wish.from.partition);
            match self.owners.seat(&place) {
                None => drop(unknown.insert(place.0)),
                Some(Err(reason)) => {
                    self.owners.forget(&place.0);
                    begun.failed.push((wish.sub, wish.from.from, not_now(reason)));
                }
                Some(Ok(seat)) => {
                    let before = self.seats.insert(wish.sub, seat.clone());
                    if before.is_some_and(|before| !before.is_same(&seat)) {
                        begun.moved.push(wish.sub);
                        continue;
                    }
                    groups.entry(seat.broker).or_insert((seat.connection, Vec::new())).1.push(wish);
                }
            }
        }
        if !unknown.is_empty() && !self.is_looking {
            self.is_looking = true;
            let owners = self.owners.clone();
            self.running.push(Box::pin(async move { Event::Looked(owners.look(unknown).await) }));
        }
        let idle = groups.keys().filter(|broker| !self.reads.contains_key(broker)).count();
        let share = (bytes_max as usize / (self.reads.len() + idle).max(1)).max(1) as u32;
        for (broker, (connection, wishes)) in groups {
            match self.reads.get_mut(&broker) {
                None => self.read(broker, connection, wishes, share),
                Some(reading) if wishes.iter().any(|wish| !reading.subs.contains(&wish.sub)) => {
                    if !std::mem::replace(&mut reading.is_woken, true) {
                        let connection = reading.connection.clone();
                        self.wake(connection);
                    }
                }
                Some(_) => {}
            }
        }
        begun
    }

    /// The next read that is answered, or an owner that was found. Fails where no broker of the region
    /// can be reached. Safe to cancel.
    pub async fn next(&mut self) -> Result<Found, LocalError> {
        match self.running.next().await {
            None | Some(Event::Woken) => Ok(Vec::new()),
            Some(Event::Looked(looked)) => {
                self.is_looking = false;
                looked.map(|()| Vec::new())
            }
            Some(Event::Read { broker, asked, answer }) => {
                self.reads.remove(&broker);
                self.found(asked, answer)
            }
        }
    }

    /// A subscription that is not wished for any more.
    pub fn keep_only(&mut self, is_live: impl Fn(Sub) -> bool) {
        self.seats.retain(|sub, _| is_live(*sub));
    }

    fn found(
        &self,
        asked: Vec<(Sub, Offset, TopicName)>,
        answer: Result<FetchAnswer, LocalError>,
    ) -> Result<Found, LocalError> {
        let answer = match answer {
            Ok(answer) => answer,
            Err(error) if error.is_of_one_broker() => {
                let failed = |(sub, from, topic): (Sub, Offset, TopicName)| {
                    self.owners.forget(&topic);
                    (sub, from, not_now(error.to_string()))
                };
                return Ok(asked.into_iter().map(failed).collect());
            }
            Err(error) => return Err(error),
        };
        let found = answer.partitions.into_iter().filter_map(|fetched| {
            let (sub, from, topic) = asked.get(fetched.index as usize)?;
            if matches!(fetched.outcome, FetchOutcome::Failed { .. }) {
                self.owners.forget(topic);
            }
            Some((*sub, *from, fetched.outcome))
        });
        Ok(found.collect())
    }

    /// Begins a read; it waits at the broker until there is something.
    fn read(&mut self, broker: BrokerId, connection: Connection, wishes: Vec<Wish>, bytes_max: u32) {
        let subs = wishes.iter().map(|wish| wish.sub).collect();
        self.reads.insert(broker, Reading { subs, connection: connection.clone(), is_woken: false });
        let asked = wishes.iter().map(|w| (w.sub, w.from.from, w.from.topic.clone())).collect();
        let request = self.request(wishes.into_iter().map(|wish| wish.from).collect(), bytes_max);
        self.running.push(Box::pin(async move {
            let answer = match start(&connection, MIRROR_FETCH, &request).await {
                Ok(answer) => read(MIRROR_FETCH, answer).await,
                Err(error) => Err(error),
            };
            Event::Read { broker, asked, answer }
        }));
    }

    /// Ends a read that waits.
    fn wake(&mut self, connection: Connection) {
        let request = self.request(Vec::new(), 0);
        self.running.push(Box::pin(async move {
            // The read itself reports a broker that is gone.
            if let Ok(answer) = start(&connection, MIRROR_FETCH, &request).await {
                let _ = read::<FetchAnswer>(MIRROR_FETCH, answer).await;
            }
            Event::Woken
        }));
    }

    fn request(&self, partitions: Vec<FetchFrom>, bytes_max: u32) -> FetchRequest {
        FetchRequest {
            session: self.session,
            wait_ms: WAIT_MS,
            bytes_max,
            pass_boe: self.pass_boe,
            pass_ppe: self.pass_ppe,
            partitions,
        }
    }
}

fn not_now(reason: String) -> FetchOutcome {
    FetchOutcome::Failed { code: ErrorCode::NotLeaderOrFollower, reason }
}
