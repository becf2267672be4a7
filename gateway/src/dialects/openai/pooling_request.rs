//! What the requests for vectors and for scores have in common: their fields are honoured, refused by name because they
//! would change the response, or left out and listed in a header.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

use super::request;
use crate::error::{ErrorKind, GatewayError};
use crate::json_body::JsonBody;

/// What becomes of fields.
pub(super) struct FieldTable {
    /// They are parsed.
    pub(super) honoured: &'static [&'static str],
    /// They would change the response, unless they are empty.
    pub(super) refused: &'static [&'static str],
}

/// The fields of a request.
pub(super) struct SetFields {
    /// Those that are set.
    pub(super) fields: Map<String, Value>,
    /// `model`.
    pub(super) model: String,
    /// Those that are left out.
    pub(super) ignored: Vec<String>,
}

impl SetFields {
    /// Reads the body.
    pub(super) fn read(mut body: JsonBody<'_>, known: &FieldTable) -> Result<Self, GatewayError> {
        let fields = request::fields(&mut body)?;
        let model = request::model(&fields)?;
        let mut ignored = BTreeSet::new();
        for (name, value) in &fields {
            if known.honoured.contains(&name.as_str()) {
                continue;
            }
            if known.refused.contains(&name.as_str()) && !request::is_nothing(value) {
                let message = format!(
                    "`{name}` is not supported by this release and would change the response; leave it out"
                );
                return Err(GatewayError::field(name, message));
            }
            ignored.insert(name.clone());
        }
        Ok(Self { fields, model, ignored: request::listed(ignored) })
    }
}

/// The error of an engine whose answer contradicts itself.
pub(super) fn mismatched(what: &str) -> GatewayError {
    let message = format!("the engine answered with {what}; run the same release on gateway and engines");
    GatewayError::new(ErrorKind::Internal, message)
}
