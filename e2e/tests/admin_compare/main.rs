//! Admin answers of Sealane beside those of a real Apache Kafka 4.4, field by field, on the same requests. The
//! requests are in `steps.rs`; every difference stands with its reason in `admin-differences.txt`, and neither an
//! unlisted difference nor a listed one that has gone passes. `SEALANE_E2E_TARGET=kafka` compares Kafka with
//! itself, which shows that nothing differs by chance. `SEALANE_ADMIN_PRINT=1` prints every answer.

mod steps;

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use e2e::compare::{Difference, Driver, Reviewed, Side, differences};
use e2e::peer::Peer;
use e2e::process::Plan;
use e2e::server::Server;
use serde_json::{Value, json};
use steps::Step;

#[test]
fn admin_answers_differ_from_kafkas_only_where_a_reviewed_list_says_so() -> Result<()> {
    let kafka = Peer::start(&[])?;
    let other = if Server::is_kafka() {
        Server::Kafka(Peer::start(&[])?)
    } else {
        Server::Sealane(Box::new(Plan::one().start()?))
    };
    let mut driver = Driver::start()?;
    let mut sides = [Side::new(kafka.bootstrap()), Side::new(other.bootstrap())];
    let found = compare(&mut driver, &mut sides)?;
    let list = if Server::is_kafka() { KAFKA_ITSELF } else { include_str!("../../admin-differences.txt") };
    let complaints = Reviewed::parse(list)?.complaints(&found);
    assert!(complaints.is_empty(), "{} differences:\n{}", complaints.len(), complaints.join("\n"));
    Ok(())
}

fn compare(driver: &mut Driver, sides: &mut [Side; 2]) -> Result<Vec<Difference>> {
    let left = driver.ranges(sides[0].address())?;
    let right = driver.ranges(sides[1].address())?;
    let printing = std::env::var_os("SEALANE_ADMIN_PRINT").is_some();
    let mut found = Vec::new();
    let mut invalid = Vec::new();
    let mut asked = 0;
    for step in steps::all() {
        for version in versions(&step, &left, &right) {
            let request = request(&step, version);
            let name = format!("{} v{version}", step.name);
            let mut answers = Vec::new();
            for side in sides.iter_mut() {
                let answer = side.ask_named(driver, &request, &step.names);
                let answer = answer.with_context(|| name.clone())?;
                invalid.extend(answer.get("invalid").map(|why| format!("{name}: {why}")));
                answers.push(answer);
            }
            if printing {
                println!("{name}\n  {}\n  {}", answers[0], answers[1]);
            }
            differences(&name, &answers[0], &answers[1], &mut found);
            asked += 1;
        }
    }
    println!("{asked} requests, {} differences", found.len());
    assert!(invalid.is_empty(), "not Kafka's messages:\n{}", invalid.join("\n"));
    assert!(asked > 400, "only {asked} requests");
    Ok(found)
}

/// The versions of a step that both sides advertise. One that asks for an unknown version keeps it.
fn versions(
    step: &Step,
    left: &BTreeMap<String, (i64, i64)>,
    right: &BTreeMap<String, (i64, i64)>,
) -> Vec<i64> {
    let (first, last) = (*step.versions.start(), *step.versions.end());
    if first == 99 {
        return vec![99];
    }
    let Some((left, right)) = left.get(step.api).zip(right.get(step.api)) else { return Vec::new() };
    (left.0.max(right.0).max(first)..=left.1.min(right.1).min(last)).collect()
}

fn request(step: &Step, version: i64) -> Value {
    let (member, content) = &step.content;
    json!({"api": step.api, "version": version, "on": step.on, *member: at_version(content, version)})
}

/// Puts the version into texts and leaves out the fields (`name@from..to`) that it does not have.
fn at_version(content: &Value, version: i64) -> Value {
    match content {
        Value::String(text) => json!(text.replace("$v", &version.to_string())),
        Value::Array(elements) => elements.iter().map(|element| at_version(element, version)).collect(),
        Value::Object(fields) => {
            let fields = fields.iter().filter_map(|(name, value)| {
                let (name, range) = name.split_once('@').unwrap_or((name, ".."));
                let (from, to) = range.split_once("..").expect("a range has two dots");
                let outside = from.parse().is_ok_and(|from: i64| version < from)
                    || to.parse().is_ok_and(|to: i64| version > to);
                (!outside).then(|| (name.to_owned(), at_version(value, version)))
            });
            Value::Object(fields.collect())
        }
        other => other.clone(),
    }
}

/// Where two Kafkas differ: each has its own folder and ports.
const KAFKA_ITSELF: &str = "
describe the broker v* | ok.results[1].configs[log.dirs].value | * | * | its own folder
describe the broker v* | ok.results[1].configs[listeners].value | * | * | its controller's port
describe the broker v* | ok.results[1].configs[controller.quorum.bootstrap.servers].value | * | * | as above
";
