//! Chance by seed, for the stores that fail on purpose: the same seed gives the same faults.

use parking_lot::Mutex;

/// SplitMix64 (Steele, Lea, Flood 2014): small, and good enough to choose faults.
#[derive(Debug)]
pub struct Dice {
    state: Mutex<u64>,
}

impl Dice {
    pub fn new(seed: u64) -> Dice {
        Dice { state: Mutex::new(seed) }
    }

    pub fn next(&self) -> u64 {
        let mut state = self.state.lock();
        *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = *state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number from 0 to `max`, both included.
    pub fn up_to(&self, max: u64) -> u64 {
        match max.checked_add(1) {
            Some(count) => self.next() % count,
            None => self.next(),
        }
    }

    /// True `per_mille` times in a thousand.
    pub fn hits(&self, per_mille: u32) -> bool {
        per_mille > 0 && self.up_to(999) < u64::from(per_mille)
    }
}
