//! Lanes from outside of a real cluster: a LaneRouter whose ports are ports of the node, for real clients that are not in
//! it; one behind a load balancer, by TLS with client certificates; and what is told of a lane and of its routers.

#![cfg(feature = "kubernetes")]

use std::fs;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use e2e::clients::{Library, Record, Running};
use e2e::kubernetes::{
    Kubectl, Region, grouped, lane, lane_router, manifests, script, wait_for, with_report,
};
use e2e::tools;

#[test]
fn a_lane_is_entered_from_outside_through_nodes_and_load_balancers() -> Result<()> {
    tools::kcat()?;
    let region = Region::with_operator()?;
    with_report(&region, || {
        let kubectl = region.kubectl();
        let example = fs::read_to_string(manifests().join("examples/one-region.yaml"))?;
        let lanes = "  metadata: {type: Embedded}\n  lanes: {default: true, portFirst: 31100}\n";
        kubectl.apply(&example.replace("  metadata: {type: Embedded}\n", lanes))?;
        kubectl.wait_condition("sealane", "topic.sealane.io/orders", "Ready", "True")?;
        kubectl.apply(&lane_router("nodes", "type: NodePort, port: 31093, insecure: true"))?;
        kubectl.apply(&lane("boe-cart", "BOE"))?;
        kubectl.apply(&lane("ppe-next", "PPE"))?;
        kubectl.wait_condition("sealane", "lanerouter/nodes", "Ready", "True")?;
        let outside = format!("{}:30092", region.address());
        let cart = kubectl.lane_outside("boe-cart")?;
        ensure!(cart.starts_with(&format!("{}:311", region.address())), "the lane is told at {cart}");
        records_go_where_they_belong(kubectl, &outside, &cart)?;
        a_preview_is_seen_by_nobody_else(kubectl, &outside)?;
        each_lane_has_a_grace_of_its_own(kubectl)?;
        through_a_load_balancer(&region)?;
        region.judge_logs()
    })
}

fn produce(server: &str, text: &str, lane: Option<&str>) -> Result<()> {
    let record = Record { value: Some(text.into()), ..Record::default() }.partition(0);
    let record = lane.map_or(record.clone(), |lane| record.header("x-lane", lane));
    wait_for(&format!("{text:?} to be taken"), || {
        Library::Confluent.produce_all(server, "orders", std::slice::from_ref(&record), &[]).map(Some)
    })
    .map(drop)
}

/// Waits for this as the last, and then wants exactly these.
fn got(reader: &Running, wanted: &[&str]) -> Result<()> {
    let texts = || -> Vec<String> { reader.records().iter().map(Record::text).collect() };
    wait_for(&format!("{wanted:?}"), || {
        let texts = texts();
        let last = wanted.last().copied();
        ensure!(texts.last().map(String::as_str) == last, "it got {texts:?}; {}", reader.complaints());
        Ok(Some(()))
    })?;
    ensure!(texts() == wanted, "it got {:?}, not {wanted:?}", texts());
    Ok(())
}

