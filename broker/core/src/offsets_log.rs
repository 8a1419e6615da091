//! Keys and values of `__consumer_offsets`, in Apache Kafka's own format, and their fold.
//!
//! Owns the bytes: offset commits (key version 1, value version 4 with the id of the topic, or 1 when a client set an
//! expiry; 3 without an id) and classic group metadata (key 2, value 3). Older values are read. Keys of other
//! kinds (KIP-848 and later) are not ours: they are kept in the log and not understood. All
//! fields are big-endian; a string has an int16 length, bytes and arrays an int32 length; a compact string has one more
//! than its length as a varint, and tags are those of KIP-482.
//!
//! ```text
//! offset key:   1 i16 | group string | topic string | partition i32
//! offset value: 4 i16 | offset i64 | leader epoch i32 | metadata compact string | committed at i64
//!               | tags [ 0: topic id uuid ]
//!               3 i16 | offset i64 | leader epoch i32 | metadata string | committed at i64
//!               1 i16 | offset i64 | metadata string | committed at i64 | expires at i64
//! group key:    2 i16 | group string
//! group value:  3 i16 | protocol type string | generation i32 | protocol string? | leader string?
//!               | state since i64 | members [ member id string | instance id string?
//!               | client id string | client host string | rebalance timeout i32
//!               | session timeout i32 | subscription bytes | assignment bytes ]
//! ```

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use kafka::{GroupId, LeaderEpoch, Offset, PartitionIndex, TimestampMs, TopicId, TopicName};

use crate::group::{InstanceId, MemberId};

/// What a record is about.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Key {
    Offset {
        group: GroupId,
        topic: TopicName,
        partition: PartitionIndex,
    },
    Group(GroupId),
    /// A kind of record that this broker does not write.
    Other(i16),
}

/// A committed offset.
#[derive(Clone, Debug, PartialEq)]
pub struct CommittedOffset {
    pub offset: Offset,
    /// Of the last record consumed; `LeaderEpoch::NONE` if the client did not say.
    pub leader_epoch: LeaderEpoch,
    /// The client's own text, never read.
    pub metadata: String,
    pub committed_at: TimestampMs,
    /// Only from OffsetCommit 2 to 4, which let the client choose.
    pub expires_at: Option<TimestampMs>,
    /// The incarnation of the topic that it is of: one that is made again under the name has none. Unknown in old
    /// records, and in those with an expiry.
    pub topic: Option<TopicId>,
}

/// A classic group's generation.
#[derive(Clone, Debug, PartialEq)]
pub struct GroupMetadata {
    pub protocol_type: String,
    pub generation: i32,
    pub protocol: Option<String>,
    pub leader: Option<MemberId>,
    /// When the group reached its state; `None` in old records.
    pub state_since: Option<TimestampMs>,
    pub members: Vec<MemberMetadata>,
}

/// One member of a generation.
#[derive(Clone, Debug, PartialEq)]
pub struct MemberMetadata {
    pub member_id: MemberId,
    pub instance_id: Option<InstanceId>,
    pub client_id: String,
    pub client_host: String,
    pub rebalance_timeout: Duration,
    pub session_timeout: Duration,
    pub subscription: Bytes,
    pub assignment: Bytes,
}

/// Why bytes are not a record of `__consumer_offsets`, or values do not fit into one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FormatError {
    #[error("a record of __consumer_offsets ends too early")]
    Truncated,
    #[error("a record of __consumer_offsets has a length or a name that is impossible")]
    Malformed,
    #[error("a value of __consumer_offsets has version {0}, which this broker does not know")]
    Version(i16),
    #[error("a text of {0} bytes does not fit into a record of __consumer_offsets")]
    TooLong(usize),
}

/// Everything that the log says: the last value of each key.
#[derive(Debug, Default)]
pub struct OffsetsFold {
    pub groups: HashMap<GroupId, FoldedGroup>,
}

