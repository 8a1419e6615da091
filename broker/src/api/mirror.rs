//! The private APIs of the mirror: what is here, reading what originated here, applying units.
//!
//! Decisions are elsewhere: the apply rule is the partition's, policies are the mirror's. This file
//! checks a peer's claims against the log, so that a log which lost its end is never continued under
//! offsets that were used before, and keeps records of lanes that may not leave from leaving.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use broker_core::fold::Origin;
use broker_store::{MetaError, MetaStore};
use bytes::{Bytes, BytesMut};
use futures_util::future::join_all;
use kafka::frame::RequestHeader;
use kafka::private::{
    self, AppendAnswer, AppendOutcome, AppendRequest, Claim, FetchAnswer, FetchFrom, FetchOutcome,
    FetchRequest, Fetched, LinksAnswer, LinksRequest, Message, Note, NoteKind, NotesAnswer, NotesRequest,
    OriginPosition, OriginRead, PartitionVector, ReportAnswer, ReportRequest, TopicInfo, TopicsAnswer,
    TopicsRequest, Unit, VectorsAnswer, VectorsRequest,
};
use kafka::{Batch, ErrorCode, Offset, PartitionIndex, TimestampMs, TopicId, TopicName};
use lane_core::{Extractors, RecordLane};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::{Answer, Body, Ctx};
use crate::broker::Broker;
use crate::clock;
use crate::control::links_generation;
use crate::partition::{
    AppendError, DurableError, MirrorUnit, Partition, ReadError, ReadUpTo, UnitError, UnitOutcome, Waiter,
};

/// Longest wait of a mirror's read.
const WAIT_MAX: Duration = Duration::from_secs(60);
/// Bytes of the log that one read looks at for one partition.
const SCAN_BYTES_MAX: usize = 8 << 20;
/// Durable notes of all links, links between topics not counted.
pub const NOTES_MAX: usize = 10_000;
/// Sessions whose waits can be ended early; a mirror has one for each link.
const SESSIONS_MAX: usize = 1_000;

/// What the mirror told and asked that is not in a log. One per broker.
#[derive(Default)]
pub struct Board {
    waits: Mutex<HashMap<u64, Arc<Waiter>>>,
    /// Counted at the first note.
    notes: AtomicUsize,
}

impl Board {
    /// Ends the earlier wait of this session.
    fn take_over(&self, session: u64) -> Arc<Waiter> {
        let waiter = Waiter::new();
        let mut waits = self.waits.lock();
        if waits.len() >= SESSIONS_MAX {
            waits.retain(|_, waiter| Arc::strong_count(waiter) > 1);
        }
        if let Some(earlier) = waits.insert(session, waiter.clone()) {
            earlier.wake();
        }
        waiter
    }

    fn is_current(&self, session: u64, waiter: &Arc<Waiter>) -> bool {
        self.waits.lock().get(&session).is_some_and(|current| Arc::ptr_eq(current, waiter))
    }
}

/// Starts a request of a private key.
pub fn handle(ctx: &Ctx, header: &RequestHeader, body: Bytes) -> Answer {
    let started = match header.api_key {
        private::MIRROR_TOPICS => TopicsRequest::decode(body).map(|r| ready(&topics(ctx, &r))),
        private::MIRROR_VECTORS => VectorsRequest::decode(body).map(|r| vectors(ctx, r)),
        private::MIRROR_FETCH => FetchRequest::decode(body).map(|r| fetch(ctx, r)),
        private::MIRROR_APPEND => AppendRequest::decode(body).map(|r| append(ctx, r)),
        private::MIRROR_REPORT => ReportRequest::decode(body).map(|r| {
            ctx.broker.links.put(ctx.connection.id, r.links);
            ready(&ReportAnswer { error: ErrorCode::None })
        }),
        private::MIRROR_NOTES => NotesRequest::decode(body).map(|r| {
            let broker = ctx.broker.clone();
            Answer::Overlap(Box::pin(async move { Body::bytes(take_notes(&broker, r).await.encode()) }))
        }),
        private::MIRROR_LINKS => LinksRequest::decode(body).map(|r| {
            let broker = ctx.broker.clone();
            Answer::Overlap(Box::pin(async move { Body::bytes(links(&broker, &r).await.encode()) }))
        }),
        other => return Answer::Close(format!("API key {other} is not supported")),
    };
    started.unwrap_or_else(|error| Answer::malformed(header, error))
}

