//! Writing the log of a life: blocks one after the other in a file, each flushed; on trouble a new file.
//!
//! Files are numbered, and none is opened twice. A flush that was not answered may nevertheless be durable:
//! its block is written again into the next file, and the later copy counts. The directory of the life is
//! never made by a writer once it is gone, so to rename it away is to refuse every further file; a file that
//! is open already is refused by the recovery of its lease.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use hdfs_native::file::FileWriter;
use hdfs_native::{Client, HdfsError};
use tokio::sync::{Mutex, mpsc};
use tokio::time::timeout;

use super::failure::Failure;
use super::{Fs, Hdfs};
use crate::StoreError;
use crate::remote::{Block, Life, LifeLog};

pub(super) fn begin(hdfs: &Hdfs, life: Life) -> Result<Arc<dyn LifeLog>, StoreError> {
    hdfs.run(&format!("begin life {life}"), 4 * hdfs.fs.config.request_timeout, |fs| async move {
        fs.make_dir(&fs.live(life)).await?;
        // In this order: whoever ends a life makes the mark first and looks for the directory then.
        if fs.exists(&fs.ended(life)).await? {
            let _ = fs.remove(&fs.live(life)).await;
            return Err(StoreError::Fenced);
        }
        if !fs.entries(&fs.live(life)).await?.is_empty() {
            return Err(StoreError::AlreadyExists);
        }
        if let Err(error) = fs.sweep().await {
            tracing::debug!(%error, "what was left half-written stays a while");
        }
        Ok(())
    })?;
    let (chores, waiting) = mpsc::channel(CHORES_MAX);
    hdfs.worker.handle().spawn(do_chores(hdfs.fs.clone(), waiting));
    let tail = Tail {
        life,
        next: 0,
        lowest: 0,
        is_fenced: false,
        next_file: 0,
        current: None,
        older: Vec::new(),
        chores,
    };
    Ok(Arc::new(HdfsLog { hdfs: hdfs.clone(), life, tail: Arc::new(Mutex::new(tail)) }))
}

impl Fs {
    pub(super) fn live(&self, life: Life) -> String {
        format!("{}/wal/live/{life}", self.config.root)
    }

    pub(super) fn ended(&self, life: Life) -> String {
        format!("{}/wal/ended/{life}", self.config.root)
    }

    pub(super) fn dead(&self, life: Life) -> String {
        format!("{}/wal/dead/{life}", self.config.root)
    }
}

struct HdfsLog {
    hdfs: Hdfs,
    life: Life,
    tail: Arc<Mutex<Tail>>,
}

impl LifeLog for HdfsLog {
    fn append(&self, block: &Block) -> Result<(), StoreError> {
        assert_eq!(block.life, self.life, "a block of this life");
        let (tail, block) = (self.tail.clone(), block.clone());
        let doing = format!("append block {} of life {}", block.seq, self.life);
        let deadline = self.hdfs.fs.transfer_deadline(block.payload.len());
        self.hdfs.run(&doing, deadline, |fs| async move { tail.lock().await.append(&fs, &block).await })
    }
}

/// The end of the log.
struct Tail {
    life: Life,
    /// The number of the next new block.
    next: u64,
    lowest: u64,
    is_fenced: bool,
    next_file: u64,
    current: Option<Open>,
    /// Files that take no more: their path, and the highest block that they may hold.
    older: Vec<(String, u64)>,
    chores: mpsc::Sender<Chore>,
}

struct Open {
    path: String,
    writer: FileWriter,
    bytes: u64,
    /// The latest block that was written into it, flushed or not.
    latest: Option<u64>,
    /// All of it. What was begun and not ended is not flushed as if it were.
    is_whole: bool,
    /// Flushes of the latest block that were not answered.
    unanswered: u32,
}

/// Why an attempt came to nothing.
enum Trouble {
    Fenced,
    Full,
    /// The file is as good as before: flush it again.
    Wait(String),
    /// The file is lost: go on in a new one.
    Abandon(String),
}

/// What need not be waited for, in order.
enum Chore {
    Close(Box<FileWriter>, String),
    Recover(String),
    Delete(String),
}

