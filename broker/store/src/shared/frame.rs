//! Frames: what a block of the shared log says, and how it looks.
//!
//! ```text
//! payload | version u8 = 2 | frames u32 | frame, frame ...
//! frame   | kind u8 | length of the body u32 | body
//!
//! 1 directory | dir | flags u8 (1: released) | path text | files, and each of them:
//!             |   name: bytes shared with the one before, rest text | file | length
//!             |   chunks, each: length, place | tail pieces, each: length | where
//!             |     where: 0 and the bytes, or block number + 1 and position in that block
//! 2 create    | dir | file | name text
//! 3 append    | dir | file | position | bytes to the end of the body
//! 4 put       | dir | file | name text | chunks | bytes to the end of the body
//! 5 cut       | dir | file | length
//! 6 remove    | count, each: dir, file + 1 (0: the whole directory)
//! 7 chunk     | dir | file | from | length | place
//!
//! place       | broker u32 | epoch | number of the object | 0, or 1 and more: where in a pack, plus 1
//! text        | length | UTF-8
//! ```
//! Fixed integers are big-endian, all others are varints (LEB128). A directory's first frame says its
//! whole state; what comes before it in a log is of no use. There is no checksum: the block has one.

use std::collections::HashMap;

use bytes::Bytes;

use super::tree::{Chunk, Corrupt, DirNo, FileNo, ObjectId, Piece};
use crate::{Life, StorePath};

const VERSION: u8 = 2;
const HEADER_LEN: usize = 5;

const DIR: u8 = 1;
const CREATE: u8 = 2;
const APPEND: u8 = 3;
const PUT: u8 = 4;
const CUT: u8 = 5;
const REMOVE: u8 = 6;
const CHUNK: u8 = 7;

/// A frame taken from a block. Bytes are where they are in the block: a [`Piece`] says where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Frame {
    Dir { dir: DirNo, path: StorePath, is_released: bool, files: Vec<FileFrame> },
    Create { dir: DirNo, file: FileNo, name: String },
    Append { dir: DirNo, file: FileNo, piece: Piece },
    Put { dir: DirNo, file: FileNo, name: String, chunks: Vec<Chunk>, piece: Piece },
    Cut { dir: DirNo, file: FileNo, len: u64 },
    Remove { gone: Vec<(DirNo, Option<FileNo>)> },
    Chunk { dir: DirNo, file: FileNo, chunk: Chunk },
}

/// A file as the frame of its directory says it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct FileFrame {
    pub file: FileNo,
    pub name: String,
    pub len: u64,
    pub chunks: Vec<Chunk>,
    pub tail: Vec<Piece>,
}

/// A file to be written into the frame of its directory.
pub(super) struct FileState {
    pub file: FileNo,
    pub name: String,
    pub chunks: Vec<Chunk>,
    pub tail: Vec<Tail>,
}

/// A part of a tail: said again here, or left where it is in the log.
pub(super) enum Tail {
    Here(Vec<Bytes>),
    There(Piece),
}

impl FileState {
    pub fn len(&self) -> u64 {
        let in_log: u64 = self.tail.iter().map(Tail::len).sum();
        self.chunks.last().map_or(0, Chunk::end) + in_log
    }
}

impl Tail {
    pub fn len(&self) -> u64 {
        match self {
            Tail::Here(parts) => parts.iter().map(|part| part.len() as u64).sum(),
            Tail::There(piece) => u64::from(piece.len),
        }
    }
}

/// The payload of a block while it is written.
#[derive(Debug)]
pub(super) struct Payload {
    bytes: Vec<u8>,
    frames: u32,
}

impl Payload {
    pub fn with_capacity(capacity: usize) -> Payload {
        let mut bytes = Vec::with_capacity(capacity.max(HEADER_LEN));
        bytes.extend_from_slice(&[VERSION, 0, 0, 0, 0]);
        Payload { bytes, frames: 0 }
    }

    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    pub fn finish(mut self) -> Bytes {
        self.bytes[1..HEADER_LEN].copy_from_slice(&self.frames.to_be_bytes());
        Bytes::from(self.bytes)
    }

