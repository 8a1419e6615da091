//! `sealane consume`: prints the records of a topic, alone or as a member of a group.
//!
//! Owns the loop: fetch, print, remember, heartbeat, commit. A position is committed after its
//! records have been printed, so what is printed twice was never lost. Ctrl-C ends it well: positions
//! are committed and the group is left.

mod assignor;
mod fetch;
mod format;
mod member;

use std::collections::BTreeMap;
use std::io::{self, Write as _};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use kafka_client::ClientError;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::sleep;

use crate::args::{Consume, OutputFormat};
use crate::produce::find_topic;
use crate::region::{EARLIEST, LATEST, Region};

use fetch::Fetched;
use format::Format;
use member::{Beat, Member};

pub async fn run(args: Consume) -> anyhow::Result<()> {
    let format = match args.output {
        OutputFormat::Json => Format::Json,
        OutputFormat::Text => Format::parse(&args.format)?,
    };
    let mut region = Region::new(&args.server)?;
    if let Some(lane) = &args.lane {
        region = region.in_lane(lane).await?;
    }
    find_topic(&region, &args.topic, false).await?;
    let member = args.group.as_deref().map(|group| Member::new(group, &args.topic));
    let mut consumer = Consumer {
        region,
        args,
        format,
        member,
        positions: BTreeMap::new(),
        ends: None,
        printed: 0,
        last_record: Instant::now(),
        uncommitted: false,
        last_commit: Instant::now(),
    };
    let mut signals = Signals::listen()?;
    let outcome = tokio::select! {
        outcome = consumer.consume() => outcome,
        () = signals.next() => Ok(()),
    };
    let left = consumer.leave().await;
    outcome.and(left)
}

struct Consumer {
    region: Region,
    args: Consume,
    format: Format,
    member: Option<Member>,
    /// Next offset to print, by assigned partition.
    positions: BTreeMap<i32, i64>,
    /// With --until-end: where each partition ended when it was first seen.
    ends: Option<BTreeMap<i32, i64>>,
    printed: u64,
    last_record: Instant,
    uncommitted: bool,
    last_commit: Instant,
}