/// What the log says about one group.
#[derive(Debug, Default)]
pub struct FoldedGroup {
    pub metadata: Option<GroupMetadata>,
    pub offsets: BTreeMap<(TopicName, PartitionIndex), CommittedOffset>,
}

impl Key {
    pub fn encode(&self) -> Result<Bytes, FormatError> {
        let mut out = BytesMut::new();
        match self {
            Key::Offset { group, topic, partition } => {
                out.put_i16(OFFSET_KEY_VERSION);
                put_string(&mut out, group.as_str())?;
                put_string(&mut out, topic.as_str())?;
                out.put_i32(partition.0);
            }
            Key::Group(group) => {
                out.put_i16(GROUP_KEY_VERSION);
                put_string(&mut out, group.as_str())?;
            }
            Key::Other(version) => out.put_i16(*version),
        }
        Ok(out.freeze())
    }

    pub fn decode(bytes: &[u8]) -> Result<Key, FormatError> {
        let mut bytes = bytes;
        match take_i16(&mut bytes)? {
            0 | OFFSET_KEY_VERSION => Ok(Key::Offset {
                group: GroupId::new(take_string(&mut bytes)?),
                topic: TopicName::parse(take_string(&mut bytes)?).map_err(|_| FormatError::Malformed)?,
                partition: PartitionIndex(take_i32(&mut bytes)?),
            }),
            GROUP_KEY_VERSION => Ok(Key::Group(GroupId::new(take_string(&mut bytes)?))),
            other => Ok(Key::Other(other)),
        }
    }
}

impl CommittedOffset {
    pub fn encode(&self) -> Result<Bytes, FormatError> {
        let mut out = BytesMut::with_capacity(48 + self.metadata.len());
        let version = match (self.expires_at, self.topic) {
            (Some(_), _) => 1,
            (None, Some(_)) => FLEXIBLE_OFFSET_VERSION,
            (None, None) => 3,
        };
        out.put_i16(version);
        out.put_i64(self.offset.0);
        if version >= 3 {
            out.put_i32(self.leader_epoch.0);
        }
        match version {
            FLEXIBLE_OFFSET_VERSION => {
                i16::try_from(self.metadata.len()).map_err(|_| FormatError::TooLong(self.metadata.len()))?;
                put_varint(&mut out, self.metadata.len() as u32 + 1);
                out.put_slice(self.metadata.as_bytes());
            }
            _ => put_string(&mut out, &self.metadata)?,
        }
        out.put_i64(self.committed_at.0);
        if let Some(at) = self.expires_at {
            out.put_i64(at.0);
        } else if let Some(topic) = self.topic {
            put_varint(&mut out, 1);
            put_varint(&mut out, TOPIC_ID_TAG);
            put_varint(&mut out, 16);
            out.put_slice(topic.0.as_bytes());
        }
        Ok(out.freeze())
    }

    pub fn decode(bytes: &[u8]) -> Result<CommittedOffset, FormatError> {
        let mut bytes = bytes;
        let version = take_i16(&mut bytes)?;
        if !(0..=FLEXIBLE_OFFSET_VERSION).contains(&version) {
            return Err(FormatError::Version(version));
        }
        let offset = Offset(take_i64(&mut bytes)?);
        let leader_epoch = if version >= 3 { LeaderEpoch(take_i32(&mut bytes)?) } else { LeaderEpoch::NONE };
        let metadata = match version {
            FLEXIBLE_OFFSET_VERSION => {
                let len = take_varint(&mut bytes)?.checked_sub(1).ok_or(FormatError::Malformed)?;
                let text = take(&mut bytes, len as usize)?;
                std::str::from_utf8(text).map_err(|_| FormatError::Malformed)?.to_owned()
            }
            _ => take_string(&mut bytes)?.to_owned(),
        };
        let committed_at = TimestampMs(take_i64(&mut bytes)?);
        let expires_at = match version {
            1 => Some(TimestampMs(take_i64(&mut bytes)?)).filter(|at| at.0 >= 0),
            _ => None,
        };
        let topic = match version {
            FLEXIBLE_OFFSET_VERSION => take_topic_id(&mut bytes)?,
            _ => None,
        };
        Ok(CommittedOffset { offset, leader_epoch, metadata, committed_at, expires_at, topic })
    }

