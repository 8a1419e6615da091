//! What a person or a tool is told about a lane, and the end of one.
//!
//! Counting looks into batches, so it has a budget; what lies beyond it is "not known", never 0.

use std::sync::Arc;

use kafka::control::{LanePurge, Marker};
use kafka::{Batch, GroupId, Offset, PartitionIndex, TopicName};
use lane_core::{Lane, LaneRules, RecordLane, View};

use super::Lanes;
use super::cuts::CloseError;
use crate::clock;
use crate::log::{BatchEntry, BatchKind};
use crate::partition::{AppendError, DurableError, Partition, ReadError, ReadUpTo};

/// Everything about one lane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaneReport {
    pub groups: Vec<GroupLaneStatus>,
    pub partitions: Vec<PartitionRecords>,
}

/// One group in the lane, on one partition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupLaneStatus {
    /// Without the lane.
    pub group: GroupId,
    pub topic: TopicName,
    pub partition: PartitionIndex,
    /// The latest interval; `None` if it owned nothing and is gone.
    pub activated: Option<Offset>,
    /// Its end; `None` while it is open.
    pub deactivated: Option<Offset>,
    pub committed: Option<Offset>,
    /// Records that the group owns and has not committed; `None`: not known.
    pub waiting: Option<u64>,
}

/// Records of the lane in the log of one partition, not purged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartitionRecords {
    pub topic: TopicName,
    pub partition: PartitionIndex,
    /// `None`: not known.
    pub records: Option<u64>,
}

/// Why a lane is not wholly gone.
#[derive(Debug, thiserror::Error)]
pub enum EndError {
    #[error(transparent)]
    Close(#[from] CloseError),
    #[error("lane {lane} is still open in partition {partition}; try again")]
    Open { lane: Lane, partition: String },
    #[error("partition {partition}: {error}")]
    Append { partition: String, error: AppendError },
    #[error("partition {partition}: {error}")]
    Durable { partition: String, error: DurableError },
}

/// Batches that one count unpacks at most.
const COUNT_BATCHES_MAX: usize = 10_000;
/// Batch index entries read in one step.
const STEP: usize = 4096;

impl Lanes {
    /// The state of a lane. `committed` gives the offset of a group by its name on the broker. Reads
    /// logs: not for a task that others wait for.
    pub fn report(
        &self,
        lane: &Lane,
        committed: impl Fn(&GroupId, &TopicName, PartitionIndex) -> Option<Offset>,
    ) -> LaneReport {
        let mut report = LaneReport { groups: Vec::new(), partitions: Vec::new() };
        for partition in self.partitions_with_lanes() {
            let (topic, index) = (partition.topic.clone(), partition.index);
            let rules = partition.with_fold(|fold| fold.lanes.rules());
            for (group, _, known) in rules.group_lanes().filter(|(_, l, _)| *l == lane) {
                let name = GroupId::new(&lane.suffixed(group.as_str()));
                let committed = committed(&name, &topic, index);
                let from = committed.unwrap_or(Offset::ZERO).max(partition.watermarks().log_start);
                let latest = known.intervals.last();
                report.groups.push(GroupLaneStatus {
                    group: group.clone(),
                    topic: topic.clone(),
                    partition: index,
                    activated: latest.map(|i| i.start),
                    deactivated: latest.and_then(|i| i.end),
                    committed,
                    waiting: count(&partition, lane, &View::Lane(group.clone(), lane.clone()), from),
                });
            }
            let records =
                count(&partition, lane, &View::WholeLane(lane.clone()), partition.watermarks().log_start);
            if records != Some(0) {
                report.partitions.push(PartitionRecords { topic, partition: index, records });
            }
        }
        report
    }

    /// Closes what groups here have open in a lane that nobody can join any more.
    pub async fn close(&self, lane: &Lane) -> Result<(), EndError> {
        Ok(self.cuts.close_lane(lane).await?)
    }

