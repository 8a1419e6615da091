//! What a mirror says of its links, for whoever asks the region.

use bytes::{BufMut, BytesMut};

use super::Message;
use super::fields::{
    byte_enum, put_error, put_u64_option, take_error, take_offset, take_partition, take_topic,
    take_u64_option,
};
use crate::error::ErrorCode;
use crate::names::{RegionId, TopicName};
use crate::offset::{Offset, PartitionIndex};
use crate::wire::{Reader, WireError, Writer};

/// The mirror's own view of its links, kept by the broker for `mirror status`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReportRequest {
    pub links: Vec<LinkReport>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReportAnswer {
    pub error: ErrorCode,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkReport {
    /// The peer's name as configured.
    pub peer: String,
    pub region: Option<RegionId>,
    pub address: String,
    pub state: LinkState,
    pub reason: String,
    pub rtt_us: Option<u64>,
    pub sent_bytes: u64,
    pub received_bytes: u64,
    pub partitions: Vec<PartitionReport>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum LinkState {
    Connecting = 0,
    Active = 1,
    Lagging = 2,
    Paused = 3,
    Faulted = 4,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Direction {
    /// From this region to the peer.
    Out = 0,
    In = 1,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartitionReport {
    pub topic: TopicName,
    pub partition: PartitionIndex,
    pub direction: Direction,
    pub state: LinkState,
    pub reason: String,
    /// The receiver's vector entry.
    pub next: Offset,
    /// Each `None` when it is not known, which is never the same as 0.
    pub lag_records: Option<u64>,
    pub lag_bytes: Option<u64>,
    pub lag_ms: Option<u64>,
}

impl Message for ReportRequest {
    fn write(&self, out: &mut BytesMut) {
        out.array(&self.links, |o, link| link.write(o));
    }

    fn read(from: &mut Reader) -> Result<Self, WireError> {
        Ok(ReportRequest { links: from.array("links", LinkReport::read)? })
    }
}

impl Message for ReportAnswer {
    fn write(&self, out: &mut BytesMut) {
        put_error(out, self.error);
    }

    fn read(from: &mut Reader) -> Result<Self, WireError> {
        Ok(ReportAnswer { error: take_error(from)? })
    }
}

impl Message for LinkReport {
    fn write(&self, out: &mut BytesMut) {
        out.text(&self.peer);
        out.option(self.region.as_ref(), |o, region| o.uuid(region.0));
        out.text(&self.address);
        self.state.write(out);
        out.text(&self.reason);
        put_u64_option(out, self.rtt_us);
        out.put_u64(self.sent_bytes);
        out.put_u64(self.received_bytes);
        out.array(&self.partitions, |o, p| p.write(o));
    }

    fn read(from: &mut Reader) -> Result<Self, WireError> {
        Ok(LinkReport {
            peer: from.text("peer")?,
            region: from.option("region", |f| f.uuid("region").map(RegionId))?,
            address: from.text("address")?,
            state: LinkState::read(from)?,
            reason: from.text("reason")?,
            rtt_us: take_u64_option(from, "rtt")?,
            sent_bytes: from.u64("sent bytes")?,
            received_bytes: from.u64("received bytes")?,
            partitions: from.array("partitions", PartitionReport::read)?,
        })
    }
}

impl Message for PartitionReport {
    fn write(&self, out: &mut BytesMut) {
        out.text(self.topic.as_str());
        out.put_i32(self.partition.0);
        self.direction.write(out);
        self.state.write(out);
        out.text(&self.reason);
        out.put_i64(self.next.0);
        put_u64_option(out, self.lag_records);
        put_u64_option(out, self.lag_bytes);
        put_u64_option(out, self.lag_ms);
    }

    fn read(from: &mut Reader) -> Result<Self, WireError> {
        Ok(PartitionReport {
            topic: take_topic(from)?,
            partition: take_partition(from)?,
            direction: Direction::read(from)?,
            state: LinkState::read(from)?,
            reason: from.text("reason")?,
            next: take_offset(from, "next")?,
            lag_records: take_u64_option(from, "lag records")?,
            lag_bytes: take_u64_option(from, "lag bytes")?,
            lag_ms: take_u64_option(from, "lag ms")?,
        })
    }
}

byte_enum!(LinkState: Connecting, Active, Lagging, Paused, Faulted);
byte_enum!(Direction: Out, In);
