//! What can go wrong below the segment seam, and what the caller may do next.

use std::io;
use std::path::Path;

/// Why a segment store refused. The caller knows which path it asked for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    #[error("no such file in the store")]
    NotFound,
    #[error("the file exists already")]
    AlreadyExists,
    /// ENOSPC, EDQUOT, EFBIG. The file is as it was before; the same call may succeed later.
    #[error("the disk is full")]
    Full,
    /// Another owner, a newer writer of the same file, or a deletion took the right to write.
    #[error("fenced: this writer lost the right to write")]
    Fenced,
    #[error("the writer was sealed")]
    Sealed,
    /// The writer is dead: a sync failed, or a failed append could not be undone. What the page cache
    /// shows above `durable` may not be on disk. Never retried: write everything above `durable`
    /// again, from memory, into a new file.
    #[error("sync failed; only the first {durable} bytes are known to be on disk")]
    SyncFailed { durable: u64 },
    #[error("data directory {dir} is in use by {owner}; stop it or choose another directory")]
    Locked { dir: String, owner: String },
    #[error(
        "data directory {dir} has format {found}, this version knows formats up to {known}: start a newer version"
    )]
    NewerFormat { dir: String, found: u32, known: u32 },
    #[error("damaged: {0}")]
    Corrupt(String),
    #[error("{0}")]
    Io(String),
}

impl StoreError {
    /// True if the same call may succeed later, with nothing else to be done first.
    pub fn is_retryable(&self) -> bool {
        matches!(self, StoreError::Full | StoreError::Io(_))
    }

    /// True if the writer will never accept anything again, so that a new file is needed.
    pub fn ends_writer(&self) -> bool {
        matches!(self, StoreError::Fenced | StoreError::Sealed | StoreError::SyncFailed { .. })
    }

    /// Names the operation and the file in an error of the operating system.
    pub(crate) fn from_io(error: &io::Error, doing: &str, path: &Path) -> StoreError {
        match error.kind() {
            io::ErrorKind::NotFound => StoreError::NotFound,
            io::ErrorKind::AlreadyExists => StoreError::AlreadyExists,
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => {
                StoreError::Full
            }
            _ => StoreError::Io(format!("{doing} {}: {error}", path.display())),
        }
    }
}
