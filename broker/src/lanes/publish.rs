//! Telling every broker who reads what, before a member learns of its assignment.
//!
//! Each shard of groups here is told to each life of each other broker: whole at first, then what changes.
//! Owners do not matter, so a take-over changes nothing. What waits for a broker that is slow is the latest
//! of each group, never more.
//!
//! Invariant: an assignment counts as told when every broker that is alive has taken it in for the life that
//! it leads. The brokers that were alive when the shard began are asked of the metadata store, not of the
//! view, which may be older than the shard.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use kafka::{ErrorCode, GroupId};
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::cuts::READY_MAX;
use crate::coordinator::ShardId;
use crate::peers::{GroupWords, Peers, Tell, Told};
use crate::switches;

/// Tells the shards of this broker to the others.
pub struct Publisher {
    peers: Arc<Peers>,
    inner: Mutex<Inner>,
    /// Something is to be told.
    changed: watch::Sender<u64>,
    /// Something has been taken in, or nobody waits for it any more.
    taken: watch::Sender<u64>,
}

#[derive(Default)]
struct Inner {
    /// Counts changes of groups.
    seq: u64,
    shards: BTreeMap<usize, Shard>,
    /// How far each life of a broker has been told each shard.
    told: HashMap<(i32, u64), BTreeMap<usize, Upto>>,
}

struct Shard {
    id: ShardId,
    loaded: bool,
    /// The view knows every broker that was alive when this began.
    knows_brokers: bool,
    /// Another coordinator has it.
    is_over: bool,
    groups: HashMap<GroupId, (u64, Arc<GroupWords>)>,
    by_seq: BTreeMap<u64, GroupId>,
    /// Groups without members, until everybody knows.
    ended: BTreeMap<u64, GroupId>,
}

#[derive(Clone, Copy)]
struct Upto {
    epoch: i32,
    seq: u64,
}

/// What the next message to a broker holds.
struct Parcel {
    id: ShardId,
    whole: bool,
    upto: u64,
    groups: Vec<Arc<GroupWords>>,
}

/// Between two tries to tell a broker.
const RETRY: Duration = Duration::from_millis(200);
/// How late a test may want it.
const LATE: Duration = Duration::from_millis(500);
/// Between two looks whether the view has come up to the store.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

impl Publisher {
    pub fn new(peers: Arc<Peers>) -> Arc<Publisher> {
        Arc::new(Publisher {
            peers,
            inner: Mutex::default(),
            changed: watch::Sender::new(0),
            taken: watch::Sender::new(0),
        })
    }

    pub fn begins(self: &Arc<Self>, id: ShardId) {
        {
            let mut inner = self.inner.lock();
            if inner.shards.get(&id.index).is_some_and(|shard| shard.id.epoch >= id.epoch) {
                return;
            }
            inner.shards.insert(id.index, Shard::new(id));
        }
        let publisher = self.clone();
        tokio::spawn(async move { publisher.learn_brokers(id).await });
    }

    pub fn loaded(&self, id: ShardId) {
        if let Some(shard) = self.inner.lock().shard_mut(id) {
            shard.loaded = true;
        }
        self.changed.send_modify(|n| *n += 1);
    }

    pub fn ended(&self, id: ShardId) {
        let mut inner = self.inner.lock();
        if inner.shard_mut(id).is_some() {
            inner.shards.remove(&id.index);
        }
        drop(inner);
        self.taken.send_modify(|n| *n += 1);
    }

    /// Notes what is to be told of a group. Ready when every other broker has taken it in; an error if that
    /// takes too long, or another coordinator has the group.
    pub fn tell(
        self: &Arc<Self>,
        id: ShardId,
        group: &GroupId,
        words: GroupWords,
    ) -> impl Future<Output = Result<(), ErrorCode>> + Send + use<> {
        let seq = {
            let mut inner = self.inner.lock();
            inner.seq += 1;
            let seq = inner.seq;
            if let Some(shard) = inner.shard_mut(id) {
                shard.note(seq, group, words);
            }
            seq
        };
        self.changed.send_modify(|n| *n += 1);
        let publisher = self.clone();
        async move { publisher.until_taken(id, seq).await }
    }

