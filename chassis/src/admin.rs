//! The HTTP endpoint of a service: `/healthz`, `/livez`, `/readyz`, `/metrics` (Prometheus text).
//!
//! Just enough HTTP/1.1 for probes and scrapers: GET and HEAD, one request per connection, a bounded
//! head, a deadline. Nothing here may slow the service down or grow without limit.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};
use tracing::debug;

use crate::metrics::Registry;
use crate::service::{ServiceHandle, Trouble};

/// Serves the endpoint of `services` as a task of `owner`; ready means all of them are.
/// An empty `services` means `owner` alone.
pub fn serve(
    owner: &ServiceHandle,
    listener: TcpListener,
    services: Vec<ServiceHandle>,
) -> io::Result<SocketAddr> {
    let address = listener.local_addr()?;
    let services = if services.is_empty() { vec![owner.clone()] } else { services };
    let endpoint = Arc::new(Endpoint { registry: owner.metrics().clone(), services });
    let service = owner.clone();
    // Ends last: a draining service still answers its probes.
    let stop = owner.back_stopping().clone();
    owner.spawn_back("HTTP endpoint", async move {
        let permits = Arc::new(Semaphore::new(CONNECTIONS_MAX));
        while let Some(accepted) = stop.run_until_cancelled(listener.accept()).await {
            let Ok((stream, _)) = accepted else {
                // Out of file descriptors: wait for some to come free.
                sleep(Duration::from_millis(100)).await;
                continue;
            };
            let Ok(permit) = permits.clone().try_acquire_owned() else { continue };
            let endpoint = endpoint.clone();
            service.spawn_child(async move {
                let _permit = permit;
                match timeout(REQUEST_TIMEOUT, endpoint.answer(stream)).await {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => debug!("HTTP connection: {error}"),
                    Err(_) => debug!("HTTP connection: too slow"),
                }
            });
        }
        Ok::<(), io::Error>(())
    });
    Ok(address)
}

struct Endpoint {
    registry: Registry,
    services: Vec<ServiceHandle>,
}

impl Endpoint {
    async fn answer(&self, mut stream: TcpStream) -> io::Result<()> {
        let mut head = Vec::with_capacity(512);
        while !head.windows(4).any(|window| window == b"\r\n\r\n") {
            let is_method = head.first().is_none_or(u8::is_ascii_uppercase);
            if !is_method || head.len() >= HEAD_BYTES_MAX || stream.read_buf(&mut head).await? == 0 {
                return Ok(());
            }
        }
        let line = head.split(|byte| *byte == b'\r').next().unwrap_or_default();
        let line = String::from_utf8_lossy(line).into_owned();
        let mut words = line.split(' ');
        let (method, target) = (words.next().unwrap_or(""), words.next().unwrap_or(""));
        let (status, body) = match method {
            "GET" | "HEAD" => self.page(target.split('?').next().unwrap_or("")),
            _ => ("405 Method Not Allowed", "only GET and HEAD\n".to_owned()),
        };
        let mut answer = format!(
            "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
            body.len()
        );
        if method != "HEAD" {
            answer.push_str(&body);
        }
        stream.write_all(answer.as_bytes()).await?;
        stream.shutdown().await
    }

    fn page(&self, path: &str) -> (&'static str, String) {
        match path {
            "/healthz" => self.verdict(ServiceHandle::is_healthy, |_| Vec::new()),
            "/livez" => self.verdict(ServiceHandle::is_alive, ServiceHandle::troubles),
            "/readyz" => self.verdict(ServiceHandle::is_ready, ServiceHandle::troubles),
            "/metrics" => ("200 OK", self.registry.render()),
            _ => ("404 Not Found", "pages: /healthz /livez /readyz /metrics\n".to_owned()),
        }
    }

    /// One line for each service, and one for each thing that is wrong with it.
    fn verdict(
        &self,
        judge: fn(&ServiceHandle) -> bool,
        troubles: fn(&ServiceHandle) -> Vec<Trouble>,
    ) -> (&'static str, String) {
        let (mut all_good, mut body) = (true, String::new());
        for service in &self.services {
            let good = judge(service);
            all_good &= good;
            body.push_str(&format!("{}: {}\n", service.name(), if good { "ok" } else { "no" }));
            for trouble in troubles(service) {
                body.push_str(&format!("{}: {}\n", service.name(), trouble.text()));
            }
        }
        (if all_good { "200 OK" } else { "503 Service Unavailable" }, body)
    }
}

const CONNECTIONS_MAX: usize = 64;
const HEAD_BYTES_MAX: usize = 8 * 1024;
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    async fn get(address: SocketAddr, request: &str) -> String {
        let mut stream = TcpStream::connect(address).await.expect("listening");
        stream.write_all(request.as_bytes()).await.expect("sent");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.expect("text");
        answer
    }

    #[tokio::test]
    async fn probes_follow_the_service_and_metrics_are_text() {
        let service = ServiceHandle::standalone("broker");
        service.metrics().counter("requests_total", "Requests.", &[]).inc();
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = serve(&service, listener, Vec::new()).expect("bound");
        assert!(get(address, "GET /readyz HTTP/1.1\r\n\r\n").await.starts_with("HTTP/1.1 503 "));
        service.set_ready(true);
        assert!(get(address, "GET /readyz HTTP/1.1\r\nHost: x\r\n\r\n").await.ends_with("broker: ok\n"));
        assert!(get(address, "GET /livez HTTP/1.1\r\n\r\n").await.starts_with("HTTP/1.1 200 "));
        let (full, wrong) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let (is_full, is_wrong) = (full.clone(), wrong.clone());
        service.on_probe(move || {
            let unready = is_full.load(Ordering::SeqCst).then(|| Trouble::Unready("the disk is full".into()));
            let known = is_wrong.load(Ordering::SeqCst).then(|| Trouble::Known("t-0 is offline".into()));
            unready.into_iter().chain(known).collect()
        });
        full.store(true, Ordering::SeqCst);
        let answer = get(address, "GET /readyz HTTP/1.1\r\n\r\n").await;
        assert!(
            answer.starts_with("HTTP/1.1 503 ") && answer.ends_with("broker: no\nbroker: the disk is full\n")
        );
        full.store(false, Ordering::SeqCst);
        wrong.store(true, Ordering::SeqCst);
        let answer = get(address, "GET /readyz HTTP/1.1\r\n\r\n").await;
        assert!(
            answer.starts_with("HTTP/1.1 200 ") && answer.ends_with("broker: ok\nbroker: t-0 is offline\n")
        );
        assert!(get(address, "GET /healthz?a HTTP/1.0\r\n\r\n").await.starts_with("HTTP/1.1 200 "));
        assert!(get(address, "GET /metrics HTTP/1.1\r\n\r\n").await.contains("\nrequests_total 1\n"));
        assert!(get(address, "GET /nope HTTP/1.1\r\n\r\n").await.starts_with("HTTP/1.1 404 "));
        assert!(get(address, "POST /metrics HTTP/1.1\r\n\r\n").await.starts_with("HTTP/1.1 405 "));
        assert!(!get(address, "HEAD /metrics HTTP/1.1\r\n\r\n").await.contains("requests_total"));
        assert_eq!(service.drain(Duration::from_secs(5)).await, Ok(()));
    }
}
