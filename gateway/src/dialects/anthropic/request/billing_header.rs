//! The line by which Claude Code says in the system prompt who pays. It differs from request to request, and it comes
//! first, so no request would find the cached prefix of the one before.

use std::borrow::Cow;

/// How the line begins.
const NAME: &str = "x-anthropic-billing-header:";

/// The text without such lines, and without the blank lines between them and the rest.
pub(super) fn without_billing_header(text: &str) -> Cow<'_, str> {
    let is_billing = |line: &&str| line.trim_start().starts_with(NAME);
    if !text.lines().any(|line| is_billing(&line)) {
        return Cow::Borrowed(text);
    }
    let rest: String = text.split_inclusive('\n').filter(|line| !is_billing(line)).collect();
    Cow::Owned(rest.trim_start_matches(['\r', '\n']).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_is_taken_out_and_nothing_else() {
        const LINE: &str = "x-anthropic-billing-header: cc_version=2.1.36.b27; cc_entrypoint=cli; cch=fa690;";
        for (text, expected) in [
            ("", ""),
            ("Be brief.", "Be brief."),
            ("\nBe brief.\n", "\nBe brief.\n"),
            (LINE, ""),
            (&format!("{LINE}\n"), ""),
            (&format!("{LINE}\nBe brief.\n"), "Be brief.\n"),
            (&format!(" {LINE}\r\n\r\nBe brief."), "Be brief."),
            (&format!("Be\n{LINE}\nbrief."), "Be\nbrief."),
            (&format!("{LINE}\n{LINE}\nBe é."), "Be é."),
            (
                "Explain x-anthropic-billing-header: what is it?",
                "Explain x-anthropic-billing-header: what is it?",
            ),
        ] {
            assert_eq!(without_billing_header(text), expected, "{text:?}");
        }
    }
}
