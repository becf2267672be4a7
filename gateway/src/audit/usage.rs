//! What the requests of an audit log used, by key, model, day, provider and step. The log is verified on the way, so nothing counts
//! that no gateway wrote.

use std::collections::BTreeMap;
use std::path::Path;

use jiff::Timestamp;
use jiff::tz::TimeZone;
use russet_crds::{ModelPrice, Money, PowerSource};

use super::AuditError;
use super::entry::{AuditEvent, AuditUsage, CompletedRequest};
use super::verify::{AuditPeriod, verify_each};

/// What requests are told apart by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UsageField {
    /// The AccessKey.
    Key,
    /// The model as its client named it.
    Model,
    /// The day on which it ended.
    Day,
    /// Who answered: a ModelProvider, or this cluster.
    Provider,
    /// The step of a Pipeline that sent it.
    Step,
}

/// What requests used together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UsageTotal {
    /// Requests that ended.
    pub requests: u64,
    /// Tokens of their prompts.
    pub prompt_tokens: u64,
    /// Tokens of these that were cached.
    pub cached_tokens: u64,
    /// Tokens of their answers.
    pub completion_tokens: u64,
    /// What providers cost.
    pub cost: Money,
    /// Requests that a provider without a price answered.
    pub unpriced: u64,
    /// What this cluster answered would have cost that elsewhere.
    pub elsewhere: Money,
    /// Thousandths of a joule that machines of this cluster drew for them, of those whose figure is known.
    pub millijoules: u64,
    /// Of these, those from watts that were measured and not declared.
    pub measured_millijoules: u64,
    /// What that electricity cost, where it has a price.
    pub electricity: Money,
    /// Requests that this cluster computed for, and nobody knows at how many joules.
    pub unmetered: u64,
    /// Requests of which the joules are known and the price of the electricity is not.
    pub unpriced_electricity: u64,
}

/// What the requests of a period used.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UsageReport {
    /// By the values of the fields, in their order.
    pub totals: BTreeMap<Vec<String>, UsageTotal>,
    /// Requests that got an answer which was kept; they count nowhere else.
    pub kept_answers: u64,
    /// Requests of earlier releases, which did not write what they used.
    pub uncounted: u64,
    /// Entries that could not be written.
    pub lost: u64,
    /// When the log begins: of what was answered before, nothing counts.
    pub began: Option<Timestamp>,
}

impl UsageReport {
    /// Of all requests.
    pub fn total(&self) -> UsageTotal {
        self.totals.values().fold(UsageTotal::default(), |all, one| UsageTotal {
            requests: all.requests + one.requests,
            prompt_tokens: all.prompt_tokens.saturating_add(one.prompt_tokens),
            cached_tokens: all.cached_tokens.saturating_add(one.cached_tokens),
            completion_tokens: all.completion_tokens.saturating_add(one.completion_tokens),
            cost: all.cost.plus(one.cost),
            unpriced: all.unpriced + one.unpriced,
            elsewhere: all.elsewhere.plus(one.elsewhere),
            millijoules: all.millijoules.saturating_add(one.millijoules),
            measured_millijoules: all.measured_millijoules.saturating_add(one.measured_millijoules),
            electricity: all.electricity.plus(one.electricity),
            unmetered: all.unmetered + one.unmetered,
            unpriced_electricity: all.unpriced_electricity + one.unpriced_electricity,
        })
    }

