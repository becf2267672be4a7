//! Models that embed, and the most that MLX holds while they do.

use russet_rpc::engine as pb;
use russet_wire::engine_config::Dtype;
use serde_json::json;

use crate::engines::{EngineHarness, within};
use crate::random_models::{RandomModel, bert_of, qwen3_of};

/// Models with the longest text of each: an encoder whose texts are computed many at once, and a decoder of which one
/// text is longer than what others prefill at once.
pub fn models() -> [(RandomModel, u32); 2] {
    let wide = json!({
        "hidden_size": 256, "num_attention_heads": 8, "num_hidden_layers": 4, "intermediate_size": 1024,
        "max_position_embeddings": 512,
    });
    let long = json!({
        "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "num_hidden_layers": 3,
        "intermediate_size": 768, "max_position_embeddings": 8192,
    });
    [(bert_of(&wide), 512), (qwen3_of(&long), 3000)]
}

/// The most that MLX held while texts of every length up to the longest were embedded, bytes.
pub async fn peak(model: &RandomModel, layers: usize, context_tokens: u32) -> u64 {
    let mut lab = EngineHarness::new();
    lab.config.dtype = Dtype::Auto; // as agents start them
    lab.config.context_tokens = context_tokens;
    (lab.config.orphan_seconds, lab.config.smoke_prompt) = (3600, false);
    let engines = lab.start(model.dir.path(), &[layers]);
    let mut client = lab.client(&engines[0]).await;
    let lengths = [context_tokens; 5].into_iter().chain([context_tokens / 2; 3]).chain(1..60);
    let input = |length| {
        let ids = (0..length).map(|place| 3 + place % 250).collect();
        pb::EmbedInput { input: Some(pb::embed_input::Input::TokenIds(pb::TokenIds { ids })) }
    };
    let request = pb::EmbedRequest { inputs: lengths.map(input).collect(), ..pb::EmbedRequest::default() };
    let reply = within("the vectors", client.embed(request)).await.unwrap().into_inner();
    assert_eq!((reply.failed, reply.prompt_tokens.len()), (None, 67));
    engines[0].until(|_| true).await.peak_memory_bytes
}
