//! A disk that is really full: a small tmpfs, mounted for the test and unmounted after it.
//!
//! Needs root; without it the tests say so and fail.

// Helpers of tests count as tests.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::fs;
use std::io::IoSlice;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use broker_store::meta::File;
use broker_store::{Disk, MetaError, MetaStore, SegmentStore, StoreError, StorePath, Volatile};

struct SmallDisk {
    dir: tempfile::TempDir,
}

impl SmallDisk {
    fn mount() -> SmallDisk {
        let dir = tempfile::tempdir().unwrap();
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", "size=1m", "tmpfs"])
            .arg(dir.path())
            .status()
            .is_ok_and(|status| status.success());
        assert!(mounted, "mounting a tmpfs needs root");
        SmallDisk { dir }
    }

    fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Takes all space that is left but `spare` bytes; remove the file to give it back.
    fn fill(&self, spare: usize) -> std::path::PathBuf {
        let filler = self.path().join("filler");
        let mut size = 0;
        while fs::write(&filler, vec![7; size + 4_096]).is_ok() {
            size += 4_096;
        }
        fs::write(&filler, vec![7; size.saturating_sub(spare)]).unwrap();
        filler
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let unmounted = Command::new("umount").arg("-l").arg(self.dir.path()).status();
        assert!(unmounted.is_ok_and(|status| status.success()) || std::thread::panicking());
    }
}

fn path(text: &str) -> StorePath {
    StorePath::parse(text).unwrap()
}

/// The kernel may take a moment to give a removed file's space back.
fn with_space<T>(mut call: impl FnMut() -> Result<T, StoreError>) -> Result<T, StoreError> {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        match call() {
            Err(StoreError::Full) if Instant::now() < deadline => std::thread::yield_now(),
            done => return done,
        }
    }
}

#[test]
fn a_full_disk_tears_nothing_and_appends_go_on_when_there_is_space_again() {
    let small = SmallDisk::mount();
    let store = Disk::open(small.path().join("data")).unwrap();
    let file = path("t/p-0/0.log");
    let writer = store.create(&file).unwrap();
    let filler = small.fill(100_000);
    let record: Vec<u8> = (0..30_000_u32).map(|i| i as u8).collect();
    let mut end = 0;
    let error = loop {
        match writer.append(&[IoSlice::new(&record[..10_000]), IoSlice::new(&record[10_000..])]) {
            Ok(position) => end = position,
            Err(error) => break error,
        }
    };
    assert_eq!(error, StoreError::Full);
    assert!(end > 0 && end % 30_000 == 0);
    let on_disk = small.path().join("data/topics/t/p-0/0.log");
    assert_eq!(fs::metadata(&on_disk).unwrap().len(), end, "what was half-written is cut off");
    assert_eq!(writer.reader().len(), end);
    for _ in 0..5 {
        assert_eq!(writer.append(&[IoSlice::new(&record)]), Err(StoreError::Full));
    }
    assert_eq!(writer.sync(), Ok(end), "what was appended before can still be made durable");
    fs::remove_file(filler).unwrap();
    assert_eq!(with_space(|| writer.append(&[IoSlice::new(&record)])), Ok(end + 30_000));
    assert_eq!(writer.sync(), Ok(end + 30_000));
    let all = store.open(&file).unwrap().read_at(0, usize::MAX).unwrap();
    assert!(all.chunks(30_000).all(|chunk| chunk == &record[..]));
}

#[test]
fn a_put_on_a_full_disk_leaves_the_old_content() {
    let small = SmallDisk::mount();
    let store = Disk::open(small.path().join("data")).unwrap();
    store.put(&path("t/x.state"), b"old").unwrap();
    let filler = small.fill(20_000);
    let large = vec![1; 50_000];
    assert_eq!(store.put(&path("t/x.state"), &large), Err(StoreError::Full));
    assert_eq!(&store.open(&path("t/x.state")).unwrap().read_at(0, 99).unwrap()[..], b"old");
    assert_eq!(fs::read_dir(small.path().join("data/tmp")).unwrap().count(), 0, "no space is kept");
    fs::remove_file(filler).unwrap();
    with_space(|| store.put(&path("t/x.state"), &large)).unwrap();
    assert_eq!(store.open(&path("t/x.state")).unwrap().len(), 50_000);
}

#[test]
fn the_volatile_store_reports_a_full_disk_as_a_failed_sync() {
    let small = SmallDisk::mount();
    let store = Volatile::open(small.path().join("data")).unwrap();
    let writer = store.create(&path("t/0.log")).unwrap();
    writer.append(&[IoSlice::new(b"safe")]).unwrap();
    writer.sync().unwrap();
    let filler = small.fill(0);
    writer.append(&[IoSlice::new(&[1; 50_000])]).unwrap();
    assert_eq!(writer.sync(), Err(StoreError::SyncFailed { durable: 4 }));
    fs::remove_file(filler).unwrap();
    assert_eq!(writer.sync(), Err(StoreError::SyncFailed { durable: 4 }));
    let synced = with_space(|| {
        let next = store.resume(&path("t/0.log"), 4)?;
        next.append(&[IoSlice::new(&[1; 50_000])])?;
        // The volatile store writes in its sync; a full disk there ends the writer.
        next.sync().map_err(|_| StoreError::Full)
    });
    assert_eq!(synced, Ok(50_004));
}

#[tokio::test]
async fn metadata_on_a_full_disk_is_refused_and_goes_on_later() {
    let small = SmallDisk::mount();
    let dir = small.path().join("meta");
    let store = File::open(&dir).unwrap();
    let before = store.put_if("k", b"before".to_vec(), None).await.unwrap();
    let filler = small.fill(10_000);
    let large = vec![3; 40_000];
    for _ in 0..3 {
        assert_eq!(store.put_if("k", large.clone(), Some(before)).await, Err(MetaError::Full));
    }
    assert_eq!(store.get("k").await, Ok(Some((b"before".to_vec(), before))));
    drop(store);
    let store = File::open(&dir).unwrap();
    assert_eq!(store.get("k").await, Ok(Some((b"before".to_vec(), before))));
    fs::remove_file(filler).unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    let after = loop {
        match store.put_if("k", large.clone(), Some(before)).await {
            Err(MetaError::Full) if Instant::now() < deadline => tokio::task::yield_now().await,
            done => break done.unwrap(),
        }
    };
    drop(store);
    let store = File::open(&dir).unwrap();
    assert_eq!(store.get("k").await, Ok(Some((large, after))));
}

#[test]
fn a_data_directory_on_a_full_disk_still_opens() {
    let small = SmallDisk::mount();
    let dir = small.path().join("data");
    let store = Disk::open(&dir).unwrap();
    store.put(&path("t/x"), b"kept").unwrap();
    drop(store);
    small.fill(0);
    let store = Disk::open(&dir).unwrap();
    assert_eq!(&store.open(&path("t/x")).unwrap().read_at(0, 99).unwrap()[..], b"kept");
}
