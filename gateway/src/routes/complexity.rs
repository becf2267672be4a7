//! How complex a request is, from 0 to 1, and what it is for: by features that a person can count as well, without a
//! model. Pure. Both look at all that the user said, oldest first, and take the most of it, so that neither falls back
//! while a conversation goes on: another model would have to read all of it again.

use std::sync::LazyLock;

use regex::Regex;
use russet_crds::RouteTask;
use russet_wire::request::{GenerationRequest, RawPrompt};

/// Of a text so many bytes are looked at.
const MAX_TEXT_BYTES: usize = 32 * 1024;
/// Of all texts together. The oldest count, so that what counted once counts again.
const MAX_BYTES: usize = 256 * 1024;
/// Bytes of a token, in the mean of languages and code.
pub(crate) const BYTES_PER_TOKEN: usize = 4;

/// Words that set conditions.
static CONSTRAINTS: LazyLock<Option<Regex>> = LazyLock::new(|| {
    words(
        "must|must not|exactly|at least|at most|only|without|ensure|require[sd]?|never|always|except|unless|\
           muss|genau|mindestens|höchstens|nur|ohne|niemals|immer|außer|doit|exactement|seulement|sans|debe|sin",
    )
});
/// Words that ask for thinking.
static REASONING: LazyLock<Option<Regex>> = LazyLock::new(|| {
    words(
        "prove|proof|derive|why|step by step|trade-?offs?|compare|analy[sz]e|optimi[sz]e|design|architecture|debug|\
           root cause|plan|evaluate|theorem|algorithm|complexity|strategy|refactor|\
           beweise?|herleiten|warum|schrittweise|vergleiche|analysiere|entwirf|ursache|bewerte|pourquoi|compare[rz]|\
           démontre[rz]?|por qué|demuestra|compara",
    )
});
/// Names of tools that change files or run commands.
const CODING_TOOLS: [&str; 9] =
    ["edit", "patch", "bash", "shell", "exec", "str_replace", "write_file", "read_file", "terminal"];
/// So many words ask for thinking, where one may be a manner of speaking.
const REASONING_WORDS: usize = 2;

fn words(alternatives: &str) -> Option<Regex> {
    // Bounds of ASCII: those of Unicode take a hundred times as long where a text has other letters.
    Regex::new(&format!(r"(?i)(?-u:\b)(?:{alternatives})(?-u:\b)")).ok()
}

/// What is counted: its name, its share of the score, and the number that gets all of it. The shares add up to 1.1: who has
/// nearly everything is at the top.
const FEATURES: [(&str, f64, f64); 6] = [
    ("length", 0.25, 1500.0),
    ("code", 0.15, 1.0),
    ("tools", 0.10, 8.0),
    ("constraints", 0.20, 5.0),
    ("questions", 0.10, 4.0),
    ("reasoning", 0.30, 3.0),
];

/// How complex a request is.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Complexity {
    /// Numbers of the features, in their order.
    counts: [usize; FEATURES.len()],
}

impl Complexity {
    /// From 0 to 1, in hundredths.
    pub fn score(&self) -> f64 {
        let sum: f64 = self.parts().map(|(_, part)| part).sum();
        (sum.min(1.0) * 100.0).round() / 100.0
    }

    /// The same in percent.
    pub fn percent(&self) -> u32 {
        (self.score() * 100.0).round() as u32
    }

    /// What each feature adds to the score.
    pub fn parts(&self) -> impl Iterator<Item = (&'static str, f64)> {
        let counts = self.counts;
        FEATURES
            .into_iter()
            .zip(counts)
            .map(|((name, share, full), count)| (name, share * (count as f64 / full).min(1.0)))
    }
}

