//! The link protocol: a pure state machine. Bytes and time in, frames, units and deadlines out.
//!
//! One `Link` is one connection between two regions and carries both directions. It remembers
//! nothing over its end: the next connection begins from the vectors in the receivers' logs. Each
//! wait has a deadline here and a state in the report. `docs/PROTOCOL-LINK.md` is the same in words.

mod bucket;
mod frame;
mod receive;
mod send;
#[cfg(test)]
mod tests;

use std::collections::{BTreeSet, VecDeque};

use kafka::private::{FetchOutcome, PartitionReport, TopicInfo};
use kafka::{Offset, RegionId, RegionName, TopicId, TopicName};
use uuid::Uuid;

pub use frame::{
    CONTROL_BYTES_MAX, Frame, Hello, LinkErrorCode, Packer, Sub, UNIT_FRAME_BYTES_MAX, UnitFrame, VERSION,
    VERSION_MIN, VERSION_OF_DELETED, take_body,
};
pub use receive::{Append, Appended, Halt, Place, Position};
pub use send::{UNIT_BYTES, Wish};

use receive::ReceiveHalf;
use send::SendHalf;

/// Milliseconds on the clock of the process, from any start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Now(pub u64);

/// The peer must say hello within this.
pub const HELLO_MS: u64 = 10_000;
/// A sign of life is given this often.
pub const BEACON_MS: u64 = 1_000;
/// A peer that says nothing for this long is gone.
pub const SILENCE_MS: u64 = 15_000;
/// A wait is shown as lagging after this.
pub const STUCK_MS: u64 = 5_000;

/// Who this end is, and whom it expects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    pub region: RegionId,
    pub name: RegionName,
    pub instance: Uuid,
    /// The peer's name as configured.
    pub peer: RegionName,
}

#[derive(Debug)]
pub struct Link {
    me: Identity,
    phase: Phase,
    started: Now,
    heard: Now,
    beacon_at: Now,
    pool_bytes: u64,
    send: SendHalf,
    receive: ReceiveHalf,
    /// Topics whose deletion the peer was told of.
    told_deleted: BTreeSet<TopicId>,
    frames: Vec<Frame>,
    outputs: VecDeque<Output>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Phase {
    Hello,
    Up(Hello),
    Closed,
}

/// What the driver must do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    /// Send on the control stream.
    Control(Frame),
    /// Both sides know each other; topics may be offered.
    Up(Hello),
    /// Topics of the peer that are new or have changed, and names that are gone.
    Offered {
        topics: Vec<TopicInfo>,
        gone: Vec<TopicName>,
    },
    /// The peer's copy of this incarnation of a topic here was deleted by a person.
    Deleted {
        topic: TopicName,
        incarnation: TopicId,
    },
    /// Hand to the local broker; answer with [`Link::appended`].
    Append(Box<Append>),
    /// Read the vectors again and call [`Link::want`] or [`Link::halt`].
    Reposition(Vec<Place>),
    /// To be noted durably.
    SourceTruncated {
        place: Place,
        next: Offset,
        reason: String,
    },
    Quarantined {
        place: Place,
        reason: String,
    },
    /// Send what is queued, then close. Nothing else follows.
    Close {
        code: LinkErrorCode,
        text: String,
        told_by_peer: bool,
    },
}

impl Link {
    /// `streams` is the number of data streams that could be opened to the peer.
    pub fn new(me: Identity, streams: usize, pool_bytes: u64, now: Now) -> Link {
        let nobody = RegionId(Uuid::nil());
        let hello = Frame::Hello(Hello {
            version: VERSION,
            version_min: VERSION_MIN,
            region: me.region,
            name: me.name.clone(),
            instance: me.instance,
        });
        Link {
            me,
            phase: Phase::Hello,
            started: now,
            heard: now,
            beacon_at: now,
            pool_bytes,
            send: SendHalf::new(streams, now),
            receive: ReceiveHalf::new(nobody, pool_bytes),
            told_deleted: BTreeSet::new(),
            frames: vec![hello],
            outputs: VecDeque::new(),
        }
    }

    pub fn is_up(&self) -> bool {
        matches!(self.phase, Phase::Up(_))
    }

    pub fn peer(&self) -> Option<&Hello> {
        match &self.phase {
            Phase::Up(hello) => Some(hello),
            _ => None,
        }
    }

