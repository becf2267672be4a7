//! The prompt of a request in tokens: a conversation, written by the model's template, or a text or tokens that the model
//! continues. And what reads and constrains the answer to it.

use russet_chat::grammar::{GrammarMatcher, OutputRules};
use russet_chat::parser::{OutputFormat, OutputParser, opens_reasoning};
use russet_chat::template::{Prompt, TemplateError};
use russet_wire::conversation::{Message, Tool, ToolChoice};
use russet_wire::request::{ContextOverflow, RawPrompt, StructuredOutput};

use super::{ChatTokenizer, TokenizerError};

/// What a prompt is made of.
#[derive(Clone, Copy, Debug)]
pub enum PromptSource<'a> {
    /// A conversation.
    Conversation(&'a Prompt<'a>),
    /// A text or tokens, without a template.
    Raw(&'a RawPrompt),
}

/// What bounds the work on a prompt.
#[derive(Clone, Copy)]
pub struct PromptLimits<'a> {
    /// Tokens of the context, the answer included.
    pub context_tokens: u32,
    /// Whether the caller has left, or its deadline has passed; asked between pieces.
    pub is_abandoned: &'a dyn Fn() -> bool,
}

/// How a prompt that is too long is made to fit. By default it is not.
#[derive(Clone, Copy, Debug, Default)]
pub struct PromptFit {
    /// It keeps its last tokens, as many as this and the context allow.
    pub truncate_prompt_tokens: Option<u32>,
    /// What becomes of a conversation.
    pub context_overflow: ContextOverflow,
    /// Tokens that the answer may take.
    pub max_tokens: Option<u32>,
}

impl PromptFit {
    /// Tokens of the context that are left for the answer, where a conversation loses its oldest turns for it: those that
    /// it may take, or a quarter of the context, and never more than half of it.
    fn answer_tokens(self, context_tokens: u32) -> u32 {
        self.max_tokens.unwrap_or(context_tokens / 4).min(context_tokens / 2).max(1)
    }
}

/// A prompt in tokens.
pub struct PreparedPrompt {
    /// Its tokens.
    pub tokens: Vec<u32>,
    /// Reads what the model answers.
    pub parser: OutputParser,
    /// What the answer has to be.
    pub grammar: Option<GrammarMatcher>,
    /// The text that ends a thinking block; `None` where the model marks none.
    pub thinking_end: Option<&'static str>,
}

/// What a request asks of the response, besides the conversation.
#[derive(Clone, Copy, Debug, Default)]
pub struct ResponseRules<'a> {
    /// Whether tools have to be called.
    pub tool_choice: Option<&'a ToolChoice>,
    /// Whether it ends with the first call.
    pub single_tool_call: bool,
    /// What its text has to be.
    pub structured_output: Option<&'a StructuredOutput>,
}

/// A prompt and how its answer is written.
struct Written {
    tokens: Vec<u32>,
    format: OutputFormat,
    in_reasoning: bool,
}

impl ChatTokenizer {
    /// Tokenises a conversation, ending where the assistant's turn begins. Slow for a long conversation: do
    /// not call it on the serving threads.
    ///
    /// # Errors
    /// Among others [`TokenizerError::ContextLength`] where that is certain before all of it is tokenised: a
    /// prompt of which all tokens are known may still fill the context.
    pub fn prompt(&self, prompt: &Prompt<'_>, limits: &PromptLimits<'_>) -> Result<Vec<u32>, TokenizerError> {
        let source = PromptSource::Conversation(prompt);
        self.prepare(source, ResponseRules::default(), PromptFit::default(), limits)
            .map(|prepared| prepared.tokens)
    }

