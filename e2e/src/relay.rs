//! A relay of ours between two ends, TCP or UDP on loopback: it can cut, delay, lose and slow what passes.
//!
//! The faults of a network, without root and without touching the machine. Loss is by seed. A cut refuses new
//! TCP connections and breaks those that stand; UDP datagrams vanish. Owns its threads: dropping it ends them.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::Result;

/// Datagrams kept while they are delayed; more are dropped, as a full queue does.
const QUEUE_DATAGRAMS_MAX: usize = 4_096;
/// Local addresses that a UDP relay keeps a socket for.
const SENDERS_MAX: usize = 256;
/// How long a datagram may wait for a line with a rate; a longer queue drops.
const QUEUE_TIME_MAX: Duration = Duration::from_millis(100);
const TICK: Duration = Duration::from_millis(20);

/// What the relay does to what passes. Shared, so that a test changes it while traffic flows.
#[derive(Debug, Default)]
pub struct Faults {
    cut: AtomicBool,
    delay_us: AtomicU64,
    /// Datagrams lost of a million (UDP only).
    loss_per_million: AtomicU64,
    /// Bytes a second in each direction; 0 is no limit.
    rate: AtomicU64,
    passed_bytes: AtomicU64,
    lost_datagrams: AtomicU64,
}

impl Faults {
    pub fn cut(&self, cut: bool) {
        self.cut.store(cut, Ordering::SeqCst);
    }

    pub fn delay(&self, one_way: Duration) {
        self.delay_us.store(one_way.as_micros() as u64, Ordering::SeqCst);
    }

    pub fn lose(&self, per_million: u64) {
        self.loss_per_million.store(per_million, Ordering::SeqCst);
    }

    pub fn limit(&self, bytes_per_second: u64) {
        self.rate.store(bytes_per_second, Ordering::SeqCst);
    }

    /// Bytes that went through, both ways.
    pub fn passed_bytes(&self) -> u64 {
        self.passed_bytes.load(Ordering::SeqCst)
    }

    pub fn lost_datagrams(&self) -> u64 {
        self.lost_datagrams.load(Ordering::SeqCst)
    }

    fn is_cut(&self) -> bool {
        self.cut.load(Ordering::SeqCst)
    }

    fn pause(&self) -> Duration {
        Duration::from_micros(self.delay_us.load(Ordering::SeqCst))
    }
}

/// A running relay.
#[derive(Debug)]
pub struct Relay {
    pub address: SocketAddr,
    pub faults: Arc<Faults>,
    stop: Arc<AtomicBool>,
}

impl Relay {
    /// Relays TCP connections to `target`.
    pub fn tcp(target: SocketAddr) -> Result<Relay> {
        Relay::tcp_at(Ipv4Addr::LOCALHOST, target)
    }

    /// As [`Relay::tcp`], from an address of this machine that others reach.
    pub fn tcp_at(host: Ipv4Addr, target: SocketAddr) -> Result<Relay> {
        let listener = TcpListener::bind((host, 0))?;
        listener.set_nonblocking(true)?;
        let relay = Relay::new(listener.local_addr()?);
        let (faults, stop) = (Arc::clone(&relay.faults), Arc::clone(&relay.stop));
        std::thread::spawn(move || accept(&listener, target, &faults, &stop));
        Ok(relay)
    }

    /// Relays datagrams to `target`, and its answers to whoever sent.
    pub fn udp(target: SocketAddr, seed: u64) -> Result<Relay> {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
        widen(&socket);
        socket.set_read_timeout(Some(TICK))?;
        let relay = Relay::new(socket.local_addr()?);
        let (faults, stop) = (Arc::clone(&relay.faults), Arc::clone(&relay.stop));
        std::thread::spawn(move || datagrams(Arc::new(socket), target, seed, &faults, &stop));
        Ok(relay)
    }

    fn new(address: SocketAddr) -> Relay {
        Relay { address, faults: Arc::new(Faults::default()), stop: Arc::new(AtomicBool::new(false)) }
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
    }
}

fn accept(listener: &TcpListener, target: SocketAddr, faults: &Arc<Faults>, stop: &Arc<AtomicBool>) {
    while !stop.load(Ordering::SeqCst) {
        let Ok((near, _)) = listener.accept() else {
            std::thread::sleep(TICK);
            continue;
        };
        if faults.is_cut() {
            continue;
        }
        let Ok(far) = TcpStream::connect(target) else { continue };
        for (from, to) in [(near.try_clone(), far.try_clone()), (Ok(far), Ok(near))] {
            let (Ok(from), Ok(to)) = (from, to) else { continue };
            let (faults, stop) = (Arc::clone(faults), Arc::clone(stop));
            std::thread::spawn(move || pump(from, to, &faults, &stop));
        }
    }
}

