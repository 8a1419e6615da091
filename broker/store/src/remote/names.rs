//! Names of objects as names of a foreign store: every character outside of a small set is written as `%XX`.
//!
//! Reversible, one component to one component, and the names that we give ourselves stay as they are.

use std::fmt::Write;

use crate::StorePath;

/// `path` below `dir`; `dir` itself for the root.
pub(super) fn outer(dir: &str, path: &StorePath) -> String {
    let mut name = dir.to_owned();
    for component in path.as_str().split('/').filter(|component| !component.is_empty()) {
        name.push('/');
        encode(component, &mut name);
    }
    name
}

fn encode(component: &str, name: &mut String) {
    for byte in component.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'.' | b'_' | b'-' => name.push(char::from(byte)),
            _ => write!(name, "%{byte:02X}").expect("a string takes what is written to it"),
        }
    }
}

/// The component that `encode` made this of; none if it was not `encode`.
pub(super) fn decode(name: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(name.len());
    let mut rest = name.as_bytes();
    while let Some((first, others)) = rest.split_first() {
        if *first == b'%' {
            let digits = std::str::from_utf8(others.get(..2)?).ok()?;
            bytes.push(u8::from_str_radix(digits, 16).ok()?);
            rest = &others[2..];
        } else {
            bytes.push(*first);
            rest = others;
        }
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn ordinary_names_stay_as_they_are() {
        let path = StorePath::parse("0f1e/orders.v2_x-17/00000000000000000042.3.log").unwrap();
        assert_eq!(outer("/c/objects", &path), format!("/c/objects/{path}"));
        assert_eq!(outer("/c/objects", &StorePath::root()), "/c/objects");
    }

    proptest! {
        #[test]
        fn every_name_comes_back(name in "[^/\\\\\\p{Cc}]{1,60}") {
            prop_assume!(name != "." && name != "..");
            let path = StorePath::root().join(&name).unwrap();
            let outer = outer("d", &path);
            let component = outer.strip_prefix("d/").unwrap();
            prop_assert!(component.bytes().all(|b| b.is_ascii_graphic() && !b"/:\\".contains(&b)));
            prop_assert_eq!(decode(component), Some(name));
        }
    }
}
