//! Leases on etcd. The holder counts from the last renewal that it *sent*: etcd counts from when that
//! arrived, which is later, so the holder knows first that the lease is over. No clock is compared with
//! another.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tonic::Code;

use super::api;
use super::members::{Members, Refusal, refusal, with_leader};
use crate::meta::WeakLease;
use crate::{Lease, MetaError};

type Client = api::lease_client::LeaseClient<tonic::transport::Channel>;

pub(super) async fn grant(members: Arc<Members>, ttl: Duration) -> Result<Lease, MetaError> {
    let seconds = ttl.as_secs_f64().ceil().max(1.0) as i64;
    let sent = Instant::now();
    let granted = members
        .ask("grant a lease", |channel| async move {
            let request = with_leader(api::LeaseGrantRequest { ttl: seconds });
            Client::new(channel).lease_grant(request).await
        })
        .await?;
    let id = granted.id;
    let (runtime, revoker) = (tokio::runtime::Handle::current(), members.clone());
    let lease = Lease::new(id, move || {
        let members = revoker.clone();
        // Whoever waits for the keys to go need not wait for the ttl. If this fails, they do.
        runtime.spawn(async move {
            let _ = revoke(&members, id).await;
        });
    });
    lease.extend(sent + counted(granted.ttl));
    let keeper = Keeper { members, lease: lease.downgrade(), id };
    tokio::spawn(keeper.keep(counted(granted.ttl)));
    Ok(lease)
}

/// How long the holder counts on a lease of so many seconds: a little less, for clocks that run unevenly.
fn counted(ttl_seconds: i64) -> Duration {
    let ttl = Duration::from_secs(u64::try_from(ttl_seconds).unwrap_or_default());
    ttl - ttl / 10
}

async fn revoke(members: &Members, id: i64) -> Result<(), Refusal> {
    let revoked = members.ask("end a lease", |channel| async move {
        Client::new(channel).lease_revoke(with_leader(api::LeaseRevokeRequest { id })).await
    });
    revoked.await.map(drop)
}

/// Renews one lease for as long as anybody holds it.
struct Keeper {
    members: Arc<Members>,
    lease: WeakLease,
    id: i64,
}

impl Keeper {
    async fn keep(self, counted: Duration) {
        let interval = counted / 3;
        let mut wait = interval;
        while let Some(until) = self.until() {
            let renewal = async {
                tokio::time::sleep(wait).await;
                let sent = Instant::now();
                let renewed = tokio::time::timeout(interval, self.renew()).await;
                (sent, renewed)
            };
            tokio::select! {
                (sent, renewed) = renewal => match renewed {
                    Ok(Ok(0)) => self.lost("etcd does not know it any more"),
                    Ok(Ok(ttl)) => {
                        self.extend(sent + self::counted(ttl));
                        wait = interval;
                    }
                    Ok(Err(Refusal::NoLease)) => self.lost("etcd does not know it any more"),
                    Ok(Err(reason)) => {
                        tracing::debug!(?reason, "a lease is not renewed yet");
                        wait = interval / 10;
                    }
                    Err(_) => wait = Duration::ZERO,
                },
                () = tokio::time::sleep_until(until.into()) => self.lost("no renewal was answered in time"),
            }
        }
    }

    /// Until when the lease is held; none if it is not, or if nobody has it any more.
    fn until(&self) -> Option<Instant> {
        self.lease.upgrade().and_then(|lease| lease.until().filter(|_| !lease.has_ended()))
    }

    fn extend(&self, until: Instant) {
        if let Some(lease) = self.lease.upgrade() {
            lease.extend(until);
        }
    }

    fn lost(&self, reason: &str) {
        if let Some(lease) = self.lease.upgrade() {
            tracing::warn!(lease = self.id, reason, "the lease on etcd is lost");
            lease.end();
        }
    }

    /// The seconds that the lease has from now on; 0 if there is none.
    async fn renew(&self) -> Result<i64, Refusal> {
        let id = self.id;
        let connected = self.members.connected().await?;
        let requests = futures_util::stream::iter([api::LeaseKeepAliveRequest { id }]);
        let ask = async {
            let mut answers = Client::new(connected.channel.clone())
                .lease_keep_alive(with_leader(requests))
                .await?
                .into_inner();
            answers.message().await?.ok_or_else(|| tonic::Status::new(Code::Unavailable, "no answer"))
        };
        let answered = tokio::time::timeout(self.members.timeout().min(RENEW_TIMEOUT_MAX), ask).await;
        match answered {
            Ok(Ok(answer)) => Ok(answer.ttl),
            Ok(Err(status)) => {
                self.members.leave(&connected);
                Err(refusal("renew a lease", &status))
            }
            Err(_) => {
                self.members.leave(&connected);
                Err(MetaError::Unavailable("renew a lease: no answer".to_owned()).into())
            }
        }
    }
}

/// There must be time for another member before the lease is over.
const RENEW_TIMEOUT_MAX: Duration = Duration::from_millis(500);
