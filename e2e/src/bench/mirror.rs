//! The mirror over a long line: two regions, each a broker and a mirror process, and between them a relay with 100 ms
//! round trip, 200 Mbit/s and some loss. Records are produced in one region faster than the line takes them; a
//! consumer in the other says how fast they arrive. CPU and memory are those of the two mirror processes.

use std::fs::{self, File};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use chassis::certs::CertificateDir;
use chassis::tls::TlsFiles;
use tempfile::TempDir;

use super::Scale;
use super::contender::binary;
use super::load::{self, Client, Load};
use super::report;
use super::table::Samples;
use crate::relay::Relay;
use crate::wire::Conn;
use crate::{probe, usage};
use test_ports::Ports;

const ONE_WAY: Duration = Duration::from_millis(50);
/// 200 Mbit/s.
const LINE_BYTES_PER_SECOND: u64 = 25_000_000;
const GIGABYTE: f64 = 1e9;
const MEBIBYTE: f64 = 1024.0 * 1024.0;
const PATIENCE: Duration = Duration::from_secs(60);

/// Name and datagrams lost of a million.
const LOSSES: &[(&str, u64)] = &[("no loss", 0), ("0.1 % loss", 1_000), ("1 % loss", 10_000)];

/// One region: its broker and its mirror.
struct Region {
    kafka: SocketAddr,
    _broker: Service,
    mirror: Service,
}

/// A child process that ends with this value.
struct Service(Child);

/// Runs everything and writes `docs/benchmarks/mirror.md` and `mirror.tsv`.
pub fn run(scale: Scale) -> Result<()> {
    load::rdkafka_program()?;
    let dir = tempfile::Builder::new().prefix("sealane-mirror").tempdir()?;
    let ports = Ports::take()?;
    let mut samples = Samples::default();
    let relay = Relay::udp(mirror_address(&ports, 1), 1)?;
    relay.faults.delay(ONE_WAY);
    relay.faults.limit(LINE_BYTES_PER_SECOND);
    let regions = [
        Region::start(&dir, &ports, 0, "east", "west", Some(relay.address))?,
        Region::start(&dir, &ports, 1, "west", "east", None)?,
    ];
    for round in 1..=scale.rounds {
        for (name, per_million) in LOSSES {
            relay.faults.lose(*per_million);
            one(scale, round, name, &regions, &mut samples).with_context(|| logs(&dir))?;
        }
    }
    for (region, who) in regions.iter().zip(["mirror that sends", "mirror that applies"]) {
        let peak = usage::peak_rss_bytes(region.mirror.0.id())? as f64 / MEBIBYTE;
        samples.add(scale.rounds, who, "under all loads", "peak_rss_MiB", peak);
    }
    write(scale, &samples)
}

fn one(scale: Scale, round: usize, name: &str, regions: &[Region; 2], samples: &mut Samples) -> Result<()> {
    let [east, west] = regions;
    let topic = format!("far-{round}-{}", samples.all.len());
    Conn::open(east.kafka)?.create_topic(&topic, 4, &[])?;
    wait_for_topic(west.kafka, &topic)?;
    let load = Load::plain(&topic, scale.records(120_000, 400_000), 1024, "none");
    let before = mirrors_cpu(regions)?;
    let arrived = std::thread::scope(|scope| {
        let (bootstrap, load) = (west.kafka.to_string(), &load);
        let reader = scope.spawn(move || load::consume_along(&bootstrap, load));
        load::produce(Client::Librdkafka, &east.kafka.to_string(), load)?;
        reader.join().expect("the reader returns its errors")
    })?;
    let cpu = mirrors_cpu(regions)? - before;
    samples.add(round, "both mirrors", name, "Mbit_per_s", arrived * 8.0);
    samples.add(round, "both mirrors", name, "cpu_s_per_GB", cpu / (load.bytes() / GIGABYTE));
    Ok(())
}

impl Region {
    fn start(
        dir: &TempDir,
        ports: &Ports,
        number: u16,
        name: &str,
        peer: &str,
        dial: Option<SocketAddr>,
    ) -> Result<Region> {
        let home = dir.path().join(name);
        fs::create_dir_all(&home)?;
        // Both regions trust one authority.
        let certificates = CertificateDir::open(&dir.path().join("certificates"))?;
        let broker_tls = certificates.leaf("sealane-broker", &["127.0.0.1"])?;
        let mirror_tls = certificates.leaf("sealane-mirror", &["127.0.0.1"])?;
        let port = |distance: u16| ports.base + 100 * number + distance;
        let broker = broker_text(&home, name, port, &broker_tls);
        let mirror = mirror_text(port, &mirror_tls, peer, dial);
        let broker = Service::start("broker", &home, &broker)?;
        let kafka = SocketAddr::from(([127, 0, 0, 1], port(0)));
        probe::wait_until_serves(kafka, PATIENCE)?;
        let mirror = Service::start("mirror", &home, &mirror)?;
        Ok(Region { kafka, _broker: broker, mirror })
    }
}

