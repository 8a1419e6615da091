//! One GET to a service's HTTP endpoint: its probes and its metrics.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context, Result};

const TIMEOUT: Duration = Duration::from_secs(10);

/// Status and body of a page.
pub fn get(port: u16, path: &str) -> Result<(u16, String)> {
    page_at(SocketAddr::from(([127, 0, 0, 1], port)), path)
}

/// The same from a service that is not on loopback.
pub fn page_at(address: SocketAddr, path: &str) -> Result<(u16, String)> {
    let mut stream = TcpStream::connect_timeout(&address, TIMEOUT)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: test\r\n\r\n").as_bytes())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").context("an answer without a head")?;
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).context("a status")?;
    Ok((status, body.to_owned()))
}

/// A series of `/metrics`, named with its labels as it is printed.
pub fn metric(port: u16, series: &str) -> Result<f64> {
    let (_, text) = get(port, "/metrics")?;
    let value = text.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' ')?.parse().ok());
    value.with_context(|| format!("no series {series} in\n{text}"))
}
