//! What is left of the credits of the key that a provider is asked with, as OpenRouter tells whoever has the key. It is asked in
//! the wake of a request that went there, at most once in the interval of the ModelProvider, and never otherwise: a gateway that
//! sends a provider nothing does not contact it.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use reqwest::{RequestBuilder, StatusCode};
use russet_crds::{Money, ProviderCredits};
use serde_json::Value;
use tokio::time::{Instant, timeout};

use super::client::beginning;
use super::openai::amount;
use super::report::whole_seconds;
use super::{Providers, provider_key};
use crate::routes::Provider;

/// Where OpenRouter tells it, behind the beginning of its API.
pub(super) const PATH: &str = "/key";
/// The longest wait for it.
const PATIENCE: Duration = Duration::from_secs(30);

/// What was asked of the credits of a provider's key.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct CreditsHealth {
    /// What it said last.
    pub(super) said: Option<ProviderCredits>,
    /// When it was asked last.
    asked: Option<Instant>,
}

impl CreditsHealth {
    /// Whether it is time to ask again; that counts as asked.
    fn is_due(&mut self, interval: Option<u32>, now: Instant) -> bool {
        let Some(interval) = interval else { return false };
        let interval = Duration::from_secs(interval.into());
        let is_due = self.asked.is_none_or(|asked| now.duration_since(asked) >= interval);
        if is_due {
            self.asked = Some(now);
        }
        is_due
    }
}

impl Providers {
    /// Asks by `call`, beside everything else, where it is due; a request has just gone to the provider with the same key.
    pub(super) fn ask_credits(
        self: &Arc<Self>,
        provider: &Provider,
        call: impl FnOnce() -> Option<RequestBuilder>,
    ) {
        let interval = provider.spec.credits_interval_seconds;
        if interval.is_none() {
            return;
        }
        let seen = provider_key(provider);
        if !self.health.lock().entry(seen.clone()).or_default().credits.is_due(interval, Instant::now()) {
            return;
        }
        let Some(call) = call() else { return };
        let (providers, provider) = (self.clone(), provider.clone());
        tokio::spawn(async move {
            let name = &seen.0;
            let silence = || Err(format!("it sent nothing for {} s", PATIENCE.as_secs()));
            match timeout(PATIENCE, ask(call)).await.unwrap_or_else(|_| silence()) {
                Ok(credits) => {
                    providers.metrics.provider_credits(name, credits.remaining);
                    if credits.remaining == Some(Money::ZERO) {
                        providers
                            .pause(&provider, |pauses, generation, now| pauses.no_credits(generation, now));
                    }
                    providers.health.lock().entry(seen).or_default().credits.said = Some(credits);
                }
                Err(why) => {
                    tracing::warn!(provider = name, "the provider does not say its credits: {why}");
                }
            }
        });
    }
}

/// What the provider says of the key.
async fn ask(call: RequestBuilder) -> Result<ProviderCredits, String> {
    let response = call
        .send()
        .await
        .map_err(|error| russet_telemetry::errors::chain(&error.without_url()).to_string())?;
    let status = response.status();
    if status != StatusCode::OK {
        return Err(format!(
            "it answers {status} at {PATH}; leave out spec.creditsIntervalSeconds where it has no such API"
        ));
    }
    read(&beginning(response).await, Timestamp::now())
        .ok_or_else(|| format!("it answers no credits at {PATH}"))
}

/// The credits in OpenRouter's description of a key.
fn read(text: &str, now: Timestamp) -> Option<ProviderCredits> {
    let said: Value = serde_json::from_str(text).ok()?;
    let key = said.get("data")?.as_object()?;
    let number = |name: &str| match key.get(name)? {
        Value::Null => Some(None),
        // Whoever is in debt has nothing left.
        number => Some(Some(amount(number.as_f64()?.max(0.0))?)),
    };
    let (remaining, limit) = (number("limit_remaining")?, number("limit").flatten());
    Some(ProviderCredits { remaining, limit, read_at: Time(whole_seconds(now)) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credits_are_read_as_openrouter_says_them() {
        let now: Timestamp = "2026-11-30T10:00:00.5Z".parse().unwrap();
        let money = |text: &str| Some(text.parse::<Money>().unwrap());
        for (text, expected) in [
            (
                r#"{"data": {"limit": 5, "limit_remaining": 4.8984355238, "usage": 0.1}}"#,
                Some((money("4.898435524"), money("5"))),
            ),
            (
                r#"{"data": {"limit": null, "limit_remaining": null, "is_free_tier": true}}"#,
                Some((None, None)),
            ),
            (r#"{"data": {"limit": 5, "limit_remaining": -0.25}}"#, Some((money("0"), money("5")))),
            (r#"{"data": {"limit_remaining": 1e300}}"#, Some((Some(Money::MAX), None))),
            (r#"{"data": {"limit_remaining": "4"}}"#, None),
            (r#"{"data": {"usage": 3}}"#, None),
            (r#"{"data": [4]}"#, None),
            ("<html>", None),
        ] {
            let credits = read(text, now);
            let found = credits.as_ref().map(|credits| (credits.remaining, credits.limit));
            assert_eq!(found, expected, "{text}");
            assert!(credits.is_none_or(|credits| credits.read_at.0.to_string() == "2026-11-30T10:00:00Z"));
        }
    }

    #[test]
    fn credits_are_asked_once_in_an_interval() {
        let (mut credits, begin) = (CreditsHealth::default(), Instant::now());
        for (interval, seconds, expected) in [
            (None, 0, false),
            (Some(60), 0, true),
            (Some(60), 59, false),
            (Some(60), 60, true),
            (Some(60), 61, false),
            (None, 500, false),
            (Some(60), 500, true),
        ] {
            let now = begin + Duration::from_secs(seconds);
            assert_eq!(credits.is_due(interval, now), expected, "{interval:?} {seconds}");
        }
    }
}