fn ready(answer: &impl Message) -> Answer {
    Answer::Ready(Body::bytes(answer.encode()))
}

fn topics(ctx: &Ctx, request: &TopicsRequest) -> TopicsAnswer {
    let (registry, identity) = (&ctx.broker.topics, &ctx.broker.identity);
    // Before the list: a change in between is then seen twice, not missed.
    let change = *registry.changes().borrow();
    let generation = ((identity.epoch.0 as u64) << 40) + change + 1;
    let info = |topic: Arc<crate::topics::Topic>| TopicInfo {
        name: topic.name.clone(),
        id: topic.id,
        partitions: topic.partitions,
        lanes: topic.settings.lanes,
        configs: topic.overrides.iter().map(|(key, value)| (key.clone(), value.clone())).collect(),
        changed_at: TimestampMs(topic.altered_ms),
    };
    let topics = (request.since != generation)
        .then(|| registry.all().into_iter().filter(|t| !t.name.is_internal()).map(info).collect());
    TopicsAnswer {
        error: ErrorCode::None,
        generation,
        region: identity.region_id,
        region_name: identity.region.clone(),
        topics,
    }
}

/// Waits, at a start, until the policies are known: nothing may cross before.
async fn links(broker: &Broker, request: &LinksRequest) -> LinksAnswer {
    let policies = &broker.links.policies;
    policies.loaded().await;
    policies.note_taken(request.since);
    // Before the list: a change in between is then seen twice, not missed.
    let generation = links_generation(broker);
    // Of a cluster the asker may know more than this broker.
    let is_news = match broker.cluster {
        Some(_) => request.since < generation,
        None => request.since != generation,
    };
    let links = is_news.then(|| policies.all());
    LinksAnswer { error: ErrorCode::None, generation, links }
}

/// Read here and now. That there is no such topic is believed of the metadata store alone where others
/// write it too: the mirror takes it for a deletion.
fn vectors(ctx: &Ctx, request: VectorsRequest) -> Answer {
    let partitions =
        request.partitions.iter().map(|(topic, index)| vector(&ctx.broker, topic, *index)).collect();
    let mut answer = VectorsAnswer { error: ErrorCode::None, partitions };
    let is_unknown = |vector: &PartitionVector| vector.error == ErrorCode::UnknownTopicOrPartition;
    if ctx.broker.cluster.is_none() || !answer.partitions.iter().any(is_unknown) {
        return ready(&answer);
    }
    let broker = ctx.broker.clone();
    Answer::Overlap(Box::pin(async move {
        for (vector, (topic, _)) in answer.partitions.iter_mut().zip(&request.partitions) {
            if is_unknown(vector) && !matches!(broker.topics.read(topic.as_str()).await, Ok(None)) {
                vector.error = ErrorCode::LeaderNotAvailable;
            }
        }
        Body::bytes(answer.encode())
    }))
}

fn vector(broker: &Broker, topic: &TopicName, index: PartitionIndex) -> PartitionVector {
    let Some(partition) = broker.partition(topic.as_str(), index.0) else {
        return PartitionVector {
            error: broker.absent(topic.as_str(), index.0),
            id: TopicId(Uuid::nil()),
            log_start: Offset::ZERO,
            durable: Offset::ZERO,
            origins: Vec::new(),
        };
    };
    let durable = partition.watermarks().high_watermark;
    // The vector is of the log end, not of what is durable: the apply rule compares with the same, and
    // should the end be lost the mirror's connection is lost with it.
    partition.with_fold(|fold| PartitionVector {
        error: ErrorCode::None,
        id: partition.topic_id,
        log_start: fold.log_start,
        durable,
        origins: fold
            .vector
            .iter()
            .map(|(origin, position)| OriginPosition {
                region: origin.region,
                incarnation: origin.incarnation,
                next: position.next,
                last: Claim { epoch: position.epoch, base: position.last_base, crc: position.last_crc },
            })
            .collect(),
    })
}

fn fetch(ctx: &Ctx, request: FetchRequest) -> Answer {
    let waiter = ctx.broker.mirror.take_over(request.session);
    if request.partitions.is_empty() {
        return ready(&FetchAnswer { error: ErrorCode::None, partitions: Vec::new() });
    }
    let fetch = Arc::new(Fetch { broker: ctx.broker.clone(), request, waiter });
    Answer::Overlap(Box::pin(async move { Body::bytes(fetch.wait().await.encode()) }))
}

