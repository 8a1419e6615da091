//! Members of the W3C headers `baggage` (W3C Baggage) and `tracestate` (W3C Trace Context).
//!
//! Parsed as lists, never searched as text: `a=lane=x` has no member `lane`. A damaged member is
//! skipped and the others count.

use std::borrow::Cow;

/// The value of member `key`, percent-decoded, properties cut off. The last of duplicates wins.
pub fn baggage_member<'a>(header: &'a str, key: &str) -> Option<Cow<'a, [u8]>> {
    let member = |text: &'a str| {
        let (pair, _properties) = text.split_once(';').unwrap_or((text, ""));
        let (name, value) = pair.split_once('=')?;
        (name.trim_matches(OWS) == key).then(|| value.trim_matches(OWS))
    };
    header.rsplit(',').find_map(member).map(percent_decode)
}

/// The value of entry `key`. The leftmost is the most recent one.
pub fn tracestate_member<'a>(header: &'a str, key: &str) -> Option<&'a str> {
    header.split(',').find_map(|entry| {
        let (name, value) = entry.split_once('=')?;
        (name.trim_matches(OWS) == key).then(|| value.trim_matches(OWS))
    })
}

/// Undoes `%XX`; a `%` without two digits stays.
fn percent_decode(text: &str) -> Cow<'_, [u8]> {
    let bytes = text.as_bytes();
    if !bytes.contains(&b'%') {
        return Cow::Borrowed(bytes);
    }
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let digits = if bytes[at] == b'%' { bytes.get(at + 1..at + 3) } else { None };
        let decoded = digits.and_then(|d| Some(hex(d[0])? << 4 | hex(d[1])?));
        out.push(decoded.unwrap_or(bytes[at]));
        at += if decoded.is_some() { 3 } else { 1 };
    }
    Cow::Owned(out)
}

fn hex(digit: u8) -> Option<u8> {
    (digit as char).to_digit(16).map(|d| d as u8)
}

/// Optional white space of both formats.
const OWS: [char; 2] = [' ', '\t'];

#[cfg(test)]
mod tests {
    use super::*;

    fn baggage(header: &str) -> Option<Vec<u8>> {
        baggage_member(header, "lane").map(Cow::into_owned)
    }

    #[test]
    fn baggage_is_a_list_with_properties_and_escapes() {
        assert_eq!(baggage("lane=a"), Some(b"a".to_vec()));
        assert_eq!(baggage("x=1 ,\tlane = a ; p ; q=lane , y=2"), Some(b"a".to_vec()));
        assert_eq!(baggage("lane=boe%2Dcart"), Some(b"boe-cart".to_vec()));
        assert_eq!(baggage("lane=50%"), Some(b"50%".to_vec()));
        assert_eq!(baggage("lane=%zz%4"), Some(b"%zz%4".to_vec()));
        assert_eq!(baggage("lane=a,lane=b"), Some(b"b".to_vec()));
        assert_eq!(baggage("a=lane=x"), None);
        assert_eq!(baggage("xlane=a"), None);
        assert_eq!(baggage("LANE=a"), None);
        assert_eq!(baggage("x=1;lane=a"), None);
        assert_eq!(baggage(""), None);
    }

    #[test]
    fn tracestate_is_a_list_without_escapes() {
        assert_eq!(tracestate_member("v=1, lane=a%2D ,lane=b", "lane"), Some("a%2D"));
        assert_eq!(tracestate_member("v=lane=1", "lane"), None);
    }
}
