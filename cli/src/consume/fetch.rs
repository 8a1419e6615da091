//! One round of Fetch over the assigned partitions, and the records of what came.

use std::collections::BTreeMap;
use std::io;
use std::time::Duration;

use bytes::Bytes;
use kafka::messages::fetch_request::{FetchPartition, FetchRequest, FetchTopic};
use kafka::messages::{BrokerId, FetchResponse};
use kafka::record::{Records, unpack};
use kafka::{Batch, BatchError, cold};
use kafka_client::{ClientError, Connection};

use super::format::Consumed;
use super::partition_error;
use crate::region::{Region, text};

/// What a partition answered.
pub struct Fetched {
    pub partition: i32,
    pub outcome: Result<Vec<Batch>, ClientError>,
}

/// Asks every leader at once; each waits up to `wait` for something to come.
pub async fn fetch(
    region: &Region,
    topic: &str,
    positions: &BTreeMap<i32, i64>,
    wait: Duration,
) -> Result<Vec<Fetched>, ClientError> {
    let mut by_leader: BTreeMap<String, (Connection, Vec<FetchPartition>)> = BTreeMap::new();
    for (partition, offset) in positions {
        let (leader, _) = region.kafka.leader(topic, *partition).await?;
        let asked = FetchPartition::default()
            .with_partition(*partition)
            .with_current_leader_epoch(-1)
            .with_fetch_offset(*offset)
            .with_last_fetched_epoch(-1)
            .with_log_start_offset(-1)
            .with_partition_max_bytes(PARTITION_BYTES_MAX);
        let entry = by_leader.entry(leader.endpoint().to_string());
        entry.or_insert_with(|| (leader, Vec::new())).1.push(asked);
    }
    let mut answers = Vec::new();
    for (leader, partitions) in by_leader.into_values() {
        let asked = FetchTopic::default().with_topic(text(topic).into()).with_partitions(partitions);
        let request = FetchRequest::default()
            .with_replica_id(BrokerId(-1))
            .with_max_wait_ms(wait.as_millis() as i32)
            .with_min_bytes(1)
            .with_max_bytes(FETCH_BYTES_MAX)
            .with_session_epoch(-1)
            .with_topics(vec![asked]);
        let version = leader.version_of::<FetchRequest>(12)?;
        let body = cold::encoded(&request, version)?;
        answers.push((version, leader.start(kafka::api::FETCH, version, vec![body]).await?));
    }
    let mut fetched = Vec::new();
    for (version, answer) in answers {
        let answer: FetchResponse = cold::decode_any_size(version, answer.received().await?)?;
        ClientError::check(|| format!("topic {topic}"), answer.error_code, None)?;
        for part in answer.responses.into_iter().flat_map(|topic| topic.partitions) {
            let outcome = partition_error(topic, part.partition_index, part.error_code)
                .and_then(|()| Ok(batches(part.records.unwrap_or_default())?));
            fetched.push(Fetched { partition: part.partition_index, outcome });
        }
    }
    Ok(fetched)
}

/// Whole batches; a last one that a limit has cut off is left for the next fetch.
fn batches(mut bytes: Bytes) -> Result<Vec<Batch>, BatchError> {
    let mut batches = Vec::new();
    while !bytes.is_empty() {
        match Batch::split_first(&mut bytes, true) {
            Ok(batch) => batches.push(batch),
            Err(BatchError::Truncated { .. }) if !batches.is_empty() => break,
            Err(error) => return Err(error),
        }
    }
    Ok(batches)
}

/// Prints at most `limit` records from `position` on; the next position and how many were printed.
pub fn print(
    batch: &Batch,
    (topic, partition): (&str, i32),
    position: i64,
    limit: u64,
    mut print: impl FnMut(&Consumed) -> io::Result<()>,
) -> anyhow::Result<(i64, u64)> {
    let header = &batch.header;
    let mut printed = 0;
    if header.is_control() {
        return Ok((position.max(header.next_offset().0), printed));
    }
    let section = unpack(batch)?;
    for record in Records::new(&section, header.record_count) {
        let record = record?;
        let offset = header.base_offset.0 + i64::from(record.offset_delta);
        if offset < position {
            continue;
        }
        if printed == limit {
            return Ok((offset, printed));
        }
        let timestamp = match header.attributes.is_log_append_time() {
            true => header.max_timestamp.0,
            false => header.base_timestamp.0 + record.timestamp_delta,
        };
        let headers: Result<Vec<_>, BatchError> =
            record.headers().map(|header| header.map(|header| (header.key, header.value))).collect();
        print(&Consumed {
            topic,
            partition,
            offset,
            timestamp_ms: timestamp,
            key: record.key,
            value: record.value,
            headers: headers?,
        })?;
        printed += 1;
    }
    Ok((position.max(header.next_offset().0), printed))
}

const PARTITION_BYTES_MAX: i32 = 1 << 20;
const FETCH_BYTES_MAX: i32 = 16 << 20;

#[cfg(test)]
mod tests {
    use kafka::batch::Codec;
    use kafka::{BatchBuilder, Offset, TimestampMs};

    use super::*;

    fn batch(base: i64, values: &[&str]) -> Batch {
        let mut builder = BatchBuilder::new(Offset(base), TimestampMs(1000), Codec::Lz4);
        for (delta, value) in values.iter().enumerate() {
            builder.push(delta as i32, 5, None, Some(value.as_bytes()), &[]);
        }
        builder.build()
    }

    #[test]
    fn printing_begins_at_the_position_and_ends_at_the_limit() {
        let batch = batch(10, &["a", "b", "c", "d"]);
        let mut seen = Vec::new();
        let mut collect = |record: &Consumed| {
            seen.push((record.offset, record.timestamp_ms));
            Ok(())
        };
        assert_eq!(print(&batch, ("t", 0), 11, 2, &mut collect).expect("records"), (13, 2));
        assert_eq!(print(&batch, ("t", 0), 13, 9, &mut collect).expect("records"), (14, 1));
        assert_eq!(seen, [(11, 1005), (12, 1005), (13, 1005)]);
    }

    #[test]
    fn a_batch_that_a_limit_cut_off_waits_for_the_next_fetch() {
        let (whole, cut) = (batch(0, &["a"]), batch(1, &["b"]));
        let bytes = [whole.bytes.as_ref(), &cut.bytes[..30]].concat();
        assert_eq!(batches(bytes.into()).expect("one whole batch").len(), 1);
        assert!(batches(cut.bytes.slice(..30)).is_err());
    }
}
