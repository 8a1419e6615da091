//! What a broker in a pod says of its cluster, asked directly at its control port with the operator's own certificate: the
//! truth that statuses are held against.

use anyhow::{Context, Result};
use control::v1::{ClusterStatusRequest, ClusterStatusResponse, MirrorStatusRequest, MirrorStatusResponse};
use control::{Client, TlsPem, connect_pem};
use tokio::runtime;

use super::Kubectl;

impl Kubectl {
    /// The cluster as the broker of this pod sees it.
    pub fn cluster_status(&self, namespace: &str, cluster: &str, pod: &str) -> Result<ClusterStatusResponse> {
        self.asked(namespace, cluster, pod, async |client| {
            Ok(client.cluster_status(ClusterStatusRequest {}).await?.into_inner())
        })
    }

    /// The links as the broker of this pod has heard of them.
    pub fn mirror_status(&self, namespace: &str, cluster: &str, pod: &str) -> Result<MirrorStatusResponse> {
        self.asked(namespace, cluster, pod, async |client| {
            Ok(client.mirror_status(MirrorStatusRequest {}).await?.into_inner())
        })
    }

    fn asked<T>(
        &self,
        namespace: &str,
        cluster: &str,
        pod: &str,
        ask: impl AsyncFnOnce(&mut Client) -> Result<T>,
    ) -> Result<T> {
        let (secret, pod) =
            (format!("{cluster}-control-tls"), self.object(namespace, &format!("pod/{pod}"))?);
        let file = |key: &str| self.secret(namespace, &secret, key);
        let (ca, cert, key) = (file("ca.crt")?, file("tls.crt")?, file("tls.key")?);
        let address = format!("{}:9094", pod["status"]["podIP"].as_str().context("the pod has no address")?);
        let asked = async {
            let pem = TlsPem { ca: ca.as_bytes(), cert: cert.as_bytes(), key: key.as_bytes() };
            let mut client = connect_pem(&address, pem).await?;
            ask(&mut client).await
        };
        runtime::Builder::new_current_thread().enable_all().build()?.block_on(asked)
    }
}
