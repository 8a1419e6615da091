//! The receiving half of a link: what is wanted, what has arrived, what is durable here.
//!
//! Pure. The driver finds the local vectors and calls `want`; units come out as appends for the
//! broker, whose apply rule alone decides. Whatever does not fit ends in one way: the subscription
//! is dropped and wanted anew from vectors read again, so there is no second recovery path.

use std::collections::BTreeMap;

use kafka::private::{AppendOutcome, Claim, Direction, LinkState, PartitionReport, Unit};
use kafka::{Offset, PartitionIndex, RegionId, TopicId, TopicName};

use super::frame::{Frame, LIST_MAX, Refusal, Sub, UNIT_FRAME_BYTES_MAX, UnitFrame, Want};
use super::{BEACON_MS, Now, Output, STUCK_MS};

/// A partition: its name.
pub type Place = (TopicName, PartitionIndex);

#[derive(Debug)]
pub(super) struct ReceiveHalf {
    origin: RegionId,
    pool_bytes: u64,
    subs: BTreeMap<Sub, Place>,
    places: BTreeMap<Place, View>,
    next_sub: u32,
    granted: u64,
    received: u64,
    /// Charges of units that are appended or dropped.
    consumed: u64,
    acks: BTreeMap<Sub, Offset>,
}

/// What is known of a partition, over all its subscriptions.
#[derive(Debug)]
struct View {
    sub: Option<Sub>,
    incarnation: TopicId,
    local: TopicId,
    next: Offset,
    end: Option<Offset>,
    /// Since when `next` has been behind `end`.
    behind_since: Option<Now>,
    /// Received and not yet durable.
    buffered: u64,
    halt: Option<Halt>,
    failures: u32,
    /// Overlaps in a row, without a unit applied between them.
    overlaps: u32,
}

/// Why a partition does not receive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Halt {
    /// Until an operator, or the link's next start, does something about it.
    Faulted(String),
    /// Waits for something that the link itself looks for.
    Paused(String),
    /// Tried again at this time.
    Retry(Now, String),
}

/// Where a partition stands, as the driver read it from the local broker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Position {
    pub topic: TopicName,
    pub partition: PartitionIndex,
    /// The peer's incarnation that is wanted.
    pub incarnation: TopicId,
    /// The local incarnation that it goes to.
    pub local: TopicId,
    pub next: Offset,
    pub claim: Option<Claim>,
}

impl ReceiveHalf {
    pub(super) fn new(origin: RegionId, pool_bytes: u64) -> ReceiveHalf {
        ReceiveHalf {
            origin,
            pool_bytes,
            subs: BTreeMap::new(),
            places: BTreeMap::new(),
            next_sub: 0,
            granted: 0,
            received: 0,
            consumed: 0,
            acks: BTreeMap::new(),
        }
    }

    /// Wants a partition from its position on; an earlier subscription of it ends.
    pub(super) fn want(&mut self, position: Position, out: &mut Vec<Frame>) {
        let place = (position.topic.clone(), position.partition);
        self.forget(&place, out);
        let sub = Sub(self.next_sub);
        self.next_sub += 1;
        self.subs.insert(sub, place.clone());
        let (failures, overlaps) =
            self.places.get(&place).map_or((0, 0), |view| (view.failures, view.overlaps));
        self.places.insert(
            place,
            View {
                sub: Some(sub),
                incarnation: position.incarnation,
                local: position.local,
                next: position.next,
                end: None,
                behind_since: None,
                buffered: 0,
                halt: None,
                failures,
                overlaps,
            },
        );
        out.push(Frame::Want(Want {
            sub,
            topic: position.topic,
            incarnation: position.incarnation,
            partition: position.partition,
            next: position.next,
            claim: position.claim,
        }));
    }

    /// Keeps a partition from receiving, and says why.
    pub(super) fn halt(&mut self, place: &Place, halt: Halt, out: &mut Vec<Frame>) {
        self.forget(place, out);
        let nobody = TopicId(uuid::Uuid::nil());
        let view = self.places.entry(place.clone()).or_insert(View {
            sub: None,
            incarnation: nobody,
            local: nobody,
            next: Offset::ZERO,
            end: None,
            behind_since: None,
            buffered: 0,
            halt: None,
            failures: 0,
            overlaps: 0,
        });
        view.halt = Some(halt);
    }

    /// The partition is no longer part of the link.
    pub(super) fn remove_topic(&mut self, topic: &TopicName, out: &mut Vec<Frame>) {
        let places: Vec<Place> = self.places.keys().filter(|(name, _)| name == topic).cloned().collect();
        for place in places {
            self.forget(&place, out);
            self.places.remove(&place);
        }
    }

