//! The published measurements: their parser, and assumptions that a prediction needs because the sources do
//! not state them.

use russet_plan::chips;
use russet_plan::performance_model::model::ParameterCounts;
use russet_plan::performance_model::{
    Coefficients, EngineFamily, FenceMode, GpuProfile, GroupTopology, LinkProfile, Load, ModelProfile, Speed,
    WeightFormat,
};
use russet_plan::performance_model::{StageProfile, predict_with};

use super::models::{self, Facts};

/// One measurement, ready to be predicted.
#[derive(Clone, Debug)]
pub struct Row {
    pub id: String,
    /// Publisher: all rows of one source are left out together.
    pub source: String,
    /// Description in one line.
    pub what: String,
    pub engine: EngineFamily,
    pub model: ModelProfile,
    /// The same from its parameters alone.
    pub estimate: ModelProfile,
    pub group: GroupTopology,
    pub load: Load,
    /// Tokens per second of all streams.
    pub rate: Option<f64>,
    /// Prefill tokens per second.
    pub prefill: Option<f64>,
    /// Seconds to the first token.
    pub ttft: Option<f64>,
    pub split: RowSplit,
    pub rdma: bool,
    /// Why no model of the hardware can predict it.
    pub unknowable: Option<&'static str>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum RowSplit {
    Single,
    Tensor,
    Pipeline,
}

/// Rows that no model of the hardware can predict, by a word of their source, engine or model. They are
/// printed, and neither fitted nor tested.
const UNKNOWABLE: [(&str, &str); 7] = [
    ("MTP", "speculation: several tokens a step"),
    ("DFlash", "speculation: several tokens a step"),
    ("not wired", "weights not resident: paged in for every token"),
    ("SSD streaming", "weights read from the disk for every token"),
    ("ds4#501", "a hundredth of what its machines read: weights not resident"),
    ("mlx#3402", "weights not resident: paged in for every token"),
    ("exo#755", "a hundredth of what its machines read; software of 2025"),
];

/// Sources whose rates fit the fast fence; every other is assumed to run MLX's default. No source states it,
/// so this is an assumption of one bit for each.
const FAST_FENCE: [&str; 5] =
    ["Geerling chart", "exo#1468", "mlx-lm PR 698", "exo#1723", "exo#2070, plain MLX"];

/// Models that MLX's users run in F16: of those that were published before 2025, mlx-lm converted the tensors that are
/// not quantised to F16. Later ones keep the BF16 of their publishers (mlxcel's issue 289 names some of both).
const FLOAT16: [&str; 7] =
    ["LLaMA-2", "Llama-3", "TinyLlama", "Mistral-7B", "Codestral", "Qwen2.5", "DeepSeek-Coder-V2"];

impl Row {
    /// The prediction with some coefficients.
    pub fn predict(&self, by: &Coefficients) -> Speed {
        predict_with(self.engine, by, &self.model, &self.group, self.load)
            .expect("rows have machines and layers")
    }

    pub fn moe(&self) -> bool {
        self.model.experts.is_some()
    }
}

/// Every row that is not `claimed`, and a line for each that cannot be predicted.
pub fn read(text: &str) -> (Vec<Row>, Vec<String>) {
    let mut lines = text.lines().map(fields);
    let header = lines.next().expect("the file has a header");
    let table = models::table();
    let mut rows = Vec::new();
    let mut left = Vec::new();
    for line in lines {
        let field = |name: &str| {
            let index = header.iter().position(|column| column == name);
            index.and_then(|index| line.get(index)).map_or("", String::as_str)
        };
        if field("quality") == "claimed" {
            continue;
        }
        match row(&field, &table) {
            Ok(row) => rows.push(row),
            Err(why) => left.push(format!("{} {}: {why}", field("id"), field("model"))),
        }
    }
    (rows, left)
}