    /// Whether it was committed for this incarnation of its topic, as far as is known.
    pub fn is_of(&self, topic: TopicId) -> bool {
        self.topic.is_none_or(|of| of == topic)
    }
}

/// The tags of a value; those that are not ours are passed over.
fn take_topic_id(bytes: &mut &[u8]) -> Result<Option<TopicId>, FormatError> {
    let mut topic = None;
    for _ in 0..take_varint(bytes)? {
        let (tag, len) = (take_varint(bytes)?, take_varint(bytes)?);
        let value = take(bytes, len as usize)?;
        if tag == TOPIC_ID_TAG {
            let id = uuid::Uuid::from_slice(value).map_err(|_| FormatError::Malformed)?;
            topic = Some(TopicId(id)).filter(|id| !id.0.is_nil());
        }
    }
    Ok(topic)
}

const FLEXIBLE_OFFSET_VERSION: i16 = 4;
const TOPIC_ID_TAG: u32 = 0;

impl GroupMetadata {
    pub fn encode(&self) -> Result<Bytes, FormatError> {
        let mut out = BytesMut::with_capacity(256);
        out.put_i16(GROUP_VALUE_VERSION);
        put_string(&mut out, &self.protocol_type)?;
        out.put_i32(self.generation);
        put_nullable(&mut out, self.protocol.as_deref())?;
        put_nullable(&mut out, self.leader.as_ref().map(MemberId::as_str))?;
        out.put_i64(self.state_since.unwrap_or(TimestampMs::NONE).0);
        out.put_i32(i32_len(self.members.len())?);
        for member in &self.members {
            member.encode(&mut out)?;
        }
        Ok(out.freeze())
    }

    pub fn decode(bytes: &[u8]) -> Result<GroupMetadata, FormatError> {
        let mut bytes = bytes;
        let version = take_i16(&mut bytes)?;
        if !(0..=GROUP_VALUE_VERSION).contains(&version) {
            return Err(FormatError::Version(version));
        }
        let protocol_type = take_string(&mut bytes)?.to_owned();
        let generation = take_i32(&mut bytes)?;
        let protocol = take_nullable(&mut bytes)?.map(str::to_owned);
        let leader = take_nullable(&mut bytes)?.and_then(MemberId::parse);
        let state_since = match version {
            2.. => Some(TimestampMs(take_i64(&mut bytes)?)).filter(|at| at.0 >= 0),
            _ => None,
        };
        let count = usize::try_from(take_i32(&mut bytes)?).map_err(|_| FormatError::Malformed)?;
        let members =
            (0..count).map(|_| MemberMetadata::decode(&mut bytes, version)).collect::<Result<_, _>>()?;
        Ok(GroupMetadata { protocol_type, generation, protocol, leader, state_since, members })
    }
}

impl MemberMetadata {
    fn encode(&self, out: &mut BytesMut) -> Result<(), FormatError> {
        put_string(out, self.member_id.as_str())?;
        put_nullable(out, self.instance_id.as_ref().map(InstanceId::as_str))?;
        put_string(out, &self.client_id)?;
        put_string(out, &self.client_host)?;
        put_millis(out, self.rebalance_timeout);
        put_millis(out, self.session_timeout);
        put_bytes(out, &self.subscription)?;
        put_bytes(out, &self.assignment)
    }

