//! The private API keys between a mirror and the brokers of its own region.
//!
//! Allowed on the internal listener to the mirror's principal alone. Owns the messages and their
//! bytes; who may send them and what they do is the broker's. All have version 0, a request header
//! v1 and a response header v0 (no tagged fields), and answers begin with a Kafka error code.
//!
//! Origin offsets are the offsets that a record has in the region where it was produced. Batches
//! travel here exactly as the origin's log holds them: its offsets, its leader epoch, its CRC.

mod links;

use bytes::{BufMut, Bytes, BytesMut};

pub use links::{
    Congestion, LinkPolicy, LinksAnswer, LinksRequest, PATTERNS_MAX, PatternError, TopicPattern,
};

use crate::error::ErrorCode;
use crate::names::{RegionId, RegionName, TopicId, TopicName};
use crate::offset::{LeaderEpoch, Offset, PartitionIndex, TimestampMs};
use crate::wire::{Reader, WireError, Writer};

pub const MIRROR_TOPICS: i16 = 10000;
pub const MIRROR_FETCH: i16 = 10001;
pub const MIRROR_APPEND: i16 = 10002;
pub const MIRROR_VECTORS: i16 = 10003;
pub const MIRROR_REPORT: i16 = 10004;
pub const MIRROR_NOTES: i16 = 10005;
pub const MIRROR_LINKS: i16 = 10006;

/// Every private key, for the broker's dispatch.
pub const KEYS: std::ops::RangeInclusive<i16> = MIRROR_TOPICS..=MIRROR_LINKS;

/// The version of every private message so far.
pub const VERSION: i16 = 0;

/// A message of this module.
pub trait Message: Sized {
    fn write(&self, out: &mut BytesMut);
    fn read(from: &mut Reader) -> Result<Self, WireError>;

    fn encode(&self) -> Bytes {
        let mut out = BytesMut::new();
        self.write(&mut out);
        out.freeze()
    }

    /// The whole of `bytes` as one message.
    fn decode(bytes: Bytes) -> Result<Self, WireError> {
        let mut from = Reader::new(bytes);
        let message = Self::read(&mut from)?;
        from.end()?;
        Ok(message)
    }
}

/// Asks for the topics of this region. `since` is the generation of an earlier answer, 0 for none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopicsRequest {
    pub since: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopicsAnswer {
    pub error: ErrorCode,
    /// Changes whenever the list does; never 0.
    pub generation: u64,
    pub region: RegionId,
    pub region_name: RegionName,
    /// `None`: as in the generation that was asked about. Internal topics are left out.
    pub topics: Option<Vec<TopicInfo>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopicInfo {
    pub name: TopicName,
    /// This incarnation of the topic in this region.
    pub id: TopicId,
    pub partitions: i32,
    pub lanes: bool,
    /// Overrides only, sorted by key.
    pub configs: Vec<(String, String)>,
    /// When the configuration was last changed, for the rule that resolves drift.
    pub changed_at: TimestampMs,
}

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

/// Reads durable, committed batches that originated in this region.
///
/// Waits up to `wait_ms` until any partition has an answer worth giving. A later request of the
/// same `session` ends the wait of an earlier one at once; one without partitions does only that.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FetchRequest {
    pub session: u64,
    pub wait_ms: u32,
    /// Of the whole answer; the first batch of each partition is never held back by it alone.
    pub bytes_max: u32,
    /// Which lane records may leave; those that may not are covered ranges.
    pub pass_boe: bool,
    pub pass_ppe: bool,
    pub partitions: Vec<FetchFrom>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FetchFrom {
    pub topic: TopicName,
    pub partition: PartitionIndex,
    /// The incarnation that `from` belongs to.
    pub id: TopicId,
    pub from: Offset,
    pub bytes_max: u32,
    /// Checked against this log's history when given.
    pub claim: Option<Claim>,
    /// The end that the asker knows of; an answer is due when it has moved. -1 asks at once.
    pub known_end: Offset,
}

/// Partitions without news are left out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FetchAnswer {
    pub error: ErrorCode,
    pub partitions: Vec<Fetched>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fetched {
    /// Position in the request's list.
    pub index: u32,
    pub outcome: FetchOutcome,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FetchOutcome {
    Read(OriginRead),
    /// The claim or the position does not fit this log: it has lost what the peer holds.
    Truncated {
        reason: String,
    },
    /// The topic is another incarnation now, or gone.
    Incarnation {
        now: Option<TopicId>,
    },
    /// Not now; the code says what to do.
    Failed {
        code: ErrorCode,
        reason: String,
    },
}

/// What a partition had from an offset on. Offsets of `from..next` that no batch holds are covered
/// ranges: this region's markers, other regions' records, aborted or compacted ones.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OriginRead {
    pub batches: Bytes,
    /// All below was looked at.
    pub next: Offset,
    /// After the last record of this origin that the read met, or where it began if it met none; the
    /// end of the log where the read did not get there. Lag counts to here.
    pub end: Offset,
    /// Offsets below are gone (retention, DeleteRecords): below it a covered range is a loss.
    pub log_start: Offset,
    /// The extractor list in force over these batches, where they may hold lane records.
    pub extractors: Option<Vec<String>>,
    /// Base offsets of batches that were rewritten because records of them may not leave.
    pub rewritten: Vec<Offset>,
}

/// Units to append, each to its own partition or in order to the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AppendRequest {
    pub units: Vec<Unit>,
}

