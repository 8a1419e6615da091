//! `sealane lane`: create, list, status, delete, through the region's control service.

use control::v1;
use serde::Serialize;

use crate::args::{Lane, LaneClassArg, LaneCreate, ListArgs, Named};
use crate::output::{Table, known, non_negative, show};
use crate::region::Region;

pub async fn run(command: Lane) -> anyhow::Result<()> {
    match command {
        Lane::Create(args) => create(args).await,
        Lane::List(args) => list(args).await,
        Lane::Status(args) => status(args).await,
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
    let request = v1::CreateLaneRequest { name: args.name, class: class.into() };
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
