//! Which lane a record is in: an ordered list of extractors over its headers.
//!
//! Total over all legal headers: any list of names and values gives a verdict. Header names match
//! without case, the last of duplicates wins, values are trimmed and then compared exactly. W3C
//! headers are parsed in `w3c.rs`. `traceparent` is never a source of a lane.
//!
//! A record is put into a lane as the first extractor of the list reads it.

use std::borrow::Cow;

use crate::name::{Lane, means_baseline};
use crate::summary::RecordLane;
use crate::w3c;

/// Most extractors in a list.
pub const EXTRACTORS_MAX: usize = 32;
/// Longest text of one extractor, in bytes.
pub const EXTRACTOR_LEN_MAX: usize = 256;
/// The list that a topic gets when it says nothing else.
pub const STANDARD: &str =
    "x-lane,baggage/lane,x-tt-env,baggage/sd-routing-key,baggage/mirrord-session,x-lane-code,tsf_laneId";

/// An ordered list of extractors. Empty: lanes are off.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Extractors {
    list: Vec<Extractor>,
    texts: Vec<String>,
    /// Every header name that matters, so that a record without any costs one comparison per header.
    headers: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Extractor {
    /// The whole value of a header; `slot` is its place in `headers`.
    Header {
        slot: usize,
    },
    Member {
        slot: usize,
        format: Format,
        key: String,
    },
    /// `x-tt-env`, which `x-use-ppe: 1` obliges to name a PPE lane.
    TtEnv {
        env: usize,
        use_ppe: usize,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    Baggage,
    TraceState,
}

/// What the headers of one record say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    pub lane: LaneVerdict,
    /// Extractors named different lanes, and the first won.
    pub disagreed: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LaneVerdict {
    Baseline,
    Lane(Lane),
    /// The value is no lane name: the baseline's, counted.
    Unknown,
    Refused(Refusal),
}

/// Why a record may not be appended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Refusal {
    #[error("its headers name different lanes and one of them is PPE")]
    PpeDisagreement,
    #[error("x-use-ppe is set but x-tt-env does not begin with ppe")]
    UsePpeWithoutPpe,
}

/// Why a list of extractors is not one. Names the entry and what may stand there.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExtractorError {
    #[error("no extractor is named; sealane.lanes=false is what turns lanes off")]
    Empty,
    #[error("at most {EXTRACTORS_MAX} extractors are possible")]
    TooMany,
    #[error("extractor {0:?} is not one: it must be the name of a header, baggage/KEY or tracestate/KEY")]
    Syntax(String),
    #[error("extractor {0:?} is not one: it is read together with x-tt-env")]
    Flag(String),
    #[error("extractor {0:?} is not one: traceparent never names a lane; name another header")]
    TraceParent(String),
    #[error("extractor {0:?} is in the list twice")]
    Twice(String),
}

impl Extractors {
    /// See [`STANDARD`].
    pub fn standard() -> Extractors {
        Extractors::parse_list(STANDARD).expect("the standard list is legal")
    }

    /// Lanes off.
    pub fn none() -> Extractors {
        Extractors::default()
    }

    /// Each text is a header name, or `baggage/KEY` or `tracestate/KEY` for one member of a W3C list.
    pub fn parse<S: AsRef<str>>(texts: &[S]) -> Result<Extractors, ExtractorError> {
        if texts.len() > EXTRACTORS_MAX {
            return Err(ExtractorError::TooMany);
        }
        let mut made = Extractors::default();
        for text in texts {
            made.push(text.as_ref())?;
        }
        Ok(made)
    }

    /// A list as configuration writes it, with commas. It may not be empty.
    pub fn parse_list(text: &str) -> Result<Extractors, ExtractorError> {
        if text.trim().is_empty() {
            return Err(ExtractorError::Empty);
        }
        let texts: Vec<&str> = text.split(',').map(str::trim).collect();
        Extractors::parse(&texts)
    }

