//! Runs of Pipelines that requests ask for, by a ModelRoute that has a Pipeline as a target. Each is a PipelineRun like any
//! other, as the holder of the caller's key. It is deleted where nobody waits for it any more before its end: its client left,
//! or the gateway ended. The text of the request is in the memory and the store of the gateway alone. Not here: which requests
//! those are, see `dispatch`.
//!
//! A request of the inbox is sent again after a crash. Its run has a name that follows from the request, so the second time it
//! is found and waited for, and what it did is not done again. Until then it goes on, or, where the crash came before it began
//! and so before its text was kept, waits.

mod expected;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use kube::api::PostParams;
use kube::{Api, Client, ResourceExt as _};
use parking_lot::Mutex;
use russet_crds::{
    LocalReference, ParameterType, ParameterValue, PipelineRun, PipelineRunSpec, PipelineSpec, Zone,
    conditions, names,
};
use russet_wire::event::Usage;
use sha2::Digest as _;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::record::RunRecord;
use super::{PipelineObjects, RunName, full_name, is_over, suffixed};
use crate::api_timeout::{WriteError, delete_exactly, with_timeout};
use crate::error::{ErrorKind, GatewayError, RETRY_AFTER};
use crate::providers::Closed;
use crate::response_store::{ResponseStore, ResponseStoreError};
use crate::routes::PipelineTarget;
use expected::ExpectedRuns;

/// How long a run stays that a request asked for: somebody may want to know what it did.
const TTL_SECONDS: u32 = 600;
/// Runs of requests that a gateway has at once, those that stay for a while included.
const MAX_RUNS: usize = 1000;
/// Characters of the Pipeline's name in that of a run, which ends with hexadecimal digits.
const MAX_NAME_PREFIX: usize = 50;
/// Digits of the name of a run that follows from its request: no two of a gateway's requests have the same ones.
const REPEAT_DIGITS: usize = 12;
/// Longest text of a request.
const MAX_TEXT_CHARS: usize = 65_536;
/// Why a run that has ended well has no answer.
const NOT_KEPT: &str = "what it made is kept no longer";

/// The runs that requests of this gateway wait for.
pub(crate) struct RequestedRuns {
    pub(super) client: Client,
    pub(super) store: Arc<ResponseStore>,
    pub(super) objects: watch::Sender<Arc<PipelineObjects>>,
    /// The name of this gateway in `status.runner`, once it runs Pipelines.
    pub(super) gateway: OnceLock<String>,
    waiting: Mutex<HashMap<RunName, WaitingRequest>>,
    /// Runs of requests that exist.
    existing: Mutex<HashSet<RunName>>,
    expected: ExpectedRuns,
    is_closed: AtomicBool,
}

/// A request that waits for a run.
struct WaitingRequest {
    /// The run that it waits for. One of its name with other terms may be there, of before a crash: that is not the one, and
    /// gets nothing.
    wanted: PipelineRun,
    /// What the run is given.
    text: String,
    /// The uid of the object, once it was there.
    uid: Option<String>,
    done: oneshot::Sender<Result<RunAnswer, String>>,
}

impl WaitingRequest {
    fn is_for(&self, run: &PipelineRun) -> bool {
        is_same(run, &self.wanted)
    }
}

/// What a run made of a request.
#[derive(Debug)]
pub(crate) struct RunAnswer {
    /// The output of its last step that has one.
    pub(crate) text: String,
    /// What all steps used.
    pub(crate) usage: Usage,
}

/// A run that a request waits for. Dropped before its end, it is deleted.
pub(crate) struct RequestedRun {
    runs: Arc<RequestedRuns>,
    pub(crate) name: RunName,
    answer: oneshot::Receiver<Result<RunAnswer, String>>,
    /// The object that is being created, whether its client waits or not.
    created: Creation,
    has_ended: bool,
    /// Whether its request is sent again after a crash.
    is_repeated: bool,
}

/// Why there is no run for a request.
#[derive(Debug)]
enum CreateError {
    /// The API server does not create it now.
    Failed(String),
    /// What the request began is there, and the request means something else now.
    OtherTerms,
}

impl From<WriteError> for CreateError {
    fn from(error: WriteError) -> Self {
        Self::Failed(error.cause)
    }
}

