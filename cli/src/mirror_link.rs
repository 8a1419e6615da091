//! `sealane mirror link`: list, show, set and delete the policies of a region's links, through its control
//! service.

use anyhow::bail;
use control::v1;
use serde::Serialize;

use crate::args::{Link, LinkChange, LinkCongestion, LinkLanes, LinkPeer, LinkSet, ListArgs};
use crate::output::{Table, bytes, show};
use crate::region::Region;

pub async fn run(command: Link) -> anyhow::Result<()> {
    match command {
        Link::List(args) => list(args).await,
        Link::Show(args) => show_one(args).await,
        Link::Set(args) => set(args).await,
        Link::Delete(args) => delete(args).await,
    }
}

#[derive(Serialize)]
struct Policy {
    peer: String,
    topics: Vec<String>,
    exclude: Vec<String>,
    lanes: &'static str,
    deletions: bool,
    /// `null`: no limit.
    rate_bytes_max: Option<u64>,
    congestion: String,
    paused: bool,
    /// Nothing of it was ever set.
    default: bool,
    /// The mirror of the region has a link to this peer.
    linked: bool,
}

impl From<v1::LinkPolicy> for Policy {
    fn from(policy: v1::LinkPolicy) -> Policy {
        Policy {
            lanes: match (policy.boe_lanes, policy.ppe_lanes) {
                (false, false) => "none",
                (true, false) => "boe",
                (false, true) => "ppe",
                (true, true) => "all",
            },
            peer: policy.peer,
            topics: policy.topics,
            exclude: policy.exclude,
            deletions: policy.deletions,
            rate_bytes_max: (policy.rate_bytes_max > 0).then_some(policy.rate_bytes_max),
            congestion: policy.congestion,
            paused: policy.paused,
            default: !policy.stored,
            linked: policy.linked,
        }
    }
}

impl Policy {
    fn rate(&self) -> String {
        self.rate_bytes_max.map_or("no limit".to_owned(), |rate| format!("{}/s", bytes(rate)))
    }

    fn text(&self) -> String {
        let origin = match (self.default, self.linked) {
            (true, _) => "  (default)",
            (false, true) => "",
            (false, false) => "  (the mirror has no such link)",
        };
        let mut out = format!("link to {}{origin}\n", self.peer);
        for (name, value) in [
            ("topics", listed(&self.topics)),
            ("exclude", listed(&self.exclude)),
            ("lanes", self.lanes.to_owned()),
            ("deletions", self.deletions.to_string()),
            ("rate", self.rate()),
            ("congestion", self.congestion.clone()),
            ("paused", self.paused.to_string()),
        ] {
            out.push_str(&format!("  {name:<10}  {value}\n"));
        }
        out
    }
}

fn listed(patterns: &[String]) -> String {
    if patterns.is_empty() { "none".to_owned() } else { patterns.join(",") }
}

async fn list(args: ListArgs) -> anyhow::Result<()> {
    let mut control = Region::new(&args.server)?.control().await?;
    let policies = policies(&mut control).await?;
    show(args.output.output, &policies, || {
        let mut table =
            Table::new(&["PEER", "TOPICS", "EXCLUDE", "LANES", "DELETIONS", "RATE", "CONGESTION", ""]);
        for policy in &policies {
            let note = match (policy.paused, policy.linked) {
                (true, _) => "paused",
                (false, true) => "",
                (false, false) => "the mirror has no such link",
            };
            table.row([
                policy.peer.clone(),
                listed(&policy.topics),
                listed(&policy.exclude),
                policy.lanes.to_owned(),
                policy.deletions.to_string(),
                policy.rate(),
                policy.congestion.clone(),
                note.to_owned(),
            ]);
        }
        if table.is_empty() { "no links\n".to_owned() } else { table.text() }
    })?;
    Ok(())
}

async fn show_one(args: LinkPeer) -> anyhow::Result<()> {
    let mut control = Region::new(&args.server)?.control().await?;
    let found = policies(&mut control).await?.into_iter().find(|policy| policy.peer == args.peer);
    let Some(policy) = found else {
        bail!("there is no link to {}; `sealane mirror link list` shows what there is", args.peer);
    };
    show(args.output.output, &policy, || policy.text())?;
    Ok(())
}

async fn policies(control: &mut control::Client) -> anyhow::Result<Vec<Policy>> {
    let answer = control.list_links(v1::ListLinksRequest {}).await?.into_inner();
    Ok(answer.links.into_iter().map(Policy::from).collect())
}

async fn set(args: LinkSet) -> anyhow::Result<()> {
    let mut control = Region::new(&args.server)?.control().await?;
    let answer = control.set_link(request(args.peer, args.change)).await?.into_inner();
    for warning in answer.warnings {
        eprintln!("warning: {warning}");
    }
    let policy = Policy::from(answer.link.unwrap_or_default());
    show(args.output.output, &policy, || policy.text())?;
    Ok(())
}

fn request(peer: String, change: LinkChange) -> v1::SetLinkRequest {
    let patterns = |list: Vec<String>| {
        // What is left of an empty option value.
        let named = list.into_iter().filter(|pattern| !pattern.is_empty());
        v1::PatternList { patterns: named.collect() }
    };
    let congestion = |congestion| match congestion {
        LinkCongestion::Auto => "auto",
        LinkCongestion::Bbr => "bbr",
        LinkCongestion::Cubic => "cubic",
    };
    v1::SetLinkRequest {
        peer,
        topics: change.topics.map(patterns),
        exclude: change.exclude.map(patterns),
        boe_lanes: change.lanes.map(|lanes| matches!(lanes, LinkLanes::Boe | LinkLanes::All)),
        ppe_lanes: change.lanes.map(|lanes| matches!(lanes, LinkLanes::Ppe | LinkLanes::All)),
        deletions: change.deletions,
        paused: (change.pause || change.resume).then_some(change.pause),
        rate_bytes_max: change.rate,
        congestion: change.congestion.map(|chosen| congestion(chosen).to_owned()),
    }
}

#[derive(Serialize)]
struct Deleted {
    peer: String,
}

async fn delete(args: LinkPeer) -> anyhow::Result<()> {
    let mut control = Region::new(&args.server)?.control().await?;
    let answer = control.delete_link(v1::DeleteLinkRequest { peer: args.peer.clone() }).await?.into_inner();
    for warning in answer.warnings {
        eprintln!("warning: {warning}");
    }
    let deleted = Deleted { peer: args.peer };
    show(args.output.output, &deleted, || format!("the link to {} is at its default\n", deleted.peer))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_policy_reads_well() {
        let policy = Policy::from(v1::LinkPolicy {
            peer: "west".to_owned(),
            topics: vec!["orders.*".to_owned(), "pay".to_owned()],
            boe_lanes: true,
            rate_bytes_max: 1 << 20,
            congestion: "auto".to_owned(),
            stored: true,
            linked: true,
            ..v1::LinkPolicy::default()
        });
        assert_eq!(
            policy.text(),
            "link to west\n  topics      orders.*,pay\n  exclude     none\n  lanes       boe\n  deletions   false\n  \
             rate        1.0 MiB/s\n  congestion  auto\n  paused      false\n"
        );
    }
}
