//! `sealane cluster`: the brokers of a region's cluster, what each owns, and what shall move.

use control::v1;
use serde::Serialize;

use crate::args::{ClusterCommand, ClusterDrain, ClusterMove, ListArgs};
use crate::output::{Table, bytes, show};
use crate::region::Region;

#[derive(Serialize)]
struct Status {
    cluster_id: String,
    /// `null`: nobody is.
    controller: Option<i32>,
    brokers: Vec<Broker>,
    unowned_partitions: u32,
    moving: Vec<Moving>,
}

#[derive(Serialize)]
struct Broker {
    id: i32,
    address: String,
    roles: String,
    draining: bool,
    life: u64,
    partitions: u32,
    taking_over: u32,
    /// `null`: only the broker that answers knows its own.
    log: Option<Log>,
}

#[derive(Serialize)]
struct Log {
    bytes: u64,
    memory_bytes: u64,
    flushes: u64,
    objects: u64,
}

#[derive(Serialize)]
struct Moving {
    topic: String,
    partition: i32,
    owner: i32,
    moving_to: i32,
    epoch: i32,
}

pub async fn run(command: ClusterCommand) -> anyhow::Result<()> {
    match command {
        ClusterCommand::Status(args) => status(args).await,
        ClusterCommand::Move(args) => move_one(args).await,
        ClusterCommand::Drain(args) => drain(args).await,
    }
}

async fn status(args: ListArgs) -> anyhow::Result<()> {
    let mut control = Region::new(&args.server)?.control().await?;
    let answer = control.cluster_status(v1::ClusterStatusRequest {}).await?.into_inner();
    let status = Status::from(answer);
    show(args.output.output, &status, || status.text())?;
    Ok(())
}

async fn move_one(args: ClusterMove) -> anyhow::Result<()> {
    let mut control = Region::new(&args.server)?.control().await?;
    let ClusterMove { topic, partition, to, .. } = args;
    control.move_partition(v1::MovePartitionRequest { topic: topic.clone(), partition, to }).await?;
    println!("{topic}-{partition} is on its way to broker {to}; `sealane cluster status` shows it");
    Ok(())
}

async fn drain(args: ClusterDrain) -> anyhow::Result<()> {
    let mut control = Region::new(&args.server)?.control().await?;
    let (broker, drain) = (args.broker, !args.undo);
    control.drain_broker(v1::DrainBrokerRequest { broker, drain }).await?;
    match drain {
        true => {
            println!("broker {broker} gives away what it owns; `sealane cluster status` shows what is left")
        }
        false => println!("broker {broker} takes part again"),
    }
    Ok(())
}

impl From<v1::ClusterStatusResponse> for Status {
    fn from(answer: v1::ClusterStatusResponse) -> Status {
        let broker = |broker: v1::BrokerStatus| Broker {
            id: broker.id,
            address: broker.address,
            roles: broker.roles,
            draining: broker.draining,
            life: broker.life,
            partitions: broker.partitions,
            taking_over: broker.taking_over,
            log: broker.log.map(|log| Log {
                bytes: log.bytes,
                memory_bytes: log.memory_bytes,
                flushes: log.flushes,
                objects: log.objects,
            }),
        };
        let moving = |partition: v1::PartitionStatus| Moving {
            topic: partition.topic,
            partition: partition.partition,
            owner: partition.owner,
            moving_to: partition.moving_to,
            epoch: partition.epoch,
        };
        Status {
            cluster_id: answer.cluster_id,
            controller: (answer.controller >= 0).then_some(answer.controller),
            brokers: answer.brokers.into_iter().map(broker).collect(),
            unowned_partitions: answer.unowned,
            moving: answer.moving.into_iter().map(moving).collect(),
        }
    }
}

impl Status {
    fn text(&self) -> String {
        let controller = self.controller.map_or("nobody".to_owned(), |id| format!("broker {id}"));
        let mut out = format!("cluster {}, controller: {controller}\n\n", self.cluster_id);
        let mut table =
            Table::new(&["BROKER", "ADDRESS", "ROLES", "LIFE", "PARTITIONS", "TAKING OVER", "LOG"]);
        for broker in &self.brokers {
            let id =
                if broker.draining { format!("{} (draining)", broker.id) } else { broker.id.to_string() };
            table.row([
                id,
                broker.address.clone(),
                broker.roles.clone(),
                broker.life.to_string(),
                broker.partitions.to_string(),
                broker.taking_over.to_string(),
                broker.log.as_ref().map_or("-".to_owned(), |log| bytes(log.bytes)),
            ]);
        }
        out.push_str(&table.text());
        if self.unowned_partitions > 0 {
            out.push_str(&format!("\n{} partitions of no broker that is alive\n", self.unowned_partitions));
        }
        for m in &self.moving {
            out.push_str(&format!(
                "{}-{} moves from broker {} to broker {}\n",
                m.topic, m.partition, m.owner, m.moving_to
            ));
        }
        out
    }
}
