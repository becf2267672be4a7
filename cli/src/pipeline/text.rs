//! Runs, their steps, and what steps make, as text for people. Models wrote some of it, so nothing in it reaches a
//! terminal as a command, and nothing in it can pass for another part of what is shown.

use jiff::Timestamp;
use russet_apiserver::table::human_duration;
use russet_crds::conditions::{Type, get};
use russet_crds::{PipelineRun, StepStatus, StepUsage};
use serde_json::Value;

use crate::energy_text::watt_hours;
use crate::get::format_table;

/// Columns of one level of a JSON value.
const INDENT: usize = 2;
/// Fewest characters in a line of a text, however deep in a value it is.
const MIN_LINE_CHARS: usize = 20;

/// The runs, one a row.
pub fn run_table(runs: &[PipelineRun], now: Timestamp) -> String {
    let header = ["NAME", "PIPELINE", "STEPS", "AT", "READY", "REASON", "TOKENS", "COST", "ENERGY", "AGE"];
    let rows = runs.iter().map(|run| {
        let status = run.status.clone().unwrap_or_default();
        let ready = get(&status.conditions, Type::Ready);
        let [tokens, cost, energy] = usage(status.usage.as_ref());
        let created = run.metadata.creation_timestamp.as_ref();
        vec![
            run.metadata.name.clone().unwrap_or_default(),
            run.spec.pipeline_ref.name.clone(),
            status.progress.unwrap_or_default(),
            status.step.unwrap_or_default(),
            ready.map(|ready| ready.status.clone()).unwrap_or_default(),
            ready.map(|ready| ready.reason.clone()).unwrap_or_default(),
            tokens,
            cost,
            energy,
            created.map(|created| span(created.0, now)).unwrap_or_default(),
        ]
    });
    table(&header, rows)
}

/// The steps of a run, one a row.
pub fn step_table(steps: &[StepStatus], now: Timestamp) -> String {
    let header = ["STEP", "STATE", "ITEMS", "TIME", "TOKENS", "COST", "ENERGY", "BY", "MESSAGE"];
    let rows = steps.iter().map(|step| {
        let [tokens, cost, energy] = usage(step.usage.as_ref());
        vec![
            step.name.clone(),
            format!("{:?}", step.state),
            step.items.clone().unwrap_or_default(),
            step_time(step, now).unwrap_or_default(),
            tokens,
            cost,
            energy,
            step.decided_by.clone().unwrap_or_default(),
            step.message.clone().unwrap_or_default(),
        ]
    });
    table(&header, rows)
}

fn table(header: &[&str], rows: impl Iterator<Item = Vec<String>>) -> String {
    let header: Vec<String> = header.iter().map(|name| (*name).to_owned()).collect();
    let rows = rows.map(|row| row.iter().map(|cell| one_line(cell)).collect());
    format_table(&std::iter::once(header).chain(rows).collect::<Vec<_>>())
}

/// Tokens of answers, as `russet get` has them, the cost, and the energy.
fn usage(usage: Option<&StepUsage>) -> [String; 3] {
    let Some(StepUsage { prompt_tokens: _, completion_tokens, cost, millijoules, electricity: _ }) = usage
    else {
        return Default::default();
    };
    let cost = cost.map(|cost| cost.to_string()).unwrap_or_default();
    [completion_tokens.to_string(), cost, millijoules.map(watt_hours).unwrap_or_default()]
}

/// How long a step took, or has taken by `now`.
pub fn step_time(step: &StepStatus, now: Timestamp) -> Option<String> {
    let started = step.started_at.as_ref()?.0;
    Some(span(started, step.finished_at.as_ref().map_or(now, |finished| finished.0)))
}

fn span(from: Timestamp, to: Timestamp) -> String {
    human_duration(to.as_second() - from.as_second())
}

/// A text on one line.
pub fn one_line(text: &str) -> String {
    printable(&text.split_whitespace().collect::<Vec<_>>().join(" "))
}

/// A text without what controls a terminal, reorders the text or is invisible: it is escaped. Newlines stay.
pub fn printable(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '\n' => shown.push(letter),
            '\t' => shown.push_str("    "),
            _ if is_hidden(letter) => shown.extend(letter.escape_default()),
            _ => shown.push(letter),
        }
    }
    shown
}

