//! The checks of the fuzz targets on stable: over the committed corpus, and over a bounded number of
//! changes to it by seed.
//!
//! `UPDATE_CORPUS=1` writes the seeds again. A finding of the fuzzer is kept by adding its file.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use bytes::{BufMut, Bytes, BytesMut};
use kafka::batch::{Attributes, Codec};
use kafka::frame::{RequestHeader, put_request_header};
use kafka::private;
use kafka::record::BatchBuilder;
use kafka::{
    ADVERTISED, LaneCut, LanePurge, LeaderEpoch, Marker, MirrorMarker, Offset, PartitionIndex, ProducerEpoch,
    ProducerId, RegionId, StrBytes, TimestampMs, TopicId, TopicName, marker_batch,
};
use uuid::Uuid;

#[path = "../../fuzz/checks.rs"]
mod checks;

const CHANGES_PER_FILE: usize = 5_000;

type Check = fn(&[u8]);
const TARGETS: [(&str, Check); 2] = [("frame", checks::frames), ("batch", checks::batches)];

#[test]
fn the_corpus_holds() {
    for (target, check) in TARGETS {
        let corpus = corpus(target);
        assert!(corpus.len() >= 15, "{target} has {} files", corpus.len());
        for (name, data) in corpus {
            println!("{target}/{name}");
            check(&data);
        }
    }
}

#[test]
fn changed_corpus_files_hold() {
    let seed = std::env::var("FUZZ_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1);
    println!("FUZZ_SEED={seed}");
    for (target, check) in TARGETS {
        let corpus: Vec<Vec<u8>> = corpus(target).into_values().collect();
        let mut dice = Dice(seed);
        for (number, data) in corpus.iter().enumerate() {
            for change in 0..CHANGES_PER_FILE {
                let other = &corpus[dice.below(corpus.len())];
                let changed = dice.change(data, other);
                let outcome = std::panic::catch_unwind(|| check(&changed));
                assert!(outcome.is_ok(), "{target}, file {number}, change {change}: {}", hex(&changed));
            }
        }
    }
}

#[test]
fn the_seeds_are_what_this_file_makes() {
    for (target, seeds) in [("frame", frame_seeds()), ("batch", batch_seeds())] {
        let dir = corpus_dir(target);
        if std::env::var_os("UPDATE_CORPUS").is_some() {
            fs::create_dir_all(&dir).unwrap();
            for (name, data) in &seeds {
                fs::write(dir.join(format!("seed-{name}")), data).unwrap();
            }
        }
        let mut found = corpus(target);
        found.retain(|name, _| name.starts_with("seed-"));
        for (name, data) in &seeds {
            let committed = found.remove(&format!("seed-{name}"));
            // Packed bytes may differ between versions of a codec's crate; the checks cover them anyway.
            let is_same = committed.as_deref() == Some(data) || name.starts_with("packed-");
            assert!(is_same, "{target}/seed-{name} differs: run with UPDATE_CORPUS=1");
        }
        assert!(found.is_empty(), "{target} has seeds that nothing makes: {:?}", found.keys());
    }
}

fn corpus_dir(target: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus").join(target)
}

fn corpus(target: &str) -> BTreeMap<String, Vec<u8>> {
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(corpus_dir(target)).unwrap() {
        let path = entry.unwrap().path();
        files.insert(path.file_name().unwrap().to_string_lossy().into_owned(), fs::read(&path).unwrap());
    }
    files
}

/// SplitMix64, as elsewhere: the same seed makes the same changes.
struct Dice(u64);

impl Dice {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, count: usize) -> usize {
        (self.next() % count.max(1) as u64) as usize
    }

    /// One to four changes of the kinds that break decoders.
    fn change(&mut self, data: &[u8], other: &[u8]) -> Vec<u8> {
        let mut data = data.to_vec();
        for _ in 0..=self.below(4) {
            let at = self.below(data.len());
            match self.below(8) {
                _ if data.is_empty() => data.push(self.next() as u8),
                0 => data[at] ^= 1 << self.below(8),
                1 => data[at] = self.next() as u8,
                2 => data.truncate(at),
                3 => data.insert(at, self.next() as u8),
                4 => drop(data.remove(at)),
                5 => self.overwrite_number(&mut data, at),
                6 => {
                    let from = self.below(other.len());
                    data.extend_from_slice(&other[from.min(other.len())..]);
                }
                _ => {
                    let end = at + self.below(data.len() - at);
                    let copy = data[at..end].to_vec();
                    data.splice(at..at, copy);
                }
            }
            data.truncate(64 * 1024);
        }
        data
    }

    /// Lengths and counts are where decoders go wrong: edges of their ranges.
    fn overwrite_number(&mut self, data: &mut [u8], at: usize) {
        const EDGES: [i32; 9] = [0, 1, -1, -2, i32::MIN, i32::MAX, 0x7fff, 0xffff, 100_001];
        let number = EDGES[self.below(EDGES.len())].to_be_bytes();
        let width = [1, 2, 4][self.below(3)].min(data.len() - at);
        data[at..at + width].copy_from_slice(&number[4 - width..]);
    }
}

