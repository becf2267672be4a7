//! Runs a Pipeline from where its record is to its end. Everything is in the store before it has an effect and before it counts:
//! what a step does, what it made, and how the run ended. A gateway that starts again goes on from there.
//!
//! ```text
//! step: when ─▶ for each value, what it does ─▶ save ─▶ approval ─▶ do it ─▶ save its output ─▶ … ─▶ next step
//!                                                          │          │
//!                                      denied or expired ──┴──────────┴── failed ─▶ compensate, last step first ─▶ failed
//! ```

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures::StreamExt as _;
use jiff::Timestamp;
use russet_crds::{ConditionOperator, MAX_STEP_ITEMS, PipelineStep, StepCondition, StepState};
use serde_json::{Map, Value, json};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::sleep;

use super::action::{Action, HttpAction};
use super::approval::{self, ApprovalState};
use super::calls::Call;
use super::record::{
    ApprovalRecord, ArtifactRef, ItemRecord, MAX_RUN_BYTES, RunRecord, StepRecord, UsageRecord,
};
use super::references::{fill, value_of};
use super::schema::OutputSchema;
use super::step::{RetryPolicy, StepError, perform};
use super::{PipelineContext, RunnerLease};
use crate::offline::Interruption;
use crate::response_store::{Artifact, ResponseStoreError};

/// Longest time between two looks whether an approval has expired.
const EXPIRY_POLL: Duration = Duration::from_secs(60);

/// A run that this gateway runs.
pub(super) struct PipelineRunner {
    context: PipelineContext,
    record: RunRecord,
    /// What references stand for.
    values: Value,
    progress: watch::Sender<Arc<RunRecord>>,
    lease: RunnerLease,
    /// Where runs wait for others: of their namespace, and of all.
    places: [Arc<Semaphore>; 2],
    /// What it has of them; nothing while it waits for a person.
    place: Vec<OwnedSemaphorePermit>,
}

impl PipelineRunner {
    pub(super) fn new(
        context: PipelineContext,
        record: RunRecord,
        progress: watch::Sender<Arc<RunRecord>>,
        lease: RunnerLease,
        places: [Arc<Semaphore>; 2],
    ) -> Self {
        Self { context, record, values: Value::Null, progress, lease, places, place: Vec::new() }
    }

    /// Waits for its place, and has what is there already.
    async fn resume(&mut self) -> Result<(), Interruption> {
        for places in &self.places {
            tokio::select! {
                // They are never closed.
                place = places.clone().acquire_owned() => self.place.extend(place),
                () = self.context.offline.stopping.cancelled() => return Err(Interruption::Stopping),
            }
        }
        self.values = self.load().await?;
        Ok(())
    }

    /// Gives its place to others, and its memory.
    fn rest(&mut self) {
        self.place.clear();
        self.values = Value::Null;
    }

    /// Runs it to its end; an error where the gateway ends first.
    pub(super) async fn run(mut self) -> Result<(), Interruption> {
        self.resume().await?;
        if self.record.failure.is_some() {
            // The gateway ended while it undid what was done.
            return self.end_failed().await;
        }
        while let Some(index) = self.record.next_step() {
            if self.context.offline.stopping.is_cancelled() {
                return Err(Interruption::Stopping);
            }
            match self.step(index).await {
                Ok(()) => {}
                Err(StepError::Interrupted(interruption)) => return Err(interruption),
                Err(StepError::Failed(message) | StepError::Unkept(message)) => {
                    return self.fail(index, message).await;
                }
            }
        }
        self.record.finished = Some(Timestamp::now());
        self.save().await
    }

    /// What is there already.
    async fn load(&self) -> Result<Value, Interruption> {
        let (mut parameters, mut steps) = (Map::new(), Map::new());
        for (name, made) in &self.record.parameters {
            parameters.insert(name.clone(), self.read(made).await?);
        }
        for (record, step) in self.record.steps.iter().zip(&self.record.pipeline.steps) {
            let output = match (&record.output, record.is_over()) {
                (Some(made), _) => self.read(made).await?,
                (None, true) => Value::Null,
                (None, false) => continue,
            };
            steps.insert(step.name.clone(), json!({"output": output}));
        }
        Ok(json!({"parameters": parameters, "steps": steps, "run": {"name": self.record.name}}))
    }

    async fn read(&self, made: &ArtifactRef) -> Result<Value, Interruption> {
        let bytes = self.bytes(made).await?;
        Ok(made.read(bytes))
    }

