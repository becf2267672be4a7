//! Engines that embed and score over gRPC: what they give, what they refuse, and what they cut.

use russet_engine::pooling::MAX_INPUTS;
use russet_rpc::engine as pb;
use russet_rpc::engine::engine_client::EngineClient;
use russet_wire::event::{FailureKind, GenerationEvent, GenerationFailure};
use tonic::transport::Channel;

use crate::engines::{EngineHarness, ask, collect, say, within};
use crate::{model, random_models};

fn text(text: &str) -> pb::EmbedInput {
    pb::EmbedInput { input: Some(pb::embed_input::Input::Text(text.to_owned())) }
}

fn ids(ids: &[u32]) -> pb::EmbedInput {
    pb::EmbedInput { input: Some(pb::embed_input::Input::TokenIds(pb::TokenIds { ids: ids.to_vec() })) }
}

fn embed(inputs: Vec<pb::EmbedInput>) -> pb::EmbedRequest {
    pb::EmbedRequest { inputs, ..pb::EmbedRequest::default() }
}

async fn embedded(
    client: &mut EngineClient<Channel>,
    request: pb::EmbedRequest,
) -> (Vec<Vec<f32>>, Vec<u32>) {
    let reply = within("the vectors", client.embed(request)).await.unwrap().into_inner();
    assert_eq!(reply.failed, None);
    let numbers: Vec<f32> =
        reply.values.chunks_exact(4).map(|four| f32::from_le_bytes(four.try_into().unwrap())).collect();
    (numbers.chunks_exact(reply.dimensions as usize).map(<[f32]>::to_vec).collect(), reply.prompt_tokens)
}

