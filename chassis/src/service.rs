//! Service life: start, run until a signal or the first dead task, drain within a grace period.
//!
//! A [`Process`] holds one or several services (`sealane local` runs all regions in one process);
//! each is a [`ServiceHandle`] through which its tasks are spawned and stopped. Services drain in
//! the reverse order of their registration, and inside one service the front stage (listeners,
//! connections) ends before the back stage (flushers, writers) is told to stop, so that nothing
//! acknowledged is left unflushed.

use std::fmt::Display;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{error, info};

use crate::metrics::Registry;

/// All services of this process, in start order.
#[derive(Default)]
pub struct Process {
    services: Mutex<Vec<ServiceHandle>>,
    failure: Arc<FirstFailure>,
}

/// One running service: its tasks, its stop signal, its readiness, its metrics. Cheap to clone.
#[derive(Clone)]
pub struct ServiceHandle(Arc<Service>);

struct Service {
    name: Arc<str>,
    registry: Registry,
    front: Stage,
    back: Stage,
    ready: AtomicBool,
    troubles: Mutex<Vec<Troubles>>,
    failure: Arc<FirstFailure>,
}

/// Says at a probe what is wrong now.
type Troubles = Box<dyn Fn() -> Vec<Trouble> + Send + Sync>;

/// What is wrong with a service that runs; gone when it is no longer told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// Nobody new should be sent here while it lasts.
    Unready(String),
    /// A person should know; what else the service does is as good as ever.
    Known(String),
    /// It will not come right by itself: whoever can should start the process anew.
    Dead(String),
}

#[derive(Default)]
struct Stage {
    stop: CancellationToken,
    abort: CancellationToken,
    tracker: TaskTracker,
}

/// An essential task that ended when it should not have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{service}: {task} {reason}")]
pub struct TaskFailure {
    pub service: Arc<str>,
    pub task: &'static str,
    pub reason: String,
}

/// Why [`Process::run`] did not end well.
#[derive(Debug, thiserror::Error)]
pub enum RunError<E> {
    #[error("{0}")]
    Start(E),
    #[error("{0}")]
    Task(TaskFailure),
    #[error("{unfinished} tasks did not stop within {grace:?} and were cut off")]
    Grace { unfinished: usize, grace: Duration },
}

impl Process {
    pub fn new() -> Process {
        Process::default()
    }

    /// Registers a service. Its tasks are then part of this process's life.
    pub fn service(&self, name: &str, registry: &Registry) -> ServiceHandle {
        let handle = ServiceHandle(Arc::new(Service {
            name: name.into(),
            registry: registry.clone(),
            front: Stage::default(),
            back: Stage::default(),
            ready: AtomicBool::new(false),
            troubles: Mutex::default(),
            failure: self.failure.clone(),
        }));
        self.services.lock().push(handle.clone());
        handle
    }

    /// Runs `start`, then waits for SIGTERM, SIGINT or the first dead task, then drains every
    /// service, newest first. `grace` bounds the whole drain. A second signal ends the process at
    /// once with code 130. A signal or a failure during `start` gives it up and drains what is there.
    pub async fn run<E: Display>(
        &self,
        grace: Duration,
        start: impl Future<Output = Result<(), E>>,
    ) -> Result<(), RunError<E>> {
        let mut signals = Signals::listen();
        let started = tokio::select! {
            outcome = start => outcome.map(|()| true),
            _ = signals.next() => Ok(false),
            _ = self.failure.wait() => Ok(false),
        };
        if let Ok(true) = started {
            tokio::select! {
                name = signals.next() => info!("{name}: stopping"),
                failure = self.failure.wait() => error!("{failure}: stopping"),
            }
        }
        tokio::spawn(async move {
            signals.next().await;
            std::process::exit(130);
        });
        let drained = self.drain(grace).await;
        if let Err(start_error) = started {
            return Err(RunError::Start(start_error));
        }
        match (self.failure.first(), drained) {
            (Some(failure), _) => Err(RunError::Task(failure)),
            (None, Err(unfinished)) => Err(RunError::Grace { unfinished, grace }),
            (None, Ok(())) => Ok(()),
        }
    }

    /// Stops all services, newest first; an error is the number of tasks cut off.
    pub async fn drain(&self, grace: Duration) -> Result<(), usize> {
        let deadline = Instant::now() + grace;
        let services: Vec<ServiceHandle> = self.services.lock().drain(..).rev().collect();
        let mut unfinished = 0;
        for service in services {
            if let Err(count) = service.drain(deadline.duration_since(Instant::now())).await {
                unfinished += count;
            }
        }
        if unfinished == 0 { Ok(()) } else { Err(unfinished) }
    }
}

