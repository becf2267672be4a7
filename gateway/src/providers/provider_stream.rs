//! The stream of a provider's answer: its bytes as events of ours. What a provider may send is bounded, and an answer that ends
//! without its last event is an error.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::{Stream, StreamExt as _};
use reqwest::Response;
use russet_crds::{Money, ProviderApi};
use russet_wire::event::{GenerationEvent, Usage};
use tokio::time::{Instant, timeout_at};

use super::anthropic::AnthropicParser;
use super::client::ProviderError;
use super::openai::OpenAiParser;
use super::server_sent_events::{EventReader, InvalidEvent};
use super::{Outcome, ProviderPermit, ProviderRequest, Providers, Trials};
use crate::error::shown;
use crate::routes::Provider;

/// Bytes of one answer: more than the longest, of 128 Ki tokens with their JSON.
const MAX_RESPONSE_BYTES: usize = 64 << 20;

/// Reads the data of one API's events.
pub(super) trait EventParser: Send {
    /// The events that the data of one event make.
    fn parse(&mut self, data: &str) -> Result<Vec<GenerationEvent>, ParseError>;

    /// The last event, where the stream ends without saying so and the answer is whole.
    fn end(&mut self) -> Option<GenerationEvent>;

    /// What the answer cost, where the provider has said so.
    fn reported_cost(&self) -> Option<Money> {
        None
    }
}

/// Why data of an event are no part of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ParseError {
    /// The provider reports an error.
    Reported(String),
    /// Nobody can read them.
    Unreadable(String),
}

/// The answer of a provider.
pub(crate) struct ProviderStream {
    providers: Arc<Providers>,
    provider: Provider,
    model: String,
    body: Pin<Box<dyn Stream<Item = reqwest::Result<Bytes>> + Send>>,
    reader: EventReader,
    parser: Box<dyn EventParser>,
    events: VecDeque<GenerationEvent>,
    patience: Duration,
    /// When it sent something last.
    heard: Instant,
    /// Bytes that it has sent.
    received: usize,
    /// Events with text: about as many tokens.
    pieces: u32,
    /// Tokens of the prompt, estimated.
    prompt_tokens: u32,
    /// What it tries, until something of the answer is there.
    trials: Trials,
    _permit: ProviderPermit,
}

impl ProviderStream {
    /// The answer in a response.
    pub(super) fn new(
        providers: Arc<Providers>,
        wanted: &ProviderRequest,
        response: Response,
        (permit, trials): (ProviderPermit, Trials),
    ) -> Self {
        let ProviderRequest { provider, model, request, .. } = wanted;
        let parser: Box<dyn EventParser> = match provider.spec.api {
            ProviderApi::Anthropic => Box::new(AnthropicParser::new(request.stop.clone())),
            ProviderApi::OpenAI | ProviderApi::Unknown => Box::<OpenAiParser>::default(),
        };
        Self {
            providers,
            provider: provider.clone(),
            model: model.clone(),
            body: Box::pin(response.bytes_stream()),
            reader: EventReader::default(),
            parser,
            events: VecDeque::new(),
            patience: Duration::from_secs(provider.spec.timeout_seconds.into()),
            heard: Instant::now(),
            received: 0,
            pieces: 0,
            prompt_tokens: wanted.prompt_estimate(),
            trials,
            _permit: permit,
        }
    }

    /// `namespace/name` of the provider.
    pub(crate) fn provider(&self) -> String {
        self.provider.full_name()
    }

    /// What the answer cost, where the provider has said so.
    pub(crate) fn reported_cost(&self) -> Option<Money> {
        self.parser.reported_cost()
    }

