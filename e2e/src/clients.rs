//! Real clients behind one face: produce a list of records, consume until a condition holds.
//!
//! The client programs in `e2e/clients` speak JSON lines on standard input and output; this file starts them and
//! reads those lines. It decides nothing about what is right: a test compares what comes out. Every wait has a
//! deadline, and its error shows what the client said so far.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use crate::tools;

/// How long anything may take before a test gives up. Nothing asserts that it took less.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// A client library that the tests drive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Library {
    /// confluent-kafka: current librdkafka.
    Confluent,
    KafkaPython,
    Aiokafka,
    FranzGo,
    Sarama,
    KafkaGo,
    Kafkajs,
    /// Apache Kafka's own. Not in `ALL`: some scenarios start dozens of clients, and each is a JVM.
    Java,
}

/// One record as a test states it or a client saw it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Record {
    pub partition: Option<i32>,
    pub offset: Option<i64>,
    pub timestamp: Option<i64>,
    pub key: Option<Vec<u8>>,
    pub value: Option<Vec<u8>>,
    pub headers: Vec<(String, Option<Vec<u8>>)>,
}

/// What a producer was told about one record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ack {
    /// Index into the list of records.
    pub number: usize,
    pub outcome: Result<(i32, i64), String>,
}

/// A client program that is running.
pub struct Running {
    child: Child,
    said: Arc<Said>,
}

/// The lines of a running client, and its complaints.
#[derive(Default)]
struct Said {
    state: Mutex<SaidState>,
    changed: Condvar,
}

#[derive(Default)]
struct SaidState {
    lines: Vec<Value>,
    errors: String,
    ended: bool,
}

impl Library {
    pub const ALL: [Library; 7] = [
        Library::Confluent,
        Library::KafkaPython,
        Library::Aiokafka,
        Library::FranzGo,
        Library::Sarama,
        Library::KafkaGo,
        Library::Kafkajs,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Library::Confluent => "confluent",
            Library::KafkaPython => "kafka-python",
            Library::Aiokafka => "aiokafka",
            Library::FranzGo => "franz-go",
            Library::Sarama => "sarama",
            Library::KafkaGo => "kafka-go",
            Library::Kafkajs => "kafkajs",
            Library::Java => "java",
        }
    }

    /// The codecs that this client can write.
    pub fn codecs(self) -> &'static [&'static str] {
        match self {
            Library::Kafkajs => &["none", "gzip", "snappy"],
            _ => &["none", "gzip", "snappy", "lz4", "zstd"],
        }
    }

    fn command(self) -> Result<Command> {
        Ok(match self {
            Library::Confluent | Library::KafkaPython | Library::Aiokafka => {
                let mut command = Command::new(tools::python()?);
                command.arg(tools::client_files().join("python/client.py")).arg(self.name());
                command
            }
            Library::FranzGo | Library::Sarama | Library::KafkaGo => {
                let mut command = Command::new(tools::go_clients()?);
                command.arg(self.name());
                command
            }
            Library::Kafkajs => {
                let mut command = Command::new("node");
                command.arg(tools::node_clients()?.join("client.js"));
                command
            }
            Library::Java => crate::peer::program(&tools::client_files().join("java/Client.java"))?,
        })
    }

    /// Starts `action` ("produce", "consume", "times"); `options` as in `client.py`.
    pub fn start(self, action: &str, bootstrap: &str, topic: &str, options: &[&str]) -> Result<Running> {
        let mut command = self.command()?;
        command.args([action, "--bootstrap", bootstrap, "--topic", topic]).args(options);
        Running::start(&mut command)
    }

    /// Produces the records and returns every acknowledgement, ordered by record.
    pub fn produce(
        self,
        bootstrap: &str,
        topic: &str,
        records: &[Record],
        options: &[&str],
    ) -> Result<Vec<Ack>> {
        let mut producer = self.start("produce", bootstrap, topic, options)?;
        let mut input = producer.input()?;
        for (number, record) in records.iter().enumerate() {
            input.write_all(record.line(number).as_bytes())?;
        }
        drop(input);
        producer.wait_end(PATIENCE).with_context(|| format!("{} produces", self.name()))?;
        let mut acks = producer.acks();
        acks.sort_by_key(|ack| ack.number);
        Ok(acks)
    }

    /// As [`Library::produce`], and fails unless every record was acknowledged. Returns (partition, offset).
    pub fn produce_all(
        self,
        bootstrap: &str,
        topic: &str,
        records: &[Record],
        options: &[&str],
    ) -> Result<Vec<(i32, i64)>> {
        let acks = self.produce(bootstrap, topic, records, options)?;
        ensure!(acks.len() == records.len(), "{} acks for {} records", acks.len(), records.len());
        acks.into_iter()
            .map(|ack| {
                ack.outcome.map_err(|error| {
                    anyhow::anyhow!("{}: record {} failed: {error}", self.name(), ack.number)
                })
            })
            .collect()
    }

    /// Consumes `count` records and returns them in the order of arrival.
    pub fn consume(
        self,
        bootstrap: &str,
        topic: &str,
        count: usize,
        options: &[&str],
    ) -> Result<Vec<Record>> {
        let count_text = count.to_string();
        let mut all = vec!["--count", &count_text, "--seconds", "110"];
        // kafkajs cannot read outside of a group, kafka-go then reads one partition only.
        let group = fresh_group();
        if matches!(self, Library::Kafkajs | Library::KafkaGo) && !options.contains(&"--group") {
            all.extend(["--group", &group]);
        }
        all.extend(options);
        let mut consumer = self.start("consume", bootstrap, topic, &all)?;
        consumer.wait_end(PATIENCE).with_context(|| format!("{} consumes", self.name()))?;
        let records = consumer.records();
        ensure!(
            records.len() >= count,
            "{} consumed {} of {count} records; {}",
            self.name(),
            records.len(),
            consumer.complaints()
        );
        Ok(records)
    }

    /// Reads a topic to its end: the records, and (partition, position, high watermark) of every partition.
    pub fn read_to_end(
        self,
        bootstrap: &str,
        topic: &str,
        options: &[&str],
    ) -> Result<(Vec<Record>, Vec<(i32, i64, i64)>)> {
        let mut all = vec!["--until-end", "--seconds", "110"];
        all.extend(options);
        let mut consumer = self.start("consume", bootstrap, topic, &all)?;
        consumer.wait_end(PATIENCE).with_context(|| format!("{} reads to the end", self.name()))?;
        let ends = consumer.lines().iter().filter(|line| line.get("end").is_some()).map(end_of).collect();
        Ok((consumer.records(), ends))
    }
}

