//! How far a run is: what is kept of it in the store, written before and after each thing that it does. Pure.

use std::collections::BTreeMap;

use jiff::Timestamp;
use russet_crds::{Money, PipelineSpec, PipelineStep, StepState};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::Digest as _;

use crate::audit::AuditUsage;
use crate::response_store::{Artifact, RunRow};
use crate::serving::unix_seconds;

/// Bytes that all steps of a run may make together.
pub(super) const MAX_RUN_BYTES: u64 = 16 << 20;

/// A run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct RunRecord {
    pub(super) namespace: String,
    pub(super) name: String,
    pub(super) uid: String,
    /// As whom it asks models, and who finds what it made.
    pub(super) owner: String,
    /// The name of the Pipeline.
    pub(super) pipeline_name: String,
    /// The Pipeline as it was when the run began.
    pub(super) pipeline: PipelineSpec,
    /// What it was given: texts, by their artifacts.
    pub(super) parameters: BTreeMap<String, ArtifactRef>,
    pub(super) attempt: u32,
    pub(super) started: Timestamp,
    pub(super) finished: Option<Timestamp>,
    /// Why it failed.
    pub(super) failure: Option<String>,
    /// In the order of the Pipeline's.
    pub(super) steps: Vec<StepRecord>,
    /// What all that it made takes.
    pub(super) bytes: u64,
}

/// A step.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct StepRecord {
    pub(super) state: StepState,
    /// The values that it is done for, in JSON; none without `forEach`.
    pub(super) list: Option<ArtifactRef>,
    /// What it does for each of them, or once; none before it began.
    pub(super) items: Option<Vec<ItemRecord>>,
    pub(super) started: Option<Timestamp>,
    pub(super) finished: Option<Timestamp>,
    pub(super) approval: Option<ApprovalRecord>,
    pub(super) output: Option<ArtifactRef>,
    pub(super) message: Option<String>,
    /// The cycle of its next items.
    pub(super) cycle: u32,
}

/// A step for one value.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct ItemRecord {
    /// What it does.
    pub(super) action: ArtifactRef,
    pub(super) output: Option<ArtifactRef>,
    pub(super) usage: UsageRecord,
    /// Whether an address did it, and its answer could not be kept.
    #[serde(default)]
    pub(super) unkept: bool,
    /// Whether its effect was undone.
    pub(super) undone: bool,
    /// How often it was: what it sends after that has another key.
    pub(super) cycle: u32,
}

/// What a person decides on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct ApprovalRecord {
    /// The name of the Approval.
    pub(super) name: String,
    /// All that the step does.
    pub(super) actions: ArtifactRef,
    pub(super) expires: Timestamp,
    /// Who approved it.
    pub(super) approved_by: Option<String>,
}

/// Bytes that the store has.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ArtifactRef {
    /// SHA-256 in hexadecimal.
    pub(super) digest: String,
    pub(super) bytes: u64,
    /// Whether they are JSON, and a text otherwise.
    pub(super) is_json: bool,
}

/// What an item used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct UsageRecord {
    pub(super) prompt_tokens: u64,
    pub(super) completion_tokens: u64,
    pub(super) cost: Option<Money>,
    /// Thousandths of a joule of machines of this cluster.
    #[serde(default)]
    pub(super) millijoules: Option<u64>,
    /// What that electricity cost.
    #[serde(default)]
    pub(super) electricity: Option<Money>,
}

/// What is known of two, where one may not be known.
fn known<T>(one: Option<T>, other: Option<T>, plus: impl FnOnce(T, T) -> T) -> Option<T> {
    match (one, other) {
        (Some(one), Some(other)) => Some(plus(one, other)),
        (one, other) => one.or(other),
    }
}

impl UsageRecord {
    pub(super) fn plus(self, other: Self) -> Self {
        Self {
            prompt_tokens: self.prompt_tokens + other.prompt_tokens,
            completion_tokens: self.completion_tokens + other.completion_tokens,
            cost: known(self.cost, other.cost, Money::plus),
            millijoules: known(self.millijoules, other.millijoules, u64::saturating_add),
            electricity: known(self.electricity, other.electricity, Money::plus),
        }
    }
}

impl From<AuditUsage> for UsageRecord {
    fn from(usage: AuditUsage) -> Self {
        let AuditUsage { prompt_tokens, completion_tokens, cost, millijoules, electricity, .. } = usage;
        Self { prompt_tokens, completion_tokens, cost, millijoules, electricity }
    }
}

impl ArtifactRef {
    /// These bytes, for the record and for the store.
    pub(super) fn of(bytes: Vec<u8>, is_json: bool) -> (Self, Artifact) {
        let digest = hex::encode(sha2::Sha256::digest(&bytes));
        let made = Self { digest: digest.clone(), bytes: bytes.len() as u64, is_json };
        (made, Artifact { digest, bytes: bytes.into() })
    }

    /// This value: a text as it is, and anything else as JSON.
    pub(super) fn of_value(value: &Value) -> (Self, Artifact) {
        match value {
            Value::String(text) => Self::of(text.clone().into_bytes(), false),
            value => Self::of(value.to_string().into_bytes(), true),
        }
    }