/// How complex a request is, and what for.
pub(super) fn classify(request: &GenerationRequest) -> (Complexity, RouteTask) {
    let mut most = Complexity::default();
    let mut task = RouteTask::Chat;
    let tools = request.tools.len();
    let is_coding = |name: &str| {
        let name = name.to_lowercase();
        CODING_TOOLS.iter().any(|word| name.contains(word))
    };
    if request.tools.iter().any(|tool| is_coding(&tool.name)) {
        task = task.max(RouteTask::Code);
    }
    if wants_much_thinking(&request.template_arguments) {
        task = task.max(RouteTask::Reasoning);
    }
    let mut left = MAX_BYTES;
    for text in user_texts(request) {
        let length = text.len();
        let text = beginning(text, MAX_TEXT_BYTES.min(left));
        left -= text.len();
        let one = of_text(text, length, tools);
        let [_, code, .., reasoning] = one.counts;
        if code > 0 {
            task = task.max(RouteTask::Code);
        }
        if reasoning >= REASONING_WORDS {
            task = task.max(RouteTask::Reasoning);
        }
        if one.score() > most.score() {
            most = one;
        }
        if left == 0 {
            break;
        }
    }
    if let Some(RawPrompt::Tokens(tokens)) = &request.raw_prompt {
        most.counts[0] = tokens.len();
    }
    (most, task)
}

/// What the user wrote, oldest first.
fn user_texts(request: &GenerationRequest) -> impl Iterator<Item = &str> {
    let raw = match &request.raw_prompt {
        Some(RawPrompt::Text(text)) => Some(text.as_str()),
        Some(RawPrompt::Tokens(_)) | None => None,
    };
    let said = request.messages.iter().filter(|message| message.role == "user");
    raw.into_iter().chain(said.map(|message| message.content.as_str())).filter(|text| !text.is_empty())
}

/// The complexity of a text of `length` bytes that begins like this.
fn of_text(text: &str, length: usize, tools: usize) -> Complexity {
    let count =
        |regex: &LazyLock<Option<Regex>>| regex.as_ref().map_or(0, |regex| regex.find_iter(text).count());
    let code = usize::from(text.contains("```") || text.lines().filter(|line| is_code(line)).count() >= 3);
    let questions = text.matches(['?', '？', '؟']).count();
    let counts = [length / BYTES_PER_TOKEN, code, tools, count(&CONSTRAINTS), questions, count(&REASONING)];
    Complexity { counts }
}

/// Whether a line looks like one of a program.
fn is_code(line: &str) -> bool {
    let line = line.trim_end();
    line.ends_with([';', '{', '}']) || line.ends_with("):") || line.starts_with("import ")
}

/// Whether the variables of the chat template ask for a high effort.
fn wants_much_thinking(template_arguments: &str) -> bool {
    #[derive(serde::Deserialize)]
    struct EffortArguments {
        #[serde(default)]
        reasoning_effort: serde_json::Value,
    }
    let arguments: Option<EffortArguments> = serde_json::from_str(template_arguments).ok();
    let effort = arguments.as_ref().and_then(|one| one.reasoning_effort.as_str());
    matches!(effort, Some("high" | "xhigh" | "max"))
}

/// The first bytes of a text, whole characters of them.
fn beginning(text: &str, bytes: usize) -> &str {
    let end = (0..=bytes.min(text.len())).rev().find(|end| text.is_char_boundary(*end));
    &text[..end.unwrap_or(0)]
}

#[cfg(test)]
mod tests {
    use russet_wire::conversation::{Message, Tool};

    use super::*;

    fn of(messages: &[(&str, &str)], tools: &[&str]) -> (f64, RouteTask) {
        let request = GenerationRequest {
            messages: messages.iter().map(|(role, text)| Message::new(*role, *text)).collect(),
            tools: tools.iter().map(|name| Tool { name: (*name).into(), ..Tool::default() }).collect(),
            ..GenerationRequest::default()
        };
        let (complexity, task) = classify(&request);
        (complexity.score(), task)
    }

    const HARD: &str = "Prove that the algorithm terminates, and analyse its complexity step by step. The proof must not \
        use induction, only invariants; state at least two of them, exactly as they are needed, without the axiom of \
        choice. Why is the bound tight? Compare it with the trivial one: where do they differ?";

