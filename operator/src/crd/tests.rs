//! The definitions as they are installed, and the rules on good and bad objects.

use std::path::PathBuf;

use serde_json::json;

use crate::lint::{Report, Schemas};

fn manifests() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../manifests/crd")
}

#[test]
fn the_definitions_in_the_manifests_are_those_of_the_code() {
    for definition in super::all() {
        let name = definition.metadata.name.clone().expect("named");
        let path = manifests().join(format!("{name}.yaml"));
        let text = super::yaml(&definition);
        if std::env::var_os("SEALANE_WRITE_DOCS").is_some() {
            std::fs::create_dir_all(manifests()).expect("a folder");
            std::fs::write(&path, &text).expect("written");
        }
        let found = std::fs::read_to_string(&path).unwrap_or_default();
        let advice = "SEALANE_WRITE_DOCS=1 cargo test -p operator definitions";
        assert!(found == text, "{} is old: {advice}", path.display());
    }
}

#[test]
fn the_table_of_good_and_bad_objects_is_judged_as_it_says() {
    let schemas = Schemas::default();
    for case in super::table::cases() {
        let found = schemas.judge(&case.object, case.old.as_ref());
        let text: Vec<String> = found.iter().map(|(field, message)| format!("{field}: {message}")).collect();
        let text = text.join("\n");
        match case.wrong {
            None => assert!(found.is_empty(), "{}: {text}", case.name),
            Some(wrong) => assert!(text.contains(wrong), "{}: {text:?} does not say {wrong:?}", case.name),
        }
    }
}

#[test]
fn every_rule_compiles() {
    for definition in super::all() {
        let schema = definition.spec.versions[0].schema.clone().expect("a schema").open_api_v3_schema;
        let schema = serde_json::to_value(schema).expect("JSON");
        let compiled = kube_cel::compile_schema(&schema);
        let errors: Vec<String> = compiled.compilation_errors().iter().map(|e| e.to_string()).collect();
        assert!(errors.is_empty(), "{:?}: {errors:?}", definition.metadata.name);
    }
}

#[test]
fn lint_names_file_object_and_field_and_leaves_other_kinds_alone() {
    let text = "\
apiVersion: v1
kind: Namespace
metadata: {name: a}
---
apiVersion: sealane.io/v1alpha1
kind: Topic
metadata: {name: orders}
spec:
  clusterRef: {name: east}
  partitions: many
  colour: red
";
    let mut report = Report::default();
    Schemas::default().text("a.yaml", text, &mut report);
    let lines: Vec<String> = report.findings.iter().map(ToString::to_string).collect();
    assert_eq!((report.judged, report.others), (1, 1));
    assert!(lines.contains(&"a.yaml: Topic orders: spec.colour: is no field of it".to_owned()), "{lines:?}");
    let wrong = "a.yaml: Topic orders: spec.partitions: is a string, must be of type integer";
    assert!(lines.contains(&wrong.to_owned()), "{lines:?}");
    let mut report = Report::default();
    Schemas::default().text("b.yaml", "a: [", &mut report);
    assert!(report.findings[0].message.contains("is no YAML"));
    let kind = json!({"apiVersion": "sealane.io/v1alpha1", "kind": "User", "metadata": {"name": "u"}});
    assert!(Schemas::default().judge(&kind, None)[0].1.contains("none of BrokerCluster"));
}
