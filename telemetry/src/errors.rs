//! An error and its sources in one line, for logs and conditions. Not here: the errors of each crate.

use std::error::Error;

/// The text of `error`, followed by those of its sources.
pub fn chain(error: &dyn Error) -> String {
    with_sources(error.to_string(), error)
}

/// `text`, followed by the texts of the sources of `error`, for an error whose own text says too much or too
/// little. A source that is in the line already is left out, because some libraries repeat sources in their
/// own texts.
pub fn with_sources(text: impl Into<String>, error: &dyn Error) -> String {
    let mut line = text.into();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !line.contains(&cause_text) {
            if !line.is_empty() {
                line.push_str(": ");
            }
            line.push_str(&cause_text);
        }
        source = cause.source();
    }
    line
}

#[cfg(test)]
mod tests {
    use std::fmt;

    use super::*;

    #[derive(Debug)]
    struct Layer(&'static str, Option<Box<Layer>>);

    impl fmt::Display for Layer {
        fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
            formatter.write_str(self.0)
        }
    }

    impl Error for Layer {
        fn source(&self) -> Option<&(dyn Error + 'static)> {
            self.1.as_deref().map(|source| source as &(dyn Error + 'static))
        }
    }

    fn layers(texts: &[&'static str]) -> Layer {
        let (first, rest) = texts.split_first().unwrap();
        Layer(first, (!rest.is_empty()).then(|| Box::new(layers(rest))))
    }

    #[test]
    fn error_chain_is_one_line_without_repetitions() {
        for (texts, line) in [
            (&["cannot read"][..], "cannot read"),
            (&["cannot read", "no route", "timed out"], "cannot read: no route: timed out"),
            (&["cannot read: no route", "no route", "timed out"], "cannot read: no route: timed out"),
            (&["cannot read", "", "timed out"], "cannot read: timed out"),
        ] {
            assert_eq!(chain(&layers(texts)), line, "{texts:?}");
        }
    }

    #[test]
    fn sources_follow_a_text_of_the_callers() {
        let error = layers(&["GET https://user:secret@host", "no route", "timed out"]);
        assert_eq!(with_sources("host", &error), "host: no route: timed out");
        assert_eq!(with_sources("", &error), "no route: timed out");
        assert_eq!(with_sources("", &layers(&["alone"])), "");
    }
}
