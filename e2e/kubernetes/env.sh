# Sourced by the scripts beside it: where the test Kubernetes keeps its binaries (outside the checkout) and its running
# clusters, and the one sentence with which they refuse a machine that cannot run it.
K8S_HOME=${SEALANE_TOOLS:-$HOME/.cache/sealane/tools}/kubernetes
K8S_RUN=${SEALANE_KUBE_RUN:-/tmp/sealane-kube}
need_root() {
  if [ "$(id -u)" != 0 ]; then
    echo "the test Kubernetes $1, which needs root (network namespaces, mounts, cgroups): run this as root" >&2; exit 1
  fi
}