struct Fetch {
    broker: Arc<Broker>,
    request: FetchRequest,
    waiter: Arc<Waiter>,
}

impl Fetch {
    async fn wait(self: Arc<Self>) -> FetchAnswer {
        let wait = Duration::from_millis(u64::from(self.request.wait_ms)).min(WAIT_MAX);
        let deadline = tokio::time::Instant::now() + wait;
        let stopping = self.broker.service.stopping().clone();
        loop {
            for from in &self.request.partitions {
                if let Some(partition) = self.broker.partition(from.topic.as_str(), from.partition.0) {
                    partition.register(&self.waiter);
                }
            }
            // Reads the log, perhaps from a cold disk: not on a thread that serves connections.
            let look = self.clone();
            let partitions = tokio::task::spawn_blocking(move || look.look()).await.unwrap_or_default();
            let current = self.broker.mirror.is_current(self.request.session, &self.waiter);
            if !partitions.is_empty() || !current {
                return FetchAnswer { error: ErrorCode::None, partitions };
            }
            let in_time = tokio::select! {
                () = self.waiter.woken() => true,
                () = tokio::time::sleep_until(deadline) => false,
                () = stopping.cancelled() => false,
            };
            if !in_time {
                return FetchAnswer { error: ErrorCode::None, partitions: Vec::new() };
            }
        }
    }

    /// Looks at every partition once. The byte limit of the request is passed by at most one read.
    fn look(&self) -> Vec<Fetched> {
        let mut found = Vec::new();
        let mut left = self.request.bytes_max as usize;
        for (index, from) in self.request.partitions.iter().enumerate() {
            if left == 0 {
                break;
            }
            if let Some(outcome) = self.look_at(from, left.min(from.bytes_max as usize)) {
                if let FetchOutcome::Read(read) = &outcome {
                    left = left.saturating_sub(read.batches.len());
                }
                found.push(Fetched { index: index as u32, outcome });
            }
        }
        found
    }

    fn look_at(&self, from: &FetchFrom, bytes_max: usize) -> Option<FetchOutcome> {
        let now = self.broker.topics.by_name(from.topic.as_str()).map(|topic| topic.id);
        if now != Some(from.id) {
            // Others may have made or deleted it, and word of it is still on its way here.
            return Some(match self.broker.cluster {
                Some(_) => failed(ErrorCode::UnknownTopicId, "the topic is not known here"),
                None => FetchOutcome::Incarnation { now },
            });
        }
        // The partitions follow their topic a moment later.
        let open = self.broker.partition(from.topic.as_str(), from.partition.0);
        let Some(partition) = open.filter(|partition| partition.topic_id == from.id) else {
            let code = self.broker.absent(from.topic.as_str(), from.partition.0);
            return Some(failed(code, "the partition is not open here"));
        };
        match check_history(&partition, from) {
            Ok(None) => {}
            Ok(Some(reason)) => return Some(FetchOutcome::Truncated { reason }),
            Err(error) => return Some(read_failed(&error)),
        }
        match self.read(&partition, from, bytes_max) {
            Ok(read) => {
                let news = !read.batches.is_empty() || read.next > from.from || from.known_end < Offset::ZERO;
                news.then_some(FetchOutcome::Read(read))
            }
            Err(error) => Some(read_failed(&error)),
        }
    }

    fn read(
        &self,
        partition: &Partition,
        from: &FetchFrom,
        bytes_max: usize,
    ) -> Result<OriginRead, ReadError> {
        let log_start = partition.watermarks().log_start;
        // What retention has removed cannot be read; the answer's log start says that it is lost.
        let start = from.from.max(log_start);
        let read = partition.origin_read(start, bytes_max.max(1), SCAN_BYTES_MAX)?;
        let filtered = self.filter(partition, read.batches)?;
        let next = filtered.cut_at.unwrap_or(read.next).max(from.from);
        // Only a read to the end knows where the last own record is; before that, there is at least
        // something up to the log's end.
        let last = filtered.batches.last().map_or(from.from, |batch| batch.header.next_offset());
        let end = if next >= read.end { last } else { read.end };
        let mut batches = BytesMut::with_capacity(filtered.batches.iter().map(|b| b.bytes.len()).sum());
        for batch in &filtered.batches {
            batches.extend_from_slice(&batch.bytes);
        }
        Ok(OriginRead {
            batches: batches.freeze(),
            next,
            end,
            log_start: read.log_start,
            extractors: filtered.extractors,
            rewritten: filtered.rewritten,
        })
    }

