//! Opening a partition's directory: which bytes are the log, and what they say.
//!
//! Starts from the last snapshot (`.state`) or a checkpoint above it, replays the batches that follow with
//! every CRC checked, and cuts what a crash left half-written: a torn batch, a mirror unit that is not
//! whole. Nothing is cut that is known to have been durable: below a snapshot, a checkpoint or the mark.
//! Indexes are rebuilt where they are missing. A damaged snapshot under live data is not guessed at.

use std::collections::BTreeMap;
use std::sync::Arc;

use broker_core::fold::{Content, Fold};
use broker_store::{Reader, SegmentStore, StoreError, StorePath};
use kafka::control::{Marker, MirrorMarker, parse_marker};
use kafka::{Batch, BatchHeader, Offset, TimestampMs};
use lane_core::{Extractors, LaneMarker, LaneRules};

use super::batch_index::BatchKind;
use super::checkpoint::{self, Checkpoint};
use super::index::{IndexFile, relative};
use super::mark;
use super::open_files::OpenFiles;
use super::scan::{Cursor, ScanError};
use super::segment::{ActiveSegment, Checkpointed, SealedFacts, SealedSegment, SegmentContent, SegmentFiles};
use crate::lanes::classify::{self, Judge};

/// A partition's log, ready to be appended to.
pub struct Recovered {
    pub fold: Fold,
    pub sealed: Vec<Arc<SealedSegment>>,
    pub active: ActiveSegment,
    /// What was cut off the end, if anything.
    pub cut: Option<CutTail>,
    /// The durable mark that was found.
    pub mark: Offset,
}

/// A tail that a crash left and that recovery removed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CutTail {
    pub file: StorePath,
    pub position: u64,
    pub bytes: u64,
    pub reason: String,
}

#[derive(Debug, thiserror::Error)]
pub enum RecoverError {
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The bytes contradict what is known to be durable: a person must look.
    #[error("{0}")]
    Faulted(String),
}

pub struct RecoverOptions {
    pub index_interval: u32,
    /// Tests only: pretend that no snapshot was ever written.
    pub ignore_state: bool,
    pub now: TimestampMs,
    pub open_files: Arc<OpenFiles>,
}

/// The files of one segment, as listed.
#[derive(Default)]
struct Listed {
    generation: Option<u32>,
    len: u64,
    state: bool,
    checkpoint: bool,
    indexes: [bool; 3],
}

/// Opens the log in `dir`, or begins one if the directory is empty.
pub fn open(
    store: &dyn SegmentStore,
    dir: &StorePath,
    options: &RecoverOptions,
) -> Result<Recovered, RecoverError> {
    let mut mark = mark::read(store, dir)?;
    let mut segments = list(store, dir)?;
    let (start, mut fold) = find_start(store, dir, &mut segments, options)?;
    let mut sealed = Vec::new();
    let bases: Vec<Offset> = segments.keys().copied().collect();
    for (base, next) in bases.iter().zip(bases.iter().skip(1)).filter(|(base, _)| **base < start) {
        sealed.push(Arc::new(open_sealed(store, dir, *base, *next, &segments[base], options)?));
    }

    let mut cut = None;
    let mut rest = segments.split_off(&start);
    let mut active = None;
    while let Some((base, listed)) = rest.pop_first() {
        let next = rest.keys().next().copied();
        let files = SegmentFiles::new(dir, base, listed.generation.unwrap_or(0));
        let reader = open_or_create(store, &files, &listed)?;
        let found = match base == start {
            true => find_checkpoint(store, &files, (next, &*reader), &listed, options)?,
            false => Found::None,
        };
        let Beginning { mut content, checkpointed, durable, is_useless } = Beginning::of(found, &mut fold);
        mark = mark.max(durable);
        let end = replay(&*reader, base, next, listed.generation, &mut fold, &mut content, options)?;
        if next == Some(fold.end) {
            let segment = seal_found(store, dir, base, &listed, content, &mut fold, options)?;
            sealed.push(Arc::new(segment));
            continue;
        }
        check_mark(mark, fold.end, &files, end.as_deref())?;
        if let Some(reason) = end {
            let (position, bytes) = (content.size, reader.len().saturating_sub(content.size));
            cut = Some(CutTail { file: files.log(), position, bytes, reason });
        }
        // Before anything is cut: what is appended then is not of it either.
        if is_useless {
            store.delete(&files.checkpoint())?;
        }
        for (later, _) in std::mem::take(&mut rest) {
            // Above a cut nothing was ever acknowledged; its offsets will be given out again.
            delete_segment(store, dir, later)?;
        }
        let writer = store.resume(&files.log(), content.size)?;
        let mut segment = ActiveSegment::new(files, base, writer);
        segment.first_append = if content.size > 0 { options.now } else { TimestampMs::NONE };
        segment.content = content;
        segment.checkpointed = checkpointed;
        active = Some(segment);
    }
    let active = match active {
        Some(active) => active,
        None => {
            check_mark(mark, fold.end, &SegmentFiles::new(dir, fold.end, 0), None)?;
            begin(store, dir, &mut fold)?
        }
    };
    let first = sealed.first().map_or(active.base, |s| s.base);
    let log_start = fold.log_start.max(first);
    fold.log_start = first;
    fold.trim(log_start);
    Ok(Recovered { fold, sealed, active, cut, mark })
}

