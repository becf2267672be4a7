//! What stands around a text or calls in an output: thinking, and the headers of messages.

use super::lark::LarkRules;
use crate::parser::OutputFormat;
use crate::parser::reasoning::ReasoningFormat;
use crate::parser::tools::ToolFormat;

/// White space after a thinking block, which the parser drops.
const SPACE: &str = r"/[ \n]{1,4}/";

/// Thinking as far as the model likes, then `body`; an expression.
pub(super) fn framed(
    format: &OutputFormat,
    in_reasoning: bool,
    body: &str,
    rules: &mut LarkRules<'_>,
) -> String {
    if format.is_harmony() {
        return format!("{} {body}", harmony_thinking(rules));
    }
    let Some(ReasoningFormat { begin, end, dropped, .. }) = format.reasoning() else {
        return body.to_owned();
    };
    let block = rules.until(end);
    let thinking = if in_reasoning { block } else { format!("({} {block})?", rules.marker(begin)) };
    let mut dropped = dropped.iter().map(|marker| rules.marker(marker));
    let open = dropped.next().map(|open| format!("({open})?")).unwrap_or_default();
    let close: Vec<String> = dropped.map(|close| format!("({close})?")).collect();
    format!("{thinking} {SPACE}? {open} ({body}) {}", close.join(" "))
}

/// `text` behind the header of an answer, where a format has one; an expression.
pub(super) fn answer(format: &OutputFormat, text: &str, rules: &LarkRules<'_>) -> String {
    let name = format.tools().and_then(ToolFormat::text_name);
    match if format.is_harmony() { Some("<|channel|>final<|message|>") } else { name } {
        Some(header) => format!("{} ({text})", rules.marker(header)),
        None => text.to_owned(),
    }
}

/// The marker that ends answer text, behind which calls begin; most formats have none.
pub(super) fn answer_end(format: &OutputFormat) -> Option<&'static str> {
    format.reasoning().and_then(|reasoning| reasoning.dropped.get(1).copied())
}

/// Harmony's thinking is a message of its own.
fn harmony_thinking(rules: &mut LarkRules<'_>) -> String {
    let head = rules.marker("<|channel|>analysis<|message|>");
    format!("({head} {})?", rules.until("<|end|><|start|>assistant"))
}
