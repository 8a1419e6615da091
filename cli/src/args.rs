//! The command line as a person types it: every command, option and default.
//! What a command does is in the file of its name.

mod link;

use std::path::PathBuf;

use chassis::telemetry::LogFormat;
use clap::{Args, Parser, Subcommand, ValueEnum};

pub use link::{Link, LinkChange, LinkCongestion, LinkLanes, LinkPeer, LinkSet};

/// With what it was built beside what every build has.
const VERSION: &str = match (cfg!(feature = "cluster"), cfg!(feature = "operator")) {
    (false, false) => env!("CARGO_PKG_VERSION"),
    (true, false) => concat!(env!("CARGO_PKG_VERSION"), " (cluster)"),
    (false, true) => concat!(env!("CARGO_PKG_VERSION"), " (operator)"),
    (true, true) => concat!(env!("CARGO_PKG_VERSION"), " (cluster, operator)"),
};

/// Sealane: a multi-region, Kafka-compatible message queue.
#[derive(Debug, Parser)]
#[command(
    name = "sealane",
    version = VERSION,
    propagate_version = true,
    max_term_width = 100,
    disable_help_subcommand = true
)]
#[command(after_help = "Try it:\n  sealane local                          two regions on this machine\n  \
    echo hello | sealane produce greetings                                  into the first region\n  \
    sealane consume greetings --from-beginning --server 127.0.0.1:9192      from the second")]
pub struct Cli {
    /// Levels of the log on standard error, such as `info` or `warn,broker=debug` [default: `info`
    /// for a service, `warn` else]
    #[arg(long, global = true, env = "SEALANE_LOG", value_name = "LEVELS", help_heading = "Log")]
    pub log: Option<String>,
    /// How log lines look
    #[arg(long, global = true, value_name = "FORMAT", default_value = "text", help_heading = "Log")]
    pub log_format: LogStyle,
    /// Send logs and spans to this OpenTelemetry collector too (OTLP over gRPC)
    #[cfg(feature = "otel")]
    #[arg(long, global = true, env = "SEALANE_OTLP", value_name = "URL", help_heading = "Log")]
    pub otlp: Option<String>,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run all regions in this process, on this machine: for development and to try it out
    Local(Local),
    /// Run a broker
    Broker(Service),
    /// Run a mirror: the links of this region to other regions; see and change what crosses them
    Mirror(MirrorCommand),
    /// Run a lane-router: the entry of a lane's workloads
    LaneRouter(Service),
    /// Make, list and delete lanes, and see what they hold
    #[command(subcommand)]
    Lane(Lane),
    /// Make, list, change and delete topics
    #[command(subcommand)]
    Topic(Topic),
    /// List consumer groups, and see their members and lag
    #[command(subcommand)]
    Group(Group),
    /// See the brokers of a cluster and what each owns; move a partition, empty a broker
    #[command(subcommand)]
    Cluster(ClusterCommand),
    /// Send lines of standard input to a topic, a record each
    Produce(Produce),
    /// Print the records of a topic
    Consume(Consume),
    /// Run the Kubernetes operator
    #[cfg(feature = "operator")]
    Operator(OperatorService),
    /// Judge files of Sealane's Kubernetes resources as the API server would, without one
    #[cfg(feature = "operator")]
    Lint(Lint),
    /// Print the definitions of Sealane's Kubernetes resources, for `kubectl apply -f -`
    #[cfg(feature = "operator")]
    Crds,
}

#[cfg(feature = "operator")]
#[derive(Debug, Args)]
pub struct OperatorService {
    /// Configuration file (TOML); every key has a default
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Print the full default configuration with comments, and end
    #[arg(long)]
    pub print_config: bool,
}

