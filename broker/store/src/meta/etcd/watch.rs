//! Watches on etcd: one stream each, taken up again where it broke.
//!
//! Invariant: a watcher misses nothing without being told to list again. It is told so when etcd has
//! thrown away what came after the last change that it saw.

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use tonic::Streaming;

use super::members::{Connected, Members, Refusal, refusal, with_leader};
use super::{api, own_key};
use crate::meta::watch::{WatchHandle, Watchers};
use crate::{Change, Item, MetaError, Watch};

/// Returns once etcd watches.
pub(super) async fn watch(
    members: Arc<Members>,
    own_prefix: String,
    prefix: &str,
    range: (Vec<u8>, Vec<u8>),
) -> Result<Watch, MetaError> {
    let mut follower = Follower { members, own_prefix, range, next: 0 };
    let stream = follower.begin().await?;
    let watchers = Watchers::default();
    let watch = watchers.add(prefix);
    let handle = watch.handle();
    let task = tokio::spawn(async move { follower.follow(stream, &watchers, &handle).await });
    Ok(watch.owning(task))
}

struct Follower {
    members: Arc<Members>,
    own_prefix: String,
    range: (Vec<u8>, Vec<u8>),
    /// The revision of the first change that was not told yet; 0: whatever comes from now on.
    next: i64,
}

struct Stream {
    connected: Connected,
    answers: Streaming<api::WatchResponse>,
}

impl Follower {
    /// Opens a stream and waits until etcd watches. A new watch learns where it begins.
    async fn begin(&mut self) -> Result<Stream, Refusal> {
        let connected = self.members.connected().await?;
        let timeout = self.members.timeout();
        match tokio::time::timeout(timeout, self.open(connected.clone())).await {
            Ok(Ok(stream)) => Ok(stream),
            Ok(Err(refusal)) => {
                self.members.leave(&connected);
                Err(refusal)
            }
            Err(_) => {
                self.members.leave(&connected);
                let text = format!("watch: etcd does not answer within {timeout:?}");
                Err(MetaError::Unavailable(text).into())
            }
        }
    }

    async fn open(&mut self, connected: Connected) -> Result<Stream, Refusal> {
        let create = api::WatchCreateRequest {
            key: self.range.0.clone(),
            range_end: self.range.1.clone(),
            start_revision: self.next,
            progress_notify: true,
        };
        let create = api::watch_request::RequestUnion::CreateRequest(create);
        let create = api::WatchRequest { request_union: Some(create) };
        // The end of the requests would be the end of the watch.
        let requests = futures_util::stream::iter([create]).chain(futures_util::stream::pending());
        let client = api::watch_client::WatchClient::new(connected.channel.clone());
        let mut client = client.max_decoding_message_size(usize::MAX);
        let answers = client.watch(with_leader(requests)).await;
        let mut answers = answers.map_err(|status| refusal("watch", &status))?.into_inner();
        let first = answers.message().await.map_err(|status| refusal("watch", &status))?;
        match first {
            Some(first) if first.canceled => Err(cancelled(&first)),
            Some(first) if first.created => {
                if self.next == 0 {
                    self.next = first.header.unwrap_or_default().revision + 1;
                }
                Ok(Stream { connected, answers })
            }
            _ => Err(MetaError::Unavailable("watch: etcd does not begin".to_owned()).into()),
        }
    }

    /// Tells changes until the watcher is gone; its task is ended with it.
    async fn follow(mut self, mut stream: Stream, watchers: &Watchers, handle: &WatchHandle) {
        loop {
            let broken = self.tell(&mut stream, watchers).await;
            self.members.leave(&stream.connected);
            tracing::debug!(reason = ?broken, next = self.next, "a watch on etcd is taken up again");
            let is_lost = matches!(broken, Refusal::Compacted);
            stream = self.begin_at_last(is_lost, handle).await;
        }
    }

    /// Tells the changes of one stream until it breaks.
    async fn tell(&mut self, stream: &mut Stream, watchers: &Watchers) -> Refusal {
        loop {
            let answer = match stream.answers.message().await {
                Ok(Some(answer)) => answer,
                Ok(None) => return MetaError::Unavailable("the watch ended".to_owned()).into(),
                Err(status) => return refusal("watch", &status),
            };
            if answer.canceled {
                return cancelled(&answer);
            }
            let last = answer.events.last().and_then(|event| event.kv.as_ref()).map(|kv| kv.mod_revision);
            for event in answer.events {
                match change(&self.own_prefix, event) {
                    Ok(change) => watchers.tell(&change),
                    Err(error) => return error.into(),
                }
            }
            // Without events it says how far nothing has happened.
            let seen = last.or(answer.header.map(|header| header.revision)).unwrap_or_default();
            self.next = self.next.max(seen + 1);
        }
    }

    /// Opens the stream again, however long it takes.
    async fn begin_at_last(&mut self, mut is_lost: bool, handle: &WatchHandle) -> Stream {
        let mut wait = WAIT_FIRST;
        loop {
            if is_lost {
                self.next = 0;
            }
            match self.begin().await {
                Ok(stream) => {
                    if is_lost {
                        // Only now: what follows is complete from here on.
                        handle.overflow();
                    }
                    return stream;
                }
                Err(Refusal::Compacted) => is_lost = true,
                Err(reason) => {
                    tracing::debug!(?reason, "a watch on etcd is not taken up yet");
                    tokio::time::sleep(wait).await;
                    wait = (2 * wait).min(WAIT_MAX);
                }
            }
        }
    }
}

const WAIT_FIRST: Duration = Duration::from_millis(50);
const WAIT_MAX: Duration = Duration::from_secs(1);

fn cancelled(answer: &api::WatchResponse) -> Refusal {
    if answer.compact_revision > 0 {
        return Refusal::Compacted;
    }
    MetaError::Unavailable(format!("etcd ended the watch: {}", answer.cancel_reason)).into()
}

fn change(own_prefix: &str, event: api::Event) -> Result<Change, MetaError> {
    let is_deleted = event.r#type() == api::event::EventType::Delete;
    let found = event.kv.unwrap_or_default();
    let (key, version) = own_key(own_prefix, &found)?;
    Ok(match is_deleted {
        true => Change::Deleted { key, version },
        false => Change::Put(Item { key, value: found.value, version }),
    })
}
