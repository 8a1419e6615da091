//! The lanes that this router serves, as the control service last told them.

use std::collections::BTreeMap;

use lane_core::Lane;
use parking_lot::RwLock;
use tokio_util::sync::CancellationToken;

/// The lanes that exist.
#[derive(Default)]
pub struct Directory {
    lanes: RwLock<BTreeMap<String, Served>>,
    /// Of lanes that are not open to everybody: names in client certificates.
    admitted: RwLock<BTreeMap<String, Vec<String>>>,
}

/// One lane.
#[derive(Clone)]
pub struct Served {
    pub port: u16,
    /// Cancelled when the lane goes: its connections end.
    pub gone: CancellationToken,
}

/// Why a connection on the shared listener has no lane. Nothing is ever passed on without one: a typing
/// error must not become baseline traffic.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unknown {
    #[error("client.id {0:?} does not end in @LANE, which names the lane on this port")]
    NoSuffix(String),
    #[error("lane {0} does not exist; `sealane lane list` shows what there is")]
    NoLane(String),
    #[error("lane {0} is a PPE lane: it is entered by its own address only")]
    Ppe(Lane),
    #[error("lane {lane} does not admit {shown}; `kubectl get lane`, or whoever made it, says whom it does")]
    NotAdmitted { lane: String, shown: String },
}

impl Directory {
    /// Replaces the set; returns the names that are new.
    pub fn replace(&self, wanted: &BTreeMap<String, u16>) -> Vec<String> {
        let mut lanes = self.lanes.write();
        lanes.retain(|name, served| {
            let stays = wanted.get(name) == Some(&served.port);
            if !stays {
                served.gone.cancel();
            }
            stays
        });
        let mut fresh = Vec::new();
        for (name, port) in wanted {
            if !lanes.contains_key(name) {
                lanes.insert(name.clone(), Served { port: *port, gone: CancellationToken::new() });
                fresh.push(name.clone());
            }
        }
        fresh
    }

    /// Whom lanes admit, where that is not everybody. It counts for connections that come from now on.
    pub fn admit(&self, admitted: BTreeMap<String, Vec<String>>) {
        *self.admitted.write() = admitted;
    }

    /// Whether somebody who shows these names may enter.
    pub fn admits(&self, lane: &str, shown: &[String]) -> Result<(), Unknown> {
        match self.admitted.read().get(lane) {
            Some(admitted) if !shown.iter().any(|name| admitted.contains(name)) => {
                let shown = if shown.is_empty() {
                    "a client without a certificate".to_owned()
                } else {
                    shown.join(", ")
                };
                Err(Unknown::NotAdmitted { lane: lane.to_owned(), shown })
            }
            _ => Ok(()),
        }
    }

    /// Every lane.
    pub fn all(&self) -> Vec<(String, Served)> {
        self.lanes.read().iter().map(|(name, served)| (name.clone(), served.clone())).collect()
    }

    pub fn find(&self, lane: &str) -> Option<Served> {
        self.lanes.read().get(lane).cloned()
    }

    /// The client's own id and its lane, out of `ID@LANE`.
    pub fn shared<'a>(&self, client_id: &'a str) -> Result<(&'a str, Lane), Unknown> {
        let no_suffix = || Unknown::NoSuffix(client_id.to_owned());
        let (own, lane) = client_id.rsplit_once('@').ok_or_else(no_suffix)?;
        let lane = Lane::parse(lane).map_err(|_| no_suffix())?;
        if lane.is_ppe() {
            return Err(Unknown::Ppe(lane));
        }
        match self.lanes.read().contains_key(lane.as_str()) {
            true => Ok((own, lane)),
            false => Err(Unknown::NoLane(lane.to_string())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_id_names_a_boe_lane_that_exists_or_is_refused() {
        let directory = Directory::default();
        let set = BTreeMap::from([("boe-a".to_owned(), 1), ("ppe-x".to_owned(), 2)]);
        assert_eq!(directory.replace(&set), ["boe-a", "ppe-x"]);
        assert_eq!(directory.shared("me@home@boe-a").map(|(own, _)| own), Ok("me@home"));
        assert!(matches!(directory.shared("rdkafka"), Err(Unknown::NoSuffix(_))));
        assert!(matches!(directory.shared("rdkafka@boe-b"), Err(Unknown::NoLane(_))));
        assert!(matches!(directory.shared("rdkafka@ppe-x"), Err(Unknown::Ppe(_))));
    }

    #[test]
    fn a_lane_that_names_whom_it_admits_admits_nobody_else() {
        let directory = Directory::default();
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        assert_eq!(directory.admits("boe-a", &[]), Ok(()), "it is open to everybody");
        directory.admit(BTreeMap::from([("boe-a".to_owned(), names(&["shop", "till"]))]));
        assert_eq!(directory.admits("boe-a", &names(&["x", "till"])), Ok(()));
        assert_eq!(directory.admits("boe-b", &[]), Ok(()));
        for refused in [names(&[]), names(&["tills"])] {
            assert!(matches!(directory.admits("boe-a", &refused), Err(Unknown::NotAdmitted { .. })));
        }
    }

    #[test]
    fn a_lane_that_goes_ends_its_connections() {
        let directory = Directory::default();
        directory.replace(&BTreeMap::from([("boe-a".to_owned(), 1), ("boe-b".to_owned(), 2)]));
        let (a, b) = (directory.find("boe-a").unwrap(), directory.find("boe-b").unwrap());
        assert!(directory.replace(&BTreeMap::from([("boe-b".to_owned(), 2)])).is_empty());
        assert!(a.gone.is_cancelled() && !b.gone.is_cancelled());
    }
}
