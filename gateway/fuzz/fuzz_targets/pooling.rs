//! A body of requests for vectors and scores, in every dialect: refused in the dialect's own form, or answered as its clients
//! read it.
#![no_main]

libfuzzer_sys::fuzz_target!(|body: &[u8]| {
    russet_gateway::fuzzing::pooling(body);
});
