//! The tables of a benchmark as Markdown, with its raw figures beside them, in `docs/benchmarks/`. A target that is
//! missed is named with the cell that missed it.

use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use super::broker::TARGETS;
use super::contender::Kind;
use super::table::{Samples, figure};
use super::{Scale, Size};

/// A promise about the ratio of Sealane's median to Kafka's.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    pub metric: &'static str,
    /// Cells whose name begins so.
    pub cells: &'static str,
    /// True when the ratio may be at most `ratio`, false when at least.
    pub most: bool,
    pub ratio: f64,
    pub what: &'static str,
}

/// Medians of one cell, and their ratio.
struct Row<'a> {
    cell: &'a str,
    kafka: String,
    sealane: String,
    ratio: f64,
}

/// Metrics of the comparison and their headings, in the order of the report.
pub(super) const METRICS: &[(&str, &str)] = &[
    ("MB_per_s", "Throughput, MB of payload per second"),
    ("cpu_s_per_GB", "Broker CPU, seconds per GB of payload"),
    ("ack_p50_us", "Latency to acknowledgement, p50, µs"),
    ("ack_p99_us", "Latency to acknowledgement, p99, µs"),
    ("ack_p999_us", "Latency to acknowledgement, p99.9, µs"),
    ("arrival_p50_us", "Latency to arrival at a consumer, p50, µs"),
    ("arrival_p99_us", "Latency to arrival at a consumer, p99, µs"),
    ("arrival_p999_us", "Latency to arrival at a consumer, p99.9, µs"),
    ("start_ms", "Start-up to the first answer to Metadata, ms"),
    ("idle_rss_MiB", "Resident memory when idle, MiB"),
    ("peak_rss_MiB", "Highest resident memory, MiB"),
    ("sync_MB_per_s", "For information: synced, MB per second"),
    ("sync_cpu_s_per_GB", "For information: synced, CPU seconds per GB"),
    ("sync_p50_us", "For information: synced, 50/s, p50 to acknowledgement, µs"),
    ("sync_p99_us", "For information: synced, 50/s, p99 to acknowledgement, µs"),
];

/// Writes and prints the comparison of brokers.
pub fn write_broker(scale: Scale, samples: &Samples) -> Result<()> {
    let mut text = heading("Sealane beside Apache Kafka 4.4", "broker", scale)?;
    text.push_str(
        "Both brokers ran at the same time on the same machine and got the same loads in turns. `acks=all`; Sealane \
         with `durability = \"os\"`, which is Kafka's own semantics. The clients are Kafka's ProducerPerformance and \
         ConsumerPerformance with their defaults, and a C program on librdkafka. Each figure is the median over the \
         rounds, with the lowest and the highest in parentheses; the ratio is Sealane's median to Kafka's.\n\n",
    );
    text.push_str(&targets(samples));
    for (metric, title) in METRICS {
        let rows = rows(samples, metric);
        if rows.is_empty() {
            continue;
        }
        write!(text, "\n## {title}\n\n| load | Kafka | Sealane | ratio |\n| --- | ---: | ---: | ---: |\n")?;
        for Row { cell, kafka, sealane, ratio } in rows {
            writeln!(text, "| {cell} | {kafka} | {sealane} | {} |", figure(ratio))?;
        }
    }
    write(scale, "broker", &text, samples)
}

/// Writes `docs/benchmarks/NAME.md` and `NAME.tsv`, and prints the report; a smoke run has nothing to keep.
pub fn write(scale: Scale, name: &str, text: &str, samples: &Samples) -> Result<()> {
    println!("{text}");
    if scale.size == Size::Smoke {
        return Ok(());
    }
    let folder = folder();
    fs::create_dir_all(&folder).with_context(|| format!("create {}", folder.display()))?;
    fs::write(folder.join(format!("{name}.md")), text)?;
    if !samples.all.is_empty() {
        fs::write(folder.join(format!("{name}.tsv")), samples.tsv())?;
    }
    Ok(())
}