/// How far the object of a run is.
enum Creation {
    Pending(JoinHandle<Result<PipelineRun, CreateError>>),
    Created(Box<PipelineRun>),
    /// If it is there all the same, the controller finds nobody who waits for it.
    Failed,
}

impl RequestedRuns {
    pub(crate) fn new(client: Client, store: Arc<ResponseStore>) -> Self {
        Self {
            client,
            store,
            objects: watch::Sender::default(),
            gateway: OnceLock::new(),
            waiting: Mutex::default(),
            existing: Mutex::default(),
            expected: ExpectedRuns::default(),
            is_closed: AtomicBool::new(false),
        }
    }

    /// Why nobody can say now whether a request can start a run of any Pipeline, if so.
    pub(crate) fn not_yet(&self) -> Option<&'static str> {
        if self.is_closed.load(Ordering::Acquire) {
            return Some("the gateway shuts down");
        }
        let is_listed = self.gateway.get().is_some() && self.objects.borrow().listed;
        (!is_listed).then_some("the gateway has not listed the Pipelines yet")
    }

    /// Why a request, one that is sent again with this text in `repeat`, can start no run of a Pipeline, if so.
    pub(crate) fn refusal(&self, target: PipelineTarget<'_>, repeat: Option<&str>) -> Option<Closed> {
        let not_ready = |why: &str| Some(Closed::of(why, ErrorKind::ModelNotReady));
        let waiting = self.waiting.lock().len();
        let count = self.existing.lock().len().max(waiting);
        // One that has its run already makes no more of them.
        let has_run = || {
            repeat.is_some_and(|repeat| {
                let name = (target.namespace.to_owned(), repeated_name(target.name, repeat));
                self.existing.lock().contains(&name)
            })
        };
        if count >= MAX_RUNS && !has_run() {
            return Some(Closed::busy(format!(
                "the gateway has {count} runs of requests, {MAX_RUNS} at most"
            )));
        }
        let objects = self.objects.borrow();
        let key = (target.namespace.to_owned(), target.name.to_owned());
        match objects.pipelines.get(&key) {
            Some(pipeline) => unfit(&pipeline.spec, target.parameter).and_then(|why| not_ready(&why)),
            None => not_ready("it does not exist"),
        }
    }

    /// Starts a run with this text, as the holder of a key of its namespace, no farther from home than that. One that the same
    /// request began before a crash, with the same text in `repeat`, is waited for.
    pub(crate) async fn start(
        self: &Arc<Self>,
        target: PipelineTarget<'_>,
        text: &str,
        key: Option<&str>,
        zone: Zone,
        repeat: Option<&str>,
    ) -> Result<RequestedRun, GatewayError> {
        let name = match repeat {
            Some(repeat) => repeated_name(target.name, repeat),
            None => suffixed(target.name, MAX_NAME_PREFIX, &format!("{:08x}", rand::random::<u32>())),
        };
        let spec = PipelineRunSpec {
            pipeline_ref: LocalReference::new(target.name),
            key_ref: key.map(LocalReference::new),
            parameters: vec![ParameterValue {
                name: target.parameter.to_owned(),
                value: String::new(),
                sha256: Some(digest(text)),
            }],
            zone: Some(zone),
            ttl_seconds_after_finished: Some(TTL_SECONDS),
            attempt: 1,
        };
        let mut run = PipelineRun::new(&name, spec);
        let gateway = self.gateway.get().cloned().unwrap_or_default();
        run.metadata.namespace = Some(target.namespace.to_owned());
        run.metadata.labels = Some(BTreeMap::from([
            (names::LABEL_MANAGED_BY.to_owned(), names::MANAGED_BY_GATEWAY.to_owned()),
            (names::LABEL_GATEWAY.to_owned(), gateway),
        ]));
        let name = (target.namespace.to_owned(), name);
        let (done, answer) = oneshot::channel();
        let waiting = WaitingRequest { wanted: run.clone(), text: text.to_owned(), uid: None, done };
        self.waiting.lock().insert(name.clone(), waiting);
        let api: Api<PipelineRun> = Api::namespaced(self.client.clone(), target.namespace);
        let is_repeated = repeat.is_some();
        let creating = async move {
            match with_timeout(api.create(&PostParams::default(), &run)).await {
                Err(error) if is_repeated && error.code() == Some(409) => {
                    let found = with_timeout(api.get(&run.name_any())).await?;
                    match found.metadata.deletion_timestamp {
                        Some(_) => Err(CreateError::Failed("the one before is being deleted".to_owned())),
                        None if is_same(&found, &run) => Ok(found),
                        None => Err(CreateError::OtherTerms),
                    }
                }
                created => {
                    let created = created?;
                    // A run of other terms gets no text, so its request would wait for nothing.
                    let changed = || {
                        let why = "the API server gave it another zone, key or parameter; are the CRDs of this release applied?";
                        CreateError::Failed(why.to_owned())
                    };
                    if is_same(&created, &run) { Ok(created) } else { Err(changed()) }
                }
            }
        };
        let created = Creation::Pending(tokio::spawn(creating));
        // From here on it is deleted when it is dropped.
        let mut requested =
            RequestedRun { runs: self.clone(), name, answer, created, has_ended: false, is_repeated };
        requested.created().await.map_err(|error| match error {
            CreateError::Failed(cause) => {
                let message = format!("no run of {} can be started: {cause}", target.subject());
                GatewayError::new(ErrorKind::ModelNotReady, message).retry_after(RETRY_AFTER)
            }
            CreateError::OtherTerms => {
                let (namespace, name) = &requested.name;
                let message = format!(
                    "run {namespace}/{name} of {} was begun for this request before the gateway ended, with another zone, key or parameter than its route and caller have now, so it is not begun again; send the request anew",
                    target.subject()
                );
                GatewayError::new(ErrorKind::PipelineFailed, message)
            }
        })?;
        Ok(requested)
    }

    /// The text of the request that waits for this run, if it has this digest.
    pub(super) fn text(&self, run: &PipelineRun, sha256: &str) -> Option<String> {
        let waiting = self.waiting.lock();
        let text = &waiting.get(&full_name(run)).filter(|waiting| waiting.is_for(run))?.text;
        (digest(text) == sha256).then(|| text.clone())
    }

    /// Whether this run was made for a request of this gateway that waits for it no longer, and has not ended.
    pub(super) fn is_abandoned(&self, run: &PipelineRun) -> bool {
        // Who raises the attempt wants it for itself.
        self.is_own(run) && run.spec.attempt <= 1 && !is_over(run) && !self.is_awaited(run)
    }

    /// The runs of requests of the inbox that nobody waits for now, and that these will wait for again: the gateway has ended
    /// since they began. All of those of nobody, where the store cannot say.
    pub(super) async fn expected(&self, all: &[&PipelineRun]) -> HashSet<RunName> {
        let of_nobody = all.iter().copied().filter(|run| self.is_abandoned(run));
        self.expected
            .among(Instant::now(), of_nobody, || self.store.read(|store| store.unended_requests()))
            .await
    }

    /// Whether a request waits for this run.
    pub(super) fn is_awaited(&self, run: &PipelineRun) -> bool {
        self.waiting.lock().get(&full_name(run)).is_some_and(|waiting| waiting.is_for(run))
    }

    /// A run was at its end before its request waited for it: that has the answer which is kept. Where the store does not say
    /// now, the next look at the run asks again.
    pub(super) async fn ended_before(&self, run: &PipelineRun) {
        let uid = run.uid().unwrap_or_default();
        let kept = match self.store.read(move |store| store.run_record(&uid)).await {
            Ok(kept) => kept,
            Err(error) => return self.waits_for_store(&full_name(run), &error),
        };
        match kept.map(|kept| serde_json::from_slice::<RunRecord>(&kept)) {
            Some(Ok(record)) if record.finished.is_some() => self.ended(&record).await,
            Some(Err(error)) => self.refused(run, &format!("what is kept of it cannot be read: {error}")),
            Some(Ok(_)) | None => self.refused(run, kept_status(run)),
        }
    }

    fn waits_for_store(&self, (namespace, name): &RunName, error: &ResponseStoreError) {
        tracing::warn!(namespace, run = name, %error, "the request of a run waits for the store");
    }

    fn is_own(&self, run: &PipelineRun) -> bool {
        let by = run.labels().get(names::LABEL_GATEWAY);
        names::is_managed_by_gateway(&run.metadata) && by.is_some() && by == self.gateway.get()
    }

    /// Takes over which runs exist: nobody waits for one that was deleted, or that another gateway runs.
    pub(super) fn observe<'r>(
        &self,
        all: impl Iterator<Item = &'r PipelineRun>,
        is_of_another: impl Fn(&PipelineRun) -> bool,
    ) {
        let existing: HashMap<RunName, &PipelineRun> =
            all.filter(|run| self.is_own(run)).map(|run| (full_name(run), run)).collect();
        let mut lost = Vec::new();
        for (name, waiting) in self.waiting.lock().iter_mut() {
            match existing.get(name).filter(|run| waiting.is_for(run)) {
                Some(run) if is_of_another(run) => lost.push((name.clone(), "another gateway runs it now")),
                Some(run) => waiting.uid = run.uid(),
                None if waiting.uid.is_some() => lost.push((name.clone(), "it was deleted")),
                None => {}
            }
        }
        *self.existing.lock() = existing.into_keys().collect();
        for (name, why) in lost {
            self.tell(&name, Err(why.to_owned()));
        }
    }

    /// A run is at its end: whoever waits for it has its answer. Where the store does not say it now, the next look at the run
    /// asks again.
    pub(super) async fn ended(&self, record: &RunRecord) {
        let name = (record.namespace.clone(), record.name.clone());
        let is_for = |waiting: &WaitingRequest| waiting.uid.as_ref() == Some(&record.uid);
        if !self.waiting.lock().get(&name).is_some_and(is_for) {
            return;
        }
        let answer = match &record.failure {
            Some(failure) => Err(failure.clone()),
            None => match self.answer(record).await {
                Ok(answer) => answer,
                Err(error) => return self.waits_for_store(&name, &error),
            },
        };
        self.tell(&name, answer);
    }

    /// A run cannot start: whoever waits for it is told why.
    pub(super) fn refused(&self, run: &PipelineRun, why: &str) {
        if self.is_awaited(run) {
            self.tell(&full_name(run), Err(why.to_owned()));
        }
    }

    /// No run goes on, because the gateway shuts down.
    pub(super) fn close(&self) {
        self.is_closed.store(true, Ordering::Release);
        let names: Vec<RunName> = self.waiting.lock().keys().cloned().collect();
        for name in names {
            self.tell(&name, Err("the gateway shuts down".to_owned()));
        }
    }

    fn tell(&self, name: &RunName, answer: Result<RunAnswer, String>) {
        if let Some(waiting) = self.waiting.lock().remove(name) {
            // A client that has just left needs none.
            let _ = waiting.done.send(answer);
        }
    }

    async fn answer(&self, record: &RunRecord) -> Result<Result<RunAnswer, String>, ResponseStoreError> {
        let mut made = record.steps.iter().rev().filter_map(|step| step.output.as_ref());
        let Some(output) = made.find(|output| output.bytes > 0) else {
            return Ok(Err("none of its steps made anything".to_owned()));
        };
        let (owner, digest) = (record.owner.clone(), output.digest.clone());
        let Some(bytes) = self.store.read(move |store| store.artifact(&owner, &digest)).await? else {
            return Ok(Err(NOT_KEPT.to_owned()));
        };
        let used = record.usage();
        let tokens = |count: u64| u32::try_from(count).unwrap_or(u32::MAX);
        Ok(Ok(RunAnswer {
            text: String::from_utf8_lossy(&bytes).into_owned(),
            usage: Usage {
                prompt_tokens: tokens(used.prompt_tokens),
                completion_tokens: tokens(used.completion_tokens),
                cached_tokens: 0,
            },
        }))
    }

    /// Deletes exactly this run.
    pub(super) async fn delete(client: Client, run: &PipelineRun) {
        let (namespace, name) = full_name(run);
        let api: Api<PipelineRun> = Api::namespaced(client, &namespace);
        if let Err(error) = delete_exactly(&api, &run.metadata).await {
            tracing::warn!(namespace, run = name, "a run that nobody waits for stays: {}", error.cause);
        }
    }
}

