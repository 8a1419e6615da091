//! What controllers beside the cluster's own need of a BrokerCluster: its names, what it trusts, who signs, and the way to
//! its control service, which is found through EndpointSlices.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::ResourceExt as _;
use kube::api::ListParams;
use kube::runtime::reflector::ObjectRef;
use tokio::time::Instant;

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
    /// Brokers have a certificate to show to etcd: the Secret that the spec names holds one.
    pub etcd_identity: bool,
}

/// Certificate and key in PEM.
#[derive(Clone, Debug)]
pub struct Pair {
    pub certificate: String,
    pub key: String,
}

/// The way to a cluster's brokers.
pub struct Reach {
    pub identity: Identity,
    pub brokers: Vec<Found>,
    since: Instant,
}

/// A broker in an EndpointSlice.
pub struct Found {
    pub pod: Option<String>,
    /// HOST:PORT of its control service.
    pub control: String,
    /// HOST:PORT of its internal listener.
    internal: String,
    ready: bool,
}

impl Region {
    pub fn of(cx: &Context, cluster: &BrokerCluster) -> Region {
        let names = ClusterNames {
            cluster: cluster.name_any(),
            namespace: cluster.namespace().unwrap_or_default(),
            domain: cx.config.cluster_domain.clone(),
        };
        Region { cluster: cluster.clone(), names, etcd_identity: false }
    }

    /// The cluster of this name as it was last seen; none where it is not there, or going.
    pub async fn find(cx: &Context, namespace: &str, name: &str) -> Result<Option<Region>, Failure> {
        let known = cx.clusters.get().and_then(|known| known.get(&ObjectRef::new(name).within(namespace)));
        match known.filter(|cluster| cluster.metadata.deletion_timestamp.is_none()) {
            Some(cluster) => Ok(Some(Region::of(cx, &cluster))),
            None => Region::find_now(cx, namespace, name).await,
        }
    }

    /// As the API server has it now: for what ends with its cluster, which nothing may tell of any more.
    pub async fn find_now(cx: &Context, namespace: &str, name: &str) -> Result<Option<Region>, Failure> {
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

    /// For peers that know an authority of before: who spoke for the present one; empty where nobody must.
    pub async fn vouched(&self, cx: &Context) -> Result<String, Failure> {
        let found = cx.api::<Secret>(&self.names.namespace).get_opt(&self.names.authority()).await?;
        let bytes = found.and_then(|found| found.data).and_then(|mut data| data.remove("vouched.crt"));
        Ok(bytes.and_then(|bytes| String::from_utf8(bytes.0).ok()).unwrap_or_default())
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
        let reach = self.reach(cx).await?;
        let mut said = self.not_yet("no broker is ready");
        for broker in reach.brokers.iter().filter(|broker| broker.ready) {
            match cx.data_plane.control(&broker.control, &reach.identity).await {
                Ok(client) => return Ok(client),
                Err(failure) => said = failure,
            }
        }
        self.forget(cx);
        Err(said)
    }

    /// A Kafka connection to a broker that is ready; any of them takes what an administrator asks.
    pub async fn kafka(&self, cx: &Context) -> Result<kafka_client::Connection, Failure> {
        let reach = self.reach(cx).await?;
        let ready = reach.brokers.iter().filter(|broker| broker.ready);
        let addresses: Vec<String> = ready.map(|broker| broker.internal.clone()).collect();
        let connected = match addresses.is_empty() {
            true => Err(self.not_yet("no broker is ready")),
            false => cx.data_plane.kafka(&addresses, &reach.identity).await,
        };
        if connected.is_err() {
            self.forget(cx);
        }
        connected
    }

    /// The way to the brokers as it was found a moment ago, so that thousands of looks do not each ask for it.
    async fn reach(&self, cx: &Context) -> Result<Arc<Reach>, Failure> {
        let known = cx.reached.lock().get(&self.key()).cloned();
        if let Some(known) = known.filter(|known| known.since.elapsed() < GOOD_FOR) {
            return Ok(known);
        }
        let reach = Arc::new(self.reach_now(cx).await?);
        cx.reached.lock().insert(self.key(), reach.clone());
        Ok(reach)
    }

    /// Who the operator is to this cluster's brokers, and where they are, ready or not.
    pub async fn reach_now(&self, cx: &Context) -> Result<Reach, Failure> {
        let pair = self.pair(cx, &self.names.certificate("control")).await?;
        let authorities = self.authorities(cx).await?;
        let identity = Identity { authorities, certificate: pair.certificate, key: pair.key };
        Ok(Reach { identity, brokers: self.brokers(cx).await?, since: Instant::now() })
    }

    /// Something of it was not good any more.
    fn forget(&self, cx: &Context) {
        cx.reached.lock().remove(&self.key());
    }

    fn key(&self) -> (String, String) {
        (self.names.namespace.clone(), self.names.cluster.clone())
    }

    async fn brokers(&self, cx: &Context) -> Result<Vec<Found>, Failure> {
        let labels = format!("kubernetes.io/service-name={}", self.names.brokers());
        let slices = cx.api::<EndpointSlice>(&self.names.namespace);
        let mut found = Vec::new();
        for slice in slices.list(&ListParams::default().labels(&labels)).await? {
            let port = |name: &str, otherwise: i32| {
                let port = slice.ports.iter().flatten().find(|port| port.name.as_deref() == Some(name));
                port.and_then(|port| port.port).unwrap_or(otherwise)
            };
            let (control, internal) = (port("control", CONTROL_PORT), port("internal", INTERNAL_PORT));
            for endpoint in slice.endpoints.into_iter().flatten() {
                let Some(address) = endpoint.addresses.first() else { continue };
                let host = if address.contains(':') { format!("[{address}]") } else { address.clone() };
                found.push(Found {
                    pod: endpoint.target_ref.and_then(|target| target.name),
                    control: format!("{host}:{control}"),
                    internal: format!("{host}:{internal}"),
                    // "Ready" says nothing here: brokers are to be found before they are.
                    ready: endpoint.conditions.and_then(|conditions| conditions.serving).unwrap_or(true),
                });
            }
        }
        Ok(found)
    }

    fn not_yet(&self, why: &str) -> Failure {
        Failure::DataPlane(format!("BrokerCluster {}: {why}", self.names.cluster))
    }
}

/// For so long an address that was found is used without another look; one that does not answer is forgotten at once.
const GOOD_FOR: Duration = Duration::from_secs(5);
