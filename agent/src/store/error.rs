//! Why a model cannot be read or copied: each error names the file, the numbers and the remedy, and
//! is one reason of a ModelCopy's conditions.

use std::io::ErrorKind;
use std::path::PathBuf;
use std::time::Duration;

use jiff::Timestamp;
use russet_crds::conditions::Reason;
use russet_model::error::FileError;
use russet_plan::quantity::show;
use thiserror::Error;

/// Why a model cannot be read or copied. Each is one reason of a ModelCopy's conditions.
#[derive(Debug, Error)]
pub enum StoreError {
    /// No scheme has this prefix.
    #[error(
        "{uri} has a scheme this agent does not know; docs/models.md lists those of this release; hf://owner/name, s3://bucket/folder, oci://registry/name:tag and file:///folder are some"
    )]
    UnknownScheme {
        /// The URI.
        uri: String,
    },
    /// The URI does not parse.
    #[error("{uri} is malformed: {problem}")]
    BadUri {
        /// The URI.
        uri: String,
        /// The problem and the correct form.
        problem: String,
    },
    /// `file://` outside the allowed folders.
    #[error(
        "this agent may not read {path}: it is outside the allowed folders ({roots}); start the agent with --allow-file-root and a folder above it"
    )]
    NotAllowed {
        /// The path.
        path: PathBuf,
        /// Allowed folders.
        roots: String,
    },
    /// The source does not exist.
    #[error("{what} does not exist ({detail}); check the URI and the revision")]
    NotFound {
        /// URL or path.
        what: String,
        /// Status or system message.
        detail: String,
    },
    /// Credentials are missing or wrong.
    #[error(
        "{what} refused access ({detail}); put what may read it into a Secret (docs/models.md: under which keys) and name it in the Model's source.secretRef"
    )]
    Forbidden {
        /// URL.
        what: String,
        /// Status.
        detail: String,
    },
    /// The source does not answer properly; retried.
    #[error("{what} cannot be reached: {detail}; it is tried again")]
    Unreachable {
        /// URL.
        what: String,
        /// Cause.
        detail: String,
    },
    /// The source is at an address that sources may not be at. It says nothing of which address, or whether anything is
    /// there.
    #[error(
        "{what} is not on the public internet, or leads to what is not (loopback, link-local and private addresses), and this agent reads no source there; its machine's owner may allow it with --allow-private-sources and a range such as 10.0.0.0/8"
    )]
    PrivateAddress {
        /// Scheme, host and port.
        what: String,
    },
    /// The server sends whole files only.
    #[error(
        "{what} is sent as a whole only, and a part of it was asked for; use a server that serves ranges"
    )]
    NoRanges {
        /// URL.
        what: String,
    },
    /// A file has another size than its listing says.
    #[error("{what} is listed with {listed} bytes, and the file has {actual}")]
    WrongSize {
        /// URL.
        what: String,
        /// Size in the listing.
        listed: u64,
        /// Size that the file's own headers say.
        actual: u64,
    },
    /// The source asks for a pause (rate limit or overload).
    #[error("{what} asks to come back later ({detail}); nothing is asked of it until {}", .until.strftime("%H:%M:%S UTC"))]
    Busy {
        /// URL.
        what: String,
        /// Status.
        detail: String,
        /// Time until the next attempt.
        after: Duration,
        /// When that is.
        until: Timestamp,
    },
    /// The listing or the headers of a model arrive too slowly; retried.
    #[error("the source did not send its listing, or the model's headers, within {} s; it is tried again", .limit.as_secs())]
    TooSlow {
        /// The limit.
        limit: Duration,
    },
    /// The transfer ended early.
    #[error("{file} ended after {got} of {expected} bytes; it is resumed from there")]
    Truncated {
        /// The file.
        file: String,
        /// Bytes on disk.
        got: u64,
        /// Bytes expected.
        expected: u64,
    },
    /// A header is malformed.
    #[error("the model cannot be read")]
    Header(#[from] FileError),
    /// The digest of the bytes is wrong.
    #[error(
        "{file} has the digest {actual}, not {expected}; the copy was thrown away and is fetched again. If this repeats, the source itself is damaged"
    )]
    Digest {
        /// The file, or `the manifest`.
        file: String,
        /// Expected digest.
        expected: String,
        /// Actual digest.
        actual: String,
    },
    /// The SHA-256 of a file in another machine's manifest is wrong.
    #[error(
        "{file} has not the SHA-256 that the other machines' manifest {id} says, though it has its BLAKE3: the first node that fetched it reported a wrong one; it is fetched from the source. Look at the node that was ready first"
    )]
    Sha256Mismatch {
        /// The file.
        file: String,
        /// Id of the manifest.
        id: String,
    },
    /// The source's file changed after it was listed.
    #[error(
        "{what} is not what was listed, so it was replaced meanwhile; the model is listed again and what changed is fetched anew"
    )]
    Replaced {
        /// URL.
        what: String,
    },
    /// Not enough disk space.
    #[error(
        "{} has {} free, but {} more are needed, {} are promised to other copies and {} stay reserved; free some space, lower the node's spec.disk.reserve, or delete a Model that is not needed here",
        .path.display(), show(*.free), show(*.need), show(*.promised), show(*.reserve)
    )]
    DiskPressure {
        /// The store.
        path: PathBuf,
        /// Key of the copy.
        key: String,
        /// Bytes free.
        free: u64,
        /// Bytes still missing.
        need: u64,
        /// Bytes that other copies still miss.
        promised: u64,
        /// Bytes reserved for the machine.
        reserve: u64,
    },
    /// No other node sends the bytes.
    #[error("no node gives the model {id}…: {detail}; it is tried again")]
    Peers {
        /// Beginning of the content id.
        id: String,
        /// Last error.
        detail: String,
    },
    /// The file system failed.
    #[error("{path} cannot be used: {source}")]
    Io {
        /// File or folder.
        path: PathBuf,
        /// System error.
        source: std::io::Error,
    },
}

