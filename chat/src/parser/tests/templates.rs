//! The formats of real chat templates. The templates are not in the repository: the table is checked where
//! `RUSSET_VOCABULARIES` names a folder that holds `templates/`.

use std::path::Path;

use super::super::OutputFormat;

/// Template, tool format, reasoning format; an empty name for none.
const TEMPLATES: &[(&str, &str, &str)] = &[
    ("Apertus-8B-Instruct", "apertus", "apertus"),
    ("Apriel-1.6-15b-Thinker-fixed", "jamba", "apriel_final"),
    ("Bielik-11B-v3.0-Instruct", "hermes", "think"),
    ("ByteDance-Seed-OSS", "seed_oss", "seed_oss"),
    ("Cohere2MoE", "cohere", "cohere"),
    ("CohereForAI-c4ai-command-r-plus-tool_use", "command_r", ""),
    ("CohereForAI-c4ai-command-r7b-12-2024-tool_use", "cohere", "cohere"),
    ("GLM-4.6", "glm45", "think"),
    ("GLM-4.7-Flash", "glm45", "think"),
    ("GigaChat3-10B-A1.8B", "gigachat3", ""),
    ("GigaChat3.1-10B-A1.8B", "gigachat3", ""),
    ("HuggingFaceTB-SmolLM3-3B", "", "think"),
    ("Kimi-K2-Instruct", "kimi_k2", ""),
    ("Kimi-K2-Thinking", "kimi_k2", "think"),
    ("Kimi-K3", "kimi_k3", "kimi_k3"),
    ("LFM2-8B-A1B", "lfm2", ""),
    ("LFM2.5-8B-A1B", "lfm2", "think"),
    ("LFM2.5-Instruct", "lfm2", "think"),
    ("MiMo-VL", "hermes", ""),
    ("MiniMax-M1", "jamba", ""),
    ("MiniMax-M2", "minimax_m2", "think"),
    ("MiniMax-M3", "minimax_m3", "minimax_m3"),
    ("Mistral-Small-3.2-24B-Instruct-2506", "mistral", ""),
    ("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "qwen3_coder", "think"),
    ("NVIDIA-Nemotron-Nano-v2", "nemotron_nano_v2", "think"),
    ("NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use", "hermes", ""),
    ("NousResearch-Hermes-3-Llama-3.1-8B-tool_use", "hermes", ""),
    ("Qwen-QwQ-32B", "hermes", "think"),
    ("Qwen-Qwen2.5-7B-Instruct", "hermes", ""),
    ("Qwen-Qwen3-0.6B", "hermes", "think"),
    ("Qwen3-Coder", "qwen3_coder", ""),
    ("Qwen3.5-4B", "qwen3_coder", "think"),
    ("Reka-Edge", "hermes", "think"),
    ("Spark2.5", "glm45", "think"),
    ("StepFun3.5-Flash", "qwen3_coder", "think"),
    ("deepseek-ai-DeepSeek-R1-Distill-Llama-8B", "deepseek_v3", "think"),
    ("deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "deepseek_v3", "think"),
    ("deepseek-ai-DeepSeek-V3.1", "deepseek_v31", "think"),
    ("deepseek-ai-DeepSeek-V3.2", "deepseek_v32", "think"),
    ("deepseek-ai-DeepSeek-V4", "deepseek_v4", "think"),
    ("deepseek-ai-DeepSeek-V4-Flash-0731", "deepseek_v4", "think"),
    ("fireworks-ai-llama-3-firefunction-v2", "functools", ""),
    ("google-gemma-2-2b-it", "", ""),
    ("google-gemma-4-31B-it", "gemma4", "gemma4"),
    ("google-gemma-4-31B-it-interleaved", "gemma4", "gemma4"),
    ("ibm-granite-granite-3.3-2B-Instruct", "granite", "granite33"),
    ("ibm-granite-granite-4.0", "hermes", ""),
    ("ibm-granite-granite-4.1", "hermes", ""),
    ("inclusionai-ling-3.0-flash", "glm45", "think"),
    ("llama-cpp-deepseek-r1", "deepseek_v3", "think"),
    ("llama-cpp-rwkv-world", "", "think"),
    ("meetkai-functionary-medium-v3.1", "functionary", ""),
    ("meetkai-functionary-medium-v3.2", "functionary_v3_2", ""),
    ("meta-llama-Llama-3.1-8B-Instruct", "llama3_json", ""),
    ("meta-llama-Llama-3.2-3B-Instruct", "llama3_json", ""),
    ("meta-llama-Llama-3.3-70B-Instruct", "llama3_json", ""),
    ("microsoft-Phi-3.5-mini-instruct", "", ""),
    ("mistralai-Ministral-3-14B-Reasoning-2512", "mistral", "mistral"),
    ("mistralai-Mistral-Nemo-Instruct-2407", "mistral", ""),
    ("moonshotai-Kimi-K2", "kimi_k2", ""),
    ("muse-glimmer", "atem", ""),
    ("openai-gpt-oss-120b", "openai", "openai"),
    ("openbmb-MiniCPM5-1B", "minicpm5", "think"),
    ("poolside-Laguna-S-2.1", "glm45", "think"),
    ("poolside-Laguna-XS-2.1", "glm45", "think"),
    ("poolside-Laguna-XS.2", "glm45", "think"),
    ("tencent-Hy3", "hy_v3", "hy_v3"),
    ("unsloth-Apriel-1.5", "jamba", "thinking"),
    ("unsloth-mistral-Devstral-Small-2507", "mistral", ""),
    ("upstage-Solar-Open-100B", "solar_open", "solar_open"),
];

#[test]
fn templates_show_their_formats() {
    let Some(folder) = std::env::var_os("RUSSET_VOCABULARIES") else {
        return;
    };
    let folder = Path::new(&folder).join("templates");
    let mut missing = Vec::new();
    for entry in std::fs::read_dir(&folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        if path.extension().is_none_or(|extension| extension != "jinja") {
            continue;
        }
        let format = OutputFormat::of_template(&std::fs::read_to_string(&path).unwrap());
        let shown = (format.tools_name().unwrap_or(""), format.reasoning_name().unwrap_or(""));
        match TEMPLATES.iter().find(|(template, ..)| *template == name) {
            Some((_, tools, reasoning)) => assert_eq!(shown, (*tools, *reasoning), "{name}"),
            None => missing.push((name, shown)),
        }
    }
    assert!(missing.is_empty(), "templates without a row: {missing:?}");
}
