//! When a group coordinator asks for which cut: activate when a lane's members first hold a partition,
//! deactivate when none holds it any more.
//!
//! Pure: takes assignments, answers, listings and the time, gives cuts to send. `P` names a partition of
//! one incarnation of a topic. Grace runs per (group, lane, partition), so that a lane that drops a
//! topic but lives on through another strands nothing.
//!
//! Invariant: `ready` says yes only when this coordinator's own activate is the last marker that it
//! knows of in every assigned partition, so that any older cut still under way fails its comparison.

use std::collections::{BTreeMap, BTreeSet};

use kafka::{GroupId, Offset};

use crate::fold::{Cut, CutRefused};
use crate::name::Lane;

/// The cuts of one coordinator, in one epoch of it.
#[derive(Debug)]
pub struct CutKeeper<P> {
    epoch: i32,
    grace_ms: u64,
    /// Of lanes that have one of their own.
    graces_ms: BTreeMap<Lane, u64>,
    entries: BTreeMap<(GroupId, Lane), BTreeMap<P, Entry>>,
    fenced: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CutKind {
    Activate,
    Deactivate,
}

/// A cut to send to the owner of a partition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ask<P> {
    pub partition: P,
    pub kind: CutKind,
    pub cut: Cut,
}

/// What came of a cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CutAnswer {
    /// The marker is durable at this offset.
    Done(Offset),
    Refused(CutRefused),
    /// Nothing is known; asked again after a second.
    Failed,
}

#[derive(Debug, Default)]
struct Entry {
    assigned: bool,
    last: Option<Offset>,
    open: bool,
    /// The last marker is this coordinator's own activate.
    own: bool,
    activating: bool,
    deactivating: bool,
    close_at: Option<u64>,
    retry_at: u64,
}

const RETRY_MS: u64 = 1000;

impl<P: Ord + Clone> CutKeeper<P> {
    pub fn new(epoch: i32, grace_ms: u64) -> CutKeeper<P> {
        CutKeeper { epoch, grace_ms, graces_ms: BTreeMap::new(), entries: BTreeMap::new(), fenced: false }
    }

    /// The lanes that have a grace of their own, from now on. One that runs already runs on as it began.
    pub fn set_graces(&mut self, graces_ms: BTreeMap<Lane, u64>) {
        self.graces_ms = graces_ms;
    }

    fn grace_of(&self, lane: &Lane) -> u64 {
        self.graces_ms.get(lane).copied().unwrap_or(self.grace_ms)
    }

    /// The partitions that the members of (group, lane) now hold. `clean`: whoever left said so.
    pub fn assign(
        &mut self,
        group: &GroupId,
        lane: &Lane,
        held: &BTreeSet<P>,
        clean: bool,
        now: u64,
    ) -> Vec<Ask<P>> {
        let grace_ms = self.grace_of(lane);
        let entries = self.entries.entry((group.clone(), lane.clone())).or_default();
        for partition in held {
            let entry = entries.entry(partition.clone()).or_default();
            entry.assigned = true;
            entry.close_at = None;
        }
        for (partition, entry) in entries.iter_mut() {
            if entry.assigned && !held.contains(partition) {
                entry.assigned = false;
                entry.close_at = Some(if clean { now } else { now + grace_ms });
            }
        }
        self.asks(group, lane, now)
    }

    /// The lane is being deleted: whatever is open closes now.
    pub fn close_lane(&mut self, lane: &Lane, now: u64) -> Vec<Ask<P>> {
        let groups: Vec<_> = self.entries.keys().filter(|(_, l)| l == lane).map(|(g, _)| g.clone()).collect();
        let mut asks = Vec::new();
        for group in groups {
            for entry in self.entries.get_mut(&(group.clone(), lane.clone())).into_iter().flatten() {
                entry.1.assigned = false;
                entry.1.close_at = Some(now);
            }
            asks.extend(self.asks(&group, lane, now));
        }
        asks
    }

