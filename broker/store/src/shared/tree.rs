//! The fold of a life's log: directories, their files, and where the bytes of each are.
//!
//! Pure. The same fold is the living state of a broker (each frame is applied as it is written) and what
//! an heir makes of the log of a dead one, so that the two cannot differ. A directory begins with the
//! frame that says its whole state; frames of a directory that has not begun belong to an older state
//! and are skipped, everything else must fit. Invariant: a directory can be rebuilt from the blocks at
//! and above what it `needs`.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::ops::Bound;
use std::sync::Arc;

use super::frame::{FileFrame, Frame};
use crate::{Life, StoreError, StorePath};

/// One incarnation of a directory in a life's log: a number of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct DirNo(pub u64);

/// One content of a file in a life's log. A file that is replaced gets another number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct FileNo(pub u64);

/// An object is named by the life that wrote it and a number of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct ObjectId {
    pub life: Life,
    pub number: u64,
}

/// Bytes of a file that are in the log: `len` of them at `at` of a block's payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub pos: u64,
    pub len: u32,
    pub at: u32,
    pub seq: u64,
}

/// Bytes of a file that are in an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Chunk {
    pub from: u64,
    pub len: u64,
    pub object: ObjectId,
    /// Where in a pack, which holds chunks of many files; none for an object of its own.
    pub at: Option<u64>,
}

/// What a log says does not fit together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(super) struct Corrupt(pub &'static str);

impl From<Corrupt> for StoreError {
    fn from(corrupt: Corrupt) -> StoreError {
        StoreError::Corrupt(corrupt.0.to_owned())
    }
}

impl Piece {
    pub fn end(&self) -> u64 {
        self.pos + u64::from(self.len)
    }
}

impl Chunk {
    pub fn end(&self) -> u64 {
        self.from + self.len
    }

    pub fn checked(self) -> Result<Chunk, Corrupt> {
        let ends = (self.from.checked_add(self.len), self.at.unwrap_or(0).checked_add(self.len));
        let (Some(_), Some(_)) = ends else { return Err(Corrupt("a chunk beyond all bounds")) };
        Ok(self)
    }

    /// Where its object is, if it is of this file.
    pub fn path(&self, dir: &StorePath, file: &str) -> Result<StorePath, StoreError> {
        match self.at {
            None => object_path(dir, file, self.object),
            Some(_) => pack_path(self.object),
        }
    }
}

/// The directory that owns a path, and the name of the file in it. A directory of two components is the
/// unit of ownership (a partition); what lies deeper is part of it, what lies higher has its parent.
pub(super) fn owner_of(path: &StorePath) -> (StorePath, &str) {
    let text = path.as_str();
    let mut cut = None;
    for (at, _) in text.match_indices('/').take(2) {
        cut = Some(at);
    }
    match cut.map(|at| (StorePath::parse(&text[..at]), &text[at + 1..])) {
        Some((Ok(dir), name)) => (dir, name),
        _ => (StorePath::root(), text),
    }
}

/// Where an object of a file is.
pub(super) fn object_path(dir: &StorePath, file: &str, object: ObjectId) -> Result<StorePath, StoreError> {
    let between = if dir.is_root() { "" } else { "/" };
    let text = format!("data/{dir}{between}{file}.{}.{}", object.life, object.number);
    StorePath::parse(&text).map_err(|error| StoreError::Io(error.to_string()))
}

/// Where a pack is: with the others of its life, and they go with that life's log.
pub(super) fn pack_path(object: ObjectId) -> Result<StorePath, StoreError> {
    let text = format!("{PACKS}/{}/{}", object.life, object.number);
    StorePath::parse(&text).map_err(|error| StoreError::Io(error.to_string()))
}

pub(super) const PACKS: &str = "packs";
/// About what a frame of a chunk takes.
pub(super) const CHUNK_FRAME_BYTES: usize = 64;

/// The object that the last component of such a path names.
pub(super) fn object_of(name: &str) -> Option<ObjectId> {
    let (rest, number) = name.rsplit_once('.')?;
    let (_, life) = rest.rsplit_once('.')?;
    Some(ObjectId { life: Life::parse(life)?, number: number.parse().ok()? })
}

#[derive(Debug)]
pub(super) struct Directory {
    pub path: StorePath,
    pub names: BTreeMap<Arc<str>, FileNo>,
    /// It was handed over: nothing may be written into it here.
    pub is_released: bool,
    /// The lowest block that its state is made of.
    pub needs: u64,
}

