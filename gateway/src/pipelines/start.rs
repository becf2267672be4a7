//! Starts a run, or goes on with one that the store has: the Pipeline as it is now, the key whose holder the run is, and what it
//! was given.

use std::collections::BTreeMap;

use jiff::Timestamp;
use kube::ResourceExt as _;
use russet_crds::conditions::Reason;
use russet_crds::{ParameterType, ParameterValue, PipelineParameter, PipelineRun};
use sha2::Digest as _;

use super::check::check;
use super::record::{ArtifactRef, MAX_RUN_BYTES, RunRecord, StepRecord};
use super::references::MAX_TEXT_BYTES;
use super::{PipelineContext, PipelineObjects};
use crate::response_store::{Artifact, ResponseStoreError};
use crate::serving::unix_seconds;

/// Why a run does not start.
pub(super) enum StartError {
    /// Something is not there yet.
    NotYet(Reason, String),
    /// It can never run as it is written; a higher attempt looks again.
    Never(String),
    /// The store does not answer.
    Store(ResponseStoreError),
}

impl From<ResponseStoreError> for StartError {
    fn from(error: ResponseStoreError) -> Self {
        Self::Store(error)
    }
}

/// A run that begins, goes on, or has nothing left to do.
pub(super) struct StartedRun {
    pub(super) record: RunRecord,
    /// What it was given, where it begins.
    pub(super) artifacts: Vec<Artifact>,
    pub(super) is_new: bool,
}

/// The record of a run: the store's, or a new one with what it was given.
pub(super) async fn record(
    context: &PipelineContext,
    objects: &PipelineObjects,
    (run, runner): (&PipelineRun, &str),
    now: Timestamp,
) -> Result<StartedRun, StartError> {
    let uid = run.uid().unwrap_or_default();
    let kept = {
        let uid = uid.clone();
        context.store.read(move |store| store.run_record(&uid)).await?
    };
    if let Some(kept) = kept {
        let mut record: RunRecord = serde_json::from_slice(&kept)
            .map_err(|error| StartError::Never(format!("what is kept of the run cannot be read: {error}")))?;
        // One that still undoes what it did ends first.
        if record.finished.is_some() && record.attempt < run.spec.attempt {
            match record.failure {
                Some(_) => record = record.resumed(run.spec.attempt, now),
                // There is nothing to resume.
                None => record.attempt = run.spec.attempt,
            }
        }
        return Ok(StartedRun { record, artifacts: Vec::new(), is_new: false });
    }
    if let Some(status) = &run.status
        && !status.steps.is_empty()
        && (status.finished_at.is_some() || status.runner.as_deref() == Some(runner))
    {
        // To begin anew would do again what was done.
        let message = "what its steps made is kept no longer; create another run";
        return Err(StartError::Never(message.to_owned()));
    }
    let namespace = run.namespace().unwrap_or_default();
    let pipeline_name = run.spec.pipeline_ref.name.clone();
    let Some(pipeline) = objects.pipelines.get(&(namespace.clone(), pipeline_name.clone())) else {
        let message = format!("Pipeline {pipeline_name} does not exist in this namespace");
        return Err(StartError::NotYet(Reason::TargetNotFound, message));
    };
    let mut pipeline = pipeline.spec.clone();
    pipeline.zone = run.spec.zone.map_or(pipeline.zone, |zone| zone.as_limit().min(pipeline.zone.as_limit()));
    check(&pipeline).map_err(|error| StartError::Never(format!("Pipeline {pipeline_name}: {error}")))?;
    let owner = owner(context, run, &namespace)?;
    let (parameters, artifacts) = parameters(context, run, &owner, &pipeline.parameters).await?;
    let steps = pipeline.steps.iter().map(|_| StepRecord::default()).collect();
    let record = RunRecord {
        namespace,
        name: run.name_any(),
        uid,
        owner,
        pipeline_name,
        pipeline,
        parameters,
        attempt: run.spec.attempt,
        started: now,
        finished: None,
        failure: None,
        steps,
        bytes: artifacts.iter().map(|artifact| artifact.bytes.len() as u64).sum(),
    };
    Ok(StartedRun { record, artifacts, is_new: true })
}

/// Keeps a run that is about to begin or to go on.
pub(super) async fn save(context: &PipelineContext, started: StartedRun) -> Result<(), ResponseStoreError> {
    let StartedRun { record, artifacts, is_new } = started;
    match is_new {
        true => context.store.insert_run(record.to_row(), artifacts).await,
        false => context.store.save_run(record.to_row(), artifacts).await,
    }
}

