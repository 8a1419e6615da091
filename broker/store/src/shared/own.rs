//! Taking directories over from a dead broker or a living one, and handing them on.
//!
//! Whoever takes over ends the life that had them: from then on the store refuses its writer, and what
//! its log says is final. The state of each directory is said again in the own log, durably, before
//! anything is served. Until it is on record that this broker is the owner, no object that another heir
//! may need is deleted.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Instant;

use bytes::Bytes;
use parking_lot::{Mutex, MutexGuard};

use super::core::{Core, Garbage, Unconfirmed};
use super::frame::{self, FileFrame, FileState, Frame, Tail};
use super::jobs::{Collect, Job, Orphans};
use super::log::PAUSE_AFTER_FAILURE;
use super::packs;
use super::tree::{self, Chunk, DirNo, FileNo, ObjectId, Piece, Tree};
use super::{Inner, Shared};
use crate::remote::Block;
use crate::{Life, StoreError, StorePath};

/// Where the state of a directory is to be found.
#[derive(Clone, Debug)]
pub struct Inheritance {
    pub dir: StorePath,
    /// The lives that are on record as its owners, the oldest first. Without a manifest all of them are
    /// ended, and what the latest one says that has it counts. A life that took it over and did not get that
    /// on record must not be among them: its log may still tell of an older time.
    pub lives: Vec<Life>,
    /// What a living owner said of this directory, and maybe of others, when it let go. It counts alone: whoever
    /// took the directory over from it since, and is not on record, has acknowledged nothing. The record goes on to name that owner's life
    /// until another is on record, or its packs may be removed ([`leftovers::forget`]).
    ///
    /// [`leftovers::forget`]: super::leftovers::forget
    pub manifest: Option<Bytes>,
}

/// Where it was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Inherited {
    Life(Life),
    Manifest,
    /// There were neither lives nor a manifest: it is new.
    Nothing,
}

impl Shared {
    /// Takes directories over and makes that durable. Each has to be confirmed or disowned afterwards;
    /// it may be read and written at once. The call may be made again, after an error or before it is
    /// confirmed: then what the sources say by that time counts, and what was written here since does
    /// not. [`StoreError::Corrupt`] if a log is damaged, or if no life that is on record has anything of
    /// a directory: an owner made it durable before it got on record, so that is a loss.
    pub fn adopt(&self, all: &[Inheritance]) -> Result<Vec<Inherited>, StoreError> {
        self.inner.adopt(all)
    }

    /// It is on record that this broker is the owner: what is no longer needed may be deleted.
    pub fn confirm(&self, dirs: &[StorePath]) {
        let mut core = self.inner.core.lock();
        dirs.iter().for_each(|dir| core.confirm(dir));
        drop(core);
        self.inner.work.notify_one();
    }

    /// Another broker is the owner, as is on record: this life forgets the directory and leaves its
    /// objects alone. The end of a hand-over, or of a take-over that another has won.
    pub fn disown(&self, dir: &StorePath) -> Result<(), StoreError> {
        self.inner.core.lock().disown(dir)
    }

    /// Ends all writing to directories and returns their state, a manifest for each group of them
    /// ([`Inheritance::manifest`]). They stay in this life's log until they are disowned; to keep one after
    /// all, adopt it with the manifest. All or none of them are released.
    pub fn release(&self, groups: &[&[StorePath]]) -> Result<Vec<Bytes>, StoreError> {
        self.inner.release(groups)
    }

    /// [`leftovers::forget`] by the owner of another life; its own is refused.
    ///
    /// [`leftovers::forget`]: super::leftovers::forget
    pub fn forget(&self, life: Life) -> Result<bool, StoreError> {
        if life == self.inner.life {
            return Err(StoreError::Io(format!("life {life} is this broker's own: its log is kept")));
        }
        super::leftovers::forget(&*self.inner.remote, life)
    }
}

/// A directory on its way from one log to another.
struct Estate {
    dir: StorePath,
    found: Inherited,
    /// Lives that had it and were ended.
    ended: Vec<Life>,
    files: Vec<FileState>,
}

