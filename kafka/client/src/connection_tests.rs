//! A connection against a small broker of the test's own: order, fall-back versions, deadlines.
//! The real broker is tested elsewhere; this one can misbehave.

use std::future::Future;

use kafka::messages::api_versions_response::ApiVersion;
use kafka::messages::{MetadataRequest, MetadataResponse};
use tokio::net::TcpListener;

use super::*;

/// A broker of a few lines: hands every request to `answer`, which says what goes back.
async fn broker<F, Out>(mut answer: F) -> Endpoint
where
    F: FnMut(TcpStream) -> Out + Send + 'static,
    Out: Future<Output = ()> + Send,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            answer(stream).await;
        }
    });
    Endpoint::new("127.0.0.1", port)
}

async fn request(stream: &mut TcpStream, buffer: &mut BytesMut) -> Option<(RequestHeader, Bytes)> {
    loop {
        if let Some(mut frame) = frame::next_frame(buffer, 1 << 20).unwrap() {
            let header = frame::parse_request_header(&mut frame).unwrap();
            return Some((header, frame));
        }
        if stream.read_buf(buffer).await.ok()? == 0 {
            return None;
        }
    }
}

async fn respond(stream: &mut TcpStream, header: &RequestHeader, body: &[u8]) {
    let mut out = BytesMut::new();
    out.put_i32(0);
    frame::put_response_header(&mut out, header.api_key, header.api_version, header.correlation_id);
    out.extend_from_slice(body);
    let len = out.len() as i32 - 4;
    out[..4].copy_from_slice(&len.to_be_bytes());
    stream.write_all(&out).await.unwrap();
}

fn versions(max_metadata: i16) -> ApiVersionsResponse {
    let range = |key, max| ApiVersion::default().with_api_key(key).with_min_version(0).with_max_version(max);
    ApiVersionsResponse::default().with_api_keys(vec![range(3, max_metadata), range(18, 3)])
}

async fn greet(stream: &mut TcpStream, buffer: &mut BytesMut) {
    let (header, _) = request(stream, buffer).await.unwrap();
    assert_eq!((header.api_key, header.api_version), (18, 3));
    respond(stream, &header, &cold::encoded(&versions(9), 3).unwrap()).await;
}

fn quick() -> ConnectOptions {
    ConnectOptions {
        connect_timeout: Duration::from_secs(5),
        request_timeout: Duration::from_millis(300),
        ..ConnectOptions::default()
    }
}

#[tokio::test]
async fn pipelined_requests_get_their_own_answers() {
    let endpoint = broker(|mut stream| async move {
        let mut buffer = BytesMut::new();
        greet(&mut stream, &mut buffer).await;
        // All are read before the first is answered.
        let mut all = Vec::new();
        while all.len() < 20 {
            all.push(request(&mut stream, &mut buffer).await.unwrap());
        }
        for (header, body) in all {
            respond(&mut stream, &header, &body).await;
        }
        request(&mut stream, &mut buffer).await;
    })
    .await;
    let connection = Connection::connect(&endpoint, &quick()).await.unwrap();
    let mut answers = Vec::new();
    for number in 0..20u8 {
        // Large ones are written in pieces.
        let body = vec![Bytes::from(vec![number; 40_000]), Bytes::from_static(b"end")];
        answers.push(connection.start(3, 9, body).await.unwrap());
    }
    for (number, answer) in answers.into_iter().enumerate() {
        let answer = answer.received().await.unwrap();
        assert_eq!((answer.len(), answer[0], &answer[40_000..]), (40_003, number as u8, &b"end"[..]));
    }
}

#[tokio::test]
async fn the_highest_common_version_is_used_and_none_is_an_error() {
    let endpoint = broker(|mut stream| async move {
        let mut buffer = BytesMut::new();
        greet(&mut stream, &mut buffer).await;
        let (header, _) = request(&mut stream, &mut buffer).await.unwrap();
        assert_eq!((header.api_key, header.api_version), (3, 9));
        assert_eq!(header.client_id.as_deref(), Some("sealane"));
        respond(&mut stream, &header, &cold::encoded(&MetadataResponse::default(), 9).unwrap()).await;
        request(&mut stream, &mut buffer).await;
    })
    .await;
    let connection = Connection::connect(&endpoint, &quick()).await.unwrap();
    connection.call(&MetadataRequest::default().with_topics(Some(Vec::new()))).await.unwrap();
    let error = connection.version(3, 10, 12).unwrap_err().to_string();
    assert!(error.contains("Metadata") && error.contains("10 to 12"), "{error}");
    assert!(connection.version(0, 0, 12).is_err(), "not offered at all");
}

#[tokio::test]
async fn a_broker_that_knows_only_the_oldest_negotiation_is_asked_again() {
    let endpoint = broker(|mut stream| async move {
        let mut buffer = BytesMut::new();
        let (header, _) = request(&mut stream, &mut buffer).await.unwrap();
        let refused = versions(4).with_error_code(ErrorCode::UnsupportedVersion.code());
        respond(&mut stream, &header, &cold::encoded(&refused, 0).unwrap()).await;
        let (header, _) = request(&mut stream, &mut buffer).await.unwrap();
        assert_eq!(header.api_version, 0);
        respond(&mut stream, &header, &cold::encoded(&versions(4), 0).unwrap()).await;
        request(&mut stream, &mut buffer).await;
    })
    .await;
    let connection = Connection::connect(&endpoint, &quick()).await.unwrap();
    assert_eq!(connection.offered(3), Some((0, 4)));
}

#[tokio::test]
async fn an_answer_that_does_not_come_ends_the_connection_for_all() {
    let endpoint = broker(|mut stream| async move {
        let mut buffer = BytesMut::new();
        greet(&mut stream, &mut buffer).await;
        while request(&mut stream, &mut buffer).await.is_some() {}
    })
    .await;
    let connection = Connection::connect(&endpoint, &quick()).await.unwrap();
    let late = connection.send(3, 9, Bytes::new()).await.unwrap_err();
    assert!(matches!(late, ClientError::Timeout { .. }) && late.is_retriable(), "{late}");
    let after = connection.send(3, 9, Bytes::new()).await.unwrap_err();
    assert!(matches!(after, ClientError::Closed { .. }), "{after}");
    assert!(connection.is_closed());
}

#[tokio::test]
async fn a_wrong_answer_and_a_closed_socket_are_told_to_whoever_waits() {
    let endpoint = broker(|mut stream| async move {
        let mut buffer = BytesMut::new();
        greet(&mut stream, &mut buffer).await;
        let (mut header, _) = request(&mut stream, &mut buffer).await.unwrap();
        header.correlation_id += 1;
        respond(&mut stream, &header, b"").await;
    })
    .await;
    let connection = Connection::connect(&endpoint, &quick()).await.unwrap();
    let wrong = connection.send(3, 9, Bytes::new()).await.unwrap_err().to_string();
    assert!(wrong.contains("wrong order"), "{wrong}");
    let refused = Connection::connect(&Endpoint::new("127.0.0.1", 1), &quick()).await;
    assert!(refused.is_err_and(|error| error.to_string().starts_with("cannot connect to 127.0.0.1:1")));
}
