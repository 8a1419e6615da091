#!/usr/bin/env bash
# region.sh up|down [REGION]   what `just kube` calls. `up` builds what is missing, starts a real Kubernetes with the image of this
# checkout on its node, and prints the path of its kubeconfig, alone on standard output. SEALANE_BIN=... takes a program that is built.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/env.sh"
action=${1:-} region=${2:-1}
case "$action" in
  up)
    need_root "starts network namespaces and containers"
    bash "$here/build.sh" >&2
    program=${SEALANE_BIN:-}
    if [ -z "$program" ]; then
      (cd "$here/../.." && cargo build --workspace --features sealane/cluster,sealane/operator --bin sealane) >&2
      program=${CARGO_TARGET_DIR:-$here/../../target}/debug/sealane
    fi
    bash "$here/image.sh" "$program" >&2
    kubeconfig=$(bash "$here/up.sh" "$region")
    bash "$here/image.sh" "$program" "$region" >&2
    echo "$kubeconfig" ;;
  down) bash "$here/down.sh" "$region" ;;
  *) echo "region.sh up [REGION], or region.sh down [REGION]; not \"$action\"" >&2; exit 1 ;;
esac