/// The name of the run of a Pipeline for a request. It tells nothing of the request: its id is a random number.
fn repeated_name(pipeline: &str, repeat: &str) -> String {
    let digits: String = digest(&format!("{pipeline}/{repeat}")).chars().take(REPEAT_DIGITS).collect();
    suffixed(pipeline, MAX_NAME_PREFIX, &digits)
}

/// Whether a run that is there is the one that would be created.
fn is_same(found: &PipelineRun, wanted: &PipelineRun) -> bool {
    let PipelineRunSpec {
        pipeline_ref,
        key_ref,
        parameters,
        zone,
        ttl_seconds_after_finished: _,
        attempt: _,
    } = &wanted.spec;
    let has_label = |(name, value): (&String, &String)| found.labels().get(name) == Some(value);
    wanted.labels().iter().all(has_label)
        && (pipeline_ref, key_ref, parameters, zone)
            == (&found.spec.pipeline_ref, &found.spec.key_ref, &found.spec.parameters, &found.spec.zone)
}

/// Why a run that is over, and of which nothing is kept, has no answer: one that could never start says it in its status.
fn kept_status(run: &PipelineRun) -> &str {
    let conditions = run.status.as_ref().map_or(&[][..], |status| &status.conditions);
    let is_finished = conditions::is_true(conditions, conditions::Type::Ready);
    let message = conditions::message(conditions, conditions::Type::Ready);
    message.filter(|message| !is_finished && !message.is_empty()).unwrap_or(NOT_KEPT)
}

