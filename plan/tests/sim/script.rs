//! A script: the lines of its file as steps. The table of verbs is the language; a new verb is a line there
//! and an arm in `deed`. Not here: the execution of steps.

use russet_crds::{
    ApprovalDecision, FabricDemand, FabricKind, LinkKind, NodePoolSpec, NodeSelector, Scheduling, Sharding,
    TierSpec, names,
};
use russet_model::shape::ModelShape;

use super::cable::{CableSide, Pairing, SimCable};
use super::expectation::Expectation;
use super::machine::SimMachine;
use super::model_shape;
use super::spec_fields;
use super::words::{Fields, LineError, Words, number, quantity};

/// A script.
#[derive(Clone, Debug)]
pub struct Script {
    /// Its name, without the ending.
    pub name: String,
    /// Why it is known to fail, if it does.
    pub pending: Option<String>,
    /// Its steps.
    pub lines: Vec<SimLine>,
}

/// A step with its line.
#[derive(Clone, Debug)]
pub struct SimLine {
    /// Its number in the file.
    pub number: usize,
    /// Its text.
    pub text: String,
    /// The parsed step.
    pub step: SimStep,
}

/// A parsed line.
#[derive(Clone, Debug)]
pub enum SimStep {
    Node(SimMachine),
    Cable(SimCable),
    Pool(String, NodePoolSpec),
    Strategy(String, Fields),
    Tier(String, Box<TierSpec>),
    Answer(String, ApprovalDecision),
    Request(String, u32),
    Model(String, Option<Box<ModelShape>>),
    Copy(String, String, bool),
    Deploy(String, Fields),
    Edit(String, Fields),
    Delete(String),
    Schedule(String, Scheduling),
    Lose(String),
    Back(String),
    Leave(String),
    Cut(String, String, Option<String>),
    Join(String, String),
    Rdma(String, bool),
    Skew(String, String),
    Label(String, Vec<(String, String)>),
    Limit(String, u64),
    Refuse(String),
    Release(Option<String>),
    Ready(String),
    NotReady(String, bool),
    Turn(String),
    Clock(i64),
    Restart,
    Settle,
    During(Vec<SimLine>),
    Expect(Expectation),
}

impl SimStep {
    /// Whether it concerns the operator's turns, and not the cluster.
    fn takes_turns(&self) -> bool {
        matches!(self, Self::Turn(_) | Self::Restart | Self::Settle | Self::During(_) | Self::Expect(_))
    }
}

/// Parses the text after a verb.
type Read = fn(&mut Words) -> Result<SimStep, LineError>;