impl StoreError {
    /// The reason shown in conditions.
    pub fn reason(&self) -> Reason {
        match self {
            Self::UnknownScheme { .. } | Self::NotAllowed { .. } | Self::PrivateAddress { .. } => {
                Reason::SourceNotAllowed
            }
            Self::BadUri { .. } => Reason::InvalidSpec,
            Self::NotFound { .. } => Reason::SourceNotFound,
            Self::Forbidden { .. } => Reason::SourceForbidden,
            // Another program used the reserved space; the next attempt reports how much is missing.
            Self::Io { source, .. }
                if matches!(source.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded) =>
            {
                Reason::DiskFull
            }
            Self::Unreachable { .. }
            | Self::Busy { .. }
            | Self::TooSlow { .. }
            | Self::NoRanges { .. }
            | Self::WrongSize { .. }
            | Self::Peers { .. }
            | Self::Io { .. } => Reason::SourceUnreachable,
            Self::Truncated { .. } => Reason::Truncated,
            Self::Header(_) => Reason::CorruptModel,
            Self::Digest { .. } | Self::Sha256Mismatch { .. } | Self::Replaced { .. } => {
                Reason::DigestMismatch
            }
            Self::DiskPressure { .. } => Reason::DiskPressure,
        }
    }

    /// A source that wants no requests for `after`.
    pub(super) fn busy(what: String, detail: String, after: Duration) -> Self {
        Self::Busy { what, detail, after, until: Timestamp::now() + after }
    }

    /// The message with its causes, for a condition.
    pub fn chain(&self) -> String {
        russet_telemetry::errors::chain(self)
    }

    /// Whether the same transfer may succeed soon.
    pub(super) fn transient(&self) -> bool {
        matches!(self, Self::Unreachable { .. } | Self::Busy { .. } | Self::Truncated { .. })
    }

    /// Minimum time until the next request to the source.
    pub fn retry_after(&self) -> Duration {
        match self {
            Self::Busy { after, .. } => *after,
            _ => Duration::ZERO,
        }
    }

    pub(crate) fn io(path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { path, source }
    }
}
