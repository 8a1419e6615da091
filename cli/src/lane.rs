//! `sealane lane`: create, list, status, doctor, delete, through the region's control service.
//! What it tells is the service's; here it only gets columns and sentences.

use control::v1;
use serde::Serialize;

use crate::args::{Lane, LaneClassArg, LaneCreate, ListArgs, Named};
use crate::output::{Table, known, non_negative, show};
use crate::region::Region;
use crate::topic::plural;

pub async fn run(command: Lane) -> anyhow::Result<()> {
    match command {
        Lane::Create(args) => create(args).await,
        Lane::List(args) => list(args).await,
        Lane::Status(args) => status(args).await,
        Lane::Doctor(args) => doctor(args).await,
        Lane::Delete(args) => delete(args).await,
    }
}

#[derive(Serialize)]
struct Row {
    lane: String,
    class: &'static str,
    address: String,
    deleting: bool,
}

impl From<v1::Lane> for Row {
    fn from(lane: v1::Lane) -> Row {
        Row {
            class: if lane.class() == v1::LaneClass::Ppe { "ppe" } else { "boe" },
            lane: lane.name,
            address: lane.address,
            deleting: lane.deleting,
        }
    }
}

async fn create(args: LaneCreate) -> anyhow::Result<()> {
    let mut control = Region::new(&args.server)?.control().await?;
    let class = match args.class {
        None => v1::LaneClass::Unspecified,
        Some(LaneClassArg::Boe) => v1::LaneClass::Boe,
        Some(LaneClassArg::Ppe) => v1::LaneClass::Ppe,
    };
    let request = v1::CreateLaneRequest { name: args.name, class: class.into(), ..Default::default() };
    let answer = control.create_lane(request).await?.into_inner();
    for warning in answer.warnings {
        eprintln!("warning: {warning}");
    }
    let row = Row::from(answer.lane.unwrap_or_default());
    show(args.output.output, &row, || format!("{}\n", row.address))?;
    Ok(())
}

async fn list(args: ListArgs) -> anyhow::Result<()> {
    let mut control = Region::new(&args.server)?.control().await?;
    let answer = control.list_lanes(v1::ListLanesRequest {}).await?.into_inner();
    let rows: Vec<Row> = answer.lanes.into_iter().map(Row::from).collect();
    show(args.output.output, &rows, || {
        let mut table = Table::new(&["LANE", "CLASS", "ADDRESS", ""]);
        for row in &rows {
            let note = if row.deleting { "being deleted" } else { "" };
            table.row([row.lane.clone(), row.class.to_owned(), row.address.clone(), note.to_owned()]);
        }
        if table.is_empty() { "no lanes\n".to_owned() } else { table.text() }
    })?;
    Ok(())
}

#[derive(Serialize)]
struct Status {
    lane: Row,
    lane_routers: u32,
    groups: Vec<GroupPartition>,
    partitions: Vec<Partition>,
}

#[derive(Serialize)]
struct GroupPartition {
    group: String,
    topic: String,
    partition: i32,
    state: &'static str,
    activated_offset: i64,
    deactivated_offset: Option<i64>,
    committed_offset: Option<i64>,
    waiting_records: Option<i64>,
}

#[derive(Serialize)]
struct Partition {
    topic: String,
    partition: i32,
    records: Option<i64>,
}

async fn status(args: Named) -> anyhow::Result<()> {
    let mut control = Region::new(&args.server)?.control().await?;
    let answer = control.lane_status(v1::LaneStatusRequest { name: args.name }).await?.into_inner();
    let group = |group: v1::LaneGroupPartition| GroupPartition {
        state: match group.state() {
            v1::lane_group_partition::State::Active => "active",
            v1::lane_group_partition::State::Grace => "grace",
            v1::lane_group_partition::State::Closed => "closed",
        },
        group: group.group,
        topic: group.topic,
        partition: group.partition,
        activated_offset: group.activated_offset,
        deactivated_offset: non_negative(group.deactivated_offset),
        committed_offset: non_negative(group.committed_offset),
        waiting_records: non_negative(group.waiting_records),
    };
    let partition = |partition: v1::LanePartition| Partition {
        topic: partition.topic,
        partition: partition.partition,
        records: non_negative(partition.records),
    };
    let status = Status {
        lane: Row::from(answer.lane.unwrap_or_default()),
        lane_routers: answer.lane_routers,
        groups: answer.groups.into_iter().map(group).collect(),
        partitions: answer.partitions.into_iter().map(partition).collect(),
    };
    show(args.output.output, &status, || description(&status))?;
    Ok(())
}

