//! What every reconciliation stands on: the client, who may write, Events, metrics, and how the data
//! plane is reached. All writes of the operator go through here and `apply`.

use std::collections::HashMap;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use chassis::ServiceHandle;
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, DeleteParams, EvictParams, Patch, PatchParams, Preconditions};
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use kube::{Client, Resource, ResourceExt as _};
use parking_lot::Mutex;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::json;

use crate::config::Config;
use crate::dataplane::DataPlane;
use crate::failure::Failure;
use crate::join::Doors;
use crate::leader::Leadership;
use crate::leave::Leave;
use crate::liveness::Liveness;
use crate::names::{GROUP, MANAGER, PAUSED};

/// Of one operator process.
pub struct Context {
    pub client: Client,
    pub config: Config,
    /// Namespaces that are looked after; all of them when empty.
    pub namespaces: Vec<String>,
    pub leader: Arc<Leadership>,
    pub liveness: Arc<Liveness>,
    pub leave: Leave,
    pub service: ServiceHandle,
    pub data_plane: DataPlane,
    /// Where other regions redeem tokens.
    pub doors: Doors,
    /// Every Topic as last seen, so that one of thousands costs no list of all.
    pub topics: std::sync::OnceLock<kube::runtime::reflector::Store<crate::crd::Topic>>,
    /// Every BrokerCluster as last seen.
    pub clusters: std::sync::OnceLock<kube::runtime::reflector::Store<crate::crd::BrokerCluster>>,
    /// The way to the brokers of each cluster, by namespace and name, as found a moment ago.
    pub(crate) reached: Mutex<HashMap<(String, String), Arc<crate::region::Reach>>>,
    /// When a joined region was last asked, by uid of the MirrorLink.
    pub(crate) asked: Mutex<HashMap<String, tokio::time::Instant>>,
    recorder: Recorder,
    /// Versions that our own writes made: older ones are not judged.
    pub(crate) written: Mutex<HashMap<String, u64>>,
    /// Objects whose stored form differs from what is applied though applying changes nothing.
    pub(crate) settled: Mutex<HashMap<String, String>>,
}

/// A kind of ours or of Kubernetes, in a namespace.
pub trait Kind:
    Resource<DynamicType = (), Scope = NamespaceResourceScope>
    + Clone
    + Debug
    + DeserializeOwned
    + Serialize
    + Send
    + Sync
    + 'static
{
}

impl<K> Kind for K where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
        + Clone
        + Debug
        + DeserializeOwned
        + Serialize
        + Send
        + Sync
        + 'static
{
}

impl Context {
    pub fn new(
        client: Client,
        config: Config,
        namespaces: Vec<String>,
        leader: Arc<Leadership>,
        service: ServiceHandle,
        me: &str,
    ) -> Context {
        let reporter = Reporter { controller: format!("{GROUP}/operator"), instance: Some(me.to_owned()) };
        let silence = Duration::from_secs(u64::from(config.watch_silence_seconds.max(1)));
        Context {
            topics: std::sync::OnceLock::new(),
            clusters: std::sync::OnceLock::new(),
            reached: Mutex::default(),
            asked: Mutex::default(),
            recorder: Recorder::new(client.clone(), reporter),
            client,
            config,
            namespaces,
            leader,
            liveness: Arc::new(Liveness::new(silence)),
            leave: Leave::default(),
            service,
            data_plane: DataPlane::default(),
            doors: Doors::default(),
            written: Mutex::default(),
            settled: Mutex::default(),
        }
    }

    /// In one namespace.
    pub fn api<K>(&self, namespace: &str) -> Api<K>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
    {
        Api::namespaced(self.client.clone(), namespace)
    }

    /// In everything that is looked after: an API for each namespace, or one for all.
    pub fn everywhere<K>(&self) -> Vec<(String, Api<K>)>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
    {
        if self.namespaces.is_empty() {
            return vec![(String::new(), Api::all(self.client.clone()))];
        }
        self.namespaces.iter().map(|namespace| (namespace.clone(), self.api(namespace))).collect()
    }

    /// Whether objects of this namespace are ours to see.
    pub fn looks_after(&self, namespace: &str) -> bool {
        self.namespaces.is_empty() || self.namespaces.iter().any(|ours| ours == namespace)
    }

    /// Nothing is written after the Lease may have gone to another.
    pub fn fence(&self) -> Result<(), Failure> {
        if self.leader.may_write() { Ok(()) } else { Err(Failure::NotLeader) }
    }

    /// Writes the status where it differs from what is there.
    pub async fn status<K: Kind, S: Serialize + PartialEq>(
        &self,
        object: &K,
        before: Option<&S>,
        after: &S,
    ) -> Result<(), Failure> {
        if before == Some(after) {
            return Ok(());
        }
        self.fence()?;
        let body = json!({
            "apiVersion": K::api_version(&()),
            "kind": K::kind(&()),
            "metadata": { "name": object.name_any() },
            "status": after,
        });
        let params = PatchParams::apply(MANAGER).force();
        let api = self.api::<K>(&object.namespace().unwrap_or_default());
        let written = api.patch_status(&object.name_any(), &params, &Patch::Apply(body)).await?;
        self.remember(&written);
        self.count("status", &K::kind(&()));
        Ok(())
    }

