//! Raw figures of a benchmark: one sample per line, kept as they were measured, and medians over rounds.

use std::collections::BTreeSet;
use std::fmt::Write;

use anyhow::{Context, Result, bail};

use super::report;

/// One measured figure.
#[derive(Clone, Debug)]
pub struct Sample {
    pub round: usize,
    /// Who was measured: a broker, or a variant of one.
    pub who: String,
    /// What was done, with which client, record size, codec and partition count.
    pub cell: String,
    pub metric: &'static str,
    pub value: f64,
}

/// All samples of a run.
#[derive(Clone, Debug, Default)]
pub struct Samples {
    pub all: Vec<Sample>,
}

/// Median, lowest and highest of some samples.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spread {
    pub median: f64,
    pub low: f64,
    pub high: f64,
}

impl Samples {
    pub fn add(&mut self, round: usize, who: &str, cell: &str, metric: &'static str, value: f64) {
        eprintln!("round {round}  {who:<8} {cell:<44} {metric:<12} {value:.3}");
        let (who, cell) = (who.to_owned(), cell.to_owned());
        self.all.push(Sample { round, who, cell, metric, value });
    }

    /// Over the rounds; `None` when it was not measured.
    pub fn spread(&self, who: &str, cell: &str, metric: &str) -> Option<Spread> {
        Spread::of(self.values(who, cell, metric))
    }

    /// One of each round.
    pub fn values(&self, who: &str, cell: &str, metric: &str) -> Vec<f64> {
        let wanted = self.all.iter().filter(|s| s.who == who && s.cell == cell && s.metric == metric);
        wanted.map(|sample| sample.value).collect()
    }

    /// Cells that have a metric, in the order of their first sample.
    pub fn cells(&self, metric: &str) -> Vec<&str> {
        let mut seen = BTreeSet::new();
        let with = self.all.iter().filter(|sample| sample.metric == metric);
        with.filter(|sample| seen.insert(&sample.cell)).map(|sample| sample.cell.as_str()).collect()
    }

    /// Reads what [`Samples::tsv`] wrote. Lines of a metric that nobody reports are an error.
    pub fn from_tsv(text: &str) -> Result<Samples> {
        let mut samples = Samples::default();
        for line in text.lines().skip(1) {
            let columns: Vec<&str> = line.split('\t').collect();
            let [round, who, cell, metric, value] = columns[..] else { bail!("not five columns: {line}") };
            let metric = report::METRICS.iter().map(|(known, _)| *known).find(|known| *known == metric);
            let metric = metric.context("an unknown metric")?;
            let (who, cell) = (who.to_owned(), cell.to_owned());
            samples.all.push(Sample { round: round.parse()?, who, cell, metric, value: value.parse()? });
        }
        Ok(samples)
    }

    /// Tab-separated, with a heading line.
    pub fn tsv(&self) -> String {
        let mut text = "round\twho\tcell\tmetric\tvalue\n".to_owned();
        for Sample { round, who, cell, metric, value } in &self.all {
            writeln!(text, "{round}\t{who}\t{cell}\t{metric}\t{value:.4}").expect("a string takes all");
        }
        text
    }
}

impl Spread {
    fn of(mut values: Vec<f64>) -> Option<Spread> {
        values.sort_by(f64::total_cmp);
        let (low, high) = (*values.first()?, *values.last()?);
        let middle = values.len() / 2;
        let median = if values.len() % 2 == 1 {
            values[middle]
        } else {
            f64::midpoint(values[middle - 1], values[middle])
        };
        Some(Spread { median, low, high })
    }

    /// `12.3 (11.0 to 14.1)`, with digits to suit the size.
    pub fn text(&self) -> String {
        format!("{} ({} to {})", figure(self.median), figure(self.low), figure(self.high))
    }
}

/// A number with about three digits.
pub fn figure(value: f64) -> String {
    let digits = if value.abs() >= 100.0 {
        0
    } else if value.abs() >= 10.0 {
        1
    } else {
        2
    };
    format!("{value:.digits$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_of_an_even_count_lies_between_the_middle_two() {
        assert_eq!(Spread::of(vec![4.0, 1.0, 2.0, 3.0]), Some(Spread { median: 2.5, low: 1.0, high: 4.0 }));
        assert_eq!(Spread::of(vec![5.0, 1.0, 2.0]).unwrap().median, 2.0);
        assert_eq!(Spread::of(Vec::new()), None);
    }
}
