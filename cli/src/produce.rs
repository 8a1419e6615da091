//! `sealane produce`: lines of standard input to a topic, acknowledged by all, none twice.
//!
//! Idempotent (KIP-98): a batch that is sent again after a lost answer is not stored again. One batch
//! per partition is under way at a time. Ends when the input ends and all is acknowledged.

use std::collections::BTreeMap;
use std::io::{self, BufRead as _, IsTerminal as _};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::bail;
use bytes::Bytes;
use kafka::batch::Codec;
use kafka::messages::produce_request::{PartitionProduceData, TopicProduceData};
use kafka::messages::{InitProducerIdRequest, ProduceRequest};
use kafka::{BatchBuilder, ErrorCode, Offset, ProducerEpoch, ProducerId, TimestampMs};
use kafka_client::{ClientError, TopicMetadata};
use serde::Serialize;
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};

use crate::args::Produce;
use crate::output::show;
use crate::region::{Region, text};

#[derive(Serialize)]
struct Report {
    topic: String,
    records: u64,
    partitions: Vec<Written>,
}

#[derive(Serialize)]
struct Written {
    partition: i32,
    records: u64,
    first_offset: i64,
    last_offset: i64,
}

pub async fn run(args: Produce) -> anyhow::Result<()> {
    let mut region = Region::new(&args.server)?;
    if let Some(lane) = &args.lane {
        region = region.in_lane(lane).await?;
    }
    let topic = find_topic(&region, &args.topic, true).await?;
    if let Some(partition) = args.partition
        && !topic.partitions.iter().any(|known| known.index == partition)
    {
        bail!("topic {} has {} partitions, no partition {partition}", topic.name, topic.partitions.len());
    }
    let mut producer = Producer::new(region, topic, args).await?;
    let mut lines = read_lines();
    while let Some(line) = lines.recv().await {
        producer.add(line?);
        // What comes close together travels together.
        while producer.has_room() {
            match timeout(LINGER, lines.recv()).await {
                Ok(Some(line)) => producer.add(line?),
                Ok(None) | Err(_) => break,
            }
        }
        producer.send().await?;
    }
    producer.report()
}

struct Producer {
    region: Region,
    topic: TopicMetadata,
    args: Produce,
    id: ProducerId,
    epoch: ProducerEpoch,
    waiting: Vec<Vec<u8>>,
    waiting_bytes: usize,
    /// For records without a key: each batch goes to the next partition.
    turn: usize,
    written: BTreeMap<i32, Written>,
}

impl Producer {
    async fn new(region: Region, topic: TopicMetadata, args: Produce) -> anyhow::Result<Producer> {
        let request = InitProducerIdRequest::default()
            .with_transactional_id(None)
            .with_transaction_timeout_ms(60_000)
            .with_producer_id((-1).into())
            .with_producer_epoch(-1);
        let any = region.kafka.any().await?;
        let version = any.version_of::<InitProducerIdRequest>(4)?;
        let answer = any.call_at(version, &request).await?;
        ClientError::check(|| "producer id".to_owned(), answer.error_code, None)?;
        Ok(Producer {
            region,
            topic,
            args,
            id: ProducerId(answer.producer_id.0),
            epoch: ProducerEpoch(answer.producer_epoch),
            waiting: Vec::new(),
            waiting_bytes: 0,
            turn: 0,
            written: BTreeMap::new(),
        })
    }

    fn add(&mut self, line: Vec<u8>) {
        self.waiting_bytes += line.len() + 64;
        self.waiting.push(line);
    }

    fn has_room(&self) -> bool {
        self.waiting.len() < BATCH_RECORDS_MAX && self.waiting_bytes < BATCH_BYTES
    }

    /// Sends what waits as one batch, and waits for its acknowledgement.
    async fn send(&mut self) -> anyhow::Result<()> {
        let lines = std::mem::take(&mut self.waiting);
        self.waiting_bytes = 0;
        let partition = self.partition();
        let sequence = self.written.get(&partition).map_or(0, |written| written.records);
        let batch = self.batch(&lines, i32::try_from(sequence % (1 << 31)).unwrap_or(0));
        let base = self.deliver(partition, batch).await?;
        let count = lines.len() as u64;
        let written = self.written.entry(partition).or_insert(Written {
            partition,
            records: 0,
            first_offset: base,
            last_offset: base,
        });
        written.records += count;
        written.last_offset = base + count as i64 - 1;
        Ok(())
    }

