//! Membership of consumer groups: JoinGroup, SyncGroup, Heartbeat, LeaveGroup; and looking at groups:
//! ListGroups, DescribeGroups, DeleteGroups. Decides what a request must bring; the rest is the
//! coordinator's.

use std::time::Duration;

use broker_core::group::{
    InstanceId, JoinReply, JoinRequest, Leaver, MemberId, Protocol, SyncReply, SyncRequest,
};
use bytes::Bytes;
use futures_util::future::{BoxFuture, join_all};
use kafka::cold::decode;
use kafka::frame::RequestHeader;
use kafka::messages::delete_groups_response::DeletableGroupResult;
use kafka::messages::describe_groups_response::{DescribedGroup, DescribedGroupMember};
use kafka::messages::join_group_response::JoinGroupResponseMember;
use kafka::messages::leave_group_response::MemberResponse;
use kafka::messages::list_groups_response::ListedGroup;
use kafka::messages::{
    DeleteGroupsRequest, DeleteGroupsResponse, DescribeGroupsRequest, DescribeGroupsResponse,
    HeartbeatRequest, HeartbeatResponse, JoinGroupRequest, JoinGroupResponse, LeaveGroupRequest,
    LeaveGroupResponse, ListGroupsRequest, ListGroupsResponse, SyncGroupRequest, SyncGroupResponse,
};
use kafka::{ErrorCode, GroupId, StrBytes};

use super::{Answer, Body, Ctx, Principal};
use crate::coordinator::{self, Description, Listed, Message, Sender};

/// Longest group id: it must fit a record of `__consumer_offsets`.
const GROUP_ID_MAX: usize = i16::MAX as usize;

pub fn join(ctx: &Ctx, header: &RequestHeader, body: Bytes) -> Answer {
    let version = header.api_version;
    let request: JoinGroupRequest = match decode(version, body) {
        Ok(request) => request,
        Err(error) => return Answer::malformed(header, error),
    };
    let (group, member) = match checked_join(ctx, &request) {
        Ok(checked) => checked,
        Err(error) => {
            let member = MemberId::parse(&request.member_id);
            return Answer::message(
                &join_response(JoinReply::error(error, member.as_ref()), version),
                version,
            );
        }
    };
    let client_id = header.client_id.as_deref().unwrap_or_default().to_owned();
    let instance = request.group_instance_id.as_deref().map(InstanceId::new);
    let prefix = instance.as_ref().map_or(client_id.as_str(), InstanceId::as_str);
    let request = JoinRequest {
        member,
        fresh_id: ctx.broker.coordinator.fresh_member_id(prefix),
        instance,
        client_host: format!("/{}", ctx.connection.peer.ip()),
        session_timeout: millis(request.session_timeout_ms),
        // Version 0 has no timeout of its own for rebalances.
        rebalance_timeout: millis(match version {
            0 => request.session_timeout_ms,
            _ => request.rebalance_timeout_ms,
        }),
        protocol_type: request.protocol_type.to_string(),
        protocols: request
            .protocols
            .into_iter()
            .map(|p| Protocol { name: p.name.to_string(), metadata: p.metadata })
            .collect(),
        client_id,
        id_required: version >= 4,
        may_skip_assignment: version >= 9,
    };
    let ctx = ctx.clone();
    Answer::Later(Box::pin(async move {
        let member = request.member.clone();
        let reply = async {
            coordinator::ensure(&ctx.broker).await?;
            let principal = ctx.connection.principal.clone();
            let ask = |reply| Message::Join { group: group.clone(), principal, request, reply };
            ctx.broker.coordinator.ask(&group, ask).await
        };
        let reply = reply.await.unwrap_or_else(|error| JoinReply::error(error, member.as_ref()));
        Body::message(&join_response(reply, version), version)
    }))
}

fn checked_join(ctx: &Ctx, request: &JoinGroupRequest) -> Result<(GroupId, Option<MemberId>), ErrorCode> {
    let group = member_group(ctx, &request.group_id)?;
    if !ctx.broker.coordinator.config().session_timeout_ms.contains(&request.session_timeout_ms) {
        return Err(ErrorCode::InvalidSessionTimeout);
    }
    let too_long = |text: &str| text.len() > GROUP_ID_MAX;
    let mut texts =
        [&*request.member_id, &*request.protocol_type, request.group_instance_id.as_deref().unwrap_or("")]
            .into_iter()
            .chain(request.protocols.iter().map(|p| &*p.name));
    if texts.any(too_long) {
        return Err(ErrorCode::InvalidRequest);
    }
    Ok((group, MemberId::parse(&request.member_id)))
}

