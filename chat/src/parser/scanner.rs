//! The scan that all formats share, harmony aside: finds markers, holds back what may become one, and gives
//! complete blocks to a format's `parse`. It knows no format.
//!
//! ```text
//!             reasoning begin                 call begin
//!  Reasoning <----------------- Text ------------------------> Block
//!            -----------------> ^  <---------------------------
//!             reasoning end     |     block complete: calls, or all of it as text
//! ```

use std::sync::Arc;

use super::PartList;
use super::reasoning::ReasoningFormat;
use super::tools::finder::{Finder, Verdict};
use super::tools::{BlockStart, ToolFormat};
use russet_wire::conversation::Tool;

/// A block that proves to be no call within so many bytes is scanned again behind its begin marker, so that
/// a real call inside it is found. A longer one is text as a whole, which bounds the cost.
const MAX_RESCAN: usize = 256;

/// The scan of one answer.
#[derive(Clone, Debug)]
pub(super) struct Scanner {
    reasoning: Option<&'static ReasoningFormat>,
    /// `None` when the request offers no tools.
    calls: Option<&'static ToolFormat>,
    offered: Arc<[Tool]>,
    /// One bit for each ASCII character that begins a marker: most characters need no look at the markers.
    first_chars: u128,
    mode: Mode,
    /// What may still become a marker.
    candidate: String,
    /// Whitespace (and separators between calls) that waits for what follows.
    gap: String,
    /// The gap follows a call.
    after_call: bool,
    /// Whitespace is dropped: it follows a marker of a thinking block.
    dropping_whitespace: bool,
    /// Answer text was emitted: an answer that is a bare call can no longer begin.
    text_emitted: bool,
    /// The prompt opened the thinking block and no text followed yet: some models write the marker again.
    reasoning_unwritten: bool,
}

#[derive(Clone, Debug)]
enum Mode {
    Text,
    Reasoning,
    Block(Block),
}

#[derive(Clone, Debug)]
struct Block {
    begin: &'static BlockStart,
    /// The whole block, with its markers.
    text: String,
    finder: Finder,
    /// It began in a thinking block, which it ends if it proves to be a call.
    within_reasoning: bool,
    /// The marker is the prompt's, and no part of the output.
    is_prompted: bool,
}

impl Block {
    fn new(begin: &'static BlockStart, within_reasoning: bool, is_prompted: bool) -> Self {
        Self {
            begin,
            text: begin.marker.to_owned(),
            finder: Finder::new(begin),
            within_reasoning,
            is_prompted,
        }
    }

    /// Where the output's own text begins.
    fn written_start(&self) -> usize {
        if self.is_prompted { self.begin.marker.len() } else { 0 }
    }
}

#[derive(Clone, Copy)]
enum Event {
    ReasoningBegin,
    ReasoningEnd,
    CallBegin(&'static BlockStart),
    Closer,
    Dropped,
}

enum MarkerMatch {
    Marker(Event),
    Prefix,
    Nothing,
}

impl Scanner {
    pub(super) fn new(
        reasoning: Option<&'static ReasoningFormat>,
        calls: Option<&'static ToolFormat>,
        offered: Arc<[Tool]>,
        in_reasoning: bool,
    ) -> Self {
        let in_reasoning = in_reasoning && reasoning.is_some();
        // Headers are no text, whatever is offered.
        let calls = calls.filter(|format| !offered.is_empty() || format.text_header.is_some());
        let first = calls.filter(|format| format.text_header.is_some() && !in_reasoning);
        let first = first.and_then(|format| format.begins.first());
        let first_chars = reasoning.into_iter().flat_map(ReasoningFormat::markers);
        let first_chars = first_chars.chain(calls.into_iter().flat_map(ToolFormat::markers));
        let first_chars = first_chars.filter_map(|marker| marker.bytes().next().filter(u8::is_ascii));
        Self {
            reasoning,
            calls,
            offered,
            first_chars: first_chars.fold(0, |bits, byte| bits | 1 << byte),
            mode: match first {
                Some(begin) => Mode::Block(Block::new(begin, false, true)),
                None if in_reasoning => Mode::Reasoning,
                None => Mode::Text,
            },
            candidate: String::new(),
            gap: String::new(),
            after_call: false,
            dropping_whitespace: in_reasoning,
            text_emitted: false,
            reasoning_unwritten: in_reasoning,
        }
    }

    /// Whether the text so far ends inside a thinking block.
    pub(super) fn in_reasoning(&self) -> bool {
        matches!(self.mode, Mode::Reasoning)
    }

