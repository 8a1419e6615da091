//! Runs one controller: a kind of ours, what else wakes it up, and how often it is tried again.

use std::collections::{HashMap, HashSet};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use futures_util::stream::BoxStream;
use futures_util::{FutureExt as _, StreamExt as _};
use kube::runtime::controller::{Action, Config as Pace, Controller, Error as RunError};
use kube::runtime::reflector::{self, ObjectRef, Store};
use kube::runtime::watcher::Event;
use kube::{Resource, ResourceExt as _};
use tracing::{debug, error, warn};

use crate::context::{Context, Kind};
use crate::failure::Failure;
use crate::leave::is_put_out;
use crate::watch::{Watched, watch};

/// When the object is looked at again if nothing happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Again(pub Duration);

impl Again {
    pub fn soon() -> Again {
        Again(Duration::from_secs(2))
    }
}

pub type Reconciled = Result<Again, Failure>;
/// Brings the world to what an object says, as far as it can now.
pub type Reconcile<K> = fn(Arc<Context>, Arc<K>) -> BoxFuture<'static, Reconciled>;
/// Names objects to look at.
pub type Wakes<K> = BoxStream<'static, ObjectRef<K>>;

/// All objects of a kind as last seen, and the changes that matter.
pub struct Primary<K: Kind> {
    pub store: Store<K>,
    changes: BoxStream<'static, K>,
}

/// Watches a kind of ours. Changes of nothing but the status are left out: we make them ourselves.
pub fn primary<K: Kind>(cx: &Arc<Context>) -> Primary<K> {
    let (store, mut writer) = reflector::store::<K>();
    // Several watches fill one store: what a list no longer has is taken out of it one by one.
    writer.apply_watcher_event(&Event::Init);
    writer.apply_watcher_event(&Event::InitDone);
    let mut seen: HashMap<String, u64> = HashMap::new();
    let mut listed: HashMap<String, HashSet<String>> = HashMap::new();
    let (context, kept) = (cx.clone(), store.clone());
    let changes = events::<K>(cx, &K::plural(&()), None).flat_map(move |(namespace, event)| {
        let mut changes = Vec::new();
        let mut gone = Vec::new();
        match event {
            Event::Init => drop(listed.insert(namespace, HashSet::new())),
            Event::InitDone => {
                let there = listed.remove(&namespace).unwrap_or_default();
                let here =
                    |known: &Arc<K>| namespace.is_empty() || known.namespace().as_ref() == Some(&namespace);
                let missing =
                    |known: &Arc<K>| here(known) && !there.contains(&known.uid().unwrap_or_default());
                gone.extend(kept.state().into_iter().filter(missing).map(|known| (*known).clone()));
            }
            Event::Apply(object) | Event::InitApply(object) => {
                let (uid, mark) = (object.uid().unwrap_or_default(), mark(&object));
                if let Some(listed) = listed.get_mut(&namespace) {
                    listed.insert(uid.clone());
                }
                writer.apply_watcher_event(&Event::Apply(object.clone()));
                if seen.insert(uid, mark) != Some(mark) {
                    changes.push(object);
                }
            }
            Event::Delete(object) => gone.push(object),
        }
        for object in gone {
            let uid = object.uid().unwrap_or_default();
            seen.remove(&uid);
            context.forget(&uid);
            writer.apply_watcher_event(&Event::Delete(object.clone()));
            changes.push(object);
        }
        futures_util::stream::iter(changes)
    });
    Primary { store, changes: changes.boxed() }
}

/// Objects of another kind that wake objects of kind `K`.
pub fn secondary<S, K: Kind>(
    cx: &Arc<Context>,
    name: &str,
    labels: Option<String>,
    wakes: impl Fn(&S) -> Vec<ObjectRef<K>> + Send + Sync + 'static,
) -> Wakes<K>
where
    S: Watched + Resource<Scope = k8s_openapi::NamespaceResourceScope>,
{
    let woken = events::<S>(cx, name, labels).flat_map(move |(_, event)| {
        let woken = match event {
            Event::Apply(object) | Event::InitApply(object) | Event::Delete(object) => wakes(&object),
            Event::Init | Event::InitDone => Vec::new(),
        };
        futures_util::stream::iter(woken)
    });
    woken.boxed()
}

