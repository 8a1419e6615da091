//! Pure decisions of the broker: partition fold, producer state, groups, retention.
