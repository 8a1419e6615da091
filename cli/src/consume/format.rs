//! How a consumed record is printed: named formats and templates, parsed once.

use std::io::{self, Write};

use serde_json::{Map, Value, json};

/// One record as a consumer sees it.
#[derive(Clone, Debug)]
pub struct Consumed<'a> {
    pub topic: &'a str,
    pub partition: i32,
    pub offset: i64,
    /// Milliseconds since 1970; -1 when there is none.
    pub timestamp_ms: i64,
    pub key: Option<&'a [u8]>,
    pub value: Option<&'a [u8]>,
    /// In their order; names may repeat.
    pub headers: Vec<(&'a str, Option<&'a [u8]>)>,
}

/// What to print of a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Format {
    Json,
    Template(Vec<Part>),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    Text(Vec<u8>),
    Topic,
    Partition,
    Offset,
    Timestamp,
    Key,
    Headers,
    Value,
}

/// Why a text is no format.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FormatError {
    #[error("--format {0:?} is none of value, full, json, and no template: it has no %")]
    Unknown(String),
    #[error("--format: {0:?} means nothing; there are %t %p %o %T %k %h %v %% \\n \\t \\\\")]
    Placeholder(String),
}

impl Format {
    pub fn parse(text: &str) -> Result<Format, FormatError> {
        let template = match text {
            "json" => return Ok(Format::Json),
            "value" => "%v\\n",
            "full" => "%t [%p] at %o  time %T  key %k  headers %h  value %v\\n",
            _ if text.contains('%') => text,
            _ => return Err(FormatError::Unknown(text.to_owned())),
        };
        let mut parts = Vec::new();
        let mut plain = Vec::new();
        let mut chars = template.chars();
        while let Some(c) = chars.next() {
            if !matches!(c, '%' | '\\') {
                plain.extend(c.encode_utf8(&mut [0; 4]).bytes());
                continue;
            }
            let next = chars.next();
            let part = match (c, next) {
                ('%', Some('t')) => Part::Topic,
                ('%', Some('p')) => Part::Partition,
                ('%', Some('o')) => Part::Offset,
                ('%', Some('T')) => Part::Timestamp,
                ('%', Some('k')) => Part::Key,
                ('%', Some('h')) => Part::Headers,
                ('%', Some('v')) => Part::Value,
                ('%', Some('%')) => Part::Text(b"%".to_vec()),
                ('\\', Some('n')) => Part::Text(b"\n".to_vec()),
                ('\\', Some('t')) => Part::Text(b"\t".to_vec()),
                ('\\', Some('\\')) => Part::Text(b"\\".to_vec()),
                _ => return Err(FormatError::Placeholder([Some(c), next].into_iter().flatten().collect())),
            };
            match part {
                Part::Text(bytes) => plain.extend(bytes),
                part => {
                    if !plain.is_empty() {
                        parts.push(Part::Text(std::mem::take(&mut plain)));
                    }
                    parts.push(part);
                }
            }
        }
        if !plain.is_empty() {
            parts.push(Part::Text(plain));
        }
        Ok(Format::Template(parts))
    }

    pub fn print(&self, out: &mut impl Write, record: &Consumed) -> io::Result<()> {
        match self {
            Format::Json => {
                serde_json::to_writer(&mut *out, &record.json())?;
                out.write_all(b"\n")
            }
            Format::Template(parts) => parts.iter().try_for_each(|part| part.print(out, record)),
        }
    }
}

impl Part {
    fn print(&self, out: &mut impl Write, record: &Consumed) -> io::Result<()> {
        match self {
            Part::Text(bytes) => out.write_all(bytes),
            Part::Topic => out.write_all(record.topic.as_bytes()),
            Part::Partition => write!(out, "{}", record.partition),
            Part::Offset => write!(out, "{}", record.offset),
            Part::Timestamp => write!(out, "{}", record.timestamp_ms),
            Part::Key => out.write_all(record.key.unwrap_or(NULL)),
            Part::Value => out.write_all(record.value.unwrap_or(NULL)),
            Part::Headers => {
                for (index, (name, value)) in record.headers.iter().enumerate() {
                    let comma = if index == 0 { "" } else { "," };
                    write!(out, "{comma}{name}=")?;
                    out.write_all(value.unwrap_or(NULL))?;
                }
                Ok(())
            }
        }
    }
}

impl Consumed<'_> {
    fn json(&self) -> Value {
        let mut object = Map::new();
        object.insert("topic".to_owned(), json!(self.topic));
        object.insert("partition".to_owned(), json!(self.partition));
        object.insert("offset".to_owned(), json!(self.offset));
        object.insert("timestamp_ms".to_owned(), json!(self.timestamp_ms));
        insert_bytes(&mut object, "key", self.key);
        insert_bytes(&mut object, "value", self.value);
        let headers = self.headers.iter().map(|(name, value)| {
            let mut header = Map::new();
            header.insert("name".to_owned(), json!(name));
            insert_bytes(&mut header, "value", *value);
            Value::Object(header)
        });
        object.insert("headers".to_owned(), headers.collect());
        Value::Object(object)
    }
}

/// Text as text, other bytes as hexadecimal under another name, null as null.
fn insert_bytes(object: &mut Map<String, Value>, name: &str, bytes: Option<&[u8]>) {
    match bytes.map(|bytes| (std::str::from_utf8(bytes), bytes)) {
        None => object.insert(name.to_owned(), Value::Null),
        Some((Ok(text), _)) => object.insert(name.to_owned(), json!(text)),
        Some((Err(_), bytes)) => {
            let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
            object.insert(format!("{name}_hex"), json!(hex))
        }
    };
}

/// How a template shows a missing key or value.
const NULL: &[u8] = b"null";

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> Consumed<'static> {
        Consumed {
            topic: "orders",
            partition: 3,
            offset: 42,
            timestamp_ms: 1000,
            key: None,
            value: Some(b"tea"),
            headers: vec![("x-lane", Some(b"boe-cart")), ("x-lane", None), ("raw", Some(b"\xff"))],
        }
    }

    fn print(format: &str) -> Vec<u8> {
        let mut out = Vec::new();
        Format::parse(format).expect(format).print(&mut out, &record()).expect("written");
        out
    }

    #[test]
    fn a_template_prints_what_it_names() {
        assert_eq!(print("value"), b"tea\n");
        assert_eq!(print("%t/%p@%o %T %k 100%%\\t%v\\n"), b"orders/3@42 1000 null 100%\ttea\n");
        assert_eq!(print("%h"), b"x-lane=boe-cart,x-lane=null,raw=\xff");
    }

    #[test]
    fn json_keeps_null_repeats_and_bytes_apart() {
        let text = String::from_utf8(print("json")).expect("JSON is text");
        let value: Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!(value["key"], Value::Null);
        assert_eq!(value["headers"][0], json!({"name": "x-lane", "value": "boe-cart"}));
        assert_eq!(value["headers"][1], json!({"name": "x-lane", "value": null}));
        assert_eq!(value["headers"][2], json!({"name": "raw", "value_hex": "ff"}));
    }

    #[test]
    fn a_wrong_format_says_what_there_is() {
        for bad in ["yaml", "%x", "50%", "%v\\q"] {
            assert!(Format::parse(bad).is_err(), "{bad}");
        }
    }
}
