//! Configuration: one plain struct per service, read from TOML, documented from its own source.
//!
//! [`crate::config!`] defines such a struct; its field docs are the text of `--print-config` and of
//! `docs/CONFIGURATION.md`, so neither can go out of date. Unknown keys and wrong types are errors
//! of one line that name the file, the line and the key.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;

/// A struct made by [`crate::config!`]: knows its keys and what they mean.
pub trait Documented {
    /// How a field of this type is written in TOML.
    const SHAPE: Shape;
    fn fields() -> Vec<Field>;
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// `[name]`
    Table,
    /// `[[name]]`
    List,
}

/// One key of a configuration file.
pub struct Field {
    pub name: &'static str,
    /// Lines of its doc comment.
    pub doc: &'static [&'static str],
    /// Set for a field that is itself a documented struct, or a list of them.
    pub nested: Option<Nested>,
}

/// How a nested struct is written, and its keys.
pub type Nested = (Shape, fn() -> Vec<Field>);

impl<T: Documented> Documented for Vec<T> {
    const SHAPE: Shape = Shape::List;
    fn fields() -> Vec<Field> {
        T::fields()
    }
}

impl<T: Documented> Documented for Option<T> {
    const SHAPE: Shape = T::SHAPE;
    fn fields() -> Vec<Field> {
        T::fields()
    }
}

/// Why a configuration file was not taken; the text is one line.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("{path}: cannot be read: {source}")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{path}, line {line}: {name} is not set in the environment")]
    Unset { path: PathBuf, line: usize, name: String },
    #[error("{path}, line {line}: the environment's {name} has a quote, a backslash or a line break in it")]
    Unfit { path: PathBuf, line: usize, name: String },
    #[error("{path}, line {line}: {message}")]
    Content { path: PathBuf, line: usize, message: String },
}

/// Reads a configuration file; keys that are not given keep their defaults.
pub fn load<T: DeserializeOwned>(path: &Path) -> Result<T, ConfigError> {
    let text = std::fs::read_to_string(path)
        .map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
    parse(&expand(&text, path, |name| std::env::var(name).ok())?, path)
}

/// Puts variables of the environment where `${NAME}` stands, outside of comments. For what is known
/// only where the process runs, such as the address of its node.
fn expand(text: &str, path: &Path, value: impl Fn(&str) -> Option<String>) -> Result<String, ConfigError> {
    let mut out = String::with_capacity(text.len());
    for (line, content) in (1..).zip(text.split_inclusive('\n')) {
        let mut rest = content;
        while let Some((before, after)) =
            rest.split_once("${").filter(|_| !content.trim_start().starts_with('#'))
        {
            let Some((name, after)) = after.split_once('}') else { break };
            let (path, name) = (path.to_owned(), name.to_owned());
            let Some(value) = value(&name) else { return Err(ConfigError::Unset { path, line, name }) };
            if value.contains(['"', '\'', '\\', '\n', '\r']) {
                return Err(ConfigError::Unfit { path, line, name });
            }
            out.push_str(before);
            out.push_str(&value);
            rest = after;
        }
        out.push_str(rest);
    }
    Ok(out)
}

/// As [`load`], from text; `path` is for the error only.
pub fn parse<T: DeserializeOwned>(text: &str, path: &Path) -> Result<T, ConfigError> {
    toml::from_str(text).map_err(|error| {
        let at = error.span().map_or(0, |span| span.start.min(text.len()));
        let line_start = text[..at].rfind('\n').map_or(0, |newline| newline + 1);
        let key = text[line_start..].lines().next().unwrap_or("").split('=').next().unwrap_or("").trim();
        let message = error.message().replace("unknown field", "unknown key").replace('\n', " ");
        let named = key.is_empty() || message.contains(&format!("`{key}`"));
        ConfigError::Content {
            path: path.to_owned(),
            line: text[..at].matches('\n').count() + 1,
            message: if named { message } else { format!("{key}: {message}") },
        }
    })
}

/// The full default configuration as a commented TOML file.
pub fn print<T: Documented + Serialize + Default>(title: &str) -> String {
    let value = toml::Value::try_from(T::default()).expect("a default configuration is plain TOML");
    let mut out =
        format!("# {title}\n# Every key is shown with its default; a key that is left out keeps it.\n");
    print_table(&mut out, "", &T::fields(), value.as_table());
    out
}

/// The same as a table for `docs/CONFIGURATION.md`.
pub fn markdown<T: Documented + Serialize + Default>(title: &str) -> String {
    let value = toml::Value::try_from(T::default()).expect("a default configuration is plain TOML");
    let mut out = format!("## {title}\n");
    markdown_table(&mut out, "", &T::fields(), value.as_table());
    out
}

