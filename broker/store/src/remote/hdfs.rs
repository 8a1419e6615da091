//! A remote store on HDFS.
//!
//! Owns where things lie and how objects are written and read; the logs of lives are in `hdfs/log.rs`
//! (writing) and `hdfs/recovery.rs` (ending, reading, forgetting).
//!
//! ```text
//! <root>/objects/<name>            an object; appears whole, by a rename
//! <root>/tmp/<random>              one that is being written
//! <root>/wal/live/<life>/<file>    the log of a life that has not ended
//! <root>/wal/ended/<life>/         the mark that it has
//! <root>/wal/dead/<life>/<file>    its log from then on
//! ```
//! Invariant: every request ends by a deadline. The client has none of its own everywhere: a write waits for
//! ever when a DataNode dies at the wrong moment, and a request for a NameNode that vanished nearly so.

mod failure;
mod log;
mod recovery;
#[cfg(test)]
mod tests;

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use failure::Failure;
use hdfs_native::{Client, ClientBuilder, HdfsError, WriteOptions};
use parking_lot::Mutex;
use tokio::runtime::Handle;

use super::worker::Worker;
use super::{BLOCK_BYTES_MAX, Block, Life, LifeLog, Remote, names};
use crate::{Entry, StoreError, StorePath};

/// Which HDFS, and how long it is waited for.
#[derive(Clone, Debug)]
pub struct HdfsConfig {
    /// `hdfs://HOST:PORT` of the NameNode, or `hdfs://NAMESERVICE` of a pair that `config_dir` describes.
    pub url: String,
    /// Everything of this cluster lies below this directory. Another cluster needs another.
    pub root: String,
    /// Who one is where HDFS believes what it is told; the user of the process when empty.
    pub user: String,
    /// The folder of `core-site.xml` and `hdfs-site.xml`; `HADOOP_CONF_DIR` when empty.
    pub config_dir: String,
    /// Settings of Hadoop that go before those files.
    pub settings: Vec<(String, String)>,
    pub kerberos: Option<Kerberos>,
    /// Copies of each block; what HDFS is set to when 0.
    pub replication: u32,
    /// A flush without an answer is given up after this time, and a second for each 16 MiB that it carries;
    /// the log goes on in a new file. Too short a time makes many small files.
    pub sync_deadline: Duration,
    /// After this time an append says that it failed, having tried all it can.
    pub append_deadline: Duration,
    /// A request to the NameNode without an answer ends after this time.
    pub request_timeout: Duration,
    /// How long the recovery of the files of a life that has ended may take. A DataNode that died with its
    /// broker can make it 90 s with the settings that Hadoop comes with.
    pub recovery_deadline: Duration,
    /// The log goes on in a new file from this size on; whole files are removed.
    pub file_bytes: u64,
    /// Off in a test alone: a writer whose directory was taken away makes another and goes on.
    pub keeps_fences: bool,
}

#[derive(Clone, Debug)]
pub struct Kerberos {
    pub principal: String,
    /// Path of the keytab.
    pub keytab: String,
}

impl HdfsConfig {
    pub fn new(url: &str, root: &str) -> HdfsConfig {
        HdfsConfig {
            url: url.to_owned(),
            root: format!("/{}", root.trim_matches('/')),
            user: String::new(),
            config_dir: String::new(),
            settings: Vec::new(),
            kerberos: None,
            replication: 0,
            sync_deadline: Duration::from_secs(1),
            append_deadline: Duration::from_secs(10),
            request_timeout: Duration::from_secs(5),
            recovery_deadline: Duration::from_secs(120),
            file_bytes: 64 << 20,
            keeps_fences: true,
        }
    }
}

#[derive(Clone)]
pub struct Hdfs {
    fs: Arc<Fs>,
    worker: Arc<Worker>,
}

impl Hdfs {
    /// Connects to nothing yet; an error is one of the configuration.
    pub fn open(config: HdfsConfig) -> Result<Hdfs, StoreError> {
        let worker = Arc::new(Worker::new("hdfs")?);
        Ok(Hdfs { fs: Arc::new(Fs::new(config, worker.handle().clone())?), worker })
    }

    /// `work` bounds itself; the deadline here only catches what did not.
    fn run<T: Send + 'static, F>(
        &self,
        doing: &str,
        deadline: Duration,
        work: impl FnOnce(Arc<Fs>) -> F,
    ) -> Result<T, StoreError>
    where
        F: Future<Output = Result<T, StoreError>> + Send + 'static,
    {
        self.worker.run(&self.fs.named(doing), deadline + LAST_DEADLINE, work(self.fs.clone()))
    }
}

