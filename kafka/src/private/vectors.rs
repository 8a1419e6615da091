//! How far each origin is held: the vectors of partitions, and a peer's claims against the log.

use bytes::{BufMut, BytesMut};

use super::Message;
use super::fields::{put_error, take_error, take_offset, take_partition, take_topic, take_topic_id};
use crate::error::ErrorCode;
use crate::names::{RegionId, TopicId, TopicName};
use crate::offset::{LeaderEpoch, Offset, PartitionIndex};
use crate::wire::{Reader, WireError, Writer};

/// Asks what partitions hold of each origin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VectorsRequest {
    pub partitions: Vec<(TopicName, PartitionIndex)>,
}

/// One entry for each partition asked for, in that order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VectorsAnswer {
    pub error: ErrorCode,
    pub partitions: Vec<PartitionVector>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartitionVector {
    /// When not `None`, the rest is empty.
    pub error: ErrorCode,
    /// The local incarnation of the topic.
    pub id: TopicId,
    pub log_start: Offset,
    /// The high watermark: all below is durable.
    pub durable: Offset,
    pub origins: Vec<OriginPosition>,
}

/// What a partition holds of one origin: everything below `next` that the origin has kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OriginPosition {
    pub region: RegionId,
    pub incarnation: TopicId,
    pub next: Offset,
    pub last: Claim,
}

/// Proof of the last batch that was applied: it ends just below `next` of its position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claim {
    /// The origin's leader epoch in that batch.
    pub epoch: LeaderEpoch,
    /// The batch's base offset in the origin's log.
    pub base: Offset,
    /// Its CRC in the origin's log; 0 where the batch was rewritten on its way (a lane policy left
    /// records out), then it proves nothing.
    pub crc: u32,
}

impl Message for VectorsRequest {
    fn write(&self, out: &mut BytesMut) {
        out.array(&self.partitions, |o, (topic, partition)| {
            o.text(topic.as_str());
            o.put_i32(partition.0);
        });
    }

    fn read(from: &mut Reader) -> Result<Self, WireError> {
        let partitions = from.array("partitions", |f| Ok((take_topic(f)?, take_partition(f)?)))?;
        Ok(VectorsRequest { partitions })
    }
}

impl Message for VectorsAnswer {
    fn write(&self, out: &mut BytesMut) {
        put_error(out, self.error);
        out.array(&self.partitions, |o, p| p.write(o));
    }

    fn read(from: &mut Reader) -> Result<Self, WireError> {
        let error = take_error(from)?;
        Ok(VectorsAnswer { error, partitions: from.array("partitions", PartitionVector::read)? })
    }
}

impl Message for PartitionVector {
    fn write(&self, out: &mut BytesMut) {
        put_error(out, self.error);
        out.uuid(self.id.0);
        out.put_i64(self.log_start.0);
        out.put_i64(self.durable.0);
        out.array(&self.origins, |o, origin| origin.write(o));
    }

    fn read(from: &mut Reader) -> Result<Self, WireError> {
        Ok(PartitionVector {
            error: take_error(from)?,
            id: take_topic_id(from)?,
            log_start: take_offset(from, "log start")?,
            durable: take_offset(from, "durable")?,
            origins: from.array("origins", OriginPosition::read)?,
        })
    }
}

impl Message for OriginPosition {
    fn write(&self, out: &mut BytesMut) {
        out.uuid(self.region.0);
        out.uuid(self.incarnation.0);
        out.put_i64(self.next.0);
        self.last.write(out);
    }

    fn read(from: &mut Reader) -> Result<Self, WireError> {
        Ok(OriginPosition {
            region: RegionId(from.uuid("region")?),
            incarnation: TopicId(from.uuid("incarnation")?),
            next: take_offset(from, "next")?,
            last: Claim::read(from)?,
        })
    }
}

impl Message for Claim {
    fn write(&self, out: &mut BytesMut) {
        out.put_i32(self.epoch.0);
        out.put_i64(self.base.0);
        out.put_u32(self.crc);
    }

    fn read(from: &mut Reader) -> Result<Self, WireError> {
        Ok(Claim {
            epoch: LeaderEpoch(from.i32("epoch")?),
            base: take_offset(from, "claim base")?,
            crc: from.u32("crc")?,
        })
    }
}
