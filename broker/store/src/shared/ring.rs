//! The blocks of a life's log that this broker still has something to do with.
//!
//! Pure. The last one is being written, the others wait to become durable, are durable and hold tails
//! that are read from here, or are only counted because the log still needs them. Owns the numbers of
//! the blocks and the accounts: how long the log is, how much memory it takes.

use std::collections::VecDeque;

use bytes::Bytes;

use super::frame::Payload;
use super::tree::Piece;
use crate::Life;
use crate::remote::{BLOCK_BYTES_MAX, Block};

#[derive(Debug)]
pub(super) struct Ring {
    life: Life,
    blocks: VecDeque<Held>,
    /// The number of the first of `blocks`.
    first: u64,
    /// Blocks below are durable.
    durable: u64,
    is_in_flight: bool,
    /// Blocks below are no longer needed, as a durable block says.
    lowest: u64,
    /// Bytes of all blocks ever.
    written: u64,
    /// Bytes of payload in memory.
    memory: u64,
    /// Bytes of payload that are not durable.
    pending: u64,
    capacity: usize,
}

#[derive(Debug)]
struct Held {
    payload: Content,
    len: usize,
    /// `written` before this block.
    start: u64,
    lowest: u64,
    /// Pieces of the tree that are in this block.
    pieces: usize,
}

#[derive(Debug)]
enum Content {
    Open(Payload),
    Closed(Bytes),
    Dropped,
}

impl Ring {
    pub fn new(life: Life) -> Ring {
        Ring {
            life,
            blocks: VecDeque::new(),
            first: 0,
            durable: 0,
            is_in_flight: false,
            lowest: 0,
            written: 0,
            memory: 0,
            pending: 0,
            capacity: CAPACITY_MIN,
        }
    }

    /// Blocks below are durable.
    pub fn durable(&self) -> u64 {
        self.durable
    }

    /// The number of the block that the next frame goes into.
    pub fn next(&self) -> u64 {
        let end = self.first + self.blocks.len() as u64;
        if self.is_last_open() { end - 1 } else { end }
    }

    /// The latest block that a frame was written into.
    pub fn last_written(&self) -> Option<u64> {
        (self.first + self.blocks.len() as u64).checked_sub(1)
    }

    pub fn pending_bytes(&self) -> u64 {
        self.pending
    }

    /// Bytes of payload in memory.
    pub fn memory_bytes(&self) -> u64 {
        self.memory
    }

    /// Bytes of payload from the block that is still needed on.
    pub fn log_bytes(&self) -> u64 {
        self.bytes_from(self.lowest)
    }

    /// Blocks from the one that is still needed on.
    pub fn log_blocks(&self) -> u64 {
        self.first + self.blocks.len() as u64 - self.lowest
    }

    /// Bytes of payload that were ever written.
    pub fn written(&self) -> u64 {
        self.written
    }

    /// Bytes of payload from a block on.
    pub fn bytes_from(&self, seq: u64) -> u64 {
        let block = seq.checked_sub(self.first).and_then(|at| self.blocks.get(at as usize));
        match block {
            Some(block) => self.written - block.start,
            None if seq >= self.first => 0,
            None => self.written - self.blocks.front().map_or(self.written, |block| block.start),
        }
    }

    /// Blocks that are closed and not durable, other than the one in flight.
    pub fn has_closed(&self) -> bool {
        let closed = self.blocks.len() - usize::from(self.is_last_open());
        self.first + closed as u64 > self.durable + u64::from(self.is_in_flight)
    }