/// `L` is what the living state knows of a file beyond the log.
#[derive(Debug)]
pub(super) struct File<L> {
    pub dir: DirNo,
    pub dir_path: StorePath,
    pub name: Arc<str>,
    pub len: u64,
    /// From 0 on without a gap, in order.
    pub chunks: Vec<Chunk>,
    /// From the last chunk's end on without a gap, in order.
    pub pieces: VecDeque<Piece>,
    pub live: L,
}

impl<L> File<L> {
    pub fn chunk_end(&self) -> u64 {
        self.chunks.last().map_or(0, Chunk::end)
    }

    /// Bytes that are in the log.
    pub fn tail_len(&self) -> u64 {
        self.len - self.chunk_end()
    }

    /// The chunk with the byte at `pos`.
    pub fn chunk_at(&self, pos: u64) -> Option<&Chunk> {
        let after = self.chunks.partition_point(|chunk| chunk.from <= pos);
        self.chunks[..after].last().filter(|chunk| pos < chunk.end())
    }

    /// The pieces from the one with the byte at `pos` on.
    pub fn pieces_at(&self, pos: u64) -> impl Iterator<Item = &Piece> {
        let first = self.pieces.partition_point(|piece| piece.end() <= pos);
        self.pieces.range(first..)
    }
}

/// What a frame did beyond the tree: what is held in memory and in objects for it.
#[derive(Debug)]
pub(super) struct Effects<L> {
    /// Blocks that have one more piece in the tree, each as often as it has.
    pub held: Vec<u64>,
    /// The opposite. The pieces of `removed` are not among them.
    pub freed: Vec<u64>,
    /// Files that are no longer in the tree; their pieces and chunks may still be read.
    pub removed: Vec<(FileNo, File<L>)>,
    /// Chunks that no file needs any more.
    pub objects: Vec<(FileNo, StorePath, Arc<str>, Chunk)>,
}

impl<L> Default for Effects<L> {
    fn default() -> Effects<L> {
        Effects { held: Vec::new(), freed: Vec::new(), removed: Vec::new(), objects: Vec::new() }
    }
}

impl<L> Effects<L> {
    pub fn clear(&mut self) {
        self.held.clear();
        self.freed.clear();
        self.removed.clear();
        self.objects.clear();
    }
}

#[derive(Debug)]
pub(super) struct Tree<L> {
    pub dirs: HashMap<DirNo, Directory>,
    pub files: HashMap<FileNo, File<L>>,
    paths: BTreeMap<StorePath, DirNo>,
    needs: BTreeSet<(u64, DirNo)>,
}

impl<L> Default for Tree<L> {
    fn default() -> Tree<L> {
        Tree { dirs: HashMap::new(), files: HashMap::new(), paths: BTreeMap::new(), needs: BTreeSet::new() }
    }
}

impl<L: Default> Tree<L> {
    pub fn dir_at(&self, path: &StorePath) -> Option<(DirNo, &Directory)> {
        let dir = *self.paths.get(path)?;
        Some((dir, &self.dirs[&dir]))
    }

    /// The directories at and below a path.
    pub fn dirs_within(&self, path: &StorePath) -> Vec<DirNo> {
        // Between "a" and "a/" other names may sort ("a-1"), so the path itself is looked up alone.
        let below = if path.is_root() { String::new() } else { format!("{path}/") };
        let range = self.paths.range::<str, _>((Bound::Included(below.as_str()), Bound::Unbounded));
        let deeper = range.take_while(|(found, _)| found.as_str().starts_with(&below)).map(|(_, dir)| *dir);
        let itself = self.paths.get(path).filter(|_| !path.is_root()).copied();
        itself.into_iter().chain(deeper).collect()
    }

    /// The lowest block that any directory needs.
    pub fn lowest(&self) -> Option<u64> {
        self.needs.first().map(|(seq, _)| *seq)
    }

    /// The directories by what they need, the oldest first.
    pub fn by_needs(&self) -> impl Iterator<Item = (u64, DirNo)> {
        self.needs.iter().copied()
    }

    /// The bytes at the end of a file: the frame that is written most often.
    pub fn append(&mut self, file: FileNo, piece: Piece) -> Result<&mut File<L>, Corrupt> {
        let file = self.files.get_mut(&file).ok_or(NO_SUCH_FILE)?;
        if piece.pos != file.len {
            return Err(Corrupt("an append that is not at the end of its file"));
        }
        file.len = piece.pos.checked_add(u64::from(piece.len)).ok_or(Corrupt("a file beyond all bounds"))?;
        file.pieces.push_back(piece);
        Ok(file)
    }