    /// A control frame of the peer.
    pub fn on_frame(&mut self, frame: Frame, now: Now) {
        self.heard = now;
        let outcome = match (&self.phase, frame) {
            (Phase::Closed, _) => return,
            (_, Frame::Error { code, text }) => {
                self.phase = Phase::Closed;
                self.outputs.push_back(Output::Close { code, text, told_by_peer: true });
                return;
            }
            (Phase::Hello, Frame::Hello(hello)) => return self.on_hello(hello, now),
            (Phase::Hello, _) => Err("a frame came before hello"),
            (Phase::Up(_), Frame::Hello(_)) => Err("a second hello"),
            (Phase::Up(_), frame) => self.on_ordinary(frame, now),
        };
        if let Err(text) = outcome {
            self.close(LinkErrorCode::Protocol, text.to_owned());
        }
    }

    fn on_hello(&mut self, hello: Hello, now: Now) {
        if hello.region == self.me.region {
            let text = format!("both ends of this link are region {} ({})", self.me.name, self.me.region);
            return self.close(LinkErrorCode::SelfLink, text);
        }
        if hello.name != self.me.peer {
            let text = format!("the peer is region {}, this link is for region {}", hello.name, self.me.peer);
            return self.close(LinkErrorCode::WrongPeer, text);
        }
        if hello.version < VERSION_MIN || VERSION < hello.version_min {
            let text = format!(
                "no version in common: here {VERSION_MIN} to {VERSION}, there {} to {}",
                hello.version_min, hello.version
            );
            return self.close(LinkErrorCode::Version, text);
        }
        self.receive = ReceiveHalf::new(hello.region, self.pool_bytes);
        self.outputs.push_back(Output::Up(hello.clone()));
        self.phase = Phase::Up(hello);
        self.beacon_at = now.plus(BEACON_MS);
    }

