//! The policies of this region's links: objects `links/PEER` in the metadata store.
//!
//! Owns reading, changing and following them; what a policy means is the mirror's. A link without an
//! object has the default policy. Invariant: what is known here is durable, and an object that cannot
//! be read pauses its link, because nobody can say what it would have kept from crossing.

use std::collections::BTreeMap;
use std::time::Duration;

use broker_store::meta::{Change, MetaError, MetaStore, Version, Watch};
use kafka::RegionName;
use kafka::private::{Congestion, LinkPolicy, PATTERNS_MAX, TopicPattern};
use serde::{Deserialize, Serialize};
use tokio::sync::{Mutex, watch};
use tokio::time::timeout;

/// The policies of all links that have one of their own. One per broker; it knows nothing until
/// [`LinkPolicies::follow`] runs.
#[derive(Default)]
pub struct LinkPolicies {
    changing: Mutex<()>,
    known: watch::Sender<Known>,
    /// The latest generation that the mirror has, as it counts them.
    taken: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct Known {
    /// The store was read; until then nothing can be said.
    loaded: bool,
    /// Rises with every change.
    generation: u64,
    /// The latest moment of the store that is known of a policy. Of a removal that was missed it is not.
    revision: Version,
    /// Without a policy: one was removed here, and the watch has not told yet.
    links: BTreeMap<RegionName, (Option<LinkPolicy>, Version)>,
}

/// A policy as it is kept. A key that is missing has its default; one that is not known is an error,
/// because it may be what keeps something from crossing.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct LinkObject {
    topics: Vec<String>,
    exclude: Vec<String>,
    boe_lanes: bool,
    ppe_lanes: bool,
    deletions: bool,
    paused: bool,
    rate_bytes_max: u64,
    congestion: String,
}

#[derive(Debug, thiserror::Error)]
pub enum PolicyError {
    #[error("the link to {0} has the default policy already")]
    Default(RegionName),
    #[error("a region has policies for {LINKS_MAX} links at most; `sealane mirror link list` shows them")]
    TooMany,
    #[error("a link takes {PATTERNS_MAX} patterns in a list at most, this list has {0}")]
    TooManyPatterns(usize),
    #[error("somebody else changed the link to {0} at the same time; look at it and try again")]
    Raced(RegionName),
    #[error("the link to {peer}: {source}")]
    Meta { peer: RegionName, source: MetaError },
}

impl LinkPolicies {
    /// Reads what there is, and then takes over what others write. Never ends but with the store.
    pub async fn follow(&self, meta: &dyn MetaStore) {
        loop {
            // The watch first, so that nothing comes between.
            let changes = match meta.watch(PREFIX).await {
                Ok(changes) => self.read_all(meta).await.map(|()| changes),
                Err(error) => Err(error),
            };
            match changes {
                Ok(changes) => return self.take_over(meta, changes).await,
                Err(error) => tracing::warn!(%error, "the policies of links are read again"),
            }
            tokio::time::sleep(READ_AGAIN).await;
        }
    }

    async fn take_over(&self, meta: &dyn MetaStore, mut changes: Watch) {
        while let Some(change) = changes.next().await {
            match change {
                Change::Put(item) => self.learn(&item.key, Some(&item.value), item.version),
                Change::Deleted { key, version } => self.learn(&key, None, version),
                Change::Resync => {
                    while let Err(error) = self.read_all(meta).await {
                        tracing::warn!(%error, "the policies of links are read again");
                        tokio::time::sleep(READ_AGAIN).await;
                    }
                }
            }
        }
    }

    /// Returns when the store has been read.
    pub async fn loaded(&self) {
        // The sender is here, so the wait ends with the condition alone.
        let _ = self.known.subscribe().wait_for(|known| known.loaded).await;
    }

    /// A number that is never 0 and rises with every change.
    pub fn generation(&self) -> u64 {
        self.known.borrow().generation + 1
    }

    /// As [`Self::generation`], by the clock of the store: of two brokers the one with the higher knows more.
    pub fn revision(&self) -> u64 {
        self.known.borrow().revision.0 + 1
    }

