#!/usr/bin/env bash
# root.sh PROGRAM DIRECTORY   lays out the image's whole file system: the program, the libraries that it names, two small
# files of /etc, the list of what is inside (CycloneDX), and nothing else. Used by the Containerfile and by the tests alike.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
program=$1 root=$2
[ -x "$program" ] || { echo "no program $program" >&2; exit 1; }
[ ! -e "$root" ] || { echo "$root is there already" >&2; exit 1; }
umask 022
mkdir -p "$root"/{etc,usr/bin,usr/share/sealane,tmp}
chmod 1777 "$root/tmp"
cp "$program" "$root/usr/bin/sealane"
# Names of libraries resolve to paths; the kernel's own (vdso) has none. The loader is listed by its path.
libraries=$(ldd "$program" | grep -o '/[^ ]*')
for library in $libraries; do
  mkdir -p "$root$(dirname "$library")"
  cp -L "$library" "$root$library"
done
printf 'sealane:x:65532:65532::/:/none\n' >"$root/etc/passwd"
printf 'hosts: files dns\n' >"$root/etc/nsswitch.conf"
"$here/sbom.py" $libraries >"$root/usr/share/sealane/sbom.cdx.json"
