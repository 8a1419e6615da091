//! Thousands of Topics on a real API server and a real broker: how soon they settle, what one that changes costs, and what the
//! operator does and holds when there is nothing to do. `SEALANE_TOPICS` is another number of them than the few of a test.

#![cfg(feature = "kubernetes")]

use std::fmt::Write as _;
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use e2e::kubernetes::{Kubectl, Operator, Region, Stand, alone, script, wait_for, with_report};
use e2e::{http, tools, usage};
use serde_json::Value;

const ACCOUNT: &str = "system:serviceaccount:sealane-system:sealane-operator";
const FEW: usize = 200;

#[test]
fn thousands_of_topics_settle_and_one_that_changes_costs_a_few_calls() -> Result<()> {
    let count = std::env::var("SEALANE_TOPICS").map_or(Ok(FEW), |count| count.parse())?;
    let region = Region::sea()?;
    with_report(&region, || {
        let kubectl = region.kubectl();
        kubectl.apply(&alone("sea", "east", ""))?;
        let first = Operator::start(&region, "sea")?;
        let stand = Stand::start(kubectl, "sea", "east")?;
        // From now on only Topics are looked at: a pod that no node takes would be asked for again and again.
        kubectl.run(&["annotate", "-n", "sea", "brokercluster/east", "sealane.io/paused=true"])?;
        kubectl.wait_condition("sea", "brokercluster/east", "Paused", "True")?;
        drop(first);

        let begun = Instant::now();
        make(&region, count)?;
        println!("{count} Topics were made in {:.1} s", begun.elapsed().as_secs_f64());
        let begun = Instant::now();
        let operator = Operator::start(&region, "sea")?;
        settled(kubectl, &operator, count)?;
        println!("{count} Topics settled {:.1} s after the operator began", begun.elapsed().as_secs_f64());

        one_change_is_a_few_calls(&region)?;
        idle(&region, &operator)?;
        drop(stand);
        Ok(())
    })
}

/// Makes so many objects side by side, which kubectl does not.
fn make(region: &Region, count: usize) -> Result<()> {
    let dir = tempfile::tempdir()?;
    let pki = region.kubeconfig().with_file_name("pki");
    let url = format!("https://{}:6443/apis/sealane.io/v1alpha1/namespaces/sea/topics", region.address());
    let mut config = String::new();
    for number in 0..count {
        if number > 0 {
            config.push_str("next\n");
        }
        let topic = format!(
            r#"{{\"apiVersion\":\"sealane.io/v1alpha1\",\"kind\":\"Topic\",\"metadata\":{{\"name\":\"t{number}\"}},\"spec\":{{\"clusterRef\":{{\"name\":\"east\"}}}}}}"#
        );
        let file = |name: &str| pki.join(name).display().to_string();
        write!(
            config,
            "url = \"{url}\"\ndata = \"{topic}\"\nheader = \"Content-Type: application/json\"\ncacert = \"{}\"\n\
             cert = \"{}\"\nkey = \"{}\"\noutput = \"/dev/null\"\nfail\n",
            file("ca.crt"),
            file("admin.crt"),
            file("admin.key"),
        )?;
    }
    let file = dir.path().join("curl");
    std::fs::write(&file, config)?;
    let curl = tools::program("curl", "curl")?;
    script(
        Command::new(curl)
            .args(["--silent", "--show-error", "--parallel", "--parallel-max", "16", "-K"])
            .arg(file),
    )
    .map(drop)
}

/// Each Topic's status is written when it has settled; then all of them are looked at.
fn settled(kubectl: &Kubectl, operator: &Operator, count: usize) -> Result<()> {
    let series = "sealane_operator_writes_total{verb=\"status\",kind=\"Topic\"}";
    wait_for("the statuses of all Topics", || {
        let written = http::metric(operator.port(), series)?;
        ensure!(written >= count as f64, "{written} of {count}");
        Ok(Some(()))
    })?;
    wait_for("all Topics to be ready", || {
        let path =
            "jsonpath={range .items[*]}{.status.conditions[?(@.type==\"Ready\")].status}{\"\\n\"}{end}";
        let ready = kubectl.run(&["get", "topics.sealane.io", "-n", "sea", "-o", path])?;
        let ready = ready.lines().filter(|line| *line == "True").count();
        ensure!(ready == count, "{ready} of {count} are ready");
        Ok(Some(()))
    })
}

/// What the operator has asked of the API server, but for its Lease: verb, resource and name.
fn calls(region: &Region) -> Result<Vec<String>> {
    let events = region.audit(ACCOUNT)?;
    let calls =
        events.iter().filter(|event| event["objectRef"]["resource"] != "leases" && event["verb"] != "watch");
    let shown = |event: &Value| {
        let object = &event["objectRef"];
        format!("{} {} {}", event["verb"], object["resource"], object["name"]).replace('"', "")
    };
    Ok(calls.map(shown).collect())
}

fn one_change_is_a_few_calls(region: &Region) -> Result<()> {
    let kubectl = region.kubectl();
    let before = quiet(region)?;
    let change = r#"{"spec":{"config":{"retention.ms":"3600000"}}}"#;
    kubectl.run(&["patch", "-n", "sea", "topics.sealane.io/t7", "--type=merge", "-p", change])?;
    wait_for("the change to be told", || {
        let topic = kubectl.object("sea", "topics.sealane.io/t7")?;
        Ok((topic["status"]["observedGeneration"] == 2).then_some(()))
    })?;
    let after = quiet(region)?;
    let made = after.get(before.len()..).context("the audit log grows")?;
    println!("one changed Topic: {made:?}");
    ensure!(made.iter().any(|call| call == "patch topics t7"), "its status was not written: {made:?}");
    ensure!(made.len() <= 6, "{} calls: {made:?}", made.len());
    ensure!(made.iter().all(|call| !call.contains("topics") || call.ends_with("t7")), "others: {made:?}");
    Ok(())
}

/// All calls, once there are no more for a while.
fn quiet(region: &Region) -> Result<Vec<String>> {
    wait_for("the operator to be quiet", || {
        let before = calls(region)?;
        sleep(Duration::from_secs(3));
        let after = calls(region)?;
        ensure!(after.len() == before.len(), "it goes on: {:?}", after.get(before.len()..));
        Ok(Some(after))
    })
}

/// Watched for as long as two Leases live: nothing but them is written, and little is held.
fn idle(region: &Region, operator: &Operator) -> Result<()> {
    let before = quiet(region)?;
    sleep(Duration::from_secs(10));
    let after = calls(region)?;
    ensure!(after.len() == before.len(), "an idle operator asked {:?}", after.get(before.len()..));
    let (own, all) = (usage::anonymous_bytes(operator.pid())? >> 20, usage::rss_bytes(operator.pid())? >> 20);
    println!("idle it holds {own} MiB, {all} MiB with the pages of its program");
    ensure!(own < 64, "an idle operator holds {own} MiB");
    Ok(())
}
