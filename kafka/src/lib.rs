//! The language that all services speak: names, offsets, frames, record batches, limits, errors.
//!
//! Pure: bytes in, values out. No sockets, no clock, no randomness. Formats come from the Apache
//! Kafka protocol (KIP-98 for record batches v2); what is ours (control batches 100 and up, API
//! keys 10000 and up) is described in `docs/STORAGE.md` and `docs/PROTOCOL-LINK.md`.

pub mod batch;
pub mod error;
pub mod limits;
pub mod names;
pub mod offset;
pub mod private;
pub mod wire;

pub use batch::{Batch, BatchError, BatchHeader};
pub use error::ErrorCode;
pub use names::{ClusterId, GroupId, RegionId, RegionName, TopicId, TopicName};
pub use offset::{BrokerId, LeaderEpoch, Offset, PartitionIndex, ProducerEpoch, ProducerId, TimestampMs};