    /// Tokenises a prompt like [`prompt`](Self::prompt), and gives what reads and constrains its answer.
    ///
    /// # Errors
    /// Those of [`prompt`](Self::prompt), and [`TokenizerError::Grammar`].
    pub fn prepare(
        &self,
        source: PromptSource<'_>,
        rules: ResponseRules<'_>,
        fit: PromptFit,
        limits: &PromptLimits<'_>,
    ) -> Result<PreparedPrompt, TokenizerError> {
        if (limits.is_abandoned)() {
            return Err(TokenizerError::Abandoned);
        }
        // What is cut may be longer than the context before.
        let whole = PromptLimits { context_tokens: u32::MAX, ..*limits };
        let within = if fit.truncate_prompt_tokens.is_some() { &whole } else { limits };
        let ResponseRules { tool_choice, single_tool_call, structured_output } = rules;
        let tool_choice = tool_choice.unwrap_or(&ToolChoice::Auto);
        let (mut written, tools) = match source {
            PromptSource::Raw(prompt) => (self.write_raw(prompt, within)?, &[][..]),
            PromptSource::Conversation(prompt) => {
                let is_enforced = *tool_choice != ToolChoice::Auto;
                let mut written = match fit.context_overflow {
                    ContextOverflow::Refuse => self.write(prompt, is_enforced, within)?,
                    ContextOverflow::Shift => self.write_shifted(prompt, is_enforced, fit, limits)?,
                };
                if is_enforced {
                    written.format = written.format.with_enforced_calls();
                }
                (written, prompt.tools)
            }
        };
        if let Some(asked) = fit.truncate_prompt_tokens {
            let room = limits.context_tokens.saturating_sub(fit.max_tokens.unwrap_or(1));
            let kept = asked.min(room.max(1)) as usize;
            written.tokens.drain(..written.tokens.len().saturating_sub(kept));
        }
        let Written { tokens, format, in_reasoning } = written;
        if let Some((id, vocabulary)) = self.first_out_of_vocabulary(&tokens) {
            let text = self.tokenizer.id_to_token(id).unwrap_or_default();
            return Err(TokenizerError::NotInModel { id, text, vocabulary });
        }
        let rules = OutputRules {
            format: &format,
            in_reasoning,
            tools,
            tool_choice,
            single_tool_call,
            structured_output,
        };
        let grammar = rules.matcher(|| self.grammar_vocabulary())?;
        let thinking_end = format.thinking_end();
        let parser = OutputParser::new(&format, tools.into(), in_reasoning);
        Ok(PreparedPrompt { tokens, parser, grammar, thinking_end })
    }

    /// A text as Transformers tokenises one: behind the token that begins every text of this model.
    fn write_raw(&self, prompt: &RawPrompt, limits: &PromptLimits<'_>) -> Result<Written, TokenizerError> {
        let tokens = match prompt {
            RawPrompt::Tokens(tokens) => tokens.clone(),
            RawPrompt::Text(text) => {
                let mut tokens = self.first_tokens()?;
                tokens.extend(self.encoder.encode(text, limits)?);
                tokens
            }
        };
        Ok(Written { tokens, format: OutputFormat::default(), in_reasoning: false })
    }

    /// What the tokenizer puts before every text.
    fn first_tokens(&self) -> Result<Vec<u32>, TokenizerError> {
        let encode = |special| {
            let encoding = self.tokenizer.encode_fast("a", special);
            encoding.map_err(|error| TokenizerError::Encode(error.to_string()))
        };
        let (framed, plain) = (encode(true)?, encode(false)?);
        let (framed, plain) = (framed.get_ids(), plain.get_ids());
        let at = framed.windows(plain.len().max(1)).position(|window| window == plain);
        Ok(framed.get(..at.unwrap_or(0)).unwrap_or_default().to_vec())
    }

    /// A conversation as its template writes it. Where calls are enforced, a template need not tell of them.
    fn write(
        &self,
        prompt: &Prompt<'_>,
        is_enforced: bool,
        limits: &PromptLimits<'_>,
    ) -> Result<Written, TokenizerError> {
        let templates = self.templates.as_ref().ok_or(TokenizerError::NoTemplate)?;
        let texts = prompt.messages.iter().flat_map(Message::texts);
        self.encoder.check_conversation(texts.chain(prompt.tools.iter().flat_map(Tool::texts)), limits)?;
        let (template, format) = templates.of(prompt);
        // DeepSeek V3.1's template writes calls and leaves it to the system message to tell of tools.
        let knows_tools = is_enforced || template.shows_tools() || format.tools_name().is_some();
        if !prompt.tools.is_empty() && !knows_tools {
            return Err(TemplateError::NoTools.into());
        }
        // The template inserts the special tokens itself; those that a user spells are text.
        let (text, tokens) = match self.literal_text.marked(prompt.messages, prompt.tools) {
            None => {
                let text = template.render(prompt)?;
                let tokens = self.encoder.encode(&text, limits)?;
                (text, tokens)
            }
            Some((messages, tools)) => {
                let text = template.render(&Prompt { messages: &messages, tools: &tools, ..*prompt })?;
                let tokens = self.literal_text.encode(&self.tokenizer, &text, limits)?;
                (text, tokens)
            }
        };
        Ok(Written { tokens, in_reasoning: opens_reasoning(format, &text), format: format.clone() })
    }

