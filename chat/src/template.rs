//! A model's chat template, rendered in a sandbox: a template is untrusted data, so it has no file access,
//! and its steps, call depth and memory are limited.

mod arguments;
mod continuation;
mod filters;
mod form;
mod memory;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use jiff::Zoned;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Value;
use minijinja::{AutoEscape, Environment, Error, ErrorKind, machinery};
use russet_wire::conversation::{Message, Tool};
use thiserror::Error as ThisError;

pub use arguments::TemplateArguments;
pub use form::CallForm;
use memory::{MIN_BUDGET, OverBudget};

/// Maximum steps of a template. Real templates take some tens per message; a conversation of ten thousand
/// messages stays below.
const FUEL: u64 = if cfg!(fuzzing) { 50_000 } else { 5_000_000 };
/// Maximum call depth in a template; real ones call a macro within a macro.
const MAX_DEPTH: usize = 100;
/// Maximum bytes of a rendered prompt: more than the text of the longest context of any model.
const MAX_OUTPUT_BYTES: usize = 16 << 20;

/// A template that cannot be used.
#[derive(Clone, Debug, ThisError, PartialEq, Eq)]
pub enum TemplateError {
    /// Invalid template syntax.
    #[error("the chat template does not parse: {0}; fix the model's chat_template")]
    Syntax(String),
    /// The template refused this conversation.
    #[error("the model's chat template refuses this conversation: {0}")]
    Refused(String),
    /// Too many steps.
    #[error(
        "the chat template took more than {FUEL} steps; shorten the conversation, or fix the template if even a short one fails"
    )]
    TooLong,
    /// Too much output.
    #[error(
        "the chat template wrote more than {MAX_OUTPUT_BYTES} bytes, or made more than {MIN_BUDGET} on the way; shorten the conversation, or fix the template if even a short one fails"
    )]
    TooLarge,
    /// The last message cannot be continued.
    #[error("continue_final_message: {0}")]
    NoContinuation(&'static str),
    /// The template has no place for tools.
    #[error(
        "this model's chat template does not tell the model of tools; leave `tools` out, tell of them in a system message and set `tool_choice` to required, or use a model that calls tools"
    )]
    NoTools,
    /// Variables that are no JSON object, or have a name that is taken.
    #[error("chat_template_kwargs {0}")]
    InvalidArguments(String),
    /// Another failure.
    #[error("the chat template failed: {0}")]
    Failed(String),
}

impl TemplateError {
    /// Whether the conversation is at fault, and not the template.
    pub fn is_refusal(&self) -> bool {
        match self {
            Self::Refused(_)
            | Self::TooLong
            | Self::TooLarge
            | Self::NoContinuation(_)
            | Self::NoTools
            | Self::InvalidArguments(_) => true,
            Self::Syntax(_) | Self::Failed(_) => false,
        }
    }
}

/// What a prompt is made of.
#[derive(Clone, Copy, Debug)]
pub struct Prompt<'a> {
    /// The conversation, oldest first.
    pub messages: &'a [Message],
    /// Tools that the model may call.
    pub tools: &'a [Tool],
    /// Further variables; of a name that two have, the later one counts.
    pub arguments: &'a [&'a TemplateArguments],
    /// Whether the last message goes on in place of a new one.
    pub continue_final_message: bool,
    /// The date that a template sees.
    pub now: &'a Zoned,
}

impl<'a> Prompt<'a> {
    /// A new turn of the assistant, without tools and variables.
    pub fn new(messages: &'a [Message], now: &'a Zoned) -> Self {
        Self { messages, tools: &[], arguments: &[], continue_final_message: false, now }
    }

    /// Bytes of its texts.
    fn bytes(&self) -> usize {
        let Self { messages, tools, arguments, continue_final_message: _, now: _ } = self;
        let messages = messages.iter().flat_map(Message::texts);
        let texts = messages.chain(tools.iter().flat_map(Tool::texts)).map(str::len);
        texts.chain(arguments.iter().map(|arguments| arguments.bytes())).sum()
    }
}

/// Special tokens that a template may use, by the names of their variables, such as `bos_token`. A token that the model
/// does not have is undefined, as in Transformers.
pub type SpecialTokens = BTreeMap<String, String>;

