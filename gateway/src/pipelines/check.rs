//! Checks a Pipeline before its first step: whether this release can do all of it, and whether its references can lead
//! anywhere. Pure.

use russet_crds::{ConditionOperator, HttpMethod, HttpStep, ParameterType, PipelineSpec, PipelineStep};
use serde_json::Value;

use super::references::paths;

/// What is wrong with a Pipeline.
pub(super) fn check(pipeline: &PipelineSpec) -> Result<(), String> {
    if pipeline.parameters.iter().any(|parameter| parameter.kind == ParameterType::Unknown) {
        return Err("a parameter has a type of a newer release".to_owned());
    }
    let parameters: Vec<&str> = pipeline.parameters.iter().map(|parameter| parameter.name.as_str()).collect();
    let mut done: Vec<&str> = Vec::new();
    for step in &pipeline.steps {
        check_step(step, &parameters, &done).map_err(|error| format!("step {}: {error}", step.name))?;
        done.push(&step.name);
    }
    Ok(())
}

fn check_step(step: &PipelineStep, parameters: &[&str], done: &[&str]) -> Result<(), String> {
    if step.when.iter().any(|condition| condition.operator == ConditionOperator::Unknown) {
        return Err("a condition has an operator of a newer release".to_owned());
    }
    if let Err(error) = super::schema::OutputSchema::of(step) {
        return Err(format!("its schema cannot be used: {error}"));
    }
    if step.embed.is_some() && !step.schema.is_empty() {
        return Err("vectors have no schema".to_owned());
    }
    for condition in &step.when {
        check_text(&condition.input, parameters, done, &[])?;
        check_values(condition)?;
    }
    let each: &[&str] = match &step.for_each {
        Some(list) => {
            check_text(list, parameters, done, &[])?;
            &["item", "index"]
        }
        None => &[],
    };
    match (&step.chat, &step.embed, &step.http) {
        (Some(chat), ..) => {
            for text in chat.system.iter().chain([&chat.prompt]) {
                check_text(text, parameters, done, each)?;
            }
        }
        (None, Some(embed), _) => check_text(&embed.input, parameters, done, each)?,
        (None, None, Some(http)) => check_http(http, parameters, done, each)?,
        (None, None, None) => return Err("it does nothing that this release knows".to_owned()),
    }
    let Some(undo) = &step.compensate else { return Ok(()) };
    let own: Vec<&str> = each.iter().copied().chain(["output"]).collect();
    check_http(undo, parameters, done, &own).map_err(|error| format!("compensate: {error}"))
}

fn check_values(condition: &russet_crds::StepCondition) -> Result<(), String> {
    let is_number = |text: &String| text.trim().parse::<f64>().is_ok();
    match condition.operator {
        ConditionOperator::Gt | ConditionOperator::Lt => match condition.values.as_slice() {
            [one] if is_number(one) => Ok(()),
            _ => Err(format!("{:?} takes one number", condition.operator)),
        },
        _ => Ok(()),
    }
}

fn check_http(http: &HttpStep, parameters: &[&str], done: &[&str], own: &[&str]) -> Result<(), String> {
    if http.method == HttpMethod::Unknown {
        return Err("its method is of a newer release".to_owned());
    }
    if http.body.is_some() && !http.json.is_empty() {
        return Err("a call has one body: set body or json".to_owned());
    }
    for text in [&http.path].into_iter().chain(&http.body).chain(http.headers.values()) {
        check_text(text, parameters, done, own)?;
    }
    http.json.values().try_for_each(|value| check_json(value, parameters, done, own))
}

fn check_json(json: &Value, parameters: &[&str], done: &[&str], own: &[&str]) -> Result<(), String> {
    match json {
        Value::String(text) => check_text(text, parameters, done, own),
        Value::Array(items) => items.iter().try_for_each(|item| check_json(item, parameters, done, own)),
        Value::Object(fields) => {
            fields.values().try_for_each(|value| check_json(value, parameters, done, own))
        }
        _ => Ok(()),
    }
}

