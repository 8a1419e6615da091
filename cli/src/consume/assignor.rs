//! Kafka's range assignor: how the leader of a classic group shares partitions (KIP-54's "range").
//!
//! Pure. Every topic is shared among the members that subscribe to it, in member order, so that two
//! leaders with the same input decide alike.

use std::collections::BTreeMap;

/// Member id -> its topics.
pub type Subscriptions = BTreeMap<String, Vec<String>>;
/// Member id -> topic -> partitions.
pub type Assignments = BTreeMap<String, BTreeMap<String, Vec<i32>>>;

/// Shares the partitions of every subscribed topic; topics without a count are left out.
pub fn range(subscriptions: &Subscriptions, partition_counts: &BTreeMap<String, i32>) -> Assignments {
    let mut assignments: Assignments =
        subscriptions.keys().map(|member| (member.clone(), BTreeMap::new())).collect();
    for (topic, count) in partition_counts {
        let members: Vec<&String> = subscriptions
            .iter()
            .filter(|(_, topics)| topics.contains(topic))
            .map(|(member, _)| member)
            .collect();
        let Ok(number) = i32::try_from(members.len()) else { continue };
        let mut next = 0;
        for (index, member) in members.into_iter().enumerate() {
            let extra = i32::from((index as i32) < count % number);
            let end = next + count / number + extra;
            if end > next {
                let topics = assignments.entry(member.clone()).or_default();
                topics.insert(topic.clone(), (next..end).collect());
            }
            next = end;
        }
    }
    assignments
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_partition_goes_to_one_subscriber_and_shares_differ_by_one_at_most() {
        let topics = |list: &[&str]| list.iter().map(|topic| (*topic).to_owned()).collect::<Vec<_>>();
        let subscriptions = BTreeMap::from([
            ("a".to_owned(), topics(&["t", "u"])),
            ("b".to_owned(), topics(&["t"])),
            ("c".to_owned(), topics(&["t"])),
        ]);
        let counts = BTreeMap::from([("t".to_owned(), 7), ("u".to_owned(), 2), ("nobody's".to_owned(), 3)]);
        let shared = range(&subscriptions, &counts);
        assert_eq!(shared["a"]["t"], [0, 1, 2]);
        assert_eq!(shared["b"]["t"], [3, 4]);
        assert_eq!(shared["c"]["t"], [5, 6]);
        assert_eq!(shared["a"]["u"], [0, 1]);
        assert!(!shared["b"].contains_key("u"));
    }

    #[test]
    fn a_member_without_a_share_is_still_in_the_answer() {
        let subscriptions =
            BTreeMap::from([("a".to_owned(), vec!["t".to_owned()]), ("b".to_owned(), vec!["t".to_owned()])]);
        let shared = range(&subscriptions, &BTreeMap::from([("t".to_owned(), 1)]));
        assert_eq!(shared["a"]["t"], [0]);
        assert!(shared["b"].is_empty());
    }
}