    fn partition(&mut self) -> i32 {
        let partitions = &self.topic.partitions;
        match (self.args.partition, &self.args.key) {
            (Some(partition), _) => partition,
            (None, Some(key)) => partitions[partition_of_key(key.as_bytes(), partitions.len())].index,
            (None, None) => {
                self.turn += 1;
                partitions[self.turn % partitions.len()].index
            }
        }
    }

    fn batch(&self, lines: &[Vec<u8>], sequence: i32) -> Bytes {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
        let mut builder = BatchBuilder::new(Offset(0), TimestampMs(now as i64), Codec::None);
        builder.producer(self.id, self.epoch, sequence);
        let headers: Vec<(&str, Option<&[u8]>)> =
            self.args.header.iter().map(|(name, value)| (name.as_str(), Some(value.as_bytes()))).collect();
        let key = self.args.key.as_ref().map(|key| key.as_bytes());
        for (delta, line) in lines.iter().enumerate() {
            builder.push(delta as i32, 0, key, Some(line), &headers);
        }
        builder.build().bytes
    }

    /// Sends until it is acknowledged, refused for good, or [`DELIVERY_TIMEOUT`] has passed. What keeps it
    /// waiting is said once.
    async fn deliver(&self, partition: i32, batch: Bytes) -> anyhow::Result<i64> {
        let started = Instant::now();
        let mut said = false;
        loop {
            let error = match self.try_deliver(partition, &batch).await {
                Ok(offset) => return Ok(offset),
                Err(error) => error,
            };
            if !error.is_retriable() {
                return Err(error.into());
            }
            let waited = started.elapsed();
            if waited > DELIVERY_TIMEOUT {
                return Err(anyhow::Error::from(error)
                    .context(format!("given up after {} s", DELIVERY_TIMEOUT.as_secs())));
            }
            // A storage error seldom passes by itself; a leader that moves soon does.
            let is_storage = error.code() == Some(ErrorCode::KafkaStorageError);
            if !said && (is_storage || waited > QUIET_FOR) {
                said = true;
                eprintln!("warning: {error}; trying again for {} s", DELIVERY_TIMEOUT.as_secs());
            }
            self.region.kafka.forget(&self.topic.name);
            sleep(RETRY_PAUSE).await;
        }
    }

    async fn try_deliver(&self, partition: i32, batch: &Bytes) -> Result<i64, ClientError> {
        let name = &self.topic.name;
        let (leader, _) = self.region.kafka.leader(name, partition).await?;
        let data = PartitionProduceData::default().with_index(partition).with_records(Some(batch.clone()));
        let topic = TopicProduceData::default().with_name(text(name).into()).with_partition_data(vec![data]);
        let request =
            ProduceRequest::default().with_acks(-1).with_timeout_ms(TIMEOUT_MS).with_topic_data(vec![topic]);
        let version = leader.version_of::<ProduceRequest>(12)?;
        let answer = leader.call_at(version, &request).await?;
        let answered = answer.responses.into_iter().flat_map(|topic| topic.partition_responses).next();
        let Some(answered) = answered else {
            return Err(ClientError::Closed {
                endpoint: leader.endpoint().clone(),
                reason: "the answer to Produce names no partition".to_owned(),
            });
        };
        let of_records =
            answered.record_errors.first().and_then(|error| error.batch_index_error_message.as_ref());
        let message = of_records.or(answered.error_message.as_ref()).map(ToString::to_string);
        ClientError::check(|| format!("topic {name}"), answered.error_code, message)?;
        Ok(answered.base_offset)
    }

    fn report(self) -> anyhow::Result<()> {
        let report = Report {
            topic: self.topic.name,
            records: self.written.values().map(|written| written.records).sum(),
            partitions: self.written.into_values().collect(),
        };
        show(self.args.output.output, &report, String::new)?;
        Ok(())
    }
}

