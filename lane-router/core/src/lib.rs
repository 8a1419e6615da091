//! Pure rules of lanes: the lane of a record, ownership intervals, view filter, renaming.
