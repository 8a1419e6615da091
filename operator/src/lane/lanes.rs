//! Lane: made at the control service, told of in the status, deleted with the object or when its time is over.
//! What is told is what the control service says; nothing is said of a lane that nobody answered for.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use control::v1;
use control::v1::lane_group_partition::State;
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use jiff::{SignedDuration, Timestamp};
use kube::ResourceExt as _;
use kube::api::ListParams;
use kube::runtime::events::EventType;
use tonic::Code;

use super::outside;
use crate::conditions::{Verdict, after};
use crate::context::{Context, is_paused};
use crate::controller::{Again, Reconciled};
use crate::crd::{Lane, LaneClass, LaneStatus};
use crate::failure::Failure;
use crate::region::Region;

pub fn reconcile(cx: Arc<Context>, lane: Arc<Lane>) -> BoxFuture<'static, Reconciled> {
    async move {
        if is_paused(&*lane) {
            return Ok(Again(LOOK));
        }
        if lane.metadata.deletion_timestamp.is_some() {
            return end(&cx, &lane).await;
        }
        if is_over(&lane, Timestamp::now()) {
            cx.event(&*lane, EventType::Normal, "TimeOver", "Delete", "spec.ttlSeconds are over".to_owned())
                .await;
            cx.delete(&*lane).await?;
            return Ok(Again::soon());
        }
        cx.finalizer(&*lane, FINALIZER, true).await?;
        let mut status = lane.status.clone().unwrap_or_default();
        let verdicts = match bring(&cx, &lane, &mut status).await {
            Ok(verdicts) => verdicts,
            Err(Failure::DataPlane(text)) => vec![Verdict::no("Ready", "ClusterNotReady", text)],
            Err(other) => return Err(other),
        };
        status.observed_generation = lane.metadata.generation;
        status.conditions = after(&status.conditions, &verdicts, lane.metadata.generation);
        cx.status(&*lane, lane.status.as_ref(), &status).await?;
        Ok(Again(LOOK))
    }
    .boxed()
}

async fn bring(cx: &Context, lane: &Lane, status: &mut LaneStatus) -> Result<Vec<Verdict>, Failure> {
    let refused = |reason, text: String| {
        Ok(vec![Verdict::no("Accepted", reason, text.clone()), Verdict::no("Ready", reason, text)])
    };
    let namespace = lane.namespace().unwrap_or_default();
    let Some(region) = Region::find(cx, &namespace, &lane.spec.cluster_ref.name).await? else {
        return refused(
            "ClusterNotFound",
            format!("there is no BrokerCluster {}", lane.spec.cluster_ref.name),
        );
    };
    if let Some(other) = earlier(cx, lane).await? {
        return refused("Conflict", format!("Lane {other} has spec.name {} already", lane.spec.name));
    }
    let mut control = region.control(cx).await?;
    let told = match ask(&mut control, lane).await {
        Ok(told) => told,
        Err(error) if matches!(error.code(), Code::Unavailable | Code::DeadlineExceeded) => {
            return Err(Failure::DataPlane(format!("control service: {}", error.message())));
        }
        // What the region says of the name, or of ports that are used up.
        Err(error) => return refused("Refused", error.message().to_owned()),
    };
    let port = told.lane.as_ref().map_or(0, |told| told.port);
    status.outside = outside::of_lane(cx, &region, lane, port).await?;
    Ok(judge(&told, status))
}

