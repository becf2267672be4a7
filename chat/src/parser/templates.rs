//! Which output format a chat template writes, by the markers in its source. It reads no Jinja: a template
//! that builds its markers from parts needs a rule for the parts.

/// A format's name, and texts that the source contains, all of them; the first rule that holds counts.
type Rule = (&'static str, &'static [&'static str]);

/// The special before the general: many templates share `<tool_call>`.
const TOOL_RULES: &[Rule] = &[
    ("openai", &["<|start|>assistant", "<|channel|>analysis", "<|message|>"]),
    ("deepseek_v4", &["｜DSML｜", "dsml_token + 'tool_calls>"]),
    ("deepseek_v32", &["｜DSML｜"]),
    ("deepseek_v3", &["<｜tool▁call▁begin｜>", "```json"]),
    ("deepseek_v31", &["<｜tool▁call▁begin｜>"]),
    ("kimi_k2", &["<|tool_calls_section_begin|>"]),
    ("minimax_m2", &["<minimax:tool_call>", "<invoke name="]),
    ("minimax_m3", &["]<]minimax[>[", "<invoke name="]),
    ("atem", &["<atem:function_calls>"]),
    ("seed_oss", &["<seed:tool_call>"]),
    ("hy_v3", &["<tool_calls{}>", ":opensource"]),
    ("gemma4", &["<|tool_call>call:"]),
    ("functiongemma", &["<start_function_call>"]),
    ("gemma3", &["```tool_code"]),
    ("step3", &["<｜tool_calls_begin｜>"]),
    ("step3", &["<steptml:invoke"]),
    ("functionary_v3_2", &["<|start_header_id|>", ">>>all\\n"]),
    ("solar_open", &["<|tool_call:begin|>"]),
    ("cohere", &["<|START_ACTION|>"]),
    ("apertus", &["<|tools_prefix|>"]),
    ("mistral", &["[TOOL_CALLS]"]),
    ("glm45", &["<tool_call>", "<arg_key>"]),
    ("qwen3_coder", &["<tool_call>", "<function=", "<parameter="]),
    ("functionary", &["<function=", "</function>"]),
    ("minicpm5", &["<function name=", "<param name="]),
    ("jamba", &["<tool_calls>", "\"arguments\""]),
    ("nemotron_nano_v2", &["<TOOLCALL>"]),
    ("lfm2", &["<|tool_call_start|>"]),
    ("lfm2", &["<|tool_list_start|>"]),
    // LFM 2.5 Instruct: the template shows the tools and leaves calls to the content.
    ("lfm2", &["List of tools: [", "keep_past_thinking"]),
    ("granite", &["<|tool_call|>", "<|end_of_role|>"]),
    ("phi4_mini_json", &["<|tool_call|>"]),
    ("command_r", &["Action:", "```json", "\"tool_name\""]),
    ("kimi_k3", &["<|open|>", "<|sep|>", "open_tag('tools')"]),
    ("functools", &["functools["]),
    ("gigachat3", &["<|function_call|>"]),
    ("gigachat3", &["function call", "<|role_sep|>"]),
    ("hermes", &["<tool_call>", "\"name\""]),
    ("llama3_json", &["<|start_header_id|>", "{\"name\": ", "\"parameters\": "]),
    ("pythonic", &["<|python_start|>"]),
];

const REASONING_RULES: &[Rule] = &[
    ("openai", &["<|start|>assistant", "<|channel|>analysis", "<|message|>"]),
    ("seed_oss", &["<seed:think>"]),
    ("minimax_m3", &["<mm:think>"]),
    ("hy_v3", &["<think{}>", ":opensource"]),
    ("gemma4", &["<|channel>thought"]),
    ("solar_open", &["<|begin|>assistant<|think|>"]),
    ("cohere", &["<|START_THINKING|>", "<|END_THINKING|>"]),
    ("apertus", &["<|inner_prefix|>"]),
    ("mistral", &["[THINK]", "[/THINK]"]),
    ("apriel_final", &["Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"]),
    ("apriel", &["<thinking>", "</thinking>"]),
    ("kimi_k3", &["<|open|>", "<|sep|>", "open_tag('think')"]),
    ("granite33", &["<response></response>", "<think></think>"]),
    ("think", &["</think>"]),
];

/// The names of the tool format and of the reasoning format that the template's source shows.
pub(super) fn detect(source: &str) -> (Option<&'static str>, Option<&'static str>) {
    let holds = |rule: &&Rule| rule.1.iter().all(|text| source.contains(text));
    let first = |rules: &[Rule]| rules.iter().find(holds).map(|rule| rule.0);
    (first(TOOL_RULES), first(REASONING_RULES))
}
