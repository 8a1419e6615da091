//! What ends with the object that asked for it and what outlives it, on a real API server without nodes: Services of dropped
//! listeners, orphans, volumes, and topics that are deleted while nobody is there to do it.

#![cfg(feature = "kubernetes")]

use std::collections::BTreeMap;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use e2e::kubernetes::{Kubectl, Operator, Region, Stand, alone, condition, script, wait_for, with_report};
use e2e::tools;
use serde_json::Value;

#[test]
fn what_is_not_asked_for_any_more_goes_and_what_was_kept_is_taken_up_again() -> Result<()> {
    let region = Region::sea()?;
    with_report(&region, || {
        let kubectl = region.kubectl();
        let operator = Operator::start(&region, "sea")?;
        a_missing_secret_is_told_and_the_cluster_healed_when_it_comes(kubectl)?;
        what_a_spec_drops_goes(kubectl)?;
        orphans_are_adopted(kubectl)?;
        volumes_go_where_it_is_said(kubectl)?;
        a_pool_without_a_cluster_is_told_and_goes(kubectl)?;
        many_writers_at_once_end_as_the_last_one_said(kubectl)?;
        operator.judge_log()
    })
}

fn patch(kubectl: &Kubectl, what: &str, change: &str) -> Result<()> {
    kubectl.run(&["patch", "-n", "sea", what, "--type=json", "-p", change]).map(drop)
}

fn a_missing_secret_is_told_and_the_cluster_healed_when_it_comes(kubectl: &Kubectl) -> Result<()> {
    kubectl.apply(&alone("sea", "east", "  mirror: {replicas: 1, listener: {type: NodePort}}\n"))?;
    kubectl.wait_reason("sea", "brokercluster/east", "Unschedulable")?;
    let listener = r#"[{"op":"add","path":"/spec/listeners/-","value":{"name":"outside","port":9192,"type":"NodePort",
        "tls":{"secretRef":{"name":"ours"}},"authentication":{"type":"TLS"}}}]"#;
    patch(kubectl, "brokercluster/east", listener)?;
    let said = kubectl.wait_reason("sea", "brokercluster/east", "SecretMissing")?;
    ensure!(said.contains("ours"), "it does not name the Secret: {said}");
    ensure!(kubectl.find("sea", "statefulset/east")?.is_some(), "what ran before was taken away");
    let files = ["ca.crt", "tls.crt", "tls.key"].map(|key| format!("--from-literal={key}=x"));
    let files: Vec<&str> = files.iter().map(String::as_str).collect();
    kubectl.run(&[&["create", "secret", "generic", "ours", "-n", "sea"], &files[..]].concat())?;
    kubectl.wait_reason("sea", "brokercluster/east", "Unschedulable").map(drop)
}

fn what_a_spec_drops_goes(kubectl: &Kubectl) -> Result<()> {
    for what in ["service/east-outside", "service/east-mirror", "deployment/east-mirror"] {
        wait_for(what, || kubectl.find("sea", what))?;
    }
    let drops = r#"[{"op":"remove","path":"/spec/listeners/1"},{"op":"remove","path":"/spec/mirror"}]"#;
    patch(kubectl, "brokercluster/east", drops)?;
    for what in
        ["service/east-outside", "service/east-mirror", "deployment/east-mirror", "configmap/east-mirror"]
    {
        kubectl.wait_gone("sea", what)?;
    }
    wait_for("the port to be dropped from the brokers' own Service", || {
        let ports = kubectl.object("sea", "service/east-brokers")?["spec"]["ports"].to_string();
        ensure!(!ports.contains("outside") && ports.contains("plain"), "its ports are {ports}");
        Ok(Some(()))
    })
}

/// By what it is known that an object is the same one, and whose it is.
fn known(kubectl: &Kubectl, what: &str) -> Result<(Value, Value)> {
    let meta = kubectl.object("sea", what)?["metadata"].take();
    Ok((meta["uid"].clone(), meta["ownerReferences"][0]["uid"].clone()))
}