impl Inner {
    fn adopt(&self, all: &[Inheritance]) -> Result<Vec<Inherited>, StoreError> {
        let own_from = {
            let mut core = self.core.lock();
            core.alive()?;
            all.iter().try_for_each(|one| core.check_absent(&one.dir))?;
            core.number()
        };
        let mut estates = self.read_estates(all)?;
        let mut pinned = Vec::new();
        let ready = self.move_large_tails(&mut estates).and_then(|()| self.pin_all(&estates, &mut pinned));
        let mut core = self.core.lock();
        // Together with what needs them, or they might be taken for pins that nothing needs.
        core.pins.extend(pinned);
        let entered = ready.and_then(|()| core.enter_all(&estates, own_from));
        match entered {
            Ok(Some(seq)) => self.wait_for(&mut core, seq)?,
            Ok(None) => {}
            Err(error) => {
                core.discard_own(&estates, own_from);
                return Err(error);
            }
        }
        Ok(estates.iter().map(|estate| estate.found).collect())
    }

    /// Reads each life once, whatever is wanted of it.
    fn read_estates(&self, all: &[Inheritance]) -> Result<Vec<Estate>, StoreError> {
        let mut wanted: BTreeMap<Life, BTreeSet<&StorePath>> = BTreeMap::new();
        // A manifest counts alone, and the life that left it may be alive.
        for one in all.iter().filter(|one| one.manifest.is_none()) {
            for life in &one.lives {
                wanted.entry(*life).or_default().insert(&one.dir);
            }
        }
        let mut found: HashMap<(Life, StorePath), Vec<FileState>> = HashMap::new();
        for (life, dirs) in wanted {
            for (dir, files) in self.read_life(life, &dirs)? {
                found.insert((life, dir), files);
            }
        }
        let mut estates = Vec::new();
        let mut manifests = Manifests::default();
        for one in all {
            let of_life = |life: &Life| Some((*life, found.remove(&(*life, one.dir.clone()))?));
            let (source, files) = match (&one.manifest, one.lives.iter().rev().find_map(of_life)) {
                (Some(manifest), _) => (Inherited::Manifest, manifests.read(&one.dir, manifest)?),
                (None, Some((life, files))) => (Inherited::Life(life), files),
                (None, None) if one.lives.is_empty() => (Inherited::Nothing, Vec::new()),
                (None, None) => return Err(nothing_of(one)),
            };
            let ended = if one.manifest.is_some() { Vec::new() } else { one.lives.clone() };
            estates.push(Estate { dir: one.dir.clone(), found: source, ended, files });
        }
        Ok(estates)
    }

    /// Ends a life and folds its log; tries again for as long as a flush would.
    fn read_life(
        &self,
        life: Life,
        wanted: &BTreeSet<&StorePath>,
    ) -> Result<Vec<(StorePath, Vec<FileState>)>, StoreError> {
        let until = Instant::now() + self.options.give_up_after;
        let mut attempts = 0;
        loop {
            let mut fold = Fold::default();
            let error = match self.remote.end(life, &mut |block| fold.visit(block, wanted)) {
                Ok(()) => return fold.finish(life),
                Err(error) => error,
            };
            attempts += 1;
            let is_late = if self.is_stepped { attempts > ATTEMPTS_MAX } else { Instant::now() >= until };
            if is_late || !error.is_retryable() {
                return Err(error);
            }
            tracing::warn!(%life, %error, "a life's log cannot be read yet; trying again");
            if !self.is_stepped {
                std::thread::sleep(PAUSE_AFTER_FAILURE);
            }
        }
    }

