//! Which watches are alive. A watch that is silent while others are not is dead, and so is the
//! operator's view of that kind: /livez turns red and the kubelet starts it anew. When the whole API
//! server is away nobody is heard, and a restart would help nobody.

use std::collections::BTreeMap;
use std::time::Duration;

use chassis::Trouble;
use parking_lot::Mutex;
use tokio::time::Instant;

/// When each watch was last heard.
pub struct Liveness {
    silence_max: Duration,
    heard: Mutex<BTreeMap<String, Instant>>,
}

impl Liveness {
    pub fn new(silence_max: Duration) -> Liveness {
        Liveness { silence_max, heard: Mutex::default() }
    }

    /// `name` has been heard now.
    pub fn heard(&self, name: &str) {
        let now = Instant::now();
        let mut heard = self.heard.lock();
        match heard.get_mut(name) {
            Some(last) => *last = now,
            None => drop(heard.insert(name.to_owned(), now)),
        }
    }

    /// Seconds since each was heard.
    pub fn ages(&self) -> Vec<(String, f64)> {
        self.heard.lock().iter().map(|(name, last)| (name.clone(), last.elapsed().as_secs_f64())).collect()
    }

    /// The watches that are dead.
    pub fn troubles(&self) -> Vec<Trouble> {
        let heard = self.heard.lock();
        let Some(newest) = heard.values().max() else { return Vec::new() };
        heard
            .iter()
            .filter(|(_, last)| newest.duration_since(**last) > self.silence_max)
            .map(|(name, last)| {
                let seconds = newest.duration_since(*last).as_secs();
                Trouble::Dead(format!("the watch of {name} was last heard {seconds} s before others"))
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_watch_that_is_silent_while_others_are_heard_is_dead() {
        let liveness = Liveness::new(Duration::from_secs(60));
        liveness.heard("pods");
        liveness.heard("topics");
        tokio::time::advance(Duration::from_secs(600)).await;
        assert_eq!(liveness.troubles(), Vec::new(), "nobody is heard: the API server is away");
        liveness.heard("topics");
        assert!(liveness.troubles()[0].text().contains("watch of pods"));
        liveness.heard("pods");
        assert_eq!(liveness.troubles(), Vec::new());
    }
}