    pub fn dir(&mut self, dir: DirNo, path: &StorePath, is_released: bool, files: &[FileState]) {
        self.frame(DIR, |out| {
            varint(out, dir.0);
            put_dir(out, path, is_released, files);
        });
    }

    pub fn create(&mut self, dir: DirNo, file: FileNo, name: &str) {
        self.frame(CREATE, |out| {
            varint(out, dir.0);
            varint(out, file.0);
            text(out, name);
        });
    }

    /// Returns where the bytes are.
    pub fn append<'a>(
        &mut self,
        dir: DirNo,
        file: FileNo,
        pos: u64,
        parts: impl Iterator<Item = &'a [u8]>,
    ) -> u32 {
        let mut at = 0;
        self.frame(APPEND, |out| {
            varint(out, dir.0);
            varint(out, file.0);
            varint(out, pos);
            at = out.len();
            parts.for_each(|part| out.extend_from_slice(part));
        });
        at as u32
    }

    pub fn put(&mut self, dir: DirNo, file: FileNo, name: &str, chunks: &[Chunk], bytes: &[u8]) {
        self.frame(PUT, |out| {
            varint(out, dir.0);
            varint(out, file.0);
            text(out, name);
            put_chunks(out, chunks);
            out.extend_from_slice(bytes);
        });
    }

    pub fn cut(&mut self, dir: DirNo, file: FileNo, len: u64) {
        self.frame(CUT, |out| {
            varint(out, dir.0);
            varint(out, file.0);
            varint(out, len);
        });
    }

    pub fn remove(&mut self, gone: &[(DirNo, Option<FileNo>)]) {
        self.frame(REMOVE, |out| {
            varint(out, gone.len() as u64);
            for (dir, file) in gone {
                varint(out, dir.0);
                varint(out, file.map_or(0, |file| file.0 + 1));
            }
        });
    }

    pub fn chunk(&mut self, dir: DirNo, file: FileNo, chunk: &Chunk) {
        self.frame(CHUNK, |out| {
            varint(out, dir.0);
            varint(out, file.0);
            varint(out, chunk.from);
            varint(out, chunk.len);
            put_place(out, chunk);
        });
    }

    fn frame(&mut self, kind: u8, body: impl FnOnce(&mut Vec<u8>)) {
        let start = self.bytes.len();
        self.bytes.extend_from_slice(&[kind, 0, 0, 0, 0]);
        body(&mut self.bytes);
        let length = (self.bytes.len() - start - HEADER_LEN) as u32;
        self.bytes[start + 1..start + HEADER_LEN].copy_from_slice(&length.to_be_bytes());
        self.frames += 1;
    }
}

/// The state of directories by themselves: what one broker hands to another.
pub(super) fn encode_manifest<'a>(dirs: impl Iterator<Item = (&'a StorePath, &'a [FileState])>) -> Bytes {
    let mut out = vec![VERSION, 0, 0, 0, 0];
    let mut count = 0_u32;
    for (path, files) in dirs {
        put_dir(&mut out, path, false, files);
        count += 1;
    }
    out[1..5].copy_from_slice(&count.to_be_bytes());
    Bytes::from(out)
}

/// The inverse; the pieces of the tails are places in `bytes`.
pub(super) fn decode_manifest(bytes: &[u8]) -> Result<HashMap<StorePath, Vec<FileFrame>>, Corrupt> {
    let mut take = Take { bytes, at: 0, end: bytes.len() };
    if take.u8()? != VERSION {
        return Err(Corrupt("a manifest of another version"));
    }
    let mut dirs = HashMap::new();
    for _ in 0..take.u32()? {
        let (path, _, files) = take_dir(&mut take, 0)?;
        if dirs.insert(path, files).is_some() {
            return Err(Corrupt("a directory that a manifest has twice"));
        }
    }
    take.finish()?;
    Ok(dirs)
}

