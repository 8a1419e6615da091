//! Configuration of a mirror: how to reach things, and which links there are.

use chassis::tls::TlsFiles;

/// What decides how fast a link sends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Congestion {
    /// What measurements call for; today `bbr`.
    #[default]
    Auto,
    /// BBR, with a window that follows what the path delivers, so that it does not fill queues.
    Bbr,
    /// CUBIC: fair to old traffic, slow on long paths that lose packets.
    Cubic,
}

chassis::config! {
    /// A mirror.
    pub struct Config {
        /// Address of the internal listener of a broker of this region, `HOST:PORT`.
        pub broker: String = "127.0.0.1:9097".to_owned(),
        /// Name that the broker's certificate must carry; the host of `broker` when not set.
        pub broker_server_name: Option<String>,
        /// Certificate, key and authorities towards the broker, and towards peers unless `link_tls`
        /// is set. The common name of the certificate must be `sealane-mirror`.
        pub tls: TlsFiles => nested,
        /// Certificate, key and authorities towards peers, where regions have different authorities.
        pub link_tls: Option<TlsFiles> => nested,
        /// UDP address for links, `IP:PORT`. Peers that dial must reach it.
        pub bind: String = "127.0.0.1:9096".to_owned(),
        /// Address of /healthz, /readyz and /metrics; empty for none.
        pub http_bind: String = String::new(),
        /// `auto`, `bbr` or `cubic`: the congestion controller of every link.
        pub congestion: Congestion = Congestion::Auto,
        /// Most bytes per second that each link sends, unpacked; 0 for no limit.
        pub send_rate_bytes_max: u64 = 0,
        /// Streams that a peer may open here. Below 2 no link works; 17 serve a peer in full.
        pub streams_max: u32 = 32,
        /// Bytes received and not yet durable, for each link: its share of memory. Too small, and a
        /// long path is not filled: it should be well above bandwidth times round trip.
        pub credit_bytes: u64 = 64 << 20,
        /// Links to other regions.
        pub links: Vec<LinkConfig> => nested,
    }

    /// A link to another region. It works when one side dials; both may.
    pub struct LinkConfig {
        /// Name of the peer's region.
        pub peer: String,
        /// UDP address of the peer's mirror, `HOST:PORT`. Without it this side waits to be dialled.
        pub address: Option<String>,
        /// Name that the peer's certificate must carry; the host of `address` when not set.
        pub server_name: Option<String>,
        /// Topics to mirror, both ways: names, in which `*` stands for any characters.
        pub include: Vec<String> = vec!["*".to_owned()],
        /// Topics to leave out although `include` names them.
        pub exclude: Vec<String>,
        /// Whether records of BOE lanes cross to the peer.
        pub boe_lanes: bool = true,
        /// Whether records of PPE lanes cross to the peer.
        pub ppe_lanes: bool = false,
    }
}
