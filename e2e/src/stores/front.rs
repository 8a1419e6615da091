//! A front before an HTTP server that refuses, breaks, loses answers and hangs, by seed.
//!
//! One request for each connection, read whole and forwarded as it is. Owns its threads: dropping it lets no
//! new request in.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, Result};

use crate::dice::Dice;

/// Requests in a thousand that fare badly. The default is none.
#[derive(Clone, Copy, Debug, Default)]
pub struct FrontFaults {
    /// Refused with 503 and "slow down".
    pub slow_down: u64,
    /// Answered with 500, and not forwarded.
    pub broken: u64,
    /// Answered with 403.
    pub denied: u64,
    /// Forwarded; then the connection is closed in place of an answer.
    pub lost: u64,
    /// Not answered for `hang`, then forwarded.
    pub hang_first: u64,
    pub hang: Duration,
    /// Writes of objects that brokers keep records in are answered with 500; those of their logs are not.
    pub objects_broken: u64,
    /// Conditional writes are forwarded as unconditional ones, all of them: no store to build a fence on.
    pub is_careless: bool,
}

/// What went through a front.
#[derive(Clone, Copy, Debug, Default)]
pub struct FrontCounts {
    pub requests: u64,
    pub puts: u64,
    /// Of the bodies of requests.
    pub bytes_in: u64,
    /// Of answers with what objects of partitions hold, heads included.
    pub record_bytes_out: u64,
    /// Objects with records that were forwarded to be written.
    pub record_puts: u64,
}

pub struct Front {
    pub address: SocketAddr,
    shared: Arc<Shared>,
}

struct Shared {
    target: SocketAddr,
    faults: Mutex<FrontFaults>,
    dice: Mutex<Dice>,
    stop: AtomicBool,
    harmed: AtomicU64,
    counts: Mutex<FrontCounts>,
}

impl Front {
    pub fn start(target: SocketAddr, seed: u64, faults: FrontFaults) -> Result<Front> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let address = listener.local_addr()?;
        let shared = Arc::new(Shared {
            target,
            faults: Mutex::new(faults),
            dice: Mutex::new(Dice::new(seed)),
            stop: AtomicBool::new(false),
            harmed: AtomicU64::new(0),
            counts: Mutex::default(),
        });
        let front = Front { address, shared: shared.clone() };
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                if shared.stop.load(Ordering::SeqCst) {
                    return;
                }
                let shared = shared.clone();
                // A client that goes away in the middle is no fault of the front.
                std::thread::spawn(move || shared.serve(stream));
            }
        });
        Ok(front)
    }

    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    pub fn set_faults(&self, faults: FrontFaults) {
        *self.shared.faults.lock().expect("no front thread panics") = faults;
    }

    /// Requests that fared badly so far.
    pub fn harmed(&self) -> u64 {
        self.shared.harmed.load(Ordering::SeqCst)
    }

    pub fn counts(&self) -> FrontCounts {
        *self.shared.counts.lock().expect("no front thread panics")
    }
}

impl Drop for Front {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        // Wakes the listener, so that it sees the end.
        let _ = TcpStream::connect(self.address);
    }
}