fn description(status: &Status) -> String {
    let lane = &status.lane;
    let mut out = format!(
        "lane {}  class {}  address {}  lane-routers {}\n",
        lane.lane, lane.class, lane.address, status.lane_routers
    );
    let mut groups =
        Table::new(&["GROUP", "TOPIC", "PARTITION", "STATE", "FROM", "TO", "COMMITTED", "WAITING"]);
    for group in &status.groups {
        groups.row([
            group.group.clone(),
            group.topic.clone(),
            group.partition.to_string(),
            group.state.to_owned(),
            group.activated_offset.to_string(),
            group.deactivated_offset.map_or("-".to_owned(), |offset| offset.to_string()),
            group.committed_offset.map_or("-".to_owned(), |offset| offset.to_string()),
            known(group.waiting_records),
        ]);
    }
    let mut partitions = Table::new(&["TOPIC", "PARTITION", "RECORDS"]);
    for partition in &status.partitions {
        let row = [partition.topic.clone(), partition.partition.to_string(), known(partition.records)];
        partitions.row(row);
    }
    for table in [groups, partitions] {
        if !table.is_empty() {
            out.push('\n');
            out.push_str(&table.text());
        }
    }
    out
}

#[derive(Serialize)]
struct Findings {
    topics_with_lanes: u32,
    bypassing_groups: Vec<Bypassing>,
    readers_without_group: Vec<Groupless>,
    groups_of_one_client_id: Vec<Alike>,
}

#[derive(Serialize)]
struct Bypassing {
    group: String,
    topic: String,
    partitions: u32,
}

#[derive(Serialize)]
struct Groupless {
    client_id: String,
    topic: String,
}

#[derive(Serialize)]
struct Alike {
    client_id: String,
    topic: String,
    groups: [String; 2],
    same_host: bool,
    stops: bool,
}

impl From<v1::LaneDoctorResponse> for Findings {
    fn from(found: v1::LaneDoctorResponse) -> Findings {
        let bypassing =
            |g: v1::BypassingGroup| Bypassing { group: g.group, topic: g.topic, partitions: g.partitions };
        let groupless = |r: v1::GrouplessReader| Groupless { client_id: r.client_id, topic: r.topic };
        let alike = |a: v1::LikeNamedGroups| Alike {
            client_id: a.client_id,
            topic: a.topic,
            groups: [a.group, a.other_group],
            same_host: a.same_host,
            stops: a.stops,
        };
        Findings {
            topics_with_lanes: found.topics,
            bypassing_groups: found.bypassing.into_iter().map(bypassing).collect(),
            readers_without_group: found.groupless.into_iter().map(groupless).collect(),
            groups_of_one_client_id: found.alike.into_iter().map(alike).collect(),
        }
    }
}

async fn doctor(args: ListArgs) -> anyhow::Result<()> {
    let mut control = Region::new(&args.server)?.control().await?;
    let answer = control.lane_doctor(v1::LaneDoctorRequest {}).await?.into_inner();
    let findings = Findings::from(answer);
    show(args.output.output, &findings, || diagnosis(&findings))?;
    Ok(())
}

fn diagnosis(findings: &Findings) -> String {
    let mut bypassing = Table::new(&["GROUP", "TOPIC", "PARTITIONS"]);
    for found in &findings.bypassing_groups {
        bypassing.row([found.group.clone(), found.topic.clone(), found.partitions.to_string()]);
    }
    let mut groupless = Table::new(&["CLIENT ID", "TOPIC"]);
    for found in &findings.readers_without_group {
        groupless.row([found.client_id.clone(), found.topic.clone()]);
    }
    let mut alike = Table::new(&["CLIENT ID", "TOPIC", "GROUP", "OTHER GROUP", "WHAT COMES OF IT"]);
    for found in &findings.groups_of_one_client_id {
        let effect = match (found.same_host, found.stops) {
            (false, _) => "told apart by their addresses only",
            (true, true) => "neither makes progress: one is in a PPE lane",
            (true, false) => "records of lanes that belong to either are shown to both",
        };
        let [group, other] = found.groups.clone();
        alike.row([found.client_id.clone(), found.topic.clone(), group, other, effect.to_owned()]);
    }
    let told = [
        (
            bypassing,
            "groups that commit without ever having had a member (assign()); they see baseline records only",
        ),
        (groupless, "clients that read without a group; they see baseline records only"),
        (alike, "groups whose consumers share a client.id; give each consumer its own"),
    ];
    let told = told.into_iter().filter(|(table, _)| !table.is_empty());
    let parts: Vec<String> = told.map(|(table, about)| format!("{about}\n{}", table.text())).collect();
    match parts.is_empty() {
        true => {
            format!("nothing found on {} with lanes\n", plural(findings.topics_with_lanes as i32, "topic"))
        }
        false => parts.join("\n"),
    }
}

#[derive(Serialize)]
struct Deleted {
    lane: String,
    hidden_records: Option<i64>,
}

async fn delete(args: Named) -> anyhow::Result<()> {
    let mut control = Region::new(&args.server)?.control().await?;
    let request = v1::DeleteLaneRequest { name: args.name.clone() };
    let answer = control.delete_lane(request).await?.into_inner();
    let deleted = Deleted { lane: args.name, hidden_records: non_negative(answer.hidden_records) };
    show(args.output.output, &deleted, || match deleted.hidden_records {
        Some(count) if count > 0 => {
            format!("lane {} deleted, {count} records of it are hidden\n", deleted.lane)
        }
        _ => format!("lane {} deleted\n", deleted.lane),
    })?;
    Ok(())
}
