//! A remote store on S3, or on anything that speaks it and keeps create-if-absent (`If-None-Match: *`).
//!
//! Owns what lies where in the bucket, and what an answer of the server means. The logs of lives are in
//! `s3/log.rs`. Invariant: nothing is ever written over, except the highest block of a life that is
//! forgotten. A listing is a hint about order and prefix: what it shows is filtered and sorted here.

mod log;
#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::TryStreamExt;
use object_store::aws::{AmazonS3, AmazonS3Builder};
use object_store::path::Path;
use object_store::{
    BackoffConfig, Certificate, ClientOptions, Error, GetOptions, GetRange, ObjectStore, ObjectStoreExt,
    PutMode, PutOptions, PutPayload, RetryConfig,
};

use super::worker::{Worker, one_line};
use super::{Block, Life, LifeLog, Remote, names};
use crate::{Entry, StoreError, StorePath};

/// Where the objects are, and how long the store is waited for.
#[derive(Clone, Debug)]
pub struct S3Config {
    /// `http://host:port` or `https://...` of the service; AWS's own for the region when empty.
    pub endpoint: String,
    pub region: String,
    pub bucket: String,
    /// Everything of this cluster has names that begin with this and a `/`. Another cluster needs another.
    pub prefix: String,
    /// Without them: `AWS_ACCESS_KEY_ID` and its like in the environment, a web identity, or the role of
    /// the machine.
    pub credentials: Option<S3Credentials>,
    /// PEM texts of authorities that may sign the server's certificate, beside those of the machine.
    pub ca: Vec<u8>,
    /// An attempt without an answer ends after this time, and a second for each MiB that it carries. Too
    /// short a time fails what would have succeeded; the log of a broker waits for each of its writes.
    pub request_timeout: Duration,
    /// For so long a request is tried again that the store refused for the moment (500, 503 "slow down").
    pub retry_for: Duration,
}

#[derive(Clone)]
pub struct S3Credentials {
    pub access_key_id: String,
    pub secret_access_key: String,
}

impl S3Config {
    pub fn new(endpoint: &str, bucket: &str, prefix: &str) -> S3Config {
        S3Config {
            endpoint: endpoint.to_owned(),
            region: "us-east-1".to_owned(),
            bucket: bucket.to_owned(),
            prefix: prefix.trim_matches('/').to_owned(),
            credentials: None,
            ca: Vec::new(),
            request_timeout: Duration::from_secs(5),
            retry_for: Duration::from_secs(5),
        }
    }
}

#[derive(Clone, Debug)]
pub struct S3 {
    bucket: Arc<Bucket>,
    worker: Arc<Worker>,
}

impl S3 {
    /// Connects to nothing yet: what is wrong with bucket or credentials is said by the first call.
    pub fn open(config: S3Config) -> Result<S3, StoreError> {
        Ok(S3 { bucket: Arc::new(Bucket::new(config)?), worker: Arc::new(Worker::new("s3")?) })
    }

    fn run<T: Send + 'static, F>(
        &self,
        doing: &str,
        bytes: usize,
        work: impl FnOnce(Arc<Bucket>) -> F,
    ) -> Result<T, StoreError>
    where
        F: Future<Output = Result<T, StoreError>> + Send + 'static,
    {
        let doing = self.bucket.named(doing);
        self.worker.run(&doing, self.bucket.deadline(bytes), work(self.bucket.clone()))
    }
}

impl Remote for S3 {
    fn put(&self, name: &StorePath, bytes: Bytes) -> Result<(), StoreError> {
        let path = self.bucket.object(name)?;
        self.run(&format!("put {name}"), bytes.len(), |bucket| async move {
            match bucket.create(&path, bytes).await? {
                Created::Own => Ok(()),
                Created::Other(_) => Err(StoreError::AlreadyExists),
            }
        })
    }

    fn get(&self, name: &StorePath, pos: u64, len: usize) -> Result<Bytes, StoreError> {
        let path = self.bucket.object(name)?;
        // How much will come is not known before it is there.
        let expected = len.min(GET_BYTES_EXPECTED);
        self.run(&format!("get {name}"), expected, |bucket| async move { bucket.get(&path, pos, len).await })
    }

