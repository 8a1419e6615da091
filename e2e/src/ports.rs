//! Blocks of ports that no two test processes of this machine share.
//!
//! Below the range from which Linux picks ports for outgoing connections, so that nothing else takes one between
//! its choice and its use. A block is held by a lock on a file for as long as the value lives; a process that
//! dies lets go of it.

use std::fs::{self, File};
use std::net::{Ipv4Addr, TcpListener, UdpSocket};

use anyhow::{Context, Result, bail};

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

fn is_free(base: u16) -> bool {
    (0..BLOCK).step_by(100).all(|region| {
        (0..=5).all(|service| {
            let address = (Ipv4Addr::LOCALHOST, base + region + service);
            TcpListener::bind(address).is_ok() && UdpSocket::bind(address).is_ok()
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_holders_get_different_blocks() {
        let (one, other) = (Ports::take().unwrap(), Ports::take().unwrap());
        assert_ne!(one.base, other.base);
    }
}
