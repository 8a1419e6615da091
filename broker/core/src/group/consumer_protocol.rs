//! The part of the consumer protocol (`ConsumerProtocolSubscription` and `-Assignment`) that the
//! coordinator reads: topics of a subscription, partitions of an assignment.
//!
//! Both are read with the layout of version 0, which is the prefix of every later version. The
//! broker otherwise passes these bytes through unread; bytes that do not parse are "not known".
//!
//! ```text
//! subscription: version i16 | topics [string] | user data bytes | ...
//! assignment:   version i16 | [topic string, partitions [i32]] | user data bytes | ...
//! ```

use std::collections::BTreeSet;

use bytes::{Buf, Bytes};

/// Protocol type of consumer groups.
pub const CONSUMER: &str = "consumer";

/// An assignment without partitions, as version 0 with null user data.
pub const EMPTY_ASSIGNMENT: &[u8] = &[0, 0, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff];

/// Topics that a subscription names; `None` when it is not one.
pub fn subscribed_topics(mut bytes: Bytes) -> Option<BTreeSet<String>> {
    if bytes.try_get_i16().ok()? < 0 {
        return None;
    }
    let count = array_len(&mut bytes)?;
    (0..count).map(|_| string(&mut bytes)).collect()
}

/// Partitions that an assignment holds; `None` when it is not one.
pub fn assigned_partitions(mut bytes: Bytes) -> Option<Vec<(String, Vec<i32>)>> {
    if bytes.try_get_i16().ok()? < 0 {
        return None;
    }
    let topics = array_len(&mut bytes)?;
    (0..topics)
        .map(|_| {
            let topic = string(&mut bytes)?;
            let count = array_len(&mut bytes)?;
            let partitions = (0..count).map(|_| bytes.try_get_i32().ok()).collect::<Option<Vec<i32>>>()?;
            Some((topic, partitions))
        })
        .collect()
}

fn array_len(bytes: &mut Bytes) -> Option<usize> {
    usize::try_from(bytes.try_get_i32().ok()?).ok()
}

fn string(bytes: &mut Bytes) -> Option<String> {
    let len = usize::try_from(bytes.try_get_i16().ok()?).ok()?;
    if bytes.len() < len {
        return None;
    }
    String::from_utf8(bytes.split_to(len).to_vec()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_empty_assignment_is_decodable() {
        assert_eq!(assigned_partitions(Bytes::from_static(EMPTY_ASSIGNMENT)), Some(vec![]));
    }

    #[test]
    fn later_versions_are_read_by_their_prefix() {
        let subscription = b"\0\x03\0\0\0\x02\0\x01b\0\x01a\xff\xff\xff\xff\0\0\0\0\0\0\0\x05\xff\xff";
        let topics = subscribed_topics(Bytes::from_static(subscription)).unwrap();
        assert_eq!(topics.into_iter().collect::<Vec<_>>(), ["a", "b"]);
        let assignment = b"\0\x01\0\0\0\x01\0\x01t\0\0\0\x02\0\0\0\0\0\0\0\x07\xff\xff\xff\xff";
        let partitions = assigned_partitions(Bytes::from_static(assignment)).unwrap();
        assert_eq!(partitions, [("t".to_owned(), vec![0, 7])]);
    }

    #[test]
    fn counts_beyond_the_bytes_are_refused_without_allocating() {
        assert_eq!(subscribed_topics(Bytes::from_static(b"\0\0\x7f\xff\xff\xff")), None);
        assert_eq!(assigned_partitions(Bytes::from_static(b"\0\0\x7f\xff\xff\xff")), None);
        assert_eq!(assigned_partitions(Bytes::from_static(b"\0\0\0\0\0\x01\0\x01t\x7f\xff\xff\xff\0")), None);
        assert_eq!(subscribed_topics(Bytes::new()), None);
    }
}
