//! How a family writes calls, whole and in one way, for a grammar that makes a model write them so. The parsers beside
//! this file read more: what models write when nobody makes them.

/// Calls as text. `call` has placeholders: `$NAME`, `$ARGUMENTS` for JSON or `$PARAMETERS` for one `parameter` after
/// another, `$INDEX` for a number and `$ID` for nine letters and digits. `parameter` has `$KEY`, `$VALUE`, and `$STRING`
/// for whether the value is text, `$TYPE` for its type. `$LINE` is a line break that some models of a family write.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CallSyntax {
    /// A special token without which a vocabulary is of models that write otherwise.
    pub needs: Option<&'static str>,
    /// Before the first call.
    pub open: &'static str,
    pub call: &'static str,
    pub parameter: &'static str,
    /// How `$PARAMETERS` are written.
    pub notation: ArgumentNotation,
    /// Between two calls; `None` where there is but one.
    pub separator: Option<&'static str>,
    /// After the last call.
    pub close: &'static str,
}

/// How arguments that are not one JSON object are written.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ArgumentNotation {
    /// By the template `parameter`.
    Tags,
    /// As elements whose tags stand behind this token.
    Elements(&'static str),
    /// As literals.
    Literals(&'static LiteralNotation),
}

/// How a notation like JSON differs from it.
#[derive(Debug)]
pub(crate) struct LiteralNotation {
    /// Stands before text and after it; `None` where text has JSON's quotes and escapes. Keys then have none unless they
    /// need them.
    pub quote: Option<&'static str>,
    /// True, false and null.
    pub words: [&'static str; 3],
    /// Between two arguments, members or items.
    pub between: &'static str,
    /// Between the name of an argument and its value.
    pub assign: &'static str,
    /// Between the key of a member and its value.
    pub key_end: &'static str,
}

/// Python's keyword arguments and literals, as its own `repr` spaces them.
pub(super) const PYTHON: ArgumentNotation = ArgumentNotation::Literals(&LiteralNotation {
    quote: None,
    words: ["True", "False", "None"],
    between: ", ",
    assign: "=",
    key_end: ": ",
});

impl CallSyntax {
    /// One call after another, with this between them.
    pub(super) const fn calls(call: &'static str, separator: &'static str) -> Self {
        Self {
            needs: None,
            open: "",
            call,
            parameter: "",
            notation: ArgumentNotation::Tags,
            separator: Some(separator),
            close: "",
        }
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

    /// The same, with arguments in this notation.
    pub(super) const fn in_notation(self, notation: ArgumentNotation) -> Self {
        Self { notation, ..self }
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