/// A run of batches of one origin and all that one append holds. `first` must be what the
/// partition's vector says; offsets from `first` on that no batch holds are covered ranges.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unit {
    pub topic: TopicName,
    pub partition: PartitionIndex,
    /// The local incarnation that this is meant for.
    pub id: TopicId,
    pub origin: RegionId,
    pub incarnation: TopicId,
    pub first: Offset,
    /// The extractors that lane records in here were judged by; `None` without lane records.
    pub extractors: Option<Vec<String>>,
    /// The last batch is not as the origin holds it, so its CRC proves nothing later.
    pub last_rewritten: bool,
    /// One batch at least.
    pub batches: Bytes,
}

/// One outcome for each unit, in order; given when what it says is durable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AppendAnswer {
    pub error: ErrorCode,
    pub outcomes: Vec<AppendOutcome>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AppendOutcome {
    Applied {
        next: Offset,
    },
    /// Wholly below `next`.
    Duplicate {
        next: Offset,
    },
    /// Begins above `next`.
    Gap {
        next: Offset,
    },
    /// Begins below `next` and ends above it: fenced, nothing was applied.
    Overlap {
        next: Offset,
    },
    /// Neither applied nor refused for its position: an operator decides.
    Faulted {
        reason: String,
    },
    /// Not now (owner moved, disk full, topic of another incarnation); the code says what to do.
    Failed {
        code: ErrorCode,
        reason: String,
    },
}

/// What the apply rule says to a unit that covers origin offsets `first..next`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Apply,
    Duplicate,
    Gap,
    /// Overlaps what is held: never to be cut to fit, the histories may differ.
    Fence,
}

impl Verdict {
    /// The apply rule. `held` is the receiver's vector entry of the same origin and incarnation, 0
    /// when there is none. Equal or wholly below, and nothing in between: "less or equal" is not
    /// "seen".
    pub fn of(held: Offset, first: Offset, next: Offset) -> Verdict {
        if first >= next {
            Verdict::Fence
        } else if first == held {
            Verdict::Apply
        } else if next <= held {
            Verdict::Duplicate
        } else if first > held {
            Verdict::Gap
        } else {
            Verdict::Fence
        }
    }
}

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

/// Adds durable notes, and lists those of one peer (all with an empty text).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotesRequest {
    pub add: Vec<Note>,
    pub list: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotesAnswer {
    pub error: ErrorCode,
    pub notes: Vec<Note>,
}

