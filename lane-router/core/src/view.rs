//! Who sees which record: the owner of a record, and what a reader is shown of a batch.
//!
//! A lane marker is a batch of its own, so no batch lies across a cut: its base offset decides for all
//! its records. Leaves out who is reading; the broker's view registry knows that.
//!
//! Invariant: for a group, a BOE record is seen by the lane or by the baseline, never by both and never
//! by neither; a PPE record is never seen outside its lane.

use kafka::{GroupId, Offset};

use crate::fold::LaneRules;
use crate::name::{Lane, LaneClass};
use crate::summary::{LaneSummary, RecordLane};

/// A reader, as far as lanes care.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum View {
    /// The consumers of a group outside every lane.
    Baseline(GroupId),
    /// The consumers of a base group deployed in a lane.
    Lane(GroupId, Lane),
    /// A lane's connection that joined no group: every record of the lane.
    WholeLane(Lane),
    /// No group: baseline records only.
    NoGroup,
    /// Everything, by permission of a listener.
    Raw,
    /// Several groups behind one client id: what any of them sees. Never holds a view of a PPE lane.
    AnyOf(Vec<View>),
}

/// Who owns a record of a lane, for one base group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Side {
    Baseline,
    Lane,
}

/// What a view is shown of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Showing {
    /// All of it: verbatim.
    Visible,
    /// Nothing of it.
    Hidden,
    /// Its records must be looked at.
    Mixed,
}

impl LaneRules {
    /// Who owns a record of `lane` at `offset` for `group`.
    pub fn owner(&self, offset: Offset, lane: &Lane, group: &GroupId) -> Side {
        match lane.class() {
            LaneClass::Ppe => Side::Lane,
            LaneClass::Boe if self.in_interval(group, lane, offset) => Side::Lane,
            LaneClass::Boe => Side::Baseline,
        }
    }

    /// Whether `view` sees a record of lane `record` in a batch at `offset`.
    pub fn sees(&self, view: &View, record: &RecordLane, offset: Offset) -> bool {
        match (view, record) {
            (View::Raw, _) => true,
            (_, RecordLane::Refused) => false,
            (View::AnyOf(views), _) => views.iter().any(|view| self.sees(view, record, offset)),
            (View::Baseline(_) | View::NoGroup, RecordLane::Baseline) => true,
            (View::NoGroup, _) => false,
            (View::Baseline(_), RecordLane::Unnamed) => true,
            (View::Baseline(group), RecordLane::Lane(lane)) => {
                self.owner(offset, lane, group) == Side::Baseline
            }
            (View::Lane(group, own), RecordLane::Lane(lane)) => {
                own == lane
                    && offset >= self.purged_below(lane)
                    && self.owner(offset, lane, group) == Side::Lane
            }
            (View::WholeLane(own), RecordLane::Lane(lane)) => {
                own == lane && offset >= self.purged_below(lane)
            }
            (View::Lane(..) | View::WholeLane(_), RecordLane::Baseline | RecordLane::Unnamed) => false,
        }
    }

    /// What `view` is shown of a batch at `offset` that holds `summary`.
    pub fn showing(&self, view: &View, summary: &LaneSummary, offset: Offset) -> Showing {
        if *view == View::Raw {
            return Showing::Visible;
        }
        if summary.is_many() {
            return Showing::Mixed;
        }
        let (mut some_seen, mut some_hidden) = (false, false);
        let mut note = |seen: bool| if seen { some_seen = true } else { some_hidden = true };
        if summary.has_baseline() {
            note(self.sees(view, &RecordLane::Baseline, offset));
        }
        if summary.has_unnamed() {
            note(self.sees(view, &RecordLane::Unnamed, offset));
        }
        for lane in summary.lanes() {
            note(self.sees(view, &RecordLane::Lane(lane.clone()), offset));
        }
        match (some_seen, some_hidden) {
            (true, true) => Showing::Mixed,
            (true, false) => Showing::Visible,
            (false, true) => Showing::Hidden,
            // Not one record: nothing to hide.
            (false, false) => Showing::Visible,
        }
    }
}

impl View {
    /// The view of several groups that one reader cannot be told apart from. `None` where it may make
    /// no progress: what belongs to a PPE lane alone must not be read past by somebody else.
    pub fn merged(views: impl IntoIterator<Item = View>) -> Option<View> {
        let mut distinct: Vec<View> = Vec::new();
        for view in views {
            // Every group in a PPE lane sees the same records.
            let view = match view {
                View::Lane(_, lane) if lane.is_ppe() => View::WholeLane(lane),
                other => other,
            };
            if !distinct.contains(&view) {
                distinct.push(view);
            }
        }
        match distinct.len() {
            0 | 1 => distinct.pop(),
            _ if distinct.iter().any(View::is_ppe) => None,
            _ => Some(View::AnyOf(distinct)),
        }
    }

