//! Where the operator is let in: one question for each namespace, in place of a refusal for each kind in it.
//!
//! A namespace may come, and its RoleBinding with it, while the operator lives (decision 0014). Until it is let in there the
//! API server is asked whether it is, and nothing else; what a watch is refused later makes the question be asked again.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::authorization::v1::{
    ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec,
};
use kube::api::{Api, PostParams};
use kube::{Client, Resource as _};
use parking_lot::Mutex;
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info};

use crate::crd::BrokerCluster;
use crate::names::GROUP;

/// By namespace; the empty name is all of them.
#[derive(Default)]
pub struct Leave(Mutex<HashMap<String, Arc<Place>>>);

/// Whether the operator is let in somewhere, as far as it was told.
pub struct Place {
    state: watch::Sender<State>,
    doubted: Notify,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct State {
    open: bool,
    /// Answers so far: each is a sign of life of the API server.
    answers: u64,
}

impl Leave {
    /// The place of this namespace; it is asked about from the first call on, until `stop`.
    pub fn place(&self, client: &Client, namespace: &str, stop: &CancellationToken) -> Arc<Place> {
        let mut places = self.0.lock();
        let place = places.entry(namespace.to_owned()).or_insert_with(|| {
            let place = Arc::new(Place { state: watch::Sender::default(), doubted: Notify::new() });
            let (asked, client, namespace) = (place.clone(), client.clone(), namespace.to_owned());
            let stop = stop.clone();
            tokio::spawn(async move { stop.run_until_cancelled(asked.ask(client, &namespace)).await });
            place
        });
        place.clone()
    }
}

impl Place {
    /// Returns when the operator is let in; `heard` is called at each answer before that.
    pub async fn open(&self, heard: impl Fn()) {
        let mut state = self.state.subscribe();
        loop {
            if state.borrow_and_update().open {
                return;
            }
            // It lives as long as this place.
            if state.changed().await.is_err() {
                return std::future::pending().await;
            }
            heard();
        }
    }

    /// Something was refused: what was answered may not be so any more.
    pub fn doubt(&self) {
        self.state.send_modify(|state| state.open = false);
        self.doubted.notify_one();
    }

    async fn ask(&self, client: Client, namespace: &str) {
        let api: Api<SelfSubjectAccessReview> = Api::all(client);
        let shown = if namespace.is_empty() { "every namespace" } else { namespace };
        let mut told = false;
        loop {
            let answered = match api.create(&PostParams::default(), &question(namespace)).await {
                Ok(answer) => Ok(answer.status.is_some_and(|status| status.allowed)),
                // Even the question is forbidden here: it is found out by trying.
                Err(kube::Error::Api(status)) if status.code == 403 => Ok(true),
                Err(error) => Err(error),
            };
            match answered {
                Ok(open) => {
                    self.state.send_modify(|state| *state = State { open, answers: state.answers + 1 });
                    match (open, std::mem::replace(&mut told, !open)) {
                        (true, true) => info!(namespace = shown, "the operator is let in"),
                        (false, false) => info!(
                            namespace = shown,
                            "the operator is not let in yet: a RoleBinding of ClusterRole sealane-operator is missing"
                        ),
                        _ => {}
                    }
                    if open {
                        self.doubted.notified().await;
                    }
                }
                Err(error) => {
                    debug!(namespace = shown, "whether the operator is let in was not answered: {error}")
                }
            }
            tokio::time::sleep(PAUSE).await;
        }
    }
}

/// Whether the operator has no leave here any more, asked now. Where a namespace is deleted its RoleBinding goes with the rest,
/// often first: what is forbidden then is nothing that a person must look at.
pub async fn is_put_out(client: &Client, namespace: &str) -> bool {
    let api: Api<SelfSubjectAccessReview> = Api::all(client.clone());
    let answered = api.create(&PostParams::default(), &question(namespace)).await;
    answered.is_ok_and(|answer| answer.status.is_some_and(|status| !status.allowed))
}

/// Whoever may list clusters was let in as a whole: one role holds all that the operator needs.
fn question(namespace: &str) -> SelfSubjectAccessReview {
    let resource_attributes = Some(ResourceAttributes {
        group: Some(GROUP.to_owned()),
        resource: Some(BrokerCluster::plural(&()).into_owned()),
        verb: Some("list".to_owned()),
        namespace: Some(namespace.to_owned()).filter(|namespace| !namespace.is_empty()),
        ..ResourceAttributes::default()
    });
    let spec = SelfSubjectAccessReviewSpec { resource_attributes, ..SelfSubjectAccessReviewSpec::default() };
    SelfSubjectAccessReview { spec, ..SelfSubjectAccessReview::default() }
}

/// Between two questions.
const PAUSE: Duration = Duration::from_secs(2);
