//! Streams that run during a fault: their prompts, progress, and whether they ended as they would have
//! undisturbed.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use russet_tests::chat::{self, StreamEnd};
use russet_tests::cluster::{TestCluster, WAIT_TIMEOUT};
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use super::FaultDraw;
use super::draw::Aim;
use crate::faults::TOKENS;
use crate::path;

/// Prompts with long answers.
const QUESTIONS: [&str; 3] = ["What is Russet?", "What is 17 + 25?", "Which day comes after Monday?"];
/// Output tokens after a long prompt.
const PROMPT_ANSWER_TOKENS: u32 = 120;

/// Result of a stream.
struct StreamResult {
    text: String,
    end: StreamEnd,
    /// The longest time without a chunk.
    longest_pause: Duration,
}

/// One stream, read by its own task.
struct ReadStream {
    body: Value,
    pieces: Arc<AtomicUsize>,
    reader: JoinHandle<Result<StreamResult>>,
}

impl ReadStream {
    fn start(cluster: &TestCluster, text: &str, tokens: u32) -> Self {
        let body = chat::question("smoke", text, json!({"max_tokens": tokens, "ignore_eos": true}));
        let pieces = Arc::<AtomicUsize>::default();
        let reader = tokio::spawn(read(cluster.base_url(), body.clone(), pieces.clone()));
        Self { body, pieces, reader }
    }

    /// Waits until this many chunks have arrived.
    async fn until_pieces(&self, pieces: usize) -> Result<()> {
        let started = Instant::now();
        while self.pieces.load(Ordering::Relaxed) < pieces {
            ensure!(!self.reader.is_finished(), "a stream ended before its piece {pieces}");
            ensure!(started.elapsed() < WAIT_TIMEOUT, "a stream did not come to its piece {pieces}");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        Ok(())
    }
}

async fn read(url: String, body: Value, pieces: Arc<AtomicUsize>) -> Result<StreamResult> {
    let (mut last, mut still) = (Instant::now(), Duration::ZERO);
    let mut answer = chat::ask(&url, &body).await?;
    let end = loop {
        let piece = answer.piece().await;
        let now = Instant::now();
        still = still.max(now - std::mem::replace(&mut last, now));
        match piece {
            Ok(_) => pieces.store(answer.pieces, Ordering::Relaxed),
            Err(end) => break end,
        }
    };
    Ok(StreamResult { text: answer.text, end, longest_pause: still })
}

/// All of them.
pub struct Streams {
    running: Vec<ReadStream>,
    prompts: Vec<ReadStream>,
}

impl Streams {
    /// Starts them and waits until they have the progress for the fault.
    pub async fn start(cluster: &TestCluster, drawn: &FaultDraw) -> Result<Self> {
        let questions = QUESTIONS.iter().take(drawn.streams);
        let running: Vec<ReadStream> =
            questions.map(|text| ReadStream::start(cluster, text, TOKENS)).collect();
        for (stream, pieces) in running.iter().zip([drawn.pieces].into_iter().chain([1; 2])) {
            stream.until_pieces(pieces).await?;
        }
        if drawn.aim != Aim::Prompt {
            return Ok(Self { running, prompts: Vec::new() });
        }
        let engine = path::rank_0_metrics(cluster).await?;
        let read = async || path::metric(&engine, "vllm:prompt_tokens_total").await;
        let (before, started) = (read().await?, Instant::now());
        let texts = (0..drawn.prompts).map(|number| drawn.long_prompt(number));
        let prompts: Vec<ReadStream> =
            texts.map(|text| ReadStream::start(cluster, &text, PROMPT_ANSWER_TOKENS)).collect();
        // A sum has at least this many tokens.
        let expected = (drawn.prompts * 60 * 4 * drawn.read / 100) as f64;
        while read().await? <= before + expected {
            ensure!(started.elapsed() < WAIT_TIMEOUT, "{expected} tokens of prompts were not read");
            if let Some(stream) = prompts.iter().find(|stream| stream.reader.is_finished()) {
                ensure!(false, "a prompt was never read: {}", stream.body);
            }
        }
        Ok(Self { running, prompts })
    }

    /// Whether a prompt is in prefill.
    pub fn reading(&self) -> bool {
        self.prompts.iter().any(|stream| stream.pieces.load(Ordering::Relaxed) == 0)
    }

    /// Waits until they end and requires that each has the undisturbed output, with every chunk once; returns
    /// the longest stall of any.
    pub async fn end(self, cluster: &mut TestCluster) -> Result<Duration> {
        let mut all = Vec::new();
        for ReadStream { body, reader, .. } in self.running.into_iter().chain(self.prompts) {
            let result = tokio::time::timeout(2 * WAIT_TIMEOUT, reader).await;
            all.push((body, result.context("a stream hangs")???));
        }
        super::answers_again(cluster).await?;
        let mut longest = Duration::ZERO;
        for (body, StreamResult { text, end, longest_pause: still }) in all {
            let about = &body["messages"][0]["content"];
            ensure!(
                end == StreamEnd::Finished("length".into()),
                "{about}: the stream ended with {end:?} after \"{text}\""
            );
            let mut undisturbed = chat::ask(&cluster.base_url(), &body).await?;
            undisturbed.finish().await;
            ensure!(text == undisturbed.text, "{about}: the text changed:\n{text}\n{}", undisturbed.text);
            longest = longest.max(still);
        }
        Ok(longest)
    }
}
