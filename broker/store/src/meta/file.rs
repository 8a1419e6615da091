//! Metadata in one append-only log file: the embedded default.
//!
//! Owns the log's format, its recovery and its rewriting. Invariants: a write is in the table only
//! after its frame is durable; at most one frame, the last, can be torn; after a failed write the log
//! is put in order before the next one.
//!
//! ```text
//! log     "SLMETA\0\x01" frame frame ...               integers are big-endian
//! frame   | length u32 | crc32c u32 | body (length bytes) |     the crc covers length and body
//! body    | kind u8 | version u64 | key length u16 | key | value (to the end) |
//! kind    1 put, 2 delete (no value), 3 version alone (no key, no value; begins a rewritten log)
//! ```

use std::fs::{self, File as StdFile, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::table::Table;
use super::watch::Watchers;
use super::{
    Answer, Change, Item, KEY_BYTES_MAX, Lease, MetaError, MetaStore, VALUE_BYTES_MAX, Version, Watch,
    check_key, check_value,
};
use crate::StoreError;
use crate::data_dir::{make_dirs, sync_dir};

/// A metadata store in a directory of its own. The caller holds the lock of the data directory around
/// it ([`crate::DataDir`]). Clones share it. Writes need a tokio runtime: they sync on its blocking pool.
#[derive(Clone, Debug)]
pub struct File {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    /// Taken first, for a whole write.
    log: Mutex<Log>,
    /// Taken for moments only, so that readers never wait for the disk.
    table: Mutex<Table>,
    watchers: Watchers,
}

impl File {
    /// Reads the log in `dir`, cuts a torn last frame, and refuses damage anywhere else.
    pub fn open(dir: impl AsRef<Path>) -> Result<File, MetaError> {
        let (log, table) = Log::open(dir.as_ref())?;
        let inner = Inner { log: Mutex::new(log), table: Mutex::new(table), watchers: Watchers::default() };
        Ok(File { inner: Arc::new(inner) })
    }

    /// Whether there is a log in `dir`; a new one begins with nothing.
    pub fn exists(dir: impl AsRef<Path>) -> bool {
        dir.as_ref().join(LOG_NAME).exists()
    }

    async fn write(
        &self,
        decide: impl FnOnce(&Table) -> Result<Change, MetaError> + Send + 'static,
    ) -> Result<Version, MetaError> {
        let inner = self.inner.clone();
        let write = tokio::task::spawn_blocking(move || inner.write(decide));
        write.await.unwrap_or_else(|e| Err(MetaError::Unavailable(e.to_string())))
    }
}

impl Inner {
    fn write(&self, decide: impl FnOnce(&Table) -> Result<Change, MetaError>) -> Result<Version, MetaError> {
        let mut log = self.log.lock();
        let (change, rewrite) = {
            let table = self.table.lock();
            (decide(&table)?, log.is_due_for_rewrite().then(|| encode(&table)))
        };
        if let Some(bytes) = rewrite {
            log.rewrite(&bytes)?;
        }
        log.append(&change)?;
        let mut table = self.table.lock();
        table.apply(&change);
        self.watchers.tell(&change);
        Ok(table.version())
    }
}

impl MetaStore for File {
    fn get<'a>(&'a self, key: &'a str) -> Answer<'a, Option<(Vec<u8>, Version)>> {
        Box::pin(async move {
            check_key(key)?;
            Ok(self.inner.table.lock().get(key))
        })
    }

    fn put_if<'a>(&'a self, key: &'a str, value: Vec<u8>, expected: Option<Version>) -> Answer<'a, Version> {
        Box::pin(async move {
            check_key(key)?;
            check_value(&value)?;
            let key = key.to_owned();
            self.write(move |table| table.put_if(&key, value, expected)).await
        })
    }

    fn delete_if<'a>(&'a self, key: &'a str, expected: Version) -> Answer<'a, ()> {
        Box::pin(async move {
            check_key(key)?;
            let key = key.to_owned();
            self.write(move |table| table.delete_if(&key, expected)).await.map(|_| ())
        })
    }

    fn list<'a>(&'a self, prefix: &'a str) -> Answer<'a, Vec<Item>> {
        Box::pin(async move { Ok(self.inner.table.lock().list(prefix)) })
    }

    fn watch<'a>(&'a self, prefix: &'a str) -> Answer<'a, Watch> {
        Box::pin(async move { Ok(self.inner.watchers.add(prefix)) })
    }

    fn lease(&self, _ttl: Duration) -> Answer<'_, Lease> {
        // One process owns the store; nobody could be given the lease instead.
        Box::pin(async move { Ok(Lease::new(0, || {})) })
    }

    fn put_leased<'a>(
        &'a self,
        _key: &'a str,
        _value: Vec<u8>,
        _expected: Option<Version>,
        _lease: &'a Lease,
    ) -> Answer<'a, Version> {
        let reason = "metadata in a file belongs to one process: keys under a lease need etcd";
        Box::pin(async move { Err(MetaError::Unavailable(reason.to_owned())) })
    }

    fn put_guarded<'a>(
        &'a self,
        key: &'a str,
        value: Vec<u8>,
        expected: Option<Version>,
        guard: (&'a str, Version),
    ) -> Answer<'a, Version> {
        Box::pin(async move {
            check_key(key)?;
            check_value(&value)?;
            let (key, guard) = (key.to_owned(), (guard.0.to_owned(), guard.1));
            self.write(move |table| table.guarded((&guard.0, guard.1))?.put_if(&key, value, expected)).await
        })
    }

    fn version(&self) -> Answer<'_, Version> {
        Box::pin(async move { Ok(self.inner.table.lock().version()) })
    }
}

