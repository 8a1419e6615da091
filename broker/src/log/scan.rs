//! Walking the batches of a segment by their headers.
//!
//! A cursor reads forward in small pieces, so that finding a batch boundary near an index entry
//! costs one positioned read. It trusts nothing: a header that does not parse ends the walk.

use broker_store::{Reader, StoreError};
use bytes::Bytes;
use kafka::batch::HEADER_LEN;
use kafka::{Batch, BatchError, BatchHeader};

/// Bytes read at a time; covers the distance between two index entries in one read.
const PIECE: usize = 4608;

/// A position in a segment that moves from batch to batch, up to `end`.
pub struct Cursor<'a> {
    reader: &'a dyn Reader,
    position: u64,
    end: u64,
    piece: Bytes,
    piece_at: u64,
}

/// Why a walk stopped before the end.
#[derive(Debug, thiserror::Error)]
pub enum ScanError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("at position {position}: {error}")]
    Batch { position: u64, error: BatchError },
}

impl<'a> Cursor<'a> {
    pub fn new(reader: &'a dyn Reader, position: u64, end: u64) -> Cursor<'a> {
        Cursor { reader, position, end, piece: Bytes::new(), piece_at: position }
    }

    pub fn position(&self) -> u64 {
        self.position
    }

    /// The header at the cursor, or `None` at the end.
    pub fn peek(&mut self) -> Result<Option<BatchHeader>, ScanError> {
        if self.position >= self.end {
            return Ok(None);
        }
        let have = self.piece_at + self.piece.len() as u64;
        if self.position < self.piece_at || self.position + HEADER_LEN as u64 > have {
            let len = PIECE.min((self.end - self.position) as usize);
            self.piece = self.reader.read_at(self.position, len)?;
            self.piece_at = self.position;
        }
        let at = (self.position - self.piece_at) as usize;
        let header = BatchHeader::parse(&self.piece[at..]).map_err(|e| self.error(e))?;
        let need = header.total_len();
        let have = (self.end - self.position) as usize;
        if need > have {
            return Err(self.error(BatchError::Truncated { have, need }));
        }
        Ok(Some(header))
    }

    /// Moves over the batch at the cursor, whose header was peeked.
    pub fn skip(&mut self, header: &BatchHeader) {
        self.position += header.total_len() as u64;
    }

    /// The whole batch at the cursor, its CRC checked; moves over it.
    pub fn next_batch(&mut self) -> Result<Option<Batch>, ScanError> {
        let Some(header) = self.peek()? else { return Ok(None) };
        let len = header.total_len();
        let at = (self.position - self.piece_at) as usize;
        let bytes = match self.piece.get(at..at + len) {
            Some(_) => self.piece.slice(at..at + len),
            None => self.reader.read_at(self.position, len)?,
        };
        let batch = Batch { header, bytes };
        batch.check_crc().map_err(|e| self.error(e))?;
        self.skip(&header);
        Ok(Some(batch))
    }

    fn error(&self, error: BatchError) -> ScanError {
        ScanError::Batch { position: self.position, error }
    }
}
