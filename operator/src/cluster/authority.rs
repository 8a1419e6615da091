//! How the authority of a region is replaced, so that nobody distrusts anybody at any moment: first the next one is made and
//! trusted beside the present one; when all have heard of it, it signs; when all show what it has signed, the former one is
//! trusted no more. Deciding is pure; the Secret of the authority holds where it stands, so that each step is one write.

use std::collections::BTreeMap;

use jiff::Timestamp;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::ResourceExt as _;

use super::certificates::{self, pair_of};
use crate::crd::Certificates;
use crate::link::vouching;
use crate::names::{AUTHORITY_SINCE, ROTATE_AUTHORITY};
use crate::region::Pair;

/// What the Secret of an authority holds.
#[derive(Clone, Debug)]
pub struct Held {
    /// Who signs.
    pub signer: Pair,
    /// Who will.
    pub next: Option<Pair>,
    /// Certificate of who did, while it is still trusted.
    pub former: Option<String>,
    /// By what a peer that knows the one believes the other: the younger one's key, signed by the elder.
    pub vouched: Option<String>,
    /// Since when it stands so.
    pub since: Option<Timestamp>,
    /// The word of the last rotation that a person asked for.
    pub word: String,
}

/// What is known of everybody who must have heard.
#[derive(Clone, Copy, Debug)]
pub struct Heard {
    /// Every joined region says that it knows the authorities that are trusted now.
    pub peers: bool,
    pub now: Timestamp,
}

impl Held {
    pub fn new(signer: Pair, word: &str) -> Held {
        Held { signer, next: None, former: None, vouched: None, since: None, word: word.to_owned() }
    }

    pub fn of(secret: &Secret) -> Option<Held> {
        let text = |key: &str| String::from_utf8(secret.data.as_ref()?.get(key)?.0.clone()).ok();
        let next = text("next.crt").zip(text("next.key"));
        let annotation = |key: &str| secret.annotations().get(key);
        Some(Held {
            signer: pair_of(secret)?,
            next: next.map(|(certificate, key)| Pair { certificate, key }),
            former: text("former.crt"),
            vouched: text("vouched.crt"),
            since: annotation(AUTHORITY_SINCE).and_then(|since| since.parse().ok()),
            word: annotation(ROTATE_AUTHORITY).cloned().unwrap_or_default(),
        })
    }

    /// Whom everybody trusts, the signer first.
    pub fn trusted(&self) -> String {
        let next = self.next.iter().map(|next| next.certificate.as_str());
        let all = std::iter::once(self.signer.certificate.as_str()).chain(next).chain(self.former.as_deref());
        all.map(|pem| format!("{}\n", pem.trim_end())).collect()
    }

    /// Adds to a Secret that holds the signer what else there is.
    pub fn write(&self, secret: &mut Secret) {
        let parts = [
            ("next.crt", self.next.as_ref().map(|next| &next.certificate)),
            ("next.key", self.next.as_ref().map(|next| &next.key)),
            ("former.crt", self.former.as_ref()),
            ("vouched.crt", self.vouched.as_ref()),
        ];
        let data = secret.data.get_or_insert_default();
        for (key, text) in parts.into_iter().filter_map(|(key, text)| Some((key, text?))) {
            data.insert(key.to_owned(), ByteString(text.as_bytes().to_vec()));
        }
        let said: BTreeMap<String, String> = [
            (AUTHORITY_SINCE, self.since.map(|since| since.to_string()).unwrap_or_default()),
            (ROTATE_AUTHORITY, self.word.clone()),
        ]
        .into_iter()
        .filter(|(_, text)| !text.is_empty())
        .map(|(key, text)| (key.to_owned(), text))
        .collect();
        secret.metadata.annotations.get_or_insert_default().extend(said);
    }

