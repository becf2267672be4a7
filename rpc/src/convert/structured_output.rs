//! Structured output between the protos and [`russet_wire`]. Destructured whole, so that no field is lost.

use russet_wire::request::StructuredOutput;

use crate::engine as pb;

impl From<StructuredOutput> for pb::StructuredOutput {
    fn from(output: StructuredOutput) -> Self {
        use pb::structured_output::Output;
        let output = match output {
            StructuredOutput::JsonObject => Output::JsonObject(true),
            StructuredOutput::JsonSchema(schema) => Output::JsonSchema(schema),
            StructuredOutput::Regex(regex) => Output::Regex(regex),
            StructuredOutput::Choice(texts) => Output::Choice(pb::Choices { texts }),
            StructuredOutput::Grammar(grammar) => Output::Grammar(grammar),
        };
        Self { output: Some(output) }
    }
}

/// `None` for free text.
pub(super) fn structured_output(output: pb::StructuredOutput) -> Option<StructuredOutput> {
    use pb::structured_output::Output;
    match output.output? {
        Output::JsonObject(asked) => asked.then_some(StructuredOutput::JsonObject),
        Output::JsonSchema(schema) => Some(StructuredOutput::JsonSchema(schema)),
        Output::Regex(regex) => Some(StructuredOutput::Regex(regex)),
        Output::Choice(pb::Choices { texts }) => Some(StructuredOutput::Choice(texts)),
        Output::Grammar(grammar) => Some(StructuredOutput::Grammar(grammar)),
    }
}
