//! What becomes of the fields that clients send: honoured, refused because they would change the response, or without
//! effect. A dialect has a table of them; a field that is in none is left out and listed in a header.

use std::collections::BTreeSet;

use serde_json::Value;

use super::values::{JsonObject, is_empty};
use crate::error::GatewayError;

/// Clients of other servers send many fields; this limit keeps the header that lists them short.
const MAX_IGNORED_FIELDS: usize = 16;

/// What becomes of a field.
#[derive(Clone, Copy)]
pub(super) enum Treatment {
    /// It is parsed.
    Honoured,
    /// It would change the response, unless its value changes nothing.
    Refused(IsHarmless),
    /// It changes no response; a header lists it.
    Ignored,
}

/// Whether a value changes nothing.
type IsHarmless = fn(&Value) -> bool;

/// A group of fields in the table of the documentation.
pub(super) struct FieldGroup {
    /// Who sends them, or what they are about.
    pub(super) about: &'static str,
    pub(super) treatment: Treatment,
    pub(super) names: &'static [&'static str],
}

/// A group of fields.
pub(super) const fn group(
    about: &'static str,
    treatment: Treatment,
    names: &'static [&'static str],
) -> FieldGroup {
    FieldGroup { about, treatment, names }
}

/// The group of this field in a table; `None` where it is in none.
pub(super) fn find(table: &'static [FieldGroup], name: &str) -> Option<&'static FieldGroup> {
    table.iter().find(|group| group.names.contains(&name))
}

/// Which group a field is in.
pub(super) type GroupOf = fn(&str) -> Option<&'static FieldGroup>;

/// An error for a field that is not supported and would change the response.
pub(super) fn refuse_unsupported(fields: &JsonObject, group_of: GroupOf) -> Result<(), GatewayError> {
    for (field, value) in fields {
        if let Some(FieldGroup { about, treatment: Treatment::Refused(is_harmless), .. }) = group_of(field)
            && !is_harmless(value)
        {
            return Err(GatewayError::field(
                field,
                format!(
                    "`{field}` is not supported by this release and would change the response; leave it out ({about})"
                ),
            ));
        }
    }
    Ok(())
}

/// The names of fields that are left out, as far as a header can list them, with those that are `ignored` already.
pub(super) fn ignored(fields: &JsonObject, group_of: GroupOf, mut ignored: BTreeSet<String>) -> Vec<String> {
    let is_left_out =
        |name: &&String| group_of(name).is_none_or(|group| matches!(group.treatment, Treatment::Ignored));
    ignored.extend(fields.keys().filter(is_left_out).cloned());
    listed(ignored)
}

/// The names that a header can list.
pub(super) fn listed(names: BTreeSet<String>) -> Vec<String> {
    let is_printable = |name: &String| {
        name.len() <= 64 && name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.'))
    };
    names.into_iter().filter(is_printable).take(MAX_IGNORED_FIELDS).collect()
}

/// An empty text too, which clients send for none; in a message it is a text.
pub(super) fn is_nothing(value: &Value) -> bool {
    is_empty(value) || value == "" || value == false
}

pub(super) fn never(_: &Value) -> bool {
    false
}

pub(super) fn is_off(value: &Value) -> bool {
    value == false || value.as_f64() == Some(0.0)
}

pub(super) fn is_one(value: &Value) -> bool {
    value.as_f64() == Some(1.0)
}

pub(super) fn is_true(value: &Value) -> bool {
    value == true
}

pub(super) fn is_free(value: &Value) -> bool {
    value == "none" || value == "auto"
}

pub(super) fn is_refuse(value: &Value) -> bool {
    value == "refuse"
}

/// The context is the deployment's. Hermes Agent sends it to every server that answers as Ollama does.
pub(super) fn is_num_ctx_alone(value: &Value) -> bool {
    is_nothing(value) || value.as_object().is_some_and(|options| options.keys().all(|name| name == "num_ctx"))
}

pub(super) fn is_text_alone(value: &Value) -> bool {
    value.as_array().is_some_and(|all| all.iter().all(|one| one == "text"))
}

#[cfg(test)]
pub(super) mod tests {
    //! What the tests of every table share.

    use std::collections::BTreeSet;
    use std::fmt::Write as _;
    use std::path::Path;

    use super::*;

    /// Checks that a field is in one group.
    pub(in crate::dialects) fn check_groups(table: &[FieldGroup]) {
        let names: Vec<&str> = table.iter().flat_map(|group| group.names).copied().collect();
        let distinct: BTreeSet<&str> = names.iter().copied().collect();
        assert_eq!(names.len(), distinct.len(), "{names:?}");
    }

    /// The table of the documentation.
    pub(in crate::dialects) fn rows(table: &[FieldGroup]) -> String {
        let mut rows = String::from("| field | what becomes of it |\n|---|---|\n");
        for FieldGroup { about, treatment, names } in table {
            let names: Vec<String> = names.iter().map(|name| format!("`{name}`")).collect();
            let treatment = match treatment {
                Treatment::Honoured => "honoured",
                Treatment::Refused(_) => "400",
                Treatment::Ignored => "no effect, listed",
            };
            writeln!(rows, "| {} | {treatment}: {about} |", names.join(", ")).unwrap();
        }
        rows
    }

    /// Checks that docs/gateway.md has this text of the fields in this folder; writes it with `RUSSET_UPDATE_GOLDENS=1`.
    pub(in crate::dialects) fn check_page(folder: &str, text: &str) {
        let begin = format!(
            "<!-- fields of gateway/src/dialects/{folder}/fields.rs; written by its test with RUSSET_UPDATE_GOLDENS=1 -->\n"
        );
        let end = "<!-- end of the fields -->\n";
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/gateway.md");
        let page = std::fs::read_to_string(&path).unwrap();
        let (before, rest) = page.split_once(&begin).unwrap();
        let (found, after) = rest.split_once(end).unwrap();
        if std::env::var_os("RUSSET_UPDATE_GOLDENS").is_some() {
            std::fs::write(&path, format!("{before}{begin}{text}{end}{after}")).unwrap();
            return;
        }
        assert_eq!(found, text, "run this test with RUSSET_UPDATE_GOLDENS=1");
    }
}
