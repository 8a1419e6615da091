//! Pure rules of lanes: the lane of a record, the lanes of a batch, ownership intervals, the view of
//! a reader, and what a name is called in a lane.
//!
//! No clock, no socket, no randomness. Ownership is a function of the log: whoever asks, whenever,
//! at whatever lag, gets the same answer for a record.

pub mod batch;
pub mod cuts;
pub mod extract;
pub mod fold;
pub mod name;
pub mod summary;
pub mod view;
mod w3c;

pub use cuts::{Ask, CutAnswer, CutKeeper, CutKind};
pub use extract::{Extractors, LaneVerdict, Refusal, Verdict};
pub use fold::{
    Cut, CutRefused, GroupLane, Interval, LaneFold, LaneFoldError, LaneMarker, LaneRules, MarkerError,
};
pub use name::{Lane, LaneClass, LaneNameError};
pub use summary::{LaneSummary, RecordLane};
pub use view::{Showing, Side, View};