type Seeds = Vec<(String, Vec<u8>)>;

/// For each advertised API the golden body of its newest and of its oldest version; private requests;
/// and streams that are wrong as streams.
fn frame_seeds() -> Seeds {
    let mut seeds = Seeds::new();
    for range in ADVERTISED {
        let bodies = golden_requests(range.key);
        let supported = || bodies.iter().filter(|(version, _)| (range.min..=range.max).contains(version));
        for (version, body) in
            [supported().min_by_key(|(v, b)| (*v, b.len())), supported().max_by_key(|(v, _)| *v)]
                .into_iter()
                .flatten()
        {
            seeds.push((
                format!("{:02}-{}-v{version}", range.key, range.name),
                framed(range.key, *version, body),
            ));
        }
    }
    seeds.dedup();
    for (name, key, body) in private_requests() {
        seeds.push((name.to_owned(), framed(key, private::VERSION, &body)));
    }
    let versions = framed(18, 0, &[]);
    seeds.push(("two-in-a-row".into(), [versions.clone(), versions.clone()].concat()));
    seeds.push(("cut-short".into(), versions[..versions.len() - 1].to_vec()));
    seeds.push(("unknown-api".into(), framed(99, 3, b"body")));
    seeds.push(("newer-api-versions".into(), framed(18, 99, b"body")));
    seeds.push(("tls-hello".into(), b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03".to_vec()));
    seeds.push(("http".into(), b"GET / HTTP/1.1\r\nHost: a\r\n\r\n".to_vec()));
    seeds.push(("negative-length".into(), (-5_i32).to_be_bytes().to_vec()));
    seeds.push(("empty-frame".into(), vec![0; 4]));
    seeds.push(("too-long".into(), (64 * 1024 * 1024_i32).to_be_bytes().to_vec()));
    seeds
}

fn framed(api_key: i16, api_version: i16, body: &[u8]) -> Vec<u8> {
    let client_id = Some(StrBytes::from_static_str("seed"));
    let mut frame = BytesMut::new();
    put_request_header(&mut frame, &RequestHeader { api_key, api_version, correlation_id: 7, client_id });
    frame.put_slice(body);
    [&(frame.len() as u32).to_be_bytes()[..], &frame].concat()
}

/// Bodies that Apache Kafka's client encoded, with their versions.
fn golden_requests(key: i16) -> Vec<(i16, Vec<u8>)> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let prefix = format!("{key:02}-");
    let of_key = |name: &str| name.starts_with(&prefix) && name.ends_with(".request.tsv");
    let file = fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .find(|path| of_key(&path.file_name().unwrap().to_string_lossy()))
        .unwrap_or_else(|| panic!("no golden requests of API {key}"));
    let line = |line: &str| {
        let mut fields = line.split('\t');
        let version = fields.next().unwrap().parse().unwrap();
        (version, unhex(fields.nth(1).unwrap_or_default()))
    };
    fs::read_to_string(file).unwrap().lines().map(line).collect()
}

fn private_requests() -> Vec<(&'static str, i16, Bytes)> {
    use kafka::private::{
        AppendRequest, Claim, FetchFrom, FetchRequest, Message, TopicsRequest, Unit, VectorsRequest,
    };
    let topic = TopicName::parse("orders").unwrap();
    let partition = PartitionIndex(3);
    let id = TopicId(Uuid::from_u128(7));
    let from = FetchFrom {
        topic: topic.clone(),
        partition,
        id,
        from: Offset(50),
        bytes_max: 1 << 20,
        claim: Some(Claim { epoch: LeaderEpoch(2), base: Offset(40), crc: 0x1234_5678 }),
        known_end: Offset(60),
    };
    let fetch = FetchRequest {
        session: 9,
        wait_ms: 500,
        bytes_max: 1 << 22,
        pass_boe: true,
        pass_ppe: false,
        partitions: vec![from],
    };
    let unit = Unit {
        topic: topic.clone(),
        partition,
        id,
        origin: RegionId(Uuid::from_u128(1)),
        incarnation: TopicId(Uuid::from_u128(2)),
        first: Offset(50),
        extractors: Some(vec!["x-lane".into()]),
        last_rewritten: false,
        batches: records(Codec::None, 2).build().bytes,
    };
    let vectors = VectorsRequest { partitions: vec![(topic, partition)] };
    vec![
        ("private-topics", private::MIRROR_TOPICS, TopicsRequest { since: 3 }.encode()),
        ("private-vectors", private::MIRROR_VECTORS, vectors.encode()),
        ("private-fetch", private::MIRROR_FETCH, fetch.encode()),
        ("private-append", private::MIRROR_APPEND, AppendRequest { units: vec![unit] }.encode()),
        ("private-report", private::MIRROR_REPORT, Bytes::from(vec![0; 8])),
        ("private-notes", private::MIRROR_NOTES, Bytes::from(vec![0; 24])),
    ]
}

fn batch_seeds() -> Seeds {
    let mut seeds = Seeds::new();
    for (name, codec) in [
        ("plain", Codec::None),
        ("packed-gzip", Codec::Gzip),
        ("packed-snappy", Codec::Snappy),
        ("packed-lz4", Codec::Lz4),
        ("packed-zstd", Codec::Zstd),
    ] {
        seeds.push((name.into(), records(codec, 3).build().bytes.to_vec()));
    }
    let mut idempotent = records(Codec::None, 2);
    idempotent.producer(ProducerId(42), ProducerEpoch(1), 7).attributes(Attributes::TRANSACTIONAL);
    seeds.push(("transactional".into(), idempotent.build().bytes.to_vec()));
    let mut stamped = records(Codec::None, 1);
    stamped.attributes(Attributes::LOG_APPEND_TIME);
    seeds.push(("log-append-time".into(), stamped.build().bytes.to_vec()));
    seeds.push(("no-records".into(), records(Codec::None, 0).build().bytes.to_vec()));
    let plain = records(Codec::None, 1).build().bytes;
    seeds.push(("two-batches".into(), [&plain[..], &plain[..]].concat()));
    seeds.push(("torn".into(), plain[..plain.len() - 5].to_vec()));
    seeds.push(("zeros-after".into(), [&plain[..], &[0; 100]].concat()));
    seeds.push(("old-magic".into(), [&[0; 8][..], &[0, 0, 0, 50, 0, 0, 0, 0, 1], &[0; 45]].concat()));
    for (name, marker) in markers() {
        let batch = marker_batch(&marker, Offset(100), LeaderEpoch(3));
        seeds.push((format!("marker-{name}"), batch.bytes.to_vec()));
    }
    seeds
}

fn records(codec: Codec, count: i32) -> BatchBuilder {
    let mut builder = BatchBuilder::new(Offset(10), TimestampMs(1_700_000_000_000), codec);
    for i in 0..count {
        let headers: [(&str, Option<&[u8]>); 3] =
            [("x-lane", Some(b"boe-cart")), ("x-lane", None), ("", Some(b""))];
        let key = (i != 1).then_some(&b"key"[..]);
        builder.push(i, i64::from(i) - 1, key, Some(&[b'v'; 40]), &headers[..i as usize % 4]);
    }
    builder
}

fn markers() -> Vec<(&'static str, Marker)> {
    let cut = LaneCut {
        group: "g".into(),
        lane: "boe-cart".into(),
        coordinator_epoch: 2,
        previous: Some(Offset(9)),
    };
    let mirror = MirrorMarker {
        origin: RegionId(Uuid::from_u128(1)),
        incarnation: TopicId(Uuid::from_u128(2)),
        origin_epoch: LeaderEpoch(4),
        first: Offset(50),
        next: Offset(60),
        batches: vec![(1, Offset(50)), (6, Offset(55))],
        byte_len: 400,
        last_crc: 0xdead_beef,
        extractors: Some(vec!["x-lane".into(), "baggage:lane".into()]),
    };
    vec![
        ("mirror", Marker::Mirror(mirror)),
        ("activate", Marker::LaneActivate(cut.clone())),
        ("deactivate", Marker::LaneDeactivate(LaneCut { previous: None, ..cut })),
        ("purge", Marker::LanePurge(LanePurge { lane: "ppe-1".into(), coordinator_epoch: 1 })),
        ("extractors", Marker::Extractors(vec!["x-lane".into()])),
    ]
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.bytes().map(|digit| (digit as char).to_digit(16).unwrap() as u8).collect();
    digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect()
}