fn records_go_where_they_belong(kubectl: &Kubectl, outside: &str, cart: &str) -> Result<()> {
    let baseline = grouped(Library::Confluent, outside, "orders", "shop")?;
    let mut in_lane = grouped(Library::Java, cart, "orders", "shop")?;
    kubectl.wait_condition("sealane", "lane/boe-cart", "Ready", "True")?;
    produce(outside, "plain 1", None)?;
    produce(outside, "cart 1", Some("boe-cart"))?;
    // A workload of the lane names no lane: the router does.
    produce(cart, "cart 2", None)?;
    produce(outside, "plain 2", None)?;
    got(&in_lane, &["cart 1", "cart 2"])?;
    got(&baseline, &["plain 1", "plain 2"])?;
    let lane = kubectl.object("sealane", "lane/boe-cart")?["status"].take();
    ensure!(lane["phase"] == "Active" && lane["groups"].to_string().contains("shop"), "it is told {lane}");
    let cuts = lane["lastCuts"].to_string();
    ensure!(cuts.contains("shop: orders-0 from offset") && !cuts.contains(" to "), "its cuts are {cuts}");

    // Its consumer goes without a word; when the grace is over the baseline takes what comes.
    in_lane.kill();
    wait_for("the lane to be idle", || {
        let lane = kubectl.object("sealane", "lane/boe-cart")?["status"].take();
        ensure!(lane["phase"] == "Idle", "it is told {lane}");
        Ok(Some(()))
    })?;
    kubectl.wait_condition("sealane", "lane/boe-cart", "Ready", "False")?;
    wait_for("the cut to be told", || {
        let cuts = kubectl.object("sealane", "lane/boe-cart")?["status"]["lastCuts"].to_string();
        ensure!(cuts.contains("shop: orders-0 from offset") && cuts.contains(" to "), "its cuts are {cuts}");
        Ok(Some(()))
    })?;
    produce(outside, "cart 3", Some("boe-cart"))?;
    got(&baseline, &["plain 1", "plain 2", "cart 3"])
}

fn a_preview_is_seen_by_nobody_else(kubectl: &Kubectl, outside: &str) -> Result<()> {
    let preview = kubectl.lane_outside("ppe-next")?;
    produce(outside, "next 1", Some("ppe-next"))?;
    let baseline = grouped(Library::Confluent, outside, "orders", "report")?;
    produce(outside, "plain 3", None)?;
    got(&baseline, &["plain 1", "cart 1", "cart 2", "plain 2", "cart 3", "plain 3"])?;
    let in_lane = grouped(Library::Confluent, &preview, "orders", "report")?;
    produce(outside, "next 2", Some("ppe-next"))?;
    produce(outside, "plain 4", None)?;
    wait_for("the preview's own", || {
        let texts: Vec<String> = in_lane.records().iter().map(Record::text).collect();
        ensure!(texts.iter().any(|text| text == "next 2"), "it got {texts:?}; {}", in_lane.complaints());
        ensure!(texts.iter().all(|text| text.starts_with("next")), "it got what is not its own: {texts:?}");
        Ok(Some(()))
    })?;
    wait_for("the baseline's last", || {
        let texts: Vec<String> = baseline.records().iter().map(Record::text).collect();
        ensure!(texts.iter().all(|text| !text.starts_with("next")), "it saw the preview: {texts:?}");
        Ok(texts.iter().any(|text| text == "plain 4").then_some(()))
    })
}

/// Both lose their consumers at one moment and without a word: one is handed over, the other waits on.
fn each_lane_has_a_grace_of_its_own(kubectl: &Kubectl) -> Result<()> {
    let mut consumers = Vec::new();
    for (name, grace) in [("boe-short", 1), ("boe-long", 3600)] {
        let object = lane(name, "BOE").replace(", class", &format!(", graceSeconds: {grace}, class"));
        kubectl.apply(&object)?;
        let address = kubectl.lane_outside(name)?;
        consumers.push(grouped(Library::Confluent, &address, "orders", name)?);
        kubectl.wait_condition("sealane", &format!("lane/{name}"), "Ready", "True")?;
    }
    consumers.iter_mut().for_each(Running::kill);
    let phase = |name: &str| -> Result<String> {
        let lane = kubectl.object("sealane", &format!("lane/{name}"))?["status"].take();
        Ok(lane["phase"].as_str().unwrap_or_default().to_owned())
    };
    wait_for("the short grace to be over", || Ok((phase("boe-short")? == "Idle").then_some(())))?;
    wait_for("the long one to run", || Ok((phase("boe-long")? == "Grace").then_some(())))?;
    ensure!(phase("boe-short")? == "Idle", "it is not over any more");
    kubectl.run(&["delete", "-n", "sealane", "lane/boe-short", "lane/boe-long"]).map(drop)
}

