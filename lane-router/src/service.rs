//! The router as a service: its shared listener, a listener for each lane, the TLS of both, and the set of
//! lanes as the control service tells it.
//!
//! While the control service cannot be reached the last set is served on: a restart of the broker must
//! not end a lane's listener.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use chassis::ServiceHandle;
use chassis::tls::{ClientAuth, ClientTls, PeerIdentity, ServerTls, TlsError};
use control::v1;
use lane_core::Lane;
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;

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
    #[error("broker {0:?} is not HOST:PORT, or broker_server_name is no host name")]
    Broker(String),
}

/// A router that serves.
pub struct Running {
    /// Where the shared listener is bound.
    pub address: SocketAddr,
}

struct Router {
    config: Config,
    service: ServiceHandle,
    upstream: Upstream,
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
        accepting.accept(shared, None, stop).await;
        Ok::<(), std::io::Error>(())
    });
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
        let upstream = Upstream::new(&config.broker, config.broker_server_name.as_deref(), to_broker.clone())
            .ok_or_else(|| StartError::Broker(config.broker.clone()))?;
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
            tls,
            address,
            config,
        }))
    }

    /// Accepts connections until `stop`; `lane` is the listener's.
    async fn accept(self: &Arc<Self>, listener: TcpListener, lane: Option<Lane>, stop: CancellationToken) {
        let port = listener.local_addr().map_or(0, |address| address.port());
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
            let (router, lane) = (self.clone(), lane.clone());
            self.service.spawn_child(async move {
                router.connections.add(1);
                let _ = client.set_nodelay(true);
                router.judge(peer, router.serve(client, peer, port, lane).await);
                router.connections.add(-1);
                drop(permit);
            });
        }
    }

    async fn serve(
        &self,
        client: TcpStream,
        peer: SocketAddr,
        port: u16,
        lane: Option<Lane>,
    ) -> Result<(), SessionError> {
        let Some(tls) = &self.tls else {
            let entered = enter(lane.as_ref(), &Shown::default(), "")?;
            let (reader, writer) = client.into_split();
            return self.converse(entered, peer, port, reader, writer).await;
        };
        let shaking = TlsAcceptor::from(tls.current()).accept(client);
        let client = match tokio::time::timeout(HANDSHAKE_MAX, shaking).await {
            Ok(shaken) => shaken.map_err(|error| SessionError::Handshake(error.to_string()))?,
            Err(_) => return Err(SessionError::Handshake("it took too long".to_owned())),
        };
        let entered = enter(lane.as_ref(), &shown(&client), &self.config.lane_domain)?;
        let (reader, writer) = tokio::io::split(client);
        self.converse(entered, peer, port, reader, writer).await
    }

    /// Runs a session; a lane that goes ends it at once, a service that stops lets it finish.
    async fn converse(
        &self,
        entered: Entered,
        peer: SocketAddr,
        port: u16,
        reader: impl AsyncRead + Unpin,
        writer: impl AsyncWrite + Unpin,
    ) -> Result<(), SessionError> {
        // By its client id a connection is looked up at every request.
        let gone = match &entered.entry {
            Entry::ClientId { .. } => CancellationToken::new(),
            Entry::Lane(lane) => match self.directory.find(lane.as_str()) {
                Some(served) => served.gone,
                None => return Err(Unknown::NoLane(lane.to_string()).into()),
            },
        };
        let session = Session {
            entry: entered.entry,
            directory: self.directory.clone(),
            upstream: self.upstream.clone(),
            host: entered.host.unwrap_or_else(|| self.config.advertised_host.clone()),
            port,
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
        let mut complained = false;
        while !stop.is_cancelled() {
            match stop.run_until_cancelled(self.watch_lanes()).await {
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

    async fn watch_lanes(self: &Arc<Self>) -> Result<(), String> {
        let tls = &self.config.tls;
        let paths = match (&tls.ca, self.config.control_tls) {
            (Some(ca), true) => Some(control::TlsPaths { ca, cert: &tls.cert, key: &tls.key }),
            (None, true) => return Err("tls.ca is not set".to_owned()),
            (_, false) => None,
        };
        let mut client = control::connect(&self.config.control, paths).await.map_err(|e| e.to_string())?;
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
            stop.run_until_cancelled(router.accept(listener, Some(lane), gone)).await;
        });
        Ok(())
    }

    fn report(&self, generation: u64) -> v1::LaneRouterReport {
        let failures = self.failures.lock();
        let failure = |(lane, reason): (&String, &String)| v1::LaneFailure {
            lane: lane.clone(),
            reason: reason.clone(),
        };
        v1::LaneRouterReport {
            address: self.address.to_string(),
            generation,
            failures: failures.iter().map(failure).collect(),
        }
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
