//! Runs one batch from where it is: checks its lines, sends each to its route, keeps the results, and says how it ended.
//! What is durable is not done again after a restart; what ran then runs again.
//!
//! ```text
//! line ─▶ route ─▶ response ─▶ store          at most MAX_LINES at once
//!   ▲       │ busy
//!   └─ wait ┘
//! ```

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use axum::http::{Extensions, HeaderMap, HeaderValue};
use futures::StreamExt as _;
use futures::stream::FuturesUnordered;
use tokio::sync::Semaphore;
use tokio::task::{JoinError, consume_budget, spawn_blocking};
use tokio::time::sleep;

use super::input::{InputLine, InputLines};
use super::line::{self, LineChecker};
use super::record::{BatchRecord, BatchStatus};
use super::result::{LineOutcome, LineResult, outcome};
use super::{Batches, Registration, RunningBatch};
use crate::offline::{Interruption, OfflineContext, OfflineRequest, retry_after};
use crate::request_id::RequestId;
use crate::request_limits::LowestPriority;
use crate::response_store::{FilePart, FilePurpose, ResponseStore, ResponseStoreError};
use crate::routes::LABELS;
use crate::serving::{BatchDialect, Dialect, unix_seconds};

/// Lines of a batch that run or wait for their turn.
const MAX_LINES: usize = 16;
/// Largest line that is checked on a thread that serves connections.
const MAX_INLINE_BYTES: usize = 64 << 10;
/// Results of lines that did not run, on their way to the disk.
const MAX_WRITES: usize = 64;

/// A batch that is to run.
pub(super) struct BatchRun {
    pub(super) context: OfflineContext,
    pub(super) store: Arc<ResponseStore>,
    pub(super) running: Arc<RunningBatch>,
    /// Its place among those that have not ended.
    pub(super) registration: Registration<Arc<Batches>>,
    /// Where batches wait for others: of its owner, and of all.
    pub(super) places: [Arc<Semaphore>; 2],
    /// Where lines of all batches wait for others.
    pub(super) lines: Arc<Semaphore>,
    /// Bounds the input in memory.
    pub(super) input: Arc<Semaphore>,
}

/// The dialect of a batch, which has batches.
#[derive(Clone, Copy)]
struct LineDialect {
    dialect: &'static Dialect,
    batches: &'static BatchDialect,
}

/// Why no more lines run.
enum LinesEnd {
    Done,
    Cancelled,
    Expired,
}

impl BatchRun {
    pub(super) async fn run(self) {
        let id = self.running.id();
        match self.run_to_end().await {
            Ok(()) => tracing::info!(id, status = ?self.running.batch().record.status, "a batch has ended"),
            Err(Interruption::Stopping) => {
                tracing::info!(id, "a batch goes on when the gateway starts again")
            }
            Err(Interruption::Lost(error)) => tracing::error!(id, %error, "a batch cannot go on"),
        }
        // Gone only now: who looks for it finds it here or as it is kept.
        drop(self.registration);
    }

    async fn run_to_end(&self) -> Result<(), Interruption> {
        let dialect = (self.context.dialect)(&self.running.batch().dialect);
        let dialect =
            dialect.and_then(|dialect| Some(LineDialect { dialect, batches: dialect.batches.as_ref()? }));
        let unknown = || ResponseStoreError::Failed("no dialect of this release made it".to_owned());
        let dialect = dialect.ok_or_else(|| Interruption::Lost(unknown()))?;
        let mut turns = Vec::new();
        for places in &self.places {
            tokio::select! {
                turn = places.clone().acquire_owned() => turns.push(turn),
                () = self.running.cancelled.cancelled() => {}
                () = self.context.stopping.cancelled() => return Err(Interruption::Stopping),
            }
        }
        loop {
            let status = self.running.batch().record.status;
            match status {
                BatchStatus::Validating | BatchStatus::InProgress
                    if self.running.cancelled.is_cancelled() =>
                {
                    self.ends(LinesEnd::Cancelled).await?;
                }
                BatchStatus::Validating => self.validate(dialect).await?,
                BatchStatus::InProgress => {
                    let end = self.run_lines(dialect).await?;
                    self.ends(end).await?;
                }
                BatchStatus::Finalizing | BatchStatus::Cancelling => self.finish(dialect).await?,
                BatchStatus::Completed
                | BatchStatus::Failed
                | BatchStatus::Cancelled
                | BatchStatus::Expired => {
                    return Ok(());
                }
            }
        }
    }