impl Record {
    /// Record number `n`: key `k<n>`, value `<prefix><n>`.
    pub fn numbered(prefix: &str, n: usize) -> Record {
        Record {
            key: Some(format!("k{n}").into_bytes()),
            value: Some(format!("{prefix}{n}").into_bytes()),
            ..Record::default()
        }
    }

    pub fn partition(mut self, partition: i32) -> Record {
        self.partition = Some(partition);
        self
    }

    pub fn header(mut self, name: &str, value: &str) -> Record {
        self.headers.push((name.to_owned(), Some(value.as_bytes().to_vec())));
        self
    }

    /// The value as text, for records that a test wrote as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(self.value.as_deref().unwrap_or_default()).into_owned()
    }

    /// What a client must give back unchanged.
    pub fn content(&self) -> (Option<&[u8]>, Option<&[u8]>, &[(String, Option<Vec<u8>>)]) {
        (self.key.as_deref(), self.value.as_deref(), &self.headers)
    }

    /// The input line of a producer.
    pub fn line(&self, number: usize) -> String {
        let headers: Vec<Value> =
            self.headers.iter().map(|(name, value)| json!([name, value.as_deref().map(hex)])).collect();
        let line = json!({
            "n": number, "p": self.partition, "t": self.timestamp,
            "k": self.key.as_deref().map(hex), "v": self.value.as_deref().map(hex), "h": headers,
        });
        format!("{line}\n")
    }

    /// A record from a line of a consumer or of the log reader.
    pub fn from_line(line: &Value) -> Result<Record> {
        let bytes = |value: &Value| value.as_str().map(unhex).transpose();
        let mut headers = Vec::new();
        for pair in line["h"].as_array().into_iter().flatten() {
            headers.push((pair[0].as_str().unwrap_or_default().to_owned(), bytes(&pair[1])?));
        }
        Ok(Record {
            partition: line["p"].as_i64().map(|p| p as i32),
            offset: line["o"].as_i64(),
            timestamp: line["t"].as_i64(),
            key: bytes(&line["k"])?,
            value: bytes(&line["v"])?,
            headers,
        })
    }
}