    async fn until_taken(&self, id: ShardId, seq: u64) -> Result<(), ErrorCode> {
        let (mut taken, mut changes) = (self.taken.subscribe(), self.peers.changes());
        let all = async {
            loop {
                if let Some(outcome) = self.outcome(id, seq) {
                    return outcome;
                }
                tokio::select! {
                    _ = taken.changed() => {}
                    _ = changes.changed() => {}
                }
            }
        };
        match tokio::time::timeout(READY_MAX, all).await {
            Ok(outcome) => outcome,
            Err(_) => {
                let silent = self.silent(id, seq);
                tracing::warn!(?silent, "an assignment waits in vain for brokers that must know its readers");
                Err(ErrorCode::RebalanceInProgress)
            }
        }
    }

    /// `None`: not yet.
    fn outcome(&self, id: ShardId, seq: u64) -> Option<Result<(), ErrorCode>> {
        if switches::view_acks_off() {
            return Some(Ok(()));
        }
        let others = self.peers.others();
        let mut inner = self.inner.lock();
        let Some(shard) = inner.shard_mut(id) else { return Some(Err(ErrorCode::NotCoordinator)) };
        if shard.is_over {
            return Some(Err(ErrorCode::NotCoordinator));
        }
        if !shard.knows_brokers {
            return None;
        }
        others.iter().all(|life| inner.has_taken(life, id, seq)).then_some(Ok(()))
    }

    fn silent(&self, id: ShardId, seq: u64) -> Vec<i32> {
        let others = self.peers.others();
        let inner = self.inner.lock();
        others.iter().filter(|life| !inner.has_taken(life, id, seq)).map(|(broker, _)| *broker).collect()
    }

    /// A broker that registered before this shard began must not be forgotten because the view is late.
    async fn learn_brokers(&self, id: ShardId) {
        loop {
            match self.peers.stored_brokers().await {
                Ok(stored) => {
                    let view = self.peers.view();
                    let known = |(broker, life): &(i32, u64)| {
                        view.brokers.get(broker).is_some_and(|known| known.life >= *life)
                    };
                    if stored.iter().all(known) {
                        break;
                    }
                }
                Err(error) => tracing::debug!(%error, "the brokers that are alive are asked for again"),
            }
            tokio::time::sleep(LOOK_AGAIN).await;
            if self.inner.lock().shard_mut(id).is_none() {
                return;
            }
        }
        if let Some(shard) = self.inner.lock().shard_mut(id) {
            shard.knows_brokers = true;
        }
        self.taken.send_modify(|n| *n += 1);
    }

    /// Keeps a task for each life of each other broker, until `stop`.
    pub async fn run(self: Arc<Self>, stop: CancellationToken) {
        let mut changes = self.peers.changes();
        let mut tasks: HashMap<(i32, u64), CancellationToken> = HashMap::new();
        loop {
            let alive: BTreeSet<(i32, u64)> = self.peers.others().into_iter().collect();
            tasks.retain(|life, task| {
                let stays = alive.contains(life);
                if !stays {
                    task.cancel();
                }
                stays
            });
            {
                let mut inner = self.inner.lock();
                inner.told.retain(|life, _| alive.contains(life));
                // One that has been told nothing holds back what must not be forgotten yet.
                for life in &alive {
                    inner.told.entry(*life).or_default();
                }
            }
            for life in alive {
                tasks.entry(life).or_insert_with(|| {
                    let (publisher, over) = (self.clone(), stop.child_token());
                    let ends = over.clone();
                    tokio::spawn(async move {
                        ends.run_until_cancelled(publisher.follow(life)).await;
                    });
                    over
                });
            }
            tokio::select! {
                _ = changes.changed() => {}
                () = stop.cancelled() => return,
            }
        }
    }

