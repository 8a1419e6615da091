//! The members of an etcd and which of them is asked: one at a time, the next one when it fails.

use std::error::Error;
use std::future::Future;
use std::time::Duration;

use parking_lot::Mutex;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};
use tonic::{Code, Request, Response, Status};

use super::{EtcdConfig, EtcdTls, api};
use crate::MetaError;

#[derive(Debug)]
pub(super) struct Members {
    endpoints: Vec<Endpoint>,
    current: Mutex<Current>,
    timeout: Duration,
}

#[derive(Debug, Default)]
struct Current {
    member: usize,
    channel: Option<Channel>,
}

/// A connection to one member.
#[derive(Clone)]
pub(super) struct Connected {
    member: usize,
    pub(super) channel: Channel,
}

/// Why etcd did not do what was asked.
#[derive(Debug)]
pub(super) enum Refusal {
    /// The revision that was asked for has been thrown away.
    Compacted,
    /// There is no such lease.
    NoLease,
    Other(MetaError),
}

impl Members {
    pub(super) fn new(config: EtcdConfig) -> Result<Members, MetaError> {
        let bad = |what: String| MetaError::Unavailable(format!("configuration of etcd: {what}"));
        if config.endpoints.is_empty() {
            return Err(bad("no endpoint is named".to_owned()));
        }
        let endpoint = |text: &String| {
            let is_tls = text.starts_with("https://");
            if !is_tls && !text.starts_with("http://") {
                return Err(bad(format!("{text:?} does not begin with http:// or https://")));
            }
            let endpoint = Endpoint::from_shared(text.clone())
                .map_err(|_| bad(format!("{text:?} is no address")))?
                .connect_timeout(config.timeout.min(CONNECT_TIMEOUT_MAX))
                .tcp_nodelay(true)
                // A member that hangs, or that is cut off, must be noticed by watches too.
                .http2_keep_alive_interval(ALIVE_INTERVAL)
                .keep_alive_timeout(ALIVE_TIMEOUT)
                .keep_alive_while_idle(true);
            match (&config.tls, is_tls) {
                (Some(tls), true) => endpoint.tls_config(tls.config()).map_err(|error| bad(cause(&error))),
                (None, true) => Err(bad(format!("{text:?} needs the certificate of its authority"))),
                (_, false) => Ok(endpoint),
            }
        };
        let endpoints = config.endpoints.iter().map(endpoint).collect::<Result<_, _>>()?;
        Ok(Members { endpoints, current: Mutex::default(), timeout: config.timeout })
    }

    pub(super) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// A read may be asked of every member in turn.
    pub(super) async fn read(
        &self,
        doing: &str,
        request: api::RangeRequest,
    ) -> Result<api::RangeResponse, Refusal> {
        let mut attempts = self.endpoints.len();
        loop {
            let ask = |channel| {
                let request = with_leader(request.clone());
                async move { kv(channel).range(request).await }
            };
            match self.ask(doing, ask).await {
                Err(Refusal::Other(error)) if error.is_retryable() && attempts > 0 => attempts -= 1,
                outcome => return outcome,
            }
        }
    }

    /// A write is sent once.
    pub(super) async fn write(
        &self,
        doing: &str,
        request: api::TxnRequest,
    ) -> Result<api::TxnResponse, MetaError> {
        let outcome = self.ask(doing, |channel| async move { kv(channel).txn(with_leader(request)).await });
        outcome.await.map_err(MetaError::from)
    }

