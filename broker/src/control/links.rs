//! The links of this region as people see them: what their policies are, what the mirrors said last
//! (`board`), and what stays at home.
//!
//! Reports are soft state: after a start there is none until a mirror reports, and their age is
//! part of the answer, so that old news is never shown as new. What a policy keeps from crossing is
//! not kept as notes but read from policies, topics and logs, so that it is never out of date.

use control::v1;
use kafka::private::{
    Congestion, Direction, LinkPolicy, LinkReport, LinkState, Note, NoteKind, PartitionReport, TopicPattern,
};
use kafka::{RegionId, RegionName};
use tonic::Status;

use super::policies::PolicyError;
use crate::broker::Broker;
use crate::topics::Topic;

/// The answer to MirrorStatus.
pub fn status(broker: &Broker, notes: &[Note]) -> v1::MirrorStatusResponse {
    let shown = notes.iter().filter(|note| note.kind != NoteKind::Linked).map(note_message);
    let notes = shown.chain(filtered(broker)).collect();
    let (report_age_ms, links) = match broker.links.told() {
        None => (-1, Vec::new()),
        Some((age, links)) => {
            (i64::try_from(age.as_millis()).unwrap_or(i64::MAX), links.iter().map(link).collect())
        }
    };
    v1::MirrorStatusResponse { links, notes, report_age_ms }
}

/// The answer to ListLinks: every link that has a policy of its own, or that the mirror reports.
pub async fn list(broker: &Broker) -> v1::ListLinksResponse {
    broker.links.policies.loaded().await;
    let (stored, peers) = (broker.links.policies.all(), broker.links.peers());
    let linked = |peer: &str| peers.iter().any(|(name, _)| name == peer);
    let mut links: Vec<v1::LinkPolicy> =
        stored.iter().map(|(peer, policy)| policy_message(peer.as_str(), policy, true, linked)).collect();
    for (peer, _) in peers.iter().filter(|(peer, _)| !stored.iter().any(|(name, _)| name.as_str() == peer)) {
        links.push(policy_message(peer, &LinkPolicy::default(), false, linked));
    }
    links.sort_by(|a, b| a.peer.cmp(&b.peer));
    v1::ListLinksResponse { links }
}

/// The answer to SetLink.
pub async fn set(broker: &Broker, asked: v1::SetLinkRequest) -> Result<v1::SetLinkResponse, Status> {
    let peer = parse_peer(broker, &asked.peer)?;
    let topics = asked.topics.map(patterns).transpose()?;
    let exclude = asked.exclude.map(patterns).transpose()?;
    let congestion = asked.congestion.as_deref().map(parse_congestion).transpose()?;
    let change = |policy: &mut LinkPolicy| {
        let LinkPolicy { boe_lanes, ppe_lanes, deletions, paused, rate_bytes_max, .. } = &mut *policy;
        for (field, value) in [
            (boe_lanes, asked.boe_lanes),
            (ppe_lanes, asked.ppe_lanes),
            (deletions, asked.deletions),
            (paused, asked.paused),
        ] {
            *field = value.unwrap_or(*field);
        }
        *rate_bytes_max = asked.rate_bytes_max.unwrap_or(*rate_bytes_max);
        policy.congestion = congestion.unwrap_or(policy.congestion);
        policy.topics = topics.unwrap_or_else(|| std::mem::take(&mut policy.topics));
        policy.exclude = exclude.unwrap_or_else(|| std::mem::take(&mut policy.exclude));
    };
    let policy = broker.links.policies.change(&*broker.meta, &peer, change).await.map_err(refused)?;
    tracing::info!(%peer, ?policy, "the policy of a link was set");
    let (linked, warning) = taken(broker, &peer).await;
    let link = Some(policy_message(peer.as_str(), &policy, true, |_| linked));
    Ok(v1::SetLinkResponse { link, warnings: warning.into_iter().collect() })
}