    /// Whether a connection in `lane` may have this view: one in a lane sees only the lane, one in none
    /// sees no PPE lane.
    pub fn is_within(&self, lane: Option<&Lane>) -> bool {
        match (self, lane) {
            (View::AnyOf(views), _) => views.iter().all(|view| view.is_within(lane)),
            (view, Some(lane)) => view.only_lane() == Some(lane),
            (view, None) => !view.is_ppe(),
        }
    }

    /// Sees records of a PPE lane.
    pub fn is_ppe(&self) -> bool {
        matches!(self, View::Lane(_, lane) | View::WholeLane(lane) if lane.is_ppe())
    }

    /// Sees only records of a lane, so that ranges without lane records are hidden from it.
    pub fn only_lane(&self) -> Option<&Lane> {
        match self {
            View::Lane(_, lane) | View::WholeLane(lane) => Some(lane),
            _ => None,
        }
    }

    /// Sees every plain batch whole.
    pub fn sees_baseline(&self) -> bool {
        match self {
            View::Baseline(_) | View::NoGroup | View::Raw => true,
            View::Lane(..) | View::WholeLane(_) => false,
            View::AnyOf(views) => views.iter().any(View::sees_baseline),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::fold::{Cut, LaneFold, LaneMarker};

    fn lane(name: &str) -> Lane {
        Lane::parse(name).unwrap()
    }

    fn cut(group: &str, name: &str) -> Cut {
        Cut { group: GroupId::new(group), lane: lane(name), coordinator_epoch: 1, previous: None }
    }

    fn record(index: u8) -> RecordLane {
        match index {
            0 => RecordLane::Baseline,
            1 => RecordLane::Unnamed,
            2 => RecordLane::Lane(lane("boe-a")),
            3 => RecordLane::Lane(lane("boe-b")),
            _ => RecordLane::Lane(lane("ppe-x")),
        }
    }

    /// A fold with intervals [10, 20) and [30, ..) of (orders, boe-a), both holding records.
    fn fold() -> LaneFold {
        let mut fold = LaneFold::default();
        let mut summary = LaneSummary::default();
        summary.add(&record(2));
        fold.apply(&LaneMarker::Extractors(crate::Extractors::standard()), Offset(0));
        for (at, open) in [(10, true), (20, false), (30, true)] {
            let cut = cut("orders", "boe-a");
            fold.apply(
                &if open { LaneMarker::Activate(cut) } else { LaneMarker::Deactivate(cut) },
                Offset(at),
            );
            fold.note_batch(&summary, Offset(at + 1));
        }
        fold
    }

    #[test]
    fn a_boe_record_has_one_owner_by_its_offset() {
        let rules = fold().rules();
        let baseline = View::Baseline(GroupId::new("orders"));
        let in_lane = View::Lane(GroupId::new("orders"), lane("boe-a"));
        for (offset, owned) in [(5, false), (10, true), (19, true), (20, false), (29, false), (31, true)] {
            assert_eq!(rules.sees(&in_lane, &record(2), Offset(offset)), owned, "{offset}");
            assert_eq!(rules.sees(&baseline, &record(2), Offset(offset)), !owned, "{offset}");
            let other = View::Baseline(GroupId::new("billing"));
            assert!(rules.sees(&other, &record(2), Offset(offset)), "another group is not touched");
        }
    }

    #[test]
    fn a_ppe_record_is_seen_in_its_lane_alone_with_no_interval_at_all() {
        let rules = LaneFold::default().rules();
        let group = GroupId::new("orders");
        assert!(rules.sees(&View::Lane(group.clone(), lane("ppe-x")), &record(4), Offset(3)));
        for other in [
            View::Baseline(group.clone()),
            View::NoGroup,
            View::Lane(group.clone(), lane("ppe-y")),
            View::WholeLane(lane("boe-a")),
            View::AnyOf(vec![View::Baseline(group), View::NoGroup]),
        ] {
            assert!(!rules.sees(&other, &record(4), Offset(3)), "{other:?}");
        }
    }

    #[test]
    fn readers_that_cannot_be_told_apart_see_a_boe_record_twice_and_never_read_past_a_ppe_one() {
        let baseline = |group: &str| View::Baseline(GroupId::new(group));
        let in_lane = |group: &str, name: &str| View::Lane(GroupId::new(group), lane(name));
        assert_eq!(View::merged([baseline("a"), baseline("a")]), Some(baseline("a")));
        let both = vec![baseline("a"), in_lane("a", "boe-a")];
        assert_eq!(View::merged(both.clone()), Some(View::AnyOf(both)));
        assert_eq!(View::merged([baseline("a"), in_lane("a", "ppe-x")]), None);
        assert_eq!(View::merged([in_lane("a", "ppe-y"), in_lane("a", "ppe-x")]), None);
        let same = View::merged([in_lane("a", "ppe-x"), in_lane("b", "ppe-x")]);
        assert_eq!(same, Some(View::WholeLane(lane("ppe-x"))));
        assert!(in_lane("a", "ppe-x").is_within(Some(&lane("ppe-x"))));
        assert!(!in_lane("a", "ppe-x").is_within(None) && !baseline("a").is_within(Some(&lane("boe-a"))));
    }

    #[test]
    fn a_purge_hides_what_is_below_it_from_a_later_lane_of_the_name() {
        let mut fold = fold();
        fold.apply(&LaneMarker::Purge(lane("boe-a")), Offset(40));
        let rules = fold.rules();
        let in_lane = View::Lane(GroupId::new("orders"), lane("boe-a"));
        assert!(!rules.sees(&in_lane, &record(2), Offset(31)));
        assert!(rules.sees(&in_lane, &record(2), Offset(41)));
        assert!(!rules.sees(&View::Baseline(GroupId::new("orders")), &record(2), Offset(31)));
    }

    #[test]
    fn trimming_keeps_every_answer_at_and_above_the_log_start() {
        let whole = fold();
        for start in 0..45 {
            let mut trimmed = whole.clone();
            trimmed.trim(Offset(start));
            let group = GroupId::new("orders");
            for at in start..45 {
                let owner = |fold: &LaneFold| fold.rules().owner(Offset(at), &lane("boe-a"), &group);
                assert_eq!(owner(&trimmed), owner(&whole), "log start {start}, offset {at}");
                assert_eq!(trimmed.rules().extractors_at(Offset(at)).texts().len(), 7);
            }
        }
    }

    #[test]
    fn a_cut_that_is_old_or_was_overtaken_is_refused() {
        use crate::fold::CutRefused;
        let fold = fold();
        let at = |epoch, previous| Cut {
            coordinator_epoch: epoch,
            previous: Option::map(previous, Offset),
            ..cut("orders", "boe-a")
        };
        assert_eq!(fold.check(&at(1, Some(30))), Ok(()));
        assert_eq!(
            fold.check(&at(2, Some(20))),
            Err(CutRefused::Moved { last: Some(Offset(30)), open: true })
        );
        assert_eq!(fold.check(&at(0, Some(30))), Err(CutRefused::Fenced { asked: 0, known: 1 }));
        assert_eq!(fold.check(&cut("orders", "boe-b")), Ok(()));
    }

    #[test]
    fn an_interval_without_a_record_of_its_lane_leaves_nothing_behind() {
        let mut fold = LaneFold::default();
        for at in 0..1000 {
            let cut = cut("orders", "boe-a");
            let marker = if at % 2 == 0 { LaneMarker::Activate(cut) } else { LaneMarker::Deactivate(cut) };
            fold.apply(&marker, Offset(at));
        }
        let known = fold.rules().group_lane(&GroupId::new("orders"), &lane("boe-a")).cloned().unwrap();
        assert!(known.intervals.is_empty());
        assert_eq!(known.last_marker, Offset(999));
        assert!(!fold.holds_lanes());
        fold.trim(Offset(1000));
        assert!(fold.is_empty());
    }

    #[test]
    fn a_fold_survives_its_snapshot_and_damage_is_an_error() {
        let mut fold = fold();
        fold.apply(&LaneMarker::Purge(lane("boe-b")), Offset(40));
        let mut bytes = Vec::new();
        fold.encode(&mut bytes);
        let mut input = &bytes[..];
        assert_eq!(LaneFold::decode(&mut input).unwrap(), fold);
        assert!(input.is_empty());
        for cut in 0..bytes.len() {
            assert!(LaneFold::decode(&mut &bytes[..cut]).is_err(), "cut at {cut}");
        }
    }

    proptest! {
        #[test]
        fn a_batch_is_shown_as_its_records_are(
            records in proptest::collection::vec(0u8..5, 1..6), offset in 0i64..50, view in 0usize..6
        ) {
            let rules = fold().rules();
            let orders = || GroupId::new("orders");
            let view = [
                View::Baseline(orders()), View::Lane(orders(), lane("boe-a")), View::NoGroup,
                View::Lane(orders(), lane("ppe-x")), View::Raw,
                View::AnyOf(vec![View::Baseline(orders()), View::Lane(orders(), lane("boe-a"))]),
            ][view].clone();
            let mut summary = LaneSummary::default();
            records.iter().for_each(|r| summary.add(&record(*r)));
            let seen = records.iter().filter(|r| rules.sees(&view, &record(**r), Offset(offset))).count();
            let right = if seen == records.len() { Showing::Visible }
                else if seen == 0 { Showing::Hidden } else { Showing::Mixed };
            prop_assert_eq!(rules.showing(&view, &summary, Offset(offset)), right);
        }

        #[test]
        fn decoding_a_fold_never_panics(bytes in any::<Vec<u8>>()) {
            let _ = LaneFold::decode(&mut &bytes[..]);
        }
    }
}
