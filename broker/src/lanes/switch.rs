//! Turning lanes on and off for the partitions of a topic: the extractor list in the log.
//!
//! A batch is judged by the list that lies before it in the log, so the list is appended, durably,
//! before the setting is said to hold.

use std::sync::Arc;

use kafka::control::Marker;
use kafka::{ErrorCode, Offset};
use lane_core::Extractors;

use crate::clock;
use crate::partition::{AppendError, DurableError, Partition};

/// Why lanes could not be switched.
#[derive(Debug, thiserror::Error)]
pub enum SwitchError {
    #[error(
        "partition {0} holds records of a PPE lane or intervals of lanes; they would lose their owner if \
         lanes were turned off"
    )]
    Held(String),
    #[error("partition {partition}: {error}")]
    Append { partition: String, error: AppendError },
    #[error("partition {partition}: {error}")]
    Durable { partition: String, error: DurableError },
}

impl SwitchError {
    pub fn code(&self) -> ErrorCode {
        match self {
            SwitchError::Held(_) => ErrorCode::PolicyViolation,
            SwitchError::Append { error, .. } => error.code(),
            SwitchError::Durable { .. } => ErrorCode::KafkaStorageError,
        }
    }
}

/// Makes `extractors` (none: lanes off) the list of every partition; ready when that is durable.
/// Partitions that have it already are left alone, so that it can be tried again. Says whether any
/// changed.
pub async fn switch_lanes(
    partitions: &[Arc<Partition>],
    extractors: &Extractors,
) -> Result<bool, SwitchError> {
    // Nothing is switched where one partition will refuse.
    if extractors.is_empty()
        && let Some(held) =
            partitions.iter().find(|p| p.with_fold(|fold| fold.lanes.holds_ppe_or_intervals()))
    {
        return Err(SwitchError::Held(held.to_string()));
    }
    let mut changed = false;
    for partition in partitions {
        if let Some(at) = switch_one(partition, extractors)? {
            changed = true;
            let durable = partition.wait_durable(at.plus(1)).await;
            durable.map_err(|error| SwitchError::Durable { partition: partition.to_string(), error })?;
        }
    }
    Ok(changed)
}

/// The same for one partition: the offset of the marker, if one was appended. It decides for whatever is
/// appended from now on; it is durable when the high watermark has passed it.
pub fn switch_one(partition: &Partition, extractors: &Extractors) -> Result<Option<Offset>, SwitchError> {
    let marker = Marker::Extractors(extractors.texts().to_vec());
    let check = |fold: &broker_core::Fold| {
        if *fold.lanes.extractors() == *extractors {
            return Err(None);
        }
        let held = extractors.is_empty() && fold.lanes.holds_ppe_or_intervals();
        if held { Err(Some(SwitchError::Held(partition.to_string()))) } else { Ok(()) }
    };
    let appended = partition.append_marker(&marker, clock::now(), check);
    let named = |error| SwitchError::Append { partition: partition.to_string(), error };
    match appended.map_err(named)? {
        Ok(at) => Ok(Some(at)),
        Err(None) => Ok(None),
        Err(Some(held)) => Err(held),
    }
}
