//! A block of a life's log: what one flush makes durable, and how it looks in a file or an object.
//!
//! ```text
//! "SLB1" | crc u32 | length u32 | broker i32 | epoch u64 | seq u64 | lowest u64 | payload
//! ```
//! Big-endian. The CRC-32C covers everything behind it; the length is that of the payload. A file holds
//! blocks one after the other, an object holds one. Writing the same block again gives the same bytes,
//! so one's own write whose answer was lost is told from another's by comparing.

use bytes::{BufMut, Bytes, BytesMut};

use super::Life;

/// Largest payload.
pub const BLOCK_BYTES_MAX: usize = 16 << 20;

const MAGIC: &[u8; 4] = b"SLB1";
pub(super) const HEADER_LEN: usize = 4 + 4 + 4 + 4 + 8 + 8 + 8;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    pub life: Life,
    /// Its number in the life's log, from 0.
    pub seq: u64,
    /// The lowest number that is still needed, at most `seq`.
    pub lowest: u64,
    pub payload: Bytes,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BlockError {
    /// The bytes end inside a block: the tail of a write that was not finished.
    #[error("the block is cut short")]
    Short,
    #[error("not a block: {0}")]
    Damaged(&'static str),
}

impl Block {
    pub fn encode(&self) -> Bytes {
        assert!(
            self.payload.len() <= BLOCK_BYTES_MAX && self.lowest <= self.seq,
            "a block within its limits"
        );
        let mut bytes = BytesMut::with_capacity(HEADER_LEN + self.payload.len());
        bytes.put_slice(MAGIC);
        bytes.put_u32(0);
        bytes.put_u32(self.payload.len() as u32);
        bytes.put_i32(self.life.broker);
        bytes.put_u64(self.life.epoch);
        bytes.put_u64(self.seq);
        bytes.put_u64(self.lowest);
        bytes.put_slice(&self.payload);
        let crc = crc32c::crc32c(&bytes[8..]);
        bytes[4..8].copy_from_slice(&crc.to_be_bytes());
        bytes.freeze()
    }

    /// Takes one block off the front of `bytes`.
    pub fn decode(bytes: &mut Bytes) -> Result<Block, BlockError> {
        if bytes.len() < HEADER_LEN {
            return Err(BlockError::Short);
        }
        if &bytes[..4] != MAGIC {
            return Err(BlockError::Damaged("another magic"));
        }
        let length = u32::from_be_bytes(field(bytes, 8)) as usize;
        if length > BLOCK_BYTES_MAX {
            return Err(BlockError::Damaged("a length beyond the limit"));
        }
        if bytes.len() < HEADER_LEN + length {
            return Err(BlockError::Short);
        }
        if crc32c::crc32c(&bytes[8..HEADER_LEN + length]) != u32::from_be_bytes(field(bytes, 4)) {
            return Err(BlockError::Damaged("the checksum does not match"));
        }
        let life = Life {
            broker: i32::from_be_bytes(field(bytes, 12)),
            epoch: u64::from_be_bytes(field(bytes, 16)),
        };
        let (seq, lowest) = (u64::from_be_bytes(field(bytes, 24)), u64::from_be_bytes(field(bytes, 32)));
        if lowest > seq {
            return Err(BlockError::Damaged("the lowest number is above its own"));
        }
        let whole = bytes.split_to(HEADER_LEN + length);
        Ok(Block { life, seq, lowest, payload: whole.slice(HEADER_LEN..) })
    }
}

fn field<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut field = [0; N];
    field.copy_from_slice(&bytes[at..at + N]);
    field
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(payload: &'static [u8]) -> Block {
        let life = Life { broker: 7, epoch: 3 };
        Block { life, seq: 9, lowest: 4, payload: Bytes::from_static(payload) }
    }

    #[test]
    fn blocks_one_after_the_other_are_taken_apart_again() {
        let (one, two) = (block(b"one"), block(b""));
        let mut bytes = Bytes::from([one.encode(), two.encode()].concat());
        assert_eq!(Block::decode(&mut bytes), Ok(one));
        assert_eq!(Block::decode(&mut bytes), Ok(two));
        assert_eq!(Block::decode(&mut bytes), Err(BlockError::Short));
    }

    #[test]
    fn every_cut_is_short_and_every_flipped_bit_is_seen() {
        let whole = block(b"payload").encode();
        for cut in 0..whole.len() {
            assert_eq!(Block::decode(&mut whole.slice(..cut)), Err(BlockError::Short), "cut at {cut}");
        }
        for bit in 0..whole.len() * 8 {
            let mut damaged = whole.to_vec();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert!(Block::decode(&mut Bytes::from(damaged)).is_err(), "bit {bit}");
        }
    }
}