    fn push(&mut self, text: &str) -> Result<(), ExtractorError> {
        let syntax = || ExtractorError::Syntax(text.to_owned());
        let (header, key) = match text.split_once('/') {
            Some((header, key)) => (header, Some(key)),
            None => (text, None),
        };
        let printable = |s: &str| !s.is_empty() && s.chars().all(|c| c.is_ascii_graphic() && c != ',');
        let member = |s: &str| printable(s) && !s.contains(['=', ';']);
        if text.len() > EXTRACTOR_LEN_MAX || !printable(header) || !key.is_none_or(member) {
            return Err(syntax());
        }
        let named = |name: &str| header.eq_ignore_ascii_case(name);
        if named("traceparent") {
            return Err(ExtractorError::TraceParent(text.to_owned()));
        }
        if named("x-use-ppe") {
            return Err(ExtractorError::Flag(text.to_owned()));
        }
        let slot = self.slot(header);
        let extractor = match key {
            None if named("x-tt-env") => Extractor::TtEnv { env: slot, use_ppe: self.slot("x-use-ppe") },
            // The whole of a W3C list is no lane's name.
            None if named("baggage") || named("tracestate") => return Err(syntax()),
            None => Extractor::Header { slot },
            Some(key) if named("baggage") => {
                Extractor::Member { slot, format: Format::Baggage, key: key.to_owned() }
            }
            Some(key) if named("tracestate") => {
                Extractor::Member { slot, format: Format::TraceState, key: key.to_owned() }
            }
            Some(_) => return Err(syntax()),
        };
        if self.list.contains(&extractor) {
            return Err(ExtractorError::Twice(text.to_owned()));
        }
        self.list.push(extractor);
        self.texts.push(text.to_owned());
        Ok(())
    }

    fn slot(&mut self, header: &str) -> usize {
        let known = self.headers.iter().position(|h| h.eq_ignore_ascii_case(header));
        known.unwrap_or_else(|| {
            self.headers.push(header.to_ascii_lowercase());
            self.headers.len() - 1
        })
    }

    /// The list as it is written in configuration and in the log.
    pub fn texts(&self) -> &[String] {
        &self.texts
    }

    /// Lanes are off.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// The lane that these headers name. Takes them in the order of the record.
    pub fn lane_of<'a>(&self, headers: impl IntoIterator<Item = (&'a str, Option<&'a [u8]>)>) -> Verdict {
        let mut found = Found::default();
        for (name, value) in headers {
            let slot = self.headers.iter().position(|h| h.eq_ignore_ascii_case(name));
            if let Some(slot) = slot {
                found.set(slot, value);
            }
        }
        if found.nothing() { Verdict::of(LaneVerdict::Baseline) } else { self.judge(&found) }
    }

    /// The header that puts a record with these headers into `lane`, to be added behind them: where it
    /// repeats one, the last of duplicates wins. `None` with lanes off.
    pub fn stamp<'a>(
        &'a self,
        headers: &[(&'a str, Option<&'a [u8]>)],
        lane: &'a Lane,
    ) -> Option<(&'a str, Cow<'a, [u8]>)> {
        let (slot, member) = match self.list.first()? {
            Extractor::Header { slot } | Extractor::TtEnv { env: slot, .. } => (*slot, None),
            Extractor::Member { slot, format, key } => (*slot, Some((*format, key))),
        };
        let name = self.headers[slot].as_str();
        let Some((format, key)) = member else {
            return Some((name, Cow::Borrowed(lane.as_str().as_bytes())));
        };
        let old = headers.iter().rfind(|(header, _)| header.eq_ignore_ascii_case(name));
        // The other members stay: they are for others.
        let old = old.and_then(|(_, value)| std::str::from_utf8((*value)?).ok()).map(str::trim);
        let value = match (old.filter(|old| !old.is_empty()), format) {
            (None, _) => format!("{key}={lane}"),
            (Some(old), Format::Baggage) => format!("{old},{key}={lane}"),
            (Some(old), Format::TraceState) => format!("{key}={lane},{old}"),
        };
        Some((name, Cow::Owned(value.into_bytes())))
    }

    /// The same as [`lane_of`](Self::lane_of), as what a batch's summary counts.
    pub fn record_lane<'a>(
        &self,
        headers: impl IntoIterator<Item = (&'a str, Option<&'a [u8]>)>,
    ) -> RecordLane {
        match self.lane_of(headers).lane {
            LaneVerdict::Baseline => RecordLane::Baseline,
            LaneVerdict::Lane(lane) => RecordLane::Lane(lane),
            LaneVerdict::Unknown => RecordLane::Unnamed,
            LaneVerdict::Refused(_) => RecordLane::Refused,
        }
    }

    fn judge(&self, found: &Found<'_>) -> Verdict {
        let mut first: Option<Opinion> = None;
        let mut ppe = false;
        let mut disagreed = false;
        for extractor in &self.list {
            let Some(opinion) = (match extractor.opinion(found) {
                Ok(opinion) => opinion,
                Err(why) => return Verdict::of(LaneVerdict::Refused(why)),
            }) else {
                continue;
            };
            ppe |= matches!(&opinion, Opinion::Lane(lane) if lane.is_ppe());
            match &first {
                None => first = Some(opinion),
                Some(first) => disagreed |= *first != opinion,
            }
        }
        if ppe && disagreed {
            return Verdict::of(LaneVerdict::Refused(Refusal::PpeDisagreement));
        }
        let lane = match first {
            None | Some(Opinion::Baseline) => LaneVerdict::Baseline,
            Some(Opinion::Lane(lane)) => LaneVerdict::Lane(lane),
            Some(Opinion::NoName(_)) => LaneVerdict::Unknown,
        };
        Verdict { lane, disagreed }
    }
}