    async fn bytes(&self, made: &ArtifactRef) -> Result<Vec<u8>, Interruption> {
        let (uid, store) = (&self.record.uid, &self.context.store);
        let read = || {
            let (uid, digest) = (uid.clone(), made.digest.clone());
            store.read(move |store| store.run_artifact(&uid, &digest))
        };
        let bytes = self.context.offline.persist(uid, read).await?;
        bytes.ok_or(Interruption::Lost(ResponseStoreError::Deleted))
    }

    /// Keeps how far it is, and says so.
    async fn save(&mut self) -> Result<(), Interruption> {
        match self.save_with(Vec::new()).await {
            // Nothing is added that could be too much.
            Ok(()) | Err(StepError::Failed(_) | StepError::Unkept(_)) => Ok(()),
            Err(StepError::Interrupted(interruption)) => Err(interruption),
        }
    }

    /// The same with what is new, where there is room for it.
    async fn save_with(&mut self, artifacts: Vec<Artifact>) -> Result<(), StepError> {
        let record = &mut self.record;
        record.bytes += artifacts.iter().map(|artifact| artifact.bytes.len() as u64).sum::<u64>();
        let (row, store) = (record.to_row(), &self.context.store);
        let save = || {
            let saved = store.save_run(row.clone(), artifacts.clone());
            async {
                match saved.await {
                    Err(
                        error @ (ResponseStoreError::RunsFull { .. } | ResponseStoreError::TooLarge { .. }),
                    ) => Ok(Err(error.to_string())),
                    saved => saved.map(Ok),
                }
            }
        };
        let saved = self.context.offline.persist(&record.uid, save).await?;
        if let Err(message) = saved {
            // It names what the store has not.
            *record = RunRecord::clone(&self.progress.borrow());
            return Err(StepError::Failed(message));
        }
        self.progress.send_replace(Arc::new(record.clone()));
        Ok(())
    }

    /// Fails where the run would make more than it may.
    fn check_room(&self, artifacts: &[Artifact]) -> Result<(), StepError> {
        let more: u64 = artifacts.iter().map(|artifact| artifact.bytes.len() as u64).sum();
        if self.record.bytes + more > MAX_RUN_BYTES {
            let message = format!("its steps make more than {} MiB together", MAX_RUN_BYTES >> 20);
            return Err(StepError::Failed(message));
        }
        Ok(())
    }

    fn spec(&self, index: usize) -> PipelineStep {
        self.record.spec(index).cloned().unwrap_or_default()
    }

    fn state(&mut self, index: usize) -> &mut StepRecord {
        &mut self.record.steps[index]
    }

    async fn step(&mut self, index: usize) -> Result<(), StepError> {
        let spec = self.spec(index);
        if self.record.steps[index].items.is_none() && !self.begin(index, &spec).await? {
            return Ok(());
        }
        self.approve(index, &spec).await?;
        if self.record.steps[index].state != StepState::Running {
            self.state(index).state = StepState::Running;
            self.save().await?;
        }
        self.perform_all(index, &spec).await?;
        let output = self.output(index).await?;
        let single =
            self.record.steps[index].items.iter().flatten().next().and_then(|item| item.output.clone());
        let (made, artifacts) = match single.filter(|_| spec.for_each.is_none()) {
            Some(made) => (made, Vec::new()),
            None => {
                let (made, artifact) = ArtifactRef::of_value(&output);
                self.check_room(std::slice::from_ref(&artifact))?;
                (made, vec![artifact])
            }
        };
        let step = self.state(index);
        (step.state, step.finished, step.output) = (StepState::Done, Some(Timestamp::now()), Some(made));
        self.save_with(artifacts).await?;
        self.values["steps"][&spec.name] = json!({"output": output});
        self.context.metrics.pipeline_step("done");
        Ok(())
    }

    /// Decides what the step does, and for what; false where it is skipped.
    async fn begin(&mut self, index: usize, spec: &PipelineStep) -> Result<bool, StepError> {
        let failed = |error: String| StepError::Failed(error);
        self.state(index).started = Some(Timestamp::now());
        for condition in &spec.when {
            if let Some(why) = unmet(condition, &self.values).map_err(failed)? {
                let step = self.state(index);
                (step.state, step.message) = (StepState::Skipped, Some(why));
                step.finished = Some(Timestamp::now());
                self.save().await?;
                self.values["steps"][&spec.name] = json!({"output": null});
                self.context.metrics.pipeline_step("skipped");
                return Ok(false);
            }
        }
        let list = match &spec.for_each {
            Some(list) => {
                Some(list_of(value_of(list, &self.values).map_err(|error| failed(error.to_string()))?)?)
            }
            None => None,
        };
        let (mut artifacts, mut items) = (Vec::new(), Vec::new());
        let cycle = self.record.steps[index].cycle;
        for (at, value) in list.as_deref().unwrap_or(&[Value::Null]).iter().enumerate() {
            self.set_item(list.is_some().then_some((at, value)));
            let action =
                Action::of(spec, &self.values, |name| self.context.endpoint(&self.record.namespace, name));
            let action = action.map_err(|error| failed(error.to_string()))?;
            let (action, artifact) = ArtifactRef::of(action.to_bytes(), true);
            artifacts.push(artifact);
            self.check_room(&artifacts)?;
            items.push(ItemRecord { action, cycle, ..ItemRecord::default() });
        }
        let list = list.map(|list| {
            let (made, artifact) = ArtifactRef::of_value(&Value::Array(list));
            artifacts.push(artifact);
            made
        });
        let step = self.state(index);
        (step.state, step.list, step.items) = (StepState::Running, list, Some(items));
        self.save_with(artifacts).await?;
        Ok(true)
    }

