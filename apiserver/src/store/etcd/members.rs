//! Client of the etcd members: one connection to each, one of them in use. A request whose failure may be the
//! member's is retried on the next one, which is safe because every write compares the revision it replaces.
//! If it remains unknown whether a write happened, the error says so.

use std::path::Path;
use std::time::Duration;

use etcd_client::{Certificate, Client, ConnectOptions, Error, Identity, KvClient, TlsOptions, WatchClient};
use russet_telemetry::errors;
use tokio::sync::watch;
use tokio::time::Instant;
use tonic::Code;

use super::EtcdConfig;
use crate::store::StoreError;

/// Timeout of a request to one member.
const ATTEMPT_TIMEOUT: Duration = Duration::from_millis(1500);
/// Timeout across all members: electing a new leader takes etcd between one and two seconds.
pub(super) const REQUEST_TIMEOUT: Duration = Duration::from_secs(3);
/// Backoff between two rounds over all members.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);
/// Connect timeout.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// Interval and timeout of keep-alive pings on idle connections; etcd rejects pings more often than every 5
/// s.
const KEEP_ALIVE: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(5));
/// Maximum message size: etcd's responses are as large as the stored objects.
const MAX_MESSAGE_BYTES: usize = i32::MAX as usize;

/// The etcd members.
pub(super) struct Members {
    members: Vec<(String, Client)>,
    current: watch::Sender<usize>,
}

impl std::fmt::Debug for Members {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Members").field("urls", &self.urls()).finish_non_exhaustive()
    }
}

/// A member's reply, and whether an earlier attempt without a reply may have been executed.
pub(super) struct MemberReply<T> {
    pub(super) value: T,
    pub(super) repeated: bool,
}

/// Why no member replied.
#[derive(Debug)]
pub(super) enum EtcdFailure {
    /// The request was not executed.
    Unreachable(String),
    /// The request may have been executed.
    Undecided(String),
    /// The history no longer contains the revision.
    Compacted,
    /// etcd rejected it.
    Refused(String),
}

impl EtcdFailure {
    /// Whether the error is about certificates, which waiting does not fix.
    pub(super) fn concerns_certificates(&self) -> bool {
        let (Self::Unreachable(why) | Self::Undecided(why) | Self::Refused(why)) = self else { return false };
        let why = why.to_lowercase();
        ["certificate", "unknownca", "unknown ca"].iter().any(|sign| why.contains(sign))
    }

    /// The error of a failed read, which can always be retried.
    pub(super) fn into_read_error(self, members: &Members) -> StoreError {
        match self {
            Self::Unreachable(why) | Self::Undecided(why) => {
                StoreError::Unreachable { endpoints: members.urls(), why }
            }
            Self::Compacted => StoreError::Compacted { asked: 0, oldest: 0 },
            Self::Refused(why) => StoreError::Refused { why },
        }
    }

    /// The error of a failed write.
    pub(super) fn into_write_error(self, members: &Members) -> StoreError {
        match self {
            Self::Undecided(why) => StoreError::Undecided { endpoints: members.urls(), why },
            other => other.into_read_error(members),
        }
    }
}

impl Members {
    /// A client for these members; each connection is opened when it is first used.
    pub(super) async fn new(config: &EtcdConfig) -> Result<Self, StoreError> {
        let wrong = |why: String| StoreError::Settings { why };
        if config.endpoints.is_empty() {
            return Err(wrong("no endpoint is given; pass --etcd-endpoints https://HOST:2379".into()));
        }
        // Messages of a store that does not answer name its endpoints.
        if config.endpoints.iter().any(|url| url.contains('@')) {
            return Err(wrong(
                "an endpoint holds a login, which etcd does not take; name a client certificate with --etcd-certfile and --etcd-keyfile".into(),
            ));
        }
        let (interval, timeout) = KEEP_ALIVE;
        let mut options = ConnectOptions::new()
            .with_connect_timeout(CONNECT_TIMEOUT)
            .with_keep_alive(interval, timeout)
            .with_keep_alive_while_idle(true)
            // Otherwise a member that is cut off from the others would keep a silent watch open.
            .with_require_leader(true);
        if let Some(tls) = tls(config)? {
            options = options.with_tls(tls);
        }
        let mut members = Vec::new();
        for url in &config.endpoints {
            let client = Client::connect([url.as_str()], Some(options.clone())).await;
            let client =
                client.map_err(|error| wrong(format!("{url} cannot be used: {}", error_text(&error))))?;
            members.push((url.clone(), client));
        }
        Ok(Self { members, current: watch::Sender::new(0) })
    }

