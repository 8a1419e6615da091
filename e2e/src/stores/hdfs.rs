//! A real HDFS: one NameNode and some DataNodes, each a JVM of its own, with small heaps and with the settings
//! that a fast failover needs. The jars come from Maven, pinned in `e2e/stores/hdfs/pom.xml`.

use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use serde_json::Value;
use tempfile::TempDir;

use super::{Daemon, files, http};
use crate::{peer, tools};
use test_ports::Ports;

/// Entries of a directory that one answer lists at most: `dfs.ls.limit`.
pub const PAGE: usize = 100;

pub struct Hdfs {
    name_node: Daemon,
    data_nodes: Vec<Daemon>,
    ports: Ports,
    host: Ipv4Addr,
    dir: TempDir,
}

const NAME_NODE: &str = "org.apache.hadoop.hdfs.server.namenode.NameNode";
const ADMIN: &str = "org.apache.hadoop.hdfs.tools.DFSAdmin";
/// Methods of the NameNode that DataNodes call.
const OF_DATA_NODES: &[&str] = &[
    "SendHeartbeat",
    "BlockReport",
    "BlockReceivedAndDeleted",
    "RegisterDatanode",
    "VersionRequest",
    "CommitBlockSynchronization",
];
const DATA_NODE: &str = "org.apache.hadoop.hdfs.server.datanode.DataNode";

/// Installed where it is missing: also who formats, before any daemon starts, needs it.
fn java() -> Result<PathBuf> {
    tools::program("java", "default-jre-headless")
}

impl Hdfs {
    /// Formats and starts it, and waits until all DataNodes are registered and writing is allowed.
    pub fn start(data_nodes: u16) -> Result<Hdfs> {
        Hdfs::start_at(Ipv4Addr::LOCALHOST, data_nodes)
    }

    /// The same at another address of this machine, for clients that are not on it. What only tests ask (JMX) stays on
    /// loopback.
    pub fn start_at(host: Ipv4Addr, data_nodes: u16) -> Result<Hdfs> {
        let dir = tempfile::Builder::new().prefix("sealane-hdfs").tempdir()?;
        let ports = Ports::take()?;
        let layout = Layout { dir: dir.path().to_owned(), base: ports.base, host, class_path: class_path()? };
        layout.write_shared()?;
        let mut format = Command::new(java()?);
        let arguments = layout.arguments("name-node", "-Xmx128m", NAME_NODE)?;
        peer::run(format.args(arguments).args(["-format", "-nonInteractive"]))?;
        let name_node = layout.daemon("name-node", "-Xmx192m", NAME_NODE)?;
        let data_node = |node: u16| {
            layout.write_data_node(node)?;
            layout.daemon(&format!("data-node-{node}"), "-Xmx128m", DATA_NODE)
        };
        let data_nodes = (0..data_nodes).map(data_node).collect::<Result<_>>()?;
        let mut hdfs = Hdfs { name_node, data_nodes, ports, host, dir };
        hdfs.name_node.start()?;
        hdfs.data_nodes.iter_mut().try_for_each(Daemon::start)?;
        hdfs.wait()?;
        Ok(hdfs)
    }

    /// `hdfs://...` of the NameNode.
    pub fn url(&self) -> String {
        format!("hdfs://{}:{}", self.host, self.ports.base)
    }

    pub fn name_node(&mut self) -> &mut Daemon {
        &mut self.name_node
    }

    pub fn data_node(&mut self, node: usize) -> &mut Daemon {
        &mut self.data_nodes[node]
    }

    /// Number of the DataNode that wrote to its newest block file last, among those that run.
    pub fn busiest(&self) -> Option<usize> {
        let newest = |node: usize| newest_block(&self.dir.path().join(format!("data-node-{node}/data")));
        let running = (0..self.data_nodes.len()).filter(|node| self.data_nodes[*node].pid().is_some());
        running.filter_map(|node| Some((newest(node)?, node))).max().map(|(_, node)| node)
    }

    /// Requests of clients that the NameNode has answered; what DataNodes ask is left out.
    pub fn requests(&self) -> Result<u64> {
        let bean = format!("Hadoop:service=NameNode,name=RpcDetailedActivityForPort{}", self.ports.base);
        let answer = http(self.ports.base + 1, "GET", &format!("/jmx?qry={bean}"), "");
        let answer: Value = serde_json::from_str(&answer.context("the NameNode answers")?)?;
        let metrics = answer["beans"][0].as_object().with_context(|| format!("no {bean}"))?;
        let of_clients = metrics.iter().filter_map(|(name, value)| {
            // Each is there a second time, with the time it waited.
            let method = name.strip_suffix("NumOps").filter(|method| !method.starts_with("Overall"))?;
            (!OF_DATA_NODES.contains(&method)).then(|| value.as_u64().unwrap_or(0))
        });
        Ok(of_clients.sum())
    }

