//! ListOffsets (KIP-79, KIP-734), OffsetForLeaderEpoch (KIP-320), DeleteRecords (KIP-107).
//!
//! Offsets by time are searched inside batches, on the blocking pool. "None" is offset -1, time -1.

use std::collections::HashSet;

use bytes::Bytes;
use kafka::frame::RequestHeader;
use kafka::messages::delete_records_response::{DeleteRecordsPartitionResult, DeleteRecordsTopicResult};
use kafka::messages::list_offsets_request::ListOffsetsPartition;
use kafka::messages::list_offsets_response::{ListOffsetsPartitionResponse, ListOffsetsTopicResponse};
use kafka::messages::offset_for_leader_epoch_request::OffsetForLeaderPartition;
use kafka::messages::offset_for_leader_epoch_response::{EpochEndOffset, OffsetForLeaderTopicResult};
use kafka::messages::{
    DeleteRecordsRequest, DeleteRecordsResponse, ListOffsetsRequest, ListOffsetsResponse,
    OffsetForLeaderEpochRequest, OffsetForLeaderEpochResponse,
};
use kafka::{ErrorCode, LeaderEpoch, Offset, TimestampMs};

use super::message::{self, check_epoch};
use super::{Answer, Body, Ctx};
use crate::lanes::{Reading, VisibleRecords};
use crate::partition::{Found, Partition, ReadError};

const LATEST: i64 = -1;
const EARLIEST: i64 = -2;
const MAX_TIMESTAMP: i64 = -3;
const EARLIEST_LOCAL: i64 = -4;
const LATEST_TIERED: i64 = -5;

pub fn list_offsets(ctx: &Ctx, header: &RequestHeader, body: Bytes) -> Answer {
    let version = header.api_version;
    let request: ListOffsetsRequest = match message::read(header, body) {
        Ok(request) => request,
        Err(answer) => return answer,
    };
    let searches = request
        .topics
        .iter()
        .flat_map(|topic| &topic.partitions)
        .any(|p| p.timestamp >= 0 || p.timestamp == MAX_TIMESTAMP);
    let (ctx, header) = (ctx.clone(), header.clone());
    let work = move || {
        let response = ListOffsetsResponse::default().with_topics(look_up_all(&ctx, &header, &request));
        Body::message(&response, version)
    };
    if searches { blocking(work) } else { Answer::Ready(work()) }
}

fn look_up_all(
    ctx: &Ctx,
    header: &RequestHeader,
    request: &ListOffsetsRequest,
) -> Vec<ListOffsetsTopicResponse> {
    let mut seen = HashSet::new();
    let mut repeated = HashSet::new();
    for (topic, partition) in request.topics.iter().flat_map(|t| t.partitions.iter().map(move |p| (t, p))) {
        if !seen.insert((topic.name.as_str(), partition.partition_index)) {
            repeated.insert((topic.name.as_str(), partition.partition_index));
        }
    }
    let mut topics = Vec::with_capacity(request.topics.len());
    for topic in &request.topics {
        let answer = |asked: &ListOffsetsPartition| {
            let response =
                ListOffsetsPartitionResponse::default().with_partition_index(asked.partition_index);
            let found = match repeated.contains(&(topic.name.as_str(), asked.partition_index)) {
                true => Err(ErrorCode::InvalidRequest),
                false => look_up(ctx, header, &topic.name, asked),
            };
            match found {
                Ok((offset, timestamp, epoch)) => response
                    .with_offset(offset.0)
                    .with_timestamp(timestamp.0)
                    .with_leader_epoch(if header.api_version >= 4 { epoch.0 } else { -1 }),
                Err(error) => response.with_error_code(error.code()).with_offset(-1).with_timestamp(-1),
            }
        };
        let partitions = topic.partitions.iter().map(answer).collect();
        topics.push(
            ListOffsetsTopicResponse::default().with_name(topic.name.clone()).with_partitions(partitions),
        );
    }
    topics
}

type Answered = (Offset, TimestampMs, LeaderEpoch);

const NOTHING: Answered = (Offset(-1), TimestampMs::NONE, LeaderEpoch::NONE);

fn look_up(
    ctx: &Ctx,
    header: &RequestHeader,
    topic: &str,
    asked: &ListOffsetsPartition,
) -> Result<Answered, ErrorCode> {
    let index = asked.partition_index;
    let partition = ctx.broker.partition(topic, index).ok_or_else(|| ctx.broker.absent(topic, index))?;
    check_epoch(asked.current_leader_epoch, partition.epoch)?;
    let needs = match asked.timestamp {
        MAX_TIMESTAMP => 7,
        EARLIEST_LOCAL => 8,
        LATEST_TIERED => 9,
        other if other < LATEST_TIERED => i16::MAX,
        _ => 0,
    };
    if header.api_version < needs {
        return Err(ErrorCode::UnsupportedVersion);
    }
    let found = match asked.timestamp {
        LATEST => return Ok((partition.watermarks().high_watermark, TimestampMs::NONE, partition.epoch)),
        EARLIEST | EARLIEST_LOCAL => {
            let (start, epoch) = partition.with_fold(|fold| (fold.log_start, fold.epochs.at(fold.log_start)));
            return Ok((start, TimestampMs::NONE, epoch.unwrap_or(partition.epoch)));
        }
        LATEST_TIERED => return Ok(NOTHING),
        at => look_up_time(ctx, header, &partition, at)?,
    };
    match found {
        Ok(Some(found)) => Ok((found.offset, found.timestamp, found.epoch)),
        Ok(None) => Ok(NOTHING),
        Err(error) => Err(read_code(&partition, &error)),
    }
}

