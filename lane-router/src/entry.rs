//! The lane of a connection, from what it shows before its first request: the client certificate, then the
//! host name that it asked for (SNI), then the listener. What is left goes by the client id.
//!
//! Pure. The first that names a lane decides. A certificate that names several lanes permits these and no
//! other, and what comes after it says which.

use chassis::tls::PeerIdentity;
use lane_core::Lane;

/// How the lane of a connection is found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Entry {
    /// It is this one, whatever the client id.
    Lane(Lane),
    /// The client id ends in `@LANE`; where the certificate names lanes, in one of them.
    ClientId { permitted: Vec<Lane> },
}

/// What a TLS connection has shown. The handshake has checked the certificate's chain.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Shown {
    pub certificate: Option<PeerIdentity>,
    /// The host name that the client believes to have reached.
    pub host_name: Option<String>,
}

/// How a connection enters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entered {
    pub entry: Entry,
    /// The host that clients must be told, so that their next connection is in the same lane.
    pub host: Option<String>,
}

/// Why a connection has no lane; nothing is ever passed on without one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EntryError {
    #[error("{0:?} would name a lane, but is no lane name")]
    NoName(String),
    #[error("its certificate permits {permitted}, and it is to be in lane {asked}")]
    NotPermitted { permitted: String, asked: Lane },
}

/// Begins a URI in a client certificate that names a lane: `sealane://lane/NAME`.
const LANE_URI: &str = "sealane://lane/";
/// A SPIFFE id names a lane by its last two segments: `spiffe://DOMAIN/.../lane/NAME`.
const SPIFFE: &str = "spiffe://";
const SPIFFE_LANE: &str = "lane";

/// `listener` is the lane of the listener, `domain` the one below which host names are lanes' (empty:
/// none).
pub fn enter(listener: Option<&Lane>, shown: &Shown, domain: &str) -> Result<Entered, EntryError> {
    let identity = shown.certificate.as_ref();
    let names = identity.map(|identity| identity.alternative_names.as_slice()).unwrap_or_default();
    let mut permitted = Vec::new();
    for name in names {
        let Some(named) = lane_in(name, domain) else { continue };
        let lane = parse(named, name)?;
        if !permitted.contains(&lane) {
            permitted.push(lane);
        }
    }
    if let [lane] = permitted.as_slice() {
        return Ok(Entered { entry: Entry::Lane(lane.clone()), host: None });
    }
    let host_name = shown.host_name.as_deref();
    let host = host_name.and_then(|host| Some((host, below(host, domain)?)));
    let (lane, host) = match (host, listener) {
        (Some((host, named)), _) => (parse(named, host)?, Some(host.to_owned())),
        (None, Some(lane)) => (lane.clone(), None),
        (None, None) => return Ok(Entered { entry: Entry::ClientId { permitted }, host: None }),
    };
    permits(&permitted, &lane)?;
    Ok(Entered { entry: Entry::Lane(lane), host })
}

/// Whether a certificate that names `permitted` lets its owner be in `lane`. One that names none says
/// nothing about lanes.
pub fn permits(permitted: &[Lane], lane: &Lane) -> Result<(), EntryError> {
    if permitted.is_empty() || permitted.contains(lane) {
        return Ok(());
    }
    let permitted = permitted.iter().map(Lane::as_str).collect::<Vec<_>>().join(", ");
    Err(EntryError::NotPermitted { permitted, asked: lane.clone() })
}

fn parse(name: &str, whole: &str) -> Result<Lane, EntryError> {
    Lane::parse(name).map_err(|_| EntryError::NoName(whole.to_owned()))
}

/// The lane that a name of a certificate is for, if it is for one.
fn lane_in<'a>(name: &'a str, domain: &str) -> Option<&'a str> {
    if let Some(lane) = name.strip_prefix(LANE_URI) {
        return Some(lane);
    }
    if let Some(id) = name.strip_prefix(SPIFFE) {
        let (path, lane) = id.rsplit_once('/')?;
        return path.ends_with(&format!("/{SPIFFE_LANE}")).then_some(lane);
    }
    below(name, domain)
}

