//! Connecting to a control service, with errors that name the address and what to do.

use std::path::Path;
use std::time::Duration;

use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};

use crate::{Client, PeerClient};

/// PEM files of a client that shows who it is.
#[derive(Clone, Debug)]
pub struct TlsPaths<'a> {
    pub ca: &'a Path,
    pub cert: &'a Path,
    pub key: &'a Path,
}

/// The same in memory.
#[derive(Clone, Debug)]
pub struct TlsPem<'a> {
    pub ca: &'a [u8],
    pub cert: &'a [u8],
    pub key: &'a [u8],
}

/// Why no connection was made.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    #[error("{0:?} is no HOST:PORT of a control service")]
    Address(String),
    #[error("{path}: cannot be read: {source}")]
    File { path: String, source: std::io::Error },
    #[error("no control service answers at {address}: {reason}")]
    Refused { address: String, reason: String },
}

/// Connects to `address` (HOST:PORT): plain without `tls`, with mutual TLS else.
pub async fn connect(address: &str, tls: Option<TlsPaths<'_>>) -> Result<Client, ConnectError> {
    let endpoint = endpoint(address, tls)?;
    let channel: Channel = endpoint.connect().await.map_err(|error| refused(address, &error))?;
    Ok(Client::new(channel))
}

/// As [`connect`], by certificates that are in no file.
pub async fn connect_pem(address: &str, tls: TlsPem<'_>) -> Result<Client, ConnectError> {
    let endpoint = secured(plain(address, "https")?, address, tls)?;
    let channel: Channel = endpoint.connect().await.map_err(|error| refused(address, &error))?;
    Ok(Client::new(channel))
}

/// A client of another broker at its control `address`; it connects when it is used, and again when that
/// ended. `message_bytes_max` bounds an answer.
pub fn peer(
    address: &str,
    tls: Option<TlsPaths<'_>>,
    message_bytes_max: usize,
) -> Result<PeerClient, ConnectError> {
    let channel = endpoint(address, tls)?.connect_lazy();
    Ok(PeerClient::new(channel).max_decoding_message_size(message_bytes_max))
}

fn endpoint(address: &str, tls: Option<TlsPaths<'_>>) -> Result<Endpoint, ConnectError> {
    match tls {
        None => plain(address, "http"),
        Some(paths) => {
            let (ca, cert, key) = (read(paths.ca)?, read(paths.cert)?, read(paths.key)?);
            secured(plain(address, "https")?, address, TlsPem { ca: &ca, cert: &cert, key: &key })
        }
    }
}

fn plain(address: &str, scheme: &str) -> Result<Endpoint, ConnectError> {
    let endpoint = Endpoint::from_shared(format!("{scheme}://{address}"))
        .map_err(|_| ConnectError::Address(address.to_owned()))?
        .connect_timeout(CONNECT_TIMEOUT)
        // A router's session may be silent for long; a dead peer must still be noticed.
        .http2_keep_alive_interval(Duration::from_secs(10))
        .keep_alive_timeout(Duration::from_secs(10))
        .keep_alive_while_idle(true);
    Ok(endpoint)
}

fn secured(endpoint: Endpoint, address: &str, tls: TlsPem<'_>) -> Result<Endpoint, ConnectError> {
    let config = ClientTlsConfig::new()
        .ca_certificate(Certificate::from_pem(tls.ca))
        .identity(Identity::from_pem(tls.cert, tls.key))
        .domain_name(SERVER_NAME);
    endpoint.tls_config(config).map_err(|error| refused(address, &error))
}

fn read(path: &Path) -> Result<Vec<u8>, ConnectError> {
    std::fs::read(path).map_err(|source| ConnectError::File { path: path.display().to_string(), source })
}

fn refused(address: &str, error: &dyn std::error::Error) -> ConnectError {
    // The innermost cause is the one that says something ("Connection refused").
    let mut cause = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    ConnectError::Refused { address: address.to_owned(), reason: cause.to_string() }
}

/// Every broker's own certificate carries this name beside its host names.
const SERVER_NAME: &str = "sealane-broker";
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
