//! Mistakes and faults on a real node: each is told by a condition with a reason, destroys nothing, and is healed when the
//! spec is mended; and the data plane does not notice that its operator is away.

#![cfg(feature = "kubernetes")]

use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use e2e::kubernetes::{Kubectl, Region, condition, manifests, script, wait_for, with_report};
use e2e::process::binary;
use e2e::tools;

fn installed() -> Result<Region> {
    tools::kcat()?;
    let region = Region::with_node()?;
    region.give_image(&binary()?, "0.1.0")?;
    region.kubectl().run(&["apply", "-k", &manifests().join("install").display().to_string()])?;
    Ok(region)
}

/// Waits for this reason of the condition Ready.
fn reason(kubectl: &Kubectl, what: &str, wanted: &str) -> Result<()> {
    wait_for(&format!("{wanted} of {what}"), || {
        let found = condition(&kubectl.object("sealane", what)?, "Ready").context("no condition yet")?;
        if found["reason"] == wanted && !found["message"].as_str().unwrap_or_default().is_empty() {
            return Ok(Some(()));
        }
        bail!("it is {found}")
    })
}

fn patch(kubectl: &Kubectl, what: &str, change: &str) -> Result<()> {
    kubectl.run(&["patch", "-n", "sealane", what, "--type=merge", "-p", change]).map(drop)
}

fn kcat(region: &Region, script_end: &str) -> Result<String> {
    let text = script_end.replace("SERVER", &format!("{}:30092", region.address()));
    script(Command::new("bash").args(["-euo", "pipefail", "-c", &text]))
}

#[test]
fn each_mistake_has_a_reason_destroys_nothing_and_is_healed() -> Result<()> {
    let region = installed()?;
    with_report(&region, || {
        let kubectl = region.kubectl();
        let example = std::fs::read_to_string(manifests().join("examples/one-region.yaml"))?;
        // Somebody else's Service has the name that the operator needs.
        let foreign = "apiVersion: v1\nkind: Service\nmetadata: {name: east-plain, namespace: sealane}\nspec: {ports: [{port: 1}]}\n";
        kubectl.apply("apiVersion: v1\nkind: Namespace\nmetadata: {name: sealane}\n")?;
        kubectl.apply(foreign)?;
        kubectl.apply(&example)?;
        reason(kubectl, "brokercluster/east", "NameTaken")?;
        ensure!(
            kubectl.object("sealane", "service/east-plain")?["spec"]["ports"][0]["port"] == 1,
            "it was taken over"
        );
        kubectl.run(&["delete", "-n", "sealane", "service", "east-plain"])?;
        kubectl.wait_condition("sealane", "brokercluster/east", "Ready", "True")?;
        kubectl.wait_condition("sealane", "topic.sealane.io/orders", "Ready", "True")?;
        kcat(
            &region,
            "for _ in $(seq 50); do echo kept | kcat -P -b SERVER -t orders && break; sleep 0.2; done",
        )?;

        patch(kubectl, "brokercluster/east", r#"{"spec":{"image":"localhost/sealane:none"}}"#)?;
        reason(kubectl, "brokercluster/east", "ImageUnavailable")?;
        patch(kubectl, "brokercluster/east", r#"{"spec":{"image":"localhost/sealane:0.1.0"}}"#)?;
        // A StatefulSet does not take a pod back that never ran: the operator must.
        kubectl.wait_condition("sealane", "brokercluster/east", "Ready", "True")?;

        patch(kubectl, "brokerpool/east", r#"{"spec":{"replicas":2}}"#)?;
        reason(kubectl, "brokercluster/east", "TooManyBrokers")?;
        patch(kubectl, "brokerpool/east", r#"{"spec":{"replicas":1}}"#)?;
        kubectl.wait_condition("sealane", "brokercluster/east", "Ready", "True")?;

        let topic = "apiVersion: sealane.io/v1alpha1\nkind: Topic\nmetadata: {name: again, namespace: sealane}\nspec: {clusterRef: {name: east}, topicName: orders, deletionPolicy: Delete}\n";
        kubectl.apply(topic)?;
        reason(kubectl, "topic.sealane.io/again", "Conflict")?;
        kubectl.run(&["delete", "-n", "sealane", "topic.sealane.io", "again"])?;
        let link = "apiVersion: sealane.io/v1alpha1\nkind: MirrorLink\nmetadata: {name: west, namespace: sealane}\nspec: {clusterRef: {name: east}, peer: west}\n";
        kubectl.apply(link)?;
        reason(kubectl, "mirrorlink/west", "NoMirror")?;

        let read = kcat(&region, "kcat -C -b SERVER -t orders -o beginning -e -q")?;
        ensure!(read.lines().any(|line| line == "kept"), "the record is gone: {read:?}");
        region.judge_logs()
    })
}

#[test]
fn the_data_plane_does_not_notice_that_operator_and_api_server_are_away() -> Result<()> {
    let region = installed()?;
    with_report(&region, || {
        let kubectl = region.kubectl();
        kubectl.run(&["apply", "-f", &manifests().join("examples/one-region.yaml").display().to_string()])?;
        kubectl.wait_condition("sealane", "brokercluster/east", "Ready", "True")?;
        kubectl.wait_condition("sealane", "topic.sealane.io/orders", "Ready", "True")?;
        let produce = |line: &str| {
            kcat(
                &region,
                &format!(
                    "for _ in $(seq 50); do echo '{line}' | kcat -P -b SERVER -t orders && exit 0; sleep 0.2; done; exit 1"
                ),
            )
        };
        let pod = kubectl.object("sealane", "pod/east-0")?["metadata"]["uid"].clone();
        produce("before")?;
        region.kill("kube-apiserver")?;
        produce("while the API server is away")?;
        region.revive("kube-apiserver")?;
        kubectl.run(&["scale", "-n", "sealane-system", "deployment/sealane-operator", "--replicas=0"])?;
        wait_for("the operator to be away", || {
            Ok(kubectl.list("sealane-system", "pods")?.is_empty().then_some(()))
        })?;
        produce("while the operator is away")?;
        // Drift while it is away is mended when it is back, and only that.
        kubectl.run(&["delete", "-n", "sealane", "service", "east-plain"])?;
        kubectl.run(&["scale", "-n", "sealane-system", "deployment/sealane-operator", "--replicas=1"])?;
        wait_for("the Service", || kubectl.find("sealane", "service/east-plain"))?;
        ensure!(
            kubectl.object("sealane", "pod/east-0")?["metadata"]["uid"] == pod,
            "the broker was made anew"
        );
        let read = kcat(&region, "kcat -C -b SERVER -t orders -o beginning -e -q")?;
        for line in ["before", "while the API server is away", "while the operator is away"] {
            ensure!(
                read.lines().filter(|found| *found == line).count() == 1,
                "{line:?} is not there once: {read}"
            );
        }
        region.judge_logs()
    })
}
