# What a developer runs. `just` alone lists it.

export CARGO_TARGET_DIR := env("CARGO_TARGET_DIR", env("HOME") / ".cache/sealane/target")

_default:
    @just --list

# Format the code.
fmt:
    cargo fmt --all

# Format check and clippy, warnings denied.
lint:
    cargo fmt --all --check
    cargo clippy --workspace --all-targets -- -D warnings

# Every test but those on Kubernetes; real clients, etcd, S3 and HDFS included.
test *args:
    cargo test --workspace --features cluster,operator {{args}}

# Only the tests with real processes and real clients; `just e2e crash` runs one file.
e2e file="*":
    cargo test -p e2e --test '{{file}}'

# The same client scenarios against Apache Kafka: what they expect is what Kafka does.
e2e-kafka:
    SEALANE_E2E_TARGET=kafka cargo test -p e2e --test clients --test groups

# Crash tests by more seeds than the ordinary run takes.
soak rounds="100":
    SEALANE_CRASH_ROUNDS={{rounds}} cargo test --workspace --test crash --test killed_alone --test router_crash -- --nocapture --test-threads 2

# The simulation of the shared log by further seeds, with a row for each run in docs/benchmarks/sim.md.
sim seeds="100000":
    cargo test --release -p broker-store --lib --no-run
    .ci/sim {{seeds}}

# The simulation of a whole cluster, from its controller to the shared log, by these seeds.
sim-cluster from="0" to="10000":
    SEALANE_CLUSTER_SEEDS={{from}}..{{to}} cargo test --release -p broker --lib cluster::sim::whatever -- --nocapture

# The stores of a cluster and brokers that share them, on real etcd, S3 and HDFS.
test-cluster *args:
    cargo test --workspace --features cluster,operator --lib --test 'cluster*' {{args}}

# A cluster on etcd and a store (s3 or hdfs) hurt by COUNT seeds FROM one; rows add up in docs/benchmarks.
soak-cluster store="s3" from="1" count="20":
    cargo build --workspace --features cluster --bin sealane --bin soak
    SEALANE_BIN="$CARGO_TARGET_DIR/debug/sealane" "$CARGO_TARGET_DIR/debug/soak" {{store}} {{from}} {{count}}

# A cluster on loopback to look at: etcd, the store (s3 or hdfs) and brokers. `just down` ends it.
up store="s3" brokers="3":
    #!/usr/bin/env bash
    set -euo pipefail
    cargo build --workspace --features cluster --bin sealane --bin cluster
    mkdir -p "$CARGO_TARGET_DIR/up"
    pid="$CARGO_TARGET_DIR/up/pid" log="$CARGO_TARGET_DIR/up/log"
    if [ -e "$pid" ] && kill -0 "$(cat "$pid")" 2>/dev/null; then
        echo "a cluster is up already; \`just down\` ends it:"; cat "$log"; exit 1
    fi
    SEALANE_BIN="$CARGO_TARGET_DIR/debug/sealane" setsid "$CARGO_TARGET_DIR/debug/cluster" {{store}} {{brokers}} > "$log" 2>&1 &
    echo $! > "$pid"
    until grep -q ^ready "$log"; do
        kill -0 "$(cat "$pid")" 2>/dev/null || { cat "$log"; rm "$pid"; exit 1; }
        sleep 0.2
    done
    cat "$log"

# Ends what `just up` started, and removes its files.
down:
    #!/usr/bin/env bash
    set -euo pipefail
    pid="$CARGO_TARGET_DIR/up/pid"
    [ -e "$pid" ] || { echo "nothing is up"; exit 1; }
    kill -TERM "$(cat "$pid")" 2>/dev/null || true
    for _ in $(seq 100); do kill -0 -- -"$(cat "$pid")" 2>/dev/null || break; sleep 0.1; done
    # It was ended in the middle of its start, perhaps.
    kill -KILL -- -"$(cat "$pid")" 2>/dev/null || true
    rm "$pid"

# A real Kubernetes on this machine (root), one cluster for each REGION: `just kube up 1` prints its kubeconfig's path.
kube action="up" region="1":
    @e2e/kubernetes/region.sh {{action}} {{region}}

# The tests on a real Kubernetes (root; its first build takes some 13 CPU minutes, that of the last tag some more).
test-kubernetes *args:
    cargo test --workspace --features cluster,operator,kubernetes --test 'kubernetes*' {{args}} -- --test-threads 1

# Outages of the API server at full length (root): what the operator, its watches and the data plane make of them.
outage seconds="600":
    SEALANE_OUTAGE_SECONDS={{seconds}} cargo test --workspace --features cluster,operator,kubernetes --test kubernetes_operator --test kubernetes_faults away -- --test-threads 1

# The S3 tests on SeaweedFS in place of gofakes3; its first build takes minutes.
seaweed:
    SEALANE_S3=seaweed cargo test --workspace --features cluster,operator --lib remote::s3 -- --test-threads 1

# A benchmark: broker (beside Apache Kafka), mirror, lanes, profile, store or cluster; --quick takes a few minutes.
bench which="broker" *args:
    cargo build --release -p sealane -p e2e --bin sealane --bin bench {{ if which =~ "^(store|cluster)$" { "--features sealane/cluster,e2e/cluster" } else { "" } }}
    "$CARGO_TARGET_DIR/release/bench" {{which}} {{args}}

# What CI runs.
ci:
    .ci/run
