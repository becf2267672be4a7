//! Regular expressions whose matches are no part of a prompt.

use regex::{Regex, RegexBuilder};

/// Most memory of a compiled pattern, in bytes; a search takes as much again.
const MAX_COMPILED_BYTES: usize = 1 << 20;

/// Compiles one of `spec.engine.stripPatterns`; the error says what is wrong with it. Its searches take time in
/// proportion to the text. One that matches nothing at all, such as `x*`, is refused: it would match everywhere.
pub fn strip_pattern(pattern: &str) -> Result<Regex, String> {
    let regex = RegexBuilder::new(pattern)
        .size_limit(MAX_COMPILED_BYTES)
        .dfa_size_limit(MAX_COMPILED_BYTES)
        .build()
        // The syntax error draws the pattern over several lines; the last one has the reason.
        .map_err(|error| error.to_string().lines().last().unwrap_or_default().trim().to_owned())?;
    if regex.is_match("") {
        return Err("it matches an empty text".to_owned());
    }
    Ok(regex)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_are_compiled_or_say_what_is_wrong() {
        let date = strip_pattern(r"(?m)^Today's date: \d{4}-\d\d-\d\d\n").unwrap();
        assert_eq!(date.replace_all("a\nToday's date: 2026-11-28\nb", ""), "a\nb");
        for (pattern, why) in [
            ("(a", "unclosed group"),
            ("[z-a]", "invalid character class range"),
            ("x*", "empty text"),
            (r"(\w{500}){500}", "size limit"),
        ] {
            let error = strip_pattern(pattern).unwrap_err();
            assert!(error.contains(why) && !error.contains('\n'), "{pattern}: {error}");
        }
    }
}
