//! Waits until the files of a model are where they are needed, and says how far they are. A model that sleeps is woken where
//! its files come to a node with the replica that needs them alone. A name that nothing has is created for a caller whose key
//! and gateway may, see `managed_models`.

use std::sync::Arc;
use std::time::Duration;

use axum::response::Response;
use axum::routing::{MethodFilter, MethodRouter};
use futures::Stream;
use russet_wire::event::Usage;
use tokio::time::{Instant, MissedTickBehavior, interval_at};

use super::api_state::ApiState;
use super::dialect::Dialect;
use super::model_change::own_name;
use super::{RecordedRequest, read_parsed, within_quota};
use crate::demand::HeldRequest;
use crate::error::{ErrorKind, GatewayError};
use crate::json_body::JsonBody;
use crate::keys::Caller;
use crate::managed_models::denied;
use crate::model_copies::CopyProgress;
use crate::request_log::Recorder;
use crate::routes::{
    Deployment, DeploymentState, FetchState, ModelDetails, Resolved, RoutingTable, deployments, untagged,
};

/// Time between two looks at the copies: agents report them every two seconds.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// How long a pull waits until this gateway sees what it created.
const SYNC_TIMEOUT: Duration = Duration::from_secs(30);

/// A parsed request.
pub(crate) struct ParsedPull {
    /// The model name as the client sent it.
    pub(crate) model: String,
    /// Whether the response is streamed.
    pub(crate) streamed: bool,
}

/// A model that is pulled.
pub(crate) struct ModelPull {
    api: Arc<ApiState>,
    model: String,
    caller: Caller,
    digest: String,
    recorder: Recorder,
}

/// The handler of a path that pulls a model: `parse` reads its request, `respond` says how far it is, streamed or not. A
/// pull counts towards its caller's quota, as it may wake a model.
pub(crate) fn model_pull<F>(
    dialect: &'static Dialect,
    parse: fn(JsonBody<'_>) -> Result<ParsedPull, GatewayError>,
    respond: fn(Arc<ApiState>, ModelPull, bool) -> F,
) -> MethodRouter<Arc<ApiState>>
where
    F: Future<Output = Result<Response, GatewayError>> + Send + 'static,
{
    let work = move |RecordedRequest { api, id, caller, request, recorder }| async move {
        let (parsed, _permit) = read_parsed(&api, &id, &caller, request, parse).await?;
        let ParsedPull { model, streamed } = parsed;
        recorder.parsed(&model, 1, streamed);
        create_missing(&api, &model, &caller, &recorder).await?;
        let pull = ModelPull::new(api.clone(), model, caller, recorder)?;
        respond(api, pull, streamed).await
    };
    within_quota(MethodFilter::POST, dialect, work)
}

/// How far a model is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PullProgress {
    /// No bytes are on their way; this is what it waits for.
    Waiting(String),
    /// Bytes that have arrived, of all copies.
    Downloading {
        /// Those that are there.
        completed: u64,
        /// All of them.
        total: u64,
    },
}

/// What is to be done about a model.
#[derive(Debug, PartialEq)]
enum PullStep {
    /// Its files are there.
    Done,
    /// They are on their way.
    Wait(PullProgress),
    /// They do not come.
    Fail(GatewayError),
}

/// What a name means for a pull.
struct PullTarget<'a> {
    model: PulledModel<'a>,
    /// What is known of its Model.
    details: Option<&'a ModelDetails>,
}

/// The model that a name leads to.
enum PulledModel<'a> {
    /// It is served, by the first of these that is ready.
    Deployed { deployments: Vec<&'a Deployment>, adapter: &'a str },
    /// A Model of this namespace and name that no deployment serves under the name.
    Undeployed { namespace: &'a str, model: &'a str },
}