    /// Bytes that were written to the disks of all DataNodes that run, copies included.
    pub fn written_bytes(&self) -> Result<u64> {
        let mut sum = 0;
        for node in (0..self.data_nodes.len()).filter(|node| self.data_nodes[*node].pid().is_some()) {
            let port = self.ports.base + 10 * (node as u16 + 1) + 2;
            let page = "/jmx?qry=Hadoop:service=DataNode,name=DataNodeActivity-*";
            let answer: Value =
                serde_json::from_str(&http(port, "GET", page, "").context("a DataNode answers")?)?;
            let written = answer["beans"][0]["BytesWritten"].as_u64();
            sum += written.with_context(|| format!("no BytesWritten in {answer}"))?;
        }
        Ok(sum)
    }

    /// Lets nobody write, or lets them again.
    pub fn set_safe_mode(&self, on: bool) -> Result<()> {
        let layout = Layout {
            dir: self.dir.path().to_owned(),
            base: self.ports.base,
            host: self.host,
            class_path: class_path()?,
        };
        let mut command = Command::new(java()?);
        command.args(layout.arguments("name-node", "-Xmx64m", ADMIN)?);
        peer::run(command.args(["-safemode", if on { "enter" } else { "leave" }])).map(drop)
    }

    /// Waits until every DataNode that was started is registered and nothing is in safe mode.
    pub fn wait(&mut self) -> Result<()> {
        let live = self.data_nodes.iter().filter(|node| node.pid().is_some()).count();
        let port = self.ports.base + 1;
        self.name_node.wait(|| {
            let page = "/jmx?qry=Hadoop:service=NameNode,name=FSNamesystemState";
            let state = http(port, "GET", page, "").unwrap_or_default();
            state.contains(&format!("\"NumLiveDataNodes\" : {live},"))
                && state.contains("\"FSState\" : \"Operational\"")
        })
    }
}

/// The time at which a file of a block that is being written was changed last.
fn newest_block(dir: &Path) -> Option<std::time::SystemTime> {
    let mut folders = vec![dir.to_owned()];
    let mut newest = None;
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).ok()?.flatten() {
            if entry.path().is_dir() {
                folders.push(entry.path());
            } else if folders_end_with_rbw(&entry.path()) {
                newest = newest.max(entry.metadata().ok()?.modified().ok());
            }
        }
    }
    newest
}

fn folders_end_with_rbw(file: &Path) -> bool {
    file.parent().is_some_and(|folder| folder.ends_with("rbw"))
}

/// Where the files of one HDFS lie.
struct Layout {
    dir: PathBuf,
    base: u16,
    host: Ipv4Addr,
    class_path: String,
}

impl Layout {
    /// The configuration of the NameNode, and what the jars lack: web applications, empty ones.
    fn write_shared(&self) -> Result<()> {
        for web in ["hdfs", "datanode", "static"] {
            let folder = self.dir.join("web/webapps").join(web).join("WEB-INF");
            fs::create_dir_all(&folder)?;
            let page = r#"<web-app xmlns="http://java.sun.com/xml/ns/javaee" version="2.5"/>"#;
            fs::write(folder.join("web.xml"), page)?;
        }
        let own = [
            ("dfs.namenode.name.dir", format!("file://{}/name", self.dir.display())),
            ("dfs.namenode.http-address", format!("127.0.0.1:{}", self.base + 1)),
        ];
        self.write_configuration("name-node", &own)
    }

    fn write_data_node(&self, node: u16) -> Result<()> {
        let name = format!("data-node-{node}");
        let port = self.base + 10 * (node + 1);
        let own = [
            ("dfs.datanode.address", format!("{}:{port}", self.host)),
            ("dfs.datanode.ipc.address", format!("{}:{}", self.host, port + 1)),
            ("dfs.datanode.http.address", format!("127.0.0.1:{}", port + 2)),
            ("dfs.datanode.hostname", self.host.to_string()),
            ("dfs.datanode.data.dir", format!("file://{}/{name}/data", self.dir.display())),
        ];
        self.write_configuration(&name, &own)
    }

