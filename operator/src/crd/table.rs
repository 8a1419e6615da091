//! Good and bad objects: what `sealane lint` and the API server must agree on. A test against a real
//! API server goes through the same table.

use serde_json::{Value, json};

/// An object, what it replaces, and what is wrong with it (`None`: nothing).
pub struct Case {
    pub name: &'static str,
    pub object: Value,
    pub old: Option<Value>,
    pub wrong: Option<&'static str>,
}

/// The whole table.
pub fn cases() -> Vec<Case> {
    let mut cases = clusters();
    cases.extend(storages());
    cases.extend(listeners());
    cases.extend(pools_and_topics());
    cases.extend(links());
    cases.extend(lanes());
    cases.extend(routers());
    cases
}

fn object(kind: &str, spec: Value) -> Value {
    json!({
        "apiVersion": "sealane.io/v1alpha1",
        "kind": kind,
        "metadata": { "name": "a", "namespace": "default" },
        "spec": spec,
    })
}

fn good(name: &'static str, object: Value) -> Case {
    Case { name, object, old: None, wrong: None }
}

fn bad(name: &'static str, object: Value, wrong: &'static str) -> Case {
    Case { name, object, old: None, wrong: Some(wrong) }
}

/// `object` is made from `old` by setting `path` to `value`.
fn changed(name: &'static str, old: Value, path: &str, value: Value, wrong: Option<&'static str>) -> Case {
    let object = with(old.clone(), path, value);
    Case { name, object, old: Some(old), wrong }
}

fn with(mut object: Value, path: &str, value: Value) -> Value {
    if let Some(place) = object.pointer_mut(path) {
        *place = value;
    } else if let Some((parent, key)) = path.rsplit_once('/')
        && let Some(parent) = object.pointer_mut(parent)
    {
        parent[key] = value;
    }
    object
}

/// One broker on a disk.
pub fn one_broker() -> Value {
    object(
        "BrokerCluster",
        json!({
            "region": "east",
            "storage": { "type": "Disk", "size": "1Gi" },
            "metadata": { "type": "Embedded" },
            "listeners": [{ "name": "plain", "port": 9092 }],
        }),
    )
}

/// Many brokers on etcd and S3.
fn many_brokers() -> Value {
    object(
        "BrokerCluster",
        json!({
            "region": "east",
            "storage": { "type": "S3", "bucket": "records" },
            "metadata": { "type": "Etcd", "endpoints": ["http://etcd:2379"] },
            "listeners": [{ "name": "plain", "port": 9092 }],
        }),
    )
}

fn clusters() -> Vec<Case> {
    let config = |config: Value| with(one_broker(), "/spec/config", config);
    vec![
        good("one broker on a disk", one_broker()),
        good("many brokers on S3", many_brokers()),
        bad("no region", with(one_broker(), "/spec/region", Value::Null), "region"),
        bad("a region in capitals", with(one_broker(), "/spec/region", json!("East")), "region"),
        bad("a region of another type", with(one_broker(), "/spec/region", json!(1)), "region"),
        bad("a long name", with(one_broker(), "/metadata/name", json!("n".repeat(41))), "at most 40"),
        changed(
            "another region",
            one_broker(),
            "/spec/region",
            json!("west"),
            Some("spec.region is immutable"),
        ),
        changed(
            "another size",
            one_broker(),
            "/spec/storage/size",
            json!("2Gi"),
            Some("spec.storage is immutable"),
        ),
        changed(
            "another etcd",
            many_brokers(),
            "/spec/metadata/endpoints",
            json!(["http://e:1"]),
            Some("spec.metadata is immutable"),
        ),
        changed("another image", one_broker(), "/spec/image", json!("sealane:2"), None),
        good("a known key", config(json!({ "num_partitions": "3", "durability": "os" }))),
        bad("an unknown key", config(json!({ "data_dir": "/" })), "spec.config: its keys may be"),
        bad("a value of a key", config(json!({ "durability": "none" })), "durability is sync or os"),
        bad("a number of a key", config(json!({ "num_partitions": "many" })), "whole number"),
        bad("a broker never", with(one_broker(), "/spec/update", json!({ "policy": "Never" })), "policy"),
        bad(
            "none at a time",
            with(one_broker(), "/spec/update", json!({ "maxUnavailable": 0 })),
            "maxUnavailable",
        ),
        bad(
            "renewed too early",
            with(one_broker(), "/spec/certificates", json!({ "validityDays": 10 })),
            "must be less than validityDays",
        ),
        good(
            "renewed",
            with(one_broker(), "/spec/certificates", json!({ "validityDays": 10, "renewBeforeDays": 3 })),
        ),
        good(
            "a mirror",
            with(
                one_broker(),
                "/spec/mirror",
                json!({ "replicas": 2, "listener": { "type": "NodePort", "nodePort": 30096 } }),
            ),
        ),
        bad(
            "a port of a mirror inside",
            with(one_broker(), "/spec/mirror", json!({ "listener": { "nodePort": 30096 } })),
            "nodePort goes with type NodePort only",
        ),
    ]
}