fn list(store: &dyn SegmentStore, dir: &StorePath) -> Result<BTreeMap<Offset, Listed>, StoreError> {
    let mut segments: BTreeMap<Offset, Listed> = BTreeMap::new();
    let mut index_files = Vec::new();
    let mut checkpoints = Vec::new();
    for entry in store.list(dir)? {
        let Some((base, generation, extension)) = parse_name(&entry.name) else { continue };
        match extension {
            "log" => {
                let listed = segments.entry(base).or_default();
                if listed.generation.is_none_or(|g| generation >= g) {
                    listed.generation = Some(generation);
                    listed.len = entry.len;
                }
            }
            "state" => segments.entry(base).or_default().state = true,
            "checkpoint" => checkpoints.push(base),
            other => index_files.push((base, generation, other.to_owned())),
        }
    }
    for base in checkpoints {
        segments.entry(base).and_modify(|listed| listed.checkpoint = true);
    }
    for (base, generation, extension) in index_files {
        let Some(listed) = segments.get_mut(&base).filter(|l| l.generation == Some(generation)) else {
            continue;
        };
        if let Some(i) = INDEX_EXTENSIONS.iter().position(|e| *e == extension) {
            listed.indexes[i] = true;
        }
    }
    Ok(segments)
}

const INDEX_EXTENSIONS: [&str; 3] = ["index", "timeindex", "batches"];

/// `<20 digits>[.<generation>].<extension>`; anything else is not a segment's file.
pub fn parse_name(name: &str) -> Option<(Offset, u32, &str)> {
    let mut parts = name.split('.');
    let base = parts.next().filter(|b| b.len() == 20)?.parse().ok()?;
    let second = parts.next()?;
    let (generation, extension) = match parts.next() {
        Some(extension) => (second.parse().ok()?, extension),
        None => (0, second),
    };
    parts.next().is_none().then_some((Offset(base), generation, extension))
}

