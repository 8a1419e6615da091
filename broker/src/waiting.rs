//! Work that waits for a store, and who waits for it.
//!
//! A runtime of one thread is a simulation's: there everything is done where it is asked for, so that no
//! time passes meanwhile.

use tokio::runtime::{Handle, RuntimeFlavor};

/// Does what may wait for a remote store on a thread of the runtime. The other tasks of this thread go on
/// elsewhere meanwhile, the one that renews the lease before all.
pub fn may_wait<T>(work: impl FnOnce() -> T) -> T {
    match Handle::try_current().map(|runtime| runtime.runtime_flavor()) {
        Ok(RuntimeFlavor::MultiThread) => tokio::task::block_in_place(work),
        // A thread of its own, or a runtime that has no other.
        _ => work(),
    }
}

/// Does on another thread what waits for a store. `None` when the runtime is at its end.
pub async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    match is_simulated() {
        true => Some(work()),
        false => tokio::task::spawn_blocking(work).await.ok(),
    }
}

/// Whether there is one thread for everything.
pub fn is_simulated() -> bool {
    cfg!(test)
        && Handle::try_current().is_ok_and(|here| here.runtime_flavor() == RuntimeFlavor::CurrentThread)
}
