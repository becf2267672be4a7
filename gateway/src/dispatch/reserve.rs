//! What a request reserves of Budgets before it is answered.

use super::dispatcher::Dispatcher;
use super::pending_request::{PendingRequest, RequestKind};
use crate::budgets::{BudgetSubject, RequestBound};
use crate::error::GatewayError;
use crate::routes::Resolved;

/// Bytes of a request that are at least one token of its prompt: text has more, and numbers few less. What a prompt has beyond
/// that is counted once an engine has read it.
const MIN_BYTES_PER_TOKEN: usize = 2;

impl Dispatcher {
    /// Reserves what a request may use in the Budgets that count it, or says which has too little left.
    pub(super) async fn reserve(&self, pending: &mut PendingRequest) -> Result<(), GatewayError> {
        let Some(budgets) = self.budgets.as_ref().filter(|budgets| !budgets.is_empty()) else {
            return Ok(());
        };
        let (has_answer, answer_tokens) = match pending.kind {
            RequestKind::Text => (true, pending.request.max_tokens),
            RequestKind::Pooled(_) => (false, Some(0)),
            // Nothing is computed of them.
            RequestKind::TokenCount | RequestKind::Load => return Ok(()),
        };
        let reservation = {
            let table = self.table();
            let key = pending.caller.budget_key();
            let (name, owner) = key.map_or((None, None), |(name, owner)| (Some(name), owner));
            // Which of its models answers is not decided yet: Budgets of all of them count it.
            let subjects: Vec<(String, Option<String>)> = pending
                .models()
                .filter_map(|model| match table.matching_alias(model, pending.scope()) {
                    Some(alias) => {
                        let route = alias.route.split_once('/').map_or(&*alias.route, |(_, route)| route);
                        Some((alias.namespace.clone(), Some(route.to_owned())))
                    }
                    None => match table.resolve(model, pending.scope()) {
                        Resolved::Targets(targets) => Some((targets.first()?.namespace().to_owned(), None)),
                        _ => None,
                    },
                })
                .collect();
            let subjects: Vec<BudgetSubject<'_>> = subjects
                .iter()
                .map(|(namespace, route)| BudgetSubject {
                    namespace,
                    key: name,
                    owner,
                    route: route.as_deref(),
                })
                .collect();
            let text: usize =
                pending.request.messages.iter().flat_map(|message| message.texts()).map(str::len).sum();
            let bytes = pending.body_permit.bytes().max(text);
            let prompt_tokens = u64::try_from(bytes.div_ceil(MIN_BYTES_PER_TOKEN)).unwrap_or(u64::MAX);
            Box::pin(budgets.reserve(&subjects, RequestBound { prompt_tokens, answer_tokens })).await?
        };
        if let Some(mut reservation) = reservation {
            if has_answer && reservation.limits_answers() {
                let asked = pending.request.max_tokens.unwrap_or(u32::MAX);
                pending.request.max_tokens = Some(asked.min(reservation.answer_tokens()));
            }
            if pending.recorder().repeats_prompt() {
                reservation.without_prompt();
            }
            pending.reservation = Some(reservation);
        }
        Ok(())
    }
}
