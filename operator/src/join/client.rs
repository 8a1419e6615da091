//! The joining side: connects, takes the authority of the fingerprint and no other, asks, and gives the answer.

use std::sync::Arc;
use std::time::Duration;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::CryptoProvider;
use rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};
use rustls_pki_types::{CertificateDer, ServerName, UnixTime};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use super::wire::{Answer, Request, read, write};
use super::{ALPN, Fingerprint};

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    /// Asked again later.
    #[error("{address}: {reason}")]
    Unreachable { address: String, reason: String },
    /// Somebody else answers at that address, or the Secret is of another grant.
    #[error("{address} shows no authority with the fingerprint {}", shown(.wanted))]
    WrongAuthority { address: String, wanted: Vec<Fingerprint> },
    #[error("{0:?} is no name of a door")]
    Name(String),
}

/// Asks the door `name` at `address` (HOST:PORT), which must show one of these authorities.
pub async fn ask(
    address: &str,
    name: &str,
    wanted: &[Fingerprint],
    request: &Request,
) -> Result<Answer, JoinError> {
    let server_name = ServerName::try_from(name.to_owned()).map_err(|_| JoinError::Name(name.to_owned()))?;
    let unreachable = |reason: String| JoinError::Unreachable { address: address.to_owned(), reason };
    let converse = async {
        let stream = TcpStream::connect(address).await?;
        let mut stream =
            TlsConnector::from(Arc::new(config(wanted.to_vec()))).connect(server_name, stream).await?;
        write(&mut stream, request).await?;
        read::<Answer>(&mut stream).await
    };
    match timeout(CONVERSATION, converse).await {
        Err(_) => Err(unreachable(format!("no answer within {} s", CONVERSATION.as_secs()))),
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(error)) if is_other_authority(&error) => {
            Err(JoinError::WrongAuthority { address: address.to_owned(), wanted: wanted.to_vec() })
        }
        Ok(Err(error)) => Err(unreachable(error.to_string())),
    }
}

fn shown(wanted: &[Fingerprint]) -> String {
    wanted.iter().map(ToString::to_string).collect::<Vec<_>>().join(" or ")
}

fn config(wanted: Vec<Fingerprint>) -> ClientConfig {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let verifier = Pinned { wanted, provider: provider.clone() };
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .expect("ring speaks TLS 1.3")
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier))
        .with_no_client_auth();
    config.alpn_protocols = vec![ALPN.to_vec()];
    config.resumption = rustls::client::Resumption::disabled();
    config
}

fn is_other_authority(error: &std::io::Error) -> bool {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
    matches!(inner, Some(rustls::Error::InvalidCertificate(_)))
}

/// Trusts an authority with one of these fingerprints, which the other side sends along; what it signed is checked as usual.
#[derive(Debug)]
struct Pinned {
    wanted: Vec<Fingerprint>,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Pinned {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let unknown = || rustls::Error::InvalidCertificate(rustls::CertificateError::UnknownIssuer);
        let mut known = intermediates.iter().filter(|shown| self.wanted.contains(&Fingerprint::of(shown)));
        let authority = known.next().ok_or_else(unknown)?;
        let mut roots = RootCertStore::empty();
        roots.add(authority.clone().into_owned())?;
        let usual = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), self.provider.clone())
            .build()
            .map_err(|error| rustls::Error::General(error.to_string()))?;
        usual.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let known = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls12_signature(message, certificate, signed, known)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let known = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, certificate, signed, known)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

const CONVERSATION: Duration = Duration::from_secs(20);