impl Shared {
    fn serve(&self, mut near: TcpStream) -> Result<()> {
        let mut request = read_request(&mut near)?;
        self.count(|counts| {
            counts.requests += 1;
            counts.puts += u64::from(request.head.starts_with("PUT "));
            counts.bytes_in += request.body.len() as u64;
        });
        let faults = *self.faults.lock().expect("no front thread panics");
        let hits = |per_mille: u64| {
            let hit = self.dice.lock().expect("no front thread panics").below(1_000) < per_mille;
            self.harmed.fetch_add(u64::from(hit), Ordering::SeqCst);
            hit
        };
        let objects_broken = if request.is_for_records("PUT ") { faults.objects_broken } else { 0 };
        for (per_mille, status, code) in [
            (objects_broken, "500 Internal Server Error", "InternalError"),
            (faults.slow_down, "503 Slow Down", "SlowDown"),
            (faults.broken, "500 Internal Server Error", "InternalError"),
            (faults.denied, "403 Forbidden", "AccessDenied"),
        ] {
            if hits(per_mille) {
                let body = format!("<Error><Code>{code}</Code><Message>injected</Message></Error>");
                let length = body.len();
                write!(
                    near,
                    "HTTP/1.1 {status}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
                )?;
                return Ok(());
            }
        }
        if hits(faults.hang_first) {
            std::thread::sleep(faults.hang);
        }
        if faults.is_careless {
            request.drop_field("if-none-match");
        }
        let mut far = TcpStream::connect(self.target)?;
        let (mut forward, bytes) = (far.try_clone()?, request.bytes());
        // A server that has made up its mind answers in the middle of a body, and reads no further.
        let forwarding = std::thread::spawn(move || forward.write_all(&bytes));
        let mut answer = Vec::new();
        let read = far.read_to_end(&mut answer);
        if answer.is_empty() {
            read?;
        }
        // Perhaps it waits for a server that reads no more.
        let _ = far.shutdown(Shutdown::Both);
        let _ = forwarding.join();
        if request.is_for_records("GET ") {
            self.count(|counts| counts.record_bytes_out += answer.len() as u64);
        }
        self.count(|counts| counts.record_puts += u64::from(request.is_for_records("PUT ")));
        if !hits(faults.lost) {
            near.write_all(&answer)?;
        }
        Ok(())
    }

    fn count(&self, change: impl FnOnce(&mut FrontCounts)) {
        change(&mut self.counts.lock().expect("no front thread panics"));
    }
}

/// A request whole.
struct Request {
    /// Its lines, without the empty one that ends them.
    head: String,
    body: Vec<u8>,
}

impl Request {
    /// `name` in lower case.
    fn drop_field(&mut self, name: &str) {
        let is_other =
            |line: &&str| line.split_once(':').is_none_or(|(key, _)| !key.trim().eq_ignore_ascii_case(name));
        self.head = self.head.lines().filter(is_other).collect::<Vec<_>>().join("\r\n");
    }

    /// Whether it asks this of an object that a broker keeps records in; not its log, and not what it says of them.
    fn is_for_records(&self, method: &str) -> bool {
        let path = self.head.strip_prefix(method).and_then(|rest| rest.split(['?', ' ']).next());
        path.is_some_and(|path| path.contains("/objects/data/") || path.contains("/objects/packs/"))
    }

    /// Told to be the last of its connection.
    fn bytes(&mut self) -> Vec<u8> {
        self.drop_field("connection");
        let mut bytes = format!("{}\r\nConnection: close\r\n\r\n", self.head).into_bytes();
        bytes.extend_from_slice(&self.body);
        bytes
    }
}

fn read_request(stream: &mut TcpStream) -> Result<Request> {
    let mut bytes = Vec::new();
    let mut buffer = vec![0; 64 << 10];
    let head = loop {
        if let Some(end) = bytes.windows(4).position(|window| window == b"\r\n\r\n") {
            break end + 4;
        }
        let read = stream.read(&mut buffer)?;
        anyhow::ensure!(read > 0, "the client went away");
        bytes.extend_from_slice(&buffer[..read]);
    };
    let mut body = bytes.split_off(head);
    let text = String::from_utf8(bytes).context("a head is text")?;
    let field = |name: &str| {
        let lines = text.lines().filter_map(|line| line.split_once(':'));
        lines.into_iter().find(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value.trim())
    };
    let length: usize = field("content-length").unwrap_or("0").parse()?;
    while body.len() < length {
        let read = stream.read(&mut buffer)?;
        anyhow::ensure!(read > 0, "the client went away");
        body.extend_from_slice(&buffer[..read]);
    }
    let head = text.lines().filter(|line| !line.is_empty()).collect::<Vec<_>>().join("\r\n");
    Ok(Request { head, body })
}
