//! Requests for vectors and scores to an engine: one call, one answer. Not here: engine selection, see `attempt_loop`.

use std::borrow::Cow;

use russet_rpc::engine as pb;
use russet_rpc::tls::CONNECT_TIMEOUT;
use tokio::time::{Instant, timeout_at};
use tonic::Status;

use super::deadline::Deadline;
use super::dispatcher::Dispatcher;
use super::engine_stream::{
    AttemptError, LostWork, attempt_error, broke_connection, endpoint_removed, event_deadline, failure_error,
    shutdown_error, silence_error,
};
use crate::error::{ErrorKind, GatewayError};
use crate::routes::{Deployment, Endpoint};

/// Most bytes of an answer: an engine's limit of its vectors, with room for what is beside them.
const MAX_REPLY_BYTES: usize = 40 << 20;

/// What is asked of a model that does not generate.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum PoolingRequest {
    /// Vectors of texts.
    Embed(pb::EmbedRequest),
    /// Scores of documents.
    Rerank(pb::RerankRequest),
}

/// Its answer, which is no failure.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum PoolingReply {
    /// Vectors.
    Embed(pb::EmbedReply),
    /// Scores.
    Rerank(pb::RerankReply),
}

impl PoolingReply {
    /// Tokens of all texts.
    pub(crate) fn tokens(&self) -> u32 {
        let tokens = match self {
            Self::Embed(reply) => &reply.prompt_tokens,
            Self::Rerank(reply) => &reply.prompt_tokens,
        };
        tokens.iter().fold(0, |sum: u32, tokens| sum.saturating_add(*tokens))
    }
}

impl PoolingRequest {
    /// Its texts, and the tokens of those that are given as such.
    pub(crate) fn texts(&self) -> impl Iterator<Item = Cow<'_, str>> {
        let (inputs, query, documents) = match self {
            Self::Embed(pb::EmbedRequest { inputs, .. }) => (inputs.as_slice(), None, [].as_slice()),
            Self::Rerank(pb::RerankRequest { query, documents, .. }) => {
                ([].as_slice(), Some(query.as_str()), documents.as_slice())
            }
        };
        let embedded = inputs.iter().map(|input| match &input.input {
            Some(pb::embed_input::Input::Text(text)) => Cow::Borrowed(text.as_str()),
            Some(pb::embed_input::Input::TokenIds(pb::TokenIds { ids })) => Cow::Owned(format!("{ids:?}")),
            None => Cow::Borrowed(""),
        });
        embedded
            .chain(query.map(Cow::Borrowed))
            .chain(documents.iter().map(|text| Cow::Borrowed(text.as_str())))
    }

    /// The field of the request that has the texts.
    fn field(&self) -> &'static str {
        match self {
            Self::Embed(_) => "input",
            Self::Rerank(_) => "documents",
        }
    }

    /// Asks one engine, within the deadline, of which so many milliseconds remain.
    pub(super) async fn send(
        &self,
        dispatcher: &Dispatcher,
        deployment: &Deployment,
        endpoint: &Endpoint,
        deadline: Option<Deadline>,
        milliseconds: Option<u64>,
    ) -> Result<PoolingReply, AttemptError> {
        let (client, _in_flight) = dispatcher.backends.acquire(endpoint).map_err(|error| {
            tracing::error!("{}", russet_telemetry::errors::chain(&error));
            let message = "the gateway cannot use its client certificate; see its log";
            AttemptError::Rejected(GatewayError::new(ErrorKind::Internal, message))
        })?;
        let mut client = client.max_decoding_message_size(MAX_REPLY_BYTES);
        let active = dispatcher.demand.start(deployment);
        let mut changes = dispatcher.table.clone();
        let (began, patience) = (Instant::now(), dispatcher.limits.engine_timeout);
        let call = async {
            match self.clone() {
                Self::Embed(mut request) => {
                    request.deadline_milliseconds = milliseconds;
                    client.embed(request).await.map(|reply| PoolingReply::Embed(reply.into_inner()))
                }
                Self::Rerank(mut request) => {
                    request.deadline_milliseconds = milliseconds;
                    client.rerank(request).await.map(|reply| PoolingReply::Rerank(reply.into_inner()))
                }
            }
        };
        let answered: Result<Result<PoolingReply, Status>, _> = tokio::select! {
            answered = timeout_at(event_deadline(began, patience, deadline), call) => answered,
            // A frozen machine accepts connections and sends nothing; its group may be ready elsewhere by now.
            () = endpoint_removed(&mut changes, endpoint) => {
                let Endpoint { address, node, .. } = endpoint;
                let message = format!("the engine on node {node} at {address} does not respond and is being replaced");
                let connected = began.elapsed() > CONNECT_TIMEOUT;
                let work = if connected { LostWork::Prompt } else { LostWork::None };
                return Err(AttemptError::Lost { work, message });
            }
            () = dispatcher.closing.cancelled() => return Err(AttemptError::Rejected(shutdown_error())),
        };
        let reply = match answered {
            Ok(Ok(reply)) => reply,
            Ok(Err(status)) => {
                let work = if broke_connection(&status) { LostWork::Prompt } else { LostWork::None };
                return Err(attempt_error(endpoint, &status, work));
            }
            Err(_) => return Err(AttemptError::Rejected(silence_error(endpoint, patience, deadline))),
        };
        active.first_token();
        let failed = match &reply {
            PoolingReply::Embed(reply) => reply.failed.clone(),
            PoolingReply::Rerank(reply) => reply.failed.clone(),
        };
        match failed {
            None => Ok(reply),
            Some(failed) => Err(failure_error(failed.into(), self.field(), deadline, LostWork::None)),
        }
    }
}
