//! The control service between the command line, the lane-router and the broker: gRPC types.
