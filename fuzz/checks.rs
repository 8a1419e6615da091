//! What must hold for any bytes at all: nothing panics, nothing is read twice or beyond the end, and
//! what was understood once is understood the same after being written again.
//!
//! Shared by the fuzz targets and by the stable test of the kafka crate. Knows nothing about where the
//! bytes come from.

use bytes::{Bytes, BytesMut};
use kafka::batch::{Batch, BatchHeader, HEADER_LEN, LENGTH_PREFIX};
use kafka::fetch::FetchRequest;
use kafka::frame::{self, FrameError, RequestHeader};
use kafka::limits::BATCH_UNPACKED_BYTES_MAX;
use kafka::private;
use kafka::produce::ProduceRequest;
use kafka::record::{self, BatchBuilder, Records};
use kafka::{api, cold, control, messages};

#[macro_use]
#[path = "cold_requests.rs"]
mod cold_requests;

/// Frames of a fuzzed connection; larger ones must be refused.
const FRAME_BYTES_MAX: usize = 1024 * 1024;

/// A stream of bytes as a listener would read it.
pub fn frames(data: &[u8]) {
    let whole = cut(data, data.len().max(1));
    let pieces = cut(data, 7);
    assert_eq!(whole, pieces, "frames do not depend on how the bytes arrive");
    for frame in whole.0 {
        request(frame);
    }
    // The same as one frame whose length is right, whatever the first four bytes say.
    if let Some(frame) = data.get(4..) {
        request(Bytes::copy_from_slice(frame));
    }
}

/// Feeds `data` in pieces; returns the frames and the error that ended the stream.
fn cut(data: &[u8], piece_len: usize) -> (Vec<Bytes>, Option<FrameError>) {
    let mut waiting = BytesMut::new();
    let mut frames = Vec::new();
    for piece in data.chunks(piece_len) {
        waiting.extend_from_slice(piece);
        loop {
            match frame::next_frame(&mut waiting, FRAME_BYTES_MAX) {
                Ok(Some(frame)) => frames.push(frame),
                Ok(None) => break,
                Err(error) => return (frames, Some(error)),
            }
        }
    }
    let taken: usize = frames.iter().map(|frame| frame.len() + 4).sum();
    assert_eq!(taken + waiting.len(), data.len(), "every byte is in a frame or still waiting");
    (frames, None)
}

fn request(frame: Bytes) {
    let mut body = frame.clone();
    let Ok(header) = frame::parse_request_header(&mut body) else { return };
    assert!(frame.ends_with(&body));
    let mut again = BytesMut::new();
    frame::put_request_header(&mut again, &header);
    let reread = frame::parse_request_header(&mut again.freeze());
    assert_eq!(reread.as_ref(), Ok(&header));
    match header.api_key {
        api::PRODUCE if api::is_supported(api::PRODUCE, header.api_version) => produce(&header, body),
        api::FETCH if api::is_supported(api::FETCH, header.api_version) => {
            let _ = FetchRequest::decode(header.api_version, body);
        }
        key if api::is_supported(key, header.api_version) => cold_request(&header, body),
        key if private::KEYS.contains(&key) => private_request(key, body),
        _ => {}
    }
}

fn produce(header: &RequestHeader, body: Bytes) {
    let Ok(request) = ProduceRequest::decode(header.api_version, body.clone()) else { return };
    let partitions = request.topics.iter().flat_map(|topic| &topic.partitions);
    let records: Vec<Bytes> = partitions.filter_map(|partition| partition.records.clone()).collect();
    assert!(records.iter().map(Bytes::len).sum::<usize>() <= body.len(), "records are slices of the request");
    records.into_iter().for_each(run_of_batches);
}

/// Decodes with the message type of the key; what was decoded must come back from its own bytes.
macro_rules! decode_as {
    ($header:expr, $body:expr, $($key:literal $request:ident),+ $(,)?) => {
        match $header.api_key {
            $($key => if let Ok(message) = cold::decode::<messages::$request>($header.api_version, $body) {
                let again = cold::encoded(&message, $header.api_version).expect("a decoded message can be encoded");
                let reread = cold::decode::<messages::$request>($header.api_version, again);
                assert_eq!(reread, Ok(message));
            },)+
            key => panic!("advertised API {key} is missing here"),
        }
    };
}

