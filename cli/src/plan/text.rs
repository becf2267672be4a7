//! Proposals as text: a table of replicas, and below it the reasons of each deployment. Lines fit 100 columns
//! where names allow it.

use russet_crds::{GroupPlan, PredictedThroughput};
use russet_plan::Snapshot;
use russet_plan::placement::RemovalReason;
use russet_plan::proposal::{Proposal, ProposedReplica};
use russet_plan::quantity::write;
use russet_plan::shard::{backend_label, describe};

use crate::get::format_table;

/// Columns of a line.
const WIDTH: usize = 100;
/// Spaces between two columns of a table.
const COLUMN_GAP: usize = 3;
/// Minimum columns of a decision, however long names are.
const MIN_DECISION_WIDTH: usize = 28;
/// Columns before the text of a reason.
const INDENT: usize = 13;

/// The table and the reasons.
pub fn show(view: &Snapshot, proposals: &[Proposal]) -> String {
    let rows: Vec<ReplicaRow> = proposals.iter().flat_map(|proposal| rows(view, proposal)).collect();
    let mut text = table(rows);
    for proposal in proposals {
        text.push('\n');
        text.push_str(&title(proposal));
        text.push('\n');
        for (label, words) in reasons(proposal) {
            for (index, line) in wrap(&words, WIDTH - INDENT).into_iter().enumerate() {
                let label = if index == 0 { label } else { "" };
                text.push_str(&format!("  {label:0$}{line}\n", INDENT - 2));
            }
        }
    }
    text
}

/// A replica and its nodes, or why it has none.
struct ReplicaRow {
    deployment: String,
    replica: String,
    decision: String,
    memory: Vec<String>,
}

fn title(proposal: &Proposal) -> String {
    match proposal.namespace.as_str() {
        "default" => proposal.name.clone(),
        namespace => format!("{namespace}/{}", proposal.name),
    }
}

fn rows(view: &Snapshot, proposal: &Proposal) -> Vec<ReplicaRow> {
    let row = |replica: Option<i32>, decision: String, plan: Option<&GroupPlan>| {
        let row = ReplicaRow {
            deployment: title(proposal),
            replica: replica.map_or_else(|| "-".to_owned(), |replica| replica.to_string()),
            decision,
            memory: plan.map(|plan| memory(view, plan)).unwrap_or_default(),
        };
        (replica, row)
    };
    let mut rows = Vec::new();
    for ProposedReplica { replica, plan, name: _ } in &proposal.keep {
        let stays = if proposal.create.iter().any(|new| new.replica == *replica) {
            "until its successor answers"
        } else if proposal.waiting.contains(replica) {
            "stays as it was"
        } else {
            "stays"
        };
        rows.push(row(Some(*replica), format!("{} ({stays})", split(plan)), Some(plan)));
    }
    for ProposedReplica { replica, plan, name: _ } in &proposal.create {
        rows.push(row(Some(*replica), split(plan), Some(plan)));
    }
    for replica in &proposal.waiting {
        rows.push(row(Some(*replica), "not placed".to_owned(), None));
    }
    if rows.is_empty() {
        rows.push(row(None, proposal.report.decision.clone(), None));
    }
    rows.sort_by_key(|(replica, _)| *replica);
    rows.into_iter().map(|(_, row)| row).collect()
}

fn split(plan: &GroupPlan) -> String {
    let split = describe(&plan.members, plan.tensor_size);
    if plan.tensor_size > 1 { format!("{split}, {}", backend_label(plan.backend)) } else { split }
}

/// Memory of every rank, and the serving limit of its node.
fn memory(view: &Snapshot, plan: &GroupPlan) -> Vec<String> {
    let cells = plan.members.iter().map(|member| {
        let limit = view.nodes.get(&member.node_name).map_or(0, |node| node.serving_limit);
        format!("{}: {} of {}", member.node_name, write(member.reserved_bytes()), write(limit))
    });
    cells.collect()
}

fn table(rows: Vec<ReplicaRow>) -> String {
    let cells = rows.iter().map(|row| {
        let memory = row.memory.iter().map(|cell| cell.chars().count()).max().unwrap_or(0);
        [row.deployment.chars().count(), row.replica.len(), memory]
    });
    let headers = ["DEPLOYMENT", "REPLICA", "MEMORY"].map(str::len);
    let widest = cells.fold(headers, |[a, b, c], [x, y, z]| [a.max(x), b.max(y), c.max(z)]);
    let others: usize = widest.iter().sum();
    let width = WIDTH.saturating_sub(others + 3 * COLUMN_GAP).max(MIN_DECISION_WIDTH);
    let mut lines = vec![["DEPLOYMENT", "REPLICA", "DECISION", "MEMORY"].map(str::to_owned).to_vec()];
    for row in rows {
        let decision = wrap(&row.decision, width);
        for index in 0..decision.len().max(row.memory.len()) {
            let first = |text: &String| if index == 0 { text.clone() } else { String::new() };
            let cell = |cells: &[String]| cells.get(index).cloned().unwrap_or_default();
            lines.push(vec![first(&row.deployment), first(&row.replica), cell(&decision), cell(&row.memory)]);
        }
    }
    format_table(&lines)
}

