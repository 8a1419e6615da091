//! The Kafka-compatible broker: server, API handlers, partitions, groups, lanes.
//!
//! `log` and `partition` keep the bytes; `server` speaks to connections; `api` gives each request its
//! meaning; `coordinator` and `lanes` own groups and views; `service` puts them together.

mod lanes;
pub mod log;
pub mod partition;
mod switches;
