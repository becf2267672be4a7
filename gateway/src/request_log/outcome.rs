//! How a request ended, for the part of the gateway that sent it: a step of a Pipeline, or the inbox.

use std::sync::{Arc, OnceLock};

use super::{LogEntry, RequestEnd};
use crate::audit::AuditUsage;

/// How a request ended, for whoever sent it on the inside.
#[derive(Clone, Default)]
pub(crate) struct RequestOutcome {
    pub(super) entry: Arc<OnceLock<Arc<LogEntry>>>,
    /// `namespace/pipeline/step` of the step of a Pipeline that sends it.
    pub(super) step: Option<Arc<str>>,
    /// What it has in common with the same request that a gateway sends again after a crash.
    pub(super) repeat: Option<Arc<str>>,
}

impl RequestOutcome {
    /// Of a request that this step of a Pipeline sends, `namespace/pipeline/step`.
    pub(crate) fn of_step(step: &str) -> Self {
        Self { step: Some(step.into()), ..Self::default() }
    }

    /// Of a request that is sent again after a crash, with the same text here.
    pub(crate) fn of_repeated(repeat: &str) -> Self {
        Self { repeat: Some(repeat.into()), ..Self::default() }
    }

    /// Whether it ended with an error, if only in the middle of a stream.
    pub(crate) fn has_failed(&self) -> bool {
        let has_failed =
            |entry: &Arc<LogEntry>| matches!(entry.record.lock().end, Some(RequestEnd::Failed { .. }));
        self.entry.get().is_some_and(has_failed)
    }

    /// The class of the error it ended with, and its message where that cannot quote the request.
    pub(crate) fn failure(&self) -> Option<String> {
        match &self.entry.get()?.record.lock().end {
            Some(RequestEnd::Failed { code, message, .. }) => {
                Some(message.clone().unwrap_or_else(|| code.to_string()))
            }
            _ => None,
        }
    }

    /// What it used so far; none before it is in the log.
    pub(crate) fn usage(&self) -> Option<AuditUsage> {
        self.entry.get()?.completed().usage
    }
}
