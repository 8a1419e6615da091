//! The frames of a link: control frames, and units on the data streams.
//!
//! Every frame stands under a u32 length. The layouts are in `docs/PROTOCOL-LINK.md`; fields are
//! those of `kafka::wire`. Nothing here knows what a frame does.
//!
//! ```text
//! control: length u32 | tag u8 | fields
//! unit:    length u32 | sub u32 | first i64 | lost_to (flag, i64) | extractors (flag, list)
//!          | last_rewritten u8 | packing u8 (0 as is, 1 zstd) | unpacked length u32 | batches
//! ```

mod packer;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use kafka::limits::REQUEST_BYTES_MAX;
use kafka::private::{Claim, Message, TopicInfo, put_extractors, take_extractors, take_offset, take_topic};
use kafka::wire::{Reader, WireError, Writer};
use kafka::{Offset, PartitionIndex, RegionId, RegionName, TopicId, TopicName};
use uuid::Uuid;

pub use packer::Packer;

/// Newest protocol version that is spoken here, and the oldest still understood.
pub const VERSION: u16 = 2;
pub const VERSION_MIN: u16 = 1;
/// The version since which there are [`Frame::Deleted`] and [`LinkErrorCode::Paused`].
pub const VERSION_OF_DELETED: u16 = 2;

/// Largest control frame; longer lists are sent in several.
pub const CONTROL_BYTES_MAX: usize = 1024 * 1024;
/// Largest unit frame: one batch of any legal size, and its head.
pub const UNIT_FRAME_BYTES_MAX: usize = REQUEST_BYTES_MAX;
/// Topics in one offer frame.
pub const OFFER_TOPICS_MAX: usize = 200;
/// Entries in one ack or beacon frame.
pub const LIST_MAX: usize = 10_000;