    /// What is too large to be said again becomes objects, several at a time.
    fn move_large_tails(&self, estates: &mut [Estate]) -> Result<(), StoreError> {
        let mut puts = Vec::new();
        let inline_max = self.options.handed_bytes_max;
        let mut core = self.core.lock();
        for Estate { dir, files, .. } in estates {
            let mut left: u64 = files.iter().flat_map(|file| &file.tail).map(Tail::len).sum();
            files.sort_by_key(|file| std::cmp::Reverse(file.tail.iter().map(Tail::len).sum::<u64>()));
            for file in files.iter_mut() {
                let len: u64 = file.tail.iter().map(Tail::len).sum();
                if left <= inline_max || len == 0 {
                    break;
                }
                left -= len;
                let object = ObjectId { life: self.life, number: core.number() };
                let path = tree::object_path(dir, &file.name, object)?;
                let from = file.chunks.last().map_or(0, Chunk::end);
                file.chunks.push(Chunk { from, len, object, at: None });
                puts.push((path, std::mem::take(&mut file.tail)));
            }
            files.sort_by(|one, other| one.name.cmp(&other.name));
        }
        drop(core);
        self.put_all(puts)
    }

    /// Keeps the packs that the directories have chunks in, before anybody may think that they are not needed.
    /// Each time under another name: a removal that arrives late removes no pin that was made since.
    fn pin_all(&self, estates: &[Estate], pinned: &mut Vec<(Life, StorePath)>) -> Result<(), StoreError> {
        let mut lives = BTreeSet::new();
        for chunk in estates.iter().flat_map(|estate| &estate.files).flat_map(|file| &file.chunks) {
            if chunk.at.is_some() && chunk.object.life != self.life {
                lives.insert(chunk.object.life);
            }
        }
        #[cfg(test)]
        if self.core.lock().twin == super::sim::Twin::NothingPinned {
            return Ok(());
        }
        lives.into_iter().try_for_each(|life| {
            let pin = packs::pin_path(life, self.life, self.core.lock().number())?;
            pinned.push((life, pin.clone()));
            self.put_object(&pin, Bytes::from(life.to_string()))
        })
    }

    fn put_all(&self, puts: Vec<(StorePath, Vec<Tail>)>) -> Result<(), StoreError> {
        self.for_each(puts, |(path, tail)| self.put_object(&path, joined(&tail)))
    }

    /// Each of them, whatever becomes of the others, several at a time; the first failure.
    fn for_each<T: Send>(
        &self,
        all: Vec<T>,
        each: impl Fn(T) -> Result<(), StoreError> + Sync,
    ) -> Result<(), StoreError> {
        let threads = if self.is_stepped { 1 } else { self.options.writers.clamp(1, all.len().max(1)) };
        let all = Mutex::new(all.into_iter());
        let failure = Mutex::new(None);
        let work = || {
            loop {
                let Some(one) = all.lock().next() else { return };
                if let Err(error) = each(one) {
                    failure.lock().get_or_insert(error);
                }
            }
        };
        match threads {
            1 => work(),
            _ => std::thread::scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(work)))),
        }
        failure.into_inner().map_or(Ok(()), Err)
    }

    fn release(&self, groups: &[&[StorePath]]) -> Result<Vec<Bytes>, StoreError> {
        let mut core = self.core.lock();
        let mut begun = Vec::new();
        let all: Vec<&StorePath> = groups.iter().copied().flatten().collect();
        let outcome = all.iter().try_for_each(|path| core.begin_release(path).map(|dir| begun.push(dir)));
        let outcome = match outcome.and_then(|()| self.write_large_tails(&mut core, &begun)) {
            Ok(()) => Ok(core.say_released(&all, &begun)),
            Err(error) => Err(error),
        };
        let (last, states) =
            outcome.inspect_err(|_| begun.iter().for_each(|dir| core.cancel_release(*dir)))?;
        if let Some(seq) = last {
            self.wait_for(&mut core, seq)?;
        }
        drop(core);
        let mut of_all = all.into_iter().zip(states.iter().map(Vec::as_slice));
        Ok(groups.iter().map(|group| frame::encode_manifest(of_all.by_ref().take(group.len()))).collect())
    }

    /// Makes durable what was written to directories that are being released, and brings what is too much for
    /// a manifest into objects.
    fn write_large_tails(&self, core: &mut MutexGuard<'_, Core>, dirs: &[DirNo]) -> Result<(), StoreError> {
        if let Some(seq) = core.ring.last_written() {
            self.wait_for(core, seq)?;
        }
        let until = Instant::now() + self.options.give_up_after;
        loop {
            core.alive()?;
            if dirs.iter().any(|dir| core.is_busy(*dir)) {
                if self.is_stepped || Instant::now() >= until {
                    return Err(StoreError::Io("an object is still being written".to_owned()));
                }
                self.done.wait_until(core, until);
                continue;
            }
            let writes = core.large_tails(dirs);
            if writes.is_empty() {
                return Ok(());
            }
            MutexGuard::unlocked(core, || {
                // All of them are begun, so all of them have to end.
                self.for_each(writes, |write| {
                    let job = Job::Write(write);
                    let outcome = self.work_until(&job, Some(until));
                    self.end_work(job, outcome.clone());
                    outcome
                })
            })?;
        }
    }
}