impl ServiceHandle {
    /// A service outside of any process: for tests and embedding. Its owner calls [`Self::drain`].
    pub fn standalone(name: &str) -> ServiceHandle {
        Process::new().service(name, &Registry::new())
    }

    pub fn name(&self) -> &str {
        &self.0.name
    }

    pub fn metrics(&self) -> &Registry {
        &self.0.registry
    }

    /// Cancelled when the service is to stop taking work: listeners close, connections answer what
    /// is in flight and end.
    pub fn stopping(&self) -> &CancellationToken {
        &self.0.front.stop
    }

    /// Cancelled when every front task has ended: flushers write what is left and end.
    pub fn back_stopping(&self) -> &CancellationToken {
        &self.0.back.stop
    }

    /// Spawns an essential task: if it ends, fails or panics before [`Self::stopping`], the process
    /// stops with that as the reason. An error after that is a failure too.
    pub fn spawn<E: Display>(
        &self,
        task: &'static str,
        future: impl Future<Output = Result<(), E>> + Send + 'static,
    ) {
        self.spawn_essential(&self.0.front, task, future);
    }

    /// As [`Self::spawn`], in the back stage: watches [`Self::back_stopping`].
    pub fn spawn_back<E: Display>(
        &self,
        task: &'static str,
        future: impl Future<Output = Result<(), E>> + Send + 'static,
    ) {
        self.spawn_essential(&self.0.back, task, future);
    }

    /// Spawns a task that may end at any time (a connection). It watches [`Self::stopping`], is
    /// waited for in the drain, and is cut off when the grace is over.
    pub fn spawn_child(&self, future: impl Future<Output = ()> + Send + 'static) {
        let stage = &self.0.front;
        let abort = stage.abort.clone();
        stage.tracker.spawn(async move {
            abort.run_until_cancelled(future).await;
        });
    }

    fn spawn_essential<E: Display>(
        &self,
        stage: &Stage,
        task: &'static str,
        future: impl Future<Output = Result<(), E>> + Send + 'static,
    ) {
        let (stop, abort) = (stage.stop.clone(), stage.abort.clone());
        let service = self.0.clone();
        // The inner task shields the bookkeeping from a panic.
        let inner = tokio::spawn(async move {
            let end = abort.run_until_cancelled(future).await;
            end.map_or(Ok(()), |result| result.map_err(|error| error.to_string()))
        });
        stage.tracker.spawn(async move {
            let reason = match inner.await {
                Ok(Ok(())) if stop.is_cancelled() => return,
                Ok(Ok(())) => "ended by itself".to_owned(),
                Ok(Err(error)) => format!("failed: {error}"),
                Err(_) => "panicked".to_owned(),
            };
            service.failure.report(TaskFailure { service: service.name.clone(), task, reason });
        });
    }

    pub fn set_ready(&self, ready: bool) {
        self.0.ready.store(ready, Ordering::Release);
    }

    /// `troubles` is asked at every probe what is wrong now: it must be quick.
    pub fn on_probe(&self, troubles: impl Fn() -> Vec<Trouble> + Send + Sync + 'static) {
        self.0.troubles.lock().push(Box::new(troubles));
    }

    /// Everything that is wrong now.
    pub fn troubles(&self) -> Vec<Trouble> {
        self.0.troubles.lock().iter().flat_map(|troubles| troubles()).collect()
    }

    /// Ready to serve: told so by [`Self::set_ready`], not stopping, no essential task dead, nothing
    /// wrong that speaks against it.
    pub fn is_ready(&self) -> bool {
        let up = self.0.ready.load(Ordering::Acquire) && !self.stopping().is_cancelled();
        up && self.is_healthy() && !self.troubles().iter().any(Trouble::is_unready)
    }

    /// Nothing is wrong that only a new start would mend.
    pub fn is_alive(&self) -> bool {
        self.is_healthy() && !self.troubles().iter().any(|trouble| matches!(trouble, Trouble::Dead(_)))
    }

    /// No essential task of the process is dead.
    pub fn is_healthy(&self) -> bool {
        self.0.failure.first().is_none()
    }

    /// Stops the front stage, then the back stage, waiting at most `grace` in all; an error is the
    /// number of tasks cut off.
    pub async fn drain(&self, grace: Duration) -> Result<(), usize> {
        let deadline = Instant::now() + grace;
        let front = self.0.front.end(deadline).await;
        let back = self.0.back.end(deadline).await;
        match front + back {
            0 => Ok(()),
            unfinished => Err(unfinished),
        }
    }
}

impl Trouble {
    pub fn is_unready(&self) -> bool {
        matches!(self, Trouble::Unready(_) | Trouble::Dead(_))
    }

