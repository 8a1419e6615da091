//! The other brokers of a cluster, as lanes need them: whom to ask for a partition, and how to reach him.
//!
//! Who is alive and who owns what is the cluster's view. A call has a deadline; what becomes of it is the
//! caller's to judge, because an owner may be another one by then.

mod calls;
mod gather;
pub mod words;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use broker_store::{MetaError, MetaStore};
use chassis::tls::TlsFiles;
use control::{PeerClient, TlsPaths};
use kafka::{PartitionIndex, TopicId, TopicName};
use parking_lot::Mutex;
use tokio::sync::watch;
use tonic::{Code, Response, Status};

use crate::cluster::{self, Cluster, View};
use crate::topics::{Topic, TopicRegistry};

pub use calls::{Marker, Markers, TRY_AGAIN, Tell, Told};
pub use gather::{Covered, Incomplete};
pub use words::GroupWords;

/// The way to the other brokers.
pub struct Peers {
    me: i32,
    cluster: Arc<Cluster>,
    topics: Arc<TopicRegistry>,
    meta: Arc<dyn MetaStore>,
    tls: Option<TlsFiles>,
    clients: Mutex<HashMap<i32, Known>>,
}

struct Known {
    address: String,
    client: PeerClient,
}

/// How long one call may take.
pub const CALL_MAX: Duration = Duration::from_secs(5);
/// Largest message between brokers: markers of all partitions that one of them owns.
pub const MESSAGE_BYTES_MAX: usize = 64 << 20;

impl Peers {
    pub fn new(
        cluster: Arc<Cluster>,
        topics: Arc<TopicRegistry>,
        meta: Arc<dyn MetaStore>,
        tls: Option<TlsFiles>,
    ) -> Arc<Peers> {
        Arc::new(Peers { me: cluster.me, cluster, topics, meta, tls, clients: Mutex::default() })
    }

    pub fn view(&self) -> Arc<View> {
        self.cluster.views.now()
    }

    /// A number that grows with every change of the view.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.cluster.views.changes()
    }

    /// A number that grows with every change of a topic.
    pub fn topic_changes(&self) -> watch::Receiver<u64> {
        self.topics.changes()
    }

    pub fn topic(&self, name: &TopicName) -> Option<Arc<Topic>> {
        self.topics.by_name(name.as_str())
    }

    pub fn topics_with_lanes(&self) -> Vec<Arc<Topic>> {
        self.topics.all().into_iter().filter(|topic| topic.settings.lanes).collect()
    }

    /// The other brokers that are alive, and the lives that they lead.
    pub fn others(&self) -> Vec<(i32, u64)> {
        let view = self.view();
        view.brokers.iter().filter(|(id, _)| **id != self.me).map(|(id, broker)| (*id, broker.life)).collect()
    }

    /// Who owns a partition; none if nobody who is alive does.
    pub fn owner(&self, topic: TopicId, index: PartitionIndex) -> Option<i32> {
        self.view().leader(topic, index.0).map(|(owner, _)| owner)
    }

    pub fn is_me(&self, broker: i32) -> bool {
        broker == self.me
    }

    /// The epochs of the partitions of `__consumer_offsets` as the metadata store has them now.
    pub async fn shard_epochs(&self) -> Result<BTreeMap<usize, i32>, MetaError> {
        cluster::shard_epochs(&*self.meta, &self.topics).await
    }

    /// The brokers that are alive as the metadata store has them now.
    pub async fn stored_brokers(&self) -> Result<Vec<(i32, u64)>, MetaError> {
        cluster::stored_brokers(&*self.meta).await
    }

    /// Calls a broker. A connection that failed is made anew at the next call.
    pub async fn ask<T, F>(&self, broker: i32, call: impl FnOnce(PeerClient) -> F) -> Result<T, Status>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        self.ask_within(CALL_MAX, broker, call).await
    }

    async fn ask_within<T, F>(
        &self,
        patience: Duration,
        broker: i32,
        call: impl FnOnce(PeerClient) -> F,
    ) -> Result<T, Status>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        let client = self.client(broker)?;
        let failed = match tokio::time::timeout(patience, call(client)).await {
            Ok(Ok(answer)) => return Ok(answer.into_inner()),
            Ok(Err(status)) => status,
            Err(_) => Status::deadline_exceeded(format!("broker {broker} does not answer")),
        };
        if matches!(failed.code(), Code::Unavailable | Code::DeadlineExceeded | Code::Unknown) {
            self.clients.lock().remove(&broker);
        }
        Err(failed)
    }

    fn client(&self, broker: i32) -> Result<PeerClient, Status> {
        let gone = || Status::unavailable(format!("broker {broker} is not alive"));
        let address = self.view().brokers.get(&broker).map(|known| known.control.clone()).ok_or_else(gone)?;
        let mut clients = self.clients.lock();
        if let Some(known) = clients.get(&broker).filter(|known| known.address == address) {
            return Ok(known.client.clone());
        }
        let tls = match &self.tls {
            None => None,
            Some(files) => {
                let missing = || {
                    Status::failed_precondition("control_tls.ca is not set: brokers cannot call each other")
                };
                let ca = files.ca.as_deref().ok_or_else(missing)?;
                Some(TlsPaths { ca, cert: &files.cert, key: &files.key })
            }
        };
        let client = control::peer(&address, tls, MESSAGE_BYTES_MAX)
            .map_err(|error| Status::unavailable(format!("broker {broker}: {error}")))?
            .max_encoding_message_size(MESSAGE_BYTES_MAX);
        clients.insert(broker, Known { address, client: client.clone() });
        Ok(client)
    }
}
