//! Links between regions: LinkGrant (the accepting side), MirrorLink (what crosses), and the mirror pods of a cluster.
//!
//! Who may join is decided by `token` (pure) and carried out by `redeem`; that a token was taken is that the Secret
//! GRANT-peer exists, which can be created once only. A joined peer is a Secret on both sides, with the authorities that its
//! mirrors' certificates are signed by; `mirrors` makes the configuration of the pods from these and from the MirrorLinks.

mod address;
mod grant;
mod mirror;
mod mirrors;
mod peers;
mod redeem;
mod said;
pub mod token;
pub mod vouching;

use std::sync::Arc;

use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::Secret;
use kube::ResourceExt as _;
use kube::runtime::reflector::ObjectRef;
use tokio::net::TcpListener;
use tokio::sync::mpsc;

use crate::context::Context;
use crate::controller::{Wakes, primary, run, secondary};
use crate::crd::{BrokerCluster, LinkGrant, MirrorLink};
use crate::names::{CLUSTER, COMPONENT};
pub use peers::Peer;
pub use token::mark;

/// Starts the controllers of links, and the place where tokens are redeemed.
pub fn start(cx: &Arc<Context>) {
    let grants = primary::<LinkGrant>(cx);
    let wakes: Vec<Wakes<LinkGrant>> = vec![secondary::<Secret, LinkGrant>(
        cx,
        "peers of grants",
        Some(peers::LABELS.to_owned()),
        owned("LinkGrant"),
    )];
    let context = cx.clone();
    cx.service.spawn_child(run(context, "grants", grants, wakes, grant::reconcile));

    let links = primary::<MirrorLink>(cx);
    let wakes: Vec<Wakes<MirrorLink>> = vec![secondary::<Secret, MirrorLink>(
        cx,
        "peers of links",
        Some(peers::LABELS.to_owned()),
        owned("MirrorLink"),
    )];
    let context = cx.clone();
    cx.service.spawn_child(run(context, "links", links, wakes, mirror::reconcile));

    let clusters = primary::<BrokerCluster>(cx);
    let component = format!("{COMPONENT}=mirror");
    let wakes: Vec<Wakes<BrokerCluster>> = vec![
        secondary::<Secret, BrokerCluster>(
            cx,
            "peers of mirrors",
            Some(peers::LABELS.to_owned()),
            of_cluster,
        ),
        secondary::<Deployment, BrokerCluster>(cx, "mirrors", Some(component), of_cluster),
        secondary::<MirrorLink, BrokerCluster>(cx, "links of mirrors", None, |link| {
            let namespace = link.namespace().unwrap_or_default();
            vec![ObjectRef::new(&link.spec.cluster_ref.name).within(&namespace)]
        }),
    ];
    let context = cx.clone();
    cx.service.spawn_child(run(context, "mirrors", clusters, wakes, mirrors::reconcile));

    let (asked, questions) = mpsc::channel(QUESTIONS_MAX);
    cx.service.spawn_child(redeem::answer(cx.clone(), questions));
    let (cx, stop) = (cx.clone(), cx.service.stopping().clone());
    let service = cx.service.clone();
    service.spawn("join", async move {
        if cx.config.join_bind.is_empty() {
            stop.cancelled().await;
            return Ok(());
        }
        let listener = TcpListener::bind(&cx.config.join_bind).await?;
        crate::join::serve(listener, cx.doors.clone(), asked, stop).await;
        Ok::<(), std::io::Error>(())
    });
}

/// The BrokerCluster that an object's label names.
fn of_cluster<K: kube::Resource>(object: &K) -> Vec<ObjectRef<BrokerCluster>> {
    let namespace = object.namespace().unwrap_or_default();
    let name = object.labels().get(CLUSTER);
    name.map(|name| ObjectRef::new(name).within(&namespace)).into_iter().collect()
}

/// The owner of this kind that a Secret has.
fn owned<K: kube::Resource<DynamicType = ()>>(kind: &'static str) -> impl Fn(&Secret) -> Vec<ObjectRef<K>> {
    move |secret| {
        let namespace = secret.namespace().unwrap_or_default();
        let owners = secret.owner_references().iter().filter(|owner| owner.kind == kind);
        owners.map(|owner| ObjectRef::new(&owner.name).within(&namespace)).collect()
    }
}

const QUESTIONS_MAX: usize = 64;
