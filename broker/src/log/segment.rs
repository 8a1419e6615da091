//! One segment of a partition: a file of batches, where to find an offset, a time or a boundary.
//!
//! A sealed segment is immutable and searched through its index files. The active one keeps its
//! indexes in memory under the partition's lock. Positions are below 2 GiB, as Kafka's indexes need.

use std::sync::{Arc, OnceLock};

use broker_store::{Reader, SegmentStore, StoreError, StorePath, Writer};
use kafka::{BatchHeader, Offset, TimestampMs};
use parking_lot::RwLock;

use super::batch_index::{BatchEntry, BatchIndex, BatchKind};
use super::index::{IndexFile, LiveIndex, relative};
use super::open_files::{OpenFiles, Slot};
use super::scan::{Cursor, ScanError};

/// Names of the files that make up the segment at `base`.
#[derive(Clone, Debug)]
pub struct SegmentFiles {
    dir: StorePath,
    base: Offset,
    /// Compaction's rewrite count; 0 is the segment as written.
    generation: u32,
}

impl SegmentFiles {
    pub fn new(dir: &StorePath, base: Offset, generation: u32) -> SegmentFiles {
        SegmentFiles { dir: dir.clone(), base, generation }
    }

    fn named(&self, extension: &str) -> StorePath {
        match self.generation {
            0 => join(&self.dir, &format!("{:020}.{extension}", self.base.0)),
            g => join(&self.dir, &format!("{:020}.{g}.{extension}", self.base.0)),
        }
    }

    pub fn log(&self) -> StorePath {
        self.named("log")
    }

    pub fn index(&self) -> StorePath {
        self.named("index")
    }

    pub fn time_index(&self) -> StorePath {
        self.named("timeindex")
    }

    pub fn batch_index(&self) -> StorePath {
        self.named("batches")
    }

    /// Of the segment as it was written, while it is active.
    pub fn checkpoint(&self) -> StorePath {
        join(&self.dir, &format!("{:020}.checkpoint", self.base.0))
    }

    /// Whether compaction has rewritten it.
    pub fn is_rewritten(&self) -> bool {
        self.generation > 0
    }

    /// The fold at exactly `base`; the same for every generation.
    pub fn state(&self) -> StorePath {
        join(&self.dir, &format!("{:020}.state", self.base.0))
    }
}

/// A segment that is complete: nothing is appended to it any more.
pub struct SealedSegment {
    pub base: Offset,
    /// The base of the next segment.
    pub next: Offset,
    pub size: u64,
    pub generation: u32,
    pub max_timestamp: TimestampMs,
    /// When it was sealed, for segments that hold no timestamp.
    pub written: TimestampMs,
    pub files: SegmentFiles,
    open_files: Arc<OpenFiles>,
    log: Arc<Slot>,
    index: Arc<Slot>,
    time_index: Arc<Slot>,
    batches: OnceLock<Arc<BatchIndex>>,
    /// The indexes in memory, until their files are written.
    live: RwLock<Option<Arc<LiveIndex>>>,
}

/// What is known of a segment when it is sealed or found at a start.
pub struct SealedFacts {
    pub base: Offset,
    pub next: Offset,
    pub size: u64,
    pub generation: u32,
    pub max_timestamp: TimestampMs,
    pub written: TimestampMs,
}

impl SealedSegment {
    pub fn new(dir: &StorePath, facts: SealedFacts, open_files: &Arc<OpenFiles>) -> SealedSegment {
        let SealedFacts { base, next, size, generation, max_timestamp, written } = facts;
        SealedSegment {
            base,
            next,
            size,
            generation,
            max_timestamp,
            written,
            files: SegmentFiles::new(dir, base, generation),
            open_files: open_files.clone(),
            log: Arc::default(),
            index: Arc::default(),
            time_index: Arc::default(),
            batches: OnceLock::new(),
            live: RwLock::new(None),
        }
    }

    /// The same, with what it had in memory while it was active.
    pub fn with_live(self, reader: Arc<dyn Reader>, content: SegmentContent) -> SealedSegment {
        self.open_files.keep(&self.log, reader);
        let _ = self.batches.set(Arc::new(content.batches));
        *self.live.write() = Some(Arc::new(content.index));
        self
    }

    /// Where its open files are counted.
    pub fn open_files(&self) -> &Arc<OpenFiles> {
        &self.open_files
    }

    /// Writes the index files of a segment that was just sealed; from then on they are searched.
    pub fn write_live_indexes(&self, store: &dyn SegmentStore) -> Result<(), StoreError> {
        let Some(live) = self.live.read().clone() else { return Ok(()) };
        let (offsets, times) = live.encode();
        store.put(&self.files.index(), &offsets)?;
        store.put(&self.files.time_index(), &times)?;
        let batches = self.batches.get().map(|b| b.encode(self.next)).unwrap_or_default();
        store.put(&self.files.batch_index(), &batches)?;
        *self.live.write() = None;
        Ok(())
    }

    pub fn reader(&self, store: &dyn SegmentStore) -> Result<Arc<dyn Reader>, StoreError> {
        self.open_files.reader(&self.log, || store.open(&self.files.log()))
    }

    /// The special batches; read once, because a segment on a topic without markers has none.
    pub fn batches(&self, store: &dyn SegmentStore) -> Result<Arc<BatchIndex>, StoreError> {
        if let Some(batches) = self.batches.get() {
            return Ok(batches.clone());
        }
        let file = store.open(&self.files.batch_index())?;
        let bytes = file.read_at(0, file.len() as usize)?;
        let index = BatchIndex::decode(&bytes, self.next)
            .ok_or_else(|| StoreError::Corrupt(format!("{} is damaged", self.files.batch_index())))?;
        Ok(self.batches.get_or_init(|| Arc::new(index)).clone())
    }