    fn decode(bytes: &mut &[u8], version: i16) -> Result<MemberMetadata, FormatError> {
        let member_id = MemberId::parse(take_string(bytes)?).ok_or(FormatError::Malformed)?;
        let instance_id = if version >= 3 { take_nullable(bytes)?.map(InstanceId::new) } else { None };
        let client_id = take_string(bytes)?.to_owned();
        let client_host = take_string(bytes)?.to_owned();
        let rebalance_timeout = if version >= 1 { Some(take_millis(bytes)?) } else { None };
        let session_timeout = take_millis(bytes)?;
        Ok(MemberMetadata {
            member_id,
            instance_id,
            client_id,
            client_host,
            rebalance_timeout: rebalance_timeout.unwrap_or(session_timeout),
            session_timeout,
            subscription: Bytes::copy_from_slice(take_bytes(bytes)?),
            assignment: Bytes::copy_from_slice(take_bytes(bytes)?),
        })
    }
}

impl OffsetsFold {
    /// Applies the next record of the log; no value is a tombstone.
    pub fn apply(&mut self, key: &[u8], value: Option<&[u8]>) -> Result<(), FormatError> {
        match (Key::decode(key)?, value) {
            (Key::Offset { group, topic, partition }, Some(value)) => {
                let value = CommittedOffset::decode(value)?;
                self.groups.entry(group).or_default().offsets.insert((topic, partition), value);
            }
            (Key::Offset { group, topic, partition }, None) => self.shrink(group, |folded| {
                folded.offsets.remove(&(topic, partition));
            }),
            (Key::Group(group), Some(value)) => {
                let value = GroupMetadata::decode(value)?;
                self.groups.entry(group).or_default().metadata = Some(value);
            }
            (Key::Group(group), None) => self.shrink(group, |folded| folded.metadata = None),
            (Key::Other(_), _) => {}
        }
        Ok(())
    }

    fn shrink(&mut self, group: GroupId, change: impl FnOnce(&mut FoldedGroup)) {
        if let Some(folded) = self.groups.get_mut(&group) {
            change(folded);
            if folded.metadata.is_none() && folded.offsets.is_empty() {
                self.groups.remove(&group);
            }
        }
    }
}

const OFFSET_KEY_VERSION: i16 = 1;
const GROUP_KEY_VERSION: i16 = 2;
const GROUP_VALUE_VERSION: i16 = 3;

fn put_string(out: &mut BytesMut, text: &str) -> Result<(), FormatError> {
    out.put_i16(i16::try_from(text.len()).map_err(|_| FormatError::TooLong(text.len()))?);
    out.put_slice(text.as_bytes());
    Ok(())
}

fn put_varint(out: &mut BytesMut, mut value: u32) {
    while value >= 0x80 {
        out.put_u8(value as u8 | 0x80);
        value >>= 7;
    }
    out.put_u8(value as u8);
}

fn take_varint(bytes: &mut &[u8]) -> Result<u32, FormatError> {
    let mut value = 0_u64;
    for shift in (0..35).step_by(7) {
        let byte = bytes.try_get_u8().map_err(|_| FormatError::Truncated)?;
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return u32::try_from(value).map_err(|_| FormatError::Malformed);
        }
    }
    Err(FormatError::Malformed)
}

fn put_nullable(out: &mut BytesMut, text: Option<&str>) -> Result<(), FormatError> {
    match text {
        Some(text) => put_string(out, text),
        None => {
            out.put_i16(-1);
            Ok(())
        }
    }
}

fn put_bytes(out: &mut BytesMut, bytes: &[u8]) -> Result<(), FormatError> {
    out.put_i32(i32_len(bytes.len())?);
    out.put_slice(bytes);
    Ok(())
}

fn put_millis(out: &mut BytesMut, duration: Duration) {
    out.put_i32(i32::try_from(duration.as_millis()).unwrap_or(i32::MAX));
}

fn i32_len(len: usize) -> Result<i32, FormatError> {
    i32::try_from(len).map_err(|_| FormatError::TooLong(len))
}

fn take_i16(bytes: &mut &[u8]) -> Result<i16, FormatError> {
    bytes.try_get_i16().map_err(|_| FormatError::Truncated)
}

