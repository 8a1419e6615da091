//! A limit on bytes per second: a token bucket on the link's own clock. Pure.
//!
//! Law: what leaves within any `t` milliseconds at one rate is at most the burst (a tenth of a second's
//! bytes), and `rate * t / 1000`, and one unit more, because a unit may overdraw and the debt is
//! waited for.

use super::Now;

#[derive(Debug)]
pub(super) struct Bucket {
    /// Bytes per second; 0 for no limit.
    rate: u64,
    /// Thousandths of a byte: a rate times milliseconds, so that nothing is lost by rounding.
    tokens: i128,
    filled: Now,
}

impl Bucket {
    pub(super) fn new(rate: u64, now: Now) -> Bucket {
        Bucket { rate, tokens: burst(rate), filled: now }
    }

    /// From `now` on. A debt stays, and is paid at the new rate.
    pub(super) fn set_rate(&mut self, rate: u64, now: Now) {
        self.refill(now);
        self.tokens = if self.rate == 0 { burst(rate) } else { self.tokens.min(burst(rate)) };
        self.rate = rate;
    }

    pub(super) fn rate(&self) -> u64 {
        self.rate
    }

    pub(super) fn refill(&mut self, now: Now) {
        let earned = i128::from(self.rate) * i128::from(now.since(self.filled));
        self.tokens = self.tokens.saturating_add(earned).min(burst(self.rate));
        self.filled = self.filled.max(now);
    }

    /// As of the last refill.
    pub(super) fn is_open(&self) -> bool {
        self.rate == 0 || self.tokens > 0
    }

    pub(super) fn take(&mut self, bytes: u64) {
        if self.rate > 0 {
            self.tokens -= i128::from(bytes) * 1000;
        }
    }

    /// When a refill opens it; `None` while it is open.
    pub(super) fn opens_at(&self) -> Option<Now> {
        if self.is_open() {
            return None;
        }
        // The first millisecond at which there is more than nothing.
        let wait = -self.tokens / i128::from(self.rate) + 1;
        Some(self.filled.plus(u64::try_from(wait).unwrap_or(u64::MAX)))
    }
}

fn burst(rate: u64) -> i128 {
    i128::from(rate) * BURST_MS
}

const BURST_MS: i128 = 100;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A sender that takes a unit whenever it may, at these moments; what left, and when.
    fn run(mut bucket: Bucket, steps: &[(u64, u64)]) -> Vec<(u64, u64)> {
        let (mut now, mut left) = (0, Vec::new());
        for (wait, unit) in steps {
            now += wait;
            bucket.refill(Now(now));
            if bucket.is_open() {
                bucket.take(*unit);
                left.push((now, *unit));
            }
        }
        left
    }

    /// The most that one window of any length lets through beyond the law.
    fn beyond_the_law(rate: u64, left: &[(u64, u64)]) -> i128 {
        let mut worst = i128::MIN;
        for (first, (from, _)) in left.iter().enumerate() {
            let mut sum = 0;
            for (to, unit) in &left[first..] {
                sum += i128::from(*unit) * 1000;
                let lawful =
                    i128::from(rate) * i128::from(to - from) + burst(rate) + i128::from(*unit) * 1000;
                worst = worst.max(sum - lawful);
            }
        }
        worst
    }

    proptest! {
        #[test]
        fn no_window_lets_more_through_than_the_law(
            rate in 1u64..100_000,
            steps in proptest::collection::vec((0u64..50, 1u64..5_000), 1..150),
        ) {
            let left = run(Bucket::new(rate, Now(0)), &steps);
            prop_assert!(beyond_the_law(rate, &left) <= 0, "{left:?}");
        }

        #[test]
        fn it_opens_at_the_moment_it_says_and_not_before(
            rate in 1u64..100_000,
            units in proptest::collection::vec(1u64..1_000_000, 1..20),
        ) {
            let mut bucket = Bucket::new(rate, Now(0));
            for unit in units {
                if let Some(at) = bucket.opens_at() {
                    bucket.refill(Now(at.0 - 1));
                    prop_assert!(!bucket.is_open());
                    bucket.refill(at);
                }
                prop_assert!(bucket.is_open());
                bucket.take(unit);
            }
        }
    }

    #[test]
    fn the_law_is_broken_without_the_bucket() {
        let steps = vec![(1, 1_000); 100];
        assert!(beyond_the_law(1_000, &run(Bucket::new(1_000, Now(0)), &steps)) <= 0);
        assert!(beyond_the_law(1_000, &run(Bucket::new(0, Now(0)), &steps)) > 0);
    }

    #[test]
    fn a_new_rate_holds_from_then_on_and_pays_the_old_debt() {
        let mut bucket = Bucket::new(0, Now(0));
        bucket.take(1 << 40);
        assert!(bucket.is_open(), "no limit, no debt");
        bucket.set_rate(1_000, Now(500));
        bucket.take(1_100);
        assert_eq!(bucket.opens_at(), Some(Now(1_501)));
        bucket.set_rate(1_000_000, Now(500));
        assert_eq!(bucket.opens_at(), Some(Now(502)));
        bucket.set_rate(0, Now(501));
        assert!(bucket.is_open());
    }
}
