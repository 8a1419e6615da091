//! InitProducerId for idempotent producers (KIP-98). Transactional producers are refused: transactions
//! are not there yet.

use bytes::Bytes;
use kafka::ErrorCode;
use kafka::frame::RequestHeader;
use kafka::messages::{InitProducerIdRequest, InitProducerIdResponse, ProducerId};

use super::{Answer, Body, Ctx, message};

pub fn handle(ctx: &Ctx, header: &RequestHeader, body: Bytes) -> Answer {
    let version = header.api_version;
    let request: InitProducerIdRequest = match message::read(header, body) {
        Ok(request) => request,
        Err(answer) => return answer,
    };
    let answer = |error: ErrorCode, id: i64, epoch: i16| {
        InitProducerIdResponse::default()
            .with_error_code(error.code())
            .with_producer_id(ProducerId(id))
            .with_producer_epoch(epoch)
    };
    match &request.transactional_id {
        None => {}
        Some(id) if id.is_empty() => {
            return Answer::message(&answer(ErrorCode::InvalidRequest, -1, -1), version);
        }
        Some(id) => {
            tracing::info!(transactional_id = %id.as_str(), "refused: transactions are not supported yet");
            return Answer::message(&answer(ErrorCode::UnsupportedVersion, -1, -1), version);
        }
    }
    let broker = ctx.broker.clone();
    Answer::Later(Box::pin(async move {
        let response = match broker.producer_ids.next().await {
            Ok(id) => answer(ErrorCode::None, id, 0),
            Err(error) => {
                tracing::warn!(%error, "no producer id can be given out");
                answer(ErrorCode::CoordinatorNotAvailable, -1, -1)
            }
        };
        Body::message(&response, version)
    }))
}