fn print_table(out: &mut String, prefix: &str, fields: &[Field], values: Option<&toml::Table>) {
    // In TOML, plain keys must come before the first table header.
    for field in fields.iter().filter(|field| field.nested.is_none()) {
        out.push('\n');
        for line in field.doc {
            let _ = writeln!(out, "# {}", line.trim());
        }
        let _ = match values.and_then(|table| table.get(field.name)) {
            Some(value) => writeln!(out, "{} = {}", field.name, inline(value)),
            None => writeln!(out, "# {} = (not set)", field.name),
        };
    }
    for field in fields {
        let Some((shape, nested)) = field.nested else { continue };
        let path = join(prefix, field.name);
        out.push('\n');
        for line in field.doc {
            let _ = writeln!(out, "# {}", line.trim());
        }
        let value = values.and_then(|table| table.get(field.name));
        let entries = tables(value);
        let header = if shape == Shape::List { format!("[[{path}]]") } else { format!("[{path}]") };
        if entries.is_empty() {
            print_commented(out, &header, &path, &nested());
        }
        for entry in entries {
            let _ = writeln!(out, "{header}");
            print_table(out, &path, &nested(), Some(entry));
        }
    }
}

/// An optional table that is not there by default: shown, but commented out.
fn print_commented(out: &mut String, header: &str, path: &str, fields: &[Field]) {
    let mut text = format!("{header}\n");
    print_table(&mut text, path, fields, None);
    for line in text.lines() {
        let bare = line.trim_start_matches(['#', ' ']);
        let _ = if bare.is_empty() { writeln!(out, "#") } else { writeln!(out, "# {bare}") };
    }
}

fn markdown_table(out: &mut String, prefix: &str, fields: &[Field], values: Option<&toml::Table>) {
    if !prefix.is_empty() {
        let _ = writeln!(out, "\n### `{prefix}`");
    }
    let plain: Vec<&Field> = fields.iter().filter(|field| field.nested.is_none()).collect();
    if !plain.is_empty() {
        out.push_str("\n| key | default | meaning |\n| --- | --- | --- |\n");
    }
    for field in plain {
        let value = values.and_then(|table| table.get(field.name));
        let default = value.map_or("not set".to_owned(), |value| format!("`{}`", inline(value)));
        let _ = writeln!(out, "| `{}` | {} | {} |", field.name, default, sentence(field.doc));
    }
    for field in fields {
        let Some((shape, nested)) = field.nested else { continue };
        let name = join(prefix, field.name);
        let name = if shape == Shape::List { format!("{name}[]") } else { name };
        let entries = tables(values.and_then(|table| table.get(field.name)));
        markdown_table(out, &name, &nested(), entries.first().copied());
        let _ = writeln!(out, "\n{}", sentence(field.doc));
    }
}

fn tables(value: Option<&toml::Value>) -> Vec<&toml::Table> {
    match value {
        Some(toml::Value::Table(table)) => vec![table],
        Some(toml::Value::Array(list)) => list.iter().filter_map(toml::Value::as_table).collect(),
        _ => Vec::new(),
    }
}

fn inline(value: &toml::Value) -> String {
    value.to_string().trim().to_owned()
}

fn sentence(doc: &[&str]) -> String {
    doc.iter().map(|line| line.trim()).collect::<Vec<_>>().join(" ").replace('|', "\\|")
}

fn join(prefix: &str, name: &str) -> String {
    if prefix.is_empty() { name.to_owned() } else { format!("{prefix}.{name}") }
}