    /// All URLs, for messages.
    pub(super) fn urls(&self) -> String {
        self.members.iter().map(|(url, _)| url.as_str()).collect::<Vec<_>>().join(", ")
    }

    /// The index of the member in use, and its changes.
    pub(super) fn current(&self) -> watch::Receiver<usize> {
        self.current.subscribe()
    }

    /// A watch client for a member.
    pub(super) fn watcher(&self, at: usize) -> Option<WatchClient> {
        Some(self.members.get(at)?.1.watch_client().max_decoding_message_size(MAX_MESSAGE_BYTES))
    }

    /// Fails over to the next member, unless another task did so before.
    pub(super) fn fail_over(&self, at: usize) {
        let next = (at + 1) % self.members.len();
        let left = self.current.send_if_modified(|current| {
            let leaves = *current == at && next != at;
            if leaves {
                *current = next;
            }
            leaves
        });
        if left && let (Some((from, _)), Some((to, _))) = (self.members.get(at), self.members.get(next)) {
            tracing::warn!(from, to, "an etcd member failed; the next one is tried");
        }
    }

    /// Sends a request to one member after the other until one replies.
    pub(super) async fn request<T, F>(
        &self,
        request: impl Fn(KvClient) -> F,
    ) -> Result<MemberReply<T>, EtcdFailure>
    where
        F: Future<Output = Result<T, Error>>,
    {
        self.request_by(Instant::now() + REQUEST_TIMEOUT, request).await
    }

    /// The same with a shorter timeout: nothing is sent after `deadline`.
    pub(super) async fn request_by<T, F>(
        &self,
        deadline: Instant,
        request: impl Fn(KvClient) -> F,
    ) -> Result<MemberReply<T>, EtcdFailure>
    where
        F: Future<Output = Result<T, Error>>,
    {
        let started = Instant::now();
        if started >= deadline {
            return Err(EtcdFailure::Unreachable(
                "the deadline of the request passed before it could be sent".into(),
            ));
        }
        let deadline = deadline.min(started + REQUEST_TIMEOUT);
        let mut repeated = false;
        for tried in 1.. {
            let at = *self.current.borrow();
            let Some((url, client)) = self.members.get(at) else { break };
            let kv = client.kv_client().max_decoding_message_size(MAX_MESSAGE_BYTES);
            let left = deadline.saturating_duration_since(Instant::now()).min(ATTEMPT_TIMEOUT);
            let why = match tokio::time::timeout(left, request(kv)).await {
                Ok(Ok(value)) => return Ok(MemberReply { value, repeated }),
                Ok(Err(error)) => match classify(&error) {
                    ErrorClass::Final(failure) => return Err(failure),
                    ErrorClass::NotSent => format!("{url}: {}", error_text(&error)),
                    ErrorClass::Unknown => {
                        repeated = true;
                        format!("{url}: {}", error_text(&error))
                    }
                },
                Err(_) => {
                    repeated = true;
                    format!("{url}: no answer")
                }
            };
            self.fail_over(at);
            if Instant::now() + RETRY_INTERVAL >= deadline {
                let why = format!("{why}; tried for {:.1} s", started.elapsed().as_secs_f64());
                return Err(if repeated {
                    EtcdFailure::Undecided(why)
                } else {
                    EtcdFailure::Unreachable(why)
                });
            }
            if tried % self.members.len() == 0 {
                tokio::time::sleep(RETRY_INTERVAL).await;
            }
        }
        Err(EtcdFailure::Unreachable("there are no members".into()))
    }
}

enum ErrorClass {
    /// Another member would give the same error.
    Final(EtcdFailure),
    /// The request was not executed.
    NotSent,
    /// The request may have been executed.
    Unknown,
}

