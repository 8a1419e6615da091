//! The certificates of a region: its authority, and one for each kind of service. What is there and good is kept.
//! Making and judging are pure; `bring` alone reads and writes, and it never replaces an authority that is there.

use std::collections::BTreeMap;

use jiff::Timestamp;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::api::ObjectMeta;
use kube::{Resource as _, ResourceExt as _};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject as _;
use time::{Duration, OffsetDateTime};
use x509_parser::prelude::{FromDer as _, GeneralName, ParsedExtension, X509Certificate};

use super::authority::{Heard, Held};
use crate::apply::{Claim, Owner};
use crate::context::Context;
use crate::crd::{CertificateStatus, Certificates};
use crate::failure::Failure;
use crate::join::Fingerprint;
use crate::link::{Peer, mark};
use crate::names::{ROTATE, ROTATE_AUTHORITY};
use crate::region::{Pair, Region};

/// A certificate that a service needs.
pub struct Wanted {
    /// Part of the Secret's name: broker, mirror and so on.
    pub of: &'static str,
    /// Common name and first alternative name: who the service is to the others.
    pub name: &'static str,
    pub hosts: Vec<String>,
}

/// Brings the Secrets and the trust of a cluster to what they must be; what a status says of them, and of an authority that is
/// being replaced.
pub async fn bring(
    cx: &Context,
    region: &Region,
    owner: &Owner,
    wanted: &[Wanted],
) -> Result<(Vec<CertificateStatus>, Option<&'static str>), Failure> {
    let names = &region.names;
    let settings = &region.cluster.spec.certificates;
    let word = region.cluster.annotations().get(ROTATE).cloned().unwrap_or_default();
    let (held, says) = hold(cx, region, owner).await?;
    let (authority, trusted) = (held.signer.clone(), held.trusted());
    let mut kept = secret(region, &names.authority(), &authority, &trusted, "");
    held.write(&mut kept);
    cx.apply(owner, &kept).await?;
    let trust = ConfigMap {
        metadata: ObjectMeta {
            name: Some(names.trust()),
            labels: Some(names.labels("certificates")),
            ..ObjectMeta::default()
        },
        data: Some([("ca.crt".to_owned(), trusted.clone())].into()),
        ..ConfigMap::default()
    };
    cx.apply(owner, &trust).await?;
    let mut told = Vec::new();
    for wanted in wanted {
        let name = names.certificate(wanted.of);
        let found = cx.api::<Secret>(&names.namespace).get_opt(&name).await?;
        let same_word = found.as_ref().is_some_and(|found| {
            found.meta().annotations.as_ref().and_then(|all| all.get(ROTATE)).map_or("", String::as_str)
                == word
        });
        let kept = found.as_ref().and_then(pair_of).filter(|pair| {
            same_word && why_not(pair, &authority, wanted, settings, OffsetDateTime::now_utc()).is_none()
        });
        let pair = match kept {
            Some(pair) => pair,
            None => leaf(&authority, wanted, settings).map_err(invalid)?,
        };
        told.extend(status_of(&name, &pair));
        cx.apply(owner, &secret(region, &name, &pair, &trusted, &word)).await?;
    }
    Ok((told, says))
}

/// The authority as it shall be held from now on, and what a person is told of it.
async fn hold(cx: &Context, region: &Region, owner: &Owner) -> Result<(Held, Option<&'static str>), Failure> {
    let names = &region.names;
    let settings = &region.cluster.spec.certificates;
    let word = region.cluster.annotations().get(ROTATE_AUTHORITY).cloned().unwrap_or_default();
    let make = || authority(&format!("{}/{}", names.namespace, names.cluster), settings);
    let Some(there) = cx.api::<Secret>(&names.namespace).get_opt(&names.authority()).await? else {
        return Ok((Held::new(make().map_err(invalid)?, &word), None));
    };
    if let Claim::Foreign(why) = owner.claim(&there.metadata) {
        return Err(Failure::Foreign { kind: "Secret".to_owned(), name: names.authority(), why });
    }
    // An authority that is there but unreadable must not be replaced: everything trusts it.
    let unreadable = || Failure::DataPlane(format!("Secret {} holds no certificate", names.authority()));
    let held = Held::of(&there).ok_or_else(unreadable)?;
    let peers = Peer::all(cx, &names.namespace, &names.cluster).await?;
    let mark = mark(&held.trusted()).map_err(Failure::Invalid)?;
    let heard = Heard { peers: peers.iter().all(|peer| peer.knows == mark), now: Timestamp::now() };
    let held = held.advanced(&word, settings, heard, make).map_err(invalid)?.unwrap_or(held);
    let says = held.says(heard);
    Ok((held, says))
}

