#!/usr/bin/env bash
# Builds what the test Kubernetes runs: one multi-call Kubernetes binary, etcd, CoreDNS and Helm, from Go modules, and two tiny images.
# Everything goes to $SEALANE_TOOLS/kubernetes (default ~/.cache/sealane/tools/kubernetes), never into the checkout.
# What is there already is not built again; a changed go.mod or source is. Some 13 CPU minutes once per machine.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/env.sh"
version() { awk -v m="$2" '$1 == m && $2 ~ /^v/ {print $2; exit} $2 == m && $3 ~ /^v/ {print $3; exit}' "$here/$1/go.mod"; }

need_root "builds and runs a real Kubernetes"
packages=
need() { command -v "$1" >/dev/null || packages="$packages $2"; }
need containerd containerd; need runc runc; need musl-gcc musl-tools; need iptables iptables; need nft nftables
need conntrack conntrack; need socat socat; need bc bc; need curl curl; need go golang-go; need python3 python3
need openssl openssl; need ip iproute2; need sysctl procps
[ -x /usr/lib/cni/bridge ] || packages="$packages containernetworking-plugins"
[ -x /bin/busybox ] || packages="$packages busybox-static"

mkdir -p "$K8S_HOME"/{bin,img,src}
exec 9>"$K8S_HOME/lock"; flock 9
if [ -n "$packages" ]; then
  echo "installing Debian packages:$packages" >&2
  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $packages; } >"$K8S_HOME/apt.log" 2>&1 \
    || { echo "the test Kubernetes needs Debian packages that could not be installed:$packages (see $K8S_HOME/apt.log)" >&2; exit 1; }
fi

export CGO_ENABLED=0 GOFLAGS=-buildvcs=false GOGC=${GOGC:-400}   # GOGC: some 5 % less CPU in the compiler, more memory
# stale NAME FILE...: whether NAME was last built from other FILEs than these.
stale() { local n=$1; shift; sum=$(cd "$here" && cat "$@" | sha256sum); [ ! -x "$K8S_HOME/bin/$n" ] || [ "$(cat "$K8S_HOME/src/$n.sum" 2>/dev/null)" != "$sum" ]; }
built() { echo "$sum" >"$K8S_HOME/src/$1.sum"; }

# etcd: its package main is the module's root, and `go install package@version` is refused (replace lines): hence a module around it.
if stale etcd etcd/go.mod etcd/go.sum; then
  echo "building etcd $(version etcd go.etcd.io/etcd/server/v3)" >&2
  (cd "$here/etcd" && go build -p "${J:-2}" -trimpath -ldflags "-s -w" -o "$K8S_HOME/bin/etcd" go.etcd.io/etcd/server/v3)
  built etcd
fi

# Kubernetes: the published go.mod asks for its staging modules at v0.0.0, which nobody serves; kube/go.mod maps each.
if stale kube kube/go.mod kube/go.sum kube/main.go kube/localpv/localpv.go; then
  k8s=$(version kube k8s.io/kubernetes)
  echo "building Kubernetes $k8s" >&2
  ld="-s -w"   # without these -X the binaries call themselves v0.0.0-master
  for v in k8s.io/component-base/version k8s.io/client-go/pkg/version; do
    ld="$ld -X $v.gitVersion=$k8s -X $v.gitMajor=1 -X $v.gitMinor=$(echo "$k8s" | cut -d. -f2) -X $v.gitTreeState=clean"
  done
  (cd "$here/kube" && go build -p "${J:-2}" -trimpath -ldflags "$ld" -o "$K8S_HOME/bin/kube" .)
  built kube
fi
for n in kube-apiserver kube-controller-manager kube-scheduler kubelet kube-proxy kubectl localpv; do ln -sf kube "$K8S_HOME/bin/$n"; done

# CoreDNS with the few plugins that its Corefile names: importing its root package would fetch every cloud's SDK.
if stale coredns coredns/go.mod coredns/go.sum coredns/main.go; then
  echo "building CoreDNS $(version coredns github.com/coredns/coredns)" >&2
  (cd "$here/coredns" && go build -p "${J:-2}" -trimpath -ldflags "-s -w" -o "$K8S_HOME/bin/coredns" .)
  built coredns
fi

# Helm, for the tests of the chart.
if stale helm helm/go.mod helm/go.sum; then
  echo "building Helm $(version helm helm.sh/helm/v4)" >&2
  (cd "$here/helm" && go build -p "${J:-2}" -trimpath -ldflags "-s -w" -o "$K8S_HOME/bin/helm" helm.sh/helm/v4/cmd/helm)
  built helm
fi

# Images packed by hand: docker-archive files that `ctr images import` takes. No registry is asked for anything.
if [ ! -e "$K8S_HOME/img/busybox.tar" ] || [ "$here/img/mkimg.py" -nt "$K8S_HOME/img/busybox.tar" ]; then
  musl-gcc -static -Os -s -o "$K8S_HOME/src/pause" "$here/img/pause.c"
  python3 "$here/img/mkimg.py" localhost/pause:local "$K8S_HOME/img/pause.tar" --entry /pause "$K8S_HOME/src/pause=/pause"
  python3 "$here/img/mkimg.py" localhost/busybox:local "$K8S_HOME/img/busybox.tar" --busybox /bin/busybox --bin /usr/bin/curl --bin /usr/bin/getent
fi
