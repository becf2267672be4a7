//! Resolves a model argument: an existing Model, a catalogue entry, or a source.

use anyhow::{Context, Result, bail};
use kube::ResourceExt as _;
use russet_crds::ModelDeployment;
use russet_crds::conditions::{Type, is_true};

use crate::catalog::entry::{self, CatalogEntry};

/// Maximum length of a name made from a source: names derived from the Model are longer.
const MAX_NAME_LENGTH: usize = 50;

/// An existing Model of the namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KnownModel {
    /// Its name.
    pub name: String,
    /// Its source.
    pub uri: String,
    /// Whether it is being deleted.
    pub deleting: bool,
}

/// A Model, and whether it has to be created.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunTarget {
    /// Its name.
    pub name: String,
    /// Its source.
    pub uri: String,
    /// Whether it does not exist yet.
    pub add: bool,
}

/// Resolves the argument. A Model of the namespace has precedence: its owner chose that name.
pub fn resolve(word: &str, known: &[KnownModel], entries: &[CatalogEntry]) -> Result<RunTarget> {
    if let Some((_, rest)) = word.split_once("://") {
        if rest.is_empty() || russet_agent::store::scheme_of(word).is_err() {
            bail!(
                "{word} is not a source of models; write hf://OWNER/NAME, https://…, s3://BUCKET/FOLDER, gs://…, az://…, \
                 oci://REGISTRY/NAME:TAG, file:///… or builtin://smoke"
            );
        }
        let name = name_of(rest).with_context(|| {
            format!(
                "no valid name can be derived from {word}; apply a Model with a name of its own and run that"
            )
        })?;
        return from_source(name, word.to_owned(), known);
    }
    if let Some(model) = known.iter().find(|model| model.name == word) {
        return existing(model);
    }
    let entry = entry::require(entries, word)
        .with_context(|| format!("there is no Model {word} in the namespace"))?;
    if let Err(why) = entry.runs() {
        bail!(
            "{} cannot be run: {why}; `russet catalog search runs` lists what can, and `russet catalog add {0}` adds it \
             for a later release",
            entry.name
        );
    }
    from_source(entry.name.clone(), entry.uri(), known)
}

/// The Model of a source: an existing one of any name, else one to be created.
fn from_source(name: String, uri: String, known: &[KnownModel]) -> Result<RunTarget> {
    if let Some(model) = known.iter().find(|model| model.uri == uri) {
        return existing(model);
    }
    if let Some(other) = known.iter().find(|model| model.name == name) {
        bail!(
            "{uri} would be Model {name}, and that one comes from {}; apply a Model of another name and run that, or \
             choose another namespace with -n",
            other.uri
        );
    }
    Ok(RunTarget { name, uri, add: true })
}

/// An existing Model that is not being deleted.
fn existing(model: &KnownModel) -> Result<RunTarget> {
    let KnownModel { name, uri, deleting: leaves } = model.clone();
    if leaves {
        bail!(
            "Model {name} is being deleted, its copies first; run this again once it is gone (russet get models)"
        );
    }
    Ok(RunTarget { name, uri, add: false })
}

/// A name made from the last part of a source.
fn name_of(path: &str) -> Option<String> {
    let last = path.trim_end_matches('/').rsplit('/').next()?;
    let letters = last.chars().map(|letter| match letter.to_ascii_lowercase() {
        letter if letter.is_ascii_alphanumeric() => letter,
        _ => '-',
    });
    let name: String = letters.take(MAX_NAME_LENGTH).collect();
    let name = name.trim_matches('-');
    (!name.is_empty()).then(|| name.to_owned())
}

