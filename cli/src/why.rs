//! `russet why`: what a gateway did with one of its last requests, and why. Not here: what a record has, see the
//! gateway's `request_log`.

pub mod text;

use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use russet_gateway::request_log::RequestRecord;

use crate::client::Connection;
use crate::get::percent_encode;
use crate::run::{chat, nearest_gateway};
use crate::stdout::{out, outln};

/// A gateway answers from memory.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Arguments of `russet why`.
#[derive(clap::Args)]
pub struct Arguments {
    /// The request's id: the header x-request-id of its response, or the id in its body.
    id: String,
    /// URL of the gateway that served it; default that of the `russet up` that wrote the kubeconfig, else
    /// http://127.0.0.1:52415.
    #[arg(long, visible_alias = "url", env = "RUSSET_GATEWAY")]
    gateway: Option<String>,
    /// API key that the request had; needed where the gateway is on another machine.
    #[arg(long, env = "RUSSET_KEY", hide_env_values = true)]
    key: Option<String>,
    /// Form of the output.
    #[arg(short, long, value_enum, default_value = "text")]
    output: OutputFormat,
    #[command(flatten)]
    connection: Connection,
}

/// Form of the output.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum OutputFormat {
    /// For people, in 80 columns.
    Text,
    /// The gateway's JSON.
    Json,
}

/// Prints the record of the request.
pub async fn run(arguments: Arguments) -> Result<()> {
    let Arguments { id, gateway, key, output, connection } = arguments;
    let gateway = match gateway {
        Some(gateway) => gateway,
        None => nearest_gateway(&connection)?,
    };
    let body = fetch(&gateway, &id, key).await?;
    match output {
        OutputFormat::Json => {
            let value: serde_json::Value =
                serde_json::from_str(&body).with_context(|| no_record(&gateway))?;
            outln!("{}", serde_json::to_string_pretty(&value)?)?;
        }
        OutputFormat::Text => {
            let record: RequestRecord = serde_json::from_str(&body).with_context(|| no_record(&gateway))?;
            out!("{}", text::render(&record))?;
        }
    }
    Ok(())
}

async fn fetch(gateway: &str, id: &str, key: Option<String>) -> Result<String> {
    let url = format!("{}/requests/{}/why", chat::root(gateway), percent_encode(id));
    // The gateway belongs to the cluster; the environment's proxies are for other networks.
    let client = reqwest::Client::builder()
        .no_proxy()
        .timeout(TIMEOUT)
        .build()
        .context("cannot set up an HTTP client")?;
    let mut request = client.get(&url);
    if let Some(key) = key {
        request = request.bearer_auth(key);
    }
    let response = request.send().await.with_context(|| {
        format!("the gateway does not answer at {url}; name it with --gateway http://HOST:PORT")
    })?;
    let status = response.status();
    let body = response.text().await.context("the connection to the gateway broke")?;
    if !status.is_success() {
        bail!(chat::error_text(status, &body));
    }
    Ok(body)
}

fn no_record(gateway: &str) -> String {
    format!("what {gateway} answers is no record of a request; is it a gateway of Russet?")
}
