//! The two seams under the broker: segment store and metadata store, and their implementations.
