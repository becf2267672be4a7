//! vLLM's cases for log-probabilities, penalties, `n` and the ends of responses as tables, asked through the gateway.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, ensure};
use russet_tests::cluster::TestCluster;
use serde_json::{Value, json};

use super::path::quickstart;

/// Which requests a case is asked as.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Endpoint {
    Chat,
    Completions,
}

use Endpoint::{Chat, Completions};

impl Endpoint {
    fn path(self) -> &'static str {
        match self {
            Chat => "chat/completions",
            Completions => "completions",
        }
    }

    /// A request of eight tokens, always the most probable ones, with these fields.
    fn body(self, fields: &Value) -> Value {
        let mut body = match self {
            Chat => json!({"messages": [{"role": "user", "content": "What is 17 + 25?"}]}),
            Completions => json!({"prompt": "What is"}),
        };
        let fixed = json!({"model": "smoke", "max_tokens": 8, "temperature": 0, "ignore_eos": true});
        for (name, value) in fixed.as_object().into_iter().chain(fields.as_object()).flatten() {
            body[name] = value.clone();
        }
        body
    }
}

/// Fields that are refused, and the one that the error names.
fn refused() -> Vec<(Endpoint, Value, &'static str)> {
    vec![
        (Completions, json!({"logprobs": 21}), "logprobs"),
        (Completions, json!({"logprobs": 30, "stream": true}), "logprobs"),
        (Completions, json!({"logprobs": -1}), "logprobs"),
        (Completions, json!({"prompt_logprobs": -1}), "prompt_logprobs"),
        (Completions, json!({"prompt_logprobs": 1}), "prompt_logprobs"),
        (Chat, json!({"logprobs": true, "top_logprobs": 21, "stream": true}), "top_logprobs"),
        (Chat, json!({"logprobs": true, "top_logprobs": 30}), "top_logprobs"),
        (Chat, json!({"top_logprobs": 5}), "top_logprobs"),
        (Chat, json!({"prompt_logprobs": 1}), "prompt_logprobs"),
        (Completions, json!({"n": 0}), "n"),
        (Completions, json!({"n": 2, "best_of": 3}), "best_of"),
        (Chat, json!({"n": -1}), "n"),
        (Chat, json!({"n": 1000}), "n"),
        (Chat, json!({"presence_penalty": 2.1}), "presence_penalty"),
        (Chat, json!({"frequency_penalty": -2.1}), "frequency_penalty"),
        (Completions, json!({"repetition_penalty": 0}), "repetition_penalty"),
        (Completions, json!({"repetition_penalty": -1}), "repetition_penalty"),
        (Chat, json!({"logit_bias": {"7": 101}}), "logit_bias"),
        (Chat, json!({"logit_bias": {"seven": 1}}), "logit_bias"),
        (Completions, json!({"allowed_token_ids": [10]}), "allowed_token_ids"),
        (Completions, json!({"bad_words": ["the"]}), "bad_words"),
        (Completions, json!({"include_stop_str_in_output": true}), "include_stop_str_in_output"),
        (Completions, json!({"stop_token_ids": [-1]}), "stop_token_ids"),
        (Chat, json!({"min_p": 1.5}), "min_p"),
        (Chat, json!({"top_p": 1.1}), "top_p"),
        (Chat, json!({"temperature": -0.1}), "temperature"),
        (Chat, json!({"stream_options": 3}), "stream_options"),
    ]
}

/// How few and how many tokens are told at each place.
type TokenRange = (usize, usize);

/// Fields of log-probabilities, and what is told; `None` where nothing is.
fn reported() -> Vec<(Endpoint, Value, Option<TokenRange>)> {
    vec![
        (Completions, json!({}), None),
        (Completions, json!({"logprobs": null}), None),
        (Completions, json!({"logprobs": 0}), Some((1, 1))),
        (Completions, json!({"logprobs": 5}), Some((5, 6))),
        (Completions, json!({"logprobs": 20, "temperature": 2.0, "seed": 3}), Some((20, 21))),
        (Completions, json!({"prompt": [5, 6, 7], "logprobs": 2}), Some((2, 3))),
        (Chat, json!({}), None),
        (Chat, json!({"logprobs": false}), None),
        (Chat, json!({"logprobs": true}), Some((0, 0))),
        (Chat, json!({"logprobs": true, "top_logprobs": 0}), Some((0, 0))),
        (Chat, json!({"logprobs": true, "top_logprobs": 5}), Some((5, 5))),
        (Chat, json!({"logprobs": true, "top_logprobs": 20, "n": 2}), Some((20, 20))),
    ]
}

