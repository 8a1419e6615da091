//! Produce in a lane: only the transactional id is renamed. Which lane the records are in is said by the
//! client id, and the partition's owner puts them into it: it knows the list that reads their headers.
//!
//! Record bytes are neither copied nor looked at.

use bytes::{BufMut, Bytes, BytesMut};
use kafka::messages::ProduceResponse;
use kafka::produce::{ProduceRequest, VERSION_MIN};
use kafka::{DecodeError, cold};
use lane_core::Lane;

use crate::rewrite::{Place, Plan, Request, suffixed};

const FLEXIBLE: i16 = 9;
/// From here on an answer may name brokers by their addresses (KIP-951).
const ENDPOINTS_SINCE: i16 = 10;

pub fn request(lane: &Lane, version: i16, body: Bytes) -> Result<Request, DecodeError> {
    if version < VERSION_MIN {
        // Refused by the broker, in the layout of that version.
        return Ok(Request::Forward(body, Plan::Pass));
    }
    let asked = ProduceRequest::decode(version, body.clone())?;
    let plan = match asked.acks {
        0 => Plan::NoAnswer,
        _ if version >= ENDPOINTS_SINCE => Plan::Rewrite,
        _ => Plan::Pass,
    };
    let body = match &asked.transactional_id {
        None => body,
        Some(id) => with_transactional_id(version, &body, id.len(), &suffixed(lane, id)),
    };
    Ok(Request::Forward(body, plan))
}

/// An answer of version 10 or above, without other addresses than the router's.
pub fn answer(place: Place<'_>, version: i16, body: Bytes) -> Result<Bytes, Box<dyn std::error::Error>> {
    let mut message: ProduceResponse = cold::decode_any_size(version, body.clone())?;
    if message.node_endpoints.is_empty() {
        return Ok(body);
    }
    message
        .node_endpoints
        .iter_mut()
        .for_each(|node| place.put(node.node_id, &mut node.host, &mut node.port));
    Ok(cold::encoded(&message, version)?)
}

/// The transactional id is the first field of the body.
fn with_transactional_id(version: i16, body: &Bytes, old_len: usize, id: &str) -> Bytes {
    let mut out = BytesMut::with_capacity(body.len() + id.len() - old_len + 1);
    let old_field = if version >= FLEXIBLE {
        put_varint(&mut out, id.len() as u32 + 1);
        varint_len(old_len as u32 + 1) + old_len
    } else {
        out.put_i16(id.len() as i16);
        2 + old_len
    };
    out.put_slice(id.as_bytes());
    out.put_slice(&body[old_field..]);
    out.freeze()
}

fn put_varint(out: &mut BytesMut, mut value: u32) {
    while value >= 0x80 {
        out.put_u8(value as u8 | 0x80);
        value >>= 7;
    }
    out.put_u8(value as u8);
}

fn varint_len(value: u32) -> usize {
    let bits = 32 - value.leading_zeros() as usize;
    bits.div_ceil(7).max(1)
}

#[cfg(test)]
mod tests {
    use kafka::messages::produce_request::{PartitionProduceData, TopicProduceData};
    use kafka::messages::produce_response::NodeEndpoint;
    use kafka::messages::{BrokerId, ProduceRequest as ColdRequest, TransactionalId};
    use kafka::{BatchBuilder, Offset, StrBytes, TimestampMs};

    use super::*;
    use crate::brokers::Ports;

    fn lane() -> Lane {
        Lane::parse("boe-cart").unwrap()
    }

    fn text(text: &str) -> StrBytes {
        StrBytes::from_string(text.to_owned())
    }

    fn asked(acks: i16, transactional_id: Option<&str>) -> ColdRequest {
        let mut batch = BatchBuilder::new(Offset(0), TimestampMs(1), kafka::batch::Codec::Lz4);
        batch.push(0, 0, Some(b"k"), None, &[("x-lane", Some(b"boe-other"))]);
        let partition = PartitionProduceData::default().with_index(7).with_records(Some(batch.build().bytes));
        let topic =
            TopicProduceData::default().with_name(text("t").into()).with_partition_data(vec![partition]);
        ColdRequest::default()
            .with_transactional_id(transactional_id.map(|id| TransactionalId(text(id))))
            .with_acks(acks)
            .with_timeout_ms(5)
            .with_topic_data(vec![topic])
    }

    fn forwarded(version: i16, body: &Bytes) -> (Bytes, Plan) {
        match request(&lane(), version, body.clone()) {
            Ok(Request::Forward(body, plan)) => (body, plan),
            other => panic!("not forwarded: {other:?}"),
        }
    }

    #[test]
    fn a_request_goes_on_as_it_came_but_for_its_transactional_id() {
        for version in 3..=12 {
            let plain = cold::encoded(&asked(-1, None), version).unwrap();
            let plan = if version < 10 { Plan::Pass } else { Plan::Rewrite };
            assert_eq!(forwarded(version, &plain), (plain, plan), "version {version}");
            for id in ["", "tx", &"x".repeat(115), &"x".repeat(126), &"x".repeat(127), &"x".repeat(20_000)] {
                let body = cold::encoded(&asked(-1, Some(id)), version).unwrap();
                let wanted = asked(-1, Some(&format!("{id}@boe-cart")));
                let wanted = cold::encoded(&wanted, version).unwrap();
                assert_eq!(forwarded(version, &body).0, wanted, "version {version}, {} long", id.len());
            }
            let silent = cold::encoded(&asked(0, None), version).unwrap();
            assert_eq!(forwarded(version, &silent), (silent, Plan::NoAnswer));
        }
    }

    #[test]
    fn an_answer_names_no_address_but_the_routers() {
        let lane = lane();
        let place = Place { lane: &lane, host: "router", ports: Ports::alone(7000) };
        let node = NodeEndpoint::default().with_node_id(BrokerId(1)).with_host(text("inner")).with_port(9097);
        for version in 10..=12 {
            let quiet = cold::encoded(&ProduceResponse::default(), version).unwrap();
            assert_eq!(answer(place, version, quiet.clone()).unwrap(), quiet);
            let told = ProduceResponse::default().with_node_endpoints(vec![node.clone()]);
            let body = answer(place, version, cold::encoded(&told, version).unwrap()).unwrap();
            let told: ProduceResponse = cold::decode_any_size(version, body).unwrap();
            assert_eq!((&*told.node_endpoints[0].host, told.node_endpoints[0].port), ("router", 7000));
        }
    }
}