    fn list(&self, dir: &StorePath) -> Result<Vec<Entry>, StoreError> {
        let path = self.bucket.object(dir)?;
        self.run(&format!("list {dir}"), LIST_BYTES, |bucket| async move { bucket.list(&path).await })
    }

    fn delete(&self, name: &StorePath) -> Result<(), StoreError> {
        super::refuse_root(name)?;
        let path = self.bucket.object(name)?;
        self.run(&format!("delete {name}"), LIST_BYTES, |bucket| async move {
            // Servers that keep objects as files cannot remove a directory as if it were one.
            let below = bucket.all_below(&path).await?;
            if below.is_empty() {
                return bucket.delete_one(&path).await;
            }
            bucket.delete_all(below.into_iter().map(|(path, _)| path).collect()).await
        })
    }

    fn begin(&self, life: Life) -> Result<Arc<dyn LifeLog>, StoreError> {
        log::begin(self, life)
    }

    fn fence(&self, life: Life) -> Result<(), StoreError> {
        log::fence(self, life)
    }

    fn end(
        &self,
        life: Life,
        visit: &mut dyn FnMut(Block) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        log::end(self, life, visit)
    }

    fn forget(&self, life: Life) -> Result<(), StoreError> {
        log::forget(self, life)
    }

    fn lives(&self) -> Result<Vec<Life>, StoreError> {
        log::lives(self)
    }
}

/// Listings take several requests: they may last as if they carried this much.
const LIST_BYTES: usize = 20 << 20;
const GET_BYTES_EXPECTED: usize = 64 << 20;
/// Attempts at a name that the server calls taken and shows nothing under.
const CONFLICTS_MAX: u32 = 8;
const CONFLICT_WAIT: Duration = Duration::from_millis(50);
/// Ranges beyond this are asked for as "to the end"; no object is so large.
const RANGE_MAX: u64 = 1 << 44;

/// The part of a bucket that belongs to this cluster.
#[derive(Debug)]
struct Bucket {
    store: AmazonS3,
    /// Endpoint and bucket, as errors name them.
    place: String,
    prefix: String,
    request_timeout: Duration,
    retry_for: Duration,
}

/// Whose the object is that stands after an attempt to create it.
enum Created {
    Own,
    Other(Bytes),
}

