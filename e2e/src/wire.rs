//! Raw requests: frames and record batches made by hand, for what no client library would send.
//!
//! Shares no code with the product. Knows the few messages that the cases need, at the versions that a caller
//! names; everything else is built by a test with [`Put`] and read with [`Take`]. Integers are big-endian; the
//! layouts are Apache Kafka's message schemas.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail, ensure};

use crate::clients::{PATIENCE, Record};
use crate::server::Server;

pub const PRODUCE: i16 = 0;
pub const FETCH: i16 = 1;
pub const LIST_OFFSETS: i16 = 2;
pub const METADATA: i16 = 3;
pub const API_VERSIONS: i16 = 18;
pub const CREATE_TOPICS: i16 = 19;
pub const DELETE_TOPICS: i16 = 20;
pub const DELETE_RECORDS: i16 = 21;
pub const INIT_PRODUCER_ID: i16 = 22;

const FRAME_BYTES_MAX: usize = 256 << 20;

/// One connection that speaks frames.
pub struct Conn {
    pub stream: TcpStream,
    correlation: i32,
}

/// A message under construction.
#[derive(Clone, Debug, Default)]
pub struct Put(pub Vec<u8>);

/// A message being read.
#[derive(Debug)]
pub struct Take<'a> {
    data: &'a [u8],
}

/// One partition of a Fetch answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fetched {
    pub error: i16,
    pub high_watermark: i64,
    pub last_stable_offset: i64,
    pub log_start: i64,
    pub aborted: i32,
    pub records: Vec<u8>,
}

/// What a Fetch asks for, of one topic.
#[derive(Clone, Copy, Debug)]
pub struct FetchPlan<'a> {
    pub topic: &'a str,
    /// (partition, offset)
    pub from: &'a [(i32, i64)],
    pub max_wait_ms: i32,
    pub min_bytes: i32,
    pub max_bytes: i32,
    pub partition_max_bytes: i32,
    pub isolation: i8,
}

/// What stands in the header of a batch made by [`batch`].
#[derive(Clone, Copy, Debug)]
pub struct BatchHead {
    pub attributes: i16,
    pub producer_id: i64,
    pub producer_epoch: i16,
    pub sequence: i32,
}

impl Conn {
    pub fn open(address: impl ToSocketAddrs) -> Result<Conn> {
        let stream = TcpStream::connect(address).context("connect")?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        Ok(Conn { stream, correlation: 100 })
    }

    /// Sends a request with header v1 (v2 when `flexible`) and returns its correlation id.
    pub fn send(&mut self, key: i16, version: i16, body: &[u8], flexible: bool) -> Result<i32> {
        self.correlation += 1;
        let mut frame = Put::default();
        frame.i16(key).i16(version).i32(self.correlation).string(Some("e2e-raw"));
        if flexible {
            frame.tags();
        }
        frame.0.extend_from_slice(body);
        self.send_frame(&frame.0)?;
        Ok(self.correlation)
    }

    pub fn send_frame(&mut self, frame: &[u8]) -> Result<()> {
        let mut all = (frame.len() as i32).to_be_bytes().to_vec();
        all.extend_from_slice(frame);
        Ok(self.stream.write_all(&all)?)
    }

    /// The next frame, from the correlation id on.
    pub fn receive(&mut self) -> Result<Vec<u8>> {
        let mut word = [0u8; 4];
        self.stream.read_exact(&mut word).context("read an answer's length")?;
        let len = i32::from_be_bytes(word) as usize;
        ensure!((4..=FRAME_BYTES_MAX).contains(&len), "an answer of {len} bytes");
        let mut frame = vec![0u8; len];
        self.stream.read_exact(&mut frame).context("read an answer")?;
        Ok(frame)
    }

    /// One request of a version that is not flexible; the body of its answer.
    pub fn call(&mut self, key: i16, version: i16, body: &[u8]) -> Result<Vec<u8>> {
        let sent = self.send(key, version, body, false)?;
        self.answer(sent)
    }

    /// The next answer, which must be to `sent`; its body behind a v0 header.
    pub fn answer(&mut self, sent: i32) -> Result<Vec<u8>> {
        let frame = self.receive()?;
        ensure!(frame[..4] == sent.to_be_bytes(), "an answer to another request");
        Ok(frame[4..].to_vec())
    }

