//! Properties of the performance model for any coefficients, and rules of thumb of cluster owners.

use super::*;
use crate::chips;

fn machine(name: &str, memory: u32) -> GpuProfile {
    GpuProfile::from(chips::find(name, None, Some(memory)).unwrap())
}

fn ultra() -> GpuProfile {
    machine("M3 Ultra", 512)
}

const EIGHT: WeightFormat = WeightFormat::Affine { bits: 8, group: 64 };
const FOUR: WeightFormat = WeightFormat::Affine { bits: 4, group: 64 };

/// Qwen3-235B-A22B: 94 layers of 4,096, 128 experts of which 8 are chosen.
fn qwen3_235b() -> ModelProfile {
    ModelProfile {
        layers: 94,
        hidden: 4096,
        per_layer_input: 0,
        active: 21.6e9,
        head: 0.62e9,
        cache_layers: 94,
        bytes: EIGHT.bytes(21.6e9),
        head_bytes: EIGHT.bytes(0.62e9),
        experts: Some(Experts { count: 128, used: 8, active: 14.2e9, bytes: EIGHT.bytes(14.2e9) }),
        kv_bytes: 94.0 * 2048.0,
        window: None,
        attention: 94.0 * 64.0 * 256.0,
        quantised: true,
        bfloat16: true,
    }
}

/// A dense model of the shape of Llama 3.
fn llama(layers: u32, hidden: u32, billions: f64, weights: WeightFormat) -> ModelProfile {
    let head = 128_256.0 * f64::from(hidden);
    ModelProfile {
        layers,
        hidden,
        per_layer_input: 0,
        active: billions * 1e9 - head,
        head,
        cache_layers: layers,
        bytes: weights.bytes(billions * 1e9 - head),
        head_bytes: weights.bytes(head),
        experts: None,
        kv_bytes: f64::from(layers) * 4096.0,
        window: None,
        attention: f64::from(layers) * f64::from(hidden) * 2.0,
        quantised: weights != WeightFormat::Half,
        bfloat16: true,
    }
}

fn one() -> Load {
    Load { prompt: 512, context: 512, streams: 1 }
}

fn mlx(model: &ModelProfile, group: &GroupTopology, load: Load) -> Speed {
    predict(EngineFamily::Mlx, model, group, load).unwrap()
}

fn tensor(model: &ModelProfile, ranks: usize, link: LinkProfile, fence: FenceMode) -> GroupTopology {
    GroupTopology::tensor(vec![ultra(); ranks], model.layers, link, fence)
}

fn gain(model: &ModelProfile, ranks: usize, link: LinkProfile, fence: FenceMode) -> f64 {
    let single = mlx(model, &GroupTopology::single(ultra(), model.layers), one()).decode;
    mlx(model, &tensor(model, ranks, link, fence), one()).decode / single
}

#[test]
fn speed_rises_with_bandwidth_and_falls_with_bytes_read() {
    let model = llama(32, 4096, 8.03, FOUR);
    for engine in [EngineFamily::Mlx, EngineFamily::LlamaCpp, EngineFamily::Ds4] {
        let speed = |machine: GpuProfile, model: &ModelProfile, load: Load| {
            predict(engine, model, &GroupTopology::single(machine, 32), load).unwrap()
        };
        let base = speed(ultra(), &model, one());
        let faster = GpuProfile { bandwidth: ultra().bandwidth * 1.1, ..ultra() };
        assert!(speed(faster, &model, one()).decode > base.decode);
        let heavier = ModelProfile { bytes: model.bytes * 1.1, ..model };
        assert!(speed(ultra(), &heavier, one()).decode < base.decode);
        let longer = speed(ultra(), &model, Load { prompt: 8192, context: 8192, ..one() });
        assert!(longer.decode < base.decode && longer.ttft > base.ttft);
    }
}

#[test]
fn windowed_layers_stop_growing() {
    let model = ModelProfile {
        kv_bytes: 0.0,
        attention: 0.0,
        window: Some(Window { tokens: 128, kv_bytes: 4096 }),
        ..llama(32, 4096, 8.0, FOUR)
    };
    let at = |context| {
        mlx(&model, &GroupTopology::single(ultra(), 32), Load { prompt: 1, context, streams: 1 }).decode
    };
    assert!(at(64) > at(128));
    assert_eq!(at(128), at(100_000));
}

#[test]
fn a_group_of_one_is_a_single_node_whatever_its_links() {
    let model = qwen3_235b();
    let single = mlx(&model, &GroupTopology::single(ultra(), model.layers), one());
    for link in [LinkProfile::RDMA, LinkProfile::THUNDERBOLT, LinkProfile::WIFI] {
        assert_eq!(mlx(&model, &tensor(&model, 1, link, FenceMode::Default), one()), single);
        assert_eq!(
            mlx(&model, &GroupTopology::pipeline(&[(ultra(), 94)], link, FenceMode::Default), one()),
            single
        );
    }
}

