//! Rebalances: preparing (members join), completing (the leader assigns), and all deadlines.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use kafka::ErrorCode;

use super::{Departure, Effect, Group, GroupState, JoinTimer, MemberId, Now, Storing};

impl Group {
    /// Membership changed: begin a rebalance, or end the join phase of the one under way.
    pub(super) fn rebalance_or_complete(&mut self, now: Now, out: &mut Vec<Effect>) {
        match self.state {
            GroupState::Empty | GroupState::Stable | GroupState::CompletingRebalance => {
                self.prepare_rebalance(now, out);
            }
            GroupState::PreparingRebalance => self.complete_join_if_all_are_in(now, out),
            GroupState::Dead => {}
        }
    }

    pub(super) fn prepare_rebalance(&mut self, now: Now, out: &mut Vec<Effect>) {
        if self.state == GroupState::CompletingRebalance {
            self.fail_sync(now, ErrorCode::RebalanceInProgress, out);
        }
        self.pending_sync.clear();
        self.sync_deadline = None;
        self.initial_rebalance = self.state == GroupState::Empty;
        self.transition(now, GroupState::PreparingRebalance);
        if self.initial_rebalance {
            let delay = self.rules.initial_rebalance_delay;
            let remaining = self.rebalance_timeout().saturating_sub(delay);
            let at = now.elapsed + delay;
            self.join_timer = Some(JoinTimer::Initial { at, delay, remaining, joined_since: false });
        } else if self.all_are_in() {
            self.complete_join(now, out);
        } else {
            self.join_timer = Some(JoinTimer::Rebalance { at: now.elapsed + self.rebalance_timeout() });
        }
    }

    /// The first rebalance of an empty group waits for its timer, so that a fleet that starts
    /// together is assigned once.
    pub(super) fn complete_join_if_all_are_in(&mut self, now: Now, out: &mut Vec<Effect>) {
        if self.state == GroupState::PreparingRebalance && !self.initial_rebalance && self.all_are_in() {
            self.complete_join(now, out);
        }
    }

    pub(super) fn awaiting_join(&self) -> usize {
        self.members.values().filter(|m| m.awaiting_join.is_some()).count()
    }

    fn all_are_in(&self) -> bool {
        self.pending.is_empty() && self.members.values().all(|m| m.awaiting_join.is_some())
    }

    /// The longest of the members' timeouts.
    fn rebalance_timeout(&self) -> Duration {
        self.members.values().map(|m| m.rebalance_timeout).max().unwrap_or_default()
    }

    /// Ends the join phase with those who joined: dynamic members that did not are out, static
    /// ones stay until their session ends.
    fn complete_join(&mut self, now: Now, out: &mut Vec<Effect>) {
        self.join_timer = None;
        self.initial_rebalance = false;
        let late = |m: &&super::Member| m.awaiting_join.is_none() && m.instance.is_none();
        let late: Vec<MemberId> = self.members.values().filter(late).map(|m| m.id.clone()).collect();
        for id in &late {
            self.remove(id, Departure::Expired, out);
        }
        if self.members.is_empty() {
            return self.become_empty(now, out);
        }
        if !self.elect_joined_leader() {
            self.join_timer = Some(JoinTimer::Rebalance { at: now.elapsed + self.rebalance_timeout() });
            return;
        }
        self.begin_generation();
        self.protocol = self.select_protocol();
        self.subscribed = self.compute_subscribed();
        self.transition(now, GroupState::CompletingRebalance);
        self.sync_deadline = Some(now.elapsed + self.rebalance_timeout());
        let ids: Vec<MemberId> = self.members.keys().cloned().collect();
        for id in ids {
            if let Some(ticket) = self.take_join_ticket(&id) {
                out.push(Effect::AnswerJoin(ticket, self.join_reply(&id)));
            }
            self.renew_session(now, &id);
            if let Some(member) = self.members.get_mut(&id) {
                member.is_new = false;
            }
            self.pending_sync.insert(id);
        }
    }

    fn become_empty(&mut self, now: Now, out: &mut Vec<Effect>) {
        self.begin_generation();
        self.protocol = None;
        self.leader = None;
        self.subscribed = self.compute_subscribed();
        self.transition(now, GroupState::Empty);
        let metadata = self.metadata(&BTreeMap::new());
        self.store(Storing::Emptied, metadata, out);
    }

