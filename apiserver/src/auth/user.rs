//! The user of a request, and the groups with a meaning of their own. Not here: how users authenticate.

use std::collections::BTreeMap;

use serde_json::Value;

/// The group with all permissions.
pub const MASTERS: &str = "system:masters";
/// The group of all authenticated users.
pub const AUTHENTICATED: &str = "system:authenticated";
/// The group of all unauthenticated users.
pub const UNAUTHENTICATED: &str = "system:unauthenticated";

/// The user of a request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct User {
    /// The name.
    pub name: String,
    /// A unique id, if the credential carries one.
    pub uid: String,
    /// The groups.
    pub groups: Vec<String>,
    /// Further attributes from the credential.
    pub extra: BTreeMap<String, Vec<String>>,
}

impl User {
    /// An authenticated user with this name and these groups.
    pub fn authenticated(name: &str, groups: Vec<String>) -> Self {
        let mut groups = groups;
        if !groups.iter().any(|group| group == AUTHENTICATED) {
            groups.push(AUTHENTICATED.into());
        }
        Self { name: name.into(), groups, ..Self::default() }
    }

    /// The server itself.
    pub fn server() -> Self {
        Self::authenticated("system:apiserver", vec![MASTERS.into()])
    }

    /// With whom this user shares its part of the server: the ServiceAccounts of a namespace are one, because a tenant
    /// makes as many as it likes.
    pub fn flow(&self) -> &str {
        let account = self.name.strip_prefix("system:serviceaccount:");
        account
            .and_then(|account| account.rsplit_once(':'))
            .map_or(&self.name, |(_, account)| &self.name[..self.name.len() - account.len() - 1])
    }

    /// Whether this is the server itself.
    pub fn is_server(&self) -> bool {
        *self == Self::server()
    }

    /// The anonymous user.
    pub fn anonymous() -> Self {
        Self { name: "system:anonymous".into(), groups: vec![UNAUTHENTICATED.into()], ..Self::default() }
    }

    /// Whether this is the anonymous user.
    pub fn is_anonymous(&self) -> bool {
        self.groups.iter().any(|group| group == UNAUTHENTICATED)
    }

    /// The user in the format of reviews.
    pub fn to_value(&self) -> Value {
        let mut value = serde_json::json!({"username": self.name, "groups": self.groups});
        if !self.uid.is_empty() {
            value["uid"] = Value::String(self.uid.clone());
        }
        if !self.extra.is_empty() {
            value["extra"] = serde_json::json!(self.extra);
        }
        value
    }
}