/// A durable, listed entry. One with the same (peer, kind, topic, partition, incarnation, from)
/// replaces the earlier, so saying a thing twice keeps one entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    pub peer: String,
    pub kind: NoteKind,
    pub topic: TopicName,
    pub partition: PartitionIndex,
    pub incarnation: TopicId,
    pub from: Offset,
    pub to: Offset,
    pub at: TimestampMs,
    pub text: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum NoteKind {
    /// This incarnation of the peer's topic is mirrored here. Not a fault: it remembers that a
    /// topic that is missing was deleted here, so that the link does not bring it back.
    Linked = 0,
    /// The operator skipped a range.
    Skip = 1,
    /// Retention at the source passed what had not been sent.
    Gap = 2,
    /// A batch could not be applied.
    Quarantine = 3,
    /// The source is another incarnation, or has lost what we hold.
    Reset = 4,
    /// Configurations differ.
    Drift = 5,
    /// A topic was deleted here because the peer's was. `incarnation` is the one that was deleted.
    Deletion = 6,
}

// ---- bytes ----

macro_rules! byte_enum {
    ($name:ident: $($variant:ident),*) => {
        impl $name {
            pub fn write(self, out: &mut BytesMut) {
                out.put_u8(self as u8);
            }

            pub fn from_byte(byte: u8) -> Option<$name> {
                match byte {
                    $(v if v == $name::$variant as u8 => Some($name::$variant),)*
                    _ => None,
                }
            }

            pub fn read(from: &mut Reader) -> Result<$name, WireError> {
                $name::from_byte(from.u8(stringify!($name))?).ok_or(WireError::Value(stringify!($name)))
            }
        }
    };
}

byte_enum!(LinkState: Connecting, Active, Lagging, Paused, Faulted);
byte_enum!(Direction: Out, In);
byte_enum!(NoteKind: Linked, Skip, Gap, Quarantine, Reset, Drift, Deletion);

pub fn put_error(out: &mut BytesMut, error: ErrorCode) {
    out.put_i16(error.code());
}

pub fn take_error(from: &mut Reader) -> Result<ErrorCode, WireError> {
    ErrorCode::from_code(from.i16("error")?).ok_or(WireError::Value("error"))
}

pub fn take_topic(from: &mut Reader) -> Result<TopicName, WireError> {
    TopicName::parse(&from.text("topic")?).map_err(|_| WireError::Value("topic"))
}

pub fn take_offset(from: &mut Reader, field: &'static str) -> Result<Offset, WireError> {
    match from.i64(field)? {
        value if value >= -1 => Ok(Offset(value)),
        _ => Err(WireError::Value(field)),
    }
}

fn take_partition(from: &mut Reader) -> Result<PartitionIndex, WireError> {
    from.i32("partition").map(PartitionIndex)
}

fn take_topic_id(from: &mut Reader) -> Result<TopicId, WireError> {
    from.uuid("topic id").map(TopicId)
}

fn take_u64_option(from: &mut Reader, field: &'static str) -> Result<Option<u64>, WireError> {
    from.option(field, |f| f.u64(field))
}

fn put_u64_option(out: &mut BytesMut, value: Option<u64>) {
    out.option(value.as_ref(), |o, v| o.put_u64(*v));
}

pub fn put_extractors(out: &mut BytesMut, list: Option<&Vec<String>>) {
    out.option(list, |o, list| o.array(list, |o, e| o.text(e)));
}

pub fn take_extractors(from: &mut Reader) -> Result<Option<Vec<String>>, WireError> {
    from.option("extractors", |f| f.array("extractors", |f| f.text("extractor")))
}

impl Message for TopicsRequest {
    fn write(&self, out: &mut BytesMut) {
        out.put_u64(self.since);
    }

    fn read(from: &mut Reader) -> Result<Self, WireError> {
        Ok(TopicsRequest { since: from.u64("since")? })
    }
}

impl Message for TopicsAnswer {
    fn write(&self, out: &mut BytesMut) {
        put_error(out, self.error);
        out.put_u64(self.generation);
        out.uuid(self.region.0);
        out.text(self.region_name.as_str());
        out.option(self.topics.as_ref(), |o, topics| o.array(topics, |o, t| t.write(o)));
    }

    fn read(from: &mut Reader) -> Result<Self, WireError> {
        Ok(TopicsAnswer {
            error: take_error(from)?,
            generation: from.u64("generation")?,
            region: RegionId(from.uuid("region")?),
            region_name: RegionName::parse(&from.text("region name")?)
                .map_err(|_| WireError::Value("region name"))?,
            topics: from.option("topics", |f| f.array("topics", TopicInfo::read))?,
        })
    }
}

