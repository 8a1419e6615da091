//! Metadata on etcd: every key of a cluster below one prefix, every version etcd's own `mod_revision`.
//!
//! Owns the requests and what their answers mean. Which member is asked is `etcd/members.rs`, watches are
//! `etcd/watch.rs`, leases `etcd/lease.rs`. Invariant: a write is sent once; whether it happened is not
//! known when no answer came, and it is then reported as unavailable.

mod lease;
mod members;
#[cfg(test)]
mod tests;
mod watch;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use members::Members;

use super::{Answer, Item, Lease, MetaError, MetaStore, Version, Watch, check_key, check_value};

/// The messages and clients of etcd's API, as generated.
#[allow(clippy::doc_lazy_continuation, clippy::enum_variant_names, clippy::large_enum_variant)]
mod api {
    tonic::include_proto!("etcdserverpb");
}

/// Which etcd, and how long it is waited for.
#[derive(Clone, Debug)]
pub struct EtcdConfig {
    /// `http://HOST:PORT` or `https://HOST:PORT` of each member.
    pub endpoints: Vec<String>,
    /// All keys begin with this and a `/`. Another cluster needs another.
    pub prefix: String,
    /// A request without an answer ends after this time. Must be well below the ttl of leases.
    pub timeout: Duration,
    /// For `https://`.
    pub tls: Option<EtcdTls>,
}

/// PEM texts.
#[derive(Clone)]
pub struct EtcdTls {
    /// Who signed the members' certificates.
    pub ca: Vec<u8>,
    /// Certificate and key of one's own, where etcd asks for them.
    pub identity: Option<(Vec<u8>, Vec<u8>)>,
}

impl EtcdConfig {
    pub fn new(endpoints: Vec<String>, prefix: &str) -> EtcdConfig {
        let prefix = prefix.trim_end_matches('/').to_owned();
        EtcdConfig { endpoints, prefix, timeout: Duration::from_secs(2), tls: None }
    }
}

/// Clones share the connection.
#[derive(Clone, Debug)]
pub struct Etcd {
    members: Arc<Members>,
    prefix: String,
}

impl Etcd {
    /// Connects to nothing yet; an error is one of the configuration.
    pub fn open(config: EtcdConfig) -> Result<Etcd, MetaError> {
        let prefix = format!("{}/", config.prefix);
        Ok(Etcd { members: Arc::new(Members::new(config)?), prefix })
    }

    fn key(&self, key: &str) -> Result<Vec<u8>, MetaError> {
        check_key(key)?;
        Ok(format!("{}{key}", self.prefix).into_bytes())
    }

    /// All keys that begin with `prefix`: the first, and the first that does not.
    fn range(&self, prefix: &str) -> (Vec<u8>, Vec<u8>) {
        let from = format!("{}{prefix}", self.prefix).into_bytes();
        let mut to = from.clone();
        while to.pop_if(|last| *last == u8::MAX).is_some() {}
        match to.last_mut() {
            Some(last) => *last += 1,
            // etcd's word for "no end".
            None => to.push(0),
        }
        (from, to)
    }

    fn item(&self, found: api::KeyValue) -> Result<Item, MetaError> {
        let (key, version) = own_key(&self.prefix, &found)?;
        Ok(Item { key, value: found.value, version })
    }

    /// One write under conditions. `guard` comes first: it decides which refusal is told.
    async fn write(
        &self,
        doing: String,
        deed: api::request_op::Request,
        (key, expected): (Vec<u8>, Option<Version>),
        guard: Option<(Vec<u8>, Version)>,
    ) -> Result<Version, MetaError> {
        let mut compare = vec![has_version(&key, expected)];
        let mut failure = vec![op(api::request_op::Request::RequestRange(just(&key)))];
        if let Some((guard, version)) = &guard {
            compare.push(has_version(guard, Some(*version)));
            failure.push(op(api::request_op::Request::RequestRange(just(guard))));
        }
        let request = api::TxnRequest { compare, success: vec![op(deed)], failure };
        let answer = self.members.write(&doing, request).await?;
        if answer.succeeded {
            return Ok(revision(answer.header));
        }
        let mut found = answer.responses.into_iter().map(version_found);
        let current = found.next().flatten();
        let guard_found = found.next().flatten();
        match guard {
            Some((_, version)) if guard_found != Some(version) => Err(MetaError::GuardGone),
            _ => Err(MetaError::Conflict { current }),
        }
    }

    async fn put(
        &self,
        key: &str,
        value: Vec<u8>,
        expected: Option<Version>,
        lease: i64,
        guard: Option<(&str, Version)>,
    ) -> Result<Version, MetaError> {
        let name = self.key(key)?;
        check_value(&value)?;
        let guard = match guard {
            Some((guard, version)) => Some((self.key(guard)?, version)),
            None => None,
        };
        let deed = api::PutRequest { key: name.clone(), value, lease };
        let deed = api::request_op::Request::RequestPut(deed);
        self.write(format!("put {key}"), deed, (name, expected), guard).await
    }

