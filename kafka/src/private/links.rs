//! What may cross a link: the policy that a region keeps as the object `links/PEER`, and how its mirror
//! asks for it.
//!
//! A link without an object has the default policy. A policy is of one region: what crosses is what both
//! ends let cross. Invariant: a [`TopicPattern`] can match a topic name.

use std::fmt;

use bytes::{BufMut, BytesMut};

use super::{Message, put_error, take_error};
use crate::error::ErrorCode;
use crate::names::{RegionName, TopicName};
use crate::wire::{Reader, WireError, Writer};

/// Asks for the policies of this region's links. `since` is the generation of an earlier answer, 0 for
/// none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinksRequest {
    pub since: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinksAnswer {
    pub error: ErrorCode,
    /// Changes whenever a policy does; never 0.
    pub generation: u64,
    /// `None`: as in the generation that was asked about. A peer that is not named has the default.
    pub links: Option<Vec<(RegionName, LinkPolicy)>>,
}

/// What one region lets cross the link to one peer, both ways unless it says otherwise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkPolicy {
    /// Topics that cross, if `exclude` does not name them too. Internal topics never do.
    pub topics: Vec<TopicPattern>,
    pub exclude: Vec<TopicPattern>,
    /// Whether records of BOE lanes leave for the peer.
    pub boe_lanes: bool,
    /// Whether records of PPE lanes leave for the peer.
    pub ppe_lanes: bool,
    /// Whether the deletion of a topic crosses: told to the peer, and followed when the peer tells.
    pub deletions: bool,
    /// Nothing crosses, and there is no connection.
    pub paused: bool,
    /// Most bytes of units per second that leave for the peer, unpacked; 0 for no limit.
    pub rate_bytes_max: u64,
    pub congestion: Congestion,
}

/// What decides how fast a link sends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum Congestion {
    /// What measurements call for; today `bbr`.
    #[default]
    Auto = 0,
    /// BBR, with a window that follows what the path delivers, so that it does not fill queues.
    Bbr = 1,
    /// CUBIC: fair to old traffic, slow on long paths that lose packets.
    Cubic = 2,
}

/// Names of topics: a topic name in which `*` stands for any characters.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct TopicPattern(String);

/// Patterns in one list of a policy.
pub const PATTERNS_MAX: usize = 200;

/// Why a text is no pattern.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is no pattern of topic names: 1 to 249 letters, digits, '.', '_', '-', and '*' for any characters"
)]
pub struct PatternError(String);

impl Default for LinkPolicy {
    fn default() -> LinkPolicy {
        LinkPolicy {
            topics: vec![TopicPattern("*".to_owned())],
            exclude: Vec::new(),
            boe_lanes: true,
            ppe_lanes: false,
            deletions: false,
            paused: false,
            rate_bytes_max: 0,
            congestion: Congestion::Auto,
        }
    }
}

impl LinkPolicy {
    /// Whether a topic may cross, as far as this region decides it.
    pub fn lets(&self, topic: &TopicName) -> bool {
        let named = |patterns: &[TopicPattern]| patterns.iter().any(|pattern| pattern.matches(topic));
        !topic.is_internal() && named(&self.topics) && !named(&self.exclude)
    }
}

impl Congestion {
    pub const ALL: [Congestion; 3] = [Congestion::Auto, Congestion::Bbr, Congestion::Cubic];

    pub fn name(self) -> &'static str {
        match self {
            Congestion::Auto => "auto",
            Congestion::Bbr => "bbr",
            Congestion::Cubic => "cubic",
        }
    }

    pub fn parse(text: &str) -> Option<Congestion> {
        Congestion::ALL.into_iter().find(|congestion| congestion.name() == text)
    }
}

impl TopicPattern {
    pub fn parse(text: &str) -> Result<TopicPattern, PatternError> {
        let legal = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-' | '*');
        if text.is_empty() || text.len() > TopicName::MAX_LEN || !text.chars().all(legal) {
            return Err(PatternError(text.chars().take(TopicName::MAX_LEN).collect()));
        }
        Ok(TopicPattern(text.to_owned()))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    pub fn matches(&self, topic: &TopicName) -> bool {
        let (pattern, text) = (self.0.as_bytes(), topic.as_str().as_bytes());
        // Greedy with one point to come back to: linear in practice, no recursion.
        let (mut p, mut t) = (0, 0);
        let mut star: Option<(usize, usize)> = None;
        while t < text.len() {
            if p < pattern.len() && pattern[p] == b'*' {
                star = Some((p, t));
                p += 1;
            } else if p < pattern.len() && pattern[p] == text[t] {
                p += 1;
                t += 1;
            } else if let Some((at, taken)) = star {
                star = Some((at, taken + 1));
                p = at + 1;
                t = taken + 1;
            } else {
                return false;
            }
        }
        pattern[p..].iter().all(|c| *c == b'*')
    }
}

impl fmt::Display for TopicPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Message for LinksRequest {
    fn write(&self, out: &mut BytesMut) {
        out.put_u64(self.since);
    }

    fn read(from: &mut Reader) -> Result<Self, WireError> {
        Ok(LinksRequest { since: from.u64("since")? })
    }
}

impl Message for LinksAnswer {
    fn write(&self, out: &mut BytesMut) {
        put_error(out, self.error);
        out.put_u64(self.generation);
        out.option(self.links.as_ref(), |o, links| {
            o.array(links, |o, (peer, policy)| {
                o.text(peer.as_str());
                policy.write(o);
            });
        });
    }

