//! Solar Open: each call with an id of the model's own, a name and JSON arguments between special tokens.

use super::finder::{BlockEnd, Shield};
use super::syntax::CallSyntax;
use super::{BASE, BlockStart, ToolFormat, json, offered};
use russet_wire::conversation::{Tool, ToolCall};

const CALL: &str = "<|tool_call:begin|>";
const NAME: &str = "<|tool_call:name|>";
const ARGUMENTS: &str = "<|tool_call:args|>";
const CALL_END: &str = "<|tool_call:end|>";

pub(super) static FORMAT: ToolFormat = ToolFormat {
    names: &["solar_open"],
    begins: &[BlockStart::new(CALL, BlockEnd::Marker(CALL_END, Shield::Nothing))],
    inner: &[NAME, ARGUMENTS],
    parse,
    syntaxes: &[CallSyntax::calls(
        "<|tool_call:begin|>$ID<|tool_call:name|>$NAME<|tool_call:args|>$ARGUMENTS<|tool_call:end|>",
        "",
    )],
    ..BASE
};

fn parse(block: &str, tools: &[Tool]) -> Option<Vec<ToolCall>> {
    let (id, rest) = super::inside(block, CALL, CALL_END)?.split_once(NAME)?;
    let (name, arguments) = rest.split_once(ARGUMENTS)?;
    let name = offered(tools, name.trim())?.name.clone();
    Some(vec![ToolCall { id: id.trim().to_owned(), name, arguments: json::object(arguments)? }])
}

#[cfg(test)]
mod tests {
    use crate::parser::tests::{call_with_id, check, check_cut_offs};

    #[test]
    fn solar_calls_keep_their_ids() {
        let one = "<|tool_call:begin|>x1<|tool_call:name|>ping<|tool_call:args|>{\"a\": 1}<|tool_call:end|>";
        let ping = || call_with_id("x1", "ping", "{\"a\": 1}");
        check("solar_open", &format!("{one}{one}"), "", &[ping(), ping()]);
        check_cut_offs("solar_open", one);
    }
}
