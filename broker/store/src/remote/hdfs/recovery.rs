//! Ending a life on HDFS: the mark, the rename, the recovery of every file; then reading what it wrote.
//!
//! A log is its files in order. A file that was abandoned may end in a part of a block, and its last block
//! may stand again in the next file, where it counts. So: what a later file begins with ends the earlier one.

use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt};

use super::failure::Failure;
use super::{Fs, Hdfs};
use crate::StoreError;
use crate::remote::{Block, BlockError, Life, missing_block, not_ended};

pub(super) fn fence(hdfs: &Hdfs, life: Life) -> Result<(), StoreError> {
    fenced_files(hdfs, &format!("fence life {life}"), life).map(drop)
}

/// Ends a life; the files of its log, all of them closed.
fn fenced_files(hdfs: &Hdfs, doing: &str, life: Life) -> Result<Vec<String>, StoreError> {
    hdfs.run(doing, hdfs.fs.config.recovery_deadline, |fs| async move {
        fs.fence(life).await?;
        let files = fs.log_files(life).await?;
        // Every heir, whoever won the rename: that one may not have come this far.
        let deadline = fs.config.recovery_deadline;
        let recoveries = files.clone().into_iter().map(|path| {
            let fs = fs.clone();
            async move { fs.recover(&path, deadline).await }
        });
        let recoveries = futures_util::stream::iter(recoveries).buffer_unordered(RECOVERIES_AT_ONCE);
        match recoveries.try_collect::<Vec<()>>().await {
            Err(Failure::Missing(gone)) => Err(StoreError::Io(gone)),
            outcome => outcome.map(|_| files).map_err(StoreError::from),
        }
    })
}

pub(super) fn end(
    hdfs: &Hdfs,
    life: Life,
    visit: &mut dyn FnMut(Block) -> Result<(), StoreError>,
) -> Result<(), StoreError> {
    let doing = format!("end life {life}");
    let files = fenced_files(hdfs, &doing, life)?;
    let deadline = hdfs.fs.transfer_deadline(super::HDFS_BLOCK_BYTES as usize);
    let read = |path: &str| {
        let path = path.to_owned();
        hdfs.run(&doing, deadline, |fs| async move { fs.blocks(life, &path).await })
    };
    visit_all(life, &files, read, visit)
}

pub(super) fn forget(hdfs: &Hdfs, life: Life) -> Result<(), StoreError> {
    hdfs.run(&format!("forget life {life}"), 2 * hdfs.fs.config.request_timeout, |fs| async move {
        if !fs.exists(&fs.ended(life)).await? {
            return Err(not_ended(life));
        }
        fs.remove(&fs.dead(life)).await
    })
}

pub(super) fn lives(hdfs: &Hdfs) -> Result<Vec<Life>, StoreError> {
    hdfs.run("list lives", LIVES_DEADLINE_FACTOR * hdfs.fs.config.request_timeout, |fs| async move {
        let mut lives = Vec::new();
        for dir in ["live", "dead"] {
            let dir = format!("{}/wal/{dir}", fs.config.root);
            for entry in fs.entries(&dir).await? {
                let Some(life) = Life::parse(&entry.name) else { continue };
                if !fs.entries(&format!("{dir}/{}", entry.name)).await?.is_empty() {
                    lives.push(life);
                }
            }
        }
        lives.sort_unstable();
        lives.dedup();
        Ok(lives)
    })
}

const RECOVERIES_AT_ONCE: usize = 8;
const LIVES_DEADLINE_FACTOR: u32 = 12;

impl Fs {
    /// Sees to it that the directory of a life is not where its writer looks for it, now and for ever.
    async fn fence(&self, life: Life) -> Result<(), StoreError> {
        // In this order: a life that begins makes its directory first and looks for the mark then.
        self.make_dir(&self.ended(life)).await?;
        for _ in 0..FENCE_ATTEMPTS_MAX {
            match self.rename(&self.live(life), &self.dead(life)).await {
                Ok(()) => return Ok(()),
                // Another one did it, or the life never began; or there is no directory of the dead yet.
                Err(Failure::Missing(_)) => {
                    if !self.exists(&self.live(life)).await? {
                        return Ok(());
                    }
                    self.make_dir(super::parent(&self.dead(life))).await?;
                }
                // It began once more, saw the mark, and was refused.
                Err(Failure::Exists) => return self.remove(&self.live(life)).await,
                Err(error) => return Err(error.into()),
            }
        }
        Err(StoreError::Io(self.named(&format!("end life {life}: its directory comes and goes"))))
    }

