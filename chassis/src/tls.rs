//! TLS by rustls on ring: server and client settings from PEM files, reloaded without a restart.
//!
//! Owns reading the files, swapping a whole configuration at once, and naming the peer of a
//! connection. A file that cannot be read or does not fit the others leaves the old configuration
//! in use. A configuration is swapped whole, sessions included, so no resumed session outlives the
//! trust it was made under.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, RwLock};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::ClientCertVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use tracing::{info, warn};
use x509_parser::prelude::{FromDer, GeneralName, ParsedExtension, X509Certificate};

use crate::service::ServiceHandle;

crate::config! {
    /// Where a service finds its certificate, its key and whom it trusts.
    pub struct TlsFiles {
        /// PEM file with the certificate chain, own certificate first.
        pub cert: PathBuf,
        /// PEM file with the private key (PKCS#8, PKCS#1 or SEC1); may be the same file as `cert`.
        pub key: PathBuf,
        /// PEM file with the certificates that sign trusted peers. Needed to check client
        /// certificates and to connect to other services.
        pub ca: Option<PathBuf>,
    }
}

/// Whether a server asks for client certificates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ClientAuth {
    #[default]
    None,
    /// Asked for and checked if given.
    Optional,
    Required,
}

/// A configuration that follows its files. Cheap to share; take [`Self::current`] per connection.
pub struct Reloading<C> {
    current: RwLock<Arc<C>>,
    seen: Mutex<Vec<Vec<u8>>>,
    paths: Vec<PathBuf>,
    build: Box<dyn Fn() -> Result<C, TlsError> + Send + Sync>,
}

pub type ServerTls = Reloading<ServerConfig>;
pub type ClientTls = Reloading<ClientConfig>;
/// Authorities of one peer among several, each of which a handshake has let in.
pub type Authorities = Reloading<Arc<dyn ClientCertVerifier>>;

/// Why TLS cannot be set up; names the file.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("{path}: cannot be read: {source}")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("`tls.cert` and `tls.key` are not set: name the files of the certificate and its key")]
    Unset,
    #[error("{path}: holds no {what} in PEM form")]
    Missing { path: PathBuf, what: &'static str },
    #[error("{path}: {reason}")]
    Invalid { path: PathBuf, reason: String },
    #[error("client certificates cannot be checked: `ca` is not set")]
    NoCa,
}

/// Who a peer's certificate says it is; the handshake has checked the chain.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PeerIdentity {
    pub common_name: Option<String>,
    /// DNS names and URIs of the subject alternative name.
    pub alternative_names: Vec<String>,
}

impl ServerTls {
    /// `alpn` is empty for Kafka, `[b"h2"]` for gRPC, the link protocol's name for QUIC.
    pub fn server(files: &TlsFiles, auth: ClientAuth, alpn: &[&[u8]]) -> Result<Arc<ServerTls>, TlsError> {
        if auth != ClientAuth::None && files.ca.is_none() {
            return Err(TlsError::NoCa);
        }
        let alpn: Vec<Vec<u8>> = alpn.iter().map(|name| name.to_vec()).collect();
        let paths = files.paths();
        let files = files.clone();
        Reloading::new(paths, move || server_config(&files, auth, &alpn))
    }
}

impl ClientTls {
    /// Trusts `files.ca` and shows `files.cert` to servers that ask.
    pub fn client(files: &TlsFiles, alpn: &[&[u8]]) -> Result<Arc<ClientTls>, TlsError> {
        let alpn: Vec<Vec<u8>> = alpn.iter().map(|name| name.to_vec()).collect();
        let paths = files.paths();
        let files = files.clone();
        Reloading::new(paths, move || {
            let ca = files.ca.as_ref().ok_or(TlsError::NoCa)?;
            client_config(ca, Some((&files.cert, &files.key)), &alpn)
        })
    }

    /// From PEM in memory, which nothing changes: trusts `ca` and shows `identity` (chain, key) to
    /// servers that ask.
    pub fn of_pem(ca: &[u8], identity: Option<(&[u8], &[u8])>) -> Result<Arc<ClientTls>, TlsError> {
        let place = Path::new("(in memory)");
        let ca = chain_in(place, ca)?;
        let identity = match identity {
            Some((cert, key)) => Some((chain_in(place, cert)?, private_key_in(place, key)?)),
            None => None,
        };
        Reloading::new(Vec::new(), move || {
            let builder = ClientConfig::builder_with_provider(provider())
                .with_safe_default_protocol_versions()
                .expect("ring supports the default versions")
                .with_root_certificates(roots_of(place, ca.clone())?);
            match &identity {
                None => Ok(builder.with_no_client_auth()),
                Some((chain, key)) => builder
                    .with_client_auth_cert(chain.clone(), key.clone_key())
                    .map_err(|error| invalid(place, error)),
            }
        })
    }