/// Waits until the mirror has the policies as they are now: whether it has this link, and what a person
/// should know.
async fn taken(broker: &Broker, peer: &RegionName) -> (bool, Option<String>) {
    // Also where it has reported nothing yet: it may have the link all the same.
    let late = !broker.links.policies.wait_taken(generation(broker)).await;
    if !broker.links.peers().iter().any(|(name, _)| name == peer.as_str()) {
        let text = format!(
            "the mirror of this region reports no link to {peer}; the policy is kept for when its configuration has one"
        );
        return (false, Some(text));
    }
    let text = "the mirror of this region has not taken this over yet; it will when it asks again";
    (true, late.then(|| text.to_owned()))
}

/// What the mirror knows the present policies by: another number after a start of the broker. In a
/// cluster a moment of the metadata store, so that what two brokers say can be compared.
pub fn generation(broker: &Broker) -> u64 {
    let policies = &broker.links.policies;
    match broker.cluster {
        Some(_) => policies.revision(),
        None => ((broker.identity.epoch.0 as u64) << 40) + policies.generation(),
    }
}

/// The answer to DeleteLink.
pub async fn delete(broker: &Broker, peer: &str) -> Result<v1::DeleteLinkResponse, Status> {
    let peer = parse_peer(broker, peer)?;
    broker.links.policies.remove(&*broker.meta, &peer).await.map_err(refused)?;
    tracing::info!(%peer, "a link has the default policy again");
    let (_, warning) = taken(broker, &peer).await;
    Ok(v1::DeleteLinkResponse { warnings: warning.into_iter().collect() })
}

fn parse_peer(broker: &Broker, peer: &str) -> Result<RegionName, Status> {
    let peer = RegionName::parse(peer).map_err(|error| Status::invalid_argument(error.to_string()))?;
    if peer == broker.identity.region {
        let text = format!("this is region {peer} itself; name the region at the other end of the link");
        return Err(Status::invalid_argument(text));
    }
    Ok(peer)
}

fn patterns(list: v1::PatternList) -> Result<Vec<TopicPattern>, Status> {
    let parsed = list.patterns.iter().map(|text| TopicPattern::parse(text));
    parsed.collect::<Result<_, _>>().map_err(|error| Status::invalid_argument(error.to_string()))
}

fn parse_congestion(text: &str) -> Result<Congestion, Status> {
    let known = || Congestion::ALL.map(Congestion::name).join(", ");
    Congestion::parse(text)
        .ok_or_else(|| Status::invalid_argument(format!("congestion {text:?} is not one of {}", known())))
}

fn refused(error: PolicyError) -> Status {
    let text = error.to_string();
    match error {
        PolicyError::Default(_) => Status::not_found(text),
        PolicyError::TooMany => Status::resource_exhausted(text),
        PolicyError::TooManyPatterns(_) => Status::invalid_argument(text),
        PolicyError::Raced(_) => Status::aborted(text),
        PolicyError::Meta { .. } => Status::internal(text),
    }
}

fn policy_message(
    peer: &str,
    policy: &LinkPolicy,
    stored: bool,
    linked: impl Fn(&str) -> bool,
) -> v1::LinkPolicy {
    let texts = |list: &[TopicPattern]| list.iter().map(TopicPattern::to_string).collect();
    v1::LinkPolicy {
        peer: peer.to_owned(),
        topics: texts(&policy.topics),
        exclude: texts(&policy.exclude),
        boe_lanes: policy.boe_lanes,
        ppe_lanes: policy.ppe_lanes,
        deletions: policy.deletions,
        paused: policy.paused,
        rate_bytes_max: policy.rate_bytes_max,
        congestion: policy.congestion.name().to_owned(),
        stored,
        linked: linked(peer),
    }
}

