//! The rate limit of a link on its own clock: what leaves, when, and from which partitions.

use super::*;

const RATE: u64 = 50_000;
/// What is held for each of two partitions, in units of one record each.
const UNITS: usize = 60;

/// A link whose two partitions, each on a stream of its own, hold this much for a peer that wants all.
fn loaded(rate: u64) -> Link {
    let mut east = Link::new(identity(0), STREAMS, 10 << 20, Now(0));
    let mut west = Link::new(identity(1), STREAMS, 10 << 20, Now(0));
    exchange(&mut east, &mut west, Now(0));
    east.limit_rate(rate, Now(0));
    for partition in 0..2 {
        west.want(position(partition, 0, None));
    }
    exchange(&mut east, &mut west, Now(0));
    for offset in 0..UNITS as i64 {
        for wish in east.wishes(Now(0)) {
            east.supply(wish.sub, wish.from.from, read_of(offset, &[7], offset + 1), Now(0));
        }
    }
    east
}

/// Takes what the link lets leave, and then waits for as long as it says, as a driver does: the moment,
/// the stream and the bytes of each unit.
fn drain(link: &mut Link, until: u64) -> Vec<(u64, usize, u64)> {
    let (mut now, mut left) = (0, Vec::new());
    while now < until {
        let mut sent = true;
        while sent {
            sent = false;
            for stream in link.turn(Now(now)) {
                if let Some(unit) = link.take_unit(stream) {
                    left.push((now, stream, unit.charge()));
                    sent = true;
                }
            }
        }
        link.on_time(Now(now));
        while link.poll().is_some() {}
        now = link.deadline().0.max(now + 1);
    }
    left
}

/// The law of the token bucket, over every window that begins and ends with a unit.
fn is_lawful(rate: u64, left: &[(u64, usize, u64)]) -> bool {
    (0..left.len()).all(|first| {
        let mut sum = 0;
        left[first..].iter().all(|(at, _, bytes)| {
            sum += bytes;
            // A tenth of a second's bytes at once, and one unit that overdraws.
            sum * 1000 <= rate * (at - left[first].0) + rate * 100 + bytes * 1000
        })
    })
}

#[test]
fn what_leaves_is_bounded_by_the_law_of_the_token_bucket() {
    let left = drain(&mut loaded(RATE), 10_000);
    assert_eq!(left.len(), 2 * UNITS, "nothing is held back for ever");
    assert!(is_lawful(RATE, &left), "{left:?}");
    // And it is used: all of it takes about as long as the rate says.
    let bytes: u64 = left.iter().map(|(.., bytes)| bytes).sum();
    let took = left.last().expect("units").0;
    assert!(took <= bytes * 1000 / RATE, "{took} ms for {bytes} bytes");
}

#[test]
fn without_a_limit_the_same_link_breaks_the_law() {
    let left = drain(&mut loaded(0), 10_000);
    assert_eq!(left.len(), 2 * UNITS);
    assert!(!is_lawful(RATE, &left), "the test cannot tell a link with a limit from one without");
}

#[test]
fn partitions_take_turns_while_the_rate_holds_them_back() {
    let left = drain(&mut loaded(RATE), 10_000);
    for some in left.chunks(4) {
        let first = some.iter().filter(|(_, stream, _)| *stream == 0).count();
        assert_eq!(first, some.len() / 2, "{left:?}");
    }
}

#[test]
fn a_limit_that_is_lifted_lets_all_leave_and_says_so_until_then() {
    let mut link = loaded(1);
    assert_eq!(drain(&mut link, STUCK_MS + 2_000).len(), 1, "one unit overdraws it for long");
    let held = |link: &Link| {
        let reports = link.report(Now(STUCK_MS + 2_000));
        reports
            .iter()
            .filter(|r| r.state == LinkState::Lagging && r.reason.contains("limit of 1 bytes"))
            .count()
    };
    assert_eq!(held(&link), 2);
    link.limit_rate(0, Now(STUCK_MS + 2_000));
    assert_eq!(held(&link), 0);
    assert_eq!(unit_count(&mut link), 2 * UNITS - 1);
}
