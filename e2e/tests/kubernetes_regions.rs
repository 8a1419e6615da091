//! `docs/KUBERNETES.md` is followed to the letter, on real clusters: its commands are taken out of the file and run. Then
//! what a person does not do on the first day: the wire between two regions is cut, and tokens are shown that are not good.

#![cfg(feature = "kubernetes")]

use std::collections::BTreeSet;

use anyhow::{Context, Result, bail, ensure};
use e2e::kubernetes::{
    DOCUMENT, Kubectl, Region, blocks, condition, follow, manifests, wait_for, with_report, with_two,
};
use e2e::process::binary;
use e2e::tools;

fn expect(printed: &str, lines: &[&str]) -> Result<()> {
    for line in lines {
        ensure!(printed.lines().any(|found| found.trim() == *line), "no line {line:?} in:\n{printed}");
    }
    Ok(())
}

#[test]
fn the_first_ten_minutes_do_what_the_document_says() -> Result<()> {
    tools::kcat()?;
    let region = Region::with_node()?;
    with_report(&region, || {
        region.give_image(&binary()?, "0.1.0")?;
        let kubectl = region.kubectl();
        let whole = blocks("sh first");
        let (begin, end) = whole.split_once("kubectl delete").context("the document takes it all away")?;
        let printed = follow(begin, &[("KUBECONFIG", region.kubeconfig())])?;
        expect(&printed, &["from inside", "from outside", "from east", "the lane got: lane order"])?;
        let links = kubectl.run(&["get", "mlink", "-A"])?;
        for column in ["PEER", "DIRECTION", "STATE", "LAG", "READY"] {
            ensure!(links.contains(column), "{links}");
        }
        ensure!(links.contains("Active") && links.contains("records"), "{links}");
        region.judge_logs()?;

        restarts_nothing_and_rotates(&region)?;

        follow(&format!("kubectl delete{end}"), &[("KUBECONFIG", region.kubeconfig())])?;
        for namespace in ["sealane", "east", "west"] {
            kubectl.wait_gone("", &format!("namespace/{namespace}"))?;
        }
        wait_for("the volumes to go with their namespaces", || {
            Ok(kubectl.list("", "persistentvolumes")?.is_empty().then_some(()))
        })
    })
}

/// Certificates are made anew and are served, without a restart of the broker.
fn restarts_nothing_and_rotates(region: &Region) -> Result<()> {
    let kubectl = region.kubectl();
    let uid = |kubectl: &Kubectl| {
        Ok::<_, anyhow::Error>(kubectl.object("sealane", "pod/east-0")?["metadata"]["uid"].clone())
    };
    let (pod, before) = (uid(kubectl)?, kubectl.secret("sealane", "east-broker-tls", "tls.crt")?);
    follow(&blocks("sh rotate"), &[("KUBECONFIG", region.kubeconfig())])?;
    wait_for("other certificates", || {
        Ok((kubectl.secret("sealane", "east-broker-tls", "tls.crt")? != before).then_some(()))
    })?;
    kubectl.wait_condition("sealane", "topic.sealane.io/orders", "Ready", "True")?;
    ensure!(uid(kubectl)? == pod, "the broker was restarted by a rotation");

    region.give_image(&binary()?, "next")?;
    a_new_operator_restarts_no_broker(kubectl, &pod)?;
    follow(&blocks("sh upgrade"), &[("KUBECONFIG", region.kubeconfig())])?;
    let image = kubectl.object("sealane", "pod/east-0")?["spec"]["containers"][0]["image"].clone();
    ensure!(image == "localhost/sealane:next", "the broker runs {image}");
    Ok(())
}

/// Another image of the operator, and another default for new clusters; what it does then is seen by a topic that it makes.
fn a_new_operator_restarts_no_broker(kubectl: &Kubectl, pod: &serde_json::Value) -> Result<()> {
    let (deployment, next) = ("deployment/sealane-operator", "localhost/sealane:next");
    kubectl.run(&["set", "env", "-n", "sealane-system", deployment, &format!("SEALANE_IMAGE={next}")])?;
    kubectl.run(&["set", "image", "-n", "sealane-system", deployment, &format!("operator={next}")])?;
    kubectl.run(&["rollout", "status", "-n", "sealane-system", deployment, "--timeout=240s"])?;
    let topic = "apiVersion: sealane.io/v1alpha1\nkind: Topic\nmetadata: {name: later, namespace: sealane}\nspec: {clusterRef: {name: east}}\n";
    kubectl.apply(topic)?;
    kubectl.wait_condition("sealane", "topic.sealane.io/later", "Ready", "True")?;
    let now = kubectl.object("sealane", "pod/east-0")?;
    ensure!(now["metadata"]["uid"] == *pod, "the broker was restarted by a new operator");
    ensure!(now["spec"]["containers"][0]["image"] != next, "it runs another image");
    Ok(())
}