/// Fields of one line; quotes keep commas together.
fn fields(line: &str) -> Vec<String> {
    let mut fields = vec![String::new()];
    let mut quoted = false;
    for letter in line.chars() {
        match letter {
            '"' => quoted = !quoted,
            ',' if !quoted => fields.push(String::new()),
            letter => fields.last_mut().expect("there is always one").push(letter),
        }
    }
    fields
}

fn row<'a>(field: &impl Fn(&str) -> &'a str, table: &[Facts]) -> Result<Row, String> {
    let number = |name: &str| field(name).parse::<f64>().ok();
    let count = |name: &str| number(name).map_or(0, |value| value as u32);
    let engine = engine(field("engine"));
    let ranks = count("ranks").max(1);
    let machines = machines(field("chip"), field("gpu_cores"), field("memory_gb"), ranks)?;
    let facts = models::find(table, field("model"));
    let (routed, rest) =
        weights(engine, field("bits"), field("group"), facts.is_some_and(|facts| facts.native));
    let total = number("total_b").ok_or("its parameters are not stated")? * 1e9;
    let size = ParameterCounts { total, active: number("active_b").map_or(total, |active| active * 1e9) };
    let estimate = ModelProfile::estimate(size, rest);
    let bfloat16 = !FLOAT16.iter().any(|name| field("model").starts_with(name));
    let model = facts.map_or(estimate, |facts| facts.model(routed, rest));
    let model = ModelProfile { bfloat16, ..model };
    let (split, group) = group(field("split"), &machines, model.layers, field("link"), field("source"))?;
    let (prompt, generated) = (count("prompt_tokens"), count("gen_tokens"));
    let source = field("source");
    let label = ["source", "engine", "model"].map(field).join(" ");
    Ok(Row {
        id: field("id").to_owned(),
        source: source.split([' ', '@']).next().unwrap_or(source).to_owned(),
        what: format!(
            "{:<20} {:<14.14} {:<23.23} {:>2} bit {:<11.11} {:>2} streams, prompt {:<6}",
            format!("{} × {}", ranks, field("chip")),
            field("engine"),
            field("model"),
            field("bits"),
            field("split"),
            field("concurrency"),
            prompt
        ),
        engine,
        model,
        estimate,
        group,
        load: Load { prompt, context: prompt + generated / 2, streams: count("concurrency").max(1) },
        rate: number("decode_tok_s_total"),
        prefill: number("prefill_tok_s"),
        ttft: number("ttft_s"),
        split,
        rdma: field("link").contains("RDMA"),
        unknowable: UNKNOWABLE.iter().find(|(word, _)| label.contains(word)).map(|(_, why)| *why),
    })
}

fn engine(name: &str) -> EngineFamily {
    let name = name.to_lowercase();
    if name.starts_with("ds4") {
        EngineFamily::Ds4
    } else if name.contains("llama.cpp") || (name.starts_with("ollama") && !name.contains("mlx")) {
        EngineFamily::LlamaCpp
    } else {
        EngineFamily::Mlx
    }
}

/// The machines: `M3 Ultra` for all of them, or `M3 Ultra + M5 Max`.
fn machines(chips: &str, cores: &str, memory: &str, ranks: u32) -> Result<Vec<GpuProfile>, String> {
    let sizes: Vec<u32> = memory.split(['+', '/']).filter_map(|size| size.trim().parse().ok()).collect();
    let cores = cores.parse().ok();
    let names: Vec<&str> = chips.split('+').map(str::trim).collect();
    let found = (0..ranks as usize).map(|rank| {
        let name = names[rank % names.len()];
        let memory = sizes.get(rank % sizes.len().max(1)).copied();
        let chip = chips::find(name, cores, memory).or_else(|| chips::find(name, None, memory));
        chip.map(GpuProfile::from).ok_or(format!("its chip is {name:?}"))
    });
    found.collect()
}

