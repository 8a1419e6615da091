#!/usr/bin/env python3
"""sbom.py [LIBRARY]...   prints what is in the image as CycloneDX 1.6: the crates that the program links, with the
checksums of Cargo.lock, and the system's libraries by name and SHA-256. The same sources give the same bytes."""
import hashlib, json, os, subprocess, sys, tomllib

root = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
with open(os.path.join(root, "cli", "Cargo.toml"), "rb") as file:
    known = tomllib.load(file)["features"]
features = [name for name in ("cluster", "operator", "otel") if name in known]
with open(os.path.join(root, "Cargo.lock"), "rb") as file:
    locked = {(package["name"], package["version"]): package for package in tomllib.load(file)["package"]}
tree = subprocess.run(
    ["cargo", "tree", "--locked", "-p", "sealane", "--features", ",".join(features), "-e", "normal",
     "--prefix", "none", "--no-dedupe", "--format", "{p}|{l}"],
    cwd=root, check=True, capture_output=True, text=True).stdout
linked = {}
for line in tree.splitlines():
    package, _, licence = line.partition("|")
    name, version = package.split()[:2]
    linked[name, version.lstrip("v")] = licence.strip()

components = []
for (name, version), licence in sorted(linked.items()):
    package = locked[name, version]
    component = {"type": "library", "name": name, "version": version, "purl": f"pkg:cargo/{name}@{version}"}
    if "checksum" in package:
        component["hashes"] = [{"alg": "SHA-256", "content": package["checksum"]}]
    if licence:
        component["licenses"] = [{"expression": licence.replace("/", " OR ")}]
    components.append(component)
for path in sorted(sys.argv[1:]):
    with open(path, "rb") as file:
        digest = hashlib.sha256(file.read()).hexdigest()
    components.append({"type": "file", "name": path, "hashes": [{"alg": "SHA-256", "content": digest}]})

version = next(version for name, version in linked if name == "sealane")
print(json.dumps({
    "bomFormat": "CycloneDX",
    "specVersion": "1.6",
    "version": 1,
    "metadata": {"component": {"type": "application", "name": "sealane", "version": version}},
    "components": components,
}, indent=1))
