//! How much each partition is used: measured by its owner, read by the controller.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use broker_store::{Item, Lease, MetaError, MetaStore, Version};
use kafka::TopicId;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;
use uuid::Uuid;

use super::member::json;
use super::objects::LOADS;
use crate::partition::Partition;

/// Between two measurements.
pub const MEASURE_EVERY: Duration = Duration::from_secs(10);

/// What one broker has measured: bytes written and read each second, by topic id and partition; null
/// where it has not.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadObject {
    pub rates: BTreeMap<String, Vec<Option<u64>>>,
}

/// Rates as of the latest reports.
pub type Rates = HashMap<(TopicId, i32), u64>;

/// The measurements of one life.
pub struct Meter {
    last: HashMap<(TopicId, i32), Measured>,
    at: Instant,
    told: Option<(LoadObject, Version)>,
}

struct Measured {
    bytes: u64,
    /// None at first: one count is no rate.
    rate: Option<u64>,
}

impl Meter {
    pub fn new() -> Meter {
        Meter { last: HashMap::new(), at: Instant::now(), told: None }
    }

    /// Waits for the next measurement.
    pub async fn due(&self) {
        tokio::time::sleep_until(self.at + MEASURE_EVERY).await;
    }

    /// Measures, and tells the others if it is news.
    pub async fn report(
        &mut self,
        owned: &BTreeMap<(TopicId, i32), Arc<Partition>>,
        meta: &dyn MetaStore,
        broker: i32,
        lease: &Lease,
    ) -> Result<(), MetaError> {
        let elapsed = self.at.elapsed();
        self.at = Instant::now();
        let counts = owned.iter().map(|(key, open)| (*key, open.used_bytes()));
        let object = self.measure(counts, elapsed);
        if self.told.as_ref().is_some_and(|(told, _)| *told == object) {
            return Ok(());
        }
        let key = format!("{LOADS}{broker}");
        let expected = match &self.told {
            Some((_, version)) => Some(*version),
            // Of a life before, until its lease has run out.
            None => meta.get(&key).await?.map(|(_, version)| version),
        };
        self.told = None;
        let version = meta.put_leased(&key, json(&object)?, expected, lease).await?;
        self.told = Some((object, version));
        Ok(())
    }

    fn measure(
        &mut self,
        counts: impl Iterator<Item = ((TopicId, i32), u64)>,
        elapsed: Duration,
    ) -> LoadObject {
        let mut last = HashMap::new();
        let mut object = LoadObject::default();
        for ((topic, index), bytes) in counts {
            let before = self.last.get(&(topic, index));
            let rate = before.map(|before| {
                let now = bytes.saturating_sub(before.bytes) * 1000 / (elapsed.as_millis() as u64).max(1);
                // Half of what it was: one busy moment moves nothing.
                before.rate.map_or(now, |rate| rate / 2 + now / 2)
            });
            if let Some(rate) = rate {
                let rates = object.rates.entry(topic.0.to_string()).or_default();
                let at = index.max(0) as usize;
                if rates.len() <= at {
                    rates.resize(at + 1, None);
                }
                rates[at] = Some(rounded(rate));
            }
            last.insert((topic, index), Measured { bytes, rate });
        }
        self.last = last;
        object
    }
}

/// To the next lower number of two binary digits, so that small changes are none.
fn rounded(rate: u64) -> u64 {
    let shift = rate.max(1).ilog2().saturating_sub(1);
    rate >> shift << shift
}

/// The rates that are known now: what is told, and before another owner has measured it what was told last.
pub fn merged(known: &Rates, reports: &BTreeMap<String, Item>) -> Rates {
    let mut rates = known.clone();
    for item in reports.values() {
        let Ok(report) = serde_json::from_slice::<LoadObject>(&item.value) else { continue };
        for (topic, of_topic) in report.rates {
            let Ok(topic) = Uuid::parse_str(&topic) else { continue };
            for (index, rate) in (0..).zip(of_topic) {
                if let Some(rate) = rate {
                    rates.insert((TopicId(topic), index), rate);
                }
            }
        }
    }
    rates
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_takes_two_counts_and_small_changes_are_none() {
        let (mut meter, key) = (Meter::new(), (TopicId(Uuid::from_u128(7)), 1));
        let second = Duration::from_secs(1);
        let mut rate = |bytes| {
            let object = meter.measure([(key, bytes)].into_iter(), second);
            object.rates.get(&key.0.0.to_string()).cloned()
        };
        assert_eq!(rate(5_000), None);
        assert_eq!(rate(6_000), Some(vec![None, Some(768)]));
        assert_eq!(rate(7_100), Some(vec![None, Some(1024)]));
        assert_eq!(rate(8_150), Some(vec![None, Some(1024)]));
        assert_eq!(rate(8_150), Some(vec![None, Some(512)]));
        for bytes in [0, 1, 2, 3, 4, u64::MAX] {
            assert!(rounded(bytes) <= bytes);
        }
    }
}
