"""An independent reader of Sealane's data directory: what is in the log, by the bytes alone.

Shares no code with the product. Owns: segments (record batches v2, every codec, CRC-32C), control
batches 100 to 104, mirror units (a marker and the batches that it covers), and what follows for
each record: local offset, origin region, origin incarnation, origin offset. It fails loudly on
everything that does not add up: a bad CRC, offsets that fall, a unit that its batches do not match,
two records of one origin offset, origin offsets out of order.

  logread.py records DATA_DIR [--topic NAME]     one JSON line a record, then one a partition
  logread.py check DATA_DIR [--topic NAME]       only the line per partition

A record line: {"topic", "p", "o": local offset, "origin": region uuid or null for this region,
"oo": origin offset, "t", "k", "v", "h", "pid"}; then one line a lane cut: {"cut": "activate" or
"deactivate", "topic", "p", "o", "group", "lane"}; a partition line: {"partition", "topic", "p",
"start", "end", "records", "unit_bytes": bytes that came over a mirror, "markers": {type: count}}.
"""

import argparse
import gzip
import json
import os
import struct
import sys
import uuid

import cramjam
import crc32c
import lz4.frame
import zstandard

HEADER = struct.Struct(">qiibIhiqqqhii")  # base, length, epoch, magic, crc, attributes, ...
MIRROR, ACTIVATE, DEACTIVATE, PURGE, EXTRACTORS = 100, 101, 102, 103, 104
NAMES = {0: "abort", 1: "commit", MIRROR: "mirror", ACTIVATE: "activate", DEACTIVATE: "deactivate",
         PURGE: "purge", EXTRACTORS: "extractors"}


class Broken(Exception):
    """The log contradicts itself."""


class Batch:
    def __init__(self, data, at, where):
        self.where = f"{where}@{at}"
        if at + HEADER.size > len(data):
            raise Broken(f"{self.where}: a header is cut off")
        (self.base, length, self.epoch, magic, self.crc, self.attributes, self.last_delta, self.first_time,
         self.max_time, self.pid, self.producer_epoch, self.sequence, self.count) = HEADER.unpack_from(data, at)
        self.size = length + 12
        if magic != 2:
            raise Broken(f"{self.where}: magic {magic}")
        if length < HEADER.size - 12 or at + self.size > len(data):
            raise Broken(f"{self.where}: batch of {self.size} bytes, {len(data) - at} left")
        if crc32c.crc32c(data[at + 21:at + self.size]) != self.crc:
            raise Broken(f"{self.where}: CRC does not fit")
        self.body = data[at + HEADER.size:at + self.size]
        self.bytes = data[at:at + self.size]

    @property
    def control(self):
        return bool(self.attributes & 0x20)

    @property
    def log_append_time(self):
        return bool(self.attributes & 0x08)

    @property
    def next(self):
        return self.base + self.last_delta + 1

    def records(self):
        data, at = unpack(self.attributes & 7, self.body), 0
        previous = -1
        for _ in range(self.count):
            length, at = varint(data, at)
            record = Record(self, data[at:at + length])
            at += length
            if record.offset <= previous:
                raise Broken(f"{self.where}: record offsets fall")
            previous = record.offset
            yield record
        if at != len(data):
            raise Broken(f"{self.where}: {len(data) - at} bytes after the last record")
        if self.count and previous > self.base + self.last_delta:
            raise Broken(f"{self.where}: a record past the last offset")


class Record:
    def __init__(self, batch, data):
        at = 1  # attributes
        delta_time, at = varint(data, at)
        delta, at = varint(data, at)
        self.offset = batch.base + delta
        self.timestamp = batch.max_time if batch.log_append_time else batch.first_time + delta_time
        self.key, at = blob(data, at)
        self.value, at = blob(data, at)
        count, at = varint(data, at)
        self.headers = []
        for _ in range(count):
            name, at = blob(data, at)
            value, at = blob(data, at)
            self.headers.append((name.decode(), value))
        if at != len(data):
            raise Broken(f"{batch.where}: a record has {len(data) - at} bytes too many")


def varint(data, at):
    shift = value = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return (value >> 1) ^ -(value & 1), at
        shift += 7


