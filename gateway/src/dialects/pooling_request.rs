//! What the requests for vectors and for scores have in common, and their answers.

use std::collections::BTreeSet;

use russet_rpc::engine as pb;

use super::field_table::{GroupOf, ignored, refuse_unsupported};
use super::values::{self, JsonObject};
use crate::dispatch::PoolingReply;
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

/// The vectors of an answer.
pub(super) struct VectorTable {
    /// Little-endian numbers, one vector behind the other.
    bytes: Vec<u8>,
    /// Bytes of each, more than 0.
    width: usize,
}

impl VectorTable {
    /// Those of this answer, which must be as long as it says.
    pub(super) fn new(reply: PoolingReply) -> Result<Self, GatewayError> {
        let PoolingReply::Embed(pb::EmbedReply { dimensions, values, prompt_tokens, .. }) = reply else {
            return Err(mismatched("no vectors"));
        };
        let width = dimensions as usize * size_of::<f32>();
        if width == 0 || values.len() != width * prompt_tokens.len() {
            return Err(mismatched("vectors of another length than it says"));
        }
        Ok(Self { bytes: values, width })
    }

    /// Each of them.
    pub(super) fn vectors(&self) -> impl Iterator<Item = &[u8]> {
        self.bytes.chunks_exact(self.width)
    }
}

/// The numbers of a vector.
pub(super) fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|four| f32::from_le_bytes(*four)).collect()
}