/// Manifests that were decoded: several directories may come with the same.
#[derive(Default)]
struct Manifests(Vec<(Bytes, HashMap<StorePath, Vec<FileFrame>>)>);

impl Manifests {
    fn read(&mut self, dir: &StorePath, manifest: &Bytes) -> Result<Vec<FileState>, StoreError> {
        let damaged = |error: &str| StoreError::Corrupt(format!("the manifest of {dir}: {error}"));
        let is_same = |known: &Bytes| known.as_ptr() == manifest.as_ptr() && known.len() == manifest.len();
        let at = match self.0.iter().position(|(known, _)| is_same(known)) {
            Some(at) => at,
            None => {
                let dirs = frame::decode_manifest(manifest).map_err(|error| damaged(&error.to_string()))?;
                self.0.push((manifest.clone(), dirs));
                self.0.len() - 1
            }
        };
        let files = self.0[at].1.remove(dir).ok_or_else(|| damaged("it says nothing of it"))?;
        let file = |FileFrame { file, name, chunks, tail, .. }: FileFrame| {
            let bytes = |piece: &Piece| {
                let (start, end) = (piece.at as usize, piece.at as usize + piece.len as usize);
                let is_inside = piece.seq == 0 && end <= manifest.len();
                if is_inside { Ok(manifest.slice(start..end)) } else { Err(damaged("it lacks bytes")) }
            };
            let tail = tail.iter().map(bytes).collect::<Result<Vec<Bytes>, StoreError>>()?;
            let tail = if tail.is_empty() { Vec::new() } else { vec![Tail::Here(tail)] };
            Ok(FileState { file, name, chunks, tail })
        };
        files.into_iter().map(file).collect()
    }
}

impl Core {
    fn check_absent(&self, path: &StorePath) -> Result<(), StoreError> {
        match self.tree.dir_at(path) {
            Some((_, directory)) if !directory.is_released && !self.unconfirmed.contains_key(path) => {
                Err(StoreError::Io(format!("{path} is written here already; it cannot be taken over")))
            }
            _ => Ok(()),
        }
    }

    /// Writes the frames of all; returns the last block.
    fn enter_all(&mut self, estates: &[Estate], own_from: u64) -> Result<Option<u64>, StoreError> {
        self.alive()?;
        estates.iter().try_for_each(|estate| self.check_absent(&estate.dir))?;
        let block_bytes = std::mem::replace(&mut self.options.block_bytes, ADOPTED_BLOCK_BYTES);
        let mut last = None;
        for estate in estates {
            // Taken over once more, by the same frame: at no moment may the log be without it.
            let in_vain = self.written_in_vain(&estate.dir);
            let older = self.tree.dir_at(&estate.dir).map(|(dir, _)| dir);
            let dir = DirNo(self.number());
            let numbered = |file: &FileState| FileState {
                file: FileNo(self.number()),
                name: file.name.clone(),
                chunks: file.chunks.clone(),
                tail: file.tail.iter().map(copied).collect(),
            };
            let files: Vec<FileState> = estate.files.iter().map(numbered).collect();
            let seq = self.say_dir(dir, &estate.dir, false, &files);
            last = Some(seq);
            self.dirs.entry(dir).or_default().is_adopted = true;
            older.into_iter().for_each(|dir| self.forget_dir(dir));
            self.garbage.extend(in_vain.into_iter().map(|garbage| Garbage { after: seq, ..garbage }));
            self.may_unpin(seq);
            files.iter().for_each(|file| self.consider(file.file));
            let ended = estate.ended.clone();
            self.unconfirmed.insert(estate.dir.clone(), Unconfirmed { own_from, garbage: Vec::new(), ended });
        }
        self.options.block_bytes = block_bytes;
        Ok(last)
    }