    /// What `$(item)` and `$(index)` stand for.
    fn set_item(&mut self, item: Option<(usize, &Value)>) {
        let Some(values) = self.values.as_object_mut() else { return };
        for name in ["item", "index", "output"] {
            values.remove(name);
        }
        if let Some((at, value)) = item {
            values.insert("item".to_owned(), value.clone());
            values.insert("index".to_owned(), at.into());
        }
    }

    /// Waits until a person has approved what the step does, where that is wanted.
    async fn approve(&mut self, index: usize, spec: &PipelineStep) -> Result<(), StepError> {
        let Some(wanted) = &spec.approval else { return Ok(()) };
        let now = Timestamp::now();
        let has_begun = self.record.steps[index].items.iter().flatten().any(|item| item.output.is_some());
        let asked = match self.record.steps[index].approval.clone() {
            Some(approval) if approval.approved_by.is_some() && (has_begun || now < approval.expires) => {
                return Ok(());
            }
            // One that expired before anything was done is none any more.
            Some(asked) => asked,
            None => {
                let mut actions = Vec::new();
                for item in self.record.steps[index].items.clone().unwrap_or_default() {
                    actions.push(self.read(&item.action).await?);
                }
                let (actions, artifact) = ArtifactRef::of_value(&Value::Array(actions));
                self.check_room(std::slice::from_ref(&artifact))?;
                let lasts = jiff::SignedDuration::from_secs(wanted.expires_seconds.into());
                let asked = ApprovalRecord {
                    name: approval::name(&self.record, index, &actions),
                    actions,
                    expires: Timestamp::now().saturating_add(lasts).unwrap_or(Timestamp::MAX),
                    approved_by: None,
                };
                let step = self.state(index);
                (step.state, step.approval) = (StepState::AwaitingApproval, Some(asked.clone()));
                self.save_with(vec![artifact]).await?;
                asked
            }
        };
        let mut objects = self.context.objects.clone();
        self.rest();
        let by = loop {
            let seen = objects.borrow_and_update().clone();
            match approval::state_of(&seen, &self.record, &asked, Timestamp::now()) {
                ApprovalState::Approved(by) => break Ok(by),
                ApprovalState::Refused(message) => break Err(StepError::Failed(message)),
                ApprovalState::Missing => {
                    let object = approval::object(&self.record, &asked, &spec.name, &wanted.message);
                    approval::create(&self.context.client, &object).await;
                }
                ApprovalState::Undecided => {}
            }
            let left = Duration::try_from(asked.expires.duration_since(Timestamp::now())).unwrap_or_default();
            tokio::select! {
                // The sender lives as long as the gateway.
                _ = objects.changed() => {}
                () = sleep(left.min(EXPIRY_POLL)) => {}
                () = self.context.offline.stopping.cancelled() => return Err(Interruption::Stopping.into()),
            }
        };
        self.resume().await?;
        let approval = ApprovalRecord { approved_by: Some(by?), ..asked };
        let step = self.state(index);
        step.approval = Some(approval);
        step.state = StepState::Running;
        Ok(self.save().await?)
    }

