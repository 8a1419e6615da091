//! The token of a LinkGrant on a real API server, without nodes: it is good once, for the region that it was made for, and
//! for a time; whatever is wrong is a reason at the MirrorLink, and is healed by the right Secret.

#![cfg(feature = "kubernetes")]

use anyhow::{Context, Result, ensure};
use e2e::kubernetes::{Kubectl, Operator, Region, alone, place, wait_for, with_report};
use serde_json::{Value, json};

const MIRROR: &str = "  mirror: {replicas: 1}\n";

#[test]
fn a_token_is_good_once_for_its_region_and_for_a_time() -> Result<()> {
    let region = Region::sea()?;
    with_report(&region, || {
        let kubectl = region.kubectl();
        kubectl.apply(&place("lake"))?;
        let operator = Operator::start(&region, "sea,lake")?;
        kubectl.apply(&alone("sea", "east", MIRROR))?;
        kubectl.apply(&alone("lake", "west", MIRROR))?;
        kubectl.apply(&alone("lake", "north", MIRROR))?;
        grant(kubectl, "short", "west", 1)?;
        kubectl.wait_reason("sea", "linkgrant/short", "TokenIssued")?;

        what_is_no_token_is_told(kubectl)?;
        a_token_of_another_region_or_for_another_is_refused(kubectl)?;
        joined_once_and_by_nobody_else(kubectl)?;
        one_that_is_over_is_refused_and_another_heals(kubectl)?;
        operator.judge_log()
    })
}

fn grant(kubectl: &Kubectl, name: &str, peer: &str, minutes: u32) -> Result<()> {
    kubectl
        .apply(&format!(
            "apiVersion: sealane.io/v1alpha1\nkind: LinkGrant\nmetadata: {{name: {name}, namespace: sea}}\n\
             spec: {{clusterRef: {{name: east}}, peer: {peer}, validMinutes: {minutes}}}\n"
        ))
        .map(drop)
}

/// The joining half, by the token in this Secret.
fn link(kubectl: &Kubectl, name: &str, cluster: &str, peer: &str) -> Result<()> {
    kubectl
        .apply(&format!(
            "apiVersion: sealane.io/v1alpha1\nkind: MirrorLink\nmetadata: {{name: {name}, namespace: lake}}\n\
             spec: {{clusterRef: {{name: {cluster}}}, peer: {peer}, tokenSecretRef: {{name: {name}}}}}\n"
        ))
        .map(drop)
}

/// What a person carries over: the data of a grant's Secret, under the name that the link looks for.
fn carry(kubectl: &Kubectl, grant: &str, link: &str, change: impl Fn(&mut Value)) -> Result<()> {
    let mut data = kubectl.object("sea", &format!("secret/{grant}-token"))?["data"].take();
    change(&mut data);
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": { "name": link, "namespace": "lake" }, "data": data,
    });
    kubectl.run(&["delete", "secret", link, "-n", "lake", "--ignore-not-found"])?;
    kubectl.apply(&secret.to_string()).map(drop)
}

fn says(kubectl: &Kubectl, link: &str, wanted: &str) -> Result<()> {
    let said = kubectl.wait_reason("lake", &format!("mirrorlink/{link}"), wanted)?;
    println!("{wanted}: {said}");
    Ok(())
}

fn what_is_no_token_is_told(kubectl: &Kubectl) -> Result<()> {
    link(kubectl, "probe", "west", "east")?;
    says(kubectl, "probe", "TokenMissing")?;
    carry(kubectl, "short", "probe", |data| {
        drop(data.as_object_mut().map(|data| data.remove("fingerprint")))
    })?;
    says(kubectl, "probe", "TokenMalformed")?;
    // base64 of "sha256:" and 64 zeros but for the last.
    let other =
        "c2hhMjU2OjAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDE=";
    carry(kubectl, "short", "probe", |data| data["fingerprint"] = other.into())?;
    says(kubectl, "probe", "WrongFingerprint")?;
    // 127.0.0.1:1, where nobody is.
    carry(kubectl, "short", "probe", |data| data["join"] = "MTI3LjAuMC4xOjE=".into())?;
    says(kubectl, "probe", "PeerUnreachable")?;
    carry(kubectl, "short", "probe", |data| data["token"] = "bm8tc3VjaC10b2tlbg==".into())?;
    says(kubectl, "probe", "TokenUnknown")
}

fn a_token_of_another_region_or_for_another_is_refused(kubectl: &Kubectl) -> Result<()> {
    kubectl.run(&["delete", "mirrorlink/probe", "-n", "lake"])?;
    link(kubectl, "strange", "west", "south")?;
    carry(kubectl, "short", "strange", |_| ())?;
    says(kubectl, "strange", "WrongPeer")?;
    link(kubectl, "stolen", "north", "east")?;
    carry(kubectl, "short", "stolen", |_| ())?;
    says(kubectl, "stolen", "WrongPeer")
}

/// Whether the condition Joined of a link is true.
fn joined(kubectl: &Kubectl, link: &str) -> Result<Value> {
    let object = kubectl.object("lake", &format!("mirrorlink/{link}"))?;
    e2e::kubernetes::condition(&object, "Joined").context("it says nothing of that yet")
}

fn joined_once_and_by_nobody_else(kubectl: &Kubectl) -> Result<()> {
    grant(kubectl, "west", "west", 60)?;
    kubectl.wait_reason("sea", "linkgrant/west", "TokenIssued")?;
    link(kubectl, "east", "west", "east")?;
    carry(kubectl, "west", "east", |_| ())?;
    wait_for("west to have joined", || {
        let said = joined(kubectl, "east")?;
        ensure!(said["status"] == "True", "it says {said}");
        Ok(Some(()))
    })?;
    kubectl.wait_reason("sea", "linkgrant/west", "Joined")?;
    // A thief with a region of the same name, and an authority of its own.
    kubectl.apply(&alone("lake", "thief", MIRROR).replace("region: thief", "region: west"))?;
    link(kubectl, "thief", "thief", "east")?;
    carry(kubectl, "west", "thief", |_| ())?;
    says(kubectl, "thief", "TokenUsed")?;
    ensure!(joined(kubectl, "east")?["status"] == "True", "the one that had joined was hurt");
    Ok(())
}

fn one_that_is_over_is_refused_and_another_heals(kubectl: &Kubectl) -> Result<()> {
    kubectl.wait_reason("sea", "linkgrant/short", "TokenExpired")?;
    kubectl.run(&["delete", "mirrorlink", "--all", "-n", "lake"])?;
    link(kubectl, "late", "north", "east")?;
    grant(kubectl, "brief", "north", 1)?;
    kubectl.wait_reason("sea", "linkgrant/brief", "TokenIssued")?;
    let kept = kubectl.object("sea", "secret/brief-token")?["data"].take();
    kubectl.wait_reason("sea", "linkgrant/brief", "TokenExpired")?;
    carry(kubectl, "brief", "late", |data| *data = kept.clone())?;
    says(kubectl, "late", "TokenExpired")?;
    grant(kubectl, "north", "north", 60)?;
    kubectl.wait_reason("sea", "linkgrant/north", "TokenIssued")?;
    carry(kubectl, "north", "late", |_| ())?;
    wait_for("north to have joined", || {
        let said = joined(kubectl, "late")?;
        ensure!(said["status"] == "True", "it says {said}");
        Ok(Some(()))
    })
}
