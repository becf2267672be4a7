//! `POST /v1/files`: a form whose file goes to the store as it arrives.

use std::time::Duration;

use axum::extract::multipart::{Field, MultipartError};
use axum::extract::{FromRequest as _, Multipart, Request};
use tokio::time::timeout;

use crate::error::{ErrorKind, GatewayError, shown};
use crate::response_store::{FileHead, FilePurpose};
use crate::serving::{FileUpload, OwnFiles};

/// Longest field but for the file.
const MAX_FIELD_BYTES: usize = 1024;
/// Longest name of a file.
const MAX_NAME_BYTES: usize = 255;
/// Most fields of a form.
const MAX_FIELDS: usize = 16;
/// How long a file lives, in seconds; OpenAI's numbers.
const EXPIRES_AFTER: std::ops::RangeInclusive<u64> = 3600..=2_592_000;
/// Time for the rest of a refused form.
const DISCARD_TIMEOUT: Duration = Duration::from_secs(10);

/// The uploaded file, each piece of which has to arrive within the timeout.
pub(super) async fn upload(
    own: &OwnFiles,
    id: String,
    request: Request,
    piece_timeout: Duration,
) -> Result<FileHead, GatewayError> {
    let form = Multipart::from_request(request, &()).await.map_err(|error| {
        let message = format!("the body must be multipart/form-data with `purpose` and `file`: {error}");
        GatewayError::new(ErrorKind::InvalidRequest, message)
    });
    let mut form = Form { form: form?, piece_timeout };
    let uploaded = form.read(own, id).await;
    if uploaded.is_err() {
        // A client that still sends would not see the answer.
        let rest = async { while let Ok(Some(_)) = form.form.next_field().await {} };
        let _ = timeout(DISCARD_TIMEOUT, rest).await;
    }
    uploaded
}

struct Form {
    form: Multipart,
    piece_timeout: Duration,
}

impl Form {
    async fn read(&mut self, own: &OwnFiles, id: String) -> Result<FileHead, GatewayError> {
        let piece_timeout = self.piece_timeout;
        let (mut file, mut purpose, mut expires_after) = (None, None, None);
        for _ in 0..MAX_FIELDS {
            let next = timeout(piece_timeout, self.form.next_field()).await;
            let Some(mut field) = next.map_err(|_| late(piece_timeout))?.map_err(cut)? else { break };
            match field.name().unwrap_or_default().to_owned().as_str() {
                "file" if file.is_none() => {
                    let name = field.file_name().unwrap_or("file").to_owned();
                    if name.is_empty() || name.len() > MAX_NAME_BYTES {
                        let message = format!(
                            "the name of the file has {} bytes, not 1 to {MAX_NAME_BYTES}",
                            name.len()
                        );
                        return Err(GatewayError::field("file", message));
                    }
                    let mut upload = own.upload(id.clone(), name).await?;
                    receive(piece_timeout, field, &mut upload).await?;
                    file = Some(upload);
                }
                "purpose" => {
                    purpose = Some(check_purpose(text(piece_timeout, &mut field, "purpose").await?)?)
                }
                "expires_after[anchor]" => {
                    if text(piece_timeout, &mut field, "expires_after").await? != "created_at" {
                        let message = "`expires_after[anchor]` must be created_at";
                        return Err(GatewayError::field("expires_after", message));
                    }
                }
                "expires_after[seconds]" => {
                    let seconds = text(piece_timeout, &mut field, "expires_after").await?;
                    expires_after = Some(check_seconds(seconds.parse().ok(), "expires_after")?);
                }
                name => {
                    let name = shown(name);
                    let message = format!(
                        "a form has `file` once, `purpose` and `expires_after`, and not `{name}` here"
                    );
                    return Err(GatewayError::field(name, message));
                }
            }
        }
        purpose.ok_or_else(|| GatewayError::field("purpose", "`purpose` is missing; send batch"))?;
        let file = file.ok_or_else(|| GatewayError::field("file", "`file` is missing"))?;
        file.finish(expires_after).await
    }
}

async fn receive(
    piece_timeout: Duration,
    mut field: Field<'_>,
    upload: &mut FileUpload,
) -> Result<(), GatewayError> {
    loop {
        let piece = timeout(piece_timeout, field.chunk()).await.map_err(|_| late(piece_timeout))?;
        match piece.map_err(cut)? {
            Some(piece) => upload.write(&piece).await?,
            None => return Ok(()),
        }
    }
}

fn late(piece_timeout: Duration) -> GatewayError {
    let message = format!("no more of the file arrived within {piece_timeout:?}; send it again");
    GatewayError::new(ErrorKind::BodyTimeout, message)
}

fn cut(error: MultipartError) -> GatewayError {
    GatewayError::new(ErrorKind::InvalidRequest, format!("the form cannot be read: {}", error.body_text()))
}

/// The text of a short field.
async fn text(piece_timeout: Duration, field: &mut Field<'_>, name: &str) -> Result<String, GatewayError> {
    let mut bytes = Vec::new();
    loop {
        let piece = timeout(piece_timeout, field.chunk()).await.map_err(|_| late(piece_timeout))?;
        match piece.map_err(cut)? {
            Some(piece) if bytes.len() + piece.len() <= MAX_FIELD_BYTES => bytes.extend_from_slice(&piece),
            Some(_) => {
                let message = format!("`{name}` is longer than {MAX_FIELD_BYTES} bytes");
                return Err(GatewayError::field(name, message));
            }
            None => break,
        }
    }
    String::from_utf8(bytes).map_err(|_| GatewayError::field(name, format!("`{name}` is not UTF-8")))
}

fn check_purpose(purpose: String) -> Result<(), GatewayError> {
    if purpose == FilePurpose::Batch.as_str() {
        return Ok(());
    }
    let purpose = shown(&purpose);
    let message = format!("files of purpose `{purpose}` are not kept here; `purpose` must be batch");
    Err(GatewayError::field("purpose", message))
}

/// A time that a file lives.
pub(in crate::dialects::openai) fn check_seconds(
    seconds: Option<u64>,
    field: &str,
) -> Result<u64, GatewayError> {
    seconds.filter(|seconds| EXPIRES_AFTER.contains(seconds)).ok_or_else(|| {
        let (min, max) = (EXPIRES_AFTER.start(), EXPIRES_AFTER.end());
        GatewayError::field(field, format!("`seconds` of `{field}` must be from {min} to {max}"))
    })
}
