//! What `russet client` prints for a person: files, variables and steps, ready to copy.

use super::alias;
use super::endpoint::GatewayEndpoint;
use super::merge::{render, with_defaults};
use super::setup::{ClientProgram, ClientSetup, ConfigPatch};

/// The set-up of a client in words.
pub fn guide(client: &ClientProgram, endpoint: &GatewayEndpoint, setup: &ClientSetup) -> String {
    let ClientSetup { files, variables, steps, requests: _ } = setup;
    let mut text = heading(client, endpoint);
    for patch in files {
        text += &file(patch);
    }
    text += &shell(variables);
    text += &list("Then", steps);
    text += &route(client, endpoint);
    text += "\n";
    if !files.is_empty() {
        text += &format!("To merge the above into the file: russet client {} --apply\n", client.name);
    }
    text += &format!("To send what {} sends first: russet client {} --check\n", client.title, client.name);
    text
}

/// What is left to do once the files are written.
pub fn rest(client: &ClientProgram, endpoint: &GatewayEndpoint, setup: &ClientSetup) -> String {
    let ClientSetup { files: _, variables, steps, requests: _ } = setup;
    format!("{}{}{}", shell(variables), list("Then", steps), route(client, endpoint))
}

fn heading(client: &ClientProgram, endpoint: &GatewayEndpoint) -> String {
    let model = &endpoint.model;
    let context = model.context_tokens.map_or_else(String::new, |tokens| format!(" ({tokens} tokens)"));
    let waiting = match model.is_ready || model.message.is_empty() {
        true => String::new(),
        false => format!("{} does not serve yet: {}\n", model.name, model.message),
    };
    let trust = match endpoint.url.starts_with("https:") {
        true => {
            "If that address has Russet's own certificate, the client has to trust ca.crt: docs/keys.md.\n"
        }
        false => "",
    };
    format!(
        "{} at {} with {}{context}\n({}.)\n{waiting}{trust}",
        client.title, endpoint.url, model.name, client.evidence
    )
}

fn file(patch: &ConfigPatch) -> String {
    let path = patch.paths.first().copied().unwrap_or_default();
    let others: Vec<String> = patch.paths.iter().skip(1).map(|path| format!(" or ~/{path}")).collect();
    format!(
        "\n── ~/{path}{}\n{}",
        others.concat(),
        render(patch.format, &with_defaults(&patch.defaults, &patch.setting))
    )
}

fn shell(variables: &[(&'static str, String)]) -> String {
    if variables.is_empty() {
        return String::new();
    }
    let lines = variables.iter().map(|(name, value)| format!("export {name}={}\n", quoted(value)));
    format!("\n── Variables, for the shell or the container\n{}", lines.collect::<String>())
}

fn list(title: &str, steps: &[String]) -> String {
    if steps.is_empty() {
        return String::new();
    }
    let lines = steps.iter().map(|step| format!("• {step}\n"));
    format!("\n── {title}\n{}", lines.collect::<String>())
}

fn route(client: &ClientProgram, endpoint: &GatewayEndpoint) -> String {
    let yaml = client.wants_claude_names.then(|| alias::route(endpoint)).flatten();
    yaml.map_or_else(String::new, |yaml| {
        format!(
            "\n── For its list of models, which shows only names that begin with claude or anthropic\n\
             russet apply -f - <<'YAML'\n{yaml}YAML\n"
        )
    })
}

/// A value as one word of a shell.
fn quoted(value: &str) -> String {
    let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "_-./:@%+=,".contains(letter);
    match !value.is_empty() && value.chars().all(is_plain) {
        true => value.to_owned(),
        false => format!("'{}'", value.replace('\'', r"'\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_one_word_of_a_shell() {
        for (value, expected) in [
            ("http://127.0.0.1:52415/v1", "http://127.0.0.1:52415/v1"),
            ("", "''"),
            ("a b", "'a b'"),
            ("it's $HOME", r"'it'\''s $HOME'"),
        ] {
            assert_eq!(quoted(value), expected);
        }
    }
}