/// Calls `visit` with every frame of a block's payload.
pub(super) fn decode(
    payload: &[u8],
    seq: u64,
    visit: &mut dyn FnMut(Frame) -> Result<(), Corrupt>,
) -> Result<(), Corrupt> {
    let mut take = Take { bytes: payload, at: 0, end: payload.len() };
    if take.u8()? != VERSION {
        return Err(Corrupt("a block of another version"));
    }
    for _ in 0..take.u32()? {
        visit(take_frame(&mut take, seq)?)?;
    }
    take.finish()
}

/// The frame that begins at `at`.
pub(super) fn decode_at(payload: &[u8], at: usize, seq: u64) -> Result<Frame, Corrupt> {
    take_frame(&mut Take { bytes: payload, at, end: payload.len() }, seq)
}

fn take_frame(take: &mut Take<'_>, seq: u64) -> Result<Frame, Corrupt> {
    let kind = take.u8()?;
    let length = take.u32()? as usize;
    let mut body = take.part(length)?;
    let frame = match kind {
        DIR => {
            let dir = DirNo(body.varint()?);
            let (path, is_released, files) = take_dir(&mut body, seq)?;
            Frame::Dir { dir, path, is_released, files }
        }
        CREATE => Frame::Create { dir: body.dir()?, file: body.file()?, name: body.text()? },
        APPEND => {
            let (dir, file, pos) = (body.dir()?, body.file()?, body.varint()?);
            Frame::Append { dir, file, piece: body.rest(pos, seq)? }
        }
        PUT => {
            let (dir, file, name) = (body.dir()?, body.file()?, body.text()?);
            let chunks = take_chunks(&mut body)?;
            let pos = chunks.last().map_or(0, Chunk::end);
            Frame::Put { dir, file, name, chunks, piece: body.rest(pos, seq)? }
        }
        CUT => Frame::Cut { dir: body.dir()?, file: body.file()?, len: body.varint()? },
        REMOVE => {
            let mut gone = Vec::new();
            for _ in 0..body.varint()? {
                gone.push((body.dir()?, body.varint()?.checked_sub(1).map(FileNo)));
            }
            Frame::Remove { gone }
        }
        CHUNK => {
            let (dir, file) = (body.dir()?, body.file()?);
            let (from, len) = (body.varint()?, body.varint()?);
            let (object, at) = body.place()?;
            let chunk = Chunk { from, len, object, at };
            Frame::Chunk { dir, file, chunk: chunk.checked()? }
        }
        _ => return Err(Corrupt("a frame of an unknown kind")),
    };
    body.finish()?;
    Ok(frame)
}

fn put_dir(out: &mut Vec<u8>, path: &StorePath, is_released: bool, files: &[FileState]) {
    out.push(u8::from(is_released));
    text(out, path.as_str());
    varint(out, files.len() as u64);
    let mut before = "";
    for file in files {
        let shared = shared_prefix(before, &file.name);
        varint(out, shared as u64);
        text(out, &file.name[shared..]);
        varint(out, file.file.0);
        varint(out, file.len());
        put_chunks(out, &file.chunks);
        varint(out, file.tail.len() as u64);
        for part in &file.tail {
            varint(out, part.len());
            match part {
                Tail::Here(parts) => {
                    varint(out, 0);
                    parts.iter().for_each(|part| out.extend_from_slice(part));
                }
                Tail::There(piece) => {
                    varint(out, piece.seq + 1);
                    varint(out, u64::from(piece.at));
                }
            }
        }
        before = &file.name;
    }
}