    /// What this life has written for a directory that it has taken over without its being on record.
    fn written_in_vain(&self, path: &StorePath) -> Vec<Garbage> {
        let Some(unconfirmed) = self.unconfirmed.get(path) else { return Vec::new() };
        let is_own = |object: ObjectId| object.life == self.life && object.number >= unconfirmed.own_from;
        let files = self.tree.dir_at(path).map(|(_, directory)| directory.names.values());
        let mut found: Vec<Garbage> =
            unconfirmed.garbage.iter().filter(|garbage| is_own(garbage.object)).cloned().collect();
        for number in files.into_iter().flatten() {
            let file = &self.tree.files[number];
            for chunk in file.chunks.iter().filter(|chunk| is_own(chunk.object)) {
                let Ok(path) = chunk.path(&file.dir_path, &file.name) else { continue };
                let (object, is_chunk) = (chunk.object, chunk.at.is_some());
                found.push(Garbage { after: 0, file: *number, object, path, is_chunk });
            }
        }
        found
    }

    /// The objects that were written for a take-over that comes to nothing.
    fn discard_own(&mut self, estates: &[Estate], own_from: u64) {
        for estate in estates {
            for (file, chunk) in estate.files.iter().flat_map(|f| f.chunks.iter().map(move |c| (f, c))) {
                let object = chunk.object;
                let is_own = object.life == self.life && object.number >= own_from && chunk.at.is_none();
                if let (true, Ok(path)) = (is_own, tree::object_path(&estate.dir, &file.name, object)) {
                    let file = FileNo(0);
                    self.garbage.push_front(Garbage { after: 0, file, object, path, is_chunk: false });
                }
            }
        }
    }

    fn confirm(&mut self, path: &StorePath) {
        if let Some(confirmed) = self.unconfirmed.remove(path) {
            self.garbage.extend(confirmed.garbage);
            if !confirmed.ended.is_empty() {
                let of = Orphans::Ended(confirmed.ended);
                self.orphans.push_back(Collect { dir: path.clone(), of });
            }
        }
        // What is in packs of others is to become its own.
        let files = self.tree.dir_at(path).map(|(_, directory)| directory.names.values().copied());
        let has_foreign =
            |file: &FileNo| self.tree.files[file].chunks.iter().any(|chunk| self.is_foreign(chunk));
        let foreign: Vec<FileNo> = files.into_iter().flatten().filter(has_foreign).collect();
        foreign.into_iter().for_each(|file| self.consider(file));
    }

    fn disown(&mut self, path: &StorePath) -> Result<(), StoreError> {
        self.alive()?;
        let Some((dir, _)) = self.tree.dir_at(path) else { return Ok(()) };
        // Whatever becomes of no use here belongs to the owner, unless it was written for nobody else.
        let held = self.unconfirmed.entry(path.clone());
        held.or_insert(Unconfirmed { own_from: u64::MAX, garbage: Vec::new(), ended: Vec::new() });
        let seq = self.log(path.as_str().len(), |payload| payload.remove(&[(dir, None)]));
        self.may_unpin(seq);
        self.forget_dir(dir);
        if let Some(Unconfirmed { own_from, garbage, .. }) = self.unconfirmed.remove(path) {
            let life = self.life;
            let is_own = |g: &Garbage| g.object.life == life && g.object.number >= own_from;
            let (own, owners): (Vec<_>, Vec<_>) = garbage.into_iter().partition(is_own);
            self.garbage.extend(own);
            owners
                .iter()
                .filter(|garbage| garbage.is_chunk)
                .for_each(|garbage| self.hold_pack(garbage.object));
        }
        Ok(())
    }