    /// The files of a life that has ended, in order.
    pub(super) async fn log_files(&self, life: Life) -> Result<Vec<String>, StoreError> {
        let dir = self.dead(life);
        let entries = self.entries(&dir).await?;
        let mut files: Vec<u64> = entries.iter().filter_map(|entry| entry.name.parse().ok()).collect();
        files.sort_unstable();
        Ok(files.into_iter().map(|file| format!("{dir}/{file:010}")).collect())
    }

    async fn blocks(&self, life: Life, path: &str) -> Result<Vec<Block>, StoreError> {
        let bytes = match self.get(path, 0, usize::MAX).await {
            Err(StoreError::NotFound) => {
                return Err(StoreError::Io(self.named(&format!("{path} went while life {life} was read"))));
            }
            found => found?,
        };
        parse(life, path, bytes)
    }
}

const FENCE_ATTEMPTS_MAX: u32 = 5;

/// The blocks of one file. It may end in a part of one; nothing whole comes after a part.
fn parse(life: Life, path: &str, mut bytes: Bytes) -> Result<Vec<Block>, StoreError> {
    let damaged = |what: String| StoreError::Corrupt(format!("{path}: {what}"));
    let length = bytes.len();
    let mut blocks: Vec<Block> = Vec::new();
    while !bytes.is_empty() {
        let at = length - bytes.len();
        match Block::decode(&mut bytes) {
            Ok(block) if block.life != life => {
                return Err(damaged(format!("a block of life {}", block.life)));
            }
            Ok(block) if blocks.last().is_some_and(|last| last.seq + 1 != block.seq) => {
                return Err(damaged(format!("block {} at {at} is out of order", block.seq)));
            }
            Ok(block) => blocks.push(block),
            Err(error) if holds_a_block(life, blocks.last().map(|last| last.seq + 2), &bytes) => {
                return Err(damaged(format!("{error} at {at}, and whole blocks come after it")));
            }
            Err(BlockError::Short) => break,
            // All of it is there, and it is not what was written.
            Err(BlockError::Damaged(what)) => return Err(damaged(format!("{what} at {at}"))),
        }
    }
    Ok(blocks)
}

/// Whether the whole block that comes after a damaged one, if it is known which, begins anywhere behind the first
/// byte. Others that are found there are what somebody has written in records.
fn holds_a_block(life: Life, seq: Option<u64>, bytes: &Bytes) -> bool {
    let starts = (1..bytes.len()).filter(|start| bytes[*start..].starts_with(b"SLB1"));
    starts.into_iter().any(|start| {
        let block = Block::decode(&mut bytes.slice(start..));
        block.is_ok_and(|block| block.life == life && seq.is_none_or(|seq| block.seq == seq))
    })
}

/// Visits the blocks of all files, from the lowest one that the highest one needs.
fn visit_all(
    life: Life,
    files: &[String],
    read: impl Fn(&str) -> Result<Vec<Block>, StoreError>,
    visit: &mut dyn FnMut(Block) -> Result<(), StoreError>,
) -> Result<(), StoreError> {
    // The highest block is in the last file that holds any.
    let mut last = Vec::new();
    let mut earlier = files.len();
    while earlier > 0 && last.is_empty() {
        earlier -= 1;
        last = read(&files[earlier])?;
    }
    let Some(highest) = last.last() else { return Ok(()) };
    let mut order = Order { life, next: highest.lowest, visit };
    let mut waiting = Vec::new();
    for path in &files[..earlier] {
        let later = read(path)?;
        order.settle(&mut waiting, later)?;
    }
    order.settle(&mut waiting, last)?;
    order.visit(waiting)
}

struct Order<'a> {
    life: Life,
    /// The number of the block that is visited next.
    next: u64,
    visit: &'a mut dyn FnMut(Block) -> Result<(), StoreError>,
}

