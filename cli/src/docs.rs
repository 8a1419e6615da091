//! Documents that are made from the code, compared with what is in the repository.
//!
//! `SEALANE_WRITE_DOCS=1 cargo test -p sealane docs` writes them anew.

use std::path::Path;

use chassis::config::markdown;

use crate::service::{BROKER_TITLE, LANE_ROUTER_TITLE, MIRROR_TITLE};

#[test]
fn the_configuration_document_says_what_the_code_says() {
    let parts = [
        markdown::<broker::Config>(BROKER_TITLE),
        markdown::<mirror::Config>(MIRROR_TITLE),
        markdown::<lane_router::Config>(LANE_ROUTER_TITLE),
        markdown::<operator::Config>("sealane operator --config FILE"),
    ];
    let text = format!("{CONFIGURATION}\n{}", parts.join("\n"));
    compare("CONFIGURATION.md", &text);
}

#[test]
fn the_compatibility_document_lists_the_apis_that_are_advertised() {
    let path = docs("COMPATIBILITY.md");
    let text = std::fs::read_to_string(&path).expect("docs/COMPATIBILITY.md");
    let mut table = "| key | API | versions |\n| --- | --- | --- |\n".to_owned();
    for range in kafka::ADVERTISED {
        table.push_str(&format!("| {} | {} | {}-{} |\n", range.key, range.name, range.min, range.max));
    }
    let (begin, end) = ("<!-- apis -->\n", "<!-- /apis -->\n");
    let (head, rest) = text.split_once(begin).expect("the mark where the table begins");
    let (_, tail) = rest.split_once(end).expect("the mark where the table ends");
    compare("COMPATIBILITY.md", &format!("{head}{begin}{table}{end}{tail}"));
}

fn compare(name: &str, expected: &str) {
    let path = docs(name);
    if std::env::var_os("SEALANE_WRITE_DOCS").is_some() {
        std::fs::write(&path, expected).expect("written");
    }
    let found = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(found == expected, "docs/{name} is old: SEALANE_WRITE_DOCS=1 cargo test -p sealane docs");
}

fn docs(name: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs").join(name)
}

const CONFIGURATION: &str = "\
# Configuration

Made from the code; do not edit. Each service reads one TOML file (`--config FILE`); `--print-config` prints a
full default with comments. A key that is left out keeps its default; a key that does not exist is an error.
The file says only how to reach things: topics, lanes and their settings are objects that commands make.
`${NAME}` in a value stands for a variable of the environment, for what is known only where the service runs.
`sealane local` needs no file.

Certificate files are looked at every 5 seconds and taken when they have changed. Logs: `--log` or `SEALANE_LOG`
for levels (`info,broker=debug`), `--log-format text|json`; always to standard error. A binary that is built with
`--features otel` also sends logs and spans to an OpenTelemetry collector: `--otlp http://HOST:4317` or
`SEALANE_OTLP` (OTLP over gRPC). Connections are spans of level debug.
";
