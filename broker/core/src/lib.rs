//! Pure decisions of the broker: what a batch does to a partition, what a request does to a group.
//!
//! No sockets, clocks or randomness: time and ids come in as arguments, effects go out as values.

pub mod epochs;
pub mod fold;
pub mod group;
pub mod offsets_log;
pub mod placement;
pub mod producer;
pub mod retention;

pub use fold::{Content, Fold, FoldError, Origin, OriginPosition};