    /// The next step where it is time for it; `make` makes an authority.
    pub fn advanced(
        &self,
        word: &str,
        settings: &Certificates,
        heard: Heard,
        make: impl FnOnce() -> Result<Pair, rcgen::Error>,
    ) -> Result<Option<Held>, rcgen::Error> {
        let settle = i64::from(settings.settle_seconds);
        let passed = self.since.map_or(i64::MAX, |since| heard.now.as_second() - since.as_second());
        let settled = passed >= settle;
        let mut held = self.clone();
        held.since = Timestamp::from_second(heard.now.as_second()).ok();
        match (&self.next, &self.former) {
            (Some(next), _) if settled && heard.peers => {
                held.former = Some(self.signer.certificate.clone());
                held.signer = next.clone();
                held.next = None;
            }
            // Who hears late must have as long, or nearly: counted anew while a region has not heard.
            (Some(_), _) if !heard.peers && passed >= settle / 2 => {}
            (None, Some(_)) if settled => {
                held.former = None;
                held.vouched = None;
            }
            (None, None) if word != self.word || certificates::is_old_authority(&self.signer, settings) => {
                let next = make()?;
                held.vouched = Some(vouching::vouch(&self.signer, &next)?);
                held.next = Some(next);
                held.word = word.to_owned();
            }
            _ => return Ok(None),
        }
        Ok(Some(held))
    }

    /// For a person; none at rest.
    pub fn says(&self, heard: Heard) -> Option<&'static str> {
        match (&self.next, &self.former) {
            (Some(_), _) if !heard.peers => {
                Some("the next authority is trusted here, and a joined region does not know it yet")
            }
            (Some(_), _) => Some("the next authority is trusted and does not sign yet"),
            (None, Some(_)) => Some("the next authority signs, and the former one is still trusted"),
            (None, None) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64, peers: bool) -> Heard {
        Heard { peers, now: Timestamp::from_second(second).expect("a time") }
    }

    #[test]
    fn who_is_shown_by_anybody_is_trusted_by_everybody_at_every_step() {
        let settings = Certificates { settle_seconds: 60, ..Certificates::default() };
        let make = || certificates::authority("a/b", &settings);
        let mut held = Held::new(make().expect("made"), "");
        let step =
            |held: &Held, word: &str, heard| held.advanced(word, &settings, heard, make).expect("made");
        assert!(step(&held, "", at(0, true)).is_none(), "nobody asked");

        let first = held.signer.certificate.clone();
        let announced = step(&held, "now", at(10, true)).expect("a person asked");
        let next = announced.next.clone().expect("there is a next one").certificate;
        assert_eq!(announced.signer.certificate, first, "it signs nothing before all trust it");
        assert!(announced.trusted().contains(first.trim()) && announced.trusted().contains(next.trim()));
        assert!(step(&announced, "now", at(69, true)).is_none(), "not all may have heard");
        let waits = step(&announced, "now", at(500, false)).expect("it is counted anew");
        assert_eq!(waits.trusted(), announced.trusted(), "a joined region has not heard");
        assert!(step(&waits, "now", at(559, true)).is_none(), "its pods may not have taken the files");
        assert!(step(&waits, "now", at(560, true)).is_some_and(|held| held.former.is_some()));
        assert!(announced.says(at(500, false)).is_some_and(|text| text.contains("joined region")));

        held = step(&announced, "now", at(70, true)).expect("all have heard");
        assert_eq!(held.signer.certificate, next);
        assert!(held.trusted().contains(first.trim()), "somebody may still show what it signed");
        assert!(step(&held, "now", at(129, true)).is_none());

        let last = step(&held, "now", at(130, false)).expect("all show what the next one signed");
        assert!(!last.trusted().contains(first.trim()) && last.vouched.is_none());
        assert!(step(&last, "now", at(1000, true)).is_none(), "one word is one rotation");
        assert!(step(&last, "again", at(1000, true)).is_some());
    }

    #[test]
    fn what_is_written_is_read_back() {
        let settings = Certificates::default();
        let make = || certificates::authority("a/b", &settings);
        let held = Held::new(make().expect("made"), "");
        let held = held.advanced("w", &settings, at(5, true), make).expect("made").expect("a step");
        let bytes = |text: &str| ByteString(text.as_bytes().to_vec());
        let pair = [("tls.crt", bytes(&held.signer.certificate)), ("tls.key", bytes(&held.signer.key))];
        let mut secret = Secret {
            data: Some(pair.map(|(key, value)| (key.to_owned(), value)).into()),
            ..Secret::default()
        };
        held.write(&mut secret);
        let read = Held::of(&secret).expect("readable");
        assert_eq!((read.trusted(), read.vouched, read.since), (held.trusted(), held.vouched, held.since));
        assert_eq!(read.word, "w");
    }
}