    /// Trusts `ca` and shows no certificate.
    pub fn anonymous(ca: &Path, alpn: &[&[u8]]) -> Result<Arc<ClientTls>, TlsError> {
        let alpn: Vec<Vec<u8>> = alpn.iter().map(|name| name.to_vec()).collect();
        let ca = ca.to_owned();
        Reloading::new(vec![ca.clone()], move || client_config(&ca, None, &alpn))
    }
}

impl Authorities {
    /// Those of a PEM file.
    pub fn of(ca: &Path) -> Result<Arc<Authorities>, TlsError> {
        let ca = ca.to_owned();
        Reloading::new(vec![ca.clone()], move || {
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots(&ca)?), provider());
            let verifier: Arc<dyn ClientCertVerifier> =
                verifier.build().map_err(|error| invalid(&ca, error))?;
            Ok(verifier)
        })
    }

    /// Whether one of these has signed a peer's chain, its own certificate first; else why not.
    pub fn vouch(&self, chain: &[CertificateDer<'_>]) -> Result<(), String> {
        let Some((own, others)) = chain.split_first() else {
            return Err("no certificate was shown".to_owned());
        };
        let judged = self.current().verify_client_cert(own, others, UnixTime::now());
        judged.map(drop).map_err(|error| error.to_string())
    }
}

impl<C: Send + Sync + 'static> Reloading<C> {
    fn new(
        paths: Vec<PathBuf>,
        build: impl Fn() -> Result<C, TlsError> + Send + Sync + 'static,
    ) -> Result<Arc<Reloading<C>>, TlsError> {
        let seen = read_all(&paths)?;
        let current = build()?;
        Ok(Arc::new(Reloading {
            current: RwLock::new(Arc::new(current)),
            seen: Mutex::new(seen),
            paths,
            build: Box::new(build),
        }))
    }

    pub fn current(&self) -> Arc<C> {
        self.current.read().clone()
    }

    /// Takes the files as they are now; true if they had changed. An error leaves all as it was.
    pub fn reload(&self) -> Result<bool, TlsError> {
        let now = read_all(&self.paths)?;
        let mut seen = self.seen.lock();
        if *seen == now {
            return Ok(false);
        }
        let fresh = (self.build)()?;
        *self.current.write() = Arc::new(fresh);
        *seen = now;
        Ok(true)
    }

    /// Looks at the files every [`RELOAD_INTERVAL`] for the life of the service, calling `changed`
    /// after each swap.
    pub fn follow(
        self: &Arc<Self>,
        service: &ServiceHandle,
        changed: impl Fn(&Arc<C>) + Send + Sync + 'static,
    ) {
        let tls = self.clone();
        let stop = service.stopping().clone();
        service.spawn("TLS reload", async move {
            let mut complained = false;
            while stop.run_until_cancelled(tokio::time::sleep(RELOAD_INTERVAL)).await.is_some() {
                match tls.reload() {
                    Ok(true) => {
                        complained = false;
                        info!("TLS files reloaded: {}", tls.paths[0].display());
                        changed(&tls.current());
                    }
                    Ok(false) => complained = false,
                    Err(error) if !complained => {
                        complained = true;
                        warn!("TLS files not reloaded, the former ones stay in use: {error}");
                    }
                    Err(_) => {}
                }
            }
            Ok::<(), TlsError>(())
        });
    }
}

impl TlsFiles {
    fn paths(&self) -> Vec<PathBuf> {
        let mut paths = vec![self.cert.clone(), self.key.clone()];
        paths.extend(self.ca.clone());
        paths
    }
}

impl PeerIdentity {
    /// Every name in it.
    pub fn into_names(self) -> Vec<String> {
        self.common_name.into_iter().chain(self.alternative_names).collect()
    }