impl Remote for Hdfs {
    fn put(&self, name: &StorePath, bytes: Bytes) -> Result<(), StoreError> {
        let path = self.fs.object(name);
        let deadline = self.fs.transfer_deadline(bytes.len());
        self.run(&format!("put {name}"), deadline, |fs| async move {
            let temporary = fs.temporary();
            let put = fs.put(&path, &temporary, &bytes).await;
            if put.is_err() {
                // It is swept up later where this fails too.
                let _ = fs.remove(&temporary).await;
            }
            put
        })
    }

    fn get(&self, name: &StorePath, pos: u64, len: usize) -> Result<Bytes, StoreError> {
        let path = self.fs.object(name);
        let deadline = self.fs.transfer_deadline(len.min(GET_BYTES_EXPECTED));
        self.run(&format!("get {name}"), deadline, |fs| async move { fs.get(&path, pos, len).await })
    }

    fn list(&self, dir: &StorePath) -> Result<Vec<Entry>, StoreError> {
        let path = self.fs.object(dir);
        self.run(&format!("list {dir}"), self.fs.config.request_timeout, |fs| async move {
            let mut entries: Vec<Entry> = fs.entries(&path).await?;
            entries.retain_mut(|entry| match names::decode(&entry.name) {
                Some(name) => {
                    entry.name = name;
                    true
                }
                None => false,
            });
            entries.sort();
            Ok(entries)
        })
    }

    fn delete(&self, name: &StorePath) -> Result<(), StoreError> {
        super::refuse_root(name)?;
        let (path, root) = (self.fs.object(name), self.fs.object(&StorePath::root()));
        self.run(&format!("delete {name}"), self.fs.config.request_timeout, |fs| async move {
            fs.remove(&path).await?;
            fs.prune(&path, &root).await;
            Ok(())
        })
    }

    fn begin(&self, life: Life) -> Result<Arc<dyn LifeLog>, StoreError> {
        log::begin(self, life)
    }

    fn fence(&self, life: Life) -> Result<(), StoreError> {
        recovery::fence(self, life)
    }

    fn end(
        &self,
        life: Life,
        visit: &mut dyn FnMut(Block) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        recovery::end(self, life, visit)
    }

    fn forget(&self, life: Life) -> Result<(), StoreError> {
        recovery::forget(self, life)
    }

    fn lives(&self) -> Result<Vec<Life>, StoreError> {
        recovery::lives(self)
    }
}

const LAST_DEADLINE: Duration = Duration::from_secs(30);
const GET_BYTES_EXPECTED: usize = 64 << 20;
/// A block of HDFS, where it is ours to choose: a file of a log must fit one, because a flush makes only
/// the last block of a file durable. Larger than the largest file by the largest write.
const HDFS_BLOCK_BYTES: u64 = 128 << 20;
/// An object goes to the disks of the DataNodes in parts of this size. As a whole it would hold up the flush of
/// the log that comes behind it: with 8 MiB at once, one in a hundred took 3 times as long.
const FLUSHED_PUT_BYTES: usize = 1 << 20;
const _: () =
    assert!(HDFS_BLOCK_BYTES.is_multiple_of(FLUSHED_PUT_BYTES as u64), "the end of a block is flushed");
/// A client is made anew at most so often.
const NEW_CLIENT_INTERVAL: Duration = Duration::from_secs(10);
/// What was left half-written by a broker that died is removed after this time.
const TEMPORARY_AGE_MAX: Duration = Duration::from_secs(24 * 60 * 60);
const PUT_ATTEMPTS_MAX: u32 = 5;

/// HDFS as seen through one client, with deadlines.
struct Fs {
    config: HdfsConfig,
    handle: Handle,
    client: Mutex<(Client, Instant)>,
    /// Of the process, for names that nobody else uses.
    random: u64,
    counter: AtomicU64,
}

impl Fs {
    fn new(config: HdfsConfig, handle: Handle) -> Result<Fs, StoreError> {
        let too_large = format!("hdfs: file_bytes must be at most {} bytes", HDFS_BLOCK_BYTES / 2);
        if config.file_bytes > HDFS_BLOCK_BYTES / 2 {
            return Err(StoreError::Io(too_large));
        }
        let client = connect(&config, &handle)?;
        let random = RandomState::new().hash_one(std::process::id());
        let client = Mutex::new((client, Instant::now()));
        Ok(Fs { config, handle, client, random, counter: AtomicU64::new(0) })
    }

    fn named(&self, doing: &str) -> String {
        format!("{}{}: {doing}", self.config.url, self.config.root)
    }

    fn object(&self, name: &StorePath) -> String {
        names::outer(&format!("{}/objects", self.config.root), name)
    }

