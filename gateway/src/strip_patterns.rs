//! What a deployment takes out of prompts before they are rendered: dates and ids that clients write anew into every
//! request, so that none would find the prefix of the one before it.

use std::borrow::Cow;
use std::sync::{Arc, OnceLock};

use regex::Regex;
use russet_crds::strip_pattern;
use russet_wire::request::GenerationRequest;

/// The `spec.engine.stripPatterns` of a deployment. They are compiled when the first prompt comes: routing tables are built
/// anew whenever an object changes, and most are what they were.
#[derive(Clone, Debug, Default)]
pub struct StripPatterns {
    patterns: Arc<[String]>,
    compiled: Arc<OnceLock<Vec<Regex>>>,
}

impl StripPatterns {
    /// These patterns. Of invalid ones the deployment's status says what is wrong, and they match nothing.
    pub fn new(patterns: &[String]) -> Self {
        Self { patterns: patterns.into(), compiled: Arc::default() }
    }

    fn compiled(&self) -> &[Regex] {
        let valid = || self.patterns.iter().filter_map(|pattern| strip_pattern(pattern).ok()).collect();
        self.compiled.get_or_init(valid)
    }

    /// Takes their matches out of what the system and the user say. What the model and tools said stays as it is, and so
    /// does a prompt that is sent as it has to be read.
    pub(crate) fn strip(&self, request: &mut GenerationRequest) {
        if self.patterns.is_empty() {
            return;
        }
        let clients =
            request.messages.iter_mut().filter(|message| ["system", "user"].contains(&message.role.as_str()));
        for message in clients {
            for pattern in self.compiled() {
                if let Cow::Owned(stripped) = pattern.replace_all(&message.content, "") {
                    message.content = stripped;
                }
            }
        }
    }
}

impl PartialEq for StripPatterns {
    fn eq(&self, other: &Self) -> bool {
        self.patterns == other.patterns
    }
}

#[cfg(test)]
mod tests {
    use russet_wire::conversation::Message;
    use russet_wire::request::RawPrompt;

    use super::*;

    #[test]
    fn matches_leave_what_clients_say_and_nothing_else() {
        let patterns =
            StripPatterns::new(&[r"(?m)^Date: .*\n".into(), "(broken".into(), r"\[id \d+\]".into()]);
        let text = "A [id 7]\nDate: today\nB [id 8]";
        let mut request = GenerationRequest {
            messages: ["system", "user", "assistant", "tool"].map(|role| Message::new(role, text)).into(),
            raw_prompt: Some(RawPrompt::Text(text.into())),
            ..GenerationRequest::default()
        };
        let raw = request.raw_prompt.clone();
        patterns.strip(&mut request);
        let texts: Vec<&str> = request.messages.iter().map(|message| message.content.as_str()).collect();
        assert_eq!((texts, request.raw_prompt), (vec!["A \nB ", "A \nB ", text, text], raw));
        assert_eq!(
            patterns,
            StripPatterns::new(&[r"(?m)^Date: .*\n".into(), "(broken".into(), r"\[id \d+\]".into()])
        );
        assert_ne!(patterns, StripPatterns::new(&[r"(?m)^Date: .*\n".into(), r"\[id \d+\]".into()]));
        assert_ne!(patterns, StripPatterns::default());
    }
}
