//! How a family writes calls, whole and in one way, for a grammar that makes a model write them so. The parsers beside
//! this file read more: what models write when nobody makes them.

/// Calls as text. `call` has placeholders: `$NAME`, `$ARGUMENTS` for JSON or `$PARAMETERS` for one `parameter` after
/// another, `$INDEX` for a number and `$ID` for nine letters and digits. `parameter` has `$KEY`, `$VALUE`, and `$STRING`
/// for whether the value is text. `$LINE` is a line break that some models of a family write.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CallSyntax {
    /// A special token without which a vocabulary is of models that write otherwise.
    pub needs: Option<&'static str>,
    /// Before the first call.
    pub open: &'static str,
    pub call: &'static str,
    pub parameter: &'static str,
    /// Between two calls; `None` where there is but one.
    pub separator: Option<&'static str>,
    /// After the last call.
    pub close: &'static str,
}

impl CallSyntax {
    /// One call after another, with this between them.
    pub(super) const fn calls(call: &'static str, separator: &'static str) -> Self {
        Self { needs: None, open: "", call, parameter: "", separator: Some(separator), close: "" }
    }

    /// One call.
    pub(super) const fn single(call: &'static str) -> Self {
        Self { separator: None, ..Self::calls(call, "") }
    }

    /// The same, between these.
    pub(super) const fn within(self, open: &'static str, close: &'static str) -> Self {
        Self { open, close, ..self }
    }

    /// The same, with arguments written so.
    pub(super) const fn with(self, parameter: &'static str) -> Self {
        Self { parameter, ..self }
    }

    /// The same, of vocabularies with this special token.
    pub(super) const fn of(self, token: &'static str) -> Self {
        Self { needs: Some(token), ..self }
    }
}

/// A call in JSON, as most families write it.
pub(super) const JSON_CALL: &str = r#"{"name": "$NAME", "arguments": $ARGUMENTS}"#;

/// Harmony's call, in the message's header; the token that ends the message ends the output.
pub(crate) const HARMONY: CallSyntax =
    CallSyntax::single("<|channel|>commentary to=functions.$NAME <|constrain|>json<|message|>$ARGUMENTS");
