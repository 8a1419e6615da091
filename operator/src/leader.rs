//! Leadership by a Lease: of several operators one writes.
//!
//! The holder renews well before the end; it counts its own time from before the request, so that it
//! stops writing before anybody else may begin. Who loses the Lease to another ends its process; who
//! cannot reach the API server goes on when it is back, if nobody took it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::api::{Api, ObjectMeta, PostParams};
use tokio::sync::watch;
use tokio::time::Instant;
use tracing::{debug, info};

/// Whether this process may write now.
pub struct Leadership {
    me: String,
    name: String,
    duration: Duration,
    start: Instant,
    /// Milliseconds after `start` until which nobody else can hold the Lease.
    until: AtomicU64,
    held: watch::Sender<bool>,
}

/// Another operator holds the Lease that was ours.
#[derive(Debug, thiserror::Error)]
#[error("{holder} holds Lease {lease} now: this operator ends")]
pub struct Lost {
    pub holder: String,
    pub lease: String,
}

/// What was seen of somebody else's Lease, by one's own clock.
struct Seen {
    version: String,
    since: Instant,
}

impl Leadership {
    pub fn new(name: &str, me: String, duration: Duration) -> Leadership {
        let held = watch::Sender::new(false);
        Leadership {
            me,
            name: name.to_owned(),
            duration,
            start: Instant::now(),
            until: AtomicU64::new(0),
            held,
        }
    }

    /// Nobody else can be writing at this moment.
    pub fn may_write(&self) -> bool {
        let now = self.start.elapsed().as_millis();
        *self.held.borrow() && now < u128::from(self.until.load(Ordering::Acquire))
    }

    pub fn is_held(&self) -> bool {
        *self.held.borrow()
    }

    /// Returns when this process holds the Lease.
    pub async fn acquired(&self) {
        let mut held = self.held.subscribe();
        let _ = held.wait_for(|held| *held).await;
    }

    /// Takes the Lease and keeps it; ends only when it is lost. `heard` is called at each answer.
    pub async fn keep(&self, api: Api<Lease>, heard: impl Fn()) -> Result<(), Lost> {
        let mut seen: Option<Seen> = None;
        loop {
            let asked = Instant::now();
            // An answer that never comes, on a connection that nothing carries any more, must not be what is waited for
            // until the Lease is over: the next try goes another way.
            let attempt = tokio::time::timeout(self.patience(), self.attempt(&api, &mut seen));
            let Ok(answer) = attempt.await else {
                debug!(lease = %self.name, "no answer, trying again");
                continue;
            };
            match answer {
                Ok(holder) if holder == self.me => {
                    heard();
                    let end = (asked - self.start) + self.duration.mul_f32(WRITING_PART);
                    let end = u64::try_from(end.as_millis()).unwrap_or(u64::MAX);
                    self.until.store(end, Ordering::Release);
                    if !self.held.send_replace(true) {
                        info!(lease = %self.name, me = %self.me, "this operator holds the Lease and writes");
                    }
                }
                Ok(holder) => {
                    heard();
                    if *self.held.borrow() {
                        return Err(Lost { holder, lease: self.name.clone() });
                    }
                }
                Err(error) => debug!(lease = %self.name, "cannot be renewed, trying again: {error}"),
            }
            tokio::time::sleep(self.duration / RENEWALS).await;
        }
    }

    fn patience(&self) -> Duration {
        (self.duration / TRIES).max(PATIENCE_MIN)
    }

    /// Gives the Lease up, so that the next operator need not wait.
    pub async fn release(&self, api: &Api<Lease>) {
        if !self.held.send_replace(false) {
            return;
        }
        self.until.store(0, Ordering::Release);
        let Ok(mut lease) = api.get(&self.name).await else { return };
        if let Some(spec) = lease.spec.as_mut().filter(|spec| spec.holder_identity.as_ref() == Some(&self.me))
        {
            spec.holder_identity = Some(String::new());
            // Else the Lease runs out by itself.
            drop(api.replace(&self.name, &PostParams::default(), &lease).await);
        }
    }

    /// Who holds the Lease after this try.
    async fn attempt(&self, api: &Api<Lease>, seen: &mut Option<Seen>) -> Result<String, kube::Error> {
        let Some(mut lease) = api.get_opt(&self.name).await? else {
            let metadata = ObjectMeta { name: Some(self.name.clone()), ..ObjectMeta::default() };
            let lease = Lease { metadata, spec: Some(self.spec(None)) };
            api.create(&PostParams::default(), &lease).await?;
            return Ok(self.me.clone());
        };
        let spec = lease.spec.clone().unwrap_or_default();
        let holder = spec.holder_identity.clone().unwrap_or_default();
        if holder != self.me && !holder.is_empty() && !self.has_run_out(&lease, &spec, seen) {
            return Ok(holder);
        }
        // The version makes this fail where somebody else was faster.
        lease.spec = Some(self.spec(Some(&spec)));
        api.replace(&self.name, &PostParams::default(), &lease).await?;
        Ok(self.me.clone())
    }

    /// Not renewed for as long as it says, counted from when it was first seen so: no clock of another
    /// machine is believed.
    fn has_run_out(&self, lease: &Lease, spec: &LeaseSpec, seen: &mut Option<Seen>) -> bool {
        let version = lease.metadata.resource_version.clone().unwrap_or_default();
        let seconds = spec.lease_duration_seconds.map_or(0, |seconds| seconds.max(0).unsigned_abs());
        match seen {
            Some(seen) if seen.version == version => {
                seen.since.elapsed() > Duration::from_secs(u64::from(seconds)).max(self.duration)
            }
            _ => {
                *seen = Some(Seen { version, since: Instant::now() });
                false
            }
        }
    }

    fn spec(&self, former: Option<&LeaseSpec>) -> LeaseSpec {
        let mine = former.is_some_and(|former| former.holder_identity.as_ref() == Some(&self.me));
        let now = MicroTime(Timestamp::now());
        let transitions = former.and_then(|former| former.lease_transitions).unwrap_or(0);
        LeaseSpec {
            holder_identity: Some(self.me.clone()),
            lease_duration_seconds: i32::try_from(self.duration.as_secs()).ok(),
            acquire_time: match former {
                Some(former) if mine => former.acquire_time.clone(),
                _ => Some(now.clone()),
            },
            renew_time: Some(now),
            lease_transitions: Some(if mine { transitions } else { transitions.saturating_add(1) }),
            ..LeaseSpec::default()
        }
    }
}

/// Part of the duration for which a holder believes itself.
const WRITING_PART: f32 = 0.8;
/// Tries in one duration.
const RENEWALS: u32 = 5;
/// Tries without an answer in one duration.
const TRIES: u32 = 3;
/// An API server that is only slow answers within it.
const PATIENCE_MIN: Duration = Duration::from_secs(2);
