//! Every limit of the protocol has its name here. Sizes are bytes unless the name says otherwise.

/// Largest request frame a listener accepts by default (Kafka's `socket.request.max.bytes`).
pub const REQUEST_BYTES_MAX: usize = 100 * 1024 * 1024;
/// Largest record batch by default (Kafka's `max.message.bytes`: 1 MiB and the log overhead).
pub const BATCH_BYTES_MAX: usize = 1_048_588;
/// Largest decompressed size of one batch that we ever hold.
pub const BATCH_UNPACKED_BYTES_MAX: usize = 128 * 1024 * 1024;
/// Most elements of any array in a request.
pub const ARRAY_LEN_MAX: usize = 100_000;
/// Most records in one batch.
pub const RECORDS_PER_BATCH_MAX: usize = 10_000_000;
/// Most headers of one record.
pub const HEADERS_PER_RECORD_MAX: usize = 100_000;
/// Largest message, other than Produce, Fetch and the private ones, that is decoded.
pub const COLD_MESSAGE_BYTES_MAX: usize = 16 * 1024 * 1024;