/// A parsed chat template.
#[derive(Debug)]
pub struct Template {
    environment: Environment<'static>,
    special: BTreeMap<String, Value>,
    call_form: CallForm,
    shows_tools: bool,
}

const TEMPLATE_NAME: &str = "chat_template";

impl Template {
    /// Parses `source`.
    pub fn new(source: &str, special: SpecialTokens) -> Result<Self, TemplateError> {
        caught(|| Self::parse(source, special))
    }

    /// Whether `source` parses. What it reads and shows is not tried.
    ///
    /// # Errors
    /// Those of [`new`](Self::new).
    pub fn check(source: &str) -> Result<(), TemplateError> {
        caught(|| Self::environment(source).map(drop))
    }

    fn parse(source: &str, special: SpecialTokens) -> Result<Self, TemplateError> {
        let environment = Self::environment(source)?;
        let special = special.into_iter().map(|(name, token)| (name, Value::from(token))).collect();
        let mut template = Self { environment, special, call_form: CallForm::default(), shows_tools: true };
        template.call_form = CallForm::of(&mut template);
        template.shows_tools = form::shows_tools(&template);
        Ok(template)
    }

    /// The sandbox with the parsed template.
    fn environment(source: &str) -> Result<Environment<'static>, TemplateError> {
        let syntax = |error: Error| TemplateError::Syntax(error.to_string());
        let mut environment = Environment::new();
        // The whitespace settings for which the authors of these templates test.
        let blocks = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().map_err(syntax)?;
        environment.set_syntax(blocks.clone());
        environment.set_fuel(Some(FUEL));
        environment.set_recursion_limit(MAX_DEPTH);
        memory::add_to(&mut environment);
        filters::add_to(&mut environment);
        environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, "refused by the template")
                .with_source(TemplateRefusal(message)))
        });
        let source = memory::unfolded(&strip_generation_tags(source), blocks);
        environment.add_template_owned(TEMPLATE_NAME, source).map_err(syntax)?;
        Ok(environment)
    }

    /// Whether it tells the model of a request's tools.
    pub fn shows_tools(&self) -> bool {
        self.shows_tools
    }

    /// Which form of tool calls it reads.
    pub fn call_form(&self) -> CallForm {
        self.call_form
    }

    /// The same template, with calls in this form.
    #[must_use]
    pub fn with_call_form(self, call_form: CallForm) -> Self {
        Self { call_form, ..self }
    }

    /// Renders the prompt of a conversation, ending where the assistant's turn begins, or where its last message is to
    /// be continued.
    pub fn render(&self, prompt: &Prompt<'_>) -> Result<String, TemplateError> {
        caught(|| self.evaluate(prompt))
    }

    fn evaluate(&self, prompt: &Prompt<'_>) -> Result<String, TemplateError> {
        let Prompt { messages, tools, arguments, continue_final_message, now } = *prompt;
        let mut messages: Vec<Value> =
            messages.iter().map(|message| self.call_form.message(message)).collect();
        if continue_final_message {
            continuation::mark(&mut messages)?;
        }
        let mut context = self.special.clone();
        context.extend([
            ("messages".to_owned(), Value::from(messages)),
            ("add_generation_prompt".to_owned(), Value::from(!continue_final_message)),
            ("tools".to_owned(), form::tools(tools)),
            ("documents".to_owned(), Value::from(())),
            ("strftime_now".to_owned(), strftime_now(now.clone())),
        ]);
        for arguments in arguments {
            context.extend(arguments.iter().map(|(name, value)| (name.to_owned(), value.clone())));
        }
        let failed = |error: Error| TemplateError::Failed(error.to_string());
        let template = self.environment.get_template(TEMPLATE_NAME).map_err(failed)?;
        let compiled = machinery::get_compiled_template(&template);
        let instructions = memory::counted(&compiled.instructions);
        let blocks = compiled.blocks.iter().map(|(name, block)| (*name, memory::counted(block))).collect();
        let mut text = String::new();
        memory::start(prompt.bytes());
        let rendered = machinery::eval(
            &self.environment,
            &instructions,
            Value::from(context),
            &blocks,
            &mut machinery::make_string_output(&mut text),
            AutoEscape::None,
        );
        match rendered {
            Ok(_) if text.len() > MAX_OUTPUT_BYTES => Err(TemplateError::TooLarge),
            Ok(_) if continue_final_message => continuation::cut(text),
            Ok(_) => Ok(text),
            Err(error) => Err(explain(&error)),
        }
    }
}

