//! What a configuration of a cluster may say: each key that cannot work is named, with what to write.

use crate::config::ClusterConfig;
use crate::service::StartError;

const LEASE_MS: std::ops::RangeInclusive<u32> = 500..=600_000;
const SWEEP_MS_MIN: u32 = 100;
/// As much may wait for one flush.
const LOG_BYTES_MIN: u64 = 32 << 20;

pub(super) fn check(config: &ClusterConfig) -> Result<(), StartError> {
    let wrong = |key, reason: String| Err(StartError::Cluster { key, reason });
    let is_word = |text: &str, max: usize| {
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        text.len() <= max && !text.starts_with('.') && text.chars().all(plain)
    };
    if config.name.is_empty() || !is_word(&config.name, 253) {
        return wrong(
            "name",
            format!(
                "{:?} is no name: 1 to 253 letters, digits, '-', '_' and '.', the first no '.'",
                config.name
            ),
        );
    }
    if !is_word(&config.identity, 253) {
        return wrong(
            "identity",
            format!("{:?} is none: up to 253 letters, digits, '-', '_' and '.'", config.identity),
        );
    }
    if config.roles.is_empty() {
        return wrong("roles", "it is empty; name what this broker does, or leave it out for all".to_owned());
    }
    if !LEASE_MS.contains(&config.lease_ms) {
        return wrong("lease_ms", format!("{} is outside of 500 to 600000", config.lease_ms));
    }
    if config.sweep_ms < SWEEP_MS_MIN {
        return wrong("sweep_ms", format!("{} is less than {SWEEP_MS_MIN}", config.sweep_ms));
    }
    if config.log_bytes_max < LOG_BYTES_MIN {
        return wrong(
            "log_bytes_max",
            format!(
                "{} is less than {LOG_BYTES_MIN}, which leaves no room for producers",
                config.log_bytes_max
            ),
        );
    }
    let host = |url: &str| {
        let rest = url.strip_prefix("http://").or_else(|| url.strip_prefix("https://"));
        rest.is_some_and(|rest| !rest.is_empty() && !rest.starts_with('/'))
    };
    if !config.s3_endpoint.is_empty() && !host(&config.s3_endpoint) {
        return wrong(
            "s3_endpoint",
            format!("{:?} is no address; write for example \"http://127.0.0.1:9000\"", config.s3_endpoint),
        );
    }
    let dir = &config.hdfs_config_dir;
    if !dir.as_os_str().is_empty() && !dir.is_dir() {
        return wrong("hdfs_config_dir", format!("{} is no directory", dir.display()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_work_is_named_by_its_key() {
        assert!(check(&ClusterConfig::default()).is_ok());
        type Change = fn(&mut ClusterConfig);
        let cases: [(&str, Change); 13] = [
            ("name", |config| config.name = String::new()),
            ("name", |config| config.name = "a/b".to_owned()),
            ("name", |config| config.name = "..".to_owned()),
            ("identity", |config| config.identity = "a/b".to_owned()),
            ("identity", |config| config.identity = "x".repeat(300)),
            ("roles", |config| config.roles.clear()),
            ("lease_ms", |config| config.lease_ms = 0),
            ("lease_ms", |config| config.lease_ms = u32::MAX),
            ("sweep_ms", |config| config.sweep_ms = 0),
            ("log_bytes_max", |config| config.log_bytes_max = 0),
            ("s3_endpoint", |config| config.s3_endpoint = "127.0.0.1:9000".to_owned()),
            ("s3_endpoint", |config| config.s3_endpoint = "http:///".to_owned()),
            ("hdfs_config_dir", |config| config.hdfs_config_dir = "/nowhere/at/all".into()),
        ];
        for (key, change) in cases {
            let mut config = ClusterConfig::default();
            change(&mut config);
            let said = check(&config).map(drop).unwrap_err().to_string();
            assert!(said.contains(&format!("cluster.{key}")), "{key}: {said}");
        }
    }
}
