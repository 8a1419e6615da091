//! A runtime of its own for a store that is asynchronous inside, behind the blocking trait.
//!
//! Invariant: a call ends by its deadline, whatever the network does.

use std::future::Future;
use std::sync::mpsc;
use std::time::Duration;

use tokio::runtime::{Builder, Handle, Runtime};

use crate::StoreError;

#[derive(Debug)]
pub(super) struct Worker {
    /// Taken on drop alone.
    runtime: Option<Runtime>,
    handle: Handle,
}

impl Worker {
    pub(super) fn new(name: &str) -> Result<Worker, StoreError> {
        let runtime = Builder::new_multi_thread().worker_threads(2).thread_name(name).enable_all().build();
        let runtime =
            runtime.map_err(|error| StoreError::Io(format!("start the threads of {name}: {error}")))?;
        let handle = runtime.handle().clone();
        Ok(Worker { runtime: Some(runtime), handle })
    }

    pub(super) fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Runs `work` to its end, or drops it at the deadline. May be called on any thread; it blocks.
    pub(super) fn run<T: Send + 'static>(
        &self,
        doing: &str,
        deadline: Duration,
        work: impl Future<Output = Result<T, StoreError>> + Send + 'static,
    ) -> Result<T, StoreError> {
        let (answer, wait) = mpsc::sync_channel(1);
        self.handle.spawn(async move {
            // Nobody waits any more only if the caller's thread has died.
            let _ = answer.send(tokio::time::timeout(deadline, work).await);
        });
        match wait.recv() {
            Ok(Ok(outcome)) => outcome,
            Ok(Err(_)) => Err(StoreError::Io(format!("{doing}: no answer within {deadline:?}"))),
            Err(_) => Err(StoreError::Io(format!("{doing}: given up"))),
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // Does not wait, so that a store may be dropped on a thread of another runtime.
            runtime.shutdown_background();
        }
    }
}

/// What a store says, in one line of bearable length.
pub(super) fn one_line(text: &str) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    match line.char_indices().nth(LINE_CHARS_MAX) {
        Some((end, _)) => format!("{}...", &line[..end]),
        None => line,
    }
}

const LINE_CHARS_MAX: usize = 300;
