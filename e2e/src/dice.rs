//! Chance by seed: the same seed gives the same draws, on every machine. Not for secrets.

/// A xorshift generator.
#[derive(Clone, Debug)]
pub struct Dice {
    state: u64,
}

impl Dice {
    pub fn new(seed: u64) -> Dice {
        // Neighbouring seeds must not give neighbouring draws; zero would stay zero.
        let mixed = (seed ^ 0x9E37_79B9_7F4A_7C15).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        Dice { state: mixed | 1 }
    }

    /// A number in `0..end`.
    pub fn below(&mut self, end: u64) -> u64 {
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        (self.state >> 11) % end.max(1)
    }

    /// A number in `from..end`.
    pub fn between(&mut self, from: u64, end: u64) -> u64 {
        from + self.below(end - from)
    }
}
