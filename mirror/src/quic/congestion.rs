//! Congestion control of a link: which controller, and a BBR that does not fill queues.
//!
//! Who a peer is, and so which controller its link is to have, is known only after the handshake, and a
//! policy may change later: so every connection has a controller that changes over when it is told to.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use kafka::private::Congestion;
use quinn::congestion::{BbrConfig, Controller, ControllerFactory, CubicConfig};
use quinn_proto::RttEstimator;

/// Which controller one connection uses from its next packet on. Clones stand for the same connection.
#[derive(Clone, Debug, Default)]
pub struct Choice(Arc<AtomicU8>);

impl Choice {
    pub fn set(&self, congestion: Congestion) {
        self.0.store(congestion as u8, Ordering::Relaxed);
    }

    fn is_cubic(&self) -> bool {
        self.0.load(Ordering::Relaxed) == Congestion::Cubic as u8
    }
}

impl ControllerFactory for Choice {
    fn build(self: Arc<Self>, now: Instant, mtu: u16) -> Box<dyn Controller> {
        let choice = (*self).clone();
        let cubic = choice.is_cubic();
        Box::new(Chosen { choice, cubic, mtu, inner: controller(cubic, now, mtu) })
    }
}

fn controller(cubic: bool, now: Instant, mtu: u16) -> Box<dyn Controller> {
    match cubic {
        true => Arc::new(CubicConfig::default()).build(now, mtu),
        false => Box::new(CappedBbr::new(now, mtu)),
    }
}

/// The controller that was chosen; after another choice, a new one that has yet to learn the path.
struct Chosen {
    choice: Choice,
    cubic: bool,
    mtu: u16,
    inner: Box<dyn Controller>,
}

impl Controller for Chosen {
    fn on_sent(&mut self, now: Instant, bytes: u64, last_packet_number: u64) {
        let cubic = self.choice.is_cubic();
        if cubic != self.cubic {
            (self.cubic, self.inner) = (cubic, controller(cubic, now, self.mtu));
        }
        self.inner.on_sent(now, bytes, last_packet_number);
    }

    fn on_ack(&mut self, now: Instant, sent: Instant, bytes: u64, app_limited: bool, rtt: &RttEstimator) {
        self.inner.on_ack(now, sent, bytes, app_limited, rtt);
    }

    fn on_end_acks(&mut self, now: Instant, in_flight: u64, app_limited: bool, largest: Option<u64>) {
        self.inner.on_end_acks(now, in_flight, app_limited, largest);
    }

    fn on_congestion_event(&mut self, now: Instant, sent: Instant, persistent: bool, lost_bytes: u64) {
        self.inner.on_congestion_event(now, sent, persistent, lost_bytes);
    }

    fn on_mtu_update(&mut self, new_mtu: u16) {
        self.mtu = new_mtu;
        self.inner.on_mtu_update(new_mtu);
    }

    fn window(&self) -> u64 {
        self.inner.window()
    }

    fn clone_box(&self) -> Box<dyn Controller> {
        Box::new(Chosen { choice: self.choice.clone(), inner: self.inner.clone_box(), ..*self })
    }

