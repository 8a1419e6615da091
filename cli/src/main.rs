//! The one binary: a subcommand per service, and the commands of a person.
fn main() {}