    /// Pages as of the revision of the first one; `Ok(None)` if that was thrown away in between.
    async fn pages(&self, prefix: &str) -> Result<Option<Vec<Item>>, MetaError> {
        let (mut key, range_end) = self.range(prefix);
        let mut items = Vec::new();
        let mut revision = 0;
        loop {
            let request = api::RangeRequest {
                key,
                range_end: range_end.clone(),
                limit: PAGE_ITEMS,
                revision,
                count_only: false,
            };
            let page = match self.members.read(&format!("list {prefix}"), request).await {
                Ok(page) => page,
                Err(members::Refusal::Compacted) if revision > 0 => return Ok(None),
                Err(refusal) => return Err(refusal.into()),
            };
            if revision == 0 {
                // Later pages name the latest revision too, not the one that they are of.
                revision = page.header.map_or(0, |header| header.revision);
            }
            let Some(last) = page.kvs.last() else { return Ok(Some(items)) };
            // The next key that there can be.
            key = [&last.key[..], &[0]].concat();
            let more = page.more;
            for found in page.kvs {
                items.push(self.item(found)?);
            }
            if !more {
                return Ok(Some(items));
            }
        }
    }
}

/// Items of a page: with the largest values they still fit an answer.
const PAGE_ITEMS: i64 = 200;
/// A list that is overtaken by compaction so often is given up.
const LISTS_MAX: u32 = 5;

impl MetaStore for Etcd {
    fn get<'a>(&'a self, key: &'a str) -> Answer<'a, Option<(Vec<u8>, Version)>> {
        Box::pin(async move {
            let request = just(&self.key(key)?);
            let answer = self.members.read(&format!("get {key}"), request).await?;
            let found = answer.kvs.into_iter().next();
            Ok(found.map(|found| {
                let version = version(found.mod_revision);
                (found.value, version)
            }))
        })
    }

    fn put_if<'a>(&'a self, key: &'a str, value: Vec<u8>, expected: Option<Version>) -> Answer<'a, Version> {
        Box::pin(self.put(key, value, expected, 0, None))
    }

    fn delete_if<'a>(&'a self, key: &'a str, expected: Version) -> Answer<'a, ()> {
        Box::pin(async move {
            let name = self.key(key)?;
            let deed = api::DeleteRangeRequest { key: name.clone() };
            let deed = api::request_op::Request::RequestDeleteRange(deed);
            self.write(format!("delete {key}"), deed, (name, Some(expected)), None).await.map(drop)
        })
    }

    fn list<'a>(&'a self, prefix: &'a str) -> Answer<'a, Vec<Item>> {
        Box::pin(async move {
            for _ in 0..LISTS_MAX {
                if let Some(items) = self.pages(prefix).await? {
                    return Ok(items);
                }
            }
            Err(MetaError::Unavailable(format!("list {prefix}: etcd compacts faster than it lists")))
        })
    }

    fn watch<'a>(&'a self, prefix: &'a str) -> Answer<'a, Watch> {
        Box::pin(watch::watch(self.members.clone(), self.prefix.clone(), prefix, self.range(prefix)))
    }

    fn lease(&self, ttl: Duration) -> Answer<'_, Lease> {
        Box::pin(lease::grant(self.members.clone(), ttl))
    }

    fn put_leased<'a>(
        &'a self,
        key: &'a str,
        value: Vec<u8>,
        expected: Option<Version>,
        lease: &'a Lease,
    ) -> Answer<'a, Version> {
        Box::pin(async move {
            if !lease.is_held() {
                return Err(MetaError::GuardGone);
            }
            self.put(key, value, expected, lease.id(), None).await
        })
    }

    fn put_guarded<'a>(
        &'a self,
        key: &'a str,
        value: Vec<u8>,
        expected: Option<Version>,
        guard: (&'a str, Version),
    ) -> Answer<'a, Version> {
        Box::pin(self.put(key, value, expected, 0, Some(guard)))
    }

    fn version(&self) -> Answer<'_, Version> {
        Box::pin(async move {
            let (key, range_end) = self.range("");
            let request = api::RangeRequest { key, range_end, limit: 1, revision: 0, count_only: true };
            Ok(revision(self.members.read("version", request).await?.header))
        })
    }
}

/// What a key is called above, and its version.
fn own_key(prefix: &str, found: &api::KeyValue) -> Result<(String, Version), MetaError> {
    let key = std::str::from_utf8(&found.key).ok().and_then(|key| key.strip_prefix(prefix));
    let key = key.ok_or_else(|| {
        let key = String::from_utf8_lossy(&found.key);
        MetaError::Corrupt(format!("key {key:?} below {prefix} is none of ours"))
    })?;
    Ok((key.to_owned(), version(found.mod_revision)))
}

fn version(revision: i64) -> Version {
    Version(revision.cast_unsigned())
}

fn revision(header: Option<api::ResponseHeader>) -> Version {
    version(header.unwrap_or_default().revision)
}

fn version_found(answer: api::ResponseOp) -> Option<Version> {
    match answer.response {
        Some(api::response_op::Response::ResponseRange(range)) => {
            range.kvs.first().map(|found| version(found.mod_revision))
        }
        _ => None,
    }
}

fn just(key: &[u8]) -> api::RangeRequest {
    api::RangeRequest { key: key.to_owned(), ..api::RangeRequest::default() }
}

fn op(request: api::request_op::Request) -> api::RequestOp {
    api::RequestOp { request: Some(request) }
}

fn has_version(key: &[u8], expected: Option<Version>) -> api::Compare {
    let revision = expected.map_or(0, |version| version.0.cast_signed());
    api::Compare {
        result: api::compare::CompareResult::Equal.into(),
        target: api::compare::CompareTarget::Mod.into(),
        key: key.to_owned(),
        target_union: Some(api::compare::TargetUnion::ModRevision(revision)),
    }
}

impl fmt::Debug for EtcdTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EtcdTls").finish_non_exhaustive()
    }
}
