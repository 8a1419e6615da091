//! Answers of two brokers to the same requests, compared field by field. Owns the driver process (a Java program
//! that prints every field of an answer as JSON), what is masked before comparing (addresses, ids), and the
//! reviewed list of differences: one that is not listed fails, and so does a listed one that no longer occurs.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Map, Value, json};

use crate::{peer, tools};

/// The Java program that asks; one process serves both brokers.
pub struct Driver {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

/// One broker under comparison: its address and what it has named so far.
pub struct Side {
    address: String,
    /// Masked value by name, `id(topic)` for topic ids: filled from answers, put into later requests.
    names: BTreeMap<String, String>,
}

/// One difference: in which step, at which place of the answer, and the two values.
#[derive(Debug, PartialEq, Eq)]
pub struct Difference {
    pub step: String,
    pub path: String,
    pub left: String,
    pub right: String,
}

/// The reviewed list. A line is `step | path | left | right | reason`; `*` stands for any text.
pub struct Reviewed {
    rules: Vec<Rule>,
}

struct Rule {
    line: usize,
    patterns: [String; 4],
}

impl Driver {
    pub fn start() -> Result<Driver> {
        let mut command = peer::program(&tools::client_files().join("wire/Wire.java"))?;
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().context("start java")?;
        let input = child.stdin.take().context("no standard input")?;
        let output = BufReader::new(child.stdout.take().context("no standard output")?);
        Ok(Driver { child, input, output })
    }

    /// Sends one request (see Wire.java) and returns the answer as the side gave it.
    pub fn ask(&mut self, request: &Value) -> Result<Value> {
        writeln!(self.input, "{request}")?;
        self.input.flush()?;
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        ensure!(!line.is_empty(), "the driver ended at {request}");
        Ok(serde_json::from_str(&line)?)
    }

    /// The version range of every API that a broker advertises, by the driver's name of the API.
    pub fn ranges(&mut self, address: &str) -> Result<BTreeMap<String, (i64, i64)>> {
        let known = self.ask(&json!({"ranges": true}))?;
        let answer = self.ask(&json!({"to": address, "api": "API_VERSIONS", "version": 0, "body": {}}))?;
        let keys = answer["ok"]["apiKeys"].as_array().context("ApiVersions failed")?;
        let mut ranges = BTreeMap::new();
        for (name, range) in known.as_object().context("no ranges")? {
            if let Some(found) = keys.iter().find(|key| key["apiKey"] == range["key"]) {
                let end = |side: &str, key: &str| found[side].as_i64().zip(range[key].as_i64());
                let (min, known_min) = end("minVersion", "min").context("no minimum")?;
                let (max, known_max) = end("maxVersion", "max").context("no maximum")?;
                ranges.insert(name.clone(), (min.max(known_min), max.min(known_max)));
            }
        }
        Ok(ranges)
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        // Both fail only when it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Side {
    pub fn new(address: String) -> Side {
        Side { address, names: BTreeMap::new() }
    }

    /// Gives a value of an answer a name: the same name on both sides is equal from now on.
    pub fn name(&mut self, name: &str, value: &Value) {
        if let Some(text) = value.as_str()
            && !text.is_empty()
        {
            self.names.insert(name.to_owned(), text.to_owned());
        }
    }

    pub fn address(&self) -> &str {
        &self.address
    }

    /// Asks one request, gives `names` to values of the answer (JSON pointers), and returns the answer masked.
    /// `<name>` in the request stands for a named value.
    pub fn ask_named(
        &mut self,
        driver: &mut Driver,
        request: &Value,
        names: &[(&str, &str)],
    ) -> Result<Value> {
        let mut request = self.unmasked(request);
        request["to"] = json!(self.address);
        let mut answer = driver.ask(&request)?;
        let end = Instant::now() + SETTLE_LIMIT;
        while is_not_ready(&answer) && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(50));
            answer = driver.ask(&request)?;
        }
        self.learn_topic_ids(&answer);
        for (name, pointer) in names {
            self.name(name, answer.pointer(pointer).unwrap_or(&Value::Null));
        }
        Ok(self.masked(&answer))
    }

