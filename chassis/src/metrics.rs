//! Metrics as atomics, and their Prometheus text (exposition format 0.0.4).
//!
//! A handle is a few atomics behind an `Arc`: taken once, counted on without a lock or a look-up.
//! Series of things that come and go are better computed at the time of the scrape
//! ([`Registry::on_scrape`]). A family never holds more than [`SERIES_MAX`] series: what comes after
//! is counted together in one series that says so.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

/// All metrics of one service or of one region. Cheap to clone.
#[derive(Clone, Default)]
pub struct Registry(Arc<Inner>);

#[derive(Default)]
struct Inner {
    families: Mutex<BTreeMap<&'static str, Family>>,
    collectors: Mutex<Vec<Collector>>,
}

type Collector = Box<dyn Fn(&mut Scrape) + Send + Sync>;

struct Family {
    help: &'static str,
    kind: &'static str,
    series: BTreeMap<String, Value>,
}

#[derive(Clone)]
enum Value {
    Counter(Counter),
    Gauge(Gauge),
    Histogram(Histogram),
}

/// Only rises.
#[derive(Clone, Default)]
pub struct Counter(Arc<AtomicU64>);

#[derive(Clone, Default)]
pub struct Gauge(Arc<AtomicI64>);

/// Counts of observations per bucket, their sum and number.
#[derive(Clone)]
pub struct Histogram(Arc<Buckets>);

struct Buckets {
    bounds: &'static [u64],
    /// Divides bounds and sum for display: microseconds are kept, seconds are shown.
    scale: f64,
    counts: Vec<AtomicU64>,
    sum: AtomicU64,
}

/// Label names and values, such as `&[("api", "Fetch")]`.
pub type Labels<'a> = &'a [(&'a str, &'a str)];

