//! Which broker owns which partition: what should change, given who is alive.
//!
//! Pure. Bytes do not move with ownership: what counts is the work to come, a little for each partition
//! and more for those that are written and read. Deterministic: the same input gives the same plan, so a
//! controller that repeats its predecessor's work changes nothing.

use std::collections::{BTreeMap, BTreeSet};

/// How one partition stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place<K> {
    pub partition: K,
    /// The broker that owns it, alive or not.
    pub owner: Option<i32>,
    /// The broker that it is being handed to.
    pub moving_to: Option<i32>,
    /// Bytes written and read each second.
    pub rate: u64,
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

/// Bytes each second that are as much work as a partition that nobody uses.
const IDLE_RATE: u64 = 100_000;
/// Loads are balanced to a tenth of what one broker's share of the rates is: rates are never still.
const SLACK: u64 = 10;

/// What should change. Nothing, when nobody is left to own anything.
pub fn plan<K: Copy + Ord>(places: &[Place<K>], brokers: &Brokers) -> Vec<Step<K>> {
    let targets: BTreeSet<i32> = brokers.alive.difference(&brokers.draining).copied().collect();
    // With everybody draining, the partitions of the dead still need somebody.
    let heirs = if targets.is_empty() { &brokers.alive } else { &targets };
    let mut load: Loads = heirs.iter().map(|broker| (*broker, 0)).collect();
    for place in places {
        if let Some(sum) = place.holder(&brokers.alive).and_then(|broker| load.get_mut(&broker)) {
            *sum += place.weight();
        }
    }
    let rates: u64 = places.iter().map(|place| place.rate).fold(0, u64::saturating_add);
    let slack = rates / (heirs.len().max(1) as u64 * SLACK);
    let mut steps = Vec::new();
    let mut moving = places.iter().filter(|place| place.moving_to.is_some()).count();
    let mut settled: BTreeMap<i32, Vec<(K, u64)>> = BTreeMap::new();
    for place in places {
        let owner = place.owner.filter(|owner| brokers.alive.contains(owner));
        match (owner, place.moving_to) {
            (None, aim) => {
                let aim = aim.filter(|to| load.contains_key(to));
                let Some(to) = aim.or_else(|| least(&load)) else { return Vec::new() };
                if aim.is_none() {
                    grow(&mut load, to, place.weight());
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
                    grow(&mut load, to, place.weight());
                    steps.push(Step::Move { partition: place.partition, to });
                }
            }
            (Some(owner), None) => settled.entry(owner).or_default().push((place.partition, place.weight())),
        }
    }
    balance(&mut steps, &mut load, settled, slack, MOVES_MAX.saturating_sub(moving));
    steps
}

/// The weights of what each broker holds, or is about to.
type Loads = BTreeMap<i32, u64>;

/// From the most loaded to the least loaded, the heaviest that leaves the receiver below the giver.
fn balance<K: Copy>(
    steps: &mut Vec<Step<K>>,
    load: &mut Loads,
    mut settled: BTreeMap<i32, Vec<(K, u64)>>,
    slack: u64,
    moves_max: usize,
) {
    for _ in 0..moves_max {
        let Some(to) = least(load) else { return };
        let mut givers: Vec<(i32, u64)> = load.iter().map(|(broker, sum)| (*broker, *sum)).collect();
        givers.sort_by_key(|(broker, sum)| (std::cmp::Reverse(*sum), *broker));
        let found = givers.into_iter().find_map(|(from, most)| {
            let gap = most.checked_sub(load[&to] + slack)?;
            let held = settled.get(&from)?.iter().enumerate();
            let fitting = held.filter(|(_, (_, weight))| *weight < gap);
            let (at, (_, weight)) = fitting.max_by_key(|(at, (_, weight))| (*weight, *at))?;
            Some((from, at, *weight))
        });
        let Some((from, at, weight)) = found else { return };
        let Some(held) = settled.get_mut(&from) else { return };
        let (partition, _) = held.remove(at);
        load.entry(from).and_modify(|sum| *sum -= weight);
        grow(load, to, weight);
        steps.push(Step::Move { partition, to });
    }
}

fn grow(load: &mut Loads, broker: i32, weight: u64) {
    *load.entry(broker).or_default() += weight;
}

fn least(load: &Loads) -> Option<i32> {
    load.iter().min_by_key(|(broker, sum)| (**sum, **broker)).map(|(broker, _)| *broker)
}

impl<K> Place<K> {
    fn weight(&self) -> u64 {
        // No disk and no network is that fast, and sums must not overflow.
        IDLE_RATE + self.rate.min(1 << 40)
    }

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
        for owner in places.iter().filter_map(|place| place.owner) {
            *counts.entry(owner).or_default() += 1;
        }
        counts
    }

    fn alive(ids: &[i32]) -> Brokers {
        Brokers { alive: ids.iter().copied().collect(), draining: BTreeSet::new() }
    }

    fn fresh(count: usize) -> Vec<Place<usize>> {
        (0..count).map(|partition| Place { partition, owner: None, moving_to: None, rate: 0 }).collect()
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

    #[test]
    fn partitions_that_much_is_written_to_do_not_stay_together() {
        let mut places = fresh(6);
        let brokers = alive(&[1, 2, 3]);
        let steps = plan(&places, &brokers);
        apply(&mut places, &steps);
        let first = places[0].owner;
        let together: Vec<usize> = (0..6).filter(|at| places[*at].owner == first).collect();
        together.iter().for_each(|at| places[*at].rate = 50_000_000);
        let steps = plan(&places, &brokers);
        apply(&mut places, &steps);
        hand_over(&mut places);
        assert_ne!(places[together[0]].owner, places[together[1]].owner, "{steps:?}");
        // Rates are never still: a little more or less changes nothing.
        places[together[0]].rate = 52_000_000;
        assert_eq!(plan(&places, &brokers), []);
    }

    proptest! {
        #[test]
        fn loads_come_to_rest_and_no_move_would_make_them_evener(
            rates in proptest::collection::vec(prop_oneof![Just(0u64), 0u64..100_000_000], 1..100),
            ids in proptest::collection::btree_set(1..6, 1..5),
        ) {
            let brokers = Brokers { alive: ids, draining: BTreeSet::new() };
            let mut places = fresh(rates.len());
            places.iter_mut().zip(&rates).for_each(|(place, rate)| place.rate = *rate);
            let mut rounds = 0;
            loop {
                let steps = plan(&places, &brokers);
                if steps.is_empty() {
                    break;
                }
                apply(&mut places, &steps);
                hand_over(&mut places);
                rounds += 1;
                prop_assert!(rounds < 20, "does not come to rest");
            }
            let mut load: Loads = brokers.alive.iter().map(|broker| (*broker, 0)).collect();
            places.iter().for_each(|place| grow(&mut load, place.owner.unwrap(), place.weight()));
            let (least, most) = (load.values().min().unwrap(), load.values().max().unwrap());
            let heaviest = places.iter().map(Place::weight).max().unwrap();
            let share = rates.iter().sum::<u64>() / brokers.alive.len() as u64;
            prop_assert!(most - least <= heaviest + share / SLACK, "{load:?}");
        }

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
                .map(|(partition, (owner, moving_to))| Place { partition, owner, moving_to, rate: 0 })
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
