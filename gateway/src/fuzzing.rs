//! What the fuzz targets of `gateway/fuzz` call: a stranger's bytes go the way of a real request's body, through bounds,
//! decoding and the dialect's parser; an accepted one is answered, whole and streamed, and the answer is read as a client
//! reads it. A promise that is broken is a panic; each function returns whether the request is accepted. Not in a gateway
//! that serves.

pub(crate) mod client;
pub(crate) mod exchange;

use crate::dialects::fuzzed;

/// A body of `POST /v1/chat/completions`.
pub fn openai_chat(body: &[u8]) -> bool {
    fuzzed::openai::chat(body)
}

/// A body of `POST /v1/completions`.
pub fn openai_completion(body: &[u8]) -> bool {
    fuzzed::openai::completion(body)
}

/// A body of `POST /v1/responses`.
pub fn openai_responses(body: &[u8]) -> bool {
    fuzzed::openai::response(body)
}

/// A body of `POST /v1/messages` and of `POST /v1/messages/count_tokens`.
pub fn anthropic(body: &[u8]) -> bool {
    fuzzed::anthropic::message(body)
}

/// A body of `POST /api/chat` and of `POST /api/generate`.
pub fn ollama(body: &[u8]) -> bool {
    fuzzed::ollama::text(body)
}

/// A body of what answers with vectors or scores, in every dialect.
pub fn pooling(body: &[u8]) -> bool {
    fuzzed::openai::pooling(body) | fuzzed::ollama::pooling(body)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    type Target = (&'static str, fn(&[u8]) -> bool);

    const TARGETS: [Target; 6] = [
        ("openai_chat", openai_chat),
        ("openai_completion", openai_completion),
        ("openai_responses", openai_responses),
        ("anthropic", anthropic),
        ("ollama", ollama),
        ("pooling", pooling),
    ];

    /// Each seed, whole and cut at every byte: what a fuzz target found becomes a seed.
    #[test]
    fn seeds_of_the_fuzz_targets_keep_every_promise() {
        for (name, target) in TARGETS {
            let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/seeds").join(name);
            let seeds: Vec<Vec<u8>> = std::fs::read_dir(&folder)
                .unwrap()
                .map(|entry| std::fs::read(entry.unwrap().path()).unwrap())
                .collect();
            assert!(seeds.len() >= 3, "{name}");
            for seed in seeds {
                assert!(target(&seed), "{name} refuses {}", String::from_utf8_lossy(&seed));
                assert!((0..seed.len()).all(|end| !target(&seed[..end])), "{name} accepts a part of a seed");
            }
        }
    }
}
