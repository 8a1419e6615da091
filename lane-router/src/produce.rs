//! Produce in a lane: every record is put into the connection's lane, or the partition is refused.
//!
//! A refused partition is answered here with INVALID_RECORD and its record errors; the rest of the
//! request goes on and the two answers become one. A batch that needs nothing goes on as it came.

use bytes::{BufMut, Bytes, BytesMut};
use kafka::messages::produce_response::{
    BatchIndexAndErrorMessage, PartitionProduceResponse, TopicProduceResponse,
};
use kafka::messages::{ProduceResponse as ColdResponse, TopicName};
use kafka::produce::{
    ProducePartition, ProduceRequest, ProduceResponse, ProduceTopic, ProducedPartition, ProducedTopic,
    RecordError, VERSION_MIN,
};
use kafka::{Batch, ErrorCode, StrBytes, cold};
use lane_core::batch::{StampError, stamp};
use lane_core::{Extractors, Lane};

use crate::rewrite::{Plan, Request, suffixed};

/// A partition that is not sent on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RefusedPartition {
    topic: StrBytes,
    answer: ProducedPartition,
}

const FLEXIBLE: i16 = 9;

/// Stamps a request.
pub fn request(lane: &Lane, version: i16, body: Bytes) -> Result<Request, kafka::DecodeError> {
    if version < VERSION_MIN {
        // Refused by the broker, in the layout of that version.
        return Ok(Request::Forward(body, Plan::Pass));
    }
    let mut asked = ProduceRequest::decode(version, body.clone())?;
    let mut changed = asked.transactional_id.is_some();
    asked.transactional_id = asked.transactional_id.map(|id| suffixed(lane, &id));
    let mut refused = Vec::new();
    for topic in &mut asked.topics {
        let name = topic.name.clone();
        topic.partitions.retain_mut(|partition| match stamped(lane, partition) {
            Ok(Some(records)) => {
                partition.records = Some(records);
                changed = true;
                true
            }
            Ok(None) => true,
            Err(answer) => {
                refused.push(RefusedPartition { topic: name.clone(), answer: *answer });
                false
            }
        });
    }
    if !refused.is_empty() {
        asked.topics.retain(|topic| !topic.partitions.is_empty());
        if asked.acks == 0 {
            return Ok(Request::Close("a record of another lane was produced with acks=0".to_owned()));
        }
        if asked.topics.is_empty() {
            return Ok(Request::Answer(refusal(version, &refused)));
        }
        return Ok(Request::Forward(encoded(version, &asked), Plan::Produce(refused)));
    }
    let plan = if asked.acks == 0 { Plan::NoAnswer } else { Plan::Pass };
    Ok(Request::Forward(if changed { encoded(version, &asked) } else { body }, plan))
}

/// The new records, `None` if they stay; a batch that cannot be read goes on for the broker to refuse.
fn stamped(lane: &Lane, partition: &ProducePartition) -> Result<Option<Bytes>, Box<ProducedPartition>> {
    let Some(mut bytes) = partition.records.clone() else { return Ok(None) };
    let Ok(batch) = Batch::split_first(&mut bytes, true) else { return Ok(None) };
    if !bytes.is_empty() || batch.header.is_control() {
        return Ok(None);
    }
    match stamp(&batch, lane, &Extractors::standard()) {
        Ok(stamped) => Ok(stamped.map(|batch| batch.bytes)),
        Err(StampError::Batch(_)) => Ok(None),
        Err(StampError::Records(records)) => {
            let message = format!("this connection is in lane {lane}");
            let mut answer =
                ProducedPartition::failed(partition.index, ErrorCode::InvalidRecord, Some(message));
            answer.record_errors = records
                .into_iter()
                .map(|(index, why)| RecordError { batch_index: index, message: Some(why.to_string()) })
                .collect();
            Err(Box::new(answer))
        }
    }
}