    fn write_configuration(&self, name: &str, own: &[(&str, String)]) -> Result<()> {
        let folder = self.dir.join(name).join("conf");
        fs::create_dir_all(&folder)?;
        let core = [
            ("fs.defaultFS", format!("hdfs://{}:{}", self.host, self.base)),
            ("hadoop.tmp.dir", self.dir.join("tmp").display().to_string()),
            // A lease is recovered by asking every DataNode of the open block; a dead one is tried ten times
            // for a second each by default.
            ("ipc.client.connect.max.retries", "1".to_owned()),
            ("ipc.client.connect.retry.interval", "200".to_owned()),
            ("ipc.client.connect.timeout", "2000".to_owned()),
            ("ipc.client.connect.max.retries.on.timeouts", "1".to_owned()),
        ];
        fs::write(folder.join("core-site.xml"), xml(core.iter().map(|(key, value)| (*key, value.as_str()))))?;
        let own = own.iter().map(|(key, value)| (*key, value.as_str()));
        let shared = SHARED.iter().copied();
        Ok(fs::write(folder.join("hdfs-site.xml"), xml(shared.chain(own)))?)
    }

    fn daemon(&self, name: &str, heap: &str, class: &str) -> Result<Daemon> {
        let java = java()?;
        let log = self.dir.join(format!("{name}.log"));
        Ok(Daemon::new(&java, self.arguments(name, heap, class)?, log))
    }

    fn arguments(&self, name: &str, heap: &str, class: &str) -> Result<Vec<String>> {
        let dir = self.dir.display();
        let log4j = files().join("hdfs/log4j.properties");
        let mut arguments: Vec<String> = JVM.split(' ').map(str::to_owned).collect();
        arguments.push(heap.to_owned());
        arguments.push(format!("-Dhadoop.home.dir={dir}"));
        arguments.push(format!("-Dhadoop.log.dir={dir}"));
        arguments.push(format!("-Dlog4j.configuration=file:{}", log4j.display()));
        arguments.push("-cp".to_owned());
        arguments.push(format!("{dir}/{name}/conf:{dir}/web:{}", self.class_path));
        arguments.push(class.to_owned());
        Ok(arguments)
    }
}

const JVM: &str = "-Djava.net.preferIPv4Stack=true -XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Xss512k \
                   -XX:MaxMetaspaceSize=128m -XX:ReservedCodeCacheSize=48m -XX:MaxDirectMemorySize=64m";

/// What all daemons are told. A DataNode is stale after 3 s and dead after 12 s (by default 30 s and 630 s).
const SHARED: &[(&str, &str)] = &[
    ("dfs.replication", "2"),
    ("dfs.permissions.enabled", "false"),
    ("dfs.ls.limit", "100"),
    ("dfs.namenode.fs-limits.min-block-size", "0"),
    ("dfs.heartbeat.interval", "1"),
    ("dfs.namenode.heartbeat.recheck-interval", "1000"),
    ("dfs.namenode.stale.datanode.interval", "3000"),
    ("dfs.namenode.avoid.write.stale.datanode", "true"),
    ("dfs.namenode.avoid.read.stale.datanode", "true"),
    ("dfs.namenode.write.stale.datanode.ratio", "1.0f"),
    ("dfs.namenode.redundancy.interval.seconds", "1s"),
    ("dfs.client.block.write.replace-datanode-on-failure.best-effort", "true"),
    ("dfs.namenode.safemode.extension", "0"),
    ("dfs.namenode.safemode.threshold-pct", "0.999f"),
    ("dfs.namenode.datanode.registration.ip-hostname-check", "false"),
    ("dfs.namenode.handler.count", "8"),
    ("dfs.datanode.handler.count", "4"),
    ("dfs.datanode.du.reserved", "0"),
    ("dfs.block.scanner.volume.bytes.per.second", "0"),
    // 0 stops a DataNode as it starts.
    ("dfs.datanode.directoryscan.interval", "-1"),
];

fn xml<'a>(settings: impl Iterator<Item = (&'a str, &'a str)>) -> String {
    let one = |(key, value): (&str, &str)| {
        format!("  <property><name>{key}</name><value>{value}</value></property>\n")
    };
    format!("<configuration>\n{}</configuration>\n", settings.map(one).collect::<String>())
}

/// The jars of Hadoop, in Java's wildcard form; the first call on a machine downloads them.
fn class_path() -> Result<String> {
    let pom = files().join("hdfs/pom.xml");
    let home = tools::installed("store-hdfs", &[&pom], |home| {
        let mvn = tools::program("mvn", "maven")?;
        let mut copy = Command::new(mvn);
        copy.args(["-q", "-B", "-ntp", "-f"]).arg(&pom).arg("dependency:copy-dependencies");
        copy.arg(format!("-DoutputDirectory={}", home.join("jars").display()));
        peer::run(&mut copy).context("fetch Hadoop").map(drop)
    })?;
    Ok(format!("{}/*", home.join("jars").display()))
}
