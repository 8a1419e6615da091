//! A certificate authority of one's own, made on first start, and the certificates it signs.
//!
//! Every certificate lives with its key in one file (`NAME.pem`, mode 0600), replaced by one rename,
//! so that a crash never leaves a certificate beside a foreign key. `ca.crt` is the part to give to
//! clients. For clusters with certificates of their own nothing here is needed.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::net::IpAddr;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use time::{Duration, OffsetDateTime};
use x509_parser::prelude::{FromDer as _, GeneralName, ParsedExtension, X509Certificate};

use crate::tls::TlsFiles;

/// A directory of certificates with the authority that signs them.
pub struct CertificateDir {
    dir: PathBuf,
    authority: Issuer<'static, KeyPair>,
}

/// Why a certificate could not be made or read; names the file.
#[derive(Debug, thiserror::Error)]
pub enum CertificateError {
    #[error("{path}: {source}")]
    Io { path: PathBuf, source: io::Error },
    #[error("{path}: not a certificate with its key ({reason}); delete it to have a new one made")]
    Invalid { path: PathBuf, reason: String },
}

impl CertificateDir {
    /// Opens the authority in `dir`, making directory and authority if they are not there.
    pub fn open(dir: &Path) -> Result<CertificateDir, CertificateError> {
        fs::create_dir_all(dir).map_err(|source| CertificateError::Io { path: dir.to_owned(), source })?;
        let path = dir.join("ca.pem");
        let existing = read_if_there(&path)?;
        let pem = match existing {
            Some(pem) => pem,
            None => {
                let pem = make_authority(&path)?;
                replace(&path, &pem, 0o600)?;
                pem
            }
        };
        let key = key_pair(&pem).map_err(|reason| invalid(&path, reason))?;
        let certificate = first_certificate(&path, &pem)?;
        // A crash may have come between the two files. One that is right is left: the disk may be full.
        let (public, part) = (dir.join("ca.crt"), certificate_part(&pem));
        if read_if_there(&public)?.as_ref() != Some(&part) {
            replace(&public, &part, 0o644)?;
        }
        let authority = Issuer::from_ca_cert_der(&certificate, key).map_err(|error| invalid(&path, error))?;
        Ok(CertificateDir { dir: dir.to_owned(), authority })
    }

    /// The certificate of `name` (its common name and first DNS name) that is also valid for
    /// `hosts`, as server and as client. Made if it is missing, lacks a host, comes from another
    /// authority, or ends within [`RENEW_BEFORE`].
    pub fn leaf(&self, name: &str, hosts: &[&str]) -> Result<TlsFiles, CertificateError> {
        let path = self.dir.join(format!("{name}.pem"));
        let mut names = vec![name.to_owned()];
        names.extend(hosts.iter().filter(|host| **host != name).map(|host| (*host).to_owned()));
        let usable = match read_if_there(&path)? {
            Some(pem) => self.is_usable(&pem, &names),
            None => false,
        };
        if !usable {
            replace(&path, &self.make_leaf(&path, name, &names)?, 0o600)?;
        }
        Ok(TlsFiles { cert: path.clone(), key: path, ca: Some(self.dir.join("ca.crt")) })
    }

    fn make_leaf(&self, path: &Path, name: &str, names: &[String]) -> Result<String, CertificateError> {
        let make = || -> Result<String, rcgen::Error> {
            let mut params = CertificateParams::new(names.to_vec())?;
            params.distinguished_name.push(DnType::CommonName, name);
            params.use_authority_key_identifier_extension = true;
            params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
            params.extended_key_usages =
                vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
            params.not_before = OffsetDateTime::now_utc() - CLOCK_SKEW;
            params.not_after = OffsetDateTime::now_utc() + LEAF_LIFE;
            let key = KeyPair::generate()?;
            let certificate = params.signed_by(&key, &self.authority)?;
            Ok(format!("{}{}", certificate.pem(), key.serialize_pem()))
        };
        make().map_err(|error| invalid(path, error))
    }

    fn is_usable(&self, pem: &str, names: &[String]) -> bool {
        let Ok(der) = CertificateDer::from_pem_slice(pem.as_bytes()) else { return false };
        let Ok((_, certificate)) = X509Certificate::from_der(&der) else { return false };
        let ends = certificate.validity().not_after.timestamp();
        let fresh = ends > (OffsetDateTime::now_utc() + RENEW_BEFORE).unix_timestamp();
        let Ok(Some(authority)) = read_if_there(&self.dir.join("ca.pem")) else { return false };
        let Ok(authority) = CertificateDer::from_pem_slice(authority.as_bytes()) else { return false };
        let Ok((_, authority)) = X509Certificate::from_der(&authority) else { return false };
        let ours = certificate.verify_signature(Some(authority.public_key())).is_ok();
        let held = alternative_names(&certificate);
        fresh && ours && key_pair(pem).is_ok() && names.iter().all(|name| held.contains(name))
    }
}

fn make_authority(path: &Path) -> Result<String, CertificateError> {
    let make = || -> Result<String, rcgen::Error> {
        let mut params = CertificateParams::default();
        // Distinct per authority, so that two directories are never mistaken for one another.
        let serial = OffsetDateTime::now_utc().unix_timestamp_nanos() / 1000;
        params.distinguished_name.push(DnType::CommonName, format!("Sealane authority {serial:x}"));
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        params.not_before = OffsetDateTime::now_utc() - CLOCK_SKEW;
        params.not_after = OffsetDateTime::now_utc() + AUTHORITY_LIFE;
        let key = KeyPair::generate()?;
        let certificate = params.self_signed(&key)?;
        Ok(format!("{}{}", certificate.pem(), key.serialize_pem()))
    };
    make().map_err(|error| invalid(path, error))
}

