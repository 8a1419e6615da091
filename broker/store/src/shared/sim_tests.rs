//! The simulation by seeds: as many as fit into some processor time, and the twins that must fail.

use std::time::Instant;

use super::*;

fn run(seed: u64, twin: Twin) -> Check<Report> {
    let steps = 250;
    let world = || World::new(seed, twin).run(steps);
    match std::panic::catch_unwind(std::panic::AssertUnwindSafe(world)) {
        Ok(outcome) => outcome,
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            Err(text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("a panic").to_owned())
        }
    }
}

/// So much processor time of seeds, whatever else the machine does.
const CPU_TIME: Duration = Duration::from_secs(20);

/// Seeds from `SEALANE_SIM_SEED` on (0): `SEALANE_SIM_SEEDS` of them, or for [`CPU_TIME`].
#[test]
fn what_was_acknowledged_survives_every_crash_and_every_move() {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let first = number("SEALANE_SIM_SEED").unwrap_or(0);
    let seeds = number("SEALANE_SIM_SEEDS");
    let (began, cpu) = (Instant::now(), cpu_time());
    let mut total = Report::default();
    let mut count = 0;
    while seeds.map_or(cpu_time() - cpu < CPU_TIME || count < 50, |seeds| count < seeds) {
        let seed = first + count;
        match run(seed, Twin::None) {
            Ok(report) => total.add(&report),
            Err(error) => panic!("seed {seed}: {error}"),
        }
        count += 1;
    }
    println!("{count} seeds from {first}, {:.0}/s: {total:?}", count as f64 / began.elapsed().as_secs_f64());
    if seeds.is_none() {
        assert!(total.crashes > 0 && total.zombies > 0 && total.refusals > 0 && total.releases > 0);
        assert!(total.packs > 0 && total.forgotten > 0);
        assert!(total.adoptions > 0 && total.objects > 0 && total.deleted > 0 && total.lost_ops > 0);
    }
}

/// Of this thread.
fn cpu_time() -> Duration {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    Duration::from_nanos(text.split_whitespace().next().unwrap().parse().unwrap())
}

impl Report {
    fn add(&mut self, other: &Report) {
        self.crashes += other.crashes;
        self.zombies += other.zombies;
        self.refusals += other.refusals;
        self.adoptions += other.adoptions;
        self.releases += other.releases;
        self.objects += other.objects;
        self.deleted += other.deleted;
        self.lost_ops += other.lost_ops;
        self.packs += other.packs;
        self.forgotten += other.forgotten;
    }
}

fn is_seen(twin: Twin) {
    let failed = (0..400).find_map(|seed| Some((seed, run(seed, twin).err()?)));
    let (seed, error) = failed.unwrap_or_else(|| panic!("{twin:?} went unseen"));
    println!("{twin:?} is seen at seed {seed}: {error}");
}

#[test]
fn it_would_be_seen_if_the_store_refused_nobody() {
    is_seen(Twin::FenceOff);
}

#[test]
fn it_would_be_seen_if_a_tail_were_dropped_before_its_object_is_there() {
    is_seen(Twin::ChunkBeforeObject);
}

#[test]
fn it_would_be_seen_if_the_log_were_cut_too_early() {
    is_seen(Twin::LogCutTooEarly);
}

#[test]
fn it_would_be_seen_if_packs_were_not_pinned() {
    is_seen(Twin::NothingPinned);
}

#[test]
fn it_would_be_seen_if_a_record_did_not_say_who_left_the_manifest() {
    is_seen(Twin::ManifestAlone);
}

#[test]
fn it_would_be_seen_if_objects_were_deleted_before_the_owner_is_on_record() {
    is_seen(Twin::ConfirmedTooEarly);
}