fn refusal(version: i16, refused: &[RefusedPartition]) -> Bytes {
    let mut response = ProduceResponse::default();
    for part in refused {
        match response.topics.iter_mut().find(|t| t.name == part.topic) {
            Some(topic) => topic.partitions.push(part.answer.clone()),
            None => response
                .topics
                .push(ProducedTopic { name: part.topic.clone(), partitions: vec![part.answer.clone()] }),
        }
    }
    let mut out = BytesMut::new();
    response.encode(version, &mut out);
    out.freeze()
}

/// The broker's answer with what was refused here.
pub fn merged(
    version: i16,
    body: Bytes,
    refused: &[RefusedPartition],
) -> Result<Bytes, Box<dyn std::error::Error>> {
    let mut response: ColdResponse = cold::decode_any_size(version, body)?;
    for part in refused {
        let answer = cold_partition(&part.answer);
        match response.responses.iter_mut().find(|t| t.name.0 == part.topic) {
            Some(topic) => topic.partition_responses.push(answer),
            None => response.responses.push(
                TopicProduceResponse::default()
                    .with_name(TopicName(part.topic.clone()))
                    .with_partition_responses(vec![answer]),
            ),
        }
    }
    Ok(cold::encoded(&response, version)?)
}

fn cold_partition(answer: &ProducedPartition) -> PartitionProduceResponse {
    let text = |text: &String| StrBytes::from_string(text.clone());
    let record = |error: &RecordError| {
        BatchIndexAndErrorMessage::default()
            .with_batch_index(error.batch_index)
            .with_batch_index_error_message(error.message.as_ref().map(text))
    };
    PartitionProduceResponse::default()
        .with_index(answer.index)
        .with_error_code(answer.error.code())
        .with_base_offset(answer.base_offset.0)
        .with_log_append_time_ms(answer.log_append_time.0)
        .with_log_start_offset(answer.log_start.0)
        .with_record_errors(answer.record_errors.iter().map(record).collect())
        .with_error_message(answer.error_message.as_ref().map(text))
}

/// The body in versions 3 to 9.
fn encoded(version: i16, request: &ProduceRequest) -> Bytes {
    let mut out = Out { bytes: BytesMut::new(), flexible: version >= FLEXIBLE };
    out.text(request.transactional_id.as_deref());
    out.bytes.put_i16(request.acks);
    out.bytes.put_i32(request.timeout_ms);
    out.count(request.topics.len());
    for ProduceTopic { name, partitions } in &request.topics {
        out.text(Some(name));
        out.count(partitions.len());
        for ProducePartition { index, records } in partitions {
            out.bytes.put_i32(*index);
            out.blob(records.as_deref());
            out.no_tags();
        }
        out.no_tags();
    }
    out.no_tags();
    out.bytes.freeze()
}

/// Fields in the classic or the flexible encoding (KIP-482).
struct Out {
    bytes: BytesMut,
    flexible: bool,
}

impl Out {
    fn text(&mut self, text: Option<&str>) {
        match text {
            _ if self.flexible => self.length(text.map(str::len)),
            Some(text) => self.bytes.put_i16(text.len() as i16),
            None => self.bytes.put_i16(-1),
        }
        self.bytes.put_slice(text.unwrap_or("").as_bytes());
    }

    fn blob(&mut self, blob: Option<&[u8]>) {
        self.length(blob.map(<[u8]>::len));
        self.bytes.put_slice(blob.unwrap_or(&[]));
    }

    fn count(&mut self, count: usize) {
        self.length(Some(count));
    }

    fn length(&mut self, len: Option<usize>) {
        match len {
            _ if self.flexible => self.varint(len.map_or(0, |n| n as u32 + 1)),
            Some(len) => self.bytes.put_i32(len as i32),
            None => self.bytes.put_i32(-1),
        }
    }

    fn varint(&mut self, mut value: u32) {
        while value >= 0x80 {
            self.bytes.put_u8(value as u8 | 0x80);
            value >>= 7;
        }
        self.bytes.put_u8(value as u8);
    }

    fn no_tags(&mut self) {
        if self.flexible {
            self.bytes.put_u8(0);
        }
    }
}

#[cfg(test)]
mod tests {
    use kafka::batch::Codec;
    use kafka::{BatchBuilder, Offset, TimestampMs};

