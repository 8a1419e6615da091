//! `sealane group`: list and describe, with members, positions and lag.

use std::collections::BTreeMap;

use anyhow::bail;
use bytes::{Buf as _, Bytes};
use kafka::messages::offset_fetch_request::OffsetFetchRequestGroup;
use kafka::messages::{
    ConsumerProtocolAssignment, DescribeGroupsRequest, GroupId, ListGroupsRequest, OffsetFetchRequest,
};
use kafka_client::ClientError;
use kafka_protocol::protocol::Decodable as _;
use serde::Serialize;

use crate::args::{Group, ListArgs, Named};
use crate::output::{Table, known, non_negative, show};
use crate::region::{EARLIEST, LATEST, Region, text};

pub async fn run(command: Group) -> anyhow::Result<()> {
    match command {
        Group::List(args) => list(args).await,
        Group::Describe(args) => describe(args).await,
    }
}

#[derive(Serialize)]
struct Listed {
    group: String,
    state: String,
    protocol_type: String,
}

async fn list(args: ListArgs) -> anyhow::Result<()> {
    let region = Region::new(&args.server)?;
    let mut groups = BTreeMap::new();
    for (id, _) in region.kafka.brokers().await? {
        let answer = region.kafka.broker(id).await?.call(&ListGroupsRequest::default()).await?;
        ClientError::check(|| "groups".to_owned(), answer.error_code, None)?;
        for group in answer.groups {
            let listed = Listed {
                group: group.group_id.to_string(),
                state: group.group_state.to_string(),
                protocol_type: group.protocol_type.to_string(),
            };
            groups.insert(listed.group.clone(), listed);
        }
    }
    let groups: Vec<Listed> = groups.into_values().collect();
    show(args.output.output, &groups, || {
        let mut table = Table::new(&["GROUP", "STATE", "TYPE"]);
        for group in &groups {
            table.row([group.group.clone(), group.state.clone(), group.protocol_type.clone()]);
        }
        if table.is_empty() { "no groups\n".to_owned() } else { table.text() }
    })?;
    Ok(())
}

#[derive(Serialize)]
struct Described {
    group: String,
    state: String,
    assignor: String,
    members: Vec<Member>,
    positions: Vec<Position>,
}

#[derive(Serialize)]
struct Member {
    id: String,
    instance: Option<String>,
    client_id: String,
    host: String,
    /// Topic and partition.
    assigned: Vec<(String, i32)>,
}

#[derive(Serialize)]
struct Position {
    topic: String,
    partition: i32,
    committed: Option<i64>,
    log_end: Option<i64>,
    lag: Option<i64>,
    /// Client id of the member that has the partition.
    owner: Option<String>,
}

async fn describe(args: Named) -> anyhow::Result<()> {
    let region = Region::new(&args.server)?;
    let coordinator = region.kafka.coordinator(&args.name).await?;
    let group = GroupId(text(&args.name));
    let request = DescribeGroupsRequest::default().with_groups(vec![group.clone()]);
    let answer = coordinator.call(&request).await?;
    let Some(found) = answer.groups.into_iter().next() else { bail!("group {}: no answer", args.name) };
    let message = found.error_message.as_ref().map(ToString::to_string);
    ClientError::check(|| format!("group {}", args.name), found.error_code, message)?;
    if found.group_state.as_str() == "Dead" {
        bail!("group {} does not exist; `sealane group list` shows what there is", args.name);
    }
    let members: Vec<Member> = found
        .members
        .iter()
        .map(|member| Member {
            id: member.member_id.to_string(),
            instance: member.group_instance_id.as_ref().map(ToString::to_string),
            client_id: member.client_id.to_string(),
            host: member.client_host.to_string(),
            assigned: assigned(&member.member_assignment),
        })
        .collect();
    let positions = positions(&region, &coordinator, group, &members).await?;
    let described = Described {
        group: args.name.clone(),
        state: found.group_state.to_string(),
        assignor: found.protocol_data.to_string(),
        members,
        positions,
    };
    show(args.output.output, &described, || description(&described))?;
    Ok(())
}

