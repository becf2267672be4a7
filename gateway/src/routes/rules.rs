//! The rules of a ModelRoute: which of its targets get a request, and why not those of other rules. Pure.

use std::time::Duration;

use jiff::Timestamp;
use russet_crds::active_hours::active_hours;
use russet_crds::{
    FallbackCause, ModelRouteSpec, OnUnavailable, Presence, RouteMatch, RouteRule, RouteTarget, Schedule,
    TargetPick, Zone,
};

use super::facts::{RequestFacts, task_name};
use super::matches_pattern;
use super::target::TargetName;

/// Targets of which one gets a request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Targets {
    /// Their names, in order.
    pub names: Vec<TargetName>,
    /// The weight of each, if any has one.
    weights: Vec<u32>,
    /// Which of them is the first.
    pub pick: TargetPick,
}

impl Targets {
    /// Those of a spec.
    pub(super) fn new(targets: &[RouteTarget], pick: TargetPick) -> Self {
        let has_weights = targets.iter().any(|target| target.weight.is_some());
        let named =
            targets.iter().filter_map(|target| Some((TargetName::of(target)?, target.weight.unwrap_or(1))));
        let (names, weights): (_, Vec<u32>) = named.unzip();
        let weights = if has_weights { weights } else { Vec::new() };
        Self { names, weights, pick }
    }

    /// The names of its deployments.
    fn deployments(&self) -> impl Iterator<Item = &str> {
        self.names.iter().filter_map(|name| match name {
            TargetName::Deployment(name) => Some(name.as_str()),
            TargetName::Provider { .. } | TargetName::Pipeline { .. } => None,
        })
    }

    /// Whether it counts how quick its deployments are: of several, since a request passes over one that takes longer than the
    /// time it has, and where it leaves one for such a reason.
    fn are_scored(&self, terms: &RouteTerms) -> bool {
        let deployments = self.deployments().count();
        let leaves = terms.fallback_on.contains(&FallbackCause::Deadline) || terms.max_wait.is_some();
        deployments > 1 || (deployments < self.names.len() && leaves)
    }

    /// The names in the order in which a request of this conversation tries them: the one that has the share first.
    pub(super) fn in_order(&self, conversation: Option<u64>) -> impl Iterator<Item = &TargetName> {
        let first = conversation.and_then(|conversation| self.share(conversation)).unwrap_or(0);
        let others = (0..self.names.len()).filter(move |place| *place != first);
        let places = self.names.get(first).map(|_| first).into_iter().chain(others);
        places.filter_map(|place| self.names.get(place))
    }

    /// The place of the target in whose share a conversation is.
    fn share(&self, conversation: u64) -> Option<usize> {
        let sum: u64 = self.weights.iter().copied().map(u64::from).sum();
        let mut left = conversation.checked_rem(sum)?;
        self.weights.iter().position(|weight| match left.checked_sub(u64::from(*weight)) {
            Some(less) => {
                left = less;
                false
            }
            None => true,
        })
    }
}

/// One rule.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Rule {
    name: String,
    of: RouteMatch,
    targets: Targets,
    terms: RouteTerms,
}

/// What a route says of requests beside their targets, or a rule in its place.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RouteTerms {
    /// How far from home they may be answered, as the rule says.
    pub zone: Option<Zone>,
    /// How long they are held while no target is ready; `None`: they are rejected at once.
    pub hold_timeout: Option<Duration>,
    /// Why they go from a deployment on to a provider behind it.
    pub fallback_on: Vec<FallbackCause>,
    /// The longest wait for a first token that is no cause.
    pub max_wait: Option<Duration>,
    /// How long after it was sent another replica gets a request that has no first token; `None`: no other.
    pub hedge_after: Option<Duration>,
    /// The highest priority.
    pub max_priority: Option<i32>,
}

