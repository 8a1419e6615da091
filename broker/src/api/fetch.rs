//! Fetch (KIP-74, KIP-227 with session id 0): long poll over partitions, bytes sent as they are stored.
//!
//! An answer holds whole batches. Markers of ours are left out by cutting the byte range around them;
//! an answer that would be empty for that reason carries an empty data batch over the range, so that a
//! reader still reaches the high watermark. What lanes hide is cut by `lanes`.

use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use kafka::batch::Attributes;
use kafka::fetch::{FetchPartition, FetchRequest, FetchResponse, FetchedPartition, FetchedTopic};
use kafka::frame::RequestHeader;
use kafka::{BatchHeader, ErrorCode, LeaderEpoch, Offset, ProducerEpoch, ProducerId, TimestampMs};
use tokio::time::Instant;

use super::{Answer, Body, Ctx, RecordPiece};
use crate::log::BatchEntry;
use crate::partition::{Partition, ReadError, ReadOutcome, ReadUpTo, Slice, Waiter, Watermarks};

/// Longest long poll, whatever the client asks for.
const WAIT_MAX: Duration = Duration::from_secs(300);

type Fetched = FetchedPartition<RecordPiece>;

/// A whole look at all partitions of a request.
struct Look {
    topics: Vec<FetchedTopic<RecordPiece>>,
    bytes: usize,
    /// Something that the client must hear at once.
    urgent: bool,
}

pub fn handle(ctx: &Ctx, header: &RequestHeader, body: Bytes) -> Answer {
    let version = header.api_version;
    let request = match FetchRequest::decode(version, body) {
        Ok(request) => request,
        Err(error) => return Answer::malformed(header, error),
    };
    // No sessions are offered: an answer is always whole, and a session that a client believes in is
    // of another broker life.
    if request.session_id != 0 && request.session_epoch > 0 {
        return Answer::Ready(encode(ctx, version, ErrorCode::FetchSessionIdNotFound, Vec::new()));
    }
    let fetch = Fetch { ctx: ctx.clone(), header: header.clone(), request };
    let look = fetch.look();
    if fetch.is_enough(&look) || fetch.request.max_wait_ms <= 0 {
        return Answer::Ready(fetch.answer(look));
    }
    Answer::Overlap(Box::pin(fetch.park()))
}

struct Fetch {
    ctx: Ctx,
    header: RequestHeader,
    request: FetchRequest,
}

impl Fetch {
    fn is_enough(&self, look: &Look) -> bool {
        look.urgent || look.bytes as i64 >= i64::from(self.request.min_bytes)
    }

    fn answer(&self, look: Look) -> Body {
        self.ctx.broker.metrics.fetched_bytes.add(look.bytes as u64);
        encode(&self.ctx, self.header.api_version, ErrorCode::None, look.topics)
    }

    /// Waits until there is enough, the time is over, or the broker stops.
    async fn park(self) -> Body {
        let parked = self.ctx.broker.metrics.parked_fetches.clone();
        parked.add(1);
        let body = self.wait().await;
        parked.add(-1);
        body
    }

    async fn wait(&self) -> Body {
        let wait = Duration::from_millis(self.request.max_wait_ms.max(0) as u64).min(WAIT_MAX);
        let deadline = Instant::now() + wait;
        let stopping = self.ctx.broker.service.stopping();
        let waiter = Waiter::new();
        loop {
            self.register(&waiter);
            let look = self.look();
            if self.is_enough(&look) {
                return self.answer(look);
            }
            let in_time = tokio::select! {
                () = waiter.woken() => true,
                () = tokio::time::sleep_until(deadline) => false,
                () = stopping.cancelled() => false,
            };
            if !in_time {
                return self.answer(self.look());
            }
        }
    }

    fn register(&self, waiter: &Arc<Waiter>) {
        for topic in &self.request.topics {
            for asked in &topic.partitions {
                if let Some(partition) = self.ctx.broker.partition(&topic.name, asked.index) {
                    partition.register(waiter);
                }
            }
        }
    }

    /// Looks at every partition once. The first that has data gives at least one batch, whatever the
    /// limits, so that a large batch stops nobody.
    fn look(&self) -> Look {
        let max = (self.request.max_bytes.max(0) as usize).min(self.ctx.broker.config.fetch_bytes_max as usize);
        let mut look = Look { topics: Vec::with_capacity(self.request.topics.len()), bytes: 0, urgent: false };
        for topic in &self.request.topics {
            let mut partitions = Vec::with_capacity(topic.partitions.len());
            for asked in &topic.partitions {
                let budget = max.saturating_sub(look.bytes).min(asked.max_bytes.max(0) as usize);
                let fetched = self.look_at(&topic.name, asked, budget, look.bytes == 0);
                look.bytes += fetched.records.iter().map(kafka::fetch::RecordBytes::byte_len).sum::<usize>();
                look.urgent |= fetched.error != ErrorCode::None;
                partitions.push(fetched);
            }
            look.topics.push(FetchedTopic { name: topic.name.clone(), partitions });
        }
        look
    }

