//! The stores that a configuration names: etcd, and S3 or HDFS. Only in builds with the feature `cluster`.

use std::path::Path;
use std::sync::Arc;

use broker_store::remote::{Hdfs, HdfsConfig, Kerberos, S3, S3Config};
use broker_store::{MetaError, Remote, StoreError, meta};

use super::ClusterStores;
use crate::config::ClusterConfig;
use crate::service::StartError;

/// Opens what `config` names. What cannot be reached yet is waited for by those who use it.
pub async fn open(config: &ClusterConfig) -> Result<ClusterStores, StartError> {
    super::check::check(config)?;
    if config.etcd.is_empty() {
        return Err(wrong("etcd", "no endpoint is named; write for example [\"http://127.0.0.1:2379\"]"));
    }
    let place = Place::parse(&config.store).map_err(|reason| wrong("store", reason))?;
    let etcd = etcd(config)?;
    let s3_ca = pem("s3_ca", &config.s3_ca)?;
    let kerberos = kerberos(config)?;
    let of_store = config.clone();
    let opened = tokio::task::spawn_blocking(move || remote(place, &of_store, s3_ca, kerberos)).await;
    let remote = opened.map_err(|_| wrong("store", "interrupted"))?;
    let remote = remote.map_err(|error| wrong("store", format!("{}: {error}", config.store)))?;
    let meta = meta::Etcd::open(etcd);
    let meta =
        meta.map_err(|error: MetaError| wrong("etcd", format!("{}: {error}", config.etcd.join(", "))))?;
    Ok(ClusterStores { meta: Arc::new(meta), remote })
}

fn etcd(config: &ClusterConfig) -> Result<meta::EtcdConfig, StartError> {
    let etcd = meta::EtcdConfig::new(config.etcd.clone(), &config.name);
    let identity =
        match (pem("etcd_certificate", &config.etcd_certificate)?, pem("etcd_key", &config.etcd_key)?) {
            (Some(certificate), Some(key)) => Some((certificate, key)),
            (None, None) => None,
            (Some(_), None) => return Err(wrong("etcd_key", "etcd_certificate is set; set its key, too")),
            (None, Some(_)) => {
                return Err(wrong("etcd_certificate", "etcd_key is set; set its certificate, too"));
            }
        };
    let tls = match (pem("etcd_ca", &config.etcd_ca)?, identity) {
        (Some(ca), identity) => Some(meta::EtcdTls { ca, identity }),
        (None, Some(_)) => {
            return Err(wrong("etcd_ca", "etcd_certificate is set; set who signed etcd's, too"));
        }
        (None, None) => None,
    };
    Ok(meta::EtcdConfig { tls, ..etcd })
}

fn kerberos(config: &ClusterConfig) -> Result<Option<Kerberos>, StartError> {
    let keytab = &config.hdfs_keytab;
    match (config.hdfs_principal.is_empty(), keytab.as_os_str().is_empty()) {
        (true, true) => Ok(None),
        (false, true) => Err(wrong("hdfs_keytab", "hdfs_principal is set; set its keytab, too")),
        (true, false) => Err(wrong("hdfs_principal", "hdfs_keytab is set; set whose keys these are, too")),
        (false, false) => match std::fs::metadata(keytab) {
            Ok(_) => Ok(Some(Kerberos {
                principal: config.hdfs_principal.clone(),
                keytab: keytab.display().to_string(),
            })),
            Err(error) => Err(wrong("hdfs_keytab", format!("{}: {error}", keytab.display()))),
        },
    }
}

/// What is in a PEM file, unless none is named.
fn pem(key: &'static str, file: &Path) -> Result<Option<Vec<u8>>, StartError> {
    if file.as_os_str().is_empty() {
        return Ok(None);
    }
    let read = std::fs::read(file);
    read.map(Some).map_err(|error| wrong(key, format!("{}: {error}", file.display())))
}

/// Where the bytes are.
#[derive(Debug, PartialEq, Eq)]
enum Place {
    S3 { bucket: String, prefix: String },
    Hdfs { url: String, path: String },
}