impl RouteTerms {
    /// Those of a route, with what a rule says in their place.
    fn new(spec: &ModelRouteSpec, rule: Option<&RouteRule>) -> Self {
        let on_unavailable = rule.and_then(|rule| rule.on_unavailable).unwrap_or(spec.on_unavailable);
        let deadline = rule.and_then(|rule| rule.deadline_seconds).unwrap_or(spec.deadline_seconds);
        let max_wait = rule.and_then(|rule| rule.max_wait_seconds).or(spec.max_wait_seconds);
        let seconds = |seconds: u32| Duration::from_secs(seconds.into());
        let hedge = rule.and_then(|rule| rule.hedge_after_milliseconds).or(spec.hedge_after_milliseconds);
        Self {
            zone: rule.and_then(|rule| rule.zone),
            hold_timeout: match on_unavailable {
                OnUnavailable::Queue | OnUnavailable::Unknown => Some(seconds(deadline)),
                OnUnavailable::Fail => None,
            },
            fallback_on: rule.and_then(|rule| rule.fallback_on.as_ref()).unwrap_or(&spec.fallback_on).clone(),
            max_wait: max_wait.map(seconds),
            hedge_after: hedge.map(|milliseconds| Duration::from_millis(milliseconds.into())),
            max_priority: rule.and_then(|rule| rule.max_priority),
        }
    }
}

/// Where the requests of a ModelRoute go.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RoutePolicy {
    rules: Vec<Rule>,
    /// Of requests that no rule matches.
    pub otherwise: Targets,
    /// How far from home requests may be answered.
    pub zone: Zone,
    /// The rest of what it says, of requests that no rule matches.
    pub terms: RouteTerms,
}

/// The targets of a request, and the rule that named them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TargetSelection<'a> {
    /// Name of the rule; `None` where no rule matched.
    pub rule: Option<&'a str>,
    /// The targets.
    pub targets: &'a Targets,
    /// What the rule, or the route, says beside them.
    pub terms: &'a RouteTerms,
    /// What the request's share is taken by.
    conversation: Option<u64>,
}

impl<'a> TargetSelection<'a> {
    /// Names of the targets in the order in which the request tries them.
    pub fn in_order(self) -> impl Iterator<Item = &'a TargetName> {
        self.targets.in_order(self.conversation)
    }
}

/// Whether a rule matched, and why not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict<'a> {
    /// Name of the rule.
    pub rule: &'a str,
    /// Why it does not match.
    pub mismatch: Option<String>,
}

impl RoutePolicy {
    /// That of a spec.
    pub(super) fn new(spec: &ModelRouteSpec) -> Self {
        let rule = |rule: &RouteRule| Rule {
            name: rule.name.clone(),
            of: rule.r#match.clone(),
            targets: Targets::new(&rule.targets, rule.pick),
            terms: RouteTerms::new(spec, Some(rule)),
        };
        Self {
            rules: spec.rules.iter().map(rule).collect(),
            otherwise: Targets::new(&spec.targets, spec.pick),
            zone: spec.zone,
            terms: RouteTerms::new(spec, None),
        }
    }