/// A cluster and its pool are deleted and all of theirs left; made again, they have what they had.
fn orphans_are_adopted(kubectl: &Kubectl) -> Result<()> {
    let children = [
        "service/east-plain",
        "secret/east-authority",
        "configmap/east-config",
        "statefulset/east",
        "poddisruptionbudget/east-brokers",
    ];
    let before: Result<BTreeMap<&str, (Value, Value)>> =
        children.iter().map(|what| Ok((*what, known(kubectl, what)?))).collect();
    let before = before?;
    for what in ["brokerpool/east", "brokercluster/east"] {
        kubectl.run(&["delete", "-n", "sea", what, "--cascade=orphan"])?;
    }
    for what in children {
        wait_for(&format!("{what} to be an orphan"), || {
            let (_, owner) = known(kubectl, what)?;
            ensure!(owner.is_null(), "it belongs to {owner}");
            Ok(Some(()))
        })?;
    }
    kubectl.apply(&alone("sea", "east", ""))?;
    kubectl.wait_reason("sea", "brokercluster/east", "Unschedulable")?;
    for what in children {
        let (uid, owner) = before.get(what).context("it was there")?;
        let (now, adopter) = known(kubectl, what)?;
        ensure!(now == *uid, "{what} was made anew");
        ensure!(!adopter.is_null() && adopter != *owner, "{what} belongs to {adopter}");
    }
    Ok(())
}

fn volumes_go_where_it_is_said(kubectl: &Kubectl) -> Result<()> {
    let retention =
        |name: &str| alone("sea", name, "").replace("replicas: 1}", "replicas: 1, pvcRetention: Delete}");
    kubectl.apply(&alone("sea", "kept", ""))?;
    kubectl.apply(&retention("thrown"))?;
    for name in ["kept", "thrown"] {
        wait_for("a volume", || kubectl.find("sea", &format!("persistentvolumeclaim/data-{name}-0")))?;
        kubectl.run(&["delete", "-n", "sea", &format!("brokerpool/{name}")])?;
        kubectl.wait_gone("sea", &format!("statefulset/{name}"))?;
        // The file of its broker goes with the pool, though it is the cluster's.
        kubectl.wait_gone("sea", &format!("configmap/{name}-config"))?;
    }
    kubectl.wait_gone("sea", "persistentvolumeclaim/data-thrown-0")?;
    let kept = kubectl.object("sea", "persistentvolumeclaim/data-kept-0")?;
    ensure!(kept["metadata"]["deletionTimestamp"].is_null(), "it goes too: {kept}");
    kubectl.run(&["delete", "-n", "sea", "brokercluster/kept", "brokercluster/thrown"]).map(drop)
}

/// A cluster whose brokers would have somebody to give to holds its pools; one that is gone holds nobody.
fn a_pool_without_a_cluster_is_told_and_goes(kubectl: &Kubectl) -> Result<()> {
    let many = alone("sea", "many", "")
        .replace("{type: Disk, size: 1Gi}", "{type: S3, bucket: none, endpoint: \"http://192.0.2.1:9\"}")
        .replace("{type: Embedded}", "{type: Etcd, endpoints: [\"http://192.0.2.1:2379\"]}");
    kubectl.apply(&many)?;
    kubectl.wait_reason("sea", "brokercluster/many", "Unschedulable")?;
    let held = kubectl.object("sea", "brokerpool/many")?["metadata"]["finalizers"].to_string();
    ensure!(held.contains("sealane.io/broker-pool"), "nothing holds it: {held}");
    kubectl.run(&["delete", "-n", "sea", "brokercluster/many"])?;
    kubectl.wait_reason("sea", "brokerpool/many", "ClusterNotFound")?;
    kubectl.run(&["delete", "-n", "sea", "brokerpool/many", "--timeout=120s"]).map(drop)
}

