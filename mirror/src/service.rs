//! The mirror as a service: its UDP endpoint, one task for each link, and who dials whom.
//!
//! Sessions of a link run one after the other, whichever side dialled. When both did, both keep the
//! connection that was dialled by the region whose name sorts first.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use chassis::ServiceHandle;
use chassis::tls::{Authorities, ClientTls, TlsError, TlsFiles};
use kafka::RegionName;
use kafka::names::NameError;
use kafka::private::LinkState;
use kafka_client::{Endpoint, EndpointError};
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tracing::{Instrument as _, info, warn};
use uuid::Uuid;

use crate::brokers::{Talk, talk};
use crate::config::{Config, LinkConfig};
use crate::link::{Frame, HELLO_MS, Identity, LinkErrorCode, VERSION};
use crate::local::Target;
use crate::metrics::{LinkMetrics, show};
use crate::quic::{ALPN, Incoming, Net, NetError, NetEvent, NetOptions, Session};
use crate::region::{Policies, Topics, learn};
use crate::session::{Arrival, End, Plan, paused_text, run};
use crate::status::Board;

/// Why a mirror does not start; each names the thing.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("broker: {0}")]
    Broker(#[from] EndpointError),
    #[error("broker is empty; write HOST:PORT of the internal listener of a broker of this region")]
    NoBroker,
    #[error("bind {0:?} is not an address; write IP:PORT")]
    Bind(String),
    #[error("links.peer: {0}")]
    Peer(#[from] NameError),
    #[error("two links are for region {0}")]
    Twice(RegionName),
    #[error("streams_max is {0}; a link needs 2 at least")]
    Streams(u32),
    #[error(transparent)]
    Tls(#[from] TlsError),
    #[error(transparent)]
    Net(#[from] NetError),
    #[error("UDP address: {0}")]
    Address(std::io::Error),
}

/// A mirror that runs.
pub struct Running {
    /// Where peers reach it.
    pub address: SocketAddr,
    pub board: Board,
}

/// Starts a mirror as tasks of `service`. Links come up when the broker and the peers are there.
pub async fn start(config: Config, service: ServiceHandle) -> Result<Running, StartError> {
    let target = Target {
        bootstrap: Endpoint::parse_list(&config.broker)?,
        tls: ClientTls::client(&config.tls, &[])?,
        server_name: config.broker_server_name.clone(),
    };
    if target.bootstrap.is_empty() {
        return Err(StartError::NoBroker);
    }
    target.tls.follow(&service, |_| {});
    if config.streams_max < 2 {
        return Err(StartError::Streams(config.streams_max));
    }
    let bind: SocketAddr = config.bind.parse().map_err(|_| StartError::Bind(config.bind.clone()))?;
    let options = NetOptions { streams_max: config.streams_max, receive_window: config.credit_bytes };
    let net = Arc::new(Net::bind(bind, config.link_tls.as_ref().unwrap_or(&config.tls), &options)?);
    let (server, client) = net.tls();
    server.follow(&service, |_| {});
    client.follow(&service, |_| {});
    let mut links: Vec<(RegionName, LinkConfig, Option<Bound>)> = Vec::new();
    for link in &config.links {
        let name = RegionName::parse(&link.peer)?;
        if links.iter().any(|(other, ..)| *other == name) {
            return Err(StartError::Twice(name));
        }
        let shown = config.link_tls.as_ref().unwrap_or(&config.tls);
        let bound = link.ca.as_ref().map(|ca| Bound::to(ca, shown, &service)).transpose()?;
        links.push((name, link.clone(), bound));
    }
    let (address, board) = (net.local_addr().map_err(StartError::Address)?, Board::default());
    show(service.metrics(), board.clone());
    for (name, link, _) in &links {
        let reason = "waiting for the region's own brokers";
        board.disconnected(name.as_str(), shown(link), LinkState::Connecting, reason);
    }
    let mirror = Mirror { config, service: service.clone(), net, target, board: board.clone() };
    service.spawn("mirror", async move {
        mirror.run(links).await;
        Ok::<(), std::convert::Infallible>(())
    });
    Ok(Running { address, board })
}

/// By which authorities a peer is told from the other peers: where it is dialled, and where it dials.
#[derive(Clone)]
struct Bound {
    client: Arc<ClientTls>,
    authorities: Arc<Authorities>,
}

impl Bound {
    fn to(ca: &Path, shown: &TlsFiles, service: &ServiceHandle) -> Result<Bound, StartError> {
        let files = TlsFiles { ca: Some(ca.to_owned()), ..shown.clone() };
        let bound = Bound { client: ClientTls::client(&files, &[ALPN])?, authorities: Authorities::of(ca)? };
        bound.client.follow(service, |_| {});
        bound.authorities.follow(service, |_| {});
        Ok(bound)
    }
}

struct Mirror {
    config: Config,
    service: ServiceHandle,
    net: Arc<Net>,
    target: Target,
    board: Board,
}

impl Mirror {
    async fn run(self, links: Vec<(RegionName, LinkConfig, Option<Bound>)>) {
        let stop = self.service.stopping().clone();
        let cluster = self.target.cluster();
        let Some((own, follower)) = learn(cluster.clone(), stop.clone()).await else { return };
        let (region, name) = {
            let topics = own.topics.borrow();
            (topics.region, topics.name.clone())
        };
        let instance = Uuid::new_v4();
        let mut doors = HashMap::new();
        for (peer, link, bound) in links {
            let plan = Plan {
                identity: Identity { region, name: name.clone(), instance, peer: peer.clone() },
                target: self.target.clone(),
                own: own.clone(),
                credit_bytes: self.config.credit_bytes,
                board: self.board.clone(),
                metrics: LinkMetrics::new(self.service.metrics(), peer.as_str()),
            };
            let (door, arrivals) = mpsc::channel(ARRIVALS_MAX);
            doors.insert(peer, (door.clone(), bound.clone()));
            let keeper = Keeper { plan, link, bound, net: self.net.clone(), stop: stop.clone() };
            self.service.spawn_child(keeper.run(door, arrivals));
        }
        let said = Talk { cluster, board: self.board.clone(), policies: follower.policies.clone() };
        self.service.spawn_child(talk(said, stop.clone()));
        self.service.spawn_child(follower.run(stop.clone()));
        self.service.set_ready(true);
        let accept = self.accept(&own.topics, Arc::new(doors));
        stop.run_until_cancelled(accept).await;
        self.net.close().await;
    }

    async fn accept(&self, topics: &watch::Receiver<Topics>, doors: Arc<Doors>) {
        while let Some(incoming) = self.net.accept().await {
            match incoming {
                Ok(incoming) => {
                    let topics = topics.borrow().clone();
                    self.service.spawn_child(admit(incoming, topics, doors.clone()));
                }
                Err(error) => warn!("a connection was not accepted: {error}"),
            }
        }
    }
}

/// Where arrivals go, by the name that they say, and who may say it.
type Doors = HashMap<RegionName, (mpsc::Sender<Arrival>, Option<Bound>)>;

/// Finds out who a peer is and hands its connection to the link that it is for.
async fn admit(incoming: Incoming, own: Topics, doors: Arc<Doors>) {
    let address = incoming.address();
    let mut session = match incoming.finish().await {
        Ok(session) => session,
        Err(reason) => return warn!(%address, "link refused: {reason}"),
    };
    let first = timeout(Duration::from_millis(HELLO_MS), session.next()).await;
    let hello = match first {
        Ok(NetEvent::Frame(Frame::Hello(hello))) => hello,
        Ok(NetEvent::Closed(reason)) => return info!(%address, "connection closed before hello: {reason}"),
        _ => {
            let text = "the first frame must be a hello".to_owned();
            return Arrival::refuse(session, LinkErrorCode::Protocol, text).await;
        }
    };
    if hello.region == own.region {
        let text = format!("both ends of this link are region {} ({})", own.name, own.region);
        return Arrival::refuse(session, LinkErrorCode::SelfLink, text).await;
    }
    let Some((door, bound)) = doors.get(&hello.name) else {
        let text = format!("region {} has no link to a region {}", own.name, hello.name);
        return Arrival::refuse(session, LinkErrorCode::WrongPeer, text).await;
    };
    // The handshake let in whoever is a peer; which of them it is must not be its own word alone.
    if let Some(Err(reason)) = bound.as_ref().map(|bound| session.is_of(&bound.authorities)) {
        warn!(%address, peer = %hello.name, "link refused: another region's certificate: {reason}");
        let text = format!("no authority of region {} has signed this certificate", hello.name);
        return Arrival::refuse(session, LinkErrorCode::WrongPeer, text).await;
    }
    // A link that is busy with many arrivals lets this one go; its peer dials again.
    let _ = door.try_send(Arrival { session, hello: Some(hello) });
}

/// Keeps one link connected.
struct Keeper {
    plan: Plan,
    link: LinkConfig,
    bound: Option<Bound>,
    net: Arc<Net>,
    stop: CancellationToken,
}

impl Keeper {
    async fn run(self, door: mpsc::Sender<Arrival>, mut arrivals: mpsc::Receiver<Arrival>) {
        let (wanted, dial) = watch::channel(true);
        let dialler = Dialler {
            link: self.link.clone(),
            tls: self.bound.as_ref().map(|bound| bound.client.clone()),
            net: self.net.clone(),
            board: self.plan.board.clone(),
            door,
            wanted: dial,
        };
        let stop = self.stop.clone();
        tokio::join!(stop.run_until_cancelled(dialler.run()), self.keep(&mut arrivals, wanted));
    }

    async fn keep(&self, arrivals: &mut mpsc::Receiver<Arrival>, wanted: watch::Sender<bool>) {
        let mut policies = self.plan.own.policies.clone();
        let mut said = String::new();
        loop {
            let next = self.next(arrivals, &mut policies, &wanted);
            let Some(Some(arrival)) = self.stop.run_until_cancelled(next).await else { return };
            wanted.send_replace(false);
            let down = match self.sessions(arrival, arrivals).await {
                End::Stopping => return,
                end => Down::of(end),
            };
            if down.reason != said {
                if down.is_fault {
                    warn!(peer = self.link.peer, "link is down: {}", down.reason);
                } else {
                    info!(peer = self.link.peer, "link is down: {}", down.reason);
                }
                said.clone_from(&down.reason);
            }
            self.plan.board.disconnected(&self.link.peer, shown(&self.link), down.state, &down.reason);
            let early = tokio::time::sleep(down.wait);
            if self.stop.run_until_cancelled(early).await.is_none() {
                return;
            }
        }
    }

    /// The next connection, as soon as the policy wants one.
    async fn next(
        &self,
        arrivals: &mut mpsc::Receiver<Arrival>,
        policies: &mut watch::Receiver<Policies>,
        wanted: &watch::Sender<bool>,
    ) -> Option<Arrival> {
        loop {
            if self.plan.policy().paused {
                wanted.send_replace(false);
                self.rest(arrivals, policies).await?;
            }
            wanted.send_replace(true);
            tokio::select! {
                arrival = arrivals.recv() => return arrival,
                changed = policies.changed() => changed.ok()?,
            }
        }
    }

    /// Runs sessions as long as each is replaced by another.
    async fn sessions(&self, first: Arrival, arrivals: &mut mpsc::Receiver<Arrival>) -> End {
        let mut arrival = first;
        loop {
            let span = tracing::info_span!("link", peer = self.link.peer);
            match run(&self.plan, arrival, arrivals, &self.stop).instrument(span).await {
                End::Replaced(next) => arrival = next,
                end => return end,
            }
        }
    }

    /// Until the link's policy pauses it no more.
    async fn rest(
        &self,
        arrivals: &mut mpsc::Receiver<Arrival>,
        policies: &mut watch::Receiver<Policies>,
    ) -> Option<()> {
        let (peer, own) = (&self.plan.identity.peer, &self.plan.identity.name);
        info!(%peer, "link is paused by its policy");
        let reason = format!("paused; `sealane mirror link set {peer} --resume` ends it");
        self.plan.board.disconnected(peer.as_str(), shown(&self.link), LinkState::Paused, &reason);
        while self.plan.policy().paused {
            tokio::select! {
                arrival = arrivals.recv() => {
                    let Arrival { session, hello } = arrival?;
                    let version = hello.map_or(VERSION, |hello| hello.version);
                    let code = LinkErrorCode::Paused.for_version(version);
                    // The peer asks again and again, and a slow one must not keep the others waiting.
                    let refused = Arrival::refuse(session, code, paused_text(own));
                    tokio::spawn(refused);
                }
                changed = policies.changed() => changed.ok()?,
            }
        }
        info!(%peer, "link is paused no more");
        Some(())
    }
}

/// Why and how a link is down, and how long before it is tried again.
struct Down {
    state: LinkState,
    reason: String,
    wait: Duration,
    is_fault: bool,
}

impl Down {
    fn of(end: End) -> Down {
        let down = |state, reason, wait, is_fault| Down { state, reason, wait, is_fault };
        match end {
            End::Lost(reason) => down(LinkState::Connecting, reason, LOST_WAIT, true),
            // Told beforehand; no fault.
            End::Refused(LinkErrorCode::Stopping, text) => {
                down(LinkState::Connecting, text, LOST_WAIT, false)
            }
            End::Refused(LinkErrorCode::Paused, text) => down(LinkState::Paused, text, PAUSED_WAIT, false),
            // Two mirrors that start at once may both give way.
            End::Refused(LinkErrorCode::Replaced | LinkErrorCode::Silent, text) => {
                down(LinkState::Connecting, text, LOST_WAIT, true)
            }
            End::Refused(_, text) => down(LinkState::Faulted, text, REFUSED_WAIT, true),
            End::Changed => {
                let reason = "it begins anew with another policy".to_owned();
                down(LinkState::Connecting, reason, Duration::ZERO, false)
            }
            End::Replaced(_) | End::Stopping => unreachable!("these are no reason to be down"),
        }
    }
}

/// Dials while the link has no connection.
struct Dialler {
    link: LinkConfig,
    tls: Option<Arc<ClientTls>>,
    net: Arc<Net>,
    board: Board,
    door: mpsc::Sender<Arrival>,
    wanted: watch::Receiver<bool>,
}

impl Dialler {
    async fn run(mut self) {
        let Some(address) = self.link.address.clone() else { return };
        let (mut wait, mut said) = (DIAL_WAIT_MIN, String::new());
        loop {
            if self.wanted.wait_for(|wanted| *wanted).await.is_err() {
                return;
            }
            let session =
                match self.net.dial(&address, self.link.server_name.as_deref(), self.tls.as_deref()).await {
                    Ok(session) => session,
                    Err(error) => {
                        self.failed(&address, &error, &mut said);
                        tokio::time::sleep(wait + jitter()).await;
                        wait = (wait * 2).min(DIAL_WAIT_MAX);
                        continue;
                    }
                };
            (wait, said) = (DIAL_WAIT_MIN, String::new());
            if self.hand_over(session).await.is_err() {
                return;
            }
        }
    }

    async fn hand_over(&mut self, session: Session) -> Result<(), ()> {
        self.door.send(Arrival { session, hello: None }).await.map_err(|_| ())?;
        // Until the link has taken it, or has another.
        self.wanted.wait_for(|wanted| !*wanted).await.map(|_| ()).map_err(|_| ())
    }

    fn failed(&self, address: &str, error: &NetError, said: &mut String) {
        let text = error.to_string();
        // The other side may have connected meanwhile.
        if *self.wanted.borrow() {
            self.board.disconnected(&self.link.peer, address, LinkState::Connecting, &text);
        }
        if text != *said {
            warn!(peer = self.link.peer, "cannot connect to {text}");
            *said = text;
        }
    }
}

fn shown(link: &LinkConfig) -> &str {
    link.address.as_deref().unwrap_or("waits to be dialled")
}

/// Keeps two mirrors that failed together from trying together.
fn jitter() -> Duration {
    Duration::from_millis(u64::from(Uuid::new_v4().as_bytes()[0]))
}

const ARRIVALS_MAX: usize = 4;
const DIAL_WAIT_MIN: Duration = Duration::from_millis(200);
const DIAL_WAIT_MAX: Duration = Duration::from_secs(5);
const LOST_WAIT: Duration = Duration::from_millis(200);
const PAUSED_WAIT: Duration = Duration::from_secs(1);
const REFUSED_WAIT: Duration = Duration::from_secs(10);
