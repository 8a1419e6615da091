//! Which broker owns which partition: what should change, given who is alive.
//!
//! Pure. Bytes do not move with ownership, so balance is counted in partitions. Deterministic: the same
//! input gives the same plan, so a controller that repeats its predecessor's work changes nothing.

use std::collections::{BTreeMap, BTreeSet};

/// How one partition stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place<K> {
    pub partition: K,
    /// The broker that owns it, alive or not.
    pub owner: Option<i32>,
    /// The broker that it is being handed to.
    pub moving_to: Option<i32>,
}

/// Who may own partitions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Brokers {
    pub alive: BTreeSet<i32>,
    /// Of those alive: gives away what it has and gets nothing.
    pub draining: BTreeSet<i32>,
}

/// What is to be done with one partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step<K> {
    /// Its owner is gone, or it never had one.
    Assign { partition: K, to: i32 },
    /// Its owner lives and shall hand it over; takes back another wish.
    Move { partition: K, to: i32 },
    /// The hand-over has lost its aim.
    Stay { partition: K },
}

/// Most hand-overs under way at one time.
pub const MOVES_MAX: usize = 64;

/// What should change. Nothing, when nobody is left to own anything.
pub fn plan<K: Copy + Ord>(places: &[Place<K>], brokers: &Brokers) -> Vec<Step<K>> {
    let targets: BTreeSet<i32> = brokers.alive.difference(&brokers.draining).copied().collect();
    // With everybody draining, the partitions of the dead still need somebody.
    let heirs = if targets.is_empty() { &brokers.alive } else { &targets };
    let mut load: BTreeMap<i32, usize> = heirs.iter().map(|broker| (*broker, 0)).collect();
    for place in places {
        if let Some(count) = place.holder(&brokers.alive).and_then(|broker| load.get_mut(&broker)) {
            *count += 1;
        }
    }
    let mut steps = Vec::new();
    let mut moving = places.iter().filter(|place| place.moving_to.is_some()).count();
    let mut settled: BTreeMap<i32, Vec<K>> = BTreeMap::new();
    for place in places {
        let owner = place.owner.filter(|owner| brokers.alive.contains(owner));
        match (owner, place.moving_to) {
            (None, aim) => {
                let aim = aim.filter(|to| load.contains_key(to));
                let Some(to) = aim.or_else(|| least(&load)) else { return Vec::new() };
                if aim.is_none() {
                    grow(&mut load, to);
                }
                steps.push(Step::Assign { partition: place.partition, to });
            }
            (Some(_), Some(to)) if !brokers.alive.contains(&to) => {
                steps.push(Step::Stay { partition: place.partition });
            }
            (Some(_), Some(_)) => {}
            (Some(owner), None) if !targets.is_empty() && !targets.contains(&owner) => {
                if moving < MOVES_MAX
                    && let Some(to) = least(&load)
                {
                    moving += 1;
                    grow(&mut load, to);
                    steps.push(Step::Move { partition: place.partition, to });
                }
            }
            (Some(owner), None) => settled.entry(owner).or_default().push(place.partition),
        }
    }
    balance(&mut steps, &mut load, settled, MOVES_MAX.saturating_sub(moving));
    steps
}

/// From the most loaded to the least loaded, until they are within one of each other.
fn balance<K: Copy>(
    steps: &mut Vec<Step<K>>,
    load: &mut BTreeMap<i32, usize>,
    mut settled: BTreeMap<i32, Vec<K>>,
    moves_max: usize,
) {
    for _ in 0..moves_max {
        let Some(to) = least(load) else { return };
        let fullest = load.iter().filter(|(broker, _)| settled.get(broker).is_some_and(|s| !s.is_empty()));
        let Some((from, most)) = fullest.max_by_key(|(broker, count)| (**count, -**broker)) else { return };
        let (from, most) = (*from, *most);
        if most <= load[&to] + 1 {
            return;
        }
        let Some(partition) = settled.get_mut(&from).and_then(Vec::pop) else { return };
        load.insert(from, most - 1);
        grow(load, to);
        steps.push(Step::Move { partition, to });
    }
}

fn grow(load: &mut BTreeMap<i32, usize>, broker: i32) {
    *load.entry(broker).or_default() += 1;
}

fn least(load: &BTreeMap<i32, usize>) -> Option<i32> {
    load.iter().min_by_key(|(broker, count)| (**count, **broker)).map(|(broker, _)| *broker)
}