fn take_i32(bytes: &mut &[u8]) -> Result<i32, FormatError> {
    bytes.try_get_i32().map_err(|_| FormatError::Truncated)
}

fn take_i64(bytes: &mut &[u8]) -> Result<i64, FormatError> {
    bytes.try_get_i64().map_err(|_| FormatError::Truncated)
}

fn take_millis(bytes: &mut &[u8]) -> Result<Duration, FormatError> {
    let millis = u64::try_from(take_i32(bytes)?).map_err(|_| FormatError::Malformed)?;
    Ok(Duration::from_millis(millis))
}

fn take<'a>(bytes: &mut &'a [u8], len: usize) -> Result<&'a [u8], FormatError> {
    let (head, rest) = bytes.split_at_checked(len).ok_or(FormatError::Truncated)?;
    *bytes = rest;
    Ok(head)
}

fn take_string<'a>(bytes: &mut &'a [u8]) -> Result<&'a str, FormatError> {
    take_nullable(bytes)?.ok_or(FormatError::Malformed)
}

fn take_nullable<'a>(bytes: &mut &'a [u8]) -> Result<Option<&'a str>, FormatError> {
    match take_i16(bytes)? {
        -1 => Ok(None),
        len => {
            let len = usize::try_from(len).map_err(|_| FormatError::Malformed)?;
            std::str::from_utf8(take(bytes, len)?).map(Some).map_err(|_| FormatError::Malformed)
        }
    }
}

