//! The sending half of a link: what the peer wants, how far it has been read, sent and acknowledged.
//!
//! Pure. The driver asks which partitions to read (`wishes`), hands in what was read (`supply`) and
//! takes units per data stream (`take_unit`). Invariant: units of a subscription leave in order of
//! their origin offsets, each beginning where the one before ended; bytes not yet acknowledged never
//! exceed the peer's credit by more than one unit.

use std::collections::{BTreeMap, VecDeque};

use bytes::BytesMut;
use kafka::private::{
    Claim, Direction, FetchFrom, FetchOutcome, LinkState, Message, OriginRead, PartitionReport, TopicInfo,
};
use kafka::{Batch, ErrorCode, Offset, PartitionIndex, TopicId, TopicName};

use super::bucket::Bucket;
use super::frame::{Frame, LIST_MAX, OFFER_TOPICS_MAX, Refusal, Sub, UnitFrame, Want};
use super::{Now, STUCK_MS};

/// Subscriptions of one connection: what one read can name.
const SUBS_MAX: usize = kafka::limits::ARRAY_LEN_MAX;
/// A unit ends when it holds this much; one batch alone may be larger.
pub const UNIT_BYTES: usize = 1024 * 1024;
/// Units that may wait for one data stream before reading for it pauses.
const STREAM_UNITS_MAX: usize = 64;
/// Bytes of one read, over all partitions.
const READ_BYTES_MAX: u64 = 8 * 1024 * 1024;
/// Encoded bytes of one offer frame.
const OFFER_BYTES_MAX: usize = 512 * 1024;
/// A partition that could not be read is tried again after this; sooner where only its owner is another.
const READ_RETRY_MS: u64 = 1000;
const MOVED_RETRY_MS: u64 = 250;

#[derive(Debug)]
pub(super) struct SendHalf {
    offered: BTreeMap<TopicName, TopicInfo>,
    subs: BTreeMap<Sub, SendSub>,
    streams: Vec<VecDeque<UnitFrame>>,
    /// The stream that gave a unit last: the others are asked before it is asked again.
    served: usize,
    bucket: Bucket,
    granted: u64,
    /// Charged when a unit is taken for its stream.
    sent: u64,
    queued: u64,
    /// Something may be read that the last `wishes` did not name.
    fresh: bool,
}

#[derive(Debug)]
struct SendSub {
    topic: TopicName,
    partition: PartitionIndex,
    incarnation: TopicId,
    /// Proof to check with the next read.
    claim: Option<Claim>,
    /// Of the last batch below `sent_to`, as far as it is known.
    proof: Option<Claim>,
    read_to: Offset,
    /// Where the next unit begins.
    sent_to: Offset,
    acked: Offset,
    /// After the last record that can be had; lag counts to here.
    end: Offset,
    end_known: bool,
    told: Option<Offset>,
    in_flight: VecDeque<InFlight>,
    /// Charges of `in_flight`.
    outstanding: u64,
    /// Left out of the last `wishes` for want of credit or room.
    blocked_since: Option<Now>,
    retry_at: Option<(Now, String)>,
    refused: Option<String>,
}

#[derive(Debug)]
struct InFlight {
    next: Offset,
    charge: u64,
    since: Now,
}

/// One partition to read, and for whom.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wish {
    pub sub: Sub,
    pub from: FetchFrom,
}

impl SendHalf {
    pub(super) fn new(streams: usize, now: Now) -> SendHalf {
        assert!(streams > 0, "a link has at least one data stream");
        SendHalf {
            offered: BTreeMap::new(),
            subs: BTreeMap::new(),
            streams: (0..streams).map(|_| VecDeque::new()).collect(),
            served: streams - 1,
            bucket: Bucket::new(0, now),
            granted: 0,
            sent: 0,
            queued: 0,
            fresh: false,
        }
    }

    pub(super) fn limit_rate(&mut self, rate: u64, now: Now) {
        self.bucket.set_rate(rate, now);
    }

    /// When the rate lets the next unit leave, if it is the rate alone that holds it.
    pub(super) fn opens_at(&self) -> Option<Now> {
        self.bucket.opens_at().filter(|_| self.queued > 0)
    }

