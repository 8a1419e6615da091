//! `bench broker|report|mirror|lanes|profile|store|cluster [--quick] [--rounds N]`: measures, prints the tables and keeps them in
//! `docs/benchmarks/`; `fourth`, a part of `cluster`, prints alone. Build it and `sealane` in release first, as `just bench` does.

use anyhow::{Context, Result, bail};
use e2e::bench::{self, Scale, Size};

const USAGE: &str =
    "usage: bench broker|report|mirror|lanes|profile|store|cluster|fourth [--quick] [--rounds N]";

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let Some(part) = arguments.next() else { bail!(USAGE) };
    let mut scale = Scale { size: Size::Full, rounds: 5 };
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--quick" => scale.size = Size::Quick,
            "--rounds" => scale.rounds = arguments.next().context(USAGE)?.parse().context(USAGE)?,
            _ => bail!(USAGE),
        }
    }
    match part.as_str() {
        "broker" => bench::broker::run(scale),
        // The table again from the raw figures.
        "report" => bench::broker::report_again(scale),
        "mirror" => bench::mirror::run(scale),
        "lanes" => bench::lanes::run(scale),
        "profile" => bench::profile::run(scale),
        #[cfg(feature = "cluster")]
        "store" => bench::store::run(scale),
        #[cfg(feature = "cluster")]
        "cluster" => bench::cluster::run(scale),
        #[cfg(feature = "cluster")]
        "fourth" => bench::cluster::fourth_alone(scale),
        _ => bail!(USAGE),
    }
}