    fn count(&mut self, key: Vec<String>, used: &AuditUsage, elsewhere: Option<&ModelPrice>) {
        let AuditUsage {
            prompt_tokens,
            cached_tokens,
            completion_tokens,
            kept_answer: _,
            provider,
            cost,
            engine_microseconds: _,
            millijoules,
            power,
            electricity,
            unmetered,
        } = used;
        let total = self.totals.entry(key).or_default();
        let is_computed_here = provider.is_none() && prompt_tokens.saturating_add(*completion_tokens) > 0;
        match millijoules {
            None => total.unmetered += u64::from(is_computed_here || *unmetered),
            Some(millijoules) => {
                let measured = if *power == Some(PowerSource::Measured) { *millijoules } else { 0 };
                total.millijoules = total.millijoules.saturating_add(*millijoules);
                total.measured_millijoules = total.measured_millijoules.saturating_add(measured);
                total.electricity = total.electricity.plus(electricity.unwrap_or_default());
                total.unpriced_electricity += u64::from(electricity.is_none());
            }
        }
        total.requests += 1;
        total.prompt_tokens = total.prompt_tokens.saturating_add(*prompt_tokens);
        total.cached_tokens = total.cached_tokens.saturating_add(*cached_tokens);
        total.completion_tokens = total.completion_tokens.saturating_add(*completion_tokens);
        total.cost = total.cost.plus(cost.unwrap_or_default());
        match (provider, elsewhere) {
            (Some(_), _) => total.unpriced += u64::from(cost.is_none()),
            // What nothing answered would not have cost a fee either.
            (None, Some(price)) if is_computed_here => {
                let there = price.of(*prompt_tokens, *cached_tokens, *completion_tokens);
                total.elsewhere = total.elsewhere.plus(there);
            }
            (None, _) => {}
        }
    }
}

/// What the requests of a log used in a period, by these fields; days are those of `time_zone`, and `elsewhere` is a price that
/// what this cluster answered is compared with.
pub fn usage(
    folder: &Path,
    period: &AuditPeriod,
    fields: &[UsageField],
    time_zone: &TimeZone,
    elsewhere: Option<&ModelPrice>,
) -> Result<UsageReport, AuditError> {
    let mut report = UsageReport::default();
    let verified = verify_each(folder, period, None, |at, event| {
        let AuditEvent::Completed(completed) = event else { return };
        match &completed.usage {
            None => report.uncounted += 1,
            Some(used) if used.kept_answer => report.kept_answers += 1,
            Some(used) => {
                let value = |field: &UsageField| value(*field, at, completed, used, time_zone);
                report.count(fields.iter().map(value).collect(), used, elsewhere);
            }
        }
    })?;
    report.lost = verified.lost;
    report.began = verified.span.map(|(first, _)| first);
    Ok(report)
}