#[derive(Debug)]
struct Log {
    dir: PathBuf,
    file: StdFile,
    /// Everything below is intact and durable.
    end: u64,
    /// The size after the latest rewrite.
    rewritten: u64,
    /// A write failed and may or may not be in the file: it is rewritten from the table before the next.
    is_in_doubt: bool,
}

impl Log {
    fn open(dir: &Path) -> Result<(Log, Table), MetaError> {
        make_dirs(dir).map_err(|e| failed(&e, "create directory", dir))?;
        let path = dir.join(LOG_NAME);
        let mut table = Table::default();
        if !path.exists() {
            let bytes = encode(&table);
            let file = write_temp(dir, &bytes).map_err(|e| failed(&e, "create", &path))?;
            install_temp(dir).map_err(|e| failed(&e, "create", &path))?;
            return Ok((Log::new(dir, file, bytes.len()), table));
        }
        let fail = |e: io::Error| failed(&e, "read", &path);
        let bytes = fs::read(&path).map_err(fail)?;
        let damaged = |what| MetaError::Corrupt(format!("{}: {what}", path.display()));
        let end = replay(&bytes, &mut table).map_err(damaged)?;
        let file = OpenOptions::new().read(true).write(true).open(&path).map_err(fail)?;
        if end < bytes.len() {
            let cut_bytes = bytes.len() - end;
            tracing::warn!(path = %path.display(), cut_bytes, "cut a torn write from the end of the metadata log");
            file.set_len(end as u64).map_err(fail)?;
        }
        // What was read may be in the page cache alone, and is about to be believed.
        file.sync_all().and_then(|()| sync_dir(dir)).map_err(fail)?;
        Ok((Log::new(dir, file, end), table))
    }

    fn new(dir: &Path, file: StdFile, end: usize) -> Log {
        let end = end as u64;
        Log { dir: dir.to_owned(), file, end, rewritten: end, is_in_doubt: false }
    }

    fn is_due_for_rewrite(&self) -> bool {
        self.is_in_doubt || self.end > (self.rewritten * 2).max(REWRITE_BYTES_MIN)
    }

    fn append(&mut self, change: &Change) -> Result<(), MetaError> {
        let mut frame = Vec::new();
        encode_change(change, &mut frame);
        if let Err(error) = self.file.write_all_at(&frame, self.end) {
            self.is_in_doubt = self.file.set_len(self.end).is_err();
            return Err(failed(&error, "append to", &self.dir.join(LOG_NAME)));
        }
        if let Err(error) = self.file.sync_data() {
            // Never synced again: what the page cache holds of this file is no longer believed.
            self.is_in_doubt = true;
            return Err(failed(&error, "sync", &self.dir.join(LOG_NAME)));
        }
        self.end += frame.len() as u64;
        Ok(())
    }

    /// Replaces the log by one that says only what is true now.
    fn rewrite(&mut self, bytes: &[u8]) -> Result<(), MetaError> {
        let file = match write_temp(&self.dir, bytes) {
            Ok(file) => file,
            Err(error) if self.is_in_doubt => {
                return Err(failed(&error, "rewrite", &self.dir.join(LOG_NAME)));
            }
            Err(error) => {
                // Nothing was replaced, so the long log goes on, and the next try comes later.
                tracing::warn!(%error, "the metadata log could not be rewritten");
                self.rewritten = self.end;
                return Ok(());
            }
        };
        // Until the new name is durable, a crash may bring back either file.
        self.is_in_doubt = true;
        install_temp(&self.dir).map_err(|e| failed(&e, "rewrite", &self.dir.join(LOG_NAME)))?;
        *self = Log::new(&self.dir, file, bytes.len());
        Ok(())
    }
}

fn write_temp(dir: &Path, bytes: &[u8]) -> io::Result<StdFile> {
    let path = dir.join(TEMP_NAME);
    let mut file = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(path)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    Ok(file)
}

fn install_temp(dir: &Path) -> io::Result<()> {
    fs::rename(dir.join(TEMP_NAME), dir.join(LOG_NAME))?;
    sync_dir(dir)
}

fn failed(error: &io::Error, doing: &str, path: &Path) -> MetaError {
    match StoreError::from_io(error, doing, path) {
        StoreError::Full => MetaError::Full,
        StoreError::Io(text) => MetaError::Unavailable(text),
        _ => MetaError::Unavailable(format!("{doing} {}: {error}", path.display())),
    }
}