/// The result of `work`, of which a panic is a failure: minijinja has some on templates that nobody writes, such as
/// `{{ '%(é)s' % x }}`, and a template is a stranger's.
fn caught<T>(work: impl FnOnce() -> Result<T, TemplateError>) -> Result<T, TemplateError> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| {
        Err(TemplateError::Failed("it makes the template engine panic; see the log".to_owned()))
    })
}

/// `strftime_now` of Transformers, which knows the hour of the server.
fn strftime_now(now: Zoned) -> Value {
    Value::from_function(move |format: String| -> Result<String, Error> {
        jiff::fmt::strtime::format(&format, &now)
            .map_err(|error| Error::new(ErrorKind::InvalidOperation, error.to_string()))
    })
}

/// Classifies a template error: an error that the template raises may be wrapped by the macros that it passed through.
fn explain(error: &Error) -> TemplateError {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(current) = cause {
        if let Some(TemplateRefusal(message)) = current.downcast_ref() {
            return TemplateError::Refused(shortened(message.clone()));
        }
        if current.downcast_ref::<OverBudget>().is_some() {
            return TemplateError::TooLarge;
        }
        if current.downcast_ref::<Error>().is_some_and(|error| error.kind() == ErrorKind::OutOfFuel) {
            return TemplateError::TooLong;
        }
        cause = current.source();
    }
    TemplateError::Failed(shortened(error.to_string()))
}

/// A message that a client can be told: a template may raise all of a conversation.
fn shortened(mut message: String) -> String {
    const MAX_CHARS: usize = 2000;
    if let Some((end, _)) = message.char_indices().nth(MAX_CHARS) {
        message.truncate(end);
        message.push('…');
    }
    message
}

/// The message of a template that refuses a conversation.
#[derive(Debug, ThisError)]
#[error("{0}")]
struct TemplateRefusal(String);

/// Templates mark the assistant's part for training with `{% generation %}`, which has no effect when
/// rendering; the marks become blocks that always hold, with their whitespace control kept.
fn strip_generation_tags(source: &str) -> String {
    let mut rest = source;
    let mut result = String::with_capacity(source.len());
    while let Some(start) = rest.find("{%") {
        let (text, tag) = rest.split_at(start);
        result.push_str(text);
        // The end is no part of the start, as it seems in `{%}`.
        let Some(end) = tag[2..].find("%}") else {
            result.push_str(tag);
            return result;
        };
        let (tag, after) = tag.split_at(2 + end + 2);
        let inner = &tag[2..tag.len() - 2];
        match inner.trim_matches(|c: char| c == '-' || c == '+' || c.is_whitespace()) {
            "generation" => result.push_str(&tag.replacen("generation", "if true", 1)),
            "endgeneration" => result.push_str(&tag.replacen("endgeneration", "endif", 1)),
            _ => result.push_str(tag),
        }
        rest = after;
    }
    result.push_str(rest);
    result
}

#[cfg(test)]
mod tests {
    use super::*;
    use russet_tests::peak_memory;

    fn say(role: &str, content: &str) -> Message {
        Message::new(role, content)
    }

    fn special() -> SpecialTokens {
        [("bos_token", "<s>"), ("eos_token", "</s>")]
            .map(|(name, token)| (name.to_owned(), token.to_owned()))
            .into()
    }

    fn render(source: &str, messages: &[Message]) -> Result<String, TemplateError> {
        let now: Zoned = "2026-11-21T08:00:00+00:00[UTC]".parse().unwrap();
        Template::new(source, special())?.render(&Prompt::new(messages, &now))
    }

