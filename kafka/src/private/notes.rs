//! What a person should know later: gaps, resets, quarantines and their kin, kept by the region.

use bytes::{BufMut, BytesMut};

use super::Message;
use super::fields::{
    byte_enum, put_error, take_error, take_offset, take_partition, take_topic, take_topic_id,
};
use crate::error::ErrorCode;
use crate::names::{TopicId, TopicName};
use crate::offset::{Offset, PartitionIndex, TimestampMs};
use crate::wire::{Reader, WireError, Writer};

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

byte_enum!(NoteKind: Linked, Skip, Gap, Quarantine, Reset, Drift, Deletion);
