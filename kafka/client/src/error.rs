//! What can go wrong between a client and a cluster, and what to do next.

use kafka::{DecodeError, ErrorCode, FrameError, cold::EncodeError};

use crate::endpoint::Endpoint;

/// Shown to people as one line that names the thing.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ClientError {
    #[error("cannot connect to {endpoint}: {reason}")]
    Connect { endpoint: Endpoint, reason: String },
    #[error("no answer from {endpoint} to {api} within {seconds} s")]
    Timeout { endpoint: Endpoint, api: &'static str, seconds: u64 },
    #[error("connection to {endpoint} closed: {reason}")]
    Closed { endpoint: Endpoint, reason: String },
    #[error("{endpoint} does not offer {api} in a version from {min} to {max}")]
    Unsupported { endpoint: Endpoint, api: &'static str, min: i16, max: i16 },
    #[error("answer cannot be read: {0}")]
    Decode(#[from] DecodeError),
    #[error("frame cannot be read: {0}")]
    Frame(#[from] FrameError),
    #[error("request cannot be written: {0}")]
    Encode(#[from] EncodeError),
    #[error("{what}: {}{}", code_name(*.code), .message.as_ref().map(|m| format!(": {m}")).unwrap_or_default())]
    Refused { what: String, code: i16, message: Option<String> },
    #[error("{0}")]
    Records(#[from] kafka::BatchError),
}

impl ClientError {
    /// The error of an answer, if its code is one.
    pub fn check(
        what: impl FnOnce() -> String,
        code: i16,
        message: Option<String>,
    ) -> Result<(), ClientError> {
        if code == ErrorCode::None.code() {
            return Ok(());
        }
        Err(ClientError::Refused { what: what(), code, message })
    }

    pub fn code(&self) -> Option<ErrorCode> {
        match self {
            ClientError::Refused { code, .. } => ErrorCode::from_code(*code),
            _ => None,
        }
    }

    /// Worth trying again, after metadata has been read anew.
    pub fn is_retriable(&self) -> bool {
        match self {
            ClientError::Connect { .. } | ClientError::Timeout { .. } | ClientError::Closed { .. } => true,
            ClientError::Refused { .. } => self.code().is_some_and(is_retriable),
            _ => false,
        }
    }
}

/// Kafka's retriable codes that a client of ours can meet.
pub fn is_retriable(code: ErrorCode) -> bool {
    matches!(
        code,
        ErrorCode::UnknownTopicOrPartition
            | ErrorCode::LeaderNotAvailable
            | ErrorCode::NotLeaderOrFollower
            | ErrorCode::RequestTimedOut
            | ErrorCode::NetworkException
            | ErrorCode::CoordinatorLoadInProgress
            | ErrorCode::CoordinatorNotAvailable
            | ErrorCode::NotCoordinator
            | ErrorCode::NotEnoughReplicas
            | ErrorCode::NotEnoughReplicasAfterAppend
            | ErrorCode::KafkaStorageError
            | ErrorCode::FencedLeaderEpoch
            | ErrorCode::UnknownLeaderEpoch
            | ErrorCode::OffsetNotAvailable
            | ErrorCode::UnknownTopicId
            | ErrorCode::NotController
    )
}

fn code_name(code: i16) -> String {
    match ErrorCode::from_code(code) {
        Some(known) => format!("{known:?} ({code})"),
        None => format!("error {code}"),
    }
}