    /// Applies a frame of block `seq`. After an error the tree is of no use.
    pub fn apply(&mut self, seq: u64, frame: Frame, effects: &mut Effects<L>) -> Result<(), Corrupt> {
        match frame {
            Frame::Dir { dir, path, is_released, files } => {
                self.begin(seq, dir, path, is_released, files, effects)
            }
            Frame::Create { dir, file, name } => match self.dirs.contains_key(&dir) {
                true => self.enter(dir, file, name.into(), Vec::new()).map(|_| ()),
                false => Ok(()),
            },
            Frame::Append { dir, file, piece } => match self.dirs.contains_key(&dir) {
                true => {
                    effects.held.push(piece.seq);
                    self.append(file, piece).map(|_| ())
                }
                false => Ok(()),
            },
            Frame::Put { dir, file, name, chunks, piece } => {
                let Some(directory) = self.dirs.get(&dir) else { return Ok(()) };
                if let Some(older) = directory.names.get(name.as_str()).copied() {
                    self.remove_file(older, true, effects)?;
                }
                self.enter(dir, file, name.into(), chunks)?;
                if piece.len > 0 {
                    effects.held.push(piece.seq);
                    self.append(file, piece)?;
                }
                Ok(())
            }
            Frame::Cut { dir, file, len } => match self.dirs.contains_key(&dir) {
                true => self.cut(file, len, effects),
                false => Ok(()),
            },
            Frame::Remove { gone } => {
                for (dir, file) in
                    gone.into_iter().filter(|(dir, _)| self.dirs.contains_key(dir)).collect::<Vec<_>>()
                {
                    match file {
                        Some(file) => self.remove_file(file, true, effects)?,
                        None => self.remove_dir(dir, true, effects)?,
                    }
                }
                Ok(())
            }
            Frame::Chunk { dir, file, chunk } => match self.dirs.contains_key(&dir) {
                true => self.chunk(file, chunk, effects),
                false => Ok(()),
            },
        }
    }

    /// The whole state of a directory: a new one, a new incarnation of one, or the same said again.
    fn begin(
        &mut self,
        seq: u64,
        dir: DirNo,
        path: StorePath,
        is_released: bool,
        files: Vec<FileFrame>,
        effects: &mut Effects<L>,
    ) -> Result<(), Corrupt> {
        let older = self.paths.get(&path).copied();
        let mut kept = HashMap::new();
        if older == Some(dir) {
            let directory = self.dirs.remove(&dir).ok_or(NO_SUCH_FILE)?;
            self.needs.remove(&(directory.needs, dir));
            for file in directory.names.values() {
                let was = self.files.remove(file).ok_or(NO_SUCH_FILE)?;
                effects.freed.extend(was.pieces.iter().map(|piece| piece.seq));
                kept.insert(*file, was.live);
            }
        } else if let Some(older) = older {
            // Its objects are those of the new incarnation.
            self.remove_dir(older, false, effects)?;
        }
        let pieces = files.iter().flat_map(|file| &file.tail);
        let needs = pieces.clone().map(|piece| piece.seq).fold(seq, u64::min);
        effects.held.extend(pieces.map(|piece| piece.seq));
        self.paths.insert(path.clone(), dir);
        self.needs.insert((needs, dir));
        self.dirs.insert(dir, Directory { path, names: BTreeMap::new(), is_released, needs });
        for FileFrame { file, name, len, chunks, tail } in files {
            let live = kept.remove(&file);
            let entered = self.enter(dir, file, name.into(), chunks)?;
            entered.len = len;
            entered.pieces = tail.into();
            entered.live = live.unwrap_or_default();
        }
        if kept.is_empty() {
            Ok(())
        } else {
            Err(Corrupt("a directory that lost a file by being said again"))
        }
    }