fn pump(mut from: TcpStream, mut to: TcpStream, faults: &Faults, stop: &AtomicBool) {
    let mut buffer = vec![0u8; 64 << 10];
    // A refused option only makes the relay slower.
    let _ = (from.set_nonblocking(false), from.set_read_timeout(Some(TICK)), to.set_nodelay(true));
    while !stop.load(Ordering::SeqCst) && !faults.is_cut() {
        let read = match from.read(&mut buffer) {
            Ok(0) => break,
            Ok(read) => read,
            Err(error)
                if matches!(error.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut) =>
            {
                continue;
            }
            Err(_) => break,
        };
        std::thread::sleep(faults.pause());
        let rate = faults.rate.load(Ordering::SeqCst);
        if let Some(micros) = (read as u64 * 1_000_000).checked_div(rate) {
            std::thread::sleep(Duration::from_micros(micros));
        }
        if faults.is_cut() || to.write_all(&buffer[..read]).is_err() {
            break;
        }
        faults.passed_bytes.fetch_add(read as u64, Ordering::SeqCst);
    }
    // The other direction sees the end and stops too; errors mean that it is closed already.
    let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
}

/// Datagrams on their way: (due, number) orders them, the number keeps equal ones apart.
type Queue = Arc<Mutex<BinaryHeap<Reverse<(Instant, u64, usize)>>>>;

/// A datagram with where it goes and the socket that sends it.
type Parcel = (Arc<UdpSocket>, SocketAddr, Vec<u8>);

/// The line both directions share: loses, delays, delivers in order of due time.
struct Line {
    queue: Queue,
    parcels: Mutex<HashMap<usize, Parcel>>,
    random: Mutex<u64>,
    /// When the line to each end has sent what it took so far: only with a rate.
    free: Mutex<HashMap<SocketAddr, Instant>>,
    faults: Arc<Faults>,
    number: AtomicU64,
}

impl Line {
    fn put(&self, socket: &Arc<UdpSocket>, to: SocketAddr, data: &[u8]) {
        let lost = self.faults.is_cut() || self.draw() < self.faults.loss_per_million.load(Ordering::SeqCst);
        let sent = if lost { None } else { self.sent_at(to, data.len()) };
        let mut parcels = self.parcels.lock().expect("no relay thread panics");
        let Some(sent) = sent.filter(|_| parcels.len() < QUEUE_DATAGRAMS_MAX) else {
            self.faults.lost_datagrams.fetch_add(1, Ordering::SeqCst);
            return;
        };
        let number = self.number.fetch_add(1, Ordering::SeqCst);
        parcels.insert(number as usize, (Arc::clone(socket), to, data.to_vec()));
        let due = sent + self.faults.pause();
        self.queue.lock().expect("no relay thread panics").push(Reverse((due, number, number as usize)));
    }

    /// When the last bit of a datagram is on the line, at the line's rate; `None` when the queue before it is full.
    fn sent_at(&self, to: SocketAddr, bytes: usize) -> Option<Instant> {
        let now = Instant::now();
        let rate = self.faults.rate.load(Ordering::SeqCst);
        if rate == 0 {
            return Some(now);
        }
        let mut free = self.free.lock().expect("no relay thread panics");
        let begin = free.get(&to).map_or(now, |free| now.max(*free));
        if begin - now > QUEUE_TIME_MAX {
            return None;
        }
        let end = begin + Duration::from_secs_f64(bytes as f64 / rate as f64);
        free.insert(to, end);
        Some(end)
    }

    /// 0 to 999,999, by seed (xorshift).
    fn draw(&self) -> u64 {
        let mut state = self.random.lock().expect("no relay thread panics");
        *state ^= *state << 13;
        *state ^= *state >> 7;
        *state ^= *state << 17;
        *state % 1_000_000
    }

    fn deliver(&self, stop: &AtomicBool) {
        while !stop.load(Ordering::SeqCst) {
            let due = {
                let mut queue = self.queue.lock().expect("no relay thread panics");
                match queue.peek() {
                    Some(Reverse((when, _, _))) if *when <= Instant::now() => queue.pop(),
                    _ => None,
                }
            };
            let Some(Reverse((_, _, id))) = due else {
                std::thread::sleep(Duration::from_micros(500));
                continue;
            };
            let parcel = self.parcels.lock().expect("no relay thread panics").remove(&id);
            let Some((socket, to, data)) = parcel else { continue };
            // A closed port answers with an error; the network would lose it too.
            if socket.send_to(&data, to).is_ok() {
                self.faults.passed_bytes.fetch_add(data.len() as u64, Ordering::SeqCst);
            }
        }
    }
}

