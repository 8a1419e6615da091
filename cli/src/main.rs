//! The one binary: a subcommand per service, and the commands of a person.
//!
//! Owns the order of things: arguments, log, runtime, command, one line for an error, exit code (0
//! done, 1 failed, 2 wrong arguments).

mod advice;
mod args;
mod cluster;
mod consume;
#[cfg(test)]
mod docs;
mod group;
mod lane;
mod local;
mod mirror_link;
mod mirror_status;
#[cfg(feature = "operator")]
mod operator;
mod output;
mod produce;
mod region;
mod service;
mod topic;

use std::process::ExitCode;

use chassis::telemetry::LogOptions;
use clap::Parser as _;

use crate::args::{Cli, Command, Mirror, MirrorCommand};

fn main() -> ExitCode {
    let cli = Cli::parse();
    match run(cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if is_closed_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("sealane: {}", advice::line(&error));
            ExitCode::FAILURE
        }
    }
}

fn run(cli: Cli) -> anyhow::Result<()> {
    let levels = cli.log.clone().unwrap_or_else(|| default_levels(&cli.command).to_owned());
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let handle = runtime.handle().clone();
    let inside = handle.enter();
    let telemetry = chassis::telemetry::init(&LogOptions {
        levels,
        format: cli.log_format.into(),
        #[cfg(feature = "otel")]
        otlp: cli.otlp.clone(),
        #[cfg(not(feature = "otel"))]
        otlp: None,
    })?;
    let result = runtime.block_on(dispatch(cli.command));
    drop((telemetry, inside));
    // What is blocked in a read of standard input must not hold the end up.
    runtime.shutdown_background();
    result
}

async fn dispatch(command: Command) -> anyhow::Result<()> {
    match command {
        Command::Lane(command) => lane::run(command).await,
        Command::Topic(command) => topic::run(command).await,
        Command::Group(command) => group::run(command).await,
        Command::Cluster(command) => cluster::run(command).await,
        Command::Produce(args) => produce::run(args).await,
        Command::Consume(args) => consume::run(args).await,
        Command::Mirror(MirrorCommand { command: Some(Mirror::Status(args)), .. }) => {
            mirror_status::run(args).await
        }
        Command::Mirror(MirrorCommand { command: Some(Mirror::Link(command)), .. }) => {
            mirror_link::run(command).await
        }
        Command::Local(args) => local::run(args).await,
        #[cfg(feature = "operator")]
        Command::Operator(args) => operator::run(args).await,
        #[cfg(feature = "operator")]
        Command::Lint(args) => operator::lint(&args),
        #[cfg(feature = "operator")]
        Command::Crds => operator::crds(),
        Command::Broker(args) => service::broker(args).await,
        Command::LaneRouter(args) => service::lane_router(args).await,
        Command::Mirror(MirrorCommand { service, command: None }) => service::mirror(service).await,
    }
}

fn default_levels(command: &Command) -> &'static str {
    match command {
        // The library tells each of its own attempts; what is being done about a store is told once.
        Command::Broker(_) => "info,object_store=warn",
        Command::LaneRouter(_) => "info",
        Command::Mirror(mirror) if mirror.command.is_none() => "info",
        #[cfg(feature = "operator")]
        // The library tells each request that failed as an error; what came of it is told where it is handled.
        Command::Operator(_) => "info,kube_client::client::builder=off",
        _ => "warn",
    }
}

/// `sealane consume t | head` ends well.
fn is_closed_pipe(error: &anyhow::Error) -> bool {
    let io = error.chain().find_map(|cause| cause.downcast_ref::<std::io::Error>());
    io.is_some_and(|error| error.kind() == std::io::ErrorKind::BrokenPipe)
}
