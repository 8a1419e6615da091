//! Lanes of a region, and the lane-routers that are the way into them.
//!
//! A Lane is a lane of the control service, made and deleted with the object; what it reports becomes the status. A LaneRouter
//! is a Deployment of routers behind one headless Service: each lane has a port of its own there, so none needs to be declared.
//! One that leaves the cluster has a Service which declares them all (`outside`).

mod lanes;
pub mod outside;
mod routers;

use std::sync::Arc;

use k8s_openapi::api::apps::v1::Deployment;
use kube::ResourceExt as _;
use kube::runtime::reflector::ObjectRef;

use crate::context::Context;
use crate::controller::{Wakes, primary, run, secondary};
use crate::crd::{Lane, LaneRouter};
use crate::names::{COMPONENT, OUTSIDE_ROUTER};

/// Starts the controllers of lanes and of lane-routers.
pub fn start(cx: &Arc<Context>) {
    let lanes = primary::<Lane>(cx);
    cx.service.spawn_child(run(cx.clone(), "lanes", lanes, Vec::new(), lanes::reconcile));

    let routers = primary::<LaneRouter>(cx);
    let component = format!("{COMPONENT} in (lane-router,{OUTSIDE_ROUTER})");
    let known = routers.store.clone();
    let wakes: Vec<Wakes<LaneRouter>> = vec![
        // A lane more is a port more for those that leave the cluster.
        secondary::<Lane, LaneRouter>(cx, "lanes of routers", None, move |lane| {
            let of_it = known.state().into_iter().filter(|router| {
                router.namespace() == lane.namespace() && router.spec.cluster_ref == lane.spec.cluster_ref
            });
            of_it
                .filter(|router| outside::is_outside(router))
                .map(|router| ObjectRef::from_obj(&*router))
                .collect()
        }),
        secondary::<Deployment, LaneRouter>(cx, "lane-router pods", Some(component), |deployment| {
            let namespace = deployment.namespace().unwrap_or_default();
            let owners = deployment.owner_references().iter().filter(|owner| owner.kind == "LaneRouter");
            owners.map(|owner| ObjectRef::new(&owner.name).within(&namespace)).collect()
        }),
    ];
    cx.service.spawn_child(run(cx.clone(), "routers", routers, wakes, routers::reconcile));
}
