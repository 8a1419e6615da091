//! What the lane headers of a batch say, before it is appended and when a log is read again; and the
//! lane that a lane's connection gives to records without one.
//!
//! The list of extractors in force at that place of the log judges, so an heir or a rebuilt index
//! never judges by other rules, and stamps, so that no stamp is ever one that the list does not read.
//! With lanes off nothing of the baseline's is unpacked.

use std::sync::Arc;

use kafka::control::Marker;
use kafka::produce::RecordError;
use kafka::{Batch, BatchError, ErrorCode};
use lane_core::batch::{Classified, StampError, StampRefusal};
use lane_core::{Extractors, Lane, LaneMarker, LaneSummary};

/// What a batch may be appended with.
#[derive(Clone, Debug)]
pub struct Judged {
    /// The list that judged; the append compares it, because it may change before the lock is taken.
    pub by: Arc<Extractors>,
    /// `None` for baseline records alone.
    pub summary: Option<LaneSummary>,
    /// The batch to append instead: its records were put into the connection's lane.
    pub stamped: Option<Batch>,
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

/// Judges a client's batch by the list that is in force.
pub fn judge(batch: &Batch, by: Arc<Extractors>) -> Result<Judged, Refused> {
    if by.is_empty() {
        return Ok(Judged { by, summary: None, stamped: None, unknown: 0, disagreed: 0 });
    }
    let found = lane_core::batch::classify(batch, &by).map_err(Refused::damaged)?;
    if !found.refused.is_empty() {
        return Err(Refused::records(&found));
    }
    let Classified { summary, unknown, disagreed, .. } = found;
    let summary = (!summary.is_plain()).then_some(summary);
    Ok(Judged { by, summary, stamped: None, unknown, disagreed })
}

/// The same for a connection in `lane`: every record is put into it, or the batch is refused. With lanes
/// off the records carry the lane on all the same, as `configured` reads it: who serves the request next
/// may need it.
pub fn judge_in_lane(
    batch: &Batch,
    by: Arc<Extractors>,
    configured: &Extractors,
    lane: &Lane,
) -> Result<Judged, Refused> {
    let off = by.is_empty();
    if off && lane.is_ppe() {
        return Err(Refused::without_lanes(lane));
    }
    let stamped = lane_core::batch::stamp(batch, lane, if off { configured } else { &by });
    let stamped = stamped.map_err(|error| Refused::stamp(lane, error))?;
    let judged = judge(stamped.as_ref().unwrap_or(batch), by)?;
    Ok(Judged { stamped, ..judged })
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

/// Who judged the batches at a place of the log.
#[derive(Clone, Debug)]
pub enum Judge {
    /// The list in force there.
    Here,
    /// They are of a mirror's unit, which the list of its own region judged; a unit that names none holds
    /// no record of a lane.
    Origin(Option<Arc<Extractors>>),
}

/// [`summarize`] by whoever judged the batch; `local` is the list in force.
pub fn summarize_as(batch: &Batch, judge: &Judge, local: &Extractors) -> Option<LaneSummary> {
    match judge {
        Judge::Here => summarize(batch, local),
        Judge::Origin(None) => None,
        Judge::Origin(Some(origin)) if **origin == *local => summarize(batch, local),
        Judge::Origin(Some(origin)) => {
            summarize(batch, origin).map(|summary| summary.with_judge(origin.clone()))
        }
    }
}

/// The lane marker in a marker of the log; `None` for other types.
pub fn lane_marker(marker: &Marker) -> Option<LaneMarker> {
    LaneMarker::parse(marker).ok().flatten()
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

    fn stamp(lane: &Lane, error: StampError) -> Refused {
        let refused = match error {
            StampError::Batch(error) => return Refused::damaged(error),
            StampError::Records(refused) => refused,
        };
        let named = |(index, why): (i32, StampRefusal)| RecordError {
            batch_index: index,
            message: Some(why.to_string()),
        };
        Refused {
            code: ErrorCode::InvalidRecord,
            message: format!("this connection is in lane {lane} and produces records of that lane only"),
            records: refused.into_iter().map(named).collect(),
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
        let judge = |lanes: &[&str], by| judge_in_lane(&batch(lanes), by, &Extractors::standard(), &ppe);
        let own = judge(&["ppe-1", "ppe-1"], standard()).unwrap();
        assert!(own.stamped.is_none());
        let judged = judge(&["", "ppe-1"], standard()).unwrap();
        let summary = judged.summary.unwrap();
        assert!(judged.stamped.is_some() && summary.lanes() == [ppe.clone()] && !summary.has_baseline());
        for (other, index) in [(&["ppe-1", "ppe-2"][..], 1), (&["A"], 0)] {
            let refused = judge(other, standard()).unwrap_err();
            assert_eq!((refused.code, refused.records[0].batch_index), (ErrorCode::InvalidRecord, index));
        }
        let off = Arc::new(Extractors::none());
        assert_eq!(judge(&["ppe-1"], off.clone()).unwrap_err().code, ErrorCode::PolicyViolation);
        assert!(super::judge(&batch(&["ppe-1"]), off).is_ok());
    }

    #[test]
    fn with_lanes_off_a_boe_record_carries_its_lane_on() {
        let boe = Lane::parse("boe-a").unwrap();
        let configured = Extractors::parse_list("x-tt-env").unwrap();
        let off = Arc::new(Extractors::none());
        let judged = judge_in_lane(&batch(&["x"]), off, &configured, &boe).unwrap();
        assert_eq!(judged.summary, None);
        let stamped = summarize(&judged.stamped.unwrap(), &configured).unwrap();
        assert_eq!(stamped.lanes(), [boe]);
    }

    #[test]
    fn a_mirrored_batch_is_what_its_own_region_says() {
        let other = Arc::new(Extractors::parse(&["x-lane"]).unwrap());
        let mirrored = |judge| summarize_as(&batch(&["boe-a"]), &judge, &Extractors::standard());
        let summary = mirrored(Judge::Origin(Some(other.clone()))).unwrap();
        assert_eq!(summary.judged_by(), Some(&other));
        let summary = mirrored(Judge::Origin(Some(standard()))).unwrap();
        assert_eq!(summary.judged_by(), None);
        assert_eq!(mirrored(Judge::Origin(None)), None, "there the header named no lane");
        assert!(mirrored(Judge::Here).is_some());
    }
}
