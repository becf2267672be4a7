//! Expectations of a script: parsed from an `expect` line, and checked against the world and its trace.

use russet_crds::{Backend, ShardGroup};

use super::trace::Trace;
use super::words::{LineError, Words, number};
use super::world::{ShownStatus, World, answers};

/// An expectation.
#[derive(Clone, Debug)]
pub enum Expectation {
    /// A deployment's replicas are on these nodes, with this split and transport.
    On { name: String, replicas: Vec<Vec<String>>, cut: Option<SplitKind>, rdma: Option<bool> },
    /// It has no group.
    Gone(String),
    /// This many of its replicas are ready.
    Answers(String, usize),
    /// At least this many of its replicas stayed ready all through the last settle.
    StayedReady(String, usize),
    /// One group, by its short name such as `chat-0#1`, is still ready.
    Still(String),
    /// This many groups of it are not being deleted.
    Groups(String, usize),
    /// Some replica is pending, or this one, and the reason contains these words.
    Waits(String, Option<i32>, Option<String>),
    /// It is invalid, with these words.
    Refused(String, String),
    /// A message since the last settle or turn contains these words.
    Says(String, String),
    /// No such message does.
    Silent(String, String),
    /// The last decision contains these words.
    Decision(String, String),
    /// Its reason contains them.
    Reason(String, String),
    /// In the last settle, only groups of these deployments were created or deleted.
    Moved(Vec<String>),
    /// Nothing is reserved or held on a node.
    Empty(String),
}

/// The kind of split of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SplitKind {
    Single,
    Pipeline,
    Tensor,
    Hybrid,
}

/// Syntax of expectations; `docs/simulator.md` shows the same.
pub const USAGE: [&str; 14] = [
    "expect NAME on NODES [| NODES…] [as single|pipeline|tensor|hybrid] [over rdma|tcp]",
    "expect NAME gone",
    "expect NAME answers COUNT",
    "expect NAME groups COUNT",
    "expect NAME kept COUNT",
    "expect NAME-REPLICA#NUMBER still",
    "expect NAME[/REPLICA] waits [\"WORDS\"]",
    "expect NAME refused \"WORDS\"",
    "expect NAME says \"WORDS\"",
    "expect NAME silent \"WORDS\"",
    "expect decision NAME \"WORDS\"",
    "expect reason NAME \"WORDS\"",
    "expect nothing moved or expect only NAMES moved",
    "expect NODE empty",
];

impl Expectation {
    /// Parses the text after `expect`.
    pub fn read(words: &mut Words) -> Result<Self, LineError> {
        Self::read_one(words).map_err(|wrong| format!("{wrong}; expectations are: {}", USAGE.join("; ")))
    }

    fn read_one(words: &mut Words) -> Result<Self, LineError> {
        let name = words.plain("a deployment")?;
        match name.as_str() {
            "nothing" if words.take("moved") => return Ok(Self::Moved(Vec::new())),
            "only" => {
                let names = words.names("a deployment", &["moved"])?;
                return match words.take("moved") {
                    true => Ok(Self::Moved(names)),
                    false => Err("moved is expected at the end of the line".to_owned()),
                };
            }
            "decision" => return Ok(Self::Decision(words.plain("a deployment")?, words.text("the words")?)),
            "reason" => return Ok(Self::Reason(words.plain("a deployment")?, words.text("the words")?)),
            _ => {}
        }
        let verbs = [
            "on", "gone", "answers", "groups", "kept", "still", "waits", "refused", "says", "silent", "empty",
        ];
        let verb = words.one_of(&verbs.map(|verb| (verb, verb)))?;
        Ok(match verb {
            "on" => Self::on(name, words)?,
            "gone" => Self::Gone(name),
            "empty" => Self::Empty(name),
            "answers" => Self::Answers(name, number(&words.plain("a count")?, "the count")?),
            "kept" => Self::StayedReady(name, number(&words.plain("a count")?, "the count")?),
            "still" => Self::Still(name),
            "groups" => Self::Groups(name, number(&words.plain("a count")?, "the count")?),
            "waits" => {
                let (name, replica) = match name.split_once('/') {
                    Some((name, replica)) => (name.to_owned(), Some(number(replica, "the replica")?)),
                    None => (name, None),
                };
                let why = if words.is_empty() { None } else { Some(words.text("the words")?) };
                Self::Waits(name, replica, why)
            }
            "refused" => Self::Refused(name, words.text("the words")?),
            "says" => Self::Says(name, words.text("the words")?),
            _ => Self::Silent(name, words.text("the words")?),
        })
    }

    fn on(name: String, words: &mut Words) -> Result<Self, LineError> {
        let mut replicas = Vec::new();
        loop {
            replicas.push(words.names("a node", &["|", "as", "over"])?);
            if !words.take("|") {
                break;
            }
        }
        let splits = [
            ("single", SplitKind::Single),
            ("pipeline", SplitKind::Pipeline),
            ("tensor", SplitKind::Tensor),
            ("hybrid", SplitKind::Hybrid),
        ];
        let cut = if words.take("as") { Some(words.one_of(&splits)?) } else { None };
        let carriers = [("rdma", true), ("tcp", false)];
        let rdma = if words.take("over") { Some(words.one_of(&carriers)?) } else { None };
        Ok(Self::On { name, replicas, cut, rdma })
    }

