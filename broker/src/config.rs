//! The broker's configuration: how to reach things, where to keep them, and limits.
//!
//! Topics, lanes and links are not here: they are objects in the metadata store.

use std::path::PathBuf;

use chassis::tls::{ClientAuth, TlsFiles};

use crate::partition::Durability;

/// Where segments and metadata are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Storage {
    /// Files in `data_dir`.
    Disk,
    /// Nothing is kept: for trying out, and for tests.
    Memory,
    /// Files, but what was not synced is lost with the process: for crash tests.
    Volatile,
}

/// What a broker of a cluster does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    Broker,
    Coordinator,
    Controller,
}

impl Role {
    pub const ALL: [Role; 3] = [Role::Broker, Role::Coordinator, Role::Controller];
}

/// What the readers of a listener are shown of topics with lanes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ListenerView {
    /// What is theirs.
    Own,
    /// Every record.
    Raw,
}

chassis::config! {
    /// A listener of the broker: an address where Kafka clients connect.
    pub struct ListenerConfig {
        /// Name of the listener, for logs and metrics.
        pub name: String = "plain".to_owned(),
        /// Address and port to bind. Nothing outside this machine can connect while it is 127.0.0.1.
        pub bind: String = "127.0.0.1:9092".to_owned(),
        /// Host and port that clients are told to connect to; empty means the bound address. If it is
        /// wrong, clients reach the bootstrap address and then nothing else.
        pub advertised: String = String::new(),
        /// Certificate and key of the listener; plain text when not set.
        pub tls: Option<TlsFiles> => nested,
        /// Whether clients must show a certificate: none, optional or required.
        pub client_auth: ClientAuth = ClientAuth::None,
        /// Carries the private APIs of mirror, lane-router and control. Needs TLS with required client
        /// certificates, because whoever can connect to it is trusted.
        pub internal: bool = false,
        /// What readers are shown of topics with lanes: own (what belongs to their group or lane), or raw
        /// (every record, those of PPE lanes too: for backups and inspection). A raw listener is for reading
        /// without a group and nothing else, and needs TLS with required client certificates.
        pub view: ListenerView = ListenerView::Own,
        /// Common names of the certificates that may use a raw listener. Whoever has one sees all traffic.
        pub raw_readers: Vec<String> = Vec::new(),
    }

    /// Several brokers that own partitions of one store together.
    pub struct ClusterConfig {
        /// Name of the cluster. Clusters of different names share etcd and a store without meeting; a store that
        /// another cluster of this name has used (another etcd) is refused by its cluster id.
        pub name: String = "sealane".to_owned(),
        /// Endpoints of etcd, such as http://127.0.0.1:2379.
        pub etcd: Vec<String> = Vec::new(),
        /// PEM file of the authorities that may sign etcd's certificates; needed for https:// endpoints.
        pub etcd_ca: PathBuf = PathBuf::new(),
        /// PEM files of this broker's certificate and its key, where etcd asks for them: both or none.
        pub etcd_certificate: PathBuf = PathBuf::new(),
        /// See `etcd_certificate`.
        pub etcd_key: PathBuf = PathBuf::new(),
        /// Where the bytes are: s3://BUCKET/PREFIX or hdfs://HOST:PORT/PATH.
        pub store: String = String::new(),
        /// Endpoint of an S3 server that is not Amazon's, such as http://127.0.0.1:9000. Keys are taken from
        /// AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.
        pub s3_endpoint: String = String::new(),
        /// PEM file of authorities that may sign the S3 server's certificate, beside those that the machine
        /// trusts.
        pub s3_ca: PathBuf = PathBuf::new(),
        /// The folder of Hadoop's `core-site.xml` and `hdfs-site.xml`, which a pair of NameNodes and Kerberos need.
        /// Empty: what `HADOOP_CONF_DIR` names, if it is set.
        pub hdfs_config_dir: PathBuf = PathBuf::new(),
        /// Who this broker is to an HDFS that believes what it is told. Empty: the user of the process.
        pub hdfs_user: String = String::new(),
        /// Kerberos principal of this broker, with `hdfs_keytab`. Without both, tickets are looked for where
        /// `KRB5CCNAME` says.
        pub hdfs_principal: String = String::new(),
        /// Path of the keytab of `hdfs_principal`.
        pub hdfs_keytab: PathBuf = PathBuf::new(),
        /// Region of the bucket.
        pub s3_region: String = "us-east-1".to_owned(),
        /// What this broker keeps its id by: letters, digits, '-', '_' and '.'. Empty: a name that is made at
        /// the first start and kept in `data_dir`.
        pub identity: String = String::new(),
        /// What this broker does: broker (owns partitions of topics), coordinator (owns those of groups),
        /// controller (may be elected to say who owns what).
        pub roles: Vec<Role> = Role::ALL.to_vec(),
        /// Milliseconds after which a silent broker is taken for dead. Shorter is a faster failover, and more
        /// false alarms; on HDFS at least two heartbeats of its DataNodes.
        pub lease_ms: u32 = 3000,
        /// Bytes that may be in the write-ahead log alone, and so in memory and to be read by heirs; beyond it
        /// producers are slowed down.
        pub log_bytes_max: u64 = 256 << 20,
        /// Memory for reading from the store.
        pub cache_bytes_max: u64 = 64 << 20,
        /// How often the controller removes what nobody needs any more: logs of lives that are over,
        /// manifests that were read.
        pub sweep_ms: u32 = 60_000,
    }

    /// The Kafka-compatible broker.
    pub struct Config {
        /// Directory for segments and metadata. One broker at a time: a second one is refused.
        pub data_dir: PathBuf = PathBuf::from("sealane-data/broker"),
        /// disk, memory (nothing is kept), or volatile (crash tests: what was not synced is lost). Without
        /// meaning where `cluster` is set.
        pub storage: Storage = Storage::Disk,
        /// The cluster that this broker is part of; alone when not set. Needs a build with the feature
        /// `cluster`.
        pub cluster: Option<ClusterConfig> => nested,
        /// When acks=all is answered: sync (after fdatasync) or os (in the page cache, as Apache Kafka
        /// does; a power failure may lose acknowledged records).
        pub durability: Durability = Durability::Sync,
        /// Short name of this broker's region: 1 to 63 of a-z, 0-9 and '-'. Fixed at the first start.
        pub region: String = "local".to_owned(),
        /// Where clients connect.
        pub listeners: Vec<ListenerConfig> = vec![ListenerConfig::default()] => nested,
        /// Address of the control service (gRPC). Plain text on a loopback address only.
        pub control_bind: String = "127.0.0.1:9094".to_owned(),
        /// Host and port where the command line is told to reach it; empty means `control_bind`.
        pub control_advertised: String = String::new(),
        /// Certificates of the control service; needed when it is bound to another address than loopback.
        pub control_tls: Option<TlsFiles> => nested,
        /// Address of /healthz, /readyz and /metrics; empty for none.
        pub http_bind: String = "127.0.0.1:9095".to_owned(),
        /// First port of the addresses that lanes get from this broker. 0 means that this cluster gives
        /// out no lane addresses.
        pub lane_port_first: u16 = 0,
        /// How many such ports there are, and so how many lanes.
        pub lane_port_count: u16 = 90,
        /// Host that lane addresses are told with.
        pub lane_host: String = "127.0.0.1".to_owned(),
        /// Address of the lane-router's shared port (lane by client.id suffix), told to the command line;
        /// empty when there is none.
        pub lane_shared_address: String = String::new(),
        /// Partitions of a topic that is created without a number.
        pub num_partitions: i32 = 1,
        /// Whether asking for a topic's metadata creates it, if the client allows it too.
        pub auto_create_topics: bool = true,
        /// Partitions of __consumer_offsets; fixed when the topic is created.
        pub offsets_partitions: i32 = 4,
        /// Minutes that committed offsets of an empty group are kept.
        pub offsets_retention_minutes: i64 = 10_080,
        /// Whether topics are created with lanes on.
        pub lanes_default: bool = false,
        /// What names the lane of a record where a topic does not say (`sealane.lanes.extractors`): names of
        /// headers, `baggage/KEY` or `tracestate/KEY`, the first that is there wins. Records that were
        /// produced before a change keep their lane.
        pub lanes_extractors: Vec<String> = standard_extractors(),
        /// Seconds between a lane's last member leaving unclean and the baseline taking over.
        pub lane_grace_seconds: u32 = 30,
        /// Milliseconds that a rebalance of a new group waits for more members.
        pub group_initial_rebalance_delay_ms: u32 = 0,
        /// Threads that sync partitions.
        pub flush_threads: u32 = 4,
        /// Milliseconds after which appends that nobody waits for are made durable.
        pub flush_interval_ms: u32 = 50,
        /// Milliseconds between two looks at retention, offset expiry and compaction.
        pub retention_check_ms: u32 = 60_000,
        /// Bytes that may wait in memory for a sync; beyond it producers are slowed down.
        pub inflight_produce_bytes_max: u64 = 128 << 20,
        /// Largest request; a connection that sends more is closed.
        pub request_bytes_max: u32 = kafka::limits::REQUEST_BYTES_MAX as u32,
        /// Memory for requests above 1 MiB that are not all here yet, of all connections together (at
        /// least `request_bytes_max`). When it is used up, further large requests wait in their sockets;
        /// smaller ones do not. Every connection may hold 1 MiB beside it.
        pub request_bytes_total_max: u64 = 256 << 20,
        /// Files of sealed segments that are kept open for the next read (a quarter of the process's own
        /// limit if that is less). Too few of them cost an open for a read of old data.
        pub segment_files_open_max: u32 = 4096,
        /// Largest answer to one Fetch.
        pub fetch_bytes_max: u32 = 55 << 20,
        /// Connections of one listener; more are closed at once.
        pub connections_max: u32 = 10_000,
        /// Milliseconds after which a connection without a request is closed.
        pub connection_idle_ms: u64 = 600_000,
        /// Seconds for connections to end and data to be flushed at a stop.
        pub drain_seconds: u32 = 30,
    }
}

fn standard_extractors() -> Vec<String> {
    lane_core::extract::STANDARD.split(',').map(str::to_owned).collect()
}