const CHORES_MAX: usize = 256;
const RETRY_WAIT: Duration = Duration::from_millis(50);
/// A NameNode that is gone without a trace leaves connections that never answer.
const UNANSWERED_MAX: u32 = 2;
/// How long a file that was abandoned is recovered in the background, so that an heir need not.
const CHORE_DEADLINE: Duration = Duration::from_secs(30);
const POLL_INTERVAL: Duration = Duration::from_millis(100);

impl Tail {
    async fn append(&mut self, fs: &Fs, block: &Block) -> Result<(), StoreError> {
        assert!(block.seq == self.next || block.seq + 1 == self.next, "numbers without a gap");
        assert!(block.lowest >= self.lowest, "what was given up is not needed again");
        if self.is_fenced {
            return Err(StoreError::Fenced);
        }
        if block.seq + 1 == self.next {
            return Ok(());
        }
        let bytes = block.encode();
        let end = Instant::now() + fs.transfer_deadline(bytes.len());
        loop {
            let trouble = match self.attempt(fs, block.seq, &bytes).await {
                Ok(()) => break,
                Err(trouble) => trouble,
            };
            let reason = match trouble {
                Trouble::Fenced => {
                    self.is_fenced = true;
                    self.abandon();
                    return Err(StoreError::Fenced);
                }
                Trouble::Full => return Err(StoreError::Full),
                Trouble::Wait(reason) => reason,
                Trouble::Abandon(reason) => {
                    tracing::warn!(life = %self.life, %reason, "the log goes on in a new file");
                    self.abandon();
                    reason
                }
            };
            if Instant::now() >= end {
                return Err(StoreError::Io(reason));
            }
            tokio::time::sleep(RETRY_WAIT).await;
        }
        self.next = block.seq + 1;
        self.lowest = block.lowest;
        self.trim();
        Ok(())
    }

    async fn attempt(&mut self, fs: &Fs, seq: u64, bytes: &Bytes) -> Result<(), Trouble> {
        let is_full = |open: &Open| open.latest != Some(seq) && open.bytes >= fs.config.file_bytes;
        match &self.current {
            Some(open) if !open.is_whole => {
                return Err(Trouble::Abandon(format!("{}: a write was broken off", open.path)));
            }
            Some(open) if is_full(open) => self.roll(),
            _ => {}
        }
        if self.current.is_none() {
            self.current = Some(self.create(fs).await?);
        }
        let open = self.current.as_mut().expect("a file was just made sure of");
        let deadline = fs.config.sync_deadline + Duration::from_secs((bytes.len() >> 24) as u64);
        if open.latest != Some(seq) {
            open.write(fs, seq, bytes, deadline).await?;
        }
        open.flush(fs, deadline).await
    }

    async fn create(&mut self, fs: &Fs) -> Result<Open, Trouble> {
        let path = format!("{}/{:010}", fs.live(self.life), self.next_file);
        self.next_file += 1;
        let (name, options) = (path.clone(), fs.options().create_parent(!fs.config.keeps_fences));
        let create = |client: Client| async move { client.create(&name, options).await };
        match fs.ask(&format!("create {path}"), fs.config.request_timeout, create).await {
            Ok(writer) => Ok(Open { path, writer, bytes: 0, latest: None, is_whole: true, unanswered: 0 }),
            Err(Failure::Missing(_)) => Err(Trouble::Fenced),
            Err(Failure::Full) => Err(Trouble::Full),
            Err(failure) => {
                // It may have been made.
                self.chore(Chore::Delete(path));
                Err(Trouble::Wait(failure.text()))
            }
        }
    }

    /// The file is full and everything in it is durable.
    fn roll(&mut self) {
        if let Some(open) = self.current.take() {
            self.older.extend(open.latest.map(|latest| (open.path.clone(), latest)));
            self.chore(Chore::Close(Box::new(open.writer), open.path));
        }
    }

    fn abandon(&mut self) {
        let Some(open) = self.current.take() else { return };
        self.older.extend(open.latest.map(|latest| (open.path.clone(), latest)));
        self.chore(Chore::Recover(open.path));
    }

