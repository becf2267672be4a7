//! Variables of a template besides the conversation: `chat_template_kwargs` of vLLM and Transformers.

use minijinja::Value;

use super::TemplateError;

/// Names that a template gets from the conversation or the sandbox.
const RESERVED: [&str; 6] =
    ["messages", "tools", "raise_exception", "strftime_now", "chat_template", "continue_final_message"];

/// Variables by name, in the order in which they were written.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TemplateArguments {
    values: Vec<(String, Value)>,
    bytes: usize,
}

impl TemplateArguments {
    /// Reads the JSON text of an object; an empty text has none.
    ///
    /// # Errors
    /// [`TemplateError::InvalidArguments`] where it is none, or names a variable that cannot be set.
    pub fn new(json: &str) -> Result<Self, TemplateError> {
        if json.is_empty() {
            return Ok(Self::default());
        }
        let invalid = |reason: &str| TemplateError::InvalidArguments(reason.to_owned());
        let object: Value =
            serde_json::from_str(json).map_err(|error| invalid(&format!("are not JSON: {error}")))?;
        if object.kind() != minijinja::value::ValueKind::Map {
            return Err(invalid("must be an object of variables for the chat template"));
        }
        let names: Vec<Value> = object.try_iter().map_err(|error| invalid(&error.to_string()))?.collect();
        let mut values = Vec::with_capacity(names.len());
        for name in names {
            let value = object.get_item(&name).unwrap_or_default();
            let name = name.as_str().unwrap_or_default().to_owned();
            if RESERVED.contains(&name.as_str()) {
                return Err(invalid(&format!("cannot set `{name}`, which every request has")));
            }
            values.push((name, value));
        }
        Ok(Self { values, bytes: json.len() })
    }

    /// Names and values.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.values.iter().map(|(name, value)| (name.as_str(), value))
    }

    /// Bytes of their text.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }
}
