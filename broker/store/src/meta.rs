//! The metadata seam: small values by name, with versions, guarded writes, watches and leases.
//!
//! Owns the trait, its contract and the types that cross it; implementations are in the submodules.
//! Invariant: versions of one store only grow, over restarts too, and no two writes share one.

#[cfg(feature = "cluster")]
mod etcd;
mod file;
mod flaky;
mod memory;
mod table;
mod watch;

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use futures_util::future::BoxFuture;
use parking_lot::Mutex;
use tokio::sync::Notify;

#[cfg(feature = "cluster")]
pub use etcd::{Etcd, EtcdConfig, EtcdTls};
pub use file::File;
pub use flaky::{Flaky, MetaFaults};
pub use memory::Memory;
pub use watch::Watch;

use crate::StoreError;

/// What a call of a [`MetaStore`] comes to.
pub type Answer<'a, T> = BoxFuture<'a, Result<T, MetaError>>;

/// Values by key. Every write is guarded by what the writer believes to be there.
pub trait MetaStore: Send + Sync {
    /// The value of a key and the version of the write that set it.
    fn get<'a>(&'a self, key: &'a str) -> Answer<'a, Option<(Vec<u8>, Version)>>;

    /// Writes if the key's version is `expected` (`None`: if the key does not exist) and returns the
    /// new version. Durable when it returns. [`MetaError::Conflict`] names what is there instead.
    fn put_if<'a>(&'a self, key: &'a str, value: Vec<u8>, expected: Option<Version>) -> Answer<'a, Version>;

    /// Deletes if the key's version is `expected`.
    fn delete_if<'a>(&'a self, key: &'a str, expected: Version) -> Answer<'a, ()>;

    /// Everything whose key begins with `prefix`, by key, as of one moment.
    fn list<'a>(&'a self, prefix: &'a str) -> Answer<'a, Vec<Item>>;

    /// Every later write below `prefix`, in order. To follow a state: watch, then list, then apply the
    /// changes whose version is higher than the item's.
    fn watch<'a>(&'a self, prefix: &'a str) -> Answer<'a, Watch>;

    /// A lease of the caller's own. It is kept alive until its last clone is dropped or it is ended;
    /// stores with several users take it away when they have not heard of it for `ttl`.
    fn lease(&self, ttl: Duration) -> Answer<'_, Lease>;

    /// As [`MetaStore::put_if`] for a key that goes when the lease does. A store that one process owns
    /// alone may refuse with [`MetaError::Unavailable`].
    fn put_leased<'a>(
        &'a self,
        key: &'a str,
        value: Vec<u8>,
        expected: Option<Version>,
        lease: &'a Lease,
    ) -> Answer<'a, Version>;

    /// As [`MetaStore::put_if`], in one step with the condition that `guard` still has this version:
    /// [`MetaError::GuardGone`] otherwise. Where the guard is a leased key, a writer whose lease was
    /// taken away without its knowledge is refused.
    fn put_guarded<'a>(
        &'a self,
        key: &'a str,
        value: Vec<u8>,
        expected: Option<Version>,
        guard: (&'a str, Version),
    ) -> Answer<'a, Version>;

    /// The version of the latest write of the whole store.
    fn version(&self) -> Answer<'_, Version>;
}

/// A moment in the life of one store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Version(pub u64);

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item {
    pub key: String,
    pub value: Vec<u8>,
    pub version: Version,
}

/// What a watcher is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    Put(Item),
    Deleted {
        key: String,
        version: Version,
    },
    /// The watcher was too slow and changes are missing: list again. What follows is newer than this.
    Resync,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MetaError {
    /// Somebody else wrote: read again and decide anew.
    #[error("the key has changed: {current:?}")]
    Conflict { current: Option<Version> },
    /// What the write was guarded by has changed: the writer's lease is gone.
    #[error("the guard of the write is gone")]
    GuardGone,
    #[error("key {0:?} is not allowed: 1 to {max} bytes, no control characters", max = KEY_BYTES_MAX)]
    BadKey(String),
    #[error("a value of {0} bytes is too large: at most {max}", max = VALUE_BYTES_MAX)]
    TooLarge(usize),
    /// The write did not happen.
    #[error("the metadata store is full")]
    Full,
    /// The write may or may not have happened; try again later, after reading.
    #[error("metadata store: {0}")]
    Unavailable(String),
    #[error("metadata store is damaged: {0}")]
    Corrupt(String),
}

impl MetaError {
    /// True if the same call may succeed later. For a write, read first: it may have happened.
    pub fn is_retryable(&self) -> bool {
        matches!(self, MetaError::Full | MetaError::Unavailable(_))
    }
}

impl From<StoreError> for MetaError {
    fn from(error: StoreError) -> MetaError {
        match error {
            StoreError::Full => MetaError::Full,
            StoreError::Corrupt(what) => MetaError::Corrupt(what),
            other => MetaError::Unavailable(other.to_string()),
        }
    }
}

pub const KEY_BYTES_MAX: usize = 1024;
pub const VALUE_BYTES_MAX: usize = 1024 * 1024;

