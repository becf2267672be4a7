//! Raw prompts and marks of prompts between the protos and [`russet_wire`].

use russet_wire::prefix_mark::PrefixMark;
use russet_wire::request::RawPrompt;

use crate::engine as pb;

impl From<RawPrompt> for pb::RawPrompt {
    fn from(prompt: RawPrompt) -> Self {
        use pb::raw_prompt::Prompt;
        let prompt = match prompt {
            RawPrompt::Text(text) => Prompt::Text(text),
            RawPrompt::Tokens(ids) => Prompt::Tokens(pb::TokenIds { ids }),
        };
        Self { prompt: Some(prompt) }
    }
}

/// `None` for one of a form that only newer releases know: the request then has no prompt at all.
pub(super) fn raw_prompt(prompt: pb::RawPrompt) -> Option<RawPrompt> {
    use pb::raw_prompt::Prompt;
    Some(match prompt.prompt? {
        Prompt::Text(text) => RawPrompt::Text(text),
        Prompt::Tokens(pb::TokenIds { ids }) => RawPrompt::Tokens(ids),
    })
}

impl From<PrefixMark> for pb::PrefixMark {
    fn from(PrefixMark { key, bytes }: PrefixMark) -> Self {
        Self { key, bytes }
    }
}

impl From<pb::PrefixMark> for PrefixMark {
    fn from(pb::PrefixMark { key, bytes }: pb::PrefixMark) -> Self {
        Self { key, bytes }
    }
}
