//! Lanes in the broker: judging what is produced, knowing who reads, showing each reader its records.
//!
//! The rules are pure and live in `lane-core`; the log decides who owns a record. This module keeps what
//! is not in the log: which lanes exist, which connection reads for which group, and the cuts under way.
//! In a cluster the coordinator of a group and the owner of a partition are different brokers: `publish`
//! tells all of them who reads what, `cuts` asks the owner.

mod cache;
pub mod classify;
mod cuts;
mod markers;
mod observer;
mod publish;
mod round;
pub mod show;
mod status;
mod switch;
mod told;
mod views;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use kafka::{GroupId, PartitionIndex, TopicName};
use lane_core::name::forwarded_lane;
use lane_core::{Lane, View};
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::api::ConnectionInfo;
use crate::coordinator::ShardId;
use crate::partition::Partition;
use crate::peers::Peers;
use crate::switches;
use cache::Rebuilt;
use cuts::Cuts;
use publish::Publisher;
use views::{Found, Reader, Views};

pub use cuts::Place;
pub use show::{Part, Reading, Scan, Shown, VisibleRecords};
pub use status::EndError;
pub use switch::{SwitchError, switch_lanes, switch_one};
pub use told::{ToldGroup, ToldMember};
pub use views::{Alike, Member, Telling, Untold};

/// The partitions of this broker.
#[derive(Clone)]
pub struct Owned {
    pub find: Arc<dyn Fn(&TopicName, PartitionIndex) -> Option<Arc<Partition>> + Send + Sync>,
    pub all: Arc<dyn Fn() -> Vec<Arc<Partition>> + Send + Sync>,
}

/// What lanes are made of.
pub struct LaneParts {
    pub owned: Owned,
    /// Whether a lane exists and is not being deleted.
    pub exists: Arc<dyn Fn(&Lane) -> bool + Send + Sync>,
    /// The other brokers; none for one that is alone.
    pub peers: Option<Arc<Peers>>,
    /// From a member's silence to the hand-over to the baseline.
    pub grace: Duration,
}

/// Everything about lanes that is not in a log. One per broker.
pub struct Lanes {
    owned: Owned,
    exists: Arc<dyn Fn(&Lane) -> bool + Send + Sync>,
    views: Views,
    together: Option<Together>,
    rebuilt: Rebuilt,
    cuts: Arc<Cuts>,
    /// Groups that lost a member without its saying so, since their last assignment.
    unclean: Mutex<HashSet<GroupId>>,
}

/// What lanes need in a cluster.
struct Together {
    peers: Arc<Peers>,
    publisher: Arc<Publisher>,
    /// The life that this broker leads.
    life: watch::Sender<Option<u64>>,
    /// In which life each shard here began: what an older one says is of no use.
    begun: Mutex<HashMap<ShardId, u64>>,
}

/// Between two tries to read what a life must have been told.
const REQUIRE_AGAIN: Duration = Duration::from_millis(200);

/// What a group's name means.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Role {
    Baseline,
    Lane { base: GroupId, lane: Lane },
}

impl Lanes {
    pub fn new(parts: LaneParts) -> Arc<Lanes> {
        let together = parts.peers.clone().map(|peers| Together {
            publisher: Publisher::new(peers.clone()),
            peers,
            life: watch::Sender::new(None),
            begun: Mutex::default(),
        });
        Arc::new(Lanes {
            cuts: Cuts::new(parts.owned.clone(), parts.peers, parts.grace),
            owned: parts.owned,
            exists: parts.exists,
            views: Views::default(),
            together,
            rebuilt: Rebuilt::new(cache::REBUILT_BYTES_MAX),
            unclean: Mutex::default(),
        })
    }

    /// Lanes that have a grace of their own, in milliseconds; the others have the broker's.
    pub fn set_graces(&self, graces: BTreeMap<Lane, u64>) {
        self.cuts.set_graces(graces);
    }

    /// Grace timers, the comparison with the logs, and telling other brokers, until `stop`.
    pub async fn run(self: Arc<Self>, stop: CancellationToken) {
        let cuts = self.cuts.clone().run(stop.clone());
        match &self.together {
            None => cuts.await,
            Some(together) => {
                let telling = together.publisher.clone().run(stop.clone());
                let lives = stop.run_until_cancelled(self.follow_lives(together));
                tokio::join!(cuts, telling, lives);
            }
        }
    }

    /// This broker leads another life, and that is on record: whatever it knew of readers may be old.
    pub fn begin_life(&self, life: u64) {
        self.views.begin_life(life);
        if let Some(together) = &self.together {
            together.life.send_replace(Some(life));
        }
    }

