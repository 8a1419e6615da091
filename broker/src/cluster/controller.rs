//! The controller: one broker, elected through a lease, that says who owns what.
//!
//! It plans with [`broker_core::placement`] and writes assignments; it moves no data and talks to no
//! broker. Every write is guarded by its own lease, so a controller that was replaced without noticing
//! changes nothing.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use broker_core::placement::{self, Brokers, Place, Step};
use broker_store::{Change, MetaError, MetaStore, Remote, Version};
use kafka::TopicId;
use tokio_util::sync::CancellationToken;

use super::janitor::{Janitor, remove_objects};
use super::objects::{AssignmentObject, CONTROLLER, PartitionObject, assignment_key};
use super::view::{View, Views};
use crate::config::Role;
use crate::coordinator::OFFSETS_TOPIC;
use crate::topics::TopicRegistry;

/// How long an answer of the metadata store may fail before the office is tried for again.
const RETRY: Duration = Duration::from_millis(200);
/// Looks again even when nothing was heard, for what failed.
const LOOK_AGAIN: Duration = Duration::from_secs(2);

/// What a controller needs.
pub struct Controller {
    pub me: i32,
    pub meta: Arc<dyn MetaStore>,
    pub views: Arc<Views>,
    pub topics: Arc<TopicRegistry>,
    pub remote: Arc<dyn Remote>,
    /// How long a controller that died keeps the office.
    pub lease: Duration,
    /// Between two looks for what nobody needs any more.
    pub sweep_every: Duration,
}

impl Controller {
    /// Stands for election, serves, and stands again, until `stop`.
    pub async fn run(self, stop: CancellationToken) {
        while !stop.is_cancelled() {
            let term = stop.run_until_cancelled(self.term()).await;
            if let Some(Err(error)) = term {
                tracing::warn!(%error, "this broker is not the controller; it stands again");
                let _ = stop.run_until_cancelled(tokio::time::sleep(RETRY)).await;
            }
        }
    }

    /// Waits for the office and holds it until the lease is lost.
    async fn term(&self) -> Result<(), MetaError> {
        let lease = self.meta.lease(self.lease).await?;
        let office = loop {
            let mut watch = self.meta.watch(CONTROLLER).await?;
            match self.meta.put_leased(CONTROLLER, self.me.to_string().into_bytes(), None, &lease).await {
                Ok(version) => break version,
                Err(MetaError::Conflict { .. }) => {}
                Err(error) => return Err(error),
            }
            loop {
                let change = tokio::select! {
                    change = watch.next() => change,
                    () = lease.lost() => return Err(MetaError::GuardGone),
                };
                match change {
                    Some(Change::Put(_)) => {}
                    Some(Change::Deleted { .. } | Change::Resync) => break,
                    None => return Err(MetaError::Unavailable("the metadata store is closed".to_owned())),
                }
            }
        };
        tracing::info!(broker = self.me, "this broker is the controller");
        let janitor = Janitor::new(self.meta.clone(), self.remote.clone(), self.topics.clone());
        tokio::select! {
            ended = self.decide(office) => ended,
            () = lease.lost() => Err(MetaError::GuardGone),
            never = janitor.run(self.sweep_every) => match never {},
        }
    }

    /// Writes what should change, until the office is gone.
    async fn decide(&self, office: Version) -> Result<(), MetaError> {
        let mut views = self.views.changes();
        let mut topics = self.topics.changes();
        loop {
            if let Err(error) = self.look(office).await {
                match error {
                    MetaError::GuardGone => return Err(error),
                    error => tracing::debug!(%error, "an assignment was not written; it is planned again"),
                }
            }
            tokio::select! {
                _ = views.changed() => {}
                _ = topics.changed() => {}
                () = tokio::time::sleep(LOOK_AGAIN) => {}
            }
        }
    }

