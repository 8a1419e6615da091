//! Fetch (KIP-74, KIP-227 with session id 0): long poll over partitions, bytes sent as they are stored.
//!
//! An answer holds whole batches. What a reader may not see (markers of ours, other lanes' records) is
//! cut by `lanes::show`; where that leaves nothing until the wait is over, an empty data batch takes the
//! reader over the range, so that it still reaches the high watermark.

use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use chassis::metrics::Gauge;
use kafka::fetch::{
    FetchPartition, FetchRequest, FetchResponse, FetchedPartition, FetchedTopic, RecordBytes,
};
use kafka::frame::RequestHeader;
use kafka::{ErrorCode, LeaderEpoch};
use tokio::time::Instant;

use super::{Answer, Body, Ctx, RecordPiece};
use crate::lanes::{Part, Scan};
use crate::partition::{Partition, ReadError, ReadUpTo, Waiter, Watermarks};

/// Longest long poll, whatever the client asks for.
const WAIT_MAX: Duration = Duration::from_secs(300);

/// A reader that was shown nothing of what is there moves on at least so often: its lag is not its own.
const PROGRESS_MAX: Duration = Duration::from_secs(1);

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
        return Answer::Ready(encode(version, ErrorCode::FetchSessionIdNotFound, Vec::new()));
    }
    let mut fetch = Fetch::new(ctx, header, request);
    let look = fetch.look_around();
    if fetch.is_enough(&look) || fetch.request.max_wait_ms <= 0 {
        return Answer::Ready(fetch.answer(look));
    }
    Answer::Overlap(Box::pin(fetch.park()))
}

struct Fetch {
    ctx: Ctx,
    header: RequestHeader,
    request: FetchRequest,
    /// Where each asked partition stands, in the order of the request.
    scans: Vec<Scan>,
}

impl Fetch {
    fn new(ctx: &Ctx, header: &RequestHeader, request: FetchRequest) -> Fetch {
        let asked = request.topics.iter().flat_map(|t| &t.partitions);
        let scans = asked.map(|p| Scan::new(p.fetch_offset)).collect();
        Fetch { ctx: ctx.clone(), header: header.clone(), request, scans }
    }

    fn is_enough(&self, look: &Look) -> bool {
        look.urgent || look.bytes as i64 >= i64::from(self.request.min_bytes)
    }

    /// Where something was scanned and hidden, a batch that shows nothing takes the reader over it.
    fn answer(&self, mut look: Look) -> Body {
        self.ctx.broker.metrics.fetched_bytes.add(look.bytes as u64);
        let (broker, version) = (&self.ctx.broker, self.header.api_version);
        let mut scans = self.scans.iter();
        for topic in &mut look.topics {
            for (answer, scan) in topic.partitions.iter_mut().zip(&mut scans) {
                if answer.records.is_empty() && answer.error == ErrorCode::None && scan.has_progress() {
                    // One that is gone meanwhile shows no progress.
                    let Some(partition) = broker.partition(&topic.name, answer.index) else { continue };
                    answer.records.extend(scan.filler(partition.epoch, version).map(RecordPiece::Memory));
                }
            }
        }
        encode(self.header.api_version, ErrorCode::None, look.topics)
    }

