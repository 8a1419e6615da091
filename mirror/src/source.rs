//! Reading what originated here: one read at a time, over all partitions that may be read.
//!
//! Which partitions and how much is the link's decision (`Link::wishes`). A read that waits is ended
//! early by another request of the same session, so new wishes never wait for it.

use futures_util::future::BoxFuture;
use kafka::Offset;
use kafka::private::{FetchAnswer, FetchFrom, FetchOutcome, FetchRequest, LinkPolicy, MIRROR_FETCH};

use crate::link::{Sub, Wish};
use crate::local::{Local, LocalError, read};

/// How long a read waits at the broker when there is nothing; news ends it at once.
const WAIT_MS: u32 = 5_000;

/// The reading side of one link session.
pub struct Source {
    local: Local,
    session: u64,
    pass_boe: bool,
    pass_ppe: bool,
}

/// What a read found: for whom, from where, what.
pub type Found = Vec<(Sub, Offset, FetchOutcome)>;

impl Source {
    pub fn new(local: Local, policy: &LinkPolicy) -> Source {
        let session = uuid::Uuid::new_v4().as_u64_pair().0;
        Source { local, session, pass_boe: policy.boe_lanes, pass_ppe: policy.ppe_lanes }
    }

    /// Begins a read; it waits at the broker until there is something.
    pub fn read(&self, wishes: Vec<Wish>, bytes_max: u32) -> BoxFuture<'static, Result<Found, LocalError>> {
        let subs: Vec<(Sub, Offset)> = wishes.iter().map(|wish| (wish.sub, wish.from.from)).collect();
        let request = self.request(wishes.into_iter().map(|wish| wish.from).collect(), bytes_max);
        let local = self.local.clone();
        Box::pin(async move {
            let answer: FetchAnswer = read(MIRROR_FETCH, local.start(MIRROR_FETCH, &request).await?).await?;
            let found = answer.partitions.into_iter().filter_map(|fetched| {
                let (sub, from) = *subs.get(fetched.index as usize)?;
                Some((sub, from, fetched.outcome))
            });
            Ok(found.collect())
        })
    }

    /// Ends the read that waits.
    pub fn wake(&self) -> BoxFuture<'static, Result<(), LocalError>> {
        let request = self.request(Vec::new(), 0);
        let local = self.local.clone();
        Box::pin(async move {
            read::<FetchAnswer>(MIRROR_FETCH, local.start(MIRROR_FETCH, &request).await?).await.map(|_| ())
        })
    }

    fn request(&self, partitions: Vec<FetchFrom>, bytes_max: u32) -> FetchRequest {
        FetchRequest {
            session: self.session,
            wait_ms: WAIT_MS,
            bytes_max,
            pass_boe: self.pass_boe,
            pass_ppe: self.pass_ppe,
            partitions,
        }
    }
}
