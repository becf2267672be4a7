//! What the requests for vectors and for scores have in common.

use std::collections::BTreeSet;

use crate::dialects::field_table::{GroupOf, ignored, refuse_unsupported};
use crate::dialects::values::{self, JsonObject};
use crate::error::{ErrorKind, GatewayError};
use crate::json_body::JsonBody;

/// The fields of a request.
pub(super) struct SetFields {
    /// Those that are set.
    pub(super) fields: JsonObject,
    /// `model`.
    pub(super) model: String,
    /// Those that are left out.
    pub(super) ignored: Vec<String>,
}

impl SetFields {
    /// Reads the body.
    pub(super) fn read(mut body: JsonBody<'_>, group_of: GroupOf) -> Result<Self, GatewayError> {
        let fields = values::fields(&mut body)?;
        let model = values::model(&fields)?;
        refuse_unsupported(&fields, group_of)?;
        let ignored = ignored(&fields, group_of, BTreeSet::new());
        Ok(Self { fields, model, ignored })
    }
}

/// The error of an engine whose answer contradicts itself.
pub(super) fn mismatched(what: &str) -> GatewayError {
    let message = format!("the engine answered with {what}; run the same release on gateway and engines");
    GatewayError::new(ErrorKind::Internal, message)
}