    fn learn_topic_ids(&mut self, answer: &Value) {
        match answer {
            Value::Array(elements) => elements.iter().for_each(|element| self.learn_topic_ids(element)),
            Value::Object(fields) => {
                if let (Some(name), Some(id)) = (fields.get("name"), fields.get("topicId"))
                    && id != ZERO_ID
                    && let Some(name) = name.as_str()
                {
                    self.name(&format!("id({name})"), id);
                }
                fields.values().for_each(|field| self.learn_topic_ids(field));
            }
            _ => {}
        }
    }

    fn unmasked(&self, value: &Value) -> Value {
        mapped(value, &|text| {
            let name = text.strip_prefix('<').and_then(|text| text.strip_suffix('>'));
            name.and_then(|name| self.names.get(name)).cloned()
        })
    }

    fn masked(&self, value: &Value) -> Value {
        let (host, port) = self.address.rsplit_once(':').unwrap_or((&self.address, ""));
        let mut masked = mapped(value, &|text| {
            if text == host || text == "localhost" {
                return Some("<host>".to_owned());
            }
            if text.contains(&self.address) {
                return Some(text.replace(&self.address, "<address>"));
            }
            let named = self.names.iter().find(|(_, value)| *value == text);
            named.map(|(name, _)| format!("<{name}>"))
        });
        mask_fields(&mut masked, port);
        masked
    }
}

impl Reviewed {
    pub fn parse(text: &str) -> Result<Reviewed> {
        let mut rules = Vec::new();
        for (index, line) in text.lines().enumerate() {
            if line.trim().is_empty() || line.starts_with('#') {
                continue;
            }
            let columns: Vec<&str> = line.split(" | ").map(str::trim).collect();
            let [step, path, left, right, reason] = columns[..] else {
                bail!("line {}: five columns are needed: {line}", index + 1);
            };
            ensure!(!reason.is_empty(), "line {}: a reason is needed", index + 1);
            rules.push(Rule { line: index + 1, patterns: [step, path, left, right].map(str::to_owned) });
        }
        Ok(Reviewed { rules })
    }

    /// What is wrong with `found`: differences without a rule, then rules without a difference.
    pub fn complaints(&self, found: &[Difference]) -> Vec<String> {
        let mut used = BTreeSet::new();
        let mut complaints = Vec::new();
        for difference in found {
            let rules: Vec<usize> =
                self.rules.iter().filter(|rule| rule.covers(difference)).map(|rule| rule.line).collect();
            match rules.first() {
                Some(_) => used.extend(rules),
                None => complaints.push(format!("not listed: {difference}")),
            }
        }
        let unused = self.rules.iter().filter(|rule| !used.contains(&rule.line));
        complaints.extend(unused.map(|rule| {
            format!("listed in line {}, but no longer there: {}", rule.line, rule.patterns.join(" | "))
        }));
        complaints
    }
}

impl Rule {
    fn covers(&self, found: &Difference) -> bool {
        let texts = [&found.step, &found.path, &found.left, &found.right];
        self.patterns.iter().zip(texts).all(|(pattern, text)| matches(pattern, text))
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} | {} | {} | {}", self.step, self.path, self.left, self.right)
    }
}

/// Appends every place where the two answers differ. Elements of arrays are matched by their natural key, in any
/// order. Texts of errors are compared by presence only: their wording is each broker's own.
pub fn differences(step: &str, left: &Value, right: &Value, found: &mut Vec<Difference>) {
    compare(step, String::new(), left, right, found);
}

fn compare(step: &str, path: String, left: &Value, right: &Value, found: &mut Vec<Difference>) {
    let mut differ = |left: String, right: String| {
        found.push(Difference { step: step.to_owned(), path: path.clone(), left, right });
    };
    match (left, right) {
        (Value::Object(left), Value::Object(right)) => by_key(step, &path, left, right, found),
        (Value::Array(left), Value::Array(right)) => {
            let keys = Keys::of(left).max(Keys::of(right));
            by_key(step, &path, &keys.keyed(left), &keys.keyed(right), found);
        }
        (Value::String(_), Value::String(_)) if path.to_lowercase().ends_with("errormessage") => {}
        (left, right) if left == right => {}
        (left, right) => differ(left.to_string(), right.to_string()),
    }
}