/// Defines a configuration struct with its defaults, serde with unknown keys denied, and its docs.
///
/// A plain field has `= default`; a field that is itself such a struct (or `Vec` or `Option` of
/// one) ends in `=> nested` and may have a default too. Each field's doc gives its unit, and what
/// breaks if it is wrong.
///
/// ```
/// chassis::config! {
///     /// One listener.
///     pub struct Listener {
///         /// Address to bind.
///         pub bind: String = "127.0.0.1:9092".to_owned(),
///         /// TLS; plain text when not set.
///         pub tls: Option<chassis::tls::TlsFiles> => nested,
///     }
/// }
/// ```
#[macro_export]
macro_rules! config {
    ($(
        $(#[doc = $about:literal])*
        pub struct $name:ident {
            $(
                $(#[doc = $doc:literal])*
                pub $field:ident : $type:ty $(= $default:expr)? $(=> $nested:ident)?
            ),* $(,)?
        }
    )*) => {$(
        $(#[doc = $about])*
        #[derive(Clone, Debug, PartialEq, ::serde::Serialize, ::serde::Deserialize)]
        #[serde(deny_unknown_fields, default)]
        pub struct $name {
            $( $(#[doc = $doc])* pub $field: $type, )*
        }

        impl Default for $name {
            fn default() -> $name {
                $name { $( $field: $crate::config!(@default $($default)?), )* }
            }
        }

        impl $crate::config::Documented for $name {
            const SHAPE: $crate::config::Shape = $crate::config::Shape::Table;
            fn fields() -> ::std::vec::Vec<$crate::config::Field> {
                ::std::vec![$(
                    $crate::config::Field {
                        name: ::core::stringify!($field),
                        doc: &[$($doc),*],
                        nested: $crate::config!(@nested $type $(, $nested)?),
                    },
                )*]
            }
        }
    )*};
    (@default) => { ::core::default::Default::default() };
    (@default $default:expr) => { $default };
    (@nested $type:ty) => { ::core::option::Option::None };
    (@nested $type:ty, nested) => {
        ::core::option::Option::Some((
            <$type as $crate::config::Documented>::SHAPE,
            <$type as $crate::config::Documented>::fields,
        ))
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    crate::config! {
        /// One listener.
        pub struct Listener {
            /// Address to bind.
            pub bind: String = "127.0.0.1:9092".to_owned(),
            /// Files.
            pub tls: Option<Files> => nested,
        }

        pub struct Files {
            /// PEM file.
            pub cert: PathBuf = PathBuf::from("a.crt"),
        }

        pub struct Broker {
            /// Bytes a request may have.
            /// Larger ones close the connection.
            pub request_bytes_max: u32 = 1024,
            /// Listeners of this broker.
            pub listeners: Vec<Listener> = vec![Listener::default()] => nested,
            /// Name of the rack, if any.
            pub rack: Option<String>,
        }
    }

    #[test]
    fn variables_of_the_environment_are_put_in_and_unknown_ones_are_named() {
        let known = |name: &str| match name {
            "HOST" => Some("10.0.0.1".to_owned()),
            "ODD" => Some("a\"b".to_owned()),
            _ => None,
        };
        let path = Path::new("f.toml");
        let text = "# ${NOPE}\na = \"${HOST}:1,${HOST}:2\"\nb = \"${open\"\n";
        let expected = "# ${NOPE}\na = \"10.0.0.1:1,10.0.0.1:2\"\nb = \"${open\"\n";
        assert_eq!(expand(text, path, known).expect("all are known"), expected);
        let error = expand("\nx = \"${NOPE}\"", path, known).expect_err("not set").to_string();
        assert_eq!(error, "f.toml, line 2: NOPE is not set in the environment");
        assert!(expand("x = \"${ODD}\"", path, known).is_err());
    }

    #[test]
    fn the_printed_default_reads_back_as_the_default() {
        let text = print::<Broker>("sealane broker");
        let read: Broker = parse(&text, Path::new("x.toml")).expect("printed text parses");
        assert_eq!(read, Broker::default());
        assert!(text.contains("# Larger ones close the connection.\nrequest_bytes_max = 1024\n"), "{text}");
        assert!(text.contains("# rack = (not set)"), "{text}");
        assert!(text.contains("# [listeners.tls]"), "{text}");
    }

    #[test]
    fn an_unknown_key_is_one_line_with_file_line_and_key() {
        let text = "request_bytes_max = 1\nrequest_byte_max = 2\n";
        let error = parse::<Broker>(text, Path::new("b.toml")).expect_err("unknown key").to_string();
        assert!(
            error.starts_with("b.toml, line 2: unknown key `request_byte_max`, expected one of"),
            "{error}"
        );
        assert_eq!(error.lines().count(), 1);
    }

    #[test]
    fn a_wrong_type_is_one_line_that_names_the_key() {
        let text = "[[listeners]]\nbind = 7\n";
        let error = parse::<Broker>(text, Path::new("b.toml")).expect_err("wrong type").to_string();
        assert_eq!(error, "b.toml, line 2: bind: invalid type: integer `7`, expected a string");
    }

    #[test]
    fn the_markdown_lists_every_key_with_its_default() {
        let text = markdown::<Broker>("Broker");
        assert!(text.contains("| `request_bytes_max` | `1024` | Bytes a request may have. Larger"), "{text}");
        assert!(text.contains("### `listeners[].tls`"), "{text}");
    }
}