    #[test]
    fn questions_are_ranked_as_people_would() {
        use RouteTask::{Chat, Code, Reasoning};
        let program = "Fix it:\n```rust\nfn main() { panic!() }\n```";
        for (text, from, to, task) in [
            ("Hi", 0.0, 0.01, Chat),
            ("What is the capital of France?", 0.02, 0.05, Chat),
            ("Was ist die Hauptstadt von Frankreich?", 0.02, 0.05, Chat),
            (program, 0.15, 0.2, Code),
            ("let a = 1;\nlet b = 2;\nprint(a + b);\nWhat does it print?", 0.15, 0.25, Code),
            ("Why is the sky blue?", 0.1, 0.2, Chat),
            ("Compare both, and analyse the trade-offs.", 0.3, 0.35, Reasoning),
            ("Vergleiche beide und bewerte sie.", 0.2, 0.25, Reasoning),
            (HARD, 0.55, 0.7, Reasoning),
        ] {
            let (score, found) = of(&[("user", text)], &[]);
            assert!((from..=to).contains(&score) && found == task, "{text}: {score} {found:?}");
        }
        let (with_tools, task) = of(&[("user", HARD)], &["Bash", "Read", "Edit", "a", "b", "c", "d", "e"]);
        assert!(with_tools > 0.65 && task == Reasoning, "{with_tools}");
        let whole = format!("{HARD}\n```\nx\n```\n{}", "and more of it. ".repeat(500));
        assert_eq!(of(&[("user", &whole)], &["a"; 8]).0, 1.0);
        // Whoever wrote the instructions is not who asks.
        assert_eq!(of(&[("system", HARD), ("user", "Hi")], &[]), (0.0, Chat));
        assert_eq!(of(&[("user", "Hi")], &["apply_patch"]).1, Code);
    }

    #[test]
    fn neither_falls_while_a_conversation_goes_on() {
        let mut messages = vec![("user", "Hi"), ("assistant", HARD), ("tool", HARD)];
        let mut last = of(&messages, &[]);
        assert_eq!(last, (0.0, RouteTask::Chat));
        let long = "?".repeat(MAX_TEXT_BYTES);
        for text in
            ["```\na\n```", "Hi", HARD, "Thanks", &long, &long, "```b```", "Hi"].into_iter().cycle().take(40)
        {
            messages.push(("user", text));
            let now = of(&messages, &[]);
            assert!(now.0 >= last.0 && now.1 >= last.1, "{now:?} after {last:?}");
            last = now;
        }
        assert_eq!(last.1, RouteTask::Reasoning);
    }

    #[test]
    fn an_effort_asks_for_thinking() {
        let task = |arguments: &str| {
            let request = GenerationRequest { template_arguments: arguments.into(), ..Default::default() };
            classify(&request).1
        };
        assert_eq!(task(r#"{"reasoning_effort": "high"}"#), RouteTask::Reasoning);
        for other in ["", "{", r#"{"reasoning_effort": "low"}"#, r#"{"reasoning_effort": 7}"#, "[]"] {
            assert_eq!(task(other), RouteTask::Chat, "{other}");
        }
    }

    #[test]
    fn texts_of_any_size_and_script_are_counted() {
        let wide = "ä".repeat(MAX_BYTES);
        let (score, _) = of(&[("user", &wide), ("user", "why why why")], &[]);
        assert!((0.25..=0.35).contains(&score), "{score}");
        let tokens = GenerationRequest {
            raw_prompt: Some(RawPrompt::Tokens(vec![1; 3000])),
            ..GenerationRequest::default()
        };
        assert_eq!(classify(&tokens).0.percent(), 25);
        let shares: f64 = FEATURES.iter().map(|(_, share, _)| share).sum();
        assert!((shares - 1.1).abs() < 1e-9);
    }
}