/// Formats of the experts and the rest. If not stated, what the engine's users mostly run.
fn weights(engine: EngineFamily, bits: &str, group: &str, native: bool) -> (WeightFormat, WeightFormat) {
    let name = group.to_lowercase();
    let bits = bits.parse::<u32>().unwrap_or(4);
    let size =
        name.split(' ').next().and_then(|size| size.parse().ok()).filter(|size| *size >= 16).unwrap_or(64);
    let affine = WeightFormat::Affine { bits, group: size };
    let eight = if engine == EngineFamily::Mlx {
        WeightFormat::Affine { bits: 8, group: 64 }
    } else {
        WeightFormat::Q8_0
    };
    match (name.as_str(), engine) {
        _ if native && engine == EngineFamily::Mlx => {
            (WeightFormat::Affine { bits: 4, group: 32 }, WeightFormat::Half)
        }
        ("f16" | "bf16", _) => (WeightFormat::Half, WeightFormat::Half),
        (name, _) if name.contains("mxfp4") => (WeightFormat::Mxfp4, eight),
        (name, _) if name.contains("mxfp8") => (WeightFormat::Mxfp8, WeightFormat::Mxfp8),
        ("q4_0", _) => (WeightFormat::Q4_0, WeightFormat::Q4_0),
        (name, EngineFamily::Ds4) if name.starts_with("iq2") || name.starts_with("q2") => {
            (WeightFormat::Q2, WeightFormat::Q8_0)
        }
        (_, EngineFamily::Ds4) => (WeightFormat::Q4K, WeightFormat::Q8_0),
        (_, EngineFamily::Mlx) if bits >= 16 => (WeightFormat::Half, WeightFormat::Half),
        (_, EngineFamily::Mlx) => (affine, affine),
        (_, EngineFamily::LlamaCpp) => {
            let all = match bits {
                2 | 3 => WeightFormat::Q3KM,
                5 => WeightFormat::Q5KM,
                6 => WeightFormat::Q6K,
                8 => WeightFormat::Q8_0,
                16.. => WeightFormat::Half,
                _ => WeightFormat::Q4KM,
            };
            (all, all)
        }
    }
}

fn group(
    split: &str,
    machines: &[GpuProfile],
    layers: u32,
    link: &str,
    source: &str,
) -> Result<(RowSplit, GroupTopology), String> {
    let link = match link {
        link if link.contains("RDMA") => LinkProfile::RDMA,
        link if link.contains("VPN") => LinkProfile::ROUTED,
        link if link.contains("GbE") || link.contains("Ethernet") => LinkProfile::ETHERNET,
        link if link.contains("Wi-Fi") => LinkProfile::WIFI,
        _ => LinkProfile::THUNDERBOLT,
    };
    let fast = FAST_FENCE.iter().any(|start| source.starts_with(start));
    let fence = if fast { FenceMode::Fast } else { FenceMode::Default };
    let ranks = machines.len() as u32;
    let part = |rank: u32| layers * (rank + 1) / ranks - layers * rank / ranks;
    let stages: Vec<(GpuProfile, u32)> = machines.iter().copied().zip((0..ranks).map(part)).collect();
    match split.split(' ').next() {
        _ if ranks == 1 => {
            Ok((RowSplit::Single, GroupTopology::tensor(machines.to_vec(), layers, link, fence)))
        }
        Some("tensor") if !split.contains('/') => {
            Ok((RowSplit::Tensor, GroupTopology::tensor(machines.to_vec(), layers, link, fence)))
        }
        Some("pipeline") => Ok((RowSplit::Pipeline, GroupTopology::pipeline(&stages, link, fence))),
        Some("hybrid") if ranks.is_multiple_of(2) => {
            let team =
                |team: &[GpuProfile]| StageProfile { gpus: team.to_vec(), layers: layers / (ranks / 2) };
            let stages = machines.chunks(2).map(team).collect();
            Ok((RowSplit::Pipeline, GroupTopology { stages, member_link: link, stage_link: link, fence }))
        }
        _ => Err(format!("its split is {split:?}")),
    }
}