    #[test]
    fn real_chat_templates_render_as_intended() {
        let talk = [say("system", "Be brief."), say("user", " Hi <b>\"you\"</b> ")];
        for (source, expected) in [
            // Python methods, filters, loop variables, whitespace rules of blocks.
            (
                "{{ bos_token }}{% for m in messages %}{{ '[' + m['role'] + ']' + m['content'].strip() + eos_token }}{% endfor %}",
                "<s>[system]Be brief.</s>[user]Hi <b>\"you\"</b></s>",
            ),
            (
                "{%- if messages[0]['role'] == 'system' %}\n    {%- set rest = messages[1:] %}\n{%- endif %}\n{{ rest | length }}",
                "1",
            ),
            (
                "{% for m in messages %}\n  {% if m.role == 'user' %}\nU\n  {% endif %}\n{% endfor %}\n{% if add_generation_prompt %}\nA:\n{% endif %}",
                "U\nA:\n",
            ),
            ("{{ messages[1] | tojson }}", "{\"role\": \"user\", \"content\": \" Hi <b>\\\"you\\\"</b> \"}"),
            (
                "{{ [1, {'a': none}, [], {}] | tojson(indent=2) }}",
                "[\n  1,\n  {\n    \"a\": null\n  },\n  [],\n  {}\n]",
            ),
            (
                "{{ {'b': 'é🙂', 'a': [1, 2]} | tojson(ensure_ascii=true, sort_keys=true, separators=(',', ':')) }}",
                "{\"a\":[1,2],\"b\":\"\\u00e9\\ud83d\\ude42\"}",
            ),
            ("{{ strftime_now('%d %b %Y') }}", "21 Nov 2026"),
            ("{% if tools is not none %}tools{% else %}none{% endif %}", "none"),
            (
                "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{% generation %}{{ m.role }}{%- endgeneration %}{% endfor %}",
                "user",
            ),
            ("{% if tools is iterable and tools | length > 0 %}tools{% else %}none{% endif %}", "none"),
            (
                "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
                "2",
            ),
            ("{% macro turn(m) %}<{{ m.role }}>{% endmacro %}{{ turn(messages[0]) }}", "<system>"),
            ("{% set j = joiner() %}{% for x in [1, 2, 3] %}{{ j() }}{{ x }}{% endfor %}", "1, 2, 3"),
            ("{% set j = joiner('|') %}{% for x in [1, 2] %}{{ j() }}{{ x }}{% endfor %}", "1|2"),
            (
                "{{ messages[0].content.split(' ')[-1].upper() }}{{ 'x' if messages[0].content.startswith('Be') }}",
                "BRIEF.x",
            ),
        ] {
            assert_eq!(render(source, &talk).as_deref(), Ok(expected), "{source}");
        }
    }

