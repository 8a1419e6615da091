//! Open files of sealed segments: kept open for the next read, but never more than a limit for the broker.
//!
//! A segment has a slot for each of its files. When too many slots are filled, those that were used
//! longest ago are emptied; whoever still reads such a file holds it open until it is done.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use broker_store::{Reader, StoreError};
use parking_lot::Mutex;

/// The limit, and which slots are filled. One per broker.
pub struct OpenFiles {
    max: usize,
    filled: Mutex<Vec<Weak<Slot>>>,
    uses: AtomicU64,
}

/// Where a segment keeps one file open.
#[derive(Default)]
pub struct Slot {
    reader: Mutex<Option<Arc<dyn Reader>>>,
    last_use: AtomicU64,
}

impl OpenFiles {
    pub fn new(max: usize) -> Arc<OpenFiles> {
        Arc::new(OpenFiles { max: max.max(4), filled: Mutex::default(), uses: AtomicU64::new(0) })
    }

    /// The reader in the slot; opened if the slot is empty.
    pub fn reader(
        &self,
        slot: &Arc<Slot>,
        open: impl FnOnce() -> Result<Arc<dyn Reader>, StoreError>,
    ) -> Result<Arc<dyn Reader>, StoreError> {
        self.note_use(slot);
        if let Some(reader) = &*slot.reader.lock() {
            return Ok(reader.clone());
        }
        // Opened outside of the lock; of two at once the first one stays.
        Ok(self.keep(slot, open()?))
    }

    /// Puts a reader into an empty slot, and empties others if there are too many.
    pub fn keep(&self, slot: &Arc<Slot>, reader: Arc<dyn Reader>) -> Arc<dyn Reader> {
        self.note_use(slot);
        {
            let mut held = slot.reader.lock();
            if let Some(there) = &*held {
                return there.clone();
            }
            *held = Some(reader.clone());
        }
        let mut filled = self.filled.lock();
        filled.push(Arc::downgrade(slot));
        if filled.len() > self.max {
            self.empty_some(&mut filled);
        }
        reader
    }

    /// No two uses have the same number.
    fn note_use(&self, slot: &Slot) {
        slot.last_use.store(self.uses.fetch_add(1, Ordering::Relaxed), Ordering::Relaxed);
    }

    /// Leaves three quarters of the limit, so that it is not looked through for every file.
    fn empty_some(&self, filled: &mut Vec<Weak<Slot>>) {
        let mut uses: Vec<u64> =
            filled.iter().filter_map(|slot| Some(slot.upgrade()?.last_use.load(Ordering::Relaxed))).collect();
        let surplus = uses.len().saturating_sub(self.max - self.max / 4);
        let oldest_kept = match uses.len() > surplus {
            true => *uses.select_nth_unstable(surplus).1,
            false => u64::MAX,
        };
        filled.retain(|slot| {
            let Some(slot) = slot.upgrade() else { return false };
            let stays = slot.last_use.load(Ordering::Relaxed) >= oldest_kept;
            if !stays {
                slot.reader.lock().take();
            }
            stays
        });
    }
}

#[cfg(test)]
mod tests {
    use broker_store::{Memory, SegmentStore as _, StorePath};

    use super::*;

    #[test]
    fn the_files_that_were_used_longest_ago_are_closed_and_opened_again() {
        let store = Memory::new();
        let path = |n: usize| StorePath::parse(&format!("f{n}")).unwrap();
        (0..100).for_each(|n| store.put(&path(n), &[n as u8]).unwrap());
        let files = OpenFiles::new(8);
        let slots: Vec<Arc<Slot>> = (0..100).map(|_| Arc::default()).collect();
        let read = |n: usize| {
            let reader = files.reader(&slots[n], || store.open(&path(n))).unwrap();
            assert_eq!(reader.read_at(0, 1).unwrap()[0], n as u8);
        };
        let is_open = |n: &usize| slots[*n].reader.lock().is_some();
        for n in 0..100 {
            read(n);
            read(0);
            assert!((0..100).filter(is_open).count() <= 8, "after {n}");
        }
        assert!(is_open(&0) && is_open(&99) && !is_open(&50));
        read(50);
        assert!(is_open(&50));
    }

    #[test]
    fn files_that_were_open_when_their_segment_was_sealed_count_too() {
        let store = Memory::new();
        let path = StorePath::parse("f").unwrap();
        store.put(&path, b"x").unwrap();
        let files = OpenFiles::new(8);
        let slots: Vec<Arc<Slot>> = (0..100).map(|_| Arc::default()).collect();
        slots.iter().for_each(|slot| drop(files.keep(slot, store.open(&path).unwrap())));
        assert!(slots.iter().filter(|slot| slot.reader.lock().is_some()).count() <= 8);
        assert!(slots[99].reader.lock().is_some());
    }

    #[test]
    fn slots_of_segments_that_are_gone_do_not_count() {
        let store = Memory::new();
        let path = StorePath::parse("f").unwrap();
        store.put(&path, b"x").unwrap();
        let files = OpenFiles::new(8);
        let first: Arc<Slot> = Arc::default();
        files.reader(&first, || store.open(&path)).unwrap();
        for _ in 0..100 {
            files.reader(&Arc::default(), || store.open(&path)).unwrap();
        }
        assert!(first.reader.lock().is_some());
    }
}