fn digest(text: &str) -> String {
    hex::encode(sha2::Sha256::digest(text))
}

/// Why a Pipeline cannot run with one text in this parameter, if so.
fn unfit(pipeline: &PipelineSpec, parameter: &str) -> Option<String> {
    match pipeline.parameters.iter().find(|one| one.name == parameter) {
        None => return Some(format!("it has no parameter {parameter}; set the parameter of the target")),
        Some(found) if found.kind != ParameterType::Text => {
            return Some(format!("its parameter {parameter} is no text"));
        }
        Some(_) => {}
    }
    let other = pipeline.parameters.iter().find(|one| one.name != parameter && one.default.is_none())?;
    Some(format!("its parameter {} has no default, and a request gives it none", other.name))
}

/// Why a text cannot be that of a parameter, if so.
pub(crate) fn unfit_text(text: &str) -> Option<String> {
    let count = text.chars().count();
    let is_long = count > MAX_TEXT_CHARS;
    is_long
        .then(|| format!("the last message has {count} characters, and a parameter at most {MAX_TEXT_CHARS}"))
}

impl RequestedRun {
    /// Waits until the object is there.
    async fn created(&mut self) -> Result<(), CreateError> {
        let Creation::Pending(creating) = &mut self.created else { return Ok(()) };
        let (created, result) = match creating.await {
            Ok(Ok(run)) => (Creation::Created(Box::new(run)), Ok(())),
            Ok(Err(error)) => (Creation::Failed, Err(error)),
            Err(error) => (Creation::Failed, Err(CreateError::Failed(error.to_string()))),
        };
        self.created = created;
        result
    }