const LOG_NAME: &str = "meta.log";
const TEMP_NAME: &str = "meta.log.new";
const MAGIC: &[u8; 8] = b"SLMETA\0\x01";
/// A log below this size is not worth rewriting.
const REWRITE_BYTES_MIN: u64 = 256 * 1024;
const FRAME_HEADER_BYTES: usize = 8;
const BODY_FIXED_BYTES: usize = 11;
const BODY_BYTES_MAX: usize = BODY_FIXED_BYTES + KEY_BYTES_MAX + VALUE_BYTES_MAX;
const KIND_PUT: u8 = 1;
const KIND_DELETE: u8 = 2;
const KIND_VERSION: u8 = 3;

/// A whole log that leads to this table.
fn encode(table: &Table) -> Vec<u8> {
    let mut log = MAGIC.to_vec();
    encode_frame(KIND_VERSION, table.version(), "", &[], &mut log);
    for item in table.list("") {
        encode_frame(KIND_PUT, item.version, &item.key, &item.value, &mut log);
    }
    log
}

fn encode_change(change: &Change, log: &mut Vec<u8>) {
    match change {
        Change::Put(item) => encode_frame(KIND_PUT, item.version, &item.key, &item.value, log),
        Change::Deleted { key, version } => encode_frame(KIND_DELETE, *version, key, &[], log),
        Change::Resync => {}
    }
}

fn encode_frame(kind: u8, version: Version, key: &str, value: &[u8], log: &mut Vec<u8>) {
    let start = log.len();
    let body_len =
        u32::try_from(BODY_FIXED_BYTES + key.len() + value.len()).expect("keys and values are bounded");
    let key_len = u16::try_from(key.len()).expect("keys are bounded");
    log.extend_from_slice(&body_len.to_be_bytes());
    log.extend_from_slice(&[0; 4]);
    log.push(kind);
    log.extend_from_slice(&version.0.to_be_bytes());
    log.extend_from_slice(&key_len.to_be_bytes());
    log.extend_from_slice(key.as_bytes());
    log.extend_from_slice(value);
    let crc = frame_crc(&log[start..]);
    log[start + 4..start + FRAME_HEADER_BYTES].copy_from_slice(&crc.to_be_bytes());
}

fn frame_crc(frame: &[u8]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(&frame[..4]), &frame[FRAME_HEADER_BYTES..])
}

/// Applies all whole frames and returns where the last one ends. What follows can only be one torn
/// write: if there is an intact frame in it, the log was damaged in the middle.
fn replay(log: &[u8], table: &mut Table) -> Result<usize, String> {
    if !log.starts_with(MAGIC) {
        return Err("this is not a metadata log of a known version".to_owned());
    }
    let mut pos = MAGIC.len();
    while let Some(body) = body_at(log, pos) {
        apply(body, table).ok_or_else(|| format!("the frame at {pos} makes no sense"))?;
        pos += FRAME_HEADER_BYTES + body.len();
    }
    if log.len() - pos > FRAME_HEADER_BYTES + BODY_BYTES_MAX {
        return Err(format!("bad frame at {pos}, {} bytes before the end", log.len() - pos));
    }
    match (pos + 1..log.len()).find(|later| body_at(log, *later).is_some()) {
        Some(later) => Err(format!("bad frame at {pos}, but an intact one at {later}")),
        None => Ok(pos),
    }
}

/// The body of the frame at `pos`, if it is whole and its checksum is right.
fn body_at(log: &[u8], pos: usize) -> Option<&[u8]> {
    let rest = log.get(pos..)?;
    let len = u32::from_be_bytes(rest.first_chunk::<4>().copied()?) as usize;
    if !(BODY_FIXED_BYTES..=BODY_BYTES_MAX).contains(&len) {
        return None;
    }
    let frame = rest.get(..FRAME_HEADER_BYTES + len)?;
    let crc = u32::from_be_bytes(frame[4..].first_chunk::<4>().copied()?);
    (crc == frame_crc(frame)).then_some(&frame[FRAME_HEADER_BYTES..])
}

fn apply(body: &[u8], table: &mut Table) -> Option<()> {
    let (fixed, rest) = body.split_first_chunk::<BODY_FIXED_BYTES>()?;
    let version = Version(u64::from_be_bytes(fixed[1..9].try_into().ok()?));
    let (key, value) = rest.split_at_checked(usize::from(u16::from_be_bytes([fixed[9], fixed[10]])))?;
    let key = std::str::from_utf8(key).ok()?.to_owned();
    match fixed[0] {
        KIND_PUT => table.apply(&Change::Put(Item { key, value: value.to_vec(), version })),
        KIND_DELETE => table.apply(&Change::Deleted { key, version }),
        KIND_VERSION => table.advance(version),
        _ => return None,
    }
    Some(())
}