fn by_key(
    step: &str,
    path: &str,
    left: &Map<String, Value>,
    right: &Map<String, Value>,
    found: &mut Vec<Difference>,
) {
    let keys: BTreeSet<&String> = left.keys().chain(right.keys()).collect();
    for key in keys {
        let separator = if path.is_empty() || key.starts_with('[') { "" } else { "." };
        let path = format!("{path}{separator}{key}");
        let (ours, theirs) = (left.get(key), right.get(key));
        if let (Some(left), Some(right)) = (ours, theirs) {
            compare(step, path, left, right, found);
            continue;
        }
        let there = |value: Option<&Value>| match value {
            Some(Value::Object(_) | Value::Array(_)) => "present".to_owned(),
            Some(value) => value.to_string(),
            None => "absent".to_owned(),
        };
        found.push(Difference { step: step.to_owned(), path, left: there(ours), right: there(theirs) });
    }
}

/// How elements of an array are told apart: by their natural key, by it and a qualifier, or by position.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Keys {
    Natural,
    Qualified,
    Position,
}

impl Keys {
    /// The first way in which no two of them are equal.
    fn of(elements: &[Value]) -> Keys {
        let distinct = |way: Keys| {
            let keys: BTreeSet<String> = elements.iter().filter_map(|element| way.key(element)).collect();
            keys.len() == elements.len()
        };
        let ways = [Keys::Natural, Keys::Qualified];
        ways.into_iter().find(|way| distinct(*way)).unwrap_or(Keys::Position)
    }

    fn key(self, element: &Value) -> Option<String> {
        let field = |names: &[&str]| {
            let key = names.iter().find_map(|name| element.get(*name).filter(|key| !key.is_null()))?;
            Some(key.as_str().map_or_else(|| key.to_string(), str::to_owned))
        };
        match self {
            Keys::Natural => field(KEY_FIELDS),
            Keys::Qualified => Some(format!("{}/{}", field(KEY_FIELDS)?, field(QUALIFIERS)?)),
            Keys::Position => None,
        }
    }

    fn keyed(self, elements: &[Value]) -> Map<String, Value> {
        let key = |index: usize, element| self.key(element).unwrap_or_else(|| index.to_string());
        let keyed = elements.iter().enumerate();
        keyed.map(|(index, element)| (format!("[{}]", key(index, element)), element.clone())).collect()
    }
}

fn mapped(value: &Value, text: &dyn Fn(&str) -> Option<String>) -> Value {
    match value {
        Value::String(before) => text(before).map_or_else(|| value.clone(), Value::String),
        Value::Array(elements) => elements.iter().map(|element| mapped(element, text)).collect(),
        Value::Object(fields) => {
            Value::Object(fields.iter().map(|(name, field)| (name.clone(), mapped(field, text))).collect())
        }
        other => other.clone(),
    }
}

/// Masks what differs between any two brokers: the port, the data folder, counters of the whole cluster's life.
fn mask_fields(value: &mut Value, port: &str) {
    match value {
        Value::Array(elements) => elements.iter_mut().for_each(|element| mask_fields(element, port)),
        Value::Object(fields) => {
            for (name, field) in fields {
                match name.as_str() {
                    "port" if field.as_i64().is_some_and(|n| n.to_string() == port) => {
                        *field = json!("<port>")
                    }
                    "logDir" => *field = json!("<folder>"),
                    "clusterId" if field.is_string() => *field = json!("<cluster>"),
                    "finalizedFeaturesEpoch" | "totalBytes" | "usableBytes" => {
                        *field = json!(field.is_number())
                    }
                    _ => mask_fields(field, port),
                }
            }
        }
        _ => {}
    }
}