/// Of every namespace that is looked after, with its name.
fn events<K>(cx: &Arc<Context>, name: &str, labels: Option<String>) -> BoxStream<'static, (String, Event<K>)>
where
    K: Watched + Resource<Scope = k8s_openapi::NamespaceResourceScope>,
{
    let watches = cx.everywhere::<K>().into_iter().map(|(namespace, api)| {
        let shown = if namespace.is_empty() { name.to_owned() } else { format!("{namespace}/{name}") };
        let (liveness, stop) = (cx.liveness.clone(), cx.service.stopping().clone());
        let place = cx.leave.place(&cx.client, &namespace, &stop);
        watch::<K>(shown, api, labels.clone(), liveness, place, stop)
            .map(move |event| (namespace.clone(), event))
            .boxed()
    });
    futures_util::stream::select_all(watches).boxed()
}

/// Runs until the service stops.
pub async fn run<K: Kind>(
    cx: Arc<Context>,
    name: &'static str,
    primary: Primary<K>,
    wakes: Vec<Wakes<K>>,
    reconcile: Reconcile<K>,
) {
    let pace = Pace::default().concurrency(cx.config.concurrency.max(1)).debounce(DEBOUNCE);
    let mut controller = Controller::for_stream(primary.changes.map(Ok), primary.store).with_config(pace);
    for woken in wakes {
        controller = controller.reconcile_on(woken);
    }
    let stop = cx.service.stopping().clone();
    let controller = controller.graceful_shutdown_on(async move { stop.cancelled().await });
    let work = move |object: Arc<K>, cx: Arc<Context>| attempt(cx, object, name, reconcile);
    let results = controller.run(work, policy::<K>, cx.clone());
    results
        .for_each(|result| {
            if let Err(problem) = result {
                match problem {
                    // Gone meanwhile.
                    RunError::ObjectNotFound(_) | RunError::ReconcilerFailed(..) => {}
                    other => warn!(controller = name, "{other}"),
                }
            }
            std::future::ready(())
        })
        .await;
}

async fn attempt<K: Kind>(
    cx: Arc<Context>,
    object: Arc<K>,
    name: &'static str,
    reconcile: Reconcile<K>,
) -> Result<Action, Failure> {
    if !cx.leader.may_write() {
        return Ok(Action::requeue(NOT_LEADER));
    }
    if cx.is_stale(&*object) {
        return Ok(Action::requeue(STALE));
    }
    let begun = tokio::time::Instant::now();
    let namespace = object.namespace().unwrap_or_default();
    let shown = format!("{namespace}/{}", object.name_any());
    // A panic of one object must not end the controller of all.
    let result = std::panic::AssertUnwindSafe(reconcile(cx.clone(), object)).catch_unwind().await;
    let help = "Time that reconciliations took.";
    let metrics = cx.service.metrics();
    metrics
        .durations("sealane_operator_reconcile_seconds", help, &[("controller", name)])
        .observe_duration(begun.elapsed());
    let result = result.unwrap_or_else(|_| Err(Failure::Invalid("a reconciliation panicked".to_owned())));
    let put_out = match &result {
        Err(failure) if failure.is_forbidden() => is_put_out(&cx.client, &namespace).await,
        _ => false,
    };
    match &result {
        Ok(_) => {}
        Err(failure) if put_out => {
            debug!(controller = name, object = shown, "not let in any more: {failure}")
        }
        Err(Failure::NotLeader) => debug!(controller = name, object = shown, "not the leader any more"),
        Err(failure) if failure.is_conflict() || failure.is_of_a_namespace_that_goes() => {
            debug!(controller = name, object = shown, "{failure}");
        }
        Err(failure) => {
            let help = "Reconciliations that failed.";
            metrics.counter("sealane_operator_failures_total", help, &[("controller", name)]).inc();
            match failure.is_forbidden() {
                true => error!(controller = name, object = shown, "{failure}"),
                false => warn!(controller = name, object = shown, "{failure}"),
            }
        }
    }
    result.map(|Again(after)| Action::requeue(after))
}

fn policy<K>(_: Arc<K>, failure: &Failure, _: Arc<Context>) -> Action {
    Action::requeue(match failure {
        failure if failure.is_conflict() => STALE,
        Failure::NotLeader => NOT_LEADER,
        _ => FAILED,
    })
}

/// Of everything that makes a difference to a reconciliation.
fn mark<K: Kind>(object: &K) -> u64 {
    let meta = object.meta();
    let mut hasher = DefaultHasher::new();
    meta.generation.hash(&mut hasher);
    meta.deletion_timestamp.is_some().hash(&mut hasher);
    meta.labels.hash(&mut hasher);
    meta.annotations.hash(&mut hasher);
    meta.finalizers.hash(&mut hasher);
    hasher.finish()
}

/// Changes of one object that come together are one.
const DEBOUNCE: Duration = Duration::from_millis(50);
const STALE: Duration = Duration::from_millis(100);
const NOT_LEADER: Duration = Duration::from_secs(1);
const FAILED: Duration = Duration::from_secs(5);
