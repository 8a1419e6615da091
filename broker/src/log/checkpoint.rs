//! What an opening would compute from the front of the active segment, in a file beside it.
//!
//! The fold at a position and the segment's indexes up to there. Everything below was durable (or stands
//! before the checkpoint in the same log) when it was written, so an opening reads only what follows. It
//! is an index, not a part of the log: one that is damaged or of other bytes is ignored, one of a sealed
//! segment is garbage.
//!
//! ```text
//! "SLCP" | version i16 | position u64 | fold: length u32, snapshot | index | batches: length u32, batch index
//!        | CRC-32C u32 (of all before)
//! index: bytes since the last entry u32, largest timestamp i64 (-1: none), its relative offset u32,
//!        n u32 x (relative offset u32, position u32), m u32 x (timestamp i64, relative offset u32)
//! ```

use broker_core::fold::Fold;
use broker_store::{SegmentStore, StoreError, StorePath};
use bytes::Bytes;
use kafka::TimestampMs;

use super::batch_index::BatchIndex;
use super::index::LiveIndex;
use super::segment::SegmentContent;
use super::take;

const MAGIC: &[u8; 4] = b"SLCP";
const VERSION: i16 = 1;

/// Index entries of a kind in one checkpoint. Where there are more, some are left out, evenly: a look-up walks
/// further then, but a checkpoint of a large segment stays small.
const ENTRIES_MAX: u32 = 1024;

/// The fold at a batch boundary of a segment, and what is in the segment up to there.
pub struct Checkpoint {
    pub fold: Fold,
    pub content: SegmentContent,
    /// Of its file.
    pub bytes: u64,
}

/// The bytes of a checkpoint. The fold is of the end of `content`.
pub fn encode(fold: &mut Fold, content: &SegmentContent) -> Bytes {
    let snapshot = fold.encode(TimestampMs(i64::MIN));
    let batches = content.batches.encode(fold.end);
    let mut out = Vec::with_capacity(snapshot.len() + batches.len() + 64);
    out.extend_from_slice(MAGIC);
    out.extend_from_slice(&VERSION.to_be_bytes());
    out.extend_from_slice(&content.size.to_be_bytes());
    out.extend_from_slice(&(snapshot.len() as u32).to_be_bytes());
    out.extend_from_slice(&snapshot);
    content.index.save(ENTRIES_MAX, &mut out);
    out.extend_from_slice(&(batches.len() as u32).to_be_bytes());
    out.extend_from_slice(&batches);
    let crc = crc32c::crc32c(&out);
    out.extend_from_slice(&crc.to_be_bytes());
    Bytes::from(out)
}

/// The checkpoint at `path`; `None` where it is of no use.
pub fn read(store: &dyn SegmentStore, path: &StorePath) -> Result<Option<Checkpoint>, StoreError> {
    let bytes = match store.open(path) {
        Ok(reader) => reader.read_at(0, reader.len() as usize)?,
        Err(StoreError::NotFound) => return Ok(None),
        Err(error) => return Err(error),
    };
    let checkpoint = decode(&bytes);
    if checkpoint.is_none() {
        tracing::warn!(file = %path, "a damaged checkpoint is ignored; its segment is read whole");
    }
    Ok(checkpoint)
}

fn decode(bytes: &[u8]) -> Option<Checkpoint> {
    let (body, crc) = bytes.split_last_chunk::<4>()?;
    let mut rest = body.strip_prefix(MAGIC)?;
    if crc32c::crc32c(body).to_be_bytes() != *crc || i16::from_be_bytes(take(&mut rest)?) != VERSION {
        return None;
    }
    let size = u64::from_be_bytes(take(&mut rest)?);
    let fold = Fold::decode(part(&mut rest)?).ok()?;
    let index = LiveIndex::load(&mut rest)?;
    let batches = BatchIndex::decode(part(&mut rest)?, fold.end)?;
    let content = SegmentContent { size, index, batches };
    rest.is_empty().then_some(Checkpoint { fold, content, bytes: bytes.len() as u64 })
}

fn part<'a>(rest: &mut &'a [u8]) -> Option<&'a [u8]> {
    let length = u32::from_be_bytes(take(rest)?);
    let (head, tail) = rest.split_at_checked(length as usize)?;
    *rest = tail;
    Some(head)
}

#[cfg(test)]
mod tests {
    use kafka::Offset;

    use super::*;

    #[test]
    fn a_checkpoint_is_read_back_and_a_damaged_one_is_none() {
        let mut fold = Fold { end: Offset(500), ..Fold::default() };
        let mut content = SegmentContent { size: 5_000, ..SegmentContent::default() };
        for i in 0..50_u32 {
            content.index.note(i * 10 + 9, i * 100, 100, TimestampMs(i64::from(i)), 150);
        }
        let bytes = encode(&mut fold, &content);
        let found = decode(&bytes).unwrap();
        assert_eq!((&found.fold, found.content.size), (&fold, 5_000));
        assert_eq!(found.content.index, content.index);
        assert_eq!(found.content.batches, content.batches);
        for at in 0..bytes.len() {
            let mut damaged = bytes.to_vec();
            damaged[at] ^= 1;
            assert!(decode(&damaged).is_none(), "byte {at}");
            assert!(decode(&bytes[..at]).is_none(), "cut at {at}");
        }
    }
}
