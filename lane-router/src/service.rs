//! The router as a service: its shared listener, a listener for each lane, the TLS of both, and the set of
//! lanes as the control service tells it.
//!
//! While the control service cannot be reached the last set is served on: a restart of the broker must
//! not end a lane's listener. Where a region has several brokers, each listener has one more for each of
//! them, which leads to that broker alone.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use chassis::ServiceHandle;
use chassis::tls::{ClientAuth, ClientTls, PeerIdentity, ServerTls, TlsError};
use control::v1;
use kafka_client::{Cluster, ConnectOptions, Security};
use lane_core::Lane;
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, Semaphore, mpsc};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;

use crate::brokers::Brokers;
use crate::config::Config;
use crate::directory::{Directory, Unknown};
use crate::entry::{Entered, Entry, Shown, enter};
use crate::session::{Session, SessionError};
use crate::upstream::Upstream;

/// Why a router does not start; each names the thing.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("bind {address}: {error}")]
    Bind { address: String, error: std::io::Error },
    #[error("tls: {0}")]
    Tls(#[from] TlsError),
    #[error("client_tls: {0}")]
    ClientTls(TlsError),
    #[error("{0} needs [client_tls]: without TLS a client shows neither a certificate nor a host name")]
    NeedsTls(&'static str),
    #[error(
        "broker {0:?} is not HOST:PORT, with commas between several, or broker_server_name is no host name"
    )]
    Broker(String),
}

/// A router that serves.
pub struct Running {
    /// Where the shared listener is bound.
    pub address: SocketAddr,
}

/// A listener that leads to one broker.
struct Leading {
    base: u16,
    end: CancellationToken,
    /// Why it could not be opened; it is tried again.
    failure: Option<String>,
}

/// What a listener is for.
#[derive(Clone)]
struct Purpose {
    lane: Option<Lane>,
    /// The lane's port, or the shared one.
    base: u16,
    broker: Option<i32>,
}

struct Router {
    config: Config,
    service: ServiceHandle,
    upstream: Upstream,
    brokers: Arc<Brokers>,
    /// To ask for the brokers.
    cluster: Cluster,
    /// Listeners that lead to one broker, by lane, or none for the shared one.
    leading: Mutex<BTreeMap<(Option<String>, i32), Leading>>,
    /// Told when there may be listeners to open.
    lanes_changed: Notify,
    /// Towards clients; `None`: plain.
    tls: Option<Arc<ServerTls>>,
    directory: Arc<Directory>,
    permits: Arc<Semaphore>,
    address: SocketAddr,
    /// Lanes whose listener could not be opened, and why.
    failures: Mutex<BTreeMap<String, String>>,
    connections: chassis::metrics::Gauge,
    refused: chassis::metrics::Counter,
}

/// Pause before the control service is tried again.
const RETRY: Duration = Duration::from_millis(500);
/// Pause after a failed accept: out of file descriptors, until some come free.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Between two looks at which brokers there are, and how long one may take.
const BROKERS_EVERY: Duration = Duration::from_secs(1);
const BROKERS_WITHIN: Duration = Duration::from_secs(5);
/// Time for a client's TLS handshake.
const HANDSHAKE_MAX: Duration = Duration::from_secs(10);

/// Starts a router as tasks of `service`. Ready once the control service has told the lanes.
pub async fn start(config: Config, service: ServiceHandle) -> Result<Running, StartError> {
    let failed = |error| StartError::Bind { address: config.bind.clone(), error };
    let shared = TcpListener::bind(&config.bind).await.map_err(failed)?;
    let address = shared.local_addr().map_err(failed)?;
    let router = Router::new(config, &service, address)?;
    let (accepting, stop) = (router.clone(), service.stopping().clone());
    service.spawn("shared listener", async move {
        let purpose = Purpose { lane: None, base: address.port(), broker: None };
        accepting.accept(shared, purpose, stop).await;
        Ok::<(), std::io::Error>(())
    });
    service.spawn_child(router.clone().follow_brokers());
    service.spawn("lanes", async move {
        router.follow_lanes().await;
        Ok::<(), std::io::Error>(())
    });
    Ok(Running { address })
}

/// TLS towards clients, if it is configured.
fn client_side(config: &Config) -> Result<Option<Arc<ServerTls>>, StartError> {
    match &config.client_tls {
        Some(files) => {
            ServerTls::server(files, config.client_auth, &[]).map(Some).map_err(StartError::ClientTls)
        }
        None if config.client_auth != ClientAuth::None => Err(StartError::NeedsTls("client_auth")),
        None if !config.lane_domain.is_empty() => Err(StartError::NeedsTls("lane_domain")),
        None => Ok(None),
    }
}