    /// Changes the record, durably.
    async fn update(&self, change: impl FnOnce(&mut BatchRecord)) -> Result<(), Interruption> {
        let mut batch = self.running.batch();
        change(&mut batch.record);
        let ended = batch.record.status.has_ended();
        self.persist(|| self.store.update_batch(&batch.id, ended, batch.record_text())).await?;
        self.running.batch.send_replace(batch);
        Ok(())
    }

    /// Writes until the store has it.
    async fn persist<F: Future<Output = Result<(), ResponseStoreError>>>(
        &self,
        write: impl Fn() -> F,
    ) -> Result<(), Interruption> {
        self.context.persist(&self.running.id(), write).await
    }

    /// The lines of the input.
    fn input_lines(&self) -> InputLines {
        let batch = self.running.batch();
        InputLines::new(self.store.clone(), &batch.owner, &batch.input, self.input.clone())
    }

    /// Checks every line, and then begins, or ends with what is wrong.
    async fn validate(&self, dialect: LineDialect) -> Result<(), Interruption> {
        let batch = self.running.batch();
        let mut checker = LineChecker::new(&batch.record.endpoint, dialect.batches.max_lines);
        let mut lines = self.input_lines();
        while !checker.is_full() && !self.running.cancelled.is_cancelled() {
            let Some(line) = lines.next().await.map_err(Interruption::Lost)? else {
                checker.finish();
                break;
            };
            checker = if line.text.len() > MAX_INLINE_BYTES {
                let check = move || {
                    checker.check(line.number, &line.text);
                    checker
                };
                let ended = |error: JoinError| ResponseStoreError::Failed(error.to_string());
                spawn_blocking(check).await.map_err(|error| Interruption::Lost(ended(error)))?
            } else {
                checker.check(line.number, &line.text);
                checker
            };
            if self.context.stopping.is_cancelled() {
                return Err(Interruption::Stopping);
            }
            consume_budget().await;
        }
        if self.running.cancelled.is_cancelled() {
            return Ok(());
        }
        let LineChecker { total, errors, .. } = checker;
        if !errors.is_empty() {
            return self
                .update(|record| {
                    record.status = BatchStatus::Failed;
                    record.line_errors = errors;
                    record.ended_at = Some(unix_seconds());
                })
                .await;
        }
        for head in batch.result_files(dialect.batches.result_purpose) {
            self.persist(|| self.store.insert_file(head.clone())).await?;
        }
        self.update(|record| {
            record.status = BatchStatus::InProgress;
            record.in_progress_at = Some(unix_seconds());
            record.total = total;
        })
        .await
    }

    /// The numbers of the lines that have results, those with responses and those with errors.
    async fn results(&self) -> Result<[Vec<u64>; 2], Interruption> {
        let batch = self.running.batch();
        let read = self.store.read(move |store| {
            let output = store.part_numbers(&batch.owner, &batch.output)?;
            Ok([output, store.part_numbers(&batch.owner, &batch.errors)?])
        });
        read.await.map_err(Interruption::Lost)
    }

