//! The record of a request as text of 80 columns: its head, a timeline, the replicas that could have answered, and what
//! was decided and why.

use std::fmt::Write as _;
use std::time::Duration;

use russet_gateway::request_log::{
    AttemptOutcome, AttemptRecord, EndpointScore, FactsRecord, LimitsRecord, PipelineRecord, ProviderRecord,
    RequestEnd, RequestRecord, RuleMismatch, SkippedTarget,
};

use crate::get::format_table;
use crate::plan::text::wrap;

/// Columns of the text.
const WIDTH: usize = 80;
/// Columns before a value of the head.
const LABEL_WIDTH: usize = 11;
/// Columns before the words of the timeline: a time of up to 11 digits, and its unit.
const TIME_WIDTH: usize = 15;
/// Longest name of a node or a group in a table.
const MAX_CELL_CHARS: usize = 22;

/// The record as text.
pub fn render(record: &RequestRecord) -> String {
    let mut text = String::new();
    let caller = record.caller.as_ref().map_or("no key, on loopback".to_owned(), |key| format!("key {key}"));
    field(&mut text, "Request", &record.id);
    field(&mut text, "Received", &format!("{} ({}; {caller})", time(&record.received_at), record.dialect));
    field(&mut text, "Model", &model(record));
    if let Some(facts) = record.route.as_ref().and_then(|route| route.request.as_ref()) {
        field(&mut text, "Routed by", &routed_by(facts));
    }
    field(&mut text, "Limits", &limits(&record.limits));
    if !record.changes.is_empty() {
        field(&mut text, "Changes", &record.changes.join("; "));
    }
    field(&mut text, "Tokens", &tokens(record));
    field(&mut text, "Result", &result(record));
    if let Some(spent) = spent(record) {
        field(&mut text, "Time", &spent);
    }
    text.push_str("\nTimeline\n");
    for (at, words) in timeline(record) {
        let words = words.replace(char::is_control, "?");
        paragraph(&mut text, &format!("{:>TIME_WIDTH$}  ", ms(at)), &words);
    }
    for attempt in &record.attempts {
        candidates(&mut text, attempt);
    }
    let decisions: Vec<String> = decisions(record);
    if !decisions.is_empty() {
        text.push_str("\nWhy\n");
        for words in decisions {
            paragraph(&mut text, "  - ", &words.replace(char::is_control, "?"));
        }
    }
    text
}

fn field(text: &mut String, label: &str, value: &str) {
    paragraph(text, &format!("{label:LABEL_WIDTH$}"), &value.replace(char::is_control, "?"));
}

/// Appends wrapped words behind `first`, the further lines below them.
fn paragraph(text: &mut String, first: &str, words: &str) {
    let indent = first.chars().count();
    // A word may be longer than a line.
    let lines = wrap(words, WIDTH - indent).into_iter().flat_map(|line| {
        let characters: Vec<char> = line.chars().collect();
        let parts = characters.chunks(WIDTH - indent).map(|part| part.iter().collect::<String>());
        parts.collect::<Vec<String>>()
    });
    let mut before = first.to_owned();
    for line in lines {
        let _ = writeln!(text, "{}", format!("{before}{line}").trim_end());
        before = " ".repeat(indent);
    }
}

fn ms(time: f64) -> String {
    format!("{time:.1} ms")
}

/// The time to a millisecond.
fn time(received: &str) -> String {
    received.parse::<jiff::Timestamp>().map_or_else(|_| received.to_owned(), |time| format!("{time:.3}"))
}

fn model(record: &RequestRecord) -> String {
    let name = match record.model.as_str() {
        "" => return "its body was not read".to_owned(),
        name => name,
    };
    match &record.route {
        None => name.to_owned(),
        Some(route) => {
            let rule = match (&route.rule, &route.request) {
                (Some(rule), _) => format!(" by the rule {rule}"),
                (None, Some(_)) => ", none of whose rules matches,".to_owned(),
                (None, None) => String::new(),
            };
            format!(
                "{name}, a name (`{}`) of ModelRoute {}{rule} with the targets {}",
                route.pattern,
                route.model_route,
                route.targets.join(", ")
            )
        }
    }
}

