//! `sealane local`: all regions in one process, on embedded stores, each with broker, mirror,
//! lane-router and HTTP endpoint.
//!
//! Owns the wiring alone: the services are the same as in processes of their own, and speak to each
//! other over real sockets. Brokers start first and stop last.

pub mod plan;
mod ready;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use broker::config::{ListenerConfig, Storage};
use broker::partition::Durability;
use chassis::certs::CertificateDir;
use chassis::tls::{ClientAuth, TlsFiles};
use chassis::{Process, Registry, ServiceHandle};
use tokio::net::TcpListener;

use crate::args::{DurabilityArg, Local};
use crate::service::{finished, raise_file_limit};
use plan::{RegionPlan, plan};

pub async fn run(args: Local) -> anyhow::Result<()> {
    raise_file_limit();
    let plans = plan(&args.regions, &args.host, args.port_base)?;
    // Kept until the end: dropping it deletes the directory.
    let temporary = match args.ephemeral {
        true => Some(tempfile::tempdir().context("--ephemeral: no temporary directory")?),
        false => None,
    };
    let data = temporary.as_ref().map_or(args.data.clone(), |dir| dir.path().to_owned());
    let process = Process::new();
    let result = process.run(GRACE, start(&process, &plans, &data, &args)).await;
    finished(result)
}

async fn start(process: &Process, plans: &[RegionPlan], data: &Path, args: &Local) -> anyhow::Result<()> {
    std::fs::create_dir_all(data).with_context(|| format!("--data {}", data.display()))?;
    let certificates = Certificates::open(data, plans)?;
    let mut regions = Vec::new();
    for plan in plans {
        regions.push(Region::start(process, plan, data, args, &certificates).await?);
    }
    for (region, plan) in regions.iter_mut().zip(plans) {
        region.start_rest(process, plan, plans, &certificates).await?;
    }
    for (region, plan) in regions.iter().zip(plans) {
        region.serve_http(plan).await?;
    }
    ready::wait(plans).await?;
    ready::announce(plans, data, args.ephemeral);
    Ok(())
}

/// One authority for all regions of this process, and a certificate per role.
struct Certificates {
    broker: TlsFiles,
    mirror: TlsFiles,
    lane_router: TlsFiles,
}

impl Certificates {
    fn open(data: &Path, plans: &[RegionPlan]) -> anyhow::Result<Certificates> {
        let dir = CertificateDir::open(&data.join("tls"))?;
        let hosts: Vec<String> = plans.iter().map(|plan| plan.host.to_string()).collect();
        let mut hosts: Vec<&str> = hosts.iter().map(String::as_str).collect();
        hosts.dedup();
        hosts.push("localhost");
        // For people, where the control service needs a certificate.
        dir.leaf("sealane-control", &[])?;
        Ok(Certificates {
            broker: dir.leaf("sealane-broker", &hosts)?,
            mirror: dir.leaf("sealane-mirror", &hosts)?,
            lane_router: dir.leaf("sealane-lane-router", &hosts)?,
        })
    }
}

/// The services of one region.
struct Region {
    registry: Registry,
    services: Vec<ServiceHandle>,
}

impl Region {
    /// Starts the broker.
    async fn start(
        process: &Process,
        plan: &RegionPlan,
        data: &Path,
        args: &Local,
        certificates: &Certificates,
    ) -> anyhow::Result<Region> {
        let registry = Registry::new();
        let service = process.service(&format!("broker {}", plan.name), &registry);
        let config = broker_config(plan, data.join(&plan.name), args, certificates);
        let started = broker::service::start(config, service.clone()).await;
        started.with_context(|| format!("region {}", plan.name))?;
        Ok(Region { registry, services: vec![service] })
    }