impl Bucket {
    fn new(config: S3Config) -> Result<Bucket, StoreError> {
        // What reqwest's TLS falls back to. Another part of the process may have set the same one already.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let place = match config.endpoint.as_str() {
            "" => format!("s3://{} ({})", config.bucket, config.region),
            endpoint => format!("s3://{} at {endpoint}", config.bucket),
        };
        let is_plain = config.endpoint.starts_with("http://");
        let mut client = ClientOptions::new()
            .with_allow_http(is_plain)
            // Deadlines are ours: they know how much a request carries.
            .with_timeout_disabled()
            .with_connect_timeout(config.request_timeout);
        let bad = |error: Error| StoreError::Io(format!("{place}: the authority's certificate: {error}"));
        let mut authorities = Certificate::from_pem_bundle(&config.ca).map_err(bad)?;
        if is_plain {
            // Else it asks the machine for authorities, and a machine without any is an error to it.
            client = client.with_no_system_certificates(true);
        } else if authorities.is_empty() && rustls_native_certs::load_native_certs().certs.is_empty() {
            // An image of nothing but the program: the authorities that browsers trust.
            let known = webpki_root_certs::TLS_SERVER_ROOT_CERTS.iter();
            authorities =
                known.map(|der| Certificate::from_der(der)).collect::<Result<_, _>>().map_err(bad)?;
        }
        for authority in authorities {
            client = client.with_root_certificate(authority);
        }
        let backoff = BackoffConfig {
            init_backoff: Duration::from_millis(50),
            max_backoff: Duration::from_secs(1),
            base: 2.0,
        };
        let retry = RetryConfig { backoff, max_retries: 1_000, retry_timeout: config.retry_for };
        let mut builder = AmazonS3Builder::from_env()
            .with_bucket_name(&config.bucket)
            .with_region(&config.region)
            .with_client_options(client)
            .with_retry(retry)
            // TLS protects what is sent; a second pass over every byte would only cost.
            .with_unsigned_payload(!is_plain);
        if !config.endpoint.is_empty() {
            builder = builder.with_endpoint(&config.endpoint);
        }
        if let Some(credentials) = &config.credentials {
            builder = builder
                .with_access_key_id(&credentials.access_key_id)
                .with_secret_access_key(&credentials.secret_access_key);
        }
        let store = builder.build().map_err(|error| StoreError::Io(format!("{place}: {error}")))?;
        let (request_timeout, retry_for) = (config.request_timeout, config.retry_for);
        Ok(Bucket { store, place, prefix: config.prefix, request_timeout, retry_for })
    }

    fn named(&self, doing: &str) -> String {
        format!("{}: {doing}", self.place)
    }

    fn deadline(&self, bytes: usize) -> Duration {
        self.request_timeout + self.retry_for + Duration::from_secs((bytes >> 20) as u64)
    }

    fn object(&self, name: &StorePath) -> Result<Path, StoreError> {
        self.path(&names::outer("objects", name))
    }

    fn path(&self, rest: &str) -> Result<Path, StoreError> {
        let name = if self.prefix.is_empty() { rest.to_owned() } else { format!("{}/{rest}", self.prefix) };
        Path::parse(&name).map_err(|error| StoreError::Io(self.named(&error.to_string())))
    }

    /// Creates an object, or finds out whose the one is that stands there.
    async fn create(&self, path: &Path, bytes: Bytes) -> Result<Created, StoreError> {
        for _ in 0..CONFLICTS_MAX {
            let options = PutOptions { mode: PutMode::Create, ..PutOptions::default() };
            let put = self.store.put_opts(path, PutPayload::from(bytes.clone()), options).await;
            match put {
                Ok(_) => return Ok(Created::Own),
                Err(Error::AlreadyExists { .. }) => {}
                Err(error) => return Err(self.failure(&format!("put {path}"), &error)),
            }
            match self.get(path, 0, usize::MAX).await {
                Ok(found) if found == bytes => return Ok(Created::Own),
                Ok(found) => return Ok(Created::Other(found)),
                // Two writers at once: the server refused both, or one while the other was not done.
                Err(StoreError::NotFound) => tokio::time::sleep(CONFLICT_WAIT).await,
                Err(error) => return Err(error),
            }
        }
        Err(StoreError::Io(self.named(&format!("put {path}: taken, and yet not there"))))
    }

    async fn replace(&self, path: &Path, bytes: Bytes) -> Result<(), StoreError> {
        let put = self.store.put_opts(path, PutPayload::from(bytes), PutOptions::default()).await;
        put.map(drop).map_err(|error| self.failure(&format!("put {path}"), &error))
    }

    async fn get(&self, path: &Path, pos: u64, len: usize) -> Result<Bytes, StoreError> {
        let failure = |error: &Error| self.failure(&format!("get {path}"), error);
        if len == 0 || pos > RANGE_MAX {
            return self.store.head(path).await.map(|_| Bytes::new()).map_err(|error| failure(&error));
        }
        let range = match pos.saturating_add(len as u64) {
            end if end <= RANGE_MAX => Some(GetRange::Bounded(pos..end)),
            // A whole object without a range: an empty one has none that could be asked for.
            _ if pos == 0 => None,
            _ => Some(GetRange::Offset(pos)),
        };
        let options = GetOptions { range, ..GetOptions::default() };
        let got = match self.store.get_opts(path, options).await {
            Ok(got) => got.bytes().await,
            Err(error) => Err(error),
        };
        match got {
            Ok(bytes) => Ok(bytes),
            Err(error) if is_beyond_the_end(&error) => Ok(Bytes::new()),
            Err(error) => Err(failure(&error)),
        }
    }

    async fn list(&self, dir: &Path) -> Result<Vec<Entry>, StoreError> {
        let listed = self.store.list_with_delimiter(Some(dir)).await;
        let listed = match listed {
            // A server for tests says so of a folder that does not exist; its plain listing knows better.
            Err(error) if is_no_bucket(&error) && self.all_below(dir).await?.is_empty() => {
                return Ok(Vec::new());
            }
            listed => listed.map_err(|error| self.failure(&format!("list {dir}"), &error))?,
        };
        let name = |path: &Path| {
            let rest = path.as_ref().strip_prefix(dir.as_ref())?.strip_prefix('/')?;
            if rest.contains('/') { None } else { names::decode(rest) }
        };
        let dirs = listed.common_prefixes.iter().filter_map(name);
        let dirs = dirs.map(|name| Entry { name, len: 0, is_dir: true });
        let objects = listed.objects.iter().filter_map(|object| Some((name(&object.location)?, object.size)));
        let objects = objects.map(|(name, len)| Entry { name, len, is_dir: false });
        let mut entries: Vec<Entry> = dirs.chain(objects).collect();
        entries.sort();
        entries.dedup();
        Ok(entries)
    }

    /// Every object below a directory with its size.
    async fn all_below(&self, dir: &Path) -> Result<Vec<(Path, u64)>, StoreError> {
        let found: Result<Vec<_>, Error> = self.store.list(Some(dir)).try_collect().await;
        let found = found.map_err(|error| self.failure(&format!("list {dir}"), &error))?;
        let is_below =
            |path: &Path| path.as_ref().strip_prefix(dir.as_ref()).is_some_and(|rest| rest.starts_with('/'));
        let below = found.into_iter().filter(|object| is_below(&object.location));
        Ok(below.map(|object| (object.location, object.size)).collect())
    }

    async fn delete_one(&self, path: &Path) -> Result<(), StoreError> {
        match self.store.delete(path).await {
            Ok(()) => Ok(()),
            Err(error) => match self.failure(&format!("delete {path}"), &error) {
                StoreError::NotFound => Ok(()),
                error => Err(error),
            },
        }
    }

    async fn delete_all(&self, paths: Vec<Path>) -> Result<(), StoreError> {
        if paths.is_empty() {
            return Ok(());
        }
        let paths = Box::pin(futures_util::stream::iter(paths.into_iter().map(Ok)));
        let deleted = self.store.delete_stream(paths).try_for_each(|_| async { Ok(()) }).await;
        deleted.map_err(|error| self.failure("delete", &error))
    }

    /// What an error of the store means, in one line that names the place.
    fn failure(&self, doing: &str, error: &Error) -> StoreError {
        let text = error.to_string();
        if is_no_bucket(error) {
            return StoreError::Io(format!(
                "{}: there is no such bucket: create it, or correct its name",
                self.place
            ));
        }
        match error {
            Error::NotFound { .. } => StoreError::NotFound,
            Error::AlreadyExists { .. } => StoreError::AlreadyExists,
            _ if is_denied(error) => {
                let hint = "denied: check the credentials, what they allow, and the clock";
                StoreError::Io(format!("{}: {doing}: {hint}: {}", self.place, one_line(&text)))
            }
            _ => {
                let (cause, is_unreachable) = cause(error);
                let hint = match is_unreachable {
                    true => "it cannot be reached: check the endpoint, and whether it runs",
                    false => &text,
                };
                let cause = if hint.contains(&cause) { String::new() } else { format!(": {cause}") };
                StoreError::Io(format!("{}: {doing}: {}{cause}", self.place, one_line(hint)))
            }
        }
    }
}

