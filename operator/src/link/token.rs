//! The token of a grant: how it is made, what its Secret holds, and the judgement of who shows it. All of this is pure.

use std::collections::BTreeMap;

use jiff::Timestamp;
use k8s_openapi::ByteString;
use ring::rand::{SecureRandom as _, SystemRandom};
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject as _;

use super::vouching::believed;
use crate::join::{Fingerprint, Refusal, Request};

/// What a token's Secret holds: all that the joining region needs, and no credential of a Kubernetes.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Token {
    /// NAMESPACE/NAME of the LinkGrant.
    pub grant: String,
    pub token: String,
    /// Name of the accepting region.
    pub region: String,
    /// HOST:PORT where the token is redeemed, and the name of the door there.
    pub join: String,
    pub door: String,
    /// UDP HOST:PORT of the accepting region's mirrors.
    pub endpoint: String,
    /// Of the accepting region's authority.
    pub fingerprint: String,
    pub expires: Timestamp,
}

impl Token {
    /// A word that nobody guesses: 256 bits in hexadecimal.
    pub fn word() -> Result<String, ring::error::Unspecified> {
        let mut bytes = [0; 32];
        SystemRandom::new().fill(&mut bytes)?;
        Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
    }

    pub fn to_data(&self) -> BTreeMap<String, String> {
        let expires = self.expires.to_string();
        [
            ("grant", &self.grant),
            ("token", &self.token),
            ("region", &self.region),
            ("join", &self.join),
            ("door", &self.door),
            ("endpoint", &self.endpoint),
            ("fingerprint", &self.fingerprint),
            ("expires", &expires),
        ]
        .map(|(key, value)| (key.to_owned(), value.clone()))
        .into()
    }

    /// From the data of a Secret; the error is a sentence for a person.
    pub fn from_data(data: &BTreeMap<String, ByteString>) -> Result<Token, String> {
        let text = |key: &str| {
            let bytes = data.get(key).ok_or_else(|| format!("has no key {key}"))?;
            let text = String::from_utf8(bytes.0.clone()).map_err(|_| format!("key {key} is no text"))?;
            Ok::<String, String>(text.trim().to_owned())
        };
        let expires = text("expires")?;
        Ok(Token {
            grant: text("grant")?,
            token: text("token")?,
            region: text("region")?,
            join: text("join")?,
            door: text("door")?,
            endpoint: text("endpoint")?,
            fingerprint: text("fingerprint")?,
            expires: expires
                .parse()
                .map_err(|_| format!("key expires holds {expires:?}, which is no time"))?,
        })
    }
}

/// What is known of a grant when somebody shows a token for it.
#[derive(Clone, Debug)]
pub struct Grant<'a> {
    pub token: &'a str,
    pub peer: &'a str,
    pub expires: Timestamp,
    /// Who has taken it: [`mark`] of the authorities, and they themselves in PEM.
    pub taken_by: Option<(&'a str, &'a str)>,
}

/// What follows from a request.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Judgement {
    /// The token is good, and from now on taken by this.
    Take {
        by: String,
    },
    /// The same region with the same authorities asks again: its first answer was lost on the way.
    Again,
    /// The same region has other authorities by now, for which those that are known have spoken.
    Renew {
        by: String,
    },
    Refuse(Refusal, String),
}

/// Judges a request for this grant. Who does not know the token learns nothing about the grant.
pub fn judge(grant: &Grant<'_>, request: &Request, now: Timestamp) -> Judgement {
    let refuse = |reason, text: String| Judgement::Refuse(reason, text);
    if ![1, 2].contains(&request.version) {
        let text = format!("version {} is not understood; 1 and 2 are", request.version);
        return refuse(Refusal::Malformed, text);
    }
    // Compared by digest, so that the time it takes tells nothing about the token.
    if Fingerprint::of(grant.token.as_bytes()) != Fingerprint::of(request.token.as_bytes()) {
        return refuse(Refusal::TokenUnknown, "no grant has this token".to_owned());
    }
    if request.region != grant.peer {
        let text = format!("the grant is for region {}, not for {}", grant.peer, request.region);
        return refuse(Refusal::WrongPeer, text);
    }
    let by = match mark(&request.authorities) {
        Ok(by) => by,
        Err(text) => return refuse(Refusal::Malformed, text),
    };
    match grant.taken_by {
        Some((taken, _)) if taken == by => Judgement::Again,
        Some((_, known)) if believed(known, &request.authorities, &request.vouched) => {
            Judgement::Renew { by }
        }
        Some(_) => refuse(Refusal::TokenUsed, "the token was used before; ask for another grant".to_owned()),
        None if now >= grant.expires => {
            let text = format!("the token expired at {}; ask for another grant", grant.expires);
            refuse(Refusal::TokenExpired, text)
        }
        None => Judgement::Take { by },
    }
}