fn join_response(reply: JoinReply, version: i16) -> JoinGroupResponse {
    let member = |m: broker_core::group::JoinedMember| {
        JoinGroupResponseMember::default()
            .with_member_id(text(m.id.as_str()))
            .with_group_instance_id(m.instance.as_ref().map(|i| text(i.as_str())))
            .with_metadata(m.metadata)
    };
    let protocol = reply.protocol.map(StrBytes::from_string);
    JoinGroupResponse::default()
        .with_error_code(reply.error.code())
        .with_generation_id(reply.generation)
        .with_protocol_type(reply.protocol_type.map(StrBytes::from_string))
        // Before version 7 there is no null.
        .with_protocol_name(if version < 7 { Some(protocol.unwrap_or_default()) } else { protocol })
        .with_leader(reply.leader.map(|l| text(l.as_str())).unwrap_or_default())
        .with_skip_assignment(reply.skip_assignment && version >= 9)
        .with_member_id(reply.member.map(|m| text(m.as_str())).unwrap_or_default())
        .with_members(reply.members.into_iter().map(member).collect())
}

pub fn sync(ctx: &Ctx, header: &RequestHeader, body: Bytes) -> Answer {
    let version = header.api_version;
    let request: SyncGroupRequest = match decode(version, body) {
        Ok(request) => request,
        Err(error) => return Answer::malformed(header, error),
    };
    let refused = |error| Answer::message(&sync_response(SyncReply::error(error)), version);
    let group = match member_group(ctx, &request.group_id) {
        Ok(group) => group,
        Err(error) => return refused(error),
    };
    let Some(member) = MemberId::parse(&request.member_id) else {
        return refused(ErrorCode::UnknownMemberId);
    };
    if version >= 5 && (request.protocol_type.is_none() || request.protocol_name.is_none()) {
        return refused(ErrorCode::InconsistentGroupProtocol);
    }
    let assigned = request.assignments.into_iter();
    let request = SyncRequest {
        member,
        instance: request.group_instance_id.as_deref().map(InstanceId::new),
        generation: request.generation_id,
        protocol_type: request.protocol_type.map(|t| t.to_string()),
        protocol: request.protocol_name.map(|p| p.to_string()),
        assignments: assigned.filter_map(|a| Some((MemberId::parse(&a.member_id)?, a.assignment))).collect(),
    };
    let principal = ctx.connection.principal.clone();
    let ask = |reply| Message::Sync { group: group.clone(), principal, request, reply };
    let asked = ctx.broker.coordinator.ask(&group, ask);
    Answer::Later(Box::pin(async move {
        let reply = asked.await.unwrap_or_else(SyncReply::error);
        Body::message(&sync_response(reply), version)
    }))
}

fn sync_response(reply: SyncReply) -> SyncGroupResponse {
    SyncGroupResponse::default()
        .with_error_code(reply.error.code())
        .with_protocol_type(reply.protocol_type.map(StrBytes::from_string))
        .with_protocol_name(reply.protocol.map(StrBytes::from_string))
        .with_assignment(reply.assignment)
}

pub fn heartbeat(ctx: &Ctx, header: &RequestHeader, body: Bytes) -> Answer {
    let version = header.api_version;
    let request: HeartbeatRequest = match decode(version, body) {
        Ok(request) => request,
        Err(error) => return Answer::malformed(header, error),
    };
    let response = |error: ErrorCode| HeartbeatResponse::default().with_error_code(error.code());
    let group = match member_group(ctx, &request.group_id) {
        Ok(group) => group,
        Err(error) => return Answer::message(&response(error), version),
    };
    let sender = Sender {
        member: MemberId::parse(&request.member_id),
        instance: request.group_instance_id.as_deref().map(InstanceId::new),
        generation: request.generation_id,
    };
    let principal = ctx.connection.principal.clone();
    let ask = |reply| Message::Heartbeat { group: group.clone(), principal, sender, reply };
    let asked = ctx.broker.coordinator.ask(&group, ask);
    Answer::Later(Box::pin(async move {
        Body::message(&response(asked.await.unwrap_or_else(|error| error)), version)
    }))
}