    fn trim(&mut self) {
        let lowest = self.lowest;
        let (kept, done) =
            std::mem::take(&mut self.older).into_iter().partition(|(_, highest)| *highest >= lowest);
        self.older = kept;
        let done: Vec<(String, u64)> = done;
        done.into_iter().for_each(|(path, _)| self.chore(Chore::Delete(path)));
    }

    /// What does not fit is left for those who end this life.
    fn chore(&self, chore: Chore) {
        let _ = self.chores.try_send(chore);
    }
}

impl Open {
    async fn write(&mut self, fs: &Fs, seq: u64, bytes: &Bytes, deadline: Duration) -> Result<(), Trouble> {
        self.latest = Some(seq);
        self.is_whole = false;
        self.unanswered = 0;
        self.bytes += bytes.len() as u64;
        let doing = fs.named(&format!("write {}", self.path));
        match timeout(deadline, Box::pin(self.writer.write_bytes(bytes.clone()))).await {
            Ok(Ok(_)) => {
                self.is_whole = true;
                Ok(())
            }
            Ok(Err(error)) => Err(lost(&doing, &error)),
            Err(_) => Err(Trouble::Abandon(format!("{doing}: not done within {deadline:?}"))),
        }
    }

    async fn flush(&mut self, fs: &Fs, deadline: Duration) -> Result<(), Trouble> {
        let doing = fs.named(&format!("flush {}", self.path));
        match timeout(deadline, Box::pin(self.writer.hsync())).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => match Failure::of(&doing, &error) {
                // The DataNodes have it, and the NameNode has not heard so.
                Failure::NameNode(reason) => Err(Trouble::Wait(reason)),
                _ => Err(lost(&doing, &error)),
            },
            // Broken off in the middle. If the DataNodes had not answered, the next flush says at once that
            // the writer is closed; if it was the NameNode, the next flush may succeed.
            Err(_) => {
                self.unanswered += 1;
                let reason = format!("{doing}: not done within {deadline:?}");
                if self.unanswered < UNANSWERED_MAX {
                    return Err(Trouble::Wait(reason));
                }
                fs.renew_client();
                Err(Trouble::Abandon(reason))
            }
        }
    }
}

/// A file that takes no more. Its error says nothing about who may write: the next file does.
fn lost(doing: &str, error: &HdfsError) -> Trouble {
    Trouble::Abandon(Failure::of(doing, error).text())
}

async fn do_chores(fs: Arc<Fs>, mut waiting: mpsc::Receiver<Chore>) {
    while let Some(chore) = waiting.recv().await {
        match chore {
            Chore::Close(mut writer, path) => {
                if !matches!(timeout(fs.config.request_timeout, Box::pin(writer.close())).await, Ok(Ok(()))) {
                    drop(writer);
                    let _ = fs.recover(&path, CHORE_DEADLINE).await;
                }
            }
            Chore::Recover(path) => {
                let _ = fs.recover(&path, CHORE_DEADLINE).await;
            }
            Chore::Delete(path) => {
                if let Err(error) = fs.remove(&path).await {
                    tracing::debug!(%error, "blocks that were given up stay");
                }
            }
        }
    }
}

impl Fs {
    /// Ends the right to write to a file and waits until HDFS has closed it. The same for one that is closed.
    pub(super) async fn recover(&self, path: &str, deadline: Duration) -> Result<(), Failure> {
        let end = Instant::now() + deadline;
        loop {
            let name = path.to_owned();
            let recover = |client: Client| async move { client.recover_lease(&name).await };
            let doing = format!("recover the lease of {path}");
            let reason = match self.ask(&doing, self.config.request_timeout, recover).await {
                Ok(true) => return Ok(()),
                Ok(false) => self.named(&format!("{doing}: not done within {deadline:?}")),
                Err(Failure::NameNode(reason)) => reason,
                Err(error) => return Err(error),
            };
            if Instant::now() >= end {
                return Err(Failure::NameNode(reason));
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }
}
