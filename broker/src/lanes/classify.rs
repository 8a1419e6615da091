//! What the lane headers of a batch say, before it is appended and when a log is read again.
//!
//! The list of extractors in force at that place of the log judges, so an heir or a rebuilt index
//! never judges by other rules. With lanes off nothing is unpacked.

use std::sync::Arc;

use kafka::control::Marker;
use kafka::produce::RecordError;
use kafka::{Batch, BatchError, ErrorCode};
use lane_core::batch::Classified;
use lane_core::{Extractors, Lane, LaneMarker, LaneSummary};

/// What a batch may be appended with.
#[derive(Clone, Debug)]
pub struct Judged {
    /// The list that judged; the append compares it, because it may change before the lock is taken.
    pub by: Arc<Extractors>,
    /// `None` for baseline records alone.
    pub summary: Option<LaneSummary>,
    /// Records whose value is no lane name, and records whose extractors named different lanes.
    pub unknown: u64,
    pub disagreed: u64,
}

/// Why a batch may not be appended.
#[derive(Clone, Debug)]
pub struct Refused {
    pub code: ErrorCode,
    pub message: String,
    pub records: Vec<RecordError>,
}

/// Judges a client's batch. `connection` is the lane that the connection is in: every record must be
/// of it.
pub fn judge(
    batch: &Batch,
    extractors: Arc<Extractors>,
    connection: Option<&Lane>,
) -> Result<Judged, Refused> {
    if extractors.is_empty() {
        let ppe = connection.filter(|lane| lane.is_ppe());
        return match ppe {
            Some(lane) => Err(Refused::without_lanes(lane)),
            None => Ok(Judged { by: extractors, summary: None, unknown: 0, disagreed: 0 }),
        };
    }
    let found = lane_core::batch::classify(batch, &extractors).map_err(Refused::damaged)?;
    if !found.refused.is_empty() {
        return Err(Refused::records(&found));
    }
    if let Some(lane) = connection
        && !only(&found.summary, lane)
    {
        return Err(Refused::other_lane(lane));
    }
    let Classified { summary, unknown, disagreed, .. } = found;
    let summary = (!summary.is_plain()).then_some(summary);
    Ok(Judged { by: extractors, summary, unknown, disagreed })
}

/// What a batch that is in the log holds; `None` for baseline records alone, or with lanes off.
pub fn summarize(batch: &Batch, extractors: &Extractors) -> Option<LaneSummary> {
    if extractors.is_empty() || batch.header.is_control() || batch.header.record_count == 0 {
        return None;
    }
    match lane_core::batch::classify(batch, extractors) {
        Ok(found) => (!found.summary.is_plain()).then_some(found.summary),
        // Unreadable records must never read as "nothing hidden".
        Err(_) => Some(LaneSummary::unknown()),
    }
}

/// The same for a mirrored batch, which the list of its own region judged.
pub fn summarize_mirrored(
    batch: &Batch,
    origin: Option<&Arc<Extractors>>,
    local: &Extractors,
) -> Option<LaneSummary> {
    match origin {
        Some(origin) if **origin != *local => {
            summarize(batch, origin).map(|summary| summary.with_judge(origin.clone()))
        }
        _ => summarize(batch, local),
    }
}

/// The lane marker in a marker of the log; `None` for other types.
pub fn lane_marker(marker: &Marker) -> Option<LaneMarker> {
    LaneMarker::parse(marker).ok().flatten()
}

fn only(summary: &LaneSummary, lane: &Lane) -> bool {
    let other = summary.has_baseline() || summary.has_unnamed() || summary.is_many();
    !other && summary.lanes().iter().all(|named| named == lane)
}

impl Refused {
    fn without_lanes(lane: &Lane) -> Refused {
        Refused {
            code: ErrorCode::PolicyViolation,
            message: format!(
                "lanes are off for this topic, so nothing would keep the records of {lane} from its \
                 consumers; turn sealane.lanes on"
            ),
            records: Vec::new(),
        }
    }

    fn other_lane(lane: &Lane) -> Refused {
        Refused {
            code: ErrorCode::InvalidRecord,
            message: format!("a connection of lane {lane} produces records of that lane only"),
            records: Vec::new(),
        }
    }

    fn damaged(error: BatchError) -> Refused {
        Refused {
            code: ErrorCode::InvalidRecord,
            message: format!("the lane headers cannot be read: {error}"),
            records: Vec::new(),
        }
    }

    fn records(found: &Classified) -> Refused {
        let named = |(index, why): &(i32, lane_core::Refusal)| RecordError {
            batch_index: *index,
            message: Some(why.to_string()),
        };
        Refused {
            code: ErrorCode::InvalidRecord,
            message: "the lane headers of some records contradict each other".to_owned(),
            records: found.refused.iter().map(named).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use kafka::batch::Codec;
    use kafka::record::BatchBuilder;
    use kafka::{Offset, TimestampMs};

    use super::*;

    fn batch(lanes: &[&str]) -> Batch {
        let mut builder = BatchBuilder::new(Offset(0), TimestampMs(1), Codec::None);
        for (i, lane) in lanes.iter().enumerate() {
            builder.push(i as i32, 0, None, None, &[("x-lane", Some(lane.as_bytes()))]);
        }
        builder.build()
    }

    fn standard() -> Arc<Extractors> {
        Arc::new(Extractors::standard())
    }

    #[test]
    fn a_lane_connection_produces_records_of_its_lane_only() {
        let ppe = Lane::parse("ppe-1").unwrap();
        assert!(judge(&batch(&["ppe-1", "ppe-1"]), standard(), Some(&ppe)).is_ok());
        for other in [&["ppe-1", "ppe-2"][..], &[""], &["A"]] {
            let refused = judge(&batch(other), standard(), Some(&ppe)).unwrap_err();
            assert_eq!(refused.code, ErrorCode::InvalidRecord);
        }
        let off = Arc::new(Extractors::none());
        assert_eq!(
            judge(&batch(&["ppe-1"]), off.clone(), Some(&ppe)).unwrap_err().code,
            ErrorCode::PolicyViolation
        );
        assert!(judge(&batch(&["ppe-1"]), off, None).is_ok());
    }

    #[test]
    fn a_mirrored_batch_keeps_the_list_that_judged_it() {
        let other = Arc::new(Extractors::parse(&["x-lane"]).unwrap());
        let summary = summarize_mirrored(&batch(&["boe-a"]), Some(&other), &Extractors::standard()).unwrap();
        assert_eq!(summary.judged_by(), Some(&other));
        let same =
            summarize_mirrored(&batch(&["boe-a"]), Some(&standard()), &Extractors::standard()).unwrap();
        assert_eq!(same.judged_by(), None);
    }
}
