//! Ids of the calls of tools in one response. They depend on the request alone, so a response that another engine resumes
//! goes on with the same ones.

use russet_wire::conversation::ToolCall;
use sha2::{Digest as _, Sha256};

/// Mistral's chat templates take no other length.
const ID_LENGTH: usize = 9;
const LETTERS: &[u8; 62] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";

/// Names the calls of a response.
pub(super) struct ToolCallIds {
    request: String,
    count: u64,
}

impl ToolCallIds {
    /// The ids of a request's response.
    pub fn new(request: &str) -> Self {
        Self { request: request.to_owned(), count: 0 }
    }

    /// The call, with an id unless the model gave it one.
    pub fn named(&mut self, mut call: ToolCall) -> ToolCall {
        if call.id.is_empty() {
            let digest = Sha256::new().chain_update(self.count.to_le_bytes()).chain_update(&self.request);
            let letters = digest.finalize().into_iter().take(ID_LENGTH);
            call.id = letters.map(|byte| char::from(LETTERS[usize::from(byte) % LETTERS.len()])).collect();
        }
        self.count += 1;
        call
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_have_ids_of_their_own_that_stay_the_same() {
        let ids = |request: &str| {
            let mut ids = ToolCallIds::new(request);
            (0..3).map(|_| ids.named(ToolCall::default()).id).collect::<Vec<_>>()
        };
        let (one, other) = (ids("a"), ids("b"));
        assert_eq!(one, ids("a"));
        for id in one.iter().chain(&other) {
            assert!(id.len() == ID_LENGTH && id.bytes().all(|byte| byte.is_ascii_alphanumeric()), "{id}");
            assert_eq!(one.iter().chain(&other).filter(|same| *same == id).count(), 1);
        }
        let own = ToolCall { id: "functions.f:0".into(), ..ToolCall::default() };
        assert_eq!(ToolCallIds::new("a").named(own.clone()), own);
    }
}
