//! Mistakes and faults on a real node: each is told by a condition with a reason, destroys nothing, and is healed when the
//! spec is mended; what is told is of the present generation; and the data plane does not notice that its operator or the API
//! server is away, for `SEALANE_OUTAGE_SECONDS` where that is set.

#![cfg(feature = "kubernetes")]

use std::collections::BTreeMap;
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use e2e::kubernetes::{Kubectl, Region, Story, condition, manifests, script, wait_for, with_report};
use e2e::tools;
use serde_json::Value;

fn installed() -> Result<Region> {
    tools::kcat()?;
    Region::with_operator()
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
        let outage: u64 = std::env::var("SEALANE_OUTAGE_SECONDS").map_or(Ok(5), |seconds| seconds.parse())?;
        region.kill("kube-apiserver")?;
        let begun = Instant::now();
        produce("while the API server is away")?;
        let mut more = 0;
        while begun.elapsed() < Duration::from_secs(outage) {
            more += 1;
            produce(&format!("second {more} without it"))?;
            sleep(Duration::from_secs(1));
        }
        println!("{more} records while the API server was away, for {} s", begun.elapsed().as_secs());
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
        let seconds = (1..=more).map(|second| format!("second {second} without it"));
        let told =
            ["before", "while the API server is away", "while the operator is away"].map(str::to_owned);
        for line in told.into_iter().chain(seconds) {
            ensure!(
                read.lines().filter(|found| *found == line).count() == 1,
                "{line:?} is not there once: {read}"
            );
        }
        region.judge_logs()
    })
}

#[test]
fn what_is_told_is_of_the_present_generation_and_changes_when_that_changes() -> Result<()> {
    let region = installed()?;
    with_report(&region, || {
        let kubectl = region.kubectl();
        kubectl.apply("apiVersion: v1\nkind: Namespace\nmetadata: {name: sealane}\n")?;
        let clusters = Story::of(kubectl, "sealane", "bc")?;
        kubectl.run(&["apply", "-f", &manifests().join("examples/one-region.yaml").display().to_string()])?;
        // At once: there is no condition yet, and a person's command must wait for one.
        let wait = ["wait", "-n", "sealane", "--for=condition=Ready", "brokercluster/east", "topic/orders"];
        kubectl.run(&[&wait[..], &["--timeout=280s"]].concat())?;
        let produce = "echo served | \"$0\" --kubeconfig \"$1\" exec -i -n sealane east-0 -- /usr/bin/sealane produce orders \
                       --server localhost:9092";
        let kubectl_program = e2e::kubernetes::binaries()?.join("kubectl");
        let mut command = Command::new("bash");
        command.args(["-euo", "pipefail", "-c", produce]).arg(kubectl_program).arg(kubectl.kubeconfig());
        script(&mut command)?;

        let wrong =
            r#"{"spec":{"listeners":[{"name":"plain","port":9092,"tls":{"secretRef":{"name":"none"}}}]}}"#;
        patch(kubectl, "brokercluster/east", wrong)?;
        reason(kubectl, "brokercluster/east", "SecretMissing")?;
        kubectl.wait_condition("sealane", "brokercluster/east", "Ready", "False")?;
        let right = r#"{"spec":{"listeners":[{"name":"plain","port":9092},
            {"name":"outside","port":9192,"type":"NodePort","nodePort":30092,"insecure":true}]}}"#;
        patch(kubectl, "brokercluster/east", right)?;
        kubectl.wait_condition("sealane", "brokercluster/east", "Ready", "True")?;
        a_class_that_is_not_there_is_told_and_healed_when_it_comes(kubectl)?;

        // An operator that begins anew finds nothing to say.
        let version = |kubectl: &Kubectl| -> Result<Value> {
            Ok(kubectl.object("sealane", "brokercluster/east")?["metadata"]["resourceVersion"].clone())
        };
        let before = version(kubectl)?;
        let deployment = ["-n", "sealane-system", "deployment/sealane-operator"];
        kubectl.run(&[&["rollout", "restart"][..], &deployment].concat())?;
        kubectl.run(&[&["rollout", "status"][..], &deployment, &["--timeout=240s"]].concat())?;
        kubectl.apply(
            "apiVersion: sealane.io/v1alpha1\nkind: Topic\nmetadata: {name: later, namespace: sealane}\n\
             spec: {clusterRef: {name: east}}\n",
        )?;
        kubectl.wait_condition("sealane", "topic.sealane.io/later", "Ready", "True")?;
        ensure!(version(kubectl)? == before, "a cluster at rest was written by a new operator");
        each_state_is_consistent(&clusters.told()?)?;
        region.judge_logs()
    })
}

/// The class of a volume that does not exist; then somebody makes it.
fn a_class_that_is_not_there_is_told_and_healed_when_it_comes(kubectl: &Kubectl) -> Result<()> {
    let other = e2e::kubernetes::alone("sealane", "other", "");
    kubectl.apply(&other.replace("size: 1Gi", "size: 1Gi, storageClassName: none"))?;
    let said = kubectl.wait_reason("sealane", "brokercluster/other", "Unschedulable")?;
    ensure!(said.contains("other-0"), "it does not name the pod: {said}");
    let classes = kubectl.list("", "storageclasses")?;
    let mut class = classes.first().context("the test Kubernetes has a class")?.clone();
    class["metadata"] = serde_json::json!({ "name": "none" });
    kubectl.apply(&class.to_string())?;
    kubectl.wait_condition("sealane", "brokercluster/other", "Ready", "True")?;
    kubectl.run(&["delete", "-n", "sealane", "brokercluster/other", "brokerpool/other"]).map(drop)
}

/// No condition is of a generation that is not there yet, the status says of which it is, and a time of transition changes
/// with the status of its condition and with nothing else.
fn each_state_is_consistent(told: &[(String, Value)]) -> Result<()> {
    let mut last: BTreeMap<(String, String), (Value, Value)> = BTreeMap::new();
    let mut judged = 0;
    for (_, object) in told {
        let (meta, status) = (&object["metadata"], &object["status"]);
        let generation = meta["generation"].as_i64().context("a generation")?;
        for condition in status["conditions"].as_array().into_iter().flatten() {
            let of = condition["observedGeneration"].as_i64().context("a condition says of which it is")?;
            ensure!(of <= generation, "{condition} at generation {generation}");
            ensure!(condition["type"] != "Ready" || status["observedGeneration"] == of, "{status}");
            let key = (meta["name"].to_string(), condition["type"].to_string());
            let now = (condition["status"].clone(), condition["lastTransitionTime"].clone());
            if let Some(before) = last.insert(key, now.clone()) {
                ensure!(before.0 != now.0 || before.1 == now.1, "{condition} was at {} before", before.1);
            }
            judged += 1;
        }
    }
    ensure!(judged > 20, "only {judged} conditions were seen: the story is not read right");
    Ok(())
}
