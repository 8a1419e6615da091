//! What the logs of a cluster said of groups in lanes when they were last asked, for questions that cannot
//! wait for an owner. Where it may be behind, it errs on there being more.

use std::collections::BTreeMap;

use kafka::GroupId;
use lane_core::Lane;

use super::Place;
use crate::peers::Markers;

/// By partition: (group, lane) -> whether it is open, of those that have an interval.
#[derive(Debug, Default)]
pub struct Known(BTreeMap<Place, BTreeMap<(GroupId, Lane), bool>>);

impl Known {
    /// Takes a listing in. Partitions that are not in it stay as they were; those that are gone go.
    pub fn take(&mut self, listings: &[Markers], exists: &impl Fn(&Place) -> bool) {
        self.0.retain(|place, _| exists(place));
        for (place, markers) in listings.iter().filter(|(place, _)| exists(place)) {
            let kept = markers.iter().filter(|marker| marker.intervals);
            let kept = kept.map(|m| ((m.group.clone(), m.lane.clone()), m.open));
            self.0.insert(place.clone(), kept.collect());
        }
    }

    /// Its marker is durable.
    pub fn note_activated(&mut self, place: &Place, group: &GroupId, lane: &Lane) {
        self.0.entry(place.clone()).or_default().insert((group.clone(), lane.clone()), true);
    }

    /// So is the marker that closes it; the interval may stay.
    pub fn note_closed(&mut self, place: &Place, group: &GroupId, lane: &Lane) {
        if let Some(open) = self.0.get_mut(place).and_then(|k| k.get_mut(&(group.clone(), lane.clone()))) {
            *open = false;
        }
    }

    pub fn is_listed(&self, place: &Place) -> bool {
        self.0.contains_key(place)
    }

    pub fn owns(&self, place: &Place, group: &GroupId, lane: &Lane) -> bool {
        self.0.get(place).is_some_and(|known| known.contains_key(&(group.clone(), lane.clone())))
    }

    pub fn is_open(&self, group: &GroupId, lane: &Lane) -> bool {
        let key = (group.clone(), lane.clone());
        self.0.values().any(|known| known.get(&key).copied().unwrap_or(false))
    }
}