impl Running {
    /// Starts any program that prints JSON lines.
    pub fn start(command: &mut Command) -> Result<Running> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().with_context(|| format!("start {:?}", command.get_program()))?;
        let said = Arc::new(Said::default());
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        let errors = Arc::clone(&said);
        let reader = std::thread::spawn(move || {
            for line in BufReader::new(stderr.expect("stderr is piped")).lines().map_while(Result::ok) {
                errors.change(|state| {
                    state.errors.push_str(&line);
                    state.errors.push('\n');
                });
            }
        });
        let lines = Arc::clone(&said);
        std::thread::spawn(move || {
            for line in BufReader::new(stdout.expect("stdout is piped")).lines().map_while(Result::ok) {
                match serde_json::from_str(&line) {
                    Ok(value) => lines.change(|state| state.lines.push(value)),
                    Err(_) => lines.change(|state| state.errors.push_str(&format!("not JSON: {line}\n"))),
                }
            }
            // A panic of the other reader is not ours to report.
            let _ = reader.join();
            lines.change(|state| state.ended = true);
        });
        Ok(Running { child, said })
    }

    /// The program's standard input; dropping it says "no more".
    pub fn input(&mut self) -> Result<std::process::ChildStdin> {
        self.child.stdin.take().context("the input was taken before")
    }

    /// Waits for the program to end by itself, and fails if it complains.
    pub fn wait_end(&mut self, limit: Duration) -> Result<()> {
        self.wait_until(limit, "its end", |_, ended| ended)?;
        let status = self.child.wait()?;
        ensure!(status.success(), "ended with {status}: {}", self.complaints());
        Ok(())
    }

    /// Waits until `records` records have come.
    pub fn wait_records(&self, records: usize) -> Result<Vec<Record>> {
        let what = format!("{records} records");
        self.wait_until(PATIENCE, &what, |lines, _| {
            lines.iter().filter(|line| line.get("v").is_some()).count() >= records
        })?;
        Ok(self.records())
    }

    /// Waits until the client says that it holds partitions, and returns the latest list.
    pub fn wait_assigned(&self) -> Result<Vec<i32>> {
        self.wait_until(PATIENCE, "an assignment", |lines, _| {
            lines.iter().any(|line| line.get("assigned").is_some())
        })?;
        Ok(self.assigned())
    }

    /// The latest assignment it spoke of.
    pub fn assigned(&self) -> Vec<i32> {
        let lines = self.lines();
        let last = lines.iter().rev().find_map(|line| line["assigned"].as_array().cloned());
        last.unwrap_or_default().iter().filter_map(Value::as_i64).map(|p| p as i32).collect()
    }

    /// Waits until `done(lines so far, ended)`.
    pub fn wait_until(
        &self,
        limit: Duration,
        what: &str,
        mut done: impl FnMut(&[Value], bool) -> bool,
    ) -> Result<()> {
        let end = Instant::now() + limit;
        let mut state = self.said.state.lock().expect("no reader panics");
        loop {
            if done(&state.lines, state.ended) {
                return Ok(());
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() || state.ended {
                let last = state.lines.iter().rev().take(3).map(Value::to_string).collect::<Vec<_>>();
                bail!(
                    "the client {} before {what}: {} lines, the last {last:?}; {}",
                    if state.ended { "ended" } else { "took too long" },
                    state.lines.len(),
                    state.errors
                );
            }
            state = self.said.changed.wait_timeout(state, left).expect("no reader panics").0;
        }
    }

    pub fn lines(&self) -> Vec<Value> {
        self.said.state.lock().expect("no reader panics").lines.clone()
    }

    pub fn records(&self) -> Vec<Record> {
        let lines = self.lines();
        lines
            .iter()
            .filter(|line| line.get("v").is_some())
            .filter_map(|line| Record::from_line(line).ok())
            .collect()
    }

    pub fn acks(&self) -> Vec<Ack> {
        self.lines().iter().filter_map(ack_of).collect()
    }

    /// What it wrote to standard error, and error lines.
    pub fn complaints(&self) -> String {
        let state = self.said.state.lock().expect("no reader panics");
        let errors: Vec<String> =
            state.lines.iter().filter(|line| line.get("error").is_some()).map(Value::to_string).collect();
        format!("{}{}", state.errors, errors.join("\n"))
    }

    /// SIGKILL, at once.
    pub fn kill(&mut self) {
        // Both fail only when it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// SIGTERM: most clients then leave their group without a word; use for what a pod restart does.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.kill();
    }
}

impl Said {
    fn change(&self, change: impl FnOnce(&mut SaidState)) {
        change(&mut self.state.lock().expect("no reader panics"));
        self.changed.notify_all();
    }
}

/// A group that nobody has used before.
fn fresh_group() -> String {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    format!("e2e-{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed))
}

fn ack_of(line: &Value) -> Option<Ack> {
    let number = line.get("n")?.as_u64()? as usize;
    let outcome = match line["error"].as_str() {
        Some(error) => Err(error.to_owned()),
        None => Ok((line["p"].as_i64()? as i32, line["o"].as_i64()?)),
    };
    Some(Ack { number, outcome })
}

fn end_of(line: &Value) -> (i32, i64, i64) {
    let number = |name: &str| line[name].as_i64().unwrap_or(i64::MIN);
    (number("end") as i32, number("position"), number("high"))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Result<Vec<u8>> {
    ensure!(text.len().is_multiple_of(2), "odd number of hex digits");
    (0..text.len()).step_by(2).map(|at| Ok(u8::from_str_radix(&text[at..at + 2], 16)?)).collect()
}