fn secret(region: &Region, name: &str, pair: &Pair, authority: &str, word: &str) -> Secret {
    let bytes = |text: &str| ByteString(text.as_bytes().to_vec());
    let annotations: BTreeMap<String, String> = Some(word)
        .filter(|word| !word.is_empty())
        .map(|word| (ROTATE.to_owned(), word.to_owned()))
        .into_iter()
        .collect();
    Secret {
        metadata: ObjectMeta {
            name: Some(name.to_owned()),
            labels: Some(region.names.labels("certificates")),
            annotations: Some(annotations),
            ..ObjectMeta::default()
        },
        type_: Some("kubernetes.io/tls".to_owned()),
        data: Some(
            [
                ("tls.crt", bytes(&pair.certificate)),
                ("tls.key", bytes(&pair.key)),
                ("ca.crt", bytes(authority)),
            ]
            .map(|(key, value)| (key.to_owned(), value))
            .into(),
        ),
        ..Secret::default()
    }
}

pub(super) fn pair_of(secret: &Secret) -> Option<Pair> {
    let text = |key: &str| String::from_utf8(secret.data.as_ref()?.get(key)?.0.clone()).ok();
    Some(Pair { certificate: text("tls.crt")?, key: text("tls.key")? })
}

pub(super) fn authority(of: &str, settings: &Certificates) -> Result<Pair, rcgen::Error> {
    let mut params = CertificateParams::default();
    // Distinct for each, so that two clusters of one name are never mistaken for one another.
    let serial = OffsetDateTime::now_utc().unix_timestamp_nanos() / 1000;
    params.distinguished_name.push(DnType::CommonName, format!("Sealane authority of {of} {serial:x}"));
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let now = OffsetDateTime::now_utc();
    params.not_before = now - CLOCK_SKEW;
    params.not_after = now + Duration::days(10 * i64::from(settings.validity_days));
    let key = KeyPair::generate()?;
    let certificate = params.self_signed(&key)?;
    Ok(Pair { certificate: certificate.pem(), key: key.serialize_pem() })
}

fn leaf(authority: &Pair, wanted: &Wanted, settings: &Certificates) -> Result<Pair, rcgen::Error> {
    let issuer = Issuer::from_ca_cert_pem(&authority.certificate, KeyPair::from_pem(&authority.key)?)?;
    let mut params = CertificateParams::new(wanted.names())?;
    params.distinguished_name.push(DnType::CommonName, wanted.name);
    params.use_authority_key_identifier_extension = true;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages =
        vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    let now = OffsetDateTime::now_utc();
    params.not_before = now - CLOCK_SKEW;
    params.not_after = now + Duration::days(i64::from(settings.validity_days));
    let key = KeyPair::generate()?;
    let certificate = params.signed_by(&key, &issuer)?;
    Ok(Pair { certificate: certificate.pem(), key: key.serialize_pem() })
}

impl Wanted {
    fn names(&self) -> Vec<String> {
        let mut names = vec![self.name.to_owned()];
        names.extend(self.hosts.iter().filter(|host| *host != self.name).cloned());
        names.dedup();
        names
    }
}

/// Why a certificate that is there must be made anew.
fn why_not(
    pair: &Pair,
    authority: &Pair,
    wanted: &Wanted,
    settings: &Certificates,
    now: OffsetDateTime,
) -> Option<&'static str> {
    let Ok(der) = CertificateDer::from_pem_slice(pair.certificate.as_bytes()) else {
        return Some("unreadable");
    };
    let Ok((_, certificate)) = X509Certificate::from_der(&der) else { return Some("unreadable") };
    if KeyPair::from_pem(&pair.key).is_err() {
        return Some("unreadable");
    }
    let end = certificate.validity().not_after.timestamp();
    if end <= (now + Duration::days(i64::from(settings.renew_before_days))).unix_timestamp() {
        return Some("old");
    }
    let Ok(ca) = CertificateDer::from_pem_slice(authority.certificate.as_bytes()) else {
        return Some("orphan");
    };
    let Ok((_, ca)) = X509Certificate::from_der(&ca) else { return Some("orphan") };
    if certificate.verify_signature(Some(ca.public_key())).is_err() {
        return Some("orphan");
    }
    let held = alternative_names(&certificate);
    wanted.names().iter().any(|name| !held.contains(name)).then_some("names")
}

