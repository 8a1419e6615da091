//! What a cluster of many brokers stands on, beside Kubernetes: etcd and an S3 server as plain processes of this machine,
//! which pods reach at the machine's own end of the bridge between regions. Each way in can be cut.

use std::net::SocketAddr;

use anyhow::{Context, Result};

use super::operator::MACHINE;
use crate::relay::Relay;
use crate::stores::etcd::Etcd;
use crate::stores::s3::S3;

pub struct Stores {
    pub s3: S3,
    ways: Vec<Relay>,
    way_to_s3: Relay,
    _etcd: Etcd,
}

impl Stores {
    /// After the first region: the bridge comes with it.
    pub fn start() -> Result<Stores> {
        let (etcd, s3) = (Etcd::start(1)?, S3::start()?);
        let way = |target: SocketAddr| Relay::tcp_at(MACHINE, target).context("the bridge of the regions");
        let mut ways = Vec::new();
        for endpoint in etcd.endpoints() {
            ways.push(way(endpoint.trim_start_matches("http://").parse()?)?);
        }
        let way_to_s3 = way(s3.address())?;
        Ok(Stores { s3, ways, way_to_s3, _etcd: etcd })
    }

    /// In `spec.metadata` and `spec.storage` of a BrokerCluster, in YAML, with the Secret that they name.
    pub fn spec(&self) -> String {
        let etcd: Vec<String> = self.ways.iter().map(|way| format!("\"http://{}\"", way.address)).collect();
        format!(
            "  metadata: {{type: Etcd, endpoints: [{}]}}\n  storage: {{type: S3, bucket: {}, endpoint: \"http://{}\", \
             region: local, credentialsSecretRef: {{name: s3}}}}\n",
            etcd.join(", "),
            S3::BUCKET,
            self.way_to_s3.address
        )
    }

    /// The Secret.
    pub fn secret(namespace: &str) -> String {
        format!(
            "apiVersion: v1\nkind: Secret\nmetadata: {{name: s3, namespace: {namespace}}}\nstringData: \
             {{AWS_ACCESS_KEY_ID: {}, AWS_SECRET_ACCESS_KEY: {}}}\n",
            S3::ACCESS_KEY_ID,
            S3::SECRET_ACCESS_KEY
        )
    }

    pub fn cut_s3(&self, cut: bool) {
        self.way_to_s3.faults.cut(cut);
    }
}
