//! The fields of `quantization_config`, of which a value that is not read is refused by name.

use serde_json::{Map, Value};

use crate::{config::whole, error::Unsupported, excerpt::excerpt};

/// What to use instead of a packing that is not read.
pub(super) const REMEDY: &str = "use the model in 16 bits, or quantised by mlx-lm";

/// The fields of `quantization_config`, or of an object in it.
pub(super) struct QuantizationSettings<'a> {
    /// Where in config.json they are.
    path: String,
    fields: &'a Map<String, Value>,
}

impl<'a> QuantizationSettings<'a> {
    pub fn new(path: &str, fields: &'a Map<String, Value>) -> Self {
        Self { path: path.to_owned(), fields }
    }

    /// Where in config.json they are.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// A value that is there; null is absent.
    pub fn value(&self, field: &str) -> Option<&'a Value> {
        self.fields.get(field).filter(|value| !value.is_null())
    }

    /// That a text is absent or one of these, of any case.
    pub fn only(&self, field: &str, known: &[&str]) -> Result<(), Unsupported> {
        let Some(value) = self.value(field) else { return Ok(()) };
        let is_known = |text: &str| known.iter().any(|known| known.eq_ignore_ascii_case(text));
        match value.as_str() {
            Some(text) if is_known(text) => Ok(()),
            _ => Err(self.refuse(field, &short(value), &known.join(", "))),
        }
    }

    /// Bits of a value: one of these.
    pub fn bits(&self, field: &str, known: &[u32]) -> Result<u32, Unsupported> {
        let value = self.value(field).unwrap_or(&Value::Null);
        let bits =
            whole(value).and_then(|bits| known.iter().copied().find(|known| u64::from(*known) == bits));
        let list = || known.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
        bits.ok_or_else(|| self.refuse(field, &short(value), &list()))
    }

    /// That a field has a value which is not read.
    pub fn refuse(&self, field: &str, found: &str, known: &str) -> Unsupported {
        let reason = format!("it is {found}, which is not supported; supported is {known}");
        Unsupported::field(&format!("{}.{field}", self.path), reason, REMEDY)
    }
}

/// A value for a message.
pub(super) fn short(value: &Value) -> String {
    if value.is_null() { "absent".to_owned() } else { excerpt(&value.to_string()) }
}