/// The base of the last segment with a snapshot, and that snapshot.
fn find_start(
    store: &dyn SegmentStore,
    dir: &StorePath,
    segments: &mut BTreeMap<Offset, Listed>,
    options: &RecoverOptions,
) -> Result<(Offset, Fold), RecoverError> {
    let bases: Vec<Offset> = segments.keys().rev().copied().collect();
    for base in bases.iter().filter(|_| !options.ignore_state) {
        let files = SegmentFiles::new(dir, *base, 0);
        if !segments[base].state {
            continue;
        }
        match read_state(store, &files, *base)? {
            Ok(fold) => return Ok((*base, fold)),
            Err(reason) if has_batch(store, dir, *base, &segments[base])? => {
                return Err(RecoverError::Faulted(format!("{}: {reason}", files.state())));
            }
            Err(_) => {
                delete_segment(store, dir, *base)?;
                segments.remove(base);
            }
        }
    }
    match segments.keys().next() {
        None => Ok((Offset::ZERO, Fold::default())),
        Some(first) if *first == Offset::ZERO || options.ignore_state => {
            Ok((*first, Fold { end: *first, log_start: *first, ..Fold::default() }))
        }
        Some(first) => Err(RecoverError::Faulted(format!(
            "{dir}: the log begins at offset {first} and no snapshot says what was before it"
        ))),
    }
}

fn read_state(
    store: &dyn SegmentStore,
    files: &SegmentFiles,
    base: Offset,
) -> Result<Result<Fold, String>, StoreError> {
    let reader = store.open(&files.state())?;
    let bytes = reader.read_at(0, reader.len() as usize)?;
    Ok(match Fold::decode(&bytes) {
        Ok(fold) if fold.end == base => Ok(fold),
        Ok(fold) => Err(format!("snapshot is of offset {}", fold.end)),
        Err(error) => Err(error.to_string()),
    })
}

fn has_batch(
    store: &dyn SegmentStore,
    dir: &StorePath,
    base: Offset,
    listed: &Listed,
) -> Result<bool, StoreError> {
    let Some(generation) = listed.generation else { return Ok(false) };
    let reader = store.open(&SegmentFiles::new(dir, base, generation).log())?;
    match Cursor::new(&*reader, 0, reader.len()).next_batch() {
        Ok(batch) => Ok(batch.is_some()),
        Err(ScanError::Batch { .. }) => Ok(false),
        Err(ScanError::Store(error)) => Err(error),
    }
}

/// A checkpoint beside the segment that recovery begins with.
enum Found {
    None,
    /// What is below it need not be read.
    OfThese(Box<Checkpoint>),
    /// It is of no use. Where it is whole, what it was of was durable.
    OfOthers {
        durable: Offset,
    },
}

/// What is known of a segment before it is read.
#[derive(Default)]
struct Beginning {
    content: SegmentContent,
    checkpointed: Checkpointed,
    /// Less must not be found.
    durable: Offset,
    /// There is a checkpoint that is to be removed.
    is_useless: bool,
}

impl Beginning {
    fn of(found: Found, fold: &mut Fold) -> Beginning {
        match found {
            Found::None => Beginning::default(),
            Found::OfOthers { durable } => Beginning { durable, is_useless: true, ..Beginning::default() },
            Found::OfThese(found) => {
                // The log start is moved in the snapshot.
                let log_start = fold.log_start.max(found.fold.log_start);
                *fold = Fold { log_start, ..found.fold };
                let checkpointed = Checkpointed { position: found.content.size, bytes: found.bytes };
                Beginning { content: found.content, checkpointed, ..Beginning::default() }
            }
        }
    }
}

fn find_checkpoint(
    store: &dyn SegmentStore,
    files: &SegmentFiles,
    (next, reader): (Option<Offset>, &dyn Reader),
    listed: &Listed,
    options: &RecoverOptions,
) -> Result<Found, RecoverError> {
    let len = reader.len();
    if options.ignore_state || !listed.checkpoint || files.is_rewritten() {
        return Ok(Found::None);
    }
    let path = files.checkpoint();
    let found = match checkpoint::read(store, &path) {
        Ok(found) => found,
        // It is there when the store answers again.
        Err(error) if store.is_remote() && error.is_retryable() => return Err(error.into()),
        Err(error) => {
            tracing::warn!(file = %path, %error, "a checkpoint cannot be read; its segment is read whole");
            None
        }
    };
    let Some(found) = found else { return Ok(Found::OfOthers { durable: Offset::ZERO }) };
    if next.is_some_and(|next| found.fold.end > next) {
        return Ok(Found::None);
    }
    if found.content.size > len {
        return Err(RecoverError::Faulted(format!(
            "{}: its first {} bytes, up to offset {}, were durable, and the file has {len}: restore it, or remove {} to \
             go on with what is left",
            files.log(),
            found.content.size,
            found.fold.end,
            files.checkpoint()
        )));
    }
    // Where nothing else ties the two files together.
    if !store.is_remote() && !ends_there(reader, &found) {
        tracing::warn!(file = %path, "a checkpoint of other bytes is ignored; its segment is read whole");
        return Ok(Found::OfOthers { durable: found.fold.end });
    }
    Ok(Found::OfThese(Box::new(found)))
}

