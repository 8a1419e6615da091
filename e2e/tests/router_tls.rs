//! TLS towards the lane-router's clients, with librdkafka: the certificate of a client puts it into its lane on any
//! port, and without one it is the port that does. Which of certificate, host name, port and client id decides is
//! tested in the crate itself.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};
use chassis::certs::CertificateDir;
use e2e::clients::{Library, Record, Running};
use e2e::lanes::{self, kill, until, wait_state};
use e2e::process::binary;
use e2e::services::{Kind, Options, Services};
use e2e::tools;
use e2e::wire::Conn;

const TOPIC: &str = "orders";
const BOE: &str = "boe-cart";
const PPE: &str = "ppe-next";
const DOMAIN: &str = "lanes.test";

/// A region whose lane-router was replaced by one that speaks TLS.
struct Secured {
    services: Services,
    router: Child,
    certificates: tempfile::TempDir,
    base: u16,
    log: PathBuf,
}

impl Secured {
    fn start() -> Result<Secured> {
        let mut services = Services::start(Options::default())?;
        services.kill(Kind::LaneRouter, 0)?;
        let base: u16 = services.bootstrap(0).rsplit(':').next().context("a port")?.parse()?;
        let certificates = tempfile::tempdir()?;
        let authority = CertificateDir::open(certificates.path())?;
        let own = authority.leaf("router", &["localhost", "127.0.0.1"])?.cert;
        let inner = services.region_dir(0).parent().context("a folder")?.join("own/tls");
        let (pem, inner_ca) = (inner.join("sealane-lane-router.pem"), inner.join("ca.crt"));
        let config = format!(
            "broker = \"127.0.0.1:{}\"\nbroker_server_name = \"sealane-broker\"\ncontrol = \"127.0.0.1:{}\"\n\
             bind = \"127.0.0.1:{}\"\nadvertised_host = \"localhost\"\nclient_auth = \"optional\"\n\
             lane_domain = \"{DOMAIN}\"\n[tls]\ncert = {pem:?}\nkey = {pem:?}\nca = {inner_ca:?}\n\
             [client_tls]\ncert = {own:?}\nkey = {own:?}\nca = {:?}\n",
            base + 5,
            base + 2,
            base + 1,
            certificates.path().join("ca.crt"),
        );
        let (path, log) = (certificates.path().join("router.toml"), certificates.path().join("router.log"));
        fs::write(&path, config)?;
        let mut command = Command::new(binary()?);
        command.args(["lane-router", "--log-format", "json", "--config"]).arg(path);
        let file = File::create(&log)?;
        command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
        let secured = Secured { services, router: command.spawn()?, certificates, base, log };
        until("the lane-router", || Ok(std::net::TcpStream::connect(secured.shared()).is_ok()))?;
        Ok(secured)
    }

    fn shared(&self) -> String {
        format!("localhost:{}", self.base + 1)
    }

    /// librdkafka's settings for TLS, with the certificate of this name or without one.
    fn settings(&self, name: Option<&str>) -> Result<Vec<String>> {
        let mut settings = vec!["security.protocol=ssl".to_owned()];
        let mut file = |key: &str, path: &Path| settings.push(format!("{key}={}", path.display()));
        file("ssl.ca.location", &self.certificates.path().join("ca.crt"));
        if let Some(name) = name {
            let pem = CertificateDir::open(self.certificates.path())?.leaf(name, &[])?.cert;
            file("ssl.certificate.location", &pem);
            file("ssl.key.location", &pem);
        }
        Ok(settings)
    }

    fn consumer(&self, address: &str, name: Option<&str>) -> Result<Running> {
        let settings = self.settings(name)?;
        let mut options = vec!["--group", "shop", "--session", "6000", "--seconds", "300"];
        settings.iter().for_each(|setting| options.extend(["--option", setting.as_str()]));
        Library::Confluent.start("consume", address, TOPIC, &options)
    }