/// What a collector adds to a scrape.
#[derive(Default)]
pub struct Scrape(BTreeMap<&'static str, Collected>);

struct Collected {
    help: &'static str,
    kind: &'static str,
    /// Labels and value.
    samples: Vec<(String, f64)>,
}

impl Registry {
    pub fn new() -> Registry {
        Registry::default()
    }

    /// The counter of this name and these labels; the same one on every call.
    pub fn counter(&self, name: &'static str, help: &'static str, labels: Labels) -> Counter {
        match self.value(name, help, "counter", labels, || Value::Counter(Counter::default())) {
            Value::Counter(counter) => counter,
            _ => unreachable!("a name has one kind"),
        }
    }

    pub fn gauge(&self, name: &'static str, help: &'static str, labels: Labels) -> Gauge {
        match self.value(name, help, "gauge", labels, || Value::Gauge(Gauge::default())) {
            Value::Gauge(gauge) => gauge,
            _ => unreachable!("a name has one kind"),
        }
    }

    /// A histogram of durations, shown in seconds: give it a name that ends in `_seconds`.
    pub fn durations(&self, name: &'static str, help: &'static str, labels: Labels) -> Histogram {
        self.histogram(name, help, labels, DURATION_BOUNDS_US, 1e6)
    }

    /// A histogram of sizes in bytes: give it a name that ends in `_bytes`.
    pub fn sizes(&self, name: &'static str, help: &'static str, labels: Labels) -> Histogram {
        self.histogram(name, help, labels, SIZE_BOUNDS, 1.0)
    }

    fn histogram(
        &self,
        name: &'static str,
        help: &'static str,
        labels: Labels,
        bounds: &'static [u64],
        scale: f64,
    ) -> Histogram {
        let make = || Value::Histogram(Histogram::new(bounds, scale));
        match self.value(name, help, "histogram", labels, make) {
            Value::Histogram(histogram) => histogram,
            _ => unreachable!("a name has one kind"),
        }
    }

    /// Calls `collect` at every scrape: for gauges of what exists at that time.
    pub fn on_scrape(&self, collect: impl Fn(&mut Scrape) + Send + Sync + 'static) {
        self.0.collectors.lock().push(Box::new(collect));
    }

    /// Forgets a series, when what it counted is gone.
    pub fn remove(&self, name: &str, labels: Labels) {
        if let Some(family) = self.0.families.lock().get_mut(name) {
            family.series.remove(&label_text(labels));
        }
    }

    /// The exposition text of everything.
    pub fn render(&self) -> String {
        let mut out = String::new();
        let mut scrape = Scrape::default();
        for collect in self.0.collectors.lock().iter() {
            collect(&mut scrape);
        }
        for (name, family) in self.0.families.lock().iter() {
            header(&mut out, name, family.help, family.kind);
            for (labels, value) in &family.series {
                value.render(&mut out, name, labels);
            }
        }
        for (name, Collected { help, kind, samples }) in scrape.0 {
            header(&mut out, name, help, kind);
            for (labels, value) in samples {
                sample(&mut out, name, &labels, value);
            }
        }
        out
    }

    fn value(
        &self,
        name: &'static str,
        help: &'static str,
        kind: &'static str,
        labels: Labels,
        make: impl FnOnce() -> Value,
    ) -> Value {
        debug_assert!(is_metric_name(name), "{name} is no metric name");
        let mut families = self.0.families.lock();
        let family = families.entry(name).or_insert_with(|| Family { help, kind, series: BTreeMap::new() });
        assert_eq!(family.kind, kind, "{name} is registered as a {} and as a {kind}", family.kind);
        let mut labels = label_text(labels);
        if family.series.len() >= SERIES_MAX && !family.series.contains_key(&labels) {
            labels = "series=\"over the limit\"".to_owned();
        }
        family.series.entry(labels).or_insert_with(make).clone()
    }
}

impl Counter {
    pub fn inc(&self) {
        self.add(1);
    }

    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    pub fn value(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl Gauge {
    pub fn set(&self, value: i64) {
        self.0.store(value, Ordering::Relaxed);
    }

    pub fn add(&self, n: i64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    pub fn value(&self) -> i64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl Histogram {
    fn new(bounds: &'static [u64], scale: f64) -> Histogram {
        let counts = (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect();
        Histogram(Arc::new(Buckets { bounds, scale, counts, sum: AtomicU64::new(0) }))
    }

    /// Counts one observation, in the unit of the bounds (microseconds or bytes).
    pub fn observe(&self, value: u64) {
        let bucket = self.0.bounds.partition_point(|bound| *bound < value);
        self.0.counts[bucket].fetch_add(1, Ordering::Relaxed);
        self.0.sum.fetch_add(value, Ordering::Relaxed);
    }

    pub fn observe_duration(&self, duration: Duration) {
        self.observe(u64::try_from(duration.as_micros()).unwrap_or(u64::MAX));
    }

    pub fn count(&self) -> u64 {
        self.0.counts.iter().map(|count| count.load(Ordering::Relaxed)).sum()
    }
}

impl Scrape {
    pub fn gauge(&mut self, name: &'static str, help: &'static str, labels: Labels, value: f64) {
        self.add(name, help, "gauge", labels, value);
    }

    pub fn counter(&mut self, name: &'static str, help: &'static str, labels: Labels, value: f64) {
        self.add(name, help, "counter", labels, value);
    }

    fn add(
        &mut self,
        name: &'static str,
        help: &'static str,
        kind: &'static str,
        labels: Labels,
        value: f64,
    ) {
        let family = self.0.entry(name).or_insert_with(|| Collected { help, kind, samples: Vec::new() });
        if family.samples.len() < SERIES_MAX {
            family.samples.push((label_text(labels), value));
        }
    }
}

impl Value {
    fn render(&self, out: &mut String, name: &str, labels: &str) {
        match self {
            Value::Counter(counter) => sample(out, name, labels, counter.value() as f64),
            Value::Gauge(gauge) => sample(out, name, labels, gauge.value() as f64),
            Value::Histogram(histogram) => histogram.render(out, name, labels),
        }
    }
}

impl Histogram {
    fn render(&self, out: &mut String, name: &str, labels: &str) {
        let comma = if labels.is_empty() { "" } else { "," };
        let mut total = 0;
        for (index, count) in self.0.counts.iter().enumerate() {
            total += count.load(Ordering::Relaxed);
            let bound = match self.0.bounds.get(index) {
                Some(bound) => (*bound as f64 / self.0.scale).to_string(),
                None => "+Inf".to_owned(),
            };
            let _ = writeln!(out, "{name}_bucket{{{labels}{comma}le=\"{bound}\"}} {total}");
        }
        sample(out, &format!("{name}_sum"), labels, self.0.sum.load(Ordering::Relaxed) as f64 / self.0.scale);
        sample(out, &format!("{name}_count"), labels, total as f64);
    }
}

fn header(out: &mut String, name: &str, help: &str, kind: &str) {
    let help = help.replace('\\', "\\\\").replace('\n', "\\n");
    let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}");
}

fn sample(out: &mut String, name: &str, labels: &str, value: f64) {
    let _ = match labels.is_empty() {
        true => writeln!(out, "{name} {value}"),
        false => writeln!(out, "{name}{{{labels}}} {value}"),
    };
}

fn label_text(labels: Labels) -> String {
    let mut text = String::new();
    for (name, value) in labels {
        let value = value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
        let comma = if text.is_empty() { "" } else { "," };
        let _ = write!(text, "{comma}{name}=\"{value}\"");
    }
    text
}

fn is_metric_name(name: &str) -> bool {
    !name.is_empty() && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
}

/// Series per family; the next ones share one.
pub const SERIES_MAX: usize = 10_000;

/// 50 µs to 30 s.
const DURATION_BOUNDS_US: &[u64] = &[
    50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000, 1_000_000,
    2_500_000, 5_000_000, 10_000_000, 30_000_000,
];

/// 64 B to 64 MiB, by fours.
const SIZE_BOUNDS: &[u64] =
    &[1 << 6, 1 << 8, 1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_is_the_exposition_format() {
        let registry = Registry::new();
        registry.counter("requests_total", "Requests.", &[("api", "Fetch")]).add(3);
        registry.counter("requests_total", "Requests.", &[("api", "Fetch")]).inc();
        registry.gauge("connections", "Open connections.", &[]).set(-2);
        registry
            .durations("wait_seconds", "Waits.", &[("api", "a\"b")])
            .observe_duration(Duration::from_millis(2));
        registry.on_scrape(|scrape| scrape.gauge("lag_records", "Lag.", &[("topic", "t")], 7.0));
        let text = registry.render();
        for line in [
            "# TYPE requests_total counter",
            "requests_total{api=\"Fetch\"} 4",
            "connections -2",
            "wait_seconds_bucket{api=\"a\\\"b\",le=\"0.001\"} 0",
            "wait_seconds_bucket{api=\"a\\\"b\",le=\"0.0025\"} 1",
            "wait_seconds_bucket{api=\"a\\\"b\",le=\"+Inf\"} 1",
            "wait_seconds_sum{api=\"a\\\"b\"} 0.002",
            "wait_seconds_count{api=\"a\\\"b\"} 1",
            "lag_records{topic=\"t\"} 7",
        ] {
            assert!(text.lines().any(|have| have == line), "{line} is not in\n{text}");
        }
    }

    #[test]
    fn a_family_stops_growing_at_its_limit() {
        let registry = Registry::new();
        for n in 0..SERIES_MAX + 10 {
            registry.counter("n_total", "N.", &[("n", &n.to_string())]).inc();
        }
        let text = registry.render();
        assert_eq!(text.lines().filter(|line| line.starts_with("n_total{")).count(), SERIES_MAX + 1);
        assert!(text.contains("n_total{series=\"over the limit\"} 10"));
    }

    #[test]
    fn a_removed_series_is_gone_from_the_text() {
        let registry = Registry::new();
        registry.gauge("lag", "Lag.", &[("peer", "west")]).set(1);
        registry.remove("lag", &[("peer", "west")]);
        assert!(!registry.render().contains("west"));
    }
}
