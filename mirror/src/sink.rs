//! What a peer's topics ask of this region: topics as the peer has them, positions, notes.
//!
//! The topic task creates, grows and aligns topics, reads vectors and keeps notes. It shares the
//! connections to owners with the append task, so a position that is read sees every append that was
//! started before. A position that another owner, or another life of it, gave is read again.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use chassis::metrics::Counter;
use kafka::private::{LinkPolicy, LinkState, Note, NoteKind, PartitionVector, TopicInfo};
use kafka::{ErrorCode, Offset, PartitionIndex, RegionId, TimestampMs, TopicId, TopicName};
use tokio::sync::{mpsc, watch};
use tracing::{info, warn};

use crate::link::{Appended, Halt, Place, Position};
use crate::local::{Local, LocalError};
use crate::owners::{Owners, Seat};
use crate::policy::{Align, Plan, follows_deletion, plan};
use crate::region::Topics;

/// Partitions whose vectors are read in one request.
const VECTORS_MAX: usize = 1_000;

/// What the sink tells the link.
#[derive(Debug)]
pub enum SinkEvent {
    Appended(Vec<Appended>),
    Want(Vec<Position>),
    Halt(Vec<(Place, Halt)>),
    /// This incarnation of the peer's topic had a copy here, which was deleted by a person.
    TellDeleted(TopicName, TopicId),
    /// The session cannot go on.
    Failed(LocalError),
}

/// Work of the topic task.
#[derive(Debug)]
pub enum TopicJob {
    /// Topics that the peer offers.
    Offered(Vec<TopicInfo>),
    Gone(Vec<TopicName>),
    /// Read positions again.
    Reposition(Vec<Place>),
    /// The peer's copy of this incarnation of a topic here was deleted.
    Deleted {
        topic: TopicName,
        incarnation: TopicId,
    },
    Truncated {
        place: Place,
        next: Offset,
        reason: String,
    },
    Quarantined {
        place: Place,
        reason: String,
    },
    /// The source had lost a range before it was sent.
    Lost {
        place: Place,
        from: Offset,
        to: Offset,
    },
}

/// What the durable note of kind *linked* remembers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Linked {
    theirs: TopicId,
    /// Nil in a note of an older version.
    local: TopicId,
}

/// Keeps the topics of this region in line with those of the peer.
pub struct TopicTask {
    owners: Arc<Owners>,
    policy: LinkPolicy,
    peer: String,
    peer_region: RegionId,
    topics: watch::Receiver<Topics>,
    events: mpsc::Sender<SinkEvent>,
    resets: Counter,
    offered: HashMap<TopicName, TopicInfo>,
    /// Incarnations of the peer's topics that have been mirrored here, and of those here they went to.
    linked: HashMap<TopicName, Linked>,
    /// Incarnations of topics here that a link deleted, whichever link.
    followed: HashSet<TopicId>,
    /// Drift that was noted in this session.
    drifted: HashSet<TopicName>,
    /// What is wanted now: local incarnation, the peer's, partitions.
    wanted: HashMap<TopicName, (TopicId, TopicId, i32)>,
    /// Who gave the position that a partition is wanted from.
    seats: HashMap<Place, Seat>,
}

impl TopicTask {
    pub fn new(
        owners: Arc<Owners>,
        policy: LinkPolicy,
        peer: (String, RegionId),
        topics: watch::Receiver<Topics>,
        events: mpsc::Sender<SinkEvent>,
        resets: Counter,
    ) -> TopicTask {
        let (peer, peer_region) = peer;
        TopicTask {
            owners,
            policy,
            peer,
            peer_region,
            topics,
            events,
            resets,
            offered: HashMap::new(),
            linked: HashMap::new(),
            followed: HashSet::new(),
            drifted: HashSet::new(),
            wanted: HashMap::new(),
            seats: HashMap::new(),
        }
    }

    /// A broker, for what every broker does.
    async fn local(&self) -> Result<Local, LocalError> {
        self.owners.any().await
    }

    /// Runs until the jobs end or the broker fails.
    pub async fn run(mut self, mut jobs: mpsc::Receiver<TopicJob>) {
        if let Err(error) = self.work(&mut jobs).await {
            let _ = self.events.send(SinkEvent::Failed(error)).await;
        }
    }

