//! The operator as a process against a real API server, without nodes: what it writes and what it leaves alone. It has
//! the rights that `manifests/install` gives it and no others, and every answer that forbids something fails the test.

#![cfg(feature = "kubernetes")]

use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use e2e::http;
use e2e::kubernetes::{
    Kubectl, Operator, Region, alone, condition, manifests, place, silent_since, wait_for, with_report,
};
use e2e::process::binary;
use serde_json::Value;

#[path = "../../operator/src/crd/table.rs"]
mod table;

const ACCOUNT: &str = "system:serviceaccount:sealane-system:sealane-operator";

fn cluster(name: &str) -> String {
    alone("sea", name, "")
}

fn topic(name: &str, of: &str, cluster: &str) -> String {
    format!(
        r#"
apiVersion: sealane.io/v1alpha1
kind: Topic
metadata: {{name: {name}, namespace: sea}}
spec: {{clusterRef: {{name: {cluster}}}, topicName: {of}, deletionPolicy: Delete}}
"#
    )
}

#[test]
fn the_operator_writes_what_it_owns_once_and_leaves_the_rest_alone() -> Result<()> {
    let region = Region::sea()?;
    with_report(&region, || {
        let kubectl = region.kubectl();
        let first = Operator::start(&region, "sea")?;
        foreign_objects_stay_as_they_are(kubectl)?;
        a_look_that_finds_nothing_new_writes_nothing(&region)?;
        drift_is_repaired_and_labels_of_others_stay(kubectl)?;
        nothing_is_written_while_it_is_paused(kubectl)?;
        one_of_two_writes_and_the_other_follows(&region, first)?;
        nothing_was_forbidden(&region)
    })
}

#[test]
fn finalizers_hold_nobody_when_the_cluster_is_gone_or_empty() -> Result<()> {
    let region = Region::sea()?;
    with_report(&region, || {
        let kubectl = region.kubectl();
        let _operator = Operator::start(&region, "sea")?;
        two_claims_on_a_topic_are_told(kubectl)?;
        // The cluster first.
        kubectl.apply(&cluster("gone"))?;
        kubectl.apply(&topic("of-gone", "t", "gone"))?;
        kubectl.wait_condition("sea", "topics.sealane.io/of-gone", "Ready", "False")?;
        kubectl.run(&["delete", "-n", "sea", "brokercluster/gone"])?;
        kubectl.run(&["delete", "-n", "sea", "topics.sealane.io/of-gone", "--timeout=120s"])?;
        // A broker that is to be there is waited for, and that is told; one that is not to be is not.
        kubectl.apply(&cluster("empty"))?;
        kubectl.apply(&topic("of-empty", "t", "empty"))?;
        kubectl.wait_condition("sea", "topics.sealane.io/of-empty", "Ready", "False")?;
        kubectl.run(&["delete", "-n", "sea", "topics.sealane.io/of-empty", "--wait=false"])?;
        reason(kubectl, "topics.sealane.io/of-empty", "DeletionWaits")?;
        kubectl.run(&["scale", "-n", "sea", "brokerpool/empty", "--replicas=0"])?;
        kubectl.wait_gone("sea", "topics.sealane.io/of-empty")?;
        // All at once.
        kubectl.apply(&cluster("whole"))?;
        kubectl.apply(&topic("of-whole", "t", "whole"))?;
        kubectl.wait_condition("sea", "topics.sealane.io/of-whole", "Ready", "False")?;
        kubectl.run(&["delete", "namespace", "sea", "--timeout=120s"])?;
        Ok(())
    })
}