    /// Does what is left of the step's items, some at once. After one has failed no other begins, and those that run end.
    async fn perform_all(&mut self, index: usize, spec: &PipelineStep) -> Result<(), StepError> {
        let schema = OutputSchema::of(spec).map_err(StepError::Failed)?;
        let policy = RetryPolicy {
            retries: spec.retries,
            timeout: Duration::from_secs(spec.timeout_seconds.into()),
            schema: &schema,
        };
        let items = self.record.steps[index].items.clone().unwrap_or_default();
        let pending: Vec<(usize, ArtifactRef)> = items
            .into_iter()
            .enumerate()
            .filter_map(|(at, item)| item.output.is_none().then_some((at, item.action)))
            .collect();
        let mut actions = Vec::new();
        for (at, action) in pending {
            let bytes = self.bytes(&action).await?;
            let action = serde_json::from_slice::<Action>(&bytes)
                .map_err(|error| StepError::Failed(format!("what it does cannot be read: {error}")))?;
            actions.push((at, action, self.record.idempotency_key(index, at, "")));
        }
        let (context, run) = (self.context.clone(), Arc::new(self.record.clone()));
        let has_failed = AtomicBool::new(false);
        let lease = self.lease.clone();
        let (context, run, lease, has_failed) = (&context, &run, &lease, &has_failed);
        let mut performed = futures::stream::iter(actions)
            .map(|(at, action, key)| async move {
                if has_failed.load(Ordering::Acquire) {
                    return (at, None);
                }
                let call = Call { context, run, step: &spec.name, key: &key, lease };
                (at, Some(perform(call, &action, policy).await))
            })
            .buffer_unordered(spec.parallel.max(1) as usize);
        let mut first_error = None;
        while let Some((at, done)) = performed.next().await {
            let kept = match done {
                None => continue,
                Some(Ok((output, usage))) => self.keep_output(index, at, &output, usage).await,
                Some(Err(error)) => Err(error),
            };
            let Err(error) = kept else { continue };
            has_failed.store(true, Ordering::Release);
            if let (StepError::Unkept(_), Some(item)) = (&error, self.item(index, at)) {
                item.unkept = spec.http.is_some();
            }
            let error = match error {
                StepError::Failed(message) | StepError::Unkept(message) if spec.for_each.is_some() => {
                    StepError::Failed(format!("value {at}: {message}"))
                }
                error => error,
            };
            first_error.get_or_insert(error);
        }
        first_error.map_or(Ok(()), Err)
    }

    fn item(&mut self, index: usize, at: usize) -> Option<&mut ItemRecord> {
        self.state(index).items.as_mut()?.get_mut(at)
    }

    /// Keeps what an item made; what has no room was done all the same.
    async fn keep_output(
        &mut self,
        index: usize,
        at: usize,
        output: &Value,
        usage: UsageRecord,
    ) -> Result<(), StepError> {
        let unkept = |error| match error {
            StepError::Failed(message) => StepError::Unkept(message),
            error => error,
        };
        let (made, artifact) = ArtifactRef::of_value(output);
        self.check_room(std::slice::from_ref(&artifact)).map_err(unkept)?;
        if let Some(item) = self.item(index, at) {
            (item.output, item.usage) = (Some(made), item.usage.plus(usage));
        }
        self.save_with(vec![artifact]).await.map_err(unkept)
    }

    /// The output of a step whose items are all done.
    async fn output(&self, index: usize) -> Result<Value, Interruption> {
        let step = &self.record.steps[index];
        let mut outputs = Vec::new();
        for made in step.items.iter().flatten().filter_map(|item| item.output.as_ref()) {
            outputs.push(self.read(made).await?);
        }
        Ok(if step.list.is_some() { Value::Array(outputs) } else { outputs.pop().unwrap_or_default() })
    }

    /// Ends the run with this error of a step, once what can be undone is undone.
    async fn fail(mut self, index: usize, message: String) -> Result<(), Interruption> {
        let name = self.spec(index).name;
        self.context.metrics.pipeline_step("failed");
        let step = self.state(index);
        (step.state, step.message) = (StepState::Failed, Some(message.clone()));
        step.finished = Some(Timestamp::now());
        self.record.failure = Some(format!("step {name}: {message}"));
        self.save().await?;
        self.end_failed().await
    }

    async fn end_failed(mut self) -> Result<(), Interruption> {
        self.compensate().await?;
        self.record.finished = Some(Timestamp::now());
        self.save().await
    }