    /// Position of the batch that holds `offset`, or of the first one after it.
    pub fn position_of(&self, store: &dyn SegmentStore, offset: Offset) -> Result<u64, ScanError> {
        let relative = relative(self.base, offset);
        let live = self.live.read().clone();
        let from = match live {
            Some(live) => live.floor(relative),
            None => {
                let index = self.open_files.reader(&self.index, || store.open(&self.files.index()))?;
                IndexFile { reader: &*index }.floor(relative)?
            }
        };
        let reader = self.reader(store)?;
        seek_offset(&*reader, u64::from(from), self.size, offset)
    }

    /// The last indexed batch start at or before `position`.
    pub fn floor_position(&self, store: &dyn SegmentStore, position: u64) -> Result<u64, StoreError> {
        let position = position.min(u64::from(u32::MAX)) as u32;
        if let Some(live) = self.live.read().clone() {
            return Ok(u64::from(live.floor_position(position)));
        }
        let index = self.open_files.reader(&self.index, || store.open(&self.files.index()))?;
        Ok(u64::from(IndexFile { reader: &*index }.floor_position(position)?))
    }

    /// An offset at or before the first record at or after `timestamp`.
    pub fn offset_before_time(
        &self,
        store: &dyn SegmentStore,
        timestamp: TimestampMs,
    ) -> Result<Offset, StoreError> {
        let live = self.live.read().clone();
        let from = match live {
            Some(live) => live.floor_time(timestamp.0),
            None => {
                let open = || store.open(&self.files.time_index());
                let times = self.open_files.reader(&self.time_index, open)?;
                IndexFile { reader: &*times }.floor_time(timestamp.0)?
            }
        };
        Ok(self.base.plus(i64::from(from)))
    }
}

/// The segment that takes appends.
pub struct ActiveSegment {
    pub base: Offset,
    pub files: SegmentFiles,
    pub writer: Arc<dyn Writer>,
    pub reader: Arc<dyn Reader>,
    pub content: SegmentContent,
    /// When its first batch was appended; `NONE` while it is empty.
    pub first_append: TimestampMs,
    pub checkpointed: Checkpointed,
}

/// The latest checkpoint of an active segment.
#[derive(Clone, Copy, Debug, Default)]
pub struct Checkpointed {
    /// It is of everything below; 0: there is none.
    pub position: u64,
    /// The length of its file.
    pub bytes: u64,
}

/// What is in a segment, as far as it has been appended or scanned.
#[derive(Default)]
pub struct SegmentContent {
    pub size: u64,
    pub index: LiveIndex,
    pub batches: BatchIndex,
}

impl ActiveSegment {
    pub fn new(files: SegmentFiles, base: Offset, writer: Arc<dyn Writer>) -> ActiveSegment {
        let reader = writer.reader();
        let content = SegmentContent::default();
        let first_append = TimestampMs::NONE;
        ActiveSegment {
            base,
            files,
            writer,
            reader,
            content,
            first_append,
            checkpointed: Checkpointed::default(),
        }
    }
}

impl SegmentContent {
    /// Notes a batch that is in the file at `size`.
    pub fn note(&mut self, base: Offset, header: &BatchHeader, special: Option<BatchKind>, interval: u32) {
        let stamp = match header.is_control() {
            true => TimestampMs::NONE,
            false => header.max_timestamp,
        };
        let last = relative(base, header.last_offset());
        let length = header.total_len() as u32;
        let position = self.size as u32;
        self.index.note(last, position, length, stamp, interval);
        if let Some(kind) = special {
            let (base, next) = (header.base_offset, header.next_offset());
            self.batches.push(BatchEntry { base, next, position, length, kind });
        }
        self.size += u64::from(length);
    }
}

/// Moves from a batch start to the batch that holds `offset`, or the first one after it.
pub fn seek_offset(reader: &dyn Reader, from: u64, end: u64, offset: Offset) -> Result<u64, ScanError> {
    let mut cursor = Cursor::new(reader, from, end);
    while let Some(header) = cursor.peek()? {
        if header.last_offset() >= offset {
            break;
        }
        cursor.skip(&header);
    }
    Ok(cursor.position())
}

/// A batch boundary, and the offset of the batch that begins there (`None` at the end).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Boundary {
    pub position: u64,
    pub offset: Option<Offset>,
}

/// The last batch boundary at or before `position`, walking from the batch start `from`; with
/// `at_least_one`, never before the end of the batch at `start`.
pub fn seek_boundary(
    reader: &dyn Reader,
    (start, from): (u64, u64),
    end: u64,
    position: u64,
    at_least_one: bool,
) -> Result<Boundary, ScanError> {
    if position >= end {
        return Ok(Boundary { position: end, offset: None });
    }
    let mut cursor = Cursor::new(reader, from.max(start), end);
    while let Some(header) = cursor.peek()? {
        let first = at_least_one && cursor.position() == start;
        if !first && cursor.position() + header.total_len() as u64 > position {
            return Ok(Boundary { position: cursor.position(), offset: Some(header.base_offset) });
        }
        cursor.skip(&header);
    }
    Ok(Boundary { position: end, offset: None })
}

fn join(dir: &StorePath, name: &str) -> StorePath {
    dir.join(name).expect("digits and an extension are a legal name")
}
