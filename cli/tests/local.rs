//! The binary as a person uses it: `sealane local` and the commands against it, real processes, real
//! ports. What is checked is what is printed, the exit codes, and that a restart finds everything.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use test_ports::Ports;

/// A running `sealane local`; killed when dropped.
struct Local {
    child: Child,
    port: u16,
    printed: String,
}

impl Local {
    fn start(data: &Path, port: u16) -> Local {
        let mut child = sealane(&["local", "--port-base", &port.to_string(), "--data"])
            .arg(data)
            .stdout(Stdio::piped())
            .spawn()
            .expect("started");
        let mut out = BufReader::new(child.stdout.take().expect("piped"));
        let mut printed = String::new();
        while !printed.ends_with("\nready\n") {
            assert!(out.read_line(&mut printed).expect("text") > 0, "ended before it was ready: {printed}");
        }
        Local { child, port, printed }
    }

    /// Runs a command against the first region (0) or the second.
    fn run(&self, region: u16, args: &[&str]) -> Output {
        self.feed(region, args, "")
    }

    fn feed(&self, region: u16, args: &[&str], input: &str) -> Output {
        let server = format!("127.0.0.1:{}", self.port + 100 * region);
        let mut child = sealane(args)
            .args(["--server", &server])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("started");
        child.stdin.take().expect("piped").write_all(input.as_bytes()).expect("read");
        child.wait_with_output().expect("ended")
    }

    /// What a command that must succeed prints.
    fn text(&self, region: u16, args: &[&str]) -> String {
        good(&self.run(region, args))
    }

    fn produce(&self, region: u16, args: &[&str], input: &str) {
        good(&self.feed(region, &[&["produce"], args].concat(), input));
    }

