//! A prompt that ends within its last message, so that the model continues it: the end of the message is marked before
//! the template runs, and the prompt is cut at the mark, as in Transformers.

use minijinja::Value;

use super::TemplateError;

/// Stands behind the text that goes on. A template that trims texts takes the space.
const MARK: &str = "CONTINUE_FINAL_MESSAGE_TAG ";

/// Marks the end of the last message.
pub(super) fn mark(messages: &mut [Value]) -> Result<(), TemplateError> {
    let Some(last) = messages.last_mut() else {
        return Err(TemplateError::NoContinuation("the conversation has no message"));
    };
    let content = last.get_attr("content").unwrap_or_default();
    let Some(text) = content.as_str().filter(|text| !text.is_empty()) else {
        return Err(TemplateError::NoContinuation("the last message has no text that could go on"));
    };
    let marked = Value::from(format!("{text}{MARK}"));
    let fields = last.try_iter().into_iter().flatten().map(|name| {
        let value = if name.as_str() == Some("content") {
            marked.clone()
        } else {
            last.get_item(&name).unwrap_or_default()
        };
        (name, value)
    });
    *last = Value::from_pairs(fields.collect::<Vec<_>>());
    Ok(())
}

/// The prompt up to the mark.
pub(super) fn cut(mut prompt: String) -> Result<String, TemplateError> {
    let Some(at) = prompt.rfind(MARK.trim_end()) else {
        return Err(TemplateError::NoContinuation("the chat template does not write the last message"));
    };
    let is_whole = prompt[at..].starts_with(MARK);
    prompt.truncate(at);
    if !is_whole {
        prompt.truncate(prompt.trim_end().len());
    }
    Ok(prompt)
}
