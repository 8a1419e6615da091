#!/usr/bin/env bash
# down.sh [REGION]   ends exactly what up.sh REGION started (by the pids it wrote), then its containers, mounts, network, cgroups.
# KEEP=1 keeps the directory with the logs. Nodes that joined the region go first.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/env.sh"
I=${1:-1}; D=$K8S_RUN/$I; NS=slk$I
need_root "is taken down"
case "$I" in ''|*[!0-9]*) echo "a region is a number from 1 to 99, not $I" >&2; exit 1;; esac
for j in $(grep -lx "$I" "$K8S_RUN"/*/joined 2>/dev/null); do
  j=$(basename "$(dirname "$j")"); [ "$j" = "$I" ] || bash "$here/down.sh" "$j"; done
stop() { # SIGKILL: nothing here needs a graceful end, its data goes too. A reused pid is not in our network namespace.
  local f="$D/pids/$1" p; [ -e "$f" ] || return 0; p=$(cat "$f")
  if [ "$(readlink "/proc/$p/ns/net" 2>/dev/null)" = "net:[$(stat -Lc %i "/run/netns/$NS" 2>/dev/null)]" ]; then kill -9 "$p" 2>/dev/null; fi; rm -f "$f"; }
for n in kubelet kube-proxy coredns localpv kube-scheduler kube-controller-manager; do stop $n; done
if [ -S "$D/ctd/c.sock" ]; then C="ctr -a $D/ctd/c.sock -n k8s.io"
  timeout 20 $C tasks ls -q 2>/dev/null | xargs -r -n1 -P4 timeout 10 $C tasks rm -f >/dev/null 2>&1
  timeout 20 $C containers ls -q 2>/dev/null | xargs -r -n1 -P4 timeout 10 $C containers rm >/dev/null 2>&1; fi
for n in containerd kube-apiserver etcd; do stop $n; done
for p in /proc/[0-9]*; do   # what containerd did not take along: a shim of this region and of no other
  tr '\0' ' ' <"$p/cmdline" 2>/dev/null | grep -q -- "containerd-shim.* -address $D/ctd/c.sock" && kill -9 "${p#/proc/}" 2>/dev/null; done
for _ in 1 2 3; do awk -v d="$D/" 'index($2,d)==1{print $2}' /proc/mounts | sort -r | xargs -r -n1 umount -l 2>/dev/null; done
for f in /var/lib/cni/results/"$NS"-*; do   # network namespaces of pods outlive `ctr tasks rm`
  [ -e "$f" ] || continue
  grep -o '"sandbox":"/var/run/netns/cni-[^"]*"' "$f" | cut -d'"' -f4 | sort -u | while read -r n; do umount -l "$n" 2>/dev/null; rm -f "$n"; done
  i=${f##*/"$NS"-}; rm -f "$f" "/var/lib/cni/results/cni-loopback-${i%-eth0}-lo"; done
[ ! -d /var/log/containers ] || find /var/log/containers -lname "$D/*" -delete 2>/dev/null
ip netns del "$NS" 2>/dev/null; ip link del "v$NS" 2>/dev/null; ip route del "10.244.$I.0/24" 2>/dev/null; ip route del "10.96.$I.0/24" 2>/dev/null
for c in "" cpu cpuacct cpuset memory devices freezer blkio pids systemd unified; do
  [ -d "/sys/fs/cgroup/$c/$NS" ] && find "/sys/fs/cgroup/$c/$NS" -depth -type d -exec rmdir {} + 2>/dev/null; done
case "$D" in "$K8S_RUN"/?*) [ -n "${KEEP:-}" ] || rm -rf "$D";; esac
if ! ls "$K8S_RUN"/*/peer >/dev/null 2>&1; then   # the last one gives the machine's settings and the bridge back
  for f in "$K8S_RUN"/sysctl.*; do [ -e "$f" ] && sysctl -qw "${f##*/sysctl.}=$(cat "$f")" && rm -f "$f"; done
  ip link del slkbr 2>/dev/null; fi
exit 0
