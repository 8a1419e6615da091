//! What a hand-over leaves for the next owners: one object for all partitions of a topic that a life lets go of
//! together.
//!
//! ```text
//! version u8 (1) | partitions u32 | for each: index i32, epoch i32 | CRC-32C of the state u32
//!   | CRC-32C of all before u32 | the state, as the shared log says it
//! ```
//!
//! The head says under which epochs it was left, so that whoever finds an object that no record names can tell
//! whether one may still come to name it. Integers are big-endian.

use std::sync::Arc;

use broker_store::{Life, Remote, StoreError, StorePath};
use bytes::{BufMut as _, Bytes, BytesMut};
use kafka::{LeaderEpoch, TopicId};

use super::objects::AssignmentObject;

const VERSION: u8 = 1;
/// Version and count, and the checksums.
const HEAD_BYTES: usize = 5 + 8;
const PARTITION_BYTES: usize = 8;
/// Partitions in one manifest.
pub(super) const PARTITIONS_MAX: usize = 1_024;
/// Largest manifest; what owners say of so many partitions is far less.
const BYTES_MAX: usize = 256 << 20;

/// Partitions, by index, and the epochs under which they were let go of.
pub(super) type LeftUnder = Vec<(i32, LeaderEpoch)>;

/// Where all of them are.
pub(super) const ROOT: &str = "manifests";

/// The folder of a topic's manifests.
pub(super) fn folder(topic: TopicId) -> StorePath {
    StorePath::parse(&format!("{ROOT}/{}", topic.0)).expect("ids are legal names")
}

/// `manifests/<topic id>/<life>-<number>`: a life gives each number once.
pub(super) fn name(topic: TopicId, life: Life, number: u64) -> StorePath {
    folder(topic).join(&format!("{life}-{number}")).expect("numbers are legal names")
}

pub(super) fn encode(partitions: &[(i32, LeaderEpoch)], state: &Bytes) -> Bytes {
    let mut out = BytesMut::with_capacity(HEAD_BYTES + partitions.len() * PARTITION_BYTES + state.len());
    out.put_u8(VERSION);
    out.put_u32(partitions.len() as u32);
    for (index, epoch) in partitions {
        out.put_i32(*index);
        out.put_i32(epoch.0);
    }
    out.put_u32(crc32c::crc32c(state));
    out.put_u32(crc32c::crc32c(&out));
    out.put_slice(state);
    out.freeze()
}