impl Message for TopicInfo {
    fn write(&self, out: &mut BytesMut) {
        out.text(self.name.as_str());
        out.uuid(self.id.0);
        out.put_i32(self.partitions);
        out.flag(self.lanes);
        out.array(&self.configs, |o, (key, value)| {
            o.text(key);
            o.text(value);
        });
        out.put_i64(self.changed_at.0);
    }

    fn read(from: &mut Reader) -> Result<Self, WireError> {
        Ok(TopicInfo {
            name: take_topic(from)?,
            id: take_topic_id(from)?,
            partitions: from.i32("partitions")?,
            lanes: from.flag("lanes")?,
            configs: from.array("configs", |f| Ok((f.text("config key")?, f.text("config value")?)))?,
            changed_at: TimestampMs(from.i64("changed at")?),
        })
    }
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

impl Message for FetchRequest {
    fn write(&self, out: &mut BytesMut) {
        out.put_u64(self.session);
        out.put_u32(self.wait_ms);
        out.put_u32(self.bytes_max);
        out.flag(self.pass_boe);
        out.flag(self.pass_ppe);
        out.array(&self.partitions, |o, p| p.write(o));
    }

    fn read(from: &mut Reader) -> Result<Self, WireError> {
        Ok(FetchRequest {
            session: from.u64("session")?,
            wait_ms: from.u32("wait")?,
            bytes_max: from.u32("bytes max")?,
            pass_boe: from.flag("pass boe")?,
            pass_ppe: from.flag("pass ppe")?,
            partitions: from.array("partitions", FetchFrom::read)?,
        })
    }
}

impl Message for FetchFrom {
    fn write(&self, out: &mut BytesMut) {
        out.text(self.topic.as_str());
        out.put_i32(self.partition.0);
        out.uuid(self.id.0);
        out.put_i64(self.from.0);
        out.put_u32(self.bytes_max);
        out.option(self.claim.as_ref(), |o, claim| claim.write(o));
        out.put_i64(self.known_end.0);
    }

    fn read(from: &mut Reader) -> Result<Self, WireError> {
        Ok(FetchFrom {
            topic: take_topic(from)?,
            partition: take_partition(from)?,
            id: take_topic_id(from)?,
            from: take_offset(from, "from")?,
            bytes_max: from.u32("bytes max")?,
            claim: from.option("claim", Claim::read)?,
            known_end: take_offset(from, "known end")?,
        })
    }
}

impl Message for FetchAnswer {
    fn write(&self, out: &mut BytesMut) {
        put_error(out, self.error);
        out.array(&self.partitions, |o, p| {
            o.put_u32(p.index);
            p.outcome.write(o);
        });
    }

    fn read(from: &mut Reader) -> Result<Self, WireError> {
        let error = take_error(from)?;
        let partitions = from.array("partitions", |f| {
            Ok(Fetched { index: f.u32("index")?, outcome: FetchOutcome::read(f)? })
        })?;
        Ok(FetchAnswer { error, partitions })
    }
}

impl Message for FetchOutcome {
    fn write(&self, out: &mut BytesMut) {
        match self {
            FetchOutcome::Read(read) => {
                out.put_u8(0);
                out.bytes(&read.batches);
                out.put_i64(read.next.0);
                out.put_i64(read.end.0);
                out.put_i64(read.log_start.0);
                put_extractors(out, read.extractors.as_ref());
                out.array(&read.rewritten, |o, base| o.put_i64(base.0));
            }
            FetchOutcome::Truncated { reason } => {
                out.put_u8(1);
                out.text(reason);
            }
            FetchOutcome::Incarnation { now } => {
                out.put_u8(2);
                out.option(now.as_ref(), |o, id| o.uuid(id.0));
            }
            FetchOutcome::Failed { code, reason } => {
                out.put_u8(3);
                put_error(out, *code);
                out.text(reason);
            }
        }
    }

