//! Decides what to do for a model by one table: try an endpoint, wait, or refuse. Pure; which of
//! several endpoints is the least busy is told by the caller.

use crate::refusal::{Kind, Refusal};
use crate::routes::{Deployment, Endpoint, Resolved, Scope, State, Table};

/// What to do now.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Choice<'a> {
    /// Ask this one, of this deployment.
    Try(&'a Deployment, &'a Endpoint),
    /// Nobody answers now, but this deployment may soon; the text says what is going on.
    Wait(&'a Deployment, String),
    /// Waiting would not help.
    Refuse(Refusal),
}

/// The first target with an endpoint that `pick` takes; else what its deployments say.
pub(super) fn choose<'a>(
    table: &'a Table,
    model: &str,
    scope: &Scope,
    pick: impl Fn(&'a [Endpoint]) -> Option<&'a Endpoint>,
) -> Choice<'a> {
    let deployments = match table.resolve(model, scope) {
        Resolved::Deployments(deployments) => deployments,
        other => return Choice::Refuse(refuse(table, model, scope, &other)),
    };
    for deployment in &deployments {
        if let Some(endpoint) = pick(&deployment.endpoints) {
            return Choice::Try(deployment, endpoint);
        }
    }
    for deployment in &deployments {
        let hope = match &deployment.state {
            _ if !deployment.endpoints.is_empty() => "its engines do not answer".to_owned(),
            State::Ready => "its group is being formed again".to_owned(),
            State::Working(message) => message.clone(),
            State::Halted(_) => continue,
        };
        return Choice::Wait(deployment, hope);
    }
    let reasons: Vec<String> = deployments
        .iter()
        .filter_map(|deployment| match &deployment.state {
            State::Halted(message) => Some(format!("{}: {message}", deployment.full_name())),
            State::Ready | State::Working(_) => None,
        })
        .collect();
    Choice::Refuse(Refusal::new(
        Kind::ModelNotReady,
        format!("model `{model}` cannot answer. {}", reasons.join("; ")),
    ))
}

/// The refusal of a name that leads this caller to no deployment.
pub(super) fn unknown(table: &Table, model: &str, scope: &Scope) -> Option<Refusal> {
    match table.resolve(model, scope) {
        Resolved::Deployments(_) => None,
        other => Some(refuse(table, model, scope, &other)),
    }
}

/// Names shown in a message: enough to spot a typing error, few enough to read.
const MOST_NAMES: usize = 20;

fn refuse(table: &Table, model: &str, scope: &Scope, resolved: &Resolved<'_>) -> Refusal {
    let message = match resolved {
        Resolved::Forbidden => {
            let opens = scope.models().join(", ");
            let message = format!("this key does not open the model `{model}`; it opens: {opens}");
            return Refusal { param: Some("model".into()), ..Refusal::new(Kind::ModelForbidden, message) };
        }
        Resolved::Dangling(name) => format!(
            "model `{model}` is a name of ModelRoute {}, but none of its targets exists: {}",
            name.route,
            name.targets.join(", ")
        ),
        Resolved::Ambiguous(names) => {
            format!("model `{model}` exists in several namespaces; ask for one of: {}", names.join(", "))
        }
        Resolved::Deployments(_) | Resolved::Unknown => {
            let known: Vec<String> = table.models(scope).into_iter().map(|(id, _)| id).collect();
            let shown = known.iter().take(MOST_NAMES).map(String::as_str).collect::<Vec<_>>().join(", ");
            match known.len() {
                0 => format!(
                    "model `{model}` does not exist, and no other does yet; apply a ModelDeployment first"
                ),
                count if count > MOST_NAMES => {
                    format!("model `{model}` does not exist; {count} do, among them: {shown}")
                }
                _ => format!("model `{model}` does not exist; these do: {shown}"),
            }
        }
    };
    Refusal { param: Some("model".into()), ..Refusal::new(Kind::ModelNotFound, message) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::routes::Name;

    fn endpoint(address: &str) -> Endpoint {
        Endpoint { address: address.into(), node: "a".into(), group: "default/g".into(), epoch: 1 }
    }

    fn deployment(name: &str, state: State, addresses: &[&str]) -> Deployment {
        Deployment {
            namespace: "default".into(),
            name: name.into(),
            created: 0,
            context_tokens: 1,
            state,
            endpoints: addresses.iter().map(|address| endpoint(address)).collect(),
        }
    }

    fn table() -> Table {
        let targets = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
        let name = |pattern: &str, names: &[&str]| Name {
            pattern: pattern.into(),
            route: "default/r".into(),
            namespace: "default".into(),
            targets: targets(names),
            hold: None,
        };
        Table {
            synced: true,
            deployments: vec![
                deployment("up", State::Ready, &["1", "2"]),
                deployment("late", State::Working("copying".into()), &["3"]),
                deployment("soon", State::Working("copying".into()), &[]),
                deployment("between", State::Ready, &[]),
                deployment("stuck", State::Halted("needs 9 GiB".into()), &[]),
            ],
            names: vec![
                name("any", &["stuck", "soon", "up"]),
                name("hope", &["stuck", "soon"]),
                name("none", &["gone"]),
            ],
        }
    }

    #[test]
    fn the_first_target_that_answers_is_asked_and_waiting_needs_hope() {
        let table = table();
        let said = |model: &str, resting: &[&str]| {
            let choice = choose(&table, model, &Scope::ALL, |endpoints| {
                endpoints.iter().find(|endpoint| !resting.contains(&endpoint.address.as_str()))
            });
            match choice {
                Choice::Try(_, endpoint) => format!("try {}", endpoint.address),
                Choice::Wait(_, message) => format!("wait: {message}"),
                Choice::Refuse(refusal) => format!("{}: {}", refusal.kind.as_str(), refusal.message),
            }
        };
        for (model, resting, expected) in [
            ("up", vec![], "try 1"),
            ("up", vec!["1"], "try 2"),
            ("up", vec!["1", "2"], "wait: its engines do not answer"),
            ("late", vec![], "try 3"),
            ("soon", vec![], "wait: copying"),
            ("between", vec![], "wait: its group is being formed again"),
            ("stuck", vec![], "model_not_ready: model `stuck` cannot answer. default/stuck: needs 9 GiB"),
            ("any", vec![], "try 1"),
            ("any", vec!["1", "2"], "wait: copying"),
            ("hope", vec![], "wait: copying"),
            (
                "none",
                vec![],
                "model_not_found: model `none` is a name of ModelRoute default/r, but none of its targets exists: gone",
            ),
            (
                "nix",
                vec![],
                "model_not_found: model `nix` does not exist; these do: up, late, soon, between, stuck, any, hope",
            ),
        ] {
            assert_eq!(said(model, &resting), expected, "{model} {resting:?}");
        }
        let empty = Table { synced: true, ..Table::default() };
        let refusal = unknown(&empty, "nix", &Scope::ALL).unwrap();
        assert!(refusal.message.contains("no other does yet"), "{refusal}");
        assert_eq!(refusal.param.as_deref(), Some("model"));
    }
}