/// Every verb, its usage, and its parser. `docs/simulator.md` shows the same table.
pub const VERBS: [(&str, &str, Read); 32] = [
    (
        "node",
        "node NAME \"CHIP\" MEMORY [limit= build= backends= rdma=off measured=no disk= zone= LABEL=]",
        |words| Ok(SimStep::Node(SimMachine::read(words)?)),
    ),
    ("cable", "cable A B rdma|thunderbolt|ethernet|wifi [SPEED] [untold|crossed]", cable),
    ("pool", "pool NAME [memory= chip= LABEL=] [fabric=any|thunderbolt|rdma speed=]", pool),
    ("strategy", "strategy NAME SPLIT…", |words| {
        Ok(SimStep::Strategy(named(words, "strategy")?, fields(words, split_of)?))
    }),
    (
        "tier",
        "tier NAME dedicated|cluster [priority= pools= strategy= groups= preemption=lower residency= min-residency= idle= hours=08:00-20:00,… days= approvals=]",
        |words| {
            let name = named(words, "tier")?;
            Ok(SimStep::Tier(name, Box::new(spec_fields::tier(words)?)))
        },
    ),
    ("approve", "approve NAME", |words| {
        Ok(SimStep::Answer(named(words, "deployment")?, ApprovalDecision::Approved))
    }),
    ("deny", "deny NAME", |words| Ok(SimStep::Answer(named(words, "deployment")?, ApprovalDecision::Denied))),
    ("request", "request NAME [waiting]", |words| {
        Ok(SimStep::Request(named(words, "deployment")?, u32::from(words.take("waiting"))))
    }),
    ("model", "model NAME llama|llama-8b|llama-70b|llama-405b|toy|unread [SIZE…]", model),
    ("copy", "copy MODEL NODE [pinned]", |words| {
        Ok(SimStep::Copy(named(words, "model")?, named(words, "node")?, words.take("pinned")))
    }),
    ("deploy", "deploy NAME model= [replicas= pools= strategy= tier= group= spread= SPLIT…]", deploy),
    ("apply", "apply NAME model= [replicas= pools= strategy= tier= group= spread= SPLIT…]", deploy),
    ("edit", "edit NAME FIELD…", edit),
    ("scale", "scale NAME REPLICAS", |words| {
        let (name, count) = (named(words, "deployment")?, words.plain("the number of replicas")?);
        let replicas: i32 = number(&count, "replicas")?;
        Ok(SimStep::Edit(name, Words::of(&format!("replicas={replicas}"))?.fields()?))
    }),
    ("delete", "delete NAME", |words| Ok(SimStep::Delete(named(words, "deployment")?))),
    ("cordon", "cordon NODE", |words| Ok(SimStep::Schedule(named(words, "node")?, Scheduling::Cordoned))),
    ("drain", "drain NODE", |words| Ok(SimStep::Schedule(named(words, "node")?, Scheduling::Draining))),
    ("uncordon", "uncordon NODE", |words| Ok(SimStep::Schedule(named(words, "node")?, Scheduling::Enabled))),
    ("lose", "lose NODE", |words| Ok(SimStep::Lose(named(words, "node")?))),
    ("back", "back NODE", |words| Ok(SimStep::Back(named(words, "node")?))),
    ("leave", "leave NODE", |words| Ok(SimStep::Leave(named(words, "node")?))),
    ("cut", "cut A B [at A]", |words| {
        let (a, b) = (named(words, "node")?, named(words, "node")?);
        let at = if words.take("at") { Some(named(words, "node")?) } else { None };
        Ok(SimStep::Cut(a, b, at))
    }),
    ("join", "join A B", |words| Ok(SimStep::Join(named(words, "node")?, named(words, "node")?))),
    ("rdma", "rdma NODE on|off", |words| {
        Ok(SimStep::Rdma(named(words, "node")?, words.one_of(&[("on", true), ("off", false)])?))
    }),
    ("skew", "skew NODE BUILD", |words| Ok(SimStep::Skew(named(words, "node")?, words.plain("the build")?))),
    ("label", "label NODE LABEL=…", |words| {
        let node = named(words, "node")?;
        let labels = words.fields()?.rest();
        Ok(SimStep::Label(node, labels.into_iter().map(|(key, value)| (label(&key), value)).collect()))
    }),
    ("limit", "limit NODE MEMORY", |words| {
        let (node, text) = (named(words, "node")?, words.plain("the memory models may take")?);
        Ok(SimStep::Limit(node, quantity(&text, "the memory")?))
    }),
    ("refuse", "refuse NODE", |words| Ok(SimStep::Refuse(named(words, "node")?))),
    ("release", "release [NODE]", |words| {
        Ok(SimStep::Release(if words.is_empty() { None } else { Some(named(words, "node")?) }))
    }),
    ("ready", "ready NAME", |words| Ok(SimStep::Ready(named(words, "deployment")?))),
    ("not-ready", "not-ready NAME [new]", |words| {
        Ok(SimStep::NotReady(named(words, "deployment")?, words.take("new")))
    }),
    ("turn", "turn NAME", |words| Ok(SimStep::Turn(named(words, "deployment")?))),
];

