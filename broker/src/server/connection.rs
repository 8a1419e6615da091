//! One connection, one task: it cuts frames, starts requests in their order, and answers in that order.
//!
//! Produce and fetch may overlap with what follows; any other request that has to wait holds the next
//! one back, as in Apache Kafka. The queue of answers is bounded: a client that pipelines more waits
//! in its socket. A malformed frame ends this connection and nothing else.

use std::collections::VecDeque;
use std::io;
use std::task::Poll;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures_util::future::BoxFuture;
use kafka::frame::{self, RequestHeader};
use tokio::time::Instant;

use super::room::{Claim, FREE_MAX, STALL_MAX};
use super::stream::Stream;
use crate::api::{self, Answer, Body, Ctx, Piece, RecordPiece};

/// Answers that may be outstanding on one connection.
const PENDING_MAX: usize = 64;
/// Bytes read ahead while no request may start.
const READ_AHEAD_MAX: usize = 1 << 20;
/// Free space that a read begins with.
const READ_MIN: usize = 64 * 1024;
/// Answers up to this size are copied together into one write.
const COALESCE_MAX: usize = 16 * 1024;
/// After a stop, time for what is in flight.
const STOP_GRACE: Duration = Duration::from_secs(5);

/// An answer in the queue.
enum Pending {
    Ready(RequestHeader, Body),
    Waiting(RequestHeader, BoxFuture<'static, Body>),
}

/// Why a connection ended.
enum End {
    /// The peer closed, or the broker stops.
    Quiet,
    Idle,
    Io(io::Error),
    /// The peer sent what cannot be answered.
    Refused(String),
}

struct Connection {
    ctx: Ctx,
    stream: Stream,
    buf: BytesMut,
    pending: VecDeque<Pending>,
    /// The last request in the queue must be done before another starts.
    barrier: bool,
    out: BytesMut,
    last_request: Instant,
    last_read: Instant,
    /// Room for the frame at the front of `buf`, if it is a large one; and that frame's length.
    claim: Claim,
    frame_len: usize,
}

/// What happened while waiting.
enum Event {
    Read(io::Result<usize>),
    /// The first answer is complete.
    Done(Body),
    /// There is room for the rest of a large request.
    Room,
    Stop,
    Idle,
}

pub async fn run(ctx: Ctx, stream: Stream) {
    let mut connection = Connection {
        ctx,
        stream,
        buf: BytesMut::new(),
        pending: VecDeque::new(),
        barrier: false,
        out: BytesMut::new(),
        last_request: Instant::now(),
        last_read: Instant::now(),
        claim: Claim::None,
        frame_len: 0,
    };
    let end = connection.serve().await;
    let info = &connection.ctx.connection;
    match end {
        End::Quiet => {}
        End::Idle => tracing::debug!(peer = %info.peer, "closed: connection_idle_ms without a request"),
        End::Io(error) => tracing::debug!(peer = %info.peer, %error, "connection lost"),
        End::Refused(reason) => {
            connection.ctx.broker.metrics.malformed.add(1);
            tracing::warn!(listener = %info.listener.name, peer = %info.peer, %reason, "closed a connection");
        }
    }
    connection.stream.shutdown().await;
}

impl Connection {
    async fn serve(&mut self) -> End {
        let stopping = self.ctx.broker.service.stopping().clone();
        let mut stop_at = None;
        loop {
            if stop_at.is_none() {
                self.ctx.broker.flusher.room().await;
                if let Err(end) = self.start_requests() {
                    // What came before the bad frame is still answered.
                    let _ = self.answer_ready().await;
                    return end;
                }
            }
            let was_full = !self.may_start();
            if let Err(error) = self.answer_ready().await {
                return End::Io(error);
            }
            if was_full && self.may_start() {
                // What was read ahead can start now; no further byte need come for it.
                continue;
            }
            if stop_at.is_some() && self.pending.is_empty() {
                return End::Quiet;
            }
            let wake_at = stop_at.or_else(|| self.given_up_at());
            let may_read = self.may_read();
            let event = tokio::select! {
                biased;
                body = first_done(&mut self.pending) => Event::Done(body),
                () = stopping.cancelled(), if stop_at.is_none() => Event::Stop,
                () = self.claim.granted(self.frame_len) => Event::Room,
                read = read(&mut self.stream, &mut self.buf), if may_read => Event::Read(read),
                () = sleep_until(wake_at) => Event::Idle,
            };
            match event {
                Event::Done(body) => self.first_is(body),
                Event::Stop => stop_at = Some(Instant::now() + STOP_GRACE),
                Event::Room => self.last_read = Instant::now(),
                Event::Read(Ok(0)) => return End::Quiet,
                Event::Read(Ok(read)) => {
                    self.last_read = Instant::now();
                    self.ctx.broker.metrics.bytes_in.add(read as u64);
                }
                Event::Read(Err(error)) => return End::Io(error),
                Event::Idle if stop_at.is_some() => return End::Quiet,
                Event::Idle => return self.gave_up(),
            }
        }
    }

    fn may_start(&self) -> bool {
        !self.barrier && self.pending.len() < PENDING_MAX
    }

    /// Reads ahead within a bound; beyond it only for a frame that has its room.
    fn may_read(&self) -> bool {
        if self.claim.is_waiting() {
            return false;
        }
        let ahead = self.may_start() || self.buf.len() < READ_AHEAD_MAX;
        ahead || self.claim.missing(self.buf.len()).is_some()
    }

