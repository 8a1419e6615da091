//! Files by their paths: making, replacing, listing and removing them, and the directories that hold them.
//!
//! Pure. The other half of [`Core`], which knows files by their numbers.

use std::collections::BTreeMap;

use super::core::Core;
use super::frame;
use super::jobs::{Collect, Orphans};
use super::tree::{self, Chunk, DirNo, FileNo};
use crate::{Entry, StoreError, StorePath};

impl Core {
    /// The file of a path, unless its directory was handed over.
    pub fn file_at(&self, path: &StorePath) -> Option<FileNo> {
        let (dir, name) = tree::owner_of(path);
        let (_, directory) = self.tree.dir_at(&dir)?;
        if directory.is_released { None } else { directory.names.get(name).copied() }
    }

    pub fn create(&mut self, path: &StorePath) -> Result<(FileNo, u64, u64), StoreError> {
        let (dir, name) = self.dir_for(path)?;
        if self.tree.dirs[&dir].names.contains_key(name) {
            return Err(StoreError::AlreadyExists);
        }
        let file = FileNo(self.number());
        let seq = self.log(path.as_str().len(), |payload| payload.create(dir, file, name));
        Ok((file, self.admit(file), seq))
    }

    pub fn resume(&mut self, path: &StorePath, len: u64) -> Result<(FileNo, u64), StoreError> {
        let (dir, name) = self.dir_for(path)?;
        let file = *self.tree.dirs[&dir].names.get(name).ok_or(StoreError::NotFound)?;
        let found = self.tree.files[&file].len;
        if found < len {
            return Err(StoreError::Corrupt(format!("{path} has {found} bytes, expected at least {len}")));
        }
        if len < found {
            let seq = self.log(FRAME_BYTES, |payload| payload.cut(dir, file, len));
            let live = self.live(file);
            live.last = seq + 1;
            live.cuts += 1;
        }
        Ok((file, self.admit(file)))
    }

    /// A whole file, with `chunks` in front of `bytes`; returns the block of its frame.
    pub fn put(&mut self, path: &StorePath, chunks: &[Chunk], bytes: &[u8]) -> Result<u64, StoreError> {
        let (dir, name) = self.dir_for(path)?;
        let file = FileNo(self.number());
        let room = path.as_str().len() + chunks.len() * CHUNK_BYTES + bytes.len();
        let seq = self.log(room, |payload| payload.put(dir, file, name, chunks, bytes));
        self.live(file).last = seq + 1;
        self.consider(file);
        Ok(seq)
    }

    /// Returns the block that says so, if there was anything to remove.
    pub fn delete(&mut self, path: &StorePath) -> Result<Option<u64>, StoreError> {
        if path.is_root() {
            return Err(StoreError::Io("the root of a store cannot be deleted".to_owned()));
        }
        let mut gone = Vec::new();
        let (dir, name) = tree::owner_of(path);
        if let Some((dir, directory)) = self.tree.dir_at(&dir) {
            let below = |file: &str| file.strip_prefix(name).is_some_and(|rest| rest.starts_with('/'));
            let files = directory.names.iter().filter(|(file, _)| &***file == name || below(file));
            gone.extend(files.map(|(_, file)| (dir, Some(*file))));
            if !gone.is_empty() && !self.is_writable(dir) {
                return Err(StoreError::Fenced);
            }
        }
        let dirs = self.tree.dirs_within(path).into_iter().filter(|dir| self.is_writable(*dir));
        gone.extend(dirs.map(|dir| (dir, None)));
        self.fences.retain(|fenced, _| !fenced.is_within(path));
        if gone.is_empty() {
            return Ok(None);
        }
        let adopted = gone.iter().filter(|(dir, file)| file.is_none() && self.dirs[dir].is_adopted);
        let adopted: Vec<StorePath> = adopted.map(|(dir, _)| self.tree.dirs[dir].path.clone()).collect();
        let seq = self.log(gone.len() * FRAME_BYTES, |payload| payload.remove(&gone));
        let of = Orphans::Deleted(seq);
        self.orphans.extend(adopted.into_iter().map(|dir| Collect { dir, of: of.clone() }));
        gone.iter().filter(|(_, file)| file.is_none()).for_each(|(dir, _)| self.forget_dir(*dir));
        Ok(Some(seq))
    }