fn is_no_bucket(error: &Error) -> bool {
    error.to_string().contains("NoSuchBucket")
}

/// Not every kind of request says it by the kind of its error.
fn is_denied(error: &Error) -> bool {
    let text = error.to_string();
    matches!(error, Error::PermissionDenied { .. } | Error::Unauthenticated { .. })
        || text.contains("status code: 403")
        || text.contains("status code: 401")
}

/// What lies at the bottom of an error, and whether no connection was made; no kind of error says so.
fn cause(error: &Error) -> (String, bool) {
    let mut is_unreachable = false;
    let mut deepest: &dyn std::error::Error = error;
    while let Some(source) = deepest.source() {
        deepest = source;
        is_unreachable |= deepest.to_string().contains("(Connect)");
    }
    (one_line(&deepest.to_string()), is_unreachable)
}

/// A range of which the object has not one byte.
fn is_beyond_the_end(error: &Error) -> bool {
    if matches!(error, Error::NotFound { .. }) {
        return false;
    }
    let text = error.to_string();
    text.contains("status code: 416")
        || text.contains("416 Range Not Satisfiable")
        || text.contains("<Code>InvalidRange")
}

impl fmt::Debug for S3Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("S3Credentials").field("access_key_id", &self.access_key_id).finish_non_exhaustive()
    }
}
