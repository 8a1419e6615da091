//! Real processes, real clients, faults.

pub mod maven;
pub mod peer;
pub mod probe;
pub mod usage;