    /// Checks the expectation; the error is the difference.
    pub fn judge(&self, world: &World, trace: &Trace) -> Result<(), String> {
        let said = |name: &str| world.said.get(name).cloned().unwrap_or_default();
        let spoken = |name: &str| {
            let own = trace.spoken.iter().filter(|(of, _)| of == name).map(|(_, words)| words.as_str());
            own.collect::<Vec<_>>().join("\n")
        };
        let has = |what: &str, text: &str, words: &str| match text.contains(words) {
            true => Ok(()),
            false => Err(format!("{what} is {text:?}, without {words:?}")),
        };
        let count = |what: &str, is: usize, expected: usize| match is == expected {
            true => Ok(()),
            false => Err(format!("{is} {what}, not {expected}")),
        };
        match self {
            Self::On { name, replicas, cut, rdma } => on(world, name, replicas, *cut, *rdma),
            Self::Gone(name) => {
                let all = world.cluster.groups.iter();
                count("groups are there", all.filter(|it| it.spec.deployment_ref.name == *name).count(), 0)
            }
            Self::Answers(name, expected) => {
                let answering = groups(world, name).into_iter().filter(|group| answers(group));
                count("replicas answer", answering.count(), *expected)
            }
            Self::Groups(name, expected) => count("groups are there", groups(world, name).len(), *expected),
            Self::StayedReady(name, expected) => match trace.least.get(name).copied().unwrap_or(0) {
                least if least >= *expected => Ok(()),
                least => Err(format!("at some time {least} answered, which is below {expected}")),
            },
            Self::Still(label) => {
                let mut living = world.living().into_iter();
                let found = living.find(|group| world.label(group) == *label);
                match found.is_some_and(answers) {
                    true => Ok(()),
                    false => Err(format!("{label} does not answer any more")),
                }
            }
            Self::Waits(name, replica, why) => {
                let ShownStatus { notes, waiting, .. } = said(name);
                let waits = replica.map_or(!waiting.is_empty(), |replica| waiting.contains(&replica));
                if !waits {
                    return Err(format!("replicas {waiting:?} wait; what is said is {notes:?}"));
                }
                has("what is said", &notes, why.as_deref().unwrap_or_default())
            }
            Self::Refused(name, words) => match said(name).refused {
                Some(text) => has("the refusal", &text, words),
                None => Err("it is not refused".to_owned()),
            },
            Self::Says(name, words) => has("what was said", &spoken(name), words),
            Self::Silent(name, words) => match spoken(name).contains(words) {
                true => Err(format!("{words:?} was said: {:?}", spoken(name))),
                false => Ok(()),
            },
            Self::Decision(name, words) => {
                has("the decision", &said(name).report.unwrap_or_default().decision, words)
            }
            Self::Reason(name, words) => {
                has("the reason", &said(name).report.unwrap_or_default().reason, words)
            }
            Self::Moved(names) => {
                let moved: Vec<&String> = trace.moved.iter().collect();
                let mut expected: Vec<&String> = names.iter().collect();
                expected.sort();
                if moved == expected { Ok(()) } else { Err(format!("moved: {moved:?}")) }
            }
            Self::Empty(node) => {
                let members = world.cluster.groups.iter().flat_map(|group| &group.spec.plan.members);
                let promised = members.filter(|member| member.node_name == *node).count();
                let held = world.engine_ranks.get(node).map_or(0, |held| held.len());
                count("ranks are promised or held", promised + held, 0)
            }
        }
    }
}

fn groups<'w>(world: &'w World, name: &str) -> Vec<&'w ShardGroup> {
    world.living().into_iter().filter(|group| group.spec.deployment_ref.name == name).collect()
}

fn on(
    world: &World,
    name: &str,
    replicas: &[Vec<String>],
    cut: Option<SplitKind>,
    rdma: Option<bool>,
) -> Result<(), String> {
    let groups = groups(world, name);
    let sorted = |mut nodes: Vec<String>| {
        nodes.sort();
        nodes.join(" ")
    };
    let nodes = |group: &&ShardGroup| {
        sorted(group.spec.plan.members.iter().map(|member| member.node_name.clone()).collect())
    };
    let is: Vec<String> = groups.iter().map(nodes).collect();
    let expected: Vec<String> = replicas.iter().map(|nodes| sorted(nodes.clone())).collect();
    if is != expected {
        let said = world.said.get(name).map(|said| said.notes.as_str()).unwrap_or_default();
        return Err(format!("it is on {:?}; what is said is {said:?}", is.join(" | ")));
    }
    for group in groups {
        let plan = &group.spec.plan;
        let split = match (plan.members.len(), plan.tensor_size as usize) {
            (1, _) => SplitKind::Single,
            (_, 1) => SplitKind::Pipeline,
            (ranks, size) if ranks == size => SplitKind::Tensor,
            _ => SplitKind::Hybrid,
        };
        let carried = matches!(plan.backend, Backend::Jaccl | Backend::JacclRing);
        if cut.is_some_and(|cut| cut != split) || rdma.is_some_and(|rdma| rdma != carried) {
            return Err(format!("{} is {split:?} over {:?}", world.label(group), plan.backend));
        }
    }
    Ok(())
}