fn datagrams(
    near: Arc<UdpSocket>,
    target: SocketAddr,
    seed: u64,
    faults: &Arc<Faults>,
    stop: &Arc<AtomicBool>,
) {
    let line = Arc::new(Line {
        queue: Queue::default(),
        parcels: Mutex::default(),
        random: Mutex::new(seed | 1),
        free: Mutex::default(),
        faults: Arc::clone(faults),
        number: AtomicU64::new(0),
    });
    let (carrier, carrier_stop) = (Arc::clone(&line), Arc::clone(stop));
    std::thread::spawn(move || carrier.deliver(&carrier_stop));
    let mut senders: HashMap<SocketAddr, Arc<UdpSocket>> = HashMap::new();
    let mut buffer = vec![0u8; 64 << 10];
    while !stop.load(Ordering::SeqCst) {
        let Ok((len, from)) = near.recv_from(&mut buffer) else { continue };
        if !senders.contains_key(&from) && senders.len() < SENDERS_MAX {
            let Ok(far) = answers(&near, from, &line, stop) else { continue };
            senders.insert(from, far);
        }
        if let Some(far) = senders.get(&from) {
            line.put(far, target, &buffer[..len]);
        }
    }
}

/// The socket that speaks to the target for one sender; a thread carries its answers back.
fn answers(
    near: &Arc<UdpSocket>,
    sender: SocketAddr,
    line: &Arc<Line>,
    stop: &Arc<AtomicBool>,
) -> Result<Arc<UdpSocket>> {
    let far = Arc::new(UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?);
    widen(&far);
    far.set_read_timeout(Some(TICK))?;
    let (socket, near, line, stop) = (Arc::clone(&far), Arc::clone(near), Arc::clone(line), Arc::clone(stop));
    std::thread::spawn(move || {
        let mut buffer = vec![0u8; 64 << 10];
        while !stop.load(Ordering::SeqCst) {
            if let Ok((len, _)) = socket.recv_from(&mut buffer) {
                line.put(&near, sender, &buffer[..len]);
            }
        }
    });
    Ok(far)
}

/// A socket that holds a burst while its thread waits for a core: what overflows would be loss of our own.
fn widen(socket: &UdpSocket) {
    // A smaller buffer than asked for is what the kernel allows; it only loses more.
    let _ = socket2::SockRef::from(socket).set_recv_buffer_size(4 << 20);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn datagrams_pass_both_ways_and_a_cut_stops_them() {
        let server = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let relay = Relay::udp(server.local_addr().unwrap(), 1).unwrap();
        let client = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        client.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        let mut buffer = [0u8; 16];
        client.send_to(b"there", relay.address).unwrap();
        let (len, from) = server.recv_from(&mut buffer).unwrap();
        assert_eq!(&buffer[..len], b"there");
        server.send_to(b"back", from).unwrap();
        assert_eq!(client.recv(&mut buffer).unwrap(), 4);
        relay.faults.cut(true);
        client.send_to(b"gone", relay.address).unwrap();
        while relay.faults.lost_datagrams() == 0 {
            std::thread::sleep(TICK);
        }
        assert_eq!(relay.faults.passed_bytes(), 9);
    }

    #[test]
    fn a_line_with_a_rate_takes_its_time_and_drops_what_it_cannot_queue() {
        let server = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        server.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        let relay = Relay::udp(server.local_addr().unwrap(), 1).unwrap();
        relay.faults.limit(10_000);
        let client = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let begin = Instant::now();
        for _ in 0..20 {
            client.send_to(&[0; 500], relay.address).unwrap();
        }
        let mut buffer = [0u8; 1000];
        server.recv_from(&mut buffer).unwrap();
        server.recv_from(&mut buffer).unwrap();
        assert!(begin.elapsed() >= Duration::from_millis(100), "{:?}", begin.elapsed());
        while relay.faults.lost_datagrams() == 0 {
            std::thread::sleep(TICK);
        }
    }

    #[test]
    fn a_cut_breaks_standing_connections() {
        let server = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let relay = Relay::tcp(server.local_addr().unwrap()).unwrap();
        let mut client = TcpStream::connect(relay.address).unwrap();
        let (mut far, _) = server.accept().unwrap();
        client.write_all(b"x").unwrap();
        let mut byte = [0u8; 1];
        far.read_exact(&mut byte).unwrap();
        relay.faults.cut(true);
        assert_eq!(far.read(&mut byte).unwrap_or(0), 0);
    }
}
