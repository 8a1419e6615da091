//! The smallest Kafka client: one frame out, one frame in. It shares no code with the product, so that it can
//! tell whether a broker serves before any real client is started. Knows only ApiVersions 0 and Metadata 1.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};

const TIMEOUT: Duration = Duration::from_secs(2);
const ANSWER_BYTES_MAX: usize = 16 * 1024 * 1024;

/// True when the broker answers Metadata with at least one broker and a controller.
pub fn serves(address: SocketAddr) -> bool {
    asks_metadata(address).unwrap_or(false)
}

/// Waits until [`serves`]; the time that took, or an error after `limit`.
pub fn wait_until_serves(address: SocketAddr, limit: Duration) -> Result<Duration> {
    let begin = Instant::now();
    while !serves(address) {
        ensure!(begin.elapsed() < limit, "{address} does not serve after {limit:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(begin.elapsed())
}

/// Sends one request with a v1 header and returns the answer's bytes behind the correlation id.
pub fn ask(stream: &mut TcpStream, key: i16, version: i16, body: &[u8]) -> Result<Vec<u8>> {
    let mut frame = Vec::with_capacity(body.len() + 19);
    frame.extend_from_slice(&(8 + 2 + 5 + body.len() as i32).to_be_bytes());
    frame.extend_from_slice(&key.to_be_bytes());
    frame.extend_from_slice(&version.to_be_bytes());
    frame.extend_from_slice(&7i32.to_be_bytes());
    frame.extend_from_slice(&5i16.to_be_bytes());
    frame.extend_from_slice(b"probe");
    frame.extend_from_slice(body);
    stream.write_all(&frame)?;
    let mut word = [0u8; 4];
    stream.read_exact(&mut word)?;
    let len = u32::from_be_bytes(word) as usize;
    ensure!((4..=ANSWER_BYTES_MAX).contains(&len), "an answer of {len} bytes");
    let mut answer = vec![0u8; len];
    stream.read_exact(&mut answer)?;
    ensure!(answer[..4] == 7i32.to_be_bytes(), "wrong correlation id");
    Ok(answer.split_off(4))
}

fn asks_metadata(address: SocketAddr) -> Result<bool> {
    let mut stream = TcpStream::connect_timeout(&address, TIMEOUT)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_nodelay(true)?;
    let versions = ask(&mut stream, 18, 0, &[])?;
    ensure!(versions.starts_with(&[0, 0]), "ApiVersions failed");
    // Metadata 1 for an empty list of topics: brokers first.
    let answer = ask(&mut stream, 3, 1, &0i32.to_be_bytes())?;
    let Some(count) = answer.get(..4) else { bail!("short answer") };
    let brokers = i32::from_be_bytes([count[0], count[1], count[2], count[3]]);
    // The controller id stands before the (empty) topic array.
    let Some(controller) = answer.len().checked_sub(8).map(|at| &answer[at..at + 4]) else {
        bail!("short answer")
    };
    Ok(brokers > 0 && controller != (-1i32).to_be_bytes())
}
