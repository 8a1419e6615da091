//! The codecs of record batches: none, gzip, snappy, lz4 (frame format) and zstd.
//!
//! Unpacking is bounded by the caller's limit whatever the input claims. Snappy comes in two framings:
//! the one of the Java client (xerial: a magic, then blocks with int32 lengths) and raw blocks.

use std::io::{Read, Write};

use bytes::{Buf, Bytes};

use crate::batch::{BatchError, Codec};

/// Packs `plain`. Snappy uses the Java client's framing, which every client reads.
pub fn pack(codec: Codec, plain: &[u8]) -> Bytes {
    // Every writer below writes to memory, so none of its errors can happen.
    const MEMORY: &str = "packing into memory does not fail";
    match codec {
        Codec::None => Bytes::copy_from_slice(plain),
        Codec::Gzip => {
            let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
            encoder.write_all(plain).expect(MEMORY);
            encoder.finish().expect(MEMORY).into()
        }
        Codec::Snappy => pack_xerial(plain),
        Codec::Lz4 => {
            let info = lz4_flex::frame::FrameInfo::new().block_size(lz4_flex::frame::BlockSize::Max64KB);
            let mut encoder = lz4_flex::frame::FrameEncoder::with_frame_info(info, Vec::new());
            encoder.write_all(plain).expect(MEMORY);
            encoder.finish().expect(MEMORY).into()
        }
        Codec::Zstd => zstd::bulk::compress(plain, 0).expect(MEMORY).into(),
    }
}

/// Unpacks to at most `limit` bytes.
pub fn unpack(codec: Codec, packed: &[u8], limit: usize) -> Result<Bytes, BatchError> {
    match codec {
        Codec::None if packed.len() > limit => Err(BatchError::Unpacked(limit)),
        Codec::None => Ok(Bytes::copy_from_slice(packed)),
        Codec::Gzip => read_all(flate2::read::MultiGzDecoder::new(packed), packed.len(), limit),
        Codec::Snappy => unpack_snappy(packed, limit),
        Codec::Lz4 => read_all(lz4_flex::frame::FrameDecoder::new(packed), packed.len(), limit),
        Codec::Zstd => {
            let decoder = zstd::stream::read::Decoder::new(packed)
                .map_err(|_| BatchError::Records("the zstd decoder cannot start"))?;
            read_all(decoder, packed.len(), limit)
        }
    }
}

fn read_all(reader: impl Read, packed_len: usize, limit: usize) -> Result<Bytes, BatchError> {
    let mut plain = Vec::with_capacity(packed_len.saturating_mul(3).min(limit).min(1 << 20));
    reader
        .take(limit as u64 + 1)
        .read_to_end(&mut plain)
        .map_err(|_| BatchError::Records("they do not unpack"))?;
    if plain.len() > limit {
        return Err(BatchError::Unpacked(limit));
    }
    Ok(plain.into())
}

const XERIAL_MAGIC: &[u8; 8] = b"\x82SNAPPY\0";
const XERIAL_HEADER_LEN: usize = 16;
const XERIAL_BLOCK: usize = 32 * 1024;

fn pack_xerial(plain: &[u8]) -> Bytes {
    let mut packed = Vec::with_capacity(XERIAL_HEADER_LEN + plain.len() / 2);
    packed.extend_from_slice(XERIAL_MAGIC);
    packed.extend_from_slice(&1i32.to_be_bytes()); // version
    packed.extend_from_slice(&1i32.to_be_bytes()); // lowest compatible version
    let mut encoder = snap::raw::Encoder::new();
    for block in plain.chunks(XERIAL_BLOCK) {
        let block = encoder.compress_vec(block).expect("a block of 32 KiB is within snappy's limit");
        packed.extend_from_slice(&(block.len() as i32).to_be_bytes());
        packed.extend_from_slice(&block);
    }
    packed.into()
}

fn unpack_snappy(packed: &[u8], limit: usize) -> Result<Bytes, BatchError> {
    let mut plain = Vec::new();
    if !packed.starts_with(XERIAL_MAGIC) {
        unpack_snappy_block(packed, limit, &mut plain)?;
        return Ok(plain.into());
    }
    let mut rest = packed.get(XERIAL_HEADER_LEN..).ok_or(BatchError::Records("a snappy header is cut"))?;
    while !rest.is_empty() {
        let len = rest.try_get_i32().map_err(|_| BatchError::Records("a snappy block is cut"))?;
        let block = usize::try_from(len).ok().and_then(|len| rest.split_at_checked(len));
        let (block, after) = block.ok_or(BatchError::Records("a snappy block is cut"))?;
        unpack_snappy_block(block, limit, &mut plain)?;
        rest = after;
    }
    Ok(plain.into())
}

fn unpack_snappy_block(block: &[u8], limit: usize, plain: &mut Vec<u8>) -> Result<(), BatchError> {
    let damaged = |_| BatchError::Records("they do not unpack");
    let len = snap::raw::decompress_len(block).map_err(damaged)?;
    let start = plain.len();
    if len > limit - start {
        return Err(BatchError::Unpacked(limit));
    }
    // A block never unpacks to more than some hundred times its size; a larger claim is a lie that
    // would only make us allocate.
    if len > block.len().saturating_mul(SNAPPY_RATIO_MAX) {
        return Err(BatchError::Records("they do not unpack"));
    }
    plain.resize(start + len, 0);
    let written = snap::raw::Decoder::new().decompress(block, &mut plain[start..]).map_err(damaged)?;
    plain.truncate(start + written);
    Ok(())
}

/// A copy element of 3 bytes yields 64 bytes at most.
const SNAPPY_RATIO_MAX: usize = 64;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const CODECS: [Codec; 5] = [Codec::None, Codec::Gzip, Codec::Snappy, Codec::Lz4, Codec::Zstd];

    #[test]
    fn every_codec_unpacks_what_it_packed() {
        let repetitive = b"sealane ".repeat(50_000);
        for codec in CODECS {
            for plain in [&b""[..], b"x", &repetitive] {
                let packed = pack(codec, plain);
                assert_eq!(unpack(codec, &packed, plain.len()).unwrap(), plain, "{codec:?}");
            }
        }
    }

    #[test]
    fn a_batch_that_unpacks_beyond_the_limit_is_refused_by_every_codec() {
        let bomb = vec![0; 10_000_000];
        for codec in CODECS {
            let packed = pack(codec, &bomb);
            assert_eq!(unpack(codec, &packed, 9_999_999), Err(BatchError::Unpacked(9_999_999)), "{codec:?}");
        }
    }

    #[test]
    fn raw_snappy_is_read_too() {
        let plain = b"librdkafka writes snappy without a frame".repeat(100);
        let packed = snap::raw::Encoder::new().compress_vec(&plain).unwrap();
        assert_eq!(unpack(Codec::Snappy, &packed, 1 << 20).unwrap(), plain);
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic_and_never_exceed_the_limit(bytes: Vec<u8>, xerial: bool) {
            for codec in CODECS {
                let mut input = bytes.clone();
                if xerial && codec == Codec::Snappy {
                    input.splice(0..0, *XERIAL_MAGIC);
                }
                if let Ok(plain) = unpack(codec, &input, 4096) {
                    prop_assert!(plain.len() <= 4096);
                }
            }
        }

        #[test]
        fn random_content_survives(plain: Vec<u8>) {
            for codec in CODECS {
                prop_assert_eq!(&unpack(codec, &pack(codec, &plain), plain.len()).unwrap()[..], &plain[..]);
            }
        }
    }
}