/// Authorities live ten times as long as what they sign, and are replaced ten times as long before their end.
pub(super) fn is_old_authority(authority: &Pair, settings: &Certificates) -> bool {
    let Ok(der) = CertificateDer::from_pem_slice(authority.certificate.as_bytes()) else { return false };
    let Ok((_, certificate)) = X509Certificate::from_der(&der) else { return false };
    let before = Duration::days(10 * i64::from(settings.renew_before_days));
    certificate.validity().not_after.timestamp() <= (OffsetDateTime::now_utc() + before).unix_timestamp()
}

fn alternative_names(certificate: &X509Certificate<'_>) -> Vec<String> {
    let mut names = Vec::new();
    for extension in certificate.extensions() {
        let ParsedExtension::SubjectAlternativeName(alternative) = extension.parsed_extension() else {
            continue;
        };
        for name in &alternative.general_names {
            match name {
                GeneralName::DNSName(name) => names.push((*name).to_owned()),
                GeneralName::IPAddress(bytes) => match <[u8; 4]>::try_from(*bytes) {
                    Ok(four) => names.push(std::net::Ipv4Addr::from(four).to_string()),
                    Err(_) => names.extend(
                        <[u8; 16]>::try_from(*bytes)
                            .ok()
                            .map(|all| std::net::Ipv6Addr::from(all).to_string()),
                    ),
                },
                _ => {}
            }
        }
    }
    names
}

fn status_of(secret: &str, pair: &Pair) -> Option<CertificateStatus> {
    let der = CertificateDer::from_pem_slice(pair.certificate.as_bytes()).ok()?;
    let (_, certificate) = X509Certificate::from_der(&der).ok()?;
    let end = jiff::Timestamp::from_second(certificate.validity().not_after.timestamp()).ok()?;
    let fingerprint = Fingerprint::of(&der).to_string();
    Some(CertificateStatus {
        secret: secret.to_owned(),
        not_after: end.to_string(),
        fingerprint: fingerprint.trim_start_matches("sha256:").chars().take(16).collect(),
    })
}

fn invalid(error: rcgen::Error) -> Failure {
    Failure::Invalid(format!("a certificate cannot be made: {error}"))
}

const CLOCK_SKEW: Duration = Duration::minutes(5);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_certificate_is_kept_until_it_is_old_lacks_a_name_or_comes_from_another_authority() {
        let settings = Certificates::default();
        let (ours, other) =
            (authority("a/b", &settings).expect("made"), authority("a/b", &settings).expect("made"));
        let wanted = |hosts: &[&str]| Wanted {
            of: "broker",
            name: "sealane-broker",
            hosts: hosts.iter().map(|host| (*host).to_owned()).collect(),
        };
        let pair = leaf(&ours, &wanted(&["*.east", "10.0.0.1"]), &settings).expect("made");
        let now = OffsetDateTime::now_utc();
        let judged = |authority: &Pair, hosts: &[&str], days| {
            why_not(&pair, authority, &wanted(hosts), &settings, now + Duration::days(days))
        };
        assert_eq!(judged(&ours, &["*.east", "10.0.0.1"], 0), None);
        assert_eq!(judged(&ours, &["*.east"], 59), None);
        assert_eq!(judged(&ours, &["*.east"], 61), Some("old"));
        assert_eq!(judged(&ours, &["other"], 0), Some("names"));
        assert_eq!(judged(&other, &["*.east"], 0), Some("orphan"));
        let broken = Pair { key: String::new(), ..pair.clone() };
        assert_eq!(why_not(&broken, &ours, &wanted(&[]), &settings, now), Some("unreadable"));
    }
}
