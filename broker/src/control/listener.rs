//! Connections of the control service: plain on loopback, mutual TLS anywhere else.
//!
//! Owns accepting and the handshake; hands gRPC a stream of connections that know who the peer is.
//! Handshakes run beside each other, so a silent client holds nobody up.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use chassis::ServiceHandle;
use chassis::tls::{PeerIdentity, ServerTls};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc};
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::server::Connected;
use tracing::debug;

/// A connection that gRPC can serve.
pub enum Connection {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

/// Who is calling; in the extensions of every request.
#[derive(Clone, Debug)]
pub enum Caller {
    /// On this machine, over a plain connection.
    Local,
    /// Proved by a certificate.
    Peer(PeerIdentity),
}

impl Caller {
    pub fn common_name(&self) -> Option<&str> {
        match self {
            Caller::Local => None,
            Caller::Peer(identity) => identity.common_name.as_deref(),
        }
    }
}

/// The task that accepts until `stop`, and what it accepts.
pub fn accept(
    service: &ServiceHandle,
    listener: TcpListener,
    tls: Option<Arc<ServerTls>>,
    stop: CancellationToken,
) -> (impl Future<Output = io::Result<()>> + Send + 'static, mpsc::Receiver<io::Result<Connection>>) {
    let (connections, accepted) = mpsc::channel(ACCEPTED_MAX);
    let service_of_handshakes = service.clone();
    let accepting = async move {
        let handshakes = Arc::new(Semaphore::new(HANDSHAKES_MAX));
        while let Some(result) = stop.run_until_cancelled(listener.accept()).await {
            let Ok((stream, from)) = result else {
                // Out of file descriptors: wait for some to come free.
                sleep(Duration::from_millis(100)).await;
                continue;
            };
            let Ok(permit) = handshakes.clone().try_acquire_owned() else { continue };
            let (connections, tls) = (connections.clone(), tls.clone());
            service_of_handshakes.spawn_child(async move {
                let _permit = permit;
                match timeout(HANDSHAKE_TIMEOUT, secure(stream, tls)).await {
                    Ok(Ok(connection)) => drop(connections.send(Ok(connection)).await),
                    Ok(Err(error)) => debug!("control connection from {from}: {error}"),
                    Err(_) => debug!("control connection from {from}: the handshake took too long"),
                }
            });
        }
        Ok(())
    };
    (accepting, accepted)
}

async fn secure(stream: TcpStream, tls: Option<Arc<ServerTls>>) -> io::Result<Connection> {
    stream.set_nodelay(true)?;
    match tls {
        None => Ok(Connection::Plain(stream)),
        Some(tls) => {
            let stream = TlsAcceptor::from(tls.current()).accept(stream).await?;
            Ok(Connection::Tls(Box::new(stream)))
        }
    }
}

impl Connected for Connection {
    type ConnectInfo = Caller;

    fn connect_info(&self) -> Caller {
        match self {
            Connection::Plain(_) => Caller::Local,
            Connection::Tls(stream) => {
                let chain = stream.get_ref().1.peer_certificates();
                let identity = chain.and_then(|chain| PeerIdentity::of(chain.first()?));
                Caller::Peer(identity.unwrap_or_default())
            }
        }
    }
}

impl AsyncRead for Connection {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Connection::Plain(stream) => Pin::new(stream).poll_read(cx, buf),
            Connection::Tls(stream) => Pin::new(stream).poll_read(cx, buf),
        }
    }
}

impl AsyncWrite for Connection {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Connection::Plain(stream) => Pin::new(stream).poll_write(cx, buf),
            Connection::Tls(stream) => Pin::new(stream).poll_write(cx, buf),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Connection::Plain(stream) => Pin::new(stream).poll_flush(cx),
            Connection::Tls(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Connection::Plain(stream) => Pin::new(stream).poll_shutdown(cx),
            Connection::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}

const ACCEPTED_MAX: usize = 16;
const HANDSHAKES_MAX: usize = 256;
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
