//! The question and the answer: a big-endian u32 length, and JSON of at most 64 KiB.

use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};

/// What a joining region says of itself.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct Request {
    /// 2; 1 has neither `vouched` nor `knows`.
    pub version: u32,
    /// NAMESPACE/NAME of the LinkGrant.
    pub grant: String,
    pub token: String,
    /// Name of the region that joins.
    pub region: String,
    /// PEM of the authorities that sign its mirrors' certificates.
    pub authorities: String,
    /// PEM: former authorities speak for new ones; see `link/vouching.rs`.
    #[serde(default)]
    pub vouched: String,
    /// Mark of the accepting region's authorities that are known already; empty at first.
    #[serde(default)]
    pub knows: String,
}

/// What the accepting region says.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub enum Answer {
    #[serde(rename_all = "camelCase")]
    Joined {
        /// Name of the accepting region.
        region: String,
        /// PEM of the authorities that sign its mirrors' certificates.
        authorities: String,
        /// HOST:PORT of its mirrors, over UDP.
        endpoint: String,
        /// As in the question.
        #[serde(default)]
        vouched: String,
    },
    Refused {
        reason: Refusal,
        message: String,
    },
}

/// Why a token was not taken; also the reason of a condition.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub enum Refusal {
    /// No such grant, or not this token.
    TokenUnknown,
    /// It joined another region, or this one with other authorities, before.
    TokenUsed,
    TokenExpired,
    /// The grant is for another region.
    WrongPeer,
    /// Not a request, or of a version that is not understood.
    Malformed,
    /// The accepting region is not there yet: asked again.
    NotReady,
}

impl Refusal {
    pub fn as_str(self) -> &'static str {
        match self {
            Refusal::TokenUnknown => "TokenUnknown",
            Refusal::TokenUsed => "TokenUsed",
            Refusal::TokenExpired => "TokenExpired",
            Refusal::WrongPeer => "WrongPeer",
            Refusal::Malformed => "Malformed",
            Refusal::NotReady => "NotReady",
        }
    }
}

pub(super) async fn write<M: Serialize>(
    stream: &mut (impl AsyncWrite + Unpin),
    message: &M,
) -> std::io::Result<()> {
    let body = serde_json::to_vec(message)?;
    let length = u32::try_from(body.len()).map_err(|_| too_large())?;
    stream.write_u32(length).await?;
    stream.write_all(&body).await?;
    stream.flush().await
}

pub(super) async fn read<M: for<'a> Deserialize<'a>>(
    stream: &mut (impl AsyncRead + Unpin),
) -> std::io::Result<M> {
    let length = stream.read_u32().await? as usize;
    if length > MESSAGE_BYTES_MAX {
        return Err(too_large());
    }
    let mut body = vec![0; length];
    stream.read_exact(&mut body).await?;
    Ok(serde_json::from_slice(&body)?)
}

fn too_large() -> std::io::Error {
    std::io::Error::other(format!("a message of more than {MESSAGE_BYTES_MAX} bytes"))
}

pub(super) const MESSAGE_BYTES_MAX: usize = 64 << 10;
