//! What `russet pipeline` asks a gateway for: what steps made or are about to do, and a place for files. Not here:
//! what runs a Pipeline at the gateway.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use reqwest::{Response, StatusCode, header};
use serde_json::Value;
use sha2::{Digest as _, Sha256};

use crate::client::Connection;
use crate::client_setup::endpoint;
use crate::run::{chat, nearest_gateway};

/// A gateway answers from its disk.
const ARTIFACT_TIMEOUT: Duration = Duration::from_secs(30);
/// A file of some hundred MiB over a slow network.
const UPLOAD_TIMEOUT: Duration = Duration::from_secs(600);
/// The option for the API key. Not `--key`, which is the AccessKey of a run.
const KEY_OPTION: &str = "--api-key";

/// Options that select the gateway.
#[derive(clap::Args, Clone, Debug)]
pub struct GatewayOptions {
    /// URL of the gateway that runs the Pipeline; default that of the `russet up` that wrote the kubeconfig, else
    /// http://127.0.0.1:52415.
    #[arg(long, env = "RUSSET_GATEWAY")]
    gateway: Option<String>,
    /// API key for the gateway (russet key create).
    #[arg(long, env = "RUSSET_KEY", hide_env_values = true)]
    api_key: Option<String>,
}

impl GatewayOptions {
    /// A client of the gateway. It is not asked yet.
    pub fn client(self, connection: &Connection) -> Result<GatewayClient> {
        let Self { gateway, api_key } = self;
        let gateway = match gateway {
            Some(gateway) => gateway,
            None => nearest_gateway(connection)?,
        };
        Ok(GatewayClient { http: endpoint::http_client()?, root: endpoint::normalized(&gateway)?, api_key })
    }
}

/// A client of a gateway.
pub struct GatewayClient {
    http: reqwest::Client,
    /// URL without a path.
    root: String,
    api_key: Option<String>,
}

/// What a step made or is about to do, or its first bytes.
pub struct StepArtifact {
    /// The bytes.
    pub bytes: Vec<u8>,
    /// Whether these are all.
    pub is_whole: bool,
}

/// A file that the gateway keeps.
pub struct UploadedFile {
    /// Its id.
    pub id: String,
    /// Its SHA-256, in hexadecimal digits.
    pub sha256: String,
}

impl GatewayClient {
    /// At most `max_bytes` of the artifact of a digest, `sha256:…`.
    pub async fn artifact(&self, digest: &str, max_bytes: usize) -> Result<StepArtifact> {
        let hex = digest.strip_prefix("sha256:").unwrap_or_default();
        ensure!(
            hex.len() == 64 && hex.bytes().all(|byte| byte.is_ascii_hexdigit()),
            "{digest:?} is no SHA-256 digest; write sha256: and 64 hexadecimal digits"
        );
        let request = self.http.get(self.artifact_url(digest)).timeout(ARTIFACT_TIMEOUT);
        let mut response = self.send(request).await?;
        let mut bytes = Vec::new();
        while let Some(chunk) = response.chunk().await.context("the connection to the gateway broke")? {
            bytes.extend_from_slice(&chunk);
            if bytes.len() > max_bytes {
                bytes.truncate(max_bytes);
                return Ok(StepArtifact { bytes, is_whole: false });
            }
        }
        Ok(StepArtifact { bytes, is_whole: true })
    }

    /// The command of a shell that gets the whole artifact.
    pub fn command(&self, digest: &str) -> String {
        let key = match self.api_key {
            Some(_) => "-H \"Authorization: Bearer $RUSSET_KEY\" ",
            None => "",
        };
        format!("curl {key}{}", self.artifact_url(digest))
    }

    fn artifact_url(&self, digest: &str) -> String {
        format!("{}/v1/artifacts/{digest}", self.root)
    }

    /// Uploads a file. It is read as a whole: its text becomes a part of requests, so it is not large.
    pub async fn upload(&self, path: &Path) -> Result<UploadedFile> {
        let content =
            tokio::fs::read(path).await.with_context(|| format!("{} cannot be read", path.display()))?;
        let sha256 = sha256(&content);
        let name = path.file_name().map_or("file".into(), |name| name.to_string_lossy());
        // Nothing that was written before the file knows it, so it is not in the file.
        let boundary = format!("russet-{:032x}", rand::random::<u128>());
        let request = self
            .http
            .post(format!("{}/v1/files", self.root))
            .timeout(UPLOAD_TIMEOUT)
            .header(header::CONTENT_TYPE, format!("multipart/form-data; boundary={boundary}"))
            .body(form(&boundary, &name, &content));
        let response = self.send(request).await;
        let response = response.with_context(|| format!("{} could not be uploaded", path.display()))?;
        let body = response.text().await.context("the connection to the gateway broke")?;
        let file: Option<Value> = serde_json::from_str(&body).ok();
        match file.as_ref().and_then(|file| file["id"].as_str()) {
            Some(id) => Ok(UploadedFile { id: id.to_owned(), sha256 }),
            None => bail!("what {} answers is no file; is it a gateway of Russet?", self.root),
        }
    }

    /// The response to a request, if it is a success.
    async fn send(&self, request: reqwest::RequestBuilder) -> Result<Response> {
        let request = match &self.api_key {
            Some(key) => request.bearer_auth(key),
            None => request,
        };
        let response = request.send().await.with_context(|| {
            format!("the gateway does not answer at {}; name it with --gateway http://HOST:PORT", self.root)
        })?;
        let status = response.status();
        match status {
            StatusCode::OK | StatusCode::CREATED => Ok(response),
            _ => {
                let body = response.text().await.unwrap_or_default();
                bail!(chat::error_text_with(status, &body, KEY_OPTION))
            }
        }
    }
}

