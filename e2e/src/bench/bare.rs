//! HDFS without anything of ours: how long one write and its hsync take.

use std::time::Instant;

use anyhow::Result;
use bytes::Bytes;
use hdfs_native::{ClientBuilder, WriteOptions};

/// So many writes of this size, each flushed before the next; microseconds each.
pub fn hsyncs(url: &str, file: &str, bytes: usize, count: u64) -> Result<Vec<u64>> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(async {
        let client = ClientBuilder::new().with_url(url).build()?;
        let mut writer = client.create(file, WriteOptions::default()).await?;
        let payload = Bytes::from(vec![7; bytes]);
        let mut times = Vec::new();
        for _ in 0..count {
            let begin = Instant::now();
            Box::pin(writer.write_bytes(payload.clone())).await?;
            writer.hsync().await?;
            times.push(begin.elapsed().as_micros() as u64);
        }
        Box::pin(writer.close()).await?;
        Ok(times)
    })
}
