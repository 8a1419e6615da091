//! Names of files in a segment store.
//!
//! A path is relative, `/`-separated, without `.` and `..`: a name from outside can never leave the
//! store's own directory.

use std::borrow::Borrow;
use std::fmt;
use std::sync::Arc;

/// Path of a file or directory in a segment store; the empty path is the root.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StorePath(Arc<str>);

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a path of a segment store")]
pub struct PathError(String);

impl StorePath {
    pub fn root() -> StorePath {
        StorePath("".into())
    }

    pub fn parse(text: &str) -> Result<StorePath, PathError> {
        if text.is_empty() || text.split('/').all(legal) {
            Ok(StorePath(text.into()))
        } else {
            Err(PathError(text.to_owned()))
        }
    }

    /// The entry `name` of this directory.
    pub fn join(&self, name: &str) -> Result<StorePath, PathError> {
        if !legal(name) {
            return Err(PathError(name.to_owned()));
        }
        if self.is_root() {
            return Ok(StorePath(name.into()));
        }
        Ok(StorePath(format!("{}/{name}", self.0).into()))
    }

    pub fn parent(&self) -> Option<StorePath> {
        if self.is_root() {
            return None;
        }
        let cut = self.0.rfind('/').unwrap_or(0);
        Some(StorePath(self.0[..cut].into()))
    }

    /// The last component; empty for the root.
    pub fn name(&self) -> &str {
        self.0.rsplit('/').next().unwrap_or_default()
    }

    pub fn is_root(&self) -> bool {
        self.0.is_empty()
    }

    /// True for the path itself and everything below it.
    pub fn is_within(&self, dir: &StorePath) -> bool {
        dir.is_root()
            || self.0.strip_prefix(&*dir.0).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for StorePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Borrow<str> for StorePath {
    fn borrow(&self) -> &str {
        &self.0
    }
}

/// Names on every file system in use are bounded by 255 bytes.
const NAME_BYTES_MAX: usize = 255;

fn legal(name: &str) -> bool {
    let printable = |c: char| c != '/' && c != '\\' && !c.is_control();
    !name.is_empty()
        && name.len() <= NAME_BYTES_MAX
        && name != "."
        && name != ".."
        && name.chars().all(printable)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_cannot_leave_the_store() {
        for bad in ["/", "/a", "a/", "a//b", "..", "a/../b", ".", "a/./b", "a\0b", "a\\b", "a\nb"] {
            assert!(StorePath::parse(bad).is_err(), "{bad:?}");
            assert!(StorePath::root().join(bad).is_err(), "{bad:?}");
        }
        assert!(StorePath::root().join("a/b").is_err());
        assert!(StorePath::parse(&"x".repeat(256)).is_err());
    }

    #[test]
    fn parent_name_and_join_agree() {
        let path = StorePath::parse("a/b/c.log").unwrap();
        assert_eq!(path.name(), "c.log");
        assert_eq!(path.parent().unwrap().join("c.log").unwrap(), path);
        assert_eq!(StorePath::parse("a").unwrap().parent(), Some(StorePath::root()));
        assert_eq!(StorePath::root().parent(), None);
    }

    #[test]
    fn a_directory_holds_its_own_files_and_not_those_of_a_longer_name() {
        let dir = StorePath::parse("a/b").unwrap();
        assert!(StorePath::parse("a/b/c").unwrap().is_within(&dir));
        assert!(dir.is_within(&dir));
        assert!(!StorePath::parse("a/bc").unwrap().is_within(&dir));
        assert!(dir.is_within(&StorePath::root()));
    }
}
