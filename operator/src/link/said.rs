//! What the mirrors of a region report of one peer, in the words of a status. Pure.

use std::collections::BTreeMap;

use control::v1::{Link, LinkState, MirrorStatusResponse};

use crate::conditions::Verdict;
use crate::crd::{MirrorLinkSpec, MirrorLinkStatus};

/// Fills in what `report` says of the peer, and judges it.
pub fn judge(spec: &MirrorLinkSpec, report: &MirrorStatusResponse, status: &mut MirrorLinkStatus) -> Verdict {
    let link = report.links.iter().find(|link| link.peer == spec.peer);
    let heard = (0..=REPORT_AGE_MS_MAX).contains(&report.report_age_ms);
    let Some(mut link) = link.filter(|_| heard).cloned() else {
        clear(status, if spec.paused { "Paused" } else { "Connecting" });
        let text = "the mirrors have not reported about this link yet";
        return match spec.paused {
            true => Verdict::no("Ready", "Paused", "spec.paused is true"),
            false => Verdict::no("Ready", "NoReport", text),
        };
    };
    // What a policy leaves out does not lag.
    let left_out: Vec<&str> = report
        .notes
        .iter()
        .filter(|note| note.peer == spec.peer && note.kind == "filter")
        .map(|note| note.topic.as_str())
        .collect();
    link.partitions.retain(|partition| !left_out.contains(&partition.topic.as_str()));
    fill(&link, status);
    verdict(spec, &link, status)
}

fn verdict(spec: &MirrorLinkSpec, link: &Link, status: &MirrorLinkStatus) -> Verdict {
    let faulted = link.partitions.iter().find(|partition| partition.state() == LinkState::Faulted);
    if let Some(partition) = faulted {
        let text = format!("{} {}: {}", partition.topic, partition.partition, partition.reason);
        return Verdict::no("Ready", "TopicFaulted", text);
    }
    // One that does not cross now, and why: for a moment, or until a person does something about it.
    let held = link.partitions.iter().find(|partition| partition.state() == LinkState::Paused);
    let held = held
        .map(|partition| format!("{} {} waits: {}", partition.topic, partition.partition, partition.reason));
    match link.state() {
        LinkState::Faulted => Verdict::no("Ready", "Faulted", link.reason.clone()),
        LinkState::Paused => Verdict::no("Ready", "Paused", link.reason.clone()),
        LinkState::Active | LinkState::Lagging => {
            let limit = spec.rpo.as_ref().map(|rpo| i64::from(rpo.max_lag_seconds));
            match (limit, status.lag_seconds) {
                (Some(limit), Some(lag)) if lag > limit => {
                    let text = format!("{lag} s behind, spec.rpo.maxLagSeconds is {limit}");
                    Verdict::no("Ready", "LagExceeded", text)
                }
                (Some(_), None) => {
                    let text = held.unwrap_or_else(|| "the lag is not known".to_owned());
                    Verdict::unknown("Ready", "LagUnknown", text)
                }
                _ => Verdict::yes("Ready", "Mirroring", held.unwrap_or_default()),
            }
        }
        _ => Verdict::no("Ready", "Connecting", link.reason.clone()),
    }
}

/// Nobody says how it stands: what was said before is not known to be so any more.
pub fn clear(status: &mut MirrorLinkStatus, state: &str) {
    status.state = Some(state.to_owned());
    (status.lag, status.lag_seconds, status.lag_records, status.rtt_milliseconds) = (None, None, None, None);
    status.worst_topics.clear();
}

fn fill(link: &Link, status: &mut MirrorLinkStatus) {
    let state = match link.state() {
        LinkState::Active => "Active",
        LinkState::Lagging => "Lagging",
        LinkState::Paused => "Paused",
        LinkState::Faulted => "Faulted",
        LinkState::Connecting | LinkState::Unspecified => "Connecting",
    };
    clear(status, state);
    status.rtt_milliseconds = link.rtt_us.map(|rtt| whole(rtt.div_ceil(1000)));
    // One that is not known makes the sum unknown: it is never taken for 0.
    let records: Option<u64> = link.partitions.iter().map(|partition| partition.lag_records).sum();
    let milliseconds: Option<Vec<u64>> = link.partitions.iter().map(|partition| partition.lag_ms).collect();
    status.lag_records = records.map(whole);
    status.lag_seconds = milliseconds.map(|all| whole(all.into_iter().max().unwrap_or(0).div_ceil(1000)));
    status.lag = match (status.lag_records, status.lag_seconds) {
        (Some(records), Some(seconds)) => Some(format!("{records} records, {seconds} s")),
        (Some(records), None) => Some(format!("{records} records")),
        _ => Some("unknown".to_owned()),
    };
    let mut topics: BTreeMap<&str, u64> = BTreeMap::new();
    for partition in &link.partitions {
        *topics.entry(&partition.topic).or_default() += partition.lag_records.unwrap_or(0);
    }
    let mut worst: Vec<(&str, u64)> = topics.into_iter().filter(|(_, lag)| *lag > 0).collect();
    worst.sort_by_key(|(_, lag)| std::cmp::Reverse(*lag));
    status.worst_topics =
        worst.into_iter().take(WORST).map(|(topic, lag)| format!("{topic}: {lag} records")).collect();
}

