//! What strikes a cluster, how it heals, and what is measured of it.
//!
//! A fault strikes at one moment and is settled later, so that two may be there at a time. Nothing here asserts how
//! long something took; it is written down.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::Run;
use crate::clients::Record;
use crate::cluster::Store;
use crate::stores::front::FrontFaults;
use crate::wire::{BatchHead, Conn, batch};

/// A kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// SIGKILL of a broker that owns partitions.
    Kill,
    /// SIGKILL of the controller's broker.
    KillController,
    /// SIGSTOP of an owner until others own what it had, then SIGCONT.
    Zombie,
    /// SIGKILL of a member of etcd.
    Etcd,
    /// SIGKILL of the DataNode that was written to last.
    DataNode,
    NameNode,
    /// The S3 server says 503 and 500 for a while.
    Refused,
    /// Requests lie around for seconds, and are carried out then.
    Hanging,
    /// Requests are carried out, and their answers are lost.
    Lost,
    /// SIGSTOP of the S3 server for a while.
    Frozen,
}

/// A fault that has struck.
pub(super) struct Struck {
    fault: Fault,
    moment: Instant,
    healed: Instant,
    /// How long it stays.
    hold: Duration,
    /// The broker, etcd member or DataNode.
    victim: usize,
    /// The partitions whose acknowledgements are waited for.
    partitions: Vec<usize>,
}

const OF_S3: &[(Fault, u64)] = &[
    (Fault::Kill, 40),
    (Fault::KillController, 12),
    (Fault::Zombie, 20),
    (Fault::Etcd, 8),
    (Fault::Refused, 6),
    (Fault::Hanging, 6),
    (Fault::Lost, 4),
    (Fault::Frozen, 4),
];

const OF_HDFS: &[(Fault, u64)] = &[
    (Fault::Kill, 40),
    (Fault::KillController, 12),
    (Fault::Zombie, 20),
    (Fault::Etcd, 8),
    (Fault::DataNode, 16),
    (Fault::NameNode, 4),
];

impl Fault {
    /// With their weights.
    pub(super) fn of_store(is_s3: bool) -> &'static [(Fault, u64)] {
        if is_s3 { OF_S3 } else { OF_HDFS }
    }

    /// Two of one class are not there at a time, except that two brokers may be struck (class 0).
    pub(super) fn class(self) -> u8 {
        match self {
            Fault::Kill | Fault::KillController | Fault::Zombie => 0,
            Fault::Etcd => 1,
            _ => 2,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Fault::Kill => "kill",
            Fault::KillController => "kill-controller",
            Fault::Zombie => "zombie",
            Fault::Etcd => "etcd",
            Fault::DataNode => "data-node",
            Fault::NameNode => "name-node",
            Fault::Refused => "s3-refuses",
            Fault::Hanging => "s3-hangs",
            Fault::Lost => "s3-loses-answers",
            Fault::Frozen => "s3-frozen",
        }
    }
}

pub(super) fn strike(run: &mut Run<'_>, fault: Fault) -> Result<Struck> {
    let all: Vec<usize> = (0..super::PARTITIONS as usize).collect();
    let mut struck = Struck {
        fault,
        moment: Instant::now(),
        healed: Instant::now(),
        hold: Duration::from_millis(run.dice.between(500, 3_000)),
        victim: 0,
        partitions: all,
    };
    run.row.faults.push_str(fault.name());
    match fault {
        Fault::Kill | Fault::KillController | Fault::Zombie => strike_broker(run, &mut struck)?,
        Fault::Etcd => {
            struck.victim = run.dice.below(3) as usize;
            run.cluster.etcd.member(struck.victim).kill()?;
        }
        Fault::DataNode => {
            let Store::Hdfs(hdfs) = &mut run.cluster.store else { return Ok(struck) };
            struck.victim = hdfs.busiest().unwrap_or(run.dice.below(3) as usize);
            hdfs.data_node(struck.victim).kill()?;
        }
        Fault::NameNode => {
            let Store::Hdfs(hdfs) = &mut run.cluster.store else { return Ok(struck) };
            hdfs.name_node().kill()?;
            struck.hold = Duration::from_millis(run.dice.below(1_000));
        }
        Fault::Frozen => {
            let Store::S3(s3) = &mut run.cluster.store else { return Ok(struck) };
            s3.daemon().pause()?;
        }
        Fault::Refused | Fault::Hanging | Fault::Lost => {
            let front = run.cluster.front.as_ref().context("a front before S3")?;
            let some = FrontFaults::default();
            let hang = Duration::from_millis(run.dice.between(500, 7_000));
            front.set_faults(match fault {
                Fault::Refused => FrontFaults { slow_down: 600, broken: 200, ..some },
                Fault::Hanging => FrontFaults { hang_first: 300, hang, ..some },
                _ => FrontFaults { lost: 400, ..some },
            });
        }
    }
    Ok(struck)
}