    /// Starts what needs brokers.
    async fn start_rest(
        &mut self,
        process: &Process,
        plan: &RegionPlan,
        plans: &[RegionPlan],
        certificates: &Certificates,
    ) -> anyhow::Result<()> {
        let named = || format!("region {}", plan.name);
        let mirror = process.service(&format!("mirror {}", plan.name), &self.registry);
        self.services.push(mirror.clone());
        mirror::start(mirror_config(plan, plans, certificates), mirror).await.with_context(named)?;
        let router = process.service(&format!("lane-router {}", plan.name), &self.registry);
        self.services.push(router.clone());
        lane_router::start(router_config(plan, certificates), router).await.with_context(named)?;
        Ok(())
    }

    async fn serve_http(&self, plan: &RegionPlan) -> anyhow::Result<()> {
        let address = plan.address(plan.http);
        let named = || format!("region {}: HTTP endpoint {address}", plan.name);
        let listener = TcpListener::bind(&address).await.with_context(named)?;
        chassis::admin::serve(&self.services[0], listener, self.services.clone()).with_context(named)?;
        Ok(())
    }
}

fn broker_config(
    plan: &RegionPlan,
    data_dir: PathBuf,
    args: &Local,
    certificates: &Certificates,
) -> broker::Config {
    let kafka = ListenerConfig {
        name: "kafka".to_owned(),
        bind: plan.address(plan.kafka),
        ..ListenerConfig::default()
    };
    let internal = ListenerConfig {
        name: "internal".to_owned(),
        bind: plan.address(plan.internal),
        tls: Some(certificates.broker.clone()),
        client_auth: ClientAuth::Required,
        internal: true,
        ..ListenerConfig::default()
    };
    broker::Config {
        data_dir,
        storage: if args.lose_unsynced { Storage::Volatile } else { Storage::Disk },
        durability: match args.durability {
            DurabilityArg::Sync => Durability::Sync,
            DurabilityArg::Os => Durability::Os,
        },
        region: plan.name.clone(),
        listeners: vec![kafka, internal],
        control_bind: plan.address(plan.control),
        control_tls: (!plan.host.is_loopback()).then(|| certificates.broker.clone()),
        // All services of the region share one endpoint.
        http_bind: String::new(),
        lane_port_first: plan.lanes_first,
        lane_port_count: plan.lanes_last - plan.lanes_first + 1,
        lane_host: plan.host.to_string(),
        lane_shared_address: plan.address(plan.lane_router),
        ..broker::Config::default()
    }
}

/// Links to every other region, over UDP. Of two regions the one that starts later dials: the other is
/// there to answer.
fn mirror_config(plan: &RegionPlan, plans: &[RegionPlan], certificates: &Certificates) -> mirror::Config {
    let own = plans.iter().position(|other| other == plan);
    let link = |(index, peer): (usize, &RegionPlan)| mirror::LinkConfig {
        peer: peer.name.clone(),
        address: (own > Some(index)).then(|| peer.address(peer.mirror)),
        ca: None,
        server_name: Some(MIRROR_NAME.to_owned()),
    };
    mirror::Config {
        broker: plan.address(plan.internal),
        broker_server_name: Some(BROKER_NAME.to_owned()),
        tls: certificates.mirror.clone(),
        bind: plan.address(plan.mirror),
        links: plans.iter().enumerate().filter(|(_, peer)| *peer != plan).map(link).collect(),
        ..mirror::Config::default()
    }
}

fn router_config(plan: &RegionPlan, certificates: &Certificates) -> lane_router::Config {
    lane_router::Config {
        broker: plan.address(plan.internal),
        broker_server_name: Some(BROKER_NAME.to_owned()),
        tls: certificates.lane_router.clone(),
        control: plan.address(plan.control),
        control_tls: !plan.host.is_loopback(),
        bind: plan.address(plan.lane_router),
        lane_bind_host: plan.host.to_string(),
        advertised_host: plan.host.to_string(),
        ..lane_router::Config::default()
    }
}

/// What every broker's certificate is valid for.
const BROKER_NAME: &str = "sealane-broker";
const MIRROR_NAME: &str = "sealane-mirror";
/// For connections to end and data to be flushed.
const GRACE: Duration = Duration::from_secs(20);
