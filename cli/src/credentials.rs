//! `russet credentials`: Secrets with credentials of model sources and keys of ModelProviders. The Role `russet-sources` of a
//! namespace lists the first; the operator binds it to a node while that node fetches. The Role `russet-providers` lists the
//! others, and is bound to gateways here.

use std::io::{BufRead as _, IsTerminal as _, stdin};

use anyhow::{Context, Result, bail, ensure};
use console::Term;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::api::rbac::v1::{PolicyRule, Role, RoleBinding, RoleRef, Subject};
use kube::api::PostParams;
use kube::{Api, Client};
use russet_crds::names::{GATEWAY_SERVICE_ACCOUNT, PROVIDERS_ROLE, SOURCES_ROLE, SYSTEM_NAMESPACE};
use russet_rpc::tls::GATEWAY_USER;

use crate::client::Connection;
use crate::stdout::outln;

/// Maximum attempts to update a Role that is being changed concurrently.
const MAX_ATTEMPTS: usize = 5;

/// Arguments of `russet credentials`.
#[derive(clap::Args)]
pub struct Arguments {
    #[command(subcommand)]
    action: CredentialsAction,
    /// Who may read the Secret: nodes that fetch models from a source, or gateways that ask ModelProviders.
    #[arg(long = "for", global = true, value_enum, default_value_t = Purpose::Sources)]
    purpose: Purpose,
    #[command(flatten)]
    connection: Connection,
}

/// What Secrets are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Purpose {
    /// Sources of Models.
    Sources,
    /// ModelProviders.
    Providers,
}

impl Purpose {
    /// The Role that lists the Secrets.
    fn role(self) -> &'static str {
        match self {
            Self::Sources => SOURCES_ROLE,
            Self::Providers => PROVIDERS_ROLE,
        }
    }

    /// Who reads them, and of which objects they are.
    fn use_of(self) -> &'static str {
        match self {
            Self::Sources => "nodes may use it for Models whose source.secretRef names it",
            Self::Providers => "gateways may use it for ModelProviders whose secretRef names it",
        }
    }

    fn readers(self) -> &'static str {
        match self {
            Self::Sources => "nodes",
            Self::Providers => "gateways",
        }
    }

    fn flag(self) -> &'static str {
        match self {
            Self::Sources => "",
            Self::Providers => " --for providers",
        }
    }
}

#[derive(clap::Subcommand)]
enum CredentialsAction {
    /// Create a Secret from typed values, or from one line of standard input per key, and let nodes fetch
    /// with it, or gateways ask a provider.
    Add {
        /// Name of the Secret; a Model names it in spec.source.secretRef, a ModelProvider in spec.secretRef.
        name: String,
        /// Keys to ask for.
        #[arg(default_value = "token")]
        keys: Vec<String>,
    },
    /// Let nodes or gateways use an existing Secret.
    Allow {
        /// Name of the Secret.
        name: String,
    },
    /// Stop nodes or gateways from using a Secret; the Secret is not deleted.
    Forbid {
        /// Name of the Secret.
        name: String,
    },
    /// List the Secrets that nodes or gateways may use.
    List,
}

/// Runs the subcommand.
pub async fn run(arguments: Arguments) -> Result<()> {
    let Arguments { action, purpose, connection } = arguments;
    let client = connection.client().await?;
    let namespace = &connection.namespace();
    match action {
        CredentialsAction::Add { name, keys } => {
            // Prompt first: a user who gives up here has changed nothing.
            let values = keys.iter().map(|key| Ok((key.clone(), prompt_value(&name, key)?)));
            let values = values.collect::<Result<Vec<_>>>()?;
            create(&client, namespace, &name, values, purpose).await?;
            allow(&client, namespace, &name, purpose).await?;
            outln!("secret/{name} created; {}", purpose.use_of())?;
        }
        CredentialsAction::Allow { name } => {
            let secrets: Api<Secret> = Api::namespaced(client.clone(), namespace);
            let existing = secrets.get_metadata_opt(&name).await.context("cannot look for the Secret")?;
            ensure!(
                existing.is_some(),
                "there is no Secret {namespace}/{name}; make it with `russet credentials add {name} -n {namespace}{}`",
                purpose.flag()
            );
            allow(&client, namespace, &name, purpose).await?;
            outln!("secret/{name}: {}", purpose.use_of())?;
        }
        CredentialsAction::Forbid { name } => {
            update_role(&client, namespace, purpose, |names| names.retain(|it| *it != name)).await?;
            outln!("secret/{name}: {} may no longer use it; the Secret is kept", purpose.readers())?;
        }
        CredentialsAction::List => {
            let role_name = purpose.role();
            let role = roles(&client, namespace).get_opt(role_name).await;
            let role = role.with_context(|| format!("cannot read Role {namespace}/{role_name}"))?;
            let names = role.and_then(|role| role.rules).unwrap_or_default();
            for name in names.iter().filter(|rule| is_secrets_rule(rule)).flat_map(secret_names) {
                outln!("{name}")?;
            }
        }
    }
    Ok(())
}

/// Lets whoever needs it read a Secret.
async fn allow(client: &Client, namespace: &str, name: &str, purpose: Purpose) -> Result<()> {
    update_role(client, namespace, purpose, |names| insert(names, name)).await?;
    // Nodes are bound by the operator, each while it fetches.
    if purpose == Purpose::Providers {
        bind_gateways(client, namespace).await?;
    }
    Ok(())
}