    /// Expected texts are those of Jinja 3.1.6.
    #[test]
    fn expressions_of_python_have_its_values() {
        for (expression, expected) in [
            ("'a%sb' % 'x'", "axb"),
            ("'%d-%s' % (3, 'y')", "3-y"),
            // Slices.
            ("[][::-1]", "[]"),
            ("''[::-1] ~ 'aé🙂'[::-1] ~ 'aé🙂'[1:]", "🙂éaé🙂"),
            ("'abcdef'[1:-1] ~ 'abcdef'[-3:] ~ 'abcdef'[:2] ~ 'abcdef'[9:] ~ 'abcdef'[-99:1]", "bcdedefaba"),
            ("'abcdef'[::2] ~ 'abcdef'[4:0:-2] ~ 'abcdef'[1:1] ~ 'abcdef'[4:1]", "aceec"),
            ("[1, 2, 3][-2::-1]", "[2, 1]"),
            ("[1, 2, 3][5:-5:-1]", "[3, 2, 1]"),
            ("[1, 2, 3][:9223372036854775807:9223372036854775807]", "[1]"),
            ("[1, 2, 3][::-9223372036854775807 - 1]", "[3]"),
            ("(1, 2, 3)[1:]", "(2, 3)"),
            ("range(10)[2:8:3] | list", "[2, 5]"),
            ("7 % 3", "1"),
            ("(0 - 7) % 3", "2"),
            ("7.5 % 2", "1.5"),
            ("3 * 4", "12"),
            ("1.5 * 2", "3.0"),
            ("'ab' * 2 ~ 3 * 'c'", "ababccc"),
            ("([1, 2] * 2) | join(',')", "1,2,1,2"),
            ("'x' ~ 1 ~ none ~ true", "x1NoneTrue"),
            ("'a b  c'.rsplit(none, 1) | join('|')", "a b|c"),
            ("'a.b.c'.rsplit('.', 1) | join('|')", "a.b|c"),
            ("'a.b.c'.partition('.') | join('|')", "a|.|b.c"),
            ("'a.b.c'.rpartition('.') | join('|')", "a.b|.|c"),
            ("'abc'.partition('x') | join('|')", "abc||"),
            ("'abc'.removeprefix('a') ~ 'abc'.removesuffix('c')", "bcab"),
            ("'abc'.ljust(5, '-') ~ 'abc'.rjust(5) ~ 'abcd'.center(7, '*')", "abc--  abc**abcd*"),
            ("'-5'.zfill(4)", "-005"),
            ("' a '.index('a')", "1"),
            ("'Hello World'.swapcase()", "hELLO wORLD"),
            ("'Straße'.casefold()", "strasse"),
            ("'a\tb'.expandtabs(4)", "a   b"),
            ("'Hello World'.istitle()", "True"),
            ("'aXbX' | replace('X', 'y', 1)", "aybX"),
            ("'aXbX'.replace('X', 'y', 1)", "aybX"),
            ("'a b' | wordcount", "2"),
            ("nothing | length", "0"),
            ("'abc' is sequence", "True"),
            ("[{'n': 'a'}, {'n': 'b'}] | join('-', attribute='n')", "a-b"),
            ("', '.join(['a', 'b'])", "a, b"),
            ("['a', 'b'] | join", "ab"),
            ("'{:>5}|{}'.format('a', 2)", "    a|2"),
            ("'%5.1f' | format(1.26)", "  1.3"),
            ("'a\nb' | indent(2)", "a\n  b"),
            ("'AbC' | lower | upper | trim", "ABC"),
            ("[1, 2] | sum", "3"),
            ("dict([('a', 1)], b=2)", "{'a': 1, 'b': 2}"),
            ("dict([('a', [1]), ('a', 2)]).a", "2"),
            ("dict({'a': 1}) ~ dict(a=1) ~ dict()", "{'a': 1}{'a': 1}{}"),
            ("'one two three four' | wordwrap(9)", "one two\nthree\nfour"),
            ("'one two three four' | wordwrap(width=9, wrapstring='~')", "one two~three~four"),
            ("'abcdefghij kl' | wordwrap(4)", "abcd\nefgh\nij\nkl"),
            ("'abcdefghij kl' | wordwrap(4, false)", "abcdefghij\nkl"),
            ("'a\nb c d' | wordwrap(3)", "a\nb c\nd"),
            ("'well-known fact' | wordwrap(6)", "well-\nknown\nfact"),
            ("'a b&c/ü~' | urlencode", "a%20b%26c/%C3%BC~"),
            ("{'a b': 'c&d', 'e': 1} | urlencode", "a+b=c%26d&e=1"),
            ("[('a', 'b')] | urlencode", "a=b"),
            ("none | urlencode", "None"),
            ("'<p>a  <b>b</b> &amp; c</p><!-- x -->' | striptags", "a b & c"),
            ("1 | filesizeformat ~ ', ' ~ 0 | filesizeformat", "1 Byte, 0 Bytes"),
            ("1234567 | filesizeformat ~ ', ' ~ 1024 | filesizeformat(true)", "1.2 MB, 1.0 KiB"),
            ("{'class': 'my', 'missing': none, 'id': 'x<1'} | xmlattr", " class=\"my\" id=\"x&lt;1\""),
            ("{'a': 1} | xmlattr(false) ~ {} | xmlattr", "a=\"1\""),
        ] {
            let source = format!("{{{{ {expression} }}}}");
            assert_eq!(render(&source, &[say("user", "hi")]).as_deref(), Ok(expected), "{expression}");
        }
    }

    #[test]
    fn templates_that_grow_without_end_are_refused() {
        let test = "template::tests::templates_that_grow_without_end_are_refused";
        let grown = peak_memory::growth(test, grow_without_end);
        assert!(grown < 64 << 20, "{grown} bytes more");
    }