    /// Waits until there is enough, the time is over, or the broker stops.
    async fn park(mut self) -> Body {
        let parked = self.ctx.broker.metrics.parked_fetches.clone();
        parked.add(1);
        let _unpark = Unpark(parked);
        let wait = Duration::from_millis(self.request.max_wait_ms.max(0) as u64).min(WAIT_MAX);
        let start = Instant::now();
        let stopping = self.ctx.broker.service.stopping().clone();
        let waiter = Waiter::new();
        loop {
            self.register(&waiter);
            let look = self.look_around();
            if self.is_enough(&look) {
                return self.answer(look);
            }
            let progress = self.scans.iter().any(Scan::has_progress);
            let wait = if progress { wait.min(PROGRESS_MAX) } else { wait };
            let in_time = tokio::select! {
                () = waiter.woken() => true,
                () = tokio::time::sleep_until(start + wait) => false,
                () = stopping.cancelled() => false,
            };
            if !in_time {
                let look = self.look_around();
                return self.answer(look);
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

    fn look_around(&mut self) -> Look {
        let broker = self.ctx.broker.clone();
        broker.may_wait(|| self.look())
    }

    /// Looks at every partition once. The first that has data gives at least one batch, whatever the
    /// limits, so that a large batch stops nobody.
    fn look(&mut self) -> Look {
        let max =
            (self.request.max_bytes.max(0) as usize).min(self.ctx.broker.config.fetch_bytes_max as usize);
        let mut look =
            Look { topics: Vec::with_capacity(self.request.topics.len()), bytes: 0, urgent: false };
        let mut scans = std::mem::take(&mut self.scans);
        let mut scan = scans.iter_mut();
        for topic in &self.request.topics {
            let mut partitions = Vec::with_capacity(topic.partitions.len());
            for (asked, scan) in topic.partitions.iter().zip(&mut scan) {
                let budget = max.saturating_sub(look.bytes).min(asked.max_bytes.max(0) as usize);
                let fetched = self.look_at(&topic.name, asked, scan, budget, look.bytes == 0);
                look.bytes += fetched.records.iter().map(RecordBytes::byte_len).sum::<usize>();
                look.urgent |= fetched.error != ErrorCode::None;
                partitions.push(fetched);
            }
            look.topics.push(FetchedTopic { name: topic.name.clone(), partitions });
        }
        self.scans = scans;
        look
    }

    fn look_at(
        &self,
        topic: &str,
        asked: &FetchPartition,
        scan: &mut Scan,
        budget: usize,
        first: bool,
    ) -> Fetched {
        let broker = &self.ctx.broker;
        let Some(partition) = broker.partition(topic, asked.index) else {
            return FetchedPartition::failed(asked.index, broker.absent(topic, asked.index));
        };
        if let Some(error) = epoch_error(asked.current_leader_epoch, partition.epoch) {
            return FetchedPartition::failed(asked.index, error);
        }
        if budget == 0 && !first {
            // Nothing fits any more, but the offset is still judged and the watermarks told.
            let outcome = partition.read(asked.fetch_offset, 0, false, ReadUpTo::HighWatermark);
            return match outcome {
                Ok(outcome) => self.fetched(asked.index, Vec::new(), outcome.watermarks),
                Err(error) => FetchedPartition::failed(asked.index, read_error(&partition, &error)),
            };
        }
        let client_id = self.header.client_id.as_deref();
        let reading = broker.lanes.reading(&self.ctx.connection, client_id, &partition);
        match broker.lanes.show(&partition, &reading, scan, budget, first) {
            Ok(shown) => {
                let records = shown.parts.into_iter().map(RecordPiece::from).collect();
                self.fetched(asked.index, records, shown.watermarks)
            }
            Err(error) => FetchedPartition::failed(asked.index, read_error(&partition, &error)),
        }
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

impl From<Part> for RecordPiece {
    fn from(part: Part) -> RecordPiece {
        match part {
            Part::File(slice) => RecordPiece::File(slice),
            Part::Bytes(bytes) => RecordPiece::Memory(bytes),
        }
    }
}

/// A parked fetch that is dropped with its connection counts too.
struct Unpark(Gauge);

impl Drop for Unpark {
    fn drop(&mut self) {
        self.0.add(-1);
    }
}

fn encode(version: i16, error: ErrorCode, topics: Vec<FetchedTopic<RecordPiece>>) -> Body {
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
        // Deleted or handed over: the client looks again, and then hears which.
        ReadError::Closed => ErrorCode::NotLeaderOrFollower,
        ReadError::Faulted(_) => ErrorCode::KafkaStorageError,
        ReadError::Store(_) | ReadError::Damaged { .. } => {
            tracing::error!(%partition, %error, "cannot read a partition");
            ErrorCode::KafkaStorageError
        }
    }
}
