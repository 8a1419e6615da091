//! Connections of the operator to the API server that carry nothing any more without a word to either end: on a real node,
//! with the operator that is installed and its probe. They are given up and every watch is back; and a twin that waits for
//! ever is told dead by /livez and restarted by the kubelet. (Case: stackabletech/trino-operator#936.)

#![cfg(feature = "kubernetes")]

use std::net::SocketAddr;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use e2e::http;
use e2e::kubernetes::{Kubectl, Region, manifests, silent_since, wait_for, with_report};
use serde_json::Value;

const DEPLOYMENT: [&str; 3] = ["-n", "sealane-system", "deployment/sealane-operator"];

#[test]
fn connections_that_carry_nothing_are_given_up_and_a_twin_that_waits_for_ever_is_restarted_by_its_probe()
-> Result<()> {
    let region = Region::with_operator()?;
    with_report(&region, || {
        let kubectl = region.kubectl();
        kubectl.run(&["apply", "-f", &manifests().join("examples/one-region.yaml").display().to_string()])?;
        kubectl.wait_condition("sealane", "brokercluster/east", "Ready", "True")?;
        let broker = kubectl.object("sealane", "pod/east-0")?["metadata"]["uid"].clone();

        let operator = Pod::find(kubectl)?;
        let begun = Instant::now();
        let count = region.forget_connections(&operator.ip)?;
        wait_for("every watch to be heard again", || {
            let silent = silent_since(operator.http()?, begun)?;
            ensure!(silent.is_empty(), "not heard since: {silent:?}");
            Ok(Some(()))
        })?;
        println!("{count} connections were given up; all heard after {} s", begun.elapsed().as_secs());
        a_topic_is_made(kubectl, "with-a-deadline")?;
        let now = Pod::find(kubectl)?;
        ensure!(now.ip == operator.ip && now.restarts == 0, "it was restarted: {now:?}");

        kubectl
            .run(&[&["set", "env"][..], &DEPLOYMENT, &["SEALANE_TEST_OFF=connection-deadline"]].concat())?;
        kubectl.run(&[&["rollout", "status"][..], &DEPLOYMENT, &["--timeout=240s"]].concat())?;
        a_topic_is_made(kubectl, "before-the-twin")?;
        let twin = Pod::find(kubectl)?;
        ensure!(twin.restarts == 0, "it was restarted before anything happened: {twin:?}");
        let begun = Instant::now();
        region.forget_connections(&twin.ip)?;
        let said = wait_for("a red /livez", || match http::page_at(twin.http()?, "/livez")? {
            (200, said) => bail!("it says {said:?}"),
            (_, said) => Ok(Some(said)),
        })?;
        ensure!(said.contains("the watch of"), "it does not name the watch: {said}");
        println!("without the deadline /livez is red after {} s: {said}", begun.elapsed().as_secs());
        wait_for("the kubelet to restart it", || Ok((Pod::find(kubectl)?.restarts > 0).then_some(())))?;
        a_topic_is_made(kubectl, "after-the-restart")?;
        ensure!(
            kubectl.object("sealane", "pod/east-0")?["metadata"]["uid"] == broker,
            "the broker is another"
        );
        region.judge_logs()
    })
}

/// The operator hears of it, and does what it asks for.
fn a_topic_is_made(kubectl: &Kubectl, name: &str) -> Result<()> {
    kubectl.apply(&format!(
        "apiVersion: sealane.io/v1alpha1\nkind: Topic\nmetadata: {{name: {name}, namespace: sealane}}\n\
         spec: {{clusterRef: {{name: east}}}}\n"
    ))?;
    kubectl.wait_condition("sealane", &format!("topic.sealane.io/{name}"), "Ready", "True").map(drop)
}

/// The operator's own.
#[derive(Debug)]
struct Pod {
    ip: String,
    restarts: i64,
}

impl Pod {
    fn find(kubectl: &Kubectl) -> Result<Pod> {
        wait_for("the one pod of the operator", || {
            let mut pods = kubectl.list("sealane-system", "pods")?;
            pods.retain(|pod| pod["metadata"]["deletionTimestamp"].is_null());
            let [pod] = pods.as_slice() else { bail!("there are {}", pods.len()) };
            let restarts = |status: &Value| status["containerStatuses"][0]["restartCount"].as_i64();
            Ok(Some(Pod {
                ip: pod["status"]["podIP"].as_str().context("an address")?.to_owned(),
                restarts: restarts(&pod["status"]).context("a container")?,
            }))
        })
    }

    fn http(&self) -> Result<SocketAddr> {
        Ok(format!("{}:9095", self.ip).parse()?)
    }
}
