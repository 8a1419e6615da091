//! Produce (KIP-98, KIP-467): checks a client's batches and appends them.
//!
//! Appends happen at the start, in the order of the connection's requests; the answer waits for
//! durability where the client asked for it. Record bytes are neither copied nor decompressed, unless
//! lanes are on for the topic.

use std::sync::Arc;

use bytes::{BufMut, Bytes, BytesMut};
use kafka::batch::Codec;
use kafka::frame::RequestHeader;
use kafka::produce::{
    ProduceRequest, ProduceResponse, ProducedPartition, ProducedTopic, VERSION_MIN, ZSTD_VERSION_MIN,
};
use kafka::{Batch, BatchError, ErrorCode, Offset, TimestampMs};

use super::{Answer, Body, Ctx};
use crate::clock;
use crate::lanes::classify;
use crate::partition::{Append, AppendError, Appended, Partition, Settings};

/// A partition's answer, and what it waits for.
struct Outcome {
    answer: ProducedPartition,
    wait: Option<(Arc<Partition>, Offset)>,
}

pub fn handle(ctx: &Ctx, header: &RequestHeader, body: Bytes) -> Answer {
    let version = header.api_version;
    if version < VERSION_MIN {
        return old_version(header, body);
    }
    let request = match ProduceRequest::decode(version, body) {
        Ok(request) => request,
        Err(error) => return Answer::malformed(header, error),
    };
    let acks = request.acks;
    let mut waits = Vec::new();
    let mut topics = Vec::with_capacity(request.topics.len());
    for topic in request.topics {
        let mut partitions = Vec::with_capacity(topic.partitions.len());
        for (index, records) in topic.partitions.into_iter().map(|p| (p.index, p.records)) {
            let outcome = match refuse(ctx, request.transactional_id.is_some(), acks) {
                Some((code, text)) => failed(index, code, text),
                None => produce(ctx, header, &topic.name, index, records, acks),
            };
            if let Some((partition, upto)) = outcome.wait {
                waits.push((topics.len(), partitions.len(), partition, upto));
            }
            partitions.push(outcome.answer);
        }
        topics.push(ProducedTopic { name: topic.name, partitions });
    }
    let response = ProduceResponse { topics, throttle_time_ms: 0, endpoints: Vec::new() };
    if acks == 0 {
        return unacknowledged(response);
    }
    if waits.is_empty() {
        return Answer::Ready(encode(&response, version));
    }
    Answer::Overlap(Box::pin(confirmed(response, version, waits)))
}

/// Waits until everything appended is durable.
async fn confirmed(
    mut response: ProduceResponse,
    version: i16,
    waits: Vec<(usize, usize, Arc<Partition>, Offset)>,
) -> Body {
    for (topic, partition, waited, upto) in waits {
        if let Err(error) = waited.wait_durable(upto).await {
            let answer = &mut response.topics[topic].partitions[partition];
            let code = match error {
                crate::partition::DurableError::Closed => ErrorCode::NotLeaderOrFollower,
                crate::partition::DurableError::Faulted(_) => ErrorCode::KafkaStorageError,
            };
            *answer = ProducedPartition::failed(answer.index, code, Some(error.to_string()));
        }
    }
    encode(&response, version)
}

fn encode(response: &ProduceResponse, version: i16) -> Body {
    let mut out = BytesMut::with_capacity(128);
    response.encode(version, &mut out);
    Body::bytes(out.freeze())
}

/// acks=0 has no answer; a client learns of an error by losing its connection, as from Apache Kafka.
fn unacknowledged(response: ProduceResponse) -> Answer {
    let partitions = response.topics.iter().flat_map(|t| t.partitions.iter().map(move |p| (&t.name, p)));
    match partitions.into_iter().find(|(_, p)| p.error != ErrorCode::None) {
        None => Answer::Nothing,
        Some((topic, p)) => {
            Answer::Close(format!("produce with acks=0 to {}-{} failed: {:?}", &**topic, p.index, p.error))
        }
    }
}

