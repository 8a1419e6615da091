//! `sealane broker|mirror|lane-router`: one service in one process, from a configuration file.

use std::convert::identity;
use std::future::Future;
use std::time::Duration;

use anyhow::Context as _;
use chassis::config::{self, ConfigError, Documented};
use chassis::{Process, Registry, RunError, ServiceHandle};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::net::TcpListener;

use crate::args::Service;

pub async fn broker(args: Service) -> anyhow::Result<()> {
    let Some(config) = read::<broker::Config>(args, BROKER_TITLE, identity)? else { return Ok(()) };
    let grace = Duration::from_secs(config.drain_seconds.into());
    run("broker", grace, |service| async {
        broker::service::start(config, service).await?;
        Ok(())
    })
    .await
}

pub async fn mirror(args: Service) -> anyhow::Result<()> {
    let explain = mirror::config::with_moved_keys;
    let Some(config) = read::<mirror::Config>(args, MIRROR_TITLE, explain)? else { return Ok(()) };
    run("mirror", GRACE, |service| async {
        serve_http(&service, &config.http_bind).await?;
        mirror::start(config, service).await?;
        Ok(())
    })
    .await
}

pub async fn lane_router(args: Service) -> anyhow::Result<()> {
    let Some(config) = read::<lane_router::Config>(args, LANE_ROUTER_TITLE, identity)? else { return Ok(()) };
    run("lane-router", GRACE, |service| async {
        serve_http(&service, &config.http_bind).await?;
        lane_router::start(config, service).await?;
        Ok(())
    })
    .await
}

/// Runs one service until a signal or the first dead task.
pub async fn run<F>(name: &str, grace: Duration, start: impl FnOnce(ServiceHandle) -> F) -> anyhow::Result<()>
where
    F: Future<Output = anyhow::Result<()>>,
{
    raise_file_limit();
    let process = Process::new();
    let service = process.service(name, &Registry::new());
    finished(process.run(grace, start(service)).await)
}

pub async fn serve_http(service: &ServiceHandle, address: &str) -> anyhow::Result<()> {
    if address.is_empty() {
        return Ok(());
    }
    let named = || format!("http_bind {address}");
    let listener = TcpListener::bind(address).await.with_context(named)?;
    chassis::admin::serve(service, listener, Vec::new()).with_context(named)?;
    Ok(())
}

/// The end of a process as the command's result.
pub fn finished<E: Into<anyhow::Error>>(result: Result<(), RunError<E>>) -> anyhow::Result<()> {
    match result {
        Ok(()) => Ok(()),
        Err(RunError::Start(error)) => Err(error.into()),
        Err(RunError::Task(failure)) => Err(failure.into()),
        Err(RunError::Grace { unfinished, grace }) => {
            anyhow::bail!("{unfinished} tasks did not stop within {grace:?} and were cut off")
        }
    }
}

/// The configuration, or `None` where it was only to be printed.
fn read<T: DeserializeOwned + Serialize + Default + Documented>(
    args: Service,
    title: &str,
    explain: fn(ConfigError) -> ConfigError,
) -> anyhow::Result<Option<T>> {
    if args.print_config {
        print!("{}", config::print::<T>(title));
        return Ok(None);
    }
    let path = args.config.context("--config is missing")?;
    Ok(Some(config::load(&path).map_err(explain)?))
}

/// Segments and connections are files: as many as the system allows.
pub fn raise_file_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }) {
        tracing::warn!("the limit of open files stays at {:?}: {error}", limit.current);
    }
}

pub const BROKER_TITLE: &str = "sealane broker --config FILE";
pub const MIRROR_TITLE: &str = "sealane mirror --config FILE";
pub const LANE_ROUTER_TITLE: &str = "sealane lane-router --config FILE";
/// For connections to end at a stop.
const GRACE: Duration = Duration::from_secs(20);