fn alternative_names(certificate: &X509Certificate<'_>) -> Vec<String> {
    let mut names = Vec::new();
    for extension in certificate.extensions() {
        let ParsedExtension::SubjectAlternativeName(alternative) = extension.parsed_extension() else {
            continue;
        };
        names.extend(alternative.general_names.iter().filter_map(|name| match name {
            GeneralName::DNSName(name) => Some((*name).to_owned()),
            GeneralName::IPAddress(bytes) => address(bytes).map(|address| address.to_string()),
            _ => None,
        }));
    }
    names
}

fn address(bytes: &[u8]) -> Option<IpAddr> {
    if let Ok(four) = <[u8; 4]>::try_from(bytes) {
        return Some(IpAddr::from(four));
    }
    <[u8; 16]>::try_from(bytes).ok().map(IpAddr::from)
}

fn first_certificate(path: &Path, pem: &str) -> Result<CertificateDer<'static>, CertificateError> {
    CertificateDer::from_pem_slice(pem.as_bytes()).map_err(|error| invalid(path, error))
}

fn key_pair(pem: &str) -> Result<KeyPair, String> {
    let key = PrivateKeyDer::from_pem_slice(pem.as_bytes()).map_err(|error| error.to_string())?;
    KeyPair::try_from(&key).map_err(|error| error.to_string())
}

/// The certificate part of a file that also holds the key.
fn certificate_part(pem: &str) -> String {
    let end = "-----END CERTIFICATE-----";
    let length = pem.find(end).map_or(0, |at| at + end.len());
    format!("{}\n", &pem[..length])
}

fn read_if_there(path: &Path) -> Result<Option<String>, CertificateError> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(CertificateError::Io { path: path.to_owned(), source }),
    }
}

/// Replaces a file by one rename, durably, never readable by others than `mode` says.
fn replace(path: &Path, text: &str, mode: u32) -> Result<(), CertificateError> {
    let write = || -> io::Result<()> {
        let fresh = path.with_extension("new");
        let _ = fs::remove_file(&fresh);
        let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(&fresh)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        fs::rename(&fresh, path)?;
        path.parent().map_or(Ok(()), |dir| File::open(dir)?.sync_all())
    };
    write().map_err(|source| CertificateError::Io { path: path.to_owned(), source })
}

fn invalid(path: &Path, reason: impl std::fmt::Display) -> CertificateError {
    CertificateError::Invalid { path: path.to_owned(), reason: reason.to_string() }
}

/// An existing certificate that ends sooner than this is made anew.
pub const RENEW_BEFORE: Duration = Duration::days(30);
const LEAF_LIFE: Duration = Duration::days(365);
const AUTHORITY_LIFE: Duration = Duration::days(3650);
const CLOCK_SKEW: Duration = Duration::hours(1);

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn the_second_start_finds_the_certificates_of_the_first() {
        let dir = tempfile::tempdir().expect("a directory");
        let leaf = |hosts: &[&str]| {
            let files =
                CertificateDir::open(dir.path()).and_then(|dir| dir.leaf("broker", hosts)).expect("made");
            fs::read(files.cert).expect("there")
        };
        let first = leaf(&["localhost", "127.0.0.1", "::1"]);
        assert_eq!(first, leaf(&["localhost", "127.0.0.1", "::1"]));
        assert_ne!(first, leaf(&["localhost", "10.0.0.7"]), "a new host needs a new certificate");
    }

    #[test]
    fn the_second_start_writes_nothing() {
        let dir = tempfile::tempdir().expect("a directory");
        let open = || CertificateDir::open(dir.path()).and_then(|dir| dir.leaf("broker", &[])).expect("made");
        open();
        // What a full disk refuses is a new file; this refuses it too.
        fs::create_dir(dir.path().join("ca.new")).expect("made");
        fs::create_dir(dir.path().join("broker.new")).expect("made");
        open();
        fs::write(dir.path().join("ca.crt"), "torn").expect("written");
        assert!(CertificateDir::open(dir.path()).is_err(), "the test cannot tell whether a file is written");
    }

    #[test]
    fn keys_are_for_their_owner_only() {
        let dir = tempfile::tempdir().expect("a directory");
        let files = CertificateDir::open(dir.path()).and_then(|dir| dir.leaf("broker", &[])).expect("made");
        for path in [files.key, dir.path().join("ca.pem")] {
            assert_eq!(fs::metadata(&path).expect("there").permissions().mode() & 0o777, 0o600, "{path:?}");
        }
        let public = fs::read_to_string(dir.path().join("ca.crt")).expect("there");
        assert!(!public.contains("PRIVATE"), "{public}");
    }

    #[test]
    fn a_leaf_of_another_authority_is_made_anew() {
        let dir = tempfile::tempdir().expect("a directory");
        let first = CertificateDir::open(dir.path()).and_then(|dir| dir.leaf("broker", &[])).expect("made");
        let before = fs::read(&first.cert).expect("there");
        fs::remove_file(dir.path().join("ca.pem")).expect("removed");
        CertificateDir::open(dir.path()).and_then(|dir| dir.leaf("broker", &[])).expect("made");
        assert_ne!(before, fs::read(&first.cert).expect("there"));
    }
}