    /// When a peer that sends nothing is given up.
    fn given_up_at(&self) -> Option<Instant> {
        let idle = Duration::from_millis(self.ctx.broker.config.connection_idle_ms);
        let idle_at = self.pending.is_empty().then(|| self.last_request + idle);
        // Others may be waiting for the room that it holds.
        let stalled_at = self.claim.missing(self.buf.len()).map(|_| self.last_read + STALL_MAX.min(idle));
        idle_at.into_iter().chain(stalled_at).min()
    }

    fn gave_up(&self) -> End {
        match self.claim.missing(self.buf.len()) {
            Some(missing) => End::Refused(format!(
                "a request of {} bytes stopped on its way: {missing} are missing",
                self.frame_len
            )),
            None => End::Idle,
        }
    }

    /// Starts whole frames that are in the buffer, as many as may run.
    fn start_requests(&mut self) -> Result<(), End> {
        let max = self.ctx.broker.config.request_bytes_max as usize;
        while self.may_start() {
            let next = frame::next_frame(&mut self.buf, max).map_err(|e| End::Refused(e.to_string()))?;
            let Some(mut body) = next else {
                self.prepare_for_the_rest(max);
                return Ok(());
            };
            let claim = std::mem::take(&mut self.claim);
            if 4 + body.len() > FREE_MAX {
                // The frame takes its memory with it: what follows begins in a buffer of its own.
                self.buf = BytesMut::from(&self.buf[..]);
            }
            let header = frame::parse_request_header(&mut body).map_err(|e| End::Refused(e.to_string()))?;
            self.start(header, body)?;
            drop(claim);
        }
        Ok(())
    }

    /// Room for the rest of a frame at once, but never for what only was announced.
    fn prepare_for_the_rest(&mut self, max: usize) {
        let Ok(Some(len)) = frame::frame_len(&self.buf, max) else { return };
        self.frame_len = len + 4;
        let have = self.buf.len();
        let missing = self.frame_len.saturating_sub(have);
        if !self.claim.covers(&self.ctx.broker.frame_room, self.frame_len, have) {
            return;
        }
        // Up to here it was free; beyond it there is room for all of it.
        let free = FREE_MAX.saturating_sub(have);
        self.buf.reserve(if free > 0 { missing.min(free) } else { missing });
    }

    fn start(&mut self, header: RequestHeader, body: Bytes) -> Result<(), End> {
        self.last_request = Instant::now();
        self.ctx.broker.metrics.requests.add(1);
        match api::start(&self.ctx, &header, body) {
            Answer::Ready(body) => self.pending.push_back(Pending::Ready(header, body)),
            Answer::Overlap(future) => self.pending.push_back(Pending::Waiting(header, future)),
            Answer::Later(future) => {
                self.pending.push_back(Pending::Waiting(header, future));
                self.barrier = true;
            }
            Answer::Nothing => {}
            Answer::Close(reason) => return Err(End::Refused(reason)),
        }
        Ok(())
    }

    fn first_is(&mut self, body: Body) {
        if let Some(Pending::Waiting(header, _)) = self.pending.pop_front() {
            self.pending.push_front(Pending::Ready(header, body));
        }
    }

    /// Sends every answer at the front of the queue that is complete.
    async fn answer_ready(&mut self) -> io::Result<()> {
        while let Some(Pending::Ready(..)) = self.pending.front() {
            let Some(Pending::Ready(header, body)) = self.pending.pop_front() else { break };
            if self.ctx.broker.cluster.as_ref().is_some_and(|cluster| cluster.is_overdue()) {
                return Err(io::Error::other(
                    "this broker's lease is over: what it would say may be of the past",
                ));
            }
            self.send(&header, body).await?;
        }
        if self.pending.is_empty() {
            self.barrier = false;
        }
        self.send_out(false).await?;
        self.stream.flush().await
    }

    async fn send(&mut self, header: &RequestHeader, body: Body) -> io::Result<()> {
        let len = body.len();
        self.ctx.broker.metrics.bytes_out.add(len as u64);
        self.out.extend_from_slice(&api::frame_head(header, len));
        for piece in body.0 {
            match piece {
                Piece::Bytes(bytes) | Piece::Records(RecordPiece::Memory(bytes)) => {
                    if bytes.len() <= COALESCE_MAX {
                        self.out.extend_from_slice(&bytes);
                    } else {
                        self.send_out(true).await?;
                        self.stream.write_all(&bytes, false).await?;
                    }
                }
                Piece::Records(RecordPiece::File(slice)) => {
                    self.send_out(true).await?;
                    self.stream.write_slice(&slice).await?;
                }
            }
            if self.out.len() > COALESCE_MAX {
                self.send_out(true).await?;
            }
        }
        Ok(())
    }

    async fn send_out(&mut self, more: bool) -> io::Result<()> {
        if !self.out.is_empty() {
            self.stream.write_all(&self.out, more).await?;
            self.out.clear();
        }
        Ok(())
    }
}

async fn read(stream: &mut Stream, buf: &mut BytesMut) -> io::Result<usize> {
    if buf.capacity() - buf.len() < READ_MIN / 4 {
        buf.reserve(READ_MIN);
    }
    stream.read_buf(buf).await
}

/// Never, without a time.
async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

/// Completes when the first answer in the queue is there; never, if none is waited for.
async fn first_done(pending: &mut VecDeque<Pending>) -> Body {
    std::future::poll_fn(|cx| match pending.front_mut() {
        Some(Pending::Waiting(_, future)) => future.as_mut().poll(cx),
        _ => Poll::Pending,
    })
    .await
}