/// The parts of a complexity that two decimals show.
pub(crate) fn shown_parts<'a>(parts: impl Iterator<Item = (&'a str, f64)>) -> String {
    const MIN_SHOWN: f64 = 0.005;
    let shown = parts.filter(|(_, part)| *part >= MIN_SHOWN).map(|(name, part)| format!("{name} {part:.2}"));
    shown.collect::<Vec<String>>().join(", ")
}

/// What the rules of a route knew of the request.
fn routed_by(facts: &FactsRecord) -> String {
    let FactsRecord { task, complexity, complexity_parts, prompt_tokens, tools } = facts;
    let parts = shown_parts(complexity_parts.iter().map(|part| (&*part.name, part.value)));
    let parts = if parts.is_empty() { parts } else { format!(" ({parts})") };
    format!("task {task}; complexity {complexity:.2}{parts}; about {prompt_tokens} tokens; tools: {tools}")
}

fn limits(limits: &LimitsRecord) -> String {
    let LimitsRecord {
        priority,
        max_tokens,
        timeout_ms,
        key_max_tokens,
        key_max_ms,
        requests_per_minute,
        requests_remaining,
    } = limits;
    let mut parts = vec![format!("priority {priority}")];
    parts.extend(max_tokens.map(|most| format!("at most {most} tokens")));
    parts.extend(timeout_ms.map(|timeout| format!("a deadline of {}", ms(timeout))));
    parts.extend(key_max_tokens.map(|most| format!("the key allows {most} tokens")));
    parts.extend(key_max_ms.map(|most| format!("the key allows {}", ms(most))));
    let left = requests_remaining.map(|left| format!(", {left} left")).unwrap_or_default();
    parts.extend(requests_per_minute.map(|quota| format!("the key allows {quota} requests a minute{left}")));
    parts.join("; ")
}

fn tokens(record: &RequestRecord) -> String {
    let RequestRecord { prompt_tokens, cached_tokens, completion_tokens, .. } = record;
    format!("{prompt_tokens} of the prompt, {cached_tokens} of them cached; {completion_tokens} generated")
}

fn result(record: &RequestRecord) -> String {
    let total = ms(record.total_ms);
    let several = match record.responses {
        0 | 1 => String::new(),
        all => format!("; {} of {all} responses are complete", record.complete),
    };
    let first = record.first_token_ms.map(|first| format!(", the first text after {}", ms(first)));
    let first = first.unwrap_or_default();
    match &record.end {
        None => format!("it runs, since {total}{first}{several}"),
        Some(RequestEnd::Finished { reason }) => {
            let reason = reason.as_ref().map(|reason| format!(" ({reason})")).unwrap_or_default();
            format!("complete{reason} after {total}{first}{several}")
        }
        Some(RequestEnd::Failed { code, message, param }) => {
            let param = param.as_ref().map(|param| format!(", field {param}")).unwrap_or_default();
            let message = message
                .as_deref()
                .unwrap_or("its message may quote the request, so the log leaves it out; the client has it");
            format!("failed after {total}{first}{several}: {code}{param}: {message}")
        }
        Some(RequestEnd::ClientLeft) => format!("the client left after {total}{first}{several}"),
        Some(RequestEnd::Other) => format!("ended after {total}{first}{several}"),
    }
}

