//! Which sealed segments of a partition may go, by time and by size.
//!
//! The active segment is never judged here; what must stay for another reason (a snapshot that is
//! not durable yet) is the caller's business.

use kafka::{Offset, TimestampMs};

/// What retention needs to know of a sealed segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SealedSegment {
    /// The offset after its last record.
    pub next: Offset,
    pub bytes: u64,
    /// Largest record timestamp; `NONE` when it holds no record of a client.
    pub max_timestamp: TimestampMs,
    /// When the segment was last written, for segments without a timestamp.
    pub written: TimestampMs,
}

/// The limits of a topic; `None` means no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RetentionPolicy {
    pub bytes: Option<u64>,
    pub ms: Option<i64>,
}

/// The log start that the policy asks for: the end of the last segment that must go, oldest first.
pub fn log_start_after_retention(
    policy: RetentionPolicy,
    sealed: &[SealedSegment],
    active_bytes: u64,
    now: TimestampMs,
) -> Option<Offset> {
    let mut total: u64 = active_bytes + sealed.iter().map(|s| s.bytes).sum::<u64>();
    let mut start = None;
    for segment in sealed {
        let stamp = match segment.max_timestamp {
            TimestampMs::NONE => segment.written,
            stamp => stamp,
        };
        let too_old = policy.ms.is_some_and(|ms| now.0.saturating_sub(stamp.0) > ms);
        // As in Kafka: a segment goes when what remains without it still reaches the limit.
        let too_much = policy.bytes.is_some_and(|limit| total.saturating_sub(segment.bytes) >= limit);
        if !too_old && !too_much {
            break;
        }
        total -= segment.bytes;
        start = Some(segment.next);
    }
    start
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segment(next: i64, bytes: u64, stamp: i64) -> SealedSegment {
        SealedSegment {
            next: Offset(next),
            bytes,
            max_timestamp: TimestampMs(stamp),
            written: TimestampMs(500),
        }
    }

    #[test]
    fn old_segments_go_from_the_front_only() {
        let sealed = [segment(10, 5, 100), segment(20, 5, 900), segment(30, 5, 100)];
        let policy = RetentionPolicy { bytes: None, ms: Some(200) };
        assert_eq!(log_start_after_retention(policy, &sealed, 5, TimestampMs(1000)), Some(Offset(10)));
    }

    #[test]
    fn size_keeps_at_least_the_limit() {
        let sealed = [segment(10, 10, 1), segment(20, 10, 1), segment(30, 10, 1)];
        let policy = RetentionPolicy { bytes: Some(25), ms: None };
        assert_eq!(log_start_after_retention(policy, &sealed, 5, TimestampMs(1)), Some(Offset(10)));
    }

    #[test]
    fn a_segment_of_markers_ages_by_when_it_was_written() {
        let sealed = [segment(10, 10, -1)];
        let policy = RetentionPolicy { bytes: None, ms: Some(600) };
        assert_eq!(log_start_after_retention(policy, &sealed, 0, TimestampMs(1000)), None);
        assert_eq!(log_start_after_retention(policy, &sealed, 0, TimestampMs(1200)), Some(Offset(10)));
    }
}
