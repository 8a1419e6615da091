//! A load from a real client, librdkafka with its defaults, and readers that know nothing of the product.
//!
//! Lines are numbers in order; what the reader finds is held against them: each once, in order in every partition.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use super::Cluster;
use crate::clients::PATIENCE;
use crate::tools;

/// Numbered lines that kcat produces, idempotent and `acks=all`, with librdkafka's defaults beside that.
pub struct Lines {
    stop: Arc<AtomicBool>,
    written: Arc<AtomicU64>,
    feeder: std::thread::JoinHandle<Result<()>>,
    kcat: Child,
    errors: PathBuf,
}

/// Lines each second.
const LINES_PER_SECOND: u64 = 2_000;

/// What a reader finds at an offset of a partition.
pub type Found = BTreeMap<(i32, i64), String>;

/// A consumer that reads along, and what it saw.
pub struct Along {
    kcat: Child,
    file: PathBuf,
}

impl Lines {
    pub fn start(cluster: &Cluster, topic: &str) -> Result<Lines> {
        Lines::with(cluster, topic, LINES_PER_SECOND, &[])
    }

    /// So many lines each second, with these settings of librdkafka.
    pub fn with(cluster: &Cluster, topic: &str, per_second: u64, settings: &[&str]) -> Result<Lines> {
        let errors = cluster.dir.path().join(format!("kcat-{topic}.log"));
        let mut command = Command::new(tools::kcat()?);
        command.args(["-P", "-b", &cluster.bootstrap(), "-t", topic]);
        let always = ["enable.idempotence=true", "acks=all", "linger.ms=5", "message.timeout.ms=300000"];
        for setting in always.iter().chain(settings) {
            command.args(["-X", setting]);
        }
        if std::env::var_os("SEALANE_SOAK_KEEP").is_some() {
            command.args(["-X", "debug=eos,msg"]);
        }
        let mut kcat = command.stdin(Stdio::piped()).stderr(File::create(&errors)?).spawn()?;
        let mut input = kcat.stdin.take().context("it has a standard input")?;
        let (stop, written) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (stopped, count) = (stop.clone(), written.clone());
        let feeder = std::thread::spawn(move || {
            let begin = Instant::now();
            while !stopped.load(Ordering::Relaxed) {
                let due = begin.elapsed().as_millis() as u64 * per_second / 1000;
                for number in count.load(Ordering::Relaxed)..due {
                    writeln!(input, "{number}")?;
                    count.fetch_add(1, Ordering::Relaxed);
                }
                input.flush()?;
                std::thread::sleep(Duration::from_millis(5));
            }
            Ok(())
        });
        Ok(Lines { stop, written, feeder, kcat, errors })
    }

    pub fn written(&self) -> u64 {
        self.written.load(Ordering::Relaxed)
    }