fn value(
    field: UsageField,
    at: Timestamp,
    completed: &CompletedRequest,
    used: &AuditUsage,
    time_zone: &TimeZone,
) -> String {
    match field {
        UsageField::Key => completed.key.clone().unwrap_or_else(|| "-".to_owned()),
        UsageField::Step => completed.step.clone().unwrap_or_else(|| "-".to_owned()),
        UsageField::Model => completed.model.clone(),
        UsageField::Day => at.to_zoned(time_zone.clone()).date().to_string(),
        UsageField::Provider => used.provider.clone().unwrap_or_else(|| "here".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use russet_crds::TokenPrice;

    use super::super::{AuditLog, DepartedRequest};
    use super::*;

    fn ended(key: &str, model: &str, usage: Option<AuditUsage>) -> CompletedRequest {
        CompletedRequest {
            request: "r".into(),
            key: (!key.is_empty()).then(|| key.to_owned()),
            model: model.into(),
            run: None,
            step: None,
            zone: "Local".into(),
            outcome: "finished".into(),
            usage,
        }
    }

    fn tokens(prompt_tokens: u64, cached_tokens: u64, completion_tokens: u64) -> AuditUsage {
        AuditUsage { prompt_tokens, cached_tokens, completion_tokens, ..AuditUsage::default() }
    }

    fn money(text: &str) -> Money {
        text.parse().unwrap()
    }

    fn computed(usage: AuditUsage, power: PowerSource, electricity: Option<&str>) -> AuditUsage {
        AuditUsage {
            engine_microseconds: Some(10_000),
            millijoules: Some(2000),
            power: Some(power),
            electricity: electricity.map(money),
            ..usage
        }
    }

    #[tokio::test]
    async fn usage_is_counted_by_what_is_asked_for() {
        let folder = tempfile::tempdir().unwrap();
        let log = AuditLog::open(folder.path()).unwrap();
        let away = |cost: Option<&str>| AuditUsage {
            provider: Some("default/p".into()),
            cost: cost.map(money),
            ..tokens(10, 0, 5)
        };
        for completed in [
            ended(
                "default/a",
                "m",
                Some(computed(tokens(1000, 400, 100), PowerSource::Measured, Some("0.02"))),
            ),
            ended("default/a", "m", Some(computed(tokens(1000, 0, 100), PowerSource::Declared, None))),
            ended("default/a", "n", Some(away(Some("0.25")))),
            // Two responses: a provider answered one, and an engine of unknown watts the other.
            ended("default/c", "n", Some(AuditUsage { unmetered: true, ..away(Some("0.25")) })),
            ended("", "m", Some(away(None))),
            ended("", "m", Some(AuditUsage { kept_answer: true, ..tokens(7, 0, 7) })),
            ended("", "m", None),
            ended("", "m", Some(tokens(5, 0, 1))),
            ended("", "m", Some(tokens(0, 0, 0))),
        ] {
            log.completed(completed);
        }
        // Whoever waits for this one has all before it.
        log.departed(DepartedRequest::default()).await.unwrap();
        let tokens = TokenPrice { input: money("3"), cached_input: Some(money("0.3")), output: money("15") };
        let price = ModelPrice { tokens, request: money("0.01") };
        let read = |fields: &[UsageField], elsewhere| {
            usage(folder.path(), &AuditPeriod::default(), fields, &TimeZone::UTC, elsewhere).unwrap()
        };
        let report = read(&[UsageField::Key, UsageField::Model], Some(&price));
        assert_eq!((report.kept_answers, report.uncounted, report.lost), (1, 1, 0));
        let key = |key: &str, model: &str| vec![key.to_owned(), model.to_owned()];
        // 600 tokens at 3, 400 at 0.3 and 100 at 15, and 1,000 at 3 with 100 at 15, each for a million; and two fees.
        let expected = UsageTotal {
            requests: 2,
            prompt_tokens: 2000,
            cached_tokens: 400,
            completion_tokens: 200,
            elsewhere: money("0.02792"),
            millijoules: 4000,
            measured_millijoules: 2000,
            electricity: money("0.02"),
            unpriced_electricity: 1,
            ..UsageTotal::default()
        };
        assert_eq!(report.totals[&key("default/a", "m")], expected);
        for (name, unmetered) in [("default/a", 0), ("default/c", 1)] {
            let total = report.totals[&key(name, "n")];
            assert_eq!((total.cost, total.unmetered), (money("0.25"), unmetered), "{name}");
        }
        let unpriced = report.totals[&key("-", "m")];
        // What a provider or nobody computed needs no figure.
        assert_eq!((unpriced.unpriced, unpriced.cost, unpriced.unmetered), (1, Money::ZERO, 1));
        assert_eq!((report.total().requests, report.total().unmetered), (7, 2));
        let by_provider = read(&[UsageField::Provider], None);
        let names: Vec<&str> = by_provider.totals.keys().map(|key| key[0].as_str()).collect();
        assert_eq!((names, by_provider.total().elsewhere), (vec!["default/p", "here"], Money::ZERO));
        assert_eq!(read(&[UsageField::Day], None).totals.len(), 1);
        assert_eq!(read(&[], None).total(), by_provider.total());
        let future = AuditPeriod { since: Some("2200-01-01T00:00:00Z".parse().unwrap()), until: None };
        let none = usage(folder.path(), &future, &[], &TimeZone::UTC, None).unwrap();
        assert!(report.began.is_some());
        assert_eq!(none, UsageReport { began: report.began, ..UsageReport::default() });
    }
}
