//! The variables by which a chat template knows whether to think, and how much. A template reads those that its authors
//! chose, so it gets them under each of their names.

use super::values::JsonObject;

/// Turns thinking on or off.
pub(super) fn set_thinking(variables: &mut JsonObject, thinks: bool) {
    for name in ["enable_thinking", "thinking"] {
        variables.insert(name.into(), thinks.into());
    }
}

/// Sets how much the model thinks, in OpenAI's words.
pub(super) fn set_effort(variables: &mut JsonObject, effort: &str) {
    // What OpenAI calls no effort is no thinking elsewhere.
    set_thinking(variables, effort != "none");
    variables.insert("reasoning_effort".into(), effort.into());
}