#[test]
fn an_api_server_that_was_away_is_heard_again_by_every_watch() -> Result<()> {
    let region = Region::sea()?;
    // `SEALANE_OUTAGE_SECONDS=600` is a long one.
    let long = std::env::var("SEALANE_OUTAGE_SECONDS").map_or(Ok(15), |seconds| seconds.parse())?;
    with_report(&region, || {
        let kubectl = region.kubectl();
        let operator = Operator::start(&region, "sea")?;
        // An API server that has just begun knows no roles for a moment.
        operator.allow_error("forbidden");
        kubectl.apply(&cluster("east"))?;
        reason(kubectl, "brokercluster/east", "Unschedulable")?;
        for seconds in [1, long] {
            region.kill("kube-apiserver")?;
            sleep(Duration::from_secs(seconds));
            // What is heard from now on is heard from the new one.
            let back = Instant::now();
            region.revive("kube-apiserver")?;
            wait_for("every watch to be heard again", || {
                let silent = silent_since(([127, 0, 0, 1], operator.port()).into(), back)?;
                ensure!(silent.is_empty(), "not heard since: {silent:?}");
                Ok(Some(()))
            })?;
            let heard = back.elapsed();
            change_port(kubectl)?;
            repaired(kubectl)?;
            println!(
                "away for {seconds} s: every watch was heard {:.1} s after its start, a change of another was repaired after {:.1} s",
                heard.as_secs_f64(),
                back.elapsed().as_secs_f64()
            );
            let (status, said) = http::get(operator.port(), "/livez")?;
            ensure!(status == 200, "/livez says {status}: {said}");
        }
        kubectl.apply(&topic("after", "t", "east"))?;
        reason(kubectl, "topics.sealane.io/after", "ClusterNotReady")
    })
}

#[test]
fn a_new_definition_keeps_what_was_stored_under_the_former_one() -> Result<()> {
    let region = Region::control_plane()?;
    with_report(&region, || {
        let kubectl = region.kubectl();
        let file = manifests().join("crd/brokerclusters.sealane.io.yaml").display().to_string();
        // As it was before it had this field.
        let text = kubectl.run(&["create", "--dry-run=client", "-o", "json", "-f", &file])?;
        let mut former: Value = serde_json::from_str(&text)?;
        let schema = &mut former["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"];
        let certificates = &mut schema["spec"]["properties"]["certificates"];
        for part in ["properties", "default"] {
            let removed = certificates[part].as_object_mut().context("an object")?.remove("settleSeconds");
            ensure!(removed.is_some(), "{part} has no such field any more: take a newer one");
        }
        kubectl.apply(&former.to_string())?;
        kubectl.established()?;
        kubectl.apply(place("sea").split("---").next().context("the namespace")?)?;
        let object = cluster("east");
        let object = object.split("---").next().context("the cluster")?;
        wait_for("the kind", || kubectl.apply(object).map(Some))?;
        let before = kubectl.object("sea", "brokercluster/east")?;
        ensure!(before["spec"]["certificates"]["settleSeconds"].is_null(), "{}", before["spec"]);

        kubectl.install()?;
        kubectl.apply(&place("sea"))?;
        wait_for("the new definition", || {
            let mut after = kubectl.object("sea", "brokercluster/east")?;
            let settle = after["spec"]["certificates"]["settleSeconds"].take();
            ensure!(settle == 300, "what is new has no default: {settle}");
            after["spec"]["certificates"].as_object_mut().context("an object")?.remove("settleSeconds");
            ensure!(after["spec"] == before["spec"], "{} became {}", before["spec"], after["spec"]);
            ensure!(after["metadata"]["uid"] == before["metadata"]["uid"], "it is another object");
            Ok(Some(()))
        })?;
        let _operator = Operator::start(&region, "sea")?;
        reason(kubectl, "brokercluster/east", "NoPool")
    })
}

