//! `soak s3|hdfs FROM COUNT`: hurts a cluster by so many seeds and adds a row for each to the table of soaks.
//! `just soak-cluster` builds and runs it.

use anyhow::{Context, Result, bail, ensure};
use e2e::soak::{Soak, Table, build};

const USAGE: &str = "usage: soak s3|hdfs FROM COUNT, or soak report";

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let (store, from, count) = match words[..] {
        ["report"] => return Table::read()?.write_report(),
        [store, from, count] => (store, from, count),
        _ => bail!(USAGE),
    };
    let from: u64 = from.parse().context(USAGE)?;
    let count: u64 = count.parse().context(USAGE)?;
    let (mut soak, mut failed) = (None, Vec::new());
    for seed in from..from + count {
        let mut running = match soak.take() {
            Some(running) => running,
            None => Soak::start(store, seed)?,
        };
        match running.run(seed) {
            Ok(mut row) => {
                row.build = build();
                println!("{}", row.line());
                Table::append(&row)?;
                soak = Some(running);
            }
            Err(error) => {
                // The next seed gets a cluster of its own.
                println!("seed {seed} FAILED: {error:#}");
                failed.push(seed);
            }
        }
    }
    Table::read()?.write_report()?;
    ensure!(failed.is_empty(), "{} of {count} runs failed: seeds {failed:?}", failed.len());
    Ok(())
}
