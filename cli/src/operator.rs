//! `sealane operator`, `sealane lint`, `sealane crds`: Kubernetes.

use std::time::Duration;

use anyhow::bail;
use operator::lint::{Report, Schemas};

use crate::args::{Lint, OperatorService};
use crate::service;

pub async fn run(args: OperatorService) -> anyhow::Result<()> {
    if args.print_config {
        print!("{}", chassis::config::print::<operator::Config>(OPERATOR_TITLE));
        return Ok(());
    }
    let config: operator::Config = match args.config {
        Some(path) => chassis::config::load(&path)?,
        None => operator::Config::default(),
    };
    let config = config.with_environment(|name| std::env::var(name).ok());
    service::run("operator", GRACE, |service| async {
        service::serve_http(&service, &config.http_bind).await?;
        operator::start(config, service).await?;
        Ok(())
    })
    .await
}

pub fn lint(args: &Lint) -> anyhow::Result<()> {
    let (schemas, mut report) = (Schemas::default(), Report::default());
    for file in &args.files {
        schemas.file(file, &mut report);
    }
    for finding in &report.findings {
        println!("{finding}");
    }
    let Report { findings, judged, others } = report;
    if !findings.is_empty() {
        bail!("{} wrong in {judged} objects", findings.len());
    }
    println!("{judged} objects are good, {others} are of other kinds");
    Ok(())
}

pub fn crds() -> anyhow::Result<()> {
    for definition in operator::crd::all() {
        println!("---\n{}", operator::crd::yaml(&definition).trim_end());
    }
    Ok(())
}

pub const OPERATOR_TITLE: &str = "sealane operator --config FILE";
/// For reconciliations that are under way.
const GRACE: Duration = Duration::from_secs(10);