impl Verdict {
    fn of(lane: LaneVerdict) -> Verdict {
        Verdict { lane, disagreed: false }
    }
}

impl Extractor {
    /// `None` when the header is absent, null or empty.
    fn opinion(&self, found: &Found<'_>) -> Result<Option<Opinion>, Refusal> {
        match self {
            Extractor::Header { slot } => Ok(found.value(*slot).and_then(Opinion::of_bytes)),
            Extractor::Member { slot, format, key } => {
                let Some(text) = found.value(*slot).and_then(|v| std::str::from_utf8(v).ok()) else {
                    return Ok(None);
                };
                let member = match format {
                    Format::Baggage => w3c::baggage_member(text, key),
                    Format::TraceState => w3c::tracestate_member(text, key).map(|v| v.as_bytes().into()),
                };
                Ok(member.and_then(|value| Opinion::of_bytes(&value)))
            }
            Extractor::TtEnv { env, use_ppe } => {
                let opinion = found.value(*env).and_then(Opinion::of_bytes);
                let wants_ppe = found.value(*use_ppe).is_some_and(|v| v.trim_ascii() == b"1");
                if wants_ppe && !matches!(&opinion, Some(Opinion::Lane(lane)) if lane.is_ppe()) {
                    return Err(Refusal::UsePpeWithoutPpe);
                }
                Ok(opinion)
            }
        }
    }
}

/// What one extractor says.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Opinion {
    Baseline,
    Lane(Lane),
    NoName(Vec<u8>),
}

impl Opinion {
    fn of_bytes(value: &[u8]) -> Option<Opinion> {
        let Ok(text) = std::str::from_utf8(value) else {
            return Some(Opinion::NoName(value.to_vec()));
        };
        let text = text.trim();
        if text.is_empty() {
            return None;
        }
        Some(match Lane::parse(text) {
            Ok(lane) => Opinion::Lane(lane),
            Err(_) if means_baseline(text) => Opinion::Baseline,
            Err(_) => Opinion::NoName(text.as_bytes().to_vec()),
        })
    }
}

/// The values of the headers that matter, by slot; the last of duplicates stands.
#[derive(Default)]
struct Found<'a> {
    values: Vec<Option<&'a [u8]>>,
}

impl<'a> Found<'a> {
    fn set(&mut self, slot: usize, value: Option<&'a [u8]>) {
        if self.values.len() <= slot {
            self.values.resize(slot + 1, None);
        }
        self.values[slot] = value;
    }

