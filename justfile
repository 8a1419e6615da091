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

# Every test, the ones with real clients included.
test *args:
    cargo test --workspace {{args}}

# Only the tests with real processes and real clients; `just e2e crash` runs one file.
e2e file="*":
    cargo test -p e2e --test '{{file}}'

# The same client scenarios against Apache Kafka: what they expect is what Kafka does.
e2e-kafka:
    SEALANE_E2E_TARGET=kafka cargo test -p e2e --test clients --test groups

# Crash tests by more seeds than the ordinary run takes.
soak rounds="100":
    SEALANE_CRASH_ROUNDS={{rounds}} cargo test --workspace --test crash --test killed_alone --test router_crash -- --nocapture --test-threads 2

# The S3 tests on SeaweedFS in place of gofakes3; its first build takes minutes.
seaweed:
    SEALANE_S3=seaweed cargo test --workspace --features cluster --lib remote::s3 -- --test-threads 1

# A benchmark: broker (beside Apache Kafka), mirror, lanes or profile; --quick takes a few minutes.
bench which="broker" *args:
    cargo build --release -p sealane -p e2e --bin sealane --bin bench
    "$CARGO_TARGET_DIR/release/bench" {{which}} {{args}}

# What CI runs.
ci:
    .ci/run
