//! A generator of fixed batches: the same bytes again and again, round robin over the partitions of one broker.
//!
//! So that what differs between two loads is the number of partitions alone, every request carries one batch of one
//! size, and as many requests are in flight. It costs little CPU: a batch is made once.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use crate::clients::Record;
use crate::wire::{self, BatchHead, Conn, Take, batch, produce_body};

/// What is sent.
#[derive(Clone, Copy, Debug)]
pub struct Shape<'a> {
    pub topic: &'a str,
    pub partitions: i32,
    pub batch_bytes: usize,
    pub batches: u64,
    pub connections: usize,
    /// Of each connection.
    pub in_flight: usize,
}

/// How it went.
#[derive(Clone, Debug)]
pub struct Outcome {
    pub took: Duration,
    pub bytes: u64,
    /// Microseconds from the request to its answer, in order.
    pub latencies: Vec<u64>,
}

/// Sends all of it with `acks=all`, or fails at the first batch that is not acknowledged.
pub fn generate(address: &str, shape: Shape<'_>) -> Result<Outcome> {
    let bytes = made(shape.batch_bytes);
    let begin = Instant::now();
    let latencies = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..shape.connections)
            .map(|at| {
                scope.spawn({
                    let bytes = &bytes;
                    move || send(address, shape, at, bytes)
                })
            })
            .collect();
        let mut all = Vec::new();
        for thread in threads {
            all.extend(thread.join().map_err(|_| anyhow::anyhow!("the generator panicked"))??);
        }
        Ok::<_, anyhow::Error>(all)
    });
    let took = begin.elapsed();
    let mut latencies = latencies?;
    latencies.sort_unstable();
    Ok(Outcome { took, bytes: shape.batches * bytes.len() as u64, latencies })
}

/// A batch of about this size, of records of 1 KiB, which do not compress.
fn made(size: usize) -> Vec<u8> {
    let mut dice = crate::dice::Dice::new(1);
    let records: Vec<Record> = (0..(size / 1_024).max(1))
        .map(|_| Record {
            value: Some((0..size.min(1_024)).map(|_| dice.below(256) as u8).collect()),
            ..Record::default()
        })
        .collect();
    batch(&records, BatchHead::default())
}

/// Batches number `at`, `at + connections`, ...
fn send(address: &str, shape: Shape<'_>, at: usize, bytes: &[u8]) -> Result<Vec<u64>> {
    let mut conn = Conn::open(address)?;
    let (mut sent, mut latencies) = (VecDeque::new(), Vec::new());
    let mut numbers = (at as u64..shape.batches).step_by(shape.connections);
    loop {
        while sent.len() < shape.in_flight {
            let Some(number) = numbers.next() else { break };
            let partition = (number % shape.partitions as u64) as i32;
            let body = produce_body(shape.topic, partition, -1, bytes);
            sent.push_back((Instant::now(), conn.send(wire::PRODUCE, 7, &body, false)?));
        }
        let Some((begin, id)) = sent.pop_front() else { return Ok(latencies) };
        let answer = conn.answer(id)?;
        latencies.push(begin.elapsed().as_micros() as u64);
        let mut take = Take::new(&answer);
        take.i32()?;
        take.string()?;
        take.i32()?;
        let (partition, error) = (take.i32()?, take.i16()?);
        ensure!(error == 0, "{}-{partition}: produce answers error {error}", shape.topic);
    }
}