    /// Changes metadata or spec of an object by a merge, where it is still the version that was read.
    pub async fn merge<K: Kind>(&self, object: &K, mut change: serde_json::Value) -> Result<K, Failure> {
        self.fence()?;
        if let (Some(map), Some(version)) = (change.as_object_mut(), object.resource_version()) {
            let metadata = map.entry("metadata").or_insert_with(|| json!({}));
            metadata["resourceVersion"] = version.into();
        }
        let api = self.api::<K>(&object.namespace().unwrap_or_default());
        let params = PatchParams { field_manager: Some(MANAGER.to_owned()), ..PatchParams::default() };
        let written = api.patch(&object.name_any(), &params, &Patch::Merge(change)).await?;
        self.remember(&written);
        self.count("merge", &K::kind(&()));
        Ok(written)
    }

    /// Deletes exactly this object, not a later one of its name.
    pub async fn delete<K: Kind>(&self, object: &K) -> Result<(), Failure> {
        self.delete_with(object, DeleteParams::background()).await
    }

    /// Deletes a pod whose node nobody reaches, without a word from there.
    pub async fn strike_off(&self, pod: &Pod) -> Result<(), Failure> {
        self.delete_with(pod, DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() }).await
    }

    async fn delete_with<K: Kind>(&self, object: &K, params: DeleteParams) -> Result<(), Failure> {
        self.fence()?;
        let api = self.api::<K>(&object.namespace().unwrap_or_default());
        let preconditions = Preconditions { uid: object.uid(), resource_version: None };
        let params = DeleteParams { preconditions: Some(preconditions), ..params };
        self.count("delete", &K::kind(&()));
        match api.delete(&object.name_any(), &params).await.map_err(Failure::from) {
            Ok(_) => Ok(()),
            Err(failure) if failure.is_not_found() => Ok(()),
            Err(failure) => Err(failure),
        }
    }

    /// Asks for a pod to be taken away, exactly this one, as its PodDisruptionBudget allows; false where it does not.
    pub async fn evict(&self, pod: &Pod) -> Result<bool, Failure> {
        self.fence()?;
        let preconditions = Preconditions { uid: pod.uid(), resource_version: None };
        let delete = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
        let params = EvictParams { delete_options: Some(delete), ..EvictParams::default() };
        self.count("evict", "Pod");
        let api = self.api::<Pod>(&pod.namespace().unwrap_or_default());
        match api.evict(&pod.name_any(), &params).await.map_err(Failure::from) {
            Ok(_) => Ok(true),
            Err(failure) if failure.is_not_found() => Ok(true),
            Err(failure) if failure.is_refused_for_now() => Ok(false),
            Err(failure) => Err(failure),
        }
    }

    /// Adds or removes a finalizer of ours; the object as it is then.
    pub async fn finalizer<K: Kind>(&self, object: &K, name: &str, wanted: bool) -> Result<(), Failure> {
        let mut finalizers = object.finalizers().to_vec();
        let there = finalizers.iter().any(|finalizer| finalizer == name);
        if there == wanted {
            return Ok(());
        }
        match wanted {
            true => finalizers.push(name.to_owned()),
            false => finalizers.retain(|finalizer| finalizer != name),
        }
        let change = json!({ "metadata": { "finalizers": finalizers } });
        match self.merge(object, change).await {
            Err(failure) if failure.is_not_found() => Ok(()),
            other => other.map(drop),
        }
    }

    /// An Event about an object, for `kubectl describe`. Lost ones are not missed by anything.
    pub async fn event<K: Kind>(
        &self,
        object: &K,
        type_: EventType,
        reason: &str,
        action: &str,
        note: String,
    ) {
        if !self.leader.may_write() {
            return;
        }
        let note = note.chars().take(NOTE_CHARS_MAX).collect();
        let event = Event {
            type_,
            reason: reason.to_owned(),
            note: Some(note),
            action: action.to_owned(),
            secondary: None,
        };
        if let Err(error) = self.recorder.publish(&event, &object.object_ref(&())).await {
            tracing::debug!("an Event was lost: {error}");
        }
    }

    /// What has been seen in a watch may be older than what we wrote.
    pub fn is_stale<K: Kind>(&self, object: &K) -> bool {
        let uid = object.uid().unwrap_or_default();
        let known = self.written.lock().get(&uid).copied();
        known.is_some_and(|known| version_of(object).is_some_and(|version| version < known))
    }

    pub(crate) fn remember<K: Kind>(&self, object: &K) {
        if let (Some(uid), Some(version)) = (object.uid(), version_of(object)) {
            self.written.lock().insert(uid, version);
        }
    }

    /// An object is gone.
    pub fn forget(&self, uid: &str) {
        self.written.lock().remove(uid);
        self.asked.lock().remove(uid);
    }

    pub(crate) fn count(&self, verb: &str, kind: &str) {
        let labels = [("verb", verb), ("kind", kind)];
        let help = "Writes to the API server.";
        self.service.metrics().counter("sealane_operator_writes_total", help, &labels).inc();
    }
}

/// A person asked that nothing be written for it.
pub fn is_paused<K: Resource>(object: &K) -> bool {
    object.annotations().get(PAUSED).is_some_and(|value| value == "true")
}

fn version_of<K: Resource>(object: &K) -> Option<u64> {
    object.resource_version()?.parse().ok()
}

const NOTE_CHARS_MAX: usize = 1000;