/// Creates what the name of a pull lacks, where nothing has the name, or a pull that did not come to its end left a Model of
/// it. Returns once this gateway sees it.
async fn create_missing(
    api: &Arc<ApiState>,
    model: &str,
    caller: &Caller,
    recorder: &Recorder,
) -> Result<(), GatewayError> {
    let Some(managed) = &api.managed else { return Ok(()) };
    let table = api.dispatcher.table();
    let is_missing = match PullTarget::find(&table, model, caller) {
        Some(PullTarget { model: PulledModel::Deployed { .. }, .. }) => false,
        Some(PullTarget { model: PulledModel::Undeployed { .. }, details }) => {
            details.is_some_and(|details| details.managed) && caller.model_manager().is_some()
        }
        None => matches!(table.resolve(model, caller.scope()), Resolved::Unknown | Resolved::Forbidden),
    };
    if !table.synced || !is_missing {
        return Ok(());
    }
    if !caller.scope().allows(untagged(model)) {
        return Err(api.dispatcher.unknown(untagged(model), caller));
    }
    let Some(key) = caller.model_manager() else {
        return Err(denied("pull", model, caller.key_name().is_some()));
    };
    let changes = managed.pull(key, own_name(key, model)).await?;
    api.record_changes(caller, recorder, &changes);
    // Until its Model is known its deployment would be woken for files that come without that.
    let is_known = |table: &RoutingTable| {
        let target = PullTarget::find(table, model, caller);
        target.is_some_and(|target| {
            target.details.is_some() && matches!(target.model, PulledModel::Deployed { .. })
        })
    };
    if !api.wait_for_table(SYNC_TIMEOUT, is_known).await {
        let message = format!(
            "model `{model}` was created, and this gateway does not see it after {} s; pull it again",
            SYNC_TIMEOUT.as_secs()
        );
        return Err(GatewayError::new(ErrorKind::ModelNotReady, message));
    }
    Ok(())
}

impl<'a> PullTarget<'a> {
    fn find(table: &'a RoutingTable, name: &str, caller: &Caller) -> Option<Self> {
        let model = match table.resolve_adapter(name, caller.scope()) {
            (Resolved::Targets(targets), adapter) if !deployments(&targets).is_empty() => {
                PulledModel::Deployed { deployments: deployments(&targets), adapter }
            }
            _ => {
                let (namespace, model) = table.undeployed_model(name, caller.scope())?;
                PulledModel::Undeployed { namespace, model }
            }
        };
        let (namespace, name) = model.name();
        let details = table.models.get(&(namespace.to_owned(), name.to_owned()));
        Some(Self { model, details })
    }

    /// How its files are fetched without a replica that needs them, if they are.
    fn fetch(&self) -> Option<&'a FetchState> {
        self.details.and_then(|details| details.fetch.as_ref())
    }

    /// The deployment that has to become ready, where the files come with its replicas alone.
    fn waits_for(&self) -> Option<&'a Deployment> {
        match &self.model {
            PulledModel::Deployed { deployments, .. } if self.fetch().is_none() => {
                deployments.first().copied()
            }
            PulledModel::Deployed { .. } | PulledModel::Undeployed { .. } => None,
        }
    }

    fn step(&self, progress: Option<CopyProgress>) -> PullStep {
        if progress.is_some_and(CopyProgress::is_complete) {
            return PullStep::Done;
        }
        let downloading = match progress {
            Some(CopyProgress { bytes_done, bytes_total, .. }) if bytes_total > 0 => {
                Some(PullProgress::Downloading { completed: bytes_done.min(bytes_total), total: bytes_total })
            }
            _ => None,
        };
        let wait = |message: &str| {
            PullStep::Wait(downloading.clone().unwrap_or_else(|| PullProgress::Waiting(message.to_owned())))
        };
        let fail = |message: &str| {
            let message = format!("model {}: {message}", self.model.name().1);
            PullStep::Fail(GatewayError::new(ErrorKind::ModelNotReady, message))
        };
        if let PulledModel::Deployed { deployments, adapter } = &self.model
            && deployments.iter().any(|one| one.endpoints_with(adapter).next().is_some())
        {
            return PullStep::Done;
        }
        match self.fetch() {
            Some(FetchState::Waiting(message)) => return wait(message),
            Some(FetchState::Stalled(message)) => return fail(message),
            None => {}
        }
        match &self.model {
            PulledModel::Deployed { deployments, .. } => {
                match deployments.first().map(|first| &first.state) {
                    Some(DeploymentState::Halted(message)) => fail(message),
                    Some(DeploymentState::Working(message)) => wait(message),
                    _ => wait("its replicas are not known yet"),
                }
            }
            PulledModel::Undeployed { namespace, model } => match (progress, &downloading) {
                (Some(CopyProgress { wanted: 0, .. }), None) => {
                    let message = format!(
                        "no deployment serves Model {namespace}/{model}, and no node has to hold its files: apply a \
                         ModelDeployment, or set spec.preload of the Model, with kubectl"
                    );
                    PullStep::Fail(GatewayError::field("model", message))
                }
                _ => wait("its files are asked for"),
            },
        }
    }
}

