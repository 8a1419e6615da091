//! The control service between the command line, the lane-router and the broker: gRPC types and a
//! client.
//!
//! Owns the messages (`proto/control.proto`) and how a client connects. What the calls do is the
//! broker's. Plain on loopback; mutual TLS everywhere else.

mod connect;

pub use connect::{ConnectError, TlsPaths, connect};

/// Messages, the client and the server trait, as generated.
#[allow(clippy::doc_lazy_continuation, clippy::large_enum_variant)]
pub mod v1 {
    tonic::include_proto!("sealane.control.v1");
}

pub use v1::control_client::ControlClient;
pub use v1::control_server::{Control, ControlServer};

/// A connected client.
pub type Client = ControlClient<tonic::transport::Channel>;
