//! What the mirrors of this region say of its links, put together.
//!
//! There may be several mirrors, and one of them has a link's session at a time: the others report that link as not
//! connected, which says nothing about it while one that is connected reports too. Reports are soft state, and an old one
//! never outlives a newer by more than a moment.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use kafka::RegionId;
use kafka::private::{LinkReport, LinkState};
use parking_lot::Mutex;

use super::policies::LinkPolicies;

/// The links of this region. One per broker.
#[derive(Default)]
pub struct LinkBoard {
    /// The last report of each mirror, by its connection.
    reports: Mutex<BTreeMap<u64, Told>>,
    pub policies: LinkPolicies,
}

struct Told {
    at: Instant,
    links: Vec<LinkReport>,
}

impl LinkBoard {
    /// Replaces the last report of the mirror at the other end of this connection.
    pub fn put(&self, connection: u64, links: Vec<LinkReport>) {
        self.put_at(connection, links, Instant::now());
    }

    /// Every link as it is told by who knows most of it, and how long ago anybody reported; none where nobody has.
    pub fn told(&self) -> Option<(Duration, Vec<LinkReport>)> {
        self.told_at(Instant::now())
    }

    /// The peers that the mirrors have links to, and their ids where they are known.
    pub fn peers(&self) -> Vec<(String, Option<RegionId>)> {
        let links = self.told().map(|(_, links)| links).unwrap_or_default();
        links.into_iter().map(|link| (link.peer, link.region)).collect()
    }

    fn put_at(&self, connection: u64, links: Vec<LinkReport>, now: Instant) {
        let mut reports = self.reports.lock();
        // A mirror that began anew has another connection; its former self is not asked again.
        reports.retain(|_, told| now.duration_since(told.at) < OUTLIVES);
        reports.insert(connection, Told { at: now, links });
    }

    fn told_at(&self, now: Instant) -> Option<(Duration, Vec<LinkReport>)> {
        let reports = self.reports.lock();
        let newest = reports.values().map(|told| told.at).max()?;
        let mut links: BTreeMap<&str, (bool, Instant, &LinkReport)> = BTreeMap::new();
        for told in reports.values().filter(|told| newest.duration_since(told.at) < OUTLIVES) {
            for link in &told.links {
                let rank = (link.state != LinkState::Connecting, told.at);
                let known = links.entry(&link.peer).or_insert((rank.0, rank.1, link));
                if rank > (known.0, known.1) {
                    *known = (rank.0, rank.1, link);
                }
            }
        }
        let links = links.into_values().map(|(.., link)| link.clone()).collect();
        Some((now.saturating_duration_since(newest), links))
    }
}

/// Mirrors report every second.
const OUTLIVES: Duration = Duration::from_secs(3);

#[cfg(test)]
mod tests {
    use super::*;

    fn link(peer: &str, state: LinkState, address: &str) -> LinkReport {
        LinkReport {
            peer: peer.to_owned(),
            region: None,
            address: address.to_owned(),
            state,
            reason: String::new(),
            rtt_us: None,
            sent_bytes: 0,
            received_bytes: 0,
            partitions: Vec::new(),
        }
    }

    fn shown(board: &LinkBoard, now: Instant) -> Vec<(String, LinkState)> {
        let links = board.told_at(now).expect("somebody reported").1;
        links.into_iter().map(|link| (link.address, link.state)).collect()
    }

    #[test]
    fn who_has_the_session_is_heard_and_not_who_spoke_last() {
        let (board, begin) = (LinkBoard::default(), Instant::now());
        let after = |ms| begin + Duration::from_millis(ms);
        assert!(board.told_at(begin).is_none());
        board.put_at(1, vec![link("west", LinkState::Active, "one")], after(0));
        board.put_at(2, vec![link("west", LinkState::Connecting, "two")], after(500));
        assert_eq!(shown(&board, after(600)), [("one".to_owned(), LinkState::Active)]);
        assert_eq!(board.told_at(after(600)).expect("told").0, Duration::from_millis(100));
        // The session moves to the other mirror; the first says so at its next report.
        board.put_at(2, vec![link("west", LinkState::Lagging, "two")], after(1500));
        board.put_at(1, vec![link("west", LinkState::Connecting, "one")], after(1600));
        assert_eq!(shown(&board, after(1600)), [("two".to_owned(), LinkState::Lagging)]);
    }

    #[test]
    fn a_mirror_that_is_gone_is_forgotten_soon() {
        let (board, begin) = (LinkBoard::default(), Instant::now());
        let after = |ms| begin + Duration::from_millis(ms);
        board.put_at(1, vec![link("west", LinkState::Active, "one")], after(0));
        board.put_at(2, vec![link("west", LinkState::Connecting, "two")], after(2900));
        assert_eq!(shown(&board, after(2900)), [("one".to_owned(), LinkState::Active)]);
        board.put_at(2, vec![link("west", LinkState::Connecting, "two")], after(3900));
        assert_eq!(shown(&board, after(3900)), [("two".to_owned(), LinkState::Connecting)]);
        // Of the last word the age is told, however old it is.
        assert_eq!(board.told_at(after(60_000)).expect("told").0, Duration::from_millis(56_100));
    }
}
