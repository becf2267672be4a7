//! The query of a list: how many, in which order, and after which.

use axum::extract::Query;
use axum::http::Uri;

use crate::error::{ErrorKind, GatewayError};

/// Which page of a list.
#[derive(Debug, PartialEq)]
pub(in crate::dialects::openai) struct PageQuery {
    pub(in crate::dialects::openai) limit: usize,
    pub(in crate::dialects::openai) newest_first: bool,
    pub(in crate::dialects::openai) after: Option<String>,
    pub(in crate::dialects::openai) purpose: Option<String>,
}

impl PageQuery {
    /// Reads the query of a URL.
    pub(in crate::dialects::openai) fn parse(
        uri: &Uri,
        default_limit: usize,
        max_limit: usize,
    ) -> Result<Self, GatewayError> {
        Self::of(&fields(uri)?, default_limit, max_limit)
    }

    /// The page that these fields ask for; those that it does not know are left out.
    pub(in crate::dialects::openai) fn of(
        fields: &[(String, String)],
        default_limit: usize,
        max_limit: usize,
    ) -> Result<Self, GatewayError> {
        let mut page = Self { limit: default_limit, newest_first: true, after: None, purpose: None };
        for (name, value) in fields {
            match (name.as_str(), value.as_str()) {
                ("limit", number) => {
                    let number = number.parse().ok().filter(|number| (1..=max_limit).contains(number));
                    let invalid = || {
                        GatewayError::field(
                            "limit",
                            format!("`limit` must be a number from 1 to {max_limit}"),
                        )
                    };
                    page.limit = number.ok_or_else(invalid)?;
                }
                ("order", "asc") => page.newest_first = false,
                ("order", "desc") => page.newest_first = true,
                ("order", _) => return Err(GatewayError::field("order", "`order` must be asc or desc")),
                ("after", _) => page.after = Some(value.clone()),
                ("purpose", _) => page.purpose = Some(value.clone()),
                _ => {}
            }
        }
        Ok(page)
    }
}

/// The fields of a URL's query.
pub(in crate::dialects::openai) fn fields(uri: &Uri) -> Result<Vec<(String, String)>, GatewayError> {
    let unreadable = |_| GatewayError::new(ErrorKind::InvalidRequest, "the query of the URL cannot be read");
    Query::try_from_uri(uri).map(|Query(fields)| fields).map_err(unreadable)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_query_says_which_page() {
        let page = |limit, newest_first, after: Option<&str>, purpose: Option<&str>| {
            Ok(PageQuery {
                limit,
                newest_first,
                after: after.map(str::to_owned),
                purpose: purpose.map(str::to_owned),
            })
        };
        for (query, expected) in [
            ("", page(20, true, None, None)),
            ("?limit=100&order=asc&x=y", page(100, false, None, None)),
            ("?after=file-1&order=desc&purpose=batch", page(20, true, Some("file-1"), Some("batch"))),
            ("?limit=0", Err("limit")),
            ("?limit=101", Err("limit")),
            ("?limit=x", Err("limit")),
            ("?order=up", Err("order")),
        ] {
            let uri: Uri = format!("/v1/files{query}").parse().unwrap();
            let found = PageQuery::parse(&uri, 20, 100).map_err(|error| error.param);
            assert_eq!(found, expected.map_err(|param| Some(param.to_owned())), "{query}");
        }
    }
}
