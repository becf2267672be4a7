//! Deletes a model by its name, and gives one a further name, where the caller's key and the gateway may. Pulls, which may
//! create one, are in `model_pull`.

use std::sync::Arc;
use std::time::Duration;

use axum::http::StatusCode;
use axum::response::IntoResponse as _;
use axum::routing::{MethodFilter, MethodRouter};
use russet_wire::event::Usage;

use super::api_state::ApiState;
use super::dialect::Dialect;
use super::{RecordedRequest, read_parsed, within_quota};
use crate::discard::discard;
use crate::error::GatewayError;
use crate::json_body::JsonBody;
use crate::keys::{ApiKey, Caller};
use crate::managed_models::{ManagedModels, denied};
use crate::request_log::Recorder;
use crate::routes::{Resolved, RoutingTable, deployments, untagged};

/// How long a response waits until this gateway sees what was changed, so that its client's next request does too.
const SYNC_TIMEOUT: Duration = Duration::from_secs(5);

/// A change of the models that a namespace has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ModelChange {
    /// Deletes the model of this name.
    Delete {
        /// The name as the client sent it.
        model: String,
    },
    /// Gives a model a further name.
    Copy {
        /// A name that it has.
        source: String,
        /// The further one.
        destination: String,
    },
}

/// The handler of a path that changes models: `parse` reads its request. Its response is empty. `unsupported` says what to do
/// instead where this gateway changes none.
pub(crate) fn model_change(
    dialect: &'static Dialect,
    method: MethodFilter,
    parse: fn(JsonBody<'_>) -> Result<ModelChange, GatewayError>,
    unsupported: fn() -> GatewayError,
) -> MethodRouter<Arc<ApiState>> {
    let work = move |RecordedRequest { api, id, caller, request, recorder }| async move {
        let Some(managed) = api.managed.clone() else {
            discard(request.into_body()).await;
            return Err(unsupported());
        };
        let (change, _permit) = read_parsed(&api, &id, &caller, request, parse).await?;
        let (ModelChange::Delete { model } | ModelChange::Copy { source: model, .. }) = &change;
        recorder.parsed(model, 1, false);
        change.run(&api, &managed, &caller, &recorder).await?;
        recorder.finished(None, Usage::default());
        Ok(StatusCode::OK.into_response())
    };
    within_quota(method, dialect, work)
}

impl ModelChange {
    async fn run(
        self,
        api: &ApiState,
        managed: &Arc<ManagedModels>,
        caller: &Caller,
        recorder: &Recorder,
    ) -> Result<(), GatewayError> {
        let (name, is_deleted, changes) = match self {
            Self::Delete { model } => {
                let key = manager(caller, "delete", &model)?;
                check_scope(api, caller, &[&model])?;
                let changes = managed.delete(key, own_name(key, &model)).await?;
                (model, true, changes)
            }
            Self::Copy { source, destination } => {
                let key = manager(caller, "copy", &source)?;
                check_scope(api, caller, &[&source, &destination])?;
                let targets = targets(api, caller, &source)?;
                let changes = managed.copy(key, targets, own_name(key, &destination)).await?;
                (destination, false, changes)
            }
        };
        api.record_changes(caller, recorder, &changes);
        let is_there = |table: &RoutingTable| {
            matches!(table.resolve(&name, caller.scope()), Resolved::Targets(_) | Resolved::Ambiguous(_))
        };
        if !changes.is_empty() {
            api.wait_for_table(SYNC_TIMEOUT, |table| is_there(table) != is_deleted).await;
        }
        Ok(())
    }
}

/// The key of a caller that may change models.
fn manager<'a>(caller: &'a Caller, verb: &str, name: &str) -> Result<&'a ApiKey, GatewayError> {
    caller.model_manager().map(|key| &**key).ok_or_else(|| denied(verb, name, caller.key_name().is_some()))
}

/// The name in the key's own namespace, without the tag that every name has.
pub(super) fn own_name<'a>(key: &ApiKey, name: &'a str) -> &'a str {
    let name = untagged(name);
    match name.split_once('/') {
        Some((namespace, rest)) if namespace == key.namespace => rest,
        _ => name,
    }
}

/// An error for names that the caller's key does not allow.
fn check_scope(api: &ApiState, caller: &Caller, names: &[&str]) -> Result<(), GatewayError> {
    let mut refused = names.iter().filter(|name| !caller.scope().allows(untagged(name)));
    refused.next().map_or(Ok(()), |name| Err(api.dispatcher.unknown(untagged(name), caller)))
}

/// The deployments that a name leads to.
fn targets(api: &ApiState, caller: &Caller, source: &str) -> Result<Vec<String>, GatewayError> {
    match api.dispatcher.table().resolve_adapter(source, caller.scope()) {
        (Resolved::Targets(found), "") => {
            let names: Vec<String> = deployments(&found).into_iter().map(|one| one.name.clone()).collect();
            if names.is_empty() {
                let message =
                    format!("`{source}` leads to providers alone; write a ModelRoute for another name of it");
                return Err(GatewayError::field("source", message));
            }
            Ok(names)
        }
        (Resolved::Targets(_), adapter) => {
            let message = format!(
                "`{source}` is the adapter {adapter} of a model, and only a model has further names; copy the model, and ask \
                 for NAME:{adapter}"
            );
            Err(GatewayError::field("source", message))
        }
        _ => Err(api.dispatcher.unknown(source, caller)),
    }
}

impl ApiState {
    /// Records what was changed for a caller.
    pub(super) fn record_changes(&self, caller: &Caller, recorder: &Recorder, changes: &[String]) {
        for change in changes {
            tracing::info!(key = caller.key_name(), "{change} for a client");
        }
        recorder.changed(changes);
    }

    /// Waits until the routing table is so, or so long.
    pub(super) async fn wait_for_table(
        &self,
        timeout: Duration,
        mut is_so: impl FnMut(&RoutingTable) -> bool,
    ) -> bool {
        let mut tables = self.dispatcher.watch_table();
        let waited = tokio::time::timeout(timeout, tables.wait_for(|table| is_so(table))).await;
        matches!(waited, Ok(Ok(_)))
    }
}
