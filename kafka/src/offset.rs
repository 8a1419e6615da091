//! Numbers that must not be mixed up: offsets, epochs, indexes, ids, times.
//!
//! Each is a newtype over the integer of the wire. Arithmetic is spelled out at the call, so that
//! an offset never travels as a bare `i64`.

macro_rules! number {
    ($(#[$doc:meta])* $name:ident, $int:ty) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub $int);

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

number!(
    /// Position of a record in a partition, from 0.
    Offset,
    i64
);
number!(
    /// Term of a partition's owner; -1 means "not known".
    LeaderEpoch,
    i32
);
number!(
    /// Number of a partition in its topic, from 0.
    PartitionIndex,
    i32
);
number!(
    /// Number of a broker in its cluster.
    BrokerId,
    i32
);
number!(
    /// Identity of an idempotent producer; -1 means "none".
    ProducerId,
    i64
);
number!(
    /// Incarnation of a producer id; -1 means "none".
    ProducerEpoch,
    i16
);
number!(
    /// Milliseconds since the Unix epoch; -1 means "none".
    TimestampMs,
    i64
);

impl Offset {
    pub const ZERO: Offset = Offset(0);

    /// The offset `n` records later.
    pub fn plus(self, n: i64) -> Offset {
        Offset(self.0 + n)
    }
}

impl LeaderEpoch {
    pub const NONE: LeaderEpoch = LeaderEpoch(-1);
}

impl ProducerId {
    pub const NONE: ProducerId = ProducerId(-1);
}

impl TimestampMs {
    pub const NONE: TimestampMs = TimestampMs(-1);
}
