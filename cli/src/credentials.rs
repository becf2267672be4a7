//! `russet credentials`: Secrets with credentials of model sources. The Role `russet-sources` of a namespace
//! lists them; the operator binds it to a node while that node fetches.

use std::io::{BufRead as _, IsTerminal as _, stdin};

use anyhow::{Context, Result, bail, ensure};
use console::Term;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::api::rbac::v1::{PolicyRule, Role};
use kube::api::PostParams;
use kube::{Api, Client};
use russet_crds::names::SOURCES_ROLE;

use crate::client::Connection;
use crate::stdout::outln;

/// Maximum attempts to update a Role that is being changed concurrently.
const MAX_ATTEMPTS: usize = 5;

/// Arguments of `russet credentials`.
#[derive(clap::Args)]
pub struct Arguments {
    #[command(subcommand)]
    action: CredentialsAction,
    #[command(flatten)]
    connection: Connection,
}

#[derive(clap::Subcommand)]
enum CredentialsAction {
    /// Create a Secret from typed values, or from one line of standard input per key, and let nodes fetch
    /// with it.
    Add {
        /// Name of the Secret; a Model names it in spec.source.secretRef.
        name: String,
        /// Keys to ask for.
        #[arg(default_value = "token")]
        keys: Vec<String>,
    },
    /// Let nodes fetch with an existing Secret.
    Allow {
        /// Name of the Secret.
        name: String,
    },
    /// Stop nodes from fetching with a Secret; the Secret is not deleted.
    Forbid {
        /// Name of the Secret.
        name: String,
    },
    /// List the Secrets that nodes may fetch with.
    List,
}

/// Runs the subcommand.
pub async fn run(arguments: Arguments) -> Result<()> {
    let Arguments { action, connection } = arguments;
    let client = connection.client().await?;
    let namespace = &connection.namespace();
    match action {
        CredentialsAction::Add { name, keys } => {
            // Prompt first: a user who gives up here has changed nothing.
            let values = keys.iter().map(|key| Ok((key.clone(), prompt_value(&name, key)?)));
            let values = values.collect::<Result<Vec<_>>>()?;
            create(&client, namespace, &name, values).await?;
            update_role(&client, namespace, |names| insert(names, &name)).await?;
            outln!("secret/{name} created; nodes may use it for Models whose source.secretRef names it")?;
        }
        CredentialsAction::Allow { name } => {
            let secrets: Api<Secret> = Api::namespaced(client.clone(), namespace);
            let existing = secrets.get_metadata_opt(&name).await.context("cannot look for the Secret")?;
            ensure!(
                existing.is_some(),
                "there is no Secret {namespace}/{name}; make it with `russet credentials add {name} -n {namespace}`"
            );
            update_role(&client, namespace, |names| insert(names, &name)).await?;
            outln!("secret/{name}: nodes may use it for Models whose source.secretRef names it")?;
        }
        CredentialsAction::Forbid { name } => {
            update_role(&client, namespace, |names| names.retain(|it| *it != name)).await?;
            outln!("secret/{name}: nodes may no longer use it; the Secret is kept")?;
        }
        CredentialsAction::List => {
            let role = roles(&client, namespace).get_opt(SOURCES_ROLE).await;
            let role = role.with_context(|| format!("cannot read Role {namespace}/{SOURCES_ROLE}"))?;
            let names = role.and_then(|role| role.rules).unwrap_or_default();
            for name in names.iter().filter(|rule| is_sources_rule(rule)).flat_map(secret_names) {
                outln!("{name}")?;
            }
        }
    }
    Ok(())
}

fn roles(client: &Client, namespace: &str) -> Api<Role> {
    Api::namespaced(client.clone(), namespace)
}

/// Reads a value without echo.
fn prompt_value(name: &str, key: &str) -> Result<String> {
    let terminal = Term::stderr();
    let text = if stdin().is_terminal() && terminal.is_term() {
        terminal
            .write_str(&format!("{key} of Secret {name}: "))
            .context("the terminal cannot be written to")?;
        terminal.read_secure_line().context("the terminal cannot be read")?
    } else {
        let mut line = String::new();
        stdin().lock().read_line(&mut line).context("standard input cannot be read")?;
        line
    };
    let text = text.trim();
    ensure!(!text.is_empty(), "nothing was given for {key}; type it, or pipe one line for each key");
    Ok(text.to_owned())
}

