# Sourced by up.sh: etcd, API server (with an audit log of metadata), controller manager and scheduler of one region.
start etcd "$BIN/etcd" --name=e --data-dir="$D/etcd" --listen-client-urls=http://127.0.0.1:2379 --advertise-client-urls=http://127.0.0.1:2379 \
  --listen-peer-urls=http://127.0.0.1:2380 --initial-advertise-peer-urls=http://127.0.0.1:2380 --initial-cluster=e=http://127.0.0.1:2380 --unsafe-no-fsync --log-level=warn
until_ok etcd 60 inside curl -sf http://127.0.0.1:2379/readyz; say "etcd ready"
cat >audit.yaml <<E
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- {level: None, users: ["system:apiserver", "system:kube-scheduler", "system:kube-controller-manager", "system:kube-proxy", "addons"]}
- {level: None, userGroups: ["system:nodes"]}
- {level: Metadata}
E
start kube-apiserver "$BIN/kube-apiserver" --etcd-servers=http://127.0.0.1:2379 --bind-address=0.0.0.0 --secure-port=6443 --advertise-address="$IP" \
  --tls-cert-file=pki/apiserver.crt --tls-private-key-file=pki/apiserver.key --client-ca-file=pki/ca.crt \
  --kubelet-client-certificate=pki/kubelet-client.crt --kubelet-client-key=pki/kubelet-client.key --kubelet-preferred-address-types=InternalIP \
  --requestheader-client-ca-file=pki/ca.crt --requestheader-allowed-names=front-proxy-client --requestheader-username-headers=X-Remote-User \
  --requestheader-group-headers=X-Remote-Group --requestheader-extra-headers-prefix=X-Remote-Extra- \
  --proxy-client-cert-file=pki/front-proxy.crt --proxy-client-key-file=pki/front-proxy.key \
  --authorization-mode=Node,RBAC --enable-admission-plugins=NodeRestriction --allow-privileged=true --service-cluster-ip-range="$SVC.0/24" \
  --service-account-issuer=https://kubernetes.default.svc.cluster.local --service-account-signing-key-file=pki/sa.key --service-account-key-file=pki/sa.pub \
  --audit-policy-file="$D/audit.yaml" --audit-log-path="$D/log/audit.log" --audit-log-mode=blocking \
  --event-ttl=24h --profiling=false
until_ok kube-apiserver 180 $K get --raw /readyz; say "apiserver ready"
start kube-controller-manager "$BIN/kube-controller-manager" --kubeconfig=kcm.kubeconfig --authentication-kubeconfig=kcm.kubeconfig --authorization-kubeconfig=kcm.kubeconfig \
  --service-account-private-key-file=pki/sa.key --root-ca-file=pki/ca.crt --cluster-signing-cert-file=pki/ca.crt --cluster-signing-key-file=pki/ca.key \
  --use-service-account-credentials --service-cluster-ip-range="$SVC.0/24" --leader-elect=false \
  --node-monitor-grace-period="${NODE_GRACE:-40s}" --bind-address=127.0.0.1
start kube-scheduler "$BIN/kube-scheduler" --kubeconfig=scheduler.kubeconfig --authentication-kubeconfig=scheduler.kubeconfig --authorization-kubeconfig=scheduler.kubeconfig \
  --leader-elect=false --bind-address=127.0.0.1
until_ok kube-controller-manager 120 $K -n default get serviceaccount default; say "controller manager works (a default ServiceAccount exists)"
until_ok kube-scheduler 120 inside curl -skf https://127.0.0.1:10259/healthz; say "scheduler healthy"
$K apply -f - >/dev/null <<E
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: local, annotations: {storageclass.kubernetes.io/is-default-class: "true"}}
provisioner: e2e.local/dir
volumeBindingMode: WaitForFirstConsumer
reclaimPolicy: Delete
allowVolumeExpansion: true
E
