//! Relays before two brokers that hold what a producer sends to the first of them, until a later batch of it has
//! been answered by the second: the order of things in which a move may meet a pipelining client.
//!
//! Knows Produce 3 to 8 as librdkafka sends it (apache/kafka `ProduceRequest.json`); passes everything else as bytes.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use parking_lot::Mutex;

use crate::clients::PATIENCE;
use crate::wire::{PRODUCE, Take};

const FRAME_BYTES_MAX: usize = 16 << 20;
/// Where a record batch (format 2, KIP-98) has its producer id and its base sequence.
const PRODUCER_ID_AT: usize = 43;
const SEQUENCE_AT: usize = 53;

/// The relays. Their threads end with their connections, and their listeners with the process.
pub struct Overtake {
    /// Of the first broker, and of the second.
    pub addresses: [SocketAddr; 2],
    seen: Arc<Mutex<Seen>>,
}

#[derive(Default)]
struct Seen {
    /// Batches that are held before the first broker, or were.
    held: u64,
    /// Later batches that the second broker has answered while they were.
    overtook: u64,
    /// Such that it has not answered yet, by their correlation ids.
    asked: BTreeSet<i32>,
}

impl Overtake {
    /// Passes connections on to these brokers, which may not be there yet.
    pub fn start(brokers: [String; 2]) -> Result<Overtake> {
        let seen = Arc::<Mutex<Seen>>::default();
        let start = |broker: String, is_first: bool| -> Result<SocketAddr> {
            let listener = TcpListener::bind(("127.0.0.1", 0))?;
            let (address, seen) = (listener.local_addr()?, seen.clone());
            std::thread::spawn(move || {
                for client in listener.incoming().map_while(Result::ok) {
                    let Ok(broker) = TcpStream::connect(&broker) else { continue };
                    let seen = seen.clone();
                    // A connection that breaks is the client's to open again.
                    std::thread::spawn(move || match is_first {
                        true => before_first(client, broker, &seen),
                        false => before_second(client, broker, &seen),
                    });
                }
            });
            Ok(address)
        };
        let [first, second] = brokers;
        Ok(Overtake { addresses: [start(first, true)?, start(second, false)?], seen })
    }

    /// How many batches were held, and how many later ones were answered meanwhile.
    pub fn stake(&self) -> (u64, u64) {
        let seen = self.seen.lock();
        (seen.held, seen.overtook)
    }

    /// Waits until a batch is held.
    pub fn until_held(&self) -> Result<()> {
        let end = Instant::now() + PATIENCE;
        while self.stake().0 == 0 {
            ensure!(Instant::now() < end, "no producer sends a first batch");
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }
}

/// Holds batches from the first of a producer on; everything else passes.
fn before_first(mut client: TcpStream, broker: TcpStream, seen: &Arc<Mutex<Seen>>) -> Result<()> {
    client.set_nodelay(true)?;
    broker.set_nodelay(true)?;
    let (mut answers, mut back) = (broker.try_clone()?, client.try_clone()?);
    std::thread::spawn(move || std::io::copy(&mut answers, &mut back));
    let broker = Arc::new(Mutex::new(broker));
    loop {
        let request = frame(&mut client)?;
        let is_held = match sequence(&request[4..])? {
            None => false,
            Some(sequence) => {
                let mut seen = seen.lock();
                let is_held = seen.overtook == 0 && (seen.held > 0 || sequence == 0);
                seen.held += u64::from(is_held);
                is_held
            }
        };
        if !is_held {
            broker.lock().write_all(&request)?;
            continue;
        }
        let (broker, seen) = (broker.clone(), seen.clone());
        std::thread::spawn(move || -> Result<()> {
            while seen.lock().overtook == 0 {
                std::thread::sleep(Duration::from_millis(1));
            }
            Ok(broker.lock().write_all(&request)?)
        });
    }
}

/// Notices what overtakes; everything passes.
fn before_second(mut client: TcpStream, mut broker: TcpStream, seen: &Arc<Mutex<Seen>>) -> Result<()> {
    client.set_nodelay(true)?;
    broker.set_nodelay(true)?;
    let (mut answers, mut back, answered) = (broker.try_clone()?, client.try_clone()?, seen.clone());
    std::thread::spawn(move || -> Result<()> {
        loop {
            let answer = frame(&mut answers)?;
            back.write_all(&answer)?;
            let mut seen = answered.lock();
            if seen.asked.remove(&Take::new(&answer[4..]).i32()?) {
                seen.overtook += 1;
            }
        }
    });
    loop {
        let request = frame(&mut client)?;
        if let Some(sequence) = sequence(&request[4..])?
            && sequence > 0
        {
            let mut seen = seen.lock();
            if seen.held > 0 && seen.overtook == 0 {
                seen.asked.insert(correlation(&request[4..])?);
            }
        }
        broker.write_all(&request)?;
    }
}

/// The next frame, its length in front.
fn frame(from: &mut TcpStream) -> Result<Vec<u8>> {
    let mut length = [0; 4];
    from.read_exact(&mut length)?;
    let bytes = u32::from_be_bytes(length) as usize;
    ensure!(bytes <= FRAME_BYTES_MAX, "a frame of {bytes} bytes");
    let mut frame = length.to_vec();
    frame.resize(4 + bytes, 0);
    from.read_exact(&mut frame[4..])?;
    Ok(frame)
}

/// The base sequence of the batch of a Produce from an idempotent producer; `None` for every other request.
fn sequence(request: &[u8]) -> Result<Option<i32>> {
    let mut take = Take::new(request);
    if take.i16()? != PRODUCE {
        return Ok(None);
    }
    let version = take.i16()?;
    ensure!((3..=8).contains(&version), "a Produce of version {version}");
    take.i32()?; // correlation id
    take.string()?; // client id
    take.string()?; // transactional id
    take.i16()?; // acks
    take.i32()?; // timeout
    ensure!(take.i32()? == 1, "one topic");
    take.string()?;
    ensure!(take.i32()? == 1, "one partition");
    take.i32()?;
    let Some(batch) = take.bytes()? else { return Ok(None) };
    ensure!(batch.len() > SEQUENCE_AT + 4, "a whole batch");
    let number = |at: usize| i32::from_be_bytes([batch[at], batch[at + 1], batch[at + 2], batch[at + 3]]);
    // The upper half of "none", which is -1.
    Ok((number(PRODUCER_ID_AT) != -1).then(|| number(SEQUENCE_AT)))
}

fn correlation(request: &[u8]) -> Result<i32> {
    let mut take = Take::new(request);
    take.i32()?; // which request, and its version
    take.i32()
}
