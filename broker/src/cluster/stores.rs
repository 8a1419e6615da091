//! The stores that a configuration names: etcd, and S3 or HDFS. Only in builds with the feature `cluster`.

use std::sync::Arc;

use broker_store::remote::{Hdfs, HdfsConfig, S3, S3Config};
use broker_store::{MetaError, Remote, StoreError, meta};

use super::ClusterStores;
use crate::config::ClusterConfig;
use crate::service::StartError;

/// Opens what `config` names. What cannot be reached yet is waited for by those who use it.
pub async fn open(config: &ClusterConfig) -> Result<ClusterStores, StartError> {
    if config.etcd.is_empty() {
        return Err(wrong("etcd", "no endpoint is named; write for example [\"http://127.0.0.1:2379\"]"));
    }
    let place = Place::parse(&config.store).map_err(|reason| wrong("store", reason))?;
    let of_store = config.clone();
    let opened = tokio::task::spawn_blocking(move || remote(place, &of_store)).await;
    let remote = opened.map_err(|_| wrong("store", "interrupted"))?;
    let remote = remote.map_err(|error| wrong("store", format!("{}: {error}", config.store)))?;
    let meta = meta::Etcd::open(meta::EtcdConfig::new(config.etcd.clone(), &config.name));
    let meta =
        meta.map_err(|error: MetaError| wrong("etcd", format!("{}: {error}", config.etcd.join(", "))))?;
    Ok(ClusterStores { meta: Arc::new(meta), remote })
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

fn remote(place: Place, config: &ClusterConfig) -> Result<Arc<dyn Remote>, StoreError> {
    Ok(match place {
        Place::S3 { bucket, prefix } => {
            let prefix = format!("{prefix}/{}", config.name);
            let s3 = S3Config {
                region: config.s3_region.clone(),
                ..S3Config::new(&config.s3_endpoint, &bucket, &prefix)
            };
            Arc::new(S3::open(s3)?)
        }
        Place::Hdfs { url, path } => {
            let root = format!("/{path}/{}", config.name).replace("//", "/");
            let keeps_fences = !crate::switches::store_fence_off();
            Arc::new(Hdfs::open(HdfsConfig { keeps_fences, ..HdfsConfig::new(&url, &root) })?)
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