/// Whether a batch ends where the checkpoint says that its last one does.
fn ends_there(reader: &dyn Reader, found: &Checkpoint) -> bool {
    let size = found.content.size;
    let from = found.content.index.floor_position(size.saturating_sub(1) as u32);
    let mut cursor = Cursor::new(reader, u64::from(from), size);
    let mut next = None;
    while let Ok(Some(header)) = cursor.peek() {
        cursor.skip(&header);
        next = Some(header.next_offset());
    }
    cursor.position() == size && next == Some(found.fold.end)
}

fn open_or_create(
    store: &dyn SegmentStore,
    files: &SegmentFiles,
    listed: &Listed,
) -> Result<Arc<dyn Reader>, StoreError> {
    match listed.generation {
        Some(_) => store.open(&files.log()),
        // A snapshot whose segment was not created before the crash.
        None => Ok(store.create(&files.log())?.reader()),
    }
}

/// Begins an empty log.
fn begin(store: &dyn SegmentStore, dir: &StorePath, fold: &mut Fold) -> Result<ActiveSegment, RecoverError> {
    let base = fold.end;
    let files = SegmentFiles::new(dir, base, 0);
    store.put(&files.state(), &fold.encode(TimestampMs(i64::MIN)))?;
    let writer = store.create(&files.log())?;
    Ok(ActiveSegment::new(files, base, writer))
}

/// Replays the batches of a segment from the end of `content` up to `next`. Says why it stopped if bytes are
/// left over.
fn replay(
    reader: &dyn Reader,
    base: Offset,
    next: Option<Offset>,
    generation: Option<u32>,
    fold: &mut Fold,
    content: &mut SegmentContent,
    options: &RecoverOptions,
) -> Result<Option<String>, RecoverError> {
    let compacted = generation.is_some_and(|g| g > 0);
    let mut cursor = Cursor::new(reader, content.size, reader.len());
    let mut unit = UnitReach::none();
    loop {
        let batch = match cursor.next_batch() {
            Ok(Some(batch)) => batch,
            Ok(None) => break,
            Err(ScanError::Batch { position, error }) => {
                return Ok(Some(format!("position {position}: {error}")));
            }
            Err(ScanError::Store(error)) => return Err(error.into()),
        };
        if next.is_some_and(|next| batch.header.base_offset >= next) {
            // A file ends where its successor begins.
            break;
        }
        let expected = fold.end;
        let fits = match compacted {
            true => batch.header.base_offset >= expected,
            false => batch.header.base_offset == expected,
        };
        if !fits {
            let found = batch.header.base_offset;
            return Ok(Some(format!("batch has offset {found} where {expected} follows")));
        }
        // A marker that this build cannot follow decides something: to go on would be to guess.
        let unreadable = |error: &dyn std::fmt::Display| {
            RecoverError::Faulted(format!("the marker at offset {expected} cannot be followed: {error}"))
        };
        let marker = parse_marker(&batch).map_err(|error| unreadable(&error))?;
        if let Some(marker) = &marker {
            LaneMarker::parse(marker).map_err(|error| unreadable(&error))?;
        }
        let mut records_covered = 0;
        if let Some(Marker::Mirror(mirror)) = &marker {
            let next = batch.header.next_offset();
            match unit_end(reader, cursor.position(), next, mirror)? {
                Some(end) => {
                    records_covered = (end.0 - next.0) as u32;
                    unit = UnitReach { end, judge: judge_of_unit(mirror) };
                }
                None => return Ok(Some(format!("the mirror unit at offset {expected} is not whole"))),
            }
        }
        let marker = marker.as_ref().map(|m| (m, records_covered));
        take_in(fold, content, base, &batch, marker, &unit.judge_of(&batch.header), options.index_interval);
    }
    if compacted && let Some(next) = next {
        fold.end = fold.end.max(next);
    }
    Ok(None)
}

