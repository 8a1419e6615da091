//! Blocks of ports that no two test processes of this machine share.
//!
//! Below the range from which Linux picks ports for outgoing connections, so that nothing else takes one between
//! its choice and its use. A block is held by a lock on a file for as long as the value lives; a process that
//! dies lets go of it.

use std::fs::{self, File};
use std::net::{Ipv4Addr, TcpListener, UdpSocket};

use anyhow::{Context, Result, bail};
use parking_lot::Mutex;

const FIRST: u16 = 12_000;
const BLOCK: u16 = 400;
const BLOCKS: u16 = 48;

/// `BLOCK` ports from `base` on.
#[derive(Debug)]
pub struct Ports {
    pub base: u16,
    _lock: File,
}

impl Ports {
    /// Takes a free block.
    pub fn take() -> Result<Ports> {
        let dir = std::env::temp_dir().join("sealane-e2e-ports");
        fs::create_dir_all(&dir).with_context(|| format!("create {}", dir.display()))?;
        // Neighbouring processes begin at different blocks, so they rarely try the same one.
        let start = std::process::id() as u16 % BLOCKS;
        for step in 0..BLOCKS {
            let block = (start + step) % BLOCKS;
            let base = FIRST + block * BLOCK;
            let lock = File::create(dir.join(base.to_string()))?;
            if lock.try_lock().is_ok() && is_free(base) {
                return Ok(Ports { base, _lock: lock });
            }
        }
        bail!("no free block of ports between {FIRST} and {}", FIRST + BLOCK * BLOCKS)
    }
}

/// The rest of this process's block for single ports, and the next one of it.
static SINGLE: Mutex<Option<(Ports, u16)>> = Mutex::new(None);

/// A port that was free for TCP and UDP a moment ago, and that nobody else of this process is given.
pub fn free_port() -> Result<u16> {
    let mut single = SINGLE.lock();
    loop {
        let (ports, next) = match single.take() {
            Some((ports, next)) if next < BLOCK => (ports, next),
            _ => (Ports::take()?, 0),
        };
        let port = ports.base + next;
        *single = Some((ports, next + 1));
        if is_port_free(port) {
            return Ok(port);
        }
    }
}

fn is_port_free(port: u16) -> bool {
    let address = (Ipv4Addr::LOCALHOST, port);
    TcpListener::bind(address).is_ok() && UdpSocket::bind(address).is_ok()
}

fn is_free(base: u16) -> bool {
    (0..BLOCK).step_by(100).all(|region| (0..=5).all(|service| is_port_free(base + region + service)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_holders_get_different_blocks() {
        let (one, other) = (Ports::take().unwrap(), Ports::take().unwrap());
        assert_ne!(one.base, other.base);
    }

    #[test]
    fn a_port_is_given_once_and_below_those_of_outgoing_connections() {
        let given: Vec<u16> = (0..BLOCK + 10).map(|_| free_port().unwrap()).collect();
        assert_eq!(given.iter().collect::<std::collections::BTreeSet<_>>().len(), given.len());
        let outgoing = fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap();
        let first: u16 = outgoing.split_whitespace().next().unwrap().parse().unwrap();
        assert!(given.iter().all(|port| (FIRST..first).contains(port)), "{first} {given:?}");
    }
}
