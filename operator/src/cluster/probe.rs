//! What a broker that runs and is not ready says of it: the lines of its /readyz. A person reads them in a condition, and
//! nothing is decided by them.

use std::collections::BTreeMap;
use std::time::Duration;

use futures_util::future::join_all;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::pods;
use crate::names::HTTP_PORT;

/// By pod; those that are ready, run nowhere or say nothing are left out.
pub async fn ask(pods: &[Pod]) -> BTreeMap<String, String> {
    let asked = pods.iter().filter(|pod| !pods::is_ready(pod)).map(async |pod| {
        let address = pod.status.as_ref()?.pod_ip.clone()?;
        let said = timeout(PATIENCE, get(&address)).await.ok()?.ok()?;
        Some((pod.name_any(), complaint(&said)?))
    });
    join_all(asked).await.into_iter().flatten().collect()
}

async fn get(address: &str) -> std::io::Result<String> {
    let host = if address.contains(':') { format!("[{address}]") } else { address.to_owned() };
    let mut stream = TcpStream::connect(format!("{host}:{HTTP_PORT}")).await?;
    stream.write_all(b"GET /readyz HTTP/1.0\r\n\r\n").await?;
    let mut said = Vec::new();
    stream.take(BYTES_MAX).read_to_end(&mut said).await?;
    Ok(String::from_utf8_lossy(&said).into_owned())
}

/// The first line of an answer that says more than yes or no.
fn complaint(answer: &str) -> Option<String> {
    let (_, body) = answer.split_once("\r\n\r\n")?;
    let mut lines = body.lines().filter_map(|line| line.split_once(": ")).map(|(_, said)| said);
    lines.find(|said| !["ok", "no"].contains(said)).map(str::to_owned)
}

const PATIENCE: Duration = Duration::from_secs(2);
const BYTES_MAX: u64 = 16 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_wrong_is_taken_from_the_answer_and_yes_and_no_are_not() {
        let answer =
            |body: &str| format!("HTTP/1.1 503 Service Unavailable\r\nContent-Length: 9\r\n\r\n{body}");
        let said =
            complaint(&answer("broker: no\nbroker: the store does not answer: s3://a: no such bucket\n"));
        assert_eq!(said.as_deref(), Some("the store does not answer: s3://a: no such bucket"));
        assert_eq!(complaint(&answer("broker: no\n")), None);
        assert_eq!(complaint("HTTP/1.1 200 OK"), None);
    }
}
