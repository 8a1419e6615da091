# Sourced by up.sh: one real node: containerd with runc and a bridge, kubelet, kube-proxy, CoreDNS, a provisioner of volumes.
mkdir -p ctd/net.d
cat >ctd/net.d/10-bridge.conflist <<E
{"cniVersion":"0.4.0","name":"$NS","plugins":[
 {"type":"bridge","bridge":"cni0","isGateway":true,"ipMasq":false,"hairpinMode":true,"ipam":{"type":"host-local","dataDir":"$D/ctd/ipam","ranges":[[{"subnet":"$PODS.0/24"}]],"routes":[{"dst":"0.0.0.0/0"}]}},
 {"type":"portmap","capabilities":{"portMappings":true}}]}
E
# restrict_oom_score_adj: without CAP_SYS_RESOURCE runc cannot lower oom_score_adj (a sandbox wants -998), and dies with
# "can't get final child's PID from pipe: EOF".
cat >ctd/config.toml <<E
version = 2
root = "$D/ctd/root"
state = "$D/ctd/state"
disabled_plugins = ["io.containerd.internal.v1.opt","io.containerd.snapshotter.v1.btrfs","io.containerd.snapshotter.v1.devmapper","io.containerd.snapshotter.v1.zfs","io.containerd.snapshotter.v1.aufs"]
[grpc]
  address = "$D/ctd/c.sock"
[ttrpc]
  address = "$D/ctd/c.sock.ttrpc"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "localhost/pause:local"
  disable_apparmor = true
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "$D/ctd/net.d"
E
start containerd containerd -c "$D/ctd/config.toml"
CTR="ctr -a $D/ctd/c.sock -n k8s.io"
until_ok containerd 60 $CTR images ls
for t in "$IMG"/*.tar; do $CTR images import "$t" >/dev/null; done
say "containerd up, images: $($CTR images ls -q | grep -v '^sha256' | tr '\n' ' ')"

: >resolv.conf
if [ -e /sys/fs/cgroup/cgroup.controllers ]; then mkdir -p "/sys/fs/cgroup/$NS"; else   # cgroup v2: not tried
  for c in cpu cpuacct cpuset memory devices freezer blkio pids systemd; do mkdir -p "/sys/fs/cgroup/$c/$NS"; done
  for f in cpuset.cpus cpuset.mems; do cat /sys/fs/cgroup/cpuset/$f >"/sys/fs/cgroup/cpuset/$NS/$f"; done
fi
cat >kubelet.yaml <<E
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: $IP
readOnlyPort: 0
containerRuntimeEndpoint: unix://$D/ctd/c.sock
cgroupDriver: cgroupfs
cgroupRoot: /$NS
failCgroupV1: false
failSwapOn: false
enforceNodeAllocatable: []
imageGCHighThresholdPercent: 100
evictionHard: {memory.available: "100Mi", nodefs.available: "1%", imagefs.available: "1%"}
authentication: {anonymous: {enabled: false}, webhook: {enabled: true}, x509: {clientCAFile: $D/pki/ca.crt}}
authorization: {mode: Webhook}
clusterDNS: [$IPA]
clusterDomain: cluster.local
resolvConf: $D/resolv.conf
podLogsDir: $D/podlogs
volumePluginDir: $D/volplugins
syncFrequency: 10s
nodeStatusUpdateFrequency: 5s
shutdownGracePeriod: 0s
E
start kubelet "$BIN/kubelet" --config="$D/kubelet.yaml" --kubeconfig="$D/kubelet.kubeconfig" --hostname-override="node$I" --node-ip="$IP" --root-dir="$D/kubelet" --cert-dir="$D/kubelet-pki"
cat >proxy.yaml <<E
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: ${PROXY_MODE:-nftables}
clientConnection: {kubeconfig: $D/proxy.kubeconfig}
clusterCIDR: 10.244.0.0/16
hostnameOverride: node$I
healthzBindAddress: 127.0.0.1:10256
metricsBindAddress: 127.0.0.1:10249
conntrack: {maxPerCore: 0}
nftables: {minSyncPeriod: 100ms}
iptables: {minSyncPeriod: 100ms}
E
start kube-proxy "$BIN/kube-proxy" --config="$D/proxy.yaml"
if [ "$API" = "$I" ]; then
  cat >Corefile <<E
.:53 {
  bind $IP
  errors
  health 127.0.0.1:8080
  ready 127.0.0.1:8181
  kubernetes cluster.local in-addr.arpa {
    kubeconfig $D/addons.kubeconfig c
    ttl 1
  }
}
E
  start coredns "$BIN/coredns" -conf "$D/Corefile"
fi
until_ok kubelet 120 $K get node "node$I"
$K label --overwrite node "node$I" topology.kubernetes.io/zone="z$I" topology.kubernetes.io/region="r$API" >/dev/null
$K wait --for=condition=Ready "node/node$I" --timeout=120s >/dev/null; say "node Ready"
start localpv "$BIN/localpv" --kubeconfig="$D/addons.kubeconfig" --node="node$I" --dir="$D/pv"
[ ! -e pids/coredns ] || until_ok coredns 60 inside curl -sf http://127.0.0.1:8181/ready
say "node$I is up"