/// Up to where the last mirror unit reaches, and who judged its records.
struct UnitReach {
    end: Offset,
    judge: Judge,
}

impl UnitReach {
    fn none() -> UnitReach {
        UnitReach { end: Offset::ZERO, judge: Judge::Here }
    }

    fn judge_of(&self, header: &BatchHeader) -> Judge {
        if header.base_offset < self.end { self.judge.clone() } else { Judge::Here }
    }
}

/// Who judged the records of a unit. Its list was checked when it was appended, or is now read again.
pub fn judge_of_unit(unit: &MirrorMarker) -> Judge {
    let list = unit.extractors.as_deref().map(|texts| Extractors::parse(texts).unwrap_or_default());
    Judge::Origin(list.map(Arc::new))
}

/// Adds a batch that is in the log to everything that is computed from the log. A marker comes with
/// the number of records that it covers, other batches with who judged them.
fn take_in(
    fold: &mut Fold,
    content: &mut SegmentContent,
    segment_base: Offset,
    batch: &Batch,
    marker: Option<(&Marker, u32)>,
    judge: &Judge,
    index_interval: u32,
) {
    let header: &BatchHeader = &batch.header;
    let special = match marker {
        Some((marker, records_covered)) => {
            apply_marker(fold, header, marker);
            Some(marker_kind(marker, records_covered))
        }
        None => match classify::summarize_as(batch, judge, &fold.lanes.extractors()) {
            Some(summary) => {
                fold.apply(header, Content::Lanes(&summary));
                Some(BatchKind::Lanes(summary))
            }
            None => {
                fold.apply(header, Content::Records);
                None
            }
        },
    };
    content.note(segment_base, header, special, index_interval);
}

/// The indexes of a file whose first `end` bytes are known to be whole, without folding it again:
/// `rules` say which list judged which offset.
pub fn content_of(
    reader: &dyn Reader,
    base: Offset,
    end: u64,
    rules: &LaneRules,
    index_interval: u32,
) -> Result<SegmentContent, ScanError> {
    let mut content = SegmentContent::default();
    let mut cursor = Cursor::new(reader, 0, end);
    let mut unit = UnitReach::none();
    while let Some(batch) = cursor.next_batch()? {
        let special = match parse_marker(&batch).ok().flatten() {
            Some(Marker::Mirror(mirror)) => {
                let next = batch.header.next_offset();
                let end = unit_end(reader, cursor.position(), next, &mirror)?.unwrap_or(next);
                unit = UnitReach { end, judge: judge_of_unit(&mirror) };
                Some(marker_kind(&Marker::Mirror(mirror), (end.0 - next.0) as u32))
            }
            Some(marker) => Some(marker_kind(&marker, 0)),
            None => {
                let local = rules.extractors_at(batch.header.base_offset);
                let judge = unit.judge_of(&batch.header);
                classify::summarize_as(&batch, &judge, &local).map(BatchKind::Lanes)
            }
        };
        content.note(base, &batch.header, special, index_interval);
    }
    Ok(content)
}

/// Folds a marker in, whatever its type.
pub fn apply_marker(fold: &mut Fold, header: &BatchHeader, marker: &Marker) {
    match marker {
        Marker::Mirror(unit) => fold.apply(header, Content::Mirror(unit)),
        other => match classify::lane_marker(other) {
            Some(lane) => fold.apply(header, Content::Lane(&lane)),
            None => fold.apply(header, Content::Records),
        },
    }
}

