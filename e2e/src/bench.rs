//! Benchmarks: real brokers, real clients, one machine. `src/bin/bench.rs` is the command; each part below runs one
//! comparison and writes its table and raw figures into `docs/benchmarks/`. Loads are bounded in records and time.

pub mod broker;
pub mod contender;
pub mod lanes;
pub mod load;
pub mod mirror;
pub mod profile;
pub mod report;
pub mod table;

/// How much is measured.
#[derive(Clone, Copy, Debug)]
pub struct Scale {
    /// A few minutes in total: fewer cells, smaller loads.
    pub quick: bool,
    /// Interleaved rounds; a figure is the median over them.
    pub rounds: usize,
}