pub fn leave(ctx: &Ctx, header: &RequestHeader, body: Bytes) -> Answer {
    let version = header.api_version;
    let request: LeaveGroupRequest = match decode(version, body) {
        Ok(request) => request,
        Err(error) => return Answer::malformed(header, error),
    };
    let named: Vec<(StrBytes, Option<StrBytes>)> = match version {
        0..=2 => vec![(request.member_id, None)],
        _ => request.members.into_iter().map(|m| (m.member_id, m.group_instance_id)).collect(),
    };
    let group = match member_group(ctx, &request.group_id) {
        Ok(group) => group,
        Err(error) => {
            return Answer::message(&LeaveGroupResponse::default().with_error_code(error.code()), version);
        }
    };
    let leaver = |(member, instance): &(StrBytes, Option<StrBytes>)| Leaver {
        member: MemberId::parse(member),
        instance: instance.as_deref().map(InstanceId::new),
    };
    let leavers: Vec<Leaver> = named.iter().map(leaver).collect();
    let asked =
        ctx.broker.coordinator.ask(&group, |reply| Message::Leave { group: group.clone(), leavers, reply });
    Answer::Later(Box::pin(async move {
        let response = match asked.await.and_then(|codes| codes) {
            Ok(codes) => leave_response(named, codes, version),
            Err(error) => LeaveGroupResponse::default().with_error_code(error.code()),
        };
        Body::message(&response, version)
    }))
}

fn leave_response(
    named: Vec<(StrBytes, Option<StrBytes>)>,
    codes: Vec<ErrorCode>,
    version: i16,
) -> LeaveGroupResponse {
    // Before version 3 there is one member, and its code is the answer's.
    if version < 3 {
        let code = codes.first().copied().unwrap_or(ErrorCode::None);
        return LeaveGroupResponse::default().with_error_code(code.code());
    }
    let member = |((member, instance), code): ((StrBytes, Option<StrBytes>), ErrorCode)| {
        MemberResponse::default()
            .with_member_id(member)
            .with_group_instance_id(instance)
            .with_error_code(code.code())
    };
    LeaveGroupResponse::default().with_members(named.into_iter().zip(codes).map(member).collect())
}

pub fn list(ctx: &Ctx, header: &RequestHeader, body: Bytes) -> Answer {
    let version = header.api_version;
    let request: ListGroupsRequest = match decode(version, body) {
        Ok(request) => request,
        Err(error) => return Answer::malformed(header, error),
    };
    let broker = ctx.broker.clone();
    Answer::Later(Box::pin(async move {
        let wanted = |group: &Listed| {
            let among = |filter: &[StrBytes], is: &str| {
                filter.is_empty() || filter.iter().any(|wanted| wanted.eq_ignore_ascii_case(is))
            };
            among(&request.states_filter, group.state) && among(&request.types_filter, CLASSIC)
        };
        let listed = |group: Listed| {
            ListedGroup::default()
                .with_group_id(text(group.group.as_str()).into())
                .with_protocol_type(StrBytes::from_string(group.protocol_type))
                .with_group_state(StrBytes::from_static_str(group.state))
                .with_group_type(StrBytes::from_static_str(CLASSIC))
        };
        let response = match broker.coordinator.list().await {
            Ok(groups) => {
                let groups = groups.into_iter().filter(wanted).map(listed);
                ListGroupsResponse::default().with_groups(groups.collect())
            }
            Err(error) => ListGroupsResponse::default().with_error_code(error.code()),
        };
        Body::message(&response, version)
    }))
}

pub fn describe(ctx: &Ctx, header: &RequestHeader, body: Bytes) -> Answer {
    let version = header.api_version;
    let request: DescribeGroupsRequest = match decode(version, body) {
        Ok(request) => request,
        Err(error) => return Answer::malformed(header, error),
    };
    let operations = if request.include_authorized_operations { GROUP_OPERATIONS } else { i32::MIN };
    let coordinator = &ctx.broker.coordinator;
    let asked = request.groups.into_iter().map(|id| {
        let group = GroupId::new(&id.0);
        let asked: BoxFuture<'static, Result<Description, ErrorCode>> = match coordinator.is_serving() {
            true => {
                let asked =
                    coordinator.ask(&group, |reply| Message::Describe { group: group.clone(), reply });
                Box::pin(async move { asked.await.and_then(|description| description) })
            }
            false => Box::pin(std::future::ready(Err(ErrorCode::GroupIdNotFound))),
        };
        async move { described(id.0, asked.await, version).with_authorized_operations(operations) }
    });
    let asked = join_all(asked.collect::<Vec<_>>());
    Answer::Later(Box::pin(async move {
        Body::message(&DescribeGroupsResponse::default().with_groups(asked.await), version)
    }))
}