    /// Leaves out the records of lanes that may not leave. Batches under different lists of
    /// extractors never share an answer, because a unit names one list.
    fn filter(&self, partition: &Partition, batches: Vec<Batch>) -> Result<Filtered, ReadError> {
        let mut out = Filtered::default();
        let mut judge: Option<Arc<Extractors>> = None;
        for batch in batches {
            let base = batch.header.base_offset;
            let extractors = partition.with_fold(|fold| fold.lanes.rules()).extractors_at(base);
            if judge.as_ref().is_some_and(|judge| **judge != *extractors) {
                out.cut_at = Some(base);
                break;
            }
            if !extractors.is_empty() {
                let damaged = |error| ReadError::Damaged { position: 0, error };
                let kept = lane_core::batch::filter(&batch, &extractors, |lane| {
                    self.may_leave(lane, &mut out.lanes)
                })
                .map_err(damaged)?;
                if kept.header.record_count == 0 && batch.header.record_count > 0 {
                    judge = Some(extractors);
                    continue;
                }
                if kept.header.record_count != batch.header.record_count {
                    out.rewritten.push(base);
                }
                out.batches.push(kept);
            } else {
                out.batches.push(batch);
            }
            judge = Some(extractors);
        }
        if out.lanes {
            out.extractors = judge.map(|extractors| extractors.texts().to_vec());
        }
        Ok(out)
    }

    fn may_leave(&self, lane: &RecordLane, lanes: &mut bool) -> bool {
        let may = match lane {
            RecordLane::Baseline => return true,
            RecordLane::Unnamed => self.request.pass_boe,
            RecordLane::Lane(lane) if lane.is_ppe() => self.request.pass_ppe,
            RecordLane::Lane(_) => self.request.pass_boe,
            RecordLane::Refused => false,
        };
        *lanes |= may;
        may
    }
}

#[derive(Default)]
struct Filtered {
    batches: Vec<Batch>,
    rewritten: Vec<Offset>,
    extractors: Option<Vec<String>>,
    /// Some record of a lane is among them.
    lanes: bool,
    /// From here on the batches were left for the next read.
    cut_at: Option<Offset>,
}

/// Whether this log is the one that the peer has read: `Some` says why not.
fn check_history(partition: &Partition, from: &FetchFrom) -> Result<Option<String>, ReadError> {
    let Some(claim) = from.claim else { return Ok(None) };
    let end = partition.with_fold(|fold| fold.end);
    if from.from > end {
        return Ok(Some(format!("its log ends at {end}, the peer holds it up to {}", from.from)));
    }
    let known = partition.with_fold(|fold| fold.epochs.end_of(claim.epoch, fold.end));
    if let Some((_, epoch_end)) = known.filter(|(epoch, end)| *epoch <= claim.epoch && *end < from.from) {
        return Ok(Some(format!(
            "under epoch {} its log ends at {epoch_end}, the peer holds it up to {}",
            claim.epoch, from.from
        )));
    }
    if claim.crc == 0 || claim.base < partition.watermarks().log_start {
        return Ok(None);
    }
    let outcome = partition.read(claim.base, 1, true, ReadUpTo::Synced)?;
    let Some(slice) = outcome.slice else {
        return Ok(Some(format!("it has no batch at {}, which the peer holds", claim.base)));
    };
    let batch = Batch::split_first(&mut slice.bytes()?, false)
        .map_err(|error| ReadError::Damaged { position: slice.position, error })?;
    let same = batch.header.base_offset == claim.base && batch.header.crc == claim.crc;
    Ok((!same).then(|| format!("its batch at {} is not the one that the peer holds", claim.base)))
}

fn failed(code: ErrorCode, reason: &str) -> FetchOutcome {
    FetchOutcome::Failed { code, reason: reason.to_owned() }
}

