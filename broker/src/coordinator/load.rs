//! Reading a partition of `__consumer_offsets` from its start to its end.

use broker_core::offsets_log::OffsetsFold;
use kafka::{Batch, BatchError, Offset, Records, record};

use crate::partition::{Partition, ReadError, ReadUpTo};

/// Bytes read at a time.
const READ_BYTES: usize = 1024 * 1024;

#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    #[error(transparent)]
    Read(#[from] ReadError),
    #[error("batch at offset {base}: {error}")]
    Batch { base: Offset, error: BatchError },
}

/// The fold of the whole log. Blocks for the disk. A record that does not parse is reported and left
/// out: it must not take every group of the partition down.
pub fn fold(partition: &Partition) -> Result<OffsetsFold, LoadError> {
    let mut fold = OffsetsFold::default();
    let mut next = partition.watermarks().log_start;
    loop {
        let read = partition.read(next, READ_BYTES, true, ReadUpTo::HighWatermark)?;
        if let Some(slice) = &read.slice {
            let bytes = slice.bytes().map_err(ReadError::from)?;
            let batches =
                Batch::split_all(bytes, true).map_err(|error| LoadError::Batch { base: next, error })?;
            for batch in batches.iter().filter(|b| !b.header.is_control()) {
                take_in(&mut fold, batch, partition)?;
            }
        }
        if read.next >= read.watermarks.high_watermark || read.next <= next {
            return Ok(fold);
        }
        next = read.next;
    }
}

fn take_in(fold: &mut OffsetsFold, batch: &Batch, partition: &Partition) -> Result<(), LoadError> {
    let base = batch.header.base_offset;
    let damaged = |error| LoadError::Batch { base, error };
    let section = record::unpack(batch).map_err(damaged)?;
    for found in Records::new(&section, batch.header.record_count) {
        let found = found.map_err(damaged)?;
        let Some(key) = found.key else { continue };
        if let Err(error) = fold.apply(key, found.value) {
            let offset = base.plus(i64::from(found.offset_delta));
            tracing::warn!(%partition, %offset, %error, "skipped a record of __consumer_offsets");
        }
    }
    Ok(())
}
