//! The Grafana board: its panels have ids of their own, and none lies on another. Two changes that each add a row at the end of
//! the file merge without a conflict, into a board that shows one of them.

use anyhow::{Context, Result};
use serde_json::Value;

use super::{Findings, TidySource};
use crate::cargo;

const BOARD: &str = "charts/russet/dashboards/russet.json";

/// A panel: id, title, and its left, upper, right and lower edge on the grid.
struct Panel {
    id: i64,
    title: String,
    edges: [i64; 4],
}

/// The check.
pub fn panels_of_the_board_are_apart(_: &[TidySource]) -> Result<Findings> {
    let text = std::fs::read_to_string(cargo::root().join(BOARD)).with_context(|| format!("read {BOARD}"))?;
    findings(&serde_json::from_str(&text)?)
}

fn findings(board: &Value) -> Result<Findings> {
    let panels: Vec<Panel> = board["panels"]
        .as_array()
        .context("a board without panels")?
        .iter()
        .map(panel)
        .collect::<Result<_>>()?;
    let mut findings = Vec::new();
    for (at, one) in panels.iter().enumerate() {
        for other in &panels[at + 1..] {
            let (Panel { id, title, .. }, then) = (one, &other.title);
            if one.id == other.id {
                findings.push(format!("{BOARD}: \"{title}\" and \"{then}\" both have the id {id}"));
            }
            if overlaps(one.edges, other.edges) {
                findings.push(format!("{BOARD}: \"{title}\" and \"{then}\" lie on each other"));
            }
        }
    }
    Ok(findings)
}

fn panel(panel: &Value) -> Result<Panel> {
    let title = panel["title"].as_str().context("a panel without a title")?.to_owned();
    let number =
        |value: &Value| value.as_i64().with_context(|| format!("\"{title}\" has no id, or no place"));
    let [x, y, w, h] = ["x", "y", "w", "h"].map(|name| number(&panel["gridPos"][name]));
    let (x, y) = (x?, y?);
    Ok(Panel { id: number(&panel["id"])?, edges: [x, y, x + w?, y + h?], title })
}

fn overlaps([left, top, right, bottom]: [i64; 4], other: [i64; 4]) -> bool {
    left < other[2] && other[0] < right && top < other[3] && other[1] < bottom
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn panels_with_one_id_or_one_place_are_found() {
        let panel = |id: i64, title: &str, x: i64, y: i64| json!({"id": id, "title": title, "gridPos": {"x": x, "y": y, "w": 8, "h": 8}});
        let board = |panels: &[Value]| findings(&json!({"panels": panels})).unwrap();
        let beside = [panel(1, "a", 0, 0), panel(2, "b", 8, 0), panel(3, "c", 0, 8)];
        assert_eq!(board(&beside), Findings::new());
        let found = board(&[panel(1, "a", 0, 0), panel(1, "b", 7, 7)]);
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(
            found[0].contains("both have the id 1") && found[1].contains("lie on each other"),
            "{found:?}"
        );
        assert!(findings(&json!({"panels": [{"id": 1, "title": "a"}]})).is_err());
    }
}