fn whole(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

const REPORT_AGE_MS_MAX: i64 = 30_000;
const WORST: usize = 5;

#[cfg(test)]
mod tests {
    use control::v1::LinkPartition;

    use super::*;
    use crate::conditions::Status;
    use crate::crd::Rpo;

    fn partition(topic: &str, lag: Option<u64>) -> LinkPartition {
        LinkPartition { topic: topic.to_owned(), lag_records: lag, lag_ms: lag, ..LinkPartition::default() }
    }

    fn report(state: LinkState, partitions: Vec<LinkPartition>) -> MirrorStatusResponse {
        let link = Link {
            peer: "west".to_owned(),
            state: state.into(),
            rtt_us: Some(1500),
            partitions,
            ..Link::default()
        };
        MirrorStatusResponse { links: vec![link], notes: Vec::new(), report_age_ms: 100 }
    }

    fn judged(report: &MirrorStatusResponse, rpo: Option<i32>) -> (Verdict, MirrorLinkStatus) {
        let rpo = rpo.map(|max_lag_seconds| Rpo { max_lag_seconds });
        let spec = MirrorLinkSpec { peer: "west".to_owned(), rpo, ..MirrorLinkSpec::default() };
        let mut status = MirrorLinkStatus::default();
        (judge(&spec, report, &mut status), status)
    }

    #[test]
    fn what_a_policy_leaves_out_does_not_lag_and_what_waits_is_named() {
        let mut held = partition("b", None);
        held.set_state(LinkState::Paused);
        held.reason = "lanes are on in one region and off in the other".to_owned();
        let mut said = report(LinkState::Active, vec![partition("a", Some(0)), held]);
        let (verdict, status) = judged(&said, Some(60));
        assert_eq!((verdict.reason, status.lag.as_deref()), ("LagUnknown", Some("unknown")));
        assert!(verdict.message.starts_with("b 0 waits: lanes are on"), "{}", verdict.message);
        assert_eq!(judged(&said, None).0.status, Status::True);
        let (peer, kind, topic) = ("west".to_owned(), "filter".to_owned(), "b".to_owned());
        said.notes = vec![control::v1::LinkNote { peer, kind, topic, ..control::v1::LinkNote::default() }];
        let (verdict, status) = judged(&said, Some(60));
        assert_eq!((verdict.reason, status.lag.as_deref()), ("Mirroring", Some("0 records, 0 s")));
    }

    #[test]
    fn lag_is_the_sum_and_what_is_not_known_is_never_zero() {
        let (verdict, status) = judged(
            &report(LinkState::Active, vec![partition("a", Some(3)), partition("b", Some(2000))]),
            None,
        );
        assert_eq!((verdict.status, verdict.reason), (Status::True, "Mirroring"));
        assert_eq!(status.lag.as_deref(), Some("2003 records, 2 s"));
        assert_eq!(status.worst_topics, ["b: 2000 records", "a: 3 records"]);
        assert_eq!(status.rtt_milliseconds, Some(2));
        let (_, status) =
            judged(&report(LinkState::Active, vec![partition("a", Some(3)), partition("b", None)]), None);
        assert_eq!((status.lag.as_deref(), status.lag_records), (Some("unknown"), None));
    }

    #[test]
    fn a_link_is_not_ready_when_it_lags_too_much_is_paused_faulted_or_unheard_of() {
        let lagging = report(LinkState::Lagging, vec![partition("a", Some(9000))]);
        assert_eq!(judged(&lagging, Some(8)).0.reason, "LagExceeded");
        assert_eq!(judged(&lagging, Some(9)).0.reason, "Mirroring");
        let unknown = report(LinkState::Active, vec![partition("a", None)]);
        assert_eq!(judged(&unknown, Some(9)).0.reason, "LagUnknown");
        assert_eq!(judged(&report(LinkState::Paused, Vec::new()), None).0.reason, "Paused");
        let mut bad = partition("a", Some(0));
        bad.state = LinkState::Faulted.into();
        assert_eq!(judged(&report(LinkState::Active, vec![bad]), None).0.reason, "TopicFaulted");
        let mut old = report(LinkState::Active, Vec::new());
        old.report_age_ms = 60_000;
        let (verdict, status) = judged(&old, None);
        assert_eq!((verdict.reason, status.state.as_deref()), ("NoReport", Some("Connecting")));
        old.report_age_ms = -1;
        assert_eq!(judged(&old, None).0.reason, "NoReport");
    }
}
