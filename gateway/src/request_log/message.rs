//! Which messages of errors the log keeps: those that cannot quote a prompt or a response.

use crate::error::{ErrorKind, GatewayError};

/// Longest text of a record, in characters.
const MAX_CHARS: usize = 300;

/// The text, shortened.
pub(super) fn shortened(text: &str) -> String {
    match text.char_indices().nth(MAX_CHARS) {
        None => text.to_owned(),
        Some((end, _)) => format!("{}…", &text[..end]),
    }
}

/// The message of an error, unless it may quote the request: those of invalid fields do, those of chat templates may,
/// and a bug says what it failed at.
pub(super) fn loggable(error: &GatewayError) -> Option<String> {
    (!may_quote(error.kind)).then(|| shortened(&error.message))
}

/// Whether messages of this class may quote the request.
pub(super) fn may_quote(kind: ErrorKind) -> bool {
    match kind {
        ErrorKind::InvalidRequest | ErrorKind::UnsupportedMediaType | ErrorKind::Internal => true,
        // They have numbers, the names of objects and models, and states of the cluster.
        ErrorKind::ContextLengthExceeded
        | ErrorKind::HeadTooLarge
        | ErrorKind::TooLarge
        | ErrorKind::BodyTimeout
        | ErrorKind::Forbidden
        | ErrorKind::InvalidApiKey
        | ErrorKind::ModelForbidden
        | ErrorKind::ZoneDenied
        | ErrorKind::QuotaExceeded
        | ErrorKind::BudgetExceeded
        | ErrorKind::UnknownPath
        | ErrorKind::MethodNotAllowed
        | ErrorKind::ModelNotFound
        | ErrorKind::RequestNotFound
        | ErrorKind::ResponseNotFound
        | ErrorKind::FileNotFound
        | ErrorKind::ArtifactNotFound
        | ErrorKind::BatchNotFound
        | ErrorKind::IdempotencyKeyReused
        | ErrorKind::PreviousResponseNotFound
        | ErrorKind::StoreFull
        | ErrorKind::ModelNotReady
        | ErrorKind::Overloaded
        | ErrorKind::GatewayFull
        | ErrorKind::EngineLost
        | ErrorKind::ProviderFailed
        | ErrorKind::PipelineFailed
        | ErrorKind::PoisonRequest
        | ErrorKind::EngineSilent
        | ErrorKind::DeadlineExceeded
        | ErrorKind::ShuttingDown => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_that_may_quote_the_request_are_left_out() {
        for (kind, expected) in [
            (ErrorKind::InvalidRequest, None),
            (ErrorKind::Internal, None),
            (ErrorKind::ModelNotReady, Some("copying".to_owned())),
        ] {
            assert_eq!(loggable(&GatewayError::new(kind, "copying")), expected);
        }
        assert_eq!(shortened(&"ü".repeat(MAX_CHARS)), "ü".repeat(MAX_CHARS));
        assert_eq!(shortened(&"ü".repeat(MAX_CHARS + 1)), "ü".repeat(MAX_CHARS) + "…");
    }
}
