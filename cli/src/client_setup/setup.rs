//! What a client needs: changes of its own files, variables, steps for a person, and its first requests. Plain
//! descriptions; nothing here reads or writes.

use http::Method;
use serde_json::Value;

use super::endpoint::GatewayEndpoint;
use super::merge::FileFormat;

/// A client that Russet can set up.
pub struct ClientProgram {
    /// Its name on the command line.
    pub name: &'static str,
    /// Its own name.
    pub title: &'static str,
    /// What is known of its configuration, and from where: a version that was run, or its documentation.
    pub evidence: &'static str,
    /// Whether it lists only models whose names begin with `claude` or `anthropic`.
    pub wants_claude_names: bool,
    /// Its set-up for a gateway.
    pub setup: fn(&GatewayEndpoint) -> ClientSetup,
}

/// The set-up of a client.
#[derive(Clone, Debug, Default)]
pub struct ClientSetup {
    /// Files of the client.
    pub files: Vec<ConfigPatch>,
    /// Variables of its environment, and their values.
    pub variables: Vec<(&'static str, String)>,
    /// What a person does, or has to know.
    pub steps: Vec<String>,
    /// What the client sends first, in order.
    pub requests: Vec<FirstRequest>,
}

/// Settings to merge into one file.
#[derive(Clone, Debug)]
pub struct ConfigPatch {
    /// Its possible paths in the home folder: the first one that exists, else the first.
    pub paths: &'static [&'static str],
    /// Its format.
    pub format: FileFormat,
    /// What a file needs that has none of it.
    pub defaults: Value,
    /// The settings.
    pub setting: Value,
    /// A key that a file of another form has, and why the settings do not go into such a file.
    pub foreign_key: Option<(&'static str, &'static str)>,
}

/// A request that the client sends, short of what only a person can add.
#[derive(Clone, Debug)]
pub struct FirstRequest {
    /// Its method.
    pub method: Method,
    /// Its path and query.
    pub path: &'static str,
    /// Its headers, beside the key.
    pub headers: &'static [(&'static str, &'static str)],
    /// Its body.
    pub body: Option<Value>,
    /// What has to come back.
    pub expected: ExpectedReply,
}

/// What has to come back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpectedReply {
    /// This status.
    Status(u16),
    /// A 200 with a list that has the model, under one of these keys: of the page, and of each of its entries.
    ModelList(&'static str, &'static str),
    /// A 200 with a stream that ends as its dialect says, without an error.
    Stream,
}
