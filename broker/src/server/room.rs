//! Memory for requests that are not all here yet, bounded for the whole broker.
//!
//! The first [`FREE_MAX`] bytes of a frame are read for nothing, so small requests never wait here. A
//! larger one claims its length before more of it is read, and first come is first served. Its claim
//! ends when the request starts: what it appends is then counted as waiting for a sync.

use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Frames up to this size need no room.
pub const FREE_MAX: usize = 1 << 20;

/// Who holds room and sends nothing for so long gives it back, with the connection.
pub const STALL_MAX: Duration = Duration::from_secs(30);

/// Room for large frames, shared by all connections.
pub struct FrameRoom {
    bytes: Arc<Semaphore>,
}

/// What one connection has of it.
#[derive(Default)]
pub enum Claim {
    #[default]
    None,
    Waiting(BoxFuture<'static, Option<OwnedSemaphorePermit>>),
    /// For a frame that is whole with so many bytes, its length included.
    Held {
        _permit: OwnedSemaphorePermit,
        whole: usize,
    },
}

impl FrameRoom {
    /// Room for `total` bytes, but always for one request of the largest size.
    pub fn new(total: u64, request_max: u32) -> FrameRoom {
        // The length before a frame counts too.
        let total = total.max(u64::from(request_max) + 4).min(Semaphore::MAX_PERMITS as u64);
        FrameRoom { bytes: Arc::new(Semaphore::new(total as usize)) }
    }

    /// Bytes that are free now.
    pub fn free(&self) -> usize {
        self.bytes.available_permits()
    }

    fn claim(&self, len: usize) -> Claim {
        let bytes = self.bytes.clone();
        // A frame is at most request_bytes_max long, which is a u32.
        let wanted = u32::try_from(len).unwrap_or(u32::MAX);
        Claim::Waiting(Box::pin(async move { bytes.acquire_many_owned(wanted).await.ok() }))
    }
}

impl Claim {
    /// Asks for the room of the frame of `len` bytes of which `have` are read. True if the rest may be
    /// read now.
    pub fn covers(&mut self, room: &FrameRoom, len: usize, have: usize) -> bool {
        if len <= FREE_MAX || have < FREE_MAX {
            return true;
        }
        if matches!(self, Claim::None) {
            *self = room.claim(len);
        }
        matches!(self, Claim::Held { .. })
    }

    /// Completes when the room that was asked for is there; never, if none was.
    pub async fn granted(&mut self, whole: usize) {
        let permit = std::future::poll_fn(|cx| match self {
            Claim::Waiting(future) => future.as_mut().poll(cx),
            Claim::None | Claim::Held { .. } => Poll::Pending,
        })
        .await;
        // The semaphore is never closed.
        *self = permit.map_or(Claim::None, |_permit| Claim::Held { _permit, whole });
    }

    pub fn is_waiting(&self) -> bool {
        matches!(self, Claim::Waiting(_))
    }

    /// Bytes that the frame still lacks, where it has its room.
    pub fn missing(&self, have: usize) -> Option<usize> {
        match self {
            Claim::Held { whole, .. } => Some(whole.saturating_sub(have)).filter(|missing| *missing > 0),
            Claim::None | Claim::Waiting(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[tokio::test]
    async fn a_large_frame_waits_for_room_and_a_small_one_does_not() {
        let room = FrameRoom::new(10 << 20, 8 << 20);
        let (mut first, mut second, mut small) = (Claim::None, Claim::None, Claim::None);
        assert!(small.covers(&room, FREE_MAX, 100));
        assert!(first.covers(&room, 8 << 20, 100), "its first bytes are free");
        assert!(!first.covers(&room, 8 << 20, FREE_MAX));
        first.granted(8 << 20).await;
        assert!(first.covers(&room, 8 << 20, FREE_MAX));
        assert_eq!(first.missing(FREE_MAX), Some(7 << 20));
        assert_eq!(room.free(), 2 << 20);

        assert!(!second.covers(&room, 3 << 20, FREE_MAX));
        let waited = tokio::time::timeout(Duration::from_millis(20), second.granted(3 << 20)).await;
        assert!(waited.is_err() && second.is_waiting(), "there is no room for two");
        assert!(small.covers(&room, FREE_MAX, FREE_MAX - 1));
        drop(first);
        second.granted(3 << 20).await;
        assert_eq!(room.free(), 7 << 20);
    }

    #[test]
    fn one_request_of_the_largest_size_always_fits() {
        let room = FrameRoom::new(1, 100 << 20);
        // As a frame stands on the wire: behind its length.
        let Claim::Waiting(claim) = room.claim((100 << 20) + 4) else { panic!("it is claimed") };
        assert!(claim.now_or_never().flatten().is_some());
    }
}