#[cfg(feature = "operator")]
#[derive(Debug, Args)]
pub struct Lint {
    /// YAML or JSON files
    #[arg(required = true, value_name = "FILE")]
    pub files: Vec<PathBuf>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum LogStyle {
    Text,
    Json,
}

impl From<LogStyle> for LogFormat {
    fn from(style: LogStyle) -> LogFormat {
        match style {
            LogStyle::Text => LogFormat::Text,
            LogStyle::Json => LogFormat::Json,
        }
    }
}

#[derive(Debug, Subcommand)]
pub enum ClusterCommand {
    /// Brokers, partitions per broker, lives, what is moving
    Status(ListArgs),
    /// Hand one partition to another broker; no byte is copied
    Move(ClusterMove),
    /// Give away all that a broker owns, before it is stopped for good
    Drain(ClusterDrain),
}

#[derive(Debug, Args)]
pub struct ClusterMove {
    /// Name of the topic
    pub topic: String,
    /// Number of the partition
    pub partition: i32,
    /// Id of the broker that shall own it
    pub to: i32,
    #[command(flatten)]
    pub server: Server,
}

#[derive(Debug, Args)]
pub struct ClusterDrain {
    /// Id of the broker
    pub broker: i32,
    /// Let it take part again
    #[arg(long)]
    pub undo: bool,
    #[command(flatten)]
    pub server: Server,
}

#[derive(Debug, Args)]
pub struct Local {
    /// Directory for everything that is kept; the next start finds it again
    #[arg(long, value_name = "DIR", default_value = "./sealane-data")]
    pub data: PathBuf,
    /// Keep nothing: data goes to a temporary directory that is deleted at the end
    #[arg(long, conflicts_with = "data")]
    pub ephemeral: bool,
    /// Names of the regions
    #[arg(long, value_name = "NAMES", value_delimiter = ',', default_value = "east,west")]
    pub regions: Vec<String>,
    /// Kafka port of the first region; the next regions follow in steps of 100
    #[arg(long, value_name = "PORT", default_value_t = 9092)]
    pub port_base: u16,
    /// Address to listen on, and the one that clients are told
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    pub host: String,
    /// When a record counts as kept: `sync` once it is on the disk, `os` once the operating system
    /// has it, as in Kafka
    #[arg(long, value_name = "WHEN", default_value = "sync")]
    pub durability: DurabilityArg,
    /// Throw away what was not synced when the process is killed, as a power cut would: for tests
    #[arg(long, hide = true)]
    pub lose_unsynced: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DurabilityArg {
    Sync,
    Os,
}

#[derive(Debug, Args)]
pub struct Service {
    /// Configuration file (TOML)
    #[arg(long, value_name = "FILE", required_unless_present = "print_config")]
    pub config: Option<PathBuf>,
    /// Print the full default configuration with comments, and end
    #[arg(long)]
    pub print_config: bool,
}

/// Run a mirror, see how it does, or say what crosses its links
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct MirrorCommand {
    #[command(flatten)]
    pub service: Service,
    #[command(subcommand)]
    pub command: Option<Mirror>,
}

#[derive(Debug, Subcommand)]
pub enum Mirror {
    /// State and lag of every link, topic and partition, and what was skipped or refused
    Status(MirrorStatus),
    /// See and change what crosses the links to other regions
    #[command(subcommand)]
    Link(Link),
}

#[derive(Debug, Args)]
pub struct MirrorStatus {
    /// Every partition, also those without lag
    #[arg(long)]
    pub all: bool,
    #[command(flatten)]
    pub server: Server,
    #[command(flatten)]
    pub output: Output,
}

/// The region that a command talks to.
#[derive(Clone, Debug, Args)]
pub struct Server {
    /// Kafka address of the region; control and lane addresses are found through it
    #[arg(long, value_name = "HOST:PORT", env = "SEALANE_SERVER", default_value = "127.0.0.1:9092")]
    pub server: String,
    /// The Kafka address speaks TLS
    #[arg(long, requires = "tls_ca")]
    pub tls: bool,
    /// PEM file with the certificates that sign the servers' ones
    #[arg(long, value_name = "FILE")]
    pub tls_ca: Option<PathBuf>,
    /// PEM file with the own certificate
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,
    /// PEM file with its private key
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, Args)]
pub struct Output {
    /// How results look
    #[arg(long, value_name = "FORMAT", default_value = "text")]
    pub output: OutputFormat,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OutputFormat {
    Text,
    Json,
}

/// Make, list and delete lanes, and see what they hold
#[derive(Debug, Subcommand)]
pub enum Lane {
    /// Make a lane, and print the bootstrap address for its workloads
    Create(LaneCreate),
    /// List the lanes with their addresses
    List(ListArgs),
    /// Show a lane's consumers, partition by partition, and what waits for them
    Status(Named),
    /// Find consumers whose lanes cannot work: those that bypass their group, and those that cannot be
    /// told apart
    Doctor(ListArgs),
    /// Delete a lane: its workloads are cut off, its records stay hidden from a later lane
    Delete(Named),
}

#[derive(Debug, Args)]
pub struct LaneCreate {
    /// Name of the lane: a-z, 0-9, '_' and '-'; one that begins with `ppe` is of that class
    pub name: String,
    /// What becomes of a record that no consumer of the lane takes: `boe`, the baseline gets it;
    /// `ppe`, it is held. Must agree with the name [default: what the name says]
    #[arg(long, value_name = "CLASS")]
    pub class: Option<LaneClassArg>,
    #[command(flatten)]
    pub server: Server,
    #[command(flatten)]
    pub output: Output,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LaneClassArg {
    Boe,
    Ppe,
}

#[derive(Debug, Args)]
pub struct ListArgs {
    #[command(flatten)]
    pub server: Server,
    #[command(flatten)]
    pub output: Output,
}

#[derive(Debug, Args)]
pub struct Named {
    pub name: String,
    #[command(flatten)]
    pub server: Server,
    #[command(flatten)]
    pub output: Output,
}

/// Make, list, change and delete topics
#[derive(Debug, Subcommand)]
pub enum Topic {
    /// Make a topic
    Create(TopicCreate),
    /// List the topics
    List(TopicList),
    /// Show a topic's partitions and configuration
    Describe(TopicDescribe),
    /// Change a topic's configuration, or give it more partitions
    Alter(TopicAlter),
    /// Delete a topic and its records
    Delete(Named),
}

#[derive(Debug, Args)]
pub struct TopicCreate {
    pub name: String,
    /// Number of partitions [default: what the broker is set to]
    #[arg(long, value_name = "N")]
    pub partitions: Option<i32>,
    /// Configuration of the topic, such as `retention.ms=86400000` or `sealane.lanes=true`
    #[arg(long, value_name = "KEY=VALUE", value_parser = key_value)]
    pub config: Vec<(String, String)>,
    #[command(flatten)]
    pub server: Server,
    #[command(flatten)]
    pub output: Output,
}

#[derive(Debug, Args)]
pub struct TopicList {
    /// Also topics that the broker keeps for itself
    #[arg(long)]
    pub internal: bool,
    #[command(flatten)]
    pub server: Server,
    #[command(flatten)]
    pub output: Output,
}

#[derive(Debug, Args)]
pub struct TopicDescribe {
    pub name: String,
    /// Also configuration that is at its default
    #[arg(long)]
    pub all: bool,
    #[command(flatten)]
    pub server: Server,
    #[command(flatten)]
    pub output: Output,
}

#[derive(Debug, Args)]
pub struct TopicAlter {
    pub name: String,
    /// New number of partitions; it can only grow
    #[arg(long, value_name = "N")]
    pub partitions: Option<i32>,
    /// Set a configuration key
    #[arg(long, value_name = "KEY=VALUE", value_parser = key_value)]
    pub config: Vec<(String, String)>,
    /// Return a configuration key to its default
    #[arg(long, value_name = "KEY")]
    pub unset: Vec<String>,
    #[command(flatten)]
    pub server: Server,
    #[command(flatten)]
    pub output: Output,
}

/// List consumer groups, and see their members and lag
#[derive(Debug, Subcommand)]
pub enum Group {
    /// List the groups with their states
    List(ListArgs),
    /// Show a group's members, positions and lag
    Describe(Named),
}

#[derive(Debug, Args)]
pub struct Produce {
    pub topic: String,
    /// Key of every record
    #[arg(long, value_name = "KEY")]
    pub key: Option<String>,
    /// A header of every record; may be given several times
    #[arg(long, value_name = "KEY=VALUE", value_parser = key_value)]
    pub header: Vec<(String, String)>,
    /// Produce in a lane: through its address, which stamps the records
    #[arg(long, value_name = "LANE")]
    pub lane: Option<String>,
    /// Partition of every record [default: by key, else spread]
    #[arg(long, value_name = "N")]
    pub partition: Option<i32>,
    #[command(flatten)]
    pub server: Server,
    #[command(flatten)]
    pub output: Output,
}

#[derive(Debug, Args)]
pub struct Consume {
    pub topic: String,
    /// Consumer group: the records are shared among its members, and its position is kept
    #[arg(long, value_name = "GROUP")]
    pub group: Option<String>,
    /// Consume in a lane: through its address, as the group's consumer in that lane
    #[arg(long, value_name = "LANE", requires = "group")]
    pub lane: Option<String>,
    /// Begin with the oldest record, where the group has no position yet
    #[arg(long)]
    pub from_beginning: bool,
    /// End after so many records
    #[arg(long, value_name = "N")]
    pub count: Option<u64>,
    /// End when everything that was there at the start is printed
    #[arg(long)]
    pub until_end: bool,
    /// Give up when so many seconds pass without a record
    #[arg(long, value_name = "SECONDS")]
    pub timeout: Option<u64>,
    /// What to print of a record: `value`, `full`, `json`, or a text with %t topic, %p partition, %o
    /// offset, %T timestamp, %k key, %h headers, %v value, %% and \n \t
    #[arg(long, value_name = "FORMAT", default_value = "value")]
    pub format: String,
    /// The same as --format json when `json`
    #[arg(long, value_name = "FORMAT", default_value = "text")]
    pub output: OutputFormat,
    #[command(flatten)]
    pub server: Server,
}

fn key_value(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err(format!("{text:?} is not of the form KEY=VALUE")),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_definition_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn the_mirror_runs_with_a_file_or_shows_its_status() {
        assert!(Cli::try_parse_from(["sealane", "mirror", "--config", "m.toml"]).is_ok());
        assert!(Cli::try_parse_from(["sealane", "mirror", "status"]).is_ok());
        assert!(Cli::try_parse_from(["sealane", "mirror"]).is_err());
        assert!(Cli::try_parse_from(["sealane", "broker", "--print-config"]).is_ok());
    }

    #[test]
    fn every_command_has_help_for_every_option() {
        fn check(command: &clap::Command) {
            for argument in command.get_arguments().filter(|argument| !argument.is_hide_set()) {
                let positional = argument.is_positional();
                assert!(positional || argument.get_help().is_some(), "{} {argument}", command.get_name());
            }
            command.get_subcommands().for_each(check);
        }
        check(&Cli::command());
    }
}
