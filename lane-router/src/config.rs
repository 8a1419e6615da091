//! Configuration of a lane-router: how to reach the broker, and where it listens.

use chassis::tls::{ClientAuth, TlsFiles};

chassis::config! {
    /// A lane-router: the entry of a lane's workloads.
    pub struct Config {
        /// Addresses of the internal listeners of brokers of this region, `HOST:PORT` with commas between.
        /// One that answers is enough: it tells where the others are.
        pub broker: String = "127.0.0.1:9097".to_owned(),
        /// Name that the certificate of every broker must carry; the host of each broker's address when
        /// not set.
        pub broker_server_name: Option<String>,
        /// Certificate, key and authorities towards the broker and the control service. The common name
        /// of the certificate must be `sealane-lane-router`.
        pub tls: TlsFiles => nested,
        /// Addresses of the control service, `HOST:PORT` with commas between: it tells which lanes there
        /// are. Any broker of a cluster does; one that answers is enough.
        pub control: String = "127.0.0.1:9094".to_owned(),
        /// Whether the control service is reached by TLS; it must be unless it is on this machine.
        pub control_tls: bool = false,
        /// Address and port of the shared listener, where the suffix `@LANE` of a client.id names the
        /// lane (BOE lanes only). Nothing outside this machine can connect while it is 127.0.0.1.
        pub bind: String = "127.0.0.1:9093".to_owned(),
        /// Address that the listeners of lanes are bound to; their ports come from the control service.
        pub lane_bind_host: String = "127.0.0.1".to_owned(),
        /// Certificate and key that clients are shown, on every listener; plain text when not set. Its `ca`
        /// signs the certificates of clients.
        pub client_tls: Option<TlsFiles> => nested,
        /// Whether clients must show a certificate: none, optional or required. A certificate whose
        /// alternative names hold `sealane://lane/NAME`, `spiffe://DOMAIN/.../lane/NAME` or a host name
        /// below `lane_domain` puts its owner into that lane.
        pub client_auth: ClientAuth = ClientAuth::None,
        /// Domain of lanes: a client that connects to `NAME.lane_domain` by TLS is in lane NAME, on any
        /// port of the router. Empty for none.
        pub lane_domain: String = String::new(),
        /// Host that clients are told to connect to. If it is wrong, clients reach the bootstrap address
        /// and then nothing else.
        pub advertised_host: String = "127.0.0.1".to_owned(),
        /// Where a region has several brokers, clients reach broker N of it at the port of their lane, or
        /// of the shared listener, plus N times this: choose it larger than the range of the lanes' ports,
        /// and let clients reach these ports too.
        pub broker_port_step: u16 = 1000,
        /// Address of /healthz, /readyz and /metrics; empty for none.
        pub http_bind: String = String::new(),
        /// Most client connections at once; each has one connection to the broker.
        pub connections_max: u32 = 4096,
        /// Largest request in bytes; a connection that sends a larger one is closed.
        pub request_bytes_max: u32 = 64 << 20,
    }
}