impl<'a> PulledModel<'a> {
    /// Namespace and name of the Model whose files are pulled.
    fn name(&self) -> (&'a str, &'a str) {
        match self {
            Self::Deployed { deployments, .. } => {
                deployments.first().map_or(("", ""), |first| (&first.namespace, &first.model))
            }
            Self::Undeployed { namespace, model } => (namespace, model),
        }
    }
}

impl ModelPull {
    /// An error for a name that is nothing to pull.
    fn new(
        api: Arc<ApiState>,
        model: String,
        caller: Caller,
        recorder: Recorder,
    ) -> Result<Self, GatewayError> {
        let table = api.dispatcher.table();
        let digest = match PullTarget::find(&table, &model, &caller) {
            Some(PullTarget { model: PulledModel::Deployed { .. }, .. }) => {
                api.model(&model, &caller)?.files.digest
            }
            Some(PullTarget { details, .. }) => {
                details.map(|details| details.digest.clone()).unwrap_or_default()
            }
            None => {
                let error = api.dispatcher.unknown(&model, &caller);
                return Err(match error.kind {
                    ErrorKind::ModelNotFound => GatewayError::field("model", not_served(&model)),
                    _ => error,
                });
            }
        };
        Ok(Self { api, model, caller, digest, recorder })
    }

    /// SHA-256 in hexadecimal of its files.
    pub(crate) fn digest(&self) -> &str {
        &self.digest
    }

    /// How far a model is, until its files are there; the last item may be an error. While it waits it counts as a
    /// request that is held, which wakes a model that sleeps.
    pub(crate) fn progress(self) -> impl Stream<Item = Result<PullProgress, GatewayError>> + Send {
        let Self { api, model, caller, digest: _, recorder } = self;
        async_stream::stream! {
            let mut tables = api.dispatcher.watch_table();
            let mut ticks = interval_at(Instant::now() + POLL_INTERVAL, POLL_INTERVAL);
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
            let mut held: Option<HeldRequest> = None;
            let mut progress = None;
            let mut is_tick = true;
            let error = loop {
                let table = tables.borrow_and_update().clone();
                let Some(target) = PullTarget::find(&table, &model, &caller) else {
                    break api.dispatcher.unknown(&model, &caller);
                };
                if let (Some(copies), true) = (&api.copies, is_tick) {
                    let (namespace, model) = target.model.name();
                    progress = copies.progress(namespace, model).await;
                }
                match target.step(progress) {
                    PullStep::Done => {
                        recorder.finished(None, Usage::default());
                        return;
                    }
                    PullStep::Fail(error) => break error,
                    PullStep::Wait(progress) => yield Ok(progress),
                }
                if let Some(deployment) = target.waits_for()
                    && held.as_ref().is_none_or(|held| !held.is_for(deployment))
                {
                    match api.dispatcher.hold(deployment) {
                        Ok(request) => held = Some(request),
                        Err(error) => break error,
                    }
                }
                is_tick = tokio::select! {
                    _ = ticks.tick() => true,
                    Ok(()) = tables.changed() => false,
                    error = api.dispatcher.closed() => break error,
                };
            };
            recorder.failed(&error);
            yield Err(error);
        }
    }
}