    /// SIGTERM, and the exit code.
    fn stop(mut self) -> Option<i32> {
        let kill = Command::new("kill").args(["-TERM", &self.child.id().to_string()]).status();
        assert!(kill.expect("kill runs").success());
        let started = Instant::now();
        while started.elapsed() < Duration::from_secs(30) {
            if let Some(status) = self.child.try_wait().expect("a child") {
                return status.code();
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        panic!("still running 30 s after SIGTERM");
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn sealane(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sealane"));
    command.args(args).env_remove("SEALANE_LOG").env_remove("SEALANE_SERVER");
    command
}

fn good(output: &Output) -> String {
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    String::from_utf8(output.stdout.clone()).expect("text")
}

/// The one line that a command that must fail says.
fn complaint(output: &Output) -> String {
    let text = String::from_utf8(output.stderr.clone()).expect("text");
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert_eq!(text.lines().count(), 1, "{text}");
    text.trim_end().to_owned()
}

#[test]
fn a_newcomer_produces_in_one_region_consumes_in_the_other_and_finds_all_again() {
    let dir = tempfile::tempdir().expect("a directory");
    let ports = Ports::take().expect("ports");
    let port = ports.base;
    let local = Local::start(dir.path(), port);
    assert!(local.printed.contains(&format!("east    127.0.0.1:{port}")), "{}", local.printed);
    assert!(local.printed.contains("Try it, in another terminal:"), "{}", local.printed);

    local.text(0, &["topic", "create", "orders", "--partitions", "2", "--config", "sealane.lanes=true"]);
    local.produce(0, &["orders", "--key", "k", "--header", "h=1"], "one\ntwo\n");
    let consume = ["consume", "orders", "--from-beginning", "--count", "2", "--timeout", "30"];
    assert_eq!(local.text(1, &consume), "one\ntwo\n");
    assert_eq!(local.text(0, &["lane", "create", "boe-cart"]), format!("127.0.0.1:{}\n", port + 10));
    assert_eq!(local.stop(), Some(0));

    let local = Local::start(dir.path(), port);
    assert_eq!(local.text(0, &consume), "one\ntwo\n");
    assert!(local.text(0, &["lane", "list"]).contains("boe-cart"));
    let grouped = [&consume[..], &["--group", "g", "--output", "json"]].concat();
    let lines = local.text(1, &grouped);
    let record: serde_json::Value =
        serde_json::from_str(lines.lines().next().expect("a line")).expect("JSON");
    assert_eq!(record["value"], "one");
    assert_eq!(record["headers"][0]["value"], "1");
    let described = local.text(1, &["group", "describe", "g", "--output", "json"]);
    let group: serde_json::Value = serde_json::from_str(&described).expect("JSON");
    let lags: Vec<_> = group["positions"].as_array().expect("a list").iter().map(|p| &p["lag"]).collect();
    assert!(!lags.is_empty() && lags.iter().all(|lag| **lag == 0), "{described}");
    assert_eq!(local.stop(), Some(0));
}

#[test]
fn a_lane_record_goes_to_the_lane_and_the_rest_to_the_baseline() {
    let dir = tempfile::tempdir().expect("a directory");
    let ports = Ports::take().expect("ports");
    let local = Local::start(dir.path(), ports.base);
    local.text(0, &["topic", "create", "orders", "--config", "sealane.lanes=true"]);
    local.text(0, &["lane", "create", "boe-cart"]);
    let consume = ["consume", "orders", "--group", "shop", "--timeout", "60"];
    let in_lane = std::thread::scope(|scope| {
        let waiting =
            scope.spawn(|| local.text(0, &[&consume[..], &["--lane", "boe-cart", "--count", "2"]].concat()));
        let started = Instant::now();
        while !local.text(0, &["lane", "status", "boe-cart"]).contains("active") {
            assert!(started.elapsed() < Duration::from_secs(30), "the lane's consumer did not come");
            std::thread::sleep(Duration::from_millis(100));
        }
        local.produce(0, &["orders", "--header", "x-lane=boe-cart"], "by header\n");
        local.produce(0, &["orders", "--lane", "boe-cart"], "by address\n");
        local.produce(0, &["orders"], "baseline\n");
        waiting.join().expect("no panic")
    });
    assert_eq!(in_lane, "by header\nby address\n");
    let rest = local.text(0, &[&consume[..], &["--from-beginning", "--until-end"]].concat());
    assert_eq!(rest, "baseline\n");
    let alone = ["consume", "orders", "--from-beginning", "--until-end", "--timeout", "20"];
    assert_eq!(local.text(0, &alone), "baseline\n", "without a group no lane record is seen");

    local.text(0, &["lane", "create", "ppe-next"]);
    local.produce(0, &["orders", "--lane", "ppe-next"], "held\n");
    assert_eq!(
        local.text(0, &["lane", "delete", "ppe-next"]),
        "lane ppe-next deleted, 1 records of it are hidden\n"
    );
    assert_eq!(local.stop(), Some(0));
}

#[test]
fn what_goes_wrong_is_said_in_one_line() {
    let dir = tempfile::tempdir().expect("a directory");
    let (ports, others) = (Ports::take().expect("ports"), Ports::take().expect("ports"));
    let port = ports.base;
    let local = Local::start(dir.path(), port);
    let other = tempfile::tempdir().expect("a directory");
    let start = |data: &Path, base: u16| {
        let output = sealane(&["local", "--port-base", &base.to_string(), "--data"]).arg(data).output();
        complaint(&output.expect("ran"))
    };
    let in_use = start(other.path(), port);
    assert!(in_use.contains(&format!("127.0.0.1:{port} is in use")), "{in_use}");
    let owned = start(dir.path(), others.base);
    assert!(owned.contains(&format!("is in use by process {}", local.child.id())), "{owned}");

    for (args, says) in [
        (&["topic", "create", "a/b"][..], "a/b"),
        (&["topic", "create", "t", "--config", "nope=1"], "nope"),
        (&["topic", "create", "t", "--config", "cleanup.policy=compact"], "compact"),
        (&["topic", "delete", "nope"], "`sealane topic list` shows"),
        (&["topic", "describe", "nope"], "topic nope: UnknownTopicOrPartition (3); it does not exist"),
        (&["group", "describe", "nope"], "`sealane group list` shows"),
        (&["lane", "create", "Boe"], "lane name \"Boe\" may hold only"),
        (&["lane", "create", "boe-a", "--class", "ppe"], "lane boe-a is of class boe by its name"),
        (&["lane", "status", "nope"], "lane nope does not exist"),
        (&["produce", "t", "--lane", "nope"], "lane nope does not exist"),
        (&["consume", "t", "--format", "yaml"], "--format \"yaml\" is none of"),
        (&["mirror", "link", "show", "north"], "there is no link to north; `sealane mirror link list` shows"),
        (&["mirror", "link", "set", "east", "--pause"], "this is region east itself"),
        (&["mirror", "link", "set", "West", "--pause"], "region name \"West\" must be"),
        (&["mirror", "link", "set", "west", "--topics", "a b"], "\"a b\" is no pattern of topic names"),
        (&["mirror", "link", "delete", "west"], "the link to west has the default policy already"),
    ] {
        let line = complaint(&local.run(0, args));
        assert!(line.contains(says), "{args:?}: {line}");
    }
    let nobody = sealane(&["topic", "list", "--server", "127.0.0.1:1"]).output().expect("ran");
    assert!(complaint(&nobody).contains("cannot connect to 127.0.0.1:1: Connection refused"));
    let http = format!("127.0.0.1:{}", port + 3);
    let wrong_port = complaint(&sealane(&["topic", "list", "--server", &http]).output().expect("ran"));
    assert!(wrong_port.contains("does the port speak Kafka"), "{wrong_port}");
    assert_eq!(local.stop(), Some(0));
}

#[test]
fn links_are_shown_and_changed_and_a_pause_outlives_a_restart() {
    let dir = tempfile::tempdir().expect("a directory");
    let ports = Ports::take().expect("ports");
    let port = ports.base;
    let local = Local::start(dir.path(), port);
    let json = |local: &Local, args: &[&str]| -> serde_json::Value {
        let args = [&["mirror", "link"][..], args, &["--output", "json"]].concat();
        serde_json::from_str(&local.text(0, &args)).expect("JSON")
    };
    let listed = json(&local, &["list"]);
    assert_eq!((&listed[0]["peer"], &listed[0]["default"]), (&"west".into(), &true.into()), "{listed}");
    assert!(local.text(0, &["mirror", "link", "show", "west"]).starts_with("link to west  (default)\n"));
    let set = json(&local, &["set", "west", "--exclude", "secret*", "--lanes", "all", "--rate", "100000000"]);
    assert_eq!((&set["lanes"], &set["rate_bytes_max"]), (&"all".into(), &100_000_000.into()), "{set}");
    local.produce(0, &["secret"], "stays\n");
    local.produce(0, &["open"], "crosses\n");
    let consume = |topic| ["consume", topic, "--from-beginning", "--count", "1", "--timeout", "60"];
    assert_eq!(local.text(1, &consume("open")), "crosses\n");
    let status = local.text(0, &["mirror", "status"]);
    assert!(status.contains("leaves this topic out"), "{status}");

    json(&local, &["set", "west", "--pause", "--exclude", ""]);
    assert_eq!(local.stop(), Some(0));
    let local = Local::start(dir.path(), port);
    let shown = json(&local, &["show", "west"]);
    assert_eq!((&shown["paused"], &shown["lanes"]), (&true.into(), &"all".into()), "{shown}");
    json(&local, &["set", "west", "--resume"]);
    assert_eq!(local.text(1, &consume("secret")), "stays\n");
    assert_eq!(local.text(0, &["mirror", "link", "delete", "west"]), "the link to west is at its default\n");
    assert_eq!(json(&local, &["show", "west"])["default"], true);
    assert_eq!(local.stop(), Some(0));
}

#[test]
fn a_key_of_a_mirror_that_became_an_object_names_the_command() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("m.toml");
    std::fs::write(&file, "[[links]]\npeer = \"west\"\ninclude = [\"a*\"]\n").expect("written");
    let line = complaint(&sealane(&["mirror", "--config"]).arg(&file).output().expect("ran"));
    assert!(line.contains("m.toml, line 3: `include` is no key of this file any more"), "{line}");
    assert!(line.contains("`sealane mirror link set PEER --topics PATTERNS`"), "{line}");
}

#[test]
fn a_printed_configuration_is_one_that_can_be_read() {
    let dir = tempfile::tempdir().expect("a directory");
    for service in ["broker", "mirror", "lane-router"] {
        let printed = good(&sealane(&[service, "--print-config"]).output().expect("ran"));
        let file = dir.path().join("c.toml");
        std::fs::write(&file, format!("{printed}\nnope = 1\n")).expect("written");
        let line = complaint(&sealane(&[service, "--config"]).arg(&file).output().expect("ran"));
        assert!(line.contains("unknown key `nope`"), "{line}");
    }
}
