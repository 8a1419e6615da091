//! The configuration file of a broker: made for each pod, because each tells its clients another address. Pure.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use crate::crd::{AuthenticationType, BrokerRole, MetadataType, StorageType};
use crate::names::{
    CONTROL_PORT, HTTP_PORT, INTERNAL_PORT, LANE_PORT_COUNT, LANE_PORT_FIRST, LANE_SHARED_PORT,
};
use crate::region::Region;

/// What is told to clients of listeners that leave the cluster: HOST:PORT by listener. A listener that is not in it
/// is told by the pod's own name.
pub type Outside = BTreeMap<String, String>;

/// The file of pod `pod`.
pub fn file(region: &Region, roles: &[BrokerRole], pod: &str, outside: &Outside) -> String {
    let (names, spec) = (&region.names, &region.cluster.spec);
    let host = names.host_of_pod(pod);
    let lanes = names.host_of(&names.lanes());
    let mut text = format!(
        "data_dir = \"/var/lib/sealane\"\nregion = {:?}\ncontrol_bind = \"0.0.0.0:{CONTROL_PORT}\"\n\
         control_advertised = \"{host}:{CONTROL_PORT}\"\nhttp_bind = \"0.0.0.0:{HTTP_PORT}\"\n\
         lane_host = \"{lanes}\"\nlane_port_first = {}\nlane_port_count = {LANE_PORT_COUNT}\n\
         lane_shared_address = \"{lanes}:{LANE_SHARED_PORT}\"\nlanes_default = {}\n",
        spec.region,
        spec.lanes.port_first.unwrap_or(LANE_PORT_FIRST),
        spec.lanes.default
    );
    if !spec.lanes.extractors.is_empty() {
        let _ = writeln!(text, "lanes_extractors = {:?}", spec.lanes.extractors);
    }
    for (key, value) in spec.config.iter().filter(|(key, _)| !key.starts_with("cluster.")) {
        let _ = writeln!(text, "{key} = {}", value_of(value));
    }
    text += "\n[control_tls]\ncert = \"/etc/sealane/tls/tls.crt\"\nkey = \"/etc/sealane/tls/tls.key\"\nca = \"/etc/sealane/trust/ca.crt\"\n";
    if spec.metadata.type_ == MetadataType::Etcd {
        text += &cluster(region, roles);
        // By its name a broker is the same one after a restart, though it keeps nothing.
        let _ = writeln!(text, "identity = {pod:?}");
    }
    for listener in &spec.listeners {
        let own = format!("{host}:{}", listener.port);
        let advertised = outside.get(&listener.name).unwrap_or(&own);
        let auth = if listener.authentication.type_ == AuthenticationType::TLS { "required" } else { "none" };
        let _ = write!(
            text,
            "\n[[listeners]]\nname = {:?}\nbind = \"0.0.0.0:{}\"\nadvertised = {advertised:?}\nclient_auth = {auth:?}\n",
            listener.name, listener.port
        );
        if let Some(tls) = &listener.tls {
            let (own, trust) = match tls.secret_ref {
                Some(_) => (
                    format!("/etc/sealane/listener-{}", listener.name),
                    format!("/etc/sealane/listener-{}", listener.name),
                ),
                None => ("/etc/sealane/tls".to_owned(), "/etc/sealane/trust".to_owned()),
            };
            let _ = write!(text, "[listeners.tls]\ncert = \"{own}/tls.crt\"\nkey = \"{own}/tls.key\"\n");
            if auth == "required" {
                let _ = writeln!(text, "ca = \"{trust}/ca.crt\"");
            }
        }
    }
    let _ = write!(
        text,
        "\n[[listeners]]\nname = \"internal\"\nbind = \"0.0.0.0:{INTERNAL_PORT}\"\nadvertised = \"{host}:{INTERNAL_PORT}\"\n\
         client_auth = \"required\"\ninternal = true\n[listeners.tls]\ncert = \"/etc/sealane/tls/tls.crt\"\n\
         key = \"/etc/sealane/tls/tls.key\"\nca = \"/etc/sealane/trust/ca.crt\"\n"
    );
    text
}

/// The table of a cluster that shares a store.
fn cluster(region: &Region, roles: &[BrokerRole]) -> String {
    let (names, spec) = (&region.names, &region.cluster.spec);
    let own = format!("{}/{}", names.namespace, names.cluster);
    let storage = &spec.storage;
    let store = match storage.type_ {
        StorageType::HDFS => storage.uri.clone().unwrap_or_default(),
        _ => format!(
            "s3://{}/{}",
            storage.bucket.as_deref().unwrap_or_default(),
            storage.prefix.clone().unwrap_or_else(|| own.clone())
        ),
    };
    let mut text = format!(
        "\n[cluster]\nname = \"{}.{}\"\netcd = {:?}\nstore = {store:?}\n",
        names.cluster, names.namespace, spec.metadata.endpoints
    );
    for (key, value) in [("s3_endpoint", &storage.endpoint), ("s3_region", &storage.region)] {
        if let Some(value) = value {
            let _ = writeln!(text, "{key} = {value:?}");
        }
    }
    if storage.ca_secret_ref.is_some() {
        text += "s3_ca = \"/etc/sealane/s3/ca.crt\"\n";
    }
    if spec.metadata.tls_secret_ref.is_some() {
        text += "etcd_ca = \"/etc/sealane/etcd/ca.crt\"\n";
        if region.etcd_identity {
            text += "etcd_certificate = \"/etc/sealane/etcd/tls.crt\"\netcd_key = \"/etc/sealane/etcd/tls.key\"\n";
        }
    }
    if !roles.is_empty() {
        let roles: Vec<&str> = roles
            .iter()
            .map(|role| match role {
                BrokerRole::Broker => "broker",
                BrokerRole::Coordinator => "coordinator",
                BrokerRole::Controller => "controller",
            })
            .collect();
        let _ = writeln!(text, "roles = {roles:?}");
    }
    for (key, value) in &spec.config {
        if let Some(key) = key.strip_prefix("cluster.") {
            let _ = writeln!(text, "{key} = {}", value_of(value));
        }
    }
    text
}