/// How the batch index notes a marker.
pub fn marker_kind(marker: &Marker, records_covered: u32) -> BatchKind {
    let bytes_covered = match marker {
        Marker::Mirror(unit) => unit.byte_len.min(u64::from(u32::MAX)) as u32,
        _ => 0,
    };
    BatchKind::Marker { records_covered, bytes_covered }
}

/// The offset after the unit, if all batches that the marker covers are in the file, dense and whole.
fn unit_end(
    reader: &dyn Reader,
    from: u64,
    mut next: Offset,
    unit: &MirrorMarker,
) -> Result<Option<Offset>, StoreError> {
    let mut cursor = Cursor::new(reader, from, reader.len());
    for _ in &unit.batches {
        match cursor.next_batch() {
            Ok(Some(batch)) if batch.header.base_offset == next => next = batch.header.next_offset(),
            Ok(_) | Err(ScanError::Batch { .. }) => return Ok(None),
            Err(ScanError::Store(error)) => return Err(error),
        }
    }
    Ok((cursor.position() - from == unit.byte_len).then_some(next))
}

/// A segment that was complete at the crash: its indexes and the next snapshot are made good.
fn seal_found(
    store: &dyn SegmentStore,
    dir: &StorePath,
    base: Offset,
    listed: &Listed,
    mut content: SegmentContent,
    fold: &mut Fold,
    options: &RecoverOptions,
) -> Result<SealedSegment, RecoverError> {
    let generation = listed.generation.unwrap_or(0);
    let next = fold.end;
    let files = SegmentFiles::new(dir, base, generation);
    // What was read may be in the page cache alone, and the snapshot is about to vouch for it.
    store.resume(&files.log(), content.size)?.seal()?;
    write_indexes(store, &files, &mut content, next)?;
    if !options.ignore_state {
        store.put(&SegmentFiles::new(dir, next, 0).state(), &fold.encode(TimestampMs(i64::MIN)))?;
    }
    let facts = SealedFacts {
        base,
        next,
        size: content.size,
        generation,
        max_timestamp: content.index.max_timestamp(),
        written: options.now,
    };
    Ok(SealedSegment::new(dir, facts, &options.open_files))
}

/// Writes the three index files of a segment that is complete.
pub fn write_indexes(
    store: &dyn SegmentStore,
    files: &SegmentFiles,
    content: &mut SegmentContent,
    complete_to: Offset,
) -> Result<(), StoreError> {
    content.index.finish();
    let (offsets, times) = content.index.encode();
    store.put(&files.index(), &offsets)?;
    store.put(&files.time_index(), &times)?;
    store.put(&files.batch_index(), &content.batches.encode(complete_to))
}

/// A segment below the last snapshot: taken as it is, its indexes rebuilt if one is missing.
fn open_sealed(
    store: &dyn SegmentStore,
    dir: &StorePath,
    base: Offset,
    next: Offset,
    listed: &Listed,
    options: &RecoverOptions,
) -> Result<SealedSegment, RecoverError> {
    let Some(generation) = listed.generation else {
        return Err(RecoverError::Faulted(format!("{dir}: the segment at offset {base} is missing")));
    };
    let files = SegmentFiles::new(dir, base, generation);
    let size = match listed.indexes.contains(&false) {
        true => rebuild_indexes(store, dir, base, next, listed, options)?,
        false => logical_size(store, &files, (base, next), listed)?,
    };
    let times = store.open(&files.time_index())?;
    let max_timestamp = IndexFile { reader: &*times }.max_timestamp()?;
    let written = if max_timestamp == TimestampMs::NONE { options.now } else { max_timestamp };
    let facts = SealedFacts { base, next, size, generation, max_timestamp, written };
    Ok(SealedSegment::new(dir, facts, &options.open_files))
}

