//! One Kafka connection, one Kafka cluster, as a client: for the mirror, the lane-router, the command line.
//!
//! `Connection` moves frames; `Cluster` knows who leads what. The producer and the consumers on top are
//! small and correct rather than complete: every wait has a deadline, every queue a bound.

mod cluster;
mod connection;
mod endpoint;
mod error;

pub use cluster::{Cluster, PartitionMetadata, TopicMetadata};
pub use connection::{Answer, ConnectOptions, Connection, Security};
pub use endpoint::{Endpoint, EndpointError};
pub use error::{ClientError, is_retriable};
