//! The Kafka-compatible broker: server, API handlers, partitions, groups, lanes.
//!
//! `log` and `partition` keep the bytes; `server` speaks to connections; `api` gives each request its
//! meaning; `coordinator` and `lanes` own groups and views; `cluster` says which broker owns what, `peers` asks it;
//! `service` puts them together.

mod api;
pub mod broker;
mod clock;
pub mod cluster;
pub mod config;
mod configs;
mod control;
mod coordinator;
mod health;
mod judge_everywhere;
mod lanes;
pub mod log;
mod metrics;
pub mod partition;
mod peers;
mod producer_ids;
pub mod server;
pub mod service;
mod switches;
mod topic_changes;
pub mod topics;
mod waiting;

pub use broker::Broker;
pub use config::Config;