/// Who was let go of, the checksum of the state, and how long the head is.
fn decode_head(bytes: &[u8]) -> Option<(LeftUnder, u32, usize)> {
    let number = |at: usize| Some(u32::from_be_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
    let count = number(1)? as usize;
    if bytes.first() != Some(&VERSION) || count > PARTITIONS_MAX {
        return None;
    }
    let end = HEAD_BYTES + count * PARTITION_BYTES;
    if number(end - 4)? != crc32c::crc32c(&bytes[..end - 4]) {
        return None;
    }
    let partition = |at: usize| {
        let at = 5 + at * PARTITION_BYTES;
        Some((number(at)? as i32, LeaderEpoch(number(at + 4)? as i32)))
    };
    Some(((0..count).map(partition).collect::<Option<_>>()?, number(end - 8)?, end))
}

fn damaged(name: &StorePath) -> StoreError {
    StoreError::Corrupt(format!("{name} is no manifest of a hand-over, or a damaged one"))
}

/// What is wrong with a manifest whose head cannot be read.
fn unreadable(name: &StorePath, bytes: &[u8]) -> StoreError {
    match bytes.first() {
        Some(version) if *version != VERSION => StoreError::Corrupt(format!(
            "{name} is a manifest of version {version}, and this build reads version {VERSION}: its partitions wait for \
             a broker of the build that wrote it; stop those of this build until it has taken them over"
        )),
        _ => damaged(name),
    }
}

/// The state in a manifest. Blocks.
pub(super) fn read(remote: &Arc<dyn Remote>, name: &str) -> Result<Bytes, StoreError> {
    let name = StorePath::parse(name)
        .map_err(|_| StoreError::Corrupt(format!("{name:?} is no name of a manifest")))?;
    let bytes = remote.get(&name, 0, BYTES_MAX)?;
    let (_, checksum, head) = decode_head(&bytes).ok_or_else(|| unreadable(&name, &bytes))?;
    let state = bytes.slice(head..);
    if crc32c::crc32c(&state) != checksum {
        return Err(damaged(&name));
    }
    Ok(state)
}

/// Who was let go of with a manifest. Blocks.
pub(super) fn read_head(remote: &Arc<dyn Remote>, name: &StorePath) -> Result<LeftUnder, StoreError> {
    let bytes = remote.get(name, 0, HEAD_BYTES + PARTITIONS_MAX * PARTITION_BYTES)?;
    decode_head(&bytes).map(|(partitions, ..)| partitions).ok_or_else(|| unreadable(name, &bytes))
}

/// Whether any record of a topic names it.
pub(super) fn is_named(object: &AssignmentObject, name: &str) -> bool {
    object.partitions.iter().any(|record| record.manifest.as_deref() == Some(name))
}

/// Whether nobody names it and nobody will: each of its partitions is served under a later epoch, so whoever
/// left it can record nothing any more.
pub(super) fn is_over(object: &AssignmentObject, name: &str, left: &[(i32, LeaderEpoch)]) -> bool {
    let is_later = |(index, epoch): &(i32, LeaderEpoch)| {
        let record = usize::try_from(*index).ok().and_then(|index| object.partitions.get(index));
        record.is_some_and(|record| record.taken && record.epoch > epoch.0)
    };
    !is_named(object, name) && left.iter().all(is_later)
}

#[cfg(test)]
mod tests {
    use super::super::objects::PartitionObject;
    use super::*;

    #[test]
    fn a_manifest_is_read_again_and_every_change_of_its_head_is_noticed() {
        let left = vec![(0, LeaderEpoch(4)), (7, LeaderEpoch(0))];
        let bytes = encode(&left, &Bytes::from_static(b"what is there"));
        let (found, checksum, head) = decode_head(&bytes).unwrap();
        assert_eq!((found, &bytes[head..]), (left, &b"what is there"[..]));
        assert_eq!(checksum, crc32c::crc32c(b"what is there"));
        for at in 0..head {
            let mut changed = bytes.to_vec();
            changed[at] ^= 1;
            assert!(decode_head(&changed).is_none(), "byte {at}");
            assert!(decode_head(&bytes[..at]).is_none(), "cut at {at}");
        }
    }

    #[test]
    fn a_manifest_of_another_build_is_named_as_such_and_a_damaged_one_as_damaged() {
        let remote: Arc<dyn Remote> = Arc::new(broker_store::remote::Memory::new());
        let whole = encode(&[(0, LeaderEpoch(4))], &Bytes::from_static(b"what is there"));
        let mut later = whole.to_vec();
        later[0] = VERSION + 1;
        for (name, bytes, said) in [
            ("manifests/t/1-1", later, "version 2, and this build reads version 1"),
            ("manifests/t/1-2", whole[..9].to_vec(), "damaged"),
            ("manifests/t/1-3", whole[..whole.len() - 1].to_vec(), "damaged"),
            ("manifests/t/1-4", Vec::new(), "damaged"),
        ] {
            remote.put(&StorePath::parse(name).unwrap(), Bytes::from(bytes)).unwrap();
            let error = read(&remote, name).unwrap_err().to_string();
            assert!(error.contains(said) && error.contains(name), "{error}");
        }
    }

    #[test]
    fn a_manifest_is_kept_while_any_of_its_partitions_may_still_be_recorded_with_it() {
        let record = |epoch, taken| PartitionObject { epoch, taken, ..PartitionObject::new() };
        let mut object =
            AssignmentObject { partitions: vec![record(5, true), record(5, true)], ..Default::default() };
        let left = [(0, LeaderEpoch(4)), (1, LeaderEpoch(4))];
        assert!(is_over(&object, "m", &left));
        object.partitions[1] = record(4, true);
        assert!(!is_over(&object, "m", &left), "its owner may be about to record it");
        object.partitions[1] = record(5, false);
        assert!(!is_over(&object, "m", &left), "the next owner reads it");
        object.partitions[1] = PartitionObject { manifest: Some("m".to_owned()), ..record(6, true) };
        assert!(!is_over(&object, "m", &left), "it is named");
        assert!(!is_over(&object, "n", &[(2, LeaderEpoch(1))]), "it is of a partition that nobody knows yet");
    }
}