    /// One request to the member in use, which is left if it does not answer.
    pub(super) async fn ask<T, F>(
        &self,
        doing: &str,
        request: impl FnOnce(Channel) -> F,
    ) -> Result<T, Refusal>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        let connected = self.connected().await?;
        match tokio::time::timeout(self.timeout, request(connected.channel.clone())).await {
            Ok(Ok(answer)) => Ok(answer.into_inner()),
            Ok(Err(status)) => {
                let place = self.place(connected.member);
                if is_trouble_of_the_member(&status) {
                    self.leave(&connected);
                }
                Err(refusal(&format!("{place}: {doing}"), &status))
            }
            Err(_) => {
                self.leave(&connected);
                let place = self.place(connected.member);
                let text = format!("{place}: {doing}: no answer within {:?}", self.timeout);
                Err(Refusal::Other(MetaError::Unavailable(text)))
            }
        }
    }

    /// The connection in use, or a new one to the first member that takes it.
    pub(super) async fn connected(&self) -> Result<Connected, MetaError> {
        let first = {
            let current = self.current.lock();
            if let Some(channel) = &current.channel {
                return Ok(Connected { member: current.member, channel: channel.clone() });
            }
            current.member
        };
        let mut reasons = Vec::new();
        for step in 0..self.endpoints.len() {
            let member = (first + step) % self.endpoints.len();
            match self.endpoints[member].connect().await {
                Ok(channel) => {
                    *self.current.lock() = Current { member, channel: Some(channel.clone()) };
                    return Ok(Connected { member, channel });
                }
                Err(error) => reasons.push(format!("{}: {}", self.place(member), cause(&error))),
            }
        }
        Err(MetaError::Unavailable(format!("no etcd answers: {}", reasons.join("; "))))
    }

    /// Nothing more is asked of this member for the moment.
    pub(super) fn leave(&self, connected: &Connected) {
        let mut current = self.current.lock();
        if current.member == connected.member {
            *current = Current { member: (connected.member + 1) % self.endpoints.len(), channel: None };
        }
    }

    fn place(&self, member: usize) -> String {
        format!("etcd at {}", self.endpoints[member].uri())
    }
}

const CONNECT_TIMEOUT_MAX: Duration = Duration::from_secs(1);
const ALIVE_INTERVAL: Duration = Duration::from_secs(2);
const ALIVE_TIMEOUT: Duration = Duration::from_secs(2);
/// Of one answer: a page of the largest values.
const ANSWER_BYTES_MAX: usize = 256 << 20;

fn kv(channel: Channel) -> api::kv_client::KvClient<Channel> {
    api::kv_client::KvClient::new(channel).max_decoding_message_size(ANSWER_BYTES_MAX)
}

/// A member that is cut off from the others refuses such a request at once, and ends such a stream.
pub(super) fn with_leader<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.metadata_mut().insert("hasleader", tonic::metadata::MetadataValue::from_static("true"));
    request
}

fn is_trouble_of_the_member(status: &Status) -> bool {
    use Code::{Cancelled, DeadlineExceeded, Internal, Unavailable, Unknown};
    matches!(status.code(), Unavailable | Unknown | DeadlineExceeded | Cancelled | Internal)
}

pub(super) fn refusal(doing: &str, status: &Status) -> Refusal {
    let text = status.message();
    if text.contains("has been compacted") {
        return Refusal::Compacted;
    }
    if text.contains("requested lease not found") {
        return Refusal::NoLease;
    }
    if text.contains("database space exceeded") {
        return Refusal::Other(MetaError::Full);
    }
    let text = if text.is_empty() { status.code().description() } else { text };
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    Refusal::Other(MetaError::Unavailable(format!("{doing}: {text}")))
}

/// The innermost cause is the one that says something ("Connection refused").
fn cause(error: &dyn Error) -> String {
    let mut cause = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    cause.to_string()
}

impl EtcdTls {
    fn config(&self) -> ClientTlsConfig {
        let config = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(&self.ca));
        match &self.identity {
            Some((certificate, key)) => config.identity(Identity::from_pem(certificate, key)),
            None => config,
        }
    }
}

impl From<MetaError> for Refusal {
    fn from(error: MetaError) -> Refusal {
        Refusal::Other(error)
    }
}

impl From<Refusal> for MetaError {
    fn from(refusal: Refusal) -> MetaError {
        match refusal {
            Refusal::Other(error) => error,
            Refusal::NoLease => MetaError::GuardGone,
            Refusal::Compacted => MetaError::Unavailable("etcd has thrown that revision away".to_owned()),
        }
    }
}
