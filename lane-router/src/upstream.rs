//! Connections to the brokers' internal listeners: mutual TLS, one for each client connection.

use std::sync::Arc;
use std::time::Duration;

use chassis::tls::ClientTls;
use kafka_client::Endpoint;
use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::brokers::Brokers;

/// Where the brokers are and how they are reached.
#[derive(Clone)]
pub struct Upstream {
    /// As configured; one that answers is enough.
    bootstrap: Vec<Endpoint>,
    brokers: Arc<Brokers>,
    server_name: Option<String>,
    tls: Arc<ClientTls>,
    /// The only one that is connected to; any, where it is not set.
    broker: Option<i32>,
}

/// Why there is no connection to a broker.
#[derive(Debug, thiserror::Error)]
pub enum UpstreamError {
    #[error("broker {address}: {error}")]
    Connect { address: String, error: std::io::Error },
    #[error("broker {0} did not answer in time")]
    Late(String),
    #[error("broker {0} is not one of this region's that are alive")]
    Gone(i32),
}

const CONNECT_MAX: Duration = Duration::from_secs(10);

impl Upstream {
    /// `addresses` are HOST:PORT with commas between; `server_name` replaces their hosts in the check of
    /// certificates.
    pub fn new(
        addresses: &str,
        server_name: Option<&str>,
        tls: Arc<ClientTls>,
        brokers: Arc<Brokers>,
    ) -> Option<Upstream> {
        let bootstrap = Endpoint::parse_list(addresses).ok().filter(|list| !list.is_empty())?;
        let named = |endpoint: &Endpoint| {
            ServerName::try_from(server_name.unwrap_or(&endpoint.host).to_owned()).is_ok()
        };
        let server_name = server_name.map(str::to_owned);
        bootstrap.iter().all(named).then_some(Upstream { bootstrap, brokers, server_name, tls, broker: None })
    }

    pub fn bootstrap(&self) -> &[Endpoint] {
        &self.bootstrap
    }

    #[cfg(test)]
    pub fn with(&self, brokers: Arc<Brokers>) -> Upstream {
        Upstream { brokers, ..self.clone() }
    }

    /// The way to this broker alone.
    pub fn to(&self, broker: Option<i32>) -> Upstream {
        Upstream { broker, ..self.clone() }
    }

    pub async fn connect(&self) -> Result<TlsStream<TcpStream>, UpstreamError> {
        if let Some(broker) = self.broker {
            let address = self.brokers.address(broker).ok_or(UpstreamError::Gone(broker))?;
            return self.connect_to(&address).await;
        }
        let mut addresses = self.brokers.addresses();
        addresses.extend(self.bootstrap.iter().map(Endpoint::to_string));
        let mut last = None;
        for address in addresses {
            match self.connect_to(&address).await {
                Ok(connected) => return Ok(connected),
                Err(error) => last = Some(error),
            }
        }
        Err(last.unwrap_or(UpstreamError::Gone(-1)))
    }

    async fn connect_to(&self, address: &str) -> Result<TlsStream<TcpStream>, UpstreamError> {
        let failed = |error| UpstreamError::Connect { address: address.to_owned(), error };
        let wrong = |_| failed(std::io::Error::from(std::io::ErrorKind::InvalidInput));
        let endpoint: Endpoint = address.parse().map_err(wrong)?;
        let name = self.server_name.clone().unwrap_or_else(|| endpoint.host.clone());
        let name =
            ServerName::try_from(name).map_err(|error| failed(std::io::Error::other(error.to_string())))?;
        let connect = async {
            let stream = TcpStream::connect((endpoint.host.as_str(), endpoint.port)).await?;
            stream.set_nodelay(true)?;
            TlsConnector::from(self.tls.current()).connect(name, stream).await
        };
        match tokio::time::timeout(CONNECT_MAX, connect).await {
            Ok(connected) => connected.map_err(failed),
            Err(_) => Err(UpstreamError::Late(address.to_owned())),
        }
    }
}
