//! The committed CRD YAML matches the Rust types, and each schema is structural enough for a real API server.
//! `RUSSET_UPDATE_GOLDENS=1` (or `cargo xtask codegen`) rewrites the files.

use std::path::PathBuf;

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../manifests/crds")
}

#[test]
fn committed_yaml_is_what_the_types_say() {
    let update = std::env::var_os("RUSSET_UPDATE_GOLDENS").is_some();
    let mut expected = Vec::new();
    for crd in russet_crds::all() {
        let name = format!("{}.yaml", crd.spec.names.plural);
        let text = format!(
            "# Generated from crds/src by `cargo xtask codegen`; edit the Rust type instead.\n{}",
            serde_norway::to_string(&crd).unwrap()
        );
        let path = folder().join(&name);
        if update {
            std::fs::write(&path, &text).unwrap();
        }
        let committed = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(committed == text, "{name} differs from the types: run `cargo xtask codegen` and commit");
        expected.push(name);
    }
    expected.sort();
    let head = "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nresources:\n";
    let kustomization = expected.iter().fold(head.to_owned(), |text, name| format!("{text}- {name}\n"));
    let path = folder().join("kustomization.yaml");
    if update {
        std::fs::write(&path, &kustomization).unwrap();
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(committed == kustomization, "kustomization.yaml lists other files than there are kinds");
    expected.push("kustomization.yaml".into());
    let mut found: Vec<String> = std::fs::read_dir(folder())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    found.sort();
    expected.sort();
    assert_eq!(found, expected, "manifests/crds holds one file per kind and nothing else");
}

#[test]
fn integer_schemas_use_kubernetes_formats_and_minimum_zero() {
    fn walk(name: &str, schema: &serde_json::Value, seen: &mut usize) {
        if let Some(format) = schema["format"].as_str().filter(|_| schema["type"] == "integer") {
            assert!(matches!(format, "int32" | "int64"), "{name} has the format {format}");
            *seen += usize::from(schema["minimum"].as_f64().is_some_and(|least| least >= 0.0));
        }
        match schema {
            serde_json::Value::Object(fields) => {
                fields.iter().for_each(|(name, value)| walk(name, value, seen))
            }
            serde_json::Value::Array(items) => items.iter().for_each(|value| walk(name, value, seen)),
            _ => {}
        }
    }
    let mut bounded = 0;
    for crd in russet_crds::all() {
        walk(&crd.spec.names.kind, &serde_json::to_value(&crd).unwrap(), &mut bounded);
    }
    assert!(bounded > 60, "only {bounded} numbers have a least value");
}

/// Helm and Flux take an object without status for ready, so those that people create begin with one that is not.
#[test]
fn new_objects_have_a_status_that_describes_no_generation() {
    let mut waiting = Vec::new();
    for crd in russet_crds::all() {
        let schema = serde_json::to_value(&crd.spec.versions[0].schema).unwrap();
        let status = &schema["openAPIV3Schema"]["properties"]["status"];
        let observes = !status["properties"]["observedGeneration"].is_null();
        let expected = serde_json::json!({"observedGeneration": russet_crds::NOT_OBSERVED});
        assert_eq!(status["default"] == expected, observes, "{}", crd.spec.names.kind);
        assert!(status["required"].is_null(), "{}: the default lacks required fields", crd.spec.names.kind);
        if observes {
            waiting.push(crd.spec.names.kind);
        }
    }
    let created = [
        "AccessKey",
        "Benchmark",
        "Model",
        "ModelCopy",
        "ModelDeployment",
        "ModelProvider",
        "ModelRoute",
        "NodePool",
        "PipelineRun",
        "ShardingStrategy",
        "Tier",
    ];
    for kind in created {
        assert!(waiting.iter().any(|known| known == kind), "{kind} is ready before anything saw it");
    }
    let group = russet_crds::ShardGroup::new("g", russet_crds::ShardGroupSpec::default());
    let observed = |generation| russet_crds::ShardGroup {
        status: Some(russet_crds::ShardGroupStatus { observed_generation: generation, ..Default::default() }),
        ..group.clone()
    };
    assert!(!group.is_reported() && !observed(Some(russet_crds::NOT_OBSERVED)).is_reported());
    assert!(observed(Some(1)).is_reported());
}

#[test]
fn names_of_kinds_never_collide() {
    let mut seen = std::collections::BTreeSet::new();
    for crd in russet_crds::all() {
        let names = &crd.spec.names;
        let mut all = vec![names.plural.clone()];
        all.extend(names.short_names.clone().unwrap_or_default());
        for name in all {
            assert!(seen.insert(name.clone()), "{name} is used twice");
        }
        assert_eq!(names.categories.as_deref(), Some(&["russet".to_owned()][..]), "{}", names.kind);
    }
    assert_eq!(seen.len(), 18 + 16, "eighteen kinds; all but Shard and Budget have a short name");
}

#[test]
fn committed_reference_is_what_the_types_say() {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../docs/reference/api.md");
    let text = russet_crds::reference::markdown();
    if std::env::var_os("RUSSET_UPDATE_GOLDENS").is_some() {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, &text).unwrap();
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        committed == text,
        "docs/reference/api.md differs from the types: run `cargo xtask codegen` and commit"
    );
}

/// Every optional field may also be emptied. With server-side apply that is `null` on a real API server,
/// which sets the default, or rejects it where there is none.
#[test]
fn optional_spec_fields_accept_their_empty_value() {
    fn walk(path: &str, schema: &serde_json::Value, seen: &mut usize) {
        let required = schema["required"].as_array().cloned().unwrap_or_default();
        for (name, field) in schema["properties"].as_object().into_iter().flatten() {
            let path = format!("{path}.{name}");
            if matches!(field["type"].as_str(), Some("object" | "array"))
                && !required.contains(&name.as_str().into())
            {
                assert!(field["nullable"] == true || !field["default"].is_null(), "{path} cannot be emptied");
                *seen += 1;
            }
            walk(&path, field, seen);
        }
        for values in ["items", "additionalProperties"] {
            if schema[values].is_object() {
                walk(&format!("{path}[]"), &schema[values], seen);
            }
        }
    }
    let mut seen = 0;
    for crd in russet_crds::all() {
        let schema = serde_json::to_value(&crd.spec.versions[0].schema).unwrap();
        walk(&crd.spec.names.kind, &schema["openAPIV3Schema"]["properties"]["spec"], &mut seen);
    }
    assert!(seen > 20, "only {seen} fields were looked at");
}