    /// Runs every line that has no result yet.
    async fn run_lines(&self, dialect: LineDialect) -> Result<LinesEnd, Interruption> {
        let results = self.results().await?;
        self.running.batch.send_modify(|batch| {
            (batch.record.completed, batch.record.failed) =
                (results[0].len() as u64, results[1].len() as u64);
        });
        let done: HashSet<u64> = results.into_iter().flatten().collect();
        self.context.keys().await?;
        let left = self.running.batch().record.expires_at.saturating_sub(unix_seconds());
        let mut expiry = Box::pin(sleep(Duration::from_secs(left)));
        let (mut lines, mut is_read) = (self.input_lines(), false);
        let mut in_flight = FuturesUnordered::new();
        loop {
            let is_stopping = self.context.stopping.is_cancelled();
            if in_flight.is_empty() && is_stopping {
                return Err(Interruption::Stopping);
            }
            if in_flight.is_empty() && is_read {
                return Ok(LinesEnd::Done);
            }
            let takes_more = !is_read && !is_stopping && in_flight.len() < MAX_LINES;
            tokio::select! {
                biased;
                // What is in flight ends with this function, and so do its requests.
                () = self.running.cancelled.cancelled() => return Ok(LinesEnd::Cancelled),
                () = &mut expiry => return Ok(LinesEnd::Expired),
                () = self.context.stopping.cancelled(), if !is_stopping => {}
                Some(ended) = in_flight.next() => match ended {
                    Ok(()) => {}
                    // The others have their time.
                    Err(Interruption::Stopping) => {}
                    Err(lost) => return Err(lost),
                },
                line = lines.next(), if takes_more => match line.map_err(Interruption::Lost)? {
                    Some(line) if done.contains(&line.number) => {}
                    Some(line) => in_flight.push(self.run_line(dialect, line)),
                    None => is_read = true,
                },
            }
        }
    }

    /// Runs a line until its route says its last word, and keeps that.
    async fn run_line(&self, dialect: LineDialect, line: InputLine) -> Result<(), Interruption> {
        let lost =
            |error: serde_json::Error| Interruption::Lost(ResponseStoreError::Damaged(error.to_string()));
        let request = line::parse(&line.text).map_err(lost)?;
        let body = line.text.slice_ref(request.body.get().as_bytes());
        let mut tries = 0u32;
        let outcome = loop {
            let turn = tokio::select! {
                turn = self.lines.acquire() => turn,
                () = self.context.stopping.cancelled() => return Err(Interruption::Stopping),
            };
            let (response, request_id) = self.respond(dialect, body.clone()).await;
            let wait = retry_after(response.status(), response.headers());
            let Some(wait) = wait else { break outcome(response, request_id).await };
            drop(turn);
            tries += 1;
            self.context.wait_to_retry(wait, tries).await?;
        };
        self.keep(dialect, line.number, &request.custom_id, &outcome).await?;
        self.running.batch.send_modify(|batch| {
            batch.record.completed += u64::from(outcome.is_success());
            batch.record.failed += u64::from(!outcome.is_success());
        });
        Ok(())
    }

    /// The response of the route to this body, and the id of the request.
    async fn respond(&self, dialect: LineDialect, body: bytes::Bytes) -> (axum::response::Response, String) {
        let id = RequestId::new(&HeaderMap::new());
        let shown = id.shown.to_string();
        let batch = self.running.batch();
        let mut headers = HeaderMap::new();
        if let Ok(labels) = HeaderValue::from_str(&batch.record.labels)
            && !labels.is_empty()
        {
            headers.insert(LABELS, labels);
        }
        let mut extensions = Extensions::new();
        extensions.insert(LowestPriority);
        let (owner, path) = (&batch.owner, &batch.record.endpoint);
        let request = OfflineRequest { owner, what: "batch", id, path, headers, body, extensions };
        (self.context.respond(dialect.dialect, request).await, shown)
    }