/// Asks; the status and the body.
async fn ask(cluster: &TestCluster, endpoint: Endpoint, fields: &Value) -> Result<(u16, Value)> {
    let url = format!("{}/{}", cluster.base_url(), endpoint.path());
    let answer = reqwest::Client::new().post(url).json(&endpoint.body(fields)).send().await?;
    let status = answer.status().as_u16();
    let text = answer.text().await?;
    Ok((status, serde_json::from_str(&text).with_context(|| text.clone())?))
}

/// The choices of a response that is not streamed.
async fn choices(cluster: &TestCluster, endpoint: Endpoint, fields: &Value) -> Result<(Vec<Value>, Value)> {
    let (status, body) = ask(cluster, endpoint, fields).await?;
    ensure!(status == 200, "{endpoint:?} with {fields} is {status}: {body}");
    let choices = body["choices"].as_array().cloned().context("no choices")?;
    Ok((choices, body["usage"].clone()))
}

/// The chunks of a response that is streamed.
async fn chunks(cluster: &TestCluster, endpoint: Endpoint, fields: &Value) -> Result<Vec<Value>> {
    let mut fields = fields.clone();
    fields["stream"] = json!(true);
    let url = format!("{}/{}", cluster.base_url(), endpoint.path());
    let text = reqwest::Client::new()
        .post(url)
        .json(&endpoint.body(&fields))
        .send()
        .await?
        .error_for_status()?
        .text()
        .await?;
    let events = text.lines().filter_map(|line| line.strip_prefix("data: "));
    let (end, events): (Vec<&str>, Vec<&str>) = events.partition(|data| *data == "[DONE]");
    ensure!(end.len() == 1, "one end: {text}");
    events.into_iter().map(|data| Ok(serde_json::from_str(data)?)).collect()
}

/// What the tokens of a choice are, and how many are told beside each of them.
fn tokens(endpoint: Endpoint, choice: &Value) -> Option<Vec<(String, f64, usize)>> {
    let logprobs = choice.get("logprobs").filter(|logprobs| !logprobs.is_null())?;
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    match endpoint {
        Chat => {
            let content = list(&logprobs["content"]);
            let token = |one: &Value| {
                Some((
                    one["token"].as_str()?.to_owned(),
                    one["logprob"].as_f64()?,
                    one["top_logprobs"].as_array()?.len(),
                ))
            };
            content.iter().map(token).collect()
        }
        Completions => {
            let all = list(&logprobs["tokens"]).into_iter().zip(list(&logprobs["token_logprobs"]));
            let token = |((token, logprob), top): ((Value, Value), Value)| {
                Some((token.as_str()?.to_owned(), logprob.as_f64()?, top.as_object()?.len()))
            };
            all.zip(list(&logprobs["top_logprobs"])).map(token).collect()
        }
    }
}

fn text(endpoint: Endpoint, choice: &Value) -> String {
    let text = if endpoint == Chat { &choice["message"]["content"] } else { &choice["text"] };
    text.as_str().unwrap_or_default().to_owned()
}

/// The tables, on the smoke model.
pub async fn tables(cluster: &mut TestCluster) -> Result<()> {
    quickstart(cluster).await?;
    for (endpoint, fields, name) in refused() {
        let (status, body) = ask(cluster, endpoint, &fields).await?;
        ensure!(status == 400, "{endpoint:?} with {fields} is {status}: {body}");
        let param = body["error"]["param"].as_str().unwrap_or_default();
        ensure!(param == name, "{endpoint:?} with {fields} names {param:?}: {body}");
    }
    for (endpoint, fields, expected) in reported() {
        for choice in choices(cluster, endpoint, &fields).await?.0 {
            let found = tokens(endpoint, &choice);
            ensure!(found.is_some() == expected.is_some(), "{endpoint:?} with {fields}: {choice}");
            let (Some(found), Some((least, most))) = (found, expected) else { continue };
            ensure!(found.len() == 8, "{endpoint:?} with {fields} tells of {} tokens: {choice}", found.len());
            let fits =
                |(_, logprob, top): &(String, f64, usize)| *logprob <= 0.0 && (least..=most).contains(top);
            ensure!(found.iter().all(fits), "{endpoint:?} with {fields}: {choice}");
        }
    }
    offsets(cluster).await?;
    several(cluster).await?;
    penalties(cluster).await?;
    ends(cluster).await?;
    usage(cluster).await
}