fn take_dir(take: &mut Take<'_>, seq: u64) -> Result<(StorePath, bool, Vec<FileFrame>), Corrupt> {
    let is_released = match take.u8()? {
        0 => false,
        1 => true,
        _ => return Err(Corrupt("a directory with unknown flags")),
    };
    let path = StorePath::parse(&take.text()?).map_err(|_| Corrupt("a directory without a proper path"))?;
    let mut files: Vec<FileFrame> = Vec::new();
    for _ in 0..take.varint()? {
        let before = files.last().map_or("", |file| file.name.as_str());
        let shared = usize::try_from(take.varint()?).unwrap_or(usize::MAX);
        let prefix = before.get(..shared).ok_or(Corrupt("a name that shares too much"))?;
        let name = format!("{prefix}{}", take.text()?);
        let (file, len) = (take.file()?, take.varint()?);
        let chunks = take_chunks(take)?;
        let mut tail = Vec::new();
        let mut pos = chunks.last().map_or(0, Chunk::end);
        for _ in 0..take.varint()? {
            let length = u32::try_from(take.varint()?).map_err(|_| Corrupt("a piece beyond a block"))?;
            let piece = match take.varint()? {
                0 => Piece { pos, len: length, at: take.skip(length as usize)?, seq },
                block => {
                    let at = u32::try_from(take.varint()?).map_err(|_| Corrupt("a place beyond a block"))?;
                    Piece { pos, len: length, at, seq: block - 1 }
                }
            };
            pos = pos.checked_add(u64::from(length)).ok_or(Corrupt("a file beyond all bounds"))?;
            tail.push(piece);
        }
        if pos != len {
            return Err(Corrupt("a file whose parts do not add up to it"));
        }
        files.push(FileFrame { file, name, len, chunks, tail });
    }
    Ok((path, is_released, files))
}

fn put_chunks(out: &mut Vec<u8>, chunks: &[Chunk]) {
    varint(out, chunks.len() as u64);
    for chunk in chunks {
        varint(out, chunk.len);
        put_place(out, chunk);
    }
}

fn take_chunks(take: &mut Take<'_>) -> Result<Vec<Chunk>, Corrupt> {
    let mut chunks: Vec<Chunk> = Vec::new();
    for _ in 0..take.varint()? {
        let from = chunks.last().map_or(0, Chunk::end);
        let len = take.varint()?;
        let (object, at) = take.place()?;
        let chunk = Chunk { from, len, object, at };
        chunks.push(chunk.checked()?);
    }
    Ok(chunks)
}

fn put_place(out: &mut Vec<u8>, chunk: &Chunk) {
    varint(out, u64::from(chunk.object.life.broker as u32));
    varint(out, chunk.object.life.epoch);
    varint(out, chunk.object.number);
    varint(out, chunk.at.map_or(0, |at| at + 1));
}

fn varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

fn text(out: &mut Vec<u8>, text: &str) {
    varint(out, text.len() as u64);
    out.extend_from_slice(text.as_bytes());
}

fn shared_prefix(one: &str, other: &str) -> usize {
    let mut shared = one.bytes().zip(other.bytes()).take_while(|(a, b)| a == b).count();
    while !other.is_char_boundary(shared) {
        shared -= 1;
    }
    shared
}

const SHORT: Corrupt = Corrupt("a frame is cut short");

/// Reads from `at` up to `end`.
struct Take<'a> {
    bytes: &'a [u8],
    at: usize,
    end: usize,
}

impl<'a> Take<'a> {
    fn skip(&mut self, len: usize) -> Result<u32, Corrupt> {
        let at = self.at;
        if len > self.end - at {
            return Err(SHORT);
        }
        self.at += len;
        u32::try_from(at).map_err(|_| SHORT)
    }

