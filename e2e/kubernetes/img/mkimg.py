#!/usr/bin/env python3
"""mkimg.py NAME:TAG OUT.tar [--entry PATH] [--user UID:GID] [--root DIR] [--busybox BUSYBOX] [--bin PROGRAM]... [FILE=PATH_IN_IMAGE]...
Writes a docker-archive (one layer, configuration, manifest) that `ctr -n k8s.io images import` takes. No registry, no daemon.
--root takes a whole directory as it is; --bin adds a program with the libraries that ldd names."""
import argparse, hashlib, io, json, os, stat, subprocess, tarfile

parser = argparse.ArgumentParser()
parser.add_argument("name"); parser.add_argument("out")
parser.add_argument("--entry"); parser.add_argument("--user", default=""); parser.add_argument("--root"); parser.add_argument("--busybox")
parser.add_argument("--bin", action="append", default=[]); parser.add_argument("files", nargs="*")
args = parser.parse_intermixed_args()


def content(path):
    with open(path, "rb") as file:
        return file.read()


layer_bytes = io.BytesIO()
with tarfile.open(fileobj=layer_bytes, mode="w") as tar:
    def add(path, data=b"", mode=0o755, kind=tarfile.REGTYPE, link=""):
        info = tarfile.TarInfo(path)
        info.size, info.mode, info.type, info.linkname = len(data), mode, kind, link
        tar.addfile(info, io.BytesIO(data))

    if args.root:
        for folder, folders, files in os.walk(args.root):
            folders.sort()
            inside = os.path.relpath(folder, args.root)
            if inside != ".":
                add(inside, mode=stat.S_IMODE(os.stat(folder).st_mode), kind=tarfile.DIRTYPE)
            for name in sorted(files):
                path = os.path.join(folder, name)
                add(os.path.normpath(os.path.join(inside, name)), content(path), stat.S_IMODE(os.stat(path).st_mode))
    else:
        for folder in ("etc", "tmp", "proc", "sys", "dev", "run"):
            add(folder, mode=0o1777 if folder == "tmp" else 0o755, kind=tarfile.DIRTYPE)
        add("etc/passwd", b"root:x:0:0:root:/:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n", 0o644)
    if args.busybox:
        add("bin", kind=tarfile.DIRTYPE)
        add("bin/busybox", content(args.busybox))
        for name in subprocess.check_output([args.busybox, "--list"], text=True).split():
            if name != "busybox":
                add("bin/" + name, kind=tarfile.SYMTYPE, link="busybox")
    seen = set()
    for program in args.bin:
        add("usr/bin/" + os.path.basename(program), content(program))
        for word in subprocess.run(["ldd", program], text=True, capture_output=True).stdout.split():
            if word.startswith("/") and word not in seen:
                seen.add(word)
                add(word.lstrip("/"), content(word))
    if args.bin:
        add("etc/nsswitch.conf", b"hosts: files dns\n", 0o644)
    for pair in args.files:
        source, target = pair.split("=", 1)
        add(target.lstrip("/"), content(source))

layer = layer_bytes.getvalue()
digest = hashlib.sha256(layer).hexdigest()
config = {"Env": ["PATH=/bin:/usr/bin"]}
if args.entry:
    config["Entrypoint"] = [args.entry]
elif args.busybox:
    config["Cmd"] = ["/bin/sh"]
if args.user:
    config["User"] = args.user
config_bytes = json.dumps({
    "architecture": "amd64", "os": "linux", "config": config,
    "rootfs": {"type": "layers", "diff_ids": ["sha256:" + digest]}, "history": [{"created_by": "mkimg"}]}).encode()
config_name = hashlib.sha256(config_bytes).hexdigest() + ".json"
manifest = [{"Config": config_name, "RepoTags": [args.name], "Layers": [digest + "/layer.tar"]}]
with tarfile.open(args.out + ".part", "w") as tar:
    for name, data in ((config_name, config_bytes), (digest + "/layer.tar", layer), ("manifest.json", json.dumps(manifest).encode())):
        info = tarfile.TarInfo(name)
        info.size = len(data)
        tar.addfile(info, io.BytesIO(data))
os.replace(args.out + ".part", args.out)