    /// One record by kcat.
    fn produce(&self, address: &str, name: Option<&str>, value: &str) -> Result<bool> {
        let mut kcat = Command::new(tools::kcat()?);
        kcat.args(["-b", address, "-P", "-t", TOPIC, "-X", "message.timeout.ms=15000"]);
        for setting in self.settings(name)? {
            kcat.args(["-X", setting.as_str()]);
        }
        let mut child = kcat.stdin(Stdio::piped()).stderr(Stdio::null()).spawn()?;
        writeln!(child.stdin.take().context("stdin is piped")?, "{value}")?;
        Ok(child.wait()?.success())
    }
}

impl Drop for Secured {
    fn drop(&mut self) {
        // Both fail only when it has ended already.
        let _ = self.router.kill();
        let _ = self.router.wait();
        if !std::thread::panicking() {
            let log = fs::read_to_string(&self.log).unwrap_or_default();
            let is_error = |line: &str| line.contains("\"level\":\"ERROR\"") || line.contains("panicked at");
            assert!(!log.lines().any(is_error), "errors in the router's log: {log}");
        }
    }
}

fn texts(records: &[Record]) -> BTreeSet<String> {
    records.iter().map(Record::text).collect()
}

#[test]
fn a_certificate_puts_librdkafka_into_its_lane_and_the_port_does_without_one() -> Result<()> {
    let secured = Secured::start()?;
    let services = &secured.services;
    Conn::open(services.bootstrap(0))?.create_topic(TOPIC, 1, &[("sealane.lanes", "true")])?;
    let boe = lanes::create(services, BOE)?.replace("127.0.0.1", "localhost");
    lanes::create(services, PPE)?;
    let (of_boe, of_ppe) = (format!("{BOE}.{DOMAIN}"), format!("{PPE}.{DOMAIN}"));
    let shared = secured.shared();
    // By its certificate a PPE lane is entered on the shared port, and even on another lane's.
    let ppe_inside = secured.consumer(&shared, Some(&of_ppe))?;
    let boe_inside = secured.consumer(&boe, None)?;
    wait_state(services, BOE, "active")?;
    wait_state(services, PPE, "active")?;
    let written = [
        (&shared, Some(of_boe.as_str()), "boe-by-certificate"),
        (&boe, None, "boe-by-port"),
        (&boe, Some(of_ppe.as_str()), "ppe-by-certificate"),
        (&shared, Some(of_ppe.as_str()), "ppe-on-the-shared-port"),
    ];
    for (address, name, value) in written {
        ensure!(secured.produce(address, name, value)?, "{value} was not taken");
    }
    let outside = Conn::open(services.bootstrap(0))?.count_records(TOPIC, 1)?;
    ensure!(outside == 0, "the baseline sees {outside} records");
    for (client, prefix) in [(boe_inside, "boe-"), (ppe_inside, "ppe-")] {
        client.wait_records(2)?;
        let wanted = written.iter().map(|(.., value)| (*value).to_owned());
        let wanted: BTreeSet<String> = wanted.filter(|value| value.starts_with(prefix)).collect();
        let got = texts(&kill(client)?);
        ensure!(got == wanted, "{prefix} got {got:?}");
    }
    // Whoever names no lane, or an unknown one, is let in nowhere; nor is one who speaks plain text.
    ensure!(!secured.produce(&shared, None, "nobody")?, "a client without a lane was let in");
    ensure!(!secured.produce(&shared, Some("boe-none.lanes.test"), "nobody")?, "an unknown lane was let in");
    ensure!(!secured.produce(&boe, Some("boe-none.lanes.test"), "nobody")?, "an unknown lane was let in");
    let plain =
        Library::Confluent.produce(&boe, TOPIC, &[Record::numbered("plain", 0)], &["--seconds", "10"]);
    ensure!(plain.is_ok_and(|acks| acks.iter().all(|ack| ack.outcome.is_err())), "plain text was let in");
    Ok(())
}