    /// Takes the next character.
    pub(super) fn step(&mut self, c: char, parts: &mut PartList) {
        if let Mode::Block(block) = &mut self.mode {
            block.text.push(c);
            let verdict = block.finder.step(&block.text, c);
            if self.calls.and_then(|format| format.text_header).is_some_and(|header| block.text == header) {
                self.mode = Mode::Text;
                return;
            }
            self.settle(verdict, parts);
            return;
        }
        let begins_none = !c.is_ascii() || self.first_chars >> u32::from(c) & 1 == 0;
        if begins_none && self.candidate.is_empty() {
            self.plain(c, parts);
            return;
        }
        self.candidate.push(c);
        self.match_candidate(parts);
    }

    /// The output is at its end.
    pub(super) fn finish(&mut self, parts: &mut PartList) {
        while !self.candidate.is_empty() {
            self.reject_candidate(parts);
            self.match_candidate(parts);
        }
        if let Mode::Block(block) = &self.mode {
            let open_end = block.begin.open_end;
            self.close_block(open_end, parts);
        }
        if matches!(self.mode, Mode::Reasoning) {
            parts.reasoning(&self.gap);
        } else if !self.after_call {
            self.emit_gap(parts);
        }
        self.gap.clear();
    }

    fn match_candidate(&mut self, parts: &mut PartList) {
        while !self.candidate.is_empty() && !matches!(self.mode, Mode::Block(_)) {
            match self.lookup() {
                MarkerMatch::Prefix => return,
                MarkerMatch::Marker(event) => {
                    self.candidate.clear();
                    self.enter(event, parts);
                }
                MarkerMatch::Nothing => self.reject_candidate(parts),
            }
        }
    }

    /// The candidate's first character begins no marker.
    fn reject_candidate(&mut self, parts: &mut PartList) {
        let rest = {
            let mut chars = self.candidate.chars();
            let Some(first) = chars.next() else { return };
            let rest = chars.as_str().to_owned();
            self.candidate.clear();
            self.plain(first, parts);
            rest
        };
        if matches!(self.mode, Mode::Block(_)) {
            rest.chars().for_each(|c| self.step(c, parts));
        } else {
            self.candidate = rest;
        }
    }

    fn lookup(&self) -> MarkerMatch {
        let mut prefix = false;
        let candidate = self.candidate.as_str();
        let mut is = |marker: &str| {
            prefix |= marker.starts_with(candidate);
            marker == candidate
        };
        let in_reasoning = matches!(self.mode, Mode::Reasoning);
        if let Some(reasoning) = self.reasoning {
            if in_reasoning && is(reasoning.end) {
                return MarkerMatch::Marker(Event::ReasoningEnd);
            }
            if (!in_reasoning || self.reasoning_unwritten) && is(reasoning.begin) {
                return MarkerMatch::Marker(Event::ReasoningBegin);
            }
            if !in_reasoning && reasoning.dropped.iter().any(|marker| is(marker)) {
                return MarkerMatch::Marker(Event::Dropped);
            }
        }
        if let Some(format) = self.calls
            && (!in_reasoning || format.ends_reasoning)
        {
            for begin in format.begins.iter().filter(|begin| !begin.bare) {
                if is(begin.marker) {
                    return MarkerMatch::Marker(Event::CallBegin(begin));
                }
            }
            if self.after_call && format.closers.iter().any(|closer| is(closer)) {
                return MarkerMatch::Marker(Event::Closer);
            }
        }
        if prefix { MarkerMatch::Prefix } else { MarkerMatch::Nothing }
    }

    fn enter(&mut self, event: Event, parts: &mut PartList) {
        match event {
            Event::ReasoningBegin => {
                if self.text_emitted && !self.after_call {
                    self.emit_gap(parts);
                }
                self.forget_gap();
                self.mode = Mode::Reasoning;
                self.dropping_whitespace = true;
            }
            Event::ReasoningEnd => {
                self.forget_gap();
                self.mode = Mode::Text;
                self.dropping_whitespace = true;
            }
            Event::CallBegin(begin) => self.open_block(begin, parts),
            // The gap before a closer lies between a call and its end.
            Event::Closer => self.gap.clear(),
            Event::Dropped => {}
        }
        self.reasoning_unwritten = false;
    }

    fn forget_gap(&mut self) {
        self.gap.clear();
        self.after_call = false;
    }