fn read_failed(error: &ReadError) -> FetchOutcome {
    let code = match error {
        ReadError::OutOfRange { .. } => ErrorCode::OffsetOutOfRange,
        ReadError::Closed => ErrorCode::NotLeaderOrFollower,
        _ => ErrorCode::KafkaStorageError,
    };
    failed(code, &error.to_string())
}

/// Appends in the order of the request, here and now; the answer waits until all is durable.
fn append(ctx: &Ctx, request: AppendRequest) -> Answer {
    let started: Vec<Started> = request.units.into_iter().map(|unit| start_unit(&ctx.broker, unit)).collect();
    Answer::Overlap(Box::pin(async move {
        let outcomes = join_all(started.into_iter().map(Started::finish)).await;
        Body::bytes(AppendAnswer { error: ErrorCode::None, outcomes }.encode())
    }))
}

enum Started {
    Done(AppendOutcome),
    /// Given when the partition is durable up to here.
    Durable {
        partition: Arc<Partition>,
        upto: Offset,
        outcome: AppendOutcome,
    },
}

impl Started {
    async fn finish(self) -> AppendOutcome {
        match self {
            Started::Done(outcome) => outcome,
            Started::Durable { partition, upto, outcome } => match partition.wait_durable(upto).await {
                Ok(()) => outcome,
                Err(DurableError::Closed) => {
                    append_failed(ErrorCode::NotLeaderOrFollower, "the partition closed")
                }
                Err(DurableError::Faulted(reason)) => append_failed(ErrorCode::KafkaStorageError, &reason),
            },
        }
    }
}

fn start_unit(broker: &Broker, unit: Unit) -> Started {
    let Some(partition) = broker.partition(unit.topic.as_str(), unit.partition.0) else {
        let code = broker.absent(unit.topic.as_str(), unit.partition.0);
        return Started::Done(append_failed(code, "the partition is not here"));
    };
    if partition.topic_id != unit.id {
        return Started::Done(append_failed(ErrorCode::InconsistentTopicId, "the topic was recreated here"));
    }
    if unit.extractors.is_some() && !partition.settings().lanes {
        let reason = "records of lanes cannot go to a topic without lanes: set sealane.lanes";
        return Started::Done(append_failed(ErrorCode::PolicyViolation, reason));
    }
    if let Err(error) = Extractors::parse(unit.extractors.as_deref().unwrap_or_default()) {
        return faulted(format!("the unit from {} names lanes by other rules: {error}", unit.first));
    }
    let batches = match Batch::split_all(unit.batches, true) {
        Ok(batches) if batches.iter().any(|batch| batch.header.is_control()) => {
            return faulted("the unit holds a control batch".to_owned());
        }
        Ok(batches) => batches,
        Err(error) => return faulted(format!("a batch of the unit from {} is damaged: {error}", unit.first)),
    };
    let origin = Origin { region: unit.origin, incarnation: unit.incarnation };
    let unit = MirrorUnit {
        origin: unit.origin,
        incarnation: unit.incarnation,
        first: unit.first,
        batches,
        extractors: unit.extractors,
        last_rewritten: unit.last_rewritten,
    };
    match partition.append_unit(&unit, clock::now()) {
        Ok(UnitOutcome::Applied { next, local_next }) => {
            Started::Durable { partition, upto: local_next, outcome: AppendOutcome::Applied { next } }
        }
        Ok(UnitOutcome::Duplicate { next }) => {
            // Held, but perhaps not durable yet: it is acknowledged when it is.
            let upto = partition.with_fold(|fold| fold.vector.get(&origin).map(|p| p.local_next));
            let outcome = AppendOutcome::Duplicate { next };
            Started::Durable { partition, upto: upto.unwrap_or(Offset::ZERO), outcome }
        }
        Ok(UnitOutcome::Gap { next }) => Started::Done(AppendOutcome::Gap { next }),
        Ok(UnitOutcome::Overlap { next }) => Started::Done(AppendOutcome::Overlap { next }),
        Err(UnitError::Append(error @ AppendError::Refused(_))) => faulted(error.to_string()),
        Err(UnitError::Append(error)) => Started::Done(append_failed(error.code(), &error.to_string())),
        Err(error @ (UnitError::Empty | UnitError::Disorder)) => faulted(error.to_string()),
    }
}

fn faulted(reason: String) -> Started {
    Started::Done(AppendOutcome::Faulted { reason })
}

