//! The leader-epoch list of a partition: under which epoch each offset was written (KIP-101).
//!
//! An entry says "from this offset on, this epoch". Answers OffsetForLeaderEpoch.

use kafka::{LeaderEpoch, Offset};

use crate::fold::{Decoder, FoldError};

/// Ascending in epoch and in start offset.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Epochs {
    starts: Vec<(LeaderEpoch, Offset)>,
}

impl Epochs {
    /// Notes that the batch at `offset` carries `epoch`; older epochs change nothing.
    pub fn apply(&mut self, epoch: LeaderEpoch, offset: Offset) {
        if self.starts.last().is_none_or(|(last, _)| *last < epoch) {
            self.starts.push((epoch, offset));
        }
    }

    /// The largest known epoch that is at most `asked`, and where it ended: the start of the next
    /// known epoch, or `log_end` for the current one. `None` if nothing that old is known.
    pub fn end_of(&self, asked: LeaderEpoch, log_end: Offset) -> Option<(LeaderEpoch, Offset)> {
        let after = self.starts.partition_point(|(epoch, _)| *epoch <= asked);
        let end = self.starts.get(after).map_or(log_end, |(_, start)| *start);
        match after.checked_sub(1) {
            Some(i) => Some((self.starts[i].0, end)),
            // Below the first known epoch: Kafka answers the asked epoch with the first start.
            None if after < self.starts.len() => Some((asked, end)),
            None => None,
        }
    }

    /// The epoch of the record at `offset`.
    pub fn at(&self, offset: Offset) -> Option<LeaderEpoch> {
        let after = self.starts.partition_point(|(_, start)| *start <= offset);
        after.checked_sub(1).map(|i| self.starts[i].0)
    }

    pub fn latest(&self) -> Option<LeaderEpoch> {
        self.starts.last().map(|(epoch, _)| *epoch)
    }

    /// Drops what lies wholly below the log start; the epoch in force there begins at it.
    pub fn trim(&mut self, log_start: Offset) {
        let after = self.starts.partition_point(|(_, start)| *start <= log_start);
        if after > 1 {
            self.starts.drain(..after - 1);
        }
        if let Some(first) = self.starts.first_mut() {
            first.1 = first.1.max(log_start);
        }
    }

    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&(self.starts.len() as u32).to_be_bytes());
        for (epoch, start) in &self.starts {
            out.extend_from_slice(&epoch.0.to_be_bytes());
            out.extend_from_slice(&start.0.to_be_bytes());
        }
    }

    pub(crate) fn decode(input: &mut Decoder<'_>) -> Result<Epochs, FoldError> {
        let count = input.u32()?;
        let mut starts = Vec::new();
        for _ in 0..count {
            starts.push((LeaderEpoch(input.i32()?), Offset(input.i64()?)));
        }
        Ok(Epochs { starts })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_epoch_ends_where_the_next_begins() {
        let mut epochs = Epochs::default();
        epochs.apply(LeaderEpoch(1), Offset(0));
        epochs.apply(LeaderEpoch(1), Offset(5));
        epochs.apply(LeaderEpoch(4), Offset(10));
        let end = Offset(20);
        assert_eq!(epochs.end_of(LeaderEpoch(0), end), Some((LeaderEpoch(0), Offset(0))));
        assert_eq!(epochs.end_of(LeaderEpoch(1), end), Some((LeaderEpoch(1), Offset(10))));
        assert_eq!(epochs.end_of(LeaderEpoch(3), end), Some((LeaderEpoch(1), Offset(10))));
        assert_eq!(epochs.end_of(LeaderEpoch(4), end), Some((LeaderEpoch(4), end)));
        assert_eq!(epochs.at(Offset(9)), Some(LeaderEpoch(1)));
        assert_eq!(epochs.at(Offset(10)), Some(LeaderEpoch(4)));
    }

    #[test]
    fn trimming_keeps_the_epoch_in_force_at_the_log_start() {
        let mut epochs = Epochs::default();
        epochs.apply(LeaderEpoch(1), Offset(0));
        epochs.apply(LeaderEpoch(2), Offset(10));
        epochs.trim(Offset(12));
        assert_eq!(epochs.at(Offset(12)), Some(LeaderEpoch(2)));
        // Below the log start the answer is where the next known epoch starts.
        assert_eq!(epochs.end_of(LeaderEpoch(1), Offset(20)), Some((LeaderEpoch(1), Offset(12))));
    }
}
