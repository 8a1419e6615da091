//! ApiVersions (KIP-35, KIP-511): what this broker speaks. The only request whose unknown versions are
//! answered: with version 0, so that a client from the future can step back.

use bytes::Bytes;
use kafka::frame::RequestHeader;
use kafka::messages::api_versions_response::ApiVersion;
use kafka::messages::{ApiVersionsRequest, ApiVersionsResponse};
use kafka::{ADVERTISED, ErrorCode, api, private};

use super::{Answer, Ctx, RAW_KEYS, message};

pub fn handle(ctx: &Ctx, header: &RequestHeader, body: Bytes) -> Answer {
    let version = header.api_version;
    if !api::is_supported(api::API_VERSIONS, version) {
        return Answer::message(&response(ctx, ErrorCode::UnsupportedVersion), 0);
    }
    let request: ApiVersionsRequest = match message::read(header, body) {
        Ok(request) => request,
        Err(answer) => return answer,
    };
    let named =
        is_software_name(&request.client_software_name) && is_software_name(&request.client_software_version);
    let error = if version >= 3 && !named { ErrorCode::InvalidRequest } else { ErrorCode::None };
    Answer::message(&response(ctx, error), version)
}

fn response(ctx: &Ctx, error: ErrorCode) -> ApiVersionsResponse {
    let range =
        |key, min, max| ApiVersion::default().with_api_key(key).with_min_version(min).with_max_version(max);
    let raw = ctx.connection.listener.raw;
    let offered = ADVERTISED.iter().filter(|r| !raw || RAW_KEYS.contains(&r.key));
    let mut keys: Vec<_> = offered.map(|r| range(r.key, r.min, r.max)).collect();
    if ctx.may_mirror() {
        keys.extend(private::KEYS.map(|key| range(key, private::VERSION, private::VERSION)));
    }
    ApiVersionsResponse::default().with_error_code(error.code()).with_api_keys(keys)
}

/// KIP-511: letters and digits, with `.` and `-` between them.
fn is_software_name(name: &str) -> bool {
    let edge = |byte: Option<&u8>| byte.is_some_and(u8::is_ascii_alphanumeric);
    let bytes = name.as_bytes();
    edge(bytes.first())
        && edge(bytes.last())
        && bytes.iter().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn software_names_follow_kip_511() {
        for good in ["librdkafka", "apache-kafka-java", "2.0.2", "v"] {
            assert!(is_software_name(good), "{good}");
        }
        for bad in ["", "-x", "x-", "a b", "é"] {
            assert!(!is_software_name(bad), "{bad}");
        }
    }
}
