//! One connection at work: moves frames, units, reads and appends between a link and the world.
//!
//! Decides nothing: `link` does. Everything that it waits for is one `select`, and nothing in it
//! blocks, so control frames pass however slow data is. It ends when the peer, the transport or every
//! broker of the own region does; the next session starts from the vectors.

use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use kafka::private::{LinkPolicy, LinkReport, LinkState};
use kafka::{RegionId, RegionName};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use crate::append::append_task;
use crate::link::{Append, Frame, Hello, Identity, Link, LinkErrorCode, Output};
use crate::local::{LocalError, Target};
use crate::metrics::LinkMetrics;
use crate::owners::Owners;
use crate::quic::{NetEvent, Session};
use crate::region::{Followed, Policies, Topics, now};
use crate::sink::{SinkEvent, TopicJob, TopicTask};
use crate::source::{Found, Source};
use crate::status::Board;

/// What a session needs to know.
#[derive(Clone)]
pub struct Plan {
    pub identity: Identity,
    pub target: Target,
    pub own: Followed,
    pub credit_bytes: u64,
    pub board: Board,
    pub metrics: LinkMetrics,
}

impl Plan {
    /// What may cross the link, as the region says now.
    pub fn policy(&self) -> LinkPolicy {
        self.own.policies.borrow().of(&self.identity.peer)
    }
}

/// A connection that has come about.
pub struct Arrival {
    pub session: Session,
    /// The peer's first frame, when it was needed to know who it is.
    pub hello: Option<Hello>,
}

/// Why a session ended.
pub enum End {
    /// A better connection to the same peer is there.
    Replaced(Arrival),
    /// The connection is gone, or the own brokers are.
    Lost(String),
    /// The two ends do not fit.
    Refused(LinkErrorCode, String),
    /// The link's policy is another one now.
    Changed,
    Stopping,
}

/// Runs a session to its end.
pub async fn run(
    plan: &Plan,
    arrival: Arrival,
    arrivals: &mut mpsc::Receiver<Arrival>,
    stop: &CancellationToken,
) -> End {
    let Arrival { session, hello } = arrival;
    let owners = async { Ok((Owners::connect(&plan.target).await?, Owners::connect(&plan.target).await?)) };
    let (source, sink) = match owners.await {
        Ok(owners) => owners,
        Err(error) => {
            let error: LocalError = error;
            session.close(LinkErrorCode::Stopping, "the peer's own brokers cannot be reached").await;
            return End::Lost(error.to_string());
        }
    };
    let mut driver = Driver::new(plan, session, source, sink);
    if let Some(hello) = hello {
        driver.link.on_frame(Frame::Hello(hello), now());
    }
    let end = driver.drive(arrivals, stop).await;
    let (code, text) = match &end {
        End::Replaced(_) => (LinkErrorCode::Replaced, "another connection serves this link".to_owned()),
        End::Lost(text) => (LinkErrorCode::Stopping, text.clone()),
        End::Refused(code, text) => (*code, text.clone()),
        End::Changed => (LinkErrorCode::Stopping, String::new()),
        End::Stopping => (LinkErrorCode::Stopping, "the mirror stops".to_owned()),
    };
    driver.tasks.abort_all();
    driver.session.close(code, &text).await;
    end
}

struct Driver<'a> {
    plan: &'a Plan,
    link: Link,
    session: Session,
    source: Source,
    sink: Arc<Owners>,
    tasks: JoinSet<()>,
    topics: watch::Receiver<Topics>,
    policies: watch::Receiver<Policies>,
    /// What this session goes by; rate and congestion may change under it.
    policy: LinkPolicy,
    units: mpsc::Sender<Box<Append>>,
    jobs: Option<mpsc::Sender<TopicJob>>,
    events: mpsc::Receiver<SinkEvent>,
    events_in: mpsc::Sender<SinkEvent>,
    /// A read was answered: there may be more to wish for.
    read_more: bool,
    reported: Option<Instant>,
    expires: Option<Instant>,
    peer_region: Option<RegionId>,
}

