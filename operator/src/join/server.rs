//! The accepting side: a listener whose certificate depends on the cluster that is asked for, and questions that it hands on.
//! It decides nothing about tokens. A cluster without an open grant has no door, and the handshake fails.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::RwLock;
use rustls::ServerConfig;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls_pki_types::pem::PemObject as _;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::ALPN;
use super::wire::{Answer, Refusal, Request, read, write};

/// The certificates that are shown, by name.
#[derive(Clone, Default)]
pub struct Doors(Arc<RwLock<HashMap<String, Arc<CertifiedKey>>>>);

/// A question, and where its answer goes.
#[derive(Debug)]
pub struct Asked {
    pub request: Request,
    pub answer: oneshot::Sender<Answer>,
}

impl Doors {
    /// Opens the door `name` with this certificate; its chain ends with the authority itself, so that the joining side can
    /// compare it with the fingerprint that it was given.
    pub fn open(&self, name: &str, chain_pem: &str, key_pem: &str) -> Result<(), String> {
        let chain: Vec<CertificateDer<'static>> = CertificateDer::pem_slice_iter(chain_pem.as_bytes())
            .collect::<Result<_, _>>()
            .map_err(|error| format!("certificate: {error}"))?;
        let key =
            PrivateKeyDer::from_pem_slice(key_pem.as_bytes()).map_err(|error| format!("key: {error}"))?;
        let provider = rustls::crypto::ring::default_provider();
        let certified =
            CertifiedKey::from_der(chain, key, &provider).map_err(|error| format!("certificate: {error}"))?;
        self.0.write().insert(name.to_owned(), Arc::new(certified));
        Ok(())
    }

    pub fn close(&self, name: &str) {
        self.0.write().remove(name);
    }
}

impl fmt::Debug for Doors {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.debug_set().entries(self.0.read().keys()).finish()
    }
}

impl ResolvesServerCert for Doors {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.0.read().get(hello.server_name()?).cloned()
    }
}

/// Serves until `stop`. Questions go to `asked`, whose receiver answers them one by one.
pub async fn serve(listener: TcpListener, doors: Doors, asked: mpsc::Sender<Asked>, stop: CancellationToken) {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .expect("ring speaks TLS 1.3")
        .with_no_client_auth()
        .with_cert_resolver(Arc::new(doors));
    config.alpn_protocols = vec![ALPN.to_vec()];
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let room = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let accepted = tokio::select! {
            () = stop.cancelled() => return,
            accepted = listener.accept() => accepted,
        };
        let (stream, address) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                // Out of descriptors, perhaps: it is tried again, but not at once.
                warn!("join: a connection was not accepted: {error}");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        // More at a time than this is no region that joins; it may ask again.
        let Ok(permit) = room.clone().try_acquire_owned() else { continue };
        let (acceptor, asked) = (acceptor.clone(), asked.clone());
        tokio::spawn(async move {
            let _permit = permit;
            match timeout(CONVERSATION, converse(stream, acceptor, asked)).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => info!(%address, "join: {error}"),
                Err(_) => info!(%address, "join: no question within {} s", CONVERSATION.as_secs()),
            }
        });
    }
}

async fn converse(
    stream: TcpStream,
    acceptor: TlsAcceptor,
    asked: mpsc::Sender<Asked>,
) -> std::io::Result<()> {
    let mut stream = acceptor.accept(stream).await?;
    let answer = match read::<Request>(&mut stream).await {
        Ok(request) => {
            let (answer, answered) = oneshot::channel();
            // A queue that is full, and an operator that ends: asked again.
            match asked.try_send(Asked { request, answer }) {
                Ok(()) => answered.await.unwrap_or_else(|_| not_ready()),
                Err(_) => not_ready(),
            }
        }
        Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => return Err(error),
        Err(error) => Answer::Refused { reason: Refusal::Malformed, message: error.to_string() },
    };
    write(&mut stream, &answer).await?;
    tokio::io::AsyncWriteExt::shutdown(&mut stream).await
}

fn not_ready() -> Answer {
    Answer::Refused { reason: Refusal::NotReady, message: "the operator is busy; ask again".to_owned() }
}

const CONNECTIONS_MAX: usize = 64;
const CONVERSATION: Duration = Duration::from_secs(20);