/// Title, and what the figures were measured on and with.
pub fn heading(title: &str, command: &str, scale: Scale) -> Result<String> {
    let mode = if scale.is_full() { "" } else { " --quick" };
    Ok(format!(
        "# {title}\n\nMade by `just bench {command}{mode}`, {} rounds; raw figures in `{command}.tsv`. Machine: {}; \
         Linux {}; {}; librdkafka {}; {}.\n\n",
        scale.rounds,
        processor()?,
        fs::read_to_string("/proc/sys/kernel/osrelease")?.trim(),
        first_line("java", &["--version"]),
        first_line("pkg-config", &["--modversion", "rdkafka"]),
        first_line("rustc", &["--version"]),
    ))
}

/// A table of one metric with a column for each of `whos`, a row for each cell.
pub fn columns(samples: &Samples, metric: &str, title: &str, whos: &[&str]) -> String {
    let mut text = format!("\n## {title}\n\n| load | {} |\n| --- |", whos.join(" | "));
    text.push_str(&" ---: |".repeat(whos.len()));
    for cell in samples.cells(metric) {
        let of = |who: &&str| samples.spread(who, cell, metric).map_or_else(|| "-".to_owned(), |s| s.text());
        write!(text, "\n| {cell} | {} |", whos.iter().map(of).collect::<Vec<_>>().join(" | "))
            .expect("a string takes all");
    }
    text.push('\n');
    text
}

fn targets(samples: &Samples) -> String {
    let mut text =
        "## Targets\n\n| target | ratio | worst | verdict |\n| --- | ---: | ---: | --- |\n".to_owned();
    for target in TARGETS {
        let mut rows = rows(samples, target.metric);
        rows.retain(|row| row.cell.starts_with(target.cells));
        rows.sort_by(|a, b| a.ratio.total_cmp(&b.ratio));
        let worst = if target.most { rows.last() } else { rows.first() };
        let Some(worst) = worst else { continue };
        let misses: Vec<&str> =
            rows.iter().filter(|row| !target.holds(row.ratio)).map(|row| row.cell).collect();
        let verdict = if misses.is_empty() {
            "holds".to_owned()
        } else {
            format!("falls short: {}", misses.join("; "))
        };
        let bound = if target.most { "at most" } else { "at least" };
        writeln!(
            text,
            "| {} | {bound} {} | {} ({}) | {verdict} |",
            target.what,
            figure(target.ratio),
            figure(worst.ratio),
            worst.cell
        )
        .expect("a string takes all");
    }
    text
}

impl Target {
    fn holds(&self, ratio: f64) -> bool {
        if self.most { ratio <= self.ratio } else { ratio >= self.ratio }
    }
}

fn rows<'a>(samples: &'a Samples, metric: &str) -> Vec<Row<'a>> {
    let row = |cell: &'a str| {
        let kafka = samples.spread(Kind::Kafka.name(), cell, metric)?;
        let sealane = samples.spread(Kind::Sealane.name(), cell, metric)?;
        Some(Row { cell, kafka: kafka.text(), sealane: sealane.text(), ratio: sealane.median / kafka.median })
    };
    samples.cells(metric).into_iter().filter_map(row).collect()
}

pub(super) fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/benchmarks")
}

fn processor() -> Result<String> {
    let cpus = fs::read_to_string("/proc/cpuinfo")?;
    let named = |line: &str| {
        line.strip_prefix("model name").and_then(|rest| rest.split_once(": ").map(|(_, n)| n.to_owned()))
    };
    let model = cpus.lines().find_map(named).unwrap_or_else(|| std::env::consts::ARCH.to_owned());
    let count = std::thread::available_parallelism()?;
    Ok(format!("{count} cores of {model}"))
}

fn first_line(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().ok();
    let line =
        output.and_then(|output| String::from_utf8(output.stdout).ok()?.lines().next().map(str::to_owned));
    line.unwrap_or_else(|| format!("{program} unknown"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missed_target_is_named_with_its_cell() {
        let mut samples = Samples::default();
        for (who, good, bad) in [("Kafka", 9.0, 9.0), ("Sealane", 2.0, 5.0)] {
            samples.add(1, who, "produce java 1024 B none 1p", "cpu_s_per_GB", good);
            samples.add(1, who, "produce java 100 B none 1p", "cpu_s_per_GB", bad);
        }
        let text = targets(&samples);
        assert!(text.contains("falls short: produce java 100 B none 1p |"), "{text}");
        assert!(text.contains("| 0.56 (produce java 100 B none 1p)"), "{text}");
    }
}
