//! Benchmarks: real brokers, real clients, one machine. `src/bin/bench.rs` is the command; each part below runs one
//! comparison and writes its table and raw figures into `docs/benchmarks/`. Loads are bounded in records and time.

#[cfg(feature = "cluster")]
pub mod bare;
pub mod broker;
#[cfg(feature = "cluster")]
pub mod cluster;
pub mod contender;
#[cfg(feature = "cluster")]
pub mod generator;
pub mod lanes;
pub mod load;
pub mod mirror;
pub mod profile;
pub mod report;
#[cfg(feature = "cluster")]
pub mod store;
pub mod table;

/// How much is measured.
#[derive(Clone, Copy, Debug)]
pub struct Scale {
    pub size: Size,
    /// Interleaved rounds; a figure is the median over them.
    pub rounds: usize,
}

/// How large the loads are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// Tiny: shows that everything runs, measures nothing, writes no report.
    Smoke,
    /// A few minutes in total, with fewer cells.
    Quick,
    Full,
}

impl Scale {
    pub fn is_full(self) -> bool {
        self.size == Size::Full
    }

    /// How many records a load has, given its number in the quick and in the full run.
    pub fn records(self, quick: u64, full: u64) -> u64 {
        match self.size {
            Size::Smoke => quick / 100,
            Size::Quick => quick,
            Size::Full => full,
        }
    }
}