    /// Writes one frame of about `bytes` bytes; a block that would get longer than `block_bytes` is
    /// closed before. `lowest` is what the tree needs by now. Returns the number of the frame's block
    /// and where in it the frame begins.
    pub fn write(
        &mut self,
        bytes: usize,
        block_bytes: usize,
        lowest: Option<u64>,
        frame: impl FnOnce(&mut Payload),
    ) -> (u64, usize) {
        if self.is_last_open() && self.open_bytes().len() + bytes > block_bytes {
            self.close(lowest);
        }
        if !self.is_last_open() {
            let payload = Payload::with_capacity(self.capacity.max(bytes + FRAME_ROOM));
            let held =
                Held { payload: Content::Open(payload), len: 0, start: self.written, lowest: 0, pieces: 0 };
            self.blocks.push_back(held);
        }
        let seq = self.next();
        let Some(Held { payload: Content::Open(payload), len, .. }) = self.blocks.back_mut() else {
            unreachable!("a block was just opened");
        };
        let at = payload.len();
        frame(payload);
        let grown = (payload.len() - *len) as u64;
        *len = payload.len();
        assert!(*len <= BLOCK_BYTES_MAX, "a block within its limits");
        self.written += grown;
        self.memory += grown;
        self.pending += grown;
        (seq, at)
    }

    /// The payload of the block that is being written.
    pub fn open_bytes(&self) -> &[u8] {
        match self.blocks.back().map(|held| &held.payload) {
            Some(Content::Open(payload)) => payload.bytes(),
            _ => &[],
        }
    }

    /// The next block to be made durable, if there is one and none is on its way.
    pub fn take(&mut self, lowest: Option<u64>) -> Option<Block> {
        if self.is_in_flight || self.pending == 0 {
            return None;
        }
        let at = (self.durable - self.first) as usize;
        if at + 1 == self.blocks.len() && self.is_last_open() {
            self.close(lowest);
        }
        let held = self.blocks.get(at)?;
        let Content::Closed(payload) = &held.payload else { return None };
        self.is_in_flight = true;
        Some(Block { life: self.life, seq: self.durable, lowest: held.lowest, payload: payload.clone() })
    }

    /// The block that was taken is durable.
    pub fn flushed(&mut self) {
        assert!(self.is_in_flight, "a block was taken");
        self.is_in_flight = false;
        let at = (self.durable - self.first) as usize;
        self.durable += 1;
        self.lowest = self.lowest.max(self.blocks[at].lowest);
        self.pending -= self.blocks[at].len as u64;
        self.settle(at);
        self.trim();
    }

    /// The block that was taken is not known to be durable, and is to be taken again.
    pub fn not_flushed(&mut self) {
        self.is_in_flight = false;
    }

    pub fn hold(&mut self, seq: u64) {
        self.held(seq).pieces += 1;
    }

    pub fn free(&mut self, seq: u64) {
        let held = self.held(seq);
        held.pieces -= 1;
        if held.pieces == 0 {
            self.settle((seq - self.first) as usize);
            self.trim();
        }
    }

    /// The bytes of a piece; copied only while its block is open.
    pub fn bytes(&self, piece: &Piece) -> Bytes {
        let range = piece.at as usize..piece.at as usize + piece.len as usize;
        match &self.blocks[(piece.seq - self.first) as usize].payload {
            Content::Open(payload) => Bytes::copy_from_slice(&payload.bytes()[range]),
            Content::Closed(payload) => payload.slice(range),
            Content::Dropped => unreachable!("a block with pieces is kept"),
        }
    }

    fn held(&mut self, seq: u64) -> &mut Held {
        &mut self.blocks[(seq - self.first) as usize]
    }

    fn is_last_open(&self) -> bool {
        self.blocks.back().is_some_and(|held| matches!(held.payload, Content::Open(_)))
    }

    /// Whatever comes now belongs to the next block, so what this one needs is settled.
    fn close(&mut self, lowest: Option<u64>) {
        let seq = self.next();
        let Some(held) = self.blocks.back_mut() else { return };
        let Content::Open(payload) = &mut held.payload else { return };
        let payload = std::mem::replace(payload, Payload::with_capacity(0));
        self.capacity = payload.len().next_power_of_two().clamp(CAPACITY_MIN, CAPACITY_MAX);
        held.payload = Content::Closed(payload.finish());
        held.lowest = lowest.unwrap_or(seq).min(seq);
    }

