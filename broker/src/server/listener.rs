//! A bound address that accepts Kafka connections, plain or TLS.
//!
//! Counts its connections against a limit; certificates are taken anew for every connection, so that
//! reloaded files count at once.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use chassis::tls::{PeerIdentity, ServerTls, TlsError};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_rustls::TlsAcceptor;
use tracing::Instrument as _;

use super::connection;
use super::stream::Stream;
use crate::api::{ConnectionInfo, Ctx, Principal};
use crate::broker::Broker;
use crate::config::{ListenerConfig, ListenerView};

/// What handlers know of the listener of a connection.
#[derive(Debug)]
pub struct ListenerInfo {
    pub name: String,
    pub internal: bool,
    /// Its readers are shown every record.
    pub raw: bool,
    pub advertised_host: String,
    pub advertised_port: u16,
}

/// An address that is bound and not served yet.
pub struct BoundListener {
    pub info: Arc<ListenerInfo>,
    pub address: SocketAddr,
    socket: TcpListener,
    tls: Option<Arc<ServerTls>>,
    /// Who may use it, by common name; `None`: everybody who gets through the handshake.
    readers: Option<Arc<[String]>>,
}

/// Why a listener cannot be opened; names it.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    #[error("listener {name}: address {bind} is in use by another process; choose another or stop that one")]
    InUse { name: String, bind: String },
    #[error("listener {name}: cannot bind {bind}: {reason}")]
    Bind { name: String, bind: String, reason: String },
    #[error("listener {name}: advertised address {advertised:?} is not HOST:PORT")]
    Advertised { name: String, advertised: String },
    #[error("listener {name}: {error}")]
    Tls { name: String, error: TlsError },
    #[error("listener {0} is internal: it needs `tls` and `client_auth = \"required\"`")]
    InternalOpen(String),
    #[error(
        "listener {0} has view = \"raw\": it needs `tls`, `client_auth = \"required\"` and the common names of \
         its readers in `raw_readers`, and cannot be internal"
    )]
    RawOpen(String),
    #[error("listener {0} has `raw_readers`, which belong to view = \"raw\"")]
    ReadersWithoutRaw(String),
}

/// Time for a TLS handshake.
const HANDSHAKE_MAX: Duration = Duration::from_secs(10);

/// Pause after a failed accept: out of file descriptors, until some come free.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

impl BoundListener {
    pub async fn bind(config: &ListenerConfig) -> Result<BoundListener, BindError> {
        let name = config.name.clone();
        let required = config.client_auth == chassis::tls::ClientAuth::Required;
        if config.internal && (config.tls.is_none() || !required) {
            return Err(BindError::InternalOpen(name));
        }
        let raw = config.view == ListenerView::Raw;
        let guarded = config.tls.is_some() && required && !config.raw_readers.is_empty() && !config.internal;
        if raw && !guarded {
            return Err(BindError::RawOpen(name));
        }
        if !raw && !config.raw_readers.is_empty() {
            return Err(BindError::ReadersWithoutRaw(name));
        }
        let tls = match &config.tls {
            Some(files) => Some(
                ServerTls::server(files, config.client_auth, &[])
                    .map_err(|error| BindError::Tls { name: name.clone(), error })?,
            ),
            None => None,
        };
        let bind = config.bind.clone();
        let failed = |error: std::io::Error| match error.kind() {
            std::io::ErrorKind::AddrInUse => BindError::InUse { name: name.clone(), bind: bind.clone() },
            _ => BindError::Bind { name: name.clone(), bind: bind.clone(), reason: error.to_string() },
        };
        let socket = TcpListener::bind(&bind).await.map_err(failed)?;
        let address = socket.local_addr().map_err(failed)?;
        let (advertised_host, advertised_port) = match config.advertised.is_empty() {
            true => (address.ip().to_string(), address.port()),
            false => parse_advertised(&name, &config.advertised)?,
        };
        let info = ListenerInfo { name, internal: config.internal, raw, advertised_host, advertised_port };
        let readers = raw.then(|| config.raw_readers.clone().into());
        Ok(BoundListener { info: Arc::new(info), address, socket, tls, readers })
    }

