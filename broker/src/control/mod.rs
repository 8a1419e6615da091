//! The control service: lanes, links, state of the mirror, addresses, over gRPC.
//!
//! Owns the calls and who may make them. A plain connection comes from this machine and may do all;
//! with TLS the caller's common name decides. What lanes mean to records and groups is in `lanes`.

mod board;
mod cluster;
mod directory;
mod doctor;
mod lanes;
mod links;
mod listener;
mod peers;
mod policies;
mod ports;

use std::net::{SocketAddr, ToSocketAddrs as _};
use std::pin::Pin;
use std::sync::Arc;

use chassis::tls::{ClientAuth, ServerTls, TlsError};
use control::peers::PeersServer;
use control::{ControlServer, v1};
use futures_util::Stream;
use lane_core::{Lane, LaneClass};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Server;
use tonic::{Request, Response, Status, Streaming};
use tracing::{info, warn};

use crate::broker::Broker;
use crate::clock;

use directory::{DirectoryError, LaneObject, LaneSet, LaneSettings};
use listener::Caller;

pub use board::LinkBoard;
pub use directory::LaneDirectory;
pub use links::generation as links_generation;

/// Why the control service does not start.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    #[error("control_bind {address}: {source}")]
    Bind { address: String, source: std::io::Error },
    #[error("control_bind {0} is not a loopback address, so the control service needs [control_tls]")]
    NeedsTls(SocketAddr),
    #[error("control_tls: {0}")]
    Tls(#[from] TlsError),
    #[error(transparent)]
    Lanes(#[from] DirectoryError),
}

/// A bound control service that does not answer yet: its address is known before the broker is.
pub struct Bound {
    listener: TcpListener,
    tls: Option<Arc<ServerTls>>,
    pub address: SocketAddr,
}

/// Binds the address; refuses plain text that other machines could reach.
pub async fn bind(config: &crate::config::Config) -> Result<Bound, ControlError> {
    let failed = |source| ControlError::Bind { address: config.control_bind.clone(), source };
    let address = config.control_bind.to_socket_addrs().map_err(failed)?.next();
    let address = address.ok_or_else(|| failed(std::io::Error::other("no such address")))?;
    if config.control_tls.is_none() && !address.ip().is_loopback() {
        return Err(ControlError::NeedsTls(address));
    }
    let tls = match &config.control_tls {
        None => None,
        Some(files) => Some(ServerTls::server(files, ClientAuth::Required, &[b"h2"])?),
    };
    let listener = TcpListener::bind(address).await.map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    Ok(Bound { listener, tls, address })
}

/// Opens the lane directory of a broker.
pub async fn open_lanes(
    meta: Arc<dyn broker_store::MetaStore>,
    config: &crate::config::Config,
) -> Result<Arc<LaneDirectory>, ControlError> {
    let first = config.lane_port_first;
    let last = first.saturating_add(config.lane_port_count.saturating_sub(1));
    let ports = (first > 0 && config.lane_port_count > 0).then_some(first..=last);
    Ok(LaneDirectory::open(meta, ports).await?)
}

/// Answers calls for the life of the broker.
pub fn serve(broker: &Arc<Broker>, directory: Arc<LaneDirectory>, bound: Bound) {
    if let Some(tls) = &bound.tls {
        tls.follow(&broker.service, |_| {});
    }
    // The others go on asking while this broker hands back what it has.
    let service = broker.service.clone();
    let stop = match &broker.peers {
        Some(_) => service.back_stopping().clone(),
        None => service.stopping().clone(),
    };
    let (accepting, connections) = listener::accept(&service, bound.listener, bound.tls, stop.clone());
    let calls = Arc::new(Calls { broker: broker.clone(), directory });
    let peers = broker.peers.as_ref().map(|_| {
        let server = PeersServer::from_arc(calls.clone());
        server
            .max_decoding_message_size(crate::peers::MESSAGE_BYTES_MAX)
            .max_encoding_message_size(crate::peers::MESSAGE_BYTES_MAX)
    });
    let calls = ControlServer::from_arc(calls);
    let (following, stopped) = (broker.clone(), service.stopping().clone());
    broker.service.spawn_child(async move {
        stopped.run_until_cancelled(following.links.policies.follow(&*following.meta)).await;
    });
    info!("control service on {}", bound.address);
    let is_shared = broker.peers.is_some();
    let serving = async move {
        Server::builder()
            .max_concurrent_streams(STREAMS_PER_CONNECTION_MAX)
            .http2_keepalive_interval(Some(KEEPALIVE))
            .add_service(calls)
            .add_optional_service(peers)
            .serve_with_incoming_shutdown(ReceiverStream::new(connections), stop.cancelled_owned())
            .await
    };
    if is_shared {
        service.spawn_back("control listener", accepting);
        service.spawn_back("control service", serving);
    } else {
        service.spawn("control listener", accepting);
        service.spawn("control service", serving);
    }
}

struct Calls {
    broker: Arc<Broker>,
    directory: Arc<LaneDirectory>,
}

type LaneSetStream = Pin<Box<dyn Stream<Item = Result<v1::LaneSet, Status>> + Send>>;

#[tonic::async_trait]
impl control::Control for Calls {
    type WatchLanesStream = LaneSetStream;

    async fn cluster_info(
        &self,
        request: Request<v1::ClusterInfoRequest>,
    ) -> Result<Response<v1::ClusterInfoResponse>, Status> {
        allow(&request, &[CONTROL, LANE_ROUTER])?;
        Ok(Response::new(self.info()))
    }

    async fn cluster_status(
        &self,
        request: Request<v1::ClusterStatusRequest>,
    ) -> Result<Response<v1::ClusterStatusResponse>, Status> {
        allow(&request, &[CONTROL])?;
        Ok(Response::new(self.cluster_status()))
    }

    async fn move_partition(
        &self,
        request: Request<v1::MovePartitionRequest>,
    ) -> Result<Response<v1::MovePartitionResponse>, Status> {
        allow(&request, &[CONTROL])?;
        self.move_partition(request.into_inner()).await?;
        Ok(Response::new(v1::MovePartitionResponse {}))
    }

    async fn drain_broker(
        &self,
        request: Request<v1::DrainBrokerRequest>,
    ) -> Result<Response<v1::DrainBrokerResponse>, Status> {
        allow(&request, &[CONTROL])?;
        self.drain_broker(request.into_inner()).await?;
        Ok(Response::new(v1::DrainBrokerResponse {}))
    }

    async fn create_lane(
        &self,
        request: Request<v1::CreateLaneRequest>,
    ) -> Result<Response<v1::CreateLaneResponse>, Status> {
        allow(&request, &[CONTROL])?;
        let request = request.into_inner();
        let lane = parse_lane(&request.name)?;
        check_class(&lane, request.class())?;
        self.refuse_collision(&lane).await?;
        let settings =
            LaneSettings { grace_seconds: request.grace_seconds, principals: checked(request.principals)? };
        let created = self.directory.create(&lane, settings, clock::now().0).await.map_err(status)?;
        info!("lane {lane} created, port {}", created.lane.port);
        let lane = Some(self.message(&created.lane));
        Ok(Response::new(v1::CreateLaneResponse { lane, warnings: created.warnings }))
    }

    async fn set_lane(
        &self,
        request: Request<v1::SetLaneRequest>,
    ) -> Result<Response<v1::SetLaneResponse>, Status> {
        allow(&request, &[CONTROL])?;
        let request = request.into_inner();
        let principals = request.principals.map(|list| checked(list.names)).transpose()?;
        let changed = self.directory.set(&request.name, |settings| {
            settings.grace_seconds = request.grace_seconds.unwrap_or(settings.grace_seconds);
            settings.principals = principals.unwrap_or_else(|| std::mem::take(&mut settings.principals));
        });
        let object = changed.await.map_err(status)?;
        info!("lane {} has other settings: {:?}", object.name, object.settings);
        Ok(Response::new(v1::SetLaneResponse { lane: Some(self.message(&object)) }))
    }

    async fn list_lanes(
        &self,
        request: Request<v1::ListLanesRequest>,
    ) -> Result<Response<v1::ListLanesResponse>, Status> {
        allow(&request, &[CONTROL, LANE_ROUTER])?;
        let lanes = self.directory.lanes().values().map(|lane| self.message(lane)).collect();
        Ok(Response::new(v1::ListLanesResponse { lanes }))
    }

    async fn lane_status(
        &self,
        request: Request<v1::LaneStatusRequest>,
    ) -> Result<Response<v1::LaneStatusResponse>, Status> {
        allow(&request, &[CONTROL])?;
        let object = self.directory.lane(&request.into_inner().name).map_err(status)?;
        let lane = parse_lane(&object.name)?;
        let (groups, partitions) = self.holdings(&lane).await?;
        let serving = self.directory.routers().into_iter();
        let serving =
            serving.filter(|router| router.failures.iter().all(|(failed, _)| *failed != object.name));
        Ok(Response::new(v1::LaneStatusResponse {
            lane: Some(self.message(&object)),
            groups,
            partitions,
            lane_routers: serving.count() as u32,
        }))
    }

    async fn lane_doctor(
        &self,
        request: Request<v1::LaneDoctorRequest>,
    ) -> Result<Response<v1::LaneDoctorResponse>, Status> {
        allow(&request, &[CONTROL])?;
        Ok(Response::new(self.examine().await?))
    }

    async fn delete_lane(
        &self,
        request: Request<v1::DeleteLaneRequest>,
    ) -> Result<Response<v1::DeleteLaneResponse>, Status> {
        allow(&request, &[CONTROL])?;
        let name = request.into_inner().name;
        // Once the routers have let go of the lane nobody can join its groups or add to its records.
        let object = self.directory.begin_delete(&name).await.map_err(status)?;
        let lane = parse_lane(&name)?;
        let hidden_records = self.hide(&lane).await?;
        self.directory.finish_delete(&object).await.map_err(status)?;
        info!("lane {lane} deleted, {hidden_records} records hidden");
        Ok(Response::new(v1::DeleteLaneResponse { hidden_records }))
    }

    async fn watch_lanes(
        &self,
        request: Request<Streaming<v1::LaneRouterReport>>,
    ) -> Result<Response<LaneSetStream>, Status> {
        allow(&request, &[LANE_ROUTER])?;
        let mut reports = request.into_inner();
        let Some(first) = reports.message().await? else {
            return Err(Status::invalid_argument("a lane-router's first report names its address"));
        };
        let (sets, stream) = mpsc::channel(1);
        let session = RouterSession {
            session: self.directory.join(&first.address),
            address: first.address,
            lanes: self.directory.watch(),
            message: LaneMessages { host: self.broker.config.lane_host.clone() },
        };
        let stop = self.broker.service.stopping().clone();
        self.broker.service.spawn_child(async move {
            stop.run_until_cancelled(session.run(reports, sets)).await;
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(stream))))
    }

    async fn mirror_status(
        &self,
        request: Request<v1::MirrorStatusRequest>,
    ) -> Result<Response<v1::MirrorStatusResponse>, Status> {
        allow(&request, &[CONTROL])?;
        let notes = crate::api::mirror::notes(&*self.broker.meta, "").await;
        let notes = notes.map_err(|error| Status::unavailable(format!("notes of the mirror: {error}")))?;
        Ok(Response::new(links::status(&self.broker, &notes)))
    }

    async fn list_links(
        &self,
        request: Request<v1::ListLinksRequest>,
    ) -> Result<Response<v1::ListLinksResponse>, Status> {
        allow(&request, &[CONTROL])?;
        Ok(Response::new(links::list(&self.broker).await))
    }

    async fn set_link(
        &self,
        request: Request<v1::SetLinkRequest>,
    ) -> Result<Response<v1::SetLinkResponse>, Status> {
        allow(&request, &[CONTROL])?;
        links::set(&self.broker, request.into_inner()).await.map(Response::new)
    }

    async fn delete_link(
        &self,
        request: Request<v1::DeleteLinkRequest>,
    ) -> Result<Response<v1::DeleteLinkResponse>, Status> {
        allow(&request, &[CONTROL])?;
        links::delete(&self.broker, &request.into_inner().peer).await.map(Response::new)
    }
}

