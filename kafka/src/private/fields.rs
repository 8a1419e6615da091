//! Fields that the messages share, and enums of one byte.

use bytes::{BufMut, BytesMut};

use crate::error::ErrorCode;
use crate::names::{TopicId, TopicName};
use crate::offset::{Offset, PartitionIndex};
use crate::wire::{Reader, WireError, Writer};

macro_rules! byte_enum {
    ($name:ident: $($variant:ident),*) => {
        impl $name {
            pub fn write(self, out: &mut BytesMut) {
                out.put_u8(self as u8);
            }

            pub fn from_byte(byte: u8) -> Option<$name> {
                match byte {
                    $(v if v == $name::$variant as u8 => Some($name::$variant),)*
                    _ => None,
                }
            }

            pub fn read(from: &mut Reader) -> Result<$name, WireError> {
                $name::from_byte(from.u8(stringify!($name))?).ok_or(WireError::Value(stringify!($name)))
            }
        }
    };
}

pub(super) use byte_enum;

pub fn put_error(out: &mut BytesMut, error: ErrorCode) {
    out.put_i16(error.code());
}

pub fn take_error(from: &mut Reader) -> Result<ErrorCode, WireError> {
    ErrorCode::from_code(from.i16("error")?).ok_or(WireError::Value("error"))
}

pub fn take_topic(from: &mut Reader) -> Result<TopicName, WireError> {
    TopicName::parse(&from.text("topic")?).map_err(|_| WireError::Value("topic"))
}

pub fn take_offset(from: &mut Reader, field: &'static str) -> Result<Offset, WireError> {
    match from.i64(field)? {
        value if value >= -1 => Ok(Offset(value)),
        _ => Err(WireError::Value(field)),
    }
}

pub(super) fn take_partition(from: &mut Reader) -> Result<PartitionIndex, WireError> {
    from.i32("partition").map(PartitionIndex)
}

pub(super) fn take_topic_id(from: &mut Reader) -> Result<TopicId, WireError> {
    from.uuid("topic id").map(TopicId)
}

pub(super) fn take_u64_option(from: &mut Reader, field: &'static str) -> Result<Option<u64>, WireError> {
    from.option(field, |f| f.u64(field))
}

pub(super) fn put_u64_option(out: &mut BytesMut, value: Option<u64>) {
    out.option(value.as_ref(), |o, v| o.put_u64(*v));
}

pub fn put_extractors(out: &mut BytesMut, list: Option<&Vec<String>>) {
    out.option(list, |o, list| o.array(list, |o, e| o.text(e)));
}

pub fn take_extractors(from: &mut Reader) -> Result<Option<Vec<String>>, WireError> {
    from.option("extractors", |f| f.array("extractors", |f| f.text("extractor")))
}