    fn grow_without_end() {
        let doubling = |step: &str, last: &str| {
            format!(
                "{{% set ns = namespace(s='x' * 64, l=[1]) %}}{{% for i in range(36) %}}{step}{{% endfor %}}{last}"
            )
        };
        for source in [
            doubling("{% set ns.s = ns.s + ns.s %}", ""),
            "{% set s = 'x' %}".to_owned() + &"{% set s = s + s %}".repeat(36),
            doubling("{% set ns.s = ns.s ~ ns.s %}", ""),
            doubling("{% set ns.s = ns.s * 2 %}", ""),
            doubling("{% set ns.s = 2 * ns.s %}", ""),
            doubling("{% set ns.s = ns.s | replace('x', 'xx') %}", ""),
            doubling("{% set ns.s = ns.s.replace('x', 'xx') %}", ""),
            doubling("{% set ns.s = [ns.s, ns.s] | join %}", ""),
            doubling("{% set ns.s = ''.join([ns.s, ns.s]) %}", ""),
            doubling("{% set ns.s = '%s%s' % (ns.s, ns.s) %}", ""),
            doubling("{% set ns.s = '%s%s' | format(ns.s, ns.s) %}", ""),
            doubling("{% set ns.s = '{}{}'.format(ns.s, ns.s) %}", ""),
            doubling("{% set s %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = s %}", ""),
            "{% macro f(x) %}{{ f(x + x) }}{% endmacro %}{{ f('x' * 10000) }}".to_owned(),
            doubling("{% set ns.l = ns.l + ns.l %}", "{{ ns.l | length }}"),
            doubling("{% set ns.l = [ns.l, ns.l] %}", "{{ ns.l }}"),
            doubling("{% set ns.l = [ns.l, ns.l] %}", "{{ ns.l | tojson }}"),
            doubling("{% set ns.l = {'a': ns.l, 'b': ns.l} %}", "{{ ns.l ~ '' }}"),
            doubling("{% set ns.l = ns.l * 3 %}", ""),
            // Constants, which the compiler would compute.
            "{{ ['x' * 99999999, 99999999 * 'x', 'xy' * (9999 * 4999)] | length }}".to_owned(),
            // Much from one step.
            "{{ (['x' * 1000000] * 100000) | join }}".to_owned(),
            "{{ ['x' * 1000000] * 100000 }}".to_owned(),
            "{{ (['x' * 1000000] * 100000) | tojson }}".to_owned(),
            "{{ (['x' * 1000000] * 100000) | string }}".to_owned(),
            "{{ (['x' * 1000000] * 100000) | map('replace', 'x', 'y' * 1000000) | list | length }}".to_owned(),
            "{{ ('x' * 1000000) | replace('x', 'y' * 1000000) }}".to_owned(),
            "{% for i in range(100000) %}{% set ns = namespace(l=messages) %}{% set x %}raw{{ 'y' * 9999 }}{% endset %}{% endfor %}".to_owned(),
            "{{ ('x ' * 1000000) | wordwrap(1, wrapstring='y' * 1000000) }}".to_owned(),
            "{{ {'x': '<' * 5000000} | xmlattr }}".to_owned(),
            "{{ ('%' * 6000000) | urlencode }}".to_owned(),
            // Kept by reference.
            doubling("{% for i in range(9999) %}{% set ns.l = ns.l + [ns.s[i:] + ns.s * 999] %}{% endfor %}", ""),
        ] {
            let error = render(&source, &[say("user", "hi")]);
            assert_eq!(error, Err(TemplateError::TooLarge), "{source}");
        }
        for source in [
            "{{ '%99999999d' | format(1) }}",
            "{{ '%99999999d' % 1 }}",
            "{{ '{:>99999999}'.format(1) }}",
            "{{ ('a\n' * 999) | indent(99999999) }}",
            "{{ ('a\n' * 999) | indent(width=99999999) }}",
            "{{ [1] | batch(99999999, 'x') | list }}",
            "{{ 'x' | wordwrap(99999999) }}",
            "{{ 'x' | wordwrap(0) }}",
            "{{ dict([1]) }}",
            "{{ {'a b': 1} | xmlattr }}",
            "{% set ns = namespace(l=[]) %}{% for i in range(9999) %}{% set ns.l = [ns.l] %}{% endfor %}",
        ] {
            let error = render(source, &[say("user", "hi")]);
            assert!(matches!(error, Err(TemplateError::Failed(_))), "{source}: {error:?}");
        }
    }

    #[test]
    fn long_conversations_stay_within_the_memory_of_templates() {
        let source = "{% set ns = namespace(l=[]) %}{% for m in messages %}{% set ns.l = ns.l + [m] %}{% endfor %}{% for m in ns.l %}{{ '<|' + m['role'] + '|>' + m['content'] | trim + '\n' }}{% endfor %}";
        for (count, bytes) in [(1500, 10), (40, 100_000), (1, 6_000_000)] {
            let talk = vec![say("user", &"x".repeat(bytes)); count];
            let text = render(source, &talk).unwrap();
            assert_eq!(text.len(), count * (bytes + "<|user|>\n".len()), "{count} messages of {bytes} bytes");
        }
    }

