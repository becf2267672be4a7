//! Parts of the charts that are copies of `manifests/`: CRDs, roles, admission policies. Written by `cargo
//! xtask codegen`, so that no rule is written twice; tidy reports stale ones.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};

use crate::cargo::root;

/// Annotation for what an uninstallation must keep: deleting a CRD would delete all its objects.
const KEEP: &str = "  annotations:\n    helm.sh/resource-policy: keep\n";

/// Components whose certificate users exist on the embedded server only. Elsewhere the bindings name their
/// ServiceAccounts, and these users would grant access to any holder of a signed certificate.
const COMPONENTS: [&str; 2] = ["operator", "gateway"];

/// Rules that a chart brings only where a value says so, and that value; the others come with the control plane.
const OPTIONAL: [(&str, &str); 1] = [("gateway-models.yaml", ".Values.gateway.modelManagement")];

/// A file of the repository and its expected content.
struct GeneratedFile {
    path: String,
    text: String,
}

/// Writes every copy and deletes those whose original is gone.
pub fn write() -> Result<()> {
    let copies = copies()?;
    for stale in unexpected(&copies)? {
        std::fs::remove_file(root().join(stale))?;
    }
    for GeneratedFile { path, text } in copies {
        std::fs::write(root().join(&path), text).with_context(|| path)?;
    }
    Ok(())
}

/// The copies that differ from their originals.
pub fn stale() -> Result<Vec<String>> {
    let copies = copies()?;
    let mut found = unexpected(&copies)?;
    for GeneratedFile { path, text } in copies {
        if std::fs::read_to_string(root().join(&path)).unwrap_or_default() != text {
            found.push(path);
        }
    }
    Ok(found)
}

fn copies() -> Result<Vec<GeneratedFile>> {
    let mut copies = Vec::new();
    for name in files("manifests/crds")?.iter().filter(|name| *name != "kustomization.yaml") {
        let text = read(&format!("manifests/crds/{name}"))?;
        let text = definition(name, &text)?;
        copies.push(GeneratedFile { path: format!("{DEFINITIONS}/{name}"), text });
    }
    for name in files("manifests")?.iter().filter(|name| name.ends_with(".yaml")) {
        let text = rules(name, &read(&format!("manifests/{name}"))?)?;
        copies.push(GeneratedFile { path: format!("charts/russet/templates/{name}"), text });
    }
    Ok(copies)
}

const DEFINITIONS: &str = "charts/russet-crds/templates";

/// CRDs of the chart whose kind is gone.
fn unexpected(copies: &[GeneratedFile]) -> Result<Vec<String>> {
    let known = |path: &String| copies.iter().any(|copy| copy.path == *path);
    let paths = files(DEFINITIONS)?.into_iter().map(|name| format!("{DEFINITIONS}/{name}"));
    Ok(paths.filter(|path| path.ends_with(".yaml") && !known(path)).collect())
}

/// A CRD as the chart has it.
fn definition(name: &str, text: &str) -> Result<String> {
    let text = literal(name, text)?;
    let (head, rest) = text.split_once("\nmetadata:\n").with_context(|| {
        format!("manifests/crds/{name} has no metadata at the place where it is looked for")
    })?;
    Ok(format!("{head}\nmetadata:\n{KEEP}{rest}"))
}

/// Roles or policies as the chart has them: for ServiceAccounts, and only where the control plane is
/// external, because the embedded one brings its own.
fn rules(name: &str, text: &str) -> Result<String> {
    let mut documents = Vec::new();
    for document in literal(name, text)?.split("\n---\n") {
        let document = document.trim_end();
        if !document.contains("\nkind: Namespace") {
            let document = for_service_accounts(document).trim_end().to_owned();
            ensure!(!document.ends_with("\nsubjects:"), "{name} has a binding of a component's user alone");
            documents.push(document);
        } else if !document.contains("name: russet-system") {
            documents.push(document.replacen("metadata:\n", &format!("metadata:\n{KEEP}"), 1));
        }
    }
    Ok(format!(
        "# Generated from manifests/{name} by `cargo xtask codegen`; edit that file instead.\n\
         {{{{- if {} }}}}\n{}\n{{{{- end }}}}\n",
        condition(name),
        documents.join("\n---\n")
    ))
}

/// Where a chart installs the rules of a file.
fn condition(name: &str) -> String {
    const CONTROL_PLANE: &str = ".Values.controlPlane.enabled";
    match OPTIONAL.iter().find(|(file, _)| *file == name) {
        Some((_, value)) => format!("and {CONTROL_PLANE} {value}"),
        None => CONTROL_PLANE.to_owned(),
    }
}

/// A document without the users of components.
fn for_service_accounts(document: &str) -> String {
    COMPONENTS.iter().fold(format!("{document}\n"), |text, component| {
        let user = "- apiGroup: rbac.authorization.k8s.io\n  kind: User\n  name: russet:";
        text.replace(&format!("{user}{component}\n"), "")
    })
}

/// The text, provided that Helm would not interpret it as a template.
fn literal(name: &str, text: &str) -> Result<String> {
    ensure!(!text.contains("{{"), "{name} holds {{{{, which Helm would take for a template");
    Ok(text.to_owned())
}

fn files(folder: &str) -> Result<Vec<String>> {
    let path: PathBuf = root().join(folder);
    let entries = std::fs::read_dir(&path).with_context(|| folder.to_owned())?;
    let mut names: Vec<String> =
        entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect::<Result<_>>()?;
    names.sort();
    Ok(names)
}

fn read(path: &str) -> Result<String> {
    std::fs::read_to_string(root().join(path)).with_context(|| path.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chart_rules_keep_service_accounts_and_drop_the_namespace() {
        let text = "# Who may.\napiVersion: v1\nkind: Namespace\nmetadata:\n  name: russet-system\n---\nkind: ClusterRoleBinding\nsubjects:\n- apiGroup: rbac.authorization.k8s.io\n  kind: User\n  name: russet:operator\n- kind: ServiceAccount\n  name: russet-operator\n  namespace: russet-system\n---\napiVersion: v1\nkind: Namespace\nmetadata:\n  name: russet-nodes\n";
        let chart = rules("rbac.yaml", text).unwrap();
        assert!(!chart.contains("  name: russet-system\n---"), "{chart}");
        assert!(chart.contains("subjects:\n- kind: ServiceAccount\n  name: russet-operator\n"), "{chart}");
        assert!(chart.contains("keep\n  name: russet-nodes"), "{chart}");
        assert!(chart.contains("{{- if .Values.controlPlane.enabled }}"), "{chart}");
        let optional = rules("gateway-models.yaml", text).unwrap();
        assert!(
            optional.contains("{{- if and .Values.controlPlane.enabled .Values.gateway.modelManagement }}"),
            "{optional}"
        );
        let alone = "kind: RoleBinding\nsubjects:\n- apiGroup: rbac.authorization.k8s.io\n  kind: User\n  name: russet:gateway\n";
        assert!(rules("rbac.yaml", alone).is_err(), "a binding of nobody must be noticed");
    }

    #[test]
    fn template_syntax_in_copied_manifests_is_refused() {
        assert!(definition("x.yaml", "a\nmetadata:\n  name: '{{ x }}'\n").is_err());
        assert!(definition("x.yaml", "a\nmetadata:\n  name: x\n").unwrap().contains("keep\n  name: x"));
    }
}
