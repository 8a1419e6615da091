//! `cluster s3|hdfs [brokers]`: etcd, a store and brokers on loopback, until SIGTERM or SIGINT. For a person who wants
//! to look at one; `just up` and `just down` start and stop it.

use anyhow::{Context, Result, bail, ensure};
use e2e::cluster::{Cluster, Store};
use tokio::signal::unix::{SignalKind, signal};

const USAGE: &str = "usage: cluster s3|hdfs [brokers, 1 to 4]";

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let Some(store) = arguments.next() else { bail!(USAGE) };
    ensure!(["s3", "hdfs"].contains(&store.as_str()), USAGE);
    let brokers: u16 = arguments.next().map_or(Ok(3), |text| text.parse()).context(USAGE)?;
    ensure!((1..=4).contains(&brokers), USAGE);
    let cluster = Cluster::start(Store::named(&store)?, brokers, "")?;
    println!("etcd     {}", cluster.etcd.endpoints().join(","));
    println!("store    {}", cluster.store_url());
    for broker in 0..brokers {
        println!("broker   {}", cluster.address(broker));
    }
    println!("logs     {}", cluster.dir().display());
    println!("try      sealane cluster status --server {}", cluster.address(0));
    println!("ready");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let (mut term, mut int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        tokio::select! {
            _ = term.recv() => {}
            _ = int.recv() => {}
        }
        Ok(())
    })
    // What it started is ended, and its files are removed, as the cluster is dropped.
}
