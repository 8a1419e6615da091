//! Between what brokers say to each other and what they mean.

use control::peers as said;
use kafka::{GroupId, Offset, PartitionIndex, TopicId, TopicName};
use lane_core::{Lane, View};
use tonic::Status;
use uuid::Uuid;

use crate::api::Principal;
use crate::lanes::Place;

/// What is told of a group: its view, and who reads what for it.
pub type GroupWords = said::GroupViews;

pub fn offset(offset: i64) -> Option<Offset> {
    (offset >= 0).then_some(Offset(offset))
}

pub fn number(offset: Option<Offset>) -> i64 {
    offset.map_or(-1, |offset| offset.0)
}

pub fn topic(name: &str) -> Result<TopicName, Status> {
    TopicName::parse(name).map_err(|error| Status::invalid_argument(error.to_string()))
}

pub fn topic_id(id: &str) -> Result<TopicId, Status> {
    Uuid::parse_str(id).map(TopicId).map_err(|_| Status::invalid_argument(format!("{id:?} is no topic id")))
}

pub fn lane(name: &str) -> Result<Lane, Status> {
    Lane::parse(name).map_err(|error| Status::invalid_argument(error.to_string()))
}

pub fn place(said: Option<said::TopicPartition>) -> Result<Place, Status> {
    let said = said.ok_or_else(|| Status::invalid_argument("no partition is named"))?;
    let index = PartitionIndex(said.partition);
    Ok(Place { topic: topic(&said.topic)?, topic_id: topic_id(&said.topic_id)?, index })
}

pub fn said_place(place: &Place) -> said::TopicPartition {
    said::TopicPartition {
        topic: place.topic.to_string(),
        topic_id: place.topic_id.0.to_string(),
        partition: place.index.0,
    }
}

/// The view of a group: `base` in `lane`, or outside every lane.
pub fn view(group: &str, base: &str, name: &str) -> Result<View, Status> {
    Ok(match name {
        "" => View::Baseline(GroupId::new(group)),
        name => View::Lane(GroupId::new(base), lane(name)?),
    })
}

pub fn principal(said: Option<&said::Principal>) -> Option<Principal> {
    said.map(|said| match &said.common_name {
        Some(name) => Principal::Certificate(name.as_str().into()),
        None => Principal::Anonymous,
    })
}

pub fn said_principal(principal: Option<&Principal>) -> Option<said::Principal> {
    principal.map(|principal| said::Principal {
        common_name: match principal {
            Principal::Certificate(name) => Some(name.to_string()),
            Principal::Anonymous => None,
        },
    })
}

/// Partitions by topic.
pub fn shares<'a>(
    partitions: impl IntoIterator<Item = &'a (TopicName, PartitionIndex)>,
) -> Vec<said::TopicShare> {
    let mut shares: Vec<said::TopicShare> = Vec::new();
    for (topic, index) in partitions {
        match shares.iter_mut().find(|share| share.topic == topic.as_str()) {
            Some(share) => share.partitions.push(index.0),
            None => shares.push(said::TopicShare { topic: topic.to_string(), partitions: vec![index.0] }),
        }
    }
    shares
}

pub fn partitions(shares: &[said::TopicShare]) -> Result<Vec<(TopicName, PartitionIndex)>, Status> {
    let mut all = Vec::new();
    for share in shares {
        let topic = topic(&share.topic)?;
        all.extend(share.partitions.iter().map(|index| (topic.clone(), PartitionIndex(*index))));
    }
    Ok(all)
}
