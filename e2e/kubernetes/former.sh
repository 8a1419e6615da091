#!/usr/bin/env bash
# former.sh   builds `sealane` as it was at the last tag before this commit, once, outside of the checkout, and prints the path of
# the program and nothing else. Progress goes to standard error. What is compiled between is shared with the builds of this
# checkout (CARGO_TARGET_DIR); FORMER_SELECTION is how they ask for packages and features where it is not the usual way.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/env.sh"
tag=$(git -C "$here" describe --tags --abbrev=0 --match 'v*' HEAD^ 2>/dev/null) || {
  echo "this checkout has no tag v* to come from: fetch the tags, or set SEALANE_FORMER_BIN to a program of a former build" >&2; exit 1; }
commit=$(git -C "$here" rev-parse "$tag^{commit}")
home=$K8S_HOME/former/$tag; program=$home/sealane
mkdir -p "$home"
exec 9>"$K8S_HOME/former/lock"; flock 9
if [ ! -x "$program" ] || [ "$(cat "$home/commit" 2>/dev/null)" != "$commit" ]; then
  src=$K8S_HOME/former/src; rm -rf "$src"; mkdir -p "$src"; trap 'rm -rf "$src" "$home/out"' EXIT
  git -C "$here/../.." archive "$commit" | tar -x -C "$src"
  read -ra selection <<<"${FORMER_SELECTION:---workspace --features cluster,operator --bin sealane}"
  # Its program would take the place of this checkout's, if it were made where that is.
  (cd "$src" && CARGO_BUILD_BUILD_DIR="${CARGO_TARGET_DIR:-$HOME/.cache/sealane/target}" CARGO_TARGET_DIR="$home/out" \
    cargo build --locked "${selection[@]}" >&2)
  strip -o "$program" "$home/out/debug/sealane"
  echo "$commit" >"$home/commit"
fi
echo "$program"