/// What a set of authorities is known by: the digest of their certificates.
pub fn mark(authorities: &str) -> Result<String, String> {
    let mut all = Vec::new();
    for certificate in CertificateDer::pem_slice_iter(authorities.as_bytes()) {
        let certificate = certificate.map_err(|error| format!("authorities: {error}"))?;
        all.push(Fingerprint::of(&certificate).to_string());
    }
    if all.is_empty() || all.len() > AUTHORITIES_MAX {
        return Err(format!("authorities: {} certificates; 1 to {AUTHORITIES_MAX} are taken", all.len()));
    }
    all.sort();
    Ok(Fingerprint::of(all.join("\n").as_bytes()).to_string())
}

const AUTHORITIES_MAX: usize = 8;

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, KeyPair};

    use super::*;

    fn authority() -> String {
        let key = KeyPair::generate().expect("a key");
        CertificateParams::default().self_signed(&key).expect("a certificate").pem()
    }

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).expect("a time")
    }

    fn request(token: &str, region: &str, authorities: &str) -> Request {
        Request {
            version: 1,
            grant: "east/west".to_owned(),
            token: token.to_owned(),
            region: region.to_owned(),
            authorities: authorities.to_owned(),
            vouched: String::new(),
            knows: String::new(),
        }
    }

    #[test]
    fn a_token_is_good_once_for_one_region_until_it_expires() {
        let (mine, other) = (authority(), authority());
        let grant = Grant { token: "secret", peer: "west", expires: at(100), taken_by: None };
        let judged = |request: &Request, second| judge(&grant, request, at(second));
        let Judgement::Take { by } = judged(&request("secret", "west", &mine), 99) else {
            panic!("it is a good token")
        };
        let refused = |judgement| match judgement {
            Judgement::Refuse(reason, text) => {
                assert!(!text.contains("secret"), "{text}");
                reason
            }
            other => panic!("{other:?}"),
        };
        assert_eq!(refused(judged(&request("secret", "west", &mine), 100)), Refusal::TokenExpired);
        assert_eq!(refused(judged(&request("guess", "west", &mine), 1)), Refusal::TokenUnknown);
        assert_eq!(refused(judged(&request("", "west", &mine), 1)), Refusal::TokenUnknown);
        assert_eq!(refused(judged(&request("secret", "north", &mine), 1)), Refusal::WrongPeer);
        assert_eq!(refused(judged(&request("secret", "west", "nothing"), 1)), Refusal::Malformed);

        let taken = Grant { taken_by: Some((&by, &mine)), ..grant };
        // Its own answer was lost: it gets it again, even if the time is over by now.
        assert_eq!(judge(&taken, &request("secret", "west", &mine), at(500)), Judgement::Again);
        assert_eq!(refused(judge(&taken, &request("secret", "west", &other), at(1))), Refusal::TokenUsed);
    }

    #[test]
    fn what_a_secret_holds_is_read_back_and_what_is_missing_is_named() {
        let token = Token {
            grant: "east/west".to_owned(),
            token: Token::word().expect("there is randomness"),
            region: "east".to_owned(),
            join: "10.0.0.1:30443".to_owned(),
            door: "east.east.join.sealane".to_owned(),
            endpoint: "10.0.0.1:30096".to_owned(),
            fingerprint: Fingerprint::of(b"x").to_string(),
            expires: at(1000),
        };
        let data: BTreeMap<String, ByteString> =
            token.to_data().into_iter().map(|(key, value)| (key, ByteString(value.into_bytes()))).collect();
        assert_eq!(Token::from_data(&data), Ok(token.clone()));
        for key in data.keys() {
            let mut less = data.clone();
            less.remove(key);
            assert_eq!(Token::from_data(&less), Err(format!("has no key {key}")));
        }
        assert_ne!(Token::word(), Token::word());
    }
}
