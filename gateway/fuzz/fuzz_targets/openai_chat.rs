//! A body of OpenAI's chat completions: refused in the dialect's own form, or answered, whole and streamed,
//! as its clients read it.
#![no_main]

libfuzzer_sys::fuzz_target!(|body: &[u8]| {
    russet_gateway::fuzzing::openai_chat(body);
});
