//! Gauges of Approvals: how many are open, and the decisions of the others.

use std::collections::BTreeMap;
use std::sync::Arc;

use jiff::Timestamp;
use prometheus::core::Desc;
use russet_crds::{Approval, ApprovalDecision};

use super::gauge_snapshot::{GaugeFamily, GaugeSnapshot, number};

const STATES: [&str; 4] = ["waiting", "approved", "denied", "expired"];

const COUNT: GaugeFamily<1> = GaugeFamily {
    name: "russet_approvals",
    help: "Approvals by what became of the question: waiting, approved, denied or expired.",
    labels: ["state"],
};

/// The descriptors.
pub fn descs() -> Result<Vec<Desc>, prometheus::Error> {
    Ok(vec![COUNT.desc()?])
}

/// Writes the gauges.
pub fn write(snapshot: &mut GaugeSnapshot, approvals: &[Arc<Approval>], now: Timestamp) {
    let mut counts: BTreeMap<&str, u64> = STATES.iter().map(|state| (*state, 0)).collect();
    for approval in approvals {
        let state = match approval.spec.decision {
            _ if approval.spec.is_expired(now) => "expired",
            Some(ApprovalDecision::Approved) => "approved",
            Some(ApprovalDecision::Denied) => "denied",
            // A value from a newer release counts as no decision.
            Some(ApprovalDecision::Unknown) | None => "waiting",
        };
        *counts.entry(state).or_default() += 1;
    }
    for (state, count) in counts {
        snapshot.set(&COUNT, [state], number(count));
    }
}