/// True for an answer that only asks the client to come again: a coordinator that loads or is not there yet.
fn is_not_ready(answer: &Value) -> bool {
    match answer {
        Value::Array(elements) => elements.iter().any(is_not_ready),
        Value::Object(fields) => fields.iter().any(|(name, field)| match field.as_i64() {
            Some(code) => name == "errorCode" && (14..=16).contains(&code),
            None => is_not_ready(field),
        }),
        _ => false,
    }
}

/// `*` in the pattern stands for any text.
fn matches(pattern: &str, text: &str) -> bool {
    let Some((head, rest)) = pattern.split_once('*') else { return pattern == text };
    let Some(text) = text.strip_prefix(head) else { return false };
    rest.is_empty() || (0..=text.len()).any(|at| text.is_char_boundary(at) && matches(rest, &text[at..]))
}

/// How long a coordinator may take to be there.
const SETTLE_LIMIT: Duration = Duration::from_secs(10);
const ZERO_ID: &str = "AAAAAAAAAAAAAAAAAAAAAA";

/// What names an element of an array, the first that it has.
const KEY_FIELDS: &[&str] = &[
    "resourceName",
    "apiKey",
    "partitionIndex",
    "partition",
    "partitionId",
    "groupId",
    "name",
    "topicName",
    "topic",
    "topicId",
    "nodeId",
    "brokerId",
    "memberId",
    "logDir",
    "key",
];

/// What tells elements of one key apart.
const QUALIFIERS: &[&str] = &["source", "resourceType"];

#[cfg(test)]
mod tests {
    use super::*;

    fn found(left: Value, right: Value) -> Vec<Difference> {
        let mut found = Vec::new();
        differences("step", &left, &right, &mut found);
        found
    }

    #[test]
    fn elements_are_matched_by_their_key_in_any_order() {
        let left = json!({"topics": [{"name": "a", "errorCode": 0}, {"name": "b", "errorCode": 3}]});
        let right = json!({"topics": [{"name": "b", "errorCode": 3}, {"name": "a", "errorCode": 7}]});
        let found = found(left, right);
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].to_string(), "step | topics[a].errorCode | 0 | 7");
    }

    #[test]
    fn wording_of_errors_is_free_but_not_their_presence() {
        assert!(found(json!({"errorMessage": "a"}), json!({"errorMessage": "b"})).is_empty());
        assert_eq!(found(json!({"errorMessage": "a"}), json!({"errorMessage": null})).len(), 1);
    }

    #[test]
    fn an_unlisted_difference_and_a_listed_one_that_is_gone_are_both_complaints() {
        let found = found(json!({"a": 1, "b": 1}), json!({"a": 2, "b": 2}));
        let list = "# title\nst* | a | 1 | * | because\nstep | c | 1 | 2 | because";
        let complaints = Reviewed::parse(list).unwrap().complaints(&found);
        assert_eq!(complaints.len(), 2, "{complaints:?}");
        assert!(complaints[0].starts_with("not listed: step | b"));
        assert!(complaints[1].starts_with("listed in line 3"));
    }

    #[test]
    fn a_star_matches_any_text() {
        assert!(matches("a*c*", "abbcd") && matches("*", "") && matches("abc", "abc"));
        assert!(!matches("a*c", "abcd") && !matches("", "a"));
    }

    #[test]
    fn addresses_and_topic_ids_are_masked_and_put_back() {
        let mut side = Side::new("127.0.0.1:9092".to_owned());
        let answer = json!({"topics": [{"name": "t", "topicId": "abc"}], "host": "127.0.0.1", "port": 9092});
        side.learn_topic_ids(&answer);
        let masked = side.masked(&answer);
        assert_eq!(masked["topics"][0]["topicId"], "<id(t)>");
        assert_eq!((masked["host"].clone(), masked["port"].clone()), (json!("<host>"), json!("<port>")));
        assert_eq!(side.unmasked(&json!({"topicId": "<id(t)>"})), json!({"topicId": "abc"}));
    }
}