    fn open_block(&mut self, begin: &'static BlockStart, parts: &mut PartList) {
        let within_reasoning = matches!(self.mode, Mode::Reasoning);
        let mut block = Block::new(begin, within_reasoning, false);
        let verdict = match begin.marker.chars().next() {
            Some(first) if begin.bare => block.finder.step(&block.text, first),
            _ => Verdict::More,
        };
        self.dropping_whitespace = false;
        self.mode = Mode::Block(block);
        self.settle(verdict, parts);
    }

    fn settle(&mut self, verdict: Verdict, parts: &mut PartList) {
        match verdict {
            Verdict::More => {}
            Verdict::End => self.close_block(true, parts),
            Verdict::Broken => self.break_block(parts),
            Verdict::Restart => self.restart_block(parts),
        }
    }

    /// The block ends here: its calls, or all of it as text.
    fn close_block(&mut self, parseable: bool, parts: &mut PartList) {
        let Mode::Block(block) = std::mem::replace(&mut self.mode, Mode::Text) else {
            return;
        };
        let calls = self
            .calls
            .filter(|_| parseable)
            .and_then(|format| (format.parse)(&block.text, &self.offered))
            .filter(|calls| !calls.is_empty());
        match calls {
            Some(calls) => {
                self.gap.clear();
                self.after_call = true;
                parts.calls(calls);
            }
            None => self.emit_failed(block.within_reasoning, &block.text[block.written_start()..], parts),
        }
    }

    /// Text of a block that is no call goes to where the block began.
    fn emit_failed(&mut self, within_reasoning: bool, text: &str, parts: &mut PartList) {
        if text.is_empty() {
            // The block's marker was the prompt's.
        } else if within_reasoning {
            parts.reasoning(&self.gap);
            parts.reasoning(text);
            self.gap.clear();
            self.mode = Mode::Reasoning;
        } else {
            self.emit(text, parts);
        }
    }

    /// What was read so far cannot become a call.
    fn break_block(&mut self, parts: &mut PartList) {
        let Mode::Block(block) = std::mem::replace(&mut self.mode, Mode::Text) else {
            return;
        };
        let last = block.text.char_indices().next_back().map_or(0, |(at, _)| at);
        let text_end = if block.text.len() <= MAX_RESCAN { block.begin.marker.len() } else { last };
        let (text, rest) = block.text.split_at(text_end);
        self.emit_failed(block.within_reasoning, &text[block.written_start()..], parts);
        rest.chars().for_each(|c| self.step(c, parts));
    }

    /// A begin marker where only an end could stand: the block before it ends without its own.
    fn restart_block(&mut self, parts: &mut PartList) {
        let Mode::Block(block) = &mut self.mode else {
            return;
        };
        let begin = block.begin;
        let end = block.text.len() - begin.marker.len();
        block.text.truncate(end);
        let kept = block.text.trim_end().len();
        let space = block.text.split_off(kept);
        let open_end = begin.open_end;
        self.close_block(open_end, parts);
        self.gap = space;
        self.open_block(begin, parts);
    }

    /// A character that belongs to no marker.
    fn plain(&mut self, c: char, parts: &mut PartList) {
        if c.is_whitespace() {
            if !self.dropping_whitespace {
                self.gap.push(c);
            }
            return;
        }
        self.dropping_whitespace = false;
        self.reasoning_unwritten = false;
        if matches!(self.mode, Mode::Reasoning) {
            parts.reasoning(&self.gap);
            self.gap.clear();
            parts.reasoning(c.encode_utf8(&mut [0; 4]));
            return;
        }
        if let Some(format) = self.calls {
            if self.after_call && format.separators.contains(&c) && !self.gap.contains(c) {
                self.gap.push(c);
                return;
            }
            let bare = format.begins.iter().find(|begin| begin.bare && begin.marker.starts_with(c));
            if let Some(begin) = bare.filter(|_| self.after_call || !self.text_emitted) {
                return self.open_block(begin, parts);
            }
        }
        self.emit(c.encode_utf8(&mut [0; 4]), parts);
    }

    fn emit(&mut self, text: &str, parts: &mut PartList) {
        self.emit_gap(parts);
        parts.text(text);
        self.text_emitted = true;
    }

    /// Whitespace between a call and the text after it separates that text from the text before the call;
    /// without any before, it is dropped.
    fn emit_gap(&mut self, parts: &mut PartList) {
        let separates_nothing = self.after_call && !self.text_emitted && self.gap.trim().is_empty();
        if !self.gap.is_empty() && !separates_nothing {
            parts.text(&self.gap);
            self.text_emitted |= !self.gap.trim().is_empty();
        }
        self.gap.clear();
        self.after_call = false;
    }
}
