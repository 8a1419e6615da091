//! Listeners that leave the cluster as they should: TLS with client certificates, through a port of nodes and through load
//! balancers. A test plays the load balancers' controller: it gives each Service an address that leads to the node.

#![cfg(feature = "kubernetes")]

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use e2e::kubernetes::{Kubectl, Many, Region, condition, script, wait_for, with_report};
use e2e::tools;

const LISTENERS: &str = r#"[
 {"op":"add","path":"/spec/listeners/-","value":{"name":"secure","port":9292,"type":"NodePort","nodePort":30292,
  "tls":{"generate":true},"authentication":{"type":"TLS"}}},
 {"op":"add","path":"/spec/listeners/-","value":{"name":"balanced","port":9392,"type":"LoadBalancer",
  "tls":{"generate":true},"authentication":{"type":"TLS"}}}]"#;

#[test]
fn clients_outside_come_with_certificates_through_nodes_and_load_balancers() -> Result<()> {
    tools::kcat()?;
    let many = Many::rise(Region::with_node()?)?;
    let balancers = Balancers::to(&many.region)?;
    with_report(&many.region, || {
        let kubectl = many.kubectl();
        kubectl.run(&["patch", "-n", "sealane", "brokercluster/east", "--type=json", "-p", LISTENERS])?;
        let given = balancers.give(kubectl, 4)?;
        wait_for("both listeners at all brokers", || {
            let cluster = kubectl.object("sealane", "brokercluster/east")?;
            let ready = condition(&cluster, "Ready").context("no condition yet")?;
            let files = kubectl.object("sealane", "configmap/east-config")?["data"].to_string();
            let told = given.values().filter(|address| files.contains(&format!("{address}:9392"))).count();
            let settled = condition(&cluster, "Progressing").is_some_and(|found| found["status"] == "False");
            ensure!(ready["status"] == "True" && settled && told == 3, "{told} addresses are told; {ready}");
            Ok(Some(()))
        })?;
        let dir = tempfile::tempdir()?;
        for (key, file) in [("ca.crt", "ca"), ("tls.crt", "cert"), ("tls.key", "key")] {
            std::fs::write(dir.path().join(file), kubectl.secret("sealane", "east-client-tls", key)?)?;
        }
        let node = format!("{}:30292", many.region.address());
        let balanced = format!("{}:9392", given.get("east-balanced").context("the listener's own Service")?);
        for server in [&node, &balanced] {
            let line = format!("through {server}");
            wait_for(&line, || kcat(dir.path(), server, "-P", &line, true).map(Some))?;
            // A broker that was restarted before the last address was given gets a certificate with it from its kubelet.
            wait_for(&format!("{line:?} to be read"), || {
                let read = kcat(dir.path(), server, "-C", "", true)?;
                ensure!(read.lines().any(|found| found == line), "{line:?} is not in {read:?}");
                Ok(Some(()))
            })?;
            // The twin: nobody gets in without a certificate.
            match kcat(dir.path(), server, "-P", "uninvited", false) {
                Err(_) => {}
                Ok(_) => bail!("{server} took a record of a client without a certificate"),
            }
        }
        let read = wait_for("all records", || kcat(dir.path(), &node, "-C", "", true).map(Some))?;
        ensure!(!read.contains("uninvited"), "it is there: {read}");
        // Each broker has a way of its own, and tells it.
        let told =
            wait_for("the brokers' addresses", || kcat(dir.path(), &balanced, "-L", "", true).map(Some))?;
        let own: Vec<&String> =
            given.iter().filter(|(name, _)| *name != "east-balanced").map(|(_, at)| at).collect();
        ensure!(own.iter().all(|address| told.contains(address.as_str())), "{own:?} are not all in {told}");
        many.region.judge_logs()
    })
}

fn kcat(dir: &Path, server: &str, action: &str, line: &str, certificate: bool) -> Result<String> {
    let file = |name: &str| dir.join(name).display().to_string();
    let shown = match certificate {
        true => format!("-X ssl.certificate.location={} -X ssl.key.location={}", file("cert"), file("key")),
        false => String::new(),
    };
    let topic = if action == "-L" { "" } else { "-t orders" };
    let end = if action == "-C" { "-o beginning -e -q" } else { "" };
    let text = format!(
        "echo '{line}' | timeout 60 kcat {action} -b {server} {topic} {end} -m 20 -X security.protocol=ssl \
         -X ssl.ca.location={} -X message.timeout.ms=8000 {shown}",
        file("ca")
    );
    script(Command::new("bash").args(["-euo", "pipefail", "-c", &text]))
}

/// Addresses that lead to a region's node.
struct Balancers {
    net: String,
}

impl Balancers {
    fn to(region: &Region) -> Result<Balancers> {
        let net = format!("10.251.{}", region.number());
        let route = format!("{net}.0/24");
        script(Command::new("ip").args(["route", "replace", &route, "via", &region.address()]))?;
        Ok(Balancers { net })
    }

    /// Gives each Service of type LoadBalancer an address, once there are so many; by name.
    fn give(&self, kubectl: &Kubectl, count: usize) -> Result<BTreeMap<String, String>> {
        let services = wait_for("the Services of the load balancers", || {
            let mut all = kubectl.list("sealane", "services")?;
            all.retain(|service| service["spec"]["type"] == "LoadBalancer");
            ensure!(all.len() == count, "there are {}", all.len());
            Ok(Some(all))
        })?;
        let mut given = BTreeMap::new();
        for (number, service) in (1..).zip(services) {
            let name = service["metadata"]["name"].as_str().context("a name")?.to_owned();
            let address = format!("{}.{number}", self.net);
            let status = format!(r#"{{"status":{{"loadBalancer":{{"ingress":[{{"ip":"{address}"}}]}}}}}}"#);
            let patch =
                ["patch", "service", &name, "-n", "sealane", "--subresource=status", "--type=merge", "-p"];
            kubectl.run(&[&patch[..], &[&status]].concat())?;
            given.insert(name, address);
        }
        Ok(given)
    }
}

impl Drop for Balancers {
    fn drop(&mut self) {
        // It goes with the node's link in any case.
        let _ = script(Command::new("ip").args(["route", "del", &format!("{}.0/24", self.net)]));
    }
}
