//! Which region of `sealane local` listens where: pure arithmetic on the port base.

use std::net::IpAddr;

/// Addresses of one region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionPlan {
    pub name: String,
    pub host: IpAddr,
    pub kafka: u16,
    pub lane_router: u16,
    pub control: u16,
    pub http: u16,
    /// UDP.
    pub mirror: u16,
    pub internal: u16,
    pub lanes_first: u16,
    pub lanes_last: u16,
}

/// Why the options make no plan.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    #[error("--host {0:?} is no IP address")]
    Host(String),
    #[error("--host {0}: clients cannot be told to connect to that; give the address of this machine")]
    Unspecified(IpAddr),
    #[error("--regions: {0}")]
    Name(#[from] kafka::names::NameError),
    #[error("--regions names {0:?} twice")]
    Twice(String),
    #[error("--regions has {0} names; it takes 1 to {REGIONS_MAX}")]
    Count(usize),
    #[error("--port-base {base}: {regions} regions need the ports up to {last}, and 65535 is the last one")]
    Ports { base: u16, regions: usize, last: u32 },
}

/// Region i uses the ports from `port_base + 100 * i`.
pub fn plan(regions: &[String], host: &str, port_base: u16) -> Result<Vec<RegionPlan>, PlanError> {
    let host: IpAddr = host.parse().map_err(|_| PlanError::Host(host.to_owned()))?;
    if host.is_unspecified() {
        return Err(PlanError::Unspecified(host));
    }
    if regions.is_empty() || regions.len() > REGIONS_MAX {
        return Err(PlanError::Count(regions.len()));
    }
    let last = u32::from(port_base) + 100 * regions.len() as u32 - 1;
    if port_base == 0 || last > u32::from(u16::MAX) {
        return Err(PlanError::Ports { base: port_base, regions: regions.len(), last });
    }
    let mut plans: Vec<RegionPlan> = Vec::with_capacity(regions.len());
    for (index, name) in regions.iter().enumerate() {
        kafka::RegionName::parse(name)?;
        if plans.iter().any(|plan| plan.name == *name) {
            return Err(PlanError::Twice(name.clone()));
        }
        let base = port_base + 100 * index as u16;
        plans.push(RegionPlan {
            name: name.clone(),
            host,
            kafka: base,
            lane_router: base + 1,
            control: base + 2,
            http: base + 3,
            mirror: base + 4,
            internal: base + 5,
            lanes_first: base + 10,
            lanes_last: base + 99,
        });
    }
    Ok(plans)
}

impl RegionPlan {
    pub fn address(&self, port: u16) -> String {
        std::net::SocketAddr::new(self.host, port).to_string()
    }
}

/// A process that runs more regions than this is a mistake.
pub const REGIONS_MAX: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn the_second_region_is_a_hundred_ports_on() {
        let plans = plan(&names(&["east", "west"]), "127.0.0.1", 9092).expect("a plan");
        let west = &plans[1];
        assert_eq!((west.kafka, west.lane_router, west.control, west.http), (9192, 9193, 9194, 9195));
        assert_eq!((west.mirror, west.internal, west.lanes_first, west.lanes_last), (9196, 9197, 9202, 9291));
        assert_eq!(west.address(west.kafka), "127.0.0.1:9192");
    }

    #[test]
    fn what_makes_no_plan_is_said_in_one_line() {
        for (regions, host, base, says) in [
            (names(&["east", "east"]), "127.0.0.1", 9092, "names \"east\" twice"),
            (names(&["East"]), "127.0.0.1", 9092, "region name \"East\" must be"),
            (names(&["east", "west"]), "127.0.0.1", 65500, "65535 is the last one"),
            (names(&["east"]), "0.0.0.0", 9092, "cannot be told to connect"),
            (names(&["east"]), "localhost", 9092, "is no IP address"),
            (names(&["a", "b", "c", "d", "e", "f", "g", "h", "i"]), "127.0.0.1", 9092, "takes 1 to 8"),
        ] {
            let error = plan(&regions, host, base).expect_err(says).to_string();
            assert!(error.contains(says), "{error}");
        }
    }
}