impl Consumer {
    async fn consume(&mut self) -> anyhow::Result<()> {
        self.assign().await?;
        loop {
            if self.is_done() {
                return Ok(());
            }
            if let Some(seconds) = self.args.timeout
                && self.last_record.elapsed() > Duration::from_secs(seconds)
            {
                bail!("no record for {seconds} s; {} printed", self.printed);
            }
            self.keep_membership().await?;
            if self.positions.is_empty() {
                sleep(FETCH_WAIT).await;
                continue;
            }
            let topic = &self.args.topic;
            match fetch::fetch(&self.region, topic, &self.positions, FETCH_WAIT).await {
                Ok(fetched) => self.take(fetched).await?,
                Err(error) if error.is_retriable() => {
                    self.region.kafka.forget(topic);
                    sleep(RETRY_PAUSE).await;
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn is_done(&self) -> bool {
        let counted = self.args.count.is_some_and(|count| self.printed >= count);
        let ended = self.ends.as_ref().is_some_and(|ends| {
            let position = |partition| self.positions.get(partition).copied().unwrap_or(0);
            ends.iter().all(|(partition, end)| position(partition) >= *end)
        });
        counted || ended
    }

    /// Finds out which partitions to read and from where; tries again while a topic or a coordinator
    /// is still coming up.
    async fn assign(&mut self) -> anyhow::Result<()> {
        let started = Instant::now();
        while let Err(error) = self.try_assign().await {
            let client = error.downcast_ref::<ClientError>();
            let passing = client.is_some_and(|error| error.is_retriable() || member::is_rebalance(error));
            if !passing || started.elapsed() > ASSIGN_TIMEOUT {
                return Err(error);
            }
            self.region.kafka.forget(&self.args.topic);
            sleep(RETRY_PAUSE).await;
        }
        Ok(())
    }

    async fn try_assign(&mut self) -> anyhow::Result<()> {
        let topic = self.args.topic.clone();
        let partitions = match &mut self.member {
            None => {
                let metadata = self.region.kafka.topic(&topic, false).await?;
                metadata.partitions.iter().map(|partition| partition.index).collect()
            }
            Some(member) => member.join(&self.region).await?,
        };
        let committed = match &self.member {
            None => BTreeMap::new(),
            Some(member) => member.committed(&self.region, &partitions).await?,
        };
        let fresh: Vec<i32> = partitions.iter().copied().filter(|p| !committed.contains_key(p)).collect();
        self.positions = self.region.offsets(&topic, &fresh, self.reset()).await?;
        self.positions.extend(committed);
        if self.args.until_end {
            self.ends = Some(self.region.offsets(&topic, &partitions, LATEST).await?);
        }
        Ok(())
    }

    fn reset(&self) -> i64 {
        if self.args.from_beginning { EARLIEST } else { LATEST }
    }

    async fn keep_membership(&mut self) -> anyhow::Result<()> {
        if self.uncommitted && self.last_commit.elapsed() > COMMIT_INTERVAL {
            self.commit().await?;
        }
        let Some(member) = &mut self.member else { return Ok(()) };
        match member.beat(&self.region).await? {
            Beat::Steady => Ok(()),
            Beat::Rebalance => {
                // The heirs of our partitions go on after what we have printed.
                self.commit().await?;
                self.assign().await
            }
            Beat::Expelled => {
                self.uncommitted = false;
                self.assign().await
            }
        }
    }

    async fn take(&mut self, fetched: Vec<Fetched>) -> anyhow::Result<()> {
        let mut out = io::BufWriter::new(io::stdout().lock());
        let mut lost = Vec::new();
        for part in fetched {
            match part.outcome {
                Ok(batches) => {
                    let position = self.positions.entry(part.partition).or_insert(0);
                    for batch in batches {
                        let left = self.args.count.map_or(u64::MAX, |count| count - self.printed);
                        let (next, printed) = fetch::print(
                            &batch,
                            (&self.args.topic, part.partition),
                            *position,
                            left,
                            |record| self.format.print(&mut out, record),
                        )?;
                        self.uncommitted |= next != *position;
                        *position = next;
                        if printed > 0 {
                            self.printed += printed;
                            self.last_record = Instant::now();
                        }
                    }
                }
                Err(error) if error.code() == Some(kafka::ErrorCode::OffsetOutOfRange) => {
                    lost.push(part.partition);
                }
                Err(error) if error.is_retriable() => self.region.kafka.forget(&self.args.topic),
                Err(error) => return Err(error.into()),
            }
        }
        out.flush()?;
        drop(out);
        if !lost.is_empty() {
            let topic = &self.args.topic;
            let fresh = self.region.offsets(topic, &lost, self.reset()).await?;
            for (partition, offset) in &fresh {
                eprintln!("warning: {topic}-{partition}: the position is gone, going on at offset {offset}");
            }
            self.positions.extend(fresh);
        }
        Ok(())
    }

    async fn commit(&mut self) -> anyhow::Result<()> {
        let Some(member) = &self.member else { return Ok(()) };
        if !self.uncommitted {
            return Ok(());
        }
        self.last_commit = Instant::now();
        match member.commit(&self.region, &self.positions).await {
            Ok(()) => self.uncommitted = false,
            // The next heartbeat says what has become of the membership.
            Err(error) if error.is_retriable() || member::is_rebalance(&error) => {}
            Err(error) => return Err(error).context("commit"),
        }
        Ok(())
    }

    async fn leave(&mut self) -> anyhow::Result<()> {
        self.commit().await?;
        match &self.member {
            Some(member) => Ok(member.leave(&self.region).await?),
            None => Ok(()),
        }
    }
}

struct Signals(Signal, Signal);

impl Signals {
    fn listen() -> io::Result<Signals> {
        Ok(Signals(signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?))
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.0.recv() => {}
            _ = self.1.recv() => {}
        }
    }
}

/// The error of one partition in an answer.
fn partition_error(topic: &str, partition: i32, code: i16) -> Result<(), ClientError> {
    ClientError::check(|| format!("{topic}-{partition}"), code, None)
}

const FETCH_WAIT: Duration = Duration::from_millis(500);
const ASSIGN_TIMEOUT: Duration = Duration::from_secs(30);
const RETRY_PAUSE: Duration = Duration::from_millis(200);
const COMMIT_INTERVAL: Duration = Duration::from_secs(1);