/// Whether each reference of a text begins with something that will be there.
fn check_text(text: &str, parameters: &[&str], done: &[&str], own: &[&str]) -> Result<(), String> {
    for path in paths(text).map_err(|error| error.to_string())? {
        let words: Vec<&str> = path.split('.').collect();
        let problem = match words.as_slice() {
            ["parameters", name, ..] if parameters.contains(name) => continue,
            ["steps", name, "output", ..] if done.contains(name) => continue,
            ["run", "name"] => continue,
            [word, ..] if own.contains(word) => continue,
            ["parameters", name, ..] => format!("there is no parameter {name}"),
            ["steps", name, "output", ..] => format!("there is no step {name} before it"),
            ["steps", name, ..] => format!("write $(steps.{name}.output)"),
            ["item" | "index", ..] => "that is there with forEach alone".to_owned(),
            ["output", ..] => "that is there in compensate alone".to_owned(),
            _ => "there is $(run.name), and no more of the run".to_owned(),
        };
        return Err(format!("$({path}): {problem}"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_can_never_run_is_said_before_the_first_step() {
        let ask = |more: Value| {
            let mut step = json!({"name": "ask", "chat": {"model": "m", "prompt": "On $(parameters.topic)"}});
            step.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            let last = json!({"name": "last", "chat": {"model": "m", "prompt": "$(steps.ask.output.title)"}});
            let pipeline = json!({"parameters": [{"name": "topic"}], "steps": [step, last]});
            check(&serde_json::from_value(pipeline).unwrap())
        };
        let chat = |prompt: &str| json!({"chat": {"model": "m", "prompt": prompt}});
        assert_eq!(ask(json!({})), Ok(()));
        assert_eq!(
            ask(json!({"forEach": "$(parameters.topic)", "chat": {"model": "m", "prompt": "$(item.a)"}})),
            Ok(())
        );
        let undo = |path: &str| json!({"compensate": {"endpointRef": {"name": "e"}, "path": path}});
        assert_eq!(ask(undo("/$(output.id)")), Ok(()));
        for (more, expected) in [
            (chat("$(parameters.tpoic)"), "step ask: $(parameters.tpoic): there is no parameter tpoic"),
            (chat("$(steps.last.output)"), "step ask: $(steps.last.output): there is no step last before it"),
            (chat("$(steps.ask.output)"), "step ask: $(steps.ask.output): there is no step ask before it"),
            (chat("$(steps.ask)"), "step ask: $(steps.ask): write $(steps.ask.output)"),
            (chat("$(item)"), "step ask: $(item): that is there with forEach alone"),
            (chat("$(output)"), "step ask: $(output): that is there in compensate alone"),
            (chat("$(run.uid)"), "step ask: $(run.uid): there is $(run.name), and no more of the run"),
            (undo("/$(item)"), "step ask: compensate: $(item): that is there with forEach alone"),
            (
                json!({"when": [{"input": "$(parameters.topic)", "operator": "Gt", "values": ["many"]}]}),
                "step ask: Gt takes one number",
            ),
            (
                json!({"when": [{"input": "a", "operator": "Like", "values": ["a"]}]}),
                "step ask: a condition has an operator of a newer release",
            ),
            (
                json!({"schema": {"type": "nothing"}}),
                "step ask: its schema cannot be used: \"nothing\" is not valid under any of the schemas listed in the 'anyOf' keyword",
            ),
            (
                json!({"chat": null, "http": {"endpointRef": {"name": "e"}, "body": "a", "json": {"a": 1}}}),
                "step ask: a call has one body: set body or json",
            ),
            (
                json!({"chat": null, "embed": {"model": "m", "input": "a"}, "schema": {"type": "array"}}),
                "step ask: vectors have no schema",
            ),
            (json!({"chat": null}), "step ask: it does nothing that this release knows"),
        ] {
            assert_eq!(ask(more).unwrap_err(), expected);
        }
    }
}
