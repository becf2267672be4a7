//! The query of a list: how many, and after or before which.

use axum::extract::Query;
use axum::http::Uri;
use serde::Deserialize;

use crate::error::GatewayError;

/// Objects on a page that does not say how many, and at most; Anthropic's numbers.
const DEFAULT_LIMIT: usize = 20;
const MAX_LIMIT: usize = 1000;

/// Which page of a list.
#[derive(Debug, Deserialize)]
pub(super) struct PageQuery {
    #[serde(default = "default_limit")]
    pub(super) limit: usize,
    pub(super) after_id: Option<String>,
    pub(super) before_id: Option<String>,
}

impl PageQuery {
    /// Reads the query of a list of `objects`, a plural word.
    pub(super) fn parse(uri: &Uri, objects: &str) -> Result<Self, GatewayError> {
        let query = Query::<Self>::try_from_uri(uri).ok().map(|Query(query)| query);
        query.filter(|query| (1..=MAX_LIMIT).contains(&query.limit)).ok_or_else(|| {
            let message = format!("`limit` must be a number of {objects} from 1 to {MAX_LIMIT}");
            GatewayError::field("limit", message)
        })
    }
}

fn default_limit() -> usize {
    DEFAULT_LIMIT
}