impl Calls {
    fn info(&self) -> v1::ClusterInfoResponse {
        let (identity, config) = (&self.broker.identity, &self.broker.config);
        let kafka = self.broker.listeners.iter().find(|listener| !listener.internal && !listener.raw);
        v1::ClusterInfoResponse {
            region: identity.region.to_string(),
            region_id: identity.region_id.to_string(),
            cluster_id: identity.cluster_id.to_string(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            kafka_address: kafka
                .map(|listener| address(&listener.advertised_host, listener.advertised_port))
                .unwrap_or_default(),
            lane_router_address: config.lane_shared_address.clone(),
            metrics_address: config.http_bind.clone(),
            lane_routers: self.directory.routers().len() as u32,
        }
    }

    fn message(&self, lane: &LaneObject) -> v1::Lane {
        LaneMessages { host: self.broker.config.lane_host.clone() }.lane(lane)
    }
}

/// Lanes as clients are told of them.
struct LaneMessages {
    host: String,
}

impl LaneMessages {
    fn lane(&self, lane: &LaneObject) -> v1::Lane {
        let ppe = Lane::parse(&lane.name).is_ok_and(|lane| lane.is_ppe());
        let class = if ppe { v1::LaneClass::Ppe } else { v1::LaneClass::Boe };
        v1::Lane {
            name: lane.name.clone(),
            class: class.into(),
            port: lane.port.into(),
            address: if lane.port == 0 { String::new() } else { address(&self.host, lane.port) },
            created_ms: lane.created_ms,
            deleting: lane.deleting,
            grace_seconds: lane.settings.grace_seconds,
            principals: lane.settings.principals.clone(),
        }
    }