    /// That of a route without rules to these deployments.
    pub fn to<'n>(names: impl IntoIterator<Item = &'n str>) -> Self {
        let names = names.into_iter().map(|name| TargetName::Deployment(name.to_owned())).collect();
        Self { otherwise: Targets { names, ..Targets::default() }, ..Self::default() }
    }

    /// The same holding requests so long; `None`: not at all.
    #[must_use]
    pub fn holding(self, hold_timeout: Option<Duration>) -> Self {
        Self { terms: RouteTerms { hold_timeout, ..self.terms }, ..self }
    }

    /// Whether it looks at what a request is.
    pub fn reads_requests(&self) -> bool {
        // A conversation stays with one of several equally fast models, which takes to know it.
        let is_fastest = self.otherwise.pick == TargetPick::Fastest && self.otherwise.names.len() > 1;
        !self.rules.is_empty() || !self.otherwise.weights.is_empty() || is_fastest || self.leads_outside()
    }

    /// Whether a request may go to a provider, or to a Pipeline that asks one, which takes to know its labels.
    fn leads_outside(&self) -> bool {
        self.all_targets()
            .flat_map(|targets| &targets.names)
            .any(|name| matches!(name, TargetName::Provider { .. } | TargetName::Pipeline { .. }))
    }

    /// Those of each rule, and of requests that none matches.
    fn all_targets(&self) -> impl Iterator<Item = &Targets> {
        self.rules.iter().map(|rule| &rule.targets).chain([&self.otherwise])
    }

    /// Names of the deployments that have another target beside them and of which it counts how quick each is.
    pub(crate) fn scored_deployments(&self) -> impl Iterator<Item = &str> {
        let of_rules = self.rules.iter().map(|rule| (&rule.targets, &rule.terms));
        let all = of_rules.chain([(&self.otherwise, &self.terms)]);
        all.filter(|(targets, terms)| targets.are_scored(terms))
            .flat_map(|(targets, _)| targets.deployments())
    }

    /// Whether it has rules.
    pub fn has_rules(&self) -> bool {
        !self.rules.is_empty()
    }

    /// The targets of a request: those of the first rule that matches. Without facts no rule does.
    pub fn select(&self, facts: Option<&RequestFacts>) -> TargetSelection<'_> {
        let conversation = facts.map(|facts| facts.conversation);
        let matching =
            facts.and_then(|facts| self.rules.iter().find(|rule| mismatch(&rule.of, facts).is_none()));
        match matching {
            Some(Rule { name, targets, terms, .. }) => {
                TargetSelection { rule: Some(name), targets, terms, conversation }
            }
            None => {
                let (targets, terms) = (&self.otherwise, &self.terms);
                TargetSelection { rule: None, targets, terms, conversation }
            }
        }
    }

    /// Of each rule up to the one that matches, whether it does.
    pub fn verdicts<'a>(&'a self, facts: &RequestFacts) -> Vec<Verdict<'a>> {
        let mut verdicts = Vec::new();
        for Rule { name, of, .. } in &self.rules {
            let mismatch = mismatch(of, facts);
            let matches = mismatch.is_none();
            verdicts.push(Verdict { rule: name, mismatch });
            if matches {
                break;
            }
        }
        verdicts
    }
}

/// The first condition that a request does not meet.
fn mismatch(of: &RouteMatch, facts: &RequestFacts) -> Option<String> {
    let RouteMatch {
        tasks,
        complexity_above_percent,
        min_prompt_tokens,
        max_prompt_tokens,
        tools,
        labels,
        keys,
        schedules,
    } = of;
    let by_task = || {
        (!tasks.is_empty() && !tasks.contains(&facts.task)).then(|| {
            let wanted: Vec<&str> = tasks.iter().copied().map(task_name).collect();
            format!("its task is {}, not {}", task_name(facts.task), wanted.join(" or "))
        })
    };
    let by_complexity = || {
        let (above, has) = (complexity_above_percent.as_ref()?, facts.complexity.percent());
        (has <= *above).then(|| format!("its complexity is {has} %, not above {above} %"))
    };
    let has = facts.prompt_tokens;
    let by_min = || {
        let min = min_prompt_tokens.as_ref()?;
        (has < u64::from(*min)).then(|| format!("its prompt has about {has} tokens, fewer than {min}"))
    };
    let by_max = || {
        let max = max_prompt_tokens.as_ref()?;
        (has > u64::from(*max)).then(|| format!("its prompt has about {has} tokens, more than {max}"))
    };
    let by_tools = || match (tools.as_ref()?, facts.tools) {
        (Presence::Present, 0) => Some("it offers no tools".to_owned()),
        (Presence::Absent, count) if count > 0 => Some(format!("it offers {count} tools")),
        (Presence::Unknown, _) => Some("`tools` has a value of a newer release".to_owned()),
        (Presence::Present | Presence::Absent, _) => None,
    };
    let by_labels = || {
        labels.iter().find_map(|(name, wanted)| match facts.labels.get(name) {
            Some(has) if has == wanted => None,
            Some(has) => Some(format!("its label {name} is {has:?}, not {wanted:?}")),
            None => Some(format!("it has no label {name}")),
        })
    };
    let by_key = || {
        let is_named = |key: &str| keys.iter().any(|pattern| matches_pattern(pattern, key));
        match &facts.key {
            _ if keys.is_empty() => None,
            Some(key) if is_named(key) => None,
            Some(key) => Some(format!("its key is {key}, not {}", keys.join(" or "))),
            None => Some("it has no key".to_owned()),
        }
    };
    let by_schedule = || is_outside(schedules, facts.at).then(|| "it is outside the schedules".to_owned());
    by_task()
        .or_else(by_complexity)
        .or_else(by_min)
        .or_else(by_max)
        .or_else(by_tools)
        .or_else(by_labels)
        .or_else(by_key)
        .or_else(by_schedule)
}