    fn forget(&mut self, place: &Place, out: &mut Vec<Frame>) {
        let Some(view) = self.places.get_mut(place) else { return };
        if let Some(sub) = view.sub.take() {
            self.subs.remove(&sub);
            self.acks.remove(&sub);
            out.push(Frame::Unwant { sub });
        }
    }

    /// A unit has come. Without a subscription it is dropped, which a resubscription makes normal.
    pub(super) fn arrived(&mut self, frame: UnitFrame) -> Result<Option<Output>, &'static str> {
        let charge = frame.charge();
        // The sender may pass its credit by one unit, and units of other streams may overtake.
        if self.received > self.granted + UNIT_FRAME_BYTES_MAX as u64 {
            return Err("the peer sends without credit");
        }
        self.received += charge;
        let Some(place) = self.subs.get(&frame.sub) else {
            self.consumed += charge;
            return Ok(None);
        };
        let view = self.places.get_mut(place).expect("a subscription has its partition");
        view.buffered += charge;
        let lost = frame.lost_to.filter(|_| frame.first > Offset::ZERO);
        let unit = Unit {
            topic: place.0.clone(),
            partition: place.1,
            id: view.local,
            origin: self.origin,
            incarnation: view.incarnation,
            first: frame.first,
            extractors: frame.extractors,
            last_rewritten: frame.last_rewritten,
            batches: frame.batches,
        };
        Ok(Some(Output::Append(Box::new(Append { sub: frame.sub, charge, lost_to: lost, unit }))))
    }

    /// What became of a unit. `append` is what [`Self::arrived`] gave out.
    pub(super) fn appended(
        &mut self,
        append: &Appended,
        now: Now,
        out: &mut Vec<Frame>,
        events: &mut Vec<Output>,
    ) {
        self.consumed += append.charge;
        let Some(place) = self.subs.get(&append.sub).cloned() else { return };
        let view = self.places.get_mut(&place).expect("a subscription has its partition");
        view.buffered = view.buffered.saturating_sub(append.charge);
        match &append.outcome {
            AppendOutcome::Applied { next } | AppendOutcome::Duplicate { next } => {
                view.advance(*next, now);
                (view.failures, view.overlaps) = (0, 0);
                self.acks.insert(append.sub, view.next);
            }
            AppendOutcome::Gap { next } => {
                let reason = format!("a unit was missing at {next}");
                self.retry(&place, reason, now, out);
            }
            // An append of an earlier connection that landed after the position was read does this
            // once. From a position just read again it means that the histories differ.
            AppendOutcome::Overlap { next } if view.overlaps < OVERLAPS_MAX => {
                view.overlaps += 1;
                let reason = format!("a unit overlapped what is held up to {next}");
                self.retry(&place, reason, now, out);
            }
            AppendOutcome::Overlap { next } => {
                let reason =
                    format!("units of the source overlap what is held up to {next}, again and again");
                self.fault(place, reason, out, events);
            }
            AppendOutcome::Failed { reason, .. } => self.retry(&place, reason.clone(), now, out),
            AppendOutcome::Faulted { reason } => self.fault(place, reason.clone(), out, events),
        }
    }

    fn fault(&mut self, place: Place, reason: String, out: &mut Vec<Frame>, events: &mut Vec<Output>) {
        self.halt(&place, Halt::Faulted(reason.clone()), out);
        events.push(Output::Quarantined { place, reason });
    }

    /// Drops the subscription and has its position read again, later each time.
    fn retry(&mut self, place: &Place, reason: String, now: Now, out: &mut Vec<Frame>) {
        let failures = self.places.get(place).map_or(0, |view| view.failures);
        let wait = (RETRY_MS << failures.min(6)).min(RETRY_MS_MAX);
        self.halt(place, Halt::Retry(now.plus(wait), reason), out);
        if let Some(view) = self.places.get_mut(place) {
            view.failures = failures + 1;
        }
    }

    pub(super) fn refused(
        &mut self,
        sub: Sub,
        why: Refusal,
        now: Now,
        out: &mut Vec<Frame>,
        events: &mut Vec<Output>,
    ) {
        let Some(place) = self.subs.get(&sub).cloned() else { return };
        let halt = match why {
            Refusal::Truncated(reason) => {
                let next = self.places.get(&place).map_or(Offset::ZERO, |view| view.next);
                let reason = format!("source truncated: {reason}");
                events.push(Output::SourceTruncated { place: place.clone(), next, reason: reason.clone() });
                Halt::Faulted(reason)
            }
            // An offer says what it is now; should none come, the source is asked again.
            Refusal::Incarnation => {
                let reason = "the source's topic was deleted or recreated".to_owned();
                Halt::Retry(now.plus(RETRY_MS_MAX), reason)
            }
        };
        // The source has ended it already, and keeps it to show why.
        self.subs.remove(&sub);
        if let Some(view) = self.places.get_mut(&place) {
            view.sub = None;
        }
        self.halt(&place, halt, out);
    }

    pub(super) fn beacon(&mut self, ends: &[(Sub, Offset)], now: Now) {
        for (sub, end) in ends {
            let Some(place) = self.subs.get(sub) else { continue };
            let view = self.places.get_mut(place).expect("a subscription has its partition");
            view.end = Some(*end);
            view.note_behind(now);
        }
    }

    /// Acks and credit that are due.
    pub(super) fn flush(&mut self, out: &mut Vec<Frame>) {
        let acks: Vec<(Sub, Offset)> = std::mem::take(&mut self.acks).into_iter().collect();
        out.extend(acks.chunks(LIST_MAX).map(|some| Frame::Ack { acks: some.to_vec() }));
        let granted = self.consumed + self.pool_bytes;
        if granted - self.granted >= self.pool_bytes / 8 || self.granted == 0 {
            self.granted = granted;
            out.push(Frame::Credit { granted });
        }
    }

    pub(super) fn next_retry(&self) -> Option<Now> {
        self.places.values().filter_map(|view| view.retry_at()).min()
    }

    /// Partitions whose position is to be read again now.
    pub(super) fn due(&mut self, now: Now) -> Vec<Place> {
        let mut due = Vec::new();
        for (place, view) in &mut self.places {
            if view.retry_at().is_some_and(|at| at <= now) {
                // Asked for once; `want` or `halt` answers, and if neither comes it is due again.
                let reason = "reading the position again".to_owned();
                view.halt = Some(Halt::Retry(now.plus(RETRY_MS_MAX), reason));
                due.push(place.clone());
            }
        }
        due
    }

    pub(super) fn report(&self, now: Now, heard: Now) -> Vec<PartitionReport> {
        let fresh = now.since(heard) <= 3 * BEACON_MS;
        self.places.iter().map(|(place, view)| view.report(place, now, fresh)).collect()
    }
}