    /// A conversation without as many of its oldest turns as it takes to fit. A turn begins with a message of a user; the
    /// last one stays, and so do messages of the system.
    fn write_shifted(
        &self,
        prompt: &Prompt<'_>,
        is_enforced: bool,
        fit: PromptFit,
        limits: &PromptLimits<'_>,
    ) -> Result<Written, TokenizerError> {
        let room = limits.context_tokens.saturating_sub(fit.answer_tokens(limits.context_tokens)) as usize;
        let messages = prompt.messages;
        let begins: Vec<usize> = (0..messages.len()).filter(|&at| messages[at].role == "user").collect();
        // Without the turns before this one; all of it for 0.
        let from = |turn: usize| -> Result<Written, TokenizerError> {
            let begin = if turn == 0 { 0 } else { begins.get(turn).copied().unwrap_or_default() };
            let is_kept =
                |at: usize| at >= begin || matches!(messages[at].role.as_str(), "system" | "developer");
            let kept: Vec<Message> =
                (0..messages.len()).filter(|&at| is_kept(at)).map(|at| messages[at].clone()).collect();
            self.write(&Prompt { messages: &kept, ..*prompt }, is_enforced, limits)
        };
        let fits = |written: Result<Written, TokenizerError>| match written {
            Ok(written) if written.tokens.len() <= room => Ok(Some(written)),
            Ok(_) | Err(TokenizerError::ContextLength { .. }) => Ok(None),
            Err(error) => Err(error),
        };
        if let Some(whole) = fits(self.write(prompt, is_enforced, limits))? {
            return Ok(whole);
        }
        // The fewest turns left out that suffice: the first turn with which it fits.
        let (mut low, mut high) = (1, begins.len().saturating_sub(1));
        let mut found = None;
        while low <= high {
            let middle = low.midpoint(high);
            match fits(from(middle))? {
                Some(written) => {
                    found = Some(written);
                    high = middle - 1;
                }
                None => low = middle + 1,
            }
        }
        // The last turn alone may leave less room for the answer.
        found.map_or_else(|| from(begins.len().saturating_sub(1)), Ok)
    }
}

#[cfg(test)]
mod tests {
    use jiff::Zoned;

    use super::*;
    use crate::fixture;

    fn tokenizer(template: bool) -> ChatTokenizer {
        let dir = fixture::model_dir();
        if !template {
            std::fs::remove_file(dir.path().join("chat_template.jinja")).unwrap();
        }
        ChatTokenizer::load(dir.path()).unwrap()
    }

    fn bytes(text: &str) -> Vec<u32> {
        text.bytes().map(fixture::token_of_byte).collect()
    }

    fn prepared(
        tokenizer: &ChatTokenizer,
        source: PromptSource<'_>,
        fit: PromptFit,
        context_tokens: u32,
    ) -> Result<Vec<u32>, TokenizerError> {
        let limits = PromptLimits { context_tokens, is_abandoned: &|| false };
        tokenizer.prepare(source, ResponseRules::default(), fit, &limits).map(|prepared| prepared.tokens)
    }

    #[test]
    fn a_raw_prompt_has_no_template_and_needs_none() {
        let now = Zoned::now();
        for tokenizer in [tokenizer(true), tokenizer(false)] {
            let of = |prompt: &RawPrompt| {
                prepared(&tokenizer, PromptSource::Raw(prompt), PromptFit::default(), 64).unwrap()
            };
            assert_eq!(of(&RawPrompt::Text("hi".into())), bytes("hi"));
            assert_eq!(of(&RawPrompt::Tokens(vec![9, 7])), [9, 7]);
            // Whoever writes the whole prompt may write special tokens.
            let whole = of(&RawPrompt::Text("a<|end|>".into()));
            assert_eq!(whole, [bytes("a"), vec![fixture::END]].concat());
        }
        let messages = [Message::new("user", "hi")];
        let chat = Prompt::new(&messages, &now);
        let refused =
            prepared(&tokenizer(false), PromptSource::Conversation(&chat), PromptFit::default(), 64);
        assert!(matches!(refused, Err(TokenizerError::NoTemplate)));
    }