/// Controls, the characters that override the direction of a text, separators, and those without a glyph. The joiners
/// stay: languages and emoji need them.
fn is_hidden(letter: char) -> bool {
    letter.is_control()
        || matches!(
            letter,
            '\u{61c}'
                | '\u{200b}'
                | '\u{2028}'..='\u{202e}'
                | '\u{2060}'..='\u{206f}'
                | '\u{feff}'
                | '\u{fff9}'..='\u{fffb}'
                | '\u{e0000}'..='\u{e0fff}'
        )
}

/// The beginning of an output: JSON as it is read best, any other text as it is.
pub fn output(bytes: &[u8], is_whole: bool, width: usize) -> String {
    if is_whole && let Ok(value @ (Value::Object(_) | Value::Array(_))) = serde_json::from_slice(bytes) {
        return readable(&value, width);
    }
    let mut text = String::from_utf8_lossy(bytes).into_owned();
    // The last character may be cut.
    while !is_whole && text.ends_with(char::REPLACEMENT_CHARACTER) {
        text.pop();
    }
    printable(text.trim_end_matches('\n'))
}

/// What a step is about to do, all of it.
pub fn action(bytes: &[u8], width: usize) -> String {
    match serde_json::from_slice::<Value>(bytes) {
        Ok(value) => readable(&value, width),
        Err(_) => block(&String::from_utf8_lossy(bytes), 0, width),
    }
}

/// A JSON value. A text with newlines, or too long for a line, is a [`block`].
fn readable(value: &Value, width: usize) -> String {
    let mut text = String::new();
    write_value(&mut text, value, 0, 0, width);
    text
}

/// Writes a value that begins in column `column`, on a line that is indented by `indent`.
fn write_value(text: &mut String, value: &Value, indent: usize, column: usize, width: usize) {
    let pad = " ".repeat(indent + INDENT);
    match value {
        Value::Object(fields) if !fields.is_empty() => {
            text.push('{');
            for (name, value) in fields {
                let name = format!("{pad}{}: ", quoted(name));
                text.push('\n');
                text.push_str(&name);
                write_value(text, value, indent + INDENT, name.chars().count(), width);
            }
            text.push_str(&format!("\n{}}}", " ".repeat(indent)));
        }
        // Vectors would fill the screen.
        Value::Array(items) if !items.iter().all(Value::is_number) => {
            text.push('[');
            for item in items {
                text.push('\n');
                text.push_str(&pad);
                write_value(text, item, indent + INDENT, indent + INDENT, width);
            }
            text.push_str(&format!("\n{}]", " ".repeat(indent)));
        }
        Value::String(string) => {
            let line = quoted(string);
            match !string.contains('\n') && column + line.chars().count() <= width {
                true => text.push_str(&line),
                false => text.push_str(&format!("|\n{}", block(string, indent + INDENT, width))),
            }
        }
        other => text.push_str(&other.to_string()),
    }
}

fn quoted(text: &str) -> String {
    printable(&Value::from(text).to_string())
}