/// What to do about a name that nothing has.
fn not_served(name: &str) -> String {
    format!(
        "model `{name}` is not served here, and this API cannot fetch it: deploy it with `russet run {name}`, if it is a \
         name of `russet catalog`, or apply a Model and a ModelDeployment with kubectl"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::routes::fixtures;

    fn progress(wanted: usize, complete: usize, bytes_done: u64, bytes_total: u64) -> Option<CopyProgress> {
        Some(CopyProgress { wanted, complete, bytes_done, bytes_total })
    }

    fn deployment() -> Deployment {
        let state = DeploymentState::Working("copying".into());
        Deployment { state, ..fixtures::deployment("default", "m") }
    }

    #[test]
    fn a_pull_of_a_deployment_ends_with_its_files() {
        let mut deployment = deployment();
        let waits = |message: &str| PullStep::Wait(PullProgress::Waiting(message.into()));
        let loads = |completed, total| PullStep::Wait(PullProgress::Downloading { completed, total });
        let step = |deployment: &Deployment, progress| {
            let model = PulledModel::Deployed { deployments: vec![deployment], adapter: "" };
            PullTarget { model, details: None }.step(progress)
        };
        for (progress, expected) in [
            (None, waits("copying")),
            (progress(0, 0, 0, 0), waits("copying")),
            (progress(1, 0, 0, 0), waits("copying")),
            (progress(2, 1, 130, 200), loads(130, 200)),
            (progress(1, 0, 300, 200), loads(200, 200)),
            (progress(1, 1, 200, 200), PullStep::Done),
        ] {
            assert_eq!(step(&deployment, progress), expected, "{progress:?}");
        }
        deployment.state = DeploymentState::Halted("needs 9 GiB".into());
        let PullStep::Fail(error) = step(&deployment, None) else { panic!("it waits") };
        assert!(error.message.contains("needs 9 GiB"), "{error}");
        assert_eq!(step(&deployment, progress(1, 1, 200, 200)), PullStep::Done);
    }

    #[test]
    fn a_model_that_nothing_serves_is_pulled_where_it_is_preloaded() {
        let target =
            |details| PullTarget { model: PulledModel::Undeployed { namespace: "lab", model: "m" }, details };
        let step = |progress| target(None).step(progress);
        let PullStep::Fail(error) = step(progress(0, 0, 0, 0)) else { panic!("it waits") };
        assert!(error.message.contains("lab/m") && error.message.contains("spec.preload"), "{error}");
        assert!(matches!(step(None), PullStep::Wait(PullProgress::Waiting(_))));
        assert!(matches!(step(progress(1, 0, 0, 0)), PullStep::Wait(PullProgress::Waiting(_))));
        assert_eq!(
            step(progress(1, 0, 5, 9)),
            PullStep::Wait(PullProgress::Downloading { completed: 5, total: 9 })
        );
        assert_eq!(step(progress(1, 1, 9, 9)), PullStep::Done);
        // While its headers are read no node has to hold its files yet.
        let of = |fetch| ModelDetails { fetch: Some(fetch), ..ModelDetails::default() };
        let waiting = of(FetchState::Waiting("node a reads".into()));
        let expected = PullStep::Wait(PullProgress::Waiting("node a reads".into()));
        assert_eq!(target(Some(&waiting)).step(progress(0, 0, 0, 0)), expected);
        assert_eq!(target(Some(&waiting)).step(progress(1, 1, 9, 9)), PullStep::Done);
        let stalled = of(FetchState::Stalled("no such repository".into()));
        let PullStep::Fail(error) = target(Some(&stalled)).step(None) else { panic!("it waits") };
        assert_eq!(error.message, "model m: no such repository");
    }

    #[test]
    fn files_that_come_without_a_replica_wake_no_model() {
        let deployment = deployment();
        let details = |fetch| ModelDetails { fetch, ..ModelDetails::default() };
        let model = || PulledModel::Deployed { deployments: vec![&deployment], adapter: "" };
        let of = |details| PullTarget { model: model(), details: Some(details) };
        let preloaded = details(Some(FetchState::Waiting("0 of 1 node".into())));
        assert!(of(&preloaded).waits_for().is_none());
        assert!(of(&details(None)).waits_for().is_some());
    }
}
