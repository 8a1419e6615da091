//! The durable mark of a partition: a lower bound of what was known to be on disk, in a file of its own.
//!
//! Written now and then and at a clean stop, never on the way of an append. A log that recovers to less
//! has lost what was acknowledged: that is a disk's fault and an operator's business, not a torn tail.
//!
//! ```text
//! "SLDM" | version i16 | durable offset i64 | CRC-32C u32 (of all before)
//! ```

use broker_store::{SegmentStore, StoreError, StorePath};
use kafka::Offset;

const MAGIC: &[u8; 4] = b"SLDM";
const VERSION: i16 = 1;
const LEN: usize = 18;

/// Everything below `offset` is durable.
pub fn write(store: &dyn SegmentStore, dir: &StorePath, offset: Offset) -> Result<(), StoreError> {
    let mut bytes = Vec::with_capacity(LEN);
    bytes.extend_from_slice(MAGIC);
    bytes.extend_from_slice(&VERSION.to_be_bytes());
    bytes.extend_from_slice(&offset.0.to_be_bytes());
    let crc = crc32c::crc32c(&bytes);
    bytes.extend_from_slice(&crc.to_be_bytes());
    store.put(&path(dir), &bytes)
}

/// The mark, or 0 where none was written. A damaged one bounds nothing: it is not part of the log.
pub fn read(store: &dyn SegmentStore, dir: &StorePath) -> Result<Offset, StoreError> {
    let bytes = match store.open(&path(dir)) {
        Ok(reader) => reader.read_at(0, LEN + 1)?,
        Err(StoreError::NotFound) => return Ok(Offset::ZERO),
        Err(error) => return Err(error),
    };
    Ok(decode(&bytes).unwrap_or_else(|| {
        tracing::warn!(file = %path(dir), "a damaged durable mark is ignored");
        Offset::ZERO
    }))
}

fn decode(bytes: &[u8]) -> Option<Offset> {
    let bytes: &[u8; LEN] = bytes.try_into().ok()?;
    let (body, crc) = bytes.split_last_chunk::<4>()?;
    let whole = body.starts_with(MAGIC) && crc32c::crc32c(body).to_be_bytes() == *crc;
    let offset = body.last_chunk::<8>().map(|offset| Offset(i64::from_be_bytes(*offset)));
    offset.filter(|_| whole && body[4..6] == VERSION.to_be_bytes())
}

fn path(dir: &StorePath) -> StorePath {
    dir.join("durable").expect("a plain word is a legal name")
}

#[cfg(test)]
mod tests {
    use super::*;
    use broker_store::Memory;

    #[test]
    fn a_mark_is_read_back_and_a_damaged_one_bounds_nothing() {
        let (store, dir) = (Memory::new(), StorePath::parse("t").unwrap());
        assert_eq!(read(&store, &dir), Ok(Offset(0)));
        write(&store, &dir, Offset(77)).unwrap();
        assert_eq!(read(&store, &dir), Ok(Offset(77)));
        let bytes = store.open(&path(&dir)).unwrap().read_at(0, 100).unwrap();
        for at in 0..bytes.len() {
            let mut damaged = bytes.to_vec();
            damaged[at] ^= 1;
            assert_eq!(decode(&damaged), None, "byte {at}");
        }
    }
}
