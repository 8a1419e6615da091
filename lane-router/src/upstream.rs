//! Connections to the broker's internal listener: mutual TLS, one for each client connection.

use std::sync::Arc;
use std::time::Duration;

use chassis::tls::ClientTls;
use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

/// Where the broker is and how it is reached.
#[derive(Clone)]
pub struct Upstream {
    address: String,
    server_name: ServerName<'static>,
    tls: Arc<ClientTls>,
}

/// Why there is no connection to the broker.
#[derive(Debug, thiserror::Error)]
pub enum UpstreamError {
    #[error("broker {address}: {error}")]
    Connect { address: String, error: std::io::Error },
    #[error("broker {0} did not answer in time")]
    Late(String),
}

const CONNECT_MAX: Duration = Duration::from_secs(10);

impl Upstream {
    /// `address` is HOST:PORT; `server_name` replaces its host in the check of the certificate.
    pub fn new(address: &str, server_name: Option<&str>, tls: Arc<ClientTls>) -> Option<Upstream> {
        let (host, _) = address.rsplit_once(':')?;
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let server_name = ServerName::try_from(server_name.unwrap_or(host).to_owned()).ok()?;
        Some(Upstream { address: address.to_owned(), server_name, tls })
    }

    pub async fn connect(&self) -> Result<TlsStream<TcpStream>, UpstreamError> {
        let connect = async {
            let stream = TcpStream::connect(&self.address).await?;
            stream.set_nodelay(true)?;
            TlsConnector::from(self.tls.current()).connect(self.server_name.clone(), stream).await
        };
        match tokio::time::timeout(CONNECT_MAX, connect).await {
            Ok(connected) => {
                connected.map_err(|error| UpstreamError::Connect { address: self.address.clone(), error })
            }
            Err(_) => Err(UpstreamError::Late(self.address.clone())),
        }
    }
}