fn storages() -> Vec<Case> {
    let stored = |storage: Value| with(one_broker(), "/spec/storage", storage);
    let shared = |storage: Value| with(many_brokers(), "/spec/storage", storage);
    let agreed = |metadata: Value| with(many_brokers(), "/spec/metadata", metadata);
    vec![
        bad("no listener", with(one_broker(), "/spec/listeners", json!([])), "listeners"),
        bad(
            "a disk and etcd",
            with(many_brokers(), "/spec/storage", json!({ "type": "Disk", "size": "1Gi" })),
            "Embedded goes with",
        ),
        bad("S3 and embedded", stored(json!({ "type": "S3", "bucket": "abc" })), "Embedded goes with"),
        bad("a disk without a size", stored(json!({ "type": "Disk" })), "spec.storage.size is needed"),
        bad("a size that is none", stored(json!({ "type": "Disk", "size": "big" })), "size"),
        bad("S3 without a bucket", shared(json!({ "type": "S3" })), "spec.storage.bucket is needed"),
        bad(
            "a bucket on a disk",
            stored(json!({ "type": "Disk", "size": "1Gi", "bucket": "abc" })),
            "spec.storage.bucket",
        ),
        bad(
            "an endpoint on a disk",
            stored(json!({ "type": "Disk", "size": "1Gi", "endpoint": "http://s3:1" })),
            "go with type S3 only",
        ),
        bad(
            "a size on S3",
            shared(json!({ "type": "S3", "bucket": "abc", "size": "1Gi" })),
            "go with type Disk only",
        ),
        bad("HDFS without a place", shared(json!({ "type": "HDFS" })), "spec.storage.uri is needed"),
        good("HDFS", shared(json!({ "type": "HDFS", "uri": "hdfs://namenode:9000/sealane" }))),
        bad("a place of HDFS that is none", shared(json!({ "type": "HDFS", "uri": "namenode" })), "uri"),
        bad("a storage of no kind", shared(json!({ "type": "Tape" })), "type"),
        bad("etcd without endpoints", agreed(json!({ "type": "Etcd" })), "spec.metadata.endpoints is needed"),
        bad(
            "etcd over TLS without trust",
            agreed(json!({ "type": "Etcd", "endpoints": ["https://e:1"] })),
            "tlsSecretRef is needed",
        ),
        good(
            "etcd over TLS",
            agreed(json!({ "type": "Etcd", "endpoints": ["https://e:1"], "tlsSecretRef": { "name": "t" } })),
        ),
        bad(
            "etcd half over TLS",
            agreed(
                json!({ "type": "Etcd", "endpoints": ["https://e:1", "http://e:2"], "tlsSecretRef": { "name": "t" } }),
            ),
            "begin all with https://",
        ),
        bad(
            "trust without TLS",
            agreed(json!({ "type": "Etcd", "endpoints": ["http://e:1"], "tlsSecretRef": { "name": "t" } })),
            "or all with http://",
        ),
    ]
}

