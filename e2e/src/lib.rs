//! Real processes, real clients, faults.

pub mod clients;
pub mod logread;
pub mod compare;
pub mod maven;
pub mod peer;
pub mod ports;
pub mod probe;
pub mod process;
pub mod relay;
pub mod tools;
pub mod usage;
pub mod wire;