    fn read(from: &mut Reader) -> Result<Self, WireError> {
        Ok(match from.u8("fetch outcome")? {
            0 => FetchOutcome::Read(OriginRead {
                batches: from.bytes("batches")?,
                next: take_offset(from, "next")?,
                end: take_offset(from, "end")?,
                log_start: take_offset(from, "log start")?,
                extractors: take_extractors(from)?,
                rewritten: from.array("rewritten", |f| take_offset(f, "rewritten"))?,
            }),
            1 => FetchOutcome::Truncated { reason: from.text("reason")? },
            2 => FetchOutcome::Incarnation { now: from.option("now", take_topic_id)? },
            3 => FetchOutcome::Failed { code: take_error(from)?, reason: from.text("reason")? },
            _ => return Err(WireError::Value("fetch outcome")),
        })
    }
}

impl Message for AppendRequest {
    fn write(&self, out: &mut BytesMut) {
        out.array(&self.units, |o, unit| unit.write(o));
    }

    fn read(from: &mut Reader) -> Result<Self, WireError> {
        Ok(AppendRequest { units: from.array("units", Unit::read)? })
    }
}

impl AppendRequest {
    /// The bytes of [`Message::encode`] in pieces, the batches among them not copied.
    pub fn pieces(&self) -> Vec<Bytes> {
        let mut pieces = Vec::with_capacity(2 * self.units.len() + 1);
        let mut head = BytesMut::new();
        head.array(&self.units, |head, unit| {
            unit.write_head(head);
            head.put_u32(u32::try_from(unit.batches.len()).expect("a field is far below 4 GiB"));
            pieces.extend([head.split().freeze(), unit.batches.clone()]);
        });
        pieces.push(head.freeze());
        pieces
    }
}

impl Unit {
    /// All but the batches, which are its last field.
    fn write_head(&self, out: &mut BytesMut) {
        out.text(self.topic.as_str());
        out.put_i32(self.partition.0);
        out.uuid(self.id.0);
        out.uuid(self.origin.0);
        out.uuid(self.incarnation.0);
        out.put_i64(self.first.0);
        put_extractors(out, self.extractors.as_ref());
        out.flag(self.last_rewritten);
    }
}

impl Message for Unit {
    fn write(&self, out: &mut BytesMut) {
        self.write_head(out);
        out.bytes(&self.batches);
    }

    fn read(from: &mut Reader) -> Result<Self, WireError> {
        Ok(Unit {
            topic: take_topic(from)?,
            partition: take_partition(from)?,
            id: take_topic_id(from)?,
            origin: RegionId(from.uuid("origin")?),
            incarnation: TopicId(from.uuid("incarnation")?),
            first: take_offset(from, "first")?,
            extractors: take_extractors(from)?,
            last_rewritten: from.flag("last rewritten")?,
            batches: from.bytes("batches")?,
        })
    }
}

impl Message for AppendAnswer {
    fn write(&self, out: &mut BytesMut) {
        put_error(out, self.error);
        out.array(&self.outcomes, |o, outcome| outcome.write(o));
    }

    fn read(from: &mut Reader) -> Result<Self, WireError> {
        let error = take_error(from)?;
        Ok(AppendAnswer { error, outcomes: from.array("outcomes", AppendOutcome::read)? })
    }
}

impl Message for AppendOutcome {
    fn write(&self, out: &mut BytesMut) {
        let (tag, next) = match self {
            AppendOutcome::Applied { next } => (0, next),
            AppendOutcome::Duplicate { next } => (1, next),
            AppendOutcome::Gap { next } => (2, next),
            AppendOutcome::Overlap { next } => (5, next),
            AppendOutcome::Faulted { reason } => {
                out.put_u8(3);
                return out.text(reason);
            }
            AppendOutcome::Failed { code, reason } => {
                out.put_u8(4);
                put_error(out, *code);
                return out.text(reason);
            }
        };
        out.put_u8(tag);
        out.put_i64(next.0);
    }