/// Names a subscription: given by the receiver, never used twice on a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Sub(pub u32);

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Frame {
    /// The first frame of each side.
    Hello(Hello),
    /// Topics that the sender has: new ones and changed ones; and names that are gone.
    Offer { topics: Vec<TopicInfo>, gone: Vec<TopicName> },
    /// Send me this partition from `next` on.
    Want(Want),
    /// Forget a subscription; what still arrives under it is dropped.
    Unwant { sub: Sub },
    /// Bytes of units that may be sent in all, since the connection began.
    Credit { granted: u64 },
    /// Durable vector entries.
    Ack { acks: Vec<(Sub, Offset)> },
    /// The end that lag counts to, of each subscription where it moved. Also the sign of life.
    Beacon { ends: Vec<(Sub, Offset)> },
    /// The source does not feed this subscription.
    Refuse { sub: Sub, why: Refusal },
    /// The connection ends, for this reason.
    Error { code: LinkErrorCode, text: String },
    /// The sender's copy of this incarnation of the receiver's topic was deleted by a person.
    Deleted { topic: TopicName, incarnation: TopicId },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    pub version: u16,
    pub version_min: u16,
    pub region: RegionId,
    pub name: RegionName,
    /// New for each run of a mirror.
    pub instance: Uuid,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Want {
    pub sub: Sub,
    pub topic: TopicName,
    /// The source's incarnation.
    pub incarnation: TopicId,
    pub partition: PartitionIndex,
    pub next: Offset,
    pub claim: Option<Claim>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The source has lost what the receiver holds.
    Truncated(String),
    /// The source's topic is another incarnation, or gone.
    Incarnation,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum LinkErrorCode {
    /// A frame that makes no sense here.
    Protocol = 1,
    /// No protocol version in common.
    Version = 2,
    /// Both ends are the same region.
    SelfLink = 3,
    /// The peer is not the region that this link is for.
    WrongPeer = 4,
    /// Another connection serves this pair of regions.
    Replaced = 5,
    /// Nothing was heard for too long.
    Silent = 6,
    /// The mirror stops, or begins anew.
    Stopping = 7,
    /// The link is paused by its policy.
    Paused = 8,
}

/// One unit on its way: batches as the origin's log holds them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnitFrame {
    pub sub: Sub,
    pub first: Offset,
    /// Set when the source no longer had what lies below it and was not sent.
    pub lost_to: Option<Offset>,
    pub extractors: Option<Vec<String>>,
    pub last_rewritten: bool,
    pub batches: Bytes,
}

impl Frame {
    /// Appends the frame with its length.
    pub fn write(&self, out: &mut BytesMut) {
        let start = out.len();
        out.put_u32(0);
        self.write_body(out);
        let len = out.len() - start - 4;
        assert!(len <= CONTROL_BYTES_MAX, "lists are cut before they are framed");
        out[start..start + 4].copy_from_slice(&(len as u32).to_be_bytes());
    }

    fn write_body(&self, out: &mut BytesMut) {
        match self {
            Frame::Hello(hello) => {
                out.put_u8(1);
                out.put_u16(hello.version);
                out.put_u16(hello.version_min);
                out.uuid(hello.region.0);
                out.text(hello.name.as_str());
                out.uuid(hello.instance);
            }
            Frame::Offer { topics, gone } => {
                out.put_u8(2);
                out.array(topics, |o, topic| topic.write(o));
                out.array(gone, |o, name| o.text(name.as_str()));
            }
            Frame::Want(want) => {
                out.put_u8(3);
                out.put_u32(want.sub.0);
                out.text(want.topic.as_str());
                out.uuid(want.incarnation.0);
                out.put_i32(want.partition.0);
                out.put_i64(want.next.0);
                out.option(want.claim.as_ref(), |o, claim| claim.write(o));
            }
            Frame::Unwant { sub } => {
                out.put_u8(4);
                out.put_u32(sub.0);
            }
            Frame::Credit { granted } => {
                out.put_u8(5);
                out.put_u64(*granted);
            }
            Frame::Ack { acks } => {
                out.put_u8(6);
                out.array(acks, put_position);
            }
            Frame::Beacon { ends } => {
                out.put_u8(7);
                out.array(ends, put_position);
            }
            Frame::Refuse { sub, why } => {
                out.put_u8(8);
                out.put_u32(sub.0);
                let truncated = match why {
                    Refusal::Truncated(reason) => Some(reason),
                    Refusal::Incarnation => None,
                };
                out.option(truncated, |o, reason| o.text(reason));
            }
            Frame::Error { code, text } => {
                out.put_u8(9);
                out.put_u8(*code as u8);
                out.text(text);
            }
            Frame::Deleted { topic, incarnation } => {
                out.put_u8(10);
                out.text(topic.as_str());
                out.uuid(incarnation.0);
            }
        }
    }

    /// A frame from its body (what stands after the length).
    pub fn read(body: Bytes) -> Result<Frame, WireError> {
        let mut from = Reader::new(body);
        let frame = match from.u8("tag")? {
            1 => Frame::Hello(Hello::read(&mut from)?),
            2 => Frame::Offer {
                topics: from.array("topics", TopicInfo::read)?,
                gone: from.array("gone", take_topic)?,
            },
            3 => Frame::Want(Want {
                sub: take_sub(&mut from)?,
                topic: take_topic(&mut from)?,
                incarnation: TopicId(from.uuid("incarnation")?),
                partition: PartitionIndex(from.i32("partition")?),
                next: take_offset(&mut from, "next")?,
                claim: from.option("claim", Claim::read)?,
            }),
            4 => Frame::Unwant { sub: take_sub(&mut from)? },
            5 => Frame::Credit { granted: from.u64("granted")? },
            6 => Frame::Ack { acks: from.array("acks", take_position)? },
            7 => Frame::Beacon { ends: from.array("ends", take_position)? },
            8 => Frame::Refuse {
                sub: take_sub(&mut from)?,
                why: match from.option("truncated", |f| f.text("reason"))? {
                    Some(reason) => Refusal::Truncated(reason),
                    None => Refusal::Incarnation,
                },
            },
            9 => Frame::Error { code: LinkErrorCode::read(&mut from)?, text: from.text("text")? },
            10 => Frame::Deleted {
                topic: take_topic(&mut from)?,
                incarnation: TopicId(from.uuid("incarnation")?),
            },
            _ => return Err(WireError::Value("tag")),
        };
        from.end()?;
        Ok(frame)
    }
}

impl Hello {
    fn read(from: &mut Reader) -> Result<Hello, WireError> {
        let versions = from.u32("versions")?;
        Ok(Hello {
            version: (versions >> 16) as u16,
            version_min: versions as u16,
            region: RegionId(from.uuid("region")?),
            name: RegionName::parse(&from.text("region name")?)
                .map_err(|_| WireError::Value("region name"))?,
            instance: from.uuid("instance")?,
        })
    }
}

impl LinkErrorCode {
    const ALL: [LinkErrorCode; 8] = [
        LinkErrorCode::Protocol,
        LinkErrorCode::Version,
        LinkErrorCode::SelfLink,
        LinkErrorCode::WrongPeer,
        LinkErrorCode::Replaced,
        LinkErrorCode::Silent,
        LinkErrorCode::Stopping,
        LinkErrorCode::Paused,
    ];

    /// What a peer of this version understands.
    pub fn for_version(self, version: u16) -> LinkErrorCode {
        match self {
            LinkErrorCode::Paused if version < VERSION_OF_DELETED => LinkErrorCode::Stopping,
            code => code,
        }
    }

    fn read(from: &mut Reader) -> Result<LinkErrorCode, WireError> {
        let code = from.u8("error code")?;
        Self::ALL.into_iter().find(|c| *c as u8 == code).ok_or(WireError::Value("error code"))
    }
}

impl UnitFrame {
    /// What the unit counts against credit: its unpacked bytes, and a share for the head, so that
    /// many tiny units cannot outgrow the memory that credit stands for.
    pub fn charge(&self) -> u64 {
        self.batches.len() as u64 + UNIT_OVERHEAD
    }

    /// The frame with its length: all before the payload, and the payload, which is packed where that
    /// saves bytes.
    pub fn encode(&self, packer: &mut Packer) -> (Bytes, Bytes) {
        let packed = packer.pack(self.sub, &self.batches);
        let packing = u8::from(packed.is_some());
        let payload = packed.map_or_else(|| self.batches.clone(), Bytes::from);
        let mut head = BytesMut::with_capacity(64);
        head.put_u32(0);
        head.put_u32(self.sub.0);
        head.put_i64(self.first.0);
        head.option(self.lost_to.as_ref(), |o, offset| o.put_i64(offset.0));
        put_extractors(&mut head, self.extractors.as_ref());
        head.flag(self.last_rewritten);
        head.put_u8(packing);
        head.put_u32(self.batches.len() as u32);
        let len = (head.len() - 4 + payload.len()) as u32;
        head[..4].copy_from_slice(&len.to_be_bytes());
        (head.freeze(), payload)
    }

    /// A unit from its body. The unpacked size is bounded before anything is unpacked.
    pub fn decode(body: Bytes) -> Result<UnitFrame, WireError> {
        let mut from = Reader::new(body);
        let sub = take_sub(&mut from)?;
        let first = take_offset(&mut from, "first")?;
        let lost_to = from.option("lost to", |f| take_offset(f, "lost to"))?;
        let extractors = take_extractors(&mut from)?;
        let last_rewritten = from.flag("last rewritten")?;
        let packing = from.u8("packing")?;
        let unpacked_len = from.u32("unpacked length")? as usize;
        if unpacked_len > UNIT_FRAME_BYTES_MAX {
            return Err(WireError::Value("unpacked length"));
        }
        let payload = from.rest();
        let batches = match packing {
            0 => payload,
            1 => {
                Bytes::from(packer::unpack(&payload, unpacked_len).ok_or(WireError::Value("packed batches"))?)
            }
            _ => return Err(WireError::Value("packing")),
        };
        if batches.len() != unpacked_len {
            return Err(WireError::Value("unpacked length"));
        }
        Ok(UnitFrame { sub, first, lost_to, extractors, last_rewritten, batches })
    }
}

/// Takes the next frame's body off `buffer`; `None` until it is whole.
pub fn take_body(buffer: &mut BytesMut, bytes_max: usize) -> Result<Option<Bytes>, WireError> {
    let Some(len) = buffer.first_chunk::<4>() else { return Ok(None) };
    let len = u32::from_be_bytes(*len) as usize;
    if len == 0 || len > bytes_max {
        return Err(WireError::Value("frame length"));
    }
    if buffer.len() < 4 + len {
        buffer.reserve(4 + len - buffer.len());
        return Ok(None);
    }
    buffer.advance(4);
    Ok(Some(buffer.split_to(len).freeze()))
}

fn put_position(out: &mut BytesMut, (sub, offset): &(Sub, Offset)) {
    out.put_u32(sub.0);
    out.put_i64(offset.0);
}

fn take_position(from: &mut Reader) -> Result<(Sub, Offset), WireError> {
    Ok((take_sub(from)?, take_offset(from, "position")?))
}

fn take_sub(from: &mut Reader) -> Result<Sub, WireError> {
    from.u32("sub").map(Sub)
}

const UNIT_OVERHEAD: u64 = 1024;

#[cfg(test)]
mod tests {
    use kafka::LeaderEpoch;
    use proptest::prelude::*;

    use super::*;

    fn sub() -> impl Strategy<Value = Sub> {
        any::<u32>().prop_map(Sub)
    }

    fn offset() -> impl Strategy<Value = Offset> {
        (0i64..i64::MAX).prop_map(Offset)
    }

    fn joined(unit: &UnitFrame) -> Vec<u8> {
        let (head, payload) = unit.encode(&mut Packer::default());
        [head, payload].concat()
    }

    fn frame() -> impl Strategy<Value = Frame> {
        let topic = || "[a-z]{1,9}".prop_map(|t| TopicName::parse(&t).expect("legal"));
        let positions = || proptest::collection::vec((sub(), offset()), 0..5);
        let claim = (any::<i32>(), offset(), any::<u32>()).prop_map(|(epoch, base, crc)| Claim {
            epoch: LeaderEpoch(epoch),
            base,
            crc,
        });
        let uuid = || any::<u128>().prop_map(Uuid::from_u128);
        prop_oneof![
            (any::<u16>(), any::<u16>(), uuid(), uuid()).prop_map(
                |(version, version_min, region, instance)| {
                    let name = RegionName::parse("west").expect("legal");
                    Frame::Hello(Hello { version, version_min, region: RegionId(region), name, instance })
                }
            ),
            proptest::collection::vec(topic(), 0..4).prop_map(|gone| Frame::Offer { topics: vec![], gone }),
            (sub(), topic(), uuid(), any::<i32>(), offset(), proptest::option::of(claim)).prop_map(
                |(sub, topic, id, partition, next, claim)| {
                    let partition = PartitionIndex(partition);
                    Frame::Want(Want { sub, topic, incarnation: TopicId(id), partition, next, claim })
                }
            ),
            sub().prop_map(|sub| Frame::Unwant { sub }),
            any::<u64>().prop_map(|granted| Frame::Credit { granted }),
            positions().prop_map(|acks| Frame::Ack { acks }),
            positions().prop_map(|ends| Frame::Beacon { ends }),
            (sub(), proptest::option::of(".{0,9}")).prop_map(|(sub, why)| Frame::Refuse {
                sub,
                why: why.map_or(Refusal::Incarnation, Refusal::Truncated),
            }),
            ".{0,9}".prop_map(|text| Frame::Error { code: LinkErrorCode::Paused, text }),
            (topic(), uuid()).prop_map(|(topic, id)| Frame::Deleted { topic, incarnation: TopicId(id) }),
        ]
    }

    proptest! {
        #[test]
        fn control_frames_survive_the_wire_in_any_pieces(
            frames in proptest::collection::vec(frame(), 1..6),
            piece in 1usize..40,
        ) {
            let mut wire = BytesMut::new();
            for frame in &frames {
                frame.write(&mut wire);
            }
            let mut buffer = BytesMut::new();
            let mut read = Vec::new();
            for chunk in wire.chunks(piece) {
                buffer.extend_from_slice(chunk);
                while let Some(body) = take_body(&mut buffer, CONTROL_BYTES_MAX)? {
                    read.push(Frame::read(body)?);
                }
            }
            prop_assert_eq!(read, frames);
            prop_assert!(buffer.is_empty());
        }

        #[test]
        fn units_survive_the_wire_packed_or_not(
            batches in proptest::collection::vec(0u8..4, 0..2000),
            (sub, first, lost) in (sub(), offset(), proptest::option::of(offset())),
        ) {
            let extractors = lost.map(|_| vec!["x-lane".to_owned()]);
            let unit = UnitFrame {
                sub, first, lost_to: lost, extractors, last_rewritten: true, batches: Bytes::from(batches),
            };
            let mut wire = BytesMut::from(&joined(&unit)[..]);
            let body = take_body(&mut wire, UNIT_FRAME_BYTES_MAX)?.expect("whole");
            prop_assert_eq!(UnitFrame::decode(body)?, unit);
        }

        #[test]
        fn random_bytes_are_an_error_or_a_frame_and_never_a_panic(
            bytes in proptest::collection::vec(any::<u8>(), 0..200),
        ) {
            let bytes = Bytes::from(bytes);
            let _ = Frame::read(bytes.clone());
            let _ = UnitFrame::decode(bytes.clone());
            let _ = take_body(&mut BytesMut::from(&bytes[..]), 100);
        }
    }

    #[test]
    fn a_unit_that_unpacks_to_more_than_it_says_is_refused() {
        let unit = UnitFrame {
            sub: Sub(1),
            first: Offset(0),
            lost_to: None,
            extractors: None,
            last_rewritten: false,
            batches: Bytes::from(vec![0; 4096]),
        };
        let mut bytes = BytesMut::from(&joined(&unit)[4..]);
        let at = bytes.windows(4).position(|w| w == 4096u32.to_be_bytes()).expect("the length is there");
        bytes[at..at + 4].copy_from_slice(&100u32.to_be_bytes());
        assert!(UnitFrame::decode(bytes.freeze()).is_err());
    }
}
