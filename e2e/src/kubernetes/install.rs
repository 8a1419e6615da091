//! What tests begin with: on the control plane alone the operator's rights and a namespace that lets it in, on a node the
//! operator itself; and clusters of one broker.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, ensure};

use super::{Kubectl, Region, condition, manifests, script, scripts, wait_for, with_report};
use crate::process::binary;

const KINDS: &str = "brokerclusters,brokerpools,topics.sealane.io,linkgrants,mirrorlinks,lanes,lanerouters";

impl Region {
    /// The control plane alone, with everything of the operator but the operator, and namespace `sea`, which lets it in.
    pub fn sea() -> Result<Region> {
        let region = Region::control_plane()?;
        with_report(&region, || {
            region.kubectl.install()?;
            region.kubectl.apply(&place("sea")).map(drop)
        })?;
        Ok(region)
    }

    /// One real node, on which the operator runs.
    pub fn with_operator() -> Result<Region> {
        let region = Region::with_node()?;
        with_report(&region, || region.run_operator())?;
        Ok(region)
    }

    /// Gives every node the image and installs what a person installs.
    pub fn run_operator(&self) -> Result<()> {
        self.run_operator_of(&binary()?)
    }

    /// The same, of another build.
    pub fn run_operator_of(&self, program: &Path) -> Result<()> {
        self.give_image(program, "0.1.0")?;
        self.kubectl.run(&["apply", "-k", &manifests().join("install").display().to_string()])?;
        self.kubectl.served()
    }
}

/// The program as it was at the last tag, or `SEALANE_FORMER_BIN`; its first build takes minutes.
pub fn former() -> Result<PathBuf> {
    if let Some(given) = std::env::var_os("SEALANE_FORMER_BIN") {
        return Ok(PathBuf::from(given));
    }
    let printed = script(Command::new("bash").arg(scripts().join("former.sh")))?;
    Ok(PathBuf::from(printed.trim()))
}

/// A namespace with the RoleBinding that lets the operator in, in YAML.
pub fn place(namespace: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Namespace\nmetadata: {{name: {namespace}}}\n---\n\
         apiVersion: rbac.authorization.k8s.io/v1\nkind: RoleBinding\n\
         metadata: {{name: sealane-operator, namespace: {namespace}}}\n\
         roleRef: {{apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: sealane-operator}}\n\
         subjects: [{{kind: ServiceAccount, name: sealane-operator, namespace: sealane-system}}]\n"
    )
}

/// BrokerCluster and BrokerPool of one broker that keeps its data, all of this name; `more` is added to the cluster's spec.
pub fn alone(namespace: &str, name: &str, more: &str) -> String {
    format!(
        "apiVersion: sealane.io/v1alpha1\nkind: BrokerCluster\nmetadata: {{name: {name}, namespace: {namespace}}}\n\
         spec:\n  region: {name}\n  storage: {{type: Disk, size: 1Gi}}\n  metadata: {{type: Embedded}}\n  \
         listeners: [{{name: plain, port: 9092}}]\n{more}---\n\
         apiVersion: sealane.io/v1alpha1\nkind: BrokerPool\nmetadata: {{name: {name}, namespace: {namespace}}}\n\
         spec: {{clusterRef: {{name: {name}}}, replicas: 1}}\n"
    )
}

impl Kubectl {
    /// The custom resources and everything of the operator; its pods stay Pending where there is no node.
    pub fn install(&self) -> Result<()> {
        let place = |folder: &str| manifests().join(folder).display().to_string();
        self.run(&["apply", "-k", &place("crd")])?;
        self.run(&["apply", "-k", &place("install/operator")])?;
        self.served()
    }

    /// Waits until every kind of ours is served.
    fn served(&self) -> Result<()> {
        self.established()?;
        wait_for("the kinds", || self.run(&["get", KINDS, "-A"]).map(|_| Some(())))
    }

    /// Waits for the custom resources.
    pub fn established(&self) -> Result<()> {
        let wait = ["wait", "--for=condition=Established", "crd", "--all", "--timeout=60s"];
        self.run(&wait).map(drop)
    }

    /// Waits until the condition Ready has this reason, and a message with it.
    pub fn wait_reason(&self, namespace: &str, what: &str, wanted: &str) -> Result<String> {
        wait_for(&format!("{what} in {namespace} to say {wanted}"), || {
            let ready = condition(&self.object(namespace, what)?, "Ready");
            let message = ready.as_ref().and_then(|ready| ready["message"].as_str()).unwrap_or_default();
            let told = ready.as_ref().is_some_and(|ready| ready["reason"] == wanted);
            ensure!(told && !message.is_empty(), "it says {ready:?}");
            Ok(Some(message.to_owned()))
        })
    }
}