    /// The value that these bytes are.
    pub(super) fn read(&self, bytes: Vec<u8>) -> Value {
        if self.is_json {
            return serde_json::from_slice(&bytes).unwrap_or_default();
        }
        Value::String(String::from_utf8(bytes).unwrap_or_default())
    }
}

impl StepRecord {
    /// Whether the step needs nothing more.
    pub(super) fn is_over(&self) -> bool {
        matches!(self.state, StepState::Done | StepState::Skipped)
    }

    /// What all its items used.
    pub(super) fn usage(&self) -> UsageRecord {
        self.items.iter().flatten().fold(UsageRecord::default(), |sum, item| sum.plus(item.usage))
    }
}

impl RunRecord {
    /// What all steps used.
    pub(super) fn usage(&self) -> UsageRecord {
        self.steps.iter().fold(UsageRecord::default(), |sum, step| sum.plus(step.usage()))
    }

    /// The step that is next; none where all are over.
    pub(super) fn next_step(&self) -> Option<usize> {
        self.steps.iter().position(|step| !step.is_over())
    }

    /// The step of this number, as the Pipeline has it.
    pub(super) fn spec(&self, index: usize) -> Option<&PipelineStep> {
        self.pipeline.steps.get(index)
    }

    /// The same to go on as this attempt: with the step that failed, or with the first of those whose effects were undone.
    /// What comes behind one that was undone is decided again, but for calls whose effects are still there.
    pub(super) fn resumed(mut self, attempt: u32, now: Timestamp) -> Self {
        self.attempt = attempt;
        (self.finished, self.failure) = (None, None);
        let mut is_behind_undone = false;
        for (step, spec) in self.steps.iter_mut().zip(&self.pipeline.steps) {
            let is_undone = |item: &ItemRecord| item.undone;
            // It has an effect that nothing has undone.
            let is_effect = |item: &ItemRecord| (item.output.is_some() || item.unkept) && !item.undone;
            let is_kept_call = spec.http.is_some() && step.items.iter().flatten().any(is_effect);
            if step.state == StepState::Compensated || (is_behind_undone && !is_kept_call) {
                let cycle = step.items.iter().flatten().map(|item| item.cycle + 1).max();
                *step = StepRecord { cycle: cycle.unwrap_or(step.cycle), ..StepRecord::default() };
                is_behind_undone = true;
                continue;
            }
            // Values whose effects were undone are done again, with other keys.
            let some_undone = step.items.iter().flatten().any(is_undone);
            is_behind_undone |= some_undone;
            for item in step.items.iter_mut().flatten().filter(|item| item.undone) {
                (item.undone, item.output) = (false, None);
                item.cycle += 1;
            }
            if matches!(step.state, StepState::Done | StepState::Skipped | StepState::Pending) && !some_undone
            {
                continue;
            }
            step.approval.take_if(|approval| approval.approved_by.is_none() || approval.expires <= now);
            (step.state, step.message, step.finished, step.output) = (StepState::Pending, None, None, None);
        }
        self
    }

    /// Ends it where it is.
    pub(super) fn failed(mut self, message: String, now: Timestamp) -> Self {
        (self.failure, self.finished) = (Some(message), Some(now));
        self
    }

    /// How it is kept.
    pub(super) fn to_row(&self) -> RunRow {
        RunRow {
            id: self.uid.clone(),
            owner: self.owner.clone(),
            created: unix_seconds(),
            ended: self.finished.is_some(),
            bytes: self.bytes,
            // Numbers, texts and maps of texts: serialising them into memory cannot fail.
            record: serde_json::to_vec(self).unwrap_or_default().into(),
        }
    }