fn check_key(key: &str) -> Result<(), MetaError> {
    let legal = !key.is_empty() && key.len() <= KEY_BYTES_MAX && !key.chars().any(char::is_control);
    if legal { Ok(()) } else { Err(MetaError::BadKey(key.chars().take(64).collect())) }
}

fn check_value(value: &[u8]) -> Result<(), MetaError> {
    if value.len() <= VALUE_BYTES_MAX { Ok(()) } else { Err(MetaError::TooLarge(value.len())) }
}

/// Proof of being alive to others. Clones stand for the same lease; it ends with the last of them.
#[derive(Clone)]
pub struct Lease {
    state: Arc<LeaseState>,
}

/// A lease, seen by somebody who does not keep it.
#[derive(Clone)]
pub struct WeakLease(Weak<LeaseState>);

struct LeaseState {
    /// The store's name for it.
    id: i64,
    gone: AtomicBool,
    /// It is over at this moment, if it is not renewed, whether anybody has noticed or not.
    until: Mutex<Option<Instant>>,
    changed: Notify,
    on_end: Box<dyn Fn() + Send + Sync>,
}

impl Lease {
    /// `on_end` is called once, when the lease ends by its holder's will or by [`Lease::end`].
    fn new(id: i64, on_end: impl Fn() + Send + Sync + 'static) -> Lease {
        let (gone, until, changed) = (AtomicBool::new(false), Mutex::default(), Notify::new());
        Lease { state: Arc::new(LeaseState { id, gone, until, changed, on_end: Box::new(on_end) }) }
    }

    fn id(&self) -> i64 {
        self.state.id
    }

    pub fn downgrade(&self) -> WeakLease {
        WeakLease(Arc::downgrade(&self.state))
    }

    /// False once the lease may have been given to another.
    pub fn is_held(&self) -> bool {
        !self.state.gone.load(Ordering::Acquire) && self.until().is_none_or(|until| Instant::now() < until)
    }

    /// Until when the lease is held if it is not renewed; always, without one.
    fn until(&self) -> Option<Instant> {
        *self.state.until.lock()
    }

    #[cfg(feature = "cluster")]
    fn extend(&self, until: Instant) {
        let mut current = self.state.until.lock();
        *current = Some(current.map_or(until, |current| current.max(until)));
    }

    #[cfg(feature = "cluster")]
    fn has_ended(&self) -> bool {
        self.state.gone.load(Ordering::Acquire)
    }

    /// Returns when the lease is no longer held.
    pub async fn lost(&self) {
        loop {
            let changed = self.state.changed.notified();
            if !self.is_held() {
                return;
            }
            changed.await;
        }
    }

    /// Gives the lease up.
    pub fn end(&self) {
        self.state.end();
    }
}

impl WeakLease {
    /// It has run out, and its holder has not noticed yet.
    pub fn is_overdue(&self) -> bool {
        self.upgrade().is_some_and(|lease| !lease.is_held())
    }

    fn upgrade(&self) -> Option<Lease> {
        self.0.upgrade().map(|state| Lease { state })
    }
}

impl fmt::Debug for WeakLease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WeakLease({:?})", self.upgrade())
    }
}

impl LeaseState {
    fn end(&self) {
        if !self.gone.swap(true, Ordering::AcqRel) {
            (self.on_end)();
            self.changed.notify_waiters();
        }
    }
}

impl Drop for LeaseState {
    fn drop(&mut self) {
        self.end();
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Lease({}, held: {})", self.state.id, self.is_held())
    }
}

impl<M: MetaStore + ?Sized> MetaStore for Arc<M> {
    fn get<'a>(&'a self, key: &'a str) -> Answer<'a, Option<(Vec<u8>, Version)>> {
        (**self).get(key)
    }

    fn put_if<'a>(&'a self, key: &'a str, value: Vec<u8>, expected: Option<Version>) -> Answer<'a, Version> {
        (**self).put_if(key, value, expected)
    }

    fn delete_if<'a>(&'a self, key: &'a str, expected: Version) -> Answer<'a, ()> {
        (**self).delete_if(key, expected)
    }

    fn list<'a>(&'a self, prefix: &'a str) -> Answer<'a, Vec<Item>> {
        (**self).list(prefix)
    }

    fn watch<'a>(&'a self, prefix: &'a str) -> Answer<'a, Watch> {
        (**self).watch(prefix)
    }

    fn lease(&self, ttl: Duration) -> Answer<'_, Lease> {
        (**self).lease(ttl)
    }

    fn put_leased<'a>(
        &'a self,
        key: &'a str,
        value: Vec<u8>,
        expected: Option<Version>,
        lease: &'a Lease,
    ) -> Answer<'a, Version> {
        (**self).put_leased(key, value, expected, lease)
    }

    fn put_guarded<'a>(
        &'a self,
        key: &'a str,
        value: Vec<u8>,
        expected: Option<Version>,
        guard: (&'a str, Version),
    ) -> Answer<'a, Version> {
        (**self).put_guarded(key, value, expected, guard)
    }

    fn version(&self) -> Answer<'_, Version> {
        (**self).version()
    }
}