    /// Tells one life of one broker what there is to tell, for ever.
    async fn follow(&self, (broker, life): (i32, u64)) {
        let mut changed = self.changed.subscribe();
        loop {
            changed.mark_unchanged();
            let next = self.inner.lock().next_for((broker, life));
            let Some(parcel) = next else {
                let _ = changed.changed().await;
                continue;
            };
            let tell = Tell {
                life,
                shard: parcel.id.index,
                epoch: parcel.id.epoch,
                whole: parcel.whole,
                groups: parcel.groups.iter().map(|words| (**words).clone()).collect(),
            };
            if switches::late_views() {
                tokio::time::sleep(LATE).await;
            }
            match self.peers.tell_views(broker, tell).await {
                Ok(Told::Taken) => {
                    let upto = Upto { epoch: parcel.id.epoch, seq: parcel.upto };
                    self.inner.lock().note_taken((broker, life), parcel.id.index, upto);
                    self.taken.send_modify(|n| *n += 1);
                }
                Ok(Told::OldEpoch) => {
                    tracing::warn!(
                        broker,
                        shard = parcel.id.index,
                        "another coordinator has this shard of groups"
                    );
                    if let Some(shard) = self.inner.lock().shard_mut(parcel.id) {
                        shard.is_over = true;
                    }
                    self.taken.send_modify(|n| *n += 1);
                }
                Ok(Told::OtherLife) => tokio::time::sleep(RETRY).await,
                Err(error) => {
                    tracing::debug!(broker, %error, "a broker is told its readers again");
                    tokio::time::sleep(RETRY).await;
                }
            }
        }
    }
}

impl Shard {
    fn new(id: ShardId) -> Shard {
        Shard {
            id,
            loaded: false,
            knows_brokers: false,
            is_over: false,
            groups: HashMap::new(),
            by_seq: BTreeMap::new(),
            ended: BTreeMap::new(),
        }
    }

    fn note(&mut self, seq: u64, group: &GroupId, words: GroupWords) {
        if words.members.is_empty() {
            self.ended.insert(seq, group.clone());
        }
        self.by_seq.insert(seq, group.clone());
        if let Some((before, _)) = self.groups.insert(group.clone(), (seq, Arc::new(words))) {
            self.by_seq.remove(&before);
            self.ended.remove(&before);
        }
    }

    /// Everybody knows that these have no members.
    fn forget_ended(&mut self, upto: u64) {
        let later = self.ended.split_off(&(upto + 1));
        for (seq, group) in std::mem::replace(&mut self.ended, later) {
            self.by_seq.remove(&seq);
            self.groups.remove(&group);
        }
    }
}

impl Inner {
    fn shard_mut(&mut self, id: ShardId) -> Option<&mut Shard> {
        self.shards.get_mut(&id.index).filter(|shard| shard.id == id)
    }

    fn has_taken(&self, life: &(i32, u64), id: ShardId, seq: u64) -> bool {
        let upto = self.told.get(life).and_then(|told| told.get(&id.index));
        upto.is_some_and(|upto| upto.epoch == id.epoch && upto.seq >= seq)
    }

    fn next_for(&self, life: (i32, u64)) -> Option<Parcel> {
        let told = self.told.get(&life);
        self.shards.values().filter(|shard| shard.loaded && !shard.is_over).find_map(|shard| {
            let upto = told.and_then(|told| told.get(&shard.id.index));
            let upto = upto.filter(|upto| upto.epoch == shard.id.epoch);
            let words = |group: &GroupId| shard.groups.get(group).map(|(_, words)| words.clone());
            let parcel = |whole, groups| Parcel { id: shard.id, whole, upto: self.seq, groups };
            match upto {
                None => {
                    let with_members = shard.groups.values().filter(|(_, words)| !words.members.is_empty());
                    Some(parcel(true, with_members.map(|(_, words)| words.clone()).collect()))
                }
                Some(upto) => {
                    let newer = shard.by_seq.range(upto.seq + 1..);
                    let groups: Vec<_> = newer.filter_map(|(_, group)| words(group)).collect();
                    (!groups.is_empty()).then(|| parcel(false, groups))
                }
            }
        })
    }

    fn note_taken(&mut self, life: (i32, u64), index: usize, upto: Upto) {
        self.told.entry(life).or_default().insert(index, upto);
        let told = self.told.values().map(|told| told.get(&index).filter(|u| u.epoch == upto.epoch));
        let all = told.map(|upto| upto.map_or(0, |upto| upto.seq)).min().unwrap_or(0);
        if let Some(shard) = self.shards.get_mut(&index).filter(|shard| shard.id.epoch == upto.epoch) {
            shard.forget_ended(all);
        }
    }
}