    /// The topics of this region that the peer may have; returns the frames that tell what is new.
    pub(super) fn offer(&mut self, topics: Vec<TopicInfo>) -> Vec<Frame> {
        let now: BTreeMap<_, _> = topics.into_iter().map(|t| (t.name.clone(), t)).collect();
        let gone: Vec<_> = self.offered.keys().filter(|name| !now.contains_key(*name)).cloned().collect();
        let mut frames = Vec::new();
        for names in gone.chunks(OFFER_TOPICS_MAX) {
            frames.push(Frame::Offer { topics: Vec::new(), gone: names.to_vec() });
        }
        let (mut batch, mut bytes) = (Vec::new(), 0);
        let mut scratch = BytesMut::new();
        for topic in now.values().filter(|t| self.offered.get(&t.name) != Some(*t)) {
            scratch.clear();
            topic.write(&mut scratch);
            if batch.len() >= OFFER_TOPICS_MAX || bytes + scratch.len() > OFFER_BYTES_MAX {
                frames.push(Frame::Offer { topics: std::mem::take(&mut batch), gone: Vec::new() });
                bytes = 0;
            }
            bytes += scratch.len();
            batch.push(topic.clone());
        }
        if !batch.is_empty() {
            frames.push(Frame::Offer { topics: batch, gone: Vec::new() });
        }
        self.offered = now;
        frames
    }