    fn begin_release(&mut self, path: &StorePath) -> Result<DirNo, StoreError> {
        self.alive()?;
        let (dir, directory) = self.tree.dir_at(path).ok_or(StoreError::NotFound)?;
        let files: Vec<FileNo> = directory.names.values().copied().collect();
        self.dirs.entry(dir).or_default().is_releasing = true;
        files.into_iter().for_each(|file| self.retire(file));
        Ok(dir)
    }

    fn cancel_release(&mut self, dir: DirNo) {
        if let Some(live) = self.dirs.get_mut(&dir) {
            live.is_releasing = false;
        }
        let files = self.tree.dirs.get(&dir).map(|directory| directory.names.values().copied());
        let files: Vec<FileNo> = files.into_iter().flatten().collect();
        files.into_iter().for_each(|file| self.consider(file));
    }

    fn is_busy(&self, dir: DirNo) -> bool {
        let files = self.tree.dirs.get(&dir).map(|directory| directory.names.values());
        files.into_iter().flatten().any(|file| self.tree.files[file].live.is_busy)
    }

    /// What is to be written of directories that are being released: of each, and of all together, no more
    /// than a manifest holds stays behind. Those that are written are the largest.
    fn large_tails(&mut self, dirs: &[DirNo]) -> Vec<super::jobs::Write> {
        let mut small = Vec::new();
        let mut large = Vec::new();
        let mut total = 0;
        for dir in dirs {
            let files = self.tree.dirs.get(dir).filter(|directory| !directory.is_released);
            let files = files.map(|directory| directory.names.values()).into_iter().flatten();
            let mut tails: Vec<_> = files.map(|file| (self.tree.files[file].tail_len(), *file)).collect();
            tails.sort();
            let mut left: u64 = tails.iter().map(|(len, _)| *len).sum();
            while left > self.options.handed_bytes_max
                && let Some((len, file)) = tails.pop()
            {
                left -= len;
                large.push(file);
            }
            total += left;
            small.extend(tails);
        }
        small.sort();
        while total > self.options.manifest_bytes_max
            && let Some((len, file)) = small.pop()
        {
            total -= len;
            large.push(file);
        }
        large.into_iter().filter_map(|file| self.write_job(file)).collect()
    }

    /// Writes the last frames of directories; returns the last block, and what was said of each.
    fn say_released(&mut self, paths: &[&StorePath], dirs: &[DirNo]) -> (Option<u64>, Vec<Vec<FileState>>) {
        let block_bytes = std::mem::replace(&mut self.options.block_bytes, ADOPTED_BLOCK_BYTES);
        let mut last = None;
        let mut states = Vec::new();
        for (dir, path) in dirs.iter().zip(paths) {
            let files = self.state_of(*dir, false);
            // Whoever reads this log in place of the manifest finds the tails where they are.
            last = Some(self.say_dir(*dir, path, true, &self.state_in_place(*dir)));
            states.push(files);
        }
        self.options.block_bytes = block_bytes;
        (last, states)
    }
}

/// The log of a life while it is read.
#[derive(Default)]
struct Fold {
    tree: Tree<()>,
    payloads: BTreeMap<u64, Bytes>,
}