def blob(data, at):
    length, at = varint(data, at)
    if length < 0:
        return None, at
    if at + length > len(data):
        raise Broken("a field runs past its record")
    return bytes(data[at:at + length]), at + length


def unpack(codec, data):
    if codec == 0:
        return data
    if codec == 1:
        return gzip.decompress(data)
    if codec == 2:
        return unsnappy(data)
    if codec == 3:
        return lz4.frame.decompress(data)
    if codec == 4:
        return zstandard.ZstdDecompressor().decompressobj().decompress(data)
    raise Broken(f"codec {codec}")


def unsnappy(data):
    """Snappy as Kafka's clients write it: raw, or the blocks of snappy-java."""
    if data[:8] != b"\x82SNAPPY\x00":
        return bytes(cramjam.snappy.decompress_raw(data))
    out, at = bytearray(), 16
    while at < len(data):
        (size,) = struct.unpack_from(">i", data, at)
        out += bytes(cramjam.snappy.decompress_raw(data[at + 4:at + 4 + size]))
        at += 4 + size
    return bytes(out)


# --- markers -----------------------------------------------------------------------------------

class Cursor:
    def __init__(self, data):
        self.data, self.at = data, 0

    def take(self, form):
        values = struct.unpack_from(">" + form, self.data, self.at)
        self.at += struct.calcsize(">" + form)
        return values[0] if len(values) == 1 else values

    def long_text(self):
        length = self.take("i")
        self.at += length
        return bytes(self.data[self.at - length:self.at]).decode()

    def uuid(self):
        self.at += 16
        return str(uuid.UUID(bytes=bytes(self.data[self.at - 16:self.at])))

    def text(self):
        length = self.take("h")
        self.at += length
        return bytes(self.data[self.at - length:self.at]).decode()


def mirror_marker(value):
    """The value of a type 100 control record, big-endian, as docs/STORAGE.md draws it."""
    c = Cursor(value)
    version = c.take("h")
    if version != 0:
        raise Broken(f"mirror marker of version {version}")
    marker = {"origin": c.uuid(), "incarnation": c.uuid()}
    marker["epoch"], marker["first"], marker["next"] = c.take("iqq")
    marker["bytes"], marker["crc"] = c.take("QI")
    marker["batches"] = [c.take("iq") for _ in range(c.take("i"))]
    return marker


def lane_cut(value):
    """The value of a type 101 or 102 control record."""
    c = Cursor(value)
    version = c.take("h")
    if version != 0:
        raise Broken(f"lane cut of version {version}")
    return {"group": c.long_text(), "lane": c.long_text()}


# --- partitions --------------------------------------------------------------------------------