#[test]
fn empty_groups_and_models_have_no_prediction() {
    let model = qwen3_235b();
    let none = GroupTopology { stages: Vec::new(), ..GroupTopology::single(ultra(), 94) };
    assert_eq!(predict(EngineFamily::Mlx, &model, &none, one()), None);
    assert_eq!(
        predict(EngineFamily::Mlx, &model, &tensor(&model, 0, LinkProfile::RDMA, FenceMode::Fast), one()),
        None
    );
    let empty = ModelProfile { layers: 0, ..model };
    assert_eq!(predict(EngineFamily::Mlx, &empty, &GroupTopology::single(ultra(), 0), one()), None);
}

#[test]
fn pipeline_speeds_up_no_single_stream_and_costs_a_tenth() {
    let model = qwen3_235b();
    let single = mlx(&model, &GroupTopology::single(ultra(), 94), one()).decode;
    for (link, at_most) in
        [(LinkProfile::RDMA, 0.05), (LinkProfile::THUNDERBOLT, 0.12), (LinkProfile::WIFI, 0.30)]
    {
        let pipeline = GroupTopology::pipeline(&[(ultra(), 47), (ultra(), 47)], link, FenceMode::Default);
        let loss = 1.0 - mlx(&model, &pipeline, one()).decode / single;
        assert!(loss > 0.0 && loss < at_most, "{link:?}: {loss}");
    }
}

/// Seconds per step of one layer of `model` on `machine`.
fn layer_time(model: &ModelProfile, machine: GpuProfile) -> f64 {
    let body = ModelProfile { bytes: model.bytes - model.head_bytes, head_bytes: 0.0, ..*model };
    1.0 / mlx(&body, &GroupTopology::single(machine, model.layers), one()).decode / f64::from(model.layers)
}

#[test]
fn layers_and_the_head_are_all_a_step_is() {
    let model = qwen3_235b();
    let (slow, fast) = (machine("M3 Max", 128), ultra());
    let layer = |machine| layer_time(&model, machine);
    // Balanced by time: the layers are distributed so that both machines take equally long.
    let share = layer(fast) / (layer(fast) + layer(slow));
    let layers = (94.0 * share).round() as u32;
    assert!((20..47).contains(&layers), "{layers}");
    let balanced = f64::from(layers) * layer(slow) / (f64::from(94 - layers) * layer(fast));
    assert!((0.95..1.05).contains(&balanced), "{balanced}");
    let link = LinkProfile::RDMA;
    let step = 1.0
        / mlx(
            &model,
            &GroupTopology::pipeline(&[(fast, 94 - layers), (slow, layers)], link, FenceMode::Fast),
            one(),
        )
        .decode;
    let head = model.head_bytes / (READ_EFFICIENCY * fast.bandwidth);
    let sum =
        f64::from(layers) * layer(slow) + f64::from(94 - layers) * layer(fast) + head + link.hop(8192.0);
    assert!((step / sum - 1.0).abs() < 1e-9, "{step} {sum}");
}

#[test]
fn inputs_by_layer_make_hops_wider() {
    let plain = llama(35, 1536, 2.3, FOUR);
    let model = ModelProfile { per_layer_input: 256, ..plain };
    let link = LinkProfile::THUNDERBOLT;
    let stages = [(ultra(), 22), (ultra(), 8), (ultra(), 5)];
    let group = GroupTopology::pipeline(&stages, link, FenceMode::Fast);
    let step = |model: &ModelProfile| 1.0 / mlx(model, &group, one()).decode;
    // Rank 0 receives the inputs of its 22 layers, and rank 1 those of 30.
    let hop = |layers: f64| link.hop(2.0 * (1536.0 + 256.0 * layers)) - link.hop(2.0 * 1536.0);
    let wider = step(&model) - step(&plain);
    assert!((wider / (hop(22.0) + hop(30.0)) - 1.0).abs() < 1e-6, "{wider}");
    assert!(mlx(&model, &group, one()).ttft > mlx(&plain, &group, one()).ttft);
    let alone = GroupTopology::single(ultra(), 35);
    assert_eq!(mlx(&model, &alone, one()), mlx(&plain, &alone, one()));
}

#[test]
fn second_node_gains_little_for_moe_and_most_for_dense() {
    let moe = gain(&qwen3_235b(), 2, LinkProfile::RDMA, FenceMode::Fast);
    assert!((1.2..1.4).contains(&moe), "{moe}");
    let dense = gain(&llama(126, 16384, 405.9, EIGHT), 2, LinkProfile::RDMA, FenceMode::Fast);
    assert!((1.85..1.97).contains(&dense), "{dense}");
    // MLX's default fence costs all that experts gain.
    assert!(gain(&qwen3_235b(), 2, LinkProfile::RDMA, FenceMode::Default) < 1.0);
}

#[test]
fn small_models_gain_nothing_from_a_cluster() {
    for model in [llama(16, 2048, 1.24, FOUR), llama(28, 1024, 0.6, EIGHT)] {
        for ranks in [2, 4] {
            assert!(gain(&model, ranks, LinkProfile::RDMA, FenceMode::Fast) < 1.0);
            assert!(gain(&model, ranks, LinkProfile::THUNDERBOLT, FenceMode::Fast) < 0.5);
        }
    }
}