impl Order<'_> {
    /// Visits what waits, as far as a later file does not begin with it; then that file waits.
    fn settle(&mut self, waiting: &mut Vec<Block>, later: Vec<Block>) -> Result<(), StoreError> {
        let Some(end) = later.first().map(|first| first.seq) else { return Ok(()) };
        let mut earlier = std::mem::replace(waiting, later);
        earlier.retain(|block| block.seq < end);
        self.visit(earlier)
    }

    fn visit(&mut self, blocks: Vec<Block>) -> Result<(), StoreError> {
        for block in blocks {
            if block.seq > self.next {
                return Err(missing_block(self.life, self.next));
            }
            if block.seq == self.next {
                self.next += 1;
                (self.visit)(block)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIFE: Life = Life { broker: 1, epoch: 2 };

    fn block(seq: u64, lowest: u64, payload: &'static str) -> Block {
        Block { life: LIFE, seq, lowest, payload: Bytes::from_static(payload.as_bytes()) }
    }

    fn visited(files: &[&[Block]]) -> Result<Vec<Block>, StoreError> {
        let names: Vec<String> = (0..files.len()).map(|file| file.to_string()).collect();
        let read = |name: &str| Ok(files[name.parse::<usize>().unwrap()].to_vec());
        let mut visited = Vec::new();
        visit_all(LIFE, &names, read, &mut |block| {
            visited.push(block);
            Ok(())
        })?;
        Ok(visited)
    }

    #[test]
    fn a_later_file_counts_where_it_begins() {
        let (zero, one, two) = (block(0, 0, "0"), block(1, 0, "one"), block(2, 0, "2"));
        let again = block(1, 0, "again");
        let files: [&[Block]; 4] = [&[zero.clone(), one], &[], &[again.clone(), two.clone()], &[]];
        assert_eq!(visited(&files), Ok(vec![zero, again, two]));
        assert_eq!(visited(&[]), Ok(vec![]));
        assert_eq!(visited(&[&[], &[]]), Ok(vec![]));
    }

    #[test]
    fn every_block_from_the_lowest_on_is_demanded() {
        let needs_two = [block(4, 2, "4")];
        let (two, three) = (block(2, 0, "2"), [block(3, 0, "3")]);
        let one_and_two: &[Block] = &[block(1, 0, "1"), two];
        assert_eq!(visited(&[one_and_two, &three, &needs_two]).unwrap().len(), 3);
        assert_eq!(visited(&[one_and_two, &needs_two]), Err(missing_block(LIFE, 3)));
        assert_eq!(visited(&[&one_and_two[..1], &three, &needs_two]), Err(missing_block(LIFE, 2)));
        assert_eq!(visited(&[&needs_two]), Err(missing_block(LIFE, 2)));
    }

    #[test]
    fn a_part_of_a_block_ends_a_file_and_damage_before_a_block_is_seen() {
        let (zero, one) = (block(0, 0, "zero"), block(1, 0, "one"));
        let whole = [zero.encode(), one.encode()].concat();
        let start = zero.encode().len();
        for cut in start..whole.len() {
            assert_eq!(
                parse(LIFE, "f", Bytes::copy_from_slice(&whole[..cut])),
                Ok(vec![zero.clone()]),
                "{cut}"
            );
        }
        for byte in 0..start {
            let mut damaged = whole.clone();
            damaged[byte] ^= 1;
            let outcome = parse(LIFE, "f", Bytes::from(damaged));
            assert!(matches!(outcome, Err(StoreError::Corrupt(_))), "byte {byte}: {outcome:?}");
        }
        // Records may hold what looks like a block, of an archived log for example.
        let archive = Block { payload: block(7, 0, "seven").encode(), ..one.clone() };
        let torn = [zero.encode(), archive.encode()].concat();
        let torn = Bytes::copy_from_slice(&torn[..torn.len() - 1]);
        assert_eq!(parse(LIFE, "f", torn), Ok(vec![zero.clone()]));
        let other = Block { life: Life { broker: 9, epoch: 2 }, ..one.clone() };
        let mixed = Bytes::from([zero.encode(), other.encode()].concat());
        assert!(parse(LIFE, "f", mixed).is_err());
        let gap = Bytes::from([zero.encode(), block(2, 0, "two").encode()].concat());
        assert!(parse(LIFE, "f", gap).is_err());
    }
}