/// Lines without a verb parser of their own.
pub const OTHERS: [&str; 4] = ["clock TIME", "restart operator", "settle", "during settle … end"];

impl Script {
    /// Parses a script; the error names file, line and what was expected.
    pub fn read(name: &str, text: &str) -> Result<Self, String> {
        let mut lines = text.lines().enumerate().map(|(at, line)| (at + 1, line)).peekable();
        let pending = lines.next_if(|(_, line)| line.starts_with("pending"));
        let pending = pending.map(|(_, line)| line.trim_start_matches("pending").trim().to_owned());
        let mut script = Self { name: name.to_owned(), pending, lines: Vec::new() };
        // Lines of an open block, and its first line number.
        let mut block: Option<(usize, Vec<SimLine>)> = None;
        for (number, line) in lines {
            let at = |wrong: LineError| format!("tests/sim/scripts/{name}.txt:{number}: {wrong}");
            let mut words = Words::of(line).map_err(at)?;
            if words.is_empty() {
                continue;
            }
            let text = line.split(" #").next().unwrap_or(line).trim().to_owned();
            if words.take("during") {
                if !words.take("settle") || block.is_some() {
                    return Err(at("during settle is expected, and not within another one".to_owned()));
                }
                block = Some((number, Vec::new()));
                continue;
            }
            if words.take("end") {
                let Some((number, steps)) = block.take().filter(|(_, steps)| !steps.is_empty()) else {
                    return Err(at("end is expected after during settle and a step".to_owned()));
                };
                let texts: Vec<&str> = steps.iter().map(|line| line.text.as_str()).collect();
                let text = format!("during settle: {}", texts.join("; "));
                script.lines.push(SimLine { number, text, step: SimStep::During(steps) });
                continue;
            }
            let step = step(&mut words).map_err(at)?;
            words.end().map_err(at)?;
            let line = SimLine { number, text, step };
            match &mut block {
                Some(_) if line.step.takes_turns() => {
                    return Err(at(
                        "a step that changes the cluster is expected within during settle".to_owned()
                    ));
                }
                Some((_, steps)) => steps.push(line),
                None => script.lines.push(line),
            }
        }
        match block {
            Some((number, _)) => {
                Err(format!("tests/sim/scripts/{name}.txt:{number}: end is expected after during settle"))
            }
            None => Ok(script),
        }
    }
}

fn step(words: &mut Words) -> Result<SimStep, LineError> {
    let verb = words.plain("a verb")?;
    match verb.as_str() {
        "settle" => return Ok(SimStep::Settle),
        "expect" => return Ok(SimStep::Expect(Expectation::read(words)?)),
        "restart" if words.take("operator") => return Ok(SimStep::Restart),
        "clock" => return Ok(SimStep::Clock(time(&words.plain("a time such as 90s")?)?)),
        _ => {}
    }
    let found = VERBS.iter().find(|(known, _, _)| *known == verb);
    let Some((_, usage, read)) = found else {
        let verbs: Vec<&str> = VERBS.iter().map(|(verb, _, _)| *verb).collect();
        let verbs = verbs.join(", ");
        return Err(format!(
            "{verb:?} is no verb; there are {verbs}, clock, restart operator, settle, during settle, expect"
        ));
    };
    read(words).map_err(|wrong| format!("{wrong}; it is: {usage}"))
}

fn named(words: &mut Words, what: &str) -> Result<String, LineError> {
    words.plain(&format!("the name of a {what}"))
}

/// The remaining fields, checked by `good`.
fn fields(words: &mut Words, good: fn(Fields) -> Result<(), LineError>) -> Result<Fields, LineError> {
    let fields = words.fields()?;
    good(fields.clone())?;
    Ok(fields)
}

fn split_of(mut fields: Fields) -> Result<(), LineError> {
    spec_fields::split(Sharding::default(), &mut fields)?;
    fields.end(spec_fields::SPLIT)
}