    pub fn text(&self) -> &str {
        match self {
            Trouble::Unready(text) | Trouble::Known(text) | Trouble::Dead(text) => text,
        }
    }
}

impl Stage {
    async fn end(&self, deadline: Instant) -> usize {
        self.stop.cancel();
        self.tracker.close();
        let left = deadline.duration_since(Instant::now()).max(STAGE_GRACE_MIN);
        if timeout(left, self.tracker.wait()).await.is_ok() {
            return 0;
        }
        let unfinished = self.tracker.len();
        self.abort.cancel();
        // A task that never yields cannot be cut off; do not wait for it.
        let _ = timeout(STAGE_GRACE_MIN, self.tracker.wait()).await;
        unfinished
    }
}

struct FirstFailure(watch::Sender<Option<TaskFailure>>);

impl Default for FirstFailure {
    fn default() -> FirstFailure {
        FirstFailure(watch::Sender::new(None))
    }
}

impl FirstFailure {
    fn report(&self, failure: TaskFailure) {
        error!("{failure}");
        self.0.send_if_modified(|first| {
            let is_first = first.is_none();
            first.get_or_insert(failure);
            is_first
        });
    }

    fn first(&self) -> Option<TaskFailure> {
        self.0.borrow().clone()
    }

    async fn wait(&self) -> TaskFailure {
        let mut receiver = self.0.subscribe();
        let value = receiver.wait_for(Option::is_some).await.expect("self holds the sender");
        value.clone().expect("waited for a value")
    }
}

struct Signals {
    terminate: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
}

impl Signals {
    fn listen() -> Signals {
        Signals {
            terminate: signal(SignalKind::terminate()).expect("SIGTERM can be handled"),
            interrupt: signal(SignalKind::interrupt()).expect("SIGINT can be handled"),
        }
    }

    async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }
}

/// Even when the front stage used up the grace, the back stage gets this to flush.
const STAGE_GRACE_MIN: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;

    #[tokio::test]
    async fn the_back_stage_stops_after_the_front_stage_has_ended() {
        let service = ServiceHandle::standalone("s");
        let order = Arc::new(Mutex::new(Vec::new()));
        let (front, back) = (order.clone(), order.clone());
        let stop = service.stopping().clone();
        service.spawn("front", async move {
            stop.cancelled().await;
            tokio::time::sleep(Duration::from_millis(30)).await;
            front.lock().push("front");
            Ok::<(), Infallible>(())
        });
        let stop = service.back_stopping().clone();
        service.spawn_back("back", async move {
            stop.cancelled().await;
            back.lock().push("back");
            Ok::<(), Infallible>(())
        });
        assert_eq!(service.drain(Duration::from_secs(5)).await, Ok(()));
        assert_eq!(*order.lock(), ["front", "back"]);
        assert!(service.is_healthy());
    }

    #[tokio::test]
    async fn a_panic_of_an_essential_task_stops_the_process_and_names_the_task() {
        let process = Process::new();
        let service = process.service("broker", &Registry::new());
        let start = async {
            service.spawn("flusher", async {
                if true {
                    panic!("boom");
                }
                Ok::<(), Infallible>(())
            });
            Ok::<(), Infallible>(())
        };
        let error = process.run(Duration::from_secs(5), start).await.expect_err("the task died");
        assert_eq!(error.to_string(), "broker: flusher panicked");
    }

    #[tokio::test]
    async fn a_task_that_ends_early_is_a_failure() {
        let process = Process::new();
        let service = process.service("mirror", &Registry::new());
        service.spawn("link", async { Ok::<(), Infallible>(()) });
        let error =
            process.run(Duration::from_secs(5), std::future::pending::<Result<(), Infallible>>()).await;
        assert_eq!(error.expect_err("the task ended").to_string(), "mirror: link ended by itself");
    }

    #[tokio::test]
    async fn a_task_that_ignores_the_stop_is_cut_off_after_the_grace() {
        let service = ServiceHandle::standalone("s");
        service.spawn_child(std::future::pending());
        assert_eq!(service.drain(Duration::ZERO).await, Err(1));
    }

    #[tokio::test]
    async fn services_drain_newest_first() {
        let process = Process::new();
        let order = Arc::new(Mutex::new(Vec::new()));
        for name in ["broker", "mirror"] {
            let service = process.service(name, &Registry::new());
            let (stop, order) = (service.stopping().clone(), order.clone());
            service.spawn("task", async move {
                stop.cancelled().await;
                order.lock().push(name);
                Ok::<(), Infallible>(())
            });
        }
        assert_eq!(process.drain(Duration::from_secs(5)).await, Ok(()));
        assert_eq!(*order.lock(), ["mirror", "broker"]);
    }
}