fn classify(error: &Error) -> ErrorClass {
    let Error::GRpcStatus(status) = error else {
        return ErrorClass::Unknown;
    };
    let text = error_text(error).to_lowercase();
    match status.code() {
        Code::OutOfRange if text.contains("compacted") => ErrorClass::Final(EtcdFailure::Compacted),
        Code::InvalidArgument | Code::OutOfRange | Code::ResourceExhausted => {
            ErrorClass::Final(EtcdFailure::Refused(status.message().to_string()))
        }
        Code::PermissionDenied | Code::Unauthenticated => {
            ErrorClass::Final(EtcdFailure::Refused(status.message().to_string()))
        }
        // These errors mean that no connection was made. A connection that broke later is different: the
        // request may have arrived.
        _ if [
            "no leader",
            "tcp connect error",
            "connection refused",
            "dns error",
            "certificate",
            "handshake",
        ]
        .iter()
        .any(|sign| text.contains(sign)) =>
        {
            ErrorClass::NotSent
        }
        _ => ErrorClass::Unknown,
    }
}

/// An error with all its sources: the transport's innermost source is the informative one.
pub(super) fn error_text(error: &Error) -> String {
    let Error::GRpcStatus(status) = error else { return error.to_string() };
    errors::with_sources(status.message(), status)
}

fn tls(config: &EtcdConfig) -> Result<Option<TlsOptions>, StoreError> {
    let wrong = |why: &str| StoreError::Settings { why: why.into() };
    let secure = config.endpoints.iter().filter(|url| url.starts_with("https://")).count();
    let named = config.ca_file.is_some() || config.cert_file.is_some() || config.key_file.is_some();
    if secure == 0 {
        let plain = config.endpoints.iter().all(|url| url.starts_with("http://"));
        return match (plain, named) {
            (true, false) => Ok(None),
            (true, true) => Err(wrong("certificates are given, but no endpoint begins with https://")),
            (false, _) => {
                Err(wrong("every endpoint must begin with https:// (or http:// on a private network)"))
            }
        };
    }
    if secure < config.endpoints.len() {
        return Err(wrong("either all endpoints begin with https:// or none"));
    }
    let mut tls = TlsOptions::new();
    let Some(ca) = &config.ca_file else {
        return Err(wrong("https:// requires the CA of etcd's certificates; pass --etcd-cafile"));
    };
    tls = tls.ca_certificate(Certificate::from_pem(read(ca)?));
    match (&config.cert_file, &config.key_file) {
        (Some(cert), Some(key)) => tls = tls.identity(Identity::from_pem(read(cert)?, read(key)?)),
        (None, None) => {}
        _ => return Err(wrong("--etcd-certfile and --etcd-keyfile must be given together")),
    }
    Ok(Some(tls))
}

fn read(path: &Path) -> Result<Vec<u8>, StoreError> {
    std::fs::read(path)
        .map_err(|error| StoreError::Settings { why: format!("{} cannot be read: {error}", path.display()) })
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    #[tokio::test]
    async fn login_in_an_endpoint_is_refused_without_being_shown() {
        let config = EtcdConfig::new(["http://me:secret@127.0.0.1:1".to_owned()]);
        let error = Members::new(&config).await.err().unwrap().to_string();
        assert!(error.contains("--etcd-certfile") && !error.contains("secret"), "{error}");
    }

    #[tokio::test]
    async fn no_request_is_sent_to_etcd_after_the_deadline() {
        let config = EtcdConfig::new(["http://127.0.0.1:1".to_string(), "http://127.0.0.1:2".to_string()]);
        let members = Members::new(&config).await.unwrap();
        let asked = RefCell::new(Vec::new());
        let silent = |_: KvClient| {
            asked.borrow_mut().push(Instant::now());
            std::future::pending::<Result<(), Error>>()
        };
        let over = members.request_by(Instant::now(), silent).await;
        assert!(
            matches!(over, Err(EtcdFailure::Unreachable(_))),
            "nothing was sent, so nothing can have happened"
        );
        assert!(asked.borrow().is_empty());
        let deadline = Instant::now() + RETRY_INTERVAL * 5;
        let late = members.request_by(deadline, silent).await;
        assert!(matches!(late, Err(EtcdFailure::Undecided(_))), "what was sent may have been done");
        assert!(!asked.borrow().is_empty() && asked.borrow().iter().all(|at| *at < deadline));
    }
}
