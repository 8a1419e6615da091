//! Real processes, real clients, faults.