    fn read(from: &mut Reader) -> Result<Self, WireError> {
        Ok(match from.u8("append outcome")? {
            0 => AppendOutcome::Applied { next: take_offset(from, "next")? },
            1 => AppendOutcome::Duplicate { next: take_offset(from, "next")? },
            2 => AppendOutcome::Gap { next: take_offset(from, "next")? },
            3 => AppendOutcome::Faulted { reason: from.text("reason")? },
            4 => AppendOutcome::Failed { code: take_error(from)?, reason: from.text("reason")? },
            5 => AppendOutcome::Overlap { next: take_offset(from, "next")? },
            _ => return Err(WireError::Value("append outcome")),
        })
    }
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

impl Message for NotesRequest {
    fn write(&self, out: &mut BytesMut) {
        out.array(&self.add, |o, note| note.write(o));
        out.option(self.list.as_ref(), |o, peer| o.text(peer));
    }

    fn read(from: &mut Reader) -> Result<Self, WireError> {
        let add = from.array("notes", Note::read)?;
        Ok(NotesRequest { add, list: from.option("list", |f| f.text("peer"))? })
    }
}

impl Message for NotesAnswer {
    fn write(&self, out: &mut BytesMut) {
        put_error(out, self.error);
        out.array(&self.notes, |o, note| note.write(o));
    }

    fn read(from: &mut Reader) -> Result<Self, WireError> {
        let error = take_error(from)?;
        Ok(NotesAnswer { error, notes: from.array("notes", Note::read)? })
    }
}

impl Message for Note {
    fn write(&self, out: &mut BytesMut) {
        out.text(&self.peer);
        self.kind.write(out);
        out.text(self.topic.as_str());
        out.put_i32(self.partition.0);
        out.uuid(self.incarnation.0);
        out.put_i64(self.from.0);
        out.put_i64(self.to.0);
        out.put_i64(self.at.0);
        out.text(&self.text);
    }

