//! The test Kubernetes itself, and the image: a real node runs what `manifests/image` describes under Pod Security
//! "restricted", and a real client reaches it from outside. `just test-kubernetes`.

#![cfg(feature = "kubernetes")]

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use e2e::kubernetes::{Kubectl, Region, script, scripts, wait_for, with_report};
use e2e::process::binary;
use e2e::tools;
use serde_json::Value;

/// A broker by hand, as strict as Pod Security allows: what the operator makes is tested with the operator.
fn broker(address: &str) -> String {
    format!(
        r#"
apiVersion: v1
kind: Namespace
metadata: {{name: strict, labels: {{pod-security.kubernetes.io/enforce: restricted}}}}
---
apiVersion: v1
kind: ConfigMap
metadata: {{name: broker, namespace: strict}}
data:
  broker.toml: |
    data_dir = "/var/lib/sealane"
    region = "east"
    http_bind = "0.0.0.0:9095"
    [[listeners]]
    name = "plain"
    bind = "0.0.0.0:9092"
    advertised = "{address}:30092"
---
apiVersion: v1
kind: Service
metadata: {{name: broker, namespace: strict}}
spec: {{type: NodePort, selector: {{app: broker}}, ports: [{{port: 9092, nodePort: 30092}}]}}
---
apiVersion: v1
kind: Pod
metadata: {{name: broker, namespace: strict, labels: {{app: broker, app.kubernetes.io/part-of: sealane}}}}
spec:
  securityContext: {{runAsNonRoot: true, fsGroup: 65532, seccompProfile: {{type: RuntimeDefault}}}}
  containers:
  - name: broker
    image: localhost/sealane:0.1.0
    args: [broker, --config, /etc/sealane/broker.toml]
    securityContext: {{allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {{drop: [ALL]}}}}
    readinessProbe: {{httpGet: {{path: /readyz, port: 9095}}, periodSeconds: 1}}
    volumeMounts: [{{name: config, mountPath: /etc/sealane}}, {{name: data, mountPath: /var/lib/sealane}}]
  volumes: [{{name: config, configMap: {{name: broker}}}}, {{name: data, emptyDir: {{}}}}]
"#
    )
}

#[test]
fn a_node_runs_the_image_under_pod_security_restricted_and_a_client_outside_reaches_it() -> Result<()> {
    let region = Region::with_node()?;
    with_report(&region, || {
        region.give_image(&binary()?, "0.1.0")?;
        let kubectl = region.kubectl();
        kubectl.apply(&broker(&region.address()))?;
        kubectl.wait_condition("strict", "pod/broker", "Ready", "True")?;

        let bootstrap = format!("{}:30092", region.address());
        // A pod is ready a moment before every node's proxy knows it.
        wait_for("kcat to produce through the NodePort", || {
            kcat(&bootstrap, "-P", "from outside\n").map(Some)
        })?;
        let read = kcat(&bootstrap, "-C", "")?;
        ensure!(read.lines().all(|line| line == "from outside") && !read.is_empty(), "it read {read:?}");

        image_has_no_shell(kubectl)?;
        // The twin: the namespace would have refused a container that may be root.
        let lax = broker(&region.address()).replace("runAsNonRoot: true", "runAsNonRoot: false");
        let lax =
            lax.replace("name: broker, namespace: strict, labels", "name: lax, namespace: strict, labels");
        let refusal = kubectl.refused(&lax)?;
        ensure!(refusal.contains("violates PodSecurity \"restricted"), "{refusal}");
        region.judge_logs()
    })
}

fn image_has_no_shell(kubectl: &Kubectl) -> Result<()> {
    for shell in ["/bin/sh", "/bin/bash", "/bin/busybox", "sh"] {
        let output = kubectl.output(&["exec", "-n", "strict", "broker", "--", shell, "-c", "exit 0"])?;
        ensure!(!output.status.success(), "there is a shell {shell} in the image");
    }
    let version = kubectl.run(&["exec", "-n", "strict", "broker", "--", "/usr/bin/sealane", "--version"])?;
    ensure!(version.contains("sealane"), "{version}");
    Ok(())
}

fn kcat(bootstrap: &str, action: &str, input: &str) -> Result<String> {
    let mut command = Command::new(tools::kcat()?);
    command.args([action, "-b", bootstrap, "-t", "orders", "-m", "20"]);
    if action == "-C" {
        command.args(["-o", "beginning", "-e"]);
    }
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    std::io::Write::write_all(&mut child.stdin.take().context("it is piped")?, input.as_bytes())?;
    let output = child.wait_with_output()?;
    ensure!(output.status.success(), "kcat: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[test]
fn a_machine_without_root_is_told_so_in_one_sentence() -> Result<()> {
    for name in ["build.sh", "up.sh", "down.sh"] {
        // Nobody else may read a checkout that lies in somebody's home, so the check is taken out of the script.
        let text = fs::read_to_string(scripts().join("env.sh"))?;
        let line = fs::read_to_string(scripts().join(name))?;
        let call =
            line.lines().find(|line| line.starts_with("need_root")).context("it asks for root first")?;
        let mut command = Command::new("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "bash", "-c"]);
        let output = command.arg(format!("{text}\n{call}")).current_dir("/").output()?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(!output.status.success(), "{name} did not mind");
        ensure!(said.lines().count() == 1 && said.contains("needs root"), "{name} said {said:?}");
    }
    Ok(())
}

#[test]
fn the_image_holds_the_program_its_libraries_and_a_list_of_what_it_is_made_of() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let root = dir.path().join("image");
    let layout = scripts().join("../../manifests/image/root.sh");
    script(Command::new("bash").arg(layout).arg(binary()?).arg(&root)).map(drop)?;

    let mut files = BTreeSet::new();
    walk(&root, &root, &mut files)?;
    let libraries: BTreeSet<String> = files.iter().filter(|file| file.contains(".so")).cloned().collect();
    let others: Vec<&String> = files.iter().filter(|file| !libraries.contains(*file)).collect();
    let wanted = ["etc/nsswitch.conf", "etc/passwd", "usr/bin/sealane", "usr/share/sealane/sbom.cdx.json"];
    ensure!(others == wanted, "the image holds {others:?}");
    // glibc's parts and the compiler's own library: nothing that a distribution would have to mend beside these.
    for library in &libraries {
        let name = library.rsplit('/').next().unwrap_or_default();
        let known = ["libc.", "libm.", "libgcc_s.", "ld-linux", "libdl.", "libpthread.", "librt."];
        ensure!(known.iter().any(|start| name.starts_with(start)), "the program names {library}");
    }

    let list: Value = serde_json::from_slice(&fs::read(root.join("usr/share/sealane/sbom.cdx.json"))?)?;
    let components = list["components"].as_array().context("it has components")?;
    let named = |name: &str| components.iter().any(|component| component["name"] == name);
    for name in ["tokio", "rustls", "broker", "mirror"] {
        ensure!(named(name), "{name} is not in the list");
    }
    // The twin of that: what only tests link is not in the program.
    ensure!(!named("proptest") && !named("e2e"), "the list names what the program does not link");
    for library in libraries {
        ensure!(named(&format!("/{library}")), "{library} is not in the list");
    }
    Ok(())
}

fn walk(root: &Path, folder: &Path, files: &mut BTreeSet<String>) -> Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            walk(root, &path, files)?;
        } else {
            files.insert(path.strip_prefix(root)?.to_string_lossy().into_owned());
        }
    }
    Ok(())
}