    /// What an owner's log says of (group, lane) in a partition: when it loads, and every minute.
    pub fn listed(
        &mut self,
        group: &GroupId,
        lane: &Lane,
        partition: &P,
        last: Offset,
        open: bool,
        now: u64,
    ) -> Vec<Ask<P>> {
        let grace = now + self.grace_of(lane);
        let entries = self.entries.entry((group.clone(), lane.clone())).or_default();
        let entry = entries.entry(partition.clone()).or_default();
        entry.learn(Some(last), open);
        if open && !entry.assigned && entry.close_at.is_none() {
            entry.close_at = Some(grace);
        }
        self.asks(group, lane, now)
    }

    /// The answer to a cut that was asked for.
    pub fn answered(
        &mut self,
        group: &GroupId,
        lane: &Lane,
        partition: &P,
        kind: CutKind,
        answer: CutAnswer,
        now: u64,
    ) -> Vec<Ask<P>> {
        let entries = self.entries.get_mut(&(group.clone(), lane.clone()));
        let Some(entry) = entries.and_then(|e| e.get_mut(partition)) else { return Vec::new() };
        match kind {
            CutKind::Activate => entry.activating = false,
            CutKind::Deactivate => entry.deactivating = false,
        }
        match answer {
            CutAnswer::Done(at) => {
                let newest = entry.learn(Some(at), kind == CutKind::Activate);
                entry.own |= newest && kind == CutKind::Activate;
            }
            CutAnswer::Refused(CutRefused::Moved { last, open }) => {
                entry.learn(last, open);
            }
            CutAnswer::Refused(CutRefused::Fenced { .. }) => self.fenced = true,
            CutAnswer::Failed => entry.retry_at = now + RETRY_MS,
        }
        self.asks(group, lane, now)
    }

    /// Cuts whose time has come.
    pub fn tick(&mut self, now: u64) -> Vec<Ask<P>> {
        let keys: Vec<_> = self.entries.keys().cloned().collect();
        keys.iter().flat_map(|(group, lane)| self.asks(group, lane, now)).collect()
    }

    /// When `tick` has something to do next.
    pub fn next_tick(&self) -> Option<u64> {
        let waits = self.entries.values().flat_map(BTreeMap::values).filter_map(|e| {
            let closing = e.close_at.filter(|_| e.open && !e.deactivating);
            let retry = Some(e.retry_at).filter(|_| e.assigned && e.wants_activate());
            closing.map(|at| at.max(e.retry_at)).or(retry)
        });
        waits.min()
    }

    /// Every partition that (group, lane) holds is activated, durably, by this coordinator.
    pub fn ready(&self, group: &GroupId, lane: &Lane) -> bool {
        let entries = self.entries.get(&(group.clone(), lane.clone()));
        entries.into_iter().flatten().all(|(_, e)| !e.assigned || e.own)
    }

    /// Something of this lane is still open or under way.
    pub fn lane_busy(&self, lane: &Lane) -> bool {
        let of_lane = self.entries.iter().filter(|((_, l), _)| l == lane);
        of_lane.flat_map(|(_, e)| e.values()).any(|e| e.open || e.activating || e.deactivating)
    }

    /// Something of (group, lane) is held, open or under way.
    pub fn busy(&self, group: &GroupId, lane: &Lane) -> bool {
        let entries = self.entries.get(&(group.clone(), lane.clone())).into_iter().flatten();
        entries.into_iter().any(|(_, e)| e.assigned || e.open || e.activating || e.deactivating)
    }

    /// Something of (group, lane) in this partition is held, open or under way.
    pub fn knows(&self, group: &GroupId, lane: &Lane, partition: &P) -> bool {
        let entries = self.entries.get(&(group.clone(), lane.clone()));
        entries.is_some_and(|entries| entries.contains_key(partition))
    }

    /// Another coordinator has taken over: nothing more is asked.
    pub fn is_fenced(&self) -> bool {
        self.fenced
    }

    /// The partition is gone, with its log.
    pub fn forget(&mut self, gone: impl Fn(&P) -> bool) {
        for entries in self.entries.values_mut() {
            entries.retain(|partition, _| !gone(partition));
        }
        self.entries.retain(|_, entries| !entries.is_empty());
    }

