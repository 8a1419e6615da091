//! What a crash test puts at risk, and the judgement of both regions' logs afterwards.
//!
//! A run in which nothing was at stake proves nothing, so it fails: every run prints its stake and is judged by it.
//! `SEALANE_CRASH_SEED` and `SEALANE_CRASH_ROUNDS` (kills per test) change what is drawn.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use crate::clients::PATIENCE;
use crate::load::Writer;
use crate::logread::{self, Log};
use crate::wire::Conn;

/// What a run has put at risk.
#[derive(Debug, Default)]
pub struct Stake {
    pub kills: u64,
    /// Records that were acknowledged with acks=all.
    pub acked: u64,
    pub in_flight_at_a_kill: u64,
    /// Batches that were sent again after a death, and those of them that the broker knew already.
    pub sent_again: u64,
    pub known_already: u64,
    /// Answers that said "try again".
    pub refusals: u64,
    /// Records in the logs, where they were produced.
    pub records: u64,
    /// Records in the logs that came over the link.
    pub mirrored: u64,
    /// Records that a peer lacked when its link came back.
    pub behind: u64,
    pub markers: u64,
    pub link_bytes: u64,
}

impl Stake {
    /// Holds the logs of all regions against what the writers were promised, and against each other. The writers
    /// stand in the order of their regions, as many for each.
    pub fn judge_logs(&mut self, logs: &[Log], writers: &[Writer], topic: &str) -> Result<()> {
        let of_a_region = writers.len() / logs.len().max(1);
        for (at, writer) in writers.iter().enumerate() {
            self.records += writer.judge(&logs[at / of_a_region])? as u64;
            self.acked += writer.acked.len() as u64;
            self.in_flight_at_a_kill += writer.in_flight_at_a_break;
            self.sent_again += writer.sent_again;
            self.refusals += writer.refusals;
        }
        for from in 0..logs.len() {
            for to in (0..logs.len()).filter(|to| *to != from) {
                self.mirrored += logread::ensure_mirrored(&logs[from], &logs[to], topic)? as u64;
            }
            self.markers += logs[from].markers(topic, "mirror");
            self.link_bytes += logs[from].partitions.iter().map(|part| part.unit_bytes).sum::<u64>();
        }
        Ok(())
    }

    /// Fails where nothing was at stake.
    pub fn judge(&self, regions: usize) -> Result<()> {
        println!("at stake: {self:?}");
        let always = [self.kills, self.acked, self.records];
        ensure!(always.iter().all(|at_stake| *at_stake > 0), "nothing was at stake: {self:?}");
        let linked = [self.mirrored, self.markers, self.link_bytes];
        ensure!(regions == 1 || linked.iter().all(|at_stake| *at_stake > 0), "no link was at work: {self:?}");
        Ok(())
    }
}

/// Waits until every region holds the same number of records, and no log end moves any more.
pub fn come_to_rest(brokers: &[String], topic: &str, partitions: i32) -> Result<()> {
    let end = Instant::now() + PATIENCE;
    let mut before = Vec::new();
    loop {
        let (mut counts, mut ends) = (Vec::new(), Vec::new());
        for address in brokers {
            let mut conn = Conn::open(address)?;
            counts.push(conn.count_records(topic, partitions)?);
            for partition in 0..partitions {
                ends.push(conn.end_offset(topic, partition)?);
            }
        }
        if counts.iter().all(|count| *count == counts[0]) && ends == before {
            return Ok(());
        }
        ensure!(
            Instant::now() < end,
            "the regions do not come to rest: records {counts:?}, log ends {ends:?}"
        );
        before = ends;
        std::thread::sleep(Duration::from_secs(2));
    }
}

/// The seed of this run, printed by whoever draws from it.
pub fn seed(default: u64) -> u64 {
    number("SEALANE_CRASH_SEED").unwrap_or(default)
}

/// How many kills a test makes.
pub fn rounds(default: u64) -> u64 {
    number("SEALANE_CRASH_ROUNDS").unwrap_or(default)
}

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}
