//! The control service between the command line, the lane-router and the broker: gRPC types and a
//! client.
//!
//! Owns the messages (`proto/control.proto`) and how a client connects. What the calls do is the
//! broker's. Plain on loopback; mutual TLS everywhere else.

mod connect;

pub use connect::{ConnectError, TlsPaths, TlsPem, connect, connect_pem, peer};

/// Messages, the client and the server trait, as generated.
#[allow(clippy::doc_lazy_continuation, clippy::large_enum_variant)]
pub mod v1 {
    tonic::include_proto!("sealane.control.v1");
}

/// What brokers of a cluster tell each other, as generated from `proto/peers.proto`.
#[allow(clippy::doc_lazy_continuation, clippy::large_enum_variant)]
pub mod peers {
    tonic::include_proto!("sealane.peers.v1");

    pub use peers_client::PeersClient;
    pub use peers_server::{Peers, PeersServer};
}

pub use v1::control_client::ControlClient;
pub use v1::control_server::{Control, ControlServer};

/// A connected client.
pub type Client = ControlClient<tonic::transport::Channel>;

/// A client of another broker.
pub type PeerClient = peers::PeersClient<tonic::transport::Channel>;
