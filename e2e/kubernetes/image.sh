#!/usr/bin/env bash
# image.sh PROGRAM [REGION]...   packs PROGRAM as the image that manifests/image/Containerfile describes (the same root.sh), without
# docker and without a registry, and gives it to the nodes of the regions that are named. TAG=... gives it another tag.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/env.sh"
program=$1; shift
tag=${TAG:-0.1.0}; image=localhost/sealane:$tag
mkdir -p "$K8S_HOME/sealane"
exec 9>"$K8S_HOME/sealane/lock"; flock 9
tar=$K8S_HOME/sealane/$tag.tar
sum=$(sha256sum "$program" "$here/../../manifests/image/root.sh" "$here/img/mkimg.py" | cut -c1-64 | sha256sum | cut -c1-64)
if [ ! -e "$tar" ] || [ "$(cat "$tar.sum" 2>/dev/null)" != "$sum" ]; then
  root=$(mktemp -d -p "$K8S_HOME/sealane"); trap 'rm -rf "$root"' EXIT
  # Lines of debugging are no part of a program's behaviour, and most of its bytes.
  strip -o "$root/sealane" "$program"
  bash "$here/../../manifests/image/root.sh" "$root/sealane" "$root/image"
  python3 "$here/img/mkimg.py" "$image" "$tar" --root "$root/image" --entry /usr/bin/sealane --user 65532:65532
  echo "$sum" >"$tar.sum"
fi
for i in "$@"; do   # its own node, and those that joined it
  for d in $(grep -lx "$i" "$K8S_RUN"/*/joined 2>/dev/null); do
    d=$(dirname "$d")
    [ -S "$d/ctd/c.sock" ] || { echo "region $i has no node to give the image to" >&2; exit 1; }
    ctr -a "$d/ctd/c.sock" -n k8s.io images import "$tar" >/dev/null
  done
done