/// SHA-256 in hexadecimal digits.
pub fn sha256(bytes: &[u8]) -> String {
    format!("{:x}", Sha256::digest(bytes))
}

/// The body of OpenAI's `POST /v1/files`: a form with `purpose` and `file`.
fn form(boundary: &str, file_name: &str, content: &[u8]) -> Vec<u8> {
    // As browsers write it, so that a name cannot end the header.
    let name = file_name.replace('"', "%22").replace('\r', "%0D").replace('\n', "%0A");
    let head = format!(
        "--{boundary}\r\nContent-Disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n\
         --{boundary}\r\nContent-Disposition: form-data; name=\"file\"; filename=\"{name}\"\r\n\
         Content-Type: application/octet-stream\r\n\r\n"
    );
    let end = format!("\r\n--{boundary}--\r\n");
    [head.as_bytes(), content, end.as_bytes()].concat()
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use axum::Router;
    use axum::extract::Path as UrlPath;
    use axum::http::HeaderMap;
    use axum::routing::{get, post};

    use super::*;

    const FORM: &str = "--b\r\nContent-Disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n\
        --b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a%22%0D%0Ab.txt\"\r\n\
        Content-Type: application/octet-stream\r\n\r\nno newline\r\n--b--\r\n";

    #[test]
    fn a_form_has_the_purpose_and_the_file() {
        assert_eq!(String::from_utf8(form("b", "a\"\r\nb.txt", b"no newline")).unwrap(), FORM);
        // The example of FIPS 180-4.
        assert_eq!(sha256(b"abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    }

    fn client(root: String, api_key: Option<&str>) -> GatewayClient {
        // Another test may have installed it.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let http = endpoint::http_client().unwrap();
        GatewayClient { http, root, api_key: api_key.map(str::to_owned) }
    }

    /// A gateway that knows one artifact and one key.
    async fn gateway() -> (String, Arc<Mutex<Vec<u8>>>) {
        let uploaded = Arc::new(Mutex::new(Vec::new()));
        let kept = uploaded.clone();
        let artifact = |UrlPath(digest): UrlPath<String>, headers: HeaderMap| async move {
            if headers.get("authorization").is_none_or(|key| key != "Bearer rk-1") {
                return (StatusCode::UNAUTHORIZED, r#"{"error":{"message":"a key is needed"}}"#);
            }
            match digest == format!("sha256:{}", sha256(b"hello")) {
                true => (StatusCode::OK, "hello"),
                false => (StatusCode::NOT_FOUND, r#"{"error":{"message":"it is unknown"}}"#),
            }
        };
        let upload = |body: axum::body::Bytes| async move {
            *kept.lock().unwrap() = body.to_vec();
            r#"{"id":"file-1","object":"file"}"#
        };
        let router =
            Router::new().route("/v1/artifacts/{digest}", get(artifact)).route("/v1/files", post(upload));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let root = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(async move { axum::serve(listener, router).await });
        (root, uploaded)
    }

    #[tokio::test]
    async fn artifacts_are_read_up_to_a_limit_and_files_uploaded() {
        let (root, uploaded) = gateway().await;
        let digest = format!("sha256:{}", sha256(b"hello"));
        let with_key = client(root.clone(), Some("rk-1"));
        for (max_bytes, expected, is_whole) in [(5, "hello", true), (4, "hell", false)] {
            let artifact = with_key.artifact(&digest, max_bytes).await.unwrap();
            assert_eq!((artifact.bytes.as_slice(), artifact.is_whole), (expected.as_bytes(), is_whole));
        }
        let other = format!("sha256:{}", sha256(b"other"));
        for (client, digest, expected) in [
            (&with_key, other.as_str(), "404 Not Found: it is unknown"),
            (&with_key, "sha256:../../v1/models", "is no SHA-256 digest"),
            (&client(root.clone(), None), digest.as_str(), "give it with --api-key or in RUSSET_KEY"),
            (&client("http://127.0.0.1:1".to_owned(), None), digest.as_str(), "--gateway http://HOST:PORT"),
        ] {
            let error = client.artifact(digest, 5).await.err().unwrap();
            assert!(error.to_string().contains(expected), "{error}");
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notes.txt");
        std::fs::write(&path, "hello").unwrap();
        let file = with_key.upload(&path).await.unwrap();
        assert_eq!((file.id.as_str(), file.sha256), ("file-1", sha256(b"hello")));
        let body = String::from_utf8(uploaded.lock().unwrap().clone()).unwrap();
        assert!(
            body.contains("filename=\"notes.txt\"") && body.contains("\r\n\r\nhello\r\n--russet-"),
            "{body}"
        );
    }

    #[test]
    fn a_command_has_the_header_only_where_a_key_is_used() {
        let url = "http://x:1/v1/artifacts/sha256:ab";
        assert_eq!(client("http://x:1".to_owned(), None).command("sha256:ab"), format!("curl {url}"));
        assert_eq!(
            client("http://x:1".to_owned(), Some("rk-1")).command("sha256:ab"),
            format!("curl -H \"Authorization: Bearer $RUSSET_KEY\" {url}")
        );
    }
}
