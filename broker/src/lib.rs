//! The Kafka-compatible broker: server, API handlers, partitions, groups, lanes.
