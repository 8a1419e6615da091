//! What is installed: kustomize and Helm make the same objects, the API server takes them and the examples, and refuses
//! what `sealane lint` refuses. The control plane alone is enough.

#![cfg(feature = "kubernetes")]

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Result, ensure};
use e2e::kubernetes::{Region, binaries, manifests, script, scripts, with_report};
use e2e::process::binary;

/// The objects of a kustomization, each as text in one order of keys.
fn kustomize(folder: &Path) -> Result<BTreeSet<String>> {
    let text = script(Command::new(binaries()?.join("kubectl")).arg("kustomize").arg(folder))?;
    let objects = text.split("\n---\n").map(|object| object.trim().to_owned());
    // Helm makes the namespace by `--create-namespace`.
    Ok(objects.filter(|object| !object.lines().any(|line| line == "kind: Namespace")).collect())
}

/// The objects of the chart, brought into the same form.
fn helm(values: &[&str]) -> Result<BTreeSet<String>> {
    let mut command = Command::new(binaries()?.join("helm"));
    command.args(["template", "sealane"]).arg(manifests().join("helm"));
    let text = script(command.args(["--namespace", "sealane-system", "--include-crds"]).args(values))?;
    let dir = tempfile::tempdir()?;
    fs::write(dir.path().join("all.yaml"), text)?;
    fs::write(dir.path().join("kustomization.yaml"), "resources: [all.yaml]\n")?;
    kustomize(dir.path())
}

#[test]
fn helm_and_kustomize_make_the_same_objects() -> Result<()> {
    script(Command::new("bash").arg(scripts().join("build.sh")))?;
    for (folder, values) in [("install", &[][..]), ("install/cluster-wide", &["--set", "clusterWide=true"])] {
        let (ours, chart) = (kustomize(&manifests().join(folder))?, helm(values)?);
        let differing: Vec<&String> = ours.symmetric_difference(&chart).collect();
        ensure!(ours.len() >= 13 && differing.is_empty(), "{folder}: these differ: {differing:#?}");
    }
    // The twin: what is not the same is seen.
    let other = helm(&["--set", "image=other:1"])?;
    ensure!(kustomize(&manifests().join("install"))? != other, "a differing image was not noticed");
    Ok(())
}

/// An object that is wrong, and what both judges must say.
const WRONG: &[(&str, &str)] = &[
    (
        "kind: BrokerCluster\nspec: {region: EAST, storage: {type: Disk, size: 1Gi}, metadata: {type: Embedded}, listeners: [{name: plain, port: 9092}]}",
        "spec.region",
    ),
    (
        "kind: BrokerCluster\nspec: {region: east, storage: {type: Disk}, metadata: {type: Embedded}, listeners: [{name: plain, port: 9092}]}",
        "spec.storage.size is needed",
    ),
    (
        "kind: BrokerCluster\nspec: {region: east, storage: {type: Disk, size: 1Gi}, metadata: {type: Etcd, endpoints: ['http://etcd:2379']}, listeners: [{name: plain, port: 9092}]}",
        "Embedded goes with",
    ),
    (
        "kind: BrokerCluster\nspec: {region: east, storage: {type: Disk, size: 1Gi}, metadata: {type: Embedded}, listeners: [{name: out, port: 9092, type: NodePort}]}",
        "insecure: true",
    ),
    ("kind: Topic\nspec: {clusterRef: {name: east}, partitions: 0}", "spec.partitions"),
    ("kind: Topic\nspec: {clusterRef: {name: east}, topicName: __own}", "spec.topicName"),
    ("kind: Lane\nspec: {clusterRef: {name: east}, class: PPE, name: cart}", "begins with ppe"),
    (
        "kind: MirrorLink\nspec: {clusterRef: {name: east}, peer: west, tokenSecretRef: {name: a}, grantRef: {namespace: a, name: a}}",
        "spec.grantRef",
    ),
    ("kind: LaneRouter\nspec: {clusterRef: {name: east}, type: NodePort}", "spec.insecure: true"),
];

#[test]
fn the_api_server_takes_and_refuses_what_lint_takes_and_refuses() -> Result<()> {
    let region = Region::control_plane()?;
    with_report(&region, || {
        let kubectl = region.kubectl();
        kubectl.run(&["apply", "-k", &manifests().join("install").display().to_string()])?;
        kubectl.run(&["wait", "--for=condition=Established", "crd", "--all", "--timeout=120s"])?;
        let dir = tempfile::tempdir()?;
        for (number, (object, wanted)) in WRONG.iter().enumerate() {
            let object = format!(
                "apiVersion: sealane.io/v1alpha1\nmetadata: {{name: wrong, namespace: default}}\n{object}\n"
            );
            let refusal = kubectl.refused(&object)?;
            ensure!(refusal.contains(wanted), "the API server does not say {wanted:?} but {refusal:?}");
            let file = dir.path().join(format!("{number}.yaml"));
            fs::write(&file, &object)?;
            let linted = Command::new(binary()?).arg("lint").arg(&file).output()?;
            let said = String::from_utf8_lossy(&linted.stdout).into_owned();
            ensure!(
                !linted.status.success() && said.contains(wanted),
                "lint does not say {wanted:?} but {said:?}"
            );
        }
        let examples = [
            "one-region.yaml",
            "two-regions/east.yaml",
            "two-regions/west.yaml",
            "lanes.yaml",
            "many-brokers.yaml",
        ];
        for example in examples {
            let file = manifests().join("examples").join(example);
            script(Command::new(binary()?).arg("lint").arg(&file))?;
            kubectl.run(&["apply", "-f", &file.display().to_string()])?;
        }
        // An immutable field is told by its name.
        let change = r#"{"spec":{"region":"north"}}"#;
        let changed =
            kubectl.output(&["patch", "-n", "sealane", "bc", "east", "--type=merge", "-p", change])?;
        let said = String::from_utf8_lossy(&changed.stderr).into_owned();
        ensure!(!changed.status.success() && said.contains("spec.region is immutable"), "{said}");
        Ok(())
    })
}