/// A record that the asker cannot see (of another lane, or deleted) must not attract him.
fn look_up_time(
    ctx: &Ctx,
    header: &RequestHeader,
    partition: &Partition,
    at: i64,
) -> Result<Result<Option<Found>, ReadError>, ErrorCode> {
    let reading = ctx.broker.lanes.reading(&ctx.connection, header.client_id.as_deref(), partition);
    if reading == Reading::Wait {
        return Err(ErrorCode::OffsetNotAvailable);
    }
    // A batch may begin below the log start; its records there are deleted.
    let start = partition.watermarks().log_start;
    let mut visible = VisibleRecords::new(partition, reading);
    let seen = |batch: &kafka::Batch, offset: Offset| offset >= start && visible.holds(batch, offset);
    Ok(match at {
        MAX_TIMESTAMP => partition.find_max_time(seen),
        at => partition.find_time(TimestampMs(at), seen),
    })
}

pub fn offset_for_leader_epoch(ctx: &Ctx, header: &RequestHeader, body: Bytes) -> Answer {
    let request: OffsetForLeaderEpochRequest = match message::read(header, body) {
        Ok(request) => request,
        Err(answer) => return answer,
    };
    let mut topics = Vec::with_capacity(request.topics.len());
    for topic in &request.topics {
        let answer = |asked: &OffsetForLeaderPartition| {
            let response = EpochEndOffset::default().with_partition(asked.partition);
            match epoch_end(ctx, &topic.topic, asked) {
                Ok((epoch, end)) => response.with_leader_epoch(epoch.0).with_end_offset(end.0),
                Err(error) => {
                    response.with_error_code(error.code()).with_leader_epoch(-1).with_end_offset(-1)
                }
            }
        };
        let partitions = topic.partitions.iter().map(answer).collect();
        let result = OffsetForLeaderTopicResult::default().with_topic(topic.topic.clone());
        topics.push(result.with_partitions(partitions));
    }
    Answer::message(&OffsetForLeaderEpochResponse::default().with_topics(topics), header.api_version)
}

fn epoch_end(
    ctx: &Ctx,
    topic: &str,
    asked: &OffsetForLeaderPartition,
) -> Result<(LeaderEpoch, Offset), ErrorCode> {
    let index = asked.partition;
    let partition = ctx.broker.partition(topic, index).ok_or_else(|| ctx.broker.absent(topic, index))?;
    check_epoch(asked.current_leader_epoch, partition.epoch)?;
    let epoch = LeaderEpoch(asked.leader_epoch);
    let unknown = (LeaderEpoch::NONE, Offset(-1));
    Ok(partition.with_fold(|fold| match epoch {
        epoch if epoch.0 < 0 || epoch > partition.epoch => unknown,
        // The current epoch begins at the log's end while nothing has been written under it.
        epoch if epoch == partition.epoch => (epoch, fold.end),
        epoch => fold.epochs.end_of(epoch, fold.end).unwrap_or(unknown),
    }))
}

/// The high watermark, in DeleteRecords.
const TO_THE_END: i64 = -1;

pub fn delete_records(ctx: &Ctx, header: &RequestHeader, body: Bytes) -> Answer {
    let request: DeleteRecordsRequest = match message::read(header, body) {
        Ok(request) => request,
        Err(answer) => return answer,
    };
    let (ctx, version) = (ctx.clone(), header.api_version);
    blocking(move || {
        let mut topics = Vec::with_capacity(request.topics.len());
        for topic in &request.topics {
            let mut partitions = Vec::with_capacity(topic.partitions.len());
            for asked in &topic.partitions {
                let result =
                    DeleteRecordsPartitionResult::default().with_partition_index(asked.partition_index);
                partitions.push(match delete_below(&ctx, &topic.name, asked.partition_index, asked.offset) {
                    Ok(low) => result.with_low_watermark(low.0),
                    Err(error) => result.with_error_code(error.code()).with_low_watermark(-1),
                });
            }
            let result = DeleteRecordsTopicResult::default().with_name(topic.name.clone());
            topics.push(result.with_partitions(partitions));
        }
        Body::message(&DeleteRecordsResponse::default().with_topics(topics), version)
    })
}

fn delete_below(ctx: &Ctx, topic: &str, index: i32, offset: i64) -> Result<Offset, ErrorCode> {
    let partition = ctx.broker.partition(topic, index).ok_or_else(|| ctx.broker.absent(topic, index))?;
    if partition.topic.is_internal() {
        return Err(ErrorCode::InvalidTopicException);
    }
    let to = match offset {
        TO_THE_END => partition.watermarks().high_watermark,
        offset => Offset(offset),
    };
    partition.delete_records(to).map_err(|error| read_code(&partition, &error))
}

fn read_code(partition: &Partition, error: &ReadError) -> ErrorCode {
    match error {
        ReadError::OutOfRange { .. } => ErrorCode::OffsetOutOfRange,
        ReadError::Closed => ErrorCode::NotLeaderOrFollower,
        ReadError::Faulted(_) | ReadError::Store(_) => ErrorCode::KafkaStorageError,
        ReadError::Damaged { .. } => {
            tracing::error!(%partition, %error, "a log is damaged");
            ErrorCode::KafkaStorageError
        }
    }
}

fn blocking(work: impl FnOnce() -> Body + Send + 'static) -> Answer {
    Answer::Later(Box::pin(async move {
        // Only a panic or the end of the runtime ends it early; the connection then gets nothing.
        tokio::task::spawn_blocking(work).await.unwrap_or_default()
    }))
}
