//! The Kubernetes operator: one per region, without credentials for another region and without a say
//! in what the data plane does while it is away.
//!
//! `crd` are the resources; each controller observes, makes a plan (pure) and carries it out through
//! `context` and `apply`, where everything is written. `lint` judges files as the API server would.

pub mod apply;
pub mod cluster;
pub mod conditions;
pub mod config;
pub mod context;
pub mod controller;
pub mod crd;
pub mod dataplane;
pub mod failure;
pub mod join;
pub mod lane;
mod leader;
mod leave;
pub mod link;
pub mod lint;
pub mod liveness;
pub mod names;
pub mod region;
mod switches;
mod topics;
pub mod watch;

use std::sync::Arc;
use std::time::Duration;

use chassis::ServiceHandle;
use k8s_openapi::api::coordination::v1::Lease;
use kube::{Api, Client};

pub use config::Config;
use context::Context;
use leader::Leadership;

/// Why the operator does not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("no way to a Kubernetes API server: {0}; run in a pod, or set KUBECONFIG")]
    Client(String),
}

/// Starts the operator as tasks of `service` and returns when its watches run.
pub async fn start(config: Config, service: ServiceHandle) -> Result<(), StartError> {
    for name in switches::all_set() {
        tracing::warn!(%name, "a safety mechanism is switched off for a test");
    }
    let client = connect(&config).await?;
    let own = client.default_namespace().to_owned();
    let me = identity();
    let lease_namespace = or(&config.lease_namespace, &own);
    let seconds = Duration::from_secs(u64::from(config.lease_seconds.max(3)));
    let leader = Arc::new(Leadership::new(&config.lease_name, me.clone(), seconds));
    let namespaces = match (config.cluster_wide, config.namespaces.is_empty()) {
        (true, _) => Vec::new(),
        (false, true) => vec![own],
        (false, false) => config.namespaces.clone(),
    };
    let cx = Context::new(client.clone(), config, namespaces, leader.clone(), service.clone(), &me);
    let cx = Arc::new(cx);
    observe(&cx);
    lead(&cx, leader, Api::namespaced(client, &lease_namespace));
    controllers(&cx);
    service.set_ready(true);
    let namespaces = if cx.namespaces.is_empty() { "all".to_owned() } else { cx.namespaces.join(", ") };
    tracing::info!(namespaces, "operator ready");
    Ok(())
}

/// The way to the API server. A connection on which nothing comes is given up, and what waits on it begins again on
/// another: what lies between may have forgotten it without a word to either end. Every watch hears something each minute.
async fn connect(config: &Config) -> Result<Client, StartError> {
    let unreachable = |error: &dyn std::error::Error| StartError::Client(innermost(error));
    let mut way = kube::Config::infer().await.map_err(|error| unreachable(&error))?;
    if !switches::deadline_off() {
        let silence = Duration::from_secs(u64::from(config.watch_silence_seconds)).mul_f32(DEADLINE_PART);
        way.read_timeout = Some(silence.max(DEADLINE_MIN));
        way.reset_reader_on_write = true;
    }
    Client::try_from(way).map_err(|error| unreachable(&error))
}

/// Every controller of the operator.
fn controllers(cx: &Arc<Context>) {
    cluster::start(cx);
    topics::start(cx);
    link::start(cx);
    lane::start(cx);
}

/// Takes and keeps the Lease.
fn lead(cx: &Arc<Context>, leader: Arc<Leadership>, api: Api<Lease>) {
    let (liveness, stop) = (cx.liveness.clone(), cx.service.stopping().clone());
    let (keeper, leases) = (leader.clone(), api.clone());
    cx.service.spawn("leader election", async move {
        let keeping = keeper.keep(leases, || liveness.heard("the Lease"));
        stop.run_until_cancelled(keeping).await.unwrap_or(Ok(()))
    });
    let stop = cx.service.back_stopping().clone();
    cx.service.spawn_back("leader release", async move {
        stop.cancelled().await;
        // Nothing is lost where the API server does not answer.
        let _ = tokio::time::timeout(RELEASE, leader.release(&api)).await;
        Ok::<(), std::convert::Infallible>(())
    });
}

/// Probes and metrics.
fn observe(cx: &Arc<Context>) {
    let liveness = cx.liveness.clone();
    cx.service.on_probe(move || liveness.troubles());
    let watched = Arc::downgrade(cx);
    cx.service.metrics().on_scrape(move |scrape| {
        let Some(cx) = watched.upgrade() else { return };
        let leads = f64::from(u8::from(cx.leader.is_held()));
        scrape.gauge("sealane_operator_leader", "1 while this operator writes.", &[], leads);
        for (name, age) in cx.liveness.ages() {
            let help = "Seconds since a watch was last heard.";
            scrape.gauge("sealane_operator_watch_age_seconds", help, &[("watch", &name)], age);
        }
    });
}

/// A name of its own for every process, so that a restarted one is not taken for its former self.
fn identity() -> String {
    let host = std::env::var("POD_NAME").or_else(|_| std::env::var("HOSTNAME"));
    let word = uuid::Uuid::new_v4().simple().to_string();
    format!("{}-{}", host.as_deref().unwrap_or("operator"), &word[..8])
}

fn or(value: &str, other: &str) -> String {
    if value.is_empty() { other.to_owned() } else { value.to_owned() }
}

/// The cause that says something.
fn innermost(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    cause.to_string()
}

const RELEASE: Duration = Duration::from_secs(2);
/// Of the silence that makes a watch dead: it is to be back before.
const DEADLINE_PART: f32 = 2.0 / 3.0;
/// Longer than from one bookmark of a watch to the next.
const DEADLINE_MIN: Duration = Duration::from_secs(75);