/// A text of several lines. Each begins with `| `, and where a line is too long for the screen, its rest with `> `: so
/// no line of a text passes for something beside it.
pub fn block(text: &str, indent: usize, width: usize) -> String {
    let pad = " ".repeat(indent);
    let most = width.saturating_sub(indent + 2).max(MIN_LINE_CHARS);
    let mut lines = Vec::new();
    for line in text.split('\n') {
        let letters: Vec<char> = printable(line).chars().collect();
        let mut mark = '|';
        // An empty line has no chunk.
        for part in letters.chunks(most).chain(letters.is_empty().then_some(&[][..])) {
            let part: String = part.iter().collect();
            lines.push(format!("{pad}{mark} {part}").trim_end().to_owned());
            mark = '>';
        }
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use russet_crds::conditions::{Reason, set};
    use russet_crds::{LocalReference, PipelineRunSpec, PipelineRunStatus, StepState};
    use serde_json::json;

    use super::*;

    fn time(seconds: i64) -> Timestamp {
        Timestamp::from_second(seconds).unwrap()
    }

    fn used(cost: Option<&str>) -> Option<StepUsage> {
        let cost = cost.map(|cost| cost.parse().unwrap());
        let millijoules = cost.map(|_| 9_000_000);
        Some(StepUsage { prompt_tokens: 900, completion_tokens: 120, cost, millijoules, electricity: None })
    }

    #[test]
    fn runs_have_their_progress_condition_and_use() {
        let pipeline_ref = LocalReference { name: "digest".to_owned() };
        let spec = PipelineRunSpec { pipeline_ref, attempt: 1, ..PipelineRunSpec::default() };
        let mut run = PipelineRun::new("digest-1", spec.clone());
        run.metadata.creation_timestamp = Some(Time(time(0)));
        let mut status = PipelineRunStatus {
            progress: Some("1/3".to_owned()),
            step: Some("send".to_owned()),
            usage: used(Some("0.25")),
            ..PipelineRunStatus::default()
        };
        set(&mut status.conditions, Type::Ready, false, Reason::Running, "", None, time(0));
        run.status = Some(status);
        let expected = "\
NAME       PIPELINE   STEPS   AT     READY   REASON    TOKENS   COST   ENERGY     AGE
digest-1   digest     1/3     send   False   Running   120      0.25   2.500 Wh   90s
new        digest
";
        assert_eq!(run_table(&[run, PipelineRun::new("new", spec)], time(90)), expected);
    }

    #[test]
    fn steps_have_their_state_time_and_message() {
        let step = |name: &str, state| StepStatus { name: name.to_owned(), state, ..StepStatus::default() };
        let steps = [
            StepStatus {
                items: Some("3/3".to_owned()),
                started_at: Some(Time(time(0))),
                finished_at: Some(Time(time(30))),
                usage: used(Some("0.10")),
                ..step("draft", StepState::Done)
            },
            StepStatus {
                started_at: Some(Time(time(30))),
                decided_by: Some("ann".to_owned()),
                usage: used(None),
                message: Some("the address\nanswers\u{7} 500".to_owned()),
                ..step("send", StepState::Running)
            },
            step("note", StepState::Pending),
        ];
        let expected = "\
STEP    STATE     ITEMS   TIME   TOKENS   COST   ENERGY     BY    MESSAGE
draft   Done      3/3     30s    120      0.10   2.500 Wh
send    Running           60s    120                        ann   the address answers\\u{7} 500
note    Pending
";
        assert_eq!(step_table(&steps, time(90)), expected);
    }

    #[test]
    fn controls_and_invisible_characters_are_escaped() {
        for (text, expected) in [
            ("plain ü 漢\n👩\u{200d}🚀", "plain ü 漢\n👩\u{200d}🚀"),
            ("\u{1b}[2J\u{9b}1A\r\u{7f}", "\\u{1b}[2J\\u{9b}1A\\r\\u{7f}"),
            ("a\u{202e}b\u{2066}c\u{200b}", "a\\u{202e}b\\u{2066}c\\u{200b}"),
            ("\u{e0041}\tx", "\\u{e0041}    x"),
        ] {
            assert_eq!(printable(text), expected);
        }
        assert_eq!(one_line(" a\n\tb\u{1b} "), "a b\\u{1b}");
    }

    #[test]
    fn an_action_shows_its_texts_as_lines() {
        let value = json!({
            "json": {"empty": [], "none": {}, "text": "Dear list,\n\nnews\n", "to": ["a@x", "b@x"], "tries": 2},
            "long": "0123456789".repeat(5),
            "method": "POST",
            "vector": [0.5, 1],
        });
        let expected = "\
{
  \"json\": {
    \"empty\": []
    \"none\": {}
    \"text\": |
      | Dear list,
      |
      | news
      |
    \"to\": [
      \"a@x\"
      \"b@x\"
    ]
    \"tries\": 2
  }
  \"long\": |
    | 0123456789012345678901234567890123
    > 4567890123456789
  \"method\": \"POST\"
  \"vector\": [0.5,1]
}";
        assert_eq!(action(value.to_string().as_bytes(), 40), expected);
        // A text cannot pass for a field beside it.
        let forged = json!({"a": "x\n  \"method\": \"GET\"", "b\n": "\u{1b}[A"});
        let expected = "{\n  \"a\": |\n    | x\n    |   \"method\": \"GET\"\n  \"b\\n\": \"\\u001b[A\"\n}";
        assert_eq!(action(forged.to_string().as_bytes(), 40), expected);
        assert_eq!(action(b"no JSON\n{", 40), "| no JSON\n| {");
    }

    #[test]
    fn an_output_is_json_or_the_text_up_to_the_cut() {
        for (bytes, is_whole, expected) in [
            (&b"{\"a\":1}"[..], true, "{\n  \"a\": 1\n}"),
            (b"{\"a\":1", false, "{\"a\":1"),
            (b"42", true, "42"),
            (b"A text.\n\nMore.\n", true, "A text.\n\nMore."),
            (&"aü".as_bytes()[..2], false, "a"),
            (b"a\x1b[2J", true, "a\\u{1b}[2J"),
        ] {
            assert_eq!(output(bytes, is_whole, 40), expected);
        }
    }
}
