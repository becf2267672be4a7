//! Reference model, computed in this process for one sequence at a time: judges outputs that differ where the
//! best two tokens are so close that the order of additions decides.

use std::path::Path;

use jiff::Zoned;
use russet_chat::template::Prompt;
use russet_engine::executor::{Executor as _, SampleSpec, SequenceStep};
use russet_engine::runtime::{Runtime, RuntimeConfig};
use russet_engine::tokenizer::{ChatTokenizer, PromptLimits};
use russet_engine::weights::LoadDtype;
use russet_wire::engine_config::OverlapScheduling;
use russet_wire::request::GenerationRequest;
use tokio::sync::Mutex;

/// Two tokens are equally good in float32 if their log-probabilities differ by at most this; the exactness
/// tests have the same rule.
const MAX_LOGPROB_GAP: f32 = 5e-4;

/// A model on a single rank.
pub struct ReferenceModel {
    tokens: ChatTokenizer,
    // One sequence at a time, in the first slot.
    runtime: Mutex<Runtime>,
}

impl ReferenceModel {
    /// Loads the model in float32.
    pub fn load(model: &Path) -> Self {
        let config = RuntimeConfig {
            dtype: LoadDtype::Float32,
            overlap: OverlapScheduling::Auto,
            ..RuntimeConfig::alone(model.to_owned())
        };
        let runtime = Runtime::start(config).unwrap();
        Self { tokens: ChatTokenizer::load(model).unwrap(), runtime: Mutex::new(runtime) }
    }

    /// Fails unless every token of an output is the model's best one after the tokens before it, or equally
    /// good.
    pub async fn check(&self, question: &GenerationRequest, answer: &[u32], alone: &[u32]) {
        let limits = PromptLimits { context_tokens: u32::MAX, is_abandoned: &|| false };
        let prompt = self.tokens.prompt(&Prompt::new(&question.messages, &Zoned::now()), &limits).unwrap();
        let runtime = self.runtime.lock().await;
        // Only the first time; after that the weights are loaded.
        if runtime.progress().total_bytes == 0 {
            runtime.load().await.unwrap().unwrap();
        }
        let (last, before) = prompt.split_last().unwrap();
        if !before.is_empty() {
            runtime
                .run(vec![SequenceStep {
                    slot: 0,
                    offset: 0,
                    tokens: before.to_vec(),
                    draft_tokens: 0,
                    adapter: 0,
                    sample: None,
                    score: None,
                }])
                .await
                .unwrap()
                .unwrap();
        }
        let read = std::iter::once(last).chain(answer);
        for (index, (token, chosen)) in read.zip(answer).enumerate() {
            let choice = SampleSpec::greedy(index as u32);
            let offset = (before.len() + index) as u32;
            let step = SequenceStep {
                slot: 0,
                offset,
                tokens: vec![*token],
                draft_tokens: 0,
                adapter: 0,
                sample: Some(choice),
                score: None,
            };
            let mut stepped = runtime.run_detailed(vec![step]).await.unwrap().unwrap();
            let logprobs = stepped.remove(0).remove(0).unwrap().logprobs;
            // With `ignore_eos`, end-of-sequence tokens are not sampled.
            let ends = if question.ignore_eos { self.tokens.eos_token_ids().to_vec() } else { Vec::new() };
            let best = (0..).zip(&logprobs).filter(|(id, _)| !ends.contains(id));
            let best = best.map(|(_, logprob)| *logprob).fold(f32::NEG_INFINITY, f32::max);
            let gap = best - logprobs[*chosen as usize];
            assert!(
                gap <= MAX_LOGPROB_GAP,
                "token {index} of the answer to {:?} is {chosen}, worse than the best by {gap}\n{answer:?}\n{alone:?}",
                question.messages[0].content
            );
        }
        runtime.reset(0);
    }
}
