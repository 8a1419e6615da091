//! What crosses a link, and what a topic of the peer asks of this region. Pure.
//!
//! Internal topics never cross. A topic with lanes crosses only to a topic with lanes. Configurations
//! that differ are resolved by one rule: the side that changed last, by (time, region id), is right.

use std::collections::{BTreeMap, BTreeSet};

use kafka::private::TopicInfo;
use kafka::{RegionId, TimestampMs, TopicName};

/// Which topics and lanes cross.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    include: Vec<String>,
    exclude: Vec<String>,
    pub boe: bool,
    pub ppe: bool,
}

impl Policy {
    pub fn new(include: &[String], exclude: &[String], boe: bool, ppe: bool) -> Policy {
        Policy { include: include.to_vec(), exclude: exclude.to_vec(), boe, ppe }
    }

    pub fn crosses(&self, topic: &TopicName) -> bool {
        let named =
            |patterns: &[String]| patterns.iter().any(|p| matches(p.as_bytes(), topic.as_str().as_bytes()));
        !topic.is_internal() && named(&self.include) && !named(&self.exclude)
    }
}

/// What must be done here so that a topic of the peer can be received.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Plan {
    /// With its partitions and its whole configuration at once.
    Create,
    /// It is there; these steps bring it in line, none if all fit.
    Align(Align),
    /// It must not be received, and why.
    Hold(String),
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Align {
    /// Grow to this many partitions.
    pub grow_to: Option<i32>,
    /// Overrides to set, and to remove.
    pub set: Vec<(String, String)>,
    pub unset: Vec<String>,
    /// Keys that differ, whichever side wins.
    pub drift: Vec<String>,
}

/// `local` is the topic of the same name here; `deleted` says that it was here, under the peer's
/// present incarnation, and was deleted.
pub fn plan(
    theirs: &TopicInfo,
    their_region: RegionId,
    local: Option<&TopicInfo>,
    region: RegionId,
    deleted: bool,
) -> Plan {
    let Some(local) = local else {
        return match deleted {
            true => Plan::Hold("deleted in this region; a link does not bring a topic back".to_owned()),
            false => Plan::Create,
        };
    };
    let mut align = Align {
        grow_to: (theirs.partitions > local.partitions).then_some(theirs.partitions),
        drift: drift(theirs, local),
        ..Align::default()
    };
    let rank = |at: TimestampMs, region: RegionId| (at, region);
    if !align.drift.is_empty() && rank(theirs.changed_at, their_region) > rank(local.changed_at, region) {
        let wanted: BTreeMap<_, _> = theirs.configs.iter().cloned().collect();
        for key in &align.drift {
            match wanted.get(key) {
                Some(value) => align.set.push((key.clone(), value.clone())),
                None => align.unset.push(key.clone()),
            }
        }
    } else if theirs.lanes != local.lanes && align.drift.is_empty() {
        // The overrides agree, the defaults of the two clusters do not.
        return Plan::Hold(
            "lanes are on in one region and off in the other: set sealane.lanes on the topic".to_owned(),
        );
    }
    Plan::Align(align)
}

fn drift(theirs: &TopicInfo, local: &TopicInfo) -> Vec<String> {
    let a: BTreeSet<_> = theirs.configs.iter().collect();
    let b: BTreeSet<_> = local.configs.iter().collect();
    let keys: BTreeSet<_> = a.symmetric_difference(&b).map(|(key, _)| key.clone()).collect();
    keys.into_iter().collect()
}

