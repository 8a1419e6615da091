//! Judges files as the API server would, without one: by the schemas of the resources (types, unknown
//! fields, required ones, values) and, where those hold, by their CEL rules. Both are read from the
//! definitions that are installed, so there is one set of rules.

use std::collections::BTreeMap;
use std::path::Path;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube_cel::Validator;
use serde::Deserialize as _;
use serde_json::Value;

use crate::names::GROUP;

/// Something wrong in one object of one file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    pub file: String,
    /// KIND NAME, or the number of the document.
    pub object: String,
    /// Path of the field; empty for the object as a whole.
    pub field: String,
    pub message: String,
}

impl std::fmt::Display for Finding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Finding { file, object, field, message } = self;
        match field.is_empty() {
            true => write!(f, "{file}: {object}: {message}"),
            false => write!(f, "{file}: {object}: {field}: {message}"),
        }
    }
}

/// What was found, and how many objects were judged and how many are not ours.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Report {
    pub findings: Vec<Finding>,
    pub judged: usize,
    pub others: usize,
}

/// A definition as JSON.
pub struct Schemas {
    by_kind: BTreeMap<String, (Vec<String>, Value)>,
}

impl Default for Schemas {
    fn default() -> Schemas {
        Schemas::of(&crate::crd::all())
    }
}

impl Schemas {
    pub fn of(definitions: &[CustomResourceDefinition]) -> Schemas {
        let mut by_kind = BTreeMap::new();
        for definition in definitions {
            let spec = &definition.spec;
            let versions = spec.versions.iter().map(|version| format!("{GROUP}/{}", version.name)).collect();
            let schema = spec.versions.first().and_then(|version| version.schema.as_ref());
            let schema = schema.and_then(|schema| schema.open_api_v3_schema.as_ref());
            let schema = serde_json::to_value(schema).unwrap_or_default();
            by_kind.insert(spec.names.kind.clone(), (versions, schema));
        }
        Schemas { by_kind }
    }

    /// All documents of a file.
    pub fn file(&self, path: &Path, report: &mut Report) {
        let file = path.display().to_string();
        match std::fs::read_to_string(path) {
            Ok(text) => self.text(&file, &text, report),
            Err(error) => report.findings.push(Finding {
                file,
                object: "file".to_owned(),
                field: String::new(),
                message: format!("cannot be read: {error}"),
            }),
        }
    }

    /// As [`Self::file`], from text.
    pub fn text(&self, file: &str, text: &str, report: &mut Report) {
        for (number, document) in (1..).zip(serde_yaml_ng::Deserializer::from_str(text)) {
            let place = |object: String, field: String, message: String| Finding {
                file: file.to_owned(),
                object,
                field,
                message,
            };
            let value = match Value::deserialize(document) {
                Ok(Value::Null) => continue,
                Ok(value) => value,
                Err(error) => {
                    let message = format!("is no YAML: {error}");
                    report.findings.push(place(format!("document {number}"), String::new(), message));
                    // What follows cannot be told apart from it.
                    return;
                }
            };
            for object in objects(value) {
                let group = object["apiVersion"].as_str().unwrap_or_default();
                if !group.starts_with(&format!("{GROUP}/")) {
                    report.others += 1;
                    continue;
                }
                report.judged += 1;
                let named = named(&object, number);
                let found = self.judge(&object, None);
                report
                    .findings
                    .extend(found.into_iter().map(|(field, message)| place(named.clone(), field, message)));
            }
        }
    }

    /// Field and message of everything that is wrong with an object that replaces `old`.
    pub fn judge(&self, object: &Value, old: Option<&Value>) -> Vec<(String, String)> {
        let kind = object["kind"].as_str().unwrap_or_default();
        let Some((versions, schema)) = self.by_kind.get(kind) else {
            let known: Vec<&str> = self.by_kind.keys().map(String::as_str).collect();
            return vec![("kind".to_owned(), format!("{kind:?} is none of {}", known.join(", ")))];
        };
        let version = object["apiVersion"].as_str().unwrap_or_default();
        if !versions.iter().any(|known| known == version) {
            return vec![("apiVersion".to_owned(), format!("{version:?} is not {}", versions.join(" or ")))];
        }
        let mut found = Vec::new();
        if object["metadata"]["name"].as_str().is_none_or(str::is_empty) {
            found.push(("metadata.name".to_owned(), "is missing".to_owned()));
        }
        check(schema, object, "", &mut found);
        if found.is_empty()
            && let Err(errors) = Validator::new().validate(schema, object, old)
        {
            found.extend(errors.into_vec().into_iter().map(|error| (error.field_path, error.message)));
        }
        found
    }
}

/// The objects of a document: a List has many.
fn objects(value: Value) -> Vec<Value> {
    match (&value["kind"], value["items"].as_array()) {
        (Value::String(kind), Some(items)) if kind == "List" => items.clone(),
        _ => vec![value],
    }
}