/// The test plays the load balancers' controller. The lane is told by the name in the client's certificate's stead: its port.
fn through_a_load_balancer(region: &Region) -> Result<()> {
    let kubectl = region.kubectl();
    let net = format!("10.251.{}", region.number());
    script(Command::new("ip").args(["route", "replace", &format!("{net}.0/24"), "via", &region.address()]))?;
    kubectl.run(&["delete", "-n", "sealane", "lanerouter/nodes"])?;
    let secure = "type: LoadBalancer, tls: {generate: true}, authentication: {type: TLS}";
    kubectl.apply(&lane_router("balanced", secure))?;
    kubectl.wait_reason("sealane", "lanerouter/balanced", "EndpointPending")?;
    let given = format!(r#"{{"status":{{"loadBalancer":{{"ingress":[{{"ip":"{net}.7"}}]}}}}}}"#);
    let patch = ["patch", "service", "balanced-lane-router", "-n", "sealane", "--subresource=status"];
    kubectl.run(&[&patch[..], &["--type=merge", "-p", &given]].concat())?;
    kubectl.wait_condition("sealane", "lanerouter/balanced", "Ready", "True")?;
    let cart = wait_for("the lane behind the load balancer", || {
        let cart = kubectl.lane_outside("boe-cart")?;
        ensure!(cart.starts_with(&format!("{net}.7:")), "it is at {cart}");
        Ok(Some(cart))
    })?;
    let dir = tempfile::tempdir()?;
    for (key, file) in [("ca.crt", "ca"), ("tls.crt", "cert"), ("tls.key", "key")] {
        fs::write(dir.path().join(file), kubectl.secret("sealane", "east-client-tls", key)?)?;
    }
    let file = |name: &str| dir.path().join(name).display().to_string();
    let kcat = |text: &str, certificate: bool| {
        let shown = match certificate {
            true => {
                format!("-X ssl.certificate.location={} -X ssl.key.location={}", file("cert"), file("key"))
            }
            false => String::new(),
        };
        let command = format!(
            "echo '{text}' | timeout 60 kcat -P -b {cart} -t orders -p 0 -X security.protocol=ssl -X ssl.ca.location={} \
             -X message.timeout.ms=8000 {shown}",
            file("ca")
        );
        script(Command::new("bash").args(["-euo", "pipefail", "-c", &command]))
    };
    wait_for("a record through the load balancer", || kcat("balanced", true).map(Some))?;
    // The twin: nobody gets in without a certificate.
    if kcat("uninvited", false).is_ok() {
        bail!("{cart} took a record of a client without a certificate");
    }
    // Whom the lane names may enter, and nobody else, certificate or not.
    let admit = |name: &str| {
        let change = format!(r#"{{"spec":{{"principals":["{name}"]}}}}"#);
        kubectl.run(&["patch", "-n", "sealane", "lane/boe-cart", "--type=merge", "-p", &change])
    };
    admit("till")?;
    wait_for("the lane to refuse a certificate that it does not name", || {
        Ok(kcat("not admitted", true).is_err().then_some(()))
    })?;
    admit("sealane-client")?;
    wait_for("a record of one that it names", || kcat("admitted", true).map(Some))?;
    let outside = format!("{}:30092", region.address());
    // To a group without a consumer in the lane its records come.
    let audit = grouped(Library::Confluent, &outside, "orders", "audit")?;
    let records = wait_for("what came through the load balancer", || {
        let records = audit.records();
        Ok(records.iter().any(|record| record.text() == "balanced").then_some(records))
    })?;
    let balanced = records.iter().find(|record| record.text() == "balanced").context("it was there")?;
    let lane =
        balanced.headers.iter().find(|(name, _)| name == "x-lane").and_then(|(_, value)| value.clone());
    ensure!(lane.as_deref() == Some(b"boe-cart"), "the router named the lane {lane:?}");
    ensure!(records.iter().all(|record| record.text() != "uninvited"), "it is in the topic");
    Ok(())
}
