//! The shared log: files that grow at their end, on a remote store.
//!
//! Every change of every file is a frame in one write-ahead log per broker life, and one flush makes
//! the frames of all partitions durable. In the background data moves from the log into objects of its
//! own, and the log is cut at the front. The reasons are in `docs/decisions/0009`, the formats in
//! [`frame`]. Pure: [`frame`], [`tree`], [`ring`], [`core`](self::core); doing: the rest.

mod cache;
mod core;
mod files;
mod frame;
mod jobs;
pub mod leftovers;
mod log;
mod own;
mod packs;
mod ring;
#[cfg(test)]
mod sim;
mod store;
#[cfg(test)]
mod tests;
mod tree;
mod work;

#[cfg(test)]
pub(crate) use tests::small;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

pub use self::core::{Lost, Stats};
pub use own::{Inheritance, Inherited};

use self::cache::Cache;
use self::core::Core;
use crate::{Life, LifeLog, Remote, StoreError};

/// The limits of a shared log.
#[derive(Clone, Debug)]
pub struct Options {
    /// Bytes of a block, which is what one flush writes. Larger ones need fewer flushes at full speed and
    /// make whoever waits wait longer. At most 8 MiB.
    pub block_bytes: usize,
    /// Bytes that may wait for their flush. Who appends more waits.
    pub pending_bytes_max: u64,
    /// Bytes of log, and of memory for what is in it, from which on data moves into objects, the oldest
    /// first. An heir has to read this much; with many partitions the objects become small if it is.
    pub log_bytes_target: u64,
    /// Blocks of log from which on the same is done, however short they are: an heir reads each of them.
    pub log_blocks_target: u64,
    /// Bytes of log beyond which whoever appends waits. Directories with many files add to it.
    pub log_bytes_max: u64,
    /// Bytes of one file in the log that are enough for an object.
    pub object_bytes: u64,
    /// The same for a file that has no writer.
    pub ended_bytes_min: u64,
    /// Objects of less than this are put together once their file has no writer.
    pub merge_below_bytes: u64,
    /// Smaller tails go into no pack with others; they are said again.
    pub pack_bytes_min: u64,
    /// Bytes of one directory that are said again in the log rather than put into objects.
    pub inline_bytes_max: u64,
    /// Bytes of one directory that go from owner to owner without becoming objects.
    pub handed_bytes_max: u64,
    /// The same for all that are handed over at once.
    pub manifest_bytes_max: u64,
    /// Larger files that are put as a whole become objects at once.
    pub put_inline_bytes_max: usize,
    /// Memory for what was read from objects.
    pub cache_bytes: usize,
    /// Bytes that are read from an object ahead of who reads it in order.
    pub read_ahead_bytes_max: usize,
    /// Threads that write objects.
    pub writers: usize,
    /// How long an append waits for room before it fails (retryably).
    pub wait_max: Duration,
    /// How long a store may refuse a block before the life is given up, and everything is fenced.
    pub give_up_after: Duration,
    /// Between two attempts; the first is a twentieth of it.
    pub retry_after_max: Duration,
    /// For simulations: no threads; whoever would wait does a step of the work itself.
    pub stepped: bool,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            block_bytes: 4 << 20,
            pending_bytes_max: 32 << 20,
            log_bytes_target: 96 << 20,
            log_blocks_target: 2_000,
            log_bytes_max: 256 << 20,
            object_bytes: 8 << 20,
            ended_bytes_min: 64 << 10,
            merge_below_bytes: 1 << 20,
            pack_bytes_min: 2 << 10,
            inline_bytes_max: 16 << 10,
            handed_bytes_max: 128 << 10,
            manifest_bytes_max: 8 << 20,
            put_inline_bytes_max: 1 << 20,
            cache_bytes: 64 << 20,
            read_ahead_bytes_max: 4 << 20,
            writers: 8,
            wait_max: Duration::from_secs(2),
            give_up_after: Duration::from_secs(10),
            retry_after_max: Duration::from_secs(1),
            stepped: false,
        }
    }
}

/// A [`SegmentStore`](crate::SegmentStore) over a [`Remote`], for one life of one broker.
pub struct Shared {
    inner: Arc<Inner>,
}

/// What the store, its writers and readers, and its threads hold together.
struct Inner {
    remote: Arc<dyn Remote>,
    log: Arc<dyn LifeLog>,
    life: Life,
    options: Options,
    core: Mutex<Core>,
    cache: Cache,
    /// Something is to be flushed.
    flush: Condvar,
    /// A block became durable, or the life was lost.
    durable: Condvar,
    /// There is work for a writer.
    work: Condvar,
    /// A writer is done with something.
    done: Condvar,
    on_lost: Mutex<Vec<Box<dyn FnOnce(&Lost) + Send>>>,
    /// The store has refused an object, and nothing since was written; the same of what is removed.
    is_write_failure_told: AtomicBool,
    is_chore_failure_told: AtomicBool,
    /// No threads: whoever would wait does a step of the work itself.
    is_stepped: bool,
}

impl Shared {
    /// Begins the log of a life, which must be a new one, and starts the threads.
    pub fn open(remote: Arc<dyn Remote>, life: Life, options: Options) -> Result<Arc<Shared>, StoreError> {
        let is_stepped = options.stepped;
        let inner = Inner::open(remote, life, options, is_stepped)?;
        if !is_stepped {
            log::start(&inner)?;
            work::start(&inner)?;
        }
        Ok(Arc::new(Shared { inner }))
    }

    /// Without threads: one flush, and one piece of the work that goes on in the background.
    pub fn step(&self) {
        self.inner.step();
    }

    pub fn life(&self) -> Life {
        self.inner.life
    }

    /// Why this life can no longer write, if it cannot.
    pub fn lost(&self) -> Option<Lost> {
        self.inner.core.lock().lost().cloned()
    }

    /// Calls `tell` once the life can no longer write, from a thread of the log's own; at once if that
    /// is so already.
    pub fn on_lost(&self, tell: impl FnOnce(&Lost) + Send + 'static) {
        self.inner.on_lost.lock().push(Box::new(tell));
        self.lost().iter().for_each(|lost| self.inner.tell_lost(lost));
    }

    pub fn stats(&self) -> Stats {
        let mut stats = self.inner.core.lock().stats();
        self.inner.cache.count(&mut stats);
        stats
    }

    /// Makes durable whatever was appended, then ends the threads and every writer.
    pub fn close(&self) -> Result<(), StoreError> {
        let flushed = self.inner.flush_all();
        self.inner.lose(Lost::Closed);
        flushed
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.inner.lose(Lost::Closed);
    }
}

impl Inner {
    fn open(
        remote: Arc<dyn Remote>,
        life: Life,
        options: Options,
        is_stepped: bool,
    ) -> Result<Arc<Inner>, StoreError> {
        let log = remote.begin(life)?;
        Ok(Arc::new(Inner {
            remote,
            log,
            life,
            core: Mutex::new(Core::new(life, options.clone())),
            cache: Cache::new(&options),
            options,
            flush: Condvar::new(),
            durable: Condvar::new(),
            work: Condvar::new(),
            done: Condvar::new(),
            on_lost: Mutex::default(),
            is_write_failure_told: AtomicBool::new(false),
            is_chore_failure_told: AtomicBool::new(false),
            is_stepped,
        }))
    }
}