    pub fn fence(&mut self, dir: &StorePath, epoch: u64) -> Result<(), StoreError> {
        let highest = self.fences.entry(dir.clone()).or_insert(epoch);
        if *highest > epoch {
            return Err(StoreError::Fenced);
        }
        *highest = epoch;
        let mut fenced: Vec<FileNo> = Vec::new();
        for within in self.tree.dirs_within(dir) {
            fenced.extend(self.tree.dirs[&within].names.values());
        }
        let (owner, name) = tree::owner_of(dir);
        if let Some((_, directory)) = self.tree.dir_at(&owner) {
            let below = |file: &str| file.strip_prefix(name).is_some_and(|rest| rest.starts_with('/'));
            fenced.extend(directory.names.iter().filter(|(file, _)| below(file)).map(|(_, file)| *file));
        }
        fenced.into_iter().for_each(|file| self.retire(file));
        Ok(())
    }

    /// The entries of a directory; files deeper in it make a directory of their first component.
    pub fn list(&self, path: &StorePath) -> Vec<Entry> {
        let mut entries = BTreeMap::new();
        let mut enter = |rest: &str, len: u64| {
            let (name, is_dir) = rest.split_once('/').map_or((rest, false), |(name, _)| (name, true));
            let len = if is_dir { 0 } else { len };
            entries.insert(name.to_owned(), Entry { name: name.to_owned(), len, is_dir });
        };
        for dir in self.tree.dirs_within(path) {
            let directory = &self.tree.dirs[&dir];
            let above = directory.path.as_str()[path.as_str().len()..].trim_start_matches('/');
            if directory.is_released || directory.names.is_empty() {
                continue;
            }
            if !above.is_empty() {
                enter(&format!("{above}/"), 0);
                continue;
            }
            directory.names.iter().for_each(|(name, file)| enter(name, self.tree.files[file].len));
        }
        let (owner, inner) = tree::owner_of(path);
        if let Some((_, directory)) = self.tree.dir_at(&owner).filter(|(_, directory)| !directory.is_released)
            && !path.is_root()
        {
            for (name, file) in &directory.names {
                let rest = name.strip_prefix(inner).and_then(|rest| rest.strip_prefix('/'));
                rest.into_iter().for_each(|rest| enter(rest, self.tree.files[file].len));
            }
        }
        entries.into_values().collect()
    }

    /// The directory that a file is to be written in; begun if there is none.
    fn dir_for<'a>(&mut self, path: &'a StorePath) -> Result<(DirNo, &'a str), StoreError> {
        self.alive()?;
        let (owner, name) = tree::owner_of(path);
        if path.is_root() {
            return Err(StoreError::Io("the root of a store is no file".to_owned()));
        }
        if let Some((dir, _)) = self.tree.dir_at(&owner) {
            return if self.is_writable(dir) { Ok((dir, name)) } else { Err(StoreError::Fenced) };
        }
        let dir = DirNo(self.number());
        self.say_dir(dir, &owner, false, &[]);
        Ok((dir, name))
    }

    /// Writes the whole state of a directory.
    pub fn say_dir(
        &mut self,
        dir: DirNo,
        path: &StorePath,
        is_released: bool,
        files: &[frame::FileState],
    ) -> u64 {
        let chunks: usize = files.iter().map(|file| file.chunks.len() * CHUNK_BYTES + file.name.len()).sum();
        let before = self.ring.written();
        let seq =
            self.log(path.as_str().len() + chunks, |payload| payload.dir(dir, path, is_released, files));
        let said_bytes = self.ring.written() - before;
        let live = self.dirs.entry(dir).or_default();
        self.said_bytes += said_bytes;
        self.said_bytes -= std::mem::replace(&mut live.said_bytes, said_bytes);
        seq
    }

    pub fn forget_dir(&mut self, dir: DirNo) {
        self.said_bytes -= self.dirs.remove(&dir).map_or(0, |live| live.said_bytes);
    }
}

/// About what a frame without bytes takes, and a chunk in one.
const FRAME_BYTES: usize = 32;
const CHUNK_BYTES: usize = 24;