    fn initial_window(&self) -> u64 {
        self.inner.initial_window()
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

/// BBR whose window is held near what the path delivers per round trip.
///
/// BBR alone keeps two such amounts in flight and more, and on a path with a short queue loses half
/// of its packets; held to 1.4 of them it kept the path full with no loss of its own.
struct CappedBbr {
    inner: Box<dyn Controller>,
    cap: Cap,
}

impl CappedBbr {
    fn new(now: Instant, mtu: u16) -> CappedBbr {
        CappedBbr { inner: Arc::new(BbrConfig::default()).build(now, mtu), cap: Cap::default_at(now) }
    }
}

/// Follows delivery rate and least round trip.
#[derive(Clone, Debug)]
struct Cap {
    round_began: Instant,
    round_bytes: u64,
    /// Bytes per second of the last rounds, a ring.
    rates: [f64; RATE_ROUNDS],
    round: usize,
    min_rtt: Duration,
    min_since: Instant,
    /// While the rate still grows the window may grow with it.
    full_rate: f64,
    rounds_without_gain: u32,
}

impl Cap {
    fn default_at(now: Instant) -> Cap {
        Cap {
            round_began: now,
            round_bytes: 0,
            rates: [0.0; RATE_ROUNDS],
            round: 0,
            min_rtt: Duration::MAX,
            min_since: now,
            full_rate: 0.0,
            rounds_without_gain: 0,
        }
    }

    fn on_ack(&mut self, now: Instant, bytes: u64, app_limited: bool, rtt: Duration) {
        if rtt <= self.min_rtt || now.duration_since(self.min_since) > MIN_RTT_LIFE {
            (self.min_rtt, self.min_since) = (rtt, now);
        }
        self.round_bytes += bytes;
        let elapsed = now.duration_since(self.round_began);
        if elapsed < rtt.max(ROUND_MIN) {
            return;
        }
        let rate = self.round_bytes as f64 / elapsed.as_secs_f64();
        (self.round_began, self.round_bytes) = (now, 0);
        // A round that had too little to send says nothing about the path, unless it did better.
        if app_limited && rate < self.rate() {
            return;
        }
        self.round = (self.round + 1) % RATE_ROUNDS;
        self.rates[self.round] = rate;
        if rate > self.full_rate * 1.25 {
            self.full_rate = rate;
            self.rounds_without_gain = 0;
        } else {
            self.rounds_without_gain = self.rounds_without_gain.saturating_add(1);
        }
    }

    fn rate(&self) -> f64 {
        self.rates.iter().copied().fold(0.0, f64::max)
    }

    fn bytes(&self) -> u64 {
        if self.min_rtt == Duration::MAX || self.rate() == 0.0 {
            return u64::MAX;
        }
        let gain = if self.rounds_without_gain < 3 { GAIN_GROWING } else { GAIN };
        ((self.rate() * self.min_rtt.as_secs_f64() * gain) as u64).max(WINDOW_MIN)
    }
}

impl Controller for CappedBbr {
    fn on_sent(&mut self, now: Instant, bytes: u64, last_packet_number: u64) {
        self.inner.on_sent(now, bytes, last_packet_number);
    }

    fn on_ack(&mut self, now: Instant, sent: Instant, bytes: u64, app_limited: bool, rtt: &RttEstimator) {
        self.inner.on_ack(now, sent, bytes, app_limited, rtt);
        self.cap.on_ack(now, bytes, app_limited, rtt.get());
    }

    fn on_end_acks(&mut self, now: Instant, in_flight: u64, app_limited: bool, largest: Option<u64>) {
        self.inner.on_end_acks(now, in_flight, app_limited, largest);
    }

    fn on_congestion_event(&mut self, now: Instant, sent: Instant, persistent: bool, lost_bytes: u64) {
        self.inner.on_congestion_event(now, sent, persistent, lost_bytes);
    }

    fn on_mtu_update(&mut self, new_mtu: u16) {
        self.inner.on_mtu_update(new_mtu);
    }

    fn window(&self) -> u64 {
        self.inner.window().min(self.cap.bytes())
    }

    fn clone_box(&self) -> Box<dyn Controller> {
        Box::new(CappedBbr { inner: self.inner.clone_box(), cap: self.cap.clone() })
    }

    fn initial_window(&self) -> u64 {
        self.inner.initial_window()
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

const RATE_ROUNDS: usize = 10;
const ROUND_MIN: Duration = Duration::from_millis(5);
const MIN_RTT_LIFE: Duration = Duration::from_secs(30);
const GAIN: f64 = 1.4;
const GAIN_GROWING: f64 = 2.5;
const WINDOW_MIN: u64 = 64 * 1024;

#[cfg(test)]
mod tests {
    use super::*;

    /// A path of this rate and round trip, from which a sender gets as much as its window allows.
    fn drive(cap: &mut Cap, start: Instant, rate: f64, rtt: Duration, rounds: u32) -> Instant {
        let mut now = start;
        let bdp = rate * rtt.as_secs_f64();
        for _ in 0..rounds {
            now += rtt;
            let delivered = (cap.bytes().min(16 << 20) as f64).min(bdp).max(14_000.0);
            cap.on_ack(now, delivered as u64, false, rtt);
        }
        now
    }

    #[test]
    fn the_window_settles_near_what_the_path_holds() {
        let (rate, rtt) = (25e6, Duration::from_millis(100));
        let start = Instant::now();
        let mut cap = Cap::default_at(start);
        assert_eq!(cap.bytes(), u64::MAX, "nothing is known yet");
        drive(&mut cap, start, rate, rtt, 30);
        let held = cap.bytes() as f64 / (rate * rtt.as_secs_f64());
        assert!((1.3..1.5).contains(&held), "{held} of the path");
    }

    #[test]
    fn the_window_follows_a_path_that_becomes_faster_or_longer() {
        let start = Instant::now();
        let mut cap = Cap::default_at(start);
        let now = drive(&mut cap, start, 2e6, Duration::from_millis(50), 30);
        let slow = cap.bytes();
        let now = drive(&mut cap, now, 20e6, Duration::from_millis(50), 60);
        assert!(cap.bytes() > slow * 8, "{} after {slow}", cap.bytes());
        drive(&mut cap, now, 20e6, Duration::from_millis(200), 300);
        let held = cap.bytes() as f64 / (20e6 * 0.2);
        assert!(held > 1.2, "{held} of the longer path");
    }

    #[test]
    fn rounds_with_little_to_send_do_not_shrink_the_window() {
        let (rate, rtt) = (25e6, Duration::from_millis(100));
        let start = Instant::now();
        let mut cap = Cap::default_at(start);
        let mut now = drive(&mut cap, start, rate, rtt, 30);
        let before = cap.bytes();
        for _ in 0..100 {
            now += rtt;
            cap.on_ack(now, 1_000, true, rtt);
        }
        assert_eq!(cap.bytes(), before);
    }

    #[test]
    fn a_connection_changes_its_controller_when_it_is_told_to() {
        let choice = Choice::default();
        let start = Instant::now();
        let mut chosen = Arc::new(choice.clone()).build(start, 1_200);
        let kind = |controller: &dyn Controller| {
            let chosen = controller.clone_box().into_any().downcast::<Chosen>().expect("ours");
            (chosen.cubic, chosen.inner.into_any().is::<quinn::congestion::Cubic>())
        };
        assert_eq!(kind(&*chosen), (false, false));
        choice.set(Congestion::Cubic);
        assert_eq!(kind(&*chosen), (false, false), "until the next packet");
        chosen.on_sent(start, 1_200, 1);
        assert_eq!(kind(&*chosen), (true, true));
        choice.set(Congestion::Bbr);
        chosen.on_sent(start, 1_200, 2);
        assert_eq!(kind(&*chosen), (false, false));
    }
}