/// The lane's state; the lane is made where it is not there.
async fn ask(control: &mut control::Client, lane: &Lane) -> Result<v1::LaneStatusResponse, tonic::Status> {
    let name = lane.spec.name.clone();
    let grace_seconds = lane.spec.grace_seconds.map_or(0, |seconds| seconds.max(0).unsigned_abs());
    let principals = lane.spec.principals.clone();
    let status = v1::LaneStatusRequest { name: name.clone() };
    match control.lane_status(status.clone()).await {
        Err(error) if error.code() == Code::NotFound => {}
        Err(error) => return Err(error),
        Ok(told) => {
            let told = told.into_inner();
            let is_so = told
                .lane
                .as_ref()
                .is_some_and(|told| told.grace_seconds == grace_seconds && told.principals == principals);
            if !is_so {
                let principals = Some(v1::PrincipalList { names: principals });
                let change = v1::SetLaneRequest { name, grace_seconds: Some(grace_seconds), principals };
                control.set_lane(change).await?;
            }
            return Ok(told);
        }
    }
    let class = match lane.spec.class {
        LaneClass::BOE => v1::LaneClass::Boe,
        LaneClass::PPE => v1::LaneClass::Ppe,
    };
    match control
        .create_lane(v1::CreateLaneRequest { name, class: class.into(), grace_seconds, principals })
        .await
    {
        Err(error) if error.code() != Code::AlreadyExists => return Err(error),
        _ => {}
    }
    control.lane_status(status).await.map(tonic::Response::into_inner)
}

/// What the control service says, in the words of the status.
fn judge(told: &v1::LaneStatusResponse, status: &mut LaneStatus) -> Vec<Verdict> {
    let address = told.lane.as_ref().map(|lane| lane.address.clone());
    status.address = address.filter(|address| !address.is_empty());
    let mut groups: BTreeMap<&str, (u32, u32)> = BTreeMap::new();
    for place in &told.groups {
        let counts = groups.entry(&place.group).or_default();
        match place.state() {
            State::Active => counts.0 += 1,
            State::Grace => counts.1 += 1,
            State::Closed => {}
        }
    }
    let (active, grace) = groups.values().fold((0, 0), |sum, counts| (sum.0 + counts.0, sum.1 + counts.1));
    status.groups = groups
        .iter()
        .map(|(group, (active, grace))| format!("{group}: {active} partitions active, {grace} in grace"))
        .collect();
    status.last_cuts = cuts(&told.groups);
    let waiting = told.groups.iter().map(|place| u64::try_from(place.waiting_records).ok());
    let waiting: Option<u64> = waiting.sum();
    status.held_records = waiting.and_then(|records| i64::try_from(records).ok());
    let phase = match (active, grace) {
        (0, 0) => "Idle",
        (0, _) => "Grace",
        _ => "Active",
    };
    status.phase = Some(phase.to_owned());
    let accepted = match told.lane_routers {
        0 => {
            Verdict::no("Accepted", "NoRouter", "no lane-router serves the lane yet: is there a LaneRouter?")
        }
        routers => Verdict::yes("Accepted", "Served", format!("by {routers} lane-routers")),
    };
    let ready = match active {
        0 => Verdict::no("Ready", "NoMembers", "no consumer of the lane has a partition yet"),
        active => Verdict::yes("Ready", "Active", format!("{active} partitions are read in the lane")),
    };
    vec![accepted, ready]
}

/// In words, in an order that stays as long as they do.
fn cuts(places: &[v1::LaneGroupPartition]) -> Vec<String> {
    let mut cuts: Vec<_> = places
        .iter()
        .map(|place| {
            (&place.group, &place.topic, place.partition, place.activated_offset, place.deactivated_offset)
        })
        .collect();
    cuts.sort_unstable();
    let shown = cuts.into_iter().take(CUTS_MAX).map(|(group, topic, partition, from, to)| match to {
        ..0 => format!("{group}: {topic}-{partition} from offset {from}"),
        to => format!("{group}: {topic}-{partition} from offset {from} to {to}"),
    });
    shown.collect()
}

/// Deletes the lane, and then lets the object go.
async fn end(cx: &Context, lane: &Lane) -> Reconciled {
    let namespace = lane.namespace().unwrap_or_default();
    let region = Region::find_now(cx, &namespace, &lane.spec.cluster_ref.name).await?;
    // A cluster that is gone, or going, has no lane; and one that another object speaks for stays.
    if let Some(region) = region
        && lane.finalizers().iter().any(|finalizer| finalizer == FINALIZER)
        && earlier(cx, lane).await?.is_none()
    {
        let mut control = region.control(cx).await?;
        let deleted = control.delete_lane(v1::DeleteLaneRequest { name: lane.spec.name.clone() }).await;
        match deleted {
            Err(error) if error.code() != Code::NotFound => {
                return Err(Failure::DataPlane(format!("lane {}: {}", lane.spec.name, error.message())));
            }
            _ => {}
        }
    }
    cx.finalizer(lane, FINALIZER, false).await?;
    Ok(Again(LOOK))
}