/// What the time of a request with one response went to.
fn spent(record: &RequestRecord) -> Option<String> {
    if record.responses > 1 {
        return None;
    }
    let end = record.total_ms;
    let held: f64 = record.holds.iter().map(|hold| hold.until_ms.unwrap_or(end) - hold.from_ms).sum();
    let mut parts = vec![(held, "held")];
    let (last, earlier) = record.attempts.split_last()?;
    let span = |attempt: &AttemptRecord| attempt.ended_ms.unwrap_or(end) - attempt.sent_ms;
    parts.push((earlier.iter().map(span).sum(), "in earlier attempts"));
    let mut since = last.sent_ms;
    for (until, words) in [
        (last.prepared_ms, "to prepare the prompt"),
        (last.started_ms, "in the engine's queue"),
        (last.first_token_ms, "until the first text"),
        (last.ended_ms, "for the rest"),
    ] {
        if let Some(until) = until {
            parts.push((until - since, words));
            since = until;
        }
    }
    let shown = parts.iter().filter(|(time, _)| *time >= 0.05);
    let shown: Vec<String> = shown.map(|(time, words)| format!("{} {words}", ms(*time))).collect();
    (!shown.is_empty()).then(|| shown.join(", "))
}

/// What happened, by time.
fn timeline(record: &RequestRecord) -> Vec<(f64, String)> {
    let mut events = vec![(0.0, "arrived".to_owned())];
    let whose = |response: u32| match record.responses {
        0 | 1 => String::new(),
        _ => format!("response {}: ", response + 1),
    };
    for hold in &record.holds {
        let whose = whose(hold.response);
        events.push((hold.from_ms, format!("{whose}held for {}: {}", hold.deployment, hold.reason)));
    }
    for attempt in &record.attempts {
        let whose = whose(attempt.response);
        let mut add =
            |at: Option<f64>, words: String| events.extend(at.map(|at| (at, format!("{whose}{words}"))));
        let AttemptRecord { number, node, group, epoch, address, .. } = attempt;
        let sent = match (&attempt.provider, &attempt.pipeline) {
            (Some(provider), _) => {
                let ProviderRecord { name, model, zone, .. } = &**provider;
                format!("attempt {number}: left for ModelProvider {name} (zone {zone}), model {model}")
            }
            (None, Some(pipeline)) => {
                let PipelineRecord { name, run } = &**pipeline;
                format!("attempt {number}: run {run} of {name} started")
            }
            (None, None) => {
                format!("attempt {number}: sent to node {node} ({group}, epoch {epoch}, {address})")
            }
        };
        add(Some(attempt.sent_ms), sent);
        add(attempt.prepared_ms, "prompt prepared by the engine".to_owned());
        let cached =
            attempt.cached_tokens.map(|cached| format!(", {cached} of them cached")).unwrap_or_default();
        let prompt = attempt.prompt_tokens.map(|tokens| format!(": {tokens} tokens of the prompt{cached}"));
        add(attempt.started_ms, format!("left the engine's queue{}", prompt.unwrap_or_default()));
        add(attempt.first_token_ms, "first text".to_owned());
        let ended = match &attempt.outcome {
            None => continue,
            Some(AttemptOutcome::Answered) => format!("attempt {number}: complete"),
            Some(AttemptOutcome::Busy { message }) => {
                format!("attempt {number}: the engine is full: {message}")
            }
            Some(AttemptOutcome::Lost { message, .. }) => format!("attempt {number}: lost: {message}"),
            Some(AttemptOutcome::Rejected { code }) => format!("attempt {number}: refused: {code}"),
            Some(AttemptOutcome::Cancelled) => format!("attempt {number}: cancelled"),
            Some(AttemptOutcome::Overtaken) => format!("attempt {number}: cancelled, another one was first"),
            Some(AttemptOutcome::Other) => format!("attempt {number}: ended"),
        };
        add(attempt.ended_ms, ended);
    }
    let end = match &record.end {
        None => "it still runs",
        Some(RequestEnd::Finished { .. } | RequestEnd::Other) => "request complete",
        Some(RequestEnd::Failed { .. }) => "request failed",
        Some(RequestEnd::ClientLeft) => "the client left",
    };
    events.push((record.total_ms, end.to_owned()));
    // Stable: what happened in one microsecond stays in its order.
    events.sort_by(|(a, _), (b, _)| a.total_cmp(b));
    events
}

