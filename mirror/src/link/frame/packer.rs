//! Packing the payload of units with zstd, where it saves bytes.
//!
//! Owns when to try: a subscription whose batches did not shrink is left alone for a while, longer each
//! time, because looking at what does not pack costs as much as packing what does.

use std::cell::RefCell;

use zstd::bulk::{Compressor, Decompressor};

use super::Sub;

/// One for each data stream.
#[derive(Debug)]
pub struct Packer {
    /// By subscription; two may share an entry, and then its patience.
    memory: [Memory; ENTRIES],
}

#[derive(Clone, Copy, Debug, Default)]
struct Memory {
    /// Units in a row that did not shrink, as a power of two up to [`PATIENCE_MAX`].
    failures: u32,
    /// Units to let pass before the next try.
    rest: u32,
}

impl Default for Packer {
    fn default() -> Packer {
        Packer { memory: [Memory::default(); ENTRIES] }
    }
}

impl Packer {
    /// The packed batches; `None` where they are to travel as they are.
    pub(super) fn pack(&mut self, sub: Sub, batches: &[u8]) -> Option<Vec<u8>> {
        if !worth_a_try(batches) {
            return None;
        }
        // Numbers of one stream differ by the number of streams: spread over all entries.
        let memory = &mut self.memory[(sub.0.wrapping_mul(0x9e37_79b9) >> ENTRIES_SHIFT) as usize];
        if memory.rest > 0 {
            memory.rest -= 1;
            return None;
        }
        let packed = compress(batches).filter(|packed| packed.len() < batches.len() / 16 * 15);
        memory.failures = if packed.is_some() { 0 } else { (memory.failures + 1).min(PATIENCE_MAX) };
        memory.rest = (1 << memory.failures) - 1;
        packed
    }
}

/// Only plain batches gain; a unit that begins with a compressed one is sent as it is.
fn worth_a_try(batches: &[u8]) -> bool {
    const ATTRIBUTES_LOW: usize = 22;
    batches.len() >= PACK_BYTES_MIN && batches.get(ATTRIBUTES_LOW).is_some_and(|bits| bits & 7 == 0)
}

// A context is a megabyte and more, costs as much to make as a small unit to pack, and holds nothing over
// a call: one for each thread serves all streams.
thread_local! {
    static COMPRESSOR: RefCell<Option<Compressor<'static>>> = const { RefCell::new(None) };
    static DECOMPRESSOR: RefCell<Option<Decompressor<'static>>> = const { RefCell::new(None) };
}

fn compress(bytes: &[u8]) -> Option<Vec<u8>> {
    COMPRESSOR.with_borrow_mut(|kept| {
        if kept.is_none() {
            *kept = Compressor::new(PACK_LEVEL).ok();
        }
        kept.as_mut()?.compress(bytes).ok()
    })
}

/// Never more than `unpacked_len` bytes; `None` if it is not what a packer made.
pub(super) fn unpack(packed: &[u8], unpacked_len: usize) -> Option<Vec<u8>> {
    DECOMPRESSOR.with_borrow_mut(|kept| {
        if kept.is_none() {
            *kept = Decompressor::new().ok();
        }
        kept.as_mut()?.decompress(packed, unpacked_len).ok()
    })
}

/// Below this a zstd frame saves nothing worth a call.
const PACK_BYTES_MIN: usize = 256;
const PACK_LEVEL: i32 = 1;
const ENTRIES: usize = 64;
const ENTRIES_SHIFT: u32 = u32::BITS - ENTRIES.trailing_zeros();
/// At most 31 units pass between two tries.
const PATIENCE_MAX: u32 = 5;

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes that zstd cannot shrink.
    fn noise(len: usize) -> Vec<u8> {
        let mut state = 0x2545_f491_4f6c_dd1du64;
        let next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 32) as u8
        };
        let mut bytes: Vec<u8> = std::iter::repeat_with(next).take(len).collect();
        // A plain batch: no codec.
        bytes[22] = 0;
        bytes
    }

    #[test]
    fn what_does_not_shrink_is_tried_less_and_less_but_never_given_up() {
        let mut packer = Packer::default();
        let (noise, text) = (noise(4_096), vec![0; 4_096]);
        let mut tried = Vec::new();
        for unit in 0..200 {
            let rested = packer.memory.iter().all(|memory| memory.rest == 0);
            assert!(packer.pack(Sub(7), &noise).is_none());
            tried.extend(rested.then_some(unit));
        }
        assert_eq!(tried, [0, 2, 6, 14, 30, 62, 94, 126, 158, 190]);
        // Another subscription of the stream does not suffer.
        assert!(packer.pack(Sub(8), &text).is_some());
        let waited = (0..100).position(|_| packer.pack(Sub(7), &text).is_some());
        assert!(waited.is_some_and(|units| units <= 31), "{waited:?}");
        assert!(packer.pack(Sub(7), &text).is_some(), "and from then on at once");
    }

    #[test]
    fn what_is_packed_unpacks_to_itself_and_to_no_more_than_was_said() {
        let text = vec![0; 100_000];
        for _ in 0..3 {
            let packed = Packer::default().pack(Sub(1), &text).expect("it shrinks");
            assert_eq!(unpack(&packed, text.len()).as_deref(), Some(&text[..]));
            assert_eq!(unpack(&packed, text.len() - 1), None);
            assert_eq!(unpack(b"no frame", 100), None);
        }
    }
}
