//! What a client calls its tools, where that is not what the model calls: custom tools, whose input is free text, and
//! tools of a namespace, which MCP servers have in Codex. For the model each is a function with one name.

use std::collections::BTreeMap;

/// A tool as the client knows it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ClientTool {
    /// Its input is free text.
    pub(super) is_custom: bool,
    pub(super) namespace: Option<String>,
    /// Its name within the namespace.
    pub(super) name: String,
}

/// Tools by their name for the model. A function without a namespace need not be among them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ClientTools(BTreeMap<String, ClientTool>);

impl ClientTools {
    /// Adds a tool; returns its name for the model.
    pub(super) fn add(&mut self, tool: ClientTool) -> String {
        let name = model_name(tool.namespace.as_deref(), &tool.name);
        self.0.insert(name.clone(), tool);
        name
    }

    /// The tool that the model calls by this name.
    pub(super) fn called(&self, name: &str) -> ClientTool {
        let function = || ClientTool { name: name.to_owned(), ..ClientTool::default() };
        self.0.get(name).cloned().unwrap_or_else(function)
    }
}

/// The name for the model of a tool in this namespace. Codex ends its namespaces with two underscores.
pub(super) fn model_name(namespace: Option<&str>, name: &str) -> String {
    match namespace {
        None | Some("") => name.to_owned(),
        Some(namespace) if namespace.ends_with("__") => format!("{namespace}{name}"),
        Some(namespace) => format!("{namespace}__{name}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tools_are_called_by_one_name_and_answered_by_the_clients() {
        let mut tools = ClientTools::default();
        let tool = |is_custom, namespace: Option<&str>, name: &str| ClientTool {
            is_custom,
            namespace: namespace.map(str::to_owned),
            name: name.into(),
        };
        for (added, name) in [
            (tool(true, None, "patch"), "patch"),
            (tool(false, Some("mcp__files__"), "read"), "mcp__files__read"),
            (tool(false, Some("crm"), "find"), "crm__find"),
            (tool(true, Some("crm"), "note"), "crm__note"),
            (tool(false, Some(""), "bare"), "bare"),
        ] {
            assert_eq!(tools.add(added.clone()), name);
            assert_eq!(tools.called(name), added);
        }
        assert_eq!(tools.called("find"), tool(false, None, "find"));
    }
}