/// The replicas that an attempt could have gone to, with their scores.
fn candidates(text: &mut String, attempt: &AttemptRecord) {
    if attempt.candidates.is_empty() {
        return;
    }
    let unit = attempt.candidates.iter().find_map(|one| Some(&one.score.as_ref()?.unit));
    let unit = unit.map(|unit| format!("; scores in {unit}, the lowest wins")).unwrap_or_default();
    let title = format!("Candidates of attempt {}: replicas of {}{unit}", attempt.number, attempt.deployment);
    text.push('\n');
    paragraph(text, "", &title);
    let cell = |value: &str| {
        let value = value.replace(char::is_control, "?");
        match value.char_indices().nth(MAX_CELL_CHARS) {
            None => value,
            // The end tells replicas apart.
            Some(_) => {
                let skipped = value.chars().count() + 1 - MAX_CELL_CHARS;
                format!("…{}", value.chars().skip(skipped).collect::<String>())
            }
        }
    };
    let score = |candidate: &EndpointScore| match &candidate.score {
        None => "-".to_owned(),
        Some(score) => format!("{:.1}", score.total),
    };
    let head = ["", "NODE", "GROUP", "SCORE", ""].map(str::to_owned).to_vec();
    let rows = attempt.candidates.iter().map(|candidate| {
        let (mark, state) = match (candidate.chosen, candidate.backed_off) {
            (true, _) => ("*", "chosen"),
            (false, true) => ("", "failed before"),
            (false, false) => ("", ""),
        };
        vec![
            mark.to_owned(),
            cell(&candidate.node),
            cell(&candidate.group),
            score(candidate),
            state.to_owned(),
        ]
    });
    let table = format_table(&std::iter::once(head).chain(rows).collect::<Vec<_>>());
    let mut lines = table.lines();
    let _ = writeln!(text, "{}", lines.next().unwrap_or_default());
    for (line, candidate) in lines.zip(&attempt.candidates) {
        let _ = writeln!(text, "{line}");
        let parts = candidate.score.iter().flat_map(|score| &score.parts);
        let parts: Vec<String> = parts.map(|part| format!("{} {:.1}", part.name, part.value)).collect();
        if !parts.is_empty() {
            paragraph(text, "        ", &parts.join(", ").replace(char::is_control, "?"));
        }
    }
    if attempt.candidates_left_out > 0 {
        let _ = writeln!(text, "    and {} more", attempt.candidates_left_out);
    }
}

