//! How the operator speaks to brokers: the control service and the Kafka protocol, both by mutual TLS
//! as `sealane-control`, at addresses from EndpointSlices. Connections are kept as long as they are
//! good and the certificates the same.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use chassis::tls::ClientTls;
use kafka_client::{ConnectOptions, Connection, Endpoint, Security};
use parking_lot::Mutex;
use tokio::time::timeout;

use crate::failure::Failure;

/// Certificates of the operator towards one cluster, in PEM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    pub authorities: String,
    pub certificate: String,
    pub key: String,
}

impl Identity {
    fn mark(&self) -> String {
        crate::apply::digest(format!("{}{}", self.authorities, self.certificate).as_bytes())
    }
}

/// Connections, by address and certificate.
#[derive(Default)]
pub struct DataPlane {
    control: Mutex<HashMap<(String, String), control::Client>>,
    kafka: Mutex<HashMap<(String, String), Connection>>,
}

impl DataPlane {
    /// The control service at HOST:PORT.
    pub async fn control(&self, address: &str, identity: &Identity) -> Result<control::Client, Failure> {
        let key = (address.to_owned(), identity.mark());
        if let Some(client) = self.control.lock().get(&key) {
            return Ok(client.clone());
        }
        let pem = control::TlsPem {
            ca: identity.authorities.as_bytes(),
            cert: identity.certificate.as_bytes(),
            key: identity.key.as_bytes(),
        };
        let connecting = control::connect_pem(address, pem);
        let client = timeout(CONNECT, connecting).await.map_err(|_| silent(address))?;
        let client = client.map_err(|error| Failure::DataPlane(error.to_string()))?;
        let mut known = self.control.lock();
        make_room(&mut known);
        known.insert(key, client.clone());
        Ok(client)
    }

    /// A Kafka connection to the first of `addresses` that answers.
    pub async fn kafka(&self, addresses: &[String], identity: &Identity) -> Result<Connection, Failure> {
        let mark = identity.mark();
        let mut reason = "no broker has an address yet".to_owned();
        for address in addresses {
            let key = (address.clone(), mark.clone());
            let known = self.kafka.lock().get(&key).filter(|known| !known.is_closed()).cloned();
            if let Some(connection) = known {
                return Ok(connection);
            }
            match timeout(CONNECT, connect(address, identity)).await {
                Ok(Ok(connection)) => {
                    let mut known = self.kafka.lock();
                    make_room(&mut known);
                    known.insert(key, connection.clone());
                    return Ok(connection);
                }
                Ok(Err(Failure::DataPlane(text))) => reason = text,
                Ok(Err(other)) => return Err(other),
                Err(_) => reason = silent(address).to_string(),
            }
        }
        Err(Failure::DataPlane(reason))
    }

    /// A connection that failed is not used again.
    pub fn forget(&self, address: &str) {
        self.control.lock().retain(|(known, _), _| known != address);
        self.kafka.lock().retain(|(known, _), _| known != address);
    }
}

async fn connect(address: &str, identity: &Identity) -> Result<Connection, Failure> {
    let unreachable = |error: String| Failure::DataPlane(format!("{address}: {error}"));
    let endpoint: Endpoint = address.parse().map_err(|error| unreachable(format!("{error}")))?;
    let tls = ClientTls::of_pem(
        identity.authorities.as_bytes(),
        Some((identity.certificate.as_bytes(), identity.key.as_bytes())),
    )
    .map_err(|error| unreachable(error.to_string()))?;
    let options = ConnectOptions {
        client_id: crate::names::MANAGER.to_owned(),
        security: Security::Tls { config: Arc::clone(&tls), server_name: Some(BROKER.to_owned()) },
        connect_timeout: CONNECT,
        request_timeout: REQUEST,
        ..ConnectOptions::default()
    };
    Connection::connect(&endpoint, &options).await.map_err(|error| unreachable(error.to_string()))
}

fn silent(address: &str) -> Failure {
    Failure::DataPlane(format!("{address} does not answer"))
}

/// Addresses of pods come and go; those of gone ones are not kept for ever.
fn make_room<V>(known: &mut HashMap<(String, String), V>) {
    if known.len() >= CONNECTIONS_MAX {
        known.clear();
    }
}

/// A name that every broker's certificate carries.
const BROKER: &str = "sealane-broker";
const CONNECT: Duration = Duration::from_secs(3);
/// For one call.
pub const REQUEST: Duration = Duration::from_secs(10);
const CONNECTIONS_MAX: usize = 1024;