#[test]
fn lint_and_the_api_server_agree_on_the_table() -> Result<()> {
    let region = Region::control_plane()?;
    with_report(&region, || {
        let kubectl = region.kubectl();
        kubectl.run(&["apply", "-k", &manifests().join("crd").display().to_string()])?;
        kubectl.established()?;
        let mut differ = Vec::new();
        for case in table::cases() {
            if let Some(old) = &case.old {
                kubectl.apply(&old.to_string())?;
            }
            let verb = if case.old.is_some() { "replace" } else { "create" };
            let asked = kubectl.feed(&[verb, "--dry-run=server", "-f", "-"], &case.object.to_string())?;
            let said = String::from_utf8_lossy(&asked.stderr).into_owned();
            let taken = asked.status.success();
            if taken != case.wrong.is_none() || case.wrong.is_some_and(|wrong| !said.contains(wrong)) {
                differ
                    .push(format!("{}: expected {:?}, the API server said {said:?}", case.name, case.wrong));
            }
            // What it replaces is not known to a file, so rules of transition are the API server's alone.
            if case.old.is_none() {
                let good = lint(&case.object)?;
                if good != taken {
                    differ.push(format!("{}: lint says {good}, the API server {taken}: {said}", case.name));
                }
            }
            if let Some(old) = &case.old {
                kubectl.feed(&["delete", "-f", "-"], &old.to_string())?;
            }
        }
        ensure!(differ.is_empty(), "{}", differ.join("\n"));
        Ok(())
    })
}

/// Case: redpanda-data/redpanda-operator#1493 (what comes after the operator is seen only when that is restarted).
#[test]
fn kinds_and_namespaces_that_come_later_are_looked_after_without_a_restart() -> Result<()> {
    let region = Region::control_plane()?;
    with_report(&region, || {
        let kubectl = region.kubectl();
        kubectl.run(&["apply", "-k", &manifests().join("install/operator").display().to_string()])?;
        kubectl.apply(&place("sea"))?;
        let operator = Operator::start(&region, "sea,lake")?;
        // A watch that has heard nothing for a while has asked in vain.
        wait_for("the operator to miss the kinds", || {
            let (_, metrics) = http::get(operator.port(), "/metrics")?;
            let of_sea = |line: &&str| line.starts_with("sealane_operator_watch_age_seconds{watch=\"sea/");
            let age = |line: &str| line.rsplit(' ').next().and_then(|age| age.parse::<f64>().ok());
            let ages: Vec<f64> = metrics.lines().filter(of_sea).filter_map(age).collect();
            Ok((!ages.is_empty() && ages.iter().all(|age| *age >= 2.0)).then_some(()))
        })?;
        kubectl.install()?;
        for namespace in ["sea", "lake"] {
            kubectl.apply(&place(namespace))?;
            kubectl.apply(&alone(namespace, "east", ""))?;
            kubectl.wait_reason(namespace, "brokercluster/east", "Unschedulable")?;
        }
        let (status, said) = http::get(operator.port(), "/livez")?;
        ensure!(status == 200, "/livez says {status}: {said}");
        operator.judge_log()
    })
}

/// Whether `sealane lint` takes it.
fn lint(object: &Value) -> Result<bool> {
    let file = tempfile::NamedTempFile::new()?;
    std::fs::write(&file, object.to_string())?;
    let output = Command::new(binary()?).arg("lint").arg(file.path()).output()?;
    ensure!(output.status.code().is_some_and(|code| code < 2), "lint ended with {}", output.status);
    Ok(output.status.success())
}

fn reason(kubectl: &Kubectl, what: &str, wanted: &str) -> Result<()> {
    kubectl.wait_reason("sea", what, wanted).map(drop)
}