/// What was decided, and why, in sentences.
fn decisions(record: &RequestRecord) -> Vec<String> {
    let mut all = Vec::new();
    for RuleMismatch { rule, reason } in record.route.iter().flat_map(|route| &route.mismatches) {
        all.push(format!("The rule {rule} does not match it: {reason}."));
    }
    if let Some(first) = record.holds.first() {
        let held: f64 =
            record.holds.iter().map(|hold| hold.until_ms.unwrap_or(record.total_ms) - hold.from_ms).sum();
        let left_out = match record.holds_left_out {
            0 => String::new(),
            more => format!(" ({more} of the reasons are left out)"),
        };
        all.push(format!(
            "The gateway held it for {}, because no replica of {} could take it{left_out}: {}.",
            ms(held),
            first.deployment,
            reasons(record)
        ));
    }
    if let Some(age) = record.cached_response_ms {
        let age = Duration::from_millis(age as u64);
        all.push(format!("It got an answer that its ModelRoute keeps, {age:?} old; no engine was asked."));
    }
    for SkippedTarget { provider, model, reason } in &record.skipped {
        all.push(format!("ModelProvider {provider} was not asked for {model}: {reason}."));
    }
    for attempt in &record.attempts {
        if let Some(provider) = &attempt.provider {
            all.extend(departure(attempt, provider));
            continue;
        }
        if let Some(PipelineRecord { name, run }) = attempt.pipeline.as_deref() {
            all.push(format!(
                "Run {run} of {name} was started; `russet pipeline logs` shows its steps, which are requests of their own."
            ));
            continue;
        }
        all.push(format!("Attempt {} went to node {}: {}.", attempt.number, attempt.node, choice(attempt)));
        match &attempt.outcome {
            Some(AttemptOutcome::Busy { .. }) => {
                all.push(format!("Node {} was full, so the gateway looked for another replica.", attempt.node));
            }
            Some(AttemptOutcome::Lost { after_tokens, .. }) => all.push(format!(
                "Node {} was lost after {after_tokens} tokens of the response, so the gateway looked for a replica \
                 to go on.",
                attempt.node
            )),
            Some(AttemptOutcome::Overtaken) => all.push(format!(
                "The ModelRoute hedges: node {} had no first token in time, or later than another replica that got \
                 the request too.",
                attempt.node
            )),
            Some(AttemptOutcome::Rejected { code }) => {
                all.push(format!("No other replica would do better with {code}, so the gateway tried none."));
            }
            _ => {}
        }
    }
    if record.attempts_left_out > 0 {
        all.push(format!("{} attempts between these are left out.", record.attempts_left_out));
    }
    if record.attempts.is_empty() && matches!(record.end, Some(RequestEnd::Failed { .. })) {
        all.push("It was not sent to any engine.".to_owned());
    }
    all
}

/// Why an attempt went to a provider, and what came of it.
fn departure(attempt: &AttemptRecord, provider: &ProviderRecord) -> Vec<String> {
    let ProviderRecord { name, zone, limit, limit_by, .. } = provider;
    let number = attempt.number;
    let mut all = vec![format!(
        "Attempt {number} left the cluster for ModelProvider {name} in the zone {zone}, the first target that could answer; the \
         request may go as far as {limit}, by {limit_by}."
    )];
    if let Some(AttemptOutcome::Busy { .. } | AttemptOutcome::Lost { .. }) = &attempt.outcome {
        all.push(format!("ModelProvider {name} did not answer, so the gateway went on to the next target."));
    }
    all
}

/// Each reason of a hold once.
fn reasons(record: &RequestRecord) -> String {
    let mut reasons: Vec<&str> = record.holds.iter().map(|hold| hold.reason.as_str()).collect();
    let mut known = std::collections::HashSet::new();
    reasons.retain(|reason| known.insert(*reason));
    reasons.join("; then ")
}