    #[test]
    fn hostile_and_broken_templates_end_with_an_error() {
        let deep = "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}";
        for (source, check) in [
            (
                "{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% for c in r %}{% endfor %}{% endfor %}{% endfor %}",
                (|error| matches!(error, TemplateError::TooLong)) as fn(&TemplateError) -> bool,
            ),
            ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", |error| {
                matches!(error, TemplateError::TooLarge)
            }),
            ("{% for a in range(99999) %}{{ 'x' * 9999 }}{% endfor %}", |error| {
                matches!(error, TemplateError::TooLarge)
            }),
            ("{{ 'x' * 99999999999 }}", |error| matches!(error, TemplateError::TooLarge)),
            (deep, |error| matches!(error, TemplateError::Failed(_) | TemplateError::TooLong)),
            ("{% include '/etc/passwd' %}", |error| matches!(error, TemplateError::Failed(_))),
            ("{% include 'chat_template' %}", |error| matches!(error, TemplateError::Failed(_))),
            ("{% include name | default('chat_template') ignore missing %}", |error| {
                matches!(error, TemplateError::Failed(_))
            }),
            ("{% import 'chat_template' as t %}", |error| matches!(error, TemplateError::Failed(_))),
            ("{% from 'chat_template' import t %}", |error| matches!(error, TemplateError::Failed(_))),
            ("{% extends 'chat_template' %}", |error| matches!(error, TemplateError::Failed(_))),
            ("{{ ''.__class__.__mro__ }}", |error| matches!(error, TemplateError::Failed(_))),
            ("{{ messages[0].nothing.more }}", |error| matches!(error, TemplateError::Failed(_))),
            // A list in a message would be written, each time that it holds the same.
            (
                "{{ (['x' * 1000] * 90000) % -5 }}",
                |error| matches!(error, TemplateError::Failed(text) if text.len() < 300),
            ),
            (
                "{{ 1 * messages * 400000 % 2 }}",
                |error| matches!(error, TemplateError::Failed(text) if text.len() < 300),
            ),
            (
                "{% include ['x' * 1000] * 90000 %}",
                |error| matches!(error, TemplateError::Failed(text) if text.len() < 300),
            ),
            (
                "{{ raise_exception('é' * 1000000) }}",
                |error| matches!(error, TemplateError::Refused(text) if text.chars().count() == 2001),
            ),
            // minijinja panics.
            ("{{ '%(é)s' % 1 }}", |error| matches!(error, TemplateError::Failed(_))),
            ("{% for m in messages %}", |error| matches!(error, TemplateError::Syntax(_))),
            ("{%}", |error| matches!(error, TemplateError::Syntax(_))),
            ("{{ 'a' }}{%}{% generation %}", |error| matches!(error, TemplateError::Syntax(_))),
        ] {
            let error = render(source, &[say("user", "hi")]).unwrap_err();
            assert!(check(&error), "{source}: {error:?}");
        }
    }

    #[test]
    fn templates_that_have_no_place_for_tools_say_so() {
        for (source, shows) in [
            ("{{ messages[-1].content }}", false),
            ("{{ tools | tojson }}{{ messages[-1].content }}", true),
            ("{% if messages[0].role == 'system' %}{{ tools[0].function.name }}{% endif %}", true),
            ("{% if tools %}{{ tools[0].function.nothing.more }}{% endif %}", true),
            ("{% if tools %}{{ raise_exception('no tools') }}{% endif %}", true),
        ] {
            assert_eq!(Template::new(source, special()).unwrap().shows_tools(), shows, "{source}");
        }
    }

    #[test]
    fn template_refusal_carries_its_own_message() {
        let source = "{% macro check(m) %}{% if m.role not in ['user'] %}{{ raise_exception('Unknown role: ' + m.role) }}{% endif %}{% endmacro %}{{ check(messages[0]) }}";
        assert_eq!(render(source, &[say("user", "hi")]).as_deref(), Ok(""));
        assert_eq!(
            render(source, &[say("wizard", "hi")]),
            Err(TemplateError::Refused("Unknown role: wizard".into()))
        );
    }
}
