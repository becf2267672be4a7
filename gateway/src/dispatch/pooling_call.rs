//! Requests for vectors and scores to an engine: one call, one answer. Not here: engine selection, see `attempt_loop`.

use std::borrow::Cow;

use russet_rpc::engine as pb;

use super::deadline::Deadline;
use super::dispatcher::Dispatcher;
use super::engine_stream::{AttemptError, LostWork, acquire, answer, failure_error};
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

    /// Microseconds that its engine computed; none from one that does not count them.
    pub(super) fn engine_microseconds(&self) -> Option<u64> {
        match self {
            Self::Embed(reply) => reply.engine_microseconds,
            Self::Rerank(reply) => reply.engine_microseconds,
        }
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
        let (client, _in_flight) = acquire(dispatcher, endpoint)?;
        let mut client = client.max_decoding_message_size(MAX_REPLY_BYTES);
        let active = dispatcher.demand.start(deployment);
        let reply = match self.clone() {
            Self::Embed(mut request) => {
                request.deadline_milliseconds = milliseconds;
                let call = client.embed(request);
                PoolingReply::Embed(answer(dispatcher, endpoint, deadline, std::pin::pin!(call)).await?)
            }
            Self::Rerank(mut request) => {
                request.deadline_milliseconds = milliseconds;
                let call = client.rerank(request);
                PoolingReply::Rerank(answer(dispatcher, endpoint, deadline, std::pin::pin!(call)).await?)
            }
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
