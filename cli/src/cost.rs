//! `russet cost`: what requests used, and what it cost, from the audit log of a gateway. It reads files of this machine; a
//! cluster is asked for the price that --against names, and for nothing else.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use jiff::Timestamp;
use jiff::tz::TimeZone;
use kube::Api;
use russet_crds::{ModelProvider, Money, TokenPrice};
use russet_gateway::audit::{AuditPeriod, UsageField, UsageReport, UsageTotal, usage};
use russet_gateway::routes::Provider;
use serde_json::{Value, json};

use crate::client::Connection;
use crate::data_dir::DataDir;
use crate::get::format_table;
use crate::stdout::{out, outln};
use crate::time_span;

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
    /// Compare what this cluster answered with the price of a provider's model: NAME/MODEL of a ModelProvider of the namespace.
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
}

impl CostField {
    fn usage_field(self) -> UsageField {
        match self {
            Self::Key => UsageField::Key,
            Self::Model => UsageField::Model,
            Self::Day => UsageField::Day,
            Self::Provider => UsageField::Provider,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Key => "key",
            Self::Model => "model",
            Self::Day => "day",
            Self::Provider => "provider",
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
        None => against_price,
    };
    let folder = match folder {
        Some(folder) => folder,
        None => DataDir::resolve(connection.data_dir.clone())?.gateway_audit(),
    };
    let fields: Vec<UsageField> = by.iter().map(|field| field.usage_field()).collect();
    let period = AuditPeriod { since: Some(since), until };
    let report = usage(&folder, &period, &fields, &TimeZone::system(), elsewhere.as_ref())?;
    if json {
        outln!("{}", as_json(&report, &by, elsewhere.is_some()))?;
    } else {
        out!("{}", shown(&report, &by, elsewhere.is_some()))?;
    }
    Ok(())
}

/// The price of a provider's model.
async fn price_of(connection: &Connection, named: &str) -> Result<TokenPrice> {
    let namespace = connection.namespace();
    let (name, model) = named.split_once('/').with_context(|| {
        format!("--against {named} names no model; write for example openrouter/qwen/qwen3-30b-a3b")
    })?;
    let api: Api<ModelProvider> = Api::namespaced(connection.client().await?, &namespace);
    let provider = api.get_opt(name).await?;
    let spec = provider.with_context(|| format!("there is no ModelProvider {namespace}/{name}"))?.spec;
    let provider =
        Provider { namespace: namespace.clone(), name: name.to_owned(), spec, ..Provider::default() };
    match provider.known(model).and_then(|known| known.price_per_million_tokens) {
        Some(price) => Ok(price),
        None => bail!(
            "spec.models of ModelProvider {namespace}/{name} has no pricePerMillionTokens for {model:?}; write it there, or give \
             --against-price INPUT,OUTPUT"
        ),
    }
}

/// What a row has behind its fields.
fn cells(total: &UsageTotal, compared: bool) -> Vec<String> {
    let UsageTotal { requests, prompt_tokens, cached_tokens, completion_tokens, cost, unpriced, elsewhere } =
        total;
    let numbers = [requests, prompt_tokens, cached_tokens, completion_tokens].map(u64::to_string);
    let unknown = if *unpriced > 0 { "+?" } else { "" };
    let elsewhere = compared.then(|| elsewhere.to_string());
    numbers.into_iter().chain([format!("{cost}{unknown}")]).chain(elsewhere).collect()
}

/// A report as people read it.
fn shown(report: &UsageReport, by: &[CostField], compared: bool) -> String {
    let heads = by.iter().map(|field| field.name().to_uppercase());
    let columns = ["REQUESTS", "PROMPT", "CACHED", "ANSWER", "COST"].map(str::to_owned);
    let head: Vec<String> = heads.chain(columns).chain(compared.then(|| "ELSEWHERE".to_owned())).collect();
    let mut rows = vec![head];
    for (key, total) in &report.totals {
        rows.push(key.iter().cloned().chain(cells(total, compared)).collect());
    }
    let all = report.total();
    if report.totals.len() > 1 {
        let names = by.iter().enumerate().map(|(index, _)| if index == 0 { "all" } else { "" }.to_owned());
        rows.push(names.chain(cells(&all, compared)).collect());
    }
    let mut text = format_table(&rows);
    let UsageReport { totals, kept_answers, uncounted, lost } = report;
    let mut notes = Vec::new();
    if totals.is_empty() {
        notes.push("No request of the period used a token.".to_owned());
    } else if compared {
        notes.push(format!(
            "Providers cost {}. What was answered here would have cost {} there; electricity and hardware are not counted.",
            all.cost, all.elsewhere
        ));
    } else {
        notes.push("COST is what providers cost; electricity and hardware are not counted.".to_owned());
    }
    for (what, count) in [
        ("Answers of providers without a price, not in COST", all.unpriced),
        ("Requests that got an answer which was kept, not in the table", *kept_answers),
        ("Requests of an earlier release, which did not write what they used", *uncounted),
        ("Entries of the log that could not be written", *lost),
    ] {
        if count > 0 {
            notes.push(format!("{what}: {count}."));
        }
    }
    text += &format!("\n{}\n", notes.join("\n"));
    text
}

/// A report for programs.
fn as_json(report: &UsageReport, by: &[CostField], compared: bool) -> Value {
    let row = |key: &[String], total: &UsageTotal| {
        let UsageTotal {
            requests,
            prompt_tokens,
            cached_tokens,
            completion_tokens,
            cost,
            unpriced,
            elsewhere,
        } = total;
        let mut row = json!({
            "requests": requests, "promptTokens": prompt_tokens, "cachedTokens": cached_tokens,
            "completionTokens": completion_tokens, "cost": cost, "unpricedRequests": unpriced,
        });
        if compared {
            row["elsewhere"] = json!(elsewhere);
        }
        for (field, value) in by.iter().zip(key) {
            row[field.name()] = value.as_str().into();
        }
        row
    };
    let UsageReport { totals, kept_answers, uncounted, lost } = report;
    let rows: Vec<Value> = totals.iter().map(|(key, total)| row(key, total)).collect();
    json!({
        "rows": rows, "total": row(&[], &report.total()), "keptAnswers": kept_answers, "uncountedRequests": uncounted,
        "lostEntries": lost,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn money(text: &str) -> Money {
        text.parse().unwrap()
    }

    fn report() -> UsageReport {
        let here = UsageTotal {
            requests: 2,
            prompt_tokens: 2000,
            cached_tokens: 400,
            completion_tokens: 200,
            elsewhere: money("2.50"),
            ..UsageTotal::default()
        };
        let away = UsageTotal { requests: 1, cost: money("0.25"), unpriced: 1, ..UsageTotal::default() };
        let key = |key: &str, model: &str| vec![key.to_owned(), model.to_owned()];
        let totals = [(key("default/a", "m"), here), (key("default/a", "n"), away)].into();
        UsageReport { totals, kept_answers: 3, uncounted: 0, lost: 1 }
    }

    #[test]
    fn a_table_says_what_was_counted_and_what_was_not() {
        let by = [CostField::Key, CostField::Model];
        let text = shown(&report(), &by, true);
        let expected = "\
KEY         MODEL   REQUESTS   PROMPT   CACHED   ANSWER   COST     ELSEWHERE
default/a   m       2          2000     400      200      0.00     2.50
default/a   n       1          0        0        0        0.25+?   0.00
all                 3          2000     400      200      0.25+?   2.50

Providers cost 0.25. What was answered here would have cost 2.50 there; electricity and hardware are not counted.
Answers of providers without a price, not in COST: 1.
Requests that got an answer which was kept, not in the table: 3.
Entries of the log that could not be written: 1.
";
        assert_eq!(text, expected);
        let plain = shown(&report(), &by, false);
        assert!(
            !plain.contains("ELSEWHERE") && plain.contains("electricity and hardware are not counted"),
            "{plain}"
        );
        let empty = shown(&UsageReport::default(), &by, false);
        assert!(empty.contains("No request of the period used a token."), "{empty}");
        let json = as_json(&report(), &by, true);
        assert_eq!(json["rows"][0]["key"], "default/a");
        assert_eq!((&json["total"]["cost"], &json["total"]["elsewhere"]), (&json!("0.25"), &json!("2.50")));
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
