//! Waits until the files of a model are where they are needed, and says how far they are. A model that sleeps is woken:
//! files come to a node with the replica that needs them. Nothing is created: that is the work of the cluster's owner.

use std::sync::Arc;
use std::time::Duration;

use axum::Extension;
use axum::extract::{Request, State};
use axum::response::Response;
use axum::routing::{MethodRouter, post};
use futures::Stream;
use russet_wire::event::Usage;
use tokio::time::{Instant, MissedTickBehavior, interval_at};

use super::api_state::ApiState;
use super::dialect::{Dialect, RequestContext};
use super::{ReceivedRequest, RecordedRequest, within_quota};
use crate::demand::HeldRequest;
use crate::error::{ErrorKind, GatewayError};
use crate::json_body::JsonBody;
use crate::keys::Caller;
use crate::model_copies::CopyProgress;
use crate::request_id::RequestId;
use crate::request_log::Recorder;
use crate::routes::{Deployment, DeploymentState, Resolved, RoutingTable};

/// Time between two looks at the copies: agents report them every two seconds.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

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
    post(
        move |State(api): State<Arc<ApiState>>,
              Extension(id): Extension<RequestId>,
              Extension(caller): Extension<Caller>,
              request: Request| async move {
            let work = |RecordedRequest { request, recorder }| {
                let (api, id, caller) = (api.clone(), id.clone(), caller.clone());
                async move {
                    let ReceivedRequest { unread, permit: _permit, .. } =
                        ReceivedRequest::read(&api, &id, &caller, request).await?;
                    let read = move |body: JsonBody<'_>, _: &RequestContext<'_>, _: &Caller| parse(body);
                    let ParsedPull { model, streamed } = unread.read(read).await?;
                    recorder.parsed(&model, 1, streamed);
                    let pull = ModelPull::new(api.clone(), model, caller, recorder)?;
                    respond(api, pull, streamed).await
                }
            };
            within_quota(&api, dialect, &id, &caller, request, work).await
        },
    )
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
enum PullTarget<'a> {
    /// It is served, by the first of these that is ready.
    Deployed { deployments: Vec<&'a Deployment>, adapter: &'a str },
    /// A Model of this namespace and name that no deployment serves under the name.
    Undeployed { namespace: &'a str, model: &'a str },
}

impl<'a> PullTarget<'a> {
    fn find(table: &'a RoutingTable, name: &str, caller: &Caller) -> Option<Self> {
        if let (Resolved::Deployments(deployments), adapter) = table.resolve_adapter(name, caller.scope()) {
            return Some(Self::Deployed { deployments, adapter });
        }
        let (namespace, model) = table.undeployed_model(name, caller.scope())?;
        Some(Self::Undeployed { namespace, model })
    }

    /// Namespace and name of the Model whose files are pulled.
    fn model(&self) -> (&'a str, &'a str) {
        match self {
            Self::Deployed { deployments, .. } => {
                deployments.first().map_or(("", ""), |first| (&first.namespace, &first.model))
            }
            Self::Undeployed { namespace, model } => (namespace, model),
        }
    }

    /// The deployment that has to become ready.
    fn waits_for(&self) -> Option<&'a Deployment> {
        match self {
            Self::Deployed { deployments, .. } => deployments.first().copied(),
            Self::Undeployed { .. } => None,
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
        match self {
            Self::Deployed { deployments, adapter } => {
                if deployments.iter().any(|one| one.endpoints_with(adapter).next().is_some()) {
                    return PullStep::Done;
                }
                match deployments.first().map(|first| &first.state) {
                    Some(DeploymentState::Halted(message)) => {
                        let message = format!("model {}: {message}", self.model().1);
                        PullStep::Fail(GatewayError::new(ErrorKind::ModelNotReady, message))
                    }
                    Some(DeploymentState::Working(message)) => {
                        let waiting = || PullProgress::Waiting(message.clone());
                        PullStep::Wait(downloading.unwrap_or_else(waiting))
                    }
                    _ => PullStep::Wait(downloading.unwrap_or_else(|| {
                        PullProgress::Waiting("its replicas are not known yet".to_owned())
                    })),
                }
            }
            Self::Undeployed { namespace, model } => match (progress, downloading) {
                (_, Some(downloading)) => PullStep::Wait(downloading),
                (Some(CopyProgress { wanted: 0, .. }), None) => {
                    let message = format!(
                        "no deployment serves Model {namespace}/{model}, and no node has to hold its files: apply a \
                         ModelDeployment, or set spec.preload of the Model, with kubectl"
                    );
                    PullStep::Fail(GatewayError::field("model", message))
                }
                _ => PullStep::Wait(PullProgress::Waiting("its files are asked for".to_owned())),
            },
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
            Some(PullTarget::Deployed { .. }) => api.model(&model, &caller)?.files.digest,
            Some(PullTarget::Undeployed { namespace, model }) => {
                let key = (namespace.to_owned(), model.to_owned());
                table.models.get(&key).map(|details| details.digest.clone()).unwrap_or_default()
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
                    let (namespace, model) = target.model();
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
    use std::collections::BTreeMap;

    use super::*;
    use crate::request_defaults::RequestDefaults;

    fn progress(wanted: usize, complete: usize, bytes_done: u64, bytes_total: u64) -> Option<CopyProgress> {
        Some(CopyProgress { wanted, complete, bytes_done, bytes_total })
    }

    #[test]
    fn a_pull_of_a_deployment_ends_with_its_files() {
        let mut deployment = Deployment {
            namespace: "default".into(),
            name: "m".into(),
            created: 0,
            context_tokens: 1,
            model: "small".into(),
            adapters: BTreeMap::new(),
            defaults: RequestDefaults::default(),
            load_quantization: "",
            memory_bytes: 0,
            idle_limits: None,
            state: DeploymentState::Working("copying".into()),
            endpoints: vec![],
        };
        let waits = |message: &str| PullStep::Wait(PullProgress::Waiting(message.into()));
        let loads = |completed, total| PullStep::Wait(PullProgress::Downloading { completed, total });
        let step = |deployment: &Deployment, progress| {
            PullTarget::Deployed { deployments: vec![deployment], adapter: "" }.step(progress)
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
        let step = |progress| PullTarget::Undeployed { namespace: "lab", model: "m" }.step(progress);
        let PullStep::Fail(error) = step(progress(0, 0, 0, 0)) else { panic!("it waits") };
        assert!(error.message.contains("lab/m") && error.message.contains("spec.preload"), "{error}");
        assert!(matches!(step(None), PullStep::Wait(PullProgress::Waiting(_))));
        assert!(matches!(step(progress(1, 0, 0, 0)), PullStep::Wait(PullProgress::Waiting(_))));
        assert_eq!(
            step(progress(1, 0, 5, 9)),
            PullStep::Wait(PullProgress::Downloading { completed: 5, total: 9 })
        );
        assert_eq!(step(progress(1, 1, 9, 9)), PullStep::Done);
    }
}
