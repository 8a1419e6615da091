//! The crate edges that must stay absent, read from `cargo metadata`, and the dependencies that are banned.
//! A crate exists to keep a dependency out; this test is what keeps it out.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

/// The layers, lowest first. A crate may use only crates of lower layers.
const LAYERS: &[&[&str]] = &[
    &["kafka", "chassis", "test-ports"],
    &["lane-core", "control"],
    &["broker-core", "broker-store", "kafka-client"],
    &["broker", "mirror", "lane-router"],
    &["operator"],
    &["sealane", "e2e"],
];

/// (crate, what it must not reach, even through others).
const ABSENT: &[(&str, &[&str])] = &[
    ("mirror", &["broker", "broker-core", "broker-store"]),
    ("lane-router", &["broker", "broker-core", "broker-store"]),
    ("broker-core", &["broker-store"]),
    ("broker-store", &["broker-core", "kafka"]),
    ("chassis", &["kafka", "kafka-client", "kafka-protocol"]),
    ("e2e", &["kafka", "kafka-client", "broker", "broker-core", "broker-store", "mirror", "lane-router"]),
];

/// Crates of pure decisions, and what they must never see.
const PURE: &[&str] = &["kafka", "lane-core", "broker-core"];
const IMPURE: &[&str] =
    &["tokio", "mio", "socket2", "rustix", "quinn", "tonic", "hyper", "rand", "fastrand", "time"];

/// Native TLS libraries: TLS is rustls on ring.
const BANNED: &[&str] = &["openssl", "openssl-sys", "native-tls", "aws-lc-rs", "aws-lc-sys"];

struct Graph {
    members: BTreeSet<String>,
    /// Ordinary and build dependencies, not those of tests.
    edges: BTreeMap<String, BTreeSet<String>>,
    /// Every package of the tree, by name.
    packages: BTreeSet<String>,
}

impl Graph {
    fn read() -> Result<Graph> {
        let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let output = Command::new("cargo")
            .args([
                "metadata",
                "--format-version",
                "1",
                "--locked",
                "--all-features",
                "--filter-platform",
                "x86_64-unknown-linux-gnu",
            ])
            .current_dir(workspace)
            .output()?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let metadata: Value = serde_json::from_slice(&output.stdout)?;
        let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let mut names = BTreeMap::new();
        for package in list(&metadata["packages"]) {
            names.insert(text(&package["id"]), text(&package["name"]));
        }
        let name = |id: &Value| names.get(&text(id)).cloned().unwrap_or_default();
        let members = list(&metadata["workspace_members"]).iter().map(name).collect();
        let mut edges: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for node in list(&metadata["resolve"]["nodes"]) {
            let from = edges.entry(name(&node["id"])).or_default();
            for edge in list(&node["deps"]) {
                if list(&edge["dep_kinds"]).iter().any(|kind| kind["kind"].as_str() != Some("dev")) {
                    from.insert(name(&edge["pkg"]));
                }
            }
        }
        Ok(Graph { members, edges, packages: names.into_values().collect() })
    }

    /// Everything that `from` reaches.
    fn reach(&self, from: &str) -> BTreeSet<String> {
        let mut seen = BTreeSet::new();
        let mut next = vec![from.to_owned()];
        while let Some(name) = next.pop() {
            for to in self.edges.get(&name).into_iter().flatten() {
                if seen.insert(to.clone()) {
                    next.push(to.clone());
                }
            }
        }
        seen
    }
}

#[test]
fn no_crate_uses_one_of_its_own_layer_or_above() -> Result<()> {
    let graph = Graph::read()?;
    let layer = |name: &str| LAYERS.iter().position(|layer| layer.contains(&name));
    for member in &graph.members {
        let own = layer(member).with_context(|| format!("crate {member} stands in no layer"))?;
        for used in graph.edges.get(member).into_iter().flatten().filter(|used| graph.members.contains(*used))
        {
            ensure!(layer(used).is_some_and(|below| below < own), "{member} uses {used}");
        }
    }
    Ok(())
}

#[test]
fn the_edges_that_must_stay_absent_are_absent() -> Result<()> {
    let graph = Graph::read()?;
    for (from, absent) in ABSENT {
        ensure!(graph.members.contains(*from), "no crate {from}");
        let reach = graph.reach(from);
        for to in *absent {
            ensure!(!reach.contains(*to), "{from} reaches {to}");
        }
    }
    Ok(())
}

#[test]
fn pure_crates_see_no_runtime_no_sockets_no_clock_and_no_randomness() -> Result<()> {
    let graph = Graph::read()?;
    for pure in PURE {
        let reach = graph.reach(pure);
        for impure in IMPURE {
            ensure!(!reach.contains(*impure), "{pure} reaches {impure}");
        }
    }
    Ok(())
}

#[test]
fn tls_is_rustls_on_ring_alone() -> Result<()> {
    let graph = Graph::read()?;
    for banned in BANNED {
        ensure!(!graph.packages.contains(*banned), "{banned} is in the tree");
    }
    Ok(())
}
