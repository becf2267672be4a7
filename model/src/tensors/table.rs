//! Makes the table of a model's tensors from its description, and from the headers where exports differ.

use super::{Layout, Recipe, Role, Rows, ShardAxis, Tensor};
use crate::{
    description::{
        Attention, DeltaNet, Dense, Description, Encoder, ExpertNorms, Experts, Latent, Layer, Mamba2, Mixer,
        Mlp, NormKind, NormOffset, PerLayerInputs, QkNorm, Scoring, ShortConv,
    },
    load_quantization::{LoadQuantization, MatrixQuantization},
    safetensors::Headers,
};

/// The tensors of a model; with `quantization`, matrices of plain numbers are packed while they are read.
pub fn table(
    description: &Description,
    headers: &Headers,
    quantization: Option<LoadQuantization>,
) -> Vec<Tensor> {
    let (hidden, vocabulary) = (u64::from(description.hidden_size), u64::from(description.vocab_size));
    let layout = Layout::of(headers);
    let adds_one = match description.norm_offset {
        NormOffset::None => false,
        NormOffset::One => true,
        NormOffset::OneInOriginals => layout.is_original,
    };
    let mut module = Module {
        path: "model".to_owned(),
        role: Role::Embedding,
        headers,
        layout,
        adds_one,
        quantization,
        projections_back: description.projections_back,
        tensors: Vec::new(),
    };
    module.push("embed_tokens.weight", &[vocabulary, hidden], None, true);
    if let Some(encoder) = &description.encoder {
        module.encoder_embeddings(encoder, hidden);
    }
    if let Some(inputs) = description.per_layer_inputs {
        module.role = Role::PerLayerInputs;
        module.per_layer_inputs(inputs, hidden, description.layers.len() as u64);
    }
    for (index, layer) in description.layers.iter().enumerate() {
        module.path = format!("model.layers.{index}");
        module.role = Role::Layer(index as u32);
        module.layer(layer, hidden);
        if let Some(inputs) = description.per_layer_inputs {
            module.per_layer_gate(inputs, hidden);
        }
    }
    (module.path, module.role) = ("model".to_owned(), Role::Head);
    if let Some(norm) = description.norm {
        module.norm(norm, hidden);
    }
    if description.encoder.is_some_and(|encoder| encoder.classifier.is_some()) {
        module.path = "score".to_owned();
        module.replicated("dense", hidden, hidden, true);
        module.replicated("out_proj", 1, hidden, true);
    }
    if !description.tied {
        module.path = "lm_head".to_owned();
        module.push("weight", &[vocabulary, hidden], None, true);
        module.quantise(description.projections_back);
    }
    module.tensors
}

/// Writes the tensors of one module.
struct Module<'a> {
    path: String,
    role: Role,
    headers: &'a Headers,
    layout: Layout,
    /// Whether weights of norms are stored as differences from one.
    adds_one: bool,
    quantization: Option<LoadQuantization>,
    /// What holds for projections back to the hidden state, and for the head.
    projections_back: MatrixQuantization,
    tensors: Vec<Tensor>,
}