    /// The gateway shuts down: a run whose request is sent again by the next one stays.
    pub(crate) fn leave(&mut self) {
        self.has_ended |= self.is_repeated;
    }

    /// Its answer, or why there is none. Cancel-safe.
    pub(crate) async fn answer(&mut self) -> Result<RunAnswer, String> {
        let answer = (&mut self.answer).await;
        self.has_ended = true;
        answer.unwrap_or_else(|_| Err("the gateway runs no Pipelines any more".to_owned()))
    }
}

impl Drop for RequestedRun {
    fn drop(&mut self) {
        if self.has_ended {
            return;
        }
        self.runs.waiting.lock().remove(&self.name);
        // At once; the controller would find it later.
        let created = std::mem::replace(&mut self.created, Creation::Failed);
        let (client, runtime) = (self.runs.client.clone(), tokio::runtime::Handle::try_current());
        let Ok(runtime) = runtime else { return };
        runtime.spawn(async move {
            match created {
                Creation::Created(run) => RequestedRuns::delete(client, &run).await,
                Creation::Pending(creating) => {
                    if let Ok(Ok(run)) = creating.await {
                        RequestedRuns::delete(client, &run).await;
                    }
                }
                Creation::Failed => {}
            }
        });
    }
}

#[cfg(test)]
mod tests;
