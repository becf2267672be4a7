//! `russet key`: API keys for the gateway. A new key is shown once; the cluster stores its hash.

use anyhow::{Context, Result, bail};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::{Api, Client};
use russet_crds::{AccessKey, AccessKeySpec, KeyState, ModelManagement};
use russet_gateway::keys::Secret;
use russet_telemetry::say;
use serde_json::json;

use crate::api_error;
use crate::client::{self, Connection};
use crate::get;
use crate::stdout::{StdoutError, out, outln};
use crate::time_span;

/// Arguments of `russet key`.
#[derive(clap::Args)]
pub struct Arguments {
    #[command(subcommand)]
    action: KeyAction,
    #[command(flatten)]
    connection: Connection,
}

#[derive(clap::Subcommand)]
enum KeyAction {
    /// Create a key and print it, once. From the first key on, the gateway rejects requests without a key.
    Create {
        /// Name of the AccessKey, shown in logs and metrics.
        name: String,
        /// Rate limit, in requests per minute; default no limit.
        #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
        requests_per_minute: Option<u32>,
        /// Priority of the key's requests when an engine is busy: -100 to 100, higher first.
        #[arg(long, default_value_t = 0, allow_hyphen_values = true, value_parser = clap::value_parser!(i32).range(-100..=100))]
        priority: i32,
        /// Maximum output tokens of one request; default as many as the context holds.
        #[arg(long, value_parser = clap::value_parser!(u32).range(1..=16_777_216))]
        max_tokens_per_request: Option<u32>,
        /// Maximum seconds for one request, queueing included; default no limit.
        #[arg(long, value_parser = clap::value_parser!(u32).range(1..=86_400))]
        max_request_seconds: Option<u32>,
        /// Model names of the namespace, with `*` for any characters; default all of them.
        #[arg(long, value_delimiter = ',')]
        models: Vec<String>,
        /// Let the key pull, copy and delete models of the namespace by Ollama's API, at a gateway with --model-management.
        #[arg(long)]
        model_management: bool,
        /// Lifetime of the key, such as 12h or 30d; default unlimited.
        #[arg(long)]
        expires: Option<String>,
        /// Addresses that the key is accepted from, such as 192.168.0.0/16; default any.
        #[arg(long, value_delimiter = ',', value_name = "RANGE")]
        source_ranges: Vec<String>,
        /// Holder of the key.
        #[arg(long)]
        owner: Option<String>,
    },
    /// List the keys of the namespace, without their secrets.
    List {
        /// All namespaces.
        #[arg(short = 'A', long)]
        all_namespaces: bool,
    },
    /// Disable a key. It stays in the list, and keys stay required.
    Revoke {
        /// Name of the AccessKey.
        name: String,
    },
}

/// Runs the subcommand.
pub async fn run(arguments: Arguments) -> Result<()> {
    let Arguments { action, connection } = arguments;
    let client = connection.client().await?;
    let namespace = connection.namespace();
    match action {
        KeyAction::Create {
            name,
            requests_per_minute,
            priority,
            max_tokens_per_request,
            max_request_seconds,
            models,
            model_management,
            expires,
            source_ranges,
            owner,
        } => {
            let now = jiff::Timestamp::now();
            let expires_at = expires.as_deref().map(|text| until(text, now)).transpose()?.map(Time);
            let spec = AccessKeySpec {
                owner,
                models,
                requests_per_minute,
                priority,
                max_tokens_per_request,
                max_request_seconds,
                expires_at,
                source_ranges,
                model_management: match model_management {
                    true => ModelManagement::Allowed,
                    false => ModelManagement::Denied,
                },
                ..Default::default()
            };
            create(client, &namespace, &name, spec).await
        }
        KeyAction::List { all_namespaces } => {
            let path = match all_namespaces {
                true => "/apis/russet.dev/v1alpha1/accesskeys".to_owned(),
                false => format!("/apis/russet.dev/v1alpha1/namespaces/{namespace}/accesskeys"),
            };
            let table =
                client::get_json(&client, &path, client::TABLE).await.context("cannot list the keys")?;
            out!("{}", get::render(&table, false, all_namespaces))?;
            Ok(())
        }
        KeyAction::Revoke { name } => revoke(client, &namespace, &name).await,
    }
}