/// `*` stands for any bytes; all else for itself.
fn matches(pattern: &[u8], text: &[u8]) -> bool {
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

#[cfg(test)]
mod tests {
    use kafka::TopicId;
    use uuid::Uuid;

    use super::*;

    fn name(text: &str) -> TopicName {
        TopicName::parse(text).expect("legal")
    }

    fn topic(partitions: i32, configs: &[(&str, &str)], at: i64) -> TopicInfo {
        let configs: Vec<_> = configs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        TopicInfo {
            name: name("t"),
            id: TopicId(Uuid::from_u128(at as u128)),
            partitions,
            lanes: configs.iter().any(|(k, v)| k == "sealane.lanes" && v == "true"),
            configs,
            changed_at: TimestampMs(at),
        }
    }

    const EAST: RegionId = RegionId(Uuid::from_u128(1));
    const WEST: RegionId = RegionId(Uuid::from_u128(2));

    #[test]
    fn patterns_name_topics_and_internal_topics_never_cross() {
        let policy = |include: &[&str], exclude: &[&str]| {
            let own = |list: &[&str]| list.iter().map(|s| (*s).to_owned()).collect::<Vec<_>>();
            Policy::new(&own(include), &own(exclude), true, false)
        };
        let all = policy(&["*"], &[]);
        assert!(all.crosses(&name("orders")));
        assert!(!all.crosses(&name("__consumer_offsets")));
        assert!(!all.crosses(&name("__transaction_state")));
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
            assert_eq!(some.crosses(&name(topic)), crosses, "{topic}");
        }
        assert!(!policy(&[], &[]).crosses(&name("t")));
    }

    #[test]
    fn a_missing_topic_is_created_unless_it_was_deleted_here() {
        let theirs = topic(3, &[], 5);
        assert_eq!(plan(&theirs, WEST, None, EAST, false), Plan::Create);
        assert!(
            matches!(plan(&theirs, WEST, None, EAST, true), Plan::Hold(reason) if reason.contains("deleted"))
        );
    }

    #[test]
    fn partitions_grow_to_the_larger_count_and_never_shrink() {
        let grow = |theirs, local| match plan(
            &topic(theirs, &[], 0),
            WEST,
            Some(&topic(local, &[], 0)),
            EAST,
            false,
        ) {
            Plan::Align(align) => align.grow_to,
            other => panic!("{other:?}"),
        };
        assert_eq!(grow(6, 3), Some(6));
        assert_eq!(grow(3, 6), None);
        assert_eq!(grow(3, 3), None);
    }

    #[test]
    fn of_two_configurations_the_last_change_wins_at_both_ends() {
        let old = topic(1, &[("retention.ms", "1"), ("segment.bytes", "5")], 10);
        let new = topic(1, &[("retention.ms", "2"), ("cleanup.policy", "delete")], 20);
        let Plan::Align(here) = plan(&new, WEST, Some(&old), EAST, false) else { panic!() };
        assert_eq!(here.drift, ["cleanup.policy", "retention.ms", "segment.bytes"]);
        assert_eq!(
            here.set,
            [("cleanup.policy".to_owned(), "delete".to_owned()), ("retention.ms".to_owned(), "2".to_owned())]
        );
        assert_eq!(here.unset, ["segment.bytes"]);
        let Plan::Align(there) = plan(&old, EAST, Some(&new), WEST, false) else { panic!() };
        assert_eq!((there.set.len(), there.unset.len(), there.drift.len()), (0, 0, 3));
        // At the same time, the region decides, and only one side changes.
        let (a, b) = (topic(1, &[("k", "1")], 7), topic(1, &[("k", "2")], 7));
        let Plan::Align(here) = plan(&b, WEST, Some(&a), EAST, false) else { panic!() };
        let Plan::Align(there) = plan(&a, EAST, Some(&b), WEST, false) else { panic!() };
        assert_eq!((here.set.len(), there.set.len()), (1, 0));
    }

    #[test]
    fn lanes_that_only_a_default_turns_on_hold_the_topic() {
        let mut theirs = topic(1, &[], 0);
        theirs.lanes = true;
        assert!(matches!(plan(&theirs, WEST, Some(&topic(1, &[], 0)), EAST, false), Plan::Hold(_)));
        let theirs = topic(1, &[("sealane.lanes", "true")], 9);
        let Plan::Align(align) = plan(&theirs, WEST, Some(&topic(1, &[], 0)), EAST, false) else { panic!() };
        assert_eq!(align.set, [("sealane.lanes".to_owned(), "true".to_owned())]);
    }
}