    /// Writes what should change. A conflict means that an owner wrote in between: the next look sees it.
    async fn look(&self, office: Version) -> Result<(), MetaError> {
        let view = self.views.now();
        if view.controller != Some(self.me) {
            // What is known may be older than the term.
            return Ok(());
        }
        for (topic, object, expected) in self.changes(&view) {
            let key = assignment_key(topic);
            let value = serde_json::to_vec(&object).map_err(|error| MetaError::Corrupt(error.to_string()))?;
            match self.meta.put_guarded(&key, value, expected, (CONTROLLER, office)).await {
                Ok(_) => tracing::debug!(topic = object.topic, "what changes of a topic's owners is written"),
                Err(MetaError::Conflict { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        for (topic, assigned) in &view.assignments {
            // What is in memory may lag behind, and without its assignment a topic has lost its data.
            if self.topics.by_id(*topic).is_some()
                || self.topics.is_stored(&assigned.object.topic, *topic).await?
            {
                continue;
            }
            match self.meta.delete_if(&assignment_key(*topic), assigned.version).await {
                Ok(()) => {
                    if let Err(error) = remove_objects(&self.remote, &self.topics, *topic).await {
                        tracing::warn!(topic_id = %topic.0, %error, "objects of a deleted topic are removed later");
                    }
                }
                Err(MetaError::Conflict { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// The assignments that differ from what is there.
    fn changes(&self, view: &View) -> Vec<(TopicId, AssignmentObject, Option<Version>)> {
        let mut wanted: BTreeMap<TopicId, (AssignmentObject, Option<Version>)> = BTreeMap::new();
        for topic in self.topics.all() {
            let known = view.assignments.get(&topic.id);
            let mut object = known.map(|known| known.object.clone()).unwrap_or_default();
            object.topic = topic.name.to_string();
            let count = object.partitions.len().max(topic.partitions.max(0) as usize);
            object.partitions.resize_with(count, PartitionObject::new);
            wanted.insert(topic.id, (object, known.map(|known| known.version)));
        }
        let groups = self.topics.by_name(OFFSETS_TOPIC);
        let mut places = Vec::new();
        for (topic, (object, _)) in &wanted {
            for (index, partition) in object.partitions.iter().enumerate() {
                places.push(Place {
                    partition: (*topic, index),
                    owner: partition.owner,
                    moving_to: partition.moving_to,
                    rate: view.rates.get(&(*topic, index as i32)).copied().unwrap_or(0),
                });
            }
        }
        log_loads(&places);
        let is_group = |topic: &TopicId| groups.as_ref().is_some_and(|groups| groups.id == *topic);
        let (of_groups, of_topics): (Vec<_>, Vec<_>) =
            places.into_iter().partition(|place: &Place<(TopicId, usize)>| is_group(&place.partition.0));
        let mut steps = placement::plan(&of_topics, &with_role(view, Role::Broker));
        steps.extend(placement::plan(&of_groups, &with_role(view, Role::Coordinator)));
        steps.extend(restarted(view, &wanted));
        for step in steps {
            let (Step::Assign { partition, .. } | Step::Move { partition, .. } | Step::Stay { partition }) =
                step;
            let Some((object, _)) = wanted.get_mut(&partition.0) else { continue };
            take(&mut object.partitions[partition.1], step);
        }
        let differs = |(topic, (object, version)): (TopicId, (AssignmentObject, Option<Version>))| {
            let same = view.assignments.get(&topic).is_some_and(|known| known.object == object);
            (!same).then_some((topic, object, version))
        };
        wanted.into_iter().filter_map(differs).collect()
    }
}

/// What the plan is made from, for whoever asks why a partition moves.
fn log_loads(places: &[Place<(TopicId, usize)>]) {
    if tracing::enabled!(tracing::Level::DEBUG) {
        let mut held: BTreeMap<Option<i32>, (u32, u64)> = BTreeMap::new();
        for place in places {
            let (count, rate) = held.entry(place.moving_to.or(place.owner)).or_default();
            (*count, *rate) = (*count + 1, rate.saturating_add(place.rate));
        }
        tracing::debug!(?held, "partitions and bytes a second of each broker");
    }
}

/// Who is alive and does this.
fn with_role(view: &View, role: Role) -> Brokers {
    let alive = view.brokers.iter().filter(|(_, broker)| broker.roles.contains(&role));
    Brokers { alive: alive.map(|(id, _)| *id).collect(), draining: view.draining.clone() }
}

/// Partitions whose owner lives, but another life than the one that served them: they stay with it,
/// under a new epoch, and it reads the log of its former life.
fn restarted(
    view: &View,
    wanted: &BTreeMap<TopicId, (AssignmentObject, Option<Version>)>,
) -> Vec<Step<(TopicId, usize)>> {
    let mut steps = Vec::new();
    for (topic, (object, _)) in wanted {
        for (index, partition) in object.partitions.iter().enumerate() {
            let Some(broker) = partition.owner.and_then(|owner| Some((owner, view.brokers.get(&owner)?)))
            else {
                continue;
            };
            let now = format!("{}-{}", broker.0, broker.1.life);
            if partition.taken && partition.lives.first() != Some(&now) {
                steps.push(Step::Assign { partition: (*topic, index), to: broker.0 });
            }
        }
    }
    steps
}

fn take(partition: &mut PartitionObject, step: Step<(TopicId, usize)>) {
    match step {
        Step::Assign { to, .. } => {
            partition.owner = Some(to);
            partition.epoch += 1;
            partition.moving_to = None;
            partition.taken = false;
        }
        Step::Move { to, .. } => partition.moving_to = Some(to),
        Step::Stay { .. } => partition.moving_to = None,
    }
}
