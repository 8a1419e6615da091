#!/usr/bin/env bash
# up.sh [REGION]   one real single-node Kubernetes, "region" REGION = 1..99, in a network namespace of its own.
#   NODE=0 up.sh 2     the control plane alone: no kubelet, no containerd, no proxy, no DNS
#   JOIN=1 up.sh 11    one more real node (node11) for the cluster of region 1
# Progress goes to standard error; standard output is the path of the kubeconfig and nothing else. `down.sh` undoes it.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/env.sh"
I=${1:-1}; NODE=${NODE:-1}; API=${JOIN:-$I}
need_root "starts network namespaces and containers"
case "$I$API" in *[!0-9]*) echo "a region is a number from 1 to 99, not $I" >&2; exit 1;; esac
[ "$I" -ge 1 ] && [ "$I" -le 99 ] || { echo "a region is a number from 1 to 99, not $I" >&2; exit 1; }
BIN=$K8S_HOME/bin; IMG=$K8S_HOME/img; D=$K8S_RUN/$I; DA=$K8S_RUN/$API; NS=slk$I
[ -x "$BIN/kube" ] && [ -x "$BIN/etcd" ] || { echo "the test Kubernetes is not built: run e2e/kubernetes/build.sh" >&2; exit 1; }
IP=10.250.0.$I; IPA=10.250.0.$API; HOSTIP=10.250.0.254; PODS=10.244.$I; SVC=10.96.$API
[ ! -e "$D/pids" ] || [ -z "$(ls -A "$D/pids")" ] || { echo "region $I seems to be up ($D/pids): e2e/kubernetes/down.sh $I takes it down" >&2; exit 1; }
mkdir -p "$D"/{pids,log,pki,pv,cmd}; cd "$D"; T0=$(date +%s.%N)
say() { printf '%6.1fs  %s\n' "$(echo "$(date +%s.%N) - $T0" | bc)" "$*" >&2; }
failed() { trap - EXIT; echo "region $I did not come up; its logs are in $D/log" >&2; KEEP=1 bash "$here/down.sh" "$I"; exit 1; }
trap failed EXIT
# start NAME COMMAND...: in the region's network namespace only (nsenter, not `ip netns exec`, which remounts /sys and hides the
# cgroups). The command is kept as cmd/NAME, the pid as pids/NAME, so that tests can take a component away and give it back.
start() {
  local n=$1; shift
  { echo '#!/bin/sh'; printf 'cd %q; setsid nohup nsenter --net=/run/netns/%s' "$D" "$NS"; printf ' %q' "$@"
    printf ' >>%q 2>&1 </dev/null 9>&- &\necho $! >%q\n' "$D/log/$n.log" "$D/pids/$n"; } >"$D/cmd/$n"
  chmod +x "$D/cmd/$n"; "$D/cmd/$n"; }
alive() { kill -0 "$(cat "$D/pids/$1")" 2>/dev/null || { echo "$1 died:" >&2; tail -20 "$D/log/$1.log" >&2; exit 1; }; }
until_ok() { # NAME SECONDS COMMAND...
  local n=$1 s=$2; shift 2
  for _ in $(seq $((s*5))); do "$@" >/dev/null 2>&1 && return 0; alive "$n"; sleep 0.2; done
  echo "$n is not ready after $s s:" >&2; tail -20 "$D/log/$n.log" >&2; exit 1; }

