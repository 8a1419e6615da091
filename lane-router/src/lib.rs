//! The entry to a lane: a Kafka-aware proxy that names a connection's lane.
//!
//! It appends the lane to client ids, group ids and transactional ids, and tells clients its own addresses
//! instead of the brokers'. Every other frame passes as bytes; answers leave in request order. It decides
//! nothing about who owns a record, and puts no lane into one: the partition's owner does. Holds no state
//! that a restart would lose.

mod brokers;
mod config;
mod directory;
mod entry;
mod produce;
mod rewrite;
mod service;
mod session;
mod upstream;

pub use config::Config;
pub use service::{Running, StartError, start};