impl Router {
    fn new(config: Config, service: &ServiceHandle, address: SocketAddr) -> Result<Arc<Router>, StartError> {
        let to_broker = ClientTls::client(&config.tls, &[])?;
        let brokers = Arc::new(Brokers::new(config.broker_port_step));
        let server_name = config.broker_server_name.as_deref();
        let upstream = Upstream::new(&config.broker, server_name, to_broker.clone(), brokers.clone())
            .ok_or_else(|| StartError::Broker(config.broker.clone()))?;
        let options = ConnectOptions {
            client_id: "sealane-lane-router".to_owned(),
            security: Security::Tls {
                config: to_broker.clone(),
                server_name: config.broker_server_name.clone(),
            },
            ..ConnectOptions::default()
        };
        let cluster = Cluster::new(upstream.bootstrap().to_vec(), options);
        let tls = client_side(&config)?;
        to_broker.follow(service, |_| {});
        if let Some(tls) = &tls {
            tls.follow(service, |_| {});
        }
        let metrics = service.metrics();
        Ok(Arc::new(Router {
            connections: metrics.gauge("sealane_router_connections", "Open client connections.", &[]),
            refused: metrics.counter(
                "sealane_router_sessions_refused_total",
                "Connections ended because of what the client asked for.",
                &[],
            ),
            permits: Arc::new(Semaphore::new(config.connections_max as usize)),
            directory: Arc::default(),
            failures: Mutex::default(),
            service: service.clone(),
            upstream,
            brokers,
            cluster,
            leading: Mutex::default(),
            lanes_changed: Notify::new(),
            tls,
            address,
            config,
        }))
    }

