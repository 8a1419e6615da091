//! What dead brokers and deleted topics leave in the store, and its removal.
//!
//! Works on the remote store alone: whoever knows the records decides, and the order of looking makes it safe.
//! First what is in the store ([`lives`], [`orphans`]), then who is alive, then the records: a life that is not
//! alive gets on no record any more, and a topic is on record before anything of it is written. Every call may
//! be made again, and by several at once.

use std::collections::BTreeSet;

use super::packs::{self, PINS};
use super::tree::PACKS;
use crate::{Life, Remote, StoreError, StorePath};

/// The lives that have a log or packs in the store, living ones too. Lists all blocks of all logs: for once in
/// a while.
pub fn lives(remote: &dyn Remote) -> Result<Vec<Life>, StoreError> {
    let mut lives: BTreeSet<Life> = remote.lives()?.into_iter().collect();
    for entry in remote.list(&root(PACKS))? {
        let Some(life) = Life::parse(&entry.name).filter(|life| !lives.contains(life)) else { continue };
        if !remote.list(&packs::packs_of(life)?)?.is_empty() {
            lives.insert(life);
        }
    }
    Ok(lives.into_iter().collect())
}

/// Removes the log of a life that no record names and that is not alive, and its packs, unless somebody still
/// has chunks in them: then it answers false, and the same call later does that. A record names a life while a directory is in its
/// log, and also while there is only the manifest that it left.
///
/// The life is ended first, so that a zombie writes nothing into a log that is gone; what refuses it stays for
/// ever. A heir that goes by an old view finds nothing of its directories any more, so let some time pass after
/// the last record.
pub fn forget(remote: &dyn Remote, life: Life) -> Result<bool, StoreError> {
    remote.fence(life)?;
    // What it had of others is with its heirs, who have pins of their own.
    for pinned in remote.list(&root(PINS))? {
        let dir = root(PINS).join(&pinned.name).map_err(|error| StoreError::Io(error.to_string()))?;
        for pin in remote.list(&dir)?.into_iter().filter(|pin| packs::pinned_by(&pin.name) == Some(life)) {
            remote.delete(&dir.join(&pin.name).map_err(|error| StoreError::Io(error.to_string()))?)?;
        }
    }
    let is_free = remote.list(&packs::pins_of(life)?)?.is_empty();
    if is_free {
        remote.delete(&packs::packs_of(life)?)?;
    }
    // Last, so that the life is found again if this is broken off.
    remote.forget(life)?;
    Ok(is_free)
}

/// Where the objects of directories are: `data/<topic id>/...`.
pub fn data() -> StorePath {
    root("data")
}

fn root(name: &'static str) -> StorePath {
    StorePath::parse(name).expect("a legal name")
}

/// What lies directly in `root` ([`data`], or where the manifests are) and is nobody's. To be removed with
/// [`Remote::delete`]. An object that a zombie was writing may appear later, so this is not done once.
pub fn orphans(
    remote: &dyn Remote,
    root: &StorePath,
    is_owned: &dyn Fn(&str) -> bool,
) -> Result<Vec<StorePath>, StoreError> {
    let unknown = remote.list(root)?.into_iter().filter(|entry| !is_owned(&entry.name));
    let paths = unknown.map(|entry| root.join(&entry.name));
    paths.collect::<Result<_, _>>().map_err(|error| StoreError::Io(error.to_string()))
}
