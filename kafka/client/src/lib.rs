//! One Kafka connection, one Kafka cluster, as a client.