/// What was durable must have been found again, before anything is cut or written.
fn check_mark(
    mark: Offset,
    end: Offset,
    files: &SegmentFiles,
    reason: Option<&str>,
) -> Result<(), RecoverError> {
    if end >= mark {
        return Ok(());
    }
    Err(RecoverError::Faulted(format!(
        "{}: offsets {end} to {mark} were durable and are missing or damaged ({})",
        files.log(),
        reason.unwrap_or("the file ends early")
    )))
}

/// Where the batches below `next` end: after a failed sync a file may hold more, which is void. That
/// they reach `next` is what the snapshot there says; if they do not, the disk has lost them.
fn logical_size(
    store: &dyn SegmentStore,
    files: &SegmentFiles,
    (base, next): (Offset, Offset),
    listed: &Listed,
) -> Result<u64, RecoverError> {
    let index = store.open(&files.index())?;
    let from = IndexFile { reader: &*index }.floor(relative(base, next.plus(-1)))?;
    let reader = store.open(&files.log())?;
    let mut cursor = Cursor::new(&*reader, u64::from(from), listed.len);
    let mut reached = base;
    loop {
        match cursor.peek() {
            Ok(Some(header)) if header.base_offset < next => {
                reached = header.next_offset();
                cursor.skip(&header);
            }
            Ok(_) | Err(ScanError::Batch { .. }) => break,
            Err(ScanError::Store(error)) => return Err(error.into()),
        }
    }
    if listed.generation == Some(0) && reached != next {
        return Err(RecoverError::Faulted(format!(
            "{}: offsets up to {next} were durable, and the file holds none after {reached}",
            files.log()
        )));
    }
    Ok(cursor.position())
}

fn rebuild_indexes(
    store: &dyn SegmentStore,
    dir: &StorePath,
    base: Offset,
    next: Offset,
    listed: &Listed,
    options: &RecoverOptions,
) -> Result<u64, RecoverError> {
    let files = SegmentFiles::new(dir, base, listed.generation.unwrap_or(0));
    let mut fold = match listed.state {
        true => read_state(store, &files, base)?
            .map_err(|reason| RecoverError::Faulted(format!("{}: {reason}", files.state())))?,
        false => Fold { end: base, log_start: base, ..Fold::default() },
    };
    let reader = store.open(&files.log())?;
    let mut content = SegmentContent::default();
    let stopped = replay(&*reader, base, Some(next), listed.generation, &mut fold, &mut content, options)?;
    if fold.end != next {
        let reason = stopped.unwrap_or_else(|| "the file ends early".into());
        return Err(RecoverError::Faulted(format!(
            "{}: offsets {} to {next} were durable and are damaged ({reason})",
            files.log(),
            fold.end
        )));
    }
    write_indexes(store, &files, &mut content, next)?;
    Ok(content.size)
}

/// Removes every file of the segment at `base`.
pub fn delete_segment(store: &dyn SegmentStore, dir: &StorePath, base: Offset) -> Result<(), StoreError> {
    delete_files(store, dir, base, |_| true)
}

/// Removes the segment at `base`, but not its snapshot, which is of what was before it.
pub fn delete_batches(store: &dyn SegmentStore, dir: &StorePath, base: Offset) -> Result<(), StoreError> {
    delete_files(store, dir, base, |name| !name.ends_with(".state"))
}

fn delete_files(
    store: &dyn SegmentStore,
    dir: &StorePath,
    base: Offset,
    of: impl Fn(&str) -> bool,
) -> Result<(), StoreError> {
    // The log goes last, its newest generation at the very end: whatever a crash leaves is a segment
    // that still counts. A snapshot left alone would pass for a segment whose log was lost.
    let mut names: Vec<String> = store.list(dir)?.into_iter().map(|e| e.name).collect();
    names.retain(|n| of(n) && parse_name(n).is_some_and(|(b, ..)| b == base));
    names.sort_by_key(|n| parse_name(n).map(|(_, generation, extension)| (extension == "log", generation)));
    for name in names {
        let path = dir.join(&name).map_err(|e| StoreError::Io(e.to_string()))?;
        store.delete(&path)?;
    }
    Ok(())
}
