//! What rules of ModelRoutes know of a request. No text of it is in here, so that the request log may show all.

use std::collections::BTreeMap;
use std::hash::Hasher as _;

use axum::http::{HeaderMap, HeaderName};
use jiff::Timestamp;
use russet_crds::{RouteTask, names};
use russet_wire::conversation::{Message, Tool};
use russet_wire::request::{GenerationRequest, RawPrompt};
use twox_hash::xxhash3_64::Hasher;

use super::complexity::{BYTES_PER_TOKEN, Complexity, classify};
use crate::error::{ErrorKind, GatewayError};
use crate::zones::ZoneLimit;

/// Names the task of a request.
const TASK: HeaderName = HeaderName::from_static("x-russet-task");
/// Labels of a request, such as `team=blue,urgent=yes`.
pub(crate) const LABELS: HeaderName = HeaderName::from_static("x-russet-labels");
/// Most labels that a request brings.
const MAX_LABELS: usize = 16;
/// Most characters of a label's name: of Kubernetes' prefix, slash and name.
const MAX_NAME: usize = 317;
/// Most characters of a label's value, as in Kubernetes.
const MAX_VALUE: usize = 63;

/// Bytes of instructions that tell conversations apart. What changes in them comes late, so that prefixes can be cached.
const MAX_INSTRUCTIONS: usize = 1024;

/// The tasks by their names in headers and behind models' names.
const TASKS: [(&str, RouteTask); 4] = [
    ("chat", RouteTask::Chat),
    ("code", RouteTask::Code),
    ("reasoning", RouteTask::Reasoning),
    ("embed", RouteTask::Embed),
];

/// The name of a task.
pub fn task_name(task: RouteTask) -> &'static str {
    TASKS.iter().find(|(_, one)| *one == task).map_or("unknown", |(name, _)| name)
}

/// The task of this name.
pub(super) fn task_of(name: &str) -> Option<RouteTask> {
    TASKS.iter().find(|(one, _)| *one == name).map(|(_, task)| *task)
}

/// What the headers of a request say about its way.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RouteHeaders {
    task: Option<RouteTask>,
    labels: BTreeMap<String, String>,
}

impl RouteHeaders {
    /// Those of a request; an error names what is wrong with them.
    pub(crate) fn read(headers: &HeaderMap) -> Result<Self, GatewayError> {
        let text = |header: &HeaderName| match headers.get(header).map(|value| value.to_str()) {
            Some(Ok(text)) => Ok(text),
            Some(Err(_)) => Err(invalid(header, "is no ASCII text".to_owned())),
            None => Ok(""),
        };
        Self::parse(text(&TASK)?, text(&LABELS)?)
    }

    /// Those with these values; empty ones are absent.
    pub fn parse(task: &str, labels_text: &str) -> Result<Self, GatewayError> {
        let task = match task.trim() {
            "" => None,
            name => Some(task_of(name).ok_or_else(|| {
                let names = TASKS.map(|(name, _)| name).join(", ");
                invalid(&TASK, format!("names no task; there are {names}"))
            })?),
        };
        let mut labels = BTreeMap::new();
        for label in labels_text.split(',').map(str::trim).filter(|label| !label.is_empty()) {
            let (name, value) = label.split_once('=').unwrap_or((label, ""));
            if !is_name(name) || !is_value(value) {
                let message =
                    "is not like team=blue,urgent=yes, with names and values as Kubernetes' labels have them";
                return Err(invalid(&LABELS, message.to_owned()));
            }
            labels.insert(name.to_owned(), value.to_owned());
        }
        if labels.len() > MAX_LABELS {
            return Err(invalid(
                &LABELS,
                format!("has {} labels, and {MAX_LABELS} are the most", labels.len()),
            ));
        }
        Ok(Self { task, labels })
    }

    /// The value of the header of labels in a request, which later requests are to have too; an error names what is wrong with
    /// it.
    pub(crate) fn labels_text(headers: &HeaderMap) -> Result<String, GatewayError> {
        Self::read(headers)?;
        let text = headers.get(&LABELS).and_then(|value| value.to_str().ok());
        Ok(text.unwrap_or_default().to_owned())
    }

    /// The same with this task, where no header names one.
    pub fn or_task(self, task: Option<RouteTask>) -> Self {
        Self { task: self.task.or(task), ..self }
    }
}