fn foreign_objects_stay_as_they_are(kubectl: &Kubectl) -> Result<()> {
    let foreign = [
        "{apiVersion: v1, kind: Service, metadata: {name: east-plain, namespace: sea}, spec: {ports: [{port: 1}]}}",
        "{apiVersion: v1, kind: Secret, metadata: {name: east-authority, namespace: sea}, stringData: {a: b}}",
        "{apiVersion: v1, kind: ConfigMap, metadata: {name: east-config, namespace: sea}, data: {a: b}}",
        "{apiVersion: v1, kind: PersistentVolumeClaim, metadata: {name: data-east-0, namespace: sea}, \
         spec: {accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Gi}}}}",
    ];
    // In the order in which the operator needs them.
    let named = [
        "service/east-plain",
        "persistentvolumeclaim/data-east-0",
        "secret/east-authority",
        "configmap/east-config",
    ];
    kubectl.apply(&foreign.join("\n---\n"))?;
    let before: Result<Vec<Value>> = named.iter().map(|what| kubectl.object("sea", what)).collect();
    let before = before?;
    kubectl.apply(&cluster("east"))?;
    for (what, before) in named.iter().zip(before) {
        let name = what.split_once('/').map_or(*what, |(_, name)| name);
        wait_for(&format!("the cluster to name {name}"), || {
            let ready = condition(&kubectl.object("sea", "brokercluster/east")?, "Ready");
            let told = ready.as_ref().is_some_and(|ready| {
                ready["reason"] == "NameTaken"
                    && ready["message"].as_str().is_some_and(|text| text.contains(name))
            });
            ensure!(told, "it says {ready:?}");
            Ok(Some(()))
        })?;
        ensure!(kubectl.object("sea", what)? == before, "{what} was changed");
        kubectl.run(&["delete", "-n", "sea", what])?;
    }
    // Healed: all that is missing now is a node.
    reason(kubectl, "brokercluster/east", "Unschedulable")
}

/// Writes of the operator so far, but for its Lease. A question whether it may is none: nothing is stored.
fn writes(region: &Region) -> Result<Vec<String>> {
    let events = region.audit(ACCOUNT)?;
    let written = events.iter().filter(|event| {
        let verb = event["verb"].as_str().unwrap_or_default();
        let resource = event["objectRef"]["resource"].as_str().unwrap_or_default();
        !["get", "list", "watch"].contains(&verb)
            && !["leases", "selfsubjectaccessreviews"].contains(&resource)
    });
    let shown = |event: &Value| {
        let object = &event["objectRef"];
        format!("{} {} {} {}", event["verb"], object["resource"], object["name"], object["subresource"])
    };
    Ok(written.map(shown).collect())
}

/// How often the operator asked for the pods of a cluster, which it does at each look.
fn looks(region: &Region) -> Result<usize> {
    let events = region.audit(ACCOUNT)?;
    let looks = events
        .iter()
        .filter(|event| event["verb"] == "list" && event["objectRef"]["resource"] == "brokerpools");
    Ok(looks.count())
}

fn a_look_that_finds_nothing_new_writes_nothing(region: &Region) -> Result<()> {
    let kubectl = region.kubectl();
    // Until it has come to rest.
    let mut last = writes(region)?.len();
    wait_for("the operator to rest", || {
        sleep(Duration::from_secs(4));
        let now = writes(region)?.len();
        let rests = now == last;
        last = now;
        Ok(rests.then_some(()))
    })?;
    ensure!(last > 10, "the audit log shows {last} writes of all that was made: it is not read right");
    for round in 0..20 {
        let before = looks(region)?;
        kubectl.run(&[
            "annotate",
            "-n",
            "sea",
            "brokercluster/east",
            "--overwrite",
            &format!("look={round}"),
        ])?;
        wait_for("a look", || Ok((looks(region)? > before).then_some(())))?;
    }
    sleep(Duration::from_secs(1));
    let now = writes(region)?;
    ensure!(now.len() == last, "20 looks wrote {:?}", &now[last..]);
    Ok(())
}

fn port(kubectl: &Kubectl) -> Result<Value> {
    Ok(kubectl.object("sea", "service/east-plain")?["spec"]["ports"][0]["targetPort"].take())
}

fn change_port(kubectl: &Kubectl) -> Result<()> {
    let patch = r#"[{"op":"replace","path":"/spec/ports/0/targetPort","value":7777}]"#;
    kubectl.run(&["patch", "-n", "sea", "service/east-plain", "--type=json", "-p", patch]).map(drop)
}