    fn on_ordinary(&mut self, frame: Frame, now: Now) -> Result<(), &'static str> {
        match frame {
            Frame::Offer { topics, gone } => {
                for name in &gone {
                    self.receive.remove_topic(name, &mut self.frames);
                }
                self.outputs.push_back(Output::Offered { topics, gone });
            }
            Frame::Want(want) => self.send.want(want)?,
            Frame::Unwant { sub } => self.send.unwant(sub),
            Frame::Credit { granted } => self.send.credit(granted),
            Frame::Ack { acks } => acks.into_iter().for_each(|(sub, next)| self.send.ack(sub, next)),
            Frame::Beacon { ends } => self.receive.beacon(&ends, now),
            Frame::Refuse { sub, why } => {
                let mut events = Vec::new();
                self.receive.refused(sub, why, now, &mut self.frames, &mut events);
                self.outputs.extend(events);
            }
            Frame::Deleted { topic, incarnation } => {
                self.outputs.push_back(Output::Deleted { topic, incarnation });
            }
            Frame::Hello(_) | Frame::Error { .. } => unreachable!("handled by phase"),
        }
        Ok(())
    }

    /// A unit of the peer, from any data stream.
    pub fn on_unit(&mut self, unit: UnitFrame, now: Now) {
        if !self.is_up() {
            // A data stream may overtake the hello of the control stream only against the rules:
            // nothing is sent before something is wanted.
            return self.close(LinkErrorCode::Protocol, "a unit came before hello".to_owned());
        }
        self.heard = now;
        match self.receive.arrived(unit) {
            Ok(append) => self.outputs.extend(append),
            Err(text) => self.close(LinkErrorCode::Protocol, text.to_owned()),
        }
    }

    /// Bytes that are no frame.
    pub fn on_garbage(&mut self, text: String) {
        self.close(LinkErrorCode::Protocol, text);
    }

    /// The topics that the peer may have, as they are now.
    pub fn offer(&mut self, topics: Vec<TopicInfo>) {
        if self.is_up() {
            let frames = self.send.offer(topics);
            self.frames.extend(frames);
        }
    }

    /// The copy here of this incarnation of a peer's topic was deleted by a person, and the peer is to
    /// know. A peer that does not understand that is not told.
    pub fn tell_deleted(&mut self, topic: TopicName, incarnation: TopicId) {
        let understands = self.peer().is_some_and(|peer| peer.version >= VERSION_OF_DELETED);
        if understands && self.told_deleted.insert(incarnation) {
            self.frames.push(Frame::Deleted { topic, incarnation });
        }
    }

    /// Most bytes of units per second, unpacked, from now on; 0 for no limit.
    pub fn limit_rate(&mut self, rate: u64, now: Now) {
        self.send.limit_rate(rate, now);
    }

    pub fn want(&mut self, position: Position) {
        if self.is_up() {
            self.receive.want(position, &mut self.frames);
        }
    }

    pub fn halt(&mut self, place: &Place, halt: Halt) {
        self.receive.halt(place, halt, &mut self.frames);
    }

    pub fn appended(&mut self, appended: &Appended, now: Now) {
        let mut events = Vec::new();
        self.receive.appended(appended, now, &mut self.frames, &mut events);
        self.outputs.extend(events);
    }

    /// What to read from the local broker next; see [`SendHalf::wishes`].
    pub fn wishes(&mut self, now: Now) -> Vec<Wish> {
        if self.is_up() { self.send.wishes(now) } else { Vec::new() }
    }

    pub fn has_fresh_wishes(&self) -> bool {
        self.is_up() && self.send.is_fresh()
    }

    pub fn read_bytes_max(&self) -> u32 {
        self.send.read_bytes_max()
    }

    pub fn supply(&mut self, sub: Sub, from: Offset, outcome: FetchOutcome, now: Now) {
        let refusal = self.send.supply(sub, from, outcome, now);
        self.frames.extend(refusal);
    }

    /// What is read for this subscription next is read elsewhere: the log there must hold what was sent.
    pub fn prove_again(&mut self, sub: Sub) {
        self.send.prove_again(sub);
    }

    /// Whether the peer wants anything under this subscription.
    pub fn is_wanted(&self, sub: Sub) -> bool {
        self.send.is_wanted(sub)
    }

    /// The data streams, in the order in which they are to be asked for units now.
    pub fn turn(&mut self, now: Now) -> impl Iterator<Item = usize> + use<> {
        self.send.turn(now)
    }

    /// The next unit of a data stream, if rate and policy let it leave; see [`Self::turn`].
    pub fn take_unit(&mut self, stream: usize) -> Option<UnitFrame> {
        if self.is_up() { self.send.take_unit(stream) } else { None }
    }

    /// When [`Self::on_time`] is to be called at the latest.
    pub fn deadline(&self) -> Now {
        match self.phase {
            Phase::Hello => self.started.plus(HELLO_MS),
            Phase::Closed => Now(u64::MAX),
            Phase::Up(_) => [self.send.next_retry(), self.send.opens_at(), self.receive.next_retry()]
                .into_iter()
                .flatten()
                .fold(self.beacon_at.min(self.heard.plus(SILENCE_MS)), Now::min),
        }
    }

    pub fn on_time(&mut self, now: Now) {
        match self.phase {
            Phase::Hello if now >= self.started.plus(HELLO_MS) => {
                self.close(LinkErrorCode::Silent, format!("no hello within {} s", HELLO_MS / 1000));
            }
            Phase::Up(_) if now >= self.heard.plus(SILENCE_MS) => {
                self.close(LinkErrorCode::Silent, format!("nothing heard for {} s", SILENCE_MS / 1000));
            }
            Phase::Up(_) => {
                if now >= self.beacon_at {
                    let beacon = self.send.beacon();
                    self.frames.push(beacon);
                    self.beacon_at = now.plus(BEACON_MS);
                }
                self.send.on_time(now);
                let due = self.receive.due(now);
                if !due.is_empty() {
                    self.outputs.push_back(Output::Reposition(due));
                }
            }
            _ => {}
        }
    }

    /// Ends the connection; the peer is told why.
    pub fn close(&mut self, code: LinkErrorCode, text: String) {
        if self.phase == Phase::Closed {
            return;
        }
        let code = self.peer().map_or(code, |peer| code.for_version(peer.version));
        self.phase = Phase::Closed;
        self.frames.push(Frame::Error { code, text: text.clone() });
        let frames = std::mem::take(&mut self.frames);
        self.outputs.extend(frames.into_iter().map(Output::Control));
        self.outputs.push_back(Output::Close { code, text, told_by_peer: false });
    }

    /// The next thing to do. Acks and credit of all that came before are put together.
    pub fn poll(&mut self) -> Option<Output> {
        if let Some(output) = self.outputs.pop_front() {
            return Some(output);
        }
        if self.is_up() {
            self.receive.flush(&mut self.frames);
        }
        let frames = std::mem::take(&mut self.frames);
        self.outputs.extend(frames.into_iter().map(Output::Control));
        self.outputs.pop_front()
    }

    pub fn report(&self, now: Now) -> Vec<PartitionReport> {
        let mut all = self.send.report(now);
        all.extend(self.receive.report(now, self.heard));
        all
    }
}

impl Now {
    pub fn plus(self, ms: u64) -> Now {
        Now(self.0.saturating_add(ms))
    }

    /// Milliseconds since `earlier`; 0 if that is later.
    pub fn since(self, earlier: Now) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}
