//! How one region believes another's new authority: the former one has signed the new one's key. Pure.

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, KeyUsagePurpose};
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject as _;
use x509_parser::prelude::{FromDer as _, X509Certificate};

use crate::region::Pair;

/// A certificate of `next`'s key, signed by `former`. It says nothing else: it is no part of any chain.
pub fn vouch(former: &Pair, next: &Pair) -> Result<String, rcgen::Error> {
    let issuer = Issuer::from_ca_cert_pem(&former.certificate, KeyPair::from_pem(&former.key)?)?;
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, "the next authority");
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    Ok(params.signed_by(&KeyPair::from_pem(&next.key)?, &issuer)?.pem())
}

/// Whether every authority of `shown` is one of `known`, or has its key signed by one of `known` in `vouched`. All in PEM.
pub fn believed(known: &str, shown: &str, vouched: &str) -> bool {
    let all = |pem: &str| -> Option<Vec<CertificateDer<'static>>> {
        CertificateDer::pem_slice_iter(pem.as_bytes()).collect::<Result<_, _>>().ok()
    };
    let (Some(known), Some(shown), Some(vouched)) = (all(known), all(shown), all(vouched)) else {
        return false;
    };
    !shown.is_empty()
        && shown.iter().all(|shown| {
            known.contains(shown) || vouched.iter().any(|vouched| speaks_for(vouched, shown, &known))
        })
}

fn speaks_for(
    vouched: &CertificateDer<'_>,
    shown: &CertificateDer<'_>,
    known: &[CertificateDer<'_>],
) -> bool {
    let (Ok((_, vouched)), Ok((_, shown))) =
        (X509Certificate::from_der(vouched), X509Certificate::from_der(shown))
    else {
        return false;
    };
    vouched.public_key().raw == shown.public_key().raw
        && known.iter().any(|known| {
            let known = X509Certificate::from_der(known);
            known.is_ok_and(|(_, known)| vouched.verify_signature(Some(known.public_key())).is_ok())
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn authority() -> Pair {
        let key = KeyPair::generate().expect("a key");
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        let certificate = params.self_signed(&key).expect("made").pem();
        Pair { certificate, key: key.serialize_pem() }
    }

    #[test]
    fn a_new_authority_is_believed_when_one_that_is_known_has_signed_its_key() {
        let (old, new, other) = (authority(), authority(), authority());
        let both = format!("{}{}", old.certificate, new.certificate);
        let vouched = vouch(&old, &new).expect("made");
        assert!(believed(&old.certificate, &both, &vouched));
        assert!(believed(&old.certificate, &new.certificate, &vouched));
        assert!(believed(&both, &new.certificate, ""), "less than what is known");
        assert!(!believed(&old.certificate, &both, ""), "nobody speaks for it");
        assert!(!believed(&other.certificate, &both, &vouched));
        // Signed by somebody who is not known, and of another's key.
        assert!(!believed(&old.certificate, &both, &vouch(&other, &new).expect("made")));
        assert!(!believed(&old.certificate, &both, &vouch(&old, &other).expect("made")));
        assert!(!believed(&old.certificate, "", &vouched));
        assert!(!believed(&old.certificate, "no PEM", &vouched));
    }
}