fn take_bytes<'a>(bytes: &mut &'a [u8]) -> Result<&'a [u8], FormatError> {
    let len = usize::try_from(take_i32(bytes)?).map_err(|_| FormatError::Malformed)?;
    take(bytes, len)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn text() -> impl Strategy<Value = String> {
        "[a-zA-Z0-9é .@-]{0,12}"
    }

    fn bytes() -> impl Strategy<Value = Bytes> {
        proptest::collection::vec(any::<u8>(), 0..20).prop_map(Bytes::from)
    }

    fn timeout() -> impl Strategy<Value = Duration> {
        (0..i32::MAX as u64).prop_map(Duration::from_millis)
    }

    fn member() -> impl Strategy<Value = MemberMetadata> {
        let ids = ("[a-z]{1,9}", proptest::option::of(text()), text(), text());
        (ids, timeout(), timeout(), bytes(), bytes()).prop_map(
            |(ids, rebalance, session, sub, assignment)| MemberMetadata {
                member_id: MemberId::parse(&ids.0).unwrap(),
                instance_id: ids.1.as_deref().map(InstanceId::new),
                client_id: ids.2,
                client_host: ids.3,
                rebalance_timeout: rebalance,
                session_timeout: session,
                subscription: sub,
                assignment,
            },
        )
    }

    proptest! {
        #[test]
        fn group_values_round_trip(
            protocol_type in text(),
            generation in any::<i32>(),
            protocol in proptest::option::of(text()),
            leader in proptest::option::of("[a-z]{1,9}"),
            since in proptest::option::of(0..i64::MAX),
            members in proptest::collection::vec(member(), 0..4),
        ) {
            let value = GroupMetadata {
                protocol_type, generation, protocol, members,
                leader: leader.as_deref().and_then(MemberId::parse),
                state_since: since.map(TimestampMs),
            };
            prop_assert_eq!(GroupMetadata::decode(&value.encode().unwrap()), Ok(value));
        }

        #[test]
        fn offset_values_round_trip(
            offset in any::<i64>(), epoch in any::<i32>(), metadata in text(),
            at in any::<i64>(), expires in proptest::option::of(0..i64::MAX), topic in 0..u128::MAX,
        ) {
            let value = CommittedOffset {
                offset: Offset(offset),
                leader_epoch: if expires.is_some() { LeaderEpoch::NONE } else { LeaderEpoch(epoch) },
                metadata,
                committed_at: TimestampMs(at),
                expires_at: expires.map(TimestampMs),
                topic: Some(TopicId(uuid::Uuid::from_u128(topic))).filter(|id| expires.is_none() && topic % 3 > 0 && !id.0.is_nil()),
            };
            prop_assert_eq!(CommittedOffset::decode(&value.encode().unwrap()), Ok(value));
        }

        #[test]
        fn garbage_is_an_error_and_never_a_panic(garbage in proptest::collection::vec(any::<u8>(), 0..64)) {
            let _ = Key::decode(&garbage);
            let _ = CommittedOffset::decode(&garbage);
            let _ = GroupMetadata::decode(&garbage);
        }
    }

    #[test]
    fn the_bytes_are_those_of_kafka() {
        let key = Key::Offset {
            group: GroupId::new("g"),
            topic: TopicName::parse("t").unwrap(),
            partition: PartitionIndex(7),
        };
        assert_eq!(&key.encode().unwrap()[..], b"\0\x01\0\x01g\0\x01t\0\0\0\x07");
        assert_eq!(Key::decode(&key.encode().unwrap()), Ok(key));
        assert_eq!(&Key::Group(GroupId::new("g")).encode().unwrap()[..], b"\0\x02\0\x01g");
        let value = CommittedOffset {
            offset: Offset(5),
            leader_epoch: LeaderEpoch(2),
            metadata: "m".to_owned(),
            committed_at: TimestampMs(1),
            expires_at: None,
            topic: None,
        };
        let expected = b"\0\x03\0\0\0\0\0\0\0\x05\0\0\0\x02\0\x01m\0\0\0\0\0\0\0\x01";
        assert_eq!(&value.encode().unwrap()[..], expected);
        // Version 4 of OffsetCommitValue, with the topic's id as its first tag.
        let of = CommittedOffset { topic: Some(TopicId(uuid::Uuid::from_u128(7))), ..value.clone() };
        let expected = b"\0\x04\0\0\0\0\0\0\0\x05\0\0\0\x02\x02m\0\0\0\0\0\0\0\x01\
            \x01\0\x10\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\x07";
        assert_eq!(&of.encode().unwrap()[..], expected);
        let later = [&expected[..expected.len() - 19], b"\x01\x05\x02zz"].concat();
        assert_eq!(CommittedOffset::decode(&later), Ok(value.clone()), "a tag of another build");
        let expiring = CommittedOffset { expires_at: Some(TimestampMs(9)), ..value };
        let expected = b"\0\x01\0\0\0\0\0\0\0\x05\0\x01m\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0\x09";
        assert_eq!(&expiring.encode().unwrap()[..], expected);
    }

    #[test]
    fn the_last_record_of_a_key_counts_and_a_tombstone_removes_it() {
        let key = |p| {
            let topic = TopicName::parse("t").unwrap();
            Key::Offset { group: GroupId::new("g"), topic, partition: PartitionIndex(p) }.encode().unwrap()
        };
        let value = |o| {
            let value = CommittedOffset {
                offset: Offset(o),
                leader_epoch: LeaderEpoch::NONE,
                metadata: String::new(),
                committed_at: TimestampMs(0),
                expires_at: None,
                topic: None,
            };
            value.encode().unwrap()
        };
        let mut fold = OffsetsFold::default();
        fold.apply(&key(0), Some(&value(1))).unwrap();
        fold.apply(&key(1), Some(&value(5))).unwrap();
        fold.apply(&key(0), Some(&value(2))).unwrap();
        fold.apply(&key(1), None).unwrap();
        fold.apply(b"\0\x63whatever", Some(b"x")).unwrap();
        let folded = &fold.groups[&GroupId::new("g")];
        let offsets: Vec<i64> = folded.offsets.values().map(|o| o.offset.0).collect();
        assert_eq!(offsets, [2]);
        fold.apply(&key(0), None).unwrap();
        assert!(fold.groups.is_empty());
        assert_eq!(fold.apply(&key(0), Some(b"\0\x05")), Err(FormatError::Version(5)));
    }
}
