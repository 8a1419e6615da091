//! What a cluster of many brokers stands on, beside Kubernetes: etcd and an S3 server as plain processes of this machine,
//! which pods reach at the machine's own end of the bridge between regions. Each way in can be cut.

use std::fs;
use std::net::SocketAddr;

use anyhow::{Context, Result};
use serde_json::json;

use super::operator::MACHINE;
use crate::relay::Relay;
use crate::stores::CertificateDir;
use crate::stores::etcd::Etcd;
use crate::stores::s3::S3;

pub struct Stores {
    pub s3: S3,
    ways: Vec<Relay>,
    way_to_s3: Relay,
    etcd: Etcd,
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

    fn with(etcd: Etcd, tls: Option<(String, String)>) -> Result<Stores> {
        let s3 = S3::start()?;
        let way = |target: SocketAddr| Relay::tcp_at(MACHINE, target).context("the bridge of the regions");
        let mut ways = Vec::new();
        for endpoint in etcd.endpoints() {
            let (_, address) = endpoint.split_once("://").context("an endpoint has a scheme")?;
            ways.push(way(address.parse()?)?);
        }
        let way_to_s3 = way(s3.address())?;
        Ok(Stores { s3, ways, way_to_s3, etcd, tls, _files: None })
    }

    /// In `spec.metadata` and `spec.storage` of a BrokerCluster, in YAML, with the Secrets that they name.
    pub fn spec(&self) -> String {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        let etcd: Vec<String> =
            self.ways.iter().map(|way| format!("\"{scheme}://{}\"", way.address)).collect();
        let secret = if self.tls.is_some() { ", tlsSecretRef: {name: etcd}" } else { "" };
        format!(
            "  metadata: {{type: Etcd, endpoints: [{}]{secret}}}\n  storage: {{type: S3, bucket: {}, endpoint: \"http://{}\", \
             region: local, credentialsSecretRef: {{name: s3}}}}\n",
            etcd.join(", "),
            S3::BUCKET,
            self.way_to_s3.address
        )
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
