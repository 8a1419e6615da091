//! Work that may wait for a remote store, done on the runtime's own threads.

use tokio::runtime::{Handle, RuntimeFlavor};

/// Does what may wait for a store. The other tasks of this thread go on elsewhere meanwhile, the one that
/// renews the lease before all.
pub fn may_wait<T>(work: impl FnOnce() -> T) -> T {
    match Handle::try_current().map(|runtime| runtime.runtime_flavor()) {
        Ok(RuntimeFlavor::MultiThread) => tokio::task::block_in_place(work),
        // A thread of its own, or a runtime that has no other.
        _ => work(),
    }
}
