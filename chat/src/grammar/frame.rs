//! What stands around a text or calls in an output: thinking, and the headers of messages.

use super::lark::LarkRules;
use crate::parser::OutputFormat;
use crate::parser::reasoning::ReasoningFormat;

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

/// The header of harmony's answer, then `text`; an expression.
pub(super) fn harmony_answer(text: &str, rules: &LarkRules<'_>) -> String {
    format!("{} ({text})", rules.marker("<|channel|>final<|message|>"))
}

/// Harmony's thinking is a message of its own.
fn harmony_thinking(rules: &mut LarkRules<'_>) -> String {
    let head = rules.marker("<|channel|>analysis<|message|>");
    format!("({head} {})?", rules.until("<|end|><|start|>assistant"))
}
