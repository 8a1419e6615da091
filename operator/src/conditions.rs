//! Conditions as the Kubernetes API conventions say: a list by type, each of the generation that it
//! judges; the time of transition changes with the status and with nothing else.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

/// A verdict that becomes a condition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    pub type_: &'static str,
    pub status: Status,
    pub reason: &'static str,
    pub message: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    True,
    False,
    Unknown,
}

impl Status {
    pub fn as_str(self) -> &'static str {
        match self {
            Status::True => "True",
            Status::False => "False",
            Status::Unknown => "Unknown",
        }
    }
}

impl Verdict {
    pub fn yes(type_: &'static str, reason: &'static str, message: impl Into<String>) -> Verdict {
        Verdict { type_, status: Status::True, reason, message: message.into() }
    }

    pub fn no(type_: &'static str, reason: &'static str, message: impl Into<String>) -> Verdict {
        Verdict { type_, status: Status::False, reason, message: message.into() }
    }

    pub fn unknown(type_: &'static str, reason: &'static str, message: impl Into<String>) -> Verdict {
        Verdict { type_, status: Status::Unknown, reason, message: message.into() }
    }
}

/// The conditions after `verdicts` of `generation`; types that no verdict names stay as they were.
pub fn after(before: &[Condition], verdicts: &[Verdict], generation: Option<i64>) -> Vec<Condition> {
    after_at(before, verdicts, generation, Timestamp::now())
}

fn after_at(
    before: &[Condition],
    verdicts: &[Verdict],
    generation: Option<i64>,
    now: Timestamp,
) -> Vec<Condition> {
    let mut conditions = before.to_vec();
    for verdict in verdicts {
        let found = conditions.iter_mut().find(|condition| condition.type_ == verdict.type_);
        let since = match &found {
            Some(former) if former.status == verdict.status.as_str() => former.last_transition_time.clone(),
            // Kubernetes keeps whole seconds; more would look like a change when read back.
            _ => Time(Timestamp::from_second(now.as_second()).unwrap_or(now)),
        };
        let condition = Condition {
            type_: verdict.type_.to_owned(),
            status: verdict.status.as_str().to_owned(),
            reason: verdict.reason.to_owned(),
            message: shortened(&verdict.message),
            observed_generation: generation,
            last_transition_time: since,
        };
        match found {
            Some(place) => *place = condition,
            None => conditions.push(condition),
        }
    }
    conditions
}

/// Whether a condition of this type is there and true.
pub fn is_true(conditions: &[Condition], type_: &str) -> bool {
    conditions.iter().any(|condition| condition.type_ == type_ && condition.status == "True")
}

/// The API server takes no longer ones.
fn shortened(message: &str) -> String {
    message.chars().take(MESSAGE_CHARS_MAX).collect()
}

const MESSAGE_CHARS_MAX: usize = 4096;

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).expect("a time")
    }

    #[test]
    fn the_time_of_transition_changes_with_the_status_only() {
        let no = [Verdict::no("Ready", "Starting", "pod a is not ready")];
        let first = after_at(&[], &no, Some(1), at(10));
        assert_eq!(first[0].last_transition_time, Time(at(10)));
        let other = [Verdict::no("Ready", "ImageUnavailable", "image b is not there")];
        let second = after_at(&first, &other, Some(2), at(20));
        assert_eq!(second[0].last_transition_time, Time(at(10)));
        assert_eq!((second[0].reason.as_str(), second[0].observed_generation), ("ImageUnavailable", Some(2)));
        let yes = [Verdict::yes("Ready", "Serving", "")];
        let third = after_at(&second, &yes, Some(2), at(30));
        assert_eq!(third[0].last_transition_time, Time(at(30)));
        assert_eq!(after_at(&third, &yes, Some(2), at(40)), third, "the same verdict changes nothing");
    }

    #[test]
    fn conditions_of_other_types_stay() {
        let first = after_at(&[], &[Verdict::yes("Synced", "Synced", "")], Some(1), at(1));
        let second = after_at(&first, &[Verdict::no("Ready", "Starting", "")], Some(2), at(2));
        assert_eq!(second.len(), 2);
        assert_eq!(second[0], first[0]);
    }
}
