//! Links between regions: what the peer lacks is sent, what it sends is applied once.
//!
//! `link` and `policy` decide and are pure; `quic` carries frames (the only file that knows quinn);
//! `source`, `append` and `sink` speak to the owners of partitions of the own region, `brokers` to all of
//! its brokers. A mirror keeps nothing on disk: the receiver's log is the checkpoint.

mod append;
mod brokers;
pub mod config;
pub mod link;
mod local;
mod metrics;
mod owners;
pub mod policy;
pub mod quic;
mod region;
pub mod service;
mod session;
mod sink;
mod source;
pub mod status;

pub use config::{Config, LinkConfig};
pub use service::{Running, StartError, start};