/// Positions of everything the group has committed or been assigned.
async fn positions(
    region: &Region,
    coordinator: &kafka_client::Connection,
    group: GroupId,
    members: &[Member],
) -> anyhow::Result<Vec<Position>> {
    let mut committed = committed(coordinator, group).await?;
    for (topic, partition) in members.iter().flat_map(|member| &member.assigned) {
        committed.entry((topic.clone(), *partition)).or_insert(-1);
    }
    let mut positions = Vec::new();
    for ((topic, partition), offset) in committed {
        // A topic may be gone by now: its position is still shown.
        let end = region.offsets(&topic, &[partition], LATEST).await.ok();
        let end = end.and_then(|offsets| offsets.get(&partition).copied());
        let lag = match (end, non_negative(offset)) {
            (Some(end), Some(offset)) => Some((end - offset).max(0)),
            (Some(end), None) => {
                let start = region.offsets(&topic, &[partition], EARLIEST).await.ok();
                start.and_then(|offsets| offsets.get(&partition).map(|start| end - start))
            }
            (None, _) => None,
        };
        let owner = members.iter().find(|member| member.assigned.contains(&(topic.clone(), partition)));
        let owner = owner.map(|member| member.client_id.clone());
        positions.push(Position {
            topic,
            partition,
            committed: non_negative(offset),
            log_end: end,
            lag,
            owner,
        });
    }
    Ok(positions)
}

async fn committed(
    coordinator: &kafka_client::Connection,
    group: GroupId,
) -> anyhow::Result<BTreeMap<(String, i32), i64>> {
    let version = coordinator.version_of::<OffsetFetchRequest>(9)?;
    let mut request = OffsetFetchRequest::default();
    if version >= 8 {
        request.groups = vec![OffsetFetchRequestGroup::default().with_group_id(group).with_topics(None)];
    } else {
        request.group_id = group;
        request.topics = None;
    }
    let answer = coordinator.call_at(version, &request).await?;
    let what = || "committed offsets".to_owned();
    ClientError::check(what, answer.error_code, None)?;
    let mut offsets = BTreeMap::new();
    for topic in answer.topics {
        for partition in topic.partitions {
            offsets.insert((topic.name.to_string(), partition.partition_index), partition.committed_offset);
        }
    }
    for group in answer.groups {
        ClientError::check(what, group.error_code, None)?;
        for topic in group.topics {
            for partition in topic.partitions {
                offsets
                    .insert((topic.name.to_string(), partition.partition_index), partition.committed_offset);
            }
        }
    }
    Ok(offsets)
}

/// Reads a member's assignment; empty where it is of another protocol.
fn assigned(bytes: &Bytes) -> Vec<(String, i32)> {
    let mut bytes = bytes.clone();
    if bytes.len() < 2 {
        return Vec::new();
    }
    let version = bytes.get_i16().clamp(0, 3);
    let Ok(assignment) = ConsumerProtocolAssignment::decode(&mut bytes, version) else { return Vec::new() };
    let topics = assignment.assigned_partitions.into_iter();
    topics
        .flat_map(|topic| {
            let name = topic.topic.to_string();
            topic.partitions.into_iter().map(move |partition| (name.clone(), partition))
        })
        .collect()
}

fn description(group: &Described) -> String {
    let assignor = if group.assignor.is_empty() { "none" } else { &group.assignor };
    let mut out = format!("group {}  state {}  assignor {assignor}\n", group.group, group.state);
    let mut members = Table::new(&["MEMBER", "CLIENT", "HOST", "PARTITIONS"]);
    for member in &group.members {
        let partitions = member.assigned.len().to_string();
        members.row([member.id.clone(), member.client_id.clone(), member.host.clone(), partitions]);
    }
    let mut positions = Table::new(&["TOPIC", "PARTITION", "COMMITTED", "LOG END", "LAG", "CLIENT"]);
    for position in &group.positions {
        positions.row([
            position.topic.clone(),
            position.partition.to_string(),
            position.committed.map_or("-".to_owned(), |offset| offset.to_string()),
            known(position.log_end),
            known(position.lag),
            position.owner.clone().unwrap_or("-".to_owned()),
        ]);
    }
    for table in [members, positions] {
        if !table.is_empty() {
            out.push('\n');
            out.push_str(&table.text());
        }
    }
    out
}