    /// Of the first certificate of a peer's chain (`peer_certificates()` of a rustls connection,
    /// `peer_identity()` of a quinn one).
    pub fn of(certificate: &CertificateDer<'_>) -> Option<PeerIdentity> {
        let (_, certificate) = X509Certificate::from_der(certificate).ok()?;
        let common_name = certificate.subject().iter_common_name().next();
        let names =
            certificate.extensions().iter().filter_map(|extension| match extension.parsed_extension() {
                ParsedExtension::SubjectAlternativeName(names) => Some(&names.general_names),
                _ => None,
            });
        let text = |name: &GeneralName| match name {
            GeneralName::DNSName(name) | GeneralName::URI(name) => Some((*name).to_owned()),
            _ => None,
        };
        Some(PeerIdentity {
            common_name: common_name.and_then(|name| name.as_str().ok()).map(str::to_owned),
            alternative_names: names.flatten().filter_map(text).collect(),
        })
    }
}

/// Client settings from files read once; `identity` is (certificate chain, key).
pub fn client_config(
    ca: &Path,
    identity: Option<(&Path, &Path)>,
    alpn: &[Vec<u8>],
) -> Result<ClientConfig, TlsError> {
    let builder = ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .expect("ring supports the default versions")
        .with_root_certificates(roots(ca)?);
    let mut config = match identity {
        None => builder.with_no_client_auth(),
        Some((cert, key)) => builder
            .with_client_auth_cert(chain(cert)?, private_key(key)?)
            .map_err(|error| invalid(cert, error))?,
    };
    config.alpn_protocols = alpn.to_vec();
    Ok(config)
}

fn server_config(files: &TlsFiles, auth: ClientAuth, alpn: &[Vec<u8>]) -> Result<ServerConfig, TlsError> {
    let builder = ServerConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .expect("ring supports the default versions");
    let builder = match (auth, &files.ca) {
        (ClientAuth::None, _) => builder.with_no_client_auth(),
        (_, None) => return Err(TlsError::NoCa),
        (_, Some(ca)) => {
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots(ca)?), provider());
            let verifier =
                if auth == ClientAuth::Optional { verifier.allow_unauthenticated() } else { verifier };
            builder.with_client_cert_verifier(verifier.build().map_err(|error| invalid(ca, error))?)
        }
    };
    let mut config = builder
        .with_single_cert(chain(&files.cert)?, private_key(&files.key)?)
        .map_err(|error| invalid(&files.cert, error))?;
    config.alpn_protocols = alpn.to_vec();
    if auth != ClientAuth::None {
        // A resumed session skips the check of the client's chain.
        config.session_storage = Arc::new(rustls::server::NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
    }
    Ok(config)
}

fn provider() -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

fn roots(path: &Path) -> Result<RootCertStore, TlsError> {
    roots_of(path, chain(path)?)
}

fn roots_of(path: &Path, certificates: Vec<CertificateDer<'static>>) -> Result<RootCertStore, TlsError> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates {
        roots.add(certificate).map_err(|error| invalid(path, error))?;
    }
    Ok(roots)
}

fn chain(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    chain_in(path, &read(path)?)
}

fn chain_in(path: &Path, text: &[u8]) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(text).collect();
    let chain = chain.map_err(|error| invalid(path, error))?;
    if chain.is_empty() {
        return Err(TlsError::Missing { path: path.to_owned(), what: "certificate" });
    }
    Ok(chain)
}

fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    private_key_in(path, &read(path)?)
}

fn private_key_in(path: &Path, text: &[u8]) -> Result<PrivateKeyDer<'static>, TlsError> {
    match PrivateKeyDer::from_pem_slice(text) {
        Ok(key) => Ok(key),
        Err(rustls::pki_types::pem::Error::NoItemsFound) => {
            Err(TlsError::Missing { path: path.to_owned(), what: "private key" })
        }
        Err(error) => Err(invalid(path, error)),
    }
}

fn read_all(paths: &[PathBuf]) -> Result<Vec<Vec<u8>>, TlsError> {
    paths.iter().map(|path| read(path)).collect()
}

fn read(path: &Path) -> Result<Vec<u8>, TlsError> {
    if path.as_os_str().is_empty() {
        return Err(TlsError::Unset);
    }
    std::fs::read(path).map_err(|source| TlsError::Read { path: path.to_owned(), source })
}

fn invalid(path: &Path, reason: impl std::fmt::Display) -> TlsError {
    TlsError::Invalid { path: path.to_owned(), reason: reason.to_string() }
}