    fn begin_generation(&mut self) {
        self.generation = self.generation.checked_add(1).unwrap_or(0);
        self.pending_sync.clear();
    }

    /// A leader that has not joined loses its role to one that has. False if nobody joined.
    fn elect_joined_leader(&mut self) -> bool {
        let joined = |m: &super::Member| m.awaiting_join.is_some();
        let leader = self.leader.as_ref().and_then(|id| self.members.get(id));
        if leader.is_some_and(joined) {
            return true;
        }
        match self.members.values().find(|m| joined(m)) {
            Some(member) => {
                self.leader = Some(member.id.clone());
                true
            }
            None => false,
        }
    }

    /// Each member votes for the first of its protocols that all support; most votes win.
    pub(super) fn select_protocol(&self) -> Option<String> {
        let shared = |name: &str| self.support.get(name) == Some(&self.members.len());
        let mut votes: BTreeMap<&str, usize> = BTreeMap::new();
        for member in self.members.values() {
            if let Some(choice) = member.protocols.iter().find(|p| shared(&p.name)) {
                *votes.entry(&choice.name).or_default() += 1;
            }
        }
        // Of equals the first by name, so that the choice is the same whenever it is made.
        votes.into_iter().rev().max_by_key(|(_, count)| *count).map(|(name, _)| name.to_owned())
    }

    /// Tells everybody who waits in SyncGroup `error`; assignments are void.
    pub(super) fn fail_sync(&mut self, now: Now, error: ErrorCode, out: &mut Vec<Effect>) {
        for member in self.members.values_mut() {
            member.assignment = Bytes::new();
            if let Some(ticket) = member.awaiting_sync.take() {
                member.session_ends = Some(now.elapsed + member.session_timeout);
                out.push(Effect::AnswerSync(ticket, super::SyncReply::error(error)));
            }
        }
    }

    pub(super) fn expire_pending(&mut self, now: Now, out: &mut Vec<Effect>) {
        let before = self.pending.len();
        self.pending.retain(|_, lapses| *lapses > now.elapsed);
        if self.pending.len() < before && self.state == GroupState::PreparingRebalance && self.all_are_in() {
            self.complete_join(now, out);
        }
    }

    pub(super) fn expire_sessions(&mut self, now: Now, out: &mut Vec<Effect>) {
        let over = |m: &&super::Member| m.session_ends.is_some_and(|at| at <= now.elapsed);
        let over: Vec<MemberId> = self.members.values().filter(over).map(|m| m.id.clone()).collect();
        for id in over {
            // An earlier one of these may have begun a new generation, which renewed this one.
            let Some(member) = self.members.get_mut(&id) else { continue };
            if member.session_ends.is_none_or(|at| at > now.elapsed) {
                continue;
            }
            if member.is_alive_by_waiting() {
                member.session_ends = None;
                continue;
            }
            self.remove(&id, Departure::Expired, out);
            match self.state {
                GroupState::Stable | GroupState::CompletingRebalance => self.prepare_rebalance(now, out),
                GroupState::PreparingRebalance if self.all_are_in() => self.complete_join(now, out),
                _ => {}
            }
        }
    }

    pub(super) fn fire_join_timer(&mut self, now: Now, out: &mut Vec<Effect>) {
        match self.join_timer {
            Some(JoinTimer::Rebalance { at }) if at <= now.elapsed => self.complete_join(now, out),
            Some(JoinTimer::Initial { at, delay, remaining, joined_since }) if at <= now.elapsed => {
                if joined_since && !remaining.is_zero() {
                    let delay_next = self.rules.initial_rebalance_delay.min(remaining);
                    self.join_timer = Some(JoinTimer::Initial {
                        at: now.elapsed + delay_next,
                        delay: delay_next,
                        remaining: remaining.saturating_sub(delay),
                        joined_since: false,
                    });
                } else {
                    self.complete_join(now, out);
                }
            }
            _ => {}
        }
    }

    /// Members that joined but never sent SyncGroup are out.
    pub(super) fn fire_sync_deadline(&mut self, now: Now, out: &mut Vec<Effect>) {
        if self.sync_deadline.is_none_or(|at| at > now.elapsed) {
            return;
        }
        self.sync_deadline = None;
        let late = std::mem::take(&mut self.pending_sync);
        if late.is_empty() {
            return;
        }
        for id in &late {
            self.remove(id, Departure::Expired, out);
        }
        self.prepare_rebalance(now, out);
    }
}