fn listeners() -> Vec<Case> {
    let listen = |listener: Value| {
        let mut whole = json!({ "name": "outside", "port": 9192 });
        if let (Some(whole), Some(more)) = (whole.as_object_mut(), listener.as_object()) {
            whole.extend(more.clone());
        }
        with(one_broker(), "/spec/listeners", json!([whole]))
    };
    let outward = "leaves the cluster";
    vec![
        bad("open to the world", listen(json!({ "type": "NodePort" })), outward),
        bad(
            "TLS without certificates of clients",
            listen(json!({ "type": "LoadBalancer", "tls": { "generate": true } })),
            outward,
        ),
        good("open on purpose", listen(json!({ "type": "NodePort", "insecure": true, "nodePort": 30092 }))),
        good(
            "outside with certificates",
            listen(
                json!({ "type": "NodePort", "tls": { "generate": true }, "authentication": { "type": "TLS" } }),
            ),
        ),
        good("own certificates", listen(json!({ "tls": { "secretRef": { "name": "s" } } }))),
        bad(
            "both certificates",
            listen(json!({ "tls": { "generate": true, "secretRef": { "name": "s" } } })),
            "set either generate",
        ),
        bad("no certificates", listen(json!({ "tls": {} })), "set either generate"),
        bad(
            "clients' certificates without TLS",
            listen(json!({ "authentication": { "type": "TLS" } })),
            "authentication.type TLS needs tls",
        ),
        bad(
            "an authentication that is not there",
            listen(json!({ "authentication": { "type": "SCRAM-SHA-256" } })),
            "authentication.type",
        ),
        bad(
            "a node's port inside",
            listen(json!({ "nodePort": 30092 })),
            "nodePort goes with type NodePort only",
        ),
        bad("a host inside", listen(json!({ "advertisedHost": "a.example" })), "advertisedHost goes with"),
        bad("the internal name", listen(json!({ "name": "internal" })), "taken by the operator"),
        bad("a taken port", listen(json!({ "port": 9097 })), "taken by the broker itself"),
        bad("a port of root", listen(json!({ "port": 80 })), "port"),
        bad(
            "two of one port",
            with(
                one_broker(),
                "/spec/listeners",
                json!([{ "name": "a", "port": 9092 }, { "name": "b", "port": 9092 }]),
            ),
            "port of its own",
        ),
        bad(
            "two of one name",
            with(
                one_broker(),
                "/spec/listeners",
                json!([{ "name": "a", "port": 9092 }, { "name": "a", "port": 9192 }]),
            ),
            "listeners",
        ),
        bad("a transport that is not there", listen(json!({ "transport": "QUIC" })), "transport"),
    ]
}

fn pools_and_topics() -> Vec<Case> {
    let pool = || object("BrokerPool", json!({ "clusterRef": { "name": "east" }, "replicas": 1 }));
    let topic =
        || object("Topic", json!({ "clusterRef": { "name": "east" }, "topicName": "t", "partitions": 3 }));
    vec![
        good("a pool", pool()),
        changed("more brokers", pool(), "/spec/replicas", json!(3), None),
        changed(
            "a pool of another cluster",
            pool(),
            "/spec/clusterRef/name",
            json!("west"),
            Some("spec.clusterRef is immutable"),
        ),
        bad("less than no broker", with(pool(), "/spec/replicas", json!(-1)), "replicas"),
        good("roles", with(pool(), "/spec/roles", json!(["Broker", "Coordinator"]))),
        bad("a role that is none", with(pool(), "/spec/roles", json!(["Leader"])), "roles"),
        bad("a role twice", with(pool(), "/spec/roles", json!(["Broker", "Broker"])), "each role once"),
        bad("volumes to be lost", with(pool(), "/spec/pvcRetention", json!("Maybe")), "pvcRetention"),
        good("a topic", topic()),
        changed("more partitions", topic(), "/spec/partitions", json!(4), None),
        changed(
            "fewer partitions",
            topic(),
            "/spec/partitions",
            json!(2),
            Some("spec.partitions can only grow"),
        ),
        changed("another topic", topic(), "/spec/topicName", json!("u"), Some("spec.topicName is immutable")),
        bad("no partition", with(topic(), "/spec/partitions", json!(0)), "partitions"),
        bad("a name with a blank", with(topic(), "/spec/topicName", json!("a b")), "topicName"),
        bad(
            "a name of the broker's",
            with(topic(), "/spec/topicName", json!("__consumer_offsets")),
            "not beginning with '__'",
        ),
        bad("a dot", with(topic(), "/spec/topicName", json!("..")), "spec.topicName: not '.'"),
        bad(
            "lanes by configuration",
            with(topic(), "/spec/config", json!({ "sealane.lanes": "true" })),
            "spec.lanes.enabled",
        ),
        bad(
            "a number as a value",
            with(topic(), "/spec/config", json!({ "retention.ms": 1 })),
            "retention.ms",
        ),
        good("configuration", with(topic(), "/spec/config", json!({ "retention.ms": "1" }))),
        bad("a policy that is none", with(topic(), "/spec/deletionPolicy", json!("Keep")), "deletionPolicy"),
    ]
}