# --- network: one bridge for all regions on the machine's side, one namespace and one cable for each region
exec 9>"$K8S_RUN/lock"; flock 9
ip link show slkbr >/dev/null 2>&1 || { ip link add slkbr type bridge; ip addr add $HOSTIP/24 dev slkbr; ip link set slkbr up; }
ip netns add "$NS"; ip -n "$NS" link set lo up
ip link add "v$NS" type veth peer name eth0 netns "$NS"; ip link set "v$NS" master slkbr up
ip -n "$NS" addr add "$IP/24" dev eth0; ip -n "$NS" link set eth0 up; ip -n "$NS" route add default via $HOSTIP
ip route replace "$PODS.0/24" via "$IP"; ip route replace "$SVC.0/24" via "$IPA"
inside() { nsenter --net="/run/netns/$NS" "$@"; }
inside sysctl -qw net.ipv4.ip_forward=1 net.ipv4.conf.all.route_localnet=1
inside sysctl -qw net.bridge.bridge-nf-call-iptables=1 2>/dev/null || true   # else pod -> service -> pod on one bridge loses replies
for o in "$K8S_RUN"/*/peer; do   # pods of all regions reach each other by their own addresses
  [ -e "$o" ] || continue; read -r oi <"$o"; [ "$oi" = "$I" ] && continue
  ip -n "slk$oi" route replace "$PODS.0/24" via "$IP" || true; ip -n "$NS" route replace "10.244.$oi.0/24" via "10.250.0.$oi" || true; done
echo "$I" >peer; echo "$API" >joined
for s in vm.overcommit_memory kernel.panic kernel.panic_on_oops; do   # a kubelet overwrites these of the machine; down.sh gives them back
  [ -e "$K8S_RUN/sysctl.$s" ] || sysctl -n $s >"$K8S_RUN/sysctl.$s"; done
flock -u 9

# --- keys: EC P-256
key() { openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "pki/$1.key" 2>/dev/null; }
leaf() { # NAME SUBJECT USAGE [ALTERNATIVE NAMES]
  key "$1"; openssl req -new -key "pki/$1.key" -subj "$2" -out "pki/$1.csr"
  printf 'basicConstraints=CA:FALSE\nkeyUsage=critical,digitalSignature\nextendedKeyUsage=%s\n%s\n' "$3" "${4:+subjectAltName=$4}" >"pki/$1.ext"
  openssl x509 -req -in "pki/$1.csr" -CA pki/ca.crt -CAkey pki/ca.key -CAcreateserial -days 365 -extfile "pki/$1.ext" -out "pki/$1.crt" 2>/dev/null; }
if [ "$API" = "$I" ]; then
  key ca; openssl req -x509 -new -key pki/ca.key -days 3650 -subj "/CN=region-$I" -addext keyUsage=critical,keyCertSign,cRLSign,digitalSignature -out pki/ca.crt
  names=DNS:localhost; for n in kubernetes kubernetes.default kubernetes.default.svc kubernetes.default.svc.cluster.local; do names=$names,DNS:$n; done
  leaf apiserver /CN=kube-apiserver serverAuth "$names,IP:127.0.0.1,IP:$IP,IP:$SVC.1"
  leaf admin /O=system:masters/CN=admin clientAuth
  leaf kcm /CN=system:kube-controller-manager clientAuth
  leaf scheduler /CN=system:kube-scheduler clientAuth
  leaf kubelet-client /O=system:masters/CN=kube-apiserver-kubelet-client clientAuth
  leaf front-proxy /CN=front-proxy-client clientAuth
  key sa; openssl pkey -in pki/sa.key -pubout -out pki/sa.pub
else cp "$DA"/pki/ca.crt "$DA"/pki/ca.key pki/; fi
if [ "$NODE" = 1 ]; then
  leaf kubelet "/O=system:nodes/CN=system:node:node$I" clientAuth
  leaf proxy /CN=system:kube-proxy clientAuth
  leaf addons /O=system:masters/CN=addons clientAuth   # CoreDNS and the provisioner of volumes
fi
for k in admin kcm scheduler kubelet proxy addons; do
  [ -e "pki/$k.crt" ] || continue
  cat >"$k.kubeconfig" <<E
apiVersion: v1
kind: Config
current-context: c
contexts: [{name: c, context: {cluster: c, user: u}}]
clusters: [{name: c, cluster: {server: "https://$IPA:6443", certificate-authority-data: $(base64 -w0 pki/ca.crt)}}]
users: [{name: u, user: {client-certificate-data: $(base64 -w0 pki/$k.crt), client-key-data: $(base64 -w0 pki/$k.key)}}]
E
done
say certificates

K="$BIN/kubectl --kubeconfig=$DA/admin.kubeconfig"
[ "$API" != "$I" ] || . "$here/control-plane.sh"
if [ "$NODE" = 1 ]; then . "$here/node.sh"; else say "control plane up, no node"; fi
trap - EXIT
echo "$DA/admin.kubeconfig"
