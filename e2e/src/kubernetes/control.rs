//! What a broker in a pod says of its cluster, asked directly at its control port with the operator's own certificate: the
//! truth that statuses are held against.

use anyhow::{Context, Result};
use control::v1::{ClusterStatusRequest, ClusterStatusResponse};
use control::{TlsPem, connect_pem};
use tokio::runtime;

use super::Kubectl;

impl Kubectl {
    /// The cluster as the broker of this pod sees it.
    pub fn cluster_status(&self, namespace: &str, cluster: &str, pod: &str) -> Result<ClusterStatusResponse> {
        let (secret, pod) =
            (format!("{cluster}-control-tls"), self.object(namespace, &format!("pod/{pod}"))?);
        let file = |key: &str| self.secret(namespace, &secret, key);
        let (ca, cert, key) = (file("ca.crt")?, file("tls.crt")?, file("tls.key")?);
        let address = format!("{}:9094", pod["status"]["podIP"].as_str().context("the pod has no address")?);
        let asked = async {
            let pem = TlsPem { ca: ca.as_bytes(), cert: cert.as_bytes(), key: key.as_bytes() };
            let mut client = connect_pem(&address, pem).await?;
            anyhow::Ok(client.cluster_status(ClusterStatusRequest {}).await?.into_inner())
        };
        runtime::Builder::new_current_thread().enable_all().build()?.block_on(asked)
    }
}