/// Why an attempt went to its replica.
fn choice(attempt: &AttemptRecord) -> String {
    let backed_off = attempt.candidates.iter().filter(|one| one.backed_off && !one.chosen).count();
    let all = attempt.candidates.len() + attempt.candidates_left_out as usize;
    let score = attempt.candidates.iter().find(|one| one.chosen).and_then(|one| one.score.as_ref());
    let why = match (all.saturating_sub(backed_off), backed_off, score) {
        (0 | 1, 0, _) => format!("{} has no other replica", attempt.deployment),
        (0 | 1, 1, _) => "the other replica had just failed".to_owned(),
        (0 | 1, failed, _) => format!("the {failed} other replicas had just failed"),
        (several, _, Some(score)) => {
            format!("it had the lowest score of {several} replicas, {:.1} {}", score.total, score.unit)
        }
        (several, _, None) => format!("it was the least busy of {several} replicas"),
    };
    match attempt.resumed_after_tokens {
        0 => why,
        tokens => format!("{why}; it went on after {tokens} tokens"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As the gateway wrote it, of a request that was held, whose engine was lost, and that another one resumed.
    const RECORDED: &str = include_str!("recorded.json");

    #[test]
    fn a_recorded_request_is_printed_as_people_read_it() {
        let record: RequestRecord = serde_json::from_str(RECORDED).unwrap();
        let text = render(&record);
        assert_eq!(text, include_str!("recorded.txt"), "\n{text}");
        assert!(text.lines().all(|line| line.chars().count() <= WIDTH));
    }

    #[test]
    fn the_rules_of_a_route_are_said() {
        let json = r#"{"model": "auto", "route": {
            "model_route": "default/auto", "pattern": "auto", "targets": ["coder"], "rule": "code",
            "mismatches": [{"rule": "deep", "reason": "its complexity is 12 %, not above 80 %"}],
            "request": {"task": "code", "complexity": 0.12, "prompt_tokens": 40, "tools": 2, "complexity_parts":
                [{"name": "code", "value": 0.12}, {"name": "tools", "value": 0.0}]}}}"#;
        let text = render(&serde_json::from_str(json).unwrap());
        for expected in [
            "Model      auto, a name (`auto`) of ModelRoute default/auto by the rule code\n",
            "Routed by  task code; complexity 0.12 (code 0.12); about 40 tokens; tools: 2\n",
            "  - The rule deep does not match it: its complexity is 12 %, not above 80 %.\n",
        ] {
            assert!(text.contains(expected), "{expected}{text}");
        }
        let without =
            r#"{"model": "auto", "route": {"model_route": "default/auto", "request": {"task": "chat"}}}"#;
        let text = render(&serde_json::from_str(without).unwrap());
        assert!(text.contains("none of whose rules\n           matches, with the targets"), "{text}");
    }

    #[test]
    fn a_departure_is_said_with_who_allowed_it() {
        let json = r#"{"model": "auto",
            "skipped": [{"provider": "default/q", "model": "a:free", "reason": "nothing of its rate limit remains until noon"}],
            "attempts": [
            {"number": 1, "sent_ms": 1, "ended_ms": 2, "outcome": {"kind": "lost", "message": "ModelProvider default/p: 503", "after_tokens": 0},
             "provider": {"name": "default/p", "model": "org/big", "zone": "Cloud", "limit": "Cloud",
                          "limit_by": "spec.zone of ModelRoute default/auto"}}]}"#;
        let text = render(&serde_json::from_str(json).unwrap());
        for expected in [
            "attempt 1: left for ModelProvider default/p (zone Cloud), model org/big",
            "Attempt 1 left the cluster for ModelProvider default/p in the zone Cloud",
            "as far as Cloud, by spec.zone of ModelRoute default/auto.",
            "ModelProvider default/p did not answer, so the gateway went on",
            "ModelProvider default/q was not asked for a:free: nothing of its rate limit remains until noon.",
        ] {
            let flat = text.split_whitespace().collect::<Vec<_>>().join(" ");
            assert!(flat.contains(expected), "{expected}\n{text}");
        }
    }

    #[test]
    fn other_ends_are_said_and_control_characters_are_not() {
        for (json, expected) in [
            (r#"{"total_ms": 5}"#, "Result     it runs, since 5.0 ms\n"),
            (r#"{"end": {"kind": "client_left"}, "total_ms": 5}"#, "the client left after 5.0 ms"),
            (r#"{"end": {"kind": "new"}}"#, "ended after 0.0 ms"),
            (
                r#"{"end": {"kind": "failed", "code": "invalid_request", "param": "stop"}}"#,
                "field stop: its message may",
            ),
            (r#"{"end": {"kind": "failed", "code": "quota_exceeded"}}"#, "It was not sent to any engine."),
            (r#"{"model": "a\u001b[2Jb"}"#, "Model      a?[2Jb\n"),
        ] {
            let text = render(&serde_json::from_str(json).unwrap());
            assert!(text.contains(expected), "{json}: {text}");
            assert!(text.lines().all(|line| line.chars().count() <= WIDTH), "{text}");
        }
    }
}