fn invalid(header: &HeaderName, message: String) -> GatewayError {
    let message = format!("the header {header} {message}");
    GatewayError { param: Some(header.to_string()), ..GatewayError::new(ErrorKind::InvalidRequest, message) }
}

/// Whether it is a label's name, with a prefix or without.
fn is_name(name: &str) -> bool {
    let is_part = |part: &str| !part.is_empty() && part.chars().all(is_label_character);
    name.len() <= MAX_NAME && name.splitn(2, '/').all(is_part)
}

fn is_value(value: &str) -> bool {
    value.len() <= MAX_VALUE && value.chars().all(is_label_character)
}

fn is_label_character(character: char) -> bool {
    character.is_ascii_alphanumeric() || matches!(character, '-' | '_' | '.')
}

/// What rules look at.
#[derive(Clone, Debug, PartialEq)]
pub struct RequestFacts {
    /// What it is for.
    pub task: RouteTask,
    /// How complex it is.
    pub complexity: Complexity,
    /// Tokens of its prompt, estimated.
    pub prompt_tokens: u64,
    /// How many tools it offers.
    pub tools: usize,
    /// Its labels and those of its key, which come first.
    pub labels: BTreeMap<String, String>,
    /// Name of its AccessKey; none without one.
    pub key: Option<String>,
    /// Namespace of the AccessKey.
    pub key_namespace: Option<String>,
    /// How far from home it may be answered, as the labels of its key and of its headers say; the stricter counts.
    pub zone: Option<ZoneLimit>,
    /// The same for all requests of a conversation.
    pub conversation: u64,
    /// When it arrived.
    pub at: Timestamp,
}

/// Who asks.
#[derive(Clone, Copy, Debug, Default)]
pub struct FactsCaller<'a> {
    /// The name of the key.
    pub key: Option<&'a str>,
    /// Its namespace.
    pub namespace: Option<&'a str>,
    /// Its labels.
    pub labels: Option<&'a BTreeMap<String, String>>,
}

impl FactsCaller<'_> {
    /// What the label of the key says of how far its requests may go.
    pub(crate) fn zone_limit(&self) -> Option<ZoneLimit> {
        zone_of(self.labels, || format!("AccessKey {}", self.key.unwrap_or_default()))
    }
}

/// What labels say of how far from home a request may be answered.
fn zone_of(labels: Option<&BTreeMap<String, String>>, on: impl FnOnce() -> String) -> Option<ZoneLimit> {
    let value = labels?.get(names::LABEL_REQUEST_ZONE)?;
    Some(ZoneLimit::of_label(value, &on()))
}

impl RequestFacts {
    /// Those of a request for text. `session` is what its client names the conversation by, if it does.
    pub(crate) fn of(
        request: &GenerationRequest,
        headers: &RouteHeaders,
        caller: FactsCaller<'_>,
        session: Option<u64>,
        at: Timestamp,
    ) -> Self {
        let (complexity, task) = classify(request);
        Self {
            complexity,
            prompt_tokens: prompt_tokens(request),
            tools: request.tools.len(),
            conversation: conversation(request, caller, session),
            ..Self::new(task, headers, caller, at)
        }
    }

    /// Those of a request of one prompt that offers these tools.
    pub fn of_prompt(
        prompt: &str,
        tools: &[String],
        headers: &RouteHeaders,
        caller: FactsCaller<'_>,
        at: Timestamp,
    ) -> Self {
        let request = GenerationRequest {
            messages: vec![Message::new("user", prompt)],
            tools: tools.iter().map(|name| Tool { name: name.clone(), ..Tool::default() }).collect(),
            ..GenerationRequest::default()
        };
        Self::of(&request, headers, caller, None, at)
    }

    /// Those of a request for vectors or scores of texts of so many bytes.
    pub(crate) fn of_pooling(
        bytes: usize,
        headers: &RouteHeaders,
        caller: FactsCaller<'_>,
        at: Timestamp,
    ) -> Self {
        let prompt_tokens = tokens(bytes);
        Self { prompt_tokens, ..Self::new(RouteTask::Embed, headers, caller, at) }
    }

