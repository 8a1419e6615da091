//! Addresses as people and brokers write them.

use std::fmt;
use std::str::FromStr;

/// Host (name, IPv4, or IPv6 without brackets) and port.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Endpoint {
    pub host: String,
    pub port: u16,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not an address; write HOST:PORT")]
pub struct EndpointError(String);

impl Endpoint {
    pub fn new(host: impl Into<String>, port: u16) -> Endpoint {
        Endpoint { host: host.into(), port }
    }

    /// A comma-separated list, as in `bootstrap.servers`.
    pub fn parse_list(text: &str) -> Result<Vec<Endpoint>, EndpointError> {
        text.split(',').map(str::trim).filter(|part| !part.is_empty()).map(str::parse).collect()
    }
}

impl FromStr for Endpoint {
    type Err = EndpointError;

    fn from_str(text: &str) -> Result<Endpoint, EndpointError> {
        let wrong = || EndpointError(text.to_owned());
        let (host, port) = text.rsplit_once(':').ok_or_else(wrong)?;
        let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        if host.is_empty() {
            return Err(wrong());
        }
        Ok(Endpoint { host: host.to_owned(), port: port.parse().map_err(|_| wrong())? })
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_shown_alike() {
        for text in ["localhost:9092", "127.0.0.1:1", "[::1]:9092"] {
            assert_eq!(text.parse::<Endpoint>().unwrap().to_string(), text);
        }
        for wrong in ["", "localhost", ":9092", "h:", "h:65536", "h:x"] {
            assert!(wrong.parse::<Endpoint>().is_err(), "{wrong}");
        }
        assert_eq!(Endpoint::parse_list("a:1, b:2,").unwrap().len(), 2);
    }
}