    /// Accepts connections until `stop`.
    async fn accept(self: &Arc<Self>, listener: TcpListener, purpose: Purpose, stop: CancellationToken) {
        while let Some(accepted) = stop.run_until_cancelled(listener.accept()).await {
            let (client, peer) = match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            };
            let Ok(permit) = self.permits.clone().try_acquire_owned() else {
                self.refused.inc();
                tracing::debug!(%peer, "refused: connections_max is reached");
                continue;
            };
            let (router, purpose) = (self.clone(), purpose.clone());
            self.service.spawn_child(async move {
                router.connections.add(1);
                let _ = client.set_nodelay(true);
                router.judge(peer, router.serve(client, peer, purpose).await);
                router.connections.add(-1);
                drop(permit);
            });
        }
    }

    async fn serve(&self, client: TcpStream, peer: SocketAddr, purpose: Purpose) -> Result<(), SessionError> {
        let lane = purpose.lane.as_ref();
        let Some(tls) = &self.tls else {
            let entered = enter(lane, &Shown::default(), "")?;
            let (reader, writer) = client.into_split();
            return self.converse((entered, Vec::new()), peer, &purpose, reader, writer).await;
        };
        let shaking = TlsAcceptor::from(tls.current()).accept(client);
        let client = match tokio::time::timeout(HANDSHAKE_MAX, shaking).await {
            Ok(shaken) => shaken.map_err(|error| SessionError::Handshake(error.to_string()))?,
            Err(_) => return Err(SessionError::Handshake("it took too long".to_owned())),
        };
        let shown = shown(&client);
        let entered = enter(lane, &shown, &self.config.lane_domain)?;
        let names = shown.certificate.map(PeerIdentity::into_names).unwrap_or_default();
        let (reader, writer) = tokio::io::split(client);
        self.converse((entered, names), peer, &purpose, reader, writer).await
    }

    /// Runs a session; a lane that goes ends it at once, a service that stops lets it finish.
    async fn converse(
        &self,
        (entered, shown): (Entered, Vec<String>),
        peer: SocketAddr,
        purpose: &Purpose,
        reader: impl AsyncRead + Unpin,
        writer: impl AsyncWrite + Unpin,
    ) -> Result<(), SessionError> {
        // By its client id a connection is looked up at every request.
        let gone = match &entered.entry {
            Entry::ClientId { .. } => CancellationToken::new(),
            Entry::Lane(lane) => match self.directory.find(lane.as_str()) {
                Some(served) => {
                    self.directory.admits(lane.as_str(), &shown)?;
                    served.gone
                }
                None => return Err(Unknown::NoLane(lane.to_string()).into()),
            },
        };
        let session = Session {
            entry: entered.entry,
            directory: self.directory.clone(),
            upstream: self.upstream.to(purpose.broker),
            host: entered.host.unwrap_or_else(|| self.config.advertised_host.clone()),
            port: purpose.base,
            brokers: self.brokers.clone(),
            shown,
            unique: peer.ip().to_string(),
            request_bytes_max: self.config.request_bytes_max as usize,
            stop: self.service.stopping().clone(),
        };
        gone.run_until_cancelled(session.run(reader, writer)).await.unwrap_or(Ok(()))
    }

    /// Says why a connection ended, where somebody should know.
    fn judge(&self, peer: SocketAddr, ended: Result<(), SessionError>) {
        match ended {
            Ok(()) | Err(SessionError::Io(_) | SessionError::BrokerGone) => {}
            Err(error @ SessionError::Upstream(_)) => tracing::warn!(%peer, %error, "no way to the broker"),
            Err(error) => {
                self.refused.inc();
                tracing::warn!(%peer, %error, "connection closed");
            }
        }
    }

    /// Keeps a session with the control service.
    async fn follow_lanes(self: Arc<Self>) {
        let stop = self.service.stopping().clone();
        let (mut complained, mut tries) = (false, 0);
        while !stop.is_cancelled() {
            let watched = stop.run_until_cancelled(self.watch_lanes(tries)).await;
            tries = tries.wrapping_add(1);
            match watched {
                Some(Err(error)) if !complained => {
                    complained = true;
                    let control = &self.config.control;
                    tracing::warn!(%control, %error, "no word about lanes; the known ones are served on");
                }
                Some(Ok(())) => complained = false,
                Some(Err(_)) | None => {}
            }
            stop.run_until_cancelled(tokio::time::sleep(RETRY)).await;
        }
    }

    async fn watch_lanes(self: &Arc<Self>, tries: usize) -> Result<(), String> {
        let tls = &self.config.tls;
        let paths = match (&tls.ca, self.config.control_tls) {
            (Some(ca), true) => Some(control::TlsPaths { ca, cert: &tls.cert, key: &tls.key }),
            (None, true) => return Err("tls.ca is not set".to_owned()),
            (_, false) => None,
        };
        let addresses: Vec<&str> = self.config.control.split(',').map(str::trim).collect();
        // Another one after each failure.
        let address = addresses[tries % addresses.len()];
        let mut client = control::connect(address, paths).await.map_err(|e| e.to_string())?;
        let (reports, stream) = mpsc::channel(4);
        let report = |generation| self.report(generation);
        reports.send(report(0)).await.map_err(|e| e.to_string())?;
        let answer = client.watch_lanes(ReceiverStream::new(stream)).await;
        let mut sets = answer.map_err(|status| status.message().to_owned())?.into_inner();
        while let Some(set) = sets.message().await.map_err(|status| status.message().to_owned())? {
            self.serve_set(&set).await;
            reports.send(report(set.generation)).await.map_err(|e| e.to_string())?;
            self.service.set_ready(true);
        }
        Ok(())
    }

    /// Opens the listeners of lanes that are new or could not be opened before; ends those that went.
    async fn serve_set(self: &Arc<Self>, set: &v1::LaneSet) {
        let live = set.lanes.iter().filter(|lane| !lane.deleting);
        let wanted: BTreeMap<String, u16> =
            live.map(|lane| (lane.name.clone(), u16::try_from(lane.port).unwrap_or(0))).collect();
        let closed = set.lanes.iter().filter(|lane| !lane.principals.is_empty());
        self.directory.admit(closed.map(|lane| (lane.name.clone(), lane.principals.clone())).collect());
        let mut open = self.directory.replace(&wanted);
        let failed = std::mem::take(&mut *self.failures.lock());
        open.extend(failed.into_keys().filter(|name| wanted.contains_key(name)));
        open.sort();
        open.dedup();
        for name in open {
            if let Err(reason) = self.open_lane(&name).await {
                tracing::warn!(lane = %name, %reason, "a lane's listener cannot be opened");
                self.failures.lock().insert(name, reason);
            }
        }
        self.lanes_changed.notify_one();
    }

    /// Learns again and again which brokers there are, and opens the listeners that lead to them.
    async fn follow_brokers(self: Arc<Self>) {
        let stop = self.service.stopping().clone();
        let following = async {
            loop {
                let asked = tokio::time::timeout(BROKERS_WITHIN, self.cluster.brokers()).await;
                // Clients meet the error themselves; what was known is served on.
                if let Ok(Ok(brokers)) = asked {
                    let known = brokers.into_iter().map(|(id, at)| (id.0, at.to_string()));
                    self.brokers.replace(known.collect());
                }
                self.lead_to_brokers().await;
                let _ = tokio::time::timeout(BROKERS_EVERY, self.lanes_changed.notified()).await;
            }
        };
        stop.run_until_cancelled(following).await;
    }

    /// Opens the listeners that lead to one broker each, and ends those whose broker or lane is gone.
    async fn lead_to_brokers(self: &Arc<Self>) {
        let mut families: BTreeMap<Option<String>, (u16, CancellationToken)> = self
            .directory
            .all()
            .into_iter()
            .filter(|(_, served)| served.port != 0)
            .map(|(name, served)| (Some(name), (served.port, served.gone)))
            .collect();
        families.insert(None, (self.address.port(), self.service.stopping().clone()));
        let brokers = self.brokers.with_ports();
        self.leading.lock().retain(|(lane, broker), leading| {
            let base = families.get(lane).map(|(base, _)| *base);
            let stays = brokers.contains(broker) && base == Some(leading.base);
            if !stays {
                leading.end.cancel();
            }
            stays
        });
        for (lane, (base, gone)) in families {
            for broker in &brokers {
                let key = (lane.clone(), *broker);
                let earlier = self.leading.lock().get(&key).map(|leading| leading.failure.clone());
                if earlier == Some(None) {
                    continue;
                }
                let end = gone.child_token();
                let failure = self.lead_to(&lane, base, *broker, &end).await.err();
                if let Some(reason) = failure.as_ref().filter(|_| earlier.is_none()) {
                    let lane = lane.as_deref().unwrap_or("the shared listener");
                    tracing::warn!(%lane, broker, %reason, "no listener leads to this broker");
                }
                self.leading.lock().insert(key, Leading { base, end, failure });
            }
        }
    }

    async fn lead_to(
        self: &Arc<Self>,
        lane: &Option<String>,
        base: u16,
        broker: i32,
        end: &CancellationToken,
    ) -> Result<(), String> {
        let lane = lane.as_deref().map(Lane::parse).transpose().map_err(|error| error.to_string())?;
        let port = self.brokers.ports(base).of(broker);
        let fits = u16::try_from(port)
            .map_err(|_| format!("port {port} is none; lower broker_port_step, or give lanes lower ports"))?;
        let host = match &lane {
            Some(_) => self.config.lane_bind_host.trim_matches(['[', ']']).to_owned(),
            None => self.address.ip().to_string(),
        };
        let bound = TcpListener::bind((host.as_str(), fits)).await;
        let listener = bound.map_err(|error| format!("{host}:{port}: {error}"))?;
        let (router, stop, end) = (self.clone(), self.service.stopping().clone(), end.clone());
        let purpose = Purpose { lane, base, broker: Some(broker) };
        self.service.spawn_child(async move {
            stop.run_until_cancelled(router.accept(listener, purpose, end)).await;
        });
        Ok(())
    }

    async fn open_lane(self: &Arc<Self>, name: &str) -> Result<(), String> {
        let lane = Lane::parse(name).map_err(|error| error.to_string())?;
        let Some(served) = self.directory.find(name) else { return Ok(()) };
        if served.port == 0 {
            return Ok(()); // this region gives lanes no ports of their own
        }
        let host = self.config.lane_bind_host.trim_start_matches('[').trim_end_matches(']');
        let bound = TcpListener::bind((host, served.port)).await;
        let listener = bound.map_err(|error| format!("{host}:{}: {error}", served.port))?;
        let (router, stop) = (self.clone(), self.service.stopping().clone());
        tracing::info!(%lane, port = served.port, "lane listener open");
        self.service.spawn_child(async move {
            let gone = served.gone.clone();
            let purpose = Purpose { lane: Some(lane), base: served.port, broker: None };
            stop.run_until_cancelled(router.accept(listener, purpose, gone)).await;
        });
        Ok(())
    }

    fn report(&self, generation: u64) -> v1::LaneRouterReport {
        let failures = self.failures.lock();
        let failure = |(lane, reason): (&String, &String)| v1::LaneFailure {
            lane: lane.clone(),
            reason: reason.clone(),
        };
        let mut all: Vec<v1::LaneFailure> = failures.iter().map(failure).collect();
        let leading = self.leading.lock();
        let failed = leading.iter().filter_map(|((lane, _), leading)| {
            Some(v1::LaneFailure { lane: lane.clone()?, reason: leading.failure.clone()? })
        });
        all.extend(failed);
        v1::LaneRouterReport { address: self.address.to_string(), generation, failures: all }
    }
}

/// What a client has shown in its handshake.
fn shown(client: &TlsStream<TcpStream>) -> Shown {
    let connection = client.get_ref().1;
    let certificate = connection.peer_certificates().and_then(|chain| PeerIdentity::of(chain.first()?));
    Shown { certificate, host_name: connection.server_name().map(str::to_owned) }
}

#[cfg(test)]
#[path = "service_tests.rs"]
mod tests;