    fn temporary(&self) -> String {
        let count = self.counter.fetch_add(1, Ordering::Relaxed);
        format!("{}/tmp/{:016x}-{count}", self.config.root, self.random)
    }

    fn transfer_deadline(&self, bytes: usize) -> Duration {
        self.config.append_deadline + Duration::from_secs((bytes >> 23) as u64)
    }

    fn client(&self) -> Client {
        self.client.lock().0.clone()
    }

    fn options(&self) -> WriteOptions {
        let options = WriteOptions::default().overwrite(false).block_size(HDFS_BLOCK_BYTES);
        match self.config.replication {
            0 => options,
            copies => options.replication(copies),
        }
    }

    /// One request within a deadline.
    async fn ask<T, F>(
        &self,
        doing: &str,
        deadline: Duration,
        request: impl FnOnce(Client) -> F,
    ) -> Result<T, Failure>
    where
        F: Future<Output = Result<T, HdfsError>>,
    {
        match tokio::time::timeout(deadline, request(self.client())).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(error)) => Err(Failure::of(&self.named(doing), &error)),
            Err(_) => {
                self.renew_client();
                Err(Failure::NameNode(format!("{}: no answer within {deadline:?}", self.named(doing))))
            }
        }
    }

    /// A request that got no answer may have met a connection that is dead and does not know it.
    fn renew_client(&self) {
        let mut client = self.client.lock();
        if client.1.elapsed() < NEW_CLIENT_INTERVAL {
            return;
        }
        match connect(&self.config, &self.handle) {
            Ok(new) => *client = (new, Instant::now()),
            Err(error) => tracing::warn!(%error, "no new client of HDFS"),
        }
    }

    /// Writes an object under a temporary name and renames it.
    async fn put(&self, path: &str, temporary: &str, bytes: &Bytes) -> Result<(), StoreError> {
        let deadline = self.transfer_deadline(bytes.len());
        let (name, content, options) = (temporary.to_owned(), bytes.clone(), self.options());
        let write = |client: Client| async move {
            let mut writer = client.create(&name, options).await?;
            // A flush makes only the last block durable, and these are parts of blocks.
            for start in (0..content.len()).step_by(FLUSHED_PUT_BYTES) {
                let end = content.len().min(start + FLUSHED_PUT_BYTES);
                Box::pin(writer.write_bytes(content.slice(start..end))).await?;
                writer.hsync().await?;
            }
            Box::pin(writer.close()).await
        };
        self.ask("write", deadline, write).await?;
        for _ in 0..PUT_ATTEMPTS_MAX {
            match self.rename(temporary, path).await {
                Ok(()) => return Ok(()),
                Err(Failure::Exists) => return self.compare(path, temporary, bytes).await,
                // Its directory is new, or was empty and has just been removed.
                Err(Failure::Missing(_)) => self.make_dir(parent(path)).await?,
                // Perhaps it was renamed and only the answer was lost.
                Err(error) => match self.compare(path, temporary, bytes).await {
                    Err(StoreError::NotFound) => return Err(error.into()),
                    outcome => return outcome,
                },
            }
            // Perhaps an earlier attempt did it.
            if self.compare(path, temporary, bytes).await == Ok(()) {
                return Ok(());
            }
        }
        Err(StoreError::Io(self.named(&format!("put {path}: its directory comes and goes"))))
    }

    /// Whether the object that stands there is the one that was to be written.
    async fn compare(&self, path: &str, temporary: &str, bytes: &Bytes) -> Result<(), StoreError> {
        let found = self.get(path, 0, bytes.len() + 1).await?;
        if found != *bytes {
            return Err(StoreError::AlreadyExists);
        }
        self.remove(temporary).await
    }

    async fn get(&self, path: &str, pos: u64, len: usize) -> Result<Bytes, StoreError> {
        let deadline = self.transfer_deadline(len.min(GET_BYTES_EXPECTED));
        let name = path.to_owned();
        let read = |client: Client| async move {
            let reader = client.read(&name).await?;
            let length = reader.file_length();
            let pos = usize::try_from(pos).unwrap_or(usize::MAX).min(length);
            match len.min(length - pos) {
                0 => Ok(Bytes::new()),
                len => reader.read_range(pos, len).await,
            }
        };
        Ok(self.ask(&format!("read {path}"), deadline, read).await?)
    }

    /// What is in a directory; nothing if it is none.
    async fn entries(&self, path: &str) -> Result<Vec<Entry>, StoreError> {
        let name = path.to_owned();
        let list = |client: Client| async move { client.list_status(&name, false).await };
        let found = match self.ask(&format!("list {path}"), self.config.request_timeout, list).await {
            Err(Failure::Missing(_)) => return Ok(Vec::new()),
            found => found?,
        };
        let entry = |status: hdfs_native::client::FileStatus| {
            // A file is listed as itself.
            let name = status.path.strip_prefix(path)?.strip_prefix('/')?.to_owned();
            let len = if status.isdir { 0 } else { status.length as u64 };
            Some(Entry { name, len, is_dir: status.isdir })
        };
        Ok(found.into_iter().filter_map(entry).collect())
    }

    async fn exists(&self, path: &str) -> Result<bool, Failure> {
        let name = path.to_owned();
        let ask = |client: Client| async move { client.get_file_info(&name).await };
        match self.ask(&format!("look at {path}"), self.config.request_timeout, ask).await {
            Ok(_) => Ok(true),
            Err(Failure::Missing(_)) => Ok(false),
            Err(error) => Err(error),
        }
    }

    async fn make_dir(&self, path: &str) -> Result<(), Failure> {
        let name = path.to_owned();
        let make = |client: Client| async move { client.mkdirs(&name, 0o755, true).await };
        self.ask(&format!("make {path}"), self.config.request_timeout, make).await
    }

    async fn rename(&self, from: &str, to: &str) -> Result<(), Failure> {
        let (old, new) = (from.to_owned(), to.to_owned());
        let rename = |client: Client| async move { client.rename(&old, &new, false).await };
        self.ask(&format!("rename {from} to {to}"), self.config.request_timeout, rename).await
    }

    /// Removes a file, or a directory with everything in it.
    async fn remove(&self, path: &str) -> Result<(), StoreError> {
        let name = path.to_owned();
        let remove = |client: Client| async move { client.delete(&name, true).await };
        match self.ask(&format!("delete {path}"), self.config.request_timeout, remove).await {
            Ok(_) | Err(Failure::Missing(_)) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Removes the directories above `path` that became empty: a directory exists by holding objects.
    async fn prune(&self, path: &str, root: &str) {
        let mut dir = parent(path);
        while dir.len() > root.len() {
            let name = dir.to_owned();
            let remove = |client: Client| async move { client.delete(&name, false).await };
            if !matches!(self.ask("delete", self.config.request_timeout, remove).await, Ok(true)) {
                return;
            }
            dir = parent(dir);
        }
    }

    /// Removes what was being written by brokers that died long ago.
    async fn sweep(&self) -> Result<(), StoreError> {
        let dir = format!("{}/tmp", self.config.root);
        let name = dir.clone();
        let list = |client: Client| async move { client.list_status(&name, false).await };
        let found = match self.ask("list tmp", self.config.request_timeout, list).await {
            Err(Failure::Missing(_)) => return Ok(()),
            found => found?,
        };
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_millis();
        let is_old = |changed: u64| u128::from(changed) + TEMPORARY_AGE_MAX.as_millis() < now;
        for status in found.iter().filter(|status| is_old(status.modification_time)) {
            self.remove(&status.path).await?;
        }
        Ok(())
    }
}

fn parent(path: &str) -> &str {
    &path[..path.rfind('/').unwrap_or(0)]
}

fn connect(config: &HdfsConfig, handle: &Handle) -> Result<Client, StoreError> {
    // How often a NameNode is tried that does not answer, and how long a DataNode is waited for: our own
    // deadlines are shorter than what the client would do by itself.
    let timeout = config.request_timeout.as_millis().to_string();
    let defaults = [
        ("dfs.client.failover.max.attempts", "2"),
        ("dfs.client.failover.sleep.base.millis", "50"),
        ("dfs.client.failover.sleep.max.millis", "500"),
        ("dfs.client.socket-timeout", &timeout),
    ];
    let defaults = defaults.map(|(key, value)| (key.to_owned(), value.to_owned())).into_iter();
    // The later one of two settings counts.
    let settings = defaults.chain(config.settings.iter().cloned());
    let mut builder =
        ClientBuilder::new().with_url(&config.url).with_io_runtime(handle.clone()).with_config(settings);
    if !config.user.is_empty() {
        builder = builder.with_user(&config.user);
    }
    if !config.config_dir.is_empty() {
        builder = builder.with_config_dir(&config.config_dir);
    }
    if let Some(kerberos) = &config.kerberos {
        builder = builder.with_kerberos_principal(&kerberos.principal).with_kerberos_keytab(&kerberos.keytab);
    }
    builder.build().map_err(|error| StoreError::Io(format!("{}: {error}", config.url)))
}

const _: () = assert!(
    HDFS_BLOCK_BYTES / 2 + 2 * BLOCK_BYTES_MAX as u64 <= HDFS_BLOCK_BYTES,
    "a file of a log fits a block of HDFS"
);
