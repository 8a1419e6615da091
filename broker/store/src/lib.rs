//! The two seams under the broker: segment store and metadata store, and their implementations.
//!
//! Both speak bytes, positions and versions, never Kafka. The segment implementations stand at the
//! top level, those of the metadata store in [`meta`].

#[cfg(test)]
mod conformance;
#[cfg(test)]
mod crash;
mod data_dir;
mod dice;
mod error;
pub mod meta;
mod path;
pub mod remote;
pub mod segment;
pub mod shared;

pub use data_dir::{DataDir, FORMAT_KNOWN};
pub use dice::Dice;
pub use error::StoreError;
pub use meta::{Change, Item, Lease, MetaError, MetaStore, Version, Watch, WeakLease};
pub use path::{PathError, StorePath};
pub use remote::{Life, LifeLog, Remote};
pub use segment::{Disk, Entry, Faults, Flaky, Memory, Reader, SegmentStore, SyncPoint, Volatile, Writer};