/// The statements about a deployment, each with its heading.
fn reasons(proposal: &Proposal) -> Vec<(&'static str, String)> {
    let report = &proposal.report;
    let mut reasons = Vec::new();
    reasons.extend(proposal.needs.clone().map(|needs| ("needs", needs)));
    reasons.extend(proposal.tier.clone().map(|tier| ("tier", tier)));
    if proposal.create.iter().any(|new| new.plan.tensor_size > 1) {
        // Only the report's decision says why the ranks use their transport.
        reasons.push(("decision", report.decision.clone()));
    }
    if !report.reason.is_empty() {
        reasons.push(("reason", report.reason.clone()));
    }
    if let Some(predicted) = &report.predicted {
        reasons.push(("speed", speed(predicted)));
    }
    if !proposal.preempt.is_empty() {
        let preempted = proposal.preempt.join(", ");
        reasons.push(("preempts", format!("{preempted}: replicas of lower priority stop to make room")));
    }
    for old in &proposal.delete {
        let why = match old.reason {
            RemovalReason::ScaledDown => "the deployment wants fewer replicas",
            RemovalReason::Idle => "its tier stops it at this time or without requests",
            RemovalReason::Replaced => "another group of its replica serves the current spec",
            RemovalReason::Drained => "its successor needs its memory",
        };
        reasons.push(("deletes", format!("ShardGroup {}: {why}", old.name)));
    }
    let is_new = |note: &&String| **note != report.reason && !report.candidates.contains(note);
    reasons.extend(proposal.notes.iter().filter(is_new).map(|note| ("note", note.clone())));
    reasons.extend(report.candidates.iter().map(|candidate| ("candidate", candidate.clone())));
    reasons
}

fn speed(predicted: &PredictedThroughput) -> String {
    let PredictedThroughput { tokens_per_second, total_tokens_per_second, ttft_milliseconds, kv_tokens: _ } =
        predicted;
    format!(
        "{tokens_per_second} tokens/s for one conversation, {total_tokens_per_second} for all there is room for; the first token of 1,024 after {ttft_milliseconds} ms (predicted)"
    )
}

/// Wraps a text at word boundaries to lines of at most `width` characters.
pub fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    let mut used = 0;
    for word in text.split_whitespace() {
        let length = word.chars().count();
        if used > 0 && used + 1 + length > width {
            lines.push(String::new());
            used = 0;
        }
        let Some(line) = lines.last_mut() else { break };
        if used > 0 {
            line.push(' ');
            used += 1;
        }
        line.push_str(word);
        used += length;
    }
    lines
}

#[cfg(test)]
mod tests {
    use russet_crds::{GroupMember, PlacementReport};
    use russet_plan::placement::RemovedGroup;

    use super::*;

    #[test]
    fn kept_created_deleted_and_waiting_replicas_are_distinct() {
        let replica = |replica: i32, node: &str| {
            let member =
                GroupMember { node_name: node.to_owned(), weight_bytes: 3 << 30, ..Default::default() };
            let plan = GroupPlan { members: vec![member], ..GroupPlan::default() };
            ProposedReplica { name: format!("chat-{replica}-{node}"), replica, plan }
        };
        let proposal = Proposal {
            namespace: "lab".to_owned(),
            name: "chat".to_owned(),
            placed: false,
            needs: None,
            tier: None,
            report: PlacementReport { reason: "because".to_owned(), ..PlacementReport::default() },
            create: vec![replica(1, "b")],
            keep: vec![replica(0, "a"), replica(1, "a"), replica(2, "c")],
            delete: vec![RemovedGroup { name: "chat-3-a".to_owned(), reason: RemovalReason::ScaledDown }],
            preempt: Vec::new(),
            waiting: vec![2],
            notes: vec!["because".to_owned(), "also".to_owned()],
        };
        assert_eq!(
            show(&Snapshot::default(), &[proposal]),
            "\
DEPLOYMENT   REPLICA   DECISION                                    MEMORY
lab/chat     0         1 rank on a (stays)                         a: 3Gi of 0
lab/chat     1         1 rank on a (until its successor answers)   a: 3Gi of 0
lab/chat     1         1 rank on b                                 b: 3Gi of 0
lab/chat     2         1 rank on c (stays as it was)               c: 3Gi of 0
lab/chat     2         not placed

lab/chat
  reason     because
  deletes    ShardGroup chat-3-a: the deployment wants fewer replicas
  note       also
"
        );
    }

    #[test]
    fn words_are_never_broken() {
        for (text, lines) in [
            ("", vec![""]),
            ("a bb ccc", vec!["a bb", "ccc"]),
            ("abcdefgh i jk l", vec!["abcdefgh", "i jk", "l"]),
            ("ä ö ü x y", vec!["ä ö ü", "x y"]),
        ] {
            assert_eq!(wrap(text, 5), lines, "{text}");
        }
    }
}
