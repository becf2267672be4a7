//! What a client asks a response to be: nothing panics, each state that is not complete allows some token, and what is
//! allowed can follow.
#![no_main]

use std::sync::{Arc, LazyLock};

use libfuzzer_sys::fuzz_target;
use russet_chat::grammar::{OutputRules, Vocabulary};
use russet_chat::parser::OutputFormat;
use russet_wire::request::StructuredOutput;

static VOCABULARY: LazyLock<Arc<Vocabulary>> = LazyLock::new(|| {
    // The library catches panics of its own, and so do we; libFuzzer's hook would end the program before.
    std::panic::set_hook(Box::new(|_| {}));
    Arc::new(Vocabulary::of_bytes())
});

fuzz_target!(|input: &[u8]| {
    let [kind, walk, text @ ..] = input else { return };
    let text = String::from_utf8_lossy(text).into_owned();
    let output = match kind % 4 {
        0 | 1 => StructuredOutput::JsonSchema(text),
        2 => StructuredOutput::Regex(text),
        _ => StructuredOutput::Grammar(text),
    };
    let format = OutputFormat::default();
    let rules = OutputRules { structured_output: Some(&output), ..OutputRules::free(&format) };
    let Ok(Some(mut matcher)) = rules.matcher(|| Ok(VOCABULARY.clone())) else { return };
    let mut draw = u32::from(*walk);
    for _ in 0..48 {
        if matcher.is_complete() {
            return;
        }
        // A grammar may be too complex, which ends its response.
        let Ok(mask) = matcher.mask() else { return };
        let allowed: Vec<u32> = (0..=256).filter(|token| mask.allows(*token)).collect();
        assert!(!allowed.is_empty(), "no token may follow");
        draw = draw.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        match allowed[(draw >> 8) as usize % allowed.len()] {
            256 => return,
            token => {
                if let Err(error) = matcher.accept(token) {
                    assert!(error.to_string().contains("limit") || error.to_string().contains("too"), "{error}");
                    return;
                }
            }
        }
    }
});