impl View {
    fn advance(&mut self, next: Offset, now: Now) {
        self.next = self.next.max(next);
        self.end = self.end.map(|end| end.max(self.next));
        self.note_behind(now);
    }

    fn note_behind(&mut self, now: Now) {
        match self.end {
            Some(end) if end > self.next => {
                self.behind_since.get_or_insert(now);
            }
            _ => self.behind_since = None,
        }
    }

    fn retry_at(&self) -> Option<Now> {
        match &self.halt {
            Some(Halt::Retry(at, _)) => Some(*at),
            _ => None,
        }
    }

    fn report(&self, place: &Place, now: Now, fresh: bool) -> PartitionReport {
        let known = fresh && self.sub.is_some();
        let end = self.end.filter(|_| known);
        let lag_ms = end.map(|_| self.behind_since.map_or(0, |since| now.since(since)));
        let (state, reason) = match &self.halt {
            Some(Halt::Faulted(reason)) => (LinkState::Faulted, reason.clone()),
            Some(Halt::Paused(reason) | Halt::Retry(_, reason)) => (LinkState::Paused, reason.clone()),
            None if end.is_none() => (LinkState::Connecting, "nothing heard from the source yet".to_owned()),
            None if lag_ms.is_some_and(|ms| ms > STUCK_MS) => (LinkState::Lagging, String::new()),
            None => (LinkState::Active, String::new()),
        };
        PartitionReport {
            topic: place.0.clone(),
            partition: place.1,
            direction: Direction::In,
            state,
            reason,
            next: self.next,
            lag_records: end.map(|end| (end.0 - self.next.0).max(0) as u64),
            lag_bytes: if end.is_some_and(|end| end <= self.next) { Some(0) } else { None },
            lag_ms,
        }
    }
}

/// A unit for the local broker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Append {
    pub sub: Sub,
    pub charge: u64,
    /// The source had lost what lies between `unit.first` and here.
    pub lost_to: Option<Offset>,
    pub unit: Unit,
}

/// What became of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Appended {
    pub sub: Sub,
    pub charge: u64,
    pub outcome: AppendOutcome,
}

const OVERLAPS_MAX: u32 = 3;
const RETRY_MS: u64 = 250;
const RETRY_MS_MAX: u64 = 15_000;