    fn set(&self, set: &LaneSet) -> v1::LaneSet {
        let lanes = set.lanes.values().map(|lane| self.lane(lane)).collect();
        v1::LaneSet { generation: set.generation, lanes }
    }
}

/// One lane-router's connection: sets out, reports in, until either side ends.
struct RouterSession {
    session: directory::Session,
    address: String,
    lanes: watch::Receiver<LaneSet>,
    message: LaneMessages,
}

impl RouterSession {
    async fn run(
        mut self,
        mut reports: Streaming<v1::LaneRouterReport>,
        sets: mpsc::Sender<Result<v1::LaneSet, Status>>,
    ) {
        info!("lane-router {} connected", self.address);
        self.lanes.mark_changed();
        loop {
            tokio::select! {
                changed = self.lanes.changed() => {
                    let set = self.message.set(&self.lanes.borrow_and_update());
                    if changed.is_err() || sets.send(Ok(set)).await.is_err() {
                        break;
                    }
                }
                report = reports.message() => match report {
                    Ok(Some(report)) => {
                        let failures = report.failures.into_iter().map(|failure| (failure.lane, failure.reason));
                        self.session.report(report.generation, failures.collect());
                    }
                    Ok(None) => break,
                    Err(error) => {
                        warn!("lane-router {}: {}", self.address, error.message());
                        break;
                    }
                },
            }
        }
        info!("lane-router {} gone", self.address);
    }
}

fn allow<T>(request: &Request<T>, names: &[&str]) -> Result<(), Status> {
    match request.extensions().get::<Caller>() {
        Some(Caller::Local) => Ok(()),
        Some(caller) if caller.common_name().is_some_and(|name| names.contains(&name)) => Ok(()),
        caller => {
            let name = caller.and_then(Caller::common_name).unwrap_or("nobody").to_owned();
            let allowed = names.join(" or ");
            Err(Status::permission_denied(format!(
                "this call needs a certificate of {allowed}; the caller's names {name}"
            )))
        }
    }
}

/// HOST:PORT, with an IPv6 address in brackets.
fn address(host: &str, port: u16) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

fn parse_lane(name: &str) -> Result<Lane, Status> {
    Lane::parse(name).map_err(|error| Status::invalid_argument(error.to_string()))
}

fn check_class(lane: &Lane, class: v1::LaneClass) -> Result<(), Status> {
    let (named, other) = match lane.class() {
        LaneClass::Boe => ("boe", v1::LaneClass::Ppe),
        LaneClass::Ppe => ("ppe", v1::LaneClass::Boe),
    };
    if class == other {
        return Err(Status::invalid_argument(format!(
            "lane {lane} is of class {named} by its name: a name that begins with ppe is of class ppe, any \
             other of class boe"
        )));
    }
    Ok(())
}

/// Names that a certificate can carry, and not more of them than a person means.
fn checked(principals: Vec<String>) -> Result<Vec<String>, Status> {
    let is_one = |name: &String| !name.is_empty() && name.len() <= PRINCIPAL_BYTES_MAX;
    if principals.len() > PRINCIPALS_MAX || !principals.iter().all(is_one) {
        return Err(Status::invalid_argument(format!(
            "principals: at most {PRINCIPALS_MAX} names of 1 to {PRINCIPAL_BYTES_MAX} bytes"
        )));
    }
    Ok(principals)
}

const PRINCIPALS_MAX: usize = 64;
const PRINCIPAL_BYTES_MAX: usize = 256;

fn status(error: DirectoryError) -> Status {
    let text = error.to_string();
    match error {
        DirectoryError::Exists(_) => Status::already_exists(text),
        DirectoryError::Deleting(_) | DirectoryError::Router { .. } => Status::failed_precondition(text),
        DirectoryError::Others { .. } | DirectoryError::Unheard(_) => Status::unavailable(text),
        DirectoryError::Unknown(_) => Status::not_found(text),
        DirectoryError::PortsTaken { .. } => Status::resource_exhausted(text),
        DirectoryError::Meta { .. } | DirectoryError::Damaged(..) => Status::internal(text),
    }
}

/// Common names that may call.
const CONTROL: &str = "sealane-control";
const LANE_ROUTER: &str = "sealane-lane-router";
const BROKER: &str = "sealane-broker";
const STREAMS_PER_CONNECTION_MAX: u32 = 64;
const KEEPALIVE: std::time::Duration = std::time::Duration::from_secs(10);
