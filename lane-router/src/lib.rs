//! The entry to a lane: a Kafka-aware proxy that stamps records and renames groups.