    /// The mirror has this generation.
    pub fn note_taken(&self, generation: u64) {
        self.taken.send_if_modified(|taken| std::mem::replace(taken, generation.max(*taken)) < generation);
    }

    /// Waits until the mirror has this generation; false if it does not come for it.
    pub async fn wait_taken(&self, generation: u64) -> bool {
        let mut taken = self.taken.subscribe();
        timeout(TAKEN_WAIT, taken.wait_for(|taken| *taken >= generation)).await.is_ok()
    }

    /// The links that have a policy of their own.
    pub fn all(&self) -> Vec<(RegionName, LinkPolicy)> {
        let known = self.known.borrow();
        let present = known.links.iter().filter_map(|(peer, (policy, _))| Some((peer, policy.as_ref()?)));
        present.map(|(peer, policy)| (peer.clone(), policy.clone())).collect()
    }

    fn held(&self, peer: &RegionName) -> Option<(LinkPolicy, Version)> {
        let (policy, version) = self.known.borrow().links.get(peer).cloned()?;
        Some((policy?, version))
    }

    /// Changes a policy and returns what it is then. Durable when it returns.
    pub async fn change(
        &self,
        meta: &dyn MetaStore,
        peer: &RegionName,
        change: impl FnOnce(&mut LinkPolicy),
    ) -> Result<LinkPolicy, PolicyError> {
        self.loaded().await;
        let _one = self.changing.lock().await;
        let held = self.held(peer);
        if held.is_none() && self.all().len() >= LINKS_MAX {
            return Err(PolicyError::TooMany);
        }
        let (mut policy, version) = held.map_or((LinkPolicy::default(), None), |(p, v)| (p, Some(v)));
        change(&mut policy);
        if let Some(list) = [&policy.topics, &policy.exclude].into_iter().find(|l| l.len() > PATTERNS_MAX) {
            return Err(PolicyError::TooManyPatterns(list.len()));
        }
        let value = serde_json::to_vec(&LinkObject::of(&policy)).expect("a policy is JSON");
        let put = meta.put_if(&key(peer), value, version).await;
        let version = put.map_err(|source| failed(peer, source))?;
        self.set(peer.clone(), policy.clone(), version);
        Ok(policy)
    }

    /// Returns a link to the default policy.
    pub async fn remove(&self, meta: &dyn MetaStore, peer: &RegionName) -> Result<(), PolicyError> {
        self.loaded().await;
        let _one = self.changing.lock().await;
        let (_, version) = self.held(peer).ok_or_else(|| PolicyError::Default(peer.clone()))?;
        meta.delete_if(&key(peer), version).await.map_err(|source| failed(peer, source))?;
        self.known.send_modify(|known| {
            known.generation += 1;
            // It was removed at some later moment; the watch will tell which.
            known.revision = known.revision.max(Version(version.0 + 1));
            known.links.insert(peer.clone(), (None, version));
        });
        Ok(())
    }

    async fn read_all(&self, meta: &dyn MetaStore) -> Result<(), MetaError> {
        let mut links = BTreeMap::new();
        for item in meta.list(PREFIX).await? {
            if let Some(peer) = peer_of(&item.key) {
                links.insert(peer, (Some(read(&item.key, &item.value)), item.version));
            }
        }
        self.known.send_modify(|known| {
            known.loaded = true;
            known.generation += 1;
            let latest = links.values().map(|(_, version)| *version).max();
            known.revision = known.revision.max(latest.unwrap_or_default());
            known.links = links;
        });
        Ok(())
    }

    /// A write that the watch tells of. What is older than what is known changes nothing, nor does what
    /// was written here.
    fn learn(&self, key: &str, value: Option<&[u8]>, version: Version) {
        let Some(peer) = peer_of(key) else { return };
        match value {
            Some(value) => self.set(peer, read(key, value), version),
            None => {
                self.known.send_if_modified(|known| {
                    let gone = known.links.get(&peer).is_some_and(|(_, held)| *held <= version);
                    let shown = gone && known.links.remove(&peer).is_some_and(|(policy, _)| policy.is_some());
                    known.generation += u64::from(shown);
                    if gone {
                        known.revision = known.revision.max(version);
                    }
                    shown
                });
            }
        }
    }