/// Versions 0 to 2 are advertised for old librdkafka, which compresses only then. They carry message
/// formats that the broker does not take: every partition is answered UNSUPPORTED_VERSION, as by
/// Apache Kafka.
fn old_version(header: &RequestHeader, body: Bytes) -> Answer {
    // They differ from version 3 by the transactional id that they lack.
    let mut padded = BytesMut::from(&(-1i16).to_be_bytes()[..]);
    padded.extend_from_slice(&body);
    let request = match ProduceRequest::decode(VERSION_MIN, padded.freeze()) {
        Ok(request) => request,
        Err(error) => return Answer::malformed(header, error),
    };
    if request.acks == 0 {
        return Answer::Close(format!("Produce version {} is too old", header.api_version));
    }
    let mut out = BytesMut::with_capacity(64);
    out.put_i32(request.topics.len() as i32);
    for topic in &request.topics {
        out.put_i16(topic.name.len() as i16);
        out.put_slice(topic.name.as_bytes());
        out.put_i32(topic.partitions.len() as i32);
        for partition in &topic.partitions {
            out.put_i32(partition.index);
            out.put_i16(ErrorCode::UnsupportedVersion.code());
            out.put_i64(-1);
            if header.api_version >= 2 {
                out.put_i64(-1);
            }
        }
    }
    if header.api_version >= 1 {
        out.put_i32(0);
    }
    Answer::Ready(Body::bytes(out.freeze()))
}

fn refuse(ctx: &Ctx, transactional: bool, acks: i16) -> Option<(ErrorCode, &'static str)> {
    if ctx.connection.listener.raw {
        return Some((ErrorCode::TopicAuthorizationFailed, "a raw listener is for reading"));
    }
    if !(-1..=1).contains(&acks) {
        return Some((ErrorCode::InvalidRequiredAcks, "acks must be -1, 0 or 1"));
    }
    if transactional {
        return Some((ErrorCode::TransactionalIdAuthorizationFailed, "transactions are not offered yet"));
    }
    None
}

fn failed(index: i32, code: ErrorCode, text: impl Into<String>) -> Outcome {
    Outcome { answer: ProducedPartition::failed(index, code, Some(text.into())), wait: None }
}

fn produce(
    ctx: &Ctx,
    header: &RequestHeader,
    topic: &str,
    index: i32,
    records: Option<Bytes>,
    acks: i16,
) -> Outcome {
    let Some(partition) = ctx.broker.partition(topic, index) else {
        let code = ctx.broker.absent(topic, index);
        return failed(index, code, format!("partition {topic}-{index} is not here"));
    };
    if partition.topic.is_internal() {
        return failed(
            index,
            ErrorCode::InvalidTopicException,
            "internal topics are written by the broker alone",
        );
    }
    let settings = partition.settings();
    let now = clock::now();
    let batch = match one_batch(records)
        .and_then(|batch| check(&batch, header.api_version, &settings, now).map(|()| batch))
    {
        Ok(batch) => batch,
        Err((code, text)) => return failed(index, code, text),
    };
    match append(ctx, &partition, &settings, &batch, header, now, acks) {
        Ok(appended) => appended_outcome(ctx, partition, &batch, index, appended, acks),
        Err(outcome) => *outcome,
    }
}

fn appended_outcome(
    ctx: &Ctx,
    partition: Arc<Partition>,
    batch: &Batch,
    index: i32,
    appended: Appended,
    acks: i16,
) -> Outcome {
    let metrics = &ctx.broker.metrics;
    if appended.duplicate {
        metrics.duplicates.add(1);
    } else {
        metrics.produced_batches.add(1);
        metrics.produced_bytes.add(batch.bytes.len() as u64);
    }
    let mut answer = ProducedPartition::failed(index, ErrorCode::None, None);
    answer.base_offset = appended.base_offset;
    answer.log_append_time = appended.log_append_time;
    answer.log_start = appended.log_start;
    // A repeat is answered when its original is durable, never before.
    let upto = appended.last_offset.plus(1);
    let wait = acks == -1 && partition.watermarks().high_watermark < upto;
    Outcome { answer, wait: wait.then_some((partition, upto)) }
}

