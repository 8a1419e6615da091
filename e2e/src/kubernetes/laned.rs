//! Lanes and their routers as objects of namespace `sealane`, and what their workloads are told.

use anyhow::Result;

use super::{Kubectl, wait_for};
use crate::clients::{Library, Running};

/// A LaneRouter of cluster `east`; `how` is more of its spec, in YAML.
pub fn lane_router(name: &str, how: &str) -> String {
    format!(
        "apiVersion: sealane.io/v1alpha1\nkind: LaneRouter\nmetadata: {{name: {name}, namespace: sealane}}\n\
         spec: {{clusterRef: {{name: east}}, {how}}}\n"
    )
}

/// A Lane of cluster `east`.
pub fn lane(name: &str, class: &str) -> String {
    format!(
        "apiVersion: sealane.io/v1alpha1\nkind: Lane\nmetadata: {{name: {name}, namespace: sealane}}\n\
         spec: {{clusterRef: {{name: east}}, class: {class}, name: {name}}}\n"
    )
}

/// A consumer that has its partitions.
pub fn grouped(library: Library, server: &str, topic: &str, group: &str) -> Result<Running> {
    let reader = library.start("consume", server, topic, &["--group", group, "--seconds", "280"])?;
    reader.wait_assigned()?;
    Ok(reader)
}

impl Kubectl {
    /// Where a lane is entered from outside, as its status says.
    pub fn lane_outside(&self, lane: &str) -> Result<String> {
        wait_for(&format!("the address of lane {lane}"), || {
            let status = self.object("sealane", &format!("lane/{lane}"))?["status"].take();
            Ok(status["outside"].as_str().map(str::to_owned))
        })
    }
}
