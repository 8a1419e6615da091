//! Listeners and connections: bytes to requests, answers to bytes, in order.
//!
//! Knows frames and limits, not what a request means; that is `api`.

mod connection;
mod listener;
mod room;
mod stream;

pub use crate::api::Principal;
pub use listener::{BindError, BoundListener, ListenerInfo};
pub use room::FrameRoom;
