//! The trace of a run, line by line: steps, placements with reasons, and messages. The golden file beside a
//! script holds it. It checks nothing.

use std::collections::{BTreeMap, BTreeSet};

use russet_crds::GroupPlan;
use russet_plan::quantity::show;
use russet_plan::shard::{backend_label, describe};

use super::world::{ShownStatus, World, answers};

/// The trace of one run.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    /// Everything so far.
    pub text: String,
    /// Deployments with groups created or deleted since [`Trace::begin`].
    pub moved: BTreeSet<String>,
    /// Messages since then, by deployment.
    pub spoken: Vec<(String, String)>,
    /// The minimum of ready replicas since then, by deployment.
    pub least: BTreeMap<String, usize>,
}

impl Trace {
    /// Starts a new section.
    pub fn begin(&mut self) {
        self.moved.clear();
        self.spoken.clear();
        self.least.clear();
    }

    /// Records the current state of the world.
    pub fn sees(&mut self, world: &World) {
        for name in world.deployments.keys() {
            let living = world.living().into_iter();
            let replicas: BTreeSet<i32> = living
                .filter(|group| group.spec.deployment_ref.name == *name && answers(group))
                .map(|group| group.spec.replica)
                .collect();
            let least = self.least.entry(name.clone()).or_insert(usize::MAX);
            *least = replicas.len().min(*least);
        }
    }

    fn line(&mut self, line: &str) {
        self.text.push_str(line);
        self.text.push('\n');
    }

    /// A step of the script.
    pub fn step(&mut self, text: &str) {
        self.line(&format!("> {text}"));
    }

    /// Records the operator's messages about a deployment, if they are new.
    pub fn says(&mut self, name: &str, before: Option<&ShownStatus>, after: &ShownStatus) {
        let ShownStatus { refused, notes, waiting, report, rests, asks: _ } = after;
        if let Some(why) = rests.as_ref().filter(|_| before.is_none_or(|before| before.rests != *rests)) {
            self.line(&format!("  {name} rests: {why}"));
        }
        for words in refused.iter().chain(rests).chain([notes]).filter(|words| !words.is_empty()) {
            self.spoken.push((name.to_owned(), words.clone()));
        }
        if let Some(why) = refused.as_ref().filter(|_| before.is_none_or(|before| before.refused != *refused))
        {
            self.line(&format!("  {name} makes no sense: {why}"));
        }
        if let Some(report) = report.as_ref().filter(|_| before.is_none_or(|before| before.report != *report))
        {
            self.line(&format!("  {name}: {}", report.decision));
            self.line(&format!("    because {}", report.reason));
            if let Some(predicted) = &report.predicted {
                self.line(&format!("    expects {} tokens/s", predicted.tokens_per_second));
            }
        }
        if before.is_some_and(|before| (&before.notes, &before.waiting) == (notes, waiting)) {
            return;
        }
        for replica in waiting {
            self.line(&format!("  {name}: replica {replica} waits"));
        }
        for note in notes.lines() {
            self.line(&format!("    {note}"));
        }
    }

    /// Records a created group.
    pub fn created(&mut self, deployment: &str, label: &str, plan: &GroupPlan) {
        self.moved.insert(deployment.to_owned());
        let members = plan.members.iter();
        let shares = members.map(|member| format!("{} {}", member.node_name, show(member.reserved_bytes())));
        self.line(&format!("  + {label}: {}", shares.collect::<Vec<_>>().join(", ")));
    }

    /// Records a deleted group.
    pub fn deleted(&mut self, deployment: &str, label: &str, why: &str) {
        self.moved.insert(deployment.to_owned());
        self.line(&format!("  - {label}: {why}"));
    }

    /// Records the settled world.
    pub fn calm(&mut self, world: &World, rounds: usize) {
        self.line(&format!("  calm after {rounds} rounds"));
        for group in world.living() {
            let plan = &group.spec.plan;
            let state = if answers(group) { "answers" } else { "does not answer" };
            let mut shown = describe(&plan.members, plan.tensor_size);
            if plan.members.len() > 1 {
                shown.push_str(&format!(", {}", backend_label(plan.backend)));
            }
            self.line(&format!("    {} {state}: {shown}", world.label(group)));
        }
    }
}
