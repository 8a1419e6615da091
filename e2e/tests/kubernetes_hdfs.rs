//! A cluster of many brokers on a real node, on etcd and HDFS: restarted and scaled under load, and a DataNode killed under
//! it, and nothing is lost.

#![cfg(feature = "kubernetes")]

use anyhow::{Result, ensure};
use e2e::kubernetes::{Load, Many, Region, Stores, Story, with_report};

#[test]
fn brokers_on_hdfs_are_restarted_and_scaled_and_a_data_node_lost_under_load_and_nothing_is_missing()
-> Result<()> {
    let region = Region::with_node()?;
    let many = Many::rise_on(region, Stores::start_hdfs()?)?;
    with_report(&many.region, || {
        let kubectl = many.kubectl();
        let first = many.named_as_they_say(3)?;
        let pods = Story::of(kubectl, "sealane", "pods")?;
        let load = Load::start(&many.bootstrap(), "orders")?;
        load.until_more(300)?;

        many.restart_each(&pods, &first)?;
        load.until_more(300)?;

        many.stores.lose_data_node(0)?;
        load.until_more(300)?;
        many.scale(4)?;
        kubectl.wait_condition("sealane", "brokerpool/east", "Ready", "True")?;
        many.named_as_they_say(4)?;
        many.everybody_owns_something()?;
        load.until_more(300)?;
        many.scale(3)?;
        kubectl.wait_condition("sealane", "brokerpool/east", "Ready", "True")?;
        many.ready()?;
        ensure!(many.named_as_they_say(3)? == first, "others than these were kept");
        load.until_more(300)?;
        println!("{} records, each there once", load.judge()?);
        many.region.judge_logs()
    })
}
