//! The streams that run beside a strike: what they are asked, how far they are, and whether they ended as they would
//! have undisturbed.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use russet_tests::ask::{self, End};
use russet_tests::cluster::{Cluster, PATIENCE};
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use super::Drawn;
use super::drawn::Aim;
use crate::faults::TOKENS;
use crate::path;

/// What answers are about that run for long.
const QUESTIONS: [&str; 3] = ["What is Russet?", "What is 17 + 25?", "Which day comes after Monday?"];
/// Tokens of an answer to a long prompt.
const AFTER_A_PROMPT: u32 = 120;

/// What came of a stream.
struct Told {
    text: String,
    end: End,
    /// The longest time without a piece.
    still: Duration,
}

/// One stream, read by a task of its own.
struct Stream {
    body: Value,
    pieces: Arc<AtomicUsize>,
    reader: JoinHandle<Result<Told>>,
}

impl Stream {
    fn begin(cluster: &Cluster, text: &str, tokens: u32) -> Self {
        let body = ask::question("smoke", text, json!({"max_tokens": tokens, "ignore_eos": true}));
        let pieces = Arc::<AtomicUsize>::default();
        let reader = tokio::spawn(read(cluster.base_url(), body.clone(), pieces.clone()));
        Self { body, pieces, reader }
    }

    /// Waits until so many pieces came.
    async fn told(&self, pieces: usize) -> Result<()> {
        let begun = Instant::now();
        while self.pieces.load(Ordering::Relaxed) < pieces {
            ensure!(!self.reader.is_finished(), "a stream ended before its piece {pieces}");
            ensure!(begun.elapsed() < PATIENCE, "a stream did not come to its piece {pieces}");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        Ok(())
    }
}

async fn read(url: String, body: Value, pieces: Arc<AtomicUsize>) -> Result<Told> {
    let (mut last, mut still) = (Instant::now(), Duration::ZERO);
    let mut answer = ask::ask(&url, &body).await?;
    let end = loop {
        let piece = answer.piece().await;
        let now = Instant::now();
        still = still.max(now - std::mem::replace(&mut last, now));
        match piece {
            Ok(_) => pieces.store(answer.pieces, Ordering::Relaxed),
            Err(end) => break end,
        }
    };
    Ok(Told { text: answer.text, end, still })
}

/// All of them.
pub struct Streams {
    running: Vec<Stream>,
    prompts: Vec<Stream>,
}

impl Streams {
    /// Begins them and waits until they are where the strike is to be.
    pub async fn begin(cluster: &Cluster, drawn: &Drawn) -> Result<Self> {
        let questions = QUESTIONS.iter().take(drawn.streams);
        let running: Vec<Stream> = questions.map(|text| Stream::begin(cluster, text, TOKENS)).collect();
        for (stream, pieces) in running.iter().zip([drawn.pieces].into_iter().chain([1; 2])) {
            stream.told(pieces).await?;
        }
        if drawn.aim != Aim::Prompt {
            return Ok(Self { running, prompts: Vec::new() });
        }
        let engine = path::rank_0_metrics(cluster).await?;
        let read = async || path::metric(&engine, "vllm:prompt_tokens_total").await;
        let (before, begun) = (read().await?, Instant::now());
        let texts = (0..drawn.prompts).map(|number| drawn.long_prompt(number));
        let prompts: Vec<Stream> = texts.map(|text| Stream::begin(cluster, &text, AFTER_A_PROMPT)).collect();
        // Each sum is no fewer tokens than that.
        let wanted = (drawn.prompts * 60 * 4 * drawn.read / 100) as f64;
        while read().await? <= before + wanted {
            ensure!(begun.elapsed() < PATIENCE, "{wanted} tokens of prompts were not read");
            if let Some(stream) = prompts.iter().find(|stream| stream.reader.is_finished()) {
                ensure!(false, "a prompt was never read: {}", stream.body);
            }
        }
        Ok(Self { running, prompts })
    }

    /// Whether a prompt is being read.
    pub fn reading(&self) -> bool {
        self.prompts.iter().any(|stream| stream.pieces.load(Ordering::Relaxed) == 0)
    }

    /// Waits for their ends and demands that each told what it tells undisturbed, every piece of it once; the longest
    /// time that one of them stood still.
    pub async fn end(self, cluster: &mut Cluster) -> Result<Duration> {
        let mut all = Vec::new();
        for Stream { body, reader, .. } in self.running.into_iter().chain(self.prompts) {
            let told = tokio::time::timeout(2 * PATIENCE, reader).await;
            all.push((body, told.context("a stream hangs")???));
        }
        super::answers_again(cluster).await?;
        let mut longest = Duration::ZERO;
        for (body, Told { text, end, still }) in all {
            let about = &body["messages"][0]["content"];
            ensure!(
                end == End::Finished("length".into()),
                "{about}: the stream ended with {end:?} after \"{text}\""
            );
            let mut undisturbed = ask::ask(&cluster.base_url(), &body).await?;
            undisturbed.finish().await;
            ensure!(text == undisturbed.text, "{about}: the text changed:\n{text}\n{}", undisturbed.text);
            longest = longest.max(still);
        }
        Ok(longest)
    }
}
