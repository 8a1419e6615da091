//! Certificates that end while a link stands: real clock, real TLS, real UDP.

#![allow(clippy::unwrap_used)]

mod regions;

use std::path::{Path, PathBuf};
use std::time::Duration;

use broker::config::Storage;
use chassis::certs::CertificateDir;
use chassis::tls::TlsFiles;
use kafka::private::LinkState;
use rcgen::{CertificateParams, DnType, ExtendedKeyUsagePurpose, Issuer, KeyPair, KeyUsagePurpose};
use regions::{Region, eventually, numbered, stop};
use rustls_pki_types::pem::PemObject as _;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use time::OffsetDateTime;

/// Certificates of a mirror, by the authority of all regions of a test.
struct Issued {
    authority: PathBuf,
    path: PathBuf,
}

impl Issued {
    fn new(base: &Path, name: &str) -> Issued {
        let authority = base.join("certs");
        CertificateDir::open(&authority).unwrap();
        Issued { authority, path: base.join(name) }
    }

    fn files(&self) -> TlsFiles {
        let ca = Some(self.authority.join("ca.crt"));
        TlsFiles { cert: self.path.clone(), key: self.path.clone(), ca }
    }

    /// Replaces the certificate by one that is valid for so long from now on.
    fn renew(&self, life: Duration) {
        let pem = std::fs::read(self.authority.join("ca.pem")).unwrap();
        let key = PrivateKeyDer::from_pem_slice(&pem).unwrap();
        let certificate = CertificateDer::from_pem_slice(&pem).unwrap();
        let issuer = Issuer::from_ca_cert_der(&certificate, KeyPair::try_from(&key).unwrap()).unwrap();
        let names = ["sealane-mirror".to_owned(), "127.0.0.1".to_owned()];
        let mut params = CertificateParams::new(names).unwrap();
        params.distinguished_name.push(DnType::CommonName, "sealane-mirror");
        params.use_authority_key_identifier_extension = true;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        params.not_before = OffsetDateTime::now_utc() - Duration::from_secs(60);
        params.not_after = OffsetDateTime::now_utc() + life;
        let key = KeyPair::generate().unwrap();
        let leaf = params.signed_by(&key, &issuer).unwrap();
        let fresh = self.path.with_extension("new");
        std::fs::write(&fresh, format!("{}{}", leaf.pem(), key.serialize_pem())).unwrap();
        std::fs::rename(&fresh, &self.path).unwrap();
    }
}

const LONG: Duration = Duration::from_secs(3600);

/// Two regions whose link stands on a certificate of west's that ends soon.
async fn linked_for_a_while(base: &Path, issued: &Issued) -> (Region, Region) {
    let mut east = Region::new(base, "east", Storage::Memory);
    let mut west = Region::new(base, "west", Storage::Memory);
    east.start_broker().await;
    west.start_broker().await;
    east.client().await.create("t", 1, &[]).await;
    east.start_mirror(vec![east.link_to(&west)]).await;
    let mut config = west.mirror_config(vec![west.link_to(&east)]);
    config.link_tls = Some(issued.files());
    // A machine may be too slow for the first life.
    for life in [10, 30, 90] {
        issued.renew(Duration::from_secs(life));
        west.start_mirror_as(config.clone()).await;
        let up = async {
            while west.connections("east") == 0 {
                tokio::time::sleep(Duration::from_millis(20)).await
            }
        };
        if tokio::time::timeout(Duration::from_secs(life), up).await.is_ok() {
            return (east, west);
        }
        west.stop_mirror().await;
    }
    panic!("the link does not come up: {:?}", east.link("west"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_link_ends_with_the_peers_certificate_and_comes_back_with_a_new_one() {
    let base = tempfile::tempdir().unwrap();
    let issued = Issued::new(base.path(), "west-link.pem");
    let (east, west) = linked_for_a_while(base.path(), &issued).await;
    let (e, w) = (east.client().await, west.client().await);
    e.produce_all("t", 0, numbered("e", 0..5)).await;
    w.wait_for("t", 0, 5).await;
    let ended = eventually(async || {
        let (state, reason, _) = east.link("west");
        state == LinkState::Connecting && reason.contains("certificate")
    });
    assert!(ended.await, "{:?}", east.link("west"));
    let before = east.connections("west");
    e.produce_all("t", 0, numbered("e", 5..10)).await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(w.values("t", 0).await.len(), 5, "a peer whose certificate has ended was served");
    assert_eq!(east.connections("west"), before);

    issued.renew(LONG);
    assert_eq!(w.wait_for("t", 0, 10).await, numbered("e", 0..10));
    assert!(east.connections("west") > before);
    stop([east, west]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_that_was_renewed_in_time_costs_one_new_connection() {
    let base = tempfile::tempdir().unwrap();
    let issued = Issued::new(base.path(), "west-link.pem");
    let (east, west) = linked_for_a_while(base.path(), &issued).await;
    // The connection goes by the certificate that it began with.
    let before = east.connections("west");
    issued.renew(LONG);
    let (e, w) = (east.client().await, west.client().await);
    let mut written = 0;
    let again = eventually(async || {
        e.produce("t", 0, &format!("e{written}")).await;
        written += 1;
        east.connections("west") > before
    });
    assert!(again.await, "{:?}", east.link("west"));
    e.produce("t", 0, &format!("e{written}")).await;
    assert_eq!(w.wait_for("t", 0, written + 1).await, numbered("e", 0..written + 1));
    let active = eventually(async || east.link("west").0 == LinkState::Active);
    assert!(active.await, "{:?}", east.link("west"));
    stop([east, west]).await;
}