    fn set(&self, peer: RegionName, policy: LinkPolicy, version: Version) {
        self.known.send_if_modified(|known| {
            let news = known.links.get(&peer).is_none_or(|(_, held)| *held < version);
            if news {
                known.links.insert(peer, (Some(policy), version));
                known.generation += 1;
                known.revision = known.revision.max(version);
            }
            news
        });
    }
}

impl LinkObject {
    fn of(policy: &LinkPolicy) -> LinkObject {
        let texts = |list: &[TopicPattern]| list.iter().map(TopicPattern::to_string).collect();
        LinkObject {
            topics: texts(&policy.topics),
            exclude: texts(&policy.exclude),
            boe_lanes: policy.boe_lanes,
            ppe_lanes: policy.ppe_lanes,
            deletions: policy.deletions,
            paused: policy.paused,
            rate_bytes_max: policy.rate_bytes_max,
            congestion: policy.congestion.name().to_owned(),
        }
    }

    fn policy(self) -> Result<LinkPolicy, String> {
        let patterns = |list: Vec<String>| {
            let parsed = list.iter().map(|text| TopicPattern::parse(text)).collect::<Result<Vec<_>, _>>();
            parsed.map_err(|error| error.to_string())
        };
        let congestion = Congestion::parse(&self.congestion);
        Ok(LinkPolicy {
            topics: patterns(self.topics)?,
            exclude: patterns(self.exclude)?,
            boe_lanes: self.boe_lanes,
            ppe_lanes: self.ppe_lanes,
            deletions: self.deletions,
            paused: self.paused,
            rate_bytes_max: self.rate_bytes_max,
            congestion: congestion.ok_or_else(|| format!("congestion {:?} is unknown", self.congestion))?,
        })
    }
}

impl Default for LinkObject {
    fn default() -> LinkObject {
        LinkObject::of(&LinkPolicy::default())
    }
}

/// The object's policy; of one that cannot be read, the default, paused.
fn read(key: &str, value: &[u8]) -> LinkPolicy {
    let object = serde_json::from_slice::<LinkObject>(value).map_err(|error| error.to_string());
    object.and_then(LinkObject::policy).unwrap_or_else(|error| {
        tracing::error!(
            "the object {key} in the metadata store cannot be read ({error}): this link is paused; `sealane mirror \
             link set` writes it anew"
        );
        LinkPolicy { paused: true, ..LinkPolicy::default() }
    })
}

/// Below `links/PEER/` are the mirror's own notes of topics.
fn peer_of(key: &str) -> Option<RegionName> {
    key.strip_prefix(PREFIX).and_then(|name| RegionName::parse(name).ok())
}

fn key(peer: &RegionName) -> String {
    format!("{PREFIX}{peer}")
}

fn failed(peer: &RegionName, source: MetaError) -> PolicyError {
    match source {
        MetaError::Conflict { .. } => PolicyError::Raced(peer.clone()),
        source => PolicyError::Meta { peer: peer.clone(), source },
    }
}

