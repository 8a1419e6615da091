//! The data directory of one process: an exclusive lock and the version of its format.
//!
//! Leaves the content to the stores. Invariant: while a `DataDir` lives, no other process (and no
//! other `DataDir` of this one) holds the same directory.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};

use crate::StoreError;

/// The newest format of a data directory that this code reads, and the one it writes.
pub const FORMAT_KNOWN: u32 = 1;

/// An open, locked data directory of a known format. Dropped with the last clone of its store and
/// the last writer, so that a forgotten writer keeps others out.
#[derive(Debug)]
pub struct DataDir {
    root: PathBuf,
    _lock: File,
}

impl DataDir {
    /// Creates the directory if needed, locks it and checks its format.
    pub fn open(root: &Path) -> Result<DataDir, StoreError> {
        make_dirs(root).map_err(|e| at(&e, "create directory", root))?;
        let lock = lock(root)?;
        let dir = DataDir { root: root.to_owned(), _lock: lock };
        dir.check_format()?;
        Ok(dir)
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    fn check_format(&self) -> Result<(), StoreError> {
        let path = self.root.join(FORMAT_NAME);
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return self.write_format(&path),
            Err(e) => return Err(at(&e, "read", &path)),
        };
        let found = text.trim().strip_prefix(FORMAT_PREFIX).and_then(|n| n.parse::<u32>().ok());
        match found {
            Some(found) if found > FORMAT_KNOWN => {
                let dir = self.root.display().to_string();
                Err(StoreError::NewerFormat { dir, found, known: FORMAT_KNOWN })
            }
            Some(1..=FORMAT_KNOWN) => Ok(()),
            _ => Err(StoreError::Corrupt(format!("{} says {:?}", path.display(), text.trim()))),
        }
    }

    fn write_format(&self, path: &Path) -> Result<(), StoreError> {
        if self.root.join(TOPICS_NAME).exists() {
            return Err(StoreError::Corrupt(format!(
                "{} is missing though the directory holds data",
                path.display()
            )));
        }
        let temp = self.root.join("FORMAT.new");
        let write = || -> io::Result<()> {
            let mut file = File::create(&temp)?;
            writeln!(file, "{FORMAT_PREFIX}{FORMAT_KNOWN}")?;
            file.sync_all()?;
            fs::rename(&temp, path)?;
            sync_dir(&self.root)
        };
        write().map_err(|e| at(&e, "write", path))
    }
}

fn lock(root: &Path) -> Result<File, StoreError> {
    let path = root.join(LOCK_NAME);
    let open = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path);
    let mut file = open.map_err(|e| at(&e, "open", &path))?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(rustix::io::Errno::WOULDBLOCK) => {
            let mut text = String::new();
            // The owner may be writing its name right now: then it stays unnamed.
            let _ = file.read_to_string(&mut text);
            let owner = match text.trim().parse::<u32>() {
                Ok(pid) => format!("process {pid}"),
                Err(_) => "another process".to_owned(),
            };
            return Err(StoreError::Locked { dir: root.display().to_string(), owner });
        }
        Err(e) => return Err(at(&e.into(), "lock", &path)),
    }
    file.set_len(0).map_err(|e| at(&e, "write", &path))?;
    match writeln!(file, "{}", std::process::id()) {
        Ok(()) => {}
        // The name of the owner is for people; a full disk must not keep the broker from starting.
        Err(e) if at(&e, "write", &path) == StoreError::Full => {}
        Err(e) => return Err(at(&e, "write", &path)),
    }
    Ok(file)
}

/// Creates a directory and its missing ancestors, durably.
pub(crate) fn make_dirs(dir: &Path) -> io::Result<()> {
    if dir.is_dir() {
        return Ok(());
    }
    let parent = match dir.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    make_dirs(parent)?;
    match fs::create_dir(dir) {
        Ok(()) => {}
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists && dir.is_dir() => {}
        Err(e) => return Err(e),
    }
    sync_dir(parent)
}

/// Makes the entries of a directory durable.
pub(crate) fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

fn at(error: &io::Error, doing: &str, path: &Path) -> StoreError {
    StoreError::from_io(error, doing, path)
}

pub(crate) const TOPICS_NAME: &str = "topics";
pub(crate) const TEMP_NAME: &str = "tmp";
const LOCK_NAME: &str = "LOCK";
const FORMAT_NAME: &str = "FORMAT";
const FORMAT_PREFIX: &str = "sealane data format ";

#[cfg(test)]
pub(crate) mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    /// Opens a directory that was let go of. A process that another test is just starting holds a copy of the lock
    /// for the moment between its fork and its exec.
    pub(crate) fn unlocked<S>(open: impl Fn() -> Result<S, StoreError>) -> Result<S, StoreError> {
        let end = Instant::now() + Duration::from_secs(60);
        loop {
            match open() {
                Err(StoreError::Locked { .. }) if Instant::now() < end => std::thread::yield_now(),
                outcome => return outcome,
            }
        }
    }

    #[test]
    fn a_second_owner_is_refused_and_told_who_holds_the_directory() {
        let temp = tempfile::tempdir().unwrap();
        let first = DataDir::open(temp.path()).unwrap();
        let error = DataDir::open(temp.path()).unwrap_err();
        let owner = format!("process {}", std::process::id());
        assert_eq!(
            error,
            StoreError::Locked { dir: temp.path().display().to_string(), owner: owner.clone() }
        );
        assert!(error.to_string().contains(&owner));
        drop(first);
        unlocked(|| DataDir::open(temp.path())).unwrap();
    }

    #[test]
    fn a_newer_format_is_refused_with_both_versions() {
        let temp = tempfile::tempdir().unwrap();
        drop(DataDir::open(temp.path()).unwrap());
        fs::write(temp.path().join(FORMAT_NAME), "sealane data format 7\n").unwrap();
        let error = unlocked(|| DataDir::open(temp.path())).unwrap_err();
        assert!(matches!(error, StoreError::NewerFormat { found: 7, known: FORMAT_KNOWN, .. }));
        assert!(error.to_string().contains("format 7"), "{error}");
    }

    #[test]
    fn a_format_file_that_makes_no_sense_is_an_error() {
        let temp = tempfile::tempdir().unwrap();
        drop(DataDir::open(temp.path()).unwrap());
        for text in ["", "sealane data format 0", "sealane data format x", "hello"] {
            fs::write(temp.path().join(FORMAT_NAME), text).unwrap();
            assert!(
                matches!(unlocked(|| DataDir::open(temp.path())), Err(StoreError::Corrupt(_))),
                "{text:?}"
            );
        }
    }

    #[test]
    fn a_missing_format_file_beside_data_is_an_error() {
        let temp = tempfile::tempdir().unwrap();
        drop(DataDir::open(temp.path()).unwrap());
        fs::create_dir(temp.path().join(TOPICS_NAME)).unwrap();
        fs::remove_file(temp.path().join(FORMAT_NAME)).unwrap();
        assert!(matches!(unlocked(|| DataDir::open(temp.path())), Err(StoreError::Corrupt(_))));
    }
}