/// The topic, waiting a moment for it: the broker may have to make it (`create`), or a mirror brings it.
pub async fn find_topic(region: &Region, name: &str, create: bool) -> anyhow::Result<TopicMetadata> {
    let started = Instant::now();
    loop {
        match region.kafka.topic(name, create).await {
            Ok(topic) if !topic.partitions.is_empty() => return Ok(topic),
            Err(error @ ClientError::Refused { .. }) if !error.is_retriable() => return Err(error.into()),
            Err(error) if started.elapsed() > TOPIC_TIMEOUT => return Err(error.into()),
            Err(ClientError::Refused { .. }) => sleep(RETRY_PAUSE).await,
            Err(error) => return Err(error.into()),
            Ok(_) if started.elapsed() > TOPIC_TIMEOUT => bail!("topic {name} has no partitions"),
            Ok(_) => {
                region.kafka.forget(name);
                sleep(RETRY_PAUSE).await;
            }
        }
    }
}

/// Lines without their ends. A thread of its own, because standard input blocks.
fn read_lines() -> mpsc::Receiver<io::Result<Vec<u8>>> {
    if io::stdin().is_terminal() {
        eprintln!("Each line becomes a record; end with ctrl-D.");
    }
    let (lines, received) = mpsc::channel(LINES_WAITING_MAX);
    std::thread::spawn(move || {
        let mut input = io::stdin().lock();
        loop {
            let mut line = Vec::new();
            let item = match input.read_until(b'\n', &mut line) {
                Ok(0) => return,
                Ok(_) => {
                    line.pop_if(|last| *last == b'\n');
                    line.pop_if(|last| *last == b'\r');
                    Ok(line)
                }
                Err(error) => Err(error),
            };
            let failed = item.is_err();
            if lines.blocking_send(item).is_err() || failed {
                return;
            }
        }
    });
    received
}

/// Where the Java client's default partitioner puts a key, so that all clients agree.
fn partition_of_key(key: &[u8], partitions: usize) -> usize {
    (murmur2(key) & 0x7fff_ffff) as usize % partitions
}

/// MurmurHash2, 32 bits, with Kafka's seed (`org.apache.kafka.common.utils.Utils.murmur2`).
fn murmur2(data: &[u8]) -> u32 {
    const M: u32 = 0x5bd1_e995;
    let mut hash: u32 = 0x9747_b28c ^ data.len() as u32;
    let mut words = data.chunks_exact(4);
    for word in &mut words {
        let mut k = u32::from_le_bytes(word.try_into().expect("4 bytes")).wrapping_mul(M);
        k = (k ^ (k >> 24)).wrapping_mul(M);
        hash = hash.wrapping_mul(M) ^ k;
    }
    let rest = words.remainder();
    for (index, byte) in rest.iter().enumerate() {
        hash ^= u32::from(*byte) << (8 * index);
    }
    if !rest.is_empty() {
        hash = hash.wrapping_mul(M);
    }
    hash = (hash ^ (hash >> 13)).wrapping_mul(M);
    hash ^ (hash >> 15)
}

const LINES_WAITING_MAX: usize = 4096;
const BATCH_RECORDS_MAX: usize = 10_000;
/// Below `max.message.bytes` of a topic with default settings.
const BATCH_BYTES: usize = 512 * 1024;
const LINGER: Duration = Duration::from_millis(2);
const TIMEOUT_MS: i32 = 30_000;
const DELIVERY_TIMEOUT: Duration = Duration::from_secs(60);
/// How long it tries again without a word.
const QUIET_FOR: Duration = Duration::from_secs(3);
const TOPIC_TIMEOUT: Duration = Duration::from_secs(5);
const RETRY_PAUSE: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_hash_as_in_the_java_client() {
        // From Kafka's UtilsTest.
        for (text, hash) in [
            ("21", -973_932_308_i32),
            ("foobar", -790_332_482),
            ("a-little-bit-long-string", -985_981_536),
            ("a-little-bit-longer-string", -1_486_304_829),
            ("lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58_897_971),
            ("abc", 479_470_107),
        ] {
            assert_eq!(murmur2(text.as_bytes()) as i32, hash, "{text}");
        }
    }
}