#[test]
fn two_clusters_are_joined_by_a_token_and_survive_a_cut_wire() -> Result<()> {
    with_two(|east, west| {
        let environment = [("EAST", east.kubeconfig()), ("WEST", west.kubeconfig())];
        follow(&blocks("sh link"), &environment)?;
        knows_nothing_of_the_other(east, west)?;
        let (from, to) = (format!("{}:30192", east.address()), format!("{}:30292", west.address()));
        cross(&from, &to, "before the cut")?;

        east.cut()?;
        west.kubectl().wait_condition("west", "mirrorlink/east", "Ready", "False")?;
        // Each region goes on by itself: west is reached, takes what it is given, and its operator does its work.
        produce(&to, "in west while cut")?;
        goes_on_alone(west.kubectl())?;
        east.heal()?;
        west.kubectl().wait_condition("west", "mirrorlink/east", "Ready", "True")?;
        cross(&from, &to, "after the cut")?;
        wait_for("west's record in east", || {
            Ok(consume(&from)?.contains("in west while cut").then_some(()))
        })?;
        let lines = consume(&to)?;
        for line in ["before the cut", "in west while cut", "after the cut"] {
            ensure!(
                lines.lines().filter(|found| *found == line).count() == 1,
                "{line:?} is not there once: {lines}"
            );
        }
        a_lost_region_comes_back(east, west, &from, &to)?;
        a_used_token_is_refused(east, west)?;
        authorities_are_replaced(east, west)?;
        cross(&from, &to, "under new authorities")?;
        east.judge_logs()?;
        west.judge_logs()
    })
}

/// Every process of east is killed at one moment; west takes records meanwhile, and east has them when it is back.
fn a_lost_region_comes_back(east: &Region, west: &Region, from: &str, to: &str) -> Result<()> {
    east.lose()?;
    west.kubectl().wait_condition("west", "mirrorlink/east", "Ready", "False")?;
    produce(to, "in west while east is lost")?;
    east.bring_back()?;
    east.kubectl().wait_condition("east", "mirrorlink/west", "Ready", "True")?;
    west.kubectl().wait_condition("west", "mirrorlink/east", "Ready", "True")?;
    cross(from, to, "after the loss")?;
    wait_for("west's record in east", || {
        Ok(consume(from)?.contains("in west while east is lost").then_some(()))
    })?;
    for (server, region) in [(from, "east"), (to, "west")] {
        let lines = consume(server)?;
        for line in ["before the cut", "after the cut", "in west while east is lost", "after the loss"] {
            let count = lines.lines().filter(|found| *found == line).count();
            ensure!(count == 1, "{line:?} is {count} times in {region}: {lines}");
        }
    }
    Ok(())
}

/// With the other region gone: a topic is made, and the broker is restarted for a change of its spec.
fn goes_on_alone(kubectl: &Kubectl) -> Result<()> {
    let topic = "apiVersion: sealane.io/v1alpha1\nkind: Topic\nmetadata: {name: alone, namespace: west}\nspec: {clusterRef: {name: west}}\n";
    kubectl.apply(topic)?;
    kubectl.wait_condition("west", "topic.sealane.io/alone", "Ready", "True")?;
    let pod = kubectl.object("west", "pod/west-0")?["metadata"]["uid"].clone();
    let change = r#"{"spec":{"config":{"connections_max":"2000"}}}"#;
    kubectl.run(&["patch", "-n", "west", "brokercluster/west", "--type=merge", "-p", change])?;
    wait_for("the broker to begin anew", || {
        Ok(kubectl.find("west", "pod/west-0")?.filter(|found| found["metadata"]["uid"] != pod))
    })?;
    kubectl.wait_condition("west", "brokercluster/west", "Ready", "True").map(drop)
}

/// Both at a time; the link is up before and after, and neither side trusts the former authority of any in the end.
fn authorities_are_replaced(east: &Region, west: &Region) -> Result<()> {
    let sides = [(east.kubectl(), "east"), (west.kubectl(), "west")];
    let held = |kubectl: &Kubectl, name: &str| kubectl.secret(name, &format!("{name}-authority"), "tls.crt");
    let before = [held(sides[0].0, "east")?, held(sides[1].0, "west")?];
    for (kubectl, name) in sides {
        let change = r#"{"metadata":{"annotations":{"sealane.io/rotate-authority":"now"}},"spec":{"certificates":{"settleSeconds":40}}}"#;
        kubectl.run(&[
            "patch",
            "-n",
            name,
            &format!("brokercluster/{name}"),
            "--type=merge",
            "-p",
            change,
        ])?;
        wait_for(&format!("the next authority of {name}"), || {
            let found =
                condition(&kubectl.object(name, &format!("brokercluster/{name}"))?, "CertificatesValid");
            Ok(found.filter(|found| found["reason"] == "Rotating"))
        })?;
    }
    for ((kubectl, name), before) in sides.into_iter().zip(&before) {
        wait_for(&format!("the former authority of {name} to be trusted no more"), || {
            let trusted = kubectl.object(name, &format!("configmap/{name}-trust"))?["data"]["ca.crt"].take();
            let trusted = trusted.as_str().unwrap_or_default();
            ensure!(!trusted.contains(before.trim()), "it is trusted still");
            ensure!(held(kubectl, name)? != *before, "it signs still");
            Ok(Some(()))
        })?;
    }
    for ((kubectl, name), other) in sides.into_iter().zip(["west", "east"]) {
        kubectl.wait_condition(name, &format!("mirrorlink/{other}"), "Ready", "True")?;
    }
    Ok(())
}

