//! One watch of one kind: list, then follow, over every failure, with a backoff of its own, and a sign
//! of life at every word of the API server (bookmarks too, which come each minute).
//!
//! What comes out never ends and is never an error, so no watch can hold up another.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use futures_util::{Stream, StreamExt as _};
use kube::api::{Api, ListParams, WatchEvent, WatchParams};
use kube::runtime::watcher::Event;
use kube::{Resource, ResourceExt as _};
use serde::de::DeserializeOwned;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use crate::leave::Place;
use crate::liveness::Liveness;

/// A kind that can be watched.
pub trait Watched:
    Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + Sync + 'static
{
}

impl<K> Watched for K where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + Sync + 'static
{
}

/// Watches `api` until `stop`. `name` is for the log and for liveness.
pub fn watch<K: Watched>(
    name: String,
    api: Api<K>,
    labels: Option<String>,
    liveness: Arc<Liveness>,
    place: Arc<Place>,
    stop: CancellationToken,
) -> impl Stream<Item = Event<K>> + Send + 'static {
    let (events, received) = mpsc::channel(EVENTS_MAX);
    let task = Watch { name, api, labels, liveness, place, events };
    tokio::spawn(async move {
        stop.run_until_cancelled(task.run()).await;
    });
    futures_util::stream::unfold(received, async |mut received| {
        let event = received.recv().await?;
        Some((event, received))
    })
}

struct Watch<K> {
    name: String,
    api: Api<K>,
    labels: Option<String>,
    liveness: Arc<Liveness>,
    /// Where it looks, and whether it may.
    place: Arc<Place>,
    events: mpsc::Sender<Event<K>>,
}

/// Why a watch is to be begun again from a list.
#[derive(Debug, thiserror::Error)]
enum Ended {
    #[error(transparent)]
    Kube(#[from] kube::Error),
    #[error("nobody listens")]
    Deaf,
}

impl<K: Watched> Watch<K> {
    async fn run(self) {
        let mut pause = PAUSE_MIN;
        let mut complained = false;
        self.liveness.heard(&self.name);
        loop {
            self.place.open(|| self.liveness.heard(&self.name)).await;
            let version = match self.list().await {
                Ok(version) => version,
                Err(Ended::Deaf) => return,
                Err(error) => {
                    // An answer is a sign of life, also one that lets us into nothing yet.
                    if matches!(&error, Ended::Kube(kube::Error::Api(_))) {
                        self.liveness.heard(&self.name);
                    }
                    if matches!(&error, Ended::Kube(kube::Error::Api(status)) if status.code == 403) {
                        self.place.doubt();
                    }
                    match &error {
                        _ if complained => {}
                        Ended::Kube(kube::Error::Api(status)) => {
                            warn!(watch = %self.name, "cannot be listed, trying again: {}", status.message);
                        }
                        error => warn!(watch = %self.name, "cannot be listed, trying again: {error}"),
                    }
                    complained = true;
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(PAUSE_MAX);
                    continue;
                }
            };
            if complained {
                info!(watch = %self.name, "is back");
            }
            complained = false;
            pause = PAUSE_MIN;
            match self.follow(version).await {
                Ok(()) => {}
                Err(Ended::Deaf) => return,
                Err(error) => warn!(watch = %self.name, "is begun again: {error}"),
            }
        }
    }

    /// All there is, page by page; the version to follow from.
    async fn list(&self) -> Result<String, Ended> {
        let mut params = ListParams { label_selector: self.labels.clone(), ..ListParams::default() };
        params.limit = Some(PAGE);
        let mut begun = false;
        loop {
            let page = self.api.list(&params).await?;
            self.liveness.heard(&self.name);
            if !begun {
                self.say(Event::Init).await?;
                begun = true;
            }
            for object in page.items {
                self.say(Event::InitApply(slim(object))).await?;
            }
            match page.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => params.continue_token = Some(token),
                None => {
                    self.say(Event::InitDone).await?;
                    return Ok(page.metadata.resource_version.unwrap_or_default());
                }
            }
        }
    }

    /// Follows from `version` until the server has forgotten it. Lost connections are made again.
    async fn follow(&self, mut version: String) -> Result<(), Ended> {
        let params = WatchParams {
            label_selector: self.labels.clone(),
            timeout: Some(WATCH_SECONDS),
            ..WatchParams::default()
        };
        let mut pause = PAUSE_MIN;
        loop {
            let opened = self.api.watch(&params, &version).await;
            let mut stream = match opened {
                Ok(stream) => Box::pin(stream),
                Err(kube::Error::Api(status)) if status.code == 410 => return Ok(()),
                // Put out, or its namespace goes: it begins again from a list when it is let in again.
                Err(kube::Error::Api(status)) if status.code == 403 => {
                    self.place.doubt();
                    return Ok(());
                }
                Err(error) => {
                    debug!(watch = %self.name, "cannot be opened, trying again: {error}");
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(PAUSE_MAX);
                    continue;
                }
            };
            self.liveness.heard(&self.name);
            let begun = tokio::time::Instant::now();
            while let Some(event) = stream.next().await {
                let Ok(event) = event.inspect_err(|error| debug!(watch = %self.name, "{error}")) else {
                    break;
                };
                self.liveness.heard(&self.name);
                match event {
                    WatchEvent::Added(object) | WatchEvent::Modified(object) => {
                        version = object.resource_version().unwrap_or(version);
                        self.say(Event::Apply(slim(object))).await?;
                    }
                    WatchEvent::Deleted(object) => {
                        version = object.resource_version().unwrap_or(version);
                        self.say(Event::Delete(slim(object))).await?;
                    }
                    WatchEvent::Bookmark(bookmark) => version = bookmark.metadata.resource_version,
                    WatchEvent::Error(status) if status.code == 410 => return Ok(()),
                    WatchEvent::Error(status) => return Err(kube::Error::Api(status).into()),
                }
            }
            // A server that closes at once must not be asked in a tight loop.
            if begun.elapsed() < PAUSE_MAX {
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(PAUSE_MAX);
            } else {
                pause = PAUSE_MIN;
            }
        }
    }

    async fn say(&self, event: Event<K>) -> Result<(), Ended> {
        self.events.send(event).await.map_err(|_| Ended::Deaf)
    }
}

/// Without what nobody here reads and what is the larger half of many objects.
fn slim<K: Resource>(mut object: K) -> K {
    object.meta_mut().managed_fields = None;
    object
}

const EVENTS_MAX: usize = 256;
const PAGE: u32 = 500;
const WATCH_SECONDS: u32 = 240;
const PAUSE_MIN: Duration = Duration::from_millis(250);
const PAUSE_MAX: Duration = Duration::from_secs(8);