    /// The key of what a step sends for one value: the same at each try, and in each gateway that runs it.
    pub(super) fn idempotency_key(&self, step: usize, item: usize, purpose: &str) -> String {
        let name = self.spec(step).map_or("", |step| &step.name);
        let items = self.steps.get(step).and_then(|step| step.items.as_ref());
        let cycle = items.and_then(|items| items.get(item)).map_or(0, |item| item.cycle);
        format!("{}/{name}/{item}/{cycle}{purpose}", self.uid)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn item(output: bool, undone: bool) -> ItemRecord {
        let output = output.then(|| ArtifactRef::of(b"x".to_vec(), false).0);
        ItemRecord { output, undone, ..ItemRecord::default() }
    }

    fn step(state: StepState, items: &[ItemRecord]) -> StepRecord {
        StepRecord { state, items: Some(items.to_vec()), ..StepRecord::default() }
    }

    fn record(steps: Vec<(&str, StepRecord)>) -> RunRecord {
        let spec = |(name, _): &(&str, StepRecord)| {
            let http = json!({"endpointRef": {"name": "e"}});
            match *name {
                "ask" => json!({"name": name, "chat": {"model": "m", "prompt": "p"}}),
                "book" => json!({"name": name, "http": http, "compensate": http}),
                _ => json!({"name": name, "http": http}),
            }
        };
        let specs: Vec<Value> = steps.iter().map(spec).collect();
        RunRecord {
            namespace: "default".into(),
            name: "r".into(),
            uid: "u".into(),
            owner: "loopback".into(),
            pipeline_name: "p".into(),
            pipeline: serde_json::from_value(json!({"steps": specs})).unwrap(),
            parameters: BTreeMap::new(),
            attempt: 1,
            started: Timestamp::UNIX_EPOCH,
            finished: Some(Timestamp::UNIX_EPOCH),
            failure: Some("it failed".into()),
            steps: steps.into_iter().map(|(_, step)| step).collect(),
            bytes: 0,
        }
    }

    fn shown(record: &RunRecord) -> Vec<String> {
        let one = |(at, step): (usize, &StepRecord)| {
            let items = step.items.iter().flatten().enumerate();
            let items = items.map(|(item, one)| {
                format!(
                    "{}{}",
                    record.idempotency_key(at, item, ""),
                    if one.output.is_some() { "+" } else { "" }
                )
            });
            format!("{:?} {}", step.state, items.collect::<Vec<_>>().join(" "))
        };
        record.steps.iter().enumerate().map(one).collect()
    }

    #[test]
    fn what_only_failed_is_the_same_again() {
        use StepState::{Done, Failed, Pending, Skipped};
        let before = record(vec![
            ("ask", step(Done, &[item(true, false)])),
            ("ask", StepRecord { state: Skipped, ..StepRecord::default() }),
            ("send", step(Failed, &[item(true, false), item(false, false)])),
            ("send", StepRecord { state: Pending, ..StepRecord::default() }),
        ]);
        let resumed = before.resumed(2, Timestamp::UNIX_EPOCH);
        assert_eq!(
            shown(&resumed),
            ["Done u/ask/0/0+", "Skipped ", "Pending u/send/0/0+ u/send/1/0", "Pending "]
        );
        assert_eq!((resumed.attempt, resumed.finished, &resumed.failure), (2, None, &None));
    }

    #[test]
    fn what_was_undone_and_what_follows_is_decided_again() {
        use StepState::{Compensated, Done, Failed, Skipped};
        let before = record(vec![
            ("ask", step(Done, &[item(true, false)])),
            ("book", step(Compensated, &[item(true, true)])),
            ("ask", step(Done, &[item(true, false)])),
            ("send", step(Done, &[item(true, false)])),
            ("ask", StepRecord { state: Skipped, ..StepRecord::default() }),
            ("book", step(Failed, &[item(false, false)])),
        ]);
        let mut resumed = before.resumed(2, Timestamp::UNIX_EPOCH);
        let expected =
            ["Done u/ask/0/0+", "Pending ", "Pending ", "Done u/send/0/0+", "Pending ", "Pending "];
        assert_eq!(shown(&resumed), expected);
        // The next time they send other keys.
        assert_eq!(resumed.steps.iter().map(|step| step.cycle).collect::<Vec<_>>(), [0, 1, 1, 0, 0, 1]);
        let items = vec![ItemRecord { cycle: 1, ..item(false, false) }];
        resumed.steps[1].items = Some(items);
        assert_eq!(resumed.idempotency_key(1, 0, ""), "u/book/0/1");
    }

    #[test]
    fn values_that_were_undone_are_done_again_and_no_others() {
        use StepState::{Done, Failed};
        let before = record(vec![
            // One could not be undone.
            ("book", step(Done, &[item(true, false), item(true, true)])),
            ("send", step(Failed, &[item(false, false)])),
        ]);
        let resumed = before.resumed(2, Timestamp::UNIX_EPOCH);
        assert_eq!(shown(&resumed), ["Pending u/book/0/0+ u/book/1/1", "Pending "]);
    }

    #[test]
    fn calls_whose_effects_are_there_are_not_made_again() {
        use StepState::{Compensated, Done, Failed};
        let before = record(vec![
            ("book", step(Compensated, &[item(true, true)])),
            // It could not be undone.
            ("book", step(Done, &[item(true, false)])),
            ("send", step(Failed, &[item(true, false), item(false, false)])),
        ]);
        let resumed = before.resumed(2, Timestamp::UNIX_EPOCH);
        assert_eq!(shown(&resumed), ["Pending ", "Done u/book/0/0+", "Pending u/send/0/0+ u/send/1/0"]);
    }

    #[test]
    fn an_approval_that_has_expired_is_asked_for_again() {
        let approval = |expires: i64| {
            let actions = ArtifactRef::default();
            let expires = Timestamp::from_second(expires).unwrap();
            Some(ApprovalRecord { name: "a".into(), actions, expires, approved_by: Some("ada".into()) })
        };
        for (expires, is_kept) in [(9, true), (5, false)] {
            let failed =
                StepRecord { approval: approval(expires), ..step(StepState::Failed, &[item(false, false)]) };
            let resumed = record(vec![("send", failed)]).resumed(2, Timestamp::from_second(5).unwrap());
            assert_eq!(resumed.steps[0].approval.is_some(), is_kept, "{expires}");
        }
    }
}