    fn new(task: RouteTask, headers: &RouteHeaders, caller: FactsCaller<'_>, at: Timestamp) -> Self {
        let of_header = zone_of(Some(&headers.labels), || "the request's headers".to_owned());
        let zone = match (caller.zone_limit(), of_header) {
            (Some(of_key), of_header) => Some(of_key.narrowed(of_header)),
            (None, of_header) => of_header,
        };
        let mut labels = headers.labels.clone();
        labels.extend(caller.labels.into_iter().flatten().map(|(name, value)| (name.clone(), value.clone())));
        Self {
            task: headers.task.unwrap_or(task),
            complexity: Complexity::default(),
            prompt_tokens: 0,
            tools: 0,
            labels,
            key: caller.key.map(str::to_owned),
            key_namespace: caller.namespace.map(str::to_owned),
            zone,
            conversation: 0,
            at,
        }
    }
}

/// The beginning of instructions that every request of a conversation repeats: some clients write the time or a version into
/// each, and what has no digit before it is older than that.
fn unchanging(instructions: &str) -> &[u8] {
    let bytes = instructions.as_bytes();
    let beginning = bytes.split(u8::is_ascii_digit).next().unwrap_or_default();
    beginning.get(..MAX_INSTRUCTIONS).unwrap_or(beginning)
}

/// Tokens of a prompt, estimated by its bytes.
fn prompt_tokens(request: &GenerationRequest) -> u64 {
    let messages = request.messages.iter().flat_map(Message::texts);
    let tools = request.tools.iter().flat_map(Tool::texts);
    let bytes = messages.chain(tools).map(str::len).sum();
    match &request.raw_prompt {
        Some(RawPrompt::Tokens(exactly)) => exactly.len() as u64,
        Some(RawPrompt::Text(text)) => tokens(text.len()),
        None => tokens(bytes),
    }
}

fn tokens(bytes: usize) -> u64 {
    bytes.div_ceil(BYTES_PER_TOKEN) as u64
}

