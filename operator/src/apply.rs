//! Server-side apply of what an object of ours owns: never over something foreign, never twice.
//!
//! Fields that others added stay; fields that we no longer say go. An object is written only where
//! what we say has changed (its hash is an annotation) or something we said was changed by others.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::ResourceExt as _;
use kube::api::{Patch, PatchParams};
use serde_json::Value;

use crate::context::{Context, Kind};
use crate::failure::Failure;
use crate::names::{APPLIED, MANAGED_BY, MANAGER, OWNER};

/// What everything is owned by.
#[derive(Clone, Debug)]
pub struct Owner {
    pub reference: OwnerReference,
    pub namespace: String,
}

impl Owner {
    pub fn of<K: Kind>(object: &K) -> Owner {
        let reference = OwnerReference {
            api_version: K::api_version(&()).into_owned(),
            kind: K::kind(&()).into_owned(),
            name: object.name_any(),
            uid: object.uid().unwrap_or_default(),
            controller: Some(true),
            block_owner_deletion: Some(true),
        };
        Owner { reference, namespace: object.namespace().unwrap_or_default() }
    }

    /// Value of the label by which an orphan is known.
    pub fn label(&self) -> String {
        format!("{}.{}", self.reference.kind, self.reference.name)
    }

    /// What an existing object is to this owner.
    pub fn claim(&self, meta: &ObjectMeta) -> Claim {
        let controller = meta.owner_references.iter().flatten().find(|owner| owner.controller == Some(true));
        let label = |key: &str| meta.labels.as_ref().and_then(|labels| labels.get(key)).map(String::as_str);
        match controller {
            Some(owner) if owner.uid == self.reference.uid => Claim::Ours,
            Some(owner) => Claim::Foreign(format!("belongs to {} {}", owner.kind, owner.name)),
            None if label(MANAGED_BY) == Some(MANAGER) && label(OWNER) == Some(&self.label()) => {
                Claim::Orphan
            }
            None => Claim::Foreign("was not made by this operator".to_owned()),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Claim {
    Ours,
    /// Made for an object of this name that is gone.
    Orphan,
    Foreign(String),
}

impl Context {
    /// Brings an object to what is desired; true if something was written.
    pub async fn apply<K: Kind>(&self, owner: &Owner, desired: &K) -> Result<bool, Failure> {
        let name = desired.name_any();
        let api = self.api::<K>(&owner.namespace);
        let live = api.get_opt(&name).await?;
        let (body, hash) = body(owner, desired)?;
        let Some(live) = live else {
            self.fence()?;
            // Without force: somebody who was faster keeps what he made.
            let params = PatchParams { field_manager: Some(MANAGER.to_owned()), ..PatchParams::default() };
            api.patch(&name, &params, &Patch::Apply(body)).await?;
            self.count("create", &K::kind(&()));
            return Ok(true);
        };
        if let Claim::Foreign(why) = owner.claim(live.meta()) {
            return Err(Failure::Foreign { kind: K::kind(&()).into_owned(), name, why });
        }
        if self.is_settled(&live, &body, &hash)? {
            return Ok(false);
        }
        self.fence()?;
        let mut body = body;
        // Another object of this name, made since, is not meant.
        body["metadata"]["uid"] = live.uid().into();
        let written = api.patch(&name, &PatchParams::apply(MANAGER).force(), &Patch::Apply(body)).await?;
        self.count("apply", &K::kind(&()));
        if written.resource_version() == live.resource_version() {
            let mut settled = self.settled.lock();
            if settled.len() >= SETTLED_MAX {
                settled.clear();
            }
            settled.insert(settled_key(&live), written.resource_version().unwrap_or_default());
        }
        Ok(true)
    }

    fn is_settled<K: Kind>(&self, live: &K, body: &Value, hash: &str) -> Result<bool, Failure> {
        if live.annotations().get(APPLIED).map(String::as_str) != Some(hash) {
            return Ok(false);
        }
        let now = serde_json::to_value(live).map_err(|error| Failure::Invalid(error.to_string()))?;
        if contains(&now, body) {
            return Ok(true);
        }
        Ok(self.settled.lock().get(&settled_key(live)) == live.resource_version().as_ref())
    }
}

fn settled_key<K: Kind>(object: &K) -> String {
    object.uid().unwrap_or_default()
}

/// The body of an apply, and the hash that it carries.
fn body<K: Kind>(owner: &Owner, desired: &K) -> Result<(Value, String), Failure> {
    let mut body = serde_json::to_value(desired).map_err(|error| Failure::Invalid(error.to_string()))?;
    let metadata = &mut body["metadata"];
    metadata["namespace"] = owner.namespace.clone().into();
    metadata["ownerReferences"] = serde_json::json!([owner.reference]);
    metadata["labels"][MANAGED_BY] = MANAGER.into();
    metadata["labels"][OWNER] = owner.label().into();
    prune(&mut body);
    let hash = digest(body.to_string().as_bytes());
    body["metadata"]["annotations"][APPLIED] = hash.clone().into();
    Ok((body, hash))
}

/// Nulls and empty things are not said: an applied empty list would differ from none.
fn prune(value: &mut Value) {
    match value {
        Value::Object(map) => {
            map.values_mut().for_each(prune);
            map.retain(|key, value| !value.is_null() && (key == "emptyDir" || !is_empty(value)));
        }
        Value::Array(list) => list.iter_mut().for_each(prune),
        _ => {}
    }
}

fn is_empty(value: &Value) -> bool {
    value.as_object().is_some_and(serde_json::Map::is_empty) || value.as_array().is_some_and(Vec::is_empty)
}

/// Whether all that `said` says is so in `now`; others may have added to it.
pub fn contains(now: &Value, said: &Value) -> bool {
    match (now, said) {
        (Value::Object(now), Value::Object(said)) => said.iter().all(|(key, said)| match now.get(key) {
            Some(now) => contains(now, said),
            None => is_empty(said) || said.is_null(),
        }),
        // Lists with names in them may have been added to; others must be the same.
        (Value::Array(now), Value::Array(said)) if said.iter().all(|item| key_of(item).is_some()) => {
            said.iter().all(|said| {
                let found = now.iter().find(|now| key_of(now) == key_of(said));
                found.is_some_and(|now| contains(now, said))
            })
        }
        (Value::Array(now), Value::Array(said)) => {
            now.len() == said.len() && now.iter().zip(said).all(|(now, said)| contains(now, said))
        }
        (now, said) => now == said,
    }
}

fn key_of(item: &Value) -> Option<&Value> {
    ["name", "uid", "mountPath"].iter().find_map(|key| item.get(key))
}

/// An object from what is said of it in JSON.
pub fn typed<K: serde::de::DeserializeOwned>(value: Value) -> Result<K, Failure> {
    serde_json::from_value(value).map_err(|error| Failure::Invalid(error.to_string()))
}

/// First 16 hexadecimal digits of the SHA-256.
pub fn digest(bytes: &[u8]) -> String {
    let digest = ring::digest::digest(&ring::digest::SHA256, bytes);
    digest.as_ref().iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}

const SETTLED_MAX: usize = 4096;

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn owner() -> Owner {
        let reference = OwnerReference {
            api_version: "sealane.io/v1alpha1".to_owned(),
            kind: "BrokerCluster".to_owned(),
            name: "east".to_owned(),
            uid: "1".to_owned(),
            controller: Some(true),
            block_owner_deletion: Some(true),
        };
        Owner { reference, namespace: "n".to_owned() }
    }

    #[test]
    fn what_others_added_is_no_difference_and_what_they_changed_is() {
        let said =
            json!({"spec": {"replicas": 2, "containers": [{"name": "a", "image": "x"}], "args": ["1", "2"]}});
        let mut now = said.clone();
        now["spec"]["paused"] = true.into();
        now["spec"]["containers"] = json!([{"name": "other"}, {"name": "a", "image": "x", "tty": false}]);
        assert!(contains(&now, &said));
        now["spec"]["replicas"] = 3.into();
        assert!(!contains(&now, &said));
        now["spec"]["replicas"] = 2.into();
        now["spec"]["args"] = json!(["1", "2", "3"]);
        assert!(!contains(&now, &said));
    }

    #[test]
    fn only_what_this_owner_made_is_its_own() {
        let mut meta = ObjectMeta::default();
        assert!(matches!(owner().claim(&meta), Claim::Foreign(_)));
        meta.labels = Some([(MANAGED_BY.to_owned(), MANAGER.to_owned())].into());
        assert!(matches!(owner().claim(&meta), Claim::Foreign(_)), "made for somebody else");
        let labels = [(MANAGED_BY.to_owned(), MANAGER.to_owned()), (OWNER.to_owned(), owner().label())];
        meta.labels = Some(labels.into());
        assert_eq!(owner().claim(&meta), Claim::Orphan);
        meta.owner_references = Some(vec![owner().reference]);
        assert_eq!(owner().claim(&meta), Claim::Ours);
        let other = OwnerReference { uid: "2".to_owned(), ..owner().reference };
        meta.owner_references = Some(vec![other]);
        assert!(matches!(owner().claim(&meta), Claim::Foreign(_)), "labels do not outweigh an owner");
    }

    #[test]
    fn nothing_empty_is_said() {
        let mut value = json!({"a": {}, "b": [], "c": null, "d": {"e": [{"f": null}]}, "emptyDir": {}});
        prune(&mut value);
        assert_eq!(value, json!({"d": {"e": [{}]}, "emptyDir": {}}));
    }
}