impl Module<'_> {
    fn push(&mut self, field: &str, shape: &[u64], dim: Option<usize>, is_matrix: bool) -> &mut Tensor {
        let segments = dim.and_then(|dim| shape.get(dim).copied()).into_iter().collect();
        self.push_segments(field, shape, dim.map(|dim| (dim, segments)), is_matrix)
    }

    fn push_segments(
        &mut self,
        field: &str,
        shape: &[u64],
        axis: Option<(usize, Vec<u64>)>,
        is_matrix: bool,
    ) -> &mut Tensor {
        let name = format!("{}.{field}", self.path);
        self.tensors.push(Tensor {
            role: self.role,
            shape: shape.to_vec(),
            axis: axis.map_or(ShardAxis::Replicated, |(dim, segments)| ShardAxis::Axis { dim, segments }),
            sources: vec![self.layout.name(&name)],
            recipe: Recipe::AsIs,
            is_matrix,
            packs_to: None,
            is_auxiliary: false,
            name,
        });
        if is_matrix {
            self.quantise(MatrixQuantization::AsAsked);
        }
        let last = self.tensors.len() - 1;
        &mut self.tensors[last]
    }

    /// What holds for the last tensor where matrices are packed while they are read.
    fn quantise(&mut self, matrix: MatrixQuantization) {
        if let (Some(tensor), Some(quantization)) = (self.tensors.last_mut(), self.quantization) {
            tensor.packs_to = quantization.packing(tensor.shape.last().copied().unwrap_or(0), matrix);
        }
    }

    /// Whether the files have this field of the module.
    fn has(&self, field: &str) -> bool {
        self.headers.contains(&self.stored(field))
    }

    /// Its name in the files.
    fn stored(&self, field: &str) -> String {
        self.layout.name(&format!("{}.{field}", self.path))
    }

    fn vector(&mut self, field: &str, width: u64) {
        self.push(field, &[width], None, false);
    }

    fn norm(&mut self, field: &str, width: u64) {
        let adds_one = self.adds_one;
        let tensor = self.push(&format!("{field}.weight"), &[width], None, false);
        if adds_one {
            tensor.recipe = Recipe::AddOne;
        }
    }

    /// A norm of this kind, with the bias that it has.
    fn layer_norm(&mut self, field: &str, width: u64, kind: NormKind) {
        self.norm(field, width);
        if kind == NormKind::Layer {
            self.vector(&format!("{field}.bias"), width);
        }
    }

    /// What an encoder adds to the embedding of its tokens.
    fn encoder_embeddings(&mut self, encoder: &Encoder, hidden: u64) {
        let [positions, token_types] = [encoder.positions, encoder.token_types].map(u64::from);
        self.push("embed_positions.weight", &[positions, hidden], None, false);
        self.push("embed_token_types.weight", &[token_types, hidden], None, false);
        self.layer_norm("embed_norm", hidden, NormKind::Layer);
    }

    /// A projection that every rank computes whole.
    fn replicated(&mut self, field: &str, outputs: u64, inputs: u64, bias: bool) {
        self.replicated_as(field, outputs, inputs, bias, MatrixQuantization::AsAsked);
    }

    /// The same where mlx-lm packs it in another way than most.
    fn replicated_as(
        &mut self,
        field: &str,
        outputs: u64,
        inputs: u64,
        bias: bool,
        matrix: MatrixQuantization,
    ) {
        self.push(&format!("{field}.weight"), &[outputs, inputs], None, true);
        self.quantise(matrix);
        if bias {
            self.vector(&format!("{field}.bias"), outputs);
        }
    }

    /// A projection whose outputs are shared, and the bias with them.
    fn column_parallel(&mut self, field: &str, outputs: u64, inputs: u64, bias: bool) {
        self.push(&format!("{field}.weight"), &[outputs, inputs], Some(0), true);
        if bias {
            self.push(&format!("{field}.bias"), &[outputs], Some(0), false);
        }
    }

    /// A projection whose inputs are shared and whose outputs are then summed: its bias is added after the sum.
    fn row_parallel(&mut self, field: &str, outputs: u64, inputs: u64, bias: bool) {
        self.push(&format!("{field}.weight"), &[outputs, inputs], Some(1), true);
        self.quantise(self.projections_back);
        if bias {
            self.vector(&format!("{field}.bias"), outputs);
        }
    }

    fn layer(&mut self, layer: &Layer, hidden: u64) {
        let norms = &layer.norms;
        for name in [norms.before_mixer, norms.after_mixer].into_iter().flatten() {
            self.layer_norm(name, hidden, norms.kind);
        }
        let path = self.path.clone();
        if let Some(mixer) = &layer.mixer {
            self.path = format!("{path}.{}", mixer.module());
            match mixer {
                Mixer::Attention(attention) => self.attention(attention, hidden),
                Mixer::Latent(latent) => self.latent(latent, hidden),
                Mixer::DeltaNet(delta) => self.delta_net(delta, hidden),
                Mixer::ShortConv(conv) => self.short_conv(conv, hidden),
                Mixer::Mamba2(mamba) => self.mamba2(mamba, hidden),
            }
            self.path.clone_from(&path);
        }
        for name in [norms.before_mlp, norms.after_mlp].into_iter().flatten() {
            self.layer_norm(name, hidden, norms.kind);
        }
        if let Some(mlp) = &layer.mlp {
            self.path = mlp.path(&path);
            match mlp {
                Mlp::Dense(dense) => self.dense("", hidden, dense),
                Mlp::Experts(experts) => self.experts(experts, hidden),
            }
            self.path = path;
        }
        if let Some(field) = layer.output_scale {
            self.vector(field, 1);
        }
    }

    /// What makes the inputs of all layers, one behind the other.
    fn per_layer_inputs(&mut self, inputs: PerLayerInputs, hidden: u64, layers: u64) {
        let (width, tokens) = (u64::from(inputs.width), u64::from(inputs.vocab_size));
        self.push("embed_tokens_per_layer.weight", &[tokens, layers * width], None, true);
        self.replicated("per_layer_model_projection", layers * width, hidden, false);
        self.norm("per_layer_projection_norm", width);
    }

    /// What a layer does with its input. It is narrow, so every rank of a tensor group computes all of it.
    fn per_layer_gate(&mut self, inputs: PerLayerInputs, hidden: u64) {
        let width = u64::from(inputs.width);
        self.replicated("per_layer_input_gate", width, hidden, false);
        self.replicated("per_layer_projection", hidden, width, false);
        self.norm("post_per_layer_input_norm", hidden);
    }

    fn attention(&mut self, attention: &Attention, hidden: u64) {
        let [heads, kv_heads, key_dim, value_dim] =
            [attention.heads, attention.kv_heads, attention.key_dim, attention.value_dim].map(u64::from);
        let (queries, keys, values) = (attention.query_width(), kv_heads * key_dim, kv_heads * value_dim);
        let bias = attention.qkv_bias;
        // Where they are stored together, each is some rows of the whole.
        let merged = self.has("qkv_proj.weight");
        let of = queries + keys + values;
        let projections =
            [("q_proj", queries, 0), ("k_proj", keys, queries), ("v_proj", values, queries + keys)];
        for (field, width, from) in projections {
            let is_shared = attention.shares_cache_of.is_some() && field != "q_proj";
            if is_shared || (field == "v_proj" && attention.values_are_keys) {
                continue;
            }
            self.column_parallel(field, width, hidden, bias);
            if field != "q_proj" {
                self.share_by_heads(1 + usize::from(bias), attention.kv_heads);
            }
            if merged {
                self.take_rows("qkv_proj", 1 + usize::from(bias), Rows { dim: 0, of, from, step: 1 });
            }
        }
        self.row_parallel(attention.output, hidden, heads * value_dim, attention.output_bias);
        let [query_norm, key_norm] = attention.qk_norm_names;
        for (name, width, shared) in
            [(query_norm, heads * key_dim, attention.heads), (key_norm, keys, attention.kv_heads)]
        {
            if attention.shares_cache_of.is_some() && name == key_norm {
                continue;
            }
            match attention.qk_norm {
                None => {}
                Some(QkNorm::Head { .. }) => self.norm(name, key_dim),
                Some(QkNorm::Full { .. }) => {
                    self.push(&format!("{name}.weight"), &[width], Some(0), false);
                    self.share_by_heads(1, shared);
                }
            }
        }
        if attention.sinks {
            self.push("sinks", &[heads], Some(0), false);
        }
    }

    /// The last tensors are shared by the heads that their rows are of.
    fn share_by_heads(&mut self, count: usize, heads: u32) {
        let from = self.tensors.len() - count;
        for tensor in &mut self.tensors[from..] {
            tensor.axis = ShardAxis::Heads { dim: 0, heads };
        }
    }

    /// The last tensors are some rows of another projection's weight and bias.
    fn take_rows(&mut self, field: &str, count: usize, rows: Rows) {
        self.take(field, count, &Recipe::Rows(rows));
    }

    /// The last tensors are those of this projection, where the files have it.
    fn take_original(&mut self, field: &str, count: usize) {
        if self.has(&format!("{field}.weight")) {
            self.take(field, count, &Recipe::AsIs);
        }
    }

    /// The last tensors are made of another projection's weight and bias.
    fn take(&mut self, field: &str, count: usize, recipe: &Recipe) {
        let stored: Vec<String> = ["weight", "bias"]
            .iter()
            .take(count)
            .map(|kind| self.stored(&format!("{field}.{kind}")))
            .collect();
        let from = self.tensors.len() - count;
        for (tensor, source) in self.tensors[from..].iter_mut().zip(stored) {
            tensor.sources = vec![source];
            tensor.recipe = recipe.clone();
        }
    }

    fn latent(&mut self, latent: &Latent, hidden: u64) {
        let [heads, rank, rope, nope, value] =
            [latent.heads, latent.rank, latent.rope_dim, latent.nope_dim, latent.value_dim].map(u64::from);
        let queries = heads * (nope + rope);
        match latent.query_rank.map(u64::from) {
            None => self.column_parallel("q_proj", queries, hidden, false),
            Some(query_rank) => {
                self.replicated("q_a_proj", query_rank, hidden, latent.bias);
                self.vector("q_a_layernorm.weight", query_rank);
                self.column_parallel("q_b_proj", queries, query_rank, false);
            }
        }
        self.replicated("kv_a_proj_with_mqa", rank + rope, hidden, latent.bias);
        self.vector("kv_a_layernorm.weight", rank);
        // The original export has both in one matrix, head by head.
        let original = self.has("kv_b_proj.weight").then(|| self.stored("kv_b_proj.weight"));
        let of = nope + value;
        for (field, shape, from) in
            [("embed_q.weight", [heads, rank, nope], 0), ("unembed_out.weight", [heads, value, rank], nope)]
        {
            let tensor = self.push(field, &shape, Some(0), true);
            if let Some(original) = &original {
                tensor.sources = vec![original.clone()];
                tensor.recipe = Recipe::HeadRows { of, from, transposed: from == 0 };
            }
        }
        self.row_parallel("o_proj", hidden, heads * value, latent.bias);
    }

    fn delta_net(&mut self, delta: &DeltaNet, hidden: u64) {
        let (keys, values, heads) = (delta.key_width(), delta.value_width(), u64::from(delta.value_heads));
        let mixed = vec![keys, keys, values];
        if delta.merged_projections {
            self.column_parallel("in_proj_qkvz", 2 * (keys + values), hidden, false);
            self.column_parallel("in_proj_ba", 2 * heads, hidden, false);
        } else {
            let shape = [delta.conv_width(), hidden];
            self.push_segments("in_proj_qkv.weight", &shape, Some((0, mixed.clone())), true);
            self.column_parallel("in_proj_z", values, hidden, false);
            self.column_parallel("in_proj_b", heads, hidden, false);
            self.column_parallel("in_proj_a", heads, hidden, false);
        }
        let shape = [delta.conv_width(), u64::from(delta.conv_kernel), 1];
        self.push_segments("conv1d.weight", &shape, Some((0, mixed)), false);
        self.push("A_log", &[heads], Some(0), false).is_auxiliary = true;
        self.push("dt_bias", &[heads], Some(0), false).is_auxiliary = true;
        self.push("norm.weight", &[u64::from(delta.value_dim)], None, false).is_auxiliary = true;
        self.row_parallel("out_proj", hidden, values, false);
    }

    fn short_conv(&mut self, conv: &ShortConv, hidden: u64) {
        let (channels, kernel) = (u64::from(conv.channels), u64::from(conv.kernel));
        // Gate before, gate after, and what is convolved: a rank has the same channels of each.
        let segments = || Some((0, vec![channels; 3]));
        self.push_segments("in_proj.weight", &[3 * channels, hidden], segments(), true);
        self.push("conv.weight", &[channels, kernel, 1], Some(0), false);
        if conv.bias {
            self.push_segments("in_proj.bias", &[3 * channels], segments(), false);
            self.push("conv.bias", &[channels], Some(0), false);
        }
        self.row_parallel("out_proj", hidden, channels, conv.bias);
    }

    fn mamba2(&mut self, mamba: &Mamba2, hidden: u64) {
        let (heads, inner) = (u64::from(mamba.heads), mamba.inner_width());
        let [values, writes, reads] = mamba.conv_widths();
        // The gate, what the convolution passes, and the time steps.
        let projected = vec![inner, values, writes, reads, heads];
        let mixed = vec![values, writes, reads];
        let [width, channels] = [&projected, &mixed].map(|segments| segments.iter().sum::<u64>());
        let kernel = u64::from(mamba.conv_kernel);
        self.push_segments("in_proj.weight", &[width, hidden], Some((0, projected.clone())), true);
        if mamba.bias {
            self.push_segments("in_proj.bias", &[width], Some((0, projected)), false);
        }
        self.push_segments("conv1d.weight", &[channels, kernel, 1], Some((0, mixed.clone())), false);
        if mamba.conv_bias {
            self.push_segments("conv1d.bias", &[channels], Some((0, mixed)), false);
        }
        for field in ["A_log", "D", "dt_bias"] {
            self.push(field, &[heads], Some(0), false).is_auxiliary = true;
        }
        self.push("norm.weight", &[inner], Some(0), false);
        self.row_parallel("out_proj", hidden, inner, mamba.bias);
    }

    fn dense(&mut self, within: &str, hidden: u64, dense: &Dense) {
        let (first, width, bias) = (self.tensors.len(), u64::from(dense.intermediate), dense.bias);
        let field = |name: &str| format!("{within}{name}");
        // Where they are stored together, the gate comes first.
        let merged = self.has(&field("gate_up_proj.weight"));
        let ([gate, up, down], count) = (dense.originals, 1 + usize::from(bias));
        let gateless = usize::from(!dense.activation.has_gate());
        for (name, original, from) in
            [("gate_proj", gate, 0), ("up_proj", up, width)].into_iter().skip(gateless)
        {
            self.column_parallel(&field(name), width, hidden, bias);
            if merged {
                let rows = Rows { dim: 0, of: 2 * width, from, step: 1 };
                self.take_rows(&field("gate_up_proj"), count, rows);
            } else {
                self.take_original(&field(original), count);
            }
        }
        self.row_parallel(&field("down_proj"), hidden, width, bias);
        self.take_original(&field(down), count);
        self.share_in_parts(first, width);
    }

    /// The tensors from the first on are shared by columns of what lies between them, `width`, or by groups of these
    /// where the projection back is packed: the last matrix.
    fn share_in_parts(&mut self, first: usize, width: u64) {
        let back = self.tensors[first..].iter().rfind(|tensor| tensor.is_matrix);
        let packing = back.and_then(|tensor| tensor.stored(self.headers).ok()?.packing);
        let parts = packing.map_or(width, |packing| width / u64::from(packing.group_size).max(1));
        for tensor in &mut self.tensors[first..] {
            if let Some(dim) = tensor.axis.dim() {
                tensor.axis = ShardAxis::Parts { dim, parts };
            }
        }
    }

    fn experts(&mut self, experts: &Experts, hidden: u64) {
        let [count, width] = [experts.count, experts.intermediate].map(u64::from);
        self.replicated_as(experts.gate, count, hidden, experts.bias, experts.router.quantization);
        // Scores are in 32 bits, and what they weigh is not.
        let is_wide = matches!(experts.router.scoring, Scoring::Sigmoid | Scoring::GroupedSoftmax);
        if let Some(gate) = self.tensors.last_mut().filter(|_| is_wide) {
            gate.is_auxiliary = true;
        }
        if let Some(correction) = experts.router.correction {
            self.push(correction, &[count], None, false).is_auxiliary = true;
        }
        if let Some(norm) = experts.router.norm {
            self.vector(norm.scale, hidden);
            self.vector(norm.expert_scale, count);
        }
        if let Some(norms) = experts.norms {
            let ExpertNorms { before_shared, after_shared, before, after, .. } = norms;
            for name in [before_shared, after_shared, before, after] {
                self.norm(name, hidden);
            }
        }
        let latent = experts.latent.map_or(hidden, u64::from);
        if experts.latent.is_some() {
            self.replicated("fc1_latent_proj", latent, hidden, false);
            self.replicated("fc2_latent_proj", hidden, latent, false);
        }
        let shapes = [([count, width, latent], 1), ([count, width, latent], 1), ([count, latent, width], 2)];
        let first = self.tensors.len();
        let (gate, [up, down]) = experts.projections();
        for (place, (name, (shape, dim))) in [gate, Some(up), Some(down)].into_iter().zip(shapes).enumerate()
        {
            let Some(name) = name else { continue };
            self.push(&format!("{}.{name}.weight", experts.experts), &shape, Some(dim), true);
            self.original_experts(experts, place);
            if experts.bias {
                // What is added after the sum over ranks is whole on each.
                let dim = (dim == 1).then_some(1);
                self.push(&format!("{}.{name}.bias", experts.experts), &shape[..2], dim, false);
                self.original_biases(experts, place);
            }
        }
        self.share_in_parts(first, width);
        if let Some(shared) = experts.shared {
            let dense = Dense { activation: experts.activation, ..Dense::new(shared.intermediate) };
            self.dense(&format!("{}.", shared.module), hidden, &dense);
            if let Some(gate) = shared.gate {
                self.replicated_as(gate, 1, hidden, false, MatrixQuantization::EightBits);
            }
        }
    }

    /// The last tensor is gate (0), up (1) or down (2) of all experts: where the files have it otherwise.
    fn original_experts(&mut self, experts: &Experts, place: usize) {
        let each = |expert: u32| format!("experts.{expert}.{}.weight", experts.originals[place]);
        let (sources, recipe) = if self.has(&each(0)) {
            // Up to the first that is missing, which is then named: as many as there are tensors, whatever the count.
            let there = (0..experts.count).take_while(|expert| self.has(&each(*expert))).count() as u32;
            let names = 0..experts.count.min(there.saturating_add(1));
            (names.map(|expert| self.stored(&each(expert))).collect(), Recipe::Stack)
        } else {
            // All experts in one tensor, gate and up together: one behind the other, or in turn where packed.
            let turns = [("experts.gate_up_proj_blocks", true), ("experts.gate_up_proj", false)];
            let downs = ["experts.down_proj_blocks", "experts.down_proj"];
            match (place, turns.into_iter().find(|(field, _)| self.has(field))) {
                (_, None) => return,
                (2, Some(_)) => match downs.into_iter().find(|field| self.has(field)) {
                    Some(field) => (vec![self.stored(field)], Recipe::AsIs),
                    None => return,
                },
                (_, Some((field, in_turn))) => {
                    (vec![self.stored(field)], gate_or_up(experts.intermediate, place, in_turn))
                }
            }
        };
        if let Some(tensor) = self.tensors.last_mut() {
            (tensor.sources, tensor.recipe) = (sources, recipe);
        }
    }

    /// The same of their biases.
    fn original_biases(&mut self, experts: &Experts, place: usize) {
        let (field, recipe) = match place {
            2 => ("experts.down_proj_bias", Recipe::AsIs),
            _ => ("experts.gate_up_proj_bias", gate_or_up(experts.intermediate, place, true)),
        };
        if !self.has(field) {
            return;
        }
        let sources = vec![self.stored(field)];
        if let Some(tensor) = self.tensors.last_mut() {
            (tensor.sources, tensor.recipe) = (sources, recipe);
        }
    }
}

/// Gate (0) or up (1) of a tensor that has both along its second dimension.
fn gate_or_up(intermediate: u32, place: usize, in_turn: bool) -> Recipe {
    let (width, place) = (u64::from(intermediate), place as u64);
    let (from, step) = if in_turn { (place, 2) } else { (place * width, 1) };
    Recipe::Rows(Rows { dim: 1, of: 2 * width, from, step })
}
