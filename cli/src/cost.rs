//! `russet cost`: what requests used, and what it cost, from the audit log of a gateway. It reads files of this
//! machine, and asks a cluster for the price that --against names and for what its machines cost. Not here: what is
//! shown (`text`), and what machines cost (`machines`).

mod machines;
mod text;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use jiff::Timestamp;
use jiff::tz::TimeZone;
use kube::Api;
use kube::api::ListParams;
use russet_crds::{InferenceNode, ModelPrice, ModelProvider, Money, TokenPrice};
use russet_gateway::audit::{AuditPeriod, UsageField, usage};
use russet_gateway::routes::Provider;

use crate::client::Connection;
use crate::data_dir::DataDir;
use crate::stdout::{out, outln};
use crate::time_span;
use machines::{MachineCosts, costs_begin, machine_costs};
use text::CostReport;

/// How long the cluster may take to say what its machines cost: the table needs it no more than that.
const MACHINES_TIMEOUT: Duration = Duration::from_secs(5);

/// Arguments of `russet cost`.
#[derive(clap::Args)]
pub struct Arguments {
    /// Requests that ended since then: a span such as 30d, or a time such as 2026-11-01T00:00:00Z.
    #[arg(long, default_value = "30d", value_name = "TIME", value_parser = since)]
    since: Timestamp,
    /// Requests that ended before then.
    #[arg(long, value_name = "TIME")]
    until: Option<Timestamp>,
    /// What a row is for.
    #[arg(long, value_enum, value_delimiter = ',', default_values = ["key", "model"], value_name = "FIELDS")]
    by: Vec<CostField>,
    /// Compare what this cluster answered with the price of a provider's model: NAME/MODEL of a ModelProvider of the
    /// namespace.
    #[arg(long, value_name = "NAME/MODEL")]
    against: Option<String>,
    /// Compare with this price for a million tokens: INPUT,OUTPUT or INPUT,CACHED,OUTPUT.
    #[arg(long, value_name = "PRICES", value_parser = price, conflicts_with = "against")]
    against_price: Option<TokenPrice>,
    /// Folder of the audit log; default that of `russet up` on this machine.
    #[arg(long, value_name = "FOLDER")]
    folder: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    connection: Connection,
}

/// A field on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum CostField {
    Key,
    Model,
    Day,
    Provider,
    Step,
}

impl CostField {
    fn usage_field(self) -> UsageField {
        match self {
            Self::Key => UsageField::Key,
            Self::Model => UsageField::Model,
            Self::Day => UsageField::Day,
            Self::Provider => UsageField::Provider,
            Self::Step => UsageField::Step,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Key => "key",
            Self::Model => "model",
            Self::Day => "day",
            Self::Provider => "provider",
            Self::Step => "step",
        }
    }
}

fn since(text: &str) -> Result<Timestamp, String> {
    let wrong = || "write a span such as 90m, 12h or 30d, or a time such as 2026-11-01T00:00:00Z".to_owned();
    match time_span::parse(text) {
        Some(span) => Timestamp::now().checked_sub(span).map_err(|_| wrong()),
        None => text.parse().map_err(|_| wrong()),
    }
}

fn price(text: &str) -> Result<TokenPrice, String> {
    let parts: Result<Vec<Money>, _> = text.split(',').map(|part| part.trim().parse()).collect();
    match parts.map_err(|error: russet_crds::InvalidMoney| error.to_string())?[..] {
        [input, output] => Ok(TokenPrice { input, cached_input: None, output }),
        [input, cached, output] => Ok(TokenPrice { input, cached_input: Some(cached), output }),
        _ => Err("write two or three prices, such as 3,15 or 3,0.30,15".to_owned()),
    }
}

/// Prints the table.
pub async fn run(arguments: Arguments) -> Result<()> {
    let Arguments { since, until, by, against, against_price, folder, json, connection } = arguments;
    let elsewhere = match against {
        Some(named) => Some(price_of(&connection, &named).await?),
        None => against_price.map(ModelPrice::from),
    };
    let folder = match folder {
        Some(folder) => folder,
        None => DataDir::resolve(connection.data_dir.clone())?.gateway_audit(),
    };
    let fields: Vec<UsageField> = by.iter().map(|field| field.usage_field()).collect();
    let period = AuditPeriod { since: Some(since), until };
    let usage = usage(&folder, &period, &fields, &TimeZone::system(), elsewhere.as_ref())?;
    let now = Timestamp::now();
    let begin = costs_begin(since, usage.began);
    let machines = ask_machines(&connection, begin, until.map_or(now, |until| until.min(now))).await;
    let report = CostReport { usage, by, is_compared: elsewhere.is_some(), machines };
    if json {
        outln!("{}", report.as_json())?;
    } else {
        out!("{}", report.shown())?;
    }
    Ok(())
}

/// What the machines of the cluster cost in a period; `None` where nobody can be asked.
async fn ask_machines(connection: &Connection, since: Timestamp, until: Timestamp) -> Option<MachineCosts> {
    let asked = async {
        let api: Api<InferenceNode> = Api::all(connection.client_without_retry().await?);
        anyhow::Ok(api.list(&ListParams::default()).await?.items)
    };
    let nodes = tokio::time::timeout(MACHINES_TIMEOUT, asked).await.ok()?.ok()?;
    Some(machine_costs(&nodes, since, until))
}

/// The price of a provider's model.
async fn price_of(connection: &Connection, named: &str) -> Result<ModelPrice> {
    let namespace = connection.namespace();
    let (name, model) = named.split_once('/').with_context(|| {
        format!("--against {named} names no model; write for example openrouter/qwen/qwen3-30b-a3b")
    })?;
    let api: Api<ModelProvider> = Api::namespaced(connection.client().await?, &namespace);
    let provider = api.get_opt(name).await?;
    let spec = provider.with_context(|| format!("there is no ModelProvider {namespace}/{name}"))?.spec;
    let provider =
        Provider { namespace: namespace.clone(), name: name.to_owned(), spec, ..Provider::default() };
    let has_price = provider.known(model).is_some_and(|known| known.price_per_million_tokens.is_some());
    match provider.price(model).filter(|_| has_price) {
        Some(price) => Ok(price),
        None => bail!(
            "spec.models of ModelProvider {namespace}/{name} has no pricePerMillionTokens for {model:?}; write it there, or give \
             --against-price INPUT,OUTPUT"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn money(text: &str) -> Money {
        text.parse().unwrap()
    }

    #[test]
    fn a_price_is_two_or_three_numbers() {
        let cached = |text| price(text).map(|price| (price.input, price.cached_input, price.output));
        assert_eq!(cached("3,15"), Ok((money("3"), None, money("15"))));
        assert_eq!(cached("3, 0.30, 15"), Ok((money("3"), Some(money("0.30")), money("15"))));
        for wrong in ["", "3", "1,2,3,4", "a,b", "-1,2"] {
            assert!(price(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_period_begins_a_span_ago_or_at_a_time() {
        let ago = since("1h").unwrap();
        assert!((Timestamp::now().as_second() - ago.as_second() - 3600).abs() < 60);
        assert_eq!(since("2026-11-01T00:00:00Z").unwrap().to_string(), "2026-11-01T00:00:00Z");
        assert!(since("soon").unwrap_err().contains("30d"));
    }
}