    /// Keeps what became of a line.
    async fn keep(
        &self,
        dialect: LineDialect,
        number: u64,
        custom_id: &str,
        outcome: &LineOutcome,
    ) -> Result<(), Interruption> {
        let batch = self.running.batch();
        let unique = batch.id.rsplit('_').next().unwrap_or_default();
        let id = format!("batch_req_{unique}_{number}");
        let mut text = (dialect.batches.format)(&LineResult { id, custom_id, outcome });
        text.push(b'\n');
        let part = FilePart { first: number, text: text.into() };
        let file = if outcome.is_success() { &batch.output } else { &batch.errors };
        self.persist(|| self.store.append_part(file, part.clone())).await
    }

    /// No more lines run.
    async fn ends(&self, end: LinesEnd) -> Result<(), Interruption> {
        // Writes come to the disk in order: after this one, results that were on their way when their lines ended are there.
        self.update(|_| {}).await?;
        // Counted anew: of those in flight some were kept, and not counted.
        let [output, errors] = self.results().await?;
        let now = unix_seconds();
        self.update(|record| {
            (record.completed, record.failed) = (output.len() as u64, errors.len() as u64);
            match end {
                LinesEnd::Cancelled => {
                    (record.status, record.cancelling_at) = (BatchStatus::Cancelling, Some(now));
                }
                LinesEnd::Done | LinesEnd::Expired => {
                    (record.status, record.finalizing_at) = (BatchStatus::Finalizing, Some(now));
                    record.has_expired = matches!(end, LinesEnd::Expired);
                }
            }
        })
        .await
    }

    /// Writes down which lines did not run, and closes the files.
    async fn finish(&self, dialect: LineDialect) -> Result<(), Interruption> {
        let batch = self.running.batch();
        let status = match (batch.record.status, batch.record.has_expired) {
            (BatchStatus::Cancelling, _) => BatchStatus::Cancelled,
            (_, true) => BatchStatus::Expired,
            (_, false) => BatchStatus::Completed,
        };
        let mut empty = Vec::new();
        // One that was cancelled before it began has no files.
        if batch.record.in_progress_at.is_some() {
            if batch.record.not_run() > 0 {
                self.write_not_run(dialect, status).await?;
            }
            let [output, errors] = self.results().await?;
            let now = unix_seconds();
            let seconds =
                batch.record.output_seconds.unwrap_or(u64::MAX).min(self.store.retention().as_secs());
            for (file, results) in [(&batch.output, output), (&batch.errors, errors)] {
                if results.is_empty() {
                    empty.push(file.clone());
                } else {
                    self.persist(|| self.store.complete_file(file, now, now + seconds)).await?;
                }
            }
        }
        self.update(|record| {
            record.status = status;
            record.ended_at = Some(unix_seconds());
        })
        .await?;
        if dialect.batches.result_purpose == FilePurpose::MessageBatch {
            // Its client knows of no file that is there still.
            empty.push(batch.input.clone());
        }
        for file in empty {
            if let Err(error) = self.store.delete_file(&batch.owner, &file).await {
                tracing::warn!(file, %error, "a file of a batch is deleted when the gateway starts again");
            }
        }
        Ok(())
    }

    /// Writes down that the lines without results did not run.
    async fn write_not_run(&self, dialect: LineDialect, status: BatchStatus) -> Result<(), Interruption> {
        let outcome =
            if status == BatchStatus::Expired { LineOutcome::Expired } else { LineOutcome::Cancelled };
        let done: HashSet<u64> = self.results().await?.into_iter().flatten().collect();
        let mut lines = self.input_lines();
        let mut writes = FuturesUnordered::new();
        while let Some(line) = lines.next().await.map_err(Interruption::Lost)? {
            if done.contains(&line.number) {
                continue;
            }
            if writes.len() >= MAX_WRITES {
                writes.next().await.transpose()?;
            }
            let outcome = &outcome;
            writes.push(async move {
                // It was checked.
                let Ok(request) = line::parse(&line.text) else { return Ok(()) };
                self.keep(dialect, line.number, &request.custom_id, outcome).await
            });
        }
        while let Some(written) = writes.next().await {
            written?;
        }
        Ok(())
    }
}
