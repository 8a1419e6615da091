//! `cluster s3|hdfs [brokers]`: etcd, a store and brokers on loopback, until the process group is ended. For a person
//! who wants to look at one; `just up` and `just down` start and stop it.

use std::time::Duration;

use anyhow::{Result, bail, ensure};
use e2e::cluster::{Cluster, Store};

const USAGE: &str = "usage: cluster s3|hdfs [brokers, 1 to 4]";

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let store = match arguments.next().as_deref() {
        Some("s3") => Store::s3()?,
        Some("hdfs") => Store::hdfs()?,
        _ => bail!(USAGE),
    };
    let brokers: u16 = arguments.next().map_or(Ok(3), |text| text.parse())?;
    ensure!((1..=4).contains(&brokers), USAGE);
    let cluster = Cluster::start(store, brokers, "")?;
    println!("etcd     {}", cluster.etcd.endpoints().join(","));
    for broker in 0..brokers {
        println!("broker   127.0.0.1:{}", cluster.port(broker));
    }
    println!("try      sealane cluster status --server 127.0.0.1:{}", cluster.port(0));
    println!("ready");
    loop {
        std::thread::sleep(Duration::from_secs(3600));
    }
}
