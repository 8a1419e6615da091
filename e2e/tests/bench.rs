//! The benchmarks run: each part once, with loads too small to measure anything, so that none of them is found
//! broken on the day it is needed.

use anyhow::Result;
use e2e::bench::{self, Scale, Size};

const SMOKE: Scale = Scale { size: Size::Smoke, rounds: 1 };

#[test]
fn the_broker_benchmark_runs_with_both_brokers() -> Result<()> {
    bench::broker::run(SMOKE)
}

#[test]
fn the_lanes_benchmark_runs() -> Result<()> {
    bench::lanes::run(SMOKE)
}

#[test]
fn the_mirror_benchmark_runs() -> Result<()> {
    bench::mirror::run(SMOKE)
}