    fn look_at(&self, topic: &str, asked: &FetchPartition, budget: usize, first: bool) -> Fetched {
        let Some(partition) = self.ctx.broker.partition(topic, asked.index) else {
            return FetchedPartition::failed(asked.index, ErrorCode::UnknownTopicOrPartition);
        };
        if let Some(error) = epoch_error(asked.current_leader_epoch, partition.epoch) {
            return FetchedPartition::failed(asked.index, error);
        }
        match self.read(&partition, asked, budget, first) {
            Ok((records, watermarks)) => self.fetched(asked.index, records, watermarks),
            Err(error) => FetchedPartition::failed(asked.index, read_error(&partition, &error)),
        }
    }

    fn read(
        &self,
        partition: &Partition,
        asked: &FetchPartition,
        budget: usize,
        first: bool,
    ) -> Result<(Vec<RecordPiece>, Watermarks), ReadError> {
        if budget == 0 && !first {
            // Nothing fits any more, but the offset is still judged and the watermarks told.
            let outcome = partition.read(asked.fetch_offset, 0, false, ReadUpTo::HighWatermark)?;
            return Ok((Vec::new(), outcome.watermarks));
        }
        let outcome = partition.read(asked.fetch_offset, budget, first, ReadUpTo::HighWatermark)?;
        let watermarks = outcome.watermarks;
        Ok((pieces_without_markers(outcome, asked.fetch_offset, partition.epoch), watermarks))
    }

    fn fetched(&self, index: i32, records: Vec<RecordPiece>, watermarks: Watermarks) -> Fetched {
        let committed = self.request.isolation_level == 1;
        FetchedPartition {
            error: ErrorCode::None,
            high_watermark: watermarks.high_watermark,
            last_stable: watermarks.high_watermark,
            log_start: watermarks.log_start,
            aborted: committed.then(Vec::new),
            records,
            ..FetchedPartition::failed(index, ErrorCode::None)
        }
    }
}

fn encode(ctx: &Ctx, version: i16, error: ErrorCode, topics: Vec<FetchedTopic<RecordPiece>>) -> Body {
    let _ = ctx;
    let response = FetchResponse { throttle_time_ms: 0, error, session_id: 0, topics };
    Body(response.encode(version, BytesMut::with_capacity(128)))
}

/// FENCED_LEADER_EPOCH and UNKNOWN_LEADER_EPOCH (KIP-320).
pub fn epoch_error(asked: LeaderEpoch, ours: LeaderEpoch) -> Option<ErrorCode> {
    match asked {
        LeaderEpoch::NONE => None,
        older if older < ours => Some(ErrorCode::FencedLeaderEpoch),
        newer if newer > ours => Some(ErrorCode::UnknownLeaderEpoch),
        _ => None,
    }
}

fn read_error(partition: &Partition, error: &ReadError) -> ErrorCode {
    match error {
        ReadError::OutOfRange { .. } => ErrorCode::OffsetOutOfRange,
        ReadError::Closed => ErrorCode::UnknownTopicOrPartition,
        ReadError::Faulted(_) => ErrorCode::KafkaStorageError,
        ReadError::Store(_) | ReadError::Damaged { .. } => {
            tracing::error!(%partition, %error, "cannot read a partition");
            ErrorCode::KafkaStorageError
        }
    }
}

/// The slice with the markers cut out of it; an empty batch if nothing else is in it.
pub fn pieces_without_markers(outcome: ReadOutcome, from: Offset, epoch: LeaderEpoch) -> Vec<RecordPiece> {
    let Some(slice) = outcome.slice else { return Vec::new() };
    let markers = outcome.entries.iter().filter(|e| e.is_marker());
    let kept = cut(&slice, markers);
    if kept.is_empty() {
        return vec![RecordPiece::Memory(empty_batch(from, outcome.next, epoch))];
    }
    kept.into_iter().map(RecordPiece::File).collect()
}

/// What is left of a slice without the given batches.
pub fn cut<'a>(slice: &Slice, without: impl Iterator<Item = &'a BatchEntry>) -> Vec<Slice> {
    let (mut at, end) = (slice.position, slice.position + slice.len as u64);
    let mut kept = Vec::new();
    for entry in without {
        let (start, stop) = (u64::from(entry.position), u64::from(entry.position) + u64::from(entry.length));
        if stop <= at || start >= end {
            continue;
        }
        if start > at {
            kept.push(slice.part(at, start));
        }
        at = stop.min(end);
    }
    if at < end {
        kept.push(slice.part(at, end));
    }
    kept
}

/// A data batch without records over `[from, next)`: every client steps over it.
pub fn empty_batch(from: Offset, next: Offset, epoch: LeaderEpoch) -> Bytes {
    let span = (next.0 - from.0 - 1).clamp(0, i64::from(i32::MAX));
    let header = BatchHeader {
        base_offset: from,
        batch_length: 0,
        leader_epoch: epoch,
        crc: 0,
        attributes: Attributes(0),
        last_offset_delta: span as i32,
        base_timestamp: TimestampMs::NONE,
        max_timestamp: TimestampMs::NONE,
        producer_id: ProducerId::NONE,
        producer_epoch: ProducerEpoch(-1),
        base_sequence: -1,
        record_count: 0,
    };
    header.seal(&[]).bytes
}