    fn read(from: &mut Reader) -> Result<Self, WireError> {
        Ok(Note {
            peer: from.text("peer")?,
            kind: NoteKind::read(from)?,
            topic: take_topic(from)?,
            partition: take_partition(from)?,
            incarnation: take_topic_id(from)?,
            from: take_offset(from, "from")?,
            to: take_offset(from, "to")?,
            at: TimestampMs(from.i64("at")?),
            text: from.text("text")?,
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use uuid::Uuid;

    use super::*;

    fn topic() -> impl Strategy<Value = TopicName> {
        "[a-z0-9_-]{1,12}".prop_map(|t| TopicName::parse(&t).expect("a legal name"))
    }

    fn uuid() -> impl Strategy<Value = Uuid> {
        any::<u128>().prop_map(Uuid::from_u128)
    }

    fn offset() -> impl Strategy<Value = Offset> {
        (-1i64..i64::MAX).prop_map(Offset)
    }

    fn blob() -> impl Strategy<Value = Bytes> {
        proptest::collection::vec(any::<u8>(), 0..64).prop_map(Bytes::from)
    }

    fn claim() -> impl Strategy<Value = Claim> {
        (any::<i32>(), offset(), any::<u32>()).prop_map(|(epoch, base, crc)| Claim {
            epoch: LeaderEpoch(epoch),
            base,
            crc,
        })
    }

    fn topic_info() -> impl Strategy<Value = TopicInfo> {
        let configs = proptest::collection::vec((".{0,9}", ".{0,9}"), 0..4);
        (topic(), uuid(), any::<i32>(), any::<bool>(), configs, any::<i64>()).prop_map(
            |(name, id, partitions, lanes, configs, at)| TopicInfo {
                name,
                id: TopicId(id),
                partitions,
                lanes,
                configs,
                changed_at: TimestampMs(at),
            },
        )
    }

    fn vector() -> impl Strategy<Value = PartitionVector> {
        let origins = proptest::collection::vec(
            (uuid(), uuid(), offset(), claim()).prop_map(|(region, id, next, last)| OriginPosition {
                region: RegionId(region),
                incarnation: TopicId(id),
                next,
                last,
            }),
            0..4,
        );
        (uuid(), offset(), offset(), origins).prop_map(|(id, log_start, durable, origins)| PartitionVector {
            error: ErrorCode::None,
            id: TopicId(id),
            log_start,
            durable,
            origins,
        })
    }

    fn fetch_from() -> impl Strategy<Value = FetchFrom> {
        let claim = proptest::option::of(claim());
        (topic(), any::<i32>(), uuid(), offset(), any::<u32>(), claim, offset()).prop_map(
            |(topic, partition, id, from, bytes_max, claim, known_end)| FetchFrom {
                topic,
                partition: PartitionIndex(partition),
                id: TopicId(id),
                from,
                bytes_max,
                claim,
                known_end,
            },
        )
    }

    fn fetch_outcome() -> impl Strategy<Value = FetchOutcome> {
        prop_oneof![
            (blob(), offset(), offset(), offset(), extractors()).prop_map(
                |(batches, next, end, log_start, extractors)| {
                    let rewritten = vec![next, end];
                    let read = OriginRead { batches, next, end, log_start, extractors, rewritten };
                    FetchOutcome::Read(read)
                }
            ),
            ".{0,9}".prop_map(|reason| FetchOutcome::Truncated { reason }),
            proptest::option::of(uuid().prop_map(TopicId)).prop_map(|now| FetchOutcome::Incarnation { now }),
            ".{0,9}".prop_map(|reason| FetchOutcome::Failed { code: ErrorCode::KafkaStorageError, reason }),
        ]
    }

    fn extractors() -> impl Strategy<Value = Option<Vec<String>>> {
        proptest::option::of(proptest::collection::vec(".{0,9}", 0..3))
    }

    fn unit() -> impl Strategy<Value = Unit> {
        (topic(), any::<i32>(), uuid(), uuid(), uuid(), offset(), extractors(), blob()).prop_map(
            |(topic, partition, id, origin, incarnation, first, extractors, batches)| Unit {
                topic,
                partition: PartitionIndex(partition),
                id: TopicId(id),
                origin: RegionId(origin),
                incarnation: TopicId(incarnation),
                first,
                last_rewritten: extractors.is_some(),
                extractors,
                batches,
            },
        )
    }

    fn append_outcome() -> impl Strategy<Value = AppendOutcome> {
        prop_oneof![
            offset().prop_map(|next| AppendOutcome::Applied { next }),
            offset().prop_map(|next| AppendOutcome::Duplicate { next }),
            offset().prop_map(|next| AppendOutcome::Gap { next }),
            offset().prop_map(|next| AppendOutcome::Overlap { next }),
            ".{0,9}".prop_map(|reason| AppendOutcome::Faulted { reason }),
            ".{0,9}".prop_map(|reason| AppendOutcome::Failed { code: ErrorCode::UnknownTopicId, reason }),
        ]
    }

    fn partition_report() -> impl Strategy<Value = PartitionReport> {
        let lag = || proptest::option::of(any::<u64>());
        (topic(), any::<i32>(), any::<bool>(), ".{0,9}", offset(), lag(), lag(), lag()).prop_map(
            |(topic, partition, out, reason, next, lag_records, lag_bytes, lag_ms)| PartitionReport {
                topic,
                partition: PartitionIndex(partition),
                direction: if out { Direction::Out } else { Direction::In },
                state: LinkState::Lagging,
                reason,
                next,
                lag_records,
                lag_bytes,
                lag_ms,
            },
        )
    }

    fn note() -> impl Strategy<Value = Note> {
        (".{0,9}", topic(), any::<i32>(), uuid(), offset(), offset(), any::<i64>(), ".{0,9}").prop_map(
            |(peer, topic, partition, id, from, to, at, text)| Note {
                peer,
                kind: NoteKind::Gap,
                topic,
                partition: PartitionIndex(partition),
                incarnation: TopicId(id),
                from,
                to,
                at: TimestampMs(at),
                text,
            },
        )
    }

    fn survives<M: Message + PartialEq + std::fmt::Debug>(message: M) {
        let bytes = message.encode();
        assert_eq!(M::decode(bytes.clone()).as_ref(), Ok(&message));
        for cut in 0..bytes.len() {
            assert!(M::decode(bytes.slice(..cut)).is_err(), "a message cut at {cut} was accepted");
        }
    }

    #[test]
    fn the_apply_rule_applies_what_begins_at_the_vector_and_nothing_else() {
        let verdict = |held, first, next| Verdict::of(Offset(held), Offset(first), Offset(next));
        assert_eq!(verdict(5, 5, 9), Verdict::Apply);
        assert_eq!(verdict(5, 0, 5), Verdict::Duplicate);
        assert_eq!(verdict(5, 6, 9), Verdict::Gap);
        assert_eq!(verdict(5, 4, 9), Verdict::Fence);
        assert_eq!(verdict(5, 4, 6), Verdict::Fence);
        assert_eq!(verdict(5, 5, 5), Verdict::Fence);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn topics_survive_the_wire(
            topics in proptest::option::of(proptest::collection::vec(topic_info(), 0..4)),
            (generation, region) in (any::<u64>(), uuid()),
        ) {
            survives(TopicsRequest { since: generation });
            let region_name = RegionName::parse("east-1").expect("a legal name");
            let (error, region) = (ErrorCode::None, RegionId(region));
            survives(TopicsAnswer { error, generation, region, region_name, topics });
        }

        #[test]
        fn vectors_survive_the_wire(
            partitions in proptest::collection::vec(vector(), 0..4),
            asked in proptest::collection::vec((topic(), any::<i32>().prop_map(PartitionIndex)), 0..4),
        ) {
            survives(VectorsRequest { partitions: asked });
            survives(VectorsAnswer { error: ErrorCode::None, partitions });
        }

        #[test]
        fn fetches_survive_the_wire(
            partitions in proptest::collection::vec(fetch_from(), 0..4),
            outcomes in proptest::collection::vec(fetch_outcome(), 0..4),
            (session, wait_ms, bytes_max, pass_boe, pass_ppe) in any::<(u64, u32, u32, bool, bool)>(),
        ) {
            survives(FetchRequest { session, wait_ms, bytes_max, pass_boe, pass_ppe, partitions });
            let partitions = outcomes
                .into_iter()
                .enumerate()
                .map(|(index, outcome)| Fetched { index: index as u32, outcome })
                .collect();
            survives(FetchAnswer { error: ErrorCode::None, partitions });
        }

        #[test]
        fn appends_survive_the_wire(
            units in proptest::collection::vec(unit(), 0..4),
            outcomes in proptest::collection::vec(append_outcome(), 0..4),
        ) {
            let request = AppendRequest { units };
            prop_assert_eq!(request.pieces().concat(), request.encode());
            survives(request);
            survives(AppendAnswer { error: ErrorCode::None, outcomes });
        }

        #[test]
        fn reports_and_notes_survive_the_wire(
            partitions in proptest::collection::vec(partition_report(), 0..4),
            notes in proptest::collection::vec(note(), 0..4),
            (region, list) in (proptest::option::of(uuid().prop_map(RegionId)), proptest::option::of(".{0,9}")),
        ) {
            survives(ReportRequest { links: vec![LinkReport {
                peer: "west".into(), region, address: "127.0.0.1:9096".into(), state: LinkState::Active,
                reason: String::new(), rtt_us: Some(7), sent_bytes: 1, received_bytes: 2, partitions,
            }] });
            survives(ReportAnswer { error: ErrorCode::None });
            survives(NotesRequest { add: notes.clone(), list });
            survives(NotesAnswer { error: ErrorCode::None, notes });
        }

        #[test]
        fn random_bytes_are_an_error_or_a_message_and_never_a_panic(
            bytes in proptest::collection::vec(any::<u8>(), 0..200),
        ) {
            let bytes = Bytes::from(bytes);
            let _ = TopicsAnswer::decode(bytes.clone());
            let _ = VectorsAnswer::decode(bytes.clone());
            let _ = FetchRequest::decode(bytes.clone());
            let _ = FetchAnswer::decode(bytes.clone());
            let _ = AppendRequest::decode(bytes.clone());
            let _ = AppendAnswer::decode(bytes.clone());
            let _ = ReportRequest::decode(bytes.clone());
            let _ = NotesRequest::decode(bytes);
        }
    }
}