fn append_failed(code: ErrorCode, reason: &str) -> AppendOutcome {
    AppendOutcome::Failed { code, reason: reason.to_owned() }
}

/// A note as the metadata store keeps it, under [`note_key`].
#[derive(Serialize, Deserialize)]
struct NoteObject {
    peer: String,
    kind: u8,
    topic: String,
    partition: i32,
    incarnation: Uuid,
    from: i64,
    to: i64,
    at_ms: i64,
    text: String,
}

async fn take_notes(broker: &Broker, request: NotesRequest) -> NotesAnswer {
    let (meta, board) = (&*broker.meta, &broker.mirror);
    for note in &request.add {
        if let Err(error) = add_note(meta, board, note).await {
            tracing::warn!(%error, topic = %note.topic, text = %note.text, "a note of the mirror was not kept");
            return NotesAnswer { error: ErrorCode::KafkaStorageError, notes: Vec::new() };
        }
    }
    let notes = match &request.list {
        Some(peer) => notes(meta, peer).await,
        None => Ok(Vec::new()),
    };
    match notes {
        Ok(notes) => NotesAnswer { error: ErrorCode::None, notes },
        Err(error) => {
            tracing::warn!(%error, "the notes of the mirror cannot be read");
            NotesAnswer { error: ErrorCode::KafkaStorageError, notes: Vec::new() }
        }
    }
}

async fn add_note(meta: &dyn MetaStore, board: &Board, note: &Note) -> Result<(), MetaError> {
    let object = NoteObject {
        peer: note.peer.clone(),
        kind: note.kind as u8,
        topic: note.topic.to_string(),
        partition: note.partition.0,
        incarnation: note.incarnation.0,
        from: note.from.0,
        to: note.to.0,
        at_ms: note.at.0,
        text: note.text.clone(),
    };
    let value = serde_json::to_vec(&object).map_err(|error| MetaError::Corrupt(error.to_string()))?;
    let key = note_key(note);
    let version = meta.get(&key).await?.map(|(_, version)| version);
    if version.is_none() && note.kind != NoteKind::Linked {
        if board.notes.load(Ordering::Relaxed) == 0 {
            board.notes.store(meta.list(NOTES).await?.len(), Ordering::Relaxed);
        }
        if board.notes.fetch_add(1, Ordering::Relaxed) >= NOTES_MAX {
            return Err(MetaError::Full);
        }
    }
    meta.put_if(&key, value, version).await.map(|_| ())
}

/// The durable notes about a peer, of all peers with an empty name.
pub async fn notes(meta: &dyn MetaStore, peer: &str) -> Result<Vec<Note>, MetaError> {
    let mut all = Vec::new();
    for prefix in [NOTES, LINKED] {
        let prefix = if peer.is_empty() { prefix.to_owned() } else { format!("{prefix}{peer}/") };
        for item in meta.list(&prefix).await? {
            // The policy of a link, whose notes stand below it.
            if item.key.strip_prefix(LINKED).is_some_and(|rest| !rest.contains('/')) {
                continue;
            }
            let damaged =
                |error: &dyn std::fmt::Display| MetaError::Corrupt(format!("{}: {error}", item.key));
            let object: NoteObject = serde_json::from_slice(&item.value).map_err(|error| damaged(&error))?;
            let topic = TopicName::parse(&object.topic).map_err(|error| damaged(&error))?;
            let kind = NoteKind::from_byte(object.kind).ok_or_else(|| damaged(&"an unknown kind"))?;
            all.push(Note {
                peer: object.peer,
                kind,
                topic,
                partition: PartitionIndex(object.partition),
                incarnation: TopicId(object.incarnation),
                from: Offset(object.from),
                to: Offset(object.to),
                at: TimestampMs(object.at_ms),
                text: object.text,
            });
        }
    }
    Ok(all)
}

const NOTES: &str = "notes/";
/// One entry for each topic below the link's own object: only the latest incarnation matters.
const LINKED: &str = "links/";

fn note_key(note: &Note) -> String {
    let Note { peer, kind, topic, partition, incarnation, from, .. } = note;
    match kind {
        NoteKind::Linked => format!("{LINKED}{peer}/{topic}"),
        _ => format!("{NOTES}{peer}/{topic}/{partition}/{}/{incarnation}/{from}", *kind as u8),
    }
}