/// Topics of this region that a policy leaves out, and how far each of their partitions holds the peer's
/// records: what the peer has from there on is not here.
fn filtered(broker: &Broker) -> Vec<v1::LinkNote> {
    let (topics, peers) = (broker.topics.all(), broker.links.peers());
    let mut notes = Vec::new();
    for (peer, policy) in broker.links.policies.all() {
        let region = peers.iter().find(|(name, _)| name == peer.as_str()).and_then(|(_, region)| *region);
        for topic in topics.iter().filter(|t| !t.name.is_internal() && !policy.lets(&t.name)) {
            let text = format!(
                "the policy of the link to {peer} leaves this topic out; its records stay where they are"
            );
            notes.push(filter_note(&peer, topic, -1, 0, text));
            notes.extend(region.iter().flat_map(|region| held_of(broker, &peer, *region, topic)));
            if notes.len() >= FILTERED_MAX {
                return notes;
            }
        }
    }
    notes
}

fn held_of(broker: &Broker, peer: &RegionName, region: RegionId, topic: &Topic) -> Vec<v1::LinkNote> {
    let partitions = broker.topic_partitions(topic.name.as_str());
    let mut notes = Vec::new();
    for partition in partitions.iter().flat_map(|partitions| partitions.iter()) {
        let of_peer = partition.with_fold(|fold| {
            let of_peer = fold.vector.iter().filter(|(origin, _)| origin.region == region);
            of_peer.map(|(_, position)| position.next).max()
        });
        if let Some(next) = of_peer {
            let text = format!("held here below {next}; what {peer} has from there on does not come");
            notes.push(filter_note(peer, topic, partition.index.0, next.0, text));
        }
    }
    notes
}

fn filter_note(peer: &RegionName, topic: &Topic, partition: i32, from: i64, text: String) -> v1::LinkNote {
    v1::LinkNote {
        peer: peer.to_string(),
        kind: "filter".to_owned(),
        topic: topic.name.to_string(),
        partition,
        from_offset: from,
        to_offset: -1,
        at_ms: -1,
        text,
    }
}

fn link(report: &LinkReport) -> v1::Link {
    v1::Link {
        peer: report.peer.clone(),
        peer_region_id: report.region.map(|id| id.to_string()).unwrap_or_default(),
        address: report.address.clone(),
        state: state(report.state).into(),
        reason: report.reason.clone(),
        rtt_us: report.rtt_us,
        sent_bytes: report.sent_bytes,
        received_bytes: report.received_bytes,
        partitions: report.partitions.iter().map(partition).collect(),
    }
}

fn partition(report: &PartitionReport) -> v1::LinkPartition {
    v1::LinkPartition {
        topic: report.topic.to_string(),
        partition: report.partition.0,
        outgoing: report.direction == Direction::Out,
        state: state(report.state).into(),
        reason: report.reason.clone(),
        next_offset: report.next.0,
        lag_records: report.lag_records,
        lag_bytes: report.lag_bytes,
        lag_ms: report.lag_ms,
    }
}

fn note_message(note: &Note) -> v1::LinkNote {
    let kind = match note.kind {
        NoteKind::Linked => "linked",
        NoteKind::Skip => "skip",
        NoteKind::Gap => "gap",
        NoteKind::Quarantine => "quarantine",
        NoteKind::Reset => "reset",
        NoteKind::Drift => "drift",
        NoteKind::Deletion => "deletion",
    };
    v1::LinkNote {
        peer: note.peer.clone(),
        kind: kind.to_owned(),
        topic: note.topic.to_string(),
        partition: note.partition.0,
        from_offset: note.from.0,
        to_offset: note.to.0,
        at_ms: note.at.0,
        text: note.text.clone(),
    }
}

fn state(state: LinkState) -> v1::LinkState {
    match state {
        LinkState::Connecting => v1::LinkState::Connecting,
        LinkState::Active => v1::LinkState::Active,
        LinkState::Lagging => v1::LinkState::Lagging,
        LinkState::Paused => v1::LinkState::Paused,
        LinkState::Faulted => v1::LinkState::Faulted,
    }
}

/// Entries about what policies leave out in one answer.
const FILTERED_MAX: usize = 10_000;