impl Place {
    fn parse(store: &str) -> Result<Place, String> {
        let (scheme, rest) = store.split_once("://").unwrap_or(("", store));
        let (host, path) = rest.split_once('/').unwrap_or((rest, ""));
        let path = path.trim_matches('/');
        match (scheme, host) {
            ("s3", host) if !host.is_empty() => {
                Ok(Place::S3 { bucket: host.to_owned(), prefix: path.to_owned() })
            }
            ("hdfs", host) if !host.is_empty() => {
                Ok(Place::Hdfs { url: format!("hdfs://{host}"), path: path.to_owned() })
            }
            _ => Err(format!("{store:?} is neither s3://BUCKET/PREFIX nor hdfs://HOST:PORT/PATH")),
        }
    }
}

fn remote(
    place: Place,
    config: &ClusterConfig,
    s3_ca: Option<Vec<u8>>,
    kerberos: Option<Kerberos>,
) -> Result<Arc<dyn Remote>, StoreError> {
    Ok(match place {
        Place::S3 { bucket, prefix } => {
            let prefix = format!("{prefix}/{}", config.name);
            let s3 = S3Config {
                region: config.s3_region.clone(),
                ca: s3_ca.unwrap_or_default(),
                ..S3Config::new(&config.s3_endpoint, &bucket, &prefix)
            };
            Arc::new(S3::open(s3)?)
        }
        Place::Hdfs { url, path } => {
            let root = format!("/{path}/{}", config.name).replace("//", "/");
            let keeps_fences = !crate::switches::store_fence_off();
            Arc::new(Hdfs::open(HdfsConfig {
                user: config.hdfs_user.clone(),
                config_dir: config.hdfs_config_dir.display().to_string(),
                kerberos,
                keeps_fences,
                ..HdfsConfig::new(&url, &root)
            })?)
        }
    })
}

fn wrong(key: &'static str, reason: impl Into<String>) -> StartError {
    StartError::Cluster { key, reason: reason.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_principal_and_its_keytab_are_asked_for_together() {
        let principal = "sealane/broker-1@EXAMPLE.ORG".to_owned();
        let reason = |config: ClusterConfig| kerberos(&config).unwrap_err().to_string();
        let alone = ClusterConfig { hdfs_principal: principal.clone(), ..ClusterConfig::default() };
        assert!(reason(alone).contains("hdfs_keytab"));
        let keytab = "/nowhere/broker.keytab".into();
        let alone = ClusterConfig { hdfs_keytab: keytab, ..ClusterConfig::default() };
        assert!(reason(alone.clone()).contains("hdfs_principal"));
        let missing = ClusterConfig { hdfs_principal: principal, ..alone };
        assert!(reason(missing).contains("/nowhere/broker.keytab"));
        assert!(kerberos(&ClusterConfig::default()).unwrap().is_none());
    }

    #[test]
    fn what_is_missing_of_certificates_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("x.pem");
        std::fs::write(&file, "x").unwrap();
        let set = |change: fn(&mut ClusterConfig, &Path)| {
            let mut config = ClusterConfig::default();
            change(&mut config, &file);
            etcd(&config).map(drop).map_err(|error| error.to_string())
        };
        assert_eq!(set(|_, _| {}), Ok(()));
        assert_eq!(set(|config, file| config.etcd_ca = file.to_owned()), Ok(()));
        let key = set(|config, file| config.etcd_certificate = file.to_owned()).unwrap_err();
        assert!(key.contains("etcd_key"), "{key}");
        let absent = set(|config, file| config.etcd_ca = file.join("absent")).unwrap_err();
        assert!(absent.contains("etcd_ca") && absent.contains("x.pem/absent"), "{absent}");
    }

    #[test]
    fn a_store_is_named_by_its_url() {
        let s3 = Place::S3 { bucket: "logs".to_owned(), prefix: "east/prod".to_owned() };
        assert_eq!(Place::parse("s3://logs/east/prod/"), Ok(s3));
        let hdfs = Place::Hdfs { url: "hdfs://nn:9000".to_owned(), path: "sealane".to_owned() };
        assert_eq!(Place::parse("hdfs://nn:9000/sealane"), Ok(hdfs));
        for wrong in ["", "s3://", "logs", "ftp://host/path"] {
            let error = Place::parse(wrong).unwrap_err();
            assert!(error.contains("s3://BUCKET/PREFIX"), "{error}");
        }
    }
}