    /// What coordinators had before a life was on record must be told in it; what comes later is told to
    /// whoever is alive.
    async fn follow_lives(&self, together: &Together) {
        let mut lives = together.life.subscribe();
        lives.mark_changed();
        while lives.changed().await.is_ok() {
            let life = *lives.borrow_and_update();
            let Some(life) = life else { continue };
            loop {
                match together.peers.shard_epochs().await {
                    Ok(epochs) => {
                        self.views.require(life, epochs);
                        self.wake_all();
                        break;
                    }
                    Err(error) => tracing::debug!(%error, "what groups there are is asked for again"),
                }
                tokio::time::sleep(REQUIRE_AGAIN).await;
            }
        }
    }

    fn wake_all(&self) {
        (self.owned.all)().iter().for_each(|p| p.wake_waiters());
    }

    /// Every group of the log has been taken over: from now on a reader that matches none has none.
    /// Until then fetches on topics with lanes make no progress.
    pub fn views_known(&self) {
        self.views.all_known();
        self.wake_all();
    }

    /// The lane that a connection is in: only the lane-router's client ids name one.
    pub fn lane_of(&self, connection: &ConnectionInfo, client_id: Option<&str>) -> Option<Lane> {
        connection.is_lane_router().then(|| forwarded_lane(client_id?)).flatten()
    }

    /// How a connection reads a partition now. Ask again at every look: the answer changes with the
    /// assignments.
    pub fn reading(
        &self,
        connection: &ConnectionInfo,
        client_id: Option<&str>,
        partition: &Partition,
    ) -> Reading {
        let lane = self.lane_of(connection, client_id);
        if is_plain(partition, lane.is_some()) {
            return Reading::Plain;
        }
        if connection.listener.raw {
            return Reading::View(View::Raw);
        }
        let client_id = client_id.unwrap_or("");
        let host = format!("/{}", connection.peer.ip());
        let reader = Reader { client_id, principal: &connection.principal, host: &host };
        match (self.views.find(reader, &partition.topic, partition.index), lane) {
            (Found::View(view), lane) if view.is_within(lane.as_ref()) => Reading::View(view),
            // A lane that is going: nothing of it is shown outside, nothing from outside in it.
            (Found::View(_), _) => Reading::Wait,
            (Found::Wait, _) => Reading::Wait,
            (Found::NoGroup, Some(lane)) => Reading::View(View::WholeLane(lane)),
            (Found::NoGroup, None) => {
                self.views.tell_no_group(client_id, &partition.topic);
                Reading::View(View::NoGroup)
            }
        }
    }

    /// Looks at `partition` for a fetch that stands at `scan`. An empty answer means: wait for more,
    /// and at the end of the wait answer with the scan's filler.
    pub fn show(
        &self,
        partition: &Partition,
        reading: &Reading,
        scan: &mut Scan,
        max_bytes: usize,
        at_least_one: bool,
    ) -> Result<Shown, crate::partition::ReadError> {
        show::show(partition, reading, scan, max_bytes, at_least_one, &self.rebuilt)
    }

    /// What a group's name means. The suffix of a lane that does not exist is part of a plain name.
    pub fn role(&self, group: &GroupId) -> Role {
        match lane_core::name::split_group(group.as_str()) {
            Some((base, lane)) if (self.exists)(&lane) => Role::Lane { base, lane },
            _ => Role::Baseline,
        }
    }

    /// A topic's lanes were switched on: what groups of lanes hold of it already is activated.
    pub fn lanes_switched(&self) {
        self.cuts.lists_changed();
    }

    /// Topics here whose records may belong to lanes.
    pub fn topics(&self) -> BTreeSet<TopicName> {
        let all = (self.owned.all)();
        let has_lanes = all.iter().filter(|partition| partition.with_fold(|fold| fold.lanes.has_lanes()));
        has_lanes.map(|partition| partition.topic.clone()).collect()
    }

    /// Groups behind one client id whose views differ, on these topics.
    pub fn alike(&self, topics: &BTreeSet<TopicName>) -> Vec<Alike> {
        self.views.alike(topics)
    }

    /// Client ids that read topics with lanes without a group, since the start.
    pub fn without_group(&self) -> Vec<(String, TopicName)> {
        self.views.without_group()
    }

    /// Pairs of groups whose readers cannot be told apart, for the metric and the status.
    pub fn ambiguous_groups(&self) -> Vec<(GroupId, GroupId)> {
        self.views.ambiguous()
    }
}

/// Whether no view is needed: the topic never had lanes, and the reader is in none or may read it all.
fn is_plain(partition: &Partition, in_lane: bool) -> bool {
    if switches::view_filter_off() {
        return true;
    }
    let has_lanes = partition.with_fold(|fold| fold.lanes.has_lanes());
    !has_lanes && (!in_lane || partition.settings().lane_reference)
}

impl Role {
    fn view(&self, group: &GroupId) -> View {
        match self {
            Role::Baseline => View::Baseline(group.clone()),
            Role::Lane { base, lane } => View::Lane(base.clone(), lane.clone()),
        }
    }
}