fn strike_broker(run: &mut Run<'_>, struck: &mut Struck) -> Result<()> {
    let (victim, partitions) = run.victim(struck.fault == Fault::KillController)?;
    run.row.in_flight += run.writers.in_flight();
    if struck.fault == Fault::Zombie {
        run.cluster.pause(victim)?;
        run.row.zombies += 1;
    } else {
        run.cluster.kill(victim)?;
        // It comes back before anybody has noticed, or long after.
        struck.hold = Duration::from_millis(run.dice.between(100, 5_000));
        run.row.kills += 1;
    }
    run.row.faults.push_str(&format!(":{victim}"));
    run.away.insert(victim);
    (struck.moment, struck.victim, struck.partitions) = (Instant::now(), usize::from(victim), partitions);
    Ok(())
}

/// Waits as long as the fault stays, and heals it. A zombie needs the rest of the cluster well before it can wake up.
pub(super) fn heal(run: &mut Run<'_>, struck: &mut Struck) -> Result<()> {
    let (fault, victim) = (struck.fault, struck.victim);
    if fault == Fault::Zombie {
        return Ok(());
    }
    wait_until(struck.moment + struck.hold);
    match (fault, &mut run.cluster.store) {
        (Fault::Kill | Fault::KillController, _) => run.cluster.spawn(victim as u16)?,
        (Fault::Etcd, _) => run.cluster.etcd.start_again(victim)?,
        (Fault::DataNode, Store::Hdfs(hdfs)) => {
            hdfs.data_node(victim).start()?;
            hdfs.wait()?;
        }
        (Fault::NameNode, Store::Hdfs(hdfs)) => {
            hdfs.name_node().start()?;
            hdfs.wait()?;
        }
        (Fault::Frozen, Store::S3(s3)) => s3.daemon().resume()?,
        _ => {
            let front = run.cluster.front.as_ref().context("a front before S3")?;
            front.set_faults(FrontFaults::default());
        }
    }
    struck.healed = Instant::now();
    Ok(())
}

/// Waits until what was struck goes on.
pub(super) fn settle(run: &mut Run<'_>, struck: &Struck) -> Result<()> {
    let (moment, victim) = (struck.moment, struck.victim as u16);
    match struck.fault {
        Fault::Zombie => settle_zombie(run, struck),
        Fault::Kill | Fault::KillController => {
            let times = run.writers.until_first_after(&struck.partitions, moment)?;
            run.row.add_kill(&times);
            if std::env::var_os("SEALANE_SOAK_KEEP").is_some() {
                let ago = moment.elapsed();
                println!("kill of {victim}, {ago:?} ago; {:?} after {times:?}", struck.partitions);
            }
            run.cluster.wait(victim)?;
            run.away.remove(&victim);
            Ok(())
        }
        fault => {
            run.writers.until_first_after(&struck.partitions, struck.healed)?;
            let pause = |partition: &usize| run.writers.longest_pause_since(*partition, moment);
            run.row.add_pause(fault, struck.partitions.iter().map(pause).max().unwrap_or_default());
            Ok(())
        }
    }
}

/// It wakes up when others own what it had, believes that it is an owner, and must get nothing acknowledged.
fn settle_zombie(run: &mut Run<'_>, struck: &Struck) -> Result<()> {
    let victim = struck.victim as u16;
    run.writers.until_first_after(&struck.partitions, struck.moment)?;
    let pauses = struck.partitions.iter().map(|p| run.writers.longest_pause_since(*p, struck.moment));
    run.row.add_pause(Fault::Zombie, pauses.max().unwrap_or_default());
    run.cluster.resume(victim)?;
    let record = batch(&[Record::numbered("zombie", 0)], BatchHead::default());
    let mut refused = 0;
    for partition in &struck.partitions {
        let answer = Conn::open(run.cluster.address(victim))?.produce(&run.topic, *partition as i32, &record);
        if let Ok((error, offset)) = answer {
            // It may own the partition again by now, rightly.
            let is_back = run.owners()?[*partition] == Some(victim);
            ensure!(error != 0 || is_back, "a zombie acknowledged a record of {partition} at {offset}");
            refused += u64::from(error != 0);
        }
    }
    run.row.refusals_of_zombies += refused;
    run.away.remove(&victim);
    run.cluster.wait(victim)
}

fn wait_until(moment: Instant) {
    std::thread::sleep(moment.saturating_duration_since(Instant::now()));
}