/// Numbers and booleans as they are, all else as text.
fn value_of(value: &str) -> String {
    if value.parse::<i64>().is_ok() || value.parse::<bool>().is_ok() {
        value.to_owned()
    } else {
        format!("{value:?}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::crd::{
        Authentication, BrokerCluster, BrokerClusterSpec, Listener, ListenerType, Metadata, Ref, Storage, Tls,
    };
    use crate::names::ClusterNames;

    fn region(spec: BrokerClusterSpec) -> Region {
        let names = ClusterNames {
            cluster: "east".to_owned(),
            namespace: "sea".to_owned(),
            domain: "cluster.local".to_owned(),
        };
        Region { cluster: BrokerCluster::new("east", spec), names, etcd_identity: false }
    }

    fn spec() -> BrokerClusterSpec {
        let plain = Listener { name: "plain".to_owned(), port: 9092, ..Listener::default() };
        let outside = Listener {
            name: "outside".to_owned(),
            port: 9192,
            type_: ListenerType::NodePort,
            tls: Some(Tls { generate: true, ..Tls::default() }),
            authentication: Authentication { type_: AuthenticationType::TLS },
            ..Listener::default()
        };
        let config = [("num_partitions", "3"), ("durability", "os"), ("cluster.lease_ms", "2000")];
        BrokerClusterSpec {
            region: "east".to_owned(),
            listeners: vec![plain, outside],
            config: config.map(|(key, value)| (key.to_owned(), value.to_owned())).into(),
            ..BrokerClusterSpec::default()
        }
    }

    #[test]
    fn a_pod_tells_clients_inside_its_own_name_and_clients_outside_what_they_reach() {
        let outside: Outside = [("outside".to_owned(), "10.0.0.1:30092".to_owned())].into();
        let parsed: toml::Value =
            toml::from_str(&file(&region(spec()), &[], "pool-0", &outside)).expect("TOML");
        let listeners = parsed["listeners"].as_array().expect("listeners");
        assert_eq!(
            listeners[0]["advertised"].as_str(),
            Some("pool-0.east-brokers.sea.svc.cluster.local:9092")
        );
        assert_eq!(listeners[1]["advertised"].as_str(), Some("10.0.0.1:30092"));
        assert_eq!(listeners[1]["tls"]["ca"].as_str(), Some("/etc/sealane/trust/ca.crt"));
        assert_eq!(listeners[2]["internal"].as_bool(), Some(true));
        assert_eq!(
            (parsed["num_partitions"].as_integer(), parsed["durability"].as_str()),
            (Some(3), Some("os"))
        );
        assert_eq!(parsed.get("cluster"), None, "it is alone");
    }

    #[test]
    fn brokers_that_share_a_store_are_told_where_it_is() {
        let mut spec = spec();
        spec.metadata = Metadata {
            type_: MetadataType::Etcd,
            endpoints: vec!["http://etcd:2379".to_owned()],
            tls_secret_ref: None,
        };
        spec.storage =
            Storage { type_: StorageType::S3, bucket: Some("data".to_owned()), ..Storage::default() };
        let parsed = |spec, etcd_identity| -> toml::Value {
            let region = Region { etcd_identity, ..region(spec) };
            toml::from_str(&file(&region, &[BrokerRole::Broker], "pool-1", &Outside::new())).expect("TOML")
        };
        let mut secure = spec.clone();
        let plain = parsed(spec, false);
        assert_eq!(plain["cluster"]["store"].as_str(), Some("s3://data/sea/east"));
        assert_eq!(plain["cluster"]["lease_ms"].as_integer(), Some(2000));
        assert_eq!(plain["cluster"]["roles"][0].as_str(), Some("broker"));
        assert_eq!(plain["cluster"].get("etcd_ca"), None);
        // What is not in the Secret is not asked for.
        secure.metadata.tls_secret_ref = Some(Ref::to("etcd"));
        let without = parsed(secure.clone(), false);
        assert!(without["cluster"].get("etcd_ca").is_some() && without["cluster"].get("etcd_key").is_none());
        assert!(parsed(secure, true)["cluster"].get("etcd_key").is_some());
    }
}
