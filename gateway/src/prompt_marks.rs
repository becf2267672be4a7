//! Marks of a prompt: points of its text that this gateway, and any other one, knows again when another prompt begins in
//! the same way. Pure. What engines say about them is in `backends/prefix_feed`.

use std::hash::Hasher as _;

use russet_wire::conversation::Tool;
use russet_wire::prefix_mark::PrefixMark;
use russet_wire::request::{GenerationRequest, RawPrompt};
use twox_hash::XxHash3_64;

/// Bytes of a long text between two marks: about a thousand tokens.
const MARK_BYTES: usize = 4096;
/// Most marks of a prompt.
const MAX_MARKS: usize = 256;
/// Behind each text, so that two texts are not read as one. No UTF-8 text has this byte.
const END_OF_TEXT: u8 = 0xFF;

/// The marks of a request for `model`, as its client names it: at the end of its tools and of each message, and within
/// long texts. The last one is the end of the prompt. None where the prompt loses its beginning.
pub(crate) fn prompt_marks(model: &str, request: &GenerationRequest) -> Vec<PrefixMark> {
    if request.truncate_prompt_tokens.is_some() {
        return Vec::new();
    }
    let mut writer = MarkWriter::default();
    // Prompts are the same only where these are: they choose an adapter, a cache and what a template writes.
    for text in [model, &request.cache_salt, &request.template_arguments] {
        writer.hash_text(text.as_bytes());
    }
    if !request.tools.is_empty() {
        request.tools.iter().flat_map(Tool::texts).for_each(|text| writer.text(text.as_bytes()));
        writer.mark();
    }
    for message in &request.messages {
        message.texts().for_each(|text| writer.text(text.as_bytes()));
        writer.mark();
    }
    match &request.raw_prompt {
        None => {}
        Some(RawPrompt::Text(text)) => writer.text(text.as_bytes()),
        Some(RawPrompt::Tokens(tokens)) => {
            let bytes: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
            writer.text(&bytes);
        }
    }
    if request.raw_prompt.is_some() {
        writer.mark();
    }
    thinned(writer.marks)
}

/// Reads texts and sets marks.
#[derive(Default)]
struct MarkWriter {
    hash: XxHash3_64,
    bytes: u64,
    marks: Vec<PrefixMark>,
}

impl MarkWriter {
    /// A text of the prompt, with marks in it if it is long.
    fn text(&mut self, text: &[u8]) {
        for (index, chunk) in text.chunks(MARK_BYTES).enumerate() {
            if index > 0 {
                self.mark();
            }
            self.hash.write(chunk);
            self.bytes += chunk.len() as u64;
        }
        self.hash.write(&[END_OF_TEXT]);
    }

    /// A text that is not in the prompt as such.
    fn hash_text(&mut self, text: &[u8]) {
        self.hash.write(text);
        self.hash.write(&[END_OF_TEXT]);
    }

    fn mark(&mut self) {
        self.marks.push(PrefixMark { key: self.hash.finish(), bytes: self.bytes });
    }
}

/// At most [`MAX_MARKS`]: the last ones, and before them every second, fourth or so on. A longer prompt that begins in the
/// same way keeps the same ones of the beginning, or some of them.
fn thinned(marks: Vec<PrefixMark>) -> Vec<PrefixMark> {
    const LAST: usize = MAX_MARKS / 2;
    if marks.len() <= MAX_MARKS {
        return marks;
    }
    let first = marks.len() - LAST;
    let step = first.div_ceil(MAX_MARKS - LAST).next_power_of_two();
    let is_kept = |index: usize| index >= first || index.is_multiple_of(step);
    marks.into_iter().enumerate().filter(|(index, _)| is_kept(*index)).map(|(_, mark)| mark).collect()
}

#[cfg(test)]
mod tests {
    use russet_wire::conversation::Message;

    use super::*;

    fn request(texts: &[&str]) -> GenerationRequest {
        let message =
            |text: &&str| Message { role: "user".into(), content: (*text).into(), ..Message::default() };
        GenerationRequest { messages: texts.iter().map(message).collect(), ..GenerationRequest::default() }
    }

    fn marks(texts: &[&str]) -> Vec<PrefixMark> {
        prompt_marks("m", &request(texts))
    }

    #[test]
    fn prompts_share_marks_as_far_as_they_are_equal() {
        let long = "x".repeat(3 * MARK_BYTES);
        let (one, two) = (marks(&["a", &long, "b"]), marks(&["a", &long, "c", "d"]));
        assert_eq!((one.len(), two.len()), (5, 6), "two within the long text");
        assert_eq!(one[..4], two[..4]);
        assert!(!two.contains(&one[4]));
        assert_eq!(
            marks(&["a", &(long.clone() + "y"), "b"])[..3],
            one[..3],
            "the long text goes on otherwise"
        );
        assert_eq!(one[4].bytes, two[4].bytes);
        assert_ne!(marks(&["ab"]).last(), marks(&["a", "b"]).last());
        // Whatever has another cache or another beginning has other marks.
        let other = |change: &dyn Fn(&mut GenerationRequest)| {
            let mut changed = request(&["a"]);
            change(&mut changed);
            prompt_marks("m", &changed)[0].key
        };
        let keys = [
            marks(&["a"])[0].key,
            prompt_marks("m:adapter", &request(&["a"]))[0].key,
            other(&|request| request.cache_salt = "salt".into()),
            other(&|request| request.template_arguments = "{}".into()),
            other(&|request| request.tools = vec![Tool { name: "f".into(), ..Tool::default() }]),
            other(&|request| request.messages[0].role = "system".into()),
        ];
        assert!(keys.iter().enumerate().all(|(index, key)| !keys[..index].contains(key)), "{keys:?}");
        let truncated = GenerationRequest { truncate_prompt_tokens: Some(9), ..request(&["a"]) };
        assert_eq!(prompt_marks("m", &truncated), []);
    }

    #[test]
    fn raw_prompts_have_marks_too() {
        let raw = |prompt| {
            prompt_marks("m", &GenerationRequest { raw_prompt: Some(prompt), ..GenerationRequest::default() })
        };
        let (short, long) = (raw(RawPrompt::Text("x".repeat(5000))), raw(RawPrompt::Text("x".repeat(9000))));
        assert_eq!((short.len(), long.len(), short[0]), (2, 3, long[0]));
        assert_eq!(raw(RawPrompt::Tokens(vec![7; 1025]))[1].bytes, 4100);
    }

    #[test]
    fn long_conversations_keep_a_bounded_number_of_marks() {
        let texts: Vec<String> = (0..5000).map(|number| number.to_string()).collect();
        let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
        let (before, after) = (marks(&texts[..4980]), marks(&texts));
        assert!(after.len() <= MAX_MARKS && after.len() > MAX_MARKS / 2, "{}", after.len());
        assert!(after.contains(before.last().unwrap()), "where the turn before ended");
        let shared = before.iter().filter(|mark| after.contains(mark)).count();
        assert!(shared > MAX_MARKS / 2, "{shared}");
    }
}