    pub(super) fn want(&mut self, want: Want) -> Result<(), &'static str> {
        if self.subs.contains_key(&want.sub) {
            return Err("a subscription number was used twice");
        }
        if self.subs.len() >= SUBS_MAX {
            return Err("too many subscriptions");
        }
        // A refused one was kept only to be shown.
        self.subs
            .retain(|_, s| s.refused.is_none() || s.topic != want.topic || s.partition != want.partition);
        let next = want.next.max(Offset::ZERO);
        self.subs.insert(
            want.sub,
            SendSub {
                topic: want.topic,
                partition: want.partition,
                incarnation: want.incarnation,
                claim: want.claim,
                proof: want.claim,
                read_to: next,
                sent_to: next,
                acked: next,
                end: Offset::ZERO,
                end_known: false,
                told: None,
                in_flight: VecDeque::new(),
                outstanding: 0,
                blocked_since: None,
                retry_at: None,
                refused: None,
            },
        );
        self.fresh = true;
        Ok(())
    }

    pub(super) fn unwant(&mut self, sub: Sub) {
        if self.subs.remove(&sub).is_some() {
            self.drop_queued(sub);
        }
    }

    fn drop_queued(&mut self, sub: Sub) {
        let stream = self.stream_of(sub);
        let mut dropped = 0;
        self.streams[stream].retain(|unit| {
            let keep = unit.sub != sub;
            dropped += if keep { 0 } else { unit.charge() };
            keep
        });
        self.queued -= dropped;
    }

    pub(super) fn credit(&mut self, granted: u64) {
        if self.free() <= 0 && granted > self.granted {
            self.fresh = true;
        }
        self.granted = self.granted.max(granted);
    }

    /// The peer holds everything below `next` durably.
    pub(super) fn ack(&mut self, sub: Sub, next: Offset) {
        let Some(s) = self.subs.get_mut(&sub) else { return };
        s.acked = s.acked.max(next);
        while s.in_flight.front().is_some_and(|unit| unit.next <= next) {
            let unit = s.in_flight.pop_front().expect("just seen");
            s.outstanding -= unit.charge;
        }
        if s.blocked_since.is_some() {
            self.fresh = true;
        }
    }

    /// Whether a read should begin now although one is waiting: it would name more partitions.
    pub(super) fn is_fresh(&self) -> bool {
        self.fresh
    }

    /// Partitions to read next, with how much of each.
    ///
    /// A partition may have as much on its way as is still free of the credit: one whose receiver
    /// is slow takes a half at most, k of them leave the others 1/(k+1), and none takes all.
    pub(super) fn wishes(&mut self, now: Now) -> Vec<Wish> {
        self.fresh = false;
        let free = self.free();
        let mut wishes = Vec::new();
        for (sub, s) in &mut self.subs {
            if s.refused.is_some() || s.retry_at.as_ref().is_some_and(|(at, _)| *at > now) {
                continue;
            }
            let full = self.streams[sub.0 as usize % self.streams.len()].len() >= STREAM_UNITS_MAX;
            let room = free - s.outstanding as i64;
            let may = !full && free > 0 && (s.outstanding == 0 || room > 0);
            if !may {
                s.blocked_since.get_or_insert(now);
                continue;
            }
            s.blocked_since = None;
            s.retry_at = None;
            wishes.push(Wish {
                sub: *sub,
                from: FetchFrom {
                    topic: s.topic.clone(),
                    partition: s.partition,
                    id: s.incarnation,
                    from: s.read_to,
                    bytes_max: room.clamp(1, UNIT_BYTES as i64) as u32,
                    claim: s.claim,
                    known_end: if s.end_known { s.end } else { Offset(-1) },
                },
            });
        }
        wishes
    }

    /// Bytes that one read may bring in all.
    pub(super) fn read_bytes_max(&self) -> u32 {
        (self.free().max(1) as u64).min(READ_BYTES_MAX) as u32
    }

    /// Takes in what a read that began at `from` said.
    pub(super) fn supply(
        &mut self,
        sub: Sub,
        from: Offset,
        outcome: FetchOutcome,
        now: Now,
    ) -> Option<Frame> {
        let stream = self.stream_of(sub);
        let s = self.subs.get_mut(&sub)?;
        if s.read_to != from || s.refused.is_some() {
            return None;
        }
        let why = match outcome {
            FetchOutcome::Read(read) => match s.cut_units(sub, read, now) {
                Ok(units) => {
                    self.queued += units.iter().map(UnitFrame::charge).sum::<u64>();
                    self.streams[stream].extend(units);
                    return None;
                }
                Err(reason) => {
                    s.retry_at = Some((now.plus(READ_RETRY_MS), reason.to_owned()));
                    return None;
                }
            },
            FetchOutcome::Failed { code, reason } => {
                let wait =
                    if code == ErrorCode::NotLeaderOrFollower { MOVED_RETRY_MS } else { READ_RETRY_MS };
                s.retry_at = Some((now.plus(wait), reason));
                s.prove_again();
                return None;
            }
            FetchOutcome::Truncated { reason } => Refusal::Truncated(reason),
            FetchOutcome::Incarnation { .. } => Refusal::Incarnation,
        };
        s.refused = Some(match &why {
            Refusal::Truncated(reason) => format!("source truncated: {reason}"),
            Refusal::Incarnation => "the topic was recreated or deleted".to_owned(),
        });
        self.drop_queued(sub);
        Some(Frame::Refuse { sub, why })
    }

    /// The next read of this subscription is of another log perhaps.
    pub(super) fn prove_again(&mut self, sub: Sub) {
        if let Some(s) = self.subs.get_mut(&sub) {
            s.prove_again();
            self.fresh = true;
        }
    }

    pub(super) fn is_wanted(&self, sub: Sub) -> bool {
        self.subs.contains_key(&sub)
    }

    /// The streams, first the one after that which gave a unit last: where the rate holds units back,
    /// each stream has its turn.
    pub(super) fn turn(&mut self, now: Now) -> impl Iterator<Item = usize> + use<> {
        self.bucket.refill(now);
        let (first, count) = (self.served + 1, self.streams.len());
        (first..first + count).map(move |stream| stream % count)
    }

    /// The next unit of a data stream, charged to credit and rate, as of the last [`Self::turn`]. Several
    /// owners may have given more at once than the credit holds.
    pub(super) fn take_unit(&mut self, stream: usize) -> Option<UnitFrame> {
        if !self.bucket.is_open() || self.sent > self.granted {
            return None;
        }
        let unit = self.streams[stream].pop_front()?;
        self.served = stream;
        self.bucket.take(unit.charge());
        self.fresh |= self.streams[stream].len() == STREAM_UNITS_MAX / 2;
        self.queued -= unit.charge();
        self.sent += unit.charge();
        Some(unit)
    }

    /// Ends that moved since they were last told; a frame even when there are none.
    pub(super) fn beacon(&mut self) -> Frame {
        let mut ends = Vec::new();
        for (sub, s) in &mut self.subs {
            let end = s.lag_end();
            if s.end_known && s.told != Some(end) && ends.len() < LIST_MAX {
                s.told = Some(end);
                ends.push((*sub, end));
            }
        }
        Frame::Beacon { ends }
    }

    pub(super) fn next_retry(&self) -> Option<Now> {
        self.subs.values().filter_map(|s| s.retry_at.as_ref().map(|(at, _)| *at)).min()
    }

    /// A waiting read must begin again when a partition's retry is due.
    pub(super) fn on_time(&mut self, now: Now) {
        self.fresh |= self.next_retry().is_some_and(|at| at <= now);
    }

    pub(super) fn report(&self, now: Now) -> Vec<PartitionReport> {
        let limited = self.opens_at().map(|_| self.bucket.rate());
        self.subs.values().map(|s| s.report(now, limited)).collect()
    }

    fn free(&self) -> i64 {
        self.granted as i64 - self.sent as i64 - self.queued as i64
    }

    fn stream_of(&self, sub: Sub) -> usize {
        sub.0 as usize % self.streams.len()
    }
}

