//! OpenAI client of the tests: sends a prompt over HTTP and reads the streamed response.

use anyhow::{Context, Result};
use futures::StreamExt as _;
use serde_json::{Value, json};

/// How a stream ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StreamEnd {
    /// With a finish reason and the final marker.
    Finished(String),
    /// With a typed error event; the code.
    Failed(String),
    /// The connection broke: only a dead gateway may cause this.
    Broken,
}

/// A response being read.
pub struct StreamedAnswer {
    lines: std::pin::Pin<Box<dyn futures::Stream<Item = Result<String>> + Send>>,
    /// Text so far.
    pub text: String,
    /// Chunks that contained text.
    pub pieces: usize,
    /// By which the gateway's log knows it.
    pub request_id: String,
    finish_reason: Option<String>,
}

/// Body of a chat request.
pub fn question(model: &str, text: &str, extra: Value) -> Value {
    let mut body = json!({
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "stream": true,
    });
    if let (Some(body), Some(extra)) = (body.as_object_mut(), extra.as_object()) {
        body.extend(extra.clone());
    }
    body
}

/// Sends the request; an HTTP error becomes an error with the server's message.
pub async fn ask(base_url: &str, body: &Value) -> Result<StreamedAnswer> {
    read(client()?.post(format!("{base_url}/chat/completions")).json(body)).await
}

/// The same with an API key.
pub async fn ask_by(key: &str, base_url: &str, body: &Value) -> Result<StreamedAnswer> {
    read(client()?.post(format!("{base_url}/chat/completions")).bearer_auth(key).json(body)).await
}

async fn read(request: reqwest::RequestBuilder) -> Result<StreamedAnswer> {
    let response = request.send().await?;
    let status = response.status();
    if !status.is_success() {
        anyhow::bail!("HTTP {status}: {}", response.text().await.unwrap_or_default());
    }
    let id = response.headers().get("x-request-id").and_then(|id| id.to_str().ok());
    let request_id = id.context("the response has no x-request-id")?.to_owned();
    let mut buffer = Vec::new();
    let lines = async_lines(
        response.bytes_stream().map(move |chunk| chunk.context("the connection broke")),
        std::mem::take(&mut buffer),
    );
    Ok(StreamedAnswer {
        lines: Box::pin(lines),
        text: String::new(),
        pieces: 0,
        request_id,
        finish_reason: None,
    })
}

/// Sends a prompt and reads to the end; returns the text.
pub async fn answer(base_url: &str, model: &str, text: &str) -> Result<String> {
    let mut answer = ask(base_url, &question(model, text, json!({"max_tokens": 200}))).await?;
    match answer.finish().await {
        StreamEnd::Finished(_) => Ok(answer.text),
        other => anyhow::bail!("the answer to \"{text}\" ended with {other:?} after \"{}\"", answer.text),
    }
}

/// An HTTP client without proxies: all servers are on this machine.
pub fn client() -> Result<reqwest::Client> {
    Ok(reqwest::Client::builder().no_proxy().build()?)
}

impl StreamedAnswer {
    /// The next chunk of text; `None` at the end, which [`Answer::finish`] names.
    pub async fn piece(&mut self) -> Result<Option<String>, StreamEnd> {
        loop {
            let line = match self.lines.next().await {
                Some(Ok(line)) => line,
                Some(Err(_)) | None => return Err(StreamEnd::Broken),
            };
            let Some(data) = line.strip_prefix("data: ") else { continue };
            if data == "[DONE]" {
                return match self.finish_reason.take() {
                    Some(reason) => Err(StreamEnd::Finished(reason)),
                    None => Err(StreamEnd::Broken),
                };
            }
            let Ok(event) = serde_json::from_str::<Value>(data) else { return Err(StreamEnd::Broken) };
            if let Some(error) = event.get("error") {
                return Err(StreamEnd::Failed(error["code"].as_str().unwrap_or("").to_owned()));
            }
            let choice = &event["choices"][0];
            if let Some(reason) = choice["finish_reason"].as_str() {
                self.finish_reason = Some(reason.to_owned());
            }
            if let Some(text) = choice["delta"]["content"].as_str().filter(|text| !text.is_empty()) {
                self.text.push_str(text);
                self.pieces += 1;
                return Ok(Some(text.to_owned()));
            }
        }
    }

    /// Reads to the end.
    pub async fn finish(&mut self) -> StreamEnd {
        loop {
            if let Err(end) = self.piece().await {
                return end;
            }
        }
    }
}

fn async_lines<B: AsRef<[u8]>>(
    chunks: impl futures::Stream<Item = Result<B>> + Send + 'static,
    buffer: Vec<u8>,
) -> impl futures::Stream<Item = Result<String>> + Send {
    let chunks = Box::pin(chunks);
    futures::stream::unfold((chunks, buffer), |(mut chunks, mut buffer)| async move {
        loop {
            if let Some(end) = buffer.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = buffer.drain(..=end).collect();
                let line = String::from_utf8_lossy(&line).trim_end().to_owned();
                return Some((Ok(line), (chunks, buffer)));
            }
            match chunks.next().await {
                Some(Ok(chunk)) => buffer.extend_from_slice(chunk.as_ref()),
                Some(Err(error)) => return Some((Err(error), (chunks, buffer))),
                None => return None,
            }
        }
    })
}
