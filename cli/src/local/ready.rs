//! When `sealane local` is ready, and what it then tells a person.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use control::v1;
use kafka_client::{Cluster, ConnectOptions, Endpoint};
use tokio::time::sleep;

use super::plan::RegionPlan;
use crate::output::Table;

/// Returns when every region would take a produce: asked from outside, over its Kafka port.
pub async fn wait(plans: &[RegionPlan]) -> anyhow::Result<()> {
    for plan in plans {
        let started = Instant::now();
        while let Err(error) = probe(plan, plans.len()).await {
            if started.elapsed() > PROBE_TIMEOUT {
                return Err(error).with_context(|| format!("region {} does not come up", plan.name));
            }
            sleep(PROBE_PAUSE).await;
        }
    }
    Ok(())
}

async fn probe(plan: &RegionPlan, regions: usize) -> anyhow::Result<()> {
    let endpoint = Endpoint::new(plan.host.to_string(), plan.kafka);
    let cluster = Cluster::new(vec![endpoint], ConnectOptions::default());
    // A topic without a leader is one that could not be opened: the broker's log says why, and it keeps
    // nobody from the others.
    cluster.topics().await?;
    if plan.host.is_loopback() {
        let mut control = control::connect(&plan.address(plan.control), None).await?;
        let info = control.cluster_info(v1::ClusterInfoRequest {}).await?.into_inner();
        if info.lane_routers == 0 {
            bail!("the lane-router has not connected to the control service");
        }
        let status = control.mirror_status(v1::MirrorStatusRequest {}).await?.into_inner();
        let down =
            |link: &&v1::Link| matches!(link.state(), v1::LinkState::Connecting | v1::LinkState::Unspecified);
        if status.links.len() + 1 < regions {
            bail!("the mirror has not reported its links");
        }
        if let Some(link) = status.links.iter().find(down) {
            bail!("the link to {} is not up: {}", link.peer, link.reason);
        }
    }
    Ok(())
}

/// Addresses, what to try, and last the line `ready`.
pub fn announce(plans: &[RegionPlan], data: &Path, ephemeral: bool) {
    let mut table = Table::new(&["REGION", "KAFKA", "LANE-ROUTER", "CONTROL", "HTTP", "MIRROR", "LANES"]);
    for plan in plans {
        table.row([
            plan.name.clone(),
            plan.address(plan.kafka),
            plan.address(plan.lane_router),
            plan.address(plan.control),
            format!("http://{}", plan.address(plan.http)),
            format!("{}/udp", plan.address(plan.mirror)),
            format!("{}-{}", plan.address(plan.lanes_first), plan.lanes_last),
        ]);
    }
    let kept = if ephemeral { " (deleted at the end)" } else { "" };
    let sealane = std::env::args().next().unwrap_or("sealane".to_owned());
    let first = plans.first().map(|plan| plan.address(plan.kafka)).unwrap_or_default();
    let last = plans.last().map(|plan| plan.address(plan.kafka)).unwrap_or_default();
    println!("{}\ndata: {}{kept}\n", table.text(), data.display());
    println!("Try it, in another terminal:");
    println!("  echo hello | {sealane} produce greetings --server {first}");
    println!("  {sealane} consume greetings --from-beginning --count 1 --server {last}");
    println!("\nready");
}

const PROBE_TIMEOUT: Duration = Duration::from_secs(20);
const PROBE_PAUSE: Duration = Duration::from_millis(50);
