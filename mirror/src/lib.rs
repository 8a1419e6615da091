//! Links between regions over QUIC: what the peer lacks is sent, what it sends is applied once.
