//! Clients on TLS listeners: Apache Kafka's own classes and librdkafka, with and without a client certificate.
//!
//! Three listeners of one broker: no client certificates, optional ones, required ones. The Java clients take PEM
//! stores and a PKCS12 trust store; hostnames are checked, as is their default.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use chassis::certs::CertificateDir;
use e2e::clients::{Library, Record};
use e2e::single::Single;
use e2e::wire::Conn;
use e2e::{peer, tools};

const CLIENT_AUTH: [&str; 3] = ["none", "optional", "required"];
const TOPIC: &str = "t";

/// A broker with its three listeners, and the files for clients.
struct Secured {
    broker: Single,
    certificates: tempfile::TempDir,
    first_port: u16,
}

impl Secured {
    fn start() -> Result<Secured> {
        let certificates = tempfile::tempdir()?;
        let authority = CertificateDir::open(certificates.path())?;
        let server = authority.leaf("broker", &["localhost", "127.0.0.1"])?;
        authority.leaf("client", &[])?;
        // Another authority's certificate, which nobody here trusts.
        CertificateDir::open(&certificates.path().join("foreign"))?.leaf("client", &[])?;
        let mut first_port = 0;
        let broker = Single::with_listeners("", |port| {
            first_port = port;
            let (pem, ca) = (&server.cert, certificates.path().join("ca.crt"));
            let listener = |(at, auth): (usize, &&str)| {
                format!(
                    "[[listeners]]\nname = \"tls-{auth}\"\nbind = \"127.0.0.1:{}\"\nadvertised = \"localhost:{}\"\n\
                     client_auth = \"{auth}\"\n[listeners.tls]\ncert = {pem:?}\nkey = {pem:?}\nca = {ca:?}\n",
                    port + at as u16,
                    port + at as u16,
                )
            };
            Ok(CLIENT_AUTH.iter().enumerate().map(listener).collect())
        })?;
        Conn::open(broker.bootstrap())?.create_topic(TOPIC, 1, &[])?;
        Ok(Secured { broker, certificates, first_port })
    }

    /// The address of the listener with this client authentication.
    fn address(&self, auth: &str) -> Result<String> {
        let at = CLIENT_AUTH.iter().position(|known| *known == auth).context("a listener")?;
        Ok(format!("localhost:{}", self.first_port + at as u16))
    }

    fn file(&self, name: &str) -> PathBuf {
        self.certificates.path().join(name)
    }

    /// Settings of a Java client in a file; `key` is a PEM file with certificate and key.
    fn java_settings(&self, trust: Trust, key: Option<&Path>) -> Result<String> {
        let mut text = "security.protocol=SSL\n".to_owned();
        match trust {
            Trust::Pem => {
                let ca = self.file("ca.crt");
                text.push_str(&format!(
                    "ssl.truststore.type=PEM\nssl.truststore.location={}\n",
                    ca.display()
                ));
            }
            Trust::Pkcs12 => {
                let store = self.pkcs12()?;
                text.push_str(&format!(
                    "ssl.truststore.type=PKCS12\nssl.truststore.location={}\nssl.truststore.password={PASSWORD}\n",
                    store.display()
                ));
            }
        }
        if let Some(key) = key {
            text.push_str(&format!("ssl.keystore.type=PEM\nssl.keystore.location={}\n", key.display()));
        }
        let name = format!("{trust:?}-{}.properties", key.is_some_and(|key| key.ends_with("client.pem")));
        let path = self.file(&name);
        fs::write(&path, text)?;
        Ok(path.to_string_lossy().into_owned())
    }

    fn pkcs12(&self) -> Result<PathBuf> {
        let store = self.file("trust.p12");
        if !store.exists() {
            let mut import = Command::new(tools::program("keytool", "default-jdk-headless")?);
            import.args(["-importcert", "-noprompt", "-alias", "ca", "-storetype", "PKCS12"]);
            import.args(["-storepass", PASSWORD, "-file"]).arg(self.file("ca.crt"));
            peer::run(import.arg("-keystore").arg(&store))?;
        }
        Ok(store)
    }
}

const PASSWORD: &str = "changeit";

#[derive(Clone, Copy, Debug)]
enum Trust {
    Pem,
    Pkcs12,
}

