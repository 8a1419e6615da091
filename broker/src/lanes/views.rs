//! Who reads what: for each client id and partition, the groups that gave it to a client of that name.
//!
//! A Fetch carries no group, so it is matched by what its connection shows. The host only narrows
//! several candidates and never makes a Fetch unmatched, because NAT shows other addresses. Until every
//! coordinator has told its views, unmatched means "not known yet"; only then does it mean "no group".
//! In a cluster it is each life of a broker that must be told: what it knew in a life before may be old.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};

use kafka::{GroupId, PartitionIndex, TopicName};
use lane_core::View;
use parking_lot::{Mutex, RwLock};

use crate::server::Principal;
use crate::switches;

/// The view registry.
#[derive(Debug, Default)]
pub struct Views {
    inner: RwLock<Inner>,
    /// Every coordinator has told what it knows.
    known: AtomicBool,
    /// Pairs of groups that were reported as not to be told apart, and readers without a group.
    told: Mutex<HashSet<Warned>>,
}

#[derive(Debug, Default)]
struct Inner {
    /// The life that this broker leads; none for one that is alone.
    life: Option<u64>,
    /// The epochs that shards had when this life began: of each at least that must have been told whole.
    required: Option<BTreeMap<usize, i32>>,
    shards: HashMap<usize, Told>,
    readers: HashMap<String, HashMap<(TopicName, PartitionIndex), Vec<Candidate>>>,
    /// Where a group's candidates are, to replace them.
    groups: HashMap<GroupId, Vec<(String, TopicName, PartitionIndex)>>,
}

/// What was told of one shard of groups.
#[derive(Debug, Default)]
struct Told {
    /// The highest of which anything was heard, in any life.
    epoch: i32,
    /// Told whole in this life, under this epoch.
    whole: Option<i32>,
    /// Groups that a whole telling under way has named.
    named: Option<HashSet<GroupId>>,
    groups: HashSet<GroupId>,
}

/// What a coordinator tells of a shard.
#[derive(Clone, Copy, Debug)]
pub struct Telling {
    pub life: u64,
    pub shard: usize,
    pub epoch: i32,
    pub whole: bool,
    pub first: bool,
    pub last: bool,
}

/// Why nothing was taken in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Untold {
    OtherLife,
    OldEpoch,
}

#[derive(Clone, Debug)]
struct Candidate {
    group: GroupId,
    view: View,
    /// `None` until the member has been heard of after a start.
    principal: Option<Principal>,
    host: String,
}

/// A member of a group, as the registry needs it.
#[derive(Clone, Debug)]
pub struct Member<'a> {
    pub client_id: &'a str,
    pub principal: Option<Principal>,
    pub host: &'a str,
    pub partitions: &'a [(TopicName, PartitionIndex)],
}

/// What a connection shows of itself.
#[derive(Clone, Copy, Debug)]
pub struct Reader<'a> {
    pub client_id: &'a str,
    pub principal: &'a Principal,
    pub host: &'a str,
}

/// Who a reader is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    View(View),
    /// Of no group.
    NoGroup,
    /// Not known yet, or two groups that may not be mixed up: no progress.
    Wait,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Warned {
    Ambiguous(GroupId, GroupId),
    NoGroup(String, TopicName),
}

/// Two groups whose consumers call themselves the same on a partition, though what they may see differs.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Alike {
    pub client_id: String,
    pub topic: TopicName,
    pub groups: (GroupId, GroupId),
    /// They are on one host too, so that nothing tells them apart.
    pub same_host: bool,
    /// One of them is in a PPE lane: where they cannot be told apart, neither makes progress.
    pub stops: bool,
}

/// Most different warnings; beyond this none is given.
const TOLD_MAX: usize = 1000;