    /// The next event that adds something, or the last one. Cancel-safe: what was read is kept.
    pub(crate) async fn event(&mut self) -> Result<GenerationEvent, ProviderError> {
        let event = self.next().await;
        let trials = std::mem::take(&mut self.trials);
        if event.is_ok() {
            self.providers.reopened(&self.provider, &self.model, trials);
        }
        match &event {
            Ok(GenerationEvent::Finished { usage, .. }) => {
                self.record(Outcome::Answered);
                let priced = self.provider.price(&self.model).map(|price| {
                    let [prompt, cached, completion] =
                        [usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens].map(u64::from);
                    price.of(prompt, cached, completion)
                });
                if let Some(cost) = priced.or(self.reported_cost()) {
                    self.providers.metrics.provider_cost(&self.provider(), cost);
                }
            }
            Ok(_) => {}
            Err(ProviderError::Rejected(_)) => self.record(Outcome::Rejected),
            Err(ProviderError::Busy(message, _) | ProviderError::Failed(message)) => {
                self.record(Outcome::Failed { message, is_busy: false, pause: None });
            }
        }
        event
    }

    fn record(&self, outcome: Outcome<'_>) {
        self.providers.record(&self.provider, &self.model, outcome);
    }

    async fn next(&mut self) -> Result<GenerationEvent, ProviderError> {
        loop {
            if let Some(event) = self.events.pop_front() {
                return Ok(self.counted(event));
            }
            let piece = match timeout_at(self.heard + self.patience, self.body.next()).await {
                Ok(Some(Ok(piece))) => piece,
                Ok(Some(Err(error))) => {
                    return Err(
                        self.failed(&russet_telemetry::errors::chain(&error.without_url()).to_string())
                    );
                }
                Ok(None) => {
                    let end = self.parser.end().map(|event| self.counted(event));
                    return end.ok_or_else(|| self.failed("it ended its answer in the middle"));
                }
                Err(_) => {
                    return Err(self.failed(&format!("it sent nothing for {} s", self.patience.as_secs())));
                }
            };
            self.heard = Instant::now();
            self.received = self.received.saturating_add(piece.len());
            if self.received > MAX_RESPONSE_BYTES {
                return Err(self.failed("its answer has more than 64 MiB"));
            }
            let data = self
                .reader
                .push(&piece)
                .map_err(|InvalidEvent(what)| self.failed(&format!("it sent {what}")))?;
            for data in data {
                match self.parser.parse(&data) {
                    Ok(events) => self.events.extend(events),
                    Err(ParseError::Reported(message)) => {
                        return Err(self.failed(&format!("it reports: {}", shown(&message))));
                    }
                    Err(ParseError::Unreadable(why)) => {
                        return Err(self.failed(&format!("it sent what is no part of an answer: {why}")));
                    }
                }
            }
        }
    }

    fn failed(&self, message: &str) -> ProviderError {
        ProviderError::Failed(format!("ModelProvider {}: {message}", self.provider()))
    }

    /// The event; the last one with counts of our own where the provider tells none.
    fn counted(&mut self, event: GenerationEvent) -> GenerationEvent {
        match event {
            GenerationEvent::Finished { reason, usage } => {
                let Usage { prompt_tokens, completion_tokens, cached_tokens } = usage;
                let or = |reported: u32, own: u32| if reported == 0 { own } else { reported };
                let usage = Usage {
                    prompt_tokens: or(prompt_tokens, self.prompt_tokens),
                    // A piece is about a token, and seldom less than half of one: fewer were not answered.
                    completion_tokens: or(completion_tokens, self.pieces).max(self.pieces / 2),
                    cached_tokens,
                };
                GenerationEvent::Finished { reason, usage }
            }
            other => {
                self.pieces = self.pieces.saturating_add(1);
                other
            }
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use russet_crds::ModelProviderSpec;

    use super::*;

    /// The provider of an endpoint.
    pub(in crate::providers) fn provider(endpoint: &str) -> Provider {
        let spec = ModelProviderSpec { endpoint: endpoint.into(), ..ModelProviderSpec::default() };
        Provider { namespace: "default".into(), name: "p".into(), spec, ..Provider::default() }
    }

    /// The events that these data make, the end of the stream included.
    pub(in crate::providers) fn read(
        mut parser: impl EventParser,
        data: &[&str],
    ) -> Result<Vec<GenerationEvent>, ParseError> {
        let mut events = Vec::new();
        for data in data {
            events.extend(parser.parse(data)?);
        }
        events.extend(parser.end());
        Ok(events)
    }
}