    fn value(&self, slot: usize) -> Option<&'a [u8]> {
        self.values.get(slot).copied().flatten()
    }

    fn nothing(&self) -> bool {
        self.values.iter().all(Option::is_none)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn judge(headers: &[(&str, Option<&str>)]) -> Verdict {
        Extractors::standard().lane_of(headers.iter().map(|(k, v)| (*k, v.map(str::as_bytes))))
    }

    fn lane(headers: &[(&str, Option<&str>)]) -> LaneVerdict {
        judge(headers).lane
    }

    fn named(name: &str) -> LaneVerdict {
        LaneVerdict::Lane(Lane::parse(name).unwrap())
    }

    #[test]
    fn one_rule_for_key_and_value() {
        for (value, right) in [
            ("boe", named("boe")),
            (" boe ", named("boe")),
            ("boe\n", named("boe")),
            ("BOE", LaneVerdict::Unknown),
            ("BOE,PPE", LaneVerdict::Unknown),
            ("a b", LaneVerdict::Unknown),
            ("xyz", named("xyz")),
            ("", LaneVerdict::Baseline),
            ("  ", LaneVerdict::Baseline),
            ("prod", LaneVerdict::Baseline),
            ("baseline", LaneVerdict::Baseline),
        ] {
            for key in ["x-lane", "X-Lane", "X-LANE"] {
                assert_eq!(lane(&[(key, Some(value))]), right, "{key} {value:?}");
            }
        }
    }

    #[test]
    fn missing_null_and_repeated_headers_have_one_answer_each() {
        assert_eq!(lane(&[]), LaneVerdict::Baseline);
        assert_eq!(lane(&[("x-lane", None)]), LaneVerdict::Baseline);
        assert_eq!(lane(&[("x-lane", Some("boe")), ("X-lane", Some("other"))]), named("other"));
        assert_eq!(lane(&[("x-lane", Some("boe")), ("x-lane", None)]), LaneVerdict::Baseline);
        let five = ["a", "b", "c", "d", "e"].map(|k| (k, Some("1")));
        assert_eq!(lane(&[&five[..], &[("x-lane", Some("boe"))]].concat()), named("boe"));
    }

    #[test]
    fn every_known_header_names_a_lane() {
        for (key, value) in [
            ("baggage", "a=1, lane=boe-cart;ttl=3,b=2"),
            ("baggage", "sd-routing-key=boe-cart"),
            ("Baggage", "mirrord-session=boe-cart"),
            ("X-TT-Env", "boe-cart"),
            ("x-lane-code", "boe-cart"),
            ("tsf_laneId", "boe-cart"),
        ] {
            assert_eq!(lane(&[(key, Some(value))]), named("boe-cart"), "{key}");
        }
        assert_eq!(lane(&[("traceparent", Some("boe-cart"))]), LaneVerdict::Baseline);
    }

    #[test]
    fn a_list_that_is_none_names_its_wrong_entry_and_what_may_stand_there() {
        for (list, entry) in [
            ("x-lane,cookie/lane", "\"cookie/lane\""),
            ("x-lane,x y", "\"x y\""),
            ("baggage,x-lane", "\"baggage\""),
            ("tracestate", "\"tracestate\""),
            ("x-lane,,x-tt-env", "\"\""),
            ("baggage/", "\"baggage/\""),
            ("baggage/a=b", "\"baggage/a=b\""),
        ] {
            let error = Extractors::parse_list(list).unwrap_err().to_string();
            let allowed = "the name of a header, baggage/KEY or tracestate/KEY";
            assert!(error.contains(entry) && error.contains(allowed), "{list}: {error}");
        }
        for (list, error) in [
            ("Traceparent", ExtractorError::TraceParent("Traceparent".to_owned())),
            ("x-tt-env,x-use-ppe", ExtractorError::Flag("x-use-ppe".to_owned())),
            ("x-lane,X-Lane", ExtractorError::Twice("X-Lane".to_owned())),
            ("baggage/a,Baggage/a", ExtractorError::Twice("Baggage/a".to_owned())),
            (" ", ExtractorError::Empty),
        ] {
            assert_eq!(Extractors::parse_list(list), Err(error), "{list}");
        }
        assert_eq!(Extractors::parse_list(&vec!["a"; 33].join(",")), Err(ExtractorError::TooMany));
        let spaced = Extractors::parse_list(" x-tt-env , baggage/a ").unwrap();
        assert_eq!(spaced.texts(), ["x-tt-env", "baggage/a"]);
        assert_eq!(Extractors::standard().texts().join(","), STANDARD);
    }

    #[test]
    fn only_what_is_in_the_list_names_a_lane() {
        let only = Extractors::parse_list("x-tt-env").unwrap();
        let lane = |name: &str| only.lane_of([(name, Some(&b"boe-a"[..]))]).lane;
        assert_eq!((lane("x-lane"), lane("X-TT-Env")), (LaneVerdict::Baseline, named("boe-a")));
    }

    #[test]
    fn a_stamp_leaves_the_other_members_of_a_list_alone() {
        let lane = Lane::parse("boe-a").unwrap();
        for (list, old, stamp) in [
            ("x-tt-env,x-lane", None, ("x-tt-env", "boe-a")),
            ("baggage/lane", None, ("baggage", "lane=boe-a")),
            ("Baggage/lane", Some("user=1;p, x=2 "), ("baggage", "user=1;p, x=2,lane=boe-a")),
            ("tracestate/sl", Some("v=1"), ("tracestate", "sl=boe-a,v=1")),
        ] {
            let list = Extractors::parse_list(list).unwrap();
            let headers: Vec<_> = old.iter().map(|old| ("Baggage", Some(old.as_bytes()))).collect();
            let headers = match stamp.0 {
                "tracestate" => vec![("TraceState", headers[0].1)],
                _ => headers,
            };
            let (name, value) = list.stamp(&headers, &lane).unwrap();
            assert_eq!((name, &*value), (stamp.0, stamp.1.as_bytes()));
        }
        assert_eq!(Extractors::none().stamp(&[], &lane), None);
    }

    #[test]
    fn disagreement_is_counted_and_with_ppe_refused() {
        let boe = judge(&[("x-lane-code", Some("b")), ("x-lane", Some("a"))]);
        assert_eq!(boe, Verdict { lane: named("a"), disagreed: true });
        let refused = LaneVerdict::Refused(Refusal::PpeDisagreement);
        assert_eq!(lane(&[("x-lane", Some("a")), ("x-lane-code", Some("ppe-1"))]), refused);
        assert_eq!(lane(&[("x-lane", Some("ppe-1")), ("baggage", Some("lane=ppe-2"))]), refused);
        assert_eq!(lane(&[("x-lane", Some("baseline")), ("baggage", Some("lane=ppe-2"))]), refused);
        assert_eq!(lane(&[("x-lane", Some("")), ("baggage", Some("lane=ppe-2"))]), named("ppe-2"));
    }

    #[test]
    fn use_ppe_obliges_the_value() {
        let refused = LaneVerdict::Refused(Refusal::UsePpeWithoutPpe);
        assert_eq!(lane(&[("x-use-ppe", Some("1")), ("x-tt-env", Some("boe"))]), refused);
        assert_eq!(lane(&[("x-use-ppe", Some("1"))]), refused);
        assert_eq!(lane(&[("x-use-ppe", Some("1")), ("x-tt-env", Some("ppe-x"))]), named("ppe-x"));
        assert_eq!(lane(&[("x-use-ppe", Some("0")), ("x-tt-env", Some("boe"))]), named("boe"));
    }

    proptest! {
        #[test]
        fn a_stamped_record_is_in_the_lane_by_any_list(
            list in proptest::sample::subsequence(
                vec!["x-lane", "baggage/lane", "x-tt-env", "tracestate/sl", "baggage/x"], 1..5).prop_shuffle(),
            headers in proptest::collection::vec(
                ("other|baggage|tracestate", proptest::option::of("[a-z=,; ]{0,12}")), 0..4)
        ) {
            let (list, lane) = (Extractors::parse(&list).unwrap(), Lane::parse("ppe-1").unwrap());
            let mut headers: Vec<_> =
                headers.iter().map(|(k, v)| (k.as_str(), v.as_deref().map(str::as_bytes))).collect();
            prop_assume!(list.lane_of(headers.clone()).lane == LaneVerdict::Baseline);
            prop_assume!(!list.lane_of(headers.clone()).disagreed);
            let (name, value) = list.stamp(&headers, &lane).unwrap();
            headers.push((name, Some(&value)));
            prop_assert_eq!(list.lane_of(headers).lane, LaneVerdict::Lane(lane));
        }

        #[test]
        fn any_headers_get_a_verdict(
            headers in proptest::collection::vec(
                ("x-lane|baggage|x-tt-env|x-use-ppe|other", proptest::option::of(any::<Vec<u8>>())), 0..6)
        ) {
            let all = headers.iter().map(|(k, v)| (k.as_str(), v.as_deref()));
            let first = Extractors::standard().lane_of(all.clone());
            prop_assert_eq!(first, Extractors::standard().lane_of(all));
        }
    }
}
