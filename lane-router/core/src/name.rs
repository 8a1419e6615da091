//! Lane names, their class, and the names of a lane's groups and transactional ids.
//!
//! Owns the rule that the class is in the name: a lane that begins with `ppe` holds its records,
//! any other lets the baseline serve what no lane consumer takes. Nothing is looked up to decide it.

use std::fmt;
use std::sync::Arc;

use kafka::GroupId;

/// A legal lane name: 1 to 63 characters of `[a-z0-9_-]`, neither `prod` nor `baseline`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Lane(Arc<str>);

/// What happens to a record of a lane that no consumer of that lane takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LaneClass {
    /// Fallback: the baseline of the group gets it.
    Boe,
    /// Hold: it waits in the log; nobody outside the lane ever sees it.
    Ppe,
}

/// Why a text is not a lane name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LaneNameError {
    #[error("a lane name has 1 to 63 characters, this one has {0}")]
    Length(usize),
    #[error("lane name {0:?} may hold only a-z, 0-9, '_' and '-'")]
    Character(String),
    #[error("{0:?} means the baseline and cannot be the name of a lane")]
    Reserved(String),
}

impl Lane {
    pub const MAX_LEN: usize = 63;

    pub fn parse(text: &str) -> Result<Lane, LaneNameError> {
        if text.is_empty() || text.len() > Self::MAX_LEN {
            return Err(LaneNameError::Length(text.chars().count()));
        }
        let legal = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '_' | '-');
        if !text.chars().all(legal) {
            return Err(LaneNameError::Character(text.to_owned()));
        }
        if means_baseline(text) {
            return Err(LaneNameError::Reserved(text.to_owned()));
        }
        Ok(Lane(text.into()))
    }

    pub fn class(&self) -> LaneClass {
        if self.0.starts_with("ppe") { LaneClass::Ppe } else { LaneClass::Boe }
    }

    pub fn is_ppe(&self) -> bool {
        self.class() == LaneClass::Ppe
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// `orders` in lane `boe-cart` is `orders@boe-cart` on the broker.
    pub fn suffixed(&self, name: &str) -> String {
        format!("{name}@{}", self.0)
    }

    /// What a client of this lane calls `name`; `None` if it is not of this lane.
    pub fn unsuffixed<'a>(&self, name: &'a str) -> Option<&'a str> {
        name.strip_suffix(&*self.0)?.strip_suffix('@')
    }
}

impl std::borrow::Borrow<str> for Lane {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl LaneClass {
    pub fn as_str(self) -> &'static str {
        match self {
            LaneClass::Boe => "boe",
            LaneClass::Ppe => "ppe",
        }
    }
}

/// Values that say "no lane".
pub(crate) fn means_baseline(value: &str) -> bool {
    matches!(value, "" | "prod" | "baseline")
}

/// Takes `orders@boe-cart` apart. `None` when there is no suffix that could be a lane: whether a
/// suffix *is* one depends on who asks, and that is the caller's knowledge.
pub fn split_group(name: &str) -> Option<(GroupId, Lane)> {
    let (base, lane) = name.rsplit_once('@')?;
    Some((GroupId::new(base), Lane::parse(lane).ok()?))
}

/// The client id by which the lane-router speaks for a client of `lane`: `unique` keeps two clients
/// apart that call themselves the same.
pub fn forwarded_client_id(client_id: &str, lane: &Lane, unique: &str) -> String {
    format!("{client_id}@{lane}#{unique}")
}

/// The lane in a client id that the lane-router made.
pub fn forwarded_lane(client_id: &str) -> Option<Lane> {
    let (named, _unique) = client_id.rsplit_once('#')?;
    Lane::parse(named.rsplit_once('@')?.1).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_class_is_in_the_name() {
        for (name, class) in [
            ("ppe", LaneClass::Ppe),
            ("ppe-1", LaneClass::Ppe),
            ("ppex", LaneClass::Ppe),
            ("boe-cart", LaneClass::Boe),
            ("my-ppe", LaneClass::Boe),
        ] {
            assert_eq!(Lane::parse(name).unwrap().class(), class, "{name}");
        }
    }

    #[test]
    fn what_could_never_match_is_no_lane_name() {
        for bad in ["", "BOE", "a,b", "a b", " a", "é", "prod", "baseline", &"x".repeat(64)] {
            assert!(Lane::parse(bad).is_err(), "{bad}");
        }
        assert!(Lane::parse(&"x".repeat(63)).is_ok());
    }

    #[test]
    fn a_forwarded_client_id_names_its_lane_whatever_the_client_calls_itself() {
        let lane = Lane::parse("boe-cart").unwrap();
        for client in ["", "rdkafka", "a@b#c", "x@ppe-1"] {
            let forwarded = forwarded_client_id(client, &lane, "10.0.0.1");
            assert_eq!(forwarded_lane(&forwarded), Some(lane.clone()), "{forwarded}");
        }
        assert_eq!(forwarded_lane("rdkafka"), None);
        assert_eq!(forwarded_lane("a@B#1"), None);
    }

    #[test]
    fn group_names_go_back_and_forth() {
        let lane = Lane::parse("boe-cart").unwrap();
        assert_eq!(lane.suffixed("orders"), "orders@boe-cart");
        assert_eq!(lane.unsuffixed("orders@boe-cart"), Some("orders"));
        assert_eq!(lane.unsuffixed("a@b@boe-cart"), Some("a@b"));
        assert_eq!(lane.unsuffixed("orders@other-boe-cart"), None);
        assert_eq!(lane.unsuffixed("orders"), None);
        assert_eq!(split_group("a@b@boe-cart"), Some((GroupId::new("a@b"), lane)));
        assert_eq!(split_group("a@B"), None);
    }
}