/// No Secret of one region holds anything that opens the other's API server.
fn knows_nothing_of_the_other(east: &Region, west: &Region) -> Result<()> {
    for (one, other) in [(east, west), (west, east)] {
        let secrets = one.kubectl().run(&["get", "secrets,configmaps", "-A", "-o", "json"])?;
        let server = format!("{}:6443", other.address());
        let (encoded, plain) = (base64(&server)?, server.clone());
        ensure!(
            !secrets.contains(&plain) && !secrets.contains(&encoded),
            "{server} is known to the other region"
        );
    }
    Ok(())
}

fn base64(text: &str) -> Result<String> {
    Ok(follow(&format!("printf %s '{text}' | base64 -w0"), &[])?.trim_end_matches('=').to_owned())
}

/// The token that west has used, shown by another region; and one with another fingerprint.
fn a_used_token_is_refused(east: &Region, west: &Region) -> Result<()> {
    let data =
        west.kubectl().run(&["get", "secret", "-n", "west", "east-token", "-o", "jsonpath={.data}"])?;
    // The same name of a region, with an authority of its own: what a thief of the Secret would have.
    let kubectl = west.kubectl();
    let thief = std::fs::read_to_string(manifests().join("examples/two-clusters/west.yaml"))?
        .replace("namespace: west", "namespace: sealane")
        .replace("  name: west\n  labels", "  name: sealane\n  labels")
        .replace("nodePort: 30292", "nodePort: 30392");
    kubectl.apply(&thief)?;
    let secret = |name: &str, data: &str| {
        format!(
            r#"{{"apiVersion":"v1","kind":"Secret","metadata":{{"name":"{name}","namespace":"sealane"}},"data":{data}}}"#
        )
    };
    kubectl.apply(&secret("east-token", &data))?;
    reason(kubectl, "TokenUsed")?;
    let mut other: serde_json::Value = serde_json::from_str(&data)?;
    other["fingerprint"] = follow("printf sha256:%064d 1 | base64 -w0", &[])?.into();
    kubectl.apply(&secret("east-token", &other.to_string()))?;
    reason(kubectl, "WrongFingerprint")?;
    // What went on in the shadow of this has hurt nobody.
    east.kubectl().wait_condition("east", "mirrorlink/west", "Ready", "True").map(drop)
}

fn reason(kubectl: &Kubectl, wanted: &str) -> Result<()> {
    wait_for(&format!("the refusal {wanted}"), || {
        let link = kubectl.object("sealane", "mirrorlink/east")?;
        let found = e2e::kubernetes::condition(&link, "Ready").context("no condition yet")?;
        if found["reason"] == wanted && !found["message"].as_str().unwrap_or_default().is_empty() {
            return Ok(Some(()));
        }
        bail!("it is {found}")
    })
}

fn cross(from: &str, to: &str, line: &str) -> Result<()> {
    produce(from, line)?;
    wait_for(&format!("{line:?} in the other region"), || {
        Ok(consume(to)?.lines().any(|found| found == line).then_some(()))
    })
}

fn produce(server: &str, line: &str) -> Result<()> {
    follow(&format!("echo '{line}' | kcat -P -b {server} -t orders"), &[]).map(drop)
}

fn consume(server: &str) -> Result<String> {
    follow(&format!("kcat -C -b {server} -t orders -o beginning -e -q"), &[])
}

#[test]
fn every_reason_of_a_condition_has_an_entry_in_the_document() -> Result<()> {
    let mut reasons = BTreeSet::new();
    let mut folders = vec![manifests().join("../operator/src")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder)? {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let text = std::fs::read_to_string(&path)?;
            let product = text.split("#[cfg(test)]").next().unwrap_or_default().to_owned();
            for call in ["Verdict::yes(", "Verdict::no(", "Verdict::unknown(", "not_ready(", "refused("] {
                for found in product.split(call).skip(1) {
                    let words: Vec<&str> = found.split('"').skip(1).step_by(2).take(2).collect();
                    let at = usize::from(call.starts_with("Verdict"));
                    let word = words.get(at).copied().unwrap_or_default();
                    if word.chars().next().is_some_and(char::is_uppercase)
                        && word.chars().all(char::is_alphanumeric)
                    {
                        reasons.insert(word.to_owned());
                    }
                }
            }
        }
    }
    ensure!(reasons.len() > 30, "these cannot be all: {reasons:?}");
    let table: String = DOCUMENT.lines().filter(|line| line.starts_with("| ")).collect();
    let types = ["Ready", "Synced", "Accepted", "Progressing", "Joined"];
    let missing: Vec<&String> = reasons
        .iter()
        .filter(|reason| !types.contains(&reason.as_str()) && !table.contains(reason.as_str()))
        .collect();
    ensure!(missing.is_empty(), "no entry for {missing:?}");
    Ok(())
}