    use super::*;

    fn lane() -> Lane {
        Lane::parse("boe-cart").unwrap()
    }

    fn records(lanes: &[Option<&str>]) -> Bytes {
        let mut builder = BatchBuilder::new(Offset(0), TimestampMs(1), Codec::Lz4);
        for (i, lane) in lanes.iter().enumerate() {
            let headers: Vec<_> = lane.iter().map(|l| ("x-lane", Some(l.as_bytes()))).collect();
            builder.push(i as i32, 0, Some(b"k"), None, &headers);
        }
        builder.build().bytes
    }

    fn asked(acks: i16, partitions: Vec<Bytes>) -> ProduceRequest {
        let partitions = partitions
            .into_iter()
            .enumerate()
            .map(|(i, records)| ProducePartition { index: i as i32, records: Some(records) })
            .collect();
        let name = StrBytes::from_static_str("t");
        ProduceRequest {
            transactional_id: None,
            acks,
            timeout_ms: 5,
            topics: vec![ProduceTopic { name, partitions }],
        }
    }

    #[test]
    fn what_is_encoded_reads_back_in_every_version() {
        for version in 3..=9 {
            let mut request = asked(-1, vec![records(&[None])]);
            request.transactional_id = Some(StrBytes::from_static_str("tx"));
            let body = encoded(version, &request);
            assert_eq!(ProduceRequest::decode(version, body).unwrap(), request, "version {version}");
        }
    }

    #[test]
    fn records_are_stamped_and_a_stamped_request_is_left_alone() {
        for version in [3, 8, 9] {
            let body = encoded(version, &asked(-1, vec![records(&[None, Some("boe-cart")])]));
            let Request::Forward(sent, Plan::Pass) = request(&lane(), version, body.clone()).unwrap() else {
                panic!("forwarded")
            };
            assert_ne!(sent, body);
            let Request::Forward(again, _) = request(&lane(), version, sent.clone()).unwrap() else {
                panic!("forwarded")
            };
            assert_eq!(again, sent);
        }
    }

    #[test]
    fn another_lane_is_refused_and_the_other_partitions_go_on() {
        let body = encoded(9, &asked(1, vec![records(&[None, Some("boe-b")]), records(&[None])]));
        let Request::Forward(sent, Plan::Produce(refused)) = request(&lane(), 9, body).unwrap() else {
            panic!("the rest goes on")
        };
        let sent = ProduceRequest::decode(9, sent).unwrap();
        assert_eq!(sent.topics[0].partitions.len(), 1);
        let mut broker = ProduceResponse::default();
        let mut done = ProducedPartition::failed(1, ErrorCode::None, None);
        done.base_offset = Offset(7);
        broker.topics.push(ProducedTopic { name: StrBytes::from_static_str("t"), partitions: vec![done] });
        let mut out = BytesMut::new();
        broker.encode(9, &mut out);
        let merged = merged(9, out.freeze(), &refused).unwrap();
        let told: ColdResponse = cold::decode_any_size(9, merged).unwrap();
        let codes: Vec<_> =
            told.responses[0].partition_responses.iter().map(|p| (p.index, p.error_code)).collect();
        assert_eq!(codes, [(1, 0), (0, ErrorCode::InvalidRecord.code())]);
        assert_eq!(told.responses[0].partition_responses[1].record_errors[0].batch_index, 1);
    }

    #[test]
    fn a_request_refused_whole_is_answered_here() {
        let body = encoded(3, &asked(1, vec![records(&[Some("ppe-1")])]));
        assert!(matches!(request(&lane(), 3, body).unwrap(), Request::Answer(_)));
        let body = encoded(3, &asked(0, vec![records(&[Some("ppe-1")])]));
        assert!(matches!(request(&lane(), 3, body).unwrap(), Request::Close(_)));
        let body = encoded(3, &asked(0, vec![records(&[None])]));
        assert!(matches!(request(&lane(), 3, body).unwrap(), Request::Forward(_, Plan::NoAnswer)));
    }
}