impl<'a> Driver<'a> {
    fn new(plan: &'a Plan, session: Session, source: Arc<Owners>, sink: Arc<Owners>) -> Driver<'a> {
        let mut policies = plan.own.policies.clone();
        let policy = policies.borrow_and_update().of(&plan.identity.peer);
        let mut link = Link::new(plan.identity.clone(), session.streams(), plan.credit_bytes, now());
        link.limit_rate(policy.rate_bytes_max, now());
        session.set_congestion(policy.congestion);
        let (events_in, events) = mpsc::channel(EVENTS_MAX);
        // Units are bounded by credit, of which each takes this much at least.
        let (units, units_out) = mpsc::channel((plan.credit_bytes / 1024) as usize + UNITS_SLACK);
        let mut tasks = JoinSet::new();
        tasks.spawn(append_task(sink.clone(), units_out, events_in.clone()));
        tasks.spawn(sink.clone().follow());
        tasks.spawn(source.clone().follow());
        let expires = session.expires_in.and_then(|left| Instant::now().checked_add(left));
        Driver {
            plan,
            link,
            session,
            source: Source::new(source, &policy),
            sink,
            tasks,
            topics: plan.own.topics.clone(),
            policies,
            policy,
            units,
            jobs: None,
            events,
            events_in,
            read_more: false,
            reported: None,
            expires,
            peer_region: None,
        }
    }

    async fn drive(&mut self, arrivals: &mut mpsc::Receiver<Arrival>, stop: &CancellationToken) -> End {
        let room = self.session.room();
        if self.policy.paused {
            return self.end_for_policy();
        }
        loop {
            if let Some(end) = self.carry_out() {
                return end;
            }
            self.send_units();
            self.read_more();
            self.report();
            let deadline = self.deadline();
            tokio::select! {
                event = self.session.next() => {
                    if let Some(end) = self.on_net(event) {
                        return end;
                    }
                }
                Some(event) = self.events.recv() => {
                    if let Some(end) = self.on_sink(event) {
                        return end;
                    }
                }
                found = self.source.next(), if self.source.is_busy() => {
                    self.read_more = true;
                    match found {
                        Ok(found) => self.supply(found),
                        Err(error) => return End::Lost(error.to_string()),
                    }
                }
                () = room.notified() => {}
                Ok(()) = self.policies.changed() => {
                    if let Some(end) = self.follow_policy() {
                        return end;
                    }
                }
                Ok(()) = self.topics.changed() => {
                    // Both may have changed, and a new topic is for the new policy.
                    if let Some(end) = self.follow_policy() {
                        return end;
                    }
                    self.offer();
                }
                Some(arrival) = arrivals.recv() => {
                    if let Some(end) = self.on_arrival(arrival) {
                        return end;
                    }
                }
                () = tokio::time::sleep_until(deadline) => {}
                () = stop.cancelled() => return End::Stopping,
            }
            if now() >= self.link.deadline() {
                self.link.on_time(now());
            }
            if self.expires.is_some_and(|at| Instant::now() >= at) {
                let peer = &self.plan.identity.peer;
                return End::Lost(format!("the certificate of region {peer} has expired"));
            }
        }
    }

    /// Everything that the link asks for. Control frames of one turn leave together.
    fn carry_out(&mut self) -> Option<End> {
        let mut control = BytesMut::new();
        let mut end = None;
        while let Some(output) = self.link.poll() {
            match output {
                Output::Control(frame) => frame.write(&mut control),
                Output::Append(append) => end = end.or(self.append(append)),
                Output::Close { code, text, told_by_peer } => {
                    let whose = if told_by_peer { "told by the peer: " } else { "" };
                    end = Some(End::Refused(code, format!("{whose}{text}")));
                }
                other => end = end.or(self.on_output(other)),
            }
        }
        if !control.is_empty() && !self.session.send_control(control.freeze()) && end.is_none() {
            end = Some(End::Lost("the peer does not read its control stream".to_owned()));
        }
        end
    }

    /// Rate and congestion are taken over as they are; any other change is for the next session, which
    /// begins at once and from the vectors.
    fn follow_policy(&mut self) -> Option<End> {
        let policy = self.policies.borrow_and_update().of(&self.plan.identity.peer);
        let LinkPolicy { rate_bytes_max, congestion, .. } = policy;
        self.link.limit_rate(rate_bytes_max, now());
        self.session.set_congestion(congestion);
        let same = policy == LinkPolicy { rate_bytes_max, congestion, ..self.policy.clone() };
        self.policy = policy;
        if same { None } else { Some(self.end_for_policy()) }
    }

    /// Tells the peer, so that it takes this for no fault.
    fn end_for_policy(&mut self) -> End {
        let (code, text) = match self.policy.paused {
            true => (LinkErrorCode::Paused, paused_text(&self.plan.identity.name)),
            false => (LinkErrorCode::Stopping, "the link begins anew with another policy".to_owned()),
        };
        self.link.close(code, text);
        self.carry_out();
        End::Changed
    }

    fn append(&mut self, append: Box<Append>) -> Option<End> {
        if let Some(to) = append.lost_to {
            let unit = &append.unit;
            let place = (unit.topic.clone(), unit.partition);
            if let Some(end) = self.job(TopicJob::Lost { place, from: unit.first, to }) {
                return Some(end);
            }
        }
        match self.units.try_send(append) {
            Ok(()) => None,
            Err(_) => Some(End::Refused(LinkErrorCode::Protocol, "the peer sends without credit".to_owned())),
        }
    }

    fn on_output(&mut self, output: Output) -> Option<End> {
        match output {
            Output::Up(hello) => {
                self.up(&hello);
                None
            }
            Output::Offered { topics, gone } => {
                if gone.is_empty() {
                    return self.job(TopicJob::Offered(topics));
                }
                self.job(TopicJob::Gone(gone)).or_else(|| self.job(TopicJob::Offered(topics)))
            }
            Output::Reposition(places) => self.job(TopicJob::Reposition(places)),
            Output::SourceTruncated { place, next, reason } => {
                self.plan.metrics.resets.inc();
                self.job(TopicJob::Truncated { place, next, reason })
            }
            Output::Deleted { topic, incarnation } => self.job(TopicJob::Deleted { topic, incarnation }),
            Output::Quarantined { place, reason } => {
                self.plan.metrics.quarantines.inc();
                self.job(TopicJob::Quarantined { place, reason })
            }
            Output::Control(_) | Output::Append(_) | Output::Close { .. } => unreachable!("handled before"),
        }
    }

    fn up(&mut self, hello: &Hello) {
        let (peer, address) = (&self.plan.identity.peer, self.session.address());
        let streams = self.session.streams();
        info!(%peer, region = %hello.region, %address, streams, dialled = self.session.dialled, "link is up");
        self.plan.metrics.connections.inc();
        self.peer_region = Some(hello.region);
        let (jobs, jobs_out) = mpsc::channel(JOBS_MAX);
        let task = TopicTask::new(
            self.sink.clone(),
            self.policy.clone(),
            (peer.to_string(), hello.region),
            self.plan.own.topics.clone(),
            self.events_in.clone(),
            self.plan.metrics.resets.clone(),
        );
        self.tasks.spawn(task.run(jobs_out));
        self.jobs = Some(jobs);
        self.offer();
    }

    fn job(&self, job: TopicJob) -> Option<End> {
        let taken = self.jobs.as_ref().is_some_and(|jobs| jobs.try_send(job).is_ok());
        (!taken).then(|| End::Lost("too many changes of topics at once".to_owned()))
    }

    fn offer(&mut self) {
        let topics = self.topics.borrow_and_update().clone();
        let crossing = topics.iter().filter(|topic| self.policy.lets(&topic.name));
        self.link.offer(crossing.cloned().collect());
    }

    fn on_net(&mut self, event: NetEvent) -> Option<End> {
        let (mut event, mut handled) = (event, 0);
        loop {
            match event {
                NetEvent::Frame(frame) => self.link.on_frame(frame, now()),
                NetEvent::Unit(unit) => self.link.on_unit(unit, now()),
                NetEvent::Garbage(text) => self.link.on_garbage(text),
                NetEvent::Closed(reason) => return Some(End::Lost(reason)),
            }
            handled += 1;
            if handled == EVENTS_PER_TURN {
                // Nothing is taken that this turn does not handle.
                return None;
            }
            event = self.session.try_next()?;
        }
    }

    fn on_sink(&mut self, event: SinkEvent) -> Option<End> {
        match event {
            SinkEvent::Appended(appended) => appended.iter().for_each(|a| self.link.appended(a, now())),
            SinkEvent::Want(positions) => positions.into_iter().for_each(|p| self.link.want(p)),
            SinkEvent::Halt(halts) => {
                halts.into_iter().for_each(|(place, halt)| self.link.halt(&place, halt))
            }
            SinkEvent::TellDeleted(topic, incarnation) => self.link.tell_deleted(topic, incarnation),
            SinkEvent::Failed(error) => return Some(End::Lost(error.to_string())),
        }
        None
    }

    fn on_arrival(&mut self, arrival: Arrival) -> Option<End> {
        let peer = &self.plan.identity.peer;
        // Both sides know both names, so both keep the same one of two connections.
        let preferred = |session: &Session| session.dialled == (self.plan.identity.name < *peer);
        if preferred(&arrival.session) || !preferred(&self.session) {
            return Some(End::Replaced(arrival));
        }
        tokio::spawn(async move {
            let text = "another connection serves this link";
            arrival.session.close(LinkErrorCode::Replaced, text).await;
        });
        None
    }

    fn supply(&mut self, found: Found) {
        for (sub, from, outcome) in found {
            self.link.supply(sub, from, outcome, now());
        }
    }

    /// A unit of each stream in turn, until none has one, or room, or the rate is used up.
    fn send_units(&mut self) {
        let mut sent = true;
        while sent {
            sent = false;
            for stream in self.link.turn(now()) {
                let link = &mut self.link;
                sent |= self.session.send_unit(stream, || link.take_unit(stream));
            }
        }
    }

    /// One read at a time of each owner; one that waits is ended when there is more to ask for.
    fn read_more(&mut self) {
        let is_due = self.read_more || self.link.has_fresh_wishes() || !self.source.is_busy();
        if !is_due {
            return;
        }
        self.read_more = false;
        let wishes = self.link.wishes(now());
        if wishes.is_empty() {
            return;
        }
        let begun = self.source.begin(wishes, self.link.read_bytes_max());
        self.supply(begun.failed);
        begun.moved.into_iter().for_each(|sub| self.link.prove_again(sub));
    }

    fn deadline(&self) -> Instant {
        let wait = self.link.deadline().since(now()).min(REPORT.as_millis() as u64);
        Instant::now() + Duration::from_millis(wait)
    }

    fn report(&mut self) {
        // Until both sides know each other, why there was no link before stays shown.
        if !self.link.is_up() || self.reported.is_some_and(|at| at.elapsed() < REPORT) {
            return;
        }
        self.reported = Some(Instant::now());
        let link = &self.link;
        self.source.keep_only(|sub| link.is_wanted(sub));
        let partitions = self.link.report(now());
        let (sent_bytes, received_bytes) = self.session.traffic();
        let lagging = partitions.iter().any(|p| p.state == LinkState::Lagging);
        let state = if lagging { LinkState::Lagging } else { LinkState::Active };
        self.plan.board.put(LinkReport {
            peer: self.plan.identity.peer.to_string(),
            region: self.peer_region,
            address: self.session.address().to_string(),
            state,
            reason: String::new(),
            rtt_us: u64::try_from(self.session.rtt().as_micros()).ok(),
            sent_bytes,
            received_bytes,
            partitions,
        });
    }
}

impl Arrival {
    /// Tells the peer why its connection is of no use, and closes it.
    pub async fn refuse(session: Session, code: LinkErrorCode, text: String) {
        match code {
            LinkErrorCode::Paused => debug!(address = %session.address(), "link refused: {text}"),
            _ => warn!(address = %session.address(), "link refused: {text}"),
        }
        let mut frame = BytesMut::new();
        Frame::Error { code, text: text.clone() }.write(&mut frame);
        session.send_control(Bytes::from(frame));
        session.close(code, &text).await;
    }
}

/// What a peer is told whose link is paused here.
pub fn paused_text(own: &RegionName) -> String {
    format!("region {own} has paused this link")
}

const REPORT: Duration = Duration::from_secs(1);
const EVENTS_MAX: usize = 256;
const EVENTS_PER_TURN: usize = 64;
const JOBS_MAX: usize = 10_000;
const UNITS_SLACK: usize = 1024;
