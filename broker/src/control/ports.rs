//! Which port a new lane's listener gets: one never used if there is any, else the one that was given
//! back longest ago, so that a client that still holds an old address meets nobody, for as long as
//! possible, rather than another lane.

use std::collections::BTreeSet;
use std::ops::RangeInclusive;

/// A free port of `range`. `released` lists ports given back by deleted lanes, oldest first.
pub fn choose(range: RangeInclusive<u16>, taken: &BTreeSet<u16>, released: &[u16]) -> Option<u16> {
    let never_used = range.clone().find(|port| !taken.contains(port) && !released.contains(port));
    never_used.or_else(|| released.iter().copied().find(|port| range.contains(port) && !taken.contains(port)))
}

/// `released` after `port` has been given back; forgets what the range no longer holds.
pub fn give_back(range: RangeInclusive<u16>, released: &[u16], port: u16) -> Vec<u16> {
    let others = released.iter().copied().filter(|other| *other != port && range.contains(other));
    others.chain([port]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_released_port_comes_last_and_the_oldest_of_them_first() {
        let range = 10..=13;
        let taken = BTreeSet::from([10]);
        let released = give_back(range.clone(), &give_back(range.clone(), &[], 12), 11);
        assert_eq!(released, [12, 11]);
        assert_eq!(choose(range.clone(), &taken, &released), Some(13));
        let taken = BTreeSet::from([10, 13]);
        assert_eq!(choose(range.clone(), &taken, &released), Some(12));
        let taken = BTreeSet::from([10, 12, 13]);
        assert_eq!(choose(range.clone(), &taken, &released), Some(11));
        let taken = BTreeSet::from([10, 11, 12, 13]);
        assert_eq!(choose(range, &taken, &released), None);
    }

    #[test]
    fn the_list_of_released_ports_never_outgrows_the_range() {
        let mut released = Vec::new();
        for turn in 0..100 {
            released = give_back(10..=12, &released, 10 + turn % 3);
        }
        assert_eq!(released.len(), 3);
        assert_eq!(give_back(11..=12, &released, 11).len(), 2);
    }
}