    fn asks(&mut self, group: &GroupId, lane: &Lane, now: u64) -> Vec<Ask<P>> {
        let key = (group.clone(), lane.clone());
        let Some(entries) = self.entries.get_mut(&key).filter(|_| !self.fenced) else { return Vec::new() };
        let mut asks = Vec::new();
        for (partition, entry) in entries.iter_mut() {
            let Some(kind) = entry.due(now) else { continue };
            let (group, lane) = key.clone();
            let cut = Cut { group, lane, coordinator_epoch: self.epoch, previous: entry.last };
            asks.push(Ask { partition: partition.clone(), kind, cut });
        }
        entries.retain(|_, e| e.assigned || e.open || e.activating || e.deactivating);
        if entries.is_empty() {
            self.entries.remove(&key);
        }
        asks
    }
}

impl Entry {
    /// Takes in what the log says, if it is newer than what is known; says whether it was.
    fn learn(&mut self, last: Option<Offset>, open: bool) -> bool {
        if last < self.last {
            return false;
        }
        self.own &= last == self.last;
        self.last = last;
        self.open = open;
        if !open && !self.assigned {
            self.close_at = None;
        }
        true
    }

    /// A deactivate under way must be overtaken by a new activate, or it would close what is held.
    fn wants_activate(&self) -> bool {
        !self.activating && (!self.own || self.deactivating)
    }

