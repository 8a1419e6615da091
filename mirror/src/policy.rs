//! What a topic of the peer asks of this region. Pure.
//!
//! What may cross at all is the link's policy (`kafka::private::LinkPolicy`). A topic with lanes crosses
//! only to a topic with lanes. Configurations that differ are resolved by one rule: the side that changed
//! last, by (time, region id), is right.

use std::collections::{BTreeMap, BTreeSet};

use kafka::private::TopicInfo;
use kafka::{RegionId, TimestampMs, TopicId};

/// What must be done here so that a topic of the peer can be received.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Plan {
    /// With its partitions and its whole configuration at once.
    Create,
    /// It is there; these steps bring it in line, none if all fit.
    Align(Align),
    /// It must not be received, and why.
    Hold(String),
    /// It was here and was deleted. A link does not bring a topic back.
    Deleted,
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
        return if deleted { Plan::Deleted } else { Plan::Create };
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

/// The peer says that its copy of `named`, an incarnation of a topic here, was deleted. It is deleted here
/// too if it is still that incarnation: one that was made again since then is another topic.
pub fn follows_deletion(local: Option<&TopicInfo>, named: TopicId) -> bool {
    local.is_some_and(|local| local.id == named)
}

#[cfg(test)]
mod tests {
    use kafka::TopicName;
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
    fn a_missing_topic_is_created_unless_it_was_deleted_here() {
        let theirs = topic(3, &[], 5);
        assert_eq!(plan(&theirs, WEST, None, EAST, false), Plan::Create);
        assert_eq!(plan(&theirs, WEST, None, EAST, true), Plan::Deleted);
    }

    #[test]
    fn a_deletion_is_followed_for_the_incarnation_that_it_names_alone() {
        let (old, new) = (topic(1, &[], 5), topic(1, &[], 6));
        assert!(follows_deletion(Some(&old), old.id));
        assert!(!follows_deletion(Some(&new), old.id), "it was made again");
        assert!(!follows_deletion(None, old.id));
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