fn named(object: &Value, number: usize) -> String {
    match (object["kind"].as_str(), object["metadata"]["name"].as_str()) {
        (Some(kind), Some(name)) => format!("{kind} {name}"),
        _ => format!("document {number}"),
    }
}

/// What a structural schema says, without the rules.
fn check(schema: &Value, value: &Value, path: &str, found: &mut Vec<(String, String)>) {
    let mut wrong = |message: String| found.push((path.to_owned(), message));
    if value.is_null() {
        if schema["nullable"] != Value::Bool(true) {
            wrong("is null".to_owned());
        }
        return;
    }
    if schema["x-kubernetes-int-or-string"] == Value::Bool(true) {
        if !value.is_string() && !value.is_i64() {
            wrong(format!("is {}, must be a whole number or a string", name_of(value)));
        }
        return;
    }
    let type_ = schema["type"].as_str().unwrap_or("object");
    if !is_type(type_, value) {
        return wrong(format!("is {}, must be of type {type_}", name_of(value)));
    }
    if let Some(allowed) = schema["enum"].as_array().filter(|allowed| !allowed.contains(value)) {
        let allowed: Vec<String> = allowed.iter().filter(|v| !v.is_null()).map(shown).collect();
        wrong(format!("is {}, must be one of {}", shown(value), allowed.join(", ")));
    }
    match value {
        Value::Object(map) => check_object(schema, map, path, found),
        Value::Array(list) => {
            bounds(schema, "Items", list.len() as f64, "items", path, found);
            for (index, item) in list.iter().enumerate() {
                check(&schema["items"], item, &format!("{path}[{index}]"), found);
            }
            check_keys(schema, list, path, found);
        }
        Value::String(text) => {
            bounds(schema, "Length", text.chars().count() as f64, "characters", path, found);
            let pattern = schema["pattern"].as_str();
            if let Some(pattern) = pattern.filter(|p| regex::Regex::new(p).is_ok_and(|p| !p.is_match(text))) {
                found.push((path.to_owned(), format!("is {text:?}, must match {pattern}")));
            }
        }
        Value::Number(number) => {
            bounds(schema, "imum", number.as_f64().unwrap_or_default(), "", path, found);
        }
        _ => {}
    }
}

fn check_object(
    schema: &Value,
    map: &serde_json::Map<String, Value>,
    path: &str,
    found: &mut Vec<(String, String)>,
) {
    bounds(schema, "Properties", map.len() as f64, "entries", path, found);
    for required in schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str) {
        if !map.contains_key(required) {
            found.push((join(path, required), "is missing".to_owned()));
        }
    }
    let properties = schema["properties"].as_object();
    for (key, value) in map {
        let own = properties.and_then(|properties| properties.get(key));
        let schema = match own {
            Some(own) => own,
            // Those of every object, judged by Kubernetes itself.
            None if path.is_empty() && matches!(key.as_str(), "apiVersion" | "kind" | "metadata") => continue,
            None if path == "metadata" => continue,
            None if schema["additionalProperties"].is_object() => &schema["additionalProperties"],
            None if schema["x-kubernetes-preserve-unknown-fields"] == Value::Bool(true) => continue,
            None => {
                found.push((join(path, key), "is no field of it".to_owned()));
                continue;
            }
        };
        if path.is_empty() && key == "metadata" {
            continue;
        }
        check(schema, value, &join(path, key), found);
    }
}

/// A list that is a map by keys has each once.
fn check_keys(schema: &Value, list: &[Value], path: &str, found: &mut Vec<(String, String)>) {
    let Some(keys) = schema["x-kubernetes-list-map-keys"].as_array() else { return };
    let key_of = |item: &Value| -> Vec<Value> {
        keys.iter().filter_map(Value::as_str).map(|key| item[key].clone()).collect()
    };
    for (index, item) in list.iter().enumerate() {
        if list[..index].iter().any(|former| key_of(former) == key_of(item)) {
            found.push((format!("{path}[{index}]"), format!("{} is there twice", shown(&key_of(item)[0]))));
        }
    }
}

/// `min` and `max` of what the schema calls `what`.
fn bounds(schema: &Value, what: &str, value: f64, unit: &str, path: &str, found: &mut Vec<(String, String)>) {
    let unit = if unit.is_empty() { String::new() } else { format!(" {unit}") };
    if let Some(min) = schema[&format!("min{what}")].as_f64().filter(|min| value < *min) {
        found.push((path.to_owned(), format!("is {value}{unit}, must be at least {min}{unit}")));
    }
    if let Some(max) = schema[&format!("max{what}")].as_f64().filter(|max| value > *max) {
        found.push((path.to_owned(), format!("is {value}{unit}, must be at most {max}{unit}")));
    }
}

fn is_type(type_: &str, value: &Value) -> bool {
    match type_ {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "boolean" => value.is_boolean(),
        "integer" => value.is_i64() || value.is_u64() || value.as_f64().is_some_and(|v| v.fract() == 0.0),
        "number" => value.is_number(),
        _ => true,
    }
}

fn name_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

fn shown(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

fn join(path: &str, key: &str) -> String {
    if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") }
}
