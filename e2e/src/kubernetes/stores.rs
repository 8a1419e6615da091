//! What a cluster of many brokers stands on, beside Kubernetes: etcd and an S3 server, or HDFS, as plain processes of this
//! machine, which pods reach at the machine's own end of the bridge between regions. The ways to etcd and S3 can be cut.

use std::fs;
use std::net::SocketAddr;
use std::sync::Mutex;

use anyhow::{Context, Result};
use serde_json::json;

use super::operator::MACHINE;
use crate::relay::Relay;
use crate::stores::CertificateDir;
use crate::stores::etcd::Etcd;
use crate::stores::hdfs::Hdfs;
use crate::stores::s3::S3;

pub struct Stores {
    pub s3: S3,
    ways: Vec<Relay>,
    way_to_s3: Relay,
    etcd: Etcd,
    /// In the place of S3.
    hdfs: Option<Mutex<Hdfs>>,
    /// What brokers need for an etcd that speaks TLS: its authority, and a certificate with its key.
    tls: Option<(String, String)>,
    /// Of etcd's own certificate, which it reads again for each connection.
    _files: Option<tempfile::TempDir>,
}

impl Stores {
    /// After the first region: the bridge comes with it.
    pub fn start() -> Result<Stores> {
        Stores::with(Etcd::start(1)?, None)
    }

    /// With an etcd that speaks TLS, and only with who shows a certificate of its authority.
    pub fn start_tls() -> Result<Stores> {
        let dir = tempfile::tempdir()?;
        let authority = CertificateDir::open(dir.path())?;
        let server = authority.leaf("etcd", &["127.0.0.1", &MACHINE.to_string()])?;
        let own = fs::read_to_string(authority.leaf("broker", &[])?.cert)?;
        let ca = fs::read_to_string(server.ca.as_ref().context("it has an authority")?)?;
        let stores = Stores::with(Etcd::start_tls(&server)?, Some((ca, own)))?;
        Ok(Stores { _files: Some(dir), ..stores })
    }

    /// With HDFS: three DataNodes. Nobody uses the S3 server then.
    pub fn start_hdfs() -> Result<Stores> {
        let hdfs = Hdfs::start_at(MACHINE, 3)?;
        Ok(Stores { hdfs: Some(Mutex::new(hdfs)), ..Stores::start()? })
    }

    fn with(etcd: Etcd, tls: Option<(String, String)>) -> Result<Stores> {
        let s3 = S3::start()?;
        let way = |target: SocketAddr| Relay::tcp_at(MACHINE, target).context("the bridge of the regions");
        let mut ways = Vec::new();
        for endpoint in etcd.endpoints() {
            let (_, address) = endpoint.split_once("://").context("an endpoint has a scheme")?;
            ways.push(way(address.parse()?)?);
        }
        let way_to_s3 = way(s3.address())?;
        Ok(Stores { s3, ways, way_to_s3, etcd, hdfs: None, tls, _files: None })
    }

    /// In `spec.metadata` and `spec.storage` of a BrokerCluster, in YAML, with the Secrets that they name.
    pub fn spec(&self) -> String {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        let etcd: Vec<String> =
            self.ways.iter().map(|way| format!("\"{scheme}://{}\"", way.address)).collect();
        let secret = if self.tls.is_some() { ", tlsSecretRef: {name: etcd}" } else { "" };
        let storage = match &self.hdfs {
            Some(hdfs) => {
                let url = hdfs.lock().expect("no test panics under this lock").url();
                format!("{{type: HDFS, uri: \"{url}/sealane\"}}")
            }
            None => format!(
                "{{type: S3, bucket: {}, endpoint: \"http://{}\", region: local, credentialsSecretRef: {{name: s3}}}}",
                S3::BUCKET,
                self.way_to_s3.address
            ),
        };
        format!(
            "  metadata: {{type: Etcd, endpoints: [{}]{secret}}}\n  storage: {storage}\n",
            etcd.join(", ")
        )
    }

    /// Kills a DataNode of three.
    pub fn lose_data_node(&self, node: usize) -> Result<()> {
        let hdfs = self.hdfs.as_ref().context("these stores have no HDFS")?;
        hdfs.lock().expect("no test panics under this lock").data_node(node).kill()
    }

    /// The Secrets, in YAML.
    pub fn secrets(&self, namespace: &str) -> String {
        let secret = |name: &str, data: serde_json::Value| {
            let object = json!({
                "apiVersion": "v1", "kind": "Secret", "stringData": data,
                "metadata": { "name": name, "namespace": namespace },
            });
            format!("{object}\n")
        };
        let keys =
            json!({ "AWS_ACCESS_KEY_ID": S3::ACCESS_KEY_ID, "AWS_SECRET_ACCESS_KEY": S3::SECRET_ACCESS_KEY });
        let mut all = secret("s3", keys);
        if let Some((ca, own)) = &self.tls {
            all +=
                &format!("---\n{}", secret("etcd", json!({ "ca.crt": ca, "tls.crt": own, "tls.key": own })));
        }
        all
    }

    /// Where etcd is, as clients of this machine name it.
    pub fn etcd(&self) -> &Etcd {
        &self.etcd
    }

    pub fn cut_s3(&self, cut: bool) {
        self.way_to_s3.faults.cut(cut);
    }
}
