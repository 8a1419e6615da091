//! What lanes cost the baseline: the same load on topics with lanes off, on without a lane record, and on with lane
//! records, on one broker in turns. A group reads everything (no lane is deployed, so all falls to it); a reader
//! outside any group sees the baseline alone, so batches that mix are rebuilt for it.

use anyhow::Result;

use super::Scale;
use super::contender::{Contender, Kind};
use super::load::{self, Client, Load};
use super::report;
use super::table::Samples;

const GIGABYTE: f64 = 1e9;

/// Name, whether lanes are on, lane records of a thousand, and over how many lanes.
const VARIANTS: &[(&str, bool, u32, u32)] = &[
    ("lanes off", false, 0, 0),
    ("lanes on", true, 0, 0),
    ("1 % in one lane", true, 10, 1),
    ("1 % in 100 lanes", true, 10, 100),
];

/// Runs everything and writes `docs/benchmarks/lanes.md` and `lanes.tsv`.
pub fn run(scale: Scale) -> Result<()> {
    load::rdkafka_program()?;
    let broker = Contender::start(Kind::Sealane, "os")?;
    let mut samples = Samples::default();
    for round in 1..=scale.rounds {
        for &codec in if scale.is_full() { &["none", "zstd"][..] } else { &["none"][..] } {
            for index in 0..VARIANTS.len() {
                // Another one begins in each round.
                one(scale, round, &broker, (index + round) % VARIANTS.len(), codec, &mut samples)?;
            }
        }
    }
    broker.stop()?;
    write(scale, &samples)
}

fn one(
    scale: Scale,
    round: usize,
    broker: &Contender,
    variant: usize,
    codec: &'static str,
    samples: &mut Samples,
) -> Result<()> {
    let (who, on, lane_per_mille, lanes) = VARIANTS[variant];
    let topic = format!("lanes-{round}-{codec}-{variant}");
    broker.create_topic(&topic, 1, if on { &[("sealane.lanes", "true")] } else { &[] })?;
    let records = scale.records(300_000, 1_000_000);
    let sent = Load { lane_per_mille, lanes, ..Load::plain(&topic, records, 1024, codec) };
    let hidden = records * u64::from(lane_per_mille) / 1000;
    let baseline = Load { records: records - hidden, ..sent.clone() };
    let bootstrap = broker.bootstrap();
    let mut measure = |action: &str, load: &Load, act: &dyn Fn() -> Result<f64>| -> Result<()> {
        let before = broker.cpu_seconds()?;
        let rate = act()?;
        let cpu = (broker.cpu_seconds()? - before) / (load.bytes() / GIGABYTE);
        let cell = format!("{action} 1024 B {codec}");
        samples.add(round, who, &cell, "MB_per_s", rate);
        samples.add(round, who, &cell, "cpu_s_per_GB", cpu);
        Ok(())
    };
    measure("produce", &sent, &|| load::produce(Client::Librdkafka, &bootstrap, &sent))?;
    measure("consume in a group", &sent, &|| load::consume_in_group(&bootstrap, &sent, &topic))?;
    measure("consume the baseline", &baseline, &|| load::consume(Client::Librdkafka, &bootstrap, &baseline))?;
    broker.delete_topic(&topic)
}

fn write(scale: Scale, samples: &Samples) -> Result<()> {
    let whos: Vec<&str> = VARIANTS.iter().map(|(who, ..)| *who).collect();
    let mut text = report::heading("What lanes cost the baseline", "lanes", scale)?;
    text.push_str(
        "One broker, `durability = \"os\"`, one partition, librdkafka. A group without deployed lanes reads every \
         record, because BOE records fall back to it; a reader outside any group sees the baseline alone. Median \
         over the rounds, lowest and highest in parentheses.\n",
    );
    text.push_str(&report::columns(samples, "MB_per_s", "Throughput, MB of payload per second", &whos));
    text.push_str(&report::columns(samples, "cpu_s_per_GB", "Broker CPU, seconds per GB of payload", &whos));
    report::write(scale, "lanes", &text, samples)
}