async fn create(client: &Client, namespace: &str, name: &str, values: Vec<(String, String)>) -> Result<()> {
    let mut secret = Secret { string_data: Some(values.into_iter().collect()), ..Secret::default() };
    secret.metadata.name = Some(name.to_owned());
    let secrets: Api<Secret> = Api::namespaced(client.clone(), namespace);
    match secrets.create(&PostParams::default(), &secret).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(error)) if error.code == 409 => bail!(
            "Secret {namespace}/{name} exists already; `russet credentials allow {name} -n {namespace}` lets nodes fetch with it as it is"
        ),
        Err(error) => Err(error).context(format!("cannot make Secret {namespace}/{name}")),
    }
}

/// Changes the list of Secrets that nodes may fetch with.
async fn update_role(client: &Client, namespace: &str, change: impl Fn(&mut Vec<String>)) -> Result<()> {
    let api = roles(client, namespace);
    let what = || format!("cannot change Role {namespace}/{SOURCES_ROLE}");
    for _ in 0..MAX_ATTEMPTS {
        let existing = api.get_opt(SOURCES_ROLE).await.with_context(what)?;
        let role = with_names(existing.clone(), &change);
        let params = PostParams::default();
        let written = match &existing {
            Some(_) => api.replace(SOURCES_ROLE, &params, &role).await,
            None => api.create(&params, &role).await,
        };
        match written {
            Ok(_) => return Ok(()),
            // A concurrent update won; it is kept, and this one is retried.
            Err(kube::Error::Api(error)) if error.code == 409 => {}
            Err(error) => return Err(error).with_context(what),
        }
    }
    bail!("{}: another client keeps changing it; try again", what())
}

/// The Role with changed names; rules that do not grant reading of named Secrets stay.
fn with_names(existing: Option<Role>, change: impl Fn(&mut Vec<String>)) -> Role {
    let mut role = existing.unwrap_or_default();
    role.metadata.name = Some(SOURCES_ROLE.to_owned());
    let (own, mut rules): (Vec<_>, Vec<_>) =
        role.rules.take().unwrap_or_default().into_iter().partition(is_sources_rule);
    let mut names: Vec<String> = own.iter().flat_map(secret_names).cloned().collect();
    change(&mut names);
    // A rule without names would grant all Secrets.
    if !names.is_empty() {
        let text = |text: &str| vec![text.to_owned()];
        rules.push(PolicyRule {
            api_groups: Some(text("")),
            resources: Some(text("secrets")),
            resource_names: Some(names),
            verbs: text("get"),
            ..PolicyRule::default()
        });
    }
    role.rules = Some(rules);
    role
}

fn insert(names: &mut Vec<String>, name: &str) {
    if !names.iter().any(|it| it == name) {
        names.push(name.to_owned());
        names.sort();
    }
}

/// Whether a rule grants reading of named Secrets.
fn is_sources_rule(rule: &PolicyRule) -> bool {
    let is = |words: &Option<Vec<String>>, word: &str| words.as_deref().is_some_and(|words| words == [word]);
    is(&rule.api_groups, "")
        && is(&rule.resources, "secrets")
        && rule.verbs == ["get"]
        && rule.resource_names.as_ref().is_some_and(|names| !names.is_empty())
}

fn secret_names(rule: &PolicyRule) -> impl Iterator<Item = &String> {
    rule.resource_names.iter().flatten()
}

#[cfg(test)]
mod tests {
    use kube::ResourceExt as _;

    use super::*;

    fn names(role: &Role) -> Vec<&str> {
        role.rules
            .iter()
            .flatten()
            .filter(|rule| is_sources_rule(rule))
            .flat_map(secret_names)
            .map(String::as_str)
            .collect()
    }

    #[test]
    fn names_come_and_go_and_other_rules_stay() {
        let role = with_names(None, |names| insert(names, "hf"));
        assert_eq!((role.name_any().as_str(), names(&role)), ("russet-sources", vec!["hf"]));
        let role = with_names(Some(role), |names| insert(names, "bucket"));
        let mut role = with_names(Some(role), |names| insert(names, "hf"));
        assert_eq!(names(&role), ["bucket", "hf"]);
        let other = PolicyRule {
            api_groups: Some(vec![String::new()]),
            resources: Some(vec!["configmaps".to_owned()]),
            verbs: vec!["get".to_owned()],
            ..PolicyRule::default()
        };
        role.rules.as_mut().unwrap().push(other.clone());
        let role = with_names(Some(role), |names| names.clear());
        assert_eq!(role.rules, Some(vec![other]), "a rule without names would be about all Secrets");
    }
}