    /// Undoes what was done and can be undone, last step first. What cannot be is said and left.
    async fn compensate(&mut self) -> Result<(), Interruption> {
        for index in (0..self.record.steps.len()).rev() {
            let spec = self.spec(index);
            let Some(undo) = &spec.compensate else { continue };
            let list = match self.record.steps[index].list.clone() {
                Some(list) => self.read(&list).await?.as_array().cloned(),
                None => None,
            };
            let items = self.record.steps[index].items.clone().unwrap_or_default();
            let mut left = None;
            if items.iter().any(|item| item.unkept && item.output.is_none()) {
                left = Some("an address did it, and its answer was not kept".to_owned());
            }
            for (at, item) in items.iter().enumerate().rev() {
                let Some(made) = item.output.as_ref().filter(|_| !item.undone) else { continue };
                let value = list.as_ref().and_then(|list| list.get(at)).cloned().unwrap_or_default();
                self.set_item(list.is_some().then_some((at, &value)));
                let output = self.read(made).await?;
                if let Some(values) = self.values.as_object_mut() {
                    values.insert("output".to_owned(), output);
                }
                let action = HttpAction::of(undo, &self.values, |name| {
                    self.context.endpoint(&self.record.namespace, name)
                });
                let done = match action {
                    Ok(action) => {
                        let schema = OutputSchema::none();
                        let timeout = Duration::from_secs(spec.timeout_seconds.into());
                        let policy = RetryPolicy { retries: spec.retries, timeout, schema: &schema };
                        let key = self.record.idempotency_key(index, at, "/undo");
                        let call = Call {
                            context: &self.context,
                            run: &self.record,
                            step: &spec.name,
                            key: &key,
                            lease: &self.lease,
                        };
                        perform(call, &Action::Http(action), policy).await.map(drop)
                    }
                    Err(error) => Err(StepError::Failed(error.to_string())),
                };
                match done {
                    // What it answers nobody needs.
                    Ok(()) | Err(StepError::Unkept(_)) => {
                        if let Some(item) = self.item(index, at) {
                            item.undone = true;
                        }
                        self.save().await?;
                    }
                    Err(StepError::Interrupted(interruption)) => return Err(interruption),
                    Err(StepError::Failed(message)) => left = Some(message),
                }
            }
            self.set_item(None);
            let step = self.state(index);
            match left {
                Some(message) => {
                    let failure =
                        step.message.take().map_or_else(String::new, |failure| format!("{failure}; "));
                    step.message = Some(format!("{failure}it could not be undone: {message}"));
                }
                None if step.state == StepState::Done => step.state = StepState::Compensated,
                None => {}
            }
            self.save().await?;
        }
        Ok(())
    }
}

/// The values of a list.
fn list_of(list: Value) -> Result<Vec<Value>, StepError> {
    match list {
        // That of a step that was skipped.
        Value::Null => Ok(Vec::new()),
        Value::Array(items) if items.len() <= MAX_STEP_ITEMS => Ok(items),
        Value::Array(items) => Err(StepError::Failed(format!(
            "forEach has {} values, and at most {MAX_STEP_ITEMS} may be",
            items.len()
        ))),
        _ => Err(StepError::Failed("forEach is no list".to_owned())),
    }
}

/// Why a condition does not hold, if it does not. What it looks at is no part of that: statuses are not for what models write.
fn unmet(condition: &StepCondition, values: &Value) -> Result<Option<String>, String> {
    let StepCondition { input, operator, values: wanted } = condition;
    let found = fill(input, values).map_err(|error| error.to_string())?;
    let number = |text: &str| {
        let number = text.trim().parse::<f64>().ok().filter(|number| number.is_finite());
        number.ok_or_else(|| format!("{input} is no number"))
    };
    let holds = match operator {
        ConditionOperator::In => wanted.contains(&found),
        ConditionOperator::NotIn => !wanted.contains(&found),
        ConditionOperator::Gt | ConditionOperator::Lt => {
            let (found, limit) = (number(&found)?, number(wanted.first().map_or("", String::as_str))?);
            if *operator == ConditionOperator::Gt { found > limit } else { found < limit }
        }
        ConditionOperator::Unknown => return Err("an operator of a newer release".to_owned()),
    };
    Ok((!holds).then(|| format!("{input} is not {operator:?} {}", wanted.join(", "))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conditions_compare_texts_and_numbers() {
        let values = json!({"steps": {"review": {"output": {"score": 7, "ok": true, "word": "ship it"}}}});
        let check = |path: &str, operator, wanted: &[&str]| {
            let input = format!("$(steps.review.output.{path})");
            let wanted = wanted.iter().map(|&word| word.to_owned()).collect();
            unmet(&StepCondition { input, operator, values: wanted }, &values)
        };
        use ConditionOperator::{Gt, In, Lt, NotIn};
        for (path, operator, wanted) in [
            ("ok", In, &["true", "yes"][..]),
            ("word", NotIn, &["no"]),
            ("score", Gt, &["6.5"]),
            ("score", Lt, &["7.5"]),
        ] {
            assert_eq!(check(path, operator, wanted), Ok(None), "{path}");
        }
        let why = "$(steps.review.output.score) is not Gt 7";
        assert_eq!(check("score", Gt, &["7"]), Ok(Some(why.to_owned())));
        let error = "$(steps.review.output.word) is no number";
        assert_eq!(check("word", Gt, &["7"]), Err(error.to_owned()));
    }
}
