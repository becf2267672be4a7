//! `russet client`: prints or writes a client's own configuration against this gateway, and sends what that client
//! sends first. (`client` in the code is the connection to the API server.) A new client is one file in
//! `client_setup/clients/` and one line in its list.

mod alias;
mod check;
mod clients;
pub mod endpoint;
mod files;
mod merge;
mod requests;
mod setup;
mod text;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail};
use clap::builder::PossibleValuesParser;
use endpoint::GatewayEndpoint;
use files::ApplyOutcome;
use russet_telemetry::say;
use setup::{ClientProgram, ClientSetup};

use crate::data_dir::DataDir;
use crate::stdout::{out, outln};

/// Time for the list of models, which the gateway has in memory.
const LIST_TIMEOUT: Duration = Duration::from_secs(20);

/// Arguments of `russet client`.
#[derive(clap::Args)]
pub struct Arguments {
    /// The client.
    #[arg(value_parser = PossibleValuesParser::new(clients::ALL.iter().map(|client| client.name)))]
    client: String,
    /// Model of the gateway; default the only one, or the one that serves with the largest context.
    #[arg(long)]
    model: Option<String>,
    /// URL of the gateway as the client reaches it; default that of the `russet up` of this machine, else
    /// http://127.0.0.1:52415.
    #[arg(long, alias = "gateway", env = "RUSSET_GATEWAY")]
    url: Option<String>,
    /// API key that the client sends (russet key create).
    #[arg(long, env = "RUSSET_KEY", hide_env_values = true)]
    key: Option<String>,
    /// Merge the settings into the client's own files; the earlier ones are kept as NAME.before-russet.
    #[arg(long)]
    apply: bool,
    /// Send what the client sends first, and say what came back.
    #[arg(long)]
    check: bool,
    /// Seconds that --check waits for one response; the gateway holds requests for a model that is not ready.
    #[arg(long, default_value_t = 330, requires = "check", value_parser = clap::value_parser!(u64).range(1..))]
    timeout_seconds: u64,
    /// Data folder of the `russet up` whose gateway is meant.
    #[arg(long)]
    data_dir: Option<PathBuf>,
}

/// Prints, writes or checks.
pub async fn run(arguments: Arguments) -> Result<()> {
    let Arguments { client, model, url, key, apply, check, timeout_seconds, data_dir } = arguments;
    let client = clients::find(&client).with_context(|| format!("there is no client {client}"))?;
    let url = match url {
        Some(url) => endpoint::normalized(&url)?,
        None => endpoint::normalized(&DataDir::resolve(data_dir)?.nearest_gateway())?,
    };
    let key = key.filter(|key| !key.is_empty());
    let http = endpoint::http_client()?;
    let list = check::get_json(&http, &url, key.as_deref(), "/v1/models", LIST_TIMEOUT).await;
    let list = list.map_err(|words| anyhow!("the gateway's models cannot be listed: {words}"))?;
    let models = endpoint::parse_models(&list);
    let endpoint = GatewayEndpoint::new(url, key, models, model.as_deref())?;
    let setup = (client.setup)(&endpoint);
    if apply {
        apply_files(client, &endpoint, &setup)?;
    }
    if check {
        return send_requests(&http, client, &endpoint, &setup, Duration::from_secs(timeout_seconds)).await;
    }
    if !apply {
        out!("{}", text::guide(client, &endpoint, &setup))?;
    }
    Ok(())
}

fn apply_files(client: &ClientProgram, endpoint: &GatewayEndpoint, setup: &ClientSetup) -> Result<()> {
    if setup.files.is_empty() {
        say!("{} has no file that Russet could write; what it needs:", client.title);
        out!("{}", text::rest(client, endpoint, setup))?;
        return Ok(());
    }
    let home = std::env::home_dir().context("cannot tell the home folder; set HOME")?;
    for patch in &setup.files {
        let shown = files::path(&home, patch);
        let shown = shown.display();
        match files::apply(&home, patch, endpoint.key.as_deref())? {
            ApplyOutcome::Unchanged => outln!("{shown} has the settings already")?,
            ApplyOutcome::Written(None) => outln!("{shown} written")?,
            ApplyOutcome::Written(Some(backup)) => {
                outln!("{shown} written; the file before is {}", backup.display())?;
            }
        }
    }
    out!("{}", text::rest(client, endpoint, setup))?;
    Ok(())
}

/// Sends the first requests in order. An error if one of them fails, after all of them have been reported.
async fn send_requests(
    http: &reqwest::Client,
    client: &ClientProgram,
    endpoint: &GatewayEndpoint,
    setup: &ClientSetup,
    timeout: Duration,
) -> Result<()> {
    let GatewayEndpoint { url, key, model, models: _ } = endpoint;
    outln!("{} at {url} with {}", client.title, model.name)?;
    if !model.is_ready {
        // A request may wake it; what comes back decides.
        say!("{} does not serve now: {}", model.name, model.message);
    }
    let mut failures = 0;
    for request in &setup.requests {
        let result = check::send(http, url, key.as_deref(), &model.name, request, timeout).await;
        outln!("{}", result.line)?;
        failures += usize::from(!result.is_good);
        if result.is_unreachable {
            break;
        }
    }
    match failures {
        0 => Ok(()),
        _ => bail!(
            "{failures} of {} requests did not come back as {} needs them",
            setup.requests.len(),
            client.title
        ),
    }
}
