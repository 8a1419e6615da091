//! The examples as a person meets them: two regions in namespaces of one real cluster, a Java producer in one and a
//! librdkafka consumer in the other, a lane whose records reach its own consumer and nobody else; and what is left when
//! all of it is deleted: what the retention policy keeps, and nothing else.

#![cfg(feature = "kubernetes")]

use std::collections::BTreeSet;
use std::process::{Child, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use e2e::clients::{Library, Record, Running};
use e2e::kubernetes::{Kubectl, Region, manifests, wait_for, with_report};

#[test]
fn java_produces_in_one_region_librdkafka_consumes_in_the_other_and_nothing_unasked_is_left() -> Result<()> {
    let region = Region::with_operator()?;
    with_report(&region, || {
        let kubectl = region.kubectl();
        kubectl.wait_condition("sealane-system", "deployment/sealane-operator", "Available", "True")?;
        let begun = Instant::now();
        apply(kubectl, "-k", "examples/two-regions")?;
        ready(kubectl)?;
        println!("two regions are ready and linked after {:.1} s", begun.elapsed().as_secs_f64());
        links_show_their_lag(kubectl)?;

        let at = |port: u16| format!("{}:{port}", region.address());
        let (east, west) = (at(30192), at(30292));
        crosses(&east, &west)?;
        apply(kubectl, "-f", "examples/lanes.yaml")?;
        a_lane_has_its_records_alone(kubectl, &east)?;
        region.judge_logs()?;

        only_what_is_to_be_kept_is_left(kubectl)?;
        apply(kubectl, "-k", "examples/two-regions")?;
        ready(kubectl)?;
        // In a group: who reads without one is shown no record of a lane.
        let later = ["--group", "later", "--seconds", "250"];
        let later = Library::Confluent.start("consume", &east, "orders", &later)?;
        wait_for("what the kept volume holds", || {
            let kept = texts(&later.records());
            ensure!(kept.contains("plain 2") && kept.contains("lane 1"), "{kept:?} is in it");
            Ok(Some(()))
        })?;

        let place = |what: &str| manifests().join(what).display().to_string();
        kubectl.run(&["delete", "-k", &place("examples/two-regions")])?;
        for namespace in ["east", "west"] {
            kubectl.wait_gone("", &format!("namespace/{namespace}"))?;
        }
        wait_for("the volumes to go with their namespaces", || {
            Ok(kubectl.list("", "persistentvolumes")?.is_empty().then_some(()))
        })
    })
}

fn apply(kubectl: &Kubectl, how: &str, what: &str) -> Result<()> {
    kubectl.run(&["apply", how, &manifests().join(what).display().to_string()]).map(drop)
}

/// Both regions and both ends of their link.
fn ready(kubectl: &Kubectl) -> Result<()> {
    for (region, other) in [("east", "west"), ("west", "east")] {
        kubectl.wait_condition(region, &format!("brokercluster/{region}"), "Ready", "True")?;
        kubectl.wait_condition(region, &format!("mirrorlink/{other}"), "Ready", "True")?;
    }
    kubectl.wait_condition("east", "topic.sealane.io/orders", "Ready", "True").map(drop)
}

/// `kubectl get mlink` shows of each end whom it links, that it is up, and how far it is behind.
fn links_show_their_lag(kubectl: &Kubectl) -> Result<()> {
    wait_for("the lag of both ends", || {
        let shown = kubectl.run(&["get", "mlink", "-A"])?;
        let rows: Vec<Vec<&str>> =
            shown.lines().map(|line| line.split("  ").map(str::trim).collect()).collect();
        let rows: Vec<Vec<&str>> =
            rows.into_iter().map(|row| row.into_iter().filter(|cell| !cell.is_empty()).collect()).collect();
        let (head, rows) = rows.split_first().context("a head")?;
        let wanted = ["NAMESPACE", "NAME", "PEER", "DIRECTION", "STATE", "LAG", "READY", "REASON"];
        ensure!(*head == wanted, "the columns are {head:?}");
        ensure!(rows.len() == 2, "there are {} links:\n{shown}", rows.len());
        for row in rows {
            let is_so =
                row.len() == wanted.len() && row[3] == "both" && row[4] == "Active" && row[6] == "True";
            ensure!(is_so && row[5].contains("0 records"), "a link is shown as {row:?}");
        }
        println!("{shown}");
        Ok(Some(()))
    })
}

const EACH_WAY: usize = 200;

/// What Java is told is acknowledged in one region comes to librdkafka in the other, each record once; and back again.
fn crosses(east: &str, west: &str) -> Result<()> {
    for (producer, from, to, consumer, word) in [
        (Library::Java, east, west, Library::Confluent, "java"),
        (Library::Confluent, west, east, Library::Java, "librdkafka"),
    ] {
        let records: Vec<Record> = (0..EACH_WAY).map(|number| Record::numbered(word, number)).collect();
        producer.produce_all(from, "orders", &records, &[])?;
        let group = format!("readers-of-{word}");
        let reader = consumer.start("consume", to, "orders", &["--group", &group, "--seconds", "200"])?;
        let own = |reader: &Running| -> Vec<String> {
            reader.records().iter().map(Record::text).filter(|text| text.starts_with(word)).collect()
        };
        wait_for(&format!("the records of {word} in the other region"), || {
            let came = own(&reader).len();
            ensure!(came >= EACH_WAY, "{came} of {EACH_WAY}; {}", reader.complaints());
            Ok(Some(()))
        })?;
        let came = own(&reader);
        let once: BTreeSet<&String> = came.iter().collect();
        ensure!(
            came.len() == EACH_WAY && once.len() == EACH_WAY,
            "{} came, {} of them new",
            came.len(),
            once.len()
        );
    }
    Ok(())
}

/// All in one partition, so that what comes late is not mistaken for what never comes.
fn a_lane_has_its_records_alone(kubectl: &Kubectl, east: &str) -> Result<()> {
    kubectl.wait_condition("east", "lanerouter/east", "Ready", "True")?;
    kubectl.wait_condition("east", "lane/boe-cart", "Accepted", "True")?;
    let baseline =
        Library::Confluent.start("consume", east, "orders", &["--group", "shop", "--seconds", "250"])?;
    baseline.wait_assigned()?;
    let lane = lane_consumer(kubectl, 2)?;
    let shown = kubectl.wait_condition("east", "lane/boe-cart", "Ready", "True")?;
    ensure!(shown["reason"] == "Active", "the lane is {shown}");
    for (text, in_lane) in
        [("plain 1", false), ("lane 1", true), ("plain 2", false), ("lane 2", true), ("plain 3", false)]
    {
        let record = Record { value: Some(text.into()), ..Record::default() }.partition(1);
        let record = if in_lane { record.header("x-lane", "boe-cart") } else { record };
        Library::Java.produce_all(east, "orders", &[record], &[])?;
    }
    let output = lane.wait_with_output()?;
    let got = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(got.lines().eq(["lane 1", "lane 2"]), "the lane's consumer got {got:?}: {errors}");
    let theirs = |text: &str| text.starts_with("plain") || text.starts_with("lane");
    let got = || -> Vec<String> {
        baseline.records().iter().map(Record::text).filter(|text| theirs(text)).collect()
    };
    wait_for("the baseline's last record", || Ok(got().iter().any(|text| text == "plain 3").then_some(())))?;
    ensure!(got() == ["plain 1", "plain 2", "plain 3"], "the baseline got {:?}", got());
    // The twin: to somebody of another group, which has no consumer in the lane, a BOE lane's records do come.
    let other = ["--group", "no-lane-of-its-own"];
    let fallback =
        Library::Confluent.start("consume", east, "orders", &[&other[..], &["--seconds", "250"]].concat())?;
    wait_for("the lane's records in another group", || {
        let came: Vec<String> = fallback.records().iter().map(Record::text).collect();
        Ok(["lane 1", "lane 2", "plain 3"]
            .iter()
            .all(|text| came.iter().any(|found| found == text))
            .then_some(()))
    })
}

/// A consumer in the lane, which ends after so many records.
fn lane_consumer(kubectl: &Kubectl, count: usize) -> Result<Child> {
    let address = kubectl.object("east", "lane/boe-cart")?["status"]["address"].clone();
    let (address, count) = (address.as_str().context("the lane has an address")?, count.to_string());
    let consume = ["consume", "orders", "--group", "shop", "--server", address, "--count", &count];
    let exec = ["exec", "-n", "east", "east-0", "--", "/usr/bin/sealane"];
    let mut command = kubectl.command(&[&exec[..], &consume, &["--format", "%v\n"]].concat());
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().context("run kubectl")
}

/// All of ours is deleted while the namespace stays: volumes are kept, and nothing else of what came with it.
fn only_what_is_to_be_kept_is_left(kubectl: &Kubectl) -> Result<()> {
    let kinds = "lanerouter,lane,mirrorlink,linkgrant,topics.sealane.io,brokerpool,brokercluster";
    for namespace in ["east", "west"] {
        kubectl.run(&["delete", kinds, "--all", "-n", namespace, "--timeout=120s"])?;
    }
    let kinds = kubectl.run(&["api-resources", "--verbs=list", "--namespaced", "-o", "name"])?;
    let kinds: Vec<&str> = kinds.lines().filter(|kind| !kind.starts_with("events")).collect();
    for namespace in ["east", "west"] {
        let wanted: BTreeSet<String> = [
            "configmap/kube-root-ca.crt".to_owned(),
            format!("persistentvolumeclaim/data-{namespace}-0"),
            "rolebinding.rbac.authorization.k8s.io/sealane-operator".to_owned(),
            "serviceaccount/default".to_owned(),
        ]
        .into();
        wait_for(&format!("the end of all else in {namespace}"), || {
            let left = kubectl.run(&["get", &kinds.join(","), "-n", namespace, "-o", "name"])?;
            let left: BTreeSet<String> = left.lines().map(str::to_owned).collect();
            ensure!(left == wanted, "left are {left:?}");
            Ok(Some(()))
        })?;
    }
    Ok(())
}

fn texts(records: &[Record]) -> BTreeSet<String> {
    records.iter().map(Record::text).collect()
}
