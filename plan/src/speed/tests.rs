//! What the model must say whatever its coefficients are, and the rules of thumb of people who own such
//! clusters.

use super::*;
use crate::chips;

fn machine(name: &str, memory: u32) -> Machine {
    Machine::from(chips::find(name, None, Some(memory)).unwrap())
}

fn ultra() -> Machine {
    machine("M3 Ultra", 512)
}

const EIGHT: Weights = Weights::Affine { bits: 8, group: 64 };
const FOUR: Weights = Weights::Affine { bits: 4, group: 64 };

/// Qwen3-235B-A22B: 94 layers of 4,096, 128 experts of which 8 are chosen.
fn qwen3_235b() -> Model {
    Model {
        layers: 94,
        hidden: 4096,
        active: 21.6e9,
        bytes: EIGHT.bytes(21.6e9),
        head_bytes: EIGHT.bytes(0.62e9),
        experts: Some(Experts { count: 128, used: 8, bytes: EIGHT.bytes(14.2e9) }),
        kv_bytes: 94.0 * 2048.0,
        window: None,
        attention: 94.0 * 64.0 * 256.0,
        quantised: true,
    }
}

/// A dense model of the shape of Llama 3.
fn llama(layers: u32, hidden: u32, billions: f64, weights: Weights) -> Model {
    let head = 128_256.0 * f64::from(hidden);
    Model {
        layers,
        hidden,
        active: billions * 1e9 - head,
        bytes: weights.bytes(billions * 1e9 - head),
        head_bytes: weights.bytes(head),
        experts: None,
        kv_bytes: f64::from(layers) * 4096.0,
        window: None,
        attention: f64::from(layers) * f64::from(hidden) * 2.0,
        quantised: weights != Weights::Half,
    }
}

fn one() -> Load {
    Load { prompt: 512, context: 512, streams: 1 }
}

fn mlx(model: &Model, group: &Group, load: Load) -> Speed {
    predict(Engine::Mlx, model, group, load).unwrap()
}

fn tensor(model: &Model, ranks: usize, link: Link, fence: Fence) -> Group {
    Group::tensor(vec![ultra(); ranks], model.layers, link, fence)
}

fn gain(model: &Model, ranks: usize, link: Link, fence: Fence) -> f64 {
    let single = mlx(model, &Group::single(ultra(), model.layers), one()).decode;
    mlx(model, &tensor(model, ranks, link, fence), one()).decode / single
}

#[test]
fn more_bandwidth_is_faster_and_more_bytes_or_context_are_slower() {
    let model = llama(32, 4096, 8.03, FOUR);
    for engine in [Engine::Mlx, Engine::LlamaCpp, Engine::Ds4] {
        let speed = |machine: Machine, model: &Model, load: Load| {
            predict(engine, model, &Group::single(machine, 32), load).unwrap()
        };
        let base = speed(ultra(), &model, one());
        let faster = Machine { bandwidth: ultra().bandwidth * 1.1, ..ultra() };
        assert!(speed(faster, &model, one()).decode > base.decode);
        let heavier = Model { bytes: model.bytes * 1.1, ..model };
        assert!(speed(ultra(), &heavier, one()).decode < base.decode);
        let longer = speed(ultra(), &model, Load { prompt: 8192, context: 8192, ..one() });
        assert!(longer.decode < base.decode && longer.ttft > base.ttft);
    }
}

#[test]
fn windowed_layers_stop_growing() {
    let model = Model {
        kv_bytes: 0.0,
        attention: 0.0,
        window: Some(Window { tokens: 128, kv_bytes: 4096 }),
        ..llama(32, 4096, 8.0, FOUR)
    };
    let at =
        |context| mlx(&model, &Group::single(ultra(), 32), Load { prompt: 1, context, streams: 1 }).decode;
    assert!(at(64) > at(128));
    assert_eq!(at(128), at(100_000));
}

#[test]
fn a_group_of_one_is_a_single_node_whatever_its_links() {
    let model = qwen3_235b();
    let single = mlx(&model, &Group::single(ultra(), model.layers), one());
    for link in [Link::RDMA, Link::THUNDERBOLT, Link::WIFI] {
        assert_eq!(mlx(&model, &tensor(&model, 1, link, Fence::Default), one()), single);
        assert_eq!(mlx(&model, &Group::pipeline(&[(ultra(), 94)], link, Fence::Default), one()), single);
    }
}

#[test]
fn nothing_is_predicted_of_nothing() {
    let model = qwen3_235b();
    let none = Group { stages: Vec::new(), ..Group::single(ultra(), 94) };
    assert_eq!(predict(Engine::Mlx, &model, &none, one()), None);
    assert_eq!(predict(Engine::Mlx, &model, &tensor(&model, 0, Link::RDMA, Fence::Fast), one()), None);
    let empty = Model { layers: 0, ..model };
    assert_eq!(predict(Engine::Mlx, &empty, &Group::single(ultra(), 0), one()), None);
}

