//! Entries of the audit log and their lines: JSON, its SHA-256 and the signature of that, with tabs between them. The JSON has
//! the hash of the line before it, so one signature is that of all lines before it: of lines that are written together, the
//! last has one.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use ring::signature::{ED25519, Ed25519KeyPair, UnparsedPublicKey};
use russet_crds::{Money, PowerSource};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

/// A hash as the log has it.
pub(super) type Hash = [u8; 32];

/// What happened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum AuditEvent {
    /// A gateway began to write.
    Opened {
        /// Its release.
        release: String,
        /// Its key, in hexadecimal.
        public_key: String,
    },
    /// A request is about to leave the cluster.
    Left(DepartedRequest),
    /// A request ended.
    Completed(CompletedRequest),
    /// Entries could not be written, because the disk was too slow or full.
    Lost {
        /// How many.
        entries: u64,
    },
}

/// A request that leaves.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DepartedRequest {
    /// Its unique id, which the logs of engines have too.
    pub request: String,
    /// `namespace/name` of its AccessKey; none on loopback while there is no key.
    pub key: Option<String>,
    /// `namespace/name` of the ModelProvider.
    pub provider: String,
    /// The model, as the provider names it.
    pub model: String,
    /// Where the provider is.
    pub zone: String,
    /// How far the request might go.
    pub limit: String,
    /// Who says so.
    pub limit_by: String,
}

/// A request that ended.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CompletedRequest {
    /// Its unique id.
    pub request: String,
    /// `namespace/name` of its AccessKey; none on loopback while there is no key.
    pub key: Option<String>,
    /// The model as its client named it.
    pub model: String,
    /// `namespace/pipeline/step` of the step of a Pipeline that sent it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<String>,
    /// `namespace/name` of the PipelineRun that answered it: its steps have entries of their own, with how far they went and what
    /// they used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run: Option<String>,
    /// The farthest zone that it went to.
    pub zone: String,
    /// How it ended: `finished`, `client_left`, or the code of an error.
    pub outcome: String,
    /// What it used. Entries of earlier releases do not say it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub usage: Option<AuditUsage>,
}

/// What a request used.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct AuditUsage {
    /// Tokens of its prompts.
    pub prompt_tokens: u64,
    /// Tokens of them that were cached.
    pub cached_tokens: u64,
    /// Tokens of its answers, as many as there were when its client left.
    pub completion_tokens: u64,
    /// Whether it got an answer that was kept: nothing computed these tokens again.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub kept_answer: bool,
    /// `namespace/name` of the ModelProvider that answered; none where this cluster did, or nobody.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub provider: Option<String>,
    /// What that provider's price makes of the tokens; none without a price.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cost: Option<Money>,
    /// Microseconds that engines of this cluster computed for it; none where one did not say it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub engine_microseconds: Option<u64>,
    /// Thousandths of a joule that their machines drew meanwhile; none where nobody knows the watts of one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub millijoules: Option<u64>,
    /// Whether all these watts were measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub power: Option<PowerSource>,
    /// What that electricity cost; none where one of the machines has no price.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub electricity: Option<Money>,
    /// Whether engines of this cluster computed a part of it, and nobody knows at how many joules, whoever answered the
    /// rest.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub unmetered: bool,
}

/// A line, before it is signed.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct AuditEntry {
    /// Its number, from 1.
    pub(super) number: u64,
    /// When it was written.
    pub(super) at: String,
    /// The hash of the line before it; zeros for the first.
    pub(super) previous: String,
    #[serde(flatten)]
    pub(super) event: AuditEvent,
}

impl AuditEntry {
    /// Its line with the newline, and its hash; signed, where there is a key.
    pub(super) fn line(&self, key: Option<&Ed25519KeyPair>) -> (String, Hash) {
        // Texts and numbers: serialising them into memory cannot fail. JSON has no tab outside of its texts, and escapes them.
        let json = serde_json::to_string(self).unwrap_or_default();
        let hash: Hash = Sha256::digest(&json).into();
        let signature = key.map(|key| STANDARD.encode(key.sign(&hash))).unwrap_or_default();
        (format!("{json}\t{}\t{signature}\n", hex::encode(hash)), hash)
    }

    /// The entry of a line without its newline, its hash, and its signature if it has one; the error says what is wrong with
    /// the line.
    pub(super) fn read(line: &str) -> Result<(Self, Hash, Option<Vec<u8>>), String> {
        let mut parts = line.split('\t');
        let (Some(json), Some(stated), Some(signature), None) =
            (parts.next(), parts.next(), parts.next(), parts.next())
        else {
            return Err("it is no entry, its hash and its signature".to_owned());
        };
        let hash: Hash = Sha256::digest(json).into();
        if hex::encode(hash) != stated {
            return Err("its hash is not that of its text: the text was changed".to_owned());
        }
        let signature = match signature {
            "" => None,
            text => Some(STANDARD.decode(text).map_err(|_| "its signature is no Base64".to_owned())?),
        };
        let entry = serde_json::from_str(json).map_err(|error| format!("it is no entry: {error}"))?;
        Ok((entry, hash, signature))
    }
}

/// Whether a signature of a hash is of this key.
pub(super) fn is_signed(hash: &Hash, signature: &[u8], public_key: &[u8]) -> bool {
    UnparsedPublicKey::new(&ED25519, public_key).verify(hash, signature).is_ok()
}
