//! What a batch costs in the shared log, by the number of partitions that are written at once.
//!
//! ```text
//! cost STORE PARTITIONS [BATCH_BYTES] [MIB]      STORE: memory, s3, hdfs (started here, on loopback)
//! ```
//! Prints one line: CPU time of this process for each batch, flushes, objects, requests. One generator writes
//! batches of equal size to the partitions in turn and waits after each window, as a flusher does.

use std::io::IoSlice;
use std::sync::Arc;
use std::time::Instant;

use broker_store::shared::{Options, Shared};
use broker_store::{Life, Remote, SegmentStore, StorePath, Writer, remote};

const WINDOW_BYTES: usize = 1 << 20;

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize, otherwise: usize| match arguments.get(at) {
        Some(text) => text.parse::<usize>(),
        None => Ok(otherwise),
    };
    let kind = arguments.first().map_or("memory", String::as_str);
    let (partitions, batch_bytes, mib) = (number(1, 1)?, number(2, 16 << 10)?, number(3, 1_024)?);
    with_store(kind, |store| measure(kind, store, partitions, batch_bytes, mib << 20))
}

#[cfg(feature = "cluster")]
fn with_store(kind: &str, run: impl FnOnce(Arc<dyn Remote>) -> Result<(), Failure>) -> Result<(), Failure> {
    match kind {
        "s3" => {
            let server = e2e::stores::s3::S3::start()?;
            let credentials = remote::S3Credentials {
                access_key_id: e2e::stores::s3::S3::ACCESS_KEY_ID.to_owned(),
                secret_access_key: e2e::stores::s3::S3::SECRET_ACCESS_KEY.to_owned(),
            };
            let config = remote::S3Config {
                credentials: Some(credentials),
                ..remote::S3Config::new(&server.endpoint(), e2e::stores::s3::S3::BUCKET, "cost")
            };
            run(Arc::new(remote::S3::open(config)?))
        }
        "hdfs" => {
            let server = e2e::stores::hdfs::Hdfs::start(3)?;
            run(Arc::new(remote::Hdfs::open(remote::HdfsConfig::new(&server.url(), "/cost"))?))
        }
        _ => run(Arc::new(remote::Memory::new())),
    }
}

#[cfg(not(feature = "cluster"))]
fn with_store(_: &str, run: impl FnOnce(Arc<dyn Remote>) -> Result<(), Failure>) -> Result<(), Failure> {
    run(Arc::new(remote::Memory::new()))
}

fn measure(
    kind: &str,
    remote: Arc<dyn Remote>,
    partitions: usize,
    batch_bytes: usize,
    bytes: usize,
) -> Result<(), Failure> {
    let options = Options { log_bytes_target: 128 << 20, ..Options::default() };
    let store = Shared::open(remote, Life { broker: 1, epoch: 1 }, options)?;
    let mut writers: Vec<Arc<dyn Writer>> = Vec::new();
    for partition in 0..partitions {
        writers.push(store.create(&StorePath::parse(&format!("topic/t-{partition}/0.log"))?)?);
    }
    // Once round, so that what is measured is the steady state.
    let batch: Vec<u8> = (0..batch_bytes).map(|at| (at * 7 % 251) as u8).collect();
    write(&store, &writers, &batch, (256 << 20) / batch_bytes)?;
    let (before, cpu, began) = (store.stats(), cpu_seconds(), Instant::now());
    let batches = bytes / batch_bytes;
    write(&store, &writers, &batch, batches)?;
    let (after, cpu, wall) = (store.stats(), cpu_seconds() - cpu, began.elapsed().as_secs_f64());
    let flushes = after.flushes - before.flushes;
    let objects = after.objects_written - before.objects_written;
    let object_bytes = after.objects_written_bytes - before.objects_written_bytes;
    println!(
        "{kind} partitions {partitions} batch {batch_bytes} batches {batches} cpu_us_per_batch {:.1} wall_s {wall:.1} \
         flushes {flushes} flushed_mib {} objects {objects} object_kib {} again {} again_mib {} waits {} memory_mib {}",
        cpu * 1e6 / batches as f64,
        (after.flushed_bytes - before.flushed_bytes) >> 20,
        (object_bytes >> 10) / objects.max(1),
        after.said_again - before.said_again,
        (after.said_again_bytes - before.said_again_bytes) >> 20,
        after.waits - before.waits,
        after.memory_bytes >> 20,
    );
    Ok(())
}

fn write(store: &Shared, writers: &[Arc<dyn Writer>], batch: &[u8], batches: usize) -> Result<(), Failure> {
    let window = (WINDOW_BYTES / batch.len()).max(1);
    let mut at = 0;
    while at < batches {
        let these = at..(at + window).min(batches);
        for number in these.clone() {
            let writer = &writers[number % writers.len()];
            while let Err(error) = writer.append(&[IoSlice::new(batch)]) {
                if !error.is_retryable() || store.lost().is_some() {
                    return Err(error.into());
                }
            }
        }
        let touched = these.clone().take(writers.len());
        let points: Vec<_> = touched
            .map(|number| &writers[number % writers.len()])
            .map(|writer| (writer, writer.sync_begin()))
            .collect();
        for (writer, point) in points {
            match point {
                Some(point) => writer.sync_end(point)?,
                None => drop(writer.sync()?),
            }
        }
        at = these.end;
    }
    Ok(())
}

/// Of all threads of this process, as the kernel counts them: in hundredths of a second.
fn cpu_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
    fields.skip(11).take(2).filter_map(|ticks| ticks.parse::<f64>().ok()).sum::<f64>() / 100.0
}
