//! What is asked of a shard, and what it answers.

use broker_core::group::{InstanceId, JoinReply, JoinRequest, Leaver, MemberId, SyncReply, SyncRequest};
use broker_core::offsets_log::CommittedOffset;
use bytes::Bytes;
use kafka::{ErrorCode, GroupId, PartitionIndex, TopicName};
use tokio::sync::oneshot;

use crate::api::Principal;

/// A partition of a topic, as a key of commits.
pub type TopicPartition = (TopicName, PartitionIndex);

/// Who sends: a member of a generation, or (all empty, -1) a tool.
#[derive(Clone, Debug)]
pub struct Sender {
    pub member: Option<MemberId>,
    pub instance: Option<InstanceId>,
    pub generation: i32,
}

/// One code for each partition asked about, or one for all.
pub type OffsetsDeleted = Result<Vec<(TopicPartition, ErrorCode)>, ErrorCode>;

/// One code for each leaver, or one for all.
pub type Left = Result<Vec<ErrorCode>, ErrorCode>;

/// What is committed for each partition asked about; `None` is nothing.
pub type OffsetsFound = Result<Vec<(TopicPartition, Option<CommittedOffset>)>, ErrorCode>;

/// Requests to a shard, each with the place for its answer.
#[derive(Debug)]
pub enum Message {
    Join {
        group: GroupId,
        principal: Principal,
        request: JoinRequest,
        reply: oneshot::Sender<JoinReply>,
    },
    Sync {
        group: GroupId,
        principal: Principal,
        request: SyncRequest,
        reply: oneshot::Sender<SyncReply>,
    },
    Heartbeat {
        group: GroupId,
        principal: Principal,
        sender: Sender,
        reply: oneshot::Sender<ErrorCode>,
    },
    Leave {
        group: GroupId,
        leavers: Vec<Leaver>,
        reply: oneshot::Sender<Left>,
    },
    Commit {
        group: GroupId,
        sender: Sender,
        offsets: Vec<(TopicPartition, CommittedOffset)>,
        reply: oneshot::Sender<Result<(), ErrorCode>>,
    },
    /// `None`: all that the group has.
    FetchOffsets {
        group: GroupId,
        wanted: Option<Vec<TopicPartition>>,
        reply: oneshot::Sender<OffsetsFound>,
    },
    DeleteOffsets {
        group: GroupId,
        which: Vec<TopicPartition>,
        reply: oneshot::Sender<OffsetsDeleted>,
    },
    DeleteGroup {
        group: GroupId,
        reply: oneshot::Sender<ErrorCode>,
    },
    Describe {
        group: GroupId,
        reply: oneshot::Sender<Result<Description, ErrorCode>>,
    },
    List {
        reply: oneshot::Sender<Result<Vec<Listed>, ErrorCode>>,
    },
    /// Forget every offset on the topic; answered when that is durable.
    TopicDeleted {
        topic: TopicName,
        reply: oneshot::Sender<Result<(), ErrorCode>>,
    },
    /// Look for lapsed offsets now; answered when what was found is gone.
    Expire {
        reply: oneshot::Sender<()>,
    },
}

/// A group as ListGroups shows it.
#[derive(Clone, Debug, PartialEq)]
pub struct Listed {
    pub group: GroupId,
    pub protocol_type: String,
    pub state: &'static str,
}

/// A group as DescribeGroups shows it.
#[derive(Clone, Debug, PartialEq)]
pub struct Description {
    pub state: &'static str,
    pub protocol_type: String,
    pub protocol: String,
    pub members: Vec<MemberDescription>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct MemberDescription {
    pub member: MemberId,
    pub instance: Option<InstanceId>,
    pub client_id: String,
    pub host: String,
    /// Both empty unless the group is stable.
    pub metadata: Bytes,
    pub assignment: Bytes,
}

impl Message {
    /// Answers with `error` and nothing else.
    pub(super) fn refuse(self, error: ErrorCode) {
        // Whoever asked may have gone; nothing is lost with the answer.
        match self {
            Message::Join { request, reply, .. } => {
                let _ = reply.send(JoinReply::error(error, request.member.as_ref()));
            }
            Message::Sync { reply, .. } => {
                let _ = reply.send(SyncReply::error(error));
            }
            // While a group loads its members are not to be alarmed: Kafka does the same.
            Message::Heartbeat { reply, .. } if error == ErrorCode::CoordinatorLoadInProgress => {
                let _ = reply.send(ErrorCode::None);
            }
            Message::Heartbeat { reply, .. } | Message::DeleteGroup { reply, .. } => {
                let _ = reply.send(error);
            }
            Message::Leave { reply, .. } => {
                let _ = reply.send(Err(error));
            }
            Message::Commit { reply, .. } | Message::TopicDeleted { reply, .. } => {
                let _ = reply.send(Err(error));
            }
            Message::FetchOffsets { reply, .. } => {
                let _ = reply.send(Err(error));
            }
            Message::DeleteOffsets { reply, .. } => {
                let _ = reply.send(Err(error));
            }
            Message::Describe { reply, .. } => {
                let _ = reply.send(Err(error));
            }
            Message::List { reply } => {
                let _ = reply.send(Err(error));
            }
            Message::Expire { reply } => {
                let _ = reply.send(());
            }
        }
    }
}