    /// Accepts connections until the service stops.
    pub fn serve(self, broker: &Arc<Broker>) {
        if let Some(tls) = &self.tls {
            tls.follow(&broker.service, |_| {});
        }
        if let Some(readers) = &self.readers {
            tracing::warn!(
                listener = %self.info.name, address = %self.address, readers = readers.join(", "),
                "this listener shows every record of every topic, those of PPE lanes too"
            );
        }
        let service = broker.service.clone();
        let broker = broker.clone();
        service.spawn("listener", async move {
            self.accept_all(&broker).await;
            Ok::<(), std::io::Error>(())
        });
    }

    async fn accept_all(&self, broker: &Arc<Broker>) {
        let permits = Arc::new(Semaphore::new(broker.config.connections_max as usize));
        let stop = broker.service.stopping();
        while let Some(accepted) = stop.run_until_cancelled(self.socket.accept()).await {
            let (stream, peer) = match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    tracing::warn!(listener = %self.info.name, %error, "cannot accept a connection");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            };
            let Ok(permit) = permits.clone().try_acquire_owned() else {
                broker.metrics.connections_refused.add(1);
                tracing::debug!(listener = %self.info.name, %peer, "refused: connections_max is reached");
                continue;
            };
            let (service, broker) = (&broker.service, broker.clone());
            let (info, tls, readers) = (self.info.clone(), self.tls.clone(), self.readers.clone());
            let span = tracing::debug_span!("connection", listener = info.name, %peer);
            let serving = async move {
                let gauge = broker.metrics.connections.clone();
                gauge.add(1);
                serve_one(broker, info, tls, readers, stream, peer).await;
                gauge.add(-1);
                drop(permit);
            };
            service.spawn_child(serving.instrument(span));
        }
    }
}

async fn serve_one(
    broker: Arc<Broker>,
    listener: Arc<ListenerInfo>,
    tls: Option<Arc<ServerTls>>,
    readers: Option<Arc<[String]>>,
    stream: TcpStream,
    peer: SocketAddr,
) {
    static NEXT_ID: AtomicU64 = AtomicU64::new(1);
    let _ = stream.set_nodelay(true);
    let (stream, principal) = match tls {
        None => (Stream::Plain(stream), Principal::Anonymous),
        Some(tls) => match handshake(&tls, stream).await {
            Ok(shaken) => shaken,
            Err(reason) => {
                broker.metrics.malformed.add(1);
                tracing::warn!(listener = %listener.name, %peer, %reason, "TLS handshake failed");
                return;
            }
        },
    };
    let may = |readers: &Arc<[String]>| match &principal {
        Principal::Certificate(name) => readers.iter().any(|reader| **reader == **name),
        Principal::Anonymous => false,
    };
    if !readers.as_ref().is_none_or(may) {
        broker.metrics.connections_refused.add(1);
        tracing::warn!(listener = %listener.name, %peer, ?principal, "refused: it is not in raw_readers");
        return;
    }
    let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
    let connection = Arc::new(ConnectionInfo { id, listener, principal, peer });
    connection::run(Ctx { broker, connection }, stream).await;
}

async fn handshake(tls: &ServerTls, stream: TcpStream) -> Result<(Stream, Principal), String> {
    let accept = TlsAcceptor::from(tls.current()).accept(stream);
    let stream = match tokio::time::timeout(HANDSHAKE_MAX, accept).await {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) => return Err(error.to_string()),
        Err(_) => return Err("it took too long".to_owned()),
    };
    let certificate = stream.get_ref().1.peer_certificates().and_then(|chain| chain.first());
    let name = certificate.and_then(PeerIdentity::of).and_then(|id| id.common_name);
    let principal = name.map_or(Principal::Anonymous, |name| Principal::Certificate(name.into()));
    Ok((Stream::Tls(Box::new(stream)), principal))
}

fn parse_advertised(name: &str, advertised: &str) -> Result<(String, u16), BindError> {
    let parsed = advertised.rsplit_once(':').and_then(|(host, port)| {
        let host = host.trim_start_matches('[').trim_end_matches(']');
        Some((host.to_owned(), port.parse().ok()?)).filter(|(host, _)| !host.is_empty())
    });
    parsed.ok_or_else(|| BindError::Advertised { name: name.to_owned(), advertised: advertised.to_owned() })
}