/// People and the operator write the same object at the same time: who comes too late looks again, and nothing is lost.
fn many_writers_at_once_end_as_the_last_one_said(kubectl: &Kubectl) -> Result<()> {
    let topic = |policy: &str| {
        format!(
            "apiVersion: sealane.io/v1alpha1\nkind: Topic\nmetadata: {{name: contended, namespace: sea}}\n\
             spec: {{clusterRef: {{name: east}}, deletionPolicy: {policy}}}\n"
        )
    };
    for round in 0..10 {
        kubectl.apply(&topic(if round % 2 == 0 { "Delete" } else { "Retain" }))?;
        let annotate = format!(
            "for n in 1 2 3 4; do {} --kubeconfig {} annotate -n sea topics.sealane.io/contended --overwrite by-$n={round} & \
             done; wait",
            e2e::kubernetes::binaries()?.join("kubectl").display(),
            kubectl.kubeconfig().display()
        );
        script(Command::new("bash").args(["-c", &annotate]))?;
    }
    wait_for("the finalizer to go with the last change", || {
        let topic = kubectl.object("sea", "topics.sealane.io/contended")?;
        let meta = &topic["metadata"];
        ensure!(meta["finalizers"].is_null(), "it has {}", meta["finalizers"]);
        ensure!(
            (1..5).all(|n| meta["annotations"][format!("by-{n}")] == "9"),
            "lost: {}",
            meta["annotations"]
        );
        ensure!(topic["status"]["observedGeneration"] == meta["generation"], "not the last that was judged");
        Ok(Some(()))
    })
}

#[test]
fn a_topic_that_is_deleted_while_the_operator_is_away_goes_when_it_is_back_and_a_kept_one_stays() -> Result<()>
{
    tools::kcat()?;
    let region = Region::sea()?;
    with_report(&region, || {
        let kubectl = region.kubectl();
        let operator = Operator::start(&region, "sea")?;
        kubectl.apply(&alone("sea", "east", ""))?;
        let stand = Stand::start(kubectl, "sea", "east")?;
        for (name, policy) in [("thrown", "Delete"), ("kept", "Retain"), ("later", "Retain")] {
            kubectl.apply(&format!(
                "apiVersion: sealane.io/v1alpha1\nkind: Topic\nmetadata: {{name: {name}, namespace: sea}}\n\
                 spec: {{clusterRef: {{name: east}}, deletionPolicy: {policy}}}\n"
            ))?;
            kubectl.wait_condition("sea", &format!("topics.sealane.io/{name}"), "Ready", "True")?;
        }
        operator.judge_log()?;
        drop(operator);
        for name in ["thrown", "kept"] {
            kubectl.run(&["delete", "-n", "sea", &format!("topics.sealane.io/{name}"), "--wait=false"])?;
        }
        kubectl.wait_gone("sea", "topics.sealane.io/kept")?;
        ensure!(kubectl.find("sea", "topics.sealane.io/thrown")?.is_some(), "nobody deleted its topic yet");
        let there = topics(&stand)?;
        ensure!(["thrown", "kept", "later"].iter().all(|name| there.contains(*name)), "there are {there}");

        let versions = || -> Result<Value> {
            let meta = kubectl.object("sea", "topics.sealane.io/later")?["metadata"].take();
            Ok(meta["resourceVersion"].clone())
        };
        let before = versions()?;
        let operator = Operator::start(&region, "sea")?;
        kubectl.wait_gone("sea", "topics.sealane.io/thrown")?;
        let there = topics(&stand)?;
        ensure!(!there.contains("thrown") && there.contains("kept"), "there are {there}");
        // An operator that begins anew finds all else as it was, and writes nothing about it.
        kubectl.apply(
            "apiVersion: sealane.io/v1alpha1\nkind: Topic\nmetadata: {name: last, namespace: sea}\n\
             spec: {clusterRef: {name: east}}\n",
        )?;
        kubectl.wait_condition("sea", "topics.sealane.io/last", "Ready", "True")?;
        ensure!(versions()? == before, "a topic at rest was written");
        let ready = condition(&kubectl.object("sea", "topics.sealane.io/later")?, "Ready");
        ensure!(ready.is_some_and(|ready| ready["status"] == "True"), "it is not ready any more");
        operator.judge_log()
    })
}

/// What kcat lists.
fn topics(stand: &Stand) -> Result<String> {
    script(Command::new(tools::kcat()?).args(["-L", "-b", &stand.bootstrap()]))
}