impl Views {
    /// Replaces what is known of `group`.
    pub fn replace(&self, group: &GroupId, view: &View, members: &[Member<'_>]) {
        self.inner.write().replace(group, view, members);
    }

    /// Another life of this broker in its cluster: everything must be told again.
    pub fn begin_life(&self, life: u64) {
        let mut inner = self.inner.write();
        let epochs: Vec<(usize, i32)> =
            inner.shards.iter().map(|(shard, told)| (*shard, told.epoch)).collect();
        *inner = Inner { life: Some(life), ..Inner::default() };
        for (shard, epoch) in epochs {
            inner.shards.insert(shard, Told { epoch, ..Told::default() });
        }
    }

    /// The life that this broker leads.
    pub fn life(&self) -> Option<u64> {
        self.inner.read().life
    }

    /// The epochs of all shards after `life` was on record.
    pub fn require(&self, life: u64, epochs: BTreeMap<usize, i32>) {
        let mut inner = self.inner.write();
        if inner.life == Some(life) {
            inner.required = Some(epochs);
        }
    }

    /// Begins to take in what a coordinator tells: whether it may go on.
    pub fn begin_telling(&self, telling: Telling) -> Result<(), Untold> {
        let mut inner = self.inner.write();
        inner.check(telling)?;
        let told = inner.shards.entry(telling.shard).or_default();
        told.epoch = telling.epoch;
        if telling.whole && telling.first {
            told.named = Some(HashSet::new());
        }
        Ok(())
    }

    /// A group of the shard. To be called between the beginning and the end of a telling.
    pub fn tell_group(
        &self,
        telling: Telling,
        group: &GroupId,
        view: &View,
        members: &[Member<'_>],
    ) -> Result<(), Untold> {
        let mut inner = self.inner.write();
        inner.check(telling)?;
        let told = inner.shards.entry(telling.shard).or_default();
        if telling.whole
            && let Some(named) = &mut told.named
        {
            named.insert(group.clone());
        }
        match members.is_empty() {
            true => drop(told.groups.remove(group)),
            false => drop(told.groups.insert(group.clone())),
        }
        inner.replace(group, view, members);
        Ok(())
    }

    /// The end of a telling. After the last part of a whole one, groups that it did not name are gone.
    pub fn end_telling(&self, telling: Telling) -> Result<(), Untold> {
        let mut inner = self.inner.write();
        inner.check(telling)?;
        let told = inner.shards.entry(telling.shard).or_default();
        if !(telling.whole && telling.last) {
            return Ok(());
        }
        let Some(named) = told.named.take() else { return Ok(()) };
        let gone: Vec<GroupId> = told.groups.extract_if(|group| !named.contains(group)).collect();
        told.whole = Some(telling.epoch);
        gone.iter().for_each(|group| inner.remove(group));
        Ok(())
    }

    /// Every coordinator has told its views: from now on unmatched means "no group".
    pub fn all_known(&self) {
        self.known.store(true, Ordering::Release);
    }

    /// Whether unmatched means "no group".
    pub fn is_known(&self) -> bool {
        let inner = self.inner.read();
        match inner.life {
            None => self.known.load(Ordering::Acquire),
            Some(_) if switches::view_lives_off() => true,
            Some(_) => inner.required.as_ref().is_some_and(|required| {
                let told = |(shard, epoch): (&usize, &i32)| {
                    inner.shards.get(shard).and_then(|told| told.whole).is_some_and(|whole| whole >= *epoch)
                };
                required.iter().all(told)
            }),
        }
    }

    /// Who reads this partition over such a connection.
    pub fn find(&self, reader: Reader<'_>, topic: &TopicName, partition: PartitionIndex) -> Found {
        // First: what makes everything known may bring this very reader.
        let known = self.is_known();
        let candidates = self.candidates(reader, topic, partition);
        let Some(first) = candidates.first() else {
            return if known { Found::NoGroup } else { Found::Wait };
        };
        let merged = View::merged(candidates.iter().map(|c| c.view.clone()));
        let mixed_up = matches!(merged, None | Some(View::AnyOf(_)));
        if mixed_up && let Some(other) = candidates.iter().find(|c| c.view != first.view) {
            self.tell_ambiguous(&first.group, &other.group, reader.client_id);
        }
        merged.map_or(Found::Wait, Found::View)
    }

    fn candidates(&self, reader: Reader<'_>, topic: &TopicName, partition: PartitionIndex) -> Vec<Candidate> {
        let inner = self.inner.read();
        let of_client = inner.readers.get(reader.client_id);
        let all = of_client.and_then(|r| r.get(&(topic.clone(), partition)));
        let fits = |c: &&Candidate| c.principal.as_ref().is_none_or(|p| p == reader.principal);
        let fitting: Vec<&Candidate> = all.into_iter().flatten().filter(fits).collect();
        let here: Vec<&Candidate> = fitting.iter().filter(|c| c.host == reader.host).copied().collect();
        let narrowed = if here.is_empty() { fitting } else { here };
        narrowed.into_iter().cloned().collect()
    }

    /// Says once that a client reads a topic with lanes without a group.
    pub fn tell_no_group(&self, client_id: &str, topic: &TopicName) {
        if self.tell(Warned::NoGroup(client_id.to_owned(), topic.clone())) {
            tracing::warn!(
                client_id, %topic,
                "a consumer without a group reads a topic with lanes; it sees baseline records only"
            );
        }
    }

    /// Pairs of groups whose readers cannot be told apart.
    pub fn ambiguous(&self) -> Vec<(GroupId, GroupId)> {
        let told = self.told.lock();
        let pair = |t: &Warned| match t {
            Warned::Ambiguous(a, b) => Some((a.clone(), b.clone())),
            Warned::NoGroup(..) => None,
        };
        told.iter().filter_map(pair).collect()
    }

    /// Client ids that read topics without a group, since the start.
    pub fn without_group(&self) -> Vec<(String, TopicName)> {
        let told = self.told.lock();
        let reader = |t: &Warned| match t {
            Warned::NoGroup(client_id, topic) => Some((client_id.clone(), topic.clone())),
            Warned::Ambiguous(..) => None,
        };
        told.iter().filter_map(reader).collect()
    }

    /// Every pair of groups behind one client id whose views differ, on topics that `looked_at` names.
    pub fn alike(&self, looked_at: &BTreeSet<TopicName>) -> Vec<Alike> {
        let mut found: BTreeMap<(String, TopicName, GroupId, GroupId), Alike> = BTreeMap::new();
        for (client_id, places) in &self.inner.read().readers {
            for ((topic, _), candidates) in places.iter().filter(|((topic, _), _)| looked_at.contains(topic))
            {
                for (at, one) in candidates.iter().enumerate() {
                    for other in &candidates[at + 1..] {
                        let Some(alike) = one.alike(other, client_id, topic) else { continue };
                        let (a, b) = alike.groups.clone();
                        let known = found.entry((client_id.clone(), topic.clone(), a, b));
                        known.and_modify(|known| known.same_host |= alike.same_host).or_insert(alike);
                    }
                }
            }
        }
        found.into_values().collect()
    }

    fn tell_ambiguous(&self, a: &GroupId, b: &GroupId, client_id: &str) {
        let (a, b) = if a < b { (a, b) } else { (b, a) };
        if self.tell(Warned::Ambiguous(a.clone(), b.clone())) {
            tracing::warn!(
                client_id, group = %a, other_group = %b,
                "consumers of two groups cannot be told apart; give each consumer its own client.id"
            );
        }
    }

    fn tell(&self, what: Warned) -> bool {
        let mut told = self.told.lock();
        told.len() < TOLD_MAX && told.insert(what)
    }
}

impl Candidate {
    fn alike(&self, other: &Candidate, client_id: &str, topic: &TopicName) -> Option<Alike> {
        let apart = matches!((&self.principal, &other.principal), (Some(a), Some(b)) if a != b);
        let merged = View::merged([self.view.clone(), other.view.clone()]);
        let stops = merged.is_none();
        if apart || !(stops || matches!(merged, Some(View::AnyOf(_)))) {
            return None;
        }
        let (a, b) =
            (self.group.clone().min(other.group.clone()), self.group.clone().max(other.group.clone()));
        let same_host = self.host == other.host;
        Some(Alike {
            client_id: client_id.to_owned(),
            topic: topic.clone(),
            groups: (a, b),
            same_host,
            stops,
        })
    }
}

impl Inner {
    fn check(&self, telling: Telling) -> Result<(), Untold> {
        if self.life != Some(telling.life) {
            return Err(Untold::OtherLife);
        }
        match self.shards.get(&telling.shard) {
            Some(told) if told.epoch > telling.epoch => Err(Untold::OldEpoch),
            _ => Ok(()),
        }
    }

    fn replace(&mut self, group: &GroupId, view: &View, members: &[Member<'_>]) {
        self.remove(group);
        let mut places = Vec::new();
        for member in members {
            for (topic, partition) in member.partitions {
                let reader = self.readers.entry(member.client_id.to_owned()).or_default();
                reader.entry((topic.clone(), *partition)).or_default().push(Candidate {
                    group: group.clone(),
                    view: view.clone(),
                    principal: member.principal.clone(),
                    host: member.host.to_owned(),
                });
                places.push((member.client_id.to_owned(), topic.clone(), *partition));
            }
        }
        if !places.is_empty() {
            self.groups.insert(group.clone(), places);
        }
    }

    fn remove(&mut self, group: &GroupId) {
        for (client_id, topic, partition) in self.groups.remove(group).unwrap_or_default() {
            let Some(reader) = self.readers.get_mut(&client_id) else { continue };
            let key = (topic, partition);
            if let Some(candidates) = reader.get_mut(&key) {
                candidates.retain(|c| c.group != *group);
                if candidates.is_empty() {
                    reader.remove(&key);
                }
            }
            if reader.is_empty() {
                self.readers.remove(&client_id);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use lane_core::Lane;

    use super::*;

    fn group(name: &str) -> GroupId {
        GroupId::new(name)
    }

    fn share() -> Vec<(TopicName, PartitionIndex)> {
        vec![(TopicName::parse("t").unwrap(), PartitionIndex(0))]
    }

    fn lane_view(group_name: &str, lane: &str) -> View {
        View::Lane(group(group_name), Lane::parse(lane).unwrap())
    }

    fn join(views: &Views, group_name: &str, view: &View, client_id: &str, host: &str) {
        let partitions = share();
        let member =
            Member { client_id, principal: Some(Principal::Anonymous), host, partitions: &partitions };
        views.replace(&group(group_name), view, &[member]);
    }

    fn find(views: &Views, client_id: &str, host: &str) -> Found {
        let reader = Reader { client_id, principal: &Principal::Anonymous, host };
        views.find(reader, &share()[0].0, PartitionIndex(0))
    }

    #[test]
    fn unmatched_means_wait_until_every_coordinator_has_spoken() {
        let views = Views::default();
        assert_eq!(find(&views, "rdkafka", "/1"), Found::Wait);
        join(&views, "orders", &View::Baseline(group("orders")), "rdkafka", "/1");
        assert_eq!(find(&views, "rdkafka", "/1"), Found::View(View::Baseline(group("orders"))));
        views.all_known();
        assert_eq!(find(&views, "other", "/1"), Found::NoGroup);
        views.replace(&group("orders"), &View::Baseline(group("orders")), &[]);
        assert_eq!(find(&views, "rdkafka", "/1"), Found::NoGroup);
        assert!(views.inner.read().readers.is_empty());
    }

    #[test]
    fn the_host_narrows_and_never_unmatches() {
        let views = Views::default();
        let orders = View::Baseline(group("orders"));
        join(&views, "orders", &orders, "rdkafka", "/1");
        assert_eq!(find(&views, "rdkafka", "/9"), Found::View(orders.clone()));
        join(&views, "billing", &View::Baseline(group("billing")), "rdkafka", "/2");
        assert_eq!(find(&views, "rdkafka", "/1"), Found::View(orders));
        assert!(matches!(find(&views, "rdkafka", "/9"), Found::View(View::AnyOf(both)) if both.len() == 2));
        assert_eq!(views.ambiguous(), [(group("billing"), group("orders"))]);
    }

    #[test]
    fn a_ppe_view_that_cannot_be_told_apart_makes_no_progress() {
        let views = Views::default();
        views.all_known();
        join(&views, "orders", &View::Baseline(group("orders")), "rdkafka", "/1");
        join(&views, "orders@ppe-1", &lane_view("orders", "ppe-1"), "rdkafka", "/1");
        assert_eq!(find(&views, "rdkafka", "/1"), Found::Wait);
    }

    #[test]
    fn groups_behind_one_client_id_are_listed_where_their_views_differ() {
        let views = Views::default();
        let topics = BTreeSet::from([share()[0].0.clone()]);
        join(&views, "orders", &View::Baseline(group("orders")), "rdkafka", "/1");
        join(&views, "own", &View::Baseline(group("own")), "own-id", "/1");
        assert_eq!(views.alike(&topics), []);
        join(&views, "billing", &View::Baseline(group("billing")), "rdkafka", "/2");
        join(&views, "orders@ppe-1", &lane_view("orders", "ppe-1"), "rdkafka", "/1");
        // Two groups of one PPE lane see the same.
        join(&views, "a@ppe-1", &lane_view("a", "ppe-1"), "both", "/1");
        join(&views, "b@ppe-1", &lane_view("b", "ppe-1"), "both", "/1");
        let alike: Vec<_> = views.alike(&topics);
        let told = alike.iter().map(|a| (a.groups.0.as_str(), a.groups.1.as_str(), a.same_host, a.stops));
        let right = [
            ("billing", "orders", false, false),
            ("billing", "orders@ppe-1", false, true),
            ("orders", "orders@ppe-1", true, true),
        ];
        assert_eq!(told.collect::<Vec<_>>(), right);
        assert_eq!(views.alike(&BTreeSet::new()), [], "topics without lanes do not matter");
    }

    #[test]
    fn another_principal_is_another_reader() {
        let views = Views::default();
        views.all_known();
        join(&views, "orders", &View::Baseline(group("orders")), "rdkafka", "/1");
        let cert = Principal::Certificate("somebody".into());
        let reader = Reader { client_id: "rdkafka", principal: &cert, host: "/1" };
        assert_eq!(views.find(reader, &share()[0].0, PartitionIndex(0)), Found::NoGroup);
    }

    fn telling(life: u64, epoch: i32, whole: bool) -> Telling {
        Telling { life, shard: 0, epoch, whole, first: true, last: true }
    }

    fn tell(views: &Views, telling: Telling, names: &[&str]) -> Result<(), Untold> {
        views.begin_telling(telling)?;
        let partitions = share();
        for name in names {
            let principal = Some(Principal::Anonymous);
            let member = Member { client_id: name, principal, host: "/1", partitions: &partitions };
            views.tell_group(telling, &group(name), &View::Baseline(group(name)), &[member])?;
        }
        views.end_telling(telling)
    }

    #[test]
    fn in_a_cluster_unmatched_means_no_group_once_each_shard_is_told_whole_in_this_life() {
        let views = Views::default();
        views.begin_life(1);
        assert_eq!(find(&views, "stranger", "/1"), Found::Wait);
        tell(&views, telling(1, 4, true), &["a", "b"]).unwrap();
        assert_eq!(find(&views, "stranger", "/1"), Found::Wait, "how many shards there are is not known");
        views.require(1, BTreeMap::from([(0, 4), (1, 0)]));
        assert_eq!(find(&views, "stranger", "/1"), Found::Wait, "shard 1 has told nothing");
        views.require(1, BTreeMap::from([(0, 4)]));
        assert_eq!(find(&views, "stranger", "/1"), Found::NoGroup);
        assert_eq!(find(&views, "a", "/1"), Found::View(View::Baseline(group("a"))));
        // What a new coordinator does not name is gone; one that was replaced is not heard.
        tell(&views, telling(1, 5, true), &["b"]).unwrap();
        assert_eq!(find(&views, "a", "/1"), Found::NoGroup);
        assert_eq!(tell(&views, telling(1, 4, false), &["a"]), Err(Untold::OldEpoch));
        // Another life knows nothing, and takes nothing that was meant for the one before.
        views.begin_life(2);
        assert_eq!(find(&views, "b", "/1"), Found::Wait);
        views.require(1, BTreeMap::new());
        assert_eq!(find(&views, "b", "/1"), Found::Wait);
        assert_eq!(tell(&views, telling(1, 5, true), &["b"]), Err(Untold::OtherLife));
        views.require(2, BTreeMap::from([(0, 5)]));
        assert_eq!(tell(&views, telling(2, 4, true), &["b"]), Err(Untold::OldEpoch));
        tell(&views, telling(2, 5, false), &["b"]).unwrap();
        assert_eq!(find(&views, "stranger", "/1"), Found::Wait, "a part of it is not all");
        tell(&views, telling(2, 5, true), &["b"]).unwrap();
        assert_eq!(find(&views, "stranger", "/1"), Found::NoGroup);
    }
}