/// Lines through Kafka's console producer and back through its console consumer.
fn java_round_trip(address: &str, settings: &str, group: &str, first: usize) -> Result<()> {
    let lines: String = (first..first + 300).map(|n| format!("line {n} {}\n", "x".repeat(2_000))).collect();
    let mut produce = peer::tool("org.apache.kafka.tools.ConsoleProducer")?;
    produce.args(["--bootstrap-server", address, "--topic", TOPIC, "--command-config", settings]);
    let mut child = produce.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    child.stdin.take().context("stdin is piped")?.write_all(lines.as_bytes())?;
    let output = child.wait_with_output()?;
    ensure!(
        output.status.success(),
        "the console producer: {} {}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    let mut consume = peer::tool("org.apache.kafka.tools.consumer.ConsoleConsumer")?;
    consume.args(["--bootstrap-server", address, "--topic", TOPIC, "--group", group, "--from-beginning"]);
    consume.args(["--max-messages", &(first + 300).to_string(), "--command-config", settings]);
    let printed = peer::run(&mut consume)?;
    ensure!(printed.ends_with(&lines), "the console consumer printed {} bytes", printed.len());
    Ok(())
}

#[test]
fn a_java_client_produces_and_consumes_over_tls_with_and_without_a_certificate() -> Result<()> {
    let secured = Secured::start()?;
    let client = secured.file("client.pem");
    java_round_trip(&secured.address("none")?, &secured.java_settings(Trust::Pkcs12, None)?, "without", 0)?;
    java_round_trip(
        &secured.address("required")?,
        &secured.java_settings(Trust::Pem, Some(&client))?,
        "with",
        300,
    )?;
    Ok(())
}

#[test]
fn a_java_client_without_a_trusted_certificate_is_refused_where_one_is_required() -> Result<()> {
    let secured = Secured::start()?;
    let foreign = secured.file("foreign/client.pem");
    for key in [None, Some(foreign.as_path())] {
        let mut list = peer::tool("org.apache.kafka.tools.TopicCommand")?;
        let settings = secured.java_settings(Trust::Pem, key)?;
        list.args(["--bootstrap-server", &secured.address("required")?, "--command-config", &settings]);
        let refused = peer::run(list.arg("--list")).err().context("it is let in")?;
        let text = format!("{refused:#}");
        ensure!(text.contains("SSL") || text.contains("Ssl"), "refused for another reason: {text}");
    }
    // The others on that port go on.
    let good = secured.java_settings(Trust::Pem, Some(&secured.file("client.pem")))?;
    let mut list = peer::tool("org.apache.kafka.tools.TopicCommand")?;
    list.args(["--bootstrap-server", &secured.address("required")?, "--command-config", &good, "--list"]);
    ensure!(peer::run(&mut list)?.lines().any(|line| line == TOPIC), "not listed");
    let log = secured.broker.log();
    ensure!(log.contains("TLS handshake failed"), "the broker says nothing: {log}");
    Ok(())
}

#[test]
fn librdkafka_produces_and_consumes_over_tls_with_and_without_a_certificate() -> Result<()> {
    let secured = Secured::start()?;
    let ca = secured.file("ca.crt");
    let client = secured.file("client.pem");
    let with = [("ssl.certificate.location", &client), ("ssl.key.location", &client)];
    let cases: [(&str, &[(&str, &PathBuf)]); 4] =
        [("none", &[]), ("optional", &[]), ("optional", &with), ("required", &with)];
    let mut before = 0;
    for (auth, key) in cases {
        let address = secured.address(auth)?;
        let mut options = vec!["-X".to_owned(), "security.protocol=ssl".to_owned()];
        for (name, path) in [("ssl.ca.location", &ca)].iter().chain(key) {
            options.extend(["-X".to_owned(), format!("{name}={}", path.display())]);
        }
        let lines: String = (0..200).map(|n| format!("{auth} {n} {}\n", "y".repeat(3_000))).collect();
        kcat(&address, &options, &["-P", "-t", TOPIC, "-z", "zstd"], &lines)?;
        let from = before.to_string();
        let read = kcat(&address, &options, &["-C", "-t", TOPIC, "-p", "0", "-o", &from, "-e", "-q"], "")?;
        ensure!(read == lines, "{auth}: kcat read {} bytes of {}", read.len(), lines.len());
        before += 200;
    }
    let refused = kcat(
        &secured.address("required")?,
        &[
            "-X".into(),
            "security.protocol=ssl".into(),
            "-X".into(),
            format!("ssl.ca.location={}", ca.display()),
        ],
        &["-L", "-m", "10"],
        "",
    );
    ensure!(refused.is_err(), "kcat without a certificate is let in");
    // What came in encrypted is what a plain client reads.
    let plain = Library::Confluent.consume(&secured.broker.bootstrap(), TOPIC, before, &[])?;
    let first = plain.first().map(Record::text).unwrap_or_default();
    ensure!(plain.len() == before && first.starts_with("none 0"), "{} records", plain.len());
    Ok(())
}

fn kcat(address: &str, options: &[String], arguments: &[&str], input: &str) -> Result<String> {
    let mut command = Command::new(tools::kcat()?);
    command.args(["-b", address]).args(options).args(arguments);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    child.stdin.take().context("stdin is piped")?.write_all(input.as_bytes())?;
    let output = child.wait_with_output()?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "kcat ended with {}: {errors}", output.status);
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