    fn due(&mut self, now: u64) -> Option<CutKind> {
        if now < self.retry_at {
            return None;
        }
        if self.assigned && self.wants_activate() {
            self.activating = true;
            self.own = false;
            return Some(CutKind::Activate);
        }
        let close = !self.assigned && self.open && self.close_at.is_some_and(|at| at <= now);
        if close && !self.activating && !self.deactivating {
            self.deactivating = true;
            return Some(CutKind::Deactivate);
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRACE: u64 = 30_000;

    fn names() -> (GroupId, Lane) {
        (GroupId::new("orders"), Lane::parse("boe-a").unwrap())
    }

    fn kinds(asks: &[Ask<u32>]) -> Vec<(CutKind, u32, Option<i64>)> {
        asks.iter().map(|a| (a.kind, a.partition, a.cut.previous.map(|o| o.0))).collect()
    }

    fn up(keeper: &mut CutKeeper<u32>, at: i64) {
        let (group, lane) = names();
        let asks = keeper.assign(&group, &lane, &BTreeSet::from([0]), true, 0);
        assert_eq!(kinds(&asks), [(CutKind::Activate, 0, None)]);
        assert!(!keeper.ready(&group, &lane), "not before the marker is durable");
        keeper.answered(&group, &lane, &0, CutKind::Activate, CutAnswer::Done(Offset(at)), 0);
        assert!(keeper.ready(&group, &lane));
    }

    #[test]
    fn a_restart_within_grace_is_no_hand_off() {
        let (group, lane) = names();
        let mut keeper = CutKeeper::new(1, GRACE);
        up(&mut keeper, 5);
        assert!(keeper.assign(&group, &lane, &BTreeSet::new(), false, 1000).is_empty());
        assert!(keeper.tick(20_000).is_empty());
        assert!(keeper.assign(&group, &lane, &BTreeSet::from([0]), true, 25_000).is_empty());
        assert!(keeper.ready(&group, &lane));
        assert!(keeper.tick(90_000).is_empty());
        keeper.assign(&group, &lane, &BTreeSet::new(), false, 100_000);
        assert_eq!(keeper.next_tick(), Some(130_000));
        assert_eq!(kinds(&keeper.tick(130_000)), [(CutKind::Deactivate, 0, Some(5))]);
    }

    #[test]
    fn a_lane_may_have_a_grace_of_its_own_and_one_that_runs_runs_on() {
        let (group, lane) = names();
        let mut keeper = CutKeeper::new(1, GRACE);
        up(&mut keeper, 5);
        keeper.set_graces(BTreeMap::from([(lane.clone(), 500)]));
        keeper.assign(&group, &lane, &BTreeSet::new(), false, 1000);
        keeper.set_graces(BTreeMap::new());
        assert_eq!(keeper.next_tick(), Some(1500));
        assert_eq!(kinds(&keeper.tick(1500)), [(CutKind::Deactivate, 0, Some(5))]);
    }

    #[test]
    fn a_clean_leave_hands_over_at_once_and_what_a_lane_keeps_stays() {
        let (group, lane) = names();
        let mut keeper = CutKeeper::new(1, GRACE);
        up(&mut keeper, 5);
        let asks = keeper.assign(&group, &lane, &BTreeSet::from([0, 1]), true, 10);
        assert_eq!(kinds(&asks), [(CutKind::Activate, 1, None)]);
        keeper.answered(&group, &lane, &1, CutKind::Activate, CutAnswer::Done(Offset(9)), 10);
        let asks = keeper.assign(&group, &lane, &BTreeSet::from([1]), true, 20);
        assert_eq!(kinds(&asks), [(CutKind::Deactivate, 0, Some(5))]);
        assert!(keeper.ready(&group, &lane));
    }

    #[test]
    fn an_activate_overtakes_a_deactivate_under_way() {
        let (group, lane) = names();
        let mut keeper = CutKeeper::new(1, GRACE);
        up(&mut keeper, 5);
        let asks = keeper.assign(&group, &lane, &BTreeSet::new(), true, 10);
        assert_eq!(kinds(&asks), [(CutKind::Deactivate, 0, Some(5))]);
        let asks = keeper.assign(&group, &lane, &BTreeSet::from([0]), true, 11);
        assert_eq!(kinds(&asks), [(CutKind::Activate, 0, Some(5))]);
        assert!(!keeper.ready(&group, &lane));
        // The deactivate came first: the activate is refused and asked for again.
        let moved = CutAnswer::Refused(CutRefused::Moved { last: Some(Offset(7)), open: false });
        let asks = keeper.answered(&group, &lane, &0, CutKind::Activate, moved, 12);
        assert_eq!(kinds(&asks), [(CutKind::Activate, 0, Some(7))]);
        keeper.answered(&group, &lane, &0, CutKind::Deactivate, CutAnswer::Done(Offset(7)), 13);
        keeper.answered(&group, &lane, &0, CutKind::Activate, CutAnswer::Done(Offset(8)), 14);
        assert!(keeper.ready(&group, &lane));
    }

    #[test]
    fn a_coordinator_that_has_just_loaded_makes_its_own_marker() {
        let (group, lane) = names();
        let mut keeper = CutKeeper::new(2, GRACE);
        assert!(keeper.listed(&group, &lane, &0, Offset(5), true, 0).is_empty());
        let asks = keeper.assign(&group, &lane, &BTreeSet::from([0]), true, 10);
        assert_eq!(kinds(&asks), [(CutKind::Activate, 0, Some(5))]);

        let mut unknown = CutKeeper::new(2, GRACE);
        unknown.listed(&group, &lane, &0, Offset(5), true, 0);
        assert!(unknown.tick(GRACE - 1).is_empty());
        assert_eq!(kinds(&unknown.tick(GRACE)), [(CutKind::Deactivate, 0, Some(5))]);
    }

    #[test]
    fn a_failed_cut_is_asked_again_and_a_fenced_coordinator_is_silent() {
        let (group, lane) = names();
        let mut keeper = CutKeeper::new(1, GRACE);
        keeper.assign(&group, &lane, &BTreeSet::from([0]), true, 0);
        assert!(keeper.answered(&group, &lane, &0, CutKind::Activate, CutAnswer::Failed, 0).is_empty());
        assert_eq!(keeper.next_tick(), Some(1000));
        assert_eq!(kinds(&keeper.tick(1000)), [(CutKind::Activate, 0, None)]);
        let fenced = CutAnswer::Refused(CutRefused::Fenced { asked: 1, known: 2 });
        keeper.answered(&group, &lane, &0, CutKind::Activate, fenced, 1001);
        assert!(keeper.is_fenced() && keeper.tick(99_999).is_empty());
        assert!(!keeper.ready(&group, &lane));
    }
}