#[test]
fn fewer_larger_nodes_beat_more_smaller_ones() {
    let model = qwen3_235b();
    // Both groups read 1,092 GB/s together.
    let speed = |machine, ranks| {
        let group =
            GroupTopology::tensor(vec![machine; ranks], model.layers, LinkProfile::RDMA, FenceMode::Fast);
        mlx(&model, &group, one()).decode
    };
    assert!(speed(machine("M4 Pro", 64), 4) < speed(machine("M4 Max", 128), 2));
}

#[test]
fn the_slowest_node_sets_the_pace() {
    let model = llama(80, 8192, 70.6, FOUR);
    let pair = |other| GroupTopology::tensor(vec![ultra(), other], 80, LinkProfile::RDMA, FenceMode::Fast);
    let slow = mlx(&model, &pair(machine("M4 Pro", 64)), one()).decode;
    let both = GroupTopology::tensor(vec![machine("M4 Pro", 64); 2], 80, LinkProfile::RDMA, FenceMode::Fast);
    assert_eq!(slow, mlx(&model, &both, one()).decode);
    assert!(slow < mlx(&model, &pair(ultra()), one()).decode);
}

#[test]
fn streams_add_up_to_more_and_each_gets_less() {
    for model in [qwen3_235b(), llama(80, 8192, 70.6, FOUR)] {
        let group = GroupTopology::single(ultra(), model.layers);
        let mut last = mlx(&model, &group, one());
        for streams in [2, 4, 8, 16, 32] {
            let speed = mlx(&model, &group, Load { streams, ..one() });
            assert!(speed.total > last.total && speed.decode < last.decode, "{streams}: {speed:?}");
            last = speed;
        }
    }
}

#[test]
fn a_hybrid_lies_between_its_parts() {
    let model = llama(126, 16384, 405.9, EIGHT);
    let stage = |layers| StageProfile { gpus: vec![ultra(); 2], layers };
    let hybrid = GroupTopology {
        stages: vec![stage(63), stage(63)],
        ..tensor(&model, 2, LinkProfile::RDMA, FenceMode::Fast)
    };
    let [two, four] = [2, 4]
        .map(|ranks| mlx(&model, &tensor(&model, ranks, LinkProfile::RDMA, FenceMode::Fast), one()).decode);
    let hybrid = mlx(&model, &hybrid, one()).decode;
    assert!(hybrid < two && hybrid > 0.9 * two && two < four, "{hybrid} {two} {four}");
}

#[test]
fn prefill_of_experts_with_few_tokens_fills_no_tiles() {
    let group = GroupTopology::single(ultra(), 94);
    let rate = |experts: Option<Experts>, prompt: u32| {
        let model = ModelProfile { experts, ..qwen3_235b() };
        mlx(&model, &group, Load { prompt, ..one() }).prefill
    };
    let experts = qwen3_235b().experts;
    let finer = experts.map(|experts| Experts { count: 4 * experts.count, used: experts.used, ..experts });
    assert!(rate(finer, 512) < 0.7 * rate(experts, 512));
    assert!(rate(experts, 512) < 0.9 * rate(experts, 2049), "a full chunk fills more of every tile");
    assert!(rate(experts, 2049) < rate(None, 2049));
}

#[test]
fn only_bfloat16_before_m3_is_emulated_in_prefill() {
    let model = llama(32, 4096, 8.03, FOUR);
    let half = ModelProfile { bfloat16: false, ..model };
    for (chip, emulated) in [("M1 Max", true), ("M2 Pro", true), ("M3 Pro", false), ("M5 Max", false)] {
        let group = GroupTopology::single(machine(chip, 64), 32);
        let (slow, fast) = (mlx(&model, &group, one()), mlx(&half, &group, one()));
        assert_eq!(slow.prefill < 0.75 * fast.prefill, emulated, "{chip}: {slow:?} {fast:?}");
        assert_eq!(slow.decode, fast.decode, "{chip}");
    }
}

#[test]
fn prompts_of_any_length_have_a_time() {
    let model = qwen3_235b();
    let groups = [
        GroupTopology::single(ultra(), 94),
        tensor(&model, 2, LinkProfile::RDMA, FenceMode::Fast),
        GroupTopology::pipeline(&[(ultra(), 47), (ultra(), 47)], LinkProfile::RDMA, FenceMode::Fast),
    ];
    for group in groups {
        let mut last = 0.0;
        for prompt in [0, 1, 2, 15, 300, 2048, 2049, 2050, 100_000] {
            let ttft = mlx(&model, &group, Load { prompt, ..one() }).ttft;
            assert!(ttft.is_finite() && ttft >= last, "{prompt}: {ttft} after {last}");
            last = ttft;
        }
    }
    let head = ModelProfile { head: 2.0 * model.head, head_bytes: model.head_bytes, ..model };
    let load = Load { prompt: 2048, ..one() };
    let group = GroupTopology::single(ultra(), 94);
    assert!(mlx(&head, &group, load).ttft < mlx(&model, &group, load).ttft, "a prompt passes no head");
}