fn append(
    ctx: &Ctx,
    partition: &Partition,
    settings: &Settings,
    batch: &Batch,
    header: &RequestHeader,
    now: TimestampMs,
    acks: i16,
) -> Result<Appended, Box<Outcome>> {
    let index = partition.index.0;
    let lane = ctx.lane(header);
    // The list of extractors changes once in a topic's life or so: a second look always suffices but
    // for a list that changes all the time.
    for _ in 0..8 {
        let by = partition.with_fold(|fold| fold.lanes.extractors());
        if by.is_empty() && partition.settings().lanes {
            // Until the list is in the log nobody could tell a lane's record from the baseline's.
            let wait = "lanes are being turned on for the topic";
            return Err(Box::new(failed(index, ErrorCode::NotLeaderOrFollower, wait)));
        }
        let judged = match &lane {
            None => classify::judge(batch, by),
            Some(lane) => classify::judge_in_lane(batch, by, &settings.lane_extractors, lane),
        };
        let judged = judged.map_err(|refused| {
            let mut outcome = failed(index, refused.code, refused.message);
            outcome.answer.record_errors = refused.records;
            Box::new(outcome)
        })?;
        let batch = judged.stamped.as_ref().unwrap_or(batch);
        check_size(batch, settings).map_err(|(code, text)| Box::new(failed(index, code, text)))?;
        let request = Append { batch, lanes: judged.summary, judged_by: judged.by, now, urgent: acks == -1 };
        match partition.append(request) {
            Ok(appended) => {
                ctx.broker.metrics.lane_unknown.add(judged.unknown);
                ctx.broker.metrics.lane_disagreed.add(judged.disagreed);
                return Ok(appended);
            }
            Err(AppendError::JudgedByOthers) => continue,
            Err(error) => return Err(Box::new(failed(index, error.code(), error.to_string()))),
        }
    }
    Err(Box::new(failed(index, ErrorCode::UnknownServerError, "the topic's lane extractors keep changing")))
}

fn one_batch(records: Option<Bytes>) -> Result<Batch, (ErrorCode, String)> {
    let Some(mut bytes) = records.filter(|b| !b.is_empty()) else {
        return Err((ErrorCode::InvalidRecord, "the request holds no records for this partition".into()));
    };
    let batch =
        Batch::split_first(&mut bytes, true).map_err(|error| (batch_code(&error), error.to_string()))?;
    match bytes.is_empty() {
        true => Ok(batch),
        false => Err((ErrorCode::InvalidRecord, "a produce request carries one batch per partition".into())),
    }
}

fn batch_code(error: &BatchError) -> ErrorCode {
    match error {
        BatchError::Magic(_) => ErrorCode::UnsupportedForMessageFormat,
        BatchError::Codec(_) => ErrorCode::UnsupportedCompressionType,
        BatchError::Header(_) | BatchError::Records(_) => ErrorCode::InvalidRecord,
        _ => ErrorCode::CorruptMessage,
    }
}

/// What a batch must fulfil whoever sends it.
fn check(
    batch: &Batch,
    version: i16,
    settings: &Settings,
    now: TimestampMs,
) -> Result<(), (ErrorCode, String)> {
    let h = &batch.header;
    let invalid = |text: String| Err((ErrorCode::InvalidRecord, text));
    if h.is_control() {
        return invalid("clients may not write control batches".into());
    }
    if h.attributes.is_transactional() {
        return Err((ErrorCode::InvalidTxnState, "transactions are not offered yet".into()));
    }
    if h.record_count < 1 || h.record_count != h.last_offset_delta + 1 {
        let (count, delta) = (h.record_count, h.last_offset_delta);
        return invalid(format!("a batch of {count} records cannot have last offset delta {delta}"));
    }
    match h.attributes.codec() {
        Ok(Codec::Zstd) if version < ZSTD_VERSION_MIN => {
            let text = format!("zstd needs Produce version {ZSTD_VERSION_MIN} or later");
            return Err((ErrorCode::UnsupportedCompressionType, text));
        }
        Ok(_) => {}
        Err(error) => return Err((ErrorCode::UnsupportedCompressionType, error.to_string())),
    }
    check_size(batch, settings)?;
    if !settings.log_append_time {
        check_time(h.max_timestamp, settings, now)?;
    }
    Ok(())
}

fn check_size(batch: &Batch, settings: &Settings) -> Result<(), (ErrorCode, String)> {
    let (len, max) = (batch.bytes.len(), settings.max_message_bytes);
    if len > max {
        let text = format!("a batch of {len} bytes is over the topic's max.message.bytes of {max}");
        return Err((ErrorCode::MessageTooLarge, text));
    }
    Ok(())
}

/// `message.timestamp.before.max.ms` and `.after.max.ms` (KIP-937).
fn check_time(stamp: TimestampMs, settings: &Settings, now: TimestampMs) -> Result<(), (ErrorCode, String)> {
    let ahead = stamp.0.saturating_sub(now.0);
    if stamp.0 >= 0 && (ahead > settings.timestamp_after_max_ms || -ahead > settings.timestamp_before_max_ms)
    {
        let text = format!("timestamp {stamp} is out of the range that the topic allows at {now}");
        return Err((ErrorCode::InvalidTimestamp, text));
    }
    Ok(())
}