/// As whom the run asks models.
fn owner(context: &PipelineContext, run: &PipelineRun, namespace: &str) -> Result<String, StartError> {
    let keyring = context.offline.keyring.borrow();
    let Some(key) = &run.spec.key_ref else {
        if keyring.object_count == 0 {
            return Ok(crate::keys::LOOPBACK.to_owned());
        }
        let message =
            "there are AccessKeys, so a run names the one as whose holder it asks models: set spec.keyRef";
        return Err(StartError::Never(message.to_owned()));
    };
    let owner = format!("{namespace}/{}", key.name);
    if keyring.caller_of(&owner, Timestamp::now()).is_none() {
        let message =
            format!("AccessKey {} does not exist in this namespace, or is disabled or expired", key.name);
        return Err(StartError::NotYet(Reason::TargetNotFound, message));
    }
    Ok(owner)
}

/// What the run was given, as texts.
async fn parameters(
    context: &PipelineContext,
    run: &PipelineRun,
    owner: &str,
    wanted: &[PipelineParameter],
) -> Result<(BTreeMap<String, ArtifactRef>, Vec<Artifact>), StartError> {
    let never = |message: String| StartError::Never(message);
    let (mut parameters, mut artifacts) = (BTreeMap::new(), Vec::new());
    if let Some(unknown) =
        run.spec.parameters.iter().find(|given| wanted.iter().all(|one| one.name != given.name))
    {
        return Err(never(format!("the Pipeline has no parameter {}", unknown.name)));
    }
    for parameter in wanted {
        let PipelineParameter { name, kind, default } = parameter;
        let given = run.spec.parameters.iter().find(|given| given.name == *name);
        let value = given.map(|given| &given.value).or(default.as_ref());
        let value = value.ok_or_else(|| never(format!("the parameter {name} is not given")))?;
        let text = match kind {
            ParameterType::File => {
                let bytes = file(context, owner, value).await?;
                let bytes = bytes.map_err(|error| never(format!("parameter {name}: {error}")))?;
                let bytes = bytes.ok_or_else(|| {
                    // Another gateway may have it.
                    let message =
                        format!("parameter {name}: there is no file {}", crate::error::shown(value));
                    StartError::NotYet(Reason::TargetNotFound, message)
                })?;
                check_digest(given, &bytes).map_err(|error| never(format!("parameter {name}: {error}")))?;
                String::from_utf8(bytes)
                    .map_err(|_| never(format!("parameter {name}: file {value} is no text in UTF-8")))?
            }
            _ => match given.and_then(|given| given.sha256.as_ref()).filter(|_| value.is_empty()) {
                // Of a request, whose text only its gateway has.
                Some(sha256) => context.requested.text(run, sha256).ok_or_else(|| {
                    never(format!("the parameter {name} is of a request that nobody waits for any more"))
                })?,
                None => value.clone(),
            },
        };
        let (made, artifact) = ArtifactRef::of(text.into_bytes(), false);
        parameters.insert(name.clone(), made);
        artifacts.push(artifact);
    }
    let bytes: u64 = artifacts.iter().map(|artifact: &Artifact| artifact.bytes.len() as u64).sum();
    if bytes > MAX_RUN_BYTES {
        return Err(never(format!("its parameters have more than {} MiB together", MAX_RUN_BYTES >> 20)));
    }
    Ok((parameters, artifacts))
}

fn check_digest(given: Option<&ParameterValue>, bytes: &[u8]) -> Result<(), String> {
    let found = hex::encode(sha2::Sha256::digest(bytes));
    match given.and_then(|given| given.sha256.as_ref()) {
        Some(wanted) if *wanted != found => {
            Err(format!("the file has SHA-256 {found}, and the run names {wanted}"))
        }
        _ => Ok(()),
    }
}

/// The bytes of a file of this owner.
async fn file(
    context: &PipelineContext,
    owner: &str,
    id: &str,
) -> Result<Result<Option<Vec<u8>>, String>, ResponseStoreError> {
    let (owner, id) = (owner.to_owned(), id.to_owned());
    let read = context.store.read(move |store| {
        let Some(head) = store.file(&owner, &id, unix_seconds())? else {
            return Ok(Ok(None));
        };
        if head.bytes > MAX_TEXT_BYTES as u64 {
            return Ok(Err(format!("file {id} has more than {} MiB", MAX_TEXT_BYTES >> 20)));
        }
        let (mut bytes, mut from) = (Vec::new(), 0);
        while let Some(part) = store.part(&owner, &id, from)? {
            bytes.extend_from_slice(&part.text);
            from = part.first + 1;
        }
        Ok(Ok(Some(bytes)))
    });
    read.await
}
