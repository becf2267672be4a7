//! The kind Budget in the API server, and what its status says for people.

use futures::FutureExt as _;
use futures::future::BoxFuture;
use jiff::Timestamp;
use jiff::tz::TimeZone;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use russet_crds::Budget;
use russet_crds::conditions::{self, Reason, Type};
use serde_json::json;

use super::BudgetApi;
use super::account::LimitUsage;
use crate::api_timeout::{WriteError, with_timeout};

/// From this part of a limit on it is nearly used.
const NEAR: f64 = 0.8;

/// Budgets of an API server.
pub(super) struct KubernetesBudgets {
    client: Client,
}

impl KubernetesBudgets {
    pub(super) fn new(client: Client) -> Self {
        Self { client }
    }

    fn api(&self, namespace: &str) -> Api<Budget> {
        Api::namespaced(self.client.clone(), namespace)
    }
}

impl BudgetApi for KubernetesBudgets {
    fn read<'a>(&'a self, namespace: &'a str, name: &'a str) -> BoxFuture<'a, Result<Budget, WriteError>> {
        async move { with_timeout(self.api(namespace).get(name)).await }.boxed()
    }

    fn write_status<'a>(&'a self, budget: &'a Budget) -> BoxFuture<'a, Result<Budget, WriteError>> {
        let metadata = &budget.metadata;
        // With a version the patch is refused where another one came before.
        let patch = json!({
            "metadata": {"resourceVersion": metadata.resource_version, "uid": metadata.uid},
            "status": budget.status,
        });
        let api = self.api(metadata.namespace.as_deref().unwrap_or_default());
        let name = metadata.name.as_deref().unwrap_or_default();
        async move {
            with_timeout(api.patch_status(name, &PatchParams::default(), &Patch::Merge(&patch))).await
        }
        .boxed()
    }
}

/// The object with what its status says for people.
pub(super) fn described(mut object: Budget, usage: &[LimitUsage], now: Timestamp) -> Budget {
    let generation = object.metadata.generation;
    let zone = &object.spec.time_zone;
    let is_zone = TimeZone::get(zone).is_ok();
    let ready = match is_zone {
        true => "gateways count what is used".to_owned(),
        false => format!("there is no time zone {zone}, so days and months begin in UTC"),
    };
    let status = object.status.get_or_insert_default();
    status.observed_generation = generation;
    let texts: Vec<&str> = usage.iter().map(|one| one.text.as_str()).collect();
    let text = texts.join("; ");
    status.used = (!text.is_empty()).then(|| text.clone());
    let most = usage.iter().map(|one| one.part).fold(0.0, f64::max);
    let message = if text.is_empty() { "nothing is limited".to_owned() } else { text };
    let reason = |is_there| if is_there { Reason::Insufficient } else { Reason::Sufficient };
    for (kind, holds, reason, message) in [
        (Type::Ready, is_zone, if is_zone { Reason::Settled } else { Reason::InvalidSpec }, ready),
        (Type::NearLimit, most >= NEAR, reason(most >= NEAR), message.clone()),
        (Type::Exhausted, most >= 1.0, reason(most >= 1.0), message),
    ] {
        conditions::set(&mut status.conditions, kind, holds, reason, message, generation, now);
    }
    object
}