    /// True when the peer closes the connection (or resets it) instead of sending anything within [`PATIENCE`].
    pub fn is_closed_by_peer(&mut self) -> Result<bool> {
        let mut byte = [0u8; 1];
        match self.stream.read(&mut byte) {
            Ok(read) => Ok(read == 0),
            Err(error) if error.kind() == ErrorKind::ConnectionReset => Ok(true),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// True when nothing comes for `quiet`.
    pub fn is_silent_for(&mut self, quiet: Duration) -> Result<bool> {
        self.stream.set_read_timeout(Some(quiet))?;
        let mut byte = [0u8; 1];
        let read = self.stream.peek(&mut byte);
        self.stream.set_read_timeout(Some(PATIENCE))?;
        match read {
            Ok(_) => Ok(false),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => Ok(true),
            Err(error) => Err(error.into()),
        }
    }

    /// Creates a topic, or fails.
    pub fn create_topic(&mut self, topic: &str, partitions: i32, config: &[(&str, &str)]) -> Result<()> {
        let error = self.try_create_topic(topic, partitions, config)?;
        ensure!(error == 0, "CreateTopics of {topic} answers error {error}");
        Ok(())
    }

    /// CreateTopics 2; the error code.
    pub fn try_create_topic(&mut self, topic: &str, partitions: i32, config: &[(&str, &str)]) -> Result<i16> {
        let mut body = Put::default();
        body.i32(1).string(Some(topic)).i32(partitions).i16(1).i32(0).i32(config.len() as i32);
        for (name, value) in config {
            body.string(Some(name)).string(Some(value));
        }
        body.i32(30_000).i8(0);
        let answer = self.call(CREATE_TOPICS, 2, &body.0)?;
        let mut take = Take::new(&answer);
        take.i32()?; // throttle
        ensure!(take.i32()? == 1, "one topic");
        take.string()?;
        let error = take.i16()?;
        // Kafka answers before its partitions have leaders; Sealane must not.
        for partition in 0..if Server::is_kafka() && error == 0 { partitions } else { 0 } {
            while self.list_offset(topic, partition, -1)?.0 != 0 {
                std::thread::sleep(Duration::from_millis(20));
            }
        }
        Ok(error)
    }

    /// DeleteTopics 1; the error code.
    pub fn delete_topic(&mut self, topic: &str) -> Result<i16> {
        let mut body = Put::default();
        body.i32(1).string(Some(topic)).i32(30_000);
        let answer = self.call(DELETE_TOPICS, 1, &body.0)?;
        let mut take = Take::new(&answer);
        take.i32()?;
        ensure!(take.i32()? == 1, "one topic");
        take.string()?;
        take.i16()
    }

    /// DeleteRecords 1 of what is before `offset`; (error, where the log starts now).
    pub fn delete_records(&mut self, topic: &str, partition: i32, offset: i64) -> Result<(i16, i64)> {
        let mut body = Put::default();
        body.i32(1).string(Some(topic)).i32(1).i32(partition).i64(offset).i32(30_000);
        let answer = self.call(DELETE_RECORDS, 1, &body.0)?;
        let mut take = Take::new(&answer);
        take.i32()?; // throttle
        ensure!(take.i32()? == 1, "one topic");
        take.string()?;
        ensure!(take.i32()? == 1 && take.i32()? == partition, "the partition");
        let start = take.i64()?;
        Ok((take.i16()?, start))
    }

    /// Produce 7 of one batch; (error, base offset).
    pub fn produce(&mut self, topic: &str, partition: i32, batch: &[u8]) -> Result<(i16, i64)> {
        let answer = self.call(PRODUCE, 7, &produce_body(topic, partition, -1, batch))?;
        let mut take = Take::new(&answer);
        ensure!(take.i32()? == 1, "one topic");
        take.string()?;
        ensure!(take.i32()? == 1, "one partition");
        ensure!(take.i32()? == partition, "the partition");
        Ok((take.i16()?, take.i64()?))
    }

    /// Fetch 11 without a session; the partitions in the order of the answer.
    pub fn fetch(&mut self, plan: FetchPlan<'_>) -> Result<Vec<(i32, Fetched)>> {
        let sent = self.send(FETCH, 11, &plan.body(), false)?;
        self.fetched(sent)
    }

    /// The answer to a Fetch 11 that was sent before.
    pub fn fetched(&mut self, sent: i32) -> Result<Vec<(i32, Fetched)>> {
        let answer = self.answer(sent)?;
        let mut take = Take::new(&answer);
        take.i32()?; // throttle
        let error = take.i16()?;
        ensure!(error == 0, "Fetch answers error {error}");
        ensure!(take.i32()? == 0, "a fetch session nobody offered");
        let mut partitions = Vec::new();
        for _ in 0..take.i32()? {
            take.string()?;
            for _ in 0..take.i32()? {
                let partition = take.i32()?;
                let (error, high_watermark) = (take.i16()?, take.i64()?);
                let (last_stable_offset, log_start) = (take.i64()?, take.i64()?);
                let aborted = take.i32()?;
                for _ in 0..aborted {
                    take.i64()?;
                    take.i64()?;
                }
                take.i32()?; // preferred read replica
                let records = take.bytes()?.unwrap_or_default();
                partitions.push((
                    partition,
                    Fetched { error, high_watermark, last_stable_offset, log_start, aborted, records },
                ));
            }
        }
        Ok(partitions)
    }

    /// ListOffsets 2 of one partition; (error, timestamp, offset).
    pub fn list_offset(&mut self, topic: &str, partition: i32, when: i64) -> Result<(i16, i64, i64)> {
        let mut body = Put::default();
        body.i32(-1).i8(0).i32(1).string(Some(topic)).i32(1).i32(partition).i64(when);
        let answer = self.call(LIST_OFFSETS, 2, &body.0)?;
        let mut take = Take::new(&answer);
        take.i32()?;
        ensure!(take.i32()? == 1, "one topic");
        take.string()?;
        ensure!(take.i32()? == 1, "one partition");
        take.i32()?;
        Ok((take.i16()?, take.i64()?, take.i64()?))
    }

    /// Reads partition after partition from its start to its high watermark; how many records there are.
    pub fn count_records(&mut self, topic: &str, partitions: i32) -> Result<u64> {
        let mut count = 0;
        for partition in 0..partitions {
            let (error, _, mut from) = self.list_offset(topic, partition, -2)?;
            ensure!(error == 0, "ListOffsets of {topic}-{partition} answers error {error}");
            loop {
                let answer = self.fetch(FetchPlan::now(topic, &[(partition, from)]))?;
                let part = &answer.first().context("one partition")?.1;
                ensure!(
                    part.error == 0,
                    "Fetch of {topic}-{partition} at {from} answers error {}",
                    part.error
                );
                let found = batches(&part.records);
                count += shown(&found);
                let Some((_, last, _, _)) = found.last() else { break };
                from = last + 1;
                if from >= part.high_watermark {
                    break;
                }
            }
        }
        Ok(count)
    }

    /// The offset after the last durable record.
    pub fn end_offset(&mut self, topic: &str, partition: i32) -> Result<i64> {
        let (error, _, offset) = self.list_offset(topic, partition, -1)?;
        ensure!(error == 0, "ListOffsets of {topic}-{partition} answers error {error}");
        Ok(offset)
    }

    /// InitProducerId 1 without a transactional id; (producer id, epoch). Waits while the broker says that it loads.
    pub fn init_producer_id(&mut self) -> Result<(i64, i16)> {
        const LOADING: i16 = 14;
        let mut body = Put::default();
        body.string(None).i32(60_000);
        loop {
            let answer = self.call(INIT_PRODUCER_ID, 1, &body.0)?;
            let mut take = Take::new(&answer);
            take.i32()?;
            let error = take.i16()?;
            if error == 0 {
                return Ok((take.i64()?, take.i16()?));
            }
            ensure!(error == LOADING, "InitProducerId answers error {error}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

impl<'a> FetchPlan<'a> {
    /// From these offsets, up to 1 MiB, without waiting.
    pub fn now(topic: &'a str, from: &'a [(i32, i64)]) -> FetchPlan<'a> {
        FetchPlan {
            topic,
            from,
            max_wait_ms: 0,
            min_bytes: 1,
            max_bytes: 1 << 20,
            partition_max_bytes: 1 << 20,
            isolation: 0,
        }
    }

    /// The body of a Fetch 11 outside of any session.
    pub fn body(&self) -> Vec<u8> {
        let mut body = Put::default();
        body.i32(-1).i32(self.max_wait_ms).i32(self.min_bytes).i32(self.max_bytes).i8(self.isolation);
        body.i32(0).i32(-1).i32(1).string(Some(self.topic)).i32(self.from.len() as i32);
        for (partition, offset) in self.from {
            body.i32(*partition).i32(-1).i64(*offset).i64(-1).i32(self.partition_max_bytes);
        }
        body.i32(0).string(Some(""));
        body.0
    }
}

/// The body of a Produce 3 to 8 with one batch.
pub fn produce_body(topic: &str, partition: i32, acks: i16, batch: &[u8]) -> Vec<u8> {
    let mut body = Put::default();
    body.string(None).i16(acks).i32(30_000).i32(1).string(Some(topic)).i32(1).i32(partition);
    body.i32(batch.len() as i32);
    body.0.extend_from_slice(batch);
    body.0
}

impl Default for BatchHead {
    fn default() -> BatchHead {
        BatchHead { attributes: 0, producer_id: -1, producer_epoch: -1, sequence: -1 }
    }
}

/// An uncompressed v2 batch of these records; one without a timestamp gets the present.
pub fn batch(records: &[Record], head: BatchHead) -> Vec<u8> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as i64);
    let times: Vec<i64> = records.iter().map(|record| record.timestamp.unwrap_or(now)).collect();
    let first = times.first().copied().unwrap_or(-1);
    let mut checked = Put::default();
    checked.i16(head.attributes).i32(records.len() as i32 - 1).i64(first);
    checked.i64(times.iter().copied().max().unwrap_or(-1));
    checked.i64(head.producer_id).i16(head.producer_epoch).i32(head.sequence).i32(records.len() as i32);
    for (delta, (record, time)) in records.iter().zip(&times).enumerate() {
        let mut body = Put::default();
        body.i8(0).varint(time - first).varint(delta as i64);
        body.varblob(record.key.as_deref()).varblob(record.value.as_deref());
        body.varint(record.headers.len() as i64);
        for (name, value) in &record.headers {
            body.varblob(Some(name.as_bytes())).varblob(value.as_deref());
        }
        checked.varint(body.0.len() as i64);
        checked.0.extend_from_slice(&body.0);
    }
    let mut whole = Put::default();
    whole.i64(0).i32(checked.0.len() as i32 + 9).i32(-1).i8(2);
    whole.i32(crc32c(&checked.0) as i32);
    whole.0.extend_from_slice(&checked.0);
    whole.0
}

/// A batch of one record by an idempotent producer (id, epoch).
pub fn numbered((producer_id, producer_epoch): (i64, i16), sequence: i32) -> Vec<u8> {
    let head = BatchHead { producer_id, producer_epoch, sequence, ..BatchHead::default() };
    batch(&[Record::numbered("v", sequence as usize)], head)
}

/// How many records of these batches an application sees: none of a control batch, which only takes the reader over
/// what is hidden.
pub fn shown(found: &[(i64, i64, i32, i16)]) -> u64 {
    let data = found.iter().filter(|(_, _, _, attributes)| attributes & 0x20 == 0);
    data.map(|(_, _, records, _)| *records as u64).sum()
}

/// (base offset, last offset, record count, attributes) of every whole batch in an answer.
pub fn batches(mut records: &[u8]) -> Vec<(i64, i64, i32, i16)> {
    let mut found = Vec::new();
    while records.len() >= 61 {
        let mut take = Take::new(records);
        let header = (|| {
            let (base, length) = (take.i64()?, take.i32()?);
            take.i32()?;
            take.i8()?;
            take.i32()?;
            let (attributes, last) = (take.i16()?, take.i32()?);
            take.skip(8 + 8 + 8 + 2 + 4)?;
            Ok::<_, anyhow::Error>((base, length, attributes, last, take.i32()?))
        })();
        let Ok((base, length, attributes, last, count)) = header else { break };
        let size = 12 + length as usize;
        if size > records.len() {
            break;
        }
        found.push((base, base + i64::from(last), count, attributes));
        records = &records[size..];
    }
    found
}

/// CRC-32C (Castagnoli), bit by bit: slow, short and ours alone.
pub fn crc32c(data: &[u8]) -> u32 {
    let mut crc = !0u32;
    for byte in data {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = if crc & 1 == 1 { (crc >> 1) ^ 0x82F6_3B78 } else { crc >> 1 };
        }
    }
    !crc
}

impl Put {
    pub fn i8(&mut self, value: i8) -> &mut Put {
        self.0.extend_from_slice(&value.to_be_bytes());
        self
    }

    pub fn i16(&mut self, value: i16) -> &mut Put {
        self.0.extend_from_slice(&value.to_be_bytes());
        self
    }

    pub fn i32(&mut self, value: i32) -> &mut Put {
        self.0.extend_from_slice(&value.to_be_bytes());
        self
    }

    pub fn i64(&mut self, value: i64) -> &mut Put {
        self.0.extend_from_slice(&value.to_be_bytes());
        self
    }

    /// A nullable string with a 16-bit length.
    pub fn string(&mut self, value: Option<&str>) -> &mut Put {
        let Some(value) = value else { return self.i16(-1) };
        self.i16(value.len() as i16);
        self.0.extend_from_slice(value.as_bytes());
        self
    }

    /// A compact nullable string.
    pub fn compact_string(&mut self, value: Option<&str>) -> &mut Put {
        let Some(value) = value else { return self.uvarint(0) };
        self.uvarint(value.len() as u64 + 1);
        self.0.extend_from_slice(value.as_bytes());
        self
    }

    pub fn uvarint(&mut self, mut value: u64) -> &mut Put {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
        self
    }

    /// A zigzag varint.
    pub fn varint(&mut self, value: i64) -> &mut Put {
        self.uvarint(((value << 1) ^ (value >> 63)) as u64)
    }

    /// Bytes with a zigzag length; -1 is null.
    pub fn varblob(&mut self, value: Option<&[u8]>) -> &mut Put {
        let Some(value) = value else { return self.varint(-1) };
        self.varint(value.len() as i64);
        self.0.extend_from_slice(value);
        self
    }

    /// Empty tagged fields.
    pub fn tags(&mut self) -> &mut Put {
        self.uvarint(0)
    }
}

impl<'a> Take<'a> {
    pub fn new(data: &'a [u8]) -> Take<'a> {
        Take { data }
    }

    pub fn left(&self) -> usize {
        self.data.len()
    }

    pub fn skip(&mut self, bytes: usize) -> Result<&'a [u8]> {
        let Some((taken, rest)) = self.data.split_at_checked(bytes) else {
            bail!("the answer ends {} bytes early", bytes - self.data.len());
        };
        self.data = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        Ok(self.skip(N)?.try_into()?)
    }

    pub fn i8(&mut self) -> Result<i8> {
        Ok(i8::from_be_bytes(self.array()?))
    }

    pub fn i16(&mut self) -> Result<i16> {
        Ok(i16::from_be_bytes(self.array()?))
    }

    pub fn i32(&mut self) -> Result<i32> {
        Ok(i32::from_be_bytes(self.array()?))
    }

    pub fn i64(&mut self) -> Result<i64> {
        Ok(i64::from_be_bytes(self.array()?))
    }

    pub fn string(&mut self) -> Result<Option<String>> {
        let len = self.i16()?;
        if len < 0 {
            return Ok(None);
        }
        Ok(Some(String::from_utf8(self.skip(len as usize)?.to_vec())?))
    }

    pub fn compact_string(&mut self) -> Result<Option<String>> {
        match self.uvarint()? {
            0 => Ok(None),
            len => Ok(Some(String::from_utf8(self.skip(len as usize - 1)?.to_vec())?)),
        }
    }

    pub fn bytes(&mut self) -> Result<Option<Vec<u8>>> {
        let len = self.i32()?;
        if len < 0 {
            return Ok(None);
        }
        Ok(Some(self.skip(len as usize)?.to_vec()))
    }

    pub fn uvarint(&mut self) -> Result<u64> {
        let mut value = 0;
        for shift in (0..63).step_by(7) {
            let byte = self.i8()? as u8;
            value |= u64::from(byte & 0x7F) << shift;
            if byte < 0x80 {
                return Ok(value);
            }
        }
        bail!("a varint without an end")
    }

    /// Tagged fields, skipped.
    pub fn tags(&mut self) -> Result<()> {
        for _ in 0..self.uvarint()? {
            self.uvarint()?;
            let len = self.uvarint()? as usize;
            self.skip(len)?;
        }
        Ok(())
    }
}