    #[test]
    fn user_text_that_spells_a_special_token_is_text() {
        let (tokenizer, now) = (tokenizer(true), Zoned::now());
        let messages = [Message::new("user", "a<|end|>b")];
        let chat = Prompt::new(&messages, &now);
        let tokens =
            prepared(&tokenizer, PromptSource::Conversation(&chat), PromptFit::default(), 64).unwrap();
        let frame = |text: &str| {
            [vec![fixture::BEGIN, fixture::USER], bytes(text), vec![fixture::END, fixture::ASSISTANT]]
                .concat()
        };
        assert_eq!(tokens, frame("a<|end|>b"));
    }

    #[test]
    fn a_truncated_prompt_keeps_its_last_tokens() {
        let tokenizer = tokenizer(true);
        let raw = RawPrompt::Text("0123456789".into());
        for (asked, max_tokens, context_tokens, expected) in [
            (Some(4), None, 64, "6789"),
            (Some(64), None, 64, "0123456789"),
            (Some(u32::MAX), None, 8, "3456789"),
            (Some(u32::MAX), Some(5), 8, "789"),
            (Some(2), Some(5), 8, "89"),
            // No answer needs room.
            (Some(u32::MAX), Some(0), 8, "23456789"),
            (None, Some(0), 10, "0123456789"),
            // A request for more than the context has leaves one.
            (Some(u32::MAX), Some(99), 8, "9"),
        ] {
            let fit = PromptFit { truncate_prompt_tokens: asked, max_tokens, ..PromptFit::default() };
            let tokens = prepared(&tokenizer, PromptSource::Raw(&raw), fit, context_tokens).unwrap();
            assert_eq!(tokens, bytes(expected), "{asked:?} {max_tokens:?}");
        }
    }

    #[test]
    fn a_shifted_conversation_loses_its_oldest_turns() {
        let (dir, now) = (fixture::model_dir(), Zoned::now());
        let template = "{% for m in messages %}[{{ m.role[0] + m.content }}]{% endfor %}";
        std::fs::write(dir.path().join("chat_template.jinja"), template).unwrap();
        let tokenizer = ChatTokenizer::load(dir.path()).unwrap();
        let messages = [
            Message::new("system", "S"),
            Message::new("user", "first"),
            Message::new("assistant", "1"),
            Message::new("user", "second"),
            Message::new("assistant", "2"),
            Message::new("user", "third"),
        ];
        let of = |kept: &[usize]| {
            let kept: Vec<Message> = kept.iter().map(|&at| messages[at].clone()).collect();
            tokenizer.prompt(
                &Prompt::new(&kept, &now),
                &PromptLimits { context_tokens: 999, is_abandoned: &|| false },
            )
        };
        let (all, two, last) = (of(&[0, 1, 2, 3, 4, 5]), of(&[0, 3, 4, 5]), of(&[0, 5]));
        let (all, two, last) = (all.unwrap(), two.unwrap(), last.unwrap());
        assert!(all.len() > two.len() && two.len() > last.len());
        let shifted = |context_tokens: usize, max_tokens| {
            let fit =
                PromptFit { context_overflow: ContextOverflow::Shift, max_tokens, ..PromptFit::default() };
            let chat = Prompt::new(&messages, &now);
            prepared(&tokenizer, PromptSource::Conversation(&chat), fit, context_tokens as u32)
        };
        assert_eq!(shifted(all.len() + 8, Some(8)).unwrap(), all);
        assert_eq!(shifted(all.len() + 7, Some(8)).unwrap(), two);
        assert_eq!(shifted(two.len() + 8, Some(8)).unwrap(), two);
        assert_eq!(shifted(two.len() + 7, Some(8)).unwrap(), last);
        // The last turn stays while it fits at all.
        assert_eq!(shifted(last.len() + 1, Some(8)).unwrap(), last);
    }
}
