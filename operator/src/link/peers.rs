//! The Secret of a joined peer, which a LinkGrant or a MirrorLink owns: who it is, and by which authorities its mirrors are
//! known. It holds no key of the peer, and nothing of its Kubernetes.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Secret;
use kube::ResourceExt as _;
use kube::api::{ListParams, ObjectMeta};

use crate::context::Context;
use crate::failure::Failure;
use crate::names::{CLUSTER, COMPONENT, PART_OF};

/// Label selector of all such Secrets.
pub const LABELS: &str = "app.kubernetes.io/component=peer";

/// A region that joined this one, or that this one joined.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Peer {
    pub region: String,
    /// PEM of the authorities of its mirrors.
    pub authorities: String,
    /// UDP HOST:PORT of its mirrors; none where it dials.
    pub endpoint: Option<String>,
    /// By what it is known that the same side asks again: the mark of its authorities (grant), or of the token (link).
    pub by: String,
    /// [`mark`](super::token::mark) of the authorities of this region that the peer has said it knows.
    pub knows: String,
}

impl Peer {
    /// The Secret `name` of `cluster`; whoever writes it adds its owner.
    pub fn secret(&self, name: &str, cluster: &str) -> Secret {
        let mut data: BTreeMap<String, String> = [
            ("region", &self.region),
            ("ca.crt", &self.authorities),
            ("by", &self.by),
            ("knows", &self.knows),
        ]
        .map(|(key, value)| (key.to_owned(), value.clone()))
        .into();
        data.extend(self.endpoint.clone().map(|endpoint| ("endpoint".to_owned(), endpoint)));
        let labels = [(CLUSTER, cluster), (COMPONENT, "peer"), (PART_OF, "sealane")];
        let labels = labels.map(|(key, value)| (key.to_owned(), value.to_owned()));
        Secret {
            metadata: ObjectMeta {
                name: Some(name.to_owned()),
                labels: Some(labels.into()),
                ..ObjectMeta::default()
            },
            data: Some(
                data.into_iter()
                    .map(|(key, value)| (key, k8s_openapi::ByteString(value.into_bytes())))
                    .collect(),
            ),
            ..Secret::default()
        }
    }

    pub fn of(secret: &Secret) -> Option<Peer> {
        let text = |key: &str| String::from_utf8(secret.data.as_ref()?.get(key)?.0.clone()).ok();
        Some(Peer {
            region: text("region")?,
            authorities: text("ca.crt")?,
            endpoint: text("endpoint"),
            by: text("by")?,
            knows: text("knows").unwrap_or_default(),
        })
    }

    /// From the Secret of this name.
    pub async fn find(cx: &Context, namespace: &str, secret: &str) -> Result<Option<Peer>, Failure> {
        let secret = cx.api::<Secret>(namespace).get_opt(secret).await?;
        Ok(secret.as_ref().and_then(Peer::of))
    }

    /// Everybody who has joined this cluster or was joined by it, by name of the Secret.
    pub async fn all(cx: &Context, namespace: &str, cluster: &str) -> Result<Vec<Peer>, Failure> {
        let labels = ListParams::default().labels(&format!("{LABELS},{CLUSTER}={cluster}"));
        let mut secrets = cx.api::<Secret>(namespace).list(&labels).await?.items;
        secrets.sort_by_key(|secret| secret.name_any());
        Ok(secrets
            .iter()
            .filter(|secret| secret.metadata.deletion_timestamp.is_none())
            .filter_map(Peer::of)
            .collect())
    }
}

/// Names of the Secrets of a LinkGrant and of a MirrorLink: both objects may have one name.
pub fn of_grant(name: &str) -> String {
    format!("{name}-grant-peer")
}

pub fn of_link(name: &str) -> String {
    format!("{name}-link-peer")
}
