//! The tool cache: every foreign client that the tests drive, installed once per machine, by the tests themselves.
//!
//! Lives outside the checkout in `$SEALANE_TOOLS` (default `~/.cache/sealane/tools`), one folder per tool, each
//! pinned by a committed manifest in `e2e/clients`. A folder is whole when the copy of its manifest, written last,
//! equals the committed one. Apache Kafka's jars are `maven.rs`; programs of the system come from Debian's packages.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use anyhow::{Context, Result, bail, ensure};

/// Where the tools are kept.
pub fn cache_dir() -> Result<PathBuf> {
    if let Some(dir) = std::env::var_os("SEALANE_TOOLS") {
        return Ok(PathBuf::from(dir));
    }
    let home = std::env::var_os("HOME").context("neither SEALANE_TOOLS nor HOME is set")?;
    Ok(Path::new(&home).join(".cache/sealane/tools"))
}

/// `e2e/clients` of this checkout: the client programs and their manifests.
pub fn client_files() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("clients")
}

/// A Python with the pinned client libraries and codecs.
pub fn python() -> Result<PathBuf> {
    static READY: OnceLock<PathBuf> = OnceLock::new();
    once(&READY, || {
        let manifest = client_files().join("python/requirements.txt");
        let home = installed("python", &[&manifest], |home| {
            if run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(home.join("venv"))).is_err() {
                system_package("python3-venv")?;
                run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(home.join("venv")))?;
            }
            run(Command::new(home.join("venv/bin/pip")).args(["install", "--quiet", "-r"]).arg(&manifest))
        })?;
        Ok(home.join("venv/bin/python"))
    })
}

/// The Go program with franz-go, sarama and kafka-go.
pub fn go_clients() -> Result<PathBuf> {
    static READY: OnceLock<PathBuf> = OnceLock::new();
    once(&READY, || {
        let source = client_files().join("go");
        let mut files: Vec<PathBuf> =
            fs::read_dir(&source)?.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
        files.sort();
        let files: Vec<&Path> = files.iter().map(PathBuf::as_path).collect();
        let home = installed("go", &files, |home| {
            program("go", "golang-go")?;
            let mut build = Command::new("go");
            build
                .current_dir(&source)
                .args(["build", "-mod=readonly", "-o"])
                .arg(home.join("clients"))
                .arg(".");
            run(&mut build)
        })?;
        Ok(home.join("clients"))
    })
}

/// The folder whose `node_modules` holds kafkajs; `client.js` is copied beside it.
pub fn node_clients() -> Result<PathBuf> {
    static READY: OnceLock<PathBuf> = OnceLock::new();
    once(&READY, || {
        let source = client_files().join("node");
        let names = ["package.json", "package-lock.json", "client.js"];
        let files: Vec<PathBuf> = names.iter().map(|name| source.join(name)).collect();
        let files: Vec<&Path> = files.iter().map(PathBuf::as_path).collect();
        installed("node", &files, |home| {
            program("node", "nodejs")?;
            program("npm", "npm")?;
            for file in &files {
                fs::copy(file, home.join(file.file_name().context("a manifest has a name")?))?;
            }
            run(Command::new("npm").current_dir(home).args([
                "ci",
                "--ignore-scripts",
                "--no-audit",
                "--no-fund",
            ]))
        })
    })
}

/// kcat as Debian ships it (librdkafka 2.0.2).
pub fn kcat() -> Result<PathBuf> {
    static READY: OnceLock<PathBuf> = OnceLock::new();
    once(&READY, || program("kcat", "kcat"))
}

/// The path of a program of the system; where it is missing, Debian's `package` is installed first.
pub fn program(name: &str, package: &str) -> Result<PathBuf> {
    if let Some(found) = on_path(name) {
        return Ok(found);
    }
    system_package(package)?;
    on_path(name).with_context(|| format!("package {package} is installed, but there is no {name} on PATH"))
}

/// The path of a shared library of the system; where it is missing, Debian's `package` is installed first.
pub fn library(name: &str, package: &str) -> Result<PathBuf> {
    let found = || {
        let files = Command::new("dpkg").args(["-L", package]).output().ok()?;
        let text = String::from_utf8_lossy(&files.stdout).into_owned();
        text.lines().map(PathBuf::from).find(|file| file.ends_with(name))
    };
    if let Some(found) = found() {
        return Ok(found);
    }
    system_package(package)?;
    found().with_context(|| format!("package {package} is installed, and there is no {name} in it"))
}

/// Makes `name` whole: runs `install` in an empty folder unless an earlier run did with the same manifests.
pub(crate) fn installed(
    name: &str,
    manifests: &[&Path],
    install: impl FnOnce(&Path) -> Result<()>,
) -> Result<PathBuf> {
    let root = cache_dir()?;
    let home = root.join(name);
    fs::create_dir_all(&root).with_context(|| format!("create {}", root.display()))?;
    let _lock = lock(&root.join(format!("{name}.lock")))?;
    let mut wanted = Vec::new();
    for manifest in manifests {
        wanted.extend(fs::read(manifest).with_context(|| format!("read {}", manifest.display()))?);
    }
    let stamp = home.join("installed");
    if fs::read(&stamp).ok().as_deref() != Some(&wanted) {
        if home.exists() {
            fs::remove_dir_all(&home)?;
        }
        fs::create_dir_all(&home)?;
        install(&home).with_context(|| format!("install the {name} clients into {}", home.display()))?;
        fs::write(&stamp, &wanted)?;
    }
    Ok(home)
}

fn once(cell: &OnceLock<PathBuf>, make: impl FnOnce() -> Result<PathBuf>) -> Result<PathBuf> {
    if let Some(path) = cell.get() {
        return Ok(path.clone());
    }
    // Two threads may both get here; the file lock inside makes the second one find the work done.
    let path = make()?;
    Ok(cell.get_or_init(|| path).clone())
}

fn on_path(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|dir| dir.join(name)).find(|file| file.is_file())
}

pub(crate) fn system_package(package: &str) -> Result<()> {
    let _lock = lock(&cache_dir()?.join("apt.lock"))?;
    let root = rustix::process::geteuid().is_root();
    let apt = |args: &[&str]| {
        let mut command = if root { Command::new("apt-get") } else { Command::new("sudo") };
        if !root {
            command.args(["-n", "apt-get"]);
        }
        run(command.env("DEBIAN_FRONTEND", "noninteractive").args(args))
    };
    let install = ["install", "-y", "--no-install-recommends", package];
    if apt(&install).is_err() {
        apt(&["update"]).with_context(|| format!("the tests need Debian's package {package}: install it"))?;
        apt(&install).with_context(|| format!("the tests need Debian's package {package}: install it"))?;
    }
    Ok(())
}

fn lock(path: &Path) -> Result<File> {
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent).with_context(|| format!("create {}", parent.display()))?;
    }
    let file = File::create(path).with_context(|| format!("create {}", path.display()))?;
    file.lock().with_context(|| format!("lock {}", path.display()))?;
    Ok(file)
}

pub(crate) fn run(command: &mut Command) -> Result<()> {
    let shown = command.get_args().map(OsStr::to_string_lossy).collect::<Vec<_>>().join(" ");
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.stdin(Stdio::null()).output();
    let output = match output {
        Ok(output) => output,
        Err(error) => bail!("{program} {shown}: {error}"),
    };
    ensure!(
        output.status.success(),
        "{program} {shown} ended with {}:\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}