fn cold_request(header: &RequestHeader, body: Bytes) {
    with_cold_requests!(decode_as! { header, body, });
}

fn private_request(key: i16, body: Bytes) {
    match key {
        private::MIRROR_TOPICS => private_message::<private::TopicsRequest>(body),
        private::MIRROR_FETCH => private_message::<private::FetchRequest>(body),
        private::MIRROR_APPEND => private_message::<private::AppendRequest>(body),
        private::MIRROR_VECTORS => private_message::<private::VectorsRequest>(body),
        private::MIRROR_REPORT => private_message::<private::ReportRequest>(body),
        private::MIRROR_NOTES => private_message::<private::NotesRequest>(body),
        _ => {}
    }
}

fn private_message<M: private::Message + PartialEq + std::fmt::Debug>(body: Bytes) {
    if let Ok(message) = M::decode(body) {
        assert_eq!(M::decode(message.encode()), Ok(message));
    }
}

/// Batches behind each other, as in a produce request or a segment. The CRC is not asked for, so that
/// changed bytes get further than it.
pub fn batches(data: &[u8]) {
    run_of_batches(Bytes::copy_from_slice(data));
    // The same as one batch whose length is right.
    if let Some(body_len) = data.len().checked_sub(LENGTH_PREFIX).filter(|_| data.len() >= HEADER_LEN) {
        let mut data = data.to_vec();
        data[8..LENGTH_PREFIX].copy_from_slice(&(body_len as u32).to_be_bytes());
        run_of_batches(Bytes::from(data));
    }
}

fn run_of_batches(data: Bytes) {
    let checked = Batch::split_all(data.clone(), true);
    let mut rest = data.clone();
    let mut found = Vec::new();
    while let Ok(batch) = Batch::split_first(&mut rest, false) {
        assert_eq!(batch.bytes.len(), batch.header.total_len());
        found.push(batch);
    }
    let taken: usize = found.iter().map(|batch| batch.bytes.len()).sum();
    assert_eq!(taken + rest.len(), data.len());
    if let Ok(checked) = checked {
        assert_eq!(checked.len(), found.len());
        assert!(rest.is_empty());
    }
    found.iter().for_each(batch);
}

fn batch(batch: &Batch) {
    let header = batch.header;
    assert_eq!(BatchHeader::parse(&header.encode()), Ok(header));
    assert!(header.next_offset() > header.base_offset);
    let moved = batch.restamped(header.base_offset, header.leader_epoch);
    assert_eq!(moved.bytes, batch.bytes);
    marker(batch);
    let Ok(section) = record::unpack(batch) else {
        assert!(record::check_records(batch).is_err());
        return;
    };
    assert!(section.len() <= BATCH_UNPACKED_BYTES_MAX.max(batch.bytes.len()));
    let mut read = 0;
    for record in Records::new(&section, header.record_count).map_while(Result::ok) {
        read += record.raw.len();
        let headers = record.headers().map_while(Result::ok).count();
        assert!(headers <= record.header_count());
    }
    assert!(read <= section.len());
    if record::check_records(batch).is_ok() {
        rebuild(batch, &section);
    }
}

/// The way of a batch that mixes lanes: record by record into a new one.
fn rebuild(batch: &Batch, section: &[u8]) {
    let mut builder = BatchBuilder::like(&batch.header);
    for record in Records::new(section, batch.header.record_count).map_while(Result::ok) {
        builder.push_raw(&record);
    }
    let rebuilt = builder.build();
    assert_eq!(rebuilt.check_crc(), Ok(()));
    assert_eq!(rebuilt.header.record_count, batch.header.record_count);
    assert_eq!(rebuilt.header.next_offset(), batch.header.next_offset());
    assert_eq!(record::check_records(&rebuilt), Ok(()));
    assert_eq!(record::unpack(&rebuilt).as_deref(), Ok(section));
}

fn marker(batch: &Batch) {
    let Ok(Some(marker)) = control::parse_marker(batch) else { return };
    let again = control::marker_batch(&marker, batch.header.base_offset, batch.header.leader_epoch);
    assert_eq!(again.check_crc(), Ok(()));
    assert_eq!(control::parse_marker(&again), Ok(Some(marker)));
}
