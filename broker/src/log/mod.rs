//! The log of a partition above the segment store: segments, their indexes, reading, recovery.
//!
//! Nothing here takes requests or keeps time. `partition` owns the state and its lock; this module
//! gives it segments that know where a batch lies, and rebuilds them from bytes after a restart.

pub mod batch_index;
pub mod checkpoint;
pub mod compact;
pub mod index;
pub mod mark;
pub mod open_files;
pub mod recovery;
pub mod scan;
pub mod segment;

/// The first bytes of `rest`, which goes on behind them.
fn take<const N: usize>(rest: &mut &[u8]) -> Option<[u8; N]> {
    let (head, tail) = rest.split_first_chunk::<N>()?;
    *rest = tail;
    Some(*head)
}

pub use batch_index::{BatchEntry, BatchIndex, BatchKind};
pub use open_files::OpenFiles;
pub use segment::{ActiveSegment, SealedSegment, SegmentContent, SegmentFiles};
