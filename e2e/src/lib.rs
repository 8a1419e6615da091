//! Real processes, real clients, faults.

pub mod clients;
pub mod compare;
pub mod logread;
pub mod maven;
pub mod peer;
pub mod ports;
pub mod probe;
pub mod process;
pub mod relay;
pub mod server;
pub mod tools;
pub mod usage;
pub mod wire;