/// The deployment that serves a Model: one that is Ready, else the one of the same name, else the first.
pub fn serving(all: &[ModelDeployment], model: &str) -> Option<String> {
    let own = all.iter().filter(|deployment| {
        deployment.spec.model_ref.name == model && deployment.metadata.deletion_timestamp.is_none()
    });
    let ready = |deployment: &ModelDeployment| {
        deployment.status.as_ref().is_some_and(|status| is_true(&status.conditions, Type::Ready))
    };
    own.max_by_key(|deployment| {
        let stopped = deployment.spec.replicas == 0 && deployment.spec.autoscaling.is_none();
        let name = deployment.name_any();
        (!stopped, ready(deployment), name == model, std::cmp::Reverse(name))
    })
    .map(kube::ResourceExt::name_any)
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
    use russet_crds::conditions::{Reason, set};
    use russet_crds::{LocalReference, ModelDeploymentSpec, ModelDeploymentStatus};

    use super::*;

    #[test]
    fn a_word_is_a_model_that_is_there_an_entry_or_a_source() {
        let entries = entry::all().unwrap();
        let known = [
            ("mine", "file:///m"),
            ("taken", "hf://a/b"),
            ("qwen3-8b-4bit", "hf://mirror/qwen"),
            ("old", "file:///old"),
        ];
        let known = known.map(|(name, uri)| KnownModel {
            name: name.into(),
            uri: uri.into(),
            deleting: name == "old",
        });
        let hub = "hf://mlx-community/Llama-3.2-1B-Instruct-4bit";
        for (word, name, uri, add) in [
            ("mine", "mine", "file:///m", false),
            // The owner of the name chose the source.
            ("qwen3-8b-4bit", "qwen3-8b-4bit", "hf://mirror/qwen", false),
            ("llama-3-2-1b-4bit", "llama-3-2-1b-4bit", hub, true),
            ("Llama-3.2-1B-4bit", "llama-3-2-1b-4bit", hub, true),
            ("hf://a/b", "taken", "hf://a/b", false),
            ("hf://mlx-community/Qwen3-8B-4bit/", "qwen3-8b-4bit", "", false),
            ("builtin://smoke", "smoke", "builtin://smoke", true),
            ("file:///models/My_Model.v2", "my-model-v2", "file:///models/My_Model.v2", true),
        ] {
            let target = resolve(word, &known, &entries);
            match uri {
                "" => {
                    let error = format!("{:#}", target.unwrap_err());
                    assert!(error.contains(name) && error.contains("hf://mirror/qwen"), "{error}");
                }
                uri => {
                    assert_eq!(
                        target.unwrap(),
                        RunTarget { name: name.into(), uri: uri.into(), add },
                        "{word}"
                    )
                }
            }
        }
        if let Some(foreign) = entries.iter().find(|entry| entry.runs().is_err()) {
            let error = resolve(&foreign.name, &known, &entries).unwrap_err().to_string();
            assert!(
                error.contains("cannot be run") && error.contains(&foreign.runs().unwrap_err()),
                "{error}"
            );
        }
        for (word, expected) in [
            ("old", "is being deleted"),
            ("file:///old", "is being deleted"),
            ("ftp://a/b", "not a source"),
            ("hf://", "not a source"),
            ("hf://…/", "no valid name"),
            ("nobody-has-this", "there is no Model"),
        ] {
            let error = format!("{:#}", resolve(word, &known, &entries).unwrap_err());
            assert!(error.contains(expected), "{word}: {error}");
        }
    }

    #[test]
    fn ready_deployment_ranks_first_and_stopped_one_last() {
        let deployment = |name: &str, replicas: i32, ready: bool| {
            let model_ref = LocalReference { name: "m".into() };
            let mut one =
                ModelDeployment::new(name, ModelDeploymentSpec { model_ref, replicas, ..Default::default() });
            let mut conditions: Vec<Condition> = Vec::new();
            set(&mut conditions, Type::Ready, ready, Reason::Serving, "", None, jiff::Timestamp::UNIX_EPOCH);
            one.status = Some(ModelDeploymentStatus { conditions, ..Default::default() });
            one
        };
        for (all, chosen) in [
            (vec![], None),
            (vec![deployment("b", 1, false), deployment("a", 1, false)], Some("a")),
            (vec![deployment("a", 1, false), deployment("m", 1, false)], Some("m")),
            (vec![deployment("m", 1, false), deployment("z", 1, true)], Some("z")),
            // A stopped deployment is Ready, as specified.
            (vec![deployment("m", 0, true), deployment("z", 1, false)], Some("z")),
            (vec![deployment("m", 0, true)], Some("m")),
        ] {
            assert_eq!(serving(&all, "m").as_deref(), chosen);
            assert_eq!(serving(&all, "n"), None);
        }
    }
}
