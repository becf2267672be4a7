//! A body of Ollama's chats and texts: refused in the dialect's own form, or answered, whole and streamed,
//! as its clients read it.
#![no_main]

libfuzzer_sys::fuzz_target!(|body: &[u8]| {
    russet_gateway::fuzzing::ollama(body);
});
