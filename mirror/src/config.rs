//! Configuration of a mirror: how to reach things. What may cross a link is an object in the region's
//! metadata store (`kafka::private::LinkPolicy`), not a matter of this file.

use std::path::PathBuf;

use chassis::config::ConfigError;
use chassis::tls::TlsFiles;

chassis::config! {
    /// A mirror.
    pub struct Config {
        /// Addresses of the internal listeners of brokers of this region, `HOST:PORT` with commas between.
        /// One that answers is enough: it tells where the others are, and who owns which partition.
        pub broker: String = "127.0.0.1:9097".to_owned(),
        /// Name that the certificate of every broker must carry; the host of each broker's address when
        /// not set.
        pub broker_server_name: Option<String>,
        /// Certificate, key and authorities towards the broker, and towards peers unless `link_tls`
        /// is set. The common name of the certificate must be `sealane-mirror`.
        pub tls: TlsFiles => nested,
        /// Certificate, key and authorities towards peers, where regions have different authorities. Those of
        /// all peers: which of them may be which peer is said by `ca` of each link.
        pub link_tls: Option<TlsFiles> => nested,
        /// UDP address for links, `IP:PORT`. Peers that dial must reach it.
        pub bind: String = "127.0.0.1:9096".to_owned(),
        /// Address of /healthz, /readyz and /metrics; empty for none.
        pub http_bind: String = String::new(),
        /// Streams that a peer may open here. Below 2 no link works; 17 serve a peer in full.
        pub streams_max: u32 = 32,
        /// Bytes received and not yet durable, for each link: its share of memory. Too small, and a
        /// long path is not filled: it should be well above bandwidth times round trip.
        pub credit_bytes: u64 = 64 << 20,
        /// Links to other regions. What crosses them is set with `sealane mirror link`.
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
        /// PEM file of the authorities that may sign this peer's certificate, so that no other peer passes for
        /// it. When not set, any that `link_tls` or `tls` names may.
        pub ca: Option<PathBuf>,
    }
}

/// Keys that the file had before links were objects, and the option that took the place of each.
const MOVED: &[(&str, &str)] = &[
    ("include", "--topics PATTERNS"),
    ("exclude", "--exclude PATTERNS"),
    ("boe_lanes", "--lanes none|boe|ppe|all"),
    ("ppe_lanes", "--lanes none|boe|ppe|all"),
    ("send_rate_bytes_max", "--rate BYTES"),
    ("congestion", "--congestion auto|bbr|cubic"),
];

/// Tells of a key that has moved to the link's object which command sets it there.
pub fn with_moved_keys(error: ConfigError) -> ConfigError {
    let ConfigError::Content { path, line, message } = error else { return error };
    let moved = MOVED.iter().find(|(key, _)| message.starts_with(&format!("unknown key `{key}`")));
    let message = match moved {
        None => message,
        Some((key, option)) => format!(
            "`{key}` is no key of this file any more: links are objects in the region's metadata store; remove it here, \
             and set it with `sealane mirror link set PEER {option}`"
        ),
    };
    ConfigError::Content { path, line, message }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn a_key_that_moved_is_one_line_that_names_it_and_the_command() {
        let said = |text: &str| {
            let error = chassis::config::parse::<Config>(text, Path::new("m.toml")).expect_err("refused");
            with_moved_keys(error).to_string()
        };
        for (key, option) in MOVED {
            for text in [format!("{key} = 1\n"), format!("[[links]]\npeer = \"west\"\n{key} = 1\n")] {
                let said = said(&text);
                assert!(said.starts_with("m.toml, line ") && said.contains(&format!("`{key}`")), "{said}");
                assert!(said.contains(&format!("`sealane mirror link set PEER {option}`")), "{said}");
                assert_eq!(said.lines().count(), 1);
            }
        }
        assert!(said("bindd = 1\n").starts_with("m.toml, line 1: unknown key `bindd`, expected one of"));
    }
}
