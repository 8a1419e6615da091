//! Lanes in the broker: judging what is produced, knowing who reads, showing each reader its records.
//!
//! The rules are pure and live in `lane-core`; the log decides who owns a record. This module keeps what
//! is not in the log: which lanes exist, which connection reads for which group, and the cuts under way.

pub mod classify;