    /// A reader of the next `len` bytes.
    fn part(&mut self, len: usize) -> Result<Take<'a>, Corrupt> {
        let at = self.skip(len)? as usize;
        Ok(Take { bytes: self.bytes, at, end: at + len })
    }

    fn u8(&mut self) -> Result<u8, Corrupt> {
        let at = self.skip(1)? as usize;
        Ok(self.bytes[at])
    }

    fn u32(&mut self) -> Result<u32, Corrupt> {
        let at = self.skip(4)? as usize;
        let mut four = [0; 4];
        four.copy_from_slice(&self.bytes[at..at + 4]);
        Ok(u32::from_be_bytes(four))
    }

    fn varint(&mut self) -> Result<u64, Corrupt> {
        let mut value = 0_u64;
        for shift in (0..64).step_by(7) {
            let byte = self.u8()?;
            let bits = u64::from(byte & 0x7f);
            if shift == 63 && bits > 1 {
                break;
            }
            value |= bits << shift;
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(Corrupt("a number beyond 64 bits"))
    }

    fn text(&mut self) -> Result<String, Corrupt> {
        let len = usize::try_from(self.varint()?).map_err(|_| SHORT)?;
        let at = self.skip(len)? as usize;
        let text = std::str::from_utf8(&self.bytes[at..at + len]);
        Ok(text.map_err(|_| Corrupt("a text that is not UTF-8"))?.to_owned())
    }

    fn dir(&mut self) -> Result<DirNo, Corrupt> {
        self.varint().map(DirNo)
    }

    fn file(&mut self) -> Result<FileNo, Corrupt> {
        self.varint().map(FileNo)
    }

    fn place(&mut self) -> Result<(ObjectId, Option<u64>), Corrupt> {
        let broker = u32::try_from(self.varint()?).map_err(|_| Corrupt("a broker beyond 32 bits"))? as i32;
        let object = ObjectId { life: Life { broker, epoch: self.varint()? }, number: self.varint()? };
        Ok((object, self.varint()?.checked_sub(1)))
    }

    /// What is left, as bytes of a file from `pos` on.
    fn rest(&mut self, pos: u64, seq: u64) -> Result<Piece, Corrupt> {
        let len = self.end - self.at;
        let at = self.skip(len)?;
        pos.checked_add(len as u64).ok_or(Corrupt("a file beyond all bounds"))?;
        Ok(Piece { pos, len: len as u32, at, seq })
    }

    fn finish(&self) -> Result<(), Corrupt> {
        if self.at == self.end { Ok(()) } else { Err(Corrupt("bytes after the last frame")) }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Something to write, with its bytes.
    #[derive(Clone, Debug)]
    enum Said {
        Dir(u64, bool, Vec<(String, u64, Vec<Chunk>, Vec<SaidTail>)>),
        Create(u64, u64, String),
        Append(u64, u64, u64, Vec<u8>),
        Put(u64, u64, String, Vec<Chunk>, Vec<u8>),
        Cut(u64, u64, u64),
        Remove(Vec<(u64, Option<u64>)>),
        Chunk(u64, u64, Chunk),
    }

    #[derive(Clone, Debug)]
    enum SaidTail {
        Here(Vec<u8>),
        There(u32, u32, u64),
    }

    fn number() -> impl Strategy<Value = u64> {
        prop_oneof![0..300_u64, 0..u64::MAX / 4]
    }

    fn place() -> impl Strategy<Value = (ObjectId, Option<u64>)> {
        (any::<i32>(), any::<u64>(), any::<u64>(), prop::option::of(number()))
            .prop_map(|(broker, epoch, number, at)| (ObjectId { life: Life { broker, epoch }, number }, at))
    }

    fn chunks() -> impl Strategy<Value = Vec<Chunk>> {
        prop::collection::vec((0..1_u64 << 40, place()), 0..4).prop_map(|parts| {
            let mut from = 0;
            let chunk = |(len, (object, at))| {
                from += len;
                Chunk { from: from - len, len, object, at }
            };
            parts.into_iter().map(chunk).collect()
        })
    }

    fn name() -> impl Strategy<Value = String> {
        "[0-9]{1,3}(a|é|ü|/x)?\\.(log|index)"
    }

    fn tail() -> impl Strategy<Value = SaidTail> {
        prop_oneof![
            prop::collection::vec(any::<u8>(), 0..9).prop_map(SaidTail::Here),
            (any::<u32>(), any::<u32>(), number()).prop_map(|(len, at, seq)| SaidTail::There(len, at, seq)),
        ]
    }

    fn said() -> impl Strategy<Value = Said> {
        let bytes = || prop::collection::vec(any::<u8>(), 0..40);
        let file = (name(), number(), chunks(), prop::collection::vec(tail(), 0..3));
        prop_oneof![
            (number(), any::<bool>(), prop::collection::vec(file, 0..4))
                .prop_map(|(dir, is_released, files)| Said::Dir(dir, is_released, files)),
            (number(), number(), name()).prop_map(|(dir, file, name)| Said::Create(dir, file, name)),
            (number(), number(), number(), bytes()).prop_map(|(d, f, pos, b)| Said::Append(d, f, pos, b)),
            (number(), number(), name(), chunks(), bytes())
                .prop_map(|(d, f, n, c, b)| Said::Put(d, f, n, c, b)),
            (number(), number(), number()).prop_map(|(dir, file, len)| Said::Cut(dir, file, len)),
            prop::collection::vec((number(), prop::option::of(number())), 0..4).prop_map(Said::Remove),
            (number(), number(), number(), number(), place()).prop_map(|(d, f, from, len, (object, at))| {
                Said::Chunk(d, f, Chunk { from, len, object, at })
            }),
        ]
    }

    fn dir_path() -> StorePath {
        StorePath::parse("topic id/topic-0").unwrap()
    }

    fn states(files: &[(String, u64, Vec<Chunk>, Vec<SaidTail>)]) -> Vec<FileState> {
        let part = |tail: &SaidTail| match tail {
            SaidTail::Here(bytes) => Tail::Here(vec![Bytes::from(bytes.clone())]),
            SaidTail::There(len, at, seq) => Tail::There(Piece { pos: 0, len: *len, at: *at, seq: *seq }),
        };
        let state = |(name, file, chunks, tail): &(String, u64, Vec<Chunk>, Vec<SaidTail>)| FileState {
            file: FileNo(*file),
            name: name.clone(),
            chunks: chunks.clone(),
            tail: tail.iter().map(part).collect(),
        };
        files.iter().map(state).collect()
    }

    fn say(payload: &mut Payload, said: &Said) {
        match said {
            Said::Dir(dir, is_released, files) => {
                payload.dir(DirNo(*dir), &dir_path(), *is_released, &states(files))
            }
            Said::Create(dir, file, name) => payload.create(DirNo(*dir), FileNo(*file), name),
            Said::Append(dir, file, pos, bytes) => {
                let (front, back) = bytes.split_at(bytes.len() / 2);
                payload.append(DirNo(*dir), FileNo(*file), *pos, [front, back].into_iter());
            }
            Said::Put(dir, file, name, chunks, bytes) => {
                payload.put(DirNo(*dir), FileNo(*file), name, chunks, bytes)
            }
            Said::Cut(dir, file, len) => payload.cut(DirNo(*dir), FileNo(*file), *len),
            Said::Remove(gone) => {
                let gone: Vec<_> = gone.iter().map(|(d, f)| (DirNo(*d), f.map(FileNo))).collect();
                payload.remove(&gone);
            }
            Said::Chunk(dir, file, chunk) => payload.chunk(DirNo(*dir), FileNo(*file), chunk),
        }
    }

    fn at<'a>(payload: &'a [u8], piece: &Piece) -> &'a [u8] {
        &payload[piece.at as usize..][..piece.len as usize]
    }

    fn is_the_same(said: &Said, frame: &Frame, payload: &[u8]) -> bool {
        match (said, frame) {
            (
                Said::Dir(dir, is_released, files),
                Frame::Dir { dir: d, path, is_released: r, files: found },
            ) => {
                let file = |((name, file, chunks, tail), f): (
                    &(String, u64, Vec<Chunk>, Vec<SaidTail>),
                    &FileFrame,
                )| {
                    *name == f.name
                        && *file == f.file.0
                        && *chunks == f.chunks
                        && tail.len() == f.tail.len()
                        && tail.iter().zip(&f.tail).all(|(tail, piece)| match tail {
                            SaidTail::Here(bytes) => at(payload, piece) == bytes && piece.seq == 77,
                            SaidTail::There(len, at, seq) => {
                                (*len, *at, *seq) == (piece.len, piece.at, piece.seq)
                            }
                        })
                };
                *dir == d.0
                    && is_released == r
                    && *path == dir_path()
                    && files.len() == found.len()
                    && files.iter().zip(found).all(file)
            }
            (Said::Create(dir, file, name), Frame::Create { dir: d, file: f, name: n }) => {
                (*dir, *file, name) == (d.0, f.0, n)
            }
            (Said::Append(dir, file, pos, bytes), Frame::Append { dir: d, file: f, piece }) => {
                (*dir, *file, *pos, &bytes[..]) == (d.0, f.0, piece.pos, at(payload, piece))
            }
            (
                Said::Put(dir, file, name, chunks, bytes),
                Frame::Put { dir: d, file: f, name: n, chunks: c, piece },
            ) => {
                (*dir, *file, name, chunks, &bytes[..]) == (d.0, f.0, n, c, at(payload, piece))
                    && piece.pos == c.last().map_or(0, Chunk::end)
            }
            (Said::Cut(dir, file, len), Frame::Cut { dir: d, file: f, len: l }) => {
                (*dir, *file, len) == (d.0, f.0, l)
            }
            (Said::Remove(gone), Frame::Remove { gone: found }) => {
                let found: Vec<_> = found.iter().map(|(d, f)| (d.0, f.map(|f| f.0))).collect();
                *gone == found
            }
            (Said::Chunk(dir, file, chunk), Frame::Chunk { dir: d, file: f, chunk: c }) => {
                (*dir, *file, chunk) == (d.0, f.0, c)
            }
            _ => false,
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn what_was_written_is_read_and_every_cut_is_refused(all in prop::collection::vec(said(), 0..6)) {
            let mut payload = Payload::with_capacity(0);
            all.iter().for_each(|said| say(&mut payload, said));
            let bytes = payload.finish();
            let mut frames = Vec::new();
            let read = decode(&bytes, 77, &mut |frame| { frames.push(frame); Ok(()) });
            prop_assert_eq!(read, Ok(()));
            prop_assert_eq!(frames.len(), all.len());
            for (said, frame) in all.iter().zip(&frames) {
                prop_assert!(is_the_same(said, frame, &bytes), "{:?} became {:?}", said, frame);
            }
            for cut in 0..bytes.len() {
                prop_assert!(decode(&bytes[..cut], 77, &mut |_| Ok(())).is_err(), "cut at {}", cut);
            }
            let longer = [&bytes[..], &[0]].concat();
            prop_assert!(decode(&longer, 77, &mut |_| Ok(())).is_err());
        }

        #[test]
        fn a_manifest_is_read_again_and_every_cut_is_refused(
            files in prop::collection::vec((name(), number(), chunks(), prop::collection::vec(
                prop::collection::vec(any::<u8>(), 0..9).prop_map(SaidTail::Here), 0..3)), 0..4),
        ) {
            let (path, other, files) = (dir_path(), dir_path().join("other").unwrap(), states(&files));
            let bytes = encode_manifest([(&path, &files[..]), (&other, &files[..])].into_iter());
            let found = decode_manifest(&bytes).unwrap();
            prop_assert_eq!(found.len(), 2);
            prop_assert!([path, other].iter().all(|dir| found[dir].len() == files.len()));
            for cut in 0..bytes.len() {
                prop_assert!(decode_manifest(&bytes[..cut]).is_err(), "cut at {}", cut);
            }
        }

        #[test]
        fn no_bytes_are_too_strange_to_be_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = decode(&bytes, 0, &mut |_| Ok(()));
            let mut one = vec![VERSION, 0, 0, 0, 1];
            one.extend_from_slice(&bytes);
            let _ = decode(&one, 0, &mut |_| Ok(()));
            let _ = decode_manifest(&bytes);
        }
    }
}