    fn enter(
        &mut self,
        dir: DirNo,
        file: FileNo,
        name: Arc<str>,
        chunks: Vec<Chunk>,
    ) -> Result<&mut File<L>, Corrupt> {
        let directory = self.dirs.get_mut(&dir).ok_or(NO_SUCH_FILE)?;
        if directory.names.insert(name.clone(), file).is_some() {
            return Err(Corrupt("a file of a name that is taken"));
        }
        if self.files.contains_key(&file) {
            return Err(Corrupt("a file of a number that is taken"));
        }
        let len = chunks.last().map_or(0, Chunk::end);
        let dir_path = directory.path.clone();
        let new = File { dir, dir_path, name, len, chunks, pieces: VecDeque::new(), live: L::default() };
        Ok(self.files.entry(file).or_insert(new))
    }

    fn cut(&mut self, number: FileNo, len: u64, effects: &mut Effects<L>) -> Result<(), Corrupt> {
        let file = self.files.get_mut(&number).ok_or(NO_SUCH_FILE)?;
        if len > file.len {
            return Err(Corrupt("a cut beyond the end of its file"));
        }
        file.len = len;
        while let Some(piece) = file.pieces.pop_back_if(|piece| piece.pos >= len) {
            effects.freed.push(piece.seq);
        }
        if let Some(last) = file.pieces.back_mut() {
            last.len = (len - last.pos).min(u64::from(last.len)) as u32;
        }
        while let Some(chunk) = file.chunks.pop_if(|chunk| chunk.from >= len) {
            effects.objects.push((number, file.dir_path.clone(), file.name.clone(), chunk));
        }
        if let Some(last) = file.chunks.last_mut() {
            last.len = last.len.min(len - last.from);
        }
        Ok(())
    }

    /// An object takes the place of chunks and of the front of the tail.
    fn chunk(&mut self, number: FileNo, chunk: Chunk, effects: &mut Effects<L>) -> Result<(), Corrupt> {
        let file = self.files.get_mut(&number).ok_or(NO_SUCH_FILE)?;
        let end = chunk.end();
        let first = file.chunks.partition_point(|old| old.from < chunk.from);
        let last = file.chunks.partition_point(|old| old.from < end);
        let begins = file.chunks.get(first).map_or(file.chunk_end(), |old| old.from) == chunk.from;
        let ends = last.checked_sub(1).is_none_or(|last| file.chunks[last].end() <= end);
        let is_whole = end == file.chunk_end() || file.chunks.get(last).is_some_and(|next| next.from == end);
        let reaches_tail = last == file.chunks.len() && end <= file.len;
        if chunk.len == 0 || !begins || !ends || !(is_whole || reaches_tail) {
            return Err(Corrupt("a chunk that does not fit its file"));
        }
        for old in file.chunks.splice(first..last, [chunk]) {
            effects.objects.push((number, file.dir_path.clone(), file.name.clone(), old));
        }
        while let Some(piece) = file.pieces.pop_front_if(|piece| piece.end() <= end) {
            effects.freed.push(piece.seq);
        }
        if let Some(piece) = file.pieces.front_mut()
            && piece.pos < end
        {
            let gone = (end - piece.pos) as u32;
            *piece = Piece { pos: end, len: piece.len - gone, at: piece.at + gone, seq: piece.seq };
        }
        Ok(())
    }

    fn remove_dir(
        &mut self,
        dir: DirNo,
        are_objects_gone: bool,
        effects: &mut Effects<L>,
    ) -> Result<(), Corrupt> {
        let files: Vec<FileNo> = self.dirs.get(&dir).ok_or(NO_SUCH_FILE)?.names.values().copied().collect();
        for file in files {
            self.remove_file(file, are_objects_gone, effects)?;
        }
        let directory = self.dirs.remove(&dir).ok_or(NO_SUCH_FILE)?;
        self.needs.remove(&(directory.needs, dir));
        self.paths.remove(&directory.path);
        Ok(())
    }

    fn remove_file(
        &mut self,
        number: FileNo,
        are_objects_gone: bool,
        effects: &mut Effects<L>,
    ) -> Result<(), Corrupt> {
        let file = self.files.remove(&number).ok_or(NO_SUCH_FILE)?;
        let directory = self.dirs.get_mut(&file.dir).ok_or(NO_SUCH_FILE)?;
        directory.names.remove(&file.name);
        if are_objects_gone {
            for chunk in &file.chunks {
                effects.objects.push((number, file.dir_path.clone(), file.name.clone(), *chunk));
            }
        }
        effects.removed.push((number, file));
        Ok(())
    }
}

const NO_SUCH_FILE: Corrupt = Corrupt("a frame names a file that its directory does not hold");

#[cfg(test)]
#[path = "tree_tests.rs"]
mod tests;