impl Service {
    fn start(command: &str, home: &Path, config: &str) -> Result<Service> {
        let file = home.join(format!("{command}.toml"));
        fs::write(&file, config)?;
        let log = File::create(home.join(format!("{command}.log")))?;
        let mut process = Command::new(binary()?);
        process.arg(command).arg("--config").arg(&file).stdin(Stdio::null());
        process.stdout(log.try_clone()?).stderr(log);
        Ok(Service(process.spawn().with_context(|| format!("start sealane {command}"))?))
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        // Both fail only when it has ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What the services wrote, for a failure.
fn logs(dir: &TempDir) -> String {
    let mut text = String::new();
    for log in ["east/broker.log", "east/mirror.log", "west/broker.log", "west/mirror.log"] {
        let written = fs::read_to_string(dir.path().join(log)).unwrap_or_default();
        let lines: Vec<&str> = written.lines().collect();
        text.push_str(&format!("--- {log}\n{}\n", lines[lines.len().saturating_sub(300)..].join("\n")));
    }
    text
}

fn mirrors_cpu(regions: &[Region; 2]) -> Result<f64> {
    regions.iter().map(|region| usage::cpu_seconds(region.mirror.0.id())).sum()
}

fn mirror_address(ports: &Ports, number: u16) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], ports.base + 100 * number + 4))
}

fn wait_for_topic(address: SocketAddr, topic: &str) -> Result<()> {
    let end = Instant::now() + PATIENCE;
    while Conn::open(address)?.list_offset(topic, 3, -1)?.0 != 0 {
        ensure!(Instant::now() < end, "topic {topic} does not reach the other region");
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

fn tls_text(tls: &TlsFiles) -> String {
    let ca = tls.ca.as_deref().unwrap_or(Path::new(""));
    format!("cert = {:?}\nkey = {:?}\nca = {ca:?}\n", tls.cert, tls.key)
}

fn broker_text(home: &Path, region: &str, port: impl Fn(u16) -> u16, tls: &TlsFiles) -> String {
    format!(
        "data_dir = {:?}\nregion = \"{region}\"\ndurability = \"os\"\n\
         control_bind = \"127.0.0.1:{}\"\nhttp_bind = \"127.0.0.1:{}\"\n\
         [[listeners]]\nname = \"plain\"\nbind = \"127.0.0.1:{}\"\n\
         [[listeners]]\nname = \"internal\"\nbind = \"127.0.0.1:{}\"\ninternal = true\n\
         client_auth = \"required\"\n[listeners.tls]\n{}",
        home.join("data"),
        port(2),
        port(3),
        port(0),
        port(5),
        tls_text(tls)
    )
}

fn mirror_text(port: impl Fn(u16) -> u16, tls: &TlsFiles, peer: &str, dial: Option<SocketAddr>) -> String {
    let address = dial.map_or_else(String::new, |address| format!("address = \"{address}\"\n"));
    format!(
        "broker = \"127.0.0.1:{}\"\nbind = \"127.0.0.1:{}\"\n[tls]\n{}[[links]]\npeer = \"{peer}\"\n{address}",
        port(5),
        port(4),
        tls_text(tls)
    )
}

fn write(scale: Scale, samples: &Samples) -> Result<()> {
    let mut text = report::heading("The mirror over a long line", "mirror", scale)?;
    text.push_str(
        "Two regions, 100 ms round trip, 200 Mbit/s with a queue of 100 ms, 1 KiB records, 4 partitions, plain; \
         relay, brokers and clients share the machine. Goodput is payload over the time from the first record \
         produced here to the last one consumed there; CPU is that of both mirror processes for each GB of \
         payload. Median over the rounds, lowest and highest in parentheses.\n",
    );
    let both = ["both mirrors"];
    text.push_str(&report::columns(samples, "Mbit_per_s", "Goodput, Mbit of payload per second", &both));
    text.push_str(&report::columns(samples, "cpu_s_per_GB", "Mirror CPU, seconds per GB of payload", &both));
    let each = ["mirror that sends", "mirror that applies"];
    text.push_str(&report::columns(samples, "peak_rss_MiB", "Highest resident memory, MiB", &each));
    report::write(scale, "mirror", &text, samples)
}