class Partition:
    """Walks the batches of one partition in offset order, and says where every record came from."""

    def __init__(self, path, topic, number):
        self.path, self.topic, self.number = path, topic, number
        self.markers, self.count, self.unit_bytes = {}, 0, 0
        self.start = self.end = None
        self.seen = {}    # (origin, incarnation) -> next origin offset
        self.unit = None  # the marker whose batches are still to come
        self.cuts = []    # lane cuts, in order

    def segments(self):
        names = sorted(name for name in os.listdir(self.path) if name.endswith(".log"))
        for name in names:
            with open(os.path.join(self.path, name), "rb") as file:
                yield int(name.split(".")[0]), name, file.read()

    def batches(self):
        for base, name, data in self.segments():
            if self.start is None:
                self.start = self.end = base
            if base < self.end:
                raise Broken(f"{self.path}/{name}: begins below the end {self.end} of the one before")
            if self.unit is not None:
                raise Broken(f"{self.path}/{name}: a unit crosses a segment")
            at = 0
            while at < len(data):
                batch = Batch(data, at, f"{self.path}/{name}")
                if batch.base < self.end:
                    raise Broken(f"{batch.where}: base {batch.base} below the end {self.end}")
                self.end = batch.next
                at += batch.size
                yield batch
        if self.unit is not None:
            raise Broken(f"{self.path}: the last unit is not complete")

    def records(self):
        for batch in self.batches():
            if batch.control and batch.pid == -1:
                self.take_marker(batch)
                continue
            if batch.control:
                (record,) = batch.records()
                kind = struct.unpack(">hh", record.key)[1]
                self.markers[kind] = self.markers.get(kind, 0) + 1
                continue
            origin, incarnation, shift = self.place(batch)
            for record in batch.records():
                self.count += 1
                yield record, origin, record.offset + shift, batch.pid

    def take_marker(self, batch):
        if self.unit is not None:
            raise Broken(f"{batch.where}: a marker inside a unit")
        (record,) = batch.records()
        version, kind = struct.unpack(">hh", record.key)
        if version != 0 or kind not in NAMES or kind < MIRROR:
            raise Broken(f"{batch.where}: control type {kind} version {version}")
        if batch.max_time != -1:
            raise Broken(f"{batch.where}: a marker with a timestamp")
        self.markers[kind] = self.markers.get(kind, 0) + 1
        if kind in (ACTIVATE, DEACTIVATE):
            self.cuts.append({"cut": NAMES[kind], "o": batch.base, **lane_cut(record.value)})
        if kind == MIRROR:
            unit = mirror_marker(record.value)
            at = (unit["origin"], unit["incarnation"])
            if unit["first"] < self.seen.get(at, 0):
                raise Broken(f"{batch.where}: origin offset {unit['first']} again, {self.seen[at]} is next")
            self.seen[at] = unit["next"]
            self.unit_bytes += unit["bytes"]
            if unit["batches"]:
                self.unit = {**unit, "base": batch.base, "left": list(unit["batches"]), "size": 0}

    def place(self, batch):
        """(origin, incarnation, what to add to a local offset) of a data batch."""
        if self.unit is None:
            return None, None, 0
        delta, origin_base = self.unit["left"].pop(0)
        if self.unit["base"] + delta != batch.base:
            raise Broken(f"{batch.where}: its unit's marker says base {self.unit['base'] + delta}")
        if batch.pid != -1 or batch.attributes & 0x10:
            raise Broken(f"{batch.where}: a mirrored batch keeps its producer")
        if not self.unit["first"] <= origin_base < self.unit["next"]:
            raise Broken(f"{batch.where}: origin offset {origin_base} is outside its unit")
        self.unit["size"] += batch.size
        found = (self.unit["origin"], self.unit["incarnation"], origin_base - batch.base)
        if not self.unit["left"]:
            if self.unit["size"] != self.unit["bytes"]:
                raise Broken(f"{batch.where}: unit of {self.unit['size']} bytes, marker says {self.unit['bytes']}")
            self.unit = None
        return found


def partitions(data, topic):
    """Every `<topic id>/<topic>-<partition>` folder with segments under `data`."""
    for path, folders, files in sorted(os.walk(data)):
        folders.sort()
        name = os.path.basename(path)
        if any(file.endswith(".log") for file in files) and "-" in name:
            head, _, number = name.rpartition("-")
            if number.isdigit() and (topic is None or head == topic):
                yield Partition(path, head, int(number))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("action", choices=["records", "check"])
    parser.add_argument("data")
    parser.add_argument("--topic")
    args = parser.parse_args()
    hexed = lambda data: None if data is None else data.hex()
    for part in partitions(args.data, args.topic):
        for record, origin, origin_offset, pid in part.records():
            if args.action == "records":
                print(json.dumps({
                    "topic": part.topic, "p": part.number, "o": record.offset, "origin": origin,
                    "oo": origin_offset, "t": record.timestamp, "k": hexed(record.key),
                    "v": hexed(record.value), "h": [[n, hexed(v)] for n, v in record.headers], "pid": pid}))
        for cut in part.cuts if args.action == "records" else []:
            print(json.dumps({**cut, "topic": part.topic, "p": part.number}))
        print(json.dumps({
            "partition": part.path, "topic": part.topic, "p": part.number, "start": part.start, "end": part.end,
            "records": part.count, "unit_bytes": part.unit_bytes, "markers": {NAMES[kind]: n for kind, n in part.markers.items()}}))


if __name__ == "__main__":
    try:
        main()
    except Broken as broken:
        sys.exit(f"BROKEN {broken}")