impl<K> Place<K> {
    /// Whom it counts for.
    fn holder(&self, alive: &BTreeSet<i32>) -> Option<i32> {
        self.moving_to.or(self.owner).filter(|broker| alive.contains(broker))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn apply(places: &mut [Place<usize>], steps: &[Step<usize>]) {
        for step in steps {
            match *step {
                Step::Assign { partition, to } => {
                    places[partition].owner = Some(to);
                    places[partition].moving_to = None;
                }
                Step::Move { partition, to } => places[partition].moving_to = Some(to),
                Step::Stay { partition } => places[partition].moving_to = None,
            }
        }
    }

    fn hand_over(places: &mut [Place<usize>]) {
        for place in places {
            if let Some(to) = place.moving_to.take() {
                place.owner = Some(to);
            }
        }
    }

    fn counts(places: &[Place<usize>]) -> BTreeMap<i32, usize> {
        let mut counts = BTreeMap::new();
        places.iter().filter_map(|place| place.owner).for_each(|owner| grow(&mut counts, owner));
        counts
    }

    fn alive(ids: &[i32]) -> Brokers {
        Brokers { alive: ids.iter().copied().collect(), draining: BTreeSet::new() }
    }

    fn fresh(count: usize) -> Vec<Place<usize>> {
        (0..count).map(|partition| Place { partition, owner: None, moving_to: None }).collect()
    }

    #[test]
    fn new_partitions_are_spread_and_a_second_look_changes_nothing() {
        let mut places = fresh(10);
        let brokers = alive(&[1, 2, 3]);
        let steps = plan(&places, &brokers);
        apply(&mut places, &steps);
        assert_eq!(counts(&places), BTreeMap::from([(1, 4), (2, 3), (3, 3)]));
        assert_eq!(plan(&places, &brokers), []);
    }

    #[test]
    fn a_broker_that_joins_gets_its_share_and_one_that_dies_leaves_it_to_all() {
        let mut places = fresh(12);
        let steps = plan(&places, &alive(&[1, 2, 3]));
        apply(&mut places, &steps);
        let steps = plan(&places, &alive(&[1, 2, 3, 4]));
        assert_eq!(steps.len(), 3, "no more moves than the newcomer's share: {steps:?}");
        apply(&mut places, &steps);
        hand_over(&mut places);
        assert!(counts(&places).values().all(|count| *count == 3));
        let steps = plan(&places, &alive(&[1, 2, 4]));
        apply(&mut places, &steps);
        assert_eq!(counts(&places), BTreeMap::from([(1, 4), (2, 4), (4, 4)]));
    }

    #[test]
    fn nobody_alive_means_nothing_to_do() {
        assert_eq!(plan(&fresh(3), &alive(&[])), []);
    }

    #[test]
    fn a_draining_broker_gives_everything_away_unless_it_is_the_last() {
        let mut places = fresh(9);
        let steps = plan(&places, &alive(&[1, 2]));
        apply(&mut places, &steps);
        let draining = Brokers { draining: BTreeSet::from([2]), ..alive(&[1, 2]) };
        let steps = plan(&places, &draining);
        apply(&mut places, &steps);
        hand_over(&mut places);
        assert_eq!(counts(&places), BTreeMap::from([(1, 9)]));
        let all = Brokers { draining: BTreeSet::from([1]), ..alive(&[1]) };
        assert_eq!(plan(&places, &all), []);
    }

    proptest! {
        #[test]
        fn whatever_happens_everything_ends_owned_and_balanced(
            start in proptest::collection::vec((proptest::option::of(1..6), proptest::option::of(1..6)), 1..200),
            ids in proptest::collection::btree_set(1..6, 1..5),
            drain in proptest::collection::btree_set(1..6, 0..3),
        ) {
            let brokers = Brokers { draining: drain.intersection(&ids).copied().collect(), alive: ids };
            let mut places: Vec<Place<usize>> = start
                .into_iter()
                .enumerate()
                .map(|(partition, (owner, moving_to))| Place { partition, owner, moving_to })
                .collect();
            let mut rounds = 0;
            loop {
                let steps = plan(&places, &brokers);
                if steps.is_empty() && places.iter().all(|place| place.moving_to.is_none()) {
                    break;
                }
                apply(&mut places, &steps);
                prop_assert!(places.iter().filter(|place| place.moving_to.is_some()).count() <= 200);
                hand_over(&mut places);
                rounds += 1;
                prop_assert!(rounds < 20, "does not come to rest");
            }
            let targets: BTreeSet<i32> = brokers.alive.difference(&brokers.draining).copied().collect();
            let counts = counts(&places);
            prop_assert!(places.iter().all(|place| place.owner.is_some_and(|o| brokers.alive.contains(&o))));
            if !targets.is_empty() {
                prop_assert!(counts.keys().all(|owner| targets.contains(owner)));
                let least = targets.iter().map(|t| counts.get(t).copied().unwrap_or(0)).min().unwrap_or(0);
                prop_assert!(counts.values().max().copied().unwrap_or(0) <= least + 1);
            }
        }
    }
}