impl SendSub {
    /// Back to the last batch that was sent, with the proof that this log must hold it. What was covered
    /// after it is looked at again.
    fn prove_again(&mut self) {
        self.claim = self.proof;
        self.read_to = self.sent_to;
    }

    /// Cuts what was read into units. A trailing covered range moves only the place to read from.
    fn cut_units(&mut self, sub: Sub, read: OriginRead, now: Now) -> Result<Vec<UnitFrame>, &'static str> {
        let batches = Batch::split_all(read.batches, false)
            .map_err(|_| "the broker's answer holds no whole batches")?;
        let from = self.read_to;
        let mut at = from;
        for batch in &batches {
            if batch.header.base_offset < at || batch.header.is_control() {
                return Err("the broker's answer holds batches out of order, or markers");
            }
            at = batch.header.next_offset();
        }
        if read.next < at {
            return Err("the broker's answer contradicts itself");
        }
        let mut lost_to = (read.log_start > self.sent_to).then_some(read.log_start);
        let mut units = Vec::new();
        let mut run = BytesMut::new();
        for (i, batch) in batches.iter().enumerate() {
            run.extend_from_slice(&batch.bytes);
            let full = batches.get(i + 1).is_none_or(|next| run.len() + next.bytes.len() > UNIT_BYTES);
            if full {
                let unit = UnitFrame {
                    sub,
                    first: self.sent_to,
                    lost_to: lost_to.take(),
                    extractors: read.extractors.clone(),
                    last_rewritten: read.rewritten.contains(&batch.header.base_offset),
                    batches: run.split().freeze(),
                };
                self.sent_to = batch.header.next_offset();
                let rewritten = unit.last_rewritten;
                self.proof = Some(Claim {
                    epoch: batch.header.leader_epoch,
                    base: batch.header.base_offset,
                    crc: if rewritten { 0 } else { batch.header.crc },
                });
                self.outstanding += unit.charge();
                self.in_flight.push_back(InFlight { next: self.sent_to, charge: unit.charge(), since: now });
                units.push(unit);
            }
        }
        self.claim = None;
        self.read_to = read.next;
        self.end_known = true;
        // A read that met no record of this origin knows of none after what was sent.
        self.end = if read.end <= read.log_start.max(from) { Offset::ZERO } else { read.end };
        Ok(units)
    }

    /// Where lag counts to: not beyond what can still be had.
    fn lag_end(&self) -> Offset {
        self.end.max(self.sent_to)
    }

    /// `limited` is the rate, while it holds units back.
    fn report(&self, now: Now, limited: Option<u64>) -> PartitionReport {
        let oldest = self.in_flight.front().map(|unit| now.since(unit.since));
        let blocked = self.blocked_since.map(|since| now.since(since));
        let (state, reason) = if let Some(reason) = &self.refused {
            (LinkState::Faulted, reason.clone())
        } else if let Some((_, reason)) = &self.retry_at {
            (LinkState::Paused, reason.clone())
        } else if !self.end_known {
            (LinkState::Connecting, "not read yet".to_owned())
        } else if let Some(rate) = limited.filter(|_| oldest.is_some_and(|age| age > STUCK_MS)) {
            (LinkState::Lagging, format!("held back by the link's limit of {rate} bytes per second"))
        } else if let Some(age) = oldest.filter(|age| *age > STUCK_MS) {
            (LinkState::Lagging, format!("no acknowledgement for {} s", age / 1000))
        } else if let Some(age) = blocked.filter(|age| *age > STUCK_MS) {
            (LinkState::Lagging, format!("waiting for credit for {} s", age / 1000))
        } else {
            (LinkState::Active, String::new())
        };
        let known = self.end_known && self.refused.is_none();
        let all_read = known && self.read_to >= self.end;
        PartitionReport {
            topic: self.topic.clone(),
            partition: self.partition,
            direction: Direction::Out,
            state,
            reason,
            next: self.acked,
            lag_records: known.then(|| (self.lag_end().0 - self.acked.0).max(0) as u64),
            lag_bytes: all_read.then_some(self.outstanding),
            lag_ms: if known && self.acked >= self.lag_end() { Some(0) } else { oldest },
        }
    }
}
