//! The options of `sealane mirror link`.

use clap::{Args, Subcommand, ValueEnum};

use super::{ListArgs, Output, Server};

/// See and change what crosses the links to other regions
///
/// A policy is of this region: what crosses a link is what both of its ends let cross.
#[derive(Debug, Subcommand)]
pub enum Link {
    /// List the links with what crosses them
    List(ListArgs),
    /// Show what crosses the link to a region
    Show(LinkPeer),
    /// Change what crosses the link to a region, and keep the rest; the mirror follows by itself
    Set(LinkSet),
    /// Let what crosses the link to a region be the default again
    Delete(LinkPeer),
}

#[derive(Debug, Args)]
pub struct LinkPeer {
    /// Name of the region at the other end
    pub peer: String,
    #[command(flatten)]
    pub server: Server,
    #[command(flatten)]
    pub output: Output,
}

#[derive(Debug, Args)]
pub struct LinkSet {
    /// Name of the region at the other end
    pub peer: String,
    #[command(flatten)]
    pub change: LinkChange,
    #[command(flatten)]
    pub server: Server,
    #[command(flatten)]
    pub output: Output,
}

/// What is not given stays as it is.
#[derive(Debug, Args)]
#[group(required = true, multiple = true)]
pub struct LinkChange {
    /// Topics that cross: names, in which `*` stands for any characters
    #[arg(long, value_name = "PATTERNS", value_delimiter = ',')]
    pub topics: Option<Vec<String>>,
    /// Topics that do not cross although --topics names them; empty for none
    #[arg(long, value_name = "PATTERNS", value_delimiter = ',')]
    pub exclude: Option<Vec<String>>,
    /// Classes of lanes whose records leave this region over the link
    #[arg(long, value_name = "CLASSES")]
    pub lanes: Option<LinkLanes>,
    /// Whether a topic that is deleted in one of the two regions is deleted in the other; both ends must
    /// say so
    #[arg(long, value_name = "BOOL", action = clap::ArgAction::Set)]
    pub deletions: Option<bool>,
    /// Most bytes per second that leave this region over the link, unpacked; 0 for no limit
    #[arg(long, value_name = "BYTES")]
    pub rate: Option<u64>,
    /// What decides how fast this region sends
    #[arg(long, value_name = "CONTROLLER")]
    pub congestion: Option<LinkCongestion>,
    /// Let nothing cross, in neither direction, until --resume
    #[arg(long, conflicts_with = "resume")]
    pub pause: bool,
    /// Go on from where the link was paused
    #[arg(long)]
    pub resume: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LinkLanes {
    None,
    Boe,
    Ppe,
    All,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LinkCongestion {
    /// What measurements call for
    Auto,
    /// BBR, with a window that does not fill the path's queues
    Bbr,
    /// CUBIC: fair to old traffic, slow on long paths that lose packets
    Cubic,
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::args::{Cli, Command, Mirror, MirrorCommand};

    fn set(options: &[&str]) -> Result<LinkChange, clap::Error> {
        let line = ["sealane", "mirror", "link", "set", "west"].iter().chain(options);
        let command = Cli::try_parse_from(line)?.command;
        let Command::Mirror(MirrorCommand { command: Some(Mirror::Link(Link::Set(set))), .. }) = command
        else {
            panic!("{command:?}");
        };
        Ok(set.change)
    }

    #[test]
    fn a_change_names_what_is_to_change_and_nothing_else() {
        let change = set(&["--exclude", "*.tmp,secret", "--deletions", "true"]).expect("parsed");
        assert_eq!(change.exclude, Some(vec!["*.tmp".to_owned(), "secret".to_owned()]));
        assert_eq!((change.deletions, change.topics, change.rate), (Some(true), None, None));
        assert!(set(&[]).is_err(), "nothing to change");
        assert!(set(&["--pause", "--resume"]).is_err());
        assert!(set(&["--lanes", "blue"]).is_err());
        assert!(set(&["--rate", "fast"]).is_err());
    }
}