const PREFIX: &str = "links/";
/// A mirror asks for changes four times a second.
const TAKEN_WAIT: Duration = Duration::from_secs(3);
const READ_AGAIN: Duration = Duration::from_secs(1);
/// Policies of one region.
pub const LINKS_MAX: usize = 64;

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use broker_store::meta::Memory;

    use super::*;

    fn region(name: &str) -> RegionName {
        RegionName::parse(name).expect("a region name")
    }

    fn pattern(text: &str) -> TopicPattern {
        TopicPattern::parse(text).expect("a pattern")
    }

    async fn opened(meta: &Arc<dyn MetaStore>) -> Arc<LinkPolicies> {
        let policies = Arc::new(LinkPolicies::default());
        let (following, store) = (policies.clone(), meta.clone());
        tokio::spawn(async move { following.follow(&*store).await });
        policies.loaded().await;
        policies
    }

    /// Waits until what is known is so; what is no change to others is not told.
    async fn heard(policies: &LinkPolicies, so: impl Fn(&Known) -> bool) {
        let heard = async {
            while !so(&policies.known.borrow()) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(Duration::from_secs(60), heard).await.expect("it is told");
    }

    #[tokio::test]
    async fn a_change_keeps_the_rest_of_a_policy_and_outlives_the_broker() {
        let meta: Arc<dyn MetaStore> = Arc::new(Memory::new());
        let first = opened(&meta).await;
        let before = first.generation();
        first.change(&*meta, &region("west"), |p| p.exclude = vec![pattern("*.tmp")]).await.expect("changed");
        let now = first.change(&*meta, &region("west"), |p| p.paused = true).await.expect("changed");
        assert!(first.generation() > before);
        let wanted = LinkPolicy { exclude: vec![pattern("*.tmp")], paused: true, ..LinkPolicy::default() };
        assert_eq!(now, wanted);

        let second = opened(&meta).await;
        assert_eq!(second.all(), [(region("west"), wanted)]);
        second.remove(&*meta, &region("west")).await.expect("removed");
        assert!(second.all().is_empty());
        let again = second.remove(&*meta, &region("west")).await.expect_err("gone").to_string();
        assert_eq!(again, "the link to west has the default policy already");
        assert!(opened(&meta).await.all().is_empty());
    }

    #[tokio::test]
    async fn an_object_that_cannot_be_read_pauses_its_link_until_it_is_set_anew() {
        let meta: Arc<dyn MetaStore> = Arc::new(Memory::new());
        let newer = br#"{"topics": ["*"], "only_before_noon": true}"#.to_vec();
        meta.put_if("links/west", newer, None).await.expect("written");
        // What the mirror keeps below a link is no policy.
        meta.put_if("links/west/orders", b"{}".to_vec(), None).await.expect("written");
        let policies = opened(&meta).await;
        assert_eq!(policies.all().len(), 1);
        assert!(policies.all()[0].1.paused);
        policies.change(&*meta, &region("west"), |policy| policy.paused = false).await.expect("changed");
        assert_eq!(opened(&meta).await.all(), [(region("west"), LinkPolicy::default())]);
    }

    #[tokio::test]
    async fn what_another_writer_changes_is_followed() {
        let meta: Arc<dyn MetaStore> = Arc::new(Memory::new());
        let (one, other) = (opened(&meta).await, opened(&meta).await);
        one.change(&*meta, &region("west"), |policy| policy.rate_bytes_max = 7).await.expect("changed");
        heard(&other, |known| known.links.len() == 1).await;
        assert_eq!(other.all()[0].1.rate_bytes_max, 7);
        one.remove(&*meta, &region("west")).await.expect("removed");
        assert!(one.all().is_empty(), "at once");
        // Both have heard of all now: the news of its own writes is no change to the writer.
        for policies in [&one, &other] {
            heard(policies, |known| known.links.is_empty()).await;
            assert_eq!(policies.generation(), 4);
        }
    }

    #[tokio::test]
    async fn the_number_of_policies_and_of_their_patterns_is_bounded() {
        let meta: Arc<dyn MetaStore> = Arc::new(Memory::new());
        let policies = opened(&meta).await;
        let many = vec![pattern("a"); PATTERNS_MAX + 1];
        let said = policies.change(&*meta, &region("west"), |policy| policy.topics = many).await;
        assert!(matches!(said, Err(PolicyError::TooManyPatterns(_))), "{said:?}");
        for n in 0..LINKS_MAX {
            policies.change(&*meta, &region(&format!("r{n}")), |_| {}).await.expect("changed");
        }
        let said = policies.change(&*meta, &region("west"), |_| {}).await;
        assert!(matches!(said, Err(PolicyError::TooMany)), "{said:?}");
        policies
            .change(&*meta, &region("r0"), |policy| policy.paused = true)
            .await
            .expect("one that is there");
    }
}
