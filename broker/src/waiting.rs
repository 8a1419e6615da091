//! Work that waits for a store, and who waits for it.
//!
//! A runtime of one thread is a simulation's: there everything is done where it is asked for, so that no
//! time passes meanwhile.

use std::fmt::Display;
use std::sync::Arc;
use std::time::{Duration, Instant};

use chassis::Trouble;
use parking_lot::Mutex;
use tokio::runtime::{Handle, RuntimeFlavor};

/// What a broker that starts waits for, in a sentence: for its log, and for whoever asks whether it is ready.
#[derive(Clone, Debug, Default)]
pub struct Waits(Arc<Mutex<Option<Wait>>>);

#[derive(Debug)]
struct Wait {
    trouble: String,
    told: String,
    told_at: Instant,
}

/// The same is told again after so long.
const TELL_AGAIN: Duration = Duration::from_secs(30);

impl Waits {
    /// `what` does not answer, and is asked again.
    pub fn on(&self, what: &str, error: &dyn Display) {
        let trouble = format!("{what} does not answer: {error}");
        // Attempts are counted and timed in errors, which makes them no other ones.
        let told: String = trouble.chars().filter(|c| !c.is_ascii_digit()).collect();
        let mut wait = self.0.lock();
        let told_at = match &*wait {
            Some(wait) if wait.told == told && wait.told_at.elapsed() < TELL_AGAIN => wait.told_at,
            _ => {
                tracing::warn!(%error, "{what} does not answer; waiting for it");
                Instant::now()
            }
        };
        *wait = Some(Wait { trouble, told, told_at });
    }

    pub fn over(&self) {
        if self.0.lock().take().is_some() {
            tracing::info!("what was waited for has answered");
        }
    }

    pub fn troubles(&self) -> Vec<Trouble> {
        self.0.lock().as_ref().map(|wait| Trouble::Unready(wait.trouble.clone())).into_iter().collect()
    }
}

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

/// Does work that waits, for each of so many, with no more than `threads` of them at a time. Blocks.
pub fn side_by_side<T: Send>(count: usize, threads: usize, each: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let threads = count.min(threads);
    if threads <= 1 || is_simulated() {
        return (0..count).map(each).collect();
    }
    let shares: Vec<Vec<T>> = std::thread::scope(|scope| {
        let work = |first: usize| {
            let each = &each;
            scope.spawn(move || (first..count).step_by(threads).map(each).collect())
        };
        let workers: Vec<_> = (0..threads).map(work).collect();
        let ended = workers.into_iter().map(|worker| worker.join());
        ended.map(|share| share.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    });
    let mut shares: Vec<_> = shares.into_iter().map(Vec::into_iter).collect();
    (0..count).filter_map(|at| shares[at % threads].next()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_done_side_by_side_comes_back_in_order() {
        for (count, threads) in [(0, 4), (1, 4), (3, 4), (17, 4), (17, 1)] {
            assert_eq!(side_by_side(count, threads, |at| at), (0..count).collect::<Vec<_>>());
        }
    }
}
