//! What controllers beside the cluster's own need of a BrokerCluster: its names, what it trusts, who signs, and the way to
//! its control service, which is found through EndpointSlices.

use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::ResourceExt as _;
use kube::api::ListParams;

use crate::context::Context;
use crate::crd::BrokerCluster;
use crate::dataplane::Identity;
use crate::failure::Failure;
use crate::names::{CONTROL_PORT, ClusterNames, INTERNAL_PORT};

/// A BrokerCluster that is there.
#[derive(Clone, Debug)]
pub struct Region {
    pub cluster: BrokerCluster,
    pub names: ClusterNames,
}

/// Certificate and key in PEM.
#[derive(Clone, Debug)]
pub struct Pair {
    pub certificate: String,
    pub key: String,
}

impl Region {
    pub fn of(cx: &Context, cluster: &BrokerCluster) -> Region {
        let names = ClusterNames {
            cluster: cluster.name_any(),
            namespace: cluster.namespace().unwrap_or_default(),
            domain: cx.config.cluster_domain.clone(),
        };
        Region { cluster: cluster.clone(), names }
    }

    /// The cluster of this name; none where it is not there, or going.
    pub async fn find(cx: &Context, namespace: &str, name: &str) -> Result<Option<Region>, Failure> {
        let found = cx.api::<BrokerCluster>(namespace).get_opt(name).await?;
        let found = found.filter(|cluster| cluster.metadata.deletion_timestamp.is_none());
        Ok(found.map(|cluster| Region::of(cx, &cluster)))
    }

    pub fn image(&self, cx: &Context) -> String {
        let status = self.cluster.status.as_ref().and_then(|status| status.image.clone());
        status.or_else(|| self.cluster.spec.image.clone()).unwrap_or_else(|| cx.config.image.clone())
    }

    /// The authorities that this region trusts now, in PEM.
    pub async fn authorities(&self, cx: &Context) -> Result<String, Failure> {
        let map = cx.api::<ConfigMap>(&self.names.namespace).get_opt(&self.names.trust()).await?;
        let pem = map.and_then(|map| map.data).and_then(|mut data| data.remove("ca.crt"));
        pem.ok_or_else(|| self.not_yet("its authority is not made yet"))
    }

    /// The authority that signs now.
    pub async fn authority(&self, cx: &Context) -> Result<Pair, Failure> {
        self.pair(cx, &self.names.authority()).await
    }

    /// A service's certificate, or the authority's.
    pub async fn pair(&self, cx: &Context, secret: &str) -> Result<Pair, Failure> {
        let found = cx.api::<Secret>(&self.names.namespace).get_opt(secret).await?;
        let text = |key: &str| {
            let bytes = found.as_ref()?.data.as_ref()?.get(key)?;
            String::from_utf8(bytes.0.clone()).ok()
        };
        match (text("tls.crt"), text("tls.key")) {
            (Some(certificate), Some(key)) => Ok(Pair { certificate, key }),
            _ => Err(self.not_yet(&format!("Secret {secret} holds no certificate yet"))),
        }
    }

    /// The control service of a broker that is ready.
    pub async fn control(&self, cx: &Context) -> Result<control::Client, Failure> {
        let identity = self.identity(cx).await?;
        let mut said = self.not_yet("no broker is ready");
        for address in self.addresses(cx, "control", CONTROL_PORT).await? {
            match cx.data_plane.control(&address, &identity).await {
                Ok(client) => return Ok(client),
                Err(failure) => said = failure,
            }
        }
        Err(said)
    }

    /// A Kafka connection to a broker that is ready; any of them takes what an administrator asks.
    pub async fn kafka(&self, cx: &Context) -> Result<kafka_client::Connection, Failure> {
        let identity = self.identity(cx).await?;
        let addresses = self.addresses(cx, "internal", INTERNAL_PORT).await?;
        if addresses.is_empty() {
            return Err(self.not_yet("no broker is ready"));
        }
        cx.data_plane.kafka(&addresses, &identity).await
    }

    /// Who the operator is to this cluster's brokers.
    async fn identity(&self, cx: &Context) -> Result<Identity, Failure> {
        let pair = self.pair(cx, &self.names.certificate("control")).await?;
        let authorities = self.authorities(cx).await?;
        Ok(Identity { authorities, certificate: pair.certificate, key: pair.key })
    }

    /// HOST:PORT of a port of each broker that is ready.
    async fn addresses(&self, cx: &Context, name: &str, otherwise: i32) -> Result<Vec<String>, Failure> {
        let labels = format!("kubernetes.io/service-name={}", self.names.brokers());
        let slices = cx.api::<EndpointSlice>(&self.names.namespace);
        let mut addresses = Vec::new();
        for slice in slices.list(&ListParams::default().labels(&labels)).await? {
            let port = slice.ports.iter().flatten().find(|port| port.name.as_deref() == Some(name));
            let port = port.and_then(|port| port.port).unwrap_or(otherwise);
            for endpoint in slice.endpoints.into_iter().flatten() {
                // "Ready" says nothing here: brokers are to be found before they are.
                let ready = endpoint.conditions.and_then(|conditions| conditions.serving).unwrap_or(true);
                if let Some(address) = endpoint.addresses.first().filter(|_| ready) {
                    let host = if address.contains(':') { format!("[{address}]") } else { address.clone() };
                    addresses.push(format!("{host}:{port}"));
                }
            }
        }
        Ok(addresses)
    }

    fn not_yet(&self, why: &str) -> Failure {
        Failure::DataPlane(format!("BrokerCluster {}: {why}", self.names.cluster))
    }
}