/// Binds the Role of providers to gateways.
async fn bind_gateways(client: &Client, namespace: &str) -> Result<()> {
    let bindings: Api<RoleBinding> = Api::namespaced(client.clone(), namespace);
    match bindings.create(&PostParams::default(), &gateway_binding()).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(error)) if error.code == 409 => Ok(()),
        Err(error) => Err(error).context(format!("cannot make RoleBinding {namespace}/{PROVIDERS_ROLE}")),
    }
}

/// The binding, for gateways on both kinds of API server.
fn gateway_binding() -> RoleBinding {
    let group = "rbac.authorization.k8s.io";
    let user = Subject {
        kind: "User".into(),
        api_group: Some(group.into()),
        name: GATEWAY_USER.into(),
        ..Subject::default()
    };
    let account = Subject {
        kind: "ServiceAccount".into(),
        name: GATEWAY_SERVICE_ACCOUNT.into(),
        namespace: Some(SYSTEM_NAMESPACE.into()),
        ..Subject::default()
    };
    let mut binding = RoleBinding {
        role_ref: RoleRef { api_group: Some(group.into()), kind: "Role".into(), name: PROVIDERS_ROLE.into() },
        subjects: Some(vec![user, account]),
        ..RoleBinding::default()
    };
    binding.metadata.name = Some(PROVIDERS_ROLE.to_owned());
    binding
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

async fn create(
    client: &Client,
    namespace: &str,
    name: &str,
    values: Vec<(String, String)>,
    purpose: Purpose,
) -> Result<()> {
    let mut secret = Secret { string_data: Some(values.into_iter().collect()), ..Secret::default() };
    secret.metadata.name = Some(name.to_owned());
    let secrets: Api<Secret> = Api::namespaced(client.clone(), namespace);
    match secrets.create(&PostParams::default(), &secret).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(error)) if error.code == 409 => bail!(
            "Secret {namespace}/{name} exists already; `russet credentials allow {name} -n {namespace}{}` lets {} use it as it is",
            purpose.flag(),
            purpose.readers()
        ),
        Err(error) => Err(error).context(format!("cannot make Secret {namespace}/{name}")),
    }
}

/// Changes the list of Secrets for a purpose.
async fn update_role(
    client: &Client,
    namespace: &str,
    purpose: Purpose,
    change: impl Fn(&mut Vec<String>),
) -> Result<()> {
    let (api, name) = (roles(client, namespace), purpose.role());
    let what = || format!("cannot change Role {namespace}/{name}");
    for _ in 0..MAX_ATTEMPTS {
        let existing = api.get_opt(name).await.with_context(what)?;
        let role = with_names(existing.clone(), name, &change);
        let params = PostParams::default();
        let written = match &existing {
            Some(_) => api.replace(name, &params, &role).await,
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
fn with_names(existing: Option<Role>, name: &str, change: impl Fn(&mut Vec<String>)) -> Role {
    let mut role = existing.unwrap_or_default();
    role.metadata.name = Some(name.to_owned());
    let (own, mut rules): (Vec<_>, Vec<_>) =
        role.rules.take().unwrap_or_default().into_iter().partition(is_secrets_rule);
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
fn is_secrets_rule(rule: &PolicyRule) -> bool {
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
            .filter(|rule| is_secrets_rule(rule))
            .flat_map(secret_names)
            .map(String::as_str)
            .collect()
    }

    #[test]
    fn gateways_read_the_keys_of_providers_and_no_others_do() {
        let binding = serde_json::to_value(gateway_binding()).unwrap();
        assert_eq!(binding["roleRef"]["name"], "russet-providers");
        let subjects: Vec<_> = binding["subjects"]
            .as_array()
            .unwrap()
            .iter()
            .map(|one| (one["kind"].as_str().unwrap(), one["name"].as_str().unwrap()))
            .collect();
        assert_eq!(subjects, [("User", "russet:gateway"), ("ServiceAccount", "russet-gateway")]);
        let role = with_names(None, PROVIDERS_ROLE, |names| insert(names, "openrouter"));
        assert_eq!((role.name_any().as_str(), names(&role)), ("russet-providers", vec!["openrouter"]));
    }

    #[test]
    fn names_come_and_go_and_other_rules_stay() {
        let role = with_names(None, SOURCES_ROLE, |names| insert(names, "hf"));
        assert_eq!((role.name_any().as_str(), names(&role)), ("russet-sources", vec!["hf"]));
        let role = with_names(Some(role), SOURCES_ROLE, |names| insert(names, "bucket"));
        let mut role = with_names(Some(role), SOURCES_ROLE, |names| insert(names, "hf"));
        assert_eq!(names(&role), ["bucket", "hf"]);
        let other = PolicyRule {
            api_groups: Some(vec![String::new()]),
            resources: Some(vec!["configmaps".to_owned()]),
            verbs: vec!["get".to_owned()],
            ..PolicyRule::default()
        };
        role.rules.as_mut().unwrap().push(other.clone());
        let role = with_names(Some(role), SOURCES_ROLE, |names| names.clear());
        assert_eq!(role.rules, Some(vec![other]), "a rule without names would be about all Secrets");
    }
}