/// How often certificate files are looked at.
pub const RELOAD_INTERVAL: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use std::io;

    use rustls::pki_types::ServerName;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio_rustls::{TlsAcceptor, TlsConnector};

    use super::*;
    use crate::certs::CertificateDir;

    async fn handshake(
        server: Arc<ServerConfig>,
        client: Arc<ClientConfig>,
    ) -> io::Result<Option<PeerIdentity>> {
        let (near, far) = tokio::io::duplex(64 * 1024);
        let client = tokio::spawn(async move {
            let name = ServerName::try_from("localhost").expect("a name");
            let mut stream = TlsConnector::from(client).connect(name, near).await?;
            let mut answer = [0; 2];
            stream.read_exact(&mut answer).await
        });
        let mut stream = TlsAcceptor::from(server).accept(far).await?;
        let peer = stream.get_ref().1.peer_certificates().and_then(|chain| PeerIdentity::of(&chain[0]));
        stream.write_all(b"ok").await?;
        client.await.expect("no panic")?;
        Ok(peer)
    }

    #[tokio::test]
    async fn a_required_client_certificate_names_its_owner() {
        let dir = tempfile::tempdir().expect("a directory");
        let certificates = CertificateDir::open(dir.path()).expect("made");
        let broker = certificates.leaf("sealane-broker", &["localhost"]).expect("made");
        let mirror = certificates.leaf("sealane-mirror", &[]).expect("made");
        let server = ServerTls::server(&broker, ClientAuth::Required, &[]).expect("files fit");
        let client = ClientTls::client(&mirror, &[]).expect("files fit");
        let peer = handshake(server.current(), client.current()).await.expect("trusted").expect("shown");
        assert_eq!(peer.common_name.as_deref(), Some("sealane-mirror"));
        assert_eq!(peer.alternative_names, ["sealane-mirror"]);

        let anonymous = client_config(broker.ca.as_deref().expect("ca"), None, &[]).expect("files fit");
        assert!(handshake(server.current(), Arc::new(anonymous)).await.is_err());
    }

    #[tokio::test]
    async fn a_foreign_certificate_is_refused_also_where_it_is_optional() {
        let (here, there) =
            (tempfile::tempdir().expect("a directory"), tempfile::tempdir().expect("a directory"));
        let broker =
            CertificateDir::open(here.path()).and_then(|dir| dir.leaf("sealane-broker", &["localhost"]));
        let mut foreign =
            CertificateDir::open(there.path()).and_then(|dir| dir.leaf("sealane-mirror", &[])).expect("made");
        let broker = broker.expect("made");
        foreign.ca = broker.ca.clone();
        let client = ClientTls::client(&foreign, &[]).expect("files fit");
        let server = ServerTls::server(&broker, ClientAuth::Optional, &[]).expect("files fit");
        assert!(handshake(server.current(), client.current()).await.is_err());
        let anonymous = client_config(broker.ca.as_deref().expect("ca"), None, &[]).expect("files fit");
        assert_eq!(handshake(server.current(), Arc::new(anonymous)).await.expect("allowed"), None);
    }

    #[tokio::test]
    async fn changed_files_are_taken_and_broken_ones_leave_the_old_in_use() {
        let (one, two) =
            (tempfile::tempdir().expect("a directory"), tempfile::tempdir().expect("a directory"));
        let first = CertificateDir::open(one.path())
            .and_then(|dir| dir.leaf("broker", &["localhost"]))
            .expect("made");
        let second = CertificateDir::open(two.path())
            .and_then(|dir| dir.leaf("broker", &["localhost"]))
            .expect("made");
        let server = ServerTls::server(&first, ClientAuth::None, &[]).expect("files fit");
        let trusting = |files: &TlsFiles| {
            Arc::new(client_config(files.ca.as_deref().expect("ca"), None, &[]).expect("files fit"))
        };
        let (old, new) = (trusting(&first), trusting(&second));
        assert!(!server.reload().expect("unchanged"));

        std::fs::write(&first.cert, "garbage").expect("written");
        assert!(server.reload().is_err());
        assert!(handshake(server.current(), old.clone()).await.is_ok());

        std::fs::copy(&second.cert, &first.cert).expect("copied");
        assert!(server.reload().expect("fits"));
        assert!(handshake(server.current(), old).await.is_err());
        assert!(handshake(server.current(), new).await.is_ok());
    }
}