impl Fold {
    fn visit(&mut self, block: Block, wanted: &BTreeSet<&StorePath>) -> Result<(), StoreError> {
        let mut effects = tree::Effects::default();
        let read = frame::decode(&block.payload, block.seq, &mut |frame| {
            // A directory that is not begun is not folded.
            if let Frame::Dir { path, .. } = &frame
                && !wanted.contains(path)
            {
                return Ok(());
            }
            effects.clear();
            self.tree.apply(block.seq, frame, &mut effects)
        });
        self.payloads.insert(block.seq, block.payload.clone());
        read.map_err(|error| {
            StoreError::Corrupt(format!("block {} of life {}: {error}", block.seq, block.life))
        })
    }

    fn finish(self, life: Life) -> Result<Vec<(StorePath, Vec<FileState>)>, StoreError> {
        let mut found = Vec::new();
        for directory in self.tree.dirs.values() {
            let mut files = Vec::new();
            for (name, number) in &directory.names {
                let file = &self.tree.files[number];
                let bytes = |piece: &Piece| self.bytes(piece, life, &directory.path);
                let tail = file.pieces.iter().map(bytes).collect::<Result<Vec<Bytes>, StoreError>>()?;
                let tail = if tail.is_empty() { Vec::new() } else { vec![Tail::Here(tail)] };
                let (name, chunks) = (name.to_string(), file.chunks.clone());
                files.push(FileState { file: *number, name, chunks, tail });
            }
            found.push((directory.path.clone(), files));
        }
        Ok(found)
    }

    fn bytes(&self, piece: &Piece, life: Life, dir: &StorePath) -> Result<Bytes, StoreError> {
        let (start, end) = (piece.at as usize, piece.at as usize + piece.len as usize);
        match self.payloads.get(&piece.seq) {
            Some(payload) if end <= payload.len() => Ok(payload.slice(start..end)),
            _ => Err(StoreError::Corrupt(format!(
                "block {} of life {life} is not what {dir} needs of it",
                piece.seq
            ))),
        }
    }
}

fn nothing_of(one: &Inheritance) -> StoreError {
    let lives: Vec<String> = one.lives.iter().map(Life::to_string).collect();
    let lives = lives.join(", ");
    StoreError::Corrupt(format!(
        "the logs of {lives} have nothing of {}, which is on record as theirs",
        one.dir
    ))
}

fn copied(tail: &Tail) -> Tail {
    match tail {
        Tail::Here(parts) => Tail::Here(parts.clone()),
        Tail::There(piece) => Tail::There(*piece),
    }
}

fn joined(tail: &[Tail]) -> Bytes {
    let mut bytes = Vec::new();
    for part in tail {
        if let Tail::Here(parts) = part {
            parts.iter().for_each(|part| bytes.extend_from_slice(part));
        }
    }
    Bytes::from(bytes)
}

/// Without threads there is no time either: attempts are counted instead.
const ATTEMPTS_MAX: u32 = 20;
/// Blocks are larger while directories are taken over, so that this takes few flushes.
const ADOPTED_BLOCK_BYTES: usize = 8 << 20;

#[cfg(test)]
mod tests {
    use super::frame::Payload;
    use super::*;

    #[test]
    fn a_directory_may_need_a_block_from_before_it_is_said() {
        let (life, dir) = (Life { broker: 1, epoch: 2 }, StorePath::parse("t/p-0").unwrap());
        let (mut before, mut said) = (Payload::with_capacity(0), Payload::with_capacity(0));
        let at = before.append(DirNo(1), FileNo(2), 0, [b"a batch".as_slice()].into_iter());
        let tail = vec![Tail::There(Piece { pos: 0, len: 7, at, seq: 7 })];
        let file = FileState { file: FileNo(2), name: "0.log".to_owned(), chunks: Vec::new(), tail };
        said.dir(DirNo(1), &dir, false, &[file]);
        let mut fold = Fold::default();
        for (seq, payload) in [(7, before), (8, said)] {
            let block = Block { life, seq, lowest: 7, payload: payload.finish() };
            fold.visit(block, &BTreeSet::from([&dir])).unwrap();
        }
        let found = fold.finish(life).unwrap();
        assert_eq!(joined(&found[0].1[0].tail), Bytes::from_static(b"a batch"));
    }
}