/// Whether a time is in none of the schedules; one that nobody can read holds at no time.
fn is_outside(schedules: &[Schedule], at: Timestamp) -> bool {
    !active_hours(schedules, at).is_ok_and(|hours| hours.open)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use russet_crds::{Day, RouteRule, RouteTask};
    use serde_json::json;

    use super::*;
    use crate::routes::complexity::Complexity;

    fn target(name: &str, weight: Option<u32>) -> RouteTarget {
        RouteTarget { weight, ..RouteTarget::deployment(name) }
    }

    fn facts() -> RequestFacts {
        RequestFacts {
            task: RouteTask::Code,
            complexity: Complexity::default(),
            prompt_tokens: 500,
            tools: 2,
            labels: BTreeMap::from([("team".to_owned(), "blue".to_owned())]),
            key: Some("kid-1".to_owned()),
            key_namespace: None,
            zone: None,
            conversation: 0,
            at: "2026-11-20T12:00:00Z".parse().unwrap(),
        }
    }

    #[test]
    fn a_request_must_be_all_that_a_rule_names() {
        let labels = |value: &str| BTreeMap::from([("team".to_owned(), value.to_owned())]);
        let hours = |from: &str, zone: &str| {
            let (until, time_zone) = ("13:00".to_owned(), zone.to_owned());
            vec![Schedule { days: vec![Day::Fri], from: from.into(), until, time_zone }]
        };
        let any = RouteMatch::default;
        let all = RouteMatch {
            tasks: vec![RouteTask::Code, RouteTask::Reasoning],
            complexity_above_percent: None,
            min_prompt_tokens: Some(500),
            max_prompt_tokens: Some(500),
            tools: Some(Presence::Present),
            labels: labels("blue"),
            keys: vec!["kid-*".into()],
            schedules: hours("11:00", "UTC"),
        };
        for (of, expected) in [
            (any(), None),
            (all.clone(), None),
            (
                RouteMatch { tasks: vec![RouteTask::Chat, RouteTask::Embed], ..all.clone() },
                Some("its task is code, not chat or embed"),
            ),
            (
                RouteMatch { complexity_above_percent: Some(0), ..all.clone() },
                Some("its complexity is 0 %, not above 0 %"),
            ),
            (
                RouteMatch { min_prompt_tokens: Some(501), ..all.clone() },
                Some("its prompt has about 500 tokens, fewer than 501"),
            ),
            (
                RouteMatch { max_prompt_tokens: Some(499), ..all.clone() },
                Some("its prompt has about 500 tokens, more than 499"),
            ),
            (RouteMatch { tools: Some(Presence::Absent), ..all.clone() }, Some("it offers 2 tools")),
            (
                RouteMatch { tools: Some(Presence::Unknown), ..any() },
                Some("`tools` has a value of a newer release"),
            ),
            (
                RouteMatch { labels: labels("red"), ..all.clone() },
                Some("its label team is \"blue\", not \"red\""),
            ),
            (
                RouteMatch { keys: vec!["kid".into(), "x*".into()], ..any() },
                Some("its key is kid-1, not kid or x*"),
            ),
            (RouteMatch { schedules: hours("12:01", "UTC"), ..any() }, Some("it is outside the schedules")),
            // 12:00 in UTC is 13:00 there, when they end.
            (
                RouteMatch { schedules: hours("11:00", "Europe/Berlin"), ..any() },
                Some("it is outside the schedules"),
            ),
            (
                RouteMatch { schedules: hours("11:00", "Mars/Base"), ..any() },
                Some("it is outside the schedules"),
            ),
        ] {
            assert_eq!(mismatch(&of, &facts()).as_deref(), expected, "{of:?}");
        }
        let bare = RequestFacts { tools: 0, labels: BTreeMap::new(), key: None, ..facts() };
        for (of, expected) in [
            (RouteMatch { tools: Some(Presence::Present), ..any() }, "it offers no tools"),
            (RouteMatch { labels: labels("blue"), ..any() }, "it has no label team"),
            (RouteMatch { keys: vec!["*".into()], ..any() }, "it has no key"),
        ] {
            assert_eq!(mismatch(&of, &bare).as_deref(), Some(expected));
        }
    }

    #[test]
    fn deployments_are_scored_where_a_choice_needs_it() {
        let deployment = |name: &str| json!({"deploymentRef": {"name": name}});
        let (one, two, far) =
            (deployment("one"), deployment("two"), json!({"providerRef": {"name": "far"}, "model": "m"}));
        let [both, outside] = [json!([one, two]), json!([one, far])];
        for (spec, expected) in [
            // Whatever is picked, a request with a deadline passes over one that is too slow for it.
            (json!({"targets": both}), vec!["one", "two"]),
            (json!({"targets": both, "pick": "Largest"}), vec!["one", "two"]),
            (json!({"targets": [one], "pick": "Fastest", "maxWaitSeconds": 1}), vec![]),
            (json!({"targets": outside, "fallbackOn": ["Unavailable"], "maxWaitSeconds": 1}), vec!["one"]),
            // By default a request that has no time to wait leaves.
            (json!({"targets": outside}), vec!["one"]),
            (json!({"targets": outside, "fallbackOn": ["Unavailable"]}), vec![]),
            (json!({"targets": outside, "fallbackOn": ["Unavailable"], "pick": "Fastest"}), vec![]),
            (
                json!({"targets": [two], "rules": [{"name": "r", "targets": [one], "pick": "Fastest"}]}),
                vec![],
            ),
            (
                json!({"targets": [one], "rules": [{"name": "r", "targets": both, "pick": "Fastest"}]}),
                vec!["one", "two"],
            ),
        ] {
            let mut named = spec.clone();
            named["models"] = json!(["auto"]);
            let policy = RoutePolicy::new(&serde_json::from_value(named).unwrap());
            assert_eq!(policy.scored_deployments().collect::<Vec<_>>(), expected, "{spec}");
        }
    }

    #[test]
    fn the_first_rule_that_matches_decides() {
        let shown = |selection: TargetSelection<'_>| -> Vec<String> {
            selection.in_order().map(TargetName::to_string).collect()
        };
        let rule = |name: &str, tasks: &[RouteTask]| RouteRule {
            name: name.into(),
            r#match: RouteMatch { tasks: tasks.to_vec(), ..RouteMatch::default() },
            targets: vec![target(&format!("for-{name}"), None)],
            pick: TargetPick::Fastest,
            ..RouteRule::default()
        };
        let policy = RoutePolicy::new(&ModelRouteSpec {
            rules: vec![
                rule("thinks", &[RouteTask::Reasoning]),
                rule("codes", &[RouteTask::Code]),
                rule("any", &[]),
            ],
            targets: vec![target("rest", None)],
            ..ModelRouteSpec::default()
        });
        let selected = policy.select(Some(&facts()));
        assert_eq!((selected.rule, selected.targets.pick), (Some("codes"), TargetPick::Fastest));
        assert_eq!(shown(selected), ["for-codes"]);
        let verdicts = policy.verdicts(&facts());
        let verdicts: Vec<_> = verdicts.iter().map(|one| (one.rule, one.mismatch.as_deref())).collect();
        assert_eq!(verdicts, [("thinks", Some("its task is code, not reasoning")), ("codes", None)]);
        let other = policy.select(None);
        assert_eq!((other.rule, shown(other)), (None, vec!["rest".to_owned()]));
        assert!(policy.reads_requests() && !RoutePolicy::default().reads_requests());
    }

    #[test]
    fn a_rule_says_what_it_says_and_the_route_the_rest() {
        let code = RouteMatch { tasks: vec![RouteTask::Code], ..RouteMatch::default() };
        let terms = |rule: RouteRule| {
            let rule = RouteRule { name: "codes".into(), r#match: code.clone(), ..rule };
            let policy = RoutePolicy::new(&ModelRouteSpec {
                rules: vec![rule],
                deadline_seconds: 60,
                max_wait_seconds: Some(7),
                hedge_after_milliseconds: Some(900),
                fallback_on: vec![FallbackCause::Error],
                ..ModelRouteSpec::default()
            });
            (policy.select(Some(&facts())).terms.clone(), policy.select(None).terms.clone())
        };
        let seconds = |seconds| Some(Duration::from_secs(seconds));
        let (as_route, route) = terms(RouteRule::default());
        assert_eq!(as_route, route);
        let found = (route.hold_timeout, route.max_wait, &route.fallback_on[..], route.max_priority);
        assert_eq!(found, (seconds(60), seconds(7), &[FallbackCause::Error][..], None));
        assert_eq!(route.hedge_after, Some(Duration::from_millis(900)));
        let (own, route) = terms(RouteRule {
            hedge_after_milliseconds: Some(50),
            deadline_seconds: Some(5),
            max_wait_seconds: Some(1),
            fallback_on: Some(Vec::new()),
            max_priority: Some(-10),
            ..RouteRule::default()
        });
        let found = (own.hold_timeout, own.max_wait, &own.fallback_on[..], own.max_priority);
        assert_eq!(found, (seconds(5), seconds(1), &[][..], Some(-10)));
        assert_eq!((route.hold_timeout, route.max_priority), (seconds(60), None));
        assert_eq!(own.hedge_after, Some(Duration::from_millis(50)));
        let fails = RouteRule { on_unavailable: Some(OnUnavailable::Fail), ..RouteRule::default() };
        assert_eq!(terms(fails).0.hold_timeout, None);
    }

    #[test]
    fn conversations_are_shared_by_weight_and_stay() {
        let of = |weights: &[Option<u32>]| {
            let targets: Vec<_> = weights
                .iter()
                .enumerate()
                .map(|(place, weight)| target(&place.to_string(), *weight))
                .collect();
            Targets::new(&targets, TargetPick::InOrder)
        };
        let first = |targets: &Targets, conversation| {
            targets.in_order(Some(conversation)).next().map(TargetName::to_string)
        };
        let canary = of(&[Some(90), Some(10), Some(0)]);
        let numbers = 0..10_000_u64;
        let hashes = numbers.map(|number| twox_hash::XxHash3_64::oneshot(&number.to_le_bytes()));
        let mut counts = BTreeMap::new();
        for hash in hashes {
            assert_eq!(first(&canary, hash), first(&canary, hash));
            assert_eq!(canary.in_order(Some(hash)).count(), 3);
            *counts.entry(first(&canary, hash)).or_insert(0) += 1;
        }
        let count = |name: &str| counts.get(&Some(name.to_owned())).copied().unwrap_or(0);
        assert!((800..1200).contains(&count("1")) && count("2") == 0 && count("0") > 8000, "{counts:?}");
        // Without weights, without a share, or unknown: as written.
        for targets in [of(&[None, None]), of(&[Some(0), Some(0)]), canary] {
            assert_eq!(targets.in_order(None).next().map(TargetName::to_string).as_deref(), Some("0"));
        }
        assert_eq!(first(&of(&[None, None]), 1), Some("0".to_owned()));
        assert_eq!(first(&of(&[Some(0), Some(0)]), 1), Some("0".to_owned()));
        assert_eq!(first(&of(&[]), 1), None);
    }
}