    fn read(from: &mut Reader) -> Result<Self, WireError> {
        let link = |f: &mut Reader| {
            let peer = RegionName::parse(&f.text("peer")?).map_err(|_| WireError::Value("peer"))?;
            Ok((peer, LinkPolicy::read(f)?))
        };
        Ok(LinksAnswer {
            error: take_error(from)?,
            generation: from.u64("generation")?,
            links: from.option("links", |f| f.array("links", link))?,
        })
    }
}

impl Message for LinkPolicy {
    fn write(&self, out: &mut BytesMut) {
        out.array(&self.topics, |o, pattern| o.text(pattern.as_str()));
        out.array(&self.exclude, |o, pattern| o.text(pattern.as_str()));
        out.flag(self.boe_lanes);
        out.flag(self.ppe_lanes);
        out.flag(self.deletions);
        out.flag(self.paused);
        out.put_u64(self.rate_bytes_max);
        out.put_u8(self.congestion as u8);
    }

    fn read(from: &mut Reader) -> Result<Self, WireError> {
        let pattern = |f: &mut Reader| {
            TopicPattern::parse(&f.text("pattern")?).map_err(|_| WireError::Value("pattern"))
        };
        let congestion = |byte| Congestion::ALL.into_iter().find(|congestion| *congestion as u8 == byte);
        Ok(LinkPolicy {
            topics: from.array("topics", pattern)?,
            exclude: from.array("exclude", pattern)?,
            boe_lanes: from.flag("boe lanes")?,
            ppe_lanes: from.flag("ppe lanes")?,
            deletions: from.flag("deletions")?,
            paused: from.flag("paused")?,
            rate_bytes_max: from.u64("rate")?,
            congestion: congestion(from.u8("congestion")?).ok_or(WireError::Value("congestion"))?,
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn name(text: &str) -> TopicName {
        TopicName::parse(text).expect("legal")
    }

    fn patterns(list: &[&str]) -> Vec<TopicPattern> {
        list.iter().map(|text| TopicPattern::parse(text).expect("legal")).collect()
    }

    #[test]
    fn patterns_name_topics_and_internal_topics_never_cross() {
        let policy = |topics: &[&str], exclude: &[&str]| LinkPolicy {
            topics: patterns(topics),
            exclude: patterns(exclude),
            ..LinkPolicy::default()
        };
        let all = LinkPolicy::default();
        assert!(all.lets(&name("orders")));
        assert!(!all.lets(&name("__consumer_offsets")));
        assert!(!all.lets(&name("__transaction_state")));
        let some = policy(&["orders.*", "pay*.eu*"], &["*.tmp"]);
        for (topic, crosses) in [
            ("orders.a", true),
            ("orders.", true),
            ("orders", false),
            ("xorders.a", false),
            ("payments.eu.1", true),
            ("payments.us", false),
            ("orders.a.tmp", false),
        ] {
            assert_eq!(some.lets(&name(topic)), crosses, "{topic}");
        }
        assert!(!policy(&[], &[]).lets(&name("t")));
    }

    #[test]
    fn a_pattern_that_no_topic_can_match_is_refused() {
        for bad in ["", "a b", "a/b", "é", "a?", &"x".repeat(250)] {
            assert!(TopicPattern::parse(bad).is_err(), "{bad}");
        }
        let said = TopicPattern::parse("a b").expect_err("refused").to_string();
        assert!(said.starts_with("\"a b\" is no pattern of topic names"), "{said}");
    }

    proptest! {
        #[test]
        fn policies_survive_the_wire(
            (topics, exclude) in (
                proptest::collection::vec("[a-z.*-]{1,9}", 0..4),
                proptest::collection::vec("[a-z.*-]{1,9}", 0..4),
            ),
            (boe_lanes, ppe_lanes, deletions, paused) in any::<(bool, bool, bool, bool)>(),
            (rate_bytes_max, generation, named) in any::<(u64, u64, bool)>(),
            congestion in proptest::sample::select(Congestion::ALL.to_vec()),
        ) {
            let of = |list: Vec<String>| list.iter().map(|p| TopicPattern::parse(p).expect("legal")).collect();
            let policy = LinkPolicy {
                topics: of(topics), exclude: of(exclude), boe_lanes, ppe_lanes, deletions, paused, rate_bytes_max,
                congestion,
            };
            let peer = RegionName::parse("west-1").expect("legal");
            let links = named.then(|| vec![(peer, policy)]);
            let answer = LinksAnswer { error: ErrorCode::None, generation, links };
            let bytes = answer.encode();
            prop_assert_eq!(LinksAnswer::decode(bytes.clone()), Ok(answer));
            for cut in 0..bytes.len() {
                prop_assert!(LinksAnswer::decode(bytes.slice(..cut)).is_err());
            }
        }

        #[test]
        fn random_bytes_are_an_error_or_a_policy_and_never_a_panic(
            bytes in proptest::collection::vec(any::<u8>(), 0..200),
        ) {
            let _ = LinksAnswer::decode(bytes.into());
        }
    }
}
