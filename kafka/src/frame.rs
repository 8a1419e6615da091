//! Frames and headers: how requests and responses are cut out of a stream of bytes.
//!
//! A frame is an int32 length and that many bytes. Owns the request header (v1, and v2 of the flexible
//! versions, KIP-482) and the response header (v0, v1). What follows the header belongs to the codecs.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use kafka_protocol::protocol::StrBytes;

use crate::api;
use crate::primitive::{DecodeError, Reader};

/// What stands before every request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestHeader {
    pub api_key: i16,
    pub api_version: i16,
    pub correlation_id: i32,
    pub client_id: Option<StrBytes>,
}

/// Why a stream cannot go on: the connection must be closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    #[error("a frame of {len} bytes is over the limit of {max}")]
    TooLarge { len: usize, max: usize },
    #[error("a frame has the impossible length {0}")]
    Length(i32),
    #[error("these bytes are TLS, this listener is plain")]
    Tls,
    #[error("request header: {0}")]
    Header(#[from] DecodeError),
}

/// Takes the next whole frame (without its length) off `buf`; `None` while it is not all there.
/// Never reserves more than what has arrived: the caller decides how to read on.
pub fn next_frame(buf: &mut BytesMut, max: usize) -> Result<Option<Bytes>, FrameError> {
    let Some(len) = frame_len(buf, max)? else { return Ok(None) };
    if buf.len() < 4 + len {
        return Ok(None);
    }
    buf.advance(4);
    Ok(Some(buf.split_to(len).freeze()))
}

/// Length of the frame at the front of `buf` (its four length bytes not counted), once known.
pub fn frame_len(buf: &[u8], max: usize) -> Result<Option<usize>, FrameError> {
    // A TLS ClientHello begins 16 03: as a length it would be over 350 MB.
    if buf.len() >= 3 && buf[0] == 0x16 && buf[1] == 0x03 && buf[2] <= 4 {
        return Err(FrameError::Tls);
    }
    let Some(prefix) = buf.first_chunk::<4>() else { return Ok(None) };
    let len = i32::from_be_bytes(*prefix);
    let Ok(bytes) = usize::try_from(len) else { return Err(FrameError::Length(len)) };
    if bytes > max {
        return Err(FrameError::TooLarge { len: bytes, max });
    }
    Ok(Some(bytes))
}

/// Takes the header off a request; what stays in `frame` is the body.
///
/// The header of an unknown version of ApiVersions is read as far as it makes sense, because that
/// request must be answered (KIP-511). For an unknown API key only the fixed part counts.
pub fn parse_request_header(frame: &mut Bytes) -> Result<RequestHeader, FrameError> {
    let mut fixed = Reader::new(std::mem::take(frame), false);
    let api_key = fixed.i16()?;
    let api_version = fixed.i16()?;
    let correlation_id = fixed.i32()?;
    let rest = fixed.into_rest();
    let lenient = !api::is_supported(api_key, api_version);
    let (client_id, body) = match parse_rest(rest.clone(), api::request_header_version(api_key, api_version))
    {
        Ok(parsed) => parsed,
        Err(_) if lenient => (None, rest),
        Err(error) => return Err(error.into()),
    };
    *frame = body;
    Ok(RequestHeader { api_key, api_version, correlation_id, client_id })
}

fn parse_rest(bytes: Bytes, header_version: i16) -> Result<(Option<StrBytes>, Bytes), DecodeError> {
    // The client id keeps its classic encoding in header v2.
    let mut reader = Reader::new(bytes, false);
    let client_id = reader.nullable_string()?;
    if header_version < 2 {
        return Ok((client_id, reader.into_rest()));
    }
    let mut reader = Reader::new(reader.into_rest(), true);
    reader.skip_tags()?;
    Ok((client_id, reader.into_rest()))
}

/// Appends a request header.
pub fn put_request_header(out: &mut BytesMut, header: &RequestHeader) {
    out.put_i16(header.api_key);
    out.put_i16(header.api_version);
    out.put_i32(header.correlation_id);
    match &header.client_id {
        Some(id) => {
            out.put_i16(id.len() as i16);
            out.put_slice(id.as_bytes());
        }
        None => out.put_i16(-1),
    }
    if api::request_header_version(header.api_key, header.api_version) >= 2 {
        out.put_u8(0);
    }
}

/// Appends a response header: the correlation id and, in v1, an empty list of tagged fields.
pub fn put_response_header(out: &mut BytesMut, api_key: i16, api_version: i16, correlation_id: i32) {
    out.put_i32(correlation_id);
    if api::response_header_version(api_key, api_version) >= 1 {
        out.put_u8(0);
    }
}

/// Takes a response header off a response; returns the correlation id.
pub fn parse_response_header(frame: &mut Bytes, api_key: i16, api_version: i16) -> Result<i32, FrameError> {
    let flexible = api::response_header_version(api_key, api_version) >= 1;
    let mut reader = Reader::new(std::mem::take(frame), flexible);
    let correlation_id = reader.i32()?;
    reader.skip_tags()?;
    *frame = reader.into_rest();
    Ok(correlation_id)
}