async fn create(client: Client, namespace: &str, name: &str, spec: AccessKeySpec) -> Result<()> {
    let secret = Secret::generate();
    let key = AccessKey::new(name, AccessKeySpec { secret_sha256: secret.sha256(), ..spec });
    let keys: Api<AccessKey> = Api::namespaced(client, namespace);
    match keys.create(&PostParams::default(), &key).await {
        Ok(_) => {}
        Err(kube::Error::Api(error)) if error.code == 409 => bail!(
            "AccessKey {namespace}/{name} exists already, and its key cannot be shown again; choose another name, or remove it with `russet delete accesskey/{name} -n {namespace}`"
        ),
        Err(error) => return Err(error).context(format!("cannot store AccessKey {namespace}/{name}")),
    }
    // Only the key goes to standard output, so that `KEY=$(russet key create …)` works.
    if let Err(error) = outln!("{}", secret.expose()) {
        return Err(take_back(&keys, name, error).await);
    }
    say!(
        "This is the key of AccessKey {namespace}/{name}. It is shown only once; the cluster stores only its hash."
    );
    say!(
        "Clients send it as `Authorization: Bearer KEY`. From now on the gateway refuses requests without a key."
    );
    Ok(())
}

/// Deletes the key `name`, which nobody saw, and returns why.
async fn take_back(keys: &Api<AccessKey>, name: &str, error: StdoutError) -> anyhow::Error {
    let words = match keys.delete(name, &DeleteParams::default()).await {
        Ok(_) => format!("the key could not be shown, so AccessKey {name} was deleted again"),
        Err(deleting) => format!(
            "the key could not be shown and is lost; delete it with `russet delete accesskey/{name}` ({})",
            api_error::text(&deleting.into())
        ),
    };
    // Not as a cause: a closed pipe ends a verb without words, but whoever wanted this key must learn of it.
    anyhow::anyhow!("{words}: {error}")
}

async fn revoke(client: Client, namespace: &str, name: &str) -> Result<()> {
    let keys: Api<AccessKey> = Api::namespaced(client, namespace);
    let patch = json!({"spec": {"state": KeyState::Disabled}});
    match keys.patch(name, &PatchParams::default(), &Patch::Merge(patch)).await {
        Ok(_) => {}
        Err(kube::Error::Api(error)) if error.code == 404 => {
            bail!("there is no AccessKey {namespace}/{name}; `russet key list -A` shows all of them")
        }
        Err(error) => return Err(error).context(format!("cannot revoke AccessKey {namespace}/{name}")),
    }
    say!(
        "AccessKey {namespace}/{name} is revoked; gateways refuse it within seconds. Keys stay required until the last \
         AccessKey is deleted (`russet delete accesskey/{name} -n {namespace}`)."
    );
    Ok(())
}

/// The time `text` (such as `90m`, `12h` or `30d`) after `now`.
fn until(text: &str, now: jiff::Timestamp) -> Result<jiff::Timestamp> {
    let wrong = || format!("--expires {text} is not a time; write for example 90m, 12h or 30d");
    now.checked_add(time_span::parse(text).with_context(wrong)?).with_context(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_minutes_hours_and_days() {
        let now = jiff::Timestamp::UNIX_EPOCH;
        for (text, seconds) in [("1m", 60), ("12h", 43_200), ("30d", 2_592_000)] {
            assert_eq!(until(text, now).unwrap().as_second(), seconds, "{text}");
        }
        for text in ["30", "4294967295d"] {
            let error = until(text, now).unwrap_err().to_string();
            assert!(error.contains(text) && error.contains("30d"), "{error}");
        }
    }
}