fn deploy(words: &mut Words) -> Result<SimStep, LineError> {
    let name = named(words, "deployment")?;
    let fields = fields(words, |fields| spec_fields::change(Default::default(), fields).map(|_| ()))?;
    if fields.clone().take("model").is_none() {
        return Err("model= is expected".to_owned());
    }
    Ok(SimStep::Deploy(name, fields))
}

fn edit(words: &mut Words) -> Result<SimStep, LineError> {
    let name = named(words, "deployment")?;
    Ok(SimStep::Edit(
        name,
        fields(words, |fields| spec_fields::change(Default::default(), fields).map(|_| ()))?,
    ))
}

fn model(words: &mut Words) -> Result<SimStep, LineError> {
    let (name, preset) = (named(words, "model")?, words.plain("the kind of model")?);
    if preset == "unread" {
        return Ok(SimStep::Model(name, None));
    }
    Ok(SimStep::Model(name, Some(Box::new(model_shape::shape(&preset, words.fields()?)?))))
}

fn cable(words: &mut Words) -> Result<SimStep, LineError> {
    let ends = [named(words, "node")?, named(words, "node")?].map(|node| CableSide { node, up: true });
    let (kind, rdma, speed) = words.one_of(&[
        ("rdma", (LinkKind::Thunderbolt, true, 80)),
        ("thunderbolt", (LinkKind::Thunderbolt, false, 40)),
        ("ethernet", (LinkKind::Ethernet, false, 10)),
        ("wifi", (LinkKind::Wifi, false, 1)),
    ])?;
    let pairing = |words: &mut Words| match (words.take("untold"), words.take("crossed")) {
        (true, _) => Some(Pairing::Absent),
        (_, true) => Some(Pairing::Crossed),
        _ => None,
    };
    let mut given = pairing(words);
    let mut bits = speed * 1_000_000_000;
    if given.is_none() && !words.is_empty() {
        bits = quantity(&words.plain("the speed")?, "the speed")?;
        given = pairing(words);
    }
    Ok(SimStep::Cable(SimCable { ends, kind, rdma, bits, pairing: given.unwrap_or(Pairing::Matching) }))
}

fn pool(words: &mut Words) -> Result<SimStep, LineError> {
    let name = named(words, "pool")?;
    let mut fields = words.fields()?;
    let kinds = [
        ("any", FabricKind::Any),
        ("thunderbolt", FabricKind::Thunderbolt),
        ("rdma", FabricKind::ThunderboltRdma),
    ];
    let (kind, min_bits_per_second) = (fields.one_of("fabric", &kinds)?, fields.take("speed"));
    let fabric = (kind.is_some() || min_bits_per_second.is_some())
        .then(|| FabricDemand { kind: kind.unwrap_or_default(), min_bits_per_second });
    let labels = fields.rest().into_iter().map(|(key, value)| (label(&key), value)).collect();
    let selector = NodeSelector { match_labels: labels, ..NodeSelector::default() };
    Ok(SimStep::Pool(name, NodePoolSpec { selector, fabric }))
}

/// A label by its short name.
pub fn label(key: &str) -> String {
    match key {
        "memory" => names::LABEL_MEMORY.to_owned(),
        "chip" => names::LABEL_CHIP.to_owned(),
        "zone" => names::LABEL_ZONE.to_owned(),
        other => other.to_owned(),
    }
}

/// Seconds; a negative number sets a clock back.
fn time(text: &str) -> Result<i64, LineError> {
    let units = [("s", 1), ("m", 60), ("h", 3600), ("d", 86_400)];
    let cut = units.iter().find_map(|(unit, seconds)| Some((text.strip_suffix(unit)?, seconds)));
    let (count, seconds) =
        cut.ok_or(format!("a time such as 90s, 5m, -3h or 25d is expected, not {text:?}"))?;
    Ok(number::<i64>(count, "a time")? * seconds)
}
