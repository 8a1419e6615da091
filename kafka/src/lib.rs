//! The language that all services speak: names, offsets, frames, record batches, limits, errors.
//!
//! Pure: bytes in, values out. No sockets, no clock, no randomness. Formats come from the Apache
//! Kafka protocol (KIP-98 for record batches v2); what is ours (control batches 100 and up, API
//! keys 10000 and up) is described in `docs/STORAGE.md` and `docs/PROTOCOL-LINK.md`.

pub mod api;
pub mod batch;
pub mod cold;
pub mod compress;
pub mod control;
pub mod error;
pub mod fetch;
pub mod frame;
pub mod limits;
pub mod names;
pub mod offset;
pub mod primitive;
pub mod private;
pub mod produce;
pub mod record;
pub mod wire;

/// The messages of the cold APIs, and the text type that all codecs share.
pub use kafka_protocol::messages;
pub use kafka_protocol::protocol::StrBytes;

pub use api::{ADVERTISED, ApiRange};
pub use batch::{Batch, BatchError, BatchHeader};
pub use control::{LaneCut, LanePurge, Marker, MirrorMarker, marker_batch, parse_marker};
pub use error::ErrorCode;
pub use frame::{FrameError, RequestHeader};
pub use names::{ClusterId, GroupId, RegionId, RegionName, TopicId, TopicName};
pub use offset::{BrokerId, LeaderEpoch, Offset, PartitionIndex, ProducerEpoch, ProducerId, TimestampMs};
pub use primitive::DecodeError;
pub use record::{BatchBuilder, Header, Record, Records};