/// What stands before `.domain`. Host names have no case.
fn below<'a>(host: &'a str, domain: &str) -> Option<&'a str> {
    let at = host.len().checked_sub(domain.len() + 1)?;
    let (name, rest) = (host.get(..at)?, host.get(at..)?);
    let fits = !domain.is_empty() && rest.starts_with('.') && rest[1..].eq_ignore_ascii_case(domain);
    fits.then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DOMAIN: &str = "lanes.example.com";

    fn lane(name: &str) -> Lane {
        Lane::parse(name).unwrap()
    }

    fn shown(names: &[&str], host: Option<&str>) -> Shown {
        let alternative_names = names.iter().map(|name| (*name).to_owned()).collect();
        let certificate = PeerIdentity { common_name: None, alternative_names };
        Shown { certificate: Some(certificate), host_name: host.map(str::to_owned) }
    }

    fn entered(names: &[&str], host: Option<&str>, listener: Option<&str>) -> Result<Entered, EntryError> {
        enter(listener.map(lane).as_ref(), &shown(names, host), DOMAIN)
    }

    fn in_lane(name: &str, host: Option<&str>) -> Result<Entered, EntryError> {
        Ok(Entered { entry: Entry::Lane(lane(name)), host: host.map(str::to_owned) })
    }

    #[test]
    fn certificate_then_host_name_then_listener_then_client_id() {
        let (host, other) = ("boe-b.lanes.example.com", "broker.example.com");
        for certificate in ["sealane://lane/boe-a", "spiffe://x/ns/y/lane/boe-a", "boe-a.lanes.example.com"] {
            assert_eq!(entered(&[certificate], Some(host), Some("boe-c")), in_lane("boe-a", None));
        }
        for silent in [&[][..], &["spiffe://x/sa/boe-a"], &["service.example.com"]] {
            assert_eq!(entered(silent, Some(host), Some("boe-c")), in_lane("boe-b", Some(host)));
            assert_eq!(entered(silent, Some(other), Some("boe-c")), in_lane("boe-c", None));
            let by_client_id = Entered { entry: Entry::ClientId { permitted: Vec::new() }, host: None };
            assert_eq!(entered(silent, Some(other), None), Ok(by_client_id));
        }
        assert_eq!(enter(Some(&lane("boe-c")), &Shown::default(), ""), in_lane("boe-c", None));
    }

    #[test]
    fn a_certificate_of_several_lanes_permits_these_alone() {
        let both = ["sealane://lane/boe-a", "sealane://lane/ppe-x", "sealane://lane/boe-a"];
        assert_eq!(entered(&both, None, Some("ppe-x")), in_lane("ppe-x", None));
        let refused = entered(&both, None, Some("boe-b")).unwrap_err();
        assert_eq!(
            refused.to_string(),
            "its certificate permits boe-a, ppe-x, and it is to be in lane boe-b"
        );
        assert!(entered(&both, Some("boe-b.lanes.example.com"), Some("ppe-x")).is_err());
        let permitted = vec![lane("boe-a"), lane("ppe-x")];
        assert_eq!(entered(&both, None, None).unwrap().entry, Entry::ClientId { permitted });
    }

    #[test]
    fn what_would_name_a_lane_and_is_none_is_refused() {
        for name in ["sealane://lane/BOE", "sealane://lane/", "spiffe://x/lane/a b", "A.b.lanes.example.com"]
        {
            assert_eq!(entered(&[name], None, Some("boe-a")), Err(EntryError::NoName(name.to_owned())));
        }
        let host = "prod.Lanes.Example.Com";
        assert_eq!(entered(&[], Some(host), Some("boe-a")), Err(EntryError::NoName(host.to_owned())));
        for outside in ["lanes.example.com", "xlanes.example.com", "boe-a.other.com", "é"] {
            assert_eq!(entered(&[], Some(outside), Some("boe-a")), in_lane("boe-a", None), "{outside}");
        }
    }
}