/// Another object that had this lane of this cluster first.
async fn earlier(cx: &Context, lane: &Lane) -> Result<Option<String>, Failure> {
    let namespace = lane.namespace().unwrap_or_default();
    let all = cx.api::<Lane>(&namespace).list(&ListParams::default()).await?;
    let age = |lane: &Lane| (lane.creation_timestamp().map(|time| time.0), lane.name_any());
    let same = all.items.iter().filter(|other| {
        other.name_any() != lane.name_any()
            && other.metadata.deletion_timestamp.is_none()
            && other.spec.name == lane.spec.name
            && other.spec.cluster_ref == lane.spec.cluster_ref
    });
    Ok(same.filter(|other| age(other) < age(lane)).map(|other| other.name_any()).next())
}

fn is_over(lane: &Lane, now: Timestamp) -> bool {
    let (Some(seconds), Some(made)) = (lane.spec.ttl_seconds, lane.creation_timestamp()) else {
        return false;
    };
    now >= made.0 + SignedDuration::from_secs(seconds)
}

const FINALIZER: &str = "sealane.io/lane";
const LOOK: Duration = Duration::from_secs(5);
const CUTS_MAX: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conditions::Status;

    fn place(group: &str, state: State, waiting: i64) -> v1::LaneGroupPartition {
        v1::LaneGroupPartition {
            group: group.to_owned(),
            state: state.into(),
            waiting_records: waiting,
            ..v1::LaneGroupPartition::default()
        }
    }

    fn judged(groups: Vec<v1::LaneGroupPartition>, lane_routers: u32) -> (LaneStatus, Vec<Verdict>) {
        let told = v1::LaneStatusResponse { groups, lane_routers, ..v1::LaneStatusResponse::default() };
        let mut status = LaneStatus::default();
        let verdicts = judge(&told, &mut status);
        (status, verdicts)
    }

    #[test]
    fn a_lane_is_ready_when_members_have_partitions_and_not_before() {
        let (status, verdicts) = judged(Vec::new(), 0);
        assert_eq!(status.phase.as_deref(), Some("Idle"));
        assert_eq!((verdicts[0].reason, verdicts[1].reason), ("NoRouter", "NoMembers"));
        let (status, verdicts) = judged(vec![place("shop", State::Grace, 3)], 1);
        assert_eq!((status.phase.as_deref(), status.held_records), (Some("Grace"), Some(3)));
        assert_eq!((verdicts[0].status, verdicts[1].status), (Status::True, Status::False));
        let places = vec![
            place("shop", State::Active, 2),
            place("shop", State::Active, 1),
            place("x", State::Closed, 0),
        ];
        let (status, verdicts) = judged(places, 2);
        assert_eq!((status.phase.as_deref(), status.held_records), (Some("Active"), Some(3)));
        assert_eq!(verdicts[1].status, Status::True);
        assert_eq!(status.groups[0], "shop: 2 partitions active, 0 in grace");
        let cut = |partition, from, to| v1::LaneGroupPartition {
            topic: "orders".to_owned(),
            partition,
            activated_offset: from,
            deactivated_offset: to,
            ..place("shop", State::Active, 0)
        };
        let (status, _) = judged(vec![cut(1, 7, 9), cut(0, 5, -1)], 1);
        assert_eq!(status.last_cuts, ["shop: orders-0 from offset 5", "shop: orders-1 from offset 7 to 9"]);
        // Not known is not zero.
        assert_eq!(judged(vec![place("shop", State::Active, -1)], 1).0.held_records, None);
    }
}
