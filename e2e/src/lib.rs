//! Real processes, real clients, faults: what the tests of this crate and the benchmarks stand on.
//!
//! Nothing depends on this crate, and it shares no code with the product: it has its own frames, its own batches
//! and its own reader of the log, so that it cannot agree with a mistake.

pub mod bench;
pub mod clients;
#[cfg(feature = "cluster")]
pub mod cluster;
pub mod compare;
pub mod dice;
pub mod dump;
pub mod fenced;
pub mod http;
#[cfg(feature = "kubernetes")]
pub mod kubernetes;
pub mod lanes;
pub mod load;
pub mod logread;
pub mod maven;
pub mod peer;
pub mod probe;
pub mod process;
pub mod relay;
pub mod server;
pub mod services;
pub mod single;
#[cfg(feature = "cluster")]
pub mod soak;
pub mod stake;
#[cfg(feature = "cluster")]
pub mod stores;
pub mod tools;
pub mod usage;
pub mod wire;