/// The number of a conversation: by its caller and the session that its client names, else by what later requests of it
/// repeat, which is how its instructions begin and the first thing that the user said. What comes later, such as the first
/// answer, would tell more conversations apart, and change the number within each.
fn conversation(request: &GenerationRequest, caller: FactsCaller<'_>, session: Option<u64>) -> u64 {
    let mut hasher = Hasher::new();
    // With its length, so that no two lists of texts are one.
    let mut text = |text: &[u8]| {
        hasher.write_usize(text.len());
        hasher.write(text);
    };
    text(caller.namespace.unwrap_or_default().as_bytes());
    text(caller.key.unwrap_or_default().as_bytes());
    if let Some(session) = session {
        hasher.write_u64(session);
        return hasher.finish();
    }
    let of_role = |roles: &[&str]| request.messages.iter().find(|message| roles.contains(&&*message.role));
    text(of_role(&["system", "developer"]).map_or(b"", |message| unchanging(&message.content)));
    text(of_role(&["user"]).map_or(b"", |message| message.content.as_bytes()));
    match &request.raw_prompt {
        Some(RawPrompt::Text(text)) => hasher.write(text.as_bytes()),
        Some(RawPrompt::Tokens(tokens)) => tokens.iter().for_each(|token| hasher.write_u32(*token)),
        None => {}
    }
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(headers: &[(&'static str, &str)]) -> Result<RouteHeaders, String> {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.insert(*name, value.parse().unwrap());
        }
        RouteHeaders::read(&map).map_err(|error| error.message.to_string())
    }

    #[test]
    fn headers_name_a_task_and_labels() {
        let labels = |list: &[(&str, &str)]| -> BTreeMap<String, String> {
            list.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect()
        };
        assert_eq!(read(&[]), Ok(RouteHeaders::default()));
        let found =
            read(&[("x-russet-task", "code"), ("x-russet-labels", " team=blue , a.b/urgent,")]).unwrap();
        assert_eq!(found.task, Some(RouteTask::Code));
        assert_eq!(found.labels, labels(&[("a.b/urgent", ""), ("team", "blue")]));
        let many = (0..17).map(|number| format!("l{number}=1")).collect::<Vec<_>>().join(",");
        let long = format!("a={}", "b".repeat(64));
        for (header, value, expected) in [
            ("x-russet-task", "Code", "names no task; there are chat, code, reasoning, embed"),
            ("x-russet-labels", "=blue", "is not like team=blue"),
            ("x-russet-labels", "a/b/c=blue", "is not like team=blue"),
            ("x-russet-labels", "team=blue sky", "is not like team=blue"),
            ("x-russet-labels", &long, "is not like team=blue"),
            ("x-russet-labels", &many, "has 17 labels, and 16 are the most"),
        ] {
            let error = read(&[(header, value)]).unwrap_err();
            assert!(error.contains(header) && error.contains(expected), "{error}");
        }
    }

    #[test]
    fn a_label_of_the_key_is_not_changed_by_a_header() {
        let headers = read(&[("x-russet-labels", "team=red,urgent=yes")]).unwrap();
        let own = BTreeMap::from([("team".to_owned(), "blue".to_owned())]);
        let caller = FactsCaller { key: Some("kid"), namespace: Some("default"), labels: Some(&own) };
        let facts = RequestFacts::of_pooling(9, &headers, caller, Timestamp::UNIX_EPOCH);
        assert_eq!((facts.labels["team"].as_str(), facts.labels["urgent"].as_str()), ("blue", "yes"));
        assert_eq!(
            (facts.task, facts.prompt_tokens, facts.key.as_deref()),
            (RouteTask::Embed, 3, Some("kid"))
        );
    }

    #[test]
    fn equal_first_words_of_two_conversations_differ() {
        let of = |key, system: &str, texts: &[(&str, &str)]| {
            let system = (!system.is_empty()).then_some(("system", system));
            let messages = system.into_iter().chain(texts.iter().copied());
            let request = GenerationRequest {
                messages: messages.map(|(role, text)| Message::new(role, text)).collect(),
                ..GenerationRequest::default()
            };
            let caller = FactsCaller { key, namespace: key.map(|_| "default"), labels: None };
            let (headers, at) = (RouteHeaders::default(), Timestamp::UNIX_EPOCH);
            RequestFacts::of(&request, &headers, caller, None, at).conversation
        };
        let hi = [("user", "hi")];
        let numbers = [
            of(None, "", &hi),
            of(Some("eve"), "", &hi),
            of(Some("kid"), "", &hi),
            of(Some("kid"), "You translate.", &hi),
            of(Some("kid"), "You write code.", &hi),
        ];
        let distinct: std::collections::BTreeSet<u64> = numbers.into_iter().collect();
        assert_eq!(distinct.len(), numbers.len(), "{numbers:?}");
        // An agent's loop, whose instructions have the time and, far behind, what changes.
        let instructions = |time: &str, notes: &str| {
            format!("You are an agent. It is {time}.") + &" Be brief.".repeat(200) + notes
        };
        let begun = of(Some("kid"), &instructions("10:00", "none"), &hi);
        let mut texts = hi.to_vec();
        for turn in [("assistant", "I look"), ("tool", "files"), ("assistant", "Done"), ("user", "And?")] {
            texts.push(turn);
            assert_eq!(of(Some("kid"), &instructions("10:07", "some"), &texts), begun, "{turn:?}");
        }
        let long = |end: &str| "ü".repeat(MAX_INSTRUCTIONS) + end;
        assert_eq!(of(None, &long("a"), &hi), of(None, &long("b"), &hi));
    }

    #[test]
    fn requests_of_a_conversation_have_one_number() {
        let of = |texts: &[&str], session| {
            let roles = ["user", "assistant"].into_iter().cycle();
            let request = GenerationRequest {
                messages: roles.zip(texts).map(|(role, text)| Message::new(role, *text)).collect(),
                ..GenerationRequest::default()
            };
            let caller = FactsCaller::default();
            RequestFacts::of(&request, &RouteHeaders::default(), caller, session, Timestamp::UNIX_EPOCH)
        };
        let begun = of(&["Hello there", "Hi"], None);
        assert_eq!(of(&["Hello there", "Hi", "And?"], None).conversation, begun.conversation);
        assert_ne!(of(&["Hello here"], None).conversation, begun.conversation);
        assert_eq!(of(&["Another"], Some(7)).conversation, of(&["One more"], Some(7)).conversation);
        assert_ne!(of(&["Another"], Some(7)).conversation, of(&["Another"], Some(8)).conversation);
        // Roles count, as the engine reads them.
        assert_eq!(begun.prompt_tokens, (11 + 4 + 2 + 9_u64).div_ceil(4));
    }
}