fn repaired(kubectl: &Kubectl) -> Result<()> {
    wait_for("the Service to be as it was", || {
        let port = port(kubectl)?;
        ensure!(port == 9092, "its port is {port}");
        Ok(Some(()))
    })
}

fn drift_is_repaired_and_labels_of_others_stay(kubectl: &Kubectl) -> Result<()> {
    kubectl.run(&["label", "-n", "sea", "service/east-plain", "team=shop"])?;
    change_port(kubectl)?;
    repaired(kubectl)?;
    let service = kubectl.object("sea", "service/east-plain")?;
    ensure!(service["metadata"]["labels"]["team"] == "shop", "the label of another is gone");
    // What is deleted comes back.
    kubectl.run(&["delete", "-n", "sea", "poddisruptionbudget/east-brokers"])?;
    kubectl.run(&["annotate", "-n", "sea", "brokercluster/east", "--overwrite", "look=again"])?;
    wait_for("the budget to be made again", || kubectl.find("sea", "poddisruptionbudget/east-brokers"))?;
    Ok(())
}

fn nothing_is_written_while_it_is_paused(kubectl: &Kubectl) -> Result<()> {
    kubectl.run(&["annotate", "-n", "sea", "brokercluster/east", "sealane.io/paused=true"])?;
    kubectl.wait_condition("sea", "brokercluster/east", "Paused", "True")?;
    change_port(kubectl)?;
    sleep(Duration::from_secs(5));
    ensure!(port(kubectl)? == 7777, "it was repaired while paused");
    // The twin: without the pause it is.
    kubectl.run(&["annotate", "-n", "sea", "brokercluster/east", "sealane.io/paused-"])?;
    repaired(kubectl)?;
    kubectl.wait_condition("sea", "brokercluster/east", "Paused", "False").map(drop)
}

fn holder(kubectl: &Kubectl) -> Result<String> {
    let lease = kubectl.object("sealane-system", "lease/sealane-operator")?;
    Ok(lease["spec"]["holderIdentity"].as_str().unwrap_or_default().to_owned())
}

fn one_of_two_writes_and_the_other_follows(region: &Region, first: Operator) -> Result<()> {
    let kubectl = region.kubectl();
    let held = holder(kubectl)?;
    let _second = Operator::start(region, "sea")?;
    // As long as three Leases.
    sleep(Duration::from_secs(12));
    ensure!(holder(kubectl)? == held, "the second took the Lease of one that lives");
    drop(first);
    change_port(kubectl)?;
    repaired(kubectl)?;
    ensure!(holder(kubectl)? != held, "the Service was repaired by nobody who holds the Lease");
    Ok(())
}

fn nothing_was_forbidden(region: &Region) -> Result<()> {
    let events = region.audit(ACCOUNT)?;
    let forbidden: Vec<String> = events
        .iter()
        .filter(|event| event["responseStatus"]["code"] == 403)
        .map(|event| format!("{} {}", event["verb"], event["requestURI"]))
        .collect();
    ensure!(forbidden.is_empty(), "forbidden: {forbidden:?}");
    Ok(())
}

fn two_claims_on_a_topic_are_told(kubectl: &Kubectl) -> Result<()> {
    kubectl.apply(&cluster("east"))?;
    kubectl.apply(&topic("one", "shared", "east"))?;
    reason(kubectl, "topics.sealane.io/one", "ClusterNotReady")?;
    // Kubernetes tells ages in seconds.
    sleep(Duration::from_millis(1100));
    kubectl.apply(&topic("another", "shared", "east"))?;
    kubectl.wait_condition("sea", "topics.sealane.io/another", "Conflict", "True")?;
    reason(kubectl, "topics.sealane.io/one", "ClusterNotReady")?;
    // The second goes at once: it has nothing to delete.
    kubectl.run(&["delete", "-n", "sea", "topics.sealane.io/another", "--timeout=60s"])?;
    Ok(())
}