    /// Lets go of the bytes of a block that is durable and holds no piece.
    fn settle(&mut self, at: usize) {
        let is_durable = self.first + (at as u64) < self.durable;
        let held = &mut self.blocks[at];
        if is_durable && held.pieces == 0 && !matches!(held.payload, Content::Dropped) {
            held.payload = Content::Dropped;
            self.memory -= held.len as u64;
        }
    }

    fn trim(&mut self) {
        let end = self.durable.min(self.lowest);
        while self.first < end && self.blocks.pop_front_if(|held| held.pieces == 0).is_some() {
            self.first += 1;
        }
    }
}

/// Room for what a frame has beside its bytes.
const FRAME_ROOM: usize = 64;
/// A block begins with the room that the one before has used, within these bounds.
const CAPACITY_MIN: usize = 4 << 10;
const CAPACITY_MAX: usize = 4 << 20;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shared::tree::{DirNo, FileNo};

    const LIFE: Life = Life { broker: 1, epoch: 2 };

    fn append(ring: &mut Ring, len: usize, lowest: Option<u64>) -> Piece {
        let mut at = 0;
        let bytes = vec![7; len];
        let (seq, _) = ring.write(len, 1_000, lowest, |payload| {
            at = payload.append(DirNo(1), FileNo(1), 0, [&bytes[..]].into_iter());
        });
        ring.hold(seq);
        Piece { pos: 0, len: len as u32, at, seq }
    }

    #[test]
    fn a_block_is_taken_until_it_is_durable_and_kept_while_it_is_read() {
        let mut ring = Ring::new(LIFE);
        assert_eq!(ring.take(None), None);
        let piece = append(&mut ring, 100, None);
        let block = ring.take(Some(0)).unwrap();
        assert_eq!((block.seq, block.lowest), (0, 0));
        assert_eq!(ring.take(Some(0)), None, "one at a time");
        let later = append(&mut ring, 100, Some(0));
        assert_eq!(later.seq, 1, "a block that was taken does not grow");
        ring.not_flushed();
        assert_eq!(ring.take(Some(1)).unwrap(), block, "the same block again");
        ring.flushed();
        assert_eq!(ring.durable(), 1);
        assert_eq!(ring.bytes(&piece), vec![7; 100]);
        assert_eq!(ring.bytes(&later), vec![7; 100]);
        let memory = ring.memory_bytes();
        ring.free(piece.seq);
        assert!(ring.memory_bytes() < memory);
        assert_eq!(ring.log_bytes(), memory, "the log is as long as before");
        ring.take(Some(1)).unwrap();
        ring.flushed();
        assert_eq!(ring.log_bytes(), ring.memory_bytes(), "block 0 is no longer needed");
        ring.free(later.seq);
        assert_eq!((ring.memory_bytes(), ring.pending_bytes()), (0, 0));
    }

    #[test]
    fn a_full_block_is_closed_with_what_was_needed_by_then() {
        let mut ring = Ring::new(LIFE);
        assert_eq!(append(&mut ring, 600, None).seq, 0);
        assert_eq!(append(&mut ring, 600, Some(0)).seq, 1);
        assert_eq!(append(&mut ring, 600, Some(1)).seq, 2);
        assert!(ring.has_closed());
        assert_eq!(ring.take(Some(2)).unwrap().lowest, 0);
        ring.flushed();
        assert_eq!(ring.take(Some(2)).unwrap().lowest, 1);
        assert!(!ring.has_closed());
        ring.flushed();
        assert_eq!(ring.take(Some(2)).unwrap().lowest, 2);
        ring.flushed();
        assert_eq!(ring.take(Some(2)), None);
        assert_eq!(ring.next(), 3);
        let large = append(&mut ring, 1_500, Some(2));
        ring.take(Some(3)).unwrap();
        assert_eq!(append(&mut ring, 1_500, Some(3)).seq, 4);
        assert_eq!(ring.bytes(&large), vec![7; 1_500], "a large frame finds no block to close");
    }
}