fn described(id: StrBytes, found: Result<Description, ErrorCode>, version: i16) -> DescribedGroup {
    let group = DescribedGroup::default().with_group_id(id.clone().into());
    match found {
        Ok(found) => group
            .with_group_state(StrBytes::from_static_str(found.state))
            .with_protocol_type(StrBytes::from_string(found.protocol_type))
            .with_protocol_data(StrBytes::from_string(found.protocol))
            .with_members(found.members.into_iter().map(described_member).collect()),
        // A group that is not there is "Dead"; from version 6 on that is an error (KIP-1043).
        Err(ErrorCode::GroupIdNotFound) => {
            let dead = group.with_group_state(StrBytes::from_static_str("Dead"));
            if version < 6 {
                return dead;
            }
            dead.with_error_code(ErrorCode::GroupIdNotFound.code())
                .with_error_message(Some(StrBytes::from_string(format!("Group {} not found.", &*id))))
        }
        Err(error) => group.with_error_code(error.code()),
    }
}

fn described_member(member: coordinator::MemberDescription) -> DescribedGroupMember {
    DescribedGroupMember::default()
        .with_member_id(text(member.member.as_str()))
        .with_group_instance_id(member.instance.as_ref().map(|i| text(i.as_str())))
        .with_client_id(StrBytes::from_string(member.client_id))
        .with_client_host(StrBytes::from_string(member.host))
        .with_member_metadata(member.metadata)
        .with_member_assignment(member.assignment)
}

pub fn delete(ctx: &Ctx, header: &RequestHeader, body: Bytes) -> Answer {
    let version = header.api_version;
    let request: DeleteGroupsRequest = match decode(version, body) {
        Ok(request) => request,
        Err(error) => return Answer::malformed(header, error),
    };
    let ctx = ctx.clone();
    Answer::Later(Box::pin(async move {
        let deleted = request.groups_names.into_iter().map(|id| {
            let ctx = ctx.clone();
            async move {
                let code = delete_one(&ctx, &id.0).await.unwrap_or_else(|error| error);
                DeletableGroupResult::default().with_group_id(id).with_error_code(code.code())
            }
        });
        let results = join_all(deleted.collect::<Vec<_>>()).await;
        Body::message(&DeleteGroupsResponse::default().with_results(results), version)
    }))
}

async fn delete_one(ctx: &Ctx, id: &StrBytes) -> Result<ErrorCode, ErrorCode> {
    let group = changed_group(ctx, id)?;
    if !ctx.broker.coordinator.is_serving() {
        return Err(ErrorCode::GroupIdNotFound);
    }
    ctx.broker.coordinator.ask(&group, |reply| Message::DeleteGroup { group: group.clone(), reply }).await
}

/// The only type of group so far.
const CLASSIC: &str = "classic";

/// READ, DELETE, DESCRIBE, DESCRIBE_CONFIGS and ALTER_CONFIGS: what Kafka knows for groups.
const GROUP_OPERATIONS: i32 = 1 << 3 | 1 << 6 | 1 << 8 | 1 << 10 | 1 << 11;

/// A group that can have members must have a name.
fn member_group(ctx: &Ctx, id: &StrBytes) -> Result<GroupId, ErrorCode> {
    if id.is_empty() {
        return Err(ErrorCode::InvalidGroupId);
    }
    changed_group(ctx, id)
}

/// A group that this connection may change. The names of a lane's groups are the lane-router's, which
/// speaks for them on the internal listener; to everybody else they are no legal names.
pub(super) fn changed_group(ctx: &Ctx, id: &StrBytes) -> Result<GroupId, ErrorCode> {
    let group = group_id(id)?;
    if !ctx.connection.listener.internal {
        ctx.broker.coordinator.observer().admits(&group, &Principal::Anonymous)?;
    }
    Ok(group)
}

/// A group that offsets are looked up for; Kafka allows it no name.
pub(super) fn group_id(id: &StrBytes) -> Result<GroupId, ErrorCode> {
    if id.len() > GROUP_ID_MAX { Err(ErrorCode::InvalidGroupId) } else { Ok(GroupId::new(id)) }
}

pub(super) fn text(text: &str) -> StrBytes {
    StrBytes::from_string(text.to_owned())
}

/// Negative means nothing.
fn millis(millis: i32) -> Duration {
    Duration::from_millis(u64::try_from(millis).unwrap_or(0))
}
