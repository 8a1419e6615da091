//! DescribeLogDirs (KIP-113, KIP-827): how many bytes each partition takes, and how much room there is.

use std::collections::BTreeMap;

use bytes::Bytes;
use kafka::ErrorCode;
use kafka::frame::RequestHeader;
use kafka::messages::describe_log_dirs_response::{
    DescribeLogDirsPartition, DescribeLogDirsResult, DescribeLogDirsTopic,
};
use kafka::messages::{DescribeLogDirsRequest, DescribeLogDirsResponse};

use super::message::{self, text};
use super::{Answer, Body, Ctx};

pub fn handle(ctx: &Ctx, header: &RequestHeader, body: Bytes) -> Answer {
    let request: DescribeLogDirsRequest = match message::read(header, body) {
        Ok(request) => request,
        Err(answer) => return answer,
    };
    let (ctx, version) = (ctx.clone(), header.api_version);
    Answer::Later(Box::pin(async move {
        // Asking the file system for its room may wait for the disk.
        let work = move || Body::message(&describe(&ctx, &request, version), version);
        tokio::task::spawn_blocking(work).await.unwrap_or_default()
    }))
}

fn describe(ctx: &Ctx, request: &DescribeLogDirsRequest, version: i16) -> DescribeLogDirsResponse {
    let mut sizes: BTreeMap<String, Vec<DescribeLogDirsPartition>> = BTreeMap::new();
    let mut add = |topic: &str, index: i32| {
        let Some(partition) = ctx.broker.partition(topic, index) else { return };
        let size = DescribeLogDirsPartition::default()
            .with_partition_index(index)
            .with_partition_size(partition.size_bytes() as i64);
        sizes.entry(topic.to_owned()).or_default().push(size);
    };
    match &request.topics {
        None => {
            for topic in ctx.broker.topics.all() {
                (0..topic.partitions).for_each(|index| add(topic.name.as_str(), index));
            }
        }
        Some(topics) => {
            for topic in topics {
                topic.partitions.iter().for_each(|index| add(&topic.topic, *index));
            }
        }
    }
    let topic = |(name, partitions): (String, _)| {
        DescribeLogDirsTopic::default().with_name(text(name).into()).with_partitions(partitions)
    };
    let directory = &ctx.broker.config.data_dir;
    let absolute = std::path::absolute(directory).unwrap_or_else(|_| directory.clone());
    let mut result = DescribeLogDirsResult::default()
        .with_error_code(ErrorCode::None.code())
        .with_log_dir(text(absolute.display().to_string()))
        .with_topics(sizes.into_iter().map(topic).collect());
    if version >= 4 {
        (result.total_bytes, result.usable_bytes) = room(&absolute).unwrap_or((-1, -1));
    }
    DescribeLogDirsResponse::default().with_results(vec![result])
}

/// Bytes of the file system, and those still free; nothing where there is no directory.
fn room(directory: &std::path::Path) -> Option<(i64, i64)> {
    let stat = rustix::fs::statvfs(directory).ok()?;
    let bytes = |blocks: u64| i64::try_from(blocks.saturating_mul(stat.f_frsize)).unwrap_or(i64::MAX);
    Some((bytes(stat.f_blocks), bytes(stat.f_bavail)))
}