fn links() -> Vec<Case> {
    let joined = |more: Value| {
        let mut spec = json!({ "clusterRef": { "name": "east" }, "peer": "west" });
        if let (Some(spec), Some(more)) = (spec.as_object_mut(), more.as_object()) {
            spec.extend(more.clone());
        }
        spec
    };
    vec![
        good("a grant", object("LinkGrant", joined(json!({})))),
        bad(
            "a grant for ever",
            object("LinkGrant", joined(json!({ "validMinutes": 100000 }))),
            "validMinutes",
        ),
        good("a link", object("MirrorLink", joined(json!({ "tokenSecretRef": { "name": "t" } })))),
        changed(
            "another peer",
            object("MirrorLink", joined(json!({}))),
            "/spec/peer",
            json!("north"),
            Some("immutable"),
        ),
        bad(
            "a lag of nothing",
            object("MirrorLink", joined(json!({ "rpo": { "maxLagSeconds": 0 } }))),
            "maxLagSeconds",
        ),
        good(
            "what every link does",
            object(
                "MirrorLink",
                joined(json!({ "direction": "Both", "startOffset": "Earliest", "consumerOffsets": "None" })),
            ),
        ),
        bad(
            "one way alone",
            object("MirrorLink", joined(json!({ "direction": "Push" }))),
            "spec.direction: Both is all there is",
        ),
        bad(
            "from the end of a topic",
            object("MirrorLink", joined(json!({ "startOffset": "Latest" }))),
            "spec.startOffset: Earliest is all there is",
        ),
        bad(
            "positions of groups",
            object("MirrorLink", joined(json!({ "consumerOffsets": "Sync" }))),
            "spec.consumerOffsets: None is all there is",
        ),
    ]
}

fn lanes() -> Vec<Case> {
    let lane = |class: &str, name: &str| {
        object("Lane", json!({ "clusterRef": { "name": "east" }, "class": class, "name": name }))
    };
    vec![
        good("a BOE lane", lane("BOE", "boe-cart")),
        good("a PPE lane", lane("PPE", "ppe-next")),
        bad("a PPE lane by another name", lane("PPE", "next"), "begins with ppe"),
        bad("a BOE lane by a PPE name", lane("BOE", "ppe-next"), "begins with ppe"),
        bad("a lane of no class", lane("TEST", "a"), "class"),
        good("a grace", with(lane("BOE", "a"), "/spec/graceSeconds", json!(5))),
        bad("no grace at all", with(lane("BOE", "a"), "/spec/graceSeconds", json!(0)), "graceSeconds"),
        bad(
            "a principal without a name",
            with(lane("BOE", "a"), "/spec/principals", json!([""])),
            "principals",
        ),
        good("every topic", with(lane("BOE", "a"), "/spec/topics", json!(["*"]))),
        bad(
            "some topics",
            with(lane("BOE", "a"), "/spec/topics", json!(["orders"])),
            "spec.topics: ['*'] is all there is",
        ),
        good("every group", with(lane("BOE", "a"), "/spec/groups", json!(["*"]))),
        bad(
            "some groups",
            with(lane("BOE", "a"), "/spec/groups", json!(["shop"])),
            "spec.groups: ['*'] is all there is",
        ),
        bad(
            "a hold of its own",
            with(lane("PPE", "ppe-next"), "/spec/hold", json!({ "maxAgeSeconds": 60 })),
            "spec.hold: a lane keeps nothing by itself",
        ),
        changed("another name", lane("BOE", "a"), "/spec/name", json!("b"), Some("immutable")),
    ]
}

fn routers() -> Vec<Case> {
    let router = |more: Value| {
        let mut spec = json!({ "clusterRef": { "name": "east" } });
        if let (Some(spec), Some(more)) = (spec.as_object_mut(), more.as_object()) {
            spec.extend(more.clone());
        }
        object("LaneRouter", spec)
    };
    vec![
        good("a router", router(json!({}))),
        bad("a router open to the world", router(json!({ "type": "NodePort" })), "leaves the cluster"),
        good(
            "a router open on purpose",
            router(json!({ "type": "NodePort", "port": 31093, "insecure": true })),
        ),
        bad(
            "a router at no port",
            router(json!({ "type": "NodePort", "insecure": true })),
            "spec.port is needed",
        ),
        bad("a router inside at a port", router(json!({ "port": 31093 })), "spec.port is needed"),
        bad(
            "a domain without TLS",
            router(json!({ "laneDomain": "lanes.example" })),
            "spec.laneDomain needs spec.tls",
        ),
    ]
}