#[test]
fn a_pipeline_never_speeds_one_stream_up_and_costs_about_a_tenth() {
    let model = qwen3_235b();
    let single = mlx(&model, &Group::single(ultra(), 94), one()).decode;
    for (link, at_most) in [(Link::RDMA, 0.05), (Link::THUNDERBOLT, 0.12), (Link::WIFI, 0.30)] {
        let pipeline = Group::pipeline(&[(ultra(), 47), (ultra(), 47)], link, Fence::Default);
        let loss = 1.0 - mlx(&model, &pipeline, one()).decode / single;
        assert!(loss > 0.0 && loss < at_most, "{link:?}: {loss}");
    }
}

/// Seconds one layer of `model` takes on `machine` in a step.
fn layer_time(model: &Model, machine: Machine) -> f64 {
    let body = Model { bytes: model.bytes - model.head_bytes, head_bytes: 0.0, ..*model };
    1.0 / mlx(&body, &Group::single(machine, model.layers), one()).decode / f64::from(model.layers)
}

#[test]
fn layers_and_the_head_are_all_a_step_is() {
    let model = qwen3_235b();
    let (slow, fast) = (machine("M3 Max", 128), ultra());
    let layer = |machine| layer_time(&model, machine);
    // Balanced by time: the slower machine has so many layers that both take equally long.
    let share = layer(fast) / (layer(fast) + layer(slow));
    let layers = (94.0 * share).round() as u32;
    assert!((20..47).contains(&layers), "{layers}");
    let balanced = f64::from(layers) * layer(slow) / (f64::from(94 - layers) * layer(fast));
    assert!((0.95..1.05).contains(&balanced), "{balanced}");
    let link = Link::RDMA;
    let step = 1.0
        / mlx(&model, &Group::pipeline(&[(fast, 94 - layers), (slow, layers)], link, Fence::Fast), one())
            .decode;
    let head = model.head_bytes / (READ * fast.bandwidth);
    let sum =
        f64::from(layers) * layer(slow) + f64::from(94 - layers) * layer(fast) + head + link.hop(8192.0);
    assert!((step / sum - 1.0).abs() < 1e-9, "{step} {sum}");
}

#[test]
fn experts_gain_a_third_of_a_second_node_and_dense_models_nearly_all() {
    let moe = gain(&qwen3_235b(), 2, Link::RDMA, Fence::Fast);
    assert!((1.2..1.4).contains(&moe), "{moe}");
    let dense = gain(&llama(126, 16384, 405.9, EIGHT), 2, Link::RDMA, Fence::Fast);
    assert!((1.85..1.97).contains(&dense), "{dense}");
    // The fence that MLX waits with by default eats all that experts gain.
    assert!(gain(&qwen3_235b(), 2, Link::RDMA, Fence::Default) < 1.0);
}

#[test]
fn small_models_gain_nothing_from_a_cluster() {
    for model in [llama(16, 2048, 1.24, FOUR), llama(28, 1024, 0.6, EIGHT)] {
        for ranks in [2, 4] {
            assert!(gain(&model, ranks, Link::RDMA, Fence::Fast) < 1.0);
            assert!(gain(&model, ranks, Link::THUNDERBOLT, Fence::Fast) < 0.5);
        }
    }
}

#[test]
fn fewer_larger_nodes_beat_more_smaller_ones() {
    let model = qwen3_235b();
    // Both groups read 1,092 GB/s together.
    let speed = |machine, ranks| {
        let group = Group::tensor(vec![machine; ranks], model.layers, Link::RDMA, Fence::Fast);
        mlx(&model, &group, one()).decode
    };
    assert!(speed(machine("M4 Pro", 64), 4) < speed(machine("M4 Max", 128), 2));
}

#[test]
fn the_slowest_node_sets_the_pace() {
    let model = llama(80, 8192, 70.6, FOUR);
    let pair = |other| Group::tensor(vec![ultra(), other], 80, Link::RDMA, Fence::Fast);
    let slow = mlx(&model, &pair(machine("M4 Pro", 64)), one()).decode;
    let both = Group::tensor(vec![machine("M4 Pro", 64); 2], 80, Link::RDMA, Fence::Fast);
    assert_eq!(slow, mlx(&model, &both, one()).decode);
    assert!(slow < mlx(&model, &pair(ultra()), one()).decode);
}

#[test]
fn streams_add_up_to_more_and_each_gets_less() {
    for model in [qwen3_235b(), llama(80, 8192, 70.6, FOUR)] {
        let group = Group::single(ultra(), model.layers);
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
    let stage = |layers| Stage { machines: vec![ultra(); 2], layers };
    let hybrid = Group { stages: vec![stage(63), stage(63)], ..tensor(&model, 2, Link::RDMA, Fence::Fast) };
    let [two, four] =
        [2, 4].map(|ranks| mlx(&model, &tensor(&model, ranks, Link::RDMA, Fence::Fast), one()).decode);
    let hybrid = mlx(&model, &hybrid, one()).decode;
    assert!(hybrid < two && hybrid > 0.9 * two && two < four, "{hybrid} {two} {four}");
}
