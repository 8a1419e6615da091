//! How one region joins another with a token that is good once: one question and one answer over TLS.
//!
//! The accepting region's operator serves it (`join/server.rs`), the joining region's asks (`join/client.rs`). The joining
//! side knows the SHA-256 of the accepting region's authority from the token's Secret, and takes no other; it shows no
//! certificate, because it has none that the other side could know: the token speaks for it. Neither learns anything of the
//! other's Kubernetes. What is said is in docs/PROTOCOL-LINK.md, "Joining".

mod client;
mod server;
mod wire;

pub use client::{JoinError, ask};
pub use server::{Asked, Doors, serve};
pub use wire::{Answer, Refusal, Request};

use std::fmt;

/// SHA-256 of an authority's certificate, written `sha256:` and 64 hexadecimal digits.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Fingerprint([u8; 32]);

impl Fingerprint {
    /// Of a certificate in DER.
    pub fn of(certificate: &[u8]) -> Fingerprint {
        let digest = ring::digest::digest(&ring::digest::SHA256, certificate);
        let mut bytes = [0; 32];
        bytes.copy_from_slice(digest.as_ref());
        Fingerprint(bytes)
    }

    pub fn parse(text: &str) -> Option<Fingerprint> {
        let digits = text.strip_prefix("sha256:")?;
        if digits.len() != 64 || !digits.is_ascii() {
            return None;
        }
        let mut bytes = [0; 32];
        for (at, byte) in bytes.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&digits[2 * at..2 * at + 2], 16).ok()?;
        }
        Some(Fingerprint(bytes))
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(to, "sha256:")?;
        self.0.iter().try_for_each(|byte| write!(to, "{byte:02x}"))
    }
}

/// Name of the certificate that the door of one grant shows, by which a joining region says whom it means.
pub fn door_name(namespace: &str, cluster: &str) -> String {
    format!("{cluster}.{namespace}.join.sealane")
}

/// What both sides speak in the handshake.
const ALPN: &[u8] = b"sealane-join";

#[cfg(test)]
mod tests;