    /// Hides what a closed lane left in the logs here from a later lane of the same name. Returns how many
    /// records of a PPE lane nobody will see any more (`None`: not known; 0 for BOE, whose records stay with
    /// their owners). May be tried again.
    pub async fn purge(&self, lane: &Lane) -> Result<Option<u64>, EndError> {
        let mut hidden = Some(0);
        for partition in self.partitions_with_lanes() {
            let named = || partition.to_string();
            let start = partition.watermarks().log_start;
            if lane.is_ppe() {
                let here = count(&partition, lane, &View::WholeLane(lane.clone()), start);
                hidden = hidden.and_then(|sum: u64| Some(sum + here?));
            }
            let purge = LanePurge { lane: lane.as_str().to_owned(), coordinator_epoch: partition.epoch.0 };
            let closed = |fold: &broker_core::Fold| {
                let rules = fold.lanes.rules();
                let open = rules.group_lanes().any(|(_, l, known)| l == lane && known.open().is_some());
                if open { Err(EndError::Open { lane: lane.clone(), partition: named() }) } else { Ok(()) }
            };
            let appended = partition.append_marker(&Marker::LanePurge(purge), clock::now(), closed);
            let at = appended.map_err(|error| EndError::Append { partition: named(), error })??;
            let durable = partition.wait_durable(at.plus(1)).await;
            durable.map_err(|error| EndError::Durable { partition: named(), error })?;
        }
        tracing::info!(%lane, hidden_records = hidden, "what the lane left is hidden");
        Ok(hidden)
    }

    /// What members of a lane's group hold.
    pub fn held_by(&self, base: &GroupId, lane: &Lane) -> Vec<(TopicName, PartitionIndex)> {
        self.cuts.held_by(base, lane)
    }

    fn partitions_with_lanes(&self) -> Vec<Arc<Partition>> {
        let has_lanes = |p: &Arc<Partition>| p.with_fold(|fold| fold.lanes.has_lanes());
        (self.owned.all)().into_iter().filter(has_lanes).collect()
    }
}

/// Records at or above `from` that `view`, which sees only `lane`, may see; `None` beyond the budget.
fn count(partition: &Partition, lane: &Lane, view: &View, from: Offset) -> Option<u64> {
    match try_count(partition, lane, view, from) {
        Ok(count) => count,
        Err(error) => {
            tracing::warn!(%partition, %lane, %error, "records of a lane cannot be counted");
            None
        }
    }
}

fn try_count(
    partition: &Partition,
    lane: &Lane,
    view: &View,
    from: Offset,
) -> Result<Option<u64>, ReadError> {
    let (mut at, mut total, mut batches) = (from, 0, 0);
    loop {
        let holds = |_: &LaneRules, entry: &BatchEntry| match &entry.kind {
            BatchKind::Lanes(summary) => entry.next > at && summary.may_hold(lane),
            BatchKind::Marker { .. } => false,
        };
        let special = partition.special(at, STEP, STEP, holds)?;
        let rules = &special.rules;
        for entry in &special.entries {
            let BatchKind::Lanes(summary) = &entry.kind else { continue };
            batches += 1;
            if batches > COUNT_BATCHES_MAX {
                return Ok(None);
            }
            let outcome = partition.read(entry.base.max(at), 1, true, ReadUpTo::HighWatermark)?;
            let Some(slice) = outcome.slice else { continue };
            let damaged = |error| ReadError::Damaged { position: slice.position, error };
            let batch = Batch::split_first(&mut slice.bytes()?, false).map_err(damaged)?;
            let judge = summary.judged_by().cloned().unwrap_or_else(|| rules.extractors_at(entry.base));
            let seen = |lane: &RecordLane| rules.sees(view, lane, entry.base);
            total += lane_core::batch::count(&batch, &judge, at, seen).map_err(damaged)?;
        }
        if special.upto >= special.high_watermark || special.upto <= at {
            return Ok(Some(total));
        }
        at = special.upto;
    }
}
