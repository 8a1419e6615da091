//! The brokers of the region, and the port at which a client reaches each of them through this router.
//!
//! A client of a cluster speaks to each partition's owner, so each broker needs an address of its own.
//! Broker N is at the lane's port plus N times the step: the same at every router and after every restart,
//! because clients remember addresses. Where there is one broker, it is at the lane's port itself.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use parking_lot::RwLock;

/// What this router knows of the brokers.
#[derive(Debug)]
pub struct Brokers {
    step: u16,
    /// `HOST:PORT` of the internal listener, by id.
    known: RwLock<BTreeMap<i32, String>>,
    /// There have been several. A cluster of which one broker is left stays one.
    is_cluster: AtomicBool,
    turn: AtomicUsize,
}

/// How broker ids become ports, for one family of listeners.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ports {
    /// The lane's, or the shared listener's.
    pub base: u16,
    step: u16,
    is_cluster: bool,
}

impl Brokers {
    pub fn new(step: u16) -> Brokers {
        Brokers {
            step,
            known: RwLock::default(),
            is_cluster: AtomicBool::new(false),
            turn: AtomicUsize::new(0),
        }
    }

    /// Replaces what is known.
    pub fn replace(&self, brokers: BTreeMap<i32, String>) {
        if brokers.len() > 1 {
            self.is_cluster.store(true, Ordering::Relaxed);
        }
        *self.known.write() = brokers;
    }

    /// Ids of all brokers, where each has a port of its own.
    pub fn with_ports(&self) -> Vec<i32> {
        match self.is_cluster.load(Ordering::Relaxed) {
            true => self.known.read().keys().copied().collect(),
            false => Vec::new(),
        }
    }

    pub fn address(&self, broker: i32) -> Option<String> {
        self.known.read().get(&broker).cloned()
    }

    /// All addresses, another one first each time.
    pub fn addresses(&self) -> Vec<String> {
        let mut addresses: Vec<String> = self.known.read().values().cloned().collect();
        if !addresses.is_empty() {
            let first = self.turn.fetch_add(1, Ordering::Relaxed) % addresses.len();
            addresses.rotate_left(first);
        }
        addresses
    }

    pub fn ports(&self, base: u16) -> Ports {
        Ports { base, step: self.step, is_cluster: self.is_cluster.load(Ordering::Relaxed) }
    }
}

impl Ports {
    /// Of a region of one broker.
    #[cfg(test)]
    pub fn alone(base: u16) -> Ports {
        Ports { base, step: 0, is_cluster: false }
    }

    /// An answer named several brokers.
    pub fn of_cluster(self) -> Ports {
        Ports { is_cluster: true, ..self }
    }

    /// The port at which clients reach a broker; beyond what a port can be, there is none.
    pub fn of(self, broker: i32) -> i32 {
        let distance = if self.is_cluster { broker.max(0).saturating_mul(i32::from(self.step)) } else { 0 };
        i32::from(self.base).saturating_add(distance)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_broker_is_at_the_lanes_port_and_each_of_several_at_its_own_from_then_on() {
        let brokers = Brokers::new(100);
        let known = |ids: &[i32]| ids.iter().map(|id| (*id, format!("b{id}:1"))).collect();
        brokers.replace(known(&[1]));
        assert_eq!((brokers.ports(7000).of(1), brokers.with_ports()), (7000, vec![]));
        assert_eq!(brokers.ports(7000).of_cluster().of(2), 7200);
        brokers.replace(known(&[1, 2, 9]));
        assert_eq!([1, 2, 9].map(|id| brokers.ports(7000).of(id)), [7100, 7200, 7900]);
        let first: Vec<String> = (0..3).map(|_| brokers.addresses()[0].clone()).collect();
        assert_eq!(first, ["b1:1", "b2:1", "b9:1"]);
        brokers.replace(known(&[2]));
        assert_eq!((brokers.ports(7000).of(2), brokers.with_ports()), (7200, vec![2]));
        assert_eq!(brokers.ports(7000).of(-1), 7000, "nobody");
    }
}