fn refused(failed: Option<pb::Failed>, said: &str) {
    let GenerationFailure { kind, message } = failed.expect(said).into();
    let kinds = [FailureKind::InvalidRequest, FailureKind::ContextLengthExceeded];
    assert!(kinds.contains(&kind) && message.contains(said), "{kind:?}: {message}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engine_embeds_batches_and_refuses_with_numbers() {
    let random_models::RandomModel { dir, .. } = random_models::bert();
    let mut lab = EngineHarness::new();
    lab.config.context_tokens = 64;
    let engines = lab.start(dir.path(), &[3]);
    let mut client = lab.client(&engines[0]).await;
    // More than a batch takes, of different lengths, in the order in which they were sent.
    let words: Vec<String> = (0..200).map(|number| "x".repeat(1 + number % 60)).collect();
    let (vectors, tokens) = embedded(&mut client, embed(words.iter().map(|word| text(word)).collect())).await;
    let expected: Vec<u32> = words.iter().map(|word| word.len() as u32).collect();
    assert_eq!((vectors.len(), &tokens), (200, &expected));
    for vector in &vectors {
        let norm: f32 = vector.iter().map(|number| number * number).sum();
        assert!((norm - 1.0).abs() < 1e-4, "{norm}");
    }
    let apart = |one: &[f32], other: &[f32]| {
        one.iter().zip(other).map(|(one, other)| (one - other).abs()).fold(0.0, f32::max)
    };
    assert!(apart(&vectors[0], &vectors[60]) < 1e-5, "equal texts have equal vectors");
    assert!(apart(&vectors[0], &vectors[1]) > 1e-3, "others have others");
    // Tokens are what texts become.
    let (own, _) = embedded(&mut client, embed(vec![ids(&[u32::from(b'x'); 7])])).await;
    assert!(apart(&own[0], &vectors[6]) < 1e-5);
    // The first numbers, as long as one again.
    let shorter = pb::EmbedRequest { dimensions: Some(5), ..embed(vec![text("x")]) };
    let (short, _) = embedded(&mut client, shorter).await;
    let length = vectors[0][..5].iter().map(|number| number * number).sum::<f32>().sqrt();
    for (short, long) in short[0].iter().zip(&vectors[0]) {
        assert!((short - long / length).abs() < 1e-5, "{short} {long}");
    }
    assert_eq!(short[0].len(), 5);
    let long = "y".repeat(70);
    for cut in [64, -1] {
        let request = pb::EmbedRequest { truncate_prompt_tokens: Some(cut), ..embed(vec![text(&long)]) };
        assert_eq!(embedded(&mut client, request).await.1, [64]);
    }
    for (request, said) in [
        (
            embed(vec![text("a"), text(&long)]),
            "maximum context length is 64 tokens. However, text 1 of the request has 70",
        ),
        (embed(vec![]), "input has 0 texts"),
        (embed(vec![text("a"); MAX_INPUTS + 1]), "input has 2049 texts; send 1 to 2048"),
        (embed(vec![text("")]), "text 0 of the request is empty"),
        (embed(vec![ids(&[1, 260])]), "has token 260, but the model has only 260"),
        (embed(vec![text(&"z".repeat((1 << 20) + 1))]), "has 1048577 bytes, more than the limit of 1048576"),
        (pb::EmbedRequest { dimensions: Some(49), ..embed(vec![text("a")]) }, "dimensions is 49"),
        (pb::EmbedRequest { dimensions: Some(0), ..embed(vec![text("a")]) }, "dimensions is 0"),
        (pb::EmbedRequest { truncate_prompt_tokens: Some(65), ..embed(vec![text("a")]) }, "use 1 to 64"),
    ] {
        refused(client.embed(request).await.unwrap().into_inner().failed, said);
    }
    // Every text of every request is counted, and what was refused.
    for (metric, counted) in [
        ("vllm:prompt_tokens_total", f64::from(expected.iter().sum::<u32>() + 7 + 1 + 2 * 64)),
        ("vllm:request_success_total{engine=\"0\",finished_reason=\"stop\"", 5.0),
        ("russet_engine_request_failures_total{kind=\"invalid_request\"", 5.0),
        ("vllm:num_requests_running", 0.0),
        ("vllm:num_requests_waiting", 0.0),
    ] {
        assert_eq!(engines[0].metric(metric).await, counted, "{metric}");
    }
    // A model that embeds has no scores and no answers.
    let rerank =
        pb::RerankRequest { query: "a".into(), documents: vec!["b".into()], ..pb::RerankRequest::default() };
    refused(client.rerank(rerank).await.unwrap().into_inner().failed, "/v1/embeddings");
    let (_, _, end) = collect(&mut ask(&mut client, say("hi")).await).await;
    let GenerationEvent::Failed(GenerationFailure { kind, message }) = end else { panic!("{end:?}") };
    assert_eq!(kind, FailureKind::InvalidRequest);
    assert!(message.contains("generates none"), "{message}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engine_scores_pairs_and_a_chat_model_does_neither() {
    let random_models::RandomModel { dir, .. } = random_models::bert_cross_encoder();
    let mut lab = EngineHarness::new();
    lab.config.context_tokens = 64;
    let engines = lab.start(dir.path(), &[3]);
    let mut client = lab.client(&engines[0]).await;
    let rerank = |query: &str, documents: &[&str], cut: Option<i32>| pb::RerankRequest {
        query: query.to_owned(),
        documents: documents.iter().map(|&document| document.to_owned()).collect(),
        truncate_prompt_tokens: cut,
        ..pb::RerankRequest::default()
    };
    let asked = rerank("what?", &["a long answer", "b", "a long answer"], None);
    let reply = within("scores", client.rerank(asked)).await.unwrap().into_inner();
    assert_eq!((reply.failed, reply.prompt_tokens), (None, vec![18, 6, 18]));
    let [first, second, third] = reply.scores[..] else { panic!("{:?}", reply.scores) };
    assert!((first - third).abs() < 1e-6 && (first - second).abs() > 1e-6, "{:?}", reply.scores);
    assert!(reply.scores.iter().all(|score| (0.0..=1.0).contains(score)));
    // Both are cut to half where both are long, and the longer one alone where the other has room.
    let long = "w".repeat(100);
    for (query, document) in [(&*long, &*long), ("q", &*long), (&*long, "d")] {
        let reply = client.rerank(rerank(query, &[document], Some(-1))).await.unwrap().into_inner();
        assert_eq!((reply.failed, reply.prompt_tokens), (None, vec![64]));
    }
    let reply = client.rerank(rerank("q", &[&long], None)).await.unwrap().into_inner();
    refused(reply.failed, "text 0 of the request has 101 tokens");
    refused(client.embed(embed(vec![text("a")])).await.unwrap().into_inner().failed, "/v1/rerank");
    drop(engines);

    let chat = model::random_model_dir();
    let engines = EngineHarness::new();
    let lab = engines;
    let engines = lab.start(chat.path(), &[model::LAYERS]);
    let mut client = lab.client(&engines[0]).await;
    refused(client.embed(embed(vec![text("a")])).await.unwrap().into_inner().failed, "/v1/chat/completions");
    let reply = client.rerank(rerank("q", &["d"], None)).await.unwrap().into_inner();
    refused(reply.failed, "neither embeds nor scores");
}