    /// Waits until so many more lines were written.
    pub fn until_more(&self, count: u64) -> Result<()> {
        let (aim, end) = (self.written() + count, Instant::now() + PATIENCE);
        while self.written() < aim {
            let said = || fs::read_to_string(&self.errors).unwrap_or_default();
            ensure!(!self.feeder.is_finished(), "kcat takes no more lines: {}", said());
            ensure!(Instant::now() < end, "kcat takes lines too slowly");
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// Ends the input and waits until all of it is acknowledged; how many lines that is.
    pub fn finish(mut self) -> Result<u64> {
        self.stop.store(true, Ordering::Relaxed);
        let said = || fs::read_to_string(&self.errors).unwrap_or_default();
        let fed = self.feeder.join().expect("it returns its errors");
        fed.with_context(|| format!("kcat takes no more lines: {}", said()))?;
        let end = Instant::now() + PATIENCE;
        loop {
            match self.kcat.try_wait()? {
                Some(status) if status.success() => break,
                Some(status) => bail!("kcat ended with {status}: {}", said()),
                None if Instant::now() > end => {
                    self.kcat.kill()?;
                    self.kcat.wait()?;
                    bail!("not everything is acknowledged: {}", said());
                }
                None => std::thread::sleep(Duration::from_millis(20)),
            }
        }
        let said = said();
        ensure!(!said.contains("Delivery failed"), "kcat gave lines up: {said}");
        ensure!(!said.contains("terminating"), "kcat ended before all was said: {said}");
        Ok(self.written.load(Ordering::Relaxed))
    }
}

impl Along {
    pub fn start(cluster: &Cluster, topic: &str) -> Result<Along> {
        let file = cluster.dir.path().join(format!("along-{topic}"));
        let mut command = consumer(cluster, topic)?;
        command.args(["-u", "-X", "reconnect.backoff.max.ms=500"]);
        let kcat = command.stdin(Stdio::null()).stdout(File::create(&file)?).stderr(Stdio::null()).spawn()?;
        Ok(Along { kcat, file })
    }

    /// Ends it; what it saw must stand where it saw it. How much that was.
    pub fn judge(mut self, found: &Found) -> Result<usize> {
        self.kcat.kill()?;
        self.kcat.wait()?;
        let text = fs::read_to_string(&self.file)?;
        // It was ended in the middle of a line, perhaps.
        let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
        let seen = parsed(whole)?;
        for (place, value) in &seen {
            let there = found.get(place);
            ensure!(there == Some(value), "a consumer saw {value:?} at {place:?}, where {there:?} is");
        }
        Ok(seen.len())
    }
}

impl Drop for Along {
    fn drop(&mut self) {
        // Both fail only when it has ended already.
        let _ = self.kcat.kill();
        let _ = self.kcat.wait();
    }
}

fn consumer(cluster: &Cluster, topic: &str) -> Result<Command> {
    let mut command = Command::new(tools::kcat()?);
    let bootstrap = cluster.bootstrap();
    command.args(["-C", "-b", &bootstrap, "-t", topic, "-o", "beginning", "-f", "%p %o %s\\n"]);
    command.args(["-X", "check.crcs=true"]);
    Ok(command)
}

/// Everything that is in a topic. Offsets of a partition must come in order.
pub fn read(cluster: &Cluster, topic: &str) -> Result<Found> {
    let output = consumer(cluster, topic)?.arg("-e").stdin(Stdio::null()).output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success() && !said.contains("CRC"), "kcat reads: {said}");
    parsed(&String::from_utf8_lossy(&output.stdout))
}

fn parsed(text: &str) -> Result<Found> {
    let mut found = Found::new();
    let mut last: BTreeMap<i32, i64> = BTreeMap::new();
    for line in text.lines() {
        let mut words = line.splitn(3, ' ');
        let mut word = || words.next().with_context(|| format!("not three words: {line}"));
        let (partition, offset): (i32, i64) = (word()?.parse()?, word()?.parse()?);
        let before = last.insert(partition, offset);
        ensure!(before < Some(offset), "partition {partition}: offset {offset} after {before:?}");
        found.insert((partition, offset), word()?.to_owned());
    }
    Ok(found)
}

/// Every line from 0 to `count` is in the topic exactly once, and each partition has them in order.
pub fn judge(cluster: &Cluster, topic: &str, count: u64) -> Result<()> {
    judge_lines(&read(cluster, topic)?, count)
}

/// As [`judge`], of what was read; what is no number is somebody else's.
pub fn judge_lines(found: &Found, count: u64) -> Result<()> {
    let mut seen = vec![0u8; count as usize];
    let mut last: BTreeMap<i32, u64> = BTreeMap::new();
    for ((partition, _), value) in found {
        let Ok(number) = value.parse::<u64>() else { continue };
        let place = seen.get_mut(number as usize).with_context(|| format!("line {number} was never sent"))?;
        *place += 1;
        ensure!(*place == 1, "line {number} is there twice");
        let earlier = last.insert(*partition, number);
        ensure!(earlier < Some(number), "partition {partition}: {earlier:?} before {number}");
    }
    let lost: Vec<u64> = (0..count).filter(|number| seen[*number as usize] == 0).collect();
    ensure!(lost.is_empty(), "{} of {count} acknowledged lines are lost: {lost:?}", lost.len());
    Ok(())
}