    async fn work(&mut self, jobs: &mut mpsc::Receiver<TopicJob>) -> Result<(), LocalError> {
        self.remember().await?;
        let mut before = self.topics.borrow_and_update().clone();
        let mut look = tokio::time::interval(SEATS_EVERY);
        look.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = look.tick() => {
                    let moved = self.moved().await?;
                    if !moved.is_empty() {
                        self.reposition(moved).await?;
                    }
                }
                job = jobs.recv() => match job {
                    Some(job) => self.take(job).await?,
                    None => return Ok(()),
                },
                changed = self.topics.changed() => {
                    if changed.is_err() {
                        return Ok(());
                    }
                    let after = self.topics.borrow_and_update().clone();
                    let again = self.changed_here(&before, &after);
                    before = after;
                    for topic in again {
                        self.align(topic).await?;
                    }
                }
            }
        }
    }

    /// Partitions whose owner is another than the one that gave their position, or leads another life: what
    /// that one held and had not stored is lost to its heir, and nobody would send it again.
    async fn moved(&self) -> Result<Vec<Place>, LocalError> {
        let topics: BTreeSet<TopicName> = self.seats.keys().map(|(topic, _)| topic.clone()).collect();
        self.owners.look(topics).await?;
        // While nobody leads it there is nobody to ask.
        let now = |place: &Place| self.owners.seat(place).and_then(Result::ok);
        let moved =
            self.seats.iter().filter(|(place, seat)| now(place).is_some_and(|now| !seat.is_same(&now)));
        Ok(moved.map(|(place, _)| place.clone()).collect())
    }

    /// Reads the durable notes that decide what becomes of a topic that is missing here.
    async fn remember(&mut self) -> Result<(), LocalError> {
        for note in self.local().await?.notes(&self.peer).await? {
            if note.kind == NoteKind::Linked {
                let local = note.text.parse().map_or(NOBODY, TopicId);
                self.linked.insert(note.topic, Linked { theirs: note.incarnation, local });
            }
        }
        self.read_followed().await
    }

    /// Deletions that a link followed may be of any link of this region, and of this moment.
    async fn read_followed(&mut self) -> Result<(), LocalError> {
        let notes = self.local().await?.notes("").await?.into_iter();
        let deletions = notes.filter(|note| note.kind == NoteKind::Deletion);
        self.followed = deletions.map(|note| note.incarnation).collect();
        Ok(())
    }

    /// Offered topics that are others here than they were, or than what is wanted: one that came
    /// and went between two looks is in neither list.
    fn changed_here(&self, before: &Topics, after: &Topics) -> Vec<TopicInfo> {
        let differs = |name: &TopicName| {
            let now = after.by_name(name);
            let wanted = self.wanted.get(name);
            before.by_name(name) != now || wanted.is_some_and(|(id, ..)| now.map(|t| t.id) != Some(*id))
        };
        self.offered.values().filter(|topic| differs(&topic.name)).cloned().collect()
    }

    async fn take(&mut self, job: TopicJob) -> Result<(), LocalError> {
        match job {
            TopicJob::Offered(topics) => {
                for topic in topics {
                    self.offered.insert(topic.name.clone(), topic.clone());
                    self.align(topic).await?;
                }
                Ok(())
            }
            TopicJob::Gone(names) => {
                for name in &names {
                    self.offered.remove(name);
                    self.wanted.remove(name);
                }
                self.seats.retain(|(topic, _), _| !names.contains(topic));
                Ok(())
            }
            TopicJob::Reposition(places) => self.reposition(places).await,
            TopicJob::Deleted { topic, incarnation } => self.follow_deletion(topic, incarnation).await,
            TopicJob::Truncated { place, next, reason } => {
                warn!(peer = self.peer, topic = %place.0, partition = %place.1, %reason, "partition stopped");
                let incarnation = self.incarnation(&place.0);
                self.note(NoteKind::Reset, &place, incarnation, (next, next), reason).await
            }
            TopicJob::Quarantined { place, reason } => {
                warn!(peer = self.peer, topic = %place.0, partition = %place.1, %reason, "partition stopped");
                let incarnation = self.incarnation(&place.0);
                let at = self.next_of(&place).await?;
                self.note(NoteKind::Quarantine, &place, incarnation, (at, at), reason).await
            }
            TopicJob::Lost { place, from, to } => {
                let text = format!("the source no longer has offsets {from} to {to}");
                warn!(peer = self.peer, topic = %place.0, partition = %place.1, "{text}");
                let incarnation = self.incarnation(&place.0);
                self.note(NoteKind::Gap, &place, incarnation, (from, to), text).await
            }
        }
    }

    fn incarnation(&self, topic: &TopicName) -> TopicId {
        self.offered.get(topic).map_or(NOBODY, |info| info.id)
    }

    async fn next_of(&self, place: &Place) -> Result<Offset, LocalError> {
        let id = self.incarnation(&place.0);
        let vectors = self.owners.vectors(std::slice::from_ref(place)).await?;
        let held = vectors.first().and_then(|(vector, _)| self.held(vector, id));
        Ok(held.map_or(Offset::ZERO, |(next, _)| next))
    }

    /// Brings a topic in line, and wants its partitions or says why not.
    async fn align(&mut self, theirs: TopicInfo) -> Result<(), LocalError> {
        if !self.policy.lets(&theirs.name) {
            let reason = "the policy of this link leaves this topic out".to_owned();
            return self.hold(&theirs, Halt::Paused(reason)).await;
        }
        let (region, local) = {
            let topics = self.topics.borrow();
            (topics.region, topics.by_name(&theirs.name).cloned())
        };
        let planned = match &local {
            Some(local) => plan(&theirs, self.peer_region, Some(local), region, false),
            None => self.plan_missing(&theirs, region).await?,
        };
        if planned == Plan::Align(Align::default()) && self.is_wanted(&theirs, local.as_ref().map(|t| t.id)) {
            return Ok(());
        }
        let done = match planned {
            Plan::Hold(reason) => return self.hold(&theirs, Halt::Paused(reason)).await,
            Plan::Deleted => return self.hold_deleted(&theirs).await,
            Plan::Create => self.local().await?.create_topic(&theirs).await,
            Plan::Align(align) => self.align_existing(&theirs, align).await,
        };
        match done {
            Ok(()) => self.want(&theirs, 0..theirs.partitions).await,
            // The broker is there and says no: that is the topic's trouble alone.
            Err(LocalError::Client(error @ kafka_client::ClientError::Refused { .. })) => {
                let at = now_plus(ALIGN_RETRY_MS);
                self.hold(&theirs, Halt::Retry(at, error.to_string())).await
            }
            Err(error) => Err(error),
        }
    }

    /// Whether all its partitions are wanted already, for this local incarnation where it is known.
    fn is_wanted(&self, theirs: &TopicInfo, local: Option<TopicId>) -> bool {
        self.wanted.get(&theirs.name).is_some_and(|(id, incarnation, partitions)| {
            *incarnation == theirs.id
                && *partitions == theirs.partitions
                && local.is_none_or(|local| local == *id)
        })
    }

    /// The list of topics may be older than a topic that was just created, so ask before one counts
    /// as deleted.
    async fn plan_missing(&mut self, theirs: &TopicInfo, region: RegionId) -> Result<Plan, LocalError> {
        let deleted = self.has_linked(&theirs.name, theirs.id);
        if deleted {
            let first = self.owners.vectors(&[(theirs.name.clone(), PartitionIndex(0))]).await?;
            let first = first.first().map(|(vector, _)| vector);
            let error = first.map(|vector| vector.error);
            if let Some(there) = first.filter(|vector| vector.error == ErrorCode::None)
                && self.wanted.get(&theirs.name).is_some_and(|(id, ..)| *id != there.id)
            {
                self.wanted.remove(&theirs.name);
            }
            // Only the broker's word that there is no such topic is a deletion; whatever else it says, ask again.
            if error != Some(ErrorCode::UnknownTopicOrPartition) {
                return Ok(Plan::Align(Align::default()));
            }
        }
        Ok(plan(theirs, self.peer_region, None, region, deleted))
    }

    fn has_linked(&self, topic: &TopicName, theirs: TopicId) -> bool {
        self.linked.get(topic).is_some_and(|linked| linked.theirs == theirs)
    }

    /// The topic was here and is not any more: it stays away, and where deletions cross the peer is told,
    /// unless a link did it: what a link deleted is for the region that began it to tell.
    async fn hold_deleted(&mut self, theirs: &TopicInfo) -> Result<(), LocalError> {
        self.read_followed().await?;
        let local = self.linked.get(&theirs.name).map_or(NOBODY, |linked| linked.local);
        let reason = match self.followed.contains(&local) {
            true => "deleted here because another region deleted it; a link does not bring a topic back",
            false => "deleted in this region; a link does not bring a topic back",
        };
        let tell = self.policy.deletions && local != NOBODY && !self.followed.contains(&local);
        if tell {
            info!(peer = self.peer, topic = %theirs.name, "deleted here: the peer is told");
            let _ = self.events.send(SinkEvent::TellDeleted(theirs.name.clone(), theirs.id)).await;
        }
        self.hold(theirs, Halt::Paused(reason.to_owned())).await
    }

    /// Deletes a topic here because the peer's copy of it was deleted, if this link's policy says so too.
    async fn follow_deletion(&mut self, topic: TopicName, incarnation: TopicId) -> Result<(), LocalError> {
        let here = self.topics.borrow().by_name(&topic).cloned();
        if !follows_deletion(here.as_ref(), incarnation) {
            return Ok(());
        }
        if !self.policy.deletions || !self.policy.lets(&topic) {
            info!(peer = self.peer, %topic, "deleted by the peer, and kept here: deletions do not cross this link");
            return Ok(());
        }
        let text = format!("deleted here because it was deleted in {} (id {incarnation} here)", self.peer);
        warn!(peer = self.peer, %topic, "{text}");
        // Noted first: a crash in between leaves a note of what the peer asks for again, never a deletion
        // that looks like a person's.
        let place = (topic.clone(), PartitionIndex(-1));
        self.note(NoteKind::Deletion, &place, incarnation, (Offset(0), Offset(0)), text).await?;
        // What the peer makes under this name from now on is another topic and is welcome.
        self.note_linked(&topic, Linked { theirs: NOBODY, local: NOBODY }).await?;
        match self.local().await?.delete_topic(incarnation).await {
            Err(LocalError::Client(error @ kafka_client::ClientError::Refused { .. })) => {
                warn!(peer = self.peer, %topic, "not deleted yet, until the link's next start: {error}");
                Ok(())
            }
            done => done,
        }
    }

    async fn note_linked(&mut self, topic: &TopicName, linked: Linked) -> Result<(), LocalError> {
        let place = (topic.clone(), PartitionIndex(-1));
        let local = linked.local.to_string();
        self.note(NoteKind::Linked, &place, linked.theirs, (Offset(0), Offset(0)), local).await?;
        self.linked.insert(topic.clone(), linked);
        Ok(())
    }

    async fn align_existing(&mut self, theirs: &TopicInfo, align: Align) -> Result<(), LocalError> {
        if !align.drift.is_empty() && self.drifted.insert(theirs.name.clone()) {
            let winner =
                if align.set.is_empty() && align.unset.is_empty() { "this region" } else { "the peer" };
            let keys = align.drift.join(", ");
            let text = format!("configurations differ in {keys}; {winner} changed last and is right");
            info!(peer = self.peer, topic = %theirs.name, "{text}");
            let place = (theirs.name.clone(), PartitionIndex(-1));
            self.note(NoteKind::Drift, &place, theirs.id, (Offset(0), Offset(0)), text).await?;
        }
        if !align.set.is_empty() || !align.unset.is_empty() {
            self.local().await?.alter_topic(&theirs.name, &align.set, &align.unset).await?;
            self.drifted.remove(&theirs.name);
        }
        match align.grow_to {
            Some(count) => self.local().await?.grow_topic(&theirs.name, count).await,
            None => Ok(()),
        }
    }

    async fn hold(&mut self, topic: &TopicInfo, halt: Halt) -> Result<(), LocalError> {
        self.wanted.remove(&topic.name);
        let places =
            (0..topic.partitions).map(|index| ((topic.name.clone(), PartitionIndex(index)), halt.clone()));
        let _ = self.events.send(SinkEvent::Halt(places.collect())).await;
        Ok(())
    }

    async fn want(&mut self, theirs: &TopicInfo, indexes: std::ops::Range<i32>) -> Result<(), LocalError> {
        let indexes: Vec<i32> = indexes.collect();
        for some in indexes.chunks(VECTORS_MAX) {
            let places: Vec<Place> = some.iter().map(|i| (theirs.name.clone(), PartitionIndex(*i))).collect();
            self.want_places(places).await?;
        }
        // Of a partition that was not open there is no incarnation yet; it is wanted again soon.
        if let Some((local, ..)) = self.wanted.get(&theirs.name).copied() {
            let linked = Linked { theirs: theirs.id, local };
            if self.linked.get(&theirs.name) != Some(&linked) {
                self.note_linked(&theirs.name, linked).await?;
            }
        }
        Ok(())
    }

    async fn reposition(&mut self, places: Vec<Place>) -> Result<(), LocalError> {
        let (mut present, mut topics) = (Vec::new(), HashSet::new());
        for place in places {
            // A topic that is not here any more has to be looked at as a whole.
            let here = self.topics.borrow().by_name(&place.0).is_some();
            if here && self.has_linked(&place.0, self.incarnation(&place.0)) {
                present.push(place);
            } else {
                topics.insert(place.0);
            }
        }
        for some in present.chunks(VECTORS_MAX) {
            self.want_places(some.to_vec()).await?;
        }
        for name in topics {
            if let Some(theirs) = self.offered.get(&name).cloned() {
                self.align(theirs).await?;
            }
        }
        Ok(())
    }

    /// Reads where these partitions stand and tells the link.
    async fn want_places(&mut self, places: Vec<Place>) -> Result<(), LocalError> {
        let vectors = self.owners.vectors(&places).await?;
        let (mut wants, mut halts) = (Vec::new(), Vec::new());
        for (place, (vector, seat)) in places.into_iter().zip(vectors) {
            self.seats.remove(&place);
            let Some(theirs) = self.offered.get(&place.0) else { continue };
            let incarnation = theirs.id;
            if vector.error != ErrorCode::None {
                // Just created and not open yet, or just deleted: the next look says which.
                let reason = format!("the partition is not open here: {:?}", vector.error);
                halts.push((place, Halt::Retry(now_plus(OPEN_RETRY_MS), reason)));
                continue;
            }
            if let Some(seat) = seat {
                self.seats.insert(place.clone(), seat);
            }
            self.note_reset(&place, incarnation, &vector).await?;
            let held = self.held(&vector, incarnation);
            wants.push(Position {
                topic: place.0,
                partition: place.1,
                incarnation,
                local: vector.id,
                next: held.map_or(Offset::ZERO, |(next, _)| next),
                claim: held.map(|(_, claim)| claim),
            });
        }
        if !halts.is_empty() {
            let _ = self.events.send(SinkEvent::Halt(halts)).await;
        }
        for want in &wants {
            let entry =
                (want.local, want.incarnation, self.offered.get(&want.topic).map_or(0, |t| t.partitions));
            self.wanted.insert(want.topic.clone(), entry);
        }
        if !wants.is_empty() {
            let _ = self.events.send(SinkEvent::Want(wants)).await;
        }
        Ok(())
    }

    fn held(&self, vector: &PartitionVector, id: TopicId) -> Option<(Offset, kafka::private::Claim)> {
        let of = |origin: &&kafka::private::OriginPosition| {
            origin.region == self.peer_region && origin.incarnation == id
        };
        vector.origins.iter().find(of).map(|origin| (origin.next, origin.last))
    }

    /// An earlier incarnation is here and the offered one is not: the source was recreated.
    async fn note_reset(
        &mut self,
        place: &Place,
        incarnation: TopicId,
        vector: &PartitionVector,
    ) -> Result<(), LocalError> {
        if self.held(vector, incarnation).is_some() {
            return Ok(());
        }
        let earlier = vector.origins.iter().filter(|origin| origin.region == self.peer_region);
        let Some(last) = earlier.max_by_key(|origin| origin.next) else { return Ok(()) };
        let text = format!(
            "the topic was recreated in {}: of the earlier one (id {}) offsets below {} are kept here, the \
             new one (id {incarnation}) is mirrored from its beginning",
            self.peer, last.incarnation, last.next
        );
        warn!(peer = self.peer, topic = %place.0, partition = %place.1, "{text}");
        self.resets.inc();
        self.note(NoteKind::Reset, place, incarnation, (last.next, last.next), text).await
    }

    async fn note(
        &self,
        kind: NoteKind,
        place: &Place,
        incarnation: TopicId,
        (from, to): (Offset, Offset),
        text: String,
    ) -> Result<(), LocalError> {
        let note = Note {
            peer: self.peer.clone(),
            kind,
            topic: place.0.clone(),
            partition: place.1,
            incarnation,
            from,
            to,
            at: wall_clock(),
            text,
        };
        match self.local().await?.note(vec![note]).await {
            // A full list of notes must not stop the data; the broker has logged it.
            Err(LocalError::Refused { .. }) => Ok(()),
            other => other,
        }
    }
}

/// Names a state in metrics and logs.
pub fn state_name(state: LinkState) -> &'static str {
    match state {
        LinkState::Connecting => "connecting",
        LinkState::Active => "active",
        LinkState::Lagging => "lagging",
        LinkState::Paused => "paused",
        LinkState::Faulted => "faulted",
    }
}

fn wall_clock() -> TimestampMs {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    TimestampMs(i64::try_from(since.as_millis()).unwrap_or(i64::MAX))
}

fn now_plus(ms: u64) -> crate::link::Now {
    crate::region::now().plus(ms)
}

/// No topic.
const NOBODY: TopicId = TopicId(uuid::Uuid::nil());
const ALIGN_RETRY_MS: u64 = 10_000;
const OPEN_RETRY_MS: u64 = 300;
/// How often owners are compared with those that gave the positions.
const SEATS_EVERY: Duration = Duration::from_secs(1);