/// The places of tokens in a text are the same in a stream, whatever a stop string withholds.
async fn offsets(cluster: &TestCluster) -> Result<()> {
    let fields = json!({"logprobs": 0, "stop": ["never in it"], "max_tokens": 16});
    let (whole, _) = choices(cluster, Completions, &fields).await?;
    let whole = whole[0]["logprobs"]["text_offset"].as_array().cloned().context("no offsets")?;
    let streamed = chunks(cluster, Completions, &fields).await?;
    let streamed: Vec<Value> = streamed
        .iter()
        .filter_map(|chunk| chunk["choices"][0]["logprobs"]["text_offset"].as_array())
        .flatten()
        .cloned()
        .collect();
    ensure!(whole == streamed && whole.len() == 16, "offsets {whole:?} and in a stream {streamed:?}");
    ensure!(whole[0] == 0 && whole.is_sorted_by_key(|offset| offset.as_u64()), "{whole:?}");
    Ok(())
}

/// `n` responses: in order, each with its end, as different as their seeds; the same ones in a stream.
async fn several(cluster: &TestCluster) -> Result<()> {
    for endpoint in [Chat, Completions] {
        let fields = json!({"n": 3, "temperature": 2.0, "seed": 42, "max_tokens": 20});
        let (all, usage) = choices(cluster, endpoint, &fields).await?;
        let texts: Vec<String> = all.iter().map(|choice| text(endpoint, choice)).collect();
        let distinct: BTreeSet<&String> = texts.iter().collect();
        ensure!(all.len() == 3 && distinct.len() == 3, "{endpoint:?}: three that differ: {texts:?}");
        for (index, choice) in all.iter().enumerate() {
            ensure!(
                choice["index"] == index && choice["finish_reason"] == "length",
                "{endpoint:?}: {choice}"
            );
        }
        ensure!(usage["completion_tokens"] == 60, "{endpoint:?}: {usage}");
        let mut streamed = vec![String::new(); 3];
        let mut ends = 0;
        for chunk in chunks(cluster, endpoint, &fields).await? {
            for choice in chunk["choices"].as_array().into_iter().flatten() {
                let part = if endpoint == Chat { &choice["delta"]["content"] } else { &choice["text"] };
                let index = choice["index"].as_u64().context("no index")? as usize;
                streamed
                    .get_mut(index)
                    .context("a choice too many")?
                    .push_str(part.as_str().unwrap_or_default());
                ends += usize::from(!choice["finish_reason"].is_null());
            }
        }
        ensure!(streamed == texts && ends == 3, "{endpoint:?}: in a stream {streamed:?}, else {texts:?}");
        // Of one token each time there is no choice.
        let (greedy, _) = choices(cluster, endpoint, &json!({"n": 3})).await?;
        let greedy: BTreeSet<String> = greedy.iter().map(|choice| text(endpoint, choice)).collect();
        ensure!(greedy.len() == 1, "{endpoint:?}: the most probable texts are {greedy:?}");
    }
    let two = json!({"prompt": ["What is", "Say"], "n": 2, "logprobs": 0});
    let (all, usage) = choices(cluster, Completions, &two).await?;
    let indices: Vec<&Value> = all.iter().map(|choice| &choice["index"]).collect();
    ensure!(indices == [0, 1, 2, 3], "choices of two prompts: {indices:?}");
    ensure!(all[0]["text"] == all[1]["text"] && all[2]["text"] == all[3]["text"], "by prompt: {all:?}");
    ensure!(usage["completion_tokens"] == 32, "of two prompts: {usage}");
    Ok(())
}

/// Penalties and biases act on what is there and on what is named, and on nothing else.
async fn penalties(cluster: &TestCluster) -> Result<()> {
    let of = async |fields: Value| -> Result<Vec<String>> {
        let mut asked = json!({"logprobs": 0, "max_tokens": 40});
        for (name, value) in fields.as_object().into_iter().flatten() {
            asked[name] = value.clone();
        }
        let (all, _) = choices(cluster, Completions, &asked).await?;
        let tokens = tokens(Completions, &all[0]).context("no tokens")?;
        Ok(tokens.into_iter().map(|(token, ..)| token).collect())
    };
    let most = |tokens: &[String]| {
        let count = |token: &String| tokens.iter().filter(|other| *other == token).count();
        tokens.iter().map(count).max().unwrap_or_default()
    };
    let plain = of(json!({})).await?;
    for (fields, is_more) in [
        (json!({"frequency_penalty": 2.0}), false),
        (json!({"presence_penalty": 2.0}), false),
        (json!({"repetition_penalty": 1.9}), false),
        (json!({"frequency_penalty": -2.0}), true),
        (json!({"presence_penalty": -2.0}), true),
        (json!({"repetition_penalty": 0.1}), true),
    ] {
        let edited = of(fields.clone()).await?;
        let (before, after) = (most(&plain), most(&edited));
        ensure!(edited != plain, "{fields} changes nothing: {edited:?}");
        ensure!(if is_more { after >= before } else { after <= before }, "{fields}: {before} and {after}");
    }
    let all = json!({
        "temperature": 1.2, "presence_penalty": 1.2, "frequency_penalty": 1.2, "repetition_penalty": 1.2,
        "min_p": 0.5, "top_p": 0.5, "top_k": 3, "seed": 1,
    });
    ensure!(of(all).await?.len() == 40, "all of them at once");
    let biased = of(json!({"logit_bias": {"77": 100}})).await?;
    ensure!(biased.iter().collect::<BTreeSet<_>>().len() == 1, "a bias of 100: {biased:?}");
    let first = &biased[0];
    let banned = of(json!({"logit_bias": {"77": -100}, "temperature": 2.0, "seed": 5})).await?;
    ensure!(!banned.contains(first), "a bias of -100 of {first:?}: {banned:?}");
    let hot = |seed: u64| json!({"temperature": 2.0, "seed": seed});
    let (one, same, other) = (of(hot(42)).await?, of(hot(42)).await?, of(hot(43)).await?);
    ensure!(one == same && one != other, "seeds 42, 42 and 43: {one:?} {same:?} {other:?}");
    Ok(())
}

/// Stops, end tokens and how soon they may come.
async fn ends(cluster: &TestCluster) -> Result<()> {
    let of = async |fields: Value| -> Result<(Value, u64)> {
        let (all, usage) = choices(cluster, Completions, &fields).await?;
        Ok((all[0].clone(), usage["completion_tokens"].as_u64().unwrap_or_default()))
    };
    let (plain, _) = of(json!({"max_tokens": 24})).await?;
    let plain = plain["text"].as_str().unwrap_or_default().to_owned();
    let word = plain.split_whitespace().nth(2).context("three words")?.to_owned();
    let (stopped, _) = of(json!({"max_tokens": 24, "stop": word})).await?;
    let before = plain.split(&word).next();
    ensure!(
        stopped["text"].as_str() == before && stopped["finish_reason"] == "stop",
        "a stop at {word:?} of {plain:?}: {stopped}"
    );
    // Of tokens that end it the first one does, in whatever order they are named; not before `min_tokens`.
    let ids = |ids: &[u32]| json!({"logit_bias": {"77": 100}, "stop_token_ids": ids, "max_tokens": 12});
    for order in [[77, 78], [78, 77]] {
        let (choice, tokens) = of(ids(&order)).await?;
        ensure!(choice["finish_reason"] == "stop" && tokens <= 1, "{order:?}: {choice}, {tokens} tokens");
    }
    for least in [0, 1, 5, 12] {
        let fields =
            json!({"ignore_eos": false, "min_tokens": least, "max_tokens": 12, "prompt": "What is 17 + 25?"});
        let (choice, tokens) = of(fields).await?;
        ensure!((least..=12).contains(&tokens), "at least {least}: {tokens} tokens, {choice}");
    }
    Ok(())
}

/// Usage in a stream: only where it is asked for, in a chunk of its own at the end.
async fn usage(cluster: &TestCluster) -> Result<()> {
    for endpoint in [Chat, Completions] {
        for options in [json!({}), json!({"include_usage": false}), json!({"include_usage": null})] {
            let all = chunks(cluster, endpoint, &json!({"stream_options": options})).await?;
            let usage = |chunk: &Value| chunk.get("usage").is_some_and(|usage| !usage.is_null());
            ensure!(!all.iter().any(usage), "{endpoint:?} with {options}: {all:?}");
        }
        let all = chunks(cluster, endpoint, &json!({"stream_options": {"include_usage": true}})).await?;
        let (last, rest) = all.split_last().context("no chunks")?;
        ensure!(rest.iter().all(|chunk| chunk["usage"].is_null()), "{endpoint:?}: {rest:?}");
        let number = |name: &str| last["usage"][name].as_u64().unwrap_or_default();
        let (prompt, response) = (number("prompt_tokens"), number("completion_tokens"));
        ensure!(last["choices"] == json!([]) && response == 8, "{endpoint:?}: {last}");
        ensure!(prompt > 0 && number("total_tokens") == prompt + response, "{endpoint:?}: {last}");
    }
    Ok(())
}
